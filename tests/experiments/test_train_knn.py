"""The script as a user meets it: rows, baselines against scikit-learn, resume to the bit, refusals with a sentence.

A linear map of few digits stands in for the networks, which tests/models/test_embedders.py has.
"""

from functools import partial
from pathlib import Path

import pytest
import torch
from experiments.shared import seed_processes
from experiments.shared.neighbours import UNTRAINED
from experiments.shared.ranks import Ranks
from experiments.shared.run_record import read_rows
from sklearn.decomposition import PCA
from sklearn.neighbors import KNeighborsClassifier

from data import points as points_module
from data.embeddings import StoreWriter
from data.points import load_points
from experiments import train_knn as script
from tests.experiments.runs import believe_in, check_columns, check_refused, check_resumes, history_of, without
from topk_losses import RELAXATIONS

MACHINE = ("--device", "cpu", "--threads", "1")
FEW = ("--dataset", "digits", "--limit_train", "200", "--limit_test", "50", *MACHINE)
SMALL = ("--model", "linear", "--dim", "8", "--k", "3", "--batch_size", "30", "--num_candidates", "40")


@pytest.fixture(autouse=True)
def _digits_once(monkeypatch, digits):
    """scikit-learn takes a moment to read its digits."""
    monkeypatch.setattr(points_module, "load_complete", lambda *_, **__: digits)


@pytest.fixture(scope="module")
def digits():
    return points_module.load_complete("digits", ".")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("stores") / "some.store"
    writer = StoreWriter(path, dim=6, dtype=torch.float16, backbone="some:net", resolution=32)
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 120), ("valid", 30), ("test", 40)):
        labels = torch.arange(count) % 4
        writer.write(split, 0, (torch.randn(count, 6, generator=generator) + 2 * labels.unsqueeze(1)).half(), labels)
    writer.finish()
    return path


def command(results: Path, flags: str = "", method: str = "neuralsort", n_epochs: int = 2) -> list[str]:
    return [*FEW, *SMALL, *f"--method {method} --n_epochs {n_epochs} {flags}".split(), "--results", str(results)]


def only_row(results: Path) -> dict[str, str]:
    (row,) = read_rows(results)
    return row


# The record.


def test_a_run_leaves_a_row_and_a_folder(results, capsys):
    assert script.main(command(results, "--loss log_mass", method="bitonic__non_sparse", n_epochs=3)) == 0
    row = only_row(results)
    check_columns(script, row, script.NOT_RECORDED)
    epochs = history_of(results, row)
    assert row["run_id"].startswith("digits-bitonic-k3-3epochs-seed0-")
    assert "valid top-1" in capsys.readouterr().out
    assert [each["epoch"] for each in epochs] == ["1", "2", "3"]
    best = max(epochs, key=lambda each: float(each["valid_top1"]))  # the earliest of equals
    assert (row["test_top1"], row["test_top1_epoch"]) == (best["test_top1"], best["epoch"])
    assert (row["last_test_top1"], row["last_train_loss"]) == (epochs[-1]["test_top1"], epochs[-1]["train_loss"])
    assert (row["train_images"], row["valid_images"], row["test_images"]) == ("180", "20", "50")
    assert "test_top5" not in row  # a majority names one label
    resolved = {
        **{"method": "bitonic", "inverse_temperature": "1.0", "distribution": "logistic_phi", "art_lambda": "0.5"},
        **{"loss": "log_mass", "k": "3", "model": "linear", "dim": "8", "lr": "0.001", "weight_decay": "0.0005"},
        **{"sorted": "", "self_match": "", "augmented_neighbours": "", "prediction": "neighbours", "threads": "1"},
    }
    assert {name: row[name] for name in resolved} == resolved


@pytest.mark.parametrize(("dataset", "model"), [("mnist", "cnn"), ("cifar10", "preact_resnet18")])
def test_the_published_defaults(dataset, model):
    args = script.parse_arguments(["--method", "neuralsort", *(["--dataset", dataset] if dataset != "mnist" else [])])
    _, flags = script.configuration(args)
    expected = {
        **{"dataset": dataset, "model": model, "n_epochs": 200, "batch_size": 100, "num_candidates": 100, "k": 9},
        **{"loss": "mass", "inverse_temperature": 1 / 16, "lr": 1e-3, "weight_decay": 5e-4},
    }
    assert {name: flags[name] for name in expected} == expected


# What trains.


@pytest.mark.parametrize("loss", ["mass", "log_mass"])
@pytest.mark.parametrize("method", [*RELAXATIONS, "soft_topk --sorted"])
def test_every_relaxation_learns(results, method, loss):
    assert script.main(command(results, f"--loss {loss}", method=method, n_epochs=6)) == 0
    losses = [float(each["train_loss"]) for each in history_of(results, only_row(results))]
    # Where masks are exactly 0 the logarithm is its guard, which nothing lowers; and where all are close, the soft rank
    # is the middle, whose mask has vanished.
    exempt = [("sparse_topk", "log_mass"), ("perturbed_topk", "log_mass"), ("recall_surrogate", "mass")]
    assert losses[-1] < losses[0] - 0.02 or (method, loss) in exempt
    assert float(only_row(results)["test_top1"]) > 0.7


@pytest.mark.parametrize("prediction", ["neighbours", "network"])
def test_the_network_of_cross_entropy_is_a_baseline_twice(results, prediction):
    flags = f"--prediction {prediction} --lr .01"
    assert script.main(command(results, flags, method="softmax_cross_entropy", n_epochs=8)) == 0
    row = only_row(results)
    assert float(row["test_top1"]) > 0.7
    assert (row["prediction"], row["loss"], row["inverse_temperature"]) == (prediction, "", "")


@pytest.mark.parametrize("method", UNTRAINED)
def test_the_untrained_baselines_are_those_of_scikit_learn(results, method, digits):
    words = [*FEW, "--limit_train", "900", "--method", method, "--k", "1", "--results", str(results)]
    assert script.main(words) == 0
    points = load_points("digits", ".", limits={"train": 900, "test": 50})
    train, valid, test = (
        points.inputs(each.inputs).flatten(1).numpy() for each in (points.train, points.valid, points.test)
    )
    if method == "pca":
        pca = PCA(50, svd_solver="full").fit(train)
        train, valid, test = map(pca.transform, (train, valid, test))
    oracle = KNeighborsClassifier(1, algorithm="brute").fit(train, points.train.labels)
    row = only_row(results)
    assert float(row["test_top1"]) == oracle.score(test, points.test.labels)
    assert float(row["valid_top1"]) == oracle.score(valid, points.valid.labels)
    assert script.main([*words, "--precision", "bf16"]) == 0  # no other row: there is nothing to round
    assert len(read_rows(results)) == 1
    assert (row["n_epochs"], row["lr"], row["model"], row["images_per_second"]) == ("", "", "", "")
    assert row["test_top1_epoch"] == "1"


def test_queries_and_candidates_are_each_point_once_and_a_query_is_left_out_where_it_is(results, monkeypatch):
    seen = []
    loss = script.neighbour_loss
    monkeypatch.setattr(script, "neighbour_loss", lambda *each: seen.append(each) or loss(*each))
    # So slow that the embeddings stay, and tell the points apart.
    slow = "--lr 1e-30 --weight_decay 0"
    script.main(command(results, slow, n_epochs=1))
    _, asked, offered, right, left_out, _ = zip(*seen)
    assert [(len(queries), len(candidates)) for queries, candidates in zip(asked, offered)] == [(30, 40)] * 6  # 180
    queries, candidates = torch.cat(asked), torch.cat(offered)
    assert len(queries.unique(dim=0)) == len(candidates.unique(dim=0)) == 180
    assert not torch.equal(queries, candidates[:180])
    same = [(each.unsqueeze(1) == others).all(2) for each, others in zip(asked, offered)]
    assert torch.equal(torch.cat(same), torch.cat(left_out))
    assert torch.cat(right)[torch.cat(same)].all()
    assert int(torch.cat(same).sum()) > 10

    script.main(command(results, f"{slow} --self_match", n_epochs=1))
    assert seen[-1][4] is None
    first, second = read_rows(results)
    assert (first["self_match"], second["self_match"]) == ("", "true")
    assert first["last_train_loss"] != second["last_train_loss"]


def test_neighbours_are_augmented_at_test_time_on_request_alone(results, monkeypatch):
    """Digits in three colours stand in for CIFAR."""
    drawn = []
    crop = points_module.crop_and_flip
    monkeypatch.setattr(points_module, "crop_and_flip", lambda *each: drawn.append(len(each[0])) or crop(*each))
    in_colour = points_module.PointSet((0.3,) * 3, (0.4,) * 3, augmented=True)
    monkeypatch.setitem(points_module.POINT_SETS, "digits", in_colour)
    for flags in ("", "--augmented_neighbours"):
        drawn.clear()
        assert script.main(command(results, flags, n_epochs=1)) == 0
        # In training 6 times 30 queries and 40 candidates; then those that validate and all that are neighbours.
        assert drawn == [30, 40] * 6 + [20, 180] * bool(flags)
    assert [row["augmented_neighbours"] for row in read_rows(results)] == ["", "true"]


def test_a_map_of_stored_embeddings(results, store):
    flags = ["--dim", "3", "--batch_size", "20", "--num_candidates", "20", "--k", "5", "--n_epochs", "2", *MACHINE]
    for more in ([], ["--model", "mlp", "--hidden_dims", "8"]):
        words = ["-d", str(store), "--method", "soft_topk", *flags, *more, "--results", str(results)]
        assert script.main(words) == 0
    linear, mlp = read_rows(results)
    assert linear["embeddings"].startswith("4x6-")
    assert (linear["model"], linear["backbone"], linear["embedding_dtype"]) == ("linear", "some:net", "float16")
    assert (mlp["model"], mlp["hidden_dims"], linear["dataset"]) == ("mlp", "8", "")
    assert (linear["train_images"], linear["valid_images"], linear["test_images"]) == ("120", "30", "40")
    assert float(linear["test_top1"]) > 0.5


# Resuming, seeds.


@pytest.mark.parametrize(
    "method",
    [
        *("neuralsort", "softmax_cross_entropy", "perturbed_topk"),
        *("lml --inverse_temperature auto", "softsort --inverse_temperature .1:2"),
        "soft_topk --sorted --inverse_temperature 1:20",
    ],
)
def test_after_ctrl_c_the_same_command_ends_with_the_same_bits(tmp_path, capsys, method):
    row = check_resumes(script, partial(command, method=method, n_epochs=4), ("evaluate", 2), tmp_path, capsys)
    assert row["times_resumed"] == "1"
    assert bool(row["last_inverse_temperature"]) == ("--inverse_temperature" in method)


def test_seeds_are_the_rows_of_each_seed(tmp_path, monkeypatch):
    """Here one after another; tests/experiments/test_train_cifar100_seeds.py has the processes."""
    monkeypatch.setattr(
        seed_processes, "run_seeds", lambda train, each, _: {args.seed: train(args, Ranks()) for args in each}
    )
    together, alone = tmp_path / "together" / "r.csv", tmp_path / "alone" / "r.csv"
    assert script.main(command(together, "--seeds 3 4", n_epochs=1)) == 0
    for seed in (3, 4):
        assert script.main(command(alone, f"--seed {seed}", n_epochs=1)) == 0
    for first, second in zip(read_rows(together), read_rows(alone), strict=True):
        assert without(first) == without(second)
    assert [row["seed"] for row in read_rows(together)] == ["3", "4"]


# Refusals.


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--method smooth_topk", "method"),
        ("--method neuralsort --prediction network", "of softmax_cross_entropy alone, got --method neuralsort"),
        ("--method neuralsort --sorted", "--sorted is of soft_topk alone"),
        ("--method neuralsort --augmented_neighbours", "is of cifar10, cifar100"),
        ("--method neuralsort --distribution cauchy", "distribution applies to"),
        ("--method pca --inverse_temperature 2", "--inverse_temperature is of a relaxed top-k, not of --method pca"),
        ("--method neuralsort --k 40", "--k must be below --num_candidates, got 40 and 40"),
        ("--method neuralsort --num_candidates 181", "--num_candidates must not exceed the 180 training points"),
        ("--method inputs --k 181", "--k must not exceed the 180"),
        ("--method neuralsort --model cnn", "--dim is of linear and mlp, not of --model cnn"),
        ("--method neuralsort --hidden_dims 8", "hidden_dims are those of mlp"),
        ("--method neuralsort --limit_test 361", "--limit_test must not exceed the 360"),
    ],
)
def test_a_mistake_is_answered_with_a_sentence(results, capsys, flags, words):
    check_refused(script.main, [*FEW, *SMALL, *flags.split(), "--results", str(results)], words, capsys)
    assert not list(results.parent.iterdir())


def test_several_processes_are_refused(results, capsys, monkeypatch):
    believe_in(2, monkeypatch)
    check_refused(script.main, command(results), "torchrun has started 2: leave torchrun out", capsys)


def test_what_is_not_finite_is_named_and_leaves_no_row(results, capsys, tmp_path):
    check_refused(script.main, command(results, "--lr 1e30"), "the loss became", capsys, status=1)
    writer = StoreWriter(tmp_path / "bad.store", dim=2, dtype=torch.float32)
    writer.write("train", 0, torch.randn(40, 2), torch.arange(40) % 2)
    writer.write("test", 0, torch.tensor([[0.0, torch.nan]]), torch.tensor([1]))
    writer.finish()
    words = ["-d", str(tmp_path / "bad.store"), "--method", "inputs", *MACHINE, "--results", str(results)]
    check_refused(script.main, words, "bad.store hold embeddings that are not finite", capsys, status=1)
    assert not results.exists()
