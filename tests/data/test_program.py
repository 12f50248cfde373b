"""A program from its first import to its last word: an exit status and at most a sentence, whatever goes wrong."""

import argparse
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from data.atomic_file import atomic_write

from data import program

ROOT = Path(__file__).parents[2]
PROGRAMS = [
    path
    for room in ("experiments", "scripts")
    for path in sorted((ROOT / room).glob("*.py"))
    if "__main__" in path.read_text()
]
# What all of them import, with torch, which comes first where it comes.
IMPORTED = ("filelock", "torch")


def start(words: list, folder: Path, program: str, **environment: str) -> subprocess.CompletedProcess:
    """Run Python on `words`, where the modules that all programs import are `program`."""
    for name in IMPORTED:
        (folder / f"{name}.py").write_text(program)
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", **environment}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment, timeout=60)


@pytest.mark.parametrize("words", [[script] for script in PROGRAMS] + [["-m", "data.embeddings"]])
def test_a_signal_during_the_imports_ends_a_program_without_a_traceback(words, tmp_path):
    for number in (signal.SIGINT, signal.SIGTERM):
        ended = start(words, tmp_path, f"import os, time; os.kill(os.getpid(), {int(number)}); time.sleep(9)")
        assert (ended.returncode, ended.stdout, ended.stderr) == (128 + number, "", "\nstopped\n")


@pytest.mark.parametrize("words", [PROGRAMS[:1], ["-m", "data.embeddings"]])
def test_ctrl_c_among_the_first_imports_is_no_traceback(words, tmp_path):
    """Before the program can say how it ends."""
    (tmp_path / "argparse.py").write_text("raise KeyboardInterrupt")
    ended = start(words, tmp_path, "")
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "\nstopped\n")


@pytest.mark.parametrize("script", PROGRAMS, ids=lambda path: path.stem)
def test_an_import_that_fails_is_a_sentence(script, tmp_path):
    ended = start([script], tmp_path, "raise ValueError('one\\ntwo')")
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: ValueError: one (")
    assert ended.stderr.endswith("py, line 1). This was not foreseen; --debug shows how it came about\n")


def test_debug_shows_the_traceback_and_a_package_that_is_missing_is_named(tmp_path):
    ended = start([PROGRAMS[0], "--debug"], tmp_path, "import no_such_package")
    assert ended.returncode == 1
    assert ended.stderr.startswith("Traceback")
    assert ended.stderr.endswith("error: No module named 'no_such_package'; install what requirements.txt lists\n")


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (program.CommandLineError("wrong (see --help)"), 2, "error: seed 3: wrong (see --help)\n"),
        (program.ProgramError("no row"), 1, "error: seed 3: no row\n"),
        (KeyboardInterrupt(), 130, "\nstopped: saved\n"),
        (program.Terminated(), 143, "\nstopped: saved\n"),
        (
            OSError(28, "No space left on device", "some.csv"),
            1,
            "error: seed 3: [Errno 28] No space left on device: 'some.csv'; mend that and give the same command",
        ),
        (MemoryError(), 1, "error: seed 3: out of memory Try a smaller --batch_size or --precision bf16\n"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 4 bytes.\nmore"),
            1,
            "error: seed 3: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 4 bytes. "
            "Try a smaller --batch_size or --precision bf16\n",
        ),
        (KeyError("a"), 1, "error: seed 3: KeyError: 'a' (test_program.py, line 90). This was not foreseen; --debug "),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_is_raised_is_a_status_and_a_sentence(raised, status, said, capsys):
    def run():
        raise raised

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    assert program.finish(run, "saved", name="seed 3: ") == status
    assert capsys.readouterr().err.startswith(said)
    assert before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))


def test_sigterm_within_the_work_is_as_ctrl_c(capsys):
    assert program.finish(lambda: os.kill(os.getpid(), signal.SIGTERM) or 0, "saved") == 143
    assert capsys.readouterr().err == "\nstopped: saved\n"


def prints(text: str) -> list:
    return ["-c", f"from data import program\nprogram.begin()\nprogram.end(print({text!r}) or 0)"]


def test_what_cannot_be_printed_is_escaped_and_closed_streams_are_nothing(tmp_path):
    ended = start(prints("ü\udcff"), tmp_path, "", PYTHONIOENCODING="ascii")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "\\xfc\\udcff\n", "")
    closed = subprocess.run(["sh", "-c", '"$@" <&- >&- 2>&-', "sh", sys.executable, *prints("a")], cwd=ROOT)
    assert closed.returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux's")
def test_output_that_finds_no_room_is_an_error_and_a_reader_that_has_left_is_none(monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", "")
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, *prints("a")], stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert (ended.returncode, ended.stderr) == (1, "error: standard output: No space left on device\n")
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run([sys.executable, *prints("a")], stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("streams", [{"stderr": subprocess.PIPE}, {"stderr": subprocess.STDOUT}], ids=["1", "1 and 2"])
def test_a_reader_that_leaves_in_the_middle_ends_the_work_without_a_word(monkeypatch, unbuffered, streams):
    """As `| head` does; the status is that of a program which SIGPIPE ends."""
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    work = "lambda: [print('x' * 100) for _ in range(10**6)] and 0"
    code = f"from data import program\nprogram.begin()\nprogram.end(program.finish({work}, 'kept'))"
    running = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT, **streams)
    running.stdout.readline()
    running.stdout.close()
    assert running.wait(60) == 141
    assert running.stderr is None or running.stderr.read() == b""


def test_a_pipe_of_the_work_itself_that_breaks_is_an_error(capsys):
    def work():
        reader, writer = os.pipe()
        os.close(reader)
        os.write(writer, b"x")

    assert program.finish(work) == 1
    assert "Broken pipe" in capsys.readouterr().err


# The command line.


@pytest.mark.parametrize("word", ["x\udcff", "a\0b"])
def test_words_that_no_file_could_hold_are_refused(word):
    with pytest.raises(program.CommandLineError, match="must be UTF-8 text without NUL, got"):
        program.Parser().parse_args([word])


def test_paths_are_expanded_and_what_is_no_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert program.path("~/x") == tmp_path / "x"
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/null")
    for text in ("~nosuchuser/x", "/dev/null", str(tmp_path / "link"), str(tmp_path / "fifo")):
        with pytest.raises(argparse.ArgumentTypeError, match=text):
            program.path(text)


# Files that are none.


def test_a_fifo_is_written_to_and_stays_one(tmp_path):
    fifo, received = tmp_path / "fifo", []
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: received.append(fifo.read_text()), daemon=True)
    reader.start()
    with atomic_write(fifo) as file:
        file.write("content")
    reader.join(10)
    assert (fifo.is_fifo(), received, list(tmp_path.iterdir())) == (True, ["content"], [fifo])


def test_threads_wait_for_microseconds_unless_the_user_says_otherwise():
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    code = f"import os\nfrom data import program\nprogram.begin()\nprint(*(os.environ.get(name) for name in {names}))"
    cases = ({}, "None 1000"), ({"OMP_WAIT_POLICY": "active"}, "active None"), ({"GOMP_SPINCOUNT": "7"}, "None 7")
    for given, found in cases:
        environment = {name: value for name, value in os.environ.items() if name not in names} | given
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.stdout.strip() == found
