"""What the training scripts share around their loops: skipping, continuing, compiling, diverging, saying.

The loops themselves stand in the scripts, to be read there from top to bottom.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from experiments.shared.checkpoint import Form, load_checkpoint, remove_checkpoints
from experiments.shared.command_line import RunError
from experiments.shared.run_record import find_row


def recorded(results: Path, name: str, force: bool) -> bool:
    """Return whether the results file already has this configuration and --force was not given; say so."""
    if force or find_row(results, name) is None:
        return False
    print(f"skipped: {results} already has {name} (--force repeats it)")
    return True


def saved_state(folder: Path, results: Path, name: str, form: Form) -> dict[str, Any] | None:
    """Return the checkpoint from which the run in `folder` goes on, or None where it begins.

    With --force, a checkpoint of the very run that the row reports is removed: the repetition begins anew. form: of
    the script's checkpoints. Raises DamagedCheckpoint where all that there is is of another.
    """
    saved, row = load_checkpoint(folder, form), find_row(results, name)
    if saved and row and saved["started_utc"] == row["started_utc"]:
        remove_checkpoints(folder)
        return None
    return saved


@contextmanager
def restoring(folder: Path) -> Iterator[None]:
    """Raise RunError where a checkpoint does not fit what is restored from it in the block."""
    try:
        yield
    except Exception as error:  # whatever another network's or optimizer's state comes to
        raise RunError(
            f"the checkpoint in {folder} is of another version of this code ({type(error).__name__}: {error}); "
            "delete that folder to begin anew"
        ) from None


def compiled(module: nn.Module, device: torch.device) -> nn.Module:
    """Return a module as --compile has it: on a GPU its kernels are also launched at once, as CUDA graphs."""
    return torch.compile(module, mode="reduce-overhead" if device.type == "cuda" else None)


def diverged(method: str, value: float, where: str) -> RunError:
    """Return the error for a loss that is not finite."""
    return RunError(
        f"the loss became {value} {where}, with method {method}; no row is written. "
        "Try a smaller --lr, --precision fp32, or another --inverse_temperature"
    )


def finished_line(row: Mapping[str, Any], clock: str, results: Path, folder: Path) -> str:
    """Return what is said of a finished run: its accuracies, fractions, and where its row and folder are.

    clock: "epoch" or "step", by which its evaluations are counted.
    """
    accuracies = [
        f"top-{k} {row[f'test_top{k}']:.4f} ({clock} {row[f'test_top{k}_{clock}']})"
        for k in (1, 5)
        if f"test_top{k}" in row
    ]
    speed = f", {row['images_per_second']:.0f} images/s" if row["images_per_second"] else ""
    return (
        f"{row['run_id']}: test {', '.join(accuracies)}, {row['train_seconds']:.1f} s of training{speed}\n"
        f"row: {results}\nrun: {folder}"
    )


def say(line: str) -> None:
    """Print a line at once, above the bars where there are any."""
    tqdm.write(line)
    sys.stdout.flush()
