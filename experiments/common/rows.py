"""Results files: one CSV per experiment, one row per finished run."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock

from experiments.common.files import replace_file, temporary_of
from experiments.common.settings import BY_NAME, SETTINGS, cell

Row = dict[str, str]  # the cells of a run, by their columns


def read_rows(path: Path) -> list[Row]:
    """The rows of a results file, every cell as text; none if the file is absent.

    Raises:
        OSError: the path is no file.
        ValueError: it is no such file, or a line is damaged; the message has its number.
    """
    if not path.exists():
        return []
    if not path.is_file():
        raise OSError(f"{path} is there, and is no file that can be replaced")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)  # a quotation that is not closed would hold all later lines
            rows = list(reader)
            check_header(path, reader.fieldnames or [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is no CSV in UTF-8: {error}") from None
    for number, row in enumerate(rows, start=2):
        if None in row or None in row.values():
            raise ValueError(f"line {number} of {path} does not fit its header: repair or delete that line")
        if any("\n" in value for value in row.values()):
            raise ValueError(f"a cell of line {number} of {path} has a line break: repair its quotation marks")
        if row["run_id"] == "":
            raise ValueError(f"line {number} of {path} has no run_id: repair or delete that line")
        check_cells(row, f"line {number} of {path}")
    return rows


def check_header(path: Path, names: Sequence[str]) -> None:
    """Raise ValueError for a header without run_id, with a column that has no name, or with two of one name."""
    if not names:
        return
    if "run_id" not in names:
        raise ValueError(f"{path} has no column run_id: it must be saved as CSV with commas between the cells")
    for place, name in enumerate(names, start=1):
        if name == "":
            raise ValueError(f"column {place} of {path} has no name: name or delete it")
        if names.count(name) > 1:
            raise ValueError(f"{path} has {names.count(name)} columns {name}: rename or delete all but one")


def check_cells(row: Mapping[str, str], where: str) -> None:
    """Raise ValueError for a cell that no run writes, such as the seed "1.0" of a file that went through pandas."""
    for setting in SETTINGS:
        try:
            check_cell(setting.name, row.get(setting.name, ""))
        except ValueError as error:
            raise ValueError(f"{where}: {error}; restore the file as it was written") from None


@cache  # most cells of a file are alike
def check_cell(name: str, cell: str) -> None:
    BY_NAME[name].parse(cell)


def check_writable(columns: Mapping[str, Any]) -> None:
    """Raise ValueError for a value of a run's row that `read_rows` would refuse, or no file in UTF-8 can hold."""
    for name, value in columns.items():
        text = cell(value)
        try:
            text.encode()
            if "\n" in text or "\r" in text:
                raise ValueError("it has a line break")
            if name in BY_NAME:
                check_cell(name, text)
        except ValueError as error:
            raise ValueError(f"{name} would be {text!r} in the results file, which cannot have it: {error}") from None


@contextmanager
def locked(path: Path) -> Iterator[Path]:
    """Let no other process add rows to a results file while they are read and written; the target of a link."""
    file = path.resolve()  # which another command may name
    with FileLock(f"{file}.lock"):
        # Over NFS, a new file in the folder refreshes this machine's cache of the others.
        fresh = temporary_of(file)
        fresh.touch()
        fresh.unlink()
        yield file


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    names: dict[str, None] = {}
    for row in rows:
        names |= dict.fromkeys(row)
    file = io.StringIO()
    writer = csv.DictWriter(file, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: cell(value) for name, value in row.items()})
    replace_file(path, file.getvalue())
