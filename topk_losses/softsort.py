"""SoftSort (Prillo and Eisenschlos 2020) restricted to its first k rows: O(n + k^2) per sample for one class.

P[i, j] is proportional to exp(-|s_[i] - s_j|^p / tau), s_[i] the i-th largest score. For p = 1 and i <= k the sum over
all j below rank k factorises, since s_[i] - s_j = (s_[i] - s_[k]) + (s_[k] - s_j) there: one sum serves all k rows.
"""

from torch import Tensor

from topk_losses.backend import LONGEST_ROW, MOST_TAKEN, use_triton
from topk_losses.checks import check_positive
from topk_losses.operator import TopKOperator


class SoftSort(TopKOperator):
    """The first k rows of SoftSort's relaxed permutation matrix.

    k: ranks, 1 <= k < n. inverse_temperature: 1 / tau > 0, larger = closer to the hard sort; default 0.5, as
    published for ImageNet (CIFAR-100: 0.0625). power: p >= 1, default 1. Among equal scores s_[i] is the one
    that torch.topk returns, and the derivative of |s_[k] - s_j| is that from below. Raises ValueError for a
    non-positive inverse temperature or p < 1.
    """

    def __init__(self, k: int, inverse_temperature: float = 0.5, power: float = 1.0) -> None:
        super().__init__(k)
        self.inverse_temperature = check_positive("inverse_temperature", inverse_temperature)
        self.power = check_positive("power", power)
        if self.power < 1:
            raise ValueError(f"power must be at least 1, got {power:g}")

    def extra_repr(self) -> str:
        """The configuration, for printing."""
        return f"k={self.k}, inverse_temperature={self.inverse_temperature:g}, power={self.power:g}"

    def _log_rows(self, scores: Tensor) -> Tensor:
        """Log of P's rows: (batch, k, n)."""
        largest = scores.topk(self.k, dim=1).values  # (batch, k)
        distance = (largest.unsqueeze(2) - scores.unsqueeze(1)).abs()  # (batch, k, n)
        if self.power != 1:
            distance = distance.pow(self.power)
        return (distance * -self.inverse_temperature).log_softmax(2)

    def _rank_probabilities(self, scores: Tensor, labels: Tensor) -> Tensor:
        if labels.is_floating_point():
            return (self._log_rows(scores).exp() @ labels.to(scores.dtype).unsqueeze(2)).squeeze(2)
        true = labels.unsqueeze(1)  # (batch, 1)
        if self.power != 1:
            return self._log_rows(scores).exp().gather(2, true.unsqueeze(1).expand(-1, self.k, 1)).squeeze(2)
        beta = self.inverse_temperature
        if use_triton(scores) and scores.shape[1] <= LONGEST_ROW and self.k <= MOST_TAKEN:
            from topk_losses.triton_sorts import softsort_column

            return softsort_column(scores, labels, self.k, beta)
        largest = scores.topk(self.k, dim=1).values  # (batch, k)
        kth = largest[:, -1:]  # (batch, 1)
        # each of the k largest adds exp(0) = 1 to this sum, which is taken off again
        below = ((scores - kth).clamp(max=0) * beta).exp().sum(1, keepdim=True) - self.k  # (batch, 1)
        among = ((largest.unsqueeze(2) - largest.unsqueeze(1)).abs() * -beta).exp().sum(2)  # (batch, k)
        total = among + ((kth - largest) * beta).exp() * below  # (batch, k)
        return ((largest - scores.gather(1, true)).abs() * -beta).exp() / total

    def _permutation_matrix(self, scores: Tensor) -> Tensor:
        return self._log_rows(scores).exp()
