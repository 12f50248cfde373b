"""Conditions on numbers that hold in compiled code and under torch.func, too.

Eager code on a CPU reads the numbers, and its message says which of them is wrong. Where they cannot be read before the
code runs, one operation raises the error when it does. No number is read on a GPU, which would have to be waited for.
"""

from typing import Protocol

import torch
from torch import Tensor

from topk_losses.compilers import is_wrapped
from topk_losses.kernels.registrar import register_loop


class Context(Protocol):
    """Nothing is kept for the backward pass."""


class Info(Protocol):
    """What torch.func.vmap says of a call."""

    batch_size: int


class Require(torch.autograd.Function):
    """The tensor itself where all of `fits` are True; else a ValueError with the message."""

    @staticmethod
    def forward(tensor: Tensor, fits: Tensor, message: str) -> Tensor:
        if not bool(fits.all()):
            raise ValueError(message)
        return tensor.clone()  # PyTorch takes no operation that returns its argument

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None

    @staticmethod
    def vmap(
        info: Info, in_dims: tuple[int | None, ...], tensor: Tensor, fits: Tensor, message: str
    ) -> tuple[Tensor, int | None]:
        required: Tensor = Require.apply(tensor, fits, message)
        return required, in_dims[0]


def allocate_required(tensor: Tensor, fits: Tensor, message: str) -> Tensor:
    """Allocate a copy of the tensor."""
    return torch.empty_like(tensor)


require_in_graph = register_loop("require", Require, allocate_required)


def is_checked_later(*tensors: Tensor) -> bool:
    """Tell whether numbers cannot be read now, but when the code runs: on a CPU, compiled or under torch.func."""
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return False
    return torch.compiler.is_compiling() or any(map(is_wrapped, tensors))


def require(tensor: Tensor, fits: Tensor, message: str) -> Tensor:
    """Return the tensor, which is_checked_later; once it is computed, raise ValueError unless all of `fits` are True.

    The result has to be used: a compiler leaves out what is not.
    """
    return require_in_graph(tensor, fits, message)
