"""The m largest scores of each sample on the CPU, compiled by Numba: one look at each score, at few of them two.

The m largest maxima of chunks belong to m scores, so that no score below the least of them is among the m largest, nor
is any in a chunk with a lower maximum. torch.topk partitions every row. float32 only.

Nearly all of it is written without branches: which scores are large cannot be predicted, and a wrong guess costs the
processor as much as a dozen scores.
"""

import numpy as np
import torch
from torch import Tensor

from topk_losses.kernels import register
from topk_losses.kernels.numba_support import in_threads, jit

CHUNK = 16
WORK_OF_A_THREAD = 500_000  # scores that pay for another thread
MOST_COUNTED = 64  # scores whose places are found by comparing each with all
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
    place = min(held, len(falling) - 1)
    while place > 0 and falling[place - 1] < value:
        falling[place] = falling[place - 1]
        place -= 1
    falling[place] = value


@jit
def _large_ones(x, maxima, least, chosen, columns):
    """Fill `columns` with those of x (n,) that can be among the len(least) largest; return how many they are.

    Chunk c is x[c], x[c + len(maxima)], ..., so that maxima are taken along contiguous scores. maxima (chunks,), least
    (m,), chosen (chunks + 1,), columns (n + 1,): room to work in, m < chunks.
    """
    chunks, m = len(maxima), len(least)
    maxima[:] = _f32(-np.inf)
    for i in range(CHUNK):
        scores = x[i * chunks : (i + 1) * chunks]
        for c in range(chunks):
            score = _f32(np.inf) if scores[c] != scores[c] else scores[c]
            maxima[c] = maxima[c] if maxima[c] > score else score
    for c in range(m):
        _insert(maxima[c], least, c)
    for c in range(m, chunks):
        if maxima[c] > least[m - 1]:
            _insert(maxima[c], least, m)
    bar = least[m - 1]
    num_chosen = held = 0
    for c in range(chunks):
        chosen[num_chosen] = c
        num_chosen += maxima[c] >= bar
    for c in chosen[:num_chosen]:
        for i in range(CHUNK):
            columns[held] = c + i * chunks
            held += not (x[c + i * chunks] < bar)  # NaN is below no bar
    for j in range(chunks * CHUNK, len(x)):
        columns[held] = j
        held += not (x[j] < bar)
    return held


@jit
def largest_of_rows(scores, first, last, index):
    """Rows first..last of scores (batch, n): the columns of the largest, falling, into index (batch, m)."""
    n, m = scores.shape[1], index.shape[1]
    maxima, chosen = np.empty(n // CHUNK, np.float32), np.empty(n // CHUNK + 1, np.int64)
    least, largest = np.empty(m, np.float32), np.empty(m, np.int64)
    columns, keys = np.arange(n + 1), np.empty(n, np.int64)
    for row in range(first, last):
        x = scores[row]
        held = _large_ones(x, maxima, least, chosen, columns) if len(maxima) > m else n
        for i in range(held):
            keys[i] = _key(x[columns[i]], columns[i])
        if held <= MOST_COUNTED:
            for i in range(held):
                place = 0
                for j in range(held):
                    place += keys[j] > keys[i]
                if place < m:
                    largest[place] = keys[i]
        else:
            for i in range(held):
                if i < m or keys[i] > largest[m - 1]:
                    _insert(keys[i], largest, i)
        for r in range(m):
            index[row, r] = _LOW - (largest[r] & _LOW)


def _outputs(scores, m):
    return [torch.empty(len(scores), m, dtype=torch.int64, device=scores.device)]


def _largest(scores: Tensor, m: int) -> list[Tensor]:
    """The columns of the m largest of each row, falling: (rows, m) int64.

    scores (rows, n) float32 on the CPU, n < 2^31. NaN counts as the largest. Among equal scores the one further left
    comes first.
    """
    (index,) = _outputs(scores, m)
    array, columns = scores.contiguous().numpy(), index.numpy()
    in_threads(scores.numel(), WORK_OF_A_THREAD, len(scores), lambda i, j: largest_of_rows(array, i, j, columns))
    return [index]


register("largest_cpu", _largest, _outputs)
