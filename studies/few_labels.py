"""Few labels: linear classifiers with 5, 20 or 100 labels a class on average, and ResNet-18 on 5,000 images.

`few_labels` draws the images ten times. Each draw has 30 trials of each loss, as many images to validate as to train,
and a choice of its own.
"""

import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path

from studies.from_scratch import HALF_FLAG, SOFTMAX
from studies.noise import Design, Labels, space
from studies.runs import CIFAR100, RunList, Study
from studies.tuning import Candidate, Range, Rule

CLASSES = 100
NUM_DRAWS = 10
# Numbers of epochs that are 200, 800 or 2,400 steps of 100 images.
EPOCHS = {5: (40, 160, 480), 20: (10, 40, 120), 100: (2, 8, 24)}
# With 100 labels a class all choices of a first set of trials, on two draws, lay at the low edge of the learning rate,
# and those of the sorts at the high edge of the inverse temperature: the ranges end elsewhere there.
MANY = 100
LEARNING_RATES_OF_MANY = Range(0.0001, 0.01)
TEMPERATURES_OF_MANY = {"splitter_selection": Range(1 / 32, 4), "lapsum": Range(0.25 / 32, 1)}
LOSSES = ("cross_entropy", "label_smoothing", "ldr_kl", "splitter_selection", "lapsum")
DATA = Path("heads.pt")


@dataclass(frozen=True)
class FewLabels(Design):
    """Linear classifiers on a few images, drawn at random.

    Attributes:
        sizes: labels a class, on average, and number of the draw of each kind.
    """

    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)

    def flags(self, labels: str, data: Path) -> str:
        """The flags of the data and the evaluation; data: the file of embeddings."""
        per_class, draw = self.sizes[labels]
        images = CLASSES * per_class
        split = f"--limit_train {2 * images} --num_valid {images} --split_seed {draw}"
        return f"{split} --batch_size 100 --eval_freq 0 -d {shlex.quote(str(data))}"

    def title(self, labels: str) -> str:
        return f"Few labels: {self.kinds[labels].title}"

    def ranges_of(self, labels: str) -> dict[str, Range]:
        if self.sizes[labels][0] == MANY:
            return self.ranges | {"lr": LEARNING_RATES_OF_MANY}
        return self.ranges

    def candidates(self, labels: str, data: Path) -> tuple[Candidate, ...]:
        if self.sizes[labels][0] != MANY:
            return space(labels, data)
        found = []
        for item in space(labels, data):
            ranges = dict(item.ranges)
            if item.name in TEMPERATURES_OF_MANY:
                ranges["inverse_temperature"] = TEMPERATURES_OF_MANY[item.name]
            found.append(replace(item, ranges=ranges))
        return tuple(found)

    def epochs_of(self, labels: str) -> tuple[int, ...]:
        return EPOCHS[self.sizes[labels][0]]


def sizes_of_draws() -> dict[str, tuple[int, int]]:
    """Labels a class and draw of each kind, draw by draw."""
    sizes = {}
    for draw in range(NUM_DRAWS):
        for per_class in EPOCHS:
            sizes[f"labels_{per_class}_draw{draw}"] = (per_class, draw)
    return sizes


def kinds_of_draws() -> dict[str, Labels]:
    kinds = {}
    for name, (per_class, draw) in sizes_of_draws().items():
        group = f"{per_class} labels a class"
        kinds[name] = Labels(f"{group}, draw {draw}", "", group)
    return kinds


# Draws are what repeats here, so that three seeds choose among the finalists, and three more are the finals.
FEW_LABELS = FewLabels(
    name="few_labels",
    kinds=kinds_of_draws(),
    losses=LOSSES,
    epochs=(),
    ranges={"lr": Range(0.0003, 0.03), "weight_decay": Range(0.001, 100.0)},
    choices={"valid": "last_valid"},
    rule=Rule(seeds=(101, 102, 103)),
    seeds=(1, 2, 3),
    sizes=sizes_of_draws(),
)
few_labels = FEW_LABELS.study

SCRATCH = RunList(
    script=CIFAR100,
    results="results/few_labels_scratch.csv",
    seeds=(0, 1, 2),
    data="--limit_train 5000",
    losses=(
        f"{SOFTMAX} --lr .001",
        f"{SOFTMAX} --lr .001 --label_smoothing .1",
        "--method ldr_kl --p_k 1 0 0 0 0 --inverse_temperature 1 --margin 1 --lr .001",
        f"--method splitter_selection {HALF_FLAG} --inverse_temperature .1 --lr .001",
        f"--method lapsum {HALF_FLAG} --inverse_temperature .25 --lr .001",
    ),
    schedule="--n_epochs 100 --eval_freq 5 --precision bf16",
)


def few_labels_scratch() -> Study:
    """ResNet-18 on 5,000 images of CIFAR-100, 100 epochs at a constant rate and with a cosine schedule, 30 runs."""
    cosine = SCRATCH.but(schedule=f"{SCRATCH.schedule} --lr_schedule cosine")
    title = "From scratch on 5,000 images in 100 epochs, at a constant learning rate and with a cosine schedule"
    return Study("few_labels_scratch", title, (SCRATCH, cosine))
