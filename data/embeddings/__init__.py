"""Embedding sets: the published files, stores on the disk, and batches out of them.

Scripts open anything with `open_or_fetch`, and take the rest from here as well: `open_store` (store.py), `StoreWriter`
(writer.py), `convert` (formats.py), `EmbeddingBatches` and `split_rows` (batches.py). Commands: __main__.py.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from data.embeddings.batches import MODES, EmbeddingBatches, epoch_order, split_rows
from data.embeddings.formats import LAYOUTS, convert
from data.embeddings.store import (
    DTYPES,
    MANIFEST,
    PARTS,
    UNVERIFIED,
    EmbeddingError,
    EmbeddingStore,
    file_of,
    open_store,
    read_manifest,
)
from data.embeddings.writer import StoreWriter
from data.published import PUBLISHED, PUBLISHED_SETS

__all__ = [
    "DTYPES",
    "LAYOUTS",
    "MANIFEST",
    "MODES",
    "PUBLISHED_SETS",
    "EmbeddingBatches",
    "EmbeddingError",
    "EmbeddingStore",
    "StoreWriter",
    "convert",
    "epoch_order",
    "open_or_fetch",
    "open_store",
    "split_rows",
    "store_beside",
]


def open_or_fetch(
    source: str | Path,
    cache_dir: str | Path | None = None,
    *,
    endpoint_url: str | None = None,
    keys: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = None,
    sha256: str | None = None,
    progress: bool = True,
) -> EmbeddingStore:
    """Open a store, making it first of whatever `source` names.

    source: the folder of a store, here or as s3://bucket/prefix/; a file of embeddings, here, as s3:// or https://
        address, or as the short name of a published one. An s3:// address that ends in a slash or .store, or whose
        last part has no dot, is a store.
    cache_dir: where downloads go; without it as in data/transfers/object_store.py. A file's store lies beside the
        file, as <name>.store (<name>.<dtype>.store with a dtype). It is made once; afterwards the file can be deleted.
    endpoint_url: of the S3 server. keys, dtype: as for `convert`. sha256: of the file; of a store, its fingerprint.
    progress: whether to draw bars.

    Raises EmbeddingError; OSError passes through.
    """
    if Path(os.path.expanduser(source)).is_dir():
        return _if_same(open_store(source), sha256)
    # Imported here: a store on this disk does without.
    from data.transfers import object_store

    last = str(source).rpartition("/")[2]
    try:
        if str(source).startswith("s3://") and (last.endswith(".store") or "." not in last):
            folder = object_store.cached_path(f"{str(source).rstrip('/')}/", cache_dir, endpoint_url=endpoint_url)
            try:
                store = open_store(folder)
            except EmbeddingError:  # not there, or not whole
                object_store.fetch_folder(
                    source, cache_dir, index=MANIFEST, damaged=_damaged, endpoint_url=endpoint_url, progress=progress
                )
                store = open_store(folder)
            return _if_same(store, sha256)
        file = object_store.cached_path(source, cache_dir, endpoint_url=endpoint_url)
        store = store_beside(file, dtype)
        if (store / MANIFEST).exists() and not file.exists():
            return _if_same(open_store(store), sha256)
        file = object_store.fetch(source, cache_dir, endpoint_url=endpoint_url, sha256=sha256, progress=progress)
        checksum = f"sha256 {sha256.lower()}" if sha256 else object_store.checksum_of(file)
    except object_store.ObjectStoreError as error:
        raise EmbeddingError(str(error)) from error
    # A published file keeps its name when it is downloaded by hand.
    names = {key: name for name, key in PUBLISHED.items()}
    known = PUBLISHED_SETS.get(names.get(last, str(source)))
    remote = str(source) in PUBLISHED_SETS or "://" in str(source)
    try:
        return convert(
            file,
            store,
            keys=keys,
            dtype=dtype,
            backbone=known and known.backbone,
            resolution=known and known.resolution,
            source=str(source) if remote else None,
            checksum=checksum or UNVERIFIED,
            progress=progress,
        )
    except OSError as error:
        raise EmbeddingError(
            f"cannot make a store of {file} beside it ({error}): make it elsewhere by "
            f"python -m data.embeddings convert {file} FOLDER, and give FOLDER in place of the file"
        ) from error


def _damaged(manifest: Path, folder: Path) -> list[str]:
    """The names of the files that a folder does not hold as a meta.json says."""
    splits = EmbeddingStore(folder, read_manifest(manifest)).splits.values()
    return [file_of(folder, each.name, part).name for each in splits for part in PARTS if each.damage(part)]


def _if_same(store: EmbeddingStore, sha256: str | None) -> EmbeddingStore:
    """The store, if it has this fingerprint or was made of a file with this sum. Raises EmbeddingError."""
    if sha256 and sha256.lower() not in (store.fingerprint, str(store.checksum).removeprefix("sha256 ")):
        raise EmbeddingError(
            f"{store.path} has the fingerprint {store.fingerprint}, and was made of "
            f"{f'a file with the checksum {store.checksum!r}' if store.checksum else 'images'}; neither is {sha256}"
        )
    return store


def store_beside(file: Path, dtype: torch.dtype | None) -> Path:
    """Where the store of a file lies."""
    variant = "" if dtype is None else f".{str(dtype).removeprefix('torch.')}"
    return file.with_name(f"{file.stem}{variant}.store")
