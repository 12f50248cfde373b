"""The smooth k-th largest score, and with it the smooth top-k SVM losses of Berrada, Zisserman and Kumar (2018)."""

import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, SupportsIndex

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


class Comparison(NamedTuple):
    """The k-th largest scores of the others beside the true class's.

    Attributes:
        smooth, hard: the smooth and the hard one less the true class's score, (rows, J) each.
        top: the K + 1 largest scores of the others, (rows, K + 1), without a gradient.
    """

    smooth: Tensor
    hard: Tensor
    top: Tensor


def compare_with_kth(scores: Tensor, labels: Tensor, ks: Sequence[int], temperature: Tensor) -> Comparison:
    """Compute kth_largest by a kernel where there is one, with NaN for a row with NaN or +inf."""
    compute = find_kernel("kth_largest", scores, temperature) or kth_largest
    outputs = compute(scores, labels, ks, temperature)
    top = outputs[2]
    highest = torch.maximum(top[:, :1], scores.gather(1, labels.unsqueeze(1))).detach()  # (rows, 1)
    # added, so that its gradient is NaN too
    nan_of_spoilt = torch.zeros_like(highest).where(highest < math.inf, math.nan)
    return Comparison(outputs[0] + nan_of_spoilt, outputs[1] + nan_of_spoilt, top)


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
        common: arguments of ClassificationLoss.
    """

    default_inverse_temperature: ClassVar[float | None] = 1.0
    temperature_name: ClassVar[str] = "tau"

    def __init__(
        self, k: SupportsIndex, tau: float | Tensor = 1.0, alpha: float = 1.0, **common: Unpack[CommonSettings]
    ) -> None:
        super().__init__(k, **common)
        self.tau = checks.check_inverse_temperature(tau, "tau")
        self.alpha = checks.check_positive("alpha", alpha)

    def current_temperature(self, logits: Tensor, is_counted: Tensor) -> float | Tensor:
        return checks.current_inverse_temperature(self.tau, "tau")

    def loss_of_labels(self, logits: Tensor, labels: Tensor, call: CallSettings) -> Tensor:
        compared = self._compare(logits, labels, call)
        return self._smooth_losses(compared, call)

    def _compare(self, logits: Tensor, labels: Tensor, call: CallSettings) -> Comparison:
        self.check_k_of(logits)
        temperature = number_like(self.k * call.inverse_temperature, logits)
        return compare_with_kth(logits, labels, [self.k], temperature)

    def _smooth_losses(self, compared: Comparison, call: CallSettings) -> Tensor:
        """Compute the loss of each row: (rows,)."""
        tau = call.inverse_temperature
        smooth = compared.smooth.squeeze(1)
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

    def loss_of_labels(self, logits: Tensor, labels: Tensor, call: CallSettings) -> Tensor:
        k = self.k
        compared = self._compare(logits, labels, call)
        true_score = logits.detach().gather(1, labels.unsqueeze(1))  # (rows, 1)
        ranked = torch.cat([compared.top, true_score], dim=1).sort(1, descending=True).values  # (rows, k + 2)
        gap = ranked[:, k - 1] - ranked[:, k]  # (rows,)
        is_far_apart = gap >= k * call.inverse_temperature * math.log(HARD_RATIO)
        hinge = relu(self.alpha + compared.hard.squeeze(1) / k)
        return torch.where(is_far_apart, hinge, self._smooth_losses(compared, call))
