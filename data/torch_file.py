"""Reading torch files: tensors and plain containers, no code, and a sentence for a file that is none."""

import mmap
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

NPY_MAGIC = b"\x93NUMPY"  # how a .npy file begins
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
UNSUPPORTED = re.compile(r"GLOBAL (\S+)")  # the name that PyTorch's message says it does not read


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
        if holds_arrays(path, error):
            raise ValueError(
                f"{path} holds NumPy arrays, and must be {holds}: wrap each array in torch.tensor, and write the file "
                "by torch.save"
            ) from None
        raise ValueError(f"{path} is not {holds}, or is damaged ({reason(error)}){advice}") from None


def check_sums(path: Path) -> None:
    """Raise ValueError for a part of a torch file that is not what its checksum says."""
    with zipfile.ZipFile(path) as parts:
        damaged = parts.testzip()
    if damaged is not None:
        raise ValueError(f"{damaged} is not what its checksum says")


def holds_arrays(path: Path, error: Exception) -> bool:
    """Whether a file that PyTorch refused with an error is one of NumPy, or has its arrays."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        if file.read(len(NPY_MAGIC)) == NPY_MAGIC:
            return True
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as parts:
            if any(name.endswith(".npy") for name in parts.namelist()):
                return True
    named = UNSUPPORTED.search(str(error))
    return named is not None and named[1].startswith("numpy.")


def reason(error: Exception) -> str:
    """The type and the message of an error, in one line without escape codes."""
    message = " ".join(ESCAPE.sub("", str(error)).split())
    named = UNSUPPORTED.search(message)
    if named is not None:
        message = f"it holds {named[1]}, which is no tensor"
    elif message.startswith("Weights only load failed"):
        message = "it is no file of torch.save"
    return f"{type(error).__name__}: {message[:300]}"
