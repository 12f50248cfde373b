"""Differentiable top-k classification losses for PyTorch.

loss = TopKCrossEntropyLoss("splitter_selection", p_k=[.5, 0, 0, 0, .5], num_classes=1000, m=16)
loss(logits, labels).backward()
"""

from topk_losses.distributions import DISTRIBUTIONS
from topk_losses.make_loss import SoftmaxCrossEntropyLoss, make_loss
from topk_losses.networks import bitonic, odd_even, splitter_selection
from topk_losses.neuralsort import NeuralSort
from topk_losses.registry import (
    ALIASES,
    METHODS,
    RELAXATIONS,
    TOP1_MODES,
    make_operator,
    resolve_method,
    resolve_settings,
)
from topk_losses.sinkhorn import SinkhornSort, SoftTopK
from topk_losses.smooth_topk import SmoothHardTopKLoss, SmoothTopKLoss
from topk_losses.softsort import SoftSort
from topk_losses.sorting_networks import RelaxedNetwork
from topk_losses.topk_cross_entropy import TopKCrossEntropyLoss

__all__ = [
    "ALIASES",
    "DISTRIBUTIONS",
    "METHODS",
    "RELAXATIONS",
    "TOP1_MODES",
    "NeuralSort",
    "RelaxedNetwork",
    "SinkhornSort",
    "SmoothHardTopKLoss",
    "SmoothTopKLoss",
    "SoftSort",
    "SoftTopK",
    "SoftmaxCrossEntropyLoss",
    "TopKCrossEntropyLoss",
    "bitonic",
    "make_loss",
    "make_operator",
    "odd_even",
    "resolve_method",
    "resolve_settings",
    "splitter_selection",
]
