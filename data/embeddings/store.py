"""A folder of embeddings and labels that opens in milliseconds, whatever its size. Written by writer.py.

    <store>/
        train-00000.embeddings.npy    (rows, dim) float16, float32, or bfloat16 as its 16 bits in uint16
        train-00000.labels.npy        (rows,) int64
        train-00001.embeddings.npy    ...
        test-00000.embeddings.npy     ...
        manifest.json                 written last: a folder without it is not a store

The manifest holds, per split, the shapes, the dtype and the shards with the size and SHA-256 of each file, and
for the whole the class count, backbone, resolution and source. `open_store` reads it and looks at the size of
each file, nothing more; `EmbeddingStore.verify` reads every byte and names each file that changed.

Why .npy and not safetensors: a file is a header of 128 bytes and then the rows, so any range of rows is one read
at a known place and the whole is one memory map; every tool opens it, and it needs no further dependency. The
price is that NumPy has no bfloat16; the manifest names the true dtype of such a shard.
"""

import hashlib
import io
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

FORMAT = "embedding store"
VERSION = 1
MANIFEST = "manifest.json"
DTYPES: dict[str, torch.dtype] = {
    "float16": torch.float16,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}

# How each dtype lies on the disk, in NumPy's notation.
ON_DISK = {"float16": "<f2", "float32": "<f4", "bfloat16": "<u2", "int64": "<i8"}
UNFINISHED = "unfinished.json"  # in a folder that is being written: the settings that all its shards share
_RUN_ROWS = 1024  # most rows in one read, so that the memory a read needs is bounded
_RUN_GAP = 8  # rows left out that are cheaper to read along than to begin another read after


class EmbeddingError(ValueError):
    """A store or a file of embeddings cannot be used; the message says why and how to mend it."""


@dataclass(frozen=True)
class StoredFile:
    """One file of a store: its name within the folder, its size in bytes, its SHA-256 in hexadecimal."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Shard:
    """Consecutive rows of a split, in two files. Labels lie in [label_min, label_max]."""

    rows: int
    label_min: int
    label_max: int
    embeddings: StoredFile
    labels: StoredFile

    @property
    def files(self) -> tuple[StoredFile, StoredFile]:
        """Both files."""
        return self.embeddings, self.labels

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Shard":
        """The shard that `dataclasses.asdict` described. Raises KeyError, TypeError, ValueError for another record."""
        files = {part: StoredFile(**record[part]) for part in ("embeddings", "labels")}
        for file in files.values():
            # A manifest may come from elsewhere: it must not lead out of its folder.
            if Path(file.name).name != file.name:
                raise ValueError(f"{file.name!r} is not the name of a file in this folder")
        return cls(**{**record, **files})


class StoreSplit:
    """The rows of one split, on the disk until they are asked for.

    name: train, test or another. dtype: of the embeddings. dim: their width. shards: in the order of the rows.
    """

    def __init__(self, folder: Path, name: str, dtype_name: str, dim: int, shards: Sequence[Shard]) -> None:
        self.folder, self.name, self.dim, self.shards = folder, name, dim, tuple(shards)
        self.dtype_name, self.dtype = dtype_name, DTYPES[dtype_name]
        self.row_bytes = dim * self.dtype.itemsize
        # Row at which each shard begins, and the number of rows at the end: (shards + 1,).
        self._starts = np.cumsum([0, *(shard.rows for shard in self.shards)])
        for shard in self.shards:
            headers = (shard.embeddings.bytes - shard.rows * self.row_bytes, shard.labels.bytes - shard.rows * 8)
            if shard.rows < 1 or min(headers) < 1:
                raise ValueError(f"{shard.rows} rows do not fit into {shard.embeddings.name}")

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, dim) of the embeddings."""
        return len(self), self.dim

    def labels(self) -> Tensor:
        """All labels, (N,) int64, read from the disk at each call (8 bytes a row)."""
        return torch.cat([self.mapped(number)[1] for number in range(len(self.shards))])

    def mapped(self, shard: int) -> tuple[Tensor, Tensor]:
        """Embeddings (R, dim) and labels (R,) int64 of one shard as memory maps: read where they are touched.

        What is written to them stays in memory and never reaches the files.
        """
        entry = self.shards[shard]
        embeddings = self._map(entry.embeddings, self.dtype_name, (entry.rows, self.dim))
        return embeddings, self._map(entry.labels, "int64", (entry.rows,))

    def _map(self, file: StoredFile, dtype_name: str, shape: tuple[int, ...]) -> Tensor:
        stored = ON_DISK[dtype_name]
        offset = file.bytes - int(np.prod(shape)) * np.dtype(stored).itemsize
        tensor = torch.from_numpy(np.memmap(self.folder / file.name, stored, "c", offset, shape))
        return tensor.view(torch.bfloat16) if dtype_name == "bfloat16" else tensor

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

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        self.path = path
        self.dim: int = manifest["embedding_dim"]
        self.num_classes: int = manifest["num_classes"]
        self.backbone: str | None = manifest["backbone"]
        self.resolution: int | None = manifest["resolution"]
        self.source: str | None = manifest["source"]
        self.details: dict[str, Any] = manifest["details"]
        self.splits: dict[str, StoreSplit] = {}
        for name, entry in manifest["splits"].items():
            shards = [Shard.from_json(shard) for shard in entry["shards"]]
            split = StoreSplit(path, name, entry["dtype"], self.dim, shards)
            if entry["embeddings_shape"] != list(split.shape) or entry["labels_shape"] != [len(split)]:
                raise ValueError(f"the shapes of {name} are not those of its shards")
            self.splits[name] = split

    def __getitem__(self, name: str) -> StoreSplit:
        """The split `name`. Raises EmbeddingError, naming the splits there are."""
        if name not in self.splits:
            raise EmbeddingError(f"{self.path} has no split {name!r}; it has {', '.join(self.splits)}")
        return self.splits[name]

    @property
    def bytes(self) -> int:
        """Size of all shards on the disk, in bytes."""
        return sum(file.bytes for file in self._files())

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
            for file in self._files():
                problem = size_problem(self.path, file)
                if problem is None and _sha256(self.path / file.name) != file.sha256:
                    problem = f"{self.path / file.name} is damaged: its SHA-256 is not the manifest's"
                problems.extend([problem] if problem else [])
                bar.update(file.bytes)
        return problems

    def _files(self) -> list[StoredFile]:
        return [file for split in self.splits.values() for shard in split.shards for file in shard.files]


def open_store(path: str | Path) -> EmbeddingStore:
    """Open a store. Reads the manifest and looks at the size of each file.

    Raises EmbeddingError for a folder that is no store, or not yet, and for shards that are missing or have another
    size, by name.
    """
    path = Path(path).expanduser()
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        if (path / UNFINISHED).exists():
            raise EmbeddingError(
                f"{path} was not finished: give the command that was writing it again, it continues"
            ) from None
        raise EmbeddingError(f"{path} is not an embedding store: there is no {MANIFEST} in it") from None
    except (OSError, ValueError) as error:
        raise EmbeddingError(f"cannot read {path / MANIFEST}: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise EmbeddingError(f"{path / MANIFEST} is not the manifest of an embedding store")
    if manifest.get("version") != VERSION:
        raise EmbeddingError(
            f"{path} has format version {manifest.get('version')}, and this code reads version {VERSION}: "
            "write the store again, or read it with the code that wrote it"
        )
    try:
        store = EmbeddingStore(path, manifest)
    except (KeyError, TypeError, ValueError) as error:
        raise EmbeddingError(
            f"{path / MANIFEST} is damaged ({type(error).__name__}: {error}): write the store again"
        ) from None
    problems = [problem for file in store._files() if (problem := size_problem(path, file))]
    if problems:
        raise EmbeddingError("; ".join(problems) + ": copy or write the store again")
    return store


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of an embedding dtype. Raises EmbeddingError for one that a store does not hold."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise EmbeddingError(f"embeddings must be {', '.join(DTYPES)}, got {name}: convert them to one of these")
    return name


def check_labels(labels: Tensor, num_classes: int | None = None) -> Tensor:
    """Return labels (R,) of an integer dtype as int64. Raises EmbeddingError for others and those out of range."""
    if labels.dim() != 1 or labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise EmbeddingError(
            f"labels must be whole numbers of shape (rows,), got {labels.dtype} of shape {tuple(labels.shape)}"
        )
    labels = labels.to(torch.int64)
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0 or (num_classes is not None and highest >= num_classes):
        limit = (
            "at least 0" if num_classes is None else f"in [0, {num_classes - 1}], since num_classes is {num_classes}"
        )
        raise EmbeddingError(f"labels must be {limit}; they range from {lowest} to {highest}")
    return labels


def size_problem(folder: Path, file: StoredFile) -> str | None:
    """A sentence if a file is missing or has another size than it must."""
    try:
        size = os.stat(folder / file.name).st_size
    except FileNotFoundError:
        return f"{folder / file.name} is missing"
    return None if size == file.bytes else f"{folder / file.name} has {size} bytes where {file.bytes} are expected"


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
