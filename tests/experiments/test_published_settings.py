"""The settings of a command without flags are the published ones, typed here from their sources a second time.

A command is stopped before its first training step: the run's config.json has every setting by then.
"""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from experiments import finetune_imagenet, train_cifar100, train_knn
from tests.data.small_sets import accept_cifar, write_cifar
from tests.experiments import scripts

# README and scripts of the official code: protocol and temperatures of CIFAR-100 (Tables 1 and 4) and of ImageNet
# (Tables 2, 3 and 5).
CIFAR = {"batch_size": 128, "n_epochs": 200, "lr": 1e-3, "nloglr": 3.0, "weight_decay": None, "model": "resnet18"}
CIFAR |= {"lr_schedule": None, "ema": None, "precision": "fp32", "label_noise": 0.0, "m": None, "dataset": "cifar100"}
IMAGENET = {"batch_size": 500, "n_epochs": 20, "m": 16, "lr": 10**-4.5, "nloglr": 4.5, "num_valid": 50_000}
IMAGENET_21K = {"batch_size": 500, "n_epochs": 40, "m": 50, "lr": 10**-4, "nloglr": 4.0, "num_valid": 100_000}
HEADS = {"eval_freq": 100, "weight_decay": None, "hidden_dims": None, "apply_relu": False, "apply_dropout": False}
NETWORK = {"distribution": "logistic_phi", "art_lambda": 0.5}
METHODS = {  # inverse temperature on CIFAR-100 and on ImageNet, and what else is published
    "bitonic": (0.5, 1.0, NETWORK),
    "splitter_selection": (0.5, 1.0, NETWORK),
    "neuralsort": (0.0625, 0.5, {}),
    "softsort": (0.0625, 0.5, {}),
    "smooth_hard_topk": (1.0, 1.0, {"p_k": [0, 0, 0, 0, 1]}),
    "softmax_cross_entropy": (None, None, {"p_k": [1, 0, 0, 0, 0]}),
}
# Grover et al. 2019, appendix D.3 and code: kNN on CIFAR-10.
NEIGHBOURS = {"batch_size": 100, "num_candidates": 100, "n_epochs": 200, "lr": 1e-3, "weight_decay": 5e-4, "k": 9}
NEIGHBOURS |= {"inverse_temperature": 1 / 16, "loss": "mass", "model": "preact_resnet18"}


class Stopped(Exception):
    """Before a network is called."""


@pytest.fixture
def settings(results):
    """The settings of a command, by its config.json."""

    def stop(*_) -> None:
        raise Stopped

    def call(main, *words: object) -> dict:
        handle = register_module_forward_pre_hook(stop)
        try:
            with pytest.raises(Stopped):
                main([*map(str, words), "--device", "cpu", "--threads", "1", "--results", str(results)])
        finally:
            handle.remove()
        (path,) = results.parent.glob("runs/*/config.json")
        return json.loads(path.read_text())

    return call


def check(found: dict, expected: dict) -> None:
    for name, value in expected.items():
        assert found[name] == (pytest.approx(value) if isinstance(value, float) else value), name


@pytest.fixture
def images(tmp_path, monkeypatch):
    monkeypatch.setattr(train_cifar100, "resnet_cifar", scripts.small_network)
    for name in ("cifar10", "cifar100"):
        write_cifar(name, tmp_path / "images", train=240, test=20)
        accept_cifar(name, tmp_path / "images", monkeypatch)
    return tmp_path / "images"


@pytest.mark.parametrize("method", METHODS)
def test_images(method, settings, images):
    found = settings(train_cifar100.main, "--method", method, "--data_dir", images)
    beta, _, more = METHODS[method]
    mode = {"top1_mode": None if "p_k" in more else "smce"}
    check(found, CIFAR | mode | {"inverse_temperature": beta, "p_k": [0.2] * 5} | more)
    assert found["results"] == "results.csv"


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """As many rows as the published data sets have at least: a million, and 2.2 million; of one dimension."""
    folder = tmp_path_factory.mktemp("rows")
    for name, number, classes in (("1k", 1_100_000, 1000), ("21k", 2_200_000, 1000)):
        content = {"train_embeddings": torch.ones(number, 1).half(), "train_labels": torch.arange(number) % classes}
        content |= {"test_embeddings": torch.ones(5, 1).half(), "test_labels": torch.arange(5)}
        torch.save(content, folder / f"{name}.pt")
    return folder


@pytest.mark.parametrize("method", METHODS)
def test_heads_on_imagenet(method, settings, rows):
    found = settings(finetune_imagenet.main, "--method", method, "-d", rows / "1k.pt")
    _, beta, more = METHODS[method]
    sorts = {"m": 16, "top1_mode": "sm"}
    if "p_k" in more:
        sorts = {"m": None, "top1_mode": None}
    check(found, IMAGENET | HEADS | {"inverse_temperature": beta, "p_k": [0.2] * 5} | sorts | more)


def test_heads_on_imagenet_21k(settings, rows, monkeypatch):
    path = Path(finetune_imagenet.__file__).with_name("finetune_imagenet21k.py")

    def main(words: list[str]) -> None:
        monkeypatch.setattr(sys, "argv", [str(path), *words])
        runpy.run_path(path, run_name="__main__")

    found = settings(main, "--method", "splitter_selection", "-d", rows / "21k.pt")
    check(found, IMAGENET_21K | HEADS | NETWORK | {"inverse_temperature": 1.0, "top1_mode": "sm"})


def test_neighbours(settings, images):
    found = settings(train_knn.main, "--method", "neuralsort", "--dataset", "cifar10", "--data_dir", images)
    check(found, NEIGHBOURS)
    assert not found["self_match"]
