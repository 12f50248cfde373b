"""inverse_temperature="auto": one that follows the spread of the logits, so that there is none to guess.

What a temperature does depends on the distances between the scores that it divides, and these grow in training and
differ between networks. Times the standard deviation of the logits over the classes, the best inverse temperatures of a
method agree (docs/temperature.md).
"""

import torch
import torch.distributed
from torch import Tensor

from topk_losses.checks import check_positive, is_ordinary
from topk_losses.operator import Constants

MOMENTUM = 0.1  # of the running mean: fast, since logits grow fast in the first steps
ROWS = 64  # of a batch that are looked at: the running mean is over ten batches
# Times the default. Where beta times the spread is held, nothing in the loss makes the logits grow: a network learns
# less the harder it begins, and one whose last layer begins at zero has no spread at all (docs/temperature.md).
MOST = 2.0


class AutoTemperature(Constants):
    """beta = target / spread, the running mean over batches of the standard deviation of a sample's logits.

    target: beta times the spread. default: beta before the first batch; beta never exceeds twice that. The spread
    is saved with the state dict and never cast; where torch.distributed is initialised, it is that of all processes.
    """

    constants, shown = ("spread", "beta"), ("target", "default")

    def __init__(self, target: float, default: float) -> None:
        super().__init__()
        self.target, self.default = check_positive("target", target), check_positive("default", default)
        self.spread = torch.full((), torch.nan)
        self.beta = torch.full((), self.default)  # (), as it is now: both are written in place, for graphs to read

    def get_extra_state(self) -> Tensor:
        """What the state dict holds: the spread ()."""
        return self.spread

    def set_extra_state(self, state: Tensor) -> None:
        """Take the spread () from a state dict."""
        self._set(state)

    @torch.no_grad()
    def observe(self, scores: Tensor) -> None:
        """Take in a batch of logits (rows, n), in training mode alone, without a wait for the device.

        What is -inf does not count, nor does a row with NaN.
        """
        if not self.training or not scores.numel() or not is_ordinary(scores):
            return
        scores = scores[:ROWS].float()
        taking_part = scores != -torch.inf  # (rows, n)
        number = taking_part.sum(1).clamp(min=2)  # (rows,)
        mean = scores.where(taking_part, 0).sum(1) / number
        squares = (scores - mean.unsqueeze(1)).where(taking_part, 0).square().sum(1)
        spread = (squares / (number - 1)).sqrt().nanmean()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(spread)
            spread = spread / torch.distributed.get_world_size()
        spread = torch.where(self.spread.isnan(), spread, self.spread.lerp(spread, MOMENTUM))
        self._set(torch.where(spread.isfinite(), spread, self.spread))

    def value(self) -> Tensor:
        """beta, (), on the device of the logits that were seen, as it is now."""
        return self.beta.clone()

    def _set(self, spread: Tensor) -> None:
        self.spread.copy_(spread)
        beta = (self.target / self.spread).clamp(max=MOST * self.default)
        self.beta.copy_(torch.where(self.spread.isnan(), self.default, beta))
