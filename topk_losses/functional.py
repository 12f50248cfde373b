"""The losses and operators as functions, for a call here and there; a training loop keeps a module, built once."""

from typing import Any, SupportsIndex

import torch
from torch import Tensor

from topk_losses.checks import PK, check_logits
from topk_losses.loss import TopKCrossEntropyLoss
from topk_losses.methods import make_operator
from topk_losses.threshold import ThresholdOperator


def topk_cross_entropy(
    logits: Tensor, labels: Tensor, p_k: PK = (0.2, 0.2, 0.2, 0.2, 0.2), method: str = "splitter_selection",
    m: SupportsIndex | None = None, **settings: Any,
) -> Tensor:  # fmt: skip
    """Compute the top-k cross-entropy, as TopKCrossEntropyLoss does.

    settings: the other arguments of that class (inverse_temperature, top1_mode, weight, label_smoothing, ...). Shapes,
    results and errors are those of its call.
    """
    return TopKCrossEntropyLoss(method, p_k, m=m, **settings)(logits, labels)


def topk_mask(
    x: Tensor, k: float | Tensor, method: str = "lapsum", inverse_temperature: float | Tensor | None = None,
    dim: int = -1, **settings: Any,
) -> Tensor:  # fmt: skip
    """Compute a soft top-k indicator along a dimension: in [0, 1], near 1 for the k largest, of the shape of x.

    Args:
        x: floating point; an entry of -inf is masked out.
        k: an integer from 1 to x.shape[dim]; for lml, lapsum, sparse_topk, capped_softmax and soft_topk any number
            above 0 up to that, or a tensor that broadcasts to the shape of x without `dim`, and receives its gradient.
        method: any of RELAXATIONS; the indicators of NeuralSort and SoftSort, sums of their rows, may exceed 1.
        inverse_temperature: larger = closer to the hard indicator, default the method's; a tensor () receives its
            gradient.
        settings: distribution and art_lambda of a network.

    Returns:
        The indicator, float32 for half precision.

    Example:
        >>> topk_mask(torch.tensor([3.0, 1.0, 2.0, -1.0]), k=2, inverse_temperature=10.0).round()
        tensor([1., 0., 1., 0.])
    """
    check_logits(x)
    rows = x.movedim(dim, -1)  # (..., n)
    n = rows.shape[-1]
    if isinstance(k, Tensor) and not k.is_floating_point() and k.dim() == 0:
        k = int(k)
    if not isinstance(k, (float, Tensor)):
        return make_operator(method, n, k, inverse_temperature, **settings).mask(rows).movedim(-1, dim)
    operator = make_operator(method, n, 1, inverse_temperature, **settings)
    if not isinstance(operator, ThresholdOperator):
        able = "lml, lapsum, sparse_topk, capped_softmax or soft_topk"
        raise ValueError(f"a k that is no integer needs {able}, not {method}")
    return operator.mask(rows, k).movedim(-1, dim)


def soft_topk_values(
    x: Tensor, k: SupportsIndex, method: str = "lapsum", inverse_temperature: float | Tensor | None = None,
    dim: int = -1, **settings: Any,
) -> Tensor:  # fmt: skip
    """Compute the k largest values of x along a dimension, relaxed: sum_j P[r, j] x_j for the ranks r = 1..k.

    Arguments as for topk_mask, k an integer; x of -inf is masked out. Raises TypeError or ValueError.
    """
    check_logits(x)
    rows = x.movedim(dim, -1)
    P = make_operator(method, rows.shape[-1], k, inverse_temperature, **settings)(rows)  # (..., k, n)
    out = (rows == -torch.inf).unsqueeze(-2)
    return torch.where(out, 0, P * rows.masked_fill(rows == -torch.inf, 0).unsqueeze(-2)).sum(-1).movedim(-1, dim)
