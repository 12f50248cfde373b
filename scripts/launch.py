"""Run command lines, several at a time, on the CPU or the GPUs of this machine.

    scripts/table1.sh --jobs 4                        # the runs of a study
    python scripts/launch.py --jobs 2 < commands.txt  # any commands, one per line; no shell expands them

Flags that it does not know, and all that follows a --, go to every command. Ctrl-C, SIGTERM and SIGHUP are passed on,
a second one kills. After kill -9 of the launcher its runs go on, and hold the sweep's lock. The same call continues.
"""

import argparse
import contextlib
import fcntl
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.common import door
from experiments.common.cores import HUGE_PAGES, usable_cores
from experiments.common.logs import last_start
from experiments.common.paths import user_path

LOGS = Path(__file__).resolve().parents[1] / "results" / "logs"
ATTEMPTS = 2
RETRY_SECONDS = 3
POLL_SECONDS = 0.1
SMI_SECONDS = 20
TAIL = 12  # lines of a failed run's log in the summary


@dataclass
class Run:
    """A command line, its log, and what has become of it."""

    command: str
    log: Path
    attempts: int = 0
    not_before: float = 0.0
    failure: str = ""
    gpu: str = ""
    process: subprocess.Popen | None = None

    def start(self, threads: int, lock: int) -> None:
        """Start an attempt, its output appended to the log."""
        self.attempts += 1
        self.process = None
        self.failure = ""
        settings = self.environment(threads)
        try:
            if self.log.is_fifo():
                raise OSError(f"{self.log} is a pipe, and opening it would wait for ever")
            with open(self.log, "a", encoding="utf-8") as log:
                now = time.strftime("%FT%TZ", time.gmtime())
                print(f"=== {now} attempt {self.attempts} of {ATTEMPTS}", *map("=".join, settings.items()), file=log)
                print(f"$ {self.command}", file=log, flush=True)
                self.process = subprocess.Popen(
                    shlex.split(self.command),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=os.environ | settings,
                    start_new_session=True,  # Ctrl-C reaches it once, through the launcher
                    pass_fds=[lock],  # the lock lives as long as the run
                )
        except OSError as error:  # no such program, or its log cannot be written
            self.failure = f"it cannot be started: {error}"

    def environment(self, threads: int) -> dict[str, str]:
        settings = {name: value for name, value in HUGE_PAGES.items() if name not in os.environ}
        if self.gpu:
            settings["CUDA_VISIBLE_DEVICES"] = self.gpu
        if not re.search(r" --threads[ =]", self.command):
            settings["OMP_NUM_THREADS"] = str(threads)
            settings["MKL_NUM_THREADS"] = str(threads)
        return settings

    def has_ended(self, is_stopping: bool = False) -> bool:
        """Whether it has ended, which its log and `failure` then say. is_stopping: the launcher was asked to end."""
        if self.process is None:
            return True
        status = self.process.poll()
        if status is None:
            return False
        if status > 0:
            self.failure = f"exit status {status}"
        if status < 0:
            self.failure = f"killed by {signal_name(-status)}"
        message = f"=== exit status {status}"
        if is_stopping and status:
            message = f"=== stopped with status {status}"
        with contextlib.suppress(OSError), self.log.open("a") as log:
            print(f"\n{message}", file=log)  # on a line of its own, whatever the run wrote last
        return True

    def lines(self) -> list[str]:
        """The lines of the log; of a progress bar, what was shown last."""
        return log_lines(self.log)

    def last_attempt(self) -> list[str]:
        """The lines of the log since this command, and no other, was started last."""
        lines = self.lines()
        start = last_start(lines)
        if start is None or lines[start] != f"$ {self.command}":
            return []
        return lines[start:]

    def state(self, logs: Mapping[str, Sequence[str]]) -> str:
        """Say where the newest log of this command ends. logs: the lines of each command's."""
        lines = logs.get(self.command)
        if lines is None and last_start(self.lines()) is not None:
            return "waiting (its log is of another command)"
        if lines is None:
            return "waiting"
        if not lines:
            return "started"
        return lines[-1].replace("=== exit status 0", "done")


def signal_name(number: int) -> str:
    """The name of a signal, or its number: realtime signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def log_lines(log: Path) -> list[str]:
    """The lines of a log that are not empty; of a progress bar, what was shown last."""
    if not log.is_file():
        return ["(no log)"]
    text = log.read_text(errors="replace").replace("\r\n", "\n")
    return [line.rpartition("\r")[2] for line in text.split("\n") if line.strip()]


def runs_of(lines: Iterable[str], extra: Sequence[str], logs: Path) -> list[Run]:
    """A run per line that is neither empty nor a comment, `extra` at its end. Raises ValueError."""
    runs: dict[str, Run] = {}
    for line in map(str.strip, lines):
        if not line or line.startswith("#"):
            continue
        command = " ".join([line, *map(shlex.quote, extra)])
        if command in runs or not is_line(command):
            raise ValueError(f"a command must be there once, a line of UTF-8 without NUL, got {command!r}")
        try:
            name = log_name(shlex.split(command))
        except ValueError as error:  # an open quotation
            raise ValueError(f"{error} in {command!r}") from None
        runs[command] = Run(command, logs / f"{len(runs) + 1:02}-{name}.log")
    if not runs:
        raise ValueError("there is no command line: pipe them in, one per line, or call scripts/table1.sh")
    return list(runs.values())


def is_line(command: str) -> bool:
    """Whether a command can be written to a log, and found there."""
    try:
        command.encode()
    except UnicodeEncodeError:  # bytes that are no UTF-8
        return False
    return re.search("[\0\r\n]", command) is None


def log_name(words: Sequence[str]) -> str:
    """A file name from the values of a command's flags."""
    values = []
    for word in words[1:]:
        if not re.match(r"--?[A-Za-z][^=]*$", word) and not word.endswith(".py"):
            values.append(word)
    name = "_".join(values or words)
    return re.sub(r"[^A-Za-z0-9.=_]+", "_", name)[:70].strip("_.")


def visible_gpus() -> list[str]:
    """The GPUs that runs may use, as CUDA_VISIBLE_DEVICES names them. Raises ValueError."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:  # CUDA stops reading at the first number below 0
        return re.findall(r"[^, ]+", re.split(r"(?:^|,) *-", os.environ["CUDA_VISIBLE_DEVICES"])[0])
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        # Not subprocess.run, which waits for the end of what it kills: a process that hangs in the driver has none.
        process = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        listed, _ = process.communicate(timeout=SMI_SECONDS)
    except OSError:  # there is none, or none that starts
        return []
    except subprocess.TimeoutExpired:
        process.kill()
        raise ValueError("nvidia-smi does not answer; name the GPUs by CUDA_VISIBLE_DEVICES (empty: none)") from None
    if process.returncode:
        return []
    return listed.split()


def show(message: str) -> None:
    """Print; where nobody reads any more (`| head`) or the disk is full, go on in silence: runs must not be left."""
    try:
        print(message)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Launcher:
    """Runs that wait and runs that run, `jobs` at a time.

    Args:
        gpus: names of the GPUs that runs share.
        lock: a file descriptor that every run inherits.
    """

    def __init__(self, runs: Sequence[Run], jobs: int, gpus: Sequence[str], lock: int) -> None:
        self.waiting = list(runs)
        self.running: list[Run] = []
        self.jobs = jobs
        self.gpus = gpus
        self.lock = lock
        self.received: list[int] = []  # signals
        self.passed_on = 0

    def run_all(self) -> list[int]:
        """Run all; return the signals that stopped it."""
        before = {}
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # under nohup a closed terminal ends nothing
            numbers.append(signal.SIGHUP)
        for number in numbers:
            before[number] = signal.signal(number, lambda number, _: self.received.append(number))
        try:
            while self.running or (self.waiting and not self.received):
                self.start_runs()
                self.pass_signals_on()
                self.end_runs()
                time.sleep(POLL_SECONDS)
        finally:
            for number, handler in before.items():  # Ctrl-C ends what comes after the runs
                signal.signal(number, handler)
        return self.received

    def start_runs(self) -> None:
        for run in list(self.waiting):
            if self.received or len(self.running) == self.jobs:
                return
            if run.not_before > time.monotonic():
                continue
            self.waiting.remove(run)
            if self.gpus:
                run.gpu = min(self.gpus, key=[other.gpu for other in self.running].count)
            self.running.append(run)
            run.start(max(1, usable_cores() // self.jobs), self.lock)
            show(f"started: {run.log.stem}")

    def pass_signals_on(self) -> None:
        for number in self.received[self.passed_on :]:
            if self.passed_on > 0:
                number = signal.SIGKILL
            self.passed_on += 1
            show(f"stopping: {signal_name(number)} to {len(self.running)} runs, waiting for them to end")
            for run in self.running:
                if run.process is not None:
                    os.killpg(run.process.pid, number)

    def end_runs(self) -> None:
        for run in list(self.running):
            if not run.has_ended(is_stopping=bool(self.received)):
                continue
            self.running.remove(run)
            message = run.failure or "done"
            if run.failure and run.attempts < ATTEMPTS and not self.received:
                self.waiting.append(run)
                run.not_before = time.monotonic() + RETRY_SECONDS
                message = f"{message}, to be tried again"
            show(f"{message}: {run.log.stem}")


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The launcher's flags, and the flags that go to every run."""
    parser = argparse.ArgumentParser("launch.py", allow_abbrev=False, description="Other flags go to every run.")
    parser.add_argument("--name", default="sweep", help="name of the sweep (default: %(default)s)")
    parser.add_argument("--logs", type=user_path, help="folder for the logs (default: results/logs/NAME)")
    parser.add_argument("--dry-run", action="store_true", help="print the command lines and their number")
    parser.add_argument("--status", action="store_true", help="print where the log of each run ends")
    parser.add_argument("--jobs", type=int, help="runs at a time (default: one per GPU slot, or 1 on the CPU)")
    parser.add_argument("--run-per-core", action="store_true", help="one run per core, where there is no GPU")
    parser.add_argument("--per-gpu", type=int, default=1, help="runs at a time on one GPU (default: %(default)s)")
    split = [*argv, "--"].index("--")
    args, extra = parser.parse_known_args(argv[:split])
    if args.logs is None:
        args.logs = LOGS / Path(args.name).name
    args.logs = args.logs.absolute()
    return args, [*extra, *argv[split + 1 :]]


def jobs_at_once(args: argparse.Namespace, num_runs: int, gpus: Sequence[str]) -> int:
    """Runs at a time. Raises ValueError for more than the GPUs hold."""
    default = len(gpus) * args.per_gpu
    if not gpus:
        default = 1
    if not gpus and args.run_per_core:
        default = min(num_runs, usable_cores())
    jobs = args.jobs
    if jobs is None:
        jobs = default
    if min(jobs, args.per_gpu) < 1 or (gpus and jobs > default):
        raise ValueError(f"--jobs and --per-gpu must be at least 1, and fit {len(gpus)} GPUs, got --jobs {jobs}")
    return jobs


def launch(lines: Iterable[str], argv: Sequence[str]) -> int:
    """Run command lines as the flags say; return the exit status.

    Raises:
        ValueError: there is no command, or one is there twice, or --jobs does not fit.
        OSError: another launcher runs this sweep.
    """
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    args, extra = parse_arguments(argv)
    runs = runs_of(lines, extra, args.logs)
    if args.dry_run:
        print(*(run.command for run in runs), f"# {len(runs)} runs", sep="\n")
        return 0
    if args.status:
        return show_states(runs)
    gpus = visible_gpus()
    jobs = jobs_at_once(args, len(runs), gpus)
    args.logs.mkdir(parents=True, exist_ok=True)
    with open(args.logs / "launch.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise OSError(
                f"another launcher, or a run that outlived one, holds {lock.name}; wait for it, or end it"
            ) from None
        print(f"{args.name}: {len(runs)} runs; logs in {args.logs}")
        received = Launcher(runs, jobs, gpus, lock.fileno()).run_all()
    return summarize(args.name, runs, received)


def show_states(runs: Sequence[Run]) -> int:
    """Print where the log of each run ends."""
    from reporting.status import read_logs  # which loads pandas

    logs = read_logs(runs[0].log.parent)
    done = 0
    for run in runs:
        state = run.state(logs)
        done += state == "done"
        print(f"{run.log.stem}: {state}")
    print(f"# {done} done of {len(runs)} runs")
    return 0


def summarize(name: str, runs: Sequence[Run], received: Sequence[int]) -> int:
    """Print which runs failed, with the ends of their logs, and count all; return the exit status."""
    failed = [run for run in runs if run.failure and not received]
    for run in failed:
        print(f"\nFAILED ({run.failure}): {run.command}\n  log: {run.log}, which ends")
        print(*(f"    {line}" for line in run.lines()[-TAIL:]), sep="\n")
    done = [run for run in runs if run.attempts > 0 and not run.failure]
    left = f", {len(failed)} failed"
    if received:
        left = " by this call; stopped: the same call continues"
    print(f"{name}: {len(done)} of {len(runs)} runs done{rows_of(runs)}{left}")
    if received:
        return 128 + received[0]
    return int(bool(failed))


def rows_of(runs: Iterable[Run]) -> str:
    """How many rows these runs added, and how many were there before, as the training scripts print it."""
    trained = 0
    skipped = 0
    for run in runs:
        if run.attempts == 0:
            continue
        for line in run.last_attempt():
            trained += line.startswith("row: ")
            skipped += line.startswith("skipped: ")
    if trained + skipped == 0:
        return ""
    return f" ({trained} trained, {skipped} skipped)"


def main() -> int:
    lines = []
    if sys.stdin is not None and not sys.stdin.isatty():
        lines = sys.stdin
    return launch(lines, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(door.call(main))
