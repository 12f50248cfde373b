"""Triton kernels of the relaxed networks: scores and mass through all layers in one launch, and back in another.

One program carries a few samples through the whole network. Triton cannot index registers, so the lanes stand in a
workspace in global memory, (2, batch, n): a program reads and writes its own 8 n bytes per sample alone, which stay in
the L1 cache (8 KB for n = 1000, 84 KB for n = 10450), and the layers are parted by a barrier of the program's threads.
Against lanes in registers, exchanged by tl.gather, this costs what the comparators cost rather than the lanes, serves
any n, and computes each swap once rather than on both lanes.

Layers come as tiles of WIDTH comparators (`networks.comparator_tiles`). A tile's lanes, and in the backward pass its
saved differences, do not depend on the tile before, and are asked for ahead of the barrier that waits for it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from topk_losses.distributions import ART_TIE
from topk_losses.operator import refuse_double_backward
from topk_losses.triton_distributions import family_alpha, family_slope

# Were these known to be aligned, a thread would take 4 neighbouring comparators, for one wide load. Their lanes would
# then be 4 apart from thread to thread, and the stores would have to change hands through shared memory.
_one_comparator_per_thread = triton.jit(do_not_specialize_on_alignment=["tiles", "d_scores", "d_mass"])


@triton.jit
def _tile_lanes(tiles, tile, WIDTH: tl.constexpr):
    """The lanes lo and hi of a tile, (1, WIDTH) each; -1 where it has no comparator."""
    place = tile * 2 * WIDTH + tl.arange(0, WIDTH)[None, :]
    return tl.load(tiles + place), tl.load(tiles + WIDTH + place)


@triton.jit
def _tile_saved(tiles, first, d_scores, d_mass, tile, row, live, num_comparators, WIDTH: tl.constexpr):
    """A tile's lanes (1, WIDTH) and its differences in the two channels (ROWS, WIDTH)."""
    lo, hi = _tile_lanes(tiles, tile, WIDTH)
    place = row * num_comparators + tl.load(first + tile) + tl.arange(0, WIDTH)[None, :]
    on = live & (lo >= 0)
    return lo, hi, tl.load(d_scores + place, on, 0.0), tl.load(d_mass + place, on, 0.0)


@_one_comparator_per_thread
def carry_mass_forward(
    scores,
    labels,
    mass,
    tiles,
    first,
    score_lanes,
    mass_lanes,
    d_scores,
    d_mass,
    column,
    batch,
    n,
    k,
    num_tiles,
    num_comparators,
    beta,
    art_lambda,
    FAMILY: tl.constexpr,
    ONE_HOT: tl.constexpr,
    SAVE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    K: tl.constexpr,
):
    """Scores (batch, n) and the mass on them -> column (batch, k); d_scores, d_mass (batch, comparators) if SAVE.

    The mass is the one-hot of labels (batch,) if ONE_HOT, else mass (batch, n). The lanes (batch, n) are workspace.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)  # (ROWS, 1)
    live = row < batch
    score_lanes += row * n
    mass_lanes += row * n

    largest = tl.full((ROWS, 1), float("-inf"), tl.float32)
    for start in range(0, n, CHUNK):
        lane = start + tl.arange(0, CHUNK)[None, :]
        x = tl.load(scores + row * n + lane, live & (lane < n), float("-inf"))
        # tl.max passes over NaN, PyTorch's amax does not
        largest = tl.maximum(largest, tl.max(x, 1, keep_dims=True), propagate_nan=tl.PropagateNan.ALL)
        largest = tl.where(tl.max((x != x).to(tl.int32), 1, keep_dims=True) > 0, float("nan"), largest)
    if ONE_HOT:
        label = tl.load(labels + row, live, 0)
        # a class that does not exist makes its sample NaN: a check on the host would wait for the device
        one = tl.where((label >= 0) & (label < n), 1.0, float("nan"))
        zero = one - one
    for start in range(0, n, CHUNK):
        lane = start + tl.arange(0, CHUNK)[None, :]
        on = live & (lane < n)
        x = tl.load(scores + row * n + lane, on, 0.0)
        tl.store(score_lanes + lane, x - largest, on)
        if ONE_HOT:
            tl.store(mass_lanes + lane, tl.where(lane == label, one, zero), on)
        else:
            tl.store(mass_lanes + lane, tl.load(mass + row * n + lane, on, 0.0), on)

    next_lo, next_hi = _tile_lanes(tiles, 0, WIDTH)
    for tile in range(num_tiles):
        lo, hi = next_lo, next_hi
        next_lo, next_hi = _tile_lanes(tiles, tl.minimum(tile + 1, num_tiles - 1), WIDTH)
        on = live & (lo >= 0)
        tl.debug_barrier()
        a, b = tl.load(score_lanes + lo, on, 0.0), tl.load(score_lanes + hi, on, 0.0)
        a_mass, b_mass = tl.load(mass_lanes + lo, on, 0.0), tl.load(mass_lanes + hi, on, 0.0)
        d = a - b
        d_of_mass = a_mass - b_mass
        swap = family_alpha(d, beta, art_lambda, FAMILY)
        tl.store(score_lanes + lo, a - swap * d, on)
        tl.store(score_lanes + hi, b + swap * d, on)
        tl.store(mass_lanes + lo, a_mass - swap * d_of_mass, on)
        tl.store(mass_lanes + hi, b_mass + swap * d_of_mass, on)
        if SAVE:
            place = row * num_comparators + tl.load(first + tile) + tl.arange(0, WIDTH)[None, :]
            tl.store(d_scores + place, d, on)
            tl.store(d_mass + place, d_of_mass, on)
    tl.debug_barrier()

    rank = tl.arange(0, K)[None, :]
    on = live & (rank < k)
    tl.store(column + row * k + rank, tl.load(mass_lanes + n - 1 - rank, on, 0.0), on)


@_one_comparator_per_thread
def carry_mass_backward(
    grad_column,
    tiles,
    first,
    d_scores,
    d_mass,
    grad_scores,
    grad_mass,
    batch,
    n,
    k,
    num_tiles,
    num_comparators,
    beta,
    art_lambda,
    art_tie_factor,
    FAMILY: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """grad_column (batch, k) -> grad_scores and grad_mass (batch, n), which hold the lanes meanwhile."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)  # (ROWS, 1)
    live = row < batch
    score_lanes = grad_scores + row * n
    mass_lanes = grad_mass + row * n
    for start in range(0, n, CHUNK):
        lane = start + tl.arange(0, CHUNK)[None, :]
        on = live & (lane < n)
        rank = n - 1 - lane
        tl.store(score_lanes + lane, tl.zeros((ROWS, CHUNK), tl.float32), on)
        tl.store(mass_lanes + lane, tl.load(grad_column + row * k + rank, on & (rank < k), 0.0), on)

    next_lo, next_hi, next_d, next_d_of_mass = _tile_saved(
        tiles, first, d_scores, d_mass, num_tiles - 1, row, live, num_comparators, WIDTH
    )
    for step in range(num_tiles):
        lo, hi, d, d_of_mass = next_lo, next_hi, next_d, next_d_of_mass
        tile = tl.maximum(num_tiles - 2 - step, 0)
        next_lo, next_hi, next_d, next_d_of_mass = _tile_saved(
            tiles, first, d_scores, d_mass, tile, row, live, num_comparators, WIDTH
        )
        on = live & (lo >= 0)
        swap = family_alpha(d, beta, art_lambda, FAMILY)
        slope = family_slope(d, swap, beta, art_lambda, art_tie_factor, FAMILY)
        tl.debug_barrier()
        g_lo, g_hi = tl.load(score_lanes + lo, on, 0.0), tl.load(score_lanes + hi, on, 0.0)
        g_lo_mass, g_hi_mass = tl.load(mass_lanes + lo, on, 0.0), tl.load(mass_lanes + hi, on, 0.0)
        moved = g_hi - g_lo
        moved_mass = g_hi_mass - g_lo_mass
        g_d = moved * swap + slope * (moved * d + moved_mass * d_of_mass)
        g_d_of_mass = moved_mass * swap
        tl.store(score_lanes + lo, g_lo + g_d, on)
        tl.store(score_lanes + hi, g_hi - g_d, on)
        tl.store(mass_lanes + lo, g_lo_mass + g_d_of_mass, on)
        tl.store(mass_lanes + hi, g_hi_mass - g_d_of_mass, on)


def launch_shape(batch: int, n: int, width: int) -> tuple[tuple[int], dict[str, int], dict[str, int]]:
    """The grid, the sizes that are compiled in, and the launch's options.

    A program has a warp at least, and 4 comparators per thread in wide tiles.
    """
    rows = max(1, 32 // width)
    chunk = min(triton.next_power_of_2(n), max(1024, width) // rows)
    warps = min(max(rows * width // 128, 1), 8)
    options = {"num_warps": warps, "num_stages": 1, "enable_fp_fusion": True}
    return (triton.cdiv(batch, rows),), {"ROWS": rows, "WIDTH": width, "CHUNK": chunk}, options


class _CarryMass(torch.autograd.Function):
    """Saved for the backward pass: each comparator's differences in the two channels, 8 bytes per sample."""

    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        labels: Tensor,
        tiles: Tensor,
        first: Tensor,
        num_comparators: int,
        k: int,
        distribution: str,
        beta: float,
        art_lambda: float,
    ) -> Tensor:
        batch, n = scores.shape
        one_hot = not labels.is_floating_point()
        save = any(ctx.needs_input_grad[:2])
        lanes = scores.new_empty((2, batch, n))
        d = scores.new_empty((2, batch, num_comparators) if save else (2, 0))
        column = scores.new_empty((batch, k))
        grid, sizes, options = launch_shape(batch, n, tiles.shape[2])
        with torch.cuda.device_of(scores):
            carry_mass_forward[grid](
                scores,
                labels if one_hot else tiles,
                tiles if one_hot else labels,
                tiles,
                first,
                *lanes,
                *d,
                column,
                batch,
                n,
                k,
                len(tiles),
                num_comparators,
                beta,
                art_lambda,
                FAMILY=distribution,
                ONE_HOT=one_hot,
                SAVE=save,
                K=triton.next_power_of_2(k),
                **sizes,
                **options,
            )
        ctx.save_for_backward(column, tiles, first, d)
        ctx.n, ctx.settings = n, (distribution, beta, art_lambda)
        return column

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        column, tiles, first, d = ctx.saved_tensors
        distribution, beta, art_lambda = ctx.settings
        batch, k = column.shape
        grad_scores, grad_mass = d.new_empty((batch, ctx.n)), d.new_empty((batch, ctx.n))
        grid, sizes, options = launch_shape(batch, ctx.n, tiles.shape[2])
        with torch.cuda.device_of(grad):
            carry_mass_backward[grid](
                grad.contiguous(),
                tiles,
                first,
                *d,
                grad_scores,
                grad_mass,
                batch,
                ctx.n,
                k,
                len(tiles),
                d.shape[2],
                beta,
                art_lambda,
                ART_TIE**-art_lambda,
                FAMILY=distribution,
                **sizes,
                **options,
            )
        grad_scores = refuse_double_backward(grad_scores, grad, column)
        grad_mass = refuse_double_backward(grad_mass, grad, column) if ctx.needs_input_grad[1] else None
        return grad_scores, grad_mass, None, None, None, None, None, None, None


def carry_mass(
    scores: Tensor,
    labels: Tensor,
    tiles: Tensor,
    first: Tensor,
    num_comparators: int,
    k: int,
    distribution: str,
    beta: float,
    art_lambda: float,
) -> Tensor:
    """P[1..k, y] of a relaxed network, (batch, k) float32; the counterpart of sorting_networks._CarryMass.

    scores (batch, n) float32, not centred; labels (batch,) int64, or the mass (batch, n) floating point. tiles
    (T, 2, width) and first (T,), int32, from networks.comparator_tiles, of num_comparators in all. Labels
    outside [0, n) give NaN.
    """
    if labels.is_floating_point():
        labels = labels.float()
    return _CarryMass.apply(
        scores.contiguous(), labels.contiguous(), tiles, first, num_comparators, k, distribution, beta, art_lambda
    )
