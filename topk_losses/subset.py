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
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from topk_losses.operator import MASKED, MaskOperator, as_tensor, centered, finite
from topk_losses.smooth_svm import compare_with_kth, log_polynomials


class SubsetTopK(MaskOperator):
    """Marginals of a random k-subset (Vivier-Ardisson et al. 2026; Su 2024), in O(n k) for each k with mass.

    indicator_k is the probability that a class is in a subset S of k classes, drawn with weight exp(beta sum of its
    scores). The formulas are at the top of this file.
    """

    default_inverse_temperature = 0.25

    def _values(self, scores: Tensor, labels: Any, ks: Sequence[int], beta: Any, generator: Any = None) -> Tensor:
        if labels is None:
            return self._values_of_all(scores, ks, beta)
        proper = [k for k in ks if k < scores.shape[1]]
        if not proper:  # among n classes all are within n
            return (0 * finite(scores)).sum(1, keepdim=True).expand(-1, len(ks))
        distance, *_ = compare_with_kth(scores, labels, proper, 1 / as_tensor(beta, scores))  # kth / beta - s_y
        distance = distance.nan_to_num(torch.nan, -MASKED, MASKED)  # (rows, J); beta times inf would have no gradient
        return pad(logsigmoid(-beta * distance), (0, len(ks) - len(proper)))

    def _values_of_all(self, scores: Tensor, ks: Sequence[int], beta: Any) -> Tensor:
        """log exp(z_i) e_{k-1}(exp z without i) / e_k(exp z).

        Without i: sum over j of e_j of the classes before i times e_{k-1-j} of those behind.
        """
        n = scores.shape[1]
        wide = scores.dtype if scores.device.type == "mps" else torch.float64
        z = centered(scores.to(wide)) * beta
        most = max(ks, default=0)
        # e_j of the first i classes, (rows, n + 1): -inf, none, for i < j
        before, behind = (
            [pad(e, (n + 1 - e.shape[1], 0), value=-torch.inf) for e in log_polynomials(scaled, most)]
            for scaled in (z, z.flip(1))
        )
        logs = []
        for k in ks:
            pairs = [before[j][:, :-1] + behind[k - 1 - j].flip(1)[:, 1:] for j in range(k)]
            without = torch.stack(pairs).logsumexp(0)  # (rows, n)
            logs.append(z + without - before[k][:, -1:])
        return torch.stack(logs, dim=1).to(scores.dtype) if logs else scores.unsqueeze(1)[:, :0]
