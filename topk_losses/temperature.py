"""inverse_temperature="auto": an inverse temperature that follows the standard deviation of the logits.

The effect of a temperature depends on the distances between the scores, which grow in training and differ between
networks. Multiplied by the standard deviation of the logits over the classes, the best inverse temperatures of a method
agree (docs/findings/temperature-study.md).
"""

from collections.abc import Callable

import torch
import torch.distributed
from torch import Tensor, nn

from topk_losses.checks import check_positive, is_ordinary, is_wrapped

MOMENTUM = 0.1  # of the running mean: fast, since logits grow fast in the first steps
# The inverse temperature never exceeds this times the default. Without a bound nothing in the loss makes the logits
# grow: a network learns less the harder it begins, and a last layer of zeros has no standard deviation at all.
MOST = 2.0
# A class that lies this deep below the highest one, and ten times as deep as the other classes reach, holds a mask
# value, such as -1e4 or the lowest number of a format.
DEPTH_OF_MASK = 500.0


def live_classes(scores: Tensor) -> Tensor:
    """Tell the classes (rows, n) bool that take part from those at -inf or at a large negative mask value."""
    depth = scores.amax(1, keepdim=True) - scores  # (rows, n), NaN or inf for a row that is spoilt
    reach = depth.masked_fill(depth >= DEPTH_OF_MASK, 0).amax(1, keepdim=True)  # (rows, 1)
    return (scores > -torch.inf) & ((depth < DEPTH_OF_MASK) | (depth <= 10 * reach))


class AutoTemperature(nn.Module):
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
        self.target, self.default = check_positive("target", target), check_positive("default", default)
        for name in ("spread", "weight"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float32, device="cpu"))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "AutoTemperature":
        """Move to another device, and stay float32: half precision would stop the running mean."""
        before = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            setattr(self, name, buffer.to(getattr(self, name).device))
        return self

    @torch.no_grad()
    def observe(self, scores: Tensor, counts: Tensor | None = None) -> None:
        """Update the running mean by a batch of logits, in training mode only, without waiting for the device.

        Under torch.func only a buffer that is transformed itself is updated.

        Args:
            scores: (rows, n) float. Rows with NaN or +inf, and classes at -inf or at a mask value, do not count.
            counts: (rows,) bool, the rows that count; None: all.
        """
        if not self.training or not (is_ordinary(scores) or is_wrapped(self.spread)):
            return
        if self.spread.device != scores.device:
            self.to(scores.device)
        live = live_classes(scores)  # (rows, n)
        number = live.sum(1)  # (rows,)
        values = scores.where(live, 0).float()
        mean = values.sum(1) / number.clamp(min=1)
        squares = (values - mean.unsqueeze(1)).where(live, 0).square().sum(1)
        spreads = (squares / (number - 1).clamp(min=1)).sqrt()  # (rows,)
        valid = spreads.isfinite() & scores.amax(1).isfinite() & (number > 1)
        if counts is not None:
            valid = valid & counts
        totals = torch.stack([spreads.where(valid, 0).sum(), valid.sum().float()])  # sum and number of rows
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(totals)
        batch_mean, rows = totals[0] / totals[1].clamp(min=1), totals[1]
        share = torch.where(self.weight == 0, 1.0, MOMENTUM) * (rows > 0)
        self.spread.copy_(self.spread.lerp(batch_mean, share))
        self.weight.copy_(self.weight.lerp(torch.ones_like(self.weight), share))

    def value(self) -> Tensor:
        """Return the inverse temperature, a tensor (), on the device of the buffers."""
        beta = (self.target * self.weight / self.spread).clamp(max=MOST * self.default)
        return torch.where(self.weight > 0, beta, self.default)
