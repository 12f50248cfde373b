"""The published embedding files, and their conversion into a store (`store.py`), a shard at a time.

    convert("ImageNet_embeddings_..._320.p", "wsl-320.store")
    convert("mine.pt", "mine.store", keys={"train_embeddings": "x", "train_labels": "y"})

A published file is one torch pickle of four tensors, 11 to 50 GB. It is recognised by the names of the tensors and
never by its own name, and read with weights_only=True: a file that asks to run code is refused. Its test set is
called test or val; either becomes the split `test`, the one the paper reports, and validation rows are drawn from
`train` as the paper does.

Files in torch's zip format (torch >= 1.6) are mapped, and the map is closed after each shard, which gives its pages
back: peak memory is a few shards, whatever the size of the file. The older format cannot be mapped; such a file is
read whole if the memory suffices.
"""

import mmap
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from data.embeddings.store import (
    MANIFEST,
    PARTS,
    UNVERIFIED,
    EmbeddingError,
    EmbeddingStore,
    StoreWriter,
    check_labels,
    differences,
    dtype_name,
    open_finished,
)
from data.file_lock import held, lock_beside
from data.machine_memory import available_ram, gib

SPLITS = ("train", "valid", "test")
KEYS = [f"{split}_{part}" for split in SPLITS for part in PARTS]
# What the published files call the tensors: layout -> {split_part: key in the file}.
LAYOUTS: dict[str, dict[str, str]] = {
    layout: {f"{split}_{part}": f"{prefix}_{part}" for split, prefix in prefixes.items() for part in PARTS}
    for layout, prefixes in {
        "wsl": {"train": "train", "test": "test"},
        "efficientnet-l2": {"train": "train", "test": "val"},
        "imagenet21k": {"train": "imagenet21k_train", "test": "imagenet21k_val"},
    }.items()
}
SHARD_BYTES = 128 * 2**20  # of embeddings in a shard


def convert(
    source_file: str | Path,
    destination: str | Path,
    *,
    keys: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = None,
    backbone: str | None = None,
    resolution: int | None = None,
    source: str | None = None,
    sha256: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> EmbeddingStore:
    """Make a store of a torch pickle of embeddings and labels.

    keys: which tensor of the file is train_embeddings, train_labels, test_embeddings, test_labels (and valid_...);
        of a split both or neither. Without it the file must have one of LAYOUTS.
    dtype: float16, float32 or bfloat16 for the store; that of the file without it.
    backbone, resolution (pixels), source: noted in the store; source is the file's name without it.
    sha256: of the file, noted likewise; without it what the file was verified by when it was fetched.
    shard_bytes: embeddings per shard.

    Killed and called again, it continues with the shards that are missing; a complete store of this file is opened.
    Two processes wait for one another. Raises EmbeddingError for a file that cannot be converted, for too little memory
    or disk, and for a store of another file or other settings; ObjectStoreError for another SHA-256; OSError passes
    through.
    """
    # Imported here: a store that is there does without.
    from data.transfers import object_store

    file, destination = Path(os.path.expanduser(source_file)), Path(os.path.expanduser(destination))
    if not file.is_file():
        raise EmbeddingError(f"there is no file {file} to convert: check the path")
    if sha256:
        object_store.fetch(object_store.resolve(file), sha256)
    with held(lock_beside(destination)):
        noted = {"backbone": backbone, "resolution": resolution}
        if (destination / MANIFEST).exists():
            return _complete(file, destination, {**noted, "keys": keys and dict(keys)}, dtype)
        tensors, mapped = _load(file)
        keys = dict(keys) if keys else _recognised(file, tensors)
        splits = _checked(file, keys, tensors)
        (dim, file_dtype), *others = dict.fromkeys((rows.shape[1], rows.dtype) for rows, _ in splits.values())
        if any(width != dim or dtype is None for width, _ in others):
            raise EmbeddingError(
                f"the splits of {file} must have embeddings of one width and dtype; it has {_listing(tensors)}"
            )
        dtype = file_dtype if dtype is None else dtype
        shard_rows = max(1, shard_bytes // (dim * dtype.itemsize))
        details = {
            "file": file.name,
            "file_bytes": file.stat().st_size,
            "checksum": f"sha256 {sha256.lower()}" if sha256 else object_store.checksum_of(file) or UNVERIFIED,
            "keys": keys,
            "file_dtype": str(file_dtype).removeprefix("torch."),
        }
        noted |= {"source": source or file.name, "details": details}
        writer = StoreWriter(destination, dim=dim, dtype=dtype, shard_rows=shard_rows, **noted)
        missing, counts = [], {}
        for split, (_, labels) in splits.items():
            begins, present = range(0, len(labels), shard_rows), writer.present(split)
            counts[split] = len(begins)
            missing += [
                (split, number, slice(begin, min(begin + shard_rows, len(labels))))
                for number, begin in enumerate(begins)
                if number not in present
            ]
        rows = sum(part.stop - part.start for _, _, part in missing)
        needed, free = rows * (dim * dtype.itemsize + 8), shutil.disk_usage(destination).free
        if needed > free:
            raise EmbeddingError(
                f"the store takes another {gib(needed)}, and {gib(free)} are free at {destination}: free some space or "
                "choose another folder"
            )
        with tqdm(total=rows, unit="row", unit_scale=True, desc=destination.name, disable=None) as bar:
            for split, number, part in missing:
                if mapped:  # open the map anew: only closing it gives back the pages that were read
                    tensors = splits = None
                    tensors, _ = _load(file)
                writer.write(  # no name for the tensors here: it would keep their map open
                    split,
                    number,
                    _cast(tensors[keys[f"{split}_embeddings"]][part], dtype, f"{split} from row {part.start} on"),
                    tensors[keys[f"{split}_labels"]][part],
                )
                bar.update(part.stop - part.start)
        return writer.finish(counts)


def _complete(file: Path, destination: Path, wanted: dict[str, Any], dtype: torch.dtype | None) -> EmbeddingStore:
    """The store that is there. Raises EmbeddingError for one of another file, or with other settings than wanted."""
    store, status = open_finished(destination), file.stat()
    made, written = store.details, (destination / MANIFEST).stat().st_mtime
    if made.get("file_bytes") != status.st_size or written < status.st_mtime:
        raise EmbeddingError(
            f"{destination} was not made of {file} as it is now: delete the store to make it again, or choose another "
            "folder"
        )
    # Not the source: one file has many names, and its size and time stand for it. What is None may be anything.
    wanted["dtype"] = made.get("file_dtype") if dtype is None else dtype_name(dtype)
    there = {**made, "backbone": store.backbone, "resolution": store.resolution, "dtype": store.dtype_name}
    if changed := differences(there, {name: value for name, value in wanted.items() if value is not None}):
        raise EmbeddingError(f"{destination} is a complete store already ({changed}): delete it or choose another")
    return store


def _load(file: Path) -> tuple[dict[str, Tensor], bool]:
    """The content of a torch pickle, on the CPU, and whether it is a map of the file. Raises EmbeddingError."""
    with open(file, "rb") as begin:
        mapped = begin.read(4) == b"PK\x03\x04"
    if not mapped and file.stat().st_size > available_ram():
        raise EmbeddingError(
            f"{file} is not in torch's zip format and cannot be memory-mapped; read whole it takes "
            f"{gib(file.stat().st_size)}, and {gib(available_ram())} are available. On a machine with more memory, "
            "save it again with torch.save(torch.load(file, weights_only=True), new_file)"
        )
    options = {"map_location": "cpu", "weights_only": True, "mmap": mapped}
    try:
        try:
            content = torch.load(file, **options)
        except RuntimeError as error:
            if "mmap" not in str(error) or "(12)" not in str(error):  # 12: ENOMEM
                raise
            # torch maps copy-on-write, for which Linux wants the whole file's size in RAM and swap. A shared map needs
            # none, but write permission; nothing is written.
            with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
                content = torch.load(file, **options)
    except Exception as error:  # what torch meets in a damaged file has no common class
        said = (str(error).splitlines() or ["it ends too early"])[0][:200]
        wrong = "is not a torch pickle, or a truncated or damaged one: fetch it again, or save it with torch.save"
        if asked := re.search(r"GLOBAL ([\w.]+) (?:was not|whose)", str(error)):
            wrong = f"is refused: it asks for {asked[1]}, and only tensors in lists and dictionaries are loaded, since "
            wrong += "anything else could run code. If you trust it, save its tensors alone with torch.save"
        elif "mmap" in said:
            wrong = "cannot be mapped; one that is larger than the memory only if it may be written to: give yourself "
            wrong += f"the permission (chmod u+w {file}); it will not be changed"
        raise EmbeddingError(f"{file} {wrong} ({type(error).__name__}: {said})") from None
    if not isinstance(content, dict):
        raise EmbeddingError(f"{file} must hold a dictionary of tensors, it holds {type(content).__name__}")
    return content, mapped


def _listing(tensors: Mapping[str, object]) -> str:
    """What a file holds, for a message."""
    described = (
        f"{name} {str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
        if isinstance(value, Tensor)
        else f"{name} ({type(value).__name__})"
        for name, value in tensors.items()
    )
    return ", ".join(described) or "nothing"


def _recognised(file: Path, tensors: Mapping[str, object]) -> dict[str, str]:
    """The layout whose tensors are all there."""
    for layout in LAYOUTS.values():
        if set(layout.values()) <= set(tensors):
            return layout
    expected = "; ".join(f"{', '.join(layout.values())} ({name})" for name, layout in LAYOUTS.items())
    raise EmbeddingError(
        f"{file} has none of the known layouts. Found: {_listing(tensors)}. Expected: {expected}. Say which tensor is "
        "which: python -m data.embeddings convert FILE FOLDER --train_embeddings KEY --train_labels KEY "
        "--test_embeddings KEY --test_labels KEY"
    )


def _checked(file: Path, keys: Mapping[str, str], tensors: Mapping[str, object]) -> dict[str, tuple[Tensor, Tensor]]:
    """Embeddings and labels of each split that `keys` name. Raises EmbeddingError where they do not fit each other."""
    splits = {}
    for name, key in keys.items():
        split, _, part = name.partition("_")
        if name not in KEYS or f"{split}_{PARTS[part == 'embeddings']}" not in keys:
            raise EmbeddingError(f"keys are for {', '.join(KEYS)}, of a split both or neither, got {name!r} alone")
        tensor = tensors.get(key)
        if not isinstance(tensor, Tensor):
            raise EmbeddingError(f"{file} has no tensor {key!r} for {name}; it has {_listing(tensors)}")
        plain = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
        # One without numbers of its own for every place (expand) may be any number of times as large as its file.
        if not plain or tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
            raise EmbeddingError(
                f"{key} in {file} must be an ordinary tensor that holds each of its numbers, got {tensor.layout} "
                f"{tuple(tensor.shape)} on {tensor.device}: save it again with .to_dense().clone()"
            )
    for split in (each for each in SPLITS if f"{each}_labels" in keys):
        embeddings, labels = splits[split] = tuple(tensors[keys[f"{split}_{part}"]] for part in PARTS)
        shape, rows = tuple(embeddings.shape), tuple(labels.shape)
        if len(shape) != 2 or not embeddings.is_floating_point() or shape[:1] != rows or 0 in shape:
            raise EmbeddingError(
                f"the embeddings of {split} in {file} must be floating point of shape (rows, dim) with a label per row "
                f"and at least one row, got {embeddings.dtype} {shape} and labels {rows}"
            )
        check_labels(labels, None, f"{split} in {file}")
    return splits


def _cast(embeddings: Tensor, dtype: torch.dtype, place: str) -> Tensor:
    """Embeddings (R, dim) in `dtype`. Raises EmbeddingError where a number is beyond its range."""
    if embeddings.dtype == dtype:
        return embeddings
    converted = embeddings.to(dtype)
    if bool((converted.isinf() & ~embeddings.isinf()).any()):
        raise EmbeddingError(
            f"an embedding ({place}) of {float(embeddings.abs().max()):g} is beyond the range of {dtype_name(dtype)}: "
            "take bfloat16 or float32"
        )
    return converted
