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

from topk_losses.checks import is_ordinary, is_transforming

VARIABLE = "TOPK_LOSSES_BACKEND"
DEVICES = {"numba": "cpu", "triton": "cuda"}
Kernel = Callable[..., list[Tensor]]
KERNELS: dict[str, Kernel] = {}  # by operation and device, from these modules once they are imported
MODULES = {
    "carry_mass_cpu": "cpu_networks",
    "carry_mass_cuda": "cuda_networks",
    "sinkhorn_cpu": "cpu_sinkhorn",
    "kth_largest_cpu": "cpu_smooth",
}


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


def _load(operation: str, device: torch.device) -> str:
    """Import the kernel of an operation, and return its name; "" where there is none."""
    name = f"{operation}_{DEVICES.get(backend_for(device))}"
    if name in MODULES:
        importlib.import_module(f"topk_losses.kernels.{MODULES[name]}")
    return name if name in MODULES else ""


# What torch.compiler.assume_constant_result does. That function would import the compiler, which takes a second.
_load._dynamo_marked_constant = True  # type: ignore[attr-defined]


def find_kernel(operation: str, scores: Tensor, *settings: object) -> Kernel | None:
    """Return the kernel of networks.carry_mass, transport.sinkhorn or smooth_svm.kth_largest, by that name.

    None where eager PyTorch is to compute it: kernels have a derivative by the scores alone, and none of torch.func.
    """
    tensors = [value for value in settings if isinstance(value, Tensor)]
    is_constant = not any(tensor.requires_grad for tensor in tensors)
    if scores.dtype != torch.float32 or not is_constant or is_transforming() or not is_ordinary(scores):
        return None
    name = _load(operation, scores.device)
    if torch.compiler.is_compiling():
        return getattr(torch.ops.topk_losses, name) if name else None
    return KERNELS.get(name)
