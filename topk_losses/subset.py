"""Top-k by a random subset: indicator_k(s)_i = P(i in S), S a k-subset drawn with weight exp(beta sum of its scores).

With e_k the elementary symmetric polynomials of exp(beta s), indicator_k = d log e_k / d (beta s): the top-k of largest
entropy over subsets (Vivier-Ardisson et al. 2026, dynamic programming with Shannon's entropy; Su 2024, GradTopK).
Indicators sum to k and are nested in k; at k = 1 they are softmax. For the true class y, with e of the other classes,

    -log indicator_k[y] = softplus(kth - beta s_y),    kth = log e_k - log e_{k-1},

which is the smooth top-k SVM loss of Berrada et al. (2018) without a margin, at k tau = 1 / beta: one number per
sample and k, from smooth_svm.py. A loss over a P_K with several k mixes them, -log sum_k P_K(k) indicator_k[y]; no
publication of that was found.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor
from torch.nn.functional import logsigmoid, pad

from topk_losses.numerics import MASKED, centered, finite, number_like, wide_dtype
from topk_losses.operator import TopKOperator
from topk_losses.smooth_svm import PolynomialsOfOthers, compare_with_kth


@dataclass(frozen=True)
class SubsetTopK(TopKOperator):
    """Marginals of a random k-subset (Vivier-Ardisson et al. 2026; Su 2024), in O(n k) for each k with mass.

    indicator_k is the probability that a class is in a subset S of k classes, drawn with weight exp(beta sum of its
    scores). The formulas are at the top of this file.
    """

    default_inverse_temperature: ClassVar[float] = 0.25
    logit_std: ClassVar[float | None] = 3.0
    returns_logarithms: ClassVar[bool] = True

    def topk_probabilities_of_labels(
        self,
        scores: Tensor,
        labels: Tensor,
        ks: Sequence[int],
        inverse_temperature: float | Tensor,
        generator: Generator | None = None,
    ) -> Tensor:
        proper_ks = [k for k in ks if k < scores.shape[1]]
        if not proper_ks:  # among n classes all are within n
            return (0 * finite(scores)).sum(1, keepdim=True).expand(-1, len(ks))
        temperature = 1 / number_like(inverse_temperature, scores)
        distance, _ = compare_with_kth(scores, labels, proper_ks, temperature)  # (rows, J), kth / beta - s_y
        distance = distance.nan_to_num(torch.nan, -MASKED, MASKED)  # beta times inf would have no gradient
        return pad(logsigmoid(-inverse_temperature * distance), (0, len(ks) - len(proper_ks)))

    def topk_probabilities(
        self, scores: Tensor, ks: Sequence[int], inverse_temperature: float | Tensor, generator: Generator | None = None
    ) -> Tensor:
        """Compute log exp(z_i) e_{k-1}(exp z without i) / e_k(exp z)."""
        if not ks:
            return scores.unsqueeze(1)[:, :0]
        z = centered(scores.to(wide_dtype(scores))) * inverse_temperature  # (rows, n)
        others = PolynomialsOfOthers(z, max(ks))
        is_unmasked = scores > -torch.inf  # (rows, n)
        num_unmasked = is_unmasked.sum(1, keepdim=True)  # (rows, 1)
        logs = []
        for k in ks:
            is_certain = is_unmasked & (num_unmasked <= k)  # where e_k is made of masked classes, too
            logs.append(torch.where(is_certain, 0, z + others.log(k - 1) - others.of_first[k][:, -1:]))
        return torch.stack(logs, dim=1).to(scores.dtype)
