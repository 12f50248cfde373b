"""The six sigmoid families that relax a comparator (Petersen et al. 2022; diffsort, difftopk 0.2.0).

A relaxed comparator puts two values in order and then mixes them: of values at a distance e >= 0 each takes over the
share sigmoid(-u) of the other, in (0, 1/2], with u = beta e, beta the inverse temperature. Written for u >= 0, nothing
cancels however far apart the values lie. PyTorch differentiates these formulas; the kernels have their own slopes.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from topk_losses.checks import check_choice, check_fraction

# ART's slope at e = 0 is infinite; with the epsilon of difftopk, 1e-10, it is 1e-10^-lambda / 4 times beta, 25,000
# beta for the published 0.5, and one such gradient undoes many steps of Adam. In bf16 some of 100 scores are always
# equal. Equal values get the mean slope over e <= ART_TIE instead, about the resolution of bf16 at 1.
ART_TIE = 1e-3
DEFAULT_ART_LAMBDA = 0.5  # as published
ROUNDINGS = 8  # values that lie no further apart than this many of their roundings count as equal


def _logistic(u: Tensor) -> Tensor:
    e = torch.exp(-u)
    return e / (1 + e)


def _gaussian(u: Tensor) -> Tensor:
    return torch.erfc(u * 0.5**0.5) / 2


def _reciprocal(u: Tensor) -> Tensor:
    return 1 / (2 + u)


def _cauchy(u: Tensor) -> Tensor:
    """The angle in (0, pi / 2] whose cotangent is u, over pi."""
    return torch.atan2(torch.ones_like(u), u) / torch.pi


def _optimal(u: Tensor) -> Tensor:
    """1/2 - u up to u = 1/4, 1/(16 u) beyond (Petersen et al. 2022b)."""
    return torch.where(u <= 0.25, 0.5 - u, 0.0625 / u.clamp(min=0.25))


DISTRIBUTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "logistic": _logistic,
    "logistic_phi": _logistic,
    "gaussian": _gaussian,
    "reciprocal": _reciprocal,
    "cauchy": _cauchy,
    "optimal": _optimal,
}


def check_sigmoid(distribution: str | None, art_lambda: float | None) -> tuple[str, float | None]:
    """Check a sigmoid family and fill in the published default, logistic_phi with an art_lambda of 0.5.

    Args:
        distribution: one of DISTRIBUTIONS, or None for the default.
        art_lambda: the exponent of ART in [0, 1), for logistic_phi alone, or None for the default.

    Returns:
        The family, and art_lambda, None for the families that have none.

    Raises:
        ValueError: an unknown family, or an art_lambda that does not fit.
    """
    distribution = check_choice("distribution", distribution or "logistic_phi", DISTRIBUTIONS)
    if distribution == "logistic_phi":
        if art_lambda is None:
            art_lambda = DEFAULT_ART_LAMBDA
        return distribution, check_fraction("art_lambda", art_lambda)
    if art_lambda is not None:
        raise ValueError(
            f"art_lambda applies to the distribution logistic_phi, not to {distribution}; leave it out, "
            f"got {art_lambda!r}"
        )
    return distribution, None


def distance_of_rounding(dtype: torch.dtype) -> float:
    """The distance that rounding alone may put between two values, relative to their size."""
    return ROUNDINGS * torch.finfo(dtype).eps


def mixing(e: Tensor, distribution: str, beta: float | Tensor, art_lambda: float | None) -> Tensor:
    """The shares that values at a distance take over from each other.

    Args:
        e: distances, at least 0, of any shape.
        distribution: one of DISTRIBUTIONS.
        beta: inverse temperature.
        art_lambda: the exponent of ART, the activation replacement trick: u is beta e / (e + 1e-10)^art_lambda.

    Returns:
        The shares, in (0, 1/2], of the shape of e.
    """
    if art_lambda:
        e = e * torch.where(e == 0, ART_TIE**-art_lambda, (e + 1e-10) ** -art_lambda)
    return DISTRIBUTIONS[distribution](beta * e)
