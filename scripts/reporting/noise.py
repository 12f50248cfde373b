"""The study of wrong labels (scripts/noise.py): its losses, which trial validation chooses, and the tables.

Differences are of paired seeds. A star marks one that Holm's method keeps at a family-wise error of 5 %, among all
differences of the trials that noisy validation chose: of every kind of labels, to both baselines, top-1 and top-5.
"""

import functools
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from scipy.stats import ttest_1samp

from scripts.reporting import runs as core
from scripts.reporting.runs import METRICS, ReportError, interval
from scripts.reporting.tables import as_markdown
from topk_losses import METHODS

CHOICES = {"noisy": "last_valid", "clean": "last_clean"}  # the labels that choose, and the columns of their accuracy
BASELINE = "cross_entropy"
EVEN = ("label_smoothing", "margin", "noise_rate", "q")  # numbers that are tried at equal distances
RATE, SOFTMAX, FORWARD = (0.05, 0.8), "softmax_cross_entropy", "forward_correction"


@dataclass(frozen=True)
class Loss:
    """A loss: what tables call it, its flags, and the lowest and the highest value of each of its own numbers.

    Numbers are tried at equal distances of their logarithm, except those of EVEN. matrix: which T it is given, true or
    estimated.
    """

    title: str
    flags: str
    own: dict[str, tuple[float, float]] = field(default_factory=dict)
    matrix: str = ""


class Labels(NamedTuple):
    """A kind of labels: what tables call it, and the flags of scripts/relabel.py that write it."""

    title: str
    flags: str


LABELS = {
    "human": Labels("labels by people (CIFAR-100N)", ""),
    "symmetric_.4": Labels("40 % drawn among all classes", "--label_noise .4 --among 100"),
    "symmetric_.4_again": Labels("40 % drawn among all classes, draw 2", "--label_noise .4 --among 100 --draw 1"),
    "symmetric_.2": Labels("20 % drawn among all classes", "--label_noise .2 --among 100"),
    "symmetric_.2_again": Labels("20 % drawn among all classes, draw 2", "--label_noise .2 --among 100 --draw 1"),
    "blocks_.2": Labels("20 % drawn within groups of 5 class ids", "--label_noise .2 --among 5"),
    "blocks_.2_again": Labels("20 % drawn within groups of 5 class ids, draw 2", "--label_noise .2 --among 5 --draw 1"),
    "right": Labels("correct labels", "--label_noise 0"),
}


def relaxed(title: str, method: str, **own: tuple[float, float]) -> Loss:
    """Return the loss of a method that sorts, half top-1 and half top-5, from its default temperature to a 32nd."""
    default = METHODS[method].inverse_temperature
    return Loss(title, f"{method} --p_k .5 0 0 0 .5 --m 16", {"inverse_temperature": (default / 32, default), **own})


LOSSES = {
    "cross_entropy": Loss("cross-entropy", SOFTMAX),
    "label_smoothing": Loss("cross-entropy, label smoothing", SOFTMAX, {"label_smoothing": (0.05, 0.6)}),
    "mixup": Loss("cross-entropy, mixup", SOFTMAX, {"mixup": (0.1, 2)}),
    "ldr_kl": Loss("LDR-KL", "ldr_kl", {"inverse_temperature": (0.25, 2), "margin": (0, 2)}),
    "forward_true": Loss("forward correction, true T", FORWARD, matrix="true"),
    "forward_estimated": Loss("forward correction, T from 5 % clean labels", FORWARD, matrix="estimated"),
    "forward_uniform": Loss("forward correction, uniform T", FORWARD, {"noise_rate": RATE}),
    "gce": Loss("GCE", "generalized_cross_entropy", {"q": (0.1, 0.9)}),
    "sce": Loss("SCE", "symmetric_cross_entropy --alpha 1", {"beta": (0.01, 10)}),
    "nce_rce": Loss("NCE + RCE", "nce_rce --alpha 10", {"beta": (0.03, 3)}),
    "phuber": Loss("PHuber cross-entropy", "phuber_cross_entropy", {"tau": (2, 100)}),
    "splitter_selection": relaxed("splitter selection network", "splitter_selection"),
    "lapsum": relaxed("LapSum", "lapsum"),
    "softsort": relaxed("SoftSort", "softsort"),
    "df_topk": relaxed("DFTopK", "df_topk"),
    "smooth_topk": Loss("smooth top-k, top-5 only", "smooth_topk --p_k 0 0 0 0 1", {"inverse_temperature": (0.25, 8)}),
    "splitter_selection_forward": relaxed(
        "splitter selection network, forward correction", "splitter_selection", noise_rate=RATE
    ),
    "lapsum_forward": relaxed("LapSum, forward correction", "lapsum", noise_rate=RATE),
}
ROBUST = ("forward_uniform", "gce", "sce", "nce_rce", "phuber")  # without order, and without clean labels
RANKING = tuple(LOSSES)[list(LOSSES).index("splitter_selection") :]
SORTING = tuple(name for name in RANKING if "noise_rate" not in LOSSES[name].own)  # without forward correction


def loss_of(run: pd.Series) -> str:
    """Return the name in LOSSES of the loss that a run has."""
    matrix = Path(run["noise_matrix"]).stem.rpartition("_")[2]
    given = {name for name in ("mixup", "label_smoothing", "noise_rate") if run[name]}
    for name, loss in LOSSES.items():
        if loss.flags.split()[0] == run["method"] and loss.matrix == matrix and given <= set(loss.own):
            return name
    return ""


def read_noise(path: Path) -> pd.DataFrame:
    """Read a file of the study, cells as text, with the loss of each run in a column. Raises ReportError."""
    runs = core.read_runs(path)
    return runs.assign(loss=[loss_of(run) for _, run in runs.iterrows()])


class Study:
    """The trials and the final runs of one kind of labels.

    Args:
        folder, labels: where results are, and the name of the labels in LABELS.

    Raises ReportError where a choice has no final runs.
    """

    def __init__(self, folder: Path, labels: str) -> None:
        self.trials = read_noise(folder / f"{labels}_trials.csv")
        self.losses = [name for name in LOSSES if name in set(self.trials["loss"])]
        own = core.as_numbers(read_noise(folder / f"{labels}.csv"), METRICS, 100)
        flags = core.flags_of(own)
        runs_of = dict(iter(own.groupby(flags)))
        self.finals: dict[tuple[str, str], pd.DataFrame] = {}
        for loss, (choice, split) in itertools.product(self.losses, CHOICES.items()):
            best = core.best_trial(self.trials[self.trials["loss"] == loss], split)
            settings = tuple(best[flags])
            if settings not in runs_of:
                raise ReportError(f"{labels}: what {choice} validation chose of {loss} has no final run")
            self.finals[loss, choice] = runs_of[settings]

    def best(self, losses: tuple[str, ...]) -> str:
        """Return the loss that has the best trial by noisy validation."""
        return str(core.best_trial(self.trials[self.trials["loss"].isin(losses)], CHOICES["noisy"])["loss"])

    def minus(self, loss: str, other: str, choice: str = "noisy") -> pd.DataFrame:
        """Return the differences of two losses in points, a row per paired seed."""
        return core.differences(self.finals[loss, choice], self.finals[other, choice], list(METRICS))

    def compared(self) -> dict[tuple[str, str], pd.DataFrame]:
        """Return the differences of every loss to both baselines, each once, where noisy validation chose."""
        robust = self.best(ROBUST)
        pairs = [(loss, BASELINE) for loss in self.losses if loss != BASELINE]
        pairs += [(loss, robust) for loss in self.losses if loss not in (BASELINE, robust)]
        return {pair: self.minus(*pair) for pair in pairs}


@functools.cache
def studies(folder: Path) -> dict[str, Study]:
    """Return the study of each kind of labels whose final runs a folder of results has. Raises ReportError."""
    return {labels: Study(folder, labels) for labels in LABELS if (folder / f"{labels}.csv").is_file()}


@functools.cache
def kept_by_holm(folder: Path, error: float = 0.05) -> pd.Series:
    """Return by (labels, loss, other loss, metric) whether Holm's method keeps the difference, of all of a folder."""
    p_values = {
        (labels, *pair, metric): ttest_1samp(gains[metric], 0).pvalue
        for labels, study in studies(folder).items()
        for pair, gains in study.compared().items()
        for metric in METRICS
    }
    ordered = pd.Series(p_values).sort_values()
    levels = [error / (len(ordered) - place) for place in range(len(ordered))]
    return (ordered <= levels).cummin()


def noise_table(folder: Path, labels: str) -> str:
    """Return Markdown for a kind of labels: what noisy validation chose of each loss, then what clean did."""
    every = studies(folder)
    if labels not in every:
        raise ReportError(f"{folder} has no {labels!r}, but {', '.join(every)}")
    study, kept = every[labels], kept_by_holm(folder)
    robust, run = study.best(ROBUST), study.finals[BASELINE, "noisy"].iloc[0]
    tables: dict[str, list[dict[str, str]]] = {choice: [] for choice in CHOICES}
    for loss, (choice, rows) in itertools.product(study.losses, tables.items()):
        row = {"loss": LOSSES[loss].title}
        row |= {name: core.mean_std(study.finals[loss, choice][metric]) for metric, name in METRICS.items()}
        for other in (BASELINE, robust) if choice == "noisy" else (BASELINE,):
            gains = study.minus(loss, other, choice)
            for metric, name in METRICS.items():
                key = (labels, *((other, loss) if loss == BASELINE else (loss, other)), metric)
                star = "\\*" if choice == "noisy" and kept.get(key) else ""
                heading = f"Δ {name}" if other == BASELINE else f"Δ {name} to {LOSSES[other].title}"
                row[heading] = f"{interval(gains[metric])}{star}" if loss != other else ""
        if choice == "clean":
            gains = core.differences(study.finals[loss, "clean"], study.finals[loss, "noisy"], list(METRICS))
            for metric, name in METRICS.items():
                same = not gains[metric].any()
                row[f"Δ {name} to noisy choice"] = "the same trial" if same else str(interval(gains[metric]))
        rows.append(row)
    seeds = len(study.finals[BASELINE, "noisy"])
    trials, epochs = study.trials.groupby("loss").size().max(), sorted(study.trials["n_epochs"].astype(int).unique())
    caption = (
        f"CIFAR-100, {LABELS[labels].title}: linear classifiers on {run['backbone'].partition(':')[2]} at "
        f"{run['resolution']} pixels, {run['train_images']} training and {run['valid_images']} validation images, "
        f"{' or '.join(map(str, epochs))} epochs of batches of {run['batch_size']}. {trials} trials of each loss, seed "
        f"0; chosen by top-1 + top-5 of validation, at the end. Test accuracy in %, ± standard deviation over {seeds} "
        f"seeds. Δ: difference to cross-entropy, or to the loss that is named, in points, ± 95 % interval over paired "
        f"seeds. \\*: Holm's method keeps it, at a family-wise error of 5 % among {len(kept)} differences. "
        f"{LOSSES[robust].title}: best by validation of the robust losses that know neither the order nor clean labels."
    )
    noisy, clean = (as_markdown(pd.DataFrame(rows)) for rows in tables.values())
    if labels == "right":  # noisy and clean validation are the same
        return f"{caption}\n\n{noisy}"
    return (
        f"{caption}\n\nChosen by noisy validation labels:\n\n{noisy}\n\n"
        f'<details markdown="1">\n<summary>Chosen by clean validation labels</summary>\n\n{clean}\n\n</details>'
    )


def noise_answer(folder: Path) -> str:
    """Return Markdown: for each kind of labels the best top-k loss minus the best robust loss, with a verdict.

    A second table leaves out top-k losses with forward correction, so that both sides have as many losses.
    """
    every, tables = studies(folder), []
    kept = kept_by_holm(folder)
    for ranking in (RANKING, SORTING):
        rows = []
        for labels, study in every.items():
            loss, other = study.best(ranking), study.best(ROBUST)
            gains = study.minus(loss, other)
            row = {"labels": LABELS[labels].title, "top-k loss": LOSSES[loss].title, "robust loss": LOSSES[other].title}
            for metric, name in METRICS.items():
                gain, star = interval(gains[metric]), "\\*" if kept[labels, loss, other, metric] else ""
                row[name] = f"{gain}{star} ({gain.verdict})"
            rows.append(row | {"seeds": str(len(gains))})
        tables.append(as_markdown(pd.DataFrame(rows)))
    caption = (
        f"Best of {len(RANKING)} top-k losses minus best of {len(ROBUST)} robust losses without order, each by noisy "
        "validation. Points of test accuracy, ± 95 % interval over paired seeds; \\*: kept by Holm's method, of "
        f"{len(kept)} differences."
    )
    summary = f"{len(SORTING)} and {len(ROBUST)} losses: without top-k losses that also correct labels"
    return (
        f'{caption}\n\n{tables[0]}\n\n<details markdown="1">\n<summary>{summary}</summary>\n\n{tables[1]}\n\n</details>'
    )
