"""What the benchmarks share: flags, alternatives that take turns, and a table that is printed row by row."""

import argparse
import platform
import re
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
import torch

from experiments.common.files import replace_file
from experiments.common.flags import make_parser, positive_int
from experiments.common.paths import user_path
from experiments.common.provenance import device_name, git_commit
from topk_losses import METHODS

RESULTS = Path(__file__).parent.parent / "results" / "benchmarks"
SOFTMAX = "softmax_cross_entropy"
NUMBERS = {
    "turns": "turns that the alternatives take",
    "steps": "training steps in a turn",
    "runs": "runs side by side",
    "batch": "images of a training step",
    "images": "images of the training split",
    "repeats": "measurements, of which the median counts",
    "limit_gib": "memory that a measurement may take, in GiB",
}
Key = TypeVar("Key", bound=Hashable)


def size(text: str) -> tuple[int | None, ...]:
    """Argument type: the numbers of a size such as 500x1000m16; m is None where it is not given."""
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)+(m[1-9]\d*)?", text):
        raise argparse.ArgumentTypeError(f"a size is written BATCHxN or BATCHxNmM, got {text!r}")
    numbers, _, m = text.partition("m")
    sizes: list[int | None] = list(map(int, numbers.split("x")))
    sizes.append(None)
    if m:
        sizes[-1] = int(m)
    return tuple(sizes)


def parser(docstring: str, name: str, methods: str = "all", **numbers: int) -> argparse.ArgumentParser:
    """Return a parser with the flags of all benchmarks, and a whole number for each of `numbers`.

    methods: what help calls the methods that are measured without --methods.
    """
    made = make_parser(docstring)
    made.add_argument("--device", type=torch.device, default="cpu", help="cpu or cuda:INDEX (default: cpu)")
    made.add_argument("--methods", nargs="+", choices=METHODS, metavar="NAME", help=f"methods (default: {methods})")
    made.add_argument(
        "--threads",
        type=positive_int,
        default=torch.get_num_threads(),
        help="number of CPU threads (default: PyTorch's)",
    )
    made.add_argument(
        "--output",
        type=user_path,
        default=RESULTS / name,
        help=f"CSV file for the result (default: results/benchmarks/{name})",
    )
    for flag, default in numbers.items():
        made.add_argument(f"--{flag}", type=positive_int, default=default, help=f"{NUMBERS[flag]} (default: {default})")
    return made


def add_precision(made: argparse.ArgumentParser) -> None:
    """Add the flag of benchmarks that make training steps of a ResNet."""
    made.add_argument(
        "--precision", choices=("fp32", "bf16"), default="bf16", help="precision of our step (default: bf16)"
    )


def take_turns(calls: Mapping[Key, Callable[[], Any]], turns: int, number: int, threads: int) -> dict[Key, list[float]]:
    """Return the milliseconds of one of `number` calls, in each turn, of every alternative.

    They take turns, so that a machine that slows down slows all of them. An alternative has two calls before its calls
    are timed: the one before may have left other things in the caches.
    """
    from torch.utils.benchmark import Timer  # its import may warn about CUDA, which --help shall not show

    timers = {name: Timer("call()", globals={"call": call}, num_threads=threads) for name, call in calls.items()}
    times: dict[Key, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, timer in timers.items():
            times[name].append(1e3 * timer.timeit(number).mean)
    return times


def ratio(upper: Sequence[float], lower: Sequence[float]) -> float:
    """Return the median of the turns' ratios."""
    return statistics.median(a / b for a, b in zip(upper, lower))


class Table:
    """Rows, each printed when it is added; behind their cells stands what the machine is."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._output = arguments.output
        self.rows: list[dict[str, Any]] = []
        self._output.parent.mkdir(parents=True, exist_ok=True)
        self._machine = {"device": device_name(arguments.device), "threads": arguments.threads}
        self._machine |= {"torch": torch.__version__, "python": platform.python_version(), "git_commit": git_commit()}

    def add(self, **row: Any) -> None:
        """Add a row and print it; a float has four digits, None and NaN are empty."""
        shown = []
        for name, cell in row.items():
            if isinstance(cell, float):
                cell = f"{cell:.4g}"
            if cell in (None, "nan"):
                cell = ""
            row[name] = cell
            if cell != "":
                shown.append(f"{name} {cell}")
        print("  ".join(shown), flush=True)
        self.rows.append({**row, **self._machine})

    def write(self) -> int:
        """Replace the file by the rows, say so, and return the exit status."""
        replace_file(self._output, pd.DataFrame(self.rows).to_csv(index=False, lineterminator="\n"))
        print(f"wrote {self._output}")
        return 0
