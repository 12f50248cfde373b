"""Triton kernels of NeuralSort and SoftSort for the true class, and of the top-m selection: a program per sample.

A row of up to backend.LONGEST_ROW scores is held in registers. The few largest of it are taken off one by one, each
the maximum of what is left: for the ranks of P_K and the m of the published runs that is no more work than a bitonic
network's (tl.topk), and compiles to a single reduction. NeuralSort needs all of the order: there torch.sort stays,
which a sort in Triton would hardly beat, and one kernel each way does the rest.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from topk_losses.operator import refuse_double_backward

_TAKEN = tl.constexpr(-(2**63))  # below the key of every score


@triton.jit
def _keys(scores, index):
    """int64 keys in the order of float32 scores, NaN on top, equal ones by falling index; -0 equals 0."""
    # what is not a number may carry any sign, and would go to the bottom with one of them
    bits = tl.where(scores == scores, scores + 0.0, float("nan")).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _score_of(key):
    ordered = (key >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def _index_of(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@triton.jit
def _neuralsort_row(ordered, order, labels, row, n, beta, N: tl.constexpr):
    """The two sums D and E (N,) of neuralsort.py over a row in falling order, and the true class's place in it.

    Places count from 0; n for a class that does not exist. D_r telescopes to s_(0) - s_(r); E stays a sum of
    non-negative terms.
    """
    place = tl.arange(0, N)
    on = place < n
    scores = tl.load(ordered + row * n + place, on, 0.0)
    before = tl.load(ordered + row * n + place - 1, on & (place > 0), 0.0)
    gaps = tl.where(on & (place > 0), (before - scores) * beta, 0.0)
    D = (tl.load(ordered + row * n) - scores) * beta
    E = tl.cumsum(gaps * place, 0)
    is_true = on & (tl.load(order + row * n + place, on, -1) == tl.load(labels + row))
    return D, E, tl.min(tl.where(is_true, place, n), 0)


@triton.jit
def neuralsort_forward(ordered, order, labels, column, normalisers, n, k, beta, N: tl.constexpr):
    """Scores in falling order and their classes (batch, n) -> column (batch, k), logarithms of the softmax sums."""
    row = tl.program_id(0).to(tl.int64)
    D, E, true_place = _neuralsort_row(ordered, order, labels, row, n, beta, N)
    place = tl.arange(0, N)
    for i in range(k):
        z = tl.where(place < n, (2 * i + 1) * D - 2.0 * E, float("-inf"))
        largest = tl.max(z, 0)
        normaliser = largest + tl.log(tl.sum(tl.exp(z - largest), 0))
        true = tl.where(true_place < n, tl.sum(tl.where(place == true_place, z, 0.0), 0), float("nan"))
        tl.store(normalisers + row * k + i, normaliser)
        tl.store(column + row * k + i, tl.exp(true - normaliser))


@triton.jit
def neuralsort_backward(
    grad_column, ordered, order, labels, column, normalisers, grad_scores, n, k, beta, N: tl.constexpr
):
    """grad_column (batch, k) -> grad_scores (batch, n), by class."""
    row = tl.program_id(0).to(tl.int64)
    D, E, true_place = _neuralsort_row(ordered, order, labels, row, n, beta, N)
    place = tl.arange(0, N)
    on = place < n
    g_D = tl.zeros((N,), tl.float32)
    g_E = tl.zeros((N,), tl.float32)
    for i in range(k):
        z = (2 * i + 1) * D - 2.0 * E
        p = tl.where(on, tl.exp(z - tl.load(normalisers + row * k + i)), 0.0)
        g_true = tl.load(grad_column + row * k + i) * tl.load(column + row * k + i)
        g_z = g_true * (tl.where(place == true_place, 1.0, 0.0) - p)
        g_D += (2 * i + 1) * g_z
        g_E -= 2.0 * g_z
    # E_r sums the gaps before r, each by its place; a score ends one gap and begins the next
    later = tl.cumsum(g_E, 0, reverse=True) - g_E
    classes = tl.load(order + row * n + place, on, 0)
    tl.store(grad_scores + row * n + classes, (later - g_D - place * g_E) * beta, on)


@triton.jit
def softsort_forward(scores, labels, column, largest, indices, below, n, k, beta, N: tl.constexpr, K: tl.constexpr):
    """scores (batch, n) -> column, the k largest scores and their indices (batch, k), and softsort.py's sum (batch,).

    below sums exp((s_j - s_[k]) / tau) over the scores that are not among the k largest.
    """
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, N)
    x = tl.load(scores + row * n + j, j < n, 0.0)
    keys = tl.where(j < n, _keys(x, j), _TAKEN)
    rank = tl.arange(0, K)
    best = tl.full((K,), _TAKEN, tl.int64)
    for i in range(k):
        key = tl.max(keys, 0)
        best = tl.where(rank == i, key, best)
        keys = tl.where(keys == key, _TAKEN, keys)
    on = rank < k
    top = tl.where(on, _score_of(best), 0.0)
    kth = tl.sum(tl.where(rank == k - 1, top, 0.0), 0)
    top = tl.where(on, top, kth)  # no overflow, and no 0 * inf, where there is no rank
    rest = tl.sum(tl.where(keys != _TAKEN, tl.exp((x - kth) * beta), 0.0), 0)

    label = tl.load(labels + row)
    true = tl.load(scores + row * n + label, (label >= 0) & (label < n), float("nan"))
    apart = tl.exp(tl.abs(top[:, None] - top[None, :]) * -beta)
    total = tl.sum(tl.where(on[None, :], apart, 0.0), 1) + tl.exp((kth - top) * beta) * rest
    tl.store(column + row * k + rank, tl.exp(tl.abs(top - true) * -beta) / total, on)
    tl.store(largest + row * k + rank, top, on)
    tl.store(indices + row * k + rank, _index_of(best), on)
    tl.store(below + row, rest)


@triton.jit
def softsort_backward(
    grad_column,
    scores,
    labels,
    column,
    largest,
    indices,
    below,
    grad_scores,
    n,
    k,
    beta,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """grad_column (batch, k) -> grad_scores (batch, n); at ties the derivatives of the torch path."""
    row = tl.program_id(0).to(tl.int64)
    rank = tl.arange(0, K)
    on = rank < k
    kth = tl.load(largest + row * k + k - 1)
    top = tl.load(largest + row * k + rank, on, kth)
    rest = tl.load(below + row)
    label = tl.load(labels + row)
    true = tl.load(scores + row * n + label, (label >= 0) & (label < n), float("nan"))

    between = top[:, None] - top[None, :]
    apart = tl.where(on[:, None] & on[None, :], tl.exp(tl.abs(between) * -beta), 0.0)
    reach = tl.exp((kth - top) * beta)  # (K,)
    total = tl.sum(apart, 1) + reach * rest
    h = tl.load(grad_column + row * k + rank, on, 0.0) * tl.load(column + row * k + rank, on, 0.0)
    u = tl.where(on, h / total, 0.0)
    toward = h * _sign(top - true)
    pairs = (u[:, None] + u[None, :]) * apart * _sign(between)
    g_rest = -tl.sum(u * reach, 0)
    # the torch path clamps at s_[k], with the derivative from below for the scores that equal it
    tied = tl.sum(tl.where(on & (top == kth), 1.0, 0.0), 0)
    g_top = tl.sum(pairs, 1) - toward + u * reach * rest - tl.where(rank == k - 1, g_rest * tied, 0.0)

    j = tl.arange(0, N)
    x = tl.load(scores + row * n + j, j < n, 0.0)
    gradient = tl.where(x <= kth, g_rest * tl.exp((x - kth) * beta), 0.0)
    gradient += tl.where(j == label, tl.sum(toward, 0), 0.0)
    tl.store(grad_scores + row * n + j, gradient * beta, j < n)
    tl.debug_barrier()
    # one addition to each of k different places, so that the order does not matter
    tl.atomic_add(grad_scores + row * n + tl.load(indices + row * k + rank, on, 0), g_top * beta, on, sem="relaxed")


@triton.jit
def top_m_forward(logits, labels, scores, indices, n, m, N: tl.constexpr):
    """logits (batch, n) -> the true class's and the m - 1 largest others, and their indices: (batch, m) each."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, N)
    x = tl.load(logits + row * n + j, j < n, 0.0).to(tl.float32)
    label = tl.load(labels + row)
    exists = (label >= 0) & (label < n)
    tl.store(scores + row * m, tl.load(logits + row * n + label, exists, float("nan")).to(tl.float32))
    tl.store(indices + row * m, tl.where(exists, label, 0))
    keys = tl.where((j < n) & (j != label), _keys(x, j), _TAKEN)
    for i in range(1, m):
        key = tl.max(keys, 0)
        keys = tl.where(keys == key, _TAKEN, keys)
        tl.store(scores + row * m + i, _score_of(key))
        tl.store(indices + row * m + i, _index_of(key))


def launch_shape(n: int, k: int | None = None) -> tuple[dict[str, int], dict[str, int]]:
    """The sizes that are compiled in, and the launch's options.

    8 scores per thread, up to 16 warps. With k, for SoftSort: 32 pairs of the k largest per thread, at most.
    """
    sizes = {"N": triton.next_power_of_2(n)}
    warps = sizes["N"] // 256
    if k is not None:
        sizes["K"] = triton.next_power_of_2(k)
        warps = max(warps, sizes["K"] ** 2 // 1024)
    return sizes, {"num_warps": min(max(warps, 1), 16), "num_stages": 1, "enable_fp_fusion": True}


class _NeuralSort(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, labels: Tensor, k: int, beta: float) -> Tensor:
        batch, n = scores.shape
        ordered, order = scores.sort(dim=1, descending=True)
        column, normalisers = scores.new_empty((batch, k)), scores.new_empty((batch, k))
        sizes, options = launch_shape(n)
        with torch.cuda.device_of(scores):
            neuralsort_forward[(batch,)](ordered, order, labels, column, normalisers, n, k, beta, **sizes, **options)
        ctx.save_for_backward(ordered, order, labels, column, normalisers)
        ctx.beta = beta
        return column

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ordered, _, _, column, _ = ctx.saved_tensors
        batch, n = ordered.shape
        grad_scores = torch.empty_like(ordered)
        sizes, options = launch_shape(n)
        arguments = (*ctx.saved_tensors, grad_scores, n, column.shape[1], ctx.beta)
        with torch.cuda.device_of(grad):
            neuralsort_backward[(batch,)](grad.contiguous(), *arguments, **sizes, **options)
        return refuse_double_backward(grad_scores, grad, column), None, None, None


class _SoftSort(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, labels: Tensor, k: int, beta: float) -> Tensor:
        batch, n = scores.shape
        column, largest = scores.new_empty((batch, k)), scores.new_empty((batch, k))
        indices = scores.new_empty((batch, k), dtype=torch.int32)
        saved = (scores, labels, column, largest, indices, scores.new_empty(batch))
        sizes, options = launch_shape(n, k)
        with torch.cuda.device_of(scores):
            softsort_forward[(batch,)](*saved, n, k, beta, **sizes, **options)
        ctx.save_for_backward(*saved)
        ctx.beta = beta
        return column

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scores, _, column, *_ = ctx.saved_tensors
        (batch, n), k = scores.shape, column.shape[1]
        grad_scores = torch.empty_like(scores)
        sizes, options = launch_shape(n, k)
        arguments = (*ctx.saved_tensors, grad_scores, n, k, ctx.beta)
        with torch.cuda.device_of(grad):
            softsort_backward[(batch,)](grad.contiguous(), *arguments, **sizes, **options)
        return refuse_double_backward(grad_scores, grad, column), None, None, None


class _TopM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, m: int) -> tuple[Tensor, Tensor]:
        batch, n = logits.shape
        scores = logits.new_empty((batch, m), dtype=torch.float32)
        indices = labels.new_empty((batch, m))
        sizes, options = launch_shape(n)
        with torch.cuda.device_of(logits):
            top_m_forward[(batch,)](logits, labels, scores, indices, n, m, **sizes, **options)
        ctx.save_for_backward(indices)
        ctx.mark_non_differentiable(indices)
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        return scores, indices

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor, None, None]:
        # zeros and m numbers per sample: PyTorch's two operations leave a kernel nothing to save
        (indices,) = ctx.saved_tensors
        zeros = grad.new_zeros(ctx.shape, dtype=ctx.dtype)
        return zeros.scatter(1, indices, grad.to(ctx.dtype)), None, None


def neuralsort_column(scores: Tensor, labels: Tensor, k: int, beta: float) -> Tensor:
    """NeuralSort's P[1..k, y], (batch, k), of float32 scores (batch, n <= LONGEST_ROW) and int64 labels (batch,)."""
    return _NeuralSort.apply(scores.contiguous(), labels.contiguous(), k, beta)


def softsort_column(scores: Tensor, labels: Tensor, k: int, beta: float) -> Tensor:
    """SoftSort's P[1..k, y] for p = 1, (batch, k <= MOST_TAKEN); otherwise as neuralsort_column."""
    return _SoftSort.apply(scores.contiguous(), labels.contiguous(), k, beta)


def top_m(logits: Tensor, labels: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """The true class and the m - 1 largest other scores, falling: float32 (batch, m), and their indices int64.

    logits (batch, n <= LONGEST_ROW) float16, bfloat16 or float32, labels (batch,) int64, m <= MOST_TAKEN. Among equal
    scores the lower index comes first. Labels outside [0, n) give NaN.
    """
    return _TopM.apply(logits.contiguous(), labels.contiguous(), m)
