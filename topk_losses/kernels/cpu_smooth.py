"""The smooth k-th largest score on the CPU, compiled by Numba: a ratio of elementary symmetric polynomials, row by row.

With x_i = scale exp(o_i / temperature), whatever the scale, e_k / e_{k-1} is that of the exponentials times the scale.
The e_j come from sums and products of non-negative numbers alone, so that nothing is cancelled:

The rest, all but the true class and the 2 k largest, are polynomials 1 + x_i t, multiplied two by two and cut off at
t^k. The 2 k largest, the leaves, are added to the product one by one, as trials with p_i = x_i / (1 + x_i): P(N = j),
with N the number of successes, is e_j but for a common factor, however far apart the scores lie.

By a score, e_k has the derivative x_i e_{k-1} of all the others. Those of the leaves come backward through the trials.
A score of the rest is divided out of the product: e_j without it is e_j - x_i (e_{j-1} without it), in powers of x_i.
Since 2 k scores are at least as large, no term is larger than the one before, and hardly a digit is lost. O(n k).
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from topk_losses.kernels.cpu_largest import largest_of_rows
from topk_losses.kernels.numba_support import exp, in_threads, jit, sum_of

MAX_K_WITH_REST = 64  # e^k is a float32 number
WORK_OF_A_THREAD = 50_000  # scores that pay for another thread, a tenth of a millisecond
FAR = 700.0  # temperatures above the k-th score, beyond which exp would overflow: in every subset for sure
LANES = 16
_f32 = np.float32


@jit
def _product(factors):
    """The product of polynomials, factors (k + 1, number), coefficients in rows, into the first column.

    They are 1 + x t, with x in row 1. The number is a multiple of LANES, so that it is vector code.
    """
    k, width, degree = len(factors) - 1, factors.shape[1], 1
    while width > 1:
        half = (width // 2 + LANES - 1) // LANES * LANES if width > LANES else width // 2
        pairs = width - half  # column i takes in that half a width further on
        for j in range(min(2 * degree, k), 0, -1):
            of_j, other = factors[j, :half], factors[j, half:width]
            if j <= degree:
                for i in range(pairs):
                    of_j[i] += other[i]
            else:
                of_j[:] = _f32(0)
            for below in range(max(1, j - degree), min(j - 1, degree) + 1):
                a, b = factors[below, :pairs], factors[j - below, half:width]
                for i in range(pairs):
                    of_j[i] += a[i] * b[i]
        width, degree = half, 2 * degree


@jit
def _rows(scores, labels, ks, temperature, first, last, index, smooth, hard, top, slopes, kth_of):
    """Rows first..last of scores (batch, n) for ks (J,) rising.

    To smooth, hard, kth_of (batch, J), top (batch, some), slopes (batch, J, n). labels (batch,): the true classes.
    index (batch, leaves + 1): room to work. slopes: d smooth / d scores; kth_of: the column of the k-th largest, or the
    true class if there is none.
    """
    n, num_leaves, K = scores.shape[1], index.shape[1] - 1, ks[-1]
    inverse, leaves = _f32(1 / temperature), np.empty(num_leaves, np.int64)
    x, factors = np.empty(n, _f32), np.empty((K + 1, -(-n // LANES) * LANES), _f32)
    p, q, g = np.empty(num_leaves), np.empty(num_leaves), np.empty(K + 1)
    counts = np.zeros((num_leaves + 1, K + 1))  # row i: the distribution of successes, i leaves added
    largest_of_rows(scores, first, last, index)
    for row in range(first, last):
        o, true = scores[row], labels[row]
        held = 0
        for column in index[row]:
            if column != true and held < num_leaves:
                leaves[held] = column
                held += 1
        for r in range(top.shape[1]):
            top[row, r] = o[leaves[r]] if r < held else _f32(-np.inf)
        place = K - 1
        while place > 0 and top[row, place] == _f32(-np.inf):
            place -= 1
        least = top[row, place]

        # e_0, ..., e_K of the rest
        scale, counts[0, 0] = 1.0, 1
        if num_leaves < n - 1:
            for j in range(n):
                v = (o[j] - least) * inverse
                x[j] = _f32(0) if v < _f32(-87) else exp(v)
            for leaf in leaves:
                x[leaf] = _f32(0)
            x[true] = _f32(0)
            scale = 1 / max(1.0, sum_of(x) / K)
            factors[1, n:] = _f32(0)
            for j in range(n):
                x[j] *= _f32(scale)
                factors[1, j] = x[j]
            _product(factors)

        for which in range(len(ks)):
            k, slope = ks[which], slopes[row, which]
            kth = top[row, k - 1]
            hard[row, which] = smooth[row, which] = kth - o[true]
            kth_of[row, which] = true
            slope[:] = _f32(0)
            if kth == _f32(-np.inf):
                continue
            kth_of[row, which] = leaves[k - 1]

            # with one leaf after the other; exponentials are relative to the k-th now
            shrunk = math.exp((np.float64(least) - np.float64(kth)) / temperature)  # at most 1
            for j in range(1, k + 1):
                counts[0, j] = factors[j, 0] * shrunk**j if num_leaves < n - 1 else 0.0
            for i in range(held):
                z = (np.float64(o[leaves[i]]) - np.float64(kth)) / temperature
                odds = scale * math.exp(min(z, FAR))
                q[i] = 1 / (1 + odds)
                p[i] = odds * q[i]
                counts[i + 1, 0] = counts[i, 0] * q[i]
                for j in range(1, k + 1):
                    counts[i + 1, j] = counts[i, j] * q[i] + counts[i, j - 1] * p[i]
            e = counts[held]
            difference = np.float64(kth) - np.float64(o[true])
            smooth[row, which] = difference + temperature * math.log(e[k] / e[k - 1] / scale)

            g[:] = 0
            g[k], g[k - 1] = 1 / e[k], -1 / e[k - 1]
            if num_leaves < n - 1:
                shrink = _f32(shrunk)
                for m in range(k, 0, -1):  # Horner's rule
                    c = _f32(e[k - m] * g[k] + (e[k - m - 1] * g[k - 1] if m < k else 0.0))
                    for j in range(n):
                        slope[j] = c - shrink * x[j] * slope[j]
                for j in range(n):
                    slope[j] *= shrink * x[j]
            for i in range(held - 1, -1, -1):
                of_success = 0.0
                for j in range(1, k + 1):
                    of_success += g[j] * counts[i, j - 1]
                    g[j - 1] = g[j - 1] * q[i] + g[j] * p[i]
                g[k] *= q[i]
                slope[leaves[i]] = p[i] * of_success
            slope[true] = _f32(-1)


class _KthLargest(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, labels: Tensor, ks: Sequence[int], temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        (batch, n), J, K = scores.shape, len(ks), ks[-1]
        threads = max(1, min(torch.get_num_threads(), batch, 1 + scores.numel() // WORK_OF_A_THREAD))
        leaves = min(2 * K if K <= MAX_K_WITH_REST else n, n - 1)
        index, kth_of = labels.new_empty(batch, leaves + 1), labels.new_empty(batch, J)
        smooth, hard, top = (scores.new_empty(batch, width) for width in (J, J, min(K + 1, n)))
        slopes = scores.new_empty(batch, J, n)
        arrays = [each.detach().contiguous().numpy() for each in (scores, labels)]
        outputs = [each.numpy() for each in (index, smooth, hard, top, slopes, kth_of)]
        wanted = np.array(ks)
        in_threads(threads, batch, lambda first, last: _rows(*arrays, wanted, temperature, first, last, *outputs))
        ctx.save_for_backward(scores, labels, slopes, kth_of)
        ctx.ks, ctx.temperature = ks, temperature
        ctx.mark_non_differentiable(top)
        ctx.set_materialize_grads(False)
        return smooth, hard, top

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_hard: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        scores, labels, slopes, kth_of = ctx.saved_tensors
        grad = torch.zeros(kth_of.shape) if grad is None else grad
        if torch.is_grad_enabled():  # create_graph: PyTorch's operations know their second derivatives
            from topk_losses.smooth_svm import kth_largest_by_operations

            copy = scores.view_as(scores)
            results = kth_largest_by_operations(copy, labels, ctx.ks, ctx.temperature)[:2]
            grads = grad, torch.zeros_like(grad) if grad_hard is None else grad_hard
            return *torch.autograd.grad(results, copy, grads, create_graph=True), None, None, None
        # Samples without a gradient (unused branch) keep zeros even if they hold NaN or inf.
        grad_scores = (grad.unsqueeze(1) @ slopes).squeeze(1).masked_fill_((grad == 0).all(1, keepdim=True), 0)
        if grad_hard is not None:
            grad_scores.scatter_add_(1, kth_of, grad_hard)
            grad_scores.scatter_add_(1, labels.unsqueeze(1), -grad_hard.sum(1, keepdim=True))
        return grad_scores, None, None, None


def kth_largest(scores: Tensor, labels: Tensor, ks: Sequence[int], temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """smooth_svm.kth_largest_by_operations for scores (rows, n) float32 on the CPU; arguments and results as there."""
    return _KthLargest.apply(scores, labels, ks, float(temperature))
