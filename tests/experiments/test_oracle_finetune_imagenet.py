"""Heads on embeddings have the figures of a plain loop, for each method and seed of a command that trains several."""

import itertools
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import one_hot

from data.embeddings import epoch_order, mixup, split_rows
from experiments import finetune_imagenet as script
from experiments.common.door import EXPECTED
from experiments.common.objective import noise_generator
from tests.experiments import scripts
from tests.experiments.oracle import check_choice, check_history, history_of, run, top_k
from tests.experiments.scripts import rows_of
from topk_losses import make_loss

DIM = 12
CLASSES = 64
TRAIN = 420
VALID = 110
BATCH = 35
EPOCHS = 3
EVERY = 3
LR = 0.02
FLAGS = f"--num_valid {VALID} --batch_size {BATCH} --n_epochs {EPOCHS} --eval_freq {EVERY} --lr {LR} "
# The published settings for ImageNet: the default temperature, m and the softmax for the top-1 term.
SORTS = {"m": 16, "inverse_temperature": 0.5, "top1_mode": "sm"}
NETWORK = {**SORTS, "inverse_temperature": 1.0, "distribution": "logistic_phi", "art_lambda": 0.5}
HALF = [0.5, 0, 0, 0, 0.5]
EVEN = [0.2] * 5
TOP5 = [0, 0, 0, 0, 1.0]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return scripts.embeddings(tmp_path_factory.mktemp("embeddings") / "some.pt", CLASSES, TRAIN, DIM)


@pytest.fixture(scope="module")
def parts(store):
    """Embeddings and labels of the splits."""
    content = torch.load(store, weights_only=True)
    return {split: (content[f"{split}_embeddings"], content[f"{split}_labels"]) for split in ("train", "test")}


def plain_loop(parts, method, p_k, settings, seed, bf16=False, weight_decay=0.0, hidden=(), mix=None, relu=False):
    """Return what a loop without any of the script's functions finds in each evaluation.

    mix: of mixup, alpha. relu: on the embeddings.
    """
    train, valid = split_rows(TRAIN, VALID, 0)
    torch.manual_seed(seed)
    widths = [DIM, *hidden]
    layers = [nn.ReLU()] if relu else []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(widths[-1], CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), LR, weight_decay=weight_decay, fused=True)
    loss_fn = make_loss(method, p_k, num_classes=CLASSES, **settings)
    steps = len(train) // BATCH
    found = []
    losses = []
    number = 0
    for epoch in range(1, EPOCHS + 1):
        order = epoch_order(len(train), seed, epoch)
        for step, rows in enumerate(train[order].split(BATCH)[:steps], start=1):
            number += 1
            loss_fn.generator = noise_generator(torch.device("cpu"), seed, 0, number, 0)
            embeddings, labels = (part[rows] for part in parts["train"])
            if mix:
                share, partners = mixup(BATCH, mix, seed, number)
                embeddings = share * embeddings.float() + (1 - share) * embeddings[partners].float()
                labels = share * one_hot(labels, CLASSES).float() + (1 - share) * one_hot(labels[partners], CLASSES)
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                logits = model(embeddings.float())
            loss = loss_fn(logits.float(), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if step not in (1, steps) and step % EVERY:
                continue
            found.append({"epoch": epoch, "step": number, "train_loss": sum(losses) / len(losses)})
            found[-1]["train_steps"] = len(losses)
            losses = []
            splits = {"valid": tuple(part[valid] for part in parts["train"]), "test": parts["test"]}
            for name, (embeddings, labels) in splits.items():
                with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    logits = model(embeddings.float()).float()
                total = 0.0
                for batch, (some, right) in enumerate(zip(logits.split(BATCH), labels.split(BATCH))):
                    loss_fn.generator = noise_generator(torch.device("cpu"), seed, 1, batch, 0)
                    total += loss_fn(some, right).item() * len(right)
                found[-1] |= {f"{name}_loss": total / len(labels), f"{name}_logit_std": logits.std(1).mean().item()}
                found[-1] |= {f"{name}_{key}": value for key, value in top_k(logits, labels).items()}
    return found


def test_heads_that_train_together_are_each_those_of_a_plain_loop(parts, store, results):
    """Two seeds and three methods; the batches are those of the seed."""
    flags = f'{FLAGS} -d {store} --method softmax_cross_entropy --seeds 3 4 --also "--method splitter_selection"'
    rows = run(script, f'{flags} --also "--method softsort --p_k .5 0 0 0 .5 --weight_decay .3"', results)
    arms = [("softmax_cross_entropy", [1.0], {}, 0), ("splitter_selection", EVEN, NETWORK, 0)]
    arms += [("softsort", HALF, SORTS, 0.3)]
    assert len(rows) == 6
    for method, p_k, settings, decay in arms:
        for seed in (3, 4):
            (row,) = (row for row in rows if (row["method"], row["seed"]) == (method, str(seed)))
            expected = plain_loop(parts, method, p_k, settings, seed, weight_decay=decay)
            check_history(history_of(results, row, "step"), expected)
            check_choice(row, expected, "step")


CASES = {
    "bf16": ("--precision bf16 --hidden_dims 20 --method neuralsort", EVEN, SORTS, {"bf16": True, "hidden": [20]}),
    "noise": ("--method noised_topk --p_k 0 0 0 0 1", TOP5, {}, {}),
    "relu": ("--apply_relu --hidden_dims 20 10 --method softsort", EVEN, SORTS, {"relu": True, "hidden": [20, 10]}),
}


@pytest.mark.parametrize("case", CASES)
def test_precision_and_noise_are_those_of_a_plain_loop(parts, store, results, case):
    flags, p_k, settings, options = CASES[case]
    (row,) = run(script, f"{FLAGS} -d {store} {flags} --seed 2", results)
    expected = plain_loop(parts, row["method"], p_k, settings, 2, **options)
    check_history(history_of(results, row, "step"), expected)
    check_choice(row, expected, "step")
    other = plain_loop(parts, row["method"], p_k, settings, 2, **{**options, "bf16": False})
    assert (other[-1]["valid_loss"] == pytest.approx(expected[-1]["valid_loss"], rel=1e-5)) == (case != "bf16")


def test_mixup_is_that_of_a_plain_loop(parts, store, results):
    rows = run(
        script, f'{FLAGS} -d {store} --method softmax_cross_entropy --mixup 0.5 --also "--method lapsum"', results
    )
    for row, method, p_k, settings, alpha in (
        (rows[0], "softmax_cross_entropy", [1.0], {}, 0.5),
        (rows[1], "lapsum", EVEN, {"m": 16}, None),
    ):
        expected = plain_loop(parts, method, p_k, settings, 0, mix=alpha)
        check_history(history_of(results, row, "step"), expected)


def test_mixup_is_a_function_of_seed_and_step():
    draws = {(seed, step): mixup(500, 0.3, seed, step) for seed in (0, 1) for step in range(1, 200)}
    for (seed, step), (share, partners) in draws.items():
        again, same = mixup(500, 0.3, seed, step)
        assert again == share
        assert torch.equal(same, partners)
        assert torch.equal(partners.sort().values, torch.arange(500))
        assert torch.equal(mixup(500, 2.0, seed, step)[1], partners)
    shares = torch.tensor([share for share, _ in draws.values()])
    assert len(set(shares.tolist())) == len(draws)
    assert float(shares.mean()) == pytest.approx(0.5, abs=0.08)  # Beta(a, a): mean 1/2, variance 1 / (4 (2a + 1))
    assert float(shares.var()) == pytest.approx(1 / (4 * 1.6), abs=0.03)


def test_an_evaluation_at_the_end_only_is_the_last_of_many(store, results):
    flags = f"{FLAGS} -d {store} --method softmax_cross_entropy"
    other = '--also "--method softsort"'
    (row,) = run(script, flags, results)
    row_at_end, other_at_end = run(script, f"{flags} --eval_freq 0 {other}", results.with_name("end.csv"))
    assert row_at_end["last_test_loss"] == row["last_test_loss"]
    assert row_at_end["last_valid_top1"] == row["last_valid_top1"]
    for recorded in (row_at_end, other_at_end):
        (entry,) = history_of(results.with_name("end.csv"), recorded, "step")
        assert (entry["epoch"], entry["step"]) == (str(EPOCHS), str((TRAIN - VALID) // BATCH * EPOCHS))
        assert float(entry["train_seconds"]) > 0


def test_the_clean_split_is_evaluated_and_chooses_nothing(parts, tmp_path, results):
    train, valid = split_rows(TRAIN, VALID, 0)
    embeddings, labels = parts["train"]
    wrong = (labels[valid] + 1) % CLASSES
    content = {"train": (embeddings[train], labels[train]), "valid": (embeddings[valid], wrong)}
    content |= {"clean": (embeddings[valid], labels[valid]), "test": parts["test"]}
    named = {
        f"{name}_{kind}": tensor
        for name, both in content.items()
        for kind, tensor in zip(("embeddings", "labels"), both)
    }
    torch.save(named, path := tmp_path / "noisy.pt")
    flags = FLAGS.replace(f"--num_valid {VALID}", "")
    (row,) = run(script, f"{flags} -d {path} --method softmax_cross_entropy", results)
    expected = plain_loop(parts, "softmax_cross_entropy", [1.0], {}, 0)  # where the right labels validate
    history = history_of(results, row, "step")
    for entry, figures in zip(history, expected):
        for name in ("loss", "top1", "top5"):
            assert float(entry[f"clean_{name}"]) == pytest.approx(figures[f"valid_{name}"], rel=1e-5)
    assert row["last_clean_top1"] == history[-1]["clean_top1"]
    best = max(history, key=lambda entry: float(entry["valid_top1"]))
    assert row["test_top1"] == best["test_top1"]
    assert float(row["last_valid_top1"]) < 0.5 * float(row["last_clean_top1"])


def test_a_noise_matrix_is_that_of_the_loss_and_known_by_its_content(parts, store, tmp_path, results):
    matrices = [torch.eye(CLASSES), 0.7 * torch.eye(CLASSES) + 0.3 / CLASSES]
    for name, matrix in zip("ab", matrices):
        torch.save(matrix.double(), tmp_path / f"{name}.pt")
    flags = f"{FLAGS} -d {store} --method forward_correction"
    rows = run(
        script,
        f'{flags} --noise_matrix {tmp_path}/a.pt --also "--method forward_correction --noise_matrix {tmp_path}/b.pt"',
        results,
    )
    assert len({row["run_id"] for row in rows}) == 2
    for row, settings in zip(rows, ({"noise_rate": 0}, {"noise_rate": 0.3})):
        check_history(history_of(results, row, "step"), plain_loop(parts, "forward_correction", [1.0], settings, 0))
    (tmp_path / "b.pt").rename(tmp_path / "c.pt")
    assert len(run(script, f"{flags} --noise_matrix {tmp_path}/c.pt", results)) == 2  # skipped
    messages = {"none": "is not a torch file of a matrix", "a": "lapsum does not take --noise_matrix"}
    for name, message in messages.items():
        with pytest.raises(EXPECTED, match=message):
            run(script, f"{FLAGS} -d {store} --method lapsum --noise_matrix {tmp_path}/{name}.pt", results)


def test_imagenet_21k_keeps_50_scores(parts, store, results, monkeypatch):
    path = Path(script.__file__).with_name("finetune_imagenet21k.py")
    flags = f"{FLAGS} -d {store} --method neuralsort --p_k .5 0 0 0 .5 --device cpu --threads 1 --results {results}"
    monkeypatch.setattr(sys, "argv", [str(path), *flags.split()])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(path, run_name="__main__")
    (row,) = rows_of(results)
    expected = plain_loop(parts, "neuralsort", HALF, {**SORTS, "m": 50}, 0)
    check_history(history_of(results, row, "step"), expected)
    assert (row["m"], row["p_k"]) == ("50", "0.5 0 0 0 0.5")
