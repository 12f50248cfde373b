"""Top-k operators by entropic optimal transport: SinkhornSort and SOFT top-k.

The n scores, whitened and squashed into [0, 1], are the sources, with mass 1/n each. The anchors in [0, 1] are
the targets: one per rank (SinkhornSort, Cuturi, Teboul and Vert 2019) or one per group of ranks (SOFT top-k,
Xie et al. 2020), with 1/n of mass per rank. The cost is the squared difference; with the entropy epsilon the plan
is Gamma_ij = exp((f_i + g_j - C_ij) / epsilon), and P is n Gamma, shared equally among the ranks of a group.

Sinkhorn's fixed point is found by Newton's method on the semi-dual: f is eliminated, so that the rows of n Gamma
are softmax(h - C / epsilon) with h = g / epsilon, and h is sought for which the columns have their mass nu. It starts
from the h of the hard transport or, where the transport is smooth, from that of normally distributed scores. The same
Jacobian gives the backward pass in closed form, without unrolling (Xie et al. 2020, the KKT conditions).
"""

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from topk_losses.checks import check_positive
from topk_losses.operator import TopKOperator, refuse_double_backward

WHITENING_EPSILON = 1e-18  # added to the variance: equal scores have a finite gradient
MAX_DAMPING = 1e8
DEFAULT_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-9}
# The typical start saves most Newton steps where epsilon is at least this and anchors are few. It is taken where no
# anchor's mass is off by more than this (relative); elsewhere the hard one leads to the solution sooner.
SMOOTH_EPSILON, CLOSE = 0.1, 0.5


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


def _hard_potentials(x: Tensor, targets: "_Targets", epsilon: float) -> Tensor:
    """The potentials h (batch, A) of the hard transport: exact for epsilon -> 0, close where it is small.

    The scores x (batch, n) go to the anchors in order. The potentials of two neighbouring anchors make the midpoint
    between the last score of the one and the first score of the other indifferent.
    """
    ends, anchors = targets.ends[:-1], targets.anchors
    ordered = x.topk(targets.not_on_last + 1, dim=1).values  # (batch, n but the last anchor's, and its first)
    midpoint = (ordered[:, ends - 1] + ordered[:, ends]) / 2  # (batch, A - 1)
    upper, lower = anchors[:-1], anchors[1:]
    step = (lower - upper) * (lower + upper - 2 * midpoint) / epsilon  # (batch, A - 1)
    return torch.nn.functional.pad(step.cumsum(1), (1, 0))


class _Targets(NamedTuple):
    """What a transport knows before it sees any score; (A,) each.

    ends: last rank of each anchor's group. not_on_last: scores that do not belong on the last anchor. sizes: ranks that
    share each anchor. mass: sizes / n. typical: potentials of normally distributed scores, None if of no use.
    """

    ends: Tensor
    not_on_last: int
    anchors: Tensor
    sizes: Tensor
    mass: Tensor
    typical: Tensor | None


@functools.lru_cache(maxsize=64)
def _targets(ends: tuple[int, ...], epsilon: float, dtype: torch.dtype, device: torch.device) -> _Targets:
    """The targets of ranks 1..n grouped by `ends`; kept, since on a GPU fresh constants would make every call wait."""
    n, not_on_last = ends[-1], ends[-2]
    with torch.inference_mode(False), torch.no_grad():
        group_ends = torch.tensor(ends)
        sizes = torch.diff(group_ends, prepend=group_ends.new_zeros(1)).double()
        anchors = torch.linspace(1, 0, len(ends), dtype=torch.float64)
        floats = (anchors, sizes, sizes / n)
        typical = None
        if epsilon >= SMOOTH_EPSILON and 2 * len(ends) <= n:
            quantiles = torch.special.ndtri((torch.arange(n, dtype=torch.float64) + 0.5) / n)  # (n,)
            x = whiten_and_squash(quantiles.unsqueeze(0))
            start = _hard_potentials(x, _Targets(group_ends, not_on_last, *floats, None), epsilon)
            typical = _potentials(_kernel(x, anchors, epsilon), sizes / n, lambda: start, None, 1e-3, 20)[0].squeeze(0)
            typical = typical.to(device, dtype)
        return _Targets(group_ends.to(device), not_on_last, *(each.to(device, dtype) for each in floats), typical)


def _kernel(x: Tensor, anchors: Tensor, epsilon: float) -> Tensor:
    """-(x - y)^2 / epsilon, (batch, A, n), without the x^2 / epsilon that no softmax over anchors sees."""
    y = anchors.unsqueeze(1)  # (A, 1)
    return (2 * x.unsqueeze(1) - y) * (y / epsilon)


def _potentials(
    kernel: Tensor,
    mass: Tensor,
    hard: Callable[[], Tensor],
    typical: Tensor | None,
    tolerance: float,
    max_iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Newton's method from typical (A,) where that is close, else from hard(): h, P (batch, A, n), error (batch,)."""
    # On the CPU looking at an error costs nothing; on a device it would wait for all work under way.
    may_look = kernel.device.type == "cpu"

    def evaluate(h: Tensor) -> tuple[Tensor, ...]:
        P = (kernel + h.unsqueeze(2)).softmax(1)  # (batch, A, n)
        c = P.mean(2)  # (batch, A)
        return h, P, c, ((mass - c) / mass).abs().amax(1)  # error (batch,)

    def choose(better: Tensor, new: tuple[Tensor, ...], old: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if may_look and bool(better.all()):
            return new
        return tuple(torch.where(better.view(-1, *[1] * (a.dim() - 1)), a, b) for a, b in zip(new, old))

    close = torch.zeros((), dtype=torch.bool, device=kernel.device)  # which samples start from typical, () or (batch,)
    if typical is None:
        state = evaluate(hard())
    else:
        state = evaluate(typical.expand(len(kernel), -1))
        close = state[3] <= CLOSE
        if not (may_look and bool(close.all())):
            state = choose(close, state, evaluate(hard()))
    damping = torch.zeros_like(state[3])  # (batch,)
    for _ in range(max_iterations):
        h, P, c, error = state
        if may_look and not bool((error > tolerance).any()):
            break
        # Newton's step for log c = log nu where all masses are near theirs in proportion, for c = nu elsewhere.
        right = torch.where(close.unsqueeze(-1), c * (mass / c).log(), mass - c)  # (batch, A)
        step = _solve_laplacian(P, damping.unsqueeze(1), right)  # (batch, A)
        new = evaluate(h + step)
        better = new[3] < error  # (batch,); false for NaN
        state = choose(better, new, state)
        # A rejected step is shortened towards nu / c - 1, the first order of a Sinkhorn iteration.
        damping = torch.where(better, damping / 8, (damping * 4).clamp(1e-3, MAX_DAMPING))
    return state[0], state[1], state[3]


class _Transport(torch.autograd.Function):
    """P = n Gamma^T (batch, A, n) for points x (batch, n), and the largest relative error of an anchor's mass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, targets: _Targets, epsilon: float, tolerance: float, max_iterations: int
    ) -> tuple[Tensor, Tensor]:
        kernel = _kernel(x, targets.anchors, epsilon)
        hard = functools.partial(_hard_potentials, x, targets, epsilon)
        _, P, error = _potentials(kernel, targets.mass, hard, targets.typical, tolerance, max_iterations)
        ctx.save_for_backward(targets.anchors, P)
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
        return refuse_double_backward(grad_x, grad, P), None, None, None, None


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

    def _ends(self, n: int) -> tuple[int, ...]:
        """The last rank of each anchor's group."""
        raise TypeError(f"{type(self).__name__} does not define _ends")

    @torch.compiler.disable
    def _plan(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """P over anchors (batch, A, n), and the number of ranks that share each anchor (A,)."""
        epsilon = 1 / self.inverse_temperature
        targets = _targets(self._ends(scores.shape[1]), epsilon, scores.dtype, scores.device)
        x = whiten_and_squash(scores)
        tolerance = DEFAULT_TOLERANCE[scores.dtype] if self.tolerance is None else self.tolerance
        if tolerance != self.warn_above:  # another dtype: what was enough for it says nothing here
            self.warn_above, self.largest_error = tolerance, torch.zeros_like(self.largest_error)
        # Autocast would run the matrix products of the solver in half precision; the meta device knows no autocast.
        kind = scores.device.type
        with contextlib.nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False):
            P, error = _Transport.apply(x, targets, epsilon, tolerance, self.max_iterations)
        # A sample with a NaN has no error to speak of; its P is NaN.
        self.largest_error = torch.cat([error.double().nan_to_num(nan=0.0), self.largest_error.view(1)]).amax()
        if kind == "cpu":
            self.check_convergence()
        return P, targets.sizes

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

    def _ends(self, n: int) -> tuple[int, ...]:
        return tuple(range(1, n + 1))

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
        anchor_of_rank = torch.searchsorted(torch.tensor(self.boundaries), torch.arange(1, k + 1))  # (k,)
        self.register_buffer("anchor_of_rank", anchor_of_rank, False)

    def _ends(self, n: int) -> tuple[int, ...]:
        return (*self.boundaries, n)

    def _per_rank(self, sizes: Tensor) -> tuple[Tensor, Tensor]:
        return self.anchor_of_rank, 1 / sizes[self.anchor_of_rank]
