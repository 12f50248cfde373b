"""Time of a fine-tuning step with each loss beside the softmax row's and difftopk's, and of several heads at once.

    python benchmarks/finetuning.py                      # the sizes of ImageNet-1K and 21K-P; a GPU where there is one
    python benchmarks/finetuning.py --methods splitter_selection --sizes 500x2048x1000m16 --steps 20 --device cuda

The step is that of experiments/finetune_imagenet.py (gather float16 embeddings, head, loss, backward, fused Adam) with
the published m, top1_mode and default temperatures, on random embeddings. Within a turn every loss has a few steps,
ours and difftopk's, so that a machine that slows down slows all of them; ratios are taken turn by turn, and all numbers
are medians over the turns. A row with `heads` above 1 is one step of that many heads in one pass over the data, and
`over_separate` its time as a share of so many steps of one head. `loss` and `official_loss` are those of the first
batch under the same head. Prints a table and writes --output (default results/benchmarks/finetuning.csv).
"""

import statistics
import sys
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.runner import Table, parser, ratio, size, take_turns
from experiments.common.flags import positive_int as count
from experiments.common.losses import DEFAULT_P_K, build_loss
from experiments.common.official_loss import IN_DIFFTOPK, executor_of
from experiments.common.processes import prepare_device
from models.heads import head
from topk_losses import METHODS, RELAXATIONS, resolve_settings

SIZES = ("500x2048x1000m16", "500x2048x10450m50")
SOFTMAX = "softmax_cross_entropy"
NUM_ROWS = 8192  # of embeddings to draw batches from
LEARNING_RATE = 10**-4.5
P_K = {method: DEFAULT_P_K.get(method, [0.2] * 5) for method in METHODS}  # what the script takes without --p_k

Size = tuple[int, int, int, int | None]  # batch, dim, n, m
Timed = tuple[str, str, int]  # implementation (ours or difftopk), method, heads


def loss_of(implementation: str, method: str, n: int, m: int | None, device: torch.device) -> nn.Module:
    """Return the loss that the script builds for `method` without further flags. Raises SystemExit."""
    settings = {
        "method": method,
        "p_k": P_K[method],
        "m": m if method in RELAXATIONS else None,
        **resolve_settings(method, None, None, None, "sm" if method in RELAXATIONS else None),
    }
    return build_loss(settings, n, device, implementation)


def steps_of(
    size: Size, methods: list[str], heads: int, compiled: bool, device: torch.device
) -> tuple[dict[Timed, Callable[[], None]], dict[Timed, float]]:
    """Return a step with each loss, and the losses of the first batch."""
    batch, dim, n, m = size
    torch.manual_seed(0)
    embeddings = torch.rand(NUM_ROWS, dim, device=device).half()  # (rows, dim), positive as pooled ReLUs are
    labels = torch.randint(n, (NUM_ROWS,), device=device)
    # One set of weights for all losses, so that all find the same amount of it in the caches.
    fresh = [head(dim, n).to(device) for _ in range(heads)]
    optimizers = [torch.optim.Adam(each.parameters(), lr=LEARNING_RATE, fused=True) for each in fresh]
    made = list(zip(map(torch.compile, fresh) if compiled and device.type == "cuda" else fresh, optimizers))

    def step_of(what: Timed, loss_fn: nn.Module) -> Callable[[], None]:
        implementation, method, number = what
        training = torch.compile(loss_fn) if compiled and implementation == "ours" else loss_fn

        def step() -> None:
            chosen = torch.randint(NUM_ROWS, (batch,), device=device)
            rows, targets = embeddings.index_select(0, chosen).float(), labels.index_select(0, chosen)
            for training_head, optimizer in made[:number]:
                loss = training(training_head(rows), targets).mean()
                if device.type == "cpu" and not loss.isfinite():  # the script looks, too
                    raise ArithmeticError(f"the loss of {method} ({implementation}) became {loss.item()}")
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()

        return step

    rows = torch.arange(batch, device=device) % NUM_ROWS
    with torch.no_grad():
        logits = made[0][0](embeddings[rows].float())  # (batch, n)
    steps, first = {}, {}
    timed: list[Timed] = [("ours", method, number) for number in sorted({1, heads}) for method in methods]
    # Cross-entropy is PyTorch's in both: there is nothing to compare.
    timed += [("difftopk", method, 1) for method in methods if method != SOFTMAX and method in IN_DIFFTOPK]
    for what in timed:
        implementation, method, number = what
        loss_fn = loss_of(implementation, method, n, m, device)
        steps[what] = step_of(what, loss_fn)
        if number == 1:
            with torch.no_grad():
                first[what] = loss_fn(logits, labels[rows]).mean().item()
    return steps, first


def main() -> int:
    """Run the benchmark; return the exit status."""
    flags = parser(__doc__, "finetuning.csv", device="auto", turns=7, steps=3)
    size_of = size("BATCHxDIMxN")
    flags.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    flags.add_argument("--sizes", nargs="+", type=size_of, default=[size_of(each) for each in SIZES])
    flags.add_argument("--heads", type=count, default=3, help="in one pass; 1 leaves those rows out (%(default)s)")
    flags.add_argument("--compile", action="store_true", help="heads and our losses, as the script's --compile")
    arguments = flags.parse_args()
    methods = list(dict.fromkeys([SOFTMAX, *arguments.methods]))
    for _, _, n, m in arguments.sizes:
        for method in methods:
            loss_of("ours", method, n, m, torch.device("cpu"))
    prepare_device(arguments.device, arguments.threads)
    table = Table(arguments)
    for each in arguments.sizes:
        batch, dim, n, m = each
        steps, first = steps_of(each, methods, arguments.heads, arguments.compile, arguments.device)
        times = take_turns(steps, arguments.turns, arguments.steps, arguments.threads)
        for (_, method, number), ours in [(what, times[what]) for what in times if what[0] == "ours"]:
            what, official = ("difftopk", method, number), times.get(("difftopk", method, number))
            alone = times["ours", method, 1]
            table.add(
                **{"method": method, "batch": batch, "dim": dim, "n": n, "m": m if method in RELAXATIONS else None},
                **{"heads": number, "p_k": " ".join(f"{p:g}" for p in P_K[method]), "ms": statistics.median(ours)},
                over_softmax=f"{ratio(ours, times['ours', SOFTMAX, number]):.3f}",
                over_separate=f"{ratio(ours, alone) / number:.3f}" if number > 1 else None,
                official_path=executor_of(method) if official else None,
                official_ms=statistics.median(official) if official else None,
                official_over_ours=ratio(official, ours) if official else None,
                loss=f"{first['ours', method, 1]:.6g}" if number == 1 else None,
                official_loss=f"{first[what]:.6g}" if official else None,
                compiled=str(arguments.compile).lower(),
            )
    return table.write()


if __name__ == "__main__":
    sys.exit(main())
