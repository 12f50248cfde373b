"""Write a file of embeddings with other labels: some training labels wrong, or other classes.

    python scripts/relabel.py heads.pt --label_noise .2 --output heads_noise.pt       # drawn among five class ids
    python scripts/relabel.py heads.pt --label_noise .2 --among 100 --draw 1 --noisy_valid --output heads_noise.pt
    python scripts/relabel.py heads.pt --human CIFAR-100_human.pt --noisy_valid --output heads_human.pt
    python scripts/relabel.py cifar100.pt --num_classes 1000 --output cifar100_of_1000.pt

Labels that validate stay right without --noisy_valid. With it they are wrong as those that train, and the new file has
one more split, clean: the rows of valid with correct labels. Two matrices T for forward correction lie beside the new
file: NAME_true.pt, of the noise itself (human labels: their shares among all training labels of a class), and
NAME_estimated.pt, counted on 5 % of the rows that train. --num_classes: ten classes in one, or each in ten, by which of
ten random directions a row lies furthest along from the mean of its class.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.cifar import human_labels, noisy_labels
from data.embeddings import split_rows
from experiments.common import door
from experiments.common.files import save_torch_file

KNOWN_SHARE = 0.05  # of the rows that train, for the estimated matrix
PRIOR_ROWS = 10  # that uniform noise counts as beside the 22 or so rows of a class that are known


def counted_matrix(clean: Tensor, noisy: Tensor, classes: int, prior_rows: float) -> Tensor:
    """Return T (classes, classes): the shares of the noisy labels (N,) of each clean class, float64.

    prior_rows: so many rows of each class are added, which are spread as uniform noise of the rate of all rows spreads
    them, so that a pair of classes that was not seen has no probability of 0.
    """
    counts = torch.bincount(clean * classes + noisy, minlength=classes**2).view(classes, classes).double()
    wrong = 1 - counts.diag().sum() / counts.sum()
    counts += prior_rows * torch.full_like(counts, wrong / (classes - 1)).fill_diagonal_(1 - wrong)
    return counts / counts.sum(1, keepdim=True)


def wrong_labels(args: argparse.Namespace, train: Tensor, rows: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return the labels (N,) that train, wrong at some of these rows, and the matrix T (classes, classes) of the noise.

    Raises:
        ValueError: --human has labels of other images.
    """
    noisy = train.clone()
    if args.human is not None:
        by_people = human_labels(args.human, train)
        noisy[rows] = by_people[rows]
        return noisy, counted_matrix(train, by_people, classes, prior_rows=0)
    noisy[rows] = noisy_labels(train[rows], args.among, args.label_noise, torch.Generator().manual_seed(args.draw))
    block = torch.full((args.among, args.among), args.label_noise / args.among, dtype=torch.float64)
    block.diagonal().add_(1 - args.label_noise)
    return noisy, torch.block_diag(*[block] * (classes // args.among))


def matrix_files(output: Path) -> dict[str, Path]:
    """Return the files of the two matrices beside a file of embeddings."""
    return {name: output.with_name(f"{output.stem}_{name}.pt") for name in ("true", "estimated")}


def with_noise(args: argparse.Namespace, content: dict[str, Any], classes: int) -> dict[str, Any]:
    """Return the parts of a file that wrong labels change, and write the two matrices beside it."""
    train, every = content["train_labels"], torch.arange(len(content["train_labels"]))
    learn, valid = (every, every) if "valid_labels" in content else split_rows(len(train), args.num_valid, seed=0)
    noisy, true = wrong_labels(args, train, every if args.noisy_valid else learn, classes)
    known = learn[split_rows(len(learn), max(round(KNOWN_SHARE * len(learn)), 1), args.draw)[1]]
    estimated = counted_matrix(train[known], noisy[known], classes, PRIOR_ROWS)
    for name, matrix in (("true", true), ("estimated", estimated)):
        save_torch_file(matrix_files(args.output)[name], matrix)
    drawn = f"{args.label_noise:g} among {args.among}, draw {args.draw}" if args.label_noise else "right"
    changed = {"info": content.get("info", {}) | {"labels": "human" if args.human is not None else drawn}}
    if not args.noisy_valid:
        return changed | {"train_labels": noisy}
    for name, rows, labels in (("train", learn, noisy), ("valid", valid, noisy), ("clean", valid, train)):
        changed |= {f"{name}_embeddings": content["train_embeddings"][rows], f"{name}_labels": labels[rows]}
    return changed


def main(argv: list[str] | None = None) -> int:
    """Write the file; return the exit status."""
    parser = argparse.ArgumentParser(description="Write a file of embeddings with other labels.")
    parser.add_argument("data", type=Path, help="torch file of embeddings")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--label_noise", type=float, help="probability that a training label becomes a random one")
    what.add_argument("--human", type=Path, metavar="FILE", help="labels by people: CIFAR-100_human.pt of CIFAR-100N")
    what.add_argument("--num_classes", type=int, help="number of classes: a tenth, or ten times as many")
    parser.add_argument("--among", type=int, default=5, help="consecutive class ids to draw from (default: 5)")
    parser.add_argument("--draw", type=int, default=0, help="random seed of the noise (default: 0)")
    parser.add_argument("--noisy_valid", action="store_true", help="give the rows that validate wrong labels, too")
    message = "training rows that validate if no others do (default: 5000)"
    parser.add_argument("--num_valid", type=int, default=5000, help=message)
    parser.add_argument("--output", type=Path, required=True, help="torch file to write")
    args = parser.parse_args(argv)
    if not args.data.is_file():
        parser.error(f"there is no file {args.data}")
    inputs = [file.resolve() for file in (args.data, args.human) if file is not None]
    if taken := {file.resolve() for file in (args.output, *matrix_files(args.output).values())}.intersection(inputs):
        parser.error(f"--output {args.output} would replace {taken.pop()}, which is read")
    content = torch.load(args.data, mmap=True, weights_only=True)
    labels = {name: content[f"{name}_labels"] for name in ("train", "valid", "test") if f"{name}_labels" in content}
    classes = 1 + max(int(ids.max()) for ids in labels.values())
    if args.num_classes is None:
        if args.human is None and (classes % args.among or not 0 <= args.label_noise <= 1):
            parser.error(f"--label_noise must lie in [0, 1], and --among divide {classes} classes")
        if args.noisy_valid and "valid" in labels:
            message = "has rows that validate, which are not drawn from those that train"
            parser.error(f"--noisy_valid: {args.data} {message}")
        content |= with_noise(args, content, classes)
    elif args.num_classes not in (classes // 10, 10 * classes):
        parser.error(f"--num_classes must be a tenth of {classes}, or ten times as many")
    else:
        train = content["train_embeddings"].float()
        means = torch.stack([train[labels["train"] == c].mean(0) for c in range(classes)])  # (classes, dim)
        directions = torch.randn(train.shape[1], 10, generator=torch.Generator().manual_seed(0))  # (dim, 10)
        for name, ids in labels.items():
            part = ((content[f"{name}_embeddings"].float() - means[ids]) @ directions).argmax(1)  # (N,)
            content[f"{name}_labels"] = ids // 10 if args.num_classes < classes else 10 * ids + part
        content["info"] = content.get("info", {}) | {"num_classes": args.num_classes}
    save_torch_file(args.output, content)
    return 0


if __name__ == "__main__":
    sys.exit(door.call(main))
