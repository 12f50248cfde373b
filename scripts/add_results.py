"""Add finished rows of yours to this repository's: scripts/add_results.py results/table1_short.csv [--dry-run]

A row is added if it has finished, its method is one of this repository's, its name is what its settings give, its
commit is in the history and had no changes, and the repository has no row of that name. One refused row, and nothing
is written; nor where scripts/report.py would refuse the file with the new rows. Rows that are there already are left
alone. The file may lie in another clone: its place is that within the folder results/.
"""

import argparse
import math
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd

from data.cifar import DATASETS
from experiments.common import door, settings
from experiments.common.paths import REPOSITORY, ROOT, portable, user_path
from experiments.common.rows import Row, locked, read_rows, write_rows
from reporting.frames import typed_runs
from topk_losses import METHODS as TRAINED

METHODS = (*TRAINED, *settings.UNTRAINED)
COMMIT = re.compile("[0-9a-f]{40}")
COUNT = re.compile("(train|valid|test|clean)_(images|words)")
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def digest_of(name: str) -> str:
    """The hash at the end of a run's name."""
    return name.rpartition("-")[2]


def has_its_name(row: Row) -> bool:
    """Whether the hash in a row's name is that of its settings."""
    config = {item.name: item.parse(row.get(item.name, "")) for item in settings.SETTINGS}
    name = settings.run_id(settings.script_of(row), config, "")
    return digest_of(row["run_id"]) == digest_of(name)


def has_score(row: Row) -> bool:
    """Whether a row says how good the trained model is, in test or in validation."""
    return any(cell and re.match(r"test_(?!images)|last_(valid|test)_", name) for name, cell in row.items())


def has_its_learning_rate(row: Row) -> bool:
    """Whether the two ways to name a learning rate agree, where a row has both."""
    if not row.get("nloglr") or not row.get("lr"):
        return True
    return math.isclose(float(row["lr"]), 10 ** -float(row["nloglr"]), rel_tol=1e-9)


def has_its_times(row: Row) -> bool:
    """Whether a row says when it began and ended, as a run writes it."""
    return all(TIME.fullmatch(row.get(name, "")) for name in ("started_utc", "finished_utc"))


def has_its_counts(row: Row) -> bool:
    """Whether each split of a row has images or words, and the number of classes is that of its data."""
    for name, cell in row.items():
        if cell and COUNT.fullmatch(name) and not re.fullmatch("[1-9][0-9]*", cell):
            return False
    classes = row.get("embeddings", "").partition("x")[0]
    if row.get("dataset", "") in DATASETS:
        classes = str(DATASETS[row["dataset"]])
    return classes == "" or row.get("num_classes", "") in ("", classes)


def is_in_history(commit: str) -> bool:
    """Whether every commit of a row, a+b if it was resumed on another, is an ancestor of what is checked out."""
    for part in commit.split("+"):
        if not COMMIT.fullmatch(part):  # a branch would be another commit tomorrow
            return False
        done = subprocess.run(["git", "-C", ROOT, "merge-base", "--is-ancestor", part, "HEAD"], capture_output=True)
        if done.returncode:
            return False
    return True


def problem(row: Row, known: dict[str, Row]) -> str:
    """Why a row cannot be added; "" if it can."""
    if row.get("method", "") not in METHODS:
        return f"its method {row.get('method')} is none of this repository's"
    if not has_its_name(row):
        return "its name is not what its settings give: the row was edited"
    if row.get("finished_utc", "") == "" or not has_score(row):
        return "it has not finished: finished_utc, or each of its scores, is empty"
    if not has_its_times(row):
        return "its started_utc or its finished_utc is no time that a run writes: the row was edited"
    if not has_its_counts(row):
        return "its num_classes, or its number of images or words, is not that of its data: the row was edited"
    if not has_its_learning_rate(row):
        return "its nloglr and its lr are two learning rates: the row was edited"
    if digest_of(row["run_id"]) in known:
        return "the repository, or an earlier line, has a row of that name with other cells"
    return problem_of_commit(row)


def problem_of_commit(row: Row) -> str:
    """Why the commit of a row cannot be in the repository; "" if it can."""
    if row.get("git_commit", "") == "":
        return "it names no commit"
    if "-dirty" in row["git_commit"]:
        return "files differed from its commit: commit them, and repeat the run with --force"
    if not is_in_history(row["git_commit"]):
        return f"its commit {row['git_commit']} is not in the history, or not written with 40 digits"
    return ""


def filled(row: Row) -> Row:
    """The cells that are not empty: columns that a file has for other rows are no difference."""
    return {name: cell for name, cell in row.items() if cell != ""}


def target_of(path: Path) -> Path:
    """The repository's file for a results file, of this clone or of another."""
    parts = path.resolve().parts
    if "results" not in parts:
        return REPOSITORY / path.name
    last = len(parts) - 1 - parts[::-1].index("results")
    within = Path(*parts[last + 1 :])
    if within.is_relative_to("repository"):
        within = within.relative_to("repository")
    return REPOSITORY / within


def add(path: Path, only_check: bool) -> str:
    """Add the rows of a file; return how many.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a row is refused; each is printed with the reason.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    target = target_of(path)
    if target.resolve() == path.resolve():
        raise ValueError(f"{path} holds the repository's rows already: name a file of results/")
    if only_check:
        committed = read_rows(target)
        rows = new_rows(path, committed)
        return f"{len(rows)} rows could be added to {portable(target)}, {len(committed)} were there"
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target):
        committed = read_rows(target)
        rows = new_rows(path, committed)
        if rows:
            write_rows(target, [*committed, *rows])
    return f"{len(rows)} rows added to {portable(target)}, {len(committed)} were there"


def new_rows(path: Path, committed: list[Row]) -> list[Row]:
    """The rows of a file that are not committed, each once. Raises ValueError where one is refused."""
    known = {digest_of(row["run_id"]): row for row in committed}
    rows = []
    refused = 0
    for row in read_rows(path):
        digest = digest_of(row["run_id"])
        if digest in known and filled(known[digest]) == filled(row):
            continue  # it is there already
        rows.append(row)
        reason = problem(row, known)
        if reason:
            print(f"refused: {row['run_id']}: {reason}")
            refused += 1
            continue
        known[digest] = row
    if refused:
        raise ValueError(f"{refused} of {len(rows)} rows are refused, and nothing is written")
    if rows:
        typed_runs(path, pd.DataFrame([*committed, *rows], dtype=object).fillna(""))
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=user_path, help="CSV file of results/ with finished rows")
    parser.add_argument("--dry-run", action="store_true", help="check the rows and write nothing")
    args = parser.parse_args(argv)
    print(add(args.results, args.dry_run))
    return 0


if __name__ == "__main__":
    sys.exit(door.call(main))
