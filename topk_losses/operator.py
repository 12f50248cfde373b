"""The common signature of the relaxed top-k operators, and what they are written with."""

from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from topk_losses.checks import (
    check_inverse_temperature,
    check_k,
    check_label_masses,
    check_labels,
    check_logits,
    full_precision,
)
from topk_losses.kernels import kernel

# Stands in for a score of -inf, a class that takes no part. All operators have reached their limit there, to rounding,
# and its square is a float32 number still.
MASKED = -1e18
MOST_BY_KERNEL, LEAST_SCORES, LEAST_SHARE = 64, 256, 16  # a kernel pays for m <= 64 of more than 256 or 16 m scores


def to_compute_dtype(logits: Tensor) -> Tensor:
    """float64 and float32 stay; half precision is computed in float32."""
    return logits if logits.dtype == torch.float64 else logits.float()


def finite(scores: Tensor) -> Tensor:
    """`scores` with MASKED in place of -inf; NaN and inf stay, and spoil their sample alone."""
    return scores.clamp(min=MASKED)


def largest(scores: Tensor, m: int) -> Tensor:
    """The classes of the m largest scores of each row (rows, n), falling: (rows, m) int64. Ties fall either way."""
    pays = m <= MOST_BY_KERNEL and scores.shape[1] > max(LEAST_SCORES, LEAST_SHARE * m)
    find = kernel("largest", scores) if pays else None
    return scores.detach().topk(m, dim=1).indices if find is None else find(scores.detach(), m)[0]


def pick_ranks(cumulative: Tensor, ks: Sequence[int]) -> Tensor:
    """The entries of `cumulative` (rows, K, ...) for the k of interest, (rows, len(ks), ...); no index to be moved."""
    if len(ks) in (0, cumulative.shape[1]):
        return cumulative[:, : len(ks)]
    return torch.stack([cumulative[:, k - 1] for k in ks], dim=1)


def is_mass(target: Tensor | None) -> bool:
    """Whether a target is a mass per class (rows, n), rather than labels (rows,) or None, all classes."""
    return target is not None and target.is_floating_point()


def mass_of(scores: Tensor, target: Tensor) -> Tensor:
    """The mass on each class (rows, n) that a target stands for: labels (rows,) or itself."""
    return target.to(scores.dtype) if is_mass(target) else torch.zeros_like(scores).scatter(1, target.unsqueeze(1), 1)


def at_target(values: Tensor, target: Tensor) -> Tensor:
    """Of values (rows, J, n) those of the labels (rows,), or their sums by a mass (rows, n): (rows, J)."""
    if is_mass(target):
        return (values @ target.to(values.dtype).unsqueeze(2)).squeeze(2)
    return values.gather(2, target.view(-1, 1, 1).expand(-1, values.shape[1], 1)).squeeze(2)


def log_softmax(scores: Tensor, target: Tensor | None) -> Tensor:
    """log softmax of the labels (rows,), of a set of classes, mass (rows, n), or, for None, of each class (rows, n)."""
    if target is None:
        return scores.log_softmax(1)
    if is_mass(target):
        return (scores + target.log()).logsumexp(1) - scores.logsumexp(1)
    return -cross_entropy(scores, target, reduction="none")


def guarded_log(p: Tensor) -> Tensor:
    """log(p (1 - 2e-7) + 1e-7), the official code's guard against log 0: finite for p in [0, 1]."""
    return torch.log(p * (1 - 2e-7) + 1e-7)


def normal_noise(like: Tensor, *shape: int, generator: torch.Generator | None) -> Tensor:
    """Standard normal numbers of a shape, of the dtype and on the device of another tensor."""
    if generator is None:  # which torch.compile does not pass on beside a size that is a symbol
        return torch.randn(shape, dtype=like.dtype, device=like.device)
    return torch.randn(shape, dtype=like.dtype, device=like.device, generator=generator)


def _written(value: Any) -> str:
    """A setting as a module prints it: numbers to six digits, long tensors by their shape."""
    if isinstance(value, Tensor):
        value = f"<{tuple(value.shape)}>" if value.dim() > 1 else value.detach().cpu().double().tolist()
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


class Constants(nn.Module):
    """A module whose tensors named in `constants` move with it, but are never cast, emptied or saved.

    They are made anew from what the module was built with, so that state dicts do without them; buffers would come out
    rounded of .bfloat16(), and as garbage of .to_empty(). Printed, it says the settings that `shown` names, if it has
    them.
    """

    constants: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()

    def extra_repr(self) -> str:
        settings = ((name, getattr(self, name)) for name in self.shown)
        return ", ".join(f"{name}={_written(value)}" for name, value in settings if value is not None)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Constants":
        super()._apply(fn, recurse)
        for name in self.constants:
            tensor = getattr(self, name)
            if tensor is not None:
                device = fn(torch.empty(0, device=tensor.device)).device
                exact = tensor.float() if device.type == "mps" and tensor.dtype == torch.float64 else tensor
                object.__setattr__(self, name, exact.to(device))  # checked already
        return self


class TopKOperator(Constants):
    """A relaxed permutation matrix P restricted to its first k rows, P[r, j] = P(class j holds rank r + 1).

    k: ranks, from 1 to n. inverse_temperature: above 0, larger = closer to the hard operator; a tensor of shape () that
    requires a gradient gets it, and an nn.Parameter is learned. It can be set at any time.

    Raises ValueError for a non-positive inverse temperature, and of k outside 1..n at the call.

    Subclasses compute on rows, scores (rows, n) float32 or float64, with autocast off. They have two hooks:
    `_matrix(scores)` -> P (rows, k, n), and `_within(scores, target, ks)` -> P(rank <= k), which by default is taken
    from P, or from `_column`, a part of P that may cost less.
    """

    shown: tuple[str, ...] = ("k", "inverse_temperature")
    inverse_temperature: float | Tensor
    # `_within` is a probability, whose logarithm in a loss has the official guard; False: it is log P(rank <= k), exact
    guarded = True
    has_zeros = False  # some entries of P are exactly 0, with a gradient of 0, at any temperature
    generator: torch.Generator | None = None  # of operators that draw noise, on the logits' device; None: PyTorch's own

    def __init__(self, k: SupportsIndex, inverse_temperature: float | Tensor) -> None:
        super().__init__()
        self.k = check_k(k)
        self.inverse_temperature = inverse_temperature

    def __setattr__(self, name: str, value: Any) -> None:
        checked: Any = check_inverse_temperature(value) if name == "inverse_temperature" else value
        super().__setattr__(name, checked)

    @property
    def beta(self) -> float | Tensor:
        """The inverse temperature as it is now: what is changed in place does not change for a graph that is built."""
        beta = self.inverse_temperature
        return beta.clone() if isinstance(beta, Tensor) else beta

    def rank_probabilities(self, logits: Tensor, labels: Tensor) -> Tensor:
        """P[:, y], the column of the true class, by true-class evaluation: P is never built.

        logits (..., n) floating point; labels (...,) int64 in [0, n), or (..., n), the mass on each class, a
        distribution say, that is carried in place of the one-hot. Returns (..., k), entry r: P(rank = r + 1), float32
        for half-precision logits. Raises TypeError or ValueError for shapes and labels that do not fit.
        """
        scores = self._checked(logits)
        several = isinstance(labels, Tensor) and labels.is_floating_point()
        if several:
            check_label_masses(labels, logits, -1, several)
        else:
            check_labels(labels, logits.shape[:-1], logits.shape[-1])
        target = labels.reshape(scores.shape if several else -1)
        with full_precision(logits.device):
            return self._column(scores, target).reshape(*logits.shape[:-1], self.k)

    def permutation_matrix(self, logits: Tensor) -> Tensor:
        """P, the first k rows of the relaxed permutation matrix: (..., k, n), row 0 is rank 1 (top-1).

        logits (..., n) floating point. float32 for half-precision logits. Raises TypeError or ValueError.
        """
        scores = self._checked(logits)
        with full_precision(logits.device):
            return self._matrix(scores).reshape(*logits.shape[:-1], self.k, logits.shape[-1])

    def mask(self, logits: Tensor) -> Tensor:
        """The soft k-hot: P(class j is among the k highest), of the shape of the logits; the rows of P sum to it."""
        scores = self._checked(logits)
        with full_precision(logits.device):
            within = self._within(scores, None, [self.k])  # (rows, 1, n)
        return (within if self.guarded else within.exp()).reshape(logits.shape)

    forward = permutation_matrix

    def check_convergence(self) -> float:
        """The largest error that an iterative solver left so far; 0 for an operator in closed form."""
        return 0.0

    def within(
        self, scores: Tensor, target: Tensor | None, ks: Sequence[int], softmax: bool
    ) -> tuple[Tensor, Tensor | None]:
        """What a loss takes: `_within` and, if wanted, log softmax, in the shape of one k."""
        return self._within(scores, target, ks), log_softmax(scores, target) if softmax else None

    def _checked(self, logits: Tensor) -> Tensor:
        check_logits(logits)
        check_k(self.k, logits.shape[-1])
        return to_compute_dtype(logits).reshape(-1, logits.shape[-1])  # (rows, n)

    def _matrix(self, scores: Tensor) -> Tensor:
        raise TypeError(f"{type(self).__name__} does not define _matrix")

    def _column(self, scores: Tensor, target: Tensor) -> Tensor:
        """P of the labels (rows,), or its sums by a mass (rows, n): (rows, k)."""
        return at_target(self._matrix(scores), target)

    def _within(self, scores: Tensor, target: Tensor | None, ks: Sequence[int]) -> Tensor:
        """P(rank <= k), or its logarithm if not `guarded`, for the k of interest, rising: (rows, J).

        target: labels (rows,) int64; a mass per class (rows, n), for the sum over the classes; or None, for every
        class, (rows, J, n).
        """
        P = self._matrix(scores) if target is None else self._column(scores, target)
        return pick_ranks(P.cumsum(1), ks)


class MaskOperator(TopKOperator):
    """An operator made of masks, P(rank <= k), each for its k alone: row r of P is mask_r - mask_{r-1}.

    Subclasses define `_values`: the masks, if `guarded`, or else their logarithms, for the k of interest, rising, of
    labels (rows,), (rows, J), or of all classes for None, (rows, J, n).
    """

    guarded = False

    def _values(self, scores: Tensor, labels: Tensor | None, ks: Sequence[int]) -> Tensor:
        raise TypeError(f"{type(self).__name__} does not define _values")

    def _within(self, scores: Tensor, target: Tensor | None, ks: Sequence[int]) -> Tensor:
        if target is None or not is_mass(target):
            return self._values(scores, target, ks)
        values = self._values(scores, None, ks)  # (rows, J, n)
        if self.guarded:
            return at_target(values, target)
        return (values + target.to(scores.dtype).log().unsqueeze(1)).logsumexp(2)

    def _matrix(self, scores: Tensor) -> Tensor:
        return self._rows_of(scores, None)

    def _column(self, scores: Tensor, target: Tensor) -> Tensor:
        return super()._column(scores, target) if is_mass(target) else self._rows_of(scores, target)

    def _rows_of(self, scores: Tensor, labels: Tensor | None) -> Tensor:
        """Rows of P, since masks are nested in k: (rows, k[, n]), not below 0 for a rounding."""
        values = self._values(scores, labels, range(1, self.k + 1))
        masks = values if self.guarded else values.exp()
        return torch.cat([masks[:, :1], masks.diff(dim=1).clamp(min=0)], dim=1)
