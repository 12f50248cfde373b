"""What is particular to the transports: whitening, groups of ranks, convergence, and the warning."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import reference
from tests.methods import Bound, random_logits, value_and_gradient
from topk_losses import SinkhornSort, SoftSort, SoftTopK, SortedSoftTopK, TopKCrossEntropyLoss, topk_mask
from topk_losses.whitening import whiten_and_squash

OPERATORS = [SinkhornSort, SoftTopK, SortedSoftTopK]


@given(st.integers(2, 14), st.data())
@settings(max_examples=30, deadline=None)
def test_the_sorted_form_has_a_target_point_per_top_rank(n, data):
    k = data.draw(st.integers(1, n))
    logits = random_logits(3, n, seed=n)
    sizes = torch.tensor([1.0] * k + [n - k] * (k < n))
    want = reference.sinkhorn(logits, torch.linspace(1, 0, len(sizes)), sizes, 10.0)[:, :k]  # (batch, k, n)
    operator = Bound(SortedSoftTopK(), k, 10.0)
    torch.testing.assert_close(operator(logits), want, rtol=1e-6, atol=1e-8)
    labels = torch.arange(3) % n
    column = want[torch.arange(3), :, labels]
    torch.testing.assert_close(operator.rank_probabilities(logits, labels), column, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("factor", [0.01, 1, 100])
@pytest.mark.parametrize("kind", ["normal", "outlier", "ties", "clusters", "tiny", "heavy"])
def test_converges_for_all_kinds_of_scores_each_as_if_it_were_alone(operator, factor, kind):
    logits = random_logits(32, 100, dtype=torch.float32)
    if kind == "outlier":
        logits[::2, 0] += 50
    elif kind == "ties":
        logits = logits.bfloat16().float()
    elif kind == "clusters":
        logits = logits.round() + 1e-4 * random_logits(32, 100, dtype=torch.float32, seed=1)
    elif kind == "tiny":
        logits[1::4] *= 1e-3
    elif kind == "heavy":
        logits = logits.exp()
    beta = operator.default_inverse_temperature * factor
    operator = Bound(operator(), 5, beta)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Each is held to the tolerance of its precision.
        P = operator(logits)
        exact = operator(logits.double())
    assert operator.operator.convergence_error(logits, beta) <= 2e-3  # a rounding of the logits at the hardest
    torch.testing.assert_close(P.sum(2), torch.ones(32, 5), atol=1e-2, rtol=0)
    for row in range(0, 32, 5):
        alone = operator(logits[row : row + 1].double())[0]
        torch.testing.assert_close(alone, exact[row], rtol=1e-9, atol=1e-12)


def test_warns_each_time_that_the_tolerance_is_missed():
    operator = SinkhornSort(tolerance=1e-12, max_iterations=1)
    logits = random_logits(4, 30)
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="did not converge within 1 iterations"):
            operator.permutation_matrix(logits, 3, 1e4)
    assert operator.convergence_error(logits, 1e4) > 1e-12
    assert 0 < SinkhornSort().convergence_error(logits) < 1e-9
    assert SoftSort().convergence_error(logits) == 0
    with pytest.warns(RuntimeWarning, match="SinkhornSort.* whitens the scores.*Sort three or more"):
        TopKCrossEntropyLoss("sinkhorn_sort", [0.5, 0.5], m=2, num_classes=10)


@pytest.mark.parametrize("gap", [1e-3, 0.1, 2.0, 1e4])
@pytest.mark.parametrize("masked", [0, 3])
def test_one_class_below_equal_ones_is_told_from_them(gap, masked):
    """The mean depth of the others is 0, but the unit of depth is not."""
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


def test_the_slope_of_whitening_at_equal_scores_is_bounded():
    for operator in OPERATORS:
        leaf = torch.zeros(1, 50, requires_grad=True)
        (gradient,) = torch.autograd.grad(operator().rank_probabilities(leaf, torch.tensor([3]), 5)[0, 0].log(), leaf)
        assert 1 < float(gradient.abs().max()) < 1000


@pytest.mark.parametrize("method", ["sinkhorn_sort", "soft_topk"])
def test_scores_of_any_size_are_ordered(method):
    for dtype in (torch.float32, torch.float64):
        mask = topk_mask(torch.tensor([1e19, 3e18, 0.0, -1e19], dtype=dtype), 2, method, 100.0)
        assert mask.tolist() == sorted(mask.tolist(), reverse=True)
        assert float(mask[0] - mask[3]) > 0.9


@pytest.mark.parametrize("n", [30, 300])  # from some hundred target points on LU works in blocks
def test_a_spoilt_sample_ends_no_solver(n):
    logits = random_logits(3, n, dtype=torch.float32)
    logits[1, 4] = float("nan")
    columns, gradient = value_and_gradient(
        Bound(SinkhornSort(), 2, 100.0).rank_probabilities, logits, torch.tensor([0, 1, 2])
    )
    assert columns.isnan().all(1).tolist() == [False, True, False]
    assert bool(columns[::2].isfinite().all())
    assert bool(gradient[::2].isfinite().all())


def test_of_many_samples_none_misses_the_tolerance():
    logits = random_logits(600, 100)
    labels = torch.zeros(600, dtype=torch.int64)
    for rows, tolerance in ((logits.float(), 2e-5), (logits[:60], 1e-9)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            SinkhornSort().rank_probabilities(rows, labels[: len(rows)], 5)
        assert 0 < SinkhornSort().convergence_error(rows) <= tolerance


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("m", [2, 16, 1000])
def test_whitening_is_that_of_the_page(m, scale):
    """Of the m largest scores of 1,000, and of one near the mean: with 16 most rows have a class that counts less."""
    logits = random_logits(64, 1000, scale)
    candidates = torch.cat([logits.topk(m - 1, dim=1).values, logits[:, :1]], dim=1)
    depth = candidates.amax(1, keepdim=True) - candidates
    weight = torch.ones_like(depth)
    for _ in range(5):
        mean = (weight * depth).sum(1, keepdim=True) / weight.sum(1, keepdim=True)
        variance = (weight * (depth - mean).square()).sum(1, keepdim=True) / weight.sum(1, keepdim=True) + 0.1**2
        unit = (3 * mean).clamp(min=0.1)
        share = (depth / unit).clamp(min=1)
        weight = share**-4
    moved = torch.minimum(depth, unit) * (1 + 0.25 * share.log())
    want = torch.sigmoid((mean - moved) / variance.sqrt())
    torch.testing.assert_close(whiten_and_squash(candidates), want)
    if m == 16 and scale >= 1:
        plain = (candidates - candidates.mean(1, keepdim=True)) / candidates.std(1, keepdim=True, correction=0)
        is_other = ((want - plain.sigmoid()).abs() > 0.01).any(1)
        assert float(is_other.double().mean()) > 0.5
