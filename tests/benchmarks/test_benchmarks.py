"""The benchmarks run, measure both implementations, write what they print, and compare what should be equal."""

import csv
import pathlib
import subprocess
import sys

import pytest
import torch

from benchmarks import (
    finetuning,
    learned_temperature,
    losses,
    machine,
    recipe,
    scaling,
    training_step,
    transport,
)
from scripts.reporting import benchmark_figures
from tests.processes import run
from topk_losses.networks import bitonic

ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.fixture
def measured(tmp_path):
    """Run a benchmark, and return the rows that it writes to table.csv."""

    def call(main, *flags):
        done = run(main, *flags, "--threads", 1, "--output", tmp_path / "table.csv")
        assert done.returncode == 0, done.stderr
        rows = list(csv.DictReader((tmp_path / "table.csv").open()))
        assert all(row.get("git_commit", "-") or not (ROOT / ".git").exists() for row in rows)
        assert all(next(iter(row.values())) in done.stdout for row in rows)  # which are printed, too
        return rows

    return call


def test_losses_measures_ours_beside_difftopk(measured):
    methods, sizes = ["softsort", "sinkhorn_sort"], ["4x12", "4x20m8"]
    rows = measured(losses.main, "--methods", *methods, "--sizes", *sizes, "--repeats", 1)
    assert [(row["method"], row["n"], row["m"]) for row in rows] == [
        ("softsort", "12", ""),
        ("sinkhorn_sort", "12", ""),
        ("softsort", "20", "8"),
        ("sinkhorn_sort", "20", "8"),
    ]
    for row in rows:
        assert float(row["ms"]) > 0
        if row["method"] == "softsort":
            ratio = float(row["official_ms"]) / float(row["ms"])
            assert float(row["official_over_ours"]) == pytest.approx(ratio, rel=0.01)
        else:
            assert row["official_ms"] == ""
            assert "not in difftopk" in row["note"]


def test_a_size_that_cannot_be_read_is_refused(tmp_path):
    program = [sys.executable, str(ROOT / "benchmarks" / "losses.py"), "--sizes", "12"]
    done = subprocess.run([*program, "--output", tmp_path / "losses.csv"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "BATCHxN" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_table_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path):
    (tmp_path / "file").touch()
    for output in (tmp_path / "file" / "losses.csv", tmp_path):
        done = run(losses.main, "--methods", "lml", "--sizes", "4x12", "--output", output)
        assert (done.returncode, done.stdout) == (2, "")
        assert "folder" in done.stderr
        assert "Traceback" not in done.stderr


def test_scaling_moves_one_number_at_a_time_and_is_drawn(measured, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark_figures, "BENCHMARKS", tmp_path)
    flags = ["--max_n", 100, "--repeats", 1, "--limit_s", 0]
    rows = measured(scaling.main, "--methods", "softsort", "bitonic", *flags)
    assert [(row["method"], row["n"], row["k"], row["batch"]) for row in rows] == [
        (method, n, "5", "128") for method in ("softsort", "bitonic") for n in ("16", "100")
    ]
    assert all(float(row["ms"]) > 0 and row["passes"] == "1" for row in rows)
    # to leading order: softsort n + k^2; the bitonic network's comparators that matter to the 5 largest
    assert [float(row["operations"]) for row in rows] == [
        *(16 + 25, 100 + 25),
        *(float(bitonic(n, 5).pruned().num_comparators) for n in (16, 100)),
    ]
    assert not benchmark_figures.draw_benchmarks(tmp_path)
    (tmp_path / "table.csv").rename(tmp_path / "scaling.csv")
    drawn = benchmark_figures.draw_benchmarks(tmp_path)
    assert [path.name for path in drawn] == ["cost_over_size.png", "cost_over_size.svg"]
    assert "asymptote" in (tmp_path / "cost_over_size.svg").read_text()
    for damaged in ("n,k\n1,2\n", (tmp_path / "scaling.csv").read_text().partition("\n")[0]):
        (tmp_path / "scaling.csv").write_text(damaged)
        capsys.readouterr()
        assert not benchmark_figures.draw_benchmarks(tmp_path)
        assert f"left out: cost, of benchmarks/scaling.py in {tmp_path}: " in capsys.readouterr().err


def small_recipe():
    """With batches of 8 of 64 images in the place of 128 of 5000."""
    training_step.BATCH, training_step.NUM_IMAGES, recipe.PAUSE = 8, 64, 0.01
    return recipe.main()


def test_recipe_measures_ours_beside_the_official_loop(measured):
    (row,) = measured(small_recipe, "--methods", "softmax_cross_entropy", "--turns", 1, "--steps", 1)
    ratio = float(row["images_per_second"]) / float(row["official_images_per_second"])
    assert float(row["ours_over_official"]) == pytest.approx(ratio, rel=0.01)


def test_transport_agrees_with_unrolled_sinkhorn(measured):
    rows = measured(transport.main, "--sizes", "4x12", "--repeats", 1)
    assert [row["method"] for row in rows] == ["sinkhorn_sort", "soft_topk"]
    assert all(float(row["largest_difference"]) < 2e-3 and float(row["unrolled_ms"]) > 0 for row in rows)


def test_a_learned_temperature_moves_and_a_constant_one_does_not(measured, tmp_path):
    labels = torch.arange(12000) % 6
    tensors = {"embeddings": torch.nn.functional.one_hot(labels, 6).float(), "labels": labels}
    data = tmp_path / "six.pt"
    torch.save({f"{split}_{name}": each for split in ("train", "test") for name, each in tensors.items()}, data)
    flags = ["--methods", "lml", "--p_k", 0.5, 0, 0.5, "--seeds", 0, 1]
    rows = {row["inverse_temperature"]: row for row in measured(learned_temperature.main, "-d", data, *flags)}
    assert [*rows] == ["default", "auto", "learned"]
    assert all(50 < float(row["top1"]) <= float(row["top5"]) <= 100 for row in rows.values())
    assert rows["default"]["ended_at"] == "0.25"
    assert rows["learned"]["ended_at"] != "0.25"


def test_machine_measures_what_floors_are_made_of(measured):
    rows = measured(machine.main, "--repeats", 1)
    assert {row["unit"] for row in rows} == {"GB/s", "GFLOP/s", "billion/s", "microseconds"}
    assert all(float(row["value"]) > 0 for row in rows)


def test_a_step_beside_softmax_and_difftopk(measured):
    methods = ["softsort", "splitter_selection", "sinkhorn_sort", "smooth_topk"]
    sizes = ["--sizes", "8x16x40m8", "8x16x12", "--heads", 2, "--turns", 2, "--steps", 1, "--device", "cpu"]
    rows = measured(finetuning.main, "--methods", *methods, *sizes)
    # Softmax is what the others are measured by.
    every = ["softmax_cross_entropy", *methods]
    assert [(row["n"], row["heads"], row["method"]) for row in rows] == [
        (n, heads, method) for n in ("40", "12") for heads in ("1", "2") for method in every
    ]
    for row in rows:
        alone, relaxed = row["heads"] == "1", row["method"] in methods[:3]
        assert float(row["ms"]) > 0
        assert row["m"] == ("8" if row["n"] == "40" and relaxed else "")
        assert bool(row["over_separate"]) != alone
        assert bool(row["loss"]) == alone
        if row["method"] == "softmax_cross_entropy":
            assert float(row["over_softmax"]) == 1
        if alone and row["method"] in ("softsort", "splitter_selection", "smooth_topk"):
            assert float(row["official_loss"]) == pytest.approx(float(row["loss"]), rel=1e-4)
            assert float(row["official_over_ours"]) > 0
        else:
            assert row["official_ms"] == row["official_loss"] == ""


@pytest.mark.parametrize(
    ("benchmark", "flags", "sentence"),
    [
        (finetuning, ["--sizes", "500x1000"], "BATCHxDIMxN"),
        (finetuning, ["--sizes", "8x16x20m1"], "m must be an integer of at least 2"),
        (finetuning, ["--turns", "0"], "invalid positive_int value"),
    ],
)
def test_mistakes_are_answered_before_anything_is_made(benchmark, flags, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark", *flags, "--output", str(tmp_path / "table.csv")])
    with pytest.raises(SystemExit) as stopped:
        benchmark.main()
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
