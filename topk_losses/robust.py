"""Losses that are robust to wrong labels: forward correction, GCE, SCE, NCE + RCE and PHuber cross-entropy.

All are functions of the softmax p of the logits. They have no k: top-1 only. Formulas and published settings are those
of the sources named in each class.
"""

import math
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from topk_losses.checks import check_fraction, check_not_negative, check_number
from topk_losses.classification import CallSettings, ClassificationLoss
from topk_losses.operator import MASKED, finite


class RobustLoss(ClassificationLoss):
    """A loss of log p, the log softmax, of one true class; subclasses define `_from_log_p`.

    Arguments, shapes and errors are those of ClassificationLoss.
    """

    knows_sets = False

    def _from_log_p(self, log_p: Tensor, every: Tensor) -> Tensor:
        """The loss for log p of the labels (rows, 1), or of every class (rows, n); every: (rows, n)."""
        raise TypeError(f"{type(self).__name__} does not define _from_log_p")

    def _losses(self, scores: Tensor, target: Tensor | None, call: CallSettings) -> Any:
        every = finite(scores.log_softmax(1))  # (rows, n)
        if target is None:
            return self._from_log_p(every, every)
        return self._from_log_p(every.gather(1, target.unsqueeze(1)), every).squeeze(1)


class ForwardCorrectionLoss(RobustLoss):
    """Forward correction (Patrini et al. 2017): cross-entropy of the noisy labels that the classifier predicts.

    L = -log sum_j T[j, y] p_j, where T[j, y] is the probability that class j is labelled y. For symmetric label noise
    it is -log((1 - noise_rate) p_y + noise_rate / n).

    Args:
        noise_rate: in [0, 1), for T = (1 - noise_rate) I + noise_rate / n; 0 is cross-entropy (default: 0.2).
        T: (n, n), rows summing to 1, instead of noise_rate.
        others: arguments of ClassificationLoss.

    Raises:
        ValueError: T is no such matrix, or both are given.
    """

    constants = ("weight", "T")
    shown = ("noise_rate", "T", *ClassificationLoss.shown)

    def __init__(self, noise_rate: float | None = None, T: Any = None, **others: Any) -> None:
        super().__init__(**others)
        if noise_rate is not None and T is not None:
            raise ValueError("noise_rate and T both say how labels are wrong: give one of them")
        self.T = T
        self.noise_rate = 0.2 if noise_rate is None and T is None else noise_rate

    def _checked_setting(self, name: str, value: Any) -> Any:
        if value is not None and name == "noise_rate":
            return check_fraction(name, value)
        if value is None or name != "T":
            return super()._checked_setting(name, value)
        matrix = torch.as_tensor(value, dtype=torch.float64).detach()
        n = self.num_classes or max(matrix.shape, default=0)
        sums_to_1 = matrix.shape == (n, n) and bool((matrix.sum(1) - 1).abs().max() < 1e-4)
        if not sums_to_1 or not bool((matrix >= 0).all()):
            raise ValueError(
                f"T must be a matrix ({n}, {n}) of probabilities, row j those of the labels of class j, which sum to "
                f"1; got shape {tuple(matrix.shape)}"
            )
        return matrix

    def _losses(self, scores: Tensor, target: Tensor | None, call: CallSettings) -> Any:
        if self.T is None:
            return super()._losses(scores, target, call)
        if len(self.T) != scores.shape[1]:
            raise ValueError(f"T is for {len(self.T)} classes, but the logits have {scores.shape[1]}")
        # in float64, where the device has it, which autocast leaves alone in the backward pass too
        wide = scores.dtype if scores.device.type == "mps" else torch.float64
        predicted = scores.to(wide).softmax(1) @ self.T.to(scores.device, wide)  # (rows, n)
        predicted = predicted.clamp(min=torch.finfo(wide).tiny).log().to(scores.dtype)
        return -predicted if target is None else -predicted.gather(1, target.unsqueeze(1)).squeeze(1)

    def _from_log_p(self, log_p: Tensor, every: Tensor) -> Tensor:
        if not self.noise_rate:
            return -log_p
        live = (every > MASKED).sum(1, keepdim=True)  # (rows, 1)
        kept, wrong = math.log1p(-self.noise_rate), self.noise_rate / live.clamp(min=1)
        return -torch.logaddexp(kept + log_p, wrong.to(log_p.dtype).log().expand_as(log_p))


class GeneralizedCrossEntropyLoss(RobustLoss):
    """Generalized cross-entropy (Zhang and Sabuncu 2018), between cross-entropy and the mean absolute error.

    L = (1 - p_y^q) / q.

    Args:
        q: in (0, 1]; near 0 it is cross-entropy, at 1 the mean absolute error (default: 0.7, as published; Ghosh and
            Lan (2021) take 0.5 and 0.66 for pretrained networks).
        others: arguments of ClassificationLoss.
    """

    shown = ("q", *ClassificationLoss.shown)
    rules: ClassVar = {
        **ClassificationLoss.rules,
        "q": partial(check_number, rule="lie in (0, 1]", fits=lambda number: 0 < number <= 1),
    }

    def __init__(self, q: float = 0.7, **others: Any) -> None:
        super().__init__(**others)
        self.q = q

    def _from_log_p(self, log_p: Tensor, every: Tensor) -> Tensor:
        return -torch.expm1(self.q * log_p) / self.q


class _SumLoss(RobustLoss):
    """alpha times one loss and beta times -A (1 - p_y), the reverse cross-entropy with log 0 = A."""

    shown = ("alpha", "beta", "A", *ClassificationLoss.shown)
    rules: ClassVar = {
        **ClassificationLoss.rules,
        "alpha": check_not_negative,
        "beta": check_not_negative,
        "A": partial(
            check_number,
            rule="be a finite number below 0, as it stands for log 0",
            fits=lambda number: -math.inf < number < 0,
        ),
    }

    def __init__(self, alpha: float, beta: float, A: float = -4.0, **others: Any) -> None:
        super().__init__(**others)
        self.alpha, self.beta, self.A = alpha, beta, A

    def _reverse(self, log_p: Tensor) -> Tensor:
        return self.A * torch.expm1(log_p)  # -A (1 - p)


class SymmetricCrossEntropyLoss(_SumLoss):
    """Symmetric cross-entropy (Wang et al. 2019): cross-entropy plus reverse cross-entropy.

    L = -alpha log p_y - beta A (1 - p_y).

    Args:
        alpha, beta: at least 0 (default: 6 and 0.1, as published for CIFAR-100).
        A: stands for log 0, below 0 (default: -4, as published).
        others: arguments of ClassificationLoss.
    """

    def __init__(self, alpha: float = 6.0, beta: float = 0.1, A: float = -4.0, **others: Any) -> None:
        super().__init__(alpha, beta, A, **others)

    def _from_log_p(self, log_p: Tensor, every: Tensor) -> Tensor:
        return -self.alpha * log_p + self.beta * self._reverse(log_p)


class NCEAndRCELoss(_SumLoss):
    """Normalised plus reverse cross-entropy (Ma et al. 2020).

    L = alpha log p_y / (sum_j log p_j) - beta A (1 - p_y). The sum runs over the classes that are not masked out.

    Args:
        alpha, beta: at least 0 (default: 10 and 0.1, as published for CIFAR-100; another release has beta 1).
        A: stands for log 0, as in SymmetricCrossEntropyLoss (default: -4).
        others: arguments of ClassificationLoss.
    """

    def __init__(self, alpha: float = 10.0, beta: float = 0.1, A: float = -4.0, **others: Any) -> None:
        super().__init__(alpha, beta, A, **others)

    def _from_log_p(self, log_p: Tensor, every: Tensor) -> Tensor:
        total = every.masked_fill(every == MASKED, 0).sum(1, keepdim=True)  # (rows, 1), below 0
        total = total.masked_fill(total == 0, -1)  # of one class alone, whose log p is 0
        return self.alpha * log_p / total + self.beta * self._reverse(log_p)


class PHuberCrossEntropyLoss(RobustLoss):
    """PHuber cross-entropy (Menon et al. 2020): cross-entropy that is a straight line where p_y is small.

    L = -log p_y for p_y > 1 / tau, else 1 - tau p_y + log tau. Its derivative by p_y is at most tau.

    Args:
        tau: above 1 (default: 10, as published for CIFAR-100; its reproduction prefers 50).
        others: arguments of ClassificationLoss.
    """

    shown = ("tau", *ClassificationLoss.shown)
    rules: ClassVar = {
        **ClassificationLoss.rules,
        "tau": partial(check_number, rule="be a finite number above 1", fits=lambda number: 1 < number < math.inf),
    }

    def __init__(self, tau: float = 10.0, **others: Any) -> None:
        super().__init__(**others)
        self.tau = tau

    def _from_log_p(self, log_p: Tensor, every: Tensor) -> Tensor:
        log_tau = math.log(self.tau)
        certain = log_p > -log_tau
        line = 1 + log_tau - (log_p + log_tau).clamp(max=0).exp()
        return torch.where(certain, -torch.where(certain, log_p, 0), line)
