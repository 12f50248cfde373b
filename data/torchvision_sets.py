"""Data sets of torchvision, which are downloaded once where several commands want them."""

from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

from filelock import FileLock
from torchvision.datasets import VisionDataset

from data.torch_file import reason

# What torchvision raises for files that are absent or damaged, and for a server that does not answer.
UNREADABLE = (OSError, RuntimeError, ValueError, AssertionError, EOFError, HTTPException)


def load_or_download(
    kind: Callable[..., VisionDataset], data_dir: Path, name: str, files: str
) -> tuple[VisionDataset, VisionDataset]:
    """The training and the test part of a data set, downloaded if it is not in data_dir.

    Args:
        kind: torchvision's class.
        name: of the data set, for the message and the lock.
        files: what can be put there by hand, for the message.

    Raises:
        OSError: the data set is absent or damaged, and cannot be downloaded.
    """
    try:
        return kind(data_dir, train=True), kind(data_dir, train=False)
    except UNREADABLE as error:  # absent; or another command is writing it, which the lock waits for
        problem = reason(error)
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(data_dir / f"{name}.lock"):
            return kind(data_dir, train=True, download=True), kind(data_dir, train=False, download=True)
    except UNREADABLE as error:
        raise OSError(
            f"{name} cannot be read from {data_dir} ({problem}), nor downloaded ({reason(error)}). Check the network, "
            f"or put {files} into that folder; --data_dir names another one"
        ) from None
