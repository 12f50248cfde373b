"""What the kernels that Numba compiles for the CPU share: how they are compiled, and how they use several threads."""

import math
import os
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial

import numba
import numpy as np

_f32 = np.float32
SHARES = 8  # per thread
WRITTEN_BY_A_THREAD = 1_000_000  # numbers, where little else is done than to write them
CHUNK = 64  # numbers that are summed side by side


def jit(function: Callable, fastmath: Collection[str] = ("nsz",)) -> Callable:
    """Compile at the first call, and keep the code on the disk where there is a place for it.

    What is kept is renewed when the file of `function` changes, not when a compiled function that it calls from another
    file does: then delete __pycache__.
    """
    # Else no fused multiply-adds, so that values are those of PyTorch's operations.
    options = {"nogil": True, "error_model": "numpy", "fastmath": set(fastmath)}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # neither this folder nor the user's cache can be written
        return numba.njit(**options)(function)


@partial(jit, fastmath=("nsz", "contract"))
def exp(v):
    """exp(v) in float32 to 2 units in the last place (Cephes expf); written out so that it becomes vector code."""
    v = _f32(-87) if v < _f32(-87) else v  # comparisons that let NaN pass
    v = _f32(88) if v > _f32(88) else v
    whole = _f32(math.floor(v * _f32(1.44269504) + _f32(0.5)))
    f = v - whole * _f32(0.693359375) + whole * _f32(2.12194440e-4)
    p = _f32(1.9875691500e-4)
    p = p * f + _f32(1.3981999507e-3)
    p = p * f + _f32(8.3334519073e-3)
    p = p * f + _f32(4.1665795894e-2)
    p = p * f + _f32(1.6666665459e-1)
    p = p * f + _f32(5.0000001201e-1)
    p = p * (f * f) + f + _f32(1)
    return p * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)


@jit
def sum_of(values, parts):
    """The sum of values (n,) float32, by partial sums (CHUNK,), which makes it vector code."""
    whole = len(values) // CHUNK
    total = 0.0
    if whole > 0:
        parts[:] = values[:CHUNK]
        for c in range(1, whole):
            some = values[c * CHUNK : (c + 1) * CHUNK]
            for i in range(CHUNK):
                parts[i] += some[i]
        for part in parts:
            total += part
    for value in values[whole * CHUNK :]:
        total += value
    return total


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="topk_losses")


os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork


def in_threads(threads: int, tiles: int, call: Callable[[int, int], None]) -> None:
    """call(first, last) on shares of the tiles, in this thread and threads - 1 others; waits for all.

    Each takes the next share when it is through with one: PyTorch's own threads wait busily for some milliseconds after
    each operation, so that a core may be half taken.

    Python's threads, since the kernels run without its lock: Numba's own can be entered by one caller only, and those
    of OpenMP do not survive a fork.
    """
    if threads == 1:
        call(0, tiles)
        return
    size = -(-tiles // (SHARES * threads))
    starts = iter(range(0, tiles, size))  # next() holds Python's lock

    def work() -> None:
        for first in starts:
            call(first, min(first + size, tiles))

    others = [_pool().submit(work) for _ in range(threads - 1)]
    work()
    for other in others:
        if not other.cancel():  # cancelled: it has not begun, and nothing is left
            other.result()
