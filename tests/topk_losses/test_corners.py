"""What a review found wrong once: corners of masks, one live class, equal and far scores."""

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import topk_losses
from tests.methods import DETERMINISTIC, RELAXED, p_k_of, random_batch, value_and_gradient
from topk_losses import METHODS, TopKCrossEntropyLoss, make_loss, topk_mask
from topk_losses.kernels import VARIABLE, is_installed

INF = math.inf
BACKENDS = [("torch", torch.float64), ("torch", torch.float32)]
BACKENDS += [("numba", torch.float32)] if is_installed("numba") else []


@pytest.fixture(params=BACKENDS, ids=lambda each: f"{each[0]}-{each[1]}")
def dtype(request, monkeypatch):
    monkeypatch.setenv(VARIABLE, request.param[0])
    return request.param[1]


def computed(method, p_k, logits, labels, dtype, **settings):
    """The mean loss, and its gradient."""
    loss = TopKCrossEntropyLoss(method, p_k, **settings)
    return value_and_gradient(loss, torch.tensor(logits, dtype=dtype), torch.tensor(labels))


@pytest.mark.parametrize("method", RELAXED)
def test_where_k_exceeds_the_classes_that_take_part_all_of_them_are_within_it(method, dtype):
    if method == "recall_surrogate":
        return  # whose masks are never 1
    value, gradient = computed(method, [0.5, 0, 0.5], [[1, 0, -INF, -INF]], [0], dtype)
    softmax = torch.tensor([1.0, 0.0], dtype=dtype).softmax(0)
    want = -torch.log(0.5 + 0.5 * softmax[0])
    torch.testing.assert_close(value, want, rtol=0, atol=2e-6)
    slope = 0.5 * softmax[0] * softmax[1] / (0.5 + 0.5 * softmax[0])
    torch.testing.assert_close(gradient, torch.stack([-slope, slope, *torch.zeros(2, dtype=dtype)]).unsqueeze(0))


@pytest.mark.parametrize("method", RELAXED)
def test_one_such_row_spoils_no_gradient_of_the_batch(method, dtype):
    logits = [[1, 0, -INF, -INF], [1, -INF, -INF, -INF], [0.3, 0.1, -0.2, 0.7]]
    _, gradient = computed(method, [0.4, 0.2, 0.4], logits, [0, 0, 2], dtype)
    assert bool(gradient.isfinite().all())
    assert not bool(gradient[:2, 2:].any())
    assert bool(gradient[2].any())


@pytest.mark.parametrize("method", ["soft_topk", "sinkhorn_sort"])
def test_one_live_class_has_no_gradient(method, dtype):
    value, gradient = computed(method, [0.5, 0.5], [[1, -INF, -INF, -INF]], [0], dtype)
    assert float(value) == pytest.approx(0, abs=1e-4)  # all the others are as far as whitening lets them be
    assert float(gradient.abs().max()) < 1e-30


def test_a_mask_of_exactly_one_has_no_slope(dtype):
    _, gradient = computed("sparse_topk", [0.5, 0.5], [[4, 0, -3]], [1], dtype, inverse_temperature=1.0)
    # theta = -1: the mask is 1 at t = 5 and t = 1, and what is left is the softmax's part
    logits = torch.tensor([[4.0, 0, -3]], dtype=dtype)
    _, want = value_and_gradient(lambda s: -torch.log(0.5 * s.softmax(1)[0, 1] + 0.5), logits)
    torch.testing.assert_close(gradient, want, rtol=1e-5, atol=1e-6)


@given(st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_sparse_rows_have_the_gradient_of_float64(seed):
    """4,000 rows of a corner in every second one, once by the kernel and once by operations in float64."""
    generator = torch.Generator().manual_seed(seed)
    logits, labels = torch.randint(-4, 5, (40, 6), generator=generator).float(), torch.arange(40) % 6
    loss = TopKCrossEntropyLoss("sparse_topk", [0.5, 0.5], inverse_temperature=1.0, reduction="sum")
    _, got = value_and_gradient(loss, logits, labels)
    _, want = value_and_gradient(loss, logits.double(), labels)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gap", [0.0, 30.0, 80.0, 100.0, 300.0, 1e4])
@pytest.mark.parametrize("method", ["lml", "lapsum"])
def test_two_scores_share_the_slope_however_far_apart(method, gap, dtype):
    """theta lies in the middle, so that -log mask of the lower one is log(1 + exp(gap / 2)), or its like."""
    value, gradient = computed(method, 1, [[gap, 0.0]], [1], dtype, top1_mode="sort", inverse_temperature=1.0)
    want = math.log1p(math.exp(-gap / 2)) + gap / 2 if method == "lml" else gap / 2 + math.log(2)
    assert float(value) == pytest.approx(want, rel=1e-6)
    size = 0.5 / (1 + math.exp(-gap / 2)) if method == "lml" else 0.5
    assert gradient[0].tolist() == pytest.approx([size, -size], rel=1e-5)


def test_a_far_score_that_is_not_asked_for_leaves_the_slopes_alone(dtype):
    logits = [[500.0, 300.0, 0.0, -1.0]]
    _, gradient = computed("lml", 2, logits, [2], dtype, top1_mode="sort", inverse_temperature=1.0)
    # theta is the middle of 300 and of log(exp 0 + exp -1)
    lower = torch.tensor([0.0, -1.0]).softmax(0)[0].item()
    assert gradient[0].tolist() == pytest.approx([0, 0.5, 0.5 * lower - 1, 0.5 * (1 - lower)], rel=1e-4)


def test_where_scores_lie_far_apart_theta_is_the_kth(dtype):
    """What was taken off the scores and added again once rounded theta below the k-th, which lost its slope."""
    logits, _ = random_batch(4000, 8, 100.0, dtype)
    top, places = logits.topk(5, dim=1)
    apart = (top[:, :-1] - top[:, 1:] > 20).all(1)
    logits, places = logits[apart], places[apart]
    assert len(logits) > 100
    loss = TopKCrossEntropyLoss("capped_softmax", 2, inverse_temperature=1.0, top1_mode="sort")
    _, gradient = value_and_gradient(loss, logits, places[:, 4])
    want = torch.zeros_like(logits).scatter(1, places[:, 1:2], 1).scatter(1, places[:, 4:], -1) / len(logits)
    torch.testing.assert_close(gradient, want, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("method", ["sinkhorn_sort", "soft_topk"])
def test_transports_order_scores_of_any_size(method, dtype):
    mask = topk_mask(torch.tensor([[1e19, 3e18, 0.0, -1e19]], dtype=dtype), 2, method, 100.0)[0]
    assert mask.tolist() == sorted(mask.tolist(), reverse=True)
    assert float(mask[0] - mask[3]) > 0.9


@pytest.mark.parametrize(
    "method", [name for name in DETERMINISTIC if "smooth" not in name and METHODS[name].inverse_temperature]
)
@pytest.mark.parametrize("masked", [1, 6])
def test_a_temperature_learns_beside_classes_that_take_no_part(method, masked, dtype):
    logits, labels = random_batch(4, 8, dtype=dtype)
    beta = torch.tensor(METHODS[method].inverse_temperature, dtype=dtype, requires_grad=True)
    loss = make_loss(method, p_k_of(method, 3), inverse_temperature=beta)
    logits[:, :masked] = -INF
    loss(logits, labels.clamp(min=masked)).backward()
    assert bool(beta.grad.isfinite())


def test_two_scores_that_are_whitened_get_a_warning():
    with pytest.warns(RuntimeWarning, match="sinkhorn_sort whitens the scores.*Sort three or more"):
        TopKCrossEntropyLoss("sinkhorn_sort", [0.5, 0.5], 10, m=2)


def test_the_version_is_a_number_or_said_to_be_unknown():
    assert re.fullmatch(r"\d+\.\d+.*|unknown", topk_losses.__version__)
