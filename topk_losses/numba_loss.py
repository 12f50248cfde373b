"""The top-k cross-entropy of each sample from its scores and P[1..K, y], compiled by Numba for the CPU.

What topk_cross_entropy.TopKCrossEntropyLoss computes after its operator: through PyTorch two dozen operations on small
tensors, whose time is the call. The forward pass leaves the gradient for the backward pass to scale. float32 only;
whatever is one number per sample is computed in float64.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from topk_losses.numba_kernels import CHUNK, WRITTEN_BY_A_THREAD, exp, in_threads, jit, sum_of

Operations = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
MODES = ("sort", "sm", "smce")
WORK_OF_A_THREAD = 100_000  # scores that pay for another thread
_SORT, _SM, _SMCE = range(len(MODES))
_f32 = np.float32


@jit
def _exponentials(x, label, out, parts):
    """Fill out with exp(x - max x), x (n,), but 0 for the label; return its sum, and the label's x - max x."""
    largest = x[0]
    for j in range(len(x)):
        largest = x[j] if x[j] > largest else largest
    for j in range(len(x)):
        v = x[j] - largest
        out[j] = _f32(0) if v < _f32(-87) else exp(v)
    out[label] = _f32(0)
    return sum_of(out, parts), np.float64(x[label]) - np.float64(largest)


@jit
def _forward(scores, labels, column, p_k, mode, first, last, losses, of_scores, of_column):
    """Rows first..last of scores (batch, n), column (batch, K), p_k (batch or 1, K) to losses (batch,) and their
    derivatives by scores and column, of the same shapes."""
    K, parts = column.shape[1], np.empty(CHUNK, _f32)
    for row in range(first, last):
        p = p_k[row if len(p_k) > 1 else 0]
        within = weight = 0.0
        for r in range(K - 1, -1, -1):
            weight += p[r] if r > 0 or mode == _SORT else _f32(0)  # as in topk_cross_entropy.rank_weights
            within += weight * column[row, r]
            of_column[row, r] = weight
        probability, top1, share = within, 0.0, np.float64(1)
        slopes, label, p_1 = of_scores[row], labels[row], np.float64(p[0])
        if mode == _SORT:
            slopes[:] = _f32(0)
        else:
            of_others, behind = _exponentials(scores[row], label, slopes, parts)
            total = of_others + math.exp(behind)
            top1, cross_entropy = math.exp(behind) / total, math.log(total) - behind
            if mode == _SM:
                probability += p_1 * top1
            else:
                share -= p_1
        guarded = probability * (1 - 2e-7) + 1e-7
        of_probability = -share * (1 - 2e-7) / guarded
        losses[row] = -share * math.log(guarded) + (p_1 * cross_entropy if mode == _SMCE else 0.0)
        if mode != _SORT:
            # by the logits of a softmax: of its y-th entry (sm), or of its cross-entropy
            of_softmax = p_1 if mode == _SMCE else -of_probability * p_1 * top1
            factor = _f32(of_softmax / total)
            for j in range(len(slopes)):
                slopes[j] *= factor
            slopes[label] = -of_softmax * of_others / total
        for r in range(K):
            of_column[row, r] *= of_probability


@jit
def _backward(grad, of_scores, of_column, first, last, grad_scores, grad_column):
    """Rows first..last of grad (batch,) times the derivatives, which may be NaN where grad is 0."""
    for row in range(first, last):
        g = grad[row]
        if g == _f32(0):
            grad_scores[row] = _f32(0)
            grad_column[row] = _f32(0)
            continue
        for j in range(of_scores.shape[1]):
            grad_scores[row, j] = g * of_scores[row, j]
        for r in range(of_column.shape[1]):
            grad_column[row, r] = g * of_column[row, r]


class _RowLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, labels: Tensor, column: Tensor, p_k: Tensor, mode: int, operations: Operations
    ) -> Tensor:
        batch = len(scores)
        threads = max(1, min(torch.get_num_threads(), batch, 1 + scores.numel() // WORK_OF_A_THREAD))
        losses, of_scores, of_column = (scores.new_empty(shape) for shape in (batch, scores.shape, column.shape))
        shared = p_k.unsqueeze(0) if p_k.dim() == 1 else p_k  # (batch or 1, K)
        inputs = [each.detach().contiguous().numpy() for each in (scores, labels, column, shared)]
        outputs = [each.numpy() for each in (losses, of_scores, of_column)]
        in_threads(threads, batch, lambda first, last: _forward(*inputs, mode, first, last, *outputs))
        ctx.save_for_backward(scores, labels, column, p_k, of_scores, of_column)
        ctx.threads, ctx.operations = threads, operations
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scores, labels, column, p_k, of_scores, of_column = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: PyTorch's operations know their second derivatives
            inputs = (scores.view_as(scores), column.view_as(column))  # of which the one does not depend on the other
            losses = ctx.operations(inputs[0], labels, inputs[1], p_k)
            # mode sort: the scores themselves do not matter, and have None
            gradients = torch.autograd.grad(losses, inputs, grad, create_graph=True, allow_unused=True)
            return gradients[0], None, gradients[1], None, None, None
        grad_scores, grad_column = torch.empty_like(of_scores), torch.empty_like(of_column)
        inputs = [each.contiguous().numpy() for each in (grad, of_scores, of_column)]
        outputs = (grad_scores.numpy(), grad_column.numpy())
        threads = max(1, min(ctx.threads, of_scores.numel() // WRITTEN_BY_A_THREAD))
        in_threads(threads, len(grad), lambda first, last: _backward(*inputs, first, last, *outputs))
        return grad_scores, None, grad_column, None, None, None


def row_losses(
    scores: Tensor, labels: Tensor, column: Tensor, p_k: Tensor, top1_mode: str, operations: Operations
) -> Tensor:
    """The loss of each sample, (batch,), float32 on the CPU.

    scores (batch, n), labels (batch,) int64, column (batch, K): P[1..K, y], p_k (K,) or (batch, K) without a gradient.
    operations: the same by PyTorch's operations, of the first four; for derivatives of derivatives.
    """
    return _RowLosses.apply(scores, labels, column, p_k, MODES.index(top1_mode), operations)
