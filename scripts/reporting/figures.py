"""The figures of scripts/report.py --figures: what a table cannot show, from the same rows.

NAME_accuracy_over_epochs: test accuracy against epoch (steps for heads), from runs/<run id>/ beside the file; mean and,
with two seeds or more, a band of one sample standard deviation.
NAME_top1_top5: top-1 against top-5 per method and P_K, ours filled, published hollow.
NAME_accuracy_over_p_k: accuracy of each method over P_K (Table 4).
NAME_neighbours: of the nearest-neighbour classifier, in place of these; see neighbours_figure.py.
times: time per epoch and per loss, from results/benchmarks/. permutation_matrix: see permutation_figure.py.
A figure that has no data is left out with a sentence. What the runs were stands above each figure of them.
"""

import csv
import math
import statistics
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from scripts.reporting.figure_style import COLUMN, GREY, PAGE, STYLES, pyplot, save
from scripts.reporting.neighbours_figure import draw_neighbours, has_images
from scripts.reporting.permutation_figure import draw_permutations
from scripts.reporting.tables import METRICS, Line, Row, Table, float_of, p_k_of, run_summary, shown_p_k

HISTORIES = {"epochs.csv": "epoch", "evaluations.csv": "step"}  # of a run folder, and what they count
STEPS_PER_EPOCH = 371  # of CIFAR-100: 47,500 training images in batches of 128, the last partial one dropped
STEP_COLUMNS = {"method", "ms_per_step", "precision"}
LOSS_COLUMNS = {"method", "batch", "n", "m", "ms", "official_ms", "device", "threads", "torch"}
PER_ROW = 3  # pairs of panels on a page's width
# Of the published P_K, in the order of the paper.
P_KS = ("1 0 0 0 0", "0 0 0 0 1", "0.5 0 0 0 0.5", "0.25 0 0 0 0.75", "0.1 0 0 0 0.9", "0.2 0.2 0.2 0.2 0.2")


def draw_figures(table: Table, protocol: Row, run_folders: Path, benchmarks: Path, folder: Path) -> list[Path]:
    """Draw every figure for which there is data, return their paths, and say what was left out."""
    return [
        *draw_figures_of_table(table, protocol, run_folders, folder),
        *draw_times(benchmarks, folder),
        *draw_permutations(folder),
    ]


def draw_figures_of_table(table: Table, protocol: Row, run_folders: Path, folder: Path) -> list[Path]:
    """Draw the figures of the rows of a table alone."""
    runs = [run for line in table.run_lines for run in line.runs]
    note = f"{table.name}.csv: {run_summary(runs, protocol, len(table.run_lines))}."
    if any(line.reasons for line in table.run_lines):
        note += " Not comparable with the published values."
    if not set(METRICS) <= set(table.decimals):
        return _neighbours(table, run_folders, folder)
    return [
        *_accuracy_over_epochs(table, run_folders, note, folder),
        *_top1_against_top5(table, note, folder),
        *_accuracy_over_p_k(table, note, folder),
    ]


def read_curves(line: Line, run_folders: Path) -> tuple[str, list[list[Row]]]:
    """Return what the histories of a line's runs count, and one history per run that has its folder here."""
    for file, clock in HISTORIES.items():
        found = [run_folders / run["run_id"] / file for run in line.runs]
        histories = [history for path in found if (history := _read_csv(path, (clock, *METRICS)))]
        if histories:
            return clock, histories
    return "", []


def _accuracy_over_epochs(table: Table, run_folders: Path, note: str, folder: Path) -> list[Path]:
    curves = [(line, *read_curves(line, run_folders)) for line in table.run_lines]
    absent = sum(len(line.runs) - len(histories) for line, _, histories in curves)
    if absent:
        _leave_out(f"{absent} of {sum(len(line.runs) for line, _, _ in curves)} runs have no history in {run_folders}")
    curves = [curve for curve in curves if curve[2]]
    if not curves:
        return _leave_out("accuracy over epochs: it needs the run folders")
    # A panel per P_K; what sorts nothing, P_K = 1, is in all of them.
    everywhere = [curve for curve in curves if p_k_of(curve[0].runs[0]["p_k"]) == (1.0,)]
    p_ks = sorted({p_k_of(line.runs[0]["p_k"]) for line, _, _ in curves} - {(1.0,)}, key=_p_k_order) or [(1.0,)]
    shown = {p_k_of(line.runs[0]["p_k"]): shown_p_k(line.runs[0]["p_k"]) for line, _, _ in curves}
    figure, axes = _panels(len(p_ks), note)
    for number, p_k in enumerate(p_ks):
        here = [curve for curve in curves if p_k_of(curve[0].runs[0]["p_k"]) == p_k and p_k != (1.0,)]
        for axis, (metric, name) in zip(axes[number], METRICS.items()):
            for line, clock, histories in [*everywhere, *here]:
                _curve(axis, line.method, clock, histories, metric)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
            axis.set_ylabel(f"test {name} accuracy (%)" if number % PER_ROW == 0 else "")
        axes[number][0].set_title(f"$P_K$ = {shown[p_k]}", loc="left")
        axes[number][1].set_xlabel("optimizer step" if curves[0][1] == "step" else "epoch")
    _legend(figure, [line.method for line, _, _ in curves])
    return save(figure, folder, f"{table.name}_accuracy_over_epochs")


def _neighbours(table: Table, run_folders: Path, folder: Path) -> list[Path]:
    """Of the best line of the nearest-neighbour classifier that has a run folder here; its rows have top-1 alone."""
    for line in sorted(table.run_lines, key=lambda line: line.mean("test_top1"), reverse=True):
        for run in line.runs:
            if has_images(run_folders / run["run_id"]):
                return draw_neighbours(run_folders / run["run_id"], line.name, folder, f"{table.name}_neighbours")
    return _leave_out("neighbours before and after training: it needs the folder of a run on images")


def _curve(axis: Axes, method: str, clock: str, histories: Sequence[Sequence[Row]], metric: str) -> None:
    """Draw the mean over the seeds as far as all have come, and the band where there are two or more."""
    style = STYLES[method]
    length = min(len(history) for history in histories)
    x = [float(entry[clock]) for entry in histories[0][:length]]
    values = [[100 * float(history[at][metric]) for history in histories] for at in range(length)]
    means = [statistics.fmean(each) for each in values]
    every = math.ceil(length / 8)
    first = list(STYLES).index(method) * every // len(STYLES)  # so that the methods' markers do not hide one another
    axis.plot(x, means, color=style.color, linestyle=style.line, marker=style.marker, markevery=(first, every))
    if len(histories) > 1:
        stds = [statistics.stdev(each) for each in values]
        low, high = ([mean + sign * std for mean, std in zip(means, stds)] for sign in (-1, 1))
        axis.fill_between(x, low, high, color=style.color, alpha=0.2, linewidth=0)


def _top1_against_top5(table: Table, note: str, folder: Path) -> list[Path]:
    """Ours and published in one plane; a second panel enlarges the best corner if the first is wide."""
    points = []  # (x, y, method, P_K, is ours), in percent
    for line in table.lines:
        values = [line.value(metric) for metric in METRICS]
        if line.method and None not in values:
            points.append((*(100 * float(value) for value in values), line.method, line.p_k, False))
        if line.runs:
            points.append((*(100 * line.mean(metric) for metric in METRICS), line.method, line.runs[0]["p_k"], True))
    best = [max(point[axis] for point in points) for axis in (0, 1)]
    close = [point for point in points if point[0] > best[0] - 12 and point[1] > best[1] - 6]
    is_wide = len(close) > 2 and any(_span(points, axis) > 3 * _span(close, axis) for axis in (0, 1))
    panels = [points, close] if is_wide else [points]
    letters = {p_k: chr(ord("a") + at) for at, p_k in enumerate(sorted({p_k_of(p[3]) for p in points}, key=_p_k_order))}
    width = PAGE if is_wide or len(points) > 12 else COLUMN
    figure, axes = pyplot.subplots(1, len(panels), figsize=(width, 3.6), squeeze=False)
    for axis, shown in zip(axes[0], panels):
        for point in shown:
            x, y, method, p_k, is_ours = point
            style = STYLES[method]
            face = style.color if is_ours else "none"
            axis.plot(x, y, color=style.color, marker=style.marker, markerfacecolor=face, linestyle="", markersize=5.5)
            if shown is panels[-1] or point not in close:  # the letters of the enlarged ones would lie on each other
                axis.annotate(letters[p_k_of(p_k)], (x, y), (4, 2), textcoords="offset points", fontsize=7)
        axis.margins(0.1)
        axis.set_xlabel("test top-1 accuracy (%)")
    if is_wide:
        left, right = axes[0][1].get_xlim()
        low, high = axes[0][1].get_ylim()
        axes[0][0].add_patch(
            pyplot.Rectangle((left, low), right - left, high - low, facecolor="none", edgecolor=GREY, linewidth=0.7)
        )
        axes[0][0].set_title("all", loc="left")
        axes[0][1].set_title("the frame, enlarged", loc="left")
    axes[0][0].set_ylabel("test top-5 accuracy (%)")
    by_p_k = {p_k_of(point[3]): shown_p_k(point[3]) for point in points}
    handles = [
        _key("ours" if is_ours else "published", filled=is_ours)
        for is_ours in (True, False)
        if any(point[4] == is_ours for point in points)
    ]
    handles += [Line2D([], [], linestyle="", label=f"{letter}: {by_p_k[p_k]}") for p_k, letter in letters.items()]
    _note(figure, note, width)
    _legend(figure, [point[2] for point in points], handles, lines=False)
    return save(figure, folder, f"{table.name}_top1_top5")


def _span(points: Sequence[tuple], axis: int) -> float:
    return max(point[axis] for point in points) - min(point[axis] for point in points)


def _accuracy_over_p_k(table: Table, note: str, folder: Path) -> list[Path]:
    """Each method's accuracy over the P_K that it was run or published with; P_K = 1, softmax, as a level."""
    lines = [line for line in table.lines if line.method and (line.runs or any(line.value(m) for m in METRICS))]
    relaxed = [line for line in lines if _p_k_of_line(line) not in ((), (1.0,))]
    p_ks = sorted({_p_k_of_line(line) for line in relaxed}, key=_p_k_order)
    methods_run = [line.method for line in relaxed if line.runs]
    if len(methods_run) == len(set(methods_run)):
        return _leave_out("accuracy over P_K: it needs a method with two P_K or more besides [1, 0, ..]")
    shown = {_p_k_of_line(line): shown_p_k(line.runs[0]["p_k"] if line.runs else line.p_k) for line in relaxed}
    figure, axes = _panels(1, note)
    for axis, (metric, name) in zip(axes[0], METRICS.items()):
        for line in lines:
            if line.runs and _p_k_of_line(line) == (1.0,):
                style = STYLES[line.method]
                axis.axhline(100 * line.mean(metric), color=style.color, linestyle=style.line, linewidth=0.9)
        for method in dict.fromkeys(line.method for line in relaxed):
            style = STYLES[method]
            here = sorted(
                (line for line in relaxed if line.method == method), key=lambda line: p_ks.index(_p_k_of_line(line))
            )
            ours = [line for line in here if line.runs]
            axis.errorbar(
                [p_ks.index(_p_k_of_line(line)) for line in ours],
                [100 * line.mean(metric) for line in ours],
                [100 * (line.std(metric) or 0.0) for line in ours],
                **{"color": style.color, "linestyle": style.line, "marker": style.marker, "capsize": 2},
            )
            known = [line for line in here if line.value(metric) is not None]
            x = [p_ks.index(_p_k_of_line(line)) for line in known]
            y = [100 * float(line.value(metric)) for line in known]
            axis.plot(x, y, color=style.color, marker=style.marker, markerfacecolor="none", linestyle="")
        axis.set_ylabel(f"test {name} accuracy (%)")
        axis.set_xlim(-0.3, len(p_ks) - 0.7)
        axis.set_xticks(range(len(p_ks)), [shown[p_k] for p_k in p_ks], rotation=30, ha="right")
    axes[0][1].set_xlabel("$P_K$")
    methods = [line.method for line in lines if line.runs]
    hollow = any(line.value(metric) is not None for line in relaxed for metric in METRICS)
    _legend(figure, methods, [_key("published", filled=False)] if hollow else [])
    return save(figure, folder, f"{table.name}_accuracy_over_p_k")


def draw_times(benchmarks: Path, folder: Path) -> list[Path]:
    """Seconds per epoch of training steps, and milliseconds per forward and backward pass, ours beside difftopk's."""
    steps = _read_csv(benchmarks / "training_step.csv", ("ms_per_step",))
    losses = _read_csv(benchmarks / "losses.csv", ("batch", "n"))
    if not (steps and losses and STEP_COLUMNS.issubset(steps[0]) and LOSS_COLUMNS.issubset(losses[0])):
        return _leave_out(
            f"times: it needs benchmarks/training_step.py's and benchmarks/losses.py's files in {benchmarks}"
        )
    methods = [method for method in STYLES if any(row["method"] == method for row in losses)]
    sizes = {(row["batch"], row["n"], row["m"]) for row in losses}
    sizes = sorted(sizes, key=lambda size: (size[2], float(size[1])))[:5]
    figure, axes = pyplot.subplots(2, 3, figsize=(PAGE, 5.2), sharey=True)
    seconds = {
        row["method"]: float(row["ms_per_step"]) * STEPS_PER_EPOCH / 1000 for row in steps if row["method"] in methods
    }
    _dots(axes[0][0], methods, seconds, filled=True)
    axes[0][0].set_xlim(0, 1.1 * max(seconds.values(), default=1))
    axes[0][0].set_xlabel("seconds per epoch")
    axes[0][0].set_title(f"training: ResNet-18, CIFAR-100\nbatch 128, {steps[0]['precision']}", loc="left")
    for axis, size in zip(axes.flat[1:], sizes):
        here = [row for row in losses if (row["batch"], row["n"], row["m"]) == size]
        for column, filled in (("official_ms", False), ("ms", True)):
            values = {row["method"]: float_of(row[column]) for row in here}
            _dots(axis, methods, {method: value for method, value in values.items() if value}, filled)
        axis.set_xscale("log")
        axis.margins(x=0.08)
        axis.set_xlabel("milliseconds per pass")
        batch, n, m = size
        axis.set_title(f"loss: batch {batch}, {n} classes\n" + (f"m {m}" if m else "all scores"), loc="left")
    axes[0][0].set_yticks(range(len(methods)), [STYLES[method].label for method in methods])
    axes[0][0].set_ylim(len(methods) - 0.5, -0.5)
    for axis in axes.flat[1 + len(sizes) :]:
        axis.set_visible(False)
    handles = [_key("ours", filled=True), _key("difftopk", filled=False)]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    first = losses[0]
    note = f"Medians on {first['device']}, {first['threads']} threads, PyTorch {first['torch']}; a pass is forward and "
    note += "backward. A missing point: out of memory, or a loss that difftopk does not have."
    _note(figure, note, PAGE)
    return save(figure, folder, "times")


def _dots(axis: Axes, methods: Sequence[str], values: Mapping[str, float], filled: bool) -> None:
    for at, method in enumerate(methods):
        if method in values:
            style = STYLES[method]
            face = style.color if filled else "none"
            axis.plot(values[method], at, color=style.color, marker=style.marker, markerfacecolor=face, markersize=5.5)


def _panels(number: int, note: str) -> tuple[Figure, list[tuple[Axes, Axes]]]:
    """Return a figure of pairs of panels, top-1 above top-5: one pair is a column wide, more fill the page."""
    across, down = min(number, PER_ROW), math.ceil(number / PER_ROW)
    width = COLUMN if number == 1 else PAGE
    size = (width, 0.8 + 2 * down * (2.2 if across < 3 else 1.7))
    figure, grid = pyplot.subplots(2 * down, across, figsize=size, squeeze=False)
    pairs = [(grid[2 * row][column], grid[2 * row + 1][column]) for row in range(down) for column in range(across)]
    for which in (0, 1):
        for pair in pairs[1:number]:
            pair[which].sharey(pairs[0][which])
    for top1, top5 in pairs[:number]:
        top1.sharex(top5)
        top1.tick_params(labelbottom=False)
    for axis in (axis for pair in pairs[number:] for axis in pair):
        axis.set_visible(False)
    _note(figure, note, width)
    return figure, pairs[:number]


def _note(figure: Figure, note: str, width: float) -> None:
    """Say above a figure what its runs were."""
    figure.suptitle("\n".join(textwrap.wrap(note, int(width * 18))), fontsize=7, x=0.01, ha="left")


def _legend(figure: Figure, methods: Sequence[str], more: Sequence[Line2D] = (), lines: bool = True) -> None:
    """Put a legend of the methods, in the order of STYLES, below a figure."""
    handles = []
    for method, style in STYLES.items():
        if method in methods:
            line = style.line if lines else ""
            handles.append(Line2D([], [], color=style.color, marker=style.marker, linestyle=line, label=style.label))
    columns = 2 if figure.get_figwidth() <= COLUMN else 4
    figure.legend(handles=[*handles, *more], loc="outside lower center", ncols=columns, handlelength=3)


def _key(label: str, filled: bool) -> Line2D:
    """A legend's entry for what filled or hollow points are."""
    face = GREY if filled else "none"
    return Line2D([], [], color=GREY, marker="o", markerfacecolor=face, linestyle="", label=label)


def _p_k_of_line(line: Line) -> tuple[float, ...]:
    return p_k_of(line.runs[0]["p_k"] if line.runs else line.p_k)


def _p_k_order(p_k: tuple[float, ...]) -> tuple[int, tuple[float, ...]]:
    published = [p_k_of(cell) for cell in P_KS]
    return (published.index(p_k) if p_k in published else len(published), p_k)


def _leave_out(sentence: str) -> list[Any]:
    print(f"left out: {sentence}", file=sys.stderr)
    return []


def _read_csv(path: Path, numbers: Sequence[str]) -> list[Row]:
    """The rows of a file whose columns `numbers` hold numbers; none if it is absent or, which is said, damaged."""
    if not path.is_file():
        return []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file, restval="", strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        return _leave_out(f"{path}, which cannot be read: {error}")
    for number, row in enumerate(rows, start=1):
        for name in numbers:
            if float_of(row.get(name, "")) is None:
                return _leave_out(f"{path}, whose row {number} has {name} {row.get(name)!r}: it must be a number")
    return rows
