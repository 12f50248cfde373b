"""The losses as functions, for a call here and there; a training loop keeps a module, which is built once."""

from typing import Any, SupportsIndex

from torch import Tensor

from topk_losses.checks import PK
from topk_losses.loss import TopKCrossEntropyLoss


def topk_cross_entropy(
    logits: Tensor, labels: Tensor, p_k: PK = (0.2, 0.2, 0.2, 0.2, 0.2), method: str = "splitter_selection",
    m: SupportsIndex | None = None, **settings: Any,
) -> Tensor:  # fmt: skip
    """The top-k cross-entropy of logits (batch, n), (n,) or (batch, n, d1, ...) and labels, as TopKCrossEntropyLoss.

    settings: the other arguments of that class (inverse_temperature, top1_mode, weight, label_smoothing, soft_labels,
    ignore_index, reduction, ...). Returns () or, with reduction="none", the shape of int64 labels. Raises TypeError or
    ValueError for what does not fit.
    """
    return TopKCrossEntropyLoss(method, p_k, m=m, **settings)(logits, labels)
