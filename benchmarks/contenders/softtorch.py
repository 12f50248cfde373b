"""Soft top-k indices (https://github.com/a-paulus/softtorch), beside our relaxed sorts and transports.

SoftTorch has no top-k loss. This one is the least that can be built on it: minus the logarithm of the soft indicator of
the true class.
"""

from collections.abc import Callable, Sequence

import softtorch
import torch
from torch import Tensor


def make(method: str, p_k: Sequence[float], n: int, m: int | None, device: torch.device) -> Callable[..., Tensor]:
    """Return the loss for the largest rank of P_K, over all n scores."""
    if method not in ("neuralsort", "softsort", "soft_topk") or m is not None:
        raise ValueError("")

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        _, indices = softtorch.topk(logits, len(p_k), dim=1)  # (batch, k, n), each row a distribution over classes
        return -indices.sum(1).gather(1, labels.unsqueeze(1)).clamp(1e-6, 1).log().mean()

    return loss
