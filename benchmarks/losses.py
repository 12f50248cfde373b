"""Time and memory of one forward and backward pass of each loss, beside the contenders and plain cross-entropy.

    python benchmarks/losses.py                                  # all methods, all sizes, on the CPU
    python benchmarks/losses.py --methods bitonic --sizes 128x100 500x1000m16 --device cuda
    python benchmarks/losses.py --scaling --output results/benchmarks/scaling.csv    # n, k and the batch grow

A row per method and size: medians in milliseconds, peak MiB above what was there before the pass, and the same of each
contender (benchmarks/contenders/; the columns of difftopk are called official). Every measurement has a process of its
own. spin_count is GOMP_SPINCOUNT: without it PyTorch's waiting threads take a core from our kernels. --scaling, P_K
uniform on k ranks, adds what a method has to do and to keep per sample (`operations`, `numbers`).
"""

import argparse
import math
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch

from benchmarks import contenders
from benchmarks.runner import SOFTMAX, Table, parser, size
from experiments.common.flags import positive_int
from experiments.common.official_loss import executor_of
from experiments.common.processes import keep_freed_memory
from topk_losses import METHODS, RELAXATIONS, make_loss
from topk_losses.comparators import CONSTRUCTIONS
from topk_losses.methods import SINGLE_K, TOP1

SIZES = ("128x100", "500x1000m16", "500x10450m50", "128x1000", "128x10450")
# Of the scaling.
NS = (16, 100, 1000, 10450)
KS = (1, 5, 20)
BATCHES = (32, 128, 512)
LOSSES = ("softmax_cross_entropy", "smooth_topk", "smooth_hard_topk", "neuralsort", "softsort", "sinkhorn_sort")
LOSSES += ("soft_topk", "odd_even", "bitonic", "splitter_selection")


def make_ours(method: str, p_k: list[float], n: int, m: int | None, device: torch.device) -> torch.nn.Module:
    """Return our loss; the networks' and the masks' k = 1 term is the softmax's, as it is difftopk's in mode sm."""
    top1_mode = None
    if method in RELAXATIONS:
        top1_mode = "sm"
    return make_loss(method, p_k, n, m, top1_mode=top1_mode).to(device)


def peak_mib(device: torch.device) -> float:
    """Return the most memory that this process has had since the last call, and begin anew with what it has now."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**20
        torch.cuda.reset_peak_memory_stats()
    else:
        peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 2**10
        Path("/proc/self/clear_refs").write_text("5")
    return peak


def measure(name: str, case: tuple, batch: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own: the first pass's peak memory and the later passes' times; NaN, and why it failed."""
    method, p_k, n, m, device = case
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    if device.type == "cpu":  # a failure instead of a machine that swaps
        resource.setrlimit(resource.RLIMIT_AS, (arguments.limit_gib * 2**30,) * 2)
    make = make_ours
    if name != "ours":
        make = contenders.installed()[name].make
    try:
        loss = make(*case)
        small = make(method, p_k, 50, m and min(m, 20), device)
        logits = (2 * torch.randn(batch, n, device=device)).requires_grad_()
        labels = torch.randint(n, (batch,), device=device)

        def one_pass() -> None:
            logits.grad = None
            loss(logits, labels).backward()

        # A small loss first: lazily loaded libraries and compiled kernels do not count as memory of the loss.
        small(torch.zeros(2, 50, device=device, requires_grad=True), labels[:2] % 50).backward()
        peak_mib(device)
        before = peak_mib(device)
        start = time.perf_counter()
        one_pass()
        first = time.perf_counter() - start
        peak = peak_mib(device) - before
        keep_freed_memory()  # as the scripts do
        return {"peak_mib": f"{peak:.1f}", **timed(one_pass, first, arguments)}
    except ValueError as error:  # it has no such loss
        return {"ms": math.nan, "failed": str(error)}
    except (MemoryError, RuntimeError) as error:
        return {"ms": math.nan, "failed": why(error, arguments.limit_gib)}


def why(error: Exception, limit_gib: int) -> str:
    """Say why a measurement failed."""
    if isinstance(error, MemoryError) or "alloc" in str(error):
        return f"needs more than {limit_gib} GiB"
    return str(error).splitlines()[0]


def timed(one_pass: Callable[[], None], first: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """The median milliseconds of passes, of which the first took `first` seconds, and their number."""
    left = arguments.limit_s - first
    if left <= 0:
        return {"ms": 1e3 * first, "passes": 1}
    from torch.utils.benchmark import Timer  # see runner.py

    timer = Timer("one_pass()", globals={"one_pass": one_pass}, num_threads=arguments.threads)
    measured = timer.blocked_autorange(min_run_time=min(left, max(arguments.repeats * first, 0.2)))
    return {"ms": 1e3 * measured.median, "passes": measured.number_per_run * len(measured.times)}


def run(*task: Any) -> dict[str, Any]:
    """Measure in a process of its own; as `measure`."""
    # The parent never ran a tensor operation, so there is nothing to inherit; but CUDA does not survive a fork.
    start = "fork"
    if task[1][4].type == "cuda":
        start = "spawn"
    context = multiprocessing.get_context(start)
    try:
        with ProcessPoolExecutor(1, context) as process:
            return process.submit(measure, *task).result()
    except BrokenProcessPool:
        return {"ms": math.nan, "failed": "the process was killed"}


def work(method: str, n: int, k: int) -> tuple[float, float]:
    """Operations of one sample, and numbers that its backward pass needs, to leading order in n and k."""
    if method in CONSTRUCTIONS:
        return (CONSTRUCTIONS[method](n, k).pruned().num_comparators,) * 2
    known = {"softsort": (n + k * k, n + k * k), "neuralsort": (n * math.log2(n) + n * k, n * k)}
    known |= {"sinkhorn_sort": (n**3, n * n), **dict.fromkeys([*TOP1, *SINGLE_K], (n, n))}
    return known.get(method, (n * k, n * k))


def cases_of(arguments: argparse.Namespace) -> list[tuple[int, int, int | None, int]]:
    """Batch, n, m and k of each measurement."""
    if not arguments.scaling:
        return [(*numbers, 5) for numbers in arguments.sizes]
    cases: list[tuple[int, int, int | None, int]] = [(128, n, None, 5) for n in NS]
    cases += [(128, 1000, None, k) for k in KS]
    cases += [(batch, 1000, None, 5) for batch in BATCHES]
    return [case for case in dict.fromkeys(cases) if case[1] <= arguments.max_n]


def p_k_of(method: str, k: int) -> list[float]:
    """P_K of a measurement: uniform on k ranks, or all on the only rank that a method takes."""
    if method in TOP1:
        return [1.0]
    if method in SINGLE_K:
        return [0.0] * (k - 1) + [1.0]
    return [1 / k] * k


def columns_of(found: dict[str, dict[str, Any]], others: Sequence[str], method: str, plain: float) -> dict[str, Any]:
    """The columns of our measurement, of the contenders', and of cross-entropy's milliseconds (plain)."""
    ours = found["ours"]
    row = {name: ours.get(name) for name in ("ms", "peak_mib", "passes")}
    for name in others:
        other = found[name]
        column = name.replace("difftopk", "official")
        row[f"{column}_ms"] = other["ms"]
        row[f"{column}_peak_mib"] = other.get("peak_mib")
        row[f"{column}_over_ours"] = other["ms"] / ours["ms"]
    if "difftopk" in others:
        row["official_path"] = executor_of(method)
    row["cross_entropy_ms"] = plain
    row["spin_count"] = os.environ.get("GOMP_SPINCOUNT")
    row["ours_over_cross_entropy"] = ours["ms"] / plain
    row["note"] = "; ".join(f"{whose}: {one['failed']}" for whose, one in found.items() if one.get("failed"))
    return row


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    flags = parser(__doc__, "losses.csv", "all; with --scaling ten", repeats=7, limit_gib=16)
    flags.add_argument(
        "--sizes", nargs="+", type=size, default=list(map(size, SIZES)), help="sizes, BATCHxN or BATCHxNmM"
    )
    flags.add_argument("--limit_s", type=float, default=60, help="seconds of a measurement (default: 60)")
    flags.add_argument("--scaling", action="store_true", help="vary n, k and the batch size instead")
    flags.add_argument(
        "--max_n", type=positive_int, default=max(NS), help="largest n of --scaling (default: %(default)s)"
    )
    arguments = flags.parse_args(argv)
    methods = arguments.methods or METHODS
    others = list(contenders.installed())
    if arguments.scaling:
        methods = arguments.methods or LOSSES
        others = []
    table = Table(arguments)
    device = arguments.device
    for batch, n, m, k in dict.fromkeys(cases_of(arguments)):
        plain = run("ours", (SOFTMAX, [1.0], n, None, device), batch, arguments)["ms"]
        for method in methods:
            p_k = p_k_of(method, k)
            found = {name: run(name, (method, p_k, n, m, device), batch, arguments) for name in ("ours", *others)}
            shown_p_k = " ".join(f"{p:g}" for p in p_k)
            row = {"method": method, "batch": batch, "n": n, "m": m, "k": k, "p_k": shown_p_k}
            table.add(**row, **columns_of(found, others, method, plain))
    if arguments.scaling:  # only now: processes are forked from one that ran no tensor operation
        for row in table.rows:
            operations, numbers = work(row["method"], row["n"], row["k"])
            row["operations"] = f"{operations:.6g}"
            row["numbers"] = f"{numbers:.6g}"
    return table.write()


if __name__ == "__main__":
    sys.exit(main())
