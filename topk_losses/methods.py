"""The methods by their names, those of the repository and those that are registered.

Default temperatures are the published ones for ImageNet (the paper's README), where m = 16 scores are sorted; the
CIFAR-100 ones (all 100 scores) are in the training script. Transport methods, whose settings were not published,
take the defaults of OTT (SinkhornSort) and of Xie et al. (SOFT top-k). Those of thresholds, subsets, ranks and noised
losses, and the targets of "auto", are from results/temperature.csv (docs/findings/temperature-study.md).
"""

import functools
import re
from dataclasses import dataclass, fields
from importlib.metadata import entry_points
from typing import TypedDict

from torch import Tensor

from topk_losses import robust
from topk_losses.checks import AUTO, check_choice, check_inverse_temperature
from topk_losses.classification import ClassificationLoss
from topk_losses.cross_entropy import LDRKLLoss, SoftmaxCrossEntropyLoss
from topk_losses.networks import RelaxedNetwork
from topk_losses.operator import TopKOperator
from topk_losses.ranks import DFTopK, PerturbedTopK, RecallSurrogate
from topk_losses.sigmoids import check_sigmoid
from topk_losses.single_k import NoisedTopKLoss, TruncatedEntropyLoss
from topk_losses.smooth_svm import SmoothHardTopKLoss, SmoothTopKLoss
from topk_losses.sorts import NeuralSort, SoftSort
from topk_losses.subset import SubsetTopK
from topk_losses.threshold import LML, CappedSoftmax, LapSum, SparseTopK
from topk_losses.transport import SinkhornSort, SoftTopK

TOP1_MODES = ("sm", "smce", "sort")
TAKEN_BY_LOSSES = ("top-1", "one k")  # which P_K a loss without an operator takes
ENTRY_POINTS = "topk_losses.methods"  # the group that a package names its own methods in


@dataclass(frozen=True)
class Method:
    """What a name stands for: a relaxed top-k operator, whose loss is a TopKCrossEntropyLoss, or a loss.

    Attributes:
        family: for tables and figures.
        operator: the operator; None for a loss without one.
        loss: the class of a loss without an operator.
        expects: the argument that the name promises; "" for none.
    """

    family: str
    operator: TopKOperator | None = None
    loss: type[ClassificationLoss] | None = None
    expects: str = ""

    @property
    def inverse_temperature(self) -> float | None:
        """The default inverse temperature; None for a method that has none."""
        if self.operator is not None:
            return self.operator.default_inverse_temperature
        assert self.loss is not None
        return self.loss.default_inverse_temperature

    @property
    def spread(self) -> float | None:
        """What "auto" keeps the inverse temperature times the standard deviation of the logits at.

        None: "auto" is the default, since the method hardly depends on the scale of the logits; for odd_even and
        ldr_kl we found none.
        """
        if self.operator is not None:
            return self.operator.logit_std
        assert self.loss is not None
        return self.loss.logit_std

    @property
    def stochastic(self) -> bool:
        """Whether the method draws noise, from the `generator` of the loss or the call."""
        if self.operator is not None:
            return self.operator.draws_noise
        assert self.loss is not None
        return self.loss.draws_noise

    @property
    def takes(self) -> str:
        """Which P_K it takes: "any", "one k", or "top-1", which is none."""
        if self.loss is None:
            return "any"
        return self.loss.takes


METHODS: dict[str, Method] = {
    "softmax_cross_entropy": Method("losses", loss=SoftmaxCrossEntropyLoss),
    "ldr_kl": Method("losses", loss=LDRKLLoss),
    "smooth_topk": Method("losses", loss=SmoothTopKLoss),
    "smooth_hard_topk": Method("losses", loss=SmoothHardTopKLoss),
    "truncated_entropy": Method("losses", loss=TruncatedEntropyLoss),
    "noised_topk": Method("losses", loss=NoisedTopKLoss),
    "imbalanced_noised_topk": Method("losses", loss=NoisedTopKLoss, expects="class_counts"),
    "forward_correction": Method("robust", loss=robust.ForwardCorrectionLoss),
    "generalized_cross_entropy": Method("robust", loss=robust.GeneralizedCrossEntropyLoss),
    "symmetric_cross_entropy": Method("robust", loss=robust.SymmetricCrossEntropyLoss),
    "nce_rce": Method("robust", loss=robust.NCEAndRCELoss),
    "phuber_cross_entropy": Method("robust", loss=robust.PHuberCrossEntropyLoss),
    "neuralsort": Method("sorts", NeuralSort()),
    "softsort": Method("sorts", SoftSort()),
    "sinkhorn_sort": Method("transports", SinkhornSort()),
    "soft_topk": Method("transports", SoftTopK()),
    "lml": Method("thresholds", LML()),
    "lapsum": Method("thresholds", LapSum()),
    "sparse_topk": Method("thresholds", SparseTopK()),
    "capped_softmax": Method("thresholds", CappedSoftmax()),
    "subset_topk": Method("subsets", SubsetTopK()),
    "df_topk": Method("ranks", DFTopK()),
    "recall_surrogate": Method("ranks", RecallSurrogate()),
    "perturbed_topk": Method("ranks", PerturbedTopK()),
    "odd_even": Method("networks", RelaxedNetwork("odd_even")),
    "bitonic": Method("networks", RelaxedNetwork("bitonic")),
    "splitter_selection": Method("networks", RelaxedNetwork("splitter_selection")),
}
# Of the methods above: without a k, as P_K = [1, 0, ..]; of a single k; of any P_K.
TOP1 = tuple(name for name, method in METHODS.items() if method.takes == "top-1")
SINGLE_K = tuple(name for name, method in METHODS.items() if method.takes == "one k")
RELAXATIONS = tuple(name for name, method in METHODS.items() if method.takes == "any")
# Published commands name the official code's dense path; here one evaluation serves both.
ALIASES = {"bitonic__non_sparse": "bitonic"}
# What papers call a method, for the message about an unknown name.
ABBREVIATIONS = {
    "ce": "softmax_cross_entropy",
    "gce": "generalized_cross_entropy",
    "sce": "symmetric_cross_entropy",
    "nce": "nce_rce",
    "phuber": "phuber_cross_entropy",
    "forward": "forward_correction",
}


def register_operator(name: str, operator: TopKOperator, family: str = "own") -> None:
    """Give an operator of your own a name that make_loss, TopKCrossEntropyLoss, make_operator and topk_mask take.

    Args:
        name: not yet a name of METHODS.
        operator: the operator.
        family: for tables and figures.

    Raises:
        TypeError: it is no TopKOperator.
        ValueError: the name is taken, or is no name.
    """
    if not isinstance(operator, TopKOperator):
        raise TypeError(f"an operator is an object of a class derived from TopKOperator, got {operator!r}")
    add_method(name, Method(family, operator=operator))


def register_loss(name: str, loss: type[ClassificationLoss], family: str = "own") -> None:
    """Give a loss of your own a name that make_loss takes.

    Args:
        name: not yet a name of METHODS.
        loss: its class, with the arguments of ClassificationLoss and its own.
        family: for tables and figures.

    Raises:
        TypeError: it is no class of losses.
        ValueError: the name is taken or is no name, or what the class takes is not one of TAKEN_BY_LOSSES.
    """
    if not isinstance(loss, type) or not issubclass(loss, ClassificationLoss):
        raise TypeError(f"a loss is a class derived from ClassificationLoss, got {loss!r}")
    check_choice("takes", loss.takes, TAKEN_BY_LOSSES)
    add_method(name, Method(family, loss=loss))


def add_method(name: str, method: Method) -> None:
    """Add a method under a new name; raise ValueError for one that stands for another method, or that is no name."""
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(f"a name of a method has letters, digits, '_', '.' and '-', got {name!r}")
    if name in METHODS and is_same(METHODS[name], method):
        return
    if name in METHODS or name in ALIASES:
        raise ValueError(f"there is a method {name!r} already; choose another name")
    METHODS[name] = method


def is_same(one: Method, other: Method) -> bool:
    """Tell whether two methods are equal: operators with attributes that are no fields are, if they are one object."""
    if other.operator is not None:
        names = {field.name for field in fields(other.operator)}
        if vars(other.operator).keys() - names:
            return one.operator is other.operator
    return one == other


@functools.cache
def register_entry_points() -> None:
    """Register what installed packages name in the group `topk_losses.methods`, once.

    An entry point is a class of losses, a class of operators without settings, or an operator.
    """
    for entry_point in entry_points(group=ENTRY_POINTS):
        own = entry_point.load()
        if isinstance(own, type) and issubclass(own, ClassificationLoss):
            register_loss(entry_point.name, own)
        elif isinstance(own, type):
            register_operator(entry_point.name, own())
        else:
            register_operator(entry_point.name, own)


def resolve_method(method: str, relaxed: bool = False) -> str:
    """Return the canonical name of a method.

    Args:
        method: its name, or one of ALIASES.
        relaxed: whether to refuse a method that has no relaxed permutation matrix.

    Raises:
        ValueError: the name is unknown (the message has the nearest one), or the method is refused.
    """
    method = ALIASES.get(method, method)
    if method not in METHODS:
        register_entry_points()
    method = check_choice("method", method, METHODS, ABBREVIATIONS)
    if relaxed and METHODS[method].operator is None:
        names = [name for name, other in METHODS.items() if other.operator is not None]
        raise ValueError(
            f"{method} has no relaxed permutation matrix; build its loss with make_loss({method!r}, ...), or choose "
            f"one of: {', '.join(names)}"
        )
    return method


def find_operator(method: str | TopKOperator) -> TopKOperator:
    """Return the operator of a method by its name; an operator as it is.

    Raises:
        TypeError, ValueError: it is neither.
    """
    if isinstance(method, TopKOperator):
        return method
    if not isinstance(method, str):
        raise TypeError(f"method must be the name of a method or a TopKOperator, got {type(method).__name__}")
    operator = METHODS[resolve_method(method, relaxed=True)].operator
    assert operator is not None
    return operator


def make_operator(
    method: str | TopKOperator, distribution: str | None = None, art_lambda: float | None = None
) -> TopKOperator:
    """Build the relaxed top-k operator of a method by name.

    Args:
        method: one of RELAXATIONS, or a name that was registered.
        distribution, art_lambda: settings of a network; None: its defaults.

    Raises:
        ValueError: a method without a relaxed permutation matrix, or settings that do not fit it.
    """
    operator = find_operator(method)
    if distribution is None and art_lambda is None:
        return operator
    if not isinstance(operator, RelaxedNetwork):
        setting = "distribution" if distribution is not None else "art_lambda"
        value = distribution if distribution is not None else art_lambda
        raise refuse_setting(setting, value, str(method))
    return RelaxedNetwork(operator.construction, *resolve_sigmoid(operator, distribution, art_lambda))


def resolve_sigmoid(
    operator: RelaxedNetwork, distribution: str | None, art_lambda: float | None
) -> tuple[str, float | None]:
    """Return the settings of a network's sigmoid function, those of the operator where none are given.

    The operator's art_lambda belongs to its distribution.

    Raises:
        ValueError: an unknown distribution, or an art_lambda that does not fit.
    """
    if art_lambda is None and distribution in (None, operator.distribution):
        art_lambda = operator.art_lambda
    return check_sigmoid(distribution or operator.distribution, art_lambda)


NETWORKS_ALONE = "relaxed networks (odd_even, bitonic, splitter_selection)"
APPLIES_TO = {
    "inverse_temperature": "methods with a temperature",
    "distribution": NETWORKS_ALONE,
    "art_lambda": "relaxed networks with the distribution logistic_phi",
    "top1_mode": "methods with a relaxed permutation matrix",
}


def refuse_setting(name: str, value: object, method: str) -> ValueError:
    """Return the error for a setting that a method does not have."""
    return ValueError(f"{name} applies to {APPLIES_TO[name]}, not to {method}; leave it out, got {value!r}")


class ResolvedSettings(TypedDict):
    """The settings that a method runs with, None where one does not apply."""

    inverse_temperature: float | Tensor | str | None
    distribution: str | None
    art_lambda: float | None
    top1_mode: str | None


def resolve_settings(
    method: str,
    inverse_temperature: float | Tensor | str | None = None,
    distribution: str | None = None,
    art_lambda: float | None = None,
    top1_mode: str | None = None,
) -> ResolvedSettings:
    """Return the settings that a method runs with: defaults filled in, None where a setting does not apply.

    Raises:
        ValueError: an unknown name, a value out of range, or a setting that the method or distribution does not have.
    """
    method = resolve_method(method)
    spec = METHODS[method]
    operator = spec.operator
    is_network = isinstance(operator, RelaxedNetwork)
    applies = {
        "inverse_temperature": spec.inverse_temperature is not None,
        "distribution": is_network,
        "art_lambda": is_network,
        "top1_mode": operator is not None,
    }
    settings = ResolvedSettings(
        inverse_temperature=inverse_temperature, distribution=distribution, art_lambda=art_lambda, top1_mode=top1_mode
    )
    for name, value in settings.items():
        if value is not None and not applies[name]:
            raise refuse_setting(name, value, method)
    settings["inverse_temperature"] = resolve_inverse_temperature(spec, inverse_temperature)
    if isinstance(operator, RelaxedNetwork):
        distribution, art_lambda = resolve_sigmoid(operator, distribution, art_lambda)
        settings["distribution"] = distribution
        settings["art_lambda"] = art_lambda
    if operator is not None:
        settings["top1_mode"] = check_choice("top1_mode", top1_mode or "sm", TOP1_MODES)
    return settings


def resolve_inverse_temperature(
    method: Method, inverse_temperature: float | Tensor | str | None
) -> float | Tensor | str | None:
    """Return the inverse temperature of a method; "auto" is the default of one that does not follow the logits."""
    is_auto = isinstance(inverse_temperature, str) and inverse_temperature == AUTO
    if inverse_temperature is None or (is_auto and method.spread is None):
        return method.inverse_temperature
    if is_auto:
        return AUTO
    return check_inverse_temperature(inverse_temperature)
