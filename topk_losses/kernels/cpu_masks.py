"""Masks f(t) of the true class on the CPU, compiled by Numba: t, row by row, and the softmax's logarithm beside it.

What threshold.py and ranks.py do by some hundred operations. Thresholds, theta with sum_i f(z_i - theta) = k for
z = beta x, are relative to the largest z. Where f has exponential tails, the scores that can be above theta, `top`, are
looked at one by one, in float64; of the others, the rest, whose exponentials do not overflow, only sums over all count.

The same two loops over rows call three functions of a family, bound to the formulas of threshold.py. row_of: z of the
true class, and a number for the next two; it fills w and top. root_of: theta. slopes_of: a share times f' / sum f' is
taken off out (n,), that of the largest given to of_top (M,); it returns what z of the true class gets.
"""

import functools
import math
from typing import Any

import numpy as np
import torch

from topk_losses import threshold
from topk_losses.kernels import register
from topk_losses.kernels.cpu_largest import largest_of_rows
from topk_losses.kernels.numba_support import (
    IN_ANY_ORDER,
    exps,
    exps_without,
    in_float32,
    in_threads,
    jit,
    room,
    softmax_sum,
    subtract,
    subtract_softmax,
    sum_of,
)
from topk_losses.operator import MASKED
from topk_losses.sigmoids import bind

# ruff: noqa: F821 (names that `_loops` binds: f_of, slope_of, FACTOR, CAPPED, sums_of, step_of, newton, ...)

WORK_OF_A_THREAD = 100_000  # scores times ranks that pay for another thread
MAX_ITERATIONS = 60
HIGHEST = 80.0  # of what is exponentiated in float32
_f32 = np.float32
_EPS = float(np.finfo(np.float32).eps)
_MASKED, _LEAST = _f32(MASKED), _f32(np.finfo(np.float32).tiny * 2**26)


@jit
def _relative(score, highest, beta):
    """z of a score, less the largest."""
    return np.float64(beta) * (np.float64(max(score, _MASKED)) - max(highest, _MASKED))


def _tail_row(x, label, beta, largest, w, slopes, top):
    """z of the largest, falling, to top (M,), and exp of the others, relative to top[M - 1], to w (n,); its log sum."""
    for r in range(len(top)):
        top[r] = _relative(x[largest[r]], x[largest[0]], beta)
    exps_without(largest, x, beta, x[largest[-1]], w)
    total = sum_of(w)
    return _relative(x[label], x[largest[0]], beta), top[-1] + math.log(total) if total > 0 else -np.inf


def _newton(k, theta, low, high, least, rounding, w, slopes, top):
    """The root of a falling sum(theta) = k. step_of: sum - k, and Newton's step, of which the last is at most `least`.

    A step that leaves the bracket halves it, and so does one that brings little when many were made.
    """
    before = np.inf
    for iteration in range(MAX_ITERATIONS):
        excess, step = step_of(theta, k, w, slopes, top)
        low, high = (theta, high) if excess > 0 else (low, theta)
        last = abs(step) <= least
        if not last and (not low < theta + step < high or (iteration > 8 and abs(excess) > before / 2)):  # not: NaN
            step = (low + high) / 2 - theta
        theta, before = theta + step, abs(excess)
        if last or high - low <= rounding:
            break
    return theta


def _tail_sums(w, a, slopes):
    """The sum of f of the rest, whose exp relative to theta are a w, that of its slopes over a, and these."""
    inside = slope = _f32(0)
    for i in range(len(w)):
        e = a * w[i]
        slopes[i] = slope_of(w[i], e)
        inside += f_of(e)
        slope += slopes[i]
    return inside, slope, slopes


def _exponential_sums(w, a, slopes):
    """The same of an exponential, which is its own slope."""
    total = sum_of(w)
    return f_of(a * total), total, w


def _tail_step(theta, k, w, slopes, top):
    """On the logarithm of the odds of the mean."""
    a, n, above = math.exp(min(top[-1] - theta, HIGHEST)), len(w), -k
    excess, slope, _ = sums_of(w, _f32(a), slopes)
    slope = slope * a
    for r in range(len(top)):
        e = math.exp(-abs(top[r] - theta))
        excess += f_of(e) if top[r] < theta else -f_of(e)  # where all f are 0 or 1, the digits of these count
        above += top[r] >= theta
        slope += slope_of(e, e)
    excess += above
    total, slope = k + excess, FACTOR * slope
    odds = math.log1p(excess / k) - math.log1p(-excess / (n - k))
    return excess, odds * total * (n - total) / (n * slope) if slope > 1e-20 else 0.0


def _tail_root(k, rest, largest, w, slopes, top):
    """From the root for scores that lie far from it."""
    far = 1 + math.log(len(w))  # beyond the quantile of k / n
    upper, lower = 0.0, math.exp(rest - top[k])
    for r in range(len(top)):
        upper += math.exp(top[k - 1] - top[r]) if r < k else 0.0
        lower += math.exp(top[r] - top[k]) if r >= k else 0.0
    theta = (top[k - 1] + top[k] + math.log(lower) - math.log(upper)) / 2
    # the error that a step leaves is of the size of its square
    return newton(k, theta, top[-1] - far, far, 1e-4, 0.0, w, slopes, top)


def _tail_slopes(root, share, rest, w, slopes, top, of_top, out):
    """f' relative to its largest."""
    near, nearest = np.empty(len(top)), np.inf
    for r in range(len(top)):
        # at 1 a capped exponential has no slope; the rest lies below theta, and no nearer than the last of top
        near[r] = abs(top[r] - root) if not CAPPED or top[r] <= root else np.inf
        nearest = min(nearest, near[r])
    if rest > -np.inf:
        nearest = min(nearest, max(root - top[-1], 0.0))
    factor = math.exp(min(top[-1] - root + nearest, 0.0)) if nearest < np.inf else 0.0
    _, total, of_rest = sums_of(w, _f32(math.exp(min(top[-1] - root, 0.0))), slopes)
    total = total * factor
    for r in range(len(top)):
        near[r] = slope_of(math.exp(nearest - near[r]), math.exp(-near[r])) if near[r] < np.inf else 0.0
        total += near[r]
    per_slope = share / max(total, _LEAST)
    subtract(_f32(per_slope * factor), of_rest, out)
    of_top += per_slope * near
    return share


def _capped_root(k, rest, largest, w, slopes, top):
    """theta = log sum_{i>m} exp z_i - log(k - m), for m scores at 1: the least of these."""
    # sums of exp relative to the highest of them, from below
    total, origin, root = 1.0, rest, np.inf
    for m in range(len(top), -1, -1):
        if m < len(top):
            total, origin = 1 + (total * math.exp(origin - top[m]) if origin > -np.inf else 0.0), top[m]
        if m < k and origin > -np.inf:
            root = min(root, origin + math.log(total / (k - m)))
    return root


def _power_row(x, label, beta, largest, w, slopes, top):
    """z to w; no other number is needed."""
    highest = max(x[largest[0]], _MASKED)
    for i in range(len(x)):
        w[i] = beta * (max(x[i], _MASKED) - highest)
    return w[label], 0.0


def _power_sums(z, theta, slopes):
    """The sum of f = power(clip(z - theta, 0, 1)), that of its slopes, and these."""
    inside = slope = _f32(0)
    for i in range(len(z)):
        t = z[i] - theta
        p = _f32(0) if t < _f32(0) else (_f32(1) if t > _f32(1) else t)
        inside += f_of(p)
        slopes[i] = slope_of(p) if _f32(0) < t < _f32(1) else _f32(0)
        slope += slopes[i]
    return inside, slope, slopes


def _power_step(theta, k, w, slopes, top):
    inside, slope, _ = sums_of(w, _f32(theta), slopes)
    return inside - k, (inside - k) / slope if inside != k else 0.0


def _power_root(k, rest, largest, w, slopes, top):
    """Between the k-th score and 1 below, where at least k scores have the mask 1; as _power_sums has it."""
    high = np.float64(w[largest[k - 1]])
    least = _EPS * max(1.0, abs(high))
    return _f32(newton(k, high - 0.5, high - 1, high, least, least, w, slopes, top))


def _power_slopes(root, share, rest, w, slopes, top, of_top, out):
    _, total, slopes = sums_of(w, _f32(root), slopes)
    subtract(_f32(share / max(total, _LEAST)), slopes, out)
    return share


def _rank_row(x, label, beta, largest, w, slopes, top):
    """Minus the soft rank, without the half that the class itself adds, and the sum of the slopes."""
    exps(x, beta, max(x[label], _MASKED), _f32(HIGHEST), w)
    inside, total, _ = sums_of(w, _f32(1), slopes)
    return -0.5 - inside, total


def _rank_root(k, total, largest, w, slopes, top):
    return -k


def _rank_slopes(root, share, total, w, slopes, top, of_top, out):
    subtract(_f32(share), slopes, out)
    return share * total


def _forward(scores, labels, beta, softmax, ks, first, last, t, beside, index, roots):
    """Rows first..last of scores (batch, n) to t (batch, J) and, if softmax, its logarithm to beside (batch, 1).

    ks (J,) rise. roots (batch, J + 1): become theta, NaN for no k that is reached, and the logarithm of the softmax's
    sum relative to the largest score. index (batch, M): becomes the columns of the largest, M >= 2 ks or n.
    """
    n, J, M = scores.shape[1], len(ks), index.shape[1]
    w, slopes, top = room(n), room(n), np.empty(M)
    largest_of_rows(scores, first, last, index)
    for row in range(first, last):
        x, largest, label = scores[row], index[row], labels[row]
        highest = x[largest[0]]
        if not highest < np.inf:
            roots[row], t[row], beside[row] = np.nan, _f32(np.nan), _f32(np.nan)
            continue
        if softmax:
            roots[row, J] = softmax_sum(x, highest, w)
            beside[row, 0] = (np.float64(x[label]) - highest) - roots[row, J]
        taking_part = M
        while taking_part > 0 and x[largest[taking_part - 1]] == -np.inf:
            taking_part -= 1
        own, of_row = row_of(x, label, beta, largest, w, slopes, top)
        for j in range(J):
            if THRESHOLDS and ks[j] >= taking_part:
                certain = x[label] > -np.inf or ks[j] >= n
                roots[row, j], t[row, j] = np.nan, _f32(np.inf) if certain else beta * _MASKED
            else:
                theta = root_of(ks[j], of_row, largest, w, slopes, top)
                roots[row, j], t[row, j] = theta, own - theta


def _backward(scores, labels, beta, softmax, index, roots, grad, of_softmax, first, last, grad_scores):
    """Rows first..last of the gradients of t (batch, J) and of beside (batch, 1) to grad_scores (batch, n).

    d t = d z_y - sum_i w_i d z_i, with w = f' / sum f'; of soft ranks that times sum f'.
    """
    n, J = scores.shape[1], grad.shape[1]
    w, slopes, top, of_top = room(n), room(n), np.empty(index.shape[1]), np.empty(index.shape[1])
    for row in range(first, last):
        x, largest, out, label = scores[row], index[row], grad_scores[row], labels[row]
        highest = x[largest[0]]
        out[:] = _f32(0) if highest < np.inf and not (softmax and highest == -np.inf) else _f32(np.nan)
        if not -np.inf < highest < np.inf:
            continue
        of_own, of_top[:] = 0.0, 0.0
        _, of_row = row_of(x, label, beta, largest, w, slopes, top)
        for j in range(J):
            if roots[row, j] == roots[row, j]:
                share = np.float64(beta) * grad[row, j]
                of_own += slopes_of(roots[row, j], share, of_row, w, slopes, top, of_top, out)
        for r in range(len(top)):
            out[largest[r]] -= of_top[r]
        if softmax:
            subtract_softmax(of_softmax[row, 0], x, highest, roots[row, J], w, out)
            of_own += of_softmax[row, 0]
        out[label] += of_own
        for r in range(n):
            if x[r] == -np.inf:
                out[r] = _f32(0)


# f and its slope over FACTOR, of exp(-|t|) or of a power's t; their sums, Newton's step, and what the loops call
_LOGISTIC: tuple[Any, ...] = (lambda e: e / (1.0 + e)), threshold.logistic_slope, _tail_sums, _tail_step
_EXPONENTIAL: tuple[Any, ...] = (lambda e: 0.5 * e), threshold.exponential_slope, _exponential_sums, _tail_step
_POWER = _power_sums, _power_step, _power_row, _power_root, _power_slopes
_FAMILIES = {
    "logistic": (*_LOGISTIC, _tail_row, _tail_root, _tail_slopes),
    "laplace": (*_EXPONENTIAL, _tail_row, _tail_root, _tail_slopes),
    "capped": (*_EXPONENTIAL, _tail_row, _capped_root, _tail_slopes),
    "ranks": (*_LOGISTIC, _rank_row, _rank_root, _rank_slopes),
    **{name: (*formulas, *_POWER) for name, formulas in threshold.POWERS.items()},
}


@functools.cache
def _loops(family: str) -> list[Any]:
    """_forward and _backward for a family of threshold.py, or "ranks"."""
    f, slope, sums, *others = _FAMILIES[family]
    names: dict[str, Any] = {"f_of": in_float32(f, {}), "slope_of": in_float32(slope, {})}
    names |= {"FACTOR": 0.5 if family == "laplace" else 1.0, "CAPPED": family == "capped"}
    names |= {"THRESHOLDS": family != "ranks", "sums_of": jit(bind(sums, names), family, fastmath=IN_ANY_ORDER)}
    order = ("step_of", others[0]), ("newton", _newton), *zip(("row_of", "root_of", "slopes_of"), others[1:])
    for name, function in order:
        names[name] = jit(bind(function, names), family)
    return [jit(bind(each, names), family) for each in (_forward, _backward)]


def _outputs(scores, labels, beta, ks, family, softmax):
    """t (batch, J), beside (batch, 1 or 0), index (batch, M), roots (batch, J + 1)."""
    batch, M = len(scores), 1 if family == "ranks" else min(2 * max([1, *ks]), scores.shape[1])
    t, beside = scores.new_empty(batch, len(ks)), scores.new_empty(batch, int(softmax))
    return [t, beside, labels.new_empty(batch, M), scores.new_empty(batch, len(ks) + 1, dtype=torch.float64)]


def _masks(made, scores, labels, beta, ks, family, softmax):
    """t of the true classes, (batch, J): beta x_y - theta with sum_i f(beta x_i - theta) = k, or k - rank; inf where k
    or fewer take part. And log softmax(x)_y, (batch, 1), if wanted; then what the backward pass reads.

    scores (batch, n) float32, labels (batch,) int64, ks rising. family: f, of threshold.FAMILIES, or "ranks".
    """
    inputs, work = (scores, labels, _f32(beta), softmax, np.array(ks, np.int64)), scores.numel() * (len(ks) + softmax)
    in_threads(_loops(family)[0], work, WORK_OF_A_THREAD, len(scores), inputs, made)


def _masks_backward(grad_scores, grads, made, scores, labels, beta, ks, family, softmax):
    inputs, work = (scores, labels, _f32(beta), softmax, *made[2:], *grads), scores.numel() * (len(ks) + softmax)
    in_threads(_loops(family)[1], work, WORK_OF_A_THREAD, len(scores), inputs, [grad_scores])


register("masks", "cpu", _outputs, _masks, _masks_backward, threshold.masks, 2)
