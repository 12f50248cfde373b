"""Masks f(t) of the true class on the CPU, compiled by Numba: t, row by row, and the softmax's logarithm beside it.

What threshold.py and ranks.py do by some hundred operations. Thresholds, theta with sum_i f(z_i - theta) = k for
z = beta x, are relative to the largest z. A family has two functions, `roots` and `slopes` of a row, which the same two
loops over rows call. Where f has exponential tails, the scores that can be above theta, `top`, are looked at one by
one, in float64; of the others, the rest, whose exponentials do not overflow, only sums over all count.
"""

import functools
import math
import types
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from topk_losses import threshold
from topk_losses.kernels import register
from topk_losses.kernels.cpu_largest import largest_of_rows
from topk_losses.kernels.numba_support import (
    IN_ANY_ORDER,
    exps,
    in_float32,
    in_threads,
    jit,
    softmax_sum,
    subtract,
    subtract_softmax,
    sum_of,
)
from topk_losses.operator import MASKED

WORK_OF_A_THREAD = 100_000  # scores times ranks that pay for another thread
MAX_ITERATIONS = 60
GAP = 256  # numbers between two arrays: more than a step of vector code
HIGHEST = 80.0  # of what is exponentiated in float32
_f32 = np.float32
_EPS = float(np.finfo(np.float32).eps)
_MASKED, _LEAST = _f32(MASKED), _f32(np.finfo(np.float32).tiny * 2**26)


@jit
def _rooms(n):
    """Two arrays (n,) to work in, the second well behind the first.

    Where they lay next to each other, which is chance, a loop that reads the one and writes the other would not run as
    vector code, and its sums would have other last digits.
    """
    both = np.empty((2, n + GAP), _f32)
    return both[0, :n], both[1, :n]


@jit
def _relative(x, score, largest, beta):
    """z of a score, less the largest."""
    return np.float64(beta) * (np.float64(max(score, _MASKED)) - max(x[largest[0]], _MASKED))


@jit
def _split(x, beta, largest, w, top):
    """z of the largest, falling, to top (M,), and exp of the others, relative to top[M - 1], to w (n,); its log sum."""
    for r in range(len(top)):
        top[r] = _relative(x, x[largest[r]], largest, beta)
    exps(x, beta, max(x[largest[-1]], _MASKED), _f32(0), w)
    for column in largest:
        w[column] = _f32(0)
    total = sum_of(w)
    return top[-1] + math.log(total) if total > 0 else -np.inf


@partial(jit, fastmath=IN_ANY_ORDER)
def _logistic_sums(w, a, slopes):
    """Of p = e / (1 + e), e = a w: sum p, and the sum of w / (1 + e)^2, each of which goes to slopes."""
    inside = slope = _f32(0)
    for i in range(len(w)):
        e = a * w[i]
        slopes[i] = logistic_slope(w[i], e)
        inside += e / (_f32(1) + e)
        slope += slopes[i]
    return inside, slope


@jit
def _logistic_tail(e):
    return e / (1 + e), e / (1 + e) ** 2


@jit
def _laplace_tail(e):
    return e / 2, e / 2


@jit
def _logistic_rest(w, a, slopes):
    """sum f and sum f' of the rest, whose exp relative to theta are a w."""
    inside, slope = _logistic_sums(w, _f32(a), slopes)
    return inside, slope * a


@jit
def _laplace_rest(w, a, slopes):
    total = a * sum_of(w) / 2
    return total, total


def _tail_roots(x, beta, own, largest, ks, roots, t, w, room, top):
    """By Newton's method on the logarithm of the odds of the mean, from the root for scores that lie far from it.

    A step that leaves the bracket halves it, and so does one that brings little when many were made.
    """
    rest, n, M = _split(x, beta, largest, w, top), len(x), len(top)
    for j in range(len(ks)):
        k = ks[j]
        upper, lower = 0.0, math.exp(rest - top[k])
        for r in range(M):
            upper += math.exp(top[k - 1] - top[r]) if r < k else 0.0
            lower += math.exp(top[r] - top[k]) if r >= k else 0.0
        theta = (top[k - 1] + top[k] + math.log(lower) - math.log(upper)) / 2
        far = 1 + math.log(n)  # beyond the quantile of k / n
        low, high, before = top[-1] - far, far, np.inf
        for iteration in range(MAX_ITERATIONS):
            excess, slope = rest_of(w, math.exp(min(top[-1] - theta, HIGHEST)), room)  # noqa: F821
            above = -k
            for r in range(M):
                tail, steep = tail_of(math.exp(-abs(top[r] - theta)))  # noqa: F821
                excess += tail if top[r] < theta else -tail  # where all f are 0 or 1, the digits of these count
                above += top[r] >= theta
                slope += steep
            excess += above
            low, high = (theta, high) if excess > 0 else (low, theta)
            total = k + excess
            odds = math.log1p(excess / k) - math.log1p(-excess / (n - k))
            new = theta + (odds * total * (n - total) / (n * slope) if slope > 1e-20 else 0.0)
            last = abs(new - theta) <= 1e-4  # the next step is of the size of the square
            if not last and (not low < new < high or (iteration > 8 and abs(excess) > before / 2)):  # not: NaN
                new = (low + high) / 2
            theta, before = new, abs(excess)
            if last:
                break
        roots[j], t[j] = theta, _relative(x, own, largest, beta) - theta


def _tail_slopes(x, beta, own, largest, roots, shares, out, w, room, top):
    """f' relative to its largest, times the shares over their sum: taken off out (n,)."""
    rest, of_rest, M = _split(x, beta, largest, w, top), 0.0, len(top)
    near, of_top = np.empty(M), np.zeros(M)
    for j in range(len(roots)):
        root, nearest = roots[j], np.inf
        for r in range(M):
            # at 1 a capped exponential has no slope; the rest lies below theta, and no nearer than the last of top
            near[r] = abs(top[r] - root) if not capped or top[r] <= root else np.inf  # noqa: F821
            nearest = min(nearest, near[r])
        if rest > -np.inf:
            nearest = min(nearest, max(root - top[-1], 0.0))
        factor = math.exp(min(top[-1] - root + nearest, 0.0)) if nearest < np.inf else 0.0
        if logistic:  # noqa: F821
            total = _logistic_sums(w, _f32(math.exp(min(top[-1] - root, 0.0))), room)[1] * factor
        else:
            total = math.exp(rest - root + nearest) if rest > -np.inf else 0.0
        for r in range(M):
            e = math.exp(-near[r])
            near[r] = math.exp(nearest - near[r]) if near[r] < np.inf else 0.0
            near[r] = logistic_slope(near[r], e) if logistic else near[r]  # noqa: F821
            total += near[r]
        share = shares[j] / max(total, _LEAST)
        of_top += share * near
        if logistic:  # noqa: F821
            subtract(_f32(share * factor), room, out)
        else:  # an exponential: the same for all k, but for a factor
            of_rest += share * factor
    if of_rest != 0:
        subtract(_f32(of_rest), w, out)
    for r in range(M):
        out[largest[r]] -= of_top[r]
    return shares.sum()


def _capped_roots(x, beta, own, largest, ks, roots, t, w, room, top):
    """theta = log sum_{i>m} exp z_i - log(k - m), for m scores at 1: the least of these."""
    rest = _split(x, beta, largest, w, top)
    for j in range(len(ks)):
        k, total, origin = ks[j], 0.0, top[0]
        roots[j] = np.inf
        # sums of exp relative to the highest of them, from below
        for m in range(len(top), -1, -1):
            if m == len(top):
                total, origin = 1.0, rest
            else:
                total, origin = 1 + (total * math.exp(origin - top[m]) if origin > -np.inf else 0.0), top[m]
            if m < k and origin > -np.inf:
                roots[j] = min(roots[j], origin + math.log(total / (k - m)))
        t[j] = _relative(x, own, largest, beta) - roots[j]


@jit
def _scaled(x, beta, largest, w):
    highest = max(x[largest[0]], _MASKED)
    for i in range(len(x)):
        w[i] = beta * (max(x[i], _MASKED) - highest)


def _power_sums(z, theta, slopes):
    """The sum of f = power(clip(z - theta, 0, 1)), and that of its slopes."""
    inside = slope = _f32(0)
    for i in range(len(z)):
        t = z[i] - theta
        p = _f32(0) if t < _f32(0) else (_f32(1) if t > _f32(1) else t)
        inside += power_of(p)  # noqa: F821
        slopes[i] = slope_of(p) if _f32(0) < t < _f32(1) else _f32(0)  # noqa: F821
        slope += slopes[i]
    return inside, slope


def _power_roots(x, beta, own, largest, ks, roots, t, w, room, top):
    """By Newton's method between the k-th score and 1 below, where at least k scores have the mask 1."""
    _scaled(x, beta, largest, w)
    for j in range(len(ks)):
        high = w[largest[ks[j] - 1]]
        low, theta, before = high - _f32(1), high - _f32(0.5), np.inf
        for iteration in range(MAX_ITERATIONS):
            inside, slope = sums_of(w, theta, room)  # noqa: F821
            excess = inside - ks[j]
            if excess == 0:
                break
            low, high = (theta, high) if excess > 0 else (low, theta)
            new = theta + _f32(excess / slope)
            last = abs(new - theta) <= _EPS * max(1.0, abs(theta))
            if not last and (not low < new < high or (iteration > 8 and abs(excess) > before / 2)):  # not: NaN
                new = (low + high) / _f32(2)
            theta, before = new, abs(excess)
            if last or not low < high:
                break
        roots[j], t[j] = theta, beta * (max(own, _MASKED) - max(x[largest[0]], _MASKED)) - theta


def _power_slopes(x, beta, own, largest, roots, shares, out, w, room, top):
    _scaled(x, beta, largest, w)
    for j in range(len(roots)):
        _, total = sums_of(w, _f32(roots[j]), room)  # noqa: F821
        subtract(_f32(shares[j] / max(total, _LEAST)), room, out)
    return shares.sum()


def _rank_roots(x, beta, own, largest, ks, roots, t, w, room, top):
    """k less the soft rank, without the half that the class itself adds."""
    exps(x, beta, max(own, _MASKED), _f32(HIGHEST), w)
    inside, _ = _logistic_sums(w, _f32(1), room)
    for j in range(len(ks)):
        roots[j], t[j] = 0, ks[j] - 0.5 - inside


def _rank_slopes(x, beta, own, largest, roots, shares, out, w, room, top):
    exps(x, beta, max(own, _MASKED), _f32(HIGHEST), w)
    _, total = _logistic_sums(w, _f32(1), room)
    subtract(_f32(shares.sum()), room, out)
    return shares.sum() * total


def _forward(scores, labels, beta, softmax, ks, first, last, index, roots, t, beside):
    """Rows first..last of scores (batch, n) to t (batch, J) and, if softmax, its logarithm to beside (batch, 1).

    ks (J,) rise. roots (batch, J + 1): become theta, NaN for no k that is reached, and the logarithm of the softmax's
    sum relative to the largest score. index (batch, M): becomes the columns of the largest, M >= 2 ks or n.
    """
    n, J, M = scores.shape[1], len(ks), index.shape[1]
    (w, room), top = _rooms(n), np.empty(M)
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
        proper = J
        while thresholds and proper > 0 and ks[proper - 1] >= taking_part:  # noqa: F821
            proper -= 1
            certain = x[label] > -np.inf or ks[proper] >= n
            roots[row, proper], t[row, proper] = np.nan, _f32(np.inf) if certain else beta * _MASKED
        roots_of(x, beta, x[label], largest, ks[:proper], roots[row], t[row], w, room, top)  # noqa: F821


def _backward(scores, labels, beta, softmax, index, roots, grad, of_softmax, first, last, grad_scores):
    """Rows first..last of the gradients of t (batch, J) and of beside (batch, 1) to grad_scores (batch, n).

    d t = d z_y - sum_i w_i d z_i, with w = f' / sum f'; of soft ranks that times sum f'.
    """
    n, J = scores.shape[1], grad.shape[1]
    (w, room), top = _rooms(n), np.empty(index.shape[1])
    for row in range(first, last):
        x, largest, of_row, label = scores[row], index[row], grad_scores[row], labels[row]
        highest, of_own, proper = x[largest[0]], 0.0, 0
        of_row[:] = _f32(0) if highest < np.inf and not (softmax and highest == -np.inf) else _f32(np.nan)
        if not -np.inf < highest < np.inf:
            continue
        while proper < J and roots[row, proper] == roots[row, proper]:
            proper += 1
        if proper > 0:
            shares = np.float64(beta) * grad[row, :proper]
            of_own = slopes_of(  # noqa: F821
                x, beta, x[label], largest, roots[row, :proper], shares, of_row, w, room, top
            )
        if softmax:
            subtract_softmax(of_softmax[row, 0], x, highest, roots[row, J], w, of_row)
            of_own += of_softmax[row, 0]
        of_row[label] += of_own
        for r in range(n):
            if x[r] == -np.inf:
                of_row[r] = _f32(0)


def _bound(function: Any, kind: str, **names: Any) -> Any:
    """A function of this file compiled with some of its names bound."""
    return jit(types.FunctionType(function.__code__, {**globals(), **names}, function.__name__), kind)


@functools.cache
def _loops(family: str) -> tuple[Any, Any]:
    """_forward and _backward for a family of threshold.py, or "ranks"."""
    names: dict[str, Any] = {"capped": family == "capped", "logistic": family == "logistic"}
    roots: Any
    slopes: Any
    if family == "ranks":
        roots, slopes = _rank_roots, _rank_slopes
    elif family in ("linear", "cubic"):
        power, slope = (in_float32(getattr(threshold, f"{family}{role}"), {}) for role in ("", "_slope"))
        sums = types.FunctionType(
            _power_sums.__code__, {**globals(), "power_of": power, "slope_of": slope}, "_power_sums"
        )
        names["sums_of"] = jit(sums, family, fastmath=IN_ANY_ORDER)
        roots, slopes = _power_roots, _power_slopes
    else:
        roots, slopes = _capped_roots if family == "capped" else _tail_roots, _tail_slopes
        logistic = family == "logistic"
        names["tail_of"] = _logistic_tail if logistic else _laplace_tail
        names["rest_of"] = _logistic_rest if logistic else _laplace_rest
    bound = {"roots_of": _bound(roots, family, **names), "slopes_of": _bound(slopes, family, **names)}
    loops = [_bound(each, family, **bound, thresholds=family != "ranks") for each in (_forward, _backward)]
    return loops[0], loops[1]


logistic_slope = in_float32(threshold.logistic_slope, {})


def _outputs(scores, labels, beta, ks, family, softmax):
    """t (batch, J), beside (batch, 1 or 0), index (batch, M), roots (batch, J + 1)."""
    batch, M = len(scores), 1 if family == "ranks" else min(2 * max([1, *ks]), scores.shape[1])
    t, beside = scores.new_empty(batch, len(ks)), scores.new_empty(batch, int(softmax))
    return [t, beside, labels.new_empty(batch, M), scores.new_empty(batch, len(ks) + 1, dtype=torch.float64)]


def _masks(scores: Tensor, labels: Tensor, beta: Tensor, ks: list[int], family: str, softmax: bool) -> list[Tensor]:
    """t of the true classes, (batch, J): beta x_y - theta with sum_i f(beta x_i - theta) = k, or k - rank; inf where k
    or fewer take part. And log softmax(x)_y, (batch, 1), if wanted; then what the backward pass reads.

    scores (batch, n) float32, labels (batch,) int64, ks rising. family: f, of threshold.FAMILIES, or "ranks".
    """
    t, beside, index, roots = outputs = _outputs(scores, labels, beta, ks, family, softmax)
    inputs = (scores.contiguous().numpy(), labels.contiguous().numpy(), _f32(beta), softmax, np.array(ks, np.int64))
    arrays = [each.numpy() for each in (index, roots, t, beside)]
    work = scores.numel() * (len(ks) + softmax)
    in_threads(work, WORK_OF_A_THREAD, len(scores), lambda i, j: _loops(family)[0](*inputs, i, j, *arrays))
    return outputs


def _masks_backward(grads, scores, labels, beta, ks, family, softmax, outputs):
    grad_scores = torch.empty_like(scores, memory_format=torch.contiguous_format)
    inputs = (scores.contiguous().numpy(), labels.contiguous().numpy(), _f32(beta), softmax)
    arrays = [each.contiguous().numpy() for each in (*outputs[2:], *grads[:2])]
    work, out = scores.numel() * (len(ks) + softmax), grad_scores.numpy()
    in_threads(work, WORK_OF_A_THREAD, len(scores), lambda i, j: _loops(family)[1](*inputs, *arrays, i, j, out))
    return grad_scores


register("masks_cpu", _masks, _outputs, _masks_backward, threshold.masks, 2)
