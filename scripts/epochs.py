"""Gather what each epoch of train_cifar100.py's runs gave: at a constant rate the result of so many epochs.

    python scripts/epochs.py results/table1.csv                        # -> results/table1_epochs.csv
    python scripts/epochs.py results/table1.csv --runs FOLDER          # the runs of another clone

A table's runs are those of its rows, and those that write to it, finished or not; a row without epochs is named. Runs
that the file has already stay, with columns of your own, unless the folder has more of their epochs, or as many others.
A run folder that cannot be read is named and left out. Accuracies are fractions.
"""

import argparse
import csv
import json
import sys
from collections.abc import Collection
from pathlib import Path

from experiments.common import door, settings
from experiments.common.paths import HISTORY_FILES, user_path
from experiments.common.rows import Row, locked, read_rows, write_rows

IDENTITY = [item.name for item in settings.SETTINGS if item.scripts]
OF_THE_RUN = ("run_id", *IDENTITY, "device_name", "torch_version")
OF_AN_EPOCH = ("epoch", "train_top1", "valid_top1", "valid_top5", "test_top1", "test_top5", "train_seconds")


def epochs_of(config: Path, results: str, run_ids: Collection[str]) -> list[Row]:
    """The epochs of a run as rows; none if it has none, is no run of the table, or one of another script.

    Args:
        results: name of the table's file. A run names the last file alone to which its row was written.
        run_ids: of the table's rows.

    Raises:
        LookupError, ValueError, TypeError, OSError: the folder cannot be read.
    """
    flags = json.loads(config.read_text(encoding="utf-8"))
    history = config.with_name(HISTORY_FILES["epoch"])
    is_of_table = flags["run_id"] in run_ids or Path(flags["results"]).name == results
    if not is_of_table or settings.script_of(flags) != settings.CIFAR or not history.is_file():
        return []
    run = {name: settings.cell(flags[name]) for name in OF_THE_RUN if name in flags}
    rows = []
    with history.open(newline="", encoding="utf-8") as file:
        for entry in csv.DictReader(file):
            rows.append(run | {name: entry[name] for name in OF_AN_EPOCH})
    return rows


def found_in(runs: Path, results: str, run_ids: Collection[str]) -> list[list[Row]]:
    """The epochs of each of the table's runs in a folder."""
    found = []
    for config in sorted(runs.glob("*/config.json")):
        if not config.is_file():
            continue
        try:
            rows = epochs_of(config, results, run_ids)
        except (ValueError, LookupError, TypeError, OSError, csv.Error) as error:
            print(f"note: {config.parent} cannot be read and is left out: {error!r}", file=sys.stderr)
            continue
        if rows:
            found.append(rows)
    return found


def by_run(rows: list[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["run_id"], []).append(row)
    return groups


def is_same(rows: list[Row], before: list[Row]) -> bool:
    """Whether the epochs of a folder are those of a file, which may have more columns."""
    return all(own.items() <= row.items() for own, row in zip(rows, before))


def gather(results: Path, runs: Path) -> str:
    """Write the file of a table's epochs; return what it holds.

    Raises:
        ValueError: the folder holds no such run, or the file is damaged.
    """
    run_ids = [row["run_id"] for row in read_rows(results)]
    found = found_in(runs, results.name, run_ids)
    if not found:
        raise ValueError(
            f"{runs} holds no run of {settings.CIFAR}.py that writes to {results.name}: --runs names a folder"
        )
    output = results.with_stem(f"{results.stem}_epochs")
    with locked(output):
        known = by_run(read_rows(output))
        for rows in found:
            run_id = rows[0]["run_id"]
            before = known.get(run_id, [])
            if len(rows) > len(before):
                known[run_id] = rows
            elif len(rows) == len(before) and not is_same(rows, before):
                known[run_id] = rows
                print(f"note: {run_id} has other epochs in {runs}: they replace those of {output}", file=sys.stderr)
        table = []
        for run_id in sorted(known):
            table += known[run_id]
        write_rows(output, with_ordered_columns(table))
    for run_id in run_ids:
        if run_id not in known:
            print(f"note: {runs} has no epochs of {run_id}, whose row is in {results}", file=sys.stderr)
    counts = [f"{len(rows)} epochs of {run_id}" for run_id, rows in sorted(known.items())]
    return f"{output}: {', '.join(counts)}"


def with_ordered_columns(rows: list[Row]) -> list[Row]:
    """Rows with the columns of runs first, then those of epochs, then others."""
    names: dict[str, None] = {}
    for row in rows:
        names |= dict.fromkeys(row)
    first = dict.fromkeys(filter(names.__contains__, (*OF_THE_RUN, *OF_AN_EPOCH)))
    order = first | names
    return [dict.fromkeys(order, "") | row for row in rows]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Gather the epochs of a table's runs, those of train_cifar100.py.")
    parser.add_argument("results", type=user_path, help="CSV file of the table, such as results/table1.csv")
    parser.add_argument("--runs", type=user_path, help="folder of the runs (default: runs, beside the table)")
    args = parser.parse_args(argv)
    print(gather(args.results, args.runs or args.results.with_name("runs")))
    return 0


if __name__ == "__main__":
    sys.exit(door.call(main))
