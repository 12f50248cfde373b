"""Whatever happens to a checkpoint file, the newest whole one is found, and a damaged one is never loaded."""

import errno
import random

import pytest
import torch

from data.atomic_file import atomic_write
from experiments.shared import checkpoint
from experiments.shared.checkpoint import (
    CURRENT,
    PREVIOUS,
    RUN,
    DamagedCheckpoint,
    go_back,
    load_checkpoint,
    random_states,
    read_checkpoint,
    remove_checkpoints,
    restore_random_states,
    save_checkpoint,
)
from experiments.shared.metrics import EVALUATION


def state(epoch: int) -> dict:
    return {"epoch": epoch, "model": {"weight": torch.full((3, 4), float(epoch))}, "history": [{"a": 0.1}] * epoch}


@pytest.fixture
def folder(tmp_path):
    """A run folder after its second epoch."""
    save_checkpoint(tmp_path, state(1))
    save_checkpoint(tmp_path, state(2))
    return tmp_path


def test_the_newest_comes_back_as_it_was(folder):
    loaded = load_checkpoint(folder)
    assert loaded["epoch"] == 2
    assert loaded["history"] == state(2)["history"]
    assert torch.equal(loaded["model"]["weight"], state(2)["model"]["weight"])
    assert sorted(path.name for path in folder.iterdir()) == sorted([CURRENT, PREVIOUS])


def test_there_is_none_at_first(tmp_path):
    assert load_checkpoint(tmp_path) is None


def test_it_is_an_ordinary_torch_file(folder):
    assert torch.load(folder / CURRENT, weights_only=True)["epoch"] == 2


def test_a_truncated_file_gives_way_to_the_previous(folder, capsys):
    size = (folder / CURRENT).stat().st_size
    lengths = {0, 1, 71, 72, 73, size - 73, size - 72, size - 1, *random.Random(0).sample(range(size), 30)}
    whole = (folder / CURRENT).read_bytes()
    for length in lengths:
        (folder / CURRENT).write_bytes(whole[:length])
        assert load_checkpoint(folder)["epoch"] == 1
        assert CURRENT in capsys.readouterr().err


def test_a_changed_byte_anywhere_is_noticed(folder):
    whole = (folder / CURRENT).read_bytes()
    generator = random.Random(1)
    positions = [0, len(whole) - 1, len(whole) - 73, *generator.sample(range(len(whole)), 60)]
    for position in positions:
        damaged = bytearray(whole)
        damaged[position] ^= generator.randrange(1, 256)
        (folder / CURRENT).write_bytes(damaged)
        with pytest.raises(DamagedCheckpoint, match=CURRENT):
            read_checkpoint(folder / CURRENT)


def test_bytes_appended_are_noticed(folder):
    with open(folder / CURRENT, "ab") as file:
        file.write(b"\0" * 100)
    assert load_checkpoint(folder)["epoch"] == 1


def test_a_damaged_file_is_not_rotated_over_the_whole_one(folder):
    (folder / CURRENT).write_bytes(b"damaged")
    load_checkpoint(folder)
    save_checkpoint(folder, state(3))
    (folder / CURRENT).write_bytes(b"damaged again")
    assert load_checkpoint(folder)["epoch"] == 1


def test_both_damaged_means_none(folder, capsys):
    (folder / CURRENT).write_bytes(b"")
    (folder / PREVIOUS).write_bytes(b"")
    assert load_checkpoint(folder) is None
    assert "checkpoint.previous.pt" in capsys.readouterr().err


def test_a_kill_between_the_renames_leaves_the_last_epoch(folder):
    (folder / CURRENT).rename(folder / PREVIOUS)
    assert load_checkpoint(folder)["epoch"] == 2


def test_a_kill_while_writing_leaves_the_last_epoch_and_its_leavings_are_overwritten(folder):
    (folder / (CURRENT + ".tmp")).write_bytes(b"half a checkpoint")
    assert load_checkpoint(folder)["epoch"] == 2
    save_checkpoint(folder, state(3))
    assert load_checkpoint(folder)["epoch"] == 3
    assert len(list(folder.iterdir())) == 2


def test_a_failed_save_leaves_what_was_there(folder):
    class Unsaveable:
        def __reduce__(self):
            raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        save_checkpoint(folder, {"epoch": 3, "model": Unsaveable()})
    assert load_checkpoint(folder)["epoch"] == 2
    assert len(list(folder.iterdir())) == 2


def test_code_in_a_checkpoint_is_not_run(tmp_path, capsys):
    class Code:
        def __reduce__(self):
            return print, ("executed",)

    save_checkpoint(tmp_path, {"epoch": Code()})
    with pytest.raises(DamagedCheckpoint, match="UnpicklingError"):
        load_checkpoint(tmp_path)
    assert capsys.readouterr().out == ""


def write(path, payload):
    """A file with the right checksum."""
    path.write_bytes(payload + checkpoint._trailer(payload))


def without(name):
    return {key: value for key, value in RUN_STATE.items() if key != name}


EVALUATED = {**dict.fromkeys(EVALUATION, 0.5), "epoch": 1}
RUN_STATE = {
    "model": {"weight": torch.zeros(2)},
    "optimizer": None,
    "history": [EVALUATED],
    "started_utc": "2026-01-01T00:00:00.000Z",
    "times_resumed": 0,
    "git_commits": ["a"],
}


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        (b"", "EOFError"),
        (b"garbage", "UnpicklingError"),
        ([1, 2], "should be a valid dictionary"),
        (without("model"), "model Field required"),
        (without("history"), "history Field required"),
        (without("git_commits"), "git_commits Field required"),
        ({**RUN_STATE, "model": None}, "model Input should be a valid dictionary"),
        ({**RUN_STATE, "model": {"weight": [0.0]}}, "model.weight Input should be an instance of Tensor"),
        ({**RUN_STATE, "optimizer": [1]}, "optimizer Input should be a valid dictionary"),
        ({**RUN_STATE, "history": []}, "history List should have at least 1 item"),
        ({**RUN_STATE, "history": "none"}, "history Input should be a valid list"),
        (
            {**RUN_STATE, "history": [EVALUATED, {**EVALUATED, "valid_top5": "x"}]},
            "history.1.valid_top5 Input should be",
        ),
        ({**RUN_STATE, "history": [EVALUATED, {}]}, "history.1.valid_top1 Field required"),
        ({**RUN_STATE, "times_resumed": True}, "times_resumed Input should be a valid integer"),
        ({**RUN_STATE, "git_commits": "a"}, "git_commits Input should be a valid list"),
    ],
)
def test_a_file_with_the_right_checksum_and_another_content(tmp_path, capsys, state, problem):
    if isinstance(state, bytes):
        write(tmp_path / CURRENT, state)
    else:
        save_checkpoint(tmp_path, state)
    # Alone, nothing is thrown away: another version of the code may read it.
    with pytest.raises(DamagedCheckpoint, match=problem):
        load_checkpoint(tmp_path, RUN)
    (tmp_path / PREVIOUS).write_bytes(b"truncated")
    with pytest.raises(DamagedCheckpoint, match=problem):
        load_checkpoint(tmp_path, RUN)
    assert (tmp_path / CURRENT).exists()
    # Otherwise the run goes on from the generation before.
    (tmp_path / CURRENT).rename(tmp_path / "other")
    save_checkpoint(tmp_path, RUN_STATE)
    (tmp_path / CURRENT).rename(tmp_path / PREVIOUS)
    (tmp_path / "other").rename(tmp_path / CURRENT)
    assert load_checkpoint(tmp_path, RUN)["git_commits"] == ["a"]
    assert CURRENT in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [PREVIOUS]


def test_a_run_goes_back_a_generation_or_to_the_beginning(folder):
    go_back(folder)
    assert load_checkpoint(folder)["epoch"] == 1
    assert [path.name for path in folder.iterdir()] == [CURRENT]
    go_back(folder)
    assert load_checkpoint(folder) is None


def test_removal(folder):
    remove_checkpoints(folder, (PREVIOUS,))
    assert [path.name for path in folder.iterdir()] == [CURRENT]
    remove_checkpoints(folder)
    assert list(folder.iterdir()) == []
    remove_checkpoints(folder)


def test_random_states_come_back():
    cpu = torch.device("cpu")
    before = random_states(cpu)
    drawn = torch.rand(5)
    restore_random_states(before, cpu)
    assert torch.equal(torch.rand(5), drawn)


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
