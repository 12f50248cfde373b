"""The heads that a fine-tuning run trains, one per configuration and seed: each with its folder, checkpoint, history.

Heads are saved one by one, so that any of them can go on alone, with others, or with others than before.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.shared.checkpoint import save_checkpoint
from experiments.shared.run_record import utc_now, write_history
from experiments.shared.training_run import restoring
from models.heads import HeadStack, head

EVALUATIONS = "evaluations.csv"
CPU_WEIGHTS = 2**23  # most weights in one stack on a CPU: four heads of ImageNet-1K, one of ImageNet-21K-P


@dataclass(eq=False)
class Recipe:
    """One configuration of a command. flags: all of its flags, resolved; loss_fn: with the reduction "none"."""

    flags: Mapping[str, Any]
    loss_fn: nn.Module

    @property
    def method(self) -> str:
        return self.flags["method"]

    @property
    def implementation(self) -> str:
        return self.flags["implementation"]

    @property
    def lr(self) -> float:
        return self.flags["lr"]


@dataclass(eq=False)
class HeadRun:
    """One seed's head of a configuration: its flags as its row has them, its place on the disk, how far it is."""

    recipe: Recipe
    seed: int
    order_seed: int
    flags: dict[str, Any]
    name: str
    folder: Path
    weights: dict[str, Tensor] | None = None  # None: not yet begun
    optimizer: dict[str, dict[str, Tensor]] | None = None
    steps: int = 0  # optimizer steps behind it
    history: list[dict[str, float]] = field(default_factory=list)  # one entry per evaluation
    started_utc: str = field(default_factory=utc_now)
    times_resumed: int = 0
    commits: list[str] = field(default_factory=list)


def resume(run: HeadRun, saved: Mapping[str, Any] | None) -> None:
    """Put a head where its checkpoint left it; leave it at the beginning where there is none."""
    if saved:
        with restoring(run.folder):
            run.weights, run.optimizer = saved["model"], saved["optimizer"]
            run.steps, run.history, run.started_utc = saved["steps"], saved["history"], saved["started_utc"]
            run.times_resumed, run.commits = saved["times_resumed"] + 1, saved["git_commits"]


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
    """Heads of one configuration that take each step together: one module, one loss, one optimizer.

    training, training_loss: the module and the loss, compiled or not.
    """

    recipe: Recipe
    runs: list[HeadRun]
    heads: HeadStack
    training: nn.Module
    training_loss: nn.Module
    optimizer: torch.optim.Optimizer

    def take_apart(self) -> None:
        """Give each head its part of the weights and of the optimizer's state."""
        for number, run in enumerate(self.runs):
            run.weights = self.heads.state_of(number)
            run.optimizer = self.heads.optimizer_state_of(self.optimizer, number)


def stacks_of(group: Sequence[HeadRun], shape: Mapping[str, Any], device: torch.device, compiled: bool) -> list[Stack]:
    """Return the heads of a group, in its order, as modules on the device with their optimizers, as they were saved.

    group: the heads of a configuration are neighbours. shape: the arguments of models.heads.head. A head that has not
    begun is initialised under its seed. Raises RunError where a checkpoint does not fit.
    """
    stacks = []
    # A product is as wide as in a command of one configuration: no wider one is faster on a CPU, and the bits are the
    # same. What configurations share is each batch, on its way from the disk to the product.
    for recipe, runs in itertools.groupby(group, key=lambda run: run.recipe):
        runs = list(runs)
        heads = [initial_head(run, shape) for run in runs]
        # On a GPU the wider, the better; on a CPU a product of more weights than the caches hold gains nothing, and
        # loses.
        weights = sum(parameter.numel() for parameter in heads[0].parameters())
        size = len(runs) if device.type == "cuda" else max(CPU_WEIGHTS // weights, 1)
        # The loss is compiled with the heads' number of rows, and evaluated eagerly.
        compilable = compiled and recipe.implementation == "ours"
        training_loss = torch.compile(recipe.loss_fn) if compilable else recipe.loss_fn
        for begin in range(0, len(runs), size):
            part = runs[begin : begin + size]
            stacked = HeadStack(heads[begin : begin + size]).to(device)
            optimizer = torch.optim.Adam(stacked.parameters(), lr=recipe.lr, fused=True)
            if part[0].optimizer is not None:
                stacked.load_optimizer_states(optimizer, [run.optimizer for run in part])
            # Compiled, the last layer would not look at its gradient, which on a CPU gains more.
            training = torch.compile(stacked) if compiled and device.type == "cuda" else stacked
            stacks.append(Stack(recipe, part, stacked, training, training_loss, optimizer))
    return stacks


def initial_head(run: HeadRun, shape: Mapping[str, Any]) -> nn.Sequential:
    """Return a head as it was saved, or initialised under its seed. Raises RunError where a checkpoint does not fit."""
    torch.manual_seed(run.seed)
    made = head(**shape)
    if run.weights is not None:
        with restoring(run.folder):
            made.load_state_dict(run.weights)
    return made
