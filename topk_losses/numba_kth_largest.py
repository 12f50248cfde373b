"""The smooth k-th largest score on the CPU, compiled by Numba: smooth_kth_largest.KthLargestOther, row by row.

Through PyTorch the polynomials of a few scores per sample are some 200 small operations. Here a row stays in the cache
from its first score to its value. Kept for the backward pass: the derivatives by the largest scores, and a polynomial
that gives those of the rest; nothing of the size of the scores. Scores float32; whatever is one number per sample is
computed in float64. The formulas are those of smooth_kth_largest.py, but that the largest scores enter the distribution
of their count one after the other instead of by a tree.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from topk_losses.numba_kernels import CHUNK, exp, in_threads, jit, sum_of
from topk_losses.numba_top_m import largest_of_rows
from topk_losses.operator import refuse_double_backward

WORK_OF_A_THREAD = 50_000  # scores that pay for another thread, a tenth of a millisecond
FAR = 700.0  # temperatures above the k-th score, beyond which exp would overflow: in every subset for sure
_f32 = np.float32
_HALF_ROUNDING = float(np.finfo(np.float32).eps) / 2


@jit
def _tilt(odds, k, beyond):
    """smooth_kth_largest._tilt for one sample: odds (leaves,) are exp(z), falling, the k-th one 1; beyond: their
    sum after it, and that of the rest.

    From 0, less at most 2, to log n, plus at most 2.
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

    As smooth_kth_largest._polynomials, which says when to stop. first_sums: those of rest, as from _power_sums. power
    (n,), parts (CHUNK,) and sums (k + 1,): room to work.
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
            sums[degree] = sum_of(power, parts) * factor
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
    """Fill rest (n,) with exp((x - kth) / temperature), but 0 for the leaves and, unless it is -1, the true class."""
    for j in range(len(x)):
        v = (x[j] - kth) * inverse
        rest[j] = _f32(0) if v < _f32(-87) else exp(v)
    for column in leaves:
        rest[column] = _f32(0)
    if true >= 0:
        rest[true] = _f32(0)


@jit
def _forward(
    scores, columns, k, temperature, first, last, index, smooth, hard, top, leaves_of, held_of, polynomials, slopes
):
    """Rows first..last of scores (batch, n) to smooth, hard (batch,) and top (batch, some), and what _backward needs.

    columns (batch,) or (0,): the true classes. index (batch, leaves, and one more if there are true classes): room to
    work. leaves_of (batch, leaves): their columns, of which held_of (batch,) count, 0 if there are less than k.
    slopes (batch, leaves): d smooth / d score. polynomials (batch, k): with x of the rest as in _fill_rest, theirs is
    x times the first, x^2 times the second, ...
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
        true = columns[row] if len(columns) > 0 else -1
        true_score = x[true] if true >= 0 else _f32(0)
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
        true = columns[row] if len(columns) > 0 else -1
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
        if true >= 0:
            out[true] = -(g + of_hard)


class _FusedKthLargestOther(torch.autograd.Function):
    """As smooth_kth_largest.KthLargestOther; leaves: the number of largest scores that enter one by one."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, columns: Tensor | None, k: int, temperature: float, leaves: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        batch, n = scores.shape
        ctx.threads = max(1, min(torch.get_num_threads(), batch, 1 + scores.numel() // WORK_OF_A_THREAD))
        flat = scores.new_empty(0, dtype=torch.int64) if columns is None else columns.flatten().contiguous()
        index = scores.new_empty(batch, min(leaves + (columns is not None), n), dtype=torch.int64)
        leaves_of = index.new_empty(batch, index.shape[1] - (columns is not None))
        smooth, hard, held_of = scores.new_empty(batch), scores.new_empty(batch), index.new_empty(batch)
        top = scores.new_empty(batch, min(k + 1, n))
        polynomials, slopes = scores.new_empty(batch, k), scores.new_empty(leaves_of.shape)
        scores = scores.contiguous()
        inputs = (scores.detach().numpy(), flat.numpy(), k, temperature)
        outputs = [each.numpy() for each in (index, smooth, hard, top, leaves_of, held_of, polynomials, slopes)]
        in_threads(ctx.threads, batch, lambda first, last: _forward(*inputs, first, last, *outputs))
        ctx.save_for_backward(smooth, scores, flat, leaves_of, held_of, polynomials, slopes)
        ctx.k, ctx.temperature = k, temperature
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(top)
        return smooth, hard, top

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_hard: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        smooth, scores, flat, *saved = ctx.saved_tensors
        sources = [each for each in (grad, grad_hard) if each is not None]
        with torch.no_grad():
            grads = [torch.zeros_like(smooth) if each is None else each.contiguous() for each in (grad, grad_hard)]
            grad_scores = torch.empty_like(scores)
            saved = [each.numpy() for each in saved]
            inputs = [each.detach().numpy() for each in (*grads, scores, flat)]
            inputs += [ctx.k, ctx.temperature, *saved]
            output = grad_scores.numpy()
            in_threads(ctx.threads, len(scores), lambda first, last: _backward(*inputs, first, last, output))
        return refuse_double_backward(grad_scores, *sources, smooth), None, None, None, None


def kth_largest_other(
    scores: Tensor, columns: Tensor | None, k: int, temperature: float, leaves: int
) -> tuple[Tensor, Tensor, Tensor]:
    """smooth_kth_largest.KthLargestOther of scores (batch, n) float32 on the CPU; arguments and results as there.

    leaves: the number of largest scores that enter one by one, at least k + 1, or n.
    """
    return _FusedKthLargestOther.apply(scores, columns, k, float(temperature), leaves)
