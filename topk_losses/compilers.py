"""What the library asks of PyTorch's compiler, of torch.func and of autocast: nothing here computes a number.

PyTorch has no public function for some of these questions. The private names were tried on PyTorch 2.11 and 2.14.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

Function = TypeVar("Function", bound=Callable[..., object])


def is_wrapped(tensor: Tensor) -> bool:
    """Tell whether torch.func transforms this tensor: vmap, grad and their like."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def is_transforming() -> bool:
    """Tell whether torch.func is at work, which takes no autograd function that it cannot transform."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def has_own_dispatch(tensor: Tensor) -> bool:
    """Tell whether a tensor's class computes its operations itself, as fake and distributed tensors do."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def is_ordinary(tensor: Tensor) -> bool:
    """Tell whether a tensor holds numbers of its own, or is a compiler's: neither of torch.func nor fake.

    A subclass of Tensor that leaves the operations to PyTorch is ordinary.
    """
    if torch.compiler.is_compiling():
        return True
    return not has_own_dispatch(tensor) and not is_wrapped(tensor)


def has_known_values(tensor: Tensor) -> bool:
    """Tell whether a tensor's numbers can be read without waiting for a device or breaking a compiler's graph."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling() and is_ordinary(tensor)


def refuse_forward_mode() -> None:
    """Raise NotImplementedError within torch.func.jvp, jacfwd or hessian, or a dual level of torch.autograd."""
    if forward_ad._current_level >= 0:
        raise NotImplementedError(
            "topk_losses has no forward-mode derivatives (torch.func.jvp, jacfwd, hessian): use reverse mode, "
            "torch.func.grad or jacrev; for a Hessian jacrev(jacrev(...))"
        )


def mark_static(tensor: Tensor) -> Tensor:
    """Let torch.compile take a constant's shape as fixed: with dynamic shapes it may take it for the batch size.

    What torch._dynamo.mark_static does, without importing the compiler, which takes a second.
    """
    tensor._dynamo_static_indices = set(range(tensor.dim()))  # type: ignore[attr-defined]
    return tensor


def mark_constant(function: Function) -> Function:
    """Let torch.compile call a function while it traces, and take the result as a constant.

    What torch.compiler.assume_constant_result does. That function would import the compiler, which takes a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@contextlib.contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Make tensors that serve every later call, though this one may be for inference or an export with fake tensors."""
    with torch.inference_mode(False), _disable_current_modes():
        yield


def full_precision(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Switch autocast off: no matrix product within the library runs in half precision."""
    if device.type == "meta":  # which knows no autocast
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)
