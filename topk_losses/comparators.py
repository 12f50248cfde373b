"""Comparator networks: their constructions, and the tables of their comparators.

A network is a list of layers, a layer a list of comparators (lo, hi) on disjoint wires: the smaller value goes
to wire lo, the larger to wire hi. After the last layer wire n - r holds rank r for r = 1..k. Wire numbers and
the placing of the comparators are those of difftopk 0.2.0, so that relaxed values agree with it (`bitonic` says where
they can't).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, SupportsIndex

import torch
from torch import Tensor

from topk_losses.checks import check_integer, check_k
from topk_losses.compilers import mark_constant, mark_static, ordinary_tensors

Layer = Sequence[tuple[int, int]]  # comparators (lo, hi)


@dataclass(frozen=True)
class Network:
    """Comparator network that brings the k largest of n values, in order, to its last k wires."""

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
    def output_wires(self) -> range:
        """Wires of rank 1, 2, ..., k."""
        return range(self.n - 1, self.n - 1 - self.k, -1)

    def pruned(self) -> "Network":
        """The same network without the comparators from which no path leads to an output wire.

        The outputs, relaxed or hard, are the same; only full sorts have such comparators.
        """
        needed = set(self.output_wires)
        kept = []
        for layer in reversed(self.layers):
            kept.append([pair for pair in layer if not needed.isdisjoint(pair)])
            needed.update(*kept[-1])
        return Network(self.n, self.k, without_empty_layers(reversed(kept)))


def check_number_of_scores(n: SupportsIndex) -> int:
    """Return n as an int; raise ValueError unless it is at least 1."""
    return check_integer("the number of scores n", n, 1)


def without_empty_layers(layers: Iterable[Layer]) -> tuple[Layer, ...]:
    """Return the layers that have comparators."""
    return tuple(tuple(layer) for layer in layers if layer)


@lru_cache(maxsize=8, typed=True)
def odd_even(n: SupportsIndex, k: SupportsIndex) -> Network:
    """Build an odd-even transposition sort: n layers that compare neighbours.

    Raises ValueError unless 1 <= k <= n.
    """
    n = check_number_of_scores(n)
    k = check_k(k, n)
    layers = []
    for depth in range(n):
        layers.append([(lo, lo + 1) for lo in range(depth % 2, n - 1, 2)])
    return Network(n, k, without_empty_layers(layers))


@lru_cache(maxsize=8, typed=True)
def bitonic(n: SupportsIndex, k: SupportsIndex) -> Network:
    """Build a bitonic sort (Batcher 1968): b (b + 1) / 2 layers with b = ceil(log2 n), for any n.

    The lowest 2^b - n wires of the full network do not exist. difftopk drops every comparator that touches one,
    as if they held -inf and stayed where they are. In a descending merge they would not stay, and the result then
    sorts only by luck: not for n = 22 or 10450, for instance. It does sort where the binary digits of 2^b - n that
    are 1 stand in one run, and is kept there (n = 16, 50, 100, 1000, 1024 are such n). Elsewhere the missing -inf
    move as they should, which takes no comparator either. Raises ValueError unless 1 <= k <= n.
    """
    n = check_number_of_scores(n)
    k = check_k(k, n)
    num_blocks = (n - 1).bit_length()
    padding = 2**num_blocks - n
    missing_stay = "01" not in f"{padding:b}".lstrip("0")
    wire_on = [-1] * padding + list(range(n))  # of the full network's wires; -1: none
    layers: list[list[tuple[int, int]]] = []
    for block in range(num_blocks):
        for step in range(block + 1):
            stride = 2 ** (block - step)
            layers.append(merge_layer(wire_on, stride, block, missing_stay))
    # Wires are named by the place where they end, so that wire n - r holds rank r.
    name = {wire: place for place, wire in enumerate(wire_on[padding:])}
    named = []
    for layer in layers:
        named.append([(name[lo], name[hi]) for lo, hi in layer])
    return Network(n, k, without_empty_layers(named))


def merge_layer(wire_on: list[int], stride: int, block: int, missing_stay: bool) -> list[tuple[int, int]]:
    """Build a layer of a bitonic merge; where a wire that exists meets a missing one, wire_on may change."""
    layer = []
    for first in range(len(wire_on)):
        if first & stride:
            continue
        on_lo = first
        on_hi = first + stride
        is_descending = (first >> (block + 1)) % 2
        if is_descending:
            on_lo, on_hi = on_hi, on_lo
        lo = wire_on[on_lo]
        hi = wire_on[on_hi]
        if lo >= 0 and hi >= 0:
            layer.append((lo, hi))
        elif lo >= 0 and not missing_stay:  # a wire whose partner is missing is the larger of the two
            wire_on[on_hi] = lo
            wire_on[on_lo] = -1
    return layer


@lru_cache(maxsize=8, typed=True)
def splitter_selection(n: SupportsIndex, k: SupportsIndex) -> Network:
    """Build a splitter selection network (Petersen et al. 2022, section 3.3): O(log n) layers for k much below n.

    Each wire carries a lower bound on the number of wires above it. A splitter cascade over the wires of equal
    bound halves its stride layer by layer; a wire that lost in j of its layers has at least 2^j - 1 of the
    cascade's wires above it, which raises its bound. Wires whose bound reaches k are out. The cascades repeat,
    each as early as its wires are free, until the top k are ordered. Raises ValueError unless 1 <= k <= n.
    """
    n = check_number_of_scores(n)
    k = check_k(k, n)
    bound = [0] * n  # of wires known to be above each
    free_from = [0] * n  # first layer in which the wire is free
    layers: list[list[tuple[int, int]]] = []
    for first_rank in range(k):
        num_comparators_before = sum(map(len, layers))
        wires_of: dict[int, list[int]] = {}
        for wire in range(n):
            wires_of.setdefault(bound[wire], []).append(wire)
        for rank in range(k - 1, first_rank - 1, -1):  # bounds rise: wires that move are not met again
            wires = wires_of.get(rank, [])
            num_layers = (len(wires) - 1).bit_length() if wires else 0
            start = max((free_from[wire] for wire in wires), default=0)
            add_splitter_cascade(layers, n, wires, start, num_layers)
            for place, wire in enumerate(wires):
                bound[wire] += 2 ** place.bit_count() - 1  # it lost once for each digit of its place that is 1
                free_from[wire] = start + num_layers
        if sum(map(len, layers)) == num_comparators_before:
            break
    return Network(n, k, without_empty_layers(layers))


def add_splitter_cascade(
    layers: list[list[tuple[int, int]]], n: int, wires: Sequence[int], start: int, num_layers: int
) -> None:
    """Add a cascade over some of n wires to the layers from `start` on: num_layers of them, of halving strides."""
    while len(layers) < start + num_layers:
        layers.append([])
    for i in range(num_layers):
        stride = 2 ** (num_layers - 1 - i)
        for place in range(len(wires) - stride):
            if not place & stride:
                # the construction counts wires from the top, the network from the bottom
                layers[start + i].append((n - 1 - wires[place + stride], n - 1 - wires[place]))


CONSTRUCTIONS: dict[str, Callable[..., Network]] = {
    "odd_even": odd_even,
    "bitonic": bitonic,
    "splitter_selection": splitter_selection,
}


class Table(NamedTuple):
    """The comparators of a network, as tensors.

    Attributes:
        comparators: the wires hi and the wires lo, (2, C), layer by layer.
        layer_sizes: how many there are in each layer.
    """

    comparators: Tensor
    layer_sizes: list[int]


def tabulate(network: Network, device: str = "cpu") -> Table:
    """Return the comparators of a network; those without a path to the output wires cost time, and are left out."""
    layers = network.pruned().layers
    lower: list[int] = []
    higher: list[int] = []
    for layer in layers:
        for lo, hi in layer:
            lower.append(lo)
            higher.append(hi)
    with ordinary_tensors():
        comparators = torch.tensor([higher, lower], dtype=torch.int64, device=device)
    return Table(mark_static(comparators), [len(layer) for layer in layers])


@lru_cache(maxsize=32)
def find_table(construction: str, n: int, k: int, device: str) -> Table:
    """Return the comparators of a construction, built once for these numbers of scores and ranks."""
    return tabulate(CONSTRUCTIONS[construction](n, k), device)


# A network is built while a graph is traced, not in the graph.


@mark_constant
def find_comparators(construction: str, n: int, k: int, device: str) -> Tensor:
    """Return the wires of `find_table`, in a form that torch.compile takes as a constant."""
    return find_table(construction, n, k, device).comparators


@mark_constant
def find_layer_sizes(construction: str, n: int, k: int) -> str:
    """Return the sizes of `find_table`, in a form that torch.compile takes as a constant."""
    return " ".join(map(str, find_table(construction, n, k, "cpu").layer_sizes))
