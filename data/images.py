"""Labelled images in folders, one per class, and their decoding: no mode guessed, no file left out without a word."""

import os
import stat
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import datasets

ENDINGS = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
SPLIT_FOLDERS = {"train": ("train", "training"), "valid": ("val", "valid", "validation"), "test": ("test",)}


class UnreadableImage(ValueError):
    """An image that cannot be decoded; the message is a sentence with its path."""


def load_rgb(path: str) -> Image.Image:
    """The image in a file as 8-bit RGB, upright, the first frame of several; transparency is dropped.

    Raises:
        UnreadableImage: it cannot be decoded, or has a mode whose range is not known (float, 32-bit).
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for ever
            raise OSError("not a regular file")
        with Image.open(path) as opened:
            image = ImageOps.exif_transpose(opened)
            if image.mode.startswith("I;16") or (image.mode == "I" and opened.format in ("PNG", "PPM")):
                values = np.asarray(image).astype(np.float64)  # (H, W), 0 to 65,535
                image = Image.fromarray(np.rint(values / 257).clip(0, 255).astype(np.uint8))
            elif image.mode in ("I", "F"):
                raise OSError(f"the range of its mode {image.mode} is not known: save it with 8 or 16 bits")
            return image.convert("RGB")
    except Exception as error:  # decoders raise many types for a damaged file
        message = f"cannot read {printable(path)}: {str(error).partition(' <_io.')[0] or type(error).__name__}"
        raise UnreadableImage(f"{message}. Repair or delete it, and give the command again") from None


def printable(path: str | Path) -> str:
    """A path that can be printed, even if it is not UTF-8."""
    return os.fsencode(path).decode(errors="backslashreplace")


def ending(path: str) -> str:
    """The ending of a file's name, for messages."""
    return Path(path).suffix.lower() or "without ending"


class ImageFolder(datasets.ImageFolder):
    """torchvision's ImageFolder with `load_rgb`, without hidden files and folders at any depth.

    notes: sentences about other files that are left out. Raises SystemExit for folders that cannot be read.
    """

    def __init__(self, folder: Path, transform: Callable[[Image.Image], Tensor] | None = None) -> None:
        for _, folders, _ in os.walk(folder, onerror=_refuse, followlinks=True):  # torchvision ignores errors
            folders[:] = _visible(folders)
        # Files in the folder itself; _is_image counts those in class folders.
        self.ignored = Counter(ending(name) for name in _visible(next(os.walk(folder))[2]))
        super().__init__(str(folder), transform, loader=load_rgb, is_valid_file=self._is_image, allow_empty=True)
        if not self.samples:
            raise SystemExit(f"error: there is no image in the class folders of {printable(folder)}")
        self.notes = []
        if self.ignored:
            kinds = ", ".join(f"{count} {printable(kind)}" for kind, count in sorted(self.ignored.items()))
            self.notes.append(f"{self.ignored.total()} files in {printable(folder)} are no images of a class: {kinds}")
        present = set(self.targets)
        if empty := [printable(name) for label, name in enumerate(self.classes) if label not in present]:
            self.notes.append(f"{len(empty)} classes of {printable(folder)} have no image: {', '.join(empty[:5])}")

    def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
        names = class_folders(directory)
        if not names:
            raise SystemExit(f"error: {printable(directory)} holds no folder per class")
        return names, {name: label for label, name in enumerate(names)}

    def _is_image(self, path: str) -> bool:
        if "/." in path[len(self.root) :]:
            return False
        known = path.lower().endswith(ENDINGS)
        self.ignored.update([] if known else [ending(path)])
        return known

    def stamps(self) -> list[bytes]:
        """A line for each image that changes when the file is replaced: name, label, size, time of the last change."""

        def stamp(sample: tuple[str, int]) -> bytes:
            status, name = os.stat(sample[0]), os.fsencode(os.path.relpath(sample[0], self.root))
            return b"%s\n%d %d %d\n" % (name, sample[1], status.st_size, status.st_mtime_ns)

        with ThreadPoolExecutor(16) as threads:  # a file server answers several requests at once
            return list(threads.map(stamp, self.samples))


def open_folders(folders: dict[str, Path], transform: Callable[[Image.Image], Tensor]) -> dict[str, ImageFolder]:
    """The images of each split. Raises SystemExit for folders that cannot be read, or whose classes differ."""
    opened = {split: ImageFolder(folder, transform) for split, folder in folders.items()}
    first, *others = opened
    for other in others:
        if differing := sorted({*opened[first].classes} ^ {*opened[other].classes}):
            message = f"{printable(folders[first])} and {printable(folders[other])} must have the same class folders"
            names = ", ".join(map(printable, differing[:5]))
            raise SystemExit(f"error: {message}; {len(differing)} are in one alone: {names}")
    return opened


def find_splits(path: Path) -> dict[str, Path]:
    """The folder of each split in `path`; `path` itself as train where it holds the classes. Raises SystemExit."""
    found = {}
    for split, names in SPLIT_FOLDERS.items():
        # ImageNet's test images have no labels, and no class folders.
        candidates = [path / name for name in names if (path / name).is_dir() and class_folders(path / name)]
        if len(candidates) > 1:
            raise SystemExit(f"error: {candidates[0]} and {candidates[1]} may both be the {split} split: rename one")
        if candidates:
            found[split] = candidates[0]
    if not found and not class_folders(path):
        raise SystemExit(f"error: {path} holds no folder per class, and no train/, val/ or test/ that do")
    return found or {"train": path}


def class_folders(path: Path | str) -> list[str]:
    """The names of the class folders in `path`, sorted. Raises SystemExit where it is no folder, or not readable."""
    return sorted(_visible(next(os.walk(path, onerror=_refuse))[1]))


def _visible(names: list[str]) -> list[str]:
    return [name for name in names if not name.startswith(".")]


def _refuse(error: OSError) -> None:
    raise SystemExit(f"error: cannot read the folder {printable(error.filename)}: {error.strerror}")


class Pixels(Dataset):
    """A split of data/cifar.py as images (transformed) and labels."""

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
