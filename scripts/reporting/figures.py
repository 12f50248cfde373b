"""The figures of scripts/report.py --figures: what a table cannot show, from the same rows.

NAME_accuracy_over_epochs: test accuracy against epoch (steps for heads), from runs/<run id>/ beside the file; mean and,
with two seeds or more, the band of its 95 % interval.
NAME_accuracy: a line for each row, ours with the 95 % interval of its mean, published values hollow.
NAME_neighbours: of the nearest-neighbour classifier, in place of these; see neighbours_figure.py.
times, cost_over_size: of results/benchmarks/; see benchmark_figures.py. permutation_matrix: see permutation_figure.py.
A figure that has no data is left out with a sentence. What the runs were stands above each figure of them.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from scripts.reporting.benchmark_figures import draw_benchmarks
from scripts.reporting.figure_style import COLUMN, PAGE, STYLES, leave_out, legend, look, note, points_of, pyplot, save
from scripts.reporting.neighbours_figure import draw_neighbours, has_images
from scripts.reporting.paired import half_width
from scripts.reporting.permutation_figure import draw_permutations
from scripts.reporting.tables import METRICS, Line, Table, p_k_of, run_summary, shown_p_k

HISTORIES = {"epochs.csv": "epoch", "evaluations.csv": "step"}  # of a run folder, and what they count
WIDEST = 30  # points below the best that a panel of accuracies shows; what is further down is written
PER_ROW = 3  # pairs of panels on a page's width
# Of the published P_K, in the order of the paper.
P_KS = ("1 0 0 0 0", "0 0 0 0 1", "0.5 0 0 0 0.5", "0.25 0 0 0 0.75", "0.1 0 0 0 0.9", "0.2 0.2 0.2 0.2 0.2")
ALONE = (1.0,)  # the P_K of what sorts nothing


def draw_figures(table: Table, run_folders: Path, folder: Path) -> list[Path]:
    """Draw every figure for which there is data, return their paths, and say what was left out."""
    return [*draw_figures_of_table(table, run_folders, folder), *draw_benchmarks(folder), *draw_permutations(folder)]


def draw_figures_of_table(table: Table, run_folders: Path, folder: Path) -> list[Path]:
    """Draw the figures of the rows of a table alone."""
    if not set(METRICS) <= set(table.decimals):
        return _neighbours(table, run_folders, folder)
    runs = [run for line in table.run_lines for run in line.runs]
    told = f"{table.name}.csv: {run_summary(runs, table.protocol, len(table.run_lines))}."
    if any(line.reasons for line in table.run_lines):
        told += " Not comparable with the published values."
    return [*_accuracy_over_epochs(table, run_folders, told, folder), *_accuracy(table, told, folder)]


def _accuracy_over_epochs(table: Table, run_folders: Path, told: str, folder: Path) -> list[Path]:
    curves, absent = [], 0  # a curve: its line, what its histories count, and these, one per run that has its folder
    for line in table.run_lines:
        for file, clock in HISTORIES.items():
            found = [_history(run_folders / run["run_id"] / file, clock) for run in line.runs]
            if histories := [history for history in found if len(history)]:
                break
        absent += len(line.runs) - len(histories)
        curves += [(line, clock, histories)] * bool(histories)
    if absent:
        num_runs = sum(len(line.runs) for line in table.run_lines)
        leave_out(f"{absent} of {num_runs} runs have no history in {run_folders}")
    if not curves:
        return leave_out("accuracy over epochs: it needs the run folders")
    # A panel per P_K; what sorts nothing, P_K = 1, is in all of them.
    p_ks = sorted({_p_k(line) for line, _, _ in curves} - {ALONE}, key=_p_k_order) or [ALONE]
    curves.sort(key=lambda curve: _p_k(curve[0]) != ALONE)
    # Pairs of panels, top-1 above top-5: one pair is a column wide, more fill the page.
    across, down = min(len(p_ks), PER_ROW), math.ceil(len(p_ks) / PER_ROW)
    size = (COLUMN if len(p_ks) == 1 else PAGE, 0.8 + 2 * down * (2.2 if across < PER_ROW else 1.7))
    figure, grid = pyplot.subplots(2 * down, across, figsize=size, squeeze=False)
    note(figure, told)
    pairs = grid.reshape(down, 2, across).swapaxes(1, 2).reshape(-1, 2)  # (panels, 2)
    for number, (p_k, pair) in enumerate(zip(p_ks, pairs)):
        pair[0].sharex(pair[1])
        pair[0].tick_params(labelbottom=False)
        for axis, first, (metric, name) in zip(pair, pairs[0], METRICS.items()):
            if number:
                axis.sharey(first)
            for line, clock, histories in curves:
                if _p_k(line) in (p_k, ALONE):
                    _curve(axis, line.method, clock, histories, metric)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
            axis.set_ylabel(f"test {name} accuracy (%)" if number % PER_ROW == 0 else "")
        shown = next(line.own_p_k for line, _, _ in curves if _p_k(line) == p_k)
        pair[0].set_title(f"$P_K$ = {shown_p_k(shown)}")
        pair[1].set_xlabel("optimizer step" if curves[0][1] == "step" else "epoch")
    for axis in pairs[len(p_ks) :].flat:
        axis.set_visible(False)
    legend(figure, [line.method for line, _, _ in curves])
    return save(figure, folder, f"{table.name}_accuracy_over_epochs")


def _neighbours(table: Table, run_folders: Path, folder: Path) -> list[Path]:
    """Of the best line of the nearest-neighbour classifier that has a run folder here; its rows have top-1 alone."""
    for line in sorted(table.run_lines, key=lambda line: line.mean("test_top1"), reverse=True):
        for run in line.runs:
            if has_images(run_folders / run["run_id"]):
                return draw_neighbours(run_folders / run["run_id"], line.name, folder, f"{table.name}_neighbours")
    return leave_out("neighbours before and after training: it needs the folder of a run on images")


def _curve(axis: Axes, method: str, clock: str, histories: Sequence[pd.DataFrame], metric: str) -> None:
    """Draw the mean over the seeds as far as all have come, and the band where there are two or more."""
    length = min(map(len, histories))
    x = histories[0][clock][:length]
    values = 100 * np.stack([history[metric][:length] for history in histories])  # (seeds, length)
    every = math.ceil(length / 8)
    first = list(STYLES).index(method) * every // len(STYLES)  # so that the methods' markers do not hide one another
    axis.plot(x, values.mean(0), **look(method), markevery=(first, every))
    if len(histories) > 1:
        mean, half = values.mean(0), half_width(values.std(0, ddof=1), len(values))
        axis.fill_between(x, mean - half, mean + half, color=STYLES[method].color, alpha=0.2, linewidth=0)


def _accuracy(table: Table, told: str, folder: Path) -> list[Path]:
    """Every row where it stands: ours with the interval of its mean, beside it, hollow, what was published."""
    lines = [line for line in table.lines if line.method and (line.runs or any(map(line.value, METRICS)))]
    lines.sort(key=lambda line: (list(STYLES).index(line.method), _p_k_order(_p_k(line))))
    figure, axes = pyplot.subplots(1, 2, figsize=(PAGE, 1.2 + 0.19 * len(lines)), sharey=True)
    for axis, (metric, name) in zip(axes, METRICS.items()):
        ours = [(y, line, 100 * line.mean(metric), True) for y, line in enumerate(lines) if line.runs]
        known = [(y, line, 100 * line.value(metric), False) for y, line in enumerate(lines) if line.value(metric)]
        lowest = max(mean for _, _, mean, _ in ours + known) - WIDEST
        for y, line, mean, is_ours in ours + known:
            if mean > lowest:
                has_bar = is_ours and len(line.runs) > 1
                half = 100 * half_width(line.std(metric), len(line.runs)) if has_bar else None
                axis.errorbar(mean, y, xerr=half, **look(line.method, is_ours, line=False), markersize=4.5, capsize=2)
            else:  # written at the edge, what was published at its end
                place = {"xy": (0.03, y - 0.5 * (not is_ours)), "xycoords": ("axes fraction", "data"), "va": "center"}
                shown = f"◂ {mean:.0f}" + " (published)" * (not is_ours)
                axis.annotate(shown, **place, color=STYLES[line.method].color, fontsize=6)
        axis.set(xlabel=f"test {name} accuracy (%)", ylim=(len(lines) - 0.5, -0.5))
        axis.grid(axis="x", linewidth=0.3)
    labels = [f"{STYLES[line.method].label}  {shown_p_k(line.own_p_k)}" for line in lines]
    axes[0].set_yticks(range(len(lines)), labels)
    for tick, line in zip(axes[0].get_yticklabels(), lines):
        tick.set_color(STYLES[line.method].color)
    note(figure, f"{told} Bars: 95 % intervals of the mean over seeds (t); without, one seed.")
    published = any(line.value(metric) for line in lines for metric in METRICS)
    legend(figure, (), [points_of(filled=True), *[points_of(filled=False)] * published], columns=2)
    return save(figure, folder, f"{table.name}_accuracy")


def _p_k(line: Line) -> tuple[float, ...]:
    return p_k_of(line.own_p_k)


def _p_k_order(p_k: tuple[float, ...]) -> tuple[int, tuple[float, ...]]:
    published = [p_k_of(cell) for cell in P_KS]
    return (published.index(p_k) if p_k in published else len(published), p_k)


def _history(path: Path, clock: str) -> pd.DataFrame:
    """The epochs or steps of a run; none if the file is absent or, which is said, damaged."""
    try:
        history = pd.read_csv(path, dtype=float, usecols=[clock, *METRICS])
        if np.isfinite(history).all(axis=None):
            return history
        leave_out(f"{path}, which cannot be read: {clock}, {' and '.join(METRICS)} must be numbers")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        leave_out(f"{path}, which cannot be read: {error}")
    return pd.DataFrame()
