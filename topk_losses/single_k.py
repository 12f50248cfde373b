"""Losses of a single k that have no relaxed permutation matrix: truncated entropy and noised top-k."""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar, SupportsIndex

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, relu
from typing_extensions import Unpack

from topk_losses import checks
from topk_losses.classification import CallSettings, ClassificationLoss, CommonSettings
from topk_losses.numerics import MASKED, centered, finite, largest, log_add_exp, log_sum_of_others
from topk_losses.temperature import Temperature, make_temperature


class SingleKLoss(ClassificationLoss):
    """Base class of losses of one true class and one k, 1 <= k < number of classes.

    Args:
        k: number of guesses.
        common: arguments of ClassificationLoss.
    """

    takes: ClassVar[str] = "one k"
    k = checks.Checked(partial(checks.check_integer, least=1))

    def __init__(self, k: SupportsIndex, **common: Unpack[CommonSettings]) -> None:
        super().__init__(**common)
        self.k = checks.check_k(k)
        if self.num_classes is not None:
            self._check_k(self.num_classes)

    def check_k_of(self, logits: Tensor) -> None:
        """Raise ValueError unless k is below the number of classes."""
        self._check_k(logits.shape[1])

    def _check_k(self, n: int) -> None:
        if self.k >= n:
            raise ValueError(f"k must be below the number of classes n={n}, got {self.k}")


class TruncatedEntropyLoss(SingleKLoss):
    """Truncated top-k entropy (Lapin, Hein and Schiele 2016): cross-entropy without the k - 1 highest other classes.

    L = log(1 + sum_{j in J} exp(s_j - s_y)), J the classes other than y, without the k - 1 highest of them. At k = 1 it
    is cross-entropy. It tends to 0 once the true class is above all of J. Among equal scores the choice is arbitrary.

    Args:
        k: number of guesses, 1 <= k < number of classes.
        common: arguments of ClassificationLoss.
    """

    def loss_of_labels(self, logits: Tensor, labels: Tensor, call: CallSettings) -> Tensor:
        self.check_k_of(logits)
        z = centered(logits)  # (rows, n)
        places = largest(z.scatter(1, labels.unsqueeze(1), -torch.inf), self.k - 1)  # (rows, k - 1)
        nan_of_spoilt = 0 * z[:, 0].detach()  # NaN for a row with NaN or +inf
        return nan_of_spoilt + cross_entropy(z.scatter(1, places, MASKED), labels, reduction="none")

    def loss_of_every_class(self, logits: Tensor, call: CallSettings) -> Tensor:
        """Leave out the k - 1 highest of the others; of a class among these, the others of the k highest."""
        self.check_k_of(logits)
        z = centered(logits)  # (rows, n)
        places = largest(z, self.k)  # (rows, k)
        without_k = z.scatter(1, places, MASKED).logsumexp(1, keepdim=True)  # (rows, 1)
        left = z.scatter(1, places[:, :-1], MASKED)
        is_among = torch.zeros_like(z, dtype=torch.bool).scatter(1, places[:, :-1], True)
        log_sum = torch.where(is_among, without_k, log_sum_of_others(left))
        return log_add_exp(log_sum, z) - z


class NoisedTopKLoss(SingleKLoss):
    """Noised top-k hinge loss (Garcin et al. 2022), balanced and imbalanced.

    L = scale relu(margin_y + E[(s + eps Z)_[k+1]] - s_y), where [k+1] is the (k+1)-th largest and Z is standard normal.
    margin_y = max_margin (N_min / N_y)^(1/4), with N the number of training samples of each class. The expectation is
    the mean over `num_samples` draws of Z, new ones in each call. Its gradient goes to the score at rank k + 1 in each
    draw.

    Args:
        k: number of guesses, 1 <= k < number of classes.
        inverse_temperature: 1 / eps, above 0, larger = less noise (default: 0.1); a torch.nn.Parameter of shape ()
            is learned; "auto" follows the standard deviation of the logits (AutoTemperature).
        num_samples: number of draws, at least 1 (default: 5, as in the authors' package).
        class_counts: N (n,), above 0; None (default): all alike, the balanced loss.
        max_margin: margin of the rarest class, above 0 (default: 1, as in the balanced loss).
        scale: above 0 (default: 1); more for logits of a normalised last layer, where 60 was published.
        common: arguments of ClassificationLoss.
    """

    default_inverse_temperature: ClassVar[float | None] = 0.1
    logit_std: ClassVar[float | None] = 1.5
    draws_noise: ClassVar[bool] = True
    num_samples = checks.Checked(partial(checks.check_integer, least=1))
    max_margin = checks.Checked(checks.check_positive)
    scale = checks.Checked(checks.check_positive)

    class_counts: Tensor | None

    def __init__(
        self,
        k: SupportsIndex,
        inverse_temperature: float | Tensor | str | None = None,
        num_samples: SupportsIndex = 5,
        class_counts: Sequence[int] | Tensor | None = None,
        max_margin: float = 1.0,
        scale: float = 1.0,
        **common: Unpack[CommonSettings],
    ) -> None:
        super().__init__(k, **common)
        self.inverse_temperature: Temperature = make_temperature(inverse_temperature, 0.1, self.logit_std)
        self.num_samples = num_samples
        self.max_margin = max_margin
        self.scale = scale
        if class_counts is not None:
            class_counts = checks.check_per_class("class_counts", class_counts, self.num_classes)
        self.register_buffer("class_counts", class_counts, persistent=False)

    def _check_settings(self) -> None:
        super()._check_settings()
        self._check_tensor("class_counts")

    def loss_of_labels(self, logits: Tensor, labels: Tensor, call: CallSettings) -> Tensor:
        margins = self._margins(logits)
        if margins is None:
            margin: float | Tensor = self.max_margin
        else:
            margin = margins[labels].unsqueeze(1)
        true_score = logits.gather(1, labels.unsqueeze(1))  # (rows, 1)
        gap = self._next_largest(logits, call) - true_score
        return self.scale * relu(margin + gap).squeeze(1)

    def loss_of_every_class(self, logits: Tensor, call: CallSettings) -> Tensor:
        margins = self._margins(logits)
        if margins is None:
            margin: float | Tensor = self.max_margin
        else:
            margin = margins
        return self.scale * relu(margin + self._next_largest(logits, call) - logits)

    def _margins(self, logits: Tensor) -> Tensor | None:
        """Compute the margin of each class (n,); None where all are max_margin."""
        if self.class_counts is None:
            return None
        if len(self.class_counts) != logits.shape[1]:
            num_counts = len(self.class_counts)
            raise ValueError(f"class_counts holds {num_counts} numbers, but the logits have {logits.shape[1]} classes")
        counts = self.class_counts.to(logits)
        rarity = (counts.min() / counts).pow(0.25)  # (n,), at most 1
        return self.max_margin * rarity

    def _next_largest(self, logits: Tensor, call: CallSettings) -> Tensor:
        """Compute E[(s + eps Z)_[k+1]] of each row, (rows, 1)."""
        self.check_k_of(logits)
        total = torch.zeros_like(logits[:, :1])
        scores = finite(logits)
        for _ in range(self.num_samples):
            noise = scores.new_empty(scores.shape).normal_(generator=self.generator)  # (rows, n)
            noised = scores + noise / call.inverse_temperature
            places = largest(noised, self.k + 1)  # (rows, k + 1)
            total = total + noised.gather(1, places[:, -1:])
        nan_of_spoilt = 0 * scores.detach().amax(1, keepdim=True)  # NaN for a row with NaN or +inf
        return total / self.num_samples + nan_of_spoilt
