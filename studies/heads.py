"""Linear classifiers on embeddings with chosen settings: trials of 5 epochs, the best again with 22, ten other seeds.

`heads_more` has 30 trials around the best of each loss, and 30 of forward correction.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

from studies.runs import IMAGENET, as_flags
from studies.tuning import FINAL_SEEDS, Candidate, Finals, Grid, Longer, OnePass, Tuned
from topk_losses import METHODS
from topk_losses.methods import SINGLE_K, TOP1

DEFAULT = ("softmax_cross_entropy", "ldr_kl", "lapsum", "splitter_selection")
KNOWN = tuple(name for name in METHODS if name != "imbalanced_noised_topk")  # noised_topk where classes are alike
LEARNING_RATES = (0.0005, 0.001, 0.002, 0.004)
HALF = ".5 0 0 0 .5"
EVEN = ".2 .2 .2 .2 .2"
FIFTH = "0 0 0 0 1"
SOFTER = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)  # inverse temperatures, in units of the default
# -log(share softmax + (1 - share) 5 / 100), forward correction, is lapsum with the indicator k / n for each class.
LEVEL = METHODS["lapsum"].inverse_temperature / 1024
SHARES = (0.95, 0.8, 0.5, 0.3, 0.15)
CROSS_ENTROPY = ("", "--label_smoothing 0.1", "--weight_decay 0.1", "--weight_decay 1.0")
LDR_KL = ((0.5, 0), (0.5, 1), (1, 1), (2, 0), (2, 1))  # inverse temperatures and margins
MORE_LDR_KL = ((0.25, 1), (0.5, 1), (0.5, 2), (1, 1), (1, 2))


def p_ks_of(method: str) -> tuple[str, ...]:
    """The P_K that studies of linear classifiers try with a method."""
    if method in TOP1:
        return ("1",)
    if method in SINGLE_K:
        return (FIFTH,)
    if getattr(METHODS[method].operator, "has_zeros", False):  # indicators with zeros need the softmax's part
        return (HALF, EVEN)
    return (HALF, EVEN, FIFTH)


def most_scores(method: str) -> int:
    """The largest m that these studies try: the time of sinkhorn_sort grows with its cube."""
    if method == "sinkhorn_sort":
        return 50
    return 100


def ldr_kl(pairs: Sequence[tuple[float, float]]) -> tuple[str, ...]:
    return tuple(f"--inverse_temperature {beta} --margin {margin}" for beta, margin in pairs)


def candidate(method: str) -> Candidate:
    """The settings of a method that are tried first."""
    flags = f"--method {method}"
    if method == "ldr_kl":
        return Candidate(method, method, f"{flags} --p_k 1", options=ldr_kl(LDR_KL))
    if method in TOP1:
        return Candidate(method, method, f"{flags} --p_k 1", options=CROSS_ENTROPY)
    temperatures = [METHODS[method].inverse_temperature]
    if METHODS[method].spread:
        temperatures.append("auto")
    scores = [16, most_scores(method)]
    if method in SINGLE_K:
        scores = [None]
    options = []
    for p_k in p_ks_of(method):
        for m in scores:
            for beta in temperatures:
                options.append(as_flags({"p_k": p_k, "m": m, "inverse_temperature": beta}))
    return Candidate(method, method, flags, options=tuple(options))


def commands(results: Path, data: str, num_valid: int) -> OnePass:
    evaluation = as_flags({"batch_size": 500, "num_valid": num_valid or None, "eval_freq": 100000})
    flags = f"{evaluation} --results {shlex.quote(str(results))} -d {shlex.quote(data)}"
    return OnePass(IMAGENET, results, flags)


def heads(
    data: str, name: str = "heads", methods: Sequence[str] = DEFAULT, num_valid: int = 5000, embeddings: str = ""
) -> Tuned:
    """Trials of each method, the best with more epochs, ten other seeds. name: of the files in results/."""
    results = Path("results")
    trials = commands(results / f"{name}_trials.csv", data, num_valid)
    first = Grid("trials", trials, 5, {"lr": LEARNING_RATES})
    longer = Longer("longer", trials, 22, {"lr": LEARNING_RATES}, earlier=first)
    finals = commands(results / f"{name}.csv", data, num_valid).with_seeds(FINAL_SEEDS)
    return Tuned(
        name=name,
        title="Linear classifiers with chosen settings",
        space=tuple(candidate(method) for method in methods),
        rounds=(first, longer),
        finals=Finals(finals, {"valid": "valid"}, together=False),
        embeddings=embeddings,
    )


def more_candidates(method: str, best: str) -> list[Candidate]:
    """Five settings of a method around the best one; of lapsum also five of forward correction.

    best: flags of the best trial.
    """
    flags = f"--method {method}"
    if method == "ldr_kl":
        return [Candidate(method, method, f"{flags} --p_k 1", options=ldr_kl(MORE_LDR_KL))]
    if method in TOP1:
        options = tuple(as_flags({"label_smoothing": share}) for share in (None, 0.1, 0.2, 0.4, 0.6))
        return [Candidate(method, method, f"{flags} --p_k 1", options=options)]
    softer = []
    for factor in SOFTER:
        softer.append(f"--inverse_temperature {METHODS[method].inverse_temperature * factor}")
    without_temperature = best.partition(" --inverse_temperature")[0]
    found = [Candidate(method, method, without_temperature, options=tuple(softer))]
    if method == "lapsum":
        level = []
        for share in SHARES:
            level.append(f"--p_k {share} 0 0 0 {1 - share:g} --m 100 --inverse_temperature {LEVEL}")
        found.append(Candidate("forward_correction", "forward correction by LapSum", flags, options=tuple(level)))
    return found


def heads_more(
    data: str,
    name: str = "heads",
    methods: Sequence[str] = DEFAULT,
    num_valid: int = 5000,
    embeddings: str = "",
    around: Path | None = None,
) -> Tuned:
    """30 trials around the best of each relaxed loss, of cross-entropy and of LDR-KL, then ten other seeds.

    around: the trials of `heads` (default: results/NAME_trials.csv). Raises ValueError if nothing is chosen of one.
    """
    around = around or Path(f"results/{name}_trials.csv")
    first = heads(data, name, methods, num_valid, embeddings)
    known = first.known(around)
    candidates = []
    for item in first.space:
        if item.name in SINGLE_K:
            continue  # a loss of a single k has no relaxed matrix to be softer
        best = first.chosen(item, known, "valid")
        if best is None:
            lacking = first.lacking(item, known)
            raise ValueError(f"{around}, {item.name}: {lacking}; run scripts/heads.sh first")
        candidates += more_candidates(item.name, best.loss)
    results = Path("results")
    trials = commands(results / f"{name}_more_trials.csv", data, num_valid)
    finals = commands(results / f"{name}_more.csv", data, num_valid).with_seeds(FINAL_SEEDS)
    return Tuned(
        name=f"{name}_more",
        title="Linear classifiers with chosen settings, 30 more trials",
        space=tuple(candidates),
        rounds=(Grid("trials", trials, 22, {"weight_decay": (None, 1.0), "lr": (0.00025, 0.0005, 0.001)}),),
        finals=Finals(finals, {"valid": "valid"}, together=False),
        embeddings=embeddings,
    )
