"""Whitening: the scores of a sample in units of their standard deviation, squashed into [0, 1]."""

import torch
from torch import Tensor

from topk_losses.compilers import has_known_values
from topk_losses.numerics import finite

# Whitening divides by the standard deviation, but by this at least, about: its slope is bounded where scores are equal,
# and one step from a last layer of zeros does not fill Adam's memory with a gradient that never comes again.
LEAST_STD = 0.1
FAR = 3.0  # normal scores, 100 of them, reach about twice as deep as their mean; one class of four at -1e4 is far
DEEPEST = 1e30  # of a class at -inf
ROUNDS = 5  # until the weights of classes that lie far below have come to rest: two or three do
# Logits do not reach so deep. A class that does holds a mask value, such as -1e9 or the lowest number of a format, if
# the highest one is not alone above it, and it lies GAP_OF_MASK times as deep as the others reach.
DEPTH_OF_MASK = 1e6
GAP_OF_MASK = 1e3


def holds_score(depth: Tensor) -> Tensor:
    """Tell the classes that hold a score from those that hold a large negative mask value, by their depth (rows, n)."""
    is_close = depth < DEPTH_OF_MASK
    reach = torch.where(is_close, depth, 0).amax(1, keepdim=True).clamp(min=1)  # (rows, 1)
    has_others = is_close.sum(1, keepdim=True) > 1
    is_mask = ~is_close & (depth > GAP_OF_MASK * reach) & has_others
    return ~is_mask


def whiten_and_squash(scores: Tensor) -> Tensor:
    """Compute sigmoid((s - mean) / std) per sample: (rows, n) in [0, 1], as in Cuturi et al. 2019 and OTT.

    A class that lies FAR times as deep below the highest score as the mean does, and LEAST_STD, counts less and less
    for mean and standard deviation, and its own depth grows as a logarithm only: a class at -1e4 neither blunts the
    others nor loses its gradient, and one at -inf, which does not count at all, is the limit. std is sqrt(variance +
    LEAST_STD^2).
    """
    depth = (finite(scores).amax(1, keepdim=True) - scores).clamp(max=DEEPEST)  # (rows, n), >= 0
    counts = (scores > -torch.inf) & holds_score(depth.detach())  # (rows, n)
    weights = counts.to(scores.dtype)
    counted = torch.where(counts, depth, 0)  # products of larger ones overflow in second derivatives
    for step in range(ROUNDS):
        mean = weighted_mean(counted, weights)  # (rows, 1)
        unit = (FAR * mean).clamp(min=LEAST_STD)  # of depth, from which on a class counts less
        relative = (depth / unit).clamp(min=1)  # (rows, n)
        if step == ROUNDS - 1 or (has_known_values(scores) and bool((relative <= 1).all())):
            break
        weights = torch.where(counts, relative**-4.0, 0)
    size = mean.detach().clamp(min=LEAST_STD)  # (rows, 1), before the square, which might be too large a number
    squares = torch.where(weights > 0, ((counted - mean) / size).square(), 0)
    variance = weighted_mean(squares, weights) + (LEAST_STD / size).square()
    squashed = torch.minimum(depth, unit) * (1 + 0.25 * relative.log())  # = depth up to FAR * mean
    return torch.sigmoid((mean - squashed) / size * torch.rsqrt(variance))


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Average values (rows, n) by weights, whose sum counts as 1 at least: (rows, 1)."""
    return (weights * values).sum(1, keepdim=True) / weights.sum(1, keepdim=True).clamp(min=1)


def whitened(scores: Tensor) -> Tensor:
    """Whiten and squash the scores (rows, n) into [0, 1]; -1 marks a class that is masked out."""
    return torch.where(scores == -torch.inf, -1.0, whiten_and_squash(scores))
