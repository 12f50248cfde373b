"""A report on runs that are made here."""

import pandas as pd
import pytest

from scripts import report


@pytest.fixture
def write(tmp_path):
    """Write a results file, whose run ids count the rows, and return its path."""

    def call(*rows, name="r.csv", **how):
        frame = pd.DataFrame([{"run_id": number, **row} for number, row in enumerate(rows)])
        frame.to_csv(tmp_path / name, index=False, **how)
        return tmp_path / name

    return call


@pytest.fixture
def made(write, capsys):
    """Return (exit status, what was printed, the messages on stderr) of scripts/report.py on rows."""

    def call(rows, *flags, name="table1.csv"):
        status = report.main([str(write(*rows, name=name)), *map(str, flags)])
        return status, *capsys.readouterr()

    return call
