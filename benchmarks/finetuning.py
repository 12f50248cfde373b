"""Time of a fine-tuning step with each loss beside the softmax row's and difftopk's, and of several heads at once.

    python benchmarks/finetuning.py                      # the sizes of ImageNet-1K and 21K-P
    python benchmarks/finetuning.py --methods splitter_selection --sizes 500x2048x1000m16 --steps 20 --device cuda

The step is that of experiments/finetune_imagenet.py (gather float16 embeddings, head, loss, backward, fused Adam) with
the published m, mode sm and default temperatures, on random embeddings. The losses take turns; ratios are taken turn by
turn, and all numbers are medians. A row with `heads` above 1 is one step of that many heads in one pass over the data,
`over_separate` its time as a share of so many steps of one head. `loss` and `official_loss` are those of one batch.
"""

import contextlib
import math
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.contenders import difftopk
from benchmarks.losses import make_ours
from benchmarks.runner import SOFTMAX, Table, parser, ratio, size, take_turns
from experiments.common.flags import positive_int
from experiments.common.objective import published_p_k
from experiments.common.official_loss import executor_of
from experiments.common.processes import prepare_device
from models.heads import head
from topk_losses import METHODS, RELAXATIONS

SIZES = ("500x2048x1000m16", "500x2048x10450m50")
NUM_ROWS = 8192  # of embeddings to draw batches from
Timed = tuple[str, str, int]  # implementation (ours or difftopk), method, heads


def steps_of(
    sizes: tuple, methods: list[str], heads: int, device: torch.device
) -> tuple[dict[Timed, Callable[[], None]], dict[Timed, float]]:
    """Return a step with each loss, and the losses of one batch under the same head."""
    batch, dim, n, m = sizes
    torch.manual_seed(0)
    embeddings = torch.rand(NUM_ROWS, dim, device=device).half()  # (rows, dim), positive as pooled ReLUs are
    labels = torch.randint(n, (NUM_ROWS,), device=device)
    # One set of weights for all losses, so that all find the same amount of it in the caches.
    made = [head(dim, n).to(device) for _ in range(heads)]
    optimizers = [torch.optim.Adam(classifier.parameters(), lr=10**-4.5, fused=True) for classifier in made]

    def step_of(loss_fn: nn.Module, number: int) -> Callable[[], None]:
        def step() -> None:
            chosen = torch.randint(NUM_ROWS, (batch,), device=device)
            rows = embeddings.index_select(0, chosen).float()  # (batch, dim)
            targets = labels.index_select(0, chosen)
            for training_head, optimizer in zip(made[:number], optimizers):
                loss = loss_fn(training_head(rows), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        return step

    with torch.no_grad():
        logits = made[0](embeddings[:batch].float())  # (batch, n)
    steps = {}
    losses = {}
    for method in methods:
        for name, loss_fn in implementations(method, n, sorted_scores(method, m), device).items():
            losses[name, method, 1] = loss_fn(logits, labels[:batch]).item()
            steps[name, method, 1] = step_of(loss_fn, 1)
            if name == "ours" and heads > 1:
                steps[name, method, heads] = step_of(loss_fn, heads)
    return steps, losses


def sorted_scores(method: str, m: int | None) -> int | None:
    """The number of scores that a method sorts; None for one that sorts none."""
    if method in RELAXATIONS:
        return m
    return None


def implementations(method: str, n: int, m: int | None, device: torch.device) -> dict[str, nn.Module]:
    """Return our loss, and that of difftopk if it has one."""
    case = (method, published_p_k(method), n, m, device)
    found = {"ours": make_ours(*case)}
    with contextlib.suppress(ValueError):  # it has no such loss
        found["difftopk"] = difftopk.make(*case)
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    flags = parser(__doc__, "finetuning.csv", turns=7, steps=3)
    flags.add_argument("--sizes", nargs="+", type=size, default=list(map(size, SIZES)), help="sizes, BATCHxDIMxNmM")
    flags.add_argument("--heads", type=positive_int, default=3, help="heads in one pass, also timed (default: 3)")
    args = flags.parse_args(argv)
    for case in args.sizes:
        if len(case) != 4:
            flags.error(f"a size is written BATCHxDIMxN or BATCHxDIMxNmM, got {case}")
    prepare_device(args.device, args.threads)
    table = Table(args)
    methods = list(dict.fromkeys([SOFTMAX, *(args.methods or METHODS)]))
    for case in args.sizes:
        batch, dim, n, m = case
        steps, losses = steps_of(case, methods, args.heads, args.device)
        times = take_turns(steps, args.turns, args.steps, args.threads)
        for implementation, method, number in times:
            if implementation == "ours":
                row = {"method": method, "batch": batch, "dim": dim, "n": n, "m": sorted_scores(method, m)}
                table.add(**row, **columns_of(method, number, times, losses))
    return table.write()


def columns_of(method: str, number: int, times: dict[Timed, list[float]], losses: dict[Timed, float]) -> dict[str, Any]:
    """The columns of a method with a number of heads in one pass."""
    ours = times["ours", method, number]
    official = times.get(("difftopk", method, number), [math.nan])
    over_separate = None
    if number > 1:
        over_separate = f"{ratio(ours, times['ours', method, 1]) / number:.3f}"
    official_path = None
    if len(official) > 1:
        official_path = executor_of(method)
    return {
        "heads": number,
        "ms": statistics.median(ours),
        "over_softmax": f"{ratio(ours, times['ours', SOFTMAX, number]):.3f}",
        "over_separate": over_separate,
        "official_path": official_path,
        "official_ms": statistics.median(official),
        "official_over_ours": ratio(official, ours),
        "loss": losses.get(("ours", method, number)),
        "official_loss": losses.get(("difftopk", method, number)),
    }


if __name__ == "__main__":
    sys.exit(main())
