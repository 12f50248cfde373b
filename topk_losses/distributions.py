"""The six sigmoid families that relax a comparator (Petersen et al. 2022; diffsort, difftopk 0.2.0).

Each family gives alpha(d) in [0, 1], the probability that of two values with the difference d the first is the larger,
and the slope d alpha / d d, which the hand-written backward pass needs. alpha(-d) = 1 - alpha(d). All tensors have one
shape; beta is the inverse temperature.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

ART_EPSILON = 1e-10  # keeps |d|^-lambda finite at d = 0, as in difftopk
# ART's slope at d = 0 is infinite; with the epsilon of difftopk it is 1e-10^-lambda / 4 times beta, 25,000 beta for the
# published .5, and one such gradient undoes many steps of Adam. In bf16 some of 100 scores are always equal; equal
# scores get the mean slope over |d| <= ART_TIE instead, about the resolution of bf16 at 1.
ART_TIE = 1e-3


class Distribution(NamedTuple):
    """A sigmoid family: alpha(d, beta, art_lambda) and slope(d, alpha, beta, art_lambda)."""

    alpha: Callable[[Tensor, float, float], Tensor]
    slope: Callable[[Tensor, Tensor, float, float], Tensor]


def _logistic(d: Tensor, beta: float, art_lambda: float) -> Tensor:
    return torch.sigmoid(beta * d)


def _logistic_slope(d: Tensor, alpha: Tensor, beta: float, art_lambda: float) -> Tensor:
    return beta * (alpha - alpha * alpha)


def _logistic_phi(d: Tensor, beta: float, art_lambda: float) -> Tensor:
    """ART, the activation replacement trick: the argument is beta d / (|d| + 1e-10)^lambda."""
    return torch.sigmoid(beta * d * d.abs().add_(ART_EPSILON).pow(-art_lambda))


def _logistic_phi_slope(d: Tensor, alpha: Tensor, beta: float, art_lambda: float) -> Tensor:
    size = d.abs().add_(ART_EPSILON)
    # d/dd [d size^-lambda] = size^-lambda (1 - lambda |d| / size), with |d| = size - epsilon
    inner = size.pow(-art_lambda).mul_((art_lambda * ART_EPSILON / size).add_(1 - art_lambda))
    inner.masked_fill_(d == 0, ART_TIE**-art_lambda)
    return inner.mul_(alpha - alpha * alpha).mul_(beta)


def _gaussian(d: Tensor, beta: float, art_lambda: float) -> Tensor:
    return torch.special.ndtr(beta * d)


def _gaussian_slope(d: Tensor, alpha: Tensor, beta: float, art_lambda: float) -> Tensor:
    return beta / math.sqrt(2 * math.pi) * torch.exp(-0.5 * (beta * d).square())


def _reciprocal(d: Tensor, beta: float, art_lambda: float) -> Tensor:
    v = beta * d
    return 0.5 * (v / (2 + v.abs()) + 1)


def _reciprocal_slope(d: Tensor, alpha: Tensor, beta: float, art_lambda: float) -> Tensor:
    return beta / (2 + (beta * d).abs()).square()


def _cauchy(d: Tensor, beta: float, art_lambda: float) -> Tensor:
    return torch.atan(beta * d) / math.pi + 0.5


def _cauchy_slope(d: Tensor, alpha: Tensor, beta: float, art_lambda: float) -> Tensor:
    return beta / (math.pi * (1 + (beta * d).square()))


def _optimal(d: Tensor, beta: float, art_lambda: float) -> Tensor:
    """Piecewise: v + 1/2 for |v| <= 1/4, 1 - 1/(16 v) above, -1/(16 v) below (Petersen et al. 2022b)."""
    v = beta * d
    tail = 1 / (16 * v.abs().clamp(min=0.25))  # in (0, 1/4]
    return torch.where(v.abs() <= 0.25, v + 0.5, torch.where(v > 0, 1 - tail, tail))


def _optimal_slope(d: Tensor, alpha: Tensor, beta: float, art_lambda: float) -> Tensor:
    return beta / (16 * (beta * d).abs().clamp(min=0.25).square())


DISTRIBUTIONS: dict[str, Distribution] = {
    "logistic": Distribution(_logistic, _logistic_slope),
    "logistic_phi": Distribution(_logistic_phi, _logistic_phi_slope),
    "gaussian": Distribution(_gaussian, _gaussian_slope),
    "reciprocal": Distribution(_reciprocal, _reciprocal_slope),
    "cauchy": Distribution(_cauchy, _cauchy_slope),
    "optimal": Distribution(_optimal, _optimal_slope),
}
