"""How many threads are worth starting here. Imports nothing slow: the launcher of sweeps asks, too."""

import os
from pathlib import Path


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use, the hardware threads of one core counted once."""
    threads = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return len({_siblings(thread) for thread in threads})


def _siblings(thread: int) -> str:
    """Return the hardware threads of this one's core, as Linux lists them, or this one alone."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(thread)
