"""The script as a user meets it: stores, resume to the byte, broken images, several processes, S3, refusals.

A network of timm's for tests, with random weights, sees generated images.
"""

import os
import shutil
import signal
from functools import partial
from pathlib import Path

import boto3
import numpy as np
import pytest
import timm
import torch
from data.cifar100 import DIGITS_MEAN, DIGITS_STD, load_complete, load_dataset, normalise
from data.image_sources import Images, open_images
from experiments.shared.checkpoint import read_checkpoint, write_checkpoint
from filelock import FileLock
from models.backbones import backbone
from PIL import Image

from data.embeddings import open_or_fetch, open_store
from experiments import extract_embeddings as script
from experiments import train_cifar100
from models.resnet_cifar import resnet_cifar
from tests.experiments.runs import check_refused, stop
from tests.processes import together, torchrun

NETWORK = ["--backbone", "test_resnet", "--weights", "none", "--resolution", "32"]
MACHINE = ["--device", "cpu", "--threads", "1", "--workers", "0", "--batch_size", "3"]
QUICK = [*NETWORK, *MACHINE]


@pytest.fixture
def images(tmp_path):
    return make_images(tmp_path / "images")


def make_images(folder: Path, train: int = 20, test: int = 7) -> Path:
    """Pictures of random blocks in two classes, as train/ and test/."""
    generator = np.random.default_rng(0)
    for split, count in (("train", train), ("test", test)):
        for row in range(count):
            path = folder / split / f"class {row * 2 // count}" / f"{row:03}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            blocks = Image.fromarray(generator.integers(0, 256, (2, 3, 3), np.uint8))
            blocks.resize((48, 40), Image.Resampling.NEAREST).save(path, quality=95)
    return folder


def command(images: Path, store: Path, flags: str = "") -> list[str]:
    return [*QUICK, "--dataset", str(images), "--store", str(store), "--shard_rows", "5", *flags.split()]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def expected_features(images: Path, split: str) -> torch.Tensor:
    """Features (rows, dim) in float32, one image at a time, by what the script is made of."""
    network = backbone("test_resnet", "none", 32)
    listed = open_images(str(images), "").splits[split]
    with torch.no_grad():
        rows = [network.features(network.transform(listed.read(row)[0])[None]) for row in range(len(listed))]
    return torch.cat(rows)


# The store


def test_a_folder_becomes_a_store(images, tmp_path, capsys):
    assert script.main(command(images, tmp_path / "s")) == 0
    store = open_store(tmp_path / "s")
    assert store.verify() == []
    assert (store.dim, store.num_classes, store.backbone, store.resolution) == (96, 2, "timm:test_resnet", 32)
    assert store.source == "folder:images"
    assert {name: len(split) for name, split in store.splits.items()} == {"train": 20, "test": 7}
    assert [shard.rows for shard in store["train"].shards] == [5, 5, 5, 5]
    assert [shard.rows for shard in store["test"].shards] == [5, 2]
    for split in ("train", "test"):
        rows = store[split].read(torch.arange(len(store[split])))
        assert rows.dtype == torch.float16
        expected = expected_features(images, split)
        torch.testing.assert_close(rows.float(), expected, rtol=2e-3, atol=1e-4)
        distances = torch.cdist(expected, expected) + torch.eye(len(expected))
        assert distances.min() > 0.02  # so that the order of the rows counts
    assert store["train"].labels().tolist() == [0] * 10 + [1] * 10
    details = store.details
    assert (details["weights"], details["precision"], details["shard_rows"]) == ("none", "fp32", 5)
    assert (details["class_names"], details["images"]["images"]) == (["class 0", "class 1"], {"train": 20, "test": 7})
    assert "Resize" in details["transform"]
    assert store.details["weights_sha256"] == backbone("test_resnet", "none").weights_sha256()
    printed = capsys.readouterr().out
    assert f"store: {tmp_path / 's'}" in printed
    assert "20 train, 7 test rows of 96 float16, 2 classes" in printed
    assert "27 images in" in printed
    assert f"python experiments/finetune_imagenet.py -d {tmp_path / 's'}" in printed


@pytest.mark.parametrize(
    ("flags", "tolerance"),
    [("--dtype bfloat16", 1e-2), ("--dtype float32", 1e-5), ("--dtype float32 --precision bf16", 0.1)],
)
def test_other_dtypes_and_autocast(images, tmp_path, flags, tolerance):
    assert script.main(command(images, tmp_path / "s", flags)) == 0
    store = open_store(tmp_path / "s")
    rows, expected = store["test"].read(torch.arange(7)), expected_features(images, "test")
    assert rows.dtype == (torch.bfloat16 if "--dtype bfloat16" in flags else torch.float32)
    torch.testing.assert_close(rows.float(), expected, rtol=tolerance, atol=min(tolerance, 0.02))
    if "--precision" in flags:
        assert (rows - expected).abs().max() > 1e-4  # it was computed with fewer digits indeed
        assert store.details["precision"] == "bf16"


def test_digits_with_limits_into_a_place_of_its_own_and_one_split_alone(images, tmp_path, monkeypatch):
    assert script.main([*QUICK, "--test_dir", str(images / "test"), "--store", str(tmp_path / "s")]) == 0
    assert list(open_store(tmp_path / "s").splits) == ["test"]
    monkeypatch.setattr(script, "ROOT", tmp_path)
    assert script.main([*QUICK, "--dataset", "digits", "--limit_train", "20", "--limit_test", "6"]) == 0
    (folder,) = (tmp_path / "data" / "downloads" / "embeddings").glob("*.store")
    assert folder.name == "digits-timm_test_resnet-32-float16.store"
    store = open_store(folder)
    assert (len(store["train"]), len(store["test"]), store.num_classes) == (20, 6, 10)
    train, _, _ = load_complete("digits", "")
    assert store["train"].labels().tolist() == train.labels[torch.arange(20) * 1437 // 20].tolist()


def test_a_complete_store_is_not_made_again(images, tmp_path, monkeypatch, capsys):
    script.main(command(images, tmp_path / "s"))
    before = files(tmp_path / "s")
    monkeypatch.setattr(script, "shards_of_features", lambda *_, **__: pytest.fail("extracted again"))
    capsys.readouterr()
    assert script.main(command(images, tmp_path / "s")) == 0
    assert "skipped: " in capsys.readouterr().out
    assert script.main(command(images, tmp_path / "s", "--dtype float32 --precision bf16")) == 2
    message = capsys.readouterr().err
    assert "dtype torch.float16, now torch.float32; precision 'fp32', now 'bf16'" in message
    (images / "train" / "class 0" / "new.jpg").write_bytes((images / "train" / "class 0" / "000.jpg").read_bytes())
    assert script.main(command(images, tmp_path / "s")) == 2
    assert "'train': 20" in capsys.readouterr().err
    assert files(tmp_path / "s") == before


# A checkpoint of train_cifar100.py


def test_a_checkpoint_becomes_a_backbone(tmp_path, capsys):
    flags = "--method softmax_cross_entropy --dataset digits --limit_train 40 --limit_test 20 --batch_size 16"
    machine = ["--n_epochs", "1", "--device", "cpu", "--threads", "1", "--results", str(tmp_path / "r.csv")]
    assert train_cifar100.main([*flags.split(), *machine]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    flags = [*MACHINE, "--dataset", "digits", "--limit_train", "4", "--limit_test", "9", "--store", str(tmp_path / "s")]
    assert script.main([*flags, "--checkpoint", str(run / "checkpoint.pt"), "--dtype", "float32"]) == 0
    store = open_store(tmp_path / "s")
    network = resnet_cifar("resnet18", 10).eval()
    network.load_state_dict(read_checkpoint(run / "checkpoint.pt")["model"])
    _, test, _ = load_complete("digits", "")
    chosen = torch.arange(9) * 360 // 9
    with torch.no_grad():
        logits = network(normalise(test.images[chosen], DIGITS_MEAN, DIGITS_STD))
        from_store = network.fc(store["test"].read(torch.arange(9)))
    torch.testing.assert_close(from_store, logits)
    assert (store.dim, store.resolution, store.backbone) == (512, 32, "digits-resnet18")
    # What did not train the network validates heads on it: 2 of the 40 images.
    assert {name: len(split) for name, split in store.splits.items()} == {"train": 4, "valid": 2, "test": 9}
    divided = load_dataset("digits", "", seed=0, limit_train=40)
    assert torch.equal(store["valid"].labels(), divided.valid.labels)
    assert torch.equal(store["train"].labels(), divided.train.labels[torch.arange(4) * 38 // 4])
    # The folder will do; what is no checkpoint gets a sentence.
    assert script.main([*flags, "--checkpoint", str(run), "--dtype", "float32"]) == 0
    capsys.readouterr()
    write_checkpoint(tmp_path / "other.pt", {"weights": {}})
    for name, content, message in (
        ("checkpoint.pt", b"truncated", "is damaged"),
        ("checkpoint.pt", (tmp_path / "other.pt").read_bytes(), "is not a checkpoint of these scripts"),
        ("config.json", b'{"model": "resnet18"}', "is not a checkpoint of train_cifar100.py"),
        ("config.json", b'{"model": "resnet34", "dataset": "digits"}', "is not a checkpoint of train_cifar100.py"),
        ("config.json", b"[" * 100_000, "is not a checkpoint of train_cifar100.py"),
        ("config.json", None, "there is no"),
    ):
        shutil.copytree(run, tmp_path / "copy")
        (tmp_path / "copy" / name).unlink()
        if content is not None:
            (tmp_path / "copy" / name).write_bytes(content)
        check_refused(script.main, [*flags, "--checkpoint", str(tmp_path / "copy")], message, capsys, status=1)
        shutil.rmtree(tmp_path / "copy")


# Resume


def test_ctrl_c_keeps_finished_shards_and_other_settings_do_not_mix(images, tmp_path, monkeypatch, capsys):
    for folder, shards in (("s", 2), ("other", 0)):
        with monkeypatch.context() as patch:
            stop(patch, script.StoreWriter, "write", shards)
            assert script.main(command(images, tmp_path / folder)) == 130
    said = capsys.readouterr().err
    assert "every finished shard is saved; the same command continues" in said
    assert "Traceback" not in said
    names = ["train-00000.shard.json", "train-00001.shard.json", "unfinished.json"]
    assert sorted(path.name for path in (tmp_path / "s").glob("*.json")) == names
    # Settings under which nothing was written bind no one.
    assert script.main(command(images, tmp_path / "other", "--dtype float32")) == 0
    for flags in ("--dtype float32", "--shard_rows 6", "--precision bf16", "--limit_train 19", "--resolution 48"):
        check_refused(script.main, command(images, tmp_path / "s", flags), "written with other settings", capsys)
    assert script.main(command(images, tmp_path / "s", "--batch_size 3 --workers 1")) == 0
    printed = capsys.readouterr().out
    assert "continuing after 2 of 6 shards" in printed
    assert ("train-00001: " in printed, "train-00002: " in printed) == (False, True)
    assert script.main(command(images, tmp_path / "undisturbed")) == 0
    assert files(tmp_path / "s") == files(tmp_path / "undisturbed")


def test_one_command_at_a_time_and_a_folder_of_other_files_is_left_alone(images, tmp_path, capsys):
    with FileLock(tmp_path / ".s.lock"):
        check_refused(script.main, command(images, tmp_path / "s"), "another process is writing", capsys, status=1)
    assert not (tmp_path / "s").exists()
    before = sorted(images.rglob("*"))
    check_refused(script.main, command(images, images), "holds other files", capsys)
    assert sorted(images.rglob("*")) == before


# Broken images


def break_images(images: Path) -> list[Path]:
    """A truncated JPEG, a text, an empty file: rows 3, 4 and 17 of the training images."""
    paths = [images / "train" / f"class {row // 10}" / f"{row:03}.jpg" for row in (3, 4, 17)]
    paths[0].write_bytes(paths[0].read_bytes()[:-100])
    paths[1].write_text("<html>not found</html>")
    paths[2].write_bytes(b"")
    return paths


def test_a_broken_image_stops_and_is_skipped_on_demand(images, tmp_path, capsys):
    expected = expected_features(images, "train")
    paths = break_images(images)
    assert script.main(command(images, tmp_path / "s")) == 1
    message = capsys.readouterr().err
    assert message.startswith(f"error: cannot read {paths[0]} (OSError: image file is truncated")
    assert "--on_error skip" in message
    assert not (tmp_path / "s" / "meta.json").exists()

    assert script.main(command(images, tmp_path / "s", "--on_error skip")) == 0
    captured = capsys.readouterr()
    assert "3 images could not be read" in captured.err
    assert all(str(path) in captured.err for path in paths)
    assert "17 train, 7 test rows" in captured.out
    store = open_store(tmp_path / "s")
    assert [shard.rows for shard in store["train"].shards] == [3, 5, 5, 4]
    kept = [row for row in range(20) if row not in (3, 4, 17)]
    torch.testing.assert_close(store["train"].read(torch.arange(17)).float(), expected[kept], rtol=2e-3, atol=1e-4)
    assert store["train"].labels().tolist() == [row // 10 for row in kept]
    lines = (tmp_path / "s" / "skipped.csv").read_text().splitlines()
    assert lines[0] == "split,image,path,reason"
    assert [line.split(",")[:3] for line in lines[1:]] == [
        ["train", str(row), str(path)] for row, path in zip((3, 4, 17), paths)
    ]
    assert not list((tmp_path / "s").glob(".*"))


def test_a_mended_image_is_taken_up_when_its_shard_is_written_again(images, tmp_path, monkeypatch):
    whole = files(images / "train" / "class 1")
    break_images(images)
    write = script.StoreWriter.write

    def fail_at_the_last(self, split, number, *arguments):
        if (split, number) == ("train", 3):
            raise OSError("disk full")
        write(self, split, number, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(script.StoreWriter, "write", fail_at_the_last)
        assert script.main(command(images, tmp_path / "s", "--on_error skip")) == 1
    (images / "train" / "class 1" / "017.jpg").write_bytes(whole["017.jpg"])
    assert script.main(command(images, tmp_path / "s", "--on_error skip")) == 0
    assert len((tmp_path / "s" / "skipped.csv").read_text().splitlines()) == 3
    assert len(open_store(tmp_path / "s")["train"]) == 18


def test_a_shard_of_broken_images_alone_is_a_sentence(images, tmp_path, capsys):
    for path in (images / "test" / "class 1").iterdir():
        path.write_text("broken")
    named = f"none of the 2 images of test-00002 can be read, the first being {images / 'test' / 'class 1' / '004.jpg'}"
    check_refused(
        script.main, command(images, tmp_path / "s", "--on_error skip --shard_rows 2"), named, capsys, status=1
    )
    assert not (tmp_path / "s" / "meta.json").exists()


def test_a_reader_that_is_killed_is_a_sentence(images, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Images, "read", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    named = "a process that reads images was killed"
    check_refused(script.main, command(images, tmp_path / "s", "--workers 1"), named, capsys, status=1)


# Features that do not fit


@pytest.mark.parametrize(
    ("factor", "message"),
    [(1e9, "that float16 cannot hold: give another --dtype"), (float("nan"), "that are not finite")],
)
def test_features_that_a_store_cannot_hold_are_named(images, tmp_path, capsys, factor, message):
    torch.manual_seed(0)
    state = timm.create_model("test_resnet").state_dict()
    name = [each for each in state if each.endswith("bn2.weight") or each.endswith("bn3.weight")][-1]
    state[name] = torch.ones_like(state[name]) * factor
    torch.save(state, tmp_path / "w.pt")
    flags = ["--weights", str(tmp_path / "w.pt")]
    assert script.main([*command(images, tmp_path / "s"), *flags]) == 1
    captured = capsys.readouterr().err
    assert captured.startswith(f"error: {images / 'train' / 'class 0' / '000.jpg'} has features (up to ")
    assert message in captured
    if factor == 1e9:
        assert script.main([*command(images, tmp_path / "s", "--dtype bfloat16"), *flags]) == 0


# Several processes


def test_two_processes_write_what_one_writes(images, tmp_path):
    break_images(images)
    done = torchrun(script.__file__, command(images, tmp_path / "two", "--on_error skip"))
    assert done.returncode == 0, done.stderr
    assert script.main(command(images, tmp_path / "one", "--on_error skip")) == 0
    assert files(tmp_path / "two") == files(tmp_path / "one")
    assert "27 images in" in done.stdout
    assert "by 2 processes" in done.stdout
    for once in ("beginning, 6 shards", "store: ", "train on it: "):
        assert done.stdout.count(once) == 1
    assert all(done.stdout.count(f"{each}: ") == 1 for each in ("train-00000", "train-00003", "test-00001"))


def test_an_error_in_one_process_ends_all_with_one_sentence(images, tmp_path):
    (images / "train" / "class 0" / "006.jpg").write_text("broken")  # in the shard of rank 1
    statuses, outputs = together(2, tmp_path, partial(script.main, command(images, tmp_path / "s")))
    said = "".join(outputs)
    assert 0 not in statuses
    assert said.count("error: cannot read") == 1
    assert "006.jpg" in said
    assert said.count("error: ") == 1
    assert "Traceback" not in said
    assert not (tmp_path / "s" / "meta.json").exists()


# S3


def test_a_store_is_uploaded_and_read_back(images, tmp_path, s3, capsys):
    boto3.client("s3", endpoint_url=s3).create_bucket(Bucket="stores")
    break_images(images)
    flags = f"--on_error skip --upload s3://stores/some/noise.store --endpoint_url {s3}"
    assert script.main(command(images, tmp_path / "s", flags)) == 0
    assert "uploaded: s3://stores/some/noise.store/" in capsys.readouterr().out
    store = open_or_fetch("s3://stores/some/noise.store", tmp_path / "cache", endpoint_url=s3)
    assert store.verify() == []
    names = [name for name in files(tmp_path / "s") if name != "skipped.csv"]
    assert {name: (store.path / name).read_bytes() for name in names} == {
        name: (tmp_path / "s" / name).read_bytes() for name in names
    }
    # A complete store is sent as it is.
    assert script.main(command(images, tmp_path / "s", flags.replace("some/noise.store", "again"))) == 0
    assert len(open_or_fetch("s3://stores/again/", tmp_path / "cache", endpoint_url=s3)["train"]) == 17


def test_an_upload_that_fails_keeps_the_store(images, tmp_path, s3, capsys):
    words = command(images, tmp_path / "s", f"--upload s3://absent/store/ --endpoint_url {s3}")
    check_refused(script.main, words, "", capsys, status=1)
    assert open_store(tmp_path / "s").verify() == []


# Refusals


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--dataset digits", "one of the arguments --backbone --checkpoint is required"),
        ("--backbone test_resnet", "the images are given by --dataset, or by --train_dir"),
        ("--backbone test_resnt --dataset digits", "did you mean 'test_resnet'"),
        ("--backbone test_resnet --dataset digit", "did you mean 'digits'"),
        ("--backbone test_resnet --dataset no/such/folder", "there is no folder no/such/folder"),
        ("--checkpoint x --weights none --dataset digits", "leave --weights out"),
        ("--backbone test_resnet --dataset digits --precision fp16 --device cpu", "--precision fp16 is for GPUs"),
        ("--backbone test_resnet --dataset digits --limit_train 2000 --weights none", "from 1 to 1437"),
        ("--backbone test_resnet --dataset digits --upload bucket/x", "must be s3://bucket/prefix/, got 'bucket/x'"),
        ("--backbone test_resnet --dataset digits --endpoint_url http://x", "give both or neither"),
        ("--backbone test_resnet --dataset digits --resolution 999999999999", "of memory are free"),
    ],
)
def test_a_wrong_command_line_is_answered_with_a_sentence(tmp_path, capsys, flags, message):
    check_refused(script.main, [*flags.split(), "--store", str(tmp_path / "s")], message, capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--backbone test_resnet --weights pretraned", "there is no file pretraned: --weights is pretrained, none"),
        ("--backbone test_vit --weights none --resolution 90", "cannot take images of shape (128, 3, 90, 90)"),
        ("--backbone timm:test_resnet --weights none --dataset cifar10", "CIFAR10 is not available"),
    ],
)
def test_what_cannot_be_done_is_answered_with_a_sentence(tmp_path, capsys, flags, message):
    common = ["--device", "cpu", "--workers", "0", "--store", str(tmp_path / "s"), "--data_dir", str(tmp_path)]
    mirror = ["--dataset", "digits", "--limit_train", "200", "--mirror", f"file://{tmp_path}/absent.tar.gz"]
    check_refused(script.main, [*common, *mirror, *flags.split()], message, capsys, status=1)
