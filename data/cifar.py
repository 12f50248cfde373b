"""CIFAR-100, CIFAR-10 and scikit-learn's digits as uint8 tensors: splits, label noise and augmentation.

As published, a random 5 % of the training images validate; training images are cropped at random from a frame with 4
black pixels on each side and flipped with probability one half; CIFAR-10's mean and standard deviation normalise both
CIFARs. Validation images are complete and not augmented here, while the published script augments them and drops the
last partial batch.

A data set is held in memory whole (CIFAR: 184 MB). Every random choice is a function of the seed, the epoch and its
purpose, so that a run that was resumed sees the same batches and the same crops.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.datasets import CIFAR10, CIFAR100

from data.label_noise import human_labels, noisy_labels
from data.splits import LABEL_NOISE, Dataset, Split, seeded, train_and_valid_rows
from data.torchvision_sets import load_or_download

Rgb = tuple[float, float, float]
# Means and standard deviations in units of [0, 1]. The published code keeps CIFAR-10's for CIFAR-100.
CIFAR_MEAN: Rgb = (0.4914, 0.4822, 0.4465)
CIFAR_STD: Rgb = (0.2023, 0.1994, 0.2010)
DIGITS_MEAN: Rgb = (0.3054, 0.3054, 0.3054)  # over the 1,437 training digits
DIGITS_STD: Rgb = (0.3760, 0.3760, 0.3760)
DATASETS = {"cifar100": 100, "cifar10": 10, "digits": 10}  # and their numbers of classes
NOISE_BLOCK = 5  # consecutive class ids among which a label is drawn
PADDING = 4


def load_dataset(
    name: str,
    data_dir: Path,
    *,
    seed: int = 0,
    limit_train: int | None = None,
    label_noise: float = 0.0,
    noisy_labels_file: Path | None = None,
) -> Dataset:
    """Load one of DATASETS into memory, on the CPU.

    Args:
        data_dir: folder that holds cifar-100-python/ or cifar-10-batches-py/, or receives them.
        limit_train: use so many random training images; 5 % of them validate.
        label_noise: probability with which a training label is replaced by a random class of its block of NOISE_BLOCK
            classes, itself included (Berrada, Zisserman and Kumar 2018). Other labels stay clean.
        noisy_labels_file: labels by people (`human_labels`), for the images that train and for those that validate; not
            together with label_noise.

    Raises:
        ValueError: settings that do not fit one another or the data.
    """
    scale, shift = scale_and_shift(name)
    train, test = load_complete(name, data_dir)
    train_rows, valid_rows = train_and_valid_rows(len(train), limit_train, seed)
    labels = train.labels  # of images that train
    valid_labels = train.labels
    clean = None
    if label_noise > 0 and noisy_labels_file is not None:
        raise ValueError("label_noise and noisy_labels_file exclude each other: give one of them")
    if label_noise > 0:
        labels = noisy_labels(labels, NOISE_BLOCK, label_noise, seeded(LABEL_NOISE, seed))
    if noisy_labels_file is not None:
        labels = human_labels(noisy_labels_file, train.labels)
        valid_labels = labels
        clean = channels_last(train.inputs[valid_rows], train.labels[valid_rows])
    return Dataset(
        num_classes=DATASETS[name],
        train=channels_last(train.inputs[train_rows], labels[train_rows]),
        valid=channels_last(train.inputs[valid_rows], valid_labels[valid_rows]),
        test=channels_last(test.inputs, test.labels),
        scale=scale,
        shift=shift,
        clean=clean,
    )


def channels_last(images: Tensor, labels: Tensor) -> Split:
    return Split(images.contiguous(memory_format=torch.channels_last), labels)


def scale_and_shift(name: str) -> tuple[Tensor, Tensor]:
    """Scale and shift (3, 1, 1) that normalise the pixels p of a data set: p scale + shift = (p / 255 - mean) / std."""
    mean = CIFAR_MEAN
    std = CIFAR_STD
    if name == "digits":
        mean = DIGITS_MEAN
        std = DIGITS_STD
    means = torch.tensor(mean, dtype=torch.float64).view(3, 1, 1)
    stds = torch.tensor(std, dtype=torch.float64).view(3, 1, 1)
    return (1 / (255 * stds)).float(), (-means / stds).float()


def sample_crops(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Tops and lefts in [0, 2 * PADDING], (batch,) int64, and flips, (batch,) bool, on the generator's device."""
    device = generator.device
    tops, lefts = torch.randint(2 * PADDING + 1, (2, batch), generator=generator, device=device)
    return tops, lefts, torch.rand(batch, generator=generator, device=device) < 0.5


def crop_and_flip(images: Tensor, tops: Tensor, lefts: Tensor, flips: Tensor) -> Tensor:
    """RandomCrop(32, padding=4) and RandomHorizontalFlip of each image, (B, 3, H, W) uint8, channels_last."""
    batch, channels, height, width = images.shape
    canvas = F.pad(images.permute(0, 2, 3, 1), (0, 0, *[PADDING] * 4))
    canvas_height, canvas_width = canvas.shape[1:3]
    i = torch.arange(height, device=images.device)
    j = torch.arange(width, device=images.device)
    rows = tops[:, None] + i  # (B, H)
    columns = lefts[:, None] + torch.where(flips[:, None], width - 1 - j, j)  # (B, W)
    first = torch.arange(batch, device=images.device)[:, None] * canvas_height  # (B, 1), in canvas rows
    # One number per pixel, then one copy of three bytes per pixel: of five designs the fastest on a CPU.
    pixels = ((first + rows) * canvas_width)[:, :, None] + columns[:, None, :]  # (B, H, W)
    cropped = canvas.reshape(-1, channels).index_select(0, pixels.flatten())  # (B * H * W, 3)
    return cropped.view(batch, height, width, channels).permute(0, 3, 1, 2)


def load_complete(name: str, data_dir: Path) -> tuple[Split, Split]:
    """The training and the test images of one of DATASETS. Raises OSError where they cannot be downloaded."""
    if name == "digits":
        return _load_digits()
    kind = {"cifar100": CIFAR100, "cifar10": CIFAR10}[name]
    files = f"{kind.filename} (MD5 {kind.tgz_md5}) from {kind.url}"
    train, test = load_or_download(kind, data_dir, name, files)
    return _cifar_split(train), _cifar_split(test)


def _cifar_split(part: CIFAR10) -> Split:
    # torchvision shows the stored (N, 3, 32, 32) bytes as (N, 32, 32, 3); undoing that copies nothing.
    return Split(torch.from_numpy(part.data.transpose(0, 3, 1, 2)), torch.tensor(part.targets))


def _load_digits() -> tuple[Split, Split]:
    """1,437 training and 360 test images of scikit-learn: 8x8 grey, enlarged to 32x32 RGB."""
    # These imports take a second.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    grey = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # (1797, 8, 8), from 0..16 to 0..255
    grey = grey.repeat(4, axis=1).repeat(4, axis=2)  # (1797, 32, 32)
    images = torch.from_numpy(grey)[:, None].expand(-1, 3, -1, -1)
    labels = torch.from_numpy(digits.target.astype(np.int64))
    rows = train_test_split(np.arange(len(labels)), test_size=360, stratify=digits.target, random_state=0)
    train_rows = torch.from_numpy(rows[0])
    test_rows = torch.from_numpy(rows[1])
    return Split(images[train_rows], labels[train_rows]), Split(images[test_rows], labels[test_rows])
