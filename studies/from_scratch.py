"""ResNet-18 from scratch on CIFAR-100 with other settings than the paper's."""

import shlex
from pathlib import Path

from studies.runs import CIFAR100, SHORT, RunList, Study
from studies.tuning import Candidate, Finals, Grid, OneByOne, Rule, Trial, Tuned

EVEN = ".2 .2 .2 .2 .2"
HALF_FLAG = "--p_k .5 0 0 0 .5"
SPLITTER = "--method splitter_selection --distribution logistic_phi --inverse_temperature .5 --art_lambda .5"

STRONG = RunList(
    script=CIFAR100,
    results="results/strong.csv",
    losses=(
        "--method softmax_cross_entropy --p_k 1. 0. 0. 0. 0.",
        f"{SPLITTER} --p_k {EVEN}",
        f"--method softsort --inverse_temperature 0.0625 --p_k {EVEN}",
    ),
    schedule="--n_epochs 36 --lr_schedule cosine --precision bf16 --weight_decay .5 --ema .999",
)
IMPLEMENTATION = RunList(
    script=CIFAR100,
    results="results/implementation.csv",
    data=f"--method splitter_selection --p_k {EVEN} --n_epochs 5",
    losses=(
        "--precision bf16",
        "--precision bf16 --implementation difftopk",
        "--precision bf16 --top1_mode sm",
        "--precision fp32",
    ),
)
TRIED = RunList(
    script=CIFAR100,
    results="results/scratch.csv",
    seeds=(0,),
    schedule=SHORT,
    losses=(
        f"--method splitter_selection {HALF_FLAG} --inverse_temperature .5",
        f"--method splitter_selection {HALF_FLAG} --inverse_temperature .1",
        f"--method lapsum {HALF_FLAG} --inverse_temperature .1",
        f"--method splitter_selection {HALF_FLAG} --inverse_temperature .25",
        f"--method lapsum {HALF_FLAG} --inverse_temperature .25",
        f"--method splitter_selection {HALF_FLAG} --inverse_temperature .05",
        f"--method df_topk {HALF_FLAG} --inverse_temperature .1",
        f"--method df_topk {HALF_FLAG} --inverse_temperature .25",
        f"--method softsort {HALF_FLAG} --inverse_temperature 1",
        f"--method softsort {HALF_FLAG} --inverse_temperature 2",
        "--method softmax_cross_entropy --p_k 1. 0. 0. 0. 0. --lr .001",
        "--method softmax_cross_entropy --p_k 1. 0. 0. 0. 0. --lr .001 --label_smoothing .1",
        "--method softmax_cross_entropy --p_k 1. 0. 0. 0. 0. --lr .0005",
        "--method softmax_cross_entropy --p_k 1. 0. 0. 0. 0. --lr .002",
    ),
)
BEST = TRIED.but(
    seeds=(1, 2),
    losses=(
        "--method softmax_cross_entropy --p_k 1. 0. 0. 0. 0. --lr .001",
        f"--method splitter_selection {HALF_FLAG} --inverse_temperature .1",
        f"--method df_topk {HALF_FLAG} --inverse_temperature .1",
        f"--method softsort {HALF_FLAG} --inverse_temperature 1",
        f"--method lapsum {HALF_FLAG} --inverse_temperature .25",
    ),
)
NOISY = TRIED.but(
    schedule=f"--label_noise .2 {SHORT}",
    losses=(
        "--method softmax_cross_entropy --p_k 1. 0. 0. 0. 0. --lr .001",
        f"--method splitter_selection {HALF_FLAG} --inverse_temperature .1",
        "--method softmax_cross_entropy --p_k 1. 0. 0. 0. 0. --lr .001 --label_smoothing .1",
        f"--method lapsum {HALF_FLAG} --inverse_temperature .1",
        f"--method splitter_selection {HALF_FLAG} --inverse_temperature .05",
        f"--method splitter_selection {HALF_FLAG} --inverse_temperature .025",
    ),
)
SOFTMAX = "--method softmax_cross_entropy --p_k 1 0 0 0 0"
PEOPLE = (
    Candidate("softmax_cross_entropy", "cross-entropy", SOFTMAX, options=("", "--label_smoothing 0.1")),
    Candidate(
        "forward_correction", "forward correction, uniform T", "--method forward_correction",
        options=("--noise_rate 0.2", "--noise_rate 0.4", "--noise_rate 0.6"),
    ),
    Candidate(
        "generalized_cross_entropy", "GCE", "--method generalized_cross_entropy", options=("--q 0.7", "--q 0.3")
    ),
    Candidate(
        "splitter_selection", "splitter selection network", f"--method splitter_selection {HALF_FLAG}",
        options=("--inverse_temperature 0.025", "--inverse_temperature 0.1"),
    ),
    Candidate("lapsum", "LapSum", f"--method lapsum {HALF_FLAG}", options=("--inverse_temperature 0.1",)),
)  # fmt: skip


def strong() -> Study:
    """Three losses of Table 1 with 36 epochs, weight decay and averaged weights, 6 runs: not the paper's protocol."""
    return Study("strong", "From scratch in 36 epochs, with weight decay and averaged weights", (STRONG,))


def implementation() -> Study:
    """Five epochs of a published row by the official loss, in mode sm and in fp32, 8 runs."""
    return Study("implementation", "Five epochs by the official loss, in mode sm and in fp32", (IMPLEMENTATION,))


def scratch() -> Study:
    """Table 1's network in 16 epochs with other settings than the published ones, and with wrong labels, 30 runs."""
    title = "From scratch in 16 epochs, other settings than the published ones, and wrong labels"
    return Study("scratch", title, (TRIED, BEST, NOISY))


def noise_scratch(human: str) -> Tuned:
    """Table 1's network in 16 epochs with labels by people; HUMAN: CIFAR-100_human.pt of CIFAR-100N.

    Seed 0 of every setting, seeds 101 and 102 of the best two of each loss; seeds 1 and 2 of cross-entropy with and
    without label smoothing, and of what the noisy validation labels choose for each loss at the end of training.
    """
    results = Path("results/noise_scratch.csv")
    flags = f"--noisy_labels {shlex.quote(human)} --results {results} {SHORT}"
    always = (Trial(SOFTMAX, "", 16), Trial(f"{SOFTMAX} --label_smoothing 0.1", "", 16))
    return Tuned(
        name="noise_scratch",
        title="From scratch in 16 epochs, labels by people",
        space=PEOPLE,
        rounds=(Grid("trials", OneByOne(CIFAR100, results, flags), 16),),
        finals=Finals(
            OneByOne(CIFAR100, results, flags, (1, 2)),
            {"noisy": "last_valid"},
            always=always,
            rule=Rule(finalists=2, seeds=(101, 102)),
        ),
    )
