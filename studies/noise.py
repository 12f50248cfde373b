"""Losses compared on wrong labels: 30 trials of each on embeddings, a choice among them, then ten other seeds.

`noise` compares many losses on a draw or two of each noise. `noise_draws` compares fewer on six draws, with longer
training, wider ranges, and losses that keep 16 scores without their order.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from studies.runs import IMAGENET
from studies.tuning import FINAL_SEEDS, Candidate, Finals, OnePass, Range, Rule, Sobol, Tuned


@dataclass(frozen=True)
class Labels:
    """A kind of labels.

    Attributes:
        title: for tables.
        flags: of scripts/relabel.py, which write it.
        group: title of what draws have in common, where a study has several.
    """

    title: str
    flags: str
    group: str = ""


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
NUM_DRAWS = 6


def drawn(rate: str, draw: int) -> Labels:
    """A draw of labels among all classes, at a rate such as ".4"."""
    noise = f"{float(rate):.0%} drawn among all classes".replace("%", " %")
    return Labels(f"{noise}, draw {draw}", f"--label_noise {rate} --among 100 --draw {draw}", noise)


def kinds_of_draws() -> dict[str, Labels]:
    """Six draws of two rates, and labels by people, in the order in which they run."""
    people = LABELS["human"]
    kinds = {}
    for draw in range(NUM_DRAWS):
        for rate in (".4", ".2"):
            kinds[f"symmetric_{rate}_draw{draw}"] = drawn(rate, draw)
        if draw == 0:
            kinds["human"] = Labels(people.title, people.flags, people.title)
    return kinds


CHOICES = {"noisy": "last_valid", "clean": "last_clean"}  # labels that choose, and the columns of their accuracy
BASELINE = "cross_entropy"
ROBUST = ("forward_uniform", "gce", "sce", "nce_rce", "phuber")  # that neither sort nor know clean labels
SORTING = ("splitter_selection", "lapsum", "softsort", "df_topk", "smooth_topk")  # without forward correction
RANKING = (*SORTING, "splitter_selection_forward", "lapsum_forward")
NOISE_RATES = Range(0.05, 0.8, linear=True)
TOP_K = "--p_k .5 0 0 0 .5 --m 16"  # half top-1, half top-5, of the 16 largest scores
# Cross-entropy of the 16 scores that the losses above keep: all of them are within the first 16, so that the weight of
# top-16 adds 1e-12 to the softmax. The method makes no difference.
KEPT = f"--method df_topk --p_k 0.999999999999 {'0 ' * 14}1e-12 --m 16"
FOLDER = Path("data/downloads/noise")


def space(labels: str, folder: Path = FOLDER, top_k: str = TOP_K) -> tuple[Candidate, ...]:
    """The losses that are tuned on a kind of labels.

    Args:
        folder: FOLDER/LABELS_true.pt is the noise matrix.
        top_k: flags of the top-k losses.
    """
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
            "splitter_selection", "splitter selection network", f"--method splitter_selection {top_k}",
            {"inverse_temperature": Range(1 / 32, 1)},
        ),
        Candidate("lapsum", "LapSum", f"--method lapsum {top_k}", {"inverse_temperature": Range(0.25 / 32, 0.25)}),
        Candidate("softsort", "SoftSort", f"--method softsort {top_k}", {"inverse_temperature": Range(0.5 / 32, 0.5)}),
        Candidate("df_topk", "DFTopK", f"--method df_topk {top_k}", {"inverse_temperature": Range(0.25 / 32, 0.25)}),
        Candidate(
            "smooth_topk", "smooth top-k, top-5 only", "--method smooth_topk --p_k 0 0 0 0 1",
            {"inverse_temperature": Range(0.25, 8)},
        ),
        Candidate(
            "splitter_selection_forward", "splitter selection network, forward correction",
            f"--method splitter_selection {top_k}",
            {"inverse_temperature": Range(1 / 32, 1), "noise_rate": NOISE_RATES},
        ),
        Candidate(
            "lapsum_forward", "LapSum, forward correction", f"--method lapsum {top_k}",
            {"inverse_temperature": Range(0.25 / 32, 0.25), "noise_rate": NOISE_RATES},
        ),
        Candidate("cross_entropy_16", "cross-entropy of 16 scores", KEPT),
        Candidate(
            "forward_uniform_16", "forward correction of 16 scores, uniform T", KEPT, {"noise_rate": NOISE_RATES}
        ),
    )  # fmt: skip
    if labels == "right":  # the matrices are the identity, which is cross-entropy
        return tuple(item for item in candidates if "--noise_matrix" not in item.flags)
    return candidates


@dataclass(frozen=True)
class Design:
    """What a study of wrong labels compares.

    Attributes:
        kinds: kinds of labels by name, in the order in which they run.
        losses: names in the space.
        epochs: numbers of epochs that trials have.
        ranges: numbers that all losses have.
        choices: labels that choose, and the columns of their accuracy; tables are of the first.
        rule: the rule of selection.
        seeds: of the finals.
    """

    name: str
    kinds: dict[str, Labels]
    losses: tuple[str, ...]
    epochs: tuple[int, ...]
    ranges: dict[str, Range]
    choices: dict[str, str] = field(default_factory=lambda: {"noisy": CHOICES["noisy"]})
    rule: Rule = field(default_factory=Rule)
    seeds: tuple[int, ...] = FINAL_SEEDS

    @property
    def results(self) -> Path:
        return Path("results") / self.name

    def flags(self, labels: str, data: Path) -> str:
        """The flags of the data and the evaluation; data: the folder of the files of labels."""
        return f"--batch_size 500 --eval_freq 0 -d {shlex.quote(str(data / f'{labels}.pt'))}"

    def title(self, labels: str) -> str:
        return f"Wrong labels: {self.kinds[labels].title}"

    def epochs_of(self, labels: str) -> tuple[int, ...]:
        return self.epochs

    def ranges_of(self, labels: str) -> dict[str, Range]:
        return self.ranges

    def candidates(self, labels: str, data: Path) -> tuple[Candidate, ...]:
        """The losses that may be tuned on a kind of labels."""
        return space(labels, data)

    def study(self, labels: str, losses: Sequence[str] = (), data: Path = FOLDER, embeddings: str = "") -> Tuned:
        """The study of a kind of labels. losses: names, all of the design by default."""
        flags = self.flags(labels, data)
        trials = self.results / f"{labels}_trials.csv"
        finals = self.results / f"{labels}.csv"
        names = losses or self.losses
        sobol = Sobol(
            name="trials",
            commands=OnePass(IMAGENET, trials, f"{flags} --results {trials}"),
            number=30,
            epochs=self.epochs_of(labels),
            ranges=self.ranges_of(labels),
        )
        last = OnePass(IMAGENET, finals, f"{flags} --results {finals}", self.seeds)
        return Tuned(
            name=f"{self.name}_{labels}",
            title=self.title(labels),
            space=tuple(item for item in self.candidates(labels, data) if item.name in names),
            rounds=(sobol,),
            finals=Finals(last, self.choices, rule=self.rule),
            embeddings=embeddings,
        )


NOISE = Design(
    name="noise",
    kinds=LABELS,
    losses=tuple(item.name for item in space("human") if not item.name.endswith("_16")),
    epochs=(4, 12),
    ranges={"lr": Range(0.0002, 0.003), "weight_decay": Range(0.1, 10.0)},
    choices=CHOICES,
)
# Losses in the order of the question: first what a table of the answer needs.
CORE = (
    "cross_entropy",
    "gce",
    "splitter_selection",
    "lapsum",
    "forward_uniform",
    "forward_estimated",
    "cross_entropy_16",
)
MORE = ("forward_uniform_16", "softsort", "sce")
# Of 142 choices of `noise` 134 had the most epochs and 66 nearly the least weight decay. Cross-entropy had nearly the
# least learning rate where 40 % are drawn.
NOISE_DRAWS = Design(
    name="noise_draws",
    kinds=kinds_of_draws(),
    losses=(*CORE, *MORE),
    epochs=(4, 12, 24),
    ranges={"lr": Range(0.0001, 0.003), "weight_decay": Range(0.01, 10.0)},
)
DESIGNS_OF_LABELS = {design.name: design for design in (NOISE, NOISE_DRAWS)}
noise = NOISE.study
noise_draws = NOISE_DRAWS.study
