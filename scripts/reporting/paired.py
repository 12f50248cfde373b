"""Differences between rows by seed: how large, how sure, and how many seeds would settle them; settings beside them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from scipy.special import stdtrit

from scripts.reporting.results import Row, as_markdown, check, float_of, mean_std
from scripts.reporting.tables import METRICS, OF_A_ROW, TRIED, experiments_of, identity_columns, mixed_in, shown_p_k
from scripts.shared.program import CommandLineError

CONFIDENCE = 0.95
SETTLED = 0.3  # points: the half width of an interval that is asked for
MOST_SEEDS = 1000
VALID = ["valid_top1", "valid_top5"]
# Settings with a column of their own, and its heading; others stand in one column.
SETTINGS = {"m": "m", "inverse_temperature": "β", "lr": "rate", "n_epochs": "epochs"}


def half_width(std: Any, number: int) -> Any:
    """Half of the interval of a mean of so many differences with that sample standard deviation (Student's t)."""
    return float(stdtrit(number - 1, (1 + CONFIDENCE) / 2)) * std / number**0.5


def with_interval(differences: pd.Series) -> str:
    """The mean with its sign and, of two or more, half the width of its interval; nothing of none."""
    number = len(differences)
    spread = f" ± {half_width(differences.std(), number):.2f}" if number > 1 else ""
    return f"{differences.mean():+.2f}{spread}".replace("-", "−") if number else ""


def seeds_to_settle(std: float) -> str:
    """How many pairs would make an interval of ± SETTLED, if they spread as these do."""
    enough = (number for number in range(2, MOST_SEEDS + 1) if half_width(std, number) <= SETTLED)
    return str(next(enough, f"more than {MOST_SEEDS}"))


def paired(name: str, runs: Sequence[Row], method: str) -> str:
    """Markdown: a line per setting, as validation orders them, and its difference to the best of a method's settings.

    name: of the file. A table for each experiment; what all its lines share is said above it. Raises CommandLineError
    where the method has no row.
    """
    may = (*OF_A_ROW, *TRIED)
    return "\n".join(_table(name, each, method, mixed_in(name, runs, may)) for each in experiments_of(name, runs, may))


def _table(name: str, runs: Sequence[Row], method: str, apart: Iterable[str]) -> str:
    """apart: the columns that tell the experiments apart."""
    metrics = list(METRICS)
    check(Path(f"{name}.csv"), runs, ("method", "p_k", "seed", "lr", "n_epochs", *metrics, *VALID), [*SETTINGS])
    table = pd.DataFrame(runs).set_index("seed")
    table[metrics + VALID] = 100 * table[metrics + VALID].astype(float)
    columns = identity_columns(runs[0])
    found = [each for _, each in table.groupby(columns, sort=False)]
    if twice := [each for each in found if each.index.has_duplicates]:
        told = f"seed {twice[0].index[twice[0].index.duplicated()][0]} of {twice[0].method.iloc[0]}"
        raise CommandLineError(f"--paired: {name} has {told} twice in one setting; choose by --where order_seed=NUMBER")
    found.sort(key=lambda each: -each[VALID].to_numpy().mean())
    base = next((each for each in found if each.method.iloc[0] == method), None)
    if base is None:
        known = ", ".join(table.method.unique())
        raise CommandLineError(f"--paired {method}: {name} has no such row in one experiment; it has {known} (--where)")
    # Of other settings those that are tried, and what differs between the rows of a method.
    differ = [column for column in columns if table[column].nunique() > 1]
    within = [column for column in differ if (table.groupby("method")[column].nunique() > 1).any()]
    besides = [each for each in dict.fromkeys([*TRIED, *within]) if each in differ and each not in ("p_k", *SETTINGS)]
    lines = []
    for each in found:
        first, differences = each.iloc[0], (each[metrics] - base[metrics]).dropna()
        line = {"method": first.method, "P_K": shown_p_k(first.p_k)}
        line |= {heading: _short(first[column]) for column, heading in SETTINGS.items()}
        line["besides"] = ", ".join(f"{column} {_short(first[column])}" for column in besides if first[column])
        line["validation"] = mean_std(list(each[VALID].mean(axis=1)))
        line |= {METRICS[metric]: mean_std(list(each[metric])) for metric in metrics}
        for metric in metrics:
            line[f"Δ {METRICS[metric]}"] = "" if each is base else with_interval(differences[metric])
        line |= {"seeds": str(len(each)), "pairs": str(len(differences))}
        settled = "" if each is base or len(differences) < 2 else " \\| ".join(map(seeds_to_settle, differences.std()))
        lines.append({**line, f"seeds for ± {SETTLED:g}": settled})
    shown = pd.DataFrame(lines)
    shared = [column for column in shown if shown[column].nunique() == 1]
    of_all = {column: shown[column][0] for column in shared}
    of_all |= {column: _short(table[column].iloc[0]) for column in (*TRIED, *apart) if column in {*columns} - {*differ}}
    told = ", ".join(f"{column} {value}" for column, value in of_all.items() if value and column not in SETTINGS)
    words = sum(column not in shared for column in list(shown)[: list(shown).index("validation")])
    return (
        f"{name}: {told}. Test accuracy in percent where validation was best; validation: the mean of its top-1 and "
        f"top-5; ± standard deviation over seeds (n - 1). Δ: minus {method}'s best by validation, in points, by "
        f"seed, ± half of the {CONFIDENCE:.0%} interval (Student's t): where it holds 0, the two are not told apart. "
        f"How settings were chosen is not in it.\n\n{as_markdown(shown.drop(columns=shared), words)}\n"
    )


def _short(cell: str) -> str:
    return cell if float_of(cell) is None else f"{float(cell):g}"
