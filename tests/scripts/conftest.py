"""A report on rows that are made here."""

import pandas as pd
import pytest

from scripts import report
from scripts.reporting import benchmark_figures, figures


@pytest.fixture
def write(tmp_path):
    """Write a results file, whose run ids count the rows, and return its path."""

    def call(*rows, name="r.csv"):
        pd.DataFrame([{"run_id": number, **row} for number, row in enumerate(rows)]).to_csv(
            tmp_path / name, index=False
        )
        return tmp_path / name

    return call


@pytest.fixture
def drawn_quickly(monkeypatch, tmp_path):
    """Without the figures that are the same for every table; benchmarks would lie in tmp_path."""
    monkeypatch.setattr(figures, "draw_permutations", lambda folder: [])
    monkeypatch.setattr(benchmark_figures, "BENCHMARKS", tmp_path)


@pytest.fixture
def made(write, capsys):
    """Return (exit status, what was printed, what was said on stderr) of scripts/report.py on rows."""

    def call(rows, *flags, name="table1.csv"):
        status = report.main([str(write(*rows, name=name)), *map(str, flags)])
        return status, *capsys.readouterr()

    return call
