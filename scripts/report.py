"""Tables and figures from results files: ours beside the published values, mean ± std over seeds, what the runs were.

    python scripts/report.py results/table1.csv                                    # Markdown on the screen
    python scripts/report.py results/table1.csv --format latex --output table1.tex
    python scripts/report.py results/table1.csv --format html --output table1.html  # one page, with the figures in it
    python scripts/report.py results/table1.csv --figures results/figures          # PNG and SVG
    python scripts/report.py results/table1_short.csv --paired softmax_cross_entropy
    python scripts/report.py results/temperature.csv --temperatures --figures docs/figures
    python scripts/report.py results/cifar100.csv --where n_epochs=200 --where neuralsort:inverse_temperature=0.0625

The published values are those of results/paper/; which of its tables a file belongs to is seen from its name or its
columns, or said with --table. Runs that differ in more than their seed never share a cell, those of another
schedule, subset or precision never a table (in Markdown each has its own), and one that differs so from the published
row has no difference to it: reporting/tables.py states the rule. Files of train_beam_search.py and of scripts/epochs.py
have tables of their own (reporting/beam_search.py, reporting/epochs_figure.py), and so has --temperatures.
Figures (reporting/figures.py, reporting/permutation_figure.py) also read runs/ beside the file, and results/benchmarks/
of this repository.
"""

if __name__ == "__main__":  # from here on, what goes wrong is a sentence
    from scripts.shared import program

    program.begin()

import argparse
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from scripts.reporting import beam_search, temperatures
from scripts.reporting.formats import FORMATS
from scripts.reporting.paired import paired
from scripts.reporting.results import Row
from scripts.reporting.tables import Table, build_table, experiments_of
from scripts.shared import program
from scripts.shared.atomic_file import atomic_write
from scripts.shared.program import check
from scripts.shared.run_record import WHERE, chosen_rows, read_rows

TABLES = (
    *("table1", "table4", "tables2_3_imagenet1k", "tables2_3_imagenet21k", "table5"),
    *("knn_mnist", "knn_fashion_mnist", "knn_cifar10"),
)
BY_FILE_NAME = {
    **{name: name for name in TABLES},
    **{f"{name}imagenet{n}": f"tables2_3_imagenet{n}" for name in ("", "table2_3_") for n in ("1k", "21k")},
    **dict.fromkeys(("strong", "scratch", "temperature_training"), "none"),  # not the paper's rows
}
BY_NUM_CLASSES = {"1000": "tables2_3_imagenet1k", "10450": "tables2_3_imagenet21k"}  # of embeddings


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the flags, each checked on its own. Raises CommandLineError."""
    parser = program.Parser(prog="report.py", description="Tables and figures from a results file.")
    flag = parser.add_argument
    flag("results", type=program.path, help="a CSV file of results/")
    told = "the published table beside it; without it, by the file's name, else by its columns"
    flag("--table", choices=(*TABLES, "none"), help=told)
    flag("--where", action="append", default=[], metavar="[METHOD:]COLUMN=VALUE", help=WHERE)
    told = (
        "instead: each setting's rows minus those of METHOD's best by seed, with intervals and what would settle them"
    )
    flag("--paired", metavar="METHOD", help=told)
    flag("--temperatures", action="store_true", help="instead: each method's best inverse temperature, by validation")
    flag("--format", choices=FORMATS, default="markdown", help="%(default)s without it")
    flag("--output", type=program.output, metavar="FILE", help="where the table goes; the screen without it")
    flag("--figures", type=program.path, metavar="DIR", help="also draw the figures, as PNG and SVG, into DIR")
    return parser.parse_args(argv)


def report(args: argparse.Namespace) -> int:
    """Write the table, and draw the figures that it asks for; return the exit status."""
    runs = chosen_rows(args.results, args.where)
    figures: list[Path] = []
    own = tables_of_its_own(args, runs)
    plain = args.format == "markdown" and not args.table
    whose = "--temperatures" if args.temperatures else args.results
    told = f"{whose} has tables of its own, in Markdown: leave --format, --table and --paired out"
    check(not own or (plain and not args.paired), told)
    if args.paired:
        told = "--paired is a table in Markdown: leave --format, --table and --figures out"
        check(plain and not args.figures, told)
        text = paired(args.results.stem, runs, args.paired)
    elif own:
        text = own.text_of(args.results, runs)
        figures = own.draw(args.results, runs, args.figures) if args.figures else []
    else:
        one = args.format != "markdown" or args.figures
        parts = [runs] if one else experiments_of(args.results.stem, runs)
        tables = [table_of(args.results, part, args.table) for part in parts]
        with tempfile.TemporaryDirectory() as scratch:
            if args.figures or args.format == "html":
                from scripts.reporting.figures import draw_figures  # matplotlib takes a second, and a table needs none

                figures = draw_figures(tables[0], args.results.parent / "runs", args.figures or Path(scratch))
            text = "\n".join(FORMATS[args.format](table, figures) for table in tables)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(args.output) as file:
            file.write(text)
    else:
        print(text, end="")
    for path in [args.output] * bool(args.output) + figures * bool(args.figures):
        print(f"wrote {path}", file=sys.stderr)
    return 0


def tables_of_its_own(args: argparse.Namespace, runs: list[Row]) -> ModuleType | None:
    """Return what reads these rows, its text_of and draw, where that is not a table of runs beside published ones."""
    if args.temperatures or "arm" in runs[0]:
        return temperatures if args.temperatures else beam_search
    if "epoch" not in runs[0]:
        return None
    from scripts.reporting import epochs_figure  # matplotlib takes a second

    return epochs_figure


def table_of(results: Path, runs: list[Row] | None = None, name: str | None = None) -> Table:
    """Return the table of a results file, which need not be there. Raises CommandLineError and ProgramError.

    runs: those of its rows that are wanted; None: all. name: the published table; None: by the file's name or its rows.
    """
    runs = read_rows(results) if runs is None else runs
    name = name or published_of(results, runs)
    return build_table(results.stem, runs, None if name == "none" else name)


def published_of(results: Path, runs: list[Row]) -> str:
    """Return the published table beside these runs, by file name or columns, or "none"."""
    datasets, num_classes = (" ".join({run.get(column, "") for run in runs}) for column in ("dataset", "num_classes"))
    if runs and "prediction" in runs[0]:  # the nearest-neighbour classifier's
        return f"knn_{datasets}" if f"knn_{datasets}" in TABLES else "none"
    by_columns = "table1" if datasets == "cifar100" else "none"
    if runs and "embeddings" in runs[0]:
        by_columns = BY_NUM_CLASSES.get(num_classes, by_columns)
    return BY_FILE_NAME.get(results.stem.removesuffix("_short"), by_columns)


def main(argv: list[str] | None = None) -> int:
    """Run the script; return its exit status (see data/program.py)."""
    return program.finish(lambda: report(parse_arguments(argv)))


if __name__ == "__main__":
    program.end(main())
