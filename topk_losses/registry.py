"""The methods by their name on the command line. The only place that dispatches on a method's name.

Default temperatures are the published ones for ImageNet (the paper's README), where m = 16 scores are sorted; the
CIFAR-100 ones (all 100 scores) are in the training script. Transport methods, whose settings were not published,
take the defaults of OTT (SinkhornSort) and of Xie et al. (SOFT top-k).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from topk_losses import networks
from topk_losses.checks import check_choice, check_k, check_positive
from topk_losses.distributions import DISTRIBUTIONS
from topk_losses.neuralsort import NeuralSort
from topk_losses.operator import TopKOperator
from topk_losses.sinkhorn import SinkhornSort, SoftTopK
from topk_losses.softsort import SoftSort
from topk_losses.sorting_networks import RelaxedNetwork

TOP1_MODES = ("sm", "smce", "sort")


class Method(NamedTuple):
    """A method: its default inverse temperature (None: it has none), and how to build its relaxed operator.

    build: (num_scores, k, boundaries, inverse_temperature, distribution, art_lambda) -> operator, or None for a
    loss that has no relaxed permutation matrix. boundaries: ranks after which P_K's weights change.
    """

    inverse_temperature: float | None
    build: Callable[..., TopKOperator] | None = None
    is_network: bool = False


def _network(construct: Callable[[int, int], networks.Network]) -> Callable[..., TopKOperator]:
    def build(
        num_scores: int, k: int, boundaries: Sequence[int], beta: float, distribution: str, art_lambda: float
    ) -> TopKOperator:
        return RelaxedNetwork(construct(num_scores, k), beta, distribution, art_lambda)

    return build


def _sort(operator: type[NeuralSort] | type[SoftSort] | type[SinkhornSort]) -> Callable[..., TopKOperator]:
    def build(
        num_scores: int, k: int, boundaries: Sequence[int], beta: float, distribution: None, art_lambda: None
    ) -> TopKOperator:
        return operator(k, beta)

    return build


def _soft_topk(
    num_scores: int, k: int, boundaries: Sequence[int], beta: float, distribution: None, art_lambda: None
) -> TopKOperator:
    return SoftTopK(k, beta, boundaries)


METHODS: dict[str, Method] = {
    "softmax_cross_entropy": Method(None),
    "smooth_topk": Method(1.0),
    "smooth_hard_topk": Method(1.0),
    "neuralsort": Method(0.5, _sort(NeuralSort)),
    "softsort": Method(0.5, _sort(SoftSort)),
    "sinkhorn_sort": Method(100.0, _sort(SinkhornSort)),
    "soft_topk": Method(10.0, _soft_topk),
    "odd_even": Method(1.0, _network(networks.odd_even), is_network=True),
    "bitonic": Method(1.0, _network(networks.bitonic), is_network=True),
    "splitter_selection": Method(1.0, _network(networks.splitter_selection), is_network=True),
}
RELAXATIONS = tuple(name for name, method in METHODS.items() if method.build)
# Published commands name the official code's dense path; here one evaluation serves both.
ALIASES = {"bitonic__non_sparse": "bitonic"}


def resolve_method(method: str) -> str:
    """The canonical name of `method`; ValueError naming the nearest one if it is unknown."""
    return check_choice("method", ALIASES.get(method, method), METHODS)


def resolve_relaxation(method: str) -> str:
    """The canonical name of a method that has a relaxed permutation matrix; ValueError for any other."""
    method = resolve_method(method)
    if method not in RELAXATIONS:
        raise ValueError(
            f"{method} has no relaxed permutation matrix; build its loss with make_loss({method!r}, ...), or choose "
            f"one of: {', '.join(RELAXATIONS)}"
        )
    return method


def resolve_settings(
    method: str,
    inverse_temperature: float | None = None,
    distribution: str | None = None,
    art_lambda: float | None = None,
    top1_mode: str | None = None,
) -> dict[str, float | str | None]:
    """The settings `method` runs with: defaults filled in, None where a setting does not apply.

    Returns inverse_temperature, distribution, art_lambda, top1_mode. Raises ValueError for an unknown name, a
    value out of range, or a setting given to a method (or distribution) that has none.
    """
    method = resolve_method(method)
    spec = METHODS[method]

    def not_for(name: str, value: object, only: str) -> None:
        if value is not None:
            raise ValueError(f"{name} applies to {only}, not to {method}; leave it out, got {value!r}")

    if spec.inverse_temperature is None:
        not_for("inverse_temperature", inverse_temperature, "methods with a temperature")
    elif inverse_temperature is None:
        inverse_temperature = spec.inverse_temperature
    else:
        inverse_temperature = check_positive("inverse_temperature", inverse_temperature)

    if spec.is_network:
        distribution = check_choice("distribution", distribution or "logistic_phi", DISTRIBUTIONS)
        if distribution == "logistic_phi":
            art_lambda = 0.5 if art_lambda is None else float(art_lambda)
        elif art_lambda is not None:
            raise ValueError(
                f"art_lambda applies to the distribution logistic_phi, not to {distribution}; leave it out, "
                f"got {art_lambda!r}"
            )
    else:
        not_for("distribution", distribution, "relaxed networks (odd_even, bitonic, splitter_selection)")
        not_for("art_lambda", art_lambda, "relaxed networks with the distribution logistic_phi")

    if spec.build is None:
        not_for("top1_mode", top1_mode, "methods with a relaxed permutation matrix")
    else:
        top1_mode = check_choice("top1_mode", top1_mode or "sm", TOP1_MODES)
    return {
        "inverse_temperature": inverse_temperature,
        "distribution": distribution,
        "art_lambda": art_lambda,
        "top1_mode": top1_mode,
    }


def make_operator(
    method: str,
    num_scores: int,
    k: int,
    inverse_temperature: float | None = None,
    distribution: str | None = None,
    art_lambda: float | None = None,
    boundaries: Sequence[int] | None = None,
) -> TopKOperator:
    """Build the relaxed top-k operator of a method by name, for num_scores scores and ranks 1..k < num_scores.

    None means the method's default. boundaries matter to soft_topk alone: the last rank of each group of ranks that
    share an anchor (default: every rank its own). Raises ValueError for a method without a relaxed permutation matrix
    and for settings that do not fit.
    """
    method = resolve_relaxation(method)
    settings = resolve_settings(method, inverse_temperature, distribution, art_lambda)
    check_k(k, num_scores)
    boundaries = range(1, k + 1) if boundaries is None else boundaries
    return METHODS[method].build(
        num_scores, k, boundaries, settings["inverse_temperature"], settings["distribution"], settings["art_lambda"]
    )
