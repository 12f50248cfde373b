"""The error messages of the library: each names the rule, the value received and the repair."""

import difflib
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from functools import partial
from typing import Generic, SupportsFloat, SupportsIndex, TypeVar, overload

import torch
from torch import Tensor
from typing_extensions import Self

from topk_losses.compilers import has_known_values, refuse_forward_mode
from topk_losses.conditions import is_checked_later, require

AUTO = "auto"  # the inverse temperature that follows the logits
PK = int | Mapping[int, float] | Sequence[float] | Tensor  # the forms of P_K, see check_p_k
Made = TypeVar("Made")
Given = TypeVar("Given", contravariant=True)
Kept = TypeVar("Kept", covariant=True)
TOLERANCE_OF_P_K = 1e-4  # of the sum of a row: that of difftopk
TOLERANCE_OF_LABELS = 2e-2  # half-precision labels sum to 1 within that
# Constants that are given as Python's numbers are kept in float64, for float64 logits; Apple's devices have none.
KEPT_DTYPE = torch.float32 if torch.backends.mps.is_available() else torch.float64
SHOWN = 20  # numbers of a tensor that a message shows


class Checked(Generic[Given, Kept]):
    """An attribute that is checked whenever it is assigned, and keeps what the check returns.

    Args:
        check: check(name, value) returns the value to keep, or raises an error that has the name.
    """

    def __init__(self, check: Callable[[str, Given], Kept]) -> None:
        self.check = check

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type) -> Kept: ...

    def __get__(self, instance: object | None, owner: type) -> Self | Kept:
        if instance is None:
            return self
        if self.name not in vars(instance):
            raise AttributeError(f"{self.name} is not set yet")
        kept: Kept = vars(instance)[self.name]
        return kept

    def __set__(self, instance: object, value: Given) -> None:
        vars(instance)[self.name] = self.check(self.name, value)


def nearest_choice(name: str, choices: Sequence[str], cutoff: float, abbreviations: Mapping[str, str]) -> str:
    """Return the choice that a name abbreviates, else the one that is spelled most like it; "" if none is alike."""
    meant = abbreviations.get(name.lower(), "")
    if meant in choices:
        return meant
    return "".join(difflib.get_close_matches(name, choices, n=1, cutoff=cutoff))


def check_choice(kind: str, name: str, choices: Iterable[str], abbreviations: Mapping[str, str] | None = None) -> str:
    """Return `name` if it is one of `choices`; else raise ValueError, naming the choice that may be meant."""
    choices = tuple(choices)
    if name in choices:
        return name
    nearest = nearest_choice(str(name), choices, 0.4, abbreviations or {})
    hint = "."
    if nearest:
        hint = f"; did you mean {nearest!r}?"
    raise ValueError(f"unknown {kind} {name!r}{hint} Choose one of: {', '.join(choices)}")


def made(make: Callable[..., Made], value: object, rule: str) -> Made:
    """Return make(value); raise ValueError with the rule and the value where Python or PyTorch cannot."""
    try:
        return make(value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{rule}, got {value!r}") from None


def check_constant(name: str, value: object, hint: str = "") -> None:
    """Raise ValueError for a tensor that requires a gradient, which this setting would not receive."""
    if isinstance(value, Tensor) and value.requires_grad:
        raise ValueError(
            f"{name} is a constant, and a tensor that requires a gradient would not be learned: pass {name}.detach()"
            f"{hint}"
        )


def check_number(
    name: str, value: SupportsFloat | SupportsIndex | str, rule: str, fits: Callable[[float], bool]
) -> float:
    """Return `value` as a float; raise ValueError with the rule unless it fits."""
    check_constant(name, value)
    number = made(float, value, f"{name} must be a number")
    if not fits(number):
        raise ValueError(f"{name} must {rule}, got {number:g}")
    return number


def check_positive(name: str, value: float) -> float:
    """Return `value` as a float; raise ValueError unless it is finite and above zero."""
    return check_number(name, value, "be a finite number above 0", lambda number: 0 < number < math.inf)


def check_not_negative(name: str, value: float) -> float:
    """Return `value` as a float; raise ValueError unless it is finite and at least zero."""
    return check_number(name, value, "be a finite number >= 0", lambda number: 0 <= number < math.inf)


def check_fraction(name: str, value: float) -> float:
    """Return `value` as a float in [0, 1); raise ValueError for another."""
    return check_number(name, value, "lie in [0, 1)", lambda number: 0 <= number < 1)


def check_fraction_or_none(name: str, value: float | None) -> float | None:
    """Return `value` as a float in [0, 1), or None; raise ValueError for another."""
    if value is None:
        return None
    return check_fraction(name, value)


def check_inverse_temperature(value: float | Tensor | str, name: str = "inverse_temperature") -> float | Tensor:
    """Return a float, or a tensor as it is, which is learned or scheduled; raise ValueError unless it is above 0.

    A tensor has one number, of shape () or, as some wrappers of modules need it, (1,).
    """
    if isinstance(value, str):
        raise ValueError(
            f'{name} must be a number above 0 or a tensor; "auto", which follows the logits, is an argument that a '
            f"loss is made with: got {value!r}"
        )
    if not isinstance(value, Tensor):
        return check_positive(name, value)
    if value.shape not in ((), (1,)) or not value.is_floating_point():
        raise ValueError(
            f"{name} as a tensor must hold one floating-point number, of shape () or (1,), "
            f"got {value.dtype} of shape {tuple(value.shape)}"
        )
    if has_known_values(value):
        check_positive(name, float(value.detach()))
    return value


def current_inverse_temperature(value: float | Tensor, name: str = "inverse_temperature") -> float | Tensor:
    """Return the inverse temperature of a call, checked again: training may have brought it to 0 or below."""
    value = check_inverse_temperature(value, name)
    if not isinstance(value, Tensor):
        return value
    value = value.reshape(())
    if is_checked_later(value):
        fits = (value > 0) & value.isfinite()
        return require(value, fits, f"{name} must be a finite number above 0")
    return value


def check_per_class(
    name: str, value: Sequence[float] | Tensor, num_classes: int | None, or_zero: bool = False
) -> Tensor:
    """Return a tensor (n,) of finite numbers above 0, or 0, one per class; raise ValueError for anything else.

    A tensor keeps its type; other values become float64.
    """
    check_constant(name, value)
    least = ">= 0" if or_zero else "above 0"
    rule = f"{name} must hold a finite number {least} for each of the {num_classes or 'n'} classes"
    dtype = None if isinstance(value, Tensor) else KEPT_DTYPE
    numbers = made(partial(torch.as_tensor, dtype=dtype, device=device_of(value)), value, rule)
    fits = numbers.dim() == 1 and len(numbers) == (num_classes or len(numbers))
    if fits and has_known_values(numbers):
        are_large = numbers >= 0 if or_zero else numbers > 0
        fits = bool((are_large & numbers.isfinite()).all())
    if not fits:
        got: object = tuple(numbers.shape)
        if numbers.numel() < SHOWN:
            got = numbers.tolist()
        raise ValueError(f"{rule}, got {got}")
    return numbers


def device_of(value: object) -> torch.device:
    """Return the device of a tensor; the CPU for other values, whatever PyTorch's default device is."""
    if isinstance(value, Tensor):
        return value.device
    return torch.device("cpu")


def check_shape(owner: object, method: str, result: Tensor, shape: Sequence[int]) -> None:
    """Raise ValueError unless what a method of a loss or an operator returned has this shape."""
    if tuple(result.shape) != tuple(shape):
        name = f"{type(owner).__name__}.{method}"
        raise ValueError(f"{name} must return the shape {tuple(shape)}, got {tuple(result.shape)}")


def check_integer(name: str, value: SupportsIndex, least: int, n: int | None = None) -> int:
    """Return `value` as an int (NumPy's are taken); raise ValueError unless it lies in [least, n] (None: unknown)."""
    number = None
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        try:
            number = operator.index(value)
        except TypeError:  # a tensor with several numbers
            number = None
    if number is None or number < least or (n is not None and number > n):
        allowed = f"of at least {least}"
        if n is not None:
            allowed = f"between {least} and the number of scores {n=}"
        raise ValueError(f"{name} must be an integer {allowed}, got {value!r}")
    return number


def check_k(k: SupportsIndex, n: int | None = None) -> int:
    """Return `k` as an int; raise ValueError unless 1 <= k <= n (n None: unknown)."""
    return check_integer("k", k, 1, n)


def check_several(name: str, value: SupportsIndex | None) -> int | None:
    """Return a number of classes or scores as an int, or None; raise ValueError below 2."""
    if value is None:
        return None
    return check_integer(name, value, 2)


def check_p_k(p_k: PK, num_classes: int | None = None, num_scores: int | None = None) -> Tensor:
    """Return P_K, of any form of PK, as a float64 tensor (K,) or (num_classes, K), without trailing zeros.

    Its rows are scaled to sum to 1. Raises ValueError for what is no P_K, has mass on a rank beyond num_scores, or has
    all mass of a row on num_scores, within which every class is.
    """
    check_constant("p_k", p_k, "; P_K of each sample, as an argument of the call, receives a gradient")
    rule = "p_k must be P_K(1), P_K(2), ... as numbers, one such row per class, a mapping {k: P_K(k)} or a single k"
    rows = made(partial(torch.as_tensor, dtype=torch.float64, device="cpu"), weights_of_ranks(p_k), rule)
    if rows.dim() not in (1, 2) or rows.numel() == 0:
        raise ValueError(f"p_k must have shape (K,) or (num_classes, K) with K >= 1, got shape {tuple(rows.shape)}")
    if rows.dim() == 2 and num_classes is not None and rows.shape[0] != num_classes:
        raise ValueError(
            f"p_k with one row per class must have num_classes={num_classes} rows, got {rows.shape[0]}; "
            "for one row per sample pass p_k to forward instead"
        )
    check_distributions_of_ranks(rows)
    flat = rows.reshape(-1, rows.shape[-1])  # (1 or num_classes, K)
    K = int((flat > 0).any(0).nonzero().max()) + 1
    if num_scores is not None and num_scores < K:
        few = f"only {num_scores} scores are sorted (m, or the number of classes without m)"
        raise ValueError(f"p_k has mass on rank {K}, but {few}; take ranks away from p_k, or raise m")
    if num_scores is not None and num_scores > 1 and bool(is_certain(flat, num_scores).any()):
        raise ValueError(about_certain_rank(num_scores))
    scaled = flat[:, :K] / flat.sum(1, keepdim=True)
    return scaled.reshape(*rows.shape[:-1], K)


def is_certain(rows: Tensor, num_scores: int) -> Tensor:
    """Tell which rows of P_K (rows, K) have no mass below rank num_scores, within which every class is: (rows,)."""
    return (rows[:, : num_scores - 1] == 0).all(1)


def about_certain_rank(num_scores: int) -> str:
    return (
        f"p_k has all its mass on rank {num_scores}, but only {num_scores} scores are sorted (m, or the number of "
        "classes without m): all are within that rank, and the loss would be 0; take a lower rank, or raise m"
    )


def weights_of_ranks(p_k: PK) -> Sequence[float] | Tensor:
    """Return P_K(1), P_K(2), ... of a single k or of a mapping {k: P_K(k)}; other forms as they are."""
    if isinstance(p_k, SupportsIndex) and not isinstance(p_k, Sized):
        p_k = {check_integer("p_k as a single k", p_k, 1): 1.0}
    if not isinstance(p_k, Mapping):
        return p_k
    weight_of = {}
    for k, weight in p_k.items():
        weight_of[check_k(k)] = made(float, weight, f"P_K({k}) must be a number")
    highest_k = max(weight_of, default=0)
    return [weight_of.get(k, 0.0) for k in range(1, highest_k + 1)]


def are_distributions(rows: Tensor, tolerance: float) -> Tensor:
    """Tell which rows (..., K) are non-negative and sum to 1; False for NaN."""
    return (rows >= 0).all(-1) & ((rows.sum(-1) - 1).abs() < tolerance)


def check_distributions_of_ranks(rows: Tensor) -> None:
    """Raise ValueError unless rows, (K,) or (rows, K) with known values, are distributions."""
    flat = rows.reshape(-1, rows.shape[-1])
    wrong = ~are_distributions(flat, TOLERANCE_OF_P_K)
    if not bool(wrong.any()):
        return
    first = int(wrong.nonzero()[0])
    where = f" in row {first}" if rows.dim() > 1 else ""
    shown = ", ".join(f"{p:g}" for p in flat[first].tolist())
    raise ValueError(f"p_k must be non-negative and sum to 1, got [{shown}] (sum {flat[first].sum():g}){where}")


def check_p_k_of_samples(p_k: Tensor, shape: Sequence[int], num_scores: int, needs_top1: bool) -> Tensor:
    """Return P_K of each sample, (..., K) for labels of a shape (...), as (rows, K).

    num_scores: how many are sorted; a row has mass below that rank. needs_top1: whether P_K(1) must be above 0, which
    the caller has checked where the numbers are known.
    """
    if not isinstance(p_k, Tensor):
        raise TypeError(f"p_k of a call must be a tensor, got {type(p_k).__name__}; convert with torch.as_tensor")
    if p_k.shape[:-1] != torch.Size(shape):
        raise ValueError(f"p_k must have shape {(*shape, 'K')}, a row per sample, got {tuple(p_k.shape)}")
    if p_k.shape[-1] == 0:
        raise ValueError(f"p_k must have K >= 1 ranks, got shape {tuple(p_k.shape)}")
    rows = p_k.reshape(-1, p_k.shape[-1])
    if has_known_values(rows) and rows.numel():
        check_distributions_of_ranks(rows.detach())
        if num_scores > 1 and bool(is_certain(rows, num_scores).any()):
            raise ValueError(about_certain_rank(num_scores))
    if is_checked_later(rows):
        fits = are_distributions(rows, TOLERANCE_OF_P_K)
        rule = "p_k must be non-negative and sum to 1"
        if needs_top1:
            fits = fits & (rows[:, 0] > 0)
            rule += ", with P_K(1) > 0 for an operator that gives exactly 0"
        if 1 < num_scores <= rows.shape[1]:
            fits = fits & ~is_certain(rows, num_scores)
            rule += f", with mass below rank {num_scores}, since {num_scores} scores are sorted"
        return require(rows, fits, f"{rule}; got another P_K in a row")
    return rows


def check_logits(logits: Tensor) -> None:
    """Raise TypeError or ValueError unless `logits` is a floating-point tensor with a dimension for classes."""
    if not isinstance(logits, Tensor):
        kind = type(logits).__name__
        raise TypeError(f"logits must be a floating-point tensor, got {kind}; convert with torch.as_tensor")
    if not logits.is_floating_point():
        raise TypeError(f"logits must be a floating-point tensor, got {logits.dtype}; convert with logits.float()")
    if logits.dim() == 0:
        raise ValueError("logits must have a dimension for the classes, got a tensor of shape ()")
    refuse_forward_mode()


def check_has_classes(logits: Tensor, n: int) -> None:
    """Raise ValueError for logits of no class."""
    if n == 0:
        raise ValueError(f"logits must have one class at least, got shape {tuple(logits.shape)}")


def check_labels(labels: Tensor, shape: Sequence[int], num_classes: int, ignore_index: int | None = None) -> Tensor:
    """Return labels; raise unless they are int64 classes of a shape, in [0, num_classes) or equal to ignore_index.

    Values are looked at where that costs no wait. On CUDA, say, the gather of the true class's score raises PyTorch's
    own error.
    """
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels must be a tensor, got {type(labels).__name__}; convert with torch.as_tensor")
    got = tuple(labels.shape)
    hint = hint_at_shape(labels, shape, num_classes)
    if labels.dtype != torch.int64:
        hint = hint or "; convert with labels.long()"
        raise TypeError(f"labels must be int64 class indices, got {labels.dtype} of shape {got}{hint}")
    if got != tuple(shape):
        without = "that of the logits without the classes"
        raise ValueError(f"labels must have shape {tuple(shape)}, {without}, got {got}{hint}")
    is_later = is_checked_later(labels)
    if not is_later and not has_known_values(labels):
        return labels
    wrong = (labels < 0) | (labels >= num_classes)
    allowed = f"[0, {num_classes - 1}]"
    if ignore_index is not None:
        wrong = wrong & (labels != ignore_index)
        allowed += f" or equal {ignore_index=}"
    if is_later:
        return require(labels, ~wrong, f"labels must lie in {allowed}, got another one")
    if bool(wrong.any()):
        first = int(wrong.flatten().nonzero()[0])
        raise ValueError(f"labels must lie in {allowed}, got {int(labels.flatten()[first])} at position {first}")
    return labels


def hint_at_shape(labels: Tensor, shape: Sequence[int], num_classes: int) -> str:
    """Say what to do with labels that have one dimension more than the shape; "" for other labels."""
    got = tuple(labels.shape)
    if len(got) != len(shape) + 1:
        return ""
    for dim in reversed(range(len(got))):
        if got[dim] == 1 and got[:dim] + got[dim + 1 :] == tuple(shape):
            return f"; take the extra dimension out with labels.squeeze({dim})"
    if num_classes in got:
        return "; a column per class is a distribution (labels.float()) or, with soft_labels='any', a set of answers"
    return ""


def check_label_masses(labels: Tensor, logits: Tensor, class_dim: int, several: bool) -> Tensor:
    """Return labels like the logits; raise ValueError unless they are distributions, or `several` sets, of classes.

    Sets of right answers have entries in [0, 1], at least one of them above 0.
    """
    if labels.shape != logits.shape:
        raise ValueError(
            f"labels that name several classes must have the shape of the logits {tuple(logits.shape)}, "
            f"got {tuple(labels.shape)}; for class indices convert with labels.long()"
        )
    is_later = is_checked_later(labels)
    if not is_later and not (has_known_values(labels) and labels.numel()):
        return labels
    rows = labels.detach().movedim(class_dim, -1).double()  # (..., n)
    totals = rows.sum(-1)
    fits = (rows >= 0).all(-1)
    if several:
        fits = fits & (rows <= 1).all(-1) & (totals > 0)
        rule = "sets of right answers must have entries in [0, 1], at least one of them above 0"
    else:
        fits = fits & ((totals - 1).abs() <= TOLERANCE_OF_LABELS)
        rule = "labels that are distributions must be non-negative and sum to 1 "
        rule += "(for sets of right answers, k-hot say, build the loss with soft_labels='any')"
    if is_later:
        return require(labels, fits, rule)
    if not bool(fits.all()):
        first = int((~fits).flatten().nonzero()[0])
        raise ValueError(f"{rule}; got a sum of {float(totals.flatten()[first]):g} in row {first}")
    return labels


def check_answers_fit(sets: Tensor, num_answers: Tensor, fits: Tensor, m: int, k: int) -> Tensor:
    """Return sets of right answers (rows, n); raise ValueError unless the m candidates of each row fit.

    num_answers, fits: (rows,). k: the lowest rank with a weight.
    """
    if is_checked_later(sets):
        return require(sets, fits, f"m={m} scores cannot hold all right answers and k={k} others; raise m")
    if has_known_values(fits) and not bool(fits.all()):
        most_answers = int(num_answers[~fits].max())
        raise ValueError(f"m={m} scores cannot hold {most_answers} right answers and k={k} others; raise m")
    return sets
