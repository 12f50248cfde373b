"""Top-k by a threshold: mask_k(s)_i = f(beta s_i - theta_k), theta_k such that the mask sums to k. One f, one paper.

| class         | f(t)                            | source                                            |
|---------------|---------------------------------|---------------------------------------------------|
| LML           | sigmoid(t)                      | Amos, Koltun and Kolter 2019; SOFT top-k's, too   |
| LapSum        | Laplace's distribution function | Struski et al. 2025; Su 2024                      |
| SparseTopK    | clip(t, 0, 1)^q, q = 1 or 3     | Sander et al. 2023, with p = 2 and 4/3            |
| CappedSoftmax | min(1, exp t)                   | Su 2024; softmax at k = 1                         |

theta falls as k grows, so that the masks are nested: row r of P is mask_r - mask_{r-1}, rows sum to 1, and a loss is a
mixture of masks, of the k that P_K has mass on and no others. f sees the logits as they are: far from theta its
logarithm has slope beta, and so has the loss.

Gradients are those of the equation that defines theta (implicit function theorem), never of a solver: with
w = f'(t) / sum f'(t), d theta = sum_i w_i d x_i - dk / sum f'(t); O(n), and differentiable in turn.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from topk_losses.checks import full_precision, has_known_values, numbers_like
from topk_losses.sorts import PointwiseMasks, finite, largest

# Three or four do, unless the bracket has to be halved, once for each bit. Where nobody looks, on a GPU, all are made.
MAX_ITERATIONS = {torch.float32: 30, torch.float64: 60}


def top_and_rest(x: Tensor, scale: float, M: int) -> Tensor:
    """Of z = scale x (rows, n) the M largest (or all), falling, then log sum exp of the others: (rows, M + 1)."""
    places, z = largest(x, min(M, x.shape[1])), finite(x * scale)
    top = z.gather(1, places)
    if top.shape[1] == x.shape[1]:
        return pad(top, (0, 1), value=-torch.inf)
    return torch.cat([top, z.scatter(1, places, -torch.inf).logsumexp(1, keepdim=True)], dim=1)


def sums_below(points: Tensor) -> Tensor:
    """log of the sum of exp of all points but the first m, for m = 0, 1, ...: like points."""
    return points.flip(1).logcumsumexp(1).flip(1)


def laplace_root(points: Tensor, k: Tensor) -> Tensor:
    """theta with sum_i F(x_i - theta) = k for Laplace's distribution, (rows, J).

    points as of top_and_rest with M >= 2 k: no score of the rest is above theta, for F is above a half there. k
    (rows, J) in (0, n). With m points above theta, A = sum_{i<=m} exp(-x_i), B = sum_{i>m} exp x_i:
    m - A exp(theta) / 2 + B exp(-theta) / 2 = k, a quadratic equation.
    """
    highest = points[:, :1]
    points = points - highest
    top = points[:, :-1]
    A = pad((-top).logcumsumexp(1), (1, 0), value=-torch.inf)  # (rows, M + 1) log A for m = 0, 1, ...
    B = sums_below(points)
    place = torch.arange(top.shape[1], dtype=k.dtype, device=k.device)  # (M,)
    at_top = place - (top + A[:, :-1]).exp() / 2 + (B[:, :-1] - top).exp() / 2  # (rows, M) the sum if theta is x_i
    m = (at_top.unsqueeze(1) < k.unsqueeze(2)).sum(2)  # (rows, J)
    A, B, q = A.gather(1, m), B.gather(1, m), k - m
    log_root = ((q.square() + (A + B).exp()).sqrt() + q.abs()).log()
    log_root = torch.where(q == 0, (A + B) / 2, log_root)  # where exp(A + B) may vanish
    return torch.where(q < 0, log_root - A, B - log_root) + highest


def clip_root(x: Tensor, k: Tensor) -> Tensor:
    """theta with sum_i clip(x_i - theta, 0, 1) = k, (rows, J); x (rows, n), k (rows, J) in (0, n).

    As theta falls past x_i the sum begins to rise, by one more for each, and ends to at x_i - 1: straight pieces.
    """
    points, order = torch.cat([x, x - 1], dim=1).sort(1, descending=True)  # (rows, 2 n)
    slope = torch.where(order < x.shape[1], 1, -1).cumsum(1)  # from each point on
    sums = pad((slope[:, :-1] * -points.diff(dim=1)).cumsum(1), (1, 0))  # at each point
    piece = (sums.unsqueeze(1) < k.unsqueeze(2)).sum(2) - 1  # (rows, J)
    left = (k - sums.gather(1, piece.clamp(min=0))) / slope.gather(1, piece.clamp(min=0)).clamp(min=1)
    return points.gather(1, piece.clamp(min=0)) - left


def newton(
    evaluate: Callable[[Tensor], tuple[Tensor, Tensor]], low: Tensor, high: Tensor, theta: Tensor, least: float
) -> Tensor:
    """The root of a falling sum(theta) = k by Newton's method, in a bracket that is halved where a step would leave it.

    evaluate(theta): sum - k, and Newton's step. theta: the start. All tensors (rows, J). A step of at most `least`, or
    of the size of theta's rounding, is the last one.
    """
    going = torch.ones_like(theta, dtype=torch.bool)  # a row stops where it would alone
    may_look, rounding = has_known_values(theta), torch.finfo(theta.dtype).eps
    for _ in range(MAX_ITERATIONS[theta.dtype]):
        excess, step = evaluate(theta)
        low, high = torch.where(excess > 0, theta, low), torch.where(excess < 0, theta, high)
        new = theta + torch.where(excess == 0, 0, step)
        inside = (new >= low) & (new <= high)  # false for NaN
        new = torch.where(going, torch.where(inside, new, (low + high) / 2 + 0 * excess), theta)  # NaN stays
        going, theta = going & ((new - theta).abs() > least + rounding * theta.abs()), new
        if may_look and not bool(going.any()):
            break
    return theta


class Threshold(torch.autograd.Function):
    """theta with sum_i f(x_i - theta) = k, as a function of x (rows, points) and k (rows, J) in (0, n): (rows, J).

    operator: whose f it is. most: an integer that no k exceeds.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, k: Tensor, operator: "ThresholdOperator", most: int) -> Tensor:
        return operator._solve(x, k, most)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.operator = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, theta = ctx.saved_tensors
        slopes, factor = ctx.operator._slopes(x.unsqueeze(1) - theta.unsqueeze(2))  # (rows, J, points)
        per_slope = grad / slopes.sum(2).clamp(min=torch.finfo(x.dtype).tiny * 2**26)  # (rows, J)
        return (per_slope.unsqueeze(1) @ slopes).squeeze(1), -per_slope / factor, None, None


class ThresholdOperator(PointwiseMasks):
    """What the operators with a threshold share. Subclasses have f, log f where f is never 0, and theta.

    k: ranks, 1 <= k <= n. inverse_temperature: beta > 0, larger = closer to the hard operator; it multiplies the
    logits. Default .25 (.1 for SparseTopK). Raises ValueError for a non-positive inverse temperature.
    """

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
            x, scale = self._scaled(scores)
            wanted = wanted.clamp(max=n * (1 - 4 * torch.finfo(x.dtype).eps))
            theta = self._threshold(x, scale, wanted, most)
            return self._f(finite(x * scale) - theta).reshape(logits.shape)

    def _threshold(self, x: Tensor, scale: float, k: Tensor, most: int) -> Tensor:
        """theta (rows, J) for z = scale x (rows, n) and k (rows, J) in (0, n), none of which exceeds `most`."""
        return Threshold.apply(self._points(x, scale, most), k, self, most)

    def _points(self, x: Tensor, scale: float, most: int) -> Tensor:
        """What decides on theta, (rows, points): z itself, or less than that."""
        return x * scale

    def _solve(self, x: Tensor, k: Tensor, most: int) -> Tensor:
        """theta with sum_i f(x_i - theta) = k, (rows, J), for such points; k (rows, J) in (0, n), none above `most`."""
        raise TypeError(f"{type(self).__name__} does not define _solve")

    def _slopes(self, t: Tensor) -> tuple[Tensor, Tensor | float]:
        """f'(t) but for a factor, and the factor: (rows, J, points), (rows, J)."""
        raise TypeError(f"{type(self).__name__} does not define _slopes")

    def _arguments(self, x: Tensor, scale: float, labels: Tensor | None, ks: Sequence[int]) -> Tensor:
        """scale x - theta, but inf for k = n: among n classes all are the n highest."""
        proper = [k for k in ks if k < x.shape[1]]
        wanted: Sequence[float] = proper or [0.5]  # one k, though not used then, that n = 1 can reach
        theta = self._threshold(x, scale, numbers_like(wanted, x).expand(len(x), -1), max(proper, default=1))
        if labels is None:
            t = finite(x * scale).unsqueeze(1) - theta.unsqueeze(2)
        else:
            t = finite(x.gather(1, labels.unsqueeze(1)) * scale) - theta
        return pad(t[:, : len(proper)], (0, 0) * (t.dim() - 2) + (0, len(ks) - len(proper)), value=torch.inf)


class LML(ThresholdOperator):
    """The limited multi-label projection (Amos, Koltun and Kolter 2019): f = sigmoid, the mask of largest entropy.

    A class far below theta has -log mask = beta (theta - s), far above it next to nothing. At k = 1 it is no softmax.
    Arguments as for every ThresholdOperator.
    """

    family = "logistic"

    def _f(self, t: Tensor) -> Tensor:
        return torch.sigmoid(t)

    def _log_f(self, t: Tensor) -> Tensor:
        return logsigmoid(t)

    def _solve(self, x: Tensor, k: Tensor, most: int) -> Tensor:
        """By Newton's method on the logarithm of the odds of the mean, which is nearly straight where scores are close.

        The start is Laplace's root, whose tails are the same but for a factor, be the scores close or far apart.
        """
        n, finfo = x.shape[1], torch.finfo(x.dtype)
        points = top_and_rest(x, 1.0, 2 * most)
        M = points.shape[1] - 1
        low, high = points[:, -2:-1] - (k / (M - k)).log(), points[:, :1] - (k / (n - k)).log()  # (rows, J)

        def evaluate(theta: Tensor) -> tuple[Tensor, Tensor]:
            t = x.unsqueeze(1) - theta.unsqueeze(2)  # (rows, J, n)
            # 1 - p above theta, else p: where all p are 0 or 1, the digits of these count
            rest = torch.sigmoid(-t.abs())
            excess = (t >= 0).sum(2) - k - torch.copysign(rest, t).sum(2)
            slope = rest.sum(2) - torch.linalg.vecdot(rest, rest)
            odds = (excess / k).log1p() - (-excess / (n - k)).log1p()
            step = odds * (k + excess) * (n - k - excess) / (n * slope)
            # far from all scores no digits are left, and Laplace's root is the root
            return excess, torch.where(slope < finfo.tiny / finfo.eps, 0, step)

        # the error that a step leaves is of the size of its square
        return newton(evaluate, low, high, laplace_root(points, k).clamp(low, high), finfo.eps**0.5)

    def _slopes(self, t: Tensor) -> tuple[Tensor, Tensor | float]:
        p = torch.sigmoid(t)
        return p * (1 - p), 1.0


class LapSum(ThresholdOperator):
    """LapSum (Struski et al. 2025; Su 2024): f = Laplace's distribution function, theta in closed form.

    f(t) = exp(t) / 2 below 0, 1 - exp(-t) / 2 above. Only the 2 k largest scores and the sum of exp of the others count
    for theta: O(n). At k = 1 it is softmax while no class has more than half of the mass. Arguments as for every
    ThresholdOperator.
    """

    family = "laplace"

    def _f(self, t: Tensor) -> Tensor:
        tail = torch.exp(-t.abs()) / 2
        return torch.where(t < 0, tail, 1 - tail)

    def _log_f(self, t: Tensor) -> Tensor:
        return torch.where(t < 0, t - math.log(2), torch.log1p(-torch.exp(-t.abs()) / 2))

    def _points(self, x: Tensor, scale: float, most: int) -> Tensor:
        return top_and_rest(x, scale, 2 * most)

    def _solve(self, x: Tensor, k: Tensor, most: int) -> Tensor:
        return laplace_root(x, k)

    def _slopes(self, t: Tensor) -> tuple[Tensor, Tensor | float]:
        logs = torch.cat([-t[..., :-1].abs(), t[..., -1:]], dim=2)  # the rest is below theta in any case
        highest = logs.detach().amax(2, keepdim=True)
        return (logs - highest).exp(), highest.squeeze(2).exp() / 2


class CappedSoftmax(ThresholdOperator):
    """Capped softmax (Su 2024): f = min(1, exp t), which at k = 1 is softmax, and its loss cross-entropy.

    theta in closed form, from the k largest scores and the sum of exp of the others: O(n). A class within the k highest
    for sure has the mask 1, and a loss without a gradient. Arguments as for every ThresholdOperator.
    """

    family = "capped"

    def _f(self, t: Tensor) -> Tensor:
        return self._log_f(t).exp()

    def _log_f(self, t: Tensor) -> Tensor:
        return t.clamp(max=0)

    def _threshold(self, x: Tensor, scale: float, k: Tensor, most: int) -> Tensor:
        """With m classes at 1, theta = log sum_{i>m} exp x_i - log(k - m).

        sum_i min(1, exp(x_i - theta)) is the least over m of m + exp(-theta) sum_{i>m} exp x_i, so that theta is the
        least of these.
        """
        points = top_and_rest(x, scale, most)
        highest = points[:, :1].detach()
        points = points - highest
        place = torch.arange(points.shape[1], dtype=k.dtype, device=k.device)  # (M + 1,)
        left = k.detach().unsqueeze(2) - place  # (rows, J, M + 1)
        roots = sums_below(points.detach()).unsqueeze(1) - left.log()
        m = torch.where(left > 0, roots, torch.inf).argmin(2)  # (rows, J)
        below = points.unsqueeze(1).masked_fill(place < m.unsqueeze(2), -torch.inf)  # (rows, J, M + 1)
        return below.logsumexp(2) - (k - m).log() + highest


class SparseTopK(ThresholdOperator):
    """Sparse top-k (Sander et al. 2023): f = clip(t, 0, 1) for p = 2, the Euclidean projection onto the masks of sum k
    (at k = 1 sparsemax), and f = clip(t, 0, 1)^3 for p = 4/3.

    Classes 1 / beta or more below the k-th score have the mask 0: -log of it would be infinite, and has no gradient. A
    loss therefore takes the official guard, log(p (1 - 2e-7) + 1e-7), here, and wants P_K(1) > 0 in the top1_mode "sm"
    or "smce": the softmax term carries the gradient of such classes. p: 2 (default) or 4/3. Other arguments as for
    every ThresholdOperator; ValueError for another p.
    """

    family = "power"
    guarded = True
    has_zeros = True

    def __init__(self, k: SupportsIndex, inverse_temperature: float | Tensor = 0.1, p: float = 2) -> None:
        super().__init__(k, inverse_temperature)
        self.q = round(1 / (p - 1)) if p in (2, 4 / 3) else 0
        if not self.q:
            raise ValueError(f"p must be 2 or 4/3, got {p!r}")

    def extra_repr(self) -> str:
        """The configuration, for printing."""
        return f"{super().extra_repr()}, p={1 + 1 / self.q:.3g}"

    def _f(self, t: Tensor) -> Tensor:
        return t.clamp(0, 1) ** self.q

    def _points(self, x: Tensor, scale: float, most: int) -> Tensor:
        return finite(x * scale).sort(1, descending=True).values

    def _solve(self, x: Tensor, k: Tensor, most: int) -> Tensor:
        """In closed form for q = 1, else by Newton's method between the score at rank k, rounded up, and 1 below."""
        highest = x[:, :1]
        x = x - highest
        if self.q == 1:
            return clip_root(x, k) + highest
        kth = x.gather(1, k.ceil().long() - 1)  # (rows, J)
        x = x.unsqueeze(1) - kth.unsqueeze(2)  # (rows, J, n)

        def evaluate(theta: Tensor) -> tuple[Tensor, Tensor]:
            t = x - theta.unsqueeze(2)
            excess = self._f(t).sum(2) - k
            return excess, excess / self._slopes(t)[0].sum(2)

        zero = torch.zeros_like(kth)
        return newton(evaluate, zero - 1, zero, zero - 0.5, torch.finfo(x.dtype).eps) + kth + highest

    def _slopes(self, t: Tensor) -> tuple[Tensor, Tensor | float]:
        return torch.where((t > 0) & (t < 1), self.q * t.clamp(0, 1) ** (self.q - 1), 0), 1.0
