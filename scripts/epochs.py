"""Gathers what each epoch of a table's runs gave, finished or not: at a constant rate the result of so many epochs.

    python scripts/epochs.py results/table1.csv                        # -> results/table1_epochs.csv
    python scripts/epochs.py results/table1.csv --runs FOLDER          # the runs of another clone, say

Runs that the file has already stay, unless the folder has more of their epochs. Accuracies are fractions.
"""

if __name__ == "__main__":  # from here on, what goes wrong is a sentence
    from data import program

    program.begin()

import csv
import json
from pathlib import Path

from data import program
from data.atomic_file import atomic_write
from data.file_lock import held, lock_beside

COLUMNS = ("run_id", "precision", "device_name", "torch_version", "epoch")
METRICS = ("valid_top1", "valid_top5", "test_top1", "test_top5", "train_seconds")


def epochs_of(runs: Path, results: str) -> dict[str, list[dict[str, str]]]:
    """The epochs of each run in a folder of runs that writes to a results file of that name, by run id."""
    found = {}
    for config in sorted(runs.glob("*/config.json")):
        flags, history = json.loads(config.read_text()), config.with_name("epochs.csv")
        if Path(flags["results"]).name != results or not history.exists():
            continue
        with history.open(newline="") as file:
            rows = [{**{name: flags.get(name) for name in COLUMNS}, **row} for row in csv.DictReader(file)]
        found[flags["run_id"]] = [{name: row[name] for name in (*COLUMNS, *METRICS)} for row in rows]
    return found


def merge(output: Path, runs: Path, results: str) -> dict[str, list[dict[str, str]]]:
    """Add the epochs of a folder of runs to the output file; return all by run id. The caller holds its lock."""
    kept: dict[str, list[dict[str, str]]] = {}
    if output.exists():
        with output.open(newline="") as file:
            for row in csv.DictReader(file):
                kept.setdefault(row["run_id"], []).append(row)
    for run_id, rows in epochs_of(runs, results).items():
        if len(rows) > len(kept.get(run_id, [])):
            kept[run_id] = rows
    if not kept:
        raise program.CommandLineError(f"{runs} holds no run that writes to {results}; name its folder by --runs")
    with atomic_write(output) as file:
        writer = csv.DictWriter(file, (*COLUMNS, *METRICS), lineterminator="\n")
        writer.writeheader()
        writer.writerows(row for run_id in sorted(kept) for row in kept[run_id])
    return kept


def gather(argv: list[str] | None = None) -> int:
    """Write the file; return the exit status."""
    parser = program.Parser(prog="epochs.py", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("results", type=program.path, help="the table, results/table1.csv say")
    parser.add_argument("--runs", type=program.path, metavar="FOLDER", help="of the runs (beside the table: runs)")
    args = parser.parse_args(argv)
    output = args.results.with_name(f"{args.results.stem}_epochs.csv")
    with held(lock_beside(output), waiting=f"waiting for another process that writes {output}"):
        kept = merge(output, args.runs or args.results.with_name("runs"), args.results.name)
    print(f"{output}: " + ", ".join(f"{len(rows)} epochs of {run_id}" for run_id, rows in sorted(kept.items())))
    return 0


if __name__ == "__main__":
    program.end(program.finish(gather))
