"""The rows of heads.sh, on standard output: trials of each setting of a method, more of its best, then the finals.

    python -m scripts.sweeping.heads trials heads.pt --methods softmax_cross_entropy lapsum
    python -m scripts.sweeping.heads longer heads.pt     # after the trials, and
    python -m scripts.sweeping.heads finals heads.pt     # after both, by the rows of results/heads_trials.csv
    python -m scripts.sweeping.heads more heads.pt --results results/heads_more.csv  # and finals of that file

Each method has the same trials, cross-entropy included: every setting with four learning rates for 5 epochs, the best
one of them also for 22. Best is the highest sum of validation's top-1 and top-5, each at its best epoch: where test
accuracy is read, too. The finals are the best trial of each method with ten other seeds, which draw initialisation and
order. `more` are 30 trials of 22 epochs, again as many for each: with and without weight decay, three rates, and five
label smoothings of cross-entropy, five margins with their temperatures of ldr_kl, five temperatures of relaxed methods,
from the default down. Thirty besides are of a loss without order, bounded by five constants: lapsum at a temperature so
low that all scores are level. Its best one is among the finals, too.
"""

import argparse
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

import pandas as pd

from data.embeddings import load_embeddings
from topk_losses import METHODS
from topk_losses.methods import SINGLE_K, TOP1

RATES = (0.0005, 0.001, 0.002, 0.004)
SHORT, LONG = 5, 22  # epochs
SEEDS = range(1, 11)  # a trial's is 0
NUM_VALID = 5000  # rows, where the store has none that validate
P_KS = (".5 0 0 0 .5", ".2 .2 .2 .2 .2", "0 0 0 0 1")
SETTINGS = ("p_k", "m", "inverse_temperature", "label_smoothing", "weight_decay", "margin")
# Without a relaxed matrix: cross-entropy also with label smoothing, and with weight decay, in place of P_K and m.
OF_SOFTMAX = [{}, {"label_smoothing": 0.1}, {"weight_decay": 0.1}, {"weight_decay": 1.0}]
OF_LDR_KL = [{"inverse_temperature": beta, "margin": c} for beta, c in product((0.5, 1, 2), (0, 1)) if beta != 1 or c]
# Of `more`.
MORE_RATES, MORE_DECAYS = (0.00025, 0.0005, 0.001), ({}, {"weight_decay": 1.0})
MORE_SMOOTHING = (0, 0.1, 0.2, 0.4, 0.6)
MORE_MARGINS = ((0.25, 1), (0.5, 1), (0.5, 2), (1, 1), (1, 2))  # with their inverse temperatures
SOFTER = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)  # inverse temperatures, in units of the default
# -log(share softmax + (1 - share) 5 / 100): at this inverse temperature of lapsum each class has the mask k / n.
LEVEL = METHODS["lapsum"].inverse_temperature / 1024
SHARES = (0.95, 0.8, 0.5, 0.3, 0.15)


def settings_of(method: str) -> list[dict[str, object]]:
    """The settings of a method that are tried, as flags."""
    if method in TOP1:
        return [{"p_k": "1", **each} for each in (OF_LDR_KL if method == "ldr_kl" else OF_SOFTMAX)]
    spec = METHODS[method]
    temperatures = [{"inverse_temperature": spec.inverse_temperature}] if spec.inverse_temperature else [{}]
    temperatures += [{"inverse_temperature": "auto"}] if spec.spread else []
    if method in SINGLE_K:
        return [{"p_k": P_KS[2], **each} for each in temperatures]
    # Masks with zeros want the softmax's part. sinkhorn_sort's cost grows with the cube of m.
    p_ks = P_KS[:2] if getattr(spec.operator, "has_zeros", False) else P_KS
    scores = (16, 50 if method == "sinkhorn_sort" else 100)
    return [{"p_k": p_k, "m": m, **each} for p_k, m, each in product(p_ks, scores, temperatures)]


def more_of(method: str, chosen: Mapping[str, object]) -> list[dict[str, object]]:
    """Five settings around the best one, as flags."""
    if method == "ldr_kl":
        return [{"p_k": "1", "inverse_temperature": beta, "margin": c} for beta, c in MORE_MARGINS]
    if method in TOP1:
        return [{"p_k": "1", **({"label_smoothing": each} if each else {})} for each in MORE_SMOOTHING]
    kept, default = {name: chosen[name] for name in ("p_k", "m")}, METHODS[method].inverse_temperature
    softer = [{**kept, "inverse_temperature": default * by} for by in SOFTER]
    without = [{"p_k": f"{share} 0 0 0 {1 - share:g}", "m": 100, "inverse_temperature": LEVEL} for share in SHARES]
    return softer + without * (method == "lapsum")


def rows_of(stage: str, store: str, methods: list[str], finals: Path) -> Iterator[str]:
    """One command per method, whose heads read each batch once. finals: the file; trials lie beside it."""
    valid = "" if "valid" in load_embeddings(Path(store)).splits else f" --num_valid {NUM_VALID}"
    trials = finals.with_stem(f"{finals.stem}_trials")
    more = finals.stem.endswith("_more")
    for method in methods:
        if more and method in SINGLE_K:  # no relaxed matrix to be softer
            continue
        n_epochs, seeds, results = LONG, [0], trials
        if stage == "trials":
            n_epochs, tried = SHORT, [{**each, "lr": lr} for each in settings_of(method) for lr in RATES]
        elif stage == "longer":
            tried = [{**best(trials, method, f"n_epochs == {SHORT}")[0], "lr": lr} for lr in RATES]
        elif stage == "more":
            around = more_of(method, best(trials.with_stem(trials.stem.replace("_more", "")), method)[0])
            tried = [{**each, **of, "lr": lr} for each, of, lr in product(around, MORE_DECAYS, MORE_RATES)]
        else:
            chosen, n_epochs = best(trials, method, f"inverse_temperature != '{LEVEL}'")
            tried, seeds, results = [chosen], SEEDS, finals
            if more and method == "lapsum":
                tried += [best(trials, method, f"inverse_temperature == '{LEVEL}'")[0]]
        settings = (" ".join(f"--{name} {value}" for name, value in flags.items()) for flags in tried)
        yield command(
            [f"--method {method} {each}" for each in settings],
            f"--n_epochs {n_epochs} --batch_size 500{valid} --eval_freq 100000 --seeds "
            f"{' '.join(map(str, seeds))} --results {results} -d {shlex.quote(store)}",
        )


def command(heads: Sequence[str], flags: str) -> str:
    """A command that trains many heads, which read each batch once."""
    also = "".join(f' --also "{each}"' for each in heads[1:])
    return f".venv/bin/python experiments/finetune_imagenet.py {heads[0]}{also} {flags}"


def best(path: Path, method: str, among: str = "True") -> tuple[dict[str, object], int]:
    """The flags, with lr, and the epochs of the best trial of a method of which this query is true."""
    trials = pd.DataFrame(columns=["method"])
    if path.exists():
        trials = pd.read_csv(path, dtype={name: str for name in SETTINGS})
        trials = trials[(trials["method"] == method) & trials.eval(among)]
    if trials.empty:
        sys.exit(f"error: {path} has no trial of {method}: run heads.sh with it, without --more")
    row = trials.loc[(trials["valid_top1"] + trials["valid_top5"]).idxmax()]
    return {name: row[name] for name in (*SETTINGS, "lr") if pd.notna(row.get(name))}, int(row["n_epochs"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("trials", "longer", "finals", "more"))
    parser.add_argument("store", help="of embeddings")
    known = [name for name in METHODS if name != "imbalanced_noised_topk"]  # noised_topk where classes are alike
    parser.add_argument("--methods", nargs="+", choices=known, default=known)
    parser.add_argument("--results", type=Path, default=Path("results/heads.csv"))
    arguments = parser.parse_args()
    print("\n".join(rows_of(arguments.stage, arguments.store, arguments.methods, arguments.results)))
