"""What the kernels that Numba compiles for the CPU share: how they are compiled, and how they use several threads."""

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numba


def jit(function: Callable) -> Callable:
    """Compile at the first call, and keep the code on the disk where there is a place for it."""
    # No fused multiply-adds, so that values are those of PyTorch's operations.
    options = {"nogil": True, "error_model": "numpy", "fastmath": {"nsz"}}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # neither this folder nor the user's cache can be written
        return numba.njit(**options)(function)


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="topk_losses")


os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork


def in_threads(threads: int, tiles: int, call: Callable[[int, int], None]) -> None:
    """call(first, last) on as many shares of the tiles as there are threads, this one among them; waits for all.

    Python's threads, since the kernels run without its lock: Numba's own can be entered by one caller only, and those
    of OpenMP do not survive a fork.
    """
    bounds = [tiles * i // threads for i in range(threads + 1)]
    others = [_pool().submit(call, *share) for share in itertools.pairwise(bounds[1:])]
    call(bounds[0], bounds[1])
    for other in others:
        other.result()
