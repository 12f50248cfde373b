"""NeuralSort (Grover et al. 2019) restricted to its first k rows, in O(n log n + n k) per sample.

P[i, :] = softmax(((n + 1 - 2i) s - A 1) / tau), A_jl = |s_j - s_l|, i = 1..k. With the scores sorted,
s_(1) >= s_(2) >= ..., and the gaps delta_q = s_(q) - s_(q+1) >= 0, the softmax argument of s_(r) relative to
that of s_(1) is (2i - 1) D_r - 2 E_r with D_r = sum_{q<r} delta_q and E_r = sum_{q<r} q delta_q: two prefix
sums of non-negative terms, where the definition has n differences of large numbers.
"""

import torch
from torch import Tensor

from topk_losses.backend import LONGEST_ROW, use_triton
from topk_losses.checks import check_positive
from topk_losses.operator import TopKOperator


class NeuralSort(TopKOperator):
    """The first k rows of NeuralSort's relaxed permutation matrix.

    k: ranks, 1 <= k < n. inverse_temperature: 1 / tau > 0, larger = closer to the hard sort; default 0.5, as
    published for ImageNet (CIFAR-100: 0.0625). Equal scores have equal columns in P; their gradient is that of
    the order in which torch.sort puts them. Raises ValueError for a non-positive inverse temperature.
    """

    def __init__(self, k: int, inverse_temperature: float = 0.5) -> None:
        super().__init__(k)
        self.inverse_temperature = check_positive("inverse_temperature", inverse_temperature)
        self.register_buffer("row_factor", 2.0 * torch.arange(1, k + 1) - 1, False)  # (k,)

    def extra_repr(self) -> str:
        """The configuration, for printing."""
        return f"k={self.k}, inverse_temperature={self.inverse_temperature:g}"

    def _log_rows(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Log of P's rows over the sorted classes (batch, k, n), and the class at each place (batch, n)."""
        n = scores.shape[1]
        ordered, order = scores.sort(dim=1, descending=True)  # (batch, n)
        gaps = (ordered[:, :-1] - ordered[:, 1:]) * self.inverse_temperature  # (batch, n - 1)
        place = torch.arange(1, n, device=scores.device, dtype=scores.dtype)  # (n - 1,)
        D = torch.nn.functional.pad(gaps.cumsum(1), (1, 0)).unsqueeze(1)  # (batch, 1, n)
        E = torch.nn.functional.pad((gaps * place).cumsum(1), (1, 0)).unsqueeze(1)  # (batch, 1, n)
        row_factor = self.row_factor.to(scores.dtype).unsqueeze(1)  # (k, 1)
        return torch.log_softmax(row_factor * D - 2 * E, dim=2), order

    def _rank_probabilities(self, scores: Tensor, labels: Tensor) -> Tensor:
        if use_triton(scores) and not labels.is_floating_point() and scores.shape[1] <= LONGEST_ROW:
            from topk_losses.triton_sorts import neuralsort_column

            return neuralsort_column(scores, labels, self.k, self.inverse_temperature)
        log_rows, order = self._log_rows(scores)
        if labels.is_floating_point():
            mass = labels.to(scores.dtype).gather(1, order)  # (batch, n) in sorted order
            return torch.einsum("bkn,bn->bk", log_rows.exp(), mass)
        place = (order == labels.unsqueeze(1)).int().argmax(1)  # (batch,) where the true class stands
        index = place.view(-1, 1, 1).expand(-1, self.k, 1)  # (batch, k, 1)
        return log_rows.gather(2, index).squeeze(2).exp()

    def _permutation_matrix(self, scores: Tensor) -> Tensor:
        log_rows, order = self._log_rows(scores)
        index = order.unsqueeze(1).expand_as(log_rows)  # (batch, k, n)
        return torch.zeros_like(log_rows).scatter(2, index, log_rows.exp())
