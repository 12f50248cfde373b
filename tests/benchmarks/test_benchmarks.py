"""The benchmarks run, measure ours beside the contenders, write what they print, and compare what should be equal."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import contenders, finetuning, huge_pages, kernels, losses, training_step
from topk_losses import bitonic
from topk_losses.kernels import VARIABLE

ROOT = Path(__file__).parents[2]


@pytest.fixture
def measured(tmp_path, capsys):
    """Run a benchmark, and return the rows that it writes to table.csv."""

    def call(benchmark, *flags):
        output = tmp_path / "new" / "table.csv"
        words = [str(flag) for flag in (*flags, "--threads", 1, "--output", output)]
        if benchmark is losses:  # it forks, which a process that has computed something may not
            printed = subprocess.check_output([sys.executable, losses.__file__, *words], text=True)
        else:
            assert benchmark.main(words) == 0
            printed = capsys.readouterr().out
        rows = list(csv.DictReader(output.open()))
        assert all(next(iter(row.values())) in printed for row in rows)
        return rows

    return call


def test_losses_measures_ours_beside_the_contenders(measured):
    methods = ["softsort", "noised_topk"]
    rows = measured(losses, "--methods", *methods, "--sizes", "4x20m8", "--repeats", 1, "--limit_s", 0)
    assert [(row["method"], row["n"], row["m"]) for row in rows] == [(method, "20", "8") for method in methods]
    for row in rows:
        assert float(row["ms"]) > 0
        assert bool(row["official_ms"]) == (row["method"] == "softsort")
        assert bool(row["pytopk_ms"]) == (row["method"] == "noised_topk")
        for name in ("official", "pytopk"):
            if row[f"{name}_ms"]:
                ratio = float(row[f"{name}_ms"]) / float(row["ms"])
                assert float(row[f"{name}_over_ours"]) == pytest.approx(ratio, rel=0.01)
    with pytest.raises(ValueError, match="not in difftopk"):
        contenders.difftopk.make("sinkhorn_sort", [0.2] * 5, 20, None, torch.device("cpu"))


@pytest.mark.parametrize("name", contenders.installed())
def test_a_contender_is_small_and_has_a_loss_that_trains(name):
    assert len((ROOT / "benchmarks" / "contenders" / f"{name}.py").read_text().splitlines()) <= 30
    logits = torch.randn(4, 20, requires_grad=True)
    labels = torch.arange(4)
    made = []
    for method in ("softsort", "noised_topk"):
        try:
            made.append(contenders.installed()[name].make(method, [0, 0, 1.0], 20, None, torch.device("cpu")))
        except ValueError:
            continue
    (loss,) = made
    loss(logits, labels).backward()
    assert logits.grad.isfinite().all()
    assert logits.grad.abs().max() > 0


def test_scaling_moves_one_number_at_a_time(measured):
    flags = ["--scaling", "--max_n", 100, "--repeats", 1, "--limit_s", 0]
    rows = measured(losses, "--methods", "softsort", "bitonic", *flags)
    assert [(row["method"], row["n"], row["k"], row["batch"]) for row in rows] == [
        (method, n, "5", "128") for n in ("16", "100") for method in ("softsort", "bitonic")
    ]
    assert all(float(row["ms"]) > 0 and row["passes"] == "1" for row in rows)
    # to leading order: softsort n + k^2; the bitonic network's comparators that matter to the 5 largest
    expected = [float(operations) for n in (16, 100) for operations in (n + 25, bitonic(n, 5).pruned().num_comparators)]
    assert [float(row["operations"]) for row in rows] == expected


def test_a_training_step_beside_softmax_and_beside_the_official_recipe(measured):
    small = ["--precision", "fp32", "--batch", 8, "--images", 64, "--turns", 1, "--steps", 1]
    rows = measured(training_step, "--methods", "softsort", *small)
    assert [row["method"] for row in rows] == ["softmax_cross_entropy", "softsort", "augmentation"]
    assert rows[0]["over_softmax"] == "1.000"
    (row,) = measured(training_step, "--recipe", "--methods", "softmax_cross_entropy", *small)
    ratio = float(row["images_per_second"]) / float(row["official_images_per_second"])
    assert float(row["ours_over_official"]) == pytest.approx(ratio, rel=0.01)


def test_runs_with_and_without_huge_pages(measured):
    small = ["--precision", "fp32", "--batch", 2, "--images", 8, "--turns", 1, "--steps", 1]
    off, on = measured(huge_pages, "--runs", 1, *small)
    assert (off["huge_pages"], on["huge_pages"], off["runs"]) == ("off", "on", "1")
    assert float(off["over_off"]) == 1
    assert float(on["over_off"]) == pytest.approx(float(on["ms_per_step"]) / float(off["ms_per_step"]), rel=0.01)


def test_steps_with_and_without_a_kernel(measured, monkeypatch):
    monkeypatch.setenv(VARIABLE, "torch")  # which it restores
    monkeypatch.setattr(kernels, "LINEAR", ((4, 8, 20, 8),))
    rows = measured(kernels, "--methods", "smooth_topk", "--batch", 2, "--images", 8, "--turns", 1, "--steps", 1)
    assert [row["step"] for row in rows] == ["resnet18 on cifar100, batch 2", "linear 8 x 20, batch 4"]
    for row in rows:
        expected = float(row["torch_ms"]) / float(row["ms"])
        assert float(row["torch_over_kernel"]) == pytest.approx(expected, rel=0.01)


def test_a_fine_tuning_step_beside_softmax_and_difftopk(measured):
    methods = ["softsort", "sinkhorn_sort", "smooth_topk"]
    flags = ["--sizes", "8x16x40m8", "8x16x12", "--heads", 2, "--turns", 2, "--steps", 1]
    rows = measured(finetuning, "--methods", *methods, *flags)
    every = ["softmax_cross_entropy", *methods]  # softmax is what the others are measured by
    assert [(row["n"], row["method"], row["heads"]) for row in rows] == [
        (n, method, heads) for n in ("40", "12") for method in every for heads in ("1", "2")
    ]
    for row in rows:
        alone = row["heads"] == "1"
        relaxed = row["method"] in methods[:2]
        assert row["m"] == ("8" if row["n"] == "40" and relaxed else "")
        assert (bool(row["over_separate"]), bool(row["loss"])) == (not alone, alone)
        if row["method"] == "softmax_cross_entropy":
            assert float(row["over_softmax"]) == 1
        if alone and row["method"] in ("softsort", "smooth_topk"):
            assert float(row["official_loss"]) == pytest.approx(float(row["loss"]), rel=1e-3)
        else:
            assert row["official_ms"] == row["official_loss"] == ""


@pytest.mark.parametrize(
    ("benchmark", "flags", "sentence"),
    [
        (losses, ["--sizes", "12"], "BATCHxN"),
        (finetuning, ["--sizes", "500x1000"], "BATCHxDIMxN"),
        (training_step, ["--turns", "0"], "0 is not between 1 and"),
    ],
)
def test_mistakes_are_answered_before_anything_is_measured(benchmark, flags, sentence, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        benchmark.main(["--output", str(tmp_path / "new" / "table.csv"), *flags])
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
