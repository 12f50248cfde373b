"""What heads.sh found: the best setting of each method, its accuracy, and its difference to cross-entropy by seed.

python -m scripts.reporting.heads_table results/heads.csv
"""

import sys
from pathlib import Path

import pandas as pd

from scripts.reporting.paired import CONFIDENCE, with_interval
from scripts.reporting.results import as_markdown, check, mean_std, rows_of, run
from scripts.reporting.tables import METRICS, shown_p_k

BASELINE = "softmax_cross_entropy"
# Of a head's settings, with what a table calls them; those of some methods alone stand in one column.
SETTINGS = {"m": "m", "inverse_temperature": "β", "lr": "rate", "n_epochs": "epochs"}
OTHERS = {"label_smoothing": "label smoothing", "weight_decay": "weight decay", "margin": "margin"}


def text_of(path: Path) -> str:
    """Markdown: a row per method, the highest mean of top-1 and top-5 first. Raises CommandLineError, ProgramError."""
    rows, metrics = rows_of(path, "scripts/heads.sh writes it"), list(METRICS)
    check(path, rows, ("method", "p_k", "seed", "lr", "n_epochs", *metrics), ("m",))
    runs = pd.DataFrame(rows).set_index("seed")
    runs[metrics] = 100 * runs[metrics].astype(float)
    base = runs[runs["method"] == BASELINE][metrics]
    lines = []
    for method, found in runs.groupby("method", sort=False):
        first, differences = found.iloc[0], (found[metrics] - base).dropna()
        others = [f"{name} {first[column]}" for column, name in OTHERS.items() if first.get(column)]
        cells = [method, shown_p_k(first["p_k"]), *(first.get(column, "") for column in SETTINGS), ", ".join(others)]
        cells += [mean_std(list(found[metric])) for metric in metrics]
        cells += [with_interval(differences[metric]) if method != BASELINE else "" for metric in metrics]
        lines.append((found[metrics].to_numpy().mean(), cells))
    lines.sort(key=lambda line: -line[0])
    columns = ["method", "P_K", *SETTINGS.values(), "besides", *METRICS.values()]
    columns += [f"{name} − cross-entropy's" for name in METRICS.values()]
    return (
        f"{runs.index.nunique()} seeds; test accuracy in percent where validation accuracy was best, mean ± standard "
        f"deviation (n - 1); differences in points, paired by seed, mean ± half of the {CONFIDENCE:.0%} interval "
        f"(Student's t).\n\n{as_markdown(pd.DataFrame([cells for _, cells in lines], columns=columns), 7)}\n"
    )


def main(argv: list[str] | None = None) -> int:
    """Run the script; return its exit status (see data/program.py)."""
    return run(argv, "The table of heads.sh.", "scripts/heads.sh", text_of)


if __name__ == "__main__":
    sys.exit(main())
