"""Differentiable top-k classification losses for PyTorch.

>>> import torch
>>> logits = torch.linspace(-2, 2, 40).view(2, 20).requires_grad_()
>>> labels = torch.tensor([19, 14])
>>> loss_fn = TopKCrossEntropyLoss("splitter_selection", p_k={1: 0.5, 5: 0.5}, m=16, inverse_temperature=0.25)
>>> loss = loss_fn(logits, labels)
>>> loss.backward()
>>> loss.detach()
tensor(1.5085)
"""

from importlib.metadata import PackageNotFoundError, version

from topk_losses.classification import CallSettings, ClassificationLoss
from topk_losses.comparators import Network, bitonic, odd_even, splitter_selection
from topk_losses.cross_entropy import LDRKLLoss, SoftmaxCrossEntropyLoss
from topk_losses.factory import make_loss
from topk_losses.functional import soft_topk_values, topk_cross_entropy, topk_mask
from topk_losses.methods import (
    ALIASES,
    METHODS,
    RELAXATIONS,
    TOP1_MODES,
    make_operator,
    register_loss,
    register_operator,
    resolve_method,
    resolve_settings,
)
from topk_losses.networks import RelaxedNetwork
from topk_losses.operator import TopKOperator
from topk_losses.ranks import DFTopK, PerturbedTopK, RecallSurrogate
from topk_losses.robust import (
    ForwardCorrectionLoss,
    GeneralizedCrossEntropyLoss,
    NCEAndRCELoss,
    PHuberCrossEntropyLoss,
    SymmetricCrossEntropyLoss,
)
from topk_losses.sigmoids import DISTRIBUTIONS
from topk_losses.single_k import NoisedTopKLoss, TruncatedEntropyLoss
from topk_losses.smooth_svm import SmoothHardTopKLoss, SmoothTopKLoss
from topk_losses.sorts import NeuralSort, SoftSort
from topk_losses.subset import SubsetTopK
from topk_losses.temperature import AutoTemperature
from topk_losses.threshold import LML, CappedSoftmax, LapSum, SparseTopK, ThresholdOperator
from topk_losses.topk_cross_entropy import TopKCrossEntropyLoss
from topk_losses.transport import SinkhornSort, SoftTopK, SortedSoftTopK

try:
    __version__ = version("topk-losses")
except PackageNotFoundError:  # a copy of the folder
    __version__ = "unknown"

# fmt: off
__all__ = [
    "ALIASES", "DISTRIBUTIONS", "LML", "METHODS", "RELAXATIONS", "TOP1_MODES", "AutoTemperature", "CallSettings",
    "CappedSoftmax", "ClassificationLoss", "DFTopK", "ForwardCorrectionLoss", "GeneralizedCrossEntropyLoss",
    "LDRKLLoss", "LapSum", "NCEAndRCELoss", "Network", "NeuralSort", "NoisedTopKLoss", "PHuberCrossEntropyLoss",
    "PerturbedTopK", "RecallSurrogate", "RelaxedNetwork", "SinkhornSort", "SmoothHardTopKLoss",
    "SmoothTopKLoss", "SoftSort", "SoftTopK", "SoftmaxCrossEntropyLoss", "SortedSoftTopK", "SparseTopK", "SubsetTopK",
    "SymmetricCrossEntropyLoss", "ThresholdOperator", "TopKCrossEntropyLoss", "TopKOperator", "TruncatedEntropyLoss",
    "bitonic", "make_loss", "make_operator", "odd_even", "register_loss", "register_operator", "resolve_method",
    "resolve_settings", "soft_topk_values", "splitter_selection", "topk_cross_entropy", "topk_mask",
]
# fmt: on
