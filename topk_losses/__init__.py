"""Differentiable top-k classification losses for PyTorch.

loss = TopKCrossEntropyLoss("splitter_selection", p_k={1: .5, 5: .5}, m=16)
loss(logits, labels).backward()
"""

from topk_losses.classification import SoftmaxCrossEntropyLoss
from topk_losses.functional import topk_cross_entropy
from topk_losses.loss import TopKCrossEntropyLoss, make_loss
from topk_losses.methods import (
    ALIASES,
    METHODS,
    RELAXATIONS,
    TOP1_MODES,
    make_operator,
    resolve_method,
    resolve_settings,
)
from topk_losses.networks import RelaxedNetwork, bitonic, odd_even, splitter_selection
from topk_losses.sigmoids import DISTRIBUTIONS
from topk_losses.smooth_svm import SmoothHardTopKLoss, SmoothTopKLoss
from topk_losses.sorts import NeuralSort, SoftSort, TopKOperator
from topk_losses.transport import SinkhornSort, SoftTopK

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
    "TopKOperator",
    "bitonic",
    "make_loss",
    "make_operator",
    "odd_even",
    "resolve_method",
    "resolve_settings",
    "splitter_selection",
    "topk_cross_entropy",
]
