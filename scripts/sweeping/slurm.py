"""The rows of a sweep as a Slurm job array: row.sbatch runs each of them, and rows skip and continue by themselves.

Logs and the repository must be on a file system that the nodes share.
"""

import argparse
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from data.atomic_file import atomic_write
from scripts.sweeping.sweep import Progress, Row, SweepError, tail

FLAGS = ("partition", "time", "gpus_per_task", "cpus_per_task", "array_limit", "wait")  # of launch.py
TASK = Path(__file__).with_name("row.sbatch")


def run_on_slurm(
    rows: Sequence[Row], args: argparse.Namespace, logs: Path, progress: Progress, received: list[int]
) -> None:
    """Submit the rows and, with --wait, follow them to the end, or until a signal was received.

    Raises SweepError if there is no Slurm, if the sweep is in its queue, or if it refuses the array.
    """
    for program in ("sbatch", "squeue", "sinfo"):
        if not shutil.which(program):
            raise SweepError(f"--slurm needs Slurm's {program}, which is not on PATH; run it where jobs are submitted")
    if queued := _printed("squeue", "--me", f"--name={args.name}", "--noheader"):
        raise SweepError(f"the sweep {args.name} is in Slurm's queue: wait for it, or scancel it\n{queued}")
    gpus = args.gpus_per_task
    if gpus is None:
        gpus = int("gpu" in _printed("sinfo", "--noheader", "--format=%G", *_given("partition", args.partition)))
    with atomic_write(logs / "slurm.rows") as file:
        file.writelines(f"{row.log}\t{shlex.join(row.words)}\n" for row in rows)
    command = ["sbatch", f"--job-name={args.name}", f"--array=1-{len(rows)}%{args.array_limit or len(rows)}"]
    command += [f"--time={args.time or '4:00:00'}", f"--output={logs}/slurm-%a.out", "--open-mode=append"]
    command += [*_given("partition", args.partition), *_given("cpus-per-task", args.cpus_per_task)]
    command += [*_given("gpus-per-task", gpus), *["--wait"] * args.wait, TASK, logs / "slurm.rows", str(args.retries)]
    sizes = {row: row.log.stat().st_size for row in rows if row.log.exists()}  # of an earlier call
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    if not (submitted := process.stdout.readline().strip()):
        raise SweepError(f"Slurm refuses the rows: {process.communicate()[1].strip()}")
    progress.say(f"{submitted}; squeue --me shows it, scancel ends it")
    while process.poll() is None:
        try:
            process.wait(0.2)
        except subprocess.TimeoutExpired:
            if received:
                process.terminate()
                progress.say("the rows go on without this launcher")
                return
    for row in rows if args.wait else ():
        has_run = row.log.exists() and row.log.stat().st_size != sizes.get(row)
        how = tail(row.log)[-1].removeprefix("=== ") if has_run else ""
        if how == "exit status 0":
            progress.row_done(row)
        else:
            progress.row_failed(row, how if how.startswith("exit status") else "Slurm did not run it to its end")


def _given(flag: str, value: object) -> list[str]:
    return [f"--{flag}={value}"] if value else []


def _printed(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()
