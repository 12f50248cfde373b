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
from pydantic import InstanceOf, TypeAdapter, ValidationError
from torch import Tensor
from typing_extensions import TypedDict

from data.atomic_file import atomic_write
from experiments.shared.command_line import RunError

CURRENT = "checkpoint.pt"
_TRAILER_BYTES = len("sha256:") + 64 + 1  # mark, hexadecimal digest, newline

Form = Mapping[str, Any]  # what a dictionary holds at least: the type of each entry, by name
WEIGHTS: Form = {"model": dict[str, InstanceOf[Tensor]]}


class DamagedCheckpoint(RunError):
    """A checkpoint that is truncated or changed, or has another content; the message says which file and why."""


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write tensors, numbers, strings and containers of these. OSError (disk full, say) passes through."""
    # Not straight to the file: torch.save would turn the OSError of a full disk into an obscure RuntimeError.
    buffer = io.BytesIO()
    torch.save(state, buffer)
    with atomic_write(path, "wb") as file:
        file.write(buffer.getbuffer())
        file.write(_trailer(buffer.getbuffer()))


def read_checkpoint(path: Path, form: Form = WEIGHTS) -> dict[str, Any]:
    """Return what a file holds, on the CPU. form: what that must be.

    Raises DamagedCheckpoint, or FileNotFoundError if there is none.
    """
    content = path.read_bytes()
    payload, trailer = content[:-_TRAILER_BYTES], content[-_TRAILER_BYTES:]
    if trailer != _trailer(payload):
        raise DamagedCheckpoint(f"{path} is damaged: its content does not match the checksum at its end")
    try:
        state = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever reading something else, or what asks to run code, comes to: a dozen types
        raise DamagedCheckpoint(f"{path} is not a checkpoint ({type(error).__name__})") from None
    try:
        TypeAdapter(TypedDict("State", dict(form))).validate_python(state, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise DamagedCheckpoint(f"{path} is not a checkpoint of this script: {problem}") from None
    return state


def check_like(saved: Any, expected: Any, place: str) -> None:
    """Raise ValueError, which names the place, where a state has other names, shapes or types than another.

    So it does where a number is not finite.
    """
    if isinstance(expected, Tensor):
        if not isinstance(saved, Tensor) or (saved.shape, saved.dtype) != (expected.shape, expected.dtype):
            kind = f"{saved.dtype} {tuple(saved.shape)}" if isinstance(saved, Tensor) else type(saved).__name__
            raise ValueError(f"{place} is {kind}, and must be {expected.dtype} {tuple(expected.shape)}")
        if not saved.isfinite().all():
            raise ValueError(f"{place} is not finite")
        return
    if not isinstance(saved, Mapping) or saved.keys() != expected.keys():
        found = set(saved) if isinstance(saved, Mapping) else set()
        names = sorted(map(str, found ^ expected.keys()))
        raise ValueError(f"{place} {'lacks' if expected.keys() - found else 'has besides'} {', '.join(names[:3])}")
    for name, each in expected.items():
        check_like(saved[name], each, f"{place}.{name}")


def _trailer(payload: bytes | memoryview) -> bytes:
    return f"sha256:{hashlib.sha256(payload).hexdigest()}\n".encode()
