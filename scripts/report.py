"""Tables and figures from results files: ours beside the published values, mean ± std over seeds, what the runs were.

    python scripts/report.py results/table1.csv                                    # Markdown on the screen
    python scripts/report.py results/table1.csv --format latex --output table1.tex
    python scripts/report.py results/table1.csv --format html --output table1.html  # one page, with the figures in it
    python scripts/report.py results/table1.csv --figures results/figures          # PNG and SVG
    python scripts/report.py results/cifar100.csv --where n_epochs=200 --where neuralsort:inverse_temperature=0.0625

The published values are those of results/paper/; which of its tables a file belongs to is seen from its name or its
columns, or said with --table. Runs that differ in more than their seed never share a cell, and a run with another
schedule, subset or precision than the published one has no difference to it: reporting/tables.py states the rule.
Figures (reporting/figures.py, reporting/permutation_figure.py) also read runs/ beside the file, and
results/benchmarks/.
"""

if __name__ == "__main__":  # from here on, what goes wrong is a sentence
    from data import program

    program.begin()

import argparse
import difflib
import sys
import tempfile
from pathlib import Path

from data import program
from data.atomic_file import atomic_write
from experiments.shared import command_line as cli
from experiments.shared.environment import ROOT
from experiments.shared.run_record import read_rows
from scripts.reporting.formats import FORMATS
from scripts.reporting.results import Row
from scripts.reporting.tables import Table, build_table, read_published

PAPER = ROOT / "results" / "paper"
KNN_TABLES = ("knn_mnist", "knn_fashion_mnist", "knn_cifar10")
TABLES = ("table1", "table4", "tables2_3_imagenet1k", "tables2_3_imagenet21k", "table5", *KNN_TABLES)
BY_FILE_NAME = {
    **{name: name for name in TABLES},
    **{"table2_3_imagenet1k": "tables2_3_imagenet1k", "imagenet1k": "tables2_3_imagenet1k"},
    **{"table2_3_imagenet21k": "tables2_3_imagenet21k", "imagenet21k": "tables2_3_imagenet21k"},
    **{"strong": "none", "temperature_training": "none"},  # not the paper's rows
}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the flags, each checked on its own. Raises CommandLineError."""
    parser = cli.Parser(prog="report.py", description="Tables and figures from a results file.")
    parser.add_argument("results", type=cli.path, help="a CSV file of results/")
    parser.add_argument(
        "--table",
        type=cli.choice("table", (*TABLES, "tables2_3", "none")),
        help=f"the published table beside it: {', '.join(TABLES)}; tables2_3: the one of the two with as many classes; "
        "none; default: by the file's name, else by its columns",
    )
    parser.add_argument(
        "--published", type=cli.path, metavar="FILE", help="published values; results/paper/<table>.csv"
    )
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="[METHOD:]COLUMN=VALUE",
        help="only these rows, or of METHOD's rows only these; may be repeated",
    )
    parser.add_argument("--n_seeds", type=cli.count, help="seeds asked of each row; as published, 2 if that is unknown")
    parser.add_argument(
        "--format", type=cli.choice("format", FORMATS), default="markdown", help=f"{', '.join(FORMATS)}; markdown"
    )
    parser.add_argument(
        "--output", type=program.output, metavar="FILE", help="where the table goes; the screen without it"
    )
    parser.add_argument(
        "--figures", type=cli.path, metavar="DIR", help="also draw the figures, as PNG and SVG, into DIR"
    )
    parser.add_argument(
        "--benchmarks",
        type=cli.path,
        default=ROOT / "results" / "benchmarks",
        metavar="DIR",
        help="losses.csv and training_step.csv for the figure of times (results/benchmarks in this repository)",
    )
    return parser.parse_args(argv)


def report(args: argparse.Namespace) -> int:
    """Write the table, and draw the figures that it asks for; return the exit status."""
    runs = chosen_rows(args.results, args.where)
    table, protocol = table_of(args.results, runs, args.table, args.published, args.n_seeds)
    with tempfile.TemporaryDirectory() as scratch:
        figures: list[Path] = []
        if args.figures or args.format == "html":
            try:
                from scripts.reporting.figures import draw_figures  # matplotlib takes a second, and a table needs none
            except ImportError as error:
                raise cli.RunError(f"{error}; --figures and --format html need pip install matplotlib") from None
            folder = args.figures or Path(scratch)
            figures = draw_figures(table, protocol, args.results.parent / "runs", args.benchmarks, folder)
        text = FORMATS[args.format](table, figures)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(args.output) as file:
            file.write(text)
    else:
        print(text, end="")
    for path in [args.output] * bool(args.output) + figures * bool(args.figures):
        print(f"wrote {path}", file=sys.stderr)
    return 0


def table_of(
    results: Path,
    runs: list[Row],
    name: str | None = None,
    published_file: Path | None = None,
    num_seeds: int | None = None,
) -> tuple[Table, Row]:
    """Return the table of the rows of a results file (none: nothing has run yet) and the protocol it is measured by.

    name: the published table; None: by the file's name or its rows. Raises CommandLineError.
    """
    published_file = published_file or published_of(name, results, runs)
    published, protocol = read_published(published_file) if published_file else ([], {})
    return build_table(results.stem, runs, published, protocol, num_seeds), protocol


def chosen_rows(path: Path, where: list[str]) -> list[Row]:
    """Return the rows of a results file that meet every condition. Raises CommandLineError and RecordError."""
    if not path.is_file():
        raise cli.CommandLineError(f"there is no file {path}: a training script writes one with --results {path}")
    rows: list[Row] = read_rows(path)
    if not rows:
        raise cli.CommandLineError(f"{path} has no rows yet: a run that finishes adds one")
    for condition in where:
        left, equals, value = condition.partition("=")
        method, colon, column = left.rpartition(":")
        if not equals or (colon and not method):
            raise cli.CommandLineError(
                f"--where must have the form COLUMN=VALUE or METHOD:COLUMN=VALUE, got {condition!r}"
            )
        for name, known in ((column, list(rows[0])), (method, [row.get("method", "") for row in rows])):
            if name and name not in known:
                nearest = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or dict.fromkeys(known)
                raise cli.CommandLineError(
                    f"--where {condition}: {path} has no {name!r}; did you mean {', '.join(nearest)}?"
                )
        kept = [row for row in rows if row[column] == value or (method and row["method"] != method)]
        if not kept:
            there = ", ".join(dict.fromkeys(row[column] or "(empty)" for row in rows))
            raise cli.CommandLineError(f"--where {condition} leaves no row of {path}; {column} is {there}")
        rows = kept
    return rows


def published_of(table: str | None, results: Path, runs: list[Row]) -> Path | None:
    """Return the file of published values for these runs; None where there is none."""
    num_classes = {run.get("num_classes") for run in runs}
    of_classes = {"1000": "tables2_3_imagenet1k", "10450": "tables2_3_imagenet21k"}
    of_embeddings = of_classes.get(num_classes.pop()) if len(num_classes) == 1 and "embeddings" in runs[0] else None
    if table == "tables2_3":
        if of_embeddings is None:
            raise cli.CommandLineError(
                f"--table tables2_3: {results} has no rows of embeddings of 1000 or 10450 classes alone; name the table"
            )
        table = of_embeddings
    if table is None:
        datasets = {run.get("dataset") for run in runs}
        if runs and all("prediction" in run for run in runs):  # the nearest-neighbour classifier's
            of_set = f"knn_{datasets.pop()}" if len(datasets) == 1 else ""
            table = of_set if of_set in KNN_TABLES else "none"
        else:
            by_columns = of_embeddings or ("table1" if datasets == {"cifar100"} else "none")
            table = BY_FILE_NAME.get(results.stem.removesuffix("_short")) or by_columns
    return None if table == "none" else PAPER / f"{table}.csv"


def main(argv: list[str] | None = None) -> int:
    """Run the script; return its exit status (see data/program.py)."""
    return program.finish(lambda: report(parse_arguments(argv)))


if __name__ == "__main__":
    program.end(main())
