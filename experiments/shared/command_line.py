"""What the scripts' command lines share: argument types, groups of flags, and checks of what they ask for.

A user's mistake is answered with a sentence and an exit status: see data/program.py.
"""

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
from torch import nn

from data import program
from data.machine_memory import available_ram, gib
from data.program import CommandLineError, Parser, ProgramError, path, whole_number
from experiments.shared.environment import ROOT, resolve_device
from experiments.shared.loss_state import ends_of, resolved
from experiments.shared.ranks import Ranks
from topk_losses import ALIASES, DISTRIBUTIONS, METHODS, RELAXATIONS, TOP1_MODES, make_loss
from topk_losses.checks import AUTO, check_choice
from topk_losses.kernels import device_of_kernels
from topk_losses.methods import SINGLE_K

# P_K without --p_k, as in Table 1; [.2 .2 .2 .2 .2] for the other methods.
DEFAULT_P_K = {
    "softmax_cross_entropy": [1.0, 0.0, 0.0, 0.0, 0.0],
    **{method: [0.0, 0.0, 0.0, 0.0, 1.0] for method in SINGLE_K},
}


Flags = TypeVar("Flags")


class RunError(ProgramError):
    """The run cannot go on or cannot be recorded; the message says why and what to do."""


class AlreadyRecorded(Exception):
    """The results file has the row already, as was said: there is nothing to do."""


EPOCHS_SAVED = "every finished epoch is saved in its run folder; the same command continues after it"


@contextmanager
def refusing(*unavailable: type[Exception]) -> Iterator[None]:
    """Raise RunError in place of what says that something cannot be had, and CommandLineError of any other ValueError.

    These say what is wrong with a setting. Only around calls of which that is true.
    """
    try:
        yield
    except unavailable as error:
        raise RunError(str(error)) from None
    except ValueError as error:
        raise CommandLineError(str(error)) from None


def finish(work: Callable[[Ranks], int], stopped: str = EPOCHS_SAVED, name: str = "") -> int:
    """Run a script's work as program.finish does; of several processes, the first that fails speaks for all."""
    joined: list[Ranks] = []

    def run() -> int:
        ranks = Ranks()
        joined.append(ranks)
        try:
            status = work(ranks)
        except AlreadyRecorded:
            status = 0
        ranks.close()
        return status

    return program.finish(run, stopped, speaks=lambda status: not joined or joined[0].speaks(status), name=name)


# Argument types: text -> value, or ArgumentTypeError with a sentence.


def number(rule: str, accepts: Callable[[float], bool]) -> Callable[[str], float]:
    """Return an argument type for finite numbers that satisfy `accepts`; `rule` completes "must be ..."."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and accepts(value)):
            raise argparse.ArgumentTypeError(f"must be {rule}, got {text!r}")
        return value

    return convert


def choice(kind: str, choices: Iterable[str]) -> Callable[[str], str]:
    """Return an argument type for one of `choices`; a near miss is told the nearest."""

    def convert(text: str) -> str:
        try:
            return check_choice(kind, text, choices)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def methods_by_family() -> str:
    """The methods as --help lists them: "sorts: neuralsort, softsort; ..."."""
    families = dict.fromkeys(spec.family for spec in METHODS.values())
    names = {family: [name for name, spec in METHODS.items() if spec.family == family] for family in families}
    return "; ".join(f"{family}: {', '.join(members)}" for family, members in names.items())


def method(text: str) -> str:
    """Argument type of --method: the canonical name, with the published spellings accepted."""
    return choice("method", METHODS)(ALIASES.get(text, text))


def present_device(text: str) -> torch.device:
    """Argument type: a device that is there."""
    try:
        return resolve_device(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("--device ")) from None


def address(*schemes: str) -> Callable[[str], str]:
    """Return an argument type for addresses scheme://host..., of one of the schemes."""

    def convert(text: str) -> str:
        try:
            parts = urlsplit(text)
            valid = parts.scheme in schemes and (parts.hostname or parts.scheme == "file") and parts.port != 0
        except ValueError:  # a bracket or a port that is none
            valid = False
        if not valid or any(character.isspace() for character in text):
            raise argparse.ArgumentTypeError(f"must be an address {'://, '.join(schemes)}://..., got {text!r}")
        return text

    return convert


def temperature(text: str) -> float | str:
    """Argument type of --inverse_temperature: a number above 0, auto, or a schedule such as 0.25:4, as it is kept."""
    if text == AUTO:
        return text
    # Nor is its inverse too large for float32.
    rule = "a number above 0 (1e-30 to 1e30), auto, or from:to as in 0.25:4"
    convert = number(rule, lambda value: 1e-30 <= value <= 1e30)
    return ":".join(f"{convert(end):g}" for end in text.split(":")) if text.count(":") == 1 else convert(text)


positive = number("a number above 0", lambda value: value > 0)
non_negative = number("a number of at least 0", lambda value: value >= 0)
# By the learning rate, it is the share of a weight that a step takes away.
weight_decay = number("a number between 0 and 1000", lambda value: 0 <= value <= 1000)
fraction = number("a number between 0 and 1", lambda value: 0 <= value <= 1)
count = whole_number(1)
a_seed = whole_number(0, 2**32 - 1)
core_count = whole_number(1, 1024)  # more than that no system starts for sure


# Groups of flags: a dataclass each, whose first words are the title of the group, and which a script inherits.


def flag(default: Any, kind: Any, told: str, *names: str, **more: Any) -> Any:
    """Return a field of a class of flags. kind: its argument type, bool for a switch; told: what --help says of it.

    names: other spellings. more: what add_argument takes; only_one: a name that flags share of which one may be given.
    A subclass may give the field another default, and nothing else.
    """
    return field(default=default, metadata={"type": kind, "help": told.replace("%", "%%"), "names": names, **more})


def as_in(group: type, name: str) -> Any:
    """Return the field of a flag as another group has it."""
    return next(each for each in fields(group) if each.name == name)


def parse(flags: type[Flags], argv: Sequence[str] | None, **about: str) -> Flags:
    """Return the flags of a command line, what is not given at its default. about: of the parser. CommandLineError."""
    return flags(**vars(parser_of(flags, **about).parse_args(argv)))


def parser_of(flags: type, **about: str) -> Parser:
    """Return the parser of a class of flags; what a command line does not give is absent from what it returns."""
    parser = Parser(argument_default=argparse.SUPPRESS, **about)
    defaults = {each.name: each.default for each in fields(flags)}
    places: dict[str, Any] = {}  # by title of a group, or by name of flags of which one may be given
    added: set[str] = set()
    for group in reversed(flags.__mro__[:-1]):
        title, _, told = group.__doc__.partition(": ")
        for each in [each for each in fields(group) if each.name not in added]:
            added.add(each.name)
            if title not in places:
                places[title] = parser.add_argument_group(title, told)
            options = dict(each.metadata)
            names, only_one = options.pop("names"), options.pop("only_one", None)
            if only_one and only_one not in places:
                places[only_one] = places[title].add_mutually_exclusive_group()
            if options["type"] is bool:
                options["action"] = "store_true"
                del options["type"]
            elif defaults[each.name] not in (None, ()):
                options["help"] += f" ({portable(defaults[each.name])})"
            places[only_one or title].add_argument(f"--{each.name}", *names, **options)
    return parser


@dataclass
class LossFlags:
    """loss: a setting that is left out takes the method's default"""

    method: str = flag(None, method, f"{methods_by_family()}; also accepted: {', '.join(ALIASES)}", required=True)
    p_k: list[float] | None = flag(
        None,
        fraction,
        "distribution P_K: the shares of top-1, top-2, ... in the loss, sum 1, e.g. .5 0 0 0 .5; default "
        "1 0 0 0 0 for softmax_cross_entropy, 0 0 0 0 1 for the other losses, .2 .2 .2 .2 .2 for what sorts",
        "-p_k",
        nargs="+",
    )
    inverse_temperature: float | str | None = flag(
        None,
        temperature,
        "larger is closer to the hard operator; auto: follows the spread of the logits in training; 0.25:4: from "
        ".25 to 4 over the training, evenly in its logarithm; the one exception, as published: smooth_topk and "
        "smooth_hard_topk read it as their temperature tau, where larger is smoother; default: the published "
        "value, or the library's where none was published",
    )
    distribution: str | None = flag(
        None, choice("distribution", DISTRIBUTIONS), f"sigmoid family of the networks: {', '.join(DISTRIBUTIONS)}"
    )
    art_lambda: float | None = flag(None, non_negative, "exponent of logistic_phi, in [0, 1)")
    m: int | None = flag(
        None,
        count,
        "scores kept for sorting, the true class and the m - 1 largest others; default all, of heads as published, "
        "or all where there are no more classes",
        "-m",
    )
    top1_mode: str | None = flag(
        None,
        choice("top1_mode", TOP1_MODES),
        "the top-1 term: softmax within the logarithm (sm; of heads the default), cross-entropy (smce; of networks), "
        "or the relaxed sort (sort)",
    )
    implementation: str = flag(
        "ours", choice("implementation", ("ours", "difftopk")), "ours, or difftopk: the official loss, for checking"
    )


@dataclass
class OptimizationFlags:
    """optimization: Adam, or SGD of nearest neighbours; default betas; the rates are the published ones"""

    n_epochs: int | None = flag(None, count, "passes over the training split")
    batch_size: int | None = flag(None, count, "the last partial batch is dropped")
    lr: float | None = flag(None, positive, "learning rate", only_one="rate")
    nloglr: float | None = flag(
        None,
        number("a number between -10 and 30", lambda value: -10 <= value <= 30),
        "learning rate 10^-nloglr",
        only_one="rate",
    )
    seed: int | None = flag(None, a_seed, "of split, initialisation, order and crops; 0 without it", only_one="s")
    seeds: list[int] | None = flag(
        None, a_seed, "train with each of them at the same time; one row each", only_one="s", nargs="+"
    )

    def __post_init__(self) -> None:
        """Settle the seeds: a list of different ones, and the first of them. Raises CommandLineError."""
        self.seeds = self.seeds or [self.seed or 0]
        self.seed = self.seeds[0] if self.seed is None else self.seed
        if len(set(self.seeds)) < len(self.seeds):
            raise CommandLineError(f"--seeds must differ, got {' '.join(map(str, self.seeds))}")


def data_dir() -> Any:
    """Return the field of the flag --data_dir."""
    return flag(ROOT / "data" / "downloads", path, "where data sets are, or are downloaded to")


def mirror() -> Any:
    """Return the field of the flag --mirror."""
    return flag(
        None, address("http", "https", "file"), "download cifar100 or cifar10 from here instead of its home page"
    )


@dataclass
class MachineFlags:
    """machine"""

    device: str = flag("auto", str, "auto, cpu, cuda or cuda:<index>")
    precision: str = flag(
        "fp32",
        choice("precision", ("fp32", "bf16")),
        "of the network, fp32 or bf16 by autocast; the loss is always float32",
    )
    compile: bool = flag(False, bool, "torch.compile the network and the loss")
    threads: int | None = flag(None, core_count, "CPU threads; one per core without it")
    deterministic: bool = flag(False, bool, "deterministic kernels where there are any")


@dataclass
class RecordFlags:
    """record"""

    results: Path | None = flag(None, path, "CSV file; the run folders lie in runs/ beside it")
    force: bool = flag(
        False, bool, "repeat a configuration that the file already has; the new row takes the place of the old"
    )


def check_memory(size: int, what: str) -> None:
    """Raise CommandLineError where `what` would take more bytes than there is memory."""
    if size > (available := available_ram()):
        raise CommandLineError(f"{what} would take {gib(size)}, and {gib(available)} of memory are free")


def device_of(name: str, ranks: Ranks) -> torch.device:
    """Return the device of --device for this process. Raises CommandLineError."""
    with refusing():
        return ranks.device(name)


def training_device(name: str, ranks: Ranks) -> torch.device:
    """Return device_of, where TOPK_LOSSES_BACKEND can run there. Raises CommandLineError."""
    device = device_of(name, ranks)
    with refusing():
        device_of_kernels(device)
    return device


def learning_rate(args: Any, nloglr: float) -> dict[str, float | None]:
    """Return the columns lr and nloglr; without either flag, nloglr is the given default."""
    if args.lr is not None:
        return {"lr": args.lr, "nloglr": None}
    nloglr = args.nloglr if args.nloglr is not None else nloglr
    return {"lr": 10**-nloglr, "nloglr": nloglr}


def loss_settings(
    args: Any, *, top1_mode: str, inverse_temperatures: Mapping[str, float], m: int | None = None
) -> dict[str, Any]:
    """Return the arguments of make_loss that the loss flags describe, nothing left to a default.

    `top1_mode`, `inverse_temperatures` (by method) and `m` are the script's defaults; where it has none, the
    library's hold. Settings that a method does not have are None. Raises ValueError.
    """
    method, relaxed = args.method, args.method in RELAXATIONS
    settings = resolved(
        method,
        args.inverse_temperature or inverse_temperatures.get(method),
        args.distribution,
        args.art_lambda,
        args.top1_mode or (top1_mode if relaxed else None),
    )
    # The other methods take --m, since published commands pass it to every row of a table, and ignore it.
    return {
        "method": method,
        "p_k": args.p_k or DEFAULT_P_K.get(method, [0.2] * 5),
        "m": (args.m or m) if relaxed else None,
        **settings,
    }


def build_loss(
    implementation: str,
    settings: Mapping[str, Any],
    num_classes: int,
    device: torch.device,
    reduction: str = "mean",
) -> nn.Module:
    """Return the loss that loss_settings describes, on the device. Raises ValueError or CommandLineError.

    reduction: as for make_loss; the official implementation knows the mean alone.
    """
    ends = ends_of(settings["inverse_temperature"])
    if implementation == "ours":
        settings = {**settings, "inverse_temperature": ends[0]} if ends else settings
        loss_fn = make_loss(**settings, num_classes=num_classes, reduction=reduction).to(device)
        if ends and not hasattr(loss_fn, "inverse_temperature"):
            raise ValueError(f"the temperature of {settings['method']} is fixed: give one number")
        return loss_fn
    if ends:
        raise ValueError("difftopk's inverse temperature is fixed: give one number, or take --implementation ours")
    try:
        from experiments.shared.official_loss import make_official_loss
    except ImportError as error:
        raise CommandLineError(f"{error}; --implementation difftopk needs pip install difftopk") from None
    return make_official_loss(**settings, num_classes=num_classes, device=device)


def portable(value: Any) -> str:
    """Return a path as a row shows it, relative to the repository where it lies within; anything else as text."""
    return str(value.relative_to(ROOT) if isinstance(value, Path) and value.is_relative_to(ROOT) else value)
