"""Soft top-k indices (https://github.com/a-paulus/softtorch), beside our relaxed sorts and transports.

SoftTorch has no top-k loss. This one is the least that can be built on it: minus the logarithm of the soft indicator of
the true class. Its SoftSort equals ours; its NeuralSort and its transport agree with ours only at high temperatures.
"""

from collections.abc import Callable, Sequence

import softtorch
import torch
from torch import Tensor

from topk_losses import METHODS


def make(method: str, p_k: Sequence[float], n: int, m: int | None, device: torch.device) -> Callable[..., Tensor]:
    """Return the loss for the largest rank of P_K, over all n scores."""
    if method not in ("neuralsort", "softsort", "soft_topk") or m is not None:
        raise ValueError("")
    softness = 1 / METHODS[method].inverse_temperature
    operator = {"method": "ot"} if method == "soft_topk" else {"method": method, "standardize": False}

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        _, indices = softtorch.topk(logits, len(p_k), dim=1, softness=softness, **operator)  # (batch, k, n)
        return -indices.sum(1).gather(1, labels.unsqueeze(1)).clamp(1e-6, 1).log().mean()

    return loss
