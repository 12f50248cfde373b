"""Numbers that README and docs type themselves: recomputed from their rows, and sought on the page.

Tables that the build draws from results/*.csv are not repeated here. Standard deviations are n - 1.
"""

import re
from functools import cache
from pathlib import Path

import pandas as pd

from scripts.reporting.runs import with_interval

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
SOFTMAX, SPLITTER = "softmax_cross_entropy", "splitter_selection"
ONE, HALF, EVEN, FIFTH = "1 0 0 0 0", "0.5 0 0 0 0.5", "0.2 0.2 0.2 0.2 0.2", "0 0 0 0 1"  # of P_K
METRICS = ["test_top1", "test_top5"]


@cache
def page(name):
    """The text of a page, each run of white space a single space."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


@cache
def rows(name):
    return pd.read_csv(RESULTS / f"{name}.csv")


def where(name, **values):
    """The rows of a file with these values; accuracies in percent; what chooses among heads, as valid."""
    found = rows(name)
    for column, value in values.items():
        found = found[found[column].isna() if value is None else found[column] == value]
    assert len(found), (name, values)
    accuracies = [column for column in found if re.search(r"_(top\d+|wer)", column)]
    found = found.assign(**{column: 100 * found[column] for column in accuracies if found[column].dtype == float})
    return found.assign(valid=found.valid_top1 + found.valid_top5) if "valid_top5" in found else found


def both(found):
    """Mean test top-1 and top-5 in percent."""
    return tuple(found[METRICS].mean())


def in_16_epochs(method, p_k):
    return both(where("table1_short", method=method, p_k=p_k))


def short(value, digits=1):
    """A number as the text writes it: .5, 4.5, -.1."""
    return re.sub(r"^(-?)0\.", r"\1.", f"{value + 1e-9:.{digits}f}")


def pair(values, digits=1):
    return " | ".join(short(value, digits) for value in values)


def plus(values, digits=2):
    return f"+{pair(values, digits)}".replace("| ", "| +")


def span(values, digits=2):
    """ ".30 to .35" """
    values = list(values)
    return f"{short(min(values), digits)} to {short(max(values), digits)}"


def less(these, those):
    return tuple(this - that for this, that in zip(these, those))


def stands(name, *texts):
    missing = [text for text in texts if text not in page(name).replace("\\|", "|")]
    assert not missing, f"{name} does not have: {missing}"


def written(differences):
    """The mean differences in top-1 and top-5 with their intervals, as report.py --paired has them: .30 ± .08."""
    return [re.sub(r"^\+|\b0(?=\.)", "", with_interval(differences[metric])) for metric in METRICS]


def signed(differences):
    return " | ".join(each if each.startswith("−") else f"+{each}" for each in written(differences))
