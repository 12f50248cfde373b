"""The columns of cost: seconds by a clock that training and evaluation move, and memory within sense."""

import math
import resource
import shlex

import pytest
import torch

from experiments import finetune_imagenet, train_beam_search, train_cifar100, train_knn
from tests.experiments import scripts
from tests.experiments.scripts import name_of, rows_of

SLACK = 1000  # seconds, of the machine; a training step takes ten times as many here
# Evaluations of unequal numbers of steps, at the end alone, and of two heads.
HEADS = "-d EMBEDDINGS --batch_size 25 --n_epochs 3 --lr .01 --method softmax_cross_entropy"
CASES = [
    (train_cifar100, "--dataset digits --limit_train 70 --batch_size 16 --n_epochs 3 --method softsort"),
    (train_cifar100, "--dataset digits --limit_train 70 --batch_size 16 --n_epochs 2 --method softsort --ema .9"),
    (train_cifar100, "--dataset digits --limit_train 70 --batch_size 16 --n_epochs 5 --method softsort --eval_freq 2"),
    (finetune_imagenet, f"{HEADS} --eval_freq 3"),
    (finetune_imagenet, f"{HEADS} --eval_freq 0"),
    (finetune_imagenet, f'{HEADS} --eval_freq 2 --also "--method softsort"'),
    (finetune_imagenet, f'{HEADS} --eval_freq 0 --also "--method softsort" --stream'),
    (train_knn, "--dataset digits --limit_train 80 --batch_size 20 --num_candidates 20 --n_epochs 3 --method softsort"),
    (train_beam_search, scripts.SCRIPTS[train_beam_search].replace("n_updates 4", "n_updates 5")),
]


@pytest.fixture(scope="module")
def embeddings(tmp_path_factory):
    return scripts.embeddings(tmp_path_factory.mktemp("set") / "e.pt")


def history_of(results, run_id: str) -> list[dict]:
    return torch.load(results.parent / "runs" / run_id / "checkpoint.pt", weights_only=True)["history"]


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.parametrize(("script", "flags"), CASES, ids=[f"{name_of(script)} {flags}" for script, flags in CASES])
def test_seconds_are_those_of_the_steps_since_the_last_evaluation(
    script, flags, embeddings, clock, results, monkeypatch
):
    monkeypatch.setattr(train_cifar100, "resnet_cifar", scripts.small_network)
    monkeypatch.setenv("TOPK_LOSSES_BACKEND", "torch")  # kernels would take longer to compile
    before = peak_mib()
    words = [*shlex.split(flags.replace("EMBEDDINGS", str(embeddings))), "--device", "cpu", "--threads", "1"]
    assert script.main([*words, "--results", str(results)]) == 0
    rows = rows_of(results)
    histories = [history_of(results, row["run_id"]) for row in rows]
    # Steps since the last evaluation; all heads of a command take theirs in the same seconds.
    steps = [entry.get("train_steps") for entry in histories[0]]
    if script is train_beam_search:
        updates = [entry["update"] for entry in histories[0]]
        steps = [update - earlier for update, earlier in zip(updates, [0, *updates])]
    if steps[0] is None:
        epochs = [entry["epoch"] for entry in histories[0]]
        steps = [clock.steps / epochs[-1] * (epoch - earlier) for epoch, earlier in zip(epochs, [0, *epochs])]
    pretraining = history_of(results, rows[0]["pretrained"]) if script is train_beam_search else []
    pretrained = pretraining[-1]["update"] if pretraining else 0
    assert sum(steps) * len(rows) + pretrained == clock.steps
    for row, history in zip(rows, histories):
        for entry, number in zip(history, steps, strict=True):
            assert entry["train_seconds"] == pytest.approx(number * len(rows) * clock.step, abs=SLACK)
            assert entry["eval_seconds"] > 0.99 * clock.evaluated
            assert entry["eval_seconds"] % clock.evaluated < SLACK
            assert before * 0.99 <= entry["peak_memory_mib"] <= peak_mib() * 1.01
        train_seconds = math.fsum(entry["train_seconds"] for entry in history)
        assert float(row["train_seconds"]) == pytest.approx(train_seconds, rel=1e-9)
        evaluated = math.fsum(entry["eval_seconds"] for entry in history)
        if pretraining:  # the last evaluation of a row is that of the test words, too
            pretrain_seconds = math.fsum(entry["train_seconds"] for entry in pretraining)
            assert float(row["pretrain_seconds"]) == pytest.approx(pretrain_seconds, rel=1e-9)
            assert pretrain_seconds == pytest.approx(pretrained * clock.step, abs=SLACK)
            in_pretraining = math.fsum(entry["eval_seconds"] for entry in pretraining)
            assert float(row["eval_seconds"]) > evaluated + clock.evaluated
            evaluated = clock.calls * clock.evaluated - in_pretraining
        assert float(row["eval_seconds"]) == pytest.approx(evaluated, abs=SLACK)
        assert float(row["peak_memory_mib"]) == max(entry["peak_memory_mib"] for entry in history)
        mean = sum(entry["train_loss"] * n for entry, n in zip(history, steps) if same_epoch(entry, history[-1]))
        number = sum(n for entry, n in zip(history, steps) if same_epoch(entry, history[-1]))
        assert float(row["last_train_loss"]) == pytest.approx(mean / number, rel=1e-6)


def same_epoch(entry: dict, last: dict) -> bool:
    return entry.get("epoch", entry.get("update")) == last.get("epoch", last.get("update"))
