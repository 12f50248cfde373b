"""Relaxed comparator networks for the true class on CUDA, by Triton: all layers in one launch, and back in another.

One program carries a few samples through the whole network. Triton cannot index registers, so the wires stand in global
memory, (2, batch, n), the scores and the mass: a program reads and writes its own 8 n bytes per sample alone, which
stay in the L1 cache (8 KB for n = 1000, 84 KB for n = 10450), and the layers are parted by a barrier of the program's
threads. With wires in registers, exchanged by tl.gather, the time would grow with the wires, not with the comparators.

Layers are cut into tiles of WIDTH comparators. A tile's wires, and in the backward pass its saved differences, do not
depend on the tile before, and are loaded ahead of the barrier that waits for it.
"""

import functools
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from topk_losses import networks
from topk_losses.kernels.registrar import register_kernel
from topk_losses.numerics import centered
from topk_losses.sigmoids import ART_TIE, distance_of_rounding

WIDEST = 1024  # comparators of a tile
_ROUNDING = tl.constexpr(distance_of_rounding(torch.float32))


@triton.jit
def _mix(e, beta, exponent, tie_scale, FAMILY: tl.constexpr, ART: tl.constexpr):
    """Compute the share sigmoid(-u) of sigmoids.py, of values at a distance e >= 0, and its slope by e."""
    u = beta * e
    slope_of_u = beta
    if ART:
        power = tl.exp(-exponent * tl.log(e + 1e-10))
        u *= tl.where(e == 0.0, tie_scale, power)
        slope_of_u *= tl.where(e == 0.0, tie_scale, power * (1.0 - exponent * (e / (e + 1e-10))))
    if FAMILY == "gaussian":  # erfc to 1.2e-7 of itself, in the tail too (Press et al., Numerical Recipes)
        v = 0.7071067811865476 * u
        t = 1.0 / (1.0 + 0.5 * v)
        p = ((0.17087277 * t - 0.82215223) * t + 1.48851587) * t - 1.13520398
        p = (((p * t + 0.27886807) * t - 0.18628806) * t + 0.09678418) * t + 0.37409196
        share = 0.5 * (t * tl.exp((p * t + 1.00002368) * t - 1.26551223 - v * v))
        slope = -0.3989422804014327 * tl.exp(-0.5 * u * u)
    elif FAMILY == "reciprocal":
        share = 1.0 / (2.0 + u)
        slope = -share * share
    elif FAMILY == "cauchy":  # the angle is halved twice, then a polynomial takes it from its tangent (Cephes, atanf)
        size = tl.where(u > 1e4, u, tl.sqrt(1.0 + u * u))  # the square of a distance to MASKED may overflow
        half = 1.0 / (u + size)
        x = half / (1.0 + tl.sqrt(1.0 + half * half))
        z = x * x
        p = ((0.0805374449538 * z - 0.138776856032) * z + 0.199777106478) * z - 0.333329491539
        share = 1.2732395447351628 * (p * z * x + x)
        slope = -0.3183098861837907 / (1.0 + u * u)
    elif FAMILY == "optimal":
        v = tl.where(u < 0.25, 0.25, u)  # NaN passes
        share = tl.where(u <= 0.25, 0.5 - u, 0.0625 / v)
        slope = -0.0625 / (v * v)
    else:
        tail = tl.exp(-u)
        share = tail / (1.0 + tail)
        slope = share * share - share
    return share, slope * slope_of_u


@triton.jit
def _load_tile(hi_wires, lo_wires, bounds, tile, saved_d, saved_D, live, WIDTH: tl.constexpr, BACKWARD: tl.constexpr):
    """Load a tile's places among the comparators and wires hi and lo, -1 where it has none: (1, WIDTH) each.

    For the backward pass also its differences in the two channels, (ROWS, WIDTH) each.
    """
    place = tl.load(bounds + tile) + tl.arange(0, WIDTH)[None, :]
    inside = place < tl.load(bounds + tile + 1)
    hi = tl.load(hi_wires + place, inside, -1)
    lo = tl.load(lo_wires + place, inside, -1)
    d = 0.0
    D = 0.0
    if BACKWARD:
        on = live & (hi >= 0)
        d = tl.load(saved_d + place, on, 0.0)
        D = tl.load(saved_D + place, on, 0.0)
    return place, hi, lo, d, D


@triton.jit
def carry_kernel(
    wires, comparators, bounds, saved, batch, n, num_tiles, inverse_temperature, exponent, tie_scale,
    BACKWARD: tl.constexpr, FAMILY: tl.constexpr, ART: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Carry the wires (2, batch, n) through the network, or the gradients by them back through it, in place.

    saved (2, batch, comparators), which the forward pass fills: the differences d, and D in order.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)  # (ROWS, 1)
    live = row < batch
    x = wires + row * n
    q = wires + (batch + row) * n
    beta = tl.load(inverse_temperature)
    num_comparators = tl.load(bounds + num_tiles)
    lo_wires = comparators + num_comparators
    saved_d = saved + row * num_comparators
    saved_D = saved + (batch + row) * num_comparators
    tile = num_tiles - 1 if BACKWARD else 0
    ahead = _load_tile(comparators, lo_wires, bounds, tile, saved_d, saved_D, live, WIDTH, BACKWARD)
    for step in range(num_tiles):
        place, hi, lo, d, D = ahead
        tile = tl.maximum(num_tiles - 2 - step, 0) if BACKWARD else tl.minimum(step + 1, num_tiles - 1)
        ahead = _load_tile(comparators, lo_wires, bounds, tile, saved_d, saved_D, live, WIDTH, BACKWARD)
        on = live & (hi >= 0)
        if BACKWARD:
            e = tl.abs(d)
            swapped = d > 0
            share, slope = _mix(e, beta, exponent, tie_scale, FAMILY, ART)
        tl.debug_barrier()
        x_hi = tl.load(x + hi, on, 0.0)
        x_lo = tl.load(x + lo, on, 0.0)
        q_hi = tl.load(q + hi, on, 0.0)
        q_lo = tl.load(q + lo, on, 0.0)
        if BACKWARD:
            moved = x_lo - x_hi
            q_moved = q_lo - q_hi
            moved = share * moved + slope * (moved * e + q_moved * D)
            q_moved = share * q_moved
            tl.store(x + hi, tl.where(swapped, x_lo - moved, x_hi + moved), on)
            tl.store(x + lo, tl.where(swapped, x_hi + moved, x_lo - moved), on)
            tl.store(q + hi, tl.where(swapped, q_lo - q_moved, q_hi + q_moved), on)
            tl.store(q + lo, tl.where(swapped, q_hi + q_moved, q_lo - q_moved), on)
        else:
            d = x_lo - x_hi
            d = tl.where(tl.abs(d) <= tl.maximum(tl.abs(x_lo), tl.abs(x_hi)) * _ROUNDING, 0.0, d)
            e = tl.abs(d)
            swapped = d > 0
            share, slope = _mix(e, beta, exponent, tie_scale, FAMILY, ART)
            above = tl.where(swapped, q_lo, q_hi)
            below = tl.where(swapped, q_hi, q_lo)
            D = above - below
            tl.store(x + hi, tl.where(swapped, x_lo, x_hi) - share * e, on)
            tl.store(x + lo, tl.where(swapped, x_hi, x_lo) + share * e, on)
            tl.store(q + hi, above - share * D, on)
            tl.store(q + lo, below + share * D, on)
            tl.store(saved_d + place, d, on)
            tl.store(saved_D + place, D, on)


@functools.lru_cache(maxsize=32)
def _tiles(layer_sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, dict[str, int]]:
    """Make the bounds of tiles, (T + 1,) int32 on the device, and the shape of a program.

    The bounds are the places among the comparators where each of the T tiles begins, and where the last one ends.
    """
    width = min(WIDEST, triton.next_power_of_2(max(layer_sizes, default=1)))
    layers = zip(layer_sizes, accumulate(layer_sizes))
    starts = [place for size, end in layers for place in range(end - size, end, width)]
    bounds = [*(starts or [0]), sum(layer_sizes)]  # a network of one wire has an empty tile
    rows = max(1, 32 // width)  # a warp at least, and 4 comparators per thread in wide tiles
    shape = {"ROWS": rows, "WIDTH": width, "num_warps": min(max(rows * width // 128, 1), 8), "num_stages": 1}
    return torch.tensor(bounds, dtype=torch.int32, device=device), shape


def _launch(backward, wires, saved, scores, beta, comparators, layer_sizes, distribution, art_lambda):
    bounds, shape = _tiles(tuple(layer_sizes), scores.device)
    exponent = art_lambda or 0.0
    numbers = (*scores.shape, len(bounds) - 1, beta, exponent, ART_TIE**-exponent)
    constants = (backward, distribution, exponent > 0)
    with torch.cuda.device_of(scores):
        grid = (triton.cdiv(len(scores), shape["ROWS"]),)
        carry_kernel[grid](wires, comparators.to(torch.int32), bounds, saved, *numbers, *constants, **shape)


def _allocate(scores, target, beta, comparators, layer_sizes, k, *_):
    """Allocate the column (batch, k), and each comparator's differences in the two channels, 8 bytes per sample."""
    batch = scores.shape[0]
    return [scores.new_empty(batch, k), scores.new_empty(2, batch, comparators.shape[1])]


def _carry_mass(scores, target, beta, comparators, layer_sizes, k, *sigmoid):
    column, saved = outputs = _allocate(scores, target, beta, comparators, layer_sizes, k)
    wires = torch.stack([centered(scores), networks.mass_of(target, scores)])  # (2, batch, n)
    _launch(False, wires, saved, scores, beta, comparators, layer_sizes, *sigmoid)
    column.copy_(wires[1, :, scores.shape[1] - k :].flip(1))
    return outputs


def _gradient(grads, outputs, scores, target, beta, comparators, layer_sizes, k, *sigmoid):
    wires = scores.new_zeros(2, *scores.shape)
    wires[1, :, scores.shape[1] - k :] = grads[0].flip(1)
    _launch(True, wires, outputs[1], scores, beta, comparators, layer_sizes, *sigmoid)
    return wires[0].masked_fill(scores == -torch.inf, 0)  # MASKED stood in for them


register_kernel("carry_mass_cuda", networks.carry_mass, _carry_mass, _allocate, _gradient)
