"""A network of train_cifar100.py as a backbone."""

from dataclasses import dataclass
from pathlib import Path

from torchvision.transforms import v2

from data.checked_json import read_json
from data.cifar100 import CIFAR_MEAN, CIFAR_STD, DIGITS_MEAN, DIGITS_STD, normalise
from data.program import ProgramError
from experiments.shared.checkpoint import CURRENT, read_checkpoint
from models.backbones import Backbone
from models.resnet_cifar import resnet_cifar


@dataclass
class Config:
    model: str
    dataset: str


def checkpoint_backbone(path: Path, resolution: int | None) -> Backbone:
    """The network of a checkpoint of train_cifar100.py, or of its folder; its features at `fc`. Raises ProgramError."""
    path = path / CURRENT if path.is_dir() else path
    try:
        config = read_json(path.parent / "config.json", Config)
        weights = read_checkpoint(path)["model"]
        network = resnet_cifar(config.model, len(weights["fc.weight"]))
        network.load_state_dict(weights)
    except FileNotFoundError as error:
        raise ProgramError(
            f"there is no {error.filename}: --checkpoint is the checkpoint.pt in a run folder of train_cifar100.py, "
            "with its config.json beside it"
        ) from None
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ProgramError(f"{path} is not a checkpoint of train_cifar100.py ({reason})") from None
    mean, std = (DIGITS_MEAN, DIGITS_STD) if config.dataset == "digits" else (CIFAR_MEAN, CIFAR_STD)
    resolution = resolution or 32
    return Backbone(
        f"{config.dataset}-{config.model}",
        network,
        lambda images: network.features(normalise(images, mean, std)),
        dim=network.fc.in_features,
        resolution=resolution,
        # Bytes until they are on the device; both steps leave an image of the right size as it is.
        transform=v2.Compose([v2.Resize(resolution), v2.CenterCrop(resolution), v2.PILToTensor()]),
        heads=("fc",),
    )
