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
    EmbeddingStore,
    convert,
    open_or_fetch,
    open_store,
    store_beside,
)
from data.embeddings.formats import KEYS
from data.embeddings.store import UNVERIFIED
from data.machine_memory import gib
from data.transfers.object_store import PUBLISHED, cached_path, checksum_of, fetch


def main(argv: list[str] | None = None) -> int:
    """Run one of the commands above; return the exit status."""
    commands = {"list": _list, "fetch": _fetch, "convert": _convert, "verify": _verify, "info": _info}

    def run() -> int:
        args = _parse(argv)
        return commands[args.command](args)

    return program.finish(run, "the same command continues with what is missing")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = program.Parser(prog="python -m data.embeddings", description="Embedding files and stores.")
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, summary: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=summary, description=f"{summary}.")

    list_ = add("list", "List the published embedding files")
    fetch = add("fetch", "Download an embedding file into the cache and print its path")
    fetch.add_argument("source", type=_given, help="a short name of `list`, an s3:// or https:// address, or a path")
    fetch.add_argument("--endpoint_url", metavar="URL", help="of the S3 server")
    fetch.add_argument("--convert", action="store_true", help="make a store of it, and print the store's path")
    for each in (list_, fetch):
        each.add_argument(
            "--cache_dir", type=Path, metavar="DIR", help="$TOPK_CACHE without it, else data/downloads/embeddings"
        )
    converted = add("convert", "Make a store of a torch file, or of a store in the earlier format")
    converted.add_argument("file", type=_given, help="the torch file, or the folder of the earlier store")
    converted.add_argument("destination", type=_given, help="folder of the store")
    at_least_1 = program.whole_number(1)
    converted.add_argument("--num_classes", type=at_least_1, metavar="N", help="the largest label + 1 without it")
    converted.add_argument("--backbone", metavar="NAME", help="noted in the store")
    converted.add_argument("--resolution", type=at_least_1, metavar="PIXELS", help="noted in the store")
    for each in (fetch, converted):
        each.add_argument(
            "--sha256", metavar="HEX", help="the checksum the file must have; of a store to fetch, its fingerprint"
        )
        each.add_argument("--dtype", choices=DTYPES, help="of the store; that of the file without it")
        group = each.add_argument_group(
            "tensors", "names of the file's tensors where its layout is not a published one"
        )
        for name in KEYS:
            group.add_argument(f"--{name}", metavar="KEY")
    for name, summary in (("verify", "Check every byte of a store"), ("info", "Show what a store holds")):
        add(name, summary).add_argument("store", type=_given, help="folder of the store")
    args = parser.parse_args(argv)
    if args.command == "fetch" and not args.convert and (args.dtype or _keys(args)):
        fetch.error("--dtype and the tensors' names are for the store: add --convert")
    return args


def _given(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("must not be empty: the empty path would be the current folder")
    return text


def _keys(args: argparse.Namespace) -> dict[str, str] | None:
    return {name: key for name in KEYS if (key := getattr(args, name)) is not None} or None


def _list(args: argparse.Namespace) -> int:
    for name, key in PUBLISHED.items():
        known, file = PUBLISHED_SETS[name], cached_path(name, args.cache_dir)
        here = [str(path) for path in (file, store_beside(file, None) / MANIFEST) if path.exists()]
        print(f"{name}\n    {key}")
        print(f"    about {known.gigabytes} GB, {known.backbone} at {known.resolution} pixels")
        print(f"    tensors {', '.join(LAYOUTS[known.layout].values())}")
        print(f"    here: {', '.join(here) or 'no'}")
    return 0


def _fetch(args: argparse.Namespace) -> int:
    options = {"endpoint_url": args.endpoint_url, "sha256": args.sha256}
    if args.convert:
        dtype = args.dtype and DTYPES[args.dtype]
        file = open_or_fetch(args.source, args.cache_dir, keys=_keys(args), dtype=dtype, **options).path
    else:
        file = fetch(args.source, args.cache_dir, **options)
    print(file)
    return 0


def _convert(args: argparse.Namespace) -> int:
    if args.sha256:
        fetch(args.file, sha256=args.sha256)
    store = convert(
        args.file,
        args.destination,
        keys=_keys(args),
        dtype=args.dtype and DTYPES[args.dtype],
        num_classes=args.num_classes,
        backbone=args.backbone,
        resolution=args.resolution,
        checksum=f"sha256 {args.sha256.lower()}" if args.sha256 else checksum_of(Path(args.file)) or UNVERIFIED,
        progress=True,
    )
    print(_description(store))
    return 0


def _verify(args: argparse.Namespace) -> int:
    store = open_store(args.store)
    problems = store.verify(progress=True)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if not problems:
        print(f"{store.path}: {gib(store.bytes)}, every shard matches its checksum")
    return 1 if problems else 0


def _info(args: argparse.Namespace) -> int:
    print(_description(open_store(args.store)))
    return 0


def _description(store: EmbeddingStore) -> str:
    lines = [f"{store.path}: {gib(store.bytes)}, {store.num_classes} classes, {store.dim} dimensions"]
    for name, value in (("backbone", store.backbone), ("resolution", store.resolution), ("source", store.source)):
        lines.append(f"    {name:12}{'not known' if value is None else value}")
    lines.append(f"    fingerprint {store.fingerprint}")
    if store.checksum:
        lines.append(f"    checksum    {store.checksum} (of the file it was made of)")
    for name, split in store.splits.items():
        lines.append(f"    {name:12}{len(split)} rows of {split.dtype_name} in {len(split.shards)} shards")
    return "\n".join(lines)


if __name__ == "__main__":
    program.end(main())
