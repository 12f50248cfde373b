"""Relaxed sorting and selection networks (Petersen et al. 2021, 2022), evaluated for the true class alone.

With a, b the values on the lanes lo, hi of a comparator, d = b - a and alpha = sigmoid family(d):
min lane b - alpha d, max lane a + alpha d. Two channels run through the same comparators: the scores, from
which alpha is taken, and the mass of the true class (its one-hot), which ends as P[1..k, y] on the top lanes.
"""

from typing import Any

import torch
from torch import Tensor

from topk_losses.checks import check_choice, check_positive
from topk_losses.distributions import DISTRIBUTIONS, Distribution
from topk_losses.networks import Network
from topk_losses.operator import TopKOperator, class_mass, refuse_double_backward


class _CarryMass(torch.autograd.Function):
    """Scores and mass through the layers; the mass on the output lanes comes out.

    Lanes are rows, so that gathering a lane copies one contiguous row of 2 * batch values: the score channel in
    the first half, the mass channel in the second. Saved for the backward pass: d and alpha of each layer.
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
        batch = logits.shape[0]
        x = torch.cat([logits.T, mass.T], dim=1)  # (n, 2 batch)
        saved = []
        for lanes in layers:  # (2c,): the lanes hi, then the lanes lo
            b, a = x.index_select(0, lanes).chunk(2)  # (c, 2 batch) each
            d = b - a
            alpha = distribution.alpha(d[:, :batch], beta, art_lambda)  # (c, batch)
            t = (d.unflatten(1, (2, batch)) * alpha.unsqueeze(1)).flatten(1)  # (c, 2 batch)
            x.index_copy_(0, lanes, torch.cat([a + t, b - t]))
            saved += [d, alpha]
        column = x.index_select(0, output_lanes)[:, batch:].T  # (batch, k)
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
            g = grad.new_zeros(n, 2 * batch)
            g[:, batch:].index_copy_(0, output_lanes, grad.T)
            for i in reversed(range(ctx.num_layers)):
                lanes, d, alpha = layers[i], saved[2 * i], saved[2 * i + 1]
                g_hi, g_lo = g.index_select(0, lanes).chunk(2)  # (c, 2 batch) each
                u = g_hi - g_lo
                g_d = (u.unflatten(1, (2, batch)) * alpha.unsqueeze(1)).flatten(1)  # (c, 2 batch)
                through_alpha = (u * d).unflatten(1, (2, batch)).sum(1)  # (c, batch)
                slope = ctx.distribution.slope(d[:, :batch], alpha, ctx.beta, ctx.art_lambda)
                g_d[:, :batch].addcmul_(slope, through_alpha)
                # b, on lane hi, went to the min lane; a, on lane lo, to the max lane
                g.index_copy_(0, lanes, torch.cat([g_lo + g_d, g_hi - g_d]))
        grad_logits = refuse_double_backward(g[:, :batch].T, grad, column)
        grad_mass = refuse_double_backward(g[:, batch:].T, grad, column) if ctx.needs_input_grad[1] else None
        return grad_logits, grad_mass, None, None, None, None, None


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
        # One buffer for all layers moves between devices as one; per layer the lanes hi, then lo.
        self.register_buffer("lanes", torch.cat([layer.flip(0).flatten() for layer in layers]), False)
        self.register_buffer("output_lanes", network.output_lanes, False)
        self.layer_sizes = [layer.numel() for layer in layers]

    def extra_repr(self) -> str:
        """The configuration, for printing."""
        return (
            f"n={self.n}, k={self.k}, depth={self.depth}, num_comparators={self.num_comparators}, "
            f"inverse_temperature={self.inverse_temperature:g}, distribution={self.distribution}, "
            f"art_lambda={self.art_lambda:g}"
        )

    def _check_width(self, scores: Tensor) -> None:
        if scores.shape[1] != self.n:
            raise ValueError(f"this network was built for n={self.n} scores, got logits {tuple(scores.shape)}")

    def _rank_probabilities(self, scores: Tensor, labels: Tensor) -> Tensor:
        self._check_width(scores)
        return _CarryMass.apply(
            scores,
            class_mass(labels, scores),
            self.lanes.split(self.layer_sizes),
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
        self._check_width(scores)
        sigmoid = DISTRIBUTIONS[self.distribution].alpha
        layers = self.lanes.split(self.layer_sizes)
        x = scores.T  # (n, batch)
        alphas = []
        for lanes in layers:
            b, a = x.index_select(0, lanes).chunk(2)  # (c, batch) each
            alpha = sigmoid(b - a, self.inverse_temperature, self.art_lambda)
            t = alpha * (b - a)
            x = x.index_copy(0, lanes, torch.cat([a + t, b - t]))
            alphas.append(alpha)
        batch = scores.shape[0]
        rows = scores.new_zeros(self.n, self.k)  # (n, k) unit vectors
        rows[self.output_lanes, torch.arange(self.k, device=scores.device)] = 1
        P = rows.unsqueeze(2).expand(-1, -1, batch)  # (n, k, batch)
        for lanes, alpha in zip(reversed(layers), reversed(alphas)):
            b, a = P.index_select(0, lanes).chunk(2)  # (c, k, batch) each
            t = alpha.unsqueeze(1) * (b - a)
            P = P.index_copy(0, lanes, torch.cat([a + t, b - t]))
        return P.permute(2, 1, 0)  # (batch, k, n)
