"""The heads that a fine-tuning run trains, one per configuration and seed: each with its folder, checkpoint, history.

Heads are saved one by one, so that any of them can go on alone, with others, or with others than before.
"""

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import NotRequired

from data.embeddings import EmbeddingBatches
from experiments.shared.checkpoint import PREVIOUS, RUN, Form, go_back, history_of, load_checkpoint, save_checkpoint
from experiments.shared.command_line import RunError
from experiments.shared.loss_state import anneal, is_stateless, seed_noise, state_of, temperature_of
from experiments.shared.metrics import EVALUATION
from experiments.shared.ranks import Ranks
from experiments.shared.run_record import utc_now, write_history
from experiments.shared.training_run import diverged, restoring, saved_state
from models.heads import HeadStack, head

EVALUATIONS = "evaluations.csv"
_HISTORY = history_of((*EVALUATION, "step", "train_steps", "num_heads"))
HEAD: Form = {**RUN, "history": _HISTORY, "together": NotRequired[list[str]], "loss": NotRequired[dict[str, Any]]}
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
    loss: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)  # one entry per evaluation
    started_utc: str = field(default_factory=utc_now)
    times_resumed: int = 0
    commits: list[str] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Optimizer steps behind it, when it was evaluated last."""
        return steps_of(self.history)


def steps_of(history: Sequence[Mapping[str, float]]) -> int:
    """Return the optimizer steps behind the last evaluation of a history."""
    return int(history[-1]["step"]) if history else 0


def saved_states(runs: Sequence[HeadRun], results: Path) -> list[dict[str, Any] | None]:
    """Return the checkpoint from which each head goes on, None where it begins. Raises RunError.

    Where the last command was killed between the saves of heads that took their steps together, or a checkpoint was
    damaged, those that are ahead of the others go back to them by a save: together again, with the same bits.
    """
    states = {run.name: saved_state(run.folder, results, run.name, HEAD) for run in runs}
    steps = {name: steps_of(saved["history"]) if saved else 0 for name, saved in states.items()}
    for run in runs:
        together = (states[run.name] or {}).get("together", [])
        behind = min(steps[name] for name in (run.name, *together) if name in steps)
        if behind < steps[run.name]:
            previous = load_checkpoint(run.folder, HEAD, (PREVIOUS,))
            if behind == (steps_of(previous["history"]) if previous else 0):
                go_back(run.folder)
                states[run.name], steps[run.name] = previous, behind
    return [states[run.name] for run in runs]


def resume(run: HeadRun, saved: Mapping[str, Any] | None) -> None:
    """Put a head where its checkpoint left it; leave it at the beginning where there is none."""
    if saved:
        with restoring(run.folder):
            run.weights, run.optimizer, run.loss = saved["model"], saved["optimizer"], saved.get("loss", {})
            run.history, run.started_utc = saved["history"], saved["started_utc"]
            run.times_resumed, run.commits = saved["times_resumed"] + 1, saved["git_commits"]


def save(run: HeadRun, together: Sequence[HeadRun], finished: bool) -> None:
    """Write a head's checkpoint and its evaluations. together: the heads of its last pass, itself among them."""
    state = {
        "model": run.weights,
        # Nothing continues a finished run: its file keeps the weights alone.
        "optimizer": None if finished else run.optimizer,
        "loss": run.loss,
        "history": run.history,
        "together": [each.name for each in together],
        "started_utc": run.started_utc,
        "times_resumed": run.times_resumed,
        "git_commits": run.commits,
    }
    save_checkpoint(run.folder, state)
    write_history(run.folder, run.history, EVALUATIONS)


@dataclass(eq=False)
class Stack:
    """Heads of one configuration that take each step together: one module, one loss, one optimizer.

    training, training_loss: the module and the loss, compiled or not. own_losses: of a loss that draws noise or whose
    temperature changes, a copy for each head, so that its company changes nothing, and of the official one, which gives
    means; otherwise None.
    """

    recipe: Recipe
    runs: list[HeadRun]
    heads: HeadStack
    training: nn.Module
    training_loss: nn.Module
    optimizer: torch.optim.Optimizer
    own_losses: list[nn.Module] | None = None

    def seed_noise(self, *numbers: int) -> None:
        """Determine the noise of each head's loss by its seed and these numbers."""
        for run, own in zip(self.runs, self.own_losses or []):
            seed_noise(own, self.heads.weights[0].device, run.seed, *numbers)

    def anneal(self, elapsed: float) -> None:
        """Set the inverse temperature of each head's loss to where its schedule is after that share of the steps."""
        for own in self.own_losses or []:
            anneal(own, self.recipe.flags["inverse_temperature"], elapsed)

    def temperatures(self) -> list[dict[str, float]]:
        """Return of each head what temperature_of returns."""
        of_loss = self.recipe.flags["inverse_temperature"]
        return [temperature_of(own, of_loss) for own in self.own_losses or [self.recipe.loss_fn] * len(self.runs)]

    def take_apart(self) -> None:
        """Give each head its part of the weights and of the optimizer's state."""
        for number, run in enumerate(self.runs):
            run.weights = self.heads.state_of(number)
            run.optimizer = self.heads.optimizer_state_of(self.optimizer, number)
            run.loss = state_of(self.own_losses[number]) if self.own_losses else {}


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
        is_shared = recipe.implementation == "ours" and is_stateless(recipe.flags)
        training_loss = torch.compile(recipe.loss_fn) if compiled and is_shared else recipe.loss_fn
        for begin in range(0, len(runs), size):
            part = runs[begin : begin + size]
            stacked = HeadStack(heads[begin : begin + size]).to(device)
            optimizer = torch.optim.Adam(stacked.parameters(), lr=recipe.lr, fused=True)
            if part[0].optimizer is not None:
                with restoring(part[0].folder):
                    stacked.load_optimizer_states(optimizer, [run.optimizer for run in part])
            # Compiled, the last layer would not look at its gradient, which on a CPU gains more.
            training = torch.compile(stacked) if compiled and device.type == "cuda" else stacked
            own = None if is_shared else [copy.deepcopy(recipe.loss_fn) for _ in part]
            for run, loss_fn in zip(part, own or []):
                with restoring(run.folder):
                    if run.loss:
                        loss_fn.load_state_dict(run.loss)
            stacks.append(Stack(recipe, part, stacked, training, training_loss, optimizer, own))
    return stacks


def initial_head(run: HeadRun, shape: Mapping[str, Any]) -> nn.Sequential:
    """Return a head as it was saved, or initialised under its seed. Raises RunError where a checkpoint does not fit."""
    torch.manual_seed(run.seed)
    made = head(**shape)
    if run.weights is not None:
        with restoring(run.folder):
            made.load_state_dict(run.weights)
    return made


def mean_losses(loss_fn: nn.Module | Sequence[nn.Module], logits: Tensor, labels: Tensor) -> Tensor:
    """Return each head's mean loss (heads,) of logits (heads, batch, n) and labels (heads, batch).

    loss_fn: one for all heads, with the reduction "none", or one for each.
    """
    if isinstance(loss_fn, Sequence):
        return torch.stack([own(*each).mean() for own, *each in zip(loss_fn, logits, labels)])
    # One call, in the order in which shared embeddings leave the logits in memory: nothing is copied.
    samples = logits.transpose(0, 1).flatten(0, 1), labels.T.flatten()  # (batch * heads, n), (batch * heads,)
    # Each head's losses side by side: its sum is rounded as it is alone.
    return loss_fn(*samples).view(labels.T.shape).T.contiguous().mean(1)


def check_finite(
    losses: Tensor, group: Sequence[HeadRun], where: str, rows: EmbeddingBatches, ranks: Ranks | None = None
) -> None:
    """Raise RunError if one of the heads' losses (heads,) is not finite: for want of finite rows, or of the head.

    rows: those that the losses are of, divided among `ranks` where these are given.
    """
    if losses.isfinite().all():
        return
    broken = broken_row(rows)
    for each in ranks.gathered(broken) if ranks else [broken]:
        if each:
            raise RunError(each)
    number = int(losses.isfinite().int().argmin())
    raise diverged(group[number].recipe.method, losses[number].item(), f"{where}, seed {group[number].seed}")


def broken_row(rows: EmbeddingBatches) -> str:
    """Return a sentence on the first of the rows that holds a number which is not finite, "" where there is none."""
    for number, (embeddings, _) in enumerate(rows.in_order()):
        finite = embeddings.isfinite()  # (batch, d)
        if not finite.all():
            which, column = (~finite).nonzero()[0].tolist()
            return (
                f"row {int(rows.rows[number * rows.batch_size + which])} of the split {rows.split.name} of "
                f"{rows.split.folder} holds {embeddings[which, column].item()}: nothing is recorded. Make these "
                "embeddings again, or leave such rows out"
            )
    return ""
