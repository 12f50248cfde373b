"""Relaxed comparator networks for the true class on the CPU, compiled by Numba.

In eager PyTorch a network of 17 layers is some 400 operations on small tensors, most of whose time is the call. Here
TILE samples at a time go through all comparators while their wires stay in the cache: a comparator costs 0.7 to 2
nanoseconds per sample forward, and 0.6 backward, since the slopes are saved.
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from topk_losses import networks
from topk_losses.kernels.numba_support import exp, in_threads, jit
from topk_losses.kernels.registrar import new_gradient, register_kernel
from topk_losses.numerics import MASKED
from topk_losses.sigmoids import ART_TIE, distance_of_rounding

TILE = 64  # samples: enough for vector code, few enough for the cache
WORK_OF_A_THREAD = 300_000  # saved numbers, 3 per comparator and sample, that pay for another thread: 0.12 ms
_f32 = np.float32
_TINY = _f32(np.finfo(np.float32).tiny)
_MASKED = _f32(MASKED)
_ROUNDING = _f32(distance_of_rounding(torch.float32))
FAMILIES = ("logistic", "gaussian", "reciprocal", "cauchy", "optimal")


# So that a caller keeps the one branch that is taken, and its loops become vector code.
_inlined = partial(jit, forceinline=True)


class Network(NamedTuple):
    """The wires that each comparator takes its higher and its lower score from, (comparators,) each."""

    hi: np.ndarray
    lo: np.ndarray


class Sigmoid(NamedTuple):
    """The inverse temperature, ART's exponent, and the factor of ART where two scores are equal, float32."""

    beta: np.float32
    exponent: np.float32
    tie_scale: np.float32


@_inlined
def _gaussian(u):
    """The share and its slope, by erfc to 1.2e-7 of itself, in the tail too (Press et al., Numerical Recipes)."""
    v = _f32(0.70710678) * u
    t = _f32(1) / (_f32(1) + _f32(0.5) * v)
    p = ((_f32(0.17087277) * t - _f32(0.82215223)) * t + _f32(1.48851587)) * t - _f32(1.13520398)
    p = (((p * t + _f32(0.27886807)) * t - _f32(0.18628806)) * t + _f32(0.09678418)) * t + _f32(0.37409196)
    share = _f32(0.5) * (t * exp((p * t + _f32(1.00002368)) * t - _f32(1.26551223) - v * v))
    slope = _f32(-0.39894228) * exp(_f32(-0.5) * u * u)
    return share, slope


@_inlined
def _cauchy(u):
    """The share and its slope: the angle, halved twice, is a polynomial of its tangent (Cephes, atanf)."""
    size = u if u > _f32(1e4) else np.sqrt(_f32(1) + u * u)  # the square of a distance to MASKED may overflow
    half = _f32(1) / (u + size)
    x = half / (_f32(1) + np.sqrt(_f32(1) + half * half))
    z = x * x
    p = ((_f32(0.08053744) * z - _f32(0.13877686)) * z + _f32(0.19977711)) * z - _f32(0.33332949)
    share = _f32(1.27323954) * (p * z * x + x)
    slope = _f32(-0.31830989) / (_f32(1) + u * u)
    return share, slope


@_inlined
def _mix(u, family):
    """Compute the share sigmoid(-u) of sigmoids.py, u >= 0, and its slope; family: a place in FAMILIES.

    Every constant is float32: with any other Numba would compute in float64.
    """
    if family == 0:
        e = exp(-u)
        share = e / (_f32(1) + e)
        slope = share * share - share
    elif family == 1:
        share, slope = _gaussian(u)
    elif family == 2:
        share = _f32(1) / (_f32(2) + u)
        slope = -share * share
    elif family == 3:
        share, slope = _cauchy(u)
    else:
        v = _f32(0.25) if u < _f32(0.25) else u
        share = _f32(0.5) - u if u <= _f32(0.25) else _f32(0.0625) / v
        slope = _f32(-0.0625) / (v * v)
    return share, slope


@_inlined
def _art(e, sigmoid, exponent):
    """The factor of a distance e in ART, and the slope of e times it; exponent: 0 for none."""
    if exponent == 0:
        return _f32(1), _f32(1)
    guarded = e + _f32(1e-10)
    # with the root 1/2 becomes vector code, other powers do not
    power = _f32(1) / np.sqrt(guarded) if exponent == 0.5 else _f32(guarded**-sigmoid.exponent)
    scale = sigmoid.tie_scale if e == _f32(0) else power
    slope = sigmoid.tie_scale if e == _f32(0) else power * (_f32(1) - sigmoid.exponent * (e / guarded))
    return scale, slope


@jit
def _load(wires, scores, labels, mass, start):
    """Put a tile of scores, relative to their maximum, and of masses on the wires (n, 2 TILE)."""
    batch, n = scores.shape
    wires[:] = _f32(0)
    for i in range(min(TILE, batch - start)):
        highest = _MASKED
        for j in range(n):
            score = scores[start + i, j]
            highest = score if score > highest or score != score else highest  # NaN stays
        for j in range(n):
            score = scores[start + i, j]
            wires[j, i] = (_MASKED if score < _MASKED else score) - highest
        for j in range(len(mass) and n):
            wires[j, TILE + i] = mass[start + i, j]
        if len(mass) == 0:
            wires[labels[start + i], TILE + i] = _f32(1)


@_inlined
def _compare(up, down, kept, sigmoid, family, exponent):
    """Save what a comparator does to a tile, as `forward` has it."""
    for i in range(TILE):
        x_hi = up[i]
        x_lo = down[i]
        D = up[TILE + i] - down[TILE + i]
        swapped = x_lo > x_hi
        e = np.abs(x_lo - x_hi)
        # no score is above the maximum, 0, so that the lower one is of the larger size
        size = -(x_hi if swapped else x_lo)
        e = _f32(0) if e <= _ROUNDING * size else e
        scale, scale_slope = _art(e, sigmoid, exponent)  # u is beta e scale
        share, slope = _mix(sigmoid.beta * (e * scale), family)
        slope *= sigmoid.beta * scale_slope
        signed = _TINY if share < _TINY else share  # 0 has no sign
        kept[i] = -signed if swapped else signed
        kept[TILE + i] = share + slope * e
        kept[2 * TILE + i] = slope * (-D if swapped else D)


@_inlined
def _exchange(up, down, kept):
    """Move a tile through a comparator: a loop of its own, since both in one would not become vector code."""
    for i in range(TILE):
        x_hi = up[i]
        x_lo = down[i]
        q_hi = up[TILE + i]
        q_lo = down[TILE + i]
        swapped = kept[i] < _f32(0)
        share = np.abs(kept[i])
        above, below, q_above, q_below = (x_lo, x_hi, q_lo, q_hi) if swapped else (x_hi, x_lo, q_hi, q_lo)
        moved = share * (above - below)
        q_moved = share * (q_above - q_below)
        up[i] = above - moved
        down[i] = below + moved
        up[TILE + i] = q_above - q_moved
        down[TILE + i] = q_below + q_moved


@functools.cache
def _compile_forward(distribution: str, exponent: float) -> Callable[..., None]:
    """Compile the forward loop for a distribution; exponent: ART's lambda, 0 for none."""
    family = FAMILIES.index(distribution.removesuffix("_phi"))

    def forward(first, last, scores, labels, mass, network, sigmoid, outputs):
        """Carry tiles first..last of scores (batch, n) to the column (batch, k), and save what the backward pass needs.

        outputs: the column, and saved (tiles, comparators, 3 TILE), per comparator and sample: the share, negative
        where the wires are swapped, and the factors by which differences in the gradients of scores and of masses move
        that of a score. Scores are relative to their maximum: a common offset would cost digits. The mass is the
        one-hot of labels (batch,) or, unless that is empty, mass (batch, n).
        """
        column, saved = outputs
        batch, n = scores.shape
        wires = np.empty((n, 2 * TILE), np.float32)  # scores, then masses
        for t in range(first, last):
            start = t * TILE
            _load(wires, scores, labels, mass, start)
            for c in range(len(network.hi)):
                up = wires[network.hi[c]]
                down = wires[network.lo[c]]
                _compare(up, down, saved[t, c], sigmoid, family, exponent)
                _exchange(up, down, saved[t, c])
            for i in range(min(TILE, batch - start)):
                for r in range(column.shape[1]):
                    column[start + i, r] = wires[n - 1 - r, TILE + i]

    return jit(forward)


@_inlined
def _exchange_back(up, down, kept):
    """Move the gradients of a tile back through a comparator."""
    for i in range(TILE):
        swapped = kept[i] < _f32(0)
        share = np.abs(kept[i])
        x_hi = up[i]
        x_lo = down[i]
        q_hi = up[TILE + i]
        q_lo = down[TILE + i]
        q_moved = share * (q_lo - q_hi)
        moved = kept[TILE + i] * (x_lo - x_hi) + kept[2 * TILE + i] * (q_lo - q_hi)
        above = x_hi + moved
        below = x_lo - moved
        q_above = q_hi + q_moved
        q_below = q_lo - q_moved
        up[i], down[i] = (below, above) if swapped else (above, below)
        up[TILE + i], down[TILE + i] = (q_below, q_above) if swapped else (q_above, q_below)


@jit
def _backward(first, last, grad, network, saved, grad_scores):
    """Carry the gradient of the column (batch, k) back to that of the scores (batch, n), for tiles first..last."""
    batch, n = grad_scores.shape
    wires = np.empty((n, 2 * TILE), np.float32)
    for t in range(first, last):
        start = t * TILE
        wires[:] = _f32(0)
        for i in range(min(TILE, batch - start)):
            for r in range(grad.shape[1]):
                wires[n - 1 - r, TILE + i] = grad[start + i, r]
        for c in range(len(network.hi) - 1, -1, -1):
            _exchange_back(wires[network.hi[c]], wires[network.lo[c]], saved[t, c])
        for i in range(min(TILE, batch - start)):
            for j in range(n):
                grad_scores[start + i, j] = wires[j, i]


def _allocate(scores, target, beta, comparators, layer_sizes, k, *_):
    """Allocate the column (batch, k), and room for what the backward pass needs, into which whole tiles fit."""
    batch = scores.shape[0]  # a number of tiles would be 1 for small batches, for torch.compile another graph
    return [scores.new_empty(batch, k), scores.new_empty(batch + TILE - 1, comparators.shape[1], 3)]


def _tiles(room):
    """View the room of `_allocate` as (tiles, comparators, 3 TILE)."""
    return room[: len(room) // TILE * TILE].view(-1, room.shape[1], 3 * TILE)


def _carry_mass(scores, target, beta, comparators, layer_sizes, k, distribution, art_lambda):
    column, room = outputs = _allocate(scores, target, beta, comparators, layer_sizes, k)
    saved = _tiles(room)
    exponent = art_lambda or 0.0
    labels = target
    mass = scores[:0]
    if target.is_floating_point():
        labels = scores.new_empty(0, dtype=torch.int64)
        mass = target.to(scores.dtype)
    sigmoid = Sigmoid(_f32(beta.item()), _f32(exponent), _f32(ART_TIE**-exponent))
    inputs = (scores, labels, mass, Network(*comparators), sigmoid)
    work = saved.numel() // WORK_OF_A_THREAD
    in_threads(_compile_forward(distribution, exponent), len(saved), work, *inputs, (column, saved))
    return outputs


def _gradient(grads, outputs, scores, target, beta, comparators, *_):
    grad_scores = new_gradient(scores)
    saved = _tiles(outputs[1])
    work = saved.numel() // WORK_OF_A_THREAD
    in_threads(_backward, len(saved), work, grads[0], Network(*comparators), saved, grad_scores)
    return grad_scores.masked_fill_(scores == -torch.inf, 0)  # MASKED stood in for them


register_kernel("carry_mass_cpu", networks.carry_mass, _carry_mass, _allocate, _gradient)
