"""Rows as jobs of a real Slurm, which slurm_on_loopback.sh starts: requeued, timed out, killed, preempted."""

import contextlib
import csv
import os
import signal
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from experiments import train_cifar100 as script
from experiments.shared.run_record import read_rows

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "scripts" / "launch.py"
LOOPBACK = ROOT / "scripts" / "sweeping" / "slurm_on_loopback.sh"
QUICK = "--dataset digits --limit_train 80 --limit_test 40 --batch_size 16 --n_epochs 4 --device cpu --threads 1"
# What a clock decides, and what a continued run says of itself.
TIMES = (
    *("train_seconds", "eval_seconds", "images_per_second", "peak_memory_mib", "started_utc", "finished_utc"),
    *("times_resumed", "git_commit"),
)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """The environment in which Slurm's commands find the Slurm of this test."""
    folder = tmp_path_factory.mktemp("slurm")
    started = subprocess.run([LOOPBACK, "start", folder], capture_output=True, text=True)
    if started.returncode:
        pytest.skip(f"no Slurm here: {started.stderr.strip()}")
    yield {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    subprocess.run([LOOPBACK, "stop", folder], check=True)
    assert not list(folder.glob("*.pid"))


@pytest.fixture
def start(slurm, tmp_path):
    """Start the launcher with --slurm on rows."""
    started = []

    def call(rows: list[str], *flags: str) -> subprocess.Popen:
        (tmp_path / "rows").write_text("\n".join(rows))
        flags = ("--slurm", "--cpus-per-task", "1", "--time", "20", "--retries", "0", *flags)
        with (tmp_path / "rows").open() as file:
            process = subprocess.Popen(
                [sys.executable, LAUNCH, "--logs", tmp_path / "logs", *flags],
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=tmp_path,
                env=slurm,
            )
        started.append(process)
        return process

    yield call
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def wait_for(condition, seconds: float = 60):
    """Return the first true value of `condition()`."""
    until = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < until, "nothing happened"
        time.sleep(0.05)
    return value


def queue(slurm, form: str = "%i %T") -> list[list[str]]:
    done = subprocess.run(["squeue", "--array", "--noheader", f"--format={form}"], env=slurm, capture_output=True)
    return [line.split() for line in done.stdout.decode().splitlines()]


def do_not_wait(slurm) -> None:
    """Let requeued jobs start soon: Slurm would wait for two minutes.

    Not at once: slurmd refuses a job that is launched in the very second in which it ended ("Job credential revoked"),
    and Slurm then counts it as failed.
    """
    late = (datetime.now() + timedelta(seconds=10)).isoformat()
    for job, state, reason, start in queue(slurm, "%i %T %r %S"):
        if (state, reason) == ("PENDING", "BeginTime") and start != "N/A" and start > late:
            subprocess.run(["scontrol", "update", f"jobid={job}", "StartTime=now+2"], env=slurm, check=True)


def log_of(tmp_path: Path, number: int) -> str:
    return "".join(log.read_text() for log in (tmp_path / "logs").glob(f"{number:02}-*.log"))


def outcome(results: Path) -> list[dict[str, str]]:
    rows = sorted(read_rows(results), key=lambda row: row["seed"])
    return [{name: cell for name, cell in row.items() if name not in TIMES} for row in rows]


def test_requeued_timed_out_and_killed_rows_end_as_undisturbed_ones(start, slurm, tmp_path):
    """Row 1 is requeued, row 2 gets the signal of the time limit, row 3 is killed, row 4 fails."""
    results, undisturbed = tmp_path / "r.csv", tmp_path / "undisturbed" / "r.csv"
    rows = [f"--method softsort {QUICK} --seed {seed}".split() for seed in (1, 2, 3)]
    command = f"{sys.executable} {script.__file__} "
    lines = [f"{command}{' '.join(row)} --results {results}" for row in rows]
    process = start([*lines, "ls no-such-file"], "--wait", "--retries", "1")

    def disturb(number: int) -> None:
        job = f"{queue(slurm)[0][0].partition('_')[0]}_{number - 1}"
        if number == 1:
            subprocess.run(["scontrol", "requeue", job], env=slurm, check=True)
        elif number == 2:
            subprocess.run(["scancel", "--signal=USR2", job], env=slurm, check=True)
        else:
            os.kill(process_with("\0--seed\x003\0"), signal.SIGKILL)

    undisturbed_so_far = {1, 2, 3}
    while process.poll() is None:
        for number in list(undisturbed_so_far):
            if "epoch 1/4" in log_of(tmp_path, number):
                undisturbed_so_far.remove(number)
                disturb(number)
        do_not_wait(slurm)
        time.sleep(0.1)
    printed = process.communicate()[0]
    assert process.returncode == 1, printed
    assert "sweep: 3 done, 1 failed, of 4 rows" in printed
    assert "FAILED row 4 (exit status 2)" in printed
    assert "No such file or directory" in printed

    for row in rows:
        assert script.main([*row, "--results", str(undisturbed)]) == 0
    assert outcome(results) == outcome(undisturbed)
    assert [row["times_resumed"] for row in sorted(read_rows(results), key=lambda row: row["seed"])] == ["1"] * 3
    for number in (1, 2, 3):
        assert log_of(tmp_path, number).count("=== ") == 2
        assert "continuing after epoch" in log_of(tmp_path, number)


def process_with(words: str) -> int:
    """The id of the process that has these words, between zero bytes, in its command line."""
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if process.name.isdecimal() and words in (process / "cmdline").read_bytes().decode(errors="replace"):
                return int(process.name)
    raise AssertionError(f"no process has {words!r}")


# Tells each start; ends at once when it is started a second time.
TWICE = """
import pathlib, sys, time
starts = pathlib.Path("starts.txt")
with starts.open("a") as file:
    print("start", file=file)
if len(starts.read_text().split()) < 2:
    time.sleep(100)
"""


def test_a_preempted_row_is_requeued_and_a_cancelled_one_is_named(start, slurm, tmp_path):
    (tmp_path / "twice.py").write_text(TWICE)
    process = start([f"{sys.executable} twice.py", "sleep 101"], "--partition", "main")
    printed = process.communicate()[0]
    assert process.returncode == 0
    assert "2 rows submitted, 0 were in the queue" in printed

    # The same call again submits nothing anew; here it follows.
    following = start([f"{sys.executable} twice.py", "sleep 101"], "--partition", "main", "--wait")
    wait_for(lambda: (tmp_path / "starts.txt").exists() and [state for _, state in queue(slurm)] == ["RUNNING"] * 2)
    urgent = ["srun", "--partition=urgent", "--ntasks=1", "--cpus-per-task=4", "true"]  # the whole node
    subprocess.run(urgent, env=slurm, check=True, timeout=60)
    array = queue(slurm)[0][0].partition("_")[0]
    subprocess.run(["scancel", f"{array}_1"], env=slurm, check=True)
    while following.poll() is None:
        do_not_wait(slurm)
        time.sleep(0.5)
    printed = following.communicate()[0]
    assert following.returncode == 1, printed
    assert f"0 rows submitted, 2 were in the queue: Slurm job {array}" in printed
    assert (tmp_path / "starts.txt").read_text().split() == ["start", "start"]
    assert "sweep: 1 done, 1 failed, of 2 rows" in printed
    assert f"FAILED row 2 (job {array}_1 ended without a result: CANCELLED)" in printed


def test_ctrl_c_leaves_the_rows_to_slurm(start, slurm, tmp_path):
    process = start(["sleep 30"], "--wait")
    wait_for(lambda: any(state == "RUNNING" for _, state in queue(slurm)))
    process.send_signal(signal.SIGINT)
    printed = process.communicate(timeout=30)[0]
    assert process.returncode == 130
    ((job, state),) = queue(slurm)
    assert state == "RUNNING"
    assert f"to end them: scancel {job}" in printed
    subprocess.run(["scancel", job], env=slurm, check=True)
    wait_for(lambda: not queue(slurm))


def test_what_slurm_refuses_is_said_in_its_words(start):
    process = start(["true"], "--partition", "nowhere")
    printed = process.communicate()[0]
    assert process.returncode == 2
    assert "error: Slurm refuses the rows: " in printed
    assert "invalid partition specified: nowhere" in printed
    assert "Traceback" not in printed


def test_without_slurm_it_is_a_sentence(tmp_path):
    done = subprocess.run(
        [sys.executable, LAUNCH, "--slurm", "--logs", tmp_path],
        input="true",
        capture_output=True,
        text=True,
        env={"PATH": str(tmp_path)},
    )
    assert done.returncode == 2
    assert "--slurm needs Slurm's sbatch" in done.stderr


def test_tasks_of_a_job_add_their_rows_to_one_file(start, slurm, tmp_path):
    """Four tasks at once, 15 rows each: none is lost, and the file is whole."""
    program = (
        "import sys; from pathlib import Path; from experiments.shared.run_record import write_row;"
        "[write_row(Path('shared.csv'), {'run_id': sys.argv[1] + str(i), 'seed': i}) for i in range(15)]"
    )
    process = start([f'{sys.executable} -c "{program}" {task}' for task in "abcd"], "--wait")
    printed = process.communicate(timeout=120)[0]
    assert process.returncode == 0, printed
    with (tmp_path / "shared.csv").open(newline="") as file:
        found = {row["run_id"] for row in csv.DictReader(file)}
    assert found == {f"{task}{number}" for task in "abcd" for number in range(15)}
