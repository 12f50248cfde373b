"""How far a study is: finished runs have rows, runs that go on hold the lock of their folder, logs say what failed.

A run is found by its settings in results/*.csv and in runs/RUN_ID/config.json. It does not matter who started it: the
launcher, a cluster, or a command that was typed. The time left is the repository's seconds times this machine's pace.
Of a study that the repository does not have it is by the runs that are done.
"""

import fcntl
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.common import settings
from experiments.common.logs import last_start
from experiments.common.paths import HISTORY_FILES, REPOSITORY, ROOT
from experiments.common.rows import Row, read_rows
from reporting.markdown import duration
from studies.runs import RunIndex, expected_runs

TOTALS = {"epoch": "n_epochs", "update": "n_updates"}  # settings with the last number of a history


def seconds_of(row: Row) -> float:
    return float(row.get("train_seconds") or 0) + float(row.get("eval_seconds") or 0)


def length_ratio(run: dict[str, Any], row: Row) -> float:
    """How many times as many epochs or updates a run has as a row; 1 if one of both does not say."""
    for total in TOTALS.values():
        if run.get(total) and row.get(total):
            return float(run[total]) / float(row[total])
    return 1.0


def is_held(lock: Path) -> bool:
    """Whether a process holds a lock. It is tried for a moment, which a process that starts then may notice."""
    if not lock.is_file():
        return False
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


@dataclass
class RunFolder:
    """A run that began: its settings as cells, and how far it is.

    Attributes:
        is_running: whether a process holds its lock.
        done: the last epoch, step or update that is saved; "" if none is.
        share: of the run that is done, in [0, 1].
        seconds: that its saved part took.
    """

    cells: Row
    is_running: bool
    done: str = ""
    share: float = 0.0
    seconds: float = 0.0


def read_folder(folder: Path) -> RunFolder:
    """Read a folder of results/runs/. Raises OSError or ValueError if it cannot be read."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    cells = {name: settings.cell(value) for name, value in config.items()}
    found = RunFolder(cells, is_held(folder / "run.lock"))
    for clock, name in HISTORY_FILES.items():
        path = folder / name
        if not path.is_file():
            continue
        lines = path.read_text(encoding="utf-8").splitlines()
        header = lines[0].split(",")
        for line in lines[1:]:
            entry = dict(zip(header, line.split(",")))
            found.seconds += seconds_of(entry)
            found.done = f"{clock} {entry[clock]}"
            total = cells.get(TOTALS.get(clock, ""), "")
            if total:
                found.share = float(entry[clock]) / float(total)
    return found


def read_folders(runs: Path, results: str) -> list[RunFolder]:
    """The runs of a folder that write a results file; those that cannot be read are left out."""
    found = []
    for path in sorted(runs.glob("*/config.json")):
        try:
            folder = read_folder(path.parent)
        except (OSError, ValueError, LookupError):
            continue
        if folder.cells.get("results") == results:
            found.append(folder)
    return found


def read_logs(logs: Path) -> dict[str, list[str]]:
    """The lines of each command's newest log, from the line that has the command: of the launcher and of slurm.sh."""
    found: dict[str, list[str]] = {}
    for path in sorted(logs.glob("*.log"), key=modified):
        if not path.is_file():
            continue
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
        start = last_start(lines)
        if start is not None:
            found[lines[start].removeprefix("$ ")] = lines[start + 1 :]
    return found


def modified(path: Path) -> float:
    return path.stat().st_mtime


def embeddings_id(path: str | Path) -> str:
    """The name of embeddings by their content; "" for a published name, or a file that is not there yet."""
    path = Path(path)
    if not path.is_file():
        return ""
    return _embeddings_id(path, path.stat().st_mtime_ns)


@cache  # the commands of a study name one file many times
def _embeddings_id(path: Path, changed: int) -> str:
    """The name of the embeddings in a file that was changed at this time."""
    from data.embeddings import load_embeddings  # loads PyTorch

    return str(load_embeddings(path).about(str(path))["embeddings"])


def has_its_data(run: dict[str, Any], cells: Row) -> bool:
    """Whether a row or a folder is of a run's embeddings: by their content, or by the name of a file that is not here.

    Args:
        cells: of the row, or of the folder's config.json.
    """
    if run.get("data_path") is None:
        return True
    name = embeddings_id(run["data_path"])
    if name:
        return cells.get("embeddings", "") == name
    return Path(cells.get("data_path", "")).name == Path(run["data_path"]).name


@dataclass
class Pass:
    """The runs of a command with one seed, which one pass over the data trains.

    Attributes:
        total: number of runs.
        done: how many of them have rows.
        expected: seconds that the pass would take on the repository's machine.
        row_seconds: that it took here, by the rows.
        folder: of a run that began and has no row.
    """

    total: int
    done: int = 0
    expected: float = 0.0
    row_seconds: float = 0.0
    folder: RunFolder | None = None

    @property
    def is_done(self) -> bool:
        return self.done == self.total

    @property
    def expected_done(self) -> float:
        """The part of `expected` that is done."""
        if self.is_done:
            return self.expected
        if self.folder is not None:
            return self.folder.share * self.expected
        return 0.0

    @property
    def seconds(self) -> float:
        """The seconds that this part took here."""
        if self.is_done:
            return self.row_seconds
        if self.folder is not None and self.folder.share > 0:
            return self.folder.seconds
        return 0.0


@dataclass
class Progress:
    """A command: how many of its runs are done, what it does, and its seconds.

    Attributes:
        measured: how many of its runs have rows in the repository, with this seed or another.
        expected: seconds that all its runs would take on the repository's machine; 0 if it has no such rows.
        expected_done: the part of `expected` that is done, which took `seconds` here.
    """

    total: int
    done: int = 0
    measured: int = 0
    state: str = "waiting"
    expected: float = 0.0
    expected_done: float = 0.0
    seconds: float = 0.0


class Status:
    """The state of the commands of a study that write one file.

    Args:
        results: the file, such as results/table1.csv.
        logs: folder of the launcher's or the cluster's logs.
    """

    def __init__(self, results: Path, logs: Path) -> None:
        self.rows = RunIndex(read_rows(results))
        self.folders = read_folders(results.parent / "runs", results.name)
        self.begun = RunIndex([folder.cells for folder in self.folders])
        self.logs = read_logs(logs)
        self.device = ""
        measured = read_rows(repository_file(results)) or self.rows.rows
        self.reference = RunIndex(self.of_one_machine(measured))

    def of_one_machine(self, rows: Sequence[Row]) -> list[Row]:
        """The rows of the machine that has most of them, so that their seconds can be compared."""
        if not rows:
            return []
        devices = [row.get("device_name", "") for row in rows]
        self.device = max(devices, key=devices.count)
        return [row for row in rows if row.get("device_name", "") == self.device]

    def measured_rows(self, run: dict[str, Any]) -> list[Row]:
        """The repository's rows with the run's settings, of any seed."""
        without_seed = {name: value for name, value in run.items() if name != "seed"}
        return [self.reference.rows[number] for number in self.reference.find(without_seed)]

    def expected_seconds(self, run: dict[str, Any]) -> float:
        """The mean seconds of the repository's rows with the run's settings, or else of all its rows at its length."""
        rows = self.measured_rows(run)
        if rows:
            return fmean(map(seconds_of, rows))
        rows = self.reference.rows
        if not rows:
            return 0.0
        return fmean(seconds_of(row) * length_ratio(run, row) for row in rows)

    def progress(self, command: str) -> Progress:
        """How far a command is."""
        runs = expected_runs(command)
        passes = []
        for seed in dict.fromkeys(run["seed"] for run in runs):
            passes.append(self.progress_of_pass([run for run in runs if run["seed"] == seed]))
        return Progress(
            done=sum(item.done for item in passes),
            total=len(runs),
            measured=sum(bool(self.measured_rows(run)) for run in runs),
            state=self.state(command, passes),
            expected=sum(item.expected for item in passes),
            expected_done=sum(item.expected_done for item in passes),
            seconds=sum(item.seconds for item in passes),
        )

    def progress_of_pass(self, runs: Sequence[dict[str, Any]]) -> Pass:
        """How far the runs of one seed are. Classifiers that are trained in one pass each have the seconds of it."""
        found = Pass(len(runs), expected=max(map(self.expected_seconds, runs)))
        for run in runs:
            rows = [self.rows.rows[number] for number in self.rows.find(run)]
            rows = [row for row in rows if has_its_data(run, row)]
            if rows:
                found.done += 1
                found.row_seconds = max(found.row_seconds, seconds_of(rows[-1]))
                continue
            for number in self.begun.find(run):
                if has_its_data(run, self.folders[number].cells):
                    found.folder = self.folders[number]
        return found

    def state(self, command: str, passes: Sequence[Pass]) -> str:
        if all(item.is_done for item in passes):
            return "done"
        folders = [item.folder for item in passes if item.folder is not None]
        for folder in folders:
            if folder.is_running:
                return f"running: {folder.done or 'first epoch'}"
        lines = self.logs.get(command, [])
        if lines and lines[-1].startswith("=== exit status") and lines[-1] != "=== exit status 0":
            return f"failed ({lines[-1].removeprefix('=== ')})"
        if folders:
            return f"stopped after {folders[0].done or 'its start'}"
        return "waiting"


def repository_file(results: Path) -> Path:
    """The repository's file of the same name, such as results/repository/noise/human.csv."""
    folder = ROOT / "results"
    path = (ROOT / results).resolve()
    if path.is_relative_to(folder):
        return REPOSITORY / path.relative_to(folder)
    return REPOSITORY / results.name


def time_left(items: Sequence[Progress], device: str) -> str:
    """Estimate the time left from the repository's seconds, times this machine's pace."""
    expected = sum(item.expected for item in items)
    expected_done = sum(item.expected_done for item in items)
    seconds = sum(item.seconds for item in items)
    jobs = max(sum(item.state.startswith("running") for item in items), 1)
    if expected == 0:
        return "the repository has no rows of this study: the time left is known when a run is done"
    if expected_done == 0:
        whole = f"on {device} all would take about {duration(expected)}, one at a time"
        return f"the time left is known when a run is done; {whole} ({measured_runs(items)})"
    pace = seconds / expected_done
    left = pace * (expected - expected_done) / jobs
    return f"about {duration(left)} left, {jobs} at a time, at {pace:.3g} times the seconds of {device}"


def measured_runs(items: Sequence[Progress]) -> str:
    """How many runs the repository has rows of, and what stands for the others."""
    measured = sum(item.measured for item in items)
    total = sum(item.total for item in items)
    if measured == total:
        return "every run has rows with its settings there"
    others = "the others take the mean of all rows for as many epochs"
    return f"{measured} of {total} runs have rows with their settings there, {others}"


def status_text(commands: Sequence[str], labels: Sequence[str], name: str, status: Status) -> str:
    """The state of each command and of all.

    Args:
        labels: what each command is called, such as the name of its log.
        name: of the study.
    """
    items = [status.progress(command) for command in commands]
    text = []
    for label, item in zip(labels, items):
        count = ""
        if item.total > 1:
            count = f" ({item.done} of {item.total} runs)"
        text.append(f"{label}: {item.state}{count}")
    done = sum(item.done for item in items)
    total = sum(item.total for item in items)
    running = sum(item.state.startswith("running") for item in items)
    failed = sum(item.state.startswith("failed") for item in items)
    waiting = sum(item.state.startswith(("waiting", "stopped")) for item in items)
    end = f"# {name}: {done} of {total} runs done; commands: {running} running, {failed} failed, {waiting} waiting"
    if done < total:
        end += f"; {time_left(items, status.device)}"
    return "\n".join([*text, end])
