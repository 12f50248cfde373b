"""Runs the rows of a sweep, command lines read from standard input, J at once.

    scripts/table1.sh --jobs 4                        # a table script pipes its rows into this one
    scripts/table1.sh --dry-run                       # print the command lines and their number
    scripts/table1.sh --status                        # where each row stands
    scripts/table1.sh --jobs 8 --per-gpu 2 --n_epochs 5 --limit_train 5000
    scripts/table1.sh --dry-run | scripts/slurm.sh table1 --partition gpu     # as a Slurm job array instead
    python scripts/launch.py --jobs 2 < commands.txt  # any commands; no shell expands them

A flag that this script knows (see --help) is its own; every other argument, and all that follow a --, are added to
every row. Each row writes results/logs/<name>/<number>-<row>.log. Rows that their results file already has skip
themselves; a row that fails is tried again, then named at the end with the last lines of its log. Ctrl-C, or SIGTERM,
is passed on to the rows, which leave a checkpoint after every epoch; a second one is passed on harder. After that, and
after kill -9 of anything, the same call continues where it stopped.

Exit status: 0 every row is done; 1 a row failed; 2 the command line or a line of input is wrong, and nothing was
started; 130, 143 and 129: stopped by Ctrl-C, SIGTERM or a closed terminal.
"""

if __name__ == "__main__":  # from here on, what goes wrong is a sentence
    from scripts.shared import program

    program.begin()

import argparse
import contextlib
import ctypes
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from experiments.common.cores import usable_cores
from scripts.shared import program
from scripts.shared.file_lock import held_or_refused
from scripts.shared.program import CommandLineError

ROOT = Path(__file__).resolve().parents[1]
POLL_SECONDS = 0.1
# Before the next attempt: time for a row whose launcher was killed to end, and to let go of its run folder.
RETRY_SECONDS = 3
TAIL = 12  # lines of a failed row's log in the summary
DONE = "=== exit status 0"  # the end of a log
LIVE_LINE = "{desc} {bar:20} {n_fmt}/{total_fmt} rows{postfix}, {elapsed} passed, {remaining} left"
PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


class Row(NamedTuple):
    """One line of a sweep: its place among all, from 1, and its log, which is named after it."""

    number: int
    command: str
    words: tuple[str, ...]
    log: Path


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the launcher's flags, and the words that are added to every row. Raises CommandLineError."""
    number = program.whole_number
    parser = program.Parser(
        prog="launch.py",
        description="Run the command lines on standard input. Other arguments are added to every line.",
    )
    flag = parser.add_argument
    flag("--name", default="sweep", help="of the sweep (%(default)s)")
    flag("--logs", type=program.path, metavar="FOLDER", help="of the rows' logs (results/logs/<name>)")
    flag("--dry-run", action="store_true", help="print the command lines and their number, no more")
    flag("--status", action="store_true", help="print where each row stands, no more")
    flag("--retries", type=number(0), default=1, help="of a failed row (%(default)s)")
    flag("--jobs", type=number(1), help="rows at once (one per visible GPU, or 1 without GPUs)")
    flag("--row-per-core", action="store_true", help="without --jobs and GPUs: as many rows as cores")
    flag("--per-gpu", type=number(1), default=1, help="rows at once on one GPU (%(default)s)")
    split = [*argv, "--"].index("--")
    args, extra = parser.parse_known_args(argv[:split])
    if not re.fullmatch(r"\w[\w.-]*", args.name):
        parser.error(f"--name must be of letters, digits, dots, dashes and underscores, got {args.name!r}")
    return args, [*extra, *argv[split + 1 :]]


def read_rows(lines: Iterable[str], extra: Sequence[str], logs: Path) -> list[Row]:
    """Return one row per line that is neither empty nor a comment, with `extra` words at its end.

    Raises CommandLineError.
    """
    rows: dict[str, Row] = {}
    for line in map(str.strip, lines):
        if not line or line.startswith("#"):
            continue
        number, command = len(rows) + 1, " ".join([line, *map(shlex.quote, extra)])
        if not program.is_text(command):
            raise CommandLineError(f"row {number} must be UTF-8 text without NUL, got {command!r}")
        lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
        lexer.whitespace_split, lexer.commenters = True, ""
        try:
            words = tuple(lexer)
        except ValueError as error:
            raise CommandLineError(f"row {number} cannot be split into words ({error}): {command}") from None
        if operators := [word for word in words if re.fullmatch(r"[();<>|&]+", word)]:
            raise CommandLineError(
                f"row {number} needs a shell for {operators[0]!r}, and rows are run without one; "
                f"write bash -c '...' if you mean it: {command}"
            )
        if command in rows:
            raise CommandLineError(f"rows {rows[command].number} and {number} are the same command: {command}")
        # Its arguments, without the script's name and those of the flags.
        told = [word for word in words[1:] if not re.match(r"--?[A-Za-z][^=]*$", word)]
        told = told[1:] if len(told) > 1 and told[0].endswith(".py") else told
        name = re.sub(r"[^A-Za-z0-9.=_]+", "_", "_".join(told or words))[:70].strip("_.")
        rows[command] = Row(number, command, words, logs / f"{number:02}-{name}.log")
    if not rows:
        raise CommandLineError("there is no row: pipe command lines into scripts/launch.py, one per line")
    return list(rows.values())


def tail(log: Path) -> list[str]:
    """Return the last lines of a log; of a progress bar's line, what was shown last."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - 20_000))
            text = file.read(20_000).decode(errors="replace")
    except OSError as error:
        return [f"(no log: {error})"]
    lines = [line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").split("\n") if line.strip()]
    return lines[-TAIL:] or ["(an empty log)"]


def launch(argv: Sequence[str]) -> int:
    """Run a sweep; return the exit status. Raises CommandLineError before anything was started."""
    try:
        args, extra = parse_arguments(argv)
    except CommandLineError:
        if not sys.stdin.isatty():
            sys.stdin.read()  # what writes the rows shall not find the pipe closed
        raise
    if sys.stdin.isatty():
        raise CommandLineError(
            "rows are read from standard input: pipe command lines in, or call scripts/table1.sh, say"
        )
    logs = (args.logs or ROOT / "results" / "logs" / args.name).absolute()
    rows = read_rows(sys.stdin, extra, logs)
    if args.dry_run:
        print(*(row.command for row in rows), f"# {len(rows)} rows", sep="\n")
        return 0
    if args.status:
        ends = [tail(row.log)[-1] if row.log.exists() else "waiting" for row in rows]
        for row, end in zip(rows, ends):
            print(f"{row.log.stem}: {'done' if end == DONE else end}")
        print(f"# {ends.count(DONE)} of {len(rows)} rows done")
        return 0

    gpus = visible_gpus()
    slots = len(gpus) * args.per_gpu
    jobs = args.jobs or slots or (min(len(rows), usable_cores()) if args.row_per_core else 1)
    if gpus and jobs > slots:
        raise CommandLineError(
            f"--jobs {jobs} is more than {len(gpus)} visible GPUs x --per-gpu {args.per_gpu}; raise --per-gpu, "
            "or hide the GPUs with CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    busy = "another launcher runs this sweep (another --name is another sweep)"
    with held_or_refused(logs / "launch.lock", CommandLineError, busy, "the folder of logs"):
        print(f"{args.name}: {len(rows)} rows; logs in {logs}", flush=True)
        sweep = Sweep(args.name, rows, jobs, gpus, args.retries)
        sweep.run()
    counts = {"done": sweep.num_done, "failed": len(sweep.failed)}
    counts["left"] = len(rows) - sum(counts.values())
    for row, how in sweep.failed.items():
        print(f"\nFAILED row {row.number} ({how}): {row.command}\n  log: {row.log}, which ends")
        print("\n".join(f"    {line}" for line in tail(row.log)))
    told = ", ".join(f"{number} {name}" for name, number in counts.items() if number)
    print(f"{args.name}: {told}, of {len(rows)} rows", flush=True)
    if sweep.received:
        print("stopped: the same call continues where it stopped", file=sys.stderr)
        return 128 + sweep.received[0]
    return 1 if sweep.failed else 0


def visible_gpus() -> list[str]:
    """Return the GPUs that rows may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:  # CUDA stops reading at the first number below 0
        names = [name.strip() for name in visible.split(",") if name.strip()]
        return list(itertools.takewhile(lambda name: not name.startswith("-"), names))
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True)
    return done.stdout.split() if done.returncode == 0 else []


class Sweep:
    """Runs rows, `jobs` at once, says what happens to each and, on a terminal, keeps a live line below that.

    failed: how each failed that did. received: the signals that came, each passed on to the rows: Ctrl-C as such, the
    next one harder.
    """

    def __init__(self, name: str, rows: Sequence[Row], jobs: int, gpus: Sequence[str], retries: int) -> None:
        self.rows, self.jobs, self.gpus, self.attempts = rows, jobs, gpus, retries + 1
        self.num_done = 0
        self.failed: dict[Row, str] = {}
        self.received: list[int] = []
        self._running: dict[subprocess.Popen, str | None] = {}  # and its GPU
        self._lock, self._stopped = threading.Lock(), threading.Event()  # no process starts once it is stopped
        # Of `jobs`, not of the rows that are left: a row that is continued must compute with as many threads as before.
        self._threads = str(max(1, usable_cores() // jobs))
        self._bar = tqdm(desc=name, total=len(rows), disable=not sys.stderr.isatty(), bar_format=LIVE_LINE)

    def run(self) -> None:
        """Run until all have ended, or until those have that ran when a signal was received."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                signal.signal(number, lambda number, _: self.received.append(number))
        passed_on = 0
        with self._bar, ThreadPoolExecutor(self.jobs) as pool:
            futures = [pool.submit(self._run, row) for row in self.rows]
            left = True
            while left:
                left = wait(futures, POLL_SECONDS).not_done
                for _ in self.received[passed_on:]:
                    self._pass_on((signal.SIGINT, signal.SIGTERM, signal.SIGKILL)[min(passed_on, 2)])
                    passed_on += 1
                counts = f"{self.num_done} done, {len(self.failed)} failed, {len(self._running)} running"
                self._bar.set_postfix_str(counts)
        for future in futures:
            future.result()  # raises what a thread raised

    def _pass_on(self, number: signal.Signals) -> None:
        with self._lock:
            self._stopped.set()
            self._say(f"stopping: {number.name} to {len(self._running)} running rows, waiting for them to end")
            for process in self._running:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.killpg(process.pid, number)

    def _run(self, row: Row) -> None:
        """Try a row until it is done or has failed for good."""
        name, how = row.log.stem, ""
        for number in range(1, self.attempts + 1):
            if number > 1:
                self._say(f"failed, to be tried again ({how}): {name}")
                self._stopped.wait(RETRY_SECONDS)
            with self._lock:
                if self._stopped.is_set():
                    return
                try:
                    process = self._start(row, f"attempt {number} of {self.attempts}")
                except OSError as error:  # no such program, or no room for its log
                    how = f"it cannot be started: {error}"
                    continue
            self._say(f"started: {name}" + (f" (attempt {number})" if number > 1 else ""))
            status = process.wait()
            with contextlib.suppress(OSError), row.log.open("a") as log:
                print(f"=== exit status {status}", file=log)
            with self._lock:
                del self._running[process]
                self.num_done += status == 0
            if status == 0:
                self._ended(f"done: {name}")
                return
            if self._stopped.is_set():
                self._say(f"stopped: {name}")
                return
            how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        self.failed[row] = how
        self._ended(f"FAILED ({how}): {name}")

    def _start(self, row: Row, header: str) -> subprocess.Popen:
        """Start a row on the GPU that has fewest, its output appended to its log. Raises OSError.

        It gets a session of its own, so that Ctrl-C reaches it once, through the launcher. On Linux it gets SIGTERM
        when the thread that started it ends, by kill -9 of the launcher too. Elsewhere it goes on unseen to its end,
        where it records its row; called again meanwhile, its configuration is refused, as "being run by another
        process".
        """
        gpu = min(self.gpus, key=list(self._running.values()).count) if self.gpus else None
        settings = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        if "--threads" not in row.words:
            settings |= {"OMP_NUM_THREADS": self._threads, "MKL_NUM_THREADS": self._threads}
        launcher = os.getpid()

        def before_the_program() -> None:
            # Under nohup or "&" of a shell script SIGINT comes ignored, and the row could not be stopped.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            # Where Linux shares its time among sessions, the niceness that a row inherits counts within its own alone.
            with contextlib.suppress(OSError):
                Path("/proc/self/autogroup").write_text(str(os.nice(0)))
            if PRCTL is not None:
                PRCTL(DEATH_SIGNAL, signal.SIGTERM)
                if os.getppid() != launcher:  # it died before the line above
                    os.kill(os.getpid(), signal.SIGTERM)

        row.log.parent.mkdir(parents=True, exist_ok=True)
        with open(row.log, "a", encoding="utf-8") as log:
            now = datetime.now(timezone.utc).isoformat(timespec="seconds")
            print(f"=== {now} {header}", *map("=".join, settings.items()), file=log)
            print(f"$ {row.command}", file=log, flush=True)
            process = subprocess.Popen(
                row.words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **settings},
                start_new_session=True,
                preexec_fn=before_the_program,
            )
        self._running[process] = gpu
        return process

    def _ended(self, line: str) -> None:
        self._bar.update()
        self._say(f"[{self.num_done + len(self.failed)}/{len(self.rows)}] {line}")

    def _say(self, line: str) -> None:
        """Print a line at once, above the live one. A full disk, where that goes to a file, stops no row."""
        with contextlib.suppress(OSError):
            tqdm.write(line)
            sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script; return its exit status (see data/program.py)."""
    return program.finish(lambda: launch(sys.argv[1:] if argv is None else argv), "before any row was started")


if __name__ == "__main__":
    program.end(main())
