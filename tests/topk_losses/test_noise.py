"""What draws noise: perturbed indicators and noised losses, against the same draws and the authors' package."""

import math
from functools import partial

import pytest
import pytopk
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy, one_hot

from tests import reference
from tests.methods import STOCHASTIC, Bound, p_k_of, random_batch, value_and_gradient
from topk_losses import NoisedTopKLoss, PerturbedTopK, TopKCrossEntropyLoss, make_loss
from topk_losses.numerics import guarded_log


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def seeded(loss, seed=0):
    """A loss with a generator that begins anew."""
    loss.generator = generator(seed)
    return loss


@pytest.mark.parametrize("method", STOCHASTIC)
def test_noise_comes_from_the_generator_alone(method):
    logits, labels = random_batch(8, 9)
    loss = seeded(make_loss(method, p_k_of(method, 3), reduction="none"))
    state = torch.get_rng_state()
    first = loss(logits, labels)
    second = loss(logits, labels)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first, second)
    assert torch.equal(seeded(loss)(logits, labels), first)
    loss.generator.manual_seed(0)
    assert torch.equal(loss(logits, labels), first)


# Perturbed indicators.


def indicators_of(logits, beta, draws, k):
    """The noise (batch, draws, n) of a generator at 0, and who has each rank then, (batch, draws, k, n)."""
    noise = torch.randn(len(logits), draws, logits.shape[1], dtype=torch.float64, generator=generator())
    order = (logits.unsqueeze(1) * beta + noise).argsort(dim=2, descending=True)[:, :, :k]
    return noise, one_hot(order, logits.shape[1]).double()


@given(st.integers(2, 20), st.data())
@settings(max_examples=20, deadline=None)
def test_perturbed_rows_are_means_of_one_hot_rows_and_gradients_covariances_over_the_draws(n, data):
    k = data.draw(st.integers(1, n))
    beta = data.draw(st.sampled_from([0.1, 1.0, 30.0]), "inverse temperature")
    logits, labels = random_batch(3, n, data.draw(st.sampled_from([1e-4, 1.0, 1e4])))
    operator = Bound(PerturbedTopK(20), k, beta)
    weight = torch.randn(3, k, n, dtype=torch.float64)
    _, gradient = value_and_gradient(lambda s: operator(s, generator=generator()) * weight, logits)
    P = operator(logits, generator=generator())
    noise, indicators = indicators_of(logits, beta, 20, k)
    torch.testing.assert_close(P, indicators.mean(1))
    torch.testing.assert_close(P.sum(2), torch.ones(3, k, dtype=torch.float64))
    column = operator.rank_probabilities(logits, labels, generator=generator())
    torch.testing.assert_close(column, P[torch.arange(3), :, labels])  # of few numbers all are drawn at once
    mass = operator.topk_mass(logits, one_hot(labels, n).double(), generator=generator())
    torch.testing.assert_close(mass, column.sum(1))
    indicators -= indicators.mean(1, keepdim=True)
    want = beta * torch.einsum("bsrj,brj,bsn->bn", indicators, weight, noise) / 19
    torch.testing.assert_close(gradient, want)  # 0 where all draws agree


def surrogate(logits, beta, draws, k):
    """P of these draws, (batch, k, n), whose derivative by logits and beta is their covariance with the noise."""
    noise, indicators = indicators_of(logits.detach(), beta.detach(), draws, k)
    is_masked = logits == -math.inf
    scaled = (logits.masked_fill(is_masked, 0) - logits.detach().amax(1, keepdim=True)) * beta
    moved = (scaled - scaled.detach()).masked_fill(is_masked, 0)  # (batch, n), which is 0
    change = (noise * moved.unsqueeze(1)).sum(2).view(len(logits), draws, 1, 1)
    mean = indicators.mean(1)
    return mean + ((indicators - mean.unsqueeze(1)) * change).sum(1) / (draws - 1)


LABELS = random_batch(4, 7, seed=3)[1]
MASS = random_batch(4, 7, seed=2)[0].softmax(1)
P_K = torch.tensor([[0.5, 0.2, 0.3]] * 4)


def loss_of(P, logits, labels):
    return reference.topk_cross_entropy(P, logits, labels, P_K, "sm")


# what is made of the operator, and the same of P
USES = {
    "matrix": (lambda o, s, **given: o.permutation_matrix(s, **given), lambda P, s: P),
    "column": (
        lambda o, s, **given: o.rank_probabilities(s, LABELS, **given),
        lambda P, s: P[torch.arange(4), :, LABELS],
    ),
    "masses": (
        lambda o, s, **given: o.topk_mass(s, MASS, **given),
        lambda P, s: torch.einsum("bkn,bn->b", P, MASS),
    ),
    "indicator": (lambda o, s, **given: o.mask(s, **given), lambda P, s: P.sum(1)),
    "loss": (lambda o, s, **given: loss_by(o, **given)(s, LABELS), lambda P, s: loss_of(P, s, LABELS)),
    "loss of a set": (lambda o, s, **given: loss_by(o, soft_labels="any", **given)(s, MASS), lambda P, s: of_set(P, s)),
}


def of_set(P, logits):
    within = (P.cumsum(1) * MASS.unsqueeze(1)).sum(2).clamp(max=1)  # (4, 3)
    within[:, 0] = (logits.softmax(1) * MASS).sum(1)
    return -guarded_log((within * P_K).sum(1))


def loss_by(operator, generator, **given):
    loss = TopKCrossEntropyLoss(operator.operator, P_K[0], reduction="none", **given)
    loss.generator = generator
    return loss


@pytest.mark.parametrize("num_masked", [0, 2])
@pytest.mark.parametrize("draws", [2, 3, 20])
@pytest.mark.parametrize("use", USES)
def test_gradients_of_few_draws_are_covariances_however_the_operator_is_used(use, draws, num_masked):
    """Those of masked classes, which are far away, would drown a learned temperature's."""
    is_free = ~one_hot(LABELS, 7).any(0)  # (7,)
    masked = is_free.nonzero().squeeze(1)[:num_masked]
    logits = random_batch(4, 7)[0].index_fill(1, masked, -math.inf).requires_grad_()
    beta = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    call, by_definition = USES[use]
    got = call(Bound(PerturbedTopK(draws), 3), logits, inverse_temperature=beta, generator=generator())
    want = by_definition(surrogate(logits, beta, draws, 3), logits)
    torch.testing.assert_close(got, want)
    weights = torch.linspace(1, 2, got.numel(), dtype=torch.float64).view_as(got)
    gradients = [torch.autograd.grad((value * weights).sum(), (logits, beta)) for value in (got, want)]
    assert bool(gradients[1][0].any())
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("own_generator", [True, False])
@pytest.mark.parametrize(("method", "m"), [(method, m) for method in STOCHASTIC for m in (None, 8)])
def test_the_backward_pass_has_the_noise_of_the_forward_pass(method, m, own_generator):
    """The loss is linear in the labels' mass: with the same noise, its gradient is the loss of each class."""
    logits, labels = random_batch(100, 100)  # many enough pairs of a row and a class to be worked out in parts
    torch.manual_seed(0)
    source = generator() if own_generator else torch.default_generator
    build = partial(make_loss, method, p_k_of(method, 3), m=m, reduction="sum")
    loss = build()
    smooth = build(label_smoothing=0.1)
    loss.generator = smooth.generator = source if own_generator else None
    mass = logits.softmax(1).requires_grad_()
    value = loss(logits, mass)
    before = source.get_state()
    (gradient,) = torch.autograd.grad(value, mass)
    torch.testing.assert_close((gradient * mass).sum(), value)
    assert torch.equal(source.get_state(), before)
    value = smooth(logits.requires_grad_(), labels)
    before = source.get_state()
    value.backward()
    assert torch.equal(source.get_state(), before)


def test_perturbed_column_and_matrix_estimate_the_normal_probability_of_two_classes():
    # two classes: P(the first is first) = Phi(beta (a - b) / sqrt 2), which its mean and its gradient estimate
    logits = torch.tensor([[0.6, -0.2]], dtype=torch.float64)
    beta = 1.3
    draws = 200_000  # more than are drawn at once
    label = torch.tensor([0])
    normal = torch.distributions.Normal(0.0, 1.0)
    point = torch.tensor(beta * 0.8 / math.sqrt(2), dtype=torch.float64)
    slope = normal.log_prob(point).exp() * beta / math.sqrt(2)
    operator = Bound(PerturbedTopK(draws), 1, beta)
    seed = {"generator": generator()}
    for first in (lambda s: operator.rank_probabilities(s, label, **seed), lambda s: operator(s, **seed)[:, :, 0]):
        value, gradient = value_and_gradient(first, logits)
        assert abs(value.item() - normal.cdf(point).item()) < 0.005
        torch.testing.assert_close(gradient, torch.tensor([[slope, -slope]]), rtol=0, atol=0.02)


def test_without_noise_perturbed_indicators_are_hard():
    logits, labels = random_batch(6, 9)
    loss = TopKCrossEntropyLoss("perturbed_topk", [0.5, 0, 0.5], inverse_temperature=1e9, reduction="none")
    inside = (logits >= logits.topk(3, dim=1).values[:, -1:]).gather(1, labels.unsqueeze(1)).squeeze(1)
    softmax = (-cross_entropy(logits, labels, reduction="none")).exp()
    torch.testing.assert_close(loss(logits, labels), -guarded_log(0.5 * softmax + 0.5 * inside))


# Noised losses.


@pytest.mark.parametrize(("k", "epsilon", "draws"), [(1, 1.0, 5), (5, 0.3, 3), (8, 2.0, 1)])
def test_noised_losses_equal_the_authors_package(k, epsilon, draws, monkeypatch):
    logits, labels = random_batch(16, 9, dtype=torch.float32)
    drawn = generator(5)
    noise = torch.stack([torch.randn(16, 9, generator=drawn) for _ in range(draws)], dim=2)
    counts = [5, 10, 3, 7, 8, 1, 2, 30, 4]
    common = {"inverse_temperature": 1 / epsilon, "num_samples": draws}
    for ours, theirs in (
        (NoisedTopKLoss(k, **common), pytopk.BalNoisedTopK(k, epsilon, draws)),
        (
            NoisedTopKLoss(k, **common, class_counts=counts, max_margin=0.7, scale=3),
            pytopk.ImbalNoisedTopK(k, epsilon, 0.7, counts, scale=3, n_sample=draws),
        ),
    ):
        got = value_and_gradient(seeded(ours, 5), logits, labels)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "randn", lambda *shape, **_: noise)  # what their package draws
            want = value_and_gradient(theirs, logits, labels)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_noised_losses_keep_the_digits_of_float64():
    loss = make_loss("imbalanced_noised_topk", 2, inverse_temperature=1e30)
    loss.class_counts = torch.tensor([3, 7, 11, 20])
    logits = torch.tensor([[0.0, 0.1, 0.2, 0.3]], dtype=torch.float64)
    assert float(loss(logits, torch.tensor([2]))) == pytest.approx((3 / 11) ** 0.25 + 0.1 - 0.2, rel=1e-14)


@pytest.mark.parametrize("method", ["noised_topk", "imbalanced_noised_topk"])
def test_distributions_over_classes_cost_one_draw(method):
    logits, _ = random_batch(8, 9)
    loss = make_loss(method, 3, reduction="none")
    losses = torch.stack([seeded(loss)(logits, torch.full((8,), j)) for j in range(9)], dim=1)
    uniform = seeded(loss)(logits, torch.full_like(logits, 1 / 9))
    torch.testing.assert_close(uniform, losses.mean(1))
    smooth = seeded(make_loss(method, 3, label_smoothing=0.2, reduction="none"))(logits, torch.zeros(8).long())
    torch.testing.assert_close(smooth, 0.8 * losses[:, 0] + 0.2 * losses.mean(1))
