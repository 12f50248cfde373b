"""A soft beam over its steps: each hypothesis' likeliest phoneme and its weight, and from which it goes on.

Drawn from the first soft-beam row of a results file: its weights (runs/ beside the file), its operator, and the first
test word of LETTERS letters.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from matplotlib.axes import Axes
from torch import Tensor

from data.cmudict import END, load_words
from experiments.common.beam_objectives import rank_operator
from experiments.common.run import load_checkpoint
from models.beam_search import beam_search, soft_beam
from models.encoder_decoder import EncoderDecoder
from scripts.reporting.figure_style import GREY, PAGE, STYLES, note, pyplot, save
from scripts.reporting.results import check, float_of
from scripts.shared.program import CommandLineError

LETTERS = 7  # of the word, or as many as words may have
SHADES = pyplot.get_cmap("Blues")
LEAST_SHOWN = 0.02  # weight of a line from one hypothesis to the next


@torch.no_grad()
def soft_beam_of(row: Mapping[str, str], folder: Path) -> tuple[str, list[str], list[Tensor]]:
    """The word, the names of the phonemes, and A of each step, (K, Q, V). Raises CommandLineError."""
    words, K = load_words(row["dataset"], int(row["max_letters"])), int(row["beam_size"])
    model = EncoderDecoder(words.num_letters, len(words.symbols), int(row["hidden_dim"]))
    if not (folder / "checkpoint.pt").exists():
        raise CommandLineError(f"the figure needs {folder / 'checkpoint.pt'}, which train_beam_search.py left there")
    model.load_state_dict(load_checkpoint(folder)["model"])
    lengths = (words.test.letters != END).sum(1)
    length = min(LETTERS, int(lengths.max()))
    letters = words.test.letters[lengths == length][:1]
    numbers = {name: float_of(row[name]) for name in ("inverse_temperature", "art_lambda")}
    settings = {"method": row["method"], "distribution": row["distribution"] or None, **numbers}
    encoded = model.encode(letters)
    steps = beam_search(model, encoded, K, max_steps=int(lengths.max()) + 3).phonemes.shape[2]
    choices, _ = soft_beam(model, encoded, K, steps, partial(rank_operator, settings, K, torch.device("cpu")))
    word = "".join(chr(ord("a") - 1 + letter) for letter in letters[0, :length].tolist())
    return word, words.symbols, [A[0] for A in choices]


def draw_soft_beam(results: Path, rows: Sequence[Mapping[str, str]], folder: Path) -> list[Path]:
    """Draw soft_beam.png and .svg of the first row of that arm and return their paths. Raises CommandLineError."""
    row = next((each for each in rows if each["arm"] == "soft_beam"), None)
    if row is None:
        raise CommandLineError(f"{results} has no row of --arm soft_beam to draw")
    check(results, [row], ("inverse_temperature", "run_id"), ("distribution", "art_lambda"))
    word, symbols, choices = soft_beam_of(row, results.parent / "runs" / row["run_id"])
    figure, axis = pyplot.subplots(figsize=(PAGE, 2.6))
    draw_steps(axis, symbols, choices)
    note(
        figure,
        f"The soft beam's hypotheses for “{word}”: likeliest phoneme of each and its weight; a line's width is the "
        f"weight with which a hypothesis goes on from another ({STYLES[row['method']].label}, "
        f"β = {row['inverse_temperature']}, seed {row['seed']}).",
    )
    return save(figure, folder, "soft_beam")


def draw_steps(axis: Axes, symbols: list[str], choices: list[Tensor]) -> None:
    """choices: A of each step, (K, Q, V)."""
    for step, A in enumerate(choices):
        weights, phonemes = A.sum(1).max(1)  # (K,)
        for rank, (weight, phoneme) in enumerate(zip(weights.tolist(), phonemes.tolist())):
            shade = {"boxstyle": "round,pad=0.25", "facecolor": SHADES(0.1 + 0.5 * weight), "linewidth": 0}
            label = f"{symbols[phoneme]} {weight:.2f}"
            axis.text(step, rank, label, ha="center", va="center", fontsize=7, bbox=shade, zorder=3)
            for parent, share in enumerate(A[rank].sum(1).tolist() if step else []):
                if share > LEAST_SHOWN:
                    axis.plot([step - 1, step], [parent, rank], color=GREY, linewidth=2.5 * share, zorder=1)
    axis.set(xlim=(-0.6, len(choices) - 0.4), ylim=(len(choices[0]) - 0.5, -0.5), xlabel="step", ylabel="rank")
    axis.set_xticks(range(len(choices)), range(1, len(choices) + 1))
    axis.set_yticks(range(len(choices[0])), range(1, len(choices[0]) + 1))
    axis.grid(False)
