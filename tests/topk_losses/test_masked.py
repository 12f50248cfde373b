"""Kinds of trouble: classes that are masked out, offsets, memory, gradients of labels and of k, autocast."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import vmap
from torch.nn.functional import one_hot, pad

from tests.methods import (
    DETERMINISTIC,
    LEARNABLE,
    MODES,
    RELAXED,
    p_k_of,
    random_batch,
    value_and_gradient,
    with_backends,
)
from topk_losses import METHODS, RELAXATIONS, ClassificationLoss, TopKCrossEntropyLoss, classification, make_loss
from topk_losses.kernels import VARIABLE, is_importable

INF = math.inf
ROOT = Path(__file__).parents[2]
EAGER = [("torch", torch.float64), ("torch", torch.float32)]
COMPILED = [("numba", torch.float32)] if is_importable("numba") else []


@pytest.fixture
def dtype(request, monkeypatch):
    backend, dtype = request.param
    monkeypatch.setenv(VARIABLE, backend)
    return dtype


def with_dtypes(names, cases):
    """Each case, whose first item is a method, in float64 and float32, and by a kernel of Numba where there is one."""
    cases = with_backends(cases, EAGER, COMPILED)
    return pytest.mark.parametrize((*names, "dtype"), cases, indirect=["dtype"], ids=str)


# Classes that are masked out.

KINDS = [(method, kind) for method in DETERMINISTIC for kind in ("labels", "smoothed", "soft")]
KINDS += [(method, kind) for method in RELAXED for kind in ("corrected", "any")]


@pytest.mark.parametrize("m", [None, 9])
@with_dtypes(("method", "kind"), KINDS)
def test_the_loss_with_masked_classes_is_that_without_their_columns(method, kind, m, dtype):
    """In value and gradient, for a number of live classes that differs from row to row, below m, too."""
    logits, labels = random_batch(6, 14, dtype=dtype)
    settings = {"smoothed": {"label_smoothing": 0.1}, "corrected": {"noise_rate": 0.3}, "any": {"soft_labels": "any"}}
    loss = make_loss(method, p_k_of(method, 3), m=m, reduction="none", **settings.get(kind, {}))
    live = torch.rand(6, 14, generator=torch.Generator().manual_seed(3)) < 0.6
    live[torch.arange(6), labels] = True
    live[:, :4] = True
    live[:2] = True
    mass = random_batch(6, 14, seed=1)[0].exp().masked_fill(~live, 0).to(dtype)
    target = {"soft": mass / mass.sum(1, keepdim=True), "any": ((mass > 5) | one_hot(labels, 14).bool())}
    target = target.get(kind, labels)
    value, gradient = value_and_gradient(loss, logits.masked_fill(~live, -INF), target)
    assert not bool(gradient[~live].any())
    tolerance = {"rtol": 1e-6, "atol": 1e-8} if dtype == torch.float64 else {"rtol": 1e-3, "atol": 1e-4}
    for row in range(6):
        columns = live[row].nonzero().squeeze(1)
        own = target[row : row + 1, columns] if target.dim() == 2 else (columns == target[row]).nonzero()[0]
        want, want_gradient = value_and_gradient(loss, logits[row : row + 1, columns], own)
        torch.testing.assert_close(value[row : row + 1], want, **tolerance)
        torch.testing.assert_close(gradient[row, columns], want_gradient[0], **tolerance)


@pytest.mark.parametrize("kind", ["labels", "any"])
@pytest.mark.parametrize("method", RELAXED)
def test_with_m_neither_masked_classes_nor_the_numbers_of_classes_have_an_influence(method, kind):
    """However many classes there are: a search for the largest of many has another order of those that tie."""
    settings = {"soft_labels": "any"} if kind == "any" else {}
    loss = make_loss(method, p_k_of(method, 5), m=16, reduction="none", **settings)
    logits, labels = random_batch(8, 100)
    answers = torch.rand(8, 100, generator=torch.Generator().manual_seed(3)).topk(3).indices
    sets = torch.zeros(8, 100).scatter(1, answers, 1.0)
    target = sets if kind == "any" else labels
    want = loss(logits, target)
    for num_masked in (100, 500):
        wider = torch.cat([logits, torch.full((8, num_masked), -INF)], dim=1)
        more = torch.cat([sets, torch.zeros(8, num_masked)], dim=1) if kind == "any" else labels
        torch.testing.assert_close(loss(wider, more), want)
    order = torch.randperm(100, generator=torch.Generator().manual_seed(4))
    renumbered = sets[:, order] if kind == "any" else order.argsort()[labels]
    torch.testing.assert_close(loss(logits[:, order], renumbered), want)


@pytest.mark.parametrize("kind", ["labels", "smoothed", "soft", "any"])
@pytest.mark.parametrize("method", RELAXED)
def test_where_no_number_can_be_read_rows_of_at_least_m_live_classes_have_the_same_loss(method, kind):
    """By torch.func, and for networks compiled: the candidates of a row of m live classes are in their order there."""
    settings = {"smoothed": {"label_smoothing": 0.1}, "any": {"soft_labels": "any"}}.get(kind, {})
    loss = make_loss(method, p_k_of(method, 3), m=8, reduction="none", **settings)
    logits, _ = random_batch(6, 12)
    order = torch.rand(6, 12, generator=torch.Generator().manual_seed(3)).argsort(dim=1)
    num_live = torch.tensor([8, 8, 8, 9, 10, 12]).unsqueeze(1)
    live = torch.zeros(6, 12, dtype=torch.bool).scatter(1, order, torch.arange(12) < num_live)
    logits = logits.masked_fill(~live, -INF)
    labels = order[:, 2]
    mass = random_batch(6, 12, seed=1)[0].masked_fill(~live, -INF).softmax(1)
    target = {"soft": mass, "any": one_hot(labels, 12) + one_hot(order[:, 0], 12) > 0}.get(kind, labels)
    want = value_and_gradient(loss, logits, target)
    calls = [vmap(loss)]
    if METHODS[method].family == "networks":
        torch._dynamo.reset()
        calls.append(torch.compile(loss, backend="eager", fullgraph=True))
    for call in calls:
        torch.testing.assert_close(value_and_gradient(call, logits, target), want, rtol=1e-6, atol=1e-8)


@with_dtypes(("method",), [(name,) for name in RELAXED if name != "recall_surrogate"])
def test_where_k_exceeds_the_live_classes_all_of_them_are_within_it(method, dtype):
    """Except recall_surrogate, whose indicators are never 1."""
    loss = TopKCrossEntropyLoss(method, [0.5, 0, 0.5])
    value, gradient = value_and_gradient(loss, torch.tensor([[1, 0, -INF, -INF]], dtype=dtype), torch.tensor([0]))
    softmax = torch.tensor([1.0, 0.0], dtype=dtype).softmax(0)
    torch.testing.assert_close(value, -torch.log(0.5 + 0.5 * softmax[0]), rtol=0, atol=2e-6)
    slope = 0.5 * softmax[0] * softmax[1] / (0.5 + 0.5 * softmax[0])
    torch.testing.assert_close(gradient, torch.stack([-slope, slope, *torch.zeros(2, dtype=dtype)]).unsqueeze(0))


@with_dtypes(("method",), [(name,) for name in DETERMINISTIC])
def test_rows_with_few_or_no_live_classes_spoil_no_gradient_of_the_batch(method, dtype):
    """Nor that of a learned temperature, nor that of labels with no mass on masked classes."""
    logits = torch.tensor([[1, 0, -INF, -INF], [1, -INF, -INF, -INF], [0.3, 0.1, -0.2, 0.7]], dtype=dtype)
    labels = torch.tensor([0, 0, 2])
    mass = one_hot(labels, 4).to(dtype)
    learned = nn.Parameter(torch.tensor(METHODS[method].inverse_temperature or 1.0))
    leaves = [logits.requires_grad_(), mass.requires_grad_(), learned]
    for settings in ({}, {"inverse_temperature": learned} if method in LEARNABLE else {}):
        loss = make_loss(method, p_k_of(method, 3), reduction="none", **settings)
        for target in (labels, mass):
            losses = loss(logits, target)
            gradients = torch.autograd.grad(losses.sum(), leaves, materialize_grads=True)
            assert all(bool(tensor.isfinite().all()) for tensor in (losses, *gradients))
            assert not bool(gradients[0][:2, 2:].any())
            assert bool(gradients[0][2].any()) or method.startswith("truncated")


@pytest.mark.parametrize("m", [None, 9])
@pytest.mark.parametrize("kind", ["labels", "smoothed", "soft", "ignored"])
@pytest.mark.parametrize("method", DETERMINISTIC)
def test_a_label_on_a_masked_class_touches_no_other_sample(method, kind, m):
    """Its own loss is no NaN, and 0 where it is ignored."""
    logits, labels = random_batch(6, 14)
    logits[2, labels[2]] = -INF
    settings = {"label_smoothing": 0.1} if kind == "smoothed" else {}
    loss = make_loss(method, p_k_of(method, 3), m=m, reduction="none", **settings)
    target = labels
    if kind == "soft":
        target = (one_hot(labels, 14) + one_hot(labels.roll(1), 14)).double() / 2
    elif kind == "ignored":
        target = labels.masked_fill(torch.arange(6) == 2, -100)
    others = torch.tensor([0, 1, 3, 4, 5])
    losses, gradient = value_and_gradient(loss, logits, target)
    want, want_gradient = value_and_gradient(loss, logits[others], target[others])
    assert not bool(losses.isnan().any())
    assert float(losses[2]) == 0 or kind != "ignored"
    torch.testing.assert_close(losses[others], want)
    torch.testing.assert_close(gradient[others], want_gradient)


class Focal(ClassificationLoss):
    """The focal loss of docs/extending.md."""

    def loss_of_labels(self, logits, labels, call):
        log_p = logits.log_softmax(1).gather(1, labels.unsqueeze(1)).squeeze(1)
        return -((1 - log_p.exp()) ** 2) * log_p


@pytest.mark.parametrize("limit", [1 << 16, 8])
def test_masked_classes_of_an_own_loss_have_no_influence(limit, monkeypatch):
    """Its losses of masked classes are infinite, and so would be their gradients."""
    monkeypatch.setattr(classification, "SCORES_AT_ONCE", limit)
    logits, labels = random_batch(6, 12)
    masked = torch.cat([logits, torch.full((6, 2), -INF, dtype=torch.float64)], dim=1)
    mixed = one_hot(labels, 12).double().lerp(one_hot(labels.roll(1), 12).double(), 0.3)
    mixed[0] = one_hot(labels[0], 12)  # one label, where others have two
    for target, longer in ((labels, labels), (mixed, pad(mixed, (0, 2)))):
        for smoothing in (0.0, 0.1):
            loss = Focal(label_smoothing=smoothing)
            value, gradient = value_and_gradient(loss, masked, longer)
            want, want_gradient = value_and_gradient(loss, logits, target)
            torch.testing.assert_close(value, want)
            torch.testing.assert_close(gradient, pad(want_gradient, (0, 2)))
    bounded = make_loss("generalized_cross_entropy", reduction="none")
    on_masked = [bounded(masked, label) for label in (torch.full((6,), 13), one_hot(torch.full((6,), 13), 14).double())]
    torch.testing.assert_close(*on_masked)
    on_masked = Focal(reduction="none")(masked, one_hot(torch.full((6,), 13), 14).double())
    assert bool((on_masked == INF).all())


@pytest.mark.parametrize(("method", "top1_mode"), MODES)
def test_masked_classes_spoil_no_gradient_of_a_learned_p_k(method, top1_mode):
    logits, labels = random_batch(6, 12)
    masked = torch.cat([logits, torch.full((6, 2), -INF, dtype=torch.float64)], dim=1)
    loss = TopKCrossEntropyLoss(method, {1: 0.4, 3: 0.6}, top1_mode=top1_mode, label_smoothing=0.1)
    gradients = []
    for scores in (logits, masked):
        p_k = torch.tensor([[0.4, 0, 0.6]] * 6, dtype=torch.float64, requires_grad=True)
        gradients += torch.autograd.grad(loss(scores, labels, p_k=p_k), p_k)
    assert bool(gradients[0].any())
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("kind", ["smoothed", "soft", "per class"])
@pytest.mark.parametrize("method", RELAXED)
def test_masked_classes_have_no_influence_where_one_rank_has_all_weight(method, kind):
    """Nor on the gradients of a learned temperature and P_K."""
    logits, labels = random_batch(6, 12)
    rows = torch.tensor([[1.0, 0, 0], [0.4, 0, 0.6], [0.1, 0, 0.9]] * 4, dtype=torch.float64)
    found = []
    for num_masked in (0, 2):
        scores = pad(logits, (0, num_masked), value=-INF).requires_grad_()
        beta = nn.Parameter(torch.tensor(METHODS[method].inverse_temperature, dtype=torch.float64))
        leaves = [scores, beta]
        settings = {}
        call = {}
        if kind == "per class":
            of_masked = torch.tensor([[1.0, 0, 0]] * num_masked, dtype=torch.float64).view(num_masked, 3)
            settings = {"p_k": torch.cat([rows, of_masked]), "num_classes": 12 + num_masked}
        else:
            call = {"p_k": rows[:6].clone().requires_grad_()}
            leaves.append(call["p_k"])
        target = labels
        if kind == "soft":
            target = pad(logits.softmax(1), (0, num_masked))
        else:
            settings["label_smoothing"] = 0.1
        loss = TopKCrossEntropyLoss(method, inverse_temperature=beta, **settings)(scores, target, **call)
        gradient, *others = torch.autograd.grad(loss, leaves, materialize_grads=True)
        found.append([loss, gradient[:, :12], *others])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("method", RELAXED)
def test_a_row_with_one_class_left_has_a_gradient_of_0(method):
    logits = torch.full((2, 12), -torch.inf, dtype=torch.float64)
    logits[0, 2] = 1
    logits[1, 3] = 0
    labels = torch.tensor([2, 3])
    for smoothing in (0.0, 0.1):
        loss = TopKCrossEntropyLoss(method, p_k={1: 0.5, 2: 0.5}, label_smoothing=smoothing)
        _, gradient = value_and_gradient(loss, logits, labels)
        assert not bool(gradient.any())


# Offsets of the logits.


@pytest.mark.parametrize("m", [None, 9])
@with_dtypes(("method",), [(name,) for name in DETERMINISTIC])
def test_an_offset_costs_no_digits(method, m, dtype):
    logits, labels = random_batch(16, 12, dtype=torch.float32)
    shifted = (logits + 1e4).to(dtype)  # float32 numbers, in any precision
    loss = make_loss(method, p_k_of(method, 3), m=m, reduction="none")
    value, gradient = value_and_gradient(loss, shifted, labels)
    want, want_gradient = value_and_gradient(loss, shifted.double() - 1e4, labels)
    torch.testing.assert_close(value.double(), want, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(gradient.double(), want_gradient, rtol=5e-4, atol=5e-4)


@pytest.mark.parametrize("method", RELAXATIONS)
def test_a_loss_is_never_below_0(method):
    logits, _ = random_batch(64, 12, 3.0, torch.float32)
    labels = logits.argmax(1)
    for p_k in ({1: 0.5, 5: 0.5}, {2: 0.5, 1: 0.5}, {1: 0.1, 9: 0.9}):
        for beta in (0.05, 1.0, 10.0):
            loss = make_loss(method, p_k, inverse_temperature=beta, reduction="none")
            assert float(loss(logits, labels).min()) >= 0


# Gradients that someone asks for.


@pytest.mark.parametrize("m", [None, 8])
@pytest.mark.parametrize("method", DETERMINISTIC)
def test_the_gradient_of_labels_is_the_loss_of_each_class(method, m):
    logits, labels = random_batch()
    loss = make_loss(method, p_k_of(method, 3), m=m, reduction="sum")
    mass = one_hot(labels, 12).double().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(logits, mass), mass)
    every = [make_loss(method, p_k_of(method, 3), m=m, reduction="none")(logits, labels * 0 + j) for j in range(12)]
    torch.testing.assert_close(gradient, torch.stack(every, dim=1))


@pytest.mark.parametrize("method", RELAXED)
def test_the_gradient_of_a_set_is_that_of_differences(method):
    logits, labels = random_batch()
    right = one_hot(labels, 12).double()
    loss = TopKCrossEntropyLoss(method, p_k_of(method, 3), soft_labels="any", reduction="sum")
    direction = 1e-8 * (right == 0)
    change = loss(logits, right + direction) - loss(logits, right)
    (gradient,) = torch.autograd.grad(loss(logits, right.requires_grad_()), right)
    torch.testing.assert_close((gradient * direction).sum(), change, rtol=1e-3, atol=1e-10)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["labels", "smoothed", "soft"])
@pytest.mark.parametrize("method", DETERMINISTIC)
def test_half_precision_and_autocast_compute_in_float32(method, kind, precision):
    """Forward and backward."""
    logits, labels = random_batch(16, 12, dtype=precision)
    target = random_batch(16, 12, dtype=torch.float32, seed=1)[0].softmax(1) if kind == "soft" else labels
    p_k = torch.tensor([[0.3, 0.1, 0.6]] * 12) if method in RELAXATIONS else p_k_of(method, 3)
    loss = make_loss(method, p_k, 12, label_smoothing=0.1 if kind == "smoothed" else 0.0)
    want, want_gradient = value_and_gradient(loss, logits.float(), target)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision != torch.float16):
        got, gradient = value_and_gradient(loss, logits, target)
    assert torch.equal(got, want)
    torch.testing.assert_close(gradient, want_gradient.to(precision), rtol=1e-5, atol=1e-7)


# Memory.

MEASURE = """
import os, resource, sys, torch, torch.fx.experimental.symbolic_shapes  # loaded by the first torch.autograd.grad
from topk_losses import RELAXATIONS, make_loss
torch.manual_seed(0)
logits, labels = torch.randn(256, 1000, requires_grad=True), torch.randint(1000, (256,))
def grown(method):
    m = 16 if method in RELAXATIONS else None
    p_k = {1: 0.5, 5: 0.5} if m else None
    loss = make_loss(method, p_k, m=m, label_smoothing=0.1)
    make_loss(method, p_k, m=m)(logits, labels).backward()  # what is loaded once
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loss(logits, labels).backward()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
for method in sys.argv[1:]:
    child = os.fork()  # whose largest memory so far is what it has now
    if not child:
        print(method, grown(method), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, method
"""


def test_smoothing_takes_little_more_memory_than_the_call_without():
    methods = ["splitter_selection", "lapsum", "softsort", "ldr_kl"]
    command = [sys.executable, "-c", MEASURE, *methods]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=ROOT)
    grown = dict(line.split() for line in run.stdout.splitlines())
    assert list(grown) == methods
    for method, mebibytes in grown.items():
        assert float(mebibytes) < 40, method  # all pairs of a row and a class at once take hundreds


@pytest.mark.parametrize("method", RELAXED)
def test_what_is_worked_out_in_parts_has_the_derivatives_of_the_whole(method):
    """20 rows of 300 classes, each with 12 scores of its own, are too many numbers to hold at once; 5 rows are not."""
    logits, labels = random_batch(20, 300)
    loss = make_loss(method, p_k_of(method, 3), m=12, label_smoothing=0.1, reduction="sum")
    results = []
    for rows in (20, 5):
        leaf = logits.clone().requires_grad_()
        value = sum(loss(*part) for part in zip(leaf.split(rows), labels.split(rows)))
        (first,) = torch.autograd.grad(value, leaf, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), leaf)
        results.append((value.detach(), first.detach(), second))
    torch.testing.assert_close(*results)
