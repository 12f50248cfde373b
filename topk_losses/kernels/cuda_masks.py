"""Masks f(t) of the true class on CUDA, by Triton: one program per sample and k, all scores in registers.

The contract of cpu_masks.py. theta with sum_i f(z_i - theta) = k is sought relative to the k-th largest score, where
float32 has digits, by Newton's method in a bracket, with as many steps as that row needs: nothing waits for the host.
What the forward pass leaves, the k-th largest score and theta, is all that the backward pass wants. It has not run on a
GPU yet: the interpreter and the compiler have seen it.
"""

import torch
import triton
import triton.language as tl

from topk_losses import operator, threshold
from topk_losses.kernels import register
from topk_losses.sigmoids import bind

FAMILIES = ("logistic", "laplace", "capped", "linear", "cubic", "ranks", "middle")
LOGISTIC, LAPLACE, CAPPED, LINEAR, CUBIC, RANKS, MIDDLE = (tl.constexpr(number) for number in range(7))
MOST = tl.constexpr(100)  # steps: a bracket is halved once for each bit, where nothing else helps
MASKED = tl.constexpr(operator.MASKED)
TINY = tl.constexpr(1e-30)
EPS = tl.constexpr(torch.finfo(torch.float32).eps)
_logistic_slope = triton.jit(bind(threshold.logistic_slope, {"tl": tl, "Any": tl.tensor}))
_exponential_slope = triton.jit(bind(threshold.exponential_slope, {"tl": tl, "Any": tl.tensor}))


@triton.jit
def _log1p(x):
    u = 1 + x
    return tl.where(u == 1, x, tl.log(u) * (x / tl.where(u == 1, 1.0, u - 1)))


@triton.jit
def _row(scores, row, n, FAMILY: tl.constexpr, BLOCK: tl.constexpr):
    """Lanes; which of them take part, and how many; finite scores; NaN if there is NaN or +inf, else 0."""
    lane = tl.arange(0, BLOCK)
    x = tl.load(scores + row * n + lane, lane < n, float("-inf"))
    spoilt = tl.sum(((x != x) | (x == float("inf"))).to(tl.int32), 0) > 0
    part = (x > float("-inf")) | ((lane < n) & (FAMILY == RANKS))
    x = tl.where((x >= MASKED) & (x < float("inf")), x, MASKED)
    return lane, part, tl.sum(part.to(tl.float32), 0), x, tl.where(spoilt, float("nan"), 0.0)


@triton.jit
def _quantile(p, FAMILY: tl.constexpr):
    if FAMILY == LOGISTIC:
        return tl.log(p / (1 - p))
    return tl.where(p < 0.5, tl.log(2 * p), -tl.log(2 * (1 - p)))


@triton.jit
def _power(t, part, FAMILY: tl.constexpr):
    """f of t clipped to [0, 1], and its slope, 0 where it is 0 or 1."""
    p = tl.minimum(tl.maximum(t, 0.0), 1.0)
    inside = part & (t > 0) & (t < 1)
    if FAMILY == LINEAR:
        return tl.where(part, p, 0.0), inside.to(tl.float32)
    return tl.where(part, p * p * p, 0.0), tl.where(inside, 3 * (p * p), 0.0)


@triton.jit
def _excess(z, part, theta, k, n, FAMILY: tl.constexpr):
    """sum f(z - theta) - k, and Newton's step: on the odds of the mean where f is a distribution function."""
    t = z - theta
    if (FAMILY == LINEAR) | (FAMILY == CUBIC):
        f, slopes = _power(t, part, FAMILY)
        excess = tl.sum(f, 0) - k
        return excess, excess / tl.maximum(tl.sum(slopes, 0), TINY)
    if FAMILY == CAPPED:
        # a score at theta, to rounding, is one below it: the k-th may be all that is left there
        above = tl.sum((part & (t > 0)).to(tl.float32), 0)
        below = tl.sum(tl.where(part & (t <= 0), tl.exp(tl.minimum(t, 0.0)), 0.0), 0)
        return above + below - k, tl.where(above < k, tl.log(below / tl.maximum(k - above, TINY)), float("nan"))
    above = tl.sum((part & (t >= 0)).to(tl.float32), 0)
    tail = tl.exp(-tl.abs(t))
    tail = tl.where(part, tail / (1 + tail) if FAMILY == LOGISTIC else tail / 2, 0.0)
    excess = above - k - tl.sum(tl.where(t >= 0, tail, -tail), 0)  # where all are 0 or 1, the digits of these count
    slope = tl.sum(tail - tail * tail if FAMILY == LOGISTIC else tail, 0)
    odds = _log1p(excess / k) - _log1p(-excess / (n - k))
    return excess, tl.where(slope < 1e-20, 0.0, odds * (k + excess) * (n - k - excess) / (n * slope))


@triton.jit
def _root(x, lane, part, k, n, beta, FAMILY: tl.constexpr, BLOCK: tl.constexpr):
    """The k-th largest score, k < n, and theta, counted from it."""
    # the largest, the k-th and its follower, and the M-th largest, M = min(2 k, n), by taking the largest away
    M = tl.minimum(2 * k, n)
    left, first = tl.where(part, x, float("-inf")), tl.max(tl.where(part, x, float("-inf")), 0)
    origin, after, last, rank = first, first, first, 1
    while rank <= (tl.maximum(M, k + 1) if FAMILY <= LAPLACE else k + 1):
        highest = tl.max(left, 0)
        origin = tl.where(rank == k, highest, origin)
        after = tl.where(rank == k + 1, highest, after)
        last = tl.where(rank == M, highest, last)
        left = tl.where(lane == tl.min(tl.where(left == highest, lane, BLOCK), 0), float("-inf"), left)
        rank += 1
    after, first, z = (after - origin) * beta, (first - origin) * beta, (x - origin) * beta
    if FAMILY == MIDDLE:
        return origin, after / 2
    if FAMILY == CAPPED:
        low, high = first * 0, first + tl.log(n / k)
        theta = low  # the root for any number of scores at 1 is not below the root
    elif FAMILY <= LAPLACE:
        low = (last - origin) * beta - tl.where(n >= 2 * k, 0.0, _quantile(k / M, FAMILY))
        high = first - _quantile(k / n, FAMILY)
        # Where the k-th and its follower lie far apart, f is an exponential on either side: this is the root.
        above, equal = tl.sum((part & (z > 0)).to(tl.float32), 0), tl.sum((part & (z == 0)).to(tl.float32), 0)
        upper = tl.sum(tl.where(part & (z > 0), tl.exp(-tl.maximum(z, 0.0)), 0.0), 0) + (k - above)
        lower = tl.sum(tl.where(part & (z < 0), tl.exp(tl.minimum(z - after, 0.0)), 0.0), 0) + (above + equal - k)
        theta = tl.minimum(tl.maximum((after + tl.log(lower) - tl.log(upper)) / 2, low), high)
    else:
        low, high, theta = first * 0 - 1, first * 0, first * 0 - 0.5
    step, before, going = 0, float("inf") + first * 0, k < n
    while going & (step < MOST):
        excess, change = _excess(z, part, theta, k, n, FAMILY)
        low, high = tl.where(excess > 0, theta, low), tl.where(excess < 0, theta, high)
        new = tl.where(excess == 0, theta, theta + change)
        slow = (step > 8) & (tl.abs(excess) > before / 2) & (FAMILY != CAPPED)
        new = tl.where((new >= low) & (new <= high) & (slow == 0), new, (low + high) / 2)
        # The constants stand behind: in Triton 3.8's interpreter one before a tensor makes a constant of both.
        least = tl.abs(theta) * EPS + (3e-4 if FAMILY == LOGISTIC else 4 * EPS)
        going = (tl.abs(new - theta) > least) & (excess != 0)
        before, theta = tl.abs(excess), new
        step += 1
    return origin, theta


@triton.jit
def forward_kernel(
    scores, labels, beta, ks, t, beside, roots, n, J, FAMILY: tl.constexpr, SOFTMAX: tl.constexpr, BLOCK: tl.constexpr
):
    """t (rows, J), log softmax beside (rows, 1); roots (rows, J + 1, 2): where theta is counted from, and theta, which
    is NaN where k or fewer take part. The program behind those of t is the softmax's.
    """
    row, j = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane, part, number, x, spoilt = _row(scores, row, n, FAMILY, BLOCK)
    label, scale = tl.load(labels + row), tl.load(beta)
    own, place = tl.sum(tl.where(lane == label, x, 0.0), 0), row * (J + 1) + j
    if j == J:
        if SOFTMAX:
            live = x > MASKED
            origin = tl.max(x, 0)
            theta = tl.log(tl.sum(tl.where(live, tl.exp(x - origin), 0.0), 0))
            theta = tl.where(tl.sum(live.to(tl.int32), 0) == 0, float("nan"), theta)
            tl.store(beside + row, tl.load(scores + row * n + label) - origin - theta + spoilt)
            tl.store(roots + 2 * place, origin + spoilt)
            tl.store(roots + 2 * place + 1, theta)
    elif FAMILY == RANKS:
        tail = tl.exp(-tl.abs((x - own) * scale))
        p = tl.where(x >= own, 1 / (1 + tail), tail / (1 + tail))
        tl.store(t + row * J + j, tl.load(ks + j) - 0.5 - tl.sum(tl.where(part, p, 0.0), 0) + spoilt)
        tl.store(roots + 2 * place, own + spoilt)
        tl.store(roots + 2 * place + 1, own * 0)
    else:
        k = tl.load(ks + j)
        if k < number:
            origin, theta = _root(x, lane, part, k, number, scale, FAMILY, BLOCK)
            tl.store(t + row * J + j, (own - origin) * scale - theta + spoilt)
            tl.store(roots + 2 * place, origin + spoilt)
            tl.store(roots + 2 * place + 1, theta)
        else:
            certain = (own > MASKED) | (k >= n)
            tl.store(t + row * J + j, tl.where(certain, float("inf"), scale * MASKED) + spoilt)
            tl.store(roots + 2 * place, spoilt)
            tl.store(roots + 2 * place + 1, float("nan"))


@triton.jit
def backward_kernel(
    scores, labels, beta, ks, roots, grad, of_softmax, grad_scores, n, J,
    FAMILY: tl.constexpr, SOFTMAX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """d t = d z_y - sum_i w_i d z_i, with w = f' / sum f'; of ranks that times sum f'. One program per row."""
    row = tl.program_id(0).to(tl.int64)
    lane, part, _, x, spoilt = _row(scores, row, n, FAMILY, BLOCK)
    scale, total, of_own = tl.load(beta), x * 0 + spoilt, spoilt
    for j in range(J):
        place = row * (J + 1) + j
        g = tl.load(grad + row * J + j) * scale
        origin, theta = tl.load(roots + 2 * place), tl.load(roots + 2 * place + 1)
        if theta == theta:
            t = (x - origin) * scale - theta
            away = tl.where(part, tl.abs(t), float("inf"))
            if (FAMILY == LINEAR) | (FAMILY == CUBIC):
                w = _power(t, part, FAMILY)[1]
            elif FAMILY == MIDDLE:  # one at each of the two ranks, of equal scores the first and the last
                at, behind = part & (x == origin), part & ((x - origin) * scale == 2 * theta)
                w = (lane == tl.min(tl.where(at, lane, BLOCK), 0)).to(tl.float32)
                w += (lane == tl.max(tl.where(behind, lane, -1), 0)).to(tl.float32)
            elif FAMILY == CAPPED:
                w = tl.where(t <= 0, tl.exp(tl.min(tl.where(t <= 0, away, float("inf")), 0) - away), 0.0)
            elif FAMILY == LAPLACE:
                w = _exponential_slope(tl.exp(tl.min(away, 0) - away), tl.exp(-away))
            else:
                nearest = tl.min(away, 0) if FAMILY == LOGISTIC else 0.0
                w = _logistic_slope(tl.exp(nearest - away), tl.exp(-away))
            if FAMILY == RANKS:
                of_own += g * tl.sum(w, 0)
            else:
                g, of_own = g / tl.maximum(tl.sum(w, 0), TINY), of_own + g
            total -= g * w
    if SOFTMAX:
        place, g = row * (J + 1) + J, tl.load(of_softmax + row)
        total -= g * tl.exp(x - tl.load(roots + 2 * place) - tl.load(roots + 2 * place + 1))
        of_own += g
    total += tl.where(lane == tl.load(labels + row), of_own, 0.0)
    empty = tl.where(tl.max(x, 0) <= MASKED, float("nan"), spoilt) if SOFTMAX else spoilt  # no class takes part
    total = tl.where(x > MASKED, total, empty)
    tl.store(grad_scores + row * n + lane, total, lane < n)


def _outputs(scores, labels, beta, ks, family, softmax):
    """t (batch, J), beside (batch, 1 or 0), roots (batch, J + 1, 2)."""
    batch, J = len(scores), len(ks)
    return [scores.new_empty(batch, J), scores.new_empty(batch, int(softmax)), scores.new_empty(batch, J + 1, 2)]


def _program(scores, ks, family, softmax):
    """The ranks, n and J, and the shape of a program."""
    block = triton.next_power_of_2(scores.shape[1])
    shape = {"FAMILY": FAMILIES.index(family), "SOFTMAX": int(softmax), "BLOCK": block}
    shape["num_warps"] = min(max(block // 256, 1), 16)
    return threshold.ranks_like(ks, scores), (scores.shape[1], len(ks)), shape


def _masks(made, scores, labels, beta, ks, family, softmax):
    """As cpu_masks: t of the true classes, and log softmax."""
    k, sizes, shape = _program(scores, ks, family, softmax)
    grid = len(scores), len(ks) + int(softmax)
    if grid[0] * grid[1]:
        with torch.cuda.device_of(scores):
            forward_kernel[grid](scores.contiguous(), labels, beta, k, *made, *sizes, **shape)


def _masks_backward(grad_scores, grads, made, scores, labels, beta, ks, family, softmax):
    k, sizes, shape = _program(scores, ks, family, softmax)
    grads = [each.contiguous() for each in grads]
    if len(scores):
        with torch.cuda.device_of(scores):
            backward_kernel[(len(scores),)](
                scores.contiguous(), labels, beta, k, made[2], *grads, grad_scores, *sizes, **shape
            )


for _operation in ("masks", "middles"):
    register(_operation, "cuda", _outputs, _masks, _masks_backward, threshold.masks, 2)
