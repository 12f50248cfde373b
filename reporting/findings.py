"""The comparisons behind the findings: a loss minus a baseline, paired by seed, each from one results file.

findings.csv has a line per comparison, in the order of the tables. Its columns:

    file, baseline_file             results file of both sides, and of the baseline where it is another one
    loss, baseline                  runs that meet these conditions, COLUMN=VALUE, separated by semicolons
    loss_chosen, baseline_chosen    further conditions: what validation chose among the trials
    is_untuned                      settings are the published ones or were not tuned
    epoch                           read the best validation epoch up to this one, in a file of scripts/epochs.py
    is_main                         stands in the figure
    baseline_name                   where it is not cross-entropy
    note                            stands behind the setting in tables

In a study with trials the seeds of its finals count alone, none of which chose.

A dagger marks a difference of linear classifiers whose interval excludes 0, and which Holm's method does not keep among
all differences of the study of wrong labels, elsewhere among those of its file to the same baseline. From scratch there
are few seeds, and no dagger.
"""

import csv
import functools
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from experiments.common import settings
from experiments.common.paths import REPOSITORY
from reporting import epochs, markdown, noise
from reporting.compare import Interval, holm, interval, p_value, paired
from reporting.frames import METRICS, lines_of, read_cells, that_meet, typed_runs
from studies.catalog import study_of
from studies.tuning import Tuned

GAINS = ["Δ top-1", "Δ top-5"]
OTHER_SEEDS = "_again"  # ends the name of a file without trials, with other seeds of what another file chose
RUNNER_UP = "_runner_up"  # ends the name of a file with final runs of another trial than the chosen one


@dataclass(frozen=True)
class Comparison:
    """A line of findings.csv."""

    key: str
    data: str
    setting: str
    name: str
    file: str
    baseline_file: str
    loss: str
    loss_chosen: str
    baseline: str
    baseline_chosen: str
    is_untuned: bool
    epoch: int | None
    is_main: bool
    baseline_name: str
    note: str

    @property
    def title(self) -> str:
        """The setting, with the loss and the baseline where they are not the usual ones."""
        text = self.setting
        if self.name != "splitter_selection":
            text += f", `{self.name}`"
        if self.baseline_name:
            text += f", against {self.baseline_name}"
        return text

    @property
    def line(self) -> str:
        """What stands in a table: the key, the title and the note."""
        return f"{self.key}: {self.title} {self.note}".strip()


def read_comparisons() -> list[Comparison]:
    found = []
    with Path(__file__).with_name("findings.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            typed: dict[str, Any] = dict(row)
            typed["epoch"] = None
            if row["epoch"]:
                typed["epoch"] = int(row["epoch"])
            for name in ("is_untuned", "is_main"):
                typed[name] = settings.boolean(row[name])
            found.append(Comparison(**typed))
    return found


COMPARISONS = read_comparisons()
MAIN = [comparison for comparison in COMPARISONS if comparison.is_main]


class Difference(NamedTuple):
    """What a comparison found, in points of accuracy: the difference to the baseline, by the metric."""

    seeds: int
    gains: dict[str, Interval]


@functools.cache
def cells_of(file: str) -> pd.DataFrame:
    return read_cells(REPOSITORY / file)


@functools.cache
def runs_of(file: str) -> pd.DataFrame:
    return typed_runs(REPOSITORY / file, cells_of(file))


@functools.cache
def runs_that_meet(file: str, conditions: str) -> pd.DataFrame:
    """The runs of a results file that meet conditions, separated by semicolons."""
    cells = cells_of(file)
    for condition in filter(None, conditions.split("; ")):
        cells = that_meet(REPOSITORY / file, cells, condition)
    return runs_of(file).loc[cells.index].reset_index(drop=True)


@functools.cache
def seeds_of(file: str) -> tuple[int, ...] | None:
    """The seeds of the finals of a file in which trials may stand, too; None of a file without trials."""
    study = study_of(file, REPOSITORY)
    if isinstance(study, Tuned):
        return study.finals.commands.seeds
    return None


def side(comparison: Comparison, file: str, conditions: str) -> pd.DataFrame:
    """The runs of a loss; at an epoch, their accuracies are those of the best validation epoch up to it."""
    runs = runs_that_meet(file, conditions)
    seeds = seeds_of(file)
    if seeds is not None:
        runs = runs[runs["seed"].isin(seeds)]
    if comparison.epoch is None:
        return runs
    runs = epochs.with_means(Path(file), runs)
    runs = runs[runs["epoch"] == comparison.epoch]
    return runs.assign(**{metric: runs[f"chosen_{metric}"] for metric in METRICS})


def loss_runs(comparison: Comparison) -> pd.DataFrame:
    return side(comparison, comparison.file, f"{comparison.loss}; {comparison.loss_chosen}")


def baseline_runs(comparison: Comparison) -> pd.DataFrame:
    file = comparison.baseline_file or comparison.file
    return side(comparison, file, f"{comparison.baseline}; {comparison.baseline_chosen}")


def trials(comparison: Comparison) -> str:
    """How many settings were tried for the loss and for its baseline; "52 + 30": in two rounds."""
    if comparison.is_untuned:
        return "not tuned"
    stem = comparison.file.removesuffix(".csv").removesuffix(RUNNER_UP)
    files = []
    if stem.endswith("_more"):
        files.append(f"{stem.removesuffix('_more')}_trials.csv")
    last = comparison.file
    if (REPOSITORY / f"{stem}_trials.csv").exists():
        last = f"{stem}_trials.csv"
    elif stem.endswith(OTHER_SEEDS):
        last = f"{stem.removesuffix(OTHER_SEEDS)}.csv"
    files.append(last)
    sides = []
    for conditions in (comparison.loss, comparison.baseline):
        numbers = [number_of_lines(file, conditions) for file in files]
        sides.append(" + ".join(str(number) for number in numbers if number))
    return " / ".join(sides)


def number_of_lines(file: str, conditions: str) -> int:
    """How many settings of a results file meet conditions."""
    try:
        return len(lines_of(runs_that_meet(file, conditions)))
    except ValueError:  # none does
        return 0


def commits(comparison: Comparison) -> str:
    """The commits of a comparison's paired runs; of a file of scripts/epochs.py those of its own finished runs."""
    loss = loss_runs(comparison)
    baseline = baseline_runs(comparison)
    runs = pd.concat([loss, baseline[baseline["seed"].isin(loss["seed"])]])
    if comparison.epoch is not None:
        finished = runs_that_meet(comparison.file.replace("_epochs", ""), "")
        runs = finished[finished["run_id"].isin(runs["run_id"])]
    resumed = runs["git_commit"].str.split("+").explode()
    return ", ".join(sorted(set(resumed.map(short_commit)))) or "none recorded"


def short_commit(commit: str) -> str:
    """The first seven digits of a commit, and whether its tree had changes that were not committed."""
    digits, _, changes = commit.partition("-")
    if changes:
        return f"{digits[:7]}-{changes}"
    return digits[:7]


def difference(comparison: Comparison) -> Difference:
    """A comparison's mean difference and interval over the seeds that both sides have."""
    differences = paired(loss_runs(comparison), baseline_runs(comparison), list(METRICS))
    return Difference(len(differences), {metric: interval(differences[metric]) for metric in METRICS})


def status(found: Difference) -> str:
    """Gain, loss or no clear difference, for top-1 and top-5."""
    if found.seeds == 1:
        return "one pair"
    top1, top5 = (found.gains[metric].verdict for metric in METRICS)
    if top1 == top5:
        return top1
    return f"top-1: {top1}; top-5: {top5}"


@functools.cache
def kept_in_file(file: str, baseline_file: str, baseline: str) -> dict[tuple[frozenset[str], str], bool]:
    """Whether Holm's method keeps the difference of each line of a file to one baseline, by its runs and the metric."""
    base = runs_that_meet(baseline_file, baseline)
    p_values = {}
    for line in lines_of(runs_that_meet(file, "")):
        names = frozenset(line["run_id"])
        if names == frozenset(base["run_id"]):
            continue
        differences = paired(line, base, list(METRICS))
        for metric in METRICS:
            p_values[names, metric] = p_value(differences[metric])
    return holm(p_values)


@functools.cache
def family_of(file: str) -> dict[tuple[frozenset[str], frozenset[str]], noise.Pair]:
    """The pairs whose differences Holm's method orders, by the names of the runs of both sides; none of most files."""
    path = REPOSITORY / file
    results = None
    if path.parent.name == noise.NOISE.name:
        results = noise.results_of(path.parent).get(path.stem)
    if results is None:
        return {}
    names = {loss: frozenset(results.finals[loss, noise.NOISY]["run_id"]) for loss in results.losses}
    return {(names[pair.loss], names[pair.other]): pair for pair in results.pairs()}


def is_dropped_by_holm(comparison: Comparison, metric: str) -> bool:
    """Whether Holm's method orders a difference, and does not keep it."""
    path = REPOSITORY / comparison.file
    names = (frozenset(loss_runs(comparison)["run_id"]), frozenset(baseline_runs(comparison)["run_id"]))
    if path.parent.name == noise.NOISE.name:
        pair = family_of(comparison.file).get(names)
        return pair is not None and not noise.kept_by_holm(path.parent)[path.stem, pair, metric]
    if not comparison.data.startswith("Linear classifier"):
        return False
    baseline = f"{comparison.baseline}; {comparison.baseline_chosen}"
    kept = kept_in_file(comparison.file, comparison.baseline_file or comparison.file, baseline)
    return not kept[names[0], metric]


def cells(comparison: Comparison, found: Difference) -> dict[str, str]:
    """The cells of a difference. A clear one is bold, and has a dagger if Holm's method does not keep it."""
    row = {}
    for metric, heading in zip(METRICS, GAINS):
        gain = found.gains[metric]
        row[heading] = markdown.interval(gain)
        if gain.is_clear:
            row[heading] = f"**{row[heading]}**"
        if gain.is_clear and is_dropped_by_holm(comparison, metric):
            row[heading] += "†"
    row["Seeds"] = str(found.seeds)
    return row


def table_of(comparisons: list[Comparison]) -> pd.DataFrame:
    """A line per comparison, and where there are several data above those on the same data its name."""
    rows: list[dict[str, str]] = []
    is_mixed = len({comparison.data for comparison in comparisons}) > 1
    for data, group in itertools.groupby(comparisons, key=lambda comparison: comparison.data):
        if is_mixed:
            rows.append({"Setting": f"**{data}**"})
        for comparison in group:
            found = difference(comparison)
            row = {"Setting": comparison.line, "Status": status(found)}
            rows.append(row | cells(comparison, found))
    return pd.DataFrame(rows).fillna("")


def chosen(names: tuple[str, ...]) -> list[Comparison]:
    """The comparisons of a table. names: "all", "main", keys such as H2, or the letters of many keys."""
    if names == ("all",):
        return COMPARISONS
    if names == ("main",):
        return MAIN
    found = []
    for comparison in COMPARISONS:
        if comparison.key in names or comparison.key[0] in names:
            found.append(comparison)
    return found


def as_markdown(*names: str) -> str:
    """The comparisons that `chosen` names; their status where all stand, elsewhere bold numbers have to do."""
    table = table_of(chosen(names))
    columns = ["Setting", *GAINS, "Seeds"]
    if names == ("all",):
        columns.append("Status")
    return markdown.table(table[columns])


def evidence() -> str:
    """The table of results/tables/comparisons.md that says where each one comes from: trials, file, commits."""
    rows = []
    for comparison in COMPARISONS:
        rows.append(
            {
                "Finding": comparison.key,
                "Trials": trials(comparison),
                "Runs": f"[{comparison.file}](../repository/{comparison.file})",
                "Commits": commits(comparison),
            }
        )
    return markdown.table(rows)
