"""The relaxed operators against their textbook definitions, gradcheck, hard limits, corners and each other."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from tests import reference
from tests.methods import (
    RELAXED,
    WITHOUT_A_SUM,
    Bound,
    bound,
    gradcheck,
    gradgradcheck,
    random_batch,
    random_logits,
    value_and_gradient,
)
from topk_losses import DISTRIBUTIONS, METHODS, SparseTopK, TopKCrossEntropyLoss
from topk_losses.functional import soft_topk_values, topk_mask
from topk_losses.numerics import largest

INF = math.inf
NETWORKS = reference.NETWORKS
THRESHOLDS = {name: METHODS[name].operator for name in ("lml", "lapsum", "sparse_topk", "capped_softmax")}
THRESHOLDS["sparse_topk 4/3"] = SparseTopK(4 / 3)
NAMES = (*RELAXED, "sparse_topk 4/3")
OTHERS = [name for name in NAMES if name not in NETWORKS]
WHITENED = ("sinkhorn_sort", "soft_topk")
CASES = [(name, None) for name in OTHERS] + [(name, family) for name in NETWORKS for family in DISTRIBUTIONS]
both_precisions = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def build(name, k, beta, distribution=None):
    if name in THRESHOLDS:
        return Bound(THRESHOLDS[name], k, beta)
    return bound(name, k, beta, distribution)


def true_class(P, labels):
    return P[torch.arange(len(P)), :, labels]


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_equals_its_definition(name, data):
    n = data.draw(st.integers(2, 12), "n")
    k = data.draw(st.integers(1, n), "k")
    # plain Sinkhorn, the oracle of the transports, would need millions of iterations at 20
    beta = data.draw(st.sampled_from([0.1, 1.0, 5.0, 10.0 if name in WHITENED else 20.0]), "inverse temperature")
    scale = data.draw(st.sampled_from([1e-4, 1.0, 30.0]), "scale")
    distribution = data.draw(st.sampled_from(list(DISTRIBUTIONS)), "distribution") if name in NETWORKS else None
    logits = random_logits(3, n, scale, seed=data.draw(st.integers(0, 99), "seed"))
    if data.draw(st.booleans(), "ties"):
        logits = (logits / scale).round() * scale
    labels = torch.arange(3) % n
    operator = build(name, k, beta, distribution)
    want = reference.permutation_matrix(name, logits, k, beta, distribution)
    torch.testing.assert_close(operator.permutation_matrix(logits), want, rtol=1e-6, atol=1e-7)
    column = operator.rank_probabilities(logits, labels)
    torch.testing.assert_close(column, true_class(want, labels), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "distribution", "n", "k"),
    [(*case, 7, 3) for case in CASES] + [(name, None, *size) for name in OTHERS for size in ((2, 1), (5, 4))],
)
def test_derivatives(name, distribution, n, k):
    """Of logits, masses and temperature, twice; the column has those of the matrix."""
    operator = build(name, k, 2.0 if name in NETWORKS else 5.0, distribution)
    logits = random_logits(3, n).requires_grad_()
    labels = torch.tensor([0, 1, n - 1])
    mass = random_logits(3, n, seed=1).softmax(1).requires_grad_()
    assert gradcheck(operator.topk_mass, (logits, mass))
    assert gradcheck(operator.permutation_matrix, (logits,))
    beta = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    operator = operator.exact()
    assert gradcheck(lambda s, beta: operator.rank_probabilities(s, labels, inverse_temperature=beta), (logits, beta))
    if n == 5 or (n == 7 and distribution == "logistic_phi"):
        assert gradgradcheck(lambda s: operator.rank_probabilities(s, labels), (logits,))


@pytest.mark.parametrize("name", NAMES)
def test_at_ties_the_column_has_the_gradient_of_the_matrix(name):
    operator = build(name, 5, 3.0)
    labels = torch.arange(8)
    logits = (2 * random_logits(8, 20)).round()
    weights = torch.tensor([1.0, 0.8, 0.5, 0.3, 0.1], dtype=torch.float64)
    _, column = value_and_gradient(lambda s: operator.rank_probabilities(s, labels) * weights, logits)
    _, matrix = value_and_gradient(lambda s: true_class(operator(s), labels) * weights, logits)
    torch.testing.assert_close(column, matrix, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "df_topk"])
@pytest.mark.parametrize("logits", [[0.0] * 4, [1.0, 0, 0, 0], [1.0, 1, 0, 0], [2.0, 1, 1, 0]])
def test_at_ties_the_gradient_is_the_mean_over_all_orders(name, logits):
    """So it does not depend on the order of the classes. Except df_topk, which moves two scores only."""
    logits = torch.tensor([logits], dtype=torch.float64)
    distribution = "cauchy" if name in NETWORKS else None  # that of ART is steep there, with a mean slope of its own
    steps = 1e-9 * torch.tensor(list(itertools.permutations(range(4))), dtype=torch.float64)  # (24, 4)
    weights = torch.tensor([1.0, 0.7, 0.3], dtype=torch.float64)
    for k in (1, 2, 3):
        operator = build(name, k, 2.0, distribution)
        for label in range(4):

            def weighted(s, operator=operator, label=label, k=k):
                return operator.rank_probabilities(s, torch.full((len(s),), label)) * weights[:k]

            _, gradient = value_and_gradient(weighted, logits)
            _, of_orders = value_and_gradient(weighted, logits + steps)
            torch.testing.assert_close(gradient, of_orders.mean(0, keepdim=True), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "recall_surrogate"])
def test_approaches_the_hard_permutation(name):
    """Except recall_surrogate, whose outer sigmoid stays soft."""
    for n in (4, 16, 37):
        operator = build(name, min(5, n), 1e7 if name in WHITENED else 1e6)
        logits = torch.stack([torch.randperm(n, generator=torch.Generator().manual_seed(i)) for i in range(4)]).double()
        want = reference.hard_permutation(logits)[:, : min(5, n)]
        torch.testing.assert_close(operator.permutation_matrix(logits), want)
        column = operator.rank_probabilities(logits, torch.zeros(4, dtype=torch.long))
        torch.testing.assert_close(column, want[:, :, 0])


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_distributions_of_any_shape_and_labels_that_are_one_get_their_mixture(name):
    operator = build(name, 4, 2.0)
    logits, labels = random_batch(6, 12, 1.0)
    mass = random_logits(6, 12, seed=1).softmax(1)
    P = operator.permutation_matrix(logits)
    column = operator.rank_probabilities(logits, labels)
    assert bool((P >= 0).all())
    if name not in WITHOUT_A_SUM:
        torch.testing.assert_close(P.sum(2), torch.ones(6, 4, dtype=torch.float64), atol=1e-8, rtol=0)
    torch.testing.assert_close(operator.mask(logits), P.sum(1))
    torch.testing.assert_close(operator.topk_mass(logits, mass), torch.einsum("bkn,bn->b", P, mass))
    if name not in NETWORKS:  # whose relaxed values depend on the wires
        order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(operator(logits[:, order]), P[:, :, order])
    shaped = logits.view(2, 3, 12)
    torch.testing.assert_close(operator.rank_probabilities(shaped, labels.view(2, 3)), column.view(2, 3, 4))
    torch.testing.assert_close(operator(shaped), P.view(2, 3, 4, 12))
    torch.testing.assert_close(operator(logits[0]), P[0])
    torch.testing.assert_close(operator.rank_probabilities(logits[0], labels[0]), column[0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stays_finite_and_close_to_float64(name, scale, dtype):
    """scale 0: equal scores."""
    operator = build(name, 5, 1.0)
    logits = random_logits(16, 50, scale).to(dtype)
    labels = torch.arange(16)
    column, gradient = value_and_gradient(operator.rank_probabilities, logits, labels)
    assert (column.dtype, gradient.dtype) == (torch.float32, dtype)
    assert bool(gradient.isfinite().all())
    want = operator.rank_probabilities(logits.double(), labels)
    assert want.dtype == torch.float64
    # float32 rounding of scores at 1e4, through up to 50 layers, bounds what can be asked there
    tolerance = 2e-2 if scale == 1e4 and name in NETWORKS else 2e-3
    torch.testing.assert_close(column.double(), want, atol=tolerance, rtol=0)
    if scale == 0 and name not in (*NETWORKS, *WITHOUT_A_SUM):  # every class is as likely as every other
        torch.testing.assert_close(column, torch.full_like(column, 1 / 50), atol=1e-4, rtol=0)


@pytest.mark.parametrize("beta", [0.0625, 0.5, 2.0])
@pytest.mark.parametrize("k", [1, 5, 70, 100])
def test_an_outlier_costs_neuralsort_no_digits(k, beta):
    logits = random_logits(8, 100, dtype=torch.float32)
    logits[:, 3] = 1e4
    P = bound("neuralsort", k, beta)(logits)
    want = reference.neuralsort(logits, beta)[:, :k]
    torch.testing.assert_close(P.double(), want, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", NETWORKS)
def test_ties_do_not_blow_up_the_gradient_of_art(name):
    """difftopk's slope at a tie is 25,000 beta, by its epsilon; here it is that of a small difference.

    Some of the equal scores are parted by a rounding within the network.
    """
    for scores in ([2.0, 1, 1, 0], [3.0, 1, 1, 1, 0, 0], [0.1, 0.1, 0.1, 0.7], [1e3, 1e3 + 1, 1e3, 1e3 - 1]):
        operator = bound(name, 2, 1.0)
        labels = torch.arange(len(scores))
        for rank in range(2):
            for dtype in (torch.float32, torch.float64):
                leaf = torch.tensor([scores] * len(scores), dtype=dtype, requires_grad=True)
                operator.rank_probabilities(leaf, labels)[:, rank].sum().backward()
                assert float(leaf.grad.abs().max()) < 20


@pytest.mark.parametrize(("name", "distribution"), CASES)
def test_broken_scores_never_give_a_wrong_number_and_masked_ones_take_no_part(name, distribution):
    operator = build(name, 3, 2.0, distribution)
    others = [0, 2, 3]
    labels = torch.tensor([1, 0, 2, 0])
    clean = random_logits(4, 9, dtype=torch.float32)
    for bad in (math.nan, INF):
        logits = clean.clone()
        logits[1, 5] = bad
        got = operator.rank_probabilities(logits, labels)
        torch.testing.assert_close(got[others], operator.rank_probabilities(clean[others], labels[others]))
        assert bool(got[1].isnan().any())
    logits = random_logits(4, 9)
    out = torch.tensor([[2], [5], [0], [1]])
    P = operator(logits.scatter(1, out, -INF))
    live = torch.ones_like(logits, dtype=torch.bool).scatter(1, out, False)
    torch.testing.assert_close(P.mT[live].view(4, 8, 3).mT, operator(logits[live].view(4, 8)))
    for number in (2, 0):  # fewer classes than ranks are left
        few = logits.masked_fill(torch.arange(9) >= number, -INF)
        P = operator(few)
        assert bool(P.isfinite().all())
        assert not bool(P[:, :, number:].any())
        torch.testing.assert_close(operator.rank_probabilities(few, labels), true_class(P, labels))
        mass = random_logits(4, 9, seed=1).softmax(1)
        torch.testing.assert_close(operator.topk_mass(few, mass), torch.einsum("bkn,bn->b", P, mass))
        for k in (3, 9):
            inside = topk_mask(few, k, name) if name in METHODS else operator.mask(few, k)
            assert not bool(inside[:, number:].any())
            if name != "recall_surrogate":  # whose indicators are never 1
                assert inside.sum(1).tolist() == pytest.approx([number] * 4)


@pytest.mark.parametrize("name", WHITENED)
def test_a_class_far_below_does_not_blunt_the_others(name):
    for n in (4, 5, 8, 100):
        column = bound(name, 3).rank_probabilities
        logits = random_logits(8, n)
        logits[:, 0] = logits.amax(1) + 1
        clean = column(logits, torch.zeros(8, dtype=torch.long))[:, 0]
        logits[:, -1] = -1e4
        assert bool((column(logits, torch.zeros(8, dtype=torch.long))[:, 0] > 0.8 * clean).all())


@pytest.mark.parametrize("name", [*THRESHOLDS, "soft_topk", "subset_topk"])
@given(st.integers(2, 40), st.data())
@settings(max_examples=25, deadline=None)
def test_indicators_sum_to_k_are_nested_and_equal_bisection(name, n, data):
    beta = data.draw(st.sampled_from([0.1, 1.0, 1e3 if name == "soft_topk" else 30.0]), "inverse temperature")
    scale = data.draw(st.sampled_from([1e-4, 1.0, 1e4]), "scale")
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    logits = random_logits(3, n, scale, dtype, seed=data.draw(st.integers(0, 99), "seed"))
    kind = data.draw(st.sampled_from(["apart", "ties", "equal"]))
    if kind == "ties":
        logits = (logits / scale).round() * scale
    elif kind == "equal":
        logits = logits[:, :1].expand(-1, n).clone()
    taking_part = n
    number = st.integers(1, n) if name == "subset_topk" else st.floats(0.05, n)
    if name in THRESHOLDS and data.draw(st.booleans(), "masked classes"):
        taking_part = data.draw(st.integers(1, n))
        logits[:, taking_part:] = -INF
    wanted = sorted({1, *data.draw(st.lists(number.filter(lambda k: k <= taking_part), max_size=4)), taking_part})
    masks = torch.stack([mask_of(name, logits, k, beta) for k in wanted], dim=1)  # (3, K, n)
    # rounding of the logits moves an indicator by its slope, at most 3; the weights of subsets have logarithms of many
    tolerance = torch.finfo(dtype).eps * (100 + 8 * max(scale, 1) * beta) * (n if name == "subset_topk" else 1)
    assert bool((masks >= 0).all())
    assert bool((masks <= 1 + tolerance).all())
    assert bool((masks.diff(dim=1) >= -tolerance).all())
    torch.testing.assert_close(masks.sum(2), masks.new_tensor(wanted).expand(3, -1), rtol=0, atol=n * tolerance)
    if scale * beta <= 100 and name in THRESHOLDS:  # where theta lies in a gap, bisection ends anywhere within
        for mask, k in zip(masks.unbind(1), wanted):
            want = reference.MASKS[name](logits[:, :taking_part], k, beta)
            torch.testing.assert_close(mask[:, :taking_part].double(), want, rtol=0, atol=n * tolerance)
            assert not bool(mask[:, taking_part:].any())


def mask_of(name, logits, k, beta):
    return build(name, 1, beta).mask(logits, k) if name in THRESHOLDS else topk_mask(logits, k, name, beta)


@pytest.mark.parametrize("name", THRESHOLDS)
def test_a_real_k_and_a_temperature_receive_their_gradients(name):
    logits = random_logits(3, 7).requires_grad_()
    k = torch.tensor([0.7, 2.4, 5.5], dtype=torch.float64, requires_grad=True)
    beta = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    for check in (gradcheck, gradgradcheck):
        assert check(lambda logits, k, beta: mask_of(name, logits, k, beta), (logits, k, beta))
    (gradient,) = torch.autograd.grad(mask_of(name, logits, k, beta).sum(), k)
    torch.testing.assert_close(gradient, torch.ones_like(k))  # the sum is k


@pytest.mark.parametrize("method", RELAXED)
def test_topk_mask_is_the_sum_of_the_ranks_along_any_dimension(method):
    x = random_logits(5, 2 * 6).view(5, 6, 2)
    P = bound(method, 3)(x.movedim(1, -1))  # (5, 2, 3, 6)
    for k in (3, torch.tensor(3)):
        torch.testing.assert_close(topk_mask(x, k, method, dim=1), P.sum(2).movedim(-1, 1))
    half = topk_mask(x.bfloat16(), 2, method)
    torch.testing.assert_close(half, topk_mask(x.bfloat16().float(), 2, method))


@pytest.mark.parametrize("method", RELAXED)
def test_soft_topk_values_are_means_by_the_ranks_along_any_dimension(method):
    """A rank that has no entry has -inf, as in torch.topk; of indicators that sum to no k there are no means."""
    x = random_logits(5, 2 * 6).view(5, 6, 2)
    if method in ("df_topk", "recall_surrogate"):
        with pytest.raises(ValueError, match="needs indicators that sum to k"):
            soft_topk_values(x, 3, method, dim=1)
        return
    P = bound(method, 3)(x.movedim(1, -1))  # (5, 2, 3, 6)
    values = soft_topk_values(x, 3, method, dim=1)
    torch.testing.assert_close(values, torch.einsum("abkn,anb->akb", P, x))
    torch.testing.assert_close(P.sum(3), torch.ones(5, 2, 3, dtype=torch.float64))
    out = torch.cat([x, torch.full_like(x, -INF)], dim=1)
    values = soft_topk_values(out, 8, method, dim=1)
    assert bool(values[:, :6].isfinite().all())
    assert bool((values[:, 6:] == -INF).all())


# Corners.


@both_precisions
def test_slopes_of_thresholds_at_ties_and_in_gaps(dtype):
    def computed(method, p_k, logits, label, top1_mode="sort"):
        loss = TopKCrossEntropyLoss(method, p_k, inverse_temperature=1.0, top1_mode=top1_mode)
        return value_and_gradient(loss, torch.tensor([logits], dtype=dtype), torch.tensor([label]))

    # theta = -1: the indicators are 1 at t = 5 and t = 1, without a slope; what is left is the softmax's part
    _, gradient = computed("sparse_topk", [0.5, 0.5], [4.0, 0.0, -3.0], 1, "sm")
    logits = torch.tensor([[4.0, 0, -3]], dtype=dtype)
    _, want = value_and_gradient(lambda s: -torch.log(0.5 * s.softmax(1)[0, 1] + 0.5), logits)
    torch.testing.assert_close(gradient, want, rtol=1e-5, atol=1e-6)
    # theta in the middle of two scores, so that -log of the lower indicator is log(1 + exp(gap / 2)), or its like
    for gap in (0.0, 30.0, 80.0, 100.0, 300.0, 1e4):
        small = math.exp(-gap / 2)
        lml = (math.log1p(small) + gap / 2, 0.5 / (1 + small))
        lapsum = (gap / 2 + math.log(2), 0.5)
        for method, (want, size) in (("lml", lml), ("lapsum", lapsum)):
            value, gradient = computed(method, 1, [gap, 0.0], 1)
            assert float(value) == pytest.approx(want, rel=1e-6)
            assert gradient[0].tolist() == pytest.approx([size, -size], rel=1e-5)
    # where scores lie far apart theta is the k-th of them, and moves with it
    logits = torch.arange(8).mul(-30.3).to(dtype).expand(8, 8)
    loss = TopKCrossEntropyLoss("capped_softmax", 2, inverse_temperature=1.0, top1_mode="sort", reduction="sum")
    _, gradient = value_and_gradient(loss, logits, torch.arange(8))
    want = -torch.eye(8, dtype=dtype)
    want[2:, 1] = 1
    want[:2] = 0
    torch.testing.assert_close(gradient, want, rtol=1e-4, atol=1e-8)
    # a far score leaves the slopes alone: theta is the middle of 300 and of log(exp 0 + exp -1)
    _, gradient = computed("lml", 2, [500.0, 300.0, 0.0, -1.0], 2)
    lower = torch.tensor([0.0, -1.0]).softmax(0)[0].item()
    assert gradient[0].tolist() == pytest.approx([0, 0.5, 0.5 * lower - 1, 0.5 * (1 - lower)], rel=1e-4)


# Published identities.


@pytest.mark.parametrize("method", ["capped_softmax", "subset_topk"])
def test_at_k_1_it_is_cross_entropy_whatever_the_logits(method):
    loss = TopKCrossEntropyLoss(method, 1, inverse_temperature=1.0, top1_mode="sort", reduction="none")
    for scale in (0.1, 3.0, 30.0):
        logits, labels = random_batch(16, 12, scale)
        want = value_and_gradient(lambda s, y: cross_entropy(s, y, reduction="none"), logits, labels)
        torch.testing.assert_close(value_and_gradient(loss, logits, labels), want, rtol=1e-6, atol=1e-9)


@given(st.integers(1, 700), st.integers(1, 20), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_the_largest_are_those_of_a_sort(n, m, seed):
    """Looked for in chunks where there are many scores; with ties, and with classes that are masked out."""
    scores = random_logits(4, n, seed=seed)
    m = min(m, n)
    scores[1] = scores[1].round()
    scores[2, ::2] = -torch.inf
    found = scores.gather(1, largest(scores, m))
    assert torch.equal(found, scores.sort(dim=1, descending=True).values[:, :m])
    assert all(len(set(row)) == m for row in largest(scores, m).tolist())
