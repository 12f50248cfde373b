"""How many threads are worth starting here. Imports nothing slow: the launcher of sweeps asks, too."""

import os
from pathlib import Path


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use; the hardware threads of one core count once."""
    threads = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    files = [Path(f"/sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list") for thread in threads]
    return len({file.read_text() if file.exists() else str(file) for file in files})
