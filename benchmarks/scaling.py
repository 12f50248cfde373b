"""Time and memory of each loss as n, k and the batch grow, one at a time.

    python benchmarks/scaling.py                     # 2 hours at most; most of it for sinkhorn_sort and odd_even
    python benchmarks/scaling.py --methods softsort splitter_selection
    python scripts/report.py results/table1_short.csv --figures results/figures    # draws cost_over_size from it

One forward and backward pass, without m, P_K uniform on k ranks: n in 16, 100, 1000, 10450 (batch 128, k 5), k in 1, 5,
20 and batch in 32, 128, 512 (n 1000). Prints a table and writes --output (default results/benchmarks/scaling.csv):
medians in milliseconds, peak MiB above what was there before the pass, how many passes the median is of, and what the
method has to do and to keep per sample to leading order (`operations`, `numbers`): the asymptotes of the figure.
"""

import functools
import math
import sys

from benchmarks.losses import SOFTMAX, pass_parser, run, shared_by
from benchmarks.runner import Table
from topk_losses import METHODS, RELAXATIONS, make_loss, make_operator

NS, KS, BATCHES = (16, 100, 1000, 10450), (1, 5, 20), (32, 128, 512)
BASE = {"batch": 128, "n": 1000, "k": 5}


def sizes() -> list[dict[str, int]]:
    """The sizes, each once: one of the three numbers moves, the others stay."""
    moved = [{"n": n} for n in NS] + [{"k": k} for k in KS] + [{"batch": batch} for batch in BATCHES]
    return list({tuple(size.items()): size for size in ({**BASE, **each} for each in moved)}.values())


@functools.cache
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
    """Run the benchmark; return the exit status."""
    flags = pass_parser(__doc__, "scaling.csv", repeats=5, limit_s=20)
    flags.add_argument("--max_n", type=int, default=max(NS), help="leave out larger n (%(default)s)")
    arguments = flags.parse_args()
    table = Table(arguments)
    for method in arguments.methods:
        for size in sizes():
            n, k = size["n"], size["k"]
            # The first has no ranks to spread over, and the others take a single k.
            p_k = {SOFTMAX: [1.0]}.get(method, [0.0] * (k - 1) + [1.0])
            if method in RELAXATIONS:
                p_k = [1 / k] * k
            has_zeros = getattr(METHODS[method].operator, "has_zeros", False)  # its loss wants the softmax's part
            has_one_k = method == SOFTMAX or (has_zeros and k == 1)
            if n > arguments.max_n or (has_one_k and k != BASE["k"]):
                continue
            options = {"top1_mode": "sm" if has_zeros else "sort"} if method in RELAXATIONS else {}
            task = {"method": method, "p_k": p_k, "m": None, "options": options, "build": make_loss}
            measured = run(**task, batch=size["batch"], n=n, **shared_by(arguments))
            cells = {name: measured.get(name) for name in ("ms", "peak_mib", "passes")}
            table.add(method=method, **size, **cells, operations=None, numbers=None, note=measured.get("failed"))
    # Networks are built here only now: the processes that measure are forked from one that ran no tensor operation.
    for row in (row for row in table.rows if row["ms"]):
        row["operations"], row["numbers"] = (f"{value:.6g}" for value in work(row["method"], row["n"], row["k"]))
    return table.write()


if __name__ == "__main__":
    sys.exit(main())
