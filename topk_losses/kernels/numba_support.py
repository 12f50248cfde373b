"""How the kernels for the CPU are compiled by Numba, kept, and run in several threads."""

import contextlib
import hashlib
import math
import os
import warnings
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from numba.core.caching import FunctionCache, IndexDataCacheFile
from torch import Tensor

from topk_losses.operator import MASKED
from topk_losses.sigmoids import bind

PACKAGE = Path(__file__).resolve().parents[1]
SHARES = 8  # per thread
GAP = 256  # numbers between two arrays: more than a step of vector code
IN_ANY_ORDER = ("nsz", "reassoc", "ninf")  # fastmath of sums that become vector code
_f32 = np.float32
_MASKED = _f32(MASKED)


@lru_cache(maxsize=1)
def _state() -> str:
    """Of the package: Numba renews what it keeps when a function's file changes, not when a formula of another does."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(PACKAGE.rglob("*.py")))).hexdigest()[:16]


class _Cache(FunctionCache):
    """Numba's, by state of the package and kind; code that is damaged, as by a power cut, is compiled again."""

    def __init__(self, function: Callable[..., Any], kind: str) -> None:
        super().__init__(function)
        name = f"{self._impl.filename_base}-{kind}-{_state()}"
        self._cache_file = IndexDataCacheFile(self._cache_path, name, _state())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The code, or None."""
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # whatever unpickling comes upon
            with contextlib.suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Save it; without, on a full disk say, each process compiles it."""
        try:
            super().save_overload(sig, data)
        except Exception as error:
            warnings.warn(f"compiled kernels cannot be kept in {self.cache_path}: {error}", stacklevel=1)


def jit(function: Callable[..., Any], kind: str = "", fastmath: Collection[str] = ("nsz",)) -> Callable[..., Any]:
    """Compile at the first call, and keep the code where Numba finds a place for it (NUMBA_CACHE_DIR).

    kind: tells apart functions of the same lines that are bound to other names. fastmath: without "contract" there are
    no fused multiply-adds, so that values are those of PyTorch's operations.
    """
    compiled: Any = numba.njit(nogil=True, error_model="numpy", fastmath=set(fastmath))(function)
    with contextlib.suppress(RuntimeError):  # there is no place
        compiled._cache = _Cache(function, kind)  # what enable_caching() does, but for the class
    return compiled


def in_float32(formula: Callable[..., Any], names: dict[str, Any]) -> Callable[..., Any]:
    """A formula of sigmoids.py compiled for float32 numbers, its elementary functions taken from `names`."""
    bound = bind(formula, names)
    # Numba would compute in float64 with any other number.
    constants = (_f32(each) if isinstance(each, float) else each for each in bound.__code__.co_consts)
    bound.__code__ = bound.__code__.replace(co_consts=tuple(constants))
    return numba.njit(error_model="numpy", fastmath={"nsz"})(bound)


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
def exps(x, scale, origin, highest, w):
    """w = exp(scale (x - origin)), the exponent at most `highest`, and 0 for what is too low to be seen."""
    for i in range(len(x)):
        v = scale * ((_MASKED if x[i] < _MASKED else x[i]) - origin)
        w[i] = _f32(0) if v < _f32(-87) else exp(highest if v > highest else v)


@jit
def exps_without(columns, x, scale, origin, w):
    """The same, but 0 at some columns; none of the others lies above the origin."""
    exps(x, scale, max(origin, _MASKED), _f32(0), w)
    for column in columns:
        w[column] = _f32(0)


@partial(jit, fastmath=IN_ANY_ORDER)
def sum_of(values):
    """The sum of finite values (n,) float32."""
    total = _f32(0)
    for i in range(len(values)):  # an iterator would not become vector code
        total += values[i]
    return total


@partial(jit, fastmath=IN_ANY_ORDER)
def subtract(share, values, out):
    """out - share values, in place."""
    for i in range(len(values)):
        out[i] -= share * values[i]


@jit
def softmax_sum(x, highest, w):
    """The logarithm of the sum of exp(x - highest), NaN where all are -inf, as in PyTorch; highest: the largest x."""
    exps(x, _f32(1), max(highest, _MASKED), _f32(0), w)
    return math.log(sum_of(w)) + 0 * highest


@jit
def subtract_softmax(share, x, highest, log_sum, w, out):
    """out - share softmax(x), in place; log_sum: what softmax_sum gave."""
    exps(x, _f32(1), max(highest, _MASKED), _f32(0), w)
    subtract(_f32(share * math.exp(-log_sum)), w, out)


@jit
def room(n):
    """An array (n,) of 0 to work in, with nothing near it.

    Where arrays lie next to each other, which is chance, a loop that reads the one and writes the other would not run
    as vector code, and its sums would have other last digits.
    """
    return np.zeros(n + GAP, _f32)[:n]


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="topk_losses")


os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork


def in_threads(
    loop: Callable[..., Any], work: int, of_a_thread: int, tiles: int, inputs: Sequence[Any], results: Sequence[Tensor]
) -> None:
    """loop(*inputs, first, last, *results) on shares of the tiles, tensors as arrays, in this thread and, as the work
    pays for them, others; waits for all.

    Each takes the next share when it is through with one: PyTorch's own threads wait busily for some milliseconds after
    each operation, so that a core may be half taken.

    Python's threads, since the kernels run without its lock: Numba's own can be entered by one caller only, and those
    of OpenMP do not survive a fork.
    """
    given = [each.detach().contiguous().numpy() if isinstance(each, Tensor) else each for each in inputs]
    made = [each.numpy() for each in results]
    threads = max(1, min(torch.get_num_threads(), tiles, 1 + work // of_a_thread))
    size = max(1, -(-tiles // (SHARES * threads if threads > 1 else 1)))
    starts = iter(range(0, tiles, size))  # next() holds Python's lock

    def share() -> None:
        for first in starts:
            loop(*given, first, min(first + size, tiles), *made)

    others = [_pool().submit(share) for _ in range(threads - 1)]
    share()
    for other in others:
        if not other.cancel():  # cancelled: it has not begun, and nothing is left
            other.result()
