"""Every column of every results file is explained in results/README.md."""

import csv
import pathlib

from scripts.shared.run_record import COLUMNS

RESULTS = pathlib.Path(__file__).parent.parent / "results"


def test_every_column_is_documented():
    text = (RESULTS / "README.md").read_text()
    assert {"test_top1", "test_top3", "valid_top20", "test_wer_beam8", "finished_utc"} <= COLUMNS.keys()
    for path in [*RESULTS.glob("*.csv"), *(RESULTS / "paper").glob("*.csv")]:
        with path.open(newline="") as file:
            flags = set(next(csv.reader(file))) - set(COLUMNS)
        assert not [flag for flag in flags if f"`{flag}`" not in text], path
