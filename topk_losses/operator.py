"""The common signature of the relaxed top-k operators: rank_probabilities and permutation_matrix."""

from typing import Any

import torch
from torch import Tensor, nn

from topk_losses.checks import check_k, check_logits, check_logits_and_labels


def to_compute_dtype(logits: Tensor) -> Tensor:
    """float64 and float32 stay; half precision is computed in float32."""
    return logits if logits.dtype == torch.float64 else logits.float()


def class_mass(labels: Tensor, like: Tensor) -> Tensor:
    """Labels (batch,) as a one-hot, or (batch, n) as they are, in the dtype of `like` (batch, n)."""
    if labels.is_floating_point():
        return labels.to(like.dtype)
    return torch.zeros_like(like).scatter(1, labels.unsqueeze(1), 1.0)


class _NotTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> None:
        raise RuntimeError("the top-k losses are not twice differentiable; use no create_graph=True with them")


def refuse_double_backward(gradient: Tensor, *sources: Tensor) -> Tensor:
    """`gradient` as it is, but a derivative of it that reaches one of its `sources` raises RuntimeError.

    For the end of a hand-written backward pass. torch.autograd.function.once_differentiable is not enough: its error
    sits in a node that does not lead to the inputs, which torch.autograd.grad never visits, so that second
    derivatives would come out wrong in silence. Under torch.compile, which refuses double backward itself, a no-op.
    """
    return gradient if torch.compiler.is_compiling() else _NotTwice.apply(gradient, *sources)


class TopKOperator(nn.Module):
    """A relaxed permutation matrix P restricted to its first k rows, P[r, j] = P(class j holds rank r + 1).

    Subclasses compute in the dtype they receive (float32 or float64):
    `_rank_probabilities(scores, labels)` -> (batch, k) and `_permutation_matrix(scores)` -> (batch, k, n).
    """

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = check_k(k, None)

    def rank_probabilities(self, logits: Tensor, labels: Tensor) -> Tensor:
        """P[:, y], the column of the true class, by true-class evaluation: P is never built.

        logits (batch, n) floating point; labels (batch,) int64 in [0, n), or (batch, n), a distribution over
        classes that is carried in place of the one-hot. Returns (batch, k), row r: P(rank = r + 1), float32
        for half-precision logits. Raises TypeError or ValueError for shapes and labels that do not fit.
        """
        check_logits_and_labels(logits, labels, allow_distribution=True)
        check_k(self.k, logits.shape[1])
        return self._rank_probabilities(to_compute_dtype(logits), labels)

    def permutation_matrix(self, logits: Tensor) -> Tensor:
        """P, the first k rows of the relaxed permutation matrix: (batch, k, n), row 0 is rank 1 (top-1).

        logits (batch, n) floating point. float32 for half-precision logits. Raises TypeError or ValueError.
        """
        check_logits(logits)
        check_k(self.k, logits.shape[1])
        return self._permutation_matrix(to_compute_dtype(logits))

    def forward(self, logits: Tensor) -> Tensor:
        """The permutation matrix."""
        return self.permutation_matrix(logits)

    def check_convergence(self) -> float:
        """The largest relative error of an iterative solver so far; 0 for an operator in closed form."""
        return 0.0

    def _rank_probabilities(self, scores: Tensor, labels: Tensor) -> Tensor:
        raise TypeError(f"{type(self).__name__} does not define _rank_probabilities")

    def _permutation_matrix(self, scores: Tensor) -> Tensor:
        raise TypeError(f"{type(self).__name__} does not define _permutation_matrix")
