"""Tables 1 and 4: ResNet-18 trained from scratch on CIFAR-100 with each loss and each P_K.

    python experiments/train_cifar100.py --method softmax_cross_entropy --p_k 1. 0. 0. 0. 0.
    python experiments/train_cifar100.py --method splitter_selection --distribution logistic_phi \\
        --inverse_temperature .5 --art_lambda .5 --p_k .2 .2 .2 .2 .2
    python experiments/train_cifar100.py --method neuralsort --dataset digits --n_epochs 3      # no download

Protocol: 5% of the training images for validation, random crop and flip, batch 128, Adam with learning rate 1e-3,
200 epochs, evaluation after each; a row reports test accuracy where validation accuracy was best, per k.

The row is added to results/cifar100.csv (--results); config.json, epochs.csv and the checkpoint lie in
results/runs/<run id>/. A command that was stopped, killed even, continues when it is given again; on the CPU, with
as many threads, it ends with the same bits. A configuration that the file already has is skipped (--force repeats
it, and the new row takes the place of the old).
"""

import argparse
import math
import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from data.cifar100 import (
    DATASETS,
    NOISE_GROUPS,
    Dataset,
    DatasetUnavailableError,
    augment,
    epoch_generator,
    epoch_order,
    load_dataset,
    normalise,
)
from experiments import command_line as cli
from experiments.checkpoint import (
    PREVIOUS,
    random_states,
    remove_checkpoints,
    restore_random_states,
    save_checkpoint,
)
from experiments.environment import (
    ROOT,
    check_compiler,
    describe_environment,
    git_commit,
    peak_memory_mib,
    resolve_device,
    set_up_device,
)
from experiments.metrics import TOP_K, count_hits, hit_fractions, summary
from experiments.run_record import open_run, run_id, utc_now, write_config, write_history, write_row
from experiments.training_run import diverged, finished_line, recorded, restoring, saved_state, say
from models.resnet_cifar import resnet_cifar
from topk_losses import TopKCrossEntropyLoss

# What makes it another experiment. Where and how fast it is computed (device, threads, compile,
# deterministic) and where files lie does not; nor does --force.
IDENTITY = (
    *("dataset", "limit_train", "limit_test", "label_noise", "noise_groups", "model", "precision"),
    *("method", "p_k", "m", "inverse_temperature", "distribution", "art_lambda", "top1_mode"),
    *("implementation", "lr", "batch_size", "n_epochs", "seed"),
)
READABLE = "{dataset}-{model}-{method}-pk_{p_k}-{n_epochs}epochs-seed{seed}"  # the run id, before its hash

# Known before the data is, so that a refused command line costs no download.
NUM_CLASSES = {"cifar100": 100, "cifar10": 10, "digits": 10}
NLOGLR = 3.0  # published: learning rate 1e-3
# Published for CIFAR-100, where all 100 scores are sorted; a method that is not here takes the library's
# default.
INVERSE_TEMPERATURES = {
    **{"neuralsort": 0.0625, "softsort": 0.0625},
    **{"odd_even": 0.5, "bitonic": 0.5, "splitter_selection": 0.5},
}
EVAL_BATCH = 500


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the flags, each checked on its own. Raises CommandLineError."""
    parser = cli.Parser(
        prog="train_cifar100.py",
        description="Train a ResNet on CIFAR-100, CIFAR-10 or digits with a top-k loss (Tables 1 and 4).",
    )
    cli.add_loss_flags(parser, top1_mode="smce")
    cli.add_optimization_flags(
        parser,
        n_epochs=200,
        batch_size=128,
        nloglr=NLOGLR,
        seed_help="of split, initialisation, order and augmentation",
    )
    group = parser.add_argument_group("data and model")
    group.add_argument(
        "--dataset",
        type=cli.choice("dataset", DATASETS),
        default="cifar100",
        help=f"{', '.join(DATASETS)} (%(default)s); digits needs no download",
    )
    group.add_argument(
        "--data_dir",
        type=Path,
        default=ROOT / "data" / "downloads",
        help="where the data set is, or is downloaded to (data/downloads in this repository)",
    )
    group.add_argument("--mirror", metavar="URL", help="download from here instead of the data set's home page")
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
    return parser.parse_args(argv)


def train(args: argparse.Namespace) -> int:
    """Train one configuration and record its row; return the exit status."""
    # Loss. It comes first: what can be refused is refused before a folder is made or data downloaded.
    num_classes = NUM_CLASSES[args.dataset]
    try:
        device = resolve_device(args.device)
        settings = cli.loss_settings(args, top1_mode="smce", inverse_temperatures=INVERSE_TEMPERATURES)
        loss_fn = cli.build_loss(args.implementation, settings, num_classes, device)
        if args.compile:
            check_compiler()
    except ValueError as error:
        raise cli.CommandLineError(str(error)) from None

    # Name, folder, and whether there is anything to do.
    flags = {
        **vars(args),
        **settings,
        **cli.learning_rate(args, NLOGLR),
        "device": str(device),
        "data_dir": cli.portable(args.data_dir),
        "noise_groups": args.noise_groups if args.label_noise > 0 else None,
    }
    name = run_id({flag: flags[flag] for flag in IDENTITY}, READABLE)
    folder = args.results.parent / "runs" / name
    if recorded(args.results, name, args.force):
        return 0

    # Seed.
    set_up_device(device, args.threads, args.deterministic)
    flags["threads"] = torch.get_num_threads()
    torch.manual_seed(args.seed)

    # Data, whole on the device as uint8.
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
        ).to(device)
    except DatasetUnavailableError as error:
        raise cli.RunError(str(error)) from None
    except ValueError as error:
        raise cli.CommandLineError(str(error)) from None
    if len(data.train) < args.batch_size:
        raise cli.CommandLineError(
            f"--batch_size must not exceed the {len(data.train)} training images, since the last partial "
            f"batch is dropped, got {args.batch_size}"
        )

    with open_run(folder):
        # Asked again: another process may have finished this configuration before the folder was ours.
        if recorded(args.results, name, args.force):
            return 0
        environment, commit = describe_environment(device), git_commit()
        write_config(folder, {"run_id": name, **flags, **environment, "git_commit": commit})

        # Model and optimizer.
        model = resnet_cifar(args.model, num_classes).to(device, memory_format=torch.channels_last)
        optimizer = torch.optim.Adam(model.parameters(), lr=flags["lr"], fused=True)
        autocast = partial(torch.autocast, device.type, torch.bfloat16, enabled=args.precision == "bf16")
        # Only the training step is compiled: eval mode and its partial batches would each be compiled again.
        training_model = torch.compile(model) if args.compile else model
        training_loss = torch.compile(loss_fn) if args.compile and args.implementation == "ours" else loss_fn

        # Resume where the last finished epoch ended.
        history, started_utc, times_resumed, commits = [], utc_now(), 0, [commit]
        saved = saved_state(folder, args.results, name)
        if saved:
            with restoring(folder):
                model.load_state_dict(saved["model"])
                if saved["optimizer"] is not None:
                    optimizer.load_state_dict(saved["optimizer"])
                restore_random_states(saved["random_states"], device)
            history, started_utc = saved["history"], saved["started_utc"]
            times_resumed = saved["times_resumed"] + 1
            commits = list(dict.fromkeys([*saved["git_commits"], commit]))
            write_history(folder, history)
            say(f"{name}: continuing after epoch {len(history)} of {args.n_epochs}")
        else:
            say(f"{name}: beginning on {environment['device_name']}, {flags['threads']} threads")

        # Loop.
        on_terminal = sys.stderr.isatty()
        epochs = tqdm(
            range(len(history) + 1, args.n_epochs + 1),
            initial=len(history),
            total=args.n_epochs,
            unit="epoch",
            disable=not on_terminal,
        )
        for epoch in epochs:
            trained = train_epoch(epoch, training_model, training_loss, optimizer, data, autocast, args, on_terminal)
            evaluated = evaluate(epoch, model, loss_fn, data, autocast, args)
            history.append({**trained, **evaluated, "peak_memory_mib": peak_memory_mib(device)})
            state = {
                "epoch": epoch,
                "model": model.state_dict(),
                # Nothing continues a finished run: its file keeps the weights alone.
                "optimizer": optimizer.state_dict() if epoch < args.n_epochs else None,
                "random_states": random_states(device),
                "history": history,
                "started_utc": started_utc,
                "times_resumed": times_resumed,
                "git_commits": commits,
            }
            save_checkpoint(folder, state)
            write_history(folder, history)
            say(epoch_line(history[-1], args.n_epochs))

        # Record.
        measured = summary(history, "epoch")
        trained_images = len(history) * (len(data.train) // args.batch_size) * args.batch_size
        del flags["results"], flags["force"]  # the row is in the one, and of a repetition nothing else is new
        row = {
            "run_id": name,
            **flags,
            "num_classes": num_classes,
            "train_images": len(data.train),
            "valid_images": len(data.valid),
            "test_images": len(data.test),
            **measured,
            "last_train_loss": history[-1]["train_loss"],
            "images_per_second": trained_images / measured["train_seconds"],
            **environment,
            "git_commit": "+".join(filter(None, commits)),
            "times_resumed": times_resumed,
            "started_utc": started_utc,
            "finished_utc": utc_now(),
        }
        write_row(args.results, row)
        remove_checkpoints(folder, (PREVIOUS,))
    say(finished_line(row, "epoch", args.results, folder))
    return 0


def train_epoch(
    epoch: int,
    model: nn.Module,
    loss_fn: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Dataset,
    autocast: partial,
    args: argparse.Namespace,
    on_terminal: bool,
) -> dict[str, float]:
    """Train for one epoch, counted from 1; return its loss, accuracies as fractions, seconds and images/s.

    Order and augmentation depend on seed and epoch alone. Losses and hits stay on the device until the epoch
    is over, so that no step waits for a GPU. Raises RunError if a loss is not finite: at once on the CPU, at
    the end of the epoch, before anything is saved, on a GPU.
    """
    started = time.perf_counter()
    device = data.train.labels.device
    order = epoch_order(len(data.train), args.seed, epoch).to(device)  # (N,)
    generator = epoch_generator(args.seed, epoch, device)
    num_steps = len(order) // args.batch_size  # the last partial batch is dropped
    losses = torch.zeros(num_steps, device=device)
    hits = torch.zeros(len(TOP_K), dtype=torch.int64, device=device)
    model.train()
    bar = tqdm(range(num_steps), desc=f"epoch {epoch}", unit="batch", leave=False, disable=not on_terminal)
    for step in bar:
        images, labels = data.train.batch(order[step * args.batch_size : (step + 1) * args.batch_size])
        images = augment(images, data.mean, data.std, generator)  # (batch, 3, 32, 32) float32, channels_last
        with autocast():
            logits = model(images)  # (batch, num_classes)
        logits = logits.float()
        loss = loss_fn(logits, labels)  # ()
        if device.type == "cpu" and not math.isfinite(loss.item()):
            raise diverged(args.method, loss.item(), f"in epoch {epoch}, step {step + 1} of {num_steps}")
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach()
        hits += count_hits(logits.detach(), labels)
    losses = losses.tolist()  # the one wait for a GPU
    if isinstance(loss_fn, TopKCrossEntropyLoss):
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
) -> dict[str, float]:
    """Return mean loss and accuracies (fractions) on the whole validation and test splits, unaugmented.

    Raises RunError if the validation loss is not finite.
    """
    started = time.perf_counter()
    model.eval()
    result = {}
    for name, split in (("valid", data.valid), ("test", data.test)):
        loss_sum = torch.zeros((), dtype=torch.float64, device=split.labels.device)
        hits = torch.zeros(len(TOP_K), dtype=torch.int64, device=split.labels.device)
        for images, labels in zip(split.images.split(EVAL_BATCH), split.labels.split(EVAL_BATCH)):
            with autocast():
                logits = model(normalise(images, data.mean, data.std))  # (batch, num_classes)
            logits = logits.float()
            loss_sum += loss_fn(logits, labels) * len(labels)
            hits += count_hits(logits, labels)
        result[f"{name}_loss"] = loss_sum.item() / len(split)
        result |= hit_fractions(name, hits.tolist(), len(split))
    if not math.isfinite(result["valid_loss"]):
        raise diverged(args.method, result["valid_loss"], f"in the validation after epoch {epoch}")
    return {**result, "eval_seconds": time.perf_counter() - started}


def epoch_line(epoch: dict[str, float], n_epochs: int) -> str:
    """Return one line on a finished epoch, accuracies as fractions."""
    return (
        f"epoch {epoch['epoch']}/{n_epochs}  train loss {epoch['train_loss']:.4f}  "
        f"valid top-1 {epoch['valid_top1']:.4f} top-5 {epoch['valid_top5']:.4f}  "
        f"test top-1 {epoch['test_top1']:.4f} top-5 {epoch['test_top5']:.4f}  "
        f"trained {epoch['train_seconds']:.1f} s ({epoch['images_per_second']:.0f} images/s), "
        f"evaluated {epoch['eval_seconds']:.1f} s"
    )


def main(argv: list[str] | None = None) -> int:
    """Run the script; return its exit status (see experiments/command_line.py)."""
    return cli.finish(lambda: train(parse_arguments(argv)))


if __name__ == "__main__":
    sys.exit(main())
