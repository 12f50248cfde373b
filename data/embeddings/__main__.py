"""The commands of the embedding sets.

    python -m data.embeddings list                                   # the published files
    python -m data.embeddings fetch wsl-32x48d-320 --convert         # download one and make a store of it [--sha256]
    python -m data.embeddings convert FILE FOLDER [--dtype bfloat16] # of any torch file
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
    EmbeddingStore,
    convert,
    open_or_fetch,
    open_store,
)
from data.embeddings.formats import KEYS
from data.machine_memory import gib
from data.transfers.object_store import fetch, resolve


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
    fetched = add(_fetch, "fetch", "Download an embedding file into the cache and print its path")
    fetched.add_argument("source", type=_given, help="a short name of `list`, an s3:// or https:// address, or a path")
    fetched.add_argument("--endpoint_url", metavar="URL", help="of the S3 server")
    fetched.add_argument("--convert", action="store_true", help="make a store of it, and print the store's path")
    for each in (list_, fetched):
        told = "$TOPK_CACHE without it, else data/downloads/embeddings"
        each.add_argument("--cache_dir", type=Path, metavar="DIR", help=told)
    converted = add(_convert, "convert", "Make a store of a torch file")
    converted.add_argument("file", type=_given, help="the torch file")
    converted.add_argument("destination", type=_given, help="folder of the store")
    converted.add_argument("--dtype", choices=DTYPES, help="of the store; that of the file without it")
    converted.add_argument("--backbone", metavar="NAME", help="noted in the store")
    converted.add_argument("--resolution", type=program.whole_number(1), metavar="PIXELS", help="noted in the store")
    for each in (fetched, converted):
        told = "the checksum the file must have; of a store to fetch, its fingerprint"
        each.add_argument("--sha256", metavar="HEX", help=told)
    group = converted.add_argument_group("tensors", "their names in a file whose layout is not a published one")
    for name in KEYS:
        group.add_argument(f"--{name}", metavar="KEY")
    for run, name, summary in ((_verify, "verify", "Check every byte of a store"), (_info, "info", "Show a store")):
        add(run, name, summary).add_argument("store", type=_given, help="its folder")
    return parser.parse_args(argv)


def _given(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("must not be empty: the empty path would be the current folder")
    return text


def _list(args: argparse.Namespace) -> None:
    for name, known in PUBLISHED_SETS.items():
        file = resolve(name, args.cache_dir).path
        here = [str(path) for path in (file, file.with_suffix(".store") / MANIFEST) if path.exists()]
        print(f"{name}\n    {known.key}")
        print(f"    about {known.gigabytes} GB, {known.backbone} at {known.resolution} pixels")
        print(f"    tensors {', '.join(LAYOUTS[known.layout].values())}")
        print(f"    here: {', '.join(here) or 'no'}")


def _fetch(args: argparse.Namespace) -> None:
    where = {"cache_dir": args.cache_dir, "endpoint_url": args.endpoint_url}
    if args.convert:
        print(open_or_fetch(args.source, sha256=args.sha256, **where).path)
    else:
        print(fetch(resolve(args.source, **where), args.sha256))


def _convert(args: argparse.Namespace) -> None:
    keys = {name: key for name in KEYS if (key := getattr(args, name)) is not None} or None
    noted = {"backbone": args.backbone, "resolution": args.resolution, "sha256": args.sha256}
    _describe(convert(args.file, args.destination, keys=keys, dtype=args.dtype and DTYPES[args.dtype], **noted))


def _verify(args: argparse.Namespace) -> int:
    store = open_store(args.store)
    problems = store.verify()
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
