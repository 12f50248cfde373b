"""Tables 1 and 4: ResNet-18 trained from scratch on CIFAR-100 with each loss and each P_K.

    python experiments/train_cifar100.py --method softmax_cross_entropy
    python experiments/train_cifar100.py --method splitter_selection --p_k .2 .2 .2 .2 .2 --seeds 0 1
    python experiments/train_cifar100.py --method neuralsort --dataset digits --n_epochs 3      # no download
    torchrun --nproc_per_node 2 -- experiments/train_cifar100.py --method softsort              # two GPUs, one row

Protocol: 5 % of the training images, which the seed chooses, validate; random crop and flip, batch 128, Adam with
learning rate 1e-3, 200 epochs. Validation and test are evaluated after each epoch (--eval_freq: less often). The row in
results/cifar100.csv has, for each k, the test accuracy where validation accuracy was best; the run's folder is
results/runs/<run id>. A command that was stopped or killed continues when it is repeated; a run that the file already
has is skipped.
"""

import argparse
import hashlib
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm import tqdm

from data.cifar import DATASETS, crop_and_flip, load_dataset, sample_crops
from data.splits import Dataset, Split, epoch_generator, epoch_order
from experiments.common import door, flags
from experiments.common.metrics import TOP_K, count_hits, hit_fractions
from experiments.common.objective import Objective, build_loss, check_finite, fill_in_loss
from experiments.common.processes import Processes, compiled
from experiments.common.run import Run
from experiments.common.settings import CIFAR
from models.resnet_cifar import resnet_cifar

NLOGLR = 3.0  # published: learning rate 1e-3
# Published for CIFAR-100, where all 100 scores are sorted; other methods take the library's default.
INVERSE_TEMPERATURES = {
    "neuralsort": 0.0625,
    "softsort": 0.0625,
    "odd_even": 0.5,
    "bitonic": 0.5,
    "splitter_selection": 0.5,
}
READABLE = "{dataset}-{model}-{method}-pk_{p_k}-{n_epochs}epochs-seed{seed}"
EVAL_BATCH = {"cpu": 500, "cuda": 2000}  # the result does not depend on it


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = flags.make_parser(__doc__)
    flags.add_loss_flags(parser)
    flags.add_optimization_flags(parser, n_epochs=200, batch_size=128)
    flags.add_network_flags(parser)
    flags.add_run_flags(parser, results="cifar100.csv")
    parser.add_argument("--lr_schedule", choices=("constant", "cosine"), default="constant", help="default: constant")
    parser.add_argument(
        "--eval_freq",
        type=flags.number(int, 2),
        help="epochs between evaluations; the last epoch has one, too (default: each has one)",
    )
    parser.add_argument(
        "--ema",
        type=flags.number(float, 0.001, 0.999999),
        help="evaluate an average of the weights with this decay (default: none)",
    )
    parser.add_argument("--dataset", choices=DATASETS, default="cifar100", help="default: cifar100")
    flags.add_data_dir(parser)
    parser.add_argument("--limit_train", type=flags.positive_int, help="number of training images (default: all)")
    label_noise = parser.add_mutually_exclusive_group()
    label_noise.add_argument(
        "--label_noise",
        type=flags.fraction,
        default=0.0,
        help="share of training labels made random within groups of five classes (default: 0)",
    )
    label_noise.add_argument(
        "--noisy_labels",
        type=flags.existing_file,
        metavar="FILE",
        help="labels by people for training and validation, CIFAR-100_human.pt of CIFAR-100N (default: correct labels)",
    )
    models = ("resnet18", "resnet34", "resnet50")
    parser.add_argument("--model", choices=models, default="resnet18", help="default: resnet18")
    return parser.parse_args(argv)


def configuration(args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Every setting of one run by name, defaults filled in. Raises ValueError for settings that do not fit."""
    config = vars(args).copy()
    config |= fill_in_loss(args, top1_mode="smce", inverse_temperatures=INVERSE_TEMPERATURES)
    config |= flags.learning_rate(args, NLOGLR)
    config["seed"] = seed
    config["noise_groups"] = noise_groups(args.label_noise, args.noisy_labels)
    return config


def noise_groups(label_noise: float, noisy_labels: Path | None) -> str | None:
    """Name the classes among which labels were exchanged, or the file of labels by its content."""
    if noisy_labels is not None:
        digest = hashlib.sha256(noisy_labels.read_bytes()).hexdigest()
        return f"human-{digest[:8]}"
    if label_noise > 0:
        return "blocks"  # of five consecutive classes
    return None


@dataclass
class Training:
    """What one run trains and evaluates."""

    config: dict[str, Any]
    processes: Processes
    share: slice  # of a batch: this process's part of it
    weight: float  # with which the mean over that part counts
    data: Dataset
    network: nn.Module  # the model, possibly compiled
    evaluated: nn.Module  # the model, or the average of its weights
    objective: Objective
    optimizer: torch.optim.Optimizer


class Tally:
    """Losses and hits of an epoch. They stay on the device, so that no step waits for a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.losses: list[Tensor] = []
        self.hits = torch.zeros(len(TOP_K), dtype=torch.int64, device=device)

    def add(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        self.losses.append(loss.detach())
        self.hits += count_hits(logits.detach(), labels)

    def mean_loss(self, processes: Processes) -> float:
        losses = processes.sum(torch.stack(self.losses)).tolist()
        return math.fsum(losses) / len(losses)


def train(config: dict[str, Any], processes: Processes) -> None:
    """Train and record one run."""
    run = Run(CIFAR, READABLE, config, processes)
    loss_fn = build_loss(config, DATASETS[config["dataset"]], processes.device)
    if not run.start():
        return

    data = load_dataset(
        config["dataset"],
        config["data_dir"],
        seed=config["seed"],
        limit_train=config["limit_train"],
        label_noise=config["label_noise"],
        noisy_labels_file=config["noisy_labels"],
    ).to(processes.device)
    if config["batch_size"] > len(data.train):
        raise ValueError(f"--batch_size {config['batch_size']} exceeds the {len(data.train)} training images")
    torch.manual_seed(config["seed"])
    model = resnet_cifar(config["model"], data.num_classes)
    model = model.to(processes.device, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), config["lr"], weight_decay=config["weight_decay"], fused=True)
    evaluated = model
    averaging = {}
    if config["ema"] is not None:
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(config["ema"]), use_buffers=True)
        optimizer.register_step_post_hook(lambda *_: average.update_parameters(model))
        evaluated = average.module
        averaging = {"trained": model, "average": average}
    run.resume(model=evaluated, optimizer=optimizer, loss=loss_fn, **averaging)
    training = Training(
        config,
        processes,
        share=processes.share(config["batch_size"]),
        weight=processes.weight(config["batch_size"]),
        data=data,
        network=compiled(model, config["compile"], processes.device),
        evaluated=evaluated,
        objective=Objective(config, loss_fn, processes.device),
        optimizer=optimizer,
    )
    training.objective.count_classes(data.train.labels, data.num_classes)

    train_epochs(run, training)
    run.record({"num_classes": data.num_classes} | data.counts())


def train_epochs(run: Run, training: Training) -> None:
    """Train what is left of the epochs; evaluate and save after every --eval_freq of them, and after the last."""
    config = training.config
    processes = training.processes
    train_seconds = 0.0  # since the last evaluation
    for epoch in range(run.done + 1, config["n_epochs"] + 1):
        training.objective.draw_noise_by(config["seed"], epoch, processes.rank)
        entry = train_epoch(epoch, training)
        train_seconds += entry["train_seconds"]
        processes.copy_from_first(training.evaluated.buffers())  # the running statistics of batch norm
        processes.copy_from_first(training.network.buffers())
        last = epoch == config["n_epochs"]
        if last or epoch % (config["eval_freq"] or 1) == 0:
            entry |= evaluate(training)
            entry |= training.objective.temperature()
            entry["train_seconds"] = train_seconds
            train_seconds = 0.0
            run.save(entry, last=last, message=f"epoch {epoch}/{config['n_epochs']}")


def train_epoch(epoch: int, training: Training) -> dict[str, float]:
    """Train for one epoch, counted from 1; return its mean loss, accuracies (fractions) and seconds."""
    started = time.perf_counter()
    config = training.config
    processes = training.processes
    objective = training.objective
    optimizer = training.optimizer
    num_steps = len(training.data.train) // config["batch_size"]  # without the last partial batch
    tally = Tally(processes.device)
    training.network.train()
    objective.train()
    for step, (images, labels) in enumerate(training_batches(epoch, num_steps, training)):
        progress = (epoch - 1 + step / num_steps) / config["n_epochs"]  # from 0 to almost 1
        objective.set_progress(progress)
        set_learning_rate(optimizer, config, progress)
        with torch.autocast(processes.device.type, torch.bfloat16, enabled=config["precision"] == "bf16"):
            logits = training.network(images)  # (share, num_classes)
        logits = logits.float()
        loss = objective(logits, labels) * training.weight

        optimizer.zero_grad()
        loss.backward()
        processes.sum_gradients(training.network.parameters())
        optimizer.step()
        tally.add(loss, logits, labels)
    mean_loss = tally.mean_loss(processes)
    check_finite(mean_loss, f"in epoch {epoch}")
    result = {"epoch": epoch, "train_loss": mean_loss}
    result |= hit_fractions("train", processes.sum(tally.hits).tolist(), num_steps * config["batch_size"])
    result["train_seconds"] = time.perf_counter() - started
    return result


def training_batches(epoch: int, num_steps: int, training: Training) -> Iterator[tuple[Tensor, Tensor]]:
    """Normalised crops (share, 3, 32, 32) and labels (share,) of each step: this process's share of the batch."""
    data = training.data
    processes = training.processes
    seed = training.config["seed"]
    batch_size = training.config["batch_size"]
    order = epoch_order(len(data.train), seed, epoch).to(processes.device)  # (train,)
    generator = epoch_generator(seed, epoch, processes.device)
    hidden = None if processes.is_first else True
    for step in tqdm(range(num_steps), f"epoch {epoch}", leave=False, disable=hidden):
        # Crops are drawn for the whole batch, so that they do not depend on the number of processes.
        rows = order[step * batch_size : (step + 1) * batch_size]  # (batch,)
        tops, lefts, flips = sample_crops(batch_size, generator)  # (batch,) each
        images, labels = data.train.batch(rows[training.share])
        images = crop_and_flip(images, tops[training.share], lefts[training.share], flips[training.share])
        yield data.normalise(images), labels


def set_learning_rate(optimizer: torch.optim.Optimizer, config: dict[str, Any], progress: float) -> None:
    """Set the learning rate of a cosine schedule when this share of the training, in [0, 1], is done."""
    if config["lr_schedule"] == "cosine":
        for group in optimizer.param_groups:
            group["lr"] = config["lr"] * (1 + math.cos(math.pi * progress)) / 2


def evaluate(training: Training) -> dict[str, float]:
    """Mean loss and top-k accuracies (fractions) on the whole validation and test set, without augmentation.

    If the labels of validation are wrong, also on its images with correct labels.
    """
    started = time.perf_counter()
    training.evaluated.eval()
    training.objective.eval()
    result = {}
    for name in ("valid", "test", "clean"):
        split = getattr(training.data, name)
        if split is not None:
            result |= evaluate_split(name, split, training)
    result["eval_seconds"] = time.perf_counter() - started
    return result


@torch.no_grad()
def evaluate_split(name: str, split: Split, training: Training) -> dict[str, float]:
    processes = training.processes
    device = processes.device
    share = processes.share(len(split))
    size = EVAL_BATCH[device.type]
    sums = torch.zeros(1 + len(TOP_K), dtype=torch.float64, device=device)  # of losses, then hits
    batches = zip(split.inputs[share].split(size), split.labels[share].split(size))
    for images, labels in batches:
        images = training.data.normalise(images)  # (size, 3, 32, 32)
        with torch.autocast(device.type, torch.bfloat16, enabled=training.config["precision"] == "bf16"):
            logits = training.evaluated(images)  # (size, num_classes)
        logits = logits.float()
        sums[0] += training.objective(logits, labels) * len(labels)
        sums[1:] += count_hits(logits, labels)
    total_loss, *hits = processes.sum(sums).tolist()
    check_finite(total_loss, f"on {name}")
    result = {f"{name}_loss": total_loss / len(split)}
    result |= hit_fractions(name, hits, len(split))
    return result


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    processes = Processes(args.device, args.threads, args.precision)
    for seed in args.seed:
        train(configuration(args, seed), processes)
    processes.close()
    return 0


if __name__ == "__main__":
    sys.exit(door.call(main))
