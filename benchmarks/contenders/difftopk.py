"""The official losses (https://github.com/Felix-Petersen/difftopk), the same functions as ours."""

from collections.abc import Sequence

import torch
from torch import nn

from experiments.common.official_loss import IN_DIFFTOPK, make_official_loss
from topk_losses import RELAXATIONS


def make(method: str, p_k: Sequence[float], n: int, m: int | None, device: torch.device) -> nn.Module:
    """Return the official loss; networks run through torch-sparse where that is installed, see `executor_of`."""
    if method == "softmax_cross_entropy" or method not in IN_DIFFTOPK:
        raise ValueError("not in difftopk" if method in RELAXATIONS else "")
    mode = {"top1_mode": "sm"} if method in RELAXATIONS else {}
    return make_official_loss(method, p_k, n, m, device=device, **mode)
