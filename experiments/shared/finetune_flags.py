"""The command line of the fine-tuning scripts, and what it describes: configurations, the store and its rows."""

import argparse
import math
import shlex
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from data.embeddings import MODES, EmbeddingStore, open_or_fetch, split_rows
from experiments.shared import command_line as cli
from experiments.shared.environment import ROOT
from experiments.shared.head_runs import Recipe

TENSORS = ("train_embeddings", "train_labels", "test_embeddings", "test_labels")
# What a configuration of one command may have of its own.
LOSS_FLAGS = ("method", "p_k", "inverse_temperature", "distribution", "art_lambda", "m", "top1_mode", "implementation")
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

    table: str
    prog: str
    data_path: str
    results: str
    num_classes: int
    m: int
    nloglr: float
    n_epochs: int
    num_valid: int


IMAGENET_1K = Defaults(
    table="ImageNet-1K (Tables 2, 3 and 5)",
    prog="finetune_imagenet.py",
    data_path="wsl-32x48d-320",
    results="imagenet1k.csv",
    num_classes=1000,
    m=16,
    nloglr=4.5,
    n_epochs=20,
    num_valid=50_000,
)


def parse_arguments(argv: list[str] | None = None, defaults: Defaults = IMAGENET_1K) -> argparse.Namespace:
    """Return the flags, each checked on its own. Raises CommandLineError."""
    parser = cli.Parser(
        prog=defaults.prog, description=f"Train heads on frozen embeddings of {defaults.table} with a top-k loss."
    )
    cli.add_loss_flags(parser, top1_mode="sm", m=defaults.m)
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar='"FLAGS"',
        help="another configuration, whose heads train in the same pass, with rows of their own: loss flags, and --lr "
        'or --nloglr, as in --also "--method softsort --p_k .5 0 0 0 .5"; all other flags are those of the command; '
        "may be repeated",
    )
    optimization, seeds = cli.add_optimization_flags(
        parser,
        n_epochs=defaults.n_epochs,
        batch_size=BATCH_SIZE,
        nloglr=defaults.nloglr,
        seed_help="of initialisation, dropout and, unless --order_seed is given, order",
    )
    optimization.description += (
        f". The defaults are for {PUBLISHED_ROWS:,} training rows and more; of R fewer, batch size R / {MIN_BATCHES}, "
        f"at most {BATCH_SIZE}, so many epochs that there are {MIN_STEPS} steps, and learning rate {MOVEMENT} / steps; "
        "printed at the start"
    )
    seeds.add_argument(
        "--seeds", type=cli.seed, nargs="+", metavar="S", help="train a head for each in one pass; one row each"
    )
    group = parser.add_argument_group("data and model")
    group.add_argument(
        "--data_path",
        "-d",
        default=defaults.data_path,
        metavar="SOURCE",
        help="embeddings: a short name (python -m data.embeddings list), a torch file, a store, or the s3:// or "
        "https:// address of one (%(default)s)",
    )
    for key in TENSORS:
        group.add_argument(f"--{key}", metavar="KEY", help="its name in a torch file of no published layout")
    group.add_argument("--cache_dir", type=cli.path, metavar="DIR", help="of downloads; $TOPK_CACHE or data/downloads")
    group.add_argument("--endpoint_url", type=cli.address("http", "https"), metavar="URL", help="of the S3 server")
    group.add_argument("--sha256", metavar="HEX", help="checksum that the file must have; of a store, its fingerprint")
    group.add_argument(
        "--batches",
        type=cli.choice("batches", MODES),
        default="auto",
        help=f"where the training rows are kept: {', '.join(MODES)}; auto takes the first that holds them; the batches "
        "are the same (%(default)s)",
    )
    group.add_argument(
        "--num_valid",
        type=cli.count,
        metavar="N",
        help=f"training rows that validate; default {defaults.num_valid}, or 5%% of a set of fewer than "
        f"{20 * defaults.num_valid} rows",
    )
    group.add_argument(
        "--limit_train", type=cli.count, metavar="N", help="use N random training rows, for a quick look"
    )
    group.add_argument("--limit_test", type=cli.count, metavar="N", help="use N random test rows, for a quick look")
    group.add_argument("--split_seed", type=cli.seed, default=0, help="of the rows that validate (%(default)s)")
    group.add_argument(
        "--order_seed",
        type=lambda text: text if text == "own" else cli.seed(text),
        metavar="S",
        help="of the order of the training rows: a number, or own for each head's seed; default: the first seed, "
        "so that the heads of a pass share their batches",
    )
    group.add_argument(
        "--hidden_dims", type=cli.count, nargs="+", metavar="D", help="widths of hidden layers; none without it"
    )
    group.add_argument("--apply_relu", action="store_true", help="ReLU on the embeddings")
    group.add_argument("--apply_dropout", action="store_true", help="dropout of .5 on the embeddings in training")
    group.add_argument(
        "--eval_freq", type=cli.count, default=100, metavar="STEPS", help="steps between evaluations (%(default)s)"
    )
    cli.add_machine_flags(parser)
    cli.add_record_flags(parser, results=ROOT / "results" / defaults.results)
    # None where they are not given: `settle` knows better when there are data.
    args = parser.parse_args(argv, argparse.Namespace(n_epochs=None, batch_size=None))
    args.seeds = cli.seeds_of(args)
    args.also = [parse_also(text, parser, args) for text in args.also]
    return args


def parse_also(text: str, parser: cli.Parser, args: argparse.Namespace) -> argparse.Namespace:
    """Return the flags of one --also: its own on the loss and the learning rate, otherwise those of the command.

    Its own `also` is the text.
    Raises CommandLineError.
    """
    shared = vars(args).keys() - {*LOSS_FLAGS, *RATE_FLAGS}
    try:
        # What the namespace has already gets no default: of the shared flags, those that are given are not None.
        given = vars(parser.parse_args(shlex.split(text), argparse.Namespace(**dict.fromkeys(shared))))
        if refused := [f"--{name}" for name in sorted(shared) if given[name] is not None]:
            taken = ", ".join(f"--{name}" for name in (*LOSS_FLAGS, *RATE_FLAGS))
            raise cli.CommandLineError(f"{refused[0]} belongs to the whole command; within are {taken}")
    except (cli.CommandLineError, ValueError) as error:  # ValueError: a quotation mark without its partner
        raise cli.CommandLineError(f"--also {text!r}: {error}") from None
    own = RATE_FLAGS if any(given[name] is not None for name in RATE_FLAGS) else ()
    return argparse.Namespace(**{**vars(args), "also": text, **{name: given[name] for name in (*LOSS_FLAGS, *own)}})


def open_store_of(args: argparse.Namespace) -> EmbeddingStore:
    """Return the store that --data_path names, downloaded and converted if need be.

    Raises CommandLineError for a name that does not exist, EmbeddingError for what cannot be had or used.
    """
    if not Path(args.data_path).is_dir():
        from data.transfers.object_store import ObjectStoreError, resolve  # boto3 takes half a second

        try:
            resolve(args.data_path, endpoint_url=args.endpoint_url)
        except ObjectStoreError as error:
            raise cli.CommandLineError(f"--data_path: {error}") from None
    keys = {name: getattr(args, name) for name in TENSORS if getattr(args, name)}
    store = open_or_fetch(
        args.data_path, args.cache_dir, endpoint_url=args.endpoint_url, keys=keys or None, sha256=args.sha256
    )
    for name in ("train", "test"):  # named if it is missing, or has a label out of range
        store[name].labels()
    return store


def recipes_of(args: argparse.Namespace, defaults: Defaults, num_classes: int, device: torch.device) -> list[Recipe]:
    """Return the command's configurations, each with its loss for so many classes.

    Raises ValueError for one that cannot be, CommandLineError for the same one twice.
    """
    # The published m is for thousands of classes; a set of your own may have fewer.
    m = defaults.m if num_classes > defaults.m else None
    recipes: list[Recipe] = []
    for each in (args, *args.also):
        given = f"--also {each.also!r}: " if each is not args else ""
        reduction = "none" if each.implementation == "ours" else "mean"
        try:
            settings = cli.loss_settings(each, top1_mode="sm", inverse_temperatures={}, m=m)
            loss_fn = cli.build_loss(each.implementation, settings, num_classes, device, reduction)
        except (ValueError, cli.CommandLineError) as error:
            raise type(error)(f"{given}{error}") from None
        # nan: not settled yet, and equal to no other.
        flags = {**vars(each), **settings, **cli.learning_rate(each, math.nan)}
        if any(all(flags[name] == other.flags[name] for name in (*LOSS_FLAGS, "lr")) for other in recipes):
            raise cli.CommandLineError(f"{given}the command has this configuration already; leave one of them out")
        recipes.append(Recipe(flags, loss_fn))
    return recipes


def rows_of(store: EmbeddingStore, args: argparse.Namespace, defaults: Defaults) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows that train, validate (both of the split train) and test, each (R,) int64, ascending.

    Raises CommandLineError where the flags ask for more than there is.
    """
    chosen = {}
    for name, limit in (("train", args.limit_train), ("test", args.limit_test)):
        num_rows = len(store[name])
        if limit is not None and limit > num_rows:
            raise cli.CommandLineError(f"--limit_{name} must not exceed the {num_rows} rows of {name}, got {limit}")
        everything = limit is None or limit == num_rows
        chosen[name] = torch.arange(num_rows) if everything else split_rows(num_rows, limit, args.split_seed)[1]
    num_rows = len(chosen["train"])
    published = defaults.num_valid if num_rows >= 20 * defaults.num_valid else max(num_rows // 20, 1)
    try:
        train, valid = split_rows(num_rows, args.num_valid or published, args.split_seed)
    except ValueError as error:
        raise cli.CommandLineError(f"--num_valid: {error}") from None
    return chosen["train"][train], chosen["train"][valid], chosen["test"]


def settle(args: argparse.Namespace, defaults: Defaults, num_rows: int) -> str:
    """Fill in batch size, epochs and learning rate where they are not given, by the number of rows that train.

    Returns what was filled in, as flags. Raises CommandLineError for batches of more rows than there are.
    """
    filled = {}
    if args.batch_size is None:
        filled["batch_size"] = args.batch_size = max(min(num_rows // MIN_BATCHES, BATCH_SIZE), 1)
    if args.batch_size > num_rows:
        raise cli.CommandLineError(
            f"--batch_size must not exceed the {num_rows} training rows, since the last partial batch is dropped, "
            f"got {args.batch_size}"
        )
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
