"""The interface of the relaxed top-k operators, and the functions that they are written with."""

from collections.abc import Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from topk_losses import checks
from topk_losses.checks import check_k, full_precision, has_known_values

Beta = float | Tensor | None  # an inverse temperature; None: the operator's

# Stands in for the score -inf of a class that is masked out. All operators have reached their limit there, up to
# rounding, and its square is still a float32 number.
MASKED = -1e18


def to_compute_dtype(logits: Tensor) -> Tensor:
    """Return the logits as float64 or float32; half precision becomes float32."""
    return logits if logits.dtype == torch.float64 else logits.float()


def is_above(scores: Tensor, bound: float) -> bool:
    """Tell whether all scores are known to lie above a bound, without waiting for a device."""
    return has_known_values(scores) and (not scores.numel() or float(scores.detach().amin()) > bound)


def has_masked(scores: Tensor) -> bool:
    """Tell whether scores are known to hold a class at -inf, or NaN."""
    return has_known_values(scores) and not is_above(scores, -torch.inf)


def finite(scores: Tensor) -> Tensor:
    """Replace -inf by MASKED; NaN and +inf stay, and spoil their own sample only."""
    # the minimum takes a tenth of the time of a clamp and its gradient
    return scores if is_above(scores, MASKED) else scores.clamp(min=MASKED)


def centered(scores: Tensor) -> Tensor:
    """Subtract the maximum of each row (rows, n), so that an offset of the logits costs no digits; -inf is MASKED.

    A row with NaN or +inf becomes NaN as a whole.
    """
    highest = scores.detach().amax(1, keepdim=True)  # (rows, 1)
    highest = highest.masked_fill(highest == -torch.inf, 0)
    return finite(scores) - (highest + 0 * highest)


def largest(scores: Tensor, m: int) -> Tensor:
    """Return the classes of the m largest scores of each row (rows, n), falling: (rows, m) int64."""
    scores, n, chunk = scores.detach(), scores.shape[1], 8
    if not has_known_values(scores) or n < 32 * m:
        return scores.topk(m, dim=1).indices
    # They lie in the m chunks of largest maxima, or in the rest: half the time of torch.topk on a CPU.
    chunks = n // chunk
    best = scores[:, : chunks * chunk].unflatten(1, (chunk, chunks)).amax(1).topk(m, dim=1, sorted=False).indices
    offsets = torch.arange(chunk, device=scores.device).view(1, -1, 1) * chunks
    rest = torch.arange(chunks * chunk, n, device=scores.device).expand(scores.shape[0], -1)
    columns = torch.cat([(best.unsqueeze(1) + offsets).flatten(1), rest], dim=1)  # (rows, chunk m + rest)
    return columns.gather(1, scores.gather(1, columns).topk(m, dim=1).indices)


def pick_ranks(cumulative: Tensor, ks: Sequence[int]) -> Tensor:
    """Select the entries k - 1 of dimension 1, (rows, K, ...) to (rows, len(ks), ...), without copying an index."""
    if len(ks) in (0, cumulative.shape[1]):
        return cumulative[:, : len(ks)]
    return torch.stack([cumulative[:, k - 1] for k in ks], dim=1)


def ranks_like(ks: Sequence[int], like: Tensor) -> Tensor:
    """Return ks as numbers like a tensor's, (1, len(ks)), made on its device."""
    return pick_ranks(torch.arange(1, max(ks, default=0) + 1, dtype=like.dtype, device=like.device).unsqueeze(0), ks)


def as_tensor(beta: float | Tensor, like: Tensor) -> Tensor:
    """Return an inverse temperature as a tensor () like another, made on its device."""
    return beta.to(like) if isinstance(beta, Tensor) else like.new_full((), beta)


def is_mass(target: Any) -> bool:
    """Tell a target that is a mass per class (rows, n) from labels (rows,) and from None, which is every class."""
    return isinstance(target, Tensor) and target.is_floating_point()


def class_mass(scores: Tensor, target: Tensor) -> Tensor:
    """Return the mass per class (rows, n) of labels (rows,), their one-hot, or of a mass, itself."""
    return target.to(scores.dtype) if is_mass(target) else torch.zeros_like(scores).scatter(1, target.unsqueeze(1), 1)


def at_target(values: Tensor, target: Tensor) -> Tensor:
    """Of values (rows, J, n) pick those of the labels (rows,), or sum them by a mass (rows, n): (rows, J)."""
    if is_mass(target):  # a sum, not a matrix product, whose backward pass autocast would round
        return (values * target.to(values.dtype).unsqueeze(1)).sum(2)
    return values.gather(2, target.view(-1, 1, 1).expand(-1, values.shape[1], 1)).squeeze(2)


def log_mixture(logs: Tensor, shares: Tensor, dim: int = 1, all_positive: bool = False) -> Tensor:
    """Return log sum_j shares_j exp(logs_j) over a dimension, which is dropped; 0 where there is no share at all.

    Shares may be 0, and have a finite gradient there: exp(logs_j) over the sum. all_positive: none is 0.
    """
    if all_positive:
        return (logs + shares.log()).logsumexp(dim)
    shares = shares.expand_as(logs)
    if not logs.shape[dim]:
        return torch.zeros_like(logs.sum(dim))
    has_share = shares > 0
    highest = logs.detach().masked_fill(~has_share, -torch.inf).amax(dim, keepdim=True)
    highest = highest.masked_fill(highest == -torch.inf, 0)
    total = ((logs - highest).clamp(max=50).exp() * shares).sum(dim)  # what is above the highest has no share
    return total.masked_fill(~has_share.any(dim), 1).log() + highest.squeeze(dim)


def log_softmax(scores: Tensor, target: Tensor | None) -> Tensor:
    """Return log softmax of the labels (rows,), of a set of classes by its mass (rows, n), or of every class."""
    if target is None:
        return scores.log_softmax(1)
    if is_mass(target):
        return log_mixture(scores.log_softmax(1), target)
    return -cross_entropy(scores, target, reduction="none")


class LogCumSumExp(torch.autograd.Function):
    """torch.logcumsumexp of (rows, n) over n, with second derivatives also where a gradient is 0."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.logcumsumexp(1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, sums = ctx.saved_tensors
        return _sums(grad.flip(1), -sums.flip(1), x.flip(1)).flip(1)


def _sums(values: Tensor, inner: Tensor, outer: Tensor) -> Tensor:
    """sum_{j<=i} values_j exp(inner_j + outer_i), (rows, n), however large the exponents."""

    def sums_of_positive(part: Tensor) -> Tensor:
        logs = torch.where(part > 0, torch.where(part > 0, part, 1).log(), -1e30)
        return (LogCumSumExp.apply(logs + inner) + outer).exp()

    return sums_of_positive(values) - sums_of_positive(-values)


def log_sum_of_others(z: Tensor) -> Tensor:
    """Return log sum_{i != j} exp(z_i) for every class j of z (rows, n): sums from both ends, nothing is subtracted."""
    before = pad(LogCumSumExp.apply(z[:, :-1]), (1, 0), value=MASKED)
    behind = pad(LogCumSumExp.apply(z[:, 1:].flip(1)).flip(1), (0, 1), value=MASKED)
    return torch.logaddexp(before, behind)


def guarded_log(p: Tensor) -> Tensor:
    """Return log(p (1 - 2e-7) + 1e-7), which is finite for p in [0, 1]: the epsilon of the official code."""
    return torch.log(p * (1 - 2e-7) + 1e-7)


class TopKOperator:
    """Base class of relaxed sorts: the first k rows of a permutation matrix, P[r, j] = P(class j has rank r + 1).

    An operator holds settings and no state. The inverse temperature and the generator of noise are arguments of each
    call. Subclasses define one method, `_matrix(scores, k, beta, generator)`, which returns P (rows, k, n) for scores
    (rows, n) in float32 or float64 with autocast off. Two more may be defined where they cost less: `_column`, P of the
    true class, and `within`, P(rank <= k).

    Args:
        k: number of ranks, 1 <= k <= n.
        inverse_temperature: used where a call gives none; above 0, larger = closer to the hard operator. None: the
            default of the class.

    Raises:
        ValueError: the inverse temperature is not above 0 or, at the call, k > n.
    """

    default_inverse_temperature = 1.0
    guarded = True  # `within` gives a probability, whose logarithm needs an epsilon; False: it gives exact logarithms
    has_zeros = False  # some entries of P are exactly 0, with a gradient of 0, at any temperature
    stochastic = False  # draws noise from the generator
    pairwise = False  # all classes at once cost (rows, n, n)
    whitens = False  # takes the mean and the standard deviation of the scores away first
    settings: tuple[str, ...] = ("k", "inverse_temperature")  # what repr shows

    def __init__(self, k: SupportsIndex, inverse_temperature: Beta = None) -> None:
        self.k = check_k(k)
        beta = self.default_inverse_temperature if inverse_temperature is None else inverse_temperature
        self.inverse_temperature: Any = checks.check_inverse_temperature(beta)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)}' for name in self.settings)})"

    def rank_probabilities(
        self, logits: Tensor, labels: Tensor, inverse_temperature: Beta = None, generator: Any = None
    ) -> Tensor:
        """Compute P of the true class without building P.

        Args:
            logits: (..., n), floating point.
            labels: (...,) int64 in [0, n); or (..., n), a mass per class, over which P is summed.
            inverse_temperature: above 0, a number or a tensor () that receives its gradient; None: the operator's.
            generator: torch.Generator of operators that draw noise, on the device of the logits; None: PyTorch's own.

        Returns:
            (..., k), entry r: P(rank = r + 1); float32 for half-precision logits. 0 for classes that are masked out.

        Raises:
            TypeError, ValueError: shapes, types or labels that do not fit.
        """
        scores = self._checked(logits)
        out, beta = scores == -torch.inf, self._beta(inverse_temperature)  # (rows, n)
        if is_mass(labels):
            checks.check_label_masses(labels, logits, -1, several=True)
            target = labels.reshape(scores.shape).masked_fill(out, 0)
        else:
            checks.check_labels(labels, logits.shape[:-1], logits.shape[-1])
            target = labels.reshape(-1)
        with full_precision(logits.device):
            column = self._column(scores, target, self.k, beta, generator)
        if not is_mass(labels):
            column = column.masked_fill(out.gather(1, target.unsqueeze(1)), 0)
        return column.reshape(*logits.shape[:-1], self.k)

    def permutation_matrix(self, logits: Tensor, inverse_temperature: Beta = None, generator: Any = None) -> Tensor:
        """Compute the first k rows of P, (..., k, n), for logits (..., n). Row 0 is rank 1; a masked column is 0.

        The other arguments and the errors are those of rank_probabilities.
        """
        scores = self._checked(logits)
        with full_precision(logits.device):
            P = self._matrix(scores, self.k, self._beta(inverse_temperature), generator)
        P = P.masked_fill((scores == -torch.inf).unsqueeze(1), 0)
        return P.reshape(*logits.shape[:-1], self.k, logits.shape[-1])

    __call__ = permutation_matrix

    def mask(self, logits: Tensor, k: Any = None, inverse_temperature: Beta = None, generator: Any = None) -> Tensor:
        """Compute the soft top-k indicator, P(class j is among the k highest), of the shape of the logits (..., n).

        k is an integer from 1 to n; None: the operator's own. A class that is masked out has the indicator 0, also
        where k exceeds the number of the others. The other arguments and the errors are those of rank_probabilities.
        """
        scores = self._checked(logits)
        k = self.k if k is None else check_k(k, scores.shape[1])
        with full_precision(logits.device):
            within = self.within(scores, None, [k], self._beta(inverse_temperature), generator)  # (rows, 1, n)
        within = within if self.guarded else within.exp()
        return within.reshape(logits.shape).masked_fill(logits == -torch.inf, 0)

    def within(self, scores: Tensor, target: Any, ks: Sequence[int], beta: Any, generator: Any = None) -> Tensor:
        """Compute P(rank <= k) for several k, which is what a loss needs; its logarithm if not `guarded`.

        Args:
            scores: (rows, n), float32 or float64, -inf for classes that are masked out.
            target: labels (rows,) int64; a mass per class (rows, n), for the sum over the classes; None: every class.
            ks: the ranks k, rising, at most n.
            beta: inverse temperature, above 0.
            generator: torch.Generator of noise.

        Returns:
            (rows, len(ks)), or (rows, len(ks), n) for every class.
        """
        k = max(ks, default=1)
        if target is None:
            P = self._matrix(scores, k, beta, generator)  # (rows, k, n)
        else:
            P = self._column(scores, target, k, beta, generator)  # (rows, k)
        return pick_ranks(P.cumsum(1), ks)

    def check_convergence(self) -> float:
        """Return the largest error that an iterative solver left since the last call; 0 for a closed form."""
        return 0.0

    def _checked(self, logits: Tensor) -> Tensor:
        checks.check_logits(logits)
        check_k(self.k, logits.shape[-1])
        return to_compute_dtype(logits).reshape(-1, logits.shape[-1])  # (rows, n)

    def _beta(self, inverse_temperature: Beta) -> Any:
        beta = self.inverse_temperature if inverse_temperature is None else inverse_temperature
        return checks.check_inverse_temperature(beta)

    def _matrix(self, scores: Tensor, k: int, beta: Any, generator: Any = None) -> Tensor:
        raise TypeError(f"{type(self).__name__} does not define _matrix")

    def _column(self, scores: Tensor, target: Tensor, k: int, beta: Any, generator: Any = None) -> Tensor:
        """P of the labels (rows,), or its sums by a mass (rows, n): (rows, k)."""
        return at_target(self._matrix(scores, k, beta, generator), target)


class MaskOperator(TopKOperator):
    """Base class of operators made of one soft top-k indicator for each k; row r of P is indicator_r - indicator_{r-1}.

    Subclasses define `_values(scores, labels, ks, beta, generator)`: the indicators if `guarded`, else their
    logarithms. For labels (rows,) the shape is (rows, len(ks)); for None, every class, it is (rows, len(ks), n).
    """

    guarded = False

    def _values(self, scores: Tensor, labels: Any, ks: Sequence[int], beta: Any, generator: Any = None) -> Tensor:
        raise TypeError(f"{type(self).__name__} does not define _values")

    def within(self, scores: Tensor, target: Any, ks: Sequence[int], beta: Any, generator: Any = None) -> Tensor:
        if not is_mass(target):
            return self._values(scores, target, ks, beta, generator)
        values = self._values(scores, None, ks, beta, generator)  # (rows, J, n)
        if self.guarded:
            return at_target(values, target)
        return log_mixture(values, target.to(scores.dtype).unsqueeze(1), dim=2)

    def _matrix(self, scores: Tensor, k: int, beta: Any, generator: Any = None) -> Tensor:
        return self._column(scores, None, k, beta, generator)

    def _column(self, scores: Tensor, target: Any, k: int, beta: Any, generator: Any = None) -> Tensor:
        if is_mass(target):
            return super()._column(scores, target, k, beta, generator)
        values = self._values(scores, target, range(1, k + 1), beta, generator)
        indicators = values if self.guarded else values.exp()  # which rise with k, whatever the rounding
        return torch.cat([indicators[:, :1], indicators.diff(dim=1).clamp(min=0)], dim=1)
