"""Top-k by ranks: indicator_k(s)_i estimates P(rank of i <= k), without a threshold that makes indicators sum to k.

All are nested in k; those of PerturbedTopK sum to k as well, up to rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor
from torch.nn.functional import logsigmoid, pad

from topk_losses.checks import check_integer
from topk_losses.numerics import MASKED, centered, largest, ranks_like, select_ranks
from topk_losses.operator import TopKOperator

# Numbers of noise drawn at a time: what a CPU's caches hold, and what a GPU draws in one launch.
AT_ONCE = {"cpu": 2**17, "cuda": 2**24}


@dataclass(frozen=True)
class DFTopK(TopKOperator):
    """DFTopK (Zhu et al. 2025): a threshold halfway between the k-th and the (k+1)-th score, in O(n).

    indicator_k = sigmoid(beta (s - (s_[k] + s_[k+1]) / 2)). The indicators of these two scores sum to 1, and those of
    all classes to no fixed number. The gradient reaches the true class, s_[k] and s_[k+1] only; among equal scores the
    choice is arbitrary. For k = n the indicator is 1.
    """

    default_inverse_temperature: ClassVar[float] = 0.25
    logit_std: ClassVar[float | None] = 2.0
    returns_logarithms: ClassVar[bool] = True
    sums_to_k: ClassVar[bool] = False

    def topk_probabilities(
        self, scores: Tensor, ks: Sequence[int], inverse_temperature: float | Tensor, generator: Generator | None = None
    ) -> Tensor:
        x = centered(scores)
        places = largest(x, self._num_neighbours(x, ks))
        middle = self._middles(x.gather(1, places), ks)  # (rows, J)
        return logsigmoid((x.unsqueeze(1) - middle.unsqueeze(2)) * inverse_temperature)

    def topk_probabilities_of_labels(
        self,
        scores: Tensor,
        labels: Tensor,
        ks: Sequence[int],
        inverse_temperature: float | Tensor,
        generator: Generator | None = None,
    ) -> Tensor:
        x = centered(scores)
        places = largest(x, self._num_neighbours(x, ks))
        # in one, for one gradient
        gathered = x.gather(1, torch.cat([labels.unsqueeze(1), places], dim=1))
        middle = self._middles(gathered[:, 1:], ks)  # (rows, J)
        return logsigmoid((gathered[:, :1] - middle) * inverse_temperature)

    def _num_neighbours(self, x: Tensor, ks: Sequence[int]) -> int:
        """Return how many of the largest scores the thresholds are made of."""
        return min(max(ks, default=0) + 1, x.shape[1])

    def _middles(self, top: Tensor, ks: Sequence[int]) -> Tensor:
        """Compute the thresholds (rows, J) of the largest scores, falling; behind the last one the threshold is low."""
        num_missing = max(ks, default=0) + 1 - top.shape[1]
        top = pad(top, (0, num_missing), value=MASKED)  # (rows, K + 1)
        return select_ranks((top[:, :-1] + top[:, 1:]) / 2, ks)


@dataclass(frozen=True)
class RecallSurrogate(TopKOperator):
    """Recall@k surrogate (Patel, Tolias and Matas 2022): the indicator is a logistic function of a soft rank.

    indicator_k = sigmoid(k - r_i), r_i = 1 + sum_{j != i} sigmoid(beta (s_j - s_i)). The outer sigmoid has the
    published temperature of 1: as beta grows r tends to the rank, and the indicator to sigmoid(k - rank), not to 0 and
    1. The true class takes one pass over the scores, without a sort; the indicators of all classes compare all pairs,
    O(n^2). The default inverse temperature is 0.25; 100 was published for cosine similarities.
    """

    default_inverse_temperature: ClassVar[float] = 0.25
    logit_std: ClassVar[float | None] = 2.2
    returns_logarithms: ClassVar[bool] = True
    sums_to_k: ClassVar[bool] = False
    compares_pairs: ClassVar[bool] = True

    def topk_probabilities(
        self, scores: Tensor, ks: Sequence[int], inverse_temperature: float | Tensor, generator: Generator | None = None
    ) -> Tensor:
        x = centered(scores)
        rank = self._soft_ranks(x, x, inverse_temperature)  # (rows, n)
        k = ranks_like(ks, x)  # (1, J)
        return logsigmoid(k.unsqueeze(2) - rank.unsqueeze(1))

    def topk_probabilities_of_labels(
        self,
        scores: Tensor,
        labels: Tensor,
        ks: Sequence[int],
        inverse_temperature: float | Tensor,
        generator: Generator | None = None,
    ) -> Tensor:
        x = centered(scores)
        own = x.gather(1, labels.unsqueeze(1))  # (rows, 1)
        rank = self._soft_ranks(x, own, inverse_temperature)  # (rows, 1)
        return logsigmoid(ranks_like(ks, x) - rank)

    def _soft_ranks(self, x: Tensor, own: Tensor, inverse_temperature: float | Tensor) -> Tensor:
        """Compute the soft ranks of own scores (rows, c) among x (rows, n): (rows, c)."""
        # the class itself adds a half, which is taken off again; where two are at -inf, neither is above the other
        is_higher = torch.sigmoid((x.unsqueeze(1) - own.unsqueeze(2)) * inverse_temperature)  # (rows, c, n)
        return is_higher.sum(2) + 0.5


@dataclass(frozen=True)
class PerturbedTopK(TopKOperator):
    """Perturbed top-k (Berthet et al. 2020; Cordonnier et al. 2021): ranks of scores with normal noise.

    P[r, j] = P(j is the r-th largest of beta s + Z), Z standard normal: the mean over `num_samples` draws, new ones in
    each call. Its gradient is beta Cov[indicator, Z] over the same draws. The published E[indicator Z] has the same
    expectation, but is noise where all draws agree, since the mean of their Z is not 0. Rows sum to 1. The true class
    needs O(n K) memory per sample; the permutation matrix keeps its draws, O(n num_samples).

    A class that no draw puts among the k highest has the indicator 0 and no gradient. A loss therefore takes the
    official epsilon here, and needs P_K(1) > 0 with top1_mode "sm" or "smce". Second derivatives are 0. The default
    inverse temperature, 1 / sigma in the papers, is 0.1.

    Args:
        num_samples: number of draws, at least 2 (default: 100).
    """

    num_samples: int = 100

    default_inverse_temperature: ClassVar[float] = 0.1
    logit_std: ClassVar[float | None] = 1.2
    draws_noise: ClassVar[bool] = True
    has_zeros: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_integer("num_samples", self.num_samples, 2)

    def topk_probabilities(
        self, scores: Tensor, ks: Sequence[int], inverse_temperature: float | Tensor, generator: Generator | None = None
    ) -> Tensor:
        P = self.rank_probabilities_of_classes(scores, max(ks, default=1), inverse_temperature, generator)
        return select_ranks(P.cumsum(1), ks)

    def topk_probabilities_of_labels(
        self,
        scores: Tensor,
        labels: Tensor,
        ks: Sequence[int],
        inverse_temperature: float | Tensor,
        generator: Generator | None = None,
    ) -> Tensor:
        z = centered(scores) * inverse_temperature  # (rows, n)
        fixed = z.detach()
        k = ranks_like(ks, z).unsqueeze(2)  # (1, J, 1)
        batch, n = z.shape
        value = z.new_zeros(batch, len(ks))  # (rows, J), the sum over the draws of who is within k
        slope = z.new_zeros(batch, len(ks), n)  # (rows, J, n), that of its product with the noise
        noise_sum = torch.zeros_like(fixed)  # (rows, n)
        draws_left = self.num_samples
        while draws_left:
            draws = min(self._draws_at_once(z), draws_left)
            draws_left -= draws
            noise = z.new_empty(batch, draws, n).normal_(generator=generator)
            noised = fixed.unsqueeze(1) + noise
            own = noised.gather(2, labels.view(-1, 1, 1).expand(-1, draws, 1))
            rank = 1 + (noised > own).sum(2)  # (rows, draws)
            is_within = (rank.unsqueeze(1) <= k).to(z.dtype)  # (rows, J, draws)
            value += is_within.sum(2)
            slope.baddbmm_(is_within, noise)
            noise_sum += noise.sum(1)
        value /= self.num_samples
        slope.addcmul_(value.unsqueeze(2), noise_sum.unsqueeze(1), value=-1)
        # 0, with a gradient; a sum, not a matrix product, whose backward pass autocast would round
        change = (slope * gradient_of_live(z, scores).unsqueeze(1)).sum(2) / (self.num_samples - 1)  # (rows, J)
        return value + change + 0 * fixed[:, :1]  # NaN for a row with NaN or +inf

    def rank_probabilities_of_classes(
        self, scores: Tensor, k: int, inverse_temperature: float | Tensor, generator: Generator | None = None
    ) -> Tensor:
        z = centered(scores) * inverse_temperature  # (rows, n)
        noise = z.new_empty(z.shape[0], self.num_samples, z.shape[1]).normal_(generator=generator)  # (rows, draws, n)
        index = (z.detach().unsqueeze(1) + noise).topk(k, dim=2).indices.transpose(1, 2)  # (rows, k, draws)
        # 0, with the noise as its gradient: an indicator times that, less its mean, has their covariance
        deviation = noise - noise.mean(1, keepdim=True)
        change = (deviation * gradient_of_live(z, scores).unsqueeze(1)).sum(2)  # (rows, draws)
        share = (1 / self.num_samples + change / (self.num_samples - 1)).unsqueeze(1).expand_as(index)
        P = torch.zeros_like(z).unsqueeze(1).repeat(1, k, 1).scatter_add(2, index, share)
        return P + 0 * z.detach()[:, :1].unsqueeze(2)  # NaN for a row with NaN or +inf

    def _draws_at_once(self, z: Tensor) -> int:
        """Return how many draws are made at a time."""
        if torch.compiler.is_compiling():  # which would bind a smaller number to one batch size
            return self.num_samples
        numbers_at_once = AT_ONCE.get(z.device.type, AT_ONCE["cpu"])
        return max(numbers_at_once // max(z.numel(), 1), 1)


def gradient_of_live(z: Tensor, scores: Tensor) -> Tensor:
    """Return 0 with the gradient of z (rows, n), but none of classes that are masked out.

    The covariance of a few draws with their noise is not 0, and their distance would make a learned temperature's huge.
    """
    return (z - z.detach()).masked_fill(scores <= MASKED, 0)
