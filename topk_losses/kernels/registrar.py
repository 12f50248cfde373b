"""How operations of our own become PyTorch's: the loops of solvers, and kernels.

A compiler would unroll a loop, and cannot look into a kernel. It meets one operation in their place,
torch.ops.topk_losses.<name>. Eager calls go around PyTorch's dispatcher, whose Python code takes tenths of a
millisecond per step.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from topk_losses.compilers import full_precision

NAMESPACE = "topk_losses"
Argument = Tensor | float | str | Sequence[int] | None
Compute = Callable[..., list[Tensor]]
Result = TypeVar("Result", Tensor, tuple[Tensor, Tensor])
KERNELS: dict[str, Compute] = {}


class Context(Protocol):
    """What an autograd function keeps from its forward pass for its backward pass."""

    settings: list[Argument]  # the arguments, None for tensors
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


def register_loop(
    name: str, function: type[torch.autograd.Function], allocate: Callable[..., Result]
) -> Callable[..., Result]:
    """Return what applies an autograd function whose forward pass is a loop that ends early on a CPU.

    Args:
        name: of the operation.
        function: PyTorch reads the types of its forward pass, which does not take the context.
        allocate: allocate(*arguments) returns the results without their numbers.
    """
    operation = torch.library.custom_op(f"{NAMESPACE}::{name}", function.forward, mutates_args=())
    operation.register_fake(allocate)
    operation.register_autograd(function.backward, setup_context=function.setup_context)

    def apply(first: Tensor, *others: Argument) -> Result:
        implementation: Callable[..., Result] = function.apply
        if torch.compiler.is_compiling() and first.device.type == "cpu":
            implementation = operation
        return implementation(first, *others)

    return apply


def register_kernel(
    name: str, eager: Compute, compute: Compute, allocate: Compute, compute_gradient: Callable[..., Tensor]
) -> None:
    """Register a kernel, which is differentiable by the scores, as KERNELS[name] and as an operation.

    Args:
        name: of the operation.
        eager: eager(scores, *settings) returns the results by eager PyTorch, for second derivatives. PyTorch reads the
            types of its arguments.
        compute: compute(scores, *settings) returns the results, and then what the backward pass needs.
        allocate: allocate(scores, *settings) returns the same tensors without their numbers. Sizes stay symbolic
            (`.shape[0]`, never `len`), for one compiled graph over all batch sizes.
        compute_gradient: compute_gradient(grads, outputs, scores, *settings) returns the gradient of the scores from
            those of what `compute` returned, None for those that are not used.
    """
    schema = torch.library.infer_schema(eager, mutates_args=())
    operation = torch.library.custom_op(f"{NAMESPACE}::{name}", compute, mutates_args=(), schema=schema)
    operation.register_fake(allocate)

    schema = schema.replace("(", "(Tensor?[] grads, Tensor[] outputs, ").replace("-> Tensor[]", "-> Tensor")
    gradient_operation = torch.library.custom_op(
        f"{NAMESPACE}::{name}_gradient", compute_gradient, mutates_args=(), schema=schema
    )
    gradient_operation.register_fake(allocate_gradient)

    def differentiate_operation(ctx: Context, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        return differentiate(ctx, grads, eager, gradient_operation)

    operation.register_autograd(differentiate_operation, setup_context=save_arguments)

    class EagerKernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Context, *arguments: Argument) -> tuple[Tensor, ...]:
            outputs = compute(*arguments)
            save_arguments(ctx, arguments, outputs)
            return tuple(outputs)

        @staticmethod
        def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            return differentiate(ctx, grads, eager, compute_gradient)

    KERNELS[name] = EagerKernel.apply


def new_gradient(scores: Tensor) -> Tensor:
    """Allocate the gradient of scores (rows, n)."""
    return torch.empty_like(scores, memory_format=torch.contiguous_format)


def allocate_gradient(
    grads: Sequence[Tensor | None], outputs: Sequence[Tensor], scores: Tensor, *settings: Argument
) -> Tensor:
    """Allocate what compute_gradient returns."""
    return new_gradient(scores)


def save_arguments(ctx: Context, inputs: tuple[Argument, ...], output: Sequence[Tensor]) -> None:
    """Keep the arguments and the results of a kernel for its backward pass; PyTorch gives them by these names."""
    ctx.settings = []
    tensors: list[Tensor | None] = []
    for argument in inputs:
        if isinstance(argument, Tensor):
            ctx.settings.append(None)
            tensors.append(argument)
        else:
            ctx.settings.append(argument)
            tensors.append(None)
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def differentiate(
    ctx: Context, grads: Sequence[Tensor | None], eager: Compute, compute_gradient: Callable[..., Tensor]
) -> tuple[Tensor | None, ...]:
    """Return the gradient of the scores, and None for each other argument."""
    saved = ctx.saved_tensors  # once: where memory is saved by computing again, each access does so
    num_arguments = len(ctx.settings)
    arguments: list[Argument] = []
    for setting, tensor in zip(ctx.settings, saved):
        arguments.append(tensor if setting is None else setting)
    if torch.is_grad_enabled():  # create_graph=True
        grad_scores = differentiate_eager(eager, arguments, grads)
    else:
        grad_scores = compute_gradient(list(grads), list(saved[num_arguments:]), *arguments)
    return grad_scores, *[None] * (num_arguments - 1)


def differentiate_eager(eager: Compute, arguments: list[Argument], grads: Sequence[Tensor | None]) -> Tensor:
    """Return the gradient of the scores by eager PyTorch, so that it can be differentiated in turn."""
    first = arguments[0]
    assert isinstance(first, Tensor)
    with full_precision(first.device):  # backward may run under autocast
        scores = first.view_as(first)
        results: list[Tensor] = []
        weights: list[Tensor] = []
        for result, grad in zip(eager(scores, *arguments[1:]), grads):
            if grad is not None:
                results.append(result)
                weights.append(grad)
        (grad_scores,) = torch.autograd.grad(results, scores, weights, create_graph=True)
    return grad_scores
