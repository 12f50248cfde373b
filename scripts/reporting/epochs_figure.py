"""Rows of the published schedule as far as they have come: what was reached when, and what crossed what.

The learning rate is constant, so that the first 50 epochs of a row are the result of 50. A single epoch swings by a
point or two: what is said here is of the mean over WINDOW epochs, of one seed per row; "by validation" is, as in every
row, the test accuracy where validation was best.
"""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from scripts.reporting.figure_style import PAGE, STYLES, legend, look, points_of, pyplot, save
from scripts.reporting.paired import with_interval
from scripts.reporting.results import Row, as_markdown, check
from scripts.reporting.tables import METRICS, PAPER, read_published, shown_p_k
from scripts.shared.program import CommandLineError

MILESTONES = (25, 50, 100, 200)
WINDOW = 5
BASELINE = "softmax_cross_entropy"


def read(path: Path, rows: Sequence[Row]) -> pd.DataFrame:
    """The rows of a file that scripts/epochs.py wrote, in percent, with what is read of a run that ends there.

    mean_test_top1: of WINDOW epochs; chosen_test_top1: where validation was best so far. Likewise for top-5. Raises
    CommandLineError.
    """
    valid = [metric.replace("test", "valid") for metric in METRICS]
    check(path, rows, ("method", "p_k", "seed", "precision", "device_name", "epoch", *METRICS, *valid))
    table = pd.DataFrame(rows).astype({"epoch": int, **dict.fromkeys([*METRICS, *valid], float)})
    wrong = table.run_id[table.groupby("run_id").epoch.diff() <= 0]
    if len(wrong):
        raise CommandLineError(
            f"{path} has an epoch of {wrong.iloc[0]} twice, or after a later one; gather it again by scripts/epochs.py"
        )
    for metric, of_valid in zip(METRICS, valid):
        table[metric] *= 100
        table[f"mean_{metric}"] = table.groupby("run_id")[metric].transform(lambda each: each.rolling(WINDOW).mean())
        best = table.groupby("run_id")[of_valid].cummax()
        is_new = best > best.groupby(table["run_id"]).shift(fill_value=-1)
        table[f"chosen_{metric}"] = table[metric].where(is_new).groupby(table["run_id"]).ffill()
    return table


def _published(table: pd.DataFrame, name: str) -> pd.DataFrame:
    """The published row of each run, by its method and P_K, in percent; NaN where a table is none of the paper's."""
    rows, _ = read_published(name if (PAPER / f"{name}.csv").exists() else None)
    paper = pd.DataFrame(rows, columns=["method", "p_k", *METRICS]).drop_duplicates(["method", "p_k"])
    paper = paper.set_index(["method", "p_k"]).apply(pd.to_numeric) * 100
    runs = table.groupby("run_id", sort=False)[["method", "p_k"]].first()
    return paper.reindex(pd.MultiIndex.from_frame(runs)).set_axis(runs.index)


def text_of(path: Path, rows: Sequence[Row]) -> str:
    """Markdown: a line per run, then what crosses the baseline of the same seed and the means of such differences."""
    table, name = read(path, rows), path.stem.removesuffix("_epochs")
    means, chosen = ([f"{kind}_{metric}" for metric in METRICS] for kind in ("mean", "chosen"))
    published = _published(table, name)
    lines, told, leads = [], [], {}
    for run_id, run in table.groupby("run_id", sort=False):
        first, by_epoch = run.iloc[0], run.set_index("epoch")[means + chosen]
        row = f"{STYLES[first.method].label}, {shown_p_k(first.p_k)}"
        label = f"{row}, seed {first.seed}"
        reached = f"{by_epoch.index[-1]} epochs, {first.precision}, {first.device_name}"
        at_end = by_epoch[means].iloc[-1], by_epoch[chosen].iloc[-1], published.loc[run_id]
        values = [*by_epoch[means].reindex(MILESTONES).to_numpy(), *at_end]
        shown = ("" if pd.isna(top1) else f"{top1:.1f} \\| {top5:.1f}" for top1, top5 in values)
        lines.append([label, reached, *shown])
        base = table[(table.method == BASELINE) & (table.seed == first.seed)].set_index("epoch")[means + chosen]
        lead = (by_epoch - base).dropna()
        if first.method == BASELINE or lead.empty:
            continue
        leads.setdefault(row, []).append(lead)
        for mean, metric in zip(means, METRICS.values()):
            ahead, last = lead[mean] > 0, lead.index[-1]
            since = ahead.index[ahead != ahead.shift()][-1]
            told.append(
                f"{label}: {metric} {'above' if ahead.iloc[-1] else 'below'} softmax from epoch {since} to {last}, "
                f"at the end by {abs(lead[mean].iloc[-1]):.1f}."
            )
    for row, of_seeds in leads.items():
        for end in sorted({*MILESTONES, min(lead.index[-1] for lead in of_seeds)}):  # the last that all have
            there = [lead.loc[end] for lead in of_seeds if end in lead.index]
            if len(there) > 1:
                mean1, mean5, chosen1, chosen5 = (with_interval(each) for _, each in pd.DataFrame(there).items())
                told.append(
                    f"{row} minus softmax after {end} epochs, {len(there)} seeds: {mean1} \\| {mean5}, by validation "
                    f"{chosen1} \\| {chosen5}."
                )
    columns = ["row", "so far", *(f"after {each}" for each in MILESTONES), "last", "by validation", "published, 200"]
    frame = pd.DataFrame(lines, columns=columns)
    frame = frame.loc[:, (frame != "").any()]
    return "\n".join([as_markdown(frame, 2), "", *(f"- {each}" for each in told), ""])


def draw(path: Path, rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw the accuracies over the epochs, with the published end points, to NAME_epochs."""
    table, name = read(path, rows), path.stem.removesuffix("_epochs")
    published = _published(table, name)
    figure, axes = pyplot.subplots(1, 2, figsize=(PAGE, 2.6))
    for axis, (metric, label) in zip(axes, METRICS.items()):
        for run_id, run in table.groupby("run_id", sort=False):
            method = run.method.iloc[0]
            axis.plot(run.epoch, run[metric], color=STYLES[method].color, linewidth=0.5, alpha=0.5)
            axis.plot(run.epoch, run[f"mean_{metric}"], **look(method), markevery=(5, 10))
            axis.plot([MILESTONES[-1]], [published[metric][run_id]], **look(method, filled=False, line=False))
        axis.set(xlabel="epoch", ylabel=f"test {label} accuracy (%)", xlim=(0, 1.03 * MILESTONES[-1]))
    axes[0].set_ylim(bottom=45)
    axes[1].set_ylim(bottom=75)
    legend(figure, table.method, [points_of(filled=False)])
    return save(figure, folder, f"{name}_epochs")
