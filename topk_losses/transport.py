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
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch.nn.functional import pad

from topk_losses.checks import as_operator, check_integer, check_positive, full_precision, has_known_values, is_ordinary
from topk_losses.kernels import find_kernel
from topk_losses.operator import Beta, TopKOperator, as_tensor, at_target, finite, is_mass
from topk_losses.threshold import ThresholdOperator

# Whitening divides by the standard deviation, but by this at least, about: its slope is bounded where scores are equal,
# and one step from a last layer of zeros does not fill Adam's memory with a gradient that never comes again.
LEAST_STD = 0.1
FAR = 3.0  # normal scores, 100 of them, reach about twice as deep as their mean; one class of four at -1e4 is far
DEEPEST = 1e30  # of a class at -inf
ROUNDS = 5  # until the weights of classes that lie far below have come to rest: two or three do
MAX_DAMPING = 1e8
OUT = -1e30  # exponent of a target point beyond the number of live classes
# Largest error of a mass that counts as converged, relative to it, where rounding allows that.
DEFAULT_TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-9}


def whiten_and_squash(scores: Tensor) -> Tensor:
    """Compute sigmoid((s - mean) / std) per sample: (rows, n) in [0, 1], as in Cuturi et al. 2019 and OTT.

    A class that lies FAR times as deep below the highest score as the mean does, and LEAST_STD, counts less and less
    for mean and standard deviation, and its own depth grows as a logarithm only: a class at -1e4 neither blunts the
    others nor loses its gradient, and one at -inf, which does not count at all, is the limit. std is sqrt(variance +
    LEAST_STD^2).
    """
    depth = (finite(scores).amax(1, keepdim=True) - scores).clamp(max=DEEPEST)  # (rows, n), >= 0
    weights = (scores > -torch.inf).to(scores.dtype)  # (rows, n)
    counted = torch.where(weights > 0, depth, 0)  # products of larger ones overflow in second derivatives
    for step in range(ROUNDS):
        mean = (weights * counted).sum(1, keepdim=True) / weights.sum(1, keepdim=True).clamp(min=1)  # (rows, 1)
        unit = (FAR * mean).clamp(min=LEAST_STD)  # of depth, from which on a class counts less
        relative = (depth / unit).clamp(min=1)  # (rows, n)
        if step == ROUNDS - 1 or (has_known_values(scores) and bool((relative <= 1).all())):
            break
        weights = relative**-4.0
    size = mean.detach().clamp(min=LEAST_STD)  # (rows, 1), before the square, which might be too large a number
    squares = torch.where(weights > 0, ((counted - mean) / size).square(), 0)
    variance = (weights * squares).sum(1, keepdim=True)
    variance = variance / weights.sum(1, keepdim=True).clamp(min=1) + (LEAST_STD / size).square()
    squashed = torch.minimum(depth, unit) * (1 + 0.25 * relative.log())  # = depth up to FAR * mean
    return torch.sigmoid((mean - squashed) / size * torch.rsqrt(variance))


class _Plan(torch.autograd.Function):
    """P = softmax over target points of h - C / epsilon, (rows, n, A), with h such that its sums are `mass`.

    logits (rows, n, A): -C / epsilon. mass (rows, A), summing to the number of live scores, 0 for points that are out.
    live (rows, n, 1): 1, and 0 for scores that are masked out. start (rows, A): h to begin with. Also returned: the
    largest error of a mass, relative to it, per row. Target points are last here, where a softmax is fastest.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        logits: Tensor, mass: Tensor, live: Tensor, start: Tensor, tolerance: float, max_iterations: int
    ) -> tuple[Tensor, Tensor]:
        def evaluate(h: Tensor) -> tuple[Tensor, Tensor]:
            P = (logits + h.unsqueeze(1)).softmax(2) * live  # (rows, n, A)
            c = P.sum(1)  # (rows, A)
            # (rows,) relative to the smaller one: a point that has lost all its mass would be past recovery
            wrong = (mass - c).abs() / torch.minimum(mass, c)
            return P, torch.where(mass > 0, wrong, 0).amax(1)

        h = start
        P, error = evaluate(h)
        damping = torch.zeros_like(error)  # (rows,)
        may_look = has_known_values(logits)
        for _ in range(max_iterations):
            going = ~(error <= tolerance)  # (rows,); a row stops where it would alone
            if may_look and not bool(going.any()):
                break
            new = h + _solve_laplacian(P, damping.unsqueeze(1), mass - P.sum(1))  # (rows, A)
            new_P, new_error = evaluate(new)
            better = (new_error < error) & going  # (rows,); false for NaN
            h = torch.where(better.unsqueeze(1), new, h)
            P, error = torch.where(better.view(-1, 1, 1), new_P, P), torch.where(better, new_error, error)
            # A rejected step is shortened towards nu / c - 1, the first order of a Sinkhorn iteration.
            damping = torch.where(better, damping / 8, (damping * 4).clamp(1e-3, MAX_DAMPING))
        return P, error

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(output[0])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (P,) = ctx.saved_tensors
        with full_precision(P.device):
            weighted = grad * P  # (rows, n, A)
            mean = weighted.sum(2, keepdim=True)  # (rows, n, 1); at fixed h the gradient is P (grad - mean)
            # The masses c(h, C) = nu fix h: dh = -(dc/dh)^-1 dc/dC dC, of which this is the transpose.
            mass_gradient = weighted.sum(1) - (mean.mT @ P).squeeze(1)  # (rows, A)
            damping = 8 * torch.finfo(P.dtype).eps  # keeps a transport that is all but hard solvable
            adjoint = _solve_laplacian(P, damping, mass_gradient).unsqueeze(2)  # (rows, A, 1)
            return weighted - P * (mean + adjoint.mT - P @ adjoint), None, None, None, None, None


find_plan = as_operator("plan", _Plan, lambda logits, *_: (torch.empty_like(logits), logits.new_empty(logits.shape[0])))


def _solve_laplacian(P: Tensor, damping: Tensor | float, right: Tensor) -> Tensor:
    """Solve (d c / d h + damping diag(c)) v = right for v (rows, A), with v = 0 at the first target point.

    c = sum over scores of P is the mass of the target points, and P (rows, n, A) has rows that sum to 1, so that
    d c / d h = diag(c) - P^T P is the Laplacian of a graph with the weights P^T P. Its diagonal is the sum of the
    weights beside it: a sum of non-negative terms, where diag(c) - ... would cancel. v = 0 at points without mass.
    """
    laplacian = -(P[:, :, 1:].mT @ P)  # (rows, A - 1, A)
    inner, mass = laplacian[:, :, 1:], P[:, :, 1:].sum(1)
    inner.diagonal(dim1=1, dim2=2).zero_()
    diagonal = damping * mass - laplacian.sum(2)  # (rows, A - 1)
    inner.diagonal(dim1=1, dim2=2).copy_(torch.where(mass > 0, diagonal, 1))
    # LU is faster on a CPU, but MKL's fails for large systems that are all but singular.
    factor, _ = torch.linalg.cholesky_ex(inner)
    solution = torch.cholesky_solve(right[:, 1:].unsqueeze(2), factor).squeeze(2)  # (rows, A - 1)
    return pad(solution, (1, 0))


class _TransportOperator(TopKOperator):
    """The common part of the two transports: their convergence, and the plan with a target point per top rank."""

    settings = (*TopKOperator.settings, "tolerance", "max_iterations")
    whitens = True

    def __init__(
        self, k: SupportsIndex, inverse_temperature: Beta = None, tolerance: float | None = None,
        max_iterations: SupportsIndex = 30,
    ) -> None:  # fmt: skip
        super().__init__(k, inverse_temperature)
        self.tolerance = None if tolerance is None else check_positive("tolerance", tolerance)
        self.max_iterations = check_integer("max_iterations", max_iterations, 1)
        self.largest_error: Tensor | None = None  # what was measured, not a setting

    def check_convergence(self) -> float:
        """Return the largest relative error of a mass since the last call; warn if it is above the tolerance.

        On the CPU each use of the operator warns by itself. On CUDA that would wait for the device: call this where you
        synchronise anyway, for instance once per epoch.
        """
        error, self.largest_error = self.largest_error, None
        return 0.0 if error is None else self._warn_above(error, self.inverse_temperature)

    def _default_tolerance(self, dtype: torch.dtype, beta: Any) -> float:
        if isinstance(beta, Tensor):
            beta = float(beta.detach()) if has_known_values(beta) else 1.0
        # the logits are of the size of beta, and their rounding moves the masses
        return self.tolerance or max(DEFAULT_TOLERANCE[dtype], torch.finfo(dtype).eps * beta)

    def _warn_above(self, error: Tensor, beta: Any) -> float:
        largest, tolerance = float(error), self._default_tolerance(error.dtype, beta)
        if largest > tolerance:
            message = (
                f"{type(self).__name__}: the optimal transport did not converge within {self.max_iterations} "
                f"iterations: a mass is off by {largest:.1e} (relative), the tolerance is {tolerance:.0e}. Lower "
                f"inverse_temperature={float(beta):g}, use float64 or raise max_iterations."
            )
            warnings.warn(message, RuntimeWarning, stacklevel=3)
        return largest

    def _record(self, error: Tensor, beta: Any) -> None:
        """Note the errors (rows,) of a solution. A sample with a NaN has no error to speak of; its P is NaN."""
        if torch.compiler.is_compiling() or not is_ordinary(error) or not error.numel():
            return
        largest, before = error.detach().nan_to_num(nan=0.0).amax(), self.largest_error
        if has_known_values(error):
            self._warn_above(largest, beta)
        self.largest_error = largest if before is None else torch.maximum(before.to(largest), largest)

    def _num_points(self, n: int, k: int) -> int:
        """The number of target points, one per rank, but the last for all the ranks that are left."""
        return n

    def _matrix(self, scores: Tensor, k: int, beta: Any, generator: Any = None) -> Tensor:
        x, points = whitened(scores), self._num_points(scores.shape[1], k)
        P, error = _plan(x, beta, points, self._default_tolerance(x.dtype, beta), self.max_iterations)
        self._record(error, beta)
        return P[:, :k]


def whitened(scores: Tensor) -> Tensor:
    """Whiten and squash the scores (rows, n) into [0, 1]; -1 marks a class that is masked out."""
    return torch.where(scores == -torch.inf, -1.0, whiten_and_squash(scores))


def _plan(x: Tensor, beta: Any, num_points: int, tolerance: float, max_iterations: int) -> tuple[Tensor, Tensor]:
    """Compute P (rows, A, n) for evenly spaced target points in [0, 1], the last with the mass of the ranks from A on.

    x (rows, n): the whitened scores, below 0 for classes that are masked out: the other classes have as many target
    points as they are, at most A. Also returned: the largest relative error of a mass per row.
    """
    live = (x >= 0) | x.isnan()  # (rows, n); a NaN row is NaN anyhow
    number = live.sum(1, keepdim=True)  # (rows, 1)
    rank = torch.arange(num_points, device=x.device)  # (A,)
    points = number.clamp(1, num_points)  # (rows, 1), how many of the target points are taken
    taken = rank < points  # (rows, A)
    place = torch.where(taken, 1 - rank / (points - 1).clamp(min=1), 0).to(x.dtype)  # (rows, A), from 1 down to 0
    mass = torch.where(rank == points - 1, number - points + 1, 1).where(taken, 0).to(x.dtype)  # (rows, A)
    # -(x - y)^2 / epsilon, without the x^2 / epsilon that no softmax over target points sees
    scaled = place * beta  # (rows, A)
    logits = x.unsqueeze(2) * (2 * scaled).unsqueeze(1) - (place * scaled).unsqueeze(1)  # (rows, n, A)
    logits = torch.where(taken.unsqueeze(1), logits, OUT)
    with torch.no_grad():
        # The start: the hard transport's potentials. Those of two neighbouring points make the midpoint between the
        # last score of the one and the first score of the other indifferent.
        ordered = x.topk(num_points, dim=1).values  # (rows, A)
        upper, lower = place[:, :-1], place[:, 1:]
        steps = (lower - upper) * (lower + upper - ordered[:, :-1] - ordered[:, 1:]) * beta  # (rows, A - 1)
        start = pad(steps.where(taken[:, 1:], 0).cumsum(1), (1, 0))  # (rows, A)
    P, error = find_plan(logits, mass, live.unsqueeze(2).to(x.dtype), start, tolerance, max_iterations)
    return P.mT, error


def sinkhorn(x: Tensor, labels: Tensor, beta: Tensor, k: int, tolerance: float, max_iterations: int) -> list[Tensor]:
    """Compute what the kernel computes: P[1..k, y], (rows, k), of whitened scores x (rows, n), and errors (rows,)."""
    P, error = _plan(x, beta, x.shape[1], tolerance, max_iterations)
    return [at_target(P[:, :k], labels), error]


class SinkhornSort(_TransportOperator):
    """SinkhornSort (Cuturi, Teboul and Vert 2019): entropic transport to n evenly spaced target points.

    A transport that misses the tolerance warns.

    Args:
        k: number of ranks.
        inverse_temperature: 1 / epsilon (default: 100, that of OTT; no published value is known).
        tolerance: largest error of a point's mass, relative to it, above 0 (default: 2e-5 in float32, 1e-9 in float64).
        max_iterations: Newton steps, each with an n x n solve; on CUDA all are made, so as not to wait for the device.
    """

    default_inverse_temperature = 100.0

    def _column(self, scores: Tensor, target: Tensor, k: int, beta: Any, generator: Any = None) -> Tensor:
        if is_mass(target):
            return super()._column(scores, target, k, beta)
        solve = find_kernel("sinkhorn", scores, beta) or sinkhorn
        settings = (k, self._default_tolerance(scores.dtype, beta), self.max_iterations)
        column, error, *_ = solve(whitened(scores), target, as_tensor(beta, scores), *settings)
        self._record(error, beta)
        return column


class SortedSoftTopK(_TransportOperator):
    """Sorted SOFT top-k (Xie et al. 2020): a target point for each of the k top ranks, and one for the rest.

    The points are evenly spaced in [0, 1], so that their places depend on k.

    Args:
        k: number of ranks.
        inverse_temperature: 1 / epsilon (default: 10, that of the authors).
        tolerance, max_iterations: as in SinkhornSort, with k x k solves.
    """

    default_inverse_temperature = 10.0

    def _num_points(self, n: int, k: int) -> int:
        return min(k + 1, n)


class SoftTopK(ThresholdOperator):
    """SOFT top-k (Xie et al. 2020): entropic transport to two target points, 1 for the k highest and 0 for the rest.

    indicator_k = sigmoid((2 x - theta_k) / epsilon) of the whitened and squashed scores x, with theta_k such that it
    sums to k: the indicator of LML. Each k has a transport of its own. Indicators are nested, so that row r of P is
    indicator_r - indicator_{r-1}.

    Args:
        k: number of ranks.
        inverse_temperature: 1 / epsilon (default: 10, that of the authors).
    """

    default_inverse_temperature = 10.0
    family = "logistic"
    whitens = True

    def _scaled(self, scores: Tensor, beta: Any) -> tuple[Tensor, Any]:
        return torch.where(scores == -torch.inf, -torch.inf, whiten_and_squash(scores)), 2 * beta
