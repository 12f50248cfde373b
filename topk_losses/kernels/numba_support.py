"""How the CPU kernels are compiled by Numba, cached on disk, and run in several threads."""

import contextlib
import hashlib
import math
import os
import warnings
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from numba.core.caching import FunctionCache, IndexDataCacheFile
from torch import Tensor

SHARES = 8  # per thread
IN_ANY_ORDER = ("nsz", "reassoc", "ninf")  # fastmath of sums that become vector code
_f32 = np.float32


@lru_cache(maxsize=1)
def _hash_of_sources() -> str:
    sources = sorted(Path(__file__).resolve().parents[1].rglob("*.py"))  # of the package
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


class _Cache(FunctionCache):
    """Numba's cache on disk, valid for the package's sources as a whole; damaged files are compiled again.

    Numba alone would miss a change in another file than the function's.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        held = [str(cell.cell_contents) for cell in function.__closure__ or ()]
        # a file for each closure: processes that write to one file at once may take each other's code
        name = "-".join([self._impl.filename_base, *held, _hash_of_sources()])
        self._cache_file = IndexDataCacheFile(self._cache_path, name, _hash_of_sources())

    @contextlib.contextmanager
    def _guard_against_spurious_io_errors(self) -> Iterator[None]:  # around reading and writing
        try:
            yield
        except Exception as error:  # damage, as after a power cut, or a full disk: every process compiles for itself
            warnings.warn(f"compiled kernels cannot be kept in {self.cache_path}: {error}", stacklevel=1)
            with contextlib.suppress(OSError):
                self.flush()


def jit(function: Callable[..., Any], fastmath: Collection[str] = ("nsz",), **options: Any) -> Callable[..., Any]:
    """Compile a function at its first call and cache the code on disk, where Numba finds a place (NUMBA_CACHE_DIR).

    It runs without Python's lock. A closure may hold numbers and strings only: Numba's key in the cache has a hash of
    what it holds, which for compiled functions is new in each process. Without "contract" in `fastmath` there are no
    fused multiply-adds, so that values are those of eager PyTorch. options: of numba.njit.
    """
    options = {"nogil": True, "error_model": "numpy", "fastmath": set(fastmath), **options}
    compiled: Any = numba.njit(**options)(function)
    with contextlib.suppress(RuntimeError):  # Numba finds no place
        compiled._cache = _Cache(function)  # as enable_caching() does, but with our class
    result: Callable[..., Any] = compiled
    return result


@partial(jit, fastmath=("nsz", "contract"))
def exp(v):
    """exp(v) in float32 to 2 units in the last place (Cephes expf), in operations that become vector code."""
    v = _f32(-87) if v < _f32(-87) else v  # comparisons that let NaN pass
    v = _f32(88) if v > _f32(88) else v
    whole = _f32(math.floor(v * _f32(1.44269504) + _f32(0.5)))
    f = v - whole * _f32(0.693359375) + whole * _f32(2.12194440e-4)
    p = _f32(1.9875691500e-4) * f + _f32(1.3981999507e-3)
    p = (p * f + _f32(8.3334519073e-3)) * f + _f32(4.1665795894e-2)
    p = (p * f + _f32(1.6666665459e-1)) * f + _f32(5.0000001201e-1)
    p = p * (f * f) + f + _f32(1)
    return p * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)


_pool = lru_cache(maxsize=1)(lambda: ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="topk_losses"))
if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork


def as_arrays(value: Any) -> Any:
    """A tensor as an array, a (named) tuple with its tensors as arrays, and everything else as it is."""
    if isinstance(value, Tensor):
        return value.detach().contiguous().numpy()
    if not isinstance(value, tuple):
        return value
    parts = [as_arrays(part) for part in value]
    if hasattr(value, "_fields"):
        return type(value)(*parts)
    return tuple(parts)


def in_threads(loop: Callable[..., Any], number: int, work: int, *arguments: Any) -> None:
    """Run loop(first, last, *arguments) over the numbers below `number`, in several threads for enough work.

    loop is a compiled function, which takes tensors as arrays, those in tuples, too; what it writes to must be
    contiguous. work: number of threads that are worth it, beyond the first.

    A thread takes the next share when it has finished one: PyTorch's threads wait busily for some milliseconds after an
    operation, so that a core may be half taken. The threads are Python's, since kernels run without its lock; Numba's
    serve one caller at a time, and OpenMP's do not survive a fork.
    """
    arrays = [as_arrays(value) for value in arguments]
    threads = max(1, min(torch.get_num_threads(), number, 1 + work))
    size = -(-number // (SHARES * threads)) if threads > 1 else max(1, number)
    starts = iter(range(0, number, size))  # next() holds Python's lock

    def take_shares() -> None:
        for first in starts:
            loop(first, min(first + size, number), *arrays)

    others = [_pool().submit(take_shares) for _ in range(threads - 1)]
    take_shares()
    for other in others:
        if not other.cancel():  # a thread that has not begun has nothing left to do
            other.result()
