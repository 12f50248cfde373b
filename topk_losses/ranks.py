"""Top-k by ranks: indicator_k(s)_i estimates P(rank of i <= k), without a threshold that makes indicators sum to k.

All are nested in k; those of PerturbedTopK sum to k as well, up to rounding.
"""

from collections.abc import Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from topk_losses.checks import check_integer
from topk_losses.operator import MASKED, Beta, MaskOperator, centered, largest, pick_ranks, ranks_like

# Numbers of noise drawn at a time: what a CPU's caches hold, and what a GPU draws in one launch.
AT_ONCE = {"cpu": 2**17, "cuda": 2**24}


class DFTopK(MaskOperator):
    """DFTopK (Zhu et al. 2025): a threshold halfway between the k-th and the (k+1)-th score, in O(n).

    indicator_k = sigmoid(beta (s - (s_[k] + s_[k+1]) / 2)). The indicators of these two scores sum to 1, and those of
    all classes to no fixed number. The gradient reaches the true class, s_[k] and s_[k+1] only. For k = n the indicator
    is 1.
    """

    default_inverse_temperature = 0.25

    def _values(self, scores: Tensor, labels: Any, ks: Sequence[int], beta: Any, generator: Any = None) -> Tensor:
        K, x = max(ks, default=0), centered(scores)  # (rows, n)
        places = largest(x, min(K + 1, x.shape[1]))
        if labels is None:
            top, own = x.gather(1, places), x.unsqueeze(1)
        else:  # in one, for one gradient
            own, top = x.gather(1, torch.cat([labels.unsqueeze(1), places], dim=1)).tensor_split([1], dim=1)
        top = pad(top, (0, K + 1 - places.shape[1]), value=MASKED)  # (rows, K + 1)
        middle = pick_ranks((top[:, :-1] + top[:, 1:]) / 2, ks)  # (rows, J)
        return logsigmoid((own - (middle.unsqueeze(2) if labels is None else middle)) * beta)


class RecallSurrogate(MaskOperator):
    """Recall@k surrogate (Patel, Tolias and Matas 2022): the indicator is a logistic function of a soft rank.

    indicator_k = sigmoid(k - r_i), r_i = 1 + sum_{j != i} sigmoid(beta (s_j - s_i)). The outer sigmoid has the
    published temperature of 1: as beta grows r tends to the rank, and the indicator to sigmoid(k - rank), not to 0 and
    1. The true class takes one pass over the scores, without a sort; the indicators of all classes compare all pairs,
    O(n^2).

    Args:
        k: number of ranks.
        inverse_temperature: beta, above 0 (default: 0.25; 100 was published for cosine similarities).
    """

    default_inverse_temperature = 0.25
    pairwise = True

    def _values(self, scores: Tensor, labels: Any, ks: Sequence[int], beta: Any, generator: Any = None) -> Tensor:
        k, x = ranks_like(ks, scores), centered(scores)  # (1, J), (rows, n)
        own = x if labels is None else x.gather(1, labels.unsqueeze(1))  # (rows, n or 1)
        # the class itself adds a half, which is taken off again; where two are at -inf, neither is above the other
        higher = torch.sigmoid((x.unsqueeze(1) - own.unsqueeze(2)) * beta)  # (rows, n or 1, n)
        rank = higher.sum(2) + 0.5  # (rows, n or 1)
        return logsigmoid(k.unsqueeze(2) - rank.unsqueeze(1) if labels is None else k - rank)


class PerturbedTopK(MaskOperator):
    """Perturbed top-k (Berthet et al. 2020; Cordonnier et al. 2021): ranks of scores with normal noise.

    P[r, j] = P(j is the r-th largest of beta s + Z), Z standard normal: the mean over `num_samples` draws, new ones in
    each call. Its gradient is beta Cov[indicator, Z] over the same draws. The published E[indicator Z] has the same
    expectation, but is noise where all draws agree, since the mean of their Z is not 0. Rows sum to 1. The true class
    needs O(n K) memory per sample; the permutation matrix keeps its draws, O(n num_samples).

    A class that no draw puts among the k highest has the indicator 0 and no gradient. A loss therefore takes the
    official epsilon here, and needs P_K(1) > 0 with top1_mode "sm" or "smce". Second derivatives are 0.

    Args:
        k: number of ranks.
        inverse_temperature: beta, 1 / sigma in the papers (default: 0.1).
        num_samples: number of draws, at least 2 (default: 100).
    """

    default_inverse_temperature = 0.1
    guarded = has_zeros = stochastic = True

    def __init__(self, k: SupportsIndex, inverse_temperature: Beta = None, num_samples: SupportsIndex = 100) -> None:
        super().__init__(k, inverse_temperature)
        self.num_samples = check_integer("num_samples", num_samples, 2)

    def _values(self, scores: Tensor, labels: Any, ks: Sequence[int], beta: Any, generator: Any = None) -> Tensor:
        if labels is None:
            return pick_ranks(self._matrix(scores, max(ks, default=1), beta, generator).cumsum(1), ks)
        z = centered(scores) * beta  # (rows, n)
        fixed, k = z.detach(), ranks_like(ks, z)  # (1, J)
        batch, n = z.shape
        value = z.new_zeros(batch, len(ks))  # (rows, J), the sum over the draws of who is within k
        slope = z.new_zeros(batch, len(ks), n)  # (rows, J, n), that of its product with the noise
        drawn = torch.zeros_like(fixed)  # (rows, n), that of the noise
        at_once = self.num_samples  # a compiler would bind the number of samples to one batch size
        if not torch.compiler.is_compiling():
            at_once = max(AT_ONCE.get(z.device.type, AT_ONCE["cpu"]) // max(z.numel(), 1), 1)
        for first in range(0, self.num_samples, at_once):
            draws = min(at_once, self.num_samples - first)
            noise = z.new_empty(batch, draws, n).normal_(generator=generator)
            noised = fixed.unsqueeze(1) + noise
            own = noised.gather(2, labels.view(-1, 1, 1).expand(-1, draws, 1))
            rank = 1 + (noised > own).sum(2)  # (rows, draws)
            inside = (rank.unsqueeze(1) <= k.unsqueeze(2)).to(z.dtype)  # (rows, J, draws)
            value += inside.sum(2)
            slope.baddbmm_(inside, noise)
            drawn += noise.sum(1)
        value /= self.num_samples
        slope.addcmul_(value.unsqueeze(2), drawn.unsqueeze(1), value=-1)
        # 0, with a gradient; a sum, not a matrix product, whose backward pass autocast would round
        change = (slope * (z - fixed).unsqueeze(1)).sum(2) / (self.num_samples - 1)  # (rows, J)
        return value + change + 0 * fixed[:, :1]  # NaN for a row with NaN or +inf

    def _matrix(self, scores: Tensor, k: int, beta: Any, generator: Any = None) -> Tensor:
        z = centered(scores) * beta  # (rows, n)
        noise = z.new_empty(z.shape[0], self.num_samples, z.shape[1]).normal_(generator=generator)  # (rows, draws, n)
        index = (z.detach().unsqueeze(1) + noise).topk(k, dim=2).indices.transpose(1, 2)  # (rows, k, draws)
        # 0, with the noise as its gradient: an indicator times that, less its mean, has their covariance
        change = ((noise - noise.mean(1, keepdim=True)) * (z - z.detach()).unsqueeze(1)).sum(2)  # (rows, draws)
        share = (1 / self.num_samples + change / (self.num_samples - 1)).unsqueeze(1).expand_as(index)
        P = torch.zeros_like(z).unsqueeze(1).repeat(1, k, 1).scatter_add(2, index, share)
        return P + 0 * z.detach()[:, :1].unsqueeze(2)  # NaN for a row with NaN or +inf
