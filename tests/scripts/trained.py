"""Runs that the training scripts make once for all tests of this folder: what reports read is what scripts write."""

import csv
import shlex
from pathlib import Path

import torch

from experiments import finetune_imagenet, train_beam_search, train_cifar100, train_knn
from scripts import relabel

EVEN = "0.2 0.2 0.2 0.2 0.2"
CLASSES = 100
ROWS = 400
SMALL = "--device cpu --threads 1"
CIFAR = f"--dataset digits --limit_train 64 --batch_size 32 --n_epochs 1 {SMALL} --results cifar.csv"
KNN = f"--dataset digits --model mlp --hidden_dims 16 --limit_train 200 --n_epochs 1 {SMALL} --results knn.csv"
BEAM = (
    "--dataset reversal --max_letters 3 --hidden_dim 8 --batch_size 16 --beam_size 3 --pretrain_updates 6 "
    f"--n_updates 4 --eval_freq 2 {SMALL} --results beam.csv"
)
HEADS = f"--num_valid 100 --batch_size 100 --n_epochs 1 {SMALL}"
LOSSES = {  # of the study of wrong labels, by their names there
    **{"cross_entropy": "softmax_cross_entropy", "gce": "generalized_cross_entropy", "phuber": "phuber_cross_entropy"},
    **{"lapsum": "lapsum --p_k .5 0 0 0 .5 --m 16", "smooth_topk": "smooth_topk --p_k 0 0 0 0 1"},
    "lapsum_forward": "lapsum --p_k .5 0 0 0 .5 --m 16 --noise_rate .4",
}
RATES = ("0.1", "0.2", "0.3")  # learning rates of their trials
LABELS = {"human": "--human people.pt", "symmetric_.4_again": "--label_noise .4 --among 100 --draw 1"}


def one_pass(losses: list[str], flags: str) -> None:
    """Train linear classifiers with each loss, in one pass."""
    first, *others = losses
    words = shlex.split(f"--method {first} {flags}")
    assert finetune_imagenet.main([*words, *(word for loss in others for word in ("--also", f"--method {loss}"))]) == 0


def write_embeddings() -> None:
    """Write heads.pt, 100 classes of four rows, and people.pt, labels by people, of which a third is wrong.

    untested.pt has the rows without a test split.
    """
    labels = torch.arange(ROWS) % CLASSES
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(CLASSES, 16, generator=generator)[labels] + torch.randn(ROWS, 16, generator=generator)
    content = {"train_embeddings": rows, "train_labels": labels, "test_embeddings": rows, "test_labels": labels}
    torch.save(content | {"info": {"backbone": "timm:lite0", "resolution": 128}}, "heads.pt")
    torch.save({"train_embeddings": rows, "train_labels": labels}, "untested.pt")
    by_people = torch.where(torch.arange(ROWS) % 3 == 0, (labels + 1) % CLASSES, labels)
    torch.save({"clean_label": labels.numpy(), "noisy_label": by_people.numpy()}, "people.pt")


def train() -> None:
    """Make the runs in the working directory."""
    for loss in ("softmax_cross_entropy", f"neuralsort --p_k {EVEN}"):
        assert train_cifar100.main(f"--method {loss} {CIFAR}".split()) == 0
    for loss in ("neuralsort", "softmax_cross_entropy --prediction network"):
        assert train_knn.main(f"--method {loss} {KNN}".split()) == 0
    for arm in ("cross_entropy --method softmax_cross_entropy", "retain --method softsort"):
        for seed in (0, 1):
            assert train_beam_search.main(f"--arm {arm} --seed {seed} {BEAM}".split()) == 0
    write_embeddings()
    one_pass([*LOSSES.values()], f"{HEADS} -d heads.pt --seeds 0 1 --results heads.csv")
    one_pass([*LOSSES.values()], f"{HEADS} -d untested.pt --seeds 0 1 --results untested.csv")
    lml = "lml --p_k .5 0 0 0 .5 --inverse_temperature"
    one_pass([f"{lml} {beta}" for beta in ("1", "auto", "0.1:5")], f"{HEADS} -d heads.pt --results temperature.csv")
    tried = [f"softsort --p_k .5 0 0 0 .5 --m {m}" for m in (16, 50, 100)]
    tried += [f"softmax_cross_entropy --p_k 1 --lr {rate}" for rate in RATES]
    one_pass(tried, f"{HEADS} --n_epochs 5 -d heads.pt --results trials.csv")
    Path("noise").mkdir()
    for labels, flags in LABELS.items():
        words = f"heads.pt {flags} --noisy_valid --num_valid 100 --output {labels}.pt"
        assert relabel.main(words.split()) == 0
        shared = f"--batch_size 100 --n_epochs 4 --eval_freq 0 {SMALL} -d {labels}.pt --results noise/{labels}"
        tried = [f"{loss} --lr {rate}" for loss in LOSSES.values() for rate in RATES]
        one_pass(tried, f"{shared}_trials.csv --seed 0")
        one_pass(tried, f"{shared}.csv --seeds 1")


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def changed(row: dict[str, str], **cells: object) -> dict[str, str]:
    """A row with other values in columns that it has: a column that no script writes is refused."""
    unknown = set(cells) - set(row)
    assert not unknown, f"no script writes {unknown}"
    return {**row, **{name: str(value) for name, value in cells.items()}}
