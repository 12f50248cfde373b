"""Differences between rows of a table by seed: how large, how sure, and how many seeds would settle them."""

from typing import Any

import pandas as pd
from scipy import stats

from data.program import CommandLineError
from scripts.reporting.results import as_markdown
from scripts.reporting.tables import METRICS, Line, Table, shown_p_k

CONFIDENCE = 0.95
SETTLED = 0.3  # points: the half width of an interval that is asked for
MOST_SEEDS = 1000


def half_width(std: Any, number: int) -> Any:
    """Half of the interval of a mean of so many differences with that sample standard deviation (Student's t)."""
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, number - 1)) * std / number**0.5


def with_interval(differences: pd.Series) -> str:
    """The mean with its sign and, of two or more, half the width of its interval; nothing of none."""
    number = len(differences)
    spread = f" ± {half_width(differences.std(), number):.2f}" if number > 1 else ""
    return f"{differences.mean():+.2f}{spread}".replace("-", "−") if number else ""


def seeds_to_settle(std: float) -> str:
    """How many pairs would make an interval of ± SETTLED, if they spread as these do."""
    enough = (number for number in range(2, MOST_SEEDS + 1) if half_width(std, number) <= SETTLED)
    return str(next(enough, f"more than {MOST_SEEDS}"))


def paired(table: Table, method: str) -> str:
    """Markdown: every row of a table minus the one of a method, in points, of the seeds that both have.

    Raises CommandLineError where the method has not exactly one row, or none shares two seeds with it.
    """
    of_method = [line for line in table.run_lines if line.method == method]
    if len(of_method) != 1:
        known = ", ".join(dict.fromkeys(line.method for line in table.run_lines))
        raise CommandLineError(
            f"--paired {method} must be a method with one row, got {len(of_method)} of {table.name}; it has {known} "
            "(--where method:column=value leaves one row)"
        )
    base, rows = _by_seed(of_method[0]), []
    for line in table.run_lines:
        differences = (_by_seed(line) - base).dropna()
        if line is of_method[0] or len(differences) < 2:
            continue
        spread = differences.std()
        settled = " \\| ".join(seeds_to_settle(spread[metric]) for metric in METRICS)
        cells = [with_interval(differences[metric]) for metric in METRICS]
        rows.append([line.name, shown_p_k(line.runs[0].get("p_k", "")), *cells, str(len(differences)), settled])
    if not rows:
        raise CommandLineError(f"--paired {method}: no row of {table.name} shares two seeds with it; run more seeds")
    columns = ["row", "P_K", *METRICS.values(), "pairs", f"seeds for ± {SETTLED:g}"]
    caption = (
        f"{table.name}: minus {of_method[0].name}, test accuracy in points, paired by seed: mean ± half of the "
        f"{CONFIDENCE:.0%} interval (Student's t). Where it holds 0, the two are not told apart. It is of this setting "
        "alone: how the settings were chosen is not in it."
    )
    return f"{caption}\n\n{as_markdown(pd.DataFrame(rows, columns=columns), 2)}\n"


def _by_seed(line: Line) -> pd.DataFrame:
    runs = pd.DataFrame(line.runs).set_index("seed")[list(METRICS)]
    return 100 * runs.astype(float)
