"""What some losses want besides their flags: noise that a resumed run draws again, how frequent the classes are, and
that the inverse temperature which follows the logits is kept."""

from collections.abc import Callable
from typing import Any

import torch
from numpy.random import SeedSequence
from torch import Tensor, nn

from topk_losses import METHODS


def seed_noise(of: nn.Module, device: torch.device, *numbers: int) -> None:
    """Give a loss or an operator a generator of its own, whose noise these numbers, at least 0, determine."""
    seed = int(SeedSequence(numbers).generate_state(1, "uint64")[0] >> 1)
    of.generator = torch.Generator(device).manual_seed(seed)  # type: ignore[assignment]


def count_classes(loss_fn: nn.Module, method: str, labels: Callable[[], Tensor], num_classes: int) -> None:
    """Tell a loss that wants it how many training labels (N,) int64 each class has, 1 where it has none."""
    if method == "imbalanced_noised_topk":
        loss_fn.class_counts = torch.bincount(labels(), minlength=num_classes).clamp(min=1)  # type: ignore[assignment]


def is_stateless(loss_fn: nn.Module, method: str) -> bool:
    """Whether a loss depends on its arguments alone: it draws no noise, and its temperature follows no logits."""
    return not METHODS[method].stochastic and getattr(loss_fn, "auto", None) is None


def state_of(loss_fn: nn.Module) -> dict[str, Any]:
    """Return what a checkpoint must hold of a loss: the spread that its temperature follows, or nothing."""
    return loss_fn.state_dict() if getattr(loss_fn, "auto", None) is not None else {}


def temperature_of(loss_fn: nn.Module | None) -> dict[str, float]:
    """Return {"inverse_temperature": beta} of a loss whose temperature follows the logits, {} of any other."""
    auto = getattr(loss_fn, "auto", None)
    return {} if auto is None else {"inverse_temperature": auto.value().item()}
