"""Exact resume: one checkpoint per epoch, two generations, each with a checksum.

`save_checkpoint(folder, state)` leaves `checkpoint.pt` (this epoch) and `checkpoint.previous.pt` (the one
before); `load_checkpoint(folder, form)` returns the newest that is whole. A file that was truncated or changed in
any byte is recognised by the SHA-256 in its last 72 bytes, and one whose content is not what it must be by its form;
it is named on stderr and passed over. The files are ordinary torch files all the same:
`torch.load("checkpoint.pt", weights_only=True)` opens one.
"""

import hashlib
import io
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, InstanceOf, TypeAdapter, ValidationError
from torch import Tensor
from typing_extensions import TypedDict

from data.atomic_file import atomic_write
from experiments.shared.command_line import RunError
from experiments.shared.metrics import EVALUATION

CURRENT, PREVIOUS = "checkpoint.pt", "checkpoint.previous.pt"

_MARK = b"sha256:"
_TRAILER_BYTES = len(_MARK) + 64 + 1  # mark, hexadecimal digest, newline

Form = Mapping[str, Any]  # what a dictionary holds at least: the type of each entry, by name


def history_of(columns: Iterable[str]) -> Any:
    """Return the type of a history: a list of one or more evaluations, each with a number in these columns at least."""
    return Annotated[list[TypedDict("Evaluation", dict.fromkeys(columns, float))], Field(min_length=1)]


WEIGHTS: Form = {"model": dict[str, InstanceOf[Tensor]]}
# What both training scripts save, each with more of its own.
RUN: Form = {
    **WEIGHTS,
    "optimizer": dict[str, Any] | None,
    "history": history_of(EVALUATION),
    "started_utc": str,
    "times_resumed": int,
    "git_commits": list[str],
}


class DamagedCheckpoint(RunError):
    """A checkpoint that is truncated or changed, or has another content; the message says which file and why.

    whole: whether its checksum is right: then another version of this code, or somebody else, wrote it.
    """

    def __init__(self, message: str, whole: bool = False) -> None:
        super().__init__(message)
        self.whole = whole


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


def read_checkpoint(path: Path, form: Form = WEIGHTS) -> dict[str, Any]:
    """Return the state saved in one file, on the CPU.

    form: what it must hold. Raises DamagedCheckpoint, or FileNotFoundError if there is none.
    """
    content = path.read_bytes()
    payload, trailer = content[:-_TRAILER_BYTES], content[-_TRAILER_BYTES:]
    if not trailer.startswith(_MARK):
        raise DamagedCheckpoint(f"{path} is truncated: {len(content)} bytes without a checksum at the end")
    if trailer != _trailer(payload):
        raise DamagedCheckpoint(f"{path} is damaged: its content does not match its checksum")
    try:
        state = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever reading something else, or what asks to run code, comes to: a dozen types
        raise DamagedCheckpoint(f"{path} is not a checkpoint ({type(error).__name__})", whole=True) from None
    try:
        TypeAdapter(TypedDict("State", dict(form))).validate_python(state, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        problem = f"{'.'.join(map(str, first['loc']))} {first['msg']}"
        raise DamagedCheckpoint(f"{path} is not a checkpoint of this script: {problem}", whole=True) from None
    return state


def load_checkpoint(
    folder: Path, form: Form = WEIGHTS, names: tuple[str, ...] = (CURRENT, PREVIOUS)
) -> dict[str, Any] | None:
    """Return the state of the newest whole checkpoint in `folder`, on the CPU, or None if there is none.

    A damaged file is named on stderr and removed: left in place, the next save would rotate it over the whole
    one. Raises DamagedCheckpoint, and removes nothing, where all that there is is of another form.
    """
    state, damages = None, {}
    for path in [folder / name for name in names]:
        try:
            state = read_checkpoint(path, form)
            break
        except FileNotFoundError:
            continue
        except DamagedCheckpoint as damage:
            damages[path] = damage
    whole = [damage for damage in damages.values() if damage.whole]
    if state is None and whole:
        raise DamagedCheckpoint(f"{whole[0]}; delete {folder} to begin anew")
    for path, damage in damages.items():
        print(f"warning: {damage}; it is passed over", file=sys.stderr)
        path.unlink()
    return state


def _trailer(payload: bytes | memoryview) -> bytes:
    return _MARK + hashlib.sha256(payload).hexdigest().encode() + b"\n"


def go_back(folder: Path) -> None:
    """Make the previous checkpoint the current one; where there is none, the run begins anew."""
    try:
        os.replace(folder / PREVIOUS, folder / CURRENT)
    except FileNotFoundError:
        remove_checkpoints(folder)


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
