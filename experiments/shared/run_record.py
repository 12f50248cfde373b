"""The record of a run: its id, its folder results/runs/<run id>/, and its one row in a results file.

experiments/run_record.py prints such a file.
"""

import csv
import difflib
import hashlib
import io
import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime, timezone
from pathlib import Path

from filelock import FileLock, Timeout

from data.atomic_file import atomic_write, is_special
from data.file_lock import held, held_or_refused
from data.program import CommandLineError, ProgramError
from experiments.shared.environment import ROOT

# Every column of a row that is not a flag of the script, with its meaning; flags have theirs in --help.
_TABLE = (ROOT / "results" / "README.md").read_text(encoding="utf-8").partition("| column |")[2].partition("\n\n")[0]
_LINES = re.findall(r"^\| (`.*?`) \| (.*) \|$", _TABLE, re.MULTILINE)  # of one column, or of several that are alike
COLUMNS = {name: meaning for names, meaning in _LINES for name in re.findall(r"`(\w+)`", names)}

WHERE = "only these rows, or of METHOD's rows only these; may be repeated"  # the flag whose words chosen_rows takes

csv.field_size_limit(2**31 - 1)  # what can be recorded can be read

Value = str | int | float | bool | Path | Sequence[float] | None


def utc_now() -> str:
    """Return the time as "2026-01-31T12:00:00.000Z"."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def run_id(identity: Mapping[str, Value], readable: str) -> str:
    """Return the name of a configuration: the template `readable`, filled in, then ten digits of a hash.

    Settings that are None do not enter the hash, so that a flag added later leaves the ids of older rows.
    """
    settings = {name: value for name, value in identity.items() if value is not None}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    filled = readable.format(**{name: _cell(value).replace(" ", "_") for name, value in identity.items()})
    return re.sub(r"[^A-Za-z0-9._-]", "_", f"{filled}-{digest[:10]}")


def open_run(folder: Path, wait: bool = False) -> AbstractContextManager[None]:
    """Create a run folder and hold it for this process; wait: for another one, instead of raising ProgramError."""
    lock = folder / "run.lock"
    if wait:
        return held(lock, waiting=f"waiting for another process that runs {folder}")
    return held_or_refused(lock, ProgramError, "this configuration is being run by another process", "the run folder")


def write_history(path: Path, history: Sequence[Mapping[str, Value]]) -> None:
    """Write epochs.csv, or another file of a run folder, whole."""
    with atomic_write(path) as file:
        _write_table(file, history)


def find_row(path: Path, run_id: str) -> dict[str, str] | None:
    """Return the row of a configuration in a results file, or None. Raises ProgramError."""
    return next((row for row in _parse(path)[0] if row["run_id"] == run_id), None)


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a results file, none if it is absent, every cell as text. Raises ProgramError.

    A last line that was cut short, by an interrupted copy say, is left out with a warning on stderr.
    """
    rows, cut_short = _parse(path)
    if cut_short:
        print(f"warning: the last line of {path} is cut short and left out: {cut_short}", file=sys.stderr)
    return rows


def chosen_rows(path: Path, where: Sequence[str] = ()) -> list[dict[str, str]]:
    """Return the rows of a results file that meet every condition. Raises CommandLineError and ProgramError."""
    rows = read_rows(path)
    if not rows:
        raise CommandLineError(f"there is no file {path} with rows: a training script writes one with --results")
    for condition in where:
        form = re.fullmatch("(?:([^=]+):)?([^:=]+)=(.*)", condition, re.DOTALL)
        if not form:
            raise CommandLineError(f"--where must have the form COLUMN=VALUE or METHOD:COLUMN=VALUE, got {condition!r}")
        method, column, value = form.groups()
        for name, known in ((column, list(rows[0])), (method, [row.get("method", "") for row in rows])):
            if name and name not in known:
                nearest = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or dict.fromkeys(known)
                raise CommandLineError(
                    f"--where {condition}: {path} has no {name!r}; did you mean {', '.join(nearest)}?"
                )
        kept = [row for row in rows if row[column] == value or (method and row["method"] != method)]
        if not kept:
            there = ", ".join(dict.fromkeys(row[column] or "(empty)" for row in rows))
            raise CommandLineError(f"--where {condition} leaves no row of {path}; {column} is {there}")
        rows = kept
    return rows


def _parse(path: Path) -> tuple[list[dict[str, str]], str]:
    """Return the rows of a results file, and its last line if that was cut short, else ""."""
    if is_special(path):  # a FIFO would block
        raise ProgramError(f"the results file {path} must be a file, and is a device, a FIFO or a socket")
    try:
        text = path.read_text(encoding="utf-8-sig")  # spreadsheet programs write a byte order mark
    except FileNotFoundError:
        return [], ""
    except (OSError, UnicodeDecodeError) as error:
        raise ProgramError(f"cannot read the results file {path}: {error}") from None
    header, (_, newline, last) = text.partition("\n")[0], text.rpartition("\n")
    too_few = len(next(csv.reader([last]), [])) < len(next(csv.reader([header]), []))
    cut_short = last if newline and (too_few or last.count('"') % 2) else ""
    reader = csv.reader(io.StringIO(text.removesuffix(cut_short), newline=""), strict=True)
    lines, line = [], 1
    try:
        for cells in filter(None, reader):
            if lines and len(cells) != len(lines[0]):
                raise csv.Error(f"{len(cells)} cells under {len(lines[0])} columns")
            lines.append(cells)
            line = reader.line_num + 1
    except csv.Error as error:
        raise ProgramError(f"line {line} of {path} cannot be read: {error}; mend or delete it") from None
    columns, *rows = lines or [["run_id"]]
    if "run_id" not in columns or len(set(columns)) < len(columns):
        raise ProgramError(
            f"{path} is not a results file: its first line must name each column once, run_id among them; "
            "choose another --results"
        )
    return [dict(zip(columns, cells)) for cells in rows], cut_short


def write_row(path: Path, row: Mapping[str, Value]) -> None:
    """Add `row` to a results file, in place of an earlier row with its run_id. Raises ProgramError.

    The file is written anew under a lock and renamed: writers wait for one another, and nobody meets half a row. The
    lock is flock(2), which ends with its process; over NFS Linux turns it into a lock of the server's.
    """
    lock = path.with_name(path.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The new file is made before the old one is read: over NFS a node may remember for half a minute that there was
        # no results file, or which, and making a file in the folder is what brings its memory of the folder up to date.
        with FileLock(lock, timeout=300), atomic_write(path) as file:
            rows = [old for old in read_rows(path) if old["run_id"] != row["run_id"]]
            rows.append({name: _cell(value) for name, value in row.items()})
            _write_table(file, rows)
    except Timeout:
        raise ProgramError(f"another process has held {lock} for five minutes; stop it, then try again") from None
    except OSError as error:
        raise ProgramError(f"cannot write the results file {path}: {error.strerror or error}") from None


def _cell(value: Value) -> str:
    """Return a value as a CSV cell: None is empty, floats keep all digits, lists are joined by spaces."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return " ".join(_cell(each).removesuffix(".0") for each in value)
    return str(value)


def _write_table(file: io.TextIOBase, rows: Sequence[Mapping[str, Value]]) -> None:
    columns = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
