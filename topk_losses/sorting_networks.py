"""Relaxed sorting and selection networks (Petersen et al. 2021, 2022), evaluated for the true class alone.

With a, b the values on the lanes lo, hi of a comparator, d = a - b and swap = sigmoid family(d), the probability that
they are out of order, the relaxed comparator leaves a - swap d on lane lo and b + swap d on lane hi: where they are
clearly in order nothing is added and nothing rounded. Two channels run through the same comparators: the scores, from
which swap is taken, and the mass of the true class (its one-hot), which ends as P[1..k, y] on the top lanes.
"""

from typing import Any

import torch
from torch import Tensor

from topk_losses.backend import use_numba, use_triton
from topk_losses.checks import check_choice, check_positive
from topk_losses.distributions import DISTRIBUTIONS, Distribution
from topk_losses.networks import Network, comparator_tiles
from topk_losses.operator import TopKOperator, class_mass, refuse_double_backward

# Slopes that are computed in one call: as many as the layers of a small network have, few beside those of a large one.
SLOPES_AT_ONCE = 2**16
# Comparators that a Triton program takes at a time, at most: 4 for each thread of 8 warps.
WIDEST_TILE = 1024


def _groups(sizes: list[int]) -> list[list[int]]:
    """Divide the layers 0, 1, ... into runs of at most SLOPES_AT_ONCE comparators times samples, or of one layer."""
    groups, room = [], 0
    for i, size in enumerate(sizes):
        if not groups or size > room:
            groups.append([])
            room = SLOPES_AT_ONCE
        groups[-1].append(i)
        room -= size
    return groups


class _CarryMass(torch.autograd.Function):
    """Scores and mass through the layers; the mass on the output lanes comes out.

    Lanes are rows, so that gathering a lane copies one contiguous row of 2 * batch values: the score channel, then the
    mass channel. Saved for the backward pass: d and swap of each layer.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        mass: Tensor,
        layers: tuple[Tensor, ...],
        output_lanes: Tensor,
        distribution: Distribution,
        beta: float,
        art_lambda: float,
    ) -> Tensor:
        x = torch.stack([logits.T, mass.T], dim=1)  # (n, 2, batch)
        saved = []
        for lanes in layers:  # (2c,): the lanes hi, then the lanes lo
            pair = x.index_select(0, lanes)
            b, a = pair.chunk(2)  # (c, 2, batch) each
            d = a - b
            swap = distribution.alpha(d[:, 0], beta, art_lambda)  # (c, batch)
            both = swap.unsqueeze(1)  # (c, 1, batch), for either channel
            b.addcmul_(d, both)
            a.addcmul_(d, both, value=-1)
            x.index_copy_(0, lanes, pair)
            saved += [d, swap]
        column = x.index_select(0, output_lanes)[:, 1].T  # (batch, k)
        ctx.save_for_backward(column, *layers, output_lanes, *saved)
        ctx.shape, ctx.num_layers = logits.shape, len(layers)
        ctx.distribution, ctx.beta, ctx.art_lambda = distribution, beta, art_lambda
        return column

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        column, *tensors = ctx.saved_tensors
        layers, (output_lanes, *saved) = tensors[: ctx.num_layers], tensors[ctx.num_layers :]
        batch, n = ctx.shape
        with torch.no_grad():
            g = grad.new_zeros(n, 2, batch)
            g[output_lanes, 1] = grad.T
            for group in reversed(_groups([swap.numel() for swap in saved[1::2]])):
                swaps = [saved[2 * i + 1] for i in group]
                scores = torch.cat([saved[2 * i][:, 0] for i in group])  # (sum of c, batch)
                slope = ctx.distribution.slope(scores, torch.cat(swaps), ctx.beta, ctx.art_lambda)
                slopes = slope.split([len(swap) for swap in swaps])  # (c, batch) each
                for i, swap, slope in zip(reversed(group), reversed(swaps), reversed(slopes)):
                    d = saved[2 * i]  # (c, 2, batch)
                    pair = g.index_select(0, layers[i])
                    g_hi, g_lo = pair.chunk(2)  # (c, 2, batch) each
                    g_moved = g_hi - g_lo
                    g_d = g_moved * swap.unsqueeze(1)  # (c, 2, batch)
                    g_swap = (g_moved * d).sum(1)  # (c, batch)
                    g_d[:, 0].addcmul_(slope, g_swap)
                    g_hi -= g_d
                    g_lo += g_d
                    g.index_copy_(0, layers[i], pair)
        grad_logits = refuse_double_backward(g[:, 0].T, grad, column)
        grad_mass = refuse_double_backward(g[:, 1].T, grad, column) if ctx.needs_input_grad[1] else None
        return grad_logits, grad_mass, None, None, None, None, None


class _Swap(torch.autograd.Function):
    """swap = sigmoid family(d), elementwise, with the slope of topk_losses.distributions as its derivative."""

    @staticmethod
    def forward(ctx: Any, d: Tensor, distribution: Distribution, beta: float, art_lambda: float) -> Tensor:
        swap = distribution.alpha(d, beta, art_lambda)
        ctx.save_for_backward(d, swap)
        ctx.distribution, ctx.beta, ctx.art_lambda = distribution, beta, art_lambda
        return swap

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        d, swap = ctx.saved_tensors
        with torch.no_grad():
            gradient = grad * ctx.distribution.slope(d, swap, ctx.beta, ctx.art_lambda)
        return refuse_double_backward(gradient, grad, swap), None, None, None


class RelaxedNetwork(TopKOperator):
    """A comparator network with comparators relaxed by one of the six sigmoid families.

    network: from topk_losses.networks (`odd_even`, `bitonic`, `splitter_selection`), for a fixed n and k.
    inverse_temperature: beta > 0, larger = closer to the hard network; default 1, as published for ImageNet
    (CIFAR-100: .5). distribution: default "logistic_phi" with art_lambda .5, as published
    (the other five have no art_lambda).
    Raises ValueError for an unknown distribution (naming the nearest), beta <= 0, art_lambda outside [0, 1).
    Source: Petersen et al. 2022, section 3.3; backward pass: design of this library.
    """

    def __init__(
        self,
        network: Network,
        inverse_temperature: float = 1.0,
        distribution: str = "logistic_phi",
        art_lambda: float | None = None,
    ) -> None:
        super().__init__(network.k)
        self.n = network.n
        self.depth, self.num_comparators = network.depth, network.num_comparators
        self.inverse_temperature = check_positive("inverse_temperature", inverse_temperature)
        self.distribution = check_choice("distribution", distribution, DISTRIBUTIONS)
        self.art_lambda = 0.5 if art_lambda is None else float(art_lambda)
        if not 0 <= self.art_lambda < 1:
            raise ValueError(f"art_lambda must lie in [0, 1), got {art_lambda:g}")
        # Comparators without a path to the output lanes cost time and change nothing.
        layers = network.pruned().layers
        # One buffer for all layers moves between devices as one: (2, C), the lanes hi and the lanes lo.
        self.register_buffer("comparators", torch.cat([layer.flip(0) for layer in layers], dim=1), False)
        self.register_buffer("output_lanes", network.output_lanes, False)
        self.layer_sizes = [layer.shape[1] for layer in layers]
        widest = max(layer.shape[1] for layer in layers)
        tiles, first = comparator_tiles(layers, min(WIDEST_TILE, 2 ** (widest - 1).bit_length()))
        self.register_buffer("tiles", tiles, False)
        self.register_buffer("tile_first", first, False)

    def extra_repr(self) -> str:
        """The configuration, for printing."""
        return (
            f"n={self.n}, k={self.k}, depth={self.depth}, num_comparators={self.num_comparators}, "
            f"inverse_temperature={self.inverse_temperature:g}, distribution={self.distribution}, "
            f"art_lambda={self.art_lambda:g}"
        )

    def _check_n(self, scores: Tensor) -> None:
        if scores.shape[1] != self.n:
            raise ValueError(f"this network was built for n={self.n} scores, got logits {tuple(scores.shape)}")

    def _layers(self) -> tuple[Tensor, ...]:
        """Per layer of c comparators (2c,): the lanes hi, then the lanes lo."""
        return tuple(layer.flatten() for layer in self.comparators.split(self.layer_sizes, dim=1))

    def _centred(self, scores: Tensor) -> Tensor:
        """Scores less their maximum: a network sees differences only, and a common offset would cost digits."""
        return scores - scores.detach().amax(1, keepdim=True)

    def _rank_probabilities(self, scores: Tensor, labels: Tensor) -> Tensor:
        self._check_n(scores)
        if use_triton(scores):
            from topk_losses.triton_networks import carry_mass

            settings = (self.distribution, self.inverse_temperature, self.art_lambda)
            tiles = (self.tiles, self.tile_first, self.comparators.shape[1])
            return carry_mass(scores, labels, *tiles, self.k, *settings)
        if use_numba(scores):
            from topk_losses import numba_networks

            if numba_networks.has_kernel(self.distribution, self.art_lambda):
                lanes = (self.comparators, self.output_lanes)
                settings = (self.distribution, self.inverse_temperature)
                return numba_networks.carry_mass(scores, labels, *lanes, *settings)
        return _CarryMass.apply(
            self._centred(scores),
            class_mass(labels, scores),
            self._layers(),
            self.output_lanes,
            DISTRIBUTIONS[self.distribution],
            self.inverse_temperature,
            self.art_lambda,
        )

    def _permutation_matrix(self, scores: Tensor) -> Tensor:
        """Bidirectional evaluation (Petersen et al. 2022, section 3.2): scores forward, rows of P backward.

        A relaxed comparator is a symmetric 2 x 2 matrix, so row r of P, starting as the unit vector of its
        output lane, runs through the same comparators in reverse order.
        """
        self._check_n(scores)
        family = DISTRIBUTIONS[self.distribution]
        layers = self._layers()
        x = self._centred(scores).T  # (n, batch)
        swaps = []
        for lanes in layers:
            b, a = x.index_select(0, lanes).chunk(2)  # (c, batch) each
            swap = _Swap.apply(a - b, family, self.inverse_temperature, self.art_lambda)
            moved = swap * (a - b)
            x = x.index_copy(0, lanes, torch.cat([b + moved, a - moved]))
            swaps.append(swap)
        batch = scores.shape[0]
        rows = scores.new_zeros(self.n, self.k)  # (n, k) unit vectors
        rows[self.output_lanes, torch.arange(self.k, device=scores.device)] = 1
        P = rows.unsqueeze(2).expand(-1, -1, batch)  # (n, k, batch)
        for lanes, swap in zip(reversed(layers), reversed(swaps)):
            b, a = P.index_select(0, lanes).chunk(2)  # (c, k, batch) each
            moved = swap.unsqueeze(1) * (a - b)
            P = P.index_copy(0, lanes, torch.cat([b + moved, a - moved]))
        return P.permute(2, 1, 0)  # (batch, k, n)
