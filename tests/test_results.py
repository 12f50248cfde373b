"""Every column of every results file is explained in results/README.md, or is a flag of a script."""

import csv
import pathlib

from experiments.common.columns import COLUMNS, names_of

ROOT = pathlib.Path(__file__).parent.parent


def test_every_column_is_documented():
    text = (ROOT / "results" / "README.md").read_text() + (ROOT / "docs" / "command-line.md").read_text()
    columns = {name for key in COLUMNS for name in names_of(key)}
    for path in [
        *ROOT.glob("results/repository/*.csv"),
        *ROOT.glob("results/*/*.csv"),
        *ROOT.glob("results/repository/noise/*.csv"),
    ]:
        with path.open(newline="") as file:
            flags = set(next(csv.reader(file))) - columns
        assert not [flag for flag in flags if f"`{flag}`" not in text and f"`--{flag}" not in text], path
