"""The relaxed operators against their textbook definitions, gradcheck, hard limits and each other."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from tests import reference
from topk_losses import (
    DISTRIBUTIONS,
    LML,
    RELAXATIONS,
    CappedSoftmax,
    LapSum,
    NeuralSort,
    RelaxedNetwork,
    SinkhornSort,
    SoftSort,
    SoftTopK,
    SparseTopK,
    SubsetTopK,
    make_operator,
)
from topk_losses.networks import bitonic, odd_even, splitter_selection
from topk_losses.sigmoids import ART_TIE, mixing

CONSTRUCTIONS = {"odd_even": odd_even, "bitonic": bitonic, "splitter_selection": splitter_selection}
THRESHOLDS = {
    "lml": LML,
    "lapsum": LapSum,
    "sparse_topk": SparseTopK,
    "sparse_topk 4/3": functools.partial(SparseTopK, p=4 / 3),
    "capped_softmax": CappedSoftmax,
}
CLOSED_OR_SOLVED = ("neuralsort", "softsort", "sinkhorn_sort", "soft_topk", "subset_topk", *THRESHOLDS)
NAMES = (*CLOSED_OR_SOLVED, *CONSTRUCTIONS)


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
        return SoftTopK(k, beta), lambda s: reference.soft_topk(s, k, beta)
    if name == "subset_topk":
        masks = range(1, k + 1)
        return SubsetTopK(k, beta), lambda s: reference.nested([reference.subset_mask(s, r, beta) for r in masks])
    if name in THRESHOLDS:
        masks = [
            functools.partial(reference.threshold_mask, name, k=r, inverse_temperature=beta) for r in range(1, k + 1)
        ]
        return THRESHOLDS[name](k, beta), lambda s: reference.nested([mask(s) for mask in masks])
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
    k = data.draw(st.integers(1, n), "k")
    # plain Sinkhorn, the oracle of the transports, would need millions of iterations at 20
    hardest = 10.0 if name in ("sinkhorn_sort", "soft_topk") else 20.0
    beta = data.draw(st.sampled_from([0.1, 1.0, 5.0, hardest]), "inverse temperature")
    scale = data.draw(st.sampled_from([1e-4, 1.0, 30.0]), "scale")
    logits = random_logits(3, n, scale, seed=data.draw(st.integers(0, 99), "seed"))
    if data.draw(st.booleans(), "ties"):
        logits = (logits / scale).round() * scale
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
def test_slopes_for_the_kernels_are_the_derivatives(distribution):
    family, art_lambda, tie = DISTRIBUTIONS[distribution], 0.4, ART_TIE**-0.4
    e = torch.tensor([1e-6, 1e-3, 0.05, 0.3, 2, 30], dtype=torch.float64, requires_grad=True)
    u = 3 * e * family.scale(e, art_lambda, tie)
    mix = family.mix(u)
    (want,) = torch.autograd.grad(mix.sum(), e)
    with torch.no_grad():
        slope = family.slope(u, mix) * 3 * family.scale_slope(e, art_lambda, tie)
    torch.testing.assert_close(slope, want)
    mix, e = mix.detach(), e.detach()
    want = reference.sigmoid_family(distribution, -3 * e, -e, 3, art_lambda)
    torch.testing.assert_close(mix, want, rtol=1e-6, atol=1e-15)
    assert float(mixing(torch.zeros(1), distribution, 3.0, art_lambda)) == 0.5


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


@pytest.mark.parametrize("name", CLOSED_OR_SOLVED)
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
@pytest.mark.parametrize("n", [4, 16, 37])
def test_approaches_the_hard_permutation(name, n):
    beta = 1e7 if name in ("sinkhorn_sort", "soft_topk") else 1e6
    k = min(5, n)
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


@pytest.mark.parametrize("name", CLOSED_OR_SOLVED)
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
def test_a_nan_or_infinite_score_never_gives_a_wrong_number(name):
    operator, _ = build(name, 9, 3, 2.0)
    clean = random_logits(4, 9, dtype=torch.float32)
    labels = torch.tensor([0, 1, 2, 3])
    for bad in (float("nan"), float("inf")):
        logits = clean.clone()
        logits[1, 5] = bad
        column = operator.rank_probabilities(logits, labels)
        others = torch.tensor([0, 2, 3])
        torch.testing.assert_close(column[others], operator.rank_probabilities(clean[others], labels[others]))
        assert bool(column[1].isnan().any())


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_a_class_at_minus_infinity_is_the_limit_of_ever_lower_scores(name, distribution):
    if name not in CONSTRUCTIONS and distribution != "logistic_phi":
        return
    operator, _ = build(name, 9, 3, 2.0, distribution)
    logits = random_logits(4, 9)
    out = torch.tensor([[2], [5], [0], [1]])
    labels = torch.tensor([1, 5, 2, 0])  # the true class may be out itself
    results = []
    for low in (-1e13, -torch.inf):
        scores = logits.scatter(1, out, low).requires_grad_()
        column = operator.rank_probabilities(scores, labels)
        (gradient,) = torch.autograd.grad(column.square().sum(), scores)
        results.append((column.detach(), gradient.scatter(1, out, 0.0), operator(scores.detach())))
    for lower, limit in zip(*results):
        torch.testing.assert_close(limit, lower, rtol=1e-4, atol=1e-6)
    in_float32 = operator.rank_probabilities(scores.float(), labels)
    torch.testing.assert_close(in_float32.double(), results[1][0], rtol=1e-4, atol=1e-5)
    few = logits.masked_fill(torch.arange(9) > 1, -torch.inf)  # fewer classes than ranks are left
    assert bool(operator(few).isfinite().all())
    everything = torch.full_like(few, -torch.inf)
    assert bool(operator(everything).isfinite().all())


@pytest.mark.parametrize("n", [4, 5, 8, 100])
@pytest.mark.parametrize("name", ["sinkhorn_sort", "soft_topk"])
def test_a_class_far_below_does_not_blunt_the_others(name, n):
    operator, _ = build(name, n, 3, 100.0 if name == "sinkhorn_sort" else 10.0)
    logits = random_logits(8, n)
    logits[:, 0] = logits.amax(1) + 1
    clean = operator.rank_probabilities(logits, torch.zeros(8, dtype=torch.long))[:, 0]
    logits[:, -1] = -1e4
    low = operator.rank_probabilities(logits, torch.zeros(8, dtype=torch.long))[:, 0]
    assert bool((low > 0.8 * clean).all())


@pytest.mark.parametrize("name", NAMES)
def test_second_derivatives_are_right(name):
    operator, _ = build(name, 6, 3, 2.0)
    logits, labels = random_logits(2, 6).requires_grad_(), torch.tensor([0, 4])
    if hasattr(operator, "tolerance"):
        operator.tolerance = 1e-13
    assert gradgradcheck(lambda s: operator.rank_probabilities(s, labels), (logits,))


@pytest.mark.parametrize("name", NAMES)
def test_takes_any_number_of_dimensions(name):
    operator, _ = build(name, 6, 3, 2.0)
    logits, labels = random_logits(8, 6), torch.arange(8) % 6
    column, P = operator.rank_probabilities(logits, labels), operator(logits)
    shaped = logits.view(2, 4, 6)
    torch.testing.assert_close(operator.rank_probabilities(shaped, labels.view(2, 4)), column.view(2, 4, 3))
    torch.testing.assert_close(operator(shaped), P.view(2, 4, 3, 6))
    torch.testing.assert_close(operator(logits[0]), P[0])
    torch.testing.assert_close(operator.rank_probabilities(logits[0], labels[0]), column[0])


@pytest.mark.parametrize("name", NAMES)
def test_the_temperature_can_be_a_tensor_that_learns(name):
    operator, _ = build(name, 6, 3, 2.0)
    if hasattr(operator, "tolerance"):
        operator.tolerance = 1e-13
    logits, labels = random_logits(2, 6), torch.tensor([0, 4])
    want = operator.rank_probabilities(logits, labels)

    def column(beta):
        operator.inverse_temperature = beta
        return operator.rank_probabilities(logits, labels)

    beta = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(column(beta), want)
    assert gradcheck(column, (beta,))
    operator.inverse_temperature = torch.nn.Parameter(torch.tensor(2.0))
    assert [name for name, _ in operator.named_parameters()] == ["inverse_temperature"]
    for wrong in (torch.ones(2), torch.tensor(1), torch.tensor(-1.0), 0.0):
        with pytest.raises(ValueError, match="inverse_temperature"):
            build(name, 6, 3, wrong)


def test_ties_that_rounding_splits_do_not_blow_up_the_gradient_of_art():
    """Equal scores that a network parts by a rounding had gradients of 10,925 and 884 here."""
    for dtype in (torch.float64, torch.float32):
        for construct in CONSTRUCTIONS.values():
            for scores in ([2.0, 1, 1, 0], [3.0, 1, 1, 1, 0, 0], [0.1, 0.1, 0.1, 0.7], [1e3, 1e3 + 1, 1e3, 1e3 - 1]):
                logits = torch.tensor([scores], dtype=dtype, requires_grad=True)
                operator = RelaxedNetwork(construct(len(scores), 2), 1.0)
                for label in range(len(scores)):
                    column = operator.rank_probabilities(logits, torch.tensor([label]))
                    for entry in column[0]:
                        (gradient,) = torch.autograd.grad(entry, logits, retain_graph=True)
                        assert float(gradient.abs().max()) < 20


@pytest.mark.parametrize("name", NAMES)
def test_refuses_inputs_that_do_not_fit(name):
    operator, _ = build(name, 9, 3, 2.0)
    logits, labels = torch.randn(4, 9), torch.zeros(4, dtype=torch.long)
    with pytest.raises(TypeError, match="floating-point"):
        operator.rank_probabilities(torch.zeros(4, 9, dtype=torch.long), labels)
    with pytest.raises(ValueError, match="shape"):
        operator.rank_probabilities(logits, labels[:3])
    for label in (-100, -1, 9):
        with pytest.raises(ValueError, match=rf"\[0, 8\], got {label} at position 2"):
            operator.rank_probabilities(logits, torch.tensor([0, 0, label, 0]))
    with pytest.raises(ValueError, match="entries in"):
        operator.rank_probabilities(logits, -torch.ones(4, 9))
    with pytest.raises(ValueError, match="shape"):
        operator.permutation_matrix(torch.tensor(0.0))
    with pytest.raises(ValueError, match="the number of scores n=2, got 3"):
        operator.permutation_matrix(logits[:, :2])
    with pytest.raises(ValueError, match="inverse_temperature must be"):
        build(name, 9, 3, -1.0)


def test_networks_refuse_another_number_of_scores_and_odd_settings():
    operator, _ = build("bitonic", 9, 3, 1.0)
    with pytest.raises(ValueError, match="built for n=9 scores, got 10"):
        operator.permutation_matrix(torch.randn(2, 10))
    with pytest.raises(ValueError, match="did you mean 'cauchy'"):
        RelaxedNetwork(bitonic(9, 3), 1.0, distribution="couchy")
    with pytest.raises(ValueError, match="art_lambda must lie"):
        RelaxedNetwork(bitonic(9, 3), 1.0, art_lambda=1.0)


def test_make_operator_builds_every_relaxation_by_name():
    logits, labels = random_logits(3, 9), torch.tensor([0, 1, 2])
    for method in RELAXATIONS:
        operator = make_operator(method, 9, 3)
        assert operator.rank_probabilities(logits, labels).shape == (3, 3)
        assert "k=3" in repr(operator)
    with pytest.raises(ValueError, match="no relaxed permutation matrix"):
        make_operator("smooth_topk", 9, 3)
    with pytest.raises(ValueError, match="n=9, got 10"):
        make_operator("softsort", 9, 10)
