"""data/embeddings/ and its commands: what is written comes back, what is damaged or unfinished
is named, and scripts open anything."""

import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
from functools import reduce
from operator import getitem
from pathlib import Path

import numpy as np
import pytest
import torch
from data.embeddings.__main__ import main
from data.transfers import object_store
from data.transfers.object_store import ObjectStoreError

from data.embeddings import DTYPES, EmbeddingError, StoreWriter, convert, open_or_fetch, open_store
from data.embeddings import store as stores
from data.published import PUBLISHED
from tests.data.embedding_files import CLASSES, DIM, TEST, TRAIN, assert_holds, content, save, write_store

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("sizes", [(60, 40), (30, 45, 10, 15)], ids=str)  # one in the middle may be short: no gaps
def test_what_is_written_comes_back_bit_for_bit(tmp_path, dtype, sizes):
    written, parts = write_store(tmp_path / "store", sizes, dtype)
    for store in (written, open_store(str(tmp_path / "store"))):
        assert list(store.splits) == ["train", "test"]
        assert [shard.rows for shard in store["train"].shards] == list(sizes)
        assert_holds(store, parts)
        for rows in ([], [0], [99], [29, 30, 74, 75], [0, 2, 3, 99]):  # across shards and gaps
            chosen = torch.tensor(rows, dtype=torch.int64)
            assert torch.equal(store["train"].read(chosen), parts["train_embeddings"][chosen])
    # Any tool maps the files, which are as NumPy writes them, to the byte.
    path = tmp_path / "store" / "train.embeddings.npy"
    np.save(tmp_path / "own.npy", np.load(path, mmap_mode="r"))
    assert (tmp_path / "own.npy").read_bytes() == path.read_bytes()
    names = [f"{split}.{part}.npy" for split in ("test", "train") for part in ("embeddings", "labels")]
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["meta.json", *names]


def overwrite_end(path, last):
    path.write_bytes(path.read_bytes()[: -len(last)] + last)


@pytest.mark.parametrize(("name", "rows"), [("train.embeddings.npy", "60 to 99"), ("test.labels.npy", "0 to 29")])
def test_what_is_damaged_cut_short_or_missing_is_named_and_no_other(tmp_path, name, rows, capsys):
    store, _ = write_store(tmp_path / "store")
    path, command = tmp_path / "store" / name, ["verify", str(tmp_path / "store")]
    assert main(command) == 0
    assert "every shard matches its checksum" in capsys.readouterr().out
    overwrite_end(path, bytes([path.read_bytes()[-1] ^ 1]))
    assert main(command) == 1
    assert capsys.readouterr().err == f"error: {path} is damaged: rows {rows} have another SHA-256 than they had\n"
    size = path.stat().st_size
    os.truncate(path, size - 1)
    with pytest.raises(EmbeddingError, match=rf"{name} has {size - 1} bytes where {size} are expected"):
        open_store(tmp_path / "store")
    path.unlink()
    with pytest.raises(EmbeddingError, match=f"{name} is missing"):
        open_store(tmp_path / "store")
    assert [name in problem for problem in store.verify()] == [True]


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("dtype", "bfloat16", "train.embeddings.npy does not hold 100 rows of .*<u2.*16"),  # float16 has the same size
        ("splits.train.0.rows", 9999, r"train.embeddings.npy has 3328 bytes where \d+ are expected"),
        ("version", 3, "meta.json is damaged: version: Input should be 2, got 3.*read it with the code that wrote it"),
        ("format", "other", "format: Input should be 'embedding store', got 'other'"),
        ("num_classes", 10**12, "num_classes: .* got 1000000000000"),
        ("dim", 12.0, "dim: .* got 12.0"),
        ("dtype", "int8", "dtype: Input should be 'float16', 'float32' or 'bfloat16'"),
        ("details", None, "details: "),
        ("splits", {}, "splits: "),
        ("splits", {"../outside": []}, "splits.../outside"),
        ("splits.train", [], "splits.train: "),
        ("splits.train.0.labels", "a\0b", "train.0.labels: "),
    ],
)
def test_a_changed_manifest_is_refused(tmp_path, place, value, message):
    write_store(tmp_path / "store")
    path = tmp_path / "store" / "meta.json"
    manifest = json.loads(path.read_text())
    *above, last = (int(part) if part.isdecimal() else part for part in place.split("."))
    reduce(getitem, above, manifest)[last] = value
    path.write_text(json.dumps(manifest))
    with pytest.raises(EmbeddingError, match=message):
        open_store(tmp_path / "store")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "\udcff", "[" * 100_000, '{"splits": ' * 5000])
def test_what_is_no_json_is_refused_wherever_a_store_has_some(tmp_path, text):
    """A manifest and the settings with a sentence; a shard without a record is written again."""
    parts, damaged = save(tmp_path / "file.p"), text.encode(errors="surrogateescape")
    whole, half = tmp_path / "whole", tmp_path / "half"
    whole.mkdir()
    (whole / "meta.json").write_bytes(damaged)
    for opening in (open_store, lambda folder: convert(tmp_path / "file.p", folder)):
        with pytest.raises(EmbeddingError, match=r"meta\.json is damaged: "):
            opening(whole)
    half.mkdir()
    (half / "unfinished.json").write_bytes(damaged)
    with pytest.raises(EmbeddingError, match=rf"unfinished\.json is damaged: .*delete {half} to begin the store again"):
        convert(tmp_path / "file.p", half)
    (half / "unfinished.json").unlink()
    (half / "train-00000.shard.json").write_bytes(damaged)
    assert_holds(convert(tmp_path / "file.p", half), parts)


@pytest.mark.parametrize("label", [CLASSES, 10**6, -1, -(2**63)])
def test_a_label_out_of_range_is_named_by_its_row(tmp_path, label):
    write_store(tmp_path / "store")
    overwrite_end(tmp_path / "store" / "train.labels.npy", label.to_bytes(8, "little", signed=True))
    store = open_store(tmp_path / "store")
    with pytest.raises(EmbeddingError, match=rf"train: labels must be in \[0, 6\], .*; row 99 has {label}; copy or"):
        store["train"].labels()
    assert len(store["test"].labels()) == TEST


def test_what_is_no_store_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "nothing", tmp_path / "file"):
        with pytest.raises(EmbeddingError, match=r"is not an embedding store: there is no meta\.json"):
            open_store(path)
    store, _ = write_store(tmp_path / "store")
    with pytest.raises(EmbeddingError, match="has no split 'valid'; it has train, test"):
        store["valid"]


def test_a_writer_continues_after_a_kill_and_names_what_is_missing(tmp_path):
    embeddings, labels = (content()[f"test_{part}"] for part in ("embeddings", "labels"))
    settings = {"dim": DIM, "dtype": torch.float16, "shard_rows": TEST}
    first, other = StoreWriter(tmp_path, **settings), StoreWriter(tmp_path, **settings)  # as of two processes
    first.write("train", 0, embeddings, labels)
    other.write("train", 2, embeddings, labels.to(torch.int16))
    with pytest.raises(EmbeddingError, match=r"train-00001: labels must be in \[0, 2147483646\]; row 0 has -1"):
        first.write("train", 1, embeddings, labels - 1)
    assert first.present("train") == {0, 2}
    (tmp_path / ".train-00001.shard.json.123.tmp").write_text("left by a killed writer")
    with pytest.raises(EmbeddingError, match="was not finished: give the command that was writing it again"):
        open_store(tmp_path)
    second = StoreWriter(tmp_path, **settings)
    assert second.present("train") == {0, 2}
    for shards, missing in ((None, "train-00001 is"), ({"train": 5}, "train-00001, train-00003, train-00004 is")):
        with pytest.raises(EmbeddingError, match=f"{missing} missing"):
            second.finish(shards)
    os.truncate(tmp_path / "train.embeddings.npy.part", 2000)
    assert second.present("train") == {0}
    second.write("train", 2, embeddings, labels)
    second.write("train", 1, embeddings, labels)
    store = second.finish()
    assert len(list(tmp_path.iterdir())) == 3
    assert torch.equal(store["train"].read(torch.arange(3 * TEST)), embeddings.repeat(3, 1))
    assert (store.checksum, store.details) == (None, {})  # not made of a file
    with pytest.raises(EmbeddingError, match="is a complete store already"):
        StoreWriter(tmp_path, **settings)
    begun = StoreWriter(tmp_path / "other", dim=DIM, dtype=torch.float16, backbone="a")
    with pytest.raises(EmbeddingError, match=r"other settings \(dtype 'float16', now 'float32'; backbone 'a', now 'b'"):
        StoreWriter(tmp_path / "other", dim=DIM, dtype=torch.float32, backbone="b")
    with pytest.raises(EmbeddingError, match="every shard is missing"):
        begun.finish()


def test_the_fingerprint_is_of_the_sums_of_each_shards_npy_files(tmp_path):
    """Run ids hold it: the same rows must have the same one, whatever a store's files are called."""
    store, _ = write_store(tmp_path / "set", dtype=torch.bfloat16)
    for name, split in store.splits.items():
        begin = 0
        for shard in split.shards:
            for part in ("embeddings", "labels"):
                np.save(tmp_path / "shard.npy", np.load(store.path / f"{name}.{part}.npy")[begin : begin + shard.rows])
                assert getattr(shard, part) == hashlib.sha256((tmp_path / "shard.npy").read_bytes()).hexdigest()
            begin += shard.rows
    sums = [
        [name, "bfloat16", [[each.embeddings, each.labels] for each in store[name].shards]] for name in store.splits
    ]
    assert store.fingerprint == hashlib.sha256(json.dumps(sums).encode()).hexdigest()


# The commands, and what scripts open with.


def test_list_shows_names_keys_tensors_and_what_is_here(tmp_path, capsys):
    here = object_store.resolve("wsl-32x8d-320", tmp_path).path
    here.write_text("x")
    assert main(["list", "--cache_dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert all(name in out and key in out for name, key in PUBLISHED.items())
    assert "imagenet21k_val_labels" in out
    assert out.count("here: no") == 5
    assert f"here: {here}" in out


WRONG = [
    *("", "unknown", "verify", "convert file", "fetch file --nosuch y"),
    *("convert file store --dtype float64", "convert file store --dt float16"),
]


@pytest.mark.parametrize("command", [*map(str.split, WRONG), ["fetch", ""], ["convert", "file", ""]], ids=" ".join)
def test_a_wrong_command_line_ends_with_status_2(command, capsys):
    assert main(command) == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        *(["info", "nothing"], ["verify", "nothing"], ["convert", "missing.p", "nothing"], ["fetch", "nothing.p"]),
        *(["fetch", "--convert", "nothing.p"], ["fetch", "http://[::1/x.pt"], ["fetch", "http://a:b/x.pt"]),
        *(["fetch", "s3://bucket/x.pt", "--endpoint_url", url] for url in ("http://[::1", "http://a b", "garbage")),
        *(["fetch", "~nosuchuser/x.pt"], ["convert", "file.p", "/proc/nothing"]),
    ],
    ids=" ".join,
)
def test_a_failure_ends_with_status_1_and_a_sentence(tmp_path, command, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "load", None)  # that is called for no file that must be refused before
    save(tmp_path / "file.p")
    assert main(command) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert message.count("\n") == 1


def test_the_module_runs_as_a_command_and_catches_its_own_errors(tmp_path):
    command = [sys.executable, "-m", "data.embeddings", "info", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: {tmp_path} is not an embedding store: there is no meta.json in it\n"


def test_a_pickle_on_this_disk_becomes_a_store_beside_it(tmp_path, monkeypatch):
    parts = save(tmp_path / "file.p", "imagenet21k")
    store = open_or_fetch(tmp_path / "file.p")
    assert (store.path, store.source) == (tmp_path / "file.store", "file.p")
    assert_holds(store, parts)
    monkeypatch.chdir(tmp_path)
    assert open_or_fetch("./file.p").path == Path("file.store")  # the same file by another name
    save(tmp_path / "other.p")
    (tmp_path / "other.store").write_text("in the way")  # or a folder that takes no files
    with pytest.raises(EmbeddingError, match=r"make it elsewhere by .* convert .*other\.p FOLDER"):
        open_or_fetch("other.p")


def test_info_tells_what_a_store_holds_and_a_checksum_holds_for_any_source(tmp_path, server, capsys):
    file = tmp_path / "set.p"
    save(file)
    server.content, other = file.read_bytes(), "0" * 64
    digest = hashlib.sha256(server.content).hexdigest()

    # A file on this disk.
    command = ["convert", str(file), str(tmp_path / "a.store")]
    assert main([*command, "--sha256", other]) == 1
    assert f"has SHA-256 {digest} instead of {other}" in capsys.readouterr().err
    assert not (tmp_path / "a.store").exists()
    assert main([*command, "--sha256", digest.upper(), "--backbone", "net", "--dtype", "bfloat16"]) == 0
    described, store = capsys.readouterr().out, open_store(tmp_path / "a.store")
    assert main(["info", str(store.path)]) == 0
    assert capsys.readouterr().out == described
    words = ("7 classes, 16 dimensions", "net", "set.p", f"{TRAIN} rows of bfloat16 in 1 shards", "not known")
    for each in (*words, f"fingerprint {store.fingerprint}\n", f"checksum    sha256 {digest} (of the file"):
        assert each in described
    assert main(["convert", str(file), str(tmp_path / "b.store")]) == 0
    assert "checksum    unverified (of the file" in capsys.readouterr().out

    # A store: by its fingerprint, or the sum of the file that it was made of.
    for known in (store.fingerprint, digest):
        assert open_or_fetch(store.path, sha256=known).checksum == f"sha256 {digest}"
    with pytest.raises(EmbeddingError, match=f"has the fingerprint {store.fingerprint}, .*; neither is {other}"):
        open_or_fetch(store.path, sha256=other)

    # An address, and the store that stands for its file.
    for number, (given, expected) in enumerate(((None, "unverified"), (digest, f"sha256 {digest}"))):
        options = {"cache_dir": tmp_path / f"cache{number}", "sha256": given}
        assert open_or_fetch(f"{server.endpoint}/set.p", **options).checksum == expected
        next(options["cache_dir"].glob("*.p")).unlink()
        assert open_or_fetch(f"{server.endpoint}/set.p", **options).checksum == expected
        with pytest.raises(EmbeddingError, match=f"neither is {other}"):
            open_or_fetch(f"{server.endpoint}/set.p", **{**options, "sha256": other})


def test_an_address_or_a_short_name_is_fetched_and_converted_once(tmp_path, server, capsys):
    file = object_store.resolve("efficientnet-l2-800", tmp_path / "cache").path
    file.parent.mkdir()
    parts = save(file, "efficientnet-l2")  # placed by hand
    server.content = file.read_bytes()
    assert main(["fetch", "efficientnet-l2-800", "--cache_dir", str(file.parent)]) == 0
    assert capsys.readouterr().out.strip() == str(file)
    sources = {f"{server.endpoint}/set.p": (None, None), "efficientnet-l2-800": ("tf_efficientnet_l2_ns", 800)}
    for source, known in sources.items():
        store = open_or_fetch(source, file.parent)
        assert_holds(store, parts)
        assert (store.source, store.backbone, store.resolution) == (source, *known)
        # The store stands for the file from now on.
        object_store.resolve(source, file.parent).path.unlink()
        server.paths.clear()
        assert main(["fetch", source, "--convert", "--cache_dir", str(file.parent)]) == 0
        assert capsys.readouterr().out.strip() == str(store.path)
        assert server.paths == []


def test_a_store_in_a_bucket_is_fetched_once(tmp_path, bucket, moto):
    store, _ = write_store(tmp_path / "store")
    for number, prefix in enumerate(("my/store", "v1.0/", "photos.store")):
        object_store.upload(store.path, f"s3://store/{prefix}", endpoint_url=moto)
        options = {"cache_dir": tmp_path / f"cache{number}", "endpoint_url": moto}
        back = open_or_fetch(f"s3://store/{prefix}", **options)
        assert (back.fingerprint, back.verify()) == (store.fingerprint, [])
    # One that lost a file fetches that; a complete one needs no server, and no permission to write.
    kept = (back.path / "test.labels.npy").stat().st_mtime_ns
    next(back.path.glob("train*.npy")).unlink()
    assert open_or_fetch(f"s3://store/{prefix}", **options).verify() == []
    assert (back.path / "test.labels.npy").stat().st_mtime_ns == kept
    bucket.delete_object(Bucket="store", Key=f"{prefix}/meta.json")
    shutil.rmtree(back.path / ".partial")
    assert open_or_fetch(f"s3://store/{prefix}", **options).path == back.path
    assert not (back.path / ".partial").exists()
    with pytest.raises(ObjectStoreError, match=r"has no meta\.json .*a store whose upload has not ended.*NoSuchKey"):
        open_or_fetch(f"s3://store/{prefix}", tmp_path / "new", endpoint_url=moto)
    with pytest.raises(ObjectStoreError, match="NoSuchBucket"):
        open_or_fetch("s3://nothing/nothing", **options)


def test_a_store_that_is_replaced_while_it_is_fetched_comes_in_one_version(tmp_path, bucket, moto, monkeypatch):
    store, _ = write_store(tmp_path / "store")
    other, _ = write_store(tmp_path / "other", dtype=torch.bfloat16)  # files of the same sizes
    up, options = {"endpoint_url": moto}, {"cache_dir": tmp_path / "cache", "endpoint_url": moto}
    object_store.upload(store.path, "s3://store/set", **up)
    read, changes = stores.read_manifest, ["train", "test"]

    def replacing(path):
        """The files change when the manifest has come."""
        while changes and path.exists():
            name = f"{changes.pop()}.embeddings.npy"
            bucket.put_object(Bucket="store", Key=f"set/{name}", Body=(other.path / name).read_bytes())
        return read(path)

    monkeypatch.setattr(stores, "read_manifest", replacing)
    with pytest.raises(ObjectStoreError, match=r"train\.embed.*, test\.embed.* did not come as meta\.json says"):
        open_or_fetch("s3://store/set", **options)
    assert not list(tmp_path.glob("cache/*/meta.json"))
    object_store.upload(other.path, "s3://store/set", **up)
    assert open_or_fetch("s3://store/set", **options).fingerprint == other.fingerprint


def test_a_shard_that_finds_no_room_names_its_file_and_is_written_again(tmp_path):
    store, before = tmp_path / "store", resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = StoreWriter(store, dim=DIM, dtype=torch.float16)
    embeddings, labels = torch.randn(4000, DIM).half(), torch.arange(4000) % 7
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))  # no file may be longer, as on a full disk
    try:
        with pytest.raises(OSError, match=r"train\.embeddings\.npy\.part"):
            writer.write("train", 0, embeddings, labels)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    writer.write("train", 0, embeddings, labels)
    assert torch.equal(writer.finish()["train"].read(torch.arange(4000)), embeddings)
