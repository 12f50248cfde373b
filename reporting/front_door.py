"""The README's first screen: its table of answers, and its figure; and the figure of the guide on wrong labels."""

from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl

mpl.use("Agg")

import pandas as pd
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from experiments.common.paths import REPOSITORY
from experiments.common.settings import CROSS_ENTROPY
from reporting import findings, markdown
from reporting.figures import NARROW, STYLE, save
from topk_losses import make_loss

TOP_K_LOSS = "splitter_selection"
SMOOTHING_EPOCHS = 5  # over which the curves of the first figure are averaged
NUM_OTHERS = 16  # other classes in the figure of pulls, their scores evenly spaced


class Answer(NamedTuple):
    """A row of the first table: who asks, what to start with, and its comparison in findings.csv."""

    training: str
    labels: str
    start_with: str
    key: str


LINEAR = "linear classifier on frozen features"
SCRATCH = "network from scratch"
ANSWERS = (
    Answer(LINEAR, "40 % wrong, by people", "`generalized_cross_entropy`, `q=0.34`", "H2"),
    Answer(LINEAR, "40 % wrong, by people", "or `splitter_selection`: the code above", "H1"),
    Answer(LINEAR, "the same, and 5 % are checked", "`forward_correction`, `T` counted on them", "H4"),
    Answer(LINEAR, "correct", "`ldr_kl`, `margin=1`", "L2"),
    Answer(SCRATCH, "correct", "cross-entropy (Δ: `splitter_selection`)", "S10"),
    Answer(SCRATCH, "40 % wrong, by people", "cross-entropy (Δ: `splitter_selection`)", "S7"),
)


def table() -> str:
    """The table of answers, each with the difference to cross-entropy and a link to its rows."""
    comparisons = {comparison.key: comparison for comparison in findings.COMPARISONS}
    rows = []
    training = ""
    for answer in ANSWERS:
        comparison = comparisons[answer.key]
        found = findings.difference(comparison)
        shown = answer.training
        if shown == training:  # named once
            shown = ""
        training = answer.training
        row = {"You train": shown, "Labels": answer.labels, "Start with": answer.start_with}
        row |= findings.cells(comparison, found)
        row["Rows"] = f"[{answer.key}](results/repository/{comparison.file})"
        rows.append(row)
    return markdown.table(rows)


def draw_hero(folder: Path) -> list[Path]:
    """Draw top-5 accuracy over the epochs of the published schedule, a line per run.

    The runs that did not finish end at the last epoch that all of them have.
    """
    runs = pd.read_csv(REPOSITORY / "table1_epochs.csv")
    shared = runs.groupby(["method", "seed"])["epoch"].max().min()
    figure, axis = plt.subplots(figsize=(NARROW, 2.7))
    for method in (CROSS_ENTROPY, TOP_K_LOSS):
        of_method = runs[runs["method"] == method]
        for _, run in of_method.groupby("seed"):
            accuracy = 100 * run.set_index("epoch")["test_top5"].rolling(SMOOTHING_EPOCHS, min_periods=1).mean()
            width = 0.8
            alpha = 0.6
            if accuracy.index.max() >= 200:  # a finished run
                width = 1.8
                alpha = 1
            else:
                accuracy = accuracy[:shared]
            axis.plot(accuracy, color=STYLE[method]["color"], linewidth=width, alpha=alpha)
    label_curves(axis)
    axis.set(xlim=(0, 202), ylim=(80, 88.5), xlabel="epoch", ylabel="test top-5 accuracy (%)")
    axis.set_title("Cross-entropy loses top-5 by training on; the top-k loss less")
    return save(figure, folder, "hero")


def label_curves(axis: Axes) -> None:
    """Write beside each curve what it is, and draw what cross-entropy reaches in 16 epochs."""
    runs = pd.read_csv(REPOSITORY / "scratch.csv")
    is_plain = (runs["label_noise"] == 0) & runs["label_smoothing"].isna() & (runs["lr"] == 0.001)
    short = 100 * runs.loc[is_plain & (runs["method"] == CROSS_ENTROPY), "test_top5"].mean()
    axis.axhline(short, color="#555555", linestyle="--", linewidth=1)
    text = f"cross-entropy, 16 epochs with a cosine schedule: {short:.1f}"
    axis.text(200, short + 0.6, text, ha="right", va="bottom", color="#555555")
    axis.text(62, 86.2, "top-k loss", va="top", fontsize=11, color=STYLE[TOP_K_LOSS]["color"])
    axis.text(62, 83.5, "cross-entropy", va="top", fontsize=11, color="#555555")


def draw_pull(folder: Path) -> list[Path]:
    """Draw how strongly three losses pull a label up, over how far it is ahead of the best other class."""
    losses = {
        "cross-entropy": make_loss(CROSS_ENTROPY, reduction="none"),
        "generalized cross-entropy, q = 0.5": make_loss("generalized_cross_entropy", q=0.5, reduction="none"),
        "splitter selection, β = 0.125": make_loss(
            TOP_K_LOSS, {1: 0.5, 5: 0.5}, inverse_temperature=0.125, reduction="none"
        ),
    }
    colors = ("#555555", STYLE["generalized_cross_entropy"]["color"], STYLE[TOP_K_LOSS]["color"])
    scores = torch.linspace(-12, 8, 401, dtype=torch.float64)  # of the label
    others = torch.linspace(3, -13, NUM_OTHERS, dtype=torch.float64)
    figure, axis = plt.subplots(figsize=(NARROW, 2.9))
    for (name, loss_fn), color in zip(losses.items(), colors):
        logits = torch.cat([scores.unsqueeze(1), others.expand(len(scores), -1)], 1).requires_grad_()  # (401, 17)
        loss_fn(logits, torch.zeros(len(scores), dtype=torch.int64)).sum().backward()
        axis.plot(scores - others.max(), -logits.grad[:, 0], color=color, label=name)
    axis.set(xlabel="score of the label minus the highest other score", ylabel="pull on the label, −∂L / ∂score")
    axis.set_ylim(-0.05, 1.1)  # where two scores meet the sorting network's pull has a narrow peak
    axis.set_title("A wrong label pulls with full force, or lets go")
    axis.legend()
    return save(figure, folder, "pull_of_a_wrong_label")
