"""What a sweep says of the inverse temperature: a table of the best ones, and a figure for each P_K.

    python scripts/temperature_report.py results/temperature.csv
    python scripts/temperature_report.py results/temperature.csv --figures docs/figures   # PNG and SVG
    python scripts/temperature_report.py results/temperature_training.csv                 # whole networks

Of each method and P_K the inverse temperature is taken whose runs are best on validation, by the mean over the seeds
of P_K(1) top-1 + (1 - P_K(1)) top-5, and the test accuracies of these runs are shown, in percent, mean ± sample
standard deviation; in brackets as a multiple of the library's default, and whether none beyond it was tried. Beside
them those of the default and of the mode "auto", mean over the seeds.
"""

if __name__ == "__main__":
    from data import program

    program.begin()

import statistics
from collections.abc import Sequence
from pathlib import Path

from data import program
from scripts.reporting.plain_report import Row, markdown, mean_std, rows_of, run
from topk_losses import METHODS
from topk_losses.checks import AUTO

OF_THE_SWEEP = ("method", "p_k", "inverse_temperature", "distribution", "art_lambda", "top1_mode", "m", "seed")
OF_A_RUN = (
    *("order_seed", "device", "threads", "compile", "deterministic"),
    *("data_dir", "data_path", "batches", "eval_freq"),
)

Heads = dict[float | str | None, list[Row]]  # by inverse temperature, rising: a row per seed


def grid_of(path: Path) -> dict[str, dict[str, Heads]]:
    """Return the rows by P_K, then method in the library's order, then temperature. Raises CommandLineError."""
    rows = rows_of(path, "scripts/temperature*.sh", "last_inverse_temperature", (*OF_THE_SWEEP, *OF_A_RUN))
    rows.sort(key=lambda row: (list(METHODS).index(row["method"]), float(temperature_of(row) or 0)))
    grid: dict[str, dict[str, Heads]] = {}
    for row in rows:
        is_number = not row["last_inverse_temperature"]  # else auto, or a schedule from:to
        temperature = temperature_of(row) if is_number else row["inverse_temperature"]
        name = row["method"] + (f", m = {row['m']}" if row["m"] not in ("", row["num_classes"]) else "")
        heads = grid.setdefault(row["p_k"], {}).setdefault(name, {})
        heads.setdefault(temperature, []).append(row)
    return dict(sorted(grid.items(), key=lambda item: item[0].split(), reverse=True))


def rows_in(grid: dict[str, dict[str, Heads]]) -> list[Row]:
    """The rows of a grid, in its order."""
    return [row for methods in grid.values() for heads in methods.values() for rows in heads.values() for row in rows]


def temperature_of(row: Row) -> float | None:
    """The inverse temperature that a head had at the end."""
    cell = row["last_inverse_temperature"] or row["inverse_temperature"]
    return float(cell) if cell else None


def mean(rows: Sequence[Row], column: str) -> float:
    """The mean of a column over the seeds."""
    return statistics.fmean(float(row[column]) for row in rows)


def best_of(heads: Heads, p_k: str, annealed: bool = False) -> float | str | None:
    """The constant temperature, or the schedule if there is one, whose heads are best on validation."""
    first = float(p_k.split()[0])
    chosen = [each for each in heads if each != AUTO and isinstance(each, str) == annealed]

    def aim(temperature: float | str | None) -> float:
        rows = heads[temperature]
        return first * mean(rows, "valid_top1") + (1 - first) * mean(rows, "valid_top5")

    return max(chosen, key=aim, default=None)


def table(path: Path) -> str:
    """Return the table as Markdown. Raises CommandLineError, RecordError."""
    grid = grid_of(path)
    every = rows_in(grid)
    first = every[0]
    trained = first.get("model") or f"linear heads on embeddings of {first['num_classes']} classes"
    machines = dict.fromkeys(f"{row['device_name']}, PyTorch {row['torch_version']}" for row in every)
    caption = (
        f"{path.name}: {trained} ({first['train_images']} training rows, {first['valid_images']} validate), "
        f"{first['n_epochs']} epochs, batches of {first['batch_size']}, learning rate {float(first['lr']):g}, on "
        f"{' and '.join(machines)}."
    )
    heads = ["P_K", "method", "inverse temperature", "times spread", "top-1", "top-5"]
    heads += ["default", "auto", "auto ended at", "annealed", "seeds"]
    lines = []
    for p_k, methods in grid.items():
        for name, by_temperature in methods.items():
            best, schedule = best_of(by_temperature, p_k), best_of(by_temperature, p_k, annealed=True)
            default = METHODS[name.partition(",")[0]].inverse_temperature
            shown, times_spread = "—", ""
            if isinstance(best, float) and default is not None:
                tried = [each for each in by_temperature if isinstance(each, float)]
                end = ", the least" if best == min(tried) else ", the largest" if best == max(tried) else ""
                shown = f"{best:g} ({best / default:g}x{end})"
                if "last_test_logit_std" in first:
                    times_spread = f"{best * mean(by_temperature[best], 'last_test_logit_std'):.2g}"
            rows, auto = by_temperature[best], by_temperature.get(AUTO)
            others = [_both(each) for each in (by_temperature.get(default), auto)]
            others.append(f"{statistics.fmean(temperature_of(row) or 0 for row in auto):.3g}" if auto else "")
            others.append(f"{schedule}: {_both(by_temperature[schedule])}" if schedule else "")
            cells = [mean_std([100 * float(row[f"test_top{k}"]) for row in rows]) for k in (1, 5)]
            shares = f"[{p_k.replace(' ', ', ')}]".replace("0.", ".")
            lines.append([shares, name, shown, times_spread, *cells, *others, str(len(rows))])
    return f"{caption}\n\n{markdown(heads, lines, words=2)}\n"


def _both(rows: Sequence[Row] | None) -> str:
    """ "top-1 / top-5", empty where there are no rows."""
    return " / ".join(f"{100 * mean(rows, f'test_top{k}'):.2f}" for k in (1, 5)) if rows else ""


def draw(path: Path, folder: Path) -> list[Path]:
    """Draw a figure for each P_K and return the paths."""
    from scripts.reporting.temperature_figure import draw_temperatures  # matplotlib takes a second

    return draw_temperatures(path, folder)


def main(argv: list[str] | None = None) -> int:
    """Run the script; return its exit status (see data/program.py)."""
    return run(argv, "What the inverse temperature does.", "scripts/temperature.sh", table, draw)


if __name__ == "__main__":
    program.end(main())
