"""SinkhornSort for the true class on the CPU, compiled by Numba: one sample's plan after the other, in the cache.

Newton's method as in transport.py, after one Sinkhorn iteration. Its steps come from conjugate gradients on the
Laplacian diag(c) - P^T P, which multiply by P and factorise no matrix. diag(c) - diag(P^T P) is the preconditioner;
some ten steps are enough for the plan, and as many for the gradient.
"""

from functools import partial

import numpy as np

from topk_losses import transport
from topk_losses.kernels.numba_support import IN_ANY_ORDER, exp, in_threads, jit
from topk_losses.kernels.register import empty_gradient, register_kernel

WORK_OF_A_THREAD = 100_000  # entries of plans that pay for another thread
MOST_STEPS = 100
_SIGN, _REST = np.int32(31), np.int32(0x7FFFFFFF)
GAP = 256  # numbers between two arrays: more than a step of vector code
VECTOR = 8  # target points are filled up to a multiple of these with some that no score reaches
ROWS = 4  # of the plan that are computed together
# Exponents below the highest of a row that count. The products of what is lower still are denormal, with which a
# processor is a hundred times as slow; the plan's column itself is wanted to the end of float32.
FOR_SUMS, FOR_COLUMN = np.float32(-36), np.float32(-87)
_f32 = np.float32
_LEAST, _UNREACHED = _f32(1e-30), _f32(-1e30)
_any_order = partial(jit, fastmath=(*IN_ANY_ORDER, "contract"))


@jit
def _apart(n):
    """Allocate an array (n,) of 0 with no other near it: loops over arrays that touch are not vector code."""
    return np.zeros(n + GAP, _f32)[:n]


@jit
def _room(n):
    """Allocate for n live classes: two plans (N, A), target points (A,) falling from 1 to 0, potentials h, more (A,).

    A and N are n filled up; the points that are added are out of reach, the rows 0.
    """
    A, N = -(-n // VECTOR) * VECTOR, -(-n // ROWS) * ROWS
    plans, points, h = np.zeros((2, N, A), _f32), _apart(A), _apart(A)
    points[:n] = _f32(1) - np.arange(n) / _f32(max(n - 1, 1))
    h[n:] = _UNREACHED
    return plans[0], plans[1], points, h, _apart(A), _apart(A), _apart(A), _apart(A), _apart(A)


@jit
def _live(scores, label):
    """The columns of the live scores, those not below 0, and the place of the label among them, -1 if masked out."""
    columns = np.flatnonzero(~(scores < 0))  # NaN stays, and spoils its sample
    return columns, (-1 if scores[label] < 0 else np.searchsorted(columns, label))


@_any_order
def _plan(x, points, h, beta, lowest, P, c):
    """Write P (len(x), A) = softmax over target points of h - C / epsilon and its sums c (A,).

    Returns the largest error of a mass of 1.
    """
    c[:] = _f32(0)
    for i in range(len(x)):
        row, most = P[i], np.int32(-_REST)
        for j in range(len(c)):
            v = _f32(beta * (_f32(2) * x[i] - points[j]) * points[j] + h[j])
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
def _add_laplacian(P, v, out):
    """Add (diag(c) - P^T P) v to out (A,), differences first: no digits cancel."""
    for i in range(0, len(P), ROWS):
        p, q, r, s = P[i], P[i + 1], P[i + 2], P[i + 3]
        p_mean = q_mean = r_mean = s_mean = _f32(0)
        for j in range(len(v)):
            p_mean += p[j] * v[j]
            q_mean += q[j] * v[j]
            r_mean += r[j] * v[j]
            s_mean += s[j] * v[j]
        for j in range(len(v)):
            out[j] += p[j] * (v[j] - p_mean) + q[j] * (v[j] - q_mean) + r[j] * (v[j] - r_mean) + s[j] * (v[j] - s_mean)


@_any_order
def _dot(a, b):
    total = _f32(0)
    for j in range(len(a)):
        total += a[j] * b[j]
    return total


@_any_order
def _solve(P, c, r, damping, tolerance, v):
    """Solve (diag(c) - P^T P + damping diag(c)) v = r for v (A,) by conjugate gradients; r becomes the residual."""
    A = len(c)
    scale, z, p, Ap = _apart(A), _apart(A), _apart(A), _apart(A)
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
        for j in range(A):
            Ap[j] = damping * c[j] * p[j]
        _add_laplacian(P, p, Ap)
        length = rz / max(_dot(p, Ap), _LEAST)
        for j in range(A):
            v[j], r[j] = v[j] + length * p[j], r[j] - length * Ap[j]
            z[j] = r[j] * scale[j]
        before, rz = rz, _dot(r, z)
        for j in range(A):
            p[j] = z[j] + rz / before * p[j]


@jit
def _forward(first, last, scores, labels, beta, tolerance, max_iterations, column, errors, potentials):
    """Write the column (batch, k), errors (batch,) and potentials (batch, n) of scores (batch, n), first..last."""
    n = -1  # for which there is room
    for row in range(first, last):
        columns, own = _live(scores[row], labels[row])
        column[row], errors[row] = _f32(0), _f32(0)
        if own < 0:
            continue
        if n != len(columns):
            n = len(columns)
            P, trial, points, h, new, c, new_c, v, right = _room(n)
        # the hard transport's potentials: neighbours are indifferent in the middle between their scores
        x = scores[row][columns]
        ordered, h[0], total = np.sort(x)[::-1], _f32(0), 0.0
        for j in range(1, n):
            upper, lower = np.float64(points[j - 1]), np.float64(points[j])
            total += (lower - upper) * (lower + upper - ordered[j - 1] - ordered[j]) * beta
            h[j] = total
        error, damping = _plan(x, points, h, beta, FOR_SUMS, P, c), _f32(0)
        for iteration in range(max_iterations):
            if not error > tolerance:
                break
            if iteration == 0:  # Sinkhorn's, which is cheap and takes off most of the error
                v[:n] = -np.log(c[:n])
            else:
                right[:n], right[n:] = _f32(1) - c[:n], _f32(0)
                right[:n] -= right[:n].mean()  # which is rounding, and which no step can take off
                _solve(P, c, right, damping, min(max(error, _f32(0.01)), _f32(0.1)), v)
            new[:] = h + v
            new_error = _plan(x, points, new, beta, FOR_SUMS, trial, new_c)
            if new_error < error:
                h[:], c[:], error, damping = new, new_c, new_error, damping / _f32(8)
                P, trial = trial, P
            elif iteration > 0:  # shortened towards 1 / c - 1, the first order of a Sinkhorn iteration
                damping = min(max(damping * _f32(4), _f32(1e-3)), _f32(1e8))
        errors[row], potentials[row, :n], k = error, h[:n], min(n, column.shape[1])
        _plan(x[own : own + 1], points, h, beta, FOR_COLUMN, trial, c)
        column[row, :k] = c[:k]


@_any_order
def _backward(first, last, scores, labels, beta, potentials, grad, grad_scores):
    """Write the gradient of scores (batch, n) from that of the column (batch, k), by the KKT conditions."""
    n = -1  # for which there is room
    for row in range(first, last):
        columns, own = _live(scores[row], labels[row])
        grad_scores[row] = _f32(0)
        if own < 0:
            continue
        if n != len(columns):
            n, k = len(columns), min(len(columns), grad.shape[1])
            P, _, points, h, c, mine, by_mass, right, v = _room(n)
        x = scores[row][columns]
        h[:n] = potentials[row, :n]
        _plan(x[own : own + 1], points, h, beta, FOR_COLUMN, P, mine)
        _plan(x, points, h, beta, FOR_SUMS, P, c)
        by_mass[:] = _f32(0)
        by_mass[:k] = grad[row, :k] * mine[:k]
        by_mass -= mine * by_mass.sum()
        largest = max(np.abs(by_mass).max(), _LEAST)  # squares of a small gradient would not be numbers
        for j in range(len(right)):
            right[j] = by_mass[j] / largest if abs(by_mass[j]) > _f32(1e-18) * largest else _f32(0)
        _solve(P, c, right, _f32(1e-6), _f32(1e-5), v)
        for i in range(n):
            p, mean, total = P[i], _dot(P[i], v), _f32(0)
            for j in range(len(p)):
                total += p[j] * (v[j] - mean) * points[j]
            grad_scores[row, columns[i]] = _f32(-2) * beta * largest * total
        grad_scores[row, columns[own]] += _f32(2) * beta * _dot(by_mass, points)


def _allocate(x, labels, beta, k, *_):
    """Allocate the column (batch, k), its errors (batch,), and the potentials (batch, n) for the backward pass."""
    return [x.new_empty(x.shape[0], k), x.new_empty(x.shape[0]), x.new_empty(x.shape)]


def _sinkhorn(x, labels, beta, k, tolerance, max_iterations):
    """Compute transport.sinkhorn for whitened scores x (batch, n), below 0 for masked-out classes."""
    outputs, work = _allocate(x, labels, beta, k), x.numel() * x.shape[1] // WORK_OF_A_THREAD
    in_threads(_forward, len(x), work, x, labels, _f32(beta), _f32(tolerance), max_iterations, *outputs)
    return outputs


def _gradient(grad, outputs, x, labels, beta, *_):
    grad_x, work = empty_gradient(x), x.numel() * x.shape[1] // WORK_OF_A_THREAD
    in_threads(_backward, len(x), work, x, labels, _f32(beta), outputs[2], grad, grad_x)
    return grad_x


register_kernel("sinkhorn_cpu", transport.sinkhorn, _sinkhorn, _allocate, _gradient)
