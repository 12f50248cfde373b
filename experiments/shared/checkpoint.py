"""Exact resume: one checkpoint per epoch, two generations, each with a checksum.

`save_checkpoint(folder, state)` leaves `checkpoint.pt` (this epoch) and `checkpoint.previous.pt` (the one
before); `load_checkpoint(folder)` returns the newest that is whole. A file that was truncated or changed in
any byte is recognised by the SHA-256 in its last 72 bytes, named on stderr and passed over. The files are
ordinary torch files all the same: `torch.load("checkpoint.pt", weights_only=True)` opens one.
"""

import hashlib
import io
import os
import sys
from pathlib import Path
from typing import Any

import torch

from data.atomic_file import atomic_write

CURRENT, PREVIOUS = "checkpoint.pt", "checkpoint.previous.pt"

_MARK = b"sha256:"
_TRAILER_BYTES = len(_MARK) + 64 + 1  # mark, hexadecimal digest, newline


class DamagedCheckpoint(Exception):
    """A checkpoint that is truncated or changed; the message says which file and why."""


def save_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Write `state` (tensors, numbers, strings and containers of these) as the folder's current checkpoint.

    The checkpoint that was current becomes the previous one. Whenever the process is killed, at least one
    whole checkpoint remains from the first save on. OSError (disk full, say) passes through.
    """
    # Not straight to the file: torch.save would turn the OSError of a full disk into an obscure RuntimeError.
    buffer = io.BytesIO()
    torch.save(state, buffer)
    current = folder / CURRENT
    with atomic_write(current, "wb") as file:
        file.write(buffer.getbuffer())
        file.write(_trailer(buffer.getbuffer()))
        file.flush()
        # Until the new file takes its name, the last epoch is found as the previous generation.
        if current.exists():
            os.replace(current, folder / PREVIOUS)


def read_checkpoint(path: Path, map_location: str | torch.device = "cpu") -> dict[str, Any]:
    """Return the state saved in one file. Raises DamagedCheckpoint, or FileNotFoundError if there is none."""
    content = path.read_bytes()
    payload, trailer = content[:-_TRAILER_BYTES], content[-_TRAILER_BYTES:]
    if not trailer.startswith(_MARK):
        raise DamagedCheckpoint(f"{path} is truncated: {len(content)} bytes without a checksum at the end")
    if trailer != _trailer(payload):
        raise DamagedCheckpoint(f"{path} is damaged: its content does not match its checksum")
    return torch.load(io.BytesIO(payload), map_location=map_location, weights_only=True)


def load_checkpoint(folder: Path) -> dict[str, Any] | None:
    """Return the state of the newest whole checkpoint in `folder`, on the CPU, or None if there is none.

    A damaged file is named on stderr and removed: left in place, the next save would rotate it over the whole
    one.
    """
    for name in (CURRENT, PREVIOUS):
        try:
            return read_checkpoint(folder / name)
        except FileNotFoundError:
            continue
        except DamagedCheckpoint as damage:
            print(f"warning: {damage}; it is passed over", file=sys.stderr)
            (folder / name).unlink()
    return None


def _trailer(payload: bytes | memoryview) -> bytes:
    return _MARK + hashlib.sha256(payload).hexdigest().encode() + b"\n"


def remove_checkpoints(folder: Path, names: tuple[str, ...] = (CURRENT, PREVIOUS)) -> None:
    """Delete the named checkpoints of `folder`, the older one first: a kill in between leaves the newer."""
    for name in reversed(names):
        (folder / name).unlink(missing_ok=True)


def random_states(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the states of torch's global generators, the CPU's and the device's.

    The data order and the augmentation need none of them (they are functions of seed and epoch); nothing in
    the training loop draws from Python's or NumPy's generators.
    """
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_states(states: dict[str, torch.Tensor], device: torch.device) -> None:
    """Set the generators to `states`; a run that moved between CPU and CUDA keeps the ones that it has."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
