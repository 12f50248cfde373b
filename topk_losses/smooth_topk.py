"""The smooth top-k SVM losses of Berrada, Zisserman and Kumar (2018), without their log-space polynomials.

Source: "Smooth Loss Functions for Deep Top-k Classification", ICLR 2018. With o the scores of the n - 1 other
classes, e_j the elementary symmetric polynomials of exp(o / (k tau)) and s_y the true class's score,

    L = tau log(exp(alpha / tau) e_k + e_{k-1} exp(s_y / (k tau))) - tau log(e_{k-1} exp(s_y / (k tau)))
      = tau softplus((alpha + (kth - s_y) / k) / tau),    kth = k tau (log e_k - log e_{k-1}).

`kth` is a smooth k-th largest score of the other classes: as tau -> 0 it tends to the k-th largest, and L to the
hard top-k hinge relu(alpha + (o_[k] - s_y) / k). So one number per sample is all that the loss needs.

**How kth is computed.** For any shift lambda let x_i = exp(o_i / (k tau) - lambda), p_i = x_i / (1 + x_i), and N the
number of successes in independent trials of probabilities p_i. Then P(N = j) = e_j(x) prod_i (1 - p_i), hence

    e_k / e_{k-1} = exp(lambda) P(N = k) / P(N = k - 1)    for every lambda.

With lambda such that N is k or k - 1 about as often as anything else, both are comfortable float32 numbers however
far apart the scores lie: what underflows on the way is a probability too small to be seen in the sum. The
distribution of N comes from a binary tree (each node the counts of its scores, cut off at k, each merge a
convolution of non-negative numbers), so nothing is ever cancelled and no logarithm is taken inside the tree:
O(n k) time, O(n) memory.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from topk_losses.checks import check_choice, check_k, check_logits, check_logits_and_labels, check_positive
from topk_losses.operator import refuse_double_backward, to_compute_dtype

# SmoothHardTopKLoss turns hard where exp((s_[k] - s_[k+1]) / (k tau)) reaches this ("thresh" of the official code).
HARD_RATIO = 1000.0


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
    top = scores.detach().topk(k).values  # (batch, k), descending
    return top[:, -1] + _Excess.apply(scores, top, temperature)


class SmoothTopKLoss(nn.Module):
    """The smooth top-k SVM loss, a drop-in for torch.nn.CrossEntropyLoss(reduction=..., ignore_index=...).

    Source: Berrada, Zisserman, Kumar 2018; the formula is at the top of this file. It is positive, and fades
    out over a width of k * tau where the true class's score passes the k-th largest of the others by k * alpha. The
    authors advise to cross-validate tau over powers of ten.

    Args:
        k: the number of guesses, 1 <= k < number of classes.
        tau: temperature, above 0; the smaller, the closer to the hard hinge. The paper's tau, *not* an inverse
            temperature as elsewhere in this library.
        alpha: margin in units of the logits, above 0.
        num_classes: if given, logits must have that many columns.
        reduction: "mean" (over the samples that are not ignored), "sum" or "none".
        ignore_index: samples of this label have loss and gradient 0.

    Shapes: logits (batch, n) floating point, labels (batch,) int64; returns () or, with "none", (batch,) in the
    dtype of the logits, but float32 for half precisions (and so under autocast).

    Values at the border: a sample with a logit of NaN or +inf has loss NaN and leaves the others alone. A logit of
    -inf is a class that cannot be chosen, which is the limit of ever lower scores: loss 0 if fewer than k other
    classes remain, +inf if the true class is the masked one, NaN if both (there is no limit).

    Raises:
        TypeError, ValueError: at construction for a wrong k, tau, alpha or reduction; at the call for wrong shapes
        or dtypes, k >= n, and (on the CPU) labels outside [0, n).
    """

    def __init__(
        self,
        k: int,
        tau: float = 1.0,
        alpha: float = 1.0,
        num_classes: int | None = None,
        reduction: str = "mean",
        ignore_index: int = -100,
    ) -> None:
        super().__init__()
        self.k = check_k(k, num_classes)
        self.tau = check_positive("tau", tau)
        self.alpha = check_positive("alpha", alpha)
        self.num_classes = num_classes
        self.reduction = check_choice("reduction", reduction, ("mean", "sum", "none"))
        self.ignore_index = ignore_index

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        check_logits_and_labels(logits, labels, self.num_classes, self.ignore_index)
        check_k(self.k, logits.shape[1])
        logits = to_compute_dtype(logits)
        ignored = labels == self.ignore_index  # (batch,)
        columns = labels.masked_fill(ignored, 0).unsqueeze(1)  # (batch, 1)
        true = logits.gather(1, columns).squeeze(1)  # (batch,)
        # A score of -inf is in no subset, so the others keep their columns and nothing has to be compacted.
        others = logits.scatter(1, columns, -math.inf)  # (batch, n)
        losses = self._losses(others, true, ignored)  # (batch,)
        if self.reduction == "none":
            return losses
        return losses.sum() if self.reduction == "sum" else losses.sum() / (~ignored).sum()

    def _losses(self, others: Tensor, true: Tensor, ignored: Tensor) -> Tensor:
        top = others.detach().topk(self.k).values  # (batch, k), descending
        excess = _Excess.apply(others, top, self.k * self.tau)  # (batch,)
        return self._smooth_hinge(self._violation(top, excess, true, ignored))

    def _violation(self, top: Tensor, excess: Tensor | float, true: Tensor, ignored: Tensor) -> Tensor:
        """alpha + (kth - true) / k, (batch,): -inf (no loss, no gradient) where ignored, NaN at NaN or +inf.

        kth is top[:, k - 1] + excess; the difference of two scores comes first, so a common offset costs no digits.
        """
        largest = torch.maximum(top[:, 0], true).detach()  # (batch,), NaN where the row holds one
        true = torch.where(largest < math.inf, true, math.nan)
        above = (top[:, self.k - 1] - true) + excess  # (batch,)
        return (self.alpha + above / self.k).masked_fill(ignored, -math.inf)

    def _smooth_hinge(self, violation: Tensor) -> Tensor:
        # Above 40 tau softplus is the identity to float64 rounding; PyTorch's default of 20 would show there.
        return F.softplus(violation, beta=1 / self.tau, threshold=40)

    def extra_repr(self) -> str:
        return (
            f"k={self.k}, tau={self.tau:g}, alpha={self.alpha:g}, num_classes={self.num_classes}, "
            f"reduction={self.reduction!r}, ignore_index={self.ignore_index}"
        )


class SmoothHardTopKLoss(SmoothTopKLoss):
    """SmoothTopKLoss, but hard for samples whose k-th and (k+1)-th largest logits lie far apart.

    Where s_[k] - s_[k+1] >= k tau log(1000), the true class included in the ranking, the loss is the hard hinge

        relu(mean of the k largest of (others + alpha) - (sum of the k-1 largest of the others + s_y) / k)
        = relu(alpha + (o_[k] - s_y) / k).

    The official authors' `smooth_hard`, which they use to save time and for stability; here the smooth branch is
    stable and is evaluated for every sample, so this class exists to reproduce their numbers. The loss is not
    continuous at the switch. Arguments, shapes and errors are those of SmoothTopKLoss.
    """

    def _losses(self, others: Tensor, true: Tensor, ignored: Tensor) -> Tensor:
        top = others.topk(self.k + 1).values  # (batch, k + 1), descending; the last one may be the -inf of y
        largest = top[:, : self.k].detach()  # (batch, k)
        excess = _Excess.apply(others, largest, self.k * self.tau)  # (batch,)
        smooth = self._violation(largest, excess, true, ignored)  # (batch,)
        hard = self._violation(top, 0.0, true, ignored)  # (batch,)
        with torch.no_grad():
            # Insert the true class's score into the ranking of the others: s_[r] is the median of o_[r], s_y, o_[r-1].
            kth_of_all = torch.maximum(top[:, self.k - 1], true)  # (batch,)
            if self.k > 1:
                kth_of_all = torch.minimum(kth_of_all, top[:, self.k - 2])
            next_of_all = torch.maximum(top[:, self.k], torch.minimum(top[:, self.k - 1], true))  # (batch,)
            far_apart = kth_of_all - next_of_all >= self.k * self.tau * math.log(HARD_RATIO)  # (batch,)
        return torch.where(far_apart, F.relu(hard), self._smooth_hinge(smooth))


class _Excess(torch.autograd.Function):
    """smooth_kth_largest less the hard k-th largest: (scores (batch, n), top (batch, k), temperature) -> (batch,).

    `top` holds the k largest scores in descending order. Its last column counts as a constant: the gradient is that
    of smooth_kth_largest as a whole. Rows with fewer than k scores above -inf have value and gradient 0.
    """

    @staticmethod
    def forward(ctx, scores: Tensor, top: Tensor, temperature: float) -> Tensor:
        n, k = scores.shape[1], top.shape[1]
        enough = top[:, -1:] != -math.inf  # (batch, 1): are there k scores at all?
        shift = torch.where(enough, top[:, -1:], 0)  # (batch, 1)
        z = (scores - shift).div_(temperature)  # (batch, n), the k-th largest is 0
        tilt = torch.where(enough, _tilt((top - shift) / temperature, z), 0)  # (batch, 1)
        # The tree holds the batch in its last dimension, where halves of the nodes are contiguous.
        p = z.new_zeros(n + n % 2, z.shape[0])  # (n or n + 1, batch), success probabilities
        p[:n].copy_(z.sub_(tilt).sigmoid_().t())
        levels = [_pair(p)]  # each (counts, nodes, batch); nodes halve from level to level
        while levels[-1].shape[1] > 1:
            levels.append(_merge(levels[-1], max(k, 2)))
        P = levels[-1][:, 0]  # (counts, batch), row j: P(N = j)
        excess = temperature * (tilt[:, 0] + (P[k] / P[k - 1]).log())  # (batch,)
        excess = torch.where(enough[:, 0], excess, 0)
        ctx.save_for_backward(excess, enough[:, 0], p, *levels)
        ctx.n, ctx.k = n, k
        return excess

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        excess, enough, p, *levels = ctx.saved_tensors
        with torch.no_grad():
            k, P = ctx.k, levels[-1]  # (counts, 1, batch)
            # d log P(N = j) / d z_i, less what the normalisation of x adds, is p_i / P(N = j) times the derivative
            # with respect to leaf i's success coefficient. Both signs can share one pass: whatever multiplies them
            # on the way down is a probability, so rounding is relative to the sum of the two terms' sizes.
            g = torch.zeros_like(P)  # (counts, nodes, batch)
            g[k, 0] = grad / P[k, 0]
            g[k - 1, 0] = -grad / P[k - 1, 0]
            for nodes in reversed(levels[:-1]):
                g = _unmerge(g, nodes)
            grad_scores = _unpair(g, p)[: ctx.n]  # (n, batch)
            # Samples without a gradient (unused branch, ignored label) get zeros even if they hold NaN or inf.
            grad_scores.masked_fill_((grad == 0) | ~enough, 0)
            grad_scores = grad_scores.t().contiguous()  # (batch, n)
        return refuse_double_backward(grad_scores, grad, excess), None, None


def _tilt(top: Tensor, z: Tensor) -> Tensor:
    """Return lambda (batch, 1) for which the expected count sum_i sigmoid(z_i - lambda) is close to k - 1/2.

    Any lambda is right in exact arithmetic; this one keeps P(N = k) and P(N = k-1) away from 0. top: (batch, k), the
    largest z in descending order, the last one 0.

    The start solves sum_i min(1, exp(z_i - lambda)) = k, an upper bound of the expected count and at most twice it.
    With z in descending order the left side is min_j (j + exp(-lambda) sum_{i>j} exp(z_i)), hence
    lambda = min_{j<k} log(sum_{i>j} exp(z_i)) - log(k - j). One Newton step follows (never longer than 2), with the
    scores beyond the k largest in place of their sigmoids by exponentials.
    """
    k = top.shape[1]
    rest = (z.clamp(max=0).exp_().sum(1, keepdim=True) - k).clamp_(min=0)  # (batch, 1), beyond the k largest
    sums = torch.cat([rest.log(), top.flip(1)], 1).logcumsumexp(1)[:, 1:]  # (batch, k), column c: j = k - 1 - c
    places = torch.arange(1, k + 1, dtype=z.dtype, device=z.device)  # (k,): k - j
    start = (sums - places.log()).amin(1, keepdim=True)  # (batch, 1)
    p = torch.sigmoid(top - start)  # (batch, k)
    rest = rest * torch.exp(-start)  # (batch, 1)
    expected = p.sum(1, keepdim=True) + rest  # (batch, 1)
    variance = (p * (1 - p)).sum(1, keepdim=True) + rest  # (batch, 1)
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
