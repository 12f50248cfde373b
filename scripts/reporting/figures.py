"""Two figures for all tables, `lines` (over epochs, temperatures, sizes) and `dots` (a row per line), and their uses.

The colour is that of a method's family, the marker its own.
"""

import io
import textwrap
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from experiments.common.files import replace_file
from scripts.reporting import findings, noise, studies, tables
from scripts.reporting import runs as core
from scripts.reporting.runs import METRICS, half_width
from topk_losses import METHODS

plt.style.use(Path(__file__).with_name("report.mplstyle"))
BENCHMARKS = tables.PAPER.parent / "benchmarks"
PAGE, WIDEST = 7.6, 35  # inches; points of accuracy that a panel shows
COLORS = {"losses": "C7", "robust": "C6", "sorts": "C1", "transports": "C2", "thresholds": "C4", "subsets": "C4"}
COLORS |= {"ranks": "C3", "networks": "C0"}
STYLE = {
    name: {"color": color, "marker": mark}
    for color, names in groupby(METHODS, lambda name: COLORS[METHODS[name].family])
    for name, mark in zip(names, "os^DvX")
}
STYLE["imbalanced_noised_topk"] = {"color": "C5", "marker": "o"}  # the seventh of six marks
STEPS_PER_EPOCH = 371  # of CIFAR-100: 47,500 training images in batches of 128, the last partial one dropped
ACCURACIES = {metric: f"test {label} (%)" for metric, label in METRICS.items()}
ABBREVIATIONS = {"p_k": "", "inverse_temperature": "β ", "lr": "lr "}
SIZES = {"n": "classes n", "k": "largest rank k", "batch": "batch size"}


def save(figure: Figure, folder: Path, name: str, title: str = "") -> list[Path]:
    """Write NAME.svg into a folder, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    figure.suptitle(title, fontsize=9, x=0.01, ha="left", wrap=True)
    path, content = folder / f"{name}.svg", io.StringIO()
    figure.savefig(content, format="svg", metadata={"Date": None})
    plt.close(figure)
    replace_file(path, content.getvalue())
    return [path]


def lines(
    frame: pd.DataFrame, x: str, ys: dict[str, str], panel: str = "", by: str = "method", dotted: str = "", **axes: str
) -> Figure:
    """Draw the mean of each y against x with its 95 % band, a row of panels per y, a column per value of `panel`.

    by: the column that tells lines apart. dotted: the end of the name of a column beside y that is drawn dotted.
    """
    parts = list(frame.groupby(panel, sort=False)) if panel else [("", frame)]
    size = (PAGE if len(parts) > 1 else 0.7 * PAGE, 0.9 + 2.1 * len(ys))
    figure, grid = plt.subplots(len(ys), len(parts), figsize=size, sharex="col", sharey="row", squeeze=False)
    for (title, part), column in zip(parts, grid.T):
        for axis, (y, label) in zip(column, ys.items()):
            for _, rows in part.dropna(subset=[x, y]).groupby(by, sort=False):
                method, found = rows["method"].iloc[0], rows.groupby(x, sort=False)[y].agg(["mean", "std", "count"])
                half, color = half_width(found["std"], found["count"]), STYLE[method]["color"]
                axis.plot(found["mean"], label=method, markevery=max(1, len(found) // 8), **STYLE[method])
                axis.fill_between(found.index, found["mean"] - half, found["mean"] + half, alpha=0.2, color=color)
                if dotted:
                    axis.plot(rows[x], rows[y + dotted], linestyle=":", linewidth=0.8, color=color)
            axis.set(ylabel=label if axis in grid[:, 0] else "", **axes)
            axis.minorticks_off()
        column[0].set_title(title)
        column[-1].set_xlabel(x)
        if part[x].nunique() < 6:
            column[-1].set_xticks(ticks := sorted(part[x].unique()), [f"{tick:g}" for tick in ticks])
    handles = {label: handle for axis in grid.flat for handle, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=4 if panel else 3)
    return figure


def dots(frame: pd.DataFrame, panels: Sequence[tuple[str, str, str, str]]) -> Figure:
    """Draw a row per line of the frame, whose index has the labels and whose column method the looks.

    panels: a title each, and the columns of the value, of half its interval, and of what is drawn hollow beside it. An
    accuracy far below the best is written at the edge.
    """
    figure, grid = plt.subplots(1, len(panels), figsize=(PAGE, 0.8 + 0.19 * len(frame)), sharey=True, squeeze=False)
    for axis, (title, value, half, hollow) in zip(grid[0], panels):
        values = frame.reindex(columns=[value, hollow]).stack()
        least = values.max() - WIDEST if half else -float("inf")
        for place, row in enumerate(frame.to_dict("records")):
            style = STYLE.get(row["method"], {"color": "black", "marker": "."}) | {"linestyle": ""}
            outside = []
            for name, face, interval in ((value, style["color"], half), (hollow, "none", "")):
                if row.get(name, float("nan")) < least:
                    outside.append(f"{row[name]:.0f} published" if face == "none" else f"{row[name]:.0f}")
                elif name in row:
                    axis.errorbar(row[name], place, xerr=row.get(interval), capsize=2, markerfacecolor=face, **style)
            where = {"xy": (0.02, place), "xycoords": ("axes fraction", "data"), "va": "bottom"}
            axis.annotate(f"◂ {', '.join(outside)}" if outside else "", fontsize=7, **where)
        axis.set(title=title, xscale="linear" if half or values.max() < 5 * values.min() else "log")
        axis.set_xlim(left=least if half and values.min() < least else None)
        axis.minorticks_off()
    grid[0, 0].set(ylim=(len(frame) - 0.5, -0.5))
    grid[0, 0].set_yticks(range(len(frame)), frame.index)
    return figure


def draw_accuracy(table: tables.Table, folder: Path) -> list[Path]:
    """Draw the accuracy of every line with its interval, and hollow what is published."""
    frame, panels = table.frame.copy(), []
    metrics = [metric for metric in METRICS if f"{metric}_mean" in frame]
    for metric in metrics:
        frame[f"{metric}_half"] = half_width(frame.get(f"{metric}_std", float("nan")), frame["n_seeds"].astype(float))
        panels.append((ACCURACIES[metric], f"{metric}_mean", f"{metric}_half", f"published_{metric}"))
    frame = frame.dropna(subset=[f"{metrics[0]}_mean"])
    named = frame["method"].str.extract(r"\((\w+)\)")[0].fillna(frame["method"])
    cells, labels = tables.shown(table._replace(frame=frame)), named.copy()
    for name in [name for name in frame if name in core.IDENTITY and name != "method"]:
        heading = tables.HEADINGS.get(name, name)
        # A setting that was tried tells apart lines that are named alike so far; one of the experiment is always named.
        is_tried, column = name in core.TRIED, cells[heading]
        values = column.groupby(labels).transform("nunique") if is_tried else column.nunique()
        words = " " + ABBREVIATIONS.get(name, f"{heading} ") + column
        labels += words.where((values > 1) & (column != ""), "")
    frame.index = labels
    title = f"{table.name}.csv: bars are 95 % intervals of the mean over seeds; hollow: published."
    return save(dots(frame.assign(method=named.to_numpy()), panels), folder, f"{table.name}_accuracy", title)


def draw_epochs(path: Path, runs: pd.DataFrame, folder: Path) -> list[Path]:
    """Draw the mean of five epochs over the epochs, a line per run, with the published end points."""
    table = studies.epochs(path, runs)
    ys = {f"mean_{metric}": label for metric, label in ACCURACIES.items()}
    figure, ends = lines(table, "epoch", ys, by="run_id"), studies.published_ends(path, table)
    for axis, metric in zip(figure.axes, METRICS):
        for run_id, method in table.groupby("run_id")["method"].first().items():
            axis.plot(200, ends[metric][run_id], markerfacecolor="none", **STYLE[method])
        axis.set_ylim(bottom={"test_top1": 45, "test_top5": 75}[metric])
    return save(figure, folder, path.stem, f"{path.name}: mean of 5 epochs, a line per run; hollow: published, 200.")


def draw_temperatures(name: str, runs: pd.DataFrame, folder: Path) -> list[Path]:
    """Draw NAME_P_K for each P_K: accuracy over the inverse temperature, of heads times the spread of the logits."""
    numbered = enumerate(studies.temperature_lines(runs))
    frame, drawn = pd.concat(line.assign(line=number) for number, line in numbered), []
    is_linear = studies.SPREAD in frame
    x = "inverse temperature" + (" × standard deviation of the logits" if is_linear else "")
    frame[x] = frame["number"] * (frame[studies.SPREAD] if is_linear else 1)
    softmax = frame[frame["method"] == studies.SOFTMAX]
    for p_k, part in frame.dropna(subset="number").groupby("p_k", sort=False):
        part = part.groupby(["method", "line", "number"], sort=False)[[x, *METRICS]].mean().reset_index()
        part = part.groupby("line").filter(lambda rows: len(rows) > 1)
        if part.empty:
            continue
        figure = lines(part, x, ACCURACIES, by="line", xscale="log")
        for axis, metric in zip(figure.axes, METRICS):
            if not softmax.empty:
                axis.axhline(softmax[metric].mean(), color="C7", linewidth=0.8)
            axis.set_ylim(part[metric].max() - (5 if is_linear else 35), part[metric].max() + 1)
        title = f"{name}.csv, P_K = {core.shown_p_k(p_k)}: mean over the seeds"
        title += "." if softmax.empty else "; grey line: softmax cross-entropy."
        drawn += save(figure, folder, f"{name}_{p_k.replace(' ', '_').replace('0.', '.')}", title)
    return drawn


def draw_benchmarks(folder: Path) -> list[Path]:
    """Draw times (ours beside difftopk's) and cost_over_size (with its asymptotes, dotted) of results/benchmarks/."""
    names = ("training_step", "losses", "scaling")
    steps, losses, scaling = (pd.read_csv(BENCHMARKS / f"{name}.csv") for name in names)
    frame = pd.DataFrame(index=[method for method in METHODS if method in set(losses["method"])])
    frame["step"] = steps.set_index("method")["ms_per_step"] * STEPS_PER_EPOCH / 1000
    panels = [("ResNet-18\n(s/epoch)", "step", "", "")]
    for (m, n, batch), part in losses.fillna({"m": 0}).groupby(["m", "n", "batch"]):
        title = f"batch {batch}\nn {n}" + (f"\nm {m:g}" if m else "")
        frame[[title, f"{title} difftopk"]] = part.set_index("method")[["ms", "official_ms"]]
        panels.append((title, title, "", f"{title} difftopk"))
    first = losses.iloc[0]
    machine = f"{first['device']}, {first['threads']} threads, PyTorch {first['torch']}"
    title = f"A training epoch, then ms of each loss; medians on {machine}; hollow: difftopk."
    drawn = save(dots(frame.assign(method=frame.index), panels), folder, "times", title)
    base, parts = scaling[[*SIZES]].mode().iloc[0], []
    for axis, label in SIZES.items():
        others = [other for other in SIZES if other != axis]
        part = scaling[(scaling[others] == base[others]).all(axis=1)].sort_values(["method", axis])
        parts.append(part.assign(size=part[axis], panel=label))
    frame = pd.concat(parts).dropna(subset="ms")
    frame["peak_mib"] = frame["peak_mib"].where(frame["peak_mib"] >= 0.5)  # the system counts in pages
    for y, work in (("ms", "operations"), ("peak_mib", "numbers")):  # through the last measured point
        expected = frame["batch"] * frame[work]
        last = frame.assign(ratio=frame[y] / expected).groupby(["method", "panel"])["ratio"].transform("last")
        frame[f"{y} expected"] = expected * last
    ys = {"ms": "time of a pass (ms)", "peak_mib": "peak memory (MiB)"}
    figure = lines(frame, "size", ys, "panel", dotted=" expected", xscale="log", yscale="log")
    return [*drawn, *save(figure, folder, "cost_over_size", f"A pass without m on {machine}; dotted: asymptote.")]


def draw_noise(results: Path, folder: Path) -> list[Path]:
    """Draw, for each kind of labels, each loss minus cross-entropy; hollow: as clean validation chooses."""
    drawn = []
    for labels, study in noise.studies(results).items():
        rows = {}
        for loss in study.losses:
            if loss == noise.BASELINE:
                continue
            gains, clean = (study.minus(loss, noise.BASELINE, choice)[list(METRICS)] for choice in noise.CHOICES)
            row = {"method": study.finals[loss, "noisy"]["method"].iloc[0]} | gains.mean().to_dict()
            row |= {f"{metric}_half": half_width(gains[metric].std(), len(gains)) for metric in METRICS}
            rows[noise.LOSSES[loss].title] = row | clean.mean().add_prefix("clean_").to_dict()
        panels = [
            (f"Δ {name} (points)", metric, f"{metric}_half", f"clean_{metric}") for metric, name in METRICS.items()
        ]
        figure = dots(pd.DataFrame.from_dict(rows, orient="index"), panels)
        for axis in figure.axes:
            axis.axvline(0, color="black", linewidth=0.8)
        drawn += save(figure, folder, f"noise_{labels}")
    return drawn


def draw_findings(folder: Path) -> list[Path]:
    """Draw the differences to cross-entropy of the main comparisons, with their intervals."""
    comparisons = [comparison for comparison in findings.COMPARISONS if comparison.is_main]
    headings = list(dict.fromkeys(comparison.data for comparison in comparisons))
    # A heading has a line of its own above the comparisons on its data.
    places = [place + 1 + headings.index(comparison.data) for place, comparison in enumerate(comparisons)]
    last = places[-1]
    figure, axes = plt.subplots(1, 2, figsize=(0.85 * PAGE, 0.9 + 0.36 * last), sharey=True)
    labels = []
    for place, comparison in zip(places, comparisons):
        found = findings.difference(comparison)
        for axis, gain in zip(axes, found.gains):
            color = {"gain": "C0", "loss": "C3", "no clear difference": "C7"}[gain.verdict]
            look = {"marker": "o" if found.seeds > 1 else "D", "markerfacecolor": color if gain.is_clear else "white"}
            half = gain.half if found.seeds > 1 else None
            axis.errorbar(gain.mean, place, xerr=half, color=color, capsize=2, **look)
        seeds = f"{found.seeds}\N{NO-BREAK SPACE}seed{'s' if found.seeds > 1 else ''}"
        labels.append(textwrap.fill(f"{findings.title(comparison)} ({seeds})".replace("`", ""), 37))
    for axis, metric in zip(axes, METRICS.values()):
        axis.axvline(0, color="black", linewidth=0.8)
        axis.set(title=f"Δ {metric} (points)", ylim=(last + 0.5, -0.5))
    axes[0].set_yticks(places, labels)
    for place in sorted({*range(last)} - {*places}):
        where = {"transform": axes[0].get_yaxis_transform(), "ha": "right", "va": "center"}
        axes[0].text(-0.03, place, headings.pop(0), weight="bold", **where)
    return save(figure, folder, "findings")
