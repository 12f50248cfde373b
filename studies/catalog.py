"""All studies by name, and the study to which a results file belongs."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from experiments.common import settings
from experiments.common.rows import read_rows
from studies import beam_search, few_labels, from_scratch, noise, own_features, paper, tiny_imagenet
from studies.quickstart import quickstart
from studies.runs import Study
from studies.tuning import Tuned


def lazy(module: str, name: str) -> Callable[..., Study | Tuned]:
    """What makes a study, in a module that loads PyTorch, which other studies need not."""

    def make(*words: object, **options: object) -> Study | Tuned:
        made: Study | Tuned = getattr(importlib.import_module(f"studies.{module}"), name)(*words, **options)
        return made

    return make


# Studies of kinds of labels, or of draws.
DESIGNS = noise.DESIGNS_OF_LABELS | {few_labels.FEW_LABELS.name: few_labels.FEW_LABELS}


@dataclass(frozen=True)
class Entry:
    """A study for the command line.

    Attributes:
        make: makes the study of its data and options.
        data: what the data are, one word for each; a word that ends with "..." takes any number.
        options: flags of scripts/study.py that it takes.
        has_trials: whether validation chooses among trials, whose rows are found by the settings of the study.
        trains_together: whether a command trains several losses, each with its own flags.
    """

    make: Callable[..., Study | Tuned]
    data: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    has_trials: bool = False
    trains_together: bool = False


STUDIES = {
    "quickstart": Entry(quickstart),
    "table1": Entry(paper.table1, options=("short",)),
    "table4": Entry(paper.table4, options=("short",)),
    "table2_3_imagenet1k": Entry(paper.table2_3_imagenet1k),
    "table2_3_imagenet21k": Entry(paper.table2_3_imagenet21k),
    "table5": Entry(paper.table5),
    "strong": Entry(from_scratch.strong),
    "scratch": Entry(from_scratch.scratch),
    "noise_scratch": Entry(from_scratch.noise_scratch, data=("HUMAN",), has_trials=True),
    "implementation": Entry(from_scratch.implementation),
    "temperature": Entry(lazy("temperature", "temperature"), data=("FILE",), trains_together=True),
    "temperature_classes": Entry(
        lazy("temperature", "temperature_classes"), data=("OF_10", "OF_100", "OF_1000"), trains_together=True
    ),
    "temperature_training": Entry(lazy("temperature", "temperature_training")),
    "beam_search": Entry(beam_search.beam_search, options=("short",)),
    "knn": Entry(lazy("knn", "knn"), data=("DATA...",), options=("short",)),
    "heads": Entry(lazy("heads", "heads"), data=("FILE",), options=("name", "methods", "num_valid"), has_trials=True),
    "heads_more": Entry(
        lazy("heads", "heads_more"), data=("FILE",), options=("name", "methods", "num_valid"), has_trials=True
    ),
    "own_features": Entry(
        own_features.own_features, data=("FILE",), options=("name", "losses", "num_valid"), has_trials=True
    ),
    "tiny_imagenet": Entry(tiny_imagenet.tiny_imagenet, has_trials=True),
    "tiny_imagenet_more": Entry(tiny_imagenet.tiny_imagenet_more, has_trials=True),
    "tiny_imagenet_equal": Entry(tiny_imagenet.tiny_imagenet_equal, has_trials=True),
    "noise": Entry(
        noise.noise, data=("FILE",), options=("human", "labels", "losses", "folder", "choice"), has_trials=True
    ),
    "few_labels": Entry(few_labels.few_labels, data=("FILE",), options=("labels", "losses"), has_trials=True),
    "few_labels_scratch": Entry(few_labels.few_labels_scratch),
    "noise_draws": Entry(
        noise.noise_draws, data=("FILE",), options=("human", "labels", "losses", "folder"), has_trials=True
    ),
}
LISTED = (
    quickstart(),
    paper.table1(),
    paper.table1(short=True),
    paper.table4(),
    paper.table4(short=True),
    paper.table2_3_imagenet1k(),
    paper.table2_3_imagenet21k(),
    paper.table5(),
    from_scratch.strong(),
    from_scratch.scratch(),
    from_scratch.implementation(),
    few_labels.few_labels_scratch(),
    beam_search.beam_search(),
    beam_search.beam_search(short=True),
)


def study_of(file: str, folder: Path) -> Study | Tuned | None:
    """The study that writes a file of results/, such as noise/human.csv; None if none does.

    Args:
        folder: of the trials, where the study is made from them.
    """
    for study in LISTED:
        if f"results/{file}" in study.files:
            return study
    parent, _, name = file.rpartition("/")
    stem = name.removesuffix(".csv").removesuffix("_trials")
    if parent in DESIGNS and stem in DESIGNS[parent].kinds:
        return DESIGNS[parent].study(stem)
    if parent == own_features.NAME:
        return own_features.of_trials(stem, read_rows(folder / f"{stem}_trials.csv"))
    if stem == "noise_scratch":
        return from_scratch.noise_scratch("CIFAR-100_human.pt")
    if stem in ("tiny_imagenet", "tiny_imagenet_equal"):
        return STUDIES[stem].make()
    trials = folder / tiny_imagenet.TRIALS.name
    if stem == "tiny_imagenet_more" and trials.is_file():
        return tiny_imagenet.tiny_imagenet_more(trials)
    if stem == "tiny_imagenet_more" or parent:
        return None
    return heads_of(stem, folder)


def heads_of(stem: str, folder: Path) -> Tuned | None:
    """The study of linear classifiers with the methods and the validation split of its trials; None if it has none.

    Raises:
        ValueError: trials of several validation splits, of which each is a study.
    """
    path = folder / f"{stem}_trials.csv"
    rows = read_rows(path)
    if not rows or settings.script_of(rows[0]) != settings.HEADS:
        return None
    from studies.heads import heads, heads_more  # loads PyTorch, which other studies need not
    from topk_losses import METHODS

    methods = list(dict.fromkeys(row["method"] for row in rows))
    if not set(methods) <= METHODS.keys():
        return None
    num_valid, *others = dict.fromkeys(int(row["num_valid"] or 0) for row in rows)
    if others:
        raise ValueError(f"{path} has trials of --num_valid {num_valid} and {others[0]}: give each a file of its own")
    if not stem.endswith("_more"):
        return heads("FILE.pt", stem, methods, num_valid)
    base = stem.removesuffix("_more")
    around = folder / f"{base}_trials.csv"
    if not around.is_file():
        return None
    return heads_more("FILE.pt", base, methods, num_valid, around=around)
