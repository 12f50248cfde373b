"""A k-nearest-neighbour classifier trained end to end, through any relaxed top-k (Grover et al. 2019; Xie et al. 2020).

    python experiments/train_knn.py --dataset digits --method neuralsort --n_epochs 20            # no download
    python experiments/train_knn.py --dataset mnist --method neuralsort                           # published: 99.5
    python experiments/train_knn.py --dataset cifar10 --method soft_topk --seeds 0 1 2            # three rows
    python experiments/train_knn.py -d FOLDER --method splitter_selection --loss log_mass         # an embedding store
    python experiments/train_knn.py --dataset mnist --method pca                                  # a baseline

A step draws 100 queries and 100 candidates, each from a shuffled order of its own. Their embeddings' squared distances,
negated, are scores, of which the relaxed top-k gives each candidate its mass among the k nearest; the loss is minus the
mass on the candidates of the query's label. SGD with momentum. After each epoch the queries of validation and test get
the majority label of their k nearest among all training points (exact, experiments/shared/neighbours.py); a row reports
test accuracy where validation accuracy was best. Baselines and what of the published code is mended: docs/knn.md.

The row is added to results/knn.csv (--results); config.json, epochs.csv and the checkpoint lie in
results/runs/<run id>/. Stopping, killing, skipping, --force and --seeds are as in train_cifar100.py.
"""

if __name__ == "__main__":  # from here on, what goes wrong is a sentence
    from data import program

    program.begin()

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from data.cifar100 import DatasetUnavailableError, epoch_generator, epoch_order
from data.points import POINT_SETS, Points, Samples, load_points, points_of_store
from data.program import ProgramError
from experiments.shared import command_line as cli
from experiments.shared.command_line import flag
from experiments.shared.environment import ROOT
from experiments.shared.finetune_flags import columns_of, open_store_of
from experiments.shared.loss_state import resolved, seed_noise, temperature_of
from experiments.shared.neighbours import CROSS_ENTROPY, LOSSES, METHODS, UNTRAINED, majority, nearest, neighbour_loss
from experiments.shared.ranks import Ranks
from experiments.shared.run import Run, Steps
from experiments.shared.seed_processes import each_seed
from models.embedders import EMBEDDERS, embedder
from topk_losses import RELAXATIONS, SortedSoftTopK, TopKOperator, make_operator, methods
from topk_losses.checks import AUTO

# What makes it another experiment: see train_cifar100.py.
IDENTITY = (
    *("dataset", "embeddings", "limit_train", "limit_test", "model", "dim", "hidden_dims", "precision"),
    *("method", "loss", "k", "inverse_temperature", "distribution", "art_lambda", "sorted", "prediction"),
    *("lr", "weight_decay", "batch_size", "num_candidates", "n_epochs", "seed", "self_match", "augmented_neighbours"),
)
READABLE = "{dataset}{embeddings}-{method}-k{k}-{n_epochs}epochs-seed{seed}"  # the run id, before its hash
EVAL_BATCH = 1000  # points that are embedded at once, and a tile of the search: the result does not depend on it
NLOGLR = 3.0  # the published code's; its paper tries 10^-4 and 10^-5
COMPONENTS = 50  # of pca: those of the published baseline
INVERSE_TEMPERATURES = {"neuralsort": 1 / 16}  # the published code's tau 16; other methods: the library's default
MODELS = {"mnist": "cnn", "digits": "cnn"}  # as published, but for digits; the other images have the ResNet
# Flags of what trains, of the relaxed operator, and of maps: None where a row has nothing of the kind.
OF_RELAXED = ("inverse_temperature", "distribution", "art_lambda")
OF_OPERATOR = (*OF_RELAXED, "loss", "sorted", "num_candidates", "self_match")
OF_TRAINING = ("model", "dim", "hidden_dims", "n_epochs", "batch_size", "lr", "nloglr", "weight_decay", "precision")
NOT_RECORDED = ("seeds", "cache_dir")


@dataclass
class Flags(cli.RecordFlags, cli.MachineFlags, cli.DataFlags, cli.OptimizationFlags, cli.OperatorFlags):
    """of this script: SGD with momentum .9 and a constant learning rate, 10^-3; a batch is of queries"""

    method: str = flag(
        None,
        cli.method_of(METHODS),
        f"the relaxed top-k: {', '.join(RELAXATIONS)}; or a baseline: {CROSS_ENTROPY}, inputs (kNN on the "
        f"pixels or embeddings as they are), pca (on their {COMPONENTS} leading principal components)",
        required=True,
    )
    loss: str = flag("mass", LOSSES, "minus the soft top-k mass on the query's label, or minus its logarithm")
    k: int = flag(9, cli.count, "neighbours, in training and in the vote")
    sorted: bool = flag(False, bool, "soft_topk: an anchor for each of the k ranks")
    prediction: str = flag(
        "neighbours", ("neighbours", "network"), f"the majority of the k nearest, or, of {CROSS_ENTROPY}, the logits"
    )
    n_epochs: int = 200
    batch_size: int = 100
    weight_decay: float = 5e-4
    num_candidates: int = flag(100, cli.count, "candidates of a step, from an order of their own")
    self_match: bool = flag(False, bool, "as in the published code, a query meets itself among the candidates")
    dataset: str | None = flag(None, POINT_SETS, "without, mnist; digits needs no download", only_one="source")
    data_path: str | None = flag(None, str, "embeddings, as finetune_imagenet.py's", "-d", only_one="source")
    cache_dir: Path | None = flag(None, cli.path, "of embeddings that are downloaded")
    augmented_neighbours: bool = flag(
        False, bool, "as in the published code, CIFAR's images are cropped and flipped in evaluations, too"
    )
    model: str | None = flag(None, EMBEDDERS, "cnn for mnist and digits, linear for embeddings, else preact_resnet18")
    dim: int | None = flag(None, cli.count, "width of the embeddings of linear and mlp (128)")
    hidden_dims: list[int] | None = flag(None, cli.count, "of mlp: widths of its hidden layers", nargs="+")
    results: Path = ROOT / "results" / "knn.csv"


def parse_arguments(argv: list[str] | None = None) -> Flags:
    """Return the flags, each checked on its own. Raises CommandLineError."""
    args = cli.parse(Flags, argv, __doc__)
    args.dataset = args.dataset or ("mnist" if args.data_path is None else None)
    return args


def configuration(args: Flags) -> tuple[TopKOperator | None, dict[str, Any]]:
    """Return the operator (a baseline has none), and every flag, nothing left to a default. Raises CommandLineError."""
    method, relaxed = args.method, args.method in RELAXATIONS
    model = args.model or (MODELS.get(args.dataset, "preact_resnet18") if args.dataset else "linear")
    is_map = model in ("linear", "mlp")
    augmented = [name for name, each in POINT_SETS.items() if each.augmented]
    of_operator = [name for name in OF_RELAXED if getattr(args, name) is not None and not relaxed]
    of_network = args.prediction == "neighbours" or method == CROSS_ENTROPY
    cli.check(of_network, f"--prediction network is of {CROSS_ENTROPY} alone, got --method {method}")
    cli.check(not args.sorted or method == "soft_topk", f"--sorted is of soft_topk alone, got --method {method}")
    cli.check(not of_operator, f"--{''.join(of_operator[:1])} is of a relaxed top-k, not of --method {method}")
    are_augmented = not args.augmented_neighbours or args.dataset in augmented
    cli.check(are_augmented, f"--augmented_neighbours is of {', '.join(augmented)}, whose images are augmented")
    # A query that meets itself takes no part, so that one candidate more is needed.
    enough = not relaxed or args.k < args.num_candidates
    cli.check(enough, f"--k must be below --num_candidates, got {args.k} and {args.num_candidates}")
    has_width = not args.dim or is_map or method in UNTRAINED
    cli.check(has_width, f"--dim is of linear and mlp, not of --model {model}; leave it out")
    flags = {
        **{flag: value for flag, value in vars(args).items() if flag not in NOT_RECORDED},
        **cli.learning_rate(args, NLOGLR),
        **{"model": model, "dim": (args.dim or 128) if is_map else None, "embeddings": None},
        "data_dir": cli.portable(args.data_dir) if args.dataset else None,
        # Switches that are off leave ids of rows from before there was a choice as they are.
        **{name: getattr(args, name) or None for name in ("sorted", "self_match", "augmented_neighbours")},
        **dict.fromkeys(() if relaxed else OF_OPERATOR),
        **dict.fromkeys(OF_TRAINING if method in UNTRAINED else ()),
    }
    if not relaxed:
        return None, flags
    with cli.refusing():
        beta = args.inverse_temperature or INVERSE_TEMPERATURES.get(method)
        settings = resolved(method, beta, args.distribution, args.art_lambda, relaxed=True)
        flags |= {name: settings[name] for name in OF_RELAXED}
        beta = None if isinstance(beta, str) else beta
        if args.sorted:
            operator = SortedSoftTopK(args.k, beta or methods.METHODS[method].inverse_temperature)
        else:
            operator = make_operator(method, args.num_candidates, args.k, beta, args.distribution, args.art_lambda)
        operator.auto = methods.METHODS[method].auto() if settings["inverse_temperature"] == AUTO else None
    return operator, flags


def begin(args: Flags, ranks: Ranks) -> tuple[Run, TopKOperator | None, Points]:
    """Return what a run begins with: what can be refused is refused here. Raises AlreadyRecorded, too.

    A store is opened at once, to be known by its content; images are loaded where there is something to do.
    """
    cli.check(
        ranks.count == 1, f"train_knn.py is one process, and torchrun has started {ranks.count}: leave torchrun out"
    )
    device = cli.training_device(args, ranks)
    operator, flags = configuration(args)
    load = partial(load_points, args.dataset, args.data_dir, mirror=args.mirror)
    if args.data_path is not None:
        store = open_store_of(args.data_path, args.cache_dir)
        load = partial(points_of_store, store)
        flags |= columns_of(store, args.data_path)
    run = Run(args, flags, IDENTITY, READABLE, device, ranks)
    limits = {name: limit for name, limit in (("train", args.limit_train), ("test", args.limit_test)) if limit}
    with cli.refusing(DatasetUnavailableError):
        points = load(seed=args.seed, limits=limits)
    for name in ("k",) if args.method in UNTRAINED else ("k", "batch_size", "num_candidates"):
        given, most = getattr(args, name), len(points.train)
        cli.check(given <= most, f"--{name} must not exceed the {most} training points, got {given}")
    if args.method not in UNTRAINED:
        with torch.device("meta"):  # what does not fit is refused before a folder is made
            network(points, run.flags)
    for name in ("train", "valid", "test"):
        inputs = getattr(points, name).inputs
        if inputs.is_floating_point() and not all(part.isfinite().all() for part in inputs.split(EVAL_BATCH)):
            raise ProgramError(
                f"the {name} points of {args.data_path} hold embeddings that are not finite: nothing is recorded. "
                "Make these embeddings again, or leave such rows out"
            )
    return run, operator, points


def train(args: Flags, ranks: Ranks) -> int:
    """Train one configuration with --seed and record its row; return the exit status."""
    run, operator, points = begin(args, ranks)
    with run.held():
        # Data, whole on the device (images as uint8), what embeds them, and optimizer.
        points = points.to(run.device)
        model = network(points, run.flags).to(run.device)
        parameters = [each for each in model.parameters() if each.requires_grad]
        optimizer = None
        if parameters:
            rate = run.flags["lr"]
            optimizer = torch.optim.SGD(parameters, rate, momentum=0.9, weight_decay=args.weight_decay)
        operator = operator and operator.to(run.device)
        training = {"model": model, "optimizer": optimizer, "loss": operator}
        run.track(model, training, end=args.n_epochs if optimizer else 1)

        # Loop.
        embed = run.compiled(model["embed"]) if optimizer else model["embed"]
        num_steps = len(points.train) // args.batch_size  # the last partial batch is dropped
        steps = Steps(run, optimizer, operator, num_steps, args.n_epochs) if optimizer else None
        for epoch in run.remaining():
            trained: dict[str, Any] = {"epoch": epoch, "train_loss": None, "train_seconds": 0.0}
            if steps:
                trained = train_epoch(epoch, steps, model, embed, points)
            measured = {**trained, **evaluate(epoch, run, model, points)}
            measured |= temperature_of(operator, run.flags["inverse_temperature"])
            run.save(measured, f"epoch {epoch}/{run.end}")

        columns = {"num_classes": points.num_classes}
        columns |= {f"{name}_images": len(getattr(points, name)) for name in ("train", "valid", "test")}
        run.record(columns, run.end * num_steps * args.batch_size if optimizer else None)
    return 0


def network(points: Points, flags: dict[str, Any]) -> nn.ModuleDict:
    """Return what embeds, freshly initialised, and of cross-entropy what classifies; on the CPU. CommandLineError."""
    if flags["method"] == "inputs":
        return nn.ModuleDict({"embed": nn.Flatten()})
    if flags["method"] == "pca":
        from sklearn.decomposition import PCA  # takes a second, and the others need none

        inputs = torch.cat([points.inputs(part).flatten(1) for part in points.train.inputs.split(EVAL_BATCH)])
        directions = (
            PCA(min(COMPONENTS, *inputs.shape), svd_solver="covariance_eigh").fit(inputs.double().cpu()).components_
        )
        components = nn.Linear(*reversed(directions.shape), bias=False).requires_grad_(False)
        components.weight.copy_(torch.from_numpy(directions))
        return nn.ModuleDict({"embed": nn.Sequential(nn.Flatten(), components)})
    with cli.refusing():
        embed = embedder(flags["model"], points.input_shape, flags["dim"], flags["hidden_dims"] or ())
    if flags["method"] != CROSS_ENTROPY:
        return nn.ModuleDict({"embed": embed})
    return nn.ModuleDict({"embed": embed, "classify": nn.Linear(flags["dim"] or embed.dim, points.num_classes)})


def train_epoch(epoch: int, steps: Steps, model: nn.ModuleDict, embed: nn.Module, points: Points) -> dict[str, float]:
    """Train for one epoch, counted from 1; return mean loss, seconds and images/s. Raises Diverged.

    Each training point is a query once, but for the last partial batch.
    """
    started, run, operator, train = time.perf_counter(), steps.run, steps.loss_fn, points.train
    args = run.args
    # Two independent shuffles; candidates go round where a step has more of them than queries.
    queries, candidates = (
        epoch_order(len(train), args.seed, 2 * epoch + each).to(run.device) for each in (0, 1)
    )  # (N,)
    generator = epoch_generator(args.seed, 2 * epoch, run.device) if points.augmented else None
    if operator is not None:
        seed_noise(operator, run.device, args.seed, epoch)

    def embedded(rows: Tensor) -> Tensor:
        inputs = points.inputs(train.inputs[rows], generator)
        with run.autocast():
            return embed(inputs).float()  # (rows, d)

    def batch_loss(of_queries: Tensor, of_candidates: Tensor) -> tuple[Tensor, None]:
        """The loss () of training points, each by its row: (Q,) and (C,)."""
        labels = train.labels[of_queries]
        if operator is None:
            return cross_entropy(model["classify"](embedded(of_queries)), labels), None
        right = labels.unsqueeze(1) == train.labels[of_candidates]  # (Q, C)
        same = None if args.self_match else of_queries.unsqueeze(1) == of_candidates  # (Q, C)
        loss = neighbour_loss(operator, embedded(of_queries), embedded(of_candidates), right, same, args.loss)
        return loss, None

    turn = torch.arange(args.num_candidates, device=run.device)
    model.train()
    for step in steps.of(epoch):
        of_candidates = candidates[(step * args.num_candidates + turn) % len(train)]  # (C,)
        steps.take(batch_loss, queries[step * args.batch_size : (step + 1) * args.batch_size], of_candidates)
    loss, seconds = steps.mean(), time.perf_counter() - started
    speed = {"train_seconds": seconds, "images_per_second": steps.num_steps * args.batch_size / seconds}
    return {"epoch": epoch, "train_loss": loss, **speed}


@torch.no_grad()
def evaluate(epoch: int, run: Run, model: nn.ModuleDict, points: Points) -> dict[str, float]:
    """Return the top-1 accuracies (fractions) on the whole of valid and test, and the seconds. Raises ProgramError."""
    started, args = time.perf_counter(), run.args
    model.eval()
    # Drawn apart from the training's. The published code leaves the test images as they are.
    generator = epoch_generator(args.seed, 2 * epoch + 1, run.device) if args.augmented_neighbours else None

    def embedded(samples: Samples, generator: torch.Generator | None) -> Iterator[Tensor]:
        for part in samples.inputs.split(EVAL_BATCH):
            inputs = points.inputs(part, generator)
            with run.autocast():
                yield model["embed"](inputs).float()  # (part, d)

    asked = torch.cat([*embedded(points.valid, generator), *embedded(points.test, None)])  # (Q, d)
    if not bool(asked.isfinite().all()):
        raise ProgramError(f"an embedding is not finite after epoch {epoch}; no row is written. Try a smaller --lr")
    if args.prediction == "network":
        predicted = model["classify"](asked).argmax(1)  # (Q,)
    else:
        rows = nearest(asked, embedded(points.train, generator), args.k)  # (Q, k)
        predicted = majority(points.train.labels[rows])  # (Q,)
    right = predicted == torch.cat([points.valid.labels, points.test.labels])  # (Q,)
    splits = zip(("valid", "test"), right.split([len(points.valid), len(points.test)]))
    accuracies = {f"{name}_top1": int(each.sum()) / len(each) for name, each in splits}
    return {**accuracies, "eval_seconds": time.perf_counter() - started}


def main(argv: list[str] | None = None) -> int:
    return cli.finish(lambda ranks: each_seed(begin, train, parse_arguments(argv), ranks))


if __name__ == "__main__":
    program.end(main())
