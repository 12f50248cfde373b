"""Top-k by a threshold: mask_k(s)_i = f(beta s_i - theta_k), theta_k such that the mask sums to k. One f, one class.

theta falls as k grows, so that the masks are nested: row r of P is mask_r - mask_{r-1}, rows sum to 1, and a loss is a
mixture of masks, of the k that P_K has mass on and no others. f sees the logits as they are: far from theta its
logarithm has slope beta, and so has the loss. Where k or fewer classes take part, all of them are within k.

Gradients are those of the equation that defines theta (implicit function theorem), never of a solver: with
w = f'(t) / sum f'(t), d theta = sum_i w_i d x_i - dk / sum f'(t); O(n), and differentiable in turn. f' comes from the
tail of f, relative to the largest one of the sample: far from theta f is 0 or 1 to rounding, its slopes are not equal.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, SupportsIndex

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from topk_losses.checks import full_precision, has_known_values
from topk_losses.kernels import kernel
from topk_losses.operator import MASKED, MaskOperator, at_target, finite, is_mass, largest, log_softmax, pick_ranks

# Five or six do, unless the bracket has to be halved, once for each bit. Where nobody looks, on a GPU, all are made.
MAX_ITERATIONS = {torch.float32: 30, torch.float64: 60}
MOST_RANKS = 32  # for which the kernel of masks looks at few scores one by one


# For PyTorch and, bound to other names, for the kernels (sigmoids.py has `bind`): of each power its formula and slope;
# then slopes of exponential tails, near: exp(least |t| - |t|), e: exp(-|t|).
POWERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "linear": (lambda p: p, lambda p: 0.0 * p + 1.0),
    "cubic": (lambda p: p * p * p, lambda p: 3.0 * (p * p)),
}


def logistic_slope(near: Any, e: Any) -> Any:
    """Of sigmoid(t), relative to exp(-least |t|)."""
    return near / ((1.0 + e) * (1.0 + e))


def exponential_slope(near: Any, e: Any) -> Any:
    """Of an exponential tail, relative to that of the least |t|."""
    return near


def _top_and_rest(z: Tensor, M: int) -> Tensor:
    """Of z (rows, n) the M largest (or all), falling, then log sum exp of the others: (rows, M + 1)."""
    places = largest(z, min(M, z.shape[1]))
    rest = z.scatter(1, places, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([z.gather(1, places), rest], dim=1)


def _sums_below(points: Tensor) -> Tensor:
    """log of the sum of exp of all points but the first m, for m = 0, 1, ...: like points."""
    return points.flip(1).logcumsumexp(1).flip(1)


def _newton(
    evaluate: Callable[[Tensor], tuple[Tensor, Tensor]], low: Tensor, high: Tensor, theta: Tensor, least: float
) -> Tensor:
    """The root of a falling sum(theta) = k by Newton's method, in a bracket that is halved where a step fails.

    evaluate(theta): sum - k, and Newton's step. theta: the start. All tensors (rows, J). A step of at most `least`, or
    of the size of theta's rounding, is the last one. A step fails that leaves the bracket, or brings little late.
    """
    going, before = torch.ones_like(theta, dtype=torch.bool), torch.full_like(theta, torch.inf)
    may_look, rounding = has_known_values(theta), torch.finfo(theta.dtype).eps
    for iteration in range(MAX_ITERATIONS[theta.dtype]):
        excess, step = evaluate(theta)
        low, high = torch.where(excess > 0, theta, low), torch.where(excess < 0, theta, high)
        slow = (excess.abs() > before / 2) if iteration > 8 else torch.zeros_like(going)
        new, before = theta + torch.where(excess == 0, 0, step), excess.abs()
        last = (new - theta).abs() <= least + rounding * theta.abs()
        kept = last | ((new >= low) & (new <= high) & ~slow)  # false for NaN
        new = torch.where(kept, new, (low + high) / 2 + 0 * excess)  # NaN stays
        # a row stops where it would alone
        theta, going = torch.where(going, new, theta), going & ~last & ~(high - low <= rounding * theta.abs())
        if may_look and not bool(going.any()):
            break
    return theta


def _laplace_root(z: Tensor, k: Tensor, most: int) -> Tensor:
    """A quadratic equation: with m scores above theta, A = sum_{i<=m} exp(-z_i), B = sum_{i>m} exp z_i, the sum of f is
    m - A exp(theta) / 2 + B exp(-theta) / 2. At most 2 k scores are above theta, since f is above a half there.
    """
    points = _top_and_rest(z, 2 * most)
    top = points[:, :-1]
    A = pad((-top).logcumsumexp(1), (1, 0), value=-torch.inf)  # (rows, M + 1) log A for m = 0, 1, ...
    B = _sums_below(points)
    place = torch.arange(top.shape[1], dtype=k.dtype, device=k.device)  # (M,)
    at_top = place - (top + A[:, :-1]).exp() / 2 + (B[:, :-1] - top).exp() / 2  # (rows, M) the sum if theta is x_i
    m = (at_top.unsqueeze(1) < k.unsqueeze(2)).sum(2)  # (rows, J)
    A, B, q = A.gather(1, m), B.gather(1, m), k - m
    log_root = ((q.square() + (A + B).exp()).sqrt() + q.abs()).log()
    log_root = torch.where(q == 0, (A + B) / 2, log_root)  # where exp(A + B) may vanish
    return torch.where(q < 0, log_root - A, B - log_root)


def _logistic_root(z: Tensor, k: Tensor, most: int) -> Tensor:
    """By Newton's method on the logarithm of the odds of the mean, which is nearly straight where scores are close.

    The start is Laplace's root, whose tails are the same but for a factor, be the scores close or far apart.
    """
    n, finfo = z.shape[1], torch.finfo(z.dtype)
    M = min(2 * most, n)
    least = z.gather(1, largest(z, M)[:, -1:])  # (rows, 1)
    low, high = least - (k / (M - k)).log(), -(k / (n - k)).log()  # (rows, J), of z that are 0 at most
    low, high = (each + side * 4 * finfo.eps * (1 + each.abs()) for each, side in ((low, -1), (high, 1)))

    def evaluate(theta: Tensor) -> tuple[Tensor, Tensor]:
        t = z.unsqueeze(1) - theta.unsqueeze(2)  # (rows, J, n)
        tail = torch.sigmoid(-t.abs())  # 1 - f above theta, else f: where all f are 0 or 1, the digits of these count
        excess = (t >= 0).sum(2) - k - torch.copysign(tail, t).sum(2)
        slope = tail.sum(2) - torch.linalg.vecdot(tail, tail)
        odds = (excess / k).log1p() - (-excess / (n - k)).log1p()
        step = odds * (k + excess) * (n - k - excess) / (n * slope)
        # far from all scores no digits are left, and Laplace's root is the root
        return excess, torch.where(slope < finfo.tiny / finfo.eps, 0, step)

    # the error that a step leaves is of the size of its square
    return _newton(evaluate, low, high, _laplace_root(z, k, most).clamp(low, high), finfo.eps**0.5)


def _capped_root(z: Tensor, k: Tensor, most: int) -> Tensor:
    """With m classes at 1, theta = log sum_{i>m} exp z_i - log(k - m), m < k: the least of these.

    For sum_i min(1, exp(z_i - theta)) is the least over m of m + exp(-theta) sum_{i>m} exp z_i.
    """
    points = _top_and_rest(z, most)
    left = k.unsqueeze(2) - torch.arange(points.shape[1], dtype=k.dtype, device=k.device)  # (rows, J, M + 1)
    roots = _sums_below(points).unsqueeze(1) - left.log()
    return torch.where(left > 0, roots, torch.inf).amin(2)


def _power_root(z: Tensor, k: Tensor, most: int, power: Callable[[Any], Any], slope: Callable[[Any], Any]) -> Tensor:
    """By Newton's method between the score at rank k, rounded up, and 1 below."""
    kth = z.topk(min(most, z.shape[1]), dim=1).values.gather(1, k.ceil().long() - 1)  # (rows, J)
    distance = z.unsqueeze(1) - kth.unsqueeze(2)  # (rows, J, n)

    def evaluate(theta: Tensor) -> tuple[Tensor, Tensor]:
        t = distance - theta.unsqueeze(2)
        excess = power(t.clamp(0, 1)).sum(2) - k
        return excess, excess / _power_slopes(t, slope)[0].sum(2)

    zero = torch.zeros_like(kth)
    return _newton(evaluate, zero - 1, zero, zero - 0.5, torch.finfo(z.dtype).eps) + kth


def _power_slopes(t: Tensor, slope: Callable[[Any], Any]) -> tuple[Tensor, Tensor]:
    return torch.where((t > 0) & (t < 1), slope(t.clamp(0, 1)), 0), torch.ones_like(t[..., 0])


def _exponential_slopes(t: Tensor, of_tail: Callable[[Any, Any], Any], factor: float, both: bool = True) -> Any:
    away = t.abs() if both else torch.where(t <= 0, -t, torch.inf)  # (rows, J, n)
    nearest = away.detach().amin(2, keepdim=True).clamp(max=-MASKED)
    return of_tail((nearest - away).exp(), (-away).exp()), factor * (-nearest).squeeze(2).exp()


def _log_laplace(t: Tensor) -> Tensor:
    return torch.where(t <= 0, t - math.log(2), torch.log1p(-torch.exp(-t.abs()) / 2))  # slope 1 at 0


def _log_capped(t: Tensor) -> Tensor:
    return torch.where(t >= 0, 0, t)


def _power_of_clipped(t: Tensor, power: Callable[[Any], Any]) -> Tensor:
    """Where f is 0 or 1 it has no slope, whatever a gradient of clamp is there."""
    return power(torch.where((t <= 0) | (t >= 1), (t >= 1).to(t.dtype), t))


class Family(NamedTuple):
    """A family of thresholds: its formulas.

    value: log f of t or, of those that reach 0, f. root: theta (rows, J) of z (rows, n), the largest of which is 0, and
    k (rows, J), none of which exceeds a third argument. slopes: f' relative to a factor, and the factor, of t
    (rows, J, n).
    """

    value: Callable[[Tensor], Tensor]
    root: Callable[[Tensor, Tensor, int], Tensor]
    slopes: Callable[[Tensor], tuple[Tensor, Tensor]]


def _power_family(power: Callable[[Any], Any], slope: Callable[[Any], Any]) -> Family:
    of_power = partial(_power_root, power=power, slope=slope), partial(_power_slopes, slope=slope)
    return Family(partial(_power_of_clipped, power=power), *of_power)


_laplace_slopes = partial(_exponential_slopes, of_tail=exponential_slope, factor=0.5)
_capped_slopes = partial(_exponential_slopes, of_tail=exponential_slope, factor=1.0, both=False)
FAMILIES = {
    "logistic": Family(logsigmoid, _logistic_root, partial(_exponential_slopes, of_tail=logistic_slope, factor=1.0)),
    "laplace": Family(_log_laplace, _laplace_root, _laplace_slopes),
    "capped": Family(_log_capped, _capped_root, _capped_slopes),
    **{name: _power_family(*formulas) for name, formulas in POWERS.items()},
}


class Threshold(torch.autograd.Function):
    """theta with sum_i f(z_i - theta) = k, as a function of z (rows, n) and k (rows, J) in (0, n): (rows, J).

    The largest z of a row is 0. most: an integer that no k exceeds.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor, k: Tensor, family: str, most: int) -> Tensor:
        return FAMILIES[family].root(z, k, most)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.save_for_forward(inputs[0], output)
        ctx.family = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        slopes, total, factor = _slopes_at_root(ctx.saved_tensors, ctx.family)
        return ((grad / total).unsqueeze(1) @ slopes).squeeze(1), -grad / total / factor, None, None

    @staticmethod
    def jvp(ctx: Any, of_z: Tensor | None, of_k: Tensor | None, *_: None) -> Tensor:
        slopes, total, factor = _slopes_at_root(ctx.saved_tensors, ctx.family)
        by_z = 0 if of_z is None else (slopes @ of_z.unsqueeze(2)).squeeze(2)
        return (by_z - (0 if of_k is None else of_k / factor)) / total


def _slopes_at_root(saved: Sequence[Tensor], family: str) -> tuple[Tensor, Tensor, Tensor]:
    """f' of all (rows, J, n), relative to a factor (rows, J), their sum, and the factor; saved: z and theta."""
    z, theta = saved
    slopes, factor = FAMILIES[family].slopes(z.unsqueeze(1) - theta.unsqueeze(2))
    return slopes, slopes.sum(2).clamp(min=torch.finfo(z.dtype).tiny * 2**26), factor


def arguments(x: Tensor, beta: float | Tensor, labels: Tensor | None, k: Tensor, most: int, family: str) -> Tensor:
    """t = z - theta for z = beta x, (rows, J) of the labels (rows,), or of all classes, (rows, J, n), for None.

    x (rows, n), -inf for classes that take no part. k (rows, J) or (1, J), above 0, none above `most`. Where k or fewer
    classes take part, t is inf: they are within k; that of the others is MASKED times beta, about.
    """
    z, takes_part = finite(x) * beta, x > -torch.inf  # (rows, n)
    number = takes_part.sum(1, keepdim=True).to(z.dtype)  # (rows, 1)
    all_within = k >= number  # (rows, J)
    highest = z.detach().amax(1, keepdim=True).masked_fill(number == 0, 0)  # (rows, 1)
    z = z - (highest + 0 * highest)  # NaN for all of a row with +inf; theta is to have the digits of the highest scores
    theta = Threshold.apply(z, torch.where(all_within, (number / 2).clamp(min=0.5), k), family, most)
    theta = theta.masked_fill(number == 0, 0)  # where no class takes part, none is within k
    takes_part, all_of_n = takes_part.unsqueeze(1), (k >= z.shape[1]).unsqueeze(2)
    certain = all_within.unsqueeze(2) & takes_part | all_of_n  # (rows, J, n)
    if labels is None:
        t, theta = z.unsqueeze(1) - theta.unsqueeze(2), theta.unsqueeze(2)
    else:
        t, certain = z.gather(1, labels.unsqueeze(1)) - theta, at_target(certain, labels)
    return torch.where(certain, torch.inf + 0 * theta.detach(), t)  # NaN stays


def soft_ranks(scores: Tensor, beta: float | Tensor, labels: Tensor | None, ks: Sequence[int]) -> Tensor:
    """k less the soft rank 1 + sum_{j != i} sigmoid(beta (s_j - s_i)), as `arguments`: (rows, J) or (rows, J, n)."""
    k, x = ranks_like(ks, scores), finite(scores)  # (1, J), (rows, n)
    spoilt = 0 * x.detach().amax(1, keepdim=True)  # (rows, 1), NaN for a row with NaN or +inf
    own = x if labels is None else x.gather(1, labels.unsqueeze(1))  # (rows, n or 1)
    # the class itself adds a half, which is taken off again; where two are at -inf, neither is above the other
    higher = torch.sigmoid((x.unsqueeze(1) - own.unsqueeze(2)) * beta)  # (rows, n or 1, n)
    rank = higher.sum(2) + 0.5 + spoilt  # (rows, n or 1)
    return k - rank if labels is not None else k.unsqueeze(2) - rank.unsqueeze(1)


def beyond_middles(scores: Tensor, beta: float | Tensor, labels: Tensor | None, ks: Sequence[int]) -> Tensor:
    """z less the middle of its k-th and (k+1)-th largest, as `arguments`: (rows, J) or (rows, J, n)."""
    K = max(ks, default=0)
    places = largest(scores, min(K + 1, scores.shape[1]))
    if labels is None:
        top, own = scores.gather(1, places), scores
    else:  # in one, for one gradient
        own, top = scores.gather(1, torch.cat([labels.unsqueeze(1), places], dim=1)).tensor_split([1], dim=1)
    top, own = pad(finite(top), (0, K + 1 - places.shape[1]), value=MASKED), finite(own)  # (rows, K + 1)
    middle = pick_ranks((top[:, :-1] + top[:, 1:]) / 2, ks)  # (rows, J)
    middle = middle + 0 * top[:, :1].detach()  # NaN for a row with NaN or +inf
    t = own.unsqueeze(1) - middle.unsqueeze(2) if labels is None else own - middle
    return t * beta


def arguments_of_ranks(
    scores: Tensor, labels: Tensor | None, beta: float | Tensor, ks: Sequence[int], family: str
) -> Tensor:
    """`arguments` for the k of interest, rising, of a family of thresholds, or those of "ranks" and "middle"."""
    if family == "ranks":
        return soft_ranks(scores, beta, labels, ks)
    if family == "middle":
        return beyond_middles(scores, beta, labels, ks)
    return arguments(scores, beta, labels, ranks_like(ks, scores), max(ks, default=1), family)


def masks(scores: Tensor, labels: Tensor, beta: Tensor, ks: Sequence[int], family: str, softmax: bool) -> list[Tensor]:
    """What the kernel of masks computes: t (rows, J) and, if wanted, log softmax (rows, 1)."""
    t = arguments_of_ranks(scores, labels, beta, ks, family)
    return [t, log_softmax(scores, labels).unsqueeze(1)] if softmax else [t]


class PointwiseMasks(MaskOperator):
    """Masks f(t), one for each class and k. f is a sigmoid unless the family has another.

    family: of thresholds, "ranks" for soft ranks, or "middle" for the middle of two ranks.
    """

    family: str
    operation = "masks"  # of the kernels

    def _value(self, t: Tensor) -> Tensor:
        """f(t), if the operator is `guarded`, else log f(t)."""
        return FAMILIES[self.family].value(t) if self.family in FAMILIES else logsigmoid(t)

    def _arguments(self, scores: Tensor, labels: Tensor | None, ks: Sequence[int]) -> Tensor:
        """t of the labels (rows,), (rows, J), or of all classes for None, (rows, J, n)."""
        x, beta = self._scaled(scores)
        return arguments_of_ranks(x, labels, beta, ks, self.family)

    def _values(self, scores: Tensor, labels: Tensor | None, ks: Sequence[int]) -> Tensor:
        return self._value(self._arguments(scores, labels, ks))

    def _scaled(self, scores: Tensor) -> tuple[Tensor, float | Tensor]:
        """x (rows, n) and beta, with z = beta x."""
        return scores, self.beta

    def within(
        self, scores: Tensor, target: Tensor | None, ks: Sequence[int], softmax: bool
    ) -> tuple[Tensor, Tensor | None]:
        """As for every operator; by a kernel where there is one, which takes the softmax along."""
        fused = kernel(self.operation, scores, self.inverse_temperature)
        known = target is not None and not is_mass(target) and max(ks, default=MOST_RANKS) <= MOST_RANKS
        if fused is None or not known:
            return super().within(scores, target, ks, softmax)
        x, beta = self._scaled(scores)
        beside = softmax and x is scores
        t, top1, *_ = fused(x, target, as_tensor(beta, scores), list(ks), self.family, beside)
        if not softmax:
            return self._value(t), None
        return self._value(t), top1.squeeze(1) if beside else log_softmax(scores, target)


def ranks_like(ks: Sequence[int], like: Tensor) -> Tensor:
    """The k of interest as numbers like a tensor's, (1, J), without a copy from the host."""
    most = max(ks, default=0)
    return pick_ranks(torch.arange(1, most + 1, dtype=like.dtype, device=like.device).unsqueeze(0), ks)


def as_tensor(beta: float | Tensor, like: Tensor) -> Tensor:
    """The inverse temperature as a tensor () like another, without a copy from the host."""
    return beta.to(like) if isinstance(beta, Tensor) else like.new_full((), beta)


class ThresholdOperator(PointwiseMasks):
    """What the operators with a threshold share. Subclasses name their family; beta multiplies the logits."""

    def mask(self, logits: Tensor, k: float | Tensor | None = None) -> Tensor:
        """The soft k-hot of logits (..., n): in [0, 1], of the same shape, sums over n to k.

        k: in (0, n], any real number, or a tensor that broadcasts to (...,) and receives a gradient if it wants one;
        default the operator's own. Raises TypeError or ValueError.
        """
        if k is None:
            return super().mask(logits)
        scores = self._checked(logits)  # (rows, n)
        n = scores.shape[1]
        wanted = torch.as_tensor(k, dtype=scores.dtype, device=scores.device).expand(logits.shape[:-1]).reshape(-1, 1)
        most = n
        if has_known_values(wanted) and wanted.numel():
            if not bool(((wanted > 0) & (wanted <= n)).all()):
                raise ValueError(f"k must lie in (0, n={n}], got {k if wanted.numel() == 1 else wanted.tolist()}")
            most = math.ceil(float(wanted.detach().max()))
        with full_precision(logits.device):
            values = self._value(arguments(*self._scaled(scores), None, wanted, most, self.family))
        return (values if self.guarded else values.exp()).reshape(logits.shape)


class LML(ThresholdOperator):
    """The limited multi-label projection (Amos, Koltun and Kolter 2019): f = sigmoid, the mask of largest entropy.

    A class far below theta has -log mask = beta (theta - s), far above it next to nothing. At k = 1 it is no softmax.
    """

    family = "logistic"


class LapSum(ThresholdOperator):
    """LapSum (Struski et al. 2025; Su 2024): f = Laplace's distribution function, theta in closed form.

    f(t) = exp(t) / 2 below 0, 1 - exp(-t) / 2 above. Only the 2 k largest scores and the sum of exp of the others count
    for theta. At k = 1 it is softmax while no class has more than half of the mass.
    """

    family = "laplace"


class CappedSoftmax(ThresholdOperator):
    """Capped softmax (Su 2024): f = min(1, exp t), which at k = 1 is softmax, and its loss cross-entropy.

    theta in closed form, from the k largest scores and the sum of exp of the others. A class within the k highest for
    sure has the mask 1, and a loss without a gradient.
    """

    family = "capped"


class SparseTopK(ThresholdOperator):
    """Sparse top-k (Sander et al. 2023): f = clip(t, 0, 1) for p = 2, the Euclidean projection onto the masks of sum k
    (at k = 1 sparsemax), and f = clip(t, 0, 1)^3 for p = 4/3.

    Classes 1 / beta or more below the k-th score have the mask 0: -log of it would be infinite, and has no gradient. A
    loss therefore takes the official guard, log(p (1 - 2e-7) + 1e-7), here, and wants P_K(1) > 0 in the top1_mode "sm"
    or "smce": the softmax term carries the gradient of such classes. p: 2 (default) or 4/3; ValueError for another.
    """

    guarded = has_zeros = True
    shown = (*ThresholdOperator.shown, "p")

    def __init__(self, k: SupportsIndex, inverse_temperature: float | Tensor, p: float = 2) -> None:
        super().__init__(k, inverse_temperature)
        if p not in (2, 4 / 3):
            raise ValueError(f"p must be 2 or 4/3, got {p!r}")
        self.p, self.family = p, "linear" if p == 2 else "cubic"
