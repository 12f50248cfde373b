"""Whatever happens to a checkpoint file, a damaged one is never loaded; a whole one stays until the next is whole."""

import errno
import random

import pytest
import torch
from data.atomic_file import atomic_write
from data.program import ProgramError
from experiments.shared.checkpoint import CURRENT, read_checkpoint, write_checkpoint

STATE = {"model": {"weight": torch.full((3, 4), 2.0)}, "history": [{"a": 0.1}] * 2}


@pytest.fixture
def path(tmp_path):
    write_checkpoint(tmp_path / CURRENT, STATE)
    return tmp_path / CURRENT


def test_it_comes_back_as_it_was_and_is_an_ordinary_torch_file(path):
    for loaded in (read_checkpoint(path), torch.load(path, weights_only=True)):
        assert loaded["history"] == STATE["history"]
        assert torch.equal(loaded["model"]["weight"], STATE["model"]["weight"])
    assert [each.name for each in path.parent.iterdir()] == [CURRENT]


def test_what_was_truncated_changed_or_appended_is_noticed(path):
    whole, generator = path.read_bytes(), random.Random(0)
    size = len(whole)
    damaged = [whole[:length] for length in (0, 1, 71, 72, 73, size - 73, size - 1, *generator.sample(range(size), 30))]
    for position in (0, size - 1, size - 73, *generator.sample(range(size), 60)):
        damaged.append(bytearray(whole))
        damaged[-1][position] ^= generator.randrange(1, 256)
    for content in (*damaged, whole + b"\0" * 100):
        path.write_bytes(content)
        with pytest.raises(ProgramError, match=f"{CURRENT} is damaged"):
            read_checkpoint(path)


def test_a_kill_while_writing_or_a_failed_save_leaves_what_was_there(path):
    class Unsaveable:
        def __reduce__(self):
            raise OSError("no space left on device")

    path.with_name(CURRENT + ".tmp").write_bytes(b"half a checkpoint")
    with pytest.raises(OSError, match="no space"):
        write_checkpoint(path, {"model": Unsaveable()})
    assert len(read_checkpoint(path)["history"]) == 2
    write_checkpoint(path, {**STATE, "history": []})
    assert read_checkpoint(path)["history"] == []
    assert [each.name for each in path.parent.iterdir()] == [CURRENT]


class Code:
    def __reduce__(self):
        return print, ("executed",)


@pytest.mark.parametrize("state", [[1, 2], {}, {"model": {"weight": [0.0]}}, {"model": Code()}])
def test_another_content_with_the_right_checksum_is_refused_and_not_run(path, state, capsys):
    write_checkpoint(path, state)
    with pytest.raises(ProgramError, match="is not a checkpoint of these scripts"):
        read_checkpoint(path)
    assert capsys.readouterr().out == ""


def test_a_full_disk_says_which_file_and_leaves_the_old_one(tmp_path):
    path = tmp_path / "row.csv"
    path.write_text("old")

    def write_until_full():
        with atomic_write(path) as file:
            file.write("half")
            raise OSError(errno.ENOSPC, "No space left on device")  # as the operating system raises it: without a name

    with pytest.raises(OSError, match=r"row\.csv") as caught:
        write_until_full()
    assert caught.value.errno == errno.ENOSPC
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["row.csv"]
