"""Embedding sets: the published files, stores on the disk, and batches out of them.

Scripts open anything with `open_or_fetch`, and take the rest from here as well: `open_store` and `StoreWriter`
(store.py), `convert` (formats.py), `EmbeddingBatches` and `split_rows` (batches.py). Commands: __main__.py.
"""
# ruff: noqa: F401

import os
from collections.abc import Mapping
from pathlib import Path

from data.embeddings.batches import MODES, EmbeddingBatches, epoch_order, split_rows
from data.embeddings.formats import LAYOUTS, convert
from data.embeddings.store import DTYPES, MANIFEST, EmbeddingError, EmbeddingStore, StoreWriter, damaged, open_store
from data.published import PUBLISHED, PUBLISHED_SETS


def open_or_fetch(
    source: str | Path,
    cache_dir: str | Path | None = None,
    *,
    endpoint_url: str | None = None,
    keys: Mapping[str, str] | None = None,
    sha256: str | None = None,
) -> EmbeddingStore:
    """Open a store, making it first of whatever `source` names.

    source: the folder of a store, here or as s3://bucket/prefix/; a file of embeddings, here, as s3:// or https://
        address, or as the short name of a published one. An s3:// address that ends in a slash or .store, or whose
        last part has no dot, is a store.
    cache_dir: where downloads go; without it as in data/transfers/object_store.py. A file's store lies beside the
        file, as <name>.store. It is made once; afterwards the file can be deleted.
    endpoint_url: of the S3 server. keys: as for `convert`. sha256: of the file; of a store, its fingerprint.

    Raises EmbeddingError and ObjectStoreError; OSError passes through.
    """
    if Path(os.path.expanduser(source)).is_dir():
        return _if_same(open_store(source), sha256)
    # Imported here: a store on this disk does without.
    from data.transfers import object_store

    last = str(source).rpartition("/")[2]
    if str(source).startswith("s3://") and (last.endswith(".store") or "." not in last):
        location = object_store.resolve(f"{str(source).rstrip('/')}/", cache_dir, endpoint_url=endpoint_url)
        try:
            store = open_store(location.path)
        except EmbeddingError:  # not there, or not whole
            store = open_store(object_store.fetch_folder(location, MANIFEST, damaged))
        return _if_same(store, sha256)
    location = object_store.resolve(source, cache_dir, endpoint_url=endpoint_url)
    destination = location.path.with_suffix(".store")
    if (destination / MANIFEST).exists() and not location.path.exists():
        return _if_same(open_store(destination), sha256)
    file = object_store.fetch(location, sha256)
    names = {key: name for name, key in PUBLISHED.items()}  # a published file keeps its name when it comes by hand
    known = PUBLISHED_SETS.get(names.get(last, str(source)))
    try:
        return convert(
            file,
            destination,
            keys=keys,
            backbone=known and known.backbone,
            resolution=known and known.resolution,
            source=str(source) if str(source) in PUBLISHED_SETS or "://" in str(source) else None,
            sha256=sha256,
        )
    except OSError as error:
        raise EmbeddingError(
            f"cannot make a store of {file} beside it ({error}): make it elsewhere by "
            f"python -m data.embeddings convert {file} FOLDER, and give FOLDER in place of the file"
        ) from error


def _if_same(store: EmbeddingStore, sha256: str | None) -> EmbeddingStore:
    """The store, if it has this fingerprint or was made of a file with this sum. Raises EmbeddingError."""
    if sha256 and sha256.lower() not in (store.fingerprint, str(store.checksum).removeprefix("sha256 ")):
        made_of = f"a file with the checksum {store.checksum!r}" if store.checksum else "images"
        raise EmbeddingError(
            f"{store.path} has the fingerprint {store.fingerprint}, and was made of {made_of}; neither is {sha256}"
        )
    return store
