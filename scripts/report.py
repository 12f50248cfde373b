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
import re
import sys
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from experiments.common import door
from experiments.common.files import replace_file
from experiments.common.paths import PAPER, user_path
from reporting import beam_search, epochs, reproduction, tables, temperatures
from reporting.frames import are_of_beam_search, is_untested, read_runs, read_text


class Report(NamedTuple):
    """A table as text, and the figures that were drawn."""

    text: str
    figures: list[Path]


class Kind(NamedTuple):
    """A kind of report.

    Attributes:
        name: for sentences.
        flags: what it takes, besides --output.
    """

    name: str
    flags: tuple[str, ...]


YOURS = Kind("your runs beside the repository's", ("choice", "commands"))
EPOCHS = Kind("a file of epochs", ("where", "figures"))
BEAM_SEARCH = Kind("a file of beam search", ("where",))
TEMPERATURES = Kind("a table of inverse temperatures", ("where", "temperatures", "figures"))
PAIRED = Kind("a table of paired differences", ("where", "paired", "commands", "format", "figures"))
ALONE = Kind("a table of one file", ("where", "table", "commands", "format", "figures"))


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "report.py",
        usage="%(prog)s [options] results",
        description="Tables and figures of results.",
        allow_abbrev=False,
    )
    published = sorted(read_text(PAPER / "protocols.csv")["table"])
    parser.add_argument("results", type=user_path, help="CSV file of results/")
    parser.add_argument("--table", choices=(*published, "none"), help="published table (default: by file or data)")
    parser.add_argument("--where", action="append", default=[], help="keep runs: [METHOD:]COLUMN=VALUE; repeatable")
    parser.add_argument(
        "--choice", choices=("noisy", "clean"),
        help="validation labels that choose, in the study of wrong labels (default: noisy)",
    )  # fmt: skip
    parser.add_argument("--commands", action="store_true", help="show the command that repeats each line")
    parser.add_argument("--paired", metavar="METHOD", help="show paired differences to the best setting of METHOD")
    parser.add_argument("--temperatures", action="store_true", help="show the best inverse temperature of each method")
    parser.add_argument("--format", choices=tables.FORMATS, default="markdown", help="default: markdown")
    parser.add_argument("--output", type=user_path, help="file for the table (default: the screen)")
    parser.add_argument("--figures", type=user_path, metavar="FOLDER", help="folder for the figures, as SVG")
    args = parser.parse_args(argv)
    inputs = [file.resolve() for file in (args.results, *PAPER.glob("*.csv"))]
    if args.output and args.output.resolve() in inputs:
        parser.error(f"--output {args.output} is the results file, or one of {PAPER.name}/")
    if args.output and holds_runs(args.output):
        parser.error(f"--output {args.output} holds runs, which the table would replace: name another file")
    return args


def holds_runs(path: Path) -> bool:
    """Whether a file has the first line of a results file."""
    if not path.is_file():
        return False
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        return "run_id" in re.findall(r"\w+", file.readline())


def given_flags(args: argparse.Namespace) -> list[str]:
    """The flags of a call that ask for something else than the table of its file does by default."""
    names = ("table", "where", "choice", "commands", "paired", "temperatures", "figures")
    given = [name for name in names if getattr(args, name)]
    if args.format != "markdown":
        given.append("format")
    return given


def kind_of(args: argparse.Namespace, runs: pd.DataFrame) -> Kind:
    """The kind of the report of one file's runs."""
    if "epoch" in runs:
        return EPOCHS
    if are_of_beam_search(runs):
        return BEAM_SEARCH
    if args.temperatures:
        return TEMPERATURES
    if args.paired:
        return PAIRED
    return ALONE


def check_flags(kind: Kind, args: argparse.Namespace) -> None:
    """Raise ValueError for a flag that would change nothing."""
    for name in given_flags(args):
        if name not in kind.flags:
            raise ValueError(f"--{name} changes nothing in {kind.name}: leave it out")
    if args.commands and args.format != "markdown":
        raise ValueError(f"--commands shows Markdown: leave it out, or --format {args.format}")
    if args.choice and args.choice not in reproduction.choices_of(args.results):
        raise ValueError(f"--choice is for the study of wrong labels, and {args.results} has no {args.choice} choice")


def report(args: argparse.Namespace) -> Report:
    """The table of a file, and the figures.

    Raises:
        ValueError, OSError: the file cannot be read, has no such run, or takes no such flag.
    """
    path = args.results
    if set(given_flags(args)) <= set(YOURS.flags) and reproduction.is_yours(path):
        check_flags(YOURS, args)
        return Report(reproduction.report(path, args.choice or "noisy", args.commands), [])
    runs = read_runs(path, args.where)
    kind = kind_of(args, runs)
    check_flags(kind, args)
    if kind is EPOCHS:
        return Report(epochs.as_markdown(path, runs), drawn_epochs(args, runs))
    if kind is BEAM_SEARCH:
        return Report(beam_search.as_markdown(path.stem, runs), [])
    if kind is TEMPERATURES:
        check_temperatures(path, runs)
        return Report(temperatures.as_markdown(path.stem, runs), drawn_temperatures(args, runs))
    if kind is PAIRED:
        table = tables.gains(path.stem, runs, args.paired)
        table.caption = f"{table.caption} {reproduction.rule_of_selection(path)}".strip()
        table.caption = f"{table.caption} {reproduction.limit_of(path)}".strip()
    else:
        name = args.table or tables.published_table(path.stem, runs)
        table = tables.beside_published(path.stem, runs, table=name.replace("none", ""))
    text = tables.FORMATS[args.format](table)
    if args.commands:
        text = reproduction.table_with_commands(table, path)
    return Report(text, drawn_accuracy(args, table))


def check_temperatures(path: Path, runs: pd.DataFrame) -> None:
    """Raise ValueError for runs that have no test accuracy, or no P_K by whose weights validation chooses."""
    if is_untested(runs).all():
        raise ValueError(f"--temperatures shows test accuracies, and no run of {path} has a test split")
    if "p_k" not in runs or not runs["p_k"].all():
        raise ValueError(f"--temperatures shows losses of P_K, and not all runs of {path} have one")


def drawn_epochs(args: argparse.Namespace, runs: pd.DataFrame) -> list[Path]:
    if not args.figures:
        return []
    from reporting import figures  # matplotlib takes a second, and a table needs none

    return figures.draw_epochs(args.results, runs, args.figures)


def drawn_temperatures(args: argparse.Namespace, runs: pd.DataFrame) -> list[Path]:
    if not args.figures:
        return []
    from reporting import figures

    drawn = figures.draw_temperatures(args.results.stem, runs, args.figures)
    if not drawn:
        raise ValueError(f"--figures draws accuracy over temperatures, and no loss of {args.results} has two of them")
    return drawn


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
