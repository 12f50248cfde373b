"""Print a results file as a table, or what its columns mean.

python -m experiments.run_record show results/cifar100.csv --where method=neuralsort --sort test_top1
python -m experiments.run_record columns                   # what each column means, and its unit
"""

if __name__ == "__main__":  # from here on, what goes wrong is a sentence
    from data import program

    program.begin()

import argparse
import difflib
import re
from collections.abc import Sequence
from pathlib import Path

from data import program
from data.program import CommandLineError
from experiments.shared.run_record import COLUMNS, read_rows

SHOWN = (
    *(
        "dataset",
        "model",
        "backbone",
        "embeddings",
        "method",
        "p_k",
        "inverse_temperature",
        "m",
        "top1_mode",
        "label_noise",
    ),
    *("n_epochs", "seed", "implementation", "test_top1", "test_top5", "train_seconds", "images_per_second"),
)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the command and its flags. Raises CommandLineError."""
    parser = program.Parser(prog="python -m experiments.run_record", description="Print a results file as a table.")
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="print a results file as a table")
    show.add_argument("results", type=program.path, help="the CSV file")
    show.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="COLUMN=VALUE",
        help="only these rows; may be repeated",
    )
    show.add_argument("--sort", metavar="COLUMN", help="numbers: largest first; text: alphabetically")
    show.add_argument("--columns", nargs="+", help=f"default: those of {', '.join(SHOWN)} that any row fills")
    commands.add_parser("columns", help="print the meaning and unit of each column")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> int:
    """Print what the command asks for; return the exit status."""
    if args.command == "columns":
        print("\n".join(f"{name:24} {meaning}" for name, meaning in COLUMNS.items()))
    else:
        print(_table(args.results, args.where, args.sort, args.columns))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the program; return its exit status (see data/program.py)."""
    return program.finish(lambda: run(parse_arguments(argv)))


def _table(path: Path, where: Sequence[str], sort: str | None, shown: Sequence[str] | None) -> str:
    """Return the chosen rows and columns of a results file as aligned text. Raises RecordError and CommandLineError."""
    rows = read_rows(path)
    if not rows:
        raise CommandLineError(f"{path} has no rows" if path.exists() else f"there is no file {path}")

    def known(column: str) -> str:
        if column not in rows[0]:
            nearest = difflib.get_close_matches(column, rows[0], n=3, cutoff=0.4) or rows[0]
            raise CommandLineError(f"{path} has no column {column!r}; did you mean {', '.join(nearest)}?")
        return column

    for condition in where:
        column, equals, value = condition.partition("=")
        if not equals:
            raise CommandLineError(f"--where must have the form COLUMN=VALUE, got {condition!r}")
        rows = [row for row in rows if row[known(column)] == value]
    if sort:
        known(sort)
        rows.sort(key=lambda row: _sort_key(row[sort]))
    if shown is None:
        shown = [name for name in SHOWN if any(row.get(name) for row in rows)]
    table = [list(shown), *([_shown_cell(row[known(name)]) for name in shown] for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(shown))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in table]
    return "\n".join([*lines, f"({len(rows)} row{'s' * (len(rows) != 1)})"])


def _sort_key(cell: str) -> tuple[int, float, str]:
    try:
        return (0, -float(cell), "")
    except ValueError:
        return (1, 0.0, cell)


def _shown_cell(cell: str) -> str:
    """Shorten a number with a fraction to four decimals; leave everything else as it is."""
    return f"{float(cell):.4f}" if re.fullmatch(r"-?\d+\.\d{5,}(e-?\d+)?", cell) else cell


if __name__ == "__main__":
    program.end(main())
