"""Runs the rows of a sweep, command lines read from standard input: here, J at once, or as a Slurm job array.

    scripts/table1.sh --jobs 4                        # a table script pipes its rows into this one
    scripts/table1.sh --dry-run                       # print the command lines and their number
    scripts/table1.sh --status                        # where each row stands
    scripts/table1.sh --jobs 8 --per-gpu 2 --n_epochs 5 --limit_train 5000
    scripts/table1.sh --slurm --partition gpu --time 2:00:00 --array-limit 16 --wait
    python scripts/launch.py --jobs 2 < commands.txt  # any commands; no shell expands them

A flag that this script knows (see --help) is its own; every other argument, and all that follow a --, are added to
every row. Each row writes results/logs/<name>/<number>-<row>.log. Rows that their results file already has are skipped
before they start; a row that fails is tried again, then named at the end with the last lines of its log. Ctrl-C, or
SIGTERM, is passed on to the rows, which leave a checkpoint after every epoch; a second one is passed on harder. After
that, and after kill -9 of anything, the same call continues where it stopped.

Exit status: 0 every row is recorded (or submitted, without --wait); 1 a row failed; 2 the command line or a line of
input is wrong, and nothing was started; 130, 143 and 129: stopped by Ctrl-C, SIGTERM or a closed terminal.
"""

if __name__ == "__main__":  # from here on, what goes wrong is a sentence
    from data import program

    program.begin()

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress

from data import program
from data.file_lock import held_or_refused
from experiments.shared.cores import usable_cores
from scripts.sweeping.slurm import FLAGS, run_on_slurm
from scripts.sweeping.sweep import ROOT, Progress, Row, SweepError, read_rows, recorded_rows, start_row, tail

POLL_SECONDS = 0.1
# Before the next attempt: time for a row whose launcher was killed to end, and to let go of its run folder.
RETRY_SECONDS = 3


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the launcher's flags, and the words that are added to every row. Raises CommandLineError."""
    number = program.whole_number
    parser = program.Parser(
        prog="launch.py",
        description="Run the command lines on standard input. Other arguments are added to every line.",
    )
    parser.add_argument("--name", type=name_of_a_sweep, default="sweep", help="of the sweep (%(default)s)")
    parser.add_argument("--logs", type=program.path, metavar="FOLDER", help="of the rows' logs (results/logs/<name>)")
    parser.add_argument("--dry-run", action="store_true", help="print the command lines and their number, no more")
    parser.add_argument("--status", action="store_true", help="print where each row stands, no more")
    parser.add_argument("--retries", type=number(0), default=1, help="of a failed row (%(default)s)")
    here = parser.add_argument_group("on this machine")
    here.add_argument("--jobs", type=number(1), help="rows at once (one per visible GPU, or 1 without GPUs)")
    here.add_argument("--row-per-core", action="store_true", help="without --jobs and GPUs: as many rows as cores")
    here.add_argument("--per-gpu", type=number(1), default=1, help="rows at once on one GPU (%(default)s)")
    slurm = parser.add_argument_group("as a Slurm job array")
    slurm.add_argument("--slurm", action="store_true", help="submit the rows; the flags below go to sbatch")
    slurm.add_argument("--partition", help="the cluster's default without it")
    slurm.add_argument("--time", help="limit; the row is requeued there (4:00:00)")
    slurm.add_argument("--gpus-per-task", type=number(0), help="(1, or 0 where the partition has no GPU)")
    slurm.add_argument("--cpus-per-task", type=number(1), help="the cluster's default without it")
    slurm.add_argument("--array-limit", type=number(1), help="rows at once (as many as there are)")
    slurm.add_argument("--wait", action="store_true", help="until the rows have ended, and sum up")

    argv = list(argv)
    split = argv.index("--") if "--" in argv else len(argv)
    args, extra = parser.parse_known_args(argv[:split])
    for flag in ("jobs",) if args.slurm else FLAGS:
        if getattr(args, flag) not in (None, False):
            raise SweepError(f"--{flag.replace('_', '-')} goes {'without' if args.slurm else 'with'} --slurm")
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
        print("\n".join(row.command for row in rows))
        print(f"# {len(rows)} rows")
        return 0
    if args.status:
        recorded = recorded_rows(rows)
        for row in rows:
            stands = "recorded" if row in recorded else tail(row.log)[-1] if row.log.exists() else "waiting"
            print(f"{row.name}: {stands}")
        print(f"# {len(recorded)} of {len(rows)} rows recorded")
        return 0

    gpus = visible_gpus()
    slots = len(gpus) * args.per_gpu
    jobs = args.jobs or slots or (min(len(rows), usable_cores()) if args.row_per_core else 1)
    if gpus and jobs > slots and not args.slurm:
        raise SweepError(
            f"--jobs {jobs} is more than {len(gpus)} visible GPUs x --per-gpu {args.per_gpu}; raise --per-gpu, "
            "or hide the GPUs with CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    busy = "another launcher runs this sweep (another --name is another sweep)"
    with held_or_refused(logs / "launch.lock", SweepError, busy, "the folder of logs"):
        recorded = recorded_rows(rows)
        to_run = [row for row in rows if row not in recorded]
        print(f"{args.name}: {len(rows)} rows, {len(recorded)} already recorded; logs in {logs}", flush=True)
        with stop_signals() as received, Progress(args.name, to_run) as progress:
            if args.slurm and to_run:
                run_on_slurm(to_run, args, logs, progress, received)
                if not args.wait:
                    return 0
            elif to_run:
                run_here(to_run, jobs, gpus, args.retries, progress, received)
    status = progress.summarise(len(rows), len(recorded))
    if received:
        print("stopped: the same call continues where it stopped", file=sys.stderr)
        return 128 + received[0]
    return status


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


@contextmanager
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


def run_here(
    rows: Sequence[Row], jobs: int, gpus: Sequence[str], retries: int, progress: Progress, received: list[int]
) -> None:
    """Run the rows, `jobs` at once, until all have ended, or until those that ran when it was stopped have."""
    # Of `jobs`, not of the rows that are left: a row that is continued must compute with as many threads as before.
    threads = str(max(1, usable_cores() // jobs))
    running: dict[subprocess.Popen, str | None] = {}  # and its GPU
    lock, stopped = threading.Lock(), threading.Event()  # no process starts between the signal and its passing on

    def attempt(row: Row, number: int) -> str:
        """Run a row once; return how it failed, "" if it did not."""
        with lock:
            if stopped.is_set():
                return "not started"
            gpu = min(gpus, key=list(running.values()).count) if gpus else None
            settings = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
            if "--threads" not in row.words:
                settings |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
            try:
                process = start_row(row, f"attempt {number} of {retries + 1}", settings)
            except OSError as error:  # no such program, or no room for its log
                return f"it cannot be started: {error}"
            running[process] = gpu
        progress.say(f"started: {row.name}" + (f" (attempt {number})" if number > 1 else ""))
        status = process.wait()
        with lock:
            del running[process]
        return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}" if status else ""

    def run(row: Row) -> None:
        for number in range(1, retries + 2):
            how = attempt(row, number)
            if not how:
                progress.row_done(row)
                return
            if stopped.is_set():
                if how != "not started":
                    progress.say(f"stopped: {row.name}")
                return
            if number <= retries:
                progress.say(f"failed, to be tried again ({how}): {row.name}")
                stopped.wait(RETRY_SECONDS)
        progress.row_failed(row, how)

    passed_on = 0
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(run, row) for row in rows]
        while wait(futures, POLL_SECONDS).not_done:
            while passed_on < len(received):  # Ctrl-C as such, the next one harder
                number = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)[min(passed_on, 2)]
                passed_on += 1
                with lock:
                    stopped.set()
                    progress.say(f"stopping: {number.name} to {len(running)} running rows, waiting for them to end")
                    for process in running:
                        with suppress(ProcessLookupError):  # it has just ended
                            os.killpg(process.pid, number)
            progress.refresh(len(running))
    progress.refresh(0)
    for future in futures:
        future.result()  # raises what a thread raised


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script; return its exit status (see data/program.py)."""
    return program.finish(lambda: launch(sys.argv[1:] if argv is None else argv), "before any row was started")


if __name__ == "__main__":
    program.end(main())
