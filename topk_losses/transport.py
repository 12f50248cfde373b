"""Top-k operators by entropic optimal transport: SinkhornSort and SOFT top-k.

The n scores, whitened and squashed into [0, 1], are the sources, with mass 1/n each; the targets are anchors in [0, 1].
The cost is the squared difference, the entropy epsilon = 1 / inverse_temperature.

With two anchors the plan is a logistic function of x - theta, and theta the root of one equation. With more, Sinkhorn's
fixed point is found by Newton's method on the semi-dual: P, n times the plan, is the softmax over anchors of
h - C / epsilon, and h is sought for which the anchors have their mass. Gradients are those of the solution, by the
implicit function theorem, not of the iterations (Xie et al. 2020); they are differentiable in turn.
"""

import warnings
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch.nn.functional import pad

from topk_losses.checks import check_integer, check_positive, has_known_values, is_ordinary
from topk_losses.kernels import kernel
from topk_losses.operator import TopKOperator, at_target, finite, is_mass
from topk_losses.threshold import ThresholdOperator, as_tensor

# Whitening divides by the standard deviation, but by this at least, about: its slope is bounded where scores are equal,
# and one step from a head of zeros does not fill Adam's memory with a gradient that never comes again.
LEAST_STD = 0.1
FAR = 3.0  # normal scores, 100 of them, reach about twice as deep as their mean; one class of four at -1e4 is far
DEEPEST = 1e30  # of a class at -inf
ROUNDS = 5  # until the weights of classes that lie far below have come to rest: two or three do
MAX_DAMPING = 1e8
# Largest error of a mass that counts as converged, relative to it, where rounding allows that.
DEFAULT_TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-9}


def whiten_and_squash(scores: Tensor) -> Tensor:
    """sigmoid((s - mean) / std) per sample: (rows, n) in [0, 1], as in Cuturi et al. 2019 and OTT, where all is well.

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
    """P = softmax over anchors of h - C / epsilon, (rows, n, A), with h such that its means over scores are `mass`.

    logits (rows, n, A): -C / epsilon. mass (A,), summing to 1. start (rows, A): h to begin with. Also returned: the
    largest error of a mass, relative to it, per row. Anchors are last here, where a softmax is fastest.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        logits: Tensor, mass: Tensor, start: Tensor, tolerance: float, max_iterations: int
    ) -> tuple[Tensor, Tensor]:
        def evaluate(h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            P = (logits + h.unsqueeze(1)).softmax(2)  # (rows, n, A)
            c = P.mean(1)  # (rows, A)
            # (rows,) relative to the smaller one: an anchor that has lost all its mass would be past recovery
            return P, c, ((mass - c).abs() / torch.minimum(mass, c)).amax(1)

        h = start
        P, c, error = evaluate(h)
        damping = torch.zeros_like(error)  # (rows,)
        may_look = has_known_values(logits)
        for _ in range(max_iterations):
            going = ~(error <= tolerance)  # (rows,); a row stops where it would alone
            if may_look and not bool(going.any()):
                break
            new = h + _solve_laplacian(P, damping.unsqueeze(1), mass - c)  # (rows, A)
            new_P, new_c, new_error = evaluate(new)
            better = (new_error < error) & going  # (rows,); false for NaN
            h, c = torch.where(better.unsqueeze(1), new, h), torch.where(better.unsqueeze(1), new_c, c)
            P, error = torch.where(better.view(-1, 1, 1), new_P, P), torch.where(better, new_error, error)
            # A rejected step is shortened towards nu / c - 1, the first order of a Sinkhorn iteration.
            damping = torch.where(better, damping / 8, (damping * 4).clamp(1e-3, MAX_DAMPING))
        return P, error

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(output[0])
        ctx.save_for_forward(output[0])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (P,) = ctx.saved_tensors
        weighted = grad * P  # (rows, n, A)
        mean = weighted.sum(2, keepdim=True)  # (rows, n, 1); by the logits at fixed h the gradient is P (grad - mean)
        # The masses c(h, C) = nu fix h: dh = -(dc/dh)^-1 dc/dC dC, of which this is the transpose.
        of_mass = weighted.sum(1) - (mean.mT @ P).squeeze(1)  # (rows, A)
        adjoint = _solve_laplacian(P, _damping(P), of_mass).unsqueeze(2) / P.shape[1]  # (rows, A, 1)
        return weighted - P * (mean + adjoint.mT - P @ adjoint), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> tuple[Tensor, None]:
        (P,) = ctx.saved_tensors
        change = P * (tangent - (P * tangent).sum(2, keepdim=True))  # (rows, n, A), at fixed h
        h = _solve_laplacian(P, _damping(P), -change.mean(1)).unsqueeze(2)  # (rows, A, 1), its change
        return change + P * (h.mT - P @ h), None


def _damping(P: Tensor) -> float:
    """Keeps a transport that is all but hard solvable."""
    return 8 * torch.finfo(P.dtype).eps


def _solve_laplacian(P: Tensor, damping: Tensor | float, right: Tensor) -> Tensor:
    """Solve (d c / d h + damping diag(c)) v = right for v (rows, A), with v = 0 at the last anchor.

    c = mean over scores of P is the mass of the anchors, and P (rows, n, A) has rows that sum to 1, so that
    d c / d h = diag(c) - P^T P / n is the Laplacian of a graph with the weights P^T P / n. Its diagonal is the sum
    of the weights beside it: a sum of non-negative terms, where diag(c) - ... would cancel.
    """
    laplacian = -(P[:, :, :-1].mT @ P)  # (rows, A - 1, A), n times it
    laplacian.diagonal(dim1=1, dim2=2).zero_()
    diagonal = damping * P[:, :, :-1].sum(1) - laplacian.sum(2)  # (rows, A - 1)
    laplacian.diagonal(dim1=1, dim2=2).copy_(diagonal)
    # LU is faster on a CPU, but MKL's fails for large systems that are all but singular.
    factor, _ = torch.linalg.cholesky_ex(laplacian[:, :, :-1])
    solution = torch.cholesky_solve((right[:, :-1] * P.shape[1]).unsqueeze(2), factor).squeeze(2)  # (rows, A - 1)
    return pad(solution, (0, 1))


class _TransportOperator(TopKOperator):
    """What the two transports share: how well they converged, and the plan with an anchor per top rank."""

    shown = (*TopKOperator.shown, "tolerance", "max_iterations")

    def __init__(
        self, k: SupportsIndex, inverse_temperature: float | Tensor, tolerance: float | None = None,
        max_iterations: SupportsIndex = 30,
    ) -> None:  # fmt: skip
        super().__init__(k, inverse_temperature)
        self.tolerance = None if tolerance is None else check_positive("tolerance", tolerance)
        self.max_iterations = check_integer("max_iterations", max_iterations, 1)
        self.largest_error: Tensor | None = None

    def check_convergence(self) -> float:
        """The largest relative error of a mass since the last call; RuntimeWarning if it is above the tolerance.

        On the CPU each use of the operator warns by itself. On CUDA it would have to wait for the device there, so that
        a training loop calls this where it synchronises anyway, for instance once per epoch.
        """
        error, self.largest_error = self.largest_error, None
        return 0.0 if error is None else self._warn_above(error)

    def _tolerance_of(self, dtype: torch.dtype) -> float:
        beta = self.inverse_temperature
        if isinstance(beta, Tensor):
            beta = float(beta.detach()) if has_known_values(beta) else 1.0
        # the logits are of the size of beta, and their rounding moves the masses
        return self.tolerance or max(DEFAULT_TOLERANCE[dtype], torch.finfo(dtype).eps * beta)

    def _warn_above(self, error: Tensor) -> float:
        largest, tolerance = float(error), self._tolerance_of(error.dtype)
        if largest > tolerance:
            warnings.warn(
                f"{type(self).__name__}: the optimal transport did not converge within {self.max_iterations} "
                f"iterations: a mass is off by {largest:.1e} (relative), the tolerance is {tolerance:.0e}. Lower "
                f"inverse_temperature={float(self.inverse_temperature):g}, use float64 or raise max_iterations.",
                RuntimeWarning,
                stacklevel=3,
            )
        return largest

    def _record(self, error: Tensor) -> None:
        """Note the errors (rows,) of a solution. A sample with a NaN has no error to speak of; its P is NaN."""
        if torch.compiler.is_compiling() or not is_ordinary(error) or not error.numel():
            return
        largest, before = error.detach().nan_to_num(nan=0.0).amax(), self.largest_error
        if has_known_values(error):
            self._warn_above(largest)
        if before is None or before.is_inference() or before.device != largest.device or before.dtype != largest.dtype:
            self.largest_error = largest
        else:  # in place, for a graph that was captured
            before.copy_(torch.maximum(before, largest))

    def _anchors(self, n: int) -> int:
        """The number of anchors, one per rank, but the last for all the ranks that are left."""
        return n

    def _matrix(self, scores: Tensor) -> Tensor:
        x, anchors = whiten_and_squash(scores), self._anchors(scores.shape[1])
        P, error = _anchored(x, self.beta, anchors, self._tolerance_of(x.dtype), self.max_iterations)
        self._record(error)
        return P[:, : self.k]


def _anchored(
    x: Tensor, beta: float | Tensor, num_anchors: int, tolerance: float, max_iterations: int
) -> tuple[Tensor, Tensor]:
    """P (rows, A, n) for evenly spaced anchors in [0, 1], of which the last has the mass of all ranks from A on.

    x (rows, n): the whitened scores. Also returned: the largest relative error of a mass per row.
    """
    n = x.shape[1]
    anchors = torch.linspace(1, 0, num_anchors, dtype=x.dtype, device=x.device)  # (A,)
    mass = pad(torch.full_like(anchors[1:], 1 / n), (0, 1), value=(n - num_anchors + 1) / n)
    # -(x - y)^2 / epsilon, without the x^2 / epsilon that no softmax over anchors sees
    scaled = anchors * beta  # (A,)
    logits = x.unsqueeze(2) * (2 * scaled) - anchors * scaled  # (rows, n, A)
    with torch.no_grad():
        # The start: the hard transport's potentials. Those of two neighbouring anchors make the midpoint between
        # the last score of the one and the first score of the other indifferent.
        ordered = x.topk(num_anchors, dim=1).values  # (rows, A)
        upper, lower = anchors[:-1], anchors[1:]
        steps = (lower - upper) * (lower + upper - ordered[:, :-1] - ordered[:, 1:]) * beta  # (rows, A - 1)
        start = pad(steps.cumsum(1), (1, 0))  # (rows, A)
    P, error = _Plan.apply(logits, mass, start, tolerance, max_iterations)
    return P.mT, error


def sinkhorn(x: Tensor, labels: Tensor, beta: Tensor, k: int, tolerance: float, max_iterations: int) -> list[Tensor]:
    """What the kernel computes: P[1..k, y], (rows, k), of the whitened scores x (rows, n), and its errors (rows,)."""
    P, error = _anchored(x, beta, x.shape[1], tolerance, max_iterations)
    return [at_target(P[:, :k], labels), error]


def outputs_of_kernel(x: Tensor, labels: Tensor, beta: Tensor, k: int, *_: Any) -> list[Tensor]:
    """Room for the column (rows, k), its errors (rows,), and the potentials (rows, n) that its backward pass reads."""
    return [x.new_empty(len(x), k), x.new_empty(len(x)), x.new_empty(x.shape)]


class SinkhornSort(_TransportOperator):
    """SinkhornSort (Cuturi, Teboul and Vert 2019): n sorted anchors, evenly spaced in [0, 1].

    inverse_temperature: 1 / epsilon. No published value is known; OTT's default is 100 (epsilon .01). tolerance:
    largest error of an anchor's mass, relative to it, above 0; default 2e-5 in float32 and 1e-9 in float64.
    max_iterations: Newton steps, each with an n x n solve; on CUDA all are made, so as not to wait for the device. A
    transport that misses the tolerance warns.
    """

    def _column(self, scores: Tensor, target: Tensor) -> Tensor:
        if is_mass(target):
            return super()._column(scores, target)
        solve = kernel("sinkhorn", scores, self.inverse_temperature) or sinkhorn
        settings = (self.k, self._tolerance_of(scores.dtype), self.max_iterations)
        column, error, *_ = solve(whiten_and_squash(scores), target, as_tensor(self.beta, scores), *settings)
        self._record(error)
        return column


class SortedSoftTopK(_TransportOperator):
    """The sorted form of SOFT top-k (Xie et al. 2020): an anchor for each of the k top ranks and one for all the rest.

    They are evenly spaced in [0, 1], so that where they lie depends on k. inverse_temperature: 1 / epsilon; default of
    the authors: 10 (epsilon .1). tolerance and max_iterations as in SinkhornSort, with k x k solves.
    """

    def _anchors(self, n: int) -> int:
        return min(self.k + 1, n)


class SoftTopK(ThresholdOperator):
    """SOFT top-k (Xie et al. 2020): entropic transport to two anchors, 1 for the k highest and 0 for the rest.

    For each k on its own: mask_k = sigmoid((2 x - theta_k) / epsilon) of the whitened and squashed scores x, with
    theta_k such that it sums to k: the mask of LML. Masks are nested, so that row r of P is mask_r - mask_{r-1}, and a
    loss is a mixture of masks, sum_k P_K(k) mask_k[y]: continuous in P_K, however P_K is given. inverse_temperature:
    1 / epsilon; the authors' default is 10 (epsilon .1).
    """

    family = "logistic"

    def _scaled(self, scores: Tensor) -> tuple[Tensor, float | Tensor]:
        return whiten_and_squash(scores), 2 * self.beta
