"""CIFAR-100, CIFAR-10 and digits as uint8 tensors, with their splits, label noise and augmentation.

Protocol of the published CIFAR-100 experiments: a random 5 % of the training images validate, the last 10,000 images
test; training images are cropped at random (32x32 out of a frame padded by 4 black pixels) and flipped horizontally
with probability one half; pixels are normalised with CIFAR-10's mean and standard deviation, which the published code
uses for CIFAR-100 too. One point differs on purpose: the published script sends validation images through the training
augmentation and drops the last partial batch; here validation images are complete and unaugmented.

A whole data set is held in memory (CIFAR: 184 MB), and a batch is augmented by a handful of tensor operations on
whatever device holds it. Every random choice is a pure function of the seed, the epoch and its purpose, so that a run
resumed at an epoch sees the same batches and the same crops as one that never stopped.
"""

import contextlib
import os
import pickle
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from http.client import HTTPException
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit
from urllib.request import url2pathname

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.datasets import CIFAR10, CIFAR100
from torchvision.datasets.utils import check_integrity, download_and_extract_archive

from data.file_lock import held, lock_beside
from data.program import ProgramError
from data.seeds import seeded

DATASETS: tuple[str, ...] = ("cifar100", "cifar10", "digits")
NOISE_GROUPS: tuple[str, ...] = ("blocks", "superclass")

Rgb = tuple[float, float, float]
T = TypeVar("T")

# CIFAR-10's numbers in units of [0, 1]; the published code keeps them for CIFAR-100, and so does this file.
CIFAR_MEAN: Rgb = (0.4914, 0.4822, 0.4465)
CIFAR_STD: Rgb = (0.2023, 0.1994, 0.2010)
# Over all pixels of the 1,437 training digits, in units of [0, 1]; the three channels are equal.
DIGITS_MEAN: Rgb = (0.3054, 0.3054, 0.3054)
DIGITS_STD: Rgb = (0.3760, 0.3760, 0.3760)

_CIFAR: dict[str, type[CIFAR10]] = {"cifar100": CIFAR100, "cifar10": CIFAR10}
_BLOCK = 5  # consecutive class ids in one group of the label noise
_SOCKET_TIMEOUT = 60.0  # seconds without a byte after which a download is given up

_VALID_SHARE = 0.05  # of the training images
PADDING = 4  # black pixels on each side of an image before it is cropped
_SPLIT, _TEST_SUBSET, _LABEL_NOISE, _ORDER, _AUGMENTATION = range(5)  # random streams


class DatasetUnavailableError(ProgramError, ValueError):
    """The files of a data set are neither there nor to be had; the message says how to mend it."""


@dataclass(frozen=True, eq=False)
class Split:
    """Images and labels of one split.

    images: (N, 3, 32, 32) uint8, channels_last in memory, so that neither a batch nor its crops need a
    transposition. labels: (N,) int64 in [0, num_classes).
    """

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> "Split":
        """The same split on `device`."""
        return Split(self.images.to(device), self.labels.to(device))

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Images (B, 3, 32, 32) uint8 and labels (B,) at `indices` (B,) int64, on the split's device.

        The same values as `images[indices], labels[indices]`, but whole images are copied at a time, which is
        about ten times faster on a CPU.
        """
        images = self.images.permute(0, 2, 3, 1).index_select(0, indices)  # (B, 32, 32, 3)
        return images.permute(0, 3, 1, 2), self.labels.index_select(0, indices)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Three disjoint splits of a data set, mean and std per channel, in units of [0, 1]."""

    num_classes: int
    train: Split
    valid: Split
    test: Split
    mean: Rgb
    std: Rgb

    def to(self, device: torch.device | str) -> "Dataset":
        """The same data set with all three splits on `device`."""
        return replace(self, train=self.train.to(device), valid=self.valid.to(device), test=self.test.to(device))


def load_dataset(
    name: str,
    data_dir: str | Path,
    *,
    mirror: str | None = None,
    seed: int = 0,
    limit_train: int | None = None,
    limit_test: int | None = None,
    label_noise: float = 0.0,
    noise_groups: str = "blocks",
) -> Dataset:
    """Load one of DATASETS into memory, on the CPU.

    name: `digits` is scikit-learn's bundled set of 1,797 grey 8x8 digits, enlarged to 32x32 RGB by repeating pixels; a
        fixed stratified 360 of them test. It needs no download.
    data_dir: folder that holds `cifar-100-python/` or `cifar-10-batches-py/`, or receives them. Complete folders are
        read where they are and nothing is written; what is missing or has a wrong MD5 sum is unpacked again from the
        archive beside them, which is fetched again likewise. Processes that start together download once.
    mirror: where to fetch the archive instead of its home page: a folder or the full address of the `.tar.gz`, as
        http://, https:// or file://. The MD5 sum must be the published one.
    seed: chooses the validation images, the subsets and the label noise.
    limit_train: take this many random training images, and the validation images out of these: 1,000 leave 950 to train
        and 50 to validate. Both are subsets of their like in the complete set under the same seed.
    limit_test: take this many random test images.
    label_noise: probability in [0, 1] with which a training label is replaced by a label drawn uniformly from its
        group, itself included (Berrada, Zisserman and Kumar 2018). Validation and test labels stay clean. Under one
        seed a label replaced at a low probability is replaced alike at every higher one.
    noise_groups: `blocks` for five consecutive class ids (Berrada's choice), `superclass` for the five classes of a
        CIFAR-100 superclass, read from the data set's coarse labels.

    Raises ValueError for an argument out of range, DatasetUnavailableError (a ValueError) where the files are missing
    and cannot be had.
    """
    if noise_groups == "superclass" and name != "cifar100":
        raise ValueError(
            f"noise_groups='superclass' needs the coarse labels of cifar100, and {name} has none: "
            "use noise_groups='blocks'"
        )
    train, test, class_names = load_complete(name, data_dir, mirror=mirror)
    limits = {"train": limit_train, "test": limit_test}
    for (name_of, limit), split in zip(limits.items(), (train, test)):
        if limit is not None and not 1 <= limit <= len(split):
            raise ValueError(
                f"limit_{name_of} must be a number of images from 1 to {len(split)}, the size of the set, got {limit}; "
                "leave it out to use all"
            )
    count = limit_train or len(train)
    valid_count = round(count * _VALID_SHARE)
    if valid_count == 0:
        raise ValueError(f"{limit_train} training images leave 0 to validate, which takes 5 %: raise limit_train")

    # Validation is taken from the front of the shuffled order and training from its end, so that a limit
    # shortens each and moves no image from one to the other.
    order = torch.randperm(len(train), generator=seeded(_SPLIT, seed))  # (N,)
    train_rows = order[len(train) - (count - valid_count) :]  # (T,)
    test_rows = torch.randperm(len(test), generator=seeded(_TEST_SUBSET, seed))[:limit_test]

    noisy = train.labels
    if label_noise > 0:
        groups = torch.arange(len(class_names)).view(-1, _BLOCK)
        if noise_groups == "superclass":
            groups = _superclasses(Path(os.path.expanduser(data_dir)))
        noisy = noisy_labels(train.labels, groups, label_noise, seeded(_LABEL_NOISE, seed))

    mean, std = (DIGITS_MEAN, DIGITS_STD) if name == "digits" else (CIFAR_MEAN, CIFAR_STD)
    splits = [
        # In the order of the files, and channels_last.
        Split(images[rows.sort().values].contiguous(memory_format=torch.channels_last), labels[rows.sort().values])
        for images, labels, rows in (
            (train.images, noisy, train_rows),
            (train.images, train.labels, order[:valid_count]),
            (test.images, test.labels, test_rows),
        )
    ]
    return Dataset(len(class_names), *splits, mean, std)


def load_complete(
    name: str, data_dir: str | Path, *, mirror: str | None = None
) -> tuple[Split, Split, tuple[str, ...]]:
    """All training images, all test images, each in the order of the files, and the class names.

    Arguments and errors as for `load_dataset`; nothing is drawn at random.
    """
    if name == "digits":
        return *_load_digits(), tuple(str(digit) for digit in range(10))
    both = _load_cifar(_CIFAR[name], Path(os.path.expanduser(data_dir)), mirror)
    # torchvision shows the stored (N, 3, 32, 32) bytes as (N, 32, 32, 3); undoing that copies nothing.
    splits = (Split(torch.from_numpy(each.data.transpose(0, 3, 1, 2)), torch.tensor(each.targets)) for each in both)
    return *splits, tuple(both[0].classes)


def noisy_labels(labels: Tensor, groups: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    """Replace each label, with the given probability, by one drawn uniformly from its group.

    labels: (N,) int64. groups: (G, S) int64, each class id once; a row holds the S classes of a group.
    probability: in [0, 1]. Returns (N,) int64; the drawn label may be the old one.
    """
    group_of = torch.empty(groups.numel(), dtype=torch.int64)  # (classes,)
    group_of[groups] = torch.arange(len(groups))[:, None].expand_as(groups)
    replaced = torch.rand(len(labels), generator=generator) < probability  # (N,)
    member = torch.randint(groups.shape[1], (len(labels),), generator=generator)  # (N,)
    return torch.where(replaced, groups[group_of[labels], member], labels)


def epoch_order(num_samples: int, seed: int, epoch: int) -> Tensor:
    """The order in which an epoch visits its samples: a permutation (num_samples,) int64 on the CPU."""
    return torch.randperm(num_samples, generator=seeded(_ORDER, seed, epoch))


def epoch_generator(seed: int, epoch: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator on `device` for the augmentation of one epoch, as `seeded` makes it."""
    return seeded(_AUGMENTATION, seed, epoch, device)


def sample_crops(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Draw the crops of a batch, on the generator's device.

    Returns tops and lefts, both (batch,) int64 uniform in [0, 2 * PADDING], the crop's corner in the padded
    frame, and flips, (batch,) bool, true with probability one half.
    """
    device = generator.device
    tops, lefts = torch.randint(2 * PADDING + 1, (2, batch), generator=generator, device=device)
    flips = torch.rand(batch, generator=generator, device=device) < 0.5
    return tops, lefts, flips


def crop_and_flip(images: Tensor, tops: Tensor, lefts: Tensor, flips: Tensor) -> Tensor:
    """Cut one window of the original size out of each black-padded image, then mirror where `flips` is true.

    As torchvision's RandomCrop(32, padding=4) and RandomHorizontalFlip on each image.

    images: (B, 3, H, W) uint8; tops, lefts: (B,) int64 in [0, 2 * PADDING]; flips: (B,) bool.
    Returns (B, 3, H, W) uint8, channels_last.
    """
    batch, channels, height, width = images.shape
    canvas = F.pad(images.permute(0, 2, 3, 1), (0, 0, *[PADDING] * 4))
    canvas_height, canvas_width = canvas.shape[1:3]
    i = torch.arange(height, device=images.device)
    j = torch.arange(width, device=images.device)
    rows = tops[:, None] + i  # (B, H)
    columns = lefts[:, None] + torch.where(flips[:, None], width - 1 - j, j)  # (B, W), mirrored for free
    first = torch.arange(batch, device=images.device)[:, None] * canvas_height  # (B, 1), in canvas rows
    # One number per pixel, then one copy of three bytes per pixel: of the designs tried (sliding windows,
    # gather per channel, pixels packed into int32, advanced indexing) the fastest on a CPU.
    pixels = ((first + rows) * canvas_width)[:, :, None] + columns[:, None, :]  # (B, H, W)
    cropped = canvas.reshape(-1, channels).index_select(0, pixels.flatten())  # (B * H * W, 3)
    return cropped.view(batch, height, width, channels).permute(0, 3, 1, 2)


def normalise(images: Tensor, mean: Rgb, std: Rgb) -> Tensor:
    """(pixel / 255 - mean) / std per channel, without augmentation.

    images: (B, 3, H, W) uint8 in any memory layout. mean, std: in units of [0, 1]. Computed as one multiplication and
    one addition. Returns (B, 3, H, W) float32, channels_last.
    """
    scale, shift = _affine(tuple(mean), tuple(std), images.shape[3], images.device)  # (W * 3,) each
    pixels = images.permute(0, 2, 3, 1).to(torch.float32).contiguous()  # (B, H, W, 3), never the input itself
    # Rows of W * 3 numbers, since a broadcast over the three channels alone would defeat vectorisation.
    pixels.view(-1, scale.numel()).mul_(scale).add_(shift)
    return pixels.permute(0, 3, 1, 2)


@lru_cache(maxsize=16)
def _affine(mean: tuple[float, ...], std: tuple[float, ...], width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """1 / (255 std) and -mean / std, repeated over a row of pixels: (width * 3,) float32 each.

    Kept between calls, because a copy of fresh constants to a GPU would make every batch wait for it.
    """
    means, stds = torch.tensor(mean, dtype=torch.float64), torch.tensor(std, dtype=torch.float64)
    scale, shift = 1 / (255 * stds), -means / stds  # (3,)
    return tuple(x.repeat(width).to(device, torch.float32) for x in (scale, shift))


def _load_digits() -> tuple[Split, Split]:
    """Train (1,437 images) and test (360) of scikit-learn's digits; the division is the same for any seed."""
    # Imported here: scikit-learn takes a second to import, and the other data sets do without.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    grey = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # (1797, 8, 8), from 0..16 to 0..255
    grey = grey.repeat(4, axis=1).repeat(4, axis=2)  # (1797, 32, 32)
    images = torch.from_numpy(grey)[:, None].expand(-1, 3, -1, -1)
    labels = torch.from_numpy(digits.target.astype(np.int64))
    train_rows, test_rows = train_test_split(
        np.arange(len(labels)), test_size=360, stratify=digits.target, random_state=0
    )
    return tuple(Split(images[rows], labels[rows]) for rows in map(torch.from_numpy, (train_rows, test_rows)))


def _superclasses(root: Path) -> Tensor:
    """(20, 5) int64: the fine class ids of each superclass of CIFAR-100, read from the verified test file."""
    with open(root / CIFAR100.base_folder / CIFAR100.test_list[0][0], "rb") as file:
        entry = pickle.load(file, encoding="latin1")
    pairs = np.unique(np.stack((entry["coarse_labels"], entry["fine_labels"]), axis=1), axis=0)  # (100, 2)
    return torch.from_numpy(pairs[:, 1].astype(np.int64)).view(-1, 5)


def _load_cifar(kind: type[CIFAR10], root: Path, mirror: str | None) -> tuple[CIFAR10, CIFAR10]:
    """torchvision's training and test set."""
    url = mirror or kind.url
    if not urlsplit(url).path.endswith((".tar.gz", ".tgz")):
        url = f"{url.rstrip('/')}/{kind.filename}"

    def download() -> None:
        archive = root / kind.filename
        if urlsplit(url).scheme == "file" and not check_integrity(archive, kind.tgz_md5):
            shutil.copyfile(url2pathname(urlsplit(url).path), archive)  # torchvision cannot fetch these
            if not check_integrity(archive, kind.tgz_md5):
                raise RuntimeError("File corrupted")
        download_and_extract_archive(url, str(root), filename=kind.filename, md5=kind.tgz_md5)

    try:
        return downloaded(lambda: (kind(root, train=True), kind(root, train=False)), download, root / kind.base_folder)
    except (OSError, HTTPException, RuntimeError) as error:
        raise DatasetUnavailableError(
            f"{kind.__name__} is not available in {root} ({error}), nor to be had whole from {url}: start again if the "
            "connection was cut, check the network, the space and the permissions there, choose another data_dir, or "
            f"pass a mirror. To place it by hand, put {kind.filename} (MD5 {kind.tgz_md5}, from {kind.url}) into "
            f"{root}, where it is verified and unpacked, or its files into {root / kind.base_folder}"
        ) from error


def downloaded(load: Callable[[], T], download: Callable[[], object], place: Path) -> T:
    """What `load` returns of files at `place`, after `download` where it raises; processes download once.

    Both are torchvision's, which raises something else for each data set. Errors of the last attempt pass through.
    """
    with contextlib.suppress(Exception):
        return load()
    with held(lock_beside(place)):
        with contextlib.suppress(Exception):  # another process fetched the files while this one waited
            return load()
        # torchvision takes no timeout, and without one a dead connection hangs for ever.
        timeout = socket.getdefaulttimeout()
        socket.setdefaulttimeout(_SOCKET_TIMEOUT)
        try:
            download()
        finally:
            socket.setdefaulttimeout(timeout)
        return load()
