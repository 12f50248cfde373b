"""Kernels that compute what eager PyTorch computes, but faster: Numba on the CPU, Triton on CUDA. float32 only.

They run where their package is installed, on CUDA from compute capability 8.0 on, which Triton is made for. The
environment variable TOPK_LOSSES_BACKEND, read at every call, overrides this choice: with `torch` no kernel runs; with
`numba` or `triton` a tensor on the wrong device is an error.
"""

import functools
import importlib.util
import os
from collections.abc import Callable

import torch
from torch import Tensor

from topk_losses.checks import is_ordinary

VARIABLE = "TOPK_LOSSES_BACKEND"
DEVICES = {"numba": "cpu", "triton": "cuda"}
Kernel = Callable[..., list[Tensor]]


@functools.cache
def is_installed(package: str) -> bool:
    """Tell whether a package can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


def backend_for(device: torch.device) -> str:
    """Choose what computes on a device: "numba", "triton" or "torch".

    Raises:
        ValueError: TOPK_LOSSES_BACKEND is none of these, or cannot run on `device`.
    """
    backend, kind = os.environ.get(VARIABLE, ""), device.type
    if backend not in ("", "torch", *DEVICES):
        raise ValueError(f"{VARIABLE} must be torch, numba or triton, or unset to choose by device; got {backend!r}")
    if backend == "torch":
        return backend
    if not backend:
        if kind == "cpu" and is_installed("numba"):
            return "numba"
        if kind == "cuda" and is_installed("triton") and torch.cuda.get_device_capability(device) >= (8, 0):
            return "triton"
        return "torch"
    is_interpreted = backend == "triton" and kind == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if kind != DEVICES[backend] and not is_interpreted:
        hint = ", or set TRITON_INTERPRET=1 to interpret the kernels, slowly" if backend == "triton" else ""
        raise ValueError(f"{VARIABLE}={backend} needs tensors on {DEVICES[backend]}, got {kind}; unset it{hint}")
    if not is_installed(backend):
        raise ValueError(f"{VARIABLE}={backend} needs the package {backend}; install it, or unset {VARIABLE}")
    return backend


# What torch.compiler.assume_constant_result does. That function would import the compiler, which takes a second.
backend_for._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _choose(scores: Tensor, settings: tuple[object, ...]) -> str:
    """Choose the backend for an operation: kernels have a derivative by the scores alone, and none of torch.func."""
    tensors = [value for value in settings if isinstance(value, Tensor)]
    is_constant = not any(tensor.requires_grad for tensor in tensors)
    if scores.dtype == torch.float32 and is_constant and all(map(is_ordinary, (scores, *tensors))):
        return backend_for(scores.device)
    return "torch"


def network_kernel(scores: Tensor, *settings: object) -> Kernel | None:
    """Return the kernel of networks.carry_mass, or None where eager PyTorch is to compute it."""
    backend = _choose(scores, settings)
    if backend == "numba":
        from topk_losses.kernels.cpu_networks import carry_mass
    elif backend == "triton":
        from topk_losses.kernels.cuda_networks import carry_mass
    else:
        return None
    return carry_mass


def sinkhorn_kernel(scores: Tensor, *settings: object) -> Kernel | None:
    """Return the kernel of transport.sinkhorn, or None where eager PyTorch is to compute it."""
    if _choose(scores, settings) != "numba":
        return None
    from topk_losses.kernels.cpu_sinkhorn import sinkhorn

    return sinkhorn


def kth_largest_kernel(scores: Tensor, *settings: object) -> Kernel | None:
    """Return the kernel of smooth_svm.kth_largest, or None where eager PyTorch is to compute it."""
    if _choose(scores, settings) != "numba":
        return None
    from topk_losses.kernels.cpu_smooth import kth_largest

    return kth_largest
