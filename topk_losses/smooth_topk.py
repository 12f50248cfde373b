"""The smooth top-k SVM losses of Berrada, Zisserman and Kumar (2018), without their log-space polynomials.

Source: "Smooth Loss Functions for Deep Top-k Classification", ICLR 2018. With o the scores of the n - 1 other
classes, e_j the elementary symmetric polynomials of exp(o / (k tau)) and s_y the true class's score,

    L = tau log(exp(alpha / tau) e_k + e_{k-1} exp(s_y / (k tau))) - tau log(e_{k-1} exp(s_y / (k tau)))
      = tau softplus((alpha + (kth - s_y) / k) / tau),    kth = k tau (log e_k - log e_{k-1}).

`kth` is a smooth k-th largest score of the other classes: as tau -> 0 it tends to the k-th largest, and L to the
hard top-k hinge relu(alpha + (o_[k] - s_y) / k). So one number per sample is all that the loss needs; it comes from
topk_losses/smooth_kth_largest.py.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from topk_losses.checks import check_choice, check_k, check_logits_and_labels, check_positive
from topk_losses.operator import to_compute_dtype
from topk_losses.smooth_kth_largest import kth_largest_other

# SmoothHardTopKLoss turns hard where exp((s_[k] - s_[k+1]) / (k tau)) reaches this ("thresh" of the official code).
HARD_RATIO = 1000.0


class SmoothTopKLoss(nn.Module):
    """The smooth top-k SVM loss, a drop-in for torch.nn.CrossEntropyLoss(reduction=..., ignore_index=...).

    Source: Berrada, Zisserman, Kumar 2018; the formula is at the top of this file. It is positive, and fades
    out over a width of k * tau where the true class's score passes the k-th largest of the others by k * alpha. The
    authors advise to cross-validate tau over powers of ten.

    Args:
        k: the number of guesses, 1 <= k < number of classes.
        tau: temperature, above 0; the smaller, the closer to the hard hinge. The paper's tau, *not* an inverse
            temperature as elsewhere in this library.
        alpha: margin in units of the logits, above 0.
        num_classes: if given, logits must have that many columns.
        reduction: "mean" (over the samples that are not ignored), "sum" or "none".
        ignore_index: samples of this label have loss and gradient 0.

    Shapes: logits (batch, n) floating point, labels (batch,) int64; returns () or, with "none", (batch,) in the
    dtype of the logits, but float32 for half precisions (and so under autocast).

    Values at the border: a sample with a logit of NaN or +inf has loss NaN and leaves the others alone. A logit of
    -inf is a class that cannot be chosen, which is the limit of ever lower scores: loss 0 if fewer than k other
    classes remain, +inf if the true class is the masked one, NaN if both (there is no limit).

    Raises:
        TypeError, ValueError: at construction for a wrong k, tau, alpha or reduction; at the call for wrong shapes
        or dtypes, k >= n, and (on the CPU) labels outside [0, n).
    """

    def __init__(
        self,
        k: int,
        tau: float = 1.0,
        alpha: float = 1.0,
        num_classes: int | None = None,
        reduction: str = "mean",
        ignore_index: int = -100,
    ) -> None:
        super().__init__()
        self.k = check_k(k, num_classes)
        self.tau = check_positive("tau", tau)
        self.alpha = check_positive("alpha", alpha)
        self.num_classes = num_classes
        self.reduction = check_choice("reduction", reduction, ("mean", "sum", "none"))
        self.ignore_index = ignore_index

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        check_logits_and_labels(logits, labels, self.num_classes, self.ignore_index)
        check_k(self.k, logits.shape[1])
        logits = to_compute_dtype(logits)
        ignored = labels == self.ignore_index  # (batch,)
        columns = labels.masked_fill(ignored, 0).unsqueeze(1)  # (batch, 1)
        smooth, hard, top = kth_largest_other(logits, columns, self.k, self.k * self.tau)
        true = logits.detach().gather(1, columns)  # (batch, 1)
        # NaN for a row with NaN or +inf; added, so that its gradient is NaN too
        spoilt = torch.where(torch.maximum(top[:, :1], true) < math.inf, 0.0, math.nan).squeeze(1)  # (batch,)

        def violation(above: Tensor) -> Tensor:
            """alpha + (kth - true) / k, (batch,): -inf (no loss, no gradient) where ignored."""
            return (self.alpha + above / self.k + spoilt).masked_fill(ignored, -math.inf)

        losses = self._losses(violation, smooth, hard, top, true)  # (batch,)
        if self.reduction == "none":
            return losses
        return losses.sum() if self.reduction == "sum" else losses.sum() / (~ignored).sum()

    def _losses(
        self, violation: Callable[[Tensor], Tensor], smooth: Tensor, hard: Tensor, top: Tensor, true: Tensor
    ) -> Tensor:
        """From what kth_largest_other returns, and the true class's score (batch, 1)."""
        return self._smooth_hinge(violation(smooth))

    def _smooth_hinge(self, violation: Tensor) -> Tensor:
        # Above 40 tau softplus is the identity to float64 rounding; PyTorch's default of 20 would show there.
        return F.softplus(violation, beta=1 / self.tau, threshold=40)

    def extra_repr(self) -> str:
        return (
            f"k={self.k}, tau={self.tau:g}, alpha={self.alpha:g}, num_classes={self.num_classes}, "
            f"reduction={self.reduction!r}, ignore_index={self.ignore_index}"
        )


class SmoothHardTopKLoss(SmoothTopKLoss):
    """SmoothTopKLoss, but hard for samples whose k-th and (k+1)-th largest logits lie far apart.

    Where s_[k] - s_[k+1] >= k tau log(1000), the true class included in the ranking, the loss is the hard hinge

        relu(mean of the k largest of (others + alpha) - (sum of the k-1 largest of the others + s_y) / k)
        = relu(alpha + (o_[k] - s_y) / k).

    The official authors' `smooth_hard`, which they use to save time and for stability; here the smooth branch is
    stable and is evaluated for every sample, so this class exists to reproduce their numbers. The loss is not
    continuous at the switch. Arguments, shapes and errors are those of SmoothTopKLoss.
    """

    def _losses(
        self, violation: Callable[[Tensor], Tensor], smooth: Tensor, hard: Tensor, top: Tensor, true: Tensor
    ) -> Tensor:
        # Insert the true class's score into the ranking of the others: s_[r] is the median of o_[r], s_y, o_[r-1].
        kth, following, true = top[:, self.k - 1], top[:, self.k], true.squeeze(1)  # (batch,)
        kth_of_all = torch.maximum(kth, true)  # (batch,)
        if self.k > 1:
            kth_of_all = torch.minimum(kth_of_all, top[:, self.k - 2])
        next_of_all = torch.maximum(following, torch.minimum(kth, true))  # (batch,)
        far_apart = kth_of_all - next_of_all >= self.k * self.tau * math.log(HARD_RATIO)  # (batch,)
        return torch.where(far_apart, F.relu(violation(hard)), self._smooth_hinge(violation(smooth)))
