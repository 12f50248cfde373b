"""Time of a CIFAR-100 training step with each loss, as a ratio to the softmax row's; and of the augmentation.

    python benchmarks/training_step.py                                  # ResNet-18, batch 128, bf16
    python benchmarks/training_step.py --precision fp32 --methods softsort --device cuda

The step is that of experiments/train_cifar100.py (gather, augment, forward, loss, backward, Adam) on random images of
CIFAR-100's size; an epoch is 371 such steps and an evaluation that does not depend on the loss. The methods take turns,
a few steps each, so that a machine that slows down slows all of them; medians over the turns. Prints a table and
writes --output (default results/benchmarks/training_step.csv).
"""

import argparse
import statistics
import sys
import time

import torch

from benchmarks.table import add_output_flag, write_table
from data.cifar100 import CIFAR_MEAN, CIFAR_STD, Split, augment, epoch_generator
from experiments.shared.command_line import DEFAULT_P_K, present_device
from experiments.shared.cores import usable_cores
from experiments.shared.environment import device_name, keep_freed_memory, set_up_device
from models.resnet_cifar import resnet_cifar
from topk_losses import METHODS, RELAXATIONS, make_loss

BATCH, NUM_CLASSES, NUM_IMAGES = 128, 100, 5000
COLUMNS = ("method", "precision", "ms_per_step", "over_softmax", "images_per_second", "device", "threads", "torch")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--device", type=present_device, default="cpu")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="steps per turn and method")
    add_output_flag(parser, "training_step.csv")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = arguments.device
    set_up_device(device, arguments.threads, deterministic=False)
    keep_freed_memory()
    methods = list(dict.fromkeys(["softmax_cross_entropy", *arguments.methods]))

    images = torch.randint(256, (NUM_IMAGES, 3, 32, 32), dtype=torch.uint8).contiguous(
        memory_format=torch.channels_last
    )
    split = Split(images, torch.randint(NUM_CLASSES, (NUM_IMAGES,))).to(device)
    generator = epoch_generator(0, 1, device)
    model = resnet_cifar("resnet18", NUM_CLASSES).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5, fused=True)
    losses = {}
    for method in methods:
        mode = {"top1_mode": "smce"} if method in RELAXATIONS else {}
        losses[method] = make_loss(method, DEFAULT_P_K.get(method), NUM_CLASSES, **mode).to(device)

    def steps(method: str, number: int) -> float:
        """Milliseconds per training step."""
        start = time.perf_counter()
        for _ in range(number):
            batch, labels = split.batch(torch.randint(NUM_IMAGES, (BATCH,), device=device))
            batch = augment(batch, CIFAR_MEAN, CIFAR_STD, generator)  # (batch, 3, 32, 32)
            with torch.autocast(device.type, torch.bfloat16, enabled=arguments.precision == "bf16"):
                logits = model(batch)  # (batch, num_classes)
            loss = losses[method](logits.float(), labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start) / number

    def augmentation(number: int = 50) -> float:
        """Milliseconds per batch."""
        start = time.perf_counter()
        for _ in range(number):
            batch, _ = split.batch(torch.randint(NUM_IMAGES, (BATCH,), device=device))
            augment(batch, CIFAR_MEAN, CIFAR_STD, generator)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start) / number

    times: dict[str, list[float]] = {name: [] for name in (*methods, "augmentation")}
    for turn in range(arguments.turns + 1):
        measured = {method: steps(method, arguments.steps) for method in methods} | {"augmentation": augmentation()}
        if turn > 0:  # the first turn warms up
            for name, value in measured.items():
                times[name].append(value)
    softmax = statistics.median(times["softmax_cross_entropy"])
    rows = []
    for name, values in times.items():
        ms = statistics.median(values)
        over = (
            ""
            if name == "augmentation"
            else f"{statistics.median(a / b for a, b in zip(values, times[methods[0]])):.3f}"
        )
        place = (device_name(device), arguments.threads, torch.__version__)
        rows.append(
            dict(zip(COLUMNS, (name, arguments.precision, f"{ms:.4g}", over, f"{BATCH / ms * 1e3:.0f}", *place)))
        )
        print(f"{name:22} {ms:9.2f} ms {over:>7} x softmax {BATCH / ms * 1e3:9.0f} images/s")
    print(
        f"{arguments.precision}, {device_name(device)}, {arguments.threads} threads; softmax {softmax:.1f} ms per step"
    )
    write_table(arguments.output, COLUMNS, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
