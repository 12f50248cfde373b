"""What a review found wrong once: corners of masks, one live class, equal and far scores; compiled steps; sentences."""

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

import topk_losses
from tests.methods import RELAXED
from tests.topk_losses.test_loss import random_batch
from topk_losses import METHODS, RelaxedNetwork, TopKCrossEntropyLoss, bitonic, make_loss, topk_mask
from topk_losses.kernels import VARIABLE, is_installed, kernel
from topk_losses.methods import TOP1

INF = math.inf
BACKENDS = [("torch", torch.float64), ("torch", torch.float32)]
BACKENDS += [("numba", torch.float32)] if is_installed("numba") else []


@pytest.fixture(params=BACKENDS, ids=lambda each: f"{each[0]}-{each[1]}")
def dtype(request, monkeypatch):
    monkeypatch.setenv(VARIABLE, request.param[0])
    return request.param[1]


def value_and_gradient(method, p_k, logits, labels, dtype, **settings):
    leaf = torch.tensor(logits, dtype=dtype, requires_grad=True)
    value = TopKCrossEntropyLoss(method, p_k, **settings)(leaf, torch.tensor(labels))
    return value.detach(), torch.autograd.grad(value, leaf)[0]


@pytest.mark.parametrize("method", sorted(set(RELAXED) - {"recall_surrogate"}))  # whose masks are never 1
def test_where_k_exceeds_the_classes_that_take_part_all_of_them_are_within_it(method, dtype):
    value, gradient = value_and_gradient(method, [0.5, 0, 0.5], [[1, 0, -INF, -INF]], [0], dtype)
    softmax = torch.tensor([1.0, 0.0], dtype=dtype).softmax(0)
    want = -torch.log(0.5 + 0.5 * softmax[0])
    torch.testing.assert_close(value, want, rtol=0, atol=2e-6)
    slope = 0.5 * softmax[0] * softmax[1] / (0.5 + 0.5 * softmax[0])
    torch.testing.assert_close(gradient, torch.stack([-slope, slope, *torch.zeros(2, dtype=dtype)]).unsqueeze(0))


@pytest.mark.parametrize("method", RELAXED)
def test_one_such_row_spoils_no_gradient_of_the_batch(method, dtype):
    logits = [[1, 0, -INF, -INF], [1, -INF, -INF, -INF], [0.3, 0.1, -0.2, 0.7]]
    _, gradient = value_and_gradient(method, [0.4, 0.2, 0.4], logits, [0, 0, 2], dtype)
    assert bool(gradient.isfinite().all())
    assert not bool(gradient[:2, 2:].any())
    assert bool(gradient[2].any())


@pytest.mark.parametrize("method", ["soft_topk", "sinkhorn_sort"])
def test_one_live_class_has_no_gradient(method, dtype):
    value, gradient = value_and_gradient(method, [0.5, 0.5], [[1, -INF, -INF, -INF]], [0], dtype)
    assert float(value) == pytest.approx(0, abs=1e-4)  # all the others are as far as whitening lets them be
    assert float(gradient.abs().max()) < 1e-30


def test_a_mask_of_exactly_one_has_no_slope(dtype):
    _, gradient = value_and_gradient("sparse_topk", [0.5, 0.5], [[4, 0, -3]], [1], dtype, inverse_temperature=1.0)
    # theta = -1: the mask is 1 at t = 5 and t = 1, and what is left is the softmax's part
    logits = torch.tensor([[4.0, 0, -3]], dtype=dtype, requires_grad=True)
    softmax = logits.softmax(1)[0, 1]
    (want,) = torch.autograd.grad(-torch.log(0.5 * softmax + 0.5), logits)
    torch.testing.assert_close(gradient, want, rtol=1e-5, atol=1e-6)


@given(st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_sparse_rows_have_the_gradient_of_float64(seed):
    """4,000 rows of a corner in every second one, once by the kernel and once by operations in float64."""
    generator = torch.Generator().manual_seed(seed)
    logits, labels = torch.randint(-4, 5, (40, 6), generator=generator).float(), torch.arange(40) % 6
    results = []
    for each in (logits, logits.double()):
        leaf = each.requires_grad_()
        loss = TopKCrossEntropyLoss("sparse_topk", [0.5, 0.5], inverse_temperature=1.0, reduction="sum")
        results.append(torch.autograd.grad(loss(leaf, labels), leaf)[0].double())
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gap", [0.0, 30.0, 80.0, 100.0, 300.0, 1e4])
@pytest.mark.parametrize("method", ["lml", "lapsum"])
def test_two_scores_share_the_slope_however_far_apart(method, gap, dtype):
    """theta lies in the middle, so that -log mask of the lower one is log(1 + exp(gap / 2)), or its like."""
    settings = {"top1_mode": "sort", "inverse_temperature": 1.0}
    value, gradient = value_and_gradient(method, [1.0], [[gap, 0.0]], [1], dtype, **settings)
    want = math.log1p(math.exp(-gap / 2)) + gap / 2 if method == "lml" else gap / 2 + math.log(2)
    assert float(value) == pytest.approx(want, rel=1e-6)
    size = 0.5 / (1 + math.exp(-gap / 2)) if method == "lml" else 0.5
    assert gradient[0].tolist() == pytest.approx([size, -size], rel=1e-5)


def test_a_far_score_that_is_not_asked_for_leaves_the_slopes_alone(dtype):
    _, gradient = value_and_gradient(
        "lml", {2: 1.0}, [[500.0, 300.0, 0.0, -1.0]], [2], dtype, top1_mode="sort", inverse_temperature=1.0
    )
    # theta is the middle of 300 and of log(exp 0 + exp -1)
    lower = torch.tensor([0.0, -1.0]).softmax(0)[0].item()
    assert gradient[0].tolist() == pytest.approx([0, 0.5, 0.5 * lower - 1, 0.5 * (1 - lower)], rel=1e-4)


@pytest.mark.parametrize("method", ["lml", "lapsum", "capped_softmax", "sparse_topk", "soft_topk"])
@given(st.integers(1, 30), st.data())
@settings(max_examples=30, deadline=None)
def test_masks_of_equal_scores_sum_to_k(method, n, data):
    k = data.draw(st.integers(1, n))
    score = data.draw(st.floats(-1e3, 1e3, width=32))
    mask = topk_mask(torch.full((1, n), score), k, method)
    rounding = 1e-6 * n * (1 + abs(score) / 4)  # of the scores times the inverse temperature, .25 at most
    assert float(mask.sum()) == pytest.approx(k, rel=0, abs=rounding)


def test_transports_order_scores_of_any_size(dtype):
    scores = torch.tensor([[1e19, 3e18, 0.0, -1e19]], dtype=dtype)
    for method in ("sinkhorn_sort", "soft_topk"):
        mask = topk_mask(scores, 2, method, 100.0)[0]
        assert mask.tolist() == sorted(mask.tolist(), reverse=True)
        assert float(mask[0] - mask[3]) > 0.9


def test_noised_losses_keep_the_digits_of_float64():
    loss = make_loss("imbalanced_noised_topk", 2, inverse_temperature=1e30)
    loss.class_counts = torch.tensor([3, 7, 11, 20])
    logits = torch.tensor([[0.0, 0.1, 0.2, 0.3]], dtype=torch.float64)
    assert float(loss(logits, torch.tensor([2]))) == pytest.approx((3 / 11) ** 0.25 + 0.1 - 0.2, rel=1e-14)


@pytest.mark.parametrize("method", RELAXED)
@pytest.mark.parametrize("m", [16, 10])
def test_m_beyond_the_classes_keeps_all_of_them(method, m):
    logits, labels = random_batch(8, 10)
    got = TopKCrossEntropyLoss(method, [0.5, 0, 0.5], m=m)(logits, labels)
    torch.testing.assert_close(got, TopKCrossEntropyLoss(method, [0.5, 0, 0.5], 10, m=10)(logits, labels))


def test_two_scores_that_are_whitened_get_a_warning():
    with pytest.warns(RuntimeWarning, match="sinkhorn_sort whitens the scores.*Sort three or more"):
        TopKCrossEntropyLoss("sinkhorn_sort", [0.5, 0.5], 10, m=2)


@pytest.mark.parametrize("method", METHODS)
def test_a_compiled_step_is_the_eager_one_at_every_batch_size(method):
    """One graph, which calls the kernels: aot_eager traces forward and backward, and runs what it traced."""
    p_k = 1 if method in TOP1 else 5 if METHODS[method].loss else {1: 0.5, 5: 0.5}
    loss = make_loss(method, p_k, 12)
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for batch in (4, 7, 9):
        logits, labels = random_batch(batch, dtype=torch.float32)
        results = []
        for call in (loss, compiled):
            torch.manual_seed(0)
            leaf = logits.clone().requires_grad_()
            value = call(leaf, labels)
            results.append((value.detach(), torch.autograd.grad(value, leaf)[0]))
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-5)  # compiled, the transport is not looked at


@pytest.mark.skipif(not is_installed("numba"), reason="there are no kernels on the CPU")
@pytest.mark.parametrize("method", ["splitter_selection", "lapsum", "subset_topk"])
def test_a_compiled_graph_holds_the_kernel(method, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    torch._dynamo.reset()
    loss, graphs = TopKCrossEntropyLoss(method, {1: 0.5, 5: 0.5}, 12), []

    def backend(graph, _):
        graphs.append(graph.code)
        return graph

    torch.compile(loss, fullgraph=True, backend=backend)(*random_batch(dtype=torch.float32))
    assert re.search(r"topk_losses\.\w+_cpu", graphs[0])


def test_a_kernel_is_an_operator_of_pytorchs():
    logits, labels = random_batch(dtype=torch.float32)
    if kernel("masks", logits) is None:
        pytest.skip("there are no kernels on this machine")
    op = torch.ops.topk_losses.masks_cpu
    for family in ("logistic", "linear", "ranks"):
        inputs = (logits.requires_grad_(), labels, torch.tensor(0.3), [1, 4], family, True)
        torch.library.opcheck(op, inputs, test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        (torch.eye(4, dtype=torch.bool), TypeError, r"a column per class is .* soft_labels='any', a set of answers"),
        (torch.eye(4, dtype=torch.int64), ValueError, r"distribution \(labels.float\(\)\)"),
        (torch.zeros(4), ValueError, r"for class indices convert with labels.long\(\)"),
        (torch.zeros(4, 1, dtype=torch.int64), ValueError, r"labels.squeeze\(-1\)"),
        (torch.zeros(4, dtype=torch.int32), TypeError, r"convert with labels.long\(\)"),
    ],
)
def test_labels_of_another_kind_are_told_what_to_become(labels, error, message):
    with pytest.raises(error, match=message):
        TopKCrossEntropyLoss(p_k=[0.5, 0.5])(torch.zeros(4, 4), labels)


def test_other_sentences_and_what_is_shown():
    with pytest.raises(ValueError, match="p_k reaches rank 5, but only 3 scores are sorted"):
        TopKCrossEntropyLoss()(torch.zeros(2, 3), torch.tensor([0, 1]))
    with pytest.raises(
        TypeError, match=r"TopKCrossEntropyLoss.__init__\(\) got an unexpected keyword argument 'rduce'"
    ):
        TopKCrossEntropyLoss(rduce="sum")
    with pytest.raises(ValueError, match="art_lambda applies to the distribution logistic_phi, not to logistic"):
        RelaxedNetwork(bitonic(4, 2), 1.0, "logistic", 0.3)
    assert "inverse_temperature=0.25" in repr(TopKCrossEntropyLoss("lapsum", inverse_temperature=0.25))
    assert "inverse_temperature=auto" in repr(TopKCrossEntropyLoss("lapsum", inverse_temperature="auto"))
    assert re.fullmatch(r"\d+\.\d+.*|unknown", topk_losses.__version__)
    logits, labels = random_batch()
    sharp = make_loss("capped_softmax", 1, inverse_temperature=1.0, top1_mode="sort")
    torch.testing.assert_close(sharp(logits, labels), cross_entropy(logits, labels))
