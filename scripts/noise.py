"""Compare losses on wrong labels: trials of each on embeddings, two choices among them, then ten other seeds.

    scripts/noise.sh -d heads.pt --human CIFAR-100_human.pt                  # every kind of labels; hours on a core
    scripts/noise.sh -d heads.pt --human CIFAR-100_human.pt --labels human --dry-run       # launcher flags, too

For each kind of labels: scripts/relabel.py writes the file, whose validation labels are as wrong as the others; each
loss gets the same 30 trials (learning rate, weight decay, epochs, its own numbers) with seed 0, to
results/noise_trials.csv; the best by noisy and the best by clean validation labels, top-1 + top-5 at the end of
training, get ten other seeds, to results/noise.csv. What these files have is skipped, so the same call continues.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
import torch

from data.embeddings import load_embeddings
from scripts import relabel
from scripts.launch import launch
from scripts.reporting.noise import CHOICES, read_noise
from scripts.reporting.runs import best_trial
from scripts.sweeps import as_flags, one_pass
from topk_losses import METHODS

LABELS = {
    "human": "",
    "symmetric_.4": "--label_noise .4 --among 100",
    "symmetric_.2": "--label_noise .2 --among 100",
    "blocks_.2": "--label_noise .2 --among 5",
    "right": "--label_noise 0",
    "symmetric_.4_again": "--label_noise .4 --among 100 --draw 1",
    "symmetric_.2_again": "--label_noise .2 --among 100 --draw 1",
    "blocks_.2_again": "--label_noise .2 --among 5 --draw 1",
}
TRIALS, EPOCHS, SEEDS = 30, (4, 12), range(1, 11)  # half of the trials have 4 epochs, half 12
LEARNING_RATES, WEIGHT_DECAYS = (0.0002, 0.003), (0.1, 10.0)
HALF = "--p_k .5 0 0 0 .5 --m 16"  # half top-1, half top-5
SETTINGS = ("p_k", "m", "inverse_temperature", "label_smoothing", "margin", "noise_rate", "q", "alpha", "beta", "tau")
SETTINGS += ("mixup", "noise_matrix", "weight_decay", "lr")


@dataclass(frozen=True)
class Loss:
    """Flags of a loss, and its own numbers: the lowest and the highest value of each.

    They are tried at equal distances of their logarithm; those of EVEN, which are shares, at equal distances.
    """

    flags: str
    own: dict[str, tuple[float, float]] = field(default_factory=dict)


def relaxed(method: str, **own: tuple[float, float]) -> Loss:
    """Return the loss of a method that sorts, from its default inverse temperature down to a 32nd."""
    default = METHODS[method].inverse_temperature
    return Loss(f"{method} {HALF}", {"inverse_temperature": (default / 32, default), **own})


EVEN = ("label_smoothing", "margin", "noise_rate", "q")
RATE = (0.05, 0.8)
LOSSES = {
    "cross_entropy": Loss("softmax_cross_entropy"),
    "label_smoothing": Loss("softmax_cross_entropy", {"label_smoothing": (0.05, 0.6)}),
    "mixup": Loss("softmax_cross_entropy", {"mixup": (0.1, 2)}),
    "ldr_kl": Loss("ldr_kl", {"inverse_temperature": (0.25, 2), "margin": (0, 2)}),
    "forward_true": Loss("forward_correction --noise_matrix {stem}_true.pt"),
    "forward_uniform": Loss("forward_correction", {"noise_rate": RATE}),
    "forward_estimated": Loss("forward_correction --noise_matrix {stem}_estimated.pt"),
    "gce": Loss("generalized_cross_entropy", {"q": (0.1, 0.9)}),
    "sce": Loss("symmetric_cross_entropy --alpha 1", {"beta": (0.01, 10)}),
    "nce_rce": Loss("nce_rce --alpha 10", {"beta": (0.03, 3)}),
    "phuber": Loss("phuber_cross_entropy", {"tau": (2, 100)}),
    "splitter_selection": relaxed("splitter_selection"),
    "lapsum": relaxed("lapsum"),
    "softsort": relaxed("softsort"),
    "df_topk": relaxed("df_topk"),
    "smooth_topk": Loss("smooth_topk --p_k 0 0 0 0 1", {"inverse_temperature": (0.25, 8)}),
    "splitter_selection_forward": relaxed("splitter_selection", noise_rate=RATE),
    "lapsum_forward": relaxed("lapsum", noise_rate=RATE),
}


def between(place: float, low: float, high: float, even: bool = False) -> float:
    """Return the number at a place in [0, 1] between two others, with three digits."""
    return float(f"{low + (high - low) * place if even else low * (high / low) ** place:.3g}")


def trials_of(loss: Loss, stem: str) -> dict[int, list[str]]:
    """Return the flags of each trial by its epochs: the same places in each range for every loss, by a Sobol sequence.

    stem: path of the embeddings without .pt.
    """
    points = torch.quasirandom.SobolEngine(4, scramble=True, seed=0).draw(TRIALS, dtype=torch.float64).tolist()
    found: dict[int, list[str]] = {n_epochs: [] for n_epochs in EPOCHS}
    for number, (lr, decay, *places) in enumerate(points):
        numbers = {"lr": between(lr, *LEARNING_RATES), "weight_decay": between(decay, *WEIGHT_DECAYS)}
        for place, (name, ends) in zip(places, loss.own.items()):
            numbers[name] = between(place, *ends, even=name in EVEN)
        command = f"--method {loss.flags.format(stem=stem)} {as_flags(numbers)}"
        found[EPOCHS[number * len(EPOCHS) // TRIALS]].append(command)
    return found


def trial_commands(stem: str, losses: Sequence[str], flags: str) -> list[str]:
    """Return two commands per loss, one for each number of epochs: a pass over the data for 15 trials."""
    passes = [(name, n_epochs) for name in losses for n_epochs in EPOCHS]
    return [
        one_pass(trials_of(LOSSES[name], stem)[n_epochs], f"--n_epochs {n_epochs} --seed 0 {flags}")
        for name, n_epochs in passes
    ]


def final_commands(trials: pd.DataFrame, losses: Sequence[str], flags: str) -> list[str]:
    """Return a command per number of epochs: a pass over the data, seed by seed, for what was chosen of each loss.

    Raises:
        ValueError: a loss has no trials.
    """
    heads: dict[int, list[str]] = {n_epochs: [] for n_epochs in EPOCHS}
    for name in losses:
        tried = trials[trials["loss"] == name]
        if tried.empty:
            raise ValueError(f"there is no trial of {name}")
        for split in CHOICES.values():
            best = best_trial(tried, split)
            heads[int(best["n_epochs"])].append(as_flags(best.reindex(["method", *SETTINGS], fill_value="")))
    seeds = " ".join(map(str, SEEDS))
    return [
        one_pass(dict.fromkeys(chosen), f"--n_epochs {n_epochs} --seeds {seeds} {flags}")
        for n_epochs, chosen in heads.items()
        if chosen
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study, one kind of labels after another; return the exit status."""
    parser = argparse.ArgumentParser("noise.py", allow_abbrev=False, description="Other flags: launch.py --help.")
    parser.add_argument("-d", "--data_path", type=Path, required=True, help="embeddings of CIFAR-100 with right labels")
    parser.add_argument("--human", type=Path, help="CIFAR-100_human.pt of CIFAR-100N, for the labels by people")
    message = f"{', '.join(LABELS)} (default: all, in this order)"
    parser.add_argument("--labels", nargs="+", choices=LABELS, default=list(LABELS), metavar="NAME", help=message)
    message = f"{', '.join(LOSSES)} (default: all)"
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES), metavar="NAME", help=message)
    folder = Path("data/downloads/noise")
    parser.add_argument("--folder", type=Path, default=folder, help="folder for files of labels (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder for two CSVs (default: results)")
    args, rest = parser.parse_known_args(argv)
    if not args.data_path.is_file():
        parser.error(f"there is no file {args.data_path}")
    if "human" in args.labels and (args.human is None or not args.human.is_file()):
        parser.error("--human must name CIFAR-100_human.pt; or leave human out by --labels")
    only_shows = bool({"--dry-run", "--status"} & set(rest))
    for labels in args.labels:
        path = args.folder / f"{labels}.pt"
        if not path.is_file():
            noise = ["--human", str(args.human)] if labels == "human" else LABELS[labels].split()
            words = [str(args.data_path), *noise, "--noisy_valid", "--output", str(path)]
            if only_shows:
                print(shlex.join([".venv/bin/python", "scripts/relabel.py", *words]))
            else:
                args.folder.mkdir(parents=True, exist_ok=True)
                relabel.main(words)
        # With right labels the matrices are the identity, which is cross-entropy.
        losses = [name for name in args.losses if labels != "right" or "stem" not in LOSSES[name].flags]
        stem, record = shlex.quote(str(path.with_suffix(""))), {}
        for name in ("noise_trials", "noise"):
            results = shlex.quote(str(args.results / f"{name}.csv"))
            record[name] = f"--batch_size 500 --eval_freq 0 --results {results} -d {stem}.pt"
        options = ["--run-per-core", *rest]
        trials = trial_commands(stem, losses, record["noise_trials"])
        if status := launch(trials, ["--name", f"noise_trials_{labels}", *options]):
            return status
        if only_shows:
            print(f"# ten seeds of what is chosen for {labels}: known when these have run")
            continue
        done = read_noise(args.results / "noise_trials.csv")
        named = load_embeddings(path).info["labels"]
        finals = final_commands(done[done["labels"] == named], losses, record["noise"])
        if status := launch(finals, ["--name", f"noise_{labels}", *options]):
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
