"""Command-line flags that several scripts have: each function adds a group of them to an ArgumentParser."""

import argparse
import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments.common.paths import PAPER, REPOSITORY, RESULTS, ROOT, user_path
from experiments.common.settings import inverse_temperature
from topk_losses import ALIASES, DISTRIBUTIONS, METHODS, TOP1_MODES
from topk_losses.checks import nearest_choice
from topk_losses.methods import ABBREVIATIONS, register_entry_points


def make_parser(docstring: str | None) -> ArgumentParser:
    """A parser whose --help begins with a script's docstring."""
    return ArgumentParser(
        usage="%(prog)s [options]",  # the default usage would fill a screen
        description=docstring,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def given(parser: ArgumentParser, argv: Sequence[str] | None, args: Namespace) -> set[str]:
    """The names of the flags that a command line has, whatever their values. args: what the parser makes of it."""
    unset = object()
    again = parser.parse_args(argv, Namespace(**dict.fromkeys(vars(args), unset)))
    return {name for name, value in vars(again).items() if value is not unset}


# Argument types.

NUMBERS = {int: "whole number", float: "number"}


def number(kind: Callable[[str], float], lowest: float, highest: float = math.inf) -> Callable[[str], Any]:
    """An argument type for an int or a float within bounds."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise ArgumentTypeError(f"{text!r} is no {NUMBERS[kind]}") from None
        if not lowest <= value <= highest:
            raise ArgumentTypeError(f"{text} is not between {lowest:g} and {highest:g}")
        return value

    return parse


positive_int = number(int, 1, 2**31 - 1)
seed = number(int, 0, 2**32 - 1)
positive_float = number(float, 1e-30, 1e38)  # float32 holds them
non_negative_float = number(float, 0, 1e38)
fraction = number(float, 0, 1)


def existing_file(text: str) -> Path:
    file = user_path(text)
    if not file.is_file():
        raise ArgumentTypeError(f"there is no file {text}")
    return file


def results_file(text: str) -> Path:
    """A CSV file, not one of those that the repository holds, which no training command writes."""
    file = user_path(text)
    for folder in (REPOSITORY, PAPER):
        if file.resolve().is_relative_to(folder):
            raise ArgumentTypeError(
                f"{text}: {folder.name}/ holds committed rows. Write to results/ and add finished rows by "
                "scripts/add_results.py"
            )
    return file


def temperature(text: str) -> float | str:
    """A positive number, "auto", or the two ends of a schedule such as "0.25:4"."""
    try:
        return inverse_temperature(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{error}, got {text}") from None


def method_among(names: Iterable[str]) -> Callable[[str], str]:
    """An argument type for the name of a method, also in its published spelling."""
    known = tuple(names)

    def method(text: str) -> str:
        name = ALIASES.get(text, text)
        if name not in known:
            nearest = nearest_choice(name, known, 0, ABBREVIATIONS)
            raise ArgumentTypeError(f"no method {text!r} here; did you mean {nearest}? All: {', '.join(known)}")
        return name

    return method


# Groups of flags.


def add_operator_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("relaxation", "A setting that is not given takes the method's default.")
    group.add_argument(
        "--inverse_temperature",
        type=temperature,
        metavar="BETA",
        help="inverse temperature, where larger is closer to a hard sort: a number; auto, which follows the standard "
        "deviation of the logits; or a schedule such as 0.25:4. For smooth_topk and smooth_hard_topk: tau",
    )
    group.add_argument("--distribution", choices=DISTRIBUTIONS, help="sigmoid of networks (default: logistic_phi)")
    group.add_argument("--art_lambda", type=non_negative_float, help="exponent of logistic_phi (default: 0.5)")


def add_method_flags(parser: ArgumentParser, methods: Iterable[str], p_k: str) -> argparse._ArgumentGroup:
    """Add --method and the settings of a relaxed top-k loss. p_k: the default of --p_k, for its help."""
    add_operator_flags(parser)
    group = parser.add_argument_group("loss", "A setting that is not given takes the method's default.")
    group.add_argument(
        "--method", type=method_among(methods), required=True, metavar="NAME", help=f"loss: {', '.join(methods)}"
    )
    group.add_argument(
        "-p_k",
        "--p_k",
        type=fraction,
        nargs="+",
        help=f"P_K, the weights of top-1, top-2, ..., sum 1 (default: {p_k})",
    )
    group.add_argument("-m", "--m", type=positive_int, help="scores to sort: the true class's and the m - 1 largest")
    group.add_argument("--top1_mode", choices=TOP1_MODES, help="how the k = 1 term is computed")
    return group


def add_loss_flags(parser: ArgumentParser) -> None:
    """Add the flags of every loss: those with the role LOSS in settings.py, and --implementation."""
    register_entry_points()
    group = add_method_flags(parser, METHODS, p_k="as in Table 1")
    group.add_argument("--label_smoothing", type=fraction, help="share of the label spread over classes (default: 0)")
    group.add_argument("--margin", type=non_negative_float, help="margin of ldr_kl (default: 0)")
    group.add_argument(
        "--noise_rate",
        type=fraction,
        help="wrong labels that forward_correction (default: 0.2) or a top-k loss (default: 0) corrects",
    )
    group.add_argument("--q", type=positive_float, help="exponent of generalized_cross_entropy (default: 0.7)")
    group.add_argument(
        "--alpha",
        type=positive_float,  # rows have an empty cell for the default, which reports take for 0
        help="weight of cross-entropy in symmetric_cross_entropy and nce_rce (default: 6 and 10)",
    )
    group.add_argument(
        "--beta",
        type=positive_float,  # rows have an empty cell for the default, which reports take for 0
        help="weight of reverse cross-entropy in symmetric_cross_entropy and nce_rce (default: 0.1)",
    )
    group.add_argument("--tau", type=positive_float, help="gradient bound of phuber_cross_entropy (default: 10)")
    group.add_argument(
        "--implementation",
        choices=("ours", "difftopk"),
        default="ours",
        help="our loss, or the official one for comparison (default: ours)",
    )


def add_optimization_flags(
    parser: ArgumentParser, n_epochs: int | None, batch_size: int | None, weight_decay: float = 0.0
) -> None:
    """Add the flags of the optimization. None: the script chooses by the size of the training split."""
    chosen = "chosen by the size of the training split"
    group = parser.add_argument_group("optimization")
    group.add_argument(
        "--n_epochs",
        type=positive_int,
        default=n_epochs,
        help=f"passes over the training split (default: {n_epochs or chosen})",
    )
    group.add_argument(
        "--batch_size",
        type=positive_int,
        default=batch_size,
        help=f"samples of a training step; the last partial batch is dropped (default: {batch_size or chosen})",
    )
    add_learning_rate_flags(group, weight_decay)


def add_learning_rate_flags(parser: argparse._ActionsContainer, weight_decay: float) -> None:
    """Add the learning rate, in two spellings, and the weight decay."""
    rate = parser.add_mutually_exclusive_group()
    rate.add_argument("--lr", type=positive_float, help="learning rate (default: see the protocol)")
    rate.add_argument("--nloglr", type=number(float, -38, 30), help="learning rate as 10^-NLOGLR")
    parser.add_argument(
        "--weight_decay", type=non_negative_float, default=weight_decay, help="weight decay (default: %(default)g)"
    )


def add_network_flags(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--precision",
        choices=("fp32", "bf16"),
        default="fp32",
        help="precision of the network; the loss is fp32 (default: fp32)",
    )
    parser.add_argument("--compile", action="store_true", help="compile the network by torch.compile")


def add_device_flags(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:1 (default: auto)")
    parser.add_argument("--threads", type=number(int, 1, 4096), help="number of CPU threads (default: one per core)")


def add_run_flags(parser: ArgumentParser, results: str) -> None:
    group = parser.add_argument_group("run")
    group.add_argument(
        "--seed", "--seeds", type=seed, nargs="+", default=[0], help="random seeds, one run for each (default: 0)"
    )
    add_device_flags(group)
    group.add_argument(
        "--results",
        type=results_file,
        default=RESULTS / results,
        help=f"CSV file for the result (default: results/{results})",
    )
    group.add_argument("--force", action="store_true", help="repeat a run that --results already has")
    group.add_argument(
        "--checkpoint_seconds",
        type=number(float, 0),
        default=60,
        help="seconds between checkpoints, which follow evaluations (default: 60)",
    )


def add_data_dir(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--data_dir",
        type=user_path,
        default=ROOT / "data" / "downloads",
        help="folder for the images of data sets (default: data/downloads)",
    )


def add_embedding_flags(parser: ArgumentParser, default: str | None = None) -> None:
    parser.add_argument(
        "-d",
        "--data_path",
        metavar="SOURCE",
        default=default,
        help="published name (python -m data.download --list), torch file, or https:// or s3:// address",
    )
    parser.add_argument(
        "--cache_dir", type=user_path, help="folder for downloads (default: $TOPK_CACHE, or data/downloads/embeddings)"
    )
    parser.add_argument("--sha256", help="SHA-256 that the file must have")
    parser.add_argument("--requester_pays", action="store_true", help="pay for the transfer from an s3:// bucket")


def learning_rate(args: Namespace, nloglr: float) -> dict[str, float | None]:
    """The settings lr and nloglr. nloglr: the default, where neither flag is given."""
    if args.lr is not None:
        return {"lr": args.lr, "nloglr": None}
    if args.nloglr is not None:
        nloglr = args.nloglr
    return {"lr": 10**-nloglr, "nloglr": nloglr}
