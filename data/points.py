"""Labelled points, images or embeddings, whole in memory, in three splits: what a nearest-neighbour classifier takes.

Protocol of Grover et al. 2019: 5,000 training images of MNIST, Fashion-MNIST and CIFAR-10 validate; a tenth of other
sets. Pixels are normalised as in the published code: not at all for MNIST. Digits and the MNISTs have one channel.
"""

from pathlib import Path

import torch
from torch import Tensor
from torchvision.datasets import MNIST, FashionMNIST

from data.cifar import CIFAR_MEAN, CIFAR_STD, DIGITS_MEAN, DIGITS_STD, load_complete
from data.embeddings import Embeddings, check_right_rows, check_rows, limited_rows, split_rows
from data.splits import Dataset, Split
from data.torchvision_sets import load_or_download

# Name -> mean and standard deviation of the pixels in [0, 1], share of the training images that validate.
POINT_SETS: dict[str, tuple[tuple[float, ...], tuple[float, ...], float]] = {
    "mnist": ((0.0,), (1.0,), 1 / 12),
    "fashion_mnist": ((0.2860,), (0.3530,), 1 / 12),
    "cifar10": (CIFAR_MEAN, CIFAR_STD, 1 / 10),
    "cifar100": (CIFAR_MEAN, CIFAR_STD, 1 / 10),
    "digits": (DIGITS_MEAN[:1], DIGITS_STD[:1], 1 / 10),
}
MNISTS = {"mnist": MNIST, "fashion_mnist": FashionMNIST}
AUGMENTED = ("cifar10", "cifar100")  # whose images are cropped and flipped in training


def load_points(name: str, data_dir: Path, *, seed: int = 0, limit_train: int | None = None) -> Dataset:
    """Load one of POINT_SETS, on the CPU. seed: chooses the images that validate and those that limit_train keeps."""
    means, stds, valid_share = POINT_SETS[name]
    if name in MNISTS:
        parts = load_or_download(MNISTS[name], data_dir, name, "the four files of torchvision's MNIST/raw")
        train, test = (_mnist_split(part) for part in parts)
    else:
        train, test = (_first_channels(part, len(means)) for part in load_complete(name, data_dir))
    learn, valid = divide(len(train), valid_share, seed, limit_train)
    train_split = chosen(train, learn)
    mean = torch.tensor(means).view(-1, 1, 1)
    std = torch.tensor(stds).view(-1, 1, 1)
    num_classes = 1 + int(train.labels.max())
    return Dataset(num_classes, train_split, chosen(train, valid), test, scale=1 / (255 * std), shift=-mean / std)


def _mnist_split(part: MNIST) -> Split:
    return Split(part.data.unsqueeze(1), part.targets)  # (N, 1, 28, 28)


def _first_channels(part: Split, count: int) -> Split:
    return Split(part.inputs[:, :count].contiguous(), part.labels)


def points_of_embeddings(embeddings: Embeddings, *, seed: int = 0, limit_train: int | None = None) -> Dataset:
    """The splits of a file of embeddings, copied; without a valid split a tenth of train validates.

    The file may change afterwards. Arguments: load_points.
    """
    if "test" not in embeddings.splits:
        raise ValueError("these embeddings have no test split")
    check_rows(embeddings, {name: torch.arange(len(split)) for name, split in embeddings.splits.items()})
    valid_share = 1 / 10
    if "valid" in embeddings.splits:
        valid_share = 0
    train = embeddings["train"]
    learn, valid = divide(len(train), valid_share, seed, limit_train)
    if "valid" in embeddings.splits:
        valid_split = copied(embeddings["valid"])
    else:
        check_right_rows(embeddings, valid)
        valid_split = chosen(train, valid)
    return Dataset(embeddings.num_classes, chosen(train, learn), valid_split, copied(embeddings["test"]))


def divide(num_rows: int, valid_share: float, seed: int, limit_train: int | None) -> tuple[Tensor, Tensor]:
    """Divide rows at random into those that train and those that validate."""
    rows = limited_rows(num_rows, limit_train, seed)
    if not valid_share:
        return rows, rows[:0]
    learn, valid = split_rows(len(rows), round(len(rows) * valid_share), seed)
    return rows[learn], rows[valid]


def copied(split: Split) -> Split:
    return Split(split.inputs.clone(), split.labels.clone())


def chosen(split: Split, rows: Tensor) -> Split:
    return Split(split.inputs[rows], split.labels[rows])
