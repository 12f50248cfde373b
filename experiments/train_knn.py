"""A k-nearest-neighbour classifier trained end to end, through any relaxed top-k (Grover et al. 2019; Xie et al. 2020).

    python experiments/train_knn.py --dataset digits --method neuralsort --n_epochs 20            # no download
    python experiments/train_knn.py --dataset mnist --method neuralsort                           # published: 99.5
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
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from data.cifar import crop_and_flip, epoch_generator, epoch_order, sample_crops
from data.download import download
from data.embeddings import Embeddings, load_embeddings
from data.points import AUGMENTED, POINT_SETS, load_points, points_of_embeddings
from data.splits import Dataset, Split
from experiments.common import flags, losses
from experiments.common.processes import Processes
from experiments.common.run import Run
from models.embedders import EMBEDDERS, embedder
from topk_losses import METHODS as LIBRARY
from topk_losses import RELAXATIONS, AutoTemperature, TopKOperator
from topk_losses.operator import guarded_log

CROSS_ENTROPY = "softmax_cross_entropy"
UNTRAINED = ("inputs", "pca")  # nearest neighbours of the inputs, of their principal components
METHODS = (*RELAXATIONS, CROSS_ENTROPY, *UNTRAINED)
LOSSES = ("mass", "log_mass")
QUERY_ROWS = 1000  # queries at once; a tile of as many training points takes about 10 MB
# Settings on which a run's name depends.
IDENTITY = (
    *("dataset", "embeddings", "limit_train", "model", "dim", "hidden_dims", "precision"),
    *("method", "loss", "k", "inverse_temperature", "distribution", "art_lambda", "sorted", "prediction"),
    *("lr", "weight_decay", "batch_size", "num_candidates", "n_epochs", "seed", "self_match"),
)
READABLE = "{dataset}{embeddings}-{method}-k{k}-{n_epochs}epochs-seed{seed}"
EVAL_BATCH = 1000  # points embedded at once; the result does not depend on it
COMPONENTS = 50  # principal components, as published
INVERSE_TEMPERATURES = {"neuralsort": 1 / 16}  # tau 16 in the published code; other methods have the library's default
MODELS = {"mnist": "cnn", "digits": "cnn"}  # the other images: preact_resnet18
# Columns that are empty for baselines, and for those that are not trained.
OPERATOR_COLUMNS = ("inverse_temperature", "distribution", "art_lambda")
RELAXED_COLUMNS = (*OPERATOR_COLUMNS, "loss", "sorted", "num_candidates", "self_match")
TRAINING_COLUMNS = (
    *("model", "dim", "hidden_dims", "precision"),
    *("n_epochs", "batch_size", "lr", "nloglr", "weight_decay"),
)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = flags.make_parser(__doc__)
    message = f"relaxed top-k: {', '.join(RELAXATIONS)}; or a baseline: {CROSS_ENTROPY}, inputs (kNN on the points "
    message += f"themselves), pca (kNN on their {COMPONENTS} leading principal components)"
    parser.add_argument("--method", type=flags.method_among(METHODS), required=True, metavar="NAME", help=message)
    flags.add_operator_flags(parser)
    flags.add_optimization_flags(parser, n_epochs=200, batch_size=100)
    flags.add_network_flags(parser)
    flags.add_run_flags(parser, results="knn.csv")
    flags.add_embedding_flags(parser)
    parser.set_defaults(weight_decay=5e-4)
    message = "minus the mass on the right label, or minus its logarithm (default: mass)"
    parser.add_argument("--loss", choices=LOSSES, default="mass", help=message)
    parser.add_argument("--k", type=flags.positive_int, default=9, help="neighbours in training and vote (default: 9)")
    parser.add_argument("--sorted", action="store_true", help="give soft_topk a target point for each of the k ranks")
    message = f"majority of the k nearest, or largest logit with {CROSS_ENTROPY} (default: neighbours)"
    parser.add_argument("--prediction", choices=("neighbours", "network"), default="neighbours", help=message)
    message = "candidates of a training step (default: %(default)s)"
    parser.add_argument("--num_candidates", type=flags.positive_int, default=100, help=message)
    parser.add_argument("--self_match", action="store_true", help="let a query be its own candidate, as published")
    parser.add_argument("--dataset", choices=POINT_SETS, help="default: mnist, unless -d gives embeddings")
    flags.add_data_dir(parser)
    parser.add_argument("--limit_train", type=flags.positive_int, help="number of training points (default: all)")
    message = "default: cnn for mnist and digits, linear for embeddings, else preact_resnet18"
    parser.add_argument("--model", choices=EMBEDDERS, help=message)
    parser.add_argument("--dim", type=flags.positive_int, help="width of linear and mlp (default: 128)")
    parser.add_argument("--hidden_dims", type=flags.positive_int, nargs="+", help="widths of the hidden layers of mlp")
    args = parser.parse_args(argv)
    if args.dataset and args.data_path:
        parser.error("the points are given by --dataset or by -d")
    args.dataset = args.dataset or ("mnist" if args.data_path is None else None)
    operator_flags = [f"--{name}" for name in OPERATOR_COLUMNS if getattr(args, name) is not None]
    if args.method not in RELAXATIONS and operator_flags:
        parser.error(f"{operator_flags[0]} is of a relaxed top-k, not of --method {args.method}")
    if args.prediction == "network" and args.method != CROSS_ENTROPY:
        parser.error(f"--prediction network is of {CROSS_ENTROPY} alone, got --method {args.method}")
    if args.sorted and args.method != "soft_topk":
        parser.error(f"--sorted is of soft_topk alone, got --method {args.method}")
    if args.method in RELAXATIONS and args.k >= args.num_candidates:  # one candidate may be the query itself
        parser.error(f"--k must be below --num_candidates, got {args.k} and {args.num_candidates}")
    return args


def configuration(args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Every flag with its default filled in; None for a flag that does not apply to the method."""
    model = args.model or (MODELS.get(args.dataset, "preact_resnet18") if args.dataset else "linear")
    if args.dim and model not in ("linear", "mlp") and args.method not in UNTRAINED:
        raise SystemExit(f"error: --dim is of linear and mlp, not of --model {model}")
    config = vars(args) | flags.learning_rate(args, nloglr=3.0) | {"seed": seed, "model": model, "embeddings": None}
    config["dim"] = (args.dim or 128) if model in ("linear", "mlp") else None
    config |= {name: getattr(args, name) or None for name in ("sorted", "self_match")}
    config["data_dir"] = args.data_dir if args.dataset else None
    if args.method in RELAXATIONS:
        config |= losses.operator_settings(args, INVERSE_TEMPERATURES)
        del config["top1_mode"]
    else:
        config |= dict.fromkeys(RELAXED_COLUMNS)
    return config | (dict.fromkeys(TRAINING_COLUMNS) if args.method in UNTRAINED else {})


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
        loss: "mass", -sum_j right_j sum_{r <= k} P[r, j], between -k and 0; or "log_mass", -log of that mass / k.
        auto: sets the inverse temperature by the scores; None for the operator's.
    """

    generator: torch.Generator | None = None  # for operators that draw noise

    def __init__(self, operator: TopKOperator, loss: str, auto: AutoTemperature | None = None) -> None:
        super().__init__()
        self.operator, self.loss, self.auto = operator, loss, auto
        self.inverse_temperature = operator.inverse_temperature

    def forward(self, queries: Tensor, candidates: Tensor, right: Tensor, left_out: Tensor | None = None) -> Tensor:
        """Compute the loss, (). A query without a right candidate counts as 0.

        queries (Q, d) and candidates (C, d) float32. right (Q, C) bool: candidates of the query's label. left_out
        (Q, C) bool: candidates that are masked out, such as the query itself.
        """
        center = candidates.detach().mean(0)
        scores = -squared_distances(queries - center, candidates - center)  # (Q, C)
        if left_out is not None:
            scores, right = scores.masked_fill(left_out, -torch.inf), right & ~left_out
        beta: Any = self.inverse_temperature
        if self.auto is not None:
            self.auto.observe(scores)
            beta = self.auto.value()
        counts = right.any(1)  # (Q,)
        # A query without a right candidate gets all of them: the sum is k, and torch.where below leaves it out.
        mass = (right | ~counts.unsqueeze(1)).to(scores.dtype)  # (Q, C)
        share = self.operator.rank_probabilities(scores, mass, beta, self.generator).sum(1)  # (Q,)
        losses = -share if self.loss == "mass" else -guarded_log((share / self.operator.k).clamp(max=1))
        return torch.where(counts, losses, 0).mean()


def build_loss(config: dict[str, Any]) -> NeighbourLoss | None:
    """Build the loss of a relaxed top-k of num_candidates scores; None for a baseline. Raises SystemExit."""
    if config["method"] not in RELAXATIONS:
        return None
    operator = losses.build_operator(config, config["num_candidates"], config["k"], sorted=bool(config["sorted"]))
    auto = LIBRARY[config["method"]].auto() if config["inverse_temperature"] == "auto" else None
    return NeighbourLoss(operator, config["loss"], auto)


def build_model(points: Dataset, config: dict[str, Any]) -> nn.ModuleDict:
    """Build the embedding network, and for cross-entropy its linear classifier. Raises SystemExit."""
    if config["method"] == "inputs":
        return nn.ModuleDict({"embed": nn.Flatten()})
    if config["method"] == "pca":
        from sklearn.decomposition import PCA  # this import takes a second

        inputs = torch.cat([points.normalise(part).flatten(1) for part in points.train.inputs.split(EVAL_BATCH)])
        pca = PCA(min(COMPONENTS, *inputs.shape), svd_solver="covariance_eigh").fit(inputs.double().cpu())
        components = nn.Linear(*reversed(pca.components_.shape), bias=False).requires_grad_(False)
        components.weight.copy_(torch.from_numpy(pca.components_))
        return nn.ModuleDict({"embed": nn.Sequential(nn.Flatten(), components)})
    try:
        embed = embedder(config["model"], points.train.inputs.shape[1:], config["dim"], config["hidden_dims"] or ())
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    if config["method"] != CROSS_ENTROPY:
        return nn.ModuleDict({"embed": embed})
    return nn.ModuleDict({"embed": embed, "classify": nn.Linear(config["dim"] or embed.dim, points.num_classes)})


def train(args: argparse.Namespace, seed: int, embeddings: Embeddings | None, processes: Processes) -> None:
    device = processes.device
    config = configuration(args, seed)
    loss_fn = build_loss(config)
    if embeddings:
        config |= embeddings.about(args.data_path)
    run = Run(args, config, IDENTITY, READABLE, processes)
    if not run.begin():
        return

    if embeddings:
        points = points_of_embeddings(embeddings, seed=seed, limit_train=args.limit_train)
    else:
        points = load_points(args.dataset, args.data_dir, seed=seed, limit_train=args.limit_train)
    for name in ("k",) if args.method in UNTRAINED else ("k", "batch_size", "num_candidates"):
        if getattr(args, name) > len(points.train):
            raise SystemExit(f"error: --{name} {getattr(args, name)} exceeds the {len(points.train)} training points")
    torch.manual_seed(seed)
    model = build_model(points, config)
    points, model = points.to(device), model.to(device, memory_format=torch.channels_last)  # faster on a CPU
    optimizer = None
    if args.method not in UNTRAINED:
        optimizer = torch.optim.SGD(model.parameters(), config["lr"], momentum=0.9, weight_decay=args.weight_decay)
    run.resume(model=model, optimizer=optimizer, loss=loss_fn)
    embed = losses.compiled(model["embed"], args.compile, device)

    n_epochs = args.n_epochs if optimizer else 1
    for epoch in range(run.done + 1, n_epochs + 1):
        entry: dict[str, Any] = {"epoch": epoch, "train_loss": None, "train_seconds": 0.0}
        if optimizer:
            entry = train_epoch(epoch, run, points, model, embed, loss_fn, optimizer)
        entry |= evaluate(args, points, model)
        entry |= losses.current_temperature(loss_fn, config["inverse_temperature"])
        run.save(entry, last=epoch == n_epochs, message=f"epoch {epoch}/{n_epochs}")
    sizes = {f"{name}_images": len(getattr(points, name)) for name in ("train", "valid", "test")}
    run.record({"num_classes": points.num_classes, **sizes})


def embed_batch(
    points: Dataset, inputs: Tensor, embed: nn.Module, precision: str, generator: torch.Generator | None = None
) -> Tensor:
    """The embeddings (batch, d), float32, of a batch of inputs. generator: crops and flips them first."""
    if generator is not None:
        inputs = crop_and_flip(inputs, *sample_crops(len(inputs), generator))
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=precision == "bf16"):
        return embed(points.normalise(inputs)).float()


def train_epoch(
    epoch: int, run: Run, points: Dataset, model: nn.ModuleDict, embed: nn.Module, loss_fn: Any, optimizer: Any
) -> dict[str, float]:
    """Train for one epoch, counted from 1: each training point is a query once, except in the last partial batch."""
    started, args, config, train = time.perf_counter(), run.args, run.config, points.train
    device = train.labels.device
    num_steps, seed = len(train) // args.batch_size, config["seed"]  # the last partial batch is dropped
    # Two independent orders; the candidates start again if a step has more of them than queries.
    queries, candidates = (epoch_order(len(train), seed, 2 * epoch + number).to(device) for number in (0, 1))  # (N,)
    generator = epoch_generator(seed, 2 * epoch, device) if args.dataset in AUGMENTED else None
    if loss_fn is not None:
        losses.seed_noise(loss_fn, device, seed, epoch)
    turn = torch.arange(args.num_candidates, device=device)
    step_losses = []

    def embedded(rows: Tensor) -> Tensor:
        return embed_batch(points, train.inputs[rows], embed, args.precision, generator)

    model.train()
    for step in tqdm(range(num_steps), f"epoch {epoch}", leave=False, disable=None):
        progress = (epoch - 1 + step / num_steps) / args.n_epochs
        asked = queries[step * args.batch_size : (step + 1) * args.batch_size]  # (Q,)
        others = candidates[(step * args.num_candidates + turn) % len(train)]  # (C,)
        labels = train.labels[asked]
        if loss_fn is None:
            loss = cross_entropy(model["classify"](embedded(asked)), labels)
        else:
            losses.set_temperature(loss_fn, config["inverse_temperature"], progress)
            right = labels.unsqueeze(1) == train.labels[others]  # (Q, C)
            same = None if args.self_match else asked.unsqueeze(1) == others  # (Q, C)
            loss = loss_fn(embedded(asked), embedded(others), right, same)

        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step_losses.append(loss.detach())
    mean_loss = math.fsum(torch.stack(step_losses).tolist()) / num_steps
    losses.check_finite(mean_loss, f"in epoch {epoch}")
    return {"epoch": epoch, "train_loss": mean_loss, "train_seconds": time.perf_counter() - started}


@torch.no_grad()
def evaluate(args: argparse.Namespace, points: Dataset, model: nn.ModuleDict) -> dict[str, float]:
    """The top-1 accuracies (fractions) on the whole of valid and test."""
    started = time.perf_counter()
    model.eval()

    def embedded(samples: Split) -> Iterator[Tensor]:
        for part in samples.inputs.split(EVAL_BATCH):
            yield embed_batch(points, part, model["embed"], args.precision)

    asked = torch.cat([*embedded(points.valid), *embedded(points.test)])  # (Q, d)
    if not asked.isfinite().all():
        raise SystemExit("error: an embedding is not finite; nothing is recorded. Try a smaller --lr")
    if args.prediction == "network":
        predicted = model["classify"](asked).argmax(1)  # (Q,)
    else:
        predicted = majority(points.train.labels[nearest(asked, embedded(points.train), args.k)])  # (Q,)
    hits = predicted == torch.cat([points.valid.labels, points.test.labels])  # (Q,)
    valid, test = hits.split([len(points.valid), len(points.test)])
    accuracies = {"valid_top1": int(valid.sum()) / len(valid), "test_top1": int(test.sum()) / len(test)}
    return {**accuracies, "eval_seconds": time.perf_counter() - started}


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
        tile, merged = tile - centre, []
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
    processes = Processes(args.device, args.threads)
    if processes.count > 1:
        raise SystemExit("error: train_knn.py is one process: leave torchrun out")
    embeddings = None
    if args.data_path:
        embeddings = load_embeddings(download(args.data_path, args.cache_dir, args.sha256, args.requester_pays))
    for seed in args.seed:
        train(args, seed, embeddings, processes)
    return 0


if __name__ == "__main__":
    main()
