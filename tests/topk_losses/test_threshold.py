"""What is particular to the masks with a threshold: sums, nesting, real k, published identities, exact logarithms."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.functional import cross_entropy

from tests import reference
from tests.methods import RELAXED
from tests.topk_losses.test_sorts import THRESHOLDS, random_logits
from topk_losses import (
    METHODS,
    TopKCrossEntropyLoss,
    make_operator,
    soft_topk_values,
    topk_mask,
)
from topk_losses.loss import log_mixture
from topk_losses.transport import whiten_and_squash

EXACT = ("lml", "lapsum", "capped_softmax")


@pytest.mark.parametrize("name", THRESHOLDS)
@given(st.integers(2, 40), st.data())
@settings(max_examples=40, deadline=None)
def test_masks_sum_to_k_are_nested_and_equal_bisection(name, n, data):
    beta = data.draw(st.sampled_from([0.1, 1.0, 30.0]), "inverse temperature")
    scale = data.draw(st.sampled_from([1e-4, 1.0, 1e4]), "scale")
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    logits = random_logits(3, n, scale, dtype, seed=data.draw(st.integers(0, 99), "seed"))
    if data.draw(st.booleans(), "ties"):
        logits = (logits / scale).round() * scale
    taking_part = n
    if data.draw(st.booleans(), "masked classes"):
        taking_part = data.draw(st.integers(1, n))
        logits[:, taking_part:] = -torch.inf
    operator = THRESHOLDS[name](n, beta)
    wanted = sorted({1.0, *data.draw(st.lists(st.floats(0.05, taking_part), max_size=4)), float(taking_part)})
    masks = torch.stack([operator.mask(logits, k) for k in wanted], dim=1)  # (3, K, n)
    # rounding of the logits moves a mask by its slope, at most 3
    tolerance = torch.finfo(dtype).eps * (100 + 8 * scale * beta)
    assert bool((masks >= 0).all())
    assert bool((masks <= 1).all())
    assert bool((masks.diff(dim=1) >= -tolerance).all())
    torch.testing.assert_close(masks.sum(2), masks.new_tensor(wanted).expand(3, -1), rtol=0, atol=n * tolerance)
    if scale * beta <= 100:  # where theta lies in a gap, bisection ends anywhere within
        for mask, k in zip(masks.unbind(1), wanted):
            want = reference.threshold_mask(name, logits[:, :taking_part], k, beta)
            torch.testing.assert_close(mask[:, :taking_part].double(), want, rtol=0, atol=n * tolerance)
            assert not bool(mask[:, taking_part:].any()) or k == taking_part


@pytest.mark.parametrize("name", THRESHOLDS)
def test_a_real_k_and_a_temperature_receive_their_gradients(name):
    logits = random_logits(3, 7).requires_grad_()
    k = torch.tensor([0.7, 2.4, 5.5], dtype=torch.float64, requires_grad=True)
    beta = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)

    def mask(logits, k, beta):
        return THRESHOLDS[name](1, beta).mask(logits, k)

    assert gradcheck(mask, (logits, k, beta))
    assert gradgradcheck(mask, (logits, k, beta))
    (of_k,) = torch.autograd.grad(mask(logits, k, beta).sum(), k)
    torch.testing.assert_close(of_k, torch.ones_like(k))  # the sum is k


@pytest.mark.parametrize("method", RELAXED)
def test_topk_mask_is_the_sum_of_the_ranks_along_any_dimension(method):
    x = random_logits(5, 2 * 6).view(5, 6, 2)
    mask = topk_mask(x, 3, method, dim=1)
    assert mask.shape == x.shape
    P = make_operator(method, 6, 3)(x.movedim(1, -1))  # (5, 2, 3, 6)
    torch.testing.assert_close(mask, P.sum(2).movedim(-1, 1))
    values = soft_topk_values(x, 3, method, dim=1)
    torch.testing.assert_close(values, torch.einsum("abkn,anb->akb", P, x))
    if method == "recall_surrogate":  # the outer of its two sigmoids does not become steep
        return
    hard = x.topk(3, dim=1)
    beta = 1e7 if method in ("sinkhorn_sort", "soft_topk") else 1e6
    torch.testing.assert_close(soft_topk_values(x, 3, method, beta, dim=1), hard.values, rtol=1e-4, atol=1e-4)
    limit = torch.zeros_like(x).scatter(1, hard.indices, 1.0)
    torch.testing.assert_close(topk_mask(x, torch.tensor(3), method, beta, dim=1), limit, rtol=1e-4, atol=1e-4)


def test_topk_mask_takes_half_precision_and_refuses_what_does_not_fit():
    x = random_logits(2, 6, dtype=torch.float32)
    torch.testing.assert_close(topk_mask(x.bfloat16(), 2.5), topk_mask(x.bfloat16().float(), 2.5))
    torch.testing.assert_close(topk_mask(x, 2.5, "soft_topk").sum(1), torch.full((2,), 2.5))
    for k in (0.0, 6.5, torch.tensor([1.0, 7.0])):
        with pytest.raises(ValueError, match=r"k must lie in \(0, n=6\]"):
            topk_mask(x, k)
    with pytest.raises(ValueError, match="the number of scores n=6, got 7"):
        topk_mask(x, 7)
    with pytest.raises(ValueError, match="needs lml, lapsum, sparse_topk, capped_softmax or soft_topk, not softsort"):
        topk_mask(x, 2.5, "softsort")
    with pytest.raises(ValueError, match="no relaxed permutation matrix"):
        topk_mask(x, 2, "smooth_topk")
    with pytest.raises(ValueError, match="p must be 2 or 4/3, got 3"):
        THRESHOLDS["sparse_topk"](2, 0.1, p=3)
    out = x.clone()
    out[:, 3:] = -torch.inf
    torch.testing.assert_close(soft_topk_values(out, 2), soft_topk_values(x[:, :3], 2))


def test_capped_softmax_at_k_1_is_cross_entropy_whatever_the_logits():
    loss = TopKCrossEntropyLoss("capped_softmax", 1, inverse_temperature=1.0, top1_mode="sort", reduction="none")
    for scale in (0.1, 3, 30):
        logits, labels = random_logits(16, 12, scale).requires_grad_(), torch.arange(16) % 12
        got, want = loss(logits, labels), cross_entropy(logits, labels, reduction="none")
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
        gradients = [torch.autograd.grad(each.sum(), logits)[0] for each in (got, want)]
        torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-12)


def test_lapsum_at_k_1_is_softmax_while_no_class_has_half_of_the_mass():
    logits = random_logits(64, 6, 1.5)
    softmax, mask = logits.softmax(1), topk_mask(logits, 1, "lapsum", 1.0)
    spread = softmax.amax(1) <= 0.5
    assert 0 < int(spread.sum()) < 64
    torch.testing.assert_close(mask[spread], softmax[spread])
    assert bool(((mask - softmax).abs().amax(1) > 1e-6)[~spread].all())


def test_soft_topk_is_the_logistic_threshold_of_whitened_scores():
    """With two anchors the plan is a logistic function (the values of the transport itself are in test_sorts)."""
    logits = random_logits(5, 20, 3.0)
    for k in (1, 5, 19):
        want = reference.threshold_mask("lml", whiten_and_squash(logits), k, 20.0)
        torch.testing.assert_close(topk_mask(logits, k, "soft_topk", 10.0), want, rtol=1e-7, atol=1e-9)


def test_sparse_topk_at_k_1_is_sparsemax_and_has_k_entries_in_the_end():
    logits = random_logits(5, 20)
    mask = topk_mask(logits, 1, "sparse_topk", 1.0)
    ordered = logits.sort(1, descending=True).values
    support = 1 + torch.arange(1, 21) * ordered > ordered.cumsum(1)  # Martins and Astudillo 2016
    size = support.sum(1, keepdim=True)
    tau = (ordered.cumsum(1).gather(1, size - 1) - 1) / size
    torch.testing.assert_close(mask, (logits - tau).clamp(min=0))
    wide = random_logits(3, 1000)
    assert (topk_mask(wide, 10, "sparse_topk", 1e3) > 0).sum(1).tolist() == [10] * 3


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("top1_mode", ["sort", "sm", "smce"])
def test_the_loss_stays_in_logarithms_however_far_the_true_class_lies(method, top1_mode):
    """There -log mask = beta times the distance, with its gradient; a guard would end at 16.1 without one."""
    logits = torch.tensor([[0.0, -1, -2, -3, -200, -90]], dtype=torch.float32, requires_grad=True)
    settings = {"p_k": [0.5, 0, 0.5], "inverse_temperature": 1.0, "top1_mode": top1_mode}
    loss = TopKCrossEntropyLoss(method, **settings)
    value = loss(logits, torch.tensor([4]))
    (gradient,) = torch.autograd.grad(value, logits)
    assert float(value.detach()) > 190
    assert float(gradient[0, 4]) == pytest.approx(-1, abs=1e-4)
    assert float(gradient.sum()) == pytest.approx(0, abs=1e-4)  # the others go up by as much
    want = TopKCrossEntropyLoss(method, **settings)(logits.double(), torch.tensor([4]))
    torch.testing.assert_close(value.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", sorted(THRESHOLDS.keys() & METHODS.keys()))
def test_only_the_k_that_have_mass_are_evaluated(method, monkeypatch):
    loss, seen = TopKCrossEntropyLoss(method, [0.5, 0, 0, 0, 0.5], 12), []
    compute = loss.operator._arguments
    monkeypatch.setattr(loss.operator, "_arguments", lambda s, y, ks: seen.append(list(ks)) or compute(s, y, ks))
    loss(random_logits(3, 12), torch.arange(3))
    assert seen == [[5]]


@pytest.mark.parametrize("method", sorted(THRESHOLDS.keys() & METHODS.keys()))
def test_a_single_class_is_among_the_highest(method):
    logits = torch.tensor([[0.3], [-torch.inf]], dtype=torch.float64, requires_grad=True)
    operator = make_operator(method, 1, 1)
    for P in (operator(logits), operator.rank_probabilities(logits, torch.zeros(2, dtype=torch.int64))):
        assert P.flatten().tolist() == [1, 1]
        assert torch.autograd.grad(P.sum(), logits)[0].tolist() == [[0], [0]]


def test_a_mixture_of_logarithms_takes_any_shares():
    logs = torch.tensor([[-1000.0, -1.0, 300.0], [-2.0, -1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    shares = torch.tensor([[0.5, 0, 0], [0, 0, 0]], dtype=torch.float64, requires_grad=True)
    value = log_mixture(logs, shares, positive=False)
    assert value.tolist() == pytest.approx([math.log(0.5) - 1000, 0])
    of_logs, of_shares = torch.autograd.grad(value[0], (logs, shares))
    assert of_logs[0].tolist() == pytest.approx([1, 0, 0])
    assert bool(of_shares.isfinite().all())
    for positive in (True, False):
        mixture = log_mixture(logs, shares.detach() + 0.1, positive)
        torch.testing.assert_close(mixture, ((shares.detach() + 0.1).log() + logs.detach()).logsumexp(1))


@pytest.mark.parametrize(
    "options",
    [{"p_k": 5}, {"p_k": [0.5, 0.5], "top1_mode": "sort"}, {"p_k": [[0.5, 0.5], [0, 1]], "num_classes": 2}],
)
def test_a_method_with_zeros_wants_a_part_of_the_softmax(options):
    with pytest.raises(ValueError, match=r"sparse_topk gives exactly 0 .* P_K\(1\) > 0 with top1_mode 'sm' or 'smce'"):
        TopKCrossEntropyLoss("sparse_topk", **options)
    loss = TopKCrossEntropyLoss("sparse_topk", [0.5, 0, 0.5])
    logits, labels = random_logits(2, 6).requires_grad_(), torch.tensor([1, 2])
    with pytest.raises(ValueError, match="sparse_topk gives exactly 0"):
        loss(logits, labels, p_k=torch.tensor([[0.5, 0.5], [0, 1.0]]))
    far = logits.detach().index_fill(1, labels, -8.0).requires_grad_()
    (gradient,) = torch.autograd.grad(loss(far, labels), far)  # the mask is 0 there, and the softmax's gradient stays
    assert float(make_operator("sparse_topk", 6, 3).mask(far).detach()[0, 1]) == 0
    assert float(gradient[0, 1]) < -0.1
