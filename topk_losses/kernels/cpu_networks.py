"""Relaxed networks for the true class on the CPU, compiled by Numba.

Through PyTorch a network of 17 layers is some 400 operations on tensors of a few thousand numbers, most of whose time
is the call. Here TILE samples at a time go through all comparators while their lanes stay in the cache; a comparator
costs .7 to 2 nanoseconds per sample forward, .6 backward, since the slopes are kept. float32 only.
"""

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch

from topk_losses import networks
from topk_losses.kernels import register
from topk_losses.kernels.numba_support import exp, in_float32, in_threads, jit
from topk_losses.operator import MASKED, is_mass
from topk_losses.sigmoids import ART_TIE, DISTRIBUTIONS, FLOAT32, bind, distance_of_rounding

TILE = 64  # samples: enough for vector code, few enough for the cache
WORK_OF_A_THREAD = 100_000  # comparators times samples that pay for another thread: an eighth of a millisecond
_f32 = np.float32
_TINY = _f32(np.finfo(np.float32).tiny)


@jit
def _power(x, exponent):
    return _f32(x**exponent)


@jit
def _inverse_root(x, exponent):
    return _f32(1) / np.sqrt(x)


@functools.cache
def _forward_of(distribution: str, art_lambda: float) -> Callable[..., None]:
    """_forward bound to a family of sigmoids."""
    names: dict[str, Any] = {"exp": exp, "sqrt": np.sqrt, "power": _inverse_root if art_lambda == 0.5 else _power}
    names["where"] = numba.njit(lambda condition, a, b: a if condition else b)
    names["at_least"] = numba.njit(lambda u, least: least if u < least else u)
    names |= {name: in_float32(formula, names) for name, formula in FLOAT32.items()}
    formulas = DISTRIBUTIONS[distribution]._asdict()
    bound = {f"{role}_of": in_float32(formula, names) for role, formula in formulas.items()}
    return jit(bind(_forward, bound), f"{distribution}-{names['power'].__name__}")


def _forward(scores, labels, mass, hi, lo, k, beta, art_lambda, tie_scale, rounding, masked, first, last, saved, out):
    """Tiles first..last of scores (batch, n) to the column `out` (batch, k); fills saved (tiles, comparators, 3 TILE).

    Saved per comparator and sample: the share that is mixed, negative where the lanes change places, and what the
    gradients of the scores' and of the masses' difference move of that of a score. Of the scores their maximum is taken
    off: a network sees differences only, and a common offset would cost digits. The mass is the one-hot of labels
    (batch,) or, unless it is empty, mass (batch, n).
    """
    batch, n = scores.shape
    lanes, offset = np.empty((n, 2 * TILE), np.float32), np.zeros(TILE, np.float32)  # scores and masses
    for t in range(first, last):
        start = t * TILE
        lanes[:] = _f32(0)
        for i in range(min(TILE, batch - start)):
            largest = masked
            for j in range(n):
                score = scores[start + i, j]
                largest = score if score > largest or score != score else largest  # NaN stays
            offset[i] = np.abs(largest)
            for j in range(n):
                score = scores[start + i, j]
                lanes[j, i] = (masked if score == -np.inf else score) - largest
            if len(mass) == 0:
                lanes[labels[start + i], TILE + i] = _f32(1)
            else:
                for j in range(n):
                    lanes[j, TILE + i] = mass[start + i, j]
        for c in range(len(hi)):
            up, down, kept = lanes[hi[c]], lanes[lo[c]], saved[t, c]
            for i in range(TILE):
                x_hi, x_lo, D = up[i], down[i], up[TILE + i] - down[TILE + i]
                swapped, e = x_lo > x_hi, np.abs(x_lo - x_hi)
                # no score is above the maximum, 0, so that the lower one is of the larger size
                size = offset[i] - (x_hi if swapped else x_lo)
                e = _f32(0) if e <= rounding * size else e
                u = beta * (e * scale_of(e, art_lambda, tie_scale))  # noqa: F821
                mix = mix_of(u)  # noqa: F821
                slope = slope_of(u, mix) * (beta * scale_slope_of(e, art_lambda, tie_scale))  # noqa: F821
                share = _TINY if mix < _TINY else mix  # 0 has no sign
                kept[i], kept[TILE + i] = -share if swapped else share, mix + slope * e
                kept[2 * TILE + i] = slope * (-D if swapped else D)
            for i in range(TILE):  # a loop of its own: both in one would not become vector code
                x_hi, x_lo, q_hi, q_lo = up[i], down[i], up[TILE + i], down[TILE + i]
                swapped, mix = kept[i] < _f32(0), np.abs(kept[i])
                above, below, q_above, q_below = (x_lo, x_hi, q_lo, q_hi) if swapped else (x_hi, x_lo, q_hi, q_lo)
                moved, q_moved = mix * (above - below), mix * (q_above - q_below)
                up[i], down[i] = above - moved, below + moved
                up[TILE + i], down[TILE + i] = q_above - q_moved, q_below + q_moved
        for i in range(min(TILE, batch - start)):
            for r in range(k):
                out[start + i, r] = lanes[n - 1 - r, TILE + i]


@jit
def _backward(grad, hi, lo, saved, first, last, grad_scores):
    """Tiles first..last of grad (batch, k) to grad_scores (batch, n)."""
    batch, n = grad_scores.shape
    lanes = np.empty((n, 2 * TILE), np.float32)
    for t in range(first, last):
        start = t * TILE
        lanes[:] = _f32(0)
        for i in range(min(TILE, batch - start)):
            for r in range(grad.shape[1]):
                lanes[n - 1 - r, TILE + i] = grad[start + i, r]
        for c in range(len(hi) - 1, -1, -1):
            up, down, kept = lanes[hi[c]], lanes[lo[c]], saved[t, c]
            for i in range(TILE):
                swapped, mix = kept[i] < _f32(0), np.abs(kept[i])
                x_hi, x_lo, q_hi, q_lo = up[i], down[i], up[TILE + i], down[TILE + i]
                of_x, of_q = x_lo - x_hi, q_lo - q_hi
                moved_x, moved_q = kept[TILE + i] * of_x + kept[2 * TILE + i] * of_q, mix * of_q
                above, below, q_above, q_below = x_hi + moved_x, x_lo - moved_x, q_hi + moved_q, q_lo - moved_q
                up[i], down[i] = (below, above) if swapped else (above, below)
                up[TILE + i], down[TILE + i] = (q_below, q_above) if swapped else (q_above, q_below)
        for i in range(min(TILE, batch - start)):
            for j in range(n):
                grad_scores[start + i, j] = lanes[j, i]


def _outputs(scores, target, beta, comparators, layer_sizes, k, *_):
    """The column (batch, k); saved (tiles, comparators, 3 TILE)."""
    return [scores.new_empty(len(scores), k), scores.new_empty(-(-len(scores) // TILE), comparators.shape[1], 3 * TILE)]


def _carry_mass(made, scores, target, beta, comparators, layer_sizes, k, distribution, art_lambda):
    """P[1..k, y], (batch, k), of a relaxed network, as networks.carry_mass, for scores (batch, n) float32."""
    labels, mass = (scores.new_empty(0, dtype=torch.int64), target) if is_mass(target) else (target, scores[:0])
    exponent = art_lambda or 0.0
    numbers = (beta.item(), exponent, ART_TIE**-exponent, distance_of_rounding(torch.float32), MASKED)
    inputs = (scores, labels, mass.to(scores.dtype), *comparators, k, *map(_f32, numbers))
    work, tiles = len(scores) * comparators.shape[1], len(made[1])
    in_threads(_forward_of(distribution, exponent), work, WORK_OF_A_THREAD, tiles, inputs, made[::-1])


def _carry_mass_backward(grad_scores, grads, made, scores, target, beta, comparators, *_):
    inputs, work = (grads[0], *comparators, made[1]), len(scores) * comparators.shape[1]
    in_threads(_backward, work, WORK_OF_A_THREAD, len(made[1]), inputs, [grad_scores])
    grad_scores.masked_fill_(scores == -torch.inf, 0)  # MASKED stood in for them


register("carry_mass", "cpu", _outputs, _carry_mass, _carry_mass_backward, networks.carry_mass)
