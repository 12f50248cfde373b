"""The command line of train_knn.py: its flags, their published defaults, and which of them go together."""

from dataclasses import dataclass
from typing import Any

from data.points import POINT_SETS
from experiments.shared import command_line as cli
from experiments.shared.command_line import flag
from experiments.shared.environment import ROOT, check_compiler
from experiments.shared.loss_state import resolved
from experiments.shared.neighbours import LOSSES
from models.embedders import EMBEDDERS
from topk_losses import ALIASES, RELAXATIONS, SortedSoftTopK, TopKOperator, make_operator, methods
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
NOT_RECORDED = ("seeds", "cache_dir")


@dataclass
class Neighbours:
    """loss: a setting that is left out takes the method's default"""

    method: str = flag(
        None,
        lambda text: cli.choice("method", METHODS)(ALIASES.get(text, text)),
        f"the relaxed top-k: {', '.join(RELAXATIONS)}; or a baseline: {CROSS_ENTROPY}, inputs (kNN on the "
        f"pixels or embeddings as they are), pca (on their {COMPONENTS} leading principal components)",
        required=True,
    )
    loss: str = flag(
        "mass",
        cli.choice("loss", LOSSES),
        "minus the soft top-k mass on the candidates of the query's label, as NeuralSort, or log_mass: minus the "
        "logarithm of its k-th part",
    )
    k: int = flag(9, cli.count, "neighbours, in training and in the vote")
    inverse_temperature: float | str | None = flag(
        None,
        cli.temperature,
        "of minus the squared distances; larger is closer to the hard operator; auto and 0.25:4 as in "
        "train_cifar100.py; default 1/16 for neuralsort (its published code's), else the library's",
    )
    distribution: str | None = cli.as_in(cli.LossFlags, "distribution")
    art_lambda: float | None = cli.as_in(cli.LossFlags, "art_lambda")
    sorted: bool = flag(False, bool, "soft_topk: an anchor for each of the k ranks")
    prediction: str = flag(
        "neighbours",
        cli.choice("prediction", PREDICTIONS),
        f"the majority of the k nearest of all training points; network: the largest logit, of {CROSS_ENTROPY} alone",
    )


@dataclass
class Optimization(cli.OptimizationFlags):
    """optimization: SGD with momentum .9 and a constant learning rate, 10^-3; a batch is of queries"""

    n_epochs: int = 200
    batch_size: int = 100
    num_candidates: int = flag(100, cli.count, "candidates of a step, from an order of their own")
    weight_decay: float = flag(5e-4, cli.weight_decay, "SGD's, the published code's")
    self_match: bool = flag(
        False, bool, "as in the published code, a query that is among the candidates finds itself there, at distance 0"
    )


@dataclass
class Data:
    """data and model"""

    dataset: str | None = flag(
        None,
        cli.choice("dataset", POINT_SETS),
        f"{', '.join(POINT_SETS)} (mnist); digits needs no download",
        only_one="source",
    )
    data_path: str | None = flag(
        None,
        str,
        "embeddings in place of images: a store, or what finetune_imagenet.py takes; a map of them is trained",
        "-d",
        only_one="source",
    )
    cache_dir: Any = flag(None, cli.path, "of embeddings that are downloaded")
    data_dir: Any = cli.data_dir()
    mirror: str | None = cli.mirror()
    limit_train: int | None = flag(None, cli.count, "use so many training points, for a quick look")
    limit_test: int | None = flag(None, cli.count, "use so many test points, for a quick look")
    augmented_neighbours: bool = flag(
        False,
        bool,
        "as in the published code, CIFAR's training and validation images are cropped and flipped at random in "
        "evaluations, too",
    )
    model: str | None = flag(
        None,
        cli.choice("model", EMBEDDERS),
        f"{', '.join(EMBEDDERS)}; default cnn for mnist and digits, linear for embeddings, else preact_resnet18",
    )
    dim: int | None = flag(None, cli.count, "width of the embeddings of linear and mlp (128)")
    hidden_dims: list[int] | None = flag(None, cli.count, "of mlp: widths of its hidden layers", nargs="+")


@dataclass
class Flags(cli.RecordFlags, cli.MachineFlags, Data, Optimization, Neighbours):
    """record"""

    results: Any = ROOT / "results" / "knn.csv"


def parse_arguments(argv: list[str] | None = None) -> Flags:
    """Return the flags, each checked on its own. Raises CommandLineError."""
    told = "Train a network whose k nearest neighbours classify, through a relaxed top-k of the distances."
    args = cli.parse(Flags, argv, prog="train_knn.py", description=told)
    args.dataset = args.dataset or ("mnist" if args.data_path is None else None)
    return args


def configuration(args: Flags) -> tuple[TopKOperator | None, dict[str, Any]]:
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
    with cli.refusing():
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
    return operator, flags


def model_flags(args: Flags) -> dict[str, Any]:
    """Return the columns model, dim and hidden_dims, resolved. Raises ValueError."""
    model = args.model or (MODELS.get(args.dataset, "preact_resnet18") if args.dataset else "linear")
    is_map = model in ("linear", "mlp")
    if args.dim and not is_map:
        raise ValueError(f"--dim is of linear and mlp, not of --model {model}; leave it out")
    return {"model": model, "dim": (args.dim or 128) if is_map else None, "hidden_dims": args.hidden_dims}
