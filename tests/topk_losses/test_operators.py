"""The relaxed operators against their textbook definitions, gradcheck, hard limits and each other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from tests import reference
from topk_losses import (
    DISTRIBUTIONS,
    RELAXATIONS,
    NeuralSort,
    RelaxedNetwork,
    SinkhornSort,
    SoftSort,
    SoftTopK,
    make_operator,
)
from topk_losses.distributions import DISTRIBUTIONS as FAMILIES
from topk_losses.networks import bitonic, odd_even, splitter_selection

CONSTRUCTIONS = {"odd_even": odd_even, "bitonic": bitonic, "splitter_selection": splitter_selection}
NAMES = ("neuralsort", "softsort", "sinkhorn_sort", "soft_topk", *CONSTRUCTIONS)


def build(name, n, k, beta, distribution="logistic_phi"):
    """The operator and its oracle: logits -> (batch, k, n)."""
    if name == "neuralsort":
        return NeuralSort(k, beta), lambda s: reference.neuralsort(s, beta)[:, :k]
    if name == "softsort":
        return SoftSort(k, beta), lambda s: reference.softsort(s, beta)[:, :k]
    if name == "sinkhorn_sort":
        anchors, sizes = torch.linspace(1, 0, n), torch.ones(n)
        return SinkhornSort(k, beta), lambda s: reference.sinkhorn(s, anchors, sizes, beta)[:, :k]
    if name == "soft_topk":
        anchors, sizes = torch.linspace(1, 0, k + 1), torch.tensor([1.0] * k + [n - k])
        return SoftTopK(k, beta), lambda s: reference.sinkhorn(s, anchors, sizes, beta)[:, :k]
    network = CONSTRUCTIONS[name](n, k)
    oracle = lambda s: reference.network(s, network.layers, distribution, beta, 0.5)[:, :k]  # noqa: E731
    return RelaxedNetwork(network, beta, distribution), oracle


def random_logits(batch, n, scale=1.0, dtype=torch.float64, seed=0):
    return torch.randn(batch, n, dtype=dtype, generator=torch.Generator().manual_seed(seed)) * scale


def true_class(P, labels):
    return P[torch.arange(len(P)), :, labels]


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_equals_its_definition(name, data):
    n = data.draw(st.integers(2, 12), "n")
    k = data.draw(st.integers(1, n - 1), "k")
    # plain Sinkhorn, the oracle of the transports, would need millions of iterations at 20
    hardest = 10.0 if name in ("sinkhorn_sort", "soft_topk") else 20.0
    beta = data.draw(st.sampled_from([0.1, 1.0, 5.0, hardest]), "inverse temperature")
    scale = data.draw(st.sampled_from([1e-4, 1.0, 30.0]), "scale")
    logits = random_logits(3, n, scale, seed=data.draw(st.integers(0, 99), "seed"))
    if data.draw(st.booleans(), "ties"):
        logits = (logits / scale).round() * scale
        logits[:, 0] = logits.amax(1) + scale  # scores that are all equal have no whitened form
    labels = torch.arange(3) % n
    operator, oracle = build(name, n, k, beta)
    want = oracle(logits)
    torch.testing.assert_close(operator.permutation_matrix(logits), want, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(
        operator.rank_probabilities(logits, labels), true_class(want, labels), rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("name", CONSTRUCTIONS)
def test_networks_with_every_distribution_equal_dense_matrices(name, distribution):
    operator, oracle = build(name, 11, 4, 2.0, distribution)
    logits, labels = random_logits(5, 11), torch.tensor([0, 3, 5, 9, 10])
    want = oracle(logits)
    torch.testing.assert_close(operator.permutation_matrix(logits), want)
    torch.testing.assert_close(operator.rank_probabilities(logits, labels), true_class(want, labels))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_slope_is_the_derivative_of_alpha(distribution):
    family = FAMILIES[distribution]
    d = torch.tensor([-30.0, -2, -0.3, -0.05, -1e-3, 1e-3, 0.05, 0.3, 2, 30], dtype=torch.float64, requires_grad=True)
    alpha = family.alpha(d, 3.0, 0.5)
    (want,) = torch.autograd.grad(alpha.sum(), d)
    torch.testing.assert_close(family.slope(d.detach(), alpha.detach(), 3.0, 0.5), want)
    assert float(family.alpha(torch.zeros(1), 3.0, 0.5)) == 0.5
    torch.testing.assert_close(alpha + alpha.flip(0), torch.ones_like(alpha))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("name", CONSTRUCTIONS)
def test_gradcheck_networks(name, distribution):
    operator, _ = build(name, 7, 3, 2.0, distribution)
    logits = random_logits(3, 7).requires_grad_()
    mass = random_logits(3, 7, seed=1).softmax(1).requires_grad_()
    labels = torch.tensor([0, 3, 6])
    assert gradcheck(lambda s: operator.rank_probabilities(s, labels), (logits,))
    assert gradcheck(operator.rank_probabilities, (logits, mass))
    assert gradcheck(operator.permutation_matrix, (logits,))


@pytest.mark.parametrize("name", ["neuralsort", "softsort", "sinkhorn_sort", "soft_topk"])
@pytest.mark.parametrize(("n", "k"), [(2, 1), (7, 3), (6, 5)])
def test_gradcheck_sorts_and_transports(name, n, k):
    operator, _ = build(name, n, k, 5.0)
    logits = random_logits(3, n).requires_grad_()
    mass = random_logits(3, n, seed=1).softmax(1).requires_grad_()
    labels = torch.tensor([0, 1, n - 1])
    assert gradcheck(lambda s: operator.rank_probabilities(s, labels), (logits,))
    assert gradcheck(operator.rank_probabilities, (logits, mass))
    assert gradcheck(operator.permutation_matrix, (logits,))


@pytest.mark.parametrize("name", NAMES)
def test_gradient_of_the_true_class_equals_that_of_the_whole_matrix(name):
    operator, _ = build(name, 20, 5, 3.0)
    labels = torch.arange(8) % 20
    weights = torch.tensor([1.0, 0.8, 0.5, 0.3, 0.1], dtype=torch.float64)
    gradients = []
    for column in (operator.rank_probabilities, lambda s, y: true_class(operator.permutation_matrix(s), y)):
        logits = random_logits(8, 20).requires_grad_()
        (column(logits, labels) * weights).sum().backward()
        gradients.append(logits.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [5, 16, 37])
def test_approaches_the_hard_permutation(name, n):
    beta = 1e7 if name in ("sinkhorn_sort", "soft_topk") else 1e6
    k = min(5, n - 1)
    operator, _ = build(name, n, k, beta)
    logits = torch.stack([torch.randperm(n, generator=torch.Generator().manual_seed(i)) for i in range(4)]).double()
    torch.testing.assert_close(operator.permutation_matrix(logits), reference.hard_permutation(logits)[:, :k])
    ranks = reference.hard_permutation(logits)[:, :k, 0]
    torch.testing.assert_close(operator.rank_probabilities(logits, torch.zeros(4, dtype=torch.long)), ranks)


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_distributions_and_a_distribution_of_labels_is_their_mixture(name):
    operator, _ = build(name, 12, 4, 2.0)
    logits, mass = random_logits(6, 12), random_logits(6, 12, seed=1).softmax(1)
    P = operator.permutation_matrix(logits)
    assert P.shape == (6, 4, 12)
    assert bool((P >= 0).all())
    torch.testing.assert_close(P.sum(2), torch.ones(6, 4, dtype=torch.float64), atol=1e-8, rtol=0)
    torch.testing.assert_close(operator.rank_probabilities(logits, mass), torch.einsum("bkn,bn->bk", P, mass))


@pytest.mark.parametrize("name", ["neuralsort", "softsort", "sinkhorn_sort", "soft_topk"])
def test_is_equivariant_to_permutations_of_the_classes(name):
    """Networks are so only in the hard limit: their relaxed values depend on the lanes."""
    operator, _ = build(name, 12, 4, 2.0)
    logits, order = random_logits(6, 12), torch.randperm(12, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(operator(logits[:, order]), operator(logits)[:, :, order])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stays_finite_and_close_to_float64(name, scale, dtype):
    operator, _ = build(name, 50, 5, 1.0)
    logits = random_logits(16, 50, scale).to(dtype).requires_grad_()
    labels = torch.arange(16)
    column = operator.rank_probabilities(logits, labels)
    column.sum().backward()
    assert column.dtype == torch.float32
    assert logits.grad.dtype == dtype
    assert bool(torch.isfinite(column).all())
    assert bool(torch.isfinite(logits.grad).all())
    want = operator.rank_probabilities(logits.detach().double(), labels)
    assert want.dtype == torch.float64
    # float32 rounding of scores at 1e4, through up to 50 layers, bounds what can be asked there
    tolerance = 2e-2 if scale == 1e4 and name in CONSTRUCTIONS else 2e-3
    torch.testing.assert_close(column.double(), want, atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_equal_scores_give_finite_values_and_gradients(name):
    operator, _ = build(name, 9, 3, 2.0)
    logits = torch.zeros(2, 9, requires_grad=True)
    column = operator.rank_probabilities(logits, torch.tensor([0, 8]))
    column.sum().backward()
    assert bool(torch.isfinite(column).all())
    assert bool(torch.isfinite(logits.grad).all())
    if name not in CONSTRUCTIONS:  # every class is as likely as every other
        torch.testing.assert_close(column, torch.full_like(column, 1 / 9), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", CONSTRUCTIONS)
def test_equal_scores_among_others_do_not_blow_up_the_gradient_of_art(name):
    """difftopk's slope at a tie is 25,000 beta, an artefact of its epsilon; here it is that of a small difference."""
    operator, _ = build(name, 20, 5, 0.5)
    logits = random_logits(64, 20, dtype=torch.float32)
    norms = []
    for scores in (logits, logits.bfloat16().float()):  # without and with ties
        scores = scores.clone().requires_grad_()
        operator.rank_probabilities(scores, torch.zeros(64, dtype=torch.long)).sum().backward()
        norms.append(scores.grad.norm(dim=1).max())
    assert len(logits[0].unique()) == 20
    assert min(len(row.bfloat16().unique()) for row in logits) < 20
    assert float(norms[1]) < 10 * float(norms[0])


@pytest.mark.parametrize("name", [name for name in NAMES if name != "softsort"])
def test_the_gradient_at_ties_is_that_of_the_whole_matrix(name):
    """Not SoftSort's: |s_[k] - s_j| has no derivative at a tie, and its column takes the one from below."""
    operator, _ = build(name, 20, 5, 3.0)
    gradients = []
    for column in (operator.rank_probabilities, lambda s, y: true_class(operator.permutation_matrix(s), y)):
        logits = random_logits(8, 20).mul_(2).round_().requires_grad_()
        (column(logits, torch.arange(8)) * torch.linspace(1, 0, 5)).sum().backward()
        gradients.append(logits.grad)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", NAMES)
def test_an_infinite_or_nan_score_never_gives_a_wrong_number(name):
    operator, _ = build(name, 9, 3, 2.0)
    clean = random_logits(4, 9, dtype=torch.float32)
    labels = torch.tensor([0, 1, 2, 3])
    for bad in (float("nan"), float("inf"), float("-inf")):
        logits = clean.clone()
        logits[1, 5] = bad
        column = operator.rank_probabilities(logits, labels)
        others = torch.tensor([0, 2, 3])
        torch.testing.assert_close(column[others], operator.rank_probabilities(clean[others], labels[others]))
        if name == "softsort" and bad == float("-inf"):  # the limit: a class that takes no part
            without = torch.cat([clean[1:2, :5], clean[1:2, 6:]], dim=1)
            torch.testing.assert_close(column[1:2], operator.rank_probabilities(without, labels[1:2]))
        else:
            assert bool(column[1].isnan().any())


@pytest.mark.parametrize("name", ["splitter_selection", "sinkhorn_sort"])
def test_double_backward_is_refused_by_name(name):
    operator, _ = build(name, 7, 3, 2.0)
    logits = random_logits(2, 7).requires_grad_()
    loss = operator.rank_probabilities(logits, torch.tensor([0, 1])).square().sum()
    (gradient,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="not twice differentiable"):
        torch.autograd.grad(gradient.sum() + logits.sum(), logits)


def test_softsort_with_a_power():
    logits = random_logits(3, 8)
    torch.testing.assert_close(SoftSort(3, 2.0, power=2.0)(logits), reference.softsort(logits, 2.0, 2.0)[:, :3])
    with pytest.raises(ValueError, match="power must be at least 1"):
        SoftSort(3, power=0.5)


@pytest.mark.parametrize("name", NAMES)
def test_refuses_inputs_that_do_not_fit(name):
    operator, _ = build(name, 9, 3, 2.0)
    logits, labels = torch.randn(4, 9), torch.zeros(4, dtype=torch.long)
    with pytest.raises(TypeError, match="floating-point"):
        operator.rank_probabilities(torch.zeros(4, 9, dtype=torch.long), labels)
    with pytest.raises(ValueError, match="shape"):
        operator.rank_probabilities(logits, labels[:3])
    with pytest.raises(ValueError, match="got 9 at position 2"):
        operator.rank_probabilities(logits, torch.tensor([0, 0, 9, 0]))
    with pytest.raises(ValueError, match=r"\(batch, n\)"):
        operator.permutation_matrix(logits[0])
    with pytest.raises(ValueError, match="k=3 and n=3"):
        operator.permutation_matrix(logits[:, :3])
    with pytest.raises(ValueError, match="inverse_temperature must be"):
        build(name, 9, 3, -1.0)


def test_networks_refuse_another_number_of_scores_and_odd_settings():
    operator, _ = build("bitonic", 9, 3, 1.0)
    with pytest.raises(ValueError, match="built for n=9"):
        operator.permutation_matrix(torch.randn(2, 10))
    with pytest.raises(ValueError, match="did you mean 'cauchy'"):
        RelaxedNetwork(bitonic(9, 3), distribution="couchy")
    with pytest.raises(ValueError, match="art_lambda must lie"):
        RelaxedNetwork(bitonic(9, 3), art_lambda=1.0)


def test_make_operator_builds_every_relaxation_by_name():
    logits, labels = random_logits(3, 9), torch.tensor([0, 1, 2])
    for method in RELAXATIONS:
        operator = make_operator(method, 9, 3)
        assert operator.rank_probabilities(logits, labels).shape == (3, 3)
        assert "k=3" in repr(operator)
    assert make_operator("soft_topk", 9, 3, boundaries=[3]).boundaries == [3]
    with pytest.raises(ValueError, match="no relaxed permutation matrix"):
        make_operator("smooth_topk", 9, 3)
    with pytest.raises(ValueError, match="k=9 and n=9"):
        make_operator("softsort", 9, 9)
