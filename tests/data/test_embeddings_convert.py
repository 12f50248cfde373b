"""data/embeddings/formats.py: the published pickles become stores, in bounded memory, whatever is killed; what is
unknown, unsafe or damaged is refused with a sentence."""

import mmap
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from data.embeddings.__main__ import main

from data.embeddings import DTYPES, LAYOUTS, EmbeddingError, StoreWriter, convert, open_store
from data.embeddings import formats as embedding_formats
from tests.data.embedding_files import DIM, TEST, TRAIN, assert_holds, content, save

REPOSITORY = Path(__file__).parents[2]
SHARD_BYTES = 40 * DIM * 2  # 40 rows of float16: three shards train, one test
LINUX = sys.platform == "linux"


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_published_layout_is_recognised_by_its_keys(tmp_path, layout, zipped):
    parts = save(tmp_path / "any name", layout, _use_new_zipfile_serialization=zipped)
    store = convert(tmp_path / "any name", tmp_path / "store", shard_bytes=SHARD_BYTES)
    assert [len(split.shards) for split in store.splits.values()] == [3, 1]
    assert store.source == "any name"
    assert_holds(store, parts)


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("dtype", [*DTYPES.values(), torch.float64])
def test_every_dtype_becomes_every_other(tmp_path, dtype, target):
    parts = save(tmp_path / "file.p", dtype=dtype)
    assert_holds(convert(tmp_path / "file.p", tmp_path / "store", dtype=DTYPES[target]), parts, DTYPES[target])


def test_numbers_beyond_float16_are_refused_and_fit_bfloat16(tmp_path):
    parts = content(torch.float32)
    parts["train_embeddings"][60, 3] = 1e6
    torch.save(parts, tmp_path / "file.p")
    with pytest.raises(EmbeddingError, match=r"train from row 0 on\) of 1e\+06 is beyond the range of float16"):
        convert(tmp_path / "file.p", tmp_path / "store", dtype=torch.float16)
    assert_holds(convert(tmp_path / "file.p", tmp_path / "other", dtype=torch.bfloat16), parts, torch.bfloat16)


def test_a_mapping_takes_any_tensors(tmp_path, capsys):
    """Of any names, views with gaps and labels of any width among them."""
    parts = content()
    wide = torch.cat((parts["train_embeddings"], parts["train_embeddings"]), dim=1)
    torch.save({"x": wide[:, :DIM], "y": parts["train_labels"].to(torch.uint16), "note": "mine"}, tmp_path / "file.pt")
    command = ["convert", str(tmp_path / "file.pt"), str(tmp_path / "one")]
    assert main(command) == 1
    message = capsys.readouterr().err
    assert (
        "Found: x float16 (100, 16), y uint16 (100,), note (str). Expected: train_embeddings, train_labels" in message
    )
    assert all(", ".join(layout.values()) in message for layout in LAYOUTS.values())
    assert "--test_labels KEY" in message
    assert main([*command, "--train_embeddings", "x", "--train_labels", "y"]) == 0
    store = open_store(tmp_path / "one")
    assert torch.equal(store["train"].read(torch.arange(TRAIN)), parts["train_embeddings"])
    assert torch.equal(store["train"].labels(), parts["train_labels"])
    assert list(store.splits) == ["train"]
    names = {"train_embeddings": "a", "train_labels": "b", "valid_embeddings": "c", "valid_labels": "d"}
    torch.save(dict(zip("abcd", parts.values())), tmp_path / "file.p")
    store = convert(tmp_path / "file.p", tmp_path / "store", keys=names)
    assert list(store.splits) == ["train", "valid"]
    assert torch.equal(store["valid"].read(torch.arange(TEST)), parts["test_embeddings"])


REFUSED_KEYS = [
    ({"train_embeddings": "train_embeddings"}, "of a split both or neither, got 'train_embeddings' alone"),
    ({"test_labels": "test_labels"}, "of a split both or neither, got 'test_labels' alone"),
    ({"other_labels": "test_labels"}, "keys are for train_embeddings, .*, got 'other_labels'"),
    ({"train_embeddings": "x", "train_labels": "y"}, "has no tensor 'x' for train_embeddings; it has train_"),
    ({"train_embeddings": "test_embeddings", "train_labels": "train_labels"}, "with a label per row"),
    ({"train_embeddings": "train_labels", "train_labels": "train_labels"}, "must be floating point of shape"),
]
REFUSED_TENSORS = [
    ({"test_embeddings": torch.zeros(TEST, DIM + 1).half()}, "of one width and dtype; it has train_embeddings"),
    ({"test_embeddings": torch.zeros(TEST, DIM)}, "of one width and dtype"),
    ({"train_labels": torch.arange(TRAIN) - 50}, r"train in .*labels must be in \[0, \d+\]; row 0 has -50"),
    ({"train_labels": torch.arange(TRAIN) * 10**9}, r"labels must be in .*; row 3 has 3000000000"),
    ({"train_labels": torch.arange(TRAIN) / 2}, "must be whole numbers"),
    ({"train_embeddings": torch.zeros(TRAIN, 0)}, "with a label per row"),
    ({"train_embeddings": torch.eye(TRAIN).to_sparse()}, "an ordinary tensor .* got torch.sparse_coo"),
    ({"train_embeddings": torch.empty(TRAIN, DIM, device="meta")}, "an ordinary tensor .* on meta"),
    # Of some bytes in the file and of terabytes if each number were written down.
    ({"train_labels": torch.zeros(1, dtype=torch.int64).expand(10**12)}, "that holds each of its numbers"),
    ({"train_embeddings": torch.zeros(1, 1).half().expand(10**6, 10**6)}, "that holds each of its numbers"),
    ({"train_labels": torch.arange(TRAIN + 1)}, "with a label per row"),
    ({"test_labels": [0] * TEST}, "has no tensor 'test_labels' for test_labels"),
]


@pytest.mark.parametrize(
    ("change", "keys", "message"),
    [*(({}, *each) for each in REFUSED_KEYS), *((change, None, message) for change, message in REFUSED_TENSORS)],
)
def test_tensors_and_names_that_do_not_fit_each_other_are_refused(tmp_path, change, keys, message):
    torch.save({**content(), **change}, tmp_path / "file.p")
    with pytest.raises(EmbeddingError, match=message):
        convert(tmp_path / "file.p", tmp_path / "store", keys=keys)
    assert not (tmp_path / "store").exists()


class Malicious:
    def __reduce__(self):
        return os.mkdir, ("pwned",)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_a_file_that_would_run_code_is_refused(tmp_path, monkeypatch, zipped):
    monkeypatch.chdir(tmp_path)
    torch.save({**content(), "more": Malicious()}, "file.p", _use_new_zipfile_serialization=zipped)
    with pytest.raises(EmbeddingError, match=r"is refused: it asks for (posix|nt)\.mkdir, and only tensors"):
        convert("file.p", "store")
    assert not Path("pwned").exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_what_is_no_torch_pickle_is_refused(tmp_path):
    save(tmp_path / "whole")
    save(tmp_path / "whole.legacy", _use_new_zipfile_serialization=False)
    files = {
        "cut": (tmp_path / "whole").read_bytes()[:2000],
        "legacy.cut": (tmp_path / "whole.legacy").read_bytes()[:2000],
        "empty": b"",
        "text": b"hello world, this is no pickle",
        "number": pickle.dumps(3),
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(EmbeddingError, match=f"{name} is not a torch pickle"):
            convert(tmp_path / name, tmp_path / "store")
    torch.save([torch.zeros(3)], tmp_path / "list")
    with pytest.raises(EmbeddingError, match="must hold a dictionary of tensors, it holds list"):
        convert(tmp_path / "list", tmp_path / "store")
    with pytest.raises(EmbeddingError, match=r"there is no file .*missing to convert"):
        convert(tmp_path / "missing", tmp_path / "store")


def test_too_little_memory_or_disk_is_said_before_the_first_shard(tmp_path, monkeypatch):
    save(tmp_path / "file.p", _use_new_zipfile_serialization=False)
    monkeypatch.setattr(embedding_formats.shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(EmbeddingError, match=r"takes another .* free some space or choose another folder"):
        convert(tmp_path / "file.p", tmp_path / "store")
    monkeypatch.setattr(embedding_formats, "available_ram", lambda: 2**10)
    with pytest.raises(EmbeddingError, match=r"cannot be memory-mapped; read whole it takes .* save it again with"):
        convert(tmp_path / "file.p", tmp_path / "store")


def test_a_file_larger_than_the_memory_is_mapped_shared(tmp_path, monkeypatch):
    parts = save(tmp_path / "file.p")
    before = (tmp_path / "file.p").read_bytes()
    load, flags = torch.load, []

    def no_private_map(*arguments, **options):
        flags.append(torch.serialization.get_default_mmap_options())
        if flags[-1] != mmap.MAP_SHARED:
            raise RuntimeError("unable to mmap 53687091200 bytes from file <file.p>: Cannot allocate memory (12)")
        return load(*arguments, **options)

    monkeypatch.setattr(torch, "load", no_private_map)
    assert_holds(convert(tmp_path / "file.p", tmp_path / "store", shard_bytes=SHARD_BYTES), parts)
    assert mmap.MAP_SHARED in flags
    assert (tmp_path / "file.p").read_bytes() == before

    def no_map(*_, **__):
        raise RuntimeError("unable to mmap 53687091200 bytes from file <file.p>: Cannot allocate memory (12)")

    monkeypatch.setattr(torch, "load", no_map)
    with pytest.raises(EmbeddingError, match=r"file\.p cannot be mapped.*chmod u\+w"):
        convert(tmp_path / "file.p", tmp_path / "other")


def test_a_full_disk_keeps_what_is_done(tmp_path, monkeypatch, disk_that_fills_up):
    parts = save(tmp_path / "file.p")
    with pytest.raises(OSError, match="No space left"), disk_that_fills_up():
        convert(tmp_path / "file.p", tmp_path / "store", shard_bytes=SHARD_BYTES)
    assert not list((tmp_path / "store").glob("*.tmp"))
    with pytest.raises(EmbeddingError, match="was not finished"):
        open_store(tmp_path / "store")
    write, written = StoreWriter.write, []
    monkeypatch.setattr(StoreWriter, "write", lambda self, *shard: written.append(shard[:2]) or write(self, *shard))
    assert_holds(convert(tmp_path / "file.p", tmp_path / "store", shard_bytes=SHARD_BYTES), parts)
    assert ("train", 0) not in written
    assert ("test", 0) in written
    assert sorted(path.suffix for path in (tmp_path / "store").iterdir()) == [".json", *[".npy"] * 4]


def test_a_complete_store_is_opened_and_not_written_again(tmp_path):
    parts, manifest = save(tmp_path / "file.p"), tmp_path / "store" / "meta.json"
    convert(tmp_path / "file.p", tmp_path / "store", backbone="net")
    written = manifest.stat().st_mtime_ns
    assert_holds(convert(tmp_path / "file.p", tmp_path / "store", backbone="net"), parts)
    assert manifest.stat().st_mtime_ns == written
    assert convert(tmp_path / "file.p", tmp_path / "store", dtype=torch.float16).backbone == "net"
    message = r"complete store already \(backbone 'net', now 'other'; dtype 'float16', now 'float32'\): delete it"
    with pytest.raises(EmbeddingError, match=message):
        convert(tmp_path / "file.p", tmp_path / "store", dtype=torch.float32, backbone="other")
    convert(tmp_path / "file.p", tmp_path / "wide", dtype=torch.float32)
    with pytest.raises(EmbeddingError, match="dtype 'float32', now 'float16'"):
        convert(tmp_path / "file.p", tmp_path / "wide")
    # Of what the file was before: another size, a later time.
    for more, seconds in ((b"", 60), (b"more", -60)):
        with open(tmp_path / "file.p", "ab") as file:
            file.write(more)
        os.utime(tmp_path / "file.p", (manifest.stat().st_mtime + seconds,) * 2)
        with pytest.raises(EmbeddingError, match=r"was not made of .*file.p as it is now: delete the store"):
            convert(tmp_path / "file.p", tmp_path / "store")
    save(tmp_path / "double.p", dtype=torch.float64)
    with pytest.raises(EmbeddingError, match="must be float16, float32, bfloat16, got float64"):
        convert(tmp_path / "double.p", tmp_path / "double")
    assert not (tmp_path / "double").exists()


@pytest.mark.skipif(not LINUX, reason="reads the peak memory from /proc")
def test_peak_memory_stays_far_below_the_size_of_the_file(tmp_path):
    rows, dim = 24_576, 2048  # 96 MiB
    embeddings = torch.ones(rows, dim, dtype=torch.float16)
    tensors = {"train_embeddings": embeddings, "train_labels": torch.arange(rows)}
    torch.save({**tensors, "test_embeddings": embeddings[:1].clone(), "test_labels": torch.arange(1)}, tmp_path / "f.p")
    program = (
        "import sys\n"
        "from data.embeddings import convert, open_store\n"
        "def peak():\n"
        "    with open('/proc/self/status') as status:\n"
        "        return int(next(line for line in status if line.startswith('VmHWM')).split()[1]) / 1024\n"
        "def reset():\n"
        "    with open('/proc/self/clear_refs', 'w') as file:\n"
        "        file.write('5')\n"
        "reset(); before = peak()\n"
        "convert(sys.argv[1], sys.argv[2], shard_bytes=2**22)\n"
        "converted = peak() - before\n"
        "reset(); before = peak()\n"
        "open_store(sys.argv[2])['train'].labels()\n"
        "print(converted, peak() - before)\n"
    )
    command = [sys.executable, "-c", program, tmp_path / "f.p", tmp_path / "store"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    converting, opening = map(float, done.stdout.split())
    assert converting < 40  # MiB, of 96
    assert opening < 10
