"""Tables 1 and 4: ResNet-18 trained from scratch on CIFAR-100 with each loss and each P_K.

    python experiments/train_cifar100.py --method softmax_cross_entropy --p_k 1. 0. 0. 0. 0.
    python experiments/train_cifar100.py --method splitter_selection --distribution logistic_phi \\
        --inverse_temperature .5 --art_lambda .5 --p_k .2 .2 .2 .2 .2
    python experiments/train_cifar100.py --method neuralsort --dataset digits --n_epochs 3      # no download
    python experiments/train_cifar100.py --method softsort --seeds 0 1 2                        # three rows
    torchrun --nproc_per_node 2 -- experiments/train_cifar100.py --method softsort              # two GPUs, one row

Protocol: 5% of the training images for validation, random crop and flip, batch 128, Adam with learning rate 1e-3,
200 epochs, evaluation after each; a row reports test accuracy where validation accuracy was best, per k.

The row is added to results/cifar100.csv (--results); config.json, epochs.csv and the checkpoint lie in
results/runs/<run id>/. A command that was stopped, killed even, continues when it is given again; on the CPU, with
as many threads, it ends with the same bits. A configuration that the file already has is skipped (--force repeats it).
What --seeds and torchrun divide, and what is not published, says docs/reproduce.md.
"""

if __name__ == "__main__":  # from here on, what goes wrong is a sentence
    from data import program

    program.begin()

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from data.cifar100 import (
    DATASETS,
    NOISE_GROUPS,
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
from experiments.shared.command_line import flag
from experiments.shared.environment import ROOT
from experiments.shared.loss_state import count_classes, is_stateless, seed_noise, temperature_of
from experiments.shared.metrics import TOP_K, count_hits, hit_fractions
from experiments.shared.ranks import Ranks
from experiments.shared.run import Run, Steps, check_finite
from experiments.shared.seed_processes import each_seed
from models.resnet_cifar import resnet_cifar

NUM_CLASSES = {"cifar100": 100, "cifar10": 10, "digits": 10}  # known before the data is: refused without a download
NLOGLR = 3.0  # published: learning rate 1e-3
# Published for CIFAR-100, where all 100 scores are sorted; a method that is not here takes the library's default.
INVERSE_TEMPERATURES = {
    **dict.fromkeys(("neuralsort", "softsort"), 0.0625),
    **dict.fromkeys(("odd_even", "bitonic", "splitter_selection"), 0.5),
}
# What makes it another experiment. Where and how fast it is computed (device, threads, compile, deterministic) and
# where files lie does not; nor does --force.
IDENTITY = (
    *("dataset", "limit_train", "limit_test", "label_noise", "noise_groups", "model", "precision"),
    *("method", "p_k", "m", "inverse_temperature", "distribution", "art_lambda", "top1_mode"),
    *cli.CLASSIFIER_FLAGS,
    *("implementation", "lr", "lr_schedule", "weight_decay", "ema", "batch_size", "n_epochs", "seed"),
)
READABLE = "{dataset}-{model}-{method}-pk_{p_k}-{n_epochs}epochs-seed{seed}"  # the run id, before its hash
# Of the evaluation, on which the result does not depend: a CPU's caches hold little, a GPU waits for launches.
EVAL_BATCH = {"cpu": 500, "cuda": 2000}  # the first layers hold two activations of 0.5 GB


@dataclass
class Flags(cli.RecordFlags, cli.MachineFlags, cli.DataFlags, cli.OptimizationFlags, cli.ClassifierFlags):
    """of this script: Adam with default betas and, without --lr, a learning rate of 10^-3"""

    n_epochs: int = 200
    batch_size: int = 128
    lr_schedule: str = flag("constant", ("constant", "cosine"), "half a cosine from the learning rate down to 0")
    ema: float | None = flag(
        None,
        cli.number("a number above 0 and below 1", lambda value: 0 < value < 1),
        "evaluate, choose and keep an exponential moving average of weights and batch-norm statistics, in which "
        "each step counts for 1 - this (none, as published)",
    )
    dataset: str = flag("cifar100", DATASETS, "digits needs no download")
    label_noise: float = flag(0.0, cli.fraction, "probability that a training label is drawn anew from its group")
    noise_groups: str = flag("blocks", NOISE_GROUPS, "blocks are of five consecutive ids")
    model: str = flag("resnet18", ("resnet18", "resnet34", "resnet50"))
    graph: bool = flag(False, bool, "record the training step as one CUDA graph; no GPU has run it yet")
    results: Path = ROOT / "results" / "cifar100.csv"


def parse_arguments(argv: list[str] | None = None) -> Flags:
    """Return the flags, each checked on its own. Raises CommandLineError."""
    return cli.parse(Flags, argv, __doc__)


def begin(args: Flags, ranks: Ranks) -> tuple[Run, nn.Module, Dataset]:
    """Return what a run begins with: what can be refused is refused here. Raises AlreadyRecorded, too."""
    device = cli.training_device(args, ranks)
    told = f"--batch_size must be at least the number of processes: got {args.batch_size} and {ranks.count} processes"
    cli.check(args.batch_size >= ranks.count, told)
    with cli.refusing(DatasetUnavailableError):
        settings = cli.loss_settings(args, top1_mode="smce", inverse_temperatures=INVERSE_TEMPERATURES)
        loss_fn = cli.build_loss(args.implementation, settings, NUM_CLASSES[args.dataset], device)
        flags = {  # with nothing left to a default
            **{name: value for name, value in vars(args).items() if name != "seeds"},  # they have a row each
            **settings,
            **cli.learning_rate(args, NLOGLR),
            # Empty where as published (so is ema): ids of rows from before there was a choice stay.
            "lr_schedule": args.lr_schedule if args.lr_schedule != "constant" else None,
            "weight_decay": args.weight_decay or None,
            "data_dir": cli.portable(args.data_dir),
            "noise_groups": args.noise_groups if args.label_noise > 0 else None,
        }
        run = Run(args, flags, IDENTITY, READABLE, device, ranks)
        names = ("limit_train", "limit_test", "label_noise", "noise_groups", "mirror", "seed")
        data = load_dataset(args.dataset, args.data_dir, **{name: getattr(args, name) for name in names})
    told = f"--batch_size must not exceed the {len(data.train)} training images, got {args.batch_size}"
    cli.check(args.batch_size <= len(data.train), told)
    return run, loss_fn, data


def train(args: Flags, ranks: Ranks) -> int:
    """Train one configuration with --seed and record its row; return the exit status."""
    run, loss_fn, data = begin(args, ranks)
    with run.held():
        # Data, whole on the device as uint8; model and optimizer.
        data = data.to(run.device)
        count_classes(loss_fn, args.method, data.train.labels, data.num_classes)
        model = resnet_cifar(args.model, data.num_classes).to(run.device, memory_format=torch.channels_last)
        rate = run.flags["lr"]
        optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=args.weight_decay, fused=True)
        evaluated, average = model, None
        if args.ema:
            average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(args.ema), use_buffers=True)
            evaluated = average.module
        training = {"model": model, "optimizer": optimizer, "average": average, "loss": loss_fn}
        run.track(evaluated, training, end=args.n_epochs)

        # Loop. Only the training step is compiled: eval mode and its partial batches would each be compiled again.
        steps_model = run.compiled(model)
        stateless = args.implementation == "ours" and is_stateless(run.flags)
        steps_loss = run.compiled(loss_fn) if stateless else loss_fn
        num_steps = len(data.train) // args.batch_size  # the last partial batch is dropped
        steps = Steps(run, optimizer, loss_fn, num_steps, args.n_epochs, lr_schedule=args.lr_schedule)
        if average:
            steps.after = lambda: average.update_parameters(model)
        for epoch in run.remaining():
            trained = train_epoch(epoch, steps, steps_model, steps_loss, data)
            for part in (model, average) if average else (model,):
                ranks.copy_from_first(part.buffers())  # the running statistics
            measured = {**trained, **evaluate(epoch, run, evaluated, loss_fn, data)}
            measured |= temperature_of(loss_fn, run.flags["inverse_temperature"])
            run.save(measured, f"epoch {epoch}/{args.n_epochs}")

        columns = {"processes": ranks.count, "num_classes": data.num_classes}
        columns |= {f"{name}_images": len(getattr(data, name)) for name in ("train", "valid", "test")}
        run.record(columns, args.n_epochs * num_steps * args.batch_size)
    return 0


def train_epoch(epoch: int, steps: Steps, model: nn.Module, loss_fn: nn.Module, data: Dataset) -> dict[str, float]:
    """Train for one epoch, counted from 1; return its loss, accuracies as fractions, seconds and images/s.

    Losses and hits stay on the device until it is over, so that no step waits for a GPU. Raises Diverged.
    """
    started, run = time.perf_counter(), steps.run
    args, device, ranks = run.args, run.device, run.ranks
    share = ranks.share(args.batch_size)

    def batch_loss(rows: Tensor, *crops: Tensor) -> tuple[Tensor, Tensor]:
        """The loss () and the hits (5,) of training images, each of them by its row and its crop, (share,)."""
        images, labels = data.train.batch(rows)
        images = normalise(crop_and_flip(images, *crops), data.mean, data.std)
        with run.autocast():
            logits = model(images)  # (share, num_classes)
        logits = logits.float()
        # Summed over the processes, the mean over the batch.
        return loss_fn(logits, labels) * ranks.weight(args.batch_size), count_hits(logits.detach(), labels)

    order = epoch_order(len(data.train), args.seed, epoch)  # (N,)
    if device.type == "cuda":
        order = order.pin_memory()  # copied without waiting
    order = order.to(device, non_blocking=True)
    generator = epoch_generator(args.seed, epoch, device)
    seed_noise(steps.loss_fn, device, args.seed, epoch, ranks.rank)
    hits = torch.zeros(len(TOP_K), dtype=torch.int64, device=device)
    model.train()
    loss_fn.train()
    for step in steps.of(epoch):
        rows = order[step * args.batch_size : (step + 1) * args.batch_size][share]
        # Drawn for the whole batch, so that an image is cropped alike by any number of processes.
        crops = [each[share] for each in sample_crops(args.batch_size, generator)]
        hits += steps.take(batch_loss, rows, *crops)
    loss, hits, num_images = steps.mean(), ranks.total(hits).tolist(), steps.num_steps * args.batch_size
    seconds = time.perf_counter() - started
    speed = {"train_seconds": seconds, "images_per_second": num_images / seconds}
    return {"epoch": epoch, "train_loss": loss, **hit_fractions("train", hits, num_images), **speed}


@torch.no_grad()
def evaluate(epoch: int, run: Run, model: nn.Module, loss_fn: nn.Module, data: Dataset) -> dict[str, float]:
    """Return mean loss and accuracies (fractions) on the whole of valid and test, unaugmented. Raises Diverged."""
    started, device, ranks = time.perf_counter(), run.device, run.ranks
    model.eval()
    loss_fn.eval()
    splits = {"valid": data.valid, "test": data.test}
    sums = torch.zeros(len(splits), 1 + len(TOP_K), dtype=torch.float64, device=device)  # of losses, then hits
    for of_split, split in zip(sums, splits.values()):
        share, size = ranks.share(len(split)), EVAL_BATCH[device.type]
        for first in range(share.start, share.stop, size):
            batch = slice(first, min(first + size, share.stop))
            images, labels = split.images[batch], split.labels[batch]
            with run.autocast():
                logits = model(normalise(images, data.mean, data.std))  # (batch, num_classes)
            logits = logits.float()
            of_split[0] += loss_fn(logits, labels) * len(labels)
            of_split[1:] += count_hits(logits, labels)
    result = {}
    for (name, split), (loss, *hits) in zip(splits.items(), ranks.total(sums).tolist()):
        result |= {f"{name}_loss": loss / len(split), **hit_fractions(name, hits, len(split))}
    check_finite(run, result["valid_loss"], f"in the validation after epoch {epoch}")
    return {**result, "eval_seconds": time.perf_counter() - started}


def main(argv: list[str] | None = None) -> int:
    return cli.finish(lambda ranks: each_seed(begin, train, parse_arguments(argv), ranks))


if __name__ == "__main__":
    program.end(main())
