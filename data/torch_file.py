"""Reading torch files: tensors and plain containers, no code, and a sentence for a file that is none."""

import mmap
import zipfile
from pathlib import Path
from typing import Any

import torch


def load_torch_file(path: Path, holds: str, *, mapped: bool = False, checked: bool = False, advice: str = "") -> Any:
    """The content of a torch file, on the CPU.

    Args:
        holds: what the file should be, for the message.
        mapped: map the file instead of reading it, so that one of any size opens at once.
        checked: compare what the file holds with its checksums, which PyTorch writes and does not read.
        advice: end of the message.

    Raises:
        ValueError: it is absent, damaged, or no such file.
    """
    try:
        mapped = mapped and zipfile.is_zipfile(path)  # files from before torch 1.6 are read whole
        if checked:
            check_sums(path)
        try:
            return torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
        except RuntimeError as error:
            if "(12)" not in str(error):  # ENOMEM: Linux refuses a private map of a file larger than memory
                raise
            with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
                return torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
    except Exception as error:  # a damaged file raises one of a dozen types
        raise ValueError(f"{path} is not {holds}, or is damaged ({reason(error)}){advice}") from None


def check_sums(path: Path) -> None:
    """Raise ValueError for a part of a torch file that is not what its checksum says."""
    with zipfile.ZipFile(path) as parts:
        damaged = parts.testzip()
    if damaged is not None:
        raise ValueError(f"{damaged} is not what its checksum says")


def reason(error: Exception) -> str:
    """The type and the message of an error, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
