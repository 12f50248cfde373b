"""Compare losses on wrong labels: trials of each on embeddings, two choices among them, then ten other seeds.

    scripts/noise.sh -d heads.pt --human CIFAR-100_human.pt                  # every kind of labels; hours on a core
    scripts/noise.sh -d heads.pt --human CIFAR-100_human.pt --labels human --dry-run       # launcher flags, too

For each kind of labels: scripts/relabel.py writes the file, whose validation labels are as wrong as the others; each
loss gets the same 30 trials (learning rate, weight decay, epochs, its own numbers) with seed 0, to
results/noise/NAME_trials.csv; the best by noisy and the best by clean validation labels, top-1 + top-5 at the end of
training, get ten other seeds, to results/noise/NAME.csv. What these files have is skipped: the same call continues.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pandas as pd
import torch

from scripts import relabel
from scripts.launch import launch
from scripts.reporting.noise import CHOICES, EVEN, LABELS, LOSSES, Loss, read_noise
from scripts.reporting.runs import best_trial
from scripts.sweeps import as_flags, finals_of, one_pass

TRIALS, EPOCHS = 30, (4, 12)  # half of the trials have 4 epochs, half 12
LEARNING_RATES, WEIGHT_DECAYS = (0.0002, 0.003), (0.1, 10.0)


def between(place: float, low: float, high: float, even: bool = False) -> float:
    """Return the number at a place in [0, 1] between two others, with three digits."""
    return float(f"{low + (high - low) * place if even else low * (high / low) ** place:.3g}")


def trials_of(loss: Loss, stem: str) -> dict[int, list[str]]:
    """Return the flags of each trial by its epochs: the same places in each range for every loss, by a Sobol sequence.

    stem: path of the embeddings without .pt.
    """
    points = torch.quasirandom.SobolEngine(4, scramble=True, seed=0).draw(TRIALS, dtype=torch.float64).tolist()
    matrix = f" --noise_matrix {stem}_{loss.matrix}.pt" if loss.matrix else ""
    found: dict[int, list[str]] = {n_epochs: [] for n_epochs in EPOCHS}
    for number, (lr, decay, *places) in enumerate(points):
        numbers = {"lr": between(lr, *LEARNING_RATES), "weight_decay": between(decay, *WEIGHT_DECAYS)}
        for place, (name, ends) in zip(places, loss.own.items()):
            numbers[name] = between(place, *ends, even=name in EVEN)
        found[EPOCHS[number * len(EPOCHS) // TRIALS]].append(f"--method {loss.flags}{matrix} {as_flags(numbers)}")
    return found


def final_commands(trials: pd.DataFrame, losses: Sequence[str], flags: str) -> list[str]:
    """Return a command per number of epochs: ten seeds of what both kinds of validation labels choose of each loss."""
    choices = product(losses, CHOICES.values())
    return finals_of([best_trial(trials[trials["loss"] == name], split) for name, split in choices], flags)


def write_labels(labels: str, path: Path, args: argparse.Namespace, only_shows: bool) -> None:
    """Write the embeddings with a kind of labels to a file, or show the command that does."""
    noise = ["--human", str(args.human)] if labels == "human" else LABELS[labels].flags.split()
    words = [str(args.data_path), *noise, "--noisy_valid", "--output", str(path)]
    if only_shows:
        print(shlex.join([".venv/bin/python", "scripts/relabel.py", *words]))
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        relabel.main(words)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study, one kind of labels after another; return the exit status."""
    parser = argparse.ArgumentParser("noise.py", allow_abbrev=False, description="Other flags: launch.py --help.")
    parser.add_argument("-d", "--data_path", type=Path, required=True, help="embeddings of CIFAR-100, labels correct")
    parser.add_argument("--human", type=Path, help="CIFAR-100_human.pt of CIFAR-100N, for the labels by people")
    message = f"{', '.join(LABELS)} (default: all, in this order)"
    parser.add_argument("--labels", nargs="+", choices=LABELS, default=list(LABELS), metavar="NAME", help=message)
    message = f"{', '.join(LOSSES)} (default: all)"
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES), metavar="NAME", help=message)
    folder = Path("data/downloads/noise")
    parser.add_argument("--folder", type=Path, default=folder, help="folder for files of labels (default: %(default)s)")
    parser.add_argument(
        "--results", type=Path, default=Path("results/noise"), help="folder for CSVs (default: results/noise)"
    )
    args, rest = parser.parse_known_args(argv)
    if not args.data_path.is_file():
        parser.error(f"there is no file {args.data_path}")
    if "human" in args.labels and (args.human is None or not args.human.is_file()):
        parser.error("--human must name CIFAR-100_human.pt; or leave human out by --labels")
    only_shows = bool({"--dry-run", "--status"} & set(rest))
    for labels in args.labels:
        path = args.folder / f"{labels}.pt"
        if not path.is_file():
            write_labels(labels, path, args, only_shows)
        stem = shlex.quote(str(path.with_suffix("")))
        files = [args.results / f"{labels}{end}.csv" for end in ("_trials", "")]
        shared = f"--batch_size 500 --eval_freq 0 -d {stem}.pt --results"
        to_trials, to_finals = (f"{shared} {shlex.quote(str(file))}" for file in files)
        # With correct labels the matrices are the identity, which is cross-entropy.
        losses = [name for name in args.losses if labels != "right" or not LOSSES[name].matrix]
        passes = [
            one_pass(heads, f"--n_epochs {n_epochs} --seed 0 {to_trials}")
            for name in losses
            for n_epochs, heads in trials_of(LOSSES[name], stem).items()
        ]
        if status := launch(passes, ["--name", f"noise_trials_{labels}", "--run-per-core", *rest]):
            return status
        if only_shows:
            print(f"# ten seeds of what is chosen for {labels}: known when these have run")
            continue
        finals = final_commands(read_noise(files[0]), losses, to_finals)
        if status := launch(finals, ["--name", f"noise_{labels}", "--run-per-core", *rest]):
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
