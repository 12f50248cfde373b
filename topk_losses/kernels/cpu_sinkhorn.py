"""SinkhornSort for the true class on the CPU, compiled by Numba: the plan of one sample after the other, in the cache.

Newton's method as in transport.py, but for one iteration of Sinkhorn's before it. Its steps are found by conjugate
gradients on the Laplacian diag(c) - P^T P, which meets P alone: no matrix is factorised. diag(c) - diag(P^T P) is the
preconditioner; some ten steps do for the plan, and as many for the gradient. float32 only.
"""

from functools import partial

import numpy as np

from topk_losses import transport
from topk_losses.kernels import register
from topk_losses.kernels.numba_support import IN_ANY_ORDER, exp, in_threads, jit, room

WORK_OF_A_THREAD = 100_000  # entries of plans that pay for another thread
MOST_STEPS = 100
LANES = 8  # the anchors are filled up to a multiple of these with some that no score reaches
ROWS = 4  # of the plan that are looked at together
# Exponents below the highest of a row that count. The products of what is lower still are no normal numbers, with which
# a processor is a hundred times as slow; the plan's column itself is wanted to the end of float32.
OF_SUMS, OF_COLUMN = np.float32(-36), np.float32(-87)
_f32 = np.float32
_LEAST, _UNREACHED = _f32(1e-30), _f32(-1e30)
_SIGN, _REST = np.int32(31), np.int32(0x7FFFFFFF)
_any_order = partial(jit, fastmath=(*IN_ANY_ORDER, "contract"))


@_any_order
def _plan(x, anchors, h, beta, lowest, P, c):
    """P (len(x), A) = softmax over anchors of h - C / epsilon, its sums c (A,); the largest error of a mass of 1."""
    c[:] = _f32(0)
    for i in range(len(x)):
        row, most = P[i], np.int32(-_REST)
        for j in range(len(c)):
            v = _f32(beta * (_f32(2) * x[i] - anchors[j]) * anchors[j] + h[j])
            row[j], bits = v, v.view(np.int32)
            bits ^= (bits >> _SIGN) & _REST  # the order of the numbers, in integers: their maximum becomes vector code
            most = bits if bits > most else most
        highest = np.int32(most ^ ((most >> _SIGN) & _REST)).view(np.float32)
        total = _f32(0)
        for j in range(len(c)):
            v = row[j] - highest
            e = exp(v)
            row[j] = _f32(0) if v < lowest else e
            total += row[j]
        for j in range(len(c)):
            row[j] *= _f32(1) / total
            c[j] += row[j]
    error = _f32(0)
    for j in range(len(x)):
        wrong = abs(_f32(1) - c[j]) / min(c[j], _f32(1))
        error = wrong if not wrong <= error else error  # NaN stays
    return error


@_any_order
def _laplacian(P, v, out):
    """(diag(c) - P^T P) v, differences first: nothing cancels."""
    out[:] = _f32(0)
    for i in range(0, len(P), ROWS):
        p, q, r, s = P[i], P[i + 1], P[i + 2], P[i + 3]
        of_p = of_q = of_r = of_s = _f32(0)
        for j in range(len(v)):
            of_p += p[j] * v[j]
            of_q += q[j] * v[j]
            of_r += r[j] * v[j]
            of_s += s[j] * v[j]
        for j in range(len(v)):
            out[j] += p[j] * (v[j] - of_p) + q[j] * (v[j] - of_q) + r[j] * (v[j] - of_r) + s[j] * (v[j] - of_s)


@_any_order
def _dot(a, b):
    total = _f32(0)
    for j in range(len(a)):
        total += a[j] * b[j]
    return total


@_any_order
def _solve(P, c, r, damping, tolerance, v):
    """v with (diag(c) - P^T P + damping diag(c)) v = r, by conjugate gradients; r becomes what is left."""
    A = len(c)
    scale, z, p, Ap = room(A), room(A), room(A), room(A)
    scale[:] = c * (_f32(1) + damping) + _LEAST
    for i in range(len(P)):
        for j in range(A):
            scale[j] -= P[i, j] * P[i, j]
    scale[:] = _f32(1) / np.maximum(scale, _LEAST)
    v[:], z[:] = _f32(0), r * scale
    p[:], rz = z, _dot(r, z)
    enough = tolerance * tolerance * rz
    for _ in range(MOST_STEPS):
        if not rz > enough:
            break
        _laplacian(P, p, Ap)
        for j in range(A):
            Ap[j] += damping * c[j] * p[j]
        length = rz / max(_dot(p, Ap), _LEAST)
        for j in range(A):
            v[j] += length * p[j]
            r[j] -= length * Ap[j]
            z[j] = r[j] * scale[j]
        before, rz = rz, _dot(r, z)
        for j in range(A):
            p[j] = z[j] + rz / before * p[j]


@jit
def _sizes(n):
    """The anchors (A,), falling from 1 to 0, and the number of rows of a plan."""
    A, N = -(-n // LANES) * LANES, -(-n // ROWS) * ROWS
    anchors = room(A)
    anchors[:n] = _f32(1) - np.arange(n) / _f32(max(n - 1, 1))
    return anchors, N


@jit
def _forward(scores, labels, beta, tolerance, max_iterations, first, last, column, errors, potentials):
    """Rows first..last of x (batch, n) to the column (batch, k), its errors (batch,) and potentials (batch, n)."""
    n = scores.shape[1]
    anchors, N = _sizes(n)
    A = len(anchors)
    one, two = np.zeros((N, A), _f32), np.zeros((N, A), _f32)
    h, new, c, new_c, v, right = room(A), room(A), room(A), room(A), room(A), room(A)
    h[n:] = _UNREACHED
    for row in range(first, last):
        x, own, P, trial = scores[row], labels[row], one, two
        # the hard transport's potentials: neighbours are indifferent in the middle between their scores
        ordered, total = np.sort(x)[::-1], 0.0
        for j in range(n):
            h[j] = total
            if j < n - 1:
                upper, lower = np.float64(anchors[j]), np.float64(anchors[j + 1])
                total += (lower - upper) * (lower + upper - ordered[j] - ordered[j + 1]) * beta
        error, damping = _plan(x, anchors, h, beta, OF_SUMS, P, c), _f32(0)
        for iteration in range(max_iterations):
            if not error > tolerance:
                break
            if iteration == 0:  # Sinkhorn's, which is cheap and takes off most of the error
                v[:n] = -np.log(c[:n])
            else:
                right[:n], right[n:] = _f32(1) - c[:n], _f32(0)
                right[:n] -= right[:n].mean()  # which is rounding, and which no step can mend
                _solve(P, c, right, damping, min(max(error, _f32(0.01)), _f32(0.1)), v)
            new[:] = h + v
            new_error = _plan(x, anchors, new, beta, OF_SUMS, trial, new_c)
            if new_error < error:
                h[:], c[:], error, damping = new, new_c, new_error, damping / _f32(8)
                P, trial = trial, P
            elif iteration > 0:  # shortened towards 1 / c - 1, the first order of a Sinkhorn iteration
                damping = min(max(damping * _f32(4), _f32(1e-3)), _f32(1e8))
        errors[row], potentials[row] = error, h[:n]
        _plan(x[own : own + 1], anchors, h, beta, OF_COLUMN, trial, c)
        column[row] = c[: column.shape[1]]


@_any_order
def _backward(scores, labels, beta, potentials, grad, first, last, grad_scores):
    """Rows first..last of the gradient of the column (batch, k) to that of x (batch, n), by the KKT conditions."""
    n, k = scores.shape[1], grad.shape[1]
    anchors, N = _sizes(n)
    A = len(anchors)
    P, h, c, mine, of_mass, right, v = np.zeros((N, A), _f32), room(A), room(A), room(A), room(A), room(A), room(A)
    h[n:] = _UNREACHED
    for row in range(first, last):
        x, own, h[:n] = scores[row], labels[row], potentials[row]
        _plan(x[own : own + 1], anchors, h, beta, OF_COLUMN, P, mine)
        _plan(x, anchors, h, beta, OF_SUMS, P, c)
        of_mass[:] = _f32(0)
        of_mass[:k] = grad[row] * mine[:k]
        of_mass -= mine * of_mass.sum()
        size = max(np.abs(of_mass).max(), _LEAST)  # squares of a small gradient would not be numbers
        for j in range(A):
            right[j] = of_mass[j] / size if abs(of_mass[j]) > _f32(1e-18) * size else _f32(0)
        _solve(P, c, right, _f32(1e-6), _f32(1e-5), v)
        for i in range(n):
            p, mean, total = P[i], _dot(P[i], v), _f32(0)
            for j in range(A):
                total += p[j] * (v[j] - mean) * anchors[j]
            grad_scores[row, i] = _f32(-2) * beta * size * total
        grad_scores[row, own] += _f32(2) * beta * _dot(of_mass, anchors)


def _sinkhorn(made, x, labels, beta, k, tolerance, max_iterations):
    """P[1..k, y], (batch, k), of n sorted anchors, for whitened scores x (batch, n) float32 in [0, 1]; its errors."""
    inputs, work = (x, labels, _f32(beta), _f32(tolerance), max_iterations), x.numel() * x.shape[1]
    in_threads(_forward, work, WORK_OF_A_THREAD, len(x), inputs, made)


def _sinkhorn_backward(grad_x, grads, made, x, labels, beta, *_):
    inputs, work = (x, labels, _f32(beta), made[2], grads[0]), x.numel() * x.shape[1]
    in_threads(_backward, work, WORK_OF_A_THREAD, len(x), inputs, [grad_x])


register("sinkhorn", "cpu", transport.outputs_of_kernel, _sinkhorn, _sinkhorn_backward, transport.sinkhorn)
