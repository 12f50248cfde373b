"""Losses that are robust to wrong labels: forward correction, GCE, SCE, NCE + RCE and PHuber cross-entropy.

All are functions of the softmax p of the logits. They have no k: top-1 only. Formulas and published settings are those
of the sources named in each class.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from typing_extensions import Unpack

from topk_losses import checks
from topk_losses.classification import CallSettings, ClassificationLoss, CommonSettings
from topk_losses.compilers import has_known_values
from topk_losses.numerics import MASKED, finite, log_add_exp, one_minus_exp, wide_dtype


class RobustLoss(ClassificationLoss):
    """A loss of the log softmax of one true class; subclasses define `loss_of_log_p`."""

    def loss_of_log_p(self, log_p: Tensor, log_p_of_all: Tensor) -> Tensor:
        """Compute the loss for log p of the labels (rows, 1), or of every class (rows, n).

        log_p_of_all: (rows, n).
        """
        raise NotImplementedError(f"{type(self).__name__} does not define loss_of_log_p")

    def loss_of_labels(self, logits: Tensor, labels: Tensor, call: CallSettings) -> Tensor:
        log_p_of_all = finite(logits.log_softmax(1))  # (rows, n)
        log_p = log_p_of_all.gather(1, labels.unsqueeze(1))  # (rows, 1)
        return self.loss_of_log_p(log_p, log_p_of_all).squeeze(1)

    def loss_of_every_class(self, logits: Tensor, call: CallSettings) -> Tensor:
        log_p_of_all = finite(logits.log_softmax(1))  # (rows, n)
        return self.loss_of_log_p(log_p_of_all, log_p_of_all)


class GeneralizedCrossEntropyLoss(RobustLoss):
    """Generalized cross-entropy (Zhang and Sabuncu 2018), between cross-entropy and the mean absolute error.

    L = (1 - p_y^q) / q.

    Args:
        q: in (0, 1]; near 0 it is cross-entropy, at 1 the mean absolute error (default: 0.7, as published; Ghosh and
            Lan (2021) take 0.5 and 0.66 for pretrained networks).
        common: arguments of ClassificationLoss.

    Example:
        >>> loss_fn = GeneralizedCrossEntropyLoss(q=0.5)
        >>> loss_fn(torch.arange(20.0).expand(2, 20), torch.tensor([19, 14]))
        tensor(1.1397)
    """

    q = checks.Checked(
        partial(checks.check_number, rule="lie in (0, 1]", fits=lambda number: 0 < number <= 1),
    )

    def __init__(self, q: float = 0.7, **common: Unpack[CommonSettings]) -> None:
        super().__init__(**common)
        self.q = q

    def loss_of_log_p(self, log_p: Tensor, log_p_of_all: Tensor) -> Tensor:
        return one_minus_exp(self.q * log_p) / self.q


class ForwardCorrectionLoss(RobustLoss):
    """Forward correction (Patrini et al. 2017): cross-entropy of the noisy labels that the classifier predicts.

    L = -log sum_j T[j, y] p_j, where T[j, y] is the probability that class j is labelled y. For symmetric label noise
    it is -log((1 - noise_rate) p_y + noise_rate / n).

    Args:
        noise_rate: in [0, 1), for T = (1 - noise_rate) I + noise_rate / n; 0 is cross-entropy (default: 0.2, or None
            with T).
        T: (n, n), rows summing to 1, instead of noise_rate.
        common: arguments of ClassificationLoss.

    Raises:
        ValueError: T is no such matrix, or both are given.
    """

    noise_rate = checks.Checked(checks.check_fraction_or_none)
    T: Tensor | None

    def __init__(
        self,
        noise_rate: float | None = None,
        T: Tensor | Sequence[Sequence[float]] | None = None,
        **common: Unpack[CommonSettings],
    ) -> None:
        super().__init__(**common)
        if T is None and noise_rate is None:
            noise_rate = 0.2
        if T is not None:
            T = check_transitions(T, self.num_classes).clone()  # a later change of T is no change of the loss
        self.noise_rate = noise_rate
        self.register_buffer("T", T, persistent=False)
        self._check_one_of_both()

    def extra_repr(self) -> str:
        shown = super().extra_repr()
        if self.T is not None:
            shown += f", T={tuple(self.T.shape)}"
        return shown

    def _check_settings(self) -> None:
        super()._check_settings()
        self._check_one_of_both()
        if self.T is not None and has_known_values(self.T):
            check_transitions(self.T, self.num_classes)

    def _check_one_of_both(self) -> None:
        """Raise ValueError unless either noise_rate or T is given."""
        if self.noise_rate is not None and self.T is not None:
            raise ValueError("noise_rate and T both say how labels are wrong: give one of them, and None for the other")
        if self.noise_rate is None and self.T is None:
            raise ValueError("noise_rate or T must say how labels are wrong: give one of them")

    def loss_of_labels(self, logits: Tensor, labels: Tensor, call: CallSettings) -> Tensor:
        if self.T is None:
            return super().loss_of_labels(logits, labels, call)
        check_size(self.T, logits)
        wide = wide_dtype(logits)
        log_T = finite(self.T.to(logits.device, wide).log())  # (n, n)
        log_p = finite(logits.to(wide).log_softmax(1))  # (rows, n)
        return -(log_T.T[labels] + log_p).logsumexp(1).to(logits.dtype)

    def loss_of_every_class(self, logits: Tensor, call: CallSettings) -> Tensor:
        if self.T is None:
            return super().loss_of_every_class(logits, call)
        check_size(self.T, logits)
        return -log_of_noisy_labels(logits, self.T)

    def loss_of_log_p(self, log_p: Tensor, log_p_of_all: Tensor) -> Tensor:
        assert self.noise_rate is not None  # _check_one_of_both
        if self.noise_rate == 0:
            return -log_p
        num_unmasked = (log_p_of_all > MASKED).sum(1, keepdim=True).clamp(min=1)  # (rows, 1)
        # a number like log p: a quotient of an integer would have PyTorch's default type
        log_wrong = math.log(self.noise_rate) - num_unmasked.to(log_p.dtype).log()
        log_right = math.log1p(-self.noise_rate) + log_p
        return -log_add_exp(log_right, log_wrong.expand_as(log_p))


def check_transitions(T: Tensor | Sequence[Sequence[float]], num_classes: int | None) -> Tensor:
    """Return T (n, n) as a tensor; raise ValueError unless its rows are distributions over the n classes."""
    checks.check_constant("T", T)
    matrix = torch.as_tensor(T, dtype=torch.float64, device=checks.device_of(T))
    n = num_classes or max(matrix.shape, default=0)
    wanted = f"T must be a matrix ({n}, {n}) of probabilities, row j those of the labels of class j, which sum to 1"
    if matrix.shape != (n, n):
        raise ValueError(f"{wanted}; got shape {tuple(matrix.shape)}")
    is_distribution = ((matrix.sum(1) - 1).abs() < 1e-4) & (matrix >= 0).all(1)  # (n,)
    if not bool(is_distribution.all()):
        row = int(is_distribution.int().argmin())
        total = float(matrix[row].sum())
        least = float(matrix[row].min())
        raise ValueError(f"{wanted}; row {row} sums to {total:g}, and its least is {least:g}")
    return matrix


def check_size(T: Tensor, logits: Tensor) -> None:
    """Raise ValueError unless T (n, n) has the classes of the logits (rows, n)."""
    if len(T) != logits.shape[1]:
        raise ValueError(f"T is for {len(T)} classes, but the logits have {logits.shape[1]}")


def log_of_noisy_labels(logits: Tensor, T: Tensor) -> Tensor:
    """Compute log sum_j T[j, y] p_j for every class y, at least the logarithm of the smallest number: (rows, n)."""
    # in float64, where the device has it, which autocast leaves alone in the backward pass too
    wide = wide_dtype(logits)
    p = logits.to(wide).softmax(1)
    noisy_p = p @ T.to(logits.device, wide)  # (rows, n)
    smallest = torch.finfo(wide).tiny
    return noisy_p.clamp(min=smallest).log().to(logits.dtype)


class ReverseCrossEntropyLoss(RobustLoss):
    """Base class of sums of alpha times one loss and beta times -A (1 - p_y), the reverse cross-entropy with log 0 = A.

    Args:
        alpha, beta: at least 0.
        A: stands for log 0, below 0.
        common: arguments of ClassificationLoss.
    """

    alpha = checks.Checked(checks.check_not_negative)
    beta = checks.Checked(checks.check_not_negative)
    A = checks.Checked(
        partial(
            checks.check_number,
            rule="be a finite number below 0, as it stands for log 0",
            fits=lambda number: -math.inf < number < 0,
        )
    )

    def __init__(self, alpha: float, beta: float, A: float = -4.0, **common: Unpack[CommonSettings]) -> None:
        super().__init__(**common)
        self.alpha = alpha
        self.beta = beta
        self.A = A

    def reverse(self, log_p: Tensor) -> Tensor:
        """Compute the reverse cross-entropy, -A (1 - p), of log p."""
        return -self.A * one_minus_exp(log_p)


class SymmetricCrossEntropyLoss(ReverseCrossEntropyLoss):
    """Symmetric cross-entropy (Wang et al. 2019): cross-entropy plus reverse cross-entropy.

    L = -alpha log p_y - beta A (1 - p_y).

    Args:
        alpha, beta: at least 0 (default: 6 and 0.1, as published for CIFAR-100).
        A: stands for log 0, below 0 (default: -4, as published). The released code clamps the one-hot label at 1e-4
            instead: A = log 1e-4 = -9.21.
        common: arguments of ClassificationLoss.
    """

    def __init__(
        self, alpha: float = 6.0, beta: float = 0.1, A: float = -4.0, **common: Unpack[CommonSettings]
    ) -> None:
        super().__init__(alpha, beta, A, **common)

    def loss_of_log_p(self, log_p: Tensor, log_p_of_all: Tensor) -> Tensor:
        return -self.alpha * log_p + self.beta * self.reverse(log_p)


class NCEAndRCELoss(ReverseCrossEntropyLoss):
    """Normalised plus reverse cross-entropy (Ma et al. 2020).

    L = alpha log p_y / (sum_j log p_j) - beta A (1 - p_y). The sum runs over the classes that are not masked out.

    Args:
        alpha, beta: at least 0 (default: 10 and 0.1, as published for CIFAR-100; another release has beta 1).
        A: stands for log 0, as in SymmetricCrossEntropyLoss (default: -4).
        common: arguments of ClassificationLoss.
    """

    def __init__(
        self, alpha: float = 10.0, beta: float = 0.1, A: float = -4.0, **common: Unpack[CommonSettings]
    ) -> None:
        super().__init__(alpha, beta, A, **common)

    def loss_of_log_p(self, log_p: Tensor, log_p_of_all: Tensor) -> Tensor:
        total = log_p_of_all.masked_fill(log_p_of_all == MASKED, 0).sum(1, keepdim=True)  # (rows, 1), below 0
        total = total.masked_fill(total == 0, -1)  # of one class alone, whose log p is 0
        return self.alpha * log_p / total + self.beta * self.reverse(log_p)


class PHuberCrossEntropyLoss(RobustLoss):
    """PHuber cross-entropy (Menon et al. 2020): cross-entropy that is a straight line where p_y is small.

    L = -log p_y for p_y > 1 / tau, else 1 - tau p_y + log tau. Its derivative by p_y is at most tau.

    Args:
        tau: above 1 (default: 10, as published for CIFAR-100; its reproduction prefers 50).
        common: arguments of ClassificationLoss.
    """

    tau = checks.Checked(
        partial(checks.check_number, rule="be a finite number above 1", fits=lambda number: 1 < number < math.inf),
    )

    def __init__(self, tau: float = 10.0, **common: Unpack[CommonSettings]) -> None:
        super().__init__(**common)
        self.tau = tau

    def loss_of_log_p(self, log_p: Tensor, log_p_of_all: Tensor) -> Tensor:
        log_tau = math.log(self.tau)
        is_certain = log_p > -log_tau
        line = 1 + log_tau - (log_p + log_tau).clamp(max=0).exp()
        return torch.where(is_certain, -torch.where(is_certain, log_p, 0), line)
