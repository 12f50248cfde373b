"""What every report reads and prints: rows whose columns and cells were checked, here and nowhere else; tables."""

import math
import re
import shlex
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd

from experiments.common.neighbours import METHODS as KNN_METHODS
from scripts.shared.program import CommandLineError
from scripts.shared.run_record import COLUMNS
from topk_losses import METHODS

Row = Mapping[str, str]
KNOWN_METHODS = tuple(dict.fromkeys([*METHODS, *KNN_METHODS]))
ARMS = ("cross_entropy", "retain", "soft_beam")


def float_of(cell: str) -> float | None:
    """Return a cell as a finite number, or None."""
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _numbers(cell: str, lowest: float = 0, highest: float = math.inf, count: int | None = None) -> bool:
    """Whether a cell is numbers between two, one at least, or `count` of them."""
    values = [float_of(each) for each in cell.split()]
    right = all(value is not None and lowest <= value <= highest for value in values)
    return right and (len(values) == count if count else bool(values))


# The columns that reports compute with: a pattern of their names, what a cell that is not empty must be, and its test.
RULES: dict[str, tuple[str, Callable[[str], bool]]] = {
    "method": (f"one of {', '.join(KNOWN_METHODS)}", KNOWN_METHODS.__contains__),
    "arm": (f"one of {', '.join(ARMS)}", ARMS.__contains__),
    "p_k": ("numbers such as .5 0 0 0 .5", _numbers),
    "seed|epoch|n_epochs|batch_size|num_classes|max_letters|hidden_dim|beam_size|(train|valid|test)_(images|words)": (
        "a whole number",
        lambda cell: cell.isascii() and cell.isdecimal() and len(cell) < 20,
    ),
    r"(test|valid)_top\d+|test_(wer|gold)_beam\d": ("a fraction in [0, 1]", lambda cell: _numbers(cell, 0, 1, 1)),
    r"test_per_beam\d|lr|last_test_logit_std|last_inverse_temperature": (
        "a number of at least 0",
        lambda cell: _numbers(cell, count=1),
    ),
    "inverse_temperature": (
        "a number above 0, auto or FROM:TO",
        lambda cell: cell == "auto" or (_numbers(cell.replace(":", " ", 1), 5e-324) and len(cell.split()) == 1),
    ),
    "test_(forced|free)_accuracy": ("fractions in [0, 1], one for each position", lambda cell: _numbers(cell, 0, 1)),
}


def check(path: Path, rows: Sequence[Row], needed: Sequence[str], optional: Sequence[str] = ()) -> None:
    """Raise CommandLineError if a cell breaks its column's rule, a column of `needed` or `optional` is absent, or a
    cell of `needed` is empty.
    """
    columns = rows[0] if rows else {}
    for name in (*needed, *optional) if rows else ():
        if name not in columns:
            raise CommandLineError(f"{path} has no column {name}; this report needs one")
    for name in columns:
        rule = next((rule for pattern, rule in RULES.items() if re.fullmatch(pattern, name)), None)
        what, is_right = rule or ("given", bool)
        for row in rows:
            if (name in needed or (rule and row[name])) and not is_right(row[name]):
                raise CommandLineError(
                    f"{name} must be {what}, got {row[name]!r} in row {row.get('run_id', '')} of {path}"
                )


def check_alike(
    path: Path, rows: Sequence[Row], needed: Sequence[str], apart: Iterable[str], optional: Sequence[str] = ()
) -> None:
    """`check`, and raise CommandLineError unless the rows agree in all flags but `apart`."""
    check(path, rows, needed, optional)
    flags = [name for name in rows[0] if name not in {*COLUMNS, *apart}]
    for name, values in differing(rows, flags).items():
        told = f"one report is of one setting; choose with --where {shlex.quote(f'{name}={values[0]}')}"
        raise CommandLineError(f"{path} mixes {name} {' and '.join(cell or '(empty)' for cell in values)}: {told}")


def differing(rows: Sequence[Row], columns: Iterable[str]) -> dict[str, list[str]]:
    """Return the columns in which rows differ, and their values."""
    values = {name: list(dict.fromkeys(row[name] for row in rows if name in row)) for name in columns}
    return {name: cells for name, cells in values.items() if len(cells) > 1}


def as_markdown(table: pd.DataFrame, words: int = 1) -> str:
    """Return a table of text, its first `words` columns to the left and the others, numbers, to the right."""
    sides = ["left"] * words + ["right"] * (table.shape[1] - words)
    return table.to_markdown(index=False, tablefmt="pipe", colalign=sides, disable_numparse=True)


def mean_std(values: Sequence[float], decimals: int = 2) -> str:
    """Return the mean and, of several values, the sample standard deviation."""
    spread = f" ± {statistics.stdev(values):.{decimals}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{decimals}f}{spread}"
