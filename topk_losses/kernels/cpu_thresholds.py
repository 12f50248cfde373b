"""Thresholds of masks on the CPU, compiled by Numba: theta with sum_i f(z_i - theta) = k, z = scale x, row by row.

What threshold.py does by some hundred operations. z is taken relative to the largest score. The scores that can be
above theta are looked at one by one, in float64; of the others only sums over all count. float32 only.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from topk_losses.kernels.cpu_largest import largest_of_rows
from topk_losses.kernels.numba_support import IN_ANY_ORDER, exp, in_threads, jit, sum_of
from topk_losses.sorts import MASKED, finite

WORK_OF_A_THREAD = 100_000  # scores times ranks that pay for another thread
FAMILIES = ("logistic", "laplace", "capped", "power")  # f of LML, LapSum, CappedSoftmax, SparseTopK
LOGISTIC, LAPLACE, CAPPED, POWER = range(4)
MAX_ITERATIONS = 60
FEW = 16  # times as many scores as are looked at one by one: a sum over all is as cheap
_f32 = np.float32
_EPS = float(np.finfo(np.float32).eps)
_MASKED, _LEAST = _f32(MASKED), _f32(np.finfo(np.float32).tiny * 2**26)


@jit
def _log_add(a, b):
    """log(exp a + exp b)."""
    high, low = (a, b) if a > b else (b, a)
    return high if low == -np.inf else high + math.log1p(math.exp(low - high))


@jit
def _exps(z, least, w):
    """w = exp(z - least), at most 1, and 0 for what is too low to be seen."""
    for i in range(len(z)):
        v = z[i] - least
        w[i] = _f32(0) if v < _f32(-87) else exp(_f32(0) if v > _f32(0) else v)


@partial(jit, fastmath=IN_ANY_ORDER)
def _logistic(z, theta):
    """Of p = sigmoid(z - theta): sum p less the number of scores above theta, that number, and sum p (1 - p)."""
    beyond = above = slope = _f32(0)
    for i in range(len(z)):
        t = z[i] - theta
        e = _f32(0) if np.abs(t) > _f32(87) else exp(-np.abs(t))
        rest = e / (_f32(1) + e)  # p, or 1 - p above theta: where all are 0 or 1, their digits count
        beyond += rest if t < _f32(0) else -rest
        above += _f32(0) if t < _f32(0) else _f32(1)
        slope += rest * (_f32(1) - rest)
    return beyond, above, slope


@partial(jit, fastmath=IN_ANY_ORDER)
def _power(z, theta, q):
    """sum clip(z - theta, 0, 1)^q and its slope, q = 1 or 3."""
    inside = slope = _f32(0)
    for i in range(len(z)):
        t = z[i] - theta
        p = _f32(0) if t < _f32(0) else (_f32(1) if t > _f32(1) else t)
        on = _f32(1) if _f32(0) < t < _f32(1) else _f32(0)
        inside += p if q == 1 else p * p * p
        slope += on if q == 1 else _f32(3) * p * p * on
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
def _newton(family, z, rest, squares, k, q, low, high, theta, n):
    """The root between low and high by Newton's method, on the logarithm of the mean's odds for the logistic f.

    z: all n scores; or some, the others far below theta, with rest and squares the logs of the sums of their exp and of
    its square. A step that leaves the bracket halves it, and so does one that brings little when many were made.
    """
    excess = np.inf
    for iteration in range(MAX_ITERATIONS):
        before = excess
        if family == LOGISTIC:
            beyond, above, slope = _logistic(z, _f32(theta))
            others, twice = math.exp(rest - theta), math.exp(squares - 2 * theta)
            excess, slope = (above - k) + (beyond + others - twice), slope + others - 2 * twice
            total = k + excess
            step = (math.log1p(excess / k) - math.log1p(-excess / (n - k))) * total * (n - total) / n
        else:
            total, slope = _power(z, _f32(theta), q)
            excess = step = total - k
        if abs(excess) < 1e-20:  # theta lies far from all scores, and where exp vanishes first would decide
            break
        if excess > 0:
            low = theta
        else:
            high = theta
        new = theta + step / slope
        if abs(new - theta) <= (1e-4 if family == LOGISTIC else _EPS):  # the next step is of the size of the square
            return new
        if not low < new < high or (iteration > 8 and abs(excess) > abs(before) / 2):  # not: NaN
            new = (low + high) / 2
        theta = new
    return theta


@jit
def _roots(scores, scale, ks, family, q, first, last, index, roots, at_one):
    """Rows first..last of scores (batch, n) to roots and at_one (batch, J), for ks (J,), all in (0, n).

    roots: theta less the largest z. at_one: how many scores have the mask 1, of CAPPED. index (batch, M): becomes the
    columns of the largest, M >= 2 ks or n.
    """
    n, M = scores.shape[1], index.shape[1]
    z, w, tops, top = np.empty(n, _f32), np.empty(n, _f32), np.empty(M, _f32), np.empty(M)
    above, below, at_top = np.empty(M + 1), np.empty(M + 1), np.empty(M)
    largest_of_rows(scores, first, last, index)
    for row in range(first, last):
        x, largest = scores[row], index[row]
        highest = max(x[largest[0]], _MASKED)
        if not highest < np.inf:
            roots[row] = _f32(np.nan)
            continue
        for i in range(n):
            z[i] = scale * (max(x[i], _MASKED) - highest)
        for r in range(M):
            top[r] = tops[r] = z[largest[r]]
        rest = squares = -np.inf  # log sum exp of the others, and log sum exp of twice them
        if n > M and family != POWER:
            _exps(z, z[largest[M - 1]], w)
            for r in range(M):
                w[largest[r]] = _f32(0)
            total = sum_of(w)
            if total > 0:
                rest = top[M - 1] + math.log(total)
                for i in range(n):
                    w[i] *= w[i]
                squares = 2 * top[M - 1] + np.log(sum_of(w))
        if family in (LOGISTIC, LAPLACE):
            _laplace_sums(top, rest, above, below, at_top)
        for j in range(len(ks)):
            k = ks[j]
            if family == CAPPED:
                root, at_one[row, j] = _capped_root(top, rest, k)
            elif family == POWER:
                low = top[math.ceil(k) - 1] - 1  # at least ceil k scores have the mask 1 there
                root = _newton(family, z, -np.inf, -np.inf, k, q, low, low + 1, low, n)
            else:
                root = _laplace_root(k, above, below, at_top)
                if family == LOGISTIC:
                    low, high = top[M - 1] - math.log(k / (M - k)), -math.log(k / (n - k))
                    root = min(max(root, low), high)
                    if n > FEW * M and rest > -np.inf:  # first without a look at all
                        root = _newton(family, tops, rest, squares, k, q, low, high, root, n)
                    root = _newton(family, z, -np.inf, -np.inf, k, q, low, high, root, n)
            roots[row, j] = root


@jit
def _slopes(z, root, family, q, w):
    """w = f'(z - root), of LOGISTIC and POWER."""
    if family == LOGISTIC:
        for i in range(len(z)):
            v = np.abs(z[i] - root)
            p = _f32(0) if v > _f32(87) else exp(-v)
            w[i] = p / ((_f32(1) + p) * (_f32(1) + p))
    else:
        for i in range(len(z)):
            t = z[i] - root
            w[i] = _f32(q) * t ** (q - 1) if _f32(0) < t < _f32(1) else _f32(0)


@jit
def _backward(scores, scale, family, q, labels, index, roots, at_one, grad, first, last, grad_scores):
    """Rows first..last of grad (batch, J) to grad_scores (batch, n).

    d t = d z_y - sum_i w_i d z_i, with w = f' / sum f'.
    """
    n, M = scores.shape[1], index.shape[1]
    z, w, tops = np.empty(n, _f32), np.empty(n, _f32), np.empty(M)
    for row in range(first, last):
        x, largest, of_row = scores[row], index[row], grad_scores[row]
        of_row[:] = _f32(0) * roots[row, 0]  # NaN in a row with NaN or inf
        if not _MASKED < x[largest[0]] < np.inf:
            continue
        for i in range(n):
            z[i] = scale * (x[i] - x[largest[0]])
        if family in (LOGISTIC, POWER):
            for j in range(roots.shape[1]):
                _slopes(z, roots[row, j], family, q, w)
                share = scale * grad[row, j] / max(sum_of(w), _LEAST)
                for i in range(n):
                    of_row[i] -= share * w[i]
        else:  # all but the largest lie below theta, where f' is an exponential: the same for all k, but for a factor
            least = z[largest[M - 1]]
            _exps(z, least, w)
            for column in largest:
                w[column] = _f32(0)
            rest, of_rest = sum_of(w), 0.0
            of_largest = np.zeros(M)
            for j in range(roots.shape[1]):
                root, nearest = np.float64(roots[row, j]), np.inf if family == LAPLACE else 0.0
                if family == LAPLACE:
                    for column in largest:
                        nearest = min(nearest, abs(z[column] - root))
                factor = math.exp(least - root + nearest)
                total = rest * factor
                for r in range(M):
                    on = r >= at_one[row, j] and z[largest[r]] > -np.inf
                    tops[r] = math.exp(nearest - abs(z[largest[r]] - root)) if on else 0.0
                    total += tops[r]
                share = scale * grad[row, j] / total
                of_rest += share * factor
                of_largest += share * tops
            for i in range(n):
                of_row[i] = -_f32(of_rest) * w[i]
            for r in range(M):
                of_row[largest[r]] = -of_largest[r]
        if x[labels[row]] > _MASKED:
            for j in range(roots.shape[1]):
                of_row[labels[row]] += scale * grad[row, j]


class _Arguments(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, labels: Tensor, scale: float, ks: Sequence[float], family: str, q: int,
        operations: Callable[..., Tensor],
    ) -> Tensor:  # fmt: skip
        batch, n = x.shape
        threads = max(1, min(torch.get_num_threads(), batch, 1 + x.numel() * len(ks) // WORK_OF_A_THREAD))
        index = labels.new_empty(batch, min(2 * math.ceil(max(ks)), n))
        roots, at_one = x.new_empty(batch, len(ks)), torch.zeros(batch, len(ks), dtype=torch.int64)
        scaled, curve = (x.detach().contiguous().numpy(), _f32(scale)), (FAMILIES.index(family), q)
        arrays = [each.numpy() for each in (index, roots, at_one)]
        wanted = np.array(ks, dtype=np.float64)
        in_threads(threads, batch, lambda first, last: _roots(*scaled, wanted, *curve, first, last, *arrays))
        ctx.save_for_backward(x, labels, index, roots, at_one)
        ctx.settings, ctx.threads, ctx.operations = (*scaled, *curve), threads, operations
        true, highest = finite(x.gather(1, torch.stack([labels, index[:, 0]], dim=1))).chunk(2, dim=1)
        return (true - highest) * scale - roots

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, labels, *arrays = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: PyTorch's operations know their second derivatives
            copy = x.view_as(x)
            return *torch.autograd.grad(ctx.operations(copy), copy, grad, create_graph=True), *(None,) * 6
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        inputs = (*ctx.settings, *(each.numpy() for each in (labels, *arrays, grad.contiguous())))
        in_threads(ctx.threads, len(x), lambda first, last: _backward(*inputs, first, last, grad_x.numpy()))
        return grad_x, *(None,) * 6


def arguments(
    x: Tensor, labels: Tensor, scale: float, ks: Sequence[float], family: str, q: int,
    operations: Callable[[Tensor], Tensor],
) -> Tensor:  # fmt: skip
    """t = scale x_y - theta, (rows, J), of the true classes, with sum_i f(scale x_i - theta) = k.

    x (rows, n) float32 on the CPU, labels (rows,) int64, ks in (0, n). family: f, one of FAMILIES, with
    the exponent q of power. operations: what computes the same from x.
    """
    return _Arguments.apply(x, labels, scale, ks, family, q, operations)
