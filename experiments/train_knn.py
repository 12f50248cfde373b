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
test accuracy where validation accuracy was best. Baselines: kNN on the inputs, on 50 principal components, on the
embeddings of a network trained by cross-entropy, and that network itself (--prediction network).

Two oddities of the published code are mended, and are switches: there a query may meet itself among the candidates
(--self_match), and CIFAR's neighbours are augmented at test time (--augmented_neighbours). docs/knn.md has the
published settings and what is known of the numbers.

The row is added to results/knn.csv (--results); config.json, epochs.csv and the checkpoint lie in
results/runs/<run id>/. Stopping, killing, skipping, --force and --seeds are as in train_cifar100.py.
"""

if __name__ == "__main__":  # from here on, what goes wrong is a sentence
    from data import program

    program.begin()

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import InstanceOf
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from typing_extensions import NotRequired

from data.cifar100 import DatasetUnavailableError, epoch_generator, epoch_order
from data.points import Points, Samples, load_points, points_of_store
from experiments.shared import command_line as cli
from experiments.shared.checkpoint import (
    PREVIOUS,
    RUN,
    history_of,
    random_states,
    remove_checkpoints,
    restore_random_states,
    save_checkpoint,
)
from experiments.shared.environment import (
    describe_environment,
    git_commit,
    keep_freed_memory,
    peak_memory_mib,
    set_up_device,
)
from experiments.shared.finetune_flags import open_store_of
from experiments.shared.loss_state import anneal, seed_noise, state_of, temperature_of
from experiments.shared.metrics import hit_fractions, summary
from experiments.shared.neighbours import majority, nearest, neighbour_loss
from experiments.shared.ranks import Ranks
from experiments.shared.run_record import open_run, run_id, utc_now, write_config, write_history, write_row
from experiments.shared.seed_processes import run_seeds
from experiments.shared.train_knn_flags import COMPONENTS, CROSS_ENTROPY, UNTRAINED, configuration, parse_arguments
from experiments.shared.training_run import compiled, diverged, finished_line, recorded, restoring, saved_state, say
from models.embedders import embedder
from topk_losses import TopKOperator

# What makes it another experiment: see train_cifar100.py.
IDENTITY = (
    *("dataset", "embeddings", "limit_train", "limit_test", "model", "dim", "hidden_dims", "precision"),
    *("method", "loss", "k", "inverse_temperature", "distribution", "art_lambda", "sorted", "prediction"),
    *("lr", "weight_decay", "batch_size", "num_candidates", "n_epochs", "seed", "self_match", "augmented_neighbours"),
)
READABLE = "{dataset}{embeddings}-{method}-k{k}-{n_epochs}epochs-seed{seed}"  # the run id, before its hash
# What its checkpoints hold, among others.
CHECKPOINT = {
    **RUN,
    "history": history_of(("epoch", "valid_top1", "test_top1", "train_seconds", "eval_seconds", "peak_memory_mib")),
    "random_states": dict[str, InstanceOf[Tensor]],
    "loss": NotRequired[dict[str, Any]],
}
EVAL_BATCH = 1000  # points that are embedded at once, and a tile of the search: the result does not depend on it


def train(args: argparse.Namespace, ranks: Ranks) -> int:
    """Train one configuration with --seed and record its row; return the exit status."""
    # What can be refused is refused before a folder is made or data downloaded.
    device = cli.training_device(args.device, ranks)
    operator, flags = configuration(args)
    load, of_data = source_of(args)
    flags |= {**of_data, "device": str(device)}
    name = run_id({flag: flags[flag] for flag in IDENTITY}, READABLE)
    folder = args.results.parent / "runs" / name
    if recorded(args.results, name, args.force):
        return 0

    # Seed, then data, whole on the device (images as uint8), and what embeds them.
    set_up_device(device, args.threads, args.deterministic)
    keep_freed_memory()
    flags["threads"] = torch.get_num_threads()
    torch.manual_seed(args.seed)
    points = load().to(device)
    model = network(points, flags).to(device)

    with open_run(folder):
        # Asked again: another process may have finished this configuration before the folder was ours.
        if recorded(args.results, name, args.force):
            return 0
        environment, commit = describe_environment(device), git_commit()
        write_config(folder, {"run_id": name, **flags, **environment, "git_commit": commit})

        # Optimizer.
        parameters = [each for each in model.parameters() if each.requires_grad]
        optimizer = None
        if parameters:
            optimizer = torch.optim.SGD(parameters, flags["lr"], momentum=0.9, weight_decay=args.weight_decay)
        operator = operator and operator.to(device)
        # Of what is not trained, neither precision nor epochs are a choice.
        n_epochs, bf16 = (args.n_epochs, args.precision == "bf16") if optimizer else (1, False)
        autocast = partial(torch.autocast, device.type, torch.bfloat16, enabled=bf16)
        embed = compiled(model["embed"], device) if args.compile and optimizer else model["embed"]

        # Resume where the last finished epoch ended.
        history, started_utc, times_resumed, commits = [], utc_now(), 0, [commit]
        saved = saved_state(folder, args.results, name, CHECKPOINT)
        if saved:
            with restoring(folder):
                model.load_state_dict(saved["model"])
                if optimizer and saved["optimizer"] is not None:
                    optimizer.load_state_dict(saved["optimizer"])
                if saved.get("loss"):
                    operator.load_state_dict(saved["loss"])
                restore_random_states(saved["random_states"], device)
            history, started_utc = saved["history"], saved["started_utc"]
            times_resumed = saved["times_resumed"] + 1
            commits = list(dict.fromkeys([*saved["git_commits"], commit]))
            write_history(folder, history)
        where = f"continuing after epoch {len(history)} of {n_epochs}" if saved else "beginning"
        say(f"{name}: {where} on {environment['device_name']}, {flags['threads']} threads")

        # Loop.
        on_terminal = sys.stderr.isatty() and len(args.seeds) == 1
        for epoch in range(len(history) + 1, n_epochs + 1):
            trained: dict[str, Any] = {"epoch": epoch, "train_loss": None, "train_seconds": 0.0}
            if optimizer:
                trained = train_epoch(epoch, model, embed, operator, optimizer, points, autocast, args, on_terminal)
            evaluated = evaluate(epoch, model, points, autocast, args)
            temperature = temperature_of(operator, flags["inverse_temperature"])
            history.append({**trained, **evaluated, **temperature, "peak_memory_mib": peak_memory_mib(device)})
            state = {
                "model": model.state_dict(),
                # Nothing continues a finished run: its file keeps the weights alone.
                "optimizer": optimizer.state_dict() if epoch < n_epochs else None,
                "loss": state_of(operator),
                "random_states": random_states(device),
                "history": history,
                "started_utc": started_utc,
                "times_resumed": times_resumed,
                "git_commits": commits,
            }
            save_checkpoint(folder, state)
            write_history(folder, history)
            say(epoch_line(history[-1], n_epochs, args))

        # Record.
        measured = summary(history, "epoch")
        trained_images = len(history) * (len(points.train) // args.batch_size) * args.batch_size if optimizer else None
        del flags["results"], flags["force"]  # the row is in the one, and of a repetition nothing else is new
        row = {
            "run_id": name,
            **flags,
            "num_classes": points.num_classes,
            "train_images": len(points.train),
            "valid_images": len(points.valid),
            "test_images": len(points.test),
            **measured,
            "last_train_loss": history[-1]["train_loss"],
            "last_inverse_temperature": history[-1].get("inverse_temperature"),
            "images_per_second": trained_images and trained_images / measured["train_seconds"],
            **environment,
            "git_commit": "+".join(filter(None, commits)),
            "times_resumed": times_resumed,
            "started_utc": started_utc,
            "finished_utc": utc_now(),
        }
        # First, so that a kill in between leaves nothing behind: the run is finished and saved, with its weights.
        remove_checkpoints(folder, (PREVIOUS,))
        write_row(args.results, row)
    say(finished_line(row, "epoch", args.results, folder))
    return 0


def source_of(args: argparse.Namespace) -> tuple[Callable[[], Points], dict[str, Any]]:
    """Return what loads the points onto the CPU, and the columns that say which they are.

    Either raises CommandLineError or RunError. A store is opened at once, to be known by its content.
    """
    limits = {name: limit for name, limit in (("train", args.limit_train), ("test", args.limit_test)) if limit}
    if args.data_path is None:
        load = partial(load_points, args.dataset, args.data_dir, mirror=args.mirror, seed=args.seed, limits=limits)
        columns = {"embeddings": None}
    else:
        store = open_store_of(args)
        load = partial(points_of_store, store, seed=args.seed, limits=limits)
        columns = {
            "embeddings": f"{store.num_classes}x{store.dim}-{store.fingerprint[:8]}",
            "embedding_dtype": store["train"].dtype_name,
            "embeddings_checksum": store.checksum,
            "backbone": store.backbone,
            "resolution": store.resolution,
            "data_path": cli.portable(Path(args.data_path)) if Path(args.data_path).exists() else args.data_path,
        }

    def refusing() -> Points:
        try:
            points = load()
        except DatasetUnavailableError as error:
            raise cli.RunError(str(error)) from None
        except ValueError as error:
            raise cli.CommandLineError(str(error)) from None
        drawn = () if args.method in UNTRAINED else ("batch_size", "num_candidates")
        for name in ("k", *drawn):
            if getattr(args, name) > len(points.train):
                raise cli.CommandLineError(
                    f"--{name} must not exceed the {len(points.train)} training points, got {getattr(args, name)}"
                )
        return points

    return refusing, columns


def network(points: Points, flags: dict[str, Any]) -> nn.ModuleDict:
    """Return what embeds, freshly initialised, and of cross-entropy alone what classifies the embeddings; on the CPU.

    Raises CommandLineError for a model that does not take these inputs.
    """
    if flags["method"] == "inputs":
        return nn.ModuleDict({"embed": nn.Flatten()})
    if flags["method"] == "pca":
        return nn.ModuleDict({"embed": nn.Sequential(nn.Flatten(), principal_components(points, COMPONENTS))})
    try:
        embed = embedder(flags["model"], points.input_shape, flags["dim"], flags["hidden_dims"] or ())
    except ValueError as error:
        raise cli.CommandLineError(f"--model: {error}") from None
    if flags["method"] != CROSS_ENTROPY:
        return nn.ModuleDict({"embed": embed})
    return nn.ModuleDict({"embed": embed, "classify": nn.Linear(flags["dim"] or embed.dim, points.num_classes)})


def principal_components(points: Points, count: int) -> nn.Linear:
    """Return the map onto the `count` directions of largest variance of the training inputs, about their mean."""
    num_inputs, batches = math.prod(points.input_shape), points.train.inputs.split(EVAL_BATCH)
    total = points.shift.new_zeros(num_inputs, dtype=torch.float64)
    products = points.shift.new_zeros(num_inputs, num_inputs, dtype=torch.float64)
    for batch in batches:
        inputs = points.inputs(batch).flatten(1).double()  # (batch, inputs)
        total += inputs.sum(0)
        products += inputs.T @ inputs
    mean = total / len(points.train)
    _, directions = torch.linalg.eigh(products / len(points.train) - mean.outer(mean))  # columns, of rising variance
    components = nn.Linear(num_inputs, min(count, num_inputs), bias=False).requires_grad_(False)
    components.weight.copy_(directions[:, -components.out_features :].T)
    return components


def train_epoch(
    epoch: int,
    model: nn.ModuleDict,
    embed: nn.Module,
    operator: TopKOperator | None,
    optimizer: torch.optim.Optimizer,
    points: Points,
    autocast: partial,
    args: argparse.Namespace,
    on_terminal: bool,
) -> dict[str, float]:
    """Train for one epoch, counted from 1: each training point is a query once, but for the last partial batch.

    operator: None for cross-entropy. Orders and augmentation depend on seed and epoch alone. Losses stay on the device
    until the epoch is over, so that no step waits for a GPU. Returns mean loss, seconds and images/s. Raises RunError
    if a loss is not finite: at once on the CPU, else at the end of the epoch, before anything is saved.
    """
    started = time.perf_counter()
    train, device = points.train, points.train.labels.device
    # Two independent shuffles; candidates go round where a step has more of them than queries.
    queries, candidates = (epoch_order(len(train), args.seed, 2 * epoch + each).to(device) for each in (0, 1))  # (N,)
    generator = epoch_generator(args.seed, 2 * epoch, device) if points.augmented else None
    num_steps = len(train) // args.batch_size
    losses = torch.zeros(num_steps, device=device)
    turn = torch.arange(args.num_candidates, device=device)
    model.train()

    def embedded(rows: Tensor) -> Tensor:
        inputs = points.inputs(train.inputs[rows], generator)
        with autocast():
            return embed(inputs).float()  # (rows, d)

    if operator is not None:
        seed_noise(operator, device, args.seed, epoch)
    for step in tqdm(range(num_steps), desc=f"epoch {epoch}", unit="batch", leave=False, disable=not on_terminal):
        if args.compile and device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad(set_to_none=True)
        of_queries = queries[step * args.batch_size : (step + 1) * args.batch_size]  # (Q,)
        labels = train.labels[of_queries]
        if operator is None:
            loss = cross_entropy(model["classify"](embedded(of_queries)), labels)
        else:
            of_candidates = candidates[(step * args.num_candidates + turn) % len(train)]  # (C,)
            right = labels.unsqueeze(1) == train.labels[of_candidates]  # (Q, C)
            anneal(operator, args.inverse_temperature, (epoch - 1 + step / num_steps) / args.n_epochs)
            same = None if args.self_match else of_queries.unsqueeze(1) == of_candidates  # (Q, C)
            loss = neighbour_loss(operator, embedded(of_queries), embedded(of_candidates), right, same, args.loss)
        if device.type == "cpu" and not math.isfinite(loss.item()):
            raise diverged(args.method, loss.item(), f"in epoch {epoch}, step {step + 1} of {num_steps}")
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach()
    losses = losses.tolist()  # the one wait for a GPU
    if operator is not None:
        operator.check_convergence()
    for step, value in enumerate(losses):
        if not math.isfinite(value):
            raise diverged(args.method, value, f"in epoch {epoch}, step {step + 1} of {num_steps}")
    seconds = time.perf_counter() - started
    return {
        "epoch": epoch,
        "train_loss": math.fsum(losses) / num_steps,
        "train_seconds": seconds,
        "images_per_second": num_steps * args.batch_size / seconds,
    }


@torch.no_grad()
def evaluate(
    epoch: int, model: nn.ModuleDict, points: Points, autocast: partial, args: argparse.Namespace
) -> dict[str, float]:
    """Return the top-1 accuracies (fractions) of the whole validation and test splits, and the seconds.

    Raises RunError if an embedding is not finite.
    """
    started = time.perf_counter()
    model.eval()
    device = points.train.labels.device
    # Drawn apart from the training's. The published code leaves the test images as they are.
    generator = epoch_generator(args.seed, 2 * epoch + 1, device) if args.augmented_neighbours else None

    def embedded(samples: Samples, generator: torch.Generator | None) -> Iterator[Tensor]:
        for part in samples.inputs.split(EVAL_BATCH):
            inputs = points.inputs(part, generator)
            with autocast():
                yield model["embed"](inputs).float()  # (part, d)

    asked = torch.cat([*embedded(points.valid, generator), *embedded(points.test, None)])  # (Q, d)
    if not bool(asked.isfinite().all()):
        raise cli.RunError(f"an embedding is not finite after epoch {epoch}; no row is written. Try a smaller --lr")
    if args.prediction == "network":
        predicted = model["classify"](asked).argmax(1)  # (Q,)
    else:
        rows = nearest(asked, embedded(points.train, generator), args.k)  # (Q, k)
        predicted = majority(points.train.labels[rows])  # (Q,)
    result = {}
    for name, split, part in zip(
        ("valid", "test"), (points.valid, points.test), predicted.split([len(points.valid), len(points.test)])
    ):
        result |= hit_fractions(name, [int((part == split.labels).sum())], len(split))  # top-1 alone
    return {**result, "eval_seconds": time.perf_counter() - started}


def epoch_line(epoch: dict[str, Any], n_epochs: int, args: argparse.Namespace) -> str:
    """Return one line on a finished epoch, accuracies as fractions."""
    seed = f"seed {args.seed} " if len(args.seeds) > 1 else ""
    trained = "" if epoch["train_loss"] is None else f"train loss {epoch['train_loss']:.4f}  "
    return (
        f"{seed}epoch {epoch['epoch']}/{n_epochs}  {trained}"
        f"valid top-1 {epoch['valid_top1']:.4f}  test top-1 {epoch['test_top1']:.4f}  "
        f"trained {epoch['train_seconds']:.1f} s, evaluated {epoch['eval_seconds']:.1f} s"
    )


def train_seeds(args: argparse.Namespace, ranks: Ranks) -> int:
    """Train one configuration with each seed in a process of its own; return the exit status."""
    # What can be refused is refused here, once.
    cli.training_device(args.device, ranks)
    _, flags = configuration(args)
    load, of_data = source_of(args)
    unfinished = []
    for seed in args.seeds:
        name = run_id({flag: {**flags, **of_data, "seed": seed}[flag] for flag in IDENTITY}, READABLE)
        if not recorded(args.results, name, args.force):
            unfinished.append(argparse.Namespace(**{**vars(args), "seed": seed}))
    if not unfinished:
        return 0
    load()
    return run_seeds(train_one_seed, unfinished, len(args.seeds))


def train_one_seed(args: argparse.Namespace) -> int:
    """The process of one seed; return its exit status."""
    return cli.finish(lambda ranks: train(args, ranks), stopped="", name=f"seed {args.seed}: ")


def main(argv: list[str] | None = None) -> int:
    """Run the script; return its exit status (see experiments/shared/command_line.py)."""

    def run(ranks: Ranks) -> int:
        args = parse_arguments(argv)
        if ranks.count > 1:
            raise cli.CommandLineError(
                f"train_knn.py is one process, and torchrun has started {ranks.count}: leave torchrun out"
            )
        return train(args, ranks) if len(args.seeds) == 1 else train_seeds(args, ranks)

    return cli.finish(run)


if __name__ == "__main__":
    program.end(main())
