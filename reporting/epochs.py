"""Tables of epochs: what each run reached after some epochs, and the differences to cross-entropy by seed."""

from pathlib import Path

import pandas as pd

from experiments.common.paths import PAPER
from experiments.common.settings import CROSS_ENTROPY
from reporting import markdown
from reporting.compare import interval
from reporting.frames import (
    METRICS,
    VALID,
    differing,
    experiment,
    identity_of,
    lines_of,
    numbers,
    read_published,
    read_text,
)

HEADINGS = {
    "mean_test_top1": "top-1",
    "mean_test_top5": "top-5",
    "chosen_test_top1": "best validation: top-1",
    "chosen_test_top5": "best validation: top-5",
}
MILESTONES = (25, 50, 100, 200)
WINDOW = 5  # epochs of a mean


def with_means(path: Path, runs: pd.DataFrame) -> pd.DataFrame:
    """The rows of a file of scripts/epochs.py with what is read of a run that ends there.

    mean_test_top1: of WINDOW epochs; chosen_test_top1: where validation was best so far. The same for top-5.

    Raises:
        ValueError: the epochs of a run are not 1, 2, 3, ..., of which a mean would be of others than the last ones.
    """
    table = runs.astype({"epoch": int})
    by_run = table.groupby("run_id")
    is_other = table["epoch"] != by_run.cumcount() + 1
    if is_other.any():
        first = table[is_other].iloc[0]
        raise ValueError(
            f"{path}: the epochs of {first['run_id']} are not 1, 2, 3, ...: {first['epoch']} stands in another place; "
            "gather them again by scripts/epochs.py"
        )
    for metric, valid in zip(METRICS, VALID):
        table[f"mean_{metric}"] = by_run[metric].transform(mean_of_window)
        best = by_run[valid].cummax()
        is_new = best > best.groupby(table["run_id"]).shift(fill_value=-1)
        table[f"chosen_{metric}"] = table[metric].where(is_new).groupby(table["run_id"]).ffill()
    return table


def mean_of_window(values: pd.Series) -> pd.Series:
    return values.rolling(WINDOW).mean()


def published_ends(path: Path, table: pd.DataFrame) -> pd.DataFrame:
    """The published row of each run, in percent; NaN where a table is none of the paper's."""
    name = path.stem.removesuffix("_epochs")
    paper = pd.DataFrame(columns=["method", "p_k", *METRICS])
    if name in set(read_text(PAPER / "protocols.csv")["table"]):
        paper = read_published(name)
    paper = paper.drop_duplicates(["method", "p_k"]).set_index(["method", "p_k"])
    values = 100 * paper[list(METRICS)].apply(numbers)
    first = table.groupby("run_id", sort=False)[["method", "p_k"]].first()
    return values.reindex(pd.MultiIndex.from_frame(first)).set_axis(first.index)


def own_settings(lines: list[pd.DataFrame]) -> list[dict[str, str]]:
    """For each configuration its method and the settings in which configurations of one method differ."""
    firsts = pd.DataFrame([line.iloc[0] for line in lines]).reset_index(drop=True)
    identity = identity_of(firsts, ["method"])
    names = [name for name in identity if (identity[name].groupby(firsts["method"]).nunique() > 1).any()]
    found = []
    for _, first in firsts.iterrows():
        row = {}
        for name in ["method", *names]:
            row[markdown.heading(name)] = markdown.setting(name, first[name])
        found.append(row)
    return found


def as_markdown(path: Path, runs: pd.DataFrame) -> str:
    """Markdown: what runs reached at the milestones, and their differences to cross-entropy."""
    table = with_means(path, runs)
    lines = lines_of(table)
    baselines = []
    experiments = set()
    for line in lines:
        if line["method"].iloc[0] == CROSS_ENTROPY:
            baselines.append(line)
            experiments.add(experiment(line))
    published = published_ends(path, table)
    reached = []
    gains = []
    for line, setting in zip(lines, own_settings(lines)):
        reached += reached_by(line, setting, published)
        for base in baselines:
            if base is not line and experiment(base) == experiment(line):
                gains += gains_by(line, base, setting)
    pairs = []
    for row in table[["method", "p_k"]].drop_duplicates().itertuples():
        pairs.append(f"{row.method} {markdown.p_k(row.p_k)}")
    differences = ""
    if len(experiments) < len(baselines):
        differences = f"{about_several(baselines)}\n\n"
    elif gains:  # a file of cross-entropy alone has none
        caption = "Difference to cross-entropy in points, paired by seed, ± 95 % interval."
        differences = f"{caption}\n\n{markdown.table(gains)}\n\n"
    machines = ", ".join(sorted(set(table["device_name"])))
    precision = ", ".join(sorted(set(table["precision"])))
    return (
        f"Test accuracy in percent, mean of the last {WINDOW} epochs, and at the best validation epoch so far.\n\n"
        f"{markdown.table(reached)}\n\n{differences}"
        f"Runs: {path.name}, {machines}, precision {precision}. P_K: {'; '.join(pairs)}.\n"
    )


def about_several(baselines: list[pd.DataFrame]) -> str:
    """Say in what the runs of cross-entropy differ, and how one setting is kept."""
    runs = pd.concat(baselines)
    names = differing(runs)
    keep = []
    for name, value in identity_of(runs)[names].iloc[-1].items():
        keep.append(f"--where {CROSS_ENTROPY}:{name}={value}")
    return (
        f"No differences: cross-entropy has several settings, which differ in {', '.join(names)}. "
        f"Keep one: {' '.join(keep)}"
    )


def reached_by(line: pd.DataFrame, setting: dict[str, str], published: pd.DataFrame) -> list[dict[str, str]]:
    """What the runs of a configuration reached at the milestones and at their last epoch."""
    rows = []
    for run_id, run in line.set_index("epoch").groupby("run_id", sort=False):
        shown = {*MILESTONES, run.index[-1]} & set(run.index)
        for epoch in sorted(shown):
            row = {**setting, "seed": markdown.number(run["seed"].iloc[0]), "epochs": str(epoch)}
            for name, heading in HEADINGS.items():
                row[heading] = markdown.fixed(run.loc[epoch, name])
            if epoch == 200:
                for metric, label in METRICS.items():
                    end = markdown.fixed(published.loc[run_id, metric])
                    if end:
                        row[f"published {label}"] = end
            rows.append(row)
    return rows


def gains_by(line: pd.DataFrame, base: pd.DataFrame, setting: dict[str, str]) -> list[dict[str, str]]:
    """The differences to a baseline at the milestones, and at the last epoch that all pairs have."""
    own = line.set_index(["seed", "epoch"])[list(HEADINGS)]
    leads = (own - base.set_index(["seed", "epoch"])[list(HEADINGS)]).dropna().reset_index("epoch")
    common = leads.groupby("seed")["epoch"].max().min()
    rows = []
    for epoch, found in leads.groupby("epoch"):
        if epoch not in (*MILESTONES, common):
            continue
        row = {**setting, "epochs": str(epoch), "seeds": str(len(found))}
        for name, heading in HEADINGS.items():
            row[heading] = markdown.interval(interval(found[name]))
        rows.append(row)
    return rows
