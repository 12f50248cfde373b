"""A file of embeddings with other labels; from the command line, with some of the training labels wrong.

    python -m scripts.sweeping.relabel heads.pt .2     # makes heads_noise_.2.pt beside it, and prints its path
    python -m scripts.sweeping.relabel heads.pt .2:100 # heads_noise_.2_of_100.pt

Each training label is drawn anew with that probability among the five of its block of class ids, as train_cifar100.py
--label_noise does (Berrada, Zisserman and Kumar 2018), or among so many; the rows that validate heads, and those of
test, keep theirs.
"""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from data.cifar import noisy_labels
from data.embeddings import Embeddings, load_embeddings, split_rows
from experiments.common import flags
from scripts.sweeping.heads import NUM_VALID

BLOCK = 5  # class ids of which one is drawn


def relabelled(embeddings: Embeddings, labels: Mapping[str, Tensor], path: Path) -> Path:
    """Write the same rows with other labels, (N,) int64 by split; return the path of the file.

    A file that is there is kept only if it has the same rows and labels.
    """
    made = Embeddings({name: type(split)(split.embeddings, labels[name]) for name, split in embeddings.splits.items()},
                      1 + max(int(each.max()) for each in labels.values()))  # fmt: skip
    made.info = {**embeddings.info, "num_classes": made.num_classes, "shard_rows": max(map(len, labels.values()))}
    made.info.pop("digest", None)
    if path.exists() and load_embeddings(path).fingerprint() == made.fingerprint():
        return path
    content = {"info": made.info}
    for name, split in made.splits.items():
        content |= {f"{name}_embeddings": split.embeddings, f"{name}_labels": split.labels}
    torch.save(content, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)
    return path


def wrong_labels(embeddings: Embeddings, probability: float, block: int = BLOCK) -> dict[str, Tensor]:
    """The labels by split, some wrong of the rows of train, but NUM_VALID that validate where no others do.

    probability: in [0, 1], that one is drawn anew, from its block of class ids, itself included. SystemExit.
    """
    num_classes = embeddings.num_classes
    if num_classes % block:
        raise SystemExit(f"error: blocks of {block} classes do not divide {num_classes} classes")
    labels = {name: split.labels.clone() for name, split in embeddings.splits.items()}
    rows = ... if "valid" in labels else split_rows(len(labels["train"]), NUM_VALID, seed=0)[0]
    blocks = torch.arange(num_classes).view(-1, block)
    generator = torch.Generator().manual_seed(0)
    labels["train"][rows] = noisy_labels(labels["train"][rows], blocks, probability, generator)
    return labels


def _noise(text: str) -> tuple[float, int]:
    """Argument type: a probability, and the classes in a block."""
    probability, colon, block = text.partition(":")
    return flags.fraction(probability), flags.positive_int(block) if colon else BLOCK


def main(argv: list[str] | None = None) -> int:
    """Make the file; return the exit status."""
    parser = argparse.ArgumentParser(prog="relabel.py", description="Embeddings with some wrong training labels.")
    parser.add_argument("embeddings", type=Path, help="a torch file of embeddings")
    told = "P, the probability with which a training label is drawn anew, or P:N, within blocks of N classes (5)"
    parser.add_argument("noise", type=_noise, help=told)
    args = parser.parse_args(argv)
    embeddings, (p, block) = load_embeddings(args.embeddings), args.noise
    name = f"{args.embeddings.stem}_noise_{f'{p:g}'.removeprefix('0')}{f'_of_{block}' * (block != BLOCK)}.pt"
    print(relabelled(embeddings, wrong_labels(embeddings, p, block), args.embeddings.with_name(name)))
    return 0


if __name__ == "__main__":
    main()
