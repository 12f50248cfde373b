"""Labelled points, images or embeddings, whole in memory, in three splits: what a nearest-neighbour classifier takes.

    points = load_points("mnist", data_dir, seed=0)      one of POINT_SETS
    points = points_of_store(store, seed=0)              embeddings (data/embeddings)

Protocol of Grover et al. 2019: of MNIST and Fashion-MNIST 5,000 training images validate, of CIFAR-10 likewise; of
other sets here a tenth. Pixels are in [0, 1], normalised as in the published code: not at all for MNIST. Digits and the
MNISTs have one channel.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from data.cifar100 import CIFAR_MEAN, CIFAR_STD, DIGITS_MEAN, DIGITS_STD, crop_and_flip, load_complete, sample_crops
from data.embeddings import EmbeddingStore, split_rows
from data.image_sources import open_images


@dataclass(frozen=True)
class PointSet:
    """How the images of a set become inputs. valid_share: of the training images; augmented: cropped and flipped."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    valid_share: float = 1 / 10
    augmented: bool = False


POINT_SETS: dict[str, PointSet] = {
    "mnist": PointSet((0.0,), (1.0,), valid_share=1 / 12),
    "fashion_mnist": PointSet((0.2860,), (0.3530,), valid_share=1 / 12),
    "cifar10": PointSet(CIFAR_MEAN, CIFAR_STD, augmented=True),
    "cifar100": PointSet(CIFAR_MEAN, CIFAR_STD, augmented=True),
    "digits": PointSet(DIGITS_MEAN[:1], DIGITS_STD[:1]),
}


@dataclass(frozen=True, eq=False)
class Samples:
    """inputs: (N, C, H, W) uint8 or (N, d) of any floating dtype; labels: (N,) int64 in [0, num_classes)."""

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> "Samples":
        """The same samples on `device`."""
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
        """The same points on `device`."""
        moved = {name: getattr(self, name).to(device) for name in ("train", "valid", "test", "shift", "scale")}
        return replace(self, **moved)

    def inputs(self, chosen: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """What a network takes, float32, of some of a split's inputs (B, ...): (B, *input_shape).

        generator: crops and flips the images first, as in training; on their device. Without one they stay as they are.
        """
        if chosen.dtype != torch.uint8:
            return chosen.float()
        if generator is not None:
            chosen = crop_and_flip(chosen, *sample_crops(len(chosen), generator))
        return chosen * self.scale - self.shift


def load_points(
    name: str,
    data_dir: str | Path,
    *,
    mirror: str | None = None,
    seed: int = 0,
    limits: Mapping[str, int] | None = None,
) -> Points:
    """Load one of POINT_SETS into memory, on the CPU.

    data_dir, mirror: as for load_dataset (mirror: of CIFAR alone). seed: of the images that validate, and of those that
    limits, {"train": N, "test": N}, leave over. Raises ValueError, DatasetUnavailableError among them.
    """
    of_set = POINT_SETS[name]
    if "mnist" in name:
        splits = open_images(name, data_dir).splits
        # (N, 28, 28) uint8 and (N,) int64 in memory, under torchvision's names
        train, test = (
            Samples(each.data.unsqueeze(1), each.targets) for each in (splits["train"].dataset, splits["test"].dataset)
        )
        class_names = range(10)
    else:
        *images, class_names = load_complete(name, data_dir, mirror=mirror)
        channels = len(of_set.mean)
        train, test = (Samples(each.images[:, :channels].contiguous(), each.labels) for each in images)
    mean, std = (torch.tensor(each).view(-1, 1, 1) for each in (of_set.mean, of_set.std))
    splits = _splits(train, test, of_set.valid_share, seed, limits or {})
    return Points(len(class_names), *splits, mean / std, 1 / (255 * std), of_set.augmented)


def points_of_store(store: EmbeddingStore, *, seed: int = 0, limits: Mapping[str, int] | None = None) -> Points:
    """The splits of a store, in their own dtype, on the CPU; without valid, a tenth of train. Else as load_points."""
    train, test, *valid = (
        Samples(store[name].read(torch.arange(len(store[name]))), store[name].labels())
        for name in ("train", "test", *(["valid"] if "valid" in store.splits else []))
    )
    none = torch.zeros(1, 1, 1)
    return Points(store.num_classes, *_splits(train, test, 1 / 10, seed, limits or {}, *valid), none, none, False)


def _splits(
    train: Samples, test: Samples, valid_share: float, seed: int, limits: Mapping[str, int], own: Samples | None = None
) -> list[Samples]:
    """Those that train, validate (`own`, or a share of those that train) and test."""
    kept = {}
    for name, samples in (("train", train), ("test", test)):
        limit = limits.get(name, len(samples))
        if limit > len(samples):
            raise ValueError(f"--limit_{name} must not exceed the {len(samples)} samples of {name}, got {limit}")
        everything = limit == len(samples)
        kept[name] = torch.arange(limit) if everything else split_rows(len(samples), limit, seed)[1]
    chosen = kept["train"]
    if own is None:
        learn, valid = (chosen[rows] for rows in split_rows(len(chosen), round(len(chosen) * valid_share), seed))
        own = Samples(train.inputs[valid], train.labels[valid])
    else:
        learn = chosen
    trains, tests = (Samples(of.inputs[rows], of.labels[rows]) for of, rows in ((train, learn), (test, kept["test"])))
    return [trains, own, tests]
