"""data/embeddings/batches.py: the same batches in every mode, an order that seed and epoch alone decide, each row
exactly once, and the choice between device, RAM and disk."""

import os
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data import machine_memory
from data.embeddings import EmbeddingBatches, EmbeddingError, StoreWriter, epoch_order, split_rows
from data.embeddings import batches as embedding_batches

DIM, ROWS, SHARDS = 8, 1000, (400, 350, 250)
WINDOW = 64  # rows
MEMORY_MODES = ("ram", "stream")


def write_split(folder, dtype=torch.float16):
    """A split whose row i holds i in its first two columns (i // 256, i % 256), and the label i mod 10."""
    writer = StoreWriter(folder, dim=DIM, dtype=dtype, shard_rows=max(SHARDS))
    rows = torch.arange(ROWS)
    embeddings = torch.stack((rows // 256, rows % 256), dim=1).repeat(1, DIM // 2).to(dtype)
    for number, part in enumerate(rows.split(SHARDS)):
        writer.write("train", number, embeddings[part], part % 10)
    return writer.finish()["train"]


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    return write_split(tmp_path_factory.mktemp("batches") / "store")


@pytest.fixture
def small_windows(monkeypatch):
    monkeypatch.setattr(embedding_batches, "WINDOW_ROWS", WINDOW)


def row_numbers(batches):
    """The rows that batches hold, one list per batch; checks the labels and that rows are whole."""
    numbers = []
    for embeddings, labels in batches:
        pairs = embeddings.float().reshape(len(labels), -1, 2)
        assert torch.equal(pairs, pairs[:, :1].expand_as(pairs))
        rows = (pairs[:, 0, 0] * 256 + pairs[:, 0, 1]).long()
        assert torch.equal(labels.cpu(), rows.cpu() % 10)
        numbers.append(rows.tolist())
    return numbers


# The order.


def test_the_order_stays_as_it_is_over_versions(monkeypatch):
    # A changed order would change the numbers of every table.
    small = [11, 18, 15, 19, 16, 10, 3, 6, 2, 12, 0, 17, 4, 9, 14, 1, 13, 8, 7, 5]
    assert epoch_order(20, 0, 0).tolist() == small
    monkeypatch.setattr(embedding_batches, "WINDOW_ROWS", 32)
    assert epoch_order(100, 1, 2)[:10].tolist() == [67, 70, 85, 25, 5, 81, 2, 4, 27, 82]


def test_a_set_within_one_window_is_shuffled_uniformly():
    # Each of 16 rows (two blocks) must be as likely in each place: chi-square over 2,000 epochs, 225 degrees of
    # freedom, standard deviation 21.
    counts = torch.zeros(16, 16)
    for epoch in range(2000):
        counts[torch.arange(16), epoch_order(16, 0, epoch)] += 1
    assert ((counts - 125) ** 2 / 125).sum() < 225 + 5 * 21


@pytest.mark.parametrize(("num_valid", "seed"), [(1, 0), (300, 0), (300, 7), (ROWS - 1, 1)])
def test_validation_and_training_rows_are_disjoint_and_complete(num_valid, seed):
    train, valid = split_rows(ROWS, num_valid, seed)
    assert (len(train), len(valid)) == (ROWS - num_valid, num_valid)
    assert torch.cat((train, valid)).sort().values.equal(torch.arange(ROWS))
    for rows in (train, valid):
        assert rows.sort().values.equal(rows)
    assert split_rows(ROWS, num_valid, seed)[1].equal(valid)
    assert not split_rows(ROWS, 300, seed + 1)[1].equal(split_rows(ROWS, 300, seed)[1])
    assert set(split_rows(ROWS, 100, seed)[1].tolist()) < set(split_rows(ROWS, 300, seed)[1].tolist())
    for empty in (0, -1, ROWS, ROWS + 1):
        with pytest.raises(ValueError, match=f"of {ROWS} rows, got num_valid {empty}"):
            split_rows(ROWS, empty, seed)


# The batches.


@given(
    rows=st.none() | st.sets(st.integers(0, ROWS - 1), min_size=1),
    batch_size=st.integers(1, 400) | st.sampled_from([999, 2000]),
    blocks=st.integers(1, 20),
    epoch=st.integers(0, 50),
    seed=st.integers(0, 2**32),
    start=st.integers(0, 40),
)
@settings(max_examples=60, deadline=None)
def test_every_mode_gives_the_batches_of_the_order(split, rows, batch_size, blocks, epoch, seed, start):
    """Of an order that is a permutation and whose windows hold whole blocks; from any batch on."""
    chosen = None if rows is None else torch.tensor(sorted(rows))
    numbered = torch.arange(ROWS) if rows is None else chosen
    size = embedding_batches.BLOCK_ROWS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedding_batches, "WINDOW_ROWS", blocks * size)
        order = epoch_order(len(numbered), seed, epoch)
        assert order.sort().values.equal(torch.arange(len(numbered)))
        if len(numbered) % size == 0:
            for window in order.split(blocks * size):
                assert set((window // size).bincount().tolist()) <= {0, size}
        expected = [part.tolist() for part in numbered[order].split(batch_size) if len(part) == batch_size]
        for mode in MEMORY_MODES:
            batches = EmbeddingBatches(split, batch_size, rows=chosen, mode=mode)
            assert (batches.mode, len(batches)) == (mode, len(expected))
            for first in (0, start, 0):  # an epoch can be repeated
                assert row_numbers(batches.epoch(epoch, seed, start=first)) == expected[first:]


@pytest.mark.parametrize("mode", MEMORY_MODES)
@pytest.mark.parametrize("batch_size", [1, 300, 1000, 5000])
def test_in_order_gives_every_row_once_and_the_rest(split, monkeypatch, mode, batch_size):
    monkeypatch.setattr(embedding_batches, "_IN_ORDER_ROWS", 150)
    rows, _ = split_rows(ROWS, 100, 0)
    numbers = row_numbers(EmbeddingBatches(split, batch_size, rows=rows, mode=mode).in_order())
    assert numbers == [part.tolist() for part in rows.split(batch_size)]


def reader_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("embedding-reader")]


def test_a_stream_that_is_left_ends_its_threads(split, small_windows):
    stream = EmbeddingBatches(split, 10, mode="stream").epoch(0)
    next(stream)
    assert reader_threads()
    stream.close()
    assert not reader_threads()
    kept = list(EmbeddingBatches(split, 10, mode="stream").epoch(0))
    assert not reader_threads()
    kept[0][0].zero_()  # a copy, not a place in a buffer that is used again
    assert sum(map(len, row_numbers(kept[1:]))) == 990


def test_a_file_that_shrinks_under_a_stream_is_an_error_and_no_garbage(tmp_path, small_windows):
    batches = EmbeddingBatches(write_split(tmp_path / "store"), 10, mode="stream")
    os.truncate(tmp_path / "store" / "train.embeddings.npy", 1000)
    with pytest.raises(EmbeddingError, match=r"train.embeddings.npy ended"):
        row_numbers(batches.epoch(0))
    assert not reader_threads()


# The choice of the mode.


@pytest.mark.parametrize(("available", "mode"), [(10**9, "ram"), (ROWS * DIM * 2, "stream"), (0, "stream")])
def test_rows_that_do_not_fit_into_memory_are_streamed(split, monkeypatch, available, mode):
    monkeypatch.setattr(embedding_batches, "available_ram", lambda: available)
    batches = EmbeddingBatches(split, 10)
    assert batches.mode == mode
    assert batches.description.startswith(f"{mode}: 0.0 MiB")
    assert "forced" not in batches.description
    for asked, taken in (("ram", "ram"), ("stream", "stream"), ("device", "ram")):  # the CPU's memory is the RAM
        forced = EmbeddingBatches(split, 10, "cpu", mode=asked)
        assert forced.mode == taken
        assert forced.description.startswith(f"{taken}: ")
        assert forced.description.endswith("(forced)")


@pytest.mark.parametrize(
    ("on_device", "in_ram", "mode"), [(10**9, 10**9, "device"), (10_000, 10**9, "ram"), (10_000, 10_000, "stream")]
)
def test_a_gpu_is_filled_first(monkeypatch, on_device, in_ram, mode):
    monkeypatch.setattr(embedding_batches, "available_ram", lambda: in_ram)
    monkeypatch.setattr(embedding_batches, "available_on", lambda device: on_device)
    assert embedding_batches._choose("auto", 16_000, torch.device("cuda"))[0] == mode


def test_the_limit_of_a_container_and_what_torch_keeps_of_a_gpu_count(tmp_path, monkeypatch):
    monkeypatch.setattr(machine_memory, "_CGROUP", tmp_path)
    unlimited = machine_memory.available_ram()
    for name, content in (("memory.max", "max"), ("memory.current", "5000"), ("memory.stat", "anon 3000\nfile 1000")):
        (tmp_path / name).write_text(content + "\n")
    assert machine_memory.available_ram() > unlimited / 2
    for limit, available in ((10_000, 6000), (3000, 0)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert machine_memory.available_ram() == available
    numbers = {"mem_get_info": (100, 1000), "memory_reserved": 50, "memory_allocated": 20}
    gpu = SimpleNamespace(**{name: lambda _, v=value: v for name, value in numbers.items()})
    monkeypatch.setattr(machine_memory.torch, "cuda", gpu)
    assert machine_memory.available_on(torch.device("cuda")) == 130


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", ["device", *MEMORY_MODES])
def test_a_gpu_gets_the_same_batches(split, mode, small_windows):
    batches, expected = EmbeddingBatches(split, 60, "cuda", mode=mode), EmbeddingBatches(split, 60, mode="ram")
    assert batches.mode == mode
    on_gpu = list(batches.epoch(1))
    assert all(embeddings.is_cuda and labels.is_cuda for embeddings, labels in on_gpu)
    assert row_numbers(on_gpu) == row_numbers(expected.epoch(1))
    assert row_numbers(batches.in_order()) == row_numbers(expected.in_order())
