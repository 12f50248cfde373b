"""What reports share that are no table of the paper: rows of one setting, a Markdown table, the command."""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from data import program
from data.program import CommandLineError, Parser
from experiments.shared.run_record import COLUMNS, read_rows

Row = Mapping[str, str]


def rows_of(path: Path, script: str, needed: str, apart: Iterable[str]) -> list[Row]:
    """Return the rows of a file that `script` wrote, which have the column `needed` and agree in all flags but `apart`.

    Raises CommandLineError or RecordError.
    """
    if not path.exists():
        raise CommandLineError(f"there is no file {path}; {script} writes it")
    rows: list[Row] = read_rows(path)
    if not rows or needed not in rows[0]:
        raise CommandLineError(f"{path} has no rows of {script} with the column {needed}")
    for name in rows[0].keys() - {*COLUMNS, *apart}:
        values = dict.fromkeys(row[name] for row in rows)
        if len(values) > 1:
            raise CommandLineError(f"{path} mixes {name} {' and '.join(values)}: one report is of one setting")
    return rows


def markdown(heads: Sequence[str], lines: Sequence[Sequence[str]], words: int = 1) -> str:
    """Return a table, of which the first `words` columns are text and the others numbers."""
    rule = [*["---"] * words, *["---:"] * (len(heads) - words)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rule, *lines))


def mean_std(values: Sequence[float]) -> str:
    """Return the mean and, of several values, the sample standard deviation, with two decimals."""
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread}"


def run(
    argv: list[str] | None,
    description: str,
    written_by: str,
    text: Callable[[Path], str],
    draw: Callable[[Path, Path], list[Path]],
) -> int:
    """Print the text on a file and draw its figures where they are asked for; return the exit status."""

    def report() -> int:
        parser = Parser(description=description)
        parser.add_argument("results", type=Path, help=f"a CSV file that {written_by} wrote")
        parser.add_argument("--figures", type=Path, metavar="DIR", help="also draw figures, PNG and SVG, into DIR")
        args: argparse.Namespace = parser.parse_args(argv)
        print(text(args.results), end="")
        for drawn in draw(args.results, args.figures) if args.figures else ():
            print(f"wrote {drawn}", file=sys.stderr)
        return 0

    return program.finish(report)
