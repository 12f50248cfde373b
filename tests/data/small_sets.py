"""CIFAR-10, CIFAR-100 and the MNISTs in their published layouts, of few random images."""

import hashlib
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from torchvision.datasets import CIFAR10, CIFAR100

# Name -> torchvision's class, folder, key of the labels, file of the names of the classes, their key.
CIFARS = {
    "cifar100": (CIFAR100, "cifar-100-python", "fine_labels", "meta", "fine_label_names"),
    "cifar10": (CIFAR10, "cifar-10-batches-py", "labels", "batches.meta", "label_names"),
}
MNISTS = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST"}


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


def write_cifar(name: str, root: Path, train: int, test: int, seed: int = 0) -> Path:
    """Write a CIFAR into a folder, which is returned. The first three bytes of an image are its number."""
    _, folder, labels_key, meta_file, names_key = CIFARS[name]
    num_classes = int(name.removeprefix("cifar"))
    (root / folder).mkdir(parents=True)
    generator = np.random.default_rng(seed)
    for part, count, first in (("train", train, 0), ("test", test, train)):
        pixels = generator.integers(0, 256, (count, 3072), dtype=np.uint8)
        numbers = np.arange(first, first + count)
        pixels[:, 0] = numbers >> 16
        pixels[:, 1] = (numbers >> 8) & 255
        pixels[:, 2] = numbers & 255
        content = {"data": pixels, labels_key: (np.arange(count) % num_classes).tolist()}
        (root / folder / part).write_bytes(pickle.dumps(content, protocol=2))
    names = {names_key: [f"class{number}" for number in range(num_classes)]}
    (root / folder / meta_file).write_bytes(pickle.dumps(names, protocol=2))
    return root / folder


def accept_cifar(name: str, root: Path, patch: pytest.MonkeyPatch) -> None:
    """Let torchvision take this CIFAR for the published one: by its checksums, and without an address."""
    kind, folder, _, meta_file, names_key = CIFARS[name]
    files = root / folder
    patch.setattr(kind, "train_list", [["train", md5(files / "train")]])
    patch.setattr(kind, "test_list", [["test", md5(files / "test")]])
    patch.setattr(kind, "meta", {"filename": meta_file, "key": names_key, "md5": md5(files / meta_file)})
    patch.setattr(kind, "url", f"http://127.0.0.1:9/{kind.filename}")  # refuses connections


def write_mnist(name: str, root: Path, train: int, test: int, seed: int = 0) -> None:
    """Write an MNIST into a folder, as torchvision unpacks it."""
    raw = root / MNISTS[name] / "raw"
    raw.mkdir(parents=True)
    generator = np.random.default_rng(seed)
    for part, count in (("train", train), ("t10k", test)):
        images = generator.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = generator.integers(0, 10, count, dtype=np.uint8)
        labels[:10] = np.arange(10)
        header = struct.pack(">4i", 0x803, count, 28, 28)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 0x801, count) + labels.tobytes())
