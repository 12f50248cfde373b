"""Time of a CIFAR-100 training step with and without huge pages, in runs side by side as the launcher starts them.

    python benchmarks/huge_pages.py                                     # 2 runs of one thread, 3 turns
    python benchmarks/huge_pages.py --runs 1 --turns 5

Each measurement is `benchmarks/training_step.py` in processes of its own, since the C library and PyTorch read the
variables of `experiments.common.cores.HUGE_PAGES` once. The alternatives take turns; medians are over runs and turns.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd

from benchmarks.runner import SOFTMAX, Table, add_precision, parser
from experiments.common.cores import HUGE_PAGES

STEP = Path(__file__).with_name("training_step.py")
MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SWITCHED_OFF = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0", "THP_MEM_ALLOC_ENABLE": "0"}


def side_by_side(runs: int, flags: list[str], settings: dict[str, str]) -> list[float]:
    """Start the runs at once, with these settings in their environment; return the milliseconds of a step of each."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, f"{number}.csv") for number in range(runs)]
        processes = []
        for output in outputs:
            command = [sys.executable, str(STEP), *flags, "--output", str(output)]
            environment = os.environ | settings
            processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
        for process in processes:
            if process.wait():
                raise RuntimeError(f"training_step.py ended with status {process.returncode}")
        return [float(pd.read_csv(output)["ms_per_step"][0]) for output in outputs]


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    flags = parser(__doc__, "huge_pages.csv", SOFTMAX, turns=3, steps=8, runs=2, batch=128, images=5000)
    flags.set_defaults(threads=1)
    add_precision(flags)
    args = flags.parse_args(argv)
    step_flags = ["--turns", "3", "--steps", str(args.steps), "--threads", str(args.threads)]
    step_flags += ["--batch", str(args.batch), "--images", str(args.images), "--device", str(args.device)]
    step_flags += ["--precision", args.precision, "--methods", *(args.methods or [SOFTMAX])[:1]]
    times: dict[str, list[float]] = {"off": [], "on": []}
    for _ in range(args.turns):
        times["off"] += side_by_side(args.runs, step_flags, SWITCHED_OFF)
        times["on"] += side_by_side(args.runs, step_flags, HUGE_PAGES)
    table = Table(args)
    mode = MODE.read_text().strip() if MODE.is_file() else None
    for setting, measured in times.items():
        median = statistics.median(measured)
        over_off = median / statistics.median(times["off"])
        table.add(
            huge_pages=setting,
            runs=args.runs,
            precision=args.precision,
            ms_per_step=median,
            over_off=over_off,
            kernel_mode=mode,
        )
    return table.write()


if __name__ == "__main__":
    sys.exit(main())
