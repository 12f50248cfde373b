"""Time and memory of each loss as n, k and batch grow, each with its asymptote, from results/benchmarks/scaling.csv.

    python -m scripts.reporting.cost_figure                   # draws results/figures/cost_over_size.png and .svg

The asymptote, dotted, is the number of operations (numbers kept) per sample to leading order, times the batch, drawn
through the last measured point. Fixed costs lie above it at small sizes.
"""

if __name__ == "__main__":
    from data import program

    program.begin()

import math
from pathlib import Path

import pandas as pd

from data import program
from scripts.reporting.figure_style import PAGE, STYLES, key, legend, look, note, pyplot, save

BENCHMARK = Path(__file__).resolve().parents[2] / "results" / "benchmarks" / "scaling.csv"
AXES = {"n": "classes n", "k": "largest rank k", "batch": "batch size"}
QUANTITIES = {"ms": ("operations", "time of a pass (ms)"), "peak_mib": ("numbers", "peak memory (MiB)")}
SMALLEST_MIB = 0.5  # what the operating system counts in pages and pools says little below


def draw_cost(folder: Path, path: Path = BENCHMARK) -> list[Path]:
    """Draw the figure from a file of benchmarks/scaling.py into a folder; return its paths. Raises CommandLineError."""
    rows = pd.read_csv(path).dropna(subset="ms") if path.exists() else ()
    if not len(rows):
        raise program.CommandLineError(f"{path} has no measured rows; run benchmarks/scaling.py first")
    rows["peak_mib"] = rows["peak_mib"].where(rows["peak_mib"] >= SMALLEST_MIB)
    base = rows[[*AXES]].mode().iloc[0].astype(int)  # what stays while another number moves: most rows have it
    methods = [method for method in STYLES if method in set(rows["method"])]
    figure, axes = pyplot.subplots(2, len(AXES), figsize=(PAGE, 4.8), sharey="row", sharex="col")
    for column, (axis_name, label) in enumerate(AXES.items()):
        others = [other for other in AXES if other != axis_name]
        here = rows[(rows[others] == base[others]).all(axis=1)].sort_values(axis_name)
        for axis, (quantity, (model, unit)) in zip(axes[:, column], QUANTITIES.items()):
            for method in methods:
                measured = here[here["method"] == method].dropna(subset=quantity)
                asymptote = measured["batch"] * measured[model]
                line = look(method) | {"linestyle": "-", "markersize": 3.5, "linewidth": 1}
                axis.plot(measured[axis_name], measured[quantity], **line)
                if len(measured) > 1 and not math.isclose(asymptote.iloc[0], asymptote.iloc[-1]):
                    scaled = asymptote * (measured[quantity].iloc[-1] / asymptote.iloc[-1])
                    axis.plot(measured[axis_name], scaled, color=STYLES[method].color, linestyle=":", linewidth=0.9)
            axis.set(xscale="log", yscale="log", ylabel=unit if column == 0 else "")
            axis.minorticks_off()
        ticks = sorted(set(rows[axis_name]))
        axes[1][column].set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes[1][column].set_xlabel(label)
        axes[0][column].set_title(", ".join(f"{other} {base[other]:,}" for other in others))
    legend(figure, methods, [key("asymptote", linestyle=":")], lines=False)
    devices = sorted({f"{row.device}, {row.threads} threads, PyTorch {row.torch}" for row in rows.itertuples()})
    note(figure, f"One forward and backward pass without m; {'; '.join(devices)}.")
    return save(figure, folder, "cost_over_size")


if __name__ == "__main__":
    folder = BENCHMARK.parents[1] / "figures"
    program.end(program.finish(lambda: print(*(f"wrote {path}" for path in draw_cost(folder)), sep="\n") or 0))
