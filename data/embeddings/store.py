"""A folder of embeddings and labels that opens in milliseconds, whatever its size. Written by writer.py.

    <store>/
        train.embeddings.npy    (rows, dim) float16, float32, or bfloat16 as its 16 bits in uint16
        train.labels.npy        (rows,) int64
        test.embeddings.npy     ...
        meta.json               written last: a folder without it is not a store

Any tool maps the arrays (`numpy.load(file, mmap_mode="r")`). meta.json has the width, the true dtype, class count,
backbone, resolution and source, and for each split its shards: consecutive rows with the SHA-256 of their embeddings
and of their labels. `open_store` reads it and looks at the size and the header of each file, nothing more;
`EmbeddingStore.verify` reads every byte and names the rows that changed.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Callable
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

MANIFEST = "meta.json"
OLD_MANIFEST = "manifest.json"  # of stores with two files for each shard
UNFINISHED = "unfinished.json"  # in a folder that is being written: the settings that all its shards share
PARTS = ("embeddings", "labels")
DTYPES: dict[str, torch.dtype] = {"float16": torch.float16, "float32": torch.float32, "bfloat16": torch.bfloat16}
ON_DISK = {"float16": "<f2", "float32": "<f4", "bfloat16": "<u2"}  # in NumPy's notation
UNVERIFIED = "unverified"  # the checksum of a file of embeddings where none was known
HEADER = 128  # bytes before the first number
_MOST_CLASSES = 2**31 - 1

# What meta.json may say. It may come from elsewhere: the names lead to no other folder, and no size overflows.
Count = Annotated[int, Field(ge=1, lt=2**40)]
NumClasses = Annotated[int, Field(ge=1, le=_MOST_CLASSES)]
Dtype = Literal["float16", "float32", "bfloat16"]
_Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_SplitName = Annotated[str, Field(pattern=r"^[a-z0-9_]+$", max_length=100)]


class EmbeddingError(ProgramError, ValueError):
    """A store or a file of embeddings cannot be used; the message says why and how to mend it."""


@dataclass(frozen=True)
class Shard:
    """Consecutive rows, and the SHA-256 of the .npy files of their embeddings and of their labels, each by itself."""

    rows: Count
    embeddings: _Sha256
    labels: _Sha256


@dataclass(frozen=True)
class Manifest:
    """What meta.json says. details: what else the writer noted, anything that JSON can hold."""

    format: Literal["embedding store"]
    version: Literal[2]
    dim: Count
    dtype: Dtype
    num_classes: NumClasses
    backbone: str | None
    resolution: Count | None
    source: str | None
    details: dict[str, Any]
    splits: Annotated[dict[_SplitName, Annotated[list[Shard], Field(min_length=1)]], Field(min_length=1)]


class StoreSplit:
    """The rows of one split, on the disk until they are asked for.

    name: train, test or another. dtype: of the embeddings. dim: their width. shards: in the order of the rows.
    """

    def __init__(self, folder: Path, name: str, manifest: Manifest) -> None:
        self.folder, self.name, self.shards = folder, name, manifest.splits[name]
        self.dim, self.dtype_name, self._num_classes = manifest.dim, manifest.dtype, manifest.num_classes
        self.dtype = DTYPES[manifest.dtype]
        self.row_bytes = self.dim * self.dtype.itemsize
        self._rows = sum(shard.rows for shard in self.shards)

    def __len__(self) -> int:
        return self._rows

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, dim) of the embeddings."""
        return len(self), self.dim

    def mapped(self, part: str) -> np.memmap:
        """The array of one of PARTS, as a map of its file. Raises EmbeddingError for a file that holds another."""
        path, row = file_of(self.folder, self.name, part), row_type(part, self.dtype_name, self.dim)
        expected = HEADER + len(self) * row.itemsize
        if not path.is_file():
            raise EmbeddingError(f"{path} is missing: copy or write the store again")
        if path.stat().st_size != expected:
            raise EmbeddingError(f"{path} has {path.stat().st_size} bytes where {expected} are expected: copy it again")
        with open(path, "rb") as file:
            if file.read(HEADER) != npy_header(row, len(self)):
                raise EmbeddingError(f"{path} does not hold {len(self)} rows of {row}, by its header: copy it again")
        return np.memmap(path, row, "r", HEADER, (len(self),))

    def damage(self, part: str, report: Callable[[int], object] = bool) -> list[str]:
        """A sentence for each shard of one of PARTS that is not as meta.json says. report: told the bytes read."""
        path, begin, problems = file_of(self.folder, self.name, part), 0, []
        try:
            array = self.mapped(part)
        except EmbeddingError as error:
            return [str(error)]
        for shard in self.shards:
            rows, end = array[begin : begin + shard.rows], begin + shard.rows
            if sha256_of(rows) != getattr(shard, part):
                problems.append(f"{path} is damaged: rows {begin} to {end - 1} have another SHA-256 than they had")
            report(rows.nbytes)
            begin = end
        return problems

    def labels(self) -> Tensor:
        """All labels, (N,) int64, read from the disk at each call (8 bytes a row).

        Raises EmbeddingError, naming the row, for one that is not in [0, num_classes).
        """
        labels = torch.from_numpy(np.array(self.mapped("labels")))
        try:
            check_labels(labels, self._num_classes)
        except EmbeddingError as error:
            raise EmbeddingError(f"{self.folder}, {self.name}: {error}; copy or write the store again") from None
        return labels

    def read(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Copy the embeddings at `rows` into memory: (R, dim) of the split's dtype.

        rows: (R,) int64, ascending. out: (R, dim) to fill, contiguous, on the CPU; allocated without it. Not by a map:
        memory grows by `out` alone, and a file that became shorter is an EmbeddingError. OSError passes through.
        """
        out = torch.empty(len(rows), self.dim, dtype=self.dtype) if out is None else out
        wanted, target = rows.numpy(), out.view(torch.uint8).numpy()  # (R,) and (R, row_bytes)
        begins = np.flatnonzero(np.diff(wanted, prepend=-2) != 1)  # of neighbours, which are read together
        with open(file_of(self.folder, self.name, "embeddings"), "rb", buffering=0) as file:
            for begin, end in itertools.pairwise([*begins.tolist(), len(wanted)]):
                file.seek(HEADER + int(wanted[begin]) * self.row_bytes)
                view = memoryview(target[begin:end]).cast("B")
                while view:  # a single read may return less
                    if not (count := file.readinto(view)):
                        raise EmbeddingError(f"{file.name} ended {len(view)} bytes too early: it changed meanwhile")
                    view = view[count:]
        return out


class EmbeddingStore:
    """An opened store: what its meta.json says, and its splits.

    splits: by name. dim, dtype_name: of an embedding. num_classes: labels lie in [0, num_classes). backbone, resolution
    (pixels), source: where the embeddings come from, None where it is not known. details: what else the writer noted.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.dim, self.num_classes = path, manifest.dim, manifest.num_classes
        self.backbone, self.resolution, self.source = manifest.backbone, manifest.resolution, manifest.source
        self.details, self.dtype_name = manifest.details, manifest.dtype
        self.splits = {name: StoreSplit(path, name, manifest) for name in manifest.splits}

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
        """Size of all embeddings and labels, in bytes."""
        return sum(len(split) * (split.row_bytes + 8) for split in self.splits.values())

    @property
    def fingerprint(self) -> str:
        """64 hexadecimal digits that the rows, their order and their dtype determine, by the shards' checksums."""
        content = [
            [name, split.dtype_name, [[shard.embeddings, shard.labels] for shard in split.shards]]
            for name, split in self.splits.items()
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def verify(self, *, progress: bool = False) -> list[str]:
        """Read every byte and return a sentence for each shard that is not as meta.json says; [] if all are.

        progress: whether to draw a bar.
        """
        problems = []
        with tqdm(total=self.bytes, unit="B", unit_scale=True, desc=self.path.name, disable=not progress) as bar:
            for split, part in itertools.product(self.splits.values(), PARTS):
                problems += split.damage(part, bar.update)
        return problems


def open_store(path: str | Path) -> EmbeddingStore:
    """Open a store. Reads meta.json and looks at the size and the header of each file.

    Raises EmbeddingError for a folder that is no store, or not yet, and for files that are missing or have another
    size or type, by name.
    """
    path = Path(os.path.expanduser(path))
    store = EmbeddingStore(path, read_manifest(path / MANIFEST))
    for split, part in itertools.product(store.splits.values(), PARTS):
        split.mapped(part)
    return store


def read_manifest(path: Path) -> Manifest:
    """What a meta.json says. Raises EmbeddingError for one that is missing, damaged or of another version."""
    try:
        return read_json(path, Manifest)
    except (FileNotFoundError, NotADirectoryError):
        refuse_old(path.parent)
        if (path.parent / UNFINISHED).exists():
            raise EmbeddingError(
                f"{path.parent} was not finished: give the command that was writing it again, it continues"
            ) from None
        raise EmbeddingError(f"{path.parent} is not an embedding store: there is no {MANIFEST} in it") from None
    except JsonError as error:
        raise EmbeddingError(f"{error}; write the store again, or read it with the code that wrote it") from None


def refuse_old(folder: Path) -> None:
    """Raise EmbeddingError, with the way out, where a folder is a store in the earlier format."""
    if (folder / OLD_MANIFEST).exists():
        raise EmbeddingError(
            f"{folder} is a store in an earlier format: python -m data.embeddings convert {folder} NEW_FOLDER makes "
            "one in today's of it, with the same fingerprint"
        )


def file_of(folder: Path, split: str, part: str) -> Path:
    """The file of one of PARTS of a split."""
    return folder / f"{split}.{part}.npy"


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
    limit, labels = num_classes or _MOST_CLASSES, labels.to(torch.int64)
    wrong = ((labels < 0) | (labels >= limit)).nonzero()
    if len(wrong):
        row = int(wrong[0])
        since = "" if num_classes is None else f", since num_classes is {num_classes}"
        raise EmbeddingError(f"labels must be in [0, {limit - 1}]{since}; row {row} has {int(labels[row])}")


def row_type(part: str, dtype_name: str, dim: int) -> np.dtype:
    """What NumPy calls a row of one of PARTS: its numbers and how many there are."""
    return np.dtype((ON_DISK[dtype_name], (dim,)) if part == "embeddings" else "<i8")


def npy_header(row: np.dtype, rows: int) -> bytes:
    """The first HEADER bytes of a .npy file of so many rows, as NumPy writes them, whatever its version."""
    text = f"{{'descr': '{row.base.str}', 'fortran_order': False, 'shape': {(rows, *row.shape)}, }}"
    return b"\x93NUMPY\x01\x00" + (HEADER - 10).to_bytes(2, "little") + text.ljust(HEADER - 11).encode() + b"\n"


def sha256_of(array: np.ndarray) -> str:
    """The SHA-256 of the .npy file that a contiguous array would be."""
    digest = hashlib.sha256(npy_header(np.dtype((array.dtype, array.shape[1:])), len(array)))
    digest.update(array)
    return digest.hexdigest()
