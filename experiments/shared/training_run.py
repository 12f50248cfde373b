"""What training scripts ask and say: whether a row is recorded already, and lines above the bars."""

import sys
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from experiments.shared.run_record import find_row


def recorded(results: Path, name: str, force: bool) -> bool:
    """Return whether the results file already has this configuration and --force was not given; say so."""
    if force or find_row(results, name) is None:
        return False
    print(f"skipped: {results} already has {name} (--force repeats it)")
    return True


def compiled(module: nn.Module, device: torch.device) -> nn.Module:
    """Return a module as --compile has it: on a GPU its kernels are also launched at once, as CUDA graphs."""
    return torch.compile(module, mode="reduce-overhead" if device.type == "cuda" else None)


def say(line: str) -> None:
    """Print a line at once, above the bars where there are any."""
    tqdm.write(line)
    sys.stdout.flush()
