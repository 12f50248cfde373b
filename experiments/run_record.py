"""Print a results file as a table, or what its columns mean.

python -m experiments.run_record show results/cifar100.csv --where method=neuralsort --sort test_top1
python -m experiments.run_record columns                   # what each column means, and its unit
"""

if __name__ == "__main__":  # from here on, what goes wrong is a sentence
    from data import program

    program.begin()

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

import pandas

from data import program
from experiments.shared.command_line import refusing
from experiments.shared.run_record import COLUMNS, WHERE, chosen_rows
from topk_losses.checks import check_choice

SHOWN = (
    *("dataset", "model", "backbone", "embeddings", "method", "p_k", "inverse_temperature", "m", "top1_mode"),
    *("label_noise", "n_epochs", "seed", "implementation", "test_top1", "test_top5"),
    *("train_seconds", "images_per_second"),
)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the command and its flags. Raises CommandLineError."""
    parser = program.Parser(prog="python -m experiments.run_record", description="Print a results file as a table.")
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="print a results file as a table")
    show.add_argument("results", type=program.path, help="the CSV file")
    show.add_argument("--where", action="append", default=[], metavar="[METHOD:]COLUMN=VALUE", help=WHERE)
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
    """Return the chosen rows and columns of a results file as aligned text. Raises ProgramError."""
    rows = pandas.DataFrame(chosen_rows(path, where))  # every cell as text
    with refusing():
        for name in (*filter(None, [sort]), *(shown or ())):
            check_choice("column", name, rows)
    if sort:
        numbers = -pandas.to_numeric(rows[sort], errors="coerce")  # text comes behind, alphabetically
        rows = rows.assign(_number=numbers).sort_values(["_number", sort], kind="stable")
    filled = {name for name in rows if rows[name].any()}
    # Where nothing was tested, what validated.
    names = (name if name in filled else name.replace("test_", "valid_") for name in SHOWN)
    shown = shown or [name for name in names if name in filled]
    table = rows[list(shown)].map(_shown_cell).to_string(index=False)
    return f"{table}\n({len(rows)} row{'s' * (len(rows) != 1)})"


def _shown_cell(cell: str) -> str:
    """Shorten a number with a fraction to four decimals; leave everything else as it is."""
    return f"{float(cell):.4f}" if re.fullmatch(r"-?\d+\.\d{5,}(e-?\d+)?", cell) else cell


if __name__ == "__main__":
    program.end(main())
