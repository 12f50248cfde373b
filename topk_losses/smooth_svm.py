"""The smooth k-th largest score, and with it the smooth top-k SVM losses of Berrada, Zisserman and Kumar (2018)."""

import math
from collections.abc import Sequence
from typing import ClassVar, SupportsIndex

import torch
from torch import Tensor
from torch.nn.functional import pad, relu, softplus
from typing_extensions import Unpack

from topk_losses import checks
from topk_losses.classification import CallSettings, CommonSettings
from topk_losses.kernels import find_kernel
from topk_losses.numerics import MASKED, finite, log_cumsum_exp, number_like, select_ranks, wide_dtype
from topk_losses.single_k import SingleKLoss

# SmoothHardTopKLoss turns hard where exp((s_[k] - s_[k+1]) / (k tau)) reaches this ("thresh" of the official code).
HARD_RATIO = 1000.0
# For more ranks than these, where e^k is no float32 number, the kernel adds all classes one by one. With 1,500 classes
# its numbers underflow then.
KERNEL_RANKS = 64
KERNEL_CLASSES = 1000
# Above this softplus is the identity to float64 rounding; PyTorch's default of 20 would show there.
SOFTPLUS_THRESHOLD = 40


def log_polynomials(z: Tensor, k: int) -> list[Tensor]:
    """Compute log e_j of exp(z), z (rows, n), for j = 0..k <= n: of the first j, ..., n numbers, (rows, n - j + 1).

    O(n k) per row, by a recurrence over j on logarithms.
    """
    e = [torch.zeros_like(pad(z, (1, 0)))]
    for j in range(k):
        e.append(log_cumsum_exp(z[:, j:] + e[j][:, :-1]))
    return e


def polynomials_of_first(z: Tensor, k: int) -> list[Tensor]:
    """Compute log e_j, j = 0..k, of exp of the first i numbers of z, i = 0..n: (rows, n + 1); -inf, none, for i < j."""
    num_columns = z.shape[1] + 1
    polynomials = []
    for e in log_polynomials(z, k):
        polynomials.append(pad(e, (num_columns - e.shape[1], 0), value=-math.inf))
    return polynomials


class PolynomialsOfOthers:
    """Elementary symmetric polynomials of exp(z) without one class, for each class of z (rows, n) in turn."""

    def __init__(self, z: Tensor, k: int) -> None:
        self.of_first = polynomials_of_first(z, k)
        self.of_last = [e.flip(1) for e in polynomials_of_first(z.flip(1), k)]

    def log(self, j: int) -> Tensor:
        """Compute log e_j without each class, j <= k: sums over those before it and those behind. (rows, n), O(n j)."""
        products = []
        for i in range(j + 1):
            products.append(self.of_first[i][:, :-1] + self.of_last[j - i][:, 1:])
        return torch.stack(products).logsumexp(0)


def kth_largest(scores: Tensor, labels: Tensor, ks: Sequence[int], temperature: Tensor) -> list[Tensor]:
    """Compute what the kernel computes: the smooth and the hard k-th largest of the others less the true class's score.

    Both are (rows, J). The smooth one is temperature (log e_k - log e_{k-1}), e_j the j-th elementary symmetric
    polynomial of exp(others / temperature), and tends to the hard one as the temperature tends to 0. Also returned: the
    K + 1 largest scores of the others, falling, without a gradient, -inf where there are too few. scores (rows, n),
    labels (rows,) int64, ks rising up to K < n. O(n K) per row.
    """
    index = labels.unsqueeze(1)  # (rows, 1)
    others = finite(scores).scatter(1, index, MASKED)
    true_score = scores.gather(1, index)
    top = others.topk(ks[-1] + 1, dim=1).values  # (rows, K + 1)
    # Logarithms of the size of z carry the rounding of z: float64, where the device has it, until all is subtracted.
    wide = wide_dtype(scores)
    highest = top[:, :1].detach().to(wide)  # (rows, 1)
    e = log_polynomials((others.to(wide) - highest) / temperature, ks[-1])
    logs = torch.stack([e[k][:, -1] - e[k - 1][:, -1] for k in ks], dim=1)  # (rows, J)
    smooth = (highest - true_score.to(wide) + temperature * logs).to(scores.dtype)
    kth = select_ranks(top, ks)  # (rows, J)
    is_enough = kth > MASKED / 2  # are there k others at all?
    top = top.detach()
    top = top.masked_fill(top <= MASKED / 2, -math.inf)
    return [torch.where(is_enough, smooth, -math.inf), torch.where(is_enough, kth - true_score, -math.inf), top]


def compare_with_kth(scores: Tensor, labels: Tensor, ks: Sequence[int], temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the smooth and the hard k-th largest of the others less the true class's score: (rows, J) each.

    By a kernel where there is one, with NaN for a row with NaN or +inf.
    """
    compute = kth_largest
    if ks[-1] <= KERNEL_RANKS or scores.shape[1] <= KERNEL_CLASSES:
        compute = find_kernel("kth_largest", scores, temperature) or kth_largest
    smooth, hard, top, *_ = compute(scores, labels, ks, temperature)
    highest = torch.maximum(top[:, :1], scores.gather(1, labels.unsqueeze(1))).detach()  # (rows, 1)
    # added, so that its gradient is NaN too
    nan_of_spoilt = torch.zeros_like(highest).where(highest < math.inf, math.nan)
    return smooth + nan_of_spoilt, hard + nan_of_spoilt


def every_class_compared_with_kth(scores: Tensor, k: int, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Compute what `compare_with_kth` does, for one k, with each class as the true one: (rows, n) each.

    O(n k) per row.
    """
    z = finite(scores)
    top = z.topk(k + 1, dim=1)
    highest = top.values[:, :1].detach()  # (rows, 1)
    wide = wide_dtype(scores)
    others = PolynomialsOfOthers((z.to(wide) - highest.to(wide)) / temperature, k)
    logs = others.log(k) - others.log(k - 1)  # (rows, n)
    smooth = (highest.to(wide) - scores.to(wide) + temperature * logs).to(scores.dtype)

    is_among = torch.zeros_like(z, dtype=torch.bool).scatter(1, top.indices[:, :-1], True)
    kth = torch.where(is_among, top.values[:, -1:], top.values[:, -2:-1])
    is_enough = kth > MASKED / 2  # are there k others at all?
    nan_of_spoilt = 0 * highest  # NaN for a row with NaN or +inf
    smooth = torch.where(is_enough, smooth, -math.inf) + nan_of_spoilt
    return smooth, torch.where(is_enough, kth - scores, -math.inf) + nan_of_spoilt


class SmoothTopKLoss(SingleKLoss):
    """Smooth top-k SVM loss (Berrada, Zisserman and Kumar 2018).

    L = tau softplus((alpha + (kth - s_y) / k) / tau), kth = k tau (log e_k - log e_{k-1}), where e_j are the elementary
    symmetric polynomials of exp(o / (k tau)) and o the scores of the other classes. As tau -> 0 it tends to the hard
    hinge relu(alpha + (o_[k] - s_y) / k). A sample with a logit of NaN or +inf has loss NaN and leaves the others
    alone. A class at -inf is masked out. The loss is 0 if fewer than k other classes remain; else it is +inf if
    the true class is masked out.

    Args:
        k: number of guesses, 1 <= k < number of classes.
        tau: temperature, above 0, a number or a torch.nn.Parameter of shape (), which is learned (default: 1). The
            smaller, the closer to the hard hinge: it is *not* an inverse temperature. The authors advise to
            cross-validate it over powers of ten.
        alpha: margin in units of the logits, above 0 (default: 1).
        common: arguments of ClassificationLoss.
    """

    default_inverse_temperature: ClassVar[float | None] = 1.0
    temperature_name: ClassVar[str] = "tau"
    alpha = checks.Checked(checks.check_positive)

    def __init__(
        self, k: SupportsIndex, tau: float | Tensor = 1.0, alpha: float = 1.0, **common: Unpack[CommonSettings]
    ) -> None:
        super().__init__(k, **common)
        self.tau = checks.check_inverse_temperature(tau, "tau")
        self.alpha = alpha

    def loss_of_labels(self, logits: Tensor, labels: Tensor, call: CallSettings) -> Tensor:
        self.check_k_of(logits)
        smooth, hard = compare_with_kth(logits, labels, [self.k], self._temperature(logits, call))
        return self._loss_of_distance(smooth, hard, logits, call).squeeze(1)

    def loss_of_every_class(self, logits: Tensor, call: CallSettings) -> Tensor:
        self.check_k_of(logits)
        compute = SmoothTopKLoss._loss_of_every_class
        return self.of_few_rows(compute, logits, call, scores_per_class=self.k + 1)

    def _loss_of_every_class(self, logits: Tensor, call: CallSettings) -> Tensor:
        smooth, hard = every_class_compared_with_kth(logits, self.k, self._temperature(logits, call))
        return self._loss_of_distance(smooth, hard, logits, call)

    def _temperature(self, logits: Tensor, call: CallSettings) -> Tensor:
        return number_like(self.k * call.inverse_temperature, logits)

    def _loss_of_distance(self, smooth: Tensor, hard: Tensor, logits: Tensor, call: CallSettings) -> Tensor:
        """Compute the losses of labels whose k-th largest other score lies so far above their own, (rows, c) each."""
        tau = call.inverse_temperature
        gap = smooth.nan_to_num(math.nan, -MASKED, MASKED)  # a learned tau has no gradient of infinities
        losses = tau * softplus((self.alpha + gap / self.k) / tau, threshold=SOFTPLUS_THRESHOLD)
        return torch.where(smooth == math.inf, math.inf, losses)


class SmoothHardTopKLoss(SmoothTopKLoss):
    """Smooth top-k SVM loss as released: hard for samples whose k-th and (k+1)-th largest logits lie far apart.

    Where s_[k] - s_[k+1] >= k tau log(1000), the true class included in the ranking, the loss is the hard hinge
    relu(alpha + (o_[k] - s_y) / k). The release does so to save time and for stability; this class exists to reproduce
    its numbers, and evaluates the smooth loss of every sample. The loss is not continuous at the switch. Arguments,
    shapes and errors are those of SmoothTopKLoss.
    """

    def _loss_of_distance(self, smooth: Tensor, hard: Tensor, logits: Tensor, call: CallSettings) -> Tensor:
        k = self.k
        ranked = logits.detach().topk(k + 1, dim=1).values  # (rows, k + 1)
        gap = ranked[:, k - 1 : k] - ranked[:, k:]  # (rows, 1)
        is_far_apart = gap >= k * call.inverse_temperature * math.log(HARD_RATIO)
        hinge = relu(self.alpha + hard / k)
        return torch.where(is_far_apart, hinge, super()._loss_of_distance(smooth, hard, logits, call))
