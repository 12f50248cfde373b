"""data/file_lock.py: one at a time, whoever waits is told, and a place that takes no files is an error at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from data.file_lock import held, held_or_refused, lock_beside

HOLDER = "import sys; from pathlib import Path; from data.file_lock import held\nwith held(Path(sys.argv[1])): "


def test_another_process_waits_or_is_told(tmp_path, capsys):
    lock = tmp_path / "new" / "lock"
    command = [sys.executable, "-c", f"{HOLDER}print(1, flush=True); sys.stdin.read()", lock]
    root = Path(__file__).parents[2]
    holder = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    holder.stdout.readline()
    asked = (lock, RuntimeError, "a run", "the folder")
    with pytest.raises(RuntimeError, match=f"a run, which holds {lock}; wait for it"), held_or_refused(*asked):
        pass
    holder.kill()
    holder.communicate()
    with held_or_refused(*asked):
        pass
    assert capsys.readouterr().err == ""


def test_a_place_that_takes_no_files_is_an_error_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(OSError, match="not a regular file"), held(tmp_path / "lock"):
        pass
    (tmp_path / "file").write_text("in the way")
    for folder in ("/proc/self", tmp_path / "file"):
        with pytest.raises((FileNotFoundError, FileExistsError, NotADirectoryError)), held(Path(folder) / "lock"):
            pass


def test_one_folder_has_one_lock(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert lock_beside(Path("a.store")) == lock_beside(tmp_path / "b" / ".." / "a.store") == tmp_path / ".a.store.lock"
    assert lock_beside(Path()) == lock_beside(tmp_path) == tmp_path.parent / f".{tmp_path.name}.lock"
