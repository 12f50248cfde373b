"""The interface of the relaxed top-k operators."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, SupportsIndex

import torch
from torch import Tensor

from topk_losses import checks
from topk_losses.compilers import full_precision
from topk_losses.numerics import log_mixture, rank_differences, select_labels, to_compute_dtype


@dataclass(frozen=True)
class TopKOperator:
    """Base class of the relaxed top-k operators; it has settings, and no state.

    A subclass defines `topk_probabilities`: for several k, the probability that a class is among the k highest. This is
    what a loss needs. Three methods may be defined where they cost less: `topk_probabilities_of_labels`,
    `topk_probabilities_of_sets`, and `rank_probabilities_of_classes`, the first k rows of the permutation matrix P.

    scores are (rows, n) in float32 or float64, with autocast off, and -inf for classes that are masked out. ks are the
    ranks k, rising, at most n. The inverse temperature, a number or a tensor () above 0, and the generator of noise are
    arguments of each call.

    Attributes:
        default_inverse_temperature: where a call or a loss gives none.
        logit_std: what "auto" keeps the inverse temperature times the standard deviation of the logits at; None: "auto"
            is the default.
        draws_noise: whether it draws from the generator.
        returns_logarithms: whether the methods above return exact logarithms, whose loss needs no epsilon.
        has_zeros: whether some probabilities are exactly 0, with a gradient of 0, at any temperature.
        exceeds_1: whether P(rank <= k) of a class, a sum of ranks, may exceed 1.
        sums_to_k: whether P(rank <= k) of all classes sum to k.
        compares_pairs: whether every class at once takes memory (rows, n, n).
        whitens: whether the mean and the standard deviation of the scores are taken away first.
    """

    default_inverse_temperature: ClassVar[float] = 1.0
    logit_std: ClassVar[float | None] = None
    draws_noise: ClassVar[bool] = False
    returns_logarithms: ClassVar[bool] = False
    has_zeros: ClassVar[bool] = False
    exceeds_1: ClassVar[bool] = False
    sums_to_k: ClassVar[bool] = True
    compares_pairs: ClassVar[bool] = False
    whitens: ClassVar[bool] = False

    def topk_probabilities(
        self,
        scores: Tensor,
        ks: Sequence[int],
        inverse_temperature: float | Tensor,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Compute P(rank <= k) of every class: (rows, len(ks), n)."""
        raise NotImplementedError(f"{type(self).__name__} does not define topk_probabilities")

    def topk_probabilities_of_labels(
        self,
        scores: Tensor,
        labels: Tensor,
        ks: Sequence[int],
        inverse_temperature: float | Tensor,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Compute P(rank <= k) of the labels (rows,): (rows, len(ks))."""
        of_every_class = self.topk_probabilities(scores, ks, inverse_temperature, generator)
        check_probabilities(self, of_every_class, scores, ks)
        return select_labels(of_every_class, labels)

    def topk_probabilities_of_sets(
        self,
        scores: Tensor,
        sets: Tensor,
        ks: Sequence[int],
        inverse_temperature: float | Tensor,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Compute the sum of P(rank <= k) over sets of classes (rows, n) in [0, 1]: (rows, len(ks))."""
        of_every_class = self.topk_probabilities(scores, ks, inverse_temperature, generator)
        check_probabilities(self, of_every_class, scores, ks)
        if self.returns_logarithms:
            return log_mixture(of_every_class, sets.unsqueeze(1), dim=2)
        return (of_every_class * sets.unsqueeze(1)).sum(2)

    def rank_probabilities_of_classes(
        self,
        scores: Tensor,
        k: int,
        inverse_temperature: float | Tensor,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Compute P(rank = r) of every class for r = 1..k: (rows, k, n)."""
        ks = range(1, k + 1)
        within = self.topk_probabilities(scores, ks, inverse_temperature, generator)
        check_probabilities(self, within, scores, ks)
        if self.returns_logarithms:
            within = within.exp()
        return rank_differences(within)

    def permutation_matrix(
        self,
        logits: Tensor,
        k: SupportsIndex,
        inverse_temperature: float | Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Compute the first k rows of P, (..., k, n), for logits (..., n). Row 0 is rank 1; a masked column is 0.

        Args:
            logits: (..., n), floating point.
            k: number of ranks, 1 <= k <= n.
            inverse_temperature: above 0, a number or a tensor () that receives its gradient; None: the default.
            generator: of operators that draw noise, on the device of the logits; None: PyTorch's own.

        Raises:
            TypeError, ValueError: arguments that do not fit.
        """
        scores = checked_scores(logits)
        k = checks.check_k(k, logits.shape[-1])
        beta = self._checked_temperature(inverse_temperature)
        with full_precision(logits.device):
            P = self.rank_probabilities_of_classes(scores, k, beta, generator)
        checks.check_shape(self, "rank_probabilities_of_classes", P, (scores.shape[0], k, scores.shape[1]))
        P = P.masked_fill((scores == -torch.inf).unsqueeze(1), 0)
        return P.reshape(*logits.shape[:-1], k, logits.shape[-1])

    def rank_probabilities(
        self,
        logits: Tensor,
        labels: Tensor,
        k: SupportsIndex,
        inverse_temperature: float | Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Compute P(rank = r) of the labels (...,) int64 for r = 1..k: (..., k). Arguments: of permutation_matrix."""
        scores = checked_scores(logits)
        k = checks.check_k(k, logits.shape[-1])
        beta = self._checked_temperature(inverse_temperature)
        rows = checks.check_labels(labels, logits.shape[:-1], logits.shape[-1]).reshape(-1)
        with full_precision(logits.device):
            within = self.topk_probabilities_of_labels(scores, rows, range(1, k + 1), beta, generator)
        checks.check_shape(self, "topk_probabilities_of_labels", within, (scores.shape[0], k))
        if self.returns_logarithms:
            within = within.exp()
        of_ranks = rank_differences(within)
        is_masked = scores.gather(1, rows.unsqueeze(1)) == -torch.inf
        return of_ranks.masked_fill(is_masked, 0).reshape(*logits.shape[:-1], k)

    def mask(
        self,
        logits: Tensor,
        k: SupportsIndex,
        inverse_temperature: float | Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Compute the soft top-k indicator, of the shape of the logits. Arguments: of permutation_matrix."""
        scores = checked_scores(logits)
        k = checks.check_k(k, logits.shape[-1])
        beta = self._checked_temperature(inverse_temperature)
        with full_precision(logits.device):
            within = self.topk_probabilities(scores, [k], beta, generator)  # (rows, 1, n)
        check_probabilities(self, within, scores, [k])
        if self.returns_logarithms:
            within = within.exp()
        return within.reshape(logits.shape).masked_fill(logits == -torch.inf, 0)

    def topk_mass(
        self,
        logits: Tensor,
        sets: Tensor,
        k: SupportsIndex,
        inverse_temperature: float | Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Compute how many classes of a set are expected among the k highest, (...,).

        Args:
            logits: (..., n), floating point.
            sets: of the shape of the logits, in [0, 1]: the sum of P(rank <= k) over the classes, weighted so.
            k, inverse_temperature, generator: as in permutation_matrix.
        """
        scores = checked_scores(logits)
        k = checks.check_k(k, logits.shape[-1])
        beta = self._checked_temperature(inverse_temperature)
        sets = checks.check_label_masses(sets, logits, class_dim=-1, several=True)
        rows = sets.reshape(scores.shape).to(scores.dtype).masked_fill(scores == -torch.inf, 0)
        with full_precision(logits.device):
            within = self.topk_probabilities_of_sets(scores, rows, [k], beta, generator)  # (rows, 1)
        checks.check_shape(self, "topk_probabilities_of_sets", within, (scores.shape[0], 1))
        if self.returns_logarithms:
            within = within.exp().masked_fill(~(rows > 0).any(1, keepdim=True), 0)
        return within.reshape(logits.shape[:-1])

    def convergence_error(self, logits: Tensor, inverse_temperature: float | Tensor | None = None) -> float:
        """Return the largest relative error that an iterative solver leaves for these logits; 0 for a closed form."""
        return 0.0

    def _checked_temperature(self, inverse_temperature: float | Tensor | None) -> float | Tensor:
        """Return the inverse temperature of a call from outside."""
        if inverse_temperature is None:
            return self.default_inverse_temperature
        return checks.current_inverse_temperature(inverse_temperature)


def check_probabilities(operator: TopKOperator, of_every_class: Tensor, scores: Tensor, ks: Sequence[int]) -> None:
    """Raise ValueError unless what topk_probabilities returned for scores (rows, n) is (rows, len(ks), n)."""
    rows, n = scores.shape
    checks.check_shape(operator, "topk_probabilities", of_every_class, (rows, len(ks), n))


def checked_scores(logits: Tensor) -> Tensor:
    """Return the logits (..., n) of a call from outside as scores (rows, n), in float32 or float64."""
    checks.check_logits(logits)
    checks.check_has_classes(logits, logits.shape[-1])
    return to_compute_dtype(logits.reshape(-1, logits.shape[-1]))
