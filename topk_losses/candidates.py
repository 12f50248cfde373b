"""The m scores that are sorted instead of all n (Petersen et al. 2022, section 3.4)."""

import torch
from torch import Tensor

from topk_losses.checks import check_number_of_answers
from topk_losses.numerics import has_masked, largest


def select_candidates(logits: Tensor, labels: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """Select the classes whose scores are sorted: each label, and the m - 1 largest others.

    Args:
        logits: (rows, n).
        labels: several labels of each row, (rows, c).
        top: the classes of the m largest logits, falling, (rows, m).

    Returns:
        The classes (rows, c, m), the label first, and the place of the label among them (rows, c). A row with at most m
        unmasked classes has them in their order, as without m.
    """
    label = labels.unsqueeze(2)  # (rows, c, 1)
    top = top.unsqueeze(1)  # (rows, 1, m)
    # the classes in front of the label move back by one place; if it is not among them, the last one drops out
    is_at_or_behind_label = (top[:, :, :-1] == label).cumsum(2) > 0  # (rows, c, m - 1)
    others = torch.where(is_at_or_behind_label, top[:, :, 1:], top[:, :, :-1])
    index = torch.cat([label, others], dim=2)  # (rows, c, m)
    place = torch.zeros_like(labels)
    if has_masked(logits):
        index = restore_order_of_few(index, logits)
        place = (index == label).int().argmax(2)
    return index, place


def select_candidates_of_sets(logits: Tensor, sets: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """Select the logits of all right answers and of the largest others, and the set among them: (rows, m) each."""
    sets = check_number_of_answers(sets, m)
    answers_first = logits.detach().masked_fill(sets > 0, torch.inf)
    index = largest(answers_first, m)  # (rows, m)
    if has_masked(logits):
        index = restore_order_of_few(index.unsqueeze(1), logits).squeeze(1)
    return logits.gather(1, index), sets.gather(1, index)


def restore_order_of_few(index: Tensor, logits: Tensor) -> Tensor:
    """Put the classes (rows, c, m) in their order, in rows with at most m unmasked classes."""
    num_unmasked = (logits > -torch.inf).sum(1)  # (rows,)
    has_few = num_unmasked <= index.shape[2]
    return torch.where(has_few.view(-1, 1, 1), index.sort(dim=2).values, index)
