"""Relaxed networks on the CPU, compiled by Numba: what sorting_networks._CarryMass does, without its many calls.

Through PyTorch a network of 17 layers is some 350 operations on tensors of a few thousand numbers, most of whose time
is the call. Here TILE samples at a time go through all comparators while their lanes stay in the cache; a comparator
costs 1 to 2 nanoseconds per sample and direction. float32 only.

Kept for the backward pass: per comparator and sample the difference of either channel and the swap.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from topk_losses.distributions import ART_EPSILON, ART_TIE, DISTRIBUTIONS
from topk_losses.numba_kernels import exp, in_threads, jit
from topk_losses.operator import refuse_double_backward

TILE = 64  # samples: enough for vector code, few enough for the cache
WORK_OF_A_THREAD = 100_000  # comparators times samples that pay for another thread: an eighth of a millisecond
FAMILIES = tuple(DISTRIBUTIONS)  # by number in the kernels
ART_LAMBDA = 0.5  # the published one: a square root
_LOGISTIC, _LOGISTIC_PHI, _GAUSSIAN, _RECIPROCAL, _CAUCHY = map(
    FAMILIES.index, ("logistic", "logistic_phi", "gaussian", "reciprocal", "cauchy")
)
_f32 = np.float32


@jit
def _fill_swap(family, d, beta, swap):
    """swap = sigmoid family(d) for the differences d of a comparator; formulas as in distributions.py."""
    one, half = _f32(1), _f32(0.5)
    if family == _LOGISTIC:
        for i in range(len(d)):
            swap[i] = one / (one + exp(-beta * d[i]))
    elif family == _LOGISTIC_PHI:
        for i in range(len(d)):
            swap[i] = one / (one + exp(-beta * d[i] / np.sqrt(np.abs(d[i]) + _f32(ART_EPSILON))))
    elif family == _GAUSSIAN:
        for i in range(len(d)):
            swap[i] = half * _f32(math.erfc(-beta * d[i] * _f32(math.sqrt(0.5))))
    elif family == _RECIPROCAL:
        for i in range(len(d)):
            swap[i] = half * (beta * d[i] / (_f32(2) + np.abs(beta * d[i])) + one)
    elif family == _CAUCHY:
        for i in range(len(d)):
            swap[i] = _f32(math.atan(beta * d[i])) * _f32(1 / math.pi) + half
    else:
        for i in range(len(d)):
            v = beta * d[i]
            size = np.abs(v)
            size = _f32(0.25) if size < _f32(0.25) else size
            tail = one / (_f32(16) * size)
            outside = one - tail if v > _f32(0) else tail
            swap[i] = v + half if np.abs(v) <= _f32(0.25) else outside


@jit
def _fill_slope(family, d, swap, beta, slope):
    """slope = d swap / d d, likewise."""
    half = _f32(0.5)
    if family == _LOGISTIC:
        for i in range(len(d)):
            slope[i] = beta * (swap[i] - swap[i] * swap[i])
    elif family == _LOGISTIC_PHI:
        for i in range(len(d)):
            size = np.abs(d[i]) + _f32(ART_EPSILON)
            inner = (half + half * _f32(ART_EPSILON) / size) / np.sqrt(size)
            inner = _f32(ART_TIE**-ART_LAMBDA) if d[i] == _f32(0) else inner
            slope[i] = inner * (swap[i] - swap[i] * swap[i]) * beta
    elif family == _GAUSSIAN:
        for i in range(len(d)):
            slope[i] = beta * _f32(1 / math.sqrt(2 * math.pi)) * exp(-half * (beta * d[i]) * (beta * d[i]))
    elif family == _RECIPROCAL:
        for i in range(len(d)):
            size = _f32(2) + np.abs(beta * d[i])
            slope[i] = beta / (size * size)
    elif family == _CAUCHY:
        for i in range(len(d)):
            slope[i] = beta / (_f32(math.pi) * (_f32(1) + beta * d[i] * (beta * d[i])))
    else:
        for i in range(len(d)):
            size = np.abs(beta * d[i])
            size = _f32(0.25) if size < _f32(0.25) else size
            slope[i] = beta / (_f32(16) * size * size)


@jit
def _forward(scores, labels, mass, hi, lo, output_lanes, family, beta, first, last, saved, column):
    """Tiles first..last of scores (batch, n) to column (batch, k); fills saved (tiles, comparators, 3, tile).

    Of the scores their maximum is taken off: a network sees differences only, and a common offset would cost digits.

    The class is that of labels (batch,) or, unless it is empty, the distribution mass (batch, n).
    """
    batch, n = scores.shape
    tile = saved.shape[3]
    x, q = np.empty((n, tile), np.float32), np.empty((n, tile), np.float32)
    for t in range(first, last):
        start = t * tile
        width = min(tile, batch - start)
        q[:] = _f32(0)
        for i in range(width):
            largest = scores[start + i, 0]
            for j in range(n):
                score = scores[start + i, j]
                largest = score if score > largest or score != score else largest  # NaN stays
            for j in range(n):
                x[j, i] = scores[start + i, j] - largest
            if len(mass) == 0:
                q[labels[start + i], i] = _f32(1)
            else:
                for j in range(n):
                    q[j, i] = mass[start + i, j]
        for c in range(len(hi)):
            x_hi, x_lo, q_hi, q_lo = x[hi[c], :width], x[lo[c], :width], q[hi[c], :width], q[lo[c], :width]
            d, e, swap = saved[t, c, 0, :width], saved[t, c, 1, :width], saved[t, c, 2, :width]
            for i in range(len(d)):
                d[i] = x_lo[i] - x_hi[i]
                e[i] = q_lo[i] - q_hi[i]
            _fill_swap(family, d, beta, swap)
            for i in range(len(d)):
                x_hi[i] += d[i] * swap[i]
                x_lo[i] -= d[i] * swap[i]
            for i in range(len(d)):
                q_hi[i] += e[i] * swap[i]
                q_lo[i] -= e[i] * swap[i]
        for i in range(width):
            for r in range(len(output_lanes)):
                column[start + i, r] = q[output_lanes[r], i]


@jit
def _backward(grad, hi, lo, output_lanes, family, beta, first, last, saved, grad_scores, grad_mass):
    """Tiles first..last of grad (batch, k) to grad_scores (batch, n) and, unless it is empty, grad_mass (batch, n)."""
    batch, n = grad_scores.shape
    tile = saved.shape[3]
    gx, gq = np.empty((n, tile), np.float32), np.empty((n, tile), np.float32)
    work = np.empty((3, tile), np.float32)
    for t in range(first, last):
        start = t * tile
        width = min(tile, batch - start)
        slope, moved_x, moved_q = work[0, :width], work[1, :width], work[2, :width]
        gx[:] = _f32(0)
        gq[:] = _f32(0)
        for i in range(width):
            for r in range(len(output_lanes)):
                gq[output_lanes[r], i] = grad[start + i, r]
        for c in range(len(hi) - 1, -1, -1):
            x_hi, x_lo, q_hi, q_lo = gx[hi[c], :width], gx[lo[c], :width], gq[hi[c], :width], gq[lo[c], :width]
            d, e, swap = saved[t, c, 0, :width], saved[t, c, 1, :width], saved[t, c, 2, :width]
            _fill_slope(family, d, swap, beta, slope)
            for i in range(len(d)):
                moved_x[i] = x_hi[i] - x_lo[i]
                moved_q[i] = q_hi[i] - q_lo[i]
            for i in range(len(d)):
                moved_x[i] = moved_x[i] * swap[i] + slope[i] * (moved_x[i] * d[i] + moved_q[i] * e[i])
                moved_q[i] = moved_q[i] * swap[i]
            for i in range(len(d)):
                x_hi[i] -= moved_x[i]
                x_lo[i] += moved_x[i]
            for i in range(len(d)):
                q_hi[i] -= moved_q[i]
                q_lo[i] += moved_q[i]
        for i in range(width):
            for j in range(n):
                grad_scores[start + i, j] = gx[j, i]
            if len(grad_mass) > 0:
                for j in range(n):
                    grad_mass[start + i, j] = gq[j, i]


class _FusedCarryMass(torch.autograd.Function):
    """As sorting_networks._CarryMass; mass is labels (batch,) int64 or a distribution (batch, n)."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, mass: Tensor, lanes: Tensor, output_lanes: Tensor, family: int, beta: float
    ) -> Tensor:
        (batch, n), num_comparators = scores.shape, lanes.shape[1]
        threads = max(1, min(torch.get_num_threads(), 1 + batch * num_comparators // WORK_OF_A_THREAD))
        tile = max(1, min(TILE, -(-batch // threads)))
        tiles = -(-batch // tile)
        threads = max(1, min(threads, tiles))
        saved = scores.new_empty(tiles, num_comparators, 3, tile)
        column = scores.new_empty(batch, len(output_lanes))
        if mass.is_floating_point():
            labels, mass = scores.new_empty(0, dtype=torch.int64), mass.contiguous()
        else:
            labels, mass = mass.contiguous(), scores.new_empty(0, 0)
        hi, lo = lanes.numpy()
        inputs = (scores.detach().contiguous().numpy(), labels.numpy(), mass.detach().numpy())
        settings = (hi, lo, output_lanes.numpy(), family, _f32(beta))
        outputs = (saved.numpy(), column.numpy())
        in_threads(threads, tiles, lambda first, last: _forward(*inputs, *settings, first, last, *outputs))
        ctx.save_for_backward(column, lanes, output_lanes, saved)
        ctx.family, ctx.beta, ctx.n, ctx.threads = family, beta, n, threads
        return column

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        column, lanes, output_lanes, saved = ctx.saved_tensors
        with torch.no_grad():
            grad_scores = grad.new_empty(len(grad), ctx.n)
            grad_mass = grad.new_empty(len(grad), ctx.n) if ctx.needs_input_grad[1] else grad.new_empty(0, 0)
            hi, lo = lanes.numpy()
            settings = (hi, lo, output_lanes.numpy(), ctx.family, _f32(ctx.beta))
            inputs = (grad.detach().contiguous().numpy(), *settings)
            outputs = (saved.numpy(), grad_scores.numpy(), grad_mass.numpy())
            in_threads(ctx.threads, len(saved), lambda first, last: _backward(*inputs, first, last, *outputs))
        grad_scores = refuse_double_backward(grad_scores, grad, column)
        grad_mass = refuse_double_backward(grad_mass, grad, column) if ctx.needs_input_grad[1] else None
        return grad_scores, grad_mass, None, None, None, None


def has_kernel(distribution: str, art_lambda: float) -> bool:
    """Whether there is a kernel for a sigmoid family; all but logistic_phi with an unusual art_lambda."""
    return distribution != "logistic_phi" or art_lambda == ART_LAMBDA


def carry_mass(
    scores: Tensor, labels: Tensor, lanes: Tensor, output_lanes: Tensor, distribution: str, beta: float
) -> Tensor:
    """P[1..k, y], (batch, k), of a relaxed network for scores (batch, n) float32 on the CPU.

    labels: (batch,) int64, or (batch, n), a distribution over classes. lanes: (2, comparators) int64, the lanes hi and
    the lanes lo of all layers' comparators in their order. output_lanes: (k,) int64. distribution: one of the six, with
    art_lambda ART_LAMBDA. beta: the inverse temperature.
    """
    if labels.is_floating_point():
        labels = labels.to(scores.dtype)
    return _FusedCarryMass.apply(scores, labels, lanes, output_lanes, FAMILIES.index(distribution), beta)
