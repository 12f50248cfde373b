"""The smooth k-th largest score on the CPU, compiled by Numba: a ratio of elementary symmetric polynomials.

With x_i = scale exp(o_i / temperature), whatever the scale, e_k / e_{k-1} is that of the exponentials times the scale.
The 2 k largest others, the leaves, are added to those of the rest one by one, as trials with p_i = x_i / (1 + x_i):
P(N = j), with N the number of successes, is e_j but for a common factor, however far apart the scores lie. Those of the
rest come from sums of powers by Newton's identities; what cancels there is small beside the e_j with the leaves.

By a score, e_k has the derivative x_i e_{k-1} of all the others. Those of the leaves come backward through the trials.
A score of the rest is divided out of the product: e_j without it is e_j - x_i (e_{j-1} without it), a polynomial in
x_i, the same for all of the rest, and for several k the sum of theirs: the backward pass needs its coefficients alone.
Since 2 k scores are at least as large, no term is larger than the one before, and hardly a digit is lost. O(n k).
"""

import math
from functools import partial

import numpy as np
import torch

from topk_losses import smooth_svm
from topk_losses.kernels.numba_support import IN_ANY_ORDER, exp, in_threads, jit
from topk_losses.kernels.registrar import new_gradient, register_kernel
from topk_losses.numerics import MASKED

MAX_K_WITH_REST = 64  # e^k is a float32 number
WORK_OF_A_THREAD = 50_000  # scores that pay for another thread, a tenth of a millisecond
FAR = 700.0  # temperatures above the k-th score, beyond which exp would overflow: in every subset for sure
_f32 = np.float32
_MASKED = _f32(MASKED)
_INF = _f32(np.inf)


@jit
def _find_largest(x, true, columns, values):
    """Write the columns of the m largest scores x (n,) but the true class's, falling, to columns (m,). NaN is inf.

    values (m,) is room. By insertion, faster than a partial sort, since nearly no score is among the largest.
    """
    held = 0
    last = len(columns) - 1
    for j in range(len(x)):
        if (held > last and x[j] <= values[last]) or j == true:
            continue
        score = _INF if x[j] != x[j] else x[j]
        place = min(held, last)
        while place > 0 and values[place - 1] < score:
            values[place] = values[place - 1]
            columns[place] = columns[place - 1]
            place -= 1
        values[place] = score
        columns[place] = j
        held += 1


@jit
def _exponentials(x, without, scale, origin, out):
    """Write exp(scale (x - origin)) to out (n,), but 0 for some columns; no other x is above the origin."""
    origin = max(origin, _MASKED)
    for i in range(len(x)):
        v = scale * ((_MASKED if x[i] < _MASKED else x[i]) - origin)
        out[i] = _f32(0) if v < _f32(-87) else exp(_f32(0) if v > _f32(0) else v)
    for column in without:
        out[column] = _f32(0)


@partial(jit, fastmath=IN_ANY_ORDER)
def _sum_and_multiply(values, x):
    """Return the sum of values (n,), float64 for no denormal numbers, and multiply them by x (n,) in place."""
    total = 0.0
    for i in range(len(values)):  # an iterator would not become vector code
        total += values[i]
        values[i] *= x[i]
    return total


@jit
def _forward(first, last, scores, labels, temperature, ks, smooth, hard, top, index, origin, powers, leaf_slopes):
    """Write smooth, hard (batch, J) and top (batch, K + 1) of scores (batch, n), ks (J,) up to K, for rows first..last.

    index (batch, leaves + 1): the columns of the leaves, falling, and the true class. For the backward pass: origin
    (batch, 1), with x = exp((score - origin) / temperature); powers (batch, J, K), the coefficients of x, x^2, ... for
    the rest; leaf_slopes (batch, J, leaves).
    """
    n = scores.shape[1]
    num_leaves = index.shape[1] - 1
    K = ks[-1]
    x = np.empty(n, _f32)
    power = np.empty(n)
    sums = np.zeros(K + 1)
    rest = np.zeros(K + 1)
    p = np.empty(num_leaves)
    q = np.empty(num_leaves)
    g = np.empty(K + 1)
    largest = np.empty(num_leaves, _f32)
    counts = np.zeros((num_leaves + 1, K + 1))  # row i: the distribution of successes, i leaves added
    powers[first:last] = _f32(0)
    leaf_slopes[first:last] = _f32(0)
    for row in range(first, last):
        o = scores[row]
        true = labels[row]
        leaves = index[row]
        _find_largest(o, true, leaves[:num_leaves], largest)
        leaves[num_leaves] = true
        for r in range(K + 1):
            top[row, r] = o[leaves[r]] if r < num_leaves else -_INF
        place = K - 1
        while place > 0 and top[row, place] == -_INF:
            place -= 1
        least = top[row, place]
        origin[row, 0] = least

        # e_0, ..., e_K of the rest, by Newton's identities
        scale = 1.0
        rest[0] = 1.0
        counts[0, 0] = 1.0
        if num_leaves < n - 1:
            _exponentials(o, leaves, _f32(1 / temperature), least, x)
            power[:] = x
            for m in range(1, K + 1):
                sums[m] = _sum_and_multiply(power, x)
                scale = 1 / max(1.0, sums[1] / K) if m == 1 else scale
                sums[m] *= scale**m
                total = 0.0
                for i in range(1, m + 1):
                    total += rest[m - i] * (sums[i] if i % 2 else -sums[i])
                rest[m] = max(total / m, 0.0)

        for which in range(len(ks)):
            k = ks[which]
            kth = top[row, k - 1]
            smooth[row, which] = hard[row, which] = kth if kth == -_INF else kth - o[true]
            if kth == -_INF:
                continue

            # with one leaf after the other; exponentials are relative to the k-th now
            shrunk = math.exp((np.float64(least) - np.float64(kth)) / temperature)  # at most 1
            for j in range(1, k + 1):
                counts[0, j] = rest[j] * shrunk**j
            for i in range(num_leaves):
                z = (np.float64(o[leaves[i]]) - np.float64(kth)) / temperature
                odds = scale * math.exp(min(z, FAR))
                q[i] = 1 / (1 + odds)
                p[i] = odds * q[i]
                counts[i + 1, 0] = counts[i, 0] * q[i]
                for j in range(1, k + 1):
                    counts[i + 1, j] = counts[i, j] * q[i] + counts[i, j - 1] * p[i]
            e = counts[num_leaves]
            difference = np.float64(kth) - np.float64(o[true])
            smooth[row, which] = difference + temperature * math.log(e[k] / e[k - 1] / scale)

            g[:] = 0
            g[k] = 1 / e[k]
            g[k - 1] = -1 / e[k - 1]
            for m in range(1, k + 1):
                c = e[k - m] * g[k] + (e[k - m - 1] * g[k - 1] if m < k else 0.0)
                powers[row, which, m - 1] = -c * (-shrunk * scale) ** m
            for i in range(num_leaves - 1, -1, -1):
                success = 0.0  # the slope by p[i]
                for j in range(1, k + 1):
                    success += g[j] * counts[i, j - 1]
                    g[j - 1] = g[j - 1] * q[i] + g[j] * p[i]
                g[k] *= q[i]
                leaf_slopes[row, which, i] = p[i] * success


@jit
def _backward(
    first, last, scores, labels, temperature, ks, top, index, origin, powers, leaf_slopes, grad, grad_hard, grad_scores
):
    """Write the gradient of scores (batch, n) from those of smooth and hard (batch, J), for rows first..last."""
    n = scores.shape[1]
    num_leaves = index.shape[1] - 1
    K = powers.shape[2]
    x = np.empty(n, _f32)
    c = np.empty(K, _f32)
    leaves = np.empty(num_leaves, _f32)
    for row in range(first, last):
        slope = grad_scores[row]
        true = _f32(0)
        slope[:] = _f32(0)
        c[:] = _f32(0)
        leaves[:] = _f32(0)
        for which in range(len(ks)):
            share = grad[row, which]
            hard_share = grad_hard[row, which]
            place = ks[which] - 1
            if top[row, place] != -_INF:  # fewer than k others: no gradient
                true -= share + hard_share
                leaves[place] += hard_share
                if share != 0:  # an unused branch may hold NaN or inf
                    c += share * powers[row, which]
                    leaves += share * leaf_slopes[row, which]
        if np.any(c) and num_leaves < n - 1:
            _exponentials(scores[row], index[row], _f32(1 / temperature), origin[row, 0], x)
            for m in range(K - 1, -1, -1):  # c_0 x + c_1 x^2 + ..., by Horner's rule
                for j in range(n):
                    slope[j] = (c[m] + slope[j]) * x[j]
        slope[index[row, :num_leaves]] = leaves
        slope[labels[row]] = true


def _allocate(scores, labels, ks, temperature):
    """Allocate smooth, hard, top; then, for the backward pass, index, origin, powers and leaf_slopes."""
    batch, n = scores.shape
    J = len(ks)
    K = ks[-1]
    leaves = min(2 * K if K <= MAX_K_WITH_REST else n, n - 1)
    shapes = ((J,), (J,), (K + 1,), (leaves + 1,), (1,), (J, K), (J, leaves))
    outputs = [scores.new_empty(batch, *shape) for shape in shapes]
    outputs[3] = labels.new_empty(outputs[3].shape)
    return outputs


def _kth_largest(scores, labels, ks, temperature):
    outputs = _allocate(scores, labels, ks, temperature)
    inputs = (scores, labels, temperature.item(), np.array(ks))
    in_threads(_forward, len(scores), scores.numel() // WORK_OF_A_THREAD, *inputs, *outputs)
    return outputs


def _gradient(grads, outputs, scores, labels, ks, temperature):
    grad_scores = new_gradient(scores)
    unused = torch.zeros_like(outputs[0])
    grads = [unused if grad is None else grad for grad in grads[:2]]
    inputs = (scores, labels, temperature.item(), np.array(ks), *outputs[2:], *grads)
    in_threads(_backward, len(scores), scores.numel() // WORK_OF_A_THREAD, *inputs, grad_scores)
    return grad_scores


register_kernel("kth_largest_cpu", smooth_svm.kth_largest, _kth_largest, _allocate, _gradient)
