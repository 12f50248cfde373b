"""What results/benchmarks/ says, drawn: time per epoch and per loss; time and memory as n, k and batch grow.

The asymptote, dotted, is the number of operations (numbers kept) per sample to leading order, times the batch, drawn
through the last measured point. Fixed costs lie above it at small sizes.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from experiments.common.flags import ROOT
from scripts.reporting.figure_style import PAGE, STYLES, key, leave_out, legend, look, note, points_of, pyplot, save

BENCHMARKS = ROOT / "results" / "benchmarks"
STEPS_PER_EPOCH = 371  # of CIFAR-100: 47,500 training images in batches of 128, the last partial one dropped
AXES = {"n": "classes n", "k": "largest rank k", "batch": "batch size"}
QUANTITIES = {"ms": ("operations", "time of a pass (ms)"), "peak_mib": ("numbers", "peak memory (MiB)")}
WORDS = ["method", "device", "threads", "torch"]
MEASURED = {  # numbers and words of its files that are drawn
    "training_step": (["ms_per_step"], ["method", "precision"]),
    "losses": (["batch", "n", "m", "ms", "official_ms"], WORDS),
    "scaling": ([*AXES, *QUANTITIES, *(model for model, _ in QUANTITIES.values())], WORDS),
}
SMALLEST_MIB = 0.5  # what the operating system counts in pages and pools says little below


def draw_benchmarks(folder: Path) -> list[Path]:
    """Draw times and cost_over_size into a folder, say why one is left out, and return their paths."""
    drawn: list[Path] = []
    for draw, names in ((draw_times, ("training_step", "losses")), (draw_cost, ("scaling",))):
        try:
            tables = [_read(name) for name in names]
        except (OSError, ValueError) as error:
            of = " and ".join(f"benchmarks/{name}.py" for name in names)
            leave_out(f"{draw.__name__.removeprefix('draw_')}, of {of} in {BENCHMARKS}: {error}")
        else:
            drawn += draw(folder, *tables)
    return drawn


def _read(name: str) -> pd.DataFrame:
    numbers, words = MEASURED[name]
    path = BENCHMARKS / f"{name}.csv"
    rows = pd.read_csv(path, usecols=[*numbers, *words], dtype=dict.fromkeys(numbers, float)).dropna(subset=numbers[0])
    if rows.empty:
        raise ValueError(f"{path.name} has no measured row")
    return rows


def draw_cost(folder: Path, rows: pd.DataFrame) -> list[Path]:
    """Draw the rows of benchmarks/scaling.py."""
    base = rows[[*AXES]].mode().iloc[0].astype(int)  # what stays while another number moves: most rows have it
    rows["peak_mib"] = rows["peak_mib"].where(rows["peak_mib"] >= SMALLEST_MIB)
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
        axes[1][column].set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
        axes[1][column].set_xlabel(label)
        axes[0][column].set_title(", ".join(f"{other} {base[other]:,}" for other in others))
    legend(figure, methods, [key("asymptote", linestyle=":")], lines=False)
    devices = sorted({f"{row.device}, {row.threads} threads, PyTorch {row.torch}" for row in rows.itertuples()})
    note(figure, f"One forward and backward pass without m; {'; '.join(devices)}.")
    return save(figure, folder, "cost_over_size")


def draw_times(folder: Path, steps: pd.DataFrame, losses: pd.DataFrame) -> list[Path]:
    """Seconds per epoch of training steps, and milliseconds per forward and backward pass, ours beside difftopk's."""
    methods = [method for method in STYLES if method in set(losses["method"])]
    sizes = losses.groupby(["m", "n", "batch"], dropna=False)
    sizes = sorted(sizes, key=lambda size: (not np.isnan(size[0][0]), *size[0][1:]))
    figure, axes = pyplot.subplots(2, 3, figsize=(PAGE, 5.2), sharey=True)
    steps = steps[steps["method"].isin(methods)]
    _dots(axes[0][0], methods, steps["method"], steps["ms_per_step"] * STEPS_PER_EPOCH / 1000, filled=True)
    title = f"training: ResNet-18, CIFAR-100\nbatch 128, {steps['precision'].iloc[0]}"
    axes[0][0].set(xlabel="seconds per epoch", xlim=(0, None), title=title)
    for axis, ((m, n, batch), here) in zip(axes.flat[1:], sizes):
        for column, filled in (("official_ms", False), ("ms", True)):
            _dots(axis, methods, here["method"], here[column], filled)
        scores = "all scores" if np.isnan(m) else f"m {m:g}"
        title = f"loss: batch {batch:g}, {n:g} classes\n{scores}"
        axis.set(xscale="log", xmargin=0.08, xlabel="milliseconds per pass", title=title)
    axes[0][0].set_yticks(range(len(methods)), [STYLES[method].label for method in methods])
    axes[0][0].set_ylim(len(methods) - 0.5, -0.5)
    for axis in axes.flat[1 + len(sizes) :]:
        axis.set_visible(False)
    legend(figure, (), [points_of(filled=True), key("difftopk", marker="o", markerfacecolor="none")], columns=2)
    first = losses.iloc[0]
    note(
        figure,
        f"Medians on {first['device']}, {first['threads']} threads, PyTorch {first['torch']}; a pass is forward and "
        "backward. A missing point: out of memory, or a loss that difftopk does not have.",
    )
    return save(figure, folder, "times")


def _dots(axis: Axes, methods: Sequence[str], names: pd.Series, values: pd.Series, filled: bool) -> None:
    for name, value in zip(names, values):
        if value > 0:
            axis.plot(value, methods.index(name), **look(name, filled, line=False), markersize=5.5)
