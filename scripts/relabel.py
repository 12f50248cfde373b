"""Write a file of embeddings with other labels: some training labels wrong, or other classes.

    python scripts/relabel.py heads.pt --label_noise .2 --output heads_noise.pt       # drawn among five class ids
    python scripts/relabel.py heads.pt --label_noise .2 --among 100 --output heads_noise.pt
    python scripts/relabel.py cifar100.pt --num_classes 1000 --output cifar100_of_1000.pt

--num_classes: ten classes in one, or each in ten, by which of ten random directions a row lies furthest along from the
mean of its class. Labels that validate stay right.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

from data.cifar import noisy_labels
from data.embeddings import split_rows


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
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--label_noise", type=float, help="probability that a training label is drawn anew")
    what.add_argument("--num_classes", type=int, help="a tenth of the classes, or ten times as many")
    parser.add_argument("--among", type=int, default=5, help="consecutive class ids to draw from (default: 5)")
    parser.add_argument("--num_valid", type=int, default=5000, help="training rows that validate, where no others do")
    parser.add_argument("--output", type=Path, required=True, help="the new file")
    args = parser.parse_args(argv)
    if not args.data.is_file() or (args.output.exists() and args.output.samefile(args.data)):
        parser.error(f"{args.data} must be a file, and --output another one")
    content = torch.load(args.data, mmap=True, weights_only=True)
    labels = {name: content[f"{name}_labels"] for name in ("train", "valid", "test") if f"{name}_labels" in content}
    train, classes = labels["train"], 1 + max(int(each.max()) for each in labels.values())
    if args.num_classes is None:
        if classes % args.among or not 0 <= args.label_noise <= 1:
            parser.error(f"--label_noise must lie in [0, 1], and --among divide {classes} classes")
        rows = slice(None) if "valid" in labels else split_rows(len(train), args.num_valid, seed=0)[0]
        blocks, generator = torch.arange(classes).view(-1, args.among), torch.Generator().manual_seed(0)
        labels["train"] = train.clone()
        labels["train"][rows] = noisy_labels(train[rows], blocks, args.label_noise, generator)
    elif args.num_classes not in (classes // 10, 10 * classes):
        parser.error(f"--num_classes must be a tenth of {classes}, or ten times as many")
    else:
        means = torch.stack([content["train_embeddings"][train == c].float().mean(0) for c in range(classes)])
        for name, each in labels.items():
            labels[name] = other_classes(content[f"{name}_embeddings"], each, means, args.num_classes)
    partial = args.output.with_name(f"{args.output.name}.tmp")
    torch.save(content | {f"{name}_labels": each for name, each in labels.items()}, partial)
    partial.replace(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
