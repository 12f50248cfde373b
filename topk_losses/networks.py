"""Sorting and selection networks, relaxed (Petersen et al. 2021, 2022) and evaluated for the true class alone.

A network is a list of layers, a layer a list of comparators (lo, hi) on disjoint wires: the smaller value goes
to wire lo, the larger to wire hi. After the last layer wire n - r holds rank r for r = 1..k. Wire numbers and
the placing of the comparators are those of difftopk 0.2.0, so that relaxed values agree with it (`bitonic` says where
they can't).

A relaxed comparator puts its values in order and then mixes them, the more the closer they are (sigmoids.py). Two
channels run through the same comparators: the scores, from which the shares are taken, and the mass of the true class
(its one-hot), which ends as P[1..k, y] on the top wires.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._python_dispatch import _disable_current_modes

from topk_losses.checks import check_integer, check_k, static
from topk_losses.kernels import find_kernel
from topk_losses.operator import Beta, TopKOperator, as_tensor, centered, class_mass, has_masked, is_mass
from topk_losses.sigmoids import check_sigmoid, distance_of_rounding, mixing

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
        return _network(self.n, self.k, reversed(kept))


def _checked(n: SupportsIndex, k: SupportsIndex) -> tuple[int, int]:
    n = check_integer("the number of scores n", n, 1)
    return n, check_k(k, n)


def _network(n: int, k: int, layers: Iterable[Layer]) -> Network:
    return Network(n, k, tuple(tuple(layer) for layer in layers if layer))


@lru_cache(maxsize=8, typed=True)
def odd_even(n: SupportsIndex, k: SupportsIndex) -> Network:
    """Build an odd-even transposition sort: n layers that compare neighbours.

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
    wire_on = [-1] * padding + list(range(n))  # of the full network's wires; -1: none
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
                lo, hi = wire_on[on_lo], wire_on[on_hi]
                if lo >= 0 and hi >= 0:
                    layers[-1].append((lo, hi))
                elif lo >= 0 and not missing_stay:  # a wire whose partner is missing is the larger of the two
                    wire_on[on_hi], wire_on[on_lo] = lo, -1
    # Wires are named by the place where they end, so that wire n - r holds rank r.
    name = {wire: place for place, wire in enumerate(wire_on[padding:])}
    return _network(n, k, ([(name[lo], name[hi]) for lo, hi in layer] for layer in layers))


@lru_cache(maxsize=8, typed=True)
def splitter_selection(n: SupportsIndex, k: SupportsIndex) -> Network:
    """Splitter selection network (Petersen et al. 2022, section 3.3): O(log n) layers for k much below n.

    Each wire carries a lower bound on the number of wires above it. A splitter cascade over the wires of equal
    bound halves its stride layer by layer; a wire that lost in j of its layers has at least 2^j - 1 of the
    cascade's wires above it, which raises its bound. Wires whose bound reaches k are out. The cascades repeat,
    each as early as its wires are free, until the top k are ordered. Raises ValueError unless 1 <= k <= n.
    """
    n, k = _checked(n, k)
    bound = [0] * n  # of wires known to be above each
    free_from = [0] * n  # first layer in which the wire is free
    layers: list[list[tuple[int, int]]] = []
    for first_rank in range(k):
        before = len(layers), sum(map(len, layers))
        wires_of: dict[int, list[int]] = {}
        for wire in range(n):
            wires_of.setdefault(bound[wire], []).append(wire)
        for rank in range(k - 1, first_rank - 1, -1):  # bounds rise: wires that move are not met again
            wires = wires_of.get(rank, [])
            num_layers = (len(wires) - 1).bit_length() if wires else 0
            start = max((free_from[wire] for wire in wires), default=0)
            layers.extend([] for _ in range(start + num_layers - len(layers)))
            for i in range(num_layers):
                stride = 2 ** (num_layers - 1 - i)
                winners = [place for place in range(len(wires) - stride) if not place & stride]
                # the construction counts wires from the top, the network from the bottom
                layers[start + i] += [(n - 1 - wires[place + stride], n - 1 - wires[place]) for place in winners]
            for place, wire in enumerate(wires):
                bound[wire] += 2 ** place.bit_count() - 1  # it lost once for each digit of its place that is 1
                free_from[wire] = start + num_layers
        if (len(layers), sum(map(len, layers))) == before:
            break
    return _network(n, k, layers)


Tables = tuple[Tensor, list[int]]


@lru_cache(maxsize=32)
def _tables(construct: Callable[..., Network], n: int, k: int, device: str) -> Tables:
    """The comparators of a network, (2, C): the wires hi and the wires lo, and how many there are in each layer.

    Comparators without a path to the output wires cost time and change nothing: they are left out.
    """
    return _network_tables(construct(n, k), device)


def _network_tables(network: Network, device: str = "cpu") -> Tables:
    layers = network.pruned().layers
    wires = [[pair[side] for layer in layers for pair in layer] for side in (1, 0)]
    # a first call may be one for inference, or of torch.export, whose tensors are fake
    with torch.inference_mode(False), _disable_current_modes():
        return static(torch.tensor(wires, dtype=torch.int64, device=device)), [len(layer) for layer in layers]


CONSTRUCTIONS: dict[str, Callable[..., Network]] = {
    build.__name__: build for build in (odd_even, bitonic, splitter_selection)
}


def _comparators(construction: str, n: int, k: int, device: str) -> Tensor:
    return _tables(CONSTRUCTIONS[construction], n, k, device)[0]


def _layer_sizes(construction: str, n: int, k: int) -> str:  # a form that torch.compile takes as a constant
    return " ".join(map(str, _tables(CONSTRUCTIONS[construction], n, k, "cpu")[1]))


# What torch.compiler.assume_constant_result sets, without importing the compiler, which takes a second: a network is
# built while a graph is traced, not in the graph.
_comparators._dynamo_marked_constant = True  # type: ignore[attr-defined]
_layer_sizes._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _compare(
    x: Tensor, wires: Tensor, distribution: str, beta: float | Tensor, art_lambda: float | None
) -> tuple[Tensor, Tensor]:
    """Tell which comparators of a layer are out of order, and the share that they mix: (c, rows) each.

    x (n, rows): the scores less their maximum. wires (2c,): the wires hi, then lo.
    """
    b, a = x.index_select(0, wires).chunk(2)  # (c, rows) each
    d = a - b
    rounding = distance_of_rounding(x.dtype) * torch.maximum(a.abs(), b.abs())
    d = torch.where(d.abs() <= rounding, d - d.detach(), d)  # equal, with the derivative of d
    out = d > 0
    # e = |d|, but at 0 with a derivative, for which sigmoid(-e) has that of sigmoid(d)
    return out, mixing(torch.where(out, d, -d), distribution, beta, art_lambda)


def _exchange(x: Tensor, wires: Tensor, out: Tensor, mix: Tensor) -> Tensor:
    """Apply a layer to x (n, channels, rows): a symmetric map of the two wires of each comparator."""
    b, a = x.index_select(0, wires).chunk(2)  # (c, channels, rows) each, on the wires hi and lo
    out, mix = out.unsqueeze(1), mix.unsqueeze(1)
    hi, lo = torch.where(out, a, b), torch.where(out, b, a)
    moved = mix * (hi - lo)
    return x.index_copy(0, wires, torch.cat([hi - moved, lo + moved]))


def carry_mass(
    scores: Tensor, target: Tensor, beta: Tensor, comparators: Tensor, layer_sizes: list[int], k: int,
    distribution: str, art_lambda: float | None,
) -> list[Tensor]:  # fmt: skip
    """Compute what the kernel computes, in any precision: P of the target, (rows, k), by carrying its mass along.

    scores (rows, n); target: labels (rows,) or a mass (rows, n); comparators (2, C): the wires hi and the wires lo.
    """
    x = torch.stack([centered(scores).T, class_mass(scores, target).T], dim=1)  # (n, 2, rows)
    for layer in comparators.split(layer_sizes, dim=1):
        wires = layer.flatten()
        x = _exchange(x, wires, *_compare(x[:, 0], wires, distribution, beta, art_lambda))
    return [x[x.shape[0] - k :, 1].flip(0).T]


class RelaxedNetwork(TopKOperator):
    """Comparator network, relaxed by one of six sigmoid functions (Petersen et al. 2022, section 3.3).

    Args:
        network: a Network, for its n and k; or `odd_even`, `bitonic` or `splitter_selection`, which build the network
            for the n and k of each call.
        inverse_temperature: above 0 (default: 1, as published for ImageNet; 0.5 for CIFAR-100).
        distribution: one of DISTRIBUTIONS (default: "logistic_phi").
        art_lambda: lambda of logistic_phi, in [0, 1) (default: 0.5, as published).
        k: number of ranks, where `network` builds the network.

    Raises:
        ValueError: settings out of range, or an art_lambda without logistic_phi.
    """

    settings = ("n", *TopKOperator.settings, "distribution", "art_lambda")

    def __init__(
        self, network: Network | Callable[..., Network], inverse_temperature: Beta = None,
        distribution: str | None = None, art_lambda: float | None = None, k: SupportsIndex = 1,
    ) -> None:  # fmt: skip
        super().__init__(network.k if isinstance(network, Network) else k, inverse_temperature)
        self.n = network.n if isinstance(network, Network) else None
        self.network = network
        # The name of the function, which torch.compile of PyTorch 2.11 cannot read from the function.
        self._construction = "" if isinstance(network, Network) else network.__name__
        self.distribution, self.art_lambda = check_sigmoid(distribution, art_lambda)
        self._fixed_tables = _network_tables(network) if isinstance(network, Network) else None

    def _tables(self, scores: Tensor, k: int) -> Tables:
        """The comparators where the scores are, (2, C), and the sizes of the layers."""
        if self._fixed_tables is None:
            construct: Any = self.network
            device = str(scores.device)
            if not torch.compiler.is_compiling():
                return _tables(construct, scores.shape[1], k, device)
            # constants, in place of the compiler's symbols
            n = range(scores.shape[1]).stop
            name = self._construction
            return _comparators(name, n, k, device), [int(size) for size in _layer_sizes(name, n, k).split()]
        if scores.shape[1] != self.n:  # a kernel would read what does not exist
            raise ValueError(f"this network was built for n={self.n} scores, got {scores.shape[1]}")
        if k > self.k:
            raise ValueError(f"this network was built for the ranks 1 to {self.k}, got {k}; build it for k={k}")
        comparators, sizes = self._fixed_tables
        return comparators.to(scores.device), sizes

    def _column(self, scores: Tensor, target: Tensor, k: int, beta: Any, generator: Any = None) -> Tensor:
        comparators, sizes = self._tables(scores, k)
        carry = find_kernel("carry_mass", scores, beta, target) if sizes else None
        settings = (comparators, sizes, k, self.distribution, self.art_lambda)
        return (carry or carry_mass)(scores, target, as_tensor(beta, scores), *settings)[0]

    def within(self, scores: Tensor, target: Any, ks: Sequence[int], beta: Any, generator: Any = None) -> Tensor:
        """Compute P(rank <= k) as every operator does, by a network of as many wires as a row has live classes.

        Rows of equal number go together. A row whose true class is masked out, or with less than k classes, keeps all
        its wires, and so do all rows where their numbers would have to be waited for.
        """
        if self.n is not None or not has_masked(scores):
            return super().within(scores, target, ks, beta)
        n, out = scores.shape[1], scores == -torch.inf  # (rows, n)
        keeps_all = (~out).sum(1, keepdim=True) < max(ks, default=1)  # (rows, 1)
        if target is not None and not is_mass(target):
            keeps_all = keeps_all | out.gather(1, target.unsqueeze(1))
        out = out & ~keeps_all
        order = out.int().argsort(dim=1, stable=True)  # (rows, n), the live classes first
        place, number = order.argsort(dim=1), n - out.sum(1)  # (rows, n), (rows,)
        scores = scores.gather(1, order)
        if target is not None:
            target = target.gather(1, order) if is_mass(target) else place.gather(1, target.unsqueeze(1)).squeeze(1)
        result = scores.new_zeros(len(scores), len(ks), *([n] if target is None else []))
        for count in number.unique().tolist():
            rows = (number == count).nonzero().squeeze(1)
            own: Any = None if target is None else target[rows]
            own = own[:, :count] if is_mass(own) else own
            found = super().within(scores[rows, :count], own, ks, beta)
            result = result.index_copy(0, rows, pad(found, (0, n - count)) if target is None else found)
        return result.gather(2, place.unsqueeze(1).expand_as(result)) if target is None else result

    def _matrix(self, scores: Tensor, k: int, beta: Any, generator: Any = None) -> Tensor:
        """Evaluate in both directions (Petersen et al. 2022, section 3.2): scores forward, rows of P backward.

        A relaxed comparator is a symmetric 2 x 2 matrix, so that row r of P, at first the unit vector of its output
        wire, runs through the same comparators in reverse order.
        """
        comparators, sizes = self._tables(scores, k)
        layers = [layer.flatten() for layer in comparators.split(sizes, dim=1)]
        n, x = scores.shape[1], centered(scores).T.unsqueeze(1)  # (n, 1, rows)
        compared = []
        for wires in layers:
            compared.append(_compare(x[:, 0], wires, self.distribution, beta, self.art_lambda))
            x = _exchange(x, wires, *compared[-1])
        units = torch.eye(n, dtype=scores.dtype, device=scores.device)[:, n - k :].flip(1)  # (n, k)
        P = units.unsqueeze(2).expand(-1, -1, scores.shape[0])  # (n, k, rows)
        for wires, (out, mix) in zip(reversed(layers), reversed(compared)):
            P = _exchange(P, wires, out, mix)
        return P.permute(2, 1, 0)  # (rows, k, n)
