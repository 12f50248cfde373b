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
    from data import program

    program.begin()

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from tqdm import tqdm

from data import program
from data.file_lock import held_or_refused
from experiments.shared.cores import usable_cores
from scripts.sweeping.rows import ROOT, Row, SweepError, read_rows, start_row, tail

POLL_SECONDS = 0.1
# Before the next attempt: time for a row whose launcher was killed to end, and to let go of its run folder.
RETRY_SECONDS = 3
DONE = "=== exit status 0"  # the end of a log
LIVE_LINE = "{desc} {bar:20} {n_fmt}/{total_fmt} rows{postfix}, {elapsed} passed, {remaining} left"


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the launcher's flags, and the words that are added to every row. Raises CommandLineError."""
    number = program.whole_number
    parser = program.Parser(
        prog="launch.py",
        description="Run the command lines on standard input. Other arguments are added to every line.",
    )
    flag = parser.add_argument
    flag("--name", type=name_of_a_sweep, default="sweep", help="of the sweep (%(default)s)")
    flag("--logs", type=program.path, metavar="FOLDER", help="of the rows' logs (results/logs/<name>)")
    flag("--dry-run", action="store_true", help="print the command lines and their number, no more")
    flag("--status", action="store_true", help="print where each row stands, no more")
    flag("--retries", type=number(0), default=1, help="of a failed row (%(default)s)")
    flag("--jobs", type=number(1), help="rows at once (one per visible GPU, or 1 without GPUs)")
    flag("--row-per-core", action="store_true", help="without --jobs and GPUs: as many rows as cores")
    flag("--per-gpu", type=number(1), default=1, help="rows at once on one GPU (%(default)s)")
    argv = list(argv)
    split = argv.index("--") if "--" in argv else len(argv)
    args, extra = parser.parse_known_args(argv[:split])
    if "--slurm" in extra:
        parser.error("--slurm has become a script: scripts/table1.sh --dry-run | scripts/slurm.sh table1, say")
    return args, extra + argv[split + 1 :]


def name_of_a_sweep(text: str) -> str:
    """Argument type: a word that can be a folder's name."""
    if not re.fullmatch(r"\w[\w.-]*", text):
        raise argparse.ArgumentTypeError(f"must be of letters, digits, dots, dashes and underscores, got {text!r}")
    return text


def launch(argv: Sequence[str]) -> int:
    """Run a sweep; return the exit status. Raises SweepError before anything was started."""
    try:
        args, extra = parse_arguments(argv)
    except program.CommandLineError:
        if not sys.stdin.isatty():
            sys.stdin.read()  # what writes the rows shall not find the pipe closed
        raise
    if sys.stdin.isatty():
        raise SweepError("rows are read from standard input: pipe command lines in, or call scripts/table1.sh, say")
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
        raise SweepError(
            f"--jobs {jobs} is more than {len(gpus)} visible GPUs x --per-gpu {args.per_gpu}; raise --per-gpu, "
            "or hide the GPUs with CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    busy = "another launcher runs this sweep (another --name is another sweep)"
    with held_or_refused(logs / "launch.lock", SweepError, busy, "the folder of logs"):
        print(f"{args.name}: {len(rows)} rows; logs in {logs}", flush=True)
        sweep = Sweep(args.name, rows, jobs, gpus, args.retries)
        with stop_signals() as received:
            sweep.run(received)
    counts = {"done": sweep.num_done, "failed": len(sweep.failed)}
    counts["left"] = len(rows) - sum(counts.values())
    for row, how in sweep.failed.items():
        print(f"\nFAILED row {row.number} ({how}): {row.command}\n  log: {row.log}, which ends")
        print("\n".join(f"    {line}" for line in tail(row.log)))
    told = ", ".join(f"{number} {name}" for name, number in counts.items() if number)
    print(f"{args.name}: {told}, of {len(rows)} rows", flush=True)
    if received:
        print("stopped: the same call continues where it stopped", file=sys.stderr)
        return 128 + received[0]
    return 1 if sweep.failed else 0


def visible_gpus() -> list[str]:
    """Return the GPUs that rows may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        # CUDA stops reading at the first number below 0.
        names = [name.strip() for name in visible.split(",") if name.strip()]
        return names[: next((place for place, name in enumerate(names) if name.startswith("-")), None)]
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True)
    return done.stdout.split() if done.returncode == 0 else []


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collect Ctrl-C, SIGTERM and, unless nohup ignores it, SIGHUP, in place of being ended by them."""
    received: list[int] = []
    wanted = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        wanted.append(signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, _: received.append(number)) for number in wanted}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Sweep:
    """Runs rows, `jobs` at once, says what happens to each and, on a terminal, keeps a live line below that.

    failed: how each failed that did.
    """

    def __init__(self, name: str, rows: Sequence[Row], jobs: int, gpus: Sequence[str], retries: int) -> None:
        self.rows, self.jobs, self.gpus, self.attempts = rows, jobs, gpus, retries + 1
        self.num_done = 0
        self.failed: dict[Row, str] = {}
        self._running: dict[subprocess.Popen, str | None] = {}  # and its GPU
        self._lock, self._stopped = threading.Lock(), threading.Event()  # no process starts once it is stopped
        # Of `jobs`, not of the rows that are left: a row that is continued must compute with as many threads as before.
        self._threads = str(max(1, usable_cores() // jobs))
        self._bar = tqdm(desc=name, total=len(rows), disable=not sys.stderr.isatty(), bar_format=LIVE_LINE)

    def run(self, received: Sequence[int]) -> None:
        """Run until all have ended, or until those have that ran when a signal was `received`."""
        passed_on = 0
        with self._bar, ThreadPoolExecutor(self.jobs) as pool:
            futures = [pool.submit(self._run, row) for row in self.rows]
            while wait(futures, POLL_SECONDS).not_done:
                while passed_on < len(received):  # Ctrl-C as such, the next one harder
                    self._pass_on((signal.SIGINT, signal.SIGTERM, signal.SIGKILL)[min(passed_on, 2)])
                    passed_on += 1
                self._refresh()
            self._refresh()
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
                gpu = min(self.gpus, key=list(self._running.values()).count) if self.gpus else None
                settings = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
                if "--threads" not in row.words:
                    settings |= {"OMP_NUM_THREADS": self._threads, "MKL_NUM_THREADS": self._threads}
                try:
                    process = start_row(row, f"attempt {number} of {self.attempts}", settings)
                except OSError as error:  # no such program, or no room for its log
                    how = f"it cannot be started: {error}"
                    continue
                self._running[process] = gpu
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

    def _ended(self, line: str) -> None:
        self._bar.update()
        self._say(f"[{self.num_done + len(self.failed)}/{len(self.rows)}] {line}")

    def _say(self, line: str) -> None:
        """Print a line at once, above the live one. A full disk, where that goes to a file, stops no row."""
        with contextlib.suppress(OSError):
            tqdm.write(line)
            sys.stdout.flush()

    def _refresh(self) -> None:
        told = f"{self.num_done} done, {len(self.failed)} failed, {len(self._running)} running"
        self._bar.set_postfix_str(told)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script; return its exit status (see data/program.py)."""
    return program.finish(lambda: launch(sys.argv[1:] if argv is None else argv), "before any row was started")


if __name__ == "__main__":
    program.end(main())
