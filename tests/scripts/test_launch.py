"""The launcher with small commands: order, retries, GPUs, threads, logs, signals, and what it refuses."""

import fcntl
import io
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from experiments import train_cifar100
from experiments.shared.cores import usable_cores
from scripts import launch
from scripts.sweeping import sweep
from tests.experiments.test_train_cifar100 import tiny_network

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "scripts" / "launch.py"


def python(program: str) -> str:
    """A row that runs a program."""
    return shlex.join([sys.executable, "-c", program])


@pytest.fixture
def run(tmp_path):
    """Run the launcher on rows to its end, its logs in tmp_path / "logs"."""

    def call(rows: list[str], *flags: str, **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, LAUNCH, "--logs", tmp_path / "logs", *flags],
            input="\n".join(rows),
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
        )

    return call


@pytest.fixture
def start(tmp_path):
    """Start the launcher on rows; what is left of it is killed after the test."""
    started = []

    def call(rows: list[str], *flags: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, LAUNCH, "--logs", tmp_path / "logs", *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
        process.stdin.write("\n".join(rows))
        process.stdin.close()
        process.stdin = None
        started.append(process)
        return process

    yield call
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def wait_for(condition, seconds: float = 30):
    """Return the first true value of `condition()`."""
    until = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < until, "nothing happened"
        time.sleep(0.05)
    return value


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


# Rows, logs, the end.


def test_every_row_runs_and_has_a_log(run, tmp_path):
    done = run(["# a comment", python("print('one')"), "", python("print('two')")], "--name", "small")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("small: 2 rows, 0 already recorded; logs in ")
    assert done.stdout.endswith("small: 2 done, of 2 rows\n")
    first, second = sorted((tmp_path / "logs").glob("*.log"))
    assert (first.name, second.name) == ("01-print_one.log", "02-print_two.log")
    header, command, output = first.read_text().splitlines()
    assert "attempt 1 of 2" in header
    assert command == "$ " + python("print('one')")
    assert output == "one"


def test_a_failed_row_is_retried_then_named_with_the_end_of_its_log(run, tmp_path):
    failing = python("print('\\n'.join(f'line {i}' for i in range(40))); raise SystemExit(7)")
    done = run([failing, python("print('fine')")], "--retries", "1", "--jobs", "2")
    assert done.returncode == 1
    assert f"FAILED row 1 (exit status 7): {failing}" in done.stdout
    assert "    line 39\n" in done.stdout
    assert "    line 20\n" not in done.stdout
    (log,) = (tmp_path / "logs").glob("01-*.log")
    assert str(log) in done.stdout
    assert log.read_text().count("=== ") == 2
    assert done.stdout.endswith("sweep: 1 done, 1 failed, of 2 rows\n")


def test_a_row_that_succeeds_at_its_second_attempt_is_done(run, tmp_path):
    program = "import pathlib, sys; p = pathlib.Path('been'); sys.exit(0 if p.exists() else p.touch() or 1)"
    assert run([python(program)], "--retries", "1").returncode == 0
    (tmp_path / "been").unlink()
    assert run([python(program)], "--retries", "0").returncode == 1


def test_a_killed_row_and_a_program_that_is_not_there_are_failures(run):
    killed = python("import os; os.kill(os.getpid(), 9)")
    done = run([killed, "no-such-program --flag"], "--retries", "0")
    assert done.returncode == 1
    assert "FAILED row 1 (killed by SIGKILL)" in done.stdout
    assert "FAILED row 2 (it cannot be started: [Errno 2] No such file or directory: 'no-such-program')" in done.stdout
    assert "No such file" in done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux's")
def test_a_row_without_room_for_its_log_fails_and_the_others_go_on(run, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "01-true.log").symlink_to("/dev/full")
    (tmp_path / "logs" / "03-empty.log").touch()
    done = run(["true", python("print('fine')")], "--retries", "0")
    assert (done.returncode, done.stderr) == (1, "")
    assert "FAILED row 1 (it cannot be started: [Errno 28] No space left on device): true" in done.stdout
    assert done.stdout.endswith("sweep: 1 done, 1 failed, of 2 rows\n")
    assert sweep.tail(tmp_path / "logs" / "03-empty.log") == ["(an empty log)"]


def test_without_standard_input_there_is_no_row(tmp_path):
    closed = ["sh", "-c", '"$@" <&-', "sh", sys.executable, LAUNCH, "--logs", tmp_path / "logs"]
    done = subprocess.run(closed, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: there is no row: ")


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="Linux's, where it shares time among sessions")
def test_the_sessions_of_the_rows_have_the_niceness_of_the_launcher(tmp_path):
    niced = ["nice", "-n", "3", sys.executable, LAUNCH, "--logs", tmp_path / "logs"]
    done = subprocess.run(niced, input="cat /proc/self/autogroup", capture_output=True, text=True)
    assert done.returncode == 0
    (log,) = (tmp_path / "logs").glob("*.log")
    assert log.read_text().splitlines()[-1].endswith(f" nice {min(os.nice(0) + 3, 19)}")


def test_at_most_jobs_rows_run_at_once(run, tmp_path):
    program = (
        "import os, pathlib, time; me = pathlib.Path(f'running.{os.getpid()}'); me.touch();"
        "print('at once', len(list(pathlib.Path().glob('running.*')))); time.sleep(.6); me.unlink() #"
    )
    done = run([python(f"{program} {number}") for number in range(6)], "--jobs", "3")
    assert done.returncode == 0
    counts = [int(re.search(r"at once (\d)", log.read_text())[1]) for log in (tmp_path / "logs").glob("*.log")]
    assert (len(counts), max(counts)) == (6, 3)


# GPUs and threads.


def gpus_seen(tmp_path: Path) -> list[str]:
    logs = sorted((tmp_path / "logs").glob("*.log"))
    return [re.search(r"^gpu (.*)$", log.read_text(), re.MULTILINE)[1] for log in logs]


SHOW_GPU = "import os, time; print('gpu', os.environ.get('CUDA_VISIBLE_DEVICES')); time.sleep(1.5) #"


def test_each_row_has_a_gpu_of_its_own(run, tmp_path):
    done = run([python(f"{SHOW_GPU} {number}") for number in range(3)], CUDA_VISIBLE_DEVICES="2,5,GPU-ab")
    assert done.returncode == 0
    assert sorted(gpus_seen(tmp_path)) == ["2", "5", "GPU-ab"]  # --jobs: as many as there are GPUs


def test_rows_share_gpus_evenly_with_per_gpu(run, tmp_path):
    rows = [python(f"{SHOW_GPU} {number}") for number in range(4)]
    assert run(rows, "--per-gpu", "2", "--jobs", "4", CUDA_VISIBLE_DEVICES="0,1").returncode == 0
    assert sorted(gpus_seen(tmp_path)) == ["0", "0", "1", "1"]


def test_more_jobs_than_gpus_are_refused(run):
    done = run(["true"], "--jobs", "3", CUDA_VISIBLE_DEVICES="0,1")
    assert done.returncode == 2
    assert "--jobs 3 is more than 2 visible GPUs x --per-gpu 1" in done.stderr


def test_the_gpus_that_cuda_would_see(monkeypatch):
    for visible, expected in (("", []), ("-1", []), ("3", ["3"]), ("1, 0,-1,2", ["1", "0"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert launch.visible_gpus() == expected


def test_without_cuda_visible_devices_nvidia_smi_lists_the_gpus(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launch.visible_gpus() == []
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\n[ \"$1 $2\" = '--query-gpu=index --format=csv,noheader' ] && printf '0\\n1\\n'\n")
    program.chmod(0o755)
    assert launch.visible_gpus() == ["0", "1"]


def test_cpu_threads_are_divided_among_the_jobs(run, tmp_path):
    show = "import os; print('threads', os.environ.get('OMP_NUM_THREADS'), os.environ.get('MKL_NUM_THREADS')) #"
    rows = [python(show), f"{python(show)} --threads 3"]
    assert run(rows, "--jobs", "2", OMP_NUM_THREADS="77", MKL_NUM_THREADS="77").returncode == 0
    first, second = (log.read_text() for log in sorted((tmp_path / "logs").glob("*.log")))
    share = max(1, usable_cores() // 2)
    assert f"threads {share} {share}\n" in first
    assert "threads 77 77\n" in second  # --threads decides there


@pytest.mark.parametrize(
    ("flags", "at_once"), [((), 1), (("--row-per-core",), 2), (("--row-per-core", "--jobs", "1"), 1)]
)
def test_rows_at_once(monkeypatch, tmp_path, flags, at_once):
    """Without GPUs one, or one on each core, but no more than there are; --jobs decides."""
    monkeypatch.setattr(launch, "visible_gpus", list)
    monkeypatch.setattr(launch, "usable_cores", lambda: 4)
    monkeypatch.setattr(sys, "stdin", io.StringIO("true 1\ntrue 2\n"))
    given = []
    monkeypatch.setattr(launch, "run_here", lambda rows, jobs, *_: given.append(jobs))
    launch.launch(["--logs", str(tmp_path), *flags])
    assert given == [at_once]


# Signals.

# Ends at Ctrl-C with a trace, as the training scripts do, after half a second; with an argument, not at the first.
PATIENT = """
import os, pathlib, signal, sys, time
if sys.argv[1:]:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
pathlib.Path("pid.tmp").write_text(str(os.getpid()))
os.rename("pid.tmp", "pid")
try:
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.5)
    pathlib.Path("saved").touch()
    sys.exit(130)
"""


@pytest.fixture
def patient(tmp_path) -> str:
    """A row that takes a minute and tells its process id."""
    (tmp_path / "patient.py").write_text(PATIENT)
    return f"{sys.executable} patient.py"


def pid_in(folder: Path) -> int:
    wait_for((folder / "pid").exists)
    return int((folder / "pid").read_text())


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_are_passed_on_and_waited_for(start, patient, tmp_path, number, status):
    process = start([patient, python("open('second', 'w')")], "--jobs", "1")
    pid_in(tmp_path)
    process.send_signal(number)
    printed = process.communicate(timeout=30)[0]
    assert process.returncode == status
    assert (tmp_path / "saved").exists()
    assert not (tmp_path / "second").exists()  # no row is started any more
    assert "SIGINT to 1 running rows" in printed
    assert "2 left, of 2 rows" in printed
    assert "the same call continues" in printed
    assert "FAILED" not in printed


def test_the_second_ctrl_c_is_harder(start, patient, tmp_path):
    process = start([f"{patient} stubborn"])
    pid = pid_in(tmp_path)
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None
    assert alive(pid)
    process.send_signal(signal.SIGINT)
    printed = process.communicate(timeout=30)[0]
    assert process.returncode == 130
    assert "SIGTERM to 1 running rows" in printed
    assert not alive(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_kill_9_of_the_launcher_ends_its_rows(start, patient, tmp_path):
    process = start([patient])
    pid = pid_in(tmp_path)
    process.kill()
    wait_for(lambda: not alive(pid))
    # Nothing of it is in the way of a second call.
    assert start([python("print('again')")]).wait(30) == 0


def test_a_second_launcher_of_the_sweep_is_refused(start, run, patient, tmp_path):
    start([patient])
    pid_in(tmp_path)
    done = run(["true"])
    assert done.returncode == 2
    assert "another launcher runs this sweep" in done.stderr


# What it prints.


def test_a_terminal_has_a_live_line(tmp_path):
    rows = tmp_path / "rows.txt"
    rows.write_text(python("import time; time.sleep(.5)") + "\nfalse\n")
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 150, 0, 0))  # a new one has no size
    with rows.open() as file:
        process = subprocess.Popen(
            [sys.executable, LAUNCH, "--logs", tmp_path / "logs", "--name", "live", "--retries", "0"],
            stdin=file,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
    os.close(slave)
    shown = b""
    try:
        while part := os.read(master, 4096):
            shown += part
    except OSError:  # the end, on Linux
        pass
    os.close(master)
    assert process.wait() == 1
    assert re.search(rb"live .*0/2 rows, 0 done, 0 failed, 1 running, \S+ passed, \S+ left", shown)
    assert re.search(rb"live .*2/2 rows, 1 done, 1 failed", shown)


def test_dry_run_prints_what_can_be_pasted(run, tmp_path):
    rows = ["# comment", "python a.py --p_k .5 0", "python b.py 'with space'"]
    flags = ("--n_epochs", "5", "--jobs", "2", "--limit_train", "50", "--", "--jobs", "a b")
    done = run(rows, "--dry-run", *flags)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "python a.py --p_k .5 0 --n_epochs 5 --limit_train 50 --jobs 'a b'",
        "python b.py 'with space' --n_epochs 5 --limit_train 50 --jobs 'a b'",
        "# 2 rows",
    ]
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("rows", "flags", "sentence"),
    [
        ([], "", "there is no row"),
        (["# nothing"], "", "there is no row"),
        (["echo 1 | cat"], "", "row 1 needs a shell for '|'"),
        (["true", "echo 'open"], "", "row 2 cannot be split into words"),
        (["true", "false", "true"], "", "rows 1 and 3 are the same command"),
        (["true"], "--jobs 0", "must be a whole number of at least 1, got '0'"),
        (["true"], "--jobs", "expected one argument"),
        (["true"], "--name ../x", "must be of letters"),
        (["true"], "--wait", "--wait goes with --slurm"),
        (["true"], "--slurm --jobs 2", "--jobs goes without --slurm"),
        (["true", "echo a\0b"], "", "row 2 must be UTF-8 text without NUL, got 'echo a\\x00b'"),
        (["echo \udcff"], "", "row 1 must be UTF-8 text without NUL, got 'echo \\udcff'"),
        (["true"], "--slurm --time soon", "must be minutes, H:M:S or D-H:M:S, got 'soon'"),
    ],
)
def test_refusals_are_one_sentence(monkeypatch, capsys, tmp_path, rows, flags, sentence):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(rows)))
    assert launch.main(["--logs", str(tmp_path / "logs"), *flags.split()]) == 2
    assert not (tmp_path / "logs").exists()
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert sentence in message
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 90), ("2:30", 3), ("2:00:00", 120), ("1-0", 1440), ("1-12:30", 2190), ("0-00:00:01", 1)],
)
def test_time_limits_as_slurm_writes_them(text, expected):
    assert launch.minutes(text) == expected


# The training script.


def test_recorded_rows_are_skipped_before_they_start(run, tmp_path, monkeypatch):
    monkeypatch.setattr(train_cifar100, "resnet_cifar", tiny_network)
    quick = "--dataset digits --limit_train 80 --limit_test 40 --batch_size 16 --n_epochs 1 --device cpu --threads 1"
    flags = f"--method softsort {quick} --results {tmp_path / 'r.csv'}"
    assert train_cifar100.main(flags.split()) == 0

    # The same settings written in another way, with --force, another seed, a wrong flag, another program.
    row = f"{sys.executable} {train_cifar100.__file__} {flags}"
    lines = [f"{row} --p_k .2 .2 .2 .2 .2", f"{row} --force", f"{row} --seed 1", f"{row} --seed x", "ls"]
    assert sweep.recorded_rows(sweep.read_rows(lines, [], tmp_path)) == {1}

    done = run([row, python("print('not recorded')")])
    assert done.returncode == 0
    assert done.stdout.startswith("sweep: 2 rows, 1 already recorded")
    assert "started: 01" not in done.stdout
    assert done.stdout.endswith("sweep: 1 done, 1 already recorded, of 2 rows\n")
