"""experiments/common/files.py: what stands beside a file that is replaced, and what a kill leaves there."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from experiments.common.files import replace_file, replacing
from experiments.common.rows import locked, write_rows

FORKS = multiprocessing.get_context("fork")
USERS = (
    "r.csv.tmp",
    ".r.csv.tmp",
    "r.csv.1.tmp",
    ".r.csv.another-machine.1.tmp",
    ".r.csv.notes.tmp",
    ".r.csv.99999999999999999999.tmp",
    "r.csv~",
)


def replace(path: Path) -> None:
    replace_file(path, "new")


def add_row(path: Path) -> None:
    with locked(path) as file:
        write_rows(file, [{"run_id": "a"}])


def write_and_die(path: Path) -> None:
    with replacing(path) as file:
        file.write(b"half")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("write", [replace, add_row])
def test_files_of_the_user_beside_a_file_that_is_replaced_stay(write, tmp_path):
    for name in USERS:
        (tmp_path / name).write_text(name)
    write(tmp_path / "r.csv")
    assert names_in(tmp_path) - {"r.csv.lock"} == {*USERS, "r.csv"}
    assert all((tmp_path / name).read_text() == name for name in USERS)


@pytest.mark.parametrize("name", ["r.csv", "[a]*.csv", ".hidden"])
@pytest.mark.parametrize("write", [replace, add_row])
def test_what_killed_processes_left_is_deleted_by_the_next_write(write, name, tmp_path):
    path = tmp_path / name
    path.write_text("old")
    for _ in range(2):
        killed = FORKS.Process(target=write_and_die, args=(path,))
        killed.start()
        killed.join()
        assert killed.exitcode == -signal.SIGKILL
        (left,) = names_in(tmp_path) - {name}
        assert left.startswith(".")
    assert path.read_text() == "old"
    path.unlink()
    write(path)
    assert names_in(tmp_path) - {f"{name}.lock"} == {name}


def test_two_processes_that_write_a_file_at_once_do_not_disturb_each_other(tmp_path):
    path = tmp_path / "r.csv"
    with replacing(path) as file:
        file.write(b"one")
        file.flush()
        other = FORKS.Process(target=replace, args=(path,))
        other.start()
        other.join()
        assert other.exitcode == 0
        assert path.read_text() == "new"
    assert path.read_text() == "one"
    assert names_in(tmp_path) == {"r.csv"}


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o660, 0o755])
@pytest.mark.parametrize("write", [replace, add_row])
def test_a_file_that_is_replaced_keeps_its_mode(write, mode, tmp_path):
    path = tmp_path / "r.csv"
    path.write_text("run_id\nb\n")
    path.chmod(mode)
    link = tmp_path / "link.csv"
    link.symlink_to(path)
    for name in (path, link):
        write(name)
        assert path.stat().st_mode & 0o777 == mode


def test_nobody_reads_a_private_file_while_it_is_written_and_a_new_file_has_the_usual_mode(tmp_path):
    path = tmp_path / "r.csv"
    path.write_text("old")
    path.chmod(0o600)
    with replacing(path):
        modes = {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
    assert modes == {0o600}
    replace(tmp_path / "new.csv")
    (tmp_path / "usual.csv").touch()
    assert (tmp_path / "new.csv").stat().st_mode == (tmp_path / "usual.csv").stat().st_mode
