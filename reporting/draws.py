"""Studies over draws of the data: differences of chosen losses, and where choices lie in their ranges.

Each draw goes through the whole study: trials, finalists, finals. A difference on a draw is the mean of its paired
seeds. Draws and losses that are not finished are left out.
"""

import functools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from reporting import markdown
from reporting.compare import Interval, interval, over_draws, over_seeds
from reporting.frames import METRICS
from reporting.noise import Pair, Results, setup
from studies.catalog import DESIGNS
from studies.noise import BASELINE, ROBUST, SORTING, Design
from studies.runs import parse_flags
from studies.tuning import Candidate, Grid, Range, Sobol, Trial, Tuned

PAIRS = (
    Pair("splitter_selection", "cross_entropy"),
    Pair("gce", "cross_entropy"),
    Pair("cross_entropy_16", "cross_entropy"),
    Pair("splitter_selection", "gce"),
    Pair("lapsum", "gce"),
    Pair("forward_estimated", "gce"),
    Pair("forward_uniform", "gce"),
    Pair("splitter_selection", "forward_uniform"),
)
PAIRS_OF_FEW_LABELS = (
    Pair("label_smoothing", BASELINE),
    Pair("ldr_kl", BASELINE),
    Pair("splitter_selection", BASELINE),
    Pair("lapsum", BASELINE),
    Pair("splitter_selection", "ldr_kl"),
    Pair("lapsum", "ldr_kl"),
)
NOTHING = "No draw is finished yet."
EDGE = 1 / 6  # share of a range at each end: about five of 30 trials
TOO_MANY = 0.25  # share of choices at one edge above which a range is to be widened there


def design_of(folder: Path) -> Design:
    """The design of a folder of results. Raises ValueError for a folder that is not named as one."""
    if folder.name not in DESIGNS:
        raise ValueError(f"the folder must be named as a study, {', '.join(DESIGNS)}; got {folder}")
    return DESIGNS[folder.name]


@functools.cache
def results_of(folder: Path) -> dict[str, Results]:
    """The results of every draw, in the order of the design."""
    design = design_of(folder)
    return {labels: Results(folder, labels, design) for labels in design.kinds}


def finished(folder: Path) -> dict[str, Results]:
    """The results of the draws on which a loss has all its final runs."""
    return {labels: results for labels, results in results_of(folder).items() if results.losses}


def about_unfinished(folder: Path) -> str:
    """A sentence that names the losses with trials but without all that follows them; "" if there are none."""
    kinds = design_of(folder).kinds
    parts = []
    for labels, results in results_of(folder).items():
        if results.unfinished:
            parts.append(f"{', '.join(results.unfinished)} ({kinds[labels].title})")
    if not parts:
        return ""
    return f" Left out, since not finished: {'; '.join(parts)}."


class Draws(NamedTuple):
    """The draws of a group, such as one noise, on which both sides of a difference are finished.

    Attributes:
        differences: of each draw by its name, in points, a row per paired seed.
    """

    group: str
    name: str
    differences: dict[str, pd.DataFrame]

    def values(self, metric: str) -> list[pd.Series]:
        return [differences[metric] for differences in self.differences.values()]


def by_group(folder: Path) -> dict[str, dict[str, Results]]:
    """The results of the draws of each group."""
    kinds = design_of(folder).kinds
    found: dict[str, dict[str, Results]] = {}
    for name, results in finished(folder).items():
        found.setdefault(kinds[name].group, {})[name] = results
    return found


def short_title(loss: str, results: Results) -> str:
    return results.titles[loss].replace("splitter selection network", "splitter")


def of_pair(group: str, draws: Mapping[str, Results], pair: Pair) -> Draws:
    """The differences of two losses."""
    differences = {}
    name = ""
    for labels, results in draws.items():
        if pair.loss in results.titles and pair.other in results.titles:
            differences[labels] = results.minus(pair)
            name = f"{short_title(pair.loss, results)} − {short_title(pair.other, results)}"
    return Draws(group, name, differences)


def family(losses: Sequence[str], draws: Mapping[str, Results]) -> list[str]:
    """The losses that are finished on every draw."""
    return [loss for loss in losses if all(loss in results.titles for results in draws.values())]


def of_best(group: str, draws: Mapping[str, Results]) -> Draws:
    """The best loss that sorts minus the best robust loss, each by the validation of its draw."""
    both = {}
    for labels, results in draws.items():
        if not results.titles.keys().isdisjoint(SORTING) and not results.titles.keys().isdisjoint(ROBUST):
            both[labels] = results
    ranking = family(SORTING, both)
    robust = family(ROBUST, both)
    differences = {}
    if ranking and robust:
        for labels, results in both.items():
            differences[labels] = results.minus(Pair(results.best(ranking), results.best(robust)))
    return Draws(group, f"best of {len(ranking)} top-k losses − best of {len(robust)} robust losses", differences)


def comparisons(folder: Path, pairs: Sequence[Pair], with_best: bool = False) -> list[Draws]:
    """The differences of pairs for each group that has a draw; with_best: also of the best losses."""
    found = []
    for group, draws in by_group(folder).items():
        found += [of_pair(group, draws, pair) for pair in pairs]
        if with_best:
            found.append(of_best(group, draws))
    return [item for item in found if item.differences]


def over_draws_cell(draws: Sequence[pd.Series]) -> str:
    """A mean difference with its interval over draws and a verdict; of one draw the mean alone."""
    gain = over_draws(draws)
    if len(draws) == 1:
        return f"{markdown.interval(gain)} (one draw)"
    return f"{markdown.interval(gain)} ({gain.verdict})"


def half(value: Interval) -> str:
    return f"± {markdown.fixed(value.half)}"


def answer_row(item: Draws) -> dict[str, str]:
    row = {"labels": item.group, "difference": item.name}
    for metric, name in METRICS.items():
        row[f"Δ {name}, over draws"] = over_draws_cell(item.values(metric))
        row[f"{name}, over seeds"] = half(over_seeds(item.values(metric)))
    seeds = {len(differences) for differences in item.differences.values()}
    return row | {"draws": str(len(item.differences)), "seeds": " or ".join(map(str, sorted(seeds)))}


def draw_rows(folder: Path, found: Sequence[Draws]) -> list[dict[str, str]]:
    """Each difference on each draw, with its interval over paired seeds."""
    kinds = design_of(folder).kinds
    rows = []
    for item in found:
        for name, differences in item.differences.items():
            row = {"labels": kinds[name].title, "difference": item.name}
            for metric, label in METRICS.items():
                gain = interval(differences[metric])
                row[f"Δ {label}"] = f"{markdown.interval(gain)} ({gain.verdict})"
            rows.append(row)
    return rows


def answer(folder: Path, about: str, found: Sequence[Draws]) -> str:
    """Markdown: differences for each group over its draws, then on each draw. about: a sentence for the caption."""
    if not found:
        return NOTHING
    above = (
        f"CIFAR-100, {setup(list(finished(folder).values()))} Differences of test accuracy in points. Over draws: the "
        "mean over draws, each the mean of its paired seeds, ± 95 % interval over draws, with a verdict. Over seeds: "
        f"the interval that leaves out the spread of draws. {about}{about_unfinished(folder)}"
    )
    rows = markdown.table([answer_row(item) for item in found])
    folded = markdown.details("Each draw, with intervals over seeds", markdown.table(draw_rows(folder, found)))
    return f"{above}\n\n{rows}\n\n{folded}"


def noise_draws_answer(folder: Path) -> str:
    """Markdown: the differences of losses with wrong labels over draws of each noise."""
    about = (
        "Top-k losses are half top-1 and half top-5 of 16 scores. The best of each side is the best by validation on "
        "its draw."
    )
    return answer(folder, about, comparisons(folder, PAIRS, with_best=True))


def few_labels_answer(folder: Path) -> str:
    """Markdown: the differences of losses with few labels a class over draws of the images."""
    about = (
        "Images are drawn at random: labels a class are means. As many images validate as train. Top-k losses are half "
        "top-1 and half top-5 of 16 scores."
    )
    return answer(folder, about, comparisons(folder, PAIRS_OF_FEW_LABELS))


class Place(NamedTuple):
    """The value of a setting that was chosen, and the edge of its range at which it lies, if any."""

    setting: str
    value: str
    edge: str


def edge_of(place: float) -> str:
    if place < EDGE:
        return "low"
    if place > 1 - EDGE:
        return "high"
    return ""


def places_of(trial: Trial, ranges: Mapping[str, Range], epochs: Sequence[int]) -> list[Place]:
    """Where each number of a trial lies in its range."""
    values = parse_flags(trial.shared)
    found = []
    for setting, numbers in ranges.items():
        value = values[setting]
        found.append(Place(setting, markdown.number(value), edge_of(numbers.place(value))))
    edge = {epochs[0]: "low", epochs[-1]: "high"}.get(trial.n_epochs, "")
    return [*found, Place("n_epochs", str(trial.n_epochs), edge)]


def places(study: Tuned, candidate: Candidate, trial: Trial) -> list[Place]:
    """Where each number of a trial that all candidates have, and each of its own ranges, lies in what a study tried."""
    first = study.rounds[0]
    if isinstance(first, Sobol):
        return places_of(trial, first.ranges | candidate.ranges, first.epochs)
    tried: dict[str, set[float]] = {}
    for part in study.rounds:
        if isinstance(part, Grid):
            for name, numbers in part.values.items():
                tried.setdefault(name, set()).update(number for number in numbers if number is not None)
            tried.setdefault("n_epochs", set()).add(part.n_epochs)
    values = parse_flags(trial.shared) | {"n_epochs": trial.n_epochs}
    return [place_among(name, values.get(name), numbers) for name, numbers in tried.items()]


def place_among(setting: str, value: float | None, tried: Collection[float]) -> Place:
    """The place of a value among those that were tried; one without neighbours lies at no edge."""
    if value is None:
        return Place(setting, "none", "")
    edge = ""
    if len(tried) > 1:
        edge = {min(tried): "low", max(tried): "high"}.get(value, "")
    return Place(setting, markdown.number(value), edge)


def choices(folder: Path) -> dict[tuple[str, str], list[Place]]:
    """The places of what validation chose, by the kind of labels and the loss."""
    design = design_of(folder)
    found = {}
    for labels, results in finished(folder).items():
        for candidate in results.study.space:
            if candidate.name in results.titles:
                trial = results.chosen[candidate.name, results.choice]
                ranges = design.ranges_of(labels) | candidate.ranges
                found[labels, candidate.name] = places_of(trial, ranges, design.epochs_of(labels))
    return found


def edge_row(setting: str, places: Sequence[Place]) -> dict[str, str]:
    """How many choices of a setting lie at an edge, and the edges with more than a quarter of them."""
    row = {"setting": setting, "choices": str(len(places))}
    crowded = []
    for edge in ("low", "high"):
        count = sum(place.edge == edge for place in places)
        row[f"at the {edge} edge"] = str(count)
        if count > TOO_MANY * len(places):
            crowded.append(edge)
    return row | {"more than a quarter": ", ".join(crowded)}


def edges(folder: Path) -> str:
    """Markdown: how many choices lie at an edge of the range of a setting, then every choice."""
    by_setting: dict[str, list[Place]] = {}
    rows = []
    design = design_of(folder)
    for (labels, loss), places in choices(folder).items():
        results = finished(folder)[labels]
        row = {"labels": design.kinds[labels].title, "loss": results.titles[loss]}
        for place in places:
            heading = markdown.heading(place.setting)
            row[heading] = " ".join(filter(None, [place.value, place.edge]))
            if place.setting not in (*design.ranges, "n_epochs"):
                heading = f"{heading} of {results.titles[loss]}"
            by_setting.setdefault(heading, []).append(place)
        rows.append(row)
    if not rows:
        return NOTHING
    above = (
        "Choices by validation. A number is at an edge if it lies in the outer sixth of its range, by its "
        "logarithm where trials have equal distances of it; a number of epochs if it is the least or the most."
    )
    counts = markdown.table([edge_row(setting, places) for setting, places in by_setting.items()])
    every = markdown.plain_table(pd.DataFrame(rows).fillna(""))
    return f"{above}\n\n{counts}\n\n{markdown.details('Every choice; low, high: at an edge', every)}"
