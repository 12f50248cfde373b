"""Inverse temperatures: a number, a tensor that is learned or scheduled, or "auto", which follows the logits.

The effect of a temperature depends on the distances between the scores, which grow in training and differ between
networks. Multiplied by the standard deviation of the logits over the classes, the best inverse temperatures of a method
agree (docs/findings/temperature-study.md).
"""

from collections.abc import Callable

import torch
import torch.distributed
from torch import Tensor, nn
from typing_extensions import Self

from topk_losses.checks import AUTO, check_inverse_temperature, check_positive, current_inverse_temperature
from topk_losses.compilers import has_own_dispatch, is_wrapped

MOMENTUM = 0.1  # of the running mean: fast, since logits grow fast in the first steps
# The inverse temperature never exceeds this times the default. Without a bound nothing in the loss makes the logits
# grow: a network learns less the harder it begins, and a last layer of zeros has no standard deviation at all.
MOST = 2.0
# A class that lies this deep below the highest one, and ten times as deep as the other classes reach, holds a mask
# value, such as -1e4 or the lowest number of a format.
DEPTH_OF_MASK = 500.0
# Where a loss kept "auto" before it was called inverse_temperature.
FORMER_NAME = "auto."


def unmasked_classes(scores: Tensor) -> Tensor:
    """Tell the classes (rows, n) bool that take part from those at -inf or at a large negative mask value."""
    depth = scores.amax(1, keepdim=True) - scores  # (rows, n), NaN or inf for a row that is spoilt
    is_close = depth < DEPTH_OF_MASK
    reach = depth.masked_fill(~is_close, 0).amax(1, keepdim=True)  # (rows, 1)
    return (scores > -torch.inf) & (is_close | (depth <= 10 * reach))


class KeepsPrecision(nn.Module):
    """A module whose own buffers move to another device, and keep their precision.

    Half precision would stop a running mean, round a P_K and overflow the counts of classes.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            if not buffer.is_meta:
                setattr(self, name, buffer.to(getattr(self, name).device))
        return self


class AutoTemperature(KeepsPrecision):
    """Inverse temperature that follows the standard deviation of the logits over the classes.

    Its value is `target` over a running mean of this standard deviation: over the rows that count of the batches in
    training mode, and over all processes of torch.distributed. Two float32 buffers hold the mean, so that the state
    dict and an average of buffers have it: `weight`, 0 before the first batch and 1 from then on, and `spread`, the
    mean times `weight`.

    Args:
        target: inverse temperature times standard deviation, above 0.
        default: inverse temperature before the first batch, above 0. The value never exceeds twice the default.
    """

    spread: Tensor
    weight: Tensor

    def __init__(self, target: float, default: float) -> None:
        super().__init__()
        self.target = check_positive("target", target)
        self.default = check_positive("default", default)
        self.register_buffer("spread", torch.zeros((), dtype=torch.float32, device="cpu"))
        self.register_buffer("weight", torch.zeros((), dtype=torch.float32, device="cpu"))

    @torch.no_grad()
    def observe(self, scores: Tensor, is_counted: Tensor | None = None, *, finite_masks: bool = True) -> None:
        """Update the running mean by a batch of logits, in training mode only, without waiting for the device.

        Under torch.func only a buffer that is transformed itself is updated; fake tensors have no numbers to follow.

        Args:
            scores: (rows, n) float. Rows with NaN or +inf, and classes at -inf or at a mask value, do not count.
            is_counted: (rows,) bool, the rows that count; None: all.
            finite_masks: whether a large negative number is a mask value, such as -1e4. False for scores that may lie
                as far apart, such as squared distances.
        """
        if not self.training or not self._can_follow(scores):
            return
        if self.spread.device != scores.device:
            self.to(scores.device)
        is_unmasked = scores > -torch.inf  # (rows, n)
        if finite_masks:
            is_unmasked = unmasked_classes(scores)
        standard_deviations = row_standard_deviations(scores, is_unmasked)  # (rows,), NaN for rows without one
        is_valid = standard_deviations.isfinite()
        if is_counted is not None:
            is_valid = is_valid & is_counted
        total = standard_deviations.where(is_valid, 0).sum()
        totals = torch.stack([total, is_valid.sum().float()])  # sum and number of rows
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(totals)
        num_rows = totals[1]
        batch_mean = totals[0] / num_rows.clamp(min=1)
        share = torch.where(self.weight == 0, 1.0, MOMENTUM) * (num_rows > 0)
        self.spread.copy_(self.spread.lerp(batch_mean, share))
        self.weight.copy_(self.weight.lerp(torch.ones_like(self.weight), share))

    def value(self) -> Tensor:
        """Return the inverse temperature, a tensor (), on the device of the buffers."""
        beta = (self.target * self.weight / self.spread).clamp(max=MOST * self.default)
        return torch.where(self.weight > 0, beta, self.default)

    def _can_follow(self, scores: Tensor) -> bool:
        """Tell whether the buffers can take what is computed of the scores."""
        if torch.compiler.is_compiling():
            return True
        if is_wrapped(scores) or has_own_dispatch(scores):
            return is_wrapped(self.spread)
        return True


def row_standard_deviations(scores: Tensor, is_unmasked: Tensor) -> Tensor:
    """Compute the standard deviation of the unmasked classes (rows, n) of each row, (rows,) float32.

    It is NaN for a row with NaN or +inf, or with less than two unmasked classes.
    """
    number = is_unmasked.sum(1)  # (rows,)
    values = scores.where(is_unmasked, 0).float()
    mean = values.sum(1) / number.clamp(min=1)
    squares = (values - mean.unsqueeze(1)).where(is_unmasked, 0).square().sum(1)
    variance = squares / (number - 1).clamp(min=1)
    has_one = scores.amax(1).isfinite() & (number > 1)
    return variance.sqrt().where(has_one, torch.nan)


Temperature = float | Tensor | AutoTemperature


def make_temperature(
    inverse_temperature: float | Tensor | str | None, default: float, logit_std: float | None = None
) -> Temperature:
    """Check an inverse temperature as an argument, and fill in the default.

    Args:
        inverse_temperature: above 0, a number or a tensor () or (1,); "auto"; or None for the default.
        default: above 0.
        logit_std: what "auto" keeps the inverse temperature times the standard deviation of the logits at; None:
            "auto" is the default.
    """
    if inverse_temperature is None:
        return default
    if not isinstance(inverse_temperature, str) or inverse_temperature != AUTO:
        return check_inverse_temperature(inverse_temperature)
    if logit_std is None:
        return default
    return AutoTemperature(logit_std, default)


def current_value(
    temperature: Temperature, logits: Tensor, is_counted: Tensor, name: str = "inverse_temperature"
) -> float | Tensor:
    """Return the inverse temperature for a batch of logits (rows, n), of which the rows is_counted (rows,) count.

    Raises ValueError where a schedule or training has brought it to 0 or below.
    """
    if isinstance(temperature, AutoTemperature):
        temperature.observe(logits, is_counted)
        return temperature.value()
    return current_inverse_temperature(temperature, name)


def rename_former_keys(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *others: object) -> None:
    """Rename what "auto" was called in the state dict of a loss that was saved before: `auto.spread`, `auto.weight`."""
    for name in ("spread", "weight"):
        former_key = f"{prefix}{FORMER_NAME}{name}"
        if former_key in state_dict and isinstance(getattr(module, "inverse_temperature", None), AutoTemperature):
            state_dict[f"{prefix}inverse_temperature.{name}"] = state_dict.pop(former_key)
