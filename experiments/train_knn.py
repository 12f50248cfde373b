"""A k-nearest-neighbour classifier trained end to end, through any relaxed top-k (Grover et al. 2019; Xie et al. 2020).

    python experiments/train_knn.py --dataset digits --method neuralsort --n_epochs 20            # no download
    python experiments/train_knn.py --dataset mnist --method neuralsort                           # published: 99.3
    python experiments/train_knn.py --dataset cifar10 --method soft_topk --seeds 0 1 2            # three rows
    python experiments/train_knn.py -d own.pt --method splitter_selection --loss log_mass         # embeddings
    python experiments/train_knn.py --dataset mnist --method pca                                  # a baseline

A step draws 100 queries and 100 candidates, each from a shuffled order of its own. Their embeddings' squared distances,
negated, are scores. The relaxed top-k gives each candidate its mass among the k nearest, and the loss is minus the mass
on the candidates of the query's label. SGD with momentum 0.9 and a constant learning rate. After each epoch the
queries of validation and test get the majority label of their k nearest among all training points, by an exact search.
Baselines, and what differs from the published code: docs/knn.md.

The row in results/knn.csv has the test accuracy where validation accuracy was best; the run's folder is
results/runs/<run id>. A command that was stopped or killed continues when it is repeated.
"""

import argparse
import math
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from data.cifar import crop_and_flip, sample_crops
from data.download import download
from data.embeddings import Embeddings, load_embeddings
from data.points import AUGMENTED, POINT_SETS, load_points, points_of_embeddings
from data.splits import Dataset, Split, epoch_generator, epoch_order
from experiments.common import door, flags
from experiments.common.objective import OPERATOR_SETTINGS, Objective, build_operator, check_finite, fill_in_operator
from experiments.common.operators import BoundOperator
from experiments.common.processes import Processes, compiled
from experiments.common.run import Run
from experiments.common.settings import CROSS_ENTROPY, KNN, UNTRAINED
from models.embedders import EMBEDDERS, embedder
from topk_losses import METHODS as LIBRARY
from topk_losses import RELAXATIONS, AutoTemperature
from topk_losses.numerics import guarded_log

METHODS = (*RELAXATIONS, CROSS_ENTROPY, *UNTRAINED)
LOSSES = ("mass", "log_mass")
QUERY_ROWS = 1000  # queries at once; a tile of as many training points takes about 10 MB
READABLE = "{dataset}{embeddings}-{method}-k{k}-{n_epochs}epochs-seed{seed}"
EVAL_BATCH = 1000  # points embedded at once; the result does not depend on it
COMPONENTS = 50  # principal components, as published
INVERSE_TEMPERATURES = {"neuralsort": 1 / 16}  # tau 16 in the published code; other methods have the library's default
MODELS = {"mnist": "cnn", "digits": "cnn"}  # the other images: preact_resnet18
# Columns that are empty for baselines, and for those that are not trained.
RELAXED_COLUMNS = (*OPERATOR_SETTINGS, "loss", "sorted", "num_candidates", "self_match")
SCHEDULE = ("precision", "n_epochs", "batch_size")  # a list of runs gives the same one to all, trained or not
NETWORK_COLUMNS = ("model", "dim", "hidden_dims", "precision")
TRAINING_COLUMNS = (*NETWORK_COLUMNS, "n_epochs", "batch_size", "lr", "nloglr", "weight_decay")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = flags.make_parser(__doc__)
    parser.add_argument(
        "--method",
        type=flags.method_among(METHODS),
        required=True,
        metavar="NAME",
        help=f"relaxed top-k: {', '.join(RELAXATIONS)}; or a baseline: {CROSS_ENTROPY}, inputs (kNN on the points "
        f"themselves), pca (kNN on their {COMPONENTS} leading principal components)",
    )
    flags.add_operator_flags(parser)
    flags.add_optimization_flags(parser, n_epochs=200, batch_size=100, weight_decay=5e-4)
    flags.add_network_flags(parser)
    flags.add_run_flags(parser, results="knn.csv")
    flags.add_embedding_flags(parser)
    add_neighbour_flags(parser)
    parser.add_argument("--dataset", choices=POINT_SETS, help="default: mnist, unless -d gives embeddings")
    flags.add_data_dir(parser)
    parser.add_argument("--limit_train", type=flags.positive_int, help="number of training points (default: all)")
    parser.add_argument(
        "--model",
        choices=EMBEDDERS,
        help="default: cnn for mnist and digits, linear for embeddings, else preact_resnet18",
    )
    parser.add_argument("--dim", type=flags.positive_int, help="width of linear and mlp (default: 128)")
    parser.add_argument("--hidden_dims", type=flags.positive_int, nargs="+", help="widths of the hidden layers of mlp")
    args = parser.parse_args(argv)
    if args.dataset is None and args.data_path is None:
        args.dataset = "mnist"
    given = flags.given(parser, argv, args)
    problem = misuse(args, given) or misplaced(args.method, given)
    if problem:
        parser.error(problem)
    return args


def misplaced(method: str, given: Collection[str]) -> str:
    """Say which flag that is given does nothing for the method; "" if none."""
    if method in RELAXATIONS:
        return ""
    for name in RELAXED_COLUMNS:
        if name in given:
            return f"--{name} is of a relaxed top-k, not of --method {method}"
    if method in UNTRAINED:
        for name in (*TRAINING_COLUMNS, "compile"):
            if name in given and name not in SCHEDULE:
                return f"--{name} is of what is trained, and --method {method} is not"
    return ""


def add_neighbour_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the loss and of the vote of neighbours."""
    parser.add_argument(
        "--loss",
        choices=LOSSES,
        default="mass",
        help="minus the mass on the correct label, or minus its logarithm (default: mass)",
    )
    parser.add_argument("--k", type=flags.positive_int, default=9, help="neighbours in training and vote (default: 9)")
    parser.add_argument("--sorted", action="store_true", help="give soft_topk a target point for each of the k ranks")
    parser.add_argument(
        "--prediction",
        choices=("neighbours", "network"),
        default="neighbours",
        help=f"majority of the k nearest, or largest logit with {CROSS_ENTROPY} (default: neighbours)",
    )
    parser.add_argument(
        "--num_candidates",
        type=flags.positive_int,
        default=100,
        help="candidates of a training step (default: %(default)s)",
    )
    parser.add_argument("--self_match", action="store_true", help="let a query be its own candidate, as published")


def misuse(args: argparse.Namespace, given: Collection[str]) -> str:
    """Say which flags exclude one another; "" if none do. given: the names of those that the command line has."""
    if args.dataset is not None and args.data_path is not None:
        return "the points are given by --dataset or by -d"
    for name in ("cache_dir", "requester_pays", "sha256"):
        if args.dataset is not None and name in given:
            return f"--{name} is of a file, given by -d, not of --dataset {args.dataset}"
    if args.dataset is None and "data_dir" in given:
        return "--data_dir is of --dataset, not of -d"
    if args.prediction == "network" and args.method != CROSS_ENTROPY:
        return f"--prediction network is of {CROSS_ENTROPY} alone, got --method {args.method}"
    if args.sorted and args.method != "soft_topk":
        return f"--sorted is of soft_topk alone, got --method {args.method}"
    if args.method in RELAXATIONS and args.k >= args.num_candidates:  # one candidate may be the query itself
        return f"--k must be below --num_candidates, got {args.k} and {args.num_candidates}"
    if args.dim and default_model(args) not in ("linear", "mlp"):
        return f"--dim is of linear and mlp, not of --model {default_model(args)}"
    return ""


def default_model(args: argparse.Namespace) -> str:
    """The network of --model, or that of the data set."""
    if args.model is not None:
        return args.model
    if args.dataset is None:
        return "linear"
    return MODELS.get(args.dataset, "preact_resnet18")


def configuration(args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Every setting of one run by name, defaults filled in; None for one that does not apply to the method.

    Raises:
        ValueError: settings that do not fit.
    """
    config = vars(args).copy()
    config |= flags.learning_rate(args, nloglr=3.0)
    config["seed"] = seed
    config["embeddings"] = None
    config["model"] = default_model(args)
    if config["model"] in ("linear", "mlp"):
        config["dim"] = args.dim or 128
    else:
        config["dim"] = None
    if args.dataset is None:
        config["data_dir"] = None
    if args.method in RELAXATIONS:
        config |= fill_in_operator(args, INVERSE_TEMPERATURES)
        del config["top1_mode"]
    else:
        config |= dict.fromkeys(RELAXED_COLUMNS)
    if args.method in UNTRAINED:
        config |= dict.fromkeys(TRAINING_COLUMNS)
    return config


def squared_distances(queries: Tensor, candidates: Tensor) -> Tensor:
    """Squared Euclidean distances (Q, N) of queries (Q, d) and candidates (N, d), by one matrix product.

    The rounding error grows with the squared norms: the caller subtracts a mean first.
    """
    norms = candidates.square().sum(1)  # (N,)
    distances = torch.addmm(norms, queries, candidates.T, alpha=-2) + queries.square().sum(1, keepdim=True)
    return distances.clamp(min=0)


class NeighbourLoss(nn.Module):
    """The mean over queries of minus the soft top-k mass on right candidates, or of minus its logarithm.

    Args:
        operator: the relaxed top-k of the candidates.
        loss: "mass", -sum_j right_j sum_{r <= k} P[r, j], between -k and 0 where indicators sum to k; or "log_mass",
            -log of that mass / k, which counts as 1 at most.
        auto: sets the inverse temperature by the scores; None for the operator's.
    """

    generator: torch.Generator | None = None  # for operators that draw noise

    def __init__(self, operator: BoundOperator, loss: str, auto: AutoTemperature | None = None) -> None:
        super().__init__()
        self.operator = operator
        self.loss = loss
        self.inverse_temperature = auto
        if auto is None:
            self.inverse_temperature = operator.inverse_temperature or operator.operator.default_inverse_temperature

    def forward(self, queries: Tensor, candidates: Tensor, right: Tensor, left_out: Tensor | None = None) -> Tensor:
        """Compute the loss, (). A query without a right candidate counts as 0.

        queries (Q, d) and candidates (C, d) float32. right (Q, C) bool: candidates of the query's label. left_out
        (Q, C) bool: candidates that are masked out, such as the query itself.
        """
        center = candidates.detach().mean(0)
        scores = -squared_distances(queries - center, candidates - center)  # (Q, C)
        if left_out is not None:
            scores = scores.masked_fill(left_out, -torch.inf)
            right = right & ~left_out
        beta = self.inverse_temperature
        if isinstance(beta, AutoTemperature):
            beta.observe(scores, finite_masks=False)
            beta = beta.value()
        has_right = right.any(1)  # (Q,)
        # A query without a right candidate gets all of them: it has a logarithm, and torch.where below leaves it out.
        targets = (right | ~has_right.unsqueeze(1)).to(scores.dtype)  # (Q, C)
        mass = self.operator.mass(scores, targets, beta, self.generator)  # (Q,), of the targets among the k nearest
        if self.loss == "mass":
            losses = -mass
        else:
            losses = -guarded_log((mass / self.operator.k).clamp(max=1))
        return torch.where(has_right, losses, 0).mean()


def build_objective(config: dict[str, Any], device: torch.device) -> Objective | None:
    """Build the loss of a relaxed top-k of num_candidates scores; None for a baseline.

    Raises:
        ValueError: settings that do not fit.
    """
    if config["method"] not in RELAXATIONS:
        return None
    operator = build_operator(config, config["num_candidates"], config["k"], sorted=config["sorted"])
    auto = None
    method = LIBRARY[config["method"]]
    if config["inverse_temperature"] == "auto" and method.spread is not None:
        auto = AutoTemperature(method.spread, method.inverse_temperature)
    return Objective(config, NeighbourLoss(operator, config["loss"], auto), device)


def build_model(points: Dataset, config: dict[str, Any]) -> nn.ModuleDict:
    """Build the embedding network, and for cross-entropy its linear classifier. Raises ValueError."""
    if config["method"] == "inputs":
        return nn.ModuleDict({"embed": nn.Flatten()})
    if config["method"] == "pca":
        return nn.ModuleDict({"embed": nn.Sequential(nn.Flatten(), principal_components(points))})
    embed = embedder(config["model"], points.train.inputs.shape[1:], config["dim"], config["hidden_dims"] or ())
    if config["method"] != CROSS_ENTROPY:
        return nn.ModuleDict({"embed": embed})
    dim = config["dim"] or embed.dim
    return nn.ModuleDict({"embed": embed, "classify": nn.Linear(dim, points.num_classes)})


def principal_components(points: Dataset) -> nn.Linear:
    """The projection of flat inputs on the leading principal components of the training points."""
    from sklearn.decomposition import PCA  # this import takes a second

    parts = [points.normalise(part).flatten(1) for part in points.train.inputs.split(EVAL_BATCH)]
    inputs = torch.cat(parts)  # (train, d)
    pca = PCA(min(COMPONENTS, *inputs.shape), svd_solver="covariance_eigh").fit(inputs.double().cpu())
    num_components, dim = pca.components_.shape
    components = nn.Linear(dim, num_components, bias=False).requires_grad_(False)
    components.weight.copy_(torch.from_numpy(pca.components_))
    return components


@dataclass
class Training:
    """What one run trains and evaluates."""

    config: dict[str, Any]
    points: Dataset
    model: nn.ModuleDict  # "embed", and for cross-entropy "classify"
    embed: nn.Module  # the embedding network, possibly compiled
    objective: Objective | None
    optimizer: torch.optim.Optimizer | None  # None for what is not trained


def train(config: dict[str, Any], embeddings: Embeddings | None, processes: Processes) -> None:
    """Train and record one run."""
    device = processes.device
    objective = build_objective(config, device)
    if embeddings is not None:
        config = config | embeddings.about(config["data_path"])
    run = Run(KNN, READABLE, config, processes)
    if not run.start():
        return

    points = load_all(config, embeddings)
    torch.manual_seed(config["seed"])
    model = build_model(points, config)
    points = points.to(device)
    model = model.to(device, memory_format=torch.channels_last)  # faster on a CPU
    optimizer = None
    n_epochs = 1
    if config["method"] not in UNTRAINED:
        n_epochs = config["n_epochs"]
        optimizer = torch.optim.SGD(model.parameters(), config["lr"], momentum=0.9, weight_decay=config["weight_decay"])
    loss_fn = None if objective is None else objective.loss_fn
    run.resume(model=model, optimizer=optimizer, loss=loss_fn)
    embed = compiled(model["embed"], config["compile"], device)
    training = Training(config, points, model, embed, objective, optimizer)

    for epoch in range(run.done + 1, n_epochs + 1):
        entry: dict[str, Any] = {"epoch": epoch, "train_loss": None, "train_seconds": 0.0}
        if optimizer is not None:
            entry = train_epoch(epoch, training, optimizer)
        entry |= evaluate(training)
        if objective is not None:
            entry |= objective.temperature()
        run.save(entry, last=epoch == n_epochs, message=f"epoch {epoch}/{n_epochs}")
    run.record({"num_classes": points.num_classes} | points.counts())


def load_all(config: dict[str, Any], embeddings: Embeddings | None) -> Dataset:
    """The points of a run, on the CPU.

    Raises:
        ValueError: they are fewer than a step takes, or the file of embeddings has changed.
    """
    sample = {"seed": config["seed"], "limit_train": config["limit_train"]}
    if embeddings is not None:
        points = points_of_embeddings(embeddings, **sample)
        embeddings.check_unchanged()
    else:
        points = load_points(config["dataset"], config["data_dir"], **sample)
    for name in ("k", "batch_size", "num_candidates"):
        number = config[name]
        if number is not None and number > len(points.train):
            raise ValueError(f"--{name} {number} exceeds the {len(points.train)} training points")
    return points


def embed_batch(
    training: Training, inputs: Tensor, embed: nn.Module, generator: torch.Generator | None = None
) -> Tensor:
    """The embeddings (batch, d), float32, of a batch of inputs. generator: crops and flips them first."""
    if generator is not None:
        inputs = crop_and_flip(inputs, *sample_crops(len(inputs), generator))
    is_bf16 = training.config["precision"] == "bf16"
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=is_bf16):
        embedded = embed(training.points.normalise(inputs))
    return embedded.float()


def train_epoch(epoch: int, training: Training, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Train for one epoch, counted from 1: each training point is a query once, except in the last partial batch."""
    started = time.perf_counter()
    config = training.config
    objective = training.objective
    num_steps = len(training.points.train) // config["batch_size"]  # the last partial batch is dropped
    step_losses = []
    if objective is not None:
        objective.draw_noise_by(config["seed"], epoch)
    training.model.train()
    for step, batch in enumerate(training_batches(epoch, num_steps, training)):
        if objective is None:
            logits = training.model["classify"](batch.queries)
            loss = cross_entropy(logits, batch.labels)
        else:
            objective.set_progress((epoch - 1 + step / num_steps) / config["n_epochs"])
            loss = objective(batch.queries, batch.candidates, batch.right, batch.same)

        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step_losses.append(loss.detach())
    mean_loss = math.fsum(torch.stack(step_losses).tolist()) / num_steps
    check_finite(mean_loss, f"in epoch {epoch}")
    return {"epoch": epoch, "train_loss": mean_loss, "train_seconds": time.perf_counter() - started}


class Batch(NamedTuple):
    """A training step's embeddings of Q queries and C candidates, which none has for cross-entropy.

    right (Q, C) bool: candidates of the query's label. same (Q, C) bool: the query itself; None with --self_match.
    """

    queries: Tensor
    labels: Tensor
    candidates: Tensor | None = None
    right: Tensor | None = None
    same: Tensor | None = None


def training_batches(epoch: int, num_steps: int, training: Training) -> Iterator[Batch]:
    """Embed the queries (Q,) and the candidates (C,) of each step.

    Their orders are independent; the candidates start again if a step has more of them than queries.
    """
    config = training.config
    train = training.points.train
    seed = config["seed"]
    size = config["batch_size"]
    device = train.labels.device
    generator = None
    if config["dataset"] in AUGMENTED:
        generator = epoch_generator(seed, 2 * epoch, device)
    queries = epoch_order(len(train), seed, 2 * epoch).to(device)  # (N,)
    candidates = epoch_order(len(train), seed, 2 * epoch + 1).to(device)  # (N,)
    for step in tqdm(range(num_steps), f"epoch {epoch}", leave=False, disable=None):
        asked = queries[step * size : (step + 1) * size]  # (Q,)
        labels = train.labels[asked]
        embedded = embed_batch(training, train.inputs[asked], training.embed, generator)
        if training.objective is None:
            yield Batch(embedded, labels)
            continue
        turn = step * config["num_candidates"] + torch.arange(config["num_candidates"], device=device)
        others = candidates[turn % len(train)]  # (C,)
        same = None
        if not config["self_match"]:
            same = asked.unsqueeze(1) == others  # (Q, C)
        right = labels.unsqueeze(1) == train.labels[others]  # (Q, C)
        yield Batch(
            embedded, labels, embed_batch(training, train.inputs[others], training.embed, generator), right, same
        )


@torch.no_grad()
def evaluate(training: Training) -> dict[str, float]:
    """The top-1 accuracies (fractions) on the whole of valid and test."""
    started = time.perf_counter()
    config = training.config
    points = training.points
    training.model.eval()
    asked = torch.cat([*embed_split(points.valid, training), *embed_split(points.test, training)])  # (Q, d)
    if not asked.isfinite().all():
        raise FloatingPointError("an embedding is not finite; nothing is recorded. Try a smaller --lr")
    if config["prediction"] == "network":
        predicted = training.model["classify"](asked).argmax(1)  # (Q,)
    else:
        neighbours = nearest(asked, embed_split(points.train, training), config["k"])  # (Q, k)
        predicted = majority(points.train.labels[neighbours])  # (Q,)
    hits = predicted == torch.cat([points.valid.labels, points.test.labels])  # (Q,)
    valid, test = hits.split([len(points.valid), len(points.test)])
    return {
        "valid_top1": int(valid.sum()) / len(valid),
        "test_top1": int(test.sum()) / len(test),
        "eval_seconds": time.perf_counter() - started,
    }


def embed_split(samples: Split, training: Training) -> Iterator[Tensor]:
    """The embeddings of a split, (at most EVAL_BATCH, d) at a time."""
    for part in samples.inputs.split(EVAL_BATCH):
        yield embed_batch(training, part, training.model["embed"])


def nearest(queries: Tensor, tiles: Iterable[Tensor], k: int) -> Tensor:
    """The rows of the k nearest points to each query, nearest first: (Q, k) int64.

    queries (Q, d) float32. tiles: the points, (T, d) each, in order. Exact, to the rounding of float32; of equal
    distances the smaller row comes first.
    """
    centre = queries.mean(0)
    queries = queries - centre
    # One integer holds the bits of a distance, then its row: bits of non-negative floats sort as the floats do.
    best = torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)
    begin = 0
    for tile in tiles:
        rows = torch.arange(begin, begin + len(tile), device=queries.device)  # (T,)
        tile = tile - centre
        merged = []
        for part, so_far in zip(queries.split(QUERY_ROWS), best.split(QUERY_ROWS)):
            bits = squared_distances(part, tile).view(torch.int32)
            keys = torch.cat([so_far, torch.add(rows, bits, alpha=2**32)], dim=1)  # (q, at most k + T)
            merged.append(keys.topk(min(k, keys.shape[1]), dim=1, largest=False).values)
        best = torch.cat(merged)
        begin += len(tile)
    return best & 0xFFFFFFFF


def majority(labels: Tensor) -> Tensor:
    """The most frequent (Q,) of the neighbours' labels (Q, k), nearest first; ties go to the nearest."""
    k = labels.shape[1]
    votes = (labels.unsqueeze(2) == labels.unsqueeze(1)).sum(2)  # (Q, k) how many have the label of each
    first = (votes * k - torch.arange(k, device=labels.device)).argmax(1, keepdim=True)  # (Q, 1)
    return labels.gather(1, first).squeeze(1)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    processes = Processes(args.device, args.threads, args.precision)
    if processes.count > 1:
        raise ValueError("train_knn.py is one process: leave torchrun out")
    embeddings = None
    if args.data_path is not None:
        embeddings = load_embeddings(download(args.data_path, args.cache_dir, args.sha256, args.requester_pays))
    for seed in args.seed:
        train(configuration(args, seed), embeddings, processes)
    return 0


if __name__ == "__main__":
    sys.exit(door.call(main))
