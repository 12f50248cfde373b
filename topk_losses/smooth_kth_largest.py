"""The smooth k-th largest score: a ratio of elementary symmetric polynomials, without logarithms of sums.

With e_j the elementary symmetric polynomials of exp(o / temperature), the smooth k-th largest of the scores o is
temperature (log e_k - log e_{k-1}) (Berrada, Zisserman and Kumar 2018).

For any shift lambda let x_i = exp(o_i / temperature - lambda). Then e_k / e_{k-1} = exp(lambda) e_k(x) / e_{k-1}(x).
The lambda chosen here makes e_k(x) and e_{k-1}(x) about as large, so that both are comfortable float32 numbers however
far apart the scores lie. They come from two parts, joined by one convolution:

The largest scores (8; for k > 5 between 3 k and 6 k; all if there are few more or k is large) by a binary tree. With
p_i = x_i / (1 + x_i) and N the number of successes in independent trials of probabilities p_i, P(N = j) = e_j(x)
prod_i (1 - p_i). Each node holds the distribution of the counts of its scores, cut off at k, each merge is a
convolution of non-negative numbers: nothing is ever cancelled, and what underflows is a probability too small to be
seen in the sum.

The rest by Newton's identities, j e_j = sum_m (-1)^(m-1) e_{j-m} S_m, from its power sums S_m = sum_i x_i^m. The x of
the rest are at most about 1/2 (for k = 5, 1), and many for their sum, so that the alternating sums lose little: about
exp(k / 8) in the worst case (for k = 5, exp(2)). On the CPU powers are left out that cannot change e_k by half its
rounding.

Time O(n d + k^2), d <= k the number of power sums, mostly 1 to 3; memory O(n).
"""

import math
from typing import Any

import torch
from torch import Tensor

from topk_losses.backend import use_numba
from topk_losses.checks import check_k, check_logits, check_positive
from topk_losses.operator import refuse_double_backward, to_compute_dtype
from topk_losses.top_m import largest_indices

MAX_K_WITH_REST = 32  # beyond, the alternating sums could lose more than an order of magnitude


def smooth_kth_largest(scores: Tensor, k: int, temperature: float = 1.0) -> Tensor:
    """Return temperature * (log e_k - log e_{k-1}), the smooth k-th largest of each row, in units of the scores.

    e_j is the j-th elementary symmetric polynomial of exp(scores / temperature). For k = 1 this is
    temperature * logsumexp(scores / temperature); as temperature -> 0 it tends to the k-th largest score.

    The gradient with respect to a score is the probability that it belongs to a random k-subset less the same for
    a (k-1)-subset, subsets weighted by exp(sum of their scores / temperature): non-negative, with row sums 1.

    Args:
        scores: (batch, n), floating point; half precisions are computed and returned in float32. An entry of -inf
            is absent: a row with fewer than k entries above -inf gives -inf, with gradient 0. A NaN gives NaN.
        k: from 1 to n; float32 is exact to rounding up to k = 300 at least, beyond k = 600 it may underflow.
        temperature: above 0.

    Returns:
        (batch,). Not twice differentiable.

    Raises:
        TypeError, ValueError: scores not a floating-point (batch, n), k not in [1, n], temperature not above 0.
    """
    check_logits(scores)
    check_k(k, scores.shape[1] + 1)
    check_positive("temperature", temperature)
    scores = to_compute_dtype(scores)
    return kth_largest_other(scores, None, k, temperature)[0]


def num_leaves(n: int, k: int) -> int:
    """How many of n scores enter the tree, the largest ones: n where the rest has no power sums."""
    leaves = 8 if k <= 5 else 2 ** math.ceil(math.log2(3 * k))
    return leaves if k <= MAX_K_WITH_REST and n > 2 * leaves else n


def kth_largest_other(
    scores: Tensor, columns: Tensor | None, k: int, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """KthLargestOther, below, by whichever path takes the scores."""
    if k <= MAX_K_WITH_REST and use_numba(scores):
        from topk_losses import numba_kth_largest

        leaves = num_leaves(scores.shape[1], k)
        return numba_kth_largest.kth_largest_other(scores, columns, k, temperature, leaves)
    return KthLargestOther.apply(scores, columns, k, temperature)


class KthLargestOther(torch.autograd.Function):
    """The smooth and the hard k-th largest score of the other classes, each less the true class's score.

    (scores (batch, n), columns (batch, 1) or None, k, temperature) -> smooth (batch,), hard (batch,), and the largest
    scores of the others, falling, (batch, k + 1), or (batch, n) for k = n, without a gradient. columns: the true
    classes; None: every class is another one, and what is taken off is 0. Rows with fewer than k scores above -inf have
    -inf and gradient 0.
    """

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, columns: Tensor | None, k: int, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        batch, n = scores.shape
        # A score of -inf is in no subset, so the others keep their columns and nothing has to be compacted.
        others = scores.clone() if columns is None else scores.scatter(1, columns, -math.inf)  # (batch, n)
        leaf_count = num_leaves(n, k)
        has_rest = leaf_count < n
        if has_rest:
            index = largest_indices(others, leaf_count)  # (batch, leaves)
            leaves = others.gather(1, index)
            top = leaves[:, : k + 1].clone()
        else:
            leaves = others
            top, index = leaves.topk(min(k + 1, n))
        kth = top[:, k - 1 : k]  # (batch, 1)
        enough = kth != -math.inf  # (batch, 1): are there k scores at all?
        shift = torch.where(enough, kth, 0)  # (batch, 1)
        z = (leaves - shift).div_(temperature)  # (batch, leaves), the k-th largest is 0
        beyond = (z.clamp(max=0).exp_().sum(1, keepdim=True) - k).clamp_(min=0)  # (batch, 1), beyond the k largest
        if has_rest:
            # (batch, n), 0 for leaves and true class
            rest = others.scatter_(1, index, -math.inf).sub_(shift).div_(temperature).exp_()
            rest_sum = rest.sum(1, keepdim=True)  # (batch, 1)
            beyond += rest_sum
        tilt = torch.where(enough, _tilt((top[:, :k] - shift) / temperature, beyond), 0)  # (batch, 1)
        z.sub_(tilt)
        # The tree holds the batch in its last dimension, where halves of the nodes are contiguous.
        p = z.new_zeros(leaf_count + leaf_count % 2, batch)  # success probabilities, the last one padding
        p[:leaf_count].copy_(z.sigmoid().t())
        levels = [_pair(p)]  # each (counts, nodes, batch); nodes halve from level to level
        while levels[-1].shape[1] > 1:
            levels.append(_merge(levels[-1], max(k, 2)))
        P = levels[-1][: k + 1, 0].flip(0)  # (k + 1, batch), row i: P(N = k - i)
        e_k, e_below = P[0], P[1]  # (batch,), e_k(x) and e_{k-1}(x) but for a common factor
        if has_rest:
            scale = torch.exp(-tilt)  # (batch, 1)
            # (k + 1, batch), row j: e_j(x) of the rest
            E, ctx.degree = _polynomials(rest, rest_sum, z[:, -1:].exp(), scale, k)
            e_k, e_below = (P * E).sum(0), (P[1:] * E[:-1]).sum(0)
        excess = temperature * (tilt[:, 0] + (e_k / e_below).log())  # (batch,)
        true = 0 if columns is None else scores.gather(1, columns).squeeze(1)  # (batch,)
        # The difference of two scores comes first, so that a common offset costs no digits.
        hard = kth.squeeze(1) - true  # (batch,)
        smooth = hard + torch.where(enough.squeeze(1), excess, 0)  # (batch,)
        of_rest = (rest, scale, E) if has_rest else (None, None, None)
        ctx.save_for_backward(smooth, columns, index, enough, e_k, e_below, P, *of_rest, p, *levels)
        ctx.k, ctx.n = k, n
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(top)
        return smooth, hard, top

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_hard: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        smooth, columns, index, enough, e_k, e_below, P, rest, scale, E, p, *levels = ctx.saved_tensors
        sources = [each for each in (grad, grad_hard) if each is not None]
        with torch.no_grad():
            k = ctx.k
            total = sum(sources, torch.zeros_like(smooth))  # (batch,)
            grad = torch.zeros_like(smooth) if grad is None else grad
            # d log P(N = j) / d z_i, less what the normalisation of x adds, is p_i / P(N = j) times the derivative
            # with respect to leaf i's success coefficient. Both signs can share one pass: whatever multiplies them
            # on the way down is a probability, so rounding is relative to the sum of the two terms' sizes.
            g_k, g_below = grad / e_k, -grad / e_below  # (batch,)
            g = torch.zeros_like(levels[-1])  # (counts, nodes, batch)
            if rest is None:
                g[k, 0], g[k - 1, 0] = g_k, g_below
            else:
                g[: k + 1, 0] = g_k * E.flip(0)
                g[:k, 0] += g_below * E[:-1].flip(0)
            for nodes in reversed(levels[:-1]):
                g = _unmerge(g, nodes)
            grad_leaves = _unpair(g, p)  # (leaves or one more, batch)
            # Samples without a gradient (unused branch, ignored label) get zeros even if they hold NaN or inf.
            unused = (grad == 0).unsqueeze(1) | ~enough  # (batch, 1)
            if rest is None:
                grad_scores = grad_leaves[: ctx.n].t().contiguous()  # (batch, n)
            else:
                g_E = g_k * P  # (k + 1, batch), row j: derivative with respect to e_j of the rest
                g_E[:-1] += g_below * P[1:]
                grad_scores = _slopes_of_rest(rest, scale, E, g_E, ctx.degree)  # (batch, n)
                grad_scores.scatter_(1, index, grad_leaves.t()[:, : index.shape[1]])
            grad_scores.masked_fill_(unused, 0)
            if grad_hard is not None:
                grad_scores.scatter_add_(1, index[:, k - 1 : k], grad_hard.unsqueeze(1))
            if columns is not None:
                grad_scores.scatter_(1, columns, -total.unsqueeze(1))
        return refuse_double_backward(grad_scores, *sources, smooth), None, None, None


def _polynomials(rest: Tensor, rest_sum: Tensor, largest: Tensor, scale: Tensor, k: int) -> tuple[Tensor, int]:
    """e_0..e_k of x = rest * scale, (k + 1, batch), by Newton's identities; and the number of power sums in use.

    rest_sum (batch, 1): the sum of rest. largest (batch, 1): a bound of the x. At this tilt no e_j is much larger than
    e_k, so that S_m counts for at most about S_m / m, and S_m <= largest S_{m-1}: sums that cannot change e_k by more
    than half its rounding are left out. Only the CPU tells at no cost.
    """
    enough = torch.finfo(rest.dtype).eps / 2
    may_look = rest.device.type == "cpu" and not torch.compiler.is_compiling()
    largest, scale = largest.squeeze(1), scale.squeeze(1)  # (batch,)
    factor, power = scale, rest
    sums = [rest_sum.squeeze(1) * scale]  # S_1, S_2, ... (batch,) each
    for m in range(2, k + 1):
        if may_look and not bool((sums[-1] * largest > enough * m).any()):
            break
        factor, power = factor * scale, power * rest if m == 2 else power.mul_(rest)
        sums.append(power.sum(1).mul_(factor))
    E = [torch.ones_like(scale)]
    for j in range(1, k + 1):
        e_j = E[j - 1] * sums[0]
        for m in range(2, min(j, len(sums)) + 1):
            e_j.addcmul_(E[j - m], sums[m - 1], value=1 - 2 * ((m - 1) % 2))
        E.append(e_j.div_(j).clamp_(min=0))  # what cancels below 0 is rounding
    return torch.stack(E), len(sums)


def _slopes_of_rest(rest: Tensor, scale: Tensor, E: Tensor, g_E: Tensor, degree: int) -> Tensor:
    """x_i sum_j g_E[j] d e_j / d x_i, (batch, n), with d e_j / d x_i = sum_m (-x_i)^(m-1) e_{j-m}, by Horner's rule."""
    factor = scale.squeeze(1)  # (batch,)
    coefficients = []  # of rest^m, (batch, 1) each
    for m in range(1, degree + 1):
        coefficients.append(((g_E[m:] * E[: len(E) - m]).sum(0) * factor).unsqueeze(1))
        factor = -factor * scale.squeeze(1)
    slopes = rest * coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        slopes.add_(coefficient).mul_(rest)
    return slopes


def _tilt(top: Tensor, beyond: Tensor) -> Tensor:
    """Return lambda (batch, 1) for which the expected count sum_i sigmoid(z_i - lambda) is close to k - 1/2.

    Any lambda is right in exact arithmetic; this one keeps e_k(x) and e_{k-1}(x) away from 0. top: (batch, k), the
    largest z in descending order, the last one 0. beyond: (batch, 1), the sum of exp(z) over all others.

    The start solves sum_i min(1, exp(z_i - lambda)) = k, an upper bound of the expected count and at most twice it.
    With z in descending order the left side is min_j (j + exp(-lambda) sum_{i>j} exp(z_i)), hence
    lambda = min_{j<k} log(sum_{i>j} exp(z_i)) - log(k - j). One Newton step follows (never longer than 2), with the
    scores beyond the k largest in place of their sigmoids by exponentials.
    """
    k = top.shape[1]
    sums = torch.cat([beyond.log(), top.flip(1)], 1).logcumsumexp(1)[:, 1:]  # (batch, k), column c: j = k - 1 - c
    places = torch.arange(1, k + 1, dtype=top.dtype, device=top.device)  # (k,): k - j
    start = (sums - places.log()).amin(1, keepdim=True)  # (batch, 1)
    p = torch.sigmoid(top - start)  # (batch, k)
    beyond = beyond * torch.exp(-start)  # (batch, 1)
    expected = p.sum(1, keepdim=True) + beyond  # (batch, 1)
    variance = (p * (1 - p)).sum(1, keepdim=True) + beyond  # (batch, 1)
    return start + (expected - (k - 0.5)) / variance


def _pair(p: Tensor) -> Tensor:
    """Leaves (2h, batch) to count distributions of pairs (3, nodes, batch): leaf i goes with leaf h + i."""
    half = p.shape[0] // 2
    a, b = p[:half], p[half:]  # (h, batch)
    pairs = _empty_level(p, 3, half)
    torch.mul(1 - a, 1 - b, out=pairs[0, :half])
    torch.addcmul(a * (1 - b), 1 - a, b, out=pairs[1, :half])
    torch.mul(a, b, out=pairs[2, :half])
    return pairs


def _unpair(g: Tensor, p: Tensor) -> Tensor:
    """Gradients of the pairs (3, nodes, batch) to p_i * gradient of leaf i's success coefficient (2h, batch)."""
    half = p.shape[0] // 2
    a, b = p[:half], p[half:]  # (h, batch)
    one, two = g[1, :half], g[2, :half]  # (h, batch)
    out = torch.empty_like(p)  # (2h, batch)
    torch.addcmul(one * (1 - b), two, b, out=out[:half])
    torch.addcmul(one * (1 - a), two, a, out=out[half:])
    return out.mul_(p)


def _merge(nodes: Tensor, degree: int) -> Tensor:
    """Count distributions (counts, 2h, batch) to those of node pairs, cut off above `degree`."""
    counts, half = nodes.shape[0], nodes.shape[1] // 2
    a, b = nodes[:, :half], nodes[:, half:]  # (counts, h, batch)
    merged = _empty_level(nodes, min(2 * counts - 1, degree + 1), half)
    out = merged[:, :half].zero_()  # (counts', h, batch)
    for i in range(counts):
        fits = min(counts, out.shape[0] - i)
        out[i : i + fits].addcmul_(a[i], b[:fits])
    return merged


def _unmerge(g: Tensor, nodes: Tensor) -> Tensor:
    """Gradients (counts', nodes', batch) of a merge to those of its inputs, (counts, 2h, batch)."""
    counts, half = nodes.shape[0], nodes.shape[1] // 2
    a, b = nodes[:, :half], nodes[:, half:]  # (counts, h, batch)
    g = g[:, :half]  # (counts', h, batch)
    out = torch.zeros_like(nodes)  # (counts, 2h, batch)
    for i in range(counts):
        fits = min(counts, g.shape[0] - i)
        out[:fits, :half].addcmul_(g[i : i + fits], b[i])
        out[:fits, half:].addcmul_(g[i : i + fits], a[i])
    return out


def _empty_level(like: Tensor, counts: int, nodes: int) -> Tensor:
    """An unfilled level (counts, nodes, batch); an odd one but the root gains a node that is surely 0 successes."""
    if nodes == 1 or nodes % 2 == 0:
        return like.new_empty(counts, nodes, like.shape[-1])
    level = like.new_empty(counts, nodes + 1, like.shape[-1])
    level[0, nodes] = 1
    level[1:, nodes] = 0
    return level
