"""Every column of every results file is explained in results/README.md."""

import csv
import pathlib

from scripts.reporting.columns import COLUMNS, names_of

RESULTS = pathlib.Path(__file__).parent.parent / "results"


def test_every_column_is_documented():
    text = (RESULTS / "README.md").read_text()
    columns = {name for key in COLUMNS for name in names_of(key)}
    for path in [*RESULTS.glob("*.csv"), *(RESULTS / "paper").glob("*.csv")]:
        with path.open(newline="") as file:
            flags = set(next(csv.reader(file))) - columns
        assert not [flag for flag in flags if f"`{flag}`" not in text], path
