"""The cores and memory pages that a process takes here. Imports nothing slow: the launcher imports it, too."""

import os
from pathlib import Path

# Environment of a process whose large tensors lie in huge pages, on Linux where the kernel grants them to those who ask
# (/sys/kernel/mm/transparent_hugepage/enabled is madvise). The C library reads the first when the process starts,
# PyTorch the second before its first tensor.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "THP_MEM_ALLOC_ENABLE": "1"}


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use; the hardware threads of one core count once."""
    threads = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    files = [Path(f"/sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list") for thread in threads]
    return len({file.read_text() if file.exists() else str(file) for file in files})
