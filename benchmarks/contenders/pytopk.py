"""The noised top-k losses of their authors (https://github.com/garcinc/noised-topk), beside ours of the same name."""

from collections.abc import Sequence

import pytopk
import torch
from torch import nn


def make(method: str, p_k: Sequence[float], n: int, m: int | None, device: torch.device) -> nn.Module:
    """Return the loss for the one k of P_K, with five draws, their default."""
    k = len(p_k)
    if method == "noised_topk":
        return pytopk.BalNoisedTopK(k, 1.0, 5)
    if method == "imbalanced_noised_topk":
        return pytopk.ImbalNoisedTopK(k, 0.01, 0.3, [100] * n, scale=50, n_sample=5).to(device)
    raise ValueError("")
