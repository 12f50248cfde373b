"""Tables 2, 3 and 5: new heads on frozen ImageNet-1K embeddings, trained with each loss and each P_K.

    python experiments/finetune_imagenet.py --method softmax_cross_entropy --p_k 1. 0. 0. 0. 0.
    python experiments/finetune_imagenet.py -d efficientnet-l2-800 --method splitter_selection \\
        --distribution logistic --inverse_temperature .5 --p_k .25 .0 .0 .0 .75
    python experiments/finetune_imagenet.py -d FOLDER --method neuralsort --p_k .5 0 0 0 .5 --seeds 0 1 2

-d takes a published file by its short name (downloaded once, 11 to 50 GB), a torch file, an address or a store, such
as experiments/extract_embeddings.py makes of your own images.

Protocol: a random 50,000 of the training rows for validation, one linear layer, m 16, batch 500, Adam with learning
rate 10^-4.5, 20 epochs; evaluation at the first step of an epoch, every 100 steps and at its last; a row reports test
accuracy where validation accuracy was best, per k. --seeds and --also train several heads in one pass over the data:

    python experiments/finetune_imagenet.py --seeds 0 1 --method softmax_cross_entropy \\
        --also "--method neuralsort --p_k .5 0 0 0 .5" --also "--method softsort --p_k .5 0 0 0 .5"

One row per configuration and seed is added to results/imagenet1k.csv (--results); config.json, evaluations.csv and
the checkpoint lie in results/runs/<run id>/. Stopping, killing, skipping and --force are as in train_cifar100.py.

    torchrun --nproc_per_node 2 -- experiments/finetune_imagenet.py --method softsort --m 16    # two GPUs

The processes of torchrun divide each batch (--batch_size is that of all together) and each evaluation; order, dropout,
gradient and accuracies are those of one process, but for rounding. Each keeps all training rows (--batches), since any
of them may be in its share. The -- is torchrun's, which would take --m for a flag of its own. The column processes says
how many; the run id, and so resuming, does not depend on it.
"""

if __name__ == "__main__":  # from here on, what goes wrong is a sentence
    from data import program

    program.begin()

import argparse
import itertools
import math
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from data.embeddings import EmbeddingBatches
from experiments.shared import command_line as cli
from experiments.shared.checkpoint import PREVIOUS, remove_checkpoints
from experiments.shared.environment import (
    check_compiler,
    describe_environment,
    git_commit,
    keep_freed_memory,
    peak_memory_mib,
    set_up_device,
)
from experiments.shared.finetune_flags import (
    IMAGENET_1K,
    TENSORS,
    Defaults,
    open_store_of,
    parse_arguments,
    recipes_of,
    rows_of,
    settle,
)
from experiments.shared.head_runs import (
    EVALUATIONS,
    HeadRun,
    Stack,
    check_finite,
    mean_losses,
    resume,
    save,
    saved_states,
    stacks_of,
)
from experiments.shared.loss_state import count_classes
from experiments.shared.metrics import TOP_K, count_hits, hit_fractions, summary
from experiments.shared.ranks import Ranks
from experiments.shared.run_record import open_run, run_id, utc_now, write_config, write_history, write_row
from experiments.shared.training_run import finished_line, recorded, say
from topk_losses import TopKCrossEntropyLoss

# What makes it another experiment: see train_cifar100.py. The data are known by their content, not by their place.
IDENTITY = (
    *("embeddings", "limit_train", "limit_test", "num_valid", "split_seed", "order_seed"),
    *("hidden_dims", "apply_relu", "apply_dropout", "precision"),
    *("method", "p_k", "m", "inverse_temperature", "distribution", "art_lambda", "top1_mode"),
    *("implementation", "lr", "batch_size", "n_epochs", "eval_freq", "seed"),
)
READABLE = "{embeddings}-{method}-pk_{p_k}-{n_epochs}epochs-seed{seed}"  # the run id, before its hash
SAVE_SECONDS = 600  # within an epoch, too, a checkpoint is written at the first evaluation after this time


def finetune(args: argparse.Namespace, defaults: Defaults, ranks: Ranks) -> int:
    """Train each configuration with each seed and record the rows; return the exit status."""
    # What can be refused is refused before data is downloaded: tried with as many classes as the flags may need.
    device = cli.training_device(args.device, ranks)
    try:
        most = max(each.m or 0 for each in (args, *args.also))
        recipes_of(args, defaults, max(defaults.num_classes, most), torch.device("cpu"))
        if args.compile:
            check_compiler()
    except ValueError as error:
        raise cli.CommandLineError(str(error)) from None

    # Data: the store, which rank 0 downloads for all, and the losses for its classes.
    ranks.follow_first()
    store = open_store_of(args)
    ranks.let_follow()
    widths = store.dim, *(args.hidden_dims or ()), store.num_classes
    weights = sum(math.prod(pair) for pair in itertools.pairwise(widths)) * len(args.seeds) * (1 + len(args.also))
    cli.check_memory(16 * weights, f"heads of widths {' '.join(map(str, widths))}, with gradients and Adam's moments,")
    train_rows, valid_rows, test_rows = rows_of(store, args, defaults)
    filled_in = settle(args, defaults, len(train_rows))
    if ranks.count > min(args.batch_size, len(valid_rows), len(test_rows)):
        raise cli.CommandLineError(
            f"{ranks.count} processes divide each batch of {args.batch_size}, the {len(valid_rows)} rows that validate "
            f"and the {len(test_rows)} of test, and each needs one of each; lower --nproc_per_node"
        )
    try:
        recipes = recipes_of(args, defaults, store.num_classes, device)
    except ValueError as error:
        raise cli.CommandLineError(
            f"{error} (the labels of {args.data_path} have {store.num_classes} classes)"
        ) from None
    for recipe in recipes:
        labels = lambda: store["train"].labels()[train_rows].to(device)  # noqa: E731
        count_classes(recipe.loss_fn, recipe.method, labels, store.num_classes)

    # Names and folders, one per configuration and seed, and whether there is anything to do.
    shared = {
        "embeddings": f"{store.num_classes}x{store.dim}-{store.fingerprint[:8]}",
        "num_valid": len(valid_rows),
        "device": str(device),
        "data_path": cli.portable(Path(args.data_path)) if Path(args.data_path).exists() else args.data_path,
    }
    runs = []
    for recipe in recipes:
        for seed in args.seeds:
            order = args.seeds[0] if args.order_seed is None else seed if args.order_seed == "own" else args.order_seed
            flags = {**recipe.flags, **shared, "seed": seed, "order_seed": order}
            # Of these a repetition or another place changes nothing that is reported.
            for flag in ("results", "force", "seeds", "also", "cache_dir", "endpoint_url", "sha256", *TENSORS):
                del flags[flag]
            name = run_id({flag: flags[flag] for flag in IDENTITY}, READABLE)
            runs.append(HeadRun(recipe, seed, order, flags, name, args.results.parent / "runs" / name))
    unrecorded = ranks.from_first(lambda: [not recorded(args.results, run.name, args.force) for run in runs])
    unfinished = list(itertools.compress(runs, unrecorded))
    if not unfinished:
        return 0

    # Batches.
    set_up_device(device, args.threads, args.deterministic)
    keep_freed_memory()
    threads = torch.get_num_threads()
    # On each machine one after another: what memory is free, the others have left.
    for turn in range(max(ranks.gathered(ranks.local_count))):
        if turn == ranks.local_rank:
            batches = EmbeddingBatches(store["train"], args.batch_size, device, rows=train_rows, mode=args.batches)
            splits = {  # of each, this process's share
                name: EmbeddingBatches(split, args.batch_size, device, rows=rows[ranks.share(len(rows))])
                for name, split, rows in (("valid", store["train"], valid_rows), ("test", store["test"], test_rows))
            }
        ranks.sum(0)
    if ranks.is_first:
        say(f"{store.path}: {len(train_rows)} training rows, {len(valid_rows)} validate, {len(test_rows)} test")
        say("\n".join(f"  {name}: {each.description}" for name, each in {"train": batches, **splits}.items()))
        if filled_in:
            say(f"defaults for {len(train_rows)} training rows: {filled_in}")

    with ExitStack() as held:
        for run in unfinished if ranks.is_first else ():
            held.enter_context(open_run(run.folder))
        # Asked again: another process may have finished this configuration before the folder was ours.
        unrecorded = ranks.from_first(lambda: [not recorded(args.results, run.name, args.force) for run in unfinished])
        unfinished = list(itertools.compress(unfinished, unrecorded))
        environment, commit = describe_environment(device), git_commit()

        # Resume each head where it stood when it was saved last.
        states = ranks.from_first(lambda: saved_states(unfinished, args.results))
        for run, saved in zip(unfinished, states):
            run.flags["threads"] = threads
            if ranks.is_first:
                write_config(run.folder, {"run_id": run.name, **run.flags, **environment, "git_commit": commit})
            resume(run, saved)
            run.commits = list(dict.fromkeys([*run.commits, commit]))
            where = f"continuing after step {run.steps} of {args.n_epochs * len(batches)}" if run.steps else "beginning"
            if ranks.is_first:
                processes = f"{ranks.count} processes, " if ranks.count > 1 else ""
                write_history(run.folder, run.history, EVALUATIONS)
                say(f"{run.name}: {where} on {environment['device_name']}, {processes}{threads} threads")

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
                together, stacks = group, stacks_of(group, shape, device, args.compile)
            train_epoch(stacks, batches, splits, args, ranks)

        # Record.
        for run in unfinished if ranks.is_first else ():
            final_epoch = [each for each in run.history if each["epoch"] == args.n_epochs]
            loss_sum = math.fsum(each["train_loss"] * each["train_steps"] for each in final_epoch)
            measured = summary(run.history, "step")
            row = {
                "run_id": run.name,
                **run.flags,
                "processes": ranks.count,
                "embedding_dtype": store["train"].dtype_name,
                "embeddings_checksum": store.checksum,
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
                "last_inverse_temperature": run.history[-1].get("inverse_temperature"),
                "images_per_second": last_step * args.batch_size / measured["train_seconds"],
                **environment,
                "git_commit": "+".join(filter(None, run.commits)),
                "times_resumed": run.times_resumed,
                "started_utc": run.started_utc,
                "finished_utc": utc_now(),
            }
            # First, so that a kill in between leaves nothing behind: this head is finished and saved, with its weights.
            remove_checkpoints(run.folder, (PREVIOUS,))
            write_row(args.results, row)
            say(finished_line(row, "step", args.results, run.folder))
    return 0


def train_epoch(
    stacks: Sequence[Stack],
    batches: EmbeddingBatches,
    splits: dict[str, EmbeddingBatches],
    args: argparse.Namespace,
    ranks: Ranks,
) -> None:
    """Train heads that stand at the same step to the end of its epoch, evaluating and saving on the way.

    Losses stay on the device until an evaluation, so that no step waits for a GPU. Raises RunError if a loss is not
    finite: at once on the CPU, before the next evaluation on a GPU.
    """
    share, weight = ranks.share(args.batch_size), ranks.weight(args.batch_size)
    group = [run for stack in stacks for run in stack.runs]
    device, num_steps = batches.device, len(batches)
    epoch, start = group[0].steps // num_steps + 1, group[0].steps % num_steps
    autocast = partial(torch.autocast, device.type, torch.bfloat16, enabled=args.precision == "bf16")
    # Heads with the same order share each batch; otherwise each has its own.
    orders = list(dict.fromkeys(run.order_seed for run in group))
    streams = zip(*(batches.epoch(epoch, start=start, seed=seed) for seed in orders))
    on_terminal = sys.stderr.isatty() and ranks.is_first
    bar = tqdm(streams, f"epoch {epoch}", num_steps, initial=start, unit="batch", leave=False, disable=not on_terminal)
    saved_at, started = time.monotonic(), time.perf_counter()
    losses: list[Tensor] = []  # of the steps since the last evaluation, each (heads,)
    for step, parts in enumerate(bar, start + 1):
        parts = {order: (rows[share].float(), labels[share]) for order, (rows, labels) in zip(orders, parts)}
        of_stacks = []  # losses of this step, (heads of the stack,) each; their sums over processes are batch means
        for stack in stacks:
            seeds = [run.seed for run in stack.runs]
            embeddings, labels = batch_of(stack, parts)
            # Drawn for the whole batch, so that any number of processes drops the same.
            kept = stack.heads.dropout_mask(args.batch_size, seeds, (epoch - 1) * num_steps + step)
            with autocast():
                logits = stack.training(embeddings, None if kept is None else kept[:, share])  # (heads, share, n)
            stack.seed_noise(0, (epoch - 1) * num_steps + step, ranks.rank)
            stack.anneal((epoch - 1 + (step - 1) / num_steps) / args.n_epochs)
            loss = mean_losses(stack.own_losses or stack.training_loss, logits.float(), labels)
            loss = loss * weight  # (heads,)
            if device.type == "cpu":
                check_finite(loss, stack.runs, f"in epoch {epoch}, step {step} of {num_steps}", batches)
            stack.optimizer.zero_grad(set_to_none=True)
            loss.sum().backward()  # the heads share no weight: each gets the gradient of its own loss
            ranks.sum_gradients(stack.heads.parameters())
            stack.optimizer.step()
            of_stacks.append(loss.detach())
        losses.append(torch.cat(of_stacks))
        if not (step == 1 or step % args.eval_freq == 0 or step == num_steps):
            continue

        # Evaluation.
        means = ranks.total(torch.stack(losses, 1).mean(1))  # (heads,)
        check_finite(means, group, f"in epoch {epoch}, at or before step {step} of {num_steps}", batches)
        for loss_fn in dict.fromkeys(stack.recipe.loss_fn for stack in stacks):
            if isinstance(loss_fn, TopKCrossEntropyLoss):
                loss_fn.check_convergence()
        train_seconds = time.perf_counter() - started
        where = f"epoch {epoch} step {step}/{num_steps}"
        evaluated = evaluate(stacks, splits, autocast, ranks, where)
        temperatures = [each for stack in stacks for each in stack.temperatures()]
        for run, train_loss, result, temperature in zip(group, means.tolist(), evaluated, temperatures):
            entry = {
                "epoch": epoch,
                "step": (epoch - 1) * num_steps + step,
                "train_loss": train_loss,
                **result,
                **temperature,
                "num_heads": len(group),
                "train_steps": len(losses),
                "train_seconds": train_seconds,
                "peak_memory_mib": peak_memory_mib(device),
            }
            run.history.append(entry)
        if step == num_steps or (ranks.is_first and time.monotonic() - saved_at > SAVE_SECONDS):
            for stack in stacks:
                stack.take_apart()
            for run in group if ranks.is_first else ():
                save(run, group, finished=step == num_steps and epoch == args.n_epochs)
                say(evaluation_line(run, where, args.n_epochs))
            saved_at = time.monotonic()
        losses, started = [], time.perf_counter()


def batch_of(stack: Stack, parts: dict[int, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return a stack's embeddings, (share, d) if its heads share them or (heads, share, d), and labels (heads, share).

    parts: by order_seed, embeddings (share, d) and labels (share,).
    """
    if len(parts) == 1:
        ((embeddings, labels),) = parts.values()
        return embeddings, labels.expand(len(stack.runs), -1)
    embeddings, labels = zip(*(parts[run.order_seed] for run in stack.runs))
    return torch.stack(embeddings), torch.stack(labels)


@torch.no_grad()
def evaluate(
    stacks: Sequence[Stack], splits: dict[str, EmbeddingBatches], autocast: partial, ranks: Ranks, where: str
) -> list[dict[str, float]]:
    """Return, for each head, mean loss and accuracies (fractions) on the whole of each split.

    splits: this process's share of each. where: in training, to be said. Counts alone are kept from batch to batch,
    never logits. Raises RunError if a loss is not finite.
    """
    started = time.perf_counter()
    group = [run for stack in stacks for run in stack.runs]
    own_losses = [own for stack in stacks for own in stack.own_losses or []]
    for own in own_losses:
        own.eval()
    results: list[dict[str, float]] = [{} for _ in group]
    for name, split in splits.items():
        num_rows = ranks.sum(len(split.rows))
        loss_sum = torch.zeros(len(results), dtype=torch.float64, device=split.device)
        spread = torch.zeros_like(loss_sum)  # of the logits over the classes, summed over the rows
        hits = torch.zeros(len(results), len(TOP_K), dtype=torch.int64, device=split.device)
        for number, (embeddings, labels) in enumerate(split.in_order()):
            embeddings = embeddings.float()  # (batch, d)
            first = 0
            for stack in stacks:
                own = slice(first, first + len(stack.runs))  # of the heads of all stacks
                first = own.stop
                with autocast():
                    logits = stack.heads(embeddings)  # (heads, batch, n)
                logits = logits.float()
                targets = labels.expand(len(stack.runs), -1)  # (heads, batch)
                stack.seed_noise(1, number, ranks.rank)
                means = mean_losses(stack.own_losses or stack.recipe.loss_fn, logits, targets)  # (heads,)
                loss_sum[own] += means * len(labels)
                spread[own] += logits.std(2).sum(1)
                hits[own] += count_hits(logits, targets)
        loss_sum, spread, hits = ranks.total(loss_sum), ranks.total(spread), ranks.total(hits)
        check_finite(loss_sum, group, f"on the {name} rows after {where}", split, ranks)
        for result, loss, std, counts in zip(results, loss_sum.tolist(), spread.tolist(), hits.tolist()):
            result |= {f"{name}_loss": loss / num_rows, f"{name}_logit_std": std / num_rows}
            result |= hit_fractions(name, counts, num_rows)
    for own in own_losses:
        own.train()
    return [{**result, "eval_seconds": time.perf_counter() - started} for result in results]


def evaluation_line(run: HeadRun, where: str, n_epochs: int) -> str:
    """Return one line on a head's last evaluation, accuracies as fractions."""
    last = run.history[-1]
    p_k = " ".join(f"{p:g}" for p in run.flags["p_k"])
    return (
        f"{run.recipe.method} {p_k} seed {run.seed} {where} (of {n_epochs} epochs)  "
        f"train loss {last['train_loss']:.4f}  "
        f"valid top-1 {last['valid_top1']:.4f} top-5 {last['valid_top5']:.4f}  "
        f"test top-1 {last['test_top1']:.4f} top-5 {last['test_top5']:.4f}"
    )


def main(argv: list[str] | None = None, defaults: Defaults = IMAGENET_1K) -> int:
    """Run the script; return its exit status (see experiments/shared/command_line.py)."""
    return cli.finish(lambda ranks: finetune(parse_arguments(argv, defaults), defaults, ranks))


if __name__ == "__main__":
    program.end(main())
