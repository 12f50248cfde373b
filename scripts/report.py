"""Print the table of a results file: published values, this repository's runs and yours, with a verdict for each line.

    python scripts/report.py results/table1_short.csv                  # your runs beside the repository's
    python scripts/report.py results/table1_short.csv --commands       # and the command that repeats each line
    python scripts/report.py results/noise/human.csv --choice clean    # what validation chose, and its ten seeds
    python scripts/report.py results/repository/table1.csv             # the repository's runs alone
    python scripts/report.py results/repository/table1.csv --format latex --output table1.tex    # or csv
    python scripts/report.py results/repository/table1.csv --figures runs/figures                # also draw SVG
    python scripts/report.py results/repository/table1_short.csv --paired softmax_cross_entropy
    python scripts/report.py results/repository/temperature.csv --temperatures --where method=lml

Lines that differ in a setting differ in a column; what differs from the published row is named in a column, or in the
caption where it is the same for all, and there is no difference to it. Files of train_beam_search.py and of
scripts/epochs.py have tables of their own.
"""

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from experiments.common import door
from experiments.common.files import replace_file
from experiments.common.paths import PAPER
from reporting import beam_search, epochs, reproduction, tables, temperatures
from reporting.frames import is_untested, read_runs, read_text


class Report(NamedTuple):
    """A table as text, and the figures that were drawn."""

    text: str
    figures: list[Path]


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "report.py",
        usage="%(prog)s [options] results",
        description="Tables and figures of results.",
        allow_abbrev=False,
    )
    published = sorted(read_text(PAPER / "protocols.csv")["table"])
    parser.add_argument("results", type=Path, help="CSV file of results/")
    parser.add_argument("--table", choices=(*published, "none"), help="published table (default: by file or data)")
    parser.add_argument("--where", action="append", default=[], help="keep runs: [METHOD:]COLUMN=VALUE; repeatable")
    parser.add_argument(
        "--choice", choices=("noisy", "clean"), default="noisy",
        help="validation labels that choose, in the study of wrong labels (default: noisy)",
    )  # fmt: skip
    parser.add_argument("--commands", action="store_true", help="show the command that repeats each line")
    parser.add_argument("--paired", metavar="METHOD", help="show paired differences to the best setting of METHOD")
    parser.add_argument("--temperatures", action="store_true", help="show the best inverse temperature of each method")
    parser.add_argument("--format", choices=tables.FORMATS, default="markdown", help="default: markdown")
    parser.add_argument("--output", type=Path, help="file for the table (default: the screen)")
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="folder for the figures, as SVG")
    args = parser.parse_args(argv)
    inputs = [file.resolve() for file in (args.results, *PAPER.glob("*.csv"))]
    if args.output and args.output.resolve() in inputs:
        parser.error(f"--output {args.output} is the results file, or one of {PAPER.name}/")
    return args


def report(args: argparse.Namespace) -> Report:
    """The table of a file, and the figures.

    Raises:
        ValueError, OSError: the file cannot be read, or has no such run.
    """
    path = args.results
    special = args.paired or args.temperatures or args.figures or args.format != "markdown"
    if not special and not args.where and reproduction.is_yours(path):
        return Report(reproduction.report(path, args.choice, args.commands), [])
    runs = read_runs(path, args.where)
    if "epoch" in runs:
        return Report(epochs.as_markdown(path, runs), drawn_epochs(args, runs))
    if "arm" in runs:
        return Report(beam_search.as_markdown(path.stem, runs), [])
    if args.temperatures:
        if is_untested(runs).all():
            raise ValueError(f"--temperatures shows test accuracies, and no run of {path} has a test split")
        return Report(temperatures.as_markdown(path.stem, runs), drawn_temperatures(args, runs))
    if args.paired:
        table = tables.gains(path.stem, runs, args.paired)
        table.caption = f"{table.caption} {reproduction.rule_of_selection(path)}".strip()
    else:
        name = args.table or tables.published_table(path.stem, runs)
        table = tables.beside_published(path.stem, runs, table=name.replace("none", ""))
    text = tables.FORMATS[args.format](table)
    if args.commands:
        text = reproduction.with_commands(table, path)
    return Report(text, drawn_accuracy(args, table))


def drawn_epochs(args: argparse.Namespace, runs: pd.DataFrame) -> list[Path]:
    if not args.figures:
        return []
    from reporting import figures  # matplotlib takes a second, and a table needs none

    return figures.draw_epochs(args.results, runs, args.figures)


def drawn_temperatures(args: argparse.Namespace, runs: pd.DataFrame) -> list[Path]:
    if not args.figures:
        return []
    from reporting import figures

    return figures.draw_temperatures(args.results.stem, runs, args.figures)


def drawn_accuracy(args: argparse.Namespace, table: tables.Table) -> list[Path]:
    if not args.figures:
        return []
    from reporting import figures

    return figures.draw_accuracy(table, args.figures)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    found = report(args)
    written = list(found.figures)
    if args.output is None:
        print(found.text, end="")
    else:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        replace_file(args.output, found.text.encode())
        written.insert(0, args.output)
    for path in written:
        print(f"wrote {path}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(door.call(main))
