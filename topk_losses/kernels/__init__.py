"""Kernels that compute what PyTorch's operations compute, faster: one table, asked in one place.

A kernel takes float32 tensors. Numba's are taken on the CPU, and Triton's on GPUs of compute capability 8.0 and above,
which Triton is made for, where these packages are installed: they are tested against PyTorch's operations, and timed in
whole training steps (benchmarks/). The environment variable TOPK_LOSSES_BACKEND, read at every call, settles it:
`torch` takes no kernel, `numba` and `triton` take theirs and say so where they cannot run.
"""

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from topk_losses.checks import is_concrete

VARIABLE = "TOPK_LOSSES_BACKEND"
TABLE = {
    ("carry_mass", "cpu"): "topk_losses.kernels.cpu_networks",  # a relaxed network for the true class
    ("largest", "cpu"): "topk_losses.kernels.cpu_largest",  # the m largest scores
    ("kth_largest", "cpu"): "topk_losses.kernels.cpu_smooth",  # the smooth k-th largest score
    ("arguments", "cpu"): "topk_losses.kernels.cpu_masks",  # of masks with a threshold or a soft rank
    ("carry_mass", "cuda"): "topk_losses.kernels.cuda",
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


def kernel(operation: str, scores: Tensor, *settings: float | Tensor) -> Callable[..., Any] | None:
    """The kernel for an operation on `scores`, or None where PyTorch's operations shall compute it.

    They do for all but ordinary float32 tensors, and for settings that want a gradient: kernels know theirs alone.
    """
    if scores.dtype != torch.float32 or not is_concrete(scores):
        return None
    if any(isinstance(each, Tensor) and each.requires_grad for each in settings):
        return None
    module = TABLE.get((operation, device_of_kernels(scores.device)))
    return getattr(importlib.import_module(module), operation) if module else None


def gradients(
    operations: Callable[..., Tensor], inputs: tuple[Tensor, Tensor], grad: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of operations(*inputs), with a graph of their own."""
    wanted = [number for number, each in enumerate(inputs) if each.requires_grad]
    copies = [each.view_as(each) if each.requires_grad else each for each in inputs]
    found = torch.autograd.grad(operations(*copies), [copies[i] for i in wanted], grad, create_graph=True)
    by_number = dict(zip(wanted, found))
    return by_number.get(0), by_number.get(1)
