"""SinkhornSort and sorted SOFT top-k by Newton's method with a closed-form backward pass, beside unrolled Sinkhorn.

    python benchmarks/transport.py
    python benchmarks/transport.py --sizes 128x100 500x1000m16 --device cuda

Plain Sinkhorn: the same transport by log-domain updates of both potentials, with autograd through all of them. As many
as the slowest sample needs for a tolerance of 1e-3 of an anchor's mass, counted before the time is taken; OTT
and others count iterations likewise. One forward and backward pass of the true class's column; medians of at least 5
passes that take turns with ours. Prints a table and writes --output (default results/benchmarks/transport.csv).
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.losses import parse_size
from benchmarks.table import add_output_flag, write_table
from experiments.shared.command_line import present_device
from experiments.shared.environment import device_name
from topk_losses import SinkhornSort, SortedSoftTopK
from topk_losses.transport import whiten_and_squash

K = 5
MOST_ITERATIONS = 20_000
TOLERANCE = 1e-3
OPERATORS = {"sinkhorn_sort": SinkhornSort(K, 100.0), "soft_topk": SortedSoftTopK(K, 10.0)}
COLUMNS = (
    *("method", "batch", "n", "k", "inverse_temperature", "ms", "unrolled_ms", "unrolled_over_ours"),
    *("unrolled_iterations", "largest_difference", "note", "device", "threads", "torch"),
)


def anchors_of(method: str, n: int) -> tuple[Tensor, Tensor]:
    """The anchors (A,) and their masses (A,), float32."""
    sizes = torch.ones(n) if method == "sinkhorn_sort" else torch.tensor([1.0] * K + [n - K])
    return torch.linspace(1, 0, len(sizes)), sizes / n


def unrolled(logits: Tensor, labels: Tensor, anchors: Tensor, mass: Tensor, epsilon: float, iterations: int) -> Tensor:
    """P[1..K, y] (batch, K) after so many Sinkhorn iterations, each one update of either potential."""
    n = logits.shape[1]
    x = whiten_and_squash(logits)
    negative_cost = -((x.unsqueeze(2) - anchors) ** 2) / epsilon  # (batch, n, A)
    g = torch.zeros(len(logits), 1, len(anchors), device=logits.device)
    for _ in range(iterations):
        f = -torch.logsumexp(negative_cost + g, 2, keepdim=True) - torch.log(torch.tensor(float(n)))  # (batch, n, 1)
        g = mass.log() - torch.logsumexp(negative_cost + f, 1, keepdim=True)  # (batch, 1, A)
    plan = (negative_cost + f + g).exp()  # (batch, n, A)
    return n * plan[torch.arange(len(labels), device=labels.device), labels, :K]


@torch.no_grad()
def iterations_needed(logits: Tensor, anchors: Tensor, mass: Tensor, epsilon: float) -> int | None:
    """Iterations until the anchors' masses are off by at most the tolerance; None if too many."""
    n = logits.shape[1]
    negative_cost = -((whiten_and_squash(logits).unsqueeze(2) - anchors) ** 2) / epsilon
    g = torch.zeros(len(logits), 1, len(anchors), device=logits.device)
    for iteration in range(1, MOST_ITERATIONS + 1):
        f = -torch.logsumexp(negative_cost + g, 2, keepdim=True) - torch.log(torch.tensor(float(n)))
        column = torch.logsumexp(negative_cost + f, 1, keepdim=True)  # (batch, 1, A), log mass of each anchor over e^g
        error = ((column + g).exp() / mass - 1).abs().max()
        g = mass.log() - column
        if error <= TOLERANCE:
            return iteration
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = ["128x16", "500x16", "500x50", "128x100"]
    parser.add_argument("--methods", nargs="+", choices=OPERATORS, default=list(OPERATORS))
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=[parse_size(size) for size in sizes])
    parser.add_argument("--device", type=present_device, default="cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=5)
    add_output_flag(parser, "transport.csv")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = arguments.device

    def seconds(function: Callable[[Tensor], Tensor], logits: Tensor) -> float:
        start = time.perf_counter()
        logits.grad = None
        function(logits).sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    rows = []
    for batch, n, _ in arguments.sizes:
        for method in arguments.methods:
            torch.manual_seed(0)
            logits = (2 * torch.randn(batch, n, device=device)).requires_grad_()
            labels = torch.randint(n, (batch,), device=device)
            operator = OPERATORS[method].to(device)
            temperature = operator.inverse_temperature
            anchors, mass = (each.to(device) for each in anchors_of(method, n))
            iterations = iterations_needed(logits, anchors, mass, 1 / temperature)
            row = dict.fromkeys(COLUMNS, "")
            row.update(method=method, batch=batch, n=n, k=K, inverse_temperature=f"{temperature:g}")
            row.update(device=device_name(device), threads=arguments.threads, torch=torch.__version__)

            def ours(x: Tensor, operator=operator, labels=labels) -> Tensor:
                return operator.rank_probabilities(x, labels)

            def plain(x: Tensor, settings=(labels, anchors, mass, 1 / temperature, iterations)) -> Tensor:
                return unrolled(x, *settings)

            contestants = [ours] if iterations is None else [ours, plain]
            times = [[seconds(each, logits) for each in contestants] for _ in range(arguments.repeats + 1)][1:]
            medians = [1e3 * statistics.median(each) for each in zip(*times)]
            row["ms"] = f"{medians[0]:.4g}"
            if iterations is None:
                row["note"] = f"plain Sinkhorn: not within {MOST_ITERATIONS} iterations"
            else:
                row["unrolled_ms"] = f"{medians[1]:.4g}"
                row["unrolled_over_ours"] = f"{statistics.median(b / a for a, b in times):.4g}"
                row["unrolled_iterations"] = iterations
                with torch.no_grad():
                    row["largest_difference"] = f"{(ours(logits) - plain(logits)).abs().max().item():.1e}"
            rows.append(row)
            print("  ".join(f"{name} {row[name]}" for name in COLUMNS[:11] if row[name] != ""), flush=True)
    write_table(arguments.output, COLUMNS, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
