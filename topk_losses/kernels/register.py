"""Kernels as custom operators of PyTorch, which torch.compile and torch.export keep in one graph."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from topk_losses.checks import full_precision
from topk_losses.kernels import KERNELS


def empty_gradient(scores: Tensor) -> Tensor:
    """Allocate the gradient of scores (batch, n)."""
    return torch.empty_like(scores, memory_format=torch.contiguous_format)


def register_kernel(
    name: str, eager: Callable[..., list[Tensor]], compute: Callable[..., list[Tensor]],
    allocate: Callable[..., list[Tensor]], compute_gradient: Callable[..., Tensor],
) -> None:  # fmt: skip
    """Make a kernel the operator torch.ops.topk_losses.<name>, differentiable by the scores.

    It becomes KERNELS[name], too, for calls without PyTorch's dispatcher, whose Python code takes tenths of a
    millisecond per step.

    Args:
        name: of MODULES.
        eager: eager(scores, *settings) returns the results, by eager PyTorch, for second derivatives. PyTorch reads
            the types of its arguments.
        compute: compute(scores, *settings) returns the results and then what the backward pass needs.
        allocate: allocate(scores, *settings) returns the same tensors without their numbers. Sizes stay symbolic
            (`.shape[0]`, never `len`), for one compiled graph over all batch sizes.
        compute_gradient: compute_gradient(grads, outputs, scores, *settings) returns the gradient of the scores from
            those of what `compute` returned, None for those that are not used.
    """
    schema = torch.library.infer_schema(eager, mutates_args=())
    operator = torch.library.custom_op(f"topk_losses::{name}", compute, mutates_args=(), schema=schema)
    operator.register_fake(allocate)
    schema = schema.replace("(", "(Tensor?[] grads, Tensor[] outputs, ").replace("-> Tensor[]", "-> Tensor")
    gradient = torch.library.custom_op(
        f"topk_losses::{name}_backward", compute_gradient, mutates_args=(), schema=schema
    )
    gradient.register_fake(lambda grads, outputs, scores, *settings: empty_gradient(scores))

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
        ctx.settings = [None if isinstance(value, Tensor) else value for value in inputs]
        ctx.save_for_backward(*(value if isinstance(value, Tensor) else None for value in inputs), *output)
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, grads: Sequence[Tensor | None], compute_gradient: Callable[..., Tensor]) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # once: where memory is saved by computing again, each access does so
        inputs = [tensor if setting is None else setting for setting, tensor in zip(ctx.settings, saved)]
        if torch.is_grad_enabled():  # create_graph=True
            with full_precision(inputs[0].device):  # backward may run under autocast
                scores = inputs[0].view_as(inputs[0])
                pairs = zip(eager(scores, *inputs[1:]), grads)
                results, weights = zip(*(pair for pair in pairs if pair[1] is not None))
                (grad_scores,) = torch.autograd.grad(results, scores, weights, create_graph=True)
        else:
            grad_scores = compute_gradient(list(grads), saved[len(inputs) :], *inputs)
        return grad_scores, *(None for _ in inputs[1:])

    operator.register_autograd(lambda ctx, grads: backward(ctx, grads, gradient), setup_context=setup_context)

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
            outputs = compute(*inputs)
            setup_context(ctx, inputs, outputs)
            return tuple(outputs)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
            return backward(ctx, grads, compute_gradient)

    KERNELS[name] = Direct.apply
