"""Run command lines, several at a time, on the CPU or the GPUs of this machine.

    scripts/table1.sh --jobs 4                        # the runs of a study; --dry-run prints them, --status their state
    python scripts/launch.py --jobs 2 < commands.txt  # any commands, one per line; no shell expands them

Flags that it does not know, and all that follows a --, go to every command. Ctrl-C and SIGTERM are passed on, a second
one kills. After kill -9 of the launcher its runs go on, and hold the sweep's lock. The same call continues.
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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.common.cores import HUGE_PAGES, usable_cores

LOGS = Path(__file__).resolve().parents[1] / "results" / "logs"
ATTEMPTS, RETRY_SECONDS, POLL_SECONDS, SMI_SECONDS = 2, 3, 0.1, 20
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
        self.attempts, self.process, self.failure = self.attempts + 1, None, ""
        settings = {name: value for name, value in HUGE_PAGES.items() if name not in os.environ}
        if self.gpu:
            settings["CUDA_VISIBLE_DEVICES"] = self.gpu
        if "--threads" not in self.command.split():
            settings |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        now = time.strftime("%FT%TZ", time.gmtime())
        # A session of its own: Ctrl-C reaches it once, through the launcher. The lock lives as long as the run.
        options = {"env": os.environ | settings, "start_new_session": True, "pass_fds": [lock]}
        try:
            if self.log.is_fifo():
                raise OSError(f"{self.log} is a pipe, and opening it would wait for ever")
            with open(self.log, "a", encoding="utf-8") as log:
                print(f"=== {now} attempt {self.attempts} of {ATTEMPTS}", *map("=".join, settings.items()), file=log)
                print(f"$ {self.command}", file=log, flush=True)
                streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
                self.process = subprocess.Popen(shlex.split(self.command), **streams, **options)
        except OSError as error:  # no such program, or its log cannot be written
            self.failure = f"it cannot be started: {error}"

    def has_ended(self) -> bool:
        """Whether it has ended, which its log and `failure` then say."""
        if self.process is None or (status := self.process.poll()) is None:
            return self.process is None
        if status:
            self.failure = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        with contextlib.suppress(OSError), self.log.open("a") as log:
            print(f"=== exit status {status}", file=log)
        return True

    def lines(self) -> list[str]:
        """Return the lines of the log; of a progress bar, what was shown last."""
        text = self.log.read_text(errors="replace") if self.log.is_file() else "(no log)"
        return [line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").split("\n") if line.strip()]

    def standing(self) -> str:
        """Say where the log of this command, and of no other, ends."""
        ran = [line for line in self.lines() if line.startswith("$ ")]
        if ran[-1:] != [f"$ {self.command}"]:
            return "waiting (its log is of another command)" if ran else "waiting"
        return self.lines()[-1].replace("=== exit status 0", "done")


def runs_of(lines: Iterable[str], extra: Sequence[str], logs: Path) -> list[Run]:
    """Return a run per line that is neither empty nor a comment, `extra` at its end. Raises ValueError."""
    runs: dict[str, Run] = {}
    for line in (line.strip() for line in lines if line.strip() and line.strip()[0] != "#"):
        command = " ".join([line, *map(shlex.quote, extra)])
        words = shlex.split(command)
        if command in runs or "\0" in command:
            raise ValueError(f"a command must be there once, without NUL, got {command!r}")
        values = [word for word in words[1:] if not re.match(r"--?[A-Za-z][^=]*$", word) and not word.endswith(".py")]
        name = re.sub(r"[^A-Za-z0-9.=_]+", "_", "_".join(values or words))[:70].strip("_.")
        runs[command] = Run(command, logs / f"{len(runs) + 1:02}-{name}.log")
    if not runs:
        raise ValueError("there is no command line: pipe them in, one per line, or call scripts/table1.sh")
    return list(runs.values())


def visible_gpus() -> list[str]:
    """Return the GPUs that runs may use, as CUDA_VISIBLE_DEVICES names them. Raises ValueError."""
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
    return listed.split() if process.returncode == 0 else []


def show(message: str) -> None:
    """Print; where nobody reads any more (`| head`) or the disk is full, go on in silence: runs must not be left."""
    try:
        print(message)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_all(runs: Sequence[Run], jobs: int, gpus: Sequence[str], lock: int) -> list[int]:
    """Run all, `jobs` at a time; return the signals that stopped it."""
    received: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: received.append(number))
    waiting, running, passed_on = list(runs), [], 0
    while running or (waiting and not received):
        ready = [run for run in waiting if run.not_before <= time.monotonic() and not received]
        for run in ready[: jobs - len(running)]:
            waiting.remove(run)
            run.gpu = min(gpus, key=[other.gpu for other in running].count) if gpus else ""
            running.append(run)
            run.start(max(1, usable_cores() // jobs), lock)
            show(f"started: {run.log.stem}")
        for number in received[passed_on:]:
            number, passed_on = (signal.SIGKILL if passed_on else number), passed_on + 1
            show(f"stopping: {signal.Signals(number).name} to {len(running)} runs, waiting for them to end")
            for process in [run.process for run in running if run.process]:
                os.killpg(process.pid, number)
        for run in [run for run in running if run.has_ended()]:
            running.remove(run)
            if again := run.failure and run.attempts < ATTEMPTS and not received:
                waiting, run.not_before = [*waiting, run], time.monotonic() + RETRY_SECONDS
            show(f"{run.failure or 'done'}{', to be tried again' if again else ''}: {run.log.stem}")
        time.sleep(POLL_SECONDS)
    return received


def launch(lines: Iterable[str], argv: Sequence[str]) -> int:
    """Run command lines as the flags say; return the exit status."""
    parser = argparse.ArgumentParser("launch.py", allow_abbrev=False, description="Other flags go to every run.")
    parser.add_argument("--name", default="sweep", help="name of the sweep (default: %(default)s)")
    parser.add_argument("--logs", type=Path, help="folder for the logs (default: results/logs/NAME)")
    parser.add_argument("--dry-run", action="store_true", help="print the command lines and their number")
    parser.add_argument("--status", action="store_true", help="print where each run stands")
    parser.add_argument("--jobs", type=int, help="runs at a time (default: one per GPU slot, or 1 on the CPU)")
    parser.add_argument("--run-per-core", action="store_true", help="one run per core, where there is no GPU")
    parser.add_argument("--per-gpu", type=int, default=1, help="runs at a time on one GPU (default: %(default)s)")
    sys.stdout.reconfigure(line_buffering=True)
    split = [*argv, "--"].index("--")
    args, extra = parser.parse_known_args(argv[:split])
    logs = (args.logs or LOGS / Path(args.name).name).absolute()
    try:
        runs = runs_of(lines, [*extra, *argv[split + 1 :]], logs)
        gpus = [] if args.dry_run or args.status else visible_gpus()
        default = len(gpus) * args.per_gpu or (min(len(runs), usable_cores()) if args.run_per_core else 1)
        jobs = default if args.jobs is None else args.jobs
        if min(jobs, args.per_gpu) < 1 or (gpus and jobs > default):
            raise ValueError(f"--jobs and --per-gpu must be at least 1, and fit {len(gpus)} GPUs, got --jobs {jobs}")
    except ValueError as error:
        parser.error(str(error))
    if args.dry_run or args.status:
        shown = [f"{run.log.stem}: {run.standing()}" if args.status else run.command for run in runs]
        done = f"{sum(line.endswith(': done') for line in shown)} done of " if args.status else ""
        print(*shown, f"# {done}{len(runs)} runs", sep="\n")
        return 0
    logs.mkdir(parents=True, exist_ok=True)
    with open(logs / "launch.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            parser.error(f"another launcher, or a run that outlived one, holds {lock.name}; wait for it, or end it")
        print(f"{args.name}: {len(runs)} runs; logs in {logs}")
        received = run_all(runs, jobs, gpus, lock.fileno())
    failed = [run for run in runs if run.failure and not received]
    for run in failed:
        print(f"\nFAILED ({run.failure}): {run.command}\n  log: {run.log}, which ends")
        print(*(f"    {line}" for line in run.lines()[-TAIL:]), sep="\n")
    left = "; stopped: the same call continues" if received else f", {len(failed)} failed"
    done = sum(run.attempts > 0 and not run.failure for run in runs)
    print(f"{args.name}: {done} of {len(runs)} runs done{left}")
    return 128 + received[0] if received else int(bool(failed))


if __name__ == "__main__":
    sys.exit(launch([] if sys.stdin is None or sys.stdin.isatty() else sys.stdin, sys.argv[1:]))
