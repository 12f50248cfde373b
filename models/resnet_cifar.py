"""ResNet-18, -34 and -50 for 32x32 images, as in the published CIFAR-100 experiments.

torchvision's ResNet (He, Zhang, Ren and Sun 2016) with one change: the first convolution is 3x3 with stride
1 instead of 7x7 with stride 2. The 3x3 max-pool with stride 2 stays, unlike in many CIFAR variants. Names in
the state dict are torchvision's. So are the results; models/small_maps.py computes the last 3x3 convolutions on a CPU.

A 32x32 image passes through: conv1 32x32, maxpool 16x16, layer1 16x16, layer2 8x8, layer3 4x4, layer4 2x2.
"""

import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from models.small_maps import SmallMapConv2d

# Name -> residual block, number of blocks in each of the four stages.
ARCHITECTURES: dict[str, tuple[type[BasicBlock] | type[Bottleneck], list[int]]] = {
    "resnet18": (BasicBlock, [2, 2, 2, 2]),
    "resnet34": (BasicBlock, [3, 4, 6, 3]),
    "resnet50": (Bottleneck, [3, 4, 6, 3]),
}


class ResNetCifar(ResNet):
    """torchvision's ResNet with a 3x3 first convolution of stride 1; build it with `resnet_cifar`."""

    def __init__(self, block: type[BasicBlock] | type[Bottleneck], layers: list[int], num_classes: int) -> None:
        super().__init__(block, layers, num_classes=num_classes)
        self.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
        for block in (*self.layer3, *self.layer4):
            for name, layer in list(block.named_children()):
                if isinstance(layer, nn.Conv2d) and layer.kernel_size == (3, 3):
                    setattr(block, name, SmallMapConv2d(layer.in_channels, layer.out_channels, layer.stride[0]))

    def features(self, images: Tensor) -> Tensor:
        """The averaged last maps (batch, d) of images (batch, 3, H, W): d is 512, of resnet50 2048."""
        maps = self.maxpool(self.bn1(self.conv1(images)))  # (batch, 64, H/2, W/2)
        # The ReLU after the pool has the same bits and gradients as before it, with a quarter of the work.
        maps = self.relu(maps)
        maps = self.layer2(self.layer1(maps))
        maps = self.layer4(self.layer3(maps))  # (batch, d, H/16, W/16)
        return self.avgpool(maps).flatten(1)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (batch, num_classes) of images (batch, 3, H, W), normalised floats.

        The last layer computes in its weights' precision under autocast, too: this costs little, and among 100 logits
        in bf16 some are always equal, which gives no order to learn from.
        """
        features = self.features(images)  # (batch, d)
        with torch.autocast(features.device.type, enabled=False):
            return self.fc(features.to(self.fc.weight.dtype))


def resnet_cifar(name: str = "resnet18", num_classes: int = 100) -> ResNetCifar:
    """A freshly initialised network of ARCHITECTURES, on the CPU.

    Convolutions: Kaiming normal, fan_out, relu. Batch norm: weight 1, bias 0. fc: PyTorch's default. Each weight is
    drawn once from PyTorch's CPU generator, in the order of `modules()`, and nothing else is: a seed gives the same
    weights on every device, and a change of num_classes changes only fc.
    """
    # Without storage, so that constructors draw no random numbers.
    with torch.device("meta"):
        model = ResNetCifar(*ARCHITECTURES[name], num_classes)
    model.to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.BatchNorm2d | nn.Linear):
            module.reset_parameters()
    return model
