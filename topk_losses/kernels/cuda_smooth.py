"""The smooth k-th largest score on CUDA, by Triton: one program per sample and k, its states in float64.

With x_i = scale exp(o_i / temperature), whatever the scale, a score is a trial with p_i = x_i / (1 + x_i): P(N = j),
with N the number of successes, is the polynomial e_j but for a common factor, however far apart the scores lie. The
scores are added one by one; the slopes of log e_k - log e_{k-1} come backward through the trials, so that the backward
pass has products and sums alone. It has not run on a GPU yet: the interpreter and the compiler have seen it.
"""

import torch
import triton
import triton.language as tl

from topk_losses import smooth_svm, threshold
from topk_losses.kernels import register
from topk_losses.operator import log_softmax, pick_ranks

# Temperatures above the k-th score, beyond which exp would overflow: in every subset for sure.
FAR = tl.constexpr(700.0)


@triton.jit
def _trial(scores, i, label, kth, temperature, scale):
    """The probabilities of success and of failure of score i; the true class, and one of -inf, has none of success."""
    o = tl.load(scores + i).to(tl.float64)
    odds = scale * tl.exp(tl.minimum((o - kth) / temperature, FAR))
    odds = tl.where((i == label) | (o == float("-inf")), 0.0, odds)
    return odds / (1 + odds), 1 / (1 + odds)


@triton.jit
def forward_kernel(
    scores, labels, kth_scores, ks, temperatures, smooth, slopes, states, n, J, BLOCK: tl.constexpr, K: tl.constexpr
):
    """To smooth and hard's k-th scores (rows, J) the smooth one, and to slopes (rows, J, n) those by the scores.

    states (rows, J, n, K), K > k: P(N = j) before each trial.
    """
    row, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    label, temperature, place = tl.load(labels + row), tl.load(temperatures).to(tl.float64), row * J + which
    k, kth = tl.load(ks + which).to(tl.int32), tl.load(kth_scores + place).to(tl.float64)
    scores, slopes, states = scores + row * n, slopes + place * n, states + place * n * K
    lane, j = tl.arange(0, BLOCK), tl.arange(0, K)
    if kth > float("-inf"):
        z = (tl.load(scores + lane, lane < n, float("-inf")).to(tl.float64) - kth) / temperature
        weight = tl.sum(tl.where((lane < n) & (lane != label), tl.exp(tl.minimum(z, 0.0)), 0.0), 0)
        scale = 1 / tl.maximum(1.0, weight / k)
        c = tl.where(j == 0, 1.0, 0.0).to(tl.float64)
        for i in range(n):
            p, q = _trial(scores, i, label, kth, temperature, scale)
            tl.store(states + i * K + j, c)
            c = c * q + tl.where(j > 0, tl.gather(c, tl.maximum(j - 1, 0), 0), 0.0) * p
        reached, before = tl.sum(tl.where(j == k, c, 0.0), 0), tl.sum(tl.where(j == k - 1, c, 0.0), 0)
        value = kth + temperature * (tl.log(reached / before) - tl.log(scale))
        tl.store(smooth + place, value - tl.load(scores + label).to(tl.float64))
        g = tl.where(j == k, 1 / reached, 0.0) - tl.where(j == k - 1, 1 / before, 0.0)
        tl.debug_barrier()
        for step in range(n):
            i = n - 1 - step
            p, q = _trial(scores, i, label, kth, temperature, scale)
            c = tl.load(states + i * K + tl.maximum(j - 1, 0), j > 0, 0.0)
            tl.store(slopes + i, p * tl.sum(g * c, 0))
            g = g * q + tl.where(j < K - 1, tl.gather(g, tl.minimum(j + 1, K - 1), 0), 0.0) * p
    else:
        tl.store(smooth + place, kth - tl.load(scores + label).to(tl.float64))
        tl.store(slopes + lane, lane * 0.0, lane < n)


def _outputs(scores, labels, ks, temperature, softmax):
    """smooth, hard, top and log_softmax; then, for the backward pass, the places of top, and slopes."""
    (batch, n), J, some = scores.shape, len(ks), min(ks[-1] + 1, scores.shape[1])
    made = [scores.new_empty(batch, *shape) for shape in ((J,), (J,), (some,), (int(softmax),))]
    return [*made, labels.new_empty(batch, some), scores.new_empty(batch, J, n)]


def _kth_largest(made, scores, labels, ks, temperature, softmax):
    """As smooth_svm.kth_largest, for scores (rows, n) float32."""
    smooth, hard, top, beside, places, slopes = made
    scores, (batch, n), J = scores.contiguous(), scores.shape, len(ks)
    values, found = scores.scatter(1, labels.unsqueeze(1), -torch.inf).topk(top.shape[1], dim=1)
    top.copy_(values)
    places.copy_(found)
    kth = pick_ranks(top, ks).contiguous()  # (rows, J)
    hard.copy_(kth - scores.gather(1, labels.unsqueeze(1)))
    if softmax:
        beside.copy_(log_softmax(scores, labels).unsqueeze(1))
    if batch and J:
        K, block = triton.next_power_of_2(ks[-1] + 1), triton.next_power_of_2(n)
        states = scores.new_empty(batch, J, n, K, dtype=torch.float64)
        inputs = scores, labels, kth, threshold.ranks_like(ks, scores), temperature
        with torch.cuda.device_of(scores):
            forward_kernel[(batch, J)](*inputs, smooth, slopes, states, n, J, BLOCK=block, K=K, num_warps=1)


def _kth_largest_backward(grad_scores, grads, made, scores, labels, ks, temperature, softmax):
    of_smooth, of_hard, of_softmax = grads[0], grads[1], grads[3]  # top has none
    _, _, top, _, places, slopes = made
    enough = pick_ranks(top, ks) > -torch.inf  # (rows, J): an unused branch may hold NaN or inf
    of_smooth, of_hard = (torch.where(enough, each, 0) for each in (of_smooth, of_hard))
    total = (of_smooth.unsqueeze(1) @ slopes).squeeze(1).scatter_add(1, pick_ranks(places, ks), of_hard)
    of_true = -(of_smooth + of_hard).sum(1, keepdim=True)
    if softmax:
        total = total - of_softmax * scores.softmax(1)
        of_true = of_true + of_softmax
    grad_scores.copy_(total.scatter_add(1, labels.unsqueeze(1), of_true))


register("kth_largest", "cuda", _outputs, _kth_largest, _kth_largest_backward, smooth_svm.kth_largest, 4)
