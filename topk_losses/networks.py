"""Sorting and selection networks, relaxed (Petersen et al. 2021, 2022) and evaluated for the true class alone.

A network is a list of layers, a layer a list of comparators (lo, hi) on disjoint lanes: the smaller value goes
to lane lo, the larger to lane hi. After the last layer lane n - r holds rank r for r = 1..k. Lane numbers and
the placing of the comparators are those of difftopk 0.2.0, so that relaxed values agree with it (`bitonic` says where
they can't).

A relaxed comparator puts its values in order and then mixes them, the more the closer they are (sigmoids.py). Two
channels run through the same comparators: the scores, from which the shares are taken, and the mass of the true class
(its one-hot), which ends as P[1..k, y] on the top lanes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import SupportsIndex

import torch
from torch import Tensor

from topk_losses.checks import check_integer, check_k
from topk_losses.kernels import kernel
from topk_losses.operator import TopKOperator, finite, mass_of
from topk_losses.sigmoids import check_sigmoid, distance_of_rounding, mixing
from topk_losses.threshold import as_tensor

Layer = Sequence[tuple[int, int]]  # comparators (lo, hi)


@dataclass(frozen=True)
class Network:
    """A comparator network that brings the k largest of n values, in order, to its last k lanes."""

    n: int
    k: int
    layers: tuple[Layer, ...] = field(repr=False)

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def num_comparators(self) -> int:
        """Number of comparators in all layers."""
        return sum(map(len, self.layers))

    @property
    def output_lanes(self) -> range:
        """The lane of rank 1, 2, ..., k."""
        return range(self.n - 1, self.n - 1 - self.k, -1)

    def pruned(self) -> "Network":
        """The same network without the comparators from which no path leads to an output lane.

        The outputs, relaxed or hard, are the same; only full sorts have such comparators.
        """
        needed = set(self.output_lanes)
        kept = []
        for layer in reversed(self.layers):
            kept.append([pair for pair in layer if not needed.isdisjoint(pair)])
            needed.update(*kept[-1])
        return _network(self.n, self.k, reversed(kept))


def _checked(n: SupportsIndex, k: SupportsIndex) -> tuple[int, int]:
    n = check_integer("the number of scores n", n, 1)
    return n, check_k(k, n)


def _network(n: int, k: int, layers: Iterable[Layer]) -> Network:
    return Network(n, k, tuple(tuple(layer) for layer in layers if layer))


@lru_cache(maxsize=8, typed=True)
def odd_even(n: SupportsIndex, k: SupportsIndex) -> Network:
    """Odd-even transposition sort: n layers of neighbours.

    Raises ValueError unless 1 <= k <= n.
    """
    n, k = _checked(n, k)
    return _network(n, k, ([(lo, lo + 1) for lo in range(depth % 2, n - 1, 2)] for depth in range(n)))


@lru_cache(maxsize=8, typed=True)
def bitonic(n: SupportsIndex, k: SupportsIndex) -> Network:
    """Bitonic sort (Batcher 1968): b (b + 1) / 2 layers with b = ceil(log2 n), for any n.

    The lowest 2^b - n wires of the full network do not exist. difftopk drops every comparator that touches one,
    as if they held -inf and stayed where they are. In a descending merge they would not stay, and the result then
    sorts only by luck: not for n = 22 or 10450, for instance. It does sort where the binary digits of 2^b - n that
    are 1 stand in one run, and is kept there (n = 16, 50, 100, 1000, 1024 are such n). Elsewhere the missing -inf
    move as they should, which takes no comparator either. Raises ValueError unless 1 <= k <= n.
    """
    n, k = _checked(n, k)
    num_blocks = (n - 1).bit_length()
    padding = 2**num_blocks - n
    missing_stay = "01" not in f"{padding:b}".lstrip("0")
    lane_on = [-1] * padding + list(range(n))  # of each wire; -1: no lane
    layers: list[list[tuple[int, int]]] = []
    for block in range(num_blocks):
        for step in range(block + 1):
            stride = 2 ** (block - step)
            layers.append([])
            for first in range(2**num_blocks):
                if first & stride:
                    continue
                descending = (first >> (block + 1)) % 2
                on_lo, on_hi = (first + stride, first) if descending else (first, first + stride)
                lo, hi = lane_on[on_lo], lane_on[on_hi]
                if lo >= 0 and hi >= 0:
                    layers[-1].append((lo, hi))
                elif lo >= 0 and not missing_stay:  # a lane whose partner is missing is the larger of the two
                    lane_on[on_hi], lane_on[on_lo] = lo, -1
    # Lanes are named by the place where they end, so that lane n - r holds rank r.
    name = {lane: place for place, lane in enumerate(lane_on[padding:])}
    return _network(n, k, ([(name[lo], name[hi]) for lo, hi in layer] for layer in layers))


@lru_cache(maxsize=8, typed=True)
def splitter_selection(n: SupportsIndex, k: SupportsIndex) -> Network:
    """Splitter selection network (Petersen et al. 2022, section 3.3): O(log n) layers for k much below n.

    Each lane carries a lower bound on the number of lanes above it. A splitter cascade over the lanes of equal
    bound halves its stride layer by layer; a lane that lost in j of its layers has at least 2^j - 1 of the
    cascade's lanes above it, which raises its bound. Lanes whose bound reaches k are out. The cascades repeat,
    each as early as its lanes are free, until the top k are ordered. Raises ValueError unless 1 <= k <= n.
    """
    n, k = _checked(n, k)
    bound = [0] * n  # of lanes known to be above each
    free_from = [0] * n  # first layer in which the lane is free
    layers: list[list[tuple[int, int]]] = []
    for first_rank in range(k):
        before = len(layers), sum(map(len, layers))
        lanes_of: dict[int, list[int]] = {}
        for lane in range(n):
            lanes_of.setdefault(bound[lane], []).append(lane)
        for rank in range(k - 1, first_rank - 1, -1):  # bounds rise: lanes that move are not met again
            lanes = lanes_of.get(rank, [])
            num_layers = (len(lanes) - 1).bit_length() if lanes else 0
            start = max((free_from[lane] for lane in lanes), default=0)
            layers.extend([] for _ in range(start + num_layers - len(layers)))
            for i in range(num_layers):
                stride = 2 ** (num_layers - 1 - i)
                winners = [place for place in range(len(lanes) - stride) if not place & stride]
                # the construction counts lanes from the top, the network from the bottom
                layers[start + i] += [(n - 1 - lanes[place + stride], n - 1 - lanes[place]) for place in winners]
            for place, lane in enumerate(lanes):
                bound[lane] += 2 ** place.bit_count() - 1  # it lost once for each digit of its place that is 1
                free_from[lane] = start + num_layers
        if (len(layers), sum(map(len, layers))) == before:
            break
    return _network(n, k, layers)


def _compare(
    x: Tensor, lanes: Tensor, offset: Tensor, distribution: str, beta: float | Tensor, art_lambda: float | None
) -> tuple[Tensor, Tensor]:
    """Which comparators of a layer are out of order, and the share that they mix: (c, rows) each.

    x (n, rows): the scores less their maximum, whose size is offset (rows,). lanes (2c,): the lanes hi, then lo.
    """
    b, a = x.index_select(0, lanes).chunk(2)  # (c, rows) each
    d = a - b
    rounding = distance_of_rounding(x.dtype) * (torch.maximum(a.abs(), b.abs()) + offset)
    d = torch.where(d.abs() <= rounding, d - d.detach(), d)  # equal, with the derivative of d
    out = d > 0
    # e = |d|, but at 0 with a derivative, for which sigmoid(-e) has that of sigmoid(d)
    return out, mixing(torch.where(out, d, -d), distribution, beta, art_lambda)


def _exchange(x: Tensor, lanes: Tensor, out: Tensor, mix: Tensor) -> Tensor:
    """A layer applied to x (n, channels, rows): a symmetric map of the two lanes of each comparator."""
    b, a = x.index_select(0, lanes).chunk(2)  # (c, channels, rows) each, on the lanes hi and lo
    out, mix = out.unsqueeze(1), mix.unsqueeze(1)
    hi, lo = torch.where(out, a, b), torch.where(out, b, a)
    moved = mix * (hi - lo)
    return x.index_copy(0, lanes, torch.cat([hi - moved, lo + moved]))


def centred(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Scores less their maximum (n, rows), since an offset would cost digits, and the maximum's size (rows,)."""
    scores = finite(scores)
    largest = scores.detach().amax(1, keepdim=True)  # (rows, 1)
    return (scores - largest).T, largest.abs().squeeze(1)


def carry_mass(
    scores: Tensor, target: Tensor, beta: Tensor, comparators: Tensor, layer_sizes: list[int], k: int,
    distribution: str, art_lambda: float | None,
) -> list[Tensor]:  # fmt: skip
    """What the kernel computes, in any precision: P of the target, (rows, k), by carrying its mass through the network.

    scores (rows, n); target: labels (rows,) or a mass (rows, n); comparators (2, C): the lanes hi and the lanes lo.
    """
    x, offset = centred(scores)
    x = torch.stack([x, mass_of(scores, target).T], dim=1)  # (n, 2, rows)
    for layer in comparators.split(layer_sizes, dim=1):
        lanes = layer.flatten()
        x = _exchange(x, lanes, *_compare(x[:, 0], lanes, offset, distribution, beta, art_lambda))
    return [x[x.shape[0] - k :, 1].flip(0).T]


class RelaxedNetwork(TopKOperator):
    """A comparator network with comparators relaxed by one of the six sigmoid families.

    network: `odd_even`, `bitonic` or `splitter_selection` for a fixed n and k. inverse_temperature: published: 1 for
    ImageNet, .5 for CIFAR-100. distribution: default "logistic_phi" with art_lambda .5, as published (the other five
    have no art_lambda). Raises ValueError for an unknown distribution (naming the nearest), beta <= 0, art_lambda
    outside [0, 1) or without logistic_phi. Source: Petersen et al. 2022, section 3.3.
    """

    constants = ("comparators",)
    shown = ("n", *TopKOperator.shown, "depth", "num_comparators", "distribution", "art_lambda")

    def __init__(
        self, network: Network, inverse_temperature: float | Tensor, distribution: str | None = None,
        art_lambda: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(network.k, inverse_temperature)
        self.n = network.n
        self.depth, self.num_comparators = network.depth, network.num_comparators
        self.distribution, self.art_lambda = check_sigmoid(distribution, art_lambda)
        # Comparators without a path to the output lanes cost time and change nothing.
        layers = network.pruned().layers
        self.layer_sizes = [len(layer) for layer in layers]
        lanes = [[pair[side] for layer in layers for pair in layer] for side in (1, 0)]
        # One tensor for all layers moves between devices as one: (2, C), the lanes hi and the lanes lo.
        self.comparators = torch.tensor(lanes, dtype=torch.int64, device="cpu")

    def _checked_n(self, scores: Tensor) -> Tensor:
        """The comparators where the scores are; a kernel would read what does not exist."""
        if scores.shape[1] != self.n:
            raise ValueError(f"this network was built for n={self.n} scores, got {scores.shape[1]}")
        return self.comparators.to(scores.device)

    def _column(self, scores: Tensor, target: Tensor) -> Tensor:
        comparators = self._checked_n(scores)
        carry = kernel("carry_mass", scores, self.inverse_temperature, target) if self.layer_sizes else None
        settings = (comparators, self.layer_sizes, self.k, self.distribution, self.art_lambda)
        return (carry or carry_mass)(scores, target, as_tensor(self.beta, scores), *settings)[0]

    def _matrix(self, scores: Tensor) -> Tensor:
        """Bidirectional evaluation (Petersen et al. 2022, section 3.2): scores forward, rows of P backward.

        A relaxed comparator is a symmetric 2 x 2 matrix, so row r of P, starting as the unit vector of its
        output lane, runs through the same comparators in reverse order.
        """
        layers = [layer.flatten() for layer in self._checked_n(scores).split(self.layer_sizes, dim=1)]
        x, offset = centred(scores)
        x = x.unsqueeze(1)  # (n, 1, rows)
        compared, beta = [], self.beta
        for lanes in layers:
            compared.append(_compare(x[:, 0], lanes, offset, self.distribution, beta, self.art_lambda))
            x = _exchange(x, lanes, *compared[-1])
        units = torch.eye(self.n, dtype=scores.dtype, device=scores.device)[:, self.n - self.k :].flip(1)  # (n, k)
        P = units.unsqueeze(2).expand(-1, -1, len(scores))  # (n, k, rows)
        for lanes, (out, mix) in zip(reversed(layers), reversed(compared)):
            P = _exchange(P, lanes, out, mix)
        return P.permute(2, 1, 0)  # (rows, k, n)
