"""Images per second of CIFAR-100 training by this repository's loop and by the official recipe, at equal threads.

    python benchmarks/recipe.py                                           # ResNet-18, batch 128; ours in bf16
    python benchmarks/recipe.py --methods splitter_selection --precision fp32 --device cuda

Ours: a step of experiments/train_cifar100.py. The official recipe: torchvision's transforms on PIL images in a
DataLoader, fp32, the default memory format, PyTorch's default Adam, the official loss (difftopk), loss.item() in each
step. Its DataLoader runs in the training process and again with a worker process per thread; the faster of the two
counts. Both train the same network on the same random images of CIFAR-100's size, and take turns, a few steps each.
Prints a table and writes --output (default results/benchmarks/recipe.csv): images per second, medians over the turns,
and the median of the turns' ratios.
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

from benchmarks import training_step
from benchmarks.runner import Table, parser, ratio, take_turns
from data.cifar import CIFAR_MEAN, CIFAR_STD
from experiments.common.losses import DEFAULT_P_K
from experiments.common.official_loss import executor_of, make_official_loss
from experiments.common.processes import prepare_device
from models.resnet_cifar import resnet_cifar
from topk_losses import METHODS, RELAXATIONS

NUM_CLASSES = training_step.NUM_CLASSES
# Seconds in which workers fill their queue, so that they do not take the cores from our turn: to the official recipe's
# advantage, whose first batches are then for nothing.
PAUSE = 0.5


class PilImages(Dataset):
    """Images (N, 3, 32, 32) uint8 and labels (N,), each made a PIL image and transformed when it is asked for."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images.permute(0, 2, 3, 1).numpy(), labels.tolist()
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


def official_step(
    method: str, images: Tensor, labels: Tensor, workers: int, device: torch.device
) -> Callable[[], None]:
    """Return a function that makes one training step by the official recipe."""
    loader = DataLoader(
        PilImages(images, labels),
        training_step.BATCH,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=device.type == "cuda",
    )
    batches = itertools.chain.from_iterable(itertools.repeat(loader))  # of epoch after epoch
    model = resnet_cifar("resnet18", NUM_CLASSES).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    mode = {"top1_mode": "smce"} if method in RELAXATIONS else {}
    loss_fn = make_official_loss(method, DEFAULT_P_K.get(method, (0.2,) * 5), NUM_CLASSES, device=device, **mode)

    def step() -> None:
        batch, targets = (each.to(device, non_blocking=True) for each in next(batches))
        loss = loss_fn(model(batch), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()

    return step


def main() -> int:
    """Run the benchmark; return the exit status."""
    flags = parser(__doc__, "recipe.csv", turns=7, steps=8)
    flags.add_argument("--methods", nargs="+", choices=METHODS, default=[training_step.SOFTMAX, "splitter_selection"])
    flags.add_argument("--precision", choices=("fp32", "bf16"), default="bf16", help="of ours (%(default)s)")
    arguments = flags.parse_args()
    torch.manual_seed(0)
    device, threads = arguments.device, arguments.threads
    prepare_device(device, threads)
    images = torch.randint(256, (training_step.NUM_IMAGES, 3, 32, 32), dtype=torch.uint8)
    labels = torch.randint(NUM_CLASSES, (len(images),))
    table = Table(arguments)
    for method in arguments.methods:
        found = []
        for workers in (0, threads):
            ours = training_step.our_steps([method], images, labels, arguments.precision, device)[method]
            official = official_step(method, images, labels, workers, device)
            steps = {"ours": ours, "official": official}
            turns = take_turns(steps, arguments.turns, arguments.steps, threads, pause=PAUSE)
            rates = [1e3 * training_step.BATCH / statistics.median(each) for each in turns.values()]
            found.append((rates[1], rates[0], ratio(turns["official"], turns["ours"]), workers))
        official_rate, rate, over, workers = max(found)
        table.add(
            method=method,
            precision=arguments.precision,
            images_per_second=rate,
            official_images_per_second=official_rate,
            ours_over_official=f"{over:.3f}",
            official_workers=workers,
            official_path=executor_of(method),
            turns=arguments.turns,
        )
    return table.write()


if __name__ == "__main__":
    sys.exit(main())
