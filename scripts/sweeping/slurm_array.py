"""The rows of a sweep as a Slurm job array, by submitit: submitted, requeued, followed. Called by scripts/launch.py.

Each row is a job of one task, which runs the row's command as scripts/launch.py does, with its retries and its log.
Slurm ends a job at its time limit, or earlier to make room; either way the row stops, the job is requeued and, when it
starts again, the same command continues from the checkpoint of the last finished epoch.

At the time limit, SIGNAL_SECONDS ahead, Slurm sends SIGUSR2; submitit has the row stopped and requeues the job. A
partition that preempts by requeuing sends SIGTERM and requeues by itself, as does `scontrol requeue`, and a node that
fails. A job that was requeued waits for about two minutes: that is Slurm's.

Which job belongs to which row is kept in <logs>/slurm/jobs.json: the same call again submits only rows that have no job
in the queue. What is known of a job comes from squeue and from the file with its result, since small clusters have no
accounting (sacct), which submitit would ask. <logs> and the repository must be on a file system that the nodes share.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import submitit

from data.atomic_file import atomic_write
from experiments.shared.cores import usable_cores
from scripts.sweeping.sweep import (
    Progress,
    Row,
    Stop,
    SweepError,
    ending,
    signal_group,
    start_row,
    thread_settings,
)

SIGNAL_SECONDS = 60  # for stopping the row: it leaves the epoch it is in
MAX_TIMEOUTS = 100  # a row that reaches its time limit so often may not finish one epoch within it
DEFAULT_MINUTES = 4 * 60
POLL_SECONDS = (1.0, 15.0)  # at first, and after some minutes
# Of a job that is over. Slurm forgets one after some minutes; an unknown state counts as not over.
WITHOUT_RESULT = ("BOOT_FAIL", "CANCELLED", "DEADLINE", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")
ENDED = (*WITHOUT_RESULT, "FAILED", "COMPLETED", "forgotten by Slurm")
# How long the result of a job that is over may be missing: network file systems show new files late.
RESULT_SECONDS = 60


class RunRow:
    """Within a job: called there by submitit with the row, and asked for a checkpoint when the job must end."""

    def __init__(self, retries: int) -> None:
        self.retries = retries
        self.process: subprocess.Popen | None = None
        self.terminated = False

    def __call__(self, row: Row) -> str:
        """Run the row; return how it ended, "" if well."""
        # scancel and a requeue end every process of the job by themselves: here it only means not to try again.
        signal.signal(signal.SIGTERM, self._note_termination)
        given = os.environ.get("SLURM_CPUS_PER_TASK") or os.environ.get("SLURM_CPUS_ON_NODE")
        threads = int(given or usable_cores())
        how = ""
        for attempt in range(1, self.retries + 2):
            settings = thread_settings(row, threads)
            # SIGUSR2 reaches the row as well, and would kill it.
            try:
                self.process = start_row(row, attempt, self.retries + 1, settings, ignored=signal.SIGUSR2)
            except OSError as error:
                how = f"it cannot be started: {error}"
                continue
            # Not wait(): checkpoint() comes in a signal handler, and waits for the process itself.
            while self.process.poll() is None:
                time.sleep(0.2)
            status = self.process.returncode
            if status == 0:
                return ""
            how = ending(status)
            if self.terminated:
                # No result: where the job is requeued, it is not over.
                sys.exit(128 + signal.SIGTERM)
        return how

    def _note_termination(self, *_: object) -> None:
        self.terminated = True

    def checkpoint(self, row: Row) -> submitit.helpers.DelayedSubmission:
        """Stop the row, and return what submitit runs when the job starts again: the same command."""
        if self.process is not None:
            signal_group(self.process, signal.SIGTERM)
            while self.process.poll() is None:
                time.sleep(0.1)
        return submitit.helpers.DelayedSubmission(RunRow(self.retries), row)


def run_on_slurm(rows: Sequence[Row], args: argparse.Namespace, logs: Path, progress: Progress, stop: Stop) -> bool:
    """Submit the rows that are not in the queue yet and, with --wait, follow them; return whether they were followed.

    Raises SweepError if there is no Slurm, or if it refuses the array.
    """
    for program in ("sbatch", "srun", "squeue"):
        if not shutil.which(program):
            raise SweepError(f"--slurm needs Slurm's {program}, which is not on PATH; run it where jobs are submitted")
    folder = logs / "slurm"
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / "jobs.json"
    jobs: dict[str, str] = json.loads(record.read_text()) if record.exists() else {}  # command -> job id
    states = job_states()
    if states is None:
        raise SweepError("squeue does not answer: is the Slurm controller up?")
    new = [row for row in rows if states.get(jobs.get(row.command, ""), ENDED[-1]) in ENDED]
    if new:
        for row, job in zip(new, submit(new, args, folder)):
            jobs[row.command] = job.job_id
        with atomic_write(record) as file:
            json.dump(jobs, file, indent=2)
    array = " ".join(dict.fromkeys(jobs[row.command].partition("_")[0] for row in rows))
    progress.say(f"{len(new)} rows submitted, {len(rows) - len(new)} were in the queue: Slurm job {array}")
    if not args.wait:
        progress.say("the same call with --wait follows them; squeue --me shows them, scancel ends them")
        return False
    follow({row: jobs[row.command] for row in rows}, folder, progress, stop)
    if stop.numbers:
        progress.say(f"the rows go on without this launcher; to end them: scancel {array}")
    return True


def submit(rows: Sequence[Row], args: argparse.Namespace, folder: Path) -> list[submitit.Job]:
    """Submit the rows as one array. Raises SweepError with Slurm's own words."""
    gpus = args.gpus_per_task if args.gpus_per_task is not None else int(has_gpus(args.partition))
    executor = submitit.SlurmExecutor(folder, max_num_timeout=MAX_TIMEOUTS)
    executor.update_parameters(
        job_name=args.name,
        partition=args.partition,
        time=args.time or DEFAULT_MINUTES,
        gpus_per_task=gpus or None,
        cpus_per_task=args.cpus_per_task,
        array_parallelism=args.array_limit or len(rows),
        signal_delay_s=SIGNAL_SECONDS,
        ntasks_per_node=1,
        additional_parameters={"requeue": True},
        # Since Slurm 22.05 srun does not take this over from sbatch.
        srun_args=[f"--cpus-per-task={args.cpus_per_task}"] if args.cpus_per_task else None,
    )
    try:
        return executor.map_array(RunRow(args.retries), rows)
    except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
        raise SweepError(f"Slurm refuses the rows: {error}") from None


def has_gpus(partition: str | None) -> bool:
    """Return whether a node of the partition (of any, without one) has GPUs."""
    command = ["sinfo", "--noheader", "--format=%G", *([f"--partition={partition}"] if partition else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    return "gpu" in done.stdout


def job_states() -> dict[str, str] | None:
    """Return job id -> state of this user's jobs that Slurm remembers, or None if it does not answer."""
    command = ["squeue", "--me", "--array", "--states=all", "--noheader", "--format=%i|%T"]
    done = subprocess.run(command, capture_output=True, text=True)
    return dict(line.split("|") for line in done.stdout.split()) if done.returncode == 0 else None


def follow(jobs: dict[Row, str], folder: Path, progress: Progress, stop: Stop) -> None:
    """Report rows as their jobs end, until all have, or until the launcher is asked to stop."""
    running: set[Row] = set()
    over_since: dict[Row, float] = {}
    remaining = dict(jobs)
    pause = POLL_SECONDS[0]
    while remaining and not stop.numbers:
        states = job_states()
        now = time.monotonic()
        for row, job_id in list(remaining.items()):
            state = "no answer" if states is None else states.get(job_id, ENDED[-1])
            if state == "RUNNING" and row not in running:
                progress.say(f"started: {row.name} (job {job_id})")
            (running.add if state == "RUNNING" else running.discard)(row)
            result = submitit.SlurmJob(folder, job_id).paths.result_pickle
            if result.exists():
                kind, how = submitit.core.utils.pickle_load(result)
                how = how.strip().splitlines()[-1] if kind == "error" else how
            elif state not in ENDED:
                over_since.pop(row, None)
                continue
            elif now - over_since.setdefault(row, now) < (5 if state in WITHOUT_RESULT else RESULT_SECONDS):
                continue
            else:
                how = f"job {job_id} ended without a result: {state}"
            del remaining[row]
            running.discard(row)
            progress.row_failed(row, how) if how else progress.row_done(row)
        progress.refresh(len(running))
        while remaining and not stop.numbers and time.monotonic() - now < pause:
            time.sleep(0.1)
        pause = min(POLL_SECONDS[1], pause * 1.05)
