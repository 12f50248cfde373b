"""Which path computes a loss: PyTorch's own operations, or the kernels of triton_*.py (CUDA) and numba_*.py (CPU).

The kernels compute in float32. By default Triton's take float16, bfloat16 and float32 tensors on a CUDA device of
compute capability 8.0 or above, Numba's take float32 tensors on the CPU, each where its package can be imported. The
environment variable TOPK_LOSSES_BACKEND, read at every call, settles it: `torch` never uses a kernel; `triton` and
`numba` use theirs wherever there is one for the settings, and say so where it cannot run (Triton needs its interpreter
on the CPU). float64 and torch.compile always take the torch path.
"""

import functools
import importlib.util
import os

import torch
from torch import Tensor

VARIABLE = "TOPK_LOSSES_BACKEND"
BACKENDS = ("torch", "triton", "numba")
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Limits of the kernels that hold a sample's scores in registers: the scores, and the largest that are taken off one by
# one, each at the cost of one more pass over them.
LONGEST_ROW = 16384
MOST_TAKEN = 64


@functools.cache
def triton_is_installed() -> bool:
    """Whether Triton can be imported; it isn't imported for that."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def numba_is_installed() -> bool:
    """Whether Numba can be imported, likewise."""
    return importlib.util.find_spec("numba") is not None


@functools.cache
def _device_is_supported(device: torch.device) -> bool:
    is_nvidia = device.type == "cuda" and torch.version.hip is None  # ROCm calls its devices cuda too
    return is_nvidia and torch.cuda.get_device_capability(device) >= (8, 0)


def _chosen() -> str:
    """TOPK_LOSSES_BACKEND, "" if unset. Raises ValueError for a name that is none."""
    backend = os.environ.get(VARIABLE, "")
    if backend not in ("", *BACKENDS):
        allowed = ", ".join(BACKENDS)
        raise ValueError(f"{VARIABLE} must be one of {allowed}, or unset to choose by the device; got {backend!r}")
    return backend


def use_triton(scores: Tensor) -> bool:
    """Whether a Triton kernel shall take `scores`, a floating-point tensor, rather than the torch path.

    Raises ValueError for a TOPK_LOSSES_BACKEND that does not exist, RuntimeError where it asks for kernels that cannot
    run: Triton is not installed, or the tensor is neither on CUDA nor, for the interpreter, on the CPU.
    """
    if torch.compiler.is_compiling():  # the compiler fuses the torch path, and knows nothing of these kernels
        return False
    backend = _chosen()
    if backend in ("torch", "numba") or scores.dtype not in KERNEL_DTYPES:
        return False
    if not backend:
        return scores.is_cuda and triton_is_installed() and _device_is_supported(scores.device)
    if not triton_is_installed():
        raise RuntimeError(f"{VARIABLE}=triton needs the package triton; install it, or unset {VARIABLE}")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not (scores.is_cuda or (scores.device.type == "cpu" and interpreted)):
        raise RuntimeError(
            f"{VARIABLE}=triton needs tensors on a CUDA device, got {scores.device}; move them there, unset "
            f"{VARIABLE}, or set TRITON_INTERPRET=1 before Python starts, to run the kernels slowly on the CPU"
        )
    return True


def use_numba(scores: Tensor) -> bool:
    """Whether a kernel compiled by Numba shall take `scores`, a floating-point tensor; errors as for use_triton."""
    if torch.compiler.is_compiling():
        return False
    backend = _chosen()
    if backend in ("torch", "triton") or scores.dtype != torch.float32:
        return False
    if not backend:
        return scores.device.type == "cpu" and numba_is_installed()
    if not numba_is_installed():
        raise RuntimeError(f"{VARIABLE}=numba needs the package numba; install it, or unset {VARIABLE}")
    if scores.device.type != "cpu":
        raise RuntimeError(f"{VARIABLE}=numba needs tensors on the CPU, got {scores.device}; unset {VARIABLE}")
    return True


def check_backend(device: torch.device) -> None:
    """Raise ValueError for a TOPK_LOSSES_BACKEND that does not exist or cannot run on the device."""
    if not _chosen():
        return
    scores = torch.empty(0, device=device)
    try:
        use_triton(scores)
        use_numba(scores)
    except RuntimeError as error:
        raise ValueError(str(error)) from None
