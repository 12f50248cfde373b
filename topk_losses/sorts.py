"""The relaxed sorts in closed form: NeuralSort and SoftSort."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor
from torch.nn.functional import pad

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
    equal columns in P; their gradient is that of the order in which torch.sort puts them.

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
        nan_of_infinity = 0 * sorted_scores[:, :1].detach()  # (rows, 1), NaN for a row with NaN or +inf
        gaps = (sorted_scores[:, :-1] - sorted_scores[:, 1:]) * inverse_temperature  # (rows, n - 1)

        i = torch.arange(1, k + 1, device=scores.device).unsqueeze(1)  # (k, 1)
        q = torch.arange(1, k, device=scores.device)  # (k - 1,), the gaps among the first k places
        steps = gaps[:, : k - 1].unsqueeze(1) * (2 * i - 1 - 2 * q).abs()  # (rows, k, k - 1)
        is_behind = q >= i  # (k, k - 1)
        depth_behind = pad(steps.where(is_behind, 0).cumsum(2), (1, 0))  # (rows, k, k)
        depth_before = pad(steps.where(~is_behind, 0).flip(2).cumsum(2).flip(2), (0, 1))
        depth_of_top = depth_behind + depth_before  # (rows, k, k)

        gaps_of_rest = gaps[:, k - 1 :]  # (rows, n - k)
        places_behind_k = torch.arange(n - k, device=scores.device)
        D = gaps_of_rest.cumsum(1).unsqueeze(1)  # (rows, 1, n - k)
        E = (gaps_of_rest * places_behind_k).cumsum(1).unsqueeze(1)  # (rows, 1, n - k)
        depth_of_rest = depth_of_top[:, :, -1:] + (2 * (k - i) + 1) * D + 2 * E  # (rows, k, n - k)
        depth = torch.cat([depth_of_top, depth_of_rest], dim=2) + nan_of_infinity.unsqueeze(2)  # (rows, k, n)
        return (-depth).log_softmax(2), order


@dataclass(frozen=True)
class SoftSort(TopKOperator):
    """SoftSort (Prillo and Eisenschlos 2020): the first k rows of its relaxed permutation matrix.

    P[i, j] is proportional to exp(-beta |s_[i] - s_j|), s_[i] the i-th largest score. One class takes O(n + k^2).

    For i <= k the sum over all j below rank k factorises, since s_[i] - s_j = (s_[i] - s_[k]) + (s_[k] - s_j) there:
    one sum serves all k rows. Among equal scores s_[i] is any of them, and the derivative of |s_[k] - s_j| is that from
    below.

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
        top = scores.gather(1, largest(scores, k))  # (rows, k)
        kth = top[:, -1:]  # (rows, 1)

        # each of the k largest adds exp(0) = 1 to this sum, which is taken off again
        distance_below = (kth - scores).clamp(min=0)  # (rows, n)
        sum_below = (distance_below * -inverse_temperature).exp().sum(1, keepdim=True) - k  # (rows, 1)
        distance_to_kth = top - kth  # (rows, k)
        distance_among_top = (top.unsqueeze(2) - top.unsqueeze(1)).abs()  # (rows, k, k)
        sum_among_top = (distance_among_top * -inverse_temperature).exp().sum(2)  # (rows, k)
        total = sum_among_top + (distance_to_kth * -inverse_temperature).exp() * sum_below  # (rows, k)

        true_score = scores.gather(1, labels.unsqueeze(1))  # (rows, 1)
        distance_to_true = (top - true_score).abs()
        of_ranks = (distance_to_true * -inverse_temperature).exp() / total  # (rows, k)
        return select_ranks(of_ranks.cumsum(1), ks)

    def rank_probabilities_of_classes(
        self, scores: Tensor, k: int, inverse_temperature: float | Tensor, generator: Generator | None = None
    ) -> Tensor:
        scores = centered(scores)
        top = scores.gather(1, largest(scores, k))  # (rows, k)
        distance = (top.unsqueeze(2) - scores.unsqueeze(1)).abs()  # (rows, k, n)
        return (distance * -inverse_temperature).softmax(2)
