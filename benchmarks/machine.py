"""What the machine can do, in the units of the floors of benchmarks/README.md.

    python benchmarks/machine.py
    python benchmarks/machine.py --device cuda

Bytes moved per second by a copy that fits the cache and by one that does not, floating-point operations per second of
matrix products in fp32 and bf16, exponentials per second, and the time that one small PyTorch operation takes to call.
Medians; prints a table and writes --output (default results/benchmarks/machine.csv).
"""

import statistics
import sys
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.runner import Table, parser, take_turns

MIB = 2**20


def main() -> int:
    """Run the benchmark; return the exit status."""
    arguments = parser(__doc__, "machine.csv", repeats=21).parse_args()
    device = arguments.device
    table = Table(arguments)

    def add(name: str, number: int, amount: float, unit: str, call: Callable[[], object]) -> None:
        """A row: how many calls are timed at once, what one does, and in which unit."""
        (times,) = take_turns({name: call}, arguments.repeats, number, arguments.threads).values()
        milliseconds = statistics.median(times)
        table.add(quantity=name, value=1e3 * amount / milliseconds if amount else 1e3 * milliseconds, unit=unit)

    for name, mib in (("copy within the cache", 1), ("copy beyond the cache", 256)):
        source = torch.rand(mib * MIB // 4, device=device)
        moved = 2 * mib * MIB / 1e9  # read and written
        add(name, 256 // mib, moved, "GB/s", partial(torch.empty_like(source).copy_, source))
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        a, b = (torch.rand(2048, 2048, device=device).to(dtype) for _ in range(2))
        add(f"matrix product, {name}", 1, 2 * 2048**3 / 1e9, "GFLOP/s", partial(torch.matmul, a, b))
    x, small = torch.rand(MIB // 4, device=device), torch.rand(4, device=device)
    add("exponentials", 64, len(x) / 1e9, "billion/s", partial(torch.exp, x, out=torch.empty_like(x)))
    add("call of a small operation", 1000, 0, "microseconds", lambda: small + small)
    return table.write()


if __name__ == "__main__":
    sys.exit(main())
