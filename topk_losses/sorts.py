"""The common signature of the relaxed top-k operators, and those in closed form: NeuralSort and SoftSort."""

from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from topk_losses.checks import (
    check_inverse_temperature,
    check_k,
    check_label_masses,
    check_labels,
    check_logits,
    full_precision,
    has_known_values,
)
from topk_losses.kernels import kernel

# Stands in for a score of -inf, a class that takes no part. All operators have reached their limit there, to rounding,
# and its square is a float32 number still.
MASKED = -1e18
MOST_BY_KERNEL, LEAST_SCORES, LEAST_SHARE = 64, 256, 16  # a kernel pays for m <= 64 of more than 256 or 16 m scores
MOST_RANKS = 32  # for which the kernel of masks looks at few scores one by one


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
    return scores.detach().topk(m, dim=1).indices if find is None else find(scores, m)


def pick_ranks(cumulative: Tensor, ks: Sequence[int]) -> Tensor:
    """The entries of `cumulative` (rows, K, ...) for the k of interest, (rows, len(ks), ...); no index to be moved."""
    if len(ks) in (0, cumulative.shape[1]):
        return cumulative[:, : len(ks)]
    return torch.stack([cumulative[:, k - 1] for k in ks], dim=1)


class Constants(nn.Module):
    """A module whose tensors named in `constants` move with it, but are never cast, emptied or saved.

    They are made anew from what the module was built with, so that state dicts do without them; buffers would come out
    rounded of .bfloat16(), and as garbage of .to_empty().
    """

    constants: tuple[str, ...] = ()

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

    Subclasses compute on rows, in the dtype that they receive (float32 or float64), with autocast off:
    `_column(scores, labels)`: (rows, n) and (rows,) int64, or a mass per class (rows, n) -> (rows, k);
    `_matrix(scores)` -> (rows, k, n).
    """

    inverse_temperature: float | Tensor
    guarded = True  # a loss takes the logarithm with the official guard; False: there are _log_within, _log_all_within
    has_zeros = False  # some entries of P are exactly 0, with a gradient of 0, at any temperature
    generator: torch.Generator | None = None  # of operators that draw noise, on the logits' device; None: PyTorch's own

    def __init__(self, k: SupportsIndex, inverse_temperature: float | Tensor) -> None:
        super().__init__()
        self.k = check_k(k)
        self.inverse_temperature = inverse_temperature

    def __setattr__(self, name: str, value: Any) -> None:
        checked: Any = check_inverse_temperature(value) if name == "inverse_temperature" else value
        super().__setattr__(name, checked)

    def extra_repr(self) -> str:
        """The configuration, for printing."""
        return f"k={self.k}, inverse_temperature={float(self.inverse_temperature):g}"

    def rank_probabilities(self, logits: Tensor, labels: Tensor) -> Tensor:
        """P[:, y], the column of the true class, by true-class evaluation: P is never built.

        logits (..., n) floating point; labels (...,) int64 in [0, n), or (..., n), the mass on each class, a
        distribution say, that is carried in place of the one-hot. Returns (..., k), entry r: P(rank = r + 1), float32
        for half-precision logits. Raises TypeError or ValueError for shapes and labels that do not fit.
        """
        scores = self._checked(logits)
        n = logits.shape[-1]
        if isinstance(labels, Tensor) and labels.is_floating_point():
            check_label_masses(labels.flatten(0, -2), logits.flatten(0, -2), several=True)
            labels = labels.reshape(-1, n)
        else:
            check_labels(labels, logits.shape[:-1], n)
            labels = labels.reshape(-1)
        with full_precision(logits.device):
            return self._column(scores, labels).reshape(*logits.shape[:-1], self.k)

    def permutation_matrix(self, logits: Tensor) -> Tensor:
        """P, the first k rows of the relaxed permutation matrix: (..., k, n), row 0 is rank 1 (top-1).

        logits (..., n) floating point. float32 for half-precision logits. Raises TypeError or ValueError.
        """
        scores = self._checked(logits)
        with full_precision(logits.device):
            return self._matrix(scores).reshape(*logits.shape[:-1], self.k, logits.shape[-1])

    def mask(self, logits: Tensor) -> Tensor:
        """The soft k-hot, the sum of the rows of P: P(class j is among the k highest), of the shape of the logits."""
        scores = self._checked(logits)
        with full_precision(logits.device):
            return self._all_within(scores, [self.k]).reshape(logits.shape)

    def forward(self, logits: Tensor) -> Tensor:
        """The permutation matrix."""
        return self.permutation_matrix(logits)

    def check_convergence(self) -> float:
        """The largest error that an iterative solver left so far; 0 for an operator in closed form."""
        return 0.0

    def _checked(self, logits: Tensor) -> Tensor:
        check_logits(logits)
        check_k(self.k, logits.shape[-1])
        return to_compute_dtype(logits).reshape(-1, logits.shape[-1])  # (rows, n)

    def _column(self, scores: Tensor, labels: Tensor) -> Tensor:
        raise TypeError(f"{type(self).__name__} does not define _column")

    def _matrix(self, scores: Tensor) -> Tensor:
        raise TypeError(f"{type(self).__name__} does not define _matrix")

    def _within(self, scores: Tensor, labels: Tensor, ks: Sequence[int]) -> Tensor:
        """P(rank <= k) of the true class, for the k of interest, rising: (rows, len(ks))."""
        return pick_ranks(self._column(scores, labels).cumsum(1), ks)

    def _all_within(self, scores: Tensor, ks: Sequence[int]) -> Tensor:
        """P(rank <= k) of every class: (rows, len(ks), n)."""
        return pick_ranks(self._matrix(scores).cumsum(1), ks)

    def _beside_softmax(self, scores: Tensor, labels: Tensor, ks: Sequence[int]) -> tuple[Tensor, Tensor]:
        """What a loss takes of labels (rows,) int64: `_within` or, unless guarded, its logarithm; -log softmax."""
        within = (self._within if self.guarded else self._log_within)(scores, labels, ks)
        return within, cross_entropy(scores, labels, reduction="none")

    def _log_within(self, scores: Tensor, labels: Tensor, ks: Sequence[int]) -> Tensor:
        """log P(rank <= k) of the true class, or of the mass (rows, n) on several, (rows, len(ks))."""
        return (self._log_all_within(scores, ks) + labels.to(scores.dtype).log().unsqueeze(1)).logsumexp(2)

    def _log_all_within(self, scores: Tensor, ks: Sequence[int]) -> Tensor:
        """log P(rank <= k) of every class: (rows, len(ks), n)."""
        raise TypeError(f"{type(self).__name__} does not define _log_all_within")


def differences(masks: Tensor) -> Tensor:
    """Rows of P from masks nested in k, (rows, k, ...): row r is mask_r - mask_{r-1}, not below 0 for a rounding."""
    before = pad(masks[:, :-1], (0, 0) * (masks.dim() - 2) + (1, 0))
    return (masks - before).clamp(min=0)


class NestedMasks(TopKOperator):
    """An operator made of masks, P(rank <= k), each for its k alone: row r of P is mask_r - mask_{r-1}.

    Subclasses define `_within` for labels (rows,) int64, and `_all_within`; those whose masks are never 0 define their
    logarithms too, and say guarded = False.
    """

    def _within(self, scores: Tensor, labels: Tensor, ks: Sequence[int]) -> Tensor:
        return (self._all_within(scores, ks) @ labels.to(scores.dtype).unsqueeze(2)).squeeze(2)

    def _column(self, scores: Tensor, labels: Tensor) -> Tensor:
        return differences(self._within(scores, labels, range(1, self.k + 1)))

    def _matrix(self, scores: Tensor) -> Tensor:
        return differences(self._all_within(scores, range(1, self.k + 1)))


class PointwiseMasks(NestedMasks):
    """Masks f(t), t an argument for each class and k. Subclasses define `_arguments` and `_f`.

    family and q: f as the kernel names it, if it knows it.
    """

    guarded = False
    family = ""
    q = 1

    def __init__(self, k: SupportsIndex, inverse_temperature: float | Tensor = 0.25) -> None:
        super().__init__(k, inverse_temperature)

    def _f(self, t: Tensor) -> Tensor:
        raise TypeError(f"{type(self).__name__} does not define _f")

    def _log_f(self, t: Tensor) -> Tensor:
        """log f(t); overridden where it is known beyond the range of f."""
        return self._f(t).log()

    def _scaled(self, scores: Tensor) -> tuple[Tensor, float]:
        """(x, scale) with scale x = beta s: what wants no gradient is multiplied where a number is looked at anyway."""
        beta = self.inverse_temperature
        if isinstance(beta, Tensor) and (beta.requires_grad or not has_known_values(beta)):
            return finite(scores) * beta, 1.0
        return scores, float(beta)

    def _arguments(self, x: Tensor, scale: float, labels: Tensor | None, ks: Sequence[int]) -> Tensor:
        """t for the scores scale x: of the classes labels (rows,), (rows, J), or of all if None, (rows, J, n)."""
        raise TypeError(f"{type(self).__name__} does not define _arguments")

    def _of_labels(self, x: Tensor, scale: float, labels: Tensor, ks: Sequence[int], softmax: bool) -> Tensor:
        """_arguments of labels (rows,) int64 and, if softmax, in one more column log softmax(x): (rows, J + 1)."""

        def by_operations(x: Tensor) -> Tensor:
            t = self._arguments(x, scale, labels, ks)
            return torch.cat([t, -cross_entropy(x, labels, reduction="none").unsqueeze(1)], dim=1) if softmax else t

        fused = kernel("arguments", x) if self.family and max(ks, default=MOST_RANKS + 1) <= MOST_RANKS else None
        return fused(x, labels, scale, ks, self.family, self.q, softmax, by_operations) if fused else by_operations(x)

    def _within(self, scores: Tensor, labels: Tensor, ks: Sequence[int]) -> Tensor:
        if labels.is_floating_point():
            return super()._within(scores, labels, ks)
        return self._f(self._of_labels(*self._scaled(scores), labels, ks, False))

    def _all_within(self, scores: Tensor, ks: Sequence[int]) -> Tensor:
        return self._f(self._arguments(*self._scaled(scores), None, ks))

    def _log_within(self, scores: Tensor, labels: Tensor, ks: Sequence[int]) -> Tensor:
        if labels.is_floating_point():
            return super()._log_within(scores, labels, ks)
        return self._log_f(self._of_labels(*self._scaled(scores), labels, ks, False))

    def _log_all_within(self, scores: Tensor, ks: Sequence[int]) -> Tensor:
        return self._log_f(self._arguments(*self._scaled(scores), None, ks))

    def _beside_softmax(self, scores: Tensor, labels: Tensor, ks: Sequence[int]) -> tuple[Tensor, Tensor]:
        x, scale = self._scaled(scores)
        if x is not scores:
            return super()._beside_softmax(scores, labels, ks)
        t = self._of_labels(x, scale, labels, ks, True)
        return (self._f if self.guarded else self._log_f)(t[:, :-1]), -t[:, -1]


class NeuralSort(TopKOperator):
    """The first k rows of NeuralSort's relaxed permutation matrix (Grover et al. 2019), in O(n log n + n k).

    P[i, :] = softmax(((n + 1 - 2i) s - A 1) / tau), A_jl = |s_j - s_l|, i = 1..k. With the scores sorted,
    s_(1) >= s_(2) >= ..., and the gaps delta_q = s_(q) - s_(q+1) >= 0, the softmax argument of s_(r) relative to
    that of s_(1) is (2i - 1) D_r - 2 E_r with D_r = sum_{q<r} delta_q and E_r = sum_{q<r} q delta_q: two prefix
    sums of non-negative terms, where the definition has n differences of large numbers.

    k: ranks, 1 <= k <= n. inverse_temperature: 1 / tau > 0; default .5, as published for ImageNet (CIFAR-100: .0625).
    Equal scores have equal columns in P; their gradient is that of the order in which torch.sort puts them. Raises
    ValueError for a non-positive inverse temperature.
    """

    def __init__(self, k: SupportsIndex, inverse_temperature: float | Tensor = 0.5) -> None:
        super().__init__(k, inverse_temperature)

    def _log_rows(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Log of P's rows over the sorted classes (rows, k, n), and the class at each place (rows, n)."""
        n = scores.shape[1]
        ordered, order = finite(scores).sort(dim=1, descending=True)  # (rows, n)
        gaps = (ordered[:, :-1] - ordered[:, 1:]) * self.inverse_temperature  # (rows, n - 1)
        place = torch.arange(1, n, device=scores.device, dtype=scores.dtype)  # (n - 1,)
        D = pad(gaps.cumsum(1), (1, 0)).unsqueeze(1)  # (rows, 1, n)
        E = pad((gaps * place).cumsum(1), (1, 0)).unsqueeze(1)  # (rows, 1, n)
        factor = torch.arange(1, 2 * self.k, 2, device=scores.device, dtype=scores.dtype).unsqueeze(1)  # (k, 1)
        return torch.log_softmax(factor * D - 2 * E, dim=2), order

    def _column(self, scores: Tensor, labels: Tensor) -> Tensor:
        log_rows, order = self._log_rows(scores)
        if labels.is_floating_point():
            mass = labels.to(scores.dtype).gather(1, order)  # (rows, n) in sorted order
            return torch.einsum("bkn,bn->bk", log_rows.exp(), mass)
        place = (order == labels.unsqueeze(1)).int().argmax(1)  # (rows,) where the true class stands
        index = place.view(-1, 1, 1).expand(-1, self.k, 1)  # (rows, k, 1)
        return log_rows.gather(2, index).squeeze(2).exp()

    def _matrix(self, scores: Tensor) -> Tensor:
        log_rows, order = self._log_rows(scores)
        places = order.argsort(dim=1).unsqueeze(1).expand_as(log_rows)  # (rows, k, n) where each class stands
        return log_rows.gather(2, places).exp()


class SoftSort(TopKOperator):
    """The first k rows of SoftSort's relaxed permutation matrix (Prillo, Eisenschlos 2020): O(n + k^2) for one class.

    P[i, j] is proportional to exp(-|s_[i] - s_j| / tau), s_[i] the i-th largest score. For i <= k the sum over all j
    below rank k factorises, since s_[i] - s_j = (s_[i] - s_[k]) + (s_[k] - s_j) there: one sum serves all k rows.

    k: ranks, 1 <= k <= n. inverse_temperature: 1 / tau > 0; default .5, as published for ImageNet (CIFAR-100: .0625).
    Among equal scores s_[i] is any of them, and the derivative of |s_[k] - s_j| is that from below.
    Raises ValueError for a non-positive inverse temperature.
    """

    def __init__(self, k: SupportsIndex, inverse_temperature: float | Tensor = 0.5) -> None:
        super().__init__(k, inverse_temperature)

    def _column(self, scores: Tensor, labels: Tensor) -> Tensor:
        if labels.is_floating_point():
            return (self._matrix(scores) @ labels.to(scores.dtype).unsqueeze(2)).squeeze(2)
        beta, scores = self.inverse_temperature, finite(scores)
        top = scores.gather(1, largest(scores, self.k))  # (rows, k)
        kth = top[:, -1:]  # (rows, 1)
        # each of the k largest adds exp(0) = 1 to this sum, which is taken off again
        below = ((scores - kth).clamp(max=0) * beta).exp().sum(1, keepdim=True) - self.k  # (rows, 1)
        among = ((top.unsqueeze(2) - top.unsqueeze(1)).abs() * -beta).exp().sum(2)  # (rows, k)
        total = among + ((kth - top) * beta).exp() * below  # (rows, k)
        true = scores.gather(1, labels.unsqueeze(1))  # (rows, 1)
        return ((top - true).abs() * -beta).exp() / total

    def _matrix(self, scores: Tensor) -> Tensor:
        scores = finite(scores)
        top = scores.gather(1, largest(scores, self.k))  # (rows, k)
        distance = (top.unsqueeze(2) - scores.unsqueeze(1)).abs()  # (rows, k, n)
        return (distance * -self.inverse_temperature).softmax(2)
