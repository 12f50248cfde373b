"""The six sigmoid families of distributions.py in Triton; FAMILY is the name, and compiled in."""

import triton
import triton.language as tl

from topk_losses.distributions import ART_EPSILON

_ART_EPSILON = tl.constexpr(ART_EPSILON)


@triton.jit
def _arctan(v):
    """arctan v within 2e-7, by two range reductions and a polynomial (Cephes, atanf); tl has none."""
    size = tl.abs(v)
    steep, middle = size > 2.414213562, size > 0.4142135624
    reduced = tl.where(steep, -1.0 / size, tl.where(middle, (size - 1.0) / (size + 1.0), size))
    base = tl.where(steep, 1.5707963268, tl.where(middle, 0.7853981634, 0.0))
    square = reduced * reduced
    series = ((0.0805374449538 * square - 0.138776856032) * square + 0.199777106478) * square - 0.333329491539
    angle = base + (series * square * reduced + reduced)
    return tl.where(v < 0, -angle, angle)


@triton.jit
def family_alpha(d, beta, art_lambda, FAMILY: tl.constexpr):
    """distributions.py's alpha(d): the probability that a comparator's lanes are out of order."""
    v = beta * d
    if FAMILY == "logistic":
        alpha = 1.0 / (1.0 + tl.exp(-v))
    elif FAMILY == "logistic_phi":
        alpha = 1.0 / (1.0 + tl.exp(-v * tl.exp(-art_lambda * tl.log(tl.abs(d) + _ART_EPSILON))))
    elif FAMILY == "gaussian":
        alpha = 0.5 + 0.5 * tl.erf(v * 0.7071067811865476)
    elif FAMILY == "reciprocal":
        alpha = 0.5 * (v / (2.0 + tl.abs(v)) + 1.0)
    elif FAMILY == "cauchy":
        alpha = _arctan(v) * 0.3183098861837907 + 0.5
    else:
        tl.static_assert(FAMILY == "optimal")
        size = tl.abs(v)
        tail = 0.0625 / tl.where(size < 0.25, 0.25, size)
        alpha = tl.where(size <= 0.25, v + 0.5, tl.where(v > 0, 1.0 - tail, tail))
    return alpha


@triton.jit
def family_slope(d, alpha, beta, art_lambda, art_tie_factor, FAMILY: tl.constexpr):
    """distributions.py's slope, d alpha / d d; art_tie_factor is ART_TIE^-art_lambda."""
    v = beta * d
    if FAMILY == "logistic":
        slope = beta * (alpha - alpha * alpha)
    elif FAMILY == "logistic_phi":
        size = tl.abs(d) + _ART_EPSILON
        inner = tl.exp(-art_lambda * tl.log(size)) * (1.0 - art_lambda + art_lambda * _ART_EPSILON / size)
        slope = beta * (alpha - alpha * alpha) * tl.where(d == 0, art_tie_factor, inner)
    elif FAMILY == "gaussian":
        slope = beta * 0.3989422804014327 * tl.exp(-0.5 * v * v)
    elif FAMILY == "reciprocal":
        reach = 2.0 + tl.abs(v)
        slope = beta / (reach * reach)
    elif FAMILY == "cauchy":
        slope = beta * 0.3183098861837907 / (1.0 + v * v)
    else:
        tl.static_assert(FAMILY == "optimal")
        size = tl.abs(v)
        size = tl.where(size < 0.25, 0.25, size)
        slope = beta * 0.0625 / (size * size)
    return slope
