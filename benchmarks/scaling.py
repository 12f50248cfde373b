"""Time and memory of each loss as n, k and the batch grow, one at a time.

    python benchmarks/scaling.py                     # 2 hours at most; most of it for sinkhorn_sort and odd_even
    python benchmarks/scaling.py --methods softsort splitter_selection
    python -m scripts.reporting.cost_figure                    # draws results/figures/cost_over_size from it

One forward and backward pass, without m, P_K uniform on k ranks: n in 16, 100, 1000, 10450 (batch 128, k 5), k in 1, 5,
20 and batch in 32, 128, 512 (n 1000). Prints a table and writes --output (default results/benchmarks/scaling.csv):
medians in milliseconds, peak MiB above what was there before the pass, how many passes the median is of, and what the
method has to do and to keep per sample to leading order (`operations`, `numbers`): the asymptotes of the figure.
"""

import argparse
import math
import platform
import sys

import torch

from benchmarks.losses import MEASUREMENT_FLAGS, add_measurement_flags, run
from benchmarks.table import add_output_flag, write_table
from experiments.shared.environment import device_name
from topk_losses import METHODS, RELAXATIONS, make_loss, make_operator

NS, KS, BATCHES = (16, 100, 1000, 10450), (1, 5, 20), (32, 128, 512)
BASE = {"batch": 128, "n": 1000, "k": 5}
COLUMNS = (
    *("method", "batch", "n", "k", "ms", "peak_mib", "passes", "operations", "numbers", "note"),
    *("device", "threads", "torch", "python"),
)
LINE = "{method:22} {batch:>5} {n:>6} {k:>3} {ms:>10} {peak_mib:>9} {passes:>6}  {note}"


def sizes() -> list[dict[str, int]]:
    """The sizes, each once: one of the three numbers moves, the others stay."""
    moved = [{"n": n} for n in NS] + [{"k": k} for k in KS] + [{"batch": batch} for batch in BATCHES]
    return list({tuple(size.items()): size for size in ({**BASE, **each} for each in moved)}.values())


def work(method: str, n: int, k: int) -> tuple[float, float]:
    """Operations of one sample, and numbers that its backward pass needs, to leading order in n and k."""
    if METHODS[method].family == "losses":
        return n, n
    if method == "softsort":
        return n + k * k, n + k * k
    if method == "neuralsort":
        return n * math.log2(n) + n * k, n * k
    if method == "soft_topk" or METHODS[method].family in ("thresholds", "subsets", "ranks"):
        return n * k, n * k
    if method == "sinkhorn_sort":
        return n**3, n * n
    comparators = sum(make_operator(method, n, k).layer_sizes)
    return comparators, comparators


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--max_n", type=int, default=max(NS), help="leave out larger n (%(default)s)")
    add_measurement_flags(parser, repeats=5, limit_s=20)
    add_output_flag(parser, "scaling.csv")
    arguments = parser.parse_args()

    shared = {name: getattr(arguments, name) for name in MEASUREMENT_FLAGS}
    rows = []
    print(LINE.format(**{name: name for name in COLUMNS}))
    for method in arguments.methods:
        for size in sizes():
            n, k = size["n"], size["k"]
            # The first has no ranks to spread over, and the others take a single k.
            p_k = {"softmax_cross_entropy": [1.0]}.get(method, [0.0] * (k - 1) + [1.0])
            if method in RELAXATIONS:
                p_k = [1 / k] * k
            has_zeros = getattr(METHODS[method].operator, "has_zeros", False)  # its loss wants the softmax's part
            has_one_k = method == "softmax_cross_entropy" or (has_zeros and k == 1)
            if n > arguments.max_n or (has_one_k and k != BASE["k"]):
                continue
            options = {"top1_mode": "sm" if has_zeros else "sort"} if method in RELAXATIONS else {}
            task = {"method": method, "p_k": p_k, "m": None, "options": options, "build": make_loss}
            measured = run({**task, "batch": size["batch"], "n": n, **shared})
            row = dict.fromkeys(COLUMNS, "")
            row.update(
                method=method,
                **size,
                note=measured.get("failed", ""),
                device=device_name(arguments.device),
                threads=arguments.threads,
                torch=torch.__version__,
                python=platform.python_version(),
            )
            if "ms" in measured:
                ms, peak = f"{measured['ms']:.4g}", f"{measured['peak_mib']:.1f}"
                row.update(ms=ms, peak_mib=peak, passes=measured["passes"])
            rows.append(row)
            print(LINE.format(**row), flush=True)
    # Networks are built here only now: the processes that measure are forked from one that ran no tensor operation.
    known: dict[tuple[str, int, int], tuple[float, float]] = {}
    for row in (row for row in rows if row["ms"]):
        key = (row["method"], row["n"], row["k"])
        if key not in known:
            known[key] = work(*key)
        row["operations"], row["numbers"] = (f"{value:.6g}" for value in known[key])
    write_table(arguments.output, COLUMNS, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
