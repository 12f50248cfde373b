"""Print the table of a results file: a line per experiment, mean ± standard deviation over seeds, beside the paper's.

    python scripts/report.py results/table1.csv                                    # Markdown on the screen
    python scripts/report.py results/table1.csv --format latex --output table1.tex # or csv
    python scripts/report.py results/table1.csv --figures runs/figures    # also draw SVG
    python scripts/report.py results/table1_short.csv --paired softmax_cross_entropy
    python scripts/report.py results/temperature.csv --temperatures --where method=lml

Lines that differ in a setting differ in a column; what differs from the published row is named in a column, or in the
caption where it is the same for all, and there is no difference to it. Files of train_beam_search.py and of
scripts/epochs.py have tables of their own.
"""

import argparse
import sys
from pathlib import Path

from experiments.common.files import replace_file
from scripts.reporting import studies, tables
from scripts.reporting.runs import ReportError, read_runs


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the flags."""
    usage = "%(prog)s [options] results"
    parser = argparse.ArgumentParser("report.py", usage, "Tables and figures of results.", allow_abbrev=False)
    parser.add_argument("results", type=Path, help="CSV file of results/")
    parser.add_argument("--table", choices=(*tables.TABLES, "none"), help="published table (default: by file or data)")
    parser.add_argument("--where", action="append", default=[], help="keep runs: [METHOD:]COLUMN=VALUE; repeatable")
    parser.add_argument("--paired", metavar="METHOD", help="show paired differences to the best setting of METHOD")
    parser.add_argument("--temperatures", action="store_true", help="show the best inverse temperature of each method")
    parser.add_argument("--format", choices=tables.FORMATS, default="markdown", help="default: %(default)s")
    parser.add_argument("--output", type=Path, help="file for the table (default: the screen)")
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="folder for the figures, as SVG")
    args = parser.parse_args(argv)
    inputs = [file.resolve() for file in (args.results, *tables.PAPER.glob("*.csv"))]
    if args.output and args.output.resolve() in inputs:
        parser.error(f"--output {args.output} is the results file, or one of {tables.PAPER.name}/")
    return args


def report(args: argparse.Namespace) -> tuple[str, list[Path]]:
    """Return the table as text, and the figures that were drawn. Raises ReportError."""
    path, runs = args.results, read_runs(args.results, args.where)
    if args.figures:
        from scripts.reporting import figures  # matplotlib takes a second, and a table needs none
    if "epoch" in runs:
        return studies.epochs_text(path, runs), figures.draw_epochs(path, runs, args.figures) if args.figures else []
    if "arm" in runs:
        return studies.beam_search(path.stem, runs), []
    if args.temperatures:
        table = studies.temperatures(path.stem, runs)
        drawn = figures.draw_temperatures(path.stem, runs, args.figures) if args.figures else []
    elif args.paired:
        table = tables.paired(path.stem, runs, args.paired)
        drawn = figures.draw_accuracy(table, args.figures) if args.figures else []
    else:
        name = args.table or tables.published_table(path, runs)
        table = tables.beside_published(path.stem, runs, None if name == "none" else name)
        drawn = figures.draw_accuracy(table, args.figures) if args.figures else []
    return tables.FORMATS[args.format](table), drawn


def main(argv: list[str] | None = None) -> int:
    """Run the script; return its exit status."""
    args = parse_arguments(argv)
    try:
        text, written = report(args)
        if args.output:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            replace_file(args.output, text)
            written.insert(0, args.output)
    except (ReportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(text if args.output is None else "", end="")
    for path in written:
        print(f"wrote {path}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
