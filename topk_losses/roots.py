"""The thresholds of soft top-k indicators: theta with sum_i f(z_i - theta) = k, for each family of functions f.

Scores z are (rows, n), and their largest is 0; k and theta are (rows, J), one for each rank. Nothing here has a
gradient: that of theta is in threshold.py.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from topk_losses.compilers import has_known_values

# Five or six do, unless the bracket has to be halved, once for each bit. Where nobody looks, on a GPU, all are made.
MAX_ITERATIONS = {torch.float32: 30, torch.float64: 60}
QUICK_ITERATIONS = 8  # from which on a step that does not halve the error halves the bracket instead


def top_and_rest(z: Tensor, M: int) -> tuple[Tensor, Tensor]:
    """Return the M largest of z (rows, n), or all, falling (rows, M); and z with -inf in their places (rows, n)."""
    top, places = z.topk(min(M, z.shape[1]), dim=1)
    return top, z.scatter(1, places, -torch.inf)


def log_sums_below(top: Tensor, rest: Tensor) -> Tensor:
    """Return log of the sum of exp of all points but the first m, for m = 0 to M: (rows, M + 1)."""
    points = torch.cat([top, rest.logsumexp(1, keepdim=True)], dim=1)
    return points.flip(1).logcumsumexp(1).flip(1)


def find_root(
    evaluate: Callable[[Tensor], tuple[Tensor, Tensor]], low: Tensor, high: Tensor, theta: Tensor, least_step: float
) -> Tensor:
    """Find the root of a falling sum(theta) = k by Newton's method, in a bracket that is halved where a step fails.

    A step fails that leaves the bracket, or brings little late. A row stops where it would alone.

    Args:
        evaluate: evaluate(theta) returns the sum less k, and Newton's step.
        low, high: the bracket, (rows, J) each.
        theta: the start, (rows, J).
        least_step: a step of at most this size, or of the size of theta's rounding, is the last one.
    """
    is_going = torch.ones_like(theta, dtype=torch.bool)
    error_before = torch.full_like(theta, torch.inf)
    may_look = has_known_values(theta)
    rounding = torch.finfo(theta.dtype).eps
    for iteration in range(MAX_ITERATIONS[theta.dtype]):
        excess, step = evaluate(theta)
        low = torch.where(excess > 0, theta, low)
        high = torch.where(excess < 0, theta, high)
        error = excess.abs()
        new = theta + torch.where(excess == 0, 0, step)
        is_last = (new - theta).abs() <= least_step + rounding * theta.abs()
        is_inside = (new >= low) & (new <= high)  # False for NaN
        if iteration > QUICK_ITERATIONS:
            is_inside = is_inside & (error <= error_before / 2)
        middle = (low + high) / 2 + 0 * excess  # NaN stays
        new = torch.where(is_last | is_inside, new, middle)
        theta = torch.where(is_going, new, theta)
        error_before = error
        is_closed = high - low <= rounding * theta.abs()
        is_going = is_going & ~is_last & ~is_closed
        if may_look and not bool(is_going.any()):
            break
    return theta


def laplace_root(z: Tensor, k: Tensor, most: int) -> Tensor:
    """Find theta for the distribution function of Laplace's distribution."""
    top, rest = top_and_rest(z, 2 * most)
    return laplace_root_of_parts(top, rest, k)


def laplace_root_of_parts(top: Tensor, rest: Tensor, k: Tensor) -> Tensor:
    """Solve a quadratic equation.

    With m scores above theta, A = sum_{i<=m} exp(-z_i), B = sum_{i>m} exp z_i, the sum of f is m - A exp(theta) / 2 +
    B exp(-theta) / 2. At most 2 k scores are above theta, where f is above a half.
    """
    log_A = pad((-top).logcumsumexp(1), (1, 0), value=-torch.inf)  # (rows, M + 1) for m = 0, 1, ...
    log_B = log_sums_below(top, rest)  # (rows, M + 1)
    place = torch.arange(top.shape[1], dtype=k.dtype, device=k.device)  # (M,)
    above = (top + log_A[:, :-1]).exp() / 2
    below = (log_B[:, :-1] - top).exp() / 2
    sum_at_top = place - above + below  # (rows, M), the sum if theta is z_i
    m = (sum_at_top.unsqueeze(1) < k.unsqueeze(2)).sum(2)  # (rows, J)
    log_A = log_A.gather(1, m)
    log_B = log_B.gather(1, m)
    q = k - m
    log_root = ((q.square() + (log_A + log_B).exp()).sqrt() + q.abs()).log()
    log_root = torch.where(q == 0, (log_A + log_B) / 2, log_root)  # where exp(log_A + log_B) may vanish
    return torch.where(q < 0, log_root - log_A, log_B - log_root)


def logistic_root(z: Tensor, k: Tensor, most: int) -> Tensor:
    """Find theta for the logistic function by Newton's method on the log odds of the mean.

    They are nearly straight where scores are close. The start is Laplace's root, whose tails are the same but for a
    factor, be the scores close or far apart.
    """
    n = z.shape[1]
    finfo = torch.finfo(z.dtype)
    top, rest = top_and_rest(z, 2 * most)  # (rows, M), (rows, n)
    M = top.shape[1]

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

    low = top[:, -1:] - (k / (M - k)).log()  # (rows, J), of z that are 0 at most
    low = low - 4 * finfo.eps * (1 + low.abs())
    high = -(k / (n - k)).log()
    high = high + 4 * finfo.eps * (1 + high.abs())
    start = laplace_root_of_parts(top, rest, k).clamp(low, high)
    # the error that a step leaves is of the size of its square
    return find_root(evaluate, low, high, start, finfo.eps**0.5)


def capped_root(z: Tensor, k: Tensor, most: int) -> Tensor:
    """Find theta for min(1, exp t): with m classes at 1 it is log sum_{i>m} exp z_i - log(k - m), m < k; the least.

    For sum_i min(1, exp(z_i - theta)) is the least over m of m + exp(-theta) sum_{i>m} exp z_i.
    """
    top, rest = top_and_rest(z, most)
    sums = log_sums_below(top, rest)  # (rows, M + 1)
    m = torch.arange(sums.shape[1], dtype=k.dtype, device=k.device)
    left = k.unsqueeze(2) - m  # (rows, J, M + 1)
    return torch.where(left > 0, sums.unsqueeze(1) - left.log(), torch.inf).amin(2)


def linear_root(z: Tensor, k: Tensor, most: int) -> Tensor:
    """Find theta for clip(t, 0, 1)."""
    return power_root(z, k, most, power=1)


def cubic_root(z: Tensor, k: Tensor, most: int) -> Tensor:
    """Find theta for clip(t, 0, 1)^3."""
    return power_root(z, k, most, power=3)


def power_root(z: Tensor, k: Tensor, most: int, power: int) -> Tensor:
    """Find theta for clip(t, 0, 1)^power by Newton's method between the score at rank k, rounded up, and 1 below.

    Far from the root it acts on sum^(1 / (power + 1)), which is nearly straight where scores are evenly spread.
    """
    top = z.topk(min(most, z.shape[1]), dim=1).values  # (rows, M): f is 1 for no others
    kth = top.gather(1, k.ceil().long() - 1)  # (rows, J)
    distance = z.unsqueeze(1) - kth.unsqueeze(2)  # (rows, J, n)
    distance_of_top = top.unsqueeze(1) - kth.unsqueeze(2)  # (rows, J, M)

    def evaluate(theta: Tensor) -> tuple[Tensor, Tensor]:
        t = (distance - theta.unsqueeze(2)).clamp(0, 1)
        if power == 1:
            total = t.sum(2)  # (rows, J)
            slope = t.ceil_().sum(2)
        else:
            total = (t**power).sum(2)
            slope = power * t.square().sum(2)
        slope = slope - power * (distance_of_top - theta.unsqueeze(2) >= 1).sum(2)
        excess = total - k
        bent = (power + 1) * total * (1 - (k / total) ** (1 / (power + 1)))
        return excess, torch.where(excess.abs() < k / 8, excess, bent) / slope

    zero = torch.zeros_like(kth)
    return find_root(evaluate, zero - 1, zero, zero - 0.5, torch.finfo(z.dtype).eps) + kth
