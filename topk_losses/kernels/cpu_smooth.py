"""The smooth k-th largest score on the CPU, compiled by Numba: a ratio of elementary symmetric polynomials, row by row.

For any shift lambda let x_i = exp(o_i / temperature - lambda). Then e_k / e_{k-1} = exp(lambda) e_k(x) / e_{k-1}(x).
The lambda chosen here makes e_k(x) and e_{k-1}(x) about as large, so that both are comfortable numbers however far
apart the scores lie. They come from two parts, joined by one convolution:

The largest scores, the leaves, one after the other. With p_i = x_i / (1 + x_i) and N the number of successes in
independent trials of probabilities p_i, P(N = j) = e_j(x) prod_i (1 - p_i), cut off at k: sums of non-negative numbers,
where nothing is cancelled, and what underflows is a probability too small to be seen in the sum.

The rest by Newton's identities, j e_j = sum_m (-1)^(m-1) e_{j-m} S_m, from its power sums S_m = sum_i x_i^m. The x of
the rest are at most about 1/2 (for k = 5, 1), and many for their sum, so that the alternating sums lose little: about
exp(k / 8) in the worst case (for k = 5, exp(2)). Powers are left out that cannot change e_k by half its rounding.

Kept for the backward pass: the derivatives by the leaves, and a polynomial that gives those of the rest; nothing of the
size of the scores. Scores float32; whatever is one number per sample is computed in float64.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from topk_losses.kernels.cpu_top_m import largest_of_rows
from topk_losses.kernels.numba_support import exp, in_threads, jit

CHUNK = 64  # numbers that are summed side by side
MAX_K_WITH_REST = 32  # beyond, the alternating sums could lose more than an order of magnitude
WORK_OF_A_THREAD = 50_000  # scores that pay for another thread, a tenth of a millisecond
FAR = 700.0  # temperatures above the k-th score, beyond which exp would overflow: in every subset for sure
_f32 = np.float32
_HALF_ROUNDING = float(np.finfo(np.float32).eps) / 2


@jit
def _sum_of(values, parts):
    """The sum of values (n,) float32, by partial sums (CHUNK,), which makes it vector code."""
    whole = len(values) // CHUNK
    total = 0.0
    if whole > 0:
        parts[:] = values[:CHUNK]
        for c in range(1, whole):
            some = values[c * CHUNK : (c + 1) * CHUNK]
            for i in range(CHUNK):
                parts[i] += some[i]
        for part in parts:
            total += part
    for value in values[whole * CHUNK :]:
        total += value
    return total


@jit
def _tilt(odds, k, beyond):
    """A lambda for which the expected number of successes sum_i sigmoid(z_i - lambda) is close to k - 1/2.

    Any lambda is right in exact arithmetic; this one keeps e_k(x) and e_{k-1}(x) away from 0. odds (leaves,): exp(z),
    falling, the k-th one 1; beyond: their sum after it, and that of the rest. From 0, less at most 2, to log n, plus at
    most 2.

    The start solves sum_i min(1, exp(z_i - lambda)) = k, an upper bound of the expected count and at most twice it.
    The left side is min_j (j + exp(-lambda) sum_{i>j} exp(z_i)), hence lambda = min_{j<k} log(sum_{i>j} exp(z_i)) -
    log(k - j). One Newton step follows (never longer than 2), with the scores beyond the k largest in place of their
    sigmoids by exponentials.
    """
    least, total = math.inf, beyond
    for j in range(k - 1, -1, -1):
        total += odds[j]
        least = min(least, total / (k - j))
    expected = variance = beyond / least
    for j in range(k):
        p = odds[j] / (least + odds[j])
        expected += p
        variance += p * (1 - p)
    return math.log(least) + (expected - (k - 0.5)) / variance


@jit
def _power_sums(values, parts):
    """The sums of values^m, values (n,) float32, for m = 0 (not filled), 1, ..., 4; parts (CHUNK,): room to work."""
    parts[:] = _f32(0)
    width = CHUNK // 4
    one, two, three, four = parts[:width], parts[width : 2 * width], parts[2 * width : 3 * width], parts[3 * width :]
    whole = len(values) // width
    for c in range(whole):
        some = values[c * width : (c + 1) * width]
        for i in range(width):
            value = some[i]
            square = value * value
            one[i] += value
            two[i] += square
            three[i] += square * value
            four[i] += square * square
    s_1 = s_2 = s_3 = s_4 = 0.0
    for i in range(width):
        s_1, s_2, s_3, s_4 = s_1 + one[i], s_2 + two[i], s_3 + three[i], s_4 + four[i]
    for value in values[whole * width :]:
        square = value * value
        s_1, s_2, s_3, s_4 = s_1 + value, s_2 + square, s_3 + square * value, s_4 + square * square
    return 0.0, s_1, s_2, s_3, s_4


@jit
def _polynomials(rest, first_sums, largest, scale, power, parts, sums, E):
    """Fill E[j] = e_j of x = rest * scale by Newton's identities; return the number of power sums in use.

    At this tilt no e_j is much larger than e_k, so that S_m counts for at most about S_m / m, and S_m <= largest
    S_{m-1}, with largest a bound of the x: sums that cannot change e_k by more than half its rounding are left out.
    first_sums: those of rest, as from _power_sums. power (n,), parts (CHUNK,) and sums (k + 1,): room to work.
    """
    k = len(E) - 1
    factor = 1.0
    for m in range(1, min(k, len(first_sums) - 1) + 1):
        factor *= scale
        sums[m] = first_sums[m] * factor
    degree = 1
    while degree < k and sums[degree] * largest > _HALF_ROUNDING * (degree + 1):
        degree += 1
        if degree == len(first_sums):
            for j in range(len(rest)):
                power[j] = rest[j] * rest[j] * (rest[j] * rest[j])
        if degree >= len(first_sums):
            factor *= scale
            for j in range(len(rest)):
                power[j] *= rest[j]
            sums[degree] = _sum_of(power, parts) * factor
    E[0] = 1
    for j in range(1, k + 1):
        e_j, sign = 0.0, 1.0
        for m in range(1, min(j, degree) + 1):
            e_j += sign * E[j - m] * sums[m]
            sign = -sign
        E[j] = max(e_j / j, 0.0)  # what cancels below 0 is rounding
    return degree


@jit
def _fill_rest(x, kth, inverse, leaves, true, rest):
    """Fill rest (n,) with exp((x - kth) / temperature), but 0 for the leaves and the true class."""
    for j in range(len(x)):
        v = (x[j] - kth) * inverse
        rest[j] = _f32(0) if v < _f32(-87) else exp(v)
    for column in leaves:
        rest[column] = _f32(0)
    rest[true] = _f32(0)


@jit
def _forward(
    scores, columns, k, temperature, first, last, index, smooth, hard, top, leaves_of, held_of, polynomials, slopes
):
    """Rows first..last of scores (batch, n) to smooth, hard (batch,) and top (batch, some), and what _backward needs.

    columns (batch,): the true classes. index (batch, leaves and one more): room to work. leaves_of (batch, leaves):
    their columns, of which held_of (batch,) count, 0 if there are less than k. slopes (batch, leaves): d smooth by
    d score. polynomials (batch, k): with x of the rest as in _fill_rest, theirs is x times the first, x^2 times the
    second, ...
    """
    n, others = scores.shape[1], leaves_of.shape[1]
    inverse = _f32(1 / temperature)
    rest, power, parts = np.empty(n, _f32), np.empty(n, _f32), np.empty(CHUNK, _f32)
    odds, p, q = np.empty(others), np.empty(others), np.empty(others)
    counts = np.zeros((others + 1, k + 1))  # row i: the distribution of successes among the first i leaves
    sums, E, g_counts = np.empty(k + 1), np.zeros(k + 1), np.empty(k + 1)
    largest_of_rows(scores, first, last, index)
    for row in range(first, last):
        x, leaves = scores[row], leaves_of[row]
        true = columns[row]
        true_score = x[true]
        held = 0
        for column in index[row]:
            if column != true and held < others:
                leaves[held] = column
                held += 1
        for r in range(top.shape[1]):
            top[row, r] = x[leaves[r]] if r < held else _f32(-np.inf)
        kth = top[row, k - 1]
        if kth == _f32(-np.inf):
            smooth[row] = hard[row] = kth - true_score
            held_of[row] = 0
            continue
        held_of[row] = held
        beyond = 0.0
        for i in range(others):
            z = (np.float64(x[leaves[i]]) - np.float64(kth)) / temperature if i < held else -math.inf
            odds[i] = math.exp(FAR if z > FAR else z)
            if i >= k:
                beyond += odds[i]

        # What is neither leaf nor true class: x_i but for the factor scale.
        first_sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        if others < n:
            _fill_rest(x, kth, inverse, leaves[:held], true, rest)
            first_sums = _power_sums(rest, parts)

        tilt = _tilt(odds, k, beyond + first_sums[1])
        E[0], scale, degree = 1, math.exp(-tilt), 0
        counts[0, 0] = 1
        for i in range(others):
            q[i] = 1 / (1 + odds[i] * scale)
            p[i] = odds[i] * scale * q[i]
            before, after = counts[i], counts[i + 1]
            after[0] = before[0] * q[i]
            for j in range(1, k + 1):
                after[j] = before[j] * q[i] + before[j - 1] * p[i]
        P = counts[others]
        if first_sums[1] > 0:
            degree = _polynomials(rest, first_sums, odds[others - 1] * scale, scale, power, parts, sums, E)
        else:
            E[1:] = 0
        e_k, e_below = P[k] * E[0], 0.0  # of all scores, but for a common factor
        for j in range(1, k + 1):
            e_k += P[k - j] * E[j]
            e_below += P[k - j] * E[j - 1]
        difference = np.float64(kth) - np.float64(true_score)
        hard[row] = difference
        smooth[row] = difference + temperature * (tilt + math.log(e_k / e_below))

        # log e_k - log e_{k-1} by each score: of the rest a polynomial, of the leaves backward through the counts.
        of_k, of_below = 1 / e_k, -1 / e_below
        signed_power = -1.0
        for m in range(1, k + 1):
            signed_power *= -scale
            c = 0.0
            for j in range(m, k + 1 if m <= degree else 0):
                c += (of_k * P[k - j] + (of_below * P[k - 1 - j] if j < k else 0.0)) * E[j - m]
            polynomials[row, m - 1] = c * signed_power
        for j in range(k + 1):
            g_counts[j] = of_k * E[k - j] + (of_below * E[k - 1 - j] if j < k else 0.0)
        for i in range(others - 1, -1, -1):
            of_success = 0.0
            for j in range(1, k + 1):
                of_success += g_counts[j] * counts[i, j - 1]
                g_counts[j - 1] = g_counts[j - 1] * q[i] + g_counts[j] * p[i]
            g_counts[k] *= q[i]
            slopes[row, i] = of_success * p[i]


@jit
def _backward(
    grad, grad_hard, scores, columns, k, temperature, leaves_of, held_of, polynomials, slopes, first, last, grad_scores
):
    """Rows first..last of grad, grad_hard (batch,) to grad_scores (batch, n)."""
    n = scores.shape[1]
    inverse, rest = _f32(1 / temperature), np.empty(n, _f32)
    for row in range(first, last):
        g, of_hard, out, held = grad[row], grad_hard[row], grad_scores[row], held_of[row]
        leaves, polynomial = leaves_of[row, :held], polynomials[row]
        true = columns[row]
        out[:] = _f32(0)
        # Samples without a gradient (unused branch, ignored label) keep zeros even if they hold NaN or inf.
        if g != _f32(0) and held > 0:
            degree = k
            while degree > 0 and polynomial[degree - 1] == _f32(0):
                degree -= 1
            if degree > 0:
                _fill_rest(scores[row], scores[row, leaves[k - 1]], inverse, leaves, true, rest)
            for m in range(degree, 0, -1):  # Horner's rule
                coefficient = g * polynomial[m - 1]
                for j in range(n):
                    out[j] = rest[j] * (out[j] + coefficient)
            for i in range(held):
                out[leaves[i]] = g * slopes[row, i]
        if held > 0:
            out[leaves[k - 1]] += of_hard
        out[true] = -(g + of_hard)


def num_leaves(n: int, k: int) -> int:
    """How many of n other scores enter one by one, the largest ones: 8, for k > 5 between 3 k and 6 k, or all."""
    leaves = 8 if k <= 5 else 2 ** math.ceil(math.log2(3 * k))
    return leaves if k <= MAX_K_WITH_REST and n > 2 * leaves else n


class _KthLargest(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, labels: Tensor, k: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        batch, n = scores.shape
        ctx.threads = max(1, min(torch.get_num_threads(), batch, 1 + scores.numel() // WORK_OF_A_THREAD))
        index = labels.new_empty(batch, min(num_leaves(n, k) + 1, n))
        leaves_of = index.new_empty(batch, index.shape[1] - 1)
        smooth, hard, held_of = scores.new_empty(batch), scores.new_empty(batch), index.new_empty(batch)
        top = scores.new_empty(batch, min(k + 1, n))
        polynomials, slopes = scores.new_empty(batch, k), scores.new_empty(leaves_of.shape)
        inputs = (*(each.detach().contiguous().numpy() for each in (scores, labels)), k, temperature)
        outputs = [each.numpy() for each in (index, smooth, hard, top, leaves_of, held_of, polynomials, slopes)]
        in_threads(ctx.threads, batch, lambda first, last: _forward(*inputs, first, last, *outputs))
        ctx.save_for_backward(scores, labels, leaves_of, held_of, polynomials, slopes)
        ctx.k, ctx.temperature = k, temperature
        ctx.mark_non_differentiable(top)
        return smooth, hard, top

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_hard: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        scores, labels, *saved = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: PyTorch's operations know their second derivatives
            from topk_losses.smooth_svm import kth_largest_by_operations

            copy = scores.view_as(scores)
            results = kth_largest_by_operations(copy, labels, ctx.k, ctx.temperature)[:2]
            return *torch.autograd.grad(results, copy, (grad, grad_hard), create_graph=True), None, None, None
        grad_scores = torch.empty_like(scores, memory_format=torch.contiguous_format)
        inputs = [each.detach().contiguous().numpy() for each in (grad, grad_hard, scores, labels)]
        inputs += [ctx.k, ctx.temperature, *(each.numpy() for each in saved)]
        in_threads(ctx.threads, len(scores), lambda first, last: _backward(*inputs, first, last, grad_scores.numpy()))
        return grad_scores, None, None, None


def kth_largest(scores: Tensor, labels: Tensor, k: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """smooth_svm.kth_largest_by_operations for scores (rows, n) float32 on the CPU; arguments and results as there."""
    return _KthLargest.apply(scores, labels, k, float(temperature))
