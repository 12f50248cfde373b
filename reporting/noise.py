"""The study of wrong labels: which trial validation chooses of each loss, and the tables.

Differences are of paired seeds. A star marks one that Holm's method keeps at a family-wise error of 5 %, among all
differences of the trials that noisy validation chose: of every kind of labels, to both baselines, top-1 and top-5.
"""

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from reporting import markdown
from reporting.compare import holm, interval, p_value, paired
from reporting.frames import METRICS, read_runs
from studies.noise import BASELINE, LABELS, NOISE, RANKING, ROBUST, SORTING, Design
from studies.tuning import BETTER, WORSE, Known, Trial, Tried, Tuned

TIES = "Of cross-entropy's trials that tie the better in test is chosen, of another loss's the earlier."
NOISY = "noisy"


class Pair(NamedTuple):
    """Two losses, whose difference is taken."""

    loss: str
    other: str


class Results:
    """The trials and the final runs of one kind of labels, of each loss whose choices have all their final runs.

    Args:
        folder: of the results.
        labels: a kind of labels of the design.
    """

    def __init__(self, folder: Path, labels: str, design: Design = NOISE) -> None:
        study = design.study(labels)
        self.study = study
        self.choice = next(iter(design.choices))  # of tables
        self.known = study.known(folder / f"{labels}_trials.csv")
        self.rule = study.rule_of(self.known)
        self.titles: dict[str, str] = {}
        self.tried: dict[str, list[Tried]] = {}
        self.chosen: dict[tuple[str, str], Trial] = {}
        self.finals: dict[tuple[str, str], pd.DataFrame] = {}
        self.missing: list[str] = []
        self.unfinished: list[str] = []  # titles of losses that have trials, but no choice or not all its final runs
        finals = Finished(folder / f"{labels}.csv", study)
        for candidate in study.space:
            tried = study.tried(candidate, self.known)
            if not tried:
                continue
            found = {}
            for choice, split in design.choices.items():
                trial = self.rule.choose(tried, split, candidate.ties)
                runs = finals.of(trial)
                if trial is None or runs.empty:
                    self.missing.append(f"what {choice} validation chose of {candidate.name} has no final run")
                    continue
                self.chosen[candidate.name, choice] = trial
                found[candidate.name, choice] = runs
            if len(found) == len(design.choices):
                self.titles[candidate.name] = candidate.title
                self.tried[candidate.name] = tried
                self.finals |= found
            else:
                self.unfinished.append(candidate.title)

    @property
    def losses(self) -> list[str]:
        return list(self.titles)

    def best(self, losses: Sequence[str]) -> str:
        """The loss whose choice has the best validation, of the seeds that chose.

        Ties break against the claim that sorting helps: of equal losses the better in test, if none of them sorts, and
        else the worse.
        """
        split = self.study.finals.choices[self.choice]
        ties = WORSE
        if set(losses).isdisjoint(RANKING):
            ties = BETTER
        scores = {}
        for loss in losses:
            for item in self.tried.get(loss, []):
                if item.trial == self.chosen[loss, self.choice]:
                    scores[loss] = item.order(self.rule.deciding_seeds, split, ties)
        return max(scores, key=scores.__getitem__)

    def minus(self, pair: Pair, choice: str = "") -> pd.DataFrame:
        """The differences of two losses in points, a row per paired seed. choice: of the tables by default."""
        choice = choice or self.choice
        return paired(self.finals[pair.loss, choice], self.finals[pair.other, choice], list(METRICS))

    def pairs(self) -> list[Pair]:
        """Every loss and both baselines, each pair once."""
        robust = self.best(ROBUST)
        found = [Pair(loss, BASELINE) for loss in self.losses if loss != BASELINE]
        found += [Pair(loss, robust) for loss in self.losses if loss not in (BASELINE, robust)]
        return found


class Finished:
    """The final runs of a study. They are complete if each seed of the finals has one."""

    def __init__(self, path: Path, study: Tuned) -> None:
        self.known = Known(path, study.finals.commands.flags)
        self.num_seeds = len(study.finals.commands.seeds)
        self.runs = pd.DataFrame()
        if self.known.rows:
            self.runs = read_runs(path)

    def of(self, trial: Trial | None) -> pd.DataFrame:
        """The runs of a trial; none as long as they are not complete."""
        numbers = []
        if trial is not None:
            numbers = self.known.numbers(trial)
        if len(numbers) < self.num_seeds:
            return self.runs.iloc[:0]
        return self.runs.iloc[numbers]


@functools.cache
def results_of(folder: Path) -> dict[str, Results]:
    """The results of each kind of labels whose final runs a folder has.

    Raises:
        ValueError: what was chosen has no final run.
    """
    every = {}
    for labels in LABELS:
        if (folder / f"{labels}.csv").is_file():
            every[labels] = Results(folder, labels)
            if every[labels].missing:
                raise ValueError(f"{labels}: {every[labels].missing[0]}")
    return every


@functools.cache
def kept_by_holm(folder: Path) -> dict[tuple[str, Pair, str], bool]:
    """Whether Holm's method keeps the difference of (labels, pair, metric), of all of a folder."""
    p_values = {}
    for labels, results in results_of(folder).items():
        for pair in results.pairs():
            differences = results.minus(pair)
            for metric in METRICS:
                p_values[labels, pair, metric] = p_value(differences[metric])
    return holm(p_values)


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
        f"{markdown.details('Chosen by clean validation labels', clean)}"
    )


def either(numbers: Iterable[float]) -> str:
    """Different numbers in their order: "4, 12 or 24"."""
    *others, last = (f"{number:g}" for number in sorted(set(numbers)))
    return " or ".join(filter(None, [", ".join(others), last]))


def setup(every: Sequence[Results]) -> str:
    """What all runs of some kinds of labels share, and how trials are chosen, in sentences for captions."""
    first = every[0]
    runs = pd.concat([next(iter(results.finals.values())).iloc[:1] for results in every])
    run = runs.iloc[0]
    epochs: set[int] = set()
    for results in every:
        epochs.update(int(row["n_epochs"]) for row in results.known.rows)
    return (
        f"linear classifiers on {run['backbone'].partition(':')[2]} at {run['resolution']:g} pixels, "
        f"{either(runs['train_images'])} training and {either(runs['valid_images'])} validation images, "
        f"{either(epochs)} epochs of batches of {run['batch_size']:g}. {max(map(len, first.tried.values()))} trials of "
        f"each loss. {first.rule.text} {TIES} Validation is its top-1 + top-5 at the end of training."
    )


def caption(folder: Path, labels: str) -> str:
    results = results_of(folder)[labels]
    num_seeds = len(results.finals[BASELINE, NOISY])
    return (
        f"CIFAR-100, {LABELS[labels].title}: {setup([results])} Test accuracy in %, ± standard deviation over "
        f"{num_seeds} seeds. Δ: difference to cross-entropy, or to the loss that is named, in points, ± 95 % interval "
        "over paired seeds. \\*: Holm's method keeps it, at a family-wise error of 5 % among "
        f"{len(kept_by_holm(folder))} differences. {results.titles[results.best(ROBUST)]}: best by validation of the "
        "robust losses that know neither the order nor clean labels."
    )


def noise_answer(folder: Path) -> str:
    """Markdown: for each kind of labels the best top-k loss minus the best robust loss, with a verdict.

    A second table leaves out top-k losses with forward correction, so that both sides have as many losses.
    """
    above = (
        f"Best of {len(RANKING)} top-k losses minus best of {len(ROBUST)} robust losses that do not sort, each by "
        "noisy validation. Points of test accuracy, ± 95 % interval over paired seeds; \\*: kept by Holm's method, of "
        f"{len(kept_by_holm(folder))} differences. {rule_text(folder)} Of top-k losses that tie the worse in test is "
        "shown, of robust losses the better."
    )
    summary = f"{len(SORTING)} and {len(ROBUST)} losses: without top-k losses that also correct labels"
    folded = markdown.details(summary, answer_table(folder, SORTING))
    return f"{above}\n\n{answer_table(folder, RANKING)}\n\n{folded}"


def rule_text(folder: Path) -> str:
    """The rule of selection of the kinds of labels of a folder, each rule once."""
    return " ".join(dict.fromkeys(results.rule.text for results in results_of(folder).values()))


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
