"""Figures of results: `lines` over epochs, temperatures or sizes, `dots` with a row per line, and the findings.

The colour is that of a method's family, and the marker is the method's own.
"""

import io
import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl

mpl.use("Agg")

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.common import settings
from experiments.common.files import replace_file
from reporting import beam_search, draws, epochs, findings, markdown, noise, scratch, tables, temperatures
from reporting.compare import half_width, interval
from reporting.frames import CONFIGURATION, LAST_VALID, METRICS, read_runs
from reporting.speed import BENCHMARKS
from studies.few_labels import FEW_LABELS
from topk_losses import METHODS

plt.style.use(Path(__file__).with_name("report.mplstyle"))
NARROW = 5.2  # inches of a figure that can be read on a telephone, too
WIDEST = 35  # points of accuracy that a panel shows
LEAST_GAIN = -1.0  # points of difference at which the axis of the figures of wrong labels is cut
SHOWN = (-3.4, 4.4)  # points of difference in the figure of findings
BETTER_LEFT = "←"
BETTER_RIGHT = "→"
SIDE_BY_SIDE = 1.05  # from one to the next of the points at the same number of labels, on a logarithmic axis
LABEL_WIDTH = 30  # characters of a line's label
COLORS = {
    "losses": "C7",
    "robust": "C6",
    "sorts": "C1",
    "transports": "C2",
    "thresholds": "C4",
    "subsets": "C4",
    "ranks": "C3",
    "networks": "C0",
}
MARKERS = "os^DvX"


def method_styles() -> dict[str, dict[str, str]]:
    """The colour and the marker of each method."""
    styles = {}
    for color, names in groupby(METHODS, lambda name: COLORS[METHODS[name].family]):
        for name, marker in zip(names, MARKERS):
            styles[name] = {"color": color, "marker": marker}
    styles["imbalanced_noised_topk"] = {"color": "C5", "marker": "o"}  # the seventh of six marks
    return styles


STYLE = method_styles()
OTHER_STYLE = {"color": "black", "marker": "."}  # of a user's own method, or of the embeddings as they are
ACCURACIES = {metric: f"test {label} (%)" for metric, label in METRICS.items()}
TITLES = ACCURACIES | {metric: f"{label} (%)" for metric, label in LAST_VALID.items()}
ABBREVIATIONS = {"p_k": "", "inverse_temperature": "β ", "lr": "lr "}


def save(figure: Figure, folder: Path, name: str, title: str = "") -> list[Path]:
    """Write NAME.svg into a folder, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    figure.suptitle(title, fontsize=9, x=0.01, ha="left", wrap=True)
    path = folder / f"{name}.svg"
    content = io.StringIO()
    figure.savefig(content, format="svg", metadata={"Date": None})
    plt.close(figure)
    replace_file(path, content.getvalue().encode())
    return [path]


def lines(frame: pd.DataFrame, x: str, ys: dict[str, str], by: str, **axes: str) -> Figure:
    """Draw the mean of each y against x with its 95 % band, a panel per y. by: the column that tells lines apart."""
    figure, column = plt.subplots(len(ys), 1, figsize=(NARROW, 0.9 + 2.1 * len(ys)), sharex=True)
    for axis, (y, label) in zip(column, ys.items()):
        for _, rows in frame.dropna(subset=[x, y]).groupby(by, sort=False):
            draw_line(axis, rows, x, y)
        axis.set(ylabel=label, **axes)
        axis.minorticks_off()
    column[-1].set_xlabel(x)
    if frame[x].nunique() < 6:
        ticks = sorted(frame[x].unique())
        column[-1].set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    handles = {}
    for axis in column:
        for handle, label in zip(*axis.get_legend_handles_labels()):
            handles[label] = handle
    add_legend(figure, handles)
    return figure


def add_legend(figure: Figure, handles: dict[str, Artist]) -> None:
    """Add a legend below the panels, in as many columns as the figure has room for. handles: by name."""
    for ncols in (3, 2, 1):
        legend = figure.legend(handles.values(), handles, loc="outside lower center", ncols=ncols)
        if legend.get_window_extent().width <= figure.bbox.width:
            return
        if ncols > 1:
            legend.remove()


def legend_of(rows: pd.DataFrame) -> str:
    """What the legend calls a line: its label, or its method."""
    name = "method"
    if "label" in rows:
        name = "label"
    return str(rows[name].iloc[0])


def draw_line(axis: Axes, rows: pd.DataFrame, x: str, y: str) -> None:
    """Draw the mean of y against x with its 95 % band."""
    style = STYLE.get(rows["method"].iloc[0], OTHER_STYLE)
    found = rows.groupby(x, sort=False)[y].agg(["mean", "std", "count"])
    half = halves(found["std"], found["count"])
    axis.plot(found["mean"], label=legend_of(rows), markevery=max(1, len(found) // 8), **style)
    axis.fill_between(found.index, found["mean"] - half, found["mean"] + half, alpha=0.2, color=style["color"])


def halves(stds: pd.Series, counts: pd.Series) -> pd.Series:
    """Half of the interval of each mean."""
    values = [half_width(std, n) for std, n in zip(stds, counts)]
    return pd.Series(values, index=stds.index, dtype=float)


class Panel(NamedTuple):
    """A panel of dots: its title, and the columns of the value, of half its interval, and of what is drawn hollow.

    Attributes:
        least: where the axis is cut; None: far below the best accuracy.
        digits: of a value that is written at the edge.
        hollow_text: what is written there of one that is drawn hollow.
    """

    title: str
    value: str
    half: str
    hollow: str
    least: float | None = None
    digits: int = 0
    hollow_text: str = "{} published"


def wrapped(label: str) -> str:
    """A label of several lines, where it is long; none ends within a P_K."""
    whole = re.sub(r"\[.*?\]", lambda p_k: p_k[0].replace(" ", "\N{NO-BREAK SPACE}"), label)
    return textwrap.fill(whole, LABEL_WIDTH)


def dots(frame: pd.DataFrame, panels: Sequence[Panel]) -> Figure:
    """Draw a row per line of the frame, whose index has the labels and whose column method the looks.

    A value below the edge, such as an accuracy far below the best, is written there, and the axis says that it is cut.
    """
    labels = [wrapped(str(label)) for label in frame.index]
    height = 1 + 0.19 * sum(1 + 0.7 * label.count("\n") for label in labels)
    figure, grid = plt.subplots(1, len(panels), figsize=(NARROW, height), sharey=True, squeeze=False)
    for axis, panel in zip(grid[0], panels):
        values = frame.reindex(columns=[panel.value, panel.hollow]).stack()
        least = -math.inf
        if panel.half:
            least = panel.least or values.max() - WIDEST
        for place, row in enumerate(frame.to_dict("records")):
            draw_dot(axis, place, row, panel, least)
        scale = "log"
        if panel.half or values.max() < 5 * values.min():
            scale = "linear"
        axis.set(title=panel.title, xscale=scale)
        left = None
        if panel.half and values.min() < least:
            left = least
        axis.set_xlim(left=left)
        axis.minorticks_off()
    grid[0, 0].set(ylim=(len(frame) - 0.5, -0.5))
    grid[0, 0].set_yticks(range(len(frame)), labels, fontsize=8.5)
    return figure


def draw_dot(axis: Axes, place: int, row: dict, panel: Panel, least: float) -> None:
    """Draw a value with its interval, and hollow what stands beside it; below `least`, write it at the edge."""
    style = STYLE.get(row["method"], OTHER_STYLE) | {"linestyle": ""}
    outside = []
    if row.get(panel.value, math.nan) < least:
        outside.append(markdown.fixed(row[panel.value], panel.digits).replace("-", markdown.MINUS))
    elif panel.value in row:
        half = row.get(panel.half)
        axis.errorbar(row[panel.value], place, xerr=half, capsize=2, markerfacecolor=style["color"], **style)
    if row.get(panel.hollow, math.nan) < least:
        hollow = markdown.fixed(row[panel.hollow], panel.digits).replace("-", markdown.MINUS)
        outside.append(panel.hollow_text.format(hollow))
    elif panel.hollow in row:
        axis.errorbar(row[panel.hollow], place, xerr=None, capsize=2, markerfacecolor="none", **style)
    text = ""
    if outside:
        text = f"◂ {', '.join(outside)}"
    axis.annotate(text, fontsize=7, xy=(0.02, place), xycoords=("axes fraction", "data"), va="bottom")


def line_labels(table: tables.Table, methods: pd.Series) -> pd.Series:
    """A label for each line: its method and what tells it apart."""
    labels = methods.copy()
    cells = tables.cells(table)
    for name in table.settings:
        if name not in CONFIGURATION or name == "method":
            continue
        heading = markdown.heading(name)
        if heading not in cells:
            continue
        column = cells[heading]
        # A setting that was tried tells apart lines that are named alike so far; one of the experiment is always named.
        is_tried = settings.BY_NAME[name].role in (settings.LOSS, settings.ARM, settings.TRAINING)
        if is_tried:
            differs = column.groupby(labels).transform("nunique") > 1
        else:
            differs = pd.Series(column.nunique() > 1, index=column.index)
        words = " " + ABBREVIATIONS.get(name, f"{heading} ") + column
        labels += words.where(differs & (column != ""), "")
    return labels


def draw_accuracy(table: tables.Table, folder: Path) -> list[Path]:
    """Draw the accuracy of every line with its interval, and hollow what is published."""
    run = replace(table, lines=[line for line in table.lines if line.configuration is not None])
    methods = pd.Series([line.configuration.first["method"] for line in run.lines])
    frame = tables.frame(run).assign(method=methods)
    panels = []
    for metric in table.metrics:
        stds = frame.get(f"{metric}_std", pd.Series(math.nan, index=frame.index))
        frame[f"{metric}_half"] = halves(stds, frame["n_seeds"])
        panels.append(Panel(TITLES[metric], f"{metric}_mean", f"{metric}_half", f"published_{metric}"))
    figure = dots(frame.set_axis(line_labels(run, methods)), panels)
    for axis in figure.axes:
        axis.set_xlabel(f"better {BETTER_RIGHT}")
    return save(figure, folder, f"{table.name}_accuracy", accuracy_title(table))


def accuracy_title(table: tables.Table) -> str:
    """What the figure of a table shows: intervals where there are several seeds, published values where there are."""
    seeds = max(len(line.configuration.runs) for line in table.lines if line.configuration is not None)
    title = f"{table.name}.csv, one seed."
    if seeds > 1:
        title = f"{table.name}.csv, mean of up to {seeds} seeds with its 95 % interval."
    if table.has_published:
        title += " Hollow: published."
    return title


def draw_epochs(path: Path, runs: pd.DataFrame, folder: Path) -> list[Path]:
    """Draw the mean of five epochs over the epochs, a line per run, with the published end points."""
    table = epochs.with_means(path, runs)
    ys = {f"mean_{metric}": label for metric, label in ACCURACIES.items()}
    figure = lines(table, "epoch", ys, by="run_id")
    ends = epochs.published_ends(path, table)
    for axis, metric in zip(figure.axes, METRICS):
        for run_id, method in table.groupby("run_id")["method"].first().items():
            axis.plot(200, ends[metric][run_id], markerfacecolor="none", **STYLE.get(method, OTHER_STYLE))
        axis.set_ylim(bottom={"test_top1": 45, "test_top5": 75}[metric])
    return save(figure, folder, path.stem, "A line per run, mean of 5 epochs; hollow: published, 200 epochs.")


def draw_temperatures(name: str, runs: pd.DataFrame, folder: Path) -> list[Path]:
    """Draw NAME_P_K for each P_K: accuracy over the inverse temperature.

    Of linear classifiers over its product with the standard deviation of the logits.
    """
    parts = []
    for number, line in enumerate(temperatures.temperature_lines(runs)):
        parts.append(line.assign(line=number))
    frame = pd.concat(parts)
    is_linear = temperatures.LOGIT_STD in frame
    x = "inverse temperature"
    widest = 35
    values = frame["number"]
    if is_linear:
        x = "inverse temperature × standard deviation of the logits"
        widest = 5
        values = values * frame[temperatures.LOGIT_STD]
    frame[x] = values
    softmax = frame[frame["method"] == settings.CROSS_ENTROPY]
    drawn = []
    for p_k, part in frame.dropna(subset="number").groupby("p_k", sort=False):
        part = part.groupby(["method", "line", "number"], sort=False)[[x, *METRICS]].mean().reset_index()
        part = part.groupby("line").filter(lambda rows: len(rows) > 1)
        if part.empty:
            continue
        figure = lines(part, x, ACCURACIES, by="line", xscale="log")
        title = f"{name}.csv, P_K = {markdown.p_k(p_k)}: mean over the seeds"
        title += "." if softmax.empty else "; grey line: softmax cross-entropy."
        for axis, metric in zip(figure.axes, METRICS):
            if not softmax.empty:
                axis.axhline(softmax[metric].mean(), color="C7", linewidth=0.8)
            axis.set_ylim(part[metric].max() - widest, part[metric].max() + 1)
        drawn += save(figure, folder, f"{name}_{p_k.replace(' ', '_').replace('0.', '.')}", title)
    return drawn


def draw_speed(folder: Path) -> list[Path]:
    """Draw the time of each loss at the paper's two sizes, and hollow difftopk's."""
    losses = pd.read_csv(BENCHMARKS / "losses_all.csv")
    first = losses.iloc[0]
    frame = pd.DataFrame(index=[method for method in METHODS if method in set(losses["method"])])
    panels = []
    for (batch, n, m), part in losses.fillna({"m": 0}).groupby(["batch", "n", "m"]):
        title = f"{batch} × {n:,}"
        if m:
            title += f", m = {m:g}"
        frame[[title, f"{title} difftopk"]] = part.set_index("method")[["ms", "official_ms"]]
        panels.append(Panel(title, title, "", f"{title} difftopk"))
    figure = dots(frame.assign(method=frame.index), panels)
    for axis in figure.axes:
        axis.set_xlabel(f"ms, {BETTER_LEFT} better")
        axis.xaxis.set_major_formatter("{x:g}")
    title = (
        f"Forward and backward pass, median on {first['threads']} threads of an {first['device']}.\n"
        "Filled: this library. Hollow: difftopk, through torch-sparse where it can."
    )
    return save(figure, folder, "speed", title)


def draw_noise(results: Path, folder: Path) -> list[Path]:
    """Draw, for each kind of labels, each loss minus cross-entropy; hollow: as clean validation chooses."""
    panels = []
    for metric, name in METRICS.items():
        title = f"Δ {name} (points)"
        panels.append(Panel(title, metric, f"{metric}_half", f"clean_{metric}", LEAST_GAIN, 1, "({})"))
    drawn = []
    for labels, study in noise.results_of(results).items():
        rows = {}
        for loss in study.losses:
            if loss != noise.BASELINE:
                rows[study.titles[loss]] = noise_row(study, loss)
        figure = dots(pd.DataFrame.from_dict(rows, orient="index"), panels)
        for axis in figure.axes:
            axis.axvline(0, color="black", linewidth=0.8)
            cut = ""
            if axis.get_xlim()[0] == LEAST_GAIN:
                cut = f"◂ cut at {markdown.signed(LEAST_GAIN, 0)}      "
            axis.set_xlabel(f"{cut}better {BETTER_RIGHT}")
        drawn += save(figure, folder, f"noise_{labels}")
    return drawn


def draw_beam_search(path: Path, folder: Path) -> list[Path]:
    """Draw the error rates of each arm of beam search minus its control's, with their intervals over seeds."""
    panels = []
    for rate in ("test_wer_beam4", "test_per_beam4"):
        panels.append(Panel(f"Δ {beam_search.ERROR_RATES[rate]} (points)", rate, f"{rate}_half", ""))
    lines, rates = beam_search.lines_in_percent(read_runs(path))
    arms, _ = beam_search.arms_of(lines)
    rows = {}
    for arm, differences in zip(arms, beam_search.minus_control(lines, rates)):
        if differences.empty:
            continue
        row = {"method": arm.runs["method"].iloc[0]}
        for panel in panels:
            gain = interval(differences[panel.value])
            row |= {panel.value: gain.mean, panel.half: gain.half}
        rows[arm.title] = row
    figure = dots(pd.DataFrame.from_dict(rows, orient="index"), panels)
    for axis in figure.axes:
        axis.axvline(0, color="black", linewidth=0.8)
        axis.set_xlim(left=-0.05 * axis.get_xlim()[1])
        axis.set_xlabel(f"{BETTER_LEFT} better")
    return save(figure, folder, path.stem, f"{path.name}, minus further training with cross-entropy, 95 % interval.")


def draw_few_labels(results: Path, from_scratch: Path, folder: Path) -> list[Path]:
    """Draw each loss minus cross-entropy against the labels a class, at the end of training; none without draws.

    Args:
        results: the folder of the study few_labels, whose intervals are over draws.
        from_scratch: the file of the study few_labels_scratch, whose intervals are over seeds.
        folder: for the figure.
    """
    x = "labels a class"
    rows = []
    for name, found in draws.finished(results).items():
        for loss in found.losses:
            if loss == noise.BASELINE or noise.BASELINE not in found.titles:
                continue
            differences = found.minus(noise.Pair(loss, noise.BASELINE))
            means = {metric: differences[metric].mean() for metric in METRICS}
            method = found.finals[loss, found.choice]["method"].iloc[0]
            size = FEW_LABELS.sizes[name][0]
            rows.append({x: size, "method": method, "label": found.titles[loss], "loss": loss} | means)
    if not rows:
        return []
    ys = {metric: f"Δ {label} (points)" for metric, label in METRICS.items()}
    figure = lines(pd.DataFrame(rows).sort_values(x, kind="stable"), x, ys, by="loss", xscale="log")
    draw_scratch(figure.axes, from_scratch)
    for axis in figure.axes:
        axis.axhline(0, color="black", linewidth=0.8)
    return save(figure, folder, "few_labels")


def draw_scratch(axes: Sequence[Axes], file: Path) -> None:
    """Draw a ResNet-18's differences side by side at its labels a class: at a constant rate, and hollow with a cosine.

    Losses with seeds to come are left out.

    axes: one for each of METRICS, with a logarithmic axis of the labels a class.
    """
    found = [line for line in scratch.lines(file) if line.is_complete]
    if not found:
        return
    for place, line in enumerate(found):
        run = line.runs.iloc[0]
        per_class = run["train_images"] / run["num_classes"]
        x = per_class * SIDE_BY_SIDE ** (place - (len(found) - 1) / 2)
        style = STYLE[line.method]
        face = style["color"]
        if line.schedule == "cosine":
            face = "white"
        for axis, reading in zip(axes, scratch.LAST):
            gain = line.gain(reading)
            axis.errorbar(x, gain.mean, gain.half, **style, markerfacecolor=face, linestyle="none")
    ticks = sorted({*axes[-1].get_xticks(), round(per_class)})
    axes[-1].set_xticks(ticks, [f"{tick:g}" for tick in ticks])


def noise_row(study: noise.Results, loss: str) -> dict[str, float | str]:
    """The differences of a loss to cross-entropy, as noisy and as clean validation choose."""
    pair = noise.Pair(loss, noise.BASELINE)
    noisy = study.minus(pair, "noisy")
    clean = study.minus(pair, "clean")
    row: dict[str, float | str] = {"method": study.finals[loss, "noisy"]["method"].iloc[0]}
    for metric in METRICS:
        row[metric] = noisy[metric].mean()
        row[f"{metric}_half"] = half_width(noisy[metric].std(), len(noisy))
        row[f"clean_{metric}"] = clean[metric].mean()
    return row


class Label(NamedTuple):
    """A text of the figure of findings, and the place below it where its marks stand; NaN for a heading."""

    text: str
    top: float
    mark: float


def finding_labels() -> list[Label]:
    """A heading for the comparisons on the same data, then a label for each, from above to below."""
    labels = []
    top = 0.0
    for data, group in groupby(findings.MAIN, lambda comparison: comparison.data):
        comparisons = list(group)
        numbers = [findings.difference(comparison).seeds for comparison in comparisons]
        heading = data
        if len(set(numbers)) == 1:
            heading += f", {numbers[0]} seeds"
        labels.append(Label(heading, top + 0.3, math.nan))
        top += 1.0
        for comparison, number in zip(comparisons, numbers):
            text = comparison.title.replace("`", "")
            if len(set(numbers)) > 1 and number == 1:
                text += " (one pair)"
            elif len(set(numbers)) > 1:
                text += f" ({number} seeds)"
            wrapped = textwrap.fill(text, 66)
            mark = top + 0.55 * wrapped.count("\n") + 0.95
            labels.append(Label(wrapped, top, mark))
            top = mark + 0.55
    return labels


def draw_findings(folder: Path) -> list[Path]:
    """Draw the differences to cross-entropy of the main comparisons, each below its label."""
    labels = finding_labels()
    last = labels[-1].mark
    figure, axes = plt.subplots(1, 2, figsize=(NARROW, 0.9 + 0.26 * last), sharey=True)
    marks = [label.mark for label in labels if not math.isnan(label.mark)]
    for place, comparison in zip(marks, findings.MAIN):
        draw_finding(axes, place, findings.difference(comparison))
    for axis, metric in zip(axes, METRICS.values()):
        axis.axvline(0, color="black", linewidth=0.8)
        axis.set(title=f"Δ {metric}", ylim=(last + 0.6, -0.3), xlim=SHOWN, xticks=range(-3, 5))
        axis.set_xlabel(f"points, better {BETTER_RIGHT}")
        axis.grid(False, axis="y")
        axis.tick_params(left=False, labelleft=False)
        axis.spines["left"].set_visible(False)
    background = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    for label in labels:
        weight = "normal"
        if math.isnan(label.mark):
            weight = "bold"
        text = axes[1].text(0, label.top, label.text, weight=weight, fontsize=8.5, va="top", bbox=background)
        text.set(transform=axes[0].get_yaxis_transform(), in_layout=False)  # above both panels
    shape = {"color": "C7", "linestyle": "", "markerfacecolor": "white"}
    handles = [
        plt.Line2D([], [], marker="o", color="C0", linestyle="", label="gain"),
        plt.Line2D([], [], marker="o", color="C3", linestyle="", label="loss"),
        plt.Line2D([], [], marker="o", label="no clear difference", **shape),
        plt.Line2D([], [], marker="D", label="one pair", **shape),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, handletextpad=0, columnspacing=1)
    return save(figure, folder, "findings")


def draw_finding(axes: Sequence[Axes], place: int, found: findings.Difference) -> None:
    """Draw the differences in top-1 and top-5 of a comparison; one pair of runs has no interval."""
    for axis, metric in zip(axes, METRICS):
        gain = found.gains[metric]
        color = {"gain": "C0", "loss": "C3", "no clear difference": "C7"}[gain.verdict]
        face = "white"
        if gain.is_clear:
            face = color
        marker = "o"
        half: float | None = gain.half
        if found.seeds == 1:
            marker = "D"
            half = None
        axis.errorbar(gain.mean, place, xerr=half, color=color, capsize=2, marker=marker, markerfacecolor=face)
        if gain.mean < SHOWN[0]:
            end = max(gain.mean + gain.half, SHOWN[0])
            axis.text(end + 0.2, place, f"◂ {markdown.interval(gain)}", va="center", color=color, fontsize=8.5)
