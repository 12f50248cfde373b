"""SinkhornSort for the true class on CUDA, by Triton: a sample's plan in registers, n <= 128.

Newton's method as in transport.py, each step by conjugate gradients on the Laplacian diag(c) - P^T P, which meets P and
P^T alone: no matrix is factorised, and nothing waits for the host. The backward pass makes P again from the potentials,
and solves once more. It has not run on a GPU yet: the interpreter and the compiler have seen it.
"""

import torch
import triton
import triton.language as tl

from topk_losses import transport
from topk_losses.kernels import register

MOST_STEPS = tl.constexpr(100)
LEAST = tl.constexpr(1e-30)


@triton.jit
def _plan(x, y, h, live, beta):
    """P (n, A), rows sum to 1 over the anchors y; zeros in rows beyond n."""
    z = tl.where(y > -1, beta * (2 * x * y - y * y) + h[None, :], float("-inf"))
    e = tl.exp(z - tl.max(z, 1)[:, None])
    return tl.where(live, e / tl.sum(e, 1)[:, None], 0.0)


@triton.jit
def _masses(P, on):
    """The masses of the anchors, and the largest relative error of one."""
    c = tl.where(on, tl.sum(P, 0), 1.0)
    return c, tl.max(tl.abs(1 - c) / tl.minimum(c, 1.0), 0)


@triton.jit
def _solve(P, c, right, damping, tolerance):
    """v with (diag(c) - P^T P + damping diag(c)) v = right."""
    diagonal = c - tl.sum(P * P, 0) + damping * c + LEAST
    v, r = right * 0, right
    z = r / diagonal
    p, rz = z, tl.sum(r * z, 0)
    enough, step = tolerance * tolerance * rz, 0
    while (rz > enough) & (step < MOST_STEPS):
        Pp = tl.sum(P * p[None, :], 1)
        Ap = tl.sum(P * (p[None, :] - Pp[:, None]), 0) + damping * c * p  # differences first: nothing cancels
        length = rz / tl.maximum(tl.sum(p * Ap, 0), LEAST)
        v, r = v + length * p, r - length * Ap
        z = r / diagonal
        new = tl.sum(r * z, 0)
        p, rz = z + new / rz * p, new
        step += 1
    return v


@triton.jit
def _sample(scores, labels, n, BLOCK: tl.constexpr):
    """The row, lanes, those in use, scores and anchors, the latter -2 beyond n, and which lane is the true class's."""
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    on = lane < n
    y = tl.where(on, 1 - lane.to(tl.float32) / tl.maximum(n - 1, 1), -2.0)
    return row, lane, on, tl.load(scores + row * n + lane, on, 0.0), y, lane == tl.load(labels + row)


@triton.jit
def forward_kernel(
    scores, labels, beta, column, errors, potentials, n, k, tolerance, max_iterations, BLOCK: tl.constexpr
):
    """column (rows, k): P of the true class; its errors (rows,); h (rows, n)."""
    row, lane, on, flat, anchor, mine = _sample(scores, labels, n, BLOCK)
    scale, x, y, live = tl.load(beta), flat[:, None], anchor[None, :], on[:, None]
    # the hard transport's potentials, summed up: neighbours are indifferent in the middle between their scores
    ordered = tl.sort(tl.where(on, flat, -1.0), descending=True)
    total = 2 * tl.cumsum(tl.where(on, ordered, 0.0), 0) - ordered - tl.max(ordered, 0)
    h = tl.where(on, scale * (anchor * anchor - 1 + total / tl.maximum(n - 1, 1)), 0.0)
    P = _plan(x, y, h, live, scale)
    c, error = _masses(P, on)
    damping, step = error * 0, 0
    while (error > tolerance) & (step < max_iterations):
        new = h + tl.where(on, _solve(P, c, 1 - c, damping, 1e-2), 0.0)
        P = _plan(x, y, new, live, scale)
        new_c, new_error = _masses(P, on)
        better = new_error < error
        h, c, error = tl.where(better, new, h), tl.where(better, new_c, c), tl.where(better, new_error, error)
        damping = tl.where(better, damping / 8, tl.minimum(tl.maximum(damping * 4, 1e-3), 1e8))
        if better == 0:
            P = _plan(x, y, h, live, scale)
        step += 1
    tl.store(column + row * k + lane, tl.sum(tl.where(mine[:, None], P, 0.0), 0), lane < k)
    tl.store(potentials + row * n + lane, h, on)
    tl.store(errors + row, error)


@triton.jit
def backward_kernel(scores, labels, beta, potentials, grad, grad_scores, n, k, BLOCK: tl.constexpr):
    """The gradient of the column (rows, k) to that of the scores (rows, n), by the KKT conditions."""
    row, lane, on, flat, anchor, mine = _sample(scores, labels, n, BLOCK)
    scale, y = tl.load(beta), anchor[None, :]
    P = _plan(flat[:, None], y, tl.load(potentials + row * n + lane, on, 0.0), on[:, None], scale)
    own = tl.sum(tl.where(mine[:, None], P, 0.0), 0)
    weighted = tl.load(grad + row * k + lane, lane < k, 0.0) * own
    of_mass = weighted - own * tl.sum(weighted, 0)
    size = tl.maximum(tl.max(tl.abs(of_mass), 0), LEAST)  # squares of a small gradient would not be numbers
    right = tl.where(tl.abs(of_mass) > 1e-18 * size, of_mass / size, 0.0)
    v = _solve(P, tl.where(on, tl.sum(P, 0), 1.0), right, 1e-6, 1e-5)
    Pv = tl.sum(P * v[None, :], 1)
    of_x = -size * tl.sum(P * (v[None, :] - Pv[:, None]) * y, 1)
    of_own = tl.sum(tl.where(on, of_mass * anchor, 0.0), 0)
    tl.store(grad_scores + row * n + lane, 2 * scale * (of_x + tl.where(mine, of_own, 0.0)), on)


def _shape(n):
    block = max(16, triton.next_power_of_2(n))
    return {"BLOCK": block, "num_warps": 8 if block > 64 else 4}


def _sinkhorn(made, x, labels, beta, k, tolerance, max_iterations):
    """As cpu_sinkhorn: P[1..k, y], (batch, k), of whitened scores x (batch, n) float32 in [0, 1]; its errors."""
    if len(x):
        numbers = x.shape[1], k, tolerance, max_iterations
        with torch.cuda.device_of(x):
            forward_kernel[(len(x),)](x.contiguous(), labels, beta, *made, *numbers, **_shape(x.shape[1]))


def _sinkhorn_backward(grad_x, grads, made, x, labels, beta, k, *_):
    if len(x):
        tensors = x.contiguous(), labels, beta, made[2], grads[0].contiguous(), grad_x
        with torch.cuda.device_of(x):
            backward_kernel[(len(x),)](*tensors, x.shape[1], k, **_shape(x.shape[1]))


register("sinkhorn", "cuda", transport.outputs_of_kernel, _sinkhorn, _sinkhorn_backward, transport.sinkhorn)
