"""The cores and memory pages that a process takes here. Imports nothing slow: the launcher imports it, too."""

import os
from pathlib import Path

# Environment of a process whose large tensors lie in huge pages, on Linux where the kernel grants them to those who ask
# (/sys/kernel/mm/transparent_hugepage/enabled is madvise). The C library reads the first when the process starts,
# PyTorch the second before its first tensor.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "THP_MEM_ALLOC_ENABLE": "1"}


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use; the hardware threads of one core count once."""
    if hasattr(os, "sched_getaffinity"):
        threads = os.sched_getaffinity(0)
    else:
        threads = set(range(os.cpu_count() or 1))
    cores = set()
    for thread in threads:
        siblings = Path(f"/sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list")
        if siblings.exists():
            cores.add(siblings.read_text())
        else:
            cores.add(str(thread))
    return len(cores)
