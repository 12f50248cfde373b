"""Top-k operators by entropic optimal transport: SinkhornSort and SOFT top-k.

The n scores, whitened and squashed into [0, 1], are the sources, with mass 1/n each. The anchors in [0, 1] are
the targets: one per rank (SinkhornSort, Cuturi, Teboul and Vert 2019) or one per group of ranks (SOFT top-k,
Xie et al. 2020), with 1/n of mass per rank. The cost is the squared difference; with the entropy epsilon the plan
is Gamma_ij = exp((f_i + g_j - C_ij) / epsilon), and P is n Gamma, shared equally among the ranks of a group.

Sinkhorn's fixed point is found by Newton's method on the semi-dual: f is eliminated, so that the rows of n Gamma
are softmax(h - C / epsilon) with h = g / epsilon, and h is sought for which the columns have their mass nu. The
same Jacobian gives the backward pass in closed form, without unrolling (Xie et al. 2020, the KKT conditions).
"""

import contextlib
import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from topk_losses.checks import check_positive
from topk_losses.operator import TopKOperator, refuse_double_backward

WHITENING_EPSILON = 1e-18  # added to the variance: equal scores have a finite gradient
MAX_DAMPING = 1e8
DEFAULT_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-9}


def whiten_and_squash(scores: Tensor) -> Tensor:
    """sigmoid((s - mean) / std) per sample: (batch, n) in (0, 1), as in Cuturi et al. 2019 and OTT."""
    centred = scores - scores.mean(1, keepdim=True)
    return torch.sigmoid(centred * torch.rsqrt(centred.square().mean(1, keepdim=True) + WHITENING_EPSILON))


def _solve_laplacian(P: Tensor, damping: Tensor | float, right: Tensor) -> Tensor:
    """Solve (d c / d h + damping diag(c)) v = right for v (batch, A), with v = 0 at the last anchor.

    c = mean over scores of P is the mass of the anchors, and P (batch, A, n) has columns that sum to 1, so that
    d c / d h = diag(c) - P P^T / n is the Laplacian of a graph with the weights P P^T / n. Its diagonal is the sum
    of the weights beside it: a sum of non-negative terms, where diag(c) - ... would cancel.
    """
    weights = P @ P.mT / P.shape[2]  # (batch, A, A)
    off_diagonal = weights - torch.diag_embed(weights.diagonal(dim1=1, dim2=2))
    diagonal = off_diagonal.sum(2) + damping * P.mean(2)  # (batch, A)
    laplacian = (torch.diag_embed(diagonal) - off_diagonal)[:, :-1, :-1]  # (batch, A - 1, A - 1)
    factor, _ = torch.linalg.cholesky_ex(laplacian)
    solution = torch.cholesky_solve(right[:, :-1].unsqueeze(2), factor).squeeze(2)  # (batch, A - 1)
    return torch.nn.functional.pad(solution, (0, 1))


def _hard_potentials(x: Tensor, anchors: Tensor, ends: Tensor, last: int, epsilon: float) -> Tensor:
    """The potentials h (batch, A) of the hard transport: exact for epsilon -> 0, a close start elsewhere.

    The scores go to the anchors in order. The potentials of two neighbouring anchors make the midpoint between
    the last score of the one and the first score of the other indifferent. last: scores not on the last anchor.
    """
    ordered = x.topk(last + 1, dim=1).values  # (batch, last + 1)
    midpoint = (ordered[:, ends[:-1] - 1] + ordered[:, ends[:-1]]) / 2  # (batch, A - 1)
    upper, lower = anchors[:-1], anchors[1:]
    step = (lower - upper) * (lower + upper - 2 * midpoint) / epsilon  # (batch, A - 1)
    return torch.nn.functional.pad(step.cumsum(1), (1, 0))


class _Transport(torch.autograd.Function):
    """P = n Gamma^T (batch, A, n) for points x (batch, n), and the largest relative error of an anchor's mass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchors: Tensor,
        mass: Tensor,
        h: Tensor,
        epsilon: float,
        tolerance: float,
        max_iterations: int,
    ) -> tuple[Tensor, Tensor]:
        # -(x - y)^2 / epsilon without the x^2 / epsilon that no softmax over anchors sees
        y = anchors.unsqueeze(1)  # (A, 1)
        kernel = (2 * x.unsqueeze(1) - y) * (y / epsilon)  # (batch, A, n)

        def evaluate(h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            P = (kernel + h.unsqueeze(2)).softmax(1)  # (batch, A, n)
            residual = mass - P.mean(2)  # (batch, A)
            return P, residual, (residual / mass).abs().amax(1)  # error (batch,)

        P, residual, error = evaluate(h)
        damping = torch.zeros_like(error)  # (batch,)
        for _ in range(max_iterations):
            # On the CPU reading the error costs nothing; on a device it would wait for all work under way.
            if x.device.type == "cpu" and not bool((error > tolerance).any()):
                break
            newton = h + _solve_laplacian(P, damping.unsqueeze(1), residual)  # (batch, A)
            P_new, residual_new, error_new = evaluate(newton)
            better = error_new < error  # (batch,); false for NaN
            h = torch.where(better.unsqueeze(1), newton, h)
            P = torch.where(better[:, None, None], P_new, P)
            residual = torch.where(better.unsqueeze(1), residual_new, residual)
            error = torch.where(better, error_new, error)
            # A rejected step is shortened towards diag(c)^-1 residual, the first order of a Sinkhorn update.
            damping = torch.where(better, damping / 8, (damping * 4).clamp(1e-3, MAX_DAMPING))
        ctx.save_for_backward(anchors, P)
        ctx.epsilon = epsilon
        ctx.mark_non_differentiable(error)
        return P, error

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        anchors, P = ctx.saved_tensors
        with torch.no_grad():
            direct = P * (grad - (grad * P).sum(1, keepdim=True))  # (batch, A, n) dL/d(-C / epsilon) at fixed h
            # The masses c(h, C) = nu fix h: dh = -(dc/dh)^-1 dc/dC dC, of which this is the transpose.
            damping = 8 * torch.finfo(P.dtype).eps  # keeps a transport that is all but hard solvable
            adjoint = _solve_laplacian(P, damping, direct.sum(2)).unsqueeze(2)  # (batch, A, 1)
            through_h = P * (adjoint - (P * adjoint).sum(1, keepdim=True)) / P.shape[2]
            grad_x = (anchors @ (direct - through_h)) * (2 / ctx.epsilon)  # (batch, n)
        return refuse_double_backward(grad_x, grad, P), None, None, None, None, None, None


class _TransportOperator(TopKOperator):
    """What the two transports share; subclasses say which rank ends each anchor's group."""

    def __init__(self, k: int, inverse_temperature: float, tolerance: float | None, max_iterations: int) -> None:
        super().__init__(k)
        self.inverse_temperature = check_positive("inverse_temperature", inverse_temperature)
        self.tolerance = None if tolerance is None else check_positive("tolerance", tolerance)
        if max_iterations < 1:
            raise ValueError(f"max_iterations must be at least 1, got {max_iterations}")
        self.max_iterations = int(max_iterations)
        self.warned = False
        self.warn_above = 0.0  # the tolerance of the last call
        self.register_buffer("largest_error", torch.zeros((), dtype=torch.float64), False)

    def extra_repr(self) -> str:
        """The configuration, for printing."""
        return f"k={self.k}, inverse_temperature={self.inverse_temperature:g}, tolerance={self.tolerance}"

    def check_convergence(self) -> float:
        """The largest relative error of an anchor's mass so far; RuntimeWarning, once, if above the tolerance.

        On the CPU each call of the operator does this by itself. On CUDA it would have to wait for the device
        there, so that a training loop calls it where it synchronises anyway, for instance once per epoch.
        """
        error = float(self.largest_error)
        if error > self.warn_above and not self.warned:
            self.warned = True
            warnings.warn(
                f"{type(self).__name__}: the optimal transport did not converge within {self.max_iterations} "
                f"Newton steps: an anchor's mass is off by {error:.1e} (relative), the tolerance is "
                f"{self.warn_above:.0e}. Lower inverse_temperature={self.inverse_temperature:g}, use float64 or raise "
                "max_iterations. Shown once.",
                RuntimeWarning,
                stacklevel=3,
            )
        return error

    def _ends(self, n: int) -> tuple[Tensor, int]:
        raise TypeError(f"{type(self).__name__} does not define _ends")

    @torch.compiler.disable
    def _plan(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """P over anchors (batch, A, n), and the number of ranks that share each anchor (A,)."""
        n = scores.shape[1]
        ends, last = self._ends(n)  # (A,) last rank of each anchor's group
        sizes = torch.diff(ends, prepend=ends.new_zeros(1)).to(scores.dtype)  # (A,)
        anchors = torch.linspace(1, 0, len(ends), dtype=scores.dtype, device=scores.device)
        x = whiten_and_squash(scores)
        epsilon = 1 / self.inverse_temperature
        tolerance = DEFAULT_TOLERANCE[scores.dtype] if self.tolerance is None else self.tolerance
        if tolerance != self.warn_above:  # another dtype: what was enough for it says nothing here
            self.warn_above, self.largest_error = tolerance, torch.zeros_like(self.largest_error)
        with torch.no_grad():
            h = _hard_potentials(x, anchors, ends, last, epsilon)
        # Autocast would run the matrix products of the solver in half precision; the meta device knows no autocast.
        kind = scores.device.type
        with contextlib.nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False):
            P, error = _Transport.apply(x, anchors, sizes / n, h, epsilon, tolerance, self.max_iterations)
        # A sample with a NaN has no error to speak of; its P is NaN.
        self.largest_error = torch.cat([error.double().nan_to_num(nan=0.0), self.largest_error.view(1)]).amax()
        if kind == "cpu":
            self.check_convergence()
        return P, sizes

    def _per_rank(self, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """For ranks 1..k: the anchor (k,) and the share of its mass 1 / size (k,)."""
        raise TypeError(f"{type(self).__name__} does not define _per_rank")

    def _rank_probabilities(self, scores: Tensor, labels: Tensor) -> Tensor:
        P, sizes = self._plan(scores)
        anchor, share = self._per_rank(sizes)
        if labels.is_floating_point():
            column = (P @ labels.to(P.dtype).unsqueeze(2)).squeeze(2)  # (batch, A)
        else:
            column = P[torch.arange(len(P), device=P.device), :, labels]  # (batch, A)
        return column[:, anchor] * share

    def _permutation_matrix(self, scores: Tensor) -> Tensor:
        P, sizes = self._plan(scores)
        anchor, share = self._per_rank(sizes)
        return P[:, anchor] * share.unsqueeze(1)  # (batch, k, n)


class SinkhornSort(_TransportOperator):
    """SinkhornSort (Cuturi, Teboul and Vert 2019): n sorted anchors, evenly spaced in [0, 1].

    k: ranks, 1 <= k < n. inverse_temperature: 1 / epsilon > 0, larger = closer to the hard sort; default 100
    (epsilon .01, the default of OTT), since no published value is known. tolerance: largest relative error of an
    anchor's mass; default 1e-3 in float32 and 1e-9 in float64. max_iterations: Newton steps, each with an n x n
    solve; on CUDA all are made, so as not to wait for the device. A transport that misses the tolerance warns
    once. Raises ValueError for a non-positive inverse temperature or tolerance.
    """

    def __init__(
        self,
        k: int,
        inverse_temperature: float = 100.0,
        tolerance: float | None = None,
        max_iterations: int = 20,
    ) -> None:
        super().__init__(k, inverse_temperature, tolerance, max_iterations)

    def _ends(self, n: int) -> tuple[Tensor, int]:
        return torch.arange(1, n + 1, device=self.largest_error.device), n - 1

    def _per_rank(self, sizes: Tensor) -> tuple[Tensor, Tensor]:
        return torch.arange(self.k, device=sizes.device), sizes[: self.k]


class SoftTopK(_TransportOperator):
    """SOFT top-k (Xie et al. 2020): one anchor for each top rank, or group of ranks, and one for the rest.

    k: ranks, 1 <= k < n. boundaries: the last rank of each group, increasing, at most k; default 1..k, the sorted
    operator; [k] alone is the unsorted operator with two anchors. Ranks of one group share its mass equally in P,
    and so do the ranks below the last group, which is all that a loss sees whose weights are constant within each
    group. Anchors are evenly spaced in [0, 1]. inverse_temperature: 1 / epsilon > 0, larger = closer to the hard
    operator; default 10 (epsilon .1, the authors' default). tolerance and max_iterations as in SinkhornSort, with
    A x A solves, A the number of anchors. Raises ValueError for a non-positive inverse temperature or boundaries
    that do not rise from 1 or more to k or less.
    """

    def __init__(
        self,
        k: int,
        inverse_temperature: float = 10.0,
        boundaries: Sequence[int] | None = None,
        tolerance: float | None = None,
        max_iterations: int = 20,
    ) -> None:
        super().__init__(k, inverse_temperature, tolerance, max_iterations)
        self.boundaries = list(range(1, k + 1)) if boundaries is None else list(boundaries)
        rising = all(a < b for a, b in itertools.pairwise(self.boundaries))
        if not self.boundaries or self.boundaries[0] < 1 or self.boundaries[-1] > k or not rising:
            raise ValueError(f"boundaries must rise from at least 1 to at most k={k}, got {boundaries}")
        group_ends = torch.tensor(self.boundaries)  # (A - 1,)
        self.register_buffer("group_ends", group_ends, False)
        self.register_buffer("anchor_of_rank", torch.searchsorted(group_ends, torch.arange(1, k + 1)), False)

    def _ends(self, n: int) -> tuple[Tensor, int]:
        return torch.cat([self.group_ends, self.group_ends.new_full((1,), n)]), self.boundaries[-1]

    def _per_rank(self, sizes: Tensor) -> tuple[Tensor, Tensor]:
        return self.anchor_of_rank, 1 / sizes[self.anchor_of_rank]
