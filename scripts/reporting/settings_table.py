"""What heads.sh and scratch.sh found: settings of methods, the accuracy of each, its difference to cross-entropy's.

python -m scripts.reporting.settings_table results/heads.csv
"""

import sys
from pathlib import Path

import pandas as pd

from scripts.reporting.paired import CONFIDENCE, with_interval
from scripts.reporting.results import as_markdown, check, mean_std, rows_of, run
from scripts.reporting.tables import METRICS, shown_p_k

BASELINE = "softmax_cross_entropy"
VALID = ["valid_top1", "valid_top5"]
# Of a row's settings, with what a table calls them; those of some methods alone stand in one column.
SETTINGS = {"m": "m", "inverse_temperature": "β", "lr": "rate", "n_epochs": "epochs"}
OTHERS = {"label_smoothing": "label smoothing", "weight_decay": "weight decay", "margin": "margin"}


def text_of(path: Path) -> str:
    """Markdown: a row per setting, in the order in which validation prefers them; what all share is said above.

    Differences are to the setting of cross-entropy that validation prefers. Raises CommandLineError, ProgramError.
    """
    rows, metrics = rows_of(path, "scripts/heads.sh and scripts/scratch.sh write one"), list(METRICS)
    check(path, rows, ("method", "p_k", "seed", "lr", "n_epochs", *metrics, *VALID), ("m", "inverse_temperature"))
    runs = pd.DataFrame(rows).set_index("seed")
    runs[metrics + VALID] = 100 * runs[metrics + VALID].astype(float)
    settings = [name for name in ("method", "p_k", *SETTINGS, *OTHERS) if name in runs]
    found = [each for _, each in runs.groupby(settings, sort=False)]
    found.sort(key=lambda each: -each[VALID].to_numpy().mean())
    base = next((each for each in found if each.method.iloc[0] == BASELINE), runs[:0])
    lines = []
    for each in found:
        first, differences = each.iloc[0], (each[metrics] - base[metrics]).dropna()
        others = [f"{name} {first[column]}" for column, name in OTHERS.items() if first.get(column)]
        cells = [first.method, shown_p_k(first.p_k), *(first.get(name, "") for name in SETTINGS), ", ".join(others)]
        cells += [mean_std(list(each[VALID].mean(axis=1))), *(mean_std(list(each[metric])) for metric in metrics)]
        cells += [with_interval(differences[metric]) if each is not base else "" for metric in metrics]
        lines.append([*cells, str(len(each))])
    columns = ["method", "P_K", *SETTINGS.values(), "besides", "validation", *METRICS.values()]
    columns += [*(f"{name} − cross-entropy's" for name in METRICS.values()), "seeds"]
    table, words = pd.DataFrame(lines, columns=columns), columns[: columns.index("validation")]
    shared = [f"{name} {table[name][0]}" for name in table if table[name].nunique() == 1 and table[name][0]]
    table = table.drop(columns=[name for name in table if table[name].nunique() == 1])
    return (
        f"All rows: {', '.join(shared)}. Test accuracy in percent where validation accuracy was best; validation: the "
        "mean of its top-1 and top-5; ± standard deviation over seeds (n - 1). Differences in points, paired by seed, "
        f"± half of the {CONFIDENCE:.0%} interval (Student's t).\n\n"
        f"{as_markdown(table, sum(name in words for name in table))}\n"
    )


def main(argv: list[str] | None = None) -> int:
    """Run the script; return its exit status (see data/program.py)."""
    return run(argv, "The table of a choice of settings.", "scripts/heads.sh or scripts/scratch.sh", text_of)


if __name__ == "__main__":
    sys.exit(main())
