"""Inverse temperatures: linear classifiers with each method, other numbers of classes, and networks from scratch."""

import shlex
from dataclasses import dataclass
from itertools import product

from studies.heads import most_scores, p_ks_of
from studies.runs import CIFAR100, IMAGENET, RunList, Study, as_flags, one_pass
from topk_losses import METHODS

FACTORS = (0.1, 0.25, 0.5, 1, 2, 4, 10)  # of inverse temperatures
MIDDLES = {"neuralsort": 0.5, "softsort": 0.5, "sinkhorn_sort": 100, "soft_topk": 10}  # of the others 1
SLOW = ("sinkhorn_sort", "perturbed_topk", "odd_even")
CLASSES = ("neuralsort", "softsort", "lml", "subset_topk", "splitter_selection")
SCORES = {10: (10,), 100: (16, 50, 100), 1000: (16, 50, 1000)}  # m by the number of classes
TRAINED = {"neuralsort": 0.5, "softsort": 0.5, "splitter_selection": 1}  # middles
TRAINED_P_KS = (".2 .2 .2 .2 .2", "0 0 0 0 1")
SOFTMAX = "--method softmax_cross_entropy --p_k 1. 0. 0. 0. 0."
SIX_EPOCHS = "--n_epochs 6 --lr_schedule cosine --precision bf16"


@dataclass(frozen=True)
class PassList:
    """Linear classifiers of several losses, each command a pass over the data.

    Attributes:
        results: the file that gets the rows.
        lines: the commands.
    """

    results: str
    lines: tuple[str, ...]

    def commands(self) -> list[str]:
        return list(self.lines)


def temperatures_of(method: str) -> list[str]:
    """The inverse temperatures that are tried with a method; [""] for one that has none."""
    default = METHODS[method].inverse_temperature
    if default is None:
        return [""]
    found = [f"{factor * MIDDLES.get(method, 1):g}" for factor in FACTORS]
    if METHODS[method].spread:
        found.append("auto")
        if method not in SLOW:
            found.append(f"{0.25 * default:g}:{4 * default:g}")
            found.append(f"{4 * default:g}:{0.25 * default:g}")
    return found


def temperature(data: str) -> Study:
    """Linear classifiers with each method over inverse temperatures, three seeds; DATA: embeddings of 100 classes."""
    results = "results/temperature.csv"
    flags = f"--seeds 0 1 2 --n_epochs 5 --results {results} -d {shlex.quote(data)}"
    lines = []
    for method in sorted(METHODS, key=lambda method: method in SLOW):
        for p_k in p_ks_of(method):
            losses = []
            for beta in temperatures_of(method):
                settings = {"method": method, "p_k": p_k, "m": most_scores(method), "inverse_temperature": beta}
                losses.append(as_flags(settings))
            lines.append(one_pass(IMAGENET, losses, flags))
    title = "Linear classifiers over inverse temperatures"
    return Study("temperature", title, (PassList(results, tuple(lines)),))


def classes(num_classes: int, data: str) -> PassList:
    results = f"results/temperature_classes_{num_classes}.csv"
    flags = f"--seeds 0 1 2 --n_epochs 5 -d {shlex.quote(data)} --results {results}"
    lines = []
    for method, m in product(CLASSES, SCORES[num_classes]):
        losses = []
        for beta in [*(f"{factor * METHODS[method].inverse_temperature:g}" for factor in FACTORS), "auto"]:
            losses.append(f"--method {method} --p_k .5 0 0 0 .5 --inverse_temperature {beta} --m {m}")
        lines.append(one_pass(IMAGENET, losses, flags))
    return PassList(results, tuple(lines))


def temperature_classes(data10: str, data100: str, data1000: str) -> Study:
    """How the best temperature moves with classes and m; DATA: embeddings of 10, 100 and 1000 classes."""
    lists = (classes(10, data10), classes(100, data100), classes(1000, data1000))
    return Study("temperature_classes", "Linear classifiers over inverse temperatures, 10 to 1000 classes", lists)


def temperature_training() -> Study:
    """Three methods from scratch over inverse temperatures, 6 epochs, two seeds, 122 runs."""
    losses = [f"{SOFTMAX} {SIX_EPOCHS}"]
    for p_k in TRAINED_P_KS:
        for factor in FACTORS:
            for method, middle in TRAINED.items():
                losses.append(trained(method, p_k, f"{factor * middle:g}"))
        for method in TRAINED:
            losses.append(trained(method, p_k, "auto"))
        for start, end in ((0.25, 4), (4, 0.25)):
            for method, middle in TRAINED.items():
                losses.append(trained(method, p_k, f"{start * middle:g}:{end * middle:g}"))
    runs = RunList(script=CIFAR100, results="results/temperature_training.csv", losses=tuple(losses))
    return Study("temperature_training", "From scratch over inverse temperatures, 6 epochs", (runs,))


def trained(method: str, p_k: str, temperature: str) -> str:
    return f"--method {method} --p_k {p_k} --inverse_temperature {temperature} {SIX_EPOCHS}"
