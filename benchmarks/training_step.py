"""Time of a CIFAR-100 training step with each loss, as a ratio to the softmax row's; and of the official recipe.

    python benchmarks/training_step.py                                  # ResNet-18, batch 128, bf16
    python benchmarks/training_step.py --precision fp32 --methods softsort --device cuda
    python benchmarks/training_step.py --recipe --steps 8 --output results/benchmarks/recipe.csv

The step is that of experiments/train_cifar100.py (gather, augment, forward, loss, backward, Adam) on random images. The
methods take turns; medians over the turns. --recipe: images per second beside torchvision's transforms on PIL images in
a DataLoader (in the process, and with a worker per thread: the faster one counts), fp32, the default memory format, the
official loss (difftopk), loss.item() in each step.
"""

import itertools
import statistics
import sys
from collections.abc import Callable

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from benchmarks.runner import SOFTMAX, Table, parser, ratio, take_turns
from data.cifar import CIFAR_MEAN, CIFAR_STD, crop_and_flip, epoch_generator, sample_crops, scale_and_shift
from data.splits import Split
from experiments.common.losses import DEFAULT_P_K
from experiments.common.official_loss import make_official_loss
from experiments.common.processes import prepare_device
from models.resnet_cifar import resnet_cifar
from topk_losses import METHODS, RELAXATIONS, make_loss

NUM_CLASSES = 100


class PilImages(Dataset):
    """Images (N, 3, 32, 32) uint8 and labels (N,), each made a PIL image and transformed when it is asked for."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images.permute(0, 2, 3, 1).numpy(), labels.tolist()
        steps = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
        self.transform = transforms.Compose([*steps, transforms.Normalize(CIFAR_MEAN, CIFAR_STD)])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


def settings_of(method: str) -> dict[str, object]:
    """Return the method's P_K and mode, as the script has them without flags."""
    mode = {"top1_mode": "smce"} if method in RELAXATIONS else {}
    return {"method": method, "p_k": DEFAULT_P_K.get(method, [0.2] * 5), "num_classes": NUM_CLASSES, **mode}


def our_steps(
    methods: list[str], images: Tensor, labels: Tensor, batch: int, precision: str, device: torch.device
) -> dict[str, Callable[[], object]]:
    """Return for each method a function that makes a training step of one network, and one that augments a batch."""
    split = Split(images.contiguous(memory_format=torch.channels_last), labels).to(device)
    scale, shift = (number.to(device) for number in scale_and_shift("cifar100"))
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

    return {**{method: step_of(method) for method in methods}, "augmentation": augmented}


def official_step(
    method: str, images: Tensor, labels: Tensor, batch: int, workers: int, device: torch.device
) -> Callable[[], None]:
    """Return a function that makes one training step by the official recipe."""
    options = {"num_workers": workers, "persistent_workers": workers > 0, "pin_memory": device.type == "cuda"}
    loader = DataLoader(PilImages(images, labels), batch, shuffle=True, drop_last=True, **options)
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
    flags.add_argument(
        "--precision", choices=("fp32", "bf16"), default="bf16", help="precision of our step (default: bf16)"
    )
    flags.add_argument("--recipe", action="store_true", help="compare with the official recipe instead")
    args = flags.parse_args(argv)
    torch.manual_seed(0)
    prepare_device(args.device, args.threads)
    data = torch.randint(256, (args.images, 3, 32, 32), dtype=torch.uint8), torch.randint(NUM_CLASSES, (args.images,))
    table, methods = Table(args), args.methods or ([SOFTMAX, "splitter_selection"] if args.recipe else list(METHODS))
    if not args.recipe:
        steps = our_steps(list(dict.fromkeys([SOFTMAX, *methods])), *data, args.batch, args.precision, args.device)
        times = take_turns(steps, args.turns, args.steps, args.threads)
        for name, turns in times.items():
            over, milliseconds = ratio(turns, times[SOFTMAX]), statistics.median(turns)
            row = {"method": name, "precision": args.precision, "ms_per_step": milliseconds}
            row["over_softmax"] = f"{over:.3f}" if name != "augmentation" else None
            table.add(**row, images_per_second=f"{args.batch / milliseconds * 1e3:.0f}")
        return table.write()
    for method in methods:
        found = []
        for workers in (0, args.threads):
            ours = our_steps([method], *data, args.batch, args.precision, args.device)[method]
            steps = {"ours": ours, "official": official_step(method, *data, args.batch, workers, args.device)}
            turns = take_turns(steps, args.turns, args.steps, args.threads)
            rate, official = (1e3 * args.batch / statistics.median(times) for times in turns.values())
            found.append((official, rate, ratio(turns["official"], turns["ours"]), workers))
        official, rate, over, workers = max(found)
        row = {"method": method, "precision": args.precision, "images_per_second": rate}
        table.add(
            **row, official_images_per_second=official, ours_over_official=f"{over:.3f}", official_workers=workers
        )
    return table.write()


if __name__ == "__main__":
    sys.exit(main())
