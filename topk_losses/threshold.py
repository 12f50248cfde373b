"""Top-k by a threshold: indicator_k(s)_i = f(beta s_i - theta_k), with theta_k such that the indicator sums to k.

There is one f for each class of operators. theta falls as k grows, so that the indicators are nested: row r of P is
indicator_r - indicator_{r-1}, rows sum to 1, and a loss is a mixture of indicators, of the k that P_K has mass on and
no others. f sees the logits as they are: far from theta its logarithm has slope beta, and so has the loss. Where k or
fewer classes are not masked out, all of them are within k.

Gradients are those of the equation that defines theta (implicit function theorem), never of a solver: with
w = f'(t) / sum f'(t), d theta = sum_i w_i d x_i - dk / sum f'(t); O(n), and differentiable in turn. w is the softmax
of log f'(t): far from theta f is 0 or 1 to rounding, and f' is too small a number, but their shares are not equal.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, SupportsIndex

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from topk_losses.checks import as_operator, full_precision, has_known_values
from topk_losses.operator import MASKED, Beta, MaskOperator, centered, ranks_like

# Five or six do, unless the bracket has to be halved, once for each bit. Where nobody looks, on a GPU, all are made.
MAX_ITERATIONS = {torch.float32: 30, torch.float64: 60}


def _top_and_rest(z: Tensor, M: int) -> tuple[Tensor, Tensor]:
    """The M largest of z (rows, n), or all, falling (rows, M); and z with -inf in their places (rows, n)."""
    top, places = z.topk(min(M, z.shape[1]), dim=1)
    return top, z.scatter(1, places, -torch.inf)


def _sums_below(top: Tensor, rest: Tensor) -> Tensor:
    """log of the sum of exp of all points but the first m, for m = 0 to M: (rows, M + 1)."""
    points = torch.cat([top, rest.logsumexp(1, keepdim=True)], dim=1)
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


def _laplace_root(top: Tensor, rest: Tensor, k: Tensor) -> Tensor:
    """Solve a quadratic equation: with m scores above theta, A = sum_{i<=m} exp(-z_i), B = sum_{i>m} exp z_i, the sum
    of f is m - A exp(theta) / 2 + B exp(-theta) / 2. At most 2 k scores are above theta, where f is above a half.
    """
    A = pad((-top).logcumsumexp(1), (1, 0), value=-torch.inf)  # (rows, M + 1) log A for m = 0, 1, ...
    B = _sums_below(top, rest)
    place = torch.arange(top.shape[1], dtype=k.dtype, device=k.device)  # (M,)
    at_top = place - (top + A[:, :-1]).exp() / 2 + (B[:, :-1] - top).exp() / 2  # (rows, M) the sum if theta is x_i
    m = (at_top.unsqueeze(1) < k.unsqueeze(2)).sum(2)  # (rows, J)
    A, B, q = A.gather(1, m), B.gather(1, m), k - m
    log_root = ((q.square() + (A + B).exp()).sqrt() + q.abs()).log()
    log_root = torch.where(q == 0, (A + B) / 2, log_root)  # where exp(A + B) may vanish
    return torch.where(q < 0, log_root - A, B - log_root)


def _logistic_root(z: Tensor, k: Tensor, most: int) -> Tensor:
    """Newton's method on the logarithm of the odds of the mean, which is nearly straight where scores are close.

    The start is Laplace's root, whose tails are the same but for a factor, be the scores close or far apart.
    """
    n, finfo = z.shape[1], torch.finfo(z.dtype)
    top, rest = _top_and_rest(z, 2 * most)  # (rows, M), (rows, n)
    M = top.shape[1]
    low, high = top[:, -1:] - (k / (M - k)).log(), -(k / (n - k)).log()  # (rows, J), of z that are 0 at most
    low = low - 4 * finfo.eps * (1 + low.abs())
    high = high + 4 * finfo.eps * (1 + high.abs())

    def evaluate(theta: Tensor) -> tuple[Tensor, Tensor]:
        t = top.unsqueeze(1) - theta.unsqueeze(2)  # (rows, J, M)
        tail = torch.sigmoid(-t.abs())  # 1 - f above theta, else f: where all f are 0 or 1, the digits of these count
        f = torch.sigmoid_(rest.unsqueeze(1) - theta.unsqueeze(2))  # (rows, J, n) of the rest, which is below theta
        total = f.sum(2)
        excess = (t >= 0).sum(2) - k - torch.copysign(tail, t).sum(2) + total
        slope = (tail - tail.square()).sum(2) + total - torch.linalg.vector_norm(f, dim=2).square()
        odds = (excess / k).log1p() - (-excess / (n - k)).log1p()
        step = odds * (k + excess) * (n - k - excess) / (n * slope)
        # far from all scores no digits are left, and Laplace's root is the root
        return excess, torch.where(slope < finfo.tiny / finfo.eps, 0, step)

    # the error that a step leaves is of the size of its square
    return _newton(evaluate, low, high, _laplace_root(top, rest, k).clamp(low, high), finfo.eps**0.5)


def _capped_root(z: Tensor, k: Tensor, most: int) -> Tensor:
    """With m classes at 1, theta = log sum_{i>m} exp z_i - log(k - m), m < k: the least of these.

    For sum_i min(1, exp(z_i - theta)) is the least over m of m + exp(-theta) sum_{i>m} exp z_i.
    """
    sums = _sums_below(*_top_and_rest(z, most))  # (rows, M + 1)
    left = k.unsqueeze(2) - torch.arange(sums.shape[1], dtype=k.dtype, device=k.device)  # (rows, J, M + 1)
    return torch.where(left > 0, sums.unsqueeze(1) - left.log(), torch.inf).amin(2)


def _power_root(z: Tensor, k: Tensor, most: int, power: int) -> Tensor:
    """Newton's method between the score at rank k, rounded up, and 1 below.

    Far from the root it acts on sum^(1 / (power + 1)), which is nearly straight where scores are evenly spread.
    """
    top = z.topk(min(most, z.shape[1]), dim=1).values  # (rows, M): f is 1 for no others
    kth = top.gather(1, k.ceil().long() - 1)  # (rows, J)
    distance, above = z.unsqueeze(1) - kth.unsqueeze(2), top.unsqueeze(1) - kth.unsqueeze(2)  # (rows, J, n or M)

    def evaluate(theta: Tensor) -> tuple[Tensor, Tensor]:
        t = (distance - theta.unsqueeze(2)).clamp(0, 1)
        total = (t**power).sum(2) if power > 1 else t.sum(2)  # (rows, J)
        slope = power * (t.square() if power > 1 else t.ceil_()).sum(2)
        slope = slope - power * (above - theta.unsqueeze(2) >= 1).sum(2)
        excess = total - k
        bent = (power + 1) * total * (1 - (k / total) ** (1 / (power + 1)))
        return excess, torch.where(excess.abs() < k / 8, excess, bent) / slope

    zero = torch.zeros_like(kth)
    return _newton(evaluate, zero - 1, zero, zero - 0.5, torch.finfo(z.dtype).eps) + kth


def _log_power_slopes(t: Tensor, power: int) -> Tensor:
    inside = (t > 0) & (t < 1)
    logs = (power - 1) * torch.where(inside, t, 1).log() + math.log(power) if power > 1 else 0.0
    return torch.where(inside, logs, MASKED).to(t.dtype)


def _log_logistic_slopes(t: Tensor) -> Tensor:
    away = t.abs()
    return 2 * away.sigmoid().log() - away


def _log_laplace(t: Tensor) -> Tensor:
    return torch.where(t <= 0, t - math.log(2), torch.log1p(-torch.exp(-t.abs()) / 2))  # slope 1 at 0


def _power_of_clipped(t: Tensor, power: int) -> Tensor:
    """Where f is 0 or 1 it has no slope, whatever a gradient of clamp is there."""
    return torch.where((t <= 0) | (t >= 1), (t >= 1).to(t.dtype), t) ** power


class Family(NamedTuple):
    """The formulas of a family of thresholds.

    value: log f of t or, for those that reach 0, f. root: theta (rows, J) of z (rows, n), the largest of which is 0,
    and k (rows, J), none of which exceeds a third argument. log_slopes: log f' of t, about MASKED where f' is 0.
    lowest_alone: as k comes down from n, the indicator of the lowest class alone falls below 1; else all do, by their
    tails, exp(-z).
    """

    value: Callable[[Tensor], Tensor]
    root: Callable[[Tensor, Tensor, int], Tensor]
    log_slopes: Callable[[Tensor], Tensor]
    lowest_alone: bool


def _power_family(power: int) -> Family:
    value, root, log_slopes = (partial(f, power=power) for f in (_power_of_clipped, _power_root, _log_power_slopes))
    return Family(value, root, log_slopes, lowest_alone=True)


FAMILIES = {
    "logistic": Family(logsigmoid, _logistic_root, _log_logistic_slopes, False),
    "laplace": Family(
        _log_laplace,
        lambda z, k, most: _laplace_root(*_top_and_rest(z, 2 * most), k),
        lambda t: -t.abs() - math.log(2),
        False,
    ),
    "capped": Family(lambda t: torch.where(t >= 0, 0, t), _capped_root, lambda t: torch.where(t <= 0, t, MASKED), True),
    "linear": _power_family(1),
    "cubic": _power_family(3),
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
        ctx.family = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, theta = ctx.saved_tensors
        with full_precision(z.device):
            logs = FAMILIES[ctx.family].log_slopes(z.unsqueeze(1) - theta.unsqueeze(2))  # (rows, J, n)
            grad_z, grad_k = (grad.unsqueeze(1) @ logs.softmax(2)).squeeze(1), None
            if ctx.needs_input_grad[1]:
                grad_k = -grad / logs.exp().sum(2).clamp(min=torch.finfo(z.dtype).tiny)
            return grad_z, grad_k, None, None


find_threshold = as_operator("threshold", Threshold, lambda z, k, *_: z.new_empty(k.shape))


def arguments(x: Tensor, beta: float | Tensor, labels: Tensor | None, k: Tensor, most: int, family: str) -> Tensor:
    """Compute t = z - theta for z = beta x, (rows, J) of the labels (rows,), or of every class, (rows, J, n), for None.

    x (rows, n), -inf for classes that are masked out. k (rows, J) or (1, J), above 0, none above `most`. Where k or
    fewer classes are left, t is inf: they are within k; that of the others is MASKED times beta, about.
    """
    z, live = centered(x) * beta, x != -torch.inf  # (rows, n)
    number = live.to(z.dtype).sum(1, keepdim=True)  # (rows, 1)
    all_within = k >= number  # (rows, J)
    theta = find_threshold(z, torch.where(all_within, (number / 2).clamp(min=0.5), k), family, most)
    theta = theta.masked_fill(number == 0, 0)  # where no class is left, none is within k
    if labels is None:
        t, live, all_within = z.unsqueeze(1) - theta.unsqueeze(2), live.unsqueeze(1), all_within.unsqueeze(2)
        k, theta = k.unsqueeze(2), theta.unsqueeze(2)
    else:
        own = labels.unsqueeze(1)  # (rows, 1)
        t, live = z.gather(1, own) - theta, live.gather(1, own)
    certain = all_within & live | (k >= z.shape[1])
    return torch.where(certain, torch.inf + 0 * theta.detach(), t)  # NaN stays


class ThresholdOperator(MaskOperator):
    """Base class of operators with a threshold: indicator_k = f(beta s - theta_k), with theta_k such that it sums to k.

    Subclasses set `family`, a name of FAMILIES, which has f.
    """

    default_inverse_temperature = 0.25
    family: str

    def _values(self, scores: Tensor, labels: Any, ks: Sequence[int], beta: Any, generator: Any = None) -> Tensor:
        x, beta = self._scaled(scores, beta)
        t = arguments(x, beta, labels, ranks_like(ks, scores), max(ks, default=1), self.family)
        return FAMILIES[self.family].value(t)

    def _scaled(self, scores: Tensor, beta: Any) -> tuple[Tensor, Any]:
        """x (rows, n), -inf where scores are, and beta, with z = beta x."""
        return scores, beta

    def mask(self, logits: Tensor, k: Any = None, inverse_temperature: Beta = None, generator: Any = None) -> Tensor:
        """Compute the soft top-k indicator, in [0, 1], which sums to k over the classes.

        Args:
            logits: (..., n), floating point.
            k: any number in (0, n], or a tensor that broadcasts to (...,) and receives a gradient; None: the operator's
                own. At k = n all indicators are 1, and the gradient is the derivative from below. n counts the classes
                that are not masked out.
            inverse_temperature, generator: as in TopKOperator.rank_probabilities.
        """
        scores, beta = self._checked(logits), self._beta(inverse_temperature)  # (rows, n)
        k, n = self.k if k is None else k, scores.shape[1]
        wanted = torch.as_tensor(k, dtype=scores.dtype, device=scores.device).expand(logits.shape[:-1]).reshape(-1, 1)
        most = n if isinstance(k, Tensor) else math.ceil(k)
        if has_known_values(wanted) and wanted.numel():
            if not bool(((wanted > 0) & (wanted <= n)).all()):
                raise ValueError(f"k must lie in (0, n={n}], got {k if wanted.numel() == 1 else wanted.tolist()}")
            most = math.ceil(float(wanted.detach().max()))
        with full_precision(logits.device):
            x, scale = self._scaled(scores, beta)
            values = FAMILIES[self.family].value(arguments(x, scale, None, wanted, most, self.family))  # (rows, 1, n)
            if wanted.requires_grad:
                values = values + self._slope_at_n(x, scale, wanted).unsqueeze(1)
        values = values if self.guarded else values.exp()
        return values.reshape(logits.shape).masked_fill(logits == -torch.inf, 0)

    def _slope_at_n(self, x: Tensor, beta: Any, k: Tensor) -> Tensor:
        """0 (rows, n), with the derivative by k (rows, 1) of the indicators where they are all 1, from below."""
        live, z = x != -torch.inf, (centered(x) * beta).detach()  # (rows, n)
        at_n = (k == live.sum(1, keepdim=True)) & live
        depth = (-z).masked_fill(~live, MASKED)
        if FAMILIES[self.family].lowest_alone:
            depth = torch.where(depth == depth.amax(1, keepdim=True), depth, MASKED)
        share = depth.softmax(1)
        return torch.where(at_n, share, 0) * (k - k.detach())


class LML(ThresholdOperator):
    """Limited multi-label projection (Amos, Koltun and Kolter 2019): f is the logistic function.

    A class far below theta has -log indicator = beta (theta - s). At k = 1 the indicator is not softmax.
    """

    family = "logistic"


class LapSum(ThresholdOperator):
    """LapSum (Struski et al. 2025; Su 2024): f is the distribution function of Laplace's distribution.

    f(t) = exp(t) / 2 below 0, 1 - exp(-t) / 2 above. theta has a closed form, in the 2 k largest scores and the sum of
    exp of the others. At k = 1 the indicator is softmax while no class has more than half of the mass.
    """

    family = "laplace"


class CappedSoftmax(ThresholdOperator):
    """Capped softmax (Su 2024): softmax, scaled up to the sum k and cut off at 1.

    f(t) = min(1, exp t). theta has a closed form, in the k largest scores and the sum of exp of the others. At k = 1 it
    is softmax, and the loss cross-entropy. A class that is surely among the k highest has the indicator 1, and a loss
    without a gradient.
    """

    family = "capped"


class SparseTopK(ThresholdOperator):
    """Sparse top-k (Sander et al. 2023): indicators with exact zeros and ones.

    f(t) = clip(t, 0, 1) for p = 2, the Euclidean projection onto the indicators that sum to k (sparsemax at k = 1), and
    f(t) = clip(t, 0, 1)^3 for p = 4/3. Classes 1 / beta or more below the k-th score have the indicator 0: -log of it
    would be infinite, and has no gradient. A loss therefore takes the official epsilon here, and needs P_K(1) > 0 with
    top1_mode "sm" or "smce": the softmax term carries the gradient of such classes.

    Args:
        k: number of ranks.
        inverse_temperature: beta, above 0 (default: 0.1).
        p: 2 (default) or 4/3.

    Raises:
        ValueError: p is another number.
    """

    default_inverse_temperature = 0.1
    guarded, has_zeros = True, True
    settings = (*ThresholdOperator.settings, "p")

    def __init__(self, k: SupportsIndex, inverse_temperature: Beta = None, p: float = 2) -> None:
        super().__init__(k, inverse_temperature)
        if p not in (2, 4 / 3):
            raise ValueError(f"p must be 2 or 4/3, got {p!r}")
        self.p, self.family = p, "linear" if p == 2 else "cubic"
