"""Tables and the figure of the nearest-neighbour classifier."""

import pytest
import torch

from experiments import train_knn
from models.embedders import embedder
from scripts import report
from scripts.reporting import neighbours_figure
from tests.scripts.test_report import cells

OURS = {
    **{"dataset": "mnist", "embeddings": "", "model": "cnn", "n_epochs": "200", "batch_size": "100", "lr": "0.001"},
    **{"weight_decay": "0.0005", "num_candidates": "100", "k": "9", "loss": "mass", "sorted": "", "self_match": ""},
    **{"augmented_neighbours": "", "prediction": "neighbours", "inverse_temperature": "0.0625", "precision": "fp32"},
    **{"limit_train": "", "limit_test": "", "num_classes": "10", "train_images": "55000", "valid_images": "5000"},
    **{"test_images": "10000", "device_name": "a GPU", "torch_version": "2.9"},
}
CROSS_ENTROPY = {
    "method": "softmax_cross_entropy",
    **dict.fromkeys(("loss", "inverse_temperature", "num_candidates", "self_match"), ""),
}
UNTRAINED = {
    **CROSS_ENTROPY,
    **dict.fromkeys(("model", "n_epochs", "batch_size", "lr", "weight_decay", "precision"), ""),
}


def knn_run(seed, top1, method="neuralsort", **settings):
    return {"method": method, "seed": str(seed), "test_top1": str(top1), **OURS, **settings}


ROWS = [
    *(knn_run(seed, top1, self_match="true") for seed, top1 in ((0, 0.994), (1, 0.996))),
    *(knn_run(seed, 0.99, "soft_topk") for seed in (0, 1)),
    *(knn_run(seed, 0.98, "soft_topk", sorted="true", loss="log_mass") for seed in (0, 1)),
    *(knn_run(seed, 0.99, **CROSS_ENTROPY, prediction="network") for seed in (0, 1)),
    *(knn_run(seed, 0.97, **CROSS_ENTROPY) for seed in (0, 1)),
    *(knn_run(seed, 0.96, **{**UNTRAINED, "method": "inputs"}) for seed in (0, 1)),
]


def test_lines_are_told_apart_by_what_they_are_and_have_top_1_alone(made):
    status, text, error = made(ROWS, name="knn.csv")
    assert (status, error) == (0, "")
    assert "kNN on MNIST, trained end to end" in text
    assert "cnn" not in text.splitlines()[0].partition("comparable")[0]  # said by the title's protocol
    assert cells(text, "method") == ["method", "top-1 published", "top-1 ours", "top-1 difference", "seeds"]
    assert cells(text, "NeuralSort")[1:] == ["**99.5**", "**99.5 ± 0.1**", "+0.0", "2"]
    assert cells(text, "SOFT top-k kNN (soft_topk)†")[1:] == ["99.4", "99.0 ± 0.0", "—", "2"]
    assert cells(text, "CNN by cross-entropy")[1:] == ["99.4", "99.0 ± 0.0", "—", "2"]
    for line, mean in (("soft_topk, log_mass, sorted", 98), ("softmax_cross_entropy", 97), ("inputs", 96)):
        assert cells(text, f"{line} ")[1:4] == ["", f"{mean}.0 ± 0.0", "—"]
    caption = text.splitlines()[0]
    assert "self_match none (published: true)" in caption
    assert "n_epochs 200 (published: 50)" in caption
    assert "k 9" in caption


@pytest.mark.parametrize("change", [{"k": "5"}, {"n_epochs": "10"}, {"dataset": "cifar10"}, {"limit_train": "100"}])
def test_other_neighbours_schedules_and_data_are_not_mixed(made, change):
    status, _, error = made([ROWS[0], knn_run(1, 0.9, "softsort", **change)], "--format", "csv", name="knn.csv")
    assert status == 2
    assert f"mixes {next(iter(change))}" in error


def test_a_set_without_published_values_stands_alone(made):
    status, text, _ = made(
        [knn_run(0, 0.9, dataset="digits"), knn_run(0, 0.8, "soft_topk", dataset="digits")], name="knn.csv"
    )
    assert status == 0
    assert "digits, cnn, 200 epochs, k 9" in text
    assert cells(text, "neuralsort") == ["neuralsort", "**90.00**", "1 of 2"]


@pytest.fixture
def run_on_digits(tmp_path):
    """Rows of a small network, and of baselines, which have no neighbours that were trained."""
    words = ["--dataset", "digits", "--limit_train", "300", "--device", "cpu", "--threads", "1"]
    flags = [*words, "--k", "4", "--model", "linear", "--dim", "8", "--n_epochs", "4", "--lr", ".01"]
    before = torch.get_num_threads()
    for method in ("pca", "softmax_cross_entropy", "neuralsort"):
        assert train_knn.main([*flags, "--method", method, "--results", str(tmp_path / "knn.csv")]) == 0
    torch.set_num_threads(before)
    return tmp_path / "knn.csv"


def test_the_figure_shows_the_nearest(run_on_digits, tmp_path, drawn_quickly):
    assert report.main([str(run_on_digits), "--figures", str(tmp_path / "figures")]) == 0
    drawn = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert drawn == ["knn_neighbours.png", "knn_neighbours.svg"]

    # Before: the network that seed 0 initialises.
    (folder,) = (tmp_path / "runs").glob("*neuralsort*")
    points, (before, after) = neighbours_figure.before_and_after(folder)
    torch.manual_seed(0)
    network = embedder("linear", points.input_shape, 8)
    with torch.no_grad():
        asked, there = (network(points.inputs(each.inputs)) for each in (points.test, points.train))
    assert torch.equal(before, torch.cdist(asked.double(), there.double()).topk(4, largest=False).indices)
    right = [(points.train.labels[rows] == points.test.labels.unsqueeze(1)).sum() for rows in (before, after)]
    assert right[1] > right[0]


def test_without_its_run_folder_the_figure_is_left_out_with_a_sentence(made, tmp_path, drawn_quickly):
    status, _, error = made(ROWS, "--figures", str(tmp_path / "figures"), name="knn.csv")
    assert status == 0
    assert "left out: neighbours before and after training" in error
