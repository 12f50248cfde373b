"""SinkhornSort for the true class on the CPU, compiled by Numba: the plan of one sample after the other, in the cache.

Newton's method as in transport.py, each step by conjugate gradients on the Laplacian diag(c) - P^T P, which meets P
alone: no matrix is factorised. diag(c) - diag(P^T P) is the preconditioner, 15 to 24 steps do, and 8 to 10 for the
gradient. float32 only.
"""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from topk_losses import transport
from topk_losses.kernels import register
from topk_losses.kernels.numba_support import IN_ANY_ORDER, exp, in_threads, jit

WORK_OF_A_THREAD = 100_000  # entries of plans that pay for another thread
MOST_STEPS = 100
LANES = 16  # the anchors are filled up to a multiple of these: with a mass of 0 they change nothing
_f32 = np.float32
_LEAST = _f32(1e-30)
_any_order = partial(jit, fastmath=(*IN_ANY_ORDER, "contract"))


@_any_order
def _plan(x, anchors, h, beta, P, c):
    """P (n, A) = softmax over anchors of h - C / epsilon, its sums c (A,); the largest error of a mass of 1."""
    n = len(x)
    c[:] = _f32(0)
    for i in range(n):
        row = P[i]
        highest = total = _f32(0)
        for j in range(n):
            row[j] = beta * (_f32(2) * x[i] - anchors[j]) * anchors[j] + h[j]
        highest = row[0]
        for j in range(n):
            highest = max(highest, row[j])
        for j in range(n):
            row[j] = exp(row[j] - highest)
            total += row[j]
        for j in range(n):
            row[j] *= _f32(1) / total
            c[j] += row[j]
    error = _f32(0)
    for j in range(n):
        wrong = abs(_f32(1) - c[j]) / min(c[j], _f32(1))
        error = wrong if not wrong <= error else error  # NaN stays
    return error


@_any_order
def _laplacian(P, v, out):
    """(diag(c) - P^T P) v, differences first: nothing cancels."""
    out[:] = _f32(0)
    for i in range(len(P)):
        row, mean = P[i], _f32(0)
        for j in range(len(row)):
            mean += row[j] * v[j]
        for j in range(len(row)):
            out[j] += row[j] * (v[j] - mean)


@_any_order
def _dot(a, b):
    total = _f32(0)
    for j in range(len(a)):
        total += a[j] * b[j]
    return total


@jit
def _solve(P, c, right, damping, tolerance, v, diagonal):
    """v with (diag(c) - P^T P + damping diag(c)) v = right, by conjugate gradients."""
    diagonal[:] = c * (_f32(1) + damping) + _LEAST
    for i in range(len(P)):
        diagonal -= P[i] * P[i]
    diagonal[:] = np.maximum(diagonal, _LEAST)
    v[:] = _f32(0)
    r = right.copy()
    z = r / diagonal
    p, Ap = z.copy(), np.empty_like(r)
    rz = _dot(r, z)
    enough = tolerance * tolerance * rz
    for _ in range(MOST_STEPS):
        if not rz > enough:
            break
        _laplacian(P, p, Ap)
        Ap += damping * c * p
        length = rz / max(_dot(p, Ap), _LEAST)
        v += length * p
        r -= length * Ap
        z[:] = r / diagonal
        before, rz = rz, _dot(r, z)
        p *= rz / before
        p += z


@jit
def _forward(scores, labels, beta, tolerance, max_iterations, first, last, column, errors, potentials):
    """Rows first..last of x (batch, n) to the column (batch, k), its errors (batch,) and potentials (batch, n)."""
    n = scores.shape[1]
    A = -(-n // LANES) * LANES
    P, trial = np.zeros((n, A), _f32), np.zeros((n, A), _f32)
    c, new_c, v, diagonal, right = np.zeros((5, A), _f32)
    anchors = (_f32(1) - np.arange(n) / _f32(max(n - 1, 1))).astype(_f32)
    for row in range(first, last):
        x, h = scores[row], potentials[row]
        # the hard transport's potentials: neighbours are indifferent in the middle between their scores
        ordered, total = np.sort(x)[::-1], 0.0
        for j in range(n):
            h[j] = total
            if j < n - 1:
                upper, lower = np.float64(anchors[j]), np.float64(anchors[j + 1])
                total += (lower - upper) * (lower + upper - ordered[j] - ordered[j + 1]) * beta
        error, damping = _plan(x, anchors, h, beta, P, c), _f32(0)
        for _ in range(max_iterations):
            if not error > tolerance:
                break
            right[:n] = _f32(1) - c[:n]
            _solve(P, c, right, damping, _f32(1e-2), v, diagonal)
            new = h + v[:n]
            new_error = _plan(x, anchors, new, beta, trial, new_c)
            if new_error < error:
                h[:], c[:], error, damping = new, new_c, new_error, damping / _f32(8)
                P, trial = trial, P
            else:  # shortened towards 1 / c - 1, the first order of a Sinkhorn iteration
                damping = min(max(damping * _f32(4), _f32(1e-3)), _f32(1e8))
        errors[row] = error
        column[row] = P[labels[row], : column.shape[1]]


@jit
def _backward(scores, labels, beta, potentials, grad, first, last, grad_scores):
    """Rows first..last of the gradient of the column (batch, k) to that of x (batch, n), by the KKT conditions."""
    n, k = scores.shape[1], grad.shape[1]
    A = -(-n // LANES) * LANES
    P, c, v, diagonal = np.zeros((n, A), _f32), np.empty(A, _f32), np.empty(A, _f32), np.empty(A, _f32)
    anchors = (_f32(1) - np.arange(n) / _f32(max(n - 1, 1))).astype(_f32)
    for row in range(first, last):
        _plan(scores[row], anchors, potentials[row], beta, P, c)
        mine, of_mass = P[labels[row]], np.zeros(A, _f32)
        of_mass[:k] = grad[row] * mine[:k]
        of_mass -= mine * of_mass.sum()
        _solve(P, c, of_mass, _f32(1e-6), _f32(1e-5), v, diagonal)
        for i in range(n):
            mean = _dot(P[i], v)
            total = _f32(0)
            for j in range(n):
                total -= P[i, j] * (v[j] - mean) * anchors[j]
            grad_scores[row, i] = _f32(2) * beta * total
        grad_scores[row, labels[row]] += _f32(2) * beta * _dot(of_mass[:n], anchors)


def _outputs(x, labels, beta, k, *_):
    """The column (batch, k), its errors (batch,), the potentials (batch, n)."""
    return [x.new_empty(len(x), k), x.new_empty(len(x)), x.new_empty(x.shape)]


def _sinkhorn(x: Tensor, labels: Tensor, beta: Tensor, k: int, tolerance: float, max_iterations: int) -> list[Tensor]:
    """P[1..k, y], (batch, k), of n sorted anchors, for whitened scores x (batch, n) float32 in [0, 1]; its errors."""
    outputs = _outputs(x, labels, beta, k)
    inputs = (x.contiguous().numpy(), labels.contiguous().numpy(), _f32(beta), _f32(tolerance), max_iterations)
    arrays = [each.numpy() for each in outputs]
    work = x.numel() * x.shape[1]
    in_threads(work, WORK_OF_A_THREAD, len(x), lambda first, last: _forward(*inputs, first, last, *arrays))
    return outputs


def _sinkhorn_backward(grads, x, labels, beta, k, tolerance, max_iterations, outputs):
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    inputs = (x.contiguous().numpy(), labels.contiguous().numpy(), _f32(beta), outputs[2].numpy())
    arrays, work = (grads[0].contiguous().numpy(), grad_x.numpy()), x.numel() * x.shape[1]
    in_threads(work, WORK_OF_A_THREAD, len(x), lambda i, j: _backward(*inputs, arrays[0], i, j, arrays[1]))
    return grad_x


register("sinkhorn_cpu", _sinkhorn, _outputs, _sinkhorn_backward, transport.sinkhorn)
