"""New heads on frozen embeddings: one linear layer as published, hidden layers, relu and dropout by choice.

    model = head(2048, 1000)                              # an ordinary module: embeddings -> logits
    stack = HeadStack([head(2048, 1000) for _ in seeds])  # several heads, trained at once
    logits = stack(embeddings)                            # (heads, batch, num_classes)

The heads of a stack share nothing: each one's logits and gradients are those that it has alone. What is shared is
the cost of reading the embeddings, and of launching each operation once instead of once per head.

A loss that keeps m of n scores (m 16 of 1000, say) has a gradient of m entries per sample. On a CPU the last layer's
backward pass looks for that, and adds the few rows that count in place of a product over all of them.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

DROPOUT = 0.5  # PyTorch's default, as published
# Share of a gradient's entries up to which sums of rows are faster than a product. Measured on one and two cores with
# 500 x 2048 -> 1000: with 16 entries per sample they take a sixth of its time, with 200 as long, in bfloat16 with 120.
FEW = 1 / 8


def head(
    embedding_dim: int,
    num_classes: int,
    hidden_dims: Sequence[int] = (),
    *,
    apply_relu: bool = False,
    apply_dropout: bool = False,
) -> nn.Sequential:
    """A freshly initialised head: embeddings (batch, embedding_dim) -> logits (batch, num_classes).

    Linear layers with PyTorch's default initialisation, drawn from its global generator; a ReLU after each hidden
    one. apply_relu puts a ReLU before the first layer, apply_dropout a dropout of .5 after that, in training mode
    (names and places as in the official script). Raises ValueError for sizes below 1.
    """
    sizes = [embedding_dim, *hidden_dims, num_classes]
    if min(sizes) < 1:
        raise ValueError(f"embedding_dim, hidden_dims and num_classes must be at least 1, got {sizes}")
    layers: list[nn.Module] = []
    if apply_relu:
        layers.append(nn.ReLU())
    if apply_dropout:
        layers.append(nn.Dropout(DROPOUT))
    for number, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        if number > 0:
            layers.append(nn.ReLU())
        layers.append(nn.Linear(inputs, outputs))
    return nn.Sequential(*layers)


class HeadStack(nn.Module):
    """S heads of one shape as one module. `parameters()` are the heads' own, stacked: (S, ...)."""

    def __init__(self, heads: Sequence[nn.Sequential]) -> None:
        """Copy the weights of `heads`, built by `head` with the same arguments."""
        super().__init__()
        first = heads[0]
        self.num_heads = len(heads)
        self.apply_relu = isinstance(first[0], nn.ReLU)
        self.apply_dropout = any(isinstance(layer, nn.Dropout) for layer in first)
        # Names of a head's own parameters, "0.weight" say, in the order of the layers.
        self.names = [name for name, _ in first.named_parameters()]
        states = [each.state_dict() for each in heads]
        stacked = [torch.stack([state[name] for state in states]) for name in self.names]
        self.weights = nn.ParameterList(stacked[0::2])  # each (S, outputs, inputs)
        self.biases = nn.ParameterList(stacked[1::2])  # each (S, outputs)

    def forward(self, embeddings: Tensor, kept: Tensor | None = None) -> Tensor:
        """Logits (S, batch, num_classes) of embeddings (batch, d), shared by the heads, or (S, batch, d).

        Of shared embeddings they may lie in memory in the order batch, S, num_classes.

        kept: the mask of `dropout_mask`, for training; without it nothing is dropped.
        """
        activations = embeddings.relu() if self.apply_relu else embeddings
        if kept is not None:
            activations = activations * kept / (1 - DROPOUT)  # (S, batch, d)
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases)):
            if number > 0:
                activations = activations.relu()
            # Looking at a gradient would make the host wait for a GPU, and break a compiled graph.
            looks = (
                number == len(self.weights) - 1 and weight.device.type == "cpu" and not torch.compiler.is_compiling()
            )
            product = _LastProduct.apply if looks else _product
            activations = product(activations, weight, bias)  # (S, batch, outputs)
        return activations

    def dropout_mask(self, batch: int, seeds: Sequence[int], step: int) -> Tensor | None:
        """The inputs that each head keeps, (S, batch, d) bool, or None without dropout.

        A function of the head's own seed and the step alone: neither a resumed run nor the company of other heads
        changes it.
        """
        if not self.apply_dropout:
            return None
        weight = self.weights[0]
        masks = []
        for seed in seeds:
            generator = torch.Generator(weight.device).manual_seed((seed << 31) + step)
            masks.append(torch.rand(batch, weight.shape[2], generator=generator, device=weight.device) >= DROPOUT)
        return torch.stack(masks)

    def state_of(self, number: int) -> dict[str, Tensor]:
        """The state dict of one head, a copy, as an ordinary `head` loads it."""
        return {name: parameter[number].detach().clone() for name, parameter in zip(self.names, self._in_order())}

    def optimizer_state_of(self, optimizer: torch.optim.Optimizer, number: int) -> dict[str, dict[str, Tensor]]:
        """One head's part of the state of an optimizer over this stack's parameters, a copy, by parameter name."""
        return {
            name: {
                # What has a number per weight is stacked like the weights; a count of steps is common to all.
                key: (value[number] if value.dim() else value).clone()
                for key, value in optimizer.state[parameter].items()
            }
            for name, parameter in zip(self.names, self._in_order())
        }

    def load_optimizer_states(
        self, optimizer: torch.optim.Optimizer, states: Sequence[Mapping[str, Mapping[str, Tensor]]]
    ) -> None:
        """Put the parts that `optimizer_state_of` took back together, one for each head, in the heads' order."""
        for name, parameter in zip(self.names, self._in_order()):
            parts = [state[name] for state in states]
            optimizer.state[parameter] = {
                key: torch.stack([part[key] for part in parts]).to(parameter.device)
                if value.dim()
                else value.to(parameter.device if optimizer.defaults.get("fused") else "cpu")
                for key, value in parts[0].items()
            }

    def _in_order(self) -> list[nn.Parameter]:
        """The stacked parameters in the order of `names`."""
        return [parameter for pair in zip(self.weights, self.biases) for parameter in pair]


def _product(activations: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Linear layers (S, batch, outputs) of activations (batch, inputs), shared, or (S, batch, inputs).

    weight (S, outputs, inputs), bias (S, outputs).
    """
    if activations.dim() == 3:
        return torch.baddbmm(bias[:, None], activations, weight.mT)
    # What the heads share is multiplied by all their weights at once: one product is faster than a batch.
    wide = torch.addmm(bias.flatten(), activations, weight.flatten(0, 1).T)  # (batch, S * outputs)
    return wide.unflatten(1, bias.shape).transpose(0, 1)


class _LastProduct(torch.autograd.Function):
    """`_product`, whose backward pass looks at its gradient: few entries that are not zero are summed row by row.

    Sums and products differ by rounding. NaN is not zero, so that it comes through.
    """

    @staticmethod
    def forward(activations: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return _product(activations, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of activations, weight and bias, given that of the outputs, (S, batch, outputs)."""
        activations, weight = ctx.saved_tensors
        # Under autocast the outputs and their gradient are bfloat16, and so were the factors of the product.
        activations = activations.to(gradient.dtype)
        of_activations = of_weight = None
        # Heads are told apart: one loss may reach few entries, another's all. Where a graph of this pass is asked for,
        # for a second derivative, all of it is products.
        looks = not torch.is_grad_enabled()
        few = [looks and int(each.count_nonzero()) <= FEW * each.numel() for each in gradient]
        entries = _entries(gradient, few) if any(few) else None
        if ctx.needs_input_grad[0]:
            weight = weight.to(gradient.dtype)
            of_activations = _gradient_of_activations(gradient, activations, weight, entries if all(few) else None)
        if ctx.needs_input_grad[1]:
            of_weight = _gradient_of_weight(gradient, activations, entries, few)
        of_bias = gradient.sum(1) if ctx.needs_input_grad[2] else None
        return of_activations, of_weight, of_bias


Entries = tuple[Tensor, Tensor, Tensor, Tensor]  # of a gradient: head, sample, output, all (E,) int64, and value (E,)


def _entries(gradient: Tensor, few: Sequence[bool]) -> Entries:
    """The entries of a gradient (S, batch, outputs) that are not zero, of the heads that have few."""
    heads = torch.tensor([number for number, each in enumerate(few) if each])
    gradient = gradient if all(few) else gradient[heads]
    head, sample, output = gradient.nonzero(as_tuple=True)
    return heads[head], sample, output, gradient[head, sample, output]


def _gradient_of_weight(gradient: Tensor, activations: Tensor, entries: Entries | None, few: Sequence[bool]) -> Tensor:
    """(S, outputs, inputs): per head gradient^T activations, by the entries of the heads that have few.

    gradient (S, batch, outputs); activations (batch, inputs) or (S, batch, inputs).
    """
    num_heads, batch, outputs = gradient.shape
    shared = activations.dim() == 2
    if entries is None:
        if not shared:
            return gradient.mT @ activations
        wide = gradient.transpose(0, 1).flatten(1)  # (batch, S * outputs), as it lies in memory
        return (wide.T @ activations).unflatten(0, (num_heads, outputs))
    head, sample, output, value = entries
    row = sample if shared else head * batch + sample
    sums = _sum_rows(activations.flatten(0, -2), row, value, head * outputs + output, num_heads * outputs)
    sums = sums.unflatten(0, (num_heads, outputs))
    for number in [number for number, each in enumerate(few) if not each]:
        torch.mm(gradient[number].T, activations if shared else activations[number], out=sums[number])
    return sums


def _gradient_of_activations(gradient: Tensor, activations: Tensor, weight: Tensor, entries: Entries | None) -> Tensor:
    """As activations, (batch, inputs) or (S, batch, inputs): gradient weight, summed over heads that share them.

    gradient (S, batch, outputs); weight (S, outputs, inputs).
    """
    _, batch, outputs = gradient.shape
    shared = activations.dim() == 2
    if entries is None:
        return gradient.transpose(0, 1).flatten(1) @ weight.flatten(0, 1) if shared else gradient @ weight
    head, sample, output, value = entries
    row = sample if shared else head * batch + sample
    sums = _sum_rows(weight.flatten(0, 1), head * outputs + output, value, row, activations.shape[:-1].numel())
    return sums.view_as(activations)


def _sum_rows(table: Tensor, row: Tensor, factor: Tensor, place: Tensor, num_places: int) -> Tensor:
    """(num_places, d): at each place the sum of its entries' rows of the table (R, d), each times its factor.

    row, factor, place (E,). The order of the sum is that of the entries: it is the same each time, on any number of
    threads.
    """
    place, order = place.sort(stable=True)
    begin = torch.searchsorted(place, torch.arange(num_places))  # (num_places,)
    # Of the ways to sum rows the fastest: a sparse CSR product takes 1.5 to 4 times as long, index_add 30 times.
    return embedding_bag(row[order], table, begin, mode="sum", per_sample_weights=factor[order])
