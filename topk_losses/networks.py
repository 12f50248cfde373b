"""Sorting and selection networks as lists of comparators.

A network is a list of layers, a layer a list of comparators (lo, hi) on disjoint lanes: the smaller value goes
to lane lo, the larger to lane hi. After the last layer lane n - r holds rank r for r = 1..k. Lane numbers and
the placing of the comparators are those of difftopk 0.2.0, so that relaxed values agree with it (`bitonic` says where
they can't).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from topk_losses.checks import check_k


@dataclass(frozen=True)
class Network:
    """A comparator network that brings the k largest of n values, in order, to its last k lanes.

    layers: one (2, c) int64 tensor per layer; row 0 holds the c lanes lo, row 1 the lanes hi.
    """

    n: int
    k: int
    layers: tuple[Tensor, ...]

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def num_comparators(self) -> int:
        """Number of comparators in all layers."""
        return sum(layer.shape[1] for layer in self.layers)

    @property
    def output_lanes(self) -> Tensor:
        """(k,) int64: the lane of rank 1, 2, ..., k."""
        return self.n - 1 - torch.arange(self.k)

    def pruned(self) -> "Network":
        """The same network without the comparators from which no path leads to an output lane.

        The outputs, relaxed or hard, are the same; only full sorts have such comparators.
        """
        needed = torch.zeros(self.n, dtype=torch.bool)
        needed[self.output_lanes] = True
        kept = []
        for layer in reversed(self.layers):
            layer = layer[:, needed[layer].any(0)]  # (2, c)
            needed[layer] = True
            if layer.shape[1]:
                kept.append(layer)
        return Network(self.n, self.k, tuple(reversed(kept)))


def comparator_tiles(layers: tuple[Tensor, ...], width: int) -> tuple[Tensor, Tensor]:
    """Layers cut into tiles of `width` comparators, which the Triton kernels take one after another.

    Returns the tiles (T, 2, width) int32, row 0 the lanes lo and row 1 the lanes hi, -1 where a tile has no comparator
    left; and (T,) int32, the number of comparators in the tiles before.
    """
    parts = [part for layer in layers for part in layer.split(width, dim=1)]  # (2, <= width) each
    sizes = torch.tensor([part.shape[1] for part in parts])
    tiles = torch.full((len(parts), 2, width), -1, dtype=torch.int32)
    for tile, part in zip(tiles, parts):
        tile[:, : part.shape[1]] = part
    return tiles, (sizes.cumsum(0) - sizes).int()


def odd_even(n: int, k: int) -> Network:
    """Odd-even transposition sort: n layers of neighbours.

    Raises ValueError unless 1 <= k < n.
    """
    check_k(k, n)
    layers = []
    for depth in range(n):
        lo = torch.arange(depth % 2, n - 1, 2)  # (c,)
        layers.append(torch.stack([lo, lo + 1]))
    # n = 2 has no neighbours left in its second layer
    return Network(n, k, tuple(layer for layer in layers if layer.shape[1]))


def bitonic(n: int, k: int) -> Network:
    """Bitonic sort (Batcher 1968): b (b + 1) / 2 layers with b = ceil(log2 n), for any n.

    The lowest 2^b - n wires of the full network do not exist. difftopk drops every comparator that touches one,
    as if they held -inf and stayed where they are. In a descending merge they would not stay, and the result then
    sorts only by luck: not for n = 22 or 10450, for instance. It does sort where the binary digits of 2^b - n that
    are 1 stand in one run, and is kept there (n = 16, 50, 100, 1000, 1024 are such n). Elsewhere the missing -inf
    move as they should, which takes no comparator either. Raises ValueError unless 1 <= k < n.
    """
    check_k(k, n)
    num_blocks = math.ceil(math.log2(n))
    padding = 2**num_blocks - n
    missing_stay = "01" not in f"{padding:b}".lstrip("0")
    wires = torch.arange(2**num_blocks)
    lane_on = torch.where(wires >= padding, wires - padding, -1)  # (2^b,) -1: no lane
    layers = []
    for block in range(num_blocks):
        for step in range(block + 1):
            stride = 2 ** (block - step)
            first = wires[(wires & stride) == 0]  # (2^(b - 1),)
            descending = (first >> (block + 1)) % 2 == 1
            lo_wire = torch.where(descending, first + stride, first)
            hi_wire = torch.where(descending, first, first + stride)
            lo, hi = lane_on[lo_wire], lane_on[hi_wire]
            both = (lo >= 0) & (hi >= 0)
            layers.append(torch.stack([lo[both], hi[both]]))
            rises = (lo >= 0) & (hi < 0)  # a lane whose partner is missing is the larger of the two
            if not missing_stay:
                lane_on[hi_wire[rises]], lane_on[lo_wire[rises]] = lo[rises], -1
    # Lanes are named by the place where they end, so that lane n - r holds rank r.
    name = torch.empty(n, dtype=torch.int64)
    name[lane_on[padding:]] = torch.arange(n)
    return Network(n, k, tuple(name[layer] for layer in layers))


def splitter_selection(n: int, k: int) -> Network:
    """Splitter selection network (Petersen et al. 2022, section 3.3): O(log n) layers for k much below n.

    Each lane carries a lower bound on the number of lanes above it. A splitter cascade over the lanes of equal
    bound halves its stride layer by layer; a lane that lost in j of its layers has at least 2^j - 1 of the
    cascade's lanes above it, which raises its bound. Lanes whose bound reaches k are out. The cascades repeat,
    each as early as its lanes are free, until the top k are ordered. Raises ValueError unless 1 <= k < n.
    """
    check_k(k, n)
    bound = torch.zeros(n, dtype=torch.int64)  # (n,) lanes known to be above this one
    free_from = torch.zeros(n, dtype=torch.int64)  # (n,) first layer in which the lane is free
    # losses of each position in a cascade = ones in its binary digits
    digits = torch.arange(n).unsqueeze(1) >> torch.arange(max(1, n.bit_length()))  # (n, bits)
    raised_by = 2 ** (digits & 1).sum(1) - 1  # (n,)
    layers: list[list[Tensor]] = []
    for first_rank in range(k):
        before = len(layers), sum(map(len, layers))
        for rank in range(k - 1, first_rank - 1, -1):
            lanes = (bound == rank).nonzero().squeeze(1)  # (size,)
            size = len(lanes)
            if size < 2:
                continue
            start = int(free_from[lanes].max())
            num_layers = math.ceil(math.log2(size))
            layers.extend([] for _ in range(start + num_layers - len(layers)))
            position = torch.arange(size)
            for i in range(num_layers):
                stride = 2 ** (num_layers - 1 - i)
                winner = position[((position & stride) == 0) & (position + stride < size)]
                # the construction counts lanes from the top, the network from the bottom
                layers[start + i].append(n - 1 - torch.stack([lanes[winner + stride], lanes[winner]]))
            bound[lanes] += raised_by[:size]
            free_from[lanes] = start + num_layers
        if (len(layers), sum(map(len, layers))) == before:
            break
    return Network(n, k, tuple(torch.cat(parts, dim=1) for parts in layers))
