"""Tables 2, 3 and 5: new heads on frozen ImageNet-1K embeddings, trained with each loss and each P_K.

    python experiments/finetune_imagenet.py --method softmax_cross_entropy --p_k 1. 0. 0. 0. 0.
    python experiments/finetune_imagenet.py -d efficientnet-l2-800 --method splitter_selection \\
        --distribution logistic --inverse_temperature .5 --p_k .25 .0 .0 .0 .75
    python experiments/finetune_imagenet.py -d FOLDER --method neuralsort --p_k .5 0 0 0 .5 --seeds 0 1 2

-d takes a published file by its short name (downloaded once, 11 to 50 GB), a torch file, an address or a store, such
as experiments/extract_embeddings.py makes of your own images.

Protocol: a random 50,000 of the training rows for validation, one linear layer, m 16, batch 500, Adam with learning
rate 10^-4.5, 20 epochs; evaluation at the first step of an epoch, every 100 steps and at its last; a row reports test
accuracy where validation accuracy was best, per k. --seeds trains several heads in one pass over the data.

One row per seed is added to results/imagenet1k.csv (--results); config.json, evaluations.csv and the checkpoint lie
in results/runs/<run id>/. Stopping, killing, skipping and --force are as in train_cifar100.py.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from data.embeddings import MODES, EmbeddingBatches, EmbeddingError, EmbeddingStore, open_or_fetch, split_rows
from experiments import command_line as cli
from experiments.checkpoint import PREVIOUS, remove_checkpoints
from experiments.environment import (
    ROOT,
    check_compiler,
    describe_environment,
    git_commit,
    peak_memory_mib,
    resolve_device,
    set_up_device,
)
from experiments.head_runs import HeadRun, Stack, resume, stacks_of
from experiments.metrics import TOP_K, count_hits, hit_fractions, summary
from experiments.run_record import open_run, run_id, utc_now, write_config, write_row
from experiments.training_run import diverged, finished_line, recorded, say
from topk_losses import TopKCrossEntropyLoss

# What makes it another experiment: see train_cifar100.py. The data are known by their content, not by their place.
IDENTITY = (
    *("embeddings", "limit_train", "limit_test", "num_valid", "split_seed", "order_seed"),
    *("hidden_dims", "apply_relu", "apply_dropout", "precision"),
    *("method", "p_k", "m", "inverse_temperature", "distribution", "art_lambda", "top1_mode"),
    *("implementation", "lr", "batch_size", "n_epochs", "eval_freq", "seed"),
)
TENSORS = ("train_embeddings", "train_labels", "test_embeddings", "test_labels")
READABLE = "{embeddings}-{method}-pk_{p_k}-{n_epochs}epochs-seed{seed}"  # the run id, before its hash
SAVE_SECONDS = 600  # within an epoch, too, a checkpoint is written at the first evaluation after this time


@dataclass(frozen=True)
class Defaults:
    """What a data set's published protocol sets. num_classes: so that flags can be refused before a download."""

    table: str
    prog: str
    data_path: str
    results: str
    num_classes: int
    m: int
    nloglr: float
    n_epochs: int
    num_valid: int


IMAGENET_1K = Defaults(
    table="ImageNet-1K (Tables 2, 3 and 5)",
    prog="finetune_imagenet.py",
    data_path="wsl-32x48d-320",
    results="imagenet1k.csv",
    num_classes=1000,
    m=16,
    nloglr=4.5,
    n_epochs=20,
    num_valid=50_000,
)


def parse_arguments(argv: list[str] | None = None, defaults: Defaults = IMAGENET_1K) -> argparse.Namespace:
    """Return the flags, each checked on its own. Raises CommandLineError."""
    parser = cli.Parser(
        prog=defaults.prog, description=f"Train heads on frozen embeddings of {defaults.table} with a top-k loss."
    )
    cli.add_loss_flags(parser, top1_mode="sm", m=defaults.m)
    seeds = cli.add_optimization_flags(
        parser,
        n_epochs=defaults.n_epochs,
        batch_size=500,
        nloglr=defaults.nloglr,
        seed_help="of initialisation, dropout and, unless --order_seed is given, order",
    )
    seeds.add_argument(
        "--seeds", type=cli.seed, nargs="+", metavar="S", help="train a head for each in one pass; one row each"
    )
    group = parser.add_argument_group("data and model")
    group.add_argument(
        "--data_path",
        "-d",
        default=defaults.data_path,
        metavar="SOURCE",
        help="embeddings: a short name (python -m data.embeddings list), a torch file, a store, or the s3:// or "
        "https:// address of one (%(default)s)",
    )
    for key in TENSORS:
        group.add_argument(f"--{key}", metavar="KEY", help="its name in a torch file of no published layout")
    group.add_argument("--cache_dir", type=Path, metavar="DIR", help="of downloads; $TOPK_CACHE or data/downloads")
    group.add_argument("--endpoint_url", metavar="URL", help="of the S3 server")
    group.add_argument(
        "--batches",
        type=cli.choice("batches", MODES),
        default="auto",
        help=f"where the training rows are kept: {', '.join(MODES)}; auto takes the first that holds them; the batches "
        "are the same (%(default)s)",
    )
    group.add_argument(
        "--num_valid",
        type=cli.count,
        metavar="N",
        help=f"training rows that validate; default {defaults.num_valid}, or 5%% of a set of fewer than "
        f"{20 * defaults.num_valid} rows",
    )
    group.add_argument(
        "--limit_train", type=cli.count, metavar="N", help="use N random training rows, for a quick look"
    )
    group.add_argument("--limit_test", type=cli.count, metavar="N", help="use N random test rows, for a quick look")
    group.add_argument("--split_seed", type=cli.seed, default=0, help="of the rows that validate (%(default)s)")
    group.add_argument(
        "--order_seed",
        type=lambda text: text if text == "own" else cli.seed(text),
        metavar="S",
        help="of the order of the training rows: a number, or own for each head's seed; default: the first seed, "
        "so that the heads of a pass share their batches",
    )
    group.add_argument(
        "--hidden_dims", type=cli.count, nargs="+", metavar="D", help="widths of hidden layers; none without it"
    )
    group.add_argument("--apply_relu", action="store_true", help="ReLU on the embeddings")
    group.add_argument("--apply_dropout", action="store_true", help="dropout of .5 on the embeddings in training")
    group.add_argument(
        "--eval_freq", type=cli.count, default=100, metavar="STEPS", help="steps between evaluations (%(default)s)"
    )
    cli.add_machine_flags(parser)
    cli.add_record_flags(parser, results=ROOT / "results" / defaults.results)
    args = parser.parse_args(argv)
    args.seeds = args.seeds or [args.seed]
    if len(set(args.seeds)) < len(args.seeds):
        raise cli.CommandLineError(f"--seeds must differ, got {' '.join(map(str, args.seeds))}")
    return args


def finetune(args: argparse.Namespace, defaults: Defaults) -> int:
    """Train one configuration with each seed and record the rows; return the exit status."""
    # What can be refused is refused before data is downloaded: tried with as many classes as the flags may need.
    try:
        device = resolve_device(args.device)
        loss_of(args, defaults, max(defaults.num_classes, args.m or 0), torch.device("cpu"))
        if args.compile:
            check_compiler()
    except ValueError as error:
        raise cli.CommandLineError(str(error)) from None

    # Data: the store, and the loss for its classes.
    store = open_store_of(args)
    train_rows, valid_rows, test_rows = rows_of(store, args, defaults)
    try:
        loss_fn, settings = loss_of(args, defaults, store.num_classes, device)
    except ValueError as error:
        raise cli.CommandLineError(
            f"{error} (the labels of {args.data_path} have {store.num_classes} classes)"
        ) from None

    # Names and folders, one per seed, and whether there is anything to do.
    flags = {
        **vars(args),
        **settings,
        **cli.learning_rate(args, defaults.nloglr),
        "embeddings": f"{store.num_classes}x{store.dim}-{store.fingerprint[:8]}",
        "num_valid": len(valid_rows),
        "device": str(device),
        "data_path": cli.portable(Path(args.data_path)) if Path(args.data_path).exists() else args.data_path,
    }
    # Of these a repetition or another place changes nothing that is reported.
    for flag in ("results", "force", "seeds", "cache_dir", "endpoint_url", *TENSORS):
        del flags[flag]
    runs = []
    for seed in args.seeds:
        order_seed = args.seeds[0] if args.order_seed is None else seed if args.order_seed == "own" else args.order_seed
        name = run_id({flag: {**flags, "seed": seed, "order_seed": order_seed}[flag] for flag in IDENTITY}, READABLE)
        runs.append(HeadRun(seed, order_seed, name, args.results.parent / "runs" / name))
    unfinished = [run for run in runs if not recorded(args.results, run.name, args.force)]
    if not unfinished:
        return 0

    # Batches.
    set_up_device(device, args.threads, args.deterministic)
    flags["threads"] = torch.get_num_threads()
    batches = EmbeddingBatches(store["train"], args.batch_size, device, rows=train_rows, mode=args.batches)
    splits = {
        "valid": EmbeddingBatches(store["train"], args.batch_size, device, rows=valid_rows),
        "test": EmbeddingBatches(store["test"], args.batch_size, device, rows=test_rows),
    }
    say(f"{store.path}: {len(train_rows)} training rows, {len(valid_rows)} validate, {len(test_rows)} test")
    say("\n".join(f"  {name}: {each.description}" for name, each in {"train": batches, **splits}.items()))

    with ExitStack() as held:
        for run in list(unfinished):
            held.enter_context(open_run(run.folder))
            # Asked again: another process may have finished this configuration before the folder was ours.
            if recorded(args.results, run.name, args.force):
                unfinished.remove(run)
        environment, commit = describe_environment(device), git_commit()

        # Resume each head where it stood when it was saved last.
        for run in unfinished:
            row_flags = {**flags, "seed": run.seed, "order_seed": run.order_seed}
            write_config(run.folder, {"run_id": run.name, **row_flags, **environment, "git_commit": commit})
            resume(run, args.results)
            run.commits = list(dict.fromkeys([*run.commits, commit]))
            where = f"continuing after step {run.steps} of {args.n_epochs * len(batches)}" if run.steps else "beginning"
            say(f"{run.name}: {where} on {environment['device_name']}, {flags['threads']} threads")

        # Model: every head has this shape.
        shape = {
            "embedding_dim": store.dim,
            "num_classes": store.num_classes,
            "hidden_dims": args.hidden_dims or (),
            "apply_relu": args.apply_relu,
            "apply_dropout": args.apply_dropout,
        }

        # Loop: heads that stand at the same step go on together, those that lag behind first.
        last_step = args.n_epochs * len(batches)
        together: list[HeadRun] = []
        while (step := min((run.steps for run in unfinished), default=last_step)) < last_step:
            group = [run for run in unfinished if run.steps == step]
            if group != together:
                together = group
                stacks = stacks_of(group, shape, flags["lr"], device, args.compile)
                # The loss is compiled with the heads' number of rows, and evaluated eagerly.
                training_loss = torch.compile(loss_fn) if args.compile and args.implementation == "ours" else loss_fn
            train_epoch(stacks, training_loss, loss_fn, batches, splits, args)

        # Record.
        for run in unfinished:
            final_epoch = [each for each in run.history if each["epoch"] == args.n_epochs]
            loss_sum = math.fsum(each["train_loss"] * each["train_steps"] for each in final_epoch)
            measured = summary(run.history, "step")
            row = {
                "run_id": run.name,
                **flags,
                "seed": run.seed,
                "order_seed": run.order_seed,
                "embedding_dtype": store["train"].dtype_name,
                "backbone": store.backbone,
                "resolution": store.resolution,
                "batch_source": batches.mode,
                "num_heads": run.history[-1]["num_heads"],
                "num_classes": store.num_classes,
                "train_images": len(train_rows),
                "valid_images": len(valid_rows),
                "test_images": len(test_rows),
                **measured,
                "last_train_loss": loss_sum / len(batches),
                "images_per_second": last_step * args.batch_size / measured["train_seconds"],
                **environment,
                "git_commit": "+".join(filter(None, run.commits)),
                "times_resumed": run.times_resumed,
                "started_utc": run.started_utc,
                "finished_utc": utc_now(),
            }
            write_row(args.results, row)
            remove_checkpoints(run.folder, (PREVIOUS,))
            say(finished_line(row, "step", args.results, run.folder))
    return 0


def loss_of(
    args: argparse.Namespace, defaults: Defaults, num_classes: int, device: torch.device
) -> tuple[nn.Module, dict[str, Any]]:
    """Return the loss that the flags describe for so many classes, and its settings. Raises ValueError."""
    # The published m is for thousands of classes; a set of your own may have fewer.
    m = defaults.m if num_classes > defaults.m else None
    settings = cli.loss_settings(args, top1_mode="sm", inverse_temperatures={}, m=m)
    reduction = "none" if args.implementation == "ours" else "mean"
    return cli.build_loss(args.implementation, settings, num_classes, device, reduction), settings


def open_store_of(args: argparse.Namespace) -> EmbeddingStore:
    """Return the store that --data_path names, downloaded and converted if need be.

    Raises CommandLineError for a name that does not exist, RunError for what cannot be had or used.
    """
    if not Path(args.data_path).is_dir():
        from data.object_store import ObjectStoreError, resolve  # boto3 takes half a second

        try:
            resolve(args.data_path)
        except ObjectStoreError as error:
            raise cli.CommandLineError(f"--data_path: {error}") from None
    try:
        keys = {name: getattr(args, name) for name in TENSORS if getattr(args, name)}
        store = open_or_fetch(args.data_path, args.cache_dir, endpoint_url=args.endpoint_url, keys=keys or None)
        store["train"], store["test"]  # named if they are missing
    except EmbeddingError as error:
        raise cli.RunError(str(error)) from None
    return store


def rows_of(store: EmbeddingStore, args: argparse.Namespace, defaults: Defaults) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows that train, validate (both of the split train) and test, each (R,) int64, ascending.

    Raises CommandLineError where the flags ask for more than there is.
    """
    chosen = {}
    for name, limit in (("train", args.limit_train), ("test", args.limit_test)):
        num_rows = len(store[name])
        if limit is not None and limit > num_rows:
            raise cli.CommandLineError(f"--limit_{name} must not exceed the {num_rows} rows of {name}, got {limit}")
        everything = limit is None or limit == num_rows
        chosen[name] = torch.arange(num_rows) if everything else split_rows(num_rows, limit, args.split_seed)[1]
    num_rows = len(chosen["train"])
    published = defaults.num_valid if num_rows >= 20 * defaults.num_valid else max(num_rows // 20, 1)
    try:
        train, valid = split_rows(num_rows, args.num_valid or published, args.split_seed)
    except ValueError as error:
        raise cli.CommandLineError(f"--num_valid: {error}") from None
    if len(train) < args.batch_size:
        raise cli.CommandLineError(
            f"--batch_size must not exceed the {len(train)} training rows, since the last partial batch is dropped, "
            f"got {args.batch_size}"
        )
    return chosen["train"][train], chosen["train"][valid], chosen["test"]


def train_epoch(
    stacks: Sequence[Stack],
    training_loss: nn.Module,
    loss_fn: nn.Module,
    batches: EmbeddingBatches,
    splits: dict[str, EmbeddingBatches],
    args: argparse.Namespace,
) -> None:
    """Train heads that stand at the same step to the end of its epoch, evaluating and saving on the way.

    Losses stay on the device until an evaluation, so that no step waits for a GPU. Raises RunError if a loss is not
    finite: at once on the CPU, before the next evaluation on a GPU.
    """
    group = [run for stack in stacks for run in stack.runs]
    device, num_steps = batches.device, len(batches)
    epoch, start = group[0].steps // num_steps + 1, group[0].steps % num_steps
    autocast = partial(torch.autocast, device.type, torch.bfloat16, enabled=args.precision == "bf16")
    # Heads with the same order share each batch; otherwise each has its own.
    orders = list(dict.fromkeys(run.order_seed for run in group))
    streams = zip(*(batches.epoch(epoch, start=start, seed=seed) for seed in orders))
    on_terminal = sys.stderr.isatty()
    bar = tqdm(streams, f"epoch {epoch}", num_steps, initial=start, unit="batch", leave=False, disable=not on_terminal)
    saved_at, started = time.monotonic(), time.perf_counter()
    losses: list[Tensor] = []  # of the steps since the last evaluation, each (heads,)
    for step, parts in enumerate(bar, start + 1):
        parts = {order: (embeddings.float(), labels) for order, (embeddings, labels) in zip(orders, parts)}
        of_stacks = []  # losses of this step, (heads of the stack,) each
        for stack in stacks:
            seeds = [run.seed for run in stack.runs]
            embeddings, labels = batch_of(stack, parts)
            kept = stack.heads.dropout_mask(args.batch_size, seeds, (epoch - 1) * num_steps + step)
            with autocast():
                logits = stack.training(embeddings, kept)  # (heads, batch, n)
            loss = mean_losses(training_loss, logits.float(), labels, args.implementation)  # (heads,)
            if device.type == "cpu":
                check_finite(loss, stack.runs, args.method, f"in epoch {epoch}, step {step} of {num_steps}")
            stack.optimizer.zero_grad(set_to_none=True)
            loss.sum().backward()  # the heads share no weight: each gets the gradient of its own loss
            stack.optimizer.step()
            of_stacks.append(loss.detach())
        losses.append(torch.cat(of_stacks))
        if not (step == 1 or step % args.eval_freq == 0 or step == num_steps):
            continue

        # Evaluation.
        means = torch.stack(losses).mean(0)  # (heads,)
        check_finite(means, group, args.method, f"in epoch {epoch}, at or before step {step} of {num_steps}")
        if isinstance(loss_fn, TopKCrossEntropyLoss):
            loss_fn.check_convergence()
        train_seconds = time.perf_counter() - started
        evaluated = evaluate(stacks, loss_fn, splits, autocast, args.implementation)
        where = f"epoch {epoch} step {step}/{num_steps}"
        for run, train_loss, result in zip(group, means.tolist(), evaluated):
            run.steps = (epoch - 1) * num_steps + step
            entry = {
                "epoch": epoch,
                "step": run.steps,
                "train_loss": train_loss,
                **result,
                "num_heads": len(group),
                "train_steps": len(losses),
                "train_seconds": train_seconds,
                "peak_memory_mib": peak_memory_mib(device),
            }
            run.history.append(entry)
            if not math.isfinite(result["valid_loss"]):
                raise diverged(args.method, result["valid_loss"], f"in the validation after {where}, seed {run.seed}")
        if step == num_steps or time.monotonic() - saved_at > SAVE_SECONDS:
            for stack in stacks:
                stack.save(finished=step == num_steps and epoch == args.n_epochs)
            for run in group:
                say(evaluation_line(run, where, args.n_epochs))
            saved_at = time.monotonic()
        losses, started = [], time.perf_counter()


def batch_of(stack: Stack, parts: dict[int, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return a stack's embeddings, (batch, d) if its heads share them or (heads, batch, d), and labels (heads, batch).

    parts: by order_seed, embeddings (batch, d) and labels (batch,).
    """
    if len(parts) == 1:
        ((embeddings, labels),) = parts.values()
        return embeddings, labels.expand(len(stack.runs), -1)
    embeddings, labels = zip(*(parts[run.order_seed] for run in stack.runs))
    return torch.stack(embeddings), torch.stack(labels)


def mean_losses(loss_fn: nn.Module, logits: Tensor, labels: Tensor, implementation: str) -> Tensor:
    """Return each head's mean loss (heads,) of logits (heads, batch, n) and labels (heads, batch)."""
    if implementation == "ours":  # one call for all heads, reduction "none"
        # The order in which shared embeddings leave the logits in memory: nothing is copied.
        samples = logits.transpose(0, 1).flatten(0, 1), labels.T.flatten()  # (batch * heads, n), (batch * heads,)
        return loss_fn(*samples).view(labels.T.shape).mean(0)
    return torch.stack([loss_fn(*each) for each in zip(logits, labels)])


def check_finite(losses: Tensor, group: Sequence[HeadRun], method: str, where: str) -> None:
    """Raise RunError if one of the heads' losses (heads,) is not finite."""
    if not losses.isfinite().all():
        number = int(losses.isfinite().int().argmin())
        raise diverged(method, losses[number].item(), f"{where}, seed {group[number].seed}")


@torch.no_grad()
def evaluate(
    stacks: Sequence[Stack],
    loss_fn: nn.Module,
    splits: dict[str, EmbeddingBatches],
    autocast: partial,
    implementation: str,
) -> list[dict[str, float]]:
    """Return, for each head, mean loss and accuracies (fractions) on the whole of each split.

    Counts alone are kept from batch to batch, never logits.
    """
    started = time.perf_counter()
    results: list[dict[str, float]] = [{} for stack in stacks for _ in stack.runs]
    for name, split in splits.items():
        num_rows = len(split.rows)
        loss_sum = torch.zeros(len(results), dtype=torch.float64, device=split.device)
        hits = torch.zeros(len(results), len(TOP_K), dtype=torch.int64, device=split.device)
        for embeddings, labels in split.in_order():
            embeddings = embeddings.float()  # (batch, d)
            first = 0
            for stack in stacks:
                own = slice(first, first + len(stack.runs))  # of the heads of all stacks
                first = own.stop
                with autocast():
                    logits = stack.heads(embeddings)  # (heads, batch, n)
                logits = logits.float()
                targets = labels.expand(len(stack.runs), -1)  # (heads, batch)
                loss_sum[own] += mean_losses(loss_fn, logits, targets, implementation) * len(labels)
                hits[own] += count_hits(logits, targets)
        for result, loss, counts in zip(results, loss_sum.tolist(), hits.tolist()):
            result |= {f"{name}_loss": loss / num_rows, **hit_fractions(name, counts, num_rows)}
    return [{**result, "eval_seconds": time.perf_counter() - started} for result in results]


def evaluation_line(run: HeadRun, where: str, n_epochs: int) -> str:
    """Return one line on a head's last evaluation, accuracies as fractions."""
    last = run.history[-1]
    return (
        f"seed {run.seed} {where} (of {n_epochs} epochs)  train loss {last['train_loss']:.4f}  "
        f"valid top-1 {last['valid_top1']:.4f} top-5 {last['valid_top5']:.4f}  "
        f"test top-1 {last['test_top1']:.4f} top-5 {last['test_top5']:.4f}"
    )


def main(argv: list[str] | None = None, defaults: Defaults = IMAGENET_1K) -> int:
    """Run the script; return its exit status (see experiments/command_line.py)."""
    return cli.finish(lambda: finetune(parse_arguments(argv, defaults), defaults))


if __name__ == "__main__":
    sys.exit(main())
