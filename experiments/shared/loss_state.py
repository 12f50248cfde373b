"""What some losses want besides their flags: noise that a resumed run draws again, how frequent the classes are, and an
inverse temperature that changes in training."""

from collections.abc import Mapping
from typing import Any

import torch
from numpy.random import SeedSequence
from torch import Tensor, nn

from topk_losses import METHODS, resolve_settings


def seed_noise(of: nn.Module, device: torch.device, *numbers: int) -> None:
    """Give a loss or an operator a generator of its own, whose noise these numbers, at least 0, determine."""
    seed = int(SeedSequence(numbers).generate_state(1, "uint64")[0] >> 1)
    if getattr(of, "generator", None) is None:  # kept from then on: a graph that was recorded draws from it
        of.generator = torch.Generator(device)  # type: ignore[assignment]
    of.generator.manual_seed(seed)  # type: ignore[operator, union-attr]


def count_classes(loss_fn: nn.Module, method: str, labels: Tensor, num_classes: int) -> None:
    """Tell a loss that wants it how many training labels (N,) int64 each class has, 1 where it has none."""
    if method == "imbalanced_noised_topk":
        loss_fn.class_counts = torch.bincount(labels, minlength=num_classes).clamp(min=1)  # type: ignore[assignment]


def is_stateless(flags: Mapping[str, Any]) -> bool:
    """Whether a loss depends on its arguments alone: it draws no noise, and its temperature does not change."""
    return not METHODS[flags["method"]].stochastic and not isinstance(flags["inverse_temperature"], str)


def ends_of(inverse_temperature: float | str | None) -> tuple[float, float] | None:
    """Return the ends of a schedule such as "0.25:4", None for a number, auto or None."""
    if not isinstance(inverse_temperature, str) or ":" not in inverse_temperature:
        return None
    first, last = map(float, inverse_temperature.split(":"))
    return first, last


def resolved(method: str, inverse_temperature: float | str | None, *others: Any, **settings: Any) -> dict[str, Any]:
    """Return what resolve_settings does, where the inverse temperature may be a schedule such as "0.25:4", too."""
    ends = ends_of(inverse_temperature)
    found = resolve_settings(method, ends[0] if ends else inverse_temperature, *others, **settings)
    return {**found, "inverse_temperature": inverse_temperature} if ends else found


def anneal(
    loss_fn: nn.Module | None, inverse_temperature: float | str | None, elapsed: float, place: Tensor | None = None
) -> None:
    """Set the inverse temperature of a loss or operator to where its schedule is after that share, in [0, 1].

    place: (), where it is written from now on, for a graph to read.
    """
    if ends := ends_of(inverse_temperature):
        value = ends[0] * (ends[1] / ends[0]) ** elapsed
        now = getattr(loss_fn, "inverse_temperature", None)
        if place is None and isinstance(now, Tensor):
            now.fill_(value)  # checked already, which waits for a GPU
        else:
            loss_fn.inverse_temperature = value if place is None else place.fill_(value)  # type: ignore


def temperature_of(loss_fn: nn.Module | None, inverse_temperature: float | str | None) -> dict[str, float]:
    """Return {"inverse_temperature": beta}, its value now, where that changes in training, else {}."""
    if not isinstance(inverse_temperature, str):
        return {}
    auto = getattr(loss_fn, "auto", None)
    return {"inverse_temperature": float(loss_fn.inverse_temperature if auto is None else auto.value())}  # type: ignore
