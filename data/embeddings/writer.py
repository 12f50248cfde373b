"""Writes a store of embeddings (`store.py`): shard by shard, resumable, by one process or several.

The shards of a split are written to their places in `train.embeddings.npy.part` and `train.labels.npy.part`. A shard
counts as there once its record, `train-00000.shard.json`, is; the end gives the files their names, and meta.json is
written last.
"""

import itertools
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.atomic_file import atomic_write
from data.checked_json import JsonError, read_json, write_json
from data.embeddings.store import (
    DTYPES,
    HEADER,
    MANIFEST,
    ON_DISK,
    PARTS,
    UNFINISHED,
    EmbeddingError,
    EmbeddingStore,
    Manifest,
    Shard,
    check_labels,
    dtype_name,
    file_of,
    npy_header,
    open_store,
    refuse_old,
    row_type,
    sha256_of,
)


class StoreWriter:
    """Writes a store shard by shard; a killed writer's work is kept, and the same call continues.

        writer = StoreWriter(folder, dim=2048, dtype=torch.float16, shard_rows=8192, source="...")
        if 7 not in writer.present("train"):
            writer.write("train", 7, embeddings, labels)
        store = writer.finish()

    Several processes may write shards of different numbers into the same folder, each with its own writer and the
    same settings; one of them calls `finish` when all are done. Shard numbers begin at 0 and order the rows.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        dim: int,
        dtype: torch.dtype,
        shard_rows: int | None = None,
        num_classes: int | None = None,
        backbone: str | None = None,
        resolution: int | None = None,
        source: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin a store in `folder`, or continue one.

        shard_rows: most rows of a shard; without it a split is one shard. num_classes: largest label + 1 if left out.
        details: anything JSON can hold, kept in meta.json. Raises EmbeddingError where the folder holds a complete
        store, or shards of one with other settings.
        """
        self.folder = Path(os.path.expanduser(folder))
        refuse_old(self.folder)
        if (self.folder / MANIFEST).exists():
            raise EmbeddingError(f"{self.folder} is a complete store already; delete it or choose another folder")
        self._dim, self._dtype, self._shard_rows, self._num_classes = dim, dtype_name(dtype), shard_rows, num_classes
        described = {"backbone": backbone, "resolution": resolution, "source": source, "details": dict(details or {})}
        self._settings = {"dim": dim, "dtype": self._dtype, "num_classes": num_classes, **described}
        now = json.loads(json.dumps({**self._settings, "shard_rows": shard_rows}))
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            found = read_json(self.folder / UNFINISHED, dict[str, Any])
        except FileNotFoundError:
            write_json(self.folder / UNFINISHED, now, shared=True)
            return
        except JsonError as error:
            raise EmbeddingError(f"{error}; delete {self.folder} to begin the store again") from None
        if changed := differences(found, now):
            raise EmbeddingError(
                f"{self.folder} holds shards that were written with other settings ({changed}): delete it, choose "
                "another folder, or use the same settings to continue"
            )

    def present(self, split: str) -> set[int]:
        """The numbers of the shards of `split` that are whole, written now or by an earlier process."""
        return set(self._shards(split))

    def write(self, split: str, number: int, embeddings: Tensor, labels: Tensor) -> None:
        """Write one shard.

        embeddings: (R, dim) of the store's dtype, on the CPU, R from 1 to shard_rows. labels: (R,) of an integer dtype,
        not negative and below num_classes. Raises EmbeddingError for others; OSError (disk full, say) passes through.
        """
        most = self._shard_rows
        if not re.fullmatch(r"[a-z0-9_]+", split) or number < 0 or (most is None and number):
            raise EmbeddingError(
                f"a shard needs a split name of a-z, 0-9, _ and a number from 0 (0 without shard_rows), got {split!r}, "
                f"{number}"
            )
        shape, rows = tuple(embeddings.shape), len(labels)
        if embeddings.dtype != DTYPES[self._dtype] or shape != (rows, self._dim) or not 0 < rows <= (most or rows):
            raise EmbeddingError(
                f"embeddings must be {self._dtype} of shape ({rows}, {self._dim}), a row for each label and from 1 to "
                f"{most or 'any number of'} rows, got {dtype_name(embeddings.dtype)} of shape {shape}"
            )
        check_labels(labels, self._num_classes)
        record = self.folder / f"{split}-{number:05}.shard.json"
        record.unlink(missing_ok=True)
        arrays = {
            "embeddings": embeddings.contiguous().view(torch.uint8).numpy().view(ON_DISK[self._dtype]),  # (R, dim)
            "labels": labels.to(torch.int64).contiguous().numpy(),  # (R,)
        }
        for part, array in arrays.items():
            path = self._unfinished(split, part)
            path.touch()
            with open(path, "r+b") as file:
                file.seek(HEADER + number * (most or 0) * array[:1].nbytes)
                file.write(array)
                file.flush()
                os.fsync(file.fileno())
        # Last: a shard with a record is whole.
        write_json(record, Shard(rows, **{part: sha256_of(array) for part, array in arrays.items()}), shared=True)

    def finish(self, shards: Mapping[str, int] | None = None) -> EmbeddingStore:
        """Give the files of all writers their names, write meta.json, and open the store.

        shards: how many each split must have; without it, the numbers from 0 to the highest found. Raises
        EmbeddingError, naming the missing shards.
        """
        if shards is None:
            names = {path.name.rpartition("-")[0] for path in self.folder.glob("*.shard.json")}
            shards = {name: max(self._shards(name), default=0) + 1 for name in sorted(names, key=_split_order)}
        found = {split: self._shards(split) for split in shards}
        wanted = [(split, number) for split, count in shards.items() for number in range(count)]
        missing = [f"{split}-{number:05}" for split, number in wanted if number not in found[split]]
        if missing or not shards:
            raise EmbeddingError(f"{self.folder} cannot be finished: {', '.join(missing) or 'every shard'} is missing")
        splits = {split: [found[split][number] for number in range(count)] for split, count in shards.items()}
        for split, part in itertools.product(splits, PARTS):
            if self._unfinished(split, part).exists():  # else an earlier process came as far as here
                self._name(split, part, [shard.rows for shard in splits[split]])
        labels = (np.memmap(file_of(self.folder, split, "labels"), "<i8", "r", HEADER) for split in splits)
        num_classes = self._num_classes or 1 + max(int(each.max()) for each in labels)
        manifest = Manifest("embedding store", 2, **{**self._settings, "num_classes": num_classes}, splits=splits)
        write_json(self.folder / MANIFEST, manifest, shared=True)
        return open_finished(self.folder)

    def _name(self, split: str, part: str, rows: list[int]) -> None:
        """Turn the file that was filled into one of the store: a header, no gaps, its name."""
        path, final = self._unfinished(split, part), file_of(self.folder, split, part)
        row = row_type(part, self._dtype, self._dim)
        if all(count == self._shard_rows for count in rows[:-1]):
            with open(path, "r+b") as file:
                file.write(npy_header(row, sum(rows)))
                file.truncate(HEADER + sum(rows) * row.itemsize)
                file.flush()
                os.fsync(file.fileno())
            os.replace(path, final)
            return
        filled = np.memmap(path, row, "r", HEADER, ((path.stat().st_size - HEADER) // row.itemsize,))
        with atomic_write(final, "wb") as file:
            file.write(npy_header(row, sum(rows)))
            for number, count in enumerate(rows):
                file.write(filled[number * self._shard_rows :][:count])
        path.unlink()

    def _shards(self, split: str) -> dict[int, Shard]:
        """The records of the shards whose rows are there."""
        ends = []  # rows that fit into each file; into one that has its name already, all
        for part in PARTS:
            path, row = self._unfinished(split, part), row_type(part, self._dtype, self._dim)
            size = path.stat().st_size if path.exists() else HEADER
            named = not path.exists() and file_of(self.folder, split, part).exists()
            ends.append(math.inf if named else (size - HEADER) // row.itemsize)
        found = {}
        for path in self.folder.glob(f"{split}-[0-9]*.shard.json"):
            number = path.name.removeprefix(f"{split}-").removesuffix(".shard.json")
            try:
                shard = read_json(path, Shard)
            except (FileNotFoundError, JsonError):
                continue  # another process may just have merged it; a shard without its record is written again
            if number.isdecimal() and int(number) * (self._shard_rows or 0) + shard.rows <= min(ends):
                found[int(number)] = shard
        return found

    def _unfinished(self, split: str, part: str) -> Path:
        return self.folder / f"{file_of(self.folder, split, part).name}.part"


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The settings in `now` that were others before, for a message."""
    return "; ".join(f"{name} {before.get(name)!r}, now {now[name]!r}" for name in now if before.get(name) != now[name])


def open_finished(folder: Path) -> EmbeddingStore:
    """Open a complete store, and remove what only its writing needed, or a killed writer left.

    For the process that holds it against other writers. Raises EmbeddingError as `open_store` does.
    """
    store = open_store(folder)
    for pattern in ("*.shard.json", "*.npy.*", ".*.tmp", UNFINISHED):
        for leftover in folder.glob(pattern):
            leftover.unlink()
    return store


def _split_order(name: str) -> tuple[int, str]:
    """Train before validation before test before others."""
    known = ("train", "valid", "test")
    return (known.index(name) if name in known else len(known), name)
