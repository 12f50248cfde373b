"""Time of a CIFAR-100 training step with each loss, as a ratio to the softmax row's; and of the official recipe.

    python benchmarks/training_step.py                                  # ResNet-18, batch 128, bf16
    python benchmarks/training_step.py --precision fp32 --methods softsort --device cuda
    python benchmarks/training_step.py --recipe --steps 8 --output results/benchmarks/recipe.csv

The step is that of experiments/train_cifar100.py (gather, augment, forward, loss, backward, Adam) on random images. The
methods take turns; medians over the turns. --recipe: images per second beside torchvision's transforms on PIL images in
a DataLoader (in the process, and with a worker per thread: the faster one counts), fp32, the default memory format, the
official loss (difftopk), loss.item() in each step.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import CIFAR100

from benchmarks.runner import SOFTMAX, Table, add_precision, parser, ratio, take_turns
from data.cifar import CIFAR_MEAN, CIFAR_STD, crop_and_flip, sample_crops, scale_and_shift
from data.splits import Split, epoch_generator
from experiments.common.objective import published_p_k
from experiments.common.official_loss import make_official_loss
from experiments.common.processes import prepare_device
from models.resnet_cifar import resnet_cifar
from topk_losses import METHODS, RELAXATIONS, make_loss

NUM_CLASSES = 100


class RandomImages(CIFAR100):
    """torchvision's CIFAR-100 with other images (N, 3, 32, 32) uint8 and labels (N,)."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.data = images.permute(0, 2, 3, 1).numpy()
        self.targets = labels.tolist()
        self.target_transform = None
        steps = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
        self.transform = transforms.Compose([*steps, transforms.Normalize(CIFAR_MEAN, CIFAR_STD)])


def settings_of(method: str) -> dict[str, object]:
    """Return the method's P_K and mode, as the script has them without flags."""
    settings: dict[str, object] = {"method": method, "p_k": published_p_k(method), "num_classes": NUM_CLASSES}
    if method in RELAXATIONS:
        settings["top1_mode"] = "smce"
    return settings


def our_steps(
    methods: list[str], images: Tensor, labels: Tensor, batch: int, precision: str, device: torch.device
) -> dict[str, Callable[[], object]]:
    """Return for each method a function that makes a training step of one network, and one that augments a batch."""
    split = Split(images.contiguous(memory_format=torch.channels_last), labels).to(device)
    scale, shift = scale_and_shift("cifar100")
    scale = scale.to(device)
    shift = shift.to(device)
    generator = epoch_generator(0, 1, device)
    model = resnet_cifar("resnet18", NUM_CLASSES).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5, fused=True)

    def augmented() -> tuple[Tensor, Tensor]:
        rows, targets = split.batch(torch.randint(len(labels), (batch,), device=device))
        return crop_and_flip(rows, *sample_crops(batch, generator)) * scale + shift, targets

    def step_of(method: str) -> Callable[[], object]:
        loss_fn = make_loss(**settings_of(method)).to(device)

        def step() -> None:
            rows, targets = augmented()
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                logits = model(rows)  # (batch, num_classes)
            optimizer.zero_grad()
            loss_fn(logits.float(), targets).backward()
            optimizer.step()

        return step

    steps: dict[str, Callable[[], object]] = {method: step_of(method) for method in methods}
    steps["augmentation"] = augmented
    return steps


def official_step(
    method: str, images: Tensor, labels: Tensor, batch: int, workers: int, device: torch.device
) -> Callable[[], None]:
    """Return a function that makes one training step by the official recipe."""
    options = {"num_workers": workers, "persistent_workers": workers > 0, "pin_memory": device.type == "cuda"}
    loader = DataLoader(RandomImages(images, labels), batch, shuffle=True, drop_last=True, **options)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))  # of epoch after epoch
    model = resnet_cifar("resnet18", NUM_CLASSES).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    loss_fn = make_official_loss(**settings_of(method), device=device)

    def step() -> None:
        rows, targets = (part.to(device, non_blocking=True) for part in next(batches))
        loss = loss_fn(model(rows), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()

    return step


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    flags = parser(__doc__, "training_step.csv", "all; with --recipe two", turns=7, steps=3, batch=128, images=5000)
    add_precision(flags)
    flags.add_argument("--recipe", action="store_true", help="compare with the official recipe instead")
    args = flags.parse_args(argv)
    torch.manual_seed(0)
    prepare_device(args.device, args.threads)
    images = torch.randint(256, (args.images, 3, 32, 32), dtype=torch.uint8)
    labels = torch.randint(NUM_CLASSES, (args.images,))
    table = Table(args)
    if args.recipe:
        for method in args.methods or [SOFTMAX, "splitter_selection"]:
            found = [beside_recipe(method, images, labels, workers, args) for workers in (0, args.threads)]
            fastest = max(found, key=lambda row: row["official_images_per_second"])
            table.add(method=method, precision=args.precision, **fastest)
    else:
        add_methods(table, images, labels, args)
    return table.write()


def add_methods(table: Table, images: Tensor, labels: Tensor, args: argparse.Namespace) -> None:
    """Add a row for the step with each loss, and one for the augmentation alone."""
    methods = list(dict.fromkeys([SOFTMAX, *(args.methods or METHODS)]))
    steps = our_steps(methods, images, labels, args.batch, args.precision, args.device)
    times = take_turns(steps, args.turns, args.steps, args.threads)
    for name, found in times.items():
        milliseconds = statistics.median(found)
        over_softmax = None
        if name != "augmentation":
            over_softmax = f"{ratio(found, times[SOFTMAX]):.3f}"
        table.add(
            method=name,
            precision=args.precision,
            ms_per_step=milliseconds,
            over_softmax=over_softmax,
            images_per_second=f"{args.batch / milliseconds * 1e3:.0f}",
        )


def beside_recipe(
    method: str, images: Tensor, labels: Tensor, workers: int, args: argparse.Namespace
) -> dict[str, Any]:
    """The columns of our step beside the official recipe with a number of workers."""
    ours = our_steps([method], images, labels, args.batch, args.precision, args.device)[method]
    official = official_step(method, images, labels, args.batch, workers, args.device)
    times = take_turns({"ours": ours, "official": official}, args.turns, args.steps, args.threads)
    return {
        "official_images_per_second": 1e3 * args.batch / statistics.median(times["official"]),
        "images_per_second": 1e3 * args.batch / statistics.median(times["ours"]),
        "ours_over_official": f"{ratio(times['official'], times['ours']):.3f}",
        "official_workers": workers,
    }


if __name__ == "__main__":
    sys.exit(main())
