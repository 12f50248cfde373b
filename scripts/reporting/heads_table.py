"""What heads.sh found: the best setting of each method, its accuracy, and its difference to cross-entropy by seed.

python -m scripts.reporting.heads_table results/heads.csv
"""

import sys
from pathlib import Path

import pandas as pd

from data import program
from scripts.reporting.paired import CONFIDENCE, with_interval
from scripts.reporting.results import as_markdown, check, mean_std, rows_of
from scripts.reporting.tables import METRICS, shown_p_k

BASELINE = "softmax_cross_entropy"
# Of a head's settings, with what a table calls them; those of some methods alone stand in one column.
SETTINGS = {"m": "m", "inverse_temperature": "β", "lr": "rate", "n_epochs": "epochs"}
OTHERS = {"label_smoothing": "label smoothing", "weight_decay": "weight decay", "margin": "margin"}


def text_of(path: Path) -> str:
    """Markdown: a row per method, the highest mean of top-1 and top-5 first. Raises CommandLineError, ProgramError."""
    rows = rows_of(path, "scripts/heads.sh writes it")
    check(path, rows, ("method", "p_k", "seed", *SETTINGS.keys() - {"m", "inverse_temperature"}, *METRICS), ("m",))
    runs = pd.DataFrame(rows).set_index("seed")
    runs[list(METRICS)] = 100 * runs[list(METRICS)].astype(float)
    base = runs[runs["method"] == BASELINE][list(METRICS)]
    lines = []
    for method, found in runs.groupby("method", sort=False):
        first, differences = found.iloc[0], (found[list(METRICS)] - base).dropna()
        others = [f"{name} {first[column]}" for column, name in OTHERS.items() if first.get(column)]
        cells = [method, shown_p_k(first["p_k"]), *(first.get(column, "") for column in SETTINGS), ", ".join(others)]
        cells += [mean_std(list(found[metric])) for metric in METRICS]
        cells += [with_interval(differences[metric]) if method != BASELINE else "" for metric in METRICS]
        lines.append((found[list(METRICS)].to_numpy().mean(), cells))
    lines.sort(key=lambda line: -line[0])
    columns = ["method", "P_K", *SETTINGS.values(), "besides", *METRICS.values()]
    columns += [f"{name} − cross-entropy's" for name in METRICS.values()]
    return (
        f"{runs.index.nunique()} seeds; test accuracy in percent where validation accuracy was best, mean ± standard "
        f"deviation (n - 1); differences in points, paired by seed, mean ± half of the {CONFIDENCE:.0%} interval "
        f"(Student's t).\n\n{as_markdown(pd.DataFrame([cells for _, cells in lines], columns=columns), 7)}\n"
    )


def main(argv: list[str] | None = None) -> int:
    """Print the table of a file; return the exit status."""
    parser = program.Parser(prog="heads_table.py", description="The table of heads.sh.")
    parser.add_argument("results", type=program.path, help="results/heads.csv, or another that heads.sh wrote")
    return program.finish(lambda: print(text_of(parser.parse_args(argv).results), end="") or 0)


if __name__ == "__main__":
    sys.exit(main())
