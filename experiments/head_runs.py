"""The heads that a fine-tuning run trains, one per seed: each with its own folder, checkpoint and history.

Heads are saved one by one, so that any of them can go on alone, with others, or with others than before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.checkpoint import save_checkpoint
from experiments.run_record import utc_now, write_history
from experiments.training_run import restoring, saved_state
from models.heads import HeadStack, head

EVALUATIONS = "evaluations.csv"
CPU_WEIGHTS = 2**23  # most weights in one stack on a CPU: four heads of ImageNet-1K, one of ImageNet-21K-P


@dataclass(eq=False)
class HeadRun:
    """One seed's head: its place on the disk and how far it is."""

    seed: int
    order_seed: int
    name: str
    folder: Path
    weights: dict[str, Tensor] | None = None  # None: not yet begun
    optimizer: dict[str, dict[str, Tensor]] | None = None
    steps: int = 0  # optimizer steps behind it
    history: list[dict[str, float]] = field(default_factory=list)  # one entry per evaluation
    started_utc: str = field(default_factory=utc_now)
    times_resumed: int = 0
    commits: list[str] = field(default_factory=list)


def resume(run: HeadRun, results: Path) -> None:
    """Put a head where its checkpoint left it; leave it at the beginning where there is none."""
    saved = saved_state(run.folder, results, run.name)
    if saved:
        with restoring(run.folder):
            run.weights, run.optimizer = saved["model"], saved["optimizer"]
            run.steps, run.history, run.started_utc = saved["steps"], saved["history"], saved["started_utc"]
            run.times_resumed, run.commits = saved["times_resumed"] + 1, saved["git_commits"]
            write_history(run.folder, run.history, EVALUATIONS)


def save(run: HeadRun, finished: bool) -> None:
    """Write a head's checkpoint and its evaluations."""
    state = {
        "model": run.weights,
        # Nothing continues a finished run: its file keeps the weights alone.
        "optimizer": None if finished else run.optimizer,
        "steps": run.steps,
        "history": run.history,
        "started_utc": run.started_utc,
        "times_resumed": run.times_resumed,
        "git_commits": run.commits,
    }
    save_checkpoint(run.folder, state)
    write_history(run.folder, run.history, EVALUATIONS)


@dataclass(eq=False)
class Stack:
    """Heads that take each step together: one module, one optimizer. training: the module, compiled or not."""

    runs: list[HeadRun]
    heads: HeadStack
    training: nn.Module
    optimizer: torch.optim.Optimizer

    def save(self, finished: bool) -> None:
        """Take the heads' states apart and save each."""
        for number, run in enumerate(self.runs):
            run.weights = self.heads.state_of(number)
            run.optimizer = self.heads.optimizer_state_of(self.optimizer, number)
            save(run, finished)


def stacks_of(
    group: Sequence[HeadRun], shape: Mapping[str, Any], lr: float, device: torch.device, compiled: bool
) -> list[Stack]:
    """Return the heads of a group, in its order, as modules on the device with their optimizers, as they were saved.

    shape: the arguments of models.heads.head. A head that has not begun is initialised under its seed. Raises
    RunError where a checkpoint does not fit.
    """
    heads = []
    for run in group:
        torch.manual_seed(run.seed)
        heads.append(head(**shape))
        if run.weights is not None:
            with restoring(run.folder):
                heads[-1].load_state_dict(run.weights)
    # On a GPU the wider, the better; on a CPU a product of more weights than the caches hold gains nothing, and loses.
    weights = sum(parameter.numel() for parameter in heads[0].parameters())
    size = len(group) if device.type == "cuda" else max(CPU_WEIGHTS // weights, 1)
    stacks = []
    for begin in range(0, len(group), size):
        runs = list(group[begin : begin + size])
        stacked = HeadStack(heads[begin : begin + size]).to(device)
        optimizer = torch.optim.Adam(stacked.parameters(), lr=lr, fused=True)
        if runs[0].optimizer is not None:
            stacked.load_optimizer_states(optimizer, [run.optimizer for run in runs])
        stacks.append(Stack(runs, stacked, torch.compile(stacked) if compiled else stacked, optimizer))
    return stacks
