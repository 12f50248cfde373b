"""Embeddings in a torch file, as published: train_embeddings (N, d), train_labels (N,), test_embeddings, test_labels.

    embeddings = load_embeddings(Path("own.pt"))
    train, valid = split_rows(len(embeddings["train"]), 50_000, seed=0)
    for x, y in batches(embeddings["train"], train, batch_size=500, epoch=1, seed=0, device=device): ...

The file is mapped, not read: it opens at once whatever its size, and rows that fit into memory stay in the page cache.
The order of an epoch depends only on the seed, the epoch and the number of rows. It is made for disks: blocks of 8
neighbouring rows are shuffled over the whole set, single rows within windows of 131,072. A set no larger than a window
is in a uniformly random order.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.published import published_info
from data.splits import Split, seeded
from data.torch_file import load_torch_file

BLOCK_ROWS = 8  # neighbouring rows that stay in one window, so that a disk reads 32 KB at a time, not 4
WINDOW_ROWS = 131_072  # rows that are shuffled singly: 512 MiB at 2048 float16; two windows are in memory
CHECKED_ROWS = 8192  # rows checked at once
SPLITS = ("train", "valid", "test", "clean")  # clean: the rows of valid with correct labels, where those are wrong
NPY_TYPES = {"float16": "<f2", "float32": "<f4", "float64": "<f8", "bfloat16": "<u2", "int64": "<i8"}
SPLIT, ORDER, MIXUP = 0, 1, 2  # purposes of random numbers
KEY = re.compile(r"(?:.*_)?(train|valid|val|test|clean)_(embeddings|labels)")
NEEDED = "train_embeddings (N, d) and train_labels (N,), and the same for test_ and valid_, if any"


@dataclass
class Embeddings:
    """The splits of a file by name, at least train. info: its backbone, resolution and number of classes, if known."""

    path: Path
    splits: dict[str, Split]
    num_classes: int
    info: dict[str, Any]

    def __getitem__(self, split: str) -> Split:
        return self.splits[split]

    @property
    def dim(self) -> int:
        return self.splits["train"].inputs.shape[1]

    def to(self, device: torch.device) -> "Embeddings":
        return replace(self, splits={name: split.to(device) for name, split in self.splits.items()})

    def about(self, source: str) -> dict[str, Any]:
        """The columns of a row: source (as the user named it), dtype, backbone, name by content. Reads the file."""
        columns = {"data_path": self.path if Path(source).expanduser() == self.path else source}
        columns |= {"backbone": None, "resolution": None} | published_info(source)
        columns |= {name: self.info[name] for name in ("backbone", "resolution", "labels") if name in self.info}
        columns["embedding_dtype"] = dtype_name(self["train"].inputs)
        return columns | {"embeddings": f"{self.num_classes}x{self.dim}-{self.fingerprint()}"}

    def fingerprint(self) -> str:
        """Eight hexadecimal digits of a hash of all rows and labels in their order.

        The hash is of the SHA-256 of .npy files, from which the names of older runs were made.
        """
        shard_rows = self.info.get("shard_rows") or max(1, 2**27 // (self.dim * self["train"].inputs.itemsize))
        content = []
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
            for name in (name for name in SPLITS if name in self.splits):
                parts = (self[name].inputs.split(shard_rows), self[name].labels.split(shard_rows))
                sums = list(zip(*(threads.map(_sha256_of_npy, part) for part in parts)))
                content.append([name, dtype_name(self[name].inputs), sums])
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:8]


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _sha256_of_npy(rows: Tensor) -> str:
    header = f"{{'descr': '{NPY_TYPES[dtype_name(rows)]}', 'fortran_order': False, 'shape': {tuple(rows.shape)}, }}"
    digest = hashlib.sha256(b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + header.ljust(117).encode() + b"\n")
    digest.update(rows.contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def load_embeddings(path: Path) -> Embeddings:
    """Map a torch file whose tensors are named [prefix_]SPLIT_embeddings and [prefix_]SPLIT_labels.

    SPLIT is one of SPLITS; "val" is how some published files call their test set.

    Raises:
        SystemExit: the file does not hold these tensors.
    """
    content = load_torch_file(path, "a torch file of tensors", mapped=True)
    named = content if isinstance(content, dict) else {}
    tensors: dict[str, dict[str, Tensor]] = {}
    for key, value in named.items():
        if isinstance(value, Tensor) and (match := KEY.fullmatch(str(key))):
            tensors.setdefault("test" if match[1] == "val" else match[1], {})[match[2]] = value
    if any(len(parts) < 2 for parts in tensors.values()) or "train" not in tensors:
        found = ", ".join(map(str, named)) or f"a {type(content).__name__}"
        raise SystemExit(f"error: {path} must hold a dictionary with {NEEDED}; it holds {found}")
    splits, info = {}, named.get("info") or {}
    dim, num_classes = tensors["train"]["embeddings"].shape[-1], info.get("num_classes")
    for name in (name for name in SPLITS if name in tensors):
        rows, labels = tensors[name]["embeddings"], tensors[name]["labels"]
        fits = rows.is_floating_point() and rows.numel() and labels.dim() == 1 and rows.shape == (len(labels), dim)
        if not fits or labels.is_floating_point() or int(labels.min()) < 0:
            found = f"{rows.dtype} {tuple(rows.shape)}, and labels {labels.dtype} {tuple(labels.shape)}"
            rule = f"floating point, (N, {dim}) as in train, with N whole numbers of at least 0 as labels"
            raise SystemExit(f"error: {name} in {path} must be {rule}; it has {found}")
        num_classes = num_classes or 1 + int(labels.max())  # train comes first
        if labels.max() >= num_classes:
            found = f"a label {int(labels.max())}, and train has the classes 0 to {num_classes - 1}"
            raise SystemExit(f"error: {name} in {path} has {found}: the splits are of different sets of classes")
        splits[name] = Split(rows, labels.long())
    return Embeddings(path, splits, num_classes, info)


def check_rows(embeddings: Embeddings, rows: Mapping[str, Tensor]) -> None:
    """Raise SystemExit for the first of these rows, by split, that has a number that is not finite.

    Rows of a split that the file lacks are rows of train.
    """
    for name, chosen in rows.items():
        name = name if name in embeddings.splits else "train"
        inputs = embeddings[name].inputs
        for some in chosen.to(inputs.device).split(CHECKED_ROWS):
            broken = some[~inputs[some].isfinite().all(1)]
            if len(broken):
                found = f"row {int(broken[0])} of {name} in {embeddings.path} is not finite"
                raise SystemExit(f"error: {found}; nothing is recorded")


def split_rows(num_rows: int, num_valid: int, seed: int) -> tuple[Tensor, Tensor]:
    """Divide rows at random into those that train and the `num_valid` that validate, both ascending.

    A smaller num_valid under the same seed takes a subset of the rows.

    Raises:
        SystemExit: one of the two would be empty.
    """
    if not 0 < num_valid < num_rows:
        raise SystemExit(f"error: of {num_rows} rows at least 1 must validate and must leave 1 to train: {num_valid}")
    order = torch.randperm(num_rows, generator=seeded(SPLIT, seed))
    return order[num_valid:].sort().values, order[:num_valid].sort().values


def limited_rows(num_rows: int, limit_train: int | None, seed: int) -> Tensor:
    """All rows, or a random limit_train of them, ascending. Raises SystemExit if there are fewer."""
    if (limit_train or 0) > num_rows:
        raise SystemExit(f"error: --limit_train {limit_train} exceeds the {num_rows} training rows")
    if limit_train in (None, num_rows):
        return torch.arange(num_rows)
    return split_rows(num_rows, limit_train, seed)[1]


def epoch_order(num_rows: int, seed: int, epoch: int) -> Tensor:
    """The order in which an epoch visits its rows, (num_rows,) int64."""
    return torch.cat([positions[within] for positions, within in shuffled_windows(num_rows, seed, epoch)])


def mixup(batch_size: int, alpha: float, seed: int, step: int) -> tuple[float, Tensor]:
    """Draw the share of mixup from Beta(alpha, alpha), and for each row of a batch its partner, (batch_size,) int64.

    Both are functions of the seed and the step; the partners do not depend on alpha.
    """
    random = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(MIXUP, step)))
    partners = torch.from_numpy(random.permutation(batch_size))
    return float(random.beta(alpha, alpha)), partners


def batches(
    split: Split, rows: Tensor, batch_size: int, epoch: int, seed: int, device: torch.device, start: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """The shuffled whole batches of an epoch, for embeddings on a GPU or in the page cache.

    Args:
        rows: the rows of the split that are used, (R,) int64, ascending.
        start: number of batches to leave out, for a run that continues within an epoch.
    """
    order = rows[epoch_order(len(rows), seed, epoch)].to(split.inputs.device)
    for begin in range(start * batch_size, len(order) - batch_size + 1, batch_size):
        chosen = order[begin : begin + batch_size]
        embeddings, labels = split.batch(chosen)
        yield embeddings.to(device), labels.to(device)


def streamed_batches(
    split: Split, rows: Tensor, batch_size: int, epoch: int, seed: int, device: torch.device, start: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """The same batches from a file larger than memory: the next window is read while this one is used."""
    windows, skip = [], start * batch_size
    for positions, within in shuffled_windows(len(rows), seed, epoch):
        if skip < len(within):
            windows.append((rows[positions], within[skip:]))
        skip = max(skip - len(within), 0)
    batch = nothing = split.inputs[:0], split.labels[:0]  # a batch may begin in one window and end in the next
    with ThreadPoolExecutor(1) as reader:
        pending = [reader.submit(split.inputs.index_select, 0, chosen) for chosen, _ in windows[:1]]
        for number, (chosen, within) in enumerate(windows):
            window, labels = pending.pop().result(), split.labels[chosen]
            if number + 1 < len(windows):
                pending.append(reader.submit(split.inputs.index_select, 0, windows[number + 1][0]))
            while len(within):
                part, within = within.tensor_split([batch_size - len(batch[1])])
                batch = torch.cat([batch[0], window[part]]), torch.cat([batch[1], labels[part]])
                if len(batch[1]) == batch_size:
                    yield batch[0].to(device, non_blocking=True), batch[1].to(device, non_blocking=True)
                    batch = nothing


def shuffled_windows(num_rows: int, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Positions of each window (W,), ascending, and the order (W,) in which they are used."""
    generator = seeded(ORDER, seed, epoch)
    blocks = torch.randperm(-(-num_rows // BLOCK_ROWS), generator=generator)
    for chosen in blocks.split(WINDOW_ROWS // BLOCK_ROWS):
        positions = (chosen.sort().values[:, None] * BLOCK_ROWS + torch.arange(BLOCK_ROWS)).flatten()
        positions = positions[positions < num_rows]  # the last block may be shorter
        yield positions, torch.randperm(len(positions), generator=generator)
