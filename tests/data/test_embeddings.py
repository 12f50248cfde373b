"""data/embeddings.py: which files are taken, what the name of their content depends on, and the order of batches."""

import json
import mmap
import os
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import data.embeddings as embeddings_module
from data.embeddings import SPLITS, batches, check_rows, epoch_order, load_embeddings, split_rows, streamed_batches

CPU = torch.device("cpu")
ROWS = 1000
KINDS = ("embeddings", "labels")


def content(rows: int = ROWS, test: int = 30) -> dict[str, torch.Tensor]:
    """Row i holds i in its two columns (i // 256, i % 256), and the label i mod 7."""
    numbers = torch.arange(rows)
    embeddings = torch.stack((numbers // 256, numbers % 256), dim=1).half()
    found = {"train_embeddings": embeddings, "train_labels": numbers % 7}
    return found | {"test_embeddings": embeddings[:test], "test_labels": numbers[:test] % 7}


@pytest.fixture
def path(tmp_path):
    torch.save(content(), tmp_path / "e.pt")
    return tmp_path / "e.pt"


@pytest.fixture
def small_windows(monkeypatch):
    monkeypatch.setattr(embeddings_module, "WINDOW_ROWS", 64)


PUBLISHED = {
    "wsl": ("train", "test"),
    "efficientnet": ("train", "val"),
    "21k": ("imagenet21k_train", "imagenet21k_val"),
}


@pytest.mark.parametrize("layout", PUBLISHED)
@pytest.mark.parametrize("zipped", [True, False])
def test_published_layouts_are_read_also_from_files_of_old_versions(tmp_path, layout, zipped):
    parts = content()
    train, test = PUBLISHED[layout]
    renamed = {key.replace("train_", f"{train}_").replace("test_", f"{test}_"): tensor for key, tensor in parts.items()}
    torch.save(renamed, tmp_path / "e.p", _use_new_zipfile_serialization=zipped)
    found = load_embeddings(tmp_path / "e.p")
    assert (set(found.splits), found.num_classes, found.dim) == ({"train", "test"}, 7, 2)
    for split in ("train", "test"):
        assert torch.equal(found[split].inputs, parts[f"{split}_embeddings"])
        assert torch.equal(found[split].labels, parts[f"{split}_labels"])


def test_a_file_is_mapped_not_read_and_need_not_be_writable(path):
    path.chmod(0o444)
    found = load_embeddings(path)
    assert str(path) in Path("/proc/self/maps").read_text()
    assert len(found["train"]) == ROWS


def test_a_file_larger_than_the_memory_is_mapped_in_another_way(path, monkeypatch):
    real = torch.load
    options = []

    def refused(*arguments, **others):
        options.append(torch.serialization.get_default_mmap_options())
        if options[-1] != mmap.MAP_SHARED:
            raise RuntimeError("unable to mmap 99 bytes from file: Cannot allocate memory (12)")
        return real(*arguments, **others)

    monkeypatch.setattr(torch, "load", refused)
    assert len(load_embeddings(path)["train"]) == ROWS
    assert options[-1] == mmap.MAP_SHARED


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("train_labels"), r"must hold a .*train_labels.*it holds train_embeddings, test_embeddings"),
        (
            lambda c: c.update(test_labels=c["test_labels"] + 1),
            "test .* has a label 7, and train has the classes 0 to 6",
        ),
        (lambda c: c.update(test_embeddings=torch.ones(30, 3)), r"\(N, 2\) as in train.*float32 \(30, 3\)"),
        (lambda c: c.update(train_labels=c["train_labels"][1:]), r"float16 \(1000, 2\), and labels .*int64 \(999,\)"),
        (lambda c: c.update(train_labels=c["train_labels"] - 1), "whole numbers of at least 0"),
        (lambda c: c.update(train_labels=c["train_labels"].float()), "whole numbers of at least 0"),
        (lambda c: c.update(train_embeddings=torch.arange(ROWS)), "floating point"),
        (lambda c: c.clear(), "it holds a dict"),
    ],
)
def test_files_that_do_not_hold_what_they_must_are_refused(tmp_path, change, message):
    parts = content()
    change(parts)
    torch.save(parts, tmp_path / "e.pt")
    with pytest.raises((ValueError, OSError), match=message) as error:
        load_embeddings(tmp_path / "e.pt")
    assert str(tmp_path / "e.pt") in str(error.value)


ARRAYS = {"train_embeddings": np.ones((5, 2), np.float32), "train_labels": np.arange(5)}
WRITE_ARRAYS = {
    "array": lambda path: np.save(path, ARRAYS["train_embeddings"]),
    "array of objects": lambda path: np.save(path, np.array([{}], dtype=object)),
    "arrays": lambda path: np.savez(path, **ARRAYS),
    "compressed": lambda path: np.savez_compressed(path, **ARRAYS),
    "dictionary": lambda path: torch.save(ARRAYS, path),
    "one of two": lambda path: torch.save(ARRAYS | {"train_labels": torch.arange(5)}, path),
    "old": lambda path: torch.save(ARRAYS, path, _use_new_zipfile_serialization=False),
    "number": lambda path: torch.save({"train_labels": np.float64(3)}, path),
}


@pytest.mark.parametrize("kind", WRITE_ARRAYS)
def test_arrays_of_numpy_are_refused_with_what_to_do(tmp_path, kind):
    with (tmp_path / "e.pt").open("wb") as file:  # numpy would add an ending to the name
        WRITE_ARRAYS[kind](file)
    with pytest.raises(ValueError, match=r"e.pt holds NumPy arrays.*wrap each array in torch.tensor"):
        load_embeddings(tmp_path / "e.pt")


def write_tables_and_models(path):
    yield path.write_text("a,b\n1,2\n")
    yield path.write_text("{}")
    yield path.write_bytes(b"")
    yield path.write_bytes(pickle.dumps({"a": [1.0, "b"]}, protocol=2))
    yield path.write_bytes(pickle.dumps(ARRAYS))
    yield torch.save(torch.nn.Linear(2, 2), path)
    yield torch.save({"train_embeddings": Path("rows")}, path)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_no_message_has_escape_codes_or_advice_to_run_code(path):
    for _ in write_tables_and_models(path):
        with pytest.raises(ValueError, match=re.escape(str(path))) as error:
            load_embeddings(path)
        message = str(error.value)
        assert message.isprintable()
        assert "weights_only" not in message
        assert len(message) < 300


@pytest.mark.parametrize("name", ["test", "valid"])
def test_labels_that_count_from_1_beside_others_that_count_from_0_are_refused(tmp_path, name):
    parts = content()
    parts |= {f"{name}_{kind}": parts[f"test_{kind}"] for kind in KINDS} | {"train_labels": parts["train_labels"] + 1}
    torch.save(parts, tmp_path / "e.pt")
    with pytest.raises(ValueError, match=f"{name} in .* has the class 0, and the labels of train begin at 1"):
        load_embeddings(tmp_path / "e.pt")
    torch.save(parts | {"info": {"num_classes": 8}}, tmp_path / "e.pt")
    assert load_embeddings(tmp_path / "e.pt").num_classes == 8


def write_other_things(path):
    yield path.write_bytes(path.read_bytes()[:5000]), "or is damaged"
    yield path.write_text("<html>Sign in</html>"), "not a torch file"
    yield torch.save([1, 2], path), "it holds a list"
    yield torch.save({"train_embeddings": os.getcwd}, path), "not a torch file of tensors"  # it asks to run code
    yield path.unlink(), "FileNotFoundError"


def test_other_files_are_refused(path):
    for _, message in write_other_things(path):
        with pytest.raises((ValueError, OSError), match=message):
            load_embeddings(path)


def content_of_all_splits() -> dict[str, torch.Tensor]:
    parts = content()
    for name in SPLITS:
        parts |= {f"{name}_{kind}": parts.get(f"{name}_{kind}", parts[f"test_{kind}"]).clone() for kind in KINDS}
    return parts


def test_the_fingerprint_stays_as_it_is_over_versions(path):
    assert load_embeddings(path).fingerprint() == "b256bf14"  # names of older runs depend on it


@pytest.mark.parametrize("name", [f"{split}_{kind}" for split in SPLITS for kind in KINDS])
def test_the_fingerprint_is_of_every_row_and_of_nothing_else(tmp_path, name):
    def fingerprint(parts, file):
        torch.save(parts, tmp_path / file)
        return load_embeddings(tmp_path / file).fingerprint()

    first = fingerprint(content_of_all_splits(), "a.pt")
    assert fingerprint(content_of_all_splits(), "b.pt") == first
    for row in (0, 17, -1):
        changed = content_of_all_splits()
        value = changed[name][row].reshape(-1)[0].clone()
        changed[name][row] = 6 if "embeddings" in name else (value + 1) % 7
        assert fingerprint(changed, "a.pt") != first
    swapped = content_of_all_splits()
    swapped[name][[0, 1]] = swapped[name][[1, 0]]
    assert fingerprint(swapped, "a.pt") != first


def name_in_rows(path) -> str:
    return load_embeddings(path).about(str(path))["embeddings"]


def test_a_file_that_changes_while_it_is_opened_is_refused(path, monkeypatch):
    real = torch.load

    def load(*arguments, **others):
        found = real(*arguments, **others)
        os.utime(path)
        return found

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(ValueError, match=f"{path} has changed since it was opened"):
        load_embeddings(path)


def age(path) -> None:
    """Let a file be an hour old."""
    an_hour_ago = path.stat().st_mtime - 3600
    os.utime(path, (an_hour_ago, an_hour_ago))


def test_a_file_is_hashed_once_and_again_when_it_has_changed(path):
    first = load_embeddings(path).fingerprint()
    beside = path.with_name(f"{path.name}.fingerprint")
    assert name_in_rows(path).endswith(first)
    assert not beside.exists()  # a new file may change within a tick of the clock
    age(path)
    assert name_in_rows(path).endswith(first)
    beside.write_text(beside.read_text().replace(first, "deadbeef"))
    assert name_in_rows(path).endswith("deadbeef")  # it is not hashed again

    changed = torch.load(path)
    changed["train_labels"] = changed["train_labels"].flip(0)
    before = path.stat()
    torch.save(changed, path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as cp -p does
    assert path.stat().st_size == before.st_size
    assert name_in_rows(path).endswith(load_embeddings(path).fingerprint())
    assert load_embeddings(path).fingerprint() != first


@pytest.mark.parametrize("content", ["", "{", "[]", '{"stamp": 1}', "\0" * 100])
def test_a_damaged_name_beside_a_file_is_made_again(path, content):
    age(path)
    right = name_in_rows(path)
    beside = path.with_name(f"{path.name}.fingerprint")
    beside.write_text(content)
    assert name_in_rows(path) == right
    assert right.endswith(json.loads(beside.read_text())["fingerprint"])


def test_a_folder_that_cannot_be_written_is_no_error(path):
    age(path)
    path.with_name(f"{path.name}.fingerprint").mkdir()
    files = set(path.parent.iterdir())
    assert name_in_rows(path).endswith(load_embeddings(path).fingerprint())
    assert set(path.parent.iterdir()) == files


def row_numbers(found) -> list[list[int]]:
    """The rows in each batch; checks that their labels came with them."""
    numbers = []
    for embeddings, labels in found:
        rows = (embeddings[:, 0].float() * 256 + embeddings[:, 1].float()).long()
        assert torch.equal(labels, rows % 7)
        numbers.append(rows.tolist())
    return numbers


def test_the_order_stays_as_it_is_over_versions(monkeypatch):
    assert epoch_order(20, 0, 0).tolist() == [11, 18, 15, 19, 16, 10, 3, 6, 2, 12, 0, 17, 4, 9, 14, 1, 13, 8, 7, 5]
    monkeypatch.setattr(embeddings_module, "WINDOW_ROWS", 32)
    assert epoch_order(100, 1, 2)[:10].tolist() == [67, 70, 85, 25, 5, 81, 2, 4, 27, 82]


def test_a_set_within_one_window_is_shuffled_uniformly():
    # Each of 16 rows (two blocks) must be as likely in each place: chi-square over 2,000 epochs, 225 degrees of
    # freedom, standard deviation 21.
    counts = torch.zeros(16, 16)
    for epoch in range(2000):
        counts[torch.arange(16), epoch_order(16, 0, epoch)] += 1
    assert ((counts - 125) ** 2 / 125).sum() < 225 + 5 * 21


@settings(max_examples=25, deadline=None)
@given(batch=st.integers(1, 130), start=st.integers(0, 9), epoch=st.integers(0, 3), seed=st.integers(0, 2))
def test_streamed_batches_are_the_others_from_any_start(tmp_path_factory, batch, start, epoch, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embeddings_module, "WINDOW_ROWS", 64)
        path = tmp_path_factory.mktemp("set") / "e.pt"
        torch.save(content(), path)
        split = load_embeddings(path)["train"]
        rows = split_rows(ROWS, 300, seed)[0]
        whole = row_numbers(batches(split, rows, batch, epoch, seed, CPU))
        assert len(whole) == len(rows) // batch  # the last partial batch is dropped
        flat = [row for numbers in whole for row in numbers]
        assert len(set(flat)) == len(flat)
        assert set(flat) <= set(rows.tolist())
        for read in (batches, streamed_batches):
            assert row_numbers(read(split, rows, batch, epoch, seed, CPU, start)) == whole[start:]


def test_validation_and_training_rows_are_disjoint_and_complete():
    for num_valid, seed in ((1, 0), (300, 7), (ROWS - 1, 1)):
        train, valid = split_rows(ROWS, num_valid, seed)
        assert (len(train), len(valid)) == (ROWS - num_valid, num_valid)
        assert torch.cat((train, valid)).sort().values.equal(torch.arange(ROWS))
    assert set(split_rows(ROWS, 10, 3)[1].tolist()) < set(split_rows(ROWS, 50, 3)[1].tolist())
    for num_valid in (0, ROWS):
        with pytest.raises((ValueError, OSError), match="must leave 1 to train"):
            split_rows(ROWS, num_valid, 0)


def test_the_first_row_that_is_not_finite_is_named(path):
    data = load_embeddings(path)
    rows = {"valid": torch.arange(0, ROWS, 3), "test": torch.arange(30)}
    check_rows(data, rows)
    data["train"].inputs[601] = torch.nan  # not among them
    check_rows(data, rows)
    data["train"].inputs[[903, 600]] = torch.inf  # rows that validate are rows of train
    with pytest.raises((ValueError, OSError), match=f"row 600 of train in {path} is not finite"):
        check_rows(data, rows)
