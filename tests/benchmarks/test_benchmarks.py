"""The benchmarks run, measure both implementations and write what they print."""

import csv
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent


def run(script, *arguments):
    command = [sys.executable, str(ROOT / "benchmarks" / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_losses_measures_ours_beside_difftopk(tmp_path):
    output = tmp_path / "losses.csv"
    sizes = ["4x12", "4x20m8"]
    done = run(
        "losses.py", "--methods", "softsort", "sinkhorn_sort", "--sizes", *sizes, "--repeats", 1, "--output", output
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
    done = run("losses.py", "--sizes", "12", "--output", tmp_path / "losses.csv")
    assert done.returncode == 2
    assert "BATCHxN" in done.stderr
    assert not list(tmp_path.iterdir())
