"""The m largest scores of each sample on the CPU, compiled by Numba: one look at each score, at few of them two.

The m largest lie in the m chunks with the largest maxima, and are no smaller than the least of these. Maxima of chunks
are vector code; only the chosen chunks are looked into, where torch.topk partitions every row. float32 only.
"""

import numpy as np
import torch
from torch import Tensor

from topk_losses.numba_kernels import in_threads, jit

CHUNK = 16
WORK_OF_A_THREAD = 500_000  # scores that pay for another thread


@jit
def _insert(score, column, best, columns, held):
    """Put a score into best, falling, of which `held` places are taken; the last one falls off. Return those taken."""
    place = held if held < len(best) else len(best) - 1
    while place > 0 and (best[place - 1] < score or score != score) and best[place - 1] == best[place - 1]:
        best[place] = best[place - 1]
        columns[place] = columns[place - 1]
        place -= 1
    best[place] = score
    columns[place] = column
    return min(held + 1, len(best))


@jit
def largest_of_rows(scores, first, last, index):
    """Rows first..last of scores (batch, n): the columns of the largest, falling, into index (batch, m)."""
    n, m = scores.shape[1], index.shape[1]
    whole = n // CHUNK  # chunks; what is left over is looked into in any case
    maxima = np.empty(whole, np.float32)
    best, least = np.empty(m, np.float32), np.empty(m, np.float32)
    places = np.empty(m, np.int64)
    for row in range(first, last):
        x, columns = scores[row], index[row]
        bar = np.float32(-np.inf)
        held = 0
        for c in range(whole):
            chunk = x[c * CHUNK : (c + 1) * CHUNK]
            largest = chunk[0]
            num_nan = 0
            for i in range(CHUNK):
                largest = chunk[i] if chunk[i] > largest else largest
                num_nan += chunk[i] != chunk[i]
            maxima[c] = np.float32(np.inf) if num_nan > 0 else largest
        if whole > m:
            for c in range(whole):
                if held < m or maxima[c] > least[m - 1]:
                    held = _insert(maxima[c], c, least, places, held)
            bar = least[m - 1]
        held = 0
        for c in range(whole + 1):
            if c < whole and maxima[c] < bar:
                continue
            for j in range(c * CHUNK, min((c + 1) * CHUNK, n)):
                score = x[j]
                # NaN is the largest: it is below no bar, and nothing takes its place.
                if score < bar or (held == m and (score <= best[m - 1] or best[m - 1] != best[m - 1])):
                    continue
                held = _insert(score, j, best, columns, held)


def largest_columns(scores: Tensor, m: int) -> Tensor:
    """The columns of the m largest of scores (batch, n) float32 on the CPU, by falling score: (batch, m) int64.

    NaN counts as the largest. Among equal scores the one further left comes first.
    """
    index = torch.empty(len(scores), m, dtype=torch.int64)
    rows = scores.detach().contiguous().numpy()
    threads = max(1, min(torch.get_num_threads(), len(scores), 1 + scores.numel() // WORK_OF_A_THREAD))
    in_threads(threads, len(scores), lambda first, last: largest_of_rows(rows, first, last, index.numpy()))
    return index
