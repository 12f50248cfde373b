"""The objective of a run: the loss, its temperature during training, the noise that it draws, and its checks.

    objective = Objective(config, build_loss(config, num_classes, device), device)
    objective.draw_noise_by(seed, epoch, rank)              # at the start of an epoch
    objective.set_progress(0.25)                            # before a step: a quarter of the training is done
    loss = objective(logits, labels)
    check_finite(loss.item(), "in epoch 1")

Its settings are those with the role LOSS in settings.py.
"""

import inspect
import math
import sys
from argparse import Namespace
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from numpy.random import SeedSequence
from torch import Tensor, nn

from experiments.common import settings
from experiments.common.operators import BoundOperator
from topk_losses import (
    METHODS,
    AutoTemperature,
    SortedSoftTopK,
    TopKCrossEntropyLoss,
    make_loss,
    make_operator,
    resolve_settings,
)
from topk_losses.checks import check_k
from topk_losses.classification import CommonSettings, own_settings

LOSS_SETTINGS = settings.with_role(settings.LOSS)
FLAGS = {"T": "noise_matrix"}  # arguments of losses that a flag of another name gives
OPERATOR_SETTINGS = ("inverse_temperature", "distribution", "art_lambda")


class Schedule(NamedTuple):
    """An inverse temperature that grows or falls by equal factors, from start to end; start alone if it is constant."""

    start: float | str | None
    end: float | None = None

    @classmethod
    def parse(cls, value: float | str | None) -> "Schedule":
        """Read a number, "auto", None, or a text such as "0.25:4"."""
        if isinstance(value, str) and ":" in value:
            start, end = value.split(":")
            return cls(float(start), float(end))
        return cls(value)

    @property
    def changes(self) -> bool:
        return self.end is not None

    def at(self, progress: float) -> float:
        """The inverse temperature when this share of the training, in [0, 1], is done."""
        return self.start * (self.end / self.start) ** progress  # type: ignore[operator]


def published_p_k(method: str) -> list[float]:
    """P_K without --p_k, as in Table 1: top-1 for losses without a k, top-5 for those of one, else even."""
    takes = METHODS[method].takes
    if takes == "top-1":
        return [1.0, 0.0, 0.0, 0.0, 0.0]
    if takes == "one k":
        return [0.0, 0.0, 0.0, 0.0, 1.0]
    return [0.2, 0.2, 0.2, 0.2, 0.2]


def fill_in_loss(
    args: Namespace, top1_mode: str, inverse_temperatures: Mapping[str, float], m: int | None = None
) -> dict[str, Any]:
    """The settings of the loss, defaults filled in: the script's (top1_mode, temperatures, m), then the library's.

    Raises:
        ValueError: a setting that the method does not have, or that does not fit.
    """
    filled = {item.name: getattr(args, item.name, None) for item in LOSS_SETTINGS}
    method = filled["method"]
    if filled["p_k"] is None:
        filled["p_k"] = published_p_k(method)
    if METHODS[method].operator is not None:
        filled["m"] = filled["m"] or m
        filled["top1_mode"] = filled["top1_mode"] or top1_mode
    else:
        if filled["m"]:  # as published commands pass it to every row of a table
            print(f"note: --m is left out, since {method} sorts nothing", file=sys.stderr, flush=True)
        filled["m"] = None
    if method == "forward_correction" and filled["noise_rate"] == 0:
        raise ValueError("forward_correction with --noise_rate 0 is softmax_cross_entropy: take that method")
    return filled | fill_in_operator(args, inverse_temperatures, filled["top1_mode"])


def fill_in_operator(
    args: Namespace, inverse_temperatures: Mapping[str, float], top1_mode: str | None = None
) -> dict[str, Any]:
    """The settings inverse_temperature, distribution, art_lambda and top1_mode, defaults filled in.

    Raises:
        ValueError: a setting that the method does not have, or that does not fit.
    """
    temperature = args.inverse_temperature or inverse_temperatures.get(args.method)
    schedule = Schedule.parse(temperature)
    filled = resolve_settings(args.method, schedule.start, args.distribution, args.art_lambda, top1_mode)
    if schedule.changes:
        filled["inverse_temperature"] = temperature
    return filled


def build_loss(config: Mapping[str, Any], num_classes: int | None, device: torch.device, **more: Any) -> nn.Module:
    """Build the loss of a configuration, of which the settings with the role LOSS are used.

    Args:
        num_classes: None where it varies.
        device: where the logits are.
        more: other arguments of make_loss, such as T.

    Raises:
        ValueError: the settings do not fit one another, the loss, or the number of classes.
    """
    schedule = Schedule.parse(config["inverse_temperature"])
    arguments = settings.used(config, LOSS_SETTINGS) | more
    if config.get("implementation") == "difftopk":
        from experiments.common.official_loss import build_official_loss  # an optional package

        if schedule.changes:
            raise ValueError("difftopk has no temperature schedule: leave it out, or take --implementation ours")
        return build_official_loss(arguments, num_classes, device)
    if schedule.changes:
        arguments["inverse_temperature"] = schedule.start
    if METHODS[config["method"]].expects == "class_counts":
        arguments["class_counts"] = torch.ones(num_classes)  # until Objective.count_classes has counted them
    try:
        loss_fn = make_loss(**arguments, num_classes=num_classes)
    except TypeError:
        refuse_flags(config["method"], arguments)
        raise
    if schedule.changes and not hasattr(loss_fn, "inverse_temperature"):
        raise ValueError(f"the temperature of {config['method']} is fixed: give one number")
    return loss_fn.to(device)


def refuse_flags(method: str, arguments: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the flags that a method takes, for those of other methods."""
    loss = METHODS[method].loss or TopKCrossEntropyLoss
    own = own_settings(loss)
    of_all = [*inspect.signature(make_loss).parameters, *CommonSettings.__annotations__]
    wrong = [name for name in arguments if name not in own and name not in of_all]
    if not wrong:
        return
    names = [item.name for item in LOSS_SETTINGS if item.name in own and item.name != "method"]
    if loss.temperature_name in own:
        names = ["inverse_temperature", *(name for name in names if name != loss.temperature_name)]
    if "T" in own:
        names.append(FLAGS["T"])
    taken = [f"--{name}" for name in names]
    refused = [f"--{FLAGS.get(name, name)}" for name in wrong]
    raise ValueError(f"{method} does not take {', '.join(refused)}; it takes {', '.join(taken) or 'none of its own'}")


def build_operator(config: Mapping[str, Any], num_scores: int, k: int, sorted: bool = False) -> BoundOperator:
    """Build a relaxed top-k operator with a row for each of k ranks. Raises ValueError for settings that do not fit.

    Args:
        sorted: soft_topk with a target point for each rank, by which Xie et al. tell the ranks apart.
    """
    temperature = Schedule.parse(config["inverse_temperature"]).start
    if temperature == "auto":
        temperature = None
    if sorted:
        return BoundOperator(SortedSoftTopK(), k, temperature)
    operator = make_operator(config["method"], config["distribution"], config["art_lambda"])
    return BoundOperator(operator, check_k(k, num_scores), temperature)


def noise_generator(device: torch.device, *numbers: int) -> torch.Generator:
    """A generator that draws the same noise whenever these numbers (seed, epoch, rank) are the same."""
    return torch.Generator(device).manual_seed(mixed(*numbers))


def seed_all(*numbers: int) -> None:
    """Let whatever has no generator of its own draw the same whenever these numbers (seed, update) are the same."""
    torch.manual_seed(mixed(*numbers))


def mixed(*numbers: int) -> int:
    """Return one seed for several numbers. A CPU takes 32 bits of it: a sum or a shift would lose some of them."""
    state = SeedSequence(numbers).generate_state(1, "uint64")
    return int(state[0]) >> 1


def check_finite(value: float, where: str) -> None:
    """Raise FloatingPointError, with advice, for a loss that is not finite."""
    if not math.isfinite(value):
        raise FloatingPointError(
            f"the loss became {value} {where}; nothing is recorded. Try a smaller --lr, --precision fp32, or another "
            "--inverse_temperature"
        )


class Objective:
    """A loss with all that training does to it.

    Args:
        config: settings of a run.
        loss_fn: its loss, a module; its state is part of a checkpoint.
        device: where the logits are.
    """

    def __init__(self, config: Mapping[str, Any], loss_fn: nn.Module, device: torch.device) -> None:
        self.method: str = config["method"]
        self.loss_fn = loss_fn
        self.device = device
        self.schedule = Schedule.parse(config["inverse_temperature"])
        self.reports_temperature = isinstance(config["inverse_temperature"], str)

    def __call__(self, *inputs: Tensor | None) -> Tensor:
        return self.loss_fn(*inputs)

    def train(self) -> None:
        self.loss_fn.train()

    def eval(self) -> None:
        self.loss_fn.eval()

    def count_classes(self, labels: Tensor, num_classes: int) -> None:
        """Give a loss that expects class_counts the number of training labels (N,) in each class, at least 1."""
        if METHODS[self.method].expects == "class_counts":
            counts = torch.bincount(labels, minlength=num_classes)  # (num_classes,)
            self.loss_fn.class_counts = counts.clamp(min=1)

    def draw_noise_by(self, *numbers: int) -> None:
        """Draw the same noise whenever these numbers (seed, epoch, rank) are the same."""
        if METHODS[self.method].stochastic:
            self.loss_fn.generator = noise_generator(self.device, *numbers)

    def set_progress(self, progress: float) -> None:
        """Set the temperature of a schedule when this share of the training, in [0, 1], is done."""
        if self.schedule.changes:
            self.loss_fn.inverse_temperature = self.schedule.at(progress)

    def temperature(self) -> dict[str, float]:
        """The column of an inverse temperature that changes during training; none for a constant one."""
        if not self.reports_temperature:
            return {}
        value = self.loss_fn.inverse_temperature
        if isinstance(value, AutoTemperature):
            value = value.value()
        return {"inverse_temperature": float(value)}
