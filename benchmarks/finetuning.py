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

import argparse
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.table import add_output_flag, write_table
from experiments.shared.command_line import DEFAULT_P_K, build_loss, count, present_device
from experiments.shared.environment import device_name, git_commit, keep_freed_memory, set_up_device
from experiments.shared.official_loss import IN_DIFFTOPK, executor_of
from models.heads import head
from topk_losses import METHODS, RELAXATIONS, resolve_settings

SIZES = ("500x2048x1000m16", "500x2048x10450m50")
SOFTMAX = "softmax_cross_entropy"
NUM_ROWS = 8192  # of embeddings to draw batches from
LEARNING_RATE = 10**-4.5
COLUMNS = (
    *("method", "batch", "dim", "n", "m", "heads", "p_k", "ms", "over_softmax", "over_separate"),
    *("official_path", "official_ms", "official_over_ours", "loss", "official_loss"),
    *("compiled", "device", "threads", "torch", "python", "git_commit"),
)
LINE = "{method:22} {batch:>5} {dim:>5} {n:>6} {m:>4} {heads:>5} {ms:>8} {over_softmax:>9} {over_separate:>10} "
LINE += "{official_ms:>11} {official_over_ours:>6}  {official_path}"
HEADINGS = {
    **{"over_softmax": "x softmax", "over_separate": "x separate", "official_path": ""},
    **{"official_ms": "difftopk ms", "official_over_ours": "ratio"},
}

Size = tuple[int, int, int, int | None]  # batch, dim, n, m
Timed = tuple[str, str, int]  # implementation (ours or difftopk), method, heads


def parse_size(text: str) -> Size:
    """ "500x2048x1000m16" -> (batch 500, dim 2048, n 1000, m 16)."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)(?:m([1-9]\d*))?", text)
    if not match:
        raise argparse.ArgumentTypeError(
            f"a size is written BATCHxDIMxN or BATCHxDIMxNmM, as in 500x2048x1000m16; got {text!r}"
        )
    batch, dim, n, m = match.groups()
    return int(batch), int(dim), int(n), int(m) if m else None


def loss_of(implementation: str, method: str, n: int, m: int | None, device: torch.device) -> nn.Module:
    """Return the loss that the script builds for `method` without further flags. Raises ValueError."""
    settings = {
        "method": method,
        "p_k": p_k_of(method),
        "m": m if method in RELAXATIONS else None,
        **resolve_settings(method, None, None, None, "sm" if method in RELAXATIONS else None),
    }
    # As in the script: ours takes the heads in one call, the official one knows the mean alone.
    return build_loss(implementation, settings, n, device, "none" if implementation == "ours" else "mean")


def p_k_of(method: str) -> list[float]:
    """Return the P_K that the script takes without --p_k."""
    return DEFAULT_P_K.get(method, [0.2] * 5)


def measure(
    size: Size, methods: list[str], arguments: argparse.Namespace, device: torch.device
) -> tuple[dict[Timed, list[float]], dict[Timed, float]]:
    """Return the milliseconds per step of each turn, and the losses of the first batch."""
    batch, dim, n, m = size
    heads, turns, steps, compiled = arguments.heads, arguments.turns, arguments.steps, arguments.compile
    torch.manual_seed(0)
    embeddings = torch.rand(NUM_ROWS, dim, device=device).half()  # (rows, dim), positive as pooled ReLUs are
    labels = torch.randint(n, (NUM_ROWS,), device=device)
    losses = {("ours", method): loss_of("ours", method, n, m, device) for method in methods}
    for method in methods:
        # Cross-entropy is PyTorch's in both: there is nothing to compare.
        if method != SOFTMAX and method in IN_DIFFTOPK:
            losses["difftopk", method] = loss_of("difftopk", method, n, m, device)
    training = {
        (implementation, method): torch.compile(loss) if compiled and implementation == "ours" else loss
        for (implementation, method), loss in losses.items()
    }
    # One set of weights for all losses, so that all find the same amount of it in the caches.
    made = heads_of(heads, dim, n, device, compiled)
    timed: list[Timed] = [("ours", method, number) for number in sorted({1, heads}) for method in methods]
    timed += [("difftopk", method, 1) for implementation, method in losses if implementation == "difftopk"]

    def batch_of(rows: Tensor) -> tuple[Tensor, Tensor]:
        return embeddings.index_select(0, rows), labels.index_select(0, rows)

    def step(what: Timed) -> None:
        implementation, method, number = what
        rows, targets = batch_of(torch.randint(NUM_ROWS, (batch,), device=device))
        rows = rows.float()
        for training_head, optimizer in made[:number]:
            loss = training[implementation, method](training_head(rows), targets).mean()
            if device.type == "cpu" and not loss.isfinite():  # the script looks, too
                raise ArithmeticError(f"the loss of {method} ({implementation}) became {loss.item()}")
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()

    first = {}
    with torch.no_grad():
        rows, targets = batch_of(torch.arange(batch, device=device) % NUM_ROWS)
        logits = made[0][0](rows.float())  # (batch, n)
        for what in timed:
            implementation, method, number = what
            if number == 1:
                first[what] = losses[implementation, method](logits, targets).mean().item()

    times: dict[Timed, list[float]] = {what: [] for what in timed}
    for _ in range(turns):
        for what in timed:
            step(what)  # not timed: the one before may have left other things in the caches
            times[what].append(milliseconds(lambda what=what: step(what), steps, device))
    return times, first


def heads_of(
    number: int, dim: int, n: int, device: torch.device, compiled: bool
) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
    """Return so many new heads on the device, each with its optimizer, as the script has them."""
    made = []
    for _ in range(number):
        fresh = head(dim, n).to(device)
        optimizer = torch.optim.Adam(fresh.parameters(), lr=LEARNING_RATE, fused=True)
        made.append((torch.compile(fresh) if compiled and device.type == "cuda" else fresh, optimizer))
    return made


def milliseconds(call: Callable[[], None], number: int, device: torch.device) -> float:
    """Return the time of one of `number` calls."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(number):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / number


def rows_of(
    size: Size, methods: list[str], heads: int, times: dict[Timed, list[float]], first: dict[Timed, float]
) -> list[dict[str, Any]]:
    """Return a row per method and number of heads, without the columns that all rows share."""

    def ratio(upper: Timed, lower: Timed) -> float:
        return statistics.median(a / b for a, b in zip(times[upper], times[lower]))

    rows = []
    for number in sorted({1, heads}):
        for method in methods:
            ours, official = ("ours", method, number), ("difftopk", method, number)
            row = dict.fromkeys(COLUMNS, "")
            row.update(zip(("batch", "dim", "n", "m"), size), method=method, heads=number)
            row["m"] = size[3] if size[3] and method in RELAXATIONS else ""
            row["p_k"] = " ".join(f"{p:g}" for p in p_k_of(method))
            row["ms"] = f"{statistics.median(times[ours]):.4g}"
            row["over_softmax"] = f"{ratio(ours, ('ours', SOFTMAX, number)):.3f}"
            if number == 1:
                row["loss"] = f"{first[ours]:.6g}"
            else:
                row["over_separate"] = f"{ratio(ours, ('ours', method, 1)) / number:.3f}"
            if official in times:
                row["official_path"] = executor_of(method)
                row["official_ms"] = f"{statistics.median(times[official]):.4g}"
                row["official_over_ours"] = f"{ratio(official, ours):.4g}"
                row["official_loss"] = f"{first[official]:.6g}"
            rows.append(row)
    return rows


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=[parse_size(size) for size in SIZES])
    parser.add_argument(
        "--heads", type=count, default=3, help="heads in one pass; 1 leaves those rows out (%(default)s)"
    )
    parser.add_argument(
        "--device", type=present_device, default="auto", help="auto, cpu, cuda or cuda:<index> (%(default)s)"
    )
    parser.add_argument("--threads", type=count, default=os.cpu_count())
    parser.add_argument(
        "--compile", action="store_true", help="heads and our losses compiled, as the script's --compile"
    )
    parser.add_argument("--turns", type=count, default=7)
    parser.add_argument("--steps", type=count, default=3, help="timed steps per turn and loss (%(default)s)")
    add_output_flag(parser, "finetuning.csv")
    arguments = parser.parse_args()
    methods = list(dict.fromkeys([SOFTMAX, *arguments.methods]))
    try:
        for _, _, n, m in arguments.sizes:
            for method in methods:
                loss_of("ours", method, n, m, torch.device("cpu"))
    except ValueError as error:
        parser.error(str(error))
    device = arguments.device
    set_up_device(device, arguments.threads, deterministic=False)
    keep_freed_memory()
    shared = {
        "compiled": str(arguments.compile).lower(),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "git_commit": git_commit(),
    }

    table = []
    print(LINE.format(**{name: HEADINGS.get(name, name) for name in COLUMNS}))
    for size in arguments.sizes:
        times, first = measure(size, methods, arguments, device)
        for row in rows_of(size, methods, arguments.heads, times, first):
            table.append({**row, **shared})
            print(LINE.format(**table[-1]), flush=True)
    write_table(arguments.output, COLUMNS, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
