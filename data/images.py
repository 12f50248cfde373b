"""Labelled images in folders, one per class, and their decoding: no mode guessed, no file left out without a word."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Dataset

from data.torch_file import reason

ENDINGS = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
SPLIT_FOLDERS = {  # name of a folder -> split
    **{"train": "train", "training": "train", "test": "test"},
    **{"val": "valid", "valid": "valid", "validation": "valid"},
}


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
        message = f"cannot read {path}: {reason(error)}. Repair or delete it, and give the command again"
        raise UnreadableImage(message) from None


class ImageFolder(Dataset):
    """Images in the order of torchvision's ImageFolder, by `load_rgb`, without hidden files and folders at any depth.

    notes: sentences about other files that are left out. Raises SystemExit for folders that cannot be read.
    """

    def __init__(self, folder: Path, transform: Callable[[Image.Image], Any] = lambda image: image) -> None:
        self.folder, self.transform, self.classes = folder, transform, class_folders(folder)
        if not self.classes:
            raise SystemExit(f"error: {folder} holds no folder per class")
        self.samples: list[tuple[str, int]] = []  # path, label
        left_out = [next(_walk(folder))[2]]
        for label, name in enumerate(self.classes):
            for parent, _, files in sorted(_walk(folder / name)):
                images = [file for file in files if file.lower().endswith(ENDINGS)]
                self.samples += [(os.path.join(parent, image), label) for image in images]
                left_out.append([file for file in files if file not in images])
        if not self.samples:
            raise SystemExit(f"error: there is no image in the class folders of {folder}")
        self.notes = []
        if kinds := Counter(Path(file).suffix.lower() or "without ending" for files in left_out for file in files):
            shown = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
            self.notes.append(f"{kinds.total()} files in {folder} are no images of a class: {shown}")
        labels = {label for _, label in self.samples}
        if empty := [name for label, name in enumerate(self.classes) if label not in labels]:
            self.notes.append(f"{len(empty)} classes of {folder} have no image: {', '.join(empty[:5])}")

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.samples[index]
        return self.transform(load_rgb(path)), label

    def stamps(self) -> list[bytes]:
        """A line for each image that changes when the file is replaced: name, label, size, time of the last change."""

        def stamp(sample: tuple[str, int]) -> bytes:
            status, name = os.stat(sample[0]), os.fsencode(os.path.relpath(sample[0], self.folder))
            return b"%s\n%d %d %d\n" % (name, sample[1], status.st_size, status.st_mtime_ns)

        with ThreadPoolExecutor(16) as threads:  # a file server answers several requests at once
            return list(threads.map(stamp, self.samples))


def open_folders(folders: dict[str, Path], transform: Callable[[Image.Image], Tensor]) -> dict[str, ImageFolder]:
    """The images of each split. Raises SystemExit for folders that cannot be read, or whose classes differ."""
    opened = {split: ImageFolder(folder, transform) for split, folder in folders.items()}
    first, *others = opened.values()
    for other in others:
        if differing := sorted({*first.classes} ^ {*other.classes}):
            message = f"{first.folder} and {other.folder} must have the same class folders"
            raise SystemExit(f"error: {message}; {len(differing)} are in only one of them: {', '.join(differing[:5])}")
    return opened


def find_splits(path: Path) -> dict[str, Path]:
    """The folder of each split in `path`; `path` itself as train where it holds the classes. Raises SystemExit."""
    found: dict[str, Path] = {}
    for name, split in SPLIT_FOLDERS.items():
        # ImageNet's test images have no labels, and no class folders.
        if (path / name).is_dir() and class_folders(path / name):
            if split in found:
                raise SystemExit(f"error: {found[split]} and {path / name} may both be the {split} split: rename one")
            found[split] = path / name
    if not found and not class_folders(path):
        raise SystemExit(f"error: {path} holds no folder per class, and no train/, val/ or test/ that do")
    return found or {"train": path}


def class_folders(path: Path) -> list[str]:
    """The names of the class folders in `path`, sorted. Raises SystemExit where it is no folder, or not readable."""
    return next(_walk(path))[1]


def _walk(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """os.walk without hidden files and folders, sorted. Raises SystemExit for a folder that cannot be read."""

    def refuse(error: OSError) -> None:
        raise SystemExit(f"error: cannot read the folder {error.filename}: {error.strerror}")

    for parent, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield parent, folders, sorted(name for name in files if not name.startswith("."))


class Pixels(Dataset):
    """A split of data/cifar.py as images (transformed) and labels."""

    notes: tuple[str, ...] = ()

    def __init__(self, images: Tensor, labels: Tensor, transform: Callable[[Image.Image], Tensor]) -> None:
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = Image.fromarray(self.images[index].permute(1, 2, 0).contiguous().numpy())
        return self.transform(image), int(self.labels[index])

    def stamps(self) -> list[bytes]:
        """The bytes and the label of each image."""
        return [image.numpy().tobytes() + b"%d" % label for image, label in zip(self.images, self.labels.tolist())]
