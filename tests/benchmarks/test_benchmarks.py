"""The benchmarks run, measure both implementations and write what they print."""

import csv
import pathlib
import subprocess
import sys

import pytest
import torch

from benchmarks import learned_temperature, losses, machine, recipe, scaling, training_step, transport
from scripts.reporting.cost_figure import draw_cost
from tests.processes import run
from topk_losses.networks import bitonic

ROOT = pathlib.Path(__file__).parent.parent.parent


def test_losses_measures_ours_beside_difftopk(tmp_path):
    output = tmp_path / "losses.csv"
    sizes = ["4x12", "4x20m8"]
    done = run(
        losses.main, "--methods", "softsort", "sinkhorn_sort", "--sizes", *sizes, "--repeats", 1, "--output", output
    )
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(output.open()))
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
        assert row["method"] in done.stdout


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
        assert done.returncode == 2
        assert "folder" in done.stderr
        assert "Traceback" not in done.stderr
        assert not done.stdout


def test_scaling_moves_one_number_at_a_time_and_is_drawn(tmp_path):
    output = tmp_path / "scaling.csv"
    flags = ["--max_n", 100, "--repeats", 1, "--limit_s", 0, "--threads", 1, "--output", output]
    done = run(scaling.main, "--methods", "softsort", "bitonic", *flags)
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(output.open()))
    assert [(row["method"], row["n"], row["k"], row["batch"]) for row in rows] == [
        (method, n, "5", "128") for method in ("softsort", "bitonic") for n in ("16", "100")
    ]
    assert all(float(row["ms"]) > 0 and row["passes"] == "1" for row in rows)
    # to leading order: softsort n + k^2; the bitonic network's comparators that matter to the 5 largest
    assert [float(row["operations"]) for row in rows] == [
        *(16 + 25, 100 + 25),
        *(float(bitonic(n, 5).pruned().num_comparators) for n in (16, 100)),
    ]
    assert [path.name for path in draw_cost(tmp_path, output)] == ["cost_over_size.png", "cost_over_size.svg"]
    assert "asymptote" in (tmp_path / "cost_over_size.svg").read_text()


def small_recipe():
    """With batches of 8 of 64 images in the place of 128 of 5000."""
    training_step.BATCH, training_step.NUM_IMAGES, recipe.PAUSE = 8, 64, 0.01
    return recipe.main()


def test_recipe_measures_ours_beside_the_official_loop(tmp_path):
    output = tmp_path / "recipe.csv"
    flags = ["--turns", 1, "--steps", 1, "--threads", 1, "--output", output]
    done = run(small_recipe, "--methods", "softmax_cross_entropy", *flags)
    assert done.returncode == 0, done.stderr
    (row,) = csv.DictReader(output.open())
    ratio = float(row["images_per_second"]) / float(row["official_images_per_second"])
    assert float(row["ours_over_official"]) == pytest.approx(ratio, rel=0.01)


def test_transport_agrees_with_unrolled_sinkhorn(tmp_path):
    output = tmp_path / "transport.csv"
    done = run(transport.main, "--sizes", "4x12", "--repeats", 1, "--threads", 1, "--output", output)
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(output.open()))
    assert [row["method"] for row in rows] == ["sinkhorn_sort", "soft_topk"]
    assert all(float(row["largest_difference"]) < 2e-3 and float(row["unrolled_ms"]) > 0 for row in rows)


def test_a_learned_temperature_moves_and_a_constant_one_does_not(tmp_path):
    labels = torch.arange(12000) % 6
    tensors = {"embeddings": torch.nn.functional.one_hot(labels, 6).float(), "labels": labels}
    data, output = tmp_path / "six.pt", tmp_path / "learned.csv"
    torch.save({f"{split}_{name}": each for split in ("train", "test") for name, each in tensors.items()}, data)
    flags = ["--methods", "lml", "--p_k", 0.5, 0, 0.5, "--seeds", 0, 1, "--threads", 1, "--output", output]
    done = run(learned_temperature.main, "-d", data, *flags)
    assert done.returncode == 0, done.stderr
    rows = {row["inverse_temperature"]: row for row in csv.DictReader(output.open())}
    assert [*rows] == ["default", "auto", "learned"]
    assert all(50 < float(row["top1"]) <= float(row["top5"]) <= 100 for row in rows.values())
    assert rows["default"]["ended_at"] == "0.25"
    assert rows["learned"]["ended_at"] != "0.25"


def test_machine_measures_what_floors_are_made_of(tmp_path):
    output = tmp_path / "machine.csv"
    done = run(machine.main, "--repeats", 1, "--threads", 1, "--output", output)
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(output.open()))
    assert {row["unit"] for row in rows} == {"GB/s", "GFLOP/s", "billion/s", "microseconds"}
    assert all(float(row["value"]) > 0 for row in rows)
