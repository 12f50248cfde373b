"""Writes a store of embeddings (`store.py`): shard by shard, resumable, by one process or several.

Every file is written under a temporary name, synchronised and renamed. A shard counts as there once its record,
`train-00000.shard.json`, is; the manifest is merged from the records at the end.
"""

import hashlib
import io
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.atomic_file import atomic_write
from data.embeddings.store import (
    DTYPES,
    FORMAT,
    MANIFEST,
    ON_DISK,
    UNFINISHED,
    VERSION,
    EmbeddingError,
    EmbeddingStore,
    Shard,
    StoredFile,
    check_labels,
    dtype_name,
    open_store,
    size_problem,
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
        self.folder, self.dim = Path(folder).expanduser(), dim
        self.dtype_name = dtype_name(dtype)
        if (self.folder / MANIFEST).exists():
            raise EmbeddingError(f"{self.folder} is a complete store already; delete it or choose another folder")
        self.num_classes = num_classes
        self._settings = {
            "embedding_dim": dim,
            "dtype": self.dtype_name,
            "num_classes": num_classes,
            "backbone": backbone,
            "resolution": resolution,
            "source": source,
            "details": json.loads(json.dumps(dict(details or {}))),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        found = _read_json(self.folder / UNFINISHED)
        if found is None:
            _write_json(self.folder / UNFINISHED, self._settings)
        elif found != self._settings:
            changed = [
                f"{name} {found.get(name)!r}, now {value!r}"
                for name, value in self._settings.items()
                if found.get(name) != value
            ]
            raise EmbeddingError(
                f"{self.folder} holds shards that were written with other settings ({'; '.join(changed)}): "
                "delete it, choose another folder, or use the same settings to continue"
            )

    def present(self, split: str) -> set[int]:
        """The numbers of the shards of `split` that are whole, written now or by an earlier process."""
        return {
            number
            for number, shard in self._shards(split).items()
            if not any(size_problem(self.folder, file) for file in shard.files)
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
        if (
            embeddings.dtype != DTYPES[self.dtype_name]
            or embeddings.shape != (len(labels), self.dim)
            or not len(labels)
        ):
            raise EmbeddingError(
                f"embeddings must be {self.dtype_name} of shape ({len(labels)}, {self.dim}), a row for each label and "
                f"at least one, got {dtype_name(embeddings.dtype)} of shape {tuple(embeddings.shape)}"
            )
        labels = check_labels(labels, self.num_classes)  # (R,) int64
        stem = f"{split}-{number:05}"
        record = self.folder / f"{stem}.shard.json"
        record.unlink(missing_ok=True)
        shard = Shard(
            rows=len(labels),
            label_min=int(labels.min()),
            label_max=int(labels.max()),
            embeddings=_write_array(self.folder / f"{stem}.embeddings.npy", embeddings, self.dtype_name),
            labels=_write_array(self.folder / f"{stem}.labels.npy", labels, "int64"),
        )
        _write_json(record, asdict(shard))  # last: a shard with a record is whole

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
        splits = {}
        for split, count in shards.items():
            found = self._shards(split)
            rows = sum(found[number].rows for number in range(count))
            splits[split] = {
                "dtype": self.dtype_name,
                "embeddings_shape": [rows, self.dim],
                "labels_shape": [rows],
                "labels_dtype": "int64",
                "shards": [asdict(found[number]) for number in range(count)],
            }
        highest = max(shard["label_max"] for split in splits.values() for shard in split["shards"])
        manifest = {"format": FORMAT, "version": VERSION, **self._settings, "splits": splits}
        manifest["num_classes"] = self.num_classes or highest + 1
        del manifest["dtype"]  # said per split
        _write_json(self.folder / MANIFEST, manifest)
        # The store is complete; what only its writing needed, or a killed writer left, can go.
        for leftover in (*self.folder.glob("*.shard.json"), *self.folder.glob(".*.tmp"), self.folder / UNFINISHED):
            leftover.unlink(missing_ok=True)
        return open_store(self.folder)

    def _shards(self, split: str) -> dict[int, Shard]:
        records = sorted(self.folder.glob(f"{split}-[0-9]*.shard.json"))
        found = ((int(path.name.removeprefix(f"{split}-").split(".")[0]), _read_json(path)) for path in records)
        return {number: Shard.from_json(record) for number, record in found if record is not None}


def _split_order(name: str) -> tuple[int, str]:
    """Train before validation before test before others."""
    known = ("train", "valid", "test")
    return (known.index(name) if name in known else len(known), name)


def _write_array(path: Path, tensor: Tensor, name: str) -> StoredFile:
    """Write a CPU tensor as .npy under a temporary name, rename it, and return its size and checksum."""
    header = io.BytesIO()
    description = {"descr": ON_DISK[name], "fortran_order": False, "shape": tuple(tensor.shape)}
    np.lib.format.write_array_header_1_0(header, description)
    content = memoryview(tensor.contiguous().view(torch.uint8).numpy()).cast("B")
    digest = hashlib.sha256(header.getvalue())
    digest.update(content)
    with atomic_write(path, "wb", shared=True) as file:
        file.write(header.getvalue())
        file.write(content)
    return StoredFile(path.name, len(header.getvalue()) + len(content), digest.hexdigest())


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with atomic_write(path, shared=True) as file:
        file.write(json.dumps(content, indent=1) + "\n")


def _read_json(path: Path) -> Any | None:
    """The content of a JSON file, None if there is none (another process may just have merged it)."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
