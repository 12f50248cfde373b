"""Several processes of one command, as torchrun starts them: who this one is, and where they wait for one another."""

import os
from datetime import timedelta

import torch
from torch import distributed

# Longer than any shard of any split takes; a process that dies is noticed at once by its closed connection.
_PATIENCE = timedelta(days=7)


class Ranks:
    """This process among those that torchrun started, or alone.

    rank: 0 to count - 1. local_rank: among those of this machine, local_count in number.
    """

    def __init__(self) -> None:
        """Read the environment; where there are others, meet them. The connection is by gloo, on the CPU."""
        self.rank, self.count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.local_count = int(os.environ.get("LOCAL_WORLD_SIZE", self.count))
        if self.count > 1:
            distributed.init_process_group("gloo", timeout=_PATIENCE)

    def sum(self, value: int) -> int:
        """Wait for all processes and return the sum of what each gave.

        Where another has ended, leaves with status 1 and without a word: that one has said why.
        """
        if self.count == 1:
            return value
        total = torch.tensor(value)
        try:
            distributed.all_reduce(total)
        except RuntimeError:
            raise SystemExit(1) from None
        return int(total)

    def follow_first(self) -> None:
        """In all but rank 0: wait until rank 0 calls `let_follow`, or leave where it failed before."""
        if self.rank > 0:
            self.sum(0)

    def let_follow(self) -> None:
        """In rank 0: let the others pass `follow_first`."""
        if self.rank == 0:
            self.sum(0)
