"""Labelled images in folders, one per class, and their decoding: no mode guessed, no file left out without a word."""

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Dataset

from data.torch_file import reason

ENDINGS = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
SPLIT_FOLDERS = {  # name of a folder, in lower case -> split
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "val": "valid",
    "valid": "valid",
    "validation": "valid",
}


class Stamp(NamedTuple):
    """What changes with an image.

    image: its label and its file's name, size and time; they stay when a folder is copied with its times.
    file: the time at which the file got its name or rights, and its number; another file of that name has others.
    """

    image: bytes
    file: bytes


class UnreadableImage(ValueError):
    """An image that cannot be decoded; the message is a sentence with its path."""


def load_rgb(path: str) -> Image.Image:
    """The image in a file as 8-bit RGB, upright, the first frame of several; transparency is dropped.

    Raises:
        UnreadableImage: it cannot be decoded, or has a mode whose range is not known (float, 32-bit).
    """
    try:
        with Image.open(path) as opened:
            image = ImageOps.exif_transpose(opened)
            if image.mode.startswith("I;16") or (image.mode == "I" and opened.format in ("PNG", "PPM")):
                values = np.asarray(image).astype(np.float64)  # (H, W), 0 to 65,535
                image = Image.fromarray(np.rint(values / 257).clip(0, 255).astype(np.uint8))
            elif image.mode in ("I", "F"):
                raise OSError(f"the range of its mode {image.mode} is not known: save it with 8 or 16 bits")
            return image.convert("RGB")
    except Exception as error:  # decoders raise many types for a damaged file
        raise UnreadableImage(
            f"cannot read {path}: {reason(error)}. Repair or delete it, and give the command again"
        ) from None


class ImageFolder(Dataset):
    """Images in the order of torchvision's ImageFolder, by `load_rgb`, without hidden files and folders at any depth.

    Attributes:
        classes: names of the class folders, by label.
        samples: path and label of each image.
        notes: sentences about other files that are left out.

    Raises:
        ValueError: a folder cannot be read, or there is no image.
    """

    def __init__(self, folder: Path, transform: Callable[[Image.Image], Any] = lambda image: image) -> None:
        self.folder = folder
        self.transform = transform
        self.classes = class_folders(folder)
        if not self.classes:
            raise ValueError(f"{folder} holds no folder per class")
        self.samples: list[tuple[str, int]] = []
        _, _, left_out = next(_walk(folder))
        for label, name in enumerate(self.classes):
            for parent, _, files in sorted(_walk(folder / name)):
                for file in files:
                    if file.lower().endswith(ENDINGS):
                        self.samples.append((os.path.join(parent, file), label))
                    else:
                        left_out.append(file)
        if not self.samples:
            raise ValueError(f"there is no image in the class folders of {folder}")
        self.notes = self._notes(left_out)

    def _notes(self, left_out: list[str]) -> list[str]:
        notes = []
        kinds = Counter(Path(file).suffix.lower() or "without ending" for file in left_out)
        if kinds:
            counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
            notes.append(f"{kinds.total()} files in {self.folder} are no images of a class: {counts}")
        labels = {label for _, label in self.samples}
        empty = [name for label, name in enumerate(self.classes) if label not in labels]
        if empty:
            notes.append(f"{len(empty)} classes of {self.folder} have no image: {', '.join(empty[:5])}")
        return notes

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.samples[index]
        return self.transform(load_rgb(path)), label

    def stamps(self) -> list[Stamp]:
        """The stamp of each image."""
        with ThreadPoolExecutor(16) as threads:  # a file server answers several requests at once
            return list(threads.map(self._stamp, self.samples))

    def _stamp(self, sample: tuple[str, int]) -> Stamp:
        path, label = sample
        status = os.stat(path)
        name = os.fsencode(os.path.relpath(path, self.folder))
        image = b"%s\n%d %d %d\n" % (name, label, status.st_size, status.st_mtime_ns)
        return Stamp(image, b"%d %d\n" % (status.st_ctime_ns, status.st_ino))


def open_folders(folders: dict[str, Path], transform: Callable[[Image.Image], Tensor]) -> dict[str, ImageFolder]:
    """The images of each split. Raises ValueError for folders that cannot be read, or whose classes differ."""
    opened = {split: ImageFolder(folder, transform) for split, folder in folders.items()}
    first, *others = opened.values()
    for other in others:
        differing = sorted({*first.classes} ^ {*other.classes})
        if differing:
            raise ValueError(
                f"{first.folder} and {other.folder} must have the same class folders; {len(differing)} are in only one "
                f"of them: {', '.join(differing[:5])}"
            )
    return opened


def find_splits(path: Path) -> dict[str, Path]:
    """The folder of each split in `path`; `path` itself as train where it holds the classes. Raises ValueError."""
    found: dict[str, Path] = {}
    names = class_folders(path)
    for name in sorted(names, key=str.lower):
        split = SPLIT_FOLDERS.get(name.lower())
        # ImageNet's test images have no labels, and no class folders.
        if split is not None and class_folders(path / name):
            if split in found:
                raise ValueError(f"{found[split]} and {path / name} may both be the {split} split: rename one")
            found[split] = path / name
    if found:
        return {split: found[split] for split in ("train", "test", "valid") if split in found}
    if not names:
        raise ValueError(f"{path} holds no folder per class, and no train/, val/ or test/ that do")
    return {"train": path}


def notes_of_splits(path: Path, splits: Collection[Path]) -> list[str]:
    """A sentence about the folders of `path` that are none of its splits; none where `path` itself is one."""
    if path in splits:
        return []
    others = [name for name in class_folders(path) if path / name not in splits]
    if not others:
        return []
    return [f"{len(others)} folders of {path} are no train/, val/ or test/ with class folders: {', '.join(others[:5])}"]


def class_folders(path: Path) -> list[str]:
    """The names of the class folders in `path`, sorted. Raises ValueError where it is no folder, or not readable."""
    _, folders, _ = next(_walk(path))
    return folders


def _walk(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """os.walk without hidden files and folders, sorted.

    Raises:
        ValueError: a folder cannot be read, or a link leads to a folder that it lies in.
    """

    def refuse(error: OSError) -> None:
        raise ValueError(f"cannot read the folder {error.filename}: {error.strerror}")

    # For each folder where it really lies, and the folders on the way to it.
    ways = {os.fspath(folder): (os.path.realpath(folder),)}
    for parent, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in folders:
            path = os.path.join(parent, name)
            ways[path] = (*ways[parent], _real_place(path, ways[parent]))
        yield parent, folders, sorted(name for name in files if not name.startswith("."))


def _real_place(path: str, way: tuple[str, ...]) -> str:
    """Where a folder really lies. Raises ValueError for a link upwards; way: the real folders on the way to it."""
    if not os.path.islink(path):
        return os.path.join(way[-1], os.path.basename(path))
    real = os.path.realpath(path)
    for above in way:
        if os.path.commonpath([real, above]) == real:
            raise ValueError(f"{path} is a link to {real}, in which it lies itself: remove the link")
    return real


class Pixels(Dataset):
    """A split of data/cifar.py as images (transformed) and labels."""

    notes: tuple[str, ...] = ()

    def __init__(self, images: Tensor, labels: Tensor, transform: Callable[[Image.Image], Tensor]) -> None:
        self.images = images
        self.labels = labels
        self.transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = Image.fromarray(self.images[index].permute(1, 2, 0).contiguous().numpy())
        return self.transform(image), int(self.labels[index])

    def stamps(self) -> list[Stamp]:
        """The bytes and the label of each image, which has no file."""
        stamps = []
        for image, label in zip(self.images, self.labels.tolist()):
            stamps.append(Stamp(image.numpy().tobytes() + b"%d" % label, b""))
        return stamps
