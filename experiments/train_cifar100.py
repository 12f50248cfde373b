"""Tables 1 and 4: ResNet-18 trained from scratch on CIFAR-100 with each loss and each P_K.

    python experiments/train_cifar100.py --method softmax_cross_entropy --p_k 1. 0. 0. 0. 0.
    python experiments/train_cifar100.py --method splitter_selection --distribution logistic_phi \\
        --inverse_temperature .5 --art_lambda .5 --p_k .2 .2 .2 .2 .2
    python experiments/train_cifar100.py --method neuralsort --dataset digits --n_epochs 3      # no download
    python experiments/train_cifar100.py --method softsort --seeds 0 1 2                        # three rows
    torchrun --nproc_per_node 2 -- experiments/train_cifar100.py --method softsort              # two GPUs, one row

Protocol: 5% of the training images for validation, random crop and flip, batch 128, Adam with learning rate 1e-3,
200 epochs, evaluation after each; a row reports test accuracy where validation accuracy was best, per k.
--lr_schedule cosine, which is not published, brings a short run to rest. Nor are --weight_decay, which is AdamW's and
of all parameters (without it AdamW is Adam), and --ema: an exponential moving average of the weights over the steps, by
which a row is evaluated, its best epoch chosen, and which its checkpoint holds. Batch norm's running statistics are
averaged alike: the model's own belong to its last weights, not to the average.

The row is added to results/cifar100.csv (--results); config.json, epochs.csv and the checkpoint lie in
results/runs/<run id>/. A command that was stopped, killed even, continues when it is given again; on the CPU, with
as many threads, it ends with the same bits. A configuration that the file already has is skipped (--force repeats
it, and the new row takes the place of the old).

--seeds trains in one process per seed, as many at a time as the CPU has cores for, or all on the GPUs, in turn: a small
network leaves much of either idle. Each row is what --seed alone gives with as many --threads, to the bit on a CPU.

The processes of torchrun divide each batch (--batch_size is that of all together) and each evaluation; order, crops
and flips are those of one process. Gradient, loss and accuracies are those of the whole batch; batch norm alone uses
the images of its own process, and its running statistics are those of the first (the published ones see 128 images:
two processes see 64 each). The column processes says how many; the run id, and so resuming, does not depend on it.
"""

if __name__ == "__main__":  # from here on, what goes wrong is a sentence
    from data import program

    program.begin()

import argparse
import math
import sys
import time
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from pydantic import InstanceOf
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm import tqdm
from typing_extensions import NotRequired

from data.cifar100 import (
    Dataset,
    DatasetUnavailableError,
    crop_and_flip,
    epoch_generator,
    epoch_order,
    load_dataset,
    normalise,
    sample_crops,
)
from experiments.shared import command_line as cli
from experiments.shared.checkpoint import (
    PREVIOUS,
    RUN,
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
from experiments.shared.loss_state import anneal, count_classes, is_stateless, seed_noise, state_of, temperature_of
from experiments.shared.metrics import TOP_K, count_hits, hit_fractions, summary
from experiments.shared.ranks import Ranks
from experiments.shared.run_record import open_run, run_id, utc_now, write_config, write_history, write_row
from experiments.shared.seed_processes import run_seeds
from experiments.shared.train_cifar100_flags import configuration, parse_arguments
from experiments.shared.training_run import compiled, diverged, finished_line, recorded, restoring, saved_state, say
from models.resnet_cifar import resnet_cifar

# What makes it another experiment. Where and how fast it is computed (device, threads, compile,
# deterministic) and where files lie does not; nor does --force.
IDENTITY = (
    *("dataset", "limit_train", "limit_test", "label_noise", "noise_groups", "model", "precision"),
    *("method", "p_k", "m", "inverse_temperature", "distribution", "art_lambda", "top1_mode"),
    *("implementation", "lr", "lr_schedule", "weight_decay", "ema", "batch_size", "n_epochs", "seed"),
)
READABLE = "{dataset}-{model}-{method}-pk_{p_k}-{n_epochs}epochs-seed{seed}"  # the run id, before its hash

# What its checkpoints hold, among others.
CHECKPOINT = {**RUN, "random_states": dict[str, InstanceOf[Tensor]], "loss": NotRequired[dict[str, Any]]}

PADDING = 4  # black pixels on each side of an image before it is cropped
# Of the evaluation, on which the result does not depend: a CPU's caches hold little, a GPU waits for launches.
EVAL_BATCH = {"cpu": 500, "cuda": 2000}  # the first layers hold two activations of 0.5 GB


def train(args: argparse.Namespace, ranks: Ranks) -> int:
    """Train one configuration with --seed and record its row; return the exit status."""
    # Loss and name. First what can be refused, before a folder is made or data downloaded.
    device = cli.training_device(args.device, ranks)
    loss_fn, flags = configuration(args, device)
    name = run_id({flag: flags[flag] for flag in IDENTITY}, READABLE)
    if args.batch_size < ranks.count:
        raise cli.CommandLineError(
            f"--batch_size must be at least the number of processes, which divide each batch: got {args.batch_size} "
            f"and {ranks.count} processes; lower --nproc_per_node"
        )

    # Folder, and whether there is anything to do.
    folder = args.results.parent / "runs" / name
    if ranks.from_first(lambda: recorded(args.results, name, args.force)):
        return 0

    # Seed, another one for what the other processes draw (dropout, where there is any).
    set_up_device(device, args.threads, args.deterministic)
    keep_freed_memory()
    flags["threads"] = torch.get_num_threads()
    torch.manual_seed(args.seed + (ranks.rank << 32))

    # Data, whole on the device as uint8.
    data = dataset(args).to(device)
    count_classes(loss_fn, args.method, lambda: data.train.labels, data.num_classes)

    with open_run(folder) if ranks.is_first else nullcontext():
        # Asked again: another process may have finished this configuration before the folder was ours.
        if ranks.from_first(lambda: recorded(args.results, name, args.force)):
            return 0
        environment, commit = describe_environment(device), git_commit()
        if ranks.is_first:
            write_config(folder, {"run_id": name, **flags, **environment, "git_commit": commit})

        # Model and optimizer.
        model = resnet_cifar(args.model, data.num_classes).to(device, memory_format=torch.channels_last)
        optimizer = torch.optim.AdamW(model.parameters(), flags["lr"], weight_decay=args.weight_decay, fused=True)
        evaluated_model = model
        if args.ema:
            average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(args.ema), use_buffers=True)
            optimizer.register_step_post_hook(lambda *_: average.update_parameters(model))
            evaluated_model = average.module
        autocast = partial(torch.autocast, device.type, torch.bfloat16, enabled=args.precision == "bf16")
        # Only the training step is compiled: eval mode and its partial batches would each be compiled again.
        training_model = compiled(model, device) if args.compile else model
        compilable = args.implementation == "ours" and is_stateless(flags)
        training_loss = compiled(loss_fn, device) if args.compile and compilable else loss_fn

        # Resume where the last finished epoch ended.
        history, started_utc, times_resumed, commits = [], utc_now(), 0, [commit]
        saved = ranks.from_first(lambda: saved_state(folder, args.results, name, CHECKPOINT))
        if saved:
            with restoring(folder):
                model.load_state_dict(saved.get("unaveraged") or saved["model"])
                if args.ema:
                    average.load_state_dict(saved["average"])
                if saved["optimizer"] is not None:
                    optimizer.load_state_dict(saved["optimizer"])
                if saved.get("loss"):
                    loss_fn.load_state_dict(saved["loss"])
                states = [saved["random_states"], *saved.get("random_states_of_others", [])]
                if ranks.rank < len(states):
                    restore_random_states(states[ranks.rank], device)
            history, started_utc = saved["history"], saved["started_utc"]
            times_resumed = saved["times_resumed"] + 1
            commits = list(dict.fromkeys([*saved["git_commits"], commit]))
        else:
            ranks.copy_from_first(model.parameters())
        if ranks.is_first:
            if saved:
                write_history(folder, history)
            where = f"continuing after epoch {len(history)} of {args.n_epochs}" if saved else "beginning"
            processes = f"{ranks.count} processes, " if ranks.count > 1 else ""
            say(f"{name}: {where} on {environment['device_name']}, {processes}{flags['threads']} threads")

        # Loop.
        on_terminal = sys.stderr.isatty() and ranks.is_first and len(args.seeds) == 1
        epochs = tqdm(
            range(len(history) + 1, args.n_epochs + 1),
            initial=len(history),
            total=args.n_epochs,
            unit="epoch",
            disable=not on_terminal,
        )
        for epoch in epochs:
            seed_noise(loss_fn, device, args.seed, epoch, ranks.rank)
            trained = train_epoch(
                epoch, training_model, training_loss, optimizer, data, autocast, args, on_terminal, ranks
            )
            ranks.copy_from_first(model.buffers())  # the running statistics
            if args.ema:
                ranks.copy_from_first(average.buffers())
            evaluated = evaluate(epoch, evaluated_model, loss_fn, data, autocast, args, ranks)
            history.append(
                {
                    **trained,
                    **evaluated,
                    **temperature_of(loss_fn, flags["inverse_temperature"]),
                    "peak_memory_mib": peak_memory_mib(device),
                }
            )
            states = ranks.gathered(random_states(device))
            if not ranks.is_first:
                continue
            state = {
                "model": evaluated_model.state_dict(),
                # The same tensors, saved once, and that there are any.
                "average": average.state_dict() if args.ema else None,
                # Nothing continues a finished run: its file keeps the weights alone.
                "unaveraged": model.state_dict() if args.ema and epoch < args.n_epochs else None,
                "optimizer": optimizer.state_dict() if epoch < args.n_epochs else None,
                "loss": state_of(loss_fn),
                "random_states": states[0],
                "random_states_of_others": states[1:],
                "history": history,
                "started_utc": started_utc,
                "times_resumed": times_resumed,
                "git_commits": commits,
            }
            save_checkpoint(folder, state)
            write_history(folder, history)
            say(epoch_line(history[-1], args))
        if not ranks.is_first:
            return 0

        # Record.
        measured = summary(history, "epoch")
        trained_images = len(history) * (len(data.train) // args.batch_size) * args.batch_size
        del flags["results"], flags["force"]  # the row is in the one, and of a repetition nothing else is new
        row = {
            "run_id": name,
            **flags,
            "processes": ranks.count,
            "num_classes": data.num_classes,
            "train_images": len(data.train),
            "valid_images": len(data.valid),
            "test_images": len(data.test),
            **measured,
            "last_train_loss": history[-1]["train_loss"],
            "last_inverse_temperature": history[-1].get("inverse_temperature"),
            "images_per_second": trained_images / measured["train_seconds"],
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


def dataset(args: argparse.Namespace) -> Dataset:
    """Return the data set that the flags describe, on the CPU. Raises CommandLineError or RunError."""
    try:
        data = load_dataset(
            args.dataset,
            args.data_dir,
            mirror=args.mirror,
            seed=args.seed,
            limit_train=args.limit_train,
            limit_test=args.limit_test,
            label_noise=args.label_noise,
            noise_groups=args.noise_groups,
        )
    except DatasetUnavailableError as error:
        raise cli.RunError(str(error)) from None
    except ValueError as error:
        raise cli.CommandLineError(str(error)) from None
    if len(data.train) < args.batch_size:
        raise cli.CommandLineError(
            f"--batch_size must not exceed the {len(data.train)} training images, since the last partial "
            f"batch is dropped, got {args.batch_size}"
        )
    return data


def train_epoch(
    epoch: int,
    model: nn.Module,
    loss_fn: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Dataset,
    autocast: partial,
    args: argparse.Namespace,
    on_terminal: bool,
    ranks: Ranks,
) -> dict[str, float]:
    """Train for one epoch, counted from 1; return its loss, accuracies as fractions, seconds and images/s.

    Order and augmentation depend on seed and epoch alone. Losses and hits stay on the device until the epoch
    is over, so that no step waits for a GPU. Raises RunError if a loss is not finite: at once where one process
    computes on the CPU, else in all of them at the end of the epoch, before anything is saved.
    """
    started = time.perf_counter()
    device = data.train.labels.device
    order = epoch_order(len(data.train), args.seed, epoch)  # (N,)
    if device.type == "cuda":
        order = order.pin_memory()  # copied without waiting
    order = order.to(device, non_blocking=True)
    share, weight = ranks.share(args.batch_size), ranks.weight(args.batch_size)
    generator = epoch_generator(args.seed, epoch, device)
    num_steps = len(order) // args.batch_size  # the last partial batch is dropped
    losses = torch.zeros(num_steps, device=device)
    hits = torch.zeros(len(TOP_K), dtype=torch.int64, device=device)
    model.train()
    loss_fn.train()
    bar = tqdm(range(num_steps), desc=f"epoch {epoch}", unit="batch", leave=False, disable=not on_terminal)
    for step in bar:
        elapsed = (epoch - 1 + step / num_steps) / args.n_epochs  # from 0 to almost 1
        anneal(loss_fn, args.inverse_temperature, elapsed)
        if args.lr_schedule == "cosine":
            optimizer.param_groups[0]["lr"] = optimizer.defaults["lr"] * (1 + math.cos(math.pi * elapsed)) / 2
        if args.compile and device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        images, labels = data.train.batch(order[step * args.batch_size : (step + 1) * args.batch_size][share])
        # Drawn for the whole batch, so that an image is cropped alike by any number of processes.
        tops, lefts, flips = (each[share] for each in sample_crops(args.batch_size, PADDING, generator))
        # (share, 3, 32, 32) float32, channels_last
        images = normalise(crop_and_flip(images, tops, lefts, flips, PADDING), data.mean, data.std)
        optimizer.zero_grad(set_to_none=True)
        with autocast():
            logits = model(images)  # (share, num_classes)
        logits = logits.float()
        loss = loss_fn(logits, labels) * weight  # (); summed over the processes, the mean over the batch
        if device.type == "cpu" and ranks.count == 1 and not math.isfinite(loss.item()):
            raise diverged(args.method, loss.item(), f"in epoch {epoch}, step {step + 1} of {num_steps}")
        loss.backward()
        ranks.sum_gradients(model.parameters())
        optimizer.step()
        losses[step] = loss.detach()
        hits += count_hits(logits.detach(), labels)
    losses, hits = ranks.total(losses), ranks.total(hits)
    losses = losses.tolist()  # the one wait for a GPU
    if hasattr(loss_fn, "check_convergence"):
        loss_fn.check_convergence()
    for step, value in enumerate(losses):
        if not math.isfinite(value):
            raise diverged(args.method, value, f"in epoch {epoch}, step {step + 1} of {num_steps}")
    seconds = time.perf_counter() - started
    num_images = num_steps * args.batch_size
    return {
        "epoch": epoch,
        "train_loss": math.fsum(losses) / num_steps,
        **hit_fractions("train", hits.tolist(), num_images),
        "train_seconds": seconds,
        "images_per_second": num_images / seconds,
    }


@torch.no_grad()
def evaluate(
    epoch: int,
    model: nn.Module,
    loss_fn: nn.Module,
    data: Dataset,
    autocast: partial,
    args: argparse.Namespace,
    ranks: Ranks,
) -> dict[str, float]:
    """Return mean loss and accuracies (fractions) on the whole validation and test splits, unaugmented.

    Raises RunError if the validation loss is not finite.
    """
    started = time.perf_counter()
    model.eval()
    loss_fn.eval()
    splits = {"valid": data.valid, "test": data.test}
    device, size = data.test.labels.device, EVAL_BATCH[data.test.labels.device.type]
    sums = torch.zeros(len(splits), 1 + len(TOP_K), dtype=torch.float64, device=device)  # of losses, then hits
    for of_split, split in zip(sums, splits.values()):
        share = ranks.share(len(split))
        for begin in range(share.start, share.stop, size):
            batch = slice(begin, min(begin + size, share.stop))
            images, labels = split.images[batch], split.labels[batch]
            with autocast():
                logits = model(normalise(images, data.mean, data.std))  # (batch, num_classes)
            logits = logits.float()
            of_split[0] += loss_fn(logits, labels) * len(labels)
            of_split[1:] += count_hits(logits, labels)
    result = {}
    for (name, split), (loss, *hits) in zip(splits.items(), ranks.total(sums).tolist()):
        result |= {f"{name}_loss": loss / len(split), **hit_fractions(name, hits, len(split))}
    if not math.isfinite(result["valid_loss"]):
        raise diverged(args.method, result["valid_loss"], f"in the validation after epoch {epoch}")
    return {**result, "eval_seconds": time.perf_counter() - started}


def epoch_line(epoch: dict[str, float], args: argparse.Namespace) -> str:
    """Return one line on a finished epoch, accuracies as fractions."""
    seed = f"seed {args.seed} " if len(args.seeds) > 1 else ""
    return (
        f"{seed}epoch {epoch['epoch']}/{args.n_epochs}  train loss {epoch['train_loss']:.4f}  "
        f"valid top-1 {epoch['valid_top1']:.4f} top-5 {epoch['valid_top5']:.4f}  "
        f"test top-1 {epoch['test_top1']:.4f} top-5 {epoch['test_top5']:.4f}  "
        f"trained {epoch['train_seconds']:.1f} s ({epoch['images_per_second']:.0f} images/s), "
        f"evaluated {epoch['eval_seconds']:.1f} s"
    )


def train_seeds(args: argparse.Namespace, ranks: Ranks) -> int:
    """Train one configuration with each seed in a process of its own; return the exit status."""
    if ranks.count > 1:
        raise cli.CommandLineError(
            f"--seeds starts a process per seed, and torchrun has started {ranks.count}: give one --seed, or leave "
            "torchrun out"
        )
    # What can be refused is refused here, once.
    cli.training_device(args.device, ranks)
    _, flags = configuration(args, torch.device("cpu"))
    unfinished = []
    for seed in args.seeds:
        name = run_id({flag: {**flags, "seed": seed}[flag] for flag in IDENTITY}, READABLE)
        if not recorded(args.results, name, args.force):
            unfinished.append(argparse.Namespace(**{**vars(args), "seed": seed}))
    if not unfinished:
        return 0
    dataset(args)
    return run_seeds(train_one_seed, unfinished, len(args.seeds))


def train_one_seed(args: argparse.Namespace) -> int:
    """The process of one seed; return its exit status."""
    return cli.finish(lambda ranks: train(args, ranks), stopped="", name=f"seed {args.seed}: ")


def main(argv: list[str] | None = None) -> int:
    """Run the script; return its exit status (see experiments/shared/command_line.py)."""

    def run(ranks: Ranks) -> int:
        args = parse_arguments(argv)
        return train(args, ranks) if len(args.seeds) == 1 else train_seeds(args, ranks)

    return cli.finish(run)


if __name__ == "__main__":
    program.end(main())
