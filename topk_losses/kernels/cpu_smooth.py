"""The smooth k-th largest score on the CPU, compiled by Numba: a ratio of elementary symmetric polynomials, row by row.

With x_i = scale exp(o_i / temperature), whatever the scale, e_k / e_{k-1} is that of the exponentials times the scale.
The e_j come from sums and products of non-negative numbers alone, so that nothing is cancelled:

The rest, all but the true class and the 2 k largest, are polynomials 1 + x_i t, multiplied two by two and cut off at
t^k. The 2 k largest, the leaves, are added to the product one by one, as trials with p_i = x_i / (1 + x_i): P(N = j),
with N the number of successes, is e_j but for a common factor, however far apart the scores lie.

By a score, e_k has the derivative x_i e_{k-1} of all the others. Those of the leaves come backward through the trials.
A score of the rest is divided out of the product: e_j without it is e_j - x_i (e_{j-1} without it), a polynomial in
x_i, the same for all of the rest, and for several k the sum of theirs: its coefficients are all that the backward pass
has to know. Since 2 k scores are at least as large, no term is larger than the one before, and hardly a digit is lost.
O(n k).
"""

import math

import numpy as np

from topk_losses import smooth_svm
from topk_losses.kernels import register
from topk_losses.kernels.cpu_largest import largest_of_rows
from topk_losses.kernels.numba_support import exps_without, in_threads, jit, softmax_sum, subtract_softmax, sum_of

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
def _forward(
    scores, labels, temperature, softmax, ks, first, last,
    smooth, hard, top, log_softmax, index, origin, powers, of_leaves,
):  # fmt: skip
    """Rows first..last of scores (batch, n) for ks (J,) rising up to K.

    To smooth and hard (batch, J), top (batch, some) and, if softmax, log_softmax (batch, 1). For their derivatives:
    index (batch, leaves + 1): the leaves, falling, and the true class; origin (batch, 2): that of x = exp((score -
    origin) / temperature), and what softmax_sum gave; powers (batch, J, K): the coefficients of x, x^2, ... for the
    rest; of_leaves (batch, J, leaves).
    """
    n, num_leaves, K = scores.shape[1], index.shape[1] - 1, ks[-1]
    x, factors = np.empty(n, _f32), np.empty((K + 1, -(-n // LANES) * LANES), _f32)
    p, q, g = np.empty(num_leaves), np.empty(num_leaves), np.empty(K + 1)
    counts = np.zeros((num_leaves + 1, K + 1))  # row i: the distribution of successes, i leaves added
    largest_of_rows(scores, first, last, index)
    powers[first:last], of_leaves[first:last] = _f32(0), _f32(0)
    for row in range(first, last):
        o, true, leaves = scores[row], labels[row], index[row]
        held = 0
        for column in leaves:
            if column != true and held < num_leaves:
                leaves[held] = column
                held += 1
        leaves[num_leaves] = true
        for r in range(top.shape[1]):
            top[row, r] = o[leaves[r]] if r < held else _f32(-np.inf)
        place = K - 1
        while place > 0 and top[row, place] == _f32(-np.inf):
            place -= 1
        least = top[row, place]

        # e_0, ..., e_K of the rest
        scale, counts[0, 0] = 1.0, 1
        if num_leaves < n - 1:
            exps_without(leaves, o, _f32(1 / temperature), least, x)
            scale = 1 / max(1.0, sum_of(x) / K)
            factors[1, n:] = _f32(0)
            for j in range(n):
                factors[1, j] = x[j] * _f32(scale)
            _product(factors)
        origin[row, 0] = least
        if softmax:
            highest = max(top[row, 0], o[true])
            origin[row, 1] = softmax_sum(o, highest, x)
            log_softmax[row, 0] = (np.float64(o[true]) - highest) - origin[row, 1]

        for which in range(len(ks)):
            k = ks[which]
            kth = top[row, k - 1]
            hard[row, which] = smooth[row, which] = kth - o[true]
            if kth == _f32(-np.inf):
                continue

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
            for m in range(1, k + 1):
                c = e[k - m] * g[k] + (e[k - m - 1] * g[k - 1] if m < k else 0.0)
                powers[row, which, m - 1] = -c * (-shrunk * scale) ** m
            for i in range(held - 1, -1, -1):
                of_success = 0.0
                for j in range(1, k + 1):
                    of_success += g[j] * counts[i, j - 1]
                    g[j - 1] = g[j - 1] * q[i] + g[j] * p[i]
                g[k] *= q[i]
                of_leaves[row, which, i] = p[i] * of_success


@jit
def _backward(
    scores, labels, temperature, softmax, ks, top, index, origin, powers, of_leaves, grad, grad_hard, of_softmax,
    first, last, grad_scores,
):  # fmt: skip
    """Rows first..last of the gradients of smooth and hard (batch, J) and log_softmax (batch, 1) to that (batch, n)."""
    n, num_leaves, K = scores.shape[1], index.shape[1] - 1, powers.shape[2]
    x, c, of_leaf = np.empty(n, _f32), np.empty(K, _f32), np.empty(num_leaves, _f32)
    for row in range(first, last):
        slope, of_true, any_grad = grad_scores[row], _f32(0), False
        slope[:], c[:], of_leaf[:] = _f32(0), _f32(0), _f32(0)
        for which in range(len(ks)):
            share = grad[row, which]
            if share != 0 and top[row, ks[which] - 1] != _f32(-np.inf):  # an unused branch may hold NaN or inf
                c += share * powers[row, which]
                of_leaf += share * of_leaves[row, which]
                of_true -= share
                any_grad = True
        if any_grad and num_leaves < n - 1:
            exps_without(index[row], scores[row], _f32(1 / temperature), origin[row, 0], x)
            for m in range(K - 1, -1, -1):  # c_0 x + c_1 x^2 + ..., by Horner's rule
                for j in range(n):
                    slope[j] = (c[m] + slope[j]) * x[j]
        for r in range(num_leaves):
            slope[index[row, r]] = of_leaf[r]
        slope[labels[row]] = of_true
        for which in range(len(ks)):
            if top[row, ks[which] - 1] != _f32(-np.inf):
                slope[index[row, ks[which] - 1]] += grad_hard[row, which]
                slope[labels[row]] -= grad_hard[row, which]
        if softmax and of_softmax[row, 0] != 0:
            highest = max(top[row, 0], scores[row, labels[row]])
            subtract_softmax(of_softmax[row, 0], scores[row], highest, origin[row, 1], x, slope)
            slope[labels[row]] += of_softmax[row, 0]


def _outputs(scores, labels, ks, temperature, softmax):
    """smooth, hard, top and log_softmax; then, for the backward pass, index, origin, powers and of_leaves."""
    (batch, n), J, K = scores.shape, len(ks), ks[-1]
    leaves = min(2 * K if K <= MAX_K_WITH_REST else n, n - 1)
    shapes = ((J,), (J,), (min(K + 1, n),), (int(softmax),), (leaves + 1,), (2,), (J, K), (J, leaves))
    outputs = [scores.new_empty(batch, *shape) for shape in shapes]
    outputs[4] = labels.new_empty(outputs[4].shape)
    return outputs


def _kth_largest(made, scores, labels, ks, temperature, softmax):
    """As smooth_svm.kth_largest, for scores (rows, n) float32."""
    inputs = (scores, labels, temperature.item(), softmax, np.array(ks))
    in_threads(_forward, scores.numel(), WORK_OF_A_THREAD, len(scores), inputs, made)


def _kth_largest_backward(grad_scores, grads, made, scores, labels, ks, temperature, softmax):
    inputs = (scores, labels, temperature.item(), softmax, np.array(ks), *made[2:3], *made[4:], *grads[:2], grads[3])
    in_threads(_backward, scores.numel(), WORK_OF_A_THREAD, len(scores), inputs, [grad_scores])


register("kth_largest", "cpu", _outputs, _kth_largest, _kth_largest_backward, smooth_svm.kth_largest, 4)
