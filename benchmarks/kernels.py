"""Time of a training step with and without the compiled kernels of the CPU: what each kernel brings to a user.

    python benchmarks/kernels.py --threads 1
    python benchmarks/kernels.py --methods sinkhorn_sort --turns 21

The steps are those of `benchmarks/training_step.py` (CIFAR-100, ResNet-18) and of `benchmarks/finetuning.py` (a linear
classifier). Each method takes turns with itself under TOPK_LOSSES_BACKEND=torch; the ratio is taken turn by turn, and
all numbers are medians. A kernel that moves no step by 3 % is not worth its lines.
"""

import os
import statistics
import sys
from collections.abc import Callable

import torch

from benchmarks import finetuning, training_step
from benchmarks.runner import Table, parser, ratio, take_turns
from experiments.common.processes import prepare_device
from topk_losses.kernels import VARIABLE

# A method for each way to use a kernel.
METHODS = ("splitter_selection", "bitonic", "sinkhorn_sort", "soft_topk", "smooth_topk", "smooth_hard_topk")
LINEAR = ((500, 2048, 1000, 16), (500, 1280, 100, 16))  # batch, width, classes, m
NETWORK = "resnet18 on cifar100"


def with_backend(step: Callable[[], object], backend: str) -> Callable[[], None]:
    """Return the step as it is under a value of TOPK_LOSSES_BACKEND, which the library reads at every call."""

    def call() -> None:
        os.environ[VARIABLE] = backend
        step()

    return call


def steps_of_cases(
    methods: list[str], images: int, batch: int, device: torch.device
) -> dict[tuple[str, str], Callable[[], object]]:
    """Return the steps by case and method."""
    torch.manual_seed(0)
    pictures = torch.randint(256, (images, 3, 32, 32), dtype=torch.uint8)
    labels = torch.randint(training_step.NUM_CLASSES, (images,))
    found = {}
    of_network = training_step.our_steps(methods, pictures, labels, batch, "bf16", device)
    for method in methods:
        found[f"{NETWORK}, batch {batch}", method] = of_network[method]
    for sizes in LINEAR:
        rows, dim, n, _ = sizes
        steps, _ = finetuning.steps_of(sizes, methods, 1, device)
        for method in methods:
            found[f"linear {dim} x {n}, batch {rows}", method] = steps["ours", method, 1]
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    flags = parser(__doc__, "kernels.csv", ", ".join(METHODS), turns=15, steps=2, batch=128, images=5000)
    args = flags.parse_args(argv)
    prepare_device(args.device, args.threads)
    table = Table(args)
    steps = steps_of_cases(list(args.methods or METHODS), args.images, args.batch, args.device)
    for (case, method), step in steps.items():
        alternatives = {"kernel": with_backend(step, ""), "torch": with_backend(step, "torch")}
        times = take_turns(alternatives, args.turns, args.steps, args.threads)
        table.add(
            step=case,
            method=method,
            ms=statistics.median(times["kernel"]),
            torch_ms=statistics.median(times["torch"]),
            torch_over_kernel=f"{ratio(times['torch'], times['kernel']):.3f}",
        )
    return table.write()


if __name__ == "__main__":
    sys.exit(main())
