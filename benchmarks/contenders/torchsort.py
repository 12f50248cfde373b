"""Soft ranks (https://github.com/teddykoker/torchsort), beside our losses of soft ranks and sorts.

torchsort has no top-k loss. This one is the least that can be built on its ranks: how far the true class's soft rank
lies above k.
"""

from collections.abc import Callable, Sequence

import torch
import torchsort
from torch import Tensor


def make(method: str, p_k: Sequence[float], n: int, m: int | None, device: torch.device) -> Callable[..., Tensor]:
    """Return the loss for the largest rank of P_K, over all n scores."""
    if method not in ("neuralsort", "softsort") or m is not None:
        raise ValueError("")

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        ranks = torchsort.soft_rank(-logits, regularization_strength=1.0)  # (batch, n), 1 of the largest
        return (ranks.gather(1, labels.unsqueeze(1)) - len(p_k)).relu().mean()

    return loss
