"""Checkpoint files: whole or absent, with a checksum, and believed only where they hold what they must.

A file that was truncated or changed in any byte is recognised by the SHA-256 in its last 72 bytes. It is an ordinary
torch file all the same: `torch.load("checkpoint.pt", weights_only=True)` opens it.
"""

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.atomic_file import atomic_write
from data.program import ProgramError

CURRENT = "checkpoint.pt"
_TRAILER_BYTES = len("sha256:") + 64 + 1  # mark, hexadecimal digest, newline


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write tensors, numbers, strings and containers of these. OSError (disk full, say) passes through."""
    # Not straight to the file: torch.save would turn the OSError of a full disk into an obscure RuntimeError.
    buffer = io.BytesIO()
    torch.save(state, buffer)
    with atomic_write(path, "wb") as file:
        file.write(buffer.getbuffer())
        file.write(_trailer(buffer.getbuffer()))


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return what a file holds, on the CPU, its "model" at least. Raises ProgramError or FileNotFoundError."""
    content = path.read_bytes()
    payload, trailer = content[:-_TRAILER_BYTES], content[-_TRAILER_BYTES:]
    if trailer != _trailer(payload):
        raise ProgramError(f"{path} is damaged: its content does not match the checksum at its end")
    try:
        state = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
        weights = state["model"].values()
    except Exception as error:  # whatever reading something else, or what asks to run code, comes to: a dozen types
        raise ProgramError(f"{path} is not a checkpoint of these scripts ({type(error).__name__})") from None
    if not all(isinstance(each, Tensor) for each in weights):
        raise ProgramError(f"{path} is not a checkpoint of these scripts: its model holds other things than tensors")
    return state


def check_like(saved: Any, expected: Any, place: str) -> None:
    """Raise ValueError, which names the place, for other names, shapes or types, and for what is not finite."""
    if isinstance(expected, Mapping) and isinstance(saved, Mapping):
        if differing := sorted(map(str, saved.keys() ^ expected.keys())):
            lacking = expected.keys() - saved.keys()
            raise ValueError(f"{place} {'lacks' if lacking else 'has besides'} {', '.join(differing[:3])}")
        for name, each in expected.items():
            check_like(saved[name], each, f"{place}.{name}")
    elif isinstance(expected, list) and isinstance(saved, list):
        for number, each in enumerate(saved):
            check_like(each, expected[0], f"{place}.{number}")
    elif (kind := _kind(saved)) != _kind(expected):
        raise ValueError(f"{place} is {kind}, and must be {_kind(expected)}")
    elif isinstance(saved, Tensor) and not saved.isfinite().all():
        raise ValueError(f"{place} is not finite")


def _kind(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _trailer(payload: bytes | memoryview) -> bytes:
    return f"sha256:{hashlib.sha256(payload).hexdigest()}\n".encode()
