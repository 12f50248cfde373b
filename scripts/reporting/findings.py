"""The comparisons behind the findings: a loss minus a baseline, paired by seed, each from one results file."""

import functools
import math
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from scripts.reporting import runs as core
from scripts.reporting import studies
from scripts.reporting.runs import METRICS, read_runs
from scripts.reporting.tables import PAPER, as_markdown

RESULTS = PAPER.parent
EVEN = "0.2 0.2 0.2 0.2 0.2"
BASELINE, GAINS = ["Cross-entropy top-1", "Cross-entropy top-5"], ["Δ top-1", "Δ top-5"]
SCRATCH = "From scratch"
LINEAR = "Linear classifier"
WRONG = "Linear classifier, wrong labels"


class Comparison(NamedTuple):
    """A loss and its baseline: the runs of a results file that have these values in these columns."""

    key: str  # by which pages name it
    data: str
    setting: str
    name: str  # of the loss
    file: str
    loss: dict[str, str]
    baseline: dict[str, str]
    chosen: tuple[dict[str, str], dict[str, str]] = ({}, {})  # further values, which validation chose for either
    is_published: bool = False  # published settings, not chosen here
    epoch: int = 0  # of a file of scripts/epochs.py: read the best validation epoch up to this one
    is_main: bool = True  # stands in the README and in the figure
    baseline_name: str = ""  # where it is not cross-entropy


class Difference(NamedTuple):
    """What a comparison found: in percent, each value for top-1 and top-5."""

    seeds: int
    baseline: list[float]
    mean: list[float]
    half: list[float]  # half of the 95 % interval; NaN with one pair of seeds


CROSS_ENTROPY = {"method": "softmax_cross_entropy"}
SPLITTER = {"method": "splitter_selection"}
CORRECTION = {"method": "lapsum", "inverse_temperature": "0.000244140625"}
PLAIN = CROSS_ENTROPY | {"label_smoothing": "", "mixup": ""}
NETWORK, GCE = SPLITTER | {"noise_rate": ""}, {"method": "generalized_cross_entropy"}
CLEAN, NOISY = {"label_noise": "0.0"}, {"label_noise": "0.2"}
NOT_SMOOTHED = {"label_smoothing": ""}
WITHIN, AMONG = "16 % wrong, within groups of five classes", "20 % wrong, among all classes"
COMPARISONS = [
    Comparison(
        *(
            "S1",
            SCRATCH,
            "200 epochs, constant learning rate",
            "splitter_selection",
            "table1.csv",
            SPLITTER,
            CROSS_ENTROPY,
        ),
        is_published=True,
    ),
    Comparison(
        *("S2", SCRATCH, "200-epoch schedule, after 73 epochs", "splitter_selection", "table1_epochs.csv"),
        *(SPLITTER, CROSS_ENTROPY),
        is_published=True,
        epoch=73,
    ),
    Comparison(
        *("S3", SCRATCH, "16 epochs, cosine schedule, published settings", "splitter_selection", "table1_short.csv"),
        *({**SPLITTER, "p_k": EVEN}, CROSS_ENTROPY),
        is_published=True,
    ),
    Comparison(
        *("S4", SCRATCH, "16 epochs, cosine schedule, both tuned", "splitter_selection", "scratch.csv"),
        *(SPLITTER | CLEAN, CROSS_ENTROPY | CLEAN),
        chosen=({"inverse_temperature": "0.1"}, {"lr": "0.001"} | NOT_SMOOTHED),
    ),
    Comparison(
        *("S5", SCRATCH, "36 epochs, weight decay and weight averaging", "splitter_selection", "strong.csv"),
        *(SPLITTER, CROSS_ENTROPY),
        is_published=True,
        is_main=False,
    ),
    Comparison(
        *("S6", SCRATCH, f"16 epochs, labels {WITHIN}", "splitter_selection", "scratch.csv"),
        *(SPLITTER | NOISY, CROSS_ENTROPY | NOISY),
        chosen=({"inverse_temperature": "0.025"}, NOT_SMOOTHED),
        is_main=False,
    ),
    Comparison("L1", LINEAR, "correct labels", "splitter_selection", "heads_more.csv", SPLITTER, CROSS_ENTROPY),
    Comparison("L2", LINEAR, "correct labels", "ldr_kl", "heads_more.csv", {"method": "ldr_kl"}, CROSS_ENTROPY),
    Comparison(
        *(
            "L3",
            LINEAR,
            "correct labels, top-5 only",
            "smooth_topk",
            "heads.csv",
            {"method": "smooth_topk"},
            CROSS_ENTROPY,
        ),
        is_main=False,
    ),
]
COMPARISONS += [
    Comparison(
        *("T1", LINEAR, "correct labels, Tiny-ImageNet", "splitter_selection", "tiny_imagenet.csv"),
        *(SPLITTER | {"p_k": "0.5 0 0 0 0.5"}, CROSS_ENTROPY),
    ),
    Comparison(
        *("H1", WRONG, "40 % wrong, labels by people", "splitter_selection", "noise.csv", NETWORK, PLAIN),
        chosen=({"inverse_temperature": "0.185"}, {}),
    ),
    Comparison(
        *("H2", WRONG, "40 % wrong, labels by people", "generalized_cross_entropy", "noise.csv", GCE, PLAIN),
        chosen=({"q": "0.511"}, {}),
    ),
    Comparison(
        *("H3", WRONG, "40 % wrong, labels by people", "splitter_selection", "noise.csv", NETWORK, GCE),
        chosen=({"inverse_temperature": "0.185"}, {"q": "0.511"}),
        is_main=False,
        baseline_name="generalized cross-entropy",
    ),
]
for number, noise, file in ((1, WITHIN, "heads_noise_.2_more.csv"), (4, AMONG, "heads_noise_.2_of_100_more.csv")):
    COMPARISONS += [
        Comparison(f"W{number}", WRONG, noise, "splitter_selection", file, SPLITTER, CROSS_ENTROPY),
        Comparison(
            *(f"W{number + 1}", WRONG, noise, "forward_correction", file, CORRECTION, CROSS_ENTROPY),
            is_main=False,
        ),
        Comparison(
            *(f"W{number + 2}", WRONG, noise, "splitter_selection", file, SPLITTER, CORRECTION),
            is_main=False,
            baseline_name="forward correction",
        ),
    ]


@functools.cache
def runs_of(path: Path) -> pd.DataFrame:
    """Return the runs of a results file."""
    return read_runs(path)


@functools.cache
def epochs_of(path: Path) -> pd.DataFrame:
    """Return the rows of a file of scripts/epochs.py."""
    return studies.epochs(path, runs_of(path))


def that_meet(runs: pd.DataFrame, conditions: dict[str, str]) -> pd.DataFrame:
    """Return the runs that have these values."""
    return runs[(runs[list(conditions)] == pd.Series(conditions)).all(axis=1)]


def sides(comparison: Comparison) -> list[pd.DataFrame]:
    """Return the runs of the loss and of its baseline, with accuracies in percent."""
    path, found = RESULTS / comparison.file, []
    for arm, chosen in zip((comparison.loss, comparison.baseline), comparison.chosen):
        if comparison.epoch:
            runs = that_meet(epochs_of(path), arm | chosen)
            runs = runs[runs["epoch"] == comparison.epoch]
            found.append(runs.assign(**{metric: runs[f"chosen_{metric}"] for metric in METRICS}))
        else:
            found.append(core.as_numbers(that_meet(runs_of(path), arm | chosen), METRICS, 100))
    return found


def trials(comparison: Comparison) -> str:
    """Return how many settings were tried for the loss and for its baseline."""
    if comparison.is_published:
        return "published"
    path = RESULTS / comparison.file.replace(".csv", "_trials.csv")
    path = path if path.exists() else RESULTS / comparison.file
    arms = (comparison.loss, comparison.baseline)
    numbers = [len(core.lines_of(that_meet(runs_of(path), arm))) for arm in arms]
    return " / ".join(map(str, numbers))


def difference(comparison: Comparison) -> Difference:
    """Return a comparison's mean difference and interval over the seeds that both sides have."""
    loss, baseline = sides(comparison)
    gains = core.differences(loss, baseline, list(METRICS))
    paired = baseline[baseline["seed"].isin(gains.index)]
    half = core.half_width(gains.std(), len(gains))
    return Difference(len(gains), paired[list(METRICS)].mean().tolist(), gains.mean().tolist(), half.tolist())


def status(found: Difference) -> str:
    """Return gain, loss or no clear difference, for top-1 and top-5."""
    if found.seeds == 1:
        return "one pair"
    words = [
        "no clear difference" if abs(mean) <= half else "gain" if mean > 0 else "loss"
        for mean, half in zip(found.mean, found.half)
    ]
    return words[0] if words[0] == words[1] else f"top-1: {words[0]}; top-5: {words[1]}"


def signed(mean: float, half: float) -> str:
    """Return a difference with its interval, in bold where the interval excludes 0."""
    text = f"{mean:+.2f}".replace("-", "−") + ("" if math.isnan(half) else f" ± {half:.2f}")
    return f"**{text}**" if abs(mean) > half else text


def published() -> dict[str, str]:
    """Return the paper's own row of the README's table."""
    rows = pd.read_csv(PAPER / "table1.csv")
    rows = rows[rows["source"].str.startswith("Petersen")].set_index(["method", "p_k"])[list(METRICS)] * 100
    baseline, loss = rows.loc["softmax_cross_entropy", "1 0 0 0 0"], rows.loc["splitter_selection", EVEN]
    row = {"Setting": "paper: 200 epochs, constant learning rate", "Loss": "`splitter_selection`", "Seeds": "2"}
    gains = [signed(gain, math.nan) for gain in loss - baseline]
    return row | dict(zip(BASELINE, baseline.map("{:.2f}".format))) | dict(zip(GAINS, gains))


def main_table() -> str:
    """Return the README's table: the main comparisons with cross-entropy's accuracy, and the paper's own row."""
    rows: list[dict[str, str]] = []
    for comparison in [comparison for comparison in COMPARISONS if comparison.is_main]:
        if comparison.data not in [row["Setting"].strip("*") for row in rows]:
            rows += [{"Setting": f"**{comparison.data}**"}, *([published()] if comparison.data == SCRATCH else [])]
        found = difference(comparison)
        row = {"Setting": comparison.setting, "Loss": f"`{comparison.name}`", "Seeds": str(found.seeds)}
        row |= dict(zip(BASELINE, map("{:.2f}".format, found.baseline)))
        rows.append(row | dict(zip(GAINS, map(signed, found.mean, found.half))))
    return as_markdown(pd.DataFrame(rows).fillna(""))


def full_table() -> str:
    """Return the table of docs/findings.md: all comparisons, with their status, trials, file and commit."""
    rows: list[dict[str, str]] = []
    for comparison in COMPARISONS:
        if comparison.data not in [row["Setting"].strip("*") for row in rows]:
            rows.append({"Setting": f"**{comparison.data}**"})
        found = difference(comparison)
        baseline = f", against {comparison.baseline_name}" * bool(comparison.baseline_name)
        row = {"#": comparison.key, "Setting": comparison.setting, "Loss": f"`{comparison.name}`{baseline}"}
        row |= {"Seeds": str(found.seeds), **dict(zip(GAINS, map(signed, found.mean, found.half)))}
        row |= {"Status": status(found), "Trials": trials(comparison)}
        commits = sorted({commit[:7] for runs in sides(comparison) for commit in runs.get("git_commit", [])})
        link = f"[{comparison.file.removesuffix('.csv')}](../results/{comparison.file})"
        rows.append(row | {"Runs": ", ".join([link, *commits])})
    columns = ["#", "Setting", "Loss", "Seeds", *GAINS, "Status", "Trials", "Runs"]
    return as_markdown(pd.DataFrame(rows, columns=columns).fillna(""))
