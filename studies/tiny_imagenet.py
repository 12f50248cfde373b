"""The rows of Table 3 on Tiny-ImageNet-200: nine trials of each, ten other seeds of what validation chooses.

Then six more trials of two losses, around the best of the first. `tiny_imagenet_equal` gives losses that do not sort as
many trials as a sort has with all its P_K.
"""

import itertools
import shlex
from collections.abc import Sequence
from pathlib import Path

from studies.runs import IMAGENET, as_flags
from studies.tuning import EARLIER, FINAL_SEEDS, ONE_SEED, Candidate, Finals, Grid, OnePass, Tuned

# The paper's P_K. Losses of a single k have the first; cross-entropy has label smoothing and weight decay to try.
P_KS = ("0. 0. 0. 0. 1.", ".5 0. 0. 0. .5", ".25 0. 0. 0. .75", ".1 0. 0. 0. .9", ".2 .2 .2 .2 .2")
INVERSE_TEMPERATURES = {  # a fourth of the default, the default, four times the default
    "neuralsort": (0.125, 0.5, 2.0),
    "softsort": (0.125, 0.5, 2.0),
    "sinkhorn_sort": (25.0, 100.0, 400.0),
    "splitter_selection": (0.25, 1.0, 4.0),
}
MORE = ("softmax_cross_entropy", "splitter_selection")
TRIALS = Path("results/tiny_imagenet_trials.csv")
FINALS = Path("results/tiny_imagenet.csv")
DATA = Path("data/downloads/embeddings/tiny_imagenet.pt")


def space() -> tuple[Candidate, ...]:
    """A candidate per row of the table: a method with one P_K."""
    candidates = [
        Candidate(
            "softmax_cross_entropy", "softmax_cross_entropy", "--method softmax_cross_entropy --p_k 1",
            options=("", "--label_smoothing 0.1", "--weight_decay 1.0"),
        ),
        Candidate(
            "smooth_hard_topk", f"smooth_hard_topk {P_KS[0]}", f"--method smooth_hard_topk --p_k {P_KS[0]}",
            options=("--inverse_temperature 0.25", "--inverse_temperature 1.0", "--inverse_temperature 4.0"),
        ),
    ]  # fmt: skip
    for method, temperatures in INVERSE_TEMPERATURES.items():
        options = tuple(f"--inverse_temperature {beta}" for beta in temperatures)
        for p_k in P_KS:
            name = f"{method} {p_k}"
            candidates.append(Candidate(name, name, f"--method {method} --p_k {p_k}", options=options))
    return tuple(candidates)


def commands(results: Path, data: Path) -> OnePass:
    evaluation = "--batch_size 500 --num_valid 2000 --eval_freq 100000"
    return OnePass(IMAGENET, results, f"{evaluation} --results {results} -d {shlex.quote(str(data))}")


def tiny_imagenet(data: Path = DATA, embeddings: str = "") -> Tuned:
    """Nine trials of each row: three settings of the loss, three learning rates."""
    return Tuned(
        name="tiny_imagenet",
        title="Table 3 on Tiny-ImageNet-200",
        space=space(),
        rounds=(Grid("trials", commands(TRIALS, data), 6, {"lr": (0.001, 0.002, 0.004)}),),
        finals=Finals(
            commands(FINALS, data).with_seeds(FINAL_SEEDS),
            {"valid": "valid"},
            together=False,
        ),
        embeddings=embeddings,
    )


def tiny_imagenet_more(trials: Path = TRIALS, data: Path = DATA, embeddings: str = "") -> Tuned:
    """Six more trials of two methods, 12 epochs, around the best of all their rows.

    trials: the rows of the first study. Raises ValueError if it lacks one of a method.
    """
    first = tiny_imagenet(data, embeddings)
    known = first.known(trials)
    candidates = []
    for method in MORE:
        options = []
        for candidate in first.space:
            if candidate.name.split()[0] == method:
                options += first.trials_of(candidate, known)
        if not known.are_done(options):
            raise ValueError(f"{trials}, {method}: trials not finished; run scripts/tiny_imagenet.sh first")
        best = ONE_SEED.finalists_of(known.tried(options), "valid", EARLIER)[0].trial
        candidates.append(Candidate(method, method, best.loss.replace(" --weight_decay 1.0", "")))
    results = Path("results/tiny_imagenet_more_trials.csv")
    grid = Grid("trials", commands(results, data), 12, {"lr": (0.0005, 0.001), "weight_decay": (1.0, 3.0, 10.0)})
    finals = commands(Path("results/tiny_imagenet_more.csv"), data).with_seeds(FINAL_SEEDS)
    return Tuned(
        name="tiny_imagenet_more",
        title="Table 3 on Tiny-ImageNet-200, six more trials of two losses",
        space=tuple(candidates),
        rounds=(grid,),
        finals=Finals(finals, {"valid": "valid"}, together=False),
        embeddings=embeddings,
    )


def combinations(**values: Sequence[float | str | None]) -> tuple[str, ...]:
    """The flags of all combinations of the values of some settings; None leaves one out."""
    options = []
    for chosen in itertools.product(*values.values()):
        options.append(as_flags(dict(zip(values, chosen))))
    return tuple(options)


def tiny_imagenet_equal(data: Path = DATA, embeddings: str = "") -> Tuned:
    """45 trials of each of five losses, 15 settings and three learning rates: two sorts, three that do not sort.

    The sorts are those that did not lose top-1 in `tiny_imagenet`; their trials are those of all their rows there.
    """
    decays = (None, 1.0, 3.0)
    options = {
        "softmax_cross_entropy": combinations(label_smoothing=(None, 0.05, 0.1, 0.2, 0.4), weight_decay=decays),
        "ldr_kl": combinations(inverse_temperature=(0.25, 0.5, 1.0, 2.0, 4.0), margin=(None, 1.0, 2.0)),
        "generalized_cross_entropy": combinations(q=(0.1, 0.3, 0.5, 0.7, 0.9), weight_decay=decays),
    }
    for sort in ("softsort", "splitter_selection"):
        options[sort] = combinations(p_k=P_KS, inverse_temperature=INVERSE_TEMPERATURES[sort])
    candidates = [Candidate(name, name, f"--method {name}", options=own) for name, own in options.items()]
    results = Path("results/tiny_imagenet_equal_trials.csv")
    finals = commands(Path("results/tiny_imagenet_equal.csv"), data).with_seeds(FINAL_SEEDS)
    return Tuned(
        name="tiny_imagenet_equal",
        title="Tiny-ImageNet-200, 45 trials of each of five losses",
        space=tuple(candidates),
        rounds=(Grid("trials", commands(results, data), 6, {"lr": (0.001, 0.002, 0.004)}),),
        finals=Finals(finals, {"valid": "valid"}),
        embeddings=embeddings,
    )
