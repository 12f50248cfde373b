"""Results files as typed frames: numbers as floats, accuracies in percent, text as text.

An empty cell is NaN in a column of numbers and "" in a column of text.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from experiments.common import settings
from experiments.common.columns import about_repeats
from experiments.common.paths import PAPER
from experiments.common.rows import read_rows

METRICS = {"test_top1": "top-1", "test_top5": "top-5"}
VALID = ["valid_top1", "valid_top5"]
LAST_VALID = {name: name for name in ("last_valid_top1", "last_valid_top5")}  # of runs without a test split
IDENTITY = [item.name for item in settings.SETTINGS if item.scripts]  # settings on which names of runs depend
SEEDS = ("seed", "order_seed")
CONFIGURATION = [name for name in IDENTITY if name not in SEEDS]
COMPARED = ("LOSS", "ARM", "TRAINING")  # roles of settings that are tried within one experiment
EXPERIMENT = [name for name in CONFIGURATION if settings.BY_NAME[name].role.name not in COMPARED]
# Values that are the same as none.
UNUSED = [0, "", "false", *(item.unused for item in settings.SETTINGS if item.unused is not None)]
ACCURACY = re.compile(r".*_top\d+")
# What every run of a script has of a split; a beam of 8 is for data with as many phonemes, and top-3 is not in older
# rows.
NEEDED = {
    settings.CIFAR: re.compile(r"(?:last_)?(test|valid)_top[15]"),
    settings.HEADS: re.compile(r"(?:last_)?(test|valid)_top[15]"),
    settings.KNN: re.compile(r"(?:last_)?(test|valid)_top1"),
    settings.BEAM: re.compile(r"(?:last_)?(test|valid)_(?:per|wer|gold)_beam[14]"),
}
TEXT = ("run_id", "device_name", "torch_version", "git_commit", "embeddings", "pretrained", "backbone", "labels")


def read_runs(path: Path, where: Sequence[str] = ()) -> pd.DataFrame:
    """The runs of a results file that meet every condition, a row per run.

    Args:
        where: conditions COLUMN=VALUE, or METHOD:COLUMN=VALUE, of the cells.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a results file, a line is damaged, a cell is not of its column's type, a run stands twice
            with other cells, a line has a seed twice, a run lacks a seed or an accuracy, or no run is left.
    """
    cells = read_cells(path)
    for condition in where:
        cells = that_meet(path, cells, condition)
    return typed_runs(path, cells.reset_index(drop=True))


def read_cells(path: Path) -> pd.DataFrame:
    """The cells of a results file as they are written, a row per run. Raises as `read_runs` does."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    cells = pd.DataFrame(read_rows(path), dtype=object)
    if "method" not in cells:
        raise ValueError(f"{path} has no run with a method")
    key = [name for name in ("run_id", "epoch") if name in cells]
    twice = cells[cells.duplicated(key)]
    if len(twice):
        raise ValueError(f"{path} has {twice['run_id'].iloc[0]} twice: delete one of the lines")
    return cells


def typed_runs(path: Path, cells: pd.DataFrame) -> pd.DataFrame:
    """The runs of a file with typed cells, after the checks that tables need.

    Raises:
        ValueError: a cell is not of its column's type, a line has a seed twice, or a run lacks a seed or an accuracy.
    """
    runs = typed_frame(cells, path)
    check_seeds(path, cells)
    check_repeats(path, cells, runs)
    check_accuracies(path, cells)
    return runs


def check_seeds(path: Path, cells: pd.DataFrame) -> None:
    """Raise ValueError for a run without a seed, which no run of another file could be paired with."""
    lacking = cells[cells.reindex(columns=["seed"])["seed"].fillna("") == ""]
    if len(lacking):
        raise ValueError(f"the run {lacking['run_id'].iloc[0]} of {path} has no seed: repair or delete its line")


def check_repeats(path: Path, cells: pd.DataFrame, runs: pd.DataFrame) -> None:
    """Raise ValueError for two runs of one configuration and one seed: a mean would count them as two seeds.

    They differ in a setting that is no column, or in a column that this version does not know.
    """
    names = [name for name in (*IDENTITY, "epoch") if name in runs]
    keys = runs[names]
    keys = keys.mask(keys.isin(UNUSED))
    is_repeat = keys.duplicated()
    if is_repeat.any():
        first = keys[is_repeat].iloc[0]
        is_same = (keys.eq(first) | (keys.isna() & first.isna())).all(axis=1)
        raise ValueError(about_repeats(path, cells[is_same].to_dict("records")))


def scripts_of(cells: pd.DataFrame) -> pd.Series:
    """The script that made each run, by the cells of a results file."""
    rows = (dict(zip(cells, row)) for row in cells.to_numpy())  # to_dict("records") takes five times as long
    return pd.Series(map(settings.script_of, rows), cells.index, dtype=object)


def check_accuracies(path: Path, cells: pd.DataFrame) -> None:
    """Raise ValueError for a run without an accuracy of a split that it has: a mean would count it as a seed."""
    for script, rows in cells.groupby(scripts_of(cells)):
        for name in dict.fromkeys([*rows, "test_top1"]):
            found = NEEDED[script].fullmatch(name)
            if found is None:
                continue
            sizes = rows.reindex(columns=[f"{found[1]}_images", f"{found[1]}_words"], fill_value="")
            accuracies = rows.reindex(columns=[name], fill_value="")[name]
            lacking = rows[(accuracies == "") & (sizes != "").any(axis=1)]
            if len(lacking):
                run_id = lacking["run_id"].iloc[0]
                raise ValueError(f"the run {run_id} of {path} has no {name}: repair or delete its line")


def are_of_beam_search(runs: pd.DataFrame) -> bool:
    """Whether some runs are of beam search, which has error rates instead of accuracies."""
    return "arm" in runs and bool((runs["arm"] != "").any())


def is_untested(runs: pd.DataFrame) -> pd.Series:
    """Whether each run has no test accuracy, as its data have no test split."""
    return runs.reindex(columns=list(METRICS)).isna().all(axis=1)


def accuracies_of(runs: pd.DataFrame) -> dict[str, str]:
    """The columns of test accuracies and what tables call them, and those of validation where runs have no test."""
    found = {metric: label for metric, label in METRICS.items() if metric in runs and runs[metric].notna().any()}
    if is_untested(runs).any():
        found |= {metric: label for metric, label in LAST_VALID.items() if metric in runs}
    return found


def that_meet(path: Path, cells: pd.DataFrame, condition: str) -> pd.DataFrame:
    """The runs of which COLUMN=VALUE, or METHOD:COLUMN=VALUE, is true. Raises ValueError if there is none."""
    form = re.fullmatch("(?:([^=]+):)?([^:=]+)=(.*)", condition, re.DOTALL)
    if form is None or form[2] not in cells:
        raise ValueError(f"--where must be COLUMN=VALUE or METHOD:COLUMN=VALUE of {path}, got {condition!r}")
    method = form[1]
    if method and method not in set(cells["method"]):
        raise ValueError(f"--where {condition}: {path} has no run of {method}")
    values = cells[form[2]]
    plain = spelling_of(form[2])
    is_kept = values.map(plain) == plain(form[3])
    if method:
        is_kept |= cells["method"] != method
    if not is_kept.any():
        raise ValueError(f"--where {condition} leaves no run of {path}; {form[2]} is {', '.join(set(values))}")
    return cells[is_kept]


def typed_frame(cells: pd.DataFrame, path: Path) -> pd.DataFrame:
    columns = {}
    for name in cells:
        try:
            columns[name] = typed(name, cells[name])
        except ValueError as error:
            raise ValueError(f"column {name} of {path} has a cell that it cannot have: {error}") from None
    return pd.DataFrame(columns, index=cells.index)


def typed(name: str, cells: pd.Series) -> pd.Series:
    """The values of a column. P_K is a text of plain numbers, such as "0.5 0 0 0 0.5"."""
    if ACCURACY.fullmatch(name):
        return percent(cells)
    if name in settings.BY_NAME:
        kind = settings.BY_NAME[name].kind
        if kind is settings.floats:
            return cells.map(plain_list)
        if kind in (int, float):
            return numbers(cells)
        if kind is settings.inverse_temperature:
            return cells.map(plain_temperature)
        return cells
    if name in TEXT:
        return cells
    try:
        return numbers(cells)
    except ValueError:
        return cells


def percent(cells: pd.Series) -> pd.Series:
    """Fractions as percentages, an empty cell as NaN. Raises ValueError for a number that is no fraction."""
    fractions = numbers(cells)
    wrong = fractions[(cells != "") & ~fractions.between(0, 1)]
    if len(wrong):
        raise ValueError(f"{wrong.iloc[0]:g} is no fraction in [0, 1]")
    return 100 * fractions


def numbers(cells: pd.Series) -> pd.Series:
    """Cells as numbers, an empty one as NaN. Raises ValueError for any other text."""
    # pandas.to_numeric of 2.1 loses the last digits
    values = [float("nan" if cell == "" else cell) for cell in cells]
    return pd.Series(values, cells.index, dtype=float, name=cells.name)


def spelling_of(name: str) -> Callable[[str], str]:
    """What writes the cells of a column as they are compared: equal numbers alike, text as it is."""
    if name in TEXT:
        return str
    if name not in settings.BY_NAME:
        return plain_number
    kind = settings.BY_NAME[name].kind
    if kind in (settings.floats, settings.integers):
        return plain_list
    if kind is settings.inverse_temperature:
        return plain_temperature
    if kind in (int, float):
        return plain_number
    return str


def plain_number(cell: str) -> str:
    """A number with all digits, however it is written; any other text as it is."""
    try:
        return str(float(cell)).removesuffix(".0")
    except ValueError:
        return cell


def plain_temperature(cell: str) -> str:
    """An inverse temperature, or the two of a schedule, with all digits."""
    return ":".join(map(plain_number, cell.split(":")))


def plain_list(cell: str) -> str:
    return " ".join(map(plain_number, cell.split()))


def p_k_of(text: str) -> tuple[float, ...]:
    """The weights of a P_K without the zeros at its end."""
    weights = [float(word) for word in text.split()]
    while weights and weights[-1] == 0:
        weights.pop()
    return tuple(weights)


def text_of(value: object) -> str:
    """A value as it is compared: a number with all digits, NaN as ""."""
    if value != value:
        return ""
    return plain_number(str(value))


def as_text(values: pd.Series) -> pd.Series:
    """Values as they are compared, each different one worked out once: columns have few."""
    texts = {value: text_of(value) for value in values.unique()}
    return values.map(texts).astype(str)  # of no values, too


def identity_of(runs: pd.DataFrame, besides: Sequence[str] = ()) -> pd.DataFrame:
    """The settings of each run but these and the seeds, as text."""
    names = [name for name in runs if name in CONFIGURATION and name not in besides]
    return pd.DataFrame({name: as_text(runs[name]) for name in names}, index=runs.index)


def differing(runs: pd.DataFrame) -> list[str]:
    """The settings but the seeds that are not the same in all runs."""
    names = [name for name in CONFIGURATION if name in runs]
    cells = runs[names].to_numpy(dtype=object)  # all at once: a look at each column takes ten times as long
    first = cells[:1]
    is_same = (cells == first) | ((cells != cells) & (first != first))  # NaN is that of another run
    return list(itertools.compress(names, ~is_same.all(axis=0)))


def lines_of(runs: pd.DataFrame, besides: Sequence[str] = ()) -> list[pd.DataFrame]:
    """The runs of each configuration. besides: settings that may differ within one."""
    if runs.empty:
        return []
    names = [name for name in differing(runs) if name not in besides]
    if not names:
        return [runs]
    groups = runs[names].apply(as_text).groupby(names, sort=False)
    return [runs.loc[line.index] for _, line in groups]


def same_configuration(runs: pd.DataFrame) -> pd.Series:
    """One text per run, equal for runs which differ in nothing but the seed, in whatever file they stand.

    A setting that a run does not use is the same as none.
    """
    texts = pd.Series("", index=runs.index)
    for name in CONFIGURATION:
        if name in runs:
            unused = settings.BY_NAME[name].unused
            cells = as_text(runs[name]).replace({"0": "", "false": "", str(unused): ""})
            texts += cells + "|"
        else:
            texts += "|"
    return texts


def experiment(line: pd.DataFrame) -> tuple[str, ...]:
    """The settings that make runs comparable with one another: data, network, precision, ..."""
    first = line.iloc[0]
    return tuple(text_of(first[name]) for name in first.index if name in EXPERIMENT)


def read_text(path: Path) -> pd.DataFrame:
    """A table of the repository, cells as text."""
    return pd.read_csv(path, dtype=str, keep_default_na=False)


def read_published(table: str) -> pd.DataFrame:
    """The rows of a table of results/paper/, cells as text; none for ""."""
    if not table:
        return pd.DataFrame()
    return read_text(PAPER / f"{table}.csv")


def read_protocol(table: str) -> dict[str, str]:
    """The settings that all rows of a table of results/paper/ share; none for ""."""
    if not table:
        return {}
    protocols = read_text(PAPER / "protocols.csv").set_index("table")
    return protocols.loc[table].to_dict()
