"""The operators by ranks: against their definitions, their limits, and enumeration of the draws."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.functional import cross_entropy, logsigmoid

from tests.topk_losses.test_loss import random_batch
from topk_losses import DFTopK, PerturbedTopK, RecallSurrogate, TopKCrossEntropyLoss, make_operator, topk_mask
from topk_losses.operator import guarded_log


def df_topk_by_definition(logits, k, beta):
    n = logits.shape[1]
    ordered = logits.sort(dim=1, descending=True).values
    following = ordered[:, k : k + 1] if k < n else torch.full_like(ordered[:, :1], -math.inf)
    return torch.sigmoid(beta * (logits - (ordered[:, k - 1 : k] + following) / 2))


def recall_surrogate_by_definition(logits, k, beta):
    masks = torch.empty_like(logits)
    for b, row in enumerate(logits):
        for i, own in enumerate(row):
            rank = 1 + sum(torch.sigmoid(beta * (other - own)) for j, other in enumerate(row) if j != i)
            masks[b, i] = torch.sigmoid(k - rank)
    return masks


DEFINITIONS = {"df_topk": df_topk_by_definition, "recall_surrogate": recall_surrogate_by_definition}


@pytest.mark.parametrize("name", DEFINITIONS)
@given(st.integers(2, 12), st.data())
@settings(max_examples=40, deadline=None)
def test_masks_equal_the_definition_and_are_nested(name, n, data):
    beta = data.draw(st.sampled_from([0.1, 1.0, 30.0]), "inverse temperature")
    scale = data.draw(st.sampled_from([1e-4, 1.0, 1e4]), "scale")
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    logits, labels = random_batch(3, n, scale, dtype, seed=data.draw(st.integers(0, 99), "seed"))
    if data.draw(st.booleans(), "ties"):
        logits = (logits / scale).round() * scale
    operator = make_operator(name, n, n, beta)
    masks = operator(logits).cumsum(1)  # (3, n, n)
    tolerance = torch.finfo(dtype).eps * n * (10 + 4 * scale * beta)
    for k in range(1, n + 1):
        want = DEFINITIONS[name](logits.double(), k, beta)
        torch.testing.assert_close(masks[:, k - 1].double(), want, rtol=0, atol=tolerance)
        torch.testing.assert_close(topk_mask(logits, k, name, beta).double(), want, rtol=0, atol=tolerance)
    column = operator.rank_probabilities(logits, labels).cumsum(1)
    torch.testing.assert_close(column, masks[torch.arange(3), :, labels], rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_losses_are_exact_logarithms_of_the_mixture(name):
    logits, labels = random_batch(8, 9)
    p_k = [0.3, 0, 0.5, 0, 0.2]
    loss = TopKCrossEntropyLoss(name, p_k, top1_mode="sort", inverse_temperature=0.7, reduction="none")
    masks = [p * DEFINITIONS[name](logits, k, 0.7) for k, p in enumerate(p_k, start=1)]
    want = -sum(masks).gather(1, labels.unsqueeze(1)).squeeze(1).log()
    torch.testing.assert_close(loss(logits, labels), want)
    far = torch.zeros(1, 20)
    far[0, 0] = -200.0
    far.requires_grad_()
    loss = TopKCrossEntropyLoss(name, 5, top1_mode="sort")
    loss(far, torch.tensor([0])).backward()
    assert far.grad.isfinite().all()


def test_df_topk_is_hard_in_the_limit_and_one_for_all_classes():
    logits, _ = random_batch(5, 9)
    hard = torch.zeros_like(logits).scatter(1, logits.topk(3, dim=1).indices, 1.0)
    torch.testing.assert_close(DFTopK(3, 1e6).mask(logits), hard)
    torch.testing.assert_close(DFTopK(9, 0.25).mask(logits), torch.ones_like(logits))
    middle = DFTopK(3, 0.25).mask(logits).sort(dim=1, descending=True).values[:, 2:4].sum(1)
    torch.testing.assert_close(middle, torch.ones_like(middle))  # the two scores beside the threshold


def test_the_recall_surrogate_tends_to_a_sigmoid_of_the_rank():
    logits, labels = random_batch(6, 9)
    true = logits.gather(1, labels.unsqueeze(1))
    rank = 1 + (logits > true).sum(1)
    got = TopKCrossEntropyLoss("recall_surrogate", 4, top1_mode="sort", inverse_temperature=1e6, reduction="none")
    torch.testing.assert_close(got(logits, labels), -logsigmoid(4.0 - rank.double()))


def test_the_published_recall_loss_is_one_minus_the_mean_mask():
    # RS@k: 1 - mean over k of sigmoid((k - r) / tau1), tau1 = 1, r with tau2 = .01, on cosine similarities
    similarities = torch.rand(5, 16, dtype=torch.float64) * 2 - 1
    labels = torch.arange(5)
    ks = (1, 2, 4, 8, 16)
    column = RecallSurrogate(16, 100.0).rank_probabilities(similarities, labels).cumsum(1)
    true = similarities.gather(1, labels.unsqueeze(1))
    others = torch.sigmoid((similarities - true) / 0.01).scatter(1, labels.unsqueeze(1), 0.0)
    rank = 1 + others.sum(1)
    want = 1 - torch.stack([torch.sigmoid(k - rank) for k in ks]).mean(0)
    torch.testing.assert_close(1 - column[:, [k - 1 for k in ks]].mean(1), want)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_gradients_of_masks_and_columns(name):
    logits, labels = random_batch(3, 6)
    logits.requires_grad_()
    beta = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    for of in (lambda x, b: make_operator(name, 6, 4, b).mask(x), lambda x, b: make_operator(name, 6, 4, b)(x)):
        assert gradcheck(of, (logits, beta))
        assert gradgradcheck(of, (logits, beta))
    assert gradcheck(lambda x, b: make_operator(name, 6, 4, b).rank_probabilities(x, labels), (logits, beta))


def seeded(operator, seed=0):
    operator.generator = torch.Generator().manual_seed(seed)
    return operator


@given(st.integers(2, 20), st.data())
@settings(max_examples=30, deadline=None)
def test_perturbed_rows_are_means_of_one_hot_rows(n, data):
    k = data.draw(st.integers(1, n))
    beta = data.draw(st.sampled_from([0.1, 1.0, 30.0]), "inverse temperature")
    logits, labels = random_batch(3, n, data.draw(st.sampled_from([1e-4, 1.0, 1e4])), torch.float64)
    P = seeded(PerturbedTopK(k, beta, 20))(logits)
    noise = torch.randn(3, 20, n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    order = (logits.unsqueeze(1) * beta + noise).argsort(dim=2, descending=True)[:, :, :k]  # (3, draws, k)
    want = torch.nn.functional.one_hot(order, n).double().mean(1)
    torch.testing.assert_close(P, want)
    torch.testing.assert_close(P.sum(2), torch.ones(3, k, dtype=torch.float64))
    column = seeded(PerturbedTopK(k, beta, 20)).rank_probabilities(logits, labels)
    torch.testing.assert_close(column, P[torch.arange(3), :, labels])  # of few numbers all are drawn at once
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("topk_losses.ranks.AT_ONCE", {"cpu": 3 * n * 7})  # 7, 7 and 6 draws
        column = seeded(PerturbedTopK(k, beta, 20)).rank_probabilities(logits, labels)
    draws = torch.Generator().manual_seed(0)
    noise = torch.cat([torch.randn(3, d, n, dtype=torch.float64, generator=draws) for d in (7, 7, 6)], dim=1)
    rank = (logits.unsqueeze(1) * beta + noise).argsort(dim=2, descending=True).argsort(dim=2)  # (3, draws, n)
    of_label = rank[torch.arange(3), :, labels]  # (3, draws)
    torch.testing.assert_close(column, torch.stack([(of_label == r).double().mean(1) for r in range(k)], dim=1))


def test_perturbed_column_and_matrix_estimate_the_normal_probability_of_two_classes():
    # two classes: P(the first is first) = Phi(beta (a - b) / sqrt 2), which its mean and its gradient estimate
    logits = torch.tensor([[0.6, -0.2]], dtype=torch.float64, requires_grad=True)
    beta, draws, label = 1.3, 200_000, torch.tensor([0])
    normal = torch.distributions.Normal(0.0, 1.0)
    point = torch.tensor(beta * 0.8 / math.sqrt(2), dtype=torch.float64)
    slope = normal.log_prob(point).exp() * beta / math.sqrt(2)
    for value in (
        seeded(PerturbedTopK(1, beta, draws)).rank_probabilities(logits.expand(1, 2), label)[0, 0],
        seeded(PerturbedTopK(1, beta, draws))(logits)[0, 0, 0],
    ):
        (gradient,) = torch.autograd.grad(value, logits)
        assert abs(value.item() - normal.cdf(point).item()) < 0.005
        torch.testing.assert_close(gradient, torch.tensor([[slope, -slope]]), rtol=0, atol=0.02)


def test_perturbed_gradients_are_covariances_over_the_draws():
    logits, labels = random_batch(3, 7)
    logits.requires_grad_()
    weight = torch.randn(3, 4, 7, dtype=torch.float64)
    operator = seeded(PerturbedTopK(4, 2.0, 10))
    (got,) = torch.autograd.grad((operator(logits) * weight).sum(), logits)
    noise = torch.randn(3, 10, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    order = (logits.detach().unsqueeze(1) * 2 + noise).argsort(dim=2, descending=True)[:, :, :4]
    indicators = torch.nn.functional.one_hot(order, 7).double()  # (3, draws, 4, 7)
    indicators -= indicators.mean(1, keepdim=True)
    want = 2 * torch.einsum("bsrj,brj,bsn->bn", indicators, weight, noise) / 9
    torch.testing.assert_close(got, want)
    hot = torch.nn.functional.one_hot(labels, 7).double()
    of_mass = seeded(PerturbedTopK(4, 2.0, 10)).rank_probabilities(logits, hot)
    torch.testing.assert_close(of_mass, operator_column(logits, labels))


def test_perturbed_gradients_fade_where_all_draws_agree():
    logits = torch.tensor([[3.0, 0, -3]], dtype=torch.float64, requires_grad=True)
    for value in (
        seeded(PerturbedTopK(2, 30.0, 10))(logits)[0, :, 0].sum(),
        seeded(PerturbedTopK(2, 30.0, 10)).rank_probabilities(logits, torch.tensor([1])).sum(),
    ):
        assert value.item() == pytest.approx(1)
        torch.testing.assert_close(torch.autograd.grad(value, logits)[0], torch.zeros_like(logits))


def operator_column(logits, labels):
    return seeded(PerturbedTopK(4, 2.0, 10))(logits)[torch.arange(3), :, labels]


def test_perturbed_losses_want_a_softmax_and_repeat_with_their_generator():
    logits, labels = random_batch(6, 9)
    with pytest.raises(ValueError, match="perturbed_topk gives exactly 0"):
        TopKCrossEntropyLoss("perturbed_topk", 5)
    loss = TopKCrossEntropyLoss("perturbed_topk", [0.5, 0, 0.5], reduction="none")
    loss.generator = torch.Generator().manual_seed(3)
    first = loss(logits, labels)
    assert not torch.equal(loss(logits, labels), first)
    loss.generator.manual_seed(3)
    assert torch.equal(loss(logits, labels), first)
    loss.generator = torch.Generator().manual_seed(3)
    state = torch.get_rng_state()
    assert torch.equal(loss(logits, labels), first)
    assert torch.equal(torch.get_rng_state(), state)  # nobody else's noise was used
    cold = TopKCrossEntropyLoss("perturbed_topk", [0.5, 0, 0.5], inverse_temperature=1e9, reduction="none")
    inside = (logits >= logits.topk(3, dim=1).values[:, -1:]).gather(1, labels.unsqueeze(1)).squeeze(1)
    ce = cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(cold(logits, labels), -guarded_log(0.5 * (-ce).exp() + 0.5 * inside))


@pytest.mark.parametrize("name", ["df_topk", "recall_surrogate", "perturbed_topk"])
def test_a_broken_sample_touches_no_other(name):
    logits, labels = random_batch(4, 8)
    logits[1, 2], logits[2, 3], logits[3, 5] = math.nan, math.inf, -math.inf
    labels[3] = 1
    losses = TopKCrossEntropyLoss(name, [0.5, 0, 0.5], reduction="none")(logits, labels)
    assert losses.isnan().tolist() == [False, True, True, False]
