"""Labelled points, images or embeddings, whole in memory, in three splits: what a nearest-neighbour classifier takes.

Protocol of Grover et al. 2019: 5,000 training images of MNIST, Fashion-MNIST and CIFAR-10 validate; a tenth of other
sets. Pixels are normalised as in the published code: not at all for MNIST. Digits and the MNISTs have one channel.
"""

from pathlib import Path

import torch
from torchvision.datasets import MNIST, FashionMNIST

from data.cifar import CIFAR_MEAN, CIFAR_STD, DIGITS_MEAN, DIGITS_STD, load_complete
from data.embeddings import Embeddings, check_rows, limited_rows, split_rows
from data.splits import Dataset, Split

# Name -> mean and standard deviation of the pixels in [0, 1], share of the training images that validate.
POINT_SETS: dict[str, tuple[tuple[float, ...], tuple[float, ...], float]] = {
    "mnist": ((0.0,), (1.0,), 1 / 12),
    "fashion_mnist": ((0.2860,), (0.3530,), 1 / 12),
    "cifar10": (CIFAR_MEAN, CIFAR_STD, 1 / 10),
    "cifar100": (CIFAR_MEAN, CIFAR_STD, 1 / 10),
    "digits": (DIGITS_MEAN[:1], DIGITS_STD[:1], 1 / 10),
}
AUGMENTED = ("cifar10", "cifar100")  # whose images are cropped and flipped in training


def load_points(name: str, data_dir: Path, *, seed: int = 0, limit_train: int | None = None) -> Dataset:
    """Load one of POINT_SETS, on the CPU. seed: chooses the images that validate and those that limit_train keeps."""
    means, stds, valid_share = POINT_SETS[name]
    if "mnist" in name:
        kind = FashionMNIST if name == "fashion_mnist" else MNIST
        try:
            both = [kind(data_dir, train=train, download=True) for train in (True, False)]
        except (OSError, RuntimeError) as error:
            raise SystemExit(f"error: {name} is not in {data_dir}, and cannot be downloaded ({error})") from None
        train, test = (Split(part.data.unsqueeze(1), part.targets) for part in both)  # (N, 1, 28, 28)
    else:
        images = load_complete(name, data_dir)
        train, test = (Split(part.inputs[:, : len(means)].contiguous(), part.labels) for part in images)
    train, valid = divide(train, valid_share, seed, limit_train)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (means, stds))
    num_classes = 1 + int(train.labels.max())
    return Dataset(num_classes, train, valid, test, scale=1 / (255 * std), shift=-mean / std)


def points_of_embeddings(embeddings: Embeddings, *, seed: int = 0, limit_train: int | None = None) -> Dataset:
    """The splits of a file of embeddings; without a valid split a tenth of train validates. Arguments: load_points."""
    if "test" not in embeddings.splits:
        raise SystemExit("error: these embeddings have no test split")
    check_rows(embeddings, {name: torch.arange(len(split)) for name, split in embeddings.splits.items()})
    train, valid = divide(embeddings["train"], 0 if "valid" in embeddings.splits else 1 / 10, seed, limit_train)
    return Dataset(embeddings.num_classes, train, embeddings.splits.get("valid", valid), embeddings["test"])


def divide(train: Split, valid_share: float, seed: int, limit_train: int | None) -> tuple[Split, Split]:
    """Divide the samples at random into those that train and those that validate."""
    rows = limited_rows(len(train), limit_train, seed)
    valid = rows[:0]
    if valid_share:
        learn, validate = split_rows(len(rows), round(len(rows) * valid_share), seed)
        rows, valid = rows[learn], rows[validate]
    return Split(train.inputs[rows], train.labels[rows]), Split(train.inputs[valid], train.labels[valid])
