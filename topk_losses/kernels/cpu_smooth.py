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
from typing import NamedTuple

import numpy as np
import torch

from topk_losses import smooth_svm
from topk_losses.kernels.numba_support import IN_ANY_ORDER, exp, in_threads, jit
from topk_losses.kernels.registrar import new_gradient, register_kernel
from topk_losses.numerics import MASKED

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


class Saved(NamedTuple):
    """What the forward pass writes beside its values, a row per sample.

    Attributes:
        top: the K largest others, falling, then the next one or -inf, (batch, K + 1).
        columns: those of the leaves, falling, and the true class, (batch, leaves + 1).
        origin: with which x = exp((score - origin) / temperature), (batch, 1).
        powers: the coefficients of x, x^2, ... for the rest, (batch, J, K).
        leaf_slopes: (batch, J, leaves).
    """

    top: np.ndarray
    columns: np.ndarray
    origin: np.ndarray
    powers: np.ndarray
    leaf_slopes: np.ndarray


@jit
def _find_leaves(o, true, leaves, top, largest):
    """Write the columns of the leaves, then the true class, and the largest others; return the least of the K."""
    num_leaves = len(leaves) - 1
    _find_largest(o, true, leaves[:num_leaves], largest)
    leaves[num_leaves] = true
    for r in range(len(top)):
        top[r] = o[leaves[r]] if r < num_leaves else -_INF
    place = len(top) - 2
    while place > 0 and top[place] == -_INF:
        place -= 1
    return top[place]


class Room(NamedTuple):
    """Arrays of a thread: exponentials (n,), sums of powers, e_j of the rest and slopes (K + 1,), trials (leaves,).

    counts (leaves + 1, K + 1): row i is the distribution of successes, i leaves added.
    """

    x: np.ndarray
    power: np.ndarray
    sums: np.ndarray
    rest: np.ndarray
    p: np.ndarray
    q: np.ndarray
    slopes: np.ndarray
    counts: np.ndarray


@jit
def _room(n, num_leaves, K):
    trials = np.empty((2, num_leaves))
    sums = np.zeros(K + 1)
    counts = np.zeros((num_leaves + 1, K + 1))
    return Room(np.empty(n, _f32), np.empty(n), sums, np.zeros(K + 1), trials[0], trials[1], np.empty(K + 1), counts)


@jit
def _expand_rest(o, leaves, least, temperature, room):
    """Write e_0, ..., e_K of the rest to room.rest, by Newton's identities; return by what x is scaled."""
    x, power, sums, rest, _, _, _, _ = room
    K = len(rest) - 1
    scale = 1.0
    rest[0] = 1.0
    if len(leaves) == len(o):
        return scale
    _exponentials(o, leaves, _f32(1 / temperature), least, x)
    for i in range(len(x)):
        power[i] = x[i]
    for m in range(1, K + 1):
        sums[m] = _sum_and_multiply(power, x)
        scale = 1 / max(1.0, sums[1] / K) if m == 1 else scale
        sums[m] *= scale**m
        total = 0.0
        for i in range(1, m + 1):
            total += rest[m - i] * (sums[i] if i % 2 else -sums[i])
        rest[m] = max(total / m, 0.0)
    return scale


@jit
def _add_leaves(o, leaves, kth, temperature, scale, shrunk, room, counts):
    """Write the distributions of successes, counts (leaves + 1, k + 1), with one leaf after the other.

    Exponentials are relative to the k-th score, kth; shrunk: the factor that makes those of the rest so.
    """
    for j in range(counts.shape[1]):
        counts[0, j] = room.rest[j] * shrunk**j
    for i in range(len(leaves) - 1):
        z = (np.float64(o[leaves[i]]) - np.float64(kth)) / temperature
        odds = scale * math.exp(min(z, FAR))
        q = 1 / (1 + odds)
        p = odds * q
        room.p[i] = p
        room.q[i] = q
        counts[i + 1, 0] = counts[i, 0] * q
        for j in range(1, counts.shape[1]):
            counts[i + 1, j] = counts[i, j] * q + counts[i, j - 1] * p


@jit
def _differentiate(room, counts, shrunk, powers, leaf_slopes):
    """Write the slopes of log(e_k / e_{k-1}): powers (K,), those of the rest, and leaf_slopes (leaves,).

    shrunk: the factor that makes x relative to the k-th score, scaled.
    """
    k = counts.shape[1] - 1
    p = room.p
    q = room.q
    g = room.slopes
    e = counts[len(p)]
    g[: k - 1].fill(0.0)
    g[k] = 1 / e[k]
    g[k - 1] = -1 / e[k - 1]
    for m in range(1, k + 1):
        c = e[k - m] * g[k] + (e[k - m - 1] * g[k - 1] if m < k else 0.0)
        powers[m - 1] = -c * (-shrunk) ** m
    for i in range(len(p) - 1, -1, -1):
        success = 0.0  # the slope by p[i]
        for j in range(1, k + 1):
            success += g[j] * counts[i, j - 1]
            g[j - 1] = g[j - 1] * q[i] + g[j] * p[i]
        g[k] *= q[i]
        leaf_slopes[i] = p[i] * success


@jit
def _forward(first, last, scores, labels, temperature, ks, values, saved):
    """Write values, smooth and hard (batch, J), of scores (batch, n), ks (J,), and `saved`, for rows first..last."""
    smooth, hard = values
    room = _room(scores.shape[1], saved.columns.shape[1] - 1, ks[-1])
    largest = np.empty(saved.columns.shape[1] - 1, _f32)
    saved.powers[first:last].fill(_f32(0))
    saved.leaf_slopes[first:last].fill(_f32(0))
    for row in range(first, last):
        o = scores[row]
        leaves = saved.columns[row]
        least = _find_leaves(o, labels[row], leaves, saved.top[row], largest)
        saved.origin[row, 0] = least
        scale = _expand_rest(o, leaves, least, temperature, room)
        for which in range(len(ks)):
            k = ks[which]
            kth = saved.top[row, k - 1]
            own = o[labels[row]]
            smooth[row, which] = hard[row, which] = kth if kth == -_INF else kth - own
            if kth == -_INF:
                continue
            shrunk = math.exp((np.float64(least) - np.float64(kth)) / temperature)  # at most 1
            counts = room.counts[:, : k + 1]
            _add_leaves(o, leaves, kth, temperature, scale, shrunk, room, counts)
            ratio = counts[-1, k] / counts[-1, k - 1] / scale
            smooth[row, which] = (np.float64(kth) - np.float64(own)) + temperature * math.log(ratio)
            _differentiate(room, counts, shrunk * scale, saved.powers[row, which], saved.leaf_slopes[row, which])


@jit
def _add_gradients(row, top, ks, grads, saved, c, leaves):
    """Add the gradients of smooth and hard to coefficients c (K,) and leaves (leaves,); return the true class's."""
    grad, grad_hard = grads
    true = _f32(0)
    for which in range(len(ks)):
        share = grad[row, which]
        hard_share = grad_hard[row, which]
        place = ks[which] - 1
        if top[place] != -_INF:  # fewer than k others: no gradient
            true -= share + hard_share
            leaves[place] += hard_share
            if share != 0:  # an unused branch may hold NaN or inf
                for r in range(len(c)):
                    c[r] += share * saved.powers[row, which, r]
                for i in range(len(leaves)):
                    leaves[i] += share * saved.leaf_slopes[row, which, i]
    return true


@jit
def _backward(first, last, scores, labels, temperature, ks, saved, grads_and_output):
    """Write the gradient of scores (batch, n) from those of smooth and hard (batch, J), for rows first..last.

    grads_and_output: the two, and where it goes.
    """
    grad, grad_hard, grad_scores = grads_and_output
    num_leaves = saved.columns.shape[1] - 1
    K = saved.powers.shape[2]
    x = np.empty(scores.shape[1], _f32)
    c = np.empty(K, _f32)
    leaves = np.empty(num_leaves, _f32)
    for row in range(first, last):
        slope = grad_scores[row]
        slope.fill(_f32(0))
        c.fill(_f32(0))
        leaves.fill(_f32(0))
        true = _add_gradients(row, saved.top[row], ks, (grad, grad_hard), saved, c, leaves)
        if np.any(c) and num_leaves < len(x) - 1:
            _exponentials(scores[row], saved.columns[row], _f32(1 / temperature), saved.origin[row, 0], x)
            for m in range(K - 1, -1, -1):  # c_0 x + c_1 x^2 + ..., by Horner's rule
                for j in range(len(x)):
                    slope[j] = (c[m] + slope[j]) * x[j]
        for i in range(num_leaves):
            slope[saved.columns[row, i]] = leaves[i]
        slope[labels[row]] = true


def _allocate(scores, labels, ks, temperature):
    """Allocate smooth, hard, top; then, for the backward pass, those of Saved."""
    batch, n = scores.shape
    J = len(ks)
    K = ks[-1]
    leaves = min(2 * K if K <= smooth_svm.KERNEL_RANKS else n, n - 1)
    shapes = ((J,), (J,), (K + 1,), (leaves + 1,), (1,), (J, K), (J, leaves))
    outputs = [scores.new_empty(batch, *shape) for shape in shapes]
    outputs[3] = labels.new_empty(outputs[3].shape)
    return outputs


def _kth_largest(scores, labels, ks, temperature):
    outputs = _allocate(scores, labels, ks, temperature)
    inputs = (scores, labels, temperature.item(), np.array(ks), tuple(outputs[:2]), Saved(*outputs[2:]))
    in_threads(_forward, len(scores), scores.numel() // WORK_OF_A_THREAD, *inputs)
    return outputs


def _gradient(grads, outputs, scores, labels, ks, temperature):
    grad_scores = new_gradient(scores)
    unused = torch.zeros_like(outputs[0])
    grads = [unused if grad is None else grad for grad in grads[:2]]
    inputs = (scores, labels, temperature.item(), np.array(ks), Saved(*outputs[2:]), (*grads, grad_scores))
    in_threads(_backward, len(scores), scores.numel() // WORK_OF_A_THREAD, *inputs)
    return grad_scores


register_kernel("kth_largest_cpu", smooth_svm.kth_largest, _kth_largest, _allocate, _gradient)
