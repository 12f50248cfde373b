"""Gathers what each epoch of a table's runs gave, finished or not: at a constant rate the result of so many epochs.

    python scripts/epochs.py results/table1.csv                        # -> results/table1_epochs.csv
    python scripts/epochs.py results/table1.csv --runs FOLDER          # the runs of another clone, say

Runs that the file has already stay, unless the folder has more of their epochs. Accuracies are fractions.
"""

if __name__ == "__main__":  # from here on, what goes wrong is a sentence
    from scripts.shared import program

    program.begin()

import json
from pathlib import Path

import pandas as pd

from scripts.shared import program
from scripts.shared.atomic_file import atomic_write
from scripts.shared.file_lock import held, lock_beside

OF_THE_RUN = ("run_id", "method", "p_k", "seed", "precision", "device_name", "torch_version")
OF_AN_EPOCH = ("epoch", "train_top1", "valid_top1", "valid_top5", "test_top1", "test_top5", "train_seconds")


def epochs_of(runs: Path, results: str) -> list[tuple[str, pd.DataFrame]]:
    """The id of each run in a folder of runs that writes to a results file of that name, and its epochs as text."""
    found = []
    for config in sorted(runs.glob("*/config.json")):
        flags, history = json.loads(config.read_text()), config.with_name("epochs.csv")
        if Path(flags["results"]).name == results and history.exists():
            rows = pd.read_csv(history, dtype=str, usecols=OF_AN_EPOCH)
            flags["p_k"] = " ".join(f"{each:g}" for each in flags["p_k"])
            found.append((flags["run_id"], rows.assign(**{name: str(flags[name]) for name in OF_THE_RUN})))
    return found


def gather(argv: list[str] | None = None) -> int:
    """Write the file; return the exit status."""
    parser = program.Parser(prog="epochs.py", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("results", type=program.path, help="the table, results/table1.csv say")
    parser.add_argument("--runs", type=program.path, metavar="FOLDER", help="of the runs (beside the table: runs)")
    args = parser.parse_args(argv)
    output, runs = args.results.with_stem(f"{args.results.stem}_epochs"), args.runs or args.results.with_name("runs")
    with held(lock_beside(output), waiting=f"waiting for another process that writes {output}"):
        known = list(pd.read_csv(output, dtype=str).groupby("run_id")) if output.exists() else []
        found = epochs_of(runs, args.results.name)
        longest = dict(sorted([*found, *known], key=lambda each: len(each[1])))  # of equals what is known
        if not found:
            raise program.CommandLineError(
                f"{runs} holds no run that writes to {args.results.name}; name its folder by --runs"
            )
        with atomic_write(output) as file:
            table = pd.concat([longest[run_id] for run_id in sorted(longest)])
            table.to_csv(file, columns=[*OF_THE_RUN, *OF_AN_EPOCH], index=False, lineterminator="\n")
    print(f"{output}: " + ", ".join(f"{len(rows)} epochs of {run_id}" for run_id, rows in sorted(longest.items())))
    return 0


if __name__ == "__main__":
    program.end(program.finish(gather))
