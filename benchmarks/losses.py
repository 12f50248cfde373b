"""Time and memory of one forward and backward pass of each loss, beside difftopk and plain cross-entropy.

    python benchmarks/losses.py                                  # all methods, all sizes, on the CPU
    python benchmarks/losses.py --methods bitonic --sizes 128x100 500x1000m16 --device cuda

Prints a table and writes --output (default results/benchmarks/losses.csv), a row per method and size: medians in
milliseconds, peak MiB above what was there before the pass, and the ratios. Every measurement has a process of its
own, one after another in one run. difftopk runs its networks through torch-sparse if that is installed, else through
its dense executor; the column official_path says which. The column spin_count is GOMP_SPINCOUNT: unset, PyTorch's
threads wait in a loop and so take a core from the threads of our kernels; at 1000, as in the scripts, they soon sleep.
"""

import argparse
import ctypes
import os
import re
import resource
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch
from torch.utils.benchmark import Timer

from benchmarks.runner import Table, in_a_process, parser, size
from experiments.common.flags import positive_int as count
from experiments.common.official_loss import IN_DIFFTOPK, executor_of, make_official_loss
from experiments.common.processes import keep_freed_memory
from topk_losses import METHODS, RELAXATIONS, make_loss
from topk_losses.methods import SINGLE_K, TOP1
from topk_losses.operator import largest

SIZES = ("128x100", "500x1000m16", "500x10450m50", "128x1000", "128x10450")
SOFTMAX = "softmax_cross_entropy"
P_K = {**{method: [1.0] for method in TOP1}, **{method: [0, 0, 0, 0, 1.0] for method in SINGLE_K}}


def resident_kib(forget_peak: bool = False) -> int:
    """The most memory that this process has had since it began or since forget_peak, in KiB (Linux)."""
    if forget_peak:
        ctypes.CDLL(None).malloc_trim(0)  # what is free already would otherwise be used, and not counted
        Path("/proc/self/clear_refs").write_text("5")
    return int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1])


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """In a process of its own: build the loss, take the first pass's peak memory and the later passes' times.

    Returns {"ms", "peak_mib", "passes"}, or {"failed": reason}.
    """
    torch.set_num_threads(task["threads"])
    torch.manual_seed(0)
    device, sizes = task["device"], (task["batch"], task["n"])
    if device.type == "cpu":  # an honest failure instead of a machine that swaps
        resource.setrlimit(resource.RLIMIT_AS, (task["limit_gib"] * 2**30,) * 2)
    try:
        loss = task["build"](task["method"], task["p_k"], task["n"], task["m"], **task["options"]).to(device)
        logits = (2 * torch.randn(*sizes, device=device)).requires_grad_()
        labels = torch.randint(task["n"], (task["batch"],), device=device)

        def one_pass() -> None:
            logits.grad = None
            loss(logits, labels).backward()

        # a small loss first: lazily loaded libraries and compiled kernels do not count as memory of the loss
        m = task["m"] and min(task["m"], 20)
        small = task["build"](task["method"], task["p_k"], 50, m, **task["options"]).to(device)
        scores = torch.zeros(2, 50, device=device, requires_grad=True)
        small(scores, torch.zeros(2, dtype=torch.int64, device=device)).backward()
        largest(torch.zeros(2, 1000, device=device), 5)  # whose kernel is not taken for 50 scores
        on_gpu = device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() / 2**20 if on_gpu else resident_kib(forget_peak=True) / 2**10
        start = time.perf_counter()
        one_pass()
        if on_gpu:
            torch.cuda.synchronize()
        first = time.perf_counter() - start
        peak = (torch.cuda.max_memory_allocated() / 2**20 if on_gpu else resident_kib() / 2**10) - before
        keep_freed_memory()  # as the scripts do
        left, passes, median = task["limit_s"] - first, 1, first
        if left > 0:
            timer = Timer("one_pass()", globals={"one_pass": one_pass}, num_threads=task["threads"])
            repeats = task["repeats"] * first  # ten times as many where that takes no second
            measured = timer.blocked_autorange(min_run_time=min(left, max(repeats, min(1, 10 * repeats))))
            passes, median = measured.number_per_run * len(measured.times), measured.median
        return {"ms": 1e3 * median, "peak_mib": f"{peak:.1f}", "passes": passes}
    except (MemoryError, RuntimeError) as error:
        out_of_memory = isinstance(error, MemoryError) or "alloc" in str(error)
        return {"failed": f"needs more than {task['limit_gib']} GiB" if out_of_memory else str(error).splitlines()[0]}


def run(**task: Any) -> dict[str, Any]:
    """Measure in a process of its own; as `measure`."""
    try:
        return in_a_process(measure, task, cuda=task["device"].type == "cuda")
    except BrokenProcessPool:
        return {"failed": "the process was killed"}


def pass_parser(told: str | None, name: str, repeats: int, limit_s: float) -> argparse.ArgumentParser:
    """Return a parser with what `measure` takes beside the loss and its size, and --methods."""
    made = parser(told, name)
    made.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    made.add_argument("--repeats", type=count, default=repeats, help="least number of timed passes per median")
    made.add_argument("--limit_gib", type=count, default=16, help="address space of one measurement on the CPU, in GiB")
    made.add_argument("--limit_s", type=float, default=limit_s, help="seconds of one measurement, a pass at least")
    return made


def shared_by(arguments: argparse.Namespace) -> dict[str, Any]:
    """What of the command line every measurement takes."""
    return {name: getattr(arguments, name) for name in ("device", "threads", "repeats", "limit_gib", "limit_s")}


def main() -> int:
    """Run the benchmark; return the exit status."""
    flags = pass_parser(__doc__, "losses.csv", repeats=7, limit_s=200)
    flags.add_argument("--sizes", nargs="+", type=size("BATCHxN"), default=[size("BATCHxN")(each) for each in SIZES])
    arguments = flags.parse_args()
    on = {} if arguments.device.type == "cpu" else {"device": str(arguments.device)}
    table = Table(arguments)
    for batch, n, m in arguments.sizes:
        shared = {"batch": batch, "n": n, "m": m, **shared_by(arguments)}
        plain = run(method=SOFTMAX, p_k=[1.0], options={}, build=make_loss, **shared)
        for method in arguments.methods:
            options = {"top1_mode": "sm"} if method in RELAXATIONS else {}
            task = {"method": method, "p_k": P_K.get(method, [0.2] * 5), **shared}
            ours = run(**task, options=options, build=make_loss)
            official = {"failed": "not in difftopk" if method in RELAXATIONS else ""}
            if method != SOFTMAX and method in IN_DIFFTOPK:
                official = run(**task, options={**options, **on}, build=make_official_loss)
            failed = {"ours": ours.get("failed"), "difftopk": official.get("failed")}
            table.add(
                **{"method": method, "batch": batch, "n": n, "m": m, "p_k": " ".join(f"{p:g}" for p in task["p_k"])},
                **{name: ours.get(name) for name in ("ms", "peak_mib")},
                official_path=executor_of(method),
                **{f"official_{name}": official.get(name) for name in ("ms", "peak_mib")},
                official_over_ours=official["ms"] / ours["ms"] if "ms" in ours and "ms" in official else None,
                cross_entropy_ms=plain["ms"] if "ms" in ours else None,
                ours_over_cross_entropy=f"{ours['ms'] / plain['ms']:.3g}" if "ms" in ours else None,
                note="; ".join(f"{whose}: {why}" for whose, why in failed.items() if why),
                spin_count=os.environ.get("GOMP_SPINCOUNT"),
            )
    return table.write()


if __name__ == "__main__":
    sys.exit(main())
