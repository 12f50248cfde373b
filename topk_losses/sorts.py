"""The relaxed sorts in closed form: NeuralSort and SoftSort."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from topk_losses.operator import TopKOperator, at_target, centered, is_mass, largest


class NeuralSort(TopKOperator):
    """NeuralSort (Grover et al. 2019, equation 5): the first k rows of its relaxed permutation matrix.

    P[i, :] = softmax(beta ((n + 1 - 2i) s - A 1)), A_jl = |s_j - s_l|, i = 1..k, in O(n log n + n k).

    With the scores sorted, s_(1) >= s_(2) >= ..., and the gaps delta_q = s_(q) - s_(q+1) >= 0, the softmax argument of
    s_(r) relative to that of s_(1) is (2i - 1) D_r - 2 E_r with D_r = sum_{q<r} delta_q and E_r = sum_{q<r} q delta_q:
    two prefix sums of non-negative terms, where the definition has n differences of large numbers. Equal scores have
    equal columns in P; their gradient is that of the order in which torch.sort puts them.

    Args:
        k: number of ranks.
        inverse_temperature: beta, 1 / tau in the paper (default: 0.5, as published for ImageNet with m = 16; 0.0625 for
            CIFAR-100).
    """

    default_inverse_temperature = 0.5

    def _log_rows(self, scores: Tensor, k: int, beta: Any) -> tuple[Tensor, Tensor]:
        """Log of P's rows over the sorted classes (rows, k, n), and the class at each place (rows, n)."""
        n = scores.shape[1]
        ordered, order = centered(scores).sort(dim=1, descending=True)  # (rows, n)
        gaps = (ordered[:, :-1] - ordered[:, 1:]) * beta  # (rows, n - 1)
        place = torch.arange(1, n, device=scores.device, dtype=scores.dtype)  # (n - 1,)
        D = pad(gaps.cumsum(1), (1, 0)).unsqueeze(1)  # (rows, 1, n)
        E = pad((gaps * place).cumsum(1), (1, 0)).unsqueeze(1)  # (rows, 1, n)
        factor = torch.arange(1, 2 * k, 2, device=scores.device, dtype=scores.dtype).unsqueeze(1)  # (k, 1)
        return torch.log_softmax(factor * D - 2 * E, dim=2), order

    def _column(self, scores: Tensor, target: Tensor, k: int, beta: Any, generator: Any = None) -> Tensor:
        log_rows, order = self._log_rows(scores, k, beta)
        if is_mass(target):
            return at_target(log_rows.exp(), target.gather(1, order))
        place = (order == target.unsqueeze(1)).int().argmax(1)  # (rows,) where the true class stands
        return at_target(log_rows, place).exp()

    def _matrix(self, scores: Tensor, k: int, beta: Any, generator: Any = None) -> Tensor:
        log_rows, order = self._log_rows(scores, k, beta)
        places = order.argsort(dim=1).unsqueeze(1).expand_as(log_rows)  # (rows, k, n) where each class stands
        return log_rows.gather(2, places).exp()


class SoftSort(TopKOperator):
    """SoftSort (Prillo and Eisenschlos 2020): the first k rows of its relaxed permutation matrix.

    P[i, j] is proportional to exp(-beta |s_[i] - s_j|), s_[i] the i-th largest score. One class takes O(n + k^2).

    For i <= k the sum over all j below rank k factorises, since s_[i] - s_j = (s_[i] - s_[k]) + (s_[k] - s_j) there:
    one sum serves all k rows. Among equal scores s_[i] is any of them, and the derivative of |s_[k] - s_j| is that from
    below.

    Args:
        k: number of ranks.
        inverse_temperature: beta, 1 / tau in the paper (default: 0.5, as published for ImageNet with m = 16; 0.0625 for
            CIFAR-100).
    """

    default_inverse_temperature = 0.5

    def _column(self, scores: Tensor, target: Tensor, k: int, beta: Any, generator: Any = None) -> Tensor:
        if is_mass(target):
            return super()._column(scores, target, k, beta)
        scores = centered(scores)
        top = scores.gather(1, largest(scores, k))  # (rows, k)
        kth = top[:, -1:]  # (rows, 1)
        # each of the k largest adds exp(0) = 1 to this sum, which is taken off again
        below = ((scores - kth).clamp(max=0) * beta).exp().sum(1, keepdim=True) - k  # (rows, 1)
        among = ((top.unsqueeze(2) - top.unsqueeze(1)).abs() * -beta).exp().sum(2)  # (rows, k)
        total = among + ((kth - top) * beta).exp() * below  # (rows, k)
        true = scores.gather(1, target.unsqueeze(1))  # (rows, 1)
        return ((top - true).abs() * -beta).exp() / total

    def _matrix(self, scores: Tensor, k: int, beta: Any, generator: Any = None) -> Tensor:
        scores = centered(scores)
        top = scores.gather(1, largest(scores, k))  # (rows, k)
        distance = (top.unsqueeze(2) - scores.unsqueeze(1)).abs()  # (rows, k, n)
        return (distance * -beta).softmax(2)
