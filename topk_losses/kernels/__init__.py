"""Kernels that compute what eager PyTorch computes, but faster: Numba on the CPU, Triton on CUDA.

Kernels take float32 tensors. They run where their package is installed, on CUDA from compute capability 8.0 on, which
Triton is made for. The environment variable TOPK_LOSSES_BACKEND, read at every call, overrides this choice: with
`torch` no kernel runs; with `numba` or `triton` a tensor on the wrong device is an error. Each kernel is a custom
operator, torch.ops.topk_losses.<operation>_<device>, so that torch.compile and torch.export keep it in one graph.
"""

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from topk_losses.checks import full_precision, is_ordinary

VARIABLE = "TOPK_LOSSES_BACKEND"
PACKAGES = {"cpu": "numba", "cuda": "triton"}
MODULES = {  # by operation and device; a module registers its operations when it is imported
    ("carry_mass", "cpu"): "cpu_networks",
    ("carry_mass", "cuda"): "cuda_networks",
    ("kth_largest", "cpu"): "cpu_smooth",
    ("sinkhorn", "cpu"): "cpu_sinkhorn",
}
ARGUMENTS = {
    "carry_mass": "Tensor scores, Tensor target, Tensor beta, Tensor comparators, SymInt[] layer_sizes, SymInt k, "
    "str distribution, float? art_lambda",
    "kth_largest": "Tensor scores, Tensor labels, SymInt[] ks, Tensor temperature",
    "sinkhorn": "Tensor x, Tensor labels, Tensor beta, SymInt k, float tolerance, SymInt max_iterations",
}
INTERPRETER_HINT = ", or set TRITON_INTERPRET=1 to interpret the kernels, slowly"
_eager: dict[str, Callable[..., Any]] = {}  # by name: the kernels as they are called outside torch.compile


@functools.cache
def is_installed(package: str) -> bool:
    """Tell whether a package can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


def device_of_kernels(device: torch.device) -> str:
    """Choose the kernels for tensors on a device: "cpu", "cuda", or "" for none.

    Raises:
        ValueError: TOPK_LOSSES_BACKEND is none of the backends, or names one that cannot run on `device`.
    """
    backend, kind = os.environ.get(VARIABLE, ""), device.type
    if backend not in ("", "torch", *PACKAGES.values()):
        raise ValueError(f"{VARIABLE} must be torch, numba or triton, or unset to choose by device; got {backend!r}")
    if backend == "torch":
        return ""
    if not backend:
        installed = kind in PACKAGES and is_installed(PACKAGES[kind])
        old = installed and kind == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
        return kind if installed and not old else ""
    wanted, hint = ("cpu", "") if backend == "numba" else ("cuda", INTERPRETER_HINT)
    if kind != wanted and (kind, backend, os.environ.get("TRITON_INTERPRET")) != ("cpu", "triton", "1"):
        raise ValueError(f"{VARIABLE}={backend} needs tensors on {wanted}, got {kind}; unset it{hint}")
    if not is_installed(backend):
        raise ValueError(f"{VARIABLE}={backend} needs the package {backend}; install it, or unset {VARIABLE}")
    return wanted


def _name(operation: str, device: torch.device) -> str:
    """Load the kernel for an operation on a device and return its name, "" where there is none."""
    kind = device_of_kernels(device)
    if (operation, kind) not in MODULES:
        return ""
    importlib.import_module(f"topk_losses.kernels.{MODULES[operation, kind]}")
    return f"{operation}_{kind}"


# What torch.compiler.assume_constant_result does. That function would import the compiler, which takes a second.
_name._dynamo_marked_constant = True  # type: ignore[attr-defined]


def kernel(operation: str, scores: Tensor, *settings: object) -> Callable[..., Any] | None:
    """The kernel for an operation on `scores`, or None where eager PyTorch is to compute it.

    There is none for other dtypes than float32, for tensors of torch.func, and for settings that require a gradient:
    kernels are differentiated by their first argument alone.
    """
    if scores.dtype != torch.float32 or not is_ordinary(scores):
        return None
    if any(isinstance(each, Tensor) and (each.requires_grad or not is_ordinary(each)) for each in settings):
        return None
    if not (name := _name(operation, scores.device)):
        return None
    return getattr(torch.ops.topk_losses, name) if torch.compiler.is_compiling() else _eager[name]


def register(
    operation: str, device: str, results: int, outputs: Callable[..., list[Tensor]], forward: Callable[..., None],
    backward: Callable[..., None], operations: Callable[..., list[Tensor]],
) -> None:  # fmt: skip
    """Make a kernel a custom operator of PyTorch that is differentiable by its first argument, the scores.

    Args:
        operation: a key of ARGUMENTS.
        device: "cpu" or "cuda".
        results: how many of the outputs are differentiable; they come first.
        outputs: outputs(*arguments) allocates the results and what the backward pass needs. Sizes stay symbolic
            (`.shape[0]`, never `len`), for one compiled graph over all batch sizes.
        forward: forward(outputs, *arguments) fills them.
        backward: backward(grad_scores, grads, outputs, *arguments) fills grad_scores from the results' gradients.
        operations: operations(*arguments) computes the results by eager PyTorch, for second derivatives.
    """
    name, arguments = f"{operation}_{device}", ARGUMENTS[operation]

    def run(*inputs: Any) -> list[Tensor]:
        made = outputs(*inputs)
        forward(made, *inputs)
        return made

    def empty_gradient(grads: Sequence[Tensor], made: Sequence[Tensor], *inputs: Any) -> Tensor:
        return torch.empty_like(inputs[0], memory_format=torch.contiguous_format)

    def run_backward(grads: Sequence[Tensor], made: Sequence[Tensor], *inputs: Any) -> Tensor:
        grad_scores = empty_gradient(grads, made, *inputs)
        backward(grad_scores, grads, made, *inputs)
        return grad_scores

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
        ctx.settings = [None if isinstance(value, Tensor) else value for value in inputs]
        ctx.save_for_backward(*(value if isinstance(value, Tensor) else None for value in inputs), *output)
        ctx.set_materialize_grads(False)

    def gradients(ctx: Any, grads: Sequence[Tensor | None], run_backward: Callable[..., Tensor]) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # once: where memory is saved by computing again, each access does so
        inputs = [tensor if setting is None else setting for setting, tensor in zip(ctx.settings, saved)]
        made, grads = saved[len(inputs) :], grads[:results]
        if torch.is_grad_enabled():  # create_graph=True: eager PyTorch has second derivatives
            with full_precision(inputs[0].device):  # backward may run under autocast
                scores = inputs[0].view_as(inputs[0])
                pairs = zip(operations(scores, *inputs[1:]), grads)
                values, weights = zip(*(pair for pair in pairs if pair[1] is not None))
                (grad_scores,) = torch.autograd.grad(values, scores, weights, create_graph=True)
        else:
            known = [torch.zeros_like(y) if grad is None else grad for y, grad in zip(made, grads)]
            grad_scores = run_backward(known, made, *inputs)
        return grad_scores, *(None,) * (len(inputs) - 1)

    class Eager(torch.autograd.Function):
        """The same operator without PyTorch's dispatcher, whose Python code takes tenths of a millisecond per step."""

        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
            output = run(*inputs)
            setup_context(ctx, inputs, output)
            return tuple(output)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
            return gradients(ctx, grads, run_backward)

    _eager[name] = Eager.apply
    schema = f"(Tensor[] grads, Tensor[] made, {arguments}) -> Tensor"
    back = torch.library.custom_op(f"topk_losses::{name}_backward", run_backward, mutates_args=(), schema=schema)
    back.register_fake(empty_gradient)
    op = torch.library.custom_op(f"topk_losses::{name}", run, mutates_args=(), schema=f"({arguments}) -> Tensor[]")
    op.register_fake(outputs)
    op.register_autograd(lambda ctx, grads: gradients(ctx, grads, back), setup_context=setup_context)
