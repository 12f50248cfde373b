"""Writes a store of embeddings (`store.py`): shard by shard, resumable, by one process or several.

Every file is written under a temporary name, synchronised and renamed. A shard counts as there once its record,
`train-00000.shard.json`, is; the manifest is merged from the records at the end.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.atomic_file import atomic_write
from data.checked_json import JsonError, read_json, write_json
from data.embeddings.store import (
    DTYPES,
    MANIFEST,
    UNFINISHED,
    EmbeddingError,
    EmbeddingStore,
    Manifest,
    Settings,
    Shard,
    StoredFile,
    StoredSplit,
    check_labels,
    dtype_name,
    npy_header,
    open_store,
)


class StoreWriter:
    """Writes a store shard by shard; a killed writer's work is kept, and the same call continues.

        writer = StoreWriter(folder, dim=2048, dtype=torch.float16, source="...")
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
        num_classes: int | None = None,
        backbone: str | None = None,
        resolution: int | None = None,
        source: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin a store in `folder`, or continue one.

        num_classes: largest label + 1 if left out. details: anything JSON can hold, kept in the manifest. Raises
        EmbeddingError where the folder holds a complete store, or shards of one with other settings.
        """
        self.folder = Path(os.path.expanduser(folder))
        if (self.folder / MANIFEST).exists():
            raise EmbeddingError(f"{self.folder} is a complete store already; delete it or choose another folder")
        noted = json.loads(json.dumps(dict(details or {})))
        self._settings = Settings(dim, dtype_name(dtype), num_classes, backbone, resolution, source, noted)
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            found = read_json(self.folder / UNFINISHED, Settings)
        except FileNotFoundError:
            write_json(self.folder / UNFINISHED, self._settings, shared=True)
            return
        except JsonError as error:
            raise EmbeddingError(f"{error}; delete {self.folder} to begin the store again") from None
        changed = [
            f"{name} {before!r}, now {now!r}"
            for (name, before), now in zip(asdict(found).items(), asdict(self._settings).values())
            if before != now
        ]
        if changed:
            raise EmbeddingError(
                f"{self.folder} holds shards that were written with other settings ({'; '.join(changed)}): "
                "delete it, choose another folder, or use the same settings to continue"
            )

    def present(self, split: str) -> set[int]:
        """The numbers of the shards of `split` that are whole, written now or by an earlier process."""
        return {
            number
            for number, shard in self._shards(split).items()
            if not shard.problems(self.folder, self._settings.dtype, self._settings.embedding_dim)
        }

    def write(self, split: str, number: int, embeddings: Tensor, labels: Tensor) -> None:
        """Write one shard.

        embeddings: (R, dim) of the store's dtype, on the CPU, R at least 1. labels: (R,) of an integer dtype, not
        negative and below num_classes. Raises EmbeddingError for others; OSError (disk full, say) passes through.
        """
        if not re.fullmatch(r"[a-z0-9_]+", split) or number < 0:
            raise EmbeddingError(
                f"a shard needs a split name of a-z, 0-9, _ and a number from 0, got {split!r}, {number}"
            )
        dtype, dim = self._settings.dtype, self._settings.embedding_dim
        if embeddings.dtype != DTYPES[dtype] or embeddings.shape != (len(labels), dim) or not len(labels):
            raise EmbeddingError(
                f"embeddings must be {dtype} of shape ({len(labels)}, {dim}), a row for each label and "
                f"at least one, got {dtype_name(embeddings.dtype)} of shape {tuple(embeddings.shape)}"
            )
        check_labels(labels, self._settings.num_classes)
        labels = labels.to(torch.int64)  # (R,)
        stem = f"{split}-{number:05}"
        record = self.folder / f"{stem}.shard.json"
        record.unlink(missing_ok=True)
        shard = Shard(
            rows=len(labels),
            label_min=int(labels.min()),
            label_max=int(labels.max()),
            embeddings=_write_array(self.folder / f"{stem}.embeddings.npy", embeddings, dtype),
            labels=_write_array(self.folder / f"{stem}.labels.npy", labels, "int64"),
        )
        write_json(record, shard, shared=True)  # last: a shard with a record is whole

    def finish(self, shards: Mapping[str, int] | None = None) -> EmbeddingStore:
        """Merge the shards of all writers into the manifest, and open the store.

        shards: how many each split must have; without it, the numbers from 0 to the highest found. Raises
        EmbeddingError, naming the missing shards.
        """
        if shards is None:
            names = {path.name.rpartition("-")[0] for path in self.folder.glob("*.shard.json")}
            shards = {name: max(self._shards(name)) + 1 for name in sorted(names, key=_split_order)}
        missing = [
            f"{split}-{number:05}"
            for split, count in shards.items()
            for number in sorted(set(range(count)) - self.present(split))
        ]
        if missing or not shards:
            raise EmbeddingError(f"{self.folder} cannot be finished: {', '.join(missing) or 'every shard'} is missing")
        splits, settings = {}, asdict(self._settings)
        dtype = settings.pop("dtype")  # said per split
        for split, count in shards.items():
            found = self._shards(split)
            merged = tuple(found[number] for number in range(count))
            rows = sum(shard.rows for shard in merged)
            splits[split] = StoredSplit(dtype, (rows, settings["embedding_dim"]), (rows,), "int64", merged)
        highest = max(shard.label_max for split in splits.values() for shard in split.shards)
        settings["num_classes"] = settings["num_classes"] or highest + 1
        write_json(self.folder / MANIFEST, Manifest("embedding store", 1, **settings, splits=splits), shared=True)
        return open_finished(self.folder)

    def _shards(self, split: str) -> dict[int, Shard]:
        found = {}
        for path in self.folder.glob(f"{split}-[0-9]*.shard.json"):
            number = path.name.removeprefix(f"{split}-").removesuffix(".shard.json")
            try:
                if number.isdecimal():
                    found[int(number)] = read_json(path, Shard)
            except (FileNotFoundError, JsonError):
                pass  # another process may just have merged it; a shard without its record is written again
        return found


def open_finished(folder: Path) -> EmbeddingStore:
    """Open a complete store, and remove what only its writing needed, or a killed writer left.

    For the process that holds it against other writers. Raises EmbeddingError as `open_store` does.
    """
    store = open_store(folder)
    for leftover in (*folder.glob("*.shard.json"), *folder.glob(".*.tmp"), folder / UNFINISHED):
        leftover.unlink(missing_ok=True)
    return store


def _split_order(name: str) -> tuple[int, str]:
    """Train before validation before test before others."""
    known = ("train", "valid", "test")
    return (known.index(name) if name in known else len(known), name)


def _write_array(path: Path, tensor: Tensor, name: str) -> StoredFile:
    """Write a CPU tensor as .npy under a temporary name, rename it, and return its size and checksum."""
    header = npy_header(name, tuple(tensor.shape))
    content = memoryview(tensor.contiguous().view(torch.uint8).numpy()).cast("B")
    digest = hashlib.sha256(header)
    digest.update(content)
    with atomic_write(path, "wb", shared=True) as file:
        file.write(header)
        file.write(content)
    return StoredFile(path.name, len(header) + len(content), digest.hexdigest())
