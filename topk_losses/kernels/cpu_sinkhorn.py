"""SinkhornSort for the true class on the CPU, compiled by Numba: one sample's plan after the other, in the cache.

Newton's method as in transport.py, after one Sinkhorn iteration. Its steps come from conjugate gradients on the
Laplacian diag(c) - P^T P, which multiply by P and factorise no matrix. diag(c) - diag(P^T P) is the preconditioner;
some ten steps are enough for the plan, and as many for the gradient.

Arrays are filled in loops: with assignments to slices Numba takes twice as long to compile these functions.
"""

from functools import partial

import numpy as np

from topk_losses import transport
from topk_losses.kernels.numba_support import IN_ANY_ORDER, exp, in_threads, jit
from topk_losses.kernels.registrar import new_gradient, register_kernel

WORK_OF_A_THREAD = 100_000  # entries of plans that pay for another thread
MOST_STEPS = 100
VECTOR = 8  # target points are filled up to a multiple of these with some that no score reaches
_SIGN = np.int32(31)
_REST = np.int32(0x7FFFFFFF)
_f32 = np.float32
_LEAST = _f32(1e-30)
_UNREACHED = _f32(-1e30)
# Exponents below the highest of a row that count, for P of 2e-16 at least. The products of what is lower still are
# denormal, with which a processor is a hundred times as slow.
LOWEST = _f32(-36)
_any_order = partial(jit, fastmath=(*IN_ANY_ORDER, "contract"))


@jit
def _room(n):
    """Allocate for n live classes: two plans (n, A), target points (A,) falling from 1 to 0, potentials, more (A,)."""
    A = -(-n // VECTOR) * VECTOR
    plans = np.zeros((2, n, A), _f32)
    rows = np.zeros((6, A), _f32)
    points = rows[0]
    h = rows[1]
    for j in range(n):
        points[j] = _f32(1) - j / _f32(max(n - 1, 1))
    h[n:].fill(_UNREACHED)
    return plans[0], plans[1], points, h, rows[2], rows[3], rows[4], rows[5]


@jit
def _live_classes(scores, label):
    """Return the scores (n,) that are not masked out, their places (n,), and the place of the label among them."""
    x = np.empty(len(scores), _f32)
    places = np.empty(len(scores), np.int64)
    n = 0
    own = 0
    for j in range(len(scores)):
        if scores[j] < 0:  # NaN stays, and spoils its sample
            continue
        if j == label:
            own = n
        x[n] = scores[j]
        places[n] = j
        n += 1
    return x[:n], places[:n], own


@_any_order
def _plan(x, points, h, beta, P, c):
    """Write P (n, A) = softmax over target points of h - C / epsilon and its sums c (A,).

    Returns the largest error of a mass of 1.
    """
    c.fill(_f32(0))
    for i in range(len(x)):
        row = P[i]
        most = np.int32(-_REST)
        for j in range(len(c)):
            v = _f32(beta * (_f32(2) * x[i] - points[j]) * points[j] + h[j])
            row[j] = v
            bits = v.view(np.int32)
            bits ^= (bits >> _SIGN) & _REST  # the order of the numbers, in integers: their maximum becomes vector code
            most = bits if bits > most else most
        highest = np.int32(most ^ ((most >> _SIGN) & _REST)).view(np.float32)
        total = _f32(0)
        for j in range(len(c)):
            v = row[j] - highest
            e = exp(v)
            row[j] = _f32(0) if v < LOWEST else e
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
def _dot(a, b):
    total = _f32(0)
    for j in range(len(a)):
        total += a[j] * b[j]
    return total


@_any_order
def _precondition(P, c, damping):
    """Return one divided by the diagonal of what `_solve` solves, (A,)."""
    scale = np.empty_like(c)
    for j in range(len(c)):
        scale[j] = c[j] * (_f32(1) + damping) + _LEAST
    for i in range(len(P)):
        for j in range(len(c)):
            scale[j] -= P[i, j] * P[i, j]
    for j in range(len(c)):
        scale[j] = _f32(1) / max(scale[j], _LEAST)
    return scale


@_any_order
def _multiply(P, c, damping, p, Ap):
    """Write (diag(c) - P^T P + damping diag(c)) p to Ap (A,)."""
    for j in range(len(c)):
        Ap[j] = damping * c[j] * p[j]
    for i in range(len(P)):  # differences first: no digits cancel
        row = P[i]
        mean = _f32(0)
        for j in range(len(c)):
            mean += row[j] * p[j]
        for j in range(len(c)):
            Ap[j] += row[j] * (p[j] - mean)


@_any_order
def _solve(P, c, r, damping, tolerance, v):
    """Solve (diag(c) - P^T P + damping diag(c)) v = r for v (A,) by conjugate gradients; r becomes the residual."""
    scale = _precondition(P, c, damping)
    z = np.empty_like(c)
    p = np.empty_like(c)
    Ap = np.empty_like(c)
    for j in range(len(c)):
        v[j] = _f32(0)
        z[j] = r[j] * scale[j]
        p[j] = z[j]
    rz = _dot(r, z)
    enough = tolerance * tolerance * rz
    for _ in range(MOST_STEPS):
        if not rz > enough:
            break
        _multiply(P, c, damping, p, Ap)
        length = rz / max(_dot(p, Ap), _LEAST)
        for j in range(len(c)):
            v[j] = v[j] + length * p[j]
            r[j] = r[j] - length * Ap[j]
            z[j] = r[j] * scale[j]
        before = rz
        rz = _dot(r, z)
        for j in range(len(c)):
            p[j] = z[j] + rz / before * p[j]


@jit
def _hard_potentials(x, points, beta, h):
    """Write the potentials of the hard transport: neighbours are indifferent in the middle between their scores."""
    n = len(x)
    rising = np.sort(x)
    h[0] = _f32(0)
    for j in range(1, n):
        upper = points[j - 1]
        lower = points[j]
        h[j] = h[j - 1] + (lower - upper) * (lower + upper - rising[n - j] - rising[n - 1 - j]) * beta


@jit
def _step(iteration, n, P, c, error, damping, right, v):
    """Write the step v (A,) of an iteration: Sinkhorn's first, which is cheap and takes off most of the error."""
    if iteration == 0:
        for j in range(n):
            v[j] = -np.log(c[j])
    else:
        total = _f32(0)
        for j in range(n):
            right[j] = _f32(1) - c[j]
            total += right[j]
        for j in range(n):
            right[j] -= total / n  # which is rounding, and which no step can take off
        right[n:].fill(_f32(0))
        _solve(P, c, right, damping, min(max(error, _f32(0.01)), _f32(0.1)), v)


@jit
def _transport(x, room, beta, tolerance, max_iterations):
    """Return the plan (n, A) of scores x (n,), in one of the two of `room`, and its error; potentials are in room."""
    n = len(x)
    P, trial, points, h, c, new_c, v, right = room
    _hard_potentials(x, points, beta, h)
    error = _plan(x, points, h, beta, P, c)
    damping = _f32(0)
    new = np.empty_like(h)
    for iteration in range(max_iterations):
        if not error > tolerance:
            break
        _step(iteration, n, P, c, error, damping, right, v)
        for j in range(len(h)):
            new[j] = h[j] + v[j]
        new_error = _plan(x, points, new, beta, trial, new_c)
        if new_error < error:
            for j in range(len(h)):
                h[j] = new[j]
            error = new_error
            damping = damping / _f32(8)
            P, trial, c, new_c = trial, P, new_c, c
        elif iteration > 0:  # shortened towards 1 / c - 1, the first order of a Sinkhorn iteration
            damping = min(max(damping * _f32(4), _f32(1e-3)), _f32(1e8))
    return P, error


@jit
def _forward(first, last, scores, labels, beta, tolerance, max_iterations, outputs):
    """Write the column (batch, k), errors (batch,) and potentials (batch, n) of scores (batch, n), first..last."""
    column, errors, potentials = outputs
    n = -1  # for which there is room
    for row in range(first, last):
        column[row].fill(_f32(0))
        errors[row] = _f32(0)
        if scores[row, labels[row]] < 0:
            continue
        x, _, own = _live_classes(scores[row], labels[row])
        if n != len(x):
            n = len(x)
            room = _room(n)
        P, errors[row] = _transport(x, room, beta, tolerance, max_iterations)
        h = room[3]
        for j in range(n):
            potentials[row, j] = h[j]
        for j in range(min(n, column.shape[1])):
            column[row, j] = P[own, j]


@_any_order
def _solve_backward(P, c, own, grad, right, by_mass, v):
    """Write the gradient by_mass (A,) of the scores' logits in P[own], and the solution v (A,) of the KKT conditions.

    grad (k,) is that of the first k entries. Returns the size by which v is smaller.
    """
    total = _f32(0)
    for j in range(len(by_mass)):
        by_mass[j] = grad[j] * P[own, j] if j < len(grad) else _f32(0)
        total += by_mass[j]
    largest = _LEAST
    for j in range(len(by_mass)):
        by_mass[j] -= P[own, j] * total
        size = abs(by_mass[j])
        largest = size if not size <= largest else largest  # NaN, if the gradient is: then all are
    for j in range(len(right)):  # of order 1: squares of a small gradient would not be numbers
        is_seen = j < len(P) and abs(by_mass[j]) > _f32(1e-18) * largest
        right[j] = by_mass[j] / largest if is_seen else _f32(0)
    _solve(P, c, right, _f32(1e-6), _f32(1e-5), v)
    return largest


@_any_order
def _backward(first, last, scores, labels, beta, potentials, grad, grad_scores):
    """Write the gradient of scores (batch, n) from that of the column (batch, k), by the KKT conditions."""
    n = -1  # for which there is room
    for row in range(first, last):
        grad_scores[row].fill(_f32(0))
        if scores[row, labels[row]] < 0:
            continue
        x, places, own = _live_classes(scores[row], labels[row])
        if n != len(x):
            n = len(x)
            P, _, points, h, c, by_mass, right, v = _room(n)
        for j in range(n):
            h[j] = potentials[row, j]
        _plan(x, points, h, beta, P, c)
        largest = _solve_backward(P, c, own, grad[row, : min(n, grad.shape[1])], right, by_mass, v)
        for i in range(n):
            p = P[i]
            mean = _dot(P[i], v)
            total = _f32(0)
            for j in range(len(p)):
                total += p[j] * (v[j] - mean) * points[j]
            grad_scores[row, places[i]] = _f32(-2) * beta * largest * total
        grad_scores[row, places[own]] += _f32(2) * beta * _dot(by_mass, points)


def _allocate(x, labels, beta, k, *_):
    """Allocate the column (batch, k), its errors (batch,), and the potentials (batch, n) for the backward pass."""
    return [x.new_empty(x.shape[0], k), x.new_empty(x.shape[0]), x.new_empty(x.shape)]


def _sinkhorn(x, labels, beta, k, tolerance, max_iterations):
    """Compute transport.sinkhorn for whitened scores x (batch, n), below 0 for masked-out classes."""
    outputs = _allocate(x, labels, beta, k)
    work = x.numel() * x.shape[1] // WORK_OF_A_THREAD
    in_threads(_forward, len(x), work, x, labels, _f32(beta), _f32(tolerance), max_iterations, tuple(outputs))
    return outputs


def _gradient(grads, outputs, x, labels, beta, *_):
    grad_x = new_gradient(x)
    work = x.numel() * x.shape[1] // WORK_OF_A_THREAD
    in_threads(_backward, len(x), work, x, labels, _f32(beta), outputs[2], grads[0], grad_x)
    return grad_x


register_kernel("sinkhorn_cpu", transport.sinkhorn, _sinkhorn, _allocate, _gradient)
