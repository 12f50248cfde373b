"""The m largest scores of each sample on the CPU, compiled by Numba: one look at each score, at few of them two.

The m largest maxima of chunks belong to m scores, so that no score below the least of them is among the m largest, nor
is any in a chunk with a lower maximum. torch.topk partitions every row. float32 only.
"""

import numpy as np
import torch

from topk_losses.kernels import register
from topk_losses.kernels.numba_support import in_threads, jit

CHUNK = 16
WORK_OF_A_THREAD = 500_000  # scores that pay for another thread
_f32 = np.float32
_LOW = np.int64(0x7FFFFFFF)  # the lower half of a key


@jit
def _key(score, column):
    """A number that is larger for a larger score, NaN the largest of all and, among equal ones, for a lower column."""
    bits = np.int64(0 if score == _f32(0) else np.float32(score).view(np.int32))  # -0 is 0
    bits ^= _LOW if bits < 0 else np.int64(0)  # of two negative numbers, that with more bits is the smaller one
    bits = _LOW if score != score else bits
    return (bits << 32) | (_LOW - column)


@jit
def _insert(value, falling, held):
    """Put a value into `falling`, of which `held` places are taken; if all are, the last one falls off."""
    if held >= len(falling) and not value > falling[-1]:
        return
    place = min(held, len(falling) - 1)
    while place > 0 and falling[place - 1] < value:
        falling[place] = falling[place - 1]
        place -= 1
    falling[place] = value


@jit
def largest_of_rows(scores, first, last, index):
    """Rows first..last of scores (batch, n): the columns of the largest, falling, into index (batch, m).

    Chunk c is x[c], x[c + chunks], ..., so that maxima are taken along contiguous scores.
    """
    n, m = scores.shape[1], index.shape[1]
    chunks = n // CHUNK
    maxima, least, keys = np.empty(chunks, _f32), np.empty(m, _f32), np.empty(m, np.int64)
    for row in range(first, last):
        x, bar, held = scores[row], _f32(-np.inf), 0
        maxima[:] = bar
        if chunks > m:
            for i in range(CHUNK):
                part = x[i * chunks : (i + 1) * chunks]
                for c in range(chunks):
                    score = _f32(np.inf) if part[c] != part[c] else part[c]
                    maxima[c] = maxima[c] if maxima[c] > score else score
            for c in range(chunks):
                _insert(maxima[c], least, c)
            bar = least[-1]
        for c in range(chunks + 1):  # the last one: what is left
            if c < chunks and maxima[c] < bar:
                continue
            for j in range(c, chunks * CHUNK, chunks) if c < chunks else range(chunks * CHUNK, n, 1):
                if not x[j] < bar:  # NaN is below no bar
                    _insert(_key(x[j], j), keys, held)
                    held += 1
        for r in range(m):
            index[row, r] = _LOW - (keys[r] & _LOW)


def _outputs(scores, m):
    return [torch.empty(len(scores), m, dtype=torch.int64, device=scores.device)]


def _largest(made, scores, m):
    """The columns of the m largest of each row, falling: (rows, m) int64.

    scores (rows, n) float32 on the CPU, n < 2^31. NaN counts as the largest. Among equal scores the one further left
    comes first.
    """
    in_threads(largest_of_rows, scores.numel(), WORK_OF_A_THREAD, len(scores), [scores], made)


register("largest", "cpu", _outputs, _largest)
