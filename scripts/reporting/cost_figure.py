"""Time and memory of each loss as n, k and batch grow, each with its asymptote, from results/benchmarks/scaling.csv.

    python -m scripts.reporting.cost_figure                   # draws results/figures/cost_over_size.png and .svg

The asymptote, dotted, is the number of operations (numbers kept) per sample to leading order, times the batch, drawn
through the last measured point. Fixed costs lie above it at small sizes.
"""

import argparse
import csv
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from scripts.reporting.figure_style import GREY, PAGE, STYLES, pyplot, save

ROOT = Path(__file__).resolve().parents[2]
AXES = {"n": "classes n", "k": "largest rank k", "batch": "batch size"}
QUANTITIES = {"ms": ("operations", "time of a pass (ms)"), "peak_mib": ("numbers", "peak memory (MiB)")}
SMALLEST_MIB = 0.5  # what the operating system counts in pages and pools says little below


def draw_cost(path: Path, folder: Path) -> list[Path]:
    """Draw the figure from a file of benchmarks/scaling.py into a folder; return its paths, none without rows."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["ms"]]
    if not rows:
        return []
    base = {axis: _base(rows, axis) for axis in AXES}
    methods = [method for method in STYLES if any(row["method"] == method for row in rows)]
    figure, axes = pyplot.subplots(2, len(AXES), figsize=(PAGE, 4.8), sharey="row", sharex="col")
    for column, (axis_name, label) in enumerate(AXES.items()):
        others = [other for other in AXES if other != axis_name]
        for line, (quantity, (model, unit)) in enumerate(QUANTITIES.items()):
            axis = axes[line][column]
            for method in methods:
                points = sorted(
                    (int(row[axis_name]), float(row[quantity]), int(row["batch"]) * float(row[model]))
                    for row in rows
                    if row["method"] == method and all(int(row[other]) == base[other] for other in others)
                )
                _curve(axis, method, [p for p in points if quantity == "ms" or p[1] >= SMALLEST_MIB])
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.minorticks_off()
            if column == 0:
                axis.set_ylabel(unit)
        ticks = sorted({int(row[axis_name]) for row in rows})
        axes[1][column].set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes[1][column].set_xlabel(label)
        axes[0][column].set_title(", ".join(f"{other} {base[other]:,}" for other in others), loc="left")
    handles = [
        Line2D([], [], color=STYLES[each].color, marker=STYLES[each].marker, linestyle="-", label=STYLES[each].label)
        for each in methods
    ]
    handles.append(Line2D([], [], color=GREY, linestyle=":", label="asymptote"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    devices = sorted({f"{row['device']}, {row['threads']} threads, PyTorch {row['torch']}" for row in rows})
    figure.suptitle(f"One forward and backward pass without m; {'; '.join(devices)}.", fontsize=7.5, x=0.01, ha="left")
    return save(figure, folder, "cost_over_size")


def _base(rows: Sequence[dict[str, str]], axis: str) -> int:
    """The value that stays while another number moves: the one that most rows have."""
    values = [int(row[axis]) for row in rows]
    return max(sorted(set(values)), key=values.count)


def _curve(axis: Axes, method: str, points: Sequence[tuple[int, float, float]]) -> None:
    """Draw (x, measured, model) and the model through the last measured point."""
    if not points:
        return
    style = STYLES[method]
    x, measured, model = zip(*points)
    axis.plot(x, measured, color=style.color, marker=style.marker, markersize=3.5, linewidth=1)
    if len(points) > 1 and not math.isclose(model[0], model[-1]):
        scale = measured[-1] / model[-1]
        axis.plot(x, [scale * value for value in model], color=style.color, linestyle=":", linewidth=0.9)


def main() -> int:
    """Draw the figure; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, default=ROOT / "results" / "benchmarks" / "scaling.csv")
    parser.add_argument("--figures", type=Path, default=ROOT / "results" / "figures", metavar="FOLDER")
    arguments = parser.parse_args()
    paths = draw_cost(arguments.input, arguments.figures)
    if not paths:
        print(f"error: {arguments.input} has no measured rows; run benchmarks/scaling.py first", file=sys.stderr)
        return 2
    print("\n".join(f"wrote {path}" for path in paths))
    return 0


if __name__ == "__main__":
    sys.exit(main())
