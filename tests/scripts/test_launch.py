"""The launcher with small commands: retries, GPUs, threads, logs, signals, and what it refuses; slurm.sh."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.common.cores import HUGE_PAGES, usable_cores
from scripts import launch
from tests.processes import wait_for

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "scripts" / "launch.py"
SLURM = ROOT / "scripts" / "slurm.sh"


def python(program: str) -> str:
    """A command line that runs a program."""
    return shlex.join([sys.executable, "-c", program])


@pytest.fixture
def start(tmp_path):
    """Start the launcher on command lines, its logs in tmp_path / "logs"; it is killed after the test."""
    with contextlib.ExitStack() as started:

        def call(commands: list[str], *flags: str, **environment: str) -> subprocess.Popen:
            (tmp_path / "commands").write_text("\n".join(commands))
            words = [sys.executable, LAUNCH, "--logs", tmp_path / "logs", *flags]
            where = {"cwd": tmp_path, "env": {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment}}
            streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            with (tmp_path / "commands").open() as lines:
                process = started.enter_context(subprocess.Popen(words, stdin=lines, **streams, **where))
            started.callback(process.kill)
            return process

        yield call


@pytest.fixture
def run(start):
    """Run the launcher on command lines to its end; return its status and what it printed."""

    def call(commands: list[str], *flags: str, **environment: str) -> tuple[int, str]:
        process = start(commands, *flags, **environment)
        printed = process.communicate()[0]
        return process.returncode, printed

    return call


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def program(path: Path, script: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


def test_a_run_that_any_signal_ends_is_named_and_the_others_go_on(run):
    numbers = [signal.SIGKILL, signal.SIGRTMIN + 6, signal.SIGRTMAX]
    dying = [python(f"import os; os.kill(os.getpid(), {int(number)})") for number in numbers]
    status, printed = run([*dying, python("print('one')")], "--name", "four")
    assert status == 1
    for number in numbers:
        name = getattr(number, "name", f"signal {int(number)}")
        assert f"FAILED (killed by {name})" in printed
    assert printed.endswith("four: 1 of 4 runs done, 3 failed\n")


def test_signals_end_the_process_again_when_the_runs_have_ended(tmp_path):
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    assert launch.launch(["true"], ["--logs", str(tmp_path)]) == 0
    assert [signal.getsignal(number) for number in numbers] == before


def test_every_run_has_a_log_and_status_is_that_of_the_command_that_ran(run, tmp_path):
    commands = ["# a comment", python("print('one')"), "", python("print('two')")]
    status, printed = run(commands, "--name", "small")
    assert status == 0
    assert printed.endswith("small: 2 of 2 runs done, 0 failed\n")
    first, second = sorted((tmp_path / "logs").glob("*.log"))
    assert (first.name, second.name) == ("01-print_one.log", "02-print_two.log")
    header, *lines = first.read_text().splitlines()
    assert "attempt 1 of 2" in header
    assert [line for line in lines if line] == [f"$ {commands[1]}", "one", "=== exit status 0"]
    shown = run([*commands, "true"], "--status")[1]
    assert shown == "01-print_one: done\n02-print_two: done\n03-true: waiting\n# 2 done of 3 runs\n"
    assert "its log is of another command" in run([f"{commands[1]} --flag"], "--status")[1]
    shown = run([commands[3], "true", commands[1]], "--status")[1]  # in another order, with one between
    assert shown == "01-print_two: done\n02-true: waiting\n03-print_one: done\n# 2 done of 3 runs\n"


@pytest.mark.parametrize("status", [0, 3])
def test_a_run_whose_output_does_not_end_its_line_has_ended_all_the_same(run, status):
    command = python(f"import sys; print(50, end=''); sys.exit({status})")
    run([command], "--name", "small")
    shown = run([command], "--status")[1]
    assert shown.splitlines()[0].endswith(["done", "", "", "=== exit status 3"][status])
    assert f"# {1 - min(status, 1)} done of 1 runs" in shown


def test_a_failed_run_is_tried_again_then_named_with_the_end_of_its_log(run, tmp_path):
    """Also one that is killed, one of no program, and those whose logs are a folder and a pipe; the others go on."""
    failing = python("print('\\n'.join(f'line {i}' for i in range(40))); raise SystemExit(7)")
    second = python("import pathlib, sys; p = pathlib.Path('been'); sys.exit(0 if p.exists() else p.touch() or 1)")
    killed = python("import os; os.kill(os.getpid(), 9)")
    (tmp_path / "logs" / "05-true.log").mkdir(parents=True)
    os.mkfifo(tmp_path / "logs" / "06-false.log")
    status, printed = run([failing, second, killed, "no-such-program --flag", "true", "false"], "--jobs", "6")
    assert status == 1
    assert f"FAILED (exit status 7): {failing}" in printed
    assert "    line 39\n" in printed
    assert "    line 20\n" not in printed
    (log,) = (tmp_path / "logs").glob("01-*.log")
    assert str(log) in printed
    assert log.read_text().count("=== ") == 4  # beginnings and ends
    assert "FAILED (killed by SIGKILL)" in printed
    assert "FAILED (it cannot be started: [Errno 2] No such file or directory: 'no-such-program')" in printed
    assert printed.count("it cannot be started") == 9
    assert "06-false.log is a pipe" in printed
    assert "sweep: 1 of 6 runs done, 5 failed" in printed


def until(condition: str) -> str:
    """A statement of one line, as a command line is one, that waits for a condition."""
    return f"[time.sleep(.005) for _ in iter(lambda: bool({condition}), True)]"


def together(number: int, show: str) -> str:
    """A command line that shows an expression once so many of its kind have begun, so that they run at once."""
    begin = "import os, pathlib, time; here = pathlib.Path(); (here / f'begun.{os.getpid()}').touch()"
    every = until(f"len([*here.glob('begun.*')]) >= {number}")
    return python(f"{begin}; {every}; print({show}) #")


def test_at_most_jobs_runs_at_once(run):
    """Three must run at once for the first to end; the launcher starts no fourth before."""
    commands = [f"{together(3, 'os.getpid()')} {number}" for number in range(6)]
    status, printed = run(commands, "--jobs", "3")
    events = re.findall("^(started|done)", printed, re.MULTILINE)
    running = [events[:place].count("started") - events[:place].count("done") for place in range(len(events) + 1)]
    assert (status, max(running), running[-1]) == (0, 3, 0)


@pytest.mark.parametrize(
    ("flags", "visible", "expected"),
    [
        ("", "2,5,GPU-ab", ["2", "5", "GPU-ab"]),  # as many at once as there are GPUs
        ("--per-gpu 2 --jobs 4", "0,1", ["0", "0", "1", "1"]),
    ],
)
def test_runs_share_the_gpus_evenly(run, tmp_path, flags, visible, expected):
    show = together(len(expected), "'gpu', os.environ.get('CUDA_VISIBLE_DEVICES')")
    commands = [f"{show} {number}" for number in range(len(expected))]
    assert run(commands, *flags.split(), CUDA_VISIBLE_DEVICES=visible)[0] == 0
    logs = (tmp_path / "logs").glob("*.log")
    assert sorted(re.search(r"^gpu (.*)$", log.read_text(), re.MULTILINE)[1] for log in logs) == expected


@pytest.mark.parametrize(
    ("smi", "visible", "expected"),
    [
        ("printf '0\\n1\\n'", None, ["0", "1"]),
        ("exit 9", None, []),
        (None, None, []),
        ("printf 0", "1, 0,-1,2", ["1", "0"]),  # CUDA stops reading at the first number below 0
        ("exec /bin/sleep 600", None, "nvidia-smi does not answer; name the GPUs by CUDA_VISIBLE_DEVICES"),
    ],
)
def test_the_gpus_are_those_of_cuda_or_of_nvidia_smi_which_may_hang(tmp_path, monkeypatch, smi, visible, expected):
    monkeypatch.setattr(launch, "SMI_SECONDS", 2)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if smi:
        program(tmp_path / "nvidia-smi", smi)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            launch.visible_gpus()
    else:
        assert launch.visible_gpus() == expected


@pytest.mark.parametrize(
    ("flags", "at_once"), [((), 1), (("--run-per-core",), 2), (("--run-per-core", "--jobs", "1"), 1)]
)
def test_cpu_threads_are_divided_among_the_runs_at_once(run, tmp_path, flags, at_once):
    show = python("import os; print('threads', os.environ['OMP_NUM_THREADS'], os.environ['MKL_NUM_THREADS']) #")
    assert run([show, f"{show} --threads 3"], *flags, OMP_NUM_THREADS="77", MKL_NUM_THREADS="77")[0] == 0
    first, second = (log.read_text() for log in sorted((tmp_path / "logs").glob("*.log")))
    share = usable_cores() // min(at_once, usable_cores())
    assert f"threads {share} {share}\n" in first
    assert "threads 77 77\n" in second  # --threads decides there


def test_runs_get_huge_pages_unless_the_user_has_settings_of_his_own(run, tmp_path, monkeypatch):
    show = python("import os; print('pages', os.environ['GLIBC_TUNABLES'], os.environ['THP_MEM_ALLOC_ENABLE'])")
    for name in HUGE_PAGES:
        monkeypatch.delenv(name, raising=False)
    assert run([show])[0] == 0
    assert run([show], THP_MEM_ALLOC_ENABLE="0")[0] == 0
    (log,) = (tmp_path / "logs").glob("*.log")
    ours, own = (line for line in log.read_text().splitlines() if line.startswith("pages"))
    assert ours == "pages glibc.malloc.hugetlb=1 1"
    assert own == "pages glibc.malloc.hugetlb=1 0"


# Has a child of its own, as torchrun and data loaders have. Ends at Ctrl-C when it has saved something, which it does
# once it may; with an argument, not at the first Ctrl-C.
PATIENT = """
import os, pathlib, signal, subprocess, sys, time
if sys.argv[1:]:
    signal.signal(signal.SIGINT, lambda *_: pathlib.Path("ignored").touch())
child = subprocess.Popen(["sleep", "600"])
pathlib.Path("pids.tmp").write_text(f"{os.getpid()} {child.pid}")
os.rename("pids.tmp", "pids")
try:
    while True:
        signal.pause()
except KeyboardInterrupt:
    while not pathlib.Path("may_end").exists():
        time.sleep(0.005)
    pathlib.Path("saved").touch()
    sys.exit(130)
"""


@pytest.fixture
def patient(tmp_path) -> str:
    """A run that does not end and tells the ids of its process and of its child's."""
    (tmp_path / "patient.py").write_text(PATIENT)
    return f"{sys.executable} patient.py"


def pids_in(folder: Path) -> list[int]:
    wait_for((folder / "pids").exists)
    return [int(pid) for pid in (folder / "pids").read_text().split()]


@pytest.fixture(params=[signal.SIG_DFL])
def hang_up(request):
    """What SIGHUP does to the processes that a test starts."""
    before = signal.signal(signal.SIGHUP, request.param)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_ctrl_c_and_signals_are_passed_on_to_a_run_and_its_child_and_waited_for(
    start, patient, tmp_path, number, status, hang_up
):
    process = start([patient, python("open('second', 'w')")], "--jobs", "1")
    pid, child = pids_in(tmp_path)
    process.send_signal(number)
    wait_for(lambda: not alive(child), seconds=20)
    if number == signal.SIGINT:  # what saves is waited for
        assert (alive(pid), process.poll()) == (True, None)
        (tmp_path / "may_end").touch()
    printed = process.communicate(timeout=20)[0]
    assert process.returncode == status
    assert not alive(pid)
    assert (tmp_path / "saved").exists() == (number == signal.SIGINT)
    assert not (tmp_path / "second").exists()  # no run is started any more
    assert f"{number.name} to 1 runs" in printed
    assert "0 of 2 runs done by this call; stopped: the same call continues" in printed
    assert "FAILED" not in printed


@pytest.mark.parametrize("hang_up", [signal.SIG_IGN], indirect=True)
def test_under_nohup_a_closed_terminal_ends_nothing(start, patient, tmp_path, hang_up):
    process = start([patient, python("open('second', 'w')")], "--jobs", "1")
    pid, _ = pids_in(tmp_path)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert (alive(pid), process.poll()) == (True, None)
    process.send_signal(signal.SIGTERM)
    assert "SIGTERM to 1 runs" in process.communicate(timeout=20)[0]


def test_runs_are_not_left_where_nobody_reads_the_output_any_more(start, patient, tmp_path):
    closed = until("pathlib.Path('closed').exists()")
    waits = python(f"import pathlib, time; {closed}")
    process = start([waits, python("open('second', 'w')"), patient], "--jobs", "1")
    process.stdout.readline()
    process.stdout.close()
    (tmp_path / "closed").touch()
    pid, child = pids_in(tmp_path)
    assert (tmp_path / "second").exists()
    (tmp_path / "may_end").touch()
    process.send_signal(signal.SIGINT)
    assert (process.wait(timeout=20), alive(pid), alive(child)) == (130, False, False)


def test_the_second_ctrl_c_kills(start, patient, tmp_path):
    process = start([f"{patient} stubborn"])
    pid, child = pids_in(tmp_path)
    process.send_signal(signal.SIGINT)
    wait_for((tmp_path / "ignored").exists, seconds=20)
    assert (alive(pid), process.poll()) == (True, None)
    process.send_signal(signal.SIGINT)
    printed = process.communicate(timeout=20)[0]
    assert process.returncode == 130
    assert "SIGKILL to 1 runs" in printed
    assert not alive(pid)
    wait_for(lambda: not alive(child), seconds=20)


def test_a_run_that_outlives_its_killed_launcher_holds_the_sweep(start, run, patient, tmp_path):
    process = start([patient])
    pid, child = pids_in(tmp_path)
    assert run(["true"])[0] == 2
    process.kill()
    process.wait()
    status, printed = run(["true"])
    assert (status, alive(pid)) == (2, True)
    assert "another launcher, or a run that outlived one, holds" in printed
    os.killpg(pid, signal.SIGKILL)
    wait_for(lambda: not alive(pid) and not alive(child), seconds=20)
    assert run([python("print('again')")])[0] == 0  # nothing of it is in the way


def test_dry_run_prints_what_can_be_pasted(run, tmp_path):
    commands = ["# comment", "python a.py --p_k .5 0", "python b.py 'with space'"]
    flags = ("--n_epochs", "5", "--jobs", "2", "--limit_train", "50", "--", "--jobs", "a b")
    status, printed = run(commands, "--dry-run", *flags)
    assert status == 0
    assert printed.splitlines() == [
        "python a.py --p_k .5 0 --n_epochs 5 --limit_train 50 --jobs 'a b'",
        "python b.py 'with space' --n_epochs 5 --limit_train 50 --jobs 'a b'",
        "# 2 runs",
    ]
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("commands", "flags", "sentence"),
    [
        (["# nothing"], "", "there is no command line"),
        (["true", "echo 'open"], "", "No closing quotation"),
        (["true", "false", "true"], "", "must be there once"),
        (["true"], "--jobs 0", "must be at least 1"),
        (["true"], "--jobs", "expected one argument"),
        (["true"], "--jobs 3", "fit 2 GPUs"),
        (["true", "echo a\0b"], "", "without NUL"),
    ],
)
def test_refusals_are_a_sentence_before_anything_starts(run, tmp_path, commands, flags, sentence):
    status, printed = run(commands, *flags.split(), CUDA_VISIBLE_DEVICES="0,1")
    assert (status, "Traceback" in printed) == (2, False)
    assert sentence in printed.splitlines()[-1]
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(("line", "extra"), [("echo caf\udce9", []), ("echo", ["a\nb"])])
def test_what_a_log_cannot_hold_on_one_line_is_refused(line, extra, tmp_path):
    with pytest.raises(ValueError, match="a line of UTF-8"):
        launch.runs_of(["true", line], extra, tmp_path)


def test_lines_that_look_like_commands_start_nothing(run):
    commands = [python("print('$ pip install x'); print('row: r')")]
    assert "1 of 1 runs done (1 trained, 0 skipped)" in run(commands)[1]
    assert "# 1 done of 1 runs" in run(commands, "--status")[1]


# As a Slurm job array: a stand-in for Slurm runs the tasks here, one after another, and keeps their statuses.
SBATCH = """
printf '%s\\n' "$*" > {folder}/sbatch.txt
for word; do case $word in --array=*) tasks=${{word#--array=1-}};; --output=*) output=${{word#--output=}};; esac; done
while [[ $1 != */slurm.sh ]]; do shift; done
for task in $(seq $tasks); do
  SLURM_JOB_ID=7 SLURM_ARRAY_TASK_ID=$task bash "$@" > ${{output/\\%a/$task}} 2>&1
  echo $? >> {folder}/statuses.txt
done
"""


@pytest.fixture
def slurm(tmp_path) -> dict[str, str]:
    """The environment in which the stand-ins for Slurm's commands are found."""
    program(tmp_path / "slurm" / "sbatch", SBATCH.format(folder=tmp_path / "slurm"))
    program(tmp_path / "slurm" / "scontrol", f"echo $* >> {tmp_path}/slurm/scontrol.txt")
    return {**os.environ, "PATH": f"{tmp_path / 'slurm'}:{os.environ['PATH']}"}


@pytest.mark.parametrize("inherited", [{}, {"SLURM_ARRAY_TASK_ID": "2", "SLURM_JOB_ID": "5"}])
def test_rows_are_submitted_as_an_array_whose_tasks_have_the_statuses_of_the_runs(slurm, tmp_path, inherited):
    """A call from within a task of another array inherits its variables, and is no task of this one."""
    program(tmp_path / "scripts" / "slurm.sh", SLURM.read_text())
    commands = [python("print('two  words', '$HOME')"), "ls no-such-file", "true  # with a comment"]
    lines = "\r\n".join([commands[0], "", "\t# a comment", *commands[1:], "# 3 runs\n"])
    words = [tmp_path / "scripts" / "slurm.sh", "a-test", "--partition", "gpu"]
    done = subprocess.run(
        words, input=lines, env={**slurm, **inherited, "CDPATH": str(ROOT)}, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    submitted = (tmp_path / "slurm" / "sbatch.txt").read_text().split()
    assert {"--job-name=a-test", "--array=1-3", "--requeue", "--partition", "gpu"} <= set(submitted)
    logs = sorted((tmp_path / "results" / "logs" / "a-test").glob("*.log"))
    time, *rest = logs[0].read_text().split("\n")
    assert re.fullmatch(r"=== \S+Z task 1", time)
    assert rest == [f"$ {commands[0]}", "two  words $HOME", "", "=== exit status 0", ""]
    assert logs[1].read_text().splitlines()[-1] == "=== exit status 2"
    assert logs[2].read_text().split("\n")[1:] == [f"$ {commands[2]}", "", "=== exit status 0", ""]
    assert (tmp_path / "slurm" / "statuses.txt").read_text().split() == ["0", "2", "0"]


def test_a_run_at_its_time_limit_is_queued_again(slurm, patient, tmp_path):
    (tmp_path / "rows").write_text(f"{patient}\n")
    task = {**slurm, "SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_ID": "7"}
    process = subprocess.Popen([SLURM, "--task", tmp_path / "rows"], env=task, cwd=tmp_path)
    pids = pids_in(tmp_path)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=20) != 0
    assert (tmp_path / "slurm" / "scontrol.txt").read_text() == "requeue 7\n"
    for pid in pids:  # as Slurm does
        os.kill(pid, signal.SIGKILL)


def test_without_slurm_there_is_a_sentence_and_no_file(tmp_path):
    """The machine of the tests may have Slurm: its PATH has the programs that slurm.sh needs, and no sbatch."""
    program(tmp_path / "scripts" / "slurm.sh", SLURM.read_text())
    (tmp_path / "bin").mkdir()
    for name in ("bash", "env", "dirname", "readlink", "mkdir", "mktemp", "tr", "grep", "wc"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    words = [tmp_path / "scripts" / "slurm.sh", "a-test", "--partition", "gpu"]
    done = subprocess.run(words, input="true\n", env={"PATH": str(tmp_path / "bin")}, text=True, capture_output=True)
    assert done.returncode == 2
    assert done.stderr == (
        "error: there is no sbatch here: call this where Slurm is, or scripts/launch.py without it\n"
    )
    assert not (tmp_path / "results").exists()
