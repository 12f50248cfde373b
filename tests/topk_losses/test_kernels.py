"""The kernels compiled by Numba against float64 and PyTorch; the smooth k-th largest also in test_smooth_svm.py."""

import copy
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import topk_losses
from topk_losses import (
    DISTRIBUTIONS,
    RelaxedNetwork,
    SmoothHardTopKLoss,
    SmoothTopKLoss,
    TopKCrossEntropyLoss,
    networks,
)
from topk_losses.kernels import VARIABLE, device_of_kernels, kernel
from topk_losses.loss import top_m
from topk_losses.ranks import DFTopK, RecallSurrogate
from topk_losses.smooth_svm import kth_largest
from topk_losses.threshold import LML, CappedSoftmax, LapSum, PointwiseMasks, SparseTopK, masks

pytest.importorskip("numba")
from topk_losses.kernels import numba_support
from topk_losses.kernels.cpu_largest import largest_of_rows

NETWORKS = {"odd_even": networks.odd_even, "bitonic": networks.bitonic, "splitter": networks.splitter_selection}


@pytest.fixture(autouse=True)
def _numba(monkeypatch):
    monkeypatch.setenv(VARIABLE, "numba")


def column_and_gradients(operator: RelaxedNetwork, scores: Tensor, labels: Tensor, weights: Tensor):
    """P[1..k, y] (batch, k), and the gradients of its weighted sum by scores and, if a distribution, by labels."""
    leaves = [scores.clone().requires_grad_()]
    if labels.is_floating_point():
        leaves.append(labels.clone().requires_grad_())
    column = operator.rank_probabilities(leaves[0], leaves[-1] if len(leaves) == 2 else labels)
    return column.detach(), *torch.autograd.grad((column * weights).sum(), leaves)


@st.composite
def problems(draw):
    """(scores float32, labels or distribution, weights, operator): any size and scale, often with ties."""
    n = draw(st.integers(2, 40) | st.integers(41, 70))
    k = draw(st.integers(1, min(n, 8)))
    batch = draw(st.sampled_from([1, 2, 63, 64, 65, 130]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    scores = torch.randn(batch, n, generator=generator) * draw(st.sampled_from([1e-4, 1e-2, 1.0, 10.0, 1e4]))
    if draw(st.booleans()):
        scores = scores.bfloat16().float()
    labels = torch.randint(n, (batch,), generator=generator)
    if draw(st.booleans()):
        labels = torch.rand(batch, n, generator=generator).softmax(1)
    distribution = draw(st.sampled_from(list(DISTRIBUTIONS)))
    beta = draw(st.sampled_from([0.1, 0.5, 4.0]))
    network = NETWORKS[draw(st.sampled_from(list(NETWORKS)))](n, k)
    return scores, labels, torch.randn(batch, k, generator=generator), RelaxedNetwork(network, beta, distribution)


@given(problems())
@settings(max_examples=80, deadline=None)
def test_agrees_with_float64(problem):
    scores, labels, weights, operator = problem
    assert kernel("carry_mass", scores) is not None
    exact_labels = labels.double() if labels.is_floating_point() else labels
    got = column_and_gradients(operator, scores, labels, weights)
    want = column_and_gradients(operator, scores.double(), exact_labels, weights.double())
    assert all(each.dtype == torch.float32 for each in got)
    # The rounding of the scores, which are float32, moves each swap by beta times as much.
    slack = 20 * torch.finfo(torch.float32).eps * operator.inverse_temperature * float(scores.abs().max())
    torch.testing.assert_close(got[0].double(), want[0], rtol=1e-4, atol=1e-5 + slack)
    if labels.is_floating_point():
        torch.testing.assert_close(got[2].double(), want[2], rtol=1e-3, atol=1e-4 + 5 * slack)
    # A comparator's gradient is of the size of beta times the weights. Where float32 rounds a tie or a small
    # difference, logistic_phi has the slope of another difference: so it is for PyTorch's float32 too, and the sum over
    # a row, which is 0, tells errors of the rest.
    largest = want[1].abs().amax(1, keepdim=True)
    scale = operator.inverse_temperature * float(weights.abs().max())
    if operator.distribution != "logistic_phi":
        atol = 1e-3 * float(largest.max()) + scale * (slack + 1e-6)
        torch.testing.assert_close(got[1].double(), want[1], rtol=1e-2, atol=atol)
    assert bool((got[1].double().sum(1, keepdim=True).abs() <= 1e-4 * largest + 1e-5 * scale).all())


@pytest.mark.parametrize("distribution", list(DISTRIBUTIONS))
@pytest.mark.parametrize("name", list(NETWORKS))
def test_well_separated_scores_have_the_gradient_of_float64(name, distribution):
    generator = torch.Generator().manual_seed(1)
    n, k, batch = 60, 5, 70
    scores = torch.stack([torch.randperm(n, generator=generator).float() / 7 for _ in range(batch)])
    operator = RelaxedNetwork(NETWORKS[name](n, k), 0.7, distribution)
    labels = torch.randint(n, (batch,), generator=generator)
    weights = torch.randn(batch, k, generator=generator)
    got = column_and_gradients(operator, scores, labels, weights)
    want = column_and_gradients(operator, scores.double(), labels, weights.double())
    torch.testing.assert_close(got[0].double(), want[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got[1].double(), want[1], rtol=1e-3, atol=2e-4 * float(want[1].abs().max()))


def test_many_threads_give_the_bits_of_one():
    operator = RelaxedNetwork(networks.splitter_selection(1000, 5), 1.0)
    scores, labels = torch.randn(300, 1000), torch.randint(1000, (300,))
    weights = torch.randn(300, 5)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 4):
            torch.set_num_threads(threads)
            results.append(column_and_gradients(operator, scores, labels, weights))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, four) for one, four in zip(*results))


@pytest.mark.parametrize("loss", [SmoothTopKLoss, SmoothHardTopKLoss])
def test_the_smooth_losses_are_those_of_pytorch_by_any_number_of_threads(loss, monkeypatch):
    logits = 4 * torch.randn(300, 1000, generator=torch.Generator().manual_seed(2))
    labels = torch.arange(300)
    before = torch.get_num_threads()
    results = []
    try:
        for backend, threads in (("numba", 1), ("numba", 4), ("torch", 1)):
            monkeypatch.setenv(VARIABLE, backend)
            torch.set_num_threads(threads)
            leaf = logits.clone().requires_grad_()
            value = loss(5, tau=0.3)(leaf, labels)
            results.append((value.detach(), torch.autograd.grad(value, leaf)[0]))
    finally:
        torch.set_num_threads(before)
    one, four, pytorch = results
    assert torch.equal(one[0], four[0])
    assert torch.equal(one[1], four[1])
    torch.testing.assert_close(one, pytorch, rtol=1e-5, atol=1e-8)


def test_the_smooth_kth_largest_backward_can_be_repeated_and_is_not_needed():
    scores, labels = torch.randn(7, 50, generator=torch.Generator().manual_seed(0)), torch.arange(7)
    kept = scores.clone()

    def smooth(scores):
        return kernel("kth_largest", scores)(scores, labels, [5], torch.tensor(1.0), False)[0].squeeze(1)

    want = smooth(scores)  # without a gradient to prepare
    leaf = scores.clone().requires_grad_()
    got = smooth(leaf)
    assert torch.equal(got, want)
    weights = torch.arange(7.0)  # the first one 0
    first = torch.autograd.grad(got, leaf, weights, retain_graph=True)[0]
    again = torch.autograd.grad(got, leaf, weights)[0]
    assert torch.equal(first, again)
    assert torch.equal(scores, kept)
    assert not bool(first[0].any())
    torch.testing.assert_close(first.sum(1), torch.zeros(7), rtol=0, atol=1e-6)
    transposed = scores.T.contiguous().T.requires_grad_()  # another order in memory
    assert torch.equal(torch.autograd.grad(smooth(transposed), transposed, weights)[0], first)


@given(st.integers(8, 40) | st.integers(100, 120), st.sampled_from([1e-4, 1.0, 1e2, 1e4]), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_the_smooth_kth_largest_of_several_k_is_that_of_operations_in_float64(n, scale, seed):
    check_kth_largest(n, scale, seed)


def check_kth_largest(n: int, scale: float, seed: int) -> None:
    """The kernel, of whatever device, against operations in float64."""
    generator = torch.Generator().manual_seed(seed)
    scores, labels = torch.randn(5, n, generator=generator) * scale, torch.randint(n, (5,), generator=generator)
    scores[0, 3:], labels[0] = -torch.inf, 0  # the classes of label 0 and two others
    weights, results = torch.tensor([1.0, -2, 3]), []
    for dtype in (torch.float32, torch.float64):
        leaf = scores.to(dtype).requires_grad_()
        find = kernel("kth_largest", leaf) or kth_largest
        smooth, hard, top, log_softmax, *_ = find(leaf, labels, [1, 2, 5], torch.tensor(0.5, dtype=dtype), True)
        wanted = [(each[1:] @ weights.to(dtype)).sum() for each in (smooth, hard)]
        wanted += [wanted[0] + log_softmax.sum()]
        gradients = [torch.autograd.grad(each, leaf, retain_graph=True)[0].double() for each in wanted]
        results.append([each.detach().double() for each in (smooth, hard, top, log_softmax)] + gradients)
    torch.testing.assert_close(*results, rtol=1e-5, atol=2e-5 * (1 + scale / 10))


@given(st.integers(0, 10**6), st.integers(1, 200) | st.integers(1000, 1100), st.integers(1, 60), st.data())
@settings(max_examples=150, deadline=None)
def test_the_largest_columns_are_those_of_topk(seed, n, m, data):
    m = min(m, n)
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(data.draw(st.integers(0, 9)), n, generator=generator)
    kind = data.draw(st.sampled_from(["distinct", "ties", "sorted", "bad values", "equal"]))
    if kind == "ties":
        scores = scores.round()
    elif kind == "sorted":
        scores = scores.sort(1, descending=data.draw(st.booleans())).values
    elif kind == "bad values":
        bad = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0])
        chosen = torch.randint(4, scores.shape, generator=generator)
        scores = torch.where(torch.rand(scores.shape, generator=generator) < 0.1, bad[chosen], scores)
    elif kind == "equal":
        scores = torch.zeros_like(scores)
    index = torch.empty(len(scores), m, dtype=torch.int64)
    largest_of_rows(scores.numpy(), 0, len(scores), index.numpy())
    assert torch.equal(index, scores.sort(dim=1, descending=True, stable=True).indices[:, :m])


def test_top_m_by_the_kernel_is_that_of_pytorch(monkeypatch):
    logits, labels = torch.randn(200, 1000, generator=torch.Generator().manual_seed(3)), torch.arange(200)
    weights = torch.randn(200, 16, generator=torch.Generator().manual_seed(5))
    results = []
    for backend in ("numba", "torch"):
        monkeypatch.setenv(VARIABLE, backend)
        leaf = logits.clone().requires_grad_()
        scores = top_m(leaf, labels, 16)[0]
        results.append((scores.detach(), *torch.autograd.grad(scores, leaf, weights)))
    assert all(torch.equal(ours, pytorch) for ours, pytorch in zip(*results))


THRESHOLDS = {"lml": LML, "lapsum": LapSum, "capped_softmax": CappedSoftmax, "sparse_topk": SparseTopK}
THRESHOLDS["sparse_topk, p 4/3"] = lambda k, beta: SparseTopK(k, beta, p=4 / 3)
MASKS = THRESHOLDS | {"recall_surrogate": RecallSurrogate}


def compute(operator: PointwiseMasks, scores: Tensor, labels: Tensor, ks: list[int], softmax: bool) -> Tensor:
    """t (rows, J), or beside log softmax (rows, J + 1)."""
    find = kernel(operator.operation, scores) or masks
    beta = torch.tensor(operator.inverse_temperature, dtype=scores.dtype)
    return torch.cat(find(scores, labels, beta, ks, operator.family, softmax)[: 1 + softmax], dim=1)


def arguments_and_gradient(operator: PointwiseMasks, scores: Tensor, labels: Tensor, ks: list[int], softmax: bool):
    """t, and the gradient of its sum weighted by 1, 2, ... (rows, n)."""
    leaf = scores.clone().requires_grad_()
    t = compute(operator, leaf, labels, ks, softmax)
    return t.detach(), torch.autograd.grad((t * torch.arange(1, t.shape[1] + 1)).sum(), leaf)[0]


@pytest.mark.parametrize("name", MASKS)
@given(st.integers(2, 60) | st.integers(500, 600), st.data())
@settings(max_examples=60, deadline=None)
def test_masks_by_the_kernel_are_those_of_operations_in_float64(name, n, data):
    check_masks(name, n, data, [1, 3, 40])


def check_masks(name: str, n: int, data: st.DataObject, batches: list[int]) -> None:
    """The kernel of masks, of whatever device, against operations in float64, where rounding decides nothing."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6), "seed"))
    scale = data.draw(st.sampled_from([1e-4, 1.0, 10.0, 1e4]), "scale")
    scores = torch.randn(data.draw(st.sampled_from(batches)), n, generator=generator) * scale
    beta = data.draw(st.sampled_from([0.03125, 0.25, 1.0, 8.0]), "inverse temperature")
    masked = torch.rand(scores.shape, generator=generator) < data.draw(st.sampled_from([0.0, 0.0, 0.4]), "masked")
    masked[:, :2] = False
    scores = scores.masked_fill(masked, -torch.inf)
    ks = sorted(data.draw(st.sets(st.integers(1, min(n - 1, 32)), min_size=1, max_size=4), "ks"))
    # where theta is the least of the scores that take part, or any number between two, rounding decides
    ks = [k for k in ks if k < int((~masked).sum(1).min())] or [1]
    labels = torch.zeros(len(scores), dtype=torch.int64)
    operator = (MASKS | {"df_topk": DFTopK})[name](ks[-1], beta)
    softmax = data.draw(st.booleans(), "softmax")
    got, got_gradient = arguments_and_gradient(operator, scores, labels, ks, softmax)
    want, want_gradient = arguments_and_gradient(operator, scores.double(), labels, ks, softmax)
    rounding = 1e-6 * (1 + scale * beta)  # of the scores
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=4 * rounding)
    if name == "lml" and scale * beta > 10:
        return  # theta may lie so far from all scores that which of them are next to it is rounding
    far = (got_gradient.double() - want_gradient).abs() > beta * len(ks) * (5e-4 + rounding / 2)
    if name in ("capped_softmax", "sparse_topk", "sparse_topk, p 4/3"):  # next to a corner of f: on either side of it
        far = far[(far.sum(1) > 0) & ~near_a_corner(name, operator, scores, ks, rounding)]
    assert not bool(far.any())


def near_a_corner(name: str, operator: PointwiseMasks, scores: Tensor, ks: list[int], rounding: float) -> Tensor:
    """Whether some score's t is a corner of f, 0 or 1, to rounding: (rows,)."""
    t = operator._arguments(scores.double(), None, ks)  # (rows, J, n)
    corners = [0.0] if name == "capped_softmax" else [0.0, 1.0]
    return torch.stack([(t - corner).abs() < 10 * rounding for corner in corners]).any(0).flatten(1).any(1)


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_masks_by_the_kernel_in_several_threads_spoilt_rows_and_second_derivatives(name, softmax, monkeypatch):
    generator = torch.Generator().manual_seed(4)
    scores = 3 * torch.randn(500, 300, generator=generator)
    scores[3, 5], scores[4, 7], scores[5] = float("nan"), float("inf"), -float("inf")
    labels, operator = torch.randint(300, (500,), generator=generator), MASKS[name](5, 0.25)
    results = []
    threads = torch.get_num_threads()
    for number, backend in ((1, "numba"), (2, "numba"), (2, "torch")):
        torch.set_num_threads(number)
        monkeypatch.setenv(VARIABLE, backend)
        results.append(arguments_and_gradient(operator, scores, labels, [2, 3, 5], softmax))
    torch.set_num_threads(threads)
    for one, two in zip(results[0], results[1]):
        torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)
    for ours, pytorch in zip(results[1], results[2]):
        torch.testing.assert_close(ours[6:], pytorch[6:], rtol=1e-5, atol=2e-5)
        assert bool(ours[3:5].isnan().all())
        assert torch.equal(ours[5].isnan(), pytorch[5].isnan())
    monkeypatch.setenv(VARIABLE, "numba")
    leaf = scores[6:8].clone().requires_grad_()
    t = compute(operator, leaf, labels[6:8], [2], softmax)
    (first,) = torch.autograd.grad(t.sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), leaf)
    in_double = scores[6:8].double().requires_grad_()
    t = compute(operator, in_double, labels[6:8], [2], softmax)
    (want,) = torch.autograd.grad(t.sum(), in_double, create_graph=True)
    (want,) = torch.autograd.grad(want.square().sum(), in_double)
    torch.testing.assert_close(second.double(), want, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", MASKS)
def test_masks_have_the_same_bits_wherever_arrays_lie(name):
    """Room that is next to other room by chance took the loop of single numbers, whose sums round differently."""
    generator = torch.Generator().manual_seed(0)
    scores, labels, seen = torch.randn(3, 16, generator=generator), torch.arange(3), set()
    for _ in range(100):
        held = [torch.empty(int(torch.randint(1, 4000, ()))) for _ in range(3)]  # so that what follows lies elsewhere
        results = arguments_and_gradient(MASKS[name](5, 0.25), scores, labels, [2, 3, 5], True)
        seen.add(b"".join(each.numpy().tobytes() for each in results))
        del held
    assert len(seen) == 1


@st.composite
def losses(draw):
    """(arguments of TopKCrossEntropyLoss, logits float32, labels with some ignored, p_k per sample or None)."""
    n = draw(st.integers(7, 40) | st.integers(41, 200))
    batch, K = draw(st.sampled_from([1, 2, 65])), draw(st.integers(2, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    logits = torch.randn(batch, n, generator=generator) * draw(st.sampled_from([1e-4, 1e-2, 1.0, 10.0, 1e4]))
    if draw(st.booleans()):
        logits = logits.bfloat16().float()
    labels = torch.randint(n, (batch,), generator=generator)
    labels[torch.rand(batch, generator=generator) < draw(st.sampled_from([0.0, 0.3]))] = -100
    of_samples, of_classes = (torch.rand(rows, K, generator=generator).softmax(1) for rows in (batch, n))
    arguments = {
        "method": draw(st.sampled_from(["softsort", "neuralsort", "soft_topk"])),
        "p_k": draw(st.sampled_from([of_classes, of_classes[0]])),
        "num_classes": n,
        "m": draw(st.sampled_from([None, K + 2])),
        "top1_mode": draw(st.sampled_from(["sort", "sm", "smce"])),
        "reduction": draw(st.sampled_from(["none", "sum", "mean"])),
    }
    return arguments, logits, labels, draw(st.sampled_from([None, of_samples]))


@given(losses())
@settings(max_examples=100, deadline=None)
def test_the_losses_are_those_of_pytorch(problem):
    arguments, logits, labels, p_k = problem
    loss = TopKCrossEntropyLoss(**arguments)
    results = []
    with pytest.MonkeyPatch.context() as patch:
        for backend in ("numba", "torch"):
            patch.setenv(VARIABLE, backend)
            leaf = logits.clone().requires_grad_()
            value = loss(leaf, labels, p_k)
            results.append((value.detach(), *torch.autograd.grad(value.sum(), leaf)))
    (value, gradient), (want, want_gradient) = results
    # Of equal scores at the border of the m largest either path may keep another one.
    gradient, want_gradient = gradient.sort(1).values, want_gradient.sort(1).values
    torch.testing.assert_close(value, want, rtol=1e-5, atol=1e-5, equal_nan=True)
    largest = want_gradient.abs().amax(1, keepdim=True)
    # The gradient of log p where p is of the size of its rounding is whatever that is; the guard is at 1e-7.
    near_guard = 1e-3 if arguments["method"] == "soft_topk" else 1e-4
    assert bool(((gradient - want_gradient).abs() <= near_guard * largest + 1e-7).all()) or bool(want.isnan().any())


def test_an_ignored_sample_may_hold_anything():
    for top1_mode in ("sort", "sm", "smce"):
        loss = TopKCrossEntropyLoss("bitonic", num_classes=10, top1_mode=top1_mode)
        logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
        kept = logits[1:].clone().requires_grad_()
        logits[0] = float("nan")
        logits.requires_grad_()
        got, want = loss(logits, torch.tensor([-100, 1, 2])), loss(kept, torch.tensor([1, 2]))
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(torch.autograd.grad(got, logits)[0][1:], torch.autograd.grad(want, kept)[0])


@pytest.mark.parametrize("top1_mode", ["sm", "smce"])
def test_a_class_that_the_softmax_rules_out_has_a_finite_loss(top1_mode):
    logits = torch.tensor([[1e4, 0.0, -1e4, 3.0, 2.0]], requires_grad=True)
    loss = TopKCrossEntropyLoss("softsort", [0.5, 0.5], 5, top1_mode=top1_mode)
    value = loss(logits, torch.tensor([2]))
    torch.testing.assert_close(value.double(), loss(logits.double(), torch.tensor([2])), rtol=1e-6, atol=0)
    assert bool(torch.autograd.grad(value, logits)[0].isfinite().all())


def test_defaults_of_pytorch_do_not_matter():
    losses = [TopKCrossEntropyLoss("bitonic", num_classes=20, m=8), SmoothTopKLoss(3)]
    logits, labels = torch.randn(4, 20).requires_grad_(), torch.arange(4)
    want = [torch.autograd.grad(loss(logits, labels), logits)[0] for loss in losses]
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):  # the default device
            got = [torch.autograd.grad(loss(logits, labels), logits)[0] for loss in losses]
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(got, want)  # and of the same dtype and device; sums round by where tensors lie


def test_p_k_can_be_learned():
    p_k = torch.full((2, 3), 1 / 3, requires_grad=True)
    loss = TopKCrossEntropyLoss("softsort", [0.2, 0.3, 0.5], 6)
    assert bool(torch.autograd.grad(loss(torch.zeros(2, 6), torch.tensor([0, 5]), p_k), p_k)[0].any())


def _in_a_child(connection) -> None:
    # A batch small enough for PyTorch's own operations to stay in one thread: those of OpenMP hang after a fork.
    torch.set_num_threads(4)
    operator = RelaxedNetwork(networks.splitter_selection(1000, 5), 1.0)
    connection.send(operator.rank_probabilities(torch.zeros(30, 1000), torch.zeros(30, dtype=torch.long)).sum().item())


def test_a_forked_process_has_threads_of_its_own():
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    before = torch.get_num_threads()
    try:
        _in_a_child(sender)  # starts the threads of this process
    finally:
        torch.set_num_threads(before)
    want = receiver.recv()
    child = context.Process(target=_in_a_child, args=(sender,), daemon=True)
    child.start()
    try:
        assert receiver.poll(60), "the forked process hangs"
        assert receiver.recv() == pytest.approx(want)
    finally:
        child.kill()
        child.join()


def test_an_empty_batch():
    operator = RelaxedNetwork(networks.bitonic(10, 3), 1.0)
    scores = torch.empty(0, 10, requires_grad=True)
    column = operator.rank_probabilities(scores, torch.empty(0, dtype=torch.long))
    column.sum().backward()
    assert column.shape == (0, 3)
    assert scores.grad.shape == (0, 10)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("distribution", list(DISTRIBUTIONS))
def test_a_spoilt_sample_spoils_itself_only(bad, distribution):
    loss = TopKCrossEntropyLoss("splitter_selection", num_classes=30, distribution=distribution, reduction="none")
    clean = torch.randn(5, 30, generator=torch.Generator().manual_seed(0))
    logits, labels = clean.clone(), torch.arange(5)
    logits[2, 7] = bad
    kept = [0, 1, 3, 4]
    got, want = loss(logits, labels), loss(clean, labels)
    assert bool(got[2].isnan())
    assert torch.equal(got[kept], want[kept])


@pytest.mark.parametrize("distribution", list(DISTRIBUTIONS))
def test_classes_that_are_out_have_the_values_and_gradients_of_pytorch(distribution):
    operator = RelaxedNetwork(networks.splitter_selection(20, 4), 0.7, distribution)
    scores = torch.randn(9, 20, generator=torch.Generator().manual_seed(0))
    scores[:, [2, 3, 11]] = -torch.inf
    scores[4, 1:] = -torch.inf
    labels, weights = torch.arange(9), torch.randn(9, 4, generator=torch.Generator().manual_seed(1))
    got = column_and_gradients(operator, scores, labels, weights)
    want = column_and_gradients(operator, scores.double(), labels, weights.double())
    torch.testing.assert_close(got[0].double(), want[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got[1].double(), want[1], rtol=1e-3, atol=1e-4 * float(want[1].abs().max()))
    assert not bool(got[1][scores == -torch.inf].any())


def test_no_label_or_size_reaches_a_kernel_that_would_read_beyond_its_arrays():
    operator = RelaxedNetwork(networks.splitter_selection(20, 4), 1.0)
    for label in (-100, -1, 20, 2**40):
        with pytest.raises(ValueError, match="labels must lie in"):
            operator.rank_probabilities(torch.zeros(3, 20), torch.tensor([0, label, 0]))
    with pytest.raises(ValueError, match="built for n=20 scores, got 19"):
        operator.rank_probabilities(torch.zeros(3, 19), torch.zeros(3, dtype=torch.long))


@pytest.mark.parametrize("top1_mode", ["sort", "sm", "smce"])
@pytest.mark.parametrize(("method", "m"), [("neuralsort", 8), ("bitonic", None), ("splitter_selection", 8)])
def test_second_derivatives_are_those_of_float64(method, m, top1_mode):
    logits = torch.randn(4, 20, generator=torch.Generator().manual_seed(0))
    loss = TopKCrossEntropyLoss(method, num_classes=20, m=m, top1_mode=top1_mode)
    results = []
    for leaf in (logits.requires_grad_(), logits.detach().double().requires_grad_()):
        gradient = torch.autograd.grad(loss(leaf, torch.arange(4)), leaf, create_graph=True)[0]
        results.append((gradient.detach(), torch.autograd.grad(gradient.square().sum(), leaf)[0]))
    for got, want in zip(*results):
        torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("art_lambda", [0.1, 0.3, 0.75])
def test_other_art_lambdas(art_lambda):
    operator = RelaxedNetwork(networks.bitonic(10, 3), 1.0, art_lambda=art_lambda)
    scores, labels = torch.randn(4, 10, generator=torch.Generator().manual_seed(0)), torch.arange(4)
    got = column_and_gradients(operator, scores, labels, torch.ones(4, 3))
    want = column_and_gradients(operator, scores.double(), labels, torch.ones(4, 3).double())
    for ours, exact in zip(got, want):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-3, atol=1e-4)


def test_a_change_of_any_source_of_the_library_leaves_no_kernel_in_force(tmp_path):
    """The compiled code lies in a folder named by the sources: a changed formula finds none."""
    shutil.copytree(Path(topk_losses.__file__).parent, tmp_path / "topk_losses", ignore=shutil.ignore_patterns("*pyc*"))
    program = (
        "import torch, topk_losses; "
        "operator = topk_losses.RelaxedNetwork(topk_losses.bitonic(4, 1), 1.0, distribution='reciprocal'); "
        "print(float(operator.rank_probabilities(torch.arange(4.0).view(1, 4), torch.tensor([3]))))"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def computed():
        done = subprocess.run([sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
        return float(done.stdout)

    first = computed()
    assert computed() == first
    assert any((tmp_path / "cache").rglob("*.nbi"))
    formulas = tmp_path / "topk_losses" / "sigmoids.py"
    formulas.write_text(formulas.read_text().replace("1.0 / (2.0 + u)", "1.0 / (3.0 + u)"))
    assert computed() != first


def test_pickles_and_copies():
    operator = RelaxedNetwork(networks.splitter_selection(20, 4), 1.0)
    scores, labels = torch.randn(4, 20), torch.arange(4)
    want = operator.rank_probabilities(scores, labels)
    for twin in (copy.deepcopy(operator), pickle.loads(pickle.dumps(operator))):
        assert torch.equal(twin.rank_probabilities(scores, labels), want)


def test_is_the_default_on_the_cpu_and_can_be_turned_off(monkeypatch):
    scores = torch.zeros(1, 2)
    monkeypatch.delenv(VARIABLE)
    assert kernel("largest", scores) is not None
    assert kernel("largest", scores.double()) is None
    assert kernel("largest", scores, torch.ones((), requires_grad=True)) is None
    assert kernel("no such operation", scores) is None
    monkeypatch.setenv(VARIABLE, "torch")
    assert kernel("largest", scores) is None
    monkeypatch.setattr("topk_losses.kernels.is_installed", lambda package: False)
    monkeypatch.delenv(VARIABLE)
    assert kernel("largest", scores) is None
    monkeypatch.setenv(VARIABLE, "numba")
    with pytest.raises(ValueError, match="needs the package numba"):
        kernel("largest", scores)


def test_triton_is_taken_on_the_gpus_that_it_is_made_for(monkeypatch):
    monkeypatch.delenv(VARIABLE)
    installed = {"triton", "numba"}
    monkeypatch.setattr("topk_losses.kernels.is_installed", installed.__contains__)
    for capability, taken in (((7, 5), ""), ((8, 0), "cuda"), ((12, 0), "cuda")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert device_of_kernels(torch.device("cuda")) == taken
    assert device_of_kernels(torch.device("mps")) == ""
    installed.remove("triton")
    assert device_of_kernels(torch.device("cuda")) == ""
    installed.add("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setenv(VARIABLE, "triton")
    assert device_of_kernels(torch.device("cuda")) == "cuda"


def test_a_backend_that_cannot_run_on_a_device_is_told_before_any_loss_is(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for backend, device, sentence in (
        ("triton", "cpu", "needs tensors on cuda, got cpu"),
        ("numba", "meta", "needs tensors on cpu, got meta"),
        ("cuda", "cpu", "must be torch, numba or triton"),
    ):
        monkeypatch.setenv(VARIABLE, backend)
        with pytest.raises(ValueError, match=sentence):
            device_of_kernels(torch.device(device))


def doubled(x):
    return x + x


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Compile `doubled` anew, as in a new process; its code is kept in tmp_path."""
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    return lambda: numba_support.jit(doubled)


@pytest.mark.parametrize("damage", [b"", b"garbage", None], ids=["empty", "garbage", "truncated"])
@pytest.mark.parametrize("kind", ["nbi", "nbc"])
def test_kept_code_that_is_damaged_is_thrown_away(kept, tmp_path, kind, damage):
    assert kept()(2) == 4
    (file,) = tmp_path.rglob(f"*.{kind}")
    whole = file.read_bytes()
    file.write_bytes(whole[:-9] if damage is None else damage)
    again = kept()
    assert (again(2), sum(again.stats.cache_hits.values())) == (4, 0)
    third = kept()
    assert (third(2), sum(third.stats.cache_hits.values())) == (4, 1)


def test_code_that_cannot_be_kept_is_compiled_all_the_same(kept, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile.save", full)
    with pytest.warns(UserWarning, match=f"cannot be kept in {tmp_path}.*No space left"):
        assert kept()(2) == 4
