"""The m largest scores of each sample, and top-m: the true class with the m - 1 largest others."""

import torch
from torch import Tensor

from topk_losses.backend import LONGEST_ROW, MOST_TAKEN, use_numba, use_triton
from topk_losses.operator import to_compute_dtype

BLOCK = 8  # scores whose maximum is taken at a time


def largest_indices(scores: Tensor, m: int) -> Tensor:
    """The indices of the m largest of scores (batch, n), by falling score: (batch, m) int64.

    NaN counts as the largest. Among equal scores the choice and the order are arbitrary.
    """
    batch, n = scores.shape
    num_blocks = n // BLOCK
    if scores.device.type != "cpu" or num_blocks < 4 * m:
        return scores.topk(m, dim=1).indices
    # On the CPU torch.topk takes longer for a score than amax does: the m largest scores lie in the m blocks with the
    # largest maxima (and in the rest, which is no whole block), so that few scores need the former. A block is every
    # num_blocks-th score, so that amax runs along contiguous rows.
    blocks = scores[:, : num_blocks * BLOCK].unflatten(1, (BLOCK, num_blocks))  # (batch, BLOCK, blocks)
    chosen = blocks.amax(1).topk(m, dim=1, sorted=False).indices  # (batch, m)
    within = num_blocks * torch.arange(BLOCK, device=scores.device)
    candidates = (chosen.unsqueeze(2) + within).flatten(1)  # (batch, m * BLOCK)
    rest = torch.arange(num_blocks * BLOCK, n, device=scores.device).expand(batch, -1)  # (batch, n % BLOCK)
    candidates = torch.cat([candidates, rest], dim=1)
    return candidates.gather(1, scores.gather(1, candidates).topk(m, dim=1).indices)


def select_top_m(logits: Tensor, labels: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """Keep the true class and the m - 1 largest other scores (Petersen et al. 2022, section 3.4).

    logits (batch, n); labels (batch,) int64, or (batch, n) a distribution, whose most probable class counts as the
    true one. Returns scores (batch, m), true class first and the others falling, float32 for half-precision logits,
    and the labels that go with them: zeros (batch,), or the distribution's mass on the kept classes (batch, m). Among
    equal scores the choice is arbitrary.
    """
    true = labels.argmax(1) if labels.is_floating_point() else labels  # (batch,)
    if use_triton(logits) and logits.shape[1] <= LONGEST_ROW and m <= MOST_TAKEN:
        from topk_losses.triton_sorts import top_m

        kept, index = top_m(logits, true, m)  # (batch, m) each
        return kept, labels.gather(1, index) if labels.is_floating_point() else torch.zeros_like(labels)
    scores = to_compute_dtype(logits)
    if use_numba(scores):
        from topk_losses import numba_top_m

        kept, index = numba_top_m.select_top_m(scores, true, m)  # (batch, m) each
        return kept, labels.gather(1, index) if labels.is_floating_point() else torch.zeros_like(labels)
    with torch.no_grad():
        index = largest_indices(scores, m)  # (batch, m)
        found = index == true.unsqueeze(1)  # (batch, m)
        # the place that the true class leaves on moving to the front; the lowest place if it is not there
        place = torch.where(found.any(1), found.int().argmax(1), m - 1).unsqueeze(1)  # (batch, 1)
        moved = torch.cat([true.unsqueeze(1), index[:, :-1]], dim=1)  # (batch, m)
        index = torch.where(torch.arange(m, device=scores.device) <= place, moved, index)
    if labels.is_floating_point():
        return scores.gather(1, index), labels.gather(1, index)
    return scores.gather(1, index), torch.zeros_like(labels)
