"""What every loss here shares with torch.nn.CrossEntropyLoss: shapes, kinds of labels, weights, reductions."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple, SupportsIndex

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from topk_losses import checks
from topk_losses.checks import full_precision, has_known_values, is_ordinary, is_transforming, static
from topk_losses.operator import (
    as_tensor,
    centered,
    class_mass,
    is_above,
    is_mass,
    log_softmax,
    log_sum_of_others,
    to_compute_dtype,
)
from topk_losses.temperature import AutoTemperature

MANY = 8  # classes with mass, per sample, from which on every class at once costs less than each alone
AT_ONCE = 2**16  # scores that are worked on at a time where each pair of a sample and a class has scores of its own


def _shown(value: Any) -> str:
    """A setting as a module prints it: numbers to six digits, long tensors by their shape."""
    if isinstance(value, Tensor):
        value = value.tolist() if value.dim() < 2 else f"<{tuple(value.shape)}>"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _weighted(losses: Tensor, mass: Tensor) -> Tensor:
    """Losses times mass: an infinite loss of a class without mass counts as 0, a finite one is the mass's gradient."""
    return torch.where((mass > 0) | losses.isfinite(), losses, 0) * mass


class CallSettings(NamedTuple):
    """What a call has beside logits and labels: the inverse temperature, read once, and P_K of each row, or None."""

    beta: Any = None
    p_k: Tensor | None = None

    def select(self, rows: Any) -> "CallSettings":
        """Select rows."""
        return self if self.p_k is None else CallSettings(self.beta, self.p_k[rows])


class Recomputed(torch.autograd.Function):
    """A function whose backward pass computes again what it needs, in place of keeping it."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        ctx.function = function
        ctx.others = [None if isinstance(value, Tensor) else value for value in inputs]
        ctx.save_for_backward(*(value if isinstance(value, Tensor) else None for value in inputs))
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        create_graph = torch.is_grad_enabled()  # for second derivatives
        needed = ctx.needs_input_grad[1:]
        with torch.enable_grad(), full_precision(grad.device):
            inputs = [other if tensor is None else tensor for tensor, other in zip(ctx.saved_tensors, ctx.others)]
            inputs = [value.view_as(value) if is_needed else value for value, is_needed in zip(inputs, needed)]
            leaves = [value for value, is_needed in zip(inputs, needed) if is_needed]
            grads = iter(torch.autograd.grad(ctx.function(*inputs), leaves, grad, create_graph=create_graph))
        return None, *(next(grads) if is_needed else None for is_needed in needed)


class ClassificationLoss(nn.Module):
    """Base class of the losses, with the interface of torch.nn.CrossEntropyLoss; subclasses define `_losses`.

    Logits are (batch, n), (n,), or (batch, n, d1, ...). Labels are int64 without the dimension n, or like the logits.
    The loss is () for reduction "mean" and "sum", and has the shape of int64 labels for "none". It is float32, under
    autocast too, or float64 for float64 logits. A class with a logit of -inf is masked out: the loss is that of the
    other classes. A label that is masked out costs the most that the method knows, infinity or a very large number,
    where as many classes are left as P_K has ranks.

    Args:
        num_classes: n (default: that of the logits).
        weight: (n,), at least 0: weight of each class, as in CrossEntropyLoss.
        label_smoothing: in [0, 1): share of the label that is spread over all classes that are not masked out. It needs
            the loss of every class, at up to n times the cost of one.
        soft_labels: meaning of labels like the logits. "expected" (default): a distribution q; the loss is sum_j q_j
            L(s, j), as in CrossEntropyLoss and for mixup. "any": several right answers, bool or numbers in [0, 1]; the
            loss is -log of the probability that one of them is among the k highest, bounded by the sum of their
            probabilities.
        ignore_index: label of samples that do not count.
        reduction: "mean" of the samples that count, weighted by their classes' weights; "sum"; or "none", with 0 for
            ignored samples.

    Raises:
        TypeError, ValueError: settings or inputs that do not fit; the message says which.
    """

    generator: torch.Generator | None = None  # of losses that draw noise, on the logits' device; None: PyTorch's own
    stochastic = False  # whether it draws noise
    knows_sets = True  # of right answers: soft_labels "any"
    temperature = "inverse_temperature"  # the setting that may be learned, or "auto"
    m: int | None = None  # number of scores that one class as the label is worked out from; None: all
    memory = 1  # that a score takes, relative to a network's
    constants: tuple[str, ...] = ("weight",)  # tensors that move with the module, and are never cast nor saved
    per_class: tuple[str, ...] = ("weight",)  # settings with a number for each class
    shown: tuple[str, ...] = ("num_classes", "label_smoothing", "soft_labels", "ignore_index", "reduction")
    fixed: tuple[str, ...] = ("num_classes", "soft_labels")  # what cannot be changed once the loss is built
    rules: ClassVar[dict[str, Callable[[str, Any], Any]]] = {  # how a setting is checked, whenever it is set
        "label_smoothing": checks.check_fraction,
        "ignore_index": partial(checks.check_integer, least=-(2**63)),
        "reduction": partial(checks.check_choice, choices=("mean", "sum", "none")),
    }

    def __init__(
        self, num_classes: SupportsIndex | None = None, weight: Tensor | None = None, label_smoothing: float = 0.0,
        soft_labels: str = "expected", ignore_index: int = -100, reduction: str = "mean",
    ) -> None:  # fmt: skip
        super().__init__()
        self.auto: AutoTemperature | None = None  # where the inverse temperature is "auto"
        self.num_classes = checks.check_several("num_classes", num_classes)
        self.weight = weight
        self.label_smoothing = label_smoothing
        self.soft_labels = checks.check_choice("soft_labels", soft_labels, ("expected", "any"))
        if soft_labels == "any" and not self.knows_sets:
            raise ValueError(f"{type(self).__name__} has one true class; it knows no {soft_labels=}")
        self.ignore_index = ignore_index
        self.reduction = reduction

    def __setattr__(self, name: str, value: Any) -> None:
        """Check a setting as on construction; it acts from the next call on."""
        if name in self.fixed and name in self.__dict__:
            raise AttributeError(f"{name} is fixed: build a new loss with {name}={value!r}")
        value = self._checked_setting(name, value)
        if not isinstance(value, nn.Parameter) and name in self.__dict__.get("_parameters", ()):
            del self._parameters[name]  # a number, "auto" or a plain tensor takes the place of a learned setting
        super().__setattr__(name, static(value) if name in self.constants and isinstance(value, Tensor) else value)

    def _checked_setting(self, name: str, value: Any) -> Any:
        if name == self.temperature:
            auto = self._auto() if value == checks.AUTO else None
            self.auto = auto if isinstance(auto, AutoTemperature) else None
            return value if self.auto else checks.check_inverse_temperature(auto or value, name)
        if name in self.rules:
            return self.rules[name](name, value)
        if name in self.per_class and value is not None:
            return checks.check_per_class(name, value, self.num_classes, or_zero=name == "weight")
        return value

    def _auto(self) -> AutoTemperature | float | None:
        """What the inverse temperature "auto" stands for; None: it is refused."""
        return None

    def _beta(self) -> Any:
        """The inverse temperature as it is now. Raises ValueError where training has brought it to 0 or below."""
        if self.auto is not None:
            return self.auto.value()
        beta = getattr(self, self.temperature, None)
        return None if beta is None else checks.check_inverse_temperature(beta, self.temperature)

    def extra_repr(self) -> str:
        settings = ((name, getattr(self, name)) for name in self.shown)
        return ", ".join(f"{name}={_shown(value)}" for name, value in settings if value is not None)

    def __copy__(self) -> "ClassificationLoss":
        """A copy whose settings are its own; tensors and the generator are shared."""
        values = (*vars(self).values(), *self.parameters())
        shared = {id(value): value for value in values if isinstance(value, (Tensor, torch.Generator))}
        return copy.deepcopy(self, shared)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ClassificationLoss":
        super()._apply(fn, recurse)
        for name in self.constants:
            tensor = getattr(self, name)
            if tensor is not None:
                device = fn(torch.empty(0, device=tensor.device)).device
                exact = tensor.float() if device.type == "mps" and tensor.dtype == torch.float64 else tensor
                self.__dict__[name] = static(exact.to(device))  # checked already
        return self

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of logits and labels."""
        return self._reduced(logits, labels, None)

    def _losses(self, scores: Tensor, target: Tensor | None, call: CallSettings) -> Any:
        """The loss of each row of scores (rows, n).

        target: labels (rows,) int64 in [0, n) -> (rows,); a set of right answers, mass (rows, n) in [0, 1] -> (rows,),
        from losses that know sets; None -> (rows, n), the loss of every class as the label, or None where that is not
        cheaper than each class alone.
        """
        raise TypeError(f"{type(self).__name__} does not define _losses")

    def _losses_of_pairs(self, scores: Tensor, row: Tensor, column: Tensor, call: CallSettings) -> Tensor:
        """The loss of pairs of a row of scores (rows, n) and a class as its label, (pairs,)."""
        return self._losses(scores[row], column, call.select(row))

    def _reduced(self, logits: Tensor, labels: Tensor, p_k: Tensor | None) -> Tensor:
        checks.check_logits(logits)
        axis = 0 if logits.dim() == 1 else 1
        rows = logits.movedim(axis, -1)
        shape, n = rows.shape[:-1], rows.shape[-1]
        if n != (self.num_classes or n):
            got = tuple(logits.shape)
            raise ValueError(f"logits must have num_classes={self.num_classes} columns, got shape {got}")
        for name in self.per_class:
            numbers = getattr(self, name)
            if numbers is not None and len(numbers) != n:
                raise ValueError(f"{name} holds {len(numbers)} numbers, but the logits have {n} classes")
        is_set = self.soft_labels == "any"
        has_mass = is_mass(labels) or (is_set and labels.shape == logits.shape)
        if has_mass:
            checks.check_label_masses(labels, logits, axis, is_set)
            if is_set and (self.weight is not None or self.label_smoothing):
                raise ValueError("soft_labels='any' takes neither weight nor label_smoothing: leave them out")
        else:
            checks.check_labels(labels, shape, n, self.ignore_index)
        with full_precision(logits.device):
            scores = to_compute_dtype(rows.reshape(-1, n))  # (rows, n)
            weight = None if self.weight is None else self.weight.to(scores)  # (n,)
            if has_mass:
                target = labels.movedim(axis, -1).reshape(-1, n).to(scores.dtype)  # (rows, n)
                counts = torch.ones_like(scores[:, 0], dtype=torch.bool)  # (rows,)
            else:
                target, counts = labels.reshape(-1), labels.reshape(-1) != self.ignore_index
            if self.auto is not None:
                self.auto.observe(scores, counts)
            if not has_mass and not (has_known_values(counts) and bool(counts.all())):
                # what is ignored may hold anything, and gets no gradient
                scores, target = scores.masked_fill(~counts.unsqueeze(1), 0), torch.where(counts, target, 0)
            share = counts.to(scores.dtype) if has_mass or weight is None else counts * weight[target]  # (rows,)
            call = CallSettings(self._beta(), p_k)
            if self.label_smoothing or (has_mass and not is_set):
                losses = self._expected(scores, class_mass(scores, target), weight, call)
            else:
                losses = self._losses(scores, target, call) * share
            losses = torch.where(counts, losses, 0)
            if self.reduction == "none":
                return losses.reshape(shape)
            return losses.sum() if self.reduction == "sum" else losses.sum() / share.sum()

    def _expected(self, scores: Tensor, mass: Tensor, weight: Tensor | None, call: CallSettings) -> Tensor:
        """sum_j mass_j L(s, j), (rows,), of the smoothed and weighted mass (rows, n) >= 0."""
        if self.label_smoothing:
            live = (scores > -torch.inf).to(scores.dtype)  # (rows, n); no part goes to classes that are masked out
            uniform = live / live.sum(1, keepdim=True).clamp(min=1)
            mass = (1 - self.label_smoothing) * mass + self.label_smoothing * uniform
        mass = mass if weight is None else mass * weight
        known = has_known_values(mass) and not mass.requires_grad
        if not known or int(mass.count_nonzero()) > MANY * len(mass):
            losses = self._losses(scores, None, call)  # (rows, n)
            if losses is not None:
                return _weighted(losses, mass).sum(1)
        n = mass.shape[1]
        if known:
            row, column = mass.nonzero(as_tuple=True)  # (pairs,) each
        else:
            pairs = torch.arange(mass.shape[0] * n, device=mass.device)
            row, column = pairs // n, pairs % n
        share = mass[row, column]
        size = max(AT_ONCE // (self.memory * min(self.m or n, n)), 1)  # pairs at a time
        in_parts = not torch.compiler.is_compiling() and not is_transforming() and is_ordinary(scores)
        if not in_parts or len(row) <= size or self.stochastic:
            return self._sum_of_pairs(scores, row, column, share, *call)
        total = torch.zeros_like(scores[:, 0])
        for start in range(0, len(row), size):
            part, ends = slice(start, start + size), (start, min(start + size, len(row)) - 1)
            first, last = (int(row[pair]) if known else pair // n for pair in ends)
            own = slice(first, last + 1)
            pairs_of_part = (row[part] - first, column[part], share[part])
            found = Recomputed.apply(self._sum_of_pairs, scores[own], *pairs_of_part, *call.select(own))
            total = total + pad(found, (first, len(total) - last - 1))
        return total

    def _sum_of_pairs(
        self, scores: Tensor, row: Tensor, column: Tensor, share: Tensor, beta: Any, p_k: Tensor | None
    ) -> Tensor:
        """For each row of scores (rows, n) the sum of share times loss over its pairs (pairs,): (rows,)."""
        losses = self._losses_of_pairs(scores, row, column, CallSettings(beta, p_k))
        return torch.zeros_like(scores[:, 0]).index_add(0, row, _weighted(losses, share))


class SoftmaxCrossEntropyLoss(ClassificationLoss):
    """torch.nn.CrossEntropyLoss, with the checks of the other losses, and in float32 under autocast as they are."""

    def _losses(self, scores: Tensor, target: Tensor | None, call: CallSettings) -> Any:
        return -log_softmax(scores, target)


class LDRKLLoss(ClassificationLoss):
    """LDR-KL loss (Zhu, Ying and Yang 2023): cross-entropy with a temperature and a margin.

    L(s, y) = log(1/n sum_j exp(beta (s_j - s_y + margin [j != y]))) / beta. It is consistent for top-k for every k.
    With the defaults it is cross-entropy minus log n; it is below 0 where the true class is far above the others. It
    works on the logits themselves, as the paper's formula does; the authors' release first divides softplus(logits) by
    their mean. n counts the classes that are not masked out.

    Args:
        inverse_temperature: beta, 1 / lambda in the paper, above 0 (default: 1); a tensor () that requires a gradient
            is learned.
        margin: margin of the true class over each other class, in units of the logits, at least 0 (default: 0).
        others: arguments of ClassificationLoss.
    """

    shown = ("inverse_temperature", "margin", *ClassificationLoss.shown)
    rules: ClassVar = {**ClassificationLoss.rules, "margin": checks.check_not_negative}
    knows_sets = False

    def __init__(
        self, inverse_temperature: float | Tensor = 1.0, margin: float = 0.0, num_classes: SupportsIndex | None = None,
        **others: Any,
    ) -> None:  # fmt: skip
        super().__init__(num_classes, **others)
        self.inverse_temperature = inverse_temperature
        self.margin = margin

    def _losses(self, scores: Tensor, target: Tensor | None, call: CallSettings) -> Any:
        beta = as_tensor(call.beta, scores)
        n = scores.new_full((1, 1), scores.shape[1])  # classes that are not masked out
        if not is_above(scores, -torch.inf):
            n = (scores > -torch.inf).sum(1, keepdim=True).clamp(min=1).to(scores.dtype)  # (rows, 1)
        z = centered(scores) * beta  # (rows, n)
        if target is None:
            total = torch.logaddexp(log_sum_of_others(z) + beta * self.margin, z)  # (rows, n)
            return (total - z - n.log()) / beta
        if self.margin:  # the true class lowered, as if the others were raised
            z = z.scatter_add(1, target.unsqueeze(1), (-self.margin * beta).expand(len(target), 1))
        return (-log_softmax(z, target) - n.log().squeeze(1)) / beta
