"""The refusals of the library: each says the rule, the value received and how to mend it."""

import difflib
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def check_choice(kind: str, name: str, choices: Iterable[str]) -> str:
    """Return `name` if it is one of `choices`; else raise ValueError, naming the nearest choice."""
    choices = tuple(choices)
    if name in choices:
        return name
    nearest = difflib.get_close_matches(str(name), choices, n=1, cutoff=0.4)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
    raise ValueError(f"unknown {kind} {name!r}{hint} Choose one of: {', '.join(choices)}")


def check_positive(name: str, value: float) -> float:
    """Return `value` as a float; raise ValueError unless it is finite and above zero."""
    value = float(value)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a finite number above 0, got {value:g}")
    return value


def check_k(k: int, n: int | None) -> int:
    """Return `k`; raise ValueError unless 1 <= k < n (n may be None: unknown until the first call)."""
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"k must be an integer of at least 1, got {k!r}")
    if n is not None and k >= n:
        raise ValueError(f"k must be smaller than the number of scores n, got k={k} and n={n}")
    return k


def check_p_k(
    p_k: Sequence[float] | Tensor, *, num_classes: int | None = None, num_scores: int | None = None
) -> Tensor:
    """Return P_K as a float64 tensor (K,) or (num_classes, K), each row scaled to sum to 1 exactly.

    Trailing ranks without mass in any row are kept: K is the length that was given. Raises ValueError if an
    entry is negative or not finite, a row's sum is further than 1e-4 from 1 (the tolerance of difftopk), the
    shape is neither (K,) nor (num_classes, K), or K is not smaller than `num_scores` (m, or else n).
    """
    rows = torch.as_tensor(p_k, dtype=torch.float64).detach().cpu()
    if rows.dim() not in (1, 2) or rows.shape[-1] == 0:
        raise ValueError(f"p_k must have shape (K,) or (num_classes, K) with K >= 1, got shape {tuple(rows.shape)}")
    if rows.dim() == 2 and rows.shape[0] != num_classes:
        raise ValueError(
            f"p_k with one row per class must have num_classes={num_classes} rows, got {rows.shape[0]}; "
            "for one row per sample pass p_k to forward instead"
        )
    sums = rows.sum(-1)  # () or (num_classes,)
    wrong = ~torch.isfinite(rows).all(-1) | (rows < 0).any(-1) | ~((sums - 1).abs() < 1e-4)
    if bool(wrong.any()):
        row = rows if rows.dim() == 1 else rows[int(wrong.nonzero()[0])]
        where = "" if rows.dim() == 1 else f" in row {int(wrong.nonzero()[0])}"
        shown = ", ".join(f"{p:g}" for p in row.tolist())
        raise ValueError(f"p_k must be non-negative and sum to 1, got [{shown}] (sum {float(row.sum()):g}){where}")
    K = rows.shape[-1]
    if num_scores is not None and num_scores <= K:
        raise ValueError(
            f"p_k must be shorter than the number of scores that are sorted, got K={K} entries for "
            f"{num_scores} scores (m, or num_classes without m); shorten p_k or raise m"
        )
    return rows / sums.unsqueeze(-1)


def check_m(m: int | None, num_classes: int) -> int | None:
    """Return `m`; raise ValueError unless it is None or 2 <= m <= num_classes."""
    if m is None:
        return None
    if isinstance(m, bool) or not isinstance(m, int) or not 2 <= m <= num_classes:
        raise ValueError(
            f"m must be an integer between 2 and num_classes={num_classes} (or None to keep all), got {m!r}"
        )
    return m


def check_logits(logits: Tensor, num_classes: int | None = None) -> None:
    """Raise unless `logits` is a floating-point tensor (batch, n), with n == num_classes where that is given."""
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        kind = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
        raise TypeError(f"logits must be a floating-point tensor, got {kind}; convert with logits.float()")
    if logits.dim() != 2:
        raise ValueError(f"logits must have shape (batch, n), got {tuple(logits.shape)}")
    if num_classes is not None and logits.shape[1] != num_classes:
        raise ValueError(f"logits must have num_classes={num_classes} columns, got shape {tuple(logits.shape)}")


def check_logits_and_labels(
    logits: Tensor,
    labels: Tensor,
    num_classes: int | None = None,
    ignore_index: int = -100,
    allow_distribution: bool = False,
) -> None:
    """Raise ValueError or TypeError unless logits (batch, n) and labels (batch,) belong together.

    With `allow_distribution` the labels may also be a floating-point distribution over classes (batch, n).
    The range of integer labels is checked on the CPU only: on CUDA it would need a synchronisation, and there
    the gather of the true class's score raises PyTorch's own device-side assertion; under torch.compile the
    compiled gather checks its index itself.
    """
    check_logits(logits, num_classes)
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels must be a tensor, got {type(labels).__name__}")
    if labels.is_floating_point() and allow_distribution:
        if labels.shape != logits.shape:
            raise ValueError(
                f"labels that are distributions over classes must have the shape of the logits "
                f"{tuple(logits.shape)}, got {tuple(labels.shape)}"
            )
        return
    if labels.dtype != torch.int64:
        raise TypeError(f"labels must be int64 class indices, got {labels.dtype}; convert with labels.long()")
    if labels.shape != logits.shape[:1]:
        raise ValueError(
            f"labels must have shape (batch,) = ({logits.shape[0]},) to go with logits {tuple(logits.shape)}, "
            f"got {tuple(labels.shape)}"
        )
    if labels.device.type == "cpu" and not torch.compiler.is_compiling() and labels.numel():
        in_range = (labels >= 0) & (labels < logits.shape[1]) | (labels == ignore_index)  # (batch,)
        if not bool(in_range.all()):
            first = int((~in_range).nonzero()[0])
            raise ValueError(
                f"labels must lie in [0, {logits.shape[1] - 1}] or equal ignore_index={ignore_index}, "
                f"got {int(labels[first])} at position {first}"
            )
