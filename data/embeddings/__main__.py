"""The commands of the embedding sets.

    python -m data.embeddings list                                   # the published files
    python -m data.embeddings fetch wsl-32x48d-320 --convert         # download one and make a store of it [--sha256]
    python -m data.embeddings convert FILE FOLDER [--dtype bfloat16] # of any torch file, or of an earlier store
    python -m data.embeddings info FOLDER                            # what a store holds
    python -m data.embeddings verify FOLDER                          # read every byte, name damaged rows

`info` says by which checksum the file that became the store was verified, or that it is unverified.

Exit status and --debug: as in data/program.py.
"""

import argparse
import sys
from pathlib import Path

from data import program
from data.embeddings import (
    DTYPES,
    LAYOUTS,
    MANIFEST,
    PUBLISHED_SETS,
    UNVERIFIED,
    EmbeddingStore,
    convert,
    open_or_fetch,
    open_store,
    store_beside,
)
from data.embeddings.formats import KEYS
from data.machine_memory import gib
from data.transfers.object_store import PUBLISHED, cached_path, checksum_of, fetch


def main(argv: list[str] | None = None) -> int:
    """Run one of the commands above; return the exit status."""

    def run() -> int:
        args = _parse(argv)
        return args.run(args) or 0

    return program.finish(run, "the same command continues with what is missing")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = program.Parser(prog="python -m data.embeddings", description="Embedding files and stores.")
    commands = parser.add_subparsers(dest="command", required=True)

    def add(run: object, name: str, summary: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=summary, description=f"{summary}.")
        added.set_defaults(run=run)
        return added

    list_ = add(_list, "list", "List the published embedding files")
    fetch = add(_fetch, "fetch", "Download an embedding file into the cache and print its path")
    fetch.add_argument("source", type=_given, help="a short name of `list`, an s3:// or https:// address, or a path")
    fetch.add_argument("--endpoint_url", metavar="URL", help="of the S3 server")
    fetch.add_argument("--convert", action="store_true", help="make a store of it, and print the store's path")
    told = "$TOPK_CACHE without it, else data/downloads/embeddings"
    for each in (list_, fetch):
        each.add_argument("--cache_dir", type=Path, metavar="DIR", help=told)
    converted = add(_convert, "convert", "Make a store of a torch file, or of a store in the earlier format")
    converted.add_argument("file", type=_given, help="the torch file, or the folder of the earlier store")
    converted.add_argument("destination", type=_given, help="folder of the store")
    at_least_1 = program.whole_number(1)
    converted.add_argument("--num_classes", type=at_least_1, metavar="N", help="the largest label + 1 without it")
    converted.add_argument("--backbone", metavar="NAME", help="noted in the store")
    converted.add_argument("--resolution", type=at_least_1, metavar="PIXELS", help="noted in the store")
    told = "the checksum the file must have; of a store to fetch, its fingerprint"
    for each in (fetch, converted):
        each.add_argument("--sha256", metavar="HEX", help=told)
        each.add_argument("--dtype", choices=DTYPES, help="of the store; that of the file without it")
        group = each.add_argument_group("tensors", "their names in a file whose layout is not a published one")
        for name in KEYS:
            group.add_argument(f"--{name}", metavar="KEY")
    add(_verify, "verify", "Check every byte of a store").add_argument("store", type=_given, help="its folder")
    add(_info, "info", "Show what a store holds").add_argument("store", type=_given, help="its folder")
    args = parser.parse_args(argv)
    if "sha256" in args:
        args.keys = {name: key for name in KEYS if (key := getattr(args, name)) is not None} or None
        args.dtype = args.dtype and DTYPES[args.dtype]
        if args.run is _fetch and not args.convert and (args.dtype or args.keys):
            fetch.error("--dtype and the tensors' names are for the store: add --convert")
    return args


def _given(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("must not be empty: the empty path would be the current folder")
    return text


def _list(args: argparse.Namespace) -> None:
    for name, key in PUBLISHED.items():
        known, file = PUBLISHED_SETS[name], cached_path(name, args.cache_dir)
        here = [str(path) for path in (file, store_beside(file, None) / MANIFEST) if path.exists()]
        print(f"{name}\n    {key}")
        print(f"    about {known.gigabytes} GB, {known.backbone} at {known.resolution} pixels")
        print(f"    tensors {', '.join(LAYOUTS[known.layout].values())}")
        print(f"    here: {', '.join(here) or 'no'}")


def _fetch(args: argparse.Namespace) -> None:
    options = {"endpoint_url": args.endpoint_url, "sha256": args.sha256}
    if args.convert:
        print(open_or_fetch(args.source, args.cache_dir, keys=args.keys, dtype=args.dtype, **options).path)
    else:
        print(fetch(args.source, args.cache_dir, **options))


def _convert(args: argparse.Namespace) -> None:
    if args.sha256:
        fetch(args.file, sha256=args.sha256)
    noted = {name: getattr(args, name) for name in ("keys", "dtype", "num_classes", "backbone", "resolution")}
    checksum = f"sha256 {args.sha256.lower()}" if args.sha256 else checksum_of(Path(args.file)) or UNVERIFIED
    _describe(convert(args.file, args.destination, **noted, checksum=checksum, progress=True))


def _verify(args: argparse.Namespace) -> int:
    store = open_store(args.store)
    problems = store.verify(progress=True)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if not problems:
        print(f"{store.path}: {gib(store.bytes)}, every shard matches its checksum")
    return 1 if problems else 0


def _info(args: argparse.Namespace) -> None:
    _describe(open_store(args.store))


def _describe(store: EmbeddingStore) -> None:
    print(f"{store.path}: {gib(store.bytes)}, {store.num_classes} classes, {store.dim} dimensions")
    for name in ("backbone", "resolution", "source"):
        value = getattr(store, name)
        print(f"    {name:12}{'not known' if value is None else value}")
    print(f"    fingerprint {store.fingerprint}")
    if store.checksum:
        print(f"    checksum    {store.checksum} (of the file it was made of)")
    for name, split in store.splits.items():
        print(f"    {name:12}{len(split)} rows of {split.dtype_name} in {len(split.shards)} shards")


if __name__ == "__main__":
    program.end(main())
