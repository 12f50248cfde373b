"""Killed before any of its file operations, a command that is given again ends as if nobody had stopped it.

The same rows, histories and weights to the bit, and not one file more.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models.backbones import backbone
from PIL import Image
from torch import nn

from data.embeddings import StoreWriter, convert
from experiments import extract_embeddings, finetune_imagenet, train_cifar100
from tests.crashes import content, states_of
from tests.experiments.runs import outcome


@pytest.fixture(autouse=True)
def _quick(monkeypatch, saved_often):
    # The kernel outlives the process: what it was told to write to the disk at once makes no difference.
    monkeypatch.setattr(os, "fsync", lambda _: None)


def left(results: Path, history: str) -> tuple:
    """Rows, histories, weights, and the names of all files; heads that a kill left at other steps go on apart."""
    files = sorted(str(path.relative_to(results.parent)) for path in results.parent.rglob("*"))
    return outcome(results, file=history, apart=["git_commit", "num_heads"]), files


def check_every_state(tmp_path: Path, main: Callable, command: Callable, history: str, fewest: int) -> None:
    undisturbed = tmp_path / "undisturbed"
    with states_of(undisturbed, tmp_path / "killed") as states:
        assert main(command(undisturbed / "r.csv")) == 0
    assert len(states) >= fewest
    expected = left(undisturbed / "r.csv", history)
    for state in states:
        results = state / "undisturbed" / "r.csv"
        assert main(command(results)) == 0
        assert left(results, history) == expected, state.name


def test_heads_trained_together(tmp_path):
    generator = torch.Generator().manual_seed(0)
    writer = StoreWriter(tmp_path / "s.store", dim=6, dtype=torch.float16)
    for split, rows in (("train", 120), ("test", 30)):
        writer.write(split, 0, torch.randn(rows, 6, generator=generator).half(), torch.arange(rows) % 5)
    writer.finish()

    def command(results: Path) -> list[str]:
        flags = "--method softmax_cross_entropy --seeds 0 1 --n_epochs 2 --batch_size 30 --nloglr 2 --apply_dropout"
        return [*flags.split(), *f"-d {tmp_path / 's.store'} --device cpu --threads 1 --results {results}".split()]

    check_every_state(tmp_path, finetune_imagenet.main, command, "evaluations.csv", fewest=30)


def test_training(tmp_path, monkeypatch):
    def network(name: str, num_classes: int) -> nn.Module:
        # Dropout draws from the global generator, whose state is saved.
        return nn.Sequential(nn.MaxPool2d(8), nn.Flatten(), nn.Dropout(0.1), nn.Linear(48, num_classes))

    monkeypatch.setattr(train_cifar100, "resnet_cifar", network)

    def command(results: Path) -> list[str]:
        flags = "--method softmax_cross_entropy --dataset digits --limit_train 64 --limit_test 20 --batch_size 32"
        return [*flags.split(), *f"--n_epochs 3 --device cpu --threads 1 --results {results}".split()]

    check_every_state(tmp_path, train_cifar100.main, command, "epochs.csv", fewest=20)


def check_every_state_of_a_store(tmp_path: Path, make: Callable, fewest: int) -> None:
    undisturbed = tmp_path / "undisturbed"
    with states_of(undisturbed, tmp_path / "killed") as states:
        make(undisturbed / "s.store")
    assert len(states) >= fewest
    expected = content(undisturbed)
    assert not [name for name in expected if name.endswith((".shard.json", "unfinished.json", ".tmp"))]
    for state in states:
        make(state / "undisturbed" / "s.store")
        assert content(state / "undisturbed") == expected, state.name


def test_conversion(tmp_path):
    sizes = {"train": 40, "test": 9}
    tensors = {f"{split}_embeddings": torch.rand(rows, 4) for split, rows in sizes.items()}
    torch.save(tensors | {f"{split}_labels": torch.arange(rows) for split, rows in sizes.items()}, tmp_path / "f.pt")
    check_every_state_of_a_store(tmp_path, lambda store: convert(tmp_path / "f.pt", store, shard_bytes=320), fewest=25)


def test_extraction(tmp_path, monkeypatch):
    network = backbone("test_resnet", "none", resolution=32)
    monkeypatch.setattr(extract_embeddings, "backbone", lambda *_, **__: network)
    for split, images in (("train", 5), ("test", 3)):
        for number in range(images):
            path = tmp_path / "images" / split / "class" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (32, 32), (number * 40, 0, 0)).save(path)
    (tmp_path / "images" / "train" / "class" / "2.png").write_text("broken")

    def make(store: Path) -> None:
        flags = f"--dataset {tmp_path / 'images'} --backbone test_resnet --on_error skip --shard_rows 3 --workers 0"
        assert extract_embeddings.main([*flags.split(), *f"--device cpu --threads 1 --store {store}".split()]) == 0

    check_every_state_of_a_store(tmp_path, make, fewest=20)
