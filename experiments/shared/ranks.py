"""Several processes of one command, as torchrun starts them: who this one is, and what they do together.

    share = ranks.share(batch_size)                        # this process's slice of every global batch
    (loss_fn(model(images[share]), labels[share]) * ranks.weight(batch_size)).backward()
    ranks.sum_gradients(model.parameters())                # now the gradient of the mean over the global batch
    losses, hits = ranks.total(losses), ranks.total(hits)  # sums and counts, once per epoch

Alone, all of it does nothing, or returns its own. The gradients are summed in one piece and by this module, not by
DistributedDataParallel: its buckets are arranged anew after the first backward pass, and with three processes or more a
resumed run would differ from an undisturbed one in the last bits.

What goes wrong is said once: `finish` asks `speaks`, and the first process that fails answers for all.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed.rendezvous import rendezvous
from tqdm import tqdm

from data.program import CommandLineError, ProgramError
from experiments.shared.environment import resolve_device

# Longer than any shard of any split takes; a process that dies is noticed at once by its closed connection.
_PATIENCE = timedelta(days=7)
_MEETING = timedelta(minutes=30)  # torchrun starts all of them at once
_VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

Value = TypeVar("Value")


class OthersEnded(ProgramError):
    """Another process has ended, and so does this one. The message is for where that said nothing."""


class Ranks:
    """This process among those that torchrun started, or alone.

    rank: 0 to count - 1. local_rank: among those of this machine, local_count in number.
    """

    def __init__(self) -> None:
        """Read the environment; where there are others, meet them: tensors on a GPU travel by NCCL, others by gloo.

        Raises CommandLineError for an environment that is not as torchrun makes it, ProgramError where none come.
        """
        try:
            self.count, self.rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
            self.local_count = int(os.environ.get("LOCAL_WORLD_SIZE", self.count))
            self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
            possible = 0 <= self.rank < self.count and 0 <= self.local_rank < self.local_count <= self.count
            if self.count > 1:
                possible &= 0 < int(os.environ["MASTER_PORT"]) < 2**16 and {"RANK", "MASTER_ADDR"} <= os.environ.keys()
        except (KeyError, ValueError):
            possible = False
        if not possible:
            found = ", ".join(f"{name}={os.environ[name]!r}" for name in _VARIABLES if name in os.environ)
            told = f"these environment variables are not as torchrun sets them: {found}"
            raise CommandLineError(f"{told}; start several processes by torchrun, or unset the variables")
        self.is_first = self.rank == 0  # it writes and prints
        if self.count == 1:
            return
        nccl = torch.cuda.is_available() and distributed.is_nccl_available()
        try:
            store, _, _ = next(rendezvous("env://", self.rank, self.count, timeout=_MEETING))
            store.set_timeout(_PATIENCE)
            # Under torchrun it is kept outside these processes, and so outlives any of them.
            self._store = distributed.PrefixStore("ended", store)
            group = {"store": distributed.PrefixStore("group", store), "rank": self.rank, "world_size": self.count}
            distributed.init_process_group("cpu:gloo,cuda:nccl" if nccl else "gloo", timeout=_PATIENCE, **group)
            # Who goes wrong from here on does not leave another in the middle of the meeting.
            distributed.all_gather_object([None] * self.count, self.rank)
        except RuntimeError as error:
            place, reason = "{MASTER_ADDR}:{MASTER_PORT}".format(**os.environ), str(error).partition("\n")[0]
            raise ProgramError(f"{self.count} processes did not meet at {place}: {reason}") from None

    def say(self, line: str, by_each: bool = False) -> None:
        """Print a line at once, above the bars where there are any: the first process alone does."""
        if self.is_first or by_each:
            tqdm.write(line)
            sys.stdout.flush()

    def device(self, name: str) -> torch.device:
        """Return the device of --device; of several processes each has the GPU of its number. CommandLineError."""
        if self.count == 1 or name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
            return resolve_device(name)
        own, there = "each process of torchrun has a GPU of its own", torch.cuda.device_count()
        if name.startswith("cuda:"):
            raise CommandLineError(f"{own}: give --device cuda, got {name}")
        if self.local_rank >= there > 0:
            told = f"{self.local_count} processes were started on a machine with {there}"
            raise CommandLineError(f"{own}: {told}; lower --nproc_per_node, or give --device cpu")
        return resolve_device(f"cuda:{self.local_rank}" if name in ("auto", "cuda") else name)

    def share(self, length: int) -> slice:
        """Return this process's part of a batch or a split: contiguous, and as long as any other's or one longer."""
        return slice(length * self.rank // self.count, length * (self.rank + 1) // self.count)

    def weight(self, length: int) -> float:
        """Return what a mean over this process's share counts for in the mean over the whole: 1 / count, or near it."""
        share = self.share(length)
        return (share.stop - share.start) / length

    # Together: each of these waits for all processes, and raises OthersEnded where one is no more.

    def from_first(self, ask: Callable[[], Value]) -> Value:
        """Return what `ask` returns in rank 0, where alone it is called; anything that can be pickled, on the CPU."""
        answer: list[Any] = [ask() if self.is_first else None]
        self._together(distributed.broadcast_object_list, answer, 0)
        return answer[0]

    def gathered(self, value: Value) -> list[Value]:
        """Return what each process gave, by rank; anything that can be pickled, on the CPU."""
        values: list[Any] = [value] * self.count
        self._together(distributed.all_gather_object, values, value)
        return values

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes, equal in all; the given one is overwritten."""
        self._together(distributed.all_reduce, tensor)
        return tensor

    @torch.no_grad()
    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Give every process rank 0's values of a model's parameters or buffers."""
        for tensor in tensors if self.count > 1 else ():
            received = tensor.contiguous()
            self._together(distributed.broadcast, received, 0)
            tensor.copy_(received)

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Replace each gradient by its sum over the processes; of losses weighted by `weight`, that of the batch.

        The order of the sums depends on the shapes of the parameters and on nothing else.
        """
        if self.count == 1:
            return
        parameters = [each for each in parameters if each.grad is not None]
        # A gradient has the strides of its parameter: laid out as it lies in memory, nothing is transposed.
        flat = torch.cat([each.grad.as_strided((each.numel(),), (1,)) for each in parameters])
        self.total(flat)
        offset = 0
        for each in parameters:
            each.grad = flat.as_strided(each.shape, each.stride(), offset)
            offset += each.numel()

    def _together(self, collective: Callable[..., Any], *arguments: Any) -> None:
        try:
            if self.count > 1:
                collective(*arguments)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise OthersEnded(f"another process of this run has ended without a word ({reason})") from None

    def follow_first(self) -> None:
        """In all but rank 0: wait until rank 0 calls `let_follow`, or leave where it failed before."""
        if not self.is_first:
            self.gathered(0)

    def let_follow(self) -> None:
        if self.is_first:
            self.gathered(0)

    def speaks(self) -> bool:
        """Note that this process fails; return whether it is the first, and so says why."""
        if self.count == 1:
            return True
        # torchrun stops all when one has ended: not before a sentence is complete.
        for stop in (signal.SIGINT, signal.SIGTERM):
            signal.signal(stop, signal.SIG_IGN)
        try:
            return self._store.add("number", 1) == 1
        except RuntimeError:  # without torchrun, the store ends with rank 0
            return False

    def close(self) -> None:
        """Part from the others, at the end of a run that succeeded."""
        if self.count > 1:
            distributed.destroy_process_group()
