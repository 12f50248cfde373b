"""Embedding networks for nearest neighbours: the two of Grover et al. 2019, and linear maps."""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from models.heads import head

EMBEDDERS = ("cnn", "preact_resnet18", "linear", "mlp")


def embedder(
    name: str, input_shape: Sequence[int], dim: int | None = None, hidden_dims: Sequence[int] = ()
) -> nn.Module:
    """A freshly initialised network on the CPU: inputs (batch, *input_shape) -> embeddings (batch, d).

    Args:
        name: one of EMBEDDERS; cnn is for MNIST, preact_resnet18 for Fashion-MNIST and CIFAR.
        input_shape: (channels, height, width) of images, which the first two need, or (inputs,).
        dim: d of linear and mlp; cnn has 500, preact_resnet18 has 512.
        hidden_dims: widths of the hidden layers of mlp, at least one.

    Raises:
        ValueError: the network does not take such inputs, or hidden layers.
    """
    if bool(hidden_dims) != (name == "mlp"):
        raise ValueError(f"hidden_dims are those of mlp, which needs at least one; got {list(hidden_dims)} for {name}")
    if name in ("linear", "mlp"):
        return nn.Sequential(nn.Flatten(), *head(math.prod(input_shape), dim, hidden_dims))
    if len(input_shape) != 3:
        raise ValueError(f"{name} takes images, got inputs of shape {tuple(input_shape)}: choose linear or mlp")
    channels, height, width = input_shape
    if name == "cnn":
        return ConvNet(channels, height, width)
    return PreActResNet18(channels)


class ConvNet(nn.Sequential):
    """Two convolutions 5x5, each pooled by 2, and a layer of 500; a ReLU after each, the last one too."""

    dim = 500

    def __init__(self, channels: int, height: int, width: int) -> None:
        pooled_height = ((height - 4) // 2 - 4) // 2
        pooled_width = ((width - 4) // 2 - 4) // 2
        super().__init__(
            nn.Conv2d(channels, 20, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(20, 50, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(50 * pooled_height * pooled_width, self.dim),
            nn.ReLU(),
        )


class PreActBlock(nn.Module):
    """Two 3x3 convolutions, each after batch norm and ReLU, added to the input (He et al. 2016, "Identity mappings").

    Where the shape changes, the input passes a 1x1 convolution, after the first batch norm and ReLU.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut = None
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, maps: Tensor) -> Tensor:
        """(batch, inputs, H, W) -> (batch, outputs, H / stride, W / stride)."""
        active = torch.relu(self.bn1(maps))
        shortcut = maps
        if self.shortcut is not None:
            shortcut = self.shortcut(active)
        return self.conv2(torch.relu(self.bn2(self.conv1(active)))) + shortcut


class PreActResNet18(nn.Sequential):
    """Pre-activation ResNet-18 for 28 to 32 pixels, averaged: no max-pool, no batch norm or ReLU after the last block.

    As published for the kNN classifier, which left out nothing more than the linear layer.
    """

    dim = 512

    def __init__(self, channels: int) -> None:
        widths = [64, 64, 128, 256, 512]
        blocks = []
        for stage, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
            blocks += [PreActBlock(inputs, outputs, 1 if stage == 0 else 2), PreActBlock(outputs, outputs, 1)]
        super().__init__(
            nn.Conv2d(channels, 64, 3, padding=1, bias=False), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
