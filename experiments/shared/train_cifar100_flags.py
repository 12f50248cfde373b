"""The command line of train_cifar100.py: its flags and their published defaults."""

import argparse
from typing import Any

import torch
from torch import nn

from data.cifar100 import DATASETS, NOISE_GROUPS
from experiments.shared import command_line as cli
from experiments.shared.environment import ROOT, check_compiler

# Known before the data is, so that a refused command line costs no download.
NUM_CLASSES = {"cifar100": 100, "cifar10": 10, "digits": 10}
NLOGLR = 3.0  # published: learning rate 1e-3
LR_SCHEDULES = ("constant", "cosine")  # published: constant
# Published for CIFAR-100, where all 100 scores are sorted; a method that is not here takes the library's
# default.
INVERSE_TEMPERATURES = {
    **{"neuralsort": 0.0625, "softsort": 0.0625},
    **{"odd_even": 0.5, "bitonic": 0.5, "splitter_selection": 0.5},
}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the flags, each checked on its own. Raises CommandLineError."""
    parser = cli.Parser(
        prog="train_cifar100.py",
        description="Train a ResNet on CIFAR-100, CIFAR-10 or digits with a top-k loss (Tables 1 and 4). The processes "
        "of torchrun divide each batch, evenly or nearly; batch norm uses the images of its own process.",
    )
    cli.add_loss_flags(parser, top1_mode="smce")
    optimization, seeds = cli.add_optimization_flags(
        parser,
        n_epochs=200,
        batch_size=128,
        nloglr=NLOGLR,
        seed_help="of split, initialisation, order and augmentation",
    )
    seeds.add_argument(
        "--seeds",
        type=cli.seed,
        nargs="+",
        metavar="S",
        help="train with each, in one process per seed; one row each, which is that of --seed with as many --threads",
    )
    optimization.add_argument(
        "--lr_schedule",
        type=cli.choice("lr_schedule", LR_SCHEDULES),
        default="constant",
        help="constant, or cosine: half a cosine from the learning rate down to 0, for short runs (%(default)s)",
    )
    optimization.add_argument(
        "--weight_decay",
        type=cli.non_negative,
        default=0.0,
        metavar="W",
        help="AdamW's: each step takes learning rate x W of every parameter away (%(default)s, as published: Adam)",
    )
    optimization.add_argument(
        "--ema",
        type=cli.number("a number above 0 and below 1", lambda value: 0 < value < 1),
        metavar="DECAY",
        help="evaluate, choose and keep an exponential moving average of weights and batch-norm statistics, in which "
        "each step counts for 1 - DECAY (none, as published)",
    )
    group = parser.add_argument_group("data and model")
    group.add_argument(
        "--dataset",
        type=cli.choice("dataset", DATASETS),
        default="cifar100",
        help=f"{', '.join(DATASETS)} (%(default)s); digits needs no download",
    )
    cli.add_download_flags(group)
    group.add_argument(
        "--limit_train",
        type=cli.count,
        metavar="N",
        help="use N training images (5%% of them validate), for a quick look",
    )
    group.add_argument("--limit_test", type=cli.count, metavar="N", help="use N test images, for a quick look")
    group.add_argument(
        "--label_noise",
        type=cli.fraction,
        default=0.0,
        metavar="P",
        help="probability that a training label is drawn anew from its group (%(default)s)",
    )
    group.add_argument(
        "--noise_groups",
        type=cli.choice("noise_groups", NOISE_GROUPS),
        default="blocks",
        help="the groups: blocks of five consecutive ids, or superclass (%(default)s)",
    )
    group.add_argument(
        "--model",
        type=cli.choice("model", ("resnet18", "resnet34", "resnet50")),
        default="resnet18",
        help="resnet18, resnet34, resnet50 (%(default)s)",
    )
    cli.add_machine_flags(parser)
    cli.add_record_flags(parser, results=ROOT / "results" / "cifar100.csv")
    args = parser.parse_args(argv)
    args.seeds = cli.seeds_of(args)
    args.seed = args.seeds[0]
    return args


def configuration(args: argparse.Namespace, device: torch.device) -> tuple[nn.Module, dict[str, Any]]:
    """Return the loss, and every flag with nothing left to a default. Raises CommandLineError."""
    try:
        settings = cli.loss_settings(args, top1_mode="smce", inverse_temperatures=INVERSE_TEMPERATURES)
        loss_fn = cli.build_loss(args.implementation, settings, NUM_CLASSES[args.dataset], device)
        if args.compile:
            check_compiler()
    except ValueError as error:
        raise cli.CommandLineError(str(error)) from None
    flags = {
        **{flag: value for flag, value in vars(args).items() if flag != "seeds"},  # they have a row each
        **settings,
        **cli.learning_rate(args, NLOGLR),
        # Empty where as published (so is ema): ids of rows from before there was a choice stay.
        "lr_schedule": args.lr_schedule if args.lr_schedule != "constant" else None,
        "weight_decay": args.weight_decay or None,
        "device": str(device),
        "data_dir": cli.portable(args.data_dir),
        "noise_groups": args.noise_groups if args.label_noise > 0 else None,
    }
    return loss_fn, flags
