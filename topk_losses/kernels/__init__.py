"""Kernels that compute what PyTorch's operations compute, faster: one table, asked in one place.

A kernel takes float32 tensors. Numba's are taken on the CPU, and Triton's on GPUs of compute capability 8.0 and above,
which Triton is made for, where these packages are installed: they are tested against PyTorch's operations, and timed in
whole training steps (benchmarks/). The environment variable TOPK_LOSSES_BACKEND, read at every call, settles it:
`torch` takes no kernel, `numba` and `triton` take theirs and say so where they cannot run. Each is an operator of
PyTorch's, torch.ops.topk_losses.<operation>_<device>, so that torch.compile calls it too.
"""

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from topk_losses.checks import is_ordinary

VARIABLE = "TOPK_LOSSES_BACKEND"
TABLE = {
    ("carry_mass", "cpu"): "cpu_networks",  # a relaxed network for the true class
    ("largest", "cpu"): "cpu_largest",  # the m largest scores
    ("kth_largest", "cpu"): "cpu_smooth",  # the smooth k-th largest score
    ("masks", "cpu"): "cpu_masks",  # with a threshold or a soft rank
    ("sinkhorn", "cpu"): "cpu_sinkhorn",  # SinkhornSort for the true class
    ("carry_mass", "cuda"): "cuda",
    ("kth_largest", "cuda"): "cuda_smooth",
    ("masks", "cuda"): "cuda_masks",
    ("middles", "cuda"): "cuda_masks",  # the same with the middle of two ranks
    ("sinkhorn", "cuda"): "cuda_sinkhorn",
}
# Kernels that have not run on a GPU yet, and the most classes they take: for those who set TOPK_LOSSES_BACKEND=triton.
UNSEEN = {("kth_largest", "cuda"): 2048, ("sinkhorn", "cuda"): 128}
UNSEEN |= {("masks", "cuda"): 16384, ("middles", "cuda"): 16384}
NETWORK = "Tensor comparators, SymInt[] layer_sizes, SymInt k, str distribution, float? art_lambda"
ARGUMENTS = {
    "carry_mass": f"Tensor scores, Tensor target, Tensor beta, {NETWORK}",
    "largest": "Tensor scores, SymInt m",
    "kth_largest": "Tensor scores, Tensor labels, SymInt[] ks, Tensor temperature, bool softmax",
    **dict.fromkeys(
        ("masks", "middles"), "Tensor scores, Tensor labels, Tensor beta, SymInt[] ks, str family, bool softmax"
    ),
    "sinkhorn": "Tensor scores, Tensor labels, Tensor beta, SymInt k, float tolerance, SymInt max_iterations",
}
PACKAGES = {"cpu": "numba", "cuda": "triton"}


@functools.cache
def is_installed(package: str) -> bool:
    """Whether a package can be imported; it isn't imported for that."""
    return importlib.util.find_spec(package) is not None


def device_of_kernels(device: torch.device) -> str:
    """Whose kernels a tensor on `device` gets: "cpu", "cuda", or "" for none.

    Raises ValueError for a TOPK_LOSSES_BACKEND that does not exist, or that cannot run there.
    """
    backend = os.environ.get(VARIABLE, "")
    if backend not in ("", "torch", *PACKAGES.values()):
        raise ValueError(f"{VARIABLE} must be torch, numba or triton, or unset to choose by device; got {backend!r}")
    if backend == "torch":
        return ""
    if not backend:
        package = PACKAGES.get(device.type)
        if not package or not is_installed(package):
            return ""
        return "" if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0) else device.type
    wanted = "cpu" if backend == "numba" else "cuda"
    interpreted = backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != wanted and not (interpreted and device.type == "cpu"):
        hint = ", or set TRITON_INTERPRET=1 to interpret the kernels, slowly" if backend == "triton" else ""
        raise ValueError(f"{VARIABLE}={backend} needs tensors on {wanted}, got {device.type}; unset it{hint}")
    if not is_installed(backend):
        raise ValueError(f"{VARIABLE}={backend} needs the package {backend}; install it, or unset {VARIABLE}")
    return wanted


def _name(operation: str, device: torch.device, n: int) -> str:
    """The name of the kernel for an operation on n scores on a device, which is loaded; "" where there is none."""
    kind = device_of_kernels(device)
    most = UNSEEN.get((operation, kind))
    if (operation, kind) not in TABLE or (most and (os.environ.get(VARIABLE) != "triton" or n > most)):
        return ""
    importlib.import_module(f"topk_losses.kernels.{TABLE[operation, kind]}")
    return f"{operation}_{kind}"


# As torch.compiler.assume_constant_result marks it, which imports the compiler, a second, for those who do not compile.
_name._dynamo_marked_constant = True  # type: ignore[attr-defined]


def kernel(operation: str, scores: Tensor, *settings: float | Tensor) -> Callable[..., Any] | None:
    """The kernel for an operation on `scores`, or None where PyTorch's operations shall compute it.

    They do for all but ordinary float32 tensors, and for settings that want a gradient: kernels know theirs alone.
    """
    if scores.dtype != torch.float32 or not is_ordinary(scores):
        return None
    if any(isinstance(each, Tensor) and each.requires_grad for each in settings):
        return None
    name = _name(operation, scores.device, scores.shape[-1])
    if not name:
        return None
    return getattr(torch.ops.topk_losses, name) if torch.compiler.is_compiling() else _eager[name]


_eager: dict[str, Callable[..., Any]] = {}  # the kernels that are loaded, as they are called without a compiler


def register(
    operation: str, device: str, outputs: Callable[..., list[Tensor]], forward: Callable[..., None],
    backward: Callable[..., None] | None = None, operations: Callable[..., list[Tensor]] | None = None,
    results: int = 1,
) -> None:  # fmt: skip
    """Make a kernel an operator of PyTorch's, which is differentiated by its first argument, the scores.

    outputs(*arguments): room for so many results, and for what the backward pass has to know, which
    forward(room, *arguments) fills. backward(gradient of the scores, those of the results, room, *arguments) fills the
    first. operations(*arguments): the results by PyTorch's operations, for second derivatives.
    """
    name, arguments = f"{operation}_{device}", ARGUMENTS[operation]

    def run(*inputs: Any) -> list[Tensor]:
        made = outputs(*inputs)
        forward(made, *inputs)
        return made

    op = torch.library.custom_op(f"topk_losses::{name}", run, mutates_args=(), schema=f"({arguments}) -> Tensor[]")
    op.register_fake(outputs)
    _eager[name] = run
    if backward is None or operations is None:
        return

    def run_back(grads: Sequence[Tensor], made: Sequence[Tensor], *inputs: Any) -> Tensor:
        grad_scores = empty(grads, made, *inputs)
        backward(grad_scores, grads, made, *inputs)
        return grad_scores

    def empty(grads: Sequence[Tensor], made: Sequence[Tensor], scores: Tensor, *others: Any) -> Tensor:
        return torch.empty_like(scores, memory_format=torch.contiguous_format)

    schema = f"(Tensor[] grads, Tensor[] made, {arguments}) -> Tensor"
    back = torch.library.custom_op(f"topk_losses::{name}_backward", run_back, mutates_args=(), schema=schema)
    back.register_fake(empty)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        ctx.others = [None if isinstance(each, Tensor) else each for each in inputs]
        ctx.save_for_backward(*(each if isinstance(each, Tensor) else None for each in inputs), *output)
        ctx.set_materialize_grads(False)

    def gradients(ctx: Any, grads: Sequence[Tensor | None], back: Callable[..., Tensor]) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        inputs = [other if tensor is None else tensor for tensor, other in zip(saved, ctx.others)]
        made = saved[len(inputs) :]
        if torch.is_grad_enabled():  # create_graph: PyTorch's operations know their second derivatives
            copy = inputs[0].view_as(inputs[0])
            found = zip(operations(copy, *inputs[1:]), grads)
            values, of_values = zip(*(pair for pair in found if pair[1] is not None))
            grad_scores = torch.autograd.grad(values, copy, of_values, create_graph=True)[0]
        else:
            first = [torch.zeros_like(each) if grad is None else grad for grad, each in zip(grads[:results], made)]
            grad_scores = back(first, made, *inputs)
        return grad_scores, *(None,) * (len(inputs) - 1)

    op.register_autograd(lambda ctx, grads: gradients(ctx, grads, back), setup_context=setup_context)

    class Eager(torch.autograd.Function):
        """The same without PyTorch's dispatcher, whose Python code costs tenths of a millisecond once a step."""

        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
            output = run(*inputs)
            setup_context(ctx, inputs, output)
            return tuple(output)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            return gradients(ctx, grads, run_back)

    _eager[name] = Eager.apply
