"""Splits of a data set, of images or of embeddings, and their random numbers."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

VALID_SHARE = 0.05  # of the images
# Purposes of random numbers, of which the first versions had one more.
SPLIT = 0
LABEL_NOISE = 2
ORDER = 3
AUGMENTATION = 4


def seeded(purpose: int, seed: int, epoch: int = 0, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator for one purpose. CPU and CUDA generators draw different numbers from the same seed."""
    state = np.random.SeedSequence(seed, spawn_key=(purpose, epoch)).generate_state(1, np.uint64)
    return torch.Generator(device).manual_seed(int(state[0]))


def epoch_order(num_samples: int, seed: int, epoch: int) -> Tensor:
    """The order in which an epoch visits its samples, (num_samples,) int64."""
    return torch.randperm(num_samples, generator=seeded(ORDER, seed, epoch))


def epoch_generator(seed: int, epoch: int, device: torch.device | str = "cpu") -> torch.Generator:
    """The generator of an epoch's crops."""
    return seeded(AUGMENTATION, seed, epoch, device)


def train_and_valid_rows(num_images: int, limit_train: int | None, seed: int) -> tuple[Tensor, Tensor]:
    """The images that train and the VALID_SHARE that validate, both ascending.

    Validation is the front of the order, training its end, so that a limit moves no image from one to the other.

    Raises:
        ValueError: there are not so many images, or none would validate.
    """
    count = limit_train or num_images
    num_valid = round(count * VALID_SHARE)
    if count > num_images or num_valid == 0:
        raise ValueError(f"--limit_train must be between 11 and {num_images} images, got {limit_train}")
    order = torch.randperm(num_images, generator=seeded(SPLIT, seed))  # (N,)
    train_rows = order[num_images - (count - num_valid) :]
    valid_rows = order[:num_valid]
    return train_rows.sort().values, valid_rows.sort().values


@dataclass(frozen=True, eq=False)
class Split:
    """inputs: images (N, C, H, W) uint8, or embeddings (N, d) floating point; labels (N,) int64."""

    inputs: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.labels):
            raise ValueError(f"{len(self.inputs)} samples have {len(self.labels)} labels: each must have one")

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> "Split":
        return Split(self.inputs.to(device), self.labels.to(device))

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs (B, ...) and labels (B,) at `rows` (B,); for channels_last images ten times as fast as indexing."""
        if self.inputs.dim() == 2:
            return self.inputs.index_select(0, rows), self.labels.index_select(0, rows)
        images = self.inputs.permute(0, 2, 3, 1).index_select(0, rows)  # (B, H, W, C)
        return images.permute(0, 3, 1, 2), self.labels.index_select(0, rows)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Three splits without a common sample, and perhaps valid once more with other labels.

    scale, shift: (C, 1, 1), with which pixels p are normalised to p scale + shift; None for embeddings.
    clean: the images of valid with their correct labels, where those of valid are wrong.
    """

    num_classes: int
    train: Split
    valid: Split
    test: Split
    scale: Tensor | None = None
    shift: Tensor | None = None
    clean: Split | None = None

    def to(self, device: torch.device | str) -> "Dataset":
        moved = {}
        for name, part in vars(self).items():
            if isinstance(part, Split | Tensor):
                moved[name] = part.to(device)
        return replace(self, **moved)

    def counts(self) -> dict[str, int]:
        """The columns of a row that have the number of samples of each split."""
        return {
            "train_images": len(self.train),
            "valid_images": len(self.valid),
            "test_images": len(self.test),
        }

    def normalise(self, inputs: Tensor) -> Tensor:
        """The inputs (B, ...) of a network, float32."""
        if self.scale is None:
            return inputs.float()
        return inputs * self.scale + self.shift
