"""A store's embeddings with other labels; from the command line, with some of the training labels wrong.

    python -m scripts.sweeping.relabel heads.store .2     # makes heads_noise_.2.store beside it, and prints its path
    python -m scripts.sweeping.relabel heads.store .2:100 # heads_noise_.2_of_100.store

Each training label is drawn anew with that probability among the five of its block of class ids, as train_cifar100.py
--label_noise does (Berrada, Zisserman and Kumar 2018), or among so many; the rows that validate heads, and those of
test, keep theirs.
"""

if __name__ == "__main__":  # from here on, what goes wrong is a sentence
    from data import program

    program.begin()

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from data import program
from data.cifar100 import noisy_labels
from data.embeddings import DTYPES, MANIFEST, EmbeddingStore, StoreWriter, open_or_fetch, split_rows
from experiments.shared import command_line as cli
from scripts.sweeping.heads import NUM_VALID

BLOCK = 5  # class ids of which one is drawn


def relabelled(store: EmbeddingStore, labels: Mapping[str, Tensor], path: Path) -> Path:
    """Make a store of the same rows with other labels, (N,) int64 by split, if it is not there; return its path."""
    if not (path / MANIFEST).exists():
        about = {"backbone": store.backbone, "resolution": store.resolution, "source": store.source}
        writer = StoreWriter(path, dim=store.dim, dtype=DTYPES[store.dtype_name], **about)
        for name, split in store.splits.items():
            writer.write(name, 0, split.read(torch.arange(len(split))), labels[name])
        writer.finish()
    return path


def wrong_labels(store: EmbeddingStore, probability: float, block: int = BLOCK) -> dict[str, Tensor]:
    """The labels of a store by split, some wrong of the rows of train, but NUM_VALID that validate where no others do.

    probability: in [0, 1], that one is drawn anew, from its block of class ids, itself included. CommandLineError.
    """
    cli.check(store.num_classes % block == 0, f"blocks of {block} classes do not divide {store.num_classes} classes")
    labels = {name: split.labels() for name, split in store.splits.items()}
    with cli.refusing():
        rows = ... if "valid" in labels else split_rows(len(labels["train"]), NUM_VALID, seed=0)[0]
    blocks = torch.arange(store.num_classes).view(-1, block)
    generator = torch.Generator().manual_seed(0)
    labels["train"][rows] = noisy_labels(labels["train"][rows], blocks, probability, generator)
    return labels


def _noise(text: str) -> tuple[float, int]:
    """Argument type: a probability, and the classes in a block."""
    probability, colon, block = text.partition(":")
    return cli.said(cli.fraction)(probability), program.whole_number(1)(block) if colon else BLOCK


def main(argv: list[str] | None = None) -> int:
    """Make the store; return the exit status."""
    parser = program.Parser(prog="relabel.py", description="A store with some of its training labels wrong.")
    parser.add_argument("store", type=program.path, help="of embeddings")
    told = "P, the probability with which a training label is drawn anew, or P:N, within blocks of N classes (5)"
    parser.add_argument("noise", type=_noise, help=told)
    args = parser.parse_args(argv)
    store, (p, block) = open_or_fetch(args.store), args.noise
    name = f"{args.store.stem}_noise_{f'{p:g}'.removeprefix('0')}{f'_of_{block}' * (block != BLOCK)}.store"
    print(relabelled(store, wrong_labels(store, p, block), args.store.with_name(name)))
    return 0


if __name__ == "__main__":
    program.end(program.finish(main))
