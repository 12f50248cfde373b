"""The study of wrong labels: which trial validation chooses of each loss, and the tables.

Differences are of paired seeds. A star marks one that Holm's method keeps at a family-wise error of 5 %, among all
differences of the trials that noisy validation chose: of every kind of labels, to both baselines, top-1 and top-5.
"""

import functools
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from reporting import markdown
from reporting.compare import interval, p_value, paired
from reporting.frames import METRICS, read_runs
from studies.noise import BASELINE, CHOICES, LABELS, RANKING, ROBUST, SORTING, noise
from studies.tuning import TRIAL_SEEDS, Known, Tried, Tuned

ERROR = 0.05  # family-wise
NOISY = "noisy"


class Pair(NamedTuple):
    """Two losses, whose difference is taken."""

    loss: str
    other: str


class Results:
    """The trials and the final runs of one kind of labels.

    Args:
        folder: of the results.
        labels: a name in LABELS.

    Raises:
        ValueError: what was chosen has no final run.
    """

    def __init__(self, folder: Path, labels: str) -> None:
        study: Tuned = noise(labels)
        self.known = study.known(folder / f"{labels}_trials.csv")
        self.titles: dict[str, str] = {}
        self.tried: dict[str, list[Tried]] = {}
        self.finals: dict[tuple[str, str], pd.DataFrame] = {}
        finals = Known(folder / f"{labels}.csv", study.finals.commands.flags)
        runs = read_runs(folder / f"{labels}.csv")
        for candidate in study.space:
            tried = self.known.tried(study.trials_of(candidate, self.known))
            if not tried:
                continue
            self.titles[candidate.name] = candidate.title
            self.tried[candidate.name] = tried
            for choice, split in CHOICES.items():
                chosen = study.chosen(candidate, self.known, split)
                numbers = []
                if chosen is not None:
                    numbers = finals.numbers(chosen)
                if not numbers:
                    raise ValueError(f"{labels}: what {choice} validation chose of {candidate.name} has no final run")
                self.finals[candidate.name, choice] = runs.iloc[numbers]

    @property
    def losses(self) -> list[str]:
        return list(self.titles)

    def best(self, losses: tuple[str, ...]) -> str:
        """The loss that has the best trial by noisy validation."""
        scores = {}
        for loss in losses:
            for item in self.tried.get(loss, []):
                row = item.mean_score(TRIAL_SEEDS, CHOICES[NOISY])
                scores[loss] = max(row, scores.get(loss, row))
        return max(scores, key=scores.__getitem__)

    def minus(self, pair: Pair, choice: str = NOISY) -> pd.DataFrame:
        """The differences of two losses in points, a row per paired seed."""
        return paired(self.finals[pair.loss, choice], self.finals[pair.other, choice], list(METRICS))

    def pairs(self) -> list[Pair]:
        """Every loss and both baselines, each pair once."""
        robust = self.best(ROBUST)
        found = [Pair(loss, BASELINE) for loss in self.losses if loss != BASELINE]
        found += [Pair(loss, robust) for loss in self.losses if loss not in (BASELINE, robust)]
        return found


@functools.cache
def results_of(folder: Path) -> dict[str, Results]:
    """The results of each kind of labels whose final runs a folder has."""
    return {labels: Results(folder, labels) for labels in LABELS if (folder / f"{labels}.csv").is_file()}


@functools.cache
def kept_by_holm(folder: Path) -> dict[tuple[str, Pair, str], bool]:
    """Whether Holm's method keeps the difference of (labels, pair, metric), of all of a folder."""
    p_values = {}
    for labels, results in results_of(folder).items():
        for pair in results.pairs():
            differences = results.minus(pair)
            for metric in METRICS:
                p_values[labels, pair, metric] = p_value(differences[metric])
    ordered = sorted(p_values, key=p_values.__getitem__)
    kept = {}
    are_kept = True
    for place, key in enumerate(ordered):
        are_kept = are_kept and p_values[key] <= ERROR / (len(ordered) - place)
        kept[key] = are_kept
    return kept


def star(folder: Path, labels: str, pair: Pair, metric: str) -> str:
    """The mark of a difference that Holm's method keeps; that of a pair or of the pair the other way round."""
    kept = kept_by_holm(folder)
    if kept.get((labels, pair, metric)) or kept.get((labels, Pair(pair.other, pair.loss), metric)):
        return "\\*"
    return ""


def row_of(folder: Path, labels: str, loss: str, choice: str) -> dict[str, str]:
    """The accuracies of a loss, and its differences to the baselines."""
    results = results_of(folder)[labels]
    runs = results.finals[loss, choice]
    row = {"loss": results.titles[loss]}
    for metric, name in METRICS.items():
        row[name] = markdown.mean_std(runs[metric])
    if choice == NOISY:
        row |= noisy_gains(folder, labels, loss)
        return row
    gains = results.minus(Pair(loss, BASELINE), choice)
    to_noisy = paired(runs, results.finals[loss, NOISY], list(METRICS))
    for metric, name in METRICS.items():
        row[f"Δ {name}"] = ""
        if loss != BASELINE:
            row[f"Δ {name}"] = markdown.interval(interval(gains[metric]))
    for metric, name in METRICS.items():
        row[f"Δ {name} to noisy choice"] = markdown.interval(interval(to_noisy[metric]))
        if not to_noisy[metric].any():
            row[f"Δ {name} to noisy choice"] = "the same trial"
    return row


def noisy_gains(folder: Path, labels: str, loss: str) -> dict[str, str]:
    """The differences of a loss to both baselines as noisy validation chooses, with stars."""
    results = results_of(folder)[labels]
    robust = results.best(ROBUST)
    row = {}
    for other, ending in ((BASELINE, ""), (robust, f" to {results.titles[robust]}")):
        pair = Pair(loss, other)
        differences = results.minus(pair)
        for metric, name in METRICS.items():
            row[f"Δ {name}{ending}"] = ""
            if loss != other:
                text = markdown.interval(interval(differences[metric]))
                row[f"Δ {name}{ending}"] = text + star(folder, labels, pair, metric)
    return row


def noise_table(folder: Path, labels: str) -> str:
    """Markdown for a kind of labels: what noisy validation chose of each loss, then what clean did."""
    every = results_of(folder)
    if labels not in every:
        raise ValueError(f"{folder} has no {labels!r}, but {', '.join(every)}")
    results = every[labels]
    noisy = markdown.table([row_of(folder, labels, loss, NOISY) for loss in results.losses])
    if labels == "right":  # noisy and clean validation are the same
        return f"{caption(folder, labels)}\n\n{noisy}"
    clean = markdown.table([row_of(folder, labels, loss, "clean") for loss in results.losses])
    return (
        f"{caption(folder, labels)}\n\nChosen by noisy validation labels:\n\n{noisy}\n\n"
        f'<details markdown="1">\n<summary>Chosen by clean validation labels</summary>\n\n{clean}\n\n</details>'
    )


def caption(folder: Path, labels: str) -> str:
    results = results_of(folder)[labels]
    runs = results.finals[BASELINE, NOISY]
    first = runs.iloc[0]
    epochs = sorted({int(row["n_epochs"]) for row in results.known.rows})
    return (
        f"CIFAR-100, {LABELS[labels].title}: linear classifiers on {first['backbone'].partition(':')[2]} at "
        f"{first['resolution']:g} pixels, {first['train_images']:g} training and {first['valid_images']:g} validation "
        f"images, {' or '.join(map(str, epochs))} epochs of batches of {first['batch_size']:g}. "
        f"{max(map(len, results.tried.values()))} trials of each loss, seed 0; chosen by top-1 + top-5 of validation, "
        f"at the end. Test accuracy in %, ± standard deviation over {len(runs)} seeds. Δ: difference to cross-entropy, "
        "or to the loss that is named, in points, ± 95 % interval over paired seeds. \\*: Holm's method keeps it, at a "
        f"family-wise error of 5 % among {len(kept_by_holm(folder))} differences. "
        f"{results.titles[results.best(ROBUST)]}: best by validation of the robust losses that know neither the order "
        "nor clean labels."
    )


def noise_answer(folder: Path) -> str:
    """Markdown: for each kind of labels the best top-k loss minus the best robust loss, with a verdict.

    A second table leaves out top-k losses with forward correction, so that both sides have as many losses.
    """
    above = (
        f"Best of {len(RANKING)} top-k losses minus best of {len(ROBUST)} robust losses without order, each by noisy "
        "validation. Points of test accuracy, ± 95 % interval over paired seeds; \\*: kept by Holm's method, of "
        f"{len(kept_by_holm(folder))} differences."
    )
    summary = f"{len(SORTING)} and {len(ROBUST)} losses: without top-k losses that also correct labels"
    return (
        f'{above}\n\n{answer_table(folder, RANKING)}\n\n<details markdown="1">\n<summary>{summary}</summary>\n\n'
        f"{answer_table(folder, SORTING)}\n\n</details>"
    )


def answer_table(folder: Path, ranking: tuple[str, ...]) -> str:
    rows = []
    for labels, results in results_of(folder).items():
        pair = Pair(results.best(ranking), results.best(ROBUST))
        differences = results.minus(pair)
        row = {
            "labels": LABELS[labels].title,
            "top-k loss": results.titles[pair.loss],
            "robust loss": results.titles[pair.other],
        }
        for metric, name in METRICS.items():
            gain = interval(differences[metric])
            row[name] = f"{markdown.interval(gain)}{star(folder, labels, pair, metric)} ({gain.verdict})"
        rows.append(row | {"seeds": str(len(differences))})
    return markdown.table(rows)
