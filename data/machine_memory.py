"""How much memory this process may still take, on the machine and on its GPU."""

import os
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")


def available_ram() -> int:
    """Bytes of RAM that can be taken without swapping, within the limit of the process's container."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux: assume that half of the RAM is in use
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    # A container's limit does not show in /proc/meminfo. Its use includes the page cache, which can be given up.
    for limit_file, use_file, cache in (
        ("memory.max", "memory.current", "file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "cache"),
    ):
        try:
            limit, used = (int((_CGROUP / name).read_text()) for name in (limit_file, use_file))
            statistics = (_CGROUP / limit_file).with_name("memory.stat").read_text().splitlines()
            cached = int(dict(line.split() for line in statistics)[cache])
        except (OSError, ValueError, KeyError):  # no such control group, or no limit ("max")
            continue
        available = min(available, limit - used + cached)
    return max(available, 0)


def available_on(device: torch.device) -> int:
    """Bytes that a CUDA device can still give to this process."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def gib(size: int) -> str:
    """A size in bytes as text in GiB, or in MiB below 1 GiB."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
