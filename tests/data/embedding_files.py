"""Small embedding sets for the tests of data/embeddings: as torch files of the published layouts, and as stores."""

import torch

from data.embeddings import LAYOUTS, StoreWriter

DIM, TRAIN, TEST, CLASSES = 16, 100, 30, 7


def content(dtype=torch.float16):
    """The four parts of a set, by their names in a store; every class is in every split."""
    generator = torch.Generator().manual_seed(1)
    parts = {}
    for split, rows in (("train", TRAIN), ("test", TEST)):
        parts[f"{split}_embeddings"] = torch.randn(rows, DIM, generator=generator).to(dtype)
        parts[f"{split}_labels"] = torch.arange(rows) % CLASSES
    return parts


def save(path, layout="wsl", dtype=torch.float16, **options):
    """A file of a published layout, and what is in it."""
    parts = content(dtype)
    torch.save({key: parts[name] for name, key in LAYOUTS[layout].items()}, path, **options)
    return parts


def write_store(folder, train=(60, 40), dtype=torch.float16, **settings):
    """A store of shards with these numbers of rows, and what is in it."""
    writer, parts = StoreWriter(folder, dim=DIM, dtype=dtype, shard_rows=max(train), **settings), content(dtype)
    for split, sizes in (("train", train), ("test", (TEST,))):
        embeddings, labels = (parts[f"{split}_{part}"].split(sizes) for part in ("embeddings", "labels"))
        for number in range(len(sizes)):
            writer.write(split, number, embeddings[number], labels[number])
    return writer.finish(), parts


def assert_holds(store, parts, dtype=None):
    """Every row and label, in this dtype (as they are without one), and every checksum."""
    for split in ("train", "test"):
        expected = parts[f"{split}_embeddings"].to(dtype)
        read = store[split].read(torch.arange(len(store[split])))
        assert read.dtype == store[split].dtype == expected.dtype
        assert torch.equal(read, expected)
        assert torch.equal(store[split].labels(), parts[f"{split}_labels"])
    assert (store.dim, store.num_classes, store.verify()) == (DIM, CLASSES, [])
