"""Hours of results files: classifiers of one pass over the data count its seconds once."""

import pandas as pd
import pytest

from reporting.hours import hours, passes_of
from tests.scripts.trained import rows_of


@pytest.fixture
def write(trained, tmp_path):
    """Write rows of trained classifiers with these seeds and seconds."""
    row = rows_of(trained / "heads.csv")[0]

    def call(cells: list[tuple[int, float]], **more: int):
        file = tmp_path / "rows.csv"
        rows = [{**row, "seed": seed, "train_seconds": s, "eval_seconds": 1, **more} for seed, s in cells]
        pd.DataFrame(rows).to_csv(file, index=False)
        return file

    return call


def test_a_pass_of_several_classifiers_counts_once(write):
    file = write([(0, 99.0), (1, 200.0), (0, 99.0001), (1, 200.0002), (0, 159.0)])
    passes = passes_of(file)
    assert sorted(zip(passes["seconds"].round(), passes["runs"])) == [(100, 2), (160, 1), (201, 2)]
    assert "5 runs in 3 passes over the data on" in hours(file)
    assert hours(file).endswith("3 min each (median), 8 min in all.")


def test_older_passes_held_all_seeds(write):
    assert list(passes_of(write([(0, 99.0), (1, 99.0), (2, 99.0)], num_heads=3))["runs"]) == [3]
    assert list(passes_of(write([(0, 99.0), (1, 99.0), (2, 99.0)]))["runs"]) == [1, 1, 1]


@pytest.mark.parametrize(
    ("device", "threads", "expected"),
    [
        ("cpu", (1, 1), " with one thread,"),
        ("cpu", (2, 2), " with 2 threads,"),
        ("cpu", (2, 1), " with 1 or 2 threads,"),
        ("cuda:0", (4, 1), ","),
    ],
)
def test_hours_on_a_cpu_say_the_threads(write, trained, device, threads, expected):
    file = write([(0, 99.0), (1, 200.0)])
    rows = pd.read_csv(file).assign(device=device, threads=threads)
    rows.to_csv(file, index=False)
    assert f" on {rows['device_name'][0]}{expected} " in hours(file)


def test_passes_of_rows_as_scripts_write_them(trained):
    """heads.csv has six losses with two seeds, each seed in one pass."""
    assert list(passes_of(trained / "heads.csv")["runs"]) == [6, 6]


@pytest.mark.parametrize("name", ["cifar", "knn", "beam"])
def test_networks_and_neighbours_share_no_pass(trained, tmp_path, name):
    """However near their seconds are: twice the same, and a thousandth apart."""
    row = rows_of(trained / f"{name}.csv")[0]
    file = tmp_path / "rows.csv"
    rows = [{**row, "train_seconds": seconds, "eval_seconds": 1} for seconds in (99.0, 99.0, 99.001)]
    pd.DataFrame(rows).to_csv(file, index=False)
    assert list(passes_of(file)["runs"]) == [1, 1, 1]
    assert hours(file).startswith("Our rows: 3 runs on ")


def test_of_several_scripts_in_one_file_only_classifiers_share_a_pass(trained, tmp_path):
    rows = []
    for name in ("cifar", "cifar", "heads", "heads"):
        rows.append(rows_of(trained / f"{name}.csv")[0] | {"seed": 0, "train_seconds": 99.0, "eval_seconds": 1})
    file = tmp_path / "rows.csv"
    pd.DataFrame(rows).to_csv(file, index=False)
    assert sorted(passes_of(file)["runs"]) == [1, 1, 2]
