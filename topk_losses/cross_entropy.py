"""Softmax cross-entropy and LDR-KL."""

import warnings
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from typing_extensions import Unpack

from topk_losses import checks
from topk_losses.classification import CallSettings, ClassificationLoss, CommonSettings
from topk_losses.numerics import centered, is_above, log_add_exp, log_mixture, log_sum_of_others, number_like
from topk_losses.temperature import Temperature, make_temperature


class SoftmaxCrossEntropyLoss(ClassificationLoss):
    """torch.nn.CrossEntropyLoss, with the checks of the other losses, and in float32 under autocast as they are."""

    def loss_of_labels(self, logits: Tensor, labels: Tensor, call: CallSettings) -> Tensor:
        return cross_entropy(logits, labels, reduction="none")

    def loss_of_every_class(self, logits: Tensor, call: CallSettings) -> Tensor:
        return -logits.log_softmax(1)

    def loss_of_sets(self, logits: Tensor, sets: Tensor, call: CallSettings) -> Tensor:
        return -log_mixture(logits.log_softmax(1), sets)


class LDRKLLoss(ClassificationLoss):
    """LDR-KL loss (Zhu, Ying and Yang 2023): cross-entropy with a temperature and a margin.

    L(s, y) = log(1/n sum_j exp(beta (s_j - s_y + margin [j != y]))) / beta. It is consistent for top-k for every k.
    With the defaults it is cross-entropy minus log n, which a UserWarning says. It is below 0 where the true class is
    far above the others. It works on the logits themselves, as the paper's formula does; the authors' release first
    divides softplus(logits) by their mean. n counts the classes that are not masked out.

    Args:
        inverse_temperature: beta, 1 / lambda in the paper, above 0 (default: 1); a torch.nn.Parameter of shape () is
            learned.
        margin: margin of the true class over each other class, in units of the logits, at least 0 (default: 0).
        common: arguments of ClassificationLoss.

    Example:
        >>> loss_fn = LDRKLLoss(inverse_temperature=0.5, margin=1.0)
        >>> loss_fn(torch.arange(20.0).expand(2, 20), torch.tensor([19, 14]))
        tensor(-0.8071)
    """

    default_inverse_temperature: ClassVar[float | None] = 1.0
    margin = checks.Checked(checks.check_not_negative)

    def __init__(
        self,
        inverse_temperature: float | Tensor | str | None = None,
        margin: float = 0.0,
        **common: Unpack[CommonSettings],
    ) -> None:
        super().__init__(**common)
        self.inverse_temperature: Temperature = make_temperature(inverse_temperature, default=1.0)
        self.margin = margin
        if self.margin == 0 and isinstance(self.inverse_temperature, float) and self.inverse_temperature == 1:
            message = (
                "LDR-KL with margin 0 and inverse temperature 1 has the gradients of cross-entropy: give a margin, as "
                "in margin=1, or another inverse temperature"
            )
            warnings.warn(message, UserWarning, stacklevel=2)

    def loss_of_labels(self, logits: Tensor, labels: Tensor, call: CallSettings) -> Tensor:
        beta = number_like(call.inverse_temperature, logits)
        log_n = log_num_unmasked(logits)  # (1 or rows,)
        z = centered(logits) * beta  # (rows, n)
        if self.margin:  # the true class is lowered, as if the others were raised
            lowering = (-self.margin * beta).expand(len(labels), 1)
            z = z.scatter_add(1, labels.unsqueeze(1), lowering)
        return (cross_entropy(z, labels, reduction="none") - log_n) / beta

    def loss_of_every_class(self, logits: Tensor, call: CallSettings) -> Tensor:
        beta = number_like(call.inverse_temperature, logits)
        log_n = log_num_unmasked(logits).unsqueeze(1)  # (1 or rows, 1)
        z = centered(logits) * beta  # (rows, n)
        log_sum = log_add_exp(log_sum_of_others(z) + beta * self.margin, z)
        return (log_sum - z - log_n) / beta


def log_num_unmasked(logits: Tensor) -> Tensor:
    """Return the logarithm of the number of unmasked classes: (rows,), or (1,) for all rows."""
    if is_above(logits, -torch.inf):
        return logits.new_full((1,), logits.shape[1]).log()
    num_unmasked = (logits > -torch.inf).sum(1).clamp(min=1)  # (rows,)
    return num_unmasked.to(logits.dtype).log()
