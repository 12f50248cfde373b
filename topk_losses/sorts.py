"""The relaxed sorts in closed form: NeuralSort and SoftSort."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor
from torch.nn.functional import pad

from topk_losses.compilers import has_known_values
from topk_losses.numerics import centered, finite, largest, select_labels, select_ranks
from topk_losses.operator import TopKOperator


@dataclass(frozen=True)
class NeuralSort(TopKOperator):
    """NeuralSort (Grover et al. 2019, equation 5): the first k rows of its relaxed permutation matrix.

    P[i, :] = softmax(beta ((n + 1 - 2i) s - A 1)), A_jl = |s_j - s_l|, i = 1..k, in O(n log n + n k).

    With the scores sorted, s_(1) >= s_(2) >= ..., and the gaps delta_q = s_(q) - s_(q+1) >= 0, row i is highest at
    place i. The softmax argument of another place lies below it by sum |2i - 1 - 2q| delta_q over the gaps q between
    both: non-negative terms, so that neither offset nor outlier costs digits, where the definition has n differences of
    large numbers. Behind place k two prefix sums, of delta_q and of (q - k) delta_q, serve all rows. Equal scores have
    equal columns in P; their gradient is the mean over all orders among them.

    The default inverse temperature, 1 / tau in the paper, is 0.5, as published for ImageNet with m = 16; 0.0625 was
    published for CIFAR-100.
    """

    default_inverse_temperature: ClassVar[float] = 0.5
    logit_std: ClassVar[float | None] = 0.8
    exceeds_1: ClassVar[bool] = True

    def topk_probabilities(
        self, scores: Tensor, ks: Sequence[int], inverse_temperature: float | Tensor, generator: Generator | None = None
    ) -> Tensor:
        P = self.rank_probabilities_of_classes(scores, max(ks, default=1), inverse_temperature)
        return select_ranks(P.cumsum(1), ks)

    def topk_probabilities_of_labels(
        self,
        scores: Tensor,
        labels: Tensor,
        ks: Sequence[int],
        inverse_temperature: float | Tensor,
        generator: Generator | None = None,
    ) -> Tensor:
        log_P, order = self._log_rows(scores, max(ks, default=1), inverse_temperature)
        place = (order == labels.unsqueeze(1)).int().argmax(1)  # (rows,), where the true class stands
        of_ranks = select_labels(log_P, place).exp()  # (rows, k)
        return select_ranks(of_ranks.cumsum(1), ks)

    def topk_probabilities_of_sets(
        self,
        scores: Tensor,
        sets: Tensor,
        ks: Sequence[int],
        inverse_temperature: float | Tensor,
        generator: Generator | None = None,
    ) -> Tensor:
        log_P, order = self._log_rows(scores, max(ks, default=1), inverse_temperature)
        of_ranks = (log_P.exp() * sets.gather(1, order).unsqueeze(1)).sum(2)  # (rows, k)
        return select_ranks(of_ranks.cumsum(1), ks)

    def rank_probabilities_of_classes(
        self, scores: Tensor, k: int, inverse_temperature: float | Tensor, generator: Generator | None = None
    ) -> Tensor:
        log_P, order = self._log_rows(scores, k, inverse_temperature)
        places = order.argsort(dim=1)  # (rows, n), where each class stands
        return log_P.gather(2, places.unsqueeze(1).expand_as(log_P)).exp()

    def _log_rows(self, scores: Tensor, k: int, inverse_temperature: float | Tensor) -> tuple[Tensor, Tensor]:
        """Compute log P of the sorted classes (rows, k, n), and the class at each place (rows, n)."""
        n = scores.shape[1]
        sorted_scores, order = finite(scores).sort(dim=1, descending=True)
        gaps = (sorted_scores[:, :-1] - sorted_scores[:, 1:]) * inverse_temperature  # (rows, n - 1)

        i = torch.arange(1, k + 1, device=scores.device).unsqueeze(1)  # (k, 1)
        q = torch.arange(1, k, device=scores.device)  # (k - 1,), the gaps among the first k places
        steps = gaps[:, : k - 1].unsqueeze(1) * (2 * i - 1 - 2 * q).abs()  # (rows, k, k - 1)
        is_behind = q >= i  # (k, k - 1)
        depth_behind = pad(steps.where(is_behind, 0).cumsum(2), (1, 0))  # (rows, k, k)
        depth_before = pad(steps.where(~is_behind, 0).flip(2).cumsum(2).flip(2), (0, 1))
        depth_of_top = depth_behind + depth_before  # (rows, k, k)

        nan_of_infinity = 0 * sorted_scores[:, :1].detach()  # (rows, 1), NaN for a row with NaN or +inf
        added = nan_of_infinity.expand_as(sorted_scores)  # (rows, n)
        if may_hold((sorted_scores[:, 1:] == sorted_scores[:, :-1]).any()):
            added = added - tie_correction(sorted_scores) * inverse_temperature
        added = added.unsqueeze(1)  # (rows, 1, n), 0 or NaN

        gaps_of_rest = gaps[:, k - 1 :]  # (rows, n - k)
        places_behind_k = torch.arange(n - k, device=scores.device)
        D = gaps_of_rest.cumsum(1).unsqueeze(1)  # (rows, 1, n - k)
        E = (gaps_of_rest * places_behind_k).cumsum(1).unsqueeze(1)  # (rows, 1, n - k)
        depth_of_rest = depth_of_top[:, :, -1:] + (2 * (k - i) + 1) * D + (2 * E + added[:, :, k:])
        depth = torch.cat([depth_of_top + added[:, :, :k], depth_of_rest], dim=2)  # (rows, k, n)
        return (-depth).log_softmax(2), order


def may_hold(condition: Tensor) -> bool:
    """Tell whether a condition () is true, or cannot be read without waiting for a device."""
    return not has_known_values(condition) or bool(condition)


def tie_correction(x: Tensor) -> Tensor:
    """Return 0, whose gradient takes the order among equal values from that of sum_q |x_p - x_q|, (rows, n).

    x is sorted, falling. Place p was given sum_q sign(q - p) (x_p - x_q), which is right unless q holds an equal value:
    there the derivative of |x_p - x_q| is 0. So this is the sum over the places of equal values.
    """
    n = x.shape[1]
    places = torch.arange(n, device=x.device)
    differs = x[:, 1:] != x[:, :-1]  # (rows, n - 1), from the place before
    first = places.where(pad(differs, (1, 0), value=True), 0).cummax(1).values  # (rows, n), of equal values
    from_the_end = places.where(pad(differs, (0, 1), value=True).flip(1), 0).cummax(1).values
    last = n - 1 - from_the_end.flip(1)
    zero = x - x.detach()  # no sum of it overflows
    sums = pad(zero.cumsum(1), (1, 0))  # (rows, n + 1)
    behind = sums.gather(1, last + 1) - sums[:, 1:]  # (rows, n), the sum of the equal ones behind a place
    before = sums[:, :-1] - sums.gather(1, first)
    return (first + last - 2 * places) * zero - behind + before


@dataclass(frozen=True)
class SoftSort(TopKOperator):
    """SoftSort (Prillo and Eisenschlos 2020): the first k rows of its relaxed permutation matrix.

    P[i, j] is proportional to exp(-beta |s_[i] - s_j|), s_[i] the i-th largest score. One class takes O(n + k^2).

    For i <= k the sum over all j below rank k factorises, since s_[i] - s_j = (s_[i] - s_[k]) + (s_[k] - s_j) there:
    one sum serves all k rows. Among equal scores the gradient is the mean over all orders among them.

    The default inverse temperature, 1 / tau in the paper, is 0.5, as published for ImageNet with m = 16; 0.0625 was
    published for CIFAR-100.
    """

    default_inverse_temperature: ClassVar[float] = 0.5
    logit_std: ClassVar[float | None] = 3.0
    exceeds_1: ClassVar[bool] = True

    def topk_probabilities(
        self, scores: Tensor, ks: Sequence[int], inverse_temperature: float | Tensor, generator: Generator | None = None
    ) -> Tensor:
        P = self.rank_probabilities_of_classes(scores, max(ks, default=1), inverse_temperature)
        return select_ranks(P.cumsum(1), ks)

    def topk_probabilities_of_labels(
        self,
        scores: Tensor,
        labels: Tensor,
        ks: Sequence[int],
        inverse_temperature: float | Tensor,
        generator: Generator | None = None,
    ) -> Tensor:
        k = max(ks, default=1)
        scores = centered(scores)
        top, slope_of_tied = top_scores(scores, k)  # (rows, k) each
        kth = top[:, -1:]  # (rows, 1)

        # each of the k largest adds exp(0) = 1 to this sum, which is taken off again
        distance_below = (kth - scores).relu()  # (rows, n), of slope 0 at 0
        sum_below = (distance_below * -inverse_temperature).exp().sum(1, keepdim=True) - k  # (rows, 1)
        distance_to_kth = top - kth  # (rows, k)
        distance_among_top = (top.unsqueeze(2) - top.unsqueeze(1)).abs()  # (rows, k, k)
        sum_among_top = (distance_among_top * -inverse_temperature).exp().sum(2)  # (rows, k)
        total = sum_among_top + (distance_to_kth * -inverse_temperature).exp() * sum_below  # (rows, k)

        true_score = scores.gather(1, labels.unsqueeze(1))  # (rows, 1)
        distance_to_true = distance_of(top.unsqueeze(2), true_score.unsqueeze(1), slope_of_tied.unsqueeze(2)).squeeze(2)
        of_ranks = (distance_to_true * -inverse_temperature).exp() / total  # (rows, k)
        return select_ranks(of_ranks.cumsum(1), ks)

    def rank_probabilities_of_classes(
        self, scores: Tensor, k: int, inverse_temperature: float | Tensor, generator: Generator | None = None
    ) -> Tensor:
        scores = centered(scores)
        top, slope_of_tied = top_scores(scores, k)  # (rows, k) each
        distance = distance_of(top.unsqueeze(2), scores.unsqueeze(1), slope_of_tied.unsqueeze(2))  # (rows, k, n)
        return (distance * -inverse_temperature).softmax(2)


def top_scores(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest scores, falling, and the slope of |s_[i] - s_j| by s_j where both are equal: (rows, k) each.

    Both are means over all orders of the equal scores. So these have equal parts of the gradient of s_[i], and the
    slope goes by how often class j stands before place i, and how often behind it.
    """
    top = scores.gather(1, largest(scores, k))  # (rows, k)
    kth = top[:, -1:]
    is_kth = scores == kth  # (rows, n): the only ones that may be equal to one of the k, and not among them
    is_next = top[:, 1:] == top[:, :-1]  # (rows, k - 1)
    if not may_hold((is_kth.sum(1) > 1).any() | is_next.any()):
        return top, torch.zeros_like(top)
    is_equal = top.unsqueeze(2) == top.unsqueeze(1)  # (rows, k, k)
    num_equal = torch.where(top == kth, is_kth.sum(1, keepdim=True), is_equal.sum(2))  # (rows, k)
    zero = scores - scores.detach()
    zero_of_top = top - top.detach()
    sum_of_top = (zero_of_top.unsqueeze(1) * is_equal).sum(2)
    sum_of_equal = torch.where(top == kth, (zero * is_kth).sum(1, keepdim=True), sum_of_top)
    top = top.detach() + sum_of_equal / num_equal

    num_above = (top.unsqueeze(2) < top.unsqueeze(1)).sum(2)  # (rows, k)
    num_before = torch.arange(k, device=scores.device) - num_above  # of the equal ones
    num_behind = num_equal - 1 - num_before
    slope = (num_before - num_behind).to(top.dtype) / (num_equal - 1).clamp(min=1)
    return top, slope


def distance_of(top: Tensor, scores: Tensor, slope_of_tied: Tensor) -> Tensor:
    """Compute |top - scores|, (rows, k, n), whose slope by the scores is given where both are equal."""
    difference = top - scores
    return torch.where(difference == 0, -slope_of_tied * difference, difference.abs())
