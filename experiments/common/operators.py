"""A relaxed top-k operator with the number of ranks and the inverse temperature that a run uses it with."""

from dataclasses import dataclass

import torch
from torch import Tensor

from topk_losses import TopKOperator


@dataclass(frozen=True)
class BoundOperator:
    """A relaxed top-k operator of k ranks.

    Args:
        operator: the operator.
        k: number of ranks.
        inverse_temperature: where a call gives none; None: the operator's default.
    """

    operator: TopKOperator
    k: int
    inverse_temperature: float | None = None

    def __call__(self, scores: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Compute the first k rows of the relaxed permutation matrix of scores (batch, n): (batch, k, n)."""
        return self.operator.permutation_matrix(scores, self.k, self.inverse_temperature, generator)

    def mass(
        self,
        scores: Tensor,
        sets: Tensor,
        inverse_temperature: float | Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Compute how many classes of sets (batch, n) are expected among the k highest: (batch,).

        At most k where the indicators of the operator sum to k.
        """
        if inverse_temperature is None:
            inverse_temperature = self.inverse_temperature
        return self.operator.topk_mass(scores, sets, self.k, inverse_temperature, generator)
