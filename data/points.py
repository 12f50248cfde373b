"""Labelled points, images or embeddings, whole in memory, in three splits: what a nearest-neighbour classifier takes.

Protocol of Grover et al. 2019: of MNIST and Fashion-MNIST 5,000 training images validate, of CIFAR-10 likewise; of
other sets here a tenth. Pixels are normalised as in the published code: not at all for MNIST. Digits and the MNISTs
have one channel.
"""

import contextlib
import gzip
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torchvision.datasets import MNIST, FashionMNIST

from data.cifar import CIFAR_MEAN, CIFAR_STD, DIGITS_MEAN, DIGITS_STD, crop_and_flip, load_complete, sample_crops
from data.embeddings import Embeddings, first_not_finite, split_rows

# Name -> mean and standard deviation of the pixels in [0, 1], share of the training images that validate, and whether
# images are cropped and flipped in training.
POINT_SETS: dict[str, tuple[tuple[float, ...], tuple[float, ...], float, bool]] = {
    "mnist": ((0.0,), (1.0,), 1 / 12, False),
    "fashion_mnist": ((0.2860,), (0.3530,), 1 / 12, False),
    "cifar10": (CIFAR_MEAN, CIFAR_STD, 1 / 10, True),
    "cifar100": (CIFAR_MEAN, CIFAR_STD, 1 / 10, True),
    "digits": (DIGITS_MEAN[:1], DIGITS_STD[:1], 1 / 10, False),
}


@dataclass(frozen=True, eq=False)
class Samples:
    """inputs: (N, C, H, W) uint8, or (N, d) floating point; labels: (N,) int64."""

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> "Samples":
        return Samples(self.inputs.to(device), self.labels.to(device))


@dataclass(frozen=True, eq=False)
class Points:
    """Three splits without a common point. shift, scale: (C, 1, 1) each; of a pixel p comes p scale - shift."""

    num_classes: int
    train: Samples
    valid: Samples
    test: Samples
    shift: Tensor
    scale: Tensor
    augmented: bool

    @property
    def input_shape(self) -> tuple[int, ...]:
        """(C, H, W) of an image, (d,) of an embedding."""
        return tuple(self.train.inputs.shape[1:])

    def to(self, device: torch.device) -> "Points":
        names = ("train", "valid", "test", "shift", "scale")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def inputs(self, chosen: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """What a network takes of some inputs (B, ...): float32, normalised. generator: crops and flips them first."""
        if chosen.dtype != torch.uint8:
            return chosen.float()
        if generator is not None:
            chosen = crop_and_flip(chosen, *sample_crops(len(chosen), generator))
        return chosen * self.scale - self.shift


def load_points(name: str, data_dir: Path, *, seed: int = 0, limit_train: int | None = None) -> Points:
    """Load one of POINT_SETS, on the CPU. seed: of the images that validate, and that limit_train leaves over."""
    means, stds, valid_share, augmented = POINT_SETS[name]
    if "mnist" in name:
        kind = FashionMNIST if name == "fashion_mnist" else MNIST
        try:
            both = load_mnist(kind, data_dir)
        except (OSError, RuntimeError) as error:
            raise SystemExit(f"error: {name} is not in {data_dir}, and cannot be downloaded ({error})") from None
        train, test = (Samples(part.data.unsqueeze(1), part.targets) for part in both)  # (N, 1, 28, 28)
    else:
        images = load_complete(name, data_dir)
        train, test = (Samples(part.images[:, : len(means)].contiguous(), part.labels) for part in images)
    train, valid = divide(train, valid_share, seed, limit_train)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (means, stds))
    num_classes = 1 + int(train.labels.max())
    return Points(num_classes, train, valid, test, mean / std, 1 / (255 * std), augmented)


def load_mnist(kind: type[MNIST], data_dir: Path) -> list[MNIST]:
    """Load the training and the test images from their files or their .gz files, and download what is not there.

    torchvision would unpack .gz files beside them: here they may lie in a folder that is read-only.
    """
    raw = data_dir / kind.__name__ / "raw"
    names = [Path(address).stem for address, _ in kind.resources]
    if not all((raw / name).exists() for name in names):
        with tempfile.TemporaryDirectory() as folder, contextlib.suppress(OSError, EOFError):  # absent or cut short
            unpacked = Path(folder) / kind.__name__ / "raw"
            unpacked.mkdir(parents=True)
            for name in names:
                (unpacked / name).write_bytes(gzip.decompress((raw / f"{name}.gz").read_bytes()))
            return [kind(folder, train=train) for train in (True, False)]
    return [kind(data_dir, train=train, download=True) for train in (True, False)]


def points_of_embeddings(embeddings: Embeddings, *, seed: int = 0, limit_train: int | None = None) -> Points:
    """The splits of a file of embeddings; without a valid split a tenth of train validates. Else as load_points."""
    if "test" not in embeddings.splits:
        raise SystemExit("error: these embeddings have no test split")
    for name, split in embeddings.splits.items():
        if (row := first_not_finite(split, torch.arange(len(split)))) is not None:
            raise SystemExit(f"error: row {row} of {name} in these embeddings is not finite; nothing is recorded")
    parts = {name: Samples(split.embeddings, split.labels) for name, split in embeddings.splits.items()}
    train, valid = divide(parts["train"], 0 if "valid" in parts else 1 / 10, seed, limit_train)
    none = torch.zeros(1, 1, 1)
    return Points(embeddings.num_classes, train, parts.get("valid", valid), parts["test"], none, none, False)


def divide(train: Samples, valid_share: float, seed: int, limit_train: int | None) -> tuple[Samples, Samples]:
    """The samples that train, and those that validate."""
    if (limit_train or 0) > len(train):
        raise SystemExit(f"error: --limit_train {limit_train} exceeds the {len(train)} training points")
    rows = torch.arange(len(train))
    if limit_train and limit_train < len(train):
        rows = split_rows(len(train), limit_train, seed)[1]
    valid = rows[:0]
    if valid_share:
        learn, validate = split_rows(len(rows), round(len(rows) * valid_share), seed)
        rows, valid = rows[learn], rows[validate]
    return Samples(train.inputs[rows], train.labels[rows]), Samples(train.inputs[valid], train.labels[valid])
