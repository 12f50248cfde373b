"""New heads on frozen embeddings: one linear layer as published, hidden layers, relu and dropout by choice.

A loss that keeps m of n scores (such as 16 of 1000) has a gradient of m entries per sample. On a CPU the last layer's
backward pass checks for this, and adds the few rows that count instead of multiplying all of them.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag, linear

DROPOUT = 0.5  # PyTorch's default, as published
# Share of a gradient's entries up to which sums of rows are faster than a product. Measured on one and two cores with
# 500 x 2048 -> 1000: with 16 entries per sample they take a sixth of its time, with 200 as long, in bfloat16 with 120.
FEW = 1 / 8


class Head(nn.Sequential):
    """The layers that `head` makes."""

    def forward(self, embeddings: Tensor, kept: Tensor | None = None) -> Tensor:
        """Logits (batch, num_classes) of embeddings (batch, d).

        kept: the inputs that dropout keeps, (batch, d) bool; without it they are drawn, in training.
        """
        for layer in self:
            if isinstance(layer, nn.Dropout) and kept is not None:
                embeddings = embeddings * kept / (1 - DROPOUT)
            else:
                embeddings = layer(embeddings)
        return embeddings

    def dropout_mask(self, batch: int, seed: int, step: int) -> Tensor | None:
        """The inputs that are kept, (batch, d) bool: a function of seed and step; None without dropout."""
        if not any(isinstance(layer, nn.Dropout) for layer in self):
            return None
        weight = next(self.parameters())
        # PyTorch's CPU generator takes 32 bits of its seed, in which a sum of both numbers would not tell them apart.
        state = np.random.SeedSequence((seed, step)).generate_state(1)
        generator = torch.Generator(weight.device).manual_seed(int(state[0]))
        return torch.rand(batch, weight.shape[1], generator=generator, device=weight.device) >= DROPOUT


def head(
    embedding_dim: int,
    num_classes: int,
    hidden_dims: Sequence[int] = (),
    *,
    apply_relu: bool = False,
    apply_dropout: bool = False,
) -> Head:
    """A freshly initialised head: embeddings (batch, embedding_dim) -> logits (batch, num_classes).

    Linear layers with PyTorch's default initialisation, drawn from its global generator; a ReLU after each hidden
    one. apply_relu puts a ReLU before the first layer, apply_dropout a dropout of .5 after that, in training mode
    (names and places as in the official script).
    """
    sizes = [embedding_dim, *hidden_dims, num_classes]
    layers: list[nn.Module] = []
    if apply_relu:
        layers.append(nn.ReLU())
    if apply_dropout:
        layers.append(nn.Dropout(DROPOUT))
    for inputs, outputs in itertools.pairwise(sizes[:-1]):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return Head(*layers, LastLinear(*sizes[-2:]))


class LastLinear(nn.Linear):
    """A linear layer whose backward pass on a CPU is faster where the gradient has few entries."""

    def forward(self, activations: Tensor) -> Tensor:
        """(batch, outputs) of activations (batch, inputs)."""
        # Counting a gradient's entries would make the host wait for a GPU, and break a compiled graph.
        if activations.device.type == "cpu" and not torch.compiler.is_compiling():
            return _LastProduct.apply(activations, self.weight, self.bias)
        return super().forward(activations)


class _LastProduct(torch.autograd.Function):
    """`linear`, with a backward pass that sums rows if few entries of its gradient are not zero (NaN is not zero)."""

    @staticmethod
    def forward(activations: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear(activations, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of activations, weight and bias from the gradient (batch, outputs) of the outputs."""
        # Under autocast the gradient is bfloat16, as were the factors of the product.
        inputs, weight = (tensor.to(gradient.dtype) for tensor in ctx.saved_tensors)
        # A second derivative needs products throughout.
        few = not torch.is_grad_enabled() and int(gradient.count_nonzero()) <= FEW * gradient.numel()
        if few:
            sample, output = gradient.nonzero(as_tuple=True)  # (E,) each
            value = gradient[sample, output]  # (E,)
        inputs_gradient = None
        weight_gradient = None
        bias_gradient = None
        if ctx.needs_input_grad[0]:
            inputs_gradient = _sum_rows(weight, output, value, sample, len(inputs)) if few else gradient @ weight
        if ctx.needs_input_grad[1]:
            weight_gradient = _sum_rows(inputs, sample, value, output, len(weight)) if few else gradient.T @ inputs
        if ctx.needs_input_grad[2]:
            bias_gradient = gradient.sum(0)
        return inputs_gradient, weight_gradient, bias_gradient


def _sum_rows(table: Tensor, row: Tensor, factor: Tensor, place: Tensor, num_places: int) -> Tensor:
    """Sum rows of the table (R, d) times their factors at each place: (num_places, d).

    row, factor, place (E,). Entries are summed in their order, on any number of threads.
    """
    place, order = place.sort(stable=True)
    begin = torch.searchsorted(place, torch.arange(num_places))  # (num_places,)
    # The fastest way to sum rows: a sparse CSR product takes 1.5 to 4 times as long, index_add 30 times.
    return embedding_bag(row[order], table, begin, mode="sum", per_sample_weights=factor[order])
