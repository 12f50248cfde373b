"""Top-k by a threshold: indicator_k(s)_i = f(beta s_i - theta_k), with theta_k such that the indicator sums to k.

There is one f for each class of operators. theta falls as k grows, so that the indicators are nested: row r of P is
indicator_r - indicator_{r-1}, rows sum to 1, and a loss is a mixture of indicators, of the k that P_K has mass on and
no others. f sees the logits as they are: far from theta its logarithm has slope beta, and so has the loss. Where k or
fewer classes are not masked out, all of them are within k.

Gradients are those of the equation that defines theta (implicit function theorem), never of a solver: with
w = f'(t) / sum f'(t), d theta = sum_i w_i d z_i - dk / sum f'(t); O(n), and differentiable in turn. w is the softmax
of log f'(t): far from theta f is 0 or 1 to rounding, and f' is too small a number, but their shares are not equal.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, SupportsIndex

import torch
from torch import Generator, Tensor
from torch.nn.functional import logsigmoid

from topk_losses import roots
from topk_losses.compilers import full_precision, has_known_values
from topk_losses.kernels.registrar import register_loop
from topk_losses.numerics import MASKED, centered, ranks_like
from topk_losses.operator import TopKOperator, checked_scores


def log_laplace(t: Tensor) -> Tensor:
    """Compute log of Laplace's distribution function, whose slope at 0 is 1."""
    return torch.where(t <= 0, t - math.log(2), torch.log1p(-torch.exp(-t.abs()) / 2))


def log_capped(t: Tensor) -> Tensor:
    """Compute log min(1, exp t)."""
    return torch.where(t >= 0, 0, t)


def clip(t: Tensor) -> Tensor:
    """Compute clip(t, 0, 1), which has no slope where it is 0 or 1, whatever a gradient of clamp is there."""
    is_at_end = (t <= 0) | (t >= 1)
    return torch.where(is_at_end, (t >= 1).to(t.dtype), t)


def clip_cubed(t: Tensor) -> Tensor:
    """Compute clip(t, 0, 1)^3."""
    return clip(t) ** 3


def log_slope_of_logistic(t: Tensor) -> Tensor:
    distance = t.abs()
    return 2 * distance.sigmoid().log() - distance


def log_slope_of_laplace(t: Tensor) -> Tensor:
    return -t.abs() - math.log(2)


def log_slope_of_capped(t: Tensor) -> Tensor:
    return torch.where(t <= 0, t, MASKED)


def log_slope_of_clip(t: Tensor) -> Tensor:
    is_inside = (t > 0) & (t < 1)
    return torch.zeros_like(t).masked_fill(~is_inside, MASKED)


def log_slope_of_clip_cubed(t: Tensor) -> Tensor:
    is_inside = (t > 0) & (t < 1)
    logs = 2 * torch.where(is_inside, t, 1).log() + math.log(3)
    return torch.where(is_inside, logs, MASKED)


class Family(NamedTuple):
    """The functions of a family of thresholds.

    Attributes:
        value: log f of t or, for those that reach 0, f.
        log_slope: log f' of t, MASKED where f' is 0.
        root: theta (rows, J) of z (rows, n), the largest of which is 0, and k (rows, J), none of which exceeds a third
            argument.
        has_zeros: whether f reaches 0.
    """

    value: Callable[[Tensor], Tensor]
    log_slope: Callable[[Tensor], Tensor]
    root: Callable[[Tensor, Tensor, int], Tensor]
    has_zeros: bool = False


FAMILIES = {
    "logistic": Family(logsigmoid, log_slope_of_logistic, roots.logistic_root),
    "laplace": Family(log_laplace, log_slope_of_laplace, roots.laplace_root),
    "capped": Family(log_capped, log_slope_of_capped, roots.capped_root),
    "linear": Family(clip, log_slope_of_clip, roots.linear_root, has_zeros=True),
    "cubic": Family(clip_cubed, log_slope_of_clip_cubed, roots.cubic_root, has_zeros=True),
}


class Context(Protocol):
    """What the backward pass of Threshold needs."""

    family: str
    saved_tensors: tuple[Tensor, Tensor]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class Threshold(torch.autograd.Function):
    """theta with sum_i f(z_i - theta) = k, as a function of z (rows, n) and k (rows, J) in (0, n): (rows, J).

    The largest z of a row is 0. most: an integer that no k exceeds.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor, k: Tensor, family: str, most: int) -> Tensor:
        return FAMILIES[family].root(z, k, most)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor, Tensor, str, int], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.family = inputs[2]

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, theta = ctx.saved_tensors
        with full_precision(z.device):
            logs = FAMILIES[ctx.family].log_slope(z.unsqueeze(1) - theta.unsqueeze(2))  # (rows, J, n)
            grad_z = (grad.unsqueeze(1) @ logs.softmax(2)).squeeze(1)
            grad_k = None
            if ctx.needs_input_grad[1]:
                smallest = torch.finfo(z.dtype).tiny
                grad_k = -grad / logs.exp().sum(2).clamp(min=smallest)
            return grad_z, grad_k, None, None


def allocate_threshold(z: Tensor, k: Tensor, family: str, most: int) -> Tensor:
    """Allocate theta, (rows, J)."""
    return z.new_empty(k.shape)


find_threshold = register_loop("threshold", Threshold, allocate_threshold)


@dataclass(frozen=True)
class ThresholdOperator(TopKOperator):
    """Base class of operators with a threshold: indicator_k = f(beta s - theta_k), with theta_k such that it sums to k.

    Subclasses set `family`, a name of FAMILIES, which has f.
    """

    default_inverse_temperature: ClassVar[float] = 0.25
    family: ClassVar[str]

    @property
    def returns_logarithms(self) -> bool:  # type: ignore[override]
        return not self.has_zeros

    @property
    def has_zeros(self) -> bool:  # type: ignore[override]
        return FAMILIES[self.family].has_zeros

    def topk_probabilities(
        self, scores: Tensor, ks: Sequence[int], inverse_temperature: float | Tensor, generator: Generator | None = None
    ) -> Tensor:
        z = self._scaled(scores, inverse_temperature)  # (rows, n)
        is_unmasked = scores != -torch.inf
        return self._values_of_every_class(z, is_unmasked, ranks_like(ks, z), max(ks, default=1))

    def topk_probabilities_of_labels(
        self,
        scores: Tensor,
        labels: Tensor,
        ks: Sequence[int],
        inverse_temperature: float | Tensor,
        generator: Generator | None = None,
    ) -> Tensor:
        z = self._scaled(scores, inverse_temperature)  # (rows, n)
        is_unmasked = scores != -torch.inf
        k = ranks_like(ks, z)  # (1, J)
        theta, all_are_within = self._thresholds(z, is_unmasked, k, max(ks, default=1))  # (rows, J) each
        index = labels.unsqueeze(1)  # (rows, 1)
        t = z.gather(1, index) - theta  # (rows, J)
        takes_all = k >= z.shape[1]
        is_certain = (all_are_within & is_unmasked.gather(1, index)) | takes_all
        return self._values(t, is_certain, theta)

    def mask(
        self,
        logits: Tensor,
        k: SupportsIndex | float | Tensor,
        inverse_temperature: float | Tensor | None = None,
        generator: Generator | None = None,
    ) -> Tensor:
        """Compute the soft top-k indicator, in [0, 1], which sums to k over the classes.

        k may be any number in (0, n], or a tensor that broadcasts to (...,) and receives a gradient. Where k classes or
        fewer are not masked out, each of them has 1. The other arguments are those of permutation_matrix.
        """
        scores = checked_scores(logits)
        beta = self._checked_temperature(inverse_temperature)
        largest_k = check_number_of_classes(k, logits.shape[-1])
        k = torch.as_tensor(k, dtype=scores.dtype, device=scores.device)
        k_of_rows = k.expand(logits.shape[:-1]).reshape(-1, 1)  # (rows, 1)
        with full_precision(logits.device):
            z = self._scaled(scores, beta)
            values = self._values_of_every_class(z, scores != -torch.inf, k_of_rows, largest_k)  # (rows, 1, n)
        if self.returns_logarithms:
            values = values.exp()
        return values.reshape(logits.shape).masked_fill(logits == -torch.inf, 0)

    def _scaled(self, scores: Tensor, inverse_temperature: float | Tensor) -> Tensor:
        """Compute z = beta s, the largest of which is 0: (rows, n)."""
        return centered(scores) * inverse_temperature

    def _values_of_every_class(self, z: Tensor, is_unmasked: Tensor, k: Tensor, largest_k: int) -> Tensor:
        """Compute log f(t), or f(t), of every class: (rows, J, n) for k (1 or rows, J)."""
        theta, all_are_within = self._thresholds(z, is_unmasked, k, largest_k)  # (rows, J) each
        t = z.unsqueeze(1) - theta.unsqueeze(2)  # (rows, J, n)
        takes_all = k >= z.shape[1]
        is_certain = (all_are_within.unsqueeze(2) & is_unmasked.unsqueeze(1)) | takes_all.unsqueeze(2)
        return self._values(t, is_certain, theta.unsqueeze(2))

    def _thresholds(self, z: Tensor, is_unmasked: Tensor, k: Tensor, largest_k: int) -> tuple[Tensor, Tensor]:
        """Compute theta of each k, and whether k classes or fewer are left, which are all within k: (rows, J) each."""
        num_unmasked = is_unmasked.to(z.dtype).sum(1, keepdim=True)  # (rows, 1)
        all_are_within = k >= num_unmasked
        any_number = (num_unmasked / 2).clamp(min=0.5)  # where the threshold is not needed
        solvable_k = torch.where(all_are_within, any_number, k)
        theta = find_threshold(z, solvable_k, self.family, largest_k)
        theta = theta.masked_fill(num_unmasked == 0, 0)  # where no class is left, none is within k
        return theta, all_are_within

    def _values(self, t: Tensor, is_certain: Tensor, theta: Tensor) -> Tensor:
        """Compute log f(t), or f(t) itself where it reaches 0; f is 1 where a class is certain to be within k."""
        certainty = torch.inf + 0 * theta.detach()  # NaN stays
        return FAMILIES[self.family].value(torch.where(is_certain, certainty, t))


def check_number_of_classes(k: SupportsIndex | float | Tensor, n: int) -> int:
    """Return the largest k, rounded up; n where the numbers of a tensor cannot be read.

    Raises:
        ValueError: some k does not lie in (0, n].
    """
    if isinstance(k, Tensor):
        if not has_known_values(k) or k.numel() == 0:
            return n
        smallest, largest = map(float, k.detach().aminmax())
    else:
        smallest = largest = float(k)
    if not (smallest > 0 and largest <= n):
        got = k.tolist() if isinstance(k, Tensor) else k
        raise ValueError(f"k must lie in (0, n={n}], got {got}")
    return math.ceil(largest)


@dataclass(frozen=True)
class LML(ThresholdOperator):
    """Limited multi-label projection (Amos, Koltun and Kolter 2019): f is the logistic function.

    A class far below theta has -log indicator = beta (theta - s). At k = 1 the indicator is not softmax.
    """

    logit_std: ClassVar[float | None] = 3.0
    family: ClassVar[str] = "logistic"


@dataclass(frozen=True)
class LapSum(ThresholdOperator):
    """LapSum (Struski et al. 2025; Su 2024): f is the distribution function of Laplace's distribution.

    f(t) = exp(t) / 2 below 0, 1 - exp(-t) / 2 above. theta has a closed form, in the 2 k largest scores and the sum of
    exp of the others. At k = 1 the indicator is softmax while no class has more than half of the mass.
    """

    logit_std: ClassVar[float | None] = 2.7
    family: ClassVar[str] = "laplace"


@dataclass(frozen=True)
class CappedSoftmax(ThresholdOperator):
    """Capped softmax (Su 2024): softmax, scaled up to the sum k and cut off at 1.

    f(t) = min(1, exp t). theta has a closed form, in the k largest scores and the sum of exp of the others. At k = 1 it
    is softmax, and the loss cross-entropy. A class that is surely among the k highest has the indicator 1, and a loss
    without a gradient.
    """

    logit_std: ClassVar[float | None] = 2.2
    family: ClassVar[str] = "capped"


@dataclass(frozen=True)
class SparseTopK(ThresholdOperator):
    """Sparse top-k (Sander et al. 2023): indicators with exact zeros and ones.

    f(t) = clip(t, 0, 1) for p = 2, the Euclidean projection onto the indicators that sum to k (sparsemax at k = 1), and
    f(t) = clip(t, 0, 1)^3 for p = 4/3. Classes 1 / beta or more below the k-th score have the indicator 0: -log of it
    would be infinite, and has no gradient. A loss therefore takes the official epsilon here, and needs P_K(1) > 0 with
    top1_mode "sm" or "smce": the softmax term carries the gradient of such classes.

    Args:
        p: 2 (default) or 4/3.

    Raises:
        ValueError: p is another number.
    """

    p: float = 2

    default_inverse_temperature: ClassVar[float] = 0.1
    logit_std: ClassVar[float | None] = 0.7

    def __post_init__(self) -> None:
        if self.p not in (2, 4 / 3):
            raise ValueError(f"p must be 2 or 4/3, got {self.p!r}")

    @property
    def family(self) -> str:  # type: ignore[override]
        if self.p == 2:
            return "linear"
        return "cubic"
