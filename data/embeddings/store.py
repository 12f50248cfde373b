"""A folder of embeddings and labels that opens in milliseconds, whatever its size. Written by writer.py.

    <store>/
        train-00000.embeddings.npy    (rows, dim) float16, float32, or bfloat16 as its 16 bits in uint16
        train-00000.labels.npy        (rows,) int64
        train-00001.embeddings.npy    ...
        test-00000.embeddings.npy     ...
        manifest.json                 written last: a folder without it is not a store

The manifest holds, per split, the shapes, the dtype and the shards with the size and SHA-256 of each file, and
for the whole the class count, backbone, resolution and source. `open_store` reads it and looks at the size and
the header of each file, nothing more; `EmbeddingStore.verify` reads every byte and names each file that changed.

Why .npy and not safetensors: a file is a header of 128 bytes and then the rows, so any range of rows is one read
at a known place and the whole is one memory map; every tool opens it, and it needs no further dependency. The
price is that NumPy has no bfloat16; the manifest names the true dtype of such a shard.
"""

import hashlib
import io
import itertools
import json
import math
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from tqdm import tqdm

from data.checked_json import JsonError, read_json
from data.program import ProgramError

MANIFEST = "manifest.json"
DTYPES: dict[str, torch.dtype] = {
    "float16": torch.float16,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}
UNVERIFIED = "unverified"  # the checksum of a file of embeddings where none was known

# How each dtype lies on the disk, in NumPy's notation.
ON_DISK = {"float16": "<f2", "float32": "<f4", "bfloat16": "<u2", "int64": "<i8"}
UNFINISHED = "unfinished.json"  # in a folder that is being written: the settings that all its shards share
_RUN_ROWS = 1024  # most rows in one read, so that the memory a read needs is bounded
_RUN_GAP = 8  # rows left out that are cheaper to read along than to begin another read after
_CHECK_ROWS = 2**20  # labels looked at together
_MOST_CLASSES = 2**31 - 1

# What a manifest may say. It may come from elsewhere: the names lead to no other folder, and no size overflows.
_Count = Annotated[int, Field(ge=1, lt=2**40)]
_Label = Annotated[int, Field(ge=0, lt=_MOST_CLASSES)]
_Dtype = Literal["float16", "float32", "bfloat16"]
_FileName = Annotated[str, Field(pattern=r"^[a-z0-9_]+-\d{5,12}\.(embeddings|labels)\.npy$")]
_SplitName = Annotated[str, Field(pattern=r"^[a-z0-9_]+$", max_length=100)]


class EmbeddingError(ProgramError, ValueError):
    """A store or a file of embeddings cannot be used; the message says why and how to mend it."""


@dataclass(frozen=True)
class StoredFile:
    """One file of a store: its name within the folder, its size in bytes, its SHA-256 in hexadecimal."""

    name: _FileName
    bytes: _Count
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True)
class Shard:
    """Consecutive rows of a split, in two files. Labels lie in [label_min, label_max]."""

    rows: _Count
    label_min: _Label
    label_max: _Label
    embeddings: StoredFile
    labels: StoredFile

    @property
    def files(self) -> tuple[StoredFile, StoredFile]:
        """Both files."""
        return self.embeddings, self.labels

    def problems(self, folder: Path, dtype_name: str, dim: int) -> list[str]:
        """A sentence for each file that is missing, of another size, or by its header of other numbers."""
        shapes = ((self.embeddings, dtype_name, (self.rows, dim)), (self.labels, "int64", (self.rows,)))
        return [problem for each in shapes if (problem := _problem(folder, *each))]


@dataclass(frozen=True)
class StoredSplit:
    """A split as the manifest describes it."""

    dtype: _Dtype
    embeddings_shape: tuple[_Count, _Count]
    labels_shape: tuple[_Count]
    labels_dtype: Literal["int64"]
    shards: Annotated[tuple[Shard, ...], Field(min_length=1)]


@dataclass(frozen=True)
class Settings:
    """What all shards of a store share. details: what else the writer noted, anything that JSON can hold."""

    embedding_dim: _Count
    dtype: _Dtype
    num_classes: Annotated[int, Field(ge=1, le=_MOST_CLASSES)] | None
    backbone: str | None
    resolution: _Count | None
    source: str | None
    details: dict[str, Any]


@dataclass(frozen=True)
class Manifest:
    """What a whole store holds."""

    format: Literal["embedding store"]
    version: Literal[1]
    embedding_dim: _Count
    num_classes: Annotated[int, Field(ge=1, le=_MOST_CLASSES)]
    backbone: str | None
    resolution: _Count | None
    source: str | None
    details: dict[str, Any]
    splits: Annotated[dict[_SplitName, StoredSplit], Field(min_length=1)]

    @property
    def files(self) -> list[StoredFile]:
        """Every file but the manifest."""
        return [file for split in self.splits.values() for shard in split.shards for file in shard.files]


class StoreSplit:
    """The rows of one split, on the disk until they are asked for.

    name: train, test or another. dtype: of the embeddings. dim: their width. shards: in the order of the rows.
    """

    def __init__(self, folder: Path, name: str, stored: StoredSplit, dim: int, num_classes: int) -> None:
        self.folder, self.name, self.dim, self.shards, self._num_classes = folder, name, dim, stored.shards, num_classes
        self.dtype_name, self.dtype = stored.dtype, DTYPES[stored.dtype]
        self.row_bytes = dim * self.dtype.itemsize
        # Row at which each shard begins, and the number of rows at the end: (shards + 1,).
        self._starts = np.cumsum([0, *(shard.rows for shard in self.shards)])
        if (stored.embeddings_shape, stored.labels_shape) != (self.shape, (len(self),)):
            raise EmbeddingError(f"{folder / MANIFEST} is damaged: the shapes of {name} are not those of its shards")

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, dim) of the embeddings."""
        return len(self), self.dim

    def labels(self) -> Tensor:
        """All labels, (N,) int64, read from the disk at each call (8 bytes a row).

        Raises EmbeddingError, naming the row, for one that is not in [0, num_classes).
        """
        parts = [
            np.fromfile(self.folder / shard.labels.name, ON_DISK["int64"], offset=shard.labels.bytes - shard.rows * 8)
            for shard in self.shards
        ]
        labels = torch.from_numpy(np.concatenate(parts))
        if len(labels) != len(self):
            raise EmbeddingError(f"a file of labels of {self.name} in {self.folder} changed: copy or write them again")
        try:
            check_labels(labels, self._num_classes)
        except EmbeddingError as error:
            raise EmbeddingError(f"{self.folder}, {self.name}: {error}; copy or write the store again") from None
        return labels

    def read(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Copy the embeddings at `rows` into memory: (R, dim) of the split's dtype.

        rows: (R,) int64, ascending. out: (R, dim) to fill, contiguous, on the CPU; allocated without it. Neighbours
        are read together, past the page cache's maps: memory grows by `out` alone. Raises OSError, and
        EmbeddingError for a file that became shorter.
        """
        out = torch.empty(len(rows), self.dim, dtype=self.dtype) if out is None else out
        if len(rows) == 0:
            return out
        target = out.view(torch.uint8).numpy()  # (R, row_bytes)
        wanted = rows.numpy()
        cuts = np.unique(
            np.concatenate(
                (
                    [0, len(wanted)],
                    np.flatnonzero(np.diff(wanted) > _RUN_GAP + 1) + 1,
                    np.searchsorted(wanted, self._starts),
                    np.arange(0, len(wanted), _RUN_ROWS),
                )
            )
        )
        with ExitStack() as opened:
            current, file = -1, None
            for begin, end in itertools.pairwise(cuts.tolist()):
                first, last = int(wanted[begin]), int(wanted[end - 1])
                shard = int(np.searchsorted(self._starts, first, side="right")) - 1
                entry = self.shards[shard]
                if shard != current:
                    opened.close()
                    current, file = shard, open(self.folder / entry.embeddings.name, "rb", buffering=0)  # noqa: SIM115
                    opened.callback(file.close)
                header = entry.embeddings.bytes - entry.rows * self.row_bytes
                file.seek(header + (first - int(self._starts[shard])) * self.row_bytes)
                if last - first == end - begin - 1:  # no row left out: straight to its place
                    _read_into(file, target[begin:end])
                else:
                    run = np.empty((last - first + 1, self.row_bytes), np.uint8)
                    _read_into(file, run)
                    target[begin:end] = run[wanted[begin:end] - first]
        return out


class EmbeddingStore:
    """An opened store: what its manifest says, and its splits.

    splits: by name. dim: width of an embedding. num_classes: labels lie in [0, num_classes). backbone, resolution
    (pixels), source: where the embeddings come from, None where it is not known. details: what else the writer noted.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.dim, self.num_classes = path, manifest.embedding_dim, manifest.num_classes
        self.backbone, self.resolution, self.source = manifest.backbone, manifest.resolution, manifest.source
        self.details, self._files = manifest.details, manifest.files
        self.splits = {
            name: StoreSplit(path, name, stored, self.dim, self.num_classes) for name, stored in manifest.splits.items()
        }

    def __getitem__(self, name: str) -> StoreSplit:
        """The split `name`. Raises EmbeddingError, naming the splits there are."""
        if name not in self.splits:
            raise EmbeddingError(f"{self.path} has no split {name!r}; it has {', '.join(self.splits)}")
        return self.splits[name]

    @property
    def checksum(self) -> str | None:
        """What the file that the store was made of was verified by: "sha256 ..." or "etag ...", or UNVERIFIED.

        None for embeddings that were extracted, not converted.
        """
        return str(self.details.get("checksum", UNVERIFIED)) if "file" in self.details else None

    @property
    def bytes(self) -> int:
        """Size of all shards on the disk, in bytes."""
        return sum(file.bytes for file in self._files)

    @property
    def fingerprint(self) -> str:
        """64 hexadecimal digits that the rows, their order and their dtype determine, by the shards' checksums."""
        content = [
            [name, split.dtype_name, [[file.sha256 for file in shard.files] for shard in split.shards]]
            for name, split in self.splits.items()
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def verify(self, *, progress: bool = False) -> list[str]:
        """Read every byte and return a sentence for each file that does not match the manifest; [] if all do.

        progress: whether to draw a bar.
        """
        problems = []
        with tqdm(total=self.bytes, unit="B", unit_scale=True, desc=self.path.name, disable=not progress) as bar:
            for file in self._files:
                try:
                    intact = _sha256(self.path / file.name) == file.sha256
                except FileNotFoundError:
                    problems.append(f"{self.path / file.name} is missing")
                else:
                    problems += [] if intact else [f"{self.path / file.name} is damaged: another SHA-256 than it had"]
                bar.update(file.bytes)
        return problems


def open_store(path: str | Path) -> EmbeddingStore:
    """Open a store. Reads the manifest and looks at the size and the header of each file.

    Raises EmbeddingError for a folder that is no store, or not yet, and for shards that are missing or have another
    size or type, by name.
    """
    path = Path(os.path.expanduser(path))
    manifest = read_manifest(path / MANIFEST)
    store = EmbeddingStore(path, manifest)
    problems = [
        problem
        for split in store.splits.values()
        for shard in split.shards
        for problem in shard.problems(path, split.dtype_name, split.dim)
    ]
    if problems:
        raise EmbeddingError("; ".join(problems) + ": copy or write the store again")
    return store


def read_manifest(path: Path) -> Manifest:
    """What a manifest says. Raises EmbeddingError for one that is missing, damaged or of another version."""
    try:
        return read_json(path, Manifest)
    except (FileNotFoundError, NotADirectoryError):
        if (path.parent / UNFINISHED).exists():
            raise EmbeddingError(
                f"{path.parent} was not finished: give the command that was writing it again, it continues"
            ) from None
        raise EmbeddingError(f"{path.parent} is not an embedding store: there is no {MANIFEST} in it") from None
    except JsonError as error:
        raise EmbeddingError(f"{error}; write the store again, or read it with the code that wrote it") from None


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of an embedding dtype. Raises EmbeddingError for one that a store does not hold."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise EmbeddingError(f"embeddings must be {', '.join(DTYPES)}, got {name}: convert them to one of these")
    return name


def check_labels(labels: Tensor, num_classes: int | None = None) -> None:
    """Raise EmbeddingError unless labels (R,) are of an integer dtype and in [0, num_classes), naming the first row."""
    if labels.dim() != 1 or labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise EmbeddingError(
            f"labels must be whole numbers of shape (rows,), got {labels.dtype} of shape {tuple(labels.shape)}"
        )
    limit = num_classes or _MOST_CLASSES
    for number, part in enumerate(labels.split(_CHECK_ROWS)):
        part = part.to(torch.int64)
        wrong = ((part < 0) | (part >= limit)).nonzero()
        if len(wrong):
            row = int(wrong[0])
            since = "" if num_classes is None else f", since num_classes is {num_classes}"
            raise EmbeddingError(
                f"labels must be in [0, {limit - 1}]{since}; row {number * _CHECK_ROWS + row} has {int(part[row])}"
            )


def npy_header(dtype_name: str, shape: tuple[int, ...]) -> bytes:
    """The first bytes of a .npy file of these numbers."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": ON_DISK[dtype_name], "fortran_order": False, "shape": tuple(shape)}
    )
    return header.getvalue()


def _problem(folder: Path, file: StoredFile, dtype_name: str, shape: tuple[int, ...]) -> str | None:
    path, expected = folder / file.name, npy_header(dtype_name, shape)
    try:
        size = os.stat(path).st_size
        if size != file.bytes:
            return f"{path} has {size} bytes where {file.bytes} are expected"
        rows = math.prod(shape) * np.dtype(ON_DISK[dtype_name]).itemsize
        with open(path, "rb") as opened:
            # NumPy's versions fill up with another number of blanks.
            if opened.read(min(max(size - rows, 0), 4096))[10:].rstrip() != expected[10:].rstrip():
                return f"{path} does not hold {dtype_name} of shape {shape}, by its header"
    except FileNotFoundError:
        return f"{path} is missing"
    return None


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(2**22):
            digest.update(chunk)
    return digest.hexdigest()


def _read_into(file: io.RawIOBase, target: np.ndarray) -> None:
    """Fill `target`, contiguous bytes, from where the file stands. A single read may return less."""
    view = memoryview(target).cast("B")
    while view:
        count = file.readinto(view)
        if not count:
            raise EmbeddingError(f"{file.name} ended {len(view)} bytes too early: it changed while it was read")
        view = view[count:]
