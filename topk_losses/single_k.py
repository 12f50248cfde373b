"""Losses of a single k that have no relaxed permutation matrix: truncated entropy and noised top-k."""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, SupportsIndex

import torch
from torch import Tensor
from torch.nn.functional import relu

from topk_losses.checks import check_integer, check_k, check_positive
from topk_losses.classification import CallSettings, ClassificationLoss
from topk_losses.operator import MASKED, centered, finite, largest, log_softmax, log_sum_of_others
from topk_losses.temperature import AutoTemperature

BETA = 0.1  # default inverse temperature of the noised losses (results/temperature.csv, as SPREAD)
SPREAD = 1.5  # what "auto" holds the inverse temperature times the spread of the logits at


class SingleKLoss(ClassificationLoss):
    """A loss of one true class and one k, 1 <= k < number of classes. The other arguments: of ClassificationLoss."""

    shown = ("k", *ClassificationLoss.shown)
    knows_sets = False

    def __init__(self, k: SupportsIndex, num_classes: SupportsIndex | None = None, **others: Any) -> None:
        super().__init__(num_classes, **others)
        self.k = check_k(k, None if self.num_classes is None else self.num_classes - 1)


class TruncatedEntropyLoss(SingleKLoss):
    """Truncated top-k entropy (Lapin, Hein and Schiele 2016): cross-entropy without the k - 1 highest other classes.

    L = log(1 + sum_{j in J} exp(s_j - s_y)), J the classes other than y, without the k - 1 highest of them. At k = 1 it
    is cross-entropy. It tends to 0 once the true class is above all of J. Among equal scores the choice is arbitrary.

    Args:
        k: number of guesses, 1 <= k < number of classes.
        num_classes, others: arguments of ClassificationLoss.
    """

    def _losses(self, scores: Tensor, target: Tensor | None, call: CallSettings) -> Any:
        check_k(self.k, scores.shape[1] - 1)
        z = centered(scores)  # (rows, n)
        if target is not None:
            places = largest(z.scatter(1, target.unsqueeze(1), -torch.inf), self.k - 1)  # (rows, k - 1)
            spoilt = 0 * z[:, 0].detach()  # NaN for a row with NaN or +inf
            return spoilt - log_softmax(z.scatter(1, places, MASKED), target)
        # Of a class that is not among the k - 1 highest these are left out; of one of them the k highest are.
        places = largest(z, self.k)  # (rows, k)
        without_k = z.scatter(1, places, MASKED).logsumexp(1, keepdim=True)  # (rows, 1)
        left = z.scatter(1, places[:, :-1], MASKED)
        among = torch.zeros_like(z, dtype=torch.bool).scatter(1, places[:, :-1], True)
        return torch.logaddexp(torch.where(among, without_k, log_sum_of_others(left)), z) - z


class NoisedTopKLoss(SingleKLoss):
    """Noised top-k hinge loss (Garcin et al. 2022), balanced and imbalanced.

    L = scale relu(margin_y + E[(s + eps Z)_[k+1]] - s_y), where [k+1] is the (k+1)-th largest and Z is standard normal.
    margin_y = max_margin (N_min / N_y)^(1/4), with N the number of training samples of each class. The expectation is
    the mean over `num_samples` draws of Z, new ones in each call. Its gradient goes to the score at rank k + 1 in each
    draw.

    Args:
        k: number of guesses, 1 <= k < number of classes.
        inverse_temperature: 1 / eps, above 0, larger = less noise (default: 0.1); a tensor () that requires a gradient
            is learned; "auto" follows the standard deviation of the logits (AutoTemperature).
        num_samples: number of draws, at least 1 (default: 5, as in the authors' package).
        class_counts: N (n,), above 0; None (default): all alike, the balanced loss. It can be set at any time.
        max_margin: margin of the rarest class, above 0 (default: 1, as in the balanced loss).
        scale: above 0 (default: 1); more for logits of a normalised last layer, where 60 was published.
        num_classes, others: arguments of ClassificationLoss.
    """

    stochastic = True
    constants = per_class = ("weight", "class_counts")
    shown = ("inverse_temperature", "num_samples", "max_margin", "scale", *SingleKLoss.shown)
    rules: ClassVar = {
        **SingleKLoss.rules,
        "num_samples": partial(check_integer, least=1),
        "max_margin": check_positive,
        "scale": check_positive,
    }

    def __init__(
        self, k: SupportsIndex, inverse_temperature: float | Tensor | str = BETA,
        num_classes: SupportsIndex | None = None, num_samples: SupportsIndex = 5,
        class_counts: Sequence[int] | Tensor | None = None, max_margin: float = 1.0, scale: float = 1.0, **others: Any,
    ) -> None:  # fmt: skip
        super().__init__(k, num_classes, **others)
        self.inverse_temperature: Any = inverse_temperature
        self.num_samples: Any = num_samples
        self.class_counts: Tensor | None = class_counts  # type: ignore[assignment]
        self.max_margin = max_margin
        self.scale = scale

    def _auto(self) -> AutoTemperature:
        return AutoTemperature(SPREAD, BETA)

    def _next_largest(self, scores: Tensor, beta: Any) -> Tensor:
        """E[(s + eps Z)_[k+1]] of each row, (rows, 1)."""
        total = torch.zeros_like(scores[:, :1])
        scores = finite(scores)
        for _ in range(self.num_samples):
            noise = scores.new_empty(scores.shape).normal_(generator=self.generator)  # (rows, n)
            noised = scores + noise / beta
            total = total + noised.gather(1, largest(noised, self.k + 1)[:, -1:])
        spoilt = 0 * scores.detach().amax(1, keepdim=True)  # NaN for a row with NaN or +inf
        return total / self.num_samples + spoilt

    def _losses(self, scores: Tensor, target: Tensor | None, call: CallSettings) -> Any:
        check_k(self.k, scores.shape[1] - 1)
        margins: float | Tensor = self.max_margin
        if self.class_counts is not None:
            counts = self.class_counts.to(scores)
            rarity = (counts.min() / counts).pow(0.25)  # (n,), at most 1
            margins = self.max_margin * (rarity if target is None else rarity[target])
        own = scores if target is None else scores.gather(1, target.unsqueeze(1))  # (rows, n or 1)
        gap = self._next_largest(scores, call.beta) - own
        return self.scale * relu(margins + (gap if target is None else gap.squeeze(1)))
