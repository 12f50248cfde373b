"""What the machine can do, in the units of the floors of benchmarks/README.md.

    python benchmarks/machine.py
    python benchmarks/machine.py --device cuda

Bytes moved per second by a copy that fits the cache and by one that does not, floating-point operations per second of
matrix products in fp32 and bf16, exponentials per second, and the time that one small PyTorch operation takes to call.
Medians; prints a table and writes --output (default results/benchmarks/machine.csv).
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch

from benchmarks.table import add_output_flag, write_table
from experiments.shared.command_line import present_device
from experiments.shared.cores import usable_cores
from experiments.shared.environment import device_name

COLUMNS = ("quantity", "value", "unit", "device", "threads", "torch")
MIB = 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=present_device, default="cpu")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--repeats", type=int, default=21)
    add_output_flag(parser, "machine.csv")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = arguments.device

    def seconds(function: Callable[[], object], number: int) -> float:
        """Of one call, the median over the repeats of the mean of so many calls."""
        times = []
        for _ in range(arguments.repeats + 1):
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(number):
                function()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append((time.perf_counter() - start) / number)
        return statistics.median(times[1:])  # the first warms up

    measured: list[tuple[str, float, str]] = []
    for name, mib in (("copy within the cache", 1), ("copy beyond the cache", 256)):
        source = torch.rand(mib * MIB // 4, device=device)
        target = torch.empty_like(source)
        moved = 2 * mib * MIB  # read and written
        measured.append((name, moved / seconds(lambda a=source, b=target: b.copy_(a), 256 // mib) / 1e9, "GB/s"))
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        a, b = (torch.rand(2048, 2048, device=device).to(dtype) for _ in range(2))
        measured.append((f"matrix product, {name}", 2 * 2048**3 / seconds(lambda a=a, b=b: a @ b, 1) / 1e9, "GFLOP/s"))
    x = torch.rand(MIB // 4, device=device)
    y = torch.empty_like(x)
    measured.append(("exponentials", len(x) / seconds(lambda: torch.exp(x, out=y), 64) / 1e9, "billion/s"))
    small = torch.rand(4, device=device)
    measured.append(("call of a small operation", 1e6 * seconds(lambda: small + small, 1000), "microseconds"))

    place = (device_name(device), arguments.threads, torch.__version__)
    rows = [dict(zip(COLUMNS, (name, f"{value:.4g}", unit, *place))) for name, value, unit in measured]
    for row in rows:
        print(f"{row['quantity']:28} {row['value']:>9} {row['unit']}")
    write_table(arguments.output, COLUMNS, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
