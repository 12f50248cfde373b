"""Top-k operators by entropic optimal transport: SinkhornSort and SOFT top-k.

The n scores, whitened and squashed into [0, 1], are the sources, with mass 1/n each; the targets are points in [0, 1].
The cost is the squared difference, the entropy epsilon = 1 / inverse_temperature.

With two target points the plan is a logistic function of x - theta, and theta the root of one equation. With more,
Sinkhorn's fixed point is found by Newton's method on the semi-dual: P, n times the plan, is the softmax over target
points of h - C / epsilon, and h is sought for which they have their mass. Gradients are those of the solution, by the
implicit function theorem, not of the iterations (Xie et al. 2020); they are differentiable in turn. n counts the
classes that are not masked out.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Generator, Tensor
from torch.nn.functional import pad

from topk_losses.checks import check_integer, check_positive
from topk_losses.compilers import full_precision, has_known_values
from topk_losses.kernels import find_kernel
from topk_losses.kernels.registrar import register_loop
from topk_losses.numerics import centered, has_masked, number_like, select_labels, select_ranks, wide_dtype
from topk_losses.operator import TopKOperator, checked_scores
from topk_losses.threshold import ThresholdOperator
from topk_losses.whitening import whiten_and_squash, whitened

LEAST_DAMPING = 1e-3  # after a step that is rejected
MAX_DAMPING = 1e8
# So few scores lie so far apart once they are whitened that small probabilities would have no digits in float32.
FEW_SCORES = 8
OUT = -1e30  # exponent of a target point beyond the number of unmasked classes
# Largest error of a mass that counts as converged, relative to it, where rounding allows that.
DEFAULT_TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-9}


class Context(Protocol):
    """What the backward pass of Plan needs."""

    saved_tensors: tuple[Tensor]

    def save_for_backward(self, *tensors: Tensor) -> None: ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...


class Plan(torch.autograd.Function):
    """P = softmax over target points of h - C / epsilon, (rows, n, A), with h such that its sums are `mass`.

    logits (rows, n, A): -C / epsilon. mass (rows, A), summing to the number of unmasked scores, 0 for points that are
    out. is_unmasked (rows, n, 1): 1, and 0 for scores that are masked out. start (rows, A): h to begin with. Also
    returned: the largest error of a mass, relative to it, per row. Target points are last here, where a softmax is
    fastest.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        logits: Tensor, mass: Tensor, is_unmasked: Tensor, start: Tensor, tolerance: float, max_iterations: int
    ) -> tuple[Tensor, Tensor]:
        h = start
        P, error = evaluate_plan(logits, mass, is_unmasked, h)
        damping = torch.zeros_like(error)  # (rows,)
        may_look = has_known_values(logits)
        for _ in range(max_iterations):
            is_going = ~(error <= tolerance)  # (rows,); a row stops where it would alone
            if may_look and not bool(is_going.any()):
                break
            new_h = h + solve_laplacian(P, damping.unsqueeze(1), mass - P.sum(1))  # (rows, A)
            new_P, new_error = evaluate_plan(logits, mass, is_unmasked, new_h)
            is_better = (new_error < error) & is_going  # (rows,); False for NaN
            h = torch.where(is_better.unsqueeze(1), new_h, h)
            P = torch.where(is_better.view(-1, 1, 1), new_P, P)
            error = torch.where(is_better, new_error, error)
            # A rejected step is shortened towards nu / c - 1, the first order of a Sinkhorn iteration.
            damping = torch.where(is_better, damping / 8, (damping * 4).clamp(LEAST_DAMPING, MAX_DAMPING))
        return P, error

    @staticmethod
    def setup_context(
        ctx: Context, inputs: tuple[Tensor, Tensor, Tensor, Tensor, float, int], output: tuple[Tensor, Tensor]
    ) -> None:
        P, error = output
        ctx.save_for_backward(P)
        ctx.mark_non_differentiable(error)

    @staticmethod
    def backward(ctx: Context, grad: Tensor, grad_error: Tensor) -> tuple[Tensor | None, ...]:
        (P,) = ctx.saved_tensors
        with full_precision(P.device):
            weighted = grad * P  # (rows, n, A)
            mean = weighted.sum(2, keepdim=True)  # (rows, n, 1); at fixed h the gradient is P (grad - mean)
            # The masses c(h, C) = nu fix h: dh = -(dc/dh)^-1 dc/dC dC, of which this is the transpose.
            mass_gradient = weighted.sum(1) - (mean.mT @ P).squeeze(1)  # (rows, A)
            damping = 8 * torch.finfo(P.dtype).eps  # keeps a transport that is all but hard solvable
            adjoint = solve_laplacian(P, damping, mass_gradient).unsqueeze(2)  # (rows, A, 1)
            return weighted - P * (mean + adjoint.mT - P @ adjoint), None, None, None, None, None


def evaluate_plan(logits: Tensor, mass: Tensor, is_unmasked: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Compute P (rows, n, A) of the potentials h (rows, A), and the largest relative error of a mass (rows,)."""
    P = (logits + h.unsqueeze(1)).softmax(2) * is_unmasked  # (rows, n, A)
    c = P.sum(1)  # (rows, A)
    # relative to the smaller one: a point that has lost all its mass would be past recovery
    error = (mass - c).abs() / torch.minimum(mass, c)
    return P, torch.where(mass > 0, error, 0).amax(1)


def solve_laplacian(P: Tensor, damping: Tensor | float, right: Tensor) -> Tensor:
    """Solve (d c / d h + damping diag(c)) v = right for v (rows, A), with v = 0 at the first target point.

    c = sum over scores of P is the mass of the target points, and P (rows, n, A) has rows that sum to 1, so that
    d c / d h = diag(c) - P^T P is the Laplacian of a graph with the weights P^T P. Its diagonal is the sum of the
    weights beside it: a sum of non-negative terms, where diag(c) - ... would cancel. v = 0 at points without mass.
    """
    laplacian = -(P[:, :, 1:].mT @ P)  # (rows, A - 1, A)
    inner = laplacian[:, :, 1:]
    mass = P[:, :, 1:].sum(1)
    inner.diagonal(dim1=1, dim2=2).zero_()
    diagonal = damping * mass - laplacian.sum(2)  # (rows, A - 1)
    inner.diagonal(dim1=1, dim2=2).copy_(torch.where(mass > 0, diagonal, 1))
    # LU is faster on a CPU, but MKL's fails for large systems that are all but singular.
    factor, _ = torch.linalg.cholesky_ex(inner)
    solution = torch.cholesky_solve(right[:, 1:].unsqueeze(2), factor).squeeze(2)  # (rows, A - 1)
    return pad(solution, (1, 0))


def allocate_plan(
    logits: Tensor, mass: Tensor, is_unmasked: Tensor, start: Tensor, tolerance: float, max_iterations: int
) -> tuple[Tensor, Tensor]:
    """Allocate P (rows, n, A) and the errors (rows,)."""
    return torch.empty_like(logits), logits.new_empty(logits.shape[0])


find_plan = register_loop("plan", Plan, allocate_plan)


class TargetPoints(NamedTuple):
    """Evenly spaced target points in [0, 1], (rows, A) each.

    Attributes:
        place: from 1 down to 0.
        mass: 1 each, the last that of all ranks that are left; 0 for points beyond the number of unmasked classes.
        is_taken: whether a point is not beyond it.
    """

    place: Tensor
    mass: Tensor
    is_taken: Tensor


def target_points(num_unmasked: Tensor, num_points: int, dtype: torch.dtype) -> TargetPoints:
    """Make as many target points as a row has unmasked classes (rows, 1), at most num_points."""
    # numbers of this type from here on: a quotient of integers would have PyTorch's default one
    number = num_unmasked.to(dtype)
    rank = torch.arange(num_points, dtype=dtype, device=number.device)  # (A,)
    points = number.clamp(1, num_points)  # (rows, 1), how many of the target points are taken
    is_taken = rank < points  # (rows, A)
    place = torch.where(is_taken, 1 - rank / (points - 1).clamp(min=1), 0)
    mass = torch.where(rank == points - 1, number - points + 1, 1).where(is_taken, 0)
    return TargetPoints(place, mass, is_taken)


def hard_potentials(x: Tensor, points: TargetPoints, inverse_temperature: float | Tensor) -> Tensor:
    """Compute potentials (rows, A) to begin with: those of the hard transport.

    Those of two neighbouring points make the midpoint between the last score of the one and the first score of the
    other indifferent.
    """
    num_points = points.place.shape[1]
    ordered = x.topk(num_points, dim=1).values  # (rows, A)
    upper = points.place[:, :-1]
    lower = points.place[:, 1:]
    steps = (lower - upper) * (lower + upper - ordered[:, :-1] - ordered[:, 1:]) * inverse_temperature  # (rows, A - 1)
    return pad(steps.where(points.is_taken[:, 1:], 0).cumsum(1), (1, 0))


def solve_plan(
    x: Tensor, inverse_temperature: float | Tensor, num_points: int, tolerance: float, max_iterations: int
) -> tuple[Tensor, Tensor]:
    """Compute P (rows, A, n) for evenly spaced target points in [0, 1], the last with the mass of the ranks from A on.

    x (rows, n): the whitened scores, below 0 for classes that are masked out: the other classes have as many target
    points as they are, at most A. Also returned: the largest relative error of a mass per row.
    """
    is_unmasked = (x >= 0) | x.isnan()  # (rows, n); a NaN row is NaN anyhow
    points = target_points(is_unmasked.sum(1, keepdim=True), num_points, x.dtype)
    # -(x - y)^2 / epsilon, without the x^2 / epsilon that no softmax over target points sees
    scaled = points.place * inverse_temperature  # (rows, A)
    logits = x.unsqueeze(2) * (2 * scaled).unsqueeze(1) - (points.place * scaled).unsqueeze(1)  # (rows, n, A)
    logits = torch.where(points.is_taken.unsqueeze(1), logits, OUT)
    with torch.no_grad():
        start = hard_potentials(x, points, inverse_temperature)
    unmasked_share = is_unmasked.unsqueeze(2).to(x.dtype)
    P, error = find_plan(logits, points.mass, unmasked_share, start, tolerance, max_iterations)
    return P.mT, error


def sinkhorn(x: Tensor, labels: Tensor, beta: Tensor, k: int, tolerance: float, max_iterations: int) -> list[Tensor]:
    """Compute what the kernel computes: P[1..k, y], (rows, k), of whitened scores x (rows, n), and errors (rows,)."""
    P, error = solve_plan(x, beta, x.shape[1], tolerance, max_iterations)
    return [select_labels(P[:, :k], labels), error]


@dataclass(frozen=True)
class TransportOperator(TopKOperator):
    """Base class of the transports with more than two target points. One that misses the tolerance warns on a CPU.

    Args:
        tolerance: largest error of a point's mass, relative to it, above 0 (default: 2e-5 in float32, 1e-9 in float64).
        max_iterations: Newton steps; on CUDA all are made, so as not to wait for the device (default: 30).
    """

    tolerance: float | None = None
    max_iterations: int = 30

    whitens: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.tolerance is not None:
            check_positive("tolerance", self.tolerance)
        check_integer("max_iterations", self.max_iterations, 1)

    def topk_probabilities(
        self, scores: Tensor, ks: Sequence[int], inverse_temperature: float | Tensor, generator: Generator | None = None
    ) -> Tensor:
        P = self.rank_probabilities_of_classes(scores, max(ks, default=1), inverse_temperature)
        return select_ranks(P.cumsum(1), ks)

    def rank_probabilities_of_classes(
        self, scores: Tensor, k: int, inverse_temperature: float | Tensor, generator: Generator | None = None
    ) -> Tensor:
        P, error = self._solve(scores, k, inverse_temperature)
        self._warn_above_tolerance(error, inverse_temperature)
        return P[:, :k]

    def convergence_error(self, logits: Tensor, inverse_temperature: float | Tensor | None = None) -> float:
        """Return the largest relative error of a mass for these logits (..., n): one number, for which a GPU waits.

        It is that of as many ranks as there are classes.
        """
        scores = checked_scores(logits)
        with full_precision(logits.device), torch.no_grad():
            beta = self._checked_temperature(inverse_temperature)
            _, error = self._solve(scores, scores.shape[1], beta)
        return largest_error(error)

    def _solve(self, scores: Tensor, k: int, inverse_temperature: float | Tensor) -> tuple[Tensor, Tensor]:
        """Compute P (rows, A, n) and the errors (rows,)."""
        x = whitened(precise(scores))
        num_points = self._num_points(scores.shape[1], k)
        tolerance = self._tolerance(x.dtype, inverse_temperature)
        P, error = solve_plan(x, inverse_temperature, num_points, tolerance, self.max_iterations)
        return P.to(scores.dtype), error

    def _num_points(self, n: int, k: int) -> int:
        """Return the number of target points, one per rank, but the last for all the ranks that are left."""
        return n

    def _tolerance(self, dtype: torch.dtype, inverse_temperature: float | Tensor) -> float:
        if self.tolerance is not None:
            return self.tolerance
        beta = 1.0
        if not isinstance(inverse_temperature, Tensor):
            beta = inverse_temperature
        elif has_known_values(inverse_temperature):
            beta = float(inverse_temperature.detach())
        # the logits are of the size of beta, and their rounding moves the masses
        return max(DEFAULT_TOLERANCE[dtype], torch.finfo(dtype).eps * beta)

    def _warn_above_tolerance(self, error: Tensor, inverse_temperature: float | Tensor) -> None:
        """Warn of errors (rows,) above the tolerance, where they are known."""
        if not has_known_values(error):
            return
        tolerance = self._tolerance(error.dtype, inverse_temperature)
        largest = largest_error(error)
        if largest > tolerance:
            message = (
                f"{type(self).__name__}: the optimal transport did not converge within {self.max_iterations} "
                f"iterations: a mass is off by {largest:.1e} (relative), the tolerance is {tolerance:.0e}. Lower "
                f"inverse_temperature={float(inverse_temperature):g}, use float64 or raise max_iterations."
            )
            warnings.warn(message, RuntimeWarning, stacklevel=3)


def precise(scores: Tensor) -> Tensor:
    """Return scores (rows, n) in float64, where the device has it, if a row has few of them.

    Classes that are masked out do not count, where that is known: not in compiled code, nor on a GPU.
    """
    fewest = scores.shape[1]
    if has_masked(scores) and scores.numel():
        fewest = int((scores.detach() > -torch.inf).sum(1).min())
    if fewest <= FEW_SCORES:
        return scores.to(wide_dtype(scores))
    return scores


def largest_error(error: Tensor) -> float:
    """Return the largest of the errors (rows,). A sample with a NaN has no error to speak of; its P is NaN."""
    if error.numel() == 0:
        return 0.0
    return float(error.detach().nan_to_num(nan=0.0).amax())


@dataclass(frozen=True)
class SinkhornSort(TransportOperator):
    """SinkhornSort (Cuturi, Teboul and Vert 2019): entropic transport to n evenly spaced target points.

    A transport that misses the tolerance warns. The default inverse temperature, 1 / epsilon, is that of OTT, 100; no
    published value is known.

    Args:
        tolerance: largest error of a point's mass, relative to it, above 0 (default: 2e-5 in float32, 1e-9 in float64).
        max_iterations: Newton steps, each with an n x n solve; on CUDA all are made, so as not to wait for the device
            (default: 30).
    """

    default_inverse_temperature: ClassVar[float] = 100.0

    def topk_probabilities_of_labels(
        self,
        scores: Tensor,
        labels: Tensor,
        ks: Sequence[int],
        inverse_temperature: float | Tensor,
        generator: Generator | None = None,
    ) -> Tensor:
        x = whitened(precise(scores))
        beta = number_like(inverse_temperature, x)
        solve = find_kernel("sinkhorn", x, beta) or sinkhorn
        tolerance = self._tolerance(x.dtype, inverse_temperature)
        outputs = solve(x, labels, beta, max(ks, default=1), tolerance, self.max_iterations)
        self._warn_above_tolerance(outputs[1], inverse_temperature)
        return select_ranks(outputs[0].cumsum(1), ks).to(scores.dtype)


@dataclass(frozen=True)
class SortedSoftTopK(TransportOperator):
    """Sorted SOFT top-k (Xie et al. 2020): a target point for each of the k top ranks, and one for the rest.

    The points are evenly spaced in [0, 1], so that their places depend on k. The default inverse temperature,
    1 / epsilon, is that of the authors, 10.

    Args:
        tolerance, max_iterations: as in SinkhornSort, with k x k solves.
    """

    default_inverse_temperature: ClassVar[float] = 10.0

    def _num_points(self, n: int, k: int) -> int:
        return min(k + 1, n)


@dataclass(frozen=True)
class SoftTopK(ThresholdOperator):
    """SOFT top-k (Xie et al. 2020): entropic transport to two target points, 1 for the k highest and 0 for the rest.

    indicator_k = sigmoid((2 x - theta_k) / epsilon) of the whitened and squashed scores x, with theta_k such that it
    sums to k: the indicator of LML. Each k has a transport of its own. Indicators are nested, so that row r of P is
    indicator_r - indicator_{r-1}. The default inverse temperature, 1 / epsilon, is that of the authors, 10.
    """

    default_inverse_temperature: ClassVar[float] = 10.0
    family: ClassVar[str] = "logistic"
    whitens: ClassVar[bool] = True

    def _scaled(self, scores: Tensor, inverse_temperature: float | Tensor) -> Tensor:
        x = torch.where(scores == -torch.inf, -torch.inf, whiten_and_squash(scores))
        return centered(x) * (2 * inverse_temperature)
