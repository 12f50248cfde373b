"""What every loss here shares with torch.nn.CrossEntropyLoss: shapes, kinds of labels, weights, reductions."""

import math
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from topk_losses.checks import (
    check_choice,
    check_fraction,
    check_integer,
    check_inverse_temperature,
    check_label_masses,
    check_labels,
    check_logits,
    check_per_class,
    check_positive,
    check_several,
    full_precision,
    has_known_values,
)
from topk_losses.operator import Constants, finite, log_softmax, mass_of, to_compute_dtype
from topk_losses.temperature import AutoTemperature

CHOICES = {"reduction": ("mean", "sum", "none"), "soft_labels": ("expected", "any")}
MANY = 8  # classes with mass, per sample, from which on all columns of P together cost less than each alone


class ClassificationLoss(Constants):
    """A loss with the interface of torch.nn.CrossEntropyLoss: loss(logits, labels).

    Args:
        num_classes: n; None takes it from the logits.
        weight: (n,) >= 0, the weight of each class, as in CrossEntropyLoss.
        label_smoothing: in [0, 1): the share of the label that is spread over all classes. That takes the loss of every
            class: n times the cost of one, or, for a relaxed operator without m, that of its permutation matrix.
        soft_labels: what labels (batch, n) mean. "expected" (default): a distribution q, the loss is
            sum_j q_j L(s, j), as in CrossEntropyLoss: what mixup and label smoothing need; the cost is that of the
            classes with mass. "any": several right answers (k-hot, bool or numbers in [0, 1]), any of which is fine:
            -log of the probability that one of them is among the k highest, bounded by the sum of theirs.
        ignore_index: label of samples that do not count.
        reduction: "mean" (of the samples that count, weighted by their classes' weights), "sum", or "none" (0 where
            ignored).

    Shapes: logits (batch, n), (n,), or (batch, n, d1, ...); labels int64 without the dimension n, or of the same shape
    as the logits. Half-precision logits are computed in float32 and give a float32 loss, under autocast too.
    """

    generator: torch.Generator | None = None  # of losses that draw noise, on the logits' device; None: PyTorch's own
    constants: tuple[str, ...] = ("weight",)
    per_class: tuple[str, ...] = ("weight",)  # settings with a number for each class
    shown: tuple[str, ...] = ("num_classes", "label_smoothing", "soft_labels", "ignore_index", "reduction")
    fixed: tuple[str, ...] = ("num_classes",)  # what cannot be changed once the loss is built
    knows_sets = True  # of right answers: soft_labels "any"

    def __init__(
        self, num_classes: SupportsIndex | None = None,
        weight: Tensor | None = None, label_smoothing: float = 0.0, soft_labels: str = "expected",
        ignore_index: int = -100, reduction: str = "mean",
    ) -> None:  # fmt: skip
        super().__init__()
        self.auto: AutoTemperature | None = None  # where the inverse temperature is "auto"
        self.num_classes = check_several("num_classes", num_classes)
        self.weight = weight
        self.label_smoothing = label_smoothing
        self.soft_labels = soft_labels
        self.ignore_index = ignore_index
        self.reduction = reduction

    def __setattr__(self, name: str, value: Any) -> None:
        """Settings act from the next call on, checked as on construction; those in `fixed` can't be changed."""
        if name in self.fixed and name in self.__dict__:
            raise AttributeError(f"{name} is fixed: build a new loss with {name}={value!r}")
        super().__setattr__(name, self._checked_setting(name, value))

    def _checked_setting(self, name: str, value: Any) -> Any:
        if name == "soft_labels" and value == "any" and not self.knows_sets:
            raise ValueError(f"{type(self).__name__} has one true class; it knows no soft_labels={value!r}")
        if name in CHOICES:
            return check_choice(name, value, CHOICES[name])
        if name == "label_smoothing":
            return check_fraction(name, value)
        if name == "ignore_index":
            return check_integer(name, value, -(2**63))
        if name == "weight" and value is not None:
            return check_per_class(name, value, self.num_classes, or_zero=True)
        return value

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss: () for reduction mean and sum, the shape of int64 labels for none.

        float32, or float64 for float64 logits. Raises TypeError or ValueError for inputs that do not fit.
        """
        return self._reduced(logits, labels, None)

    def _losses(self, scores: Tensor, target: Tensor | None, p_k: Tensor | None) -> Any:
        """The loss of each row of scores (rows, n), with p_k (rows, K) where it was given.

        target: labels (rows,) int64 in [0, n) -> (rows,); a set of right answers, mass (rows, n) in [0, 1] -> (rows,),
        from losses that know it; None -> (rows, n), the loss of every class as the label, or None where that is not
        cheaper than n times the loss of one.
        """
        raise TypeError(f"{type(self).__name__} does not define _losses")

    def _reduced(self, logits: Tensor, labels: Tensor, p_k: Tensor | None) -> Tensor:
        check_logits(logits)
        axis = 0 if logits.dim() == 1 else 1
        rows = logits.movedim(axis, -1)
        shape, n = rows.shape[:-1], rows.shape[-1]
        if n != (self.num_classes or n):
            raise ValueError(
                f"logits must have num_classes={self.num_classes} columns, got shape {tuple(logits.shape)}"
            )
        for name in self.per_class:
            numbers = getattr(self, name)
            if numbers is not None and len(numbers) != n:
                raise ValueError(f"{name} holds {len(numbers)} numbers, but the logits have {n} classes")
        several, is_tensor = self.soft_labels == "any", isinstance(labels, Tensor)
        is_mass = is_tensor and (labels.is_floating_point() or (several and labels.shape == logits.shape))
        if is_mass:
            check_label_masses(labels, logits, axis, several)
            if several and (self.weight is not None or self.label_smoothing):
                raise ValueError("soft_labels='any' takes neither weight nor label_smoothing: leave them out")
        else:
            check_labels(labels, shape, n, self.ignore_index)
        with full_precision(logits.device):
            scores = to_compute_dtype(rows.reshape(-1, n))  # (rows, n)
            if self.auto is not None:
                self.auto.observe(scores)
            weight = None if self.weight is None else self.weight.to(scores)  # (n,)
            if is_mass:
                mass = labels.movedim(axis, -1).reshape(-1, n).to(scores.dtype)
                losses = self._losses(scores, mass, p_k) if several else self._expected(scores, mass, weight, p_k)
                counted = scores.new_full((), len(scores))
            else:
                losses, counted = self._of_labels(scores, labels.reshape(-1), weight, p_k)
            if self.reduction == "none":
                return losses.reshape(shape)
            return losses.sum() if self.reduction == "sum" else losses.sum() / counted

    def _of_labels(self, scores: Tensor, labels: Tensor, weight: Tensor | None, p_k: Tensor | None) -> Any:
        """The losses (rows,), 0 where the label is ignored, and the weight of all that count ()."""
        counts = labels != self.ignore_index  # (rows,)
        if not has_known_values(counts) or not bool(counts.all()):
            # what is ignored may hold anything, and gets no gradient
            scores, labels = scores.masked_fill(~counts.unsqueeze(1), 0), torch.where(counts, labels, 0)
        share = counts.to(scores.dtype) if weight is None else counts * weight[labels]
        if self.label_smoothing:
            losses = self._expected(scores, mass_of(scores, labels), weight, p_k)
        else:
            losses = self._losses(scores, labels, p_k) * share
        return torch.where(counts, losses, 0), share.sum()

    def _expected(self, scores: Tensor, mass: Tensor, weight: Tensor | None, p_k: Tensor | None) -> Tensor:
        """sum_j mass_j L(s, j), (rows,), of the smoothed and weighted mass (rows, n) >= 0."""
        number, n = scores.shape
        if self.label_smoothing:
            mass = (1 - self.label_smoothing) * mass + self.label_smoothing / n
        mass = mass if weight is None else mass * weight
        known = has_known_values(mass)
        if not known or int(mass.count_nonzero()) > MANY * number:
            losses = self._losses(scores, None, p_k)  # (rows, n)
            if losses is not None:
                # 0 times an infinite loss is 0: a class without mass
                return torch.where(mass > 0, losses * mass, 0).sum(1)
        if known:
            row, column = mass.nonzero(as_tuple=True)  # (pairs,) each
        else:
            pairs = torch.arange(number * n, device=mass.device)
            row, column = pairs // n, pairs % n
        share, losses = mass[row, column], self._losses(scores[row], column, None if p_k is None else p_k[row])
        return torch.zeros_like(scores[:, 0]).index_add(0, row, torch.where(share > 0, losses * share, 0))


class SoftmaxCrossEntropyLoss(ClassificationLoss):
    """torch.nn.CrossEntropyLoss that refuses what the other losses refuse, and computes in float32 as they do."""

    def _losses(self, scores: Tensor, target: Tensor | None, p_k: Tensor | None) -> Any:
        return -log_softmax(scores, target)


class LDRKLLoss(ClassificationLoss):
    """Cross-entropy with a temperature and a margin: label-distributionally robust, KL (Zhu, Ying and Yang 2023).

    L(s, y) = log(1/n sum_j exp(beta (s_j - s_y + margin [j != y]))) / beta, consistent for top-k for every k. At beta 1
    without a margin it is cross-entropy less log n. Below 0 where the true class is far above the others.

    Args:
        inverse_temperature: beta, 1 / lambda of the paper, above 0; a tensor () that requires a gradient is learned.
        margin: of the true class over each other one, in units of the logits, at least 0.
        Others: as for ClassificationLoss.

    Raises TypeError or ValueError for settings and inputs that do not fit.
    """

    shown = ("inverse_temperature", "margin", *ClassificationLoss.shown)
    knows_sets = False

    def __init__(
        self, inverse_temperature: float | Tensor = 1.0, margin: float = 0.0, num_classes: SupportsIndex | None = None,
        weight: Tensor | None = None, label_smoothing: float = 0.0, soft_labels: str = "expected",
        ignore_index: int = -100, reduction: str = "mean",
    ) -> None:  # fmt: skip
        super().__init__(num_classes, weight, label_smoothing, soft_labels, ignore_index, reduction)
        self.inverse_temperature = inverse_temperature
        self.margin = margin

    def _checked_setting(self, name: str, value: Any) -> Any:
        if name == "inverse_temperature":
            return check_inverse_temperature(value)
        return check_positive(name, value, True) if name == "margin" else super()._checked_setting(name, value)

    def _losses(self, scores: Tensor, target: Tensor | None, p_k: Tensor | None) -> Any:
        if target is None:
            return None  # the margins of each class are others
        beta, margin = self.inverse_temperature, scores.new_full((len(scores), 1), self.margin)
        lowered = scores.scatter_add(1, target.unsqueeze(1), -margin)  # the true class's, as if the others were raised
        z = torch.where(lowered > -math.inf, beta * finite(lowered), lowered)  # beta times -inf has no gradient
        return (-log_softmax(z, target) - math.log(scores.shape[1])) / beta
