"""The command line of the fine-tuning scripts, and what it describes: configurations, the store and its rows."""

import itertools
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from data.embeddings import MODES, EmbeddingStore, open_or_fetch, split_rows
from data.transfers.object_store import ObjectStoreError, resolve
from experiments.shared import command_line as cli
from experiments.shared.command_line import flag
from experiments.shared.environment import ROOT

RATE_FLAGS = ("lr", "nloglr")
# Defaults for any number of training rows. The published ones are for a million: from 2,000 rows they learn nothing,
# since in a step Adam moves no weight by much more than the learning rate, and the steps are few. So a smaller set gets
# smaller batches and more epochs, until there are MIN_STEPS, and a learning rate of MOVEMENT / steps: a weight can come
# as far as it can as published (10^-4.5 times 49,240 steps is 1.6).
PUBLISHED_ROWS = 1_000_000
BATCH_SIZE, MIN_BATCHES, MIN_STEPS, MOVEMENT = 500, 20, 2000, 2


@dataclass(frozen=True)
class Defaults:
    """What a data set's published protocol sets. num_classes: so that flags can be refused before a download."""

    data_path: str
    results: str
    num_classes: int
    m: int
    nloglr: float
    n_epochs: int
    num_valid: int


IMAGENET_1K = Defaults(
    data_path="wsl-32x48d-320",
    results="imagenet1k.csv",
    num_classes=1000,
    m=16,
    nloglr=4.5,
    n_epochs=20,
    num_valid=50_000,
)


@dataclass(eq=False)
class Recipe:
    """One configuration of a command. flags: all of its flags, resolved; loss_fn: with the reduction "none"."""

    flags: Mapping[str, Any]
    loss_fn: nn.Module


@dataclass
class Flags(cli.RecordFlags, cli.MachineFlags, cli.LimitFlags, cli.OptimizationFlags, cli.ClassifierFlags):
    """of this script"""

    data_path: str | None = flag(
        None, str, "a short name (python -m data.embeddings list), a torch file, a store, or the address of one", "-d"
    )
    cache_dir: Path | None = flag(None, cli.path, "of downloads; $TOPK_CACHE or data/downloads")
    endpoint_url: str | None = flag(None, cli.address("http", "https"), "of the S3 server")
    batches: str = flag("auto", MODES, "where the training rows are kept; auto takes the first that holds them")
    num_valid: int | None = flag(
        None,
        cli.count,
        "rows that validate; as published, or of less than 20 times that 5%, or of few a fifth up to 1,000",
    )
    split_seed: int = flag(0, cli.a_seed, "of the rows that validate")
    order_seed: int | str | None = flag(
        None,
        lambda text: text if text == "own" else cli.a_seed(text),
        "of the order of the training rows, or own for each head's seed; without, the first seed",
    )
    hidden_dims: list[int] | None = flag(None, cli.count, "widths of hidden layers; none without it", nargs="+")
    apply_relu: bool = flag(False, bool, "ReLU on the embeddings")
    apply_dropout: bool = flag(False, bool, "dropout of .5 on the embeddings in training")
    eval_freq: int = flag(100, cli.count, "steps between evaluations")
    graph: bool = flag(False, bool, "record the training step as one CUDA graph; no GPU has run it yet")
    also: Any = flag(
        (),
        str,
        "another configuration, trained in the same pass: loss flags, --lr or --nloglr, --weight_decay; repeatable",
        action="append",
        metavar='"FLAGS"',
    )


def parse_arguments(argv: list[str] | None = None, defaults: Defaults = IMAGENET_1K) -> Flags:
    """Return the flags, each checked on its own. Raises CommandLineError."""
    told = (
        f"Train heads on frozen embeddings ({defaults.data_path}) with a top-k loss: {defaults.n_epochs} epochs, "
        f"learning rate 10^-{defaults.nloglr:g}, m {defaults.m}, {defaults.num_valid} rows that validate. These "
        f"defaults are for {PUBLISHED_ROWS:,} training rows and more; of R fewer, batch size R / {MIN_BATCHES}, at "
        f"most {BATCH_SIZE}, so many epochs that there are {MIN_STEPS} steps, and learning rate {MOVEMENT} / steps."
    )
    parser = cli.parser_of(Flags, told)
    args = Flags(**vars(parser.parse_args(argv)))
    args.data_path = args.data_path or defaults.data_path
    args.results = args.results or ROOT / "results" / defaults.results
    args.also = [parse_also(text, parser, args) for text in args.also]
    return args


def parse_also(text: str, parser: cli.Parser, args: Flags) -> Flags:
    """Return the flags of one --also: its own on loss and learning rate, else the command's. CommandLineError."""
    defaults = {each.name: each.default for each in fields(cli.ClassifierFlags)}
    own = (*defaults, *RATE_FLAGS, "weight_decay")
    try:
        given = vars(parser.parse_args(shlex.split(text)))
        if refused := given.keys() - set(own):
            taken = ", ".join(f"--{name}" for name in own)
            raise cli.CommandLineError(f"--{min(refused)} belongs to the whole command; within are {taken}")
    except (cli.CommandLineError, ValueError) as error:  # ValueError: a quotation mark without its partner
        raise cli.CommandLineError(f"--also {text!r}: {error}") from None
    rates = dict.fromkeys(RATE_FLAGS if given.keys() & set(RATE_FLAGS) else ())
    return replace(args, also=text, **{**defaults, **rates, **given})


def open_store_of(source: str, cache_dir: Path | None, endpoint_url: str | None = None) -> EmbeddingStore:
    """Return the store that --data_path names, downloaded and converted if need be.

    Raises CommandLineError for a name that does not exist, EmbeddingError for the rest.
    """
    if not Path(source).is_dir():
        try:
            resolve(source, endpoint_url=endpoint_url)
        except ObjectStoreError as error:
            raise cli.CommandLineError(f"--data_path: {error}") from None
    store = open_or_fetch(source, cache_dir, endpoint_url=endpoint_url)
    for name in dict.fromkeys(("train", *store.splits)):  # named if it is missing, or has a label out of range
        store[name].labels()
    return store


def columns_of(store: EmbeddingStore, source: str) -> dict[str, Any]:
    """Return the columns that say which embeddings they are, by content and by place, and how they were made."""
    return {
        "embeddings": f"{store.num_classes}x{store.dim}-{store.fingerprint[:8]}",
        "data_path": cli.portable(Path(source)) if Path(source).exists() else source,
        "embedding_dtype": store["train"].dtype_name,
        "embeddings_checksum": store.checksum,
        "backbone": store.backbone,
        "resolution": store.resolution,
    }


def recipes_of(args: Flags, defaults: Defaults, num_classes: int, device: torch.device) -> list[Recipe]:
    """Return the command's configurations, each with its loss. ValueError; CommandLineError if given twice."""
    # The published m is for thousands of classes; a set of your own may have fewer.
    m = defaults.m if num_classes > defaults.m else None
    recipes: list[Recipe] = []
    for each in (args, *args.also):
        given = f"--also {each.also!r}: " if each is not args else ""
        try:
            settings = cli.loss_settings(each, top1_mode="sm", inverse_temperatures={}, m=m)
            reduction = "none" if each.implementation == "ours" else "mean"  # difftopk knows the mean alone
            loss_fn = cli.build_loss(each.implementation, settings, num_classes, device, reduction)
        except (ValueError, cli.CommandLineError) as error:
            raise type(error)(f"{given}{error}") from None
        # nan: not settled yet, and equal to no other.
        first = {"n_epochs": each.n_epochs, "batch_size": each.batch_size}
        flags = {**first, **vars(each), **settings, **cli.learning_rate(each, math.nan)}
        flags["weight_decay"] = each.weight_decay or None
        of_head = (*(each.name for each in fields(cli.ClassifierFlags)), "lr", "weight_decay")
        twice = any(all(flags[name] == other.flags[name] for name in of_head) for other in recipes)
        cli.check(not twice, f"{given}the command has this configuration already; leave one of them out")
        recipes.append(Recipe(flags, loss_fn))
    return recipes


def rows_of(store: EmbeddingStore, args: Flags, defaults: Defaults) -> dict[str, Tensor]:
    """Return the rows that train, validate and, where the store has a split for it, test, each (R,) int64, rising.

    Those that validate are the store's split, else some of its training rows. Raises CommandLineError.
    """
    cli.check("test" in store.splits or not args.limit_test, f"--limit_test: {store.path} has no test split")
    chosen = {}
    for name, limit in (("train", args.limit_train), ("valid", None), ("test", args.limit_test)):
        if name in store.splits:
            num_rows = len(store[name])
            cli.check(
                (limit or 0) <= num_rows, f"--limit_{name} must not exceed the {num_rows} rows of {name}, got {limit}"
            )
            everything = limit in (None, num_rows)
            chosen[name] = torch.arange(num_rows) if everything else split_rows(num_rows, limit, args.split_seed)[1]
    if "valid" in chosen:
        cli.check(args.num_valid is None, f"--num_valid: {store.path} has {len(chosen['valid'])} rows that validate")
    else:
        num_rows = len(chosen["train"])
        try:
            number = args.num_valid or share_that_validates(num_rows, defaults.num_valid)
            train, valid = split_rows(num_rows, number, args.split_seed)
        except ValueError as error:
            raise cli.CommandLineError(f"--num_valid: {error}") from None
        chosen |= {"train": chosen["train"][train], "valid": chosen["train"][valid]}
    widths = store.dim, *(args.hidden_dims or ()), store.num_classes
    weights = sum(map(math.prod, itertools.pairwise(widths))) * len(args.seeds) * (1 + len(args.also))
    what = f"heads of widths {' '.join(map(str, widths))}, with gradients, Adam's moments, and what is saved of them,"
    cli.check_memory(28 * weights, what)
    return {name: chosen[name] for name in ("train", "valid", "test") if name in chosen}


def share_that_validates(num_rows: int, published: int) -> int:
    """As published where that is at most 5 %, of fewer rows 5 %, or, of few, a fifth of them up to 1,000."""
    return published if num_rows >= 20 * published else max(num_rows // 20, min(num_rows // 5, 1000), 1)


def settle(args: Flags, defaults: Defaults, num_rows: int) -> str:
    """Fill in batch size, epochs and rate by the number of rows that train; return what was. CommandLineError."""
    filled = {}
    if args.batch_size is None:
        filled["batch_size"] = args.batch_size = max(min(num_rows // MIN_BATCHES, BATCH_SIZE), 1)
    told = f"--batch_size must not exceed the {num_rows} training rows, got {args.batch_size}"
    cli.check(args.batch_size <= num_rows, told)
    batches = num_rows // args.batch_size  # in an epoch
    if args.n_epochs is None:
        enough = -(-MIN_STEPS // max(batches, MIN_BATCHES))
        filled["n_epochs"] = args.n_epochs = max(enough, defaults.n_epochs)
    if args.lr is None and args.nloglr is None:
        if num_rows < PUBLISHED_ROWS:
            filled["lr"] = args.lr = float(f"{MOVEMENT / (args.n_epochs * batches):.1g}")
        else:
            filled["nloglr"] = args.nloglr = defaults.nloglr
    for each in args.also:
        each.batch_size, each.n_epochs = args.batch_size, args.n_epochs
        if each.lr is None and each.nloglr is None:
            each.lr, each.nloglr = args.lr, args.nloglr
    return " ".join(f"--{name} {value:g}" for name, value in filled.items())
