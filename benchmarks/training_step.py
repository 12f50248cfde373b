"""Time of a CIFAR-100 training step with each loss, as a ratio to the softmax row's; and of the augmentation.

    python benchmarks/training_step.py                                  # ResNet-18, batch 128, bf16
    python benchmarks/training_step.py --precision fp32 --methods softsort --device cuda

The step is that of experiments/train_cifar100.py (gather, augment, forward, loss, backward, Adam) on random images of
CIFAR-100's size; an epoch is 371 such steps and an evaluation that does not depend on the loss. The methods take turns,
a few steps each; medians over the turns. Prints a table and writes --output (default
results/benchmarks/training_step.csv).
"""

import statistics
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.runner import Table, parser, ratio, take_turns
from data.cifar import CIFAR_MEAN, CIFAR_STD, Split, crop_and_flip, epoch_generator, normalise, sample_crops
from experiments.common.losses import DEFAULT_P_K
from experiments.common.processes import prepare_device
from models.resnet_cifar import resnet_cifar
from topk_losses import METHODS, RELAXATIONS, make_loss

BATCH, NUM_CLASSES, NUM_IMAGES = 128, 100, 5000
SOFTMAX = "softmax_cross_entropy"


def our_steps(
    methods: list[str], images: Tensor, labels: Tensor, precision: str, device: torch.device
) -> dict[str, Callable[[], object]]:
    """Return for each method a function that makes a training step, as experiments/train_cifar100.py does, of one
    network; and one that augments a batch. images (N, 3, 32, 32) uint8.
    """
    split = Split(images.contiguous(memory_format=torch.channels_last), labels).to(device)
    generator = epoch_generator(0, 1, device)
    model = resnet_cifar("resnet18", NUM_CLASSES).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5, fused=True)

    def augmented() -> tuple[Tensor, Tensor]:
        batch, targets = split.batch(torch.randint(len(labels), (BATCH,), device=device))
        batch = crop_and_flip(batch, *sample_crops(BATCH, generator))
        return normalise(batch, CIFAR_MEAN, CIFAR_STD), targets  # (batch, 3, 32, 32)

    def step_of(method: str) -> Callable[[], object]:
        mode = {"top1_mode": "smce"} if method in RELAXATIONS else {}
        loss_fn = make_loss(method, DEFAULT_P_K.get(method), NUM_CLASSES, **mode).to(device)

        def step() -> None:
            batch, targets = augmented()
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                logits = model(batch)  # (batch, num_classes)
            optimizer.zero_grad(set_to_none=True)
            loss = loss_fn(logits.float(), targets)
            loss.backward()
            optimizer.step()

        return step

    return {**{method: step_of(method) for method in methods}, "augmentation": augmented}


def main() -> int:
    """Run the benchmark; return the exit status."""
    flags = parser(__doc__, "training_step.csv", turns=7, steps=3)
    flags.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    flags.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    arguments = flags.parse_args()
    torch.manual_seed(0)
    prepare_device(arguments.device, arguments.threads)
    images = torch.randint(256, (NUM_IMAGES, 3, 32, 32), dtype=torch.uint8)
    labels = torch.randint(NUM_CLASSES, (NUM_IMAGES,))
    methods = list(dict.fromkeys([SOFTMAX, *arguments.methods]))
    steps = our_steps(methods, images, labels, arguments.precision, arguments.device)
    times = take_turns(steps, arguments.turns, arguments.steps, arguments.threads)
    table = Table(arguments)
    for name, each in times.items():
        milliseconds, base = statistics.median(each), times[SOFTMAX]
        table.add(
            method=name,
            precision=arguments.precision,
            ms_per_step=milliseconds,
            over_softmax=f"{ratio(each, base):.3f}" if name != "augmentation" else None,
            images_per_second=f"{BATCH / milliseconds * 1e3:.0f}",
        )
    return table.write()


if __name__ == "__main__":
    sys.exit(main())
