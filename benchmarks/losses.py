"""Time and memory of one forward and backward pass of each loss, beside difftopk and plain cross-entropy.

    python benchmarks/losses.py                                  # all methods, all sizes, on the CPU
    python benchmarks/losses.py --methods bitonic --sizes 128x100 500x1000m16 --device cuda

Prints a table and writes --output (default results/benchmarks/losses.csv), a row per method and size: medians in
milliseconds, peak MiB above what was there before the pass, and the ratios. Every measurement has a process of its
own, one after another in one run. difftopk runs its networks through torch-sparse if that is installed, else through
its dense executor; the column official_path says which. The column wait_policy is OMP_WAIT_POLICY: unset, PyTorch's
threads wait in a loop and so take a core from the threads of our kernels; passive, as in the scripts, asleep.
"""

import argparse
import ctypes
import multiprocessing
import os
import platform
import re
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.table import add_output_flag, write_table
from experiments.shared.command_line import present_device
from experiments.shared.environment import device_name, keep_freed_memory
from experiments.shared.official_loss import IN_DIFFTOPK, executor_of, make_official_loss
from topk_losses import METHODS, RELAXATIONS, make_loss
from topk_losses.methods import SINGLE_K
from topk_losses.operator import largest

SIZES = ("128x100", "500x1000m16", "500x10450m50", "128x1000", "128x10450")
P_K = {"softmax_cross_entropy": [1.0], **{method: [0, 0, 0, 0, 1.0] for method in SINGLE_K}}
COLUMNS = (
    *("method", "batch", "n", "m", "p_k", "ms", "peak_mib"),
    *("official_path", "official_ms", "official_peak_mib", "official_over_ours"),
    *("cross_entropy_ms", "ours_over_cross_entropy", "note", "device", "threads", "wait_policy"),
    *("torch", "python"),
)
MEASUREMENT_FLAGS = ("device", "threads", "repeats", "limit_gib", "limit_s")
LINE = "{method:22} {batch:>5} {n:>6} {m:>4} {ms:>9} {peak_mib:>8} {official_ms:>11} {official_peak_mib:>8} "
LINE += "{official_over_ours:>8} {ours_over_cross_entropy:>6}  {official_path} {note}"
HEADINGS = {
    **{"ms": "ms", "peak_mib": "MiB", "official_ms": "difftopk ms", "official_peak_mib": "MiB"},
    **{"official_over_ours": "ratio", "ours_over_cross_entropy": "x CE", "official_path": "", "note": ""},
}


def parse_size(text: str) -> tuple[int, int, int | None]:
    """ "500x1000m16" -> (batch 500, n 1000, m 16)."""
    match = re.fullmatch(r"(\d+)x(\d+)(?:m(\d+))?", text)
    if not match:
        raise argparse.ArgumentTypeError(f"a size is written BATCHxN or BATCHxNmM, as in 500x1000m16; got {text!r}")
    batch, n, m = match.groups()
    return int(batch), int(n), int(m) if m else None


def resident_kib(forget_peak: bool = False) -> int:
    """The most memory that this process has had since it began or since forget_peak, in KiB (Linux)."""
    if forget_peak:
        ctypes.CDLL(None).malloc_trim(0)  # what is free already would otherwise be used, and not counted
        Path("/proc/self/clear_refs").write_text("5")
    return int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1])


def measure(task: dict[str, Any], channel: Any) -> None:
    """In a process of its own: build the loss, take the first pass's peak memory and the later passes' times."""
    torch.set_num_threads(task["threads"])
    torch.manual_seed(0)
    device = task["device"]
    if device.type == "cpu":  # an honest failure instead of a machine that swaps
        resource.setrlimit(resource.RLIMIT_AS, (task["limit_gib"] * 2**30,) * 2)
    try:
        loss = task["build"](task["method"], task["p_k"], task["n"], task["m"], **task["options"])
        loss = loss.to(device)
        logits = (2 * torch.randn(task["batch"], task["n"], device=device)).requires_grad_()
        labels = torch.randint(task["n"], (task["batch"],), device=device)

        def one_pass() -> float:
            start = time.perf_counter()
            logits.grad = None
            loss(logits, labels).backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
            return 1e3 * (time.perf_counter() - start)

        # a small loss first: lazily loaded libraries and compiled kernels do not count as memory of the loss
        m = task["m"] and min(task["m"], 20)
        small = task["build"](task["method"], task["p_k"], 50, m, **task["options"]).to(device)
        scores = torch.zeros(2, 50, device=device, requires_grad=True)
        small(scores, torch.zeros(2, dtype=torch.int64, device=device)).backward()
        largest(torch.zeros(2, 1000, device=device), 5)  # whose kernel is not taken for 50 scores
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            first = one_pass()
            peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        else:
            before = resident_kib(forget_peak=True)
            first = one_pass()
            peak = (resident_kib() - before) / 2**10
        keep_freed_memory()  # as the scripts do
        times: list[float] = []
        while len(times) < task["repeats"] or (sum(times) < 1000 and len(times) < 10 * task["repeats"]):
            if first + sum(times) > 1e3 * task["limit_s"]:
                break
            times.append(one_pass())
        times = times or [first]
        channel.send({"ms": statistics.median(times), "peak_mib": peak, "passes": len(times)})
    except (MemoryError, RuntimeError) as error:
        out_of_memory = isinstance(error, MemoryError) or "alloc" in str(error)
        reason = f"needs more than {task['limit_gib']} GiB" if out_of_memory else str(error).splitlines()[0]
        channel.send({"failed": reason})


def run(task: dict[str, Any]) -> dict[str, Any]:
    """Start the process, wait for it, and return {"ms", "peak_mib", "passes"} or {"failed": reason}."""
    context = multiprocessing.get_context("fork")  # the parent never ran a tensor operation: nothing to inherit
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=measure, args=(task, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        return {"failed": "the process was killed"}
    finally:
        process.join()


def add_measurement_flags(parser: argparse.ArgumentParser, repeats: int, limit_s: float) -> None:
    """Add MEASUREMENT_FLAGS, what `measure` takes beside the loss and its size."""
    parser.add_argument("--device", type=present_device, default="cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=repeats, help="least number of timed passes per median")
    parser.add_argument("--limit_gib", type=int, default=16, help="address space of one measurement on the CPU, in GiB")
    parser.add_argument(
        "--limit_s", type=float, default=limit_s, help="no pass begins after so many seconds (%(default)s)"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=[parse_size(size) for size in SIZES])
    add_measurement_flags(parser, repeats=7, limit_s=200)
    add_output_flag(parser, "losses.csv")
    arguments = parser.parse_args()

    shared = {name: getattr(arguments, name) for name in MEASUREMENT_FLAGS}
    rows = []
    print(LINE.format(**{name: HEADINGS.get(name, name) for name in COLUMNS}))
    for batch, n, m in arguments.sizes:
        size = {"batch": batch, "n": n, "m": m, **shared}
        plain = run({**size, "method": "softmax_cross_entropy", "p_k": [1.0], "options": {}, "build": make_loss})
        for method in arguments.methods:
            options = {"top1_mode": "sm"} if method in RELAXATIONS else {}
            task = {**size, "method": method, "p_k": P_K.get(method, [0.2] * 5), "options": options}
            ours = run({**task, "build": make_loss})
            if method == "softmax_cross_entropy" or method not in IN_DIFFTOPK:
                official = {"failed": "not in difftopk" if method in RELAXATIONS else ""}
            else:
                on = {} if arguments.device.type == "cpu" else {"device": str(arguments.device)}
                official = run({**task, "options": {**options, **on}, "build": make_official_loss})
            row = dict.fromkeys(COLUMNS, "")
            row.update(
                method=method,
                batch=batch,
                n=n,
                m=m or "",
                p_k=" ".join(f"{p:g}" for p in task["p_k"]),
                official_path=executor_of(method),
                device=device_name(arguments.device),
                threads=arguments.threads,
                wait_policy=os.environ.get("OMP_WAIT_POLICY", ""),
                torch=torch.__version__,
                python=platform.python_version(),
            )
            notes = []
            for name, result in (("", ours), ("official_", official)):
                if "failed" in result:
                    notes.append(f"{'difftopk' if name else 'ours'}: {result['failed']}" if result["failed"] else "")
                else:
                    row[f"{name}ms"], row[f"{name}peak_mib"] = f"{result['ms']:.4g}", f"{result['peak_mib']:.1f}"
            if "ms" in ours and "ms" in official:
                row["official_over_ours"] = f"{official['ms'] / ours['ms']:.4g}"
            if "ms" in ours and "ms" in plain:
                row["cross_entropy_ms"] = f"{plain['ms']:.4g}"
                row["ours_over_cross_entropy"] = f"{ours['ms'] / plain['ms']:.3g}"
            row["note"] = "; ".join(note for note in notes if note)
            rows.append(row)
            print(LINE.format(**row), flush=True)
    write_table(arguments.output, COLUMNS, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
