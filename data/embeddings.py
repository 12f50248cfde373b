"""Embeddings in a torch file, as published: train_embeddings (N, d), train_labels (N,), test_embeddings, test_labels.

    embeddings = load_embeddings(Path("own.pt"))
    train, valid = split_rows(len(embeddings["train"]), 50_000, seed=0)
    for x, y in batches(embeddings["train"], train, batch_size=500, epoch=1, seed=0, device=device): ...

The file is mapped, not read: it opens at once whatever its size, and rows that fit into memory stay in the page cache.
The order of an epoch depends only on the seed, the epoch and the number of rows. It is made for disks: blocks of 8
neighbouring rows are shuffled over the whole set, single rows within windows of 131,072. A set no larger than a window
is in a uniformly random order.
"""

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.published import published_info, without_secrets
from data.splits import Split, seeded
from data.torch_file import load_torch_file

BLOCK_ROWS = 8  # neighbouring rows that stay in one window, so that a disk reads 32 KB at a time, not 4
WINDOW_ROWS = 131_072  # rows that are shuffled singly: 512 MiB at 2048 float16; two windows are in memory
CHECKED_ROWS = 8192  # rows checked at once
SPLITS = ("train", "valid", "test", "clean")  # clean: the rows of valid with correct labels, where those are wrong
NPY_TYPES = {"float16": "<f2", "float32": "<f4", "float64": "<f8", "bfloat16": "<u2", "int64": "<i8"}
SETTLED_NS = 2_000_000_000  # a file may change once more within a tick of its file system's clock
# Purposes of random numbers.
SPLIT = 0
ORDER = 1
MIXUP = 2
KEY = re.compile(r"(?:.*_)?(train|valid|val|test|clean)_(embeddings|labels)")
NEEDED = "train_embeddings (N, d) and train_labels (N,), and the same for test_ and valid_, if any"


@dataclass
class Embeddings:
    """The splits of a file by name, at least train.

    Attributes:
        info: its backbone, resolution and number of classes, if known.
        stamp: of the file when it was opened.
    """

    path: Path
    splits: dict[str, Split]
    num_classes: int
    info: dict[str, Any]
    stamp: list[int]

    def __getitem__(self, split: str) -> Split:
        return self.splits[split]

    @property
    def dim(self) -> int:
        return self.splits["train"].inputs.shape[1]

    def to(self, device: torch.device) -> "Embeddings":
        splits = {name: split.to(device) for name, split in self.splits.items()}
        return replace(self, splits=splits)

    def check_unchanged(self) -> None:
        """Raise ValueError if the file has changed since it was opened: it is mapped, and its rows may be others."""
        if not self.path.is_file() or stamp_of(self.path) != self.stamp:
            raise ValueError(
                f"{self.path} has changed since it was opened; nothing is recorded. Give the command again, and leave "
                "the file as it is until it ends"
            )

    def about(self, source: str) -> dict[str, Any]:
        """The columns of a row: source (as the user named it), dtype, backbone, name by content.

        Raises:
            ValueError: the file says things of itself that are no words or numbers.
        """
        columns: dict[str, Any] = {"data_path": without_secrets(source), "backbone": None, "resolution": None}
        if Path(source).expanduser() == self.path:
            columns["data_path"] = self.path
        columns |= published_info(source)
        for name in ("backbone", "resolution", "labels"):
            if name not in self.info:
                continue
            columns[name] = self.info[name]
            if not isinstance(columns[name], str | int | float | None):
                kind = type(columns[name]).__name__
                raise ValueError(f"{self.path} says that its {name} is a {kind}: it must be a word or a number")
        columns["embedding_dtype"] = dtype_name(self["train"].inputs)
        columns["embeddings"] = f"{self.num_classes}x{self.dim}-{self.known_fingerprint()}"
        return columns

    def known_fingerprint(self) -> str:
        """The fingerprint, which a small file beside this one keeps: 50 GB are read once, and not by each command."""
        beside = self.path.with_name(f"{self.path.name}.fingerprint")
        try:
            known = json.loads(beside.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # absent or damaged
            known = None
        if isinstance(known, dict) and known.get("stamp") == self.stamp:
            return str(known["fingerprint"])
        fingerprint = self.fingerprint()
        if time.time_ns() - self.stamp[1] > SETTLED_NS:
            temporary = beside.with_name(f"{beside.name}.{os.getpid()}.tmp")
            with contextlib.suppress(OSError):  # a folder that cannot be written
                temporary.write_text(json.dumps({"stamp": self.stamp, "fingerprint": fingerprint}), encoding="utf-8")
                os.replace(temporary, beside)
            with contextlib.suppress(OSError):
                temporary.unlink()  # where it could not take its place
        return fingerprint

    def fingerprint(self) -> str:
        """Eight hexadecimal digits of a hash of all rows and labels in their order.

        The hash is of the SHA-256 of .npy files, from which the names of older runs were made.
        """
        shard_rows = self.info.get("shard_rows") or max(1, 2**27 // (self.dim * self["train"].inputs.itemsize))
        content = []
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
            for name, split in self.splits.items():  # in the order of SPLITS
                input_sums = threads.map(_sha256_of_npy, split.inputs.split(shard_rows))
                label_sums = threads.map(_sha256_of_npy, split.labels.split(shard_rows))
                content.append([name, dtype_name(split.inputs), list(zip(input_sums, label_sums))])
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:8]


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _sha256_of_npy(rows: Tensor) -> str:
    header = f"{{'descr': '{NPY_TYPES[dtype_name(rows)]}', 'fortran_order': False, 'shape': {tuple(rows.shape)}, }}"
    digest = hashlib.sha256(b"\x93NUMPY\x01\x00")
    digest.update((118).to_bytes(2, "little"))
    digest.update(header.ljust(117).encode() + b"\n")
    digest.update(rows.contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def stamp_of(path: Path) -> list[int]:
    """Size, times of change and number of a file: another file, or other content, has another stamp."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def load_embeddings(path: Path) -> Embeddings:
    """Map a torch file whose tensors are named [prefix_]SPLIT_embeddings and [prefix_]SPLIT_labels.

    SPLIT is one of SPLITS; "val" is how some published files call their test set.

    Raises:
        ValueError: the file does not hold these tensors, or some of them twice, or changes meanwhile.
    """
    stamp = []
    if path.is_file():
        stamp = stamp_of(path)
    content = load_torch_file(path, "a torch file of tensors", mapped=True)
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a dictionary with {NEEDED}; it holds a {type(content).__name__}")
    tensors = named_tensors(path, content)
    info = content.get("info")
    if not isinstance(info, dict):
        info = {}
    dim = tensors["train", "embeddings"].shape[-1:]
    num_classes = info.get("num_classes")
    splits = {}
    for name in SPLITS:
        if (name, "embeddings") not in tensors:
            continue
        rows = tensors[name, "embeddings"]
        labels = tensors[name, "labels"]
        check_split(f"{name} in {path}", rows, labels, dim)
        labels = labels.long()
        largest = int(labels.max())
        if num_classes is None:
            num_classes = 1 + largest  # train comes first
        if largest >= num_classes:
            raise ValueError(
                f"{name} in {path} has a label {largest}, and train has the classes 0 to {num_classes - 1}: the splits "
                "are of different sets of classes"
            )
        splits[name] = Split(rows, labels)
    check_splits(path, splits, has_all_classes="num_classes" not in info)
    embeddings = Embeddings(path, splits, num_classes, info, stamp)
    embeddings.check_unchanged()
    return embeddings


def named_tensors(path: Path, content: Mapping[Any, Any]) -> dict[tuple[str, str], Tensor]:
    """The tensors of a file by their split and what they are, such as ("train", "labels").

    Raises:
        ValueError: one is missing, or two may be meant.
    """
    tensors: dict[tuple[str, str], Tensor] = {}
    keys: dict[tuple[str, str], str] = {}
    for key, value in content.items():
        match = KEY.fullmatch(str(key))
        if match is None or not isinstance(value, Tensor):
            continue
        split, part = match.groups()
        if split == "val":
            split = "test"
        if (split, part) in keys:
            raise ValueError(
                f"{path} has {keys[split, part]} and {key}, which both may be the {part} of {split}: rename or delete "
                "one of them"
            )
        keys[split, part] = str(key)
        tensors[split, part] = value
    found = {split for split, _ in tensors} | {"train"}
    for split in found:
        if (split, "embeddings") not in tensors or (split, "labels") not in tensors:
            held = ", ".join(map(str, content)) or f"a {type(content).__name__}"
            raise ValueError(f"{path} must hold a dictionary with {NEEDED}; it holds {held}")
    return tensors


def check_split(where: str, rows: Tensor, labels: Tensor, dim: torch.Size) -> None:
    """Raise ValueError if these are no embeddings (N, dim) and labels (N,) of one split."""
    is_whole = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
    fits = rows.is_floating_point() and dtype_name(rows) in NPY_TYPES and rows.numel() > 0
    fits = fits and labels.dim() == 1 and rows.shape == (len(labels), *dim)
    if not (fits and is_whole) or int(labels.long().min()) < 0:
        raise ValueError(
            f"{where} must be floating point, (N, {', '.join(map(str, dim))}) as in train, with N whole numbers of at "
            f"least 0 as labels; it has {rows.dtype} {tuple(rows.shape)}, and labels {labels.dtype} "
            f"{tuple(labels.shape)}"
        )


def check_splits(path: Path, splits: Mapping[str, Split], has_all_classes: bool) -> None:
    """Raise ValueError for splits that do not fit each other.

    Args:
        has_all_classes: whether the labels of train name all classes. If they begin at 1, no split has a class 0 then.
    """
    if "clean" in splits and len(splits["clean"]) != len(splits.get("valid", ())):
        raise ValueError(f"clean in {path} must have the rows of valid, with their correct labels")
    smallest = int(splits["train"].labels.min())
    for name, split in splits.items():
        if has_all_classes and int(split.labels.min()) == 0 < smallest:
            raise ValueError(
                f"{name} in {path} has the class 0, and the labels of train begin at {smallest}: all splits must count "
                'the classes from 0. If train lacks classes, add "info": {"num_classes": N} to the file'
            )


def check_rows(embeddings: Embeddings, rows: Mapping[str, Tensor]) -> None:
    """Raise ValueError for the first of these rows, by split, that has a number that is not finite.

    Rows of a split that the file lacks are rows of train.
    """
    for name, chosen in rows.items():
        if name not in embeddings.splits:
            name = "train"
        inputs = embeddings[name].inputs
        for some in chosen.to(inputs.device).split(CHECKED_ROWS):
            broken = some[~inputs[some].isfinite().all(1)]
            if len(broken):
                raise ValueError(
                    f"row {int(broken[0])} of {name} in {embeddings.path} is not finite; nothing is recorded"
                )


def split_rows(num_rows: int, num_valid: int, seed: int) -> tuple[Tensor, Tensor]:
    """Divide rows at random into those that train and the `num_valid` that validate, both ascending.

    A smaller num_valid under the same seed takes a subset of the rows.

    Raises:
        ValueError: one of the two would be empty.
    """
    if not 0 < num_valid < num_rows:
        raise ValueError(f"of {num_rows} rows at least 1 must validate and must leave 1 to train: {num_valid}")
    order = torch.randperm(num_rows, generator=seeded(SPLIT, seed))
    return order[num_valid:].sort().values, order[:num_valid].sort().values


def check_right_rows(embeddings: Embeddings, valid: Tensor) -> None:
    """Raise ValueError if a file has wrong labels at rows (valid,) of train that validate.

    Its info says where train has right labels: right_rows, the arguments num_valid and seed of split_rows.
    """
    right = embeddings.info.get("right_rows")
    if right is None:
        return
    expected = split_rows(len(embeddings["train"]), right["num_valid"], right["seed"])[1]
    if not torch.equal(valid, expected):
        raise ValueError(
            f"{embeddings.path} has right labels at the rows that validate with --num_valid {right['num_valid']} "
            f"--split_seed {right['seed']} of all rows, and wrong ones among those that would validate here"
        )


def limited_rows(num_rows: int, limit_train: int | None, seed: int) -> Tensor:
    """All rows, or a random limit_train of them, ascending. Raises ValueError if there are fewer."""
    if limit_train is None or limit_train == num_rows:
        return torch.arange(num_rows)
    if limit_train > num_rows:
        raise ValueError(f"--limit_train {limit_train} exceeds the {num_rows} training rows")
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
    windows = []
    skip = start * batch_size  # rows of batches that are left out
    for positions, within in shuffled_windows(len(rows), seed, epoch):
        if skip < len(within):
            windows.append((rows[positions], within[skip:]))
        skip = max(skip - len(within), 0)
    embeddings = split.inputs[:0]  # of a batch, which may begin in one window and end in the next
    labels = split.labels[:0]
    with ThreadPoolExecutor(1) as reader:
        pending = [reader.submit(split.inputs.index_select, 0, chosen) for chosen, _ in windows[:1]]
        for number, (chosen, within) in enumerate(windows):
            window = pending.pop().result()
            window_labels = split.labels[chosen]
            if number + 1 < len(windows):
                pending.append(reader.submit(split.inputs.index_select, 0, windows[number + 1][0]))
            while len(within):
                part, within = within.tensor_split([batch_size - len(labels)])
                embeddings = torch.cat([embeddings, window[part]])
                labels = torch.cat([labels, window_labels[part]])
                if len(labels) == batch_size:
                    yield embeddings.to(device, non_blocking=True), labels.to(device, non_blocking=True)
                    embeddings = split.inputs[:0]
                    labels = split.labels[:0]


def shuffled_windows(num_rows: int, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Positions of each window (W,), ascending, and the order (W,) in which they are used."""
    generator = seeded(ORDER, seed, epoch)
    blocks = torch.randperm(-(-num_rows // BLOCK_ROWS), generator=generator)
    for chosen in blocks.split(WINDOW_ROWS // BLOCK_ROWS):
        positions = (chosen.sort().values[:, None] * BLOCK_ROWS + torch.arange(BLOCK_ROWS)).flatten()
        positions = positions[positions < num_rows]  # the last block may be shorter
        yield positions, torch.randperm(len(positions), generator=generator)
