"""The comparisons behind the findings: a loss minus a baseline, paired by seed, each from one results file.

findings.csv has a line per comparison, in the order of the tables. Its columns:

    file, baseline_file             results file of both sides, and of the baseline where it is another one
    loss, baseline                  runs that meet these conditions, COLUMN=VALUE, separated by semicolons
    loss_chosen, baseline_chosen    further conditions: what validation chose among the trials
    is_published                    settings are the published ones, not chosen here
    epoch                           read the best validation epoch up to this one, in a file of scripts/epochs.py
    is_main                         stands in the figure
    baseline_name                   where it is not cross-entropy
"""

import functools
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from scripts.reporting import runs as core
from scripts.reporting import studies
from scripts.reporting.runs import METRICS, Interval, interval, read_runs
from scripts.reporting.tables import PAPER, as_markdown

RESULTS = PAPER.parent
COMPARISONS: list[Any] = list(
    pd.read_csv(Path(__file__).with_name("findings.csv"), dtype={"epoch": str}, keep_default_na=False).itertuples()
)
GAINS = ["Δ top-1", "Δ top-5"]


class Difference(NamedTuple):
    """What a comparison found, in points of accuracy: the difference to the baseline, for top-1 and top-5."""

    seeds: int
    gains: list[Interval]


@functools.cache
def runs_that_meet(file: str, conditions: str) -> pd.DataFrame:
    """Return the runs of a results file that meet conditions, separated by semicolons."""
    return read_runs(RESULTS / file, [condition for condition in conditions.split("; ") if condition])


def sides(comparison: Any) -> list[pd.DataFrame]:
    """Return the runs of the loss and of its baseline, with accuracies in percent."""
    files = {"loss": comparison.file, "baseline": comparison.baseline_file or comparison.file}
    found = []
    for side, file in files.items():
        conditions = f"{getattr(comparison, side)}; {getattr(comparison, f'{side}_chosen')}"
        runs = runs_that_meet(file, conditions)
        if comparison.epoch:
            runs = studies.epochs(Path(file), runs)
            runs = runs[runs["epoch"] == int(comparison.epoch)]
            found.append(runs.assign(**{metric: runs[f"chosen_{metric}"] for metric in METRICS}))
        else:
            found.append(core.as_numbers(runs, METRICS, 100))
    return found


def title(comparison: Any) -> str:
    """Return the setting, with the loss and the baseline where they are not the usual ones."""
    loss = f", `{comparison.name}`" if comparison.name != "splitter_selection" else ""
    baseline = f", against {comparison.baseline_name}" if comparison.baseline_name else ""
    return comparison.setting + loss + baseline


def trials(comparison: Any) -> str:
    """Return how many settings were tried for the loss and for its baseline; "52 + 30": in two rounds."""
    if comparison.is_published:
        return "published"
    stem = comparison.file.removesuffix(".csv")
    files = [f"{stem.removesuffix('_more')}_trials.csv"] if stem.endswith("_more") else []
    files.append(f"{stem}_trials.csv" if (RESULTS / f"{stem}_trials.csv").exists() else comparison.file)
    return " / ".join(
        " + ".join(str(number) for file in files if (number := number_of_lines(file, conditions)))
        for conditions in (comparison.loss, comparison.baseline)
    )


def number_of_lines(file: str, conditions: str) -> int:
    """Return how many settings of a results file meet conditions."""
    try:
        return len(core.lines_of(runs_that_meet(file, conditions)))
    except core.ReportError:  # none does
        return 0


def commits(comparison: Any) -> str:
    """Return the commits of a comparison's paired runs; of a file of scripts/epochs.py those of its finished runs."""
    loss, baseline = sides(comparison)
    runs = pd.concat([loss, baseline[baseline["seed"].isin(loss["seed"])]])
    if comparison.epoch:
        finished = runs_that_meet("table1.csv", "")
        runs = finished[finished["run_id"].isin(runs["run_id"])]
    resumed = runs["git_commit"].str.split("+").explode()
    return ", ".join(sorted(set(resumed.map(short_commit)))) or "none recorded"


def short_commit(commit: str) -> str:
    """Return the first seven digits of a commit, and whether its tree had changes that were not committed."""
    digits, _, changes = commit.partition("-")
    return digits[:7] + (f"-{changes}" if changes else "")


def difference(comparison: Any) -> Difference:
    """Return a comparison's mean difference and interval over the seeds that both sides have."""
    loss, baseline = sides(comparison)
    gains = core.differences(loss, baseline, list(METRICS))
    return Difference(len(gains), [interval(gains[metric]) for metric in METRICS])


def status(found: Difference) -> str:
    """Return gain, loss or no clear difference, for top-1 and top-5."""
    if found.seeds == 1:
        return "one pair"
    top1, top5 = (gain.verdict for gain in found.gains)
    return top1 if top1 == top5 else f"top-1: {top1}; top-5: {top5}"


def cells(found: Difference) -> dict[str, str]:
    """Return the cells of a difference. A clear one is bold."""
    row = {name: f"**{gain}**" if gain.is_clear else str(gain) for name, gain in zip(GAINS, found.gains)}
    return row | {"Seeds": str(found.seeds)}


def table_of(comparisons: list[Any]) -> pd.DataFrame:
    """Return a line per comparison, and above those on the same data its name."""
    rows: list[dict[str, str]] = []
    for data, group in itertools.groupby(comparisons, key=lambda comparison: comparison.data):
        rows.append({"Setting": f"**{data}**"})
        for comparison in group:
            found = difference(comparison)
            rows.append({"Key": comparison.key, "Setting": title(comparison), "Status": status(found), **cells(found)})
    return pd.DataFrame(rows).fillna("")


def full_table() -> str:
    """Return the table of docs/findings.md: all comparisons, with their status."""
    table = table_of(COMPARISONS)
    table["Setting"] = table["Setting"].where(table["Key"] == "", table["Key"] + ": " + table["Setting"])
    return as_markdown(table[["Setting", *GAINS, "Seeds", "Status"]])


def evidence() -> str:
    """Return the table of docs/findings.md that says where each comparison comes from: trials, file, commits."""
    columns = {"Finding": [comparison.key for comparison in COMPARISONS], "Trials": map(trials, COMPARISONS)}
    columns |= {"Runs": [f"[{comparison.file}](../results/{comparison.file})" for comparison in COMPARISONS]}
    return as_markdown(pd.DataFrame(columns | {"Commits": map(commits, COMPARISONS)}))
