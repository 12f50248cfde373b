"""New heads on frozen embeddings: one linear layer as published, hidden layers, relu and dropout by choice.

    model = head(2048, 1000)                              # an ordinary module: embeddings -> logits
    stack = HeadStack([head(2048, 1000) for _ in seeds])  # several heads, trained at once
    logits = stack(embeddings)                            # (heads, batch, num_classes)

The heads of a stack share nothing: each one's logits and gradients are those that it has alone. What is shared is
the cost of reading the embeddings, and of launching each operation once instead of once per head.
"""

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

DROPOUT = 0.5  # PyTorch's default, as published


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
            if activations.dim() == 2:
                # What the heads share is multiplied by all their weights at once: one product is faster than a batch.
                wide = torch.addmm(bias.flatten(), activations, weight.flatten(0, 1).T)  # (batch, S * outputs)
                activations = wide.unflatten(1, bias.shape).transpose(0, 1)  # (S, batch, outputs)
            else:
                activations = torch.baddbmm(bias[:, None], activations, weight.mT)  # (S, batch, outputs)
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
