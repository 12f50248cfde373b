"""What the benchmarks share: flags, alternatives that take turns, and a table that is printed row by row and written
whole or not at all.
"""

import argparse
import multiprocessing
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
import torch
from torch.utils.benchmark import Timer

from experiments.common.cores import usable_cores
from experiments.common.environment import device_name, git_commit
from experiments.common.flags import positive_int as count
from experiments.common.processes import Processes
from experiments.common.records import replace_file

RESULTS = Path(__file__).parent.parent / "results/benchmarks"
Key = TypeVar("Key", bound=Hashable)


def present_device(text: str) -> torch.device:
    """Argument type: a device that is there."""
    try:
        return Processes().device(text)
    except SystemExit as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("error: --device ")) from None


def parser(told: str | None, name: str, *, device: str = "cpu", **numbers: int) -> argparse.ArgumentParser:
    """Return a parser with --device, --threads, --output (by default the file `name` among the results), and a flag
    for each of `numbers`, whole numbers of at least 1, with its default.
    """
    made = argparse.ArgumentParser(description=told, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--device", type=present_device, default=device, help="auto, cpu, cuda, cuda:<index>; %(default)s"
    )
    made.add_argument("--threads", type=count, default=usable_cores(), help="of PyTorch on the CPU (%(default)s)")
    made.add_argument("--output", type=output_file, default=str(RESULTS / name), help="CSV file (%(default)s)")
    for flag, default in numbers.items():
        made.add_argument(f"--{flag}", type=count, default=default, help="(%(default)s)")
    return made


def output_file(text: str) -> Path:
    """A path in a folder that can be written, made if absent: asked before anything is measured."""
    folder = Path(text).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot make the folder {folder}: {error.strerror}; name another") from None
    if not os.access(folder, os.W_OK) or Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"a file in a folder that can be written is wanted, got {text!r}")
    return Path(text)


def size(form: str) -> Callable[[str], tuple[int | None, ...]]:
    """Return an argument type for sizes such as 500x1000m16: the numbers that `form`, BATCHxN say, names, m or None."""
    numbers = "x".join(r"([1-9]\d*)" for _ in form.split("x"))

    def convert(text: str) -> tuple[int | None, ...]:
        if not (match := re.fullmatch(rf"{numbers}(?:m([1-9]\d*))?", text)):
            raise argparse.ArgumentTypeError(f"a size is written {form} or {form}mM, got {text!r}")
        return tuple(each and int(each) for each in match.groups())

    return convert


def take_turns(
    calls: Mapping[Key, Callable[[], Any]], turns: int, number: int, threads: int, pause: float = 0
) -> dict[Key, list[float]]:
    """Return the milliseconds of one of `number` calls, in each turn, of every alternative.

    They take turns, so that a machine that slows down slows all of them, with `pause` seconds before each. Before its
    calls are timed an alternative has two that are not: the one before may have left other things in the caches.
    """
    timers = {name: Timer("call()", globals={"call": call}, num_threads=threads) for name, call in calls.items()}
    times: dict[Key, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, timer in timers.items():
            time.sleep(pause)
            times[name].append(1e3 * timer.timeit(number).mean)
    return times


def ratio(upper: Sequence[float], lower: Sequence[float]) -> float:
    """The median of the turns' ratios."""
    return statistics.median(a / b for a, b in zip(upper, lower))


def in_a_process(function: Callable[..., Any], *arguments: object, cuda: bool = False) -> Any:
    """Return function(*arguments), computed in a process of its own; BrokenProcessPool if it is killed."""
    # The parent never ran a tensor operation, so there is nothing to inherit; but CUDA does not survive a fork.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn" if cuda else "fork")) as process:
        return process.submit(function, *arguments).result()


class Table:
    """Rows, each printed when it is added; behind their cells stands what the machine is."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._output = arguments.output
        self._machine = {"device": device_name(arguments.device), "threads": arguments.threads}
        self._machine |= {"torch": torch.__version__, "python": platform.python_version(), "git_commit": git_commit()}
        self.rows: list[dict[str, Any]] = []

    def add(self, **row: Any) -> None:
        """Add a row and print it; a float is written with four digits, None as nothing."""
        row = {name: f"{cell:.4g}" if isinstance(cell, float) else cell for name, cell in row.items()}
        row = {name: "" if cell is None else cell for name, cell in row.items()}
        if not self.rows:
            print("  ".join(f"{name:>8}" for name in row))
        print("  ".join(f"{cell!s:>{max(8, len(name))}}" for name, cell in row.items()), flush=True)
        self.rows.append({**row, **self._machine})

    def write(self) -> int:
        """Replace the file by the rows, say so, and return the exit status."""
        replace_file(self._output, pd.DataFrame(self.rows).to_csv(index=False, lineterminator="\n"))
        print(f"wrote {self._output}")
        return 0
