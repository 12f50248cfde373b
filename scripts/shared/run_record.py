"""The rows of a results file that are asked for, and what its columns mean."""

import csv
import difflib
import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.common.flags import ROOT
from scripts.shared.atomic_file import is_special
from scripts.shared.program import CommandLineError, ProgramError

# Every column of a row that is not a flag of the script, with its meaning; flags have theirs in --help.
_TABLE = (ROOT / "results" / "README.md").read_text(encoding="utf-8").partition("| column |")[2].partition("\n\n")[0]
_LINES = re.findall(r"^\| (`.*?`) \| (.*) \|$", _TABLE, re.MULTILINE)  # of one column, or of several that are alike
COLUMNS = {name: meaning for names, meaning in _LINES for name in re.findall(r"`(\w+)`", names)}

WHERE = "only these rows, or of METHOD's rows only these; may be repeated"  # the flag whose words chosen_rows takes

csv.field_size_limit(2**31 - 1)  # what can be recorded can be read


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
