"""Losses compared on wrong labels: 30 trials of each on embeddings, two choices among them, then ten other seeds."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from studies.runs import IMAGENET
from studies.tuning import Candidate, Finals, OnePass, Range, Sobol, Tuned


@dataclass(frozen=True)
class Labels:
    """A kind of labels: its title in tables, and the flags of scripts/relabel.py that write it."""

    title: str
    flags: str


LABELS = {
    "human": Labels("labels by people (CIFAR-100N)", ""),
    "symmetric_.4": Labels("40 % drawn among all classes", "--label_noise .4 --among 100"),
    "symmetric_.4_again": Labels("40 % drawn among all classes, draw 2", "--label_noise .4 --among 100 --draw 1"),
    "symmetric_.2": Labels("20 % drawn among all classes", "--label_noise .2 --among 100"),
    "symmetric_.2_again": Labels("20 % drawn among all classes, draw 2", "--label_noise .2 --among 100 --draw 1"),
    "blocks_.2": Labels("20 % drawn within groups of 5 class ids", "--label_noise .2 --among 5"),
    "blocks_.2_again": Labels("20 % drawn within groups of 5 class ids, draw 2", "--label_noise .2 --among 5 --draw 1"),
    "right": Labels("correct labels", "--label_noise 0"),
}
CHOICES = {"noisy": "last_valid", "clean": "last_clean"}  # labels that choose, and the columns of their accuracy
BASELINE = "cross_entropy"
ROBUST = ("forward_uniform", "gce", "sce", "nce_rce", "phuber")  # without order, and without clean labels
SORTING = ("splitter_selection", "lapsum", "softsort", "df_topk", "smooth_topk")  # without forward correction
RANKING = (*SORTING, "splitter_selection_forward", "lapsum_forward")
NOISE_RATES = Range(0.05, 0.8, linear=True)
SHARED_RANGES = {"lr": Range(0.0002, 0.003), "weight_decay": Range(0.1, 10.0)}
HALF = "--p_k .5 0 0 0 .5 --m 16"  # half top-1, half top-5
RESULTS = Path("results/noise")
FOLDER = Path("data/downloads/noise")


def space(labels: str, folder: Path = FOLDER) -> tuple[Candidate, ...]:
    """The losses that are tuned on a kind of labels; FOLDER/LABELS_true.pt is its noise matrix."""
    stem = shlex.quote(str(folder / labels))
    candidates = (
        Candidate("cross_entropy", "cross-entropy", "--method softmax_cross_entropy"),
        Candidate(
            "label_smoothing", "cross-entropy, label smoothing", "--method softmax_cross_entropy",
            {"label_smoothing": Range(0.05, 0.6, linear=True)},
        ),
        Candidate("mixup", "cross-entropy, mixup", "--method softmax_cross_entropy", {"mixup": Range(0.1, 2)}),
        Candidate(
            "ldr_kl", "LDR-KL", "--method ldr_kl",
            {"inverse_temperature": Range(0.25, 2), "margin": Range(0, 2, linear=True)},
        ),
        Candidate(
            "forward_true", "forward correction, true T", f"--method forward_correction --noise_matrix {stem}_true.pt"
        ),
        Candidate(
            "forward_estimated", "forward correction, T from 5 % clean labels",
            f"--method forward_correction --noise_matrix {stem}_estimated.pt",
        ),
        Candidate(
            "forward_uniform", "forward correction, uniform T", "--method forward_correction",
            {"noise_rate": NOISE_RATES},
        ),
        Candidate("gce", "GCE", "--method generalized_cross_entropy", {"q": Range(0.1, 0.9, linear=True)}),
        Candidate("sce", "SCE", "--method symmetric_cross_entropy --alpha 1", {"beta": Range(0.01, 10)}),
        Candidate("nce_rce", "NCE + RCE", "--method nce_rce --alpha 10", {"beta": Range(0.03, 3)}),
        Candidate("phuber", "PHuber cross-entropy", "--method phuber_cross_entropy", {"tau": Range(2, 100)}),
        Candidate(
            "splitter_selection", "splitter selection network", f"--method splitter_selection {HALF}",
            {"inverse_temperature": Range(1 / 32, 1)},
        ),
        Candidate("lapsum", "LapSum", f"--method lapsum {HALF}", {"inverse_temperature": Range(0.25 / 32, 0.25)}),
        Candidate("softsort", "SoftSort", f"--method softsort {HALF}", {"inverse_temperature": Range(0.5 / 32, 0.5)}),
        Candidate("df_topk", "DFTopK", f"--method df_topk {HALF}", {"inverse_temperature": Range(0.25 / 32, 0.25)}),
        Candidate(
            "smooth_topk", "smooth top-k, top-5 only", "--method smooth_topk --p_k 0 0 0 0 1",
            {"inverse_temperature": Range(0.25, 8)},
        ),
        Candidate(
            "splitter_selection_forward", "splitter selection network, forward correction",
            f"--method splitter_selection {HALF}",
            {"inverse_temperature": Range(1 / 32, 1), "noise_rate": NOISE_RATES},
        ),
        Candidate(
            "lapsum_forward", "LapSum, forward correction", f"--method lapsum {HALF}",
            {"inverse_temperature": Range(0.25 / 32, 0.25), "noise_rate": NOISE_RATES},
        ),
    )  # fmt: skip
    if labels == "right":  # the matrices are the identity, which is cross-entropy
        return tuple(item for item in candidates if "--noise_matrix" not in item.flags)
    return candidates


def noise(labels: str, losses: tuple[str, ...] = (), folder: Path = FOLDER, embeddings: str = "") -> Tuned:
    """The study of a kind of labels. losses: names of the space, all by default."""
    data = f"--batch_size 500 --eval_freq 0 -d {shlex.quote(str(folder / f'{labels}.pt'))}"
    trials = RESULTS / f"{labels}_trials.csv"
    finals = RESULTS / f"{labels}.csv"
    seeds = "1 2 3 4 5 6 7 8 9 10"
    candidates = tuple(item for item in space(labels, folder) if not losses or item.name in losses)
    sobol = Sobol(
        name="trials",
        commands=OnePass(IMAGENET, trials, f"--seed 0 {data} --results {trials}"),
        number=30,
        epochs=(4, 12),
        ranges=SHARED_RANGES,
    )
    return Tuned(
        name=f"noise_{labels}",
        title=f"Wrong labels: {LABELS[labels].title}",
        space=candidates,
        rounds=(sobol,),
        finals=Finals(OnePass(IMAGENET, finals, f"--seeds {seeds} {data} --results {finals}"), CHOICES),
        embeddings=embeddings,
    )
