"""SinkhornSort and sorted SOFT top-k by Newton's method with a closed-form backward pass, beside unrolled Sinkhorn.

    python benchmarks/transport.py
    python benchmarks/transport.py --sizes 128x100 500x1000m16 --device cuda

Plain Sinkhorn: the same transport by log-domain updates of both potentials, with autograd through all of them. As many
as the slowest sample needs for a tolerance of 1e-3 of an anchor's mass, counted before the time is taken; OTT
and others count iterations likewise. One forward and backward pass of the true class's column; medians of at least 5
passes that take turns with ours. Prints a table and writes --output (default results/benchmarks/transport.csv).
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.runner import Table, parser, ratio, size, take_turns
from topk_losses import SinkhornSort, SortedSoftTopK
from topk_losses.transport import whiten_and_squash

K = 5
MOST_ITERATIONS = 20_000
TOLERANCE = 1e-3
OPERATORS = {"sinkhorn_sort": SinkhornSort(K, 100.0), "soft_topk": SortedSoftTopK(K, 10.0)}


def anchors_of(method: str, n: int) -> tuple[Tensor, Tensor]:
    """The anchors (A,) and their masses (A,), float32."""
    sizes = torch.ones(n) if method == "sinkhorn_sort" else torch.tensor([1.0] * K + [n - K])
    return torch.linspace(1, 0, len(sizes)), sizes / n


def sinkhorn(x: Tensor, anchors: Tensor, mass: Tensor, epsilon: float, iterations: int) -> tuple[Tensor, int | None]:
    """The transport plan (batch, n, A) of x (batch, n) after so many iterations, each one update of either potential,
    and the first of them before which the anchors' masses were off by at most the tolerance; None if there was none.

    Without gradients it ends there.
    """
    negative_cost = -((x.unsqueeze(2) - anchors) ** 2) / epsilon  # (batch, n, A)
    g, reached = torch.zeros(len(x), 1, len(anchors), device=x.device), None
    for iteration in range(1, iterations + 1):
        f = -torch.logsumexp(negative_cost + g, 2, keepdim=True) - torch.log(torch.tensor(float(x.shape[1])))
        column = torch.logsumexp(negative_cost + f, 1, keepdim=True)  # (batch, 1, A), log mass of each anchor over e^g
        if not torch.is_grad_enabled() and ((column + g).exp() / mass - 1).abs().max() <= TOLERANCE:
            reached = iteration
            break
        g = mass.log() - column
    return (negative_cost + f + g).exp(), reached


def measure(method: str, batch: int, n: int, arguments: argparse.Namespace) -> dict[str, object]:
    """Return the cells of a method at a size."""
    torch.manual_seed(0)
    device, operator = arguments.device, OPERATORS[method].to(arguments.device)
    logits = (2 * torch.randn(batch, n, device=device)).requires_grad_()
    labels = torch.randint(n, (batch,), device=device)
    anchors, mass = (each.to(device) for each in anchors_of(method, n))
    settings = (anchors, mass, 1 / operator.inverse_temperature)
    with torch.no_grad():
        _, iterations = sinkhorn(whiten_and_squash(logits), *settings, MOST_ITERATIONS)

    def ours() -> Tensor:
        return operator.rank_probabilities(logits, labels)

    def plain() -> Tensor:
        plan, _ = sinkhorn(whiten_and_squash(logits), *settings, iterations)
        return n * plan[torch.arange(len(labels), device=device), labels, :K]  # (batch, K)

    def one_pass(column: Callable[[], Tensor]) -> None:
        logits.grad = None
        column().sum().backward()

    reached = iterations is not None
    calls = {column.__name__: partial(one_pass, column) for column in ([ours, plain] if reached else [ours])}
    times = take_turns(calls, arguments.repeats, 1, arguments.threads)
    return {
        **{"method": method, "batch": batch, "n": n, "k": K, "inverse_temperature": operator.inverse_temperature},
        "ms": statistics.median(times["ours"]),
        "unrolled_ms": statistics.median(times["plain"]) if reached else None,
        "unrolled_over_ours": ratio(times["plain"], times["ours"]) if reached else None,
        "unrolled_iterations": iterations,
        "largest_difference": f"{(ours() - plain()).abs().max().item():.1e}" if reached else None,
        "note": None if reached else f"plain Sinkhorn: not within {MOST_ITERATIONS} iterations",
    }


def main() -> int:
    """Run the benchmark; return the exit status."""
    flags = parser(__doc__, "transport.csv", repeats=5)
    sizes = [size("BATCHxN")(each) for each in ("128x16", "500x16", "500x50", "128x100")]
    flags.add_argument("--methods", nargs="+", choices=OPERATORS, default=list(OPERATORS))
    flags.add_argument("--sizes", nargs="+", type=size("BATCHxN"), default=sizes)
    arguments = flags.parse_args()
    torch.set_num_threads(arguments.threads)
    table = Table(arguments)
    for batch, n, _ in arguments.sizes:
        for method in arguments.methods:
            table.add(**measure(method, batch, n, arguments))
    return table.write()


if __name__ == "__main__":
    sys.exit(main())
