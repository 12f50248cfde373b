"""Gather what each epoch of a table's runs gave, finished or not: at a constant rate the result of so many epochs.

    python scripts/epochs.py results/table1.csv                        # -> results/table1_epochs.csv
    python scripts/epochs.py results/table1.csv --runs FOLDER          # the runs of another clone

Runs that the file has already stay, with columns of your own, unless the folder has more of their epochs. A run folder
that cannot be read is named and left out. Accuracies are fractions.
"""

import argparse
import json
import sys
from pathlib import Path

import pandas as pd
from filelock import FileLock

from experiments.common import door
from experiments.common.files import replace_file
from experiments.common.settings import cell
from scripts.reporting.runs import IDENTITY, ReportError, read_runs

OF_THE_RUN = ("run_id", *IDENTITY, "device_name", "torch_version")
OF_AN_EPOCH = ("epoch", "train_top1", "valid_top1", "valid_top5", "test_top1", "test_top5", "train_seconds")


def epochs_of(config: Path, results: str) -> list[pd.DataFrame]:
    """Return the epochs of a run, as text; nothing where it has none or writes to another results file."""
    flags, history = json.loads(config.read_text(encoding="utf-8")), config.with_name("epochs.csv")
    if Path(flags["results"]).name != results or not history.is_file():
        return []
    rows = pd.read_csv(history, dtype=str, usecols=OF_AN_EPOCH)
    run = {"run_id": flags["run_id"], **{name: cell(flags[name]) for name in OF_THE_RUN if name in flags}}
    return [rows.assign(**run)] if len(rows) else []


def main(argv: list[str] | None = None) -> int:
    """Write the file; return the exit status."""
    parser = argparse.ArgumentParser(description="Gather the epochs of a table's runs.")
    parser.add_argument("results", type=Path, help="CSV file of the table, such as results/table1.csv")
    parser.add_argument("--runs", type=Path, help="folder of the runs (default: runs, beside the table)")
    args = parser.parse_args(argv)
    output, runs = args.results.with_stem(f"{args.results.stem}_epochs"), args.runs or args.results.with_name("runs")
    found = []
    for config in sorted(path for path in runs.glob("*/config.json") if path.is_file()):
        try:
            found += epochs_of(config, args.results.name)
        except (ValueError, KeyError, TypeError, OSError) as error:
            print(f"note: {config.parent} cannot be read and is left out: {error!r}", file=sys.stderr)
    if not found:
        parser.error(f"{runs} holds no run that writes to {args.results.name}; name its folder by --runs")
    with FileLock(output.with_name(f".{output.name}.lock")):
        try:
            known = [rows for _, rows in read_runs(output).groupby("run_id")] if output.exists() else []
        except ReportError as error:
            parser.error(str(error))
        by_length = sorted([*found, *known], key=len)  # of equals the known one stays
        longest = {rows["run_id"].iloc[0]: rows for rows in by_length}
        table = pd.concat([longest[run_id] for run_id in sorted(longest)])
        columns = [name for name in dict.fromkeys([*OF_THE_RUN, *OF_AN_EPOCH, *table]) if name in table]
        replace_file(output, table.to_csv(columns=columns, index=False, lineterminator="\n"))
    print(f"{output}: " + ", ".join(f"{len(rows)} epochs of {run_id}" for run_id, rows in sorted(longest.items())))
    return 0


if __name__ == "__main__":
    sys.exit(door.call(main))
