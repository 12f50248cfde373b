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

import pandas as pd

from data import program
from scripts.reporting.results import Row, check, float_of, markdown, mean_std, results_of, run
from topk_losses import METHODS
from topk_losses.checks import AUTO

NEEDED = (
    *("method", "p_k", "seed", "num_classes", "train_images", "valid_images", "n_epochs", "batch_size", "lr"),
    *("test_top1", "test_top5", "valid_top1", "valid_top5", "device_name", "torch_version"),
)
APART = (
    *("method", "p_k", "inverse_temperature", "distribution", "art_lambda", "top1_mode", "m", "seed", "order_seed"),
    *("device", "threads", "compile", "deterministic", "data_dir", "data_path", "batches", "eval_freq"),
)
OPTIONAL = ("inverse_temperature", "last_inverse_temperature", "m")  # empty where there is none
SPREAD = "last_test_logit_std"
FLOOR_OF_HEADS, FLOOR = 5, 35  # points below the best that a panel of the figure still shows

# By inverse temperature, rising: a row per seed. None: there is none; text: auto, or a schedule from:to.
Heads = dict[float | str | None, list[Row]]


def grid_of(path: Path) -> dict[str, dict[str, Heads]]:
    """Return the rows by P_K, then method in the library's order, then temperature. Raises CommandLineError."""
    rows = results_of(path, "scripts/temperature*.sh", NEEDED, APART, OPTIONAL)
    check(path, rows, [SPREAD] * (SPREAD in rows[0]))
    changing = [row for row in rows if row["inverse_temperature"] and float_of(row["inverse_temperature"]) is None]
    check(path, changing, ["last_inverse_temperature"])
    rows.sort(key=lambda row: (list(METHODS).index(row["method"]), ended_at(row)))
    grid: dict[str, dict[str, Heads]] = {}
    for row in rows:
        name = row["method"] + (f", m = {row['m']}" if row["m"] not in ("", row["num_classes"]) else "")
        temperature = float_of(row["inverse_temperature"])
        if temperature is None:
            temperature = row["inverse_temperature"] or None
        grid.setdefault(row["p_k"], {}).setdefault(name, {}).setdefault(temperature, []).append(row)
    return dict(sorted(grid.items(), key=lambda item: item[0].split(), reverse=True))


def ended_at(row: Row) -> float:
    """The inverse temperature that a head had at the end, 0 where there is none."""
    return float(row["last_inverse_temperature"] or row["inverse_temperature"] or 0)


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
    """Return the table as Markdown. Raises CommandLineError, ProgramError."""
    grid = grid_of(path)
    every = [row for methods in grid.values() for heads in methods.values() for rows in heads.values() for row in rows]
    first = every[0]
    trained = first.get("model") or f"linear heads on embeddings of {first['num_classes']} classes"
    machines = dict.fromkeys(f"{row['device_name']}, PyTorch {row['torch_version']}" for row in every)
    caption = (
        f"{path.name}: {trained} ({first['train_images']} training rows, {first['valid_images']} validate), "
        f"{first['n_epochs']} epochs, batches of {first['batch_size']}, learning rate {float(first['lr']):g}, on "
        f"{' and '.join(machines)}."
    )
    lines = [
        {"P_K": f"[{p_k.replace(' ', ', ')}]".replace("0.", "."), "method": name, **_cells(heads, name, p_k)}
        for p_k, methods in grid.items()
        for name, heads in methods.items()
    ]
    return f"{caption}\n\n{markdown(pd.DataFrame(lines), words=2)}\n"


def _cells(heads: Heads, name: str, p_k: str) -> dict[str, str]:
    """The cells of one method and P_K, by their headings."""
    best, schedule = best_of(heads, p_k), best_of(heads, p_k, annealed=True)
    default, auto, rows = METHODS[name.partition(",")[0]].inverse_temperature, heads.get(AUTO), heads.get(best, [])
    shown, times_spread = "—", ""
    if isinstance(best, float) and default is not None:
        tried = [each for each in heads if isinstance(each, float)]
        end = ", the least" if best == min(tried) else ", the largest" if best == max(tried) else ""
        shown = f"{best:g} ({best / default:g}x{end})"
        times_spread = f"{best * mean(rows, SPREAD):.2g}" if SPREAD in rows[0] else ""
    return {
        **{"inverse temperature": shown, "times spread": times_spread},
        **{f"top-{k}": mean_std([100 * float(row[f"test_top{k}"]) for row in rows]) if rows else "" for k in (1, 5)},
        **{"default": _both(heads.get(default)), "auto": _both(auto)},
        "auto ended at": f"{statistics.fmean(map(ended_at, auto)):.3g}" if auto else "",
        "annealed": f"{schedule}: {_both(heads[schedule])}" if schedule else "",
        "seeds": str(len(rows)),
    }


def _both(rows: Sequence[Row] | None) -> str:
    """ "top-1 / top-5", empty where there are no rows."""
    return " / ".join(f"{100 * mean(rows, f'test_top{k}'):.2f}" for k in (1, 5)) if rows else ""


def draw(path: Path, folder: Path) -> list[Path]:
    """Draw <name of the file>_P_K.png and .svg for each P_K of a file, and return their paths."""
    from scripts.reporting.figure_style import GREY, PAGE, legend, look, note, pyplot, save  # takes a second
    from scripts.reporting.tables import shown_p_k

    drawn, grid = [], grid_of(path)
    trained, times_spread, floor, of_heads = "Networks", "", FLOOR, False
    if SPREAD in next(iter(next(iter(next(iter(grid.values())).values())).values()))[0]:
        of_heads, trained, floor = True, "Heads", FLOOR_OF_HEADS
        times_spread = " times the spread of a row's logits at the end"
    baseline = grid.get("1", {}).get("softmax_cross_entropy", {}).get(None, [])
    for p_k, methods in grid.items():
        curves = {method: heads for method, heads in methods.items() if len(heads) > 1}
        if not curves:
            continue
        figure, axes = pyplot.subplots(1, 2, figsize=(PAGE, 3.6))
        for axis, k in zip(axes, (1, 5)):
            best = 0.0
            for method, heads in curves.items():
                tried = {float(beta or 0): rows for beta, rows in heads.items() if not isinstance(beta, str)}
                x = [beta * (mean(rows, SPREAD) if of_heads else 1) for beta, rows in tried.items()]
                y = [100 * mean(rows, f"test_top{k}") for rows in tried.values()]
                axis.plot(x, y, **look(method.partition(",")[0]), markersize=3)
                best = max(best, *y)
            if baseline:
                axis.axhline(100 * mean(baseline, f"test_top{k}"), color=GREY, linewidth=0.8)
            axis.set_xscale("log")
            axis.set_ylim(best - floor, best + floor / 10)
            axis.set_xlabel(f"inverse temperature{' × standard deviation of the logits' if of_heads else ''}")
            axis.set_title(f"test top-{k}, %", loc="left")
        legend(figure, {method: method.partition(",")[2] for method in curves})
        note(
            figure,
            f"{trained} trained with $P_K$ = {shown_p_k(p_k)}: accuracy, mean over the seeds, over β{times_spread}. "
            f"Points are β by factors of 2 to 2.5; what lies more than {floor} points below the best is cut off. "
            "Grey line: softmax cross-entropy. Smooth losses: their τ in place of β.",
        )
        drawn += save(figure, folder, f"{path.stem}_{p_k.replace(' ', '_').replace('0.', '.')}")
    return drawn


def main(argv: list[str] | None = None) -> int:
    """Run the script; return its exit status (see data/program.py)."""
    return run(argv, "What the inverse temperature does.", "scripts/temperature.sh", table, draw)


if __name__ == "__main__":
    program.end(main())
