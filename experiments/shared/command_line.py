"""What the scripts' command lines share: argument types, groups of flags, and checks of what they ask for.

A user's mistake is answered with a sentence and an exit status: see data/program.py.
"""

import argparse
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
from torch import nn

from data import program
from data.machine_memory import available_ram, gib
from data.program import CommandLineError, Parser, ProgramError, path, whole_number
from experiments.shared.environment import ROOT
from experiments.shared.loss_state import ends_of, resolved
from experiments.shared.ranks import Ranks
from topk_losses import ALIASES, DISTRIBUTIONS, METHODS, RELAXATIONS, TOP1_MODES, make_loss
from topk_losses.checks import AUTO, check_choice
from topk_losses.kernels import device_of_kernels
from topk_losses.methods import SINGLE_K, TOP1

# P_K without --p_k, as in Table 1; [.2 .2 .2 .2 .2] for the other methods.
DEFAULT_P_K = {
    **{method: [1.0, 0.0, 0.0, 0.0, 0.0] for method in TOP1},
    **{method: [0.0, 0.0, 0.0, 0.0, 1.0] for method in SINGLE_K},
}
CLASSIFIER_FLAGS = ("label_smoothing", "margin")  # of the losses of classifiers
EPOCHS_SAVED = "every finished epoch is saved in its run folder; the same command continues after it"

Flags = TypeVar("Flags")


class AlreadyRecorded(Exception):
    """The results file has the row already, as was said: there is nothing to do."""


@contextmanager
def refusing(*unavailable: type[Exception]) -> Iterator[None]:
    """Raise CommandLineError for a ValueError, which says what is wrong with a setting; ProgramError for the others."""
    try:
        yield
    except unavailable as error:
        raise ProgramError(str(error)) from None
    except ValueError as error:
        raise CommandLineError(str(error)) from None


def finish(work: Callable[[Ranks], int], stopped: str = EPOCHS_SAVED, name: str = "") -> int:
    """Run a script's work as program.finish does; of several processes, the first that fails speaks for all."""
    joined: list[Ranks] = []

    def run() -> int:
        joined.append(Ranks())
        status = 0
        with suppress(AlreadyRecorded):
            status = work(joined[0])
        joined[0].close()
        return status

    return program.finish(run, stopped, speaks=lambda _: not joined or joined[0].speaks(), name=name)


# Argument types: text -> value, or ValueError with a sentence.


def said(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return an argument type whose ValueError argparse says in its own words."""

    def convert(text: str) -> Any:
        try:
            return kind(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def number(rule: str, accepts: Callable[[float], bool]) -> Callable[[str], float]:
    """Return an argument type for finite numbers that satisfy `accepts`; `rule` completes "must be ..."."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and accepts(value)):
            raise ValueError(f"must be {rule}, got {text!r}")
        return value

    return convert


def between(lowest: float, highest: float) -> Callable[[str], float]:
    """Return an argument type for numbers of a closed interval."""
    return number(f"a number between {lowest} and {highest}", lambda value: lowest <= value <= highest)


def method_of(methods: Iterable[str]) -> Callable[[str], str]:
    """Return an argument type for one of these methods, with the published spellings accepted: its canonical name."""
    return lambda text: check_choice("method", ALIASES.get(text, text), methods)


def address(*schemes: str) -> Callable[[str], str]:
    """Return an argument type for addresses scheme://host..., of one of the schemes."""

    def convert(text: str) -> str:
        try:
            parts = urlsplit(text)
            valid = parts.scheme in schemes and (parts.hostname or parts.scheme == "file") and parts.port != 0
        except ValueError:  # a bracket or a port that is none
            valid = False
        if not valid or any(character.isspace() for character in text):
            raise ValueError(f"must be an address {'://, '.join(schemes)}://..., got {text!r}")
        return text

    return convert


def temperature(text: str) -> float | str:
    """Argument type of --inverse_temperature: a number above 0, auto, or a schedule such as 0.25:4, as it is kept."""
    if text == AUTO:
        return text
    # Nor is its inverse too large for float32.
    rule = "a number above 0 (1e-30 to 1e30), auto, or from:to as in 0.25:4"
    convert = number(rule, lambda value: 1e-30 <= value <= 1e30)
    with suppress(ValueError):  # which would quote one end alone
        start, end = text.split(":")
        return f"{convert(start):g}:{convert(end):g}"
    return convert(text)


positive = number("a finite number above 0", lambda value: value > 0)
non_negative = number("a finite number of at least 0", lambda value: value >= 0)
fraction = between(0, 1)
count = whole_number(1)
a_seed = whole_number(0, 2**32 - 1)


# Groups of flags: a dataclass each, whose first words are the title of the group, and which a script inherits.


def flag(default: Any, kind: Any, told: str = "", *names: str, **more: Any) -> Any:
    """Return a field of a class of flags. kind: its argument type, bool for a switch, or what there is to choose from.

    told: what --help says. names: other spellings. more: what add_argument takes; only_one: a name that flags share of
    which one may be given. A subclass may give the field another default, and nothing else.
    """
    return field(default=default, metadata={"type": kind, "help": told, "names": names, **more})


def parse(flags: type[Flags], argv: Sequence[str] | None, told: str) -> Flags:
    """Return the flags of a command line, what is not given at its default. told: by --help. CommandLineError."""
    return flags(**vars(parser_of(flags, told).parse_args(argv)))


def parser_of(flags: type, told: str) -> Parser:
    """Return the parser of a class of flags; what a command line does not give is absent from what it returns."""
    parser = Parser(argument_default=argparse.SUPPRESS, description=told.partition("\n\n")[0])
    defaults = {each.name: each.default for each in fields(flags)}
    groups: dict[str, Any] = {}  # by title, or by the name of flags of which one may be given
    for of in reversed(flags.__mro__[:-1]):
        title, _, told = of.__doc__.partition(": ")
        for each in fields(of):
            if each.name not in defaults:  # of a parent, and added already
                continue
            default, options = defaults.pop(each.name), dict(each.metadata)
            names, only_one, kind = options.pop("names"), options.pop("only_one", None), options["type"]
            group = groups[title] = groups.get(title) or parser.add_argument_group(title, told)
            if only_one:
                group = groups[only_one] = groups.get(only_one) or group.add_mutually_exclusive_group()
            if not callable(kind):
                options["help"] = ": ".join(filter(None, (", ".join(kind), options["help"])))
                kind = partial(check_choice, each.name, choices=kind)
            if kind is bool:
                options["action"] = "store_true"
                del options["type"]
            else:
                options["type"] = said(kind)
                options["help"] += f" ({portable(default)})" if default not in (None, ()) else ""
            options["help"] = options["help"].replace("%", "%%")
            group.add_argument(f"--{each.name}", *names, **options)
    return parser


@dataclass
class OperatorFlags:
    """loss: a setting that is left out takes the method's default"""

    inverse_temperature: float | str | None = flag(
        None,
        temperature,
        "larger is closer to the hard operator (of smooth_topk and smooth_hard_topk it is tau, and softer); auto: "
        "follows the spread of the scores; 0.25:4: from .25 to 4 over the training, evenly in its logarithm",
    )
    distribution: str | None = flag(None, DISTRIBUTIONS, "sigmoid family of the networks")
    art_lambda: float | None = flag(None, non_negative, "exponent of logistic_phi, in [0, 1)")


@dataclass
class LossFlags(OperatorFlags):
    """loss: a setting that is left out takes the method's default"""

    method: str = flag(None, method_of(METHODS), f"{', '.join(METHODS)}; also {', '.join(ALIASES)}", required=True)
    p_k: list[float] | None = flag(
        None,
        fraction,
        "distribution P_K: the shares of top-1, top-2, ... in the loss, sum 1, e.g. .5 0 0 0 .5",
        "-p_k",
        nargs="+",
    )
    m: int | None = flag(None, count, "scores kept for sorting, the true class's and the m - 1 largest others", "-m")
    top1_mode: str | None = flag(
        None, TOP1_MODES, "the top-1 term: softmax in the logarithm, cross-entropy beside it, or the relaxed sort"
    )
    implementation: str = flag("ours", ("ours", "difftopk"), "difftopk is the official loss, for checking")


@dataclass
class ClassifierFlags(LossFlags):
    """loss: a setting that is left out takes the method's default"""

    label_smoothing: float | None = flag(None, fraction, "share of the label that is spread over all classes, below 1")
    margin: float | None = flag(None, non_negative, "of ldr_kl, in units of the logits (0)")


@dataclass
class OptimizationFlags:
    """optimization: AdamW, which without weight decay is Adam, or SGD of nearest neighbours; default betas"""

    n_epochs: int | None = flag(None, count, "passes over the training split")
    batch_size: int | None = flag(None, count, "the last partial batch is dropped")
    lr: float | None = flag(None, positive, "learning rate", only_one="rate")
    nloglr: float | None = flag(None, between(-10, 30), "learning rate 10^-nloglr", only_one="rate")
    weight_decay: float = flag(0.0, between(0, 1000), "of every parameter; AdamW's is times the learning rate")
    seed: int | None = flag(None, a_seed, "of split, initialisation, order and crops; 0 without it", only_one="s")
    seeds: list[int] | None = flag(None, a_seed, "train with each at the same time", only_one="s", nargs="+")

    def __post_init__(self) -> None:
        """Settle the seeds: a list of different ones, and the first of them. Raises CommandLineError."""
        self.seeds = self.seeds or [self.seed or 0]
        self.seed = self.seeds[0] if self.seed is None else self.seed
        differ = len(set(self.seeds)) == len(self.seeds)
        check(differ, f"--seeds must differ, got {' '.join(map(str, self.seeds))}")


@dataclass
class LimitFlags:
    """data and model"""

    limit_train: int | None = flag(None, count, "use so much of the training split, for a quick look")
    limit_test: int | None = flag(None, count, "use so much of the test split, for a quick look")


@dataclass
class DataFlags(LimitFlags):
    """data and model"""

    data_dir: Path = flag(ROOT / "data" / "downloads", path, "where data sets are, or are downloaded to")
    mirror: str | None = flag(None, address("http", "https", "file"), "download cifar100 or cifar10 from here instead")


@dataclass
class DeviceFlags:
    """machine"""

    device: str = flag("auto", str, "auto, cpu, cuda or cuda:<index>")
    threads: int | None = flag(None, whole_number(1, 1024), "CPU threads; one per core without it")


@dataclass
class MachineFlags(DeviceFlags):
    """machine"""

    precision: str = flag("fp32", ("fp32", "bf16"), "of the network, bf16 by autocast; the loss is always float32")
    compile: bool = flag(False, bool, "torch.compile the network and the loss")
    deterministic: bool = flag(False, bool, "deterministic kernels where there are any")


@dataclass
class RecordFlags:
    """record"""

    results: Path | None = flag(None, path, "CSV file; the run folders lie in runs/ beside it")
    force: bool = flag(False, bool, "repeat a configuration that the file has; the new row replaces the old")


def check(right: object, sentence: str) -> None:
    """Raise CommandLineError, with a sentence on what is wrong, unless that is right."""
    if not right:
        raise CommandLineError(sentence)


def check_memory(size: int, what: str) -> None:
    """Raise CommandLineError where `what` would take more bytes than there is memory."""
    available = available_ram()
    check(size <= available, f"{what} would take {gib(size)}, and {gib(available)} of memory are free")


def training_device(args: Any, ranks: Ranks) -> torch.device:
    """Return the device of --device, where kernels, --graph and --compile can run. Raises CommandLineError."""
    device = ranks.device(args.device)
    with refusing():
        device_of_kernels(device)
    implementations = {getattr(each, "implementation", "ours") for each in (args, *getattr(args, "also", ()))}
    alone = device.type == "cuda" and ranks.count == 1 and implementations == {"ours"}
    told = f"--graph is for one process on a GPU and our losses: leave it out, on {device.type}"
    check(alone or not getattr(args, "graph", False), told)
    compilers = (os.environ.get("CXX"), os.environ.get("CC"), "g++", "clang++", "c++", "gcc", "clang", "cc", "cl")
    there = not getattr(args, "compile", False) or any(shutil.which(name) for name in compilers if name)
    check(there, "--compile needs a C++ compiler, and none is on PATH; install g++, or leave it out")
    return device


def learning_rate(args: Any, nloglr: float) -> dict[str, float | None]:
    """Return the columns lr and nloglr; without either flag, nloglr is the given default."""
    nloglr = args.nloglr if args.nloglr is not None else nloglr
    return {"lr": 10**-nloglr, "nloglr": nloglr} if args.lr is None else {"lr": args.lr, "nloglr": None}


def loss_settings(
    args: Any, *, top1_mode: str, inverse_temperatures: Mapping[str, float], m: int | None = None
) -> dict[str, Any]:
    """Return the arguments of make_loss that the loss flags describe, nothing left to a default. Raises ValueError.

    `top1_mode`, `inverse_temperatures` (by method) and `m` are the script's defaults, before the library's.
    """
    method, relaxed = args.method, args.method in RELAXATIONS
    settings = resolved(
        method,
        args.inverse_temperature or inverse_temperatures.get(method),
        args.distribution,
        args.art_lambda,
        args.top1_mode or (top1_mode if relaxed else None),
    )
    # At 0 it is the loss without. A script that has none of these flags has no such columns.
    given = {name: getattr(args, name) or None for name in CLASSIFIER_FLAGS if hasattr(args, name)}
    check(not given.get("margin") or method == "ldr_kl", f"--margin is of ldr_kl: leave it out, with {method}")
    # The other methods take --m, since published commands pass it to every row of a table, and ignore it.
    return {
        "method": method,
        "p_k": args.p_k or DEFAULT_P_K.get(method, [0.2] * 5),
        "m": (args.m or m) if relaxed else None,
        **settings,
        **given,
    }


def build_loss(
    implementation: str,
    settings: Mapping[str, Any],
    num_classes: int,
    device: torch.device,
    reduction: str = "mean",
) -> nn.Module:
    """Return the loss that loss_settings describes, on the device; reduction: as for make_loss. Raises ValueError."""
    ends = ends_of(settings["inverse_temperature"])
    settings = {name: value for name, value in settings.items() if name not in CLASSIFIER_FLAGS or value is not None}
    if implementation == "ours":
        settings = {**settings, "inverse_temperature": ends[0]} if ends else settings
        loss_fn = make_loss(**settings, num_classes=num_classes, reduction=reduction).to(device)
        if ends and not hasattr(loss_fn, "inverse_temperature"):
            raise ValueError(f"the temperature of {settings['method']} is fixed: give one number")
        return loss_fn
    others = " and ".join(name for name in CLASSIFIER_FLAGS if name in settings)
    if others or ends:
        told = f"has no {others}: leave it out" if others else "takes a fixed inverse temperature: give one number"
        raise ValueError(f"difftopk {told}, or take --implementation ours")
    try:
        from experiments.shared.official_loss import make_official_loss
    except ImportError as error:
        raise CommandLineError(f"{error}; --implementation difftopk needs pip install difftopk") from None
    return make_official_loss(**settings, num_classes=num_classes, device=device)


def portable(value: Any) -> str:
    """Return a path as a row shows it, relative to the repository where it lies within; anything else as text."""
    return str(value.relative_to(ROOT) if isinstance(value, Path) and value.is_relative_to(ROOT) else value)
