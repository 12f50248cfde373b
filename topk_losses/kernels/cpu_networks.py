"""Relaxed networks for the true class on the CPU, compiled by Numba.

Through PyTorch a network of 17 layers is some 400 operations on tensors of a few thousand numbers, most of whose time
is the call. Here TILE samples at a time go through all comparators while their lanes stay in the cache; a comparator
costs 1 to 2 nanoseconds per sample and direction. float32 only.
"""

import functools
import math
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from topk_losses.kernels import gradients
from topk_losses.kernels.numba_support import exp, in_float32, in_threads, jit
from topk_losses.sigmoids import ART_TIE, DISTRIBUTIONS, distance_of_rounding
from topk_losses.sorts import MASKED

if TYPE_CHECKING:
    from topk_losses.networks import RelaxedNetwork

TILE = 64  # samples: enough for vector code, few enough for the cache
WORK_OF_A_THREAD = 100_000  # comparators times samples that pay for another thread: an eighth of a millisecond
_f32 = np.float32


@jit
def _where(condition, a, b):
    return a if condition else b


@jit
def _at_least(u, least):
    return least if u < least else u


@jit
def _erfc(u):
    return _f32(math.erfc(u))


@jit
def _arccot(u):
    return _f32(math.atan2(_f32(1), u))


@jit
def _power(x, exponent):
    return _f32(x**exponent)


@jit
def _inverse_root(x, exponent):
    return _f32(1) / np.sqrt(x)


@functools.cache
def _network_kernels(distribution: str, art_lambda: float) -> tuple[Callable[..., None], Callable[..., None]]:
    """_forward and _backward bound to one family of sigmoids."""
    names = {"exp": exp, "erfc": _erfc, "arccot": _arccot, "where": _where, "at_least": _at_least}
    names["power"] = _inverse_root if art_lambda == 0.5 else _power
    formulas = DISTRIBUTIONS[distribution]._asdict()
    bound = {f"{role}_of": in_float32(formula, names) for role, formula in formulas.items()}
    kind = f"{distribution}-{names['power'].__name__}"
    pair = [
        jit(types.FunctionType(each.__code__, {**globals(), **bound}, each.__name__), kind)
        for each in (_forward, _backward)
    ]
    return pair[0], pair[1]


def _forward(scores, labels, mass, hi, lo, k, beta, art_lambda, tie_scale, rounding, masked, first, last, saved, out):
    """Tiles first..last of scores (batch, n) to the column `out` (batch, k); fills saved (tiles, comparators, 3, tile).

    Saved per comparator and sample: the difference of the scores, that of the masses once they are in order, and the
    share that is mixed. Of the scores their maximum is taken off: a network sees differences only, and a common offset
    would cost digits. The mass is the one-hot of labels (batch,) or, unless it is empty, mass (batch, n).
    """
    batch, n = scores.shape
    tile = saved.shape[3]
    x, q, offset = np.empty((n, tile), np.float32), np.empty((n, tile), np.float32), np.empty(tile, np.float32)
    for t in range(first, last):
        start = t * tile
        width = min(tile, batch - start)
        q[:] = _f32(0)
        for i in range(width):
            largest = masked
            for j in range(n):
                score = scores[start + i, j]
                largest = score if score > largest or score != score else largest  # NaN stays
            offset[i] = np.abs(largest)
            for j in range(n):
                score = scores[start + i, j]
                x[j, i] = (masked if score == -np.inf else score) - largest
            if len(mass) == 0:
                q[labels[start + i], i] = _f32(1)
            else:
                for j in range(n):
                    q[j, i] = mass[start + i, j]
        for c in range(len(hi)):
            x_hi, x_lo, q_hi, q_lo = x[hi[c], :width], x[lo[c], :width], q[hi[c], :width], q[lo[c], :width]
            d, D, mix = saved[t, c, 0, :width], saved[t, c, 1, :width], saved[t, c, 2, :width]
            for i in range(len(d)):
                apart = x_lo[i] - x_hi[i]
                size = max(np.abs(x_lo[i]), np.abs(x_hi[i])) + offset[i]
                d[i] = _f32(0) if np.abs(apart) <= rounding * size else apart
            for i in range(len(d)):
                e = np.abs(d[i])
                mix[i] = mix_of(beta * (e * scale_of(e, art_lambda, tie_scale)))  # noqa: F821
            for i in range(len(d)):
                moved, swapped = mix[i] * np.abs(d[i]), d[i] > _f32(0)
                above, below = (x_lo[i], x_hi[i]) if swapped else (x_hi[i], x_lo[i])
                x_hi[i] = above - moved
                x_lo[i] = below + moved
            for i in range(len(d)):
                swapped = d[i] > _f32(0)
                above, below = (q_lo[i], q_hi[i]) if swapped else (q_hi[i], q_lo[i])
                D[i] = above - below
                q_hi[i] = above - mix[i] * D[i]
                q_lo[i] = below + mix[i] * D[i]
        for i in range(width):
            for r in range(k):
                out[start + i, r] = q[n - 1 - r, i]


def _backward(grad, hi, lo, beta, art_lambda, tie_scale, first, last, saved, grad_scores, grad_mass):
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
            for r in range(grad.shape[1]):
                gq[n - 1 - r, i] = grad[start + i, r]
        for c in range(len(hi) - 1, -1, -1):
            x_hi, x_lo, q_hi, q_lo = gx[hi[c], :width], gx[lo[c], :width], gq[hi[c], :width], gq[lo[c], :width]
            d, D, mix = saved[t, c, 0, :width], saved[t, c, 1, :width], saved[t, c, 2, :width]
            for i in range(len(d)):
                e = np.abs(d[i])
                u = beta * (e * scale_of(e, art_lambda, tie_scale))  # noqa: F821
                slope[i] = slope_of(u, mix[i]) * (beta * scale_slope_of(e, art_lambda, tie_scale))  # noqa: F821
            for i in range(len(d)):
                moved_x[i] = x_lo[i] - x_hi[i]
                moved_q[i] = q_lo[i] - q_hi[i]
            for i in range(len(d)):
                moved_x[i] = mix[i] * moved_x[i] + slope[i] * (moved_x[i] * np.abs(d[i]) + moved_q[i] * D[i])
                moved_q[i] = mix[i] * moved_q[i]
            for i in range(len(d)):
                above, below, swapped = x_hi[i] + moved_x[i], x_lo[i] - moved_x[i], d[i] > _f32(0)
                x_hi[i] = below if swapped else above
                x_lo[i] = above if swapped else below
            for i in range(len(d)):
                above, below, swapped = q_hi[i] + moved_q[i], q_lo[i] - moved_q[i], d[i] > _f32(0)
                q_hi[i] = below if swapped else above
                q_lo[i] = above if swapped else below
        for i in range(width):
            for j in range(n):
                grad_scores[start + i, j] = gx[j, i]
            if len(grad_mass) > 0:
                for j in range(n):
                    grad_mass[start + i, j] = gq[j, i]


class _CarryMass(torch.autograd.Function):
    """RelaxedNetwork._column_by_operations; labels: (batch,) int64 or a mass per class (batch, n) float32."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, labels: Tensor, network: "RelaxedNetwork") -> Tensor:
        batch, num_comparators = len(scores), network.comparators.shape[1]
        threads = max(1, min(torch.get_num_threads(), 1 + batch * num_comparators // WORK_OF_A_THREAD))
        tile = max(1, min(TILE, -(-batch // threads)))
        tiles = -(-batch // tile)
        threads = max(1, min(threads, tiles))
        saved = scores.new_empty(tiles, num_comparators, 3, tile)
        column = scores.new_empty(batch, network.k)
        empty = scores.new_empty(0, dtype=torch.int64), scores.new_empty(0, 0)
        inputs = (scores, empty[0], labels) if labels.is_floating_point() else (scores, labels, empty[1])
        ctx.settings = (
            *network.comparators.numpy(),  # hi, lo
            network.k,
            _f32(float(network.inverse_temperature)),
            _f32(network.art_lambda),
            _f32(ART_TIE**-network.art_lambda),
        )
        settings = (*ctx.settings, _f32(distance_of_rounding(torch.float32)), _f32(MASKED))
        arrays = [each.detach().contiguous().numpy() for each in inputs]
        outputs = (saved.numpy(), column.numpy())
        forward, ctx.kernel = _network_kernels(network.distribution, network.art_lambda)
        in_threads(threads, tiles, lambda first, last: forward(*arrays, *settings, first, last, *outputs))
        ctx.save_for_backward(scores, labels, saved)
        ctx.network, ctx.threads = network, threads
        return column

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scores, labels, saved = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: PyTorch's operations know their second derivatives
            return *gradients(ctx.network._column_by_operations, (scores, labels), grad), None
        grad_scores = torch.empty_like(scores, memory_format=torch.contiguous_format)
        grad_mass = torch.empty_like(grad_scores) if ctx.needs_input_grad[1] else grad.new_empty(0, 0)
        hi, lo, _, *settings = ctx.settings
        outputs = (saved.numpy(), grad_scores.numpy(), grad_mass.numpy())
        inputs = (grad.contiguous().numpy(), hi, lo, *settings)
        in_threads(ctx.threads, len(saved), lambda first, last: ctx.kernel(*inputs, first, last, *outputs))
        grad_scores.masked_fill_(scores == -torch.inf, 0)  # MASKED stood in for them
        return grad_scores, grad_mass if ctx.needs_input_grad[1] else None, None


def carry_mass(network: "RelaxedNetwork", scores: Tensor, labels: Tensor) -> Tensor:
    """P[1..k, y], (rows, k), of a relaxed network for scores (rows, n) float32 on the CPU.

    labels: (rows,) int64 in [0, n), or the mass on each class (rows, n).
    """
    if labels.is_floating_point():
        labels = labels.to(scores.dtype)
    return _CarryMass.apply(scores, labels, network)
