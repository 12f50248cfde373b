"""Kernels that compute what eager PyTorch computes, but faster: Numba on the CPU, Triton on CUDA. float32 only.

They run where their package can be imported, on CUDA from compute capability 8.0 on, which Triton is made for. The
environment variable TOPK_LOSSES_BACKEND, read at every call, overrides this choice: with `torch` no kernel runs; with
`numba` or `triton` a tensor on the wrong device is an error.
"""

import functools
import importlib
import importlib.util
import os
import warnings

import torch
from torch import Tensor

from topk_losses.compilers import is_ordinary, is_transforming, mark_constant
from topk_losses.kernels.registrar import KERNELS, NAMESPACE, Argument, Compute

VARIABLE = "TOPK_LOSSES_BACKEND"
DEVICES = {"numba": "cpu", "triton": "cuda"}
MODULES = {
    ("carry_mass", "numba"): "cpu_networks",
    ("carry_mass", "triton"): "cuda_networks",
    ("sinkhorn", "numba"): "cpu_sinkhorn",
    ("kth_largest", "numba"): "cpu_smooth",
}


@functools.cache
def is_importable(package: str) -> bool:
    """Tell whether a package can be imported; warn where it is installed and its import fails."""
    if importlib.util.find_spec(package) is None:
        return False
    try:
        importlib.import_module(package)
    except Exception as error:  # a version that does not fit NumPy's raises ImportError, SystemError or AttributeError
        message = f"{package} is installed, but its import fails: {error}. PyTorch computes in its place, more slowly"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return False
    return True


def backend_for(device: torch.device) -> str:
    """Choose what computes on a device: "numba", "triton" or "torch".

    Raises:
        ValueError: TOPK_LOSSES_BACKEND is none of these, or cannot run on `device`.
    """
    backend = os.environ.get(VARIABLE, "")
    if backend not in ("", "torch", *DEVICES):
        raise ValueError(f"{VARIABLE} must be torch, numba or triton, or unset to choose by device; got {backend!r}")
    if backend == "torch":
        return backend
    if not backend:
        return default_backend(device)
    check_backend(backend, device)
    return backend


def default_backend(device: torch.device) -> str:
    """Choose a backend by what the device can run and what can be imported."""
    if device.type == "cpu" and is_importable("numba"):
        return "numba"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0) and is_importable("triton"):
        return "triton"
    return "torch"


def check_backend(backend: str, device: torch.device) -> None:
    """Raise ValueError where a backend that was asked for cannot run on a device."""
    is_interpreted = backend == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != DEVICES[backend] and not is_interpreted:
        hint = ""
        if backend == "triton":
            hint = ", or set TRITON_INTERPRET=1 to interpret the kernels, slowly"
        raise ValueError(f"{VARIABLE}={backend} needs tensors on {DEVICES[backend]}, got {device.type}; unset it{hint}")
    if not is_importable(backend):
        raise ValueError(f"{VARIABLE}={backend} needs the package {backend}; install it, or unset {VARIABLE}")


@mark_constant
def load_kernel(operation: str, device: torch.device) -> str:
    """Import the kernel of an operation on a device, and return its name; "" where there is none."""
    backend = backend_for(device)
    module = MODULES.get((operation, backend))
    if module is None:
        return ""
    importlib.import_module(f"{__name__}.{module}")
    return f"{operation}_{DEVICES[backend]}"


def find_kernel(operation: str, scores: Tensor, *settings: Argument) -> Compute | None:
    """Return the kernel of networks.carry_mass, transport.sinkhorn or smooth_svm.kth_largest, by that name.

    None where eager PyTorch is to compute it: kernels have a derivative by the scores alone, and none of torch.func.
    """
    if scores.dtype != torch.float32 or is_transforming() or not is_ordinary(scores):
        return None
    for setting in settings:
        if isinstance(setting, Tensor) and setting.requires_grad:
            return None
    name = load_kernel(operation, scores.device)
    if not name:
        return None
    if torch.compiler.is_compiling():
        kernel: Compute = getattr(getattr(torch.ops, NAMESPACE), name)
        return kernel
    return KERNELS[name]
