"""What is particular to the transports: groups of ranks, convergence, and the warning."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import reference
from tests.methods import random_batch
from topk_losses import SinkhornSort, SoftTopK, SortedSoftTopK, TopKCrossEntropyLoss
from topk_losses.transport import whiten_and_squash


def random_logits(batch, n, dtype=torch.float64, seed=0):
    return random_batch(batch, n, 1.0, dtype, seed)[0]


@given(st.integers(2, 14), st.data())
@settings(max_examples=30, deadline=None)
def test_the_sorted_form_has_an_anchor_per_top_rank(n, data):
    k = data.draw(st.integers(1, n))
    logits = random_logits(3, n, seed=n)
    sizes = torch.tensor([1.0] * k + [n - k] * (k < n))
    want = reference.sinkhorn(logits, torch.linspace(1, 0, len(sizes)), sizes, 10.0)[:, :k]  # (batch, k, n)
    operator = SortedSoftTopK(k, 10.0)
    torch.testing.assert_close(operator(logits), want, rtol=1e-6, atol=1e-8)
    labels = torch.arange(3) % n
    column = want[torch.arange(3), :, labels]
    torch.testing.assert_close(operator.rank_probabilities(logits, labels), column, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "operator", [SinkhornSort(5, 100.0), SoftTopK(5, 10.0), SortedSoftTopK(5, 10.0)], ids=["n", "2", "6"]
)
@pytest.mark.parametrize("factor", [0.01, 1, 100])
@pytest.mark.parametrize("kind", ["normal", "outlier", "ties", "clusters", "tiny", "heavy"])
def test_converges_in_float32_for_all_kinds_of_scores(operator, factor, kind):
    logits = random_logits(32, 100, dtype=torch.float32)
    if kind == "outlier":
        logits[:, 0] += 50
    elif kind == "ties":
        logits = logits.bfloat16().float()
    elif kind == "clusters":
        logits = logits.round() + 1e-4 * random_logits(32, 100, dtype=torch.float32, seed=1)
    elif kind == "tiny":
        logits = logits * 1e-3
    elif kind == "heavy":
        logits = logits.exp()
    fresh = type(operator)(5, operator.inverse_temperature * factor)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        P = fresh(logits)
    assert fresh.check_convergence() <= 2e-3  # a rounding of the logits at the hardest
    torch.testing.assert_close(P.sum(2), torch.ones(32, 5), atol=1e-2, rtol=0)


def test_warns_each_time_that_the_tolerance_is_missed():
    operator = SinkhornSort(3, inverse_temperature=1e4, tolerance=1e-12, max_iterations=1)
    logits = random_logits(4, 30)
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="did not converge within 1 iterations"):
            operator(logits)
    with pytest.warns(RuntimeWarning, match="did not converge"):
        assert operator.check_convergence() > 1e-12
    assert operator.check_convergence() == 0  # told
    loss = TopKCrossEntropyLoss("sinkhorn_sort", [0.5, 0.2, 0.3], 30)
    loss(logits, torch.arange(4))
    assert 0 < loss.check_convergence() < 1e-9
    assert TopKCrossEntropyLoss("softsort", [0.5, 0.5], 30).check_convergence() == 0


def test_the_slope_of_whitening_is_bounded_at_equal_scores():
    logits = torch.zeros(1, 50, dtype=torch.float64, requires_grad=True)
    for operator in (SinkhornSort(5, 100.0), SoftTopK(5, 10.0), SortedSoftTopK(5, 10.0)):
        (gradient,) = torch.autograd.grad(operator.rank_probabilities(logits, torch.tensor([3]))[0, 0].log(), logits)
        assert 1 < float(gradient.abs().max()) < 1000


@pytest.mark.parametrize("gap", [1e-3, 0.1, 2.0, 1e4])
@pytest.mark.parametrize("masked", [0, 3])
def test_one_class_below_equal_ones_is_told_from_them(gap, masked):
    """The mean depth of the others is 0: its unit was next to nothing, all classes were one, and gradients NaN."""
    row = torch.tensor([-torch.inf] * masked + [1.0] * 12 + [1.0 - gap])
    found = []
    for dtype in (torch.float32, torch.float64):
        leaf = row.to(dtype, copy=True).unsqueeze(0).requires_grad_()
        x = whiten_and_squash(leaf)
        (gradient,) = torch.autograd.grad(x[0, -1], leaf)
        assert bool(x[0, -2] - x[0, -1] > min(gap, 0.3))
        assert bool(gradient[0, -1] > 0)
        taking_part = leaf[0, masked:].detach().double()
        torch.testing.assert_close(x[0, masked:].double(), reference.whitened(taking_part), rtol=1e-5, atol=1e-6)
        found.append(gradient.double())
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-6)


def test_second_derivatives_of_whitening_beside_classes_that_take_no_part():
    found = []
    for dtype in (torch.float32, torch.float64):
        leaf = random_logits(64, 10).to(dtype)
        leaf[:, :3] = -torch.inf
        x = whiten_and_squash(leaf.requires_grad_())
        towards = torch.arange(10, dtype=dtype).sin()
        (gradient,) = torch.autograd.grad((x * towards).sum(), leaf, create_graph=True)
        found.append(torch.autograd.grad((gradient * towards.cos()).sum(), leaf)[0].double())
    assert bool(found[1].any())
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("n", [30, 700])  # from some hundred anchors on LU works in blocks
def test_a_spoilt_sample_ends_no_solver(n):
    logits = random_logits(3, n, dtype=torch.float32)
    logits[1, 4] = float("nan")
    leaf = logits.requires_grad_()
    columns = SinkhornSort(2, 100.0).rank_probabilities(leaf, torch.tensor([0, 1, 2]))
    columns.sum().backward()
    assert bool(columns[1].isnan().all())
    assert bool(columns[::2].isfinite().all())
    assert bool(leaf.grad[::2].isfinite().all())


def test_float32_and_float64_calls_are_each_held_to_their_own_tolerance():
    operator, logits = SinkhornSort(3, 100.0), random_logits(4, 30)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        operator(logits.float())
        operator(logits)


@pytest.mark.parametrize(
    "operator", [SinkhornSort(3, 100.0), SoftTopK(3, 10.0), SortedSoftTopK(3, 10.0)], ids=["n", "2", "4"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_sample_is_solved_as_if_it_were_alone(operator, dtype):
    logits = random_logits(16, 40, dtype=dtype)
    logits[::2, 0] += 20  # one class far above all others in every second sample
    logits[1::4] *= 1e-3
    together = operator(logits)
    for row in range(16):
        tolerance = 1e-5 if dtype == torch.float32 else 1e-12
        torch.testing.assert_close(operator(logits[row : row + 1])[0], together[row], rtol=tolerance, atol=1e-7)


def test_of_many_samples_none_misses_the_tolerance():
    """Steps from next to the solution once met rounding alone, and spoilt the samples behind."""
    logits, labels = random_logits(3000, 100, dtype=torch.float32), torch.zeros(3000, dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SinkhornSort(5, 100.0).rank_probabilities(logits, labels)
