"""Losses compared on your own embeddings: 30 trials of each, a choice among the best, then ten other seeds."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from studies.few_labels import TEMPERATURES_OF_MANY
from studies.noise import FOLDER, space
from studies.runs import IMAGENET
from studies.tuning import FINAL_SEEDS, Candidate, Finals, OnePass, Range, Rule, Sobol, Tuned

NAME = "own_features"
LOSSES = ("cross_entropy", "label_smoothing", "gce", "ldr_kl", "splitter_selection", "lapsum")
LEFT_OUT = ("smooth_topk", "cross_entropy_16", "forward_uniform_16")  # of noise.space: they are for 16 classes or more
DATA = ("embeddings", "train_images", "num_valid")  # columns of rows that tell studies apart
NUM_TRIALS = 30
STEPS = (400, 1200, 2400)  # of trials, rounded up to whole epochs
LARGEST_BATCH = 500
MOST_VALID = 5000
LEAST_CLASSES = 3
MOST_K = 5
RANGES = {"lr": Range(0.0001, 0.03), "weight_decay": Range(0.001, 30.0)}
RULE = Rule(seeds=(101, 102, 103))


@dataclass(frozen=True)
class Size:
    """What the trials depend on.

    Attributes:
        num_train: rows that train.
        num_valid: rows of train that validate; 0 if the file has a split that does.
        num_classes: number of classes, at least 3.
    """

    num_train: int
    num_valid: int
    num_classes: int

    @property
    def batch_size(self) -> int:
        return max(min(self.num_train // 20, LARGEST_BATCH), 1)

    @property
    def epochs(self) -> tuple[int, ...]:
        steps_per_epoch = self.num_train // self.batch_size
        return tuple(-(-steps // steps_per_epoch) for steps in STEPS)

    @property
    def k(self) -> int:
        """The second k of the top-k losses: 5, or about a third of few classes."""
        return max(min(self.num_classes // 3, MOST_K), 2)


def num_valid_of(num_rows: int) -> int:
    """The number of rows that validate unless one is given: a fifth, at most 5,000."""
    return max(min(num_rows // 5, MOST_VALID), 1)


def candidates(k: int) -> tuple[Candidate, ...]:
    """The losses that may be compared. k: the second one of the top-k losses."""
    zeros = "0 " * (k - 2)
    found = []
    for item in space("right", FOLDER, top_k=f"--p_k .5 {zeros}.5 --m 16"):
        if item.name in LEFT_OUT:
            continue
        ranges = dict(item.ranges)
        if item.name in TEMPERATURES_OF_MANY:
            ranges["inverse_temperature"] = TEMPERATURES_OF_MANY[item.name]
        found.append(replace(item, ranges=ranges))
    return tuple(found)


KNOWN = tuple(item.name for item in candidates(MOST_K))


def own_features(
    data: str, size: Size, name: str = "own", losses: Sequence[str] = LOSSES, embeddings: str = ""
) -> Tuned:
    """The study of a file of embeddings.

    Args:
        data: the file.
        name: of the files in results/own_features/.
        losses: of KNOWN.
        embeddings: name of the embeddings by content.
    """
    trials = Path("results", NAME, f"{name}_trials.csv")
    finals = Path("results", NAME, f"{name}.csv")
    split = ""
    if size.num_valid:
        split = f"--num_valid {size.num_valid} "
    flags = f"{split}--batch_size {size.batch_size} --eval_freq 0 -d {shlex.quote(data)}"
    sobol = Sobol(
        name="trials",
        commands=OnePass(IMAGENET, trials, f"{flags} --results {shlex.quote(str(trials))}"),
        number=NUM_TRIALS,
        epochs=size.epochs,
        ranges=RANGES,
    )
    last = OnePass(IMAGENET, finals, f"{flags} --results {shlex.quote(str(finals))}", FINAL_SEEDS)
    return Tuned(
        name=f"{NAME}_{name}",
        title="Linear classifiers on your own embeddings",
        space=tuple(item for item in candidates(size.k) if item.name in losses),
        rounds=(sobol,),
        finals=Finals(last, {"valid": "last_valid"}, rule=RULE),
        embeddings=embeddings,
    )


def of_trials(name: str, rows: Sequence[Mapping[str, str]]) -> Tuned | None:
    """The study of a file of trials, with all losses that it may have; None without rows.

    Raises:
        ValueError: trials of several embeddings or numbers of rows, of which each is a study.
    """
    if not rows:
        return None
    data = {tuple(row[column] for column in DATA) for row in rows}
    if len(data) > 1:
        raise ValueError(
            f"results/{NAME}/{name}_trials.csv has trials of several {', '.join(DATA)}: give each a --name"
        )
    first = rows[0]
    size = Size(int(first["train_images"]), int(first["num_valid"]), int(first["num_classes"]))
    return own_features("FILE.pt", size, name, losses=KNOWN, embeddings=first["embeddings"])
