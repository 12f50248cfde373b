"""The losses and operators as functions, for a call here and there; a training loop keeps a module, built once."""

from collections.abc import Callable
from typing import SupportsIndex

import torch
from torch import Tensor

from topk_losses.checks import PK, check_logits
from topk_losses.classification import ClassificationLoss
from topk_losses.factory import Setting
from topk_losses.methods import make_operator
from topk_losses.operator import TopKOperator
from topk_losses.threshold import ThresholdOperator
from topk_losses.topk_cross_entropy import TopKCrossEntropyLoss


def topk_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    p_k: PK = (0.2, 0.2, 0.2, 0.2, 0.2),
    method: str | TopKOperator = "splitter_selection",
    m: SupportsIndex | None = None,
    **settings: Setting,
) -> Tensor:
    """Compute the top-k cross-entropy, as a call of TopKCrossEntropyLoss does.

    Args:
        logits, labels, p_k, method, m: as in TopKCrossEntropyLoss and its call.
        settings: the other arguments of TopKCrossEntropyLoss, such as top1_mode, weight or label_smoothing.

    Returns:
        The loss, as a call of TopKCrossEntropyLoss returns it.
    """
    build: Callable[..., ClassificationLoss] = TopKCrossEntropyLoss
    loss_fn = build(method, p_k, m=m, **settings)
    losses: Tensor = loss_fn(logits, labels)
    return losses


def topk_mask(
    x: Tensor,
    k: float | Tensor,
    method: str | TopKOperator = "lapsum",
    inverse_temperature: float | Tensor | None = None,
    dim: int = -1,
    distribution: str | None = None,
    art_lambda: float | None = None,
) -> Tensor:
    """Compute a soft top-k indicator along a dimension: near 1 for the k largest entries, near 0 for the others.

    Args:
        x: floating point; an entry of -inf is masked out.
        k: an integer from 1 to x.shape[dim]. For lml, lapsum, sparse_topk, capped_softmax and soft_topk it may be any
            number above 0 up to that, or a tensor that broadcasts to the shape of x without `dim` and receives a
            gradient.
        method: one of RELAXATIONS, or a TopKOperator. The indicators of NeuralSort and SoftSort are sums of their rows,
            and may exceed 1.
        inverse_temperature: larger = closer to the hard indicator (default: the method's); a tensor () receives its
            gradient.
        dim: the dimension of the classes.
        distribution, art_lambda: of a network.

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
    operator = make_operator(method, distribution, art_lambda)
    if isinstance(operator, ThresholdOperator):
        return operator.mask(rows, k, inverse_temperature).movedim(-1, dim)
    if isinstance(k, float) or (isinstance(k, Tensor) and (k.dim() > 0 or k.is_floating_point())):
        able = "lml, lapsum, sparse_topk, capped_softmax or soft_topk"
        raise ValueError(f"a k that is no integer needs {able}, not {method}")
    return operator.mask(rows, k, inverse_temperature).movedim(-1, dim)


def soft_topk_values(
    x: Tensor,
    k: SupportsIndex,
    method: str | TopKOperator = "lapsum",
    inverse_temperature: float | Tensor | None = None,
    dim: int = -1,
    distribution: str | None = None,
    art_lambda: float | None = None,
) -> Tensor:
    """Compute the k largest values of x along a dimension, relaxed.

    Value r is sum_j P[r, j] x_j, and -inf where there are less than r entries; those of -inf are masked out.

    Args:
        x, method, inverse_temperature, dim, distribution, art_lambda: as in topk_mask; of the methods those whose
            indicators sum to k.
        k: an integer from 1 to x.shape[dim].

    Returns:
        Of the shape of x, with k instead of x.shape[dim]; float32 for half precision.

    Raises:
        TypeError, ValueError: arguments that do not fit.
    """
    check_logits(x)
    rows = x.movedim(dim, -1)  # (..., n)
    operator = make_operator(method, distribution, art_lambda)
    if not operator.sums_to_k:
        raise ValueError(f"soft_topk_values needs indicators that sum to k, which those of {operator} do not")
    P = operator.permutation_matrix(rows, k, inverse_temperature)  # (..., k, n)
    is_masked = rows == -torch.inf
    values = (P * rows.masked_fill(is_masked, 0).unsqueeze(-2)).sum(-1)  # (..., k)
    num_unmasked = (~is_masked).sum(-1, keepdim=True)
    ranks = torch.arange(1, values.shape[-1] + 1, device=x.device)
    return values.masked_fill(ranks > num_unmasked, -torch.inf).movedim(-1, dim)
