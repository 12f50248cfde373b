"""The official losses (package difftopk 0.2.0), under the names and flags of this repository.

    loss = make_official_loss("neuralsort", [.2] * 5, num_classes=100, inverse_temperature=.0625)

Used for `--implementation difftopk`, in tests and in benchmarks. The package runs `bitonic` and
`splitter_selection` through torch-sparse, which needs a compiler; without it this module runs the same
networks in the package's dense executor. `executor_of(method)` says which. The package has the methods of IN_DIFFTOPK.
"""

import contextlib
import io
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from experiments.common.settings import OWN_SETTINGS
from topk_losses import make_loss, resolve_method, resolve_settings
from topk_losses.checks import AUTO

# The package prints about torch-sparse when it is imported.
with contextlib.redirect_stdout(io.StringIO()):
    import difftopk

SPARSE = difftopk.functional.SPARSE_INSTALLED
NETWORKS = ("odd_even", "bitonic", "splitter_selection")
IN_DIFFTOPK = ("softmax_cross_entropy", "smooth_topk", "smooth_hard_topk", "neuralsort", "softsort", *NETWORKS)


class DenseTopKNet(nn.Module):
    """difftopk's sparse network in difftopk's dense executor: (batch, size) -> (None, (batch, size, k))."""

    def __init__(self, net: difftopk.DiffTopkNet) -> None:
        super().__init__()
        self.k = net.k
        self.steepness = net.steepness
        self.art_lambda = net.art_lambda
        self.distribution = net.distribution
        self.network = []
        for layer in net.sorting_network:
            # The first four matrices of a layer are stored transposed; the others serve the sparse executor only.
            self.network.append([matrix.to_dense().T.contiguous() for matrix in layer[:4]])

    def forward(self, vectors: Tensor) -> tuple[None, Tensor]:
        return difftopk.functional.execute_topk(
            self.network, vectors, self.k, self.steepness, self.art_lambda, self.distribution
        )


def executor_of(method: str) -> str:
    """Return "sparse" or "dense" for a network, and "" for a method without comparators."""
    if method not in NETWORKS:
        return ""
    if SPARSE and method != "odd_even":
        return "sparse"
    return "dense"


def build_official_loss(arguments: dict[str, Any], num_classes: int | None, device: torch.device) -> nn.Module:
    """Build the loss of make_loss's arguments. Raises ValueError for a setting that the package lacks."""
    for name in (*OWN_SETTINGS, "T"):
        if name in arguments:
            raise ValueError(f"difftopk has no {name}: leave it out, or take --implementation ours")
    return make_official_loss(**arguments, num_classes=num_classes, device=device)


def make_official_loss(
    method: str,
    p_k: Sequence[float],
    num_classes: int = 1000,
    m: int | None = None,
    device: str | torch.device = "cpu",
    **settings: Any,
) -> nn.Module:
    """Return the official loss as a module: logits (batch, num_classes) float32, labels (batch,) int64 -> ().

    settings: inverse_temperature, distribution, art_lambda, top1_mode. Raises ValueError for arguments that
    make_loss refuses, or that the package lacks. The module cannot be moved to another device.
    """
    make_loss(method, p_k, num_classes, m, **settings)
    settings = resolve_settings(method, **settings)
    method = resolve_method(method)
    if settings["inverse_temperature"] == AUTO:
        raise ValueError("difftopk knows no inverse temperature auto; give a number, or take --implementation ours")
    if method not in IN_DIFFTOPK:
        raise ValueError(f"difftopk has no {method}; take another method, or --implementation ours")
    if method == "softmax_cross_entropy":
        return nn.CrossEntropyLoss()  # as the official script does
    if method in ("smooth_topk", "smooth_hard_topk"):
        loss_class = difftopk.SmoothHardTopKLoss
        if method == "smooth_topk":
            loss_class = difftopk.SmoothTopKLoss
        k = 1 + max(range(len(p_k)), key=lambda rank: p_k[rank])  # the k with P(K = k) = 1
        return loss_class(num_classes, k, tau=settings["inverse_temperature"], device=device)
    if m is not None and m >= num_classes:
        raise ValueError(f"difftopk needs m < num_classes={num_classes}, got m={m}; leave m out to keep all scores")
    official_name = method
    if method == "bitonic" and not SPARSE:
        official_name = "bitonic__non_sparse"
    # Building the splitter network prints its size and raises warnings of PyTorch.
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = difftopk.TopKCrossEntropyLoss(
            official_name,
            p_k=list(map(float, p_k)),
            n=num_classes,
            m=m,
            device=device,
            **settings,
        )
    if method == "splitter_selection" and not SPARSE:
        loss.top_k_net = DenseTopKNet(loss.top_k_net)
    return loss
