"""Labelled images as they lie on the disk, unaugmented and in a fixed order: folders, torchvision's data sets, digits.

    source = open_images("path/to/imagenet")       train/ and val/ (or test/), in each one folder per class
    source = open_images("cifar100", data_dir)     data/cifar100.py: complete, or divided as in a training
    source = open_images("flowers102", data_dir)   one of TORCHVISION, downloaded unless it is there

Each split of a source is a list of images: `len`, `read(index)` gives a PIL image (RGB) and its label,
`describe(index)` what to call it in a message. Folders are listed by the rules of torchvision's ImageFolder; hidden
ones are no classes. `ImageBatches` puts a transform behind it, for torch's DataLoader, and hands on an image that
cannot be read as such: with its index and the reason.
"""

import difflib
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchvision
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS, ImageFolder, default_loader

from data.cifar100 import DATASETS, DatasetUnavailableError, Split, downloaded, load_complete, load_dataset
from data.program import ProgramError

# Names that the folder of a split may have.
SPLIT_FOLDERS: dict[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "valid": ("val", "valid", "validation"),
    "test": ("test",),
}

# Name -> class in torchvision.datasets, and the arguments that select its training and its test images.
_SPLIT = ({"split": "train"}, {"split": "test"})
_TRAIN = ({"train": True}, {"train": False})
TORCHVISION: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "country211": ("Country211", *_SPLIT),
    "dtd": ("DTD", *_SPLIT),
    "fashion_mnist": ("FashionMNIST", *_TRAIN),
    "fgvc_aircraft": ("FGVCAircraft", {"split": "trainval"}, {"split": "test"}),
    "flowers102": ("Flowers102", *_SPLIT),
    "food101": ("Food101", *_SPLIT),
    "gtsrb": ("GTSRB", *_SPLIT),
    "imagenette": ("Imagenette", {"split": "train"}, {"split": "val"}),
    "mnist": ("MNIST", *_TRAIN),
    "oxford_iiit_pet": ("OxfordIIITPet", {"split": "trainval"}, {"split": "test"}),
    "pcam": ("PCAM", *_SPLIT),
    "rendered_sst2": ("RenderedSST2", *_SPLIT),
    "stl10": ("STL10", *_SPLIT),
    "svhn": ("SVHN", *_SPLIT),
    "usps": ("USPS", *_TRAIN),
}


class ImageSourceError(ProgramError, ValueError):
    """A source of images cannot be used as it was described; the message says why and how to mend it."""


class Images:
    """The images of one split, in a fixed order.

    name: what to call it. dataset: items are a PIL image and a whole number. limit: so many of them, at equal
    distances, so that every class of a sorted list has its share.
    """

    def __init__(self, name: str, dataset: Dataset, limit: int | None = None) -> None:
        self.name, self.dataset, self._count = name, dataset, len(dataset) if limit is None else limit

    def __len__(self) -> int:
        return self._count

    def _row(self, index: int) -> int:
        return index * len(self.dataset) // self._count

    def read(self, index: int) -> tuple[Image.Image, int]:
        """The image, RGB, and its label. Raises whatever its decoder does for one that is broken."""
        image, label = self.dataset[self._row(index)]
        return image.convert("RGB"), int(label)

    def describe(self, index: int) -> str:
        """The path of an image, or what else tells it from others."""
        row = self._row(index)
        return self.dataset.samples[row][0] if isinstance(self.dataset, _Folder) else f"{self.name} image {row}"


@dataclass(frozen=True)
class ImageSource:
    """Splits of labelled images.

    name: what to call it. class_names: by label, () where they are not known. fingerprint: JSON that changes with the
    list of images. notes: sentences on files that are no images by their names, and the like.
    """

    name: str
    class_names: tuple[str, ...]
    splits: Mapping[str, Images]
    fingerprint: Mapping[str, Any]
    notes: tuple[str, ...] = ()


class _Folder(ImageFolder):
    """Images below one folder per class, hidden ones left out. ignored: endings of the other files, counted."""

    def __init__(self, root: Path) -> None:
        self.ignored = Counter()
        super().__init__(str(root), loader=_opened, is_valid_file=self._is_image, allow_empty=True)

    def _is_image(self, path: str) -> bool:
        found = path.lower().endswith(IMG_EXTENSIONS)
        self.ignored.update([] if found else [Path(path).suffix.lower() or "without ending"])
        return found

    def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
        """Class names and their labels."""
        classes = _class_folders(Path(directory))
        return classes, {name: label for label, name in enumerate(classes)}


def _opened(path: str) -> Image.Image:
    if not os.path.isfile(path):  # opening a pipe would wait for ever
        raise OSError("not a regular file")
    return default_loader(path)


class _Pixels(Dataset):
    """A Split of data/cifar100.py as images."""

    def __init__(self, split: Split) -> None:
        self.split = split

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, row: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.split.images[row].permute(1, 2, 0).numpy()), int(self.split.labels[row])


def open_images(
    dataset: str | None,
    data_dir: str | Path,
    *,
    folders: Mapping[str, str | Path] | None = None,
    mirror: str | None = None,
    limits: Mapping[str, int | None] | None = None,
    division: Mapping[str, int | None] | None = None,
) -> ImageSource:
    """Open a source of images. Reads names, no images.

    dataset: a name of data/cifar100.py's DATASETS or of TORCHVISION, or the path of a folder, "folder:PATH" where the
        two could be confused; None with `folders`. A folder holds a folder per class, or one of SPLIT_FOLDERS per
        split which do. data_dir: where torchvision's data sets are, or are downloaded to. mirror: as for
        `load_dataset`. folders: split -> folder of class folders. limits: split -> take so many, at equal distances.
    division: of DATASETS, seed and limit_train as for `load_dataset`: what trained a network and what validated it,
        in place of one set without validation.

    Raises ImageSourceError, and DatasetUnavailableError for files that are not to be had.
    """
    name = dataset or ""
    path = Path(os.path.expanduser(name.removeprefix("folder:")))
    if folders:
        folders = {split: Path(os.path.expanduser(folder)) for split, folder in folders.items()}
        source = _open_folders(folders, "+".join(folder.resolve().name for folder in folders.values()))
    elif name in DATASETS:
        *both, class_names = load_complete(name, data_dir, mirror=mirror)
        splits = dict(zip(("train", "test"), both))
        if division:
            data = load_dataset(name, data_dir, mirror=mirror, **division)
            splits = {"train": data.train, "valid": data.valid, "test": data.test}
        source = _source(name, {split: _Pixels(images) for split, images in splits.items()}, class_names)
        source = replace(source, fingerprint={**source.fingerprint, **(division or {})})
    elif name in TORCHVISION:
        kind, *selections = TORCHVISION[name]
        both = [_of_torchvision(name, kind, Path(os.path.expanduser(data_dir)), each) for each in selections]
        source = _source(name, dict(zip(("train", "test"), both)), map(str, getattr(both[0], "classes", ())))
    elif path.is_dir() and name:
        source = _open_folders(_split_folders(path), path.resolve().name)
    elif "/" in name or name.startswith("folder:"):
        raise ImageSourceError(f"there is no folder {path}: check the path of --dataset")
    else:
        known = (*DATASETS, *TORCHVISION)
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
        raise ImageSourceError(f"unknown dataset {name!r}{hint} Give a folder or one of: {', '.join(known)}")
    splits = dict(source.splits)
    for split, limit in (limits or {}).items():
        available = len(splits.get(split, ()))
        if limit is not None and not 1 <= limit <= available:
            raise ImageSourceError(
                f"--limit_{split} must be from 1 to {available}, the number of {split} images, got {limit}"
            )
        if limit is not None:
            splits[split] = Images(splits[split].name, splits[split].dataset, limit)
    fingerprint = {**source.fingerprint, "images": {split: len(images) for split, images in splits.items()}}
    return replace(source, splits=splits, fingerprint=fingerprint)


def _source(name: str, splits: Mapping[str, Dataset], class_names: Iterable[str]) -> ImageSource:
    """The splits of a data set of a name."""
    splits = {split: Images(f"{name} {split}", images) for split, images in splits.items()}
    return ImageSource(name, tuple(class_names), splits, {"dataset": name})


class ImageBatches(Dataset):
    """Transformed images by (split, index), for a DataLoader with `collate`. Pickles if the transform does.

    An item is (tensor, label, index, ""), or (None, -1, index, reason) for an image that cannot be read.
    """

    def __init__(self, splits: Mapping[str, Images], transform: Callable[[Image.Image], Tensor]) -> None:
        self.splits, self.transform = splits, transform

    def __getitem__(self, key: tuple[str, int]) -> tuple[Tensor | None, int, int, str]:
        split, index = key
        try:
            image, label = self.splits[split].read(index)
        except MemoryError:
            raise
        except Exception as error:  # what a decoder meets in a broken file has no common class
            reason = str(error).partition(" <_io.")[0] or "no reason given"
            return None, -1, index, f"{type(error).__name__}: {reason}"
        return self.transform(image), label, index, ""


def collate(items: Iterable[tuple[Tensor | None, int, int, str]]) -> tuple[Tensor, Tensor, list[int], list]:
    """Images (b, ...), labels (b,) int64 and indices of those that could be read; (index, reason) of the others."""
    items = list(items)
    good = [item for item in items if item[0] is not None]
    broken = [(index, reason) for image, _, index, reason in items if image is None]
    images = torch.stack([item[0] for item in good]) if good else torch.empty(0)
    return images, torch.tensor([item[1] for item in good], dtype=torch.int64), [item[2] for item in good], broken


def _of_torchvision(name: str, kind: str, data_dir: Path, selection: Mapping[str, Any]) -> Dataset:
    make = partial(getattr(torchvision.datasets, kind), str(data_dir), **selection)
    try:
        return downloaded(make, partial(make, download=True), data_dir / kind)
    except ImportError as error:
        raise ImageSourceError(f"{name} needs another package: {error}") from None
    except Exception as error:
        raise DatasetUnavailableError(
            f"{name} is neither in {data_dir}, whole, nor to be downloaded ({type(error).__name__}: {error}): check "
            f"the network, delete damaged files, or place whole ones as torchvision.datasets.{kind} wants them"
        ) from None


def _split_folders(path: Path) -> dict[str, Path]:
    """The folder of each split below `path`; `path` itself as train where it holds classes."""
    found = {}
    for split, names in SPLIT_FOLDERS.items():
        # Only folders of classes: the test images that ImageNet brings have no labels, and lie flat.
        candidates = [path / name for name in names if (path / name).is_dir() and _class_folders(path / name)]
        if len(candidates) > 1:
            raise ImageSourceError(
                f"{path} has {' and '.join(f'{each.name}/' for each in candidates)}, and one can be the {split} split: "
                "rename the other"
            )
        if candidates:
            found[split] = candidates[0]
    if found:
        return found
    if not _class_folders(path):
        raise ImageSourceError(
            f"{path} holds no folder per class, and no train/, val/ or test/ which do: name such folders by "
            "--train_dir and --test_dir"
        )
    return {"train": path}


def _class_folders(path: Path) -> list[str]:
    return sorted(each.name for each in os.scandir(path) if each.is_dir() and not each.name.startswith("."))


def _open_folders(folders: Mapping[str, Path], name: str) -> ImageSource:
    listed = {}
    for split, folder in folders.items():
        if not folder.is_dir() or not _class_folders(folder):
            what = "holds no folder per class" if folder.is_dir() else "is not a folder"
            raise ImageSourceError(f"{folder}, given for the {split} images, {what}: check the path")
        listed[split] = _Folder(folder)
        if not listed[split].samples:
            raise ImageSourceError(f"there is no image below {folder}: files end in {' '.join(IMG_EXTENSIONS)}")
    first, *others = listed
    class_names = listed[first].classes
    for other in others:
        if differing := sorted({*class_names} ^ {*listed[other].classes}):
            raise ImageSourceError(
                f"{first} and {other} must have the same class folders, since these number the labels; "
                f"{len(differing)} are in one alone: {', '.join(differing[:5])}"
            )
    digests, notes = {}, []
    for split, images in listed.items():
        paths = [os.path.relpath(path, images.root) for path, _ in images.samples]
        digests[split] = hashlib.sha256("\n".join(paths).encode()).hexdigest()
        if images.ignored:
            endings = ", ".join(f"{count} {ending}" for ending, count in sorted(images.ignored.items()))
            left_out = f"{images.ignored.total()} files below {images.root} are no images by their names"
            notes.append(f"{left_out} ({endings}) and are left out")
        present = set(images.targets)
        if empty := [each for label, each in enumerate(class_names) if label not in present]:
            notes.append(f"{len(empty)} classes have no {split} image: {', '.join(empty[:5])}")
    splits = {split: Images(split, images) for split, images in listed.items()}
    return ImageSource(f"folder:{name}", tuple(class_names), splits, {"paths_sha256": digests}, tuple(notes))
