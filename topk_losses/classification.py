"""What every loss shares with torch.nn.CrossEntropyLoss: shapes, kinds of labels, weights and reductions."""

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from typing import ClassVar, NamedTuple, SupportsIndex, TypedDict

import torch
from torch import Tensor
from typing_extensions import Self

from topk_losses import checks
from topk_losses.compilers import full_precision, has_known_values, is_ordinary, is_transforming
from topk_losses.numerics import one_hot, to_compute_dtype
from topk_losses.recomputation import Recomputed
from topk_losses.temperature import KeepsPrecision, current_value, rename_former_keys

REDUCTIONS = ("mean", "sum", "none")
MEANINGS = ("expected", "any")  # of soft labels
# With more labels than this in a row, the losses of all classes together cost less than those of each label alone.
FEW_LABELS = 8
# Scores that are worked on at a time where each class as the label needs a pass of its own.
SCORES_AT_ONCE = 2**16
# Scores that are worked on at a time where one pass over a row is that of every class.
SCORES_OF_ROWS = 2**22


class CommonSettings(TypedDict, total=False):
    """The arguments that all losses share; ClassificationLoss describes them."""

    num_classes: SupportsIndex | None
    weight: Sequence[float] | Tensor | None
    label_smoothing: float
    soft_labels: str
    ignore_index: SupportsIndex
    reduction: str


class CallSettings(NamedTuple):
    """What a call reads from the settings, once, before it computes.

    The backward pass may compute a loss again. A schedule may have set another temperature or P_K by then, and
    torch.func.functional_call has taken its own away.

    Attributes:
        inverse_temperature: a number or a tensor (), above 0; 1 for losses without one.
        p_k: P_K of each sample, (rows, K); None: that of the loss.
        ranks: of a loss with a P_K of its own, the J ranks that have a weight in it.
        rank_weights: their weights, (1, J, 1 or num_classes).
    """

    inverse_temperature: float | Tensor = 1.0
    p_k: Tensor | None = None
    ranks: tuple[int, ...] = ()
    rank_weights: Tensor | None = None

    def repeat(self, times: int) -> "CallSettings":
        """Repeat each row, next to itself."""
        if self.p_k is None:
            return self
        return self._replace(p_k=self.p_k.repeat_interleave(times, dim=0))

    def select(self, rows: slice) -> "CallSettings":
        """Select rows."""
        if self.p_k is None:
            return self
        return self._replace(p_k=self.p_k[rows])


def class_dimension(logits: Tensor) -> int:
    """Return the dimension of the classes: 1, or 0 where there is no other."""
    return min(logits.dim() - 1, 1)


def class_rows(logits: Tensor) -> Tensor:
    """Return logits, or labels of their shape, as (rows, n)."""
    class_dim = class_dimension(logits)
    return logits.movedim(class_dim, -1).reshape(-1, logits.shape[class_dim])


def label_shape(logits: Tensor) -> torch.Size:
    """Return the shape of class indices: that of the logits without the classes."""
    class_dim = class_dimension(logits)
    return logits.shape[:class_dim] + logits.shape[class_dim + 1 :]


def is_known_to_be_all(is_counted: Tensor) -> bool:
    """Tell whether all are known to be True, without waiting for a device."""
    return has_known_values(is_counted) and bool(is_counted.all())


def smooth(target_probabilities: Tensor, logits: Tensor, label_smoothing: float) -> Tensor:
    """Spread a part of the target over all classes that are not masked out: (rows, n)."""
    unmasked = (logits > -torch.inf).to(logits.dtype)
    num_unmasked = unmasked.sum(1, keepdim=True).clamp(min=1)
    return (1 - label_smoothing) * target_probabilities + label_smoothing * unmasked / num_unmasked


def most_labels_in_a_row(target_probabilities: Tensor) -> int:
    """Count the classes that have a probability, or need a gradient of it, in the row with most of them."""
    if target_probabilities.requires_grad or not has_known_values(target_probabilities):
        return target_probabilities.shape[1]
    if target_probabilities.shape[0] == 0:
        return 0
    return int(target_probabilities.count_nonzero(dim=1).max())


def own_settings(loss: "type[ClassificationLoss]") -> list[str]:
    """Return the names of the arguments that a loss has besides those of all losses, in their order."""
    parameters = inspect.signature(loss).parameters.values()
    named = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    return [name for name in named if name not in CommonSettings.__annotations__]


class ClassificationLoss(KeepsPrecision):
    """Base class of the losses, with the interface of torch.nn.CrossEntropyLoss.

    A subclass defines `loss_of_labels`. It may also define `loss_of_every_class`, where all classes together cost less
    than one after another, and `loss_of_sets`, which soft_labels="any" needs.

    Logits are (batch, n), (n,), or (batch, n, d1, ...). Labels are int64 without the dimension n, or like the logits.
    The loss is () for reduction "mean" and "sum", and has the shape of int64 labels for "none". It is float32, under
    autocast too, or float64 for float64 logits. A class with a logit of -inf is masked out: the loss is that of the
    other classes. Do not put a label on it: CrossEntropyLoss has the loss inf there, and the losses here numbers that
    differ from method to method. Other samples keep their losses.

    Args:
        num_classes: n (default: that of the logits).
        weight: (n,), at least 0: weight of each class, as in CrossEntropyLoss.
        label_smoothing: in [0, 1): share of the label that is spread over all classes that are not masked out.
        soft_labels: meaning of labels like the logits. "expected" (default): a distribution q; the loss is sum_j q_j
            L(s, j), as in CrossEntropyLoss and for mixup. "any": several right answers, bool or numbers in [0, 1].
        ignore_index: label of samples that do not count.
        reduction: "mean" of the samples that count, weighted by their classes' weights; "sum"; or "none", with 0 for
            ignored samples.

    Raises:
        TypeError, ValueError: settings or inputs that do not fit; the message says which.
    """

    default_inverse_temperature: ClassVar[float | None] = None  # of losses that have one
    temperature_name: ClassVar[str] = "inverse_temperature"  # the argument that make_loss passes it as
    logit_std: ClassVar[float | None] = None  # as of a TopKOperator
    draws_noise: ClassVar[bool] = False
    takes: ClassVar[str] = "top-1"  # what p_k make_loss passes on: "top-1": none; "one k": a single k

    num_classes = checks.Checked(checks.check_several)
    label_smoothing = checks.Checked(checks.check_fraction)
    soft_labels = checks.Checked(partial(checks.check_choice, choices=MEANINGS))
    ignore_index = checks.Checked(partial(checks.check_integer, least=-(2**63)))
    reduction = checks.Checked(partial(checks.check_choice, choices=REDUCTIONS))
    generator: torch.Generator | None = None  # of losses that draw noise, on the logits' device; None: PyTorch's own
    weight: Tensor | None

    def __init__(
        self,
        num_classes: SupportsIndex | None = None,
        weight: Sequence[float] | Tensor | None = None,
        label_smoothing: float = 0.0,
        soft_labels: str = "expected",
        ignore_index: SupportsIndex = -100,
        reduction: str = "mean",
        **unknown: object,
    ) -> None:
        super().__init__()
        if unknown:
            raise TypeError(
                f"{type(self).__name__} does not take {', '.join(unknown)}; its own settings: "
                f"{', '.join(own_settings(type(self))) or 'none'}. make_loss(NAME, ...) builds each loss by its name"
            )
        self.num_classes = num_classes
        self.label_smoothing = label_smoothing
        self.soft_labels = soft_labels
        self.ignore_index = ignore_index
        self.reduction = reduction
        if weight is not None:
            weight = checks.check_per_class("weight", weight, self.num_classes, or_zero=True)
        self.register_buffer("weight", weight, persistent=False)
        if soft_labels == "any":
            self._check_any()
        self.register_load_state_dict_pre_hook(rename_former_keys)  # type: ignore[no-untyped-call]

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute; where it is Checked, a parameter is checked like any other value, and not registered.

        A number takes the place of the AutoTemperature of "auto".
        """
        if isinstance(getattr(type(self), name, None), checks.Checked):
            object.__setattr__(self, name, value)
            return
        takes_auto_away = isinstance(value, Real | Tensor) and name in self.__dict__.get("_modules", {})
        if takes_auto_away:  # PyTorch lets no number take the place of a module
            delattr(self, name)
        super().__setattr__(name, value)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        """Show the settings: all attributes that are numbers, words or operators."""
        shown = []
        for name, value in vars(self).items():
            if name.startswith("_") or name == "training" or value is None or isinstance(value, torch.Generator):
                continue
            if isinstance(value, float):
                value = f"{value:g}"
            shown.append(f"{name}={value}")
        return ", ".join(shown)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of logits and labels."""
        return self.compute(logits, labels)

    def loss_of_labels(self, logits: Tensor, labels: Tensor, call: CallSettings) -> Tensor:
        """Compute the loss of each row of logits (rows, n) for the labels (rows,): (rows,)."""
        raise NotImplementedError(f"{type(self).__name__} does not define loss_of_labels")

    def loss_of_every_class(self, logits: Tensor, call: CallSettings) -> Tensor:
        """Compute the loss of each row of logits (rows, n) for each class as the label: (rows, n)."""
        every_class = torch.arange(logits.shape[1], device=logits.device)
        return self.loss_of_classes(logits, every_class.expand(logits.shape), call)

    def loss_of_classes(self, logits: Tensor, classes: Tensor, call: CallSettings) -> Tensor:
        """Compute the loss of each row of logits (rows, n) for several classes (rows, c) as the label: (rows, c)."""

        compute = ClassificationLoss._loss_of_copies
        return self.in_chunks(compute, logits, classes, call, scores_per_loss=logits.shape[1])

    def loss_of_sets(self, logits: Tensor, sets: Tensor, call: CallSettings) -> Tensor:
        """Compute the loss of each row of logits (rows, n) for a set of right answers (rows, n) in [0, 1]: (rows,)."""
        raise NotImplementedError(f"{type(self).__name__} does not define loss_of_sets")

    def current_temperature(self, logits: Tensor, is_counted: Tensor) -> float | Tensor:
        """Return the inverse temperature of this call: the attribute that temperature_name names, or 1."""
        if not hasattr(self, self.temperature_name):
            return 1.0
        temperature = getattr(self, self.temperature_name)
        return current_value(temperature, logits, is_counted, self.temperature_name)

    def settings_of_call(self, inverse_temperature: float | Tensor, p_k: Tensor | None) -> CallSettings:
        """Return the settings of a call; losses with a P_K of their own add it."""
        return CallSettings(inverse_temperature, p_k)

    def is_stochastic(self) -> bool:
        """Tell whether the loss draws noise."""
        return self.draws_noise

    def compute(self, logits: Tensor, labels: Tensor, p_k: Tensor | None = None) -> Tensor:
        """Compute the loss, with a P_K of each sample (rows, K) for TopKCrossEntropyLoss."""
        self._check_settings()
        labels = self._checked_labels(logits, labels)
        with full_precision(logits.device):
            rows = to_compute_dtype(class_rows(logits))  # (rows, n)
            if labels.shape == logits.shape:
                targets = class_rows(labels).to(rows.dtype)  # (rows, n)
                is_counted = torch.ones_like(rows[:, 0], dtype=torch.bool)  # (rows,)
            else:
                targets = labels.reshape(-1)  # (rows,)
                is_counted = targets != self.ignore_index
            call = self.settings_of_call(self.current_temperature(rows, is_counted), p_k)
            losses, weights = self._weighted_losses(rows, targets, is_counted, call)  # (rows,) each
            return self._reduce(losses, weights, label_shape(logits))

    def _weighted_losses(
        self, logits: Tensor, targets: Tensor, is_counted: Tensor, call: CallSettings
    ) -> tuple[Tensor, Tensor]:
        """Return the weighted loss of each sample, and its weight in the mean: (rows,) each.

        Args:
            logits: (rows, n).
            targets: class indices (rows,), or a number for each class (rows, n).
            is_counted: (rows,), False where the label is ignore_index.
            call: the settings of this call.
        """
        # the logits of an ignored sample may hold anything, and get no gradient
        if targets.dim() == 1 and not is_known_to_be_all(is_counted):
            logits = logits.masked_fill(~is_counted.unsqueeze(1), 0)
            targets = targets.masked_fill(~is_counted, 0)
        weights = is_counted.to(logits.dtype)

        if targets.dim() == 1:
            if self.weight is not None:
                weights = weights * self.weight.to(logits)[targets]
            if not self.label_smoothing:
                losses = self.loss_of_labels(logits, targets, call)
                checks.check_shape(self, "loss_of_labels", losses, targets.shape)
                return losses * weights, weights
            target_probabilities = one_hot(targets, logits)
        elif self.soft_labels == "any":
            losses = self.loss_of_sets(logits, targets, call)
            checks.check_shape(self, "loss_of_sets", losses, weights.shape)
            return losses, weights
        else:
            target_probabilities = targets

        if self.label_smoothing:
            target_probabilities = smooth(target_probabilities, logits, self.label_smoothing)
        if self.weight is not None:
            target_probabilities = target_probabilities * self.weight.to(logits)
        losses = self._expected_loss(logits, target_probabilities, call)
        return losses.masked_fill(~is_counted, 0), weights

    def _reduce(self, losses: Tensor, weights: Tensor, shape: torch.Size) -> Tensor:
        if self.reduction == "none":
            return losses.reshape(shape)
        if self.reduction == "sum":
            return losses.sum()
        return losses.sum() / weights.sum()

    def _expected_loss(self, logits: Tensor, target_probabilities: Tensor, call: CallSettings) -> Tensor:
        """Compute sum_j q_j L(s, j) of each row, q (rows, n) at least 0: (rows,)."""
        num_labels = logits.shape[1]
        if not self.label_smoothing:
            num_labels = most_labels_in_a_row(target_probabilities)
        knows_one_label = type(self).loss_of_every_class is ClassificationLoss.loss_of_every_class
        if num_labels > FEW_LABELS and not knows_one_label:
            losses = self.loss_of_every_class(logits, call)  # (rows, n)
            checks.check_shape(self, "loss_of_every_class", losses, logits.shape)
        else:
            target_probabilities, classes = target_probabilities.topk(num_labels, dim=1)  # (rows, num_labels)
            if knows_one_label:  # which may be infinite for a masked class, and have a gradient of NaN
                is_idle = (target_probabilities == 0) & (logits.gather(1, classes) == -torch.inf)
                classes = torch.where(is_idle, logits.argmax(1, keepdim=True), classes)
            losses = self.loss_of_classes(logits, classes, call)
            if knows_one_label:
                losses = losses.masked_fill(is_idle, 0)
        # An infinite loss of a class without probability is 0; a finite one is the gradient of the probability.
        is_needed = (target_probabilities > 0) | losses.isfinite()
        return (losses.where(is_needed, 0) * target_probabilities).sum(1)

    def in_chunks(
        self,
        compute: Callable[[Self, Tensor, Tensor, CallSettings], Tensor],
        logits: Tensor,
        classes: Tensor,
        call: CallSettings,
        scores_per_loss: int,
    ) -> Tensor:
        """Compute compute(self, logits, classes, call) for a few rows, or for a few classes of one row, at a time.

        The backward pass computes each chunk again, so that the memory is that of one chunk. This is not possible under
        torch.func, nor for losses that draw noise, which would be another one.

        Args:
            compute: a method, the loss (rows, c) of logits (rows, n) for several classes (rows, c) as the label.
            logits, classes, call: its arguments.
            scores_per_loss: how many scores the loss of one row and class works on.
        """
        num_rows, num_classes = classes.shape
        is_small = num_rows * num_classes * scores_per_loss <= SCORES_AT_ONCE
        if is_small or not self._can_repeat(logits):
            return compute(self, logits, classes, call)

        as_it_is = self._as_it_is()

        def compute_chunk(
            logits: Tensor, classes: Tensor, inverse_temperature: float | Tensor, p_k: Tensor | None
        ) -> Tensor:
            settings = call._replace(inverse_temperature=inverse_temperature, p_k=p_k)
            return compute(as_it_is, logits, classes, settings)

        rows_at_once = max(SCORES_AT_ONCE // (num_classes * scores_per_loss), 1)
        classes_at_once = max(SCORES_AT_ONCE // (rows_at_once * scores_per_loss), 1)
        losses = []
        for number, rows in enumerate(logits.split(rows_at_once)):
            own = slice(number * rows_at_once, number * rows_at_once + len(rows))
            beta, p_k, *_ = call.select(own)
            losses_of_rows = []
            for chunk in classes[own].split(classes_at_once, dim=1):
                losses_of_rows.append(Recomputed.apply(compute_chunk, rows, chunk, beta, p_k))
            losses.append(torch.cat(losses_of_rows, dim=1))
        return torch.cat(losses)

    def of_few_rows(
        self,
        compute: Callable[[Self, Tensor, CallSettings], Tensor],
        logits: Tensor,
        call: CallSettings,
        scores_per_class: int,
    ) -> Tensor:
        """Compute compute(self, logits, call), of every class (rows, n), for a few rows at a time, as in_chunks does.

        scores_per_class: how many scores the loss of one row and class works on.
        """
        num_rows, num_classes = logits.shape
        rows_at_once = max(SCORES_OF_ROWS // (num_classes * scores_per_class), 1)
        if num_rows <= rows_at_once or not self._can_repeat(logits):
            return compute(self, logits, call)

        as_it_is = self._as_it_is()

        def compute_chunk(logits: Tensor, _: Tensor, inverse_temperature: float | Tensor, p_k: Tensor | None) -> Tensor:
            return compute(as_it_is, logits, call._replace(inverse_temperature=inverse_temperature, p_k=p_k))

        no_classes = logits.new_empty(0, dtype=torch.int64)
        losses = []
        for number, rows in enumerate(logits.split(rows_at_once)):
            beta, p_k, *_ = call.select(slice(number * rows_at_once, number * rows_at_once + len(rows)))
            losses.append(Recomputed.apply(compute_chunk, rows, no_classes, beta, p_k))
        return torch.cat(losses)

    def _as_it_is(self) -> Self:
        """Return a copy with the settings of now, also those in buffers: the backward pass may find others."""
        kept = copy.copy(self)
        kept._buffers = {}
        for name, numbers in self._buffers.items():
            kept._buffers[name] = None if numbers is None else numbers.clone()
        return kept

    def _can_repeat(self, logits: Tensor) -> bool:
        """Tell whether the backward pass may compute a loss again."""
        is_eager = not torch.compiler.is_compiling() and not is_transforming()
        return is_eager and is_ordinary(logits) and not self.is_stochastic() and not self._learns_more()

    def _learns_more(self) -> bool:
        """Tell whether an own loss has parameters besides the temperature: Recomputed returns no gradient of them."""
        for name, parameter in self.named_parameters():
            if parameter.requires_grad and name.partition(".")[0] != self.temperature_name:
                return True
        return False

    def _loss_of_copies(self, logits: Tensor, classes: Tensor, call: CallSettings) -> Tensor:
        """Compute the loss for the classes (rows, c) as the label, with a copy of the logits for each: (rows, c)."""
        num_classes = classes.shape[1]
        copies = logits.repeat_interleave(num_classes, dim=0)  # (rows c, n)
        labels = classes.reshape(-1)
        losses = self.loss_of_labels(copies, labels, call.repeat(num_classes))
        checks.check_shape(self, "loss_of_labels", losses, labels.shape)
        return losses.view(classes.shape)

    def _check_settings(self) -> None:
        """Raise ValueError for settings that do not fit each other, and for tensors that were assigned later."""
        self._check_tensor("weight", or_zero=True)
        if self.soft_labels == "any":
            self._check_any()

    def _check_tensor(self, name: str, or_zero: bool = False) -> None:
        """Raise ValueError for a buffer that does not hold a number for each class, where its values are known."""
        numbers = getattr(self, name)
        if numbers is not None and has_known_values(numbers):
            checks.check_per_class(name, numbers, self.num_classes, or_zero)

    def _check_any(self) -> None:
        if type(self).loss_of_sets is ClassificationLoss.loss_of_sets:
            raise ValueError(f"{type(self).__name__} has one true class; it knows no soft_labels='any'")
        if self.weight is not None or self.label_smoothing:
            raise ValueError("soft_labels='any' takes neither weight nor label_smoothing: leave them out")

    def _checked_labels(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the labels; raise an error for inputs that do not fit."""
        checks.check_logits(logits)
        class_dim = class_dimension(logits)
        n = logits.shape[class_dim]
        checks.check_has_classes(logits, n)
        if self.num_classes is not None and n != self.num_classes:
            got = tuple(logits.shape)
            raise ValueError(f"logits must have num_classes={self.num_classes} columns, got shape {got}")
        if self.weight is not None and len(self.weight) != n:
            raise ValueError(f"weight holds {len(self.weight)} numbers, but the logits have {n} classes")
        is_set = self.soft_labels == "any" and isinstance(labels, Tensor) and labels.shape == logits.shape
        is_distribution = isinstance(labels, Tensor) and labels.is_floating_point()
        if is_set or is_distribution:
            return checks.check_label_masses(labels, logits, class_dim, several=self.soft_labels == "any")
        return checks.check_labels(labels, label_shape(logits), n, self.ignore_index)
