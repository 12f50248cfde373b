"""A folder of embeddings and labels that opens in milliseconds, whatever its size.

    <store>/
        train.embeddings.npy    (rows, dim) float16, float32, or bfloat16 as its 16 bits in uint16
        train.labels.npy        (rows,) int64
        test.embeddings.npy     ...
        meta.json               written last: a folder without it is not a store

Any tool maps the arrays (`numpy.load(file, mmap_mode="r")`). meta.json has the width, the true dtype, class count,
backbone, resolution and source, and for each split its shards: consecutive rows with the SHA-256 of their embeddings
and of their labels. `open_store` reads it and looks at the size and the header of each file, nothing more;
`EmbeddingStore.verify` reads every byte and names the rows that changed.

`StoreWriter` writes the shards of a split to their places in `train.embeddings.npy.part` and `train.labels.npy.part`. A
shard counts as there once its record, `train-00000.shard.json`, is; the end gives the files their names.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from tqdm import tqdm

from data.atomic_file import atomic_write
from data.checked_json import JsonError, read_json, write_json
from data.program import ProgramError

MANIFEST = "meta.json"
UNFINISHED = "unfinished.json"  # in a folder that is being written: the settings that all its shards share
PARTS = ("embeddings", "labels")
DTYPES: dict[str, torch.dtype] = {"float16": torch.float16, "float32": torch.float32, "bfloat16": torch.bfloat16}
ON_DISK = {"float16": "<f2", "float32": "<f4", "bfloat16": "<u2"}  # in NumPy's notation
UNVERIFIED = "unverified"  # the checksum of a file of embeddings where none was known
HEADER = 128  # bytes before the first number
_MOST_CLASSES = 2**31 - 1

# What meta.json may say. It may come from elsewhere: the names lead to no other folder, and no size overflows.
Count = Annotated[int, Field(ge=1, lt=2**40)]
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
    dtype: Literal["float16", "float32", "bfloat16"]
    num_classes: Annotated[int, Field(ge=1, le=_MOST_CLASSES)]
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
        check_labels(labels, self._num_classes, f"{self.folder}, {self.name}")
        return labels

    def read(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Copy the embeddings at `rows` into memory: (R, dim) of the split's dtype.

        rows: (R,) int64, ascending. out: (R, dim) to fill, contiguous, on the CPU; allocated without it. Not by a map:
        memory grows by `out` alone, and a file that became shorter is an EmbeddingError. OSError passes through.
        """
        out = torch.empty(len(rows), self.dim, dtype=self.dtype) if out is None else out
        target = memoryview(out.view(torch.uint8).numpy().reshape(-1))  # bytes
        begins = np.flatnonzero(np.diff(rows.numpy(), prepend=-2) != 1)  # of neighbours, which are read together
        places = (HEADER + rows.numpy()[begins] * self.row_bytes).tolist()
        with open(file_of(self.folder, self.name, "embeddings"), "rb") as file:
            for place, (begin, end) in zip(places, itertools.pairwise([*begins.tolist(), len(rows)])):
                file.seek(place)
                part = target[begin * self.row_bytes : end * self.row_bytes]
                if (count := file.readinto(part)) < len(part):
                    raise EmbeddingError(f"{file.name} ended {len(part) - count} bytes too early: it changed meanwhile")
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

    def verify(self) -> list[str]:
        """Read every byte and return a sentence for each shard that is not as meta.json says; [] if all are."""
        with tqdm(total=self.bytes, unit="B", unit_scale=True, desc=self.path.name, disable=None) as bar:
            both = itertools.product(self.splits.values(), PARTS)
            return [problem for split, part in both for problem in split.damage(part, bar.update)]


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

        split: of a-z, 0-9, _. embeddings: (R, dim) of the store's dtype, on the CPU, R from 1 to shard_rows. labels:
        (R,) of an integer dtype, from 0 and below num_classes. Raises EmbeddingError for other labels; OSError (disk
        full, say) passes through.
        """
        rows, most = len(labels), self._shard_rows
        assert embeddings.dtype == DTYPES[self._dtype], embeddings.dtype
        assert embeddings.shape == (rows, self._dim), embeddings.shape
        check_labels(labels, self._num_classes, f"{split}-{number:05}")
        record = self.folder / f"{split}-{number:05}.shard.json"
        record.unlink(missing_ok=True)
        arrays = {
            "embeddings": embeddings.contiguous().view(torch.uint8).numpy().view(ON_DISK[self._dtype]),  # (R, dim)
            "labels": labels.to(torch.int64).contiguous().numpy(),  # (R,)
        }
        for part, array in arrays.items():
            path = self._unfinished(split, part)
            path.touch()
            try:
                with open(path, "r+b") as file:
                    file.seek(HEADER + number * (most or 0) * array[:1].nbytes)
                    file.write(array)
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                error.filename = str(path)  # a full disk does not say where
                raise
        # Last: a shard with a record is whole.
        write_json(record, Shard(rows, **{part: sha256_of(array) for part, array in arrays.items()}), shared=True)

    def finish(self, shards: Mapping[str, int] | None = None) -> EmbeddingStore:
        """Give the files of all writers their names, write meta.json, and open the store.

        shards: how many each split must have; without it, the numbers from 0 to the highest found. Raises
        EmbeddingError, naming the missing shards.
        """
        if shards is None:
            names = {path.name.rpartition("-")[0] for path in self.folder.glob("*.shard.json")}
            shards = {name: max(self._shards(name), default=0) + 1 for name in sorted(names, reverse=True)}
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
        """The records of the shards, by their numbers; those whose rows somebody took away do not count."""
        found = {}
        for path in self.folder.glob(f"{split}-[0-9]*.shard.json"):
            try:
                number, shard = int(path.name.split(".")[0].rpartition("-")[2]), read_json(path, Shard)
            except (FileNotFoundError, JsonError, ValueError):
                continue  # another process may just have merged it; a shard without its record is written again
            if all(self._reaches(split, part, number * (self._shard_rows or 0) + shard.rows) for part in PARTS):
                found[number] = shard
        return found

    def _reaches(self, split: str, part: str, row: int) -> bool:
        path = self._unfinished(split, part)
        if path.exists():
            return path.stat().st_size >= HEADER + row * row_type(part, self._dtype, self._dim).itemsize
        return file_of(self.folder, split, part).exists()  # it has its name already, and lost its gaps

    def _unfinished(self, split: str, part: str) -> Path:
        return self.folder / f"{file_of(self.folder, split, part).name}.part"


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


def damaged(manifest: Path, folder: Path) -> list[str]:
    """The names of the files that a folder does not hold as a meta.json says."""
    splits = EmbeddingStore(folder, read_manifest(manifest)).splits.values()
    return [file_of(folder, split.name, part).name for split in splits for part in PARTS if split.damage(part)]


def read_manifest(path: Path) -> Manifest:
    """What a meta.json says. Raises EmbeddingError for one that is missing, damaged or of another version."""
    try:
        return read_json(path, Manifest)
    except (FileNotFoundError, NotADirectoryError):
        wrong = f"{path.parent} is not an embedding store: there is no {MANIFEST} in it"
        if (path.parent / UNFINISHED).exists():
            wrong = f"{path.parent} was not finished: give the command that was writing it again, it continues"
        raise EmbeddingError(wrong) from None
    except JsonError as error:
        raise EmbeddingError(f"{error}; write the store again, or read it with the code that wrote it") from None


def file_of(folder: Path, split: str, part: str) -> Path:
    """The file of one of PARTS of a split."""
    return folder / f"{split}.{part}.npy"


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of an embedding dtype. Raises EmbeddingError for one that a store does not hold."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise EmbeddingError(f"embeddings must be {', '.join(DTYPES)}, got {name}: convert them to one of these")
    return name


def check_labels(labels: Tensor, num_classes: int | None, place: str) -> None:
    """Raise EmbeddingError unless labels (R,) are whole numbers in [0, num_classes), naming the first row of others."""
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise EmbeddingError(f"{place}: labels must be whole numbers, got {labels.dtype}")
    limit, labels = num_classes or _MOST_CLASSES, labels.to(torch.int64)
    wrong = ((labels < 0) | (labels >= limit)).nonzero()
    if len(wrong):
        row, since = int(wrong[0]), f", since num_classes is {num_classes}" if num_classes else ""
        raise EmbeddingError(
            f"{place}: labels must be in [0, {limit - 1}]{since}; row {row} has {int(labels[row])}; copy or write it "
            "again"
        )


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
