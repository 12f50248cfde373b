"""Masks f(t) of the true class on the CPU, compiled by Numba: t, row by row, and the softmax's logarithm beside it.

What threshold.py and ranks.py do by some hundred operations. Thresholds, theta with sum_i f(z_i - theta) = k for
z = scale x, are relative to the largest z. The scores that can be above theta, `top`, are looked at one by one, in
float64; of the others, the rest, whose exponentials do not overflow, only sums over all count. float32 only.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from topk_losses.kernels.cpu_largest import largest_of_rows
from topk_losses.kernels.numba_support import (
    IN_ANY_ORDER,
    exps,
    in_threads,
    jit,
    softmax_sum,
    subtract,
    subtract_softmax,
    sum_of,
)
from topk_losses.sorts import MASKED

WORK_OF_A_THREAD = 100_000  # scores times ranks that pay for another thread
# f of LML, LapSum, CappedSoftmax and SparseTopK; and RecallSurrogate, whose t is k less a soft rank
FAMILIES = ("logistic", "laplace", "capped", "power", "ranks")
LOGISTIC, LAPLACE, CAPPED, POWER, RANKS = range(5)
MAX_ITERATIONS = 60
FEW = 16  # times as many scores as are looked at one by one: a sum over all is as cheap
HIGHEST = 80.0  # of what is exponentiated in float32
_f32 = np.float32
_EPS = float(np.finfo(np.float32).eps)
_MASKED, _LEAST = _f32(MASKED), _f32(np.finfo(np.float32).tiny * 2**26)


@jit
def _log_add(a, b):
    """log(exp a + exp b)."""
    high, low = (a, b) if a > b else (b, a)
    return high if low == -np.inf else high + math.log1p(math.exp(low - high))


@partial(jit, fastmath=IN_ANY_ORDER)
def _logistic(w, c, slopes):
    """Of p = w / (w + c), the sigmoid of log w - log c: sum p and sum p (1 - p), each of which goes to slopes."""
    inside = slope = _f32(0)
    for i in range(len(w)):
        share = _f32(1) / (w[i] + c)
        inside += w[i] * share
        slopes[i] = (w[i] * share) * (c * share)
        slope += slopes[i]
    return inside, slope


@partial(jit, fastmath=IN_ANY_ORDER)
def _power(z, theta, q, slopes):
    """sum clip(z - theta, 0, 1)^q and the sum of the slopes, each of which goes to slopes; q = 1 or 3."""
    inside = slope = _f32(0)
    for i in range(len(z)):
        t = z[i] - theta
        p = _f32(0) if t < _f32(0) else (_f32(1) if t > _f32(1) else t)
        on = _f32(1) if _f32(0) < t < _f32(1) else _f32(0)
        inside += p if q == 1 else p * p * p
        slopes[i] = on if q == 1 else _f32(3) * p * p * on
        slope += slopes[i]
    return inside, slope


@jit
def _laplace_sums(top, rest, above, below, at_top):
    """For m = 0, ..., M: log sum exp(-top) of the first m, and log sum exp of all the others; the sums at top (M,)."""
    M = len(top)
    above[0], below[M] = -np.inf, rest
    for m in range(M):
        above[m + 1] = _log_add(above[m], -top[m])
    for m in range(M - 1, -1, -1):
        below[m] = _log_add(below[m + 1], top[m])
        at_top[m] = m - math.exp(top[m] + above[m]) / 2 + math.exp(below[m] - top[m]) / 2


@jit
def _laplace_root(k, above, below, at_top):
    """As laplace_root of threshold.py, from _laplace_sums."""
    m = np.searchsorted(at_top, k)  # scores above theta
    A, B, q = above[m], below[m], k - m
    if q == 0:
        return (B - A) / 2
    log_root = math.log(math.sqrt(q * q + math.exp(A + B)) + abs(q))
    return log_root - A if q < 0 else B - log_root


@jit
def _capped_root(top, rest, k):
    """theta for f = min(1, exp t), and how many scores are at 1."""
    best, at_one, below = np.inf, 0, rest
    for m in range(len(top), -1, -1):
        if m < len(top):
            below = _log_add(below, top[m])
        if m < k and below - math.log(k - m) <= best:
            best, at_one = below - math.log(k - m), m
    return best, at_one


@jit
def _newton(family, z, top, rest, squares, k, q, lowest, highest, theta, slopes):
    """The root in a bracket by Newton's method, on the logarithm of the mean's odds for the logistic f.

    z (n,): of POWER all z; of LOGISTIC exp of the rest relative to the last of top, with rest and squares the logs of
    the sums of their exp, and of its square, relative to the first, that stand in for them until a step is small. A
    step that leaves the bracket halves it, and so does one that brings little when many were made. slopes (n,): room.
    """
    n, least = len(z), top[-1]
    low, high, excess = lowest, highest, np.inf
    exact = family == POWER or rest == -np.inf or n <= FEW * len(top)
    for iteration in range(MAX_ITERATIONS):
        before = excess
        if family == LOGISTIC:
            beyond, above, of_top = 0.0, 0, 0.0
            for r in range(len(top)):
                p = 1 / (1 + math.exp(abs(top[r] - theta)))  # 1 - p above theta: where all are 0 or 1, digits count
                beyond += p if top[r] < theta else -p
                above += top[r] >= theta
                of_top += p * (1 - p)
            if exact:
                inside, slope = _logistic(z, _f32(math.exp(min(theta - least, HIGHEST))), slopes)
            else:
                twice = math.exp(squares - 2 * theta)
                inside, slope = math.exp(rest - theta) - twice, math.exp(rest - theta) - 2 * twice
            excess, slope = (above - k) + (beyond + inside), of_top + slope
            total = k + excess
            step = (math.log1p(excess / k) - math.log1p(-excess / (n - k))) * total * (n - total) / n
        else:
            total, slope = _power(z, _f32(theta), q, slopes)
            excess = step = total - k
        if abs(excess) < 1e-20:  # theta lies far from all scores, and where exp vanishes first would decide
            new = theta
        else:
            if excess > 0:
                low = theta
            else:
                high = theta
            new = theta + step / slope
        if abs(new - theta) <= (1e-4 if family == LOGISTIC else _EPS):  # the next step is of the size of the square
            if exact:
                return new
            exact, low, high, excess = True, lowest, highest, np.inf
        elif not low < new < high or (iteration > 8 and abs(excess) > abs(before) / 2):  # not: NaN
            new = (low + high) / 2
        theta = new
    return theta


@jit
def _forward(scores, labels, scale, family, q, softmax, ks, first, last, index, roots, at_one, t):
    """Rows first..last of scores (batch, n) to the first J columns of t, and if softmax its logarithm to the last.

    ks (J,) rise, and lie in (0, n) but for RANKS. roots (batch, J + 1): become theta, and the logarithm of the
    softmax's sum relative to the largest score. at_one (batch, J): how many scores have the mask 1, of CAPPED. index
    (batch, M): becomes the columns of the largest, M >= 2 ks or n.
    """
    n, M, J = scores.shape[1], index.shape[1], len(ks)
    w, slopes, top = np.empty(n, _f32), np.empty(n, _f32), np.empty(M)
    above, below, at_top = np.empty(M + 1), np.empty(M + 1), np.empty(M)
    largest_of_rows(scores, first, last, index)
    for row in range(first, last):
        x, largest = scores[row], index[row]
        highest, own = max(x[largest[0]], _MASKED), max(x[labels[row]], _MASKED)
        if not highest < np.inf:
            roots[row], t[row] = _f32(np.nan), _f32(np.nan)
            continue
        if softmax:
            roots[row, J] = softmax_sum(x, x[largest[0]], w)
            t[row, -1] = (np.float64(x[labels[row]]) - highest) - roots[row, J]
        if family == RANKS:
            exps(x, scale, own, _f32(HIGHEST), w)
            inside, _ = _logistic(w, _f32(1), slopes)  # with a half for the class itself
            for j in range(J):
                roots[row, j], t[row, j] = _f32(0), ks[j] - 0.5 - inside
            continue
        for r in range(M):
            top[r] = np.float64(scale) * (np.float64(max(x[largest[r]], _MASKED)) - highest)
        rest = squares = -np.inf  # log sum exp of the others, and log sum exp of twice them
        if family == POWER:
            for i in range(n):
                w[i] = scale * (max(x[i], _MASKED) - highest)
        else:
            exps(x, scale, max(x[largest[M - 1]], _MASKED), _f32(0), w)
            for column in largest:
                w[column] = _f32(0)
            total = sum_of(w)
            if total > 0:
                rest = top[M - 1] + math.log(total)
        if family == LOGISTIC and rest > -np.inf:
            for i in range(n):
                slopes[i] = w[i] * w[i]
            squares = 2 * top[M - 1] + np.log(sum_of(slopes))
        if family in (LOGISTIC, LAPLACE):
            _laplace_sums(top, rest, above, below, at_top)
        root = np.inf
        for j in range(J):
            k = ks[j]
            if family == CAPPED:
                root, at_one[row, j] = _capped_root(top, rest, k)
            elif family == POWER:
                low = top[math.ceil(k) - 1] - 1  # at least ceil k scores have the mask 1 there
                start = root if low < root < low + 1 else low + 0.5
                root = _newton(family, w, top, rest, squares, k, q, low, low + 1, start, slopes)
            else:
                root = _laplace_root(k, above, below, at_top)
                if family == LOGISTIC:
                    low, high = top[M - 1] - math.log(k / (M - k)), -math.log(k / (n - k))
                    start = min(max(root, low), high)
                    root = _newton(family, w, top, rest, squares, k, q, low, high, start, slopes)
            roots[row, j] = root
            t[row, j] = np.float64(scale) * (np.float64(own) - highest) - root


@jit
def _backward(scores, labels, scale, family, q, softmax, index, roots, at_one, grad, first, last, grad_scores):
    """Rows first..last of grad (like t) to grad_scores (batch, n).

    d t = d z_y - sum_i w_i d z_i, with w = f' / sum f'; of RANKS that times sum f'.
    """
    n, M, J = scores.shape[1], index.shape[1], at_one.shape[1]
    w, slopes, tops, of_top = np.empty(n, _f32), np.empty(n, _f32), np.empty(M), np.empty(M)
    for row in range(first, last):
        x, largest, of_row, own = scores[row], index[row], grad_scores[row], labels[row]
        of_row[:] = _f32(0) * roots[row, J if softmax else 0]  # NaN in a row with NaN or inf
        highest = x[largest[0]]
        if not _MASKED < highest < np.inf:
            continue
        of_own = 0.0
        for j in range(J):
            of_own += scale * grad[row, j]
        if family == POWER:
            for i in range(n):
                w[i] = scale * (max(x[i], _MASKED) - highest)
            for j in range(J):
                _, total = _power(w, roots[row, j], q, slopes)
                subtract(_f32(scale * grad[row, j] / max(total, _LEAST)), slopes, of_row)
        elif family == RANKS:
            exps(x, scale, max(x[own], _MASKED), _f32(HIGHEST), w)
            _, total = _logistic(w, _f32(1), slopes)
            subtract(_f32(of_own), slopes, of_row)
            of_own *= total
        else:  # all but the largest lie below theta
            least = max(x[largest[M - 1]], _MASKED)
            exps(x, scale, least, _f32(0), w)
            for column in largest:
                w[column] = _f32(0)
            rest, of_rest, below = sum_of(w), 0.0, np.float64(scale) * (np.float64(least) - highest)
            of_top[:] = 0
            for j in range(J):
                root, nearest = np.float64(roots[row, j]), np.inf if family == LAPLACE else 0.0
                for r in range(M):  # distances from theta
                    tops[r] = abs(np.float64(scale) * (np.float64(x[largest[r]]) - highest) - root)
                    nearest = min(nearest, tops[r])
                if family == LOGISTIC:
                    _, total = _logistic(w, _f32(math.exp(min(root - below, HIGHEST))), slopes)
                else:  # f' is an exponential there: the same for all k, but for a factor
                    factor = math.exp(below - root + nearest)
                    total = rest * factor
                for r in range(M):
                    tops[r] = math.exp(nearest - tops[r]) if r >= at_one[row, j] and tops[r] < np.inf else 0.0
                    if family == LOGISTIC:
                        tops[r] /= (1 + tops[r]) ** 2
                    total += tops[r]
                share = scale * grad[row, j] / max(total, _LEAST)
                of_top += share * tops
                if family == LOGISTIC:
                    subtract(_f32(share), slopes, of_row)
                else:
                    of_rest += share * factor
            if of_rest != 0:
                subtract(_f32(of_rest), w, of_row)
            for r in range(M):
                of_row[largest[r]] -= of_top[r]
        if softmax:
            subtract_softmax(grad[row, -1], x, highest, roots[row, J], w, of_row)
            of_own += grad[row, -1]
        if x[own] > _MASKED:
            of_row[own] += of_own


class _Arguments(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, labels: Tensor, scale: float, ks: Sequence[float], family: str, q: int, softmax: bool,
        operations: Callable[..., Tensor],
    ) -> Tensor:  # fmt: skip
        (batch, n), proper = x.shape, [k for k in ks if k < x.shape[1] or family == "ranks"]
        J, M = len(proper), 1 if family == "ranks" else min(2 * math.ceil(max([1, *proper])), n)
        threads = max(1, min(torch.get_num_threads(), batch, 1 + x.numel() * (J + softmax) // WORK_OF_A_THREAD))
        # among n classes all are the n highest
        t = x.new_full((batch, len(ks) + softmax), math.inf)
        index, roots = labels.new_empty(batch, M), x.new_empty(batch, J + 1)
        at_one = torch.zeros(batch, J, dtype=torch.int64)
        settings = (_f32(scale), FAMILIES.index(family), q, softmax)
        rows = (each.detach().contiguous().numpy() for each in (x, labels))
        inputs = (*rows, *settings, np.array(proper, np.float64))
        outputs = [each.numpy() for each in (index, roots, at_one, t)]
        in_threads(threads, batch, lambda first, last: _forward(*inputs, first, last, *outputs))
        ctx.save_for_backward(x, labels, index, roots, at_one)
        ctx.settings, ctx.threads, ctx.operations = settings, threads, operations
        return t

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, labels, *arrays = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: PyTorch's operations know their second derivatives
            copy = x.view_as(x)
            return *torch.autograd.grad(ctx.operations(copy), copy, grad, create_graph=True), *(None,) * 7
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        rows = (each.detach().contiguous().numpy() for each in (x, labels))
        inputs = (*rows, *ctx.settings, *(each.numpy() for each in (*arrays, grad.contiguous())))
        in_threads(ctx.threads, len(x), lambda first, last: _backward(*inputs, first, last, grad_x.numpy()))
        return grad_x, *(None,) * 7


def arguments(
    x: Tensor, labels: Tensor, scale: float, ks: Sequence[float], family: str, q: int, softmax: bool,
    operations: Callable[[Tensor], Tensor],
) -> Tensor:  # fmt: skip
    """t of the true classes, (rows, J): scale x_y - theta with sum_i f(scale x_i - theta) = k, inf for k = n.

    Or k - rank. x (rows, n) float32 on the CPU, labels (rows,) int64, ks rising. family: f, one of FAMILIES, with the
    exponent q of power. softmax: one more column, log softmax(x)_y. operations: what computes the same from x.
    """
    return _Arguments.apply(x, labels, scale, ks, family, q, softmax, operations)
