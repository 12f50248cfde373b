"""The smooth k-th largest score, and with it the smooth top-k SVM losses of Berrada, Zisserman and Kumar (2018)."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, SupportsIndex

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import pad

from topk_losses.checks import check_k, check_positive
from topk_losses.classification import CallSettings
from topk_losses.kernels import find_kernel
from topk_losses.operator import MASKED, LogCumSumExp, as_tensor, finite, pick_ranks
from topk_losses.single_k import SingleKLoss

# SmoothHardTopKLoss turns hard where exp((s_[k] - s_[k+1]) / (k tau)) reaches this ("thresh" of the official code).
HARD_RATIO = 1000.0


def log_polynomials(z: Tensor, k: int) -> list[Tensor]:
    """Compute log e_j of exp(z), z (rows, n), for j = 0..k <= n: of the first j, ..., n numbers, (rows, n - j + 1).

    O(n k) per row, by a recurrence over j on logarithms.
    """
    e = [torch.zeros_like(pad(z, (1, 0)))]
    for j in range(k):
        e.append(LogCumSumExp.apply(z[:, j:] + e[j][:, :-1]))
    return e


def kth_largest(scores: Tensor, labels: Tensor, ks: Sequence[int], temperature: Tensor) -> list[Tensor]:
    """Compute what the kernel computes: the smooth and the hard k-th largest of the others less the true class's score.

    Both are (rows, J). The smooth one is temperature (log e_k - log e_{k-1}), e_j the j-th elementary symmetric
    polynomial of exp(others / temperature), and tends to the hard one as the temperature tends to 0. Also returned: the
    K + 1 largest scores of the others, falling, without a gradient, -inf where there are too few. scores (rows, n),
    labels (rows,) int64, ks rising up to K < n. O(n K) per row.
    """
    own = labels.unsqueeze(1)  # (rows, 1)
    others, true = finite(scores).scatter(1, own, MASKED), scores.gather(1, own)
    top = others.topk(ks[-1] + 1, dim=1).values  # (rows, K + 1)
    # Logarithms of the size of z carry the rounding of z: float64, where the device has it, until all is subtracted.
    wide = scores.dtype if scores.device.type == "mps" else torch.float64
    highest = top[:, :1].detach().to(wide)  # (rows, 1)
    e = log_polynomials((others.to(wide) - highest) / temperature, ks[-1])
    logs = torch.stack([e[k][:, -1] - e[k - 1][:, -1] for k in ks], dim=1)  # (rows, J)
    smooth = (highest - true.to(wide) + temperature * logs).to(scores.dtype)
    kth = pick_ranks(top, ks)  # (rows, J)
    enough = kth > MASKED / 2  # are there k others at all?
    top = top.detach().masked_fill(top <= MASKED / 2, -math.inf)
    return [torch.where(enough, smooth, -math.inf), torch.where(enough, kth - true, -math.inf), top]


def compare_with_kth(scores: Tensor, labels: Tensor, ks: Sequence[int], temperature: Tensor) -> list[Tensor]:
    """Compute kth_largest by a kernel where there is one, with NaN for a row with NaN or +inf."""
    compute = find_kernel("kth_largest", scores, temperature) or kth_largest
    smooth, hard, top, *_ = compute(scores, labels, ks, temperature)
    highest = torch.maximum(top[:, :1], scores.gather(1, labels.unsqueeze(1))).detach()  # (rows, 1)
    # added, so that its gradient is NaN too
    spoilt = torch.zeros_like(highest).where(highest < math.inf, math.nan)
    return [smooth + spoilt, hard + spoilt, top]


class SmoothTopKLoss(SingleKLoss):
    """Smooth top-k SVM loss (Berrada, Zisserman and Kumar 2018).

    L = tau softplus((alpha + (kth - s_y) / k) / tau), kth = k tau (log e_k - log e_{k-1}), where e_j are the elementary
    symmetric polynomials of exp(o / (k tau)) and o the scores of the other classes. As tau -> 0 it tends to the hard
    hinge relu(alpha + (o_[k] - s_y) / k). A sample with a logit of NaN or +inf has loss NaN and leaves the others
    alone. A class at -inf is masked out: loss 0 if fewer than k other classes remain, +inf if the true class is the
    masked one.

    Args:
        k: number of guesses, 1 <= k < number of classes.
        tau: temperature, above 0, a number or a tensor () that is learned (default: 1). The smaller, the closer to the
            hard hinge: it is *not* an inverse temperature. The authors advise to cross-validate it over powers of ten.
        alpha: margin in units of the logits, above 0 (default: 1).
        others: arguments of ClassificationLoss.
    """

    temperature = "tau"
    shown = ("tau", "alpha", *SingleKLoss.shown)
    rules: ClassVar = {**SingleKLoss.rules, "alpha": check_positive}
    turns_hard = False  # where the k-th and the (k+1)-th largest logits lie far apart

    def __init__(
        self, k: SupportsIndex, tau: float | Tensor = 1.0, alpha: float = 1.0, num_classes: SupportsIndex | None = None,
        **others: Any,
    ) -> None:  # fmt: skip
        super().__init__(k, num_classes, **others)
        self.tau: Any = tau
        self.alpha = alpha

    def _losses(self, scores: Tensor, target: Tensor | None, call: CallSettings) -> Any:
        check_k(self.k, scores.shape[1] - 1)
        if target is None:
            return None
        tau = call.beta
        k, results = self.k, compare_with_kth(scores, target, [self.k], as_tensor(self.k * tau, scores))
        smooth, hard, top = results[0].squeeze(1), results[1].squeeze(1), results[2]  # (rows,) twice, (rows, k + 1)
        gap = smooth.nan_to_num(math.nan, -MASKED, MASKED)  # a learned tau has no gradient of infinities
        # Above 40 tau softplus is the identity to float64 rounding; PyTorch's default of 20 would show there.
        losses = tau * F.softplus((self.alpha + gap / k) / tau, threshold=40)
        losses = torch.where(smooth == math.inf, math.inf, losses)
        if not self.turns_hard:
            return losses
        ranked = torch.cat([top, scores.detach().gather(1, target.unsqueeze(1))], dim=1).sort(1, descending=True).values
        far_apart = ranked[:, k - 1] - ranked[:, k] >= k * tau * math.log(HARD_RATIO)  # (rows,)
        return torch.where(far_apart, F.relu(self.alpha + hard / k), losses)


class SmoothHardTopKLoss(SmoothTopKLoss):
    """Smooth top-k SVM loss as released: hard for samples whose k-th and (k+1)-th largest logits lie far apart.

    Where s_[k] - s_[k+1] >= k tau log(1000), the true class included in the ranking, the loss is the hard hinge
    relu(alpha + (o_[k] - s_y) / k). The release does so to save time and for stability; this class exists to reproduce
    its numbers, and evaluates the smooth loss of every sample. The loss is not continuous at the switch. Arguments,
    shapes and errors are those of SmoothTopKLoss.
    """

    turns_hard = True
