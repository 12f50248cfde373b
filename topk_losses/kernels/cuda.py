"""Relaxed networks for the true class on CUDA, by Triton: all layers in one launch, and back in another.

One program carries a few samples through the whole network. Triton cannot index registers, so the lanes stand in global
memory, (2, batch, n), the scores and the mass: a program reads and writes its own 8 n bytes per sample alone, which
stay in the L1 cache (8 KB for n = 1000, 84 KB for n = 10450), and the layers are parted by a barrier of the program's
threads. Against lanes in registers, exchanged by tl.gather, this costs what the comparators cost rather than the lanes,
serves any n, and computes each comparator once rather than on both lanes.

Layers are cut into tiles of WIDTH comparators. A tile's lanes, and in the backward pass its saved differences, do not
depend on the tile before, and are asked for ahead of the barrier that waits for it. float32 only.
"""

import functools
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from topk_losses import networks
from topk_losses.kernels import register
from topk_losses.operator import mass_of
from topk_losses.sigmoids import ART_TIE, DISTRIBUTIONS, FLOAT32, Sigmoid, bind, distance_of_rounding

WIDEST = 1024  # comparators of a tile
_ROUNDING = tl.constexpr(distance_of_rounding(torch.float32))


@triton.jit
def _exp(x):
    return tl.exp(x)


@triton.jit
def _where(condition, a, b):
    return tl.where(condition, a, b)


@triton.jit
def _at_least(u, least):
    return tl.where(u < least, least, u)  # NaN passes


@triton.jit
def _power(x, exponent):
    return tl.exp(exponent * tl.log(x))


@triton.jit
def _sqrt(x):
    return tl.sqrt(x)


# Triton allows no other names than its own in a function, nor in an annotation.
_NAMES = {"exp": _exp, "sqrt": _sqrt, "where": _where, "at_least": _at_least, "power": _power}
_NAMES |= {"tl": tl, "Any": tl.tensor}
_NAMES |= {name: triton.jit(bind(formula, _NAMES)) for name, formula in FLOAT32.items()}


@functools.cache
def _family(distribution: str) -> Sigmoid:
    """The formulas of a family as Triton's functions, arguments MIX, SLOPE, SCALE and SCALE_SLOPE of the kernels."""
    return Sigmoid(*(triton.jit(bind(formula, _NAMES)) for formula in DISTRIBUTIONS[distribution]))


@triton.jit
def _lanes_of(hi_lanes, lo_lanes, bounds, tile, WIDTH: tl.constexpr):
    """Of a tile, (1, WIDTH) each: the places of its comparators, and their lanes hi and lo, -1 where it has none."""
    place = tl.load(bounds + tile) + tl.arange(0, WIDTH)[None, :]
    inside = place < tl.load(bounds + tile + 1)
    return place, tl.load(hi_lanes + place, inside, -1), tl.load(lo_lanes + place, inside, -1)


@triton.jit
def _saved_of(hi_lanes, lo_lanes, bounds, tile, saved_d, saved_D, live, WIDTH: tl.constexpr):
    """The lanes of a tile, and its differences in the two channels, (ROWS, WIDTH) each."""
    place, hi, lo = _lanes_of(hi_lanes, lo_lanes, bounds, tile, WIDTH)
    on = live & (hi >= 0)
    return hi, lo, tl.load(saved_d + place, on, 0.0), tl.load(saved_D + place, on, 0.0)


@triton.jit
def forward_kernel(
    lanes, offset, comparators, bounds, saved, batch, n, num_tiles, inverse_temperature, art_lambda, tie_scale,
    MIX: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """lanes (2, batch, n) through the network, in place; saved (2, batch, comparators): d, and D in order.

    offset (batch,): the size of the maximum that was taken off the scores.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)  # (ROWS, 1)
    live = row < batch
    x, q, beta = lanes + row * n, lanes + (batch + row) * n, tl.load(inverse_temperature)
    num_comparators = tl.load(bounds + num_tiles)
    lo_lanes = comparators + num_comparators
    saved_d, saved_D = saved + row * num_comparators, saved + (batch + row) * num_comparators
    size = tl.load(offset + row, live, 0.0)
    ahead = _lanes_of(comparators, lo_lanes, bounds, 0, WIDTH)
    for tile in range(num_tiles):
        place, hi, lo = ahead
        ahead = _lanes_of(comparators, lo_lanes, bounds, tl.minimum(tile + 1, num_tiles - 1), WIDTH)
        on = live & (hi >= 0)
        tl.debug_barrier()
        x_hi, x_lo = tl.load(x + hi, on, 0.0), tl.load(x + lo, on, 0.0)
        q_hi, q_lo = tl.load(q + hi, on, 0.0), tl.load(q + lo, on, 0.0)
        d = x_lo - x_hi
        d = tl.where(tl.abs(d) <= (tl.maximum(tl.abs(x_lo), tl.abs(x_hi)) + size) * _ROUNDING, 0.0, d)
        e, swapped = tl.abs(d), d > 0
        mix = MIX(beta * (e * SCALE(e, art_lambda, tie_scale)))
        above, below = tl.where(swapped, q_lo, q_hi), tl.where(swapped, q_hi, q_lo)
        D = above - below
        tl.store(x + hi, tl.where(swapped, x_lo, x_hi) - mix * e, on)
        tl.store(x + lo, tl.where(swapped, x_hi, x_lo) + mix * e, on)
        tl.store(q + hi, above - mix * D, on)
        tl.store(q + lo, below + mix * D, on)
        tl.store(saved_d + place, d, on)
        tl.store(saved_D + place, D, on)


@triton.jit
def backward_kernel(
    lanes, comparators, bounds, saved, batch, n, num_tiles, inverse_temperature, art_lambda, tie_scale,
    MIX: tl.constexpr, SLOPE: tl.constexpr, SCALE: tl.constexpr, SCALE_SLOPE: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradients by the lanes (2, batch, n) back through the network, in place."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)  # (ROWS, 1)
    live = row < batch
    x, q, beta = lanes + row * n, lanes + (batch + row) * n, tl.load(inverse_temperature)
    num_comparators = tl.load(bounds + num_tiles)
    lo_lanes = comparators + num_comparators
    saved_d, saved_D = saved + row * num_comparators, saved + (batch + row) * num_comparators
    ahead = _saved_of(comparators, lo_lanes, bounds, num_tiles - 1, saved_d, saved_D, live, WIDTH)
    for step in range(num_tiles):
        hi, lo, d, D = ahead
        before = tl.maximum(num_tiles - 2 - step, 0)
        ahead = _saved_of(comparators, lo_lanes, bounds, before, saved_d, saved_D, live, WIDTH)
        on = live & (hi >= 0)
        e, swapped = tl.abs(d), d > 0
        u = beta * (e * SCALE(e, art_lambda, tie_scale))
        mix = MIX(u)
        slope = SLOPE(u, mix) * (beta * SCALE_SLOPE(e, art_lambda, tie_scale))
        tl.debug_barrier()
        x_hi, x_lo = tl.load(x + hi, on, 0.0), tl.load(x + lo, on, 0.0)
        q_hi, q_lo = tl.load(q + hi, on, 0.0), tl.load(q + lo, on, 0.0)
        moved_x, moved_q = x_lo - x_hi, q_lo - q_hi
        moved_x = mix * moved_x + slope * (moved_x * e + moved_q * D)
        moved_q = mix * moved_q
        tl.store(x + hi, tl.where(swapped, x_lo - moved_x, x_hi + moved_x), on)
        tl.store(x + lo, tl.where(swapped, x_hi + moved_x, x_lo - moved_x), on)
        tl.store(q + hi, tl.where(swapped, q_lo - moved_q, q_hi + moved_q), on)
        tl.store(q + lo, tl.where(swapped, q_hi + moved_q, q_lo - moved_q), on)


@functools.lru_cache(maxsize=32)
def _tiles(layer_sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, dict[str, int]]:
    """For the kernels: bounds (T + 1,) int32 on the device, and the shape of a program.

    The bounds are the places among the comparators where each of the T tiles begins, and where the last one ends.
    """
    width = min(WIDEST, triton.next_power_of_2(max(layer_sizes, default=1)))
    ends = accumulate(layer_sizes)
    starts = [place for size, end in zip(layer_sizes, ends) for place in range(end - size, end, width)]
    bounds = [*(starts or [0]), sum(layer_sizes)]  # a network of one lane has an empty tile
    rows = max(1, 32 // width)  # a warp at least, and 4 comparators per thread in wide tiles
    shape = {"ROWS": rows, "WIDTH": width, "num_warps": min(max(rows * width // 128, 1), 8), "num_stages": 1}
    return torch.tensor(bounds, dtype=torch.int32, device=device), shape


def _program(
    scores: Tensor, beta: Tensor, comparators: Tensor, layer_sizes: list[int], distribution: str, art: float | None
) -> tuple[tuple[int], tuple[Any, ...], tuple[Any, ...], Sigmoid, dict[str, int]]:
    """The grid of a launch, the tables, the numbers, the formulas and the shape of a program."""
    bounds, shape = _tiles(tuple(layer_sizes), scores.device)
    numbers = (*scores.shape, len(bounds) - 1, beta, art or 0.0, ART_TIE ** -(art or 0.0))
    grid = (triton.cdiv(len(scores), shape["ROWS"]),)
    return grid, (comparators.to(torch.int32), bounds), numbers, _family(distribution), shape


def _outputs(scores, target, beta, comparators, layer_sizes, k, *_):
    """The column (batch, k); each comparator's differences in the two channels, 8 bytes per sample."""
    return [scores.new_empty(len(scores), k), scores.new_empty(2, len(scores), comparators.shape[1])]


def _carry_mass(made, scores, target, beta, comparators, layer_sizes, k, distribution, art_lambda):
    """P[1..k, y], (batch, k), of a relaxed network, as networks.carry_mass, for scores (batch, n) float32."""
    x, offset = networks.centred(scores)
    lanes = torch.stack([x.T, mass_of(scores, target)])  # (2, batch, n)
    grid, tables, numbers, family, shape = _program(scores, beta, comparators, layer_sizes, distribution, art_lambda)
    with torch.cuda.device_of(scores):
        forward_kernel[grid](lanes, offset, *tables, made[1], *numbers, family.mix, family.scale, **shape)
    made[0].copy_(lanes[1, :, scores.shape[1] - k :].flip(1))


def _carry_mass_backward(
    grad_scores, grads, made, scores, target, beta, comparators, layer_sizes, k, distribution, art_lambda
):
    lanes = scores.new_zeros(2, *scores.shape)
    lanes[1, :, scores.shape[1] - k :] = grads[0].flip(1)
    grid, tables, numbers, family, shape = _program(scores, beta, comparators, layer_sizes, distribution, art_lambda)
    with torch.cuda.device_of(scores):
        backward_kernel[grid](lanes, *tables, made[1], *numbers, *family, **shape)
    grad_scores.copy_(lanes[0]).masked_fill_(scores == -torch.inf, 0)  # MASKED stood in for them


register("carry_mass", "cuda", _outputs, _carry_mass, _carry_mass_backward, networks.carry_mass)
