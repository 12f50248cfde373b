"""The m scores that are sorted instead of all n (Petersen et al. 2022, section 3.4)."""

import torch
from torch import Tensor

from topk_losses.checks import check_answers_fit
from topk_losses.compilers import has_known_values
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


def select_candidates_of_sets(logits: Tensor, sets: Tensor, m: int, k: int) -> tuple[Tensor, Tensor]:
    """Select the logits of all right answers and of the largest others, and the set among them: (rows, m) each.

    Answers come first, and each part falls, as where one answer is the label. A row with at most m unmasked classes has
    them in their order.

    Args:
        logits, sets: (rows, n) each.
        k: the lowest rank with a weight. With fewer than k others an answer would always be within k.

    Raises:
        ValueError: a row has more than m - k answers. Where its numbers cannot be read, its scores are NaN.
    """
    num_answers = (sets > 0).sum(1)  # (rows,)
    fits = num_answers + k <= m
    has_few = None
    if may_have_masked(logits):
        has_few = has_few_unmasked(logits, m)
        fits = fits | (has_few & (num_answers <= m))
    sets = check_answers_fit(sets, num_answers, fits, m, k)
    answers_first = logits.detach().masked_fill(sets > 0, torch.inf)
    in_order = largest(answers_first, m).sort(dim=1).values  # (rows, m)
    falling = logits.detach().gather(1, in_order).argsort(dim=1, descending=True, stable=True)
    index = in_order.gather(1, falling)
    is_other = (sets.gather(1, index) <= 0).int()
    index = index.gather(1, is_other.argsort(dim=1, stable=True))
    if has_few is not None:
        index = torch.where(has_few.unsqueeze(1), in_order, index)
    scores = logits.gather(1, index)
    if not has_known_values(fits):
        scores = scores.masked_fill(~fits.unsqueeze(1), torch.nan)
    return scores, sets.gather(1, index)


def may_have_masked(logits: Tensor) -> bool:
    """Tell whether logits hold a class at -inf, or cannot be read."""
    return not is_above(logits, -torch.inf)


def has_few_unmasked(logits: Tensor, m: int) -> Tensor:
    """Tell which rows of logits (rows, n) have at most m unmasked classes: (rows,)."""
    num_unmasked = (logits > -torch.inf).sum(1)  # (rows,)
    return num_unmasked <= m
