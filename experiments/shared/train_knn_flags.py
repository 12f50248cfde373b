"""The command line of train_knn.py: its flags, their published defaults, and which of them go together."""

import argparse
from typing import Any

from data.points import POINT_SETS
from experiments.shared import command_line as cli
from experiments.shared.environment import ROOT, check_compiler
from experiments.shared.finetune_flags import TENSORS
from experiments.shared.loss_state import resolved
from experiments.shared.neighbours import LOSSES
from models.embedders import EMBEDDERS
from topk_losses import ALIASES, DISTRIBUTIONS, RELAXATIONS, SortedSoftTopK, TopKOperator, make_operator, methods
from topk_losses.checks import AUTO

NLOGLR = 3.0  # the published code's; its paper tries 10^-4 and 10^-5
CROSS_ENTROPY = "softmax_cross_entropy"
UNTRAINED = ("inputs", "pca")  # kNN on the inputs as they are, on their principal components
METHODS = (*RELAXATIONS, CROSS_ENTROPY, *UNTRAINED)
PREDICTIONS = ("neighbours", "network")
COMPONENTS = 50  # of pca: those of the published baseline
INVERSE_TEMPERATURES = {"neuralsort": 1 / 16}  # the published code's tau 16; other methods: the library's default
MODELS = {"mnist": "cnn", "digits": "cnn"}  # as published, but for digits; the other images have the ResNet
# Flags of what trains, of the relaxed operator, and of maps: None where a row has nothing of the kind.
OF_OPERATOR = ("loss", "inverse_temperature", "distribution", "art_lambda", "sorted", "num_candidates", "self_match")
OF_TRAINING = ("model", "dim", "hidden_dims", "n_epochs", "batch_size", "lr", "nloglr", "weight_decay", "precision")

NOT_RECORDED = ("seeds", "cache_dir", "endpoint_url", "sha256", *TENSORS)  # as of finetune_imagenet.py


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the flags, each checked on its own. Raises CommandLineError."""
    parser = cli.Parser(
        prog="train_knn.py",
        description="Train a network whose k nearest neighbours classify, through a relaxed top-k of the distances.",
    )
    group = parser.add_argument_group("loss", "a setting that is left out takes the method's default")
    group.add_argument(
        "--method",
        type=lambda text: cli.choice("method", METHODS)(ALIASES.get(text, text)),
        required=True,
        metavar="NAME",
        help=f"the relaxed top-k: {', '.join(RELAXATIONS)}; or a baseline: {CROSS_ENTROPY}, inputs (kNN on the "
        f"pixels or embeddings as they are), pca (on their {COMPONENTS} leading principal components)",
    )
    group.add_argument(
        "--loss",
        type=cli.choice("loss", LOSSES),
        default="mass",
        help="minus the soft top-k mass on the candidates of the query's label, or log_mass: minus the logarithm "
        "of its k-th part (%(default)s, as NeuralSort)",
    )
    group.add_argument("--k", type=cli.count, default=9, help="neighbours, in training and in the vote (%(default)s)")
    group.add_argument(
        "--inverse_temperature",
        type=cli.temperature,
        help="of minus the squared distances; larger is closer to the hard operator; auto and 0.25:4 as in "
        "train_cifar100.py; default 1/16 for neuralsort (its published code's), else the library's",
    )
    group.add_argument(
        "--distribution",
        type=cli.choice("distribution", DISTRIBUTIONS),
        help=f"sigmoid family of the networks: {', '.join(DISTRIBUTIONS)}",
    )
    group.add_argument("--art_lambda", type=cli.non_negative, help="exponent of logistic_phi, in [0, 1)")
    group.add_argument("--sorted", action="store_true", help="soft_topk: an anchor for each of the k ranks")
    group.add_argument(
        "--prediction",
        type=cli.choice("prediction", PREDICTIONS),
        default="neighbours",
        help=f"neighbours: the majority of the k nearest of all training points; network: the largest logit, of "
        f"{CROSS_ENTROPY} alone (%(default)s)",
    )
    optimization, seeds = cli.add_optimization_flags(
        parser,
        n_epochs=200,
        batch_size=100,
        nloglr=NLOGLR,
        seed_help="of split, initialisation, orders and augmentation",
    )
    optimization.description = "SGD with momentum .9 and a constant learning rate; a batch is of queries"
    seeds.add_argument(
        "--seeds",
        type=cli.seed,
        nargs="+",
        metavar="S",
        help="train with each, in one process per seed; one row each, which is that of --seed with as many --threads",
    )
    optimization.add_argument(
        "--num_candidates",
        type=cli.count,
        default=100,
        help="candidates of a step, from an order of their own (%(default)s)",
    )
    optimization.add_argument(
        "--weight_decay", type=cli.non_negative, default=5e-4, help="SGD's (%(default)s, the published code's)"
    )
    optimization.add_argument(
        "--self_match",
        action="store_true",
        help="as in the published code, a query that is among the candidates finds itself there, at distance 0",
    )
    group = parser.add_argument_group("data and model")
    source = group.add_mutually_exclusive_group()
    source.add_argument(
        "--dataset",
        type=cli.choice("dataset", POINT_SETS),
        help=f"{', '.join(POINT_SETS)} (mnist); digits needs no download",
    )
    source.add_argument(
        "--data_path",
        "-d",
        metavar="SOURCE",
        help="embeddings in place of images: a store, or what finetune_imagenet.py takes; a map of them is trained",
    )
    group.add_argument("--cache_dir", type=cli.path, metavar="DIR", help="of embeddings that are downloaded")
    cli.add_download_flags(group)
    group.add_argument("--limit_train", type=cli.count, metavar="N", help="use N training points, for a quick look")
    group.add_argument("--limit_test", type=cli.count, metavar="N", help="use N test points, for a quick look")
    group.add_argument(
        "--augmented_neighbours",
        action="store_true",
        help="as in the published code, CIFAR's training and validation images are cropped and flipped at random in "
        "evaluations, too",
    )
    group.add_argument(
        "--model",
        type=cli.choice("model", EMBEDDERS),
        help=f"{', '.join(EMBEDDERS)}; default cnn for mnist and digits, linear for embeddings, else preact_resnet18",
    )
    group.add_argument("--dim", type=cli.count, help="width of the embeddings of linear and mlp (128)")
    group.add_argument(
        "--hidden_dims", type=cli.count, nargs="+", metavar="D", help="of mlp: widths of its hidden layers"
    )
    cli.add_machine_flags(parser)
    cli.add_record_flags(parser, results=ROOT / "results" / "knn.csv")
    # What open_store_of asks of a torch file of no published layout: convert such a file first.
    parser.set_defaults(endpoint_url=None, sha256=None, **dict.fromkeys(TENSORS))
    args = parser.parse_args(argv)
    args.seeds = cli.seeds_of(args)
    args.seed = args.seeds[0]
    args.dataset = args.dataset or ("mnist" if args.data_path is None else None)
    return args


def configuration(args: argparse.Namespace) -> tuple[TopKOperator | None, dict[str, Any]]:
    """Return the operator (a baseline has none), and every flag, nothing left to a default. Raises CommandLineError."""
    method, relaxed = args.method, args.method in RELAXATIONS
    flags = {
        **{flag: value for flag, value in vars(args).items() if flag not in NOT_RECORDED},
        **cli.learning_rate(args, NLOGLR),
        "data_dir": cli.portable(args.data_dir) if args.dataset else None,
        # Switches that are off leave ids of rows from before there was a choice as they are.
        **{name: getattr(args, name) or None for name in ("sorted", "self_match", "augmented_neighbours")},
    }
    if args.prediction == "network" and method != CROSS_ENTROPY:
        raise cli.CommandLineError(f"--prediction network is of {CROSS_ENTROPY} alone, got --method {method}")
    if args.sorted and method != "soft_topk":
        raise cli.CommandLineError(f"--sorted is of soft_topk alone, got --method {method}")
    if args.augmented_neighbours and not (args.dataset and POINT_SETS[args.dataset].augmented):
        augmented = [name for name, each in POINT_SETS.items() if each.augmented]
        raise cli.CommandLineError(f"--augmented_neighbours is of {', '.join(augmented)}, whose images are augmented")
    operator = None
    try:
        if relaxed:
            # A query that meets itself takes no part, so that one candidate more is needed.
            if args.k >= args.num_candidates:
                raise ValueError(f"--k must be below --num_candidates, got {args.k} and {args.num_candidates}")
            beta = args.inverse_temperature or INVERSE_TEMPERATURES.get(method)
            settings = resolved(method, beta, args.distribution, args.art_lambda, relaxed=True)
            flags |= {name: settings[name] for name in ("inverse_temperature", "distribution", "art_lambda")}
            beta = None if isinstance(beta, str) else beta
            if args.sorted:
                operator = SortedSoftTopK(args.k, beta or methods.METHODS[method].inverse_temperature)
            else:
                operator = make_operator(method, args.num_candidates, args.k, beta, args.distribution, args.art_lambda)
            operator.auto = methods.METHODS[method].auto() if settings["inverse_temperature"] == AUTO else None
        else:
            for name in ("inverse_temperature", "distribution", "art_lambda"):
                if getattr(args, name) is not None:
                    raise ValueError(f"--{name} is of a relaxed top-k, not of --method {method}; leave it out")
            flags |= dict.fromkeys(OF_OPERATOR)
        if method in UNTRAINED:
            flags |= dict.fromkeys(OF_TRAINING)
        else:
            flags |= model_flags(args)
        if args.compile:
            check_compiler()
    except ValueError as error:
        raise cli.CommandLineError(str(error)) from None
    return operator, flags


def model_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Return the columns model, dim and hidden_dims, resolved. Raises ValueError."""
    model = args.model or (MODELS.get(args.dataset, "preact_resnet18") if args.dataset else "linear")
    is_map = model in ("linear", "mlp")
    if args.dim and not is_map:
        raise ValueError(f"--dim is of linear and mlp, not of --model {model}; leave it out")
    return {"model": model, "dim": (args.dim or 128) if is_map else None, "hidden_dims": args.hidden_dims}
