"""What the scripts' command lines share: argument types, groups of flags, and checks of what they ask for.

A user's mistake is answered with a sentence and an exit status: see data/program.py.
"""

import argparse
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import nn

from data import program
from data.machine_memory import available_ram, gib
from data.program import CommandLineError, Parser, ProgramError, path, whole_number  # noqa: F401
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


class RunError(ProgramError):
    """The run cannot go on or cannot be recorded; the message says why and what to do."""


EPOCHS_SAVED = "every finished epoch is saved in its run folder; the same command continues after it"


def finish(work: Callable[[Ranks], int], stopped: str = EPOCHS_SAVED, name: str = "") -> int:
    """Run a script's work as program.finish does; of several processes, the first that fails speaks for all."""
    joined: list[Ranks] = []

    def run() -> int:
        ranks = Ranks()
        joined.append(ranks)
        status = work(ranks)
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
    convert = number("a number above 0, auto, or from:to as in 0.25:4", lambda value: value > 0)
    return ":".join(f"{convert(end):g}" for end in text.split(":")) if text.count(":") == 1 else convert(text)


positive = number("a number above 0", lambda value: value > 0)
non_negative = number("a number of at least 0", lambda value: value >= 0)
fraction = number("a number between 0 and 1", lambda value: 0 <= value <= 1)
count = whole_number(1)
seed = whole_number(0, 2**32 - 1)
threads = whole_number(1, 1024)  # more than that no system starts for sure


# Groups of flags.


def add_loss_flags(parser: argparse.ArgumentParser, *, top1_mode: str, m: int | None = None) -> None:
    """Add the flags that choose and shape a loss, under their published names; `m` is the default for --help."""
    group = parser.add_argument_group("loss", "a setting that is left out takes the method's default")
    group.add_argument(
        "--method",
        type=method,
        required=True,
        metavar="NAME",
        help=f"{methods_by_family()}; also accepted: {', '.join(ALIASES)}",
    )
    group.add_argument(
        "--p_k",
        "-p_k",
        type=fraction,
        nargs="+",
        metavar="P",
        help="distribution P_K: the shares of top-1, top-2, ... in the loss, sum 1, e.g. .5 0 0 0 .5; default "
        "1 0 0 0 0 for softmax_cross_entropy, 0 0 0 0 1 for the other losses, .2 .2 .2 .2 .2 for what sorts",
    )
    group.add_argument(
        "--inverse_temperature",
        type=temperature,
        metavar="BETA",
        help="larger is closer to the hard operator; auto: follows the spread of the logits in training; 0.25:4: from "
        ".25 to 4 over the training, evenly in its logarithm; the one exception, as published: smooth_topk and "
        "smooth_hard_topk read it as their temperature tau, where larger is smoother; default: the published "
        "value, or the library's where none was published",
    )
    group.add_argument(
        "--distribution",
        type=choice("distribution", DISTRIBUTIONS),
        help=f"sigmoid family of the networks: {', '.join(DISTRIBUTIONS)}",
    )
    group.add_argument("--art_lambda", type=non_negative, help="exponent of logistic_phi, in [0, 1)")
    group.add_argument(
        "--m",
        "-m",
        type=count,
        help="scores kept for sorting: the true class and the m - 1 largest others; "
        f"default {'all' if m is None else f'{m}, or all where there are no more classes'}",
    )
    group.add_argument(
        "--top1_mode",
        type=choice("top1_mode", TOP1_MODES),
        help="the top-1 term: softmax within the logarithm (sm), cross-entropy (smce), "
        f"or the relaxed sort (sort); default {top1_mode}",
    )
    group.add_argument(
        "--implementation",
        type=choice("implementation", ("ours", "difftopk")),
        default="ours",
        help="ours, or difftopk: the official package's loss, for checking (%(default)s)",
    )


def add_optimization_flags(
    parser: argparse.ArgumentParser, *, n_epochs: int, batch_size: int, nloglr: float, seed_help: str
) -> tuple[argparse._ArgumentGroup, argparse._MutuallyExclusiveGroup]:
    """Add epochs, batch size, learning rate (--lr or --nloglr) and seed, with the published defaults.

    Returns the group of these flags, for more of them, and that of --seed, for what may stand in its place.
    """
    group = parser.add_argument_group("optimization", "Adam, default betas; as published, no weight decay")
    group.add_argument("--n_epochs", type=count, default=n_epochs, help="passes over the training split (%(default)s)")
    group.add_argument(
        "--batch_size", type=count, default=batch_size, help="the last partial batch is dropped (%(default)s)"
    )
    rate = group.add_mutually_exclusive_group()
    rate.add_argument("--lr", type=positive, help="learning rate")
    rate.add_argument(
        "--nloglr",
        type=number("a number between -10 and 30", lambda value: -10 <= value <= 30),
        help=f"learning rate 10^-nloglr ({nloglr:g})",
    )
    seeds = group.add_mutually_exclusive_group()
    # Without a default: argparse takes a default that is given for nothing given, and lets --seeds stand beside it.
    seeds.add_argument("--seed", type=seed, help=f"{seed_help} (0)")
    return group, seeds


def add_download_flags(group: Any) -> None:
    """Add to an argument group where data sets are, and where those that have a mirror come from."""
    group.add_argument(
        "--data_dir",
        type=path,
        default=ROOT / "data" / "downloads",
        help="where data sets are, or are downloaded to (data/downloads in this repository)",
    )
    group.add_argument(
        "--mirror",
        type=address("http", "https", "file"),
        metavar="URL",
        help="download cifar100 or cifar10 from here instead of its home page",
    )


def add_machine_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags on where and how a run is computed."""
    group = parser.add_argument_group("machine")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<index> (%(default)s)")
    group.add_argument(
        "--precision",
        type=choice("precision", ("fp32", "bf16")),
        default="fp32",
        help="of the network, fp32 or bf16 by autocast; the loss is always float32 (%(default)s)",
    )
    group.add_argument("--compile", action="store_true", help="torch.compile the network and the loss")
    group.add_argument("--threads", type=threads, help="CPU threads; one per core without it")
    group.add_argument("--deterministic", action="store_true", help="deterministic kernels where there are any")


def add_record_flags(parser: argparse.ArgumentParser, *, results: Path) -> None:
    """Add the flags on where the row goes."""
    group = parser.add_argument_group("record")
    group.add_argument(
        "--results",
        type=path,
        default=results,
        help=f"CSV file (results/{results.name} in this repository); the run folders lie in runs/ beside it",
    )
    group.add_argument(
        "--force",
        action="store_true",
        help="repeat a configuration that the file already has; the new row takes the place of the old",
    )


def seeds_of(args: argparse.Namespace) -> list[int]:
    """Return the seeds of --seed or --seeds. Raises CommandLineError."""
    seeds = args.seeds or [args.seed or 0]
    if len(set(seeds)) < len(seeds):
        raise CommandLineError(f"--seeds must differ, got {' '.join(map(str, seeds))}")
    return seeds


def check_memory(size: int, what: str) -> None:
    """Raise CommandLineError where `what` would take more bytes than there is memory."""
    if size > (available := available_ram()):
        raise CommandLineError(f"{what} would take {gib(size)}, and {gib(available)} of memory are free")


def device_of(name: str, ranks: Ranks) -> torch.device:
    """Return the device of --device for this process. Raises CommandLineError."""
    try:
        return ranks.device(name)
    except ValueError as error:
        raise CommandLineError(str(error)) from None


def training_device(name: str, ranks: Ranks) -> torch.device:
    """Return device_of, where TOPK_LOSSES_BACKEND can run there. Raises CommandLineError."""
    device = device_of(name, ranks)
    try:
        device_of_kernels(device)
    except ValueError as error:
        raise CommandLineError(str(error)) from None
    return device


def learning_rate(args: argparse.Namespace, nloglr: float) -> dict[str, float | None]:
    """Return the columns lr and nloglr; without either flag, nloglr is the given default."""
    if args.lr is not None:
        return {"lr": args.lr, "nloglr": None}
    nloglr = args.nloglr if args.nloglr is not None else nloglr
    return {"lr": 10**-nloglr, "nloglr": nloglr}


def loss_settings(
    args: argparse.Namespace, *, top1_mode: str, inverse_temperatures: Mapping[str, float], m: int | None = None
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


def portable(path: Path) -> str:
    """Return a path as a row shows it: relative to the repository where it lies within, else as typed."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)
