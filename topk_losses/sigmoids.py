"""The six sigmoid families that relax a comparator (Petersen et al. 2022; diffsort, difftopk 0.2.0), each once.

A relaxed comparator puts two values in order and then mixes them: of values at a distance e >= 0 each takes over the
share sigmoid(-u) of the other, in (0, 1/2], with u = beta e, beta the inverse temperature. Written for u >= 0, nothing
is cancelled however far apart the values lie.

The functions below are elementwise formulas of PyTorch's tensors and, as they stand, of the kernels: these bind the
same lines to other elementary functions (`bind`), so that no formula is written twice. PyTorch differentiates them by
itself; the kernels need the slopes that stand beside them.
"""

import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, erfc, exp, sqrt, where
from torch import clamp as at_least
from torch import pow as power

from topk_losses.checks import check_choice, check_fraction

# ART's slope at e = 0 is infinite; with the epsilon of difftopk, 1e-10, it is 1e-10^-lambda / 4 times beta, 25,000
# beta for the published .5, and one such gradient undoes many steps of Adam. In bf16 some of 100 scores are always
# equal. Equal values get the mean slope over e <= ART_TIE instead, about the resolution of bf16 at 1.
ART_TIE = 1e-3
ROUNDINGS = 8  # values that lie no further apart than this many of their roundings count as equal


def arccot(u: Tensor) -> Tensor:
    """The angle in (0, pi / 2] whose cotangent is u >= 0."""
    return torch.atan2(torch.ones_like(u), u)


def logistic(u: Any) -> Any:
    return exp(-u) / (1.0 + exp(-u))


def logistic_slope(u: Any, mix: Any) -> Any:
    return mix * mix - mix


def gaussian(u: Any) -> Any:
    return 0.5 * erfc(0.7071067811865476 * u)


def gaussian_slope(u: Any, mix: Any) -> Any:
    return -0.3989422804014327 * exp(-0.5 * u * u)


def reciprocal(u: Any) -> Any:
    return 1.0 / (2.0 + u)


def reciprocal_slope(u: Any, mix: Any) -> Any:
    return -mix * mix


def cauchy(u: Any) -> Any:
    return 0.3183098861837907 * arccot(u)


def cauchy_slope(u: Any, mix: Any) -> Any:
    return -0.3183098861837907 / (1.0 + u * u)


def optimal(u: Any) -> Any:
    """1/2 - u up to u = 1/4, 1/(16 u) beyond (Petersen et al. 2022b)."""
    return where(u <= 0.25, 0.5 - u, 0.0625 / at_least(u, 0.25))


def optimal_slope(u: Any, mix: Any) -> Any:
    return -0.0625 / (at_least(u, 0.25) * at_least(u, 0.25))


def unit(e: Any, art_lambda: Any, tie_scale: Any) -> Any:
    return 1.0


def art_scale(e: Any, art_lambda: Any, tie_scale: Any) -> Any:
    """ART, the activation replacement trick: u is beta e / (e + 1e-10)^lambda, beta e times this factor."""
    return where(e == 0.0, tie_scale, power(e + 1e-10, -art_lambda))


def art_slope(e: Any, art_lambda: Any, tie_scale: Any) -> Any:
    """d u / d e over beta."""
    steep = power(e + 1e-10, -art_lambda) * (1.0 - art_lambda * (e / (e + 1e-10)))
    return where(e == 0.0, tie_scale, steep)


class Sigmoid(NamedTuple):
    """A family: mix(u) = sigmoid(-u) and its slope(u, mix) for u = beta e scale(e); and d u / d e over beta."""

    mix: Callable[..., Any]
    slope: Callable[..., Any]
    scale: Callable[..., Any] = unit
    scale_slope: Callable[..., Any] = unit


DISTRIBUTIONS: dict[str, Sigmoid] = {
    "logistic": Sigmoid(logistic, logistic_slope),
    "logistic_phi": Sigmoid(logistic, logistic_slope, art_scale, art_slope),
    "gaussian": Sigmoid(gaussian, gaussian_slope),
    "reciprocal": Sigmoid(reciprocal, reciprocal_slope),
    "cauchy": Sigmoid(cauchy, cauchy_slope),
    "optimal": Sigmoid(optimal, optimal_slope),
}


def _erfc(u: Any) -> Any:
    """erfc u for u >= 0 to 1.2e-7 of itself, in the tail too (Press et al., Numerical Recipes)."""
    t = 1.0 / (1.0 + 0.5 * u)
    p = ((0.17087277 * t - 0.82215223) * t + 1.48851587) * t - 1.13520398
    p = (((p * t + 0.27886807) * t - 0.18628806) * t + 0.09678418) * t + 0.37409196
    return t * exp((p * t + 1.00002368) * t - 1.26551223 - u * u)


def _arccot(u: Any) -> Any:
    """arccot u for u >= 0: the angle is halved twice, then a polynomial takes it from its tangent (Cephes, atanf)."""
    half = 1.0 / (u + where(u > 1e4, u, sqrt(1.0 + u * u)))  # the square of a distance to MASKED may overflow
    x = half / (1.0 + sqrt(1.0 + half * half))
    z = x * x
    p = ((0.0805374449538 * z - 0.138776856032) * z + 0.199777106478) * z - 0.333329491539
    return 4.0 * (p * z * x + x)


FLOAT32 = {"erfc": _erfc, "arccot": _arccot}  # for kernels, in a few lines that become vector code


def bind(formula: Callable[..., Any], names: Mapping[str, Any]) -> types.FunctionType:
    """One of the formulas above with its elementary functions taken from `names`."""
    assert isinstance(formula, types.FunctionType)
    return types.FunctionType(formula.__code__, {**formula.__globals__, **names}, formula.__name__)


def check_sigmoid(distribution: str | None, art_lambda: float | None) -> tuple[str, float | None]:
    """The names and numbers that a relaxed comparator runs with, logistic_phi with .5, as published, for None.

    art_lambda is None for the families that have none. Raises ValueError for what does not fit.
    """
    distribution = check_choice("distribution", distribution or "logistic_phi", DISTRIBUTIONS)
    if distribution == "logistic_phi":
        return distribution, check_fraction("art_lambda", 0.5 if art_lambda is None else art_lambda)
    if art_lambda is not None:
        raise ValueError(
            f"art_lambda applies to the distribution logistic_phi, not to {distribution}; leave it out, "
            f"got {art_lambda!r}"
        )
    return distribution, None


def distance_of_rounding(dtype: torch.dtype) -> float:
    """The distance of two values, relative to their size, that rounding alone may put between them."""
    return ROUNDINGS * torch.finfo(dtype).eps


def mixing(e: Tensor, distribution: str, beta: float | Tensor, art_lambda: float | None) -> Tensor:
    """The shares that values at the distances e >= 0 take over from each other, in the shape of e."""
    family, exponent = DISTRIBUTIONS[distribution], art_lambda or 0.0
    return family.mix(beta * (e * family.scale(e, exponent, ART_TIE**-exponent)))
