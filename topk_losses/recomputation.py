"""Losses whose backward pass computes again what it needs, instead of keeping it.

torch.utils.checkpoint does this for any function. It imports PyTorch's compiler, which takes a second and 100 MiB.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from topk_losses.compilers import full_precision

Compute = Callable[[Tensor, Tensor, float | Tensor, Tensor | None], Tensor]


class Context(Protocol):
    """What the backward pass of Recomputed needs."""

    compute: Compute
    number: float
    saved_tensors: tuple[Tensor | None, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


class Recomputed(torch.autograd.Function):
    """compute(logits, classes, inverse_temperature, p_k), differentiable twice by all but the classes."""

    @staticmethod
    def forward(
        ctx: Context,
        compute: Compute,
        logits: Tensor,
        classes: Tensor,
        inverse_temperature: float | Tensor,
        p_k: Tensor | None,
    ) -> Tensor:
        ctx.compute = compute
        beta = None
        if isinstance(inverse_temperature, Tensor):
            beta = inverse_temperature
        else:
            ctx.number = inverse_temperature
        ctx.save_for_backward(logits, classes, beta, p_k)
        return compute(logits, classes, inverse_temperature, p_k)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        create_graph = torch.is_grad_enabled()  # for second derivatives
        inputs: list[Tensor | None] = []
        leaves: list[Tensor] = []
        with torch.enable_grad(), full_precision(grad.device):
            for tensor, is_needed in zip(ctx.saved_tensors, ctx.needs_input_grad[1:]):
                if is_needed and tensor is not None:
                    tensor = tensor.view_as(tensor)
                    leaves.append(tensor)
                inputs.append(tensor)
            logits, classes, beta, p_k = inputs
            assert logits is not None
            assert classes is not None
            inverse_temperature = ctx.number if beta is None else beta
            losses = ctx.compute(logits, classes, inverse_temperature, p_k)
            # unused: a temperature, where all classes are within k whatever it is
            grads = iter(torch.autograd.grad(losses, leaves, grad, create_graph=create_graph, allow_unused=True))
        return None, *[next(grads) if is_needed else None for is_needed in ctx.needs_input_grad[1:]]
