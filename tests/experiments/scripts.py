"""The training scripts with flags that are quick, and what a run of them leaves."""

import contextlib
import csv
import io
import re
import sys
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from experiments import finetune_imagenet, train_beam_search, train_cifar100, train_knn

TIMES = ("train_seconds", "eval_seconds", "pretrain_seconds", "peak_memory_mib", "git_commit")
TIMES += ("started_utc", "finished_utc", "times_resumed")
SCRIPTS: dict[ModuleType, str] = {
    train_cifar100: "--dataset digits --limit_train 60 --batch_size 16 --n_epochs 3 --method perturbed_topk "
    "--p_k .5 0 .5 --ema .9 --lr_schedule cosine --inverse_temperature auto",
    finetune_imagenet: "-d EMBEDDINGS --batch_size 25 --n_epochs 3 --eval_freq 2 --lr .01 --apply_dropout "
    "--method noised_topk --inverse_temperature auto "
    '--also "--method softsort --p_k .5 0 .5 --inverse_temperature .5:2"',
    train_knn: "--dataset digits --limit_train 120 --batch_size 20 --num_candidates 20 --n_epochs 3 "
    "--method perturbed_topk --model mlp --dim 6 --hidden_dims 8",
    train_beam_search: "--dataset reversal --max_letters 3 --hidden_dim 8 --batch_size 16 --beam_size 3 "
    "--pretrain_updates 4 --n_updates 6 --eval_freq 2 --arm retain --method perturbed_topk",
}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--"]
MACHINE = "--device cpu --threads 1 --checkpoint_seconds 0"


def name_of(script: ModuleType) -> str:
    return script.__name__.rpartition(".")[2]


def flags_of(script: ModuleType) -> list[str]:
    """The flags of a script, from its help."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        script.main(["--help"])
    lines = re.findall(r"^  (-\S.*?)(?:  |$)", printed.getvalue(), re.MULTILINE)  # without their descriptions
    return [re.search(r"--\w+", line)[0] for line in lines if "--help" not in line]


CHANNELS = {"resnet18": 4, "resnet34": 5, "resnet50": 6}


def small_network(name: str, num_classes: int) -> nn.Module:
    """In place of a ResNet: it has batch norm, and is quick; another name is another width."""
    width = CHANNELS[name]
    body = (nn.Conv2d(3, width, 5, stride=4), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*body, nn.Linear(49 * width, num_classes))


def embeddings(path: Path, num_classes: int = 8, train: int = 130, dim: int = 6) -> Path:
    """A file of embeddings, made once."""
    generator = torch.Generator().manual_seed(0)
    content = {}
    centres = torch.randn(num_classes, dim, generator=generator)
    for split, rows in (("train", train), ("test", 40)):
        labels = torch.arange(rows) % num_classes
        rows_of_split = centres[labels] + torch.randn(rows, dim, generator=generator)
        content |= {f"{split}_embeddings": rows_of_split.half(), f"{split}_labels": labels}
    torch.save(content, path)
    return path


def rows_of(results: Path) -> list[dict[str, str]]:
    with open(results, newline="") as file:
        return list(csv.DictReader(file))


def outcome(results: Path) -> dict[str, tuple]:
    """Of each run its row, history and final weights, without what the clock and the machine's load decide."""
    found = {}
    for row in rows_of(results):
        saved = torch.load(results.parent / "runs" / row["run_id"] / "checkpoint.pt", weights_only=True)
        assert saved["training"] is None
        history = [{name: value for name, value in entry.items() if name not in TIMES} for entry in saved["history"]]
        weights = {name: tensor.tolist() for name, tensor in saved["model"].items()}
        found[row["run_id"]] = {name: row[name] for name in row if name not in TIMES}, history, weights
    return found
