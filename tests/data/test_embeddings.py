"""data/embeddings/ and its commands: what is written comes back, what is damaged or unfinished
is named, and scripts open anything."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from functools import reduce
from operator import getitem
from pathlib import Path

import numpy as np
import pytest
import torch

from data import embeddings as embedding_sets
from data.embeddings import DTYPES, LAYOUTS, MANIFEST, EmbeddingError, StoreWriter, convert, open_or_fetch, open_store
from data.embeddings.__main__ import main
from data.transfers import object_store
from data.transfers.object_store import ObjectStoreError

REPOSITORY = Path(__file__).parents[2]
DIM, CLASSES = 12, 5


def some_rows(count, dtype=torch.float16, seed=0):
    """Random embeddings (count, DIM) and labels (count,), every class among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, DIM, generator=generator).to(dtype), torch.arange(count) % CLASSES


def write_store(folder, train=(7, 5), test=(4,), dtype=torch.float16, **settings):
    """A store of shards with these numbers of rows; returns it and the rows: {split: (embeddings, labels)}."""
    writer = StoreWriter(folder, dim=DIM, dtype=dtype, shard_rows=max(*train, *test), **settings)
    content = {}
    for split, sizes in (("train", train), ("test", test)):
        embeddings, labels = content[split] = some_rows(sum(sizes), dtype, seed=len(split))
        begin = 0
        for number, size in enumerate(sizes):
            writer.write(split, number, embeddings[begin : begin + size], labels[begin : begin + size])
            begin += size
    return writer.finish(), content


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_dtype_comes_back_bit_for_bit(tmp_path, dtype):
    written, content = write_store(tmp_path / "store", dtype=dtype)
    for store in (written, open_store(str(tmp_path / "store"))):
        assert list(store.splits) == ["train", "test"]
        assert (store.dim, store.num_classes) == (DIM, CLASSES)
        for name, (embeddings, labels) in content.items():
            split = store[name]
            assert (split.dim, len(split), split.dtype) == (DIM, len(labels), dtype)
            everything = split.read(torch.arange(len(split)))
            assert everything.dtype == dtype
            assert torch.equal(everything, embeddings)
            assert torch.equal(split.labels(), labels)
    assert store.verify() == []
    # Any tool maps the files, which are as NumPy writes them, to the byte.
    path = tmp_path / "store" / "train.embeddings.npy"
    np.save(tmp_path / "own.npy", np.load(path, mmap_mode="r"))
    assert (tmp_path / "own.npy").read_bytes() == path.read_bytes()
    names = [f"{split}.{part}.npy" for split in ("test", "train") for part in ("embeddings", "labels")]
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["meta.json", *names]


@pytest.mark.parametrize("rows", [[], [0], [11], [6, 7], [0, 2, 3, 11], list(range(12)), [1, 6, 7, 9]], ids=str)
def test_rows_are_read_across_shards_and_gaps(tmp_path, rows):
    rows = torch.tensor(rows, dtype=torch.int64)
    for sizes in ((7, 5), (3, 7, 1, 1)):  # a shard in the middle may be short: the files have no gaps
        store, content = write_store(tmp_path / f"store{len(sizes)}", train=sizes)
        assert [shard.rows for shard in store["train"].shards] == list(sizes)
        assert torch.equal(store["train"].read(rows), content["train"][0][rows])
        assert torch.equal(store["train"].labels(), content["train"][1])
        assert store.verify() == []


def flip_byte(path, position=-1):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(("name", "rows"), [("train.embeddings.npy", "7 to 11"), ("test.labels.npy", "0 to 3")])
def test_verify_names_the_rows_with_a_changed_byte_and_no_other(tmp_path, name, rows):
    write_store(tmp_path / "store")
    flip_byte(tmp_path / "store" / name)
    (problem,) = open_store(tmp_path / "store").verify()
    assert problem == f"{tmp_path / 'store' / name} is damaged: rows {rows} have another SHA-256 than they had"


@pytest.mark.parametrize("name", ["train.embeddings.npy", "test.labels.npy"])
def test_a_file_that_is_cut_short_or_missing_is_named_at_once(tmp_path, name):
    store, _ = write_store(tmp_path / "store")
    path = tmp_path / "store" / name
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
        ("dtype", "bfloat16", "train.embeddings.npy does not hold 12 rows of .*<u2.*12"),  # float16 has the same size
        ("splits.train.0.rows", 9999, r"train.embeddings.npy has 416 bytes where \d+ are expected"),
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
def test_what_is_no_json_is_refused_wherever_a_store_has_some(tmp_path, text, capsys):
    """A manifest and the settings with a sentence; a shard without a record is written again."""
    save_pickle(tmp_path / "file.p")
    whole, half = tmp_path / "whole", tmp_path / "half"
    convert(tmp_path / "file.p", whole)
    damaged = text.encode(errors="surrogateescape")
    (whole / "meta.json").write_bytes(damaged)
    with pytest.raises(EmbeddingError, match=r"meta\.json is damaged: "):
        open_store(whole)
    with pytest.raises(EmbeddingError, match=r"meta\.json is damaged: "):
        convert(tmp_path / "file.p", whole)
    half.mkdir()
    (half / "unfinished.json").write_bytes(damaged)
    with pytest.raises(EmbeddingError, match=rf"unfinished\.json is damaged: .*delete {half} to begin the store again"):
        convert(tmp_path / "file.p", half)
    (half / "unfinished.json").unlink()
    (half / "train-00000.shard.json").write_bytes(damaged)
    assert convert(tmp_path / "file.p", half).verify() == []


@pytest.mark.parametrize("label", [CLASSES, 10**6, -1, -100, -(2**63)])
def test_a_label_out_of_range_is_named_by_its_row(tmp_path, label):
    write_store(tmp_path / "store")
    path = tmp_path / "store" / "train.labels.npy"
    content = bytearray(path.read_bytes())
    content[-8:] = label.to_bytes(8, "little", signed=True)
    path.write_bytes(content)
    store = open_store(tmp_path / "store")
    with pytest.raises(EmbeddingError, match=rf"train: labels must be in \[0, 4\], .*; row 11 has {label}; copy or"):
        store["train"].labels()
    assert len(store["test"].labels()) == 4


def test_what_is_no_store_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "nothing", tmp_path / "file"):
        with pytest.raises(EmbeddingError, match=r"is not an embedding store: there is no meta\.json"):
            open_store(path)
    store, _ = write_store(tmp_path / "store")
    with pytest.raises(EmbeddingError, match="has no split 'valid'; it has train, test"):
        store["valid"]


def test_a_writer_continues_after_a_kill_and_names_what_is_missing(tmp_path):
    embeddings, labels = some_rows(10)
    settings = {"dim": DIM, "dtype": torch.float16, "shard_rows": 10}
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
    os.truncate(tmp_path / "train.embeddings.npy.part", 600)
    assert second.present("train") == {0}
    second.write("train", 2, embeddings, labels)
    second.write("train", 1, embeddings, labels)
    assert len(second.finish()["train"]) == 30
    assert len(list(tmp_path.iterdir())) == 3
    store = open_store(tmp_path)
    assert torch.equal(store["train"].read(torch.arange(30)), embeddings.repeat(3, 1))
    assert (store.checksum, store.details) == (None, {})  # not made of a file
    with pytest.raises(EmbeddingError, match="is a complete store already"):
        StoreWriter(tmp_path, **settings)
    StoreWriter(tmp_path / "other", dim=DIM, dtype=torch.float16, backbone="a")
    with pytest.raises(EmbeddingError, match=r"other settings \(dtype 'float16', now 'float32'; backbone 'a', now 'b'"):
        StoreWriter(tmp_path / "other", dim=DIM, dtype=torch.float32, backbone="b")
    with pytest.raises(EmbeddingError, match="every shard is missing"):
        StoreWriter(tmp_path / "other", dim=DIM, dtype=torch.float16, backbone="a").finish()


# Stores in the earlier format.


def write_old_store(folder):
    """A store of two files for each shard, and its fingerprint, as it was."""
    folder.mkdir()
    content, splits = [], {}
    for split, sizes in (("train", (7, 5)), ("test", (4,))):
        rows, labels = some_rows(sum(sizes), torch.bfloat16, seed=len(split))
        shards, begin = [], 0
        for number, size in enumerate(sizes):
            arrays = {"embeddings": rows.view(torch.int16).numpy().view("<u2"), "labels": labels.numpy()}
            files = {}
            for part, array in arrays.items():
                path = folder / f"{split}-{number:05}.{part}.npy"
                np.save(path, array[begin : begin + size])
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
                files[part] = {"name": path.name, "bytes": path.stat().st_size, "sha256": digest}
            shards.append({"rows": size, "label_min": 0, "label_max": 4, **files})
            begin += size
        splits[split] = {"dtype": "bfloat16", "embeddings_shape": [begin, DIM], "labels_shape": [begin]}
        splits[split] |= {"labels_dtype": "int64", "shards": shards}
        sums = [[shard["embeddings"]["sha256"], shard["labels"]["sha256"]] for shard in shards]
        content.append([split, "bfloat16", sums])
    described = {"num_classes": CLASSES, "backbone": "net", "resolution": 32, "source": "x", "details": {"file": "x"}}
    manifest = {"format": "embedding store", "version": 1, "embedding_dim": DIM, **described, "splits": splits}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def test_a_store_in_the_earlier_format_says_how_to_convert_it_and_keeps_its_fingerprint(tmp_path, capsys):
    old, new = tmp_path / "old", tmp_path / "new"
    fingerprint = write_old_store(old)
    assert main(["info", str(old)]) == 1
    told = f"python -m data.embeddings convert {old} NEW_FOLDER"
    assert told in capsys.readouterr().err
    with pytest.raises(EmbeddingError, match="earlier format"):
        StoreWriter(old, dim=DIM, dtype=torch.float16)
    assert main(["convert", str(old), str(new)]) == 0
    store = open_store(new)
    assert (store.fingerprint, store.verify(), store.backbone) == (fingerprint, [], "net")
    assert torch.equal(store["train"].read(torch.arange(12)), some_rows(12, torch.bfloat16, seed=5)[0])
    assert main(["convert", str(old), str(new)]) == 1  # a complete store already
    (old / "train-00001.labels.npy").unlink()
    manifest = (old / "manifest.json").read_text()
    for damaged in ("", "[]", "{}", manifest.replace('"rows"', '"lines"'), manifest):
        (old / "manifest.json").write_text(damaged)
        assert main(["convert", str(old), str(tmp_path / "other")]) == 1
        assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")


# The commands, and what scripts open with.


def save_pickle(path, layout="wsl"):
    embeddings, labels = some_rows(30)
    parts = {
        "train_embeddings": embeddings,
        "train_labels": labels,
        "test_embeddings": embeddings,
        "test_labels": labels,
    }
    torch.save({key: parts[name].clone() for name, key in LAYOUTS[layout].items()}, path)
    return embeddings


def test_list_shows_names_keys_tensors_and_what_is_here(tmp_path, capsys):
    here = object_store.cached_path("wsl-32x8d-320", tmp_path)
    here.write_text("x")
    assert main(["list", "--cache_dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert all(name in out and key in out for name, key in object_store.PUBLISHED.items())
    assert "imagenet21k_val_labels" in out
    assert out.count("here: no") == 5
    assert f"here: {here}" in out


def test_convert_info_and_verify(tmp_path, capsys):
    save_pickle(tmp_path / "file.p")
    store = str(tmp_path / "store")
    assert main(["convert", str(tmp_path / "file.p"), store, "--backbone", "net", "--dtype", "bfloat16"]) == 0
    described = capsys.readouterr().out
    assert main(["info", store]) == 0
    assert capsys.readouterr().out == described
    for words in ("5 classes, 12 dimensions", "net", "file.p", "30 rows of bfloat16 in 1 shards", "not known"):
        assert words in described
    assert main(["verify", store]) == 0
    assert "every shard matches its checksum" in capsys.readouterr().out
    flip_byte(tmp_path / "store" / "test.labels.npy")
    assert main(["verify", store]) == 1
    assert "test.labels.npy is damaged: rows 0 to 29" in capsys.readouterr().err


WRONG = [
    *("", "unknown", "verify", "convert file", "fetch file --dtype float16", "fetch file --train_labels y"),
    *(f"convert file store {flag}" for flag in ("--dtype float64", "--num_classes 0", "--dt float16")),
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
    save_pickle(tmp_path / "file.p")
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
    embeddings = save_pickle(tmp_path / "file.p", "imagenet21k")
    store = open_or_fetch(tmp_path / "file.p")
    assert (store.path, store.source) == (tmp_path / "file.store", "file.p")
    monkeypatch.chdir(tmp_path)
    assert open_or_fetch("./file.p").path == Path("file.store")  # the same file by another name
    assert torch.equal(store["test"].read(torch.arange(30)), embeddings)
    narrow = open_or_fetch(str(tmp_path / "file.p"), dtype=torch.bfloat16)
    assert narrow.path == tmp_path / "file.bfloat16.store"
    shutil.rmtree(narrow.path)
    narrow.path.write_text("in the way")  # or a folder that takes no files
    with pytest.raises(EmbeddingError, match=r"make it elsewhere by .* convert .*file\.p FOLDER"):
        open_or_fetch("file.p", dtype=torch.bfloat16)


def test_a_checksum_holds_for_any_source_and_its_absence_is_said(tmp_path, server, capsys):
    file = tmp_path / "set.p"
    save_pickle(file)
    server.content, other = file.read_bytes(), "0" * 64
    digest = hashlib.sha256(server.content).hexdigest()

    # A file on this disk.
    assert main(["convert", str(file), str(tmp_path / "a.store"), "--sha256", other]) == 1
    assert f"has SHA-256 {digest} instead of {other}" in capsys.readouterr().err
    assert not (tmp_path / "a.store").exists()
    assert main(["convert", str(file), str(tmp_path / "a.store"), "--sha256", digest.upper()]) == 0
    assert f"checksum    sha256 {digest} (of the file" in capsys.readouterr().out
    assert main(["convert", str(file), str(tmp_path / "b.store")]) == 0
    assert "checksum    unverified (of the file" in capsys.readouterr().out

    # A store: by its fingerprint, or the sum of the file that it was made of.
    store = open_store(tmp_path / "a.store")
    assert main(["info", str(store.path)]) == 0
    assert f"fingerprint {store.fingerprint}\n" in capsys.readouterr().out
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
    file = object_store.cached_path("efficientnet-l2-800", tmp_path / "cache")
    file.parent.mkdir()
    embeddings = save_pickle(file, "efficientnet-l2")  # placed by hand
    server.content = file.read_bytes()
    assert main(["fetch", "efficientnet-l2-800", "--cache_dir", str(file.parent)]) == 0
    assert capsys.readouterr().out.strip() == str(file)
    sources = {f"{server.endpoint}/set.p": (None, None), "efficientnet-l2-800": ("tf_efficientnet_l2_ns", 800)}
    for source, known in sources.items():
        store = open_or_fetch(source, file.parent)
        assert torch.equal(store["test"].read(torch.arange(30)), embeddings)
        assert (store.source, store.backbone, store.resolution) == (source, *known)
        # The store stands for the file from now on.
        object_store.cached_path(source, file.parent).unlink()
        server.paths.clear()
        assert main(["fetch", source, "--convert", "--cache_dir", str(file.parent)]) == 0
        assert capsys.readouterr().out.strip() == str(store.path)
        assert server.paths == []


def test_a_store_in_a_bucket_is_fetched_once(tmp_path, bucket, moto, monkeypatch):
    store, _ = write_store(tmp_path / "store")
    for number, prefix in enumerate(("my/store", "v1.0/", "photos.store")):
        object_store.upload(store.path, f"s3://store/{prefix}", endpoint_url=moto, last=MANIFEST)
        options = {"cache_dir": tmp_path / f"cache{number}", "endpoint_url": moto}
        back = open_or_fetch(f"s3://store/{prefix}", **options)
        assert (back.fingerprint, back.verify()) == (store.fingerprint, [])
    # One that lost a file fetches that; a complete one needs no server, and no permission to write.
    kept = (back.path / "test.labels.npy").stat().st_mtime_ns
    next(back.path.glob("train*.npy")).unlink()
    assert open_or_fetch(f"s3://store/{prefix}", **options).verify() == []
    assert (back.path / "test.labels.npy").stat().st_mtime_ns == kept
    bucket.delete_object(Bucket="store", Key=f"{prefix}/{MANIFEST}")
    shutil.rmtree(back.path / ".partial")
    assert open_or_fetch(f"s3://store/{prefix}", **options).path == back.path
    assert not (back.path / ".partial").exists()
    with pytest.raises(ObjectStoreError, match=r"has no meta\.json .*one whose upload has not ended.*NoSuchKey"):
        open_or_fetch(f"s3://store/{prefix}", tmp_path / "new", endpoint_url=moto)
    with pytest.raises(ObjectStoreError, match="NoSuchBucket"):
        open_or_fetch("s3://nothing/nothing", **options)


def test_a_store_that_is_replaced_while_it_is_fetched_comes_in_one_version(tmp_path, bucket, moto, monkeypatch):
    store, _ = write_store(tmp_path / "store")
    other, _ = write_store(tmp_path / "other", dtype=torch.bfloat16)  # files of the same sizes
    up, options = {"endpoint_url": moto, "last": MANIFEST}, {"cache_dir": tmp_path / "cache", "endpoint_url": moto}
    object_store.upload(store.path, "s3://store/set", **up)
    look, changes = embedding_sets._damaged, ["train", "test"]

    def replacing(*arguments):
        found = look(*arguments)
        while changes:
            name = f"{changes.pop()}.embeddings.npy"
            bucket.put_object(Bucket="store", Key=f"set/{name}", Body=(other.path / name).read_bytes())
        return found

    monkeypatch.setattr(embedding_sets, "_damaged", replacing)
    with pytest.raises(ObjectStoreError, match=r"train\.embed.*, test\.embed.* did not come as meta\.json says"):
        open_or_fetch("s3://store/set", **options)
    assert not list(tmp_path.glob("cache/*/meta.json"))
    object_store.upload(other.path, "s3://store/set", **up)
    assert open_or_fetch("s3://store/set", **options).fingerprint == other.fingerprint
