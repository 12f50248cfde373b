"""Run the runs of a study, each a command line, by scripts/launch.py.

    scripts/table1.sh --short --jobs 2       # --short: 16 epochs, cosine schedule, bf16; also table4, beam_search, knn
    scripts/knn.sh digits own.pt             # data first, where a study takes some

Each function returns the command lines of its study, which write results/STUDY.csv.
"""

import argparse
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import product, takewhile
from pathlib import Path

import pandas as pd

from experiments.common.settings import OWN_SETTINGS
from scripts.launch import launch
from scripts.reporting.runs import best_trial, read_runs
from topk_losses import METHODS, RELAXATIONS
from topk_losses.methods import TOP1

TRAIN, HEADS, HEADS21K, KNN, BEAM = (
    f".venv/bin/python experiments/{name}.py"
    for name in ("train_cifar100", "finetune_imagenet", "finetune_imagenet21k", "train_knn", "train_beam_search")
)
SOFTMAX = "softmax_cross_entropy --p_k 1. 0. 0. 0. 0."
K5, HALF, EVEN = "0. 0. 0. 0. 1.", ".5 0. 0. 0. .5", ".2 .2 .2 .2 .2"
P_KS = (".5 0 0 0 .5", ".2 .2 .2 .2 .2", "0 0 0 0 1")
PAPER_P_KS = (K5, HALF, ".25 0. 0. 0. .75", ".1 0. 0. 0. .9", EVEN)
SPLITTER = "splitter_selection --distribution logistic_phi --inverse_temperature {} --art_lambda .5"
COSINE = " --n_epochs {} --lr_schedule cosine --precision bf16"
DATASETS = ("mnist", "fashion_mnist", "cifar10", "cifar100", "digits")
FACTORS = (0.1, 0.25, 0.5, 1, 2, 4, 10)  # of inverse temperatures
# What a trial of a linear classifier chooses.
CHOSEN = ("method", "p_k", "m", "inverse_temperature", *OWN_SETTINGS, "mixup", "noise_matrix", "weight_decay", "lr")


def over_seeds(command, name, losses, seeds=(0, 1), more=""):
    """The command with each loss, seed by seed, for results/NAME.csv."""
    return [f"{command} {loss} --seed {seed} --results results/{name}.csv{more}" for seed in seeds for loss in losses]


def as_flags(settings: Mapping[str, object]) -> str:
    """Return settings as flags of a command, without those that are empty. p_k is words, any other value is one."""
    given = {name: str(value) for name, value in settings.items() if value != ""}
    return " ".join(f"--{name} {value if name == 'p_k' else shlex.quote(value)}" for name, value in given.items())


def one_pass(heads: Iterable[str], flags: str) -> str:
    """Return the command that trains many linear classifiers in one pass over the data."""
    first, *others = heads
    return " ".join([HEADS, first, *(f'--also "{head}"' for head in others), flags])


def finals_of(trials: Iterable[pd.Series], flags: str) -> list[str]:
    """Return a command for each number of epochs: ten other seeds of the classifiers of these trials."""
    heads: dict[int, list[str]] = {}
    for trial in trials:
        heads.setdefault(int(trial["n_epochs"]), []).append(as_flags(trial.reindex(CHOSEN, fill_value="")))
    return [
        one_pass(dict.fromkeys(chosen), f"--n_epochs {n_epochs} --seeds 1 2 3 4 5 6 7 8 9 10 {flags}")
        for n_epochs, chosen in sorted(heads.items())
    ]


def p_ks_of(method: str) -> Sequence[str]:
    """Return the P_K that studies of linear classifiers try with a method."""
    if method not in RELAXATIONS:
        return ["1"] if method in TOP1 else P_KS[2:]
    # Indicators with zeros need the softmax's part.
    return P_KS[:2] if getattr(METHODS[method].operator, "has_zeros", False) else P_KS


def most_scores(method: str) -> int:
    """Return the largest m that these studies try: the time of sinkhorn_sort grows with its cube."""
    return 50 if method == "sinkhorn_sort" else 100


def published(command, name, p_ks, sorts, networks, smooth=(K5,), seeds=(0, 1), more=""):
    """Softmax cross-entropy, the smooth top-k loss and four relaxed methods at the paper's settings."""
    relaxed = [f"neuralsort --inverse_temperature {sorts}", f"softsort --inverse_temperature {sorts}"]
    relaxed += ["sinkhorn_sort", SPLITTER.format(networks)]
    losses = [SOFTMAX, *(f"smooth_hard_topk --inverse_temperature 1. --p_k {p_k}" for p_k in smooth)]
    losses += [f"{method} --p_k {p_k}" for p_k in p_ks for method in relaxed]
    return over_seeds(f"{command} --method", name, losses, seeds, more)


def table1(*, short: bool = False) -> list[str]:
    """Table 1: ResNet-18 from scratch on CIFAR-100, two seeds; --short: 16 epochs, three seeds."""
    how = {"name": "table1_short", "seeds": (0, 1, 2), "more": COSINE.format(16)} if short else {"name": "table1"}
    return published(TRAIN, p_ks=[K5, EVEN], sorts=0.0625, networks=".5", **how)


def table4(*, short: bool = False) -> list[str]:
    """Table 4: as Table 1, each method over six P_K; of P_K = 1 0 0 0 0 softmax cross-entropy stands for all."""
    how = {"name": "table4_short", "more": COSINE.format(16)} if short else {"name": "table4"}
    return published(TRAIN, p_ks=PAPER_P_KS, sorts=0.0625, networks=".5", smooth=("1. 0. 0. 0. 0.", K5), **how)


def table2_3_imagenet1k() -> list[str]:
    """Tables 2 and 3, ImageNet-1K: a linear classifier on published embeddings (11 GB), two seeds."""
    command = f"{HEADS} -d wsl-32x48d-320 --m 16 --nloglr 4.5"
    return published(command, "table2_3_imagenet1k", [K5, HALF], ".5", "1.")


def table2_3_imagenet21k() -> list[str]:
    """Tables 2 and 3, ImageNet-21K-P: a linear classifier on published embeddings (50 GB), two seeds."""
    command = f"{HEADS21K} -d wsl-32x48d-224-21k --m 50 --nloglr 4 --n_epochs 40"
    return published(command, "table2_3_imagenet21k", [K5, HALF], ".5", "1.")


def table5() -> list[str]:
    """Table 5, our lines, two seeds (11 and 14 GB). The published P_K of SinkhornSort is not known."""
    quarter, k_even = "--p_k .25 0. 0. 0. .75", f"--p_k {EVEN}"
    large = f"splitter_selection --distribution logistic --inverse_temperature .5 {quarter}"
    resnext = [SOFTMAX, f"sinkhorn_sort {k_even}", f"{SPLITTER.format('1.')} {k_even}"]
    losses = [f"-d wsl-32x48d-320 --method {loss}" for loss in resnext]
    losses += [f"-d efficientnet-l2-800 --method {loss}" for loss in (SOFTMAX, f"sinkhorn_sort {quarter}", large)]
    return over_seeds(f"{HEADS} --m 16 --nloglr 4.5", "table5", losses)


def strong() -> list[str]:
    """Three losses of Table 1 with 36 epochs, weight decay and averaged weights: not the paper's protocol."""
    losses = [SOFTMAX, f"{SPLITTER.format('.5')} --p_k {EVEN}", f"softsort --inverse_temperature 0.0625 --p_k {EVEN}"]
    return over_seeds(f"{TRAIN} --method", "strong", losses, more=f"{COSINE.format(36)} --weight_decay .5 --ema .999")


def scratch() -> list[str]:
    """Table 1's network in 16 epochs with other settings than the published ones, and with wrong labels."""
    half, softmax = "--p_k .5 0 0 0 .5 --inverse_temperature", f"{SOFTMAX} --lr"
    network, lapsum, df, softsort = (f"{m} {half}" for m in ("splitter_selection", "lapsum", "df_topk", "softsort"))
    tried = [f"{network} .5", f"{network} .1", f"{lapsum} .1", f"{network} .25", f"{lapsum} .25", f"{network} .05"]
    tried += [f"{df} .1", f"{df} .25", f"{softsort} 1", f"{softsort} 2", f"{softmax} .001"]
    tried += [f"{softmax} .001 --label_smoothing .1", f"{softmax} .0005", f"{softmax} .002"]
    best = [f"{softmax} .001", f"{network} .1", f"{df} .1", f"{softsort} 1", f"{lapsum} .25"]
    noisy = [f"{softmax} .001", f"{network} .1", f"{softmax} .001 --label_smoothing .1", f"{lapsum} .1"]
    groups = {"0": tried, "1": best, "2": best, "0 --label_noise .2": [*noisy, f"{network} .05", f"{network} .025"]}
    command = f"{TRAIN} --results results/scratch.csv{COSINE.format(16)} --method"
    return [f"{command} {loss} --seed {seed}" for seed, losses in groups.items() for loss in losses]


def noise_scratch(human: str, results: str = "results/noise_scratch.csv") -> list[str]:
    """Table 1's network in 16 epochs with labels by people; HUMAN: CIFAR-100_human.pt of CIFAR-100N.

    Seed 0 of every setting, seeds 1 and 2 of cross-entropy with and without label smoothing. Once seed 0 is in the
    file: also seeds 1 and 2 of what the noisy validation labels choose for each loss, by top-1 + top-5 at the end.
    """
    half, softmax = "--p_k .5 0 0 0 .5 --inverse_temperature", "--method softmax_cross_entropy --p_k 1 0 0 0 0"
    losses = [softmax, f"{softmax} --label_smoothing 0.1"]
    losses += [f"--method forward_correction --noise_rate {rate}" for rate in (0.2, 0.4, 0.6)]
    losses += [f"--method generalized_cross_entropy --q {q}" for q in (0.7, 0.3)]
    losses += [f"--method splitter_selection {half} {beta}" for beta in (0.025, 0.1)]
    losses += [f"--method lapsum {half} 0.1"]
    runs, again = [(loss, 0) for loss in losses], dict.fromkeys(losses[:2])
    trials = read_runs(Path(results), ["seed=0"]) if Path(results).is_file() else pd.DataFrame()
    if len(trials) == len(losses):
        names = ["method", "p_k", "inverse_temperature", "label_smoothing", "noise_rate", "q"]
        best = [best_trial(tried, "last_valid") for _, tried in trials.groupby("method")]
        again |= dict.fromkeys(as_flags(trial.reindex(names, fill_value="")) for trial in best)
    runs += [(loss, seed) for seed in (1, 2) for loss in again]
    files = f"--noisy_labels {human} --results {results}"
    return [f"{TRAIN} {loss} --seed {seed} {files}{COSINE.format(16)}" for loss, seed in runs]


def implementation() -> list[str]:
    """Five epochs of the splitter selection network by the official loss, in mode sm and in fp32, two seeds."""
    settings = ("bf16", "bf16 --implementation difftopk", "bf16 --top1_mode sm", "fp32")
    command = f"{TRAIN} --method splitter_selection --p_k {EVEN} --n_epochs 5 --precision"
    return over_seeds(command, "implementation", settings)


def temperature(data: str) -> list[str]:
    """Linear classifiers with each method over inverse temperatures, three seeds; DATA: embeddings of 100 classes."""
    middles = {"neuralsort": 0.5, "softsort": 0.5, "sinkhorn_sort": 100, "soft_topk": 10}  # of the others 1
    slow, runs = ("sinkhorn_sort", "perturbed_topk", "odd_even"), []  # slow: last
    for method in sorted(METHODS, key=lambda method: method in slow):
        default, follows = METHODS[method].inverse_temperature, METHODS[method].spread
        betas = [f"{factor * middles.get(method, 1):g}" for factor in FACTORS] + (["auto"] if follows else [])
        if follows and method not in slow:
            betas += [f"{0.25 * default:g}:{4 * default:g}", f"{4 * default:g}:{0.25 * default:g}"]
        for p_k in p_ks_of(method):
            settings = {"method": method, "p_k": p_k, "m": most_scores(method)}
            heads = [as_flags(settings | {"inverse_temperature": beta}) for beta in (betas if default else [""])]
            runs.append(one_pass(heads, f"--seeds 0 1 2 --n_epochs 5 --results results/temperature.csv -d {data}"))
    return runs


def temperature_classes(data10: str, data100: str, data1000: str) -> list[str]:
    """How the best temperature moves with classes and m; DATA: embeddings of 10, 100 and 1000 classes."""
    runs, sets = [], {10: (data10, (10,)), 100: (data100, (16, 50, 100)), 1000: (data1000, (16, 50, 1000))}
    for num_classes, (data, scores) in sets.items():
        flags = f"--seeds 0 1 2 --n_epochs 5 -d {data} --results results/temperature_classes_{num_classes}.csv"
        for method, m in product(("neuralsort", "softsort", "lml", "subset_topk", "splitter_selection"), scores):
            head = f"--method {method} --p_k .5 0 0 0 .5 --inverse_temperature {{}} --m {m}"
            betas = [f"{factor * METHODS[method].inverse_temperature:g}" for factor in FACTORS] + ["auto"]
            runs.append(one_pass(map(head.format, betas), flags))
    return runs


def temperature_training() -> list[str]:
    """Three methods from scratch over inverse temperatures, 6 epochs, two seeds."""
    losses, factors = [SOFTMAX], [*((factor,) for factor in FACTORS), ("auto",), (0.25, 4), (4, 0.25)]
    middles = (("neuralsort", 0.5), ("softsort", 0.5), ("splitter_selection", 1))
    for p_k, ends, (method, middle) in product((EVEN, "0 0 0 0 1"), factors, middles):
        beta = ":".join(factor if factor == "auto" else f"{factor * middle:g}" for factor in ends)
        losses.append(f"{method} --p_k {p_k} --inverse_temperature {beta}")
    losses = [f"{loss}{COSINE.format(6)}" for loss in losses]
    return over_seeds(f"{TRAIN} --method", "temperature_training", losses)


def beam_search(*, short: bool = False) -> list[str]:
    """Training through beam search, CMUdict: the control and three arms, five seeds; --short: a smaller network."""
    more = " --hidden_dim 64 --pretrain_updates 1300 --n_updates 325" if short else ""
    arms = ["cross_entropy --method softmax_cross_entropy", "retain --method softsort"]
    arms += ["soft_beam --method softsort", "soft_beam --method soft_topk"]
    return over_seeds(f"{BEAM} --arm", "beam_search_short" if short else "beam_search", arms, range(5), more)


def knn(*data: str, short: bool = False) -> list[str]:
    """The nearest-neighbour classifier with each relaxation, three seeds; DATA: data sets or embeddings.

    --short: the published arms and the baselines without training, 3 epochs in place of 200, bf16.
    """
    losses = ["inputs", "pca", "softmax_cross_entropy", "softmax_cross_entropy --prediction network"]
    losses += [f"{m} --loss {loss}" for loss in ("mass", "log_mass") for m in (*RELAXATIONS, "soft_topk --sorted")]
    if short:
        losses = ["inputs", "pca", "softmax_cross_entropy --prediction network --lr .01", "neuralsort", "soft_topk"]
    more, runs = " --n_epochs 3 --precision bf16" if short else "", []
    for source in data or DATASETS[:3]:
        command = f"{KNN} {'--dataset' if source in DATASETS else '--data_path'} {source} --method"
        runs += over_seeds(command, "knn", losses, range(3), more)
    return runs


def quickstart() -> list[str]:
    """Four losses on scikit-learn's digits, three epochs."""
    relaxed = ("splitter_selection", "neuralsort", "soft_topk")
    losses = ["softmax_cross_entropy", *(f"{method} --p_k .5 0 .5" for method in relaxed)]
    command = f"{TRAIN} --dataset digits --n_epochs 3 --batch_size 32 --results results/quickstart.csv"
    return [f"{command} --method {loss}" for loss in losses]


LISTS = (table1, table4, table2_3_imagenet1k, table2_3_imagenet21k, table5, strong, scratch, knn, noise_scratch)
LISTS += (implementation, quickstart, temperature, temperature_classes, temperature_training, beam_search)
STUDIES = {study.__name__: study for study in LISTS}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a study; return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    usage = "%(prog)s study [data ...] [options]"
    parser = argparse.ArgumentParser("sweeps.py", usage, "Run a study; other flags: scripts/launch.py --help.")
    parser.add_argument("study", choices=STUDIES, help="study to run")
    parser.add_argument("data", nargs="*", help="files of embeddings, or data sets, where the study takes some")
    head = list(takewhile(lambda word: not word.startswith("-"), words))
    args, options = parser.parse_args(head or words), {"short": True} if "--short" in words else {}
    if absent := [name for name in args.data if name not in DATASETS and not Path(name).exists()]:
        parser.error(f"there is no file {absent[0]}")
    try:
        runs = STUDIES[args.study](*map(shlex.quote, args.data), **options)
    except TypeError as error:  # too little data, or --short where there is none
        parser.error(str(error))
    at_once = [] if "-d wsl-32x48d" in runs[0] else ["--run-per-core"]  # embeddings of ImageNet fill the memory
    flags = [word for word in words[len(head) :] if word != "--short"]
    return launch(runs, ["--name", f"{args.study}_short" if options else args.study, *at_once, *flags])


if __name__ == "__main__":
    sys.exit(main())
