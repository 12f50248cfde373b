"""The launcher with small commands: retries, GPUs, threads, logs, signals, and what it refuses; slurm.sh."""

import contextlib
import fcntl
import io
import os
import pty
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from experiments.common.cores import usable_cores
from scripts import launch
from tests.processes import wait_for

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "scripts" / "launch.py"
SLURM = ROOT / "scripts" / "slurm.sh"


def python(program: str) -> str:
    """A row that runs a program."""
    return shlex.join([sys.executable, "-c", program])


@pytest.fixture
def start(tmp_path):
    """Start the launcher on rows, its logs in tmp_path / "logs"; what is left of it is killed after the test."""
    with contextlib.ExitStack() as started:

        def call(rows: list[str], *flags: str, stdout: int = subprocess.PIPE, **environment: str) -> subprocess.Popen:
            (tmp_path / "rows").write_text("\n".join(rows))
            with (tmp_path / "rows").open() as file:
                process = subprocess.Popen(
                    [sys.executable, LAUNCH, "--logs", tmp_path / "logs", *flags],
                    stdin=file,
                    stdout=stdout,
                    stderr=subprocess.STDOUT,
                    text=True,
                    cwd=tmp_path,
                    env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
                )
            started.enter_context(process)
            started.callback(process.kill)
            return process

        yield call


@pytest.fixture
def run(start):
    """Run the launcher on rows to its end; return its status and what it printed."""

    def call(rows: list[str], *flags: str, **environment: str) -> tuple[int, str]:
        process = start(rows, *flags, **environment)
        printed = process.communicate()[0]
        return process.returncode, printed

    return call


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


# Rows, logs, the end.


def test_every_row_runs_and_has_a_log(run, tmp_path):
    rows = ["# a comment", python("print('one')"), "", python("print('two')")]
    status, printed = run(rows, "--name", "small")
    assert status == 0
    assert printed.startswith("small: 2 rows; logs in ")
    assert printed.endswith("small: 2 done, of 2 rows\n")
    first, second = sorted((tmp_path / "logs").glob("*.log"))
    assert (first.name, second.name) == ("01-print_one.log", "02-print_two.log")
    header, *lines = first.read_text().splitlines()
    assert "attempt 1 of 2" in header
    assert lines == [f"$ {rows[1]}", "one", "=== exit status 0"]
    assert (
        run([*rows, "true"], "--status")[1]
        == "01-print_one: done\n02-print_two: done\n03-true: waiting\n# 2 of 3 rows done\n"
    )


def test_a_failed_row_is_tried_again_then_named_with_the_end_of_its_log(run, tmp_path):
    """Also one that is killed, one of no program, and one without room for its log; the others go on."""
    failing = python("print('\\n'.join(f'line {i}' for i in range(40))); raise SystemExit(7)")
    second = python("import pathlib, sys; p = pathlib.Path('been'); sys.exit(0 if p.exists() else p.touch() or 1)")
    killed = python("import os; os.kill(os.getpid(), 9)")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "05-true.log").symlink_to("/dev/full" if Path("/dev/full").exists() else tmp_path)
    status, printed = run([failing, second, killed, "no-such-program --flag", "true"], "--jobs", "5")
    assert status == 1
    assert f"FAILED row 1 (exit status 7): {failing}" in printed
    assert "    line 39\n" in printed
    assert "    line 20\n" not in printed
    (log,) = (tmp_path / "logs").glob("01-*.log")
    assert str(log) in printed
    assert log.read_text().count("=== ") == 4  # beginnings and ends
    assert "FAILED row 3 (killed by SIGKILL)" in printed
    assert "FAILED row 4 (it cannot be started: [Errno 2] No such file or directory: 'no-such-program')" in printed
    assert "FAILED row 5 (it cannot be started: [Errno " in printed
    assert printed.endswith("sweep: 1 done, 4 failed, of 5 rows\n")
    (tmp_path / "been").unlink()
    assert run([second], "--retries", "0")[0] == 1
    (tmp_path / "empty.log").touch()
    assert launch.tail(tmp_path / "empty.log") == ["(an empty log)"]


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="Linux's, where it shares time among sessions")
def test_the_sessions_of_the_rows_have_the_niceness_of_the_launcher(tmp_path):
    niced = ["nice", "-n", "3", sys.executable, LAUNCH, "--logs", tmp_path / "logs"]
    done = subprocess.run(niced, input="cat /proc/self/autogroup", capture_output=True, text=True)
    assert done.returncode == 0
    (log,) = (tmp_path / "logs").glob("*.log")
    assert log.read_text().splitlines()[-2].endswith(f" nice {min(os.nice(0) + 3, 19)}")


# Rows at once, GPUs and threads.


def test_at_most_jobs_rows_run_at_once(run, tmp_path):
    program = (
        "import os, pathlib, time; me = pathlib.Path(f'running.{os.getpid()}'); me.touch();"
        "print('at once', len(list(pathlib.Path().glob('running.*')))); time.sleep(.6); me.unlink() #"
    )
    assert run([python(f"{program} {number}") for number in range(6)], "--jobs", "3")[0] == 0
    counts = [int(re.search(r"at once (\d)", log.read_text())[1]) for log in (tmp_path / "logs").glob("*.log")]
    assert (len(counts), max(counts)) == (6, 3)


@pytest.mark.parametrize(
    ("flags", "visible", "expected"),
    [
        ((), "2,5,GPU-ab", ["2", "5", "GPU-ab"]),  # as many at once as there are GPUs
        (("--per-gpu", "2", "--jobs", "4"), "0,1", ["0", "0", "1", "1"]),
    ],
)
def test_rows_share_the_gpus_evenly(run, tmp_path, flags, visible, expected):
    show = "import os, time; print('gpu', os.environ.get('CUDA_VISIBLE_DEVICES')); time.sleep(1.5) #"
    rows = [python(f"{show} {number}") for number in range(len(expected))]
    assert run(rows, *flags, CUDA_VISIBLE_DEVICES=visible)[0] == 0
    logs = (tmp_path / "logs").glob("*.log")
    assert sorted(re.search(r"^gpu (.*)$", log.read_text(), re.MULTILINE)[1] for log in logs) == expected


def test_the_gpus_that_cuda_would_see_or_nvidia_smi_lists(monkeypatch, tmp_path):
    for visible, expected in (("", []), ("-1", []), ("3", ["3"]), ("1, 0,-1,2", ["1", "0"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert launch.visible_gpus() == expected
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launch.visible_gpus() == []
    program(tmp_path / "nvidia-smi", "[ \"$1 $2\" = '--query-gpu=index --format=csv,noheader' ] && printf '0\\n1\\n'")
    assert launch.visible_gpus() == ["0", "1"]


@pytest.mark.parametrize(
    ("flags", "at_once"), [((), 1), (("--row-per-core",), 2), (("--row-per-core", "--jobs", "1"), 1)]
)
def test_cpu_threads_are_divided_among_the_rows_at_once(run, tmp_path, flags, at_once):
    show = python("import os; print('threads', os.environ['OMP_NUM_THREADS'], os.environ['MKL_NUM_THREADS']) #")
    assert run([show, f"{show} --threads 3"], *flags, OMP_NUM_THREADS="77", MKL_NUM_THREADS="77")[0] == 0
    first, second = (log.read_text() for log in sorted((tmp_path / "logs").glob("*.log")))
    share = usable_cores() // min(at_once, usable_cores())
    assert f"threads {share} {share}\n" in first
    assert "threads 77 77\n" in second  # --threads decides there


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
    pid = pid_in(tmp_path)
    process.send_signal(number)
    printed = process.communicate(timeout=30)[0]
    assert process.returncode == status
    assert not alive(pid)
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
def test_a_second_launcher_is_refused_and_kill_9_of_the_first_ends_its_rows(start, run, patient, tmp_path):
    process = start([patient])
    pid = pid_in(tmp_path)
    status, printed = run(["true"])
    assert status == 2
    assert "another launcher runs this sweep" in printed
    assert alive(pid)
    process.kill()
    wait_for(lambda: not alive(pid), seconds=20)  # a row that nobody ends would end of itself after a minute
    assert run([python("print('again')")])[0] == 0  # nothing of it is in the way


# What it prints.


def test_a_terminal_has_a_live_line(start):
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 150, 0, 0))  # a new one has no size
    rows = [python("import time; time.sleep(.5)"), "false"]
    process = start(rows, "--name", "live", "--retries", "0", stdout=slave)
    os.close(slave)
    shown = b""
    with contextlib.suppress(OSError):  # the end, on Linux
        while part := os.read(master, 4096):
            shown += part
    os.close(master)
    assert process.wait() == 1
    assert re.search(rb"live .*0/2 rows, 0 done, 0 failed, 1 running, \S+ passed, \S+ left", shown)
    assert re.search(rb"live .*2/2 rows, 1 done, 1 failed", shown)


def test_dry_run_prints_what_can_be_pasted(run, tmp_path):
    rows = ["# comment", "python a.py --p_k .5 0", "python b.py 'with space'"]
    flags = ("--n_epochs", "5", "--jobs", "2", "--limit_train", "50", "--", "--jobs", "a b")
    status, printed = run(rows, "--dry-run", *flags)
    assert status == 0
    assert printed.splitlines() == [
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
        (["true"], "--jobs 3", "--jobs 3 is more than 2 visible GPUs x --per-gpu 1"),
        (["true"], "--name ../x", "must be of letters"),
        (["true", "echo a\0b"], "", "row 2 must be UTF-8 text without NUL, got 'echo a\\x00b'"),
        (["echo \udcff"], "", "row 1 must be UTF-8 text without NUL, got 'echo \\udcff'"),
    ],
)
def test_refusals_are_one_sentence(monkeypatch, capsys, tmp_path, rows, flags, sentence):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(rows)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert launch.main(["--logs", str(tmp_path / "logs"), *flags.split()]) == 2
    assert not (tmp_path / "logs").exists()
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert sentence in message
    assert message.count("\n") == 1


def test_what_is_refused_or_cut_off_leaves_no_word_of_a_broken_pipe():
    """Who writes the rows meets no closed pipe, `| head` ends what is printed to it silently; no input is no row."""
    many = f'{sys.executable} -c \'for n in range(9999): print("echo", n * "x" if n < 99 else n)\''
    for command, status in (
        (f"{many} | {sys.executable} {LAUNCH} --jobs 0", 2),
        (f"{many} | {sys.executable} {LAUNCH} --dry-run | head -1", 0),
        (f"{sys.executable} {LAUNCH} <&-", 2),
    ):
        done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True)
        assert done.returncode in (status, 141)
        assert done.stderr.count("\n") == (status == 2)
        assert "roken" not in done.stderr


# As a Slurm job array: a stand-in for Slurm runs the tasks here, one after another.

SBATCH = """
printf '%s\\n' "$*" > {folder}/sbatch.txt
echo "Submitted batch job 7"
for word; do case $word in --array=*) tasks=${{word#--array=1-}};; --output=*) output=${{word#--output=}};; esac; done
while [[ $1 != */slurm.sh ]]; do shift; done
for task in $(seq $tasks); do
  SLURM_JOB_ID=7 SLURM_ARRAY_TASK_ID=$task bash "$@" > ${{output/\\%a/$task}} 2>&1 || true
done
"""


def program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def slurm(tmp_path) -> dict[str, str]:
    """The environment in which the stand-ins for Slurm's commands are found."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    program(folder / "sbatch", SBATCH.format(folder=folder))
    program(folder / "scontrol", f"echo $* >> {folder}/scontrol.txt")
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


def test_rows_are_submitted_as_an_array(slurm, tmp_path):
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(SLURM, tmp_path / "scripts")
    rows = [python("print('two  words', '$HOME')"), "ls no-such-file"]
    flags = "a-test --partition gpu --time 2:00:00"
    lines = "\n".join([rows[0], "", "# a comment", rows[1], "# 2 rows\n"])
    done = subprocess.run([script, *flags.split()], input=lines, env=slurm, text=True, capture_output=True)
    assert (done.returncode, done.stdout) == (0, "Submitted batch job 7\n"), done.stderr
    submitted = (tmp_path / "slurm" / "sbatch.txt").read_text().split()
    assert {"--job-name=a-test", "--array=1-2", "--requeue", "--partition", "gpu"} <= set(submitted)
    logs = sorted((tmp_path / "results" / "logs" / "a-test").glob("*.log"))
    first, second = (log.read_text().splitlines() for log in logs)
    assert first[1:] == [f"$ {rows[0]}", "two  words $HOME", "=== exit status 0"]
    assert second[-1] == "=== exit status 2"
    assert sum("attempt" in line for line in second) == 2


def test_a_row_at_its_time_limit_is_stopped_and_requeued(slurm, patient, tmp_path):
    (tmp_path / "rows").write_text(f"{patient}\n")
    task = {**slurm, "SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_ID": "7"}
    process = subprocess.Popen([SLURM, tmp_path / "rows"], env=task, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    pid = pid_in(tmp_path)
    process.send_signal(signal.SIGUSR1)
    printed = process.communicate(timeout=30)[0]
    assert process.returncode == 0
    assert not alive(pid)
    assert (tmp_path / "slurm" / "scontrol.txt").read_text() == "requeue 7\n"
    assert printed.count("===") == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "error: name the sweep first"),
        (["--time", "1"], "error: name the sweep first"),
        (["a-test"], "error: sbatch is not on PATH"),
    ],
)
def test_an_array_that_cannot_be_submitted_gets_a_sentence(words, sentence):
    done = subprocess.run([SLURM, *words], input="true", text=True, capture_output=True)
    assert done.returncode == 2
    assert done.stderr.startswith(sentence)
    assert done.stderr.count("\n") == 1
