"""Write a file of embeddings with other labels: some wrong, or other classes. Validation and test labels stay right.

    python scripts/relabel.py heads.pt --label_noise .2 --output heads_noise.pt       # among five class ids
    python scripts/relabel.py heads.pt --label_noise .2 --among 100 --output heads_noise.pt
    python scripts/relabel.py cifar100.pt --num_classes 1000 --output cifar100_of_1000.pt

--num_classes: ten classes in one, or each class in ten by which of ten random directions a row lies furthest along from
the mean of its class.
"""

import argparse
import re
import sys
from pathlib import Path

import torch
from torch import Tensor

from data.cifar100 import noisy_labels
from data.embeddings import split_rows


def wrong_labels(labels: Tensor, rows: Tensor | slice, probability: float, among: int) -> Tensor:
    """Draw labels (N,) of these rows anew with that probability, each among so many consecutive class ids."""
    blocks = torch.arange(int(labels.max()) + 1).view(-1, among)  # (blocks, among)
    labels = labels.clone()
    labels[rows] = noisy_labels(labels[rows], blocks, probability, torch.Generator().manual_seed(0))
    return labels


def other_classes(embeddings: Tensor, labels: Tensor, means: Tensor, num_classes: int) -> Tensor:
    """Return labels (N,) of a tenth, or of ten times, as many classes; means (classes, dim)."""
    if num_classes < len(means):
        return labels // 10
    directions = torch.randn(embeddings.shape[1], 10, generator=torch.Generator().manual_seed(0))
    return 10 * labels + ((embeddings.float() - means[labels]) @ directions).argmax(1)


def main(argv: list[str] | None = None) -> int:
    """Write the file; return the exit status."""
    parser = argparse.ArgumentParser(description="Write a file of embeddings with other labels.")
    parser.add_argument("data", type=Path, help="a torch file of embeddings")
    parser.add_argument("--label_noise", type=float, help="probability that a training label is drawn anew")
    parser.add_argument("--among", type=int, default=5, help="consecutive class ids to draw from (default: 5)")
    parser.add_argument("--num_classes", type=int, help="a tenth of the classes, or ten times as many")
    parser.add_argument("--num_valid", type=int, default=5000, help="training rows that validate, where no others do")
    parser.add_argument("--output", type=Path, required=True, help="the new file")
    args = parser.parse_args(argv)
    if (args.label_noise is None) == (args.num_classes is None):
        parser.error("give --label_noise or --num_classes")
    if not args.data.is_file() or (args.output.exists() and args.output.samefile(args.data)):
        parser.error(f"{args.data} must be a file, and --output another one")
    content = torch.load(args.data, mmap=True, weights_only=True)
    splits = [key.removesuffix("_labels") for key in content if re.fullmatch("(train|valid|test)_labels", key)]
    old = {split: content[f"{split}_labels"] for split in splits}
    num_classes = 1 + max(int(labels.max()) for labels in old.values())
    if args.label_noise is not None:
        if num_classes % args.among or not 0 <= args.label_noise <= 1:
            parser.error(f"--label_noise must lie in [0, 1], and --among divide {num_classes} classes")
        rows = slice(None) if "valid" in splits else split_rows(len(old["train"]), args.num_valid, seed=0)[0]
        new = {**old, "train": wrong_labels(old["train"], rows, args.label_noise, args.among)}
    else:
        if args.num_classes not in (num_classes // 10, 10 * num_classes):
            parser.error(f"--num_classes must be a tenth of {num_classes}, or ten times as many")
        train = content["train_embeddings"]
        means = torch.stack([train[old["train"] == c].float().mean(0) for c in range(num_classes)])
        new = {
            split: other_classes(content[f"{split}_embeddings"], old[split], means, args.num_classes)
            for split in splits
        }
    partial = args.output.with_name(f"{args.output.name}.tmp")
    torch.save(content | {f"{split}_labels": labels for split, labels in new.items()}, partial)
    partial.replace(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
