"""Runs that are trained once, and reports on rows that are made from theirs."""

import csv
import os
from pathlib import Path

import pytest
from filelock import FileLock
from matplotlib.figure import Figure

from experiments.common import door
from scripts import report
from tests.scripts import trained as runs
from tests.scripts.trained import changed

AS_PUBLISHED = {"dataset": "cifar100", "num_classes": "100", "limit_train": "", "batch_size": "128", "n_epochs": "200"}
AS_PUBLISHED |= {"device_name": "a CPU"}


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """The folder of the runs of tests/scripts/trained.py; several workers share it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "trained"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            (making := folder.with_suffix(".tmp")).mkdir()
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(making)
                runs.train()
            making.rename(folder)
    return folder


@pytest.fixture(scope="session")
def row(trained):
    """A trained run's row of a file, the first with these cells."""

    def call(name: str, **cells: str) -> dict[str, str]:
        rows = runs.rows_of(trained / f"{name}.csv")
        return next(row for row in rows if cells.items() <= row.items())

    return call


@pytest.fixture(scope="session")
def cifar_run(row):
    """A run on CIFAR-100 as published, with these accuracies; its other cells are those of a trained run."""

    def call(seed, top1, top5, method="softmax_cross_entropy", **settings):
        trained = "neuralsort" if method == "neuralsort" else "softmax_cross_entropy"
        measured = {"test_top1": top1, "test_top5": top5, "valid_top1": top1, "valid_top5": top5}
        cells = AS_PUBLISHED | {"seed": seed, "method": method} | measured | settings
        return changed(row("cifar", method=trained), **cells)

    return call


@pytest.fixture(scope="session")
def two_seeds(cifar_run):
    """Two seeds of cross-entropy and of NeuralSort."""
    softmax = [cifar_run(seed, top1, top5) for seed, top1, top5 in ((0, 0.6100, 0.8500), (1, 0.6200, 0.8560))]
    return [*softmax, *(cifar_run(seed, 0.62, 0.86, "neuralsort") for seed in (0, 1))]


@pytest.fixture
def write(tmp_path):
    """Write a results file, whose run ids count the rows, and return its path."""

    def call(*rows, name="r.csv", **how):
        columns = dict.fromkeys(column for row in rows for column in row)
        encoding = how.pop("encoding", None)
        quoted = {"delimiter": how.pop("sep", ","), **how}
        with (tmp_path / name).open("w", newline="", encoding=encoding) as file:
            writer = csv.DictWriter(file, columns, restval="", **{"lineterminator": "\n"} | quoted)
            writer.writeheader()
            writer.writerows({**row, "run_id": number} for number, row in enumerate(rows))
        return tmp_path / name

    return call


@pytest.fixture
def saved(monkeypatch):
    """The figures that are saved from now on."""
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *rest, **how: figures.append(self) or save(self, *rest, **how))
    return figures


@pytest.fixture
def made(write, capsys):
    """Return (exit status, what was printed, the messages on stderr) of scripts/report.py on rows."""

    def call(rows, *flags, name="table1.csv"):
        words = [str(write(*rows, name=name)), *map(str, flags)]
        status = door.call(lambda: report.main(words))
        return status, *capsys.readouterr()

    return call
