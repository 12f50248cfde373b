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
    """Compute the top-k cross-entropy, as a call of TopKCrossEntropyLoss does.

    Args:
        logits, labels, p_k, method, m: as in TopKCrossEntropyLoss and its call.
        settings: the other arguments of TopKCrossEntropyLoss, such as top1_mode, weight or label_smoothing.

    Returns:
        The loss, as a call of TopKCrossEntropyLoss returns it.
    """
    return TopKCrossEntropyLoss(method, p_k, m=m, **settings)(logits, labels)


def topk_mask(
    x: Tensor, k: float | Tensor, method: str = "lapsum", inverse_temperature: float | Tensor | None = None,
    dim: int = -1, **settings: Any,
) -> Tensor:  # fmt: skip
    """Compute a soft top-k indicator along a dimension: near 1 for the k largest entries, near 0 for the others.

    Args:
        x: floating point; an entry of -inf is masked out.
        k: an integer from 1 to x.shape[dim]. For lml, lapsum, sparse_topk, capped_softmax and soft_topk it may be any
            number above 0 up to that, or a tensor that broadcasts to the shape of x without `dim` and receives a
            gradient.
        method: one of RELAXATIONS. The indicators of NeuralSort and SoftSort are sums of their rows, and may exceed 1.
        inverse_temperature: larger = closer to the hard indicator (default: the method's); a tensor () receives its
            gradient.
        dim: the dimension of the classes.
        settings: distribution and art_lambda of a network.

    Returns:
        The indicator, of the shape of x; float32 for half precision.

    Raises:
        TypeError, ValueError: arguments that do not fit.

    Example:
        >>> topk_mask(torch.tensor([3.0, 1.0, 2.0, -1.0]), k=2, inverse_temperature=10.0).round()
        tensor([1., 0., 1., 0.])
    """
    check_logits(x)
    rows = x.movedim(dim, -1)  # (..., n)
    is_real = isinstance(k, float) or (isinstance(k, Tensor) and (k.dim() > 0 or k.is_floating_point()))
    num_ranks: Any = 1 if is_real else k
    operator = make_operator(method, rows.shape[-1], num_ranks, inverse_temperature, **settings)
    if is_real and not isinstance(operator, ThresholdOperator):
        able = "lml, lapsum, sparse_topk, capped_softmax or soft_topk"
        raise ValueError(f"a k that is no integer needs {able}, not {method}")
    return operator.mask(rows, k).movedim(-1, dim)


def soft_topk_values(
    x: Tensor, k: SupportsIndex, method: str = "lapsum", inverse_temperature: float | Tensor | None = None,
    dim: int = -1, **settings: Any,
) -> Tensor:  # fmt: skip
    """Compute the k largest values of x along a dimension, relaxed.

    Value r is sum_j P[r, j] x_j; an entry of -inf is masked out.

    Args:
        x, method, inverse_temperature, dim, settings: as in topk_mask.
        k: an integer from 1 to x.shape[dim].

    Returns:
        Of the shape of x, with k in place of x.shape[dim]; float32 for half precision.

    Raises:
        TypeError, ValueError: arguments that do not fit.
    """
    check_logits(x)
    rows = x.movedim(dim, -1)
    P = make_operator(method, rows.shape[-1], k, inverse_temperature, **settings)(rows)  # (..., k, n)
    return (P * rows.masked_fill(rows == -torch.inf, 0).unsqueeze(-2)).sum(-1).movedim(-1, dim)
