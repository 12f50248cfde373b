"""The relaxed permutation matrix P of one sample by each method, as in the authors' talk, and each loss's gradient.

P has ranks by classes, the weights w_r of P_K to its right, the class probabilities p = w P below. Scores, P_K and four
of the classes are the talk's (its fifth rank is left over), temperatures the library's defaults, top1_mode sort.
Methods that draw noise are shown by the mean over many draws, the same ones each time.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from torch import Tensor

from reporting import markdown
from reporting.figures import NARROW, STYLE, save
from topk_losses import METHODS, RELAXATIONS, TopKCrossEntropyLoss, make_loss, make_operator
from topk_losses.classification import ClassificationLoss
from topk_losses.methods import SINGLE_K

CLASSES = ("airplane", "panda", "goldfish", "raccoon", "husky")
SCORES = (1.0, 8.0, -1.0, 9.0, 5.0)
P_K = (0.5, 0.5, 0.0, 0.0)
TRUE = CLASSES.index("panda")
WITHIN = 2  # of the gradient: the panda must be among the 2 highest
IMBALANCED = "imbalanced_noised_topk"
COUNTS = (100, 1600, 100, 100, 100)  # training samples, for the loss whose margins follow them
DRAWS = 5000


def relaxed_sort(method: str, scores: Sequence[float], p_k: Sequence[float]) -> tuple[Tensor, Tensor, Tensor]:
    """P (k, n) by a method, the weights w (k,) of its rows, and p = w P (n,)."""
    logits = torch.tensor([scores], dtype=torch.float64)  # (1, n)
    operator = make_operator(method)
    if METHODS[method].stochastic:
        operator = replace(operator, num_samples=DRAWS)
    matrix = operator.permutation_matrix(logits, len(p_k), generator=generator_of(method))[0]  # (k, n)
    weights = rank_weights(p_k)  # (k,)
    return matrix, weights, weights @ matrix


def hard_sort() -> tuple[Tensor, Tensor, Tensor]:
    """What relaxed_sort does, of the exact sort of SCORES with P_K."""
    weights = rank_weights(P_K)
    order = torch.tensor(SCORES).argsort(descending=True)
    matrix = torch.eye(len(SCORES), dtype=torch.float64)[order[: len(P_K)]]  # (k, n)
    return matrix, weights, weights @ matrix


def rank_weights(p_k: Sequence[float]) -> Tensor:
    """W_r = sum_{j>=r} P_K(j), (k,)."""
    return torch.tensor(p_k, dtype=torch.float64).flip(0).cumsum(0).flip(0)


def ranks_of(method: str) -> list[int]:
    """The k of the gradient's loss: WITHIN, with 1 where zeros need the softmax's part; cross-entropy: 1."""
    if getattr(METHODS[method].operator, "has_zeros", False):
        return [1, WITHIN]
    if method in RELAXATIONS or method in SINGLE_K:
        return [WITHIN]
    return [1]


def loss_of(method: str, inverse_temperature: float | None = None) -> ClassificationLoss:
    """The loss whose gradient is shown, with equal shares for the k of ranks_of()."""
    ks = ranks_of(method)
    settings = {"inverse_temperature": inverse_temperature, "reduction": "sum"}
    if method in RELAXATIONS and ks == [WITHIN]:
        settings["top1_mode"] = "sort"
    if method == "ldr_kl":  # without a margin it is cross-entropy
        settings["margin"] = 1.0
    loss = make_loss(method, {k: 1 / len(ks) for k in ks}, len(SCORES), **settings)
    loss.generator = generator_of(method)
    if METHODS[method].stochastic:
        if isinstance(loss, TopKCrossEntropyLoss):
            loss.operator = replace(loss.operator, num_samples=DRAWS)
        else:
            loss.num_samples = DRAWS
    if method == IMBALANCED:  # without counts its margins are those of the other noised loss
        loss.class_counts = torch.tensor(COUNTS)
    return loss


def generator_of(method: str) -> torch.Generator | None:
    """Return a generator for a method that draws noise, the same for each call; None for the others."""
    if not METHODS[method].stochastic:
        return None
    return torch.Generator().manual_seed(0)


def pull(loss: ClassificationLoss, own: Tensor) -> Tensor:
    """-dL/ds_y for each score `own` (points,) of the true class; the other classes keep their scores."""
    own = own.detach().requires_grad_()
    logits = torch.tensor([SCORES] * len(own), dtype=own.dtype).index_copy(1, torch.tensor([TRUE]), own.unsqueeze(1))
    (gradient,) = torch.autograd.grad(loss(logits, torch.full((len(own),), TRUE)), own)
    return -gradient


def draw_permutations(folder: Path) -> list[Path]:
    """Draw permutation_matrix.svg and return its path."""
    panels = {"hard sort": hard_sort()}
    panels |= {f"{m}, β = {METHODS[m].inverse_temperature:g}": relaxed_sort(m, SCORES, P_K) for m in RELAXATIONS}
    rows = math.ceil(len(panels) / 2)
    figure, axes = plt.subplots(rows, 2, figsize=(NARROW, 2.6 * rows))
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for number, (axis, (title, panel)) in enumerate(zip(axes.flat, panels.items())):
        draw_panel(axis, *panel, title)
        axis.tick_params(labelleft=number % 2 == 0)
    title = f"P of one sample, ranks by classes;\nright: weights of P_K = {markdown.p_k('0.5 0.5 0 0')}; below: p = w P"
    return save(figure, folder, "permutation_matrix", title)


def draw_one_sample(folder: Path) -> list[Path]:
    """Draw one_sample.svg, the picture of the README: the hard sort and a relaxed one, and return its path."""
    figure, axes = plt.subplots(2, 1, figsize=(NARROW, 5.6))
    draw_panel(axes[0], *hard_sort(), "exact sort")
    draw_panel(axes[1], *relaxed_sort("splitter_selection", SCORES, P_K), "relaxed: splitter selection network")
    for axis in axes:
        frame = {"facecolor": "none", "edgecolor": "C1", "linewidth": 2}
        axis.add_patch(plt.Rectangle((TRUE - 0.5, -0.5), 1, len(P_K), **frame))
    return save(figure, folder, "one_sample")


def temperatures_shown(temperature: float | None) -> list[tuple[float | None, str]]:
    """The inverse temperatures of a method's gradients, with their lines."""
    if temperature is None:
        return [(None, "-")]
    return [(0.25 * temperature, ":"), (temperature, "-"), (4 * temperature, "--")]


def draw_method(method: str, folder: Path) -> list[Path]:
    """Draw METHOD.svg, P (where it has one) and the gradient, and return its path."""
    temperature = METHODS[method].inverse_temperature
    is_relaxed = method in RELAXATIONS
    figure, axes = plt.subplots(1 + is_relaxed, 1, figsize=(NARROW, 2.9 * (1 + is_relaxed)), squeeze=False)
    if is_relaxed:
        draw_panel(axes[0][0], *relaxed_sort(method, SCORES, P_K), f"P of one sample, β = {temperature:g}")
    axis = axes[-1][0]
    own = torch.linspace(-3, 13, 801, dtype=torch.float64)
    highest = 0.0
    for value, line in temperatures_shown(temperature):
        loss = loss_of(method, value)
        pulls = pull(loss, own)
        label = None
        if value is not None:
            symbol = "τ" if hasattr(loss, "tau") else "β"  # τ: the smooth losses', as published
            label = f"{symbol} = {value:g}"
        axis.plot(own, pulls, color=STYLE[method]["color"], linestyle=line, label=label)
        highest = max(highest, pulls.quantile(0.99).item())
    for score in SCORES[:TRUE] + SCORES[TRUE + 1 :]:
        axis.axvline(score, color="C7", linewidth=0.5, linestyle=(0, (1, 2)))
    title = f"pull on the true class, k = {' or '.join(map(str, ranks_of(method)))}"
    if METHODS[method].stochastic:
        title += f"\nestimated by {DRAWS} draws"
    if method == IMBALANCED:
        title += ", half the margin"
    if method == "ldr_kl":
        title += ", margin 1"
    axis.set(xlabel="score of the true class (dotted: of the others)", ylabel="−∂L / ∂score", title=title)
    axis.set_ylim(-0.05 * highest, 1.1 * highest)  # the peaks of ART where two values meet would flatten all the rest
    if temperature:
        axis.legend()
    return save(figure, folder, method)


def draw_panel(axis: Axes, matrix: Tensor, weights: Tensor, p: Tensor, title: str) -> None:
    """Draw P (k, n) with its weights (k,) to the right and p (n,) as a row below."""
    k, n = matrix.shape
    places = [*range(k), k + 0.35]  # p with a gap above it
    for y, row in zip(places, torch.cat([matrix, p.unsqueeze(0)]).tolist()):
        for x, value in enumerate(row):
            axis.add_patch(
                plt.Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=plt.cm.Blues(value), edgecolor="C7", lw=0.4)
            )
            color = "black"
            if value > 0.6:
                color = "white"
            axis.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=7, color=color)
    for y, weight in enumerate(weights.tolist()):
        axis.text(n - 0.25, y, f"×{weight:.3g}", ha="left", va="center", fontsize=8)
    axis.set(xlim=(-0.5, n + 0.75), ylim=(places[-1] + 0.5, -0.5), aspect="equal", title=title)
    axis.text(n - 0.25, places[-1], "weighted sum", ha="left", va="center", fontsize=8)
    labels = [f"{name}, {score:g}".replace("-", "−") for name, score in zip(CLASSES, SCORES)]
    axis.set_xticks(range(n), labels, rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
    axis.set_xlabel("class, score", fontsize=8)
    axis.set_yticks(places, [*(f"rank {row + 1}" for row in range(k)), "p"], fontsize=8)
    axis.tick_params(length=0, pad=2)
    axis.grid(False)
    axis.spines[:].set_visible(False)
