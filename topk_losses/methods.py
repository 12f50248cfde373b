"""The methods by their name on the command line. The only place that dispatches on a method's name.

Default temperatures are the published ones for ImageNet (the paper's README), where m = 16 scores are sorted; the
CIFAR-100 ones (all 100 scores) are in the training script. Transport methods, whose settings were not published,
take the defaults of OTT (SinkhornSort) and of Xie et al. (SOFT top-k). Those of thresholds, subsets, ranks and noised
losses, and the targets of "auto", are from results/temperature.csv (docs/findings/temperature-study.md).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, SupportsIndex

from torch import Tensor

from topk_losses import robust
from topk_losses.checks import AUTO, check_choice, check_integer, check_inverse_temperature, check_k
from topk_losses.classification import ClassificationLoss, LDRKLLoss, SoftmaxCrossEntropyLoss
from topk_losses.networks import Network, RelaxedNetwork, bitonic, odd_even, splitter_selection
from topk_losses.operator import TopKOperator
from topk_losses.ranks import DFTopK, PerturbedTopK, RecallSurrogate
from topk_losses.sigmoids import check_sigmoid
from topk_losses.single_k import BETA, SPREAD, NoisedTopKLoss, TruncatedEntropyLoss
from topk_losses.smooth_svm import SmoothHardTopKLoss, SmoothTopKLoss
from topk_losses.sorts import NeuralSort, SoftSort
from topk_losses.subset import SubsetTopK
from topk_losses.temperature import AutoTemperature
from topk_losses.threshold import LML, CappedSoftmax, LapSum, SparseTopK
from topk_losses.transport import SinkhornSort, SoftTopK

TOP1_MODES = ("sm", "smce", "sort")


class Method(NamedTuple):
    """What a method is built from.

    Attributes:
        family: for tables and figures.
        inverse_temperature: default; None: it has none.
        operator: class of a relaxed sort for any number of scores, built from k and an inverse temperature.
        network: builder of a comparator network, from n and k.
        loss: class of a loss without a relaxed permutation matrix.
        stochastic: whether it draws noise, from the `generator` of the loss or the call.
        spread: what "auto" keeps the inverse temperature times the standard deviation of the logits at. None: "auto" is
            the default, since the method hardly depends on the scale of the logits; for odd_even and ldr_kl we found
            none.
    """

    family: str
    inverse_temperature: float | None
    operator: Callable[..., TopKOperator] | None = None
    network: Callable[..., Network] | None = None
    loss: Callable[..., ClassificationLoss] | None = None
    stochastic: bool = False
    spread: float | None = None

    def auto(self) -> AutoTemperature | float | None:
        """What inverse_temperature="auto" stands for: one that follows the logits, or the default."""
        if self.spread is None or self.inverse_temperature is None:
            return self.inverse_temperature
        return AutoTemperature(self.spread, self.inverse_temperature)


def _from_operator(family: str, operator: type[TopKOperator], spread: float | None = None) -> Method:
    return Method(family, operator.default_inverse_temperature, operator, None, None, operator.stochastic, spread)


METHODS: dict[str, Method] = {
    "softmax_cross_entropy": Method("losses", None, loss=SoftmaxCrossEntropyLoss),
    "ldr_kl": Method("losses", 1.0, loss=LDRKLLoss),
    "smooth_topk": Method("losses", 1.0, loss=SmoothTopKLoss),
    "smooth_hard_topk": Method("losses", 1.0, loss=SmoothHardTopKLoss),
    "truncated_entropy": Method("losses", None, loss=TruncatedEntropyLoss),
    "noised_topk": Method("losses", BETA, loss=NoisedTopKLoss, stochastic=True, spread=SPREAD),
    # the same with class_counts
    "imbalanced_noised_topk": Method("losses", BETA, loss=NoisedTopKLoss, stochastic=True, spread=SPREAD),
    "forward_correction": Method("robust", None, loss=robust.ForwardCorrectionLoss),
    "generalized_cross_entropy": Method("robust", None, loss=robust.GeneralizedCrossEntropyLoss),
    "symmetric_cross_entropy": Method("robust", None, loss=robust.SymmetricCrossEntropyLoss),
    "nce_rce": Method("robust", None, loss=robust.NCEAndRCELoss),
    "phuber_cross_entropy": Method("robust", None, loss=robust.PHuberCrossEntropyLoss),
    "neuralsort": _from_operator("sorts", NeuralSort, 0.8),
    "softsort": _from_operator("sorts", SoftSort, 3.0),
    "sinkhorn_sort": _from_operator("transports", SinkhornSort),
    "soft_topk": _from_operator("transports", SoftTopK),
    "lml": _from_operator("thresholds", LML, 3.0),
    "lapsum": _from_operator("thresholds", LapSum, 2.7),
    "sparse_topk": _from_operator("thresholds", SparseTopK, 0.7),
    "capped_softmax": _from_operator("thresholds", CappedSoftmax, 2.2),
    "subset_topk": _from_operator("subsets", SubsetTopK, 3.0),
    "df_topk": _from_operator("ranks", DFTopK, 2.0),
    "recall_surrogate": _from_operator("ranks", RecallSurrogate, 2.2),
    "perturbed_topk": _from_operator("ranks", PerturbedTopK, 1.2),
    "odd_even": Method("networks", 1.0, network=odd_even),
    "bitonic": Method("networks", 1.0, network=bitonic, spread=13.0),
    "splitter_selection": Method("networks", 1.0, network=splitter_selection, spread=6.0),
}
# Without a k, as P_K = [1, 0, ..].
TOP1 = ("softmax_cross_entropy", "ldr_kl", *(name for name, method in METHODS.items() if method.family == "robust"))
SINGLE_K = tuple(name for name, method in METHODS.items() if method.loss and name not in TOP1)
RELAXATIONS = tuple(name for name, method in METHODS.items() if method.loss is None)
# Published commands name the official code's dense path; here one evaluation serves both.
ALIASES = {"bitonic__non_sparse": "bitonic"}


def register_method(
    name: str, operator: Callable[..., TopKOperator], inverse_temperature: float | None = None,
    spread: float | None = None, stochastic: bool = False, family: str = "own",
) -> None:  # fmt: skip
    """Give an operator of your own a name that make_loss, TopKCrossEntropyLoss, make_operator and topk_mask take.

    Args:
        name: not yet a name of METHODS.
        operator: its class, or a function of (k, inverse_temperature).
        inverse_temperature: default, above 0; None: the class's `default_inverse_temperature`.
        spread: what "auto" keeps the inverse temperature times the standard deviation of the logits at; None: no
            "auto".
        stochastic: whether it draws noise.
        family: for tables and figures.

    Raises:
        ValueError: the name is taken.
    """
    if name in METHODS or name in ALIASES:
        raise ValueError(f"there is a method {name!r} already; choose another name")
    beta = getattr(operator, "default_inverse_temperature", 1.0) if inverse_temperature is None else inverse_temperature
    check_inverse_temperature(beta)
    METHODS[name] = Method(family, beta, operator, None, None, stochastic, spread)


def resolve_method(method: str, relaxed: bool = False) -> str:
    """Return the canonical name of a method.

    Args:
        method: its name, or one of ALIASES.
        relaxed: whether to refuse a method that has no relaxed permutation matrix.

    Raises:
        ValueError: the name is unknown (the message has the nearest one), or the method is refused.
    """
    method = check_choice("method", ALIASES.get(method, method), METHODS)
    if relaxed and METHODS[method].loss:
        raise ValueError(
            f"{method} has no relaxed permutation matrix; build its loss with make_loss({method!r}, ...), or choose "
            f"one of: {', '.join(name for name, spec in METHODS.items() if spec.loss is None)}"
        )
    return method


def resolve_settings(
    method: str, inverse_temperature: float | Tensor | str | None = None, distribution: str | None = None,
    art_lambda: float | None = None, top1_mode: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return the settings that a method runs with: defaults filled in, None where a setting does not apply.

    Returns:
        The values of inverse_temperature, distribution, art_lambda and top1_mode, by name.

    Raises:
        ValueError: an unknown name, a value out of range, or a setting that the method or distribution does not have.
    """
    method = resolve_method(method)
    spec, beta = METHODS[method], inverse_temperature
    is_relaxed = spec.loss is None
    for name, value, applies, where in (
        ("inverse_temperature", beta, spec.inverse_temperature is not None, "methods with a temperature"),
        ("distribution", distribution, spec.network, "relaxed networks (odd_even, bitonic, splitter_selection)"),
        ("art_lambda", art_lambda, spec.network, "relaxed networks with the distribution logistic_phi"),
        ("top1_mode", top1_mode, is_relaxed, "methods with a relaxed permutation matrix"),
    ):
        if value is not None and not applies:
            raise ValueError(f"{name} applies to {where}, not to {method}; leave it out, got {value!r}")
    if beta is None or (beta == AUTO and spec.spread is None):
        beta = spec.inverse_temperature
    elif beta != AUTO:
        beta = check_inverse_temperature(beta)
    if spec.network:
        distribution, art_lambda = check_sigmoid(distribution, art_lambda)
    if is_relaxed:
        top1_mode = check_choice("top1_mode", top1_mode or "sm", TOP1_MODES)
    return {
        "inverse_temperature": beta, "distribution": distribution, "art_lambda": art_lambda, "top1_mode": top1_mode,
    }  # fmt: skip


def make_operator(
    method: str, num_scores: int | None, k: SupportsIndex, inverse_temperature: float | Tensor | None = None,
    distribution: str | None = None, art_lambda: float | None = None,
) -> TopKOperator:  # fmt: skip
    """Build the relaxed top-k operator of a method by name.

    Args:
        method: one of RELAXATIONS.
        num_scores: n, the number of scores; None: any, that of each call.
        k: number of ranks, at most num_scores.
        inverse_temperature, distribution, art_lambda: None: the method's default.

    Raises:
        ValueError: a method without a relaxed permutation matrix, or settings that do not fit it.
    """
    method = resolve_method(method, relaxed=True)
    n = None if num_scores is None else check_integer("num_scores", num_scores, 1)
    k, spec = check_k(k, n), METHODS[method]
    beta, distribution, art_lambda, _ = resolve_settings(method, inverse_temperature, distribution, art_lambda).values()
    if spec.network:
        return RelaxedNetwork(spec.network(n, k) if n else spec.network, beta, distribution, art_lambda, k)
    assert spec.operator is not None
    return spec.operator(k, beta)
