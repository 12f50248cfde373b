"""The m scores that are sorted instead of all n (Petersen et al. 2022, section 3.4)."""

import torch
from torch import Tensor

from topk_losses.checks import check_number_of_answers
from topk_losses.numerics import is_above, largest


def select_candidates(logits: Tensor, labels: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """Select the classes whose scores are sorted: each label, and the m - 1 largest others.

    Args:
        logits: (rows, n).
        labels: several labels of each row, (rows, c).
        top: the classes of the m largest logits, falling, (rows, m).

    Returns:
        The classes (rows, c, m), the label first, and the place of the label among them (rows, c). A row with at most m
        unmasked classes has them in their order, as without m. The place of a masked label means nothing there.
    """
    label = labels.unsqueeze(2)  # (rows, c, 1)
    top = top.unsqueeze(1)  # (rows, 1, m)
    # the classes in front of the label move back by one place; if it is not among them, the last one drops out
    is_at_or_behind_label = (top[:, :, :-1] == label).cumsum(2) > 0  # (rows, c, m - 1)
    others = torch.where(is_at_or_behind_label, top[:, :, 1:], top[:, :, :-1])
    index = torch.cat([label, others], dim=2)  # (rows, c, m)
    place = torch.zeros_like(labels)
    if may_have_masked(logits):
        in_order = top.sort(dim=2).values  # (rows, 1, m), all unmasked classes, whatever the label
        index = torch.where(has_few_unmasked(logits, top.shape[2]).view(-1, 1, 1), in_order, index)
        place = (index == label).int().argmax(2)
    return index, place


def select_candidates_of_sets(logits: Tensor, sets: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """Select the logits of all right answers and of the largest others, and the set among them: (rows, m) each."""
    sets = check_number_of_answers(sets, m)
    answers_first = logits.detach().masked_fill(sets > 0, torch.inf)
    index = largest(answers_first, m)  # (rows, m)
    if may_have_masked(logits):
        index = torch.where(has_few_unmasked(logits, m).unsqueeze(1), index.sort(dim=1).values, index)
    return logits.gather(1, index), sets.gather(1, index)


def may_have_masked(logits: Tensor) -> bool:
    """Tell whether logits hold a class at -inf, or cannot be read."""
    return not is_above(logits, -torch.inf)


def has_few_unmasked(logits: Tensor, m: int) -> Tensor:
    """Tell which rows of logits (rows, n) have at most m unmasked classes: (rows,)."""
    num_unmasked = (logits > -torch.inf).sum(1)  # (rows,)
    return num_unmasked <= m
