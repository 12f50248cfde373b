"""The runs of a results file: read once, grouped into lines once. All tables and figures start here.

A line is every identity flag of the training scripts but the seed. Nothing else may share an average.
"""

import csv
import io
import math
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from scipy.special import stdtrit

from experiments.common.settings import OWN_SETTINGS, SETTINGS

IDENTITY = tuple(item.name for item in SETTINGS if item.scripts)
SEEDS = ("seed", "order_seed")
METRICS = {"test_top1": "top-1", "test_top5": "top-5"}
VALID = ["valid_top1", "valid_top5"]
# Flags that have a column where they differ.
OWN = ("m", "inverse_temperature", "lr", "n_epochs", "weight_decay", "label_smoothing", "margin")
# Settings of the loss and of its training: lines that differ in others are of another experiment.
TRIED = (
    *("method", "p_k", "distribution", "art_lambda", "top1_mode", "arm", "nll_weight", "loss", "sorted", "prediction"),
    *("num_candidates", "self_match", "batch_size", "lr_schedule", "ema", "mixup", "noise_matrix_id"),
    *OWN,
    *OWN_SETTINGS,
)


class ReportError(ValueError):
    """What is wrong with a file or a flag, in one sentence."""


class Interval(NamedTuple):
    """The mean of some values, and half of its 95 % interval: NaN of a single value."""

    mean: float
    half: float

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes 0."""
        return abs(self.mean) > self.half

    @property
    def verdict(self) -> str:
        """Gain, loss or no clear difference."""
        if not self.is_clear:
            return "no clear difference"
        return "gain" if self.mean > 0 else "loss"

    def __str__(self) -> str:
        if math.isnan(self.mean):
            return ""
        spread = "" if math.isnan(self.half) else f" ± {self.half:.2f}"
        return f"{self.mean:+.2f}{spread}".replace("-", "−")


def read_text(path: Path) -> pd.DataFrame:
    """Return a CSV file of the repository, cells as text."""
    return pd.read_csv(path, dtype=str, keep_default_na=False)


def read_runs(path: Path, where: Sequence[str] = ()) -> pd.DataFrame:
    """Return the runs that meet every condition, each once, cells as text; raises ReportError.

    The file may come back from a spreadsheet: commas, semicolons or tabs, any line ends, a byte order mark.
    """
    if not path.is_file():
        raise ReportError(f"there is no file {path}")
    try:
        text = path.read_text(encoding="utf-8-sig")
        separator = max(",;\t", key=text.partition("\n")[0].count)
        header, *rows = filter(any, csv.reader(io.StringIO(text, newline=""), delimiter=separator))
    except (ValueError, csv.Error) as error:
        raise ReportError(f"{path} cannot be read as CSV in UTF-8: {error}") from None
    if "method" not in header or len(set(header)) < len(header):
        raise ReportError(f"{path}, read as separated by {separator!r}, must name each column once, method among them")
    notes = {"the last line is cut short": rows[-1:] if rows and len(rows[-1]) < len(header) else []}
    notes["lines repeat the first line"] = [row for row in rows if row == header]
    rows = [row for row in rows[: len(rows) - len(notes["the last line is cut short"])] if row != header]
    if wrong := [row for row in rows if len(row) != len(header)]:
        raise ReportError(f"{path} has a line with {len(wrong[0])} cells under {len(header)} columns: {wrong[0][:3]}")
    runs = pd.DataFrame(rows, columns=header, dtype=str)
    flags = [name for name in runs if name in IDENTITY]
    for keys in [["run_id", "epoch"]] if "epoch" in runs else [["run_id"], flags]:
        if {"run_id", "seed"} & {*keys} & {*runs}:
            twice = runs[runs.duplicated(keys, keep="last")]
            notes[f"runs are there twice ({keys[0]}, ...), the last one counts"] = twice
            runs = runs.drop_duplicates(keys, keep="last")
    for note, lines in notes.items():
        if len(lines):
            print(f"note: {path}: {note}: {len(lines)} left out", file=sys.stderr)
    for condition in where:
        runs = chosen(path, runs, condition)
    if runs.empty:
        raise ReportError(f"{path} has no run")
    return runs.reset_index(drop=True)


def chosen(path: Path, runs: pd.DataFrame, condition: str) -> pd.DataFrame:
    """Return the runs of which COLUMN=VALUE, or METHOD:COLUMN=VALUE, is true; raises ReportError."""
    form = re.fullmatch("(?:([^=]+):)?([^:=]+)=(.*)", condition, re.DOTALL)
    if not form or form[2] not in runs or (form[1] and form[1] not in set(runs["method"])):
        raise ReportError(f"--where must be COLUMN=VALUE or METHOD:COLUMN=VALUE of {path}, got {condition!r}")
    kept = runs[(runs[form[2]] == form[3]) | (runs["method"] != (form[1] or runs["method"]))]
    if kept.empty:
        raise ReportError(f"--where {condition} leaves no run of {path}; {form[2]} is {', '.join(set(runs[form[2]]))}")
    return kept


def as_numbers(runs: pd.DataFrame, columns: Iterable[str], scale: float = 1) -> pd.DataFrame:
    """Return runs with these columns as numbers; an empty cell is NaN. scale 100: of fractions. Raises ReportError."""
    runs = runs.copy()
    for name in columns:
        if name not in runs:
            raise ReportError(f"the file has no column {name}")
        values = pd.to_numeric(runs[name], errors="coerce").astype(float)
        wrong = runs[name][(runs[name] != "") & ~values.between(0, 1 if scale > 1 else float("inf"))]
        if len(wrong):
            kind = "fraction in [0, 1]" if scale > 1 else "number"
            raise ReportError(f"{name} must be a {kind}, got {wrong.iloc[0]!r}")
        runs[name] = scale * values
    return runs


def flags_of(runs: pd.DataFrame, *besides: str) -> list[str]:
    """Return the identity flags that are columns, but the seeds and these."""
    return [name for name in runs if name in IDENTITY and name not in (*SEEDS, *besides)]


def identity_of(runs: pd.DataFrame, *besides: str) -> pd.DataFrame:
    """Return the flags of each run but these, numbers written alike: a spreadsheet makes 0.001 to 1E-03."""
    return runs[flags_of(runs, *besides)].map(short)


def lines_of(runs: pd.DataFrame, *besides: str) -> list[pd.DataFrame]:
    """Return the runs of each line. besides: flags that may differ within one."""
    identity = identity_of(runs, *besides)
    return [runs.loc[line.index] for _, line in identity.groupby(list(identity), sort=False)]


def settings_of(lines: Sequence[pd.DataFrame], *besides: str) -> tuple[pd.DataFrame, dict[str, str]]:
    """Return a row per line with the flags in which lines differ, and what is the same for all or for each method.

    A flag that differs between lines of one method, or is one of OWN, has a column. What differs between methods alone
    stands in the second value under their names, such as {"softsort, neuralsort:": "top1_mode sm"}.
    """
    firsts = pd.DataFrame([line.iloc[0] for line in lines]).reset_index(drop=True)
    flags = identity_of(firsts, "method", "p_k", *besides)
    differ = [name for name in flags if flags[name].nunique() > 1]
    own = [name for name in differ if name in OWN or (flags.groupby(firsts["method"])[name].nunique() > 1).any()]
    shared = {name: firsts[name][0] for name in flags if name not in differ and firsts[name][0]}
    by_method: dict[str, list[str]] = {}
    for method, row in firsts.drop_duplicates("method").set_index("method").iterrows():
        settings = [f"{name} {short(row[name])}" for name in differ if name not in own and row[name]]
        by_method.setdefault(", ".join(settings), []).append(str(method))
    shared |= {f"{', '.join(methods)}:": settings for settings, methods in by_method.items() if settings}
    return firsts[["method", *{"p_k"} & set(firsts), *own]], shared


def experiment(line: pd.DataFrame) -> tuple[str, ...]:
    """Return the flags that make runs comparable with one another: data, network, precision, ..."""
    return tuple(identity_of(line[:1], *TRIED).iloc[0])


def differences(line: pd.DataFrame, base: pd.DataFrame, metrics: Sequence[str]) -> pd.DataFrame:
    """Return a line minus another, a row per seed that both have. Raises ReportError for runs of several settings."""
    for runs in (line, base):
        if differing := [name for name, cells in identity_of(runs).items() if cells.nunique() > 1]:
            raise ReportError(f"a difference is between two settings, got runs with several {', '.join(differing)}")
    ours, theirs = (side.groupby("seed")[list(metrics)].mean() for side in (line, base))
    return (ours - theirs).dropna()


def best_trial(trials: pd.DataFrame, split: str = "valid") -> pd.Series:
    """Return the trial with the highest top-1 + top-5 of a split, such as valid, last_valid or last_clean."""
    score = trials[f"{split}_top1"].astype(float) + trials[f"{split}_top5"].astype(float)
    return trials.loc[score.idxmax()]


def half_width(std: Any, number: Any) -> Any:
    """Half of the 95 % interval of a mean of so many values with that sample standard deviation (Student's t)."""
    return stdtrit(number - 1, 0.975) * std / number**0.5


def interval(values: pd.Series) -> Interval:
    """Return the mean of values with its interval."""
    return Interval(values.mean(), half_width(values.std(), len(values)))


def mean_std(values: pd.Series) -> str:
    """Return the mean and, of several values, the sample standard deviation."""
    spread = f" ± {values.std():.2f}" if values.count() > 1 else ""
    return f"{values.mean():.2f}{spread}" if values.count() else ""


def p_k_of(cell: str) -> tuple[float, ...]:
    """Return a cell's P_K without the zeros at its end; raises ReportError."""
    try:
        return tuple(float(share) for share in re.sub(r"( 0(\.0*)?)+$", "", f" {cell}").split())
    except ValueError:
        raise ReportError(f"p_k must be numbers such as .5 0 0 0 .5, got {cell!r}") from None


def shown_p_k(cell: str) -> str:
    """Return a cell's P_K as a list: [0.5, 0, 0, 0, 0.5]."""
    return f"[{', '.join(f'{float(share):g}' for share in cell.split())}]" if cell else ""


def short(cell: str) -> str:
    """Return a number with the digits that it needs, and any other text as it is."""
    try:
        return f"{float(cell):g}"
    except ValueError:
        return cell
