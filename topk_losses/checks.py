"""The error messages of the library: each names the rule, the value received and the repair."""

import contextlib
import difflib
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from functools import partial
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

AUTO = "auto"  # the inverse temperature that follows the logits
PK = int | Mapping[int, float] | Sequence[float] | Tensor  # the forms of P_K, see check_p_k


def is_wrapped(tensor: Tensor) -> bool:
    """Whether torch.func transforms this tensor: vmap, grad and their like."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def is_transforming() -> bool:
    """Whether torch.func is at work, which takes no autograd function that it cannot transform."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def is_ordinary(tensor: Tensor) -> bool:
    """Whether a tensor is an ordinary one, or a compiler's: neither of torch.func nor fake."""
    if torch.compiler.is_compiling():
        return True
    return type(tensor) in (Tensor, nn.Parameter) and not is_wrapped(tensor)


def has_known_values(tensor: Tensor) -> bool:
    """Whether a tensor's numbers can be read without waiting for a device or breaking a compiler's graph."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling() and is_ordinary(tensor)


def as_operator(name: str, function: type[torch.autograd.Function], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Return what applies a torch.autograd.Function whose forward pass is a loop, which a compiler would unroll.

    On the CPU, where the loop ends early, a compiler meets one operator in its place, torch.ops.topk_losses.<name>.
    fake(*arguments) allocates the results.
    """
    op = torch.library.custom_op(f"topk_losses::{name}", function.forward, mutates_args=())
    op.register_fake(fake)
    op.register_autograd(function.backward, setup_context=function.setup_context)

    def apply(first: Tensor, *others: Any) -> Any:
        is_op = torch.compiler.is_compiling() and first.device.type == "cpu"
        return op(first, *others) if is_op else function.apply(first, *others)

    return apply


def refuse_forward_mode() -> None:
    """Raise NotImplementedError within torch.func.jvp, jacfwd or hessian, or a dual level of torch.autograd."""
    if forward_ad._current_level >= 0:
        raise NotImplementedError(
            "topk_losses has no forward-mode derivatives (torch.func.jvp, jacfwd, hessian): use reverse mode, "
            "torch.func.grad or jacrev; for a Hessian jacrev(jacrev(...))"
        )


def static(tensor: Tensor) -> Tensor:
    """Let torch.compile take a constant's shape as fixed: with dynamic shapes it may take it for the batch size.

    What torch._dynamo.mark_static does, without importing the compiler, which takes a second.
    """
    tensor._dynamo_static_indices = set(range(tensor.dim()))  # type: ignore[attr-defined]
    return tensor


def full_precision(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Autocast switched off: no matrix product within the library runs in half precision."""
    if device.type == "meta":  # which knows no autocast
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def check_choice(kind: str, name: str, choices: Iterable[str]) -> str:
    """Return `name` if it is one of `choices`; else raise ValueError, naming the nearest choice."""
    choices = tuple(choices)
    if name in choices:
        return name
    nearest = difflib.get_close_matches(str(name), choices, n=1, cutoff=0.4)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
    raise ValueError(f"unknown {kind} {name!r}{hint} Choose one of: {', '.join(choices)}")


def _made(make: Callable[[Any], Any], value: Any, rule: str) -> Any:
    """Return make(value); raise ValueError with the rule and the value where Python or PyTorch cannot."""
    try:
        return make(value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{rule}, got {value!r}") from None


def check_number(name: str, value: float, rule: str, fits: Callable[[float], bool]) -> float:
    """Return `value` as a float; raise ValueError with the rule unless it fits."""
    value = _made(float, value, f"{name} must be a number")
    if not fits(value):
        raise ValueError(f"{name} must {rule}, got {value:g}")
    return value


def check_positive(name: str, value: float) -> float:
    """Return `value` as a float; raise ValueError unless it is finite and above zero."""
    return check_number(name, value, "be a finite number above 0", lambda number: 0 < number < math.inf)


def check_not_negative(name: str, value: float) -> float:
    """Return `value` as a float; raise ValueError unless it is finite and at least zero."""
    return check_number(name, value, "be a finite number >= 0", lambda number: 0 <= number < math.inf)


def check_fraction(name: str, value: float) -> float:
    """Return `value` as a float in [0, 1); raise ValueError for another."""
    return check_number(name, value, "lie in [0, 1)", lambda number: 0 <= number < 1)


def check_inverse_temperature(value: Any, name: str = "inverse_temperature") -> float | Tensor:
    """Return a float above 0, or a tensor () above 0 as it is, which is learned or scheduled; raise ValueError else."""
    if isinstance(value, str):
        raise ValueError(
            f'{name} must be a number above 0, a tensor, or for a loss "auto", which follows its logits: got {value!r}'
        )
    if not isinstance(value, Tensor):
        return check_positive(name, value)
    if value.dim() != 0 or not value.is_floating_point():
        raise ValueError(
            f"{name} as a tensor must hold one floating-point number, of shape (), "
            f"got {value.dtype} of shape {tuple(value.shape)}"
        )
    if has_known_values(value):
        check_positive(name, float(value.detach()))
    return value


def check_per_class(name: str, value: Any, num_classes: int | None, or_zero: bool) -> Tensor:
    """Return a tensor (n,) of finite numbers above 0, or 0, one per class; raise ValueError for anything else."""
    least = ">= 0" if or_zero else "above 0"
    rule = f"{name} must hold a finite number {least} for each of the {num_classes or 'n'} classes"
    numbers = _made(torch.as_tensor, value, rule).detach()
    fits = numbers.dim() == 1 and len(numbers) == (num_classes or len(numbers))
    if fits and has_known_values(numbers):
        fits = bool(((numbers >= 0 if or_zero else numbers > 0) & numbers.isfinite()).all())
    if not fits:
        raise ValueError(f"{rule}, got {numbers.tolist() if numbers.numel() < 20 else tuple(numbers.shape)}")
    return numbers


def check_integer(name: str, value: SupportsIndex, least: int, n: int | None = None) -> int:
    """Return `value` as an int (NumPy's are taken); raise ValueError unless it lies in [least, n] (None: unknown)."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or (n is not None and number > n):
        allowed = f"of at least {least}" if n is None else f"between {least} and the number of scores {n=}"
        raise ValueError(f"{name} must be an integer {allowed}, got {value!r}")
    return number


def check_k(k: SupportsIndex, n: int | None = None) -> int:
    """Return `k` as an int; raise ValueError unless 1 <= k <= n (n None: unknown)."""
    return check_integer("k", k, 1, n)


def check_several(name: str, value: SupportsIndex | None) -> int | None:
    """Return a number of classes or scores as an int, or None; raise ValueError below 2."""
    return None if value is None else check_integer(name, value, 2)


def check_p_k(p_k: PK, num_classes: int | None = None, num_scores: int | None = None) -> Tensor:
    """Return P_K, of any form of PK, as a float64 tensor (K,) or (num_classes, K), without trailing zeros.

    Its rows are scaled to sum to 1. Raises ValueError for what is no P_K, or has mass on a rank beyond num_scores.
    """
    if isinstance(p_k, SupportsIndex) and not isinstance(p_k, Sized):
        p_k = {check_integer("p_k as a single k", p_k, 1): 1.0}
    if isinstance(p_k, Mapping):
        share_of = {check_k(k): _made(float, share, f"P_K({k}) must be a number") for k, share in p_k.items()}
        p_k = [share_of.get(k, 0.0) for k in range(1, max(share_of, default=0) + 1)]
    rule = "p_k must be P_K(1), P_K(2), ... as numbers, one such row per class, a mapping {k: P_K(k)} or a single k"
    rows = _made(partial(torch.as_tensor, dtype=torch.float64, device="cpu"), p_k, rule).detach()
    if rows.dim() not in (1, 2) or rows.numel() == 0:
        raise ValueError(f"p_k must have shape (K,) or (num_classes, K) with K >= 1, got shape {tuple(rows.shape)}")
    if rows.dim() == 2 and num_classes is not None and rows.shape[0] != num_classes:
        raise ValueError(
            f"p_k with one row per class must have num_classes={num_classes} rows, got {rows.shape[0]}; "
            "for one row per sample pass p_k to forward instead"
        )
    flat = rows.reshape(-1, rows.shape[-1])  # (1 or num_classes, K)
    sums = flat.sum(1)
    wrong = ~((flat >= 0).all(1) & ((sums - 1).abs() < 1e-4))  # the tolerance of difftopk; true for NaN
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0])
        where = "" if rows.dim() == 1 else f" in row {first}"
        shown = ", ".join(f"{p:g}" for p in flat[first].tolist())
        raise ValueError(f"p_k must be non-negative and sum to 1, got [{shown}] (sum {sums[first]:g}){where}")
    K = int((flat > 0).any(0).nonzero().max()) + 1
    if num_scores is not None and num_scores < K:
        few = f"only {num_scores} scores are sorted (m, or the number of classes without m)"
        raise ValueError(f"p_k has mass on rank {K}, but {few}; take ranks away from p_k, or raise m")
    scaled = flat[:, :K] / sums.unsqueeze(1)
    return scaled if rows.dim() == 2 else scaled[0].clone()  # no view, whose base torch.compile would look at


def check_logits(logits: Tensor) -> None:
    """Raise TypeError or ValueError unless `logits` is a floating-point tensor with a dimension for classes."""
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        is_tensor = isinstance(logits, Tensor)
        kind, how = (logits.dtype, "logits.float()") if is_tensor else (type(logits).__name__, "torch.as_tensor")
        raise TypeError(f"logits must be a floating-point tensor, got {kind}; convert with {how}")
    if logits.dim() == 0:
        raise ValueError("logits must have a dimension for the classes, got a tensor of shape ()")
    refuse_forward_mode()


def check_labels(labels: Tensor, shape: Sequence[int], num_classes: int, ignore_index: int | None = None) -> None:
    """Raise unless `labels` are int64 classes of a shape, in [0, num_classes) or equal to ignore_index.

    Values are looked at where that costs no wait. Elsewhere, on CUDA say, the gather of the true class's score raises
    PyTorch's own error.
    """
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels must be a tensor, got {type(labels).__name__}; convert with torch.as_tensor")
    got, hint = tuple(labels.shape), ""
    extra = [d for d in range(len(got)) if got[d] == 1 and got[:d] + got[d + 1 :] == tuple(shape)]
    if extra:
        hint = f"; take the extra dimension out with labels.squeeze({extra[-1]})"
    elif labels.dim() > len(shape) and num_classes in got:
        hint = "; a column per class is a distribution (labels.float()) or, with soft_labels='any', a set of answers"
    if labels.dtype != torch.int64:
        hint = hint or "; convert with labels.long()"
        raise TypeError(f"labels must be int64 class indices, got {labels.dtype} of shape {got}{hint}")
    if got != tuple(shape):
        without = "that of the logits without the classes"
        raise ValueError(f"labels must have shape {tuple(shape)}, {without}, got {got}{hint}")
    if has_known_values(labels) and labels.numel():
        flat = labels.flatten()
        wrong = (flat < 0) | (flat >= num_classes)
        if ignore_index is not None:
            wrong &= flat != ignore_index
        if bool(wrong.any()):
            first = int(wrong.nonzero()[0])
            allowed = f"[0, {num_classes - 1}]" + ("" if ignore_index is None else f" or equal {ignore_index=}")
            raise ValueError(f"labels must lie in {allowed}, got {int(flat[first])} at position {first}")


def check_label_masses(labels: Tensor, logits: Tensor, axis: int, several: bool) -> None:
    """Raise ValueError unless `labels` (like logits) are distributions over the classes or, if `several`, sets."""
    if labels.shape != logits.shape:
        raise ValueError(
            f"labels that name several classes must have the shape of the logits {tuple(logits.shape)}, "
            f"got {tuple(labels.shape)}; for class indices convert with labels.long()"
        )
    if not has_known_values(labels) or not labels.numel():
        return
    rows = labels.movedim(axis, -1).reshape(-1, labels.shape[axis]).double()
    totals, fits = rows.sum(1), (rows >= 0).all(1)  # (rows,) each
    if several:
        fits &= (rows <= 1).all(1) & (totals > 0)
        rule = "sets of right answers must have entries in [0, 1], at least one of them above 0"
    else:
        fits &= (totals - 1).abs() <= 2e-2  # half-precision labels sum to 1 within that
        rule = "labels that are distributions must be non-negative and sum to 1 "
        rule += "(for sets of right answers, k-hot say, build the loss with soft_labels='any')"
    if not bool(fits.all()):
        first = int((~fits).nonzero()[0])
        raise ValueError(f"{rule}; got a sum of {float(totals[first]):g} in row {first}")
