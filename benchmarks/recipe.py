"""Images per second of CIFAR-100 training by this repository's loop and by the official recipe, at equal threads.

    python benchmarks/recipe.py                                           # ResNet-18, batch 128; ours in bf16
    python benchmarks/recipe.py --methods splitter_selection --precision fp32 --device cuda

Ours: a step of experiments/train_cifar100.py. The official recipe: torchvision's transforms on PIL images in a
DataLoader, fp32, the default memory format, PyTorch's default Adam, the official loss (difftopk), loss.item() in each
step. Its DataLoader runs in the training process and again with a worker process per thread; the faster of the two
counts. Both train the same network on the same random images of CIFAR-100's size, and take turns, a few steps each, so
that a machine that slows down slows both. Prints a table and writes --output (default results/benchmarks/recipe.csv):
images per second, medians over the turns, and the median of the turns' ratios.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from benchmarks.table import add_output_flag, write_table
from data.cifar100 import CIFAR_MEAN, CIFAR_STD, Split, augment, epoch_generator
from experiments.shared.command_line import DEFAULT_P_K, present_device
from experiments.shared.cores import usable_cores
from experiments.shared.environment import device_name, keep_freed_memory, set_up_device
from experiments.shared.official_loss import executor_of, make_official_loss
from models.resnet_cifar import resnet_cifar
from topk_losses import METHODS, RELAXATIONS, make_loss

BATCH, NUM_CLASSES, NUM_IMAGES = 128, 100, 5000
# Seconds in which workers fill their queue, so that they do not take the cores from our turn: to the official recipe's
# advantage, whose first batches are then for nothing.
PAUSE = 0.5
COLUMNS = (
    *("method", "precision", "images_per_second", "official_images_per_second", "ours_over_official"),
    *("official_workers", "official_path", "turns", "device", "threads", "torch"),
)


class PilImages(Dataset):
    """Images (N, 32, 32, 3) uint8 and labels (N,), each made a PIL image and transformed when it is asked for."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images.numpy(), labels.tolist()
        self.transform = transforms.Compose(
            [
                transforms.RandomCrop(32, padding=4),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(CIFAR_MEAN, CIFAR_STD),
            ]
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


def endless(loader: DataLoader) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of epoch after epoch."""
    while True:
        yield from loader


def our_steps(method: str, images: Tensor, labels: Tensor, precision: str, device: torch.device) -> Callable[[], None]:
    """Return a function that makes one training step as experiments/train_cifar100.py does."""
    split = Split(images.permute(0, 3, 1, 2), labels).to(device)
    generator = epoch_generator(0, 1, device)
    model = resnet_cifar("resnet18", NUM_CLASSES).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5, fused=True)
    mode = {"top1_mode": "smce"} if method in RELAXATIONS else {}
    loss_fn = make_loss(method, DEFAULT_P_K.get(method), NUM_CLASSES, **mode).to(device)

    def step() -> None:
        batch, targets = split.batch(torch.randint(NUM_IMAGES, (BATCH,), device=device))
        batch = augment(batch, CIFAR_MEAN, CIFAR_STD, generator)  # (batch, 3, 32, 32)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            logits = model(batch)  # (batch, num_classes)
        loss = loss_fn(logits.float(), targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


def official_steps(
    method: str, images: Tensor, labels: Tensor, workers: int, device: torch.device
) -> Callable[[], None]:
    """Return a function that makes one training step by the official recipe."""
    loader = DataLoader(
        PilImages(images, labels),
        BATCH,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=device.type == "cuda",
    )
    batches = endless(loader)
    model = resnet_cifar("resnet18", NUM_CLASSES).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    mode = {"top1_mode": "smce"} if method in RELAXATIONS else {}
    p_k = DEFAULT_P_K.get(method, (0.2,) * 5)
    loss_fn = make_official_loss(method, p_k, NUM_CLASSES, device=device, **mode)

    def step() -> None:
        batch, targets = (each.to(device, non_blocking=True) for each in next(batches))
        loss = loss_fn(model(batch), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()

    return step


def images_per_second(step: Callable[[], None], number: int, device: torch.device) -> float:
    """Make so many steps and return the images per second."""
    start = time.perf_counter()
    for _ in range(number):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return number * BATCH / (time.perf_counter() - start)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=["softmax_cross_entropy", "splitter_selection"]
    )
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16", help="of ours (%(default)s)")
    parser.add_argument("--device", type=present_device, default="cpu")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8, help="steps per turn")
    add_output_flag(parser, "recipe.csv")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = arguments.device
    set_up_device(device, arguments.threads, deterministic=False)
    keep_freed_memory()
    images = torch.randint(256, (NUM_IMAGES, 32, 32, 3), dtype=torch.uint8)
    labels = torch.randint(NUM_CLASSES, (NUM_IMAGES,))

    rows = []
    for method in arguments.methods:
        best: dict[str, object] = {}
        for workers in (0, arguments.threads):
            ours = our_steps(method, images, labels, arguments.precision, device)
            official = official_steps(method, images, labels, workers, device)
            turns = []
            for turn in range(arguments.turns + 1):
                rates = []
                for step in (ours, official):
                    time.sleep(PAUSE)
                    rates.append(images_per_second(step, arguments.steps, device))
                if turn > 0:  # the first turn warms up
                    turns.append(rates)
            ours_rate, official_rate = (statistics.median(rates) for rates in zip(*turns))
            ratio = statistics.median(a / b for a, b in turns)
            print(
                f"{method:22} {ours_rate:8.1f} images/s, official, {workers} workers {official_rate:8.1f}: {ratio:.2f}x"
            )
            if not best or official_rate > float(best["official_images_per_second"]):
                best = dict(
                    method=method,
                    precision=arguments.precision,
                    images_per_second=f"{ours_rate:.4g}",
                    official_images_per_second=f"{official_rate:.4g}",
                    ours_over_official=f"{ratio:.3f}",
                    official_workers=workers,
                    official_path=executor_of(method),
                    turns=arguments.turns,
                    device=device_name(device),
                    threads=arguments.threads,
                    torch=torch.__version__,
                )
        rows.append(best)
    write_table(arguments.output, COLUMNS, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
