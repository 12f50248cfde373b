"""The study of wrong labels (scripts/noise.py): which loss a run has, which trial validation chooses, and the tables.

Differences are of paired seeds. A star marks one that Holm's method keeps at a family-wise error of 5 %, among all
differences of the trials that noisy validation chose: of every kind of labels, to both baselines, top-1 and top-5.
"""

import re
from pathlib import Path

import pandas as pd
from scipy.stats import ttest_1samp

from scripts.reporting.runs import (
    IDENTITY,
    METRICS,
    SEEDS,
    ReportError,
    as_numbers,
    best_trial,
    differences,
    interval,
    mean_std,
    read_runs,
)
from scripts.reporting.tables import as_markdown

CHOICES = {"noisy": "last_valid", "clean": "last_clean"}  # the labels that choose, and the columns of their accuracy
BASELINE = "cross_entropy"
LOSSES = {  # and how tables call them
    "cross_entropy": "cross-entropy",
    "label_smoothing": "cross-entropy, label smoothing",
    "mixup": "cross-entropy, mixup",
    "ldr_kl": "LDR-KL",
    "forward_true": "forward correction, true T",
    "forward_estimated": "forward correction, T from 5 % clean labels",
    "forward_uniform": "forward correction, uniform T",
    "gce": "GCE",
    "sce": "SCE",
    "nce_rce": "NCE + RCE",
    "phuber": "PHuber cross-entropy",
    "splitter_selection": "splitter selection network",
    "lapsum": "LapSum",
    "softsort": "SoftSort",
    "df_topk": "DFTopK",
    "smooth_topk": "smooth top-k, top-5 only",
    "splitter_selection_forward": "splitter selection network, forward correction",
    "lapsum_forward": "LapSum, forward correction",
}
ROBUST = ("forward_uniform", "gce", "sce", "nce_rce", "phuber")  # without order, and without clean labels
RANKING = tuple(LOSSES)[list(LOSSES).index("splitter_selection") :]
BY_METHOD = {  # where the name of a loss is not that of its method
    "softmax_cross_entropy": "cross_entropy",
    "forward_correction": "forward_uniform",
    "generalized_cross_entropy": "gce",
    "symmetric_cross_entropy": "sce",
    "phuber_cross_entropy": "phuber",
}
KINDS = {"human": "labels by people (CIFAR-100N)", "right": "right labels"}


def loss_of(run: pd.Series) -> str:
    """Return the name in scripts/noise.py of the loss that a run has."""
    for name in ("mixup", "label_smoothing"):
        if run[name]:
            return name
    if run["noise_matrix"]:
        return f"forward_{Path(run['noise_matrix']).stem.rpartition('_')[2]}"
    name = BY_METHOD.get(run["method"], run["method"])
    return f"{name}_forward" if run["noise_rate"] and f"{name}_forward" in LOSSES else name


def read_noise(path: Path) -> pd.DataFrame:
    """Read a file of the study, cells as text, with the loss of each run in a column. Raises ReportError."""
    runs = read_runs(path)
    return runs.assign(loss=[loss_of(run) for _, run in runs.iterrows()])


class Study:
    """The trials and the final runs of one kind of labels.

    Args:
        trials, runs: as read_noise returns them.
        labels: a value of their column `labels`.

    Raises ReportError where a choice has no final runs.
    """

    def __init__(self, trials: pd.DataFrame, runs: pd.DataFrame, labels: str) -> None:
        self.trials, self.labels = trials[trials["labels"] == labels], labels
        self.losses = [name for name in LOSSES if name in set(self.trials["loss"])]
        own = as_numbers(runs[runs["labels"] == labels], METRICS, 100)
        flags = [name for name in own if name in IDENTITY and name not in SEEDS]
        self.finals: dict[tuple[str, str], pd.DataFrame] = {}
        for loss in self.losses:
            for choice, split in CHOICES.items():
                best = best_trial(self.trials[self.trials["loss"] == loss], split)
                found = own[(own[flags] == best[flags]).all(axis=1)]
                if found.empty:
                    raise ReportError(f"{labels}: what {choice} validation chose of {loss} has no final run")
                self.finals[loss, choice] = found

    def best(self, losses: tuple[str, ...]) -> str:
        """Return the loss that has the best trial by noisy validation."""
        return str(best_trial(self.trials[self.trials["loss"].isin(losses)], CHOICES["noisy"])["loss"])

    def minus(self, loss: str, other: str, choice: str = "noisy") -> pd.DataFrame:
        """Return the differences of two losses in points, a row per paired seed."""
        return differences(self.finals[loss, choice], self.finals[other, choice], list(METRICS))

    def compared(self) -> dict[tuple[str, str], pd.DataFrame]:
        """Return the differences of every loss to both baselines, each once, where noisy validation chose."""
        robust = self.best(ROBUST)
        pairs = [(loss, BASELINE) for loss in self.losses if loss != BASELINE]
        pairs += [(loss, robust) for loss in self.losses if loss not in (BASELINE, robust)]
        return {pair: self.minus(*pair) for pair in pairs}


def studies(file: Path) -> dict[str, Study]:
    """Return the study of each kind of labels that results/noise.csv has, its trials beside it. Raises ReportError."""
    runs, trials = read_noise(file), read_noise(file.with_name(f"{file.stem}_trials.csv"))
    return {labels: Study(trials, runs, labels) for labels in runs["labels"].unique()}


def holm(p_values: pd.Series, error: float = 0.05) -> pd.Series:
    """Return which hypotheses are rejected at a family-wise error, by Holm's method."""
    ordered = p_values.sort_values()
    levels = [error / (len(ordered) - place) for place in range(len(ordered))]
    return (ordered <= levels).cummin().reindex(p_values.index)


def kept_by_holm(every: dict[str, Study]) -> pd.Series:
    """Return by (labels, loss, other loss, metric) whether Holm's method keeps the difference."""
    p_values = {
        (labels, *pair, metric): ttest_1samp(gains[metric], 0).pvalue
        for labels, study in every.items()
        for pair, gains in study.compared().items()
        for metric in METRICS
    }
    return holm(pd.Series(p_values))


def shown(values: pd.Series, star: bool = False) -> str:
    """Return a mean difference with its sign, half of its 95 % interval and, where Holm keeps it, a star."""
    return f"{interval(values)}" + "\\*" * star


def kind_of(labels: str) -> str:
    """Return how tables call a kind of labels: "0.4 among 100, draw 1" is symmetric noise, drawn a second time."""
    if labels in KINDS:
        return KINDS[labels]
    rate, among, draw = re.split(" among |, draw ", labels)
    kind = "among all classes" if among == "100" else f"within groups of {among} class ids"
    return f"{float(rate):.0%} drawn {kind}".replace("%", " %") + (f", draw {int(draw) + 1}" if int(draw) else "")


def noise_table(file: Path, *words: str) -> str:
    """Return Markdown for the labels of this name: what noisy validation chose of each loss, then what clean did."""
    every, labels = studies(file), " ".join(words)
    if labels not in every:
        raise ReportError(f"{file} has no {labels!r}, but {', '.join(every)}")
    study, kept = every[labels], kept_by_holm(every)
    robust, run = study.best(ROBUST), study.finals[BASELINE, "noisy"].iloc[0]
    tables: dict[str, list[dict[str, str]]] = {choice: [] for choice in CHOICES}
    for loss in study.losses:
        for choice, rows in tables.items():
            row = {"loss": LOSSES[loss]}
            row |= {name: mean_std(study.finals[loss, choice][metric]) for metric, name in METRICS.items()}
            for other in (BASELINE, robust) if choice == "noisy" else (BASELINE,):
                for metric, name in METRICS.items():
                    pair = (loss, other) if loss != BASELINE else (other, loss)
                    star = choice == "noisy" and loss != other and bool(kept[(labels, *pair, metric)])
                    cell = "" if loss == other else shown(study.minus(loss, other, choice)[metric], star)
                    row[f"Δ {name}" + (f" to {LOSSES[other]}" if other != BASELINE else "")] = cell
            if choice == "clean":
                noisy = study.finals[loss, "noisy"]
                for metric, name in METRICS.items():
                    gain = differences(study.finals[loss, choice], noisy, [metric])[metric]
                    row[f"Δ {name} to noisy choice"] = shown(gain) if gain.any() else "the same trial"
            rows.append(row)
    seeds = len(study.finals[BASELINE, "noisy"])
    trials, epochs = study.trials.groupby("loss").size().max(), sorted(study.trials["n_epochs"].astype(int).unique())
    caption = (
        f"CIFAR-100, {kind_of(labels)}: linear classifiers on {run['backbone'].partition(':')[2]} at "
        f"{run['resolution']} pixels, {run['train_images']} training and {run['valid_images']} validation images, "
        f"{' or '.join(map(str, epochs))} epochs of batches of {run['batch_size']}. {trials} trials of each loss, seed "
        f"0; chosen by top-1 + top-5 of validation, at the end. Test accuracy in %, ± standard deviation over {seeds} "
        f"seeds. Δ: difference to cross-entropy, or to the loss that is named, in points, ± 95 % interval over paired "
        f"seeds. \\*: Holm's method keeps it, at a family-wise error of 5 % among {len(kept)} differences. "
        f"{LOSSES[robust]}: best by validation of the robust losses that know neither the order nor clean labels."
    )
    noisy, clean = (as_markdown(pd.DataFrame(rows)) for rows in tables.values())
    parts = [
        f"Chosen by noisy validation labels:\n\n{noisy}",
        '<details markdown="1">\n<summary>Chosen by clean validation labels</summary>',
        f"{clean}\n\n</details>",
    ]
    return "\n\n".join([caption, *parts])


def noise_answer(file: Path) -> str:
    """Return Markdown: for each kind of labels the best top-k loss minus the best robust loss, with a verdict."""
    every, rows = studies(file), []
    kept = kept_by_holm(every)
    for labels, study in every.items():
        loss, other = study.best(RANKING), study.best(ROBUST)
        gains = study.minus(loss, other)
        row = {"labels": kind_of(labels), "top-k loss": LOSSES[loss], "robust loss": LOSSES[other]}
        for metric, name in METRICS.items():
            star = bool(kept[labels, loss, other, metric])
            row[name] = f"{shown(gains[metric], star)} ({interval(gains[metric]).verdict})"
        rows.append(row | {"seeds": str(len(gains))})
    caption = (
        "Best top-k loss minus best robust loss without order, each the best of its kind by noisy validation. Points "
        f"of test accuracy, ± 95 % interval over paired seeds; \\*: kept by Holm's method, of {len(kept)} differences."
    )
    return f"{caption}\n\n{as_markdown(pd.DataFrame(rows))}"
