"""The relaxed operators against their textbook definitions, gradcheck, hard limits, corners and each other."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.functional import cross_entropy

from tests import reference
from tests.methods import DETERMINISTIC, RELAXED, p_k_of, random_batch, value_and_gradient
from topk_losses import (
    DISTRIBUTIONS,
    LML,
    METHODS,
    CappedSoftmax,
    LapSum,
    RelaxedNetwork,
    SparseTopK,
    TopKCrossEntropyLoss,
    make_loss,
    make_operator,
    soft_topk_values,
    topk_mask,
)

INF = math.inf
NETWORKS = reference.NETWORKS
THRESHOLDS = {
    "lml": LML,
    "lapsum": LapSum,
    "sparse_topk": SparseTopK,
    "sparse_topk 4/3": lambda k, beta: SparseTopK(k, beta, p=4 / 3),
    "capped_softmax": CappedSoftmax,
}
NAMES = (*RELAXED, "sparse_topk 4/3")
OTHERS = [name for name in NAMES if name not in NETWORKS]
WITHOUT_A_SUM = ("df_topk", "recall_surrogate")  # their indicators do not sum to k, nor do rows of P to 1
WHITENED = ("sinkhorn_sort", "soft_topk")
CASES = [(name, None) for name in OTHERS] + [(name, each) for name in NETWORKS for each in DISTRIBUTIONS]
both_precisions = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def build(name, n, k, beta, distribution=None):
    if name == "sparse_topk 4/3":
        return SparseTopK(k, beta, p=4 / 3)
    return make_operator(name, n, k, beta, distribution)


def random_logits(batch, n, scale=1.0, dtype=torch.float64, seed=0):
    return random_batch(batch, n, scale, dtype, seed)[0]


def true_class(P, labels):
    return P[torch.arange(len(P)), :, labels]


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
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
    labels, operator = torch.arange(3) % n, build(name, n, k, beta, distribution)
    want = reference.permutation_matrix(name, logits, k, beta, distribution)
    torch.testing.assert_close(operator.permutation_matrix(logits), want, rtol=1e-6, atol=1e-7)
    column = operator.rank_probabilities(logits, labels)
    torch.testing.assert_close(column, true_class(want, labels), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "distribution", "n", "k"),
    [(*case, 7, 3) for case in CASES] + [(name, None, *size) for name in OTHERS for size in ((2, 1), (6, 5))],
)
def test_derivatives(name, distribution, n, k):
    """Of logits, masses and temperature, twice; the column has those of the matrix."""
    operator = build(name, n, k, 2.0 if name in NETWORKS else 5.0, distribution)
    logits, labels = random_logits(3, n).requires_grad_(), torch.tensor([0, 1, n - 1])
    mass = random_logits(3, n, seed=1).softmax(1).requires_grad_()
    assert gradcheck(operator.rank_probabilities, (logits, mass))
    assert gradcheck(operator.permutation_matrix, (logits,))
    beta = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    if hasattr(operator, "tolerance"):
        operator.tolerance = 1e-13
    assert gradcheck(lambda s, beta: operator.rank_probabilities(s, labels, beta), (logits, beta))
    if n == 6 or (n == 7 and distribution == "logistic_phi"):
        assert gradgradcheck(lambda s: operator.rank_probabilities(s, labels), (logits,))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ties", [False, True])
def test_the_column_has_the_gradient_of_the_matrix(name, ties):
    if ties and name == "softsort":
        return  # |s_[k] - s_j| has no derivative at a tie, and the column takes the one from below
    operator, labels = build(name, 20, 5, 3.0), torch.arange(8)
    logits = (2 * random_logits(8, 20)).round() if ties else random_logits(8, 20)
    weights = torch.tensor([1.0, 0.8, 0.5, 0.3, 0.1], dtype=torch.float64)
    _, column = value_and_gradient(lambda s: operator.rank_probabilities(s, labels) * weights, logits)
    _, matrix = value_and_gradient(lambda s: true_class(operator(s), labels) * weights, logits)
    torch.testing.assert_close(column, matrix, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [4, 16, 37])
def test_approaches_the_hard_permutation(name, n):
    k = min(5, n)
    operator = build(name, n, k, 1e7 if name in WHITENED else 1e6)
    logits = torch.stack([torch.randperm(n, generator=torch.Generator().manual_seed(i)) for i in range(4)]).double()
    want = reference.hard_permutation(logits)[:, :k]
    if name == "recall_surrogate":  # the outer of its two sigmoids does not become steep
        rank = n - logits.unsqueeze(1)
        masks = torch.sigmoid(torch.arange(k + 1).view(1, -1, 1) - rank)
        masks[:, 0] = 0
        want = masks.diff(dim=1)
    torch.testing.assert_close(operator.permutation_matrix(logits), want)
    column = operator.rank_probabilities(logits, torch.zeros(4, dtype=torch.long))
    torch.testing.assert_close(column, want[:, :, 0])


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_distributions_of_any_shape_and_labels_that_are_one_get_their_mixture(name):
    operator = build(name, 12, 4, 2.0)
    logits, labels = random_batch(6, 12, 1.0)
    mass = random_logits(6, 12, seed=1).softmax(1)
    P, column = operator.permutation_matrix(logits), operator.rank_probabilities(logits, labels)
    assert P.shape == (6, 4, 12)
    assert bool((P >= 0).all())
    if name not in WITHOUT_A_SUM:
        torch.testing.assert_close(P.sum(2), torch.ones(6, 4, dtype=torch.float64), atol=1e-8, rtol=0)
    torch.testing.assert_close(operator.mask(logits), P.sum(1))
    torch.testing.assert_close(operator.rank_probabilities(logits, mass), torch.einsum("bkn,bn->bk", P, mass))
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
    operator = build(name, 50, 5, 1.0)
    logits, labels = random_logits(16, 50, scale).to(dtype), torch.arange(16)
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


@pytest.mark.parametrize("name", NETWORKS)
def test_ties_do_not_blow_up_the_gradient_of_art(name):
    """difftopk's slope at a tie is 25,000 beta, an artefact of its epsilon; here it is that of a small difference."""
    operator, labels = make_operator(name, 20, 5, 0.5), torch.zeros(64, dtype=torch.long)
    logits = random_logits(64, 20, dtype=torch.float32)
    rounded = logits.bfloat16().float()
    assert min(len(row.unique()) for row in rounded) < len(logits[0].unique()) == 20
    apart, tied = (value_and_gradient(operator.rank_probabilities, each, labels)[1] for each in (logits, rounded))
    assert float(tied.norm(dim=1).max()) < 10 * float(apart.norm(dim=1).max())
    # equal scores that a network parts by a rounding
    for scores in ([2.0, 1, 1, 0], [3.0, 1, 1, 1, 0, 0], [0.1, 0.1, 0.1, 0.7], [1e3, 1e3 + 1, 1e3, 1e3 - 1]):
        n = len(scores)
        operator, labels = RelaxedNetwork(NETWORKS[name](n, 2), 1.0), torch.arange(n)
        for rank in range(2):
            for dtype in (torch.float32, torch.float64):
                leaf = torch.tensor([scores] * n, dtype=dtype, requires_grad=True)
                operator.rank_probabilities(leaf, labels)[:, rank].sum().backward()
                assert float(leaf.grad.abs().max()) < 20


@pytest.mark.parametrize(("name", "distribution"), CASES)
def test_a_nan_or_infinite_score_never_gives_a_wrong_number(name, distribution):
    column, others = build(name, 9, 3, 2.0, distribution).rank_probabilities, [0, 2, 3]
    clean, labels = random_logits(4, 9, dtype=torch.float32), torch.arange(4)
    for bad in (math.nan, INF):
        logits = clean.clone()
        logits[1, 5] = bad
        got = column(logits, labels)
        torch.testing.assert_close(got[others], column(clean[others], labels[others]))
        assert bool(got[1].isnan().any())


@pytest.mark.parametrize(("name", "distribution"), CASES)
def test_a_class_at_minus_infinity_is_the_limit_of_ever_lower_scores(name, distribution):
    operator = build(name, 9, 3, 2.0, distribution)
    logits, out = random_logits(4, 9), torch.tensor([[2], [5], [0], [1]])
    # the true class may be out itself; for one of the n target points of sinkhorn_sort -inf is no limit
    labels = torch.tensor([1, 5, 2, 0] if name != "sinkhorn_sort" else [1, 4, 2, 0])
    results = []
    for low in (-1e13, -INF):
        scores = logits.scatter(1, out, low)
        _, gradient = value_and_gradient(lambda s: operator.rank_probabilities(s, labels).square(), scores)
        column = operator.rank_probabilities(scores, labels)
        results.append((column, gradient.scatter(1, out, 0.0), operator(scores)))
    if name != "sinkhorn_sort":
        for lower, limit in zip(*results):
            torch.testing.assert_close(limit, lower, rtol=1e-4, atol=1e-6)
    in_float32 = operator.rank_probabilities(scores.float(), labels)
    torch.testing.assert_close(in_float32.double(), column, rtol=1e-4, atol=1e-5)
    if name not in NETWORKS:  # whose values depend on the wires
        live = torch.ones_like(logits, dtype=torch.bool).scatter(1, out, False)
        alone = build(name, 8, 3, 2.0)(logits[live].view(4, 8))
        torch.testing.assert_close(results[1][2].movedim(1, 2)[live].view(4, 8, 3).mT, alone)
    for number in (2, 0):  # fewer classes than ranks are left
        few = logits.masked_fill(torch.arange(9) >= number, -INF)
        assert bool(operator(few).isfinite().all())


@pytest.mark.parametrize("n", [4, 5, 8, 100])
@pytest.mark.parametrize(("name", "beta"), [("sinkhorn_sort", 100.0), ("soft_topk", 10.0)])
def test_a_class_far_below_does_not_blunt_the_others(name, beta, n):
    column, labels = make_operator(name, n, 3, beta).rank_probabilities, torch.zeros(8, dtype=torch.long)
    logits = random_logits(8, n)
    logits[:, 0] = logits.amax(1) + 1
    clean = column(logits, labels)[:, 0]
    logits[:, -1] = -1e4
    assert bool((column(logits, labels)[:, 0] > 0.8 * clean).all())


@pytest.mark.parametrize("name", [*THRESHOLDS, "soft_topk", "subset_topk"])
@given(st.integers(2, 40), st.data())
@settings(max_examples=40, deadline=None)
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
    taking_part, number = n, st.integers(1, n) if name == "subset_topk" else st.floats(0.05, n)
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
            assert not bool(mask[:, taking_part:].any()) or k == taking_part


def mask_of(name, logits, k, beta):
    return THRESHOLDS[name](1, beta).mask(logits, k) if name in THRESHOLDS else topk_mask(logits, k, name, beta)


@pytest.mark.parametrize("name", THRESHOLDS)
def test_a_real_k_and_a_temperature_receive_their_gradients(name):
    logits = random_logits(3, 7).requires_grad_()
    k = torch.tensor([0.7, 2.4, 5.5], dtype=torch.float64, requires_grad=True)
    beta = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    for check in (gradcheck, gradgradcheck):
        assert check(lambda logits, k, beta: mask_of(name, logits, k, beta), (logits, k, beta))
    (of_k,) = torch.autograd.grad(mask_of(name, logits, k, beta).sum(), k)
    torch.testing.assert_close(of_k, torch.ones_like(k))  # the sum is k


@pytest.mark.parametrize("method", RELAXED)
def test_topk_mask_is_the_sum_of_the_ranks_along_any_dimension(method):
    x = random_logits(5, 2 * 6).view(5, 6, 2)
    P = make_operator(method, 6, 3)(x.movedim(1, -1))  # (5, 2, 3, 6)
    for k in (3, torch.tensor(3)):
        torch.testing.assert_close(topk_mask(x, k, method, dim=1), P.sum(2).movedim(-1, 1))
    values = soft_topk_values(x, 3, method, dim=1)
    torch.testing.assert_close(values, torch.einsum("abkn,anb->akb", P, x))
    out = torch.cat([x, torch.full_like(x, -INF)], dim=1)
    assert bool(soft_topk_values(out, 2, method, dim=1).isfinite().all())
    half = topk_mask(x.bfloat16(), 2, method)
    torch.testing.assert_close(half, topk_mask(x.bfloat16().float(), 2, method))


# Corners.


def computed(method, p_k, logits, labels, dtype, **settings):
    """The mean loss, and its gradient."""
    loss = TopKCrossEntropyLoss(method, p_k, **settings)
    return value_and_gradient(loss, torch.tensor(logits, dtype=dtype), torch.tensor(labels))


@both_precisions
@pytest.mark.parametrize("method", RELAXED)
def test_where_k_exceeds_the_classes_that_take_part_all_of_them_are_within_it(method, dtype):
    if method != "recall_surrogate":  # whose indicators are never 1
        value, gradient = computed(method, [0.5, 0, 0.5], [[1, 0, -INF, -INF]], [0], dtype)
        softmax = torch.tensor([1.0, 0.0], dtype=dtype).softmax(0)
        torch.testing.assert_close(value, -torch.log(0.5 + 0.5 * softmax[0]), rtol=0, atol=2e-6)
        slope = 0.5 * softmax[0] * softmax[1] / (0.5 + 0.5 * softmax[0])
        want = torch.stack([-slope, slope, *torch.zeros(2, dtype=dtype)]).unsqueeze(0)
        torch.testing.assert_close(gradient, want)
    # one such row spoils no gradient of the batch
    logits = [[1, 0, -INF, -INF], [1, -INF, -INF, -INF], [0.3, 0.1, -0.2, 0.7]]
    _, gradient = computed(method, [0.4, 0.2, 0.4], logits, [0, 0, 2], dtype)
    assert bool(gradient.isfinite().all())
    assert not bool(gradient[:2, 2:].any())
    assert bool(gradient[2].any())
    if method in THRESHOLDS:  # a single class is among the highest for sure
        logits = torch.tensor([[0.3], [-INF]], dtype=dtype)
        for P in (make_operator(method, 1, 1), lambda s: topk_mask(s, 1.0, method)):
            value, gradient = value_and_gradient(P, logits)
            assert (value.flatten().tolist(), gradient.flatten().tolist()) == ([1, 1], [0, 0])


@both_precisions
def test_slopes_of_thresholds_at_ties_and_in_gaps(dtype):
    # theta = -1: the indicators are 1 at t = 5 and t = 1, without a slope; what is left is the softmax's part
    _, gradient = computed("sparse_topk", [0.5, 0.5], [[4, 0, -3]], [1], dtype, inverse_temperature=1.0)
    logits = torch.tensor([[4.0, 0, -3]], dtype=dtype)
    _, want = value_and_gradient(lambda s: -torch.log(0.5 * s.softmax(1)[0, 1] + 0.5), logits)
    torch.testing.assert_close(gradient, want, rtol=1e-5, atol=1e-6)
    # theta in the middle of two scores, so that -log of the lower indicator is log(1 + exp(gap / 2)), or its like
    settings = {"top1_mode": "sort", "inverse_temperature": 1.0}
    for gap in (0.0, 30.0, 80.0, 100.0, 300.0, 1e4):
        small = math.exp(-gap / 2)
        for method, want, size in (
            ("lml", math.log1p(small) + gap / 2, 0.5 / (1 + small)),
            ("lapsum", gap / 2 + math.log(2), 0.5),
        ):
            value, gradient = computed(method, 1, [[gap, 0.0]], [1], dtype, **settings)
            assert float(value) == pytest.approx(want, rel=1e-6)
            assert gradient[0].tolist() == pytest.approx([size, -size], rel=1e-5)
    # a far score leaves the slopes alone: theta is the middle of 300 and of log(exp 0 + exp -1)
    _, gradient = computed("lml", 2, [[500.0, 300.0, 0.0, -1.0]], [2], dtype, **settings)
    lower = torch.tensor([0.0, -1.0]).softmax(0)[0].item()
    assert gradient[0].tolist() == pytest.approx([0, 0.5, 0.5 * lower - 1, 0.5 * (1 - lower)], rel=1e-4)


@given(st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_sparse_rows_of_integers_have_the_gradient_of_float64(seed):
    """A corner of the indicator in every second row."""
    generator = torch.Generator().manual_seed(seed)
    logits, labels = torch.randint(-4, 5, (40, 6), generator=generator).float(), torch.arange(40) % 6
    loss = TopKCrossEntropyLoss("sparse_topk", [0.5, 0.5], inverse_temperature=1.0, reduction="sum")
    got, want = (value_and_gradient(loss, each, labels)[1].double() for each in (logits, logits.double()))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@both_precisions
def test_where_scores_lie_far_apart_theta_is_the_kth(dtype):
    logits = random_logits(4000, 8, 100.0, dtype)
    top, places = logits.topk(5, dim=1)
    apart = (top[:, :-1] - top[:, 1:] > 20).all(1)
    logits, places = logits[apart], places[apart]
    assert len(logits) > 100
    loss = TopKCrossEntropyLoss("capped_softmax", 2, inverse_temperature=1.0, top1_mode="sort")
    _, gradient = value_and_gradient(loss, logits, places[:, 4])
    want = torch.zeros_like(logits).scatter(1, places[:, 1:2], 1).scatter(1, places[:, 4:], -1) / len(logits)
    torch.testing.assert_close(gradient, want, rtol=1e-4, atol=1e-8)


@both_precisions
@pytest.mark.parametrize(
    "method", [name for name in DETERMINISTIC if "smooth" not in name and METHODS[name].inverse_temperature]
)
def test_a_temperature_learns_beside_classes_that_take_no_part(method, dtype):
    for masked in (1, 6):
        logits, labels = random_batch(4, 8, dtype=dtype)
        beta = torch.tensor(METHODS[method].inverse_temperature, dtype=dtype, requires_grad=True)
        logits[:, :masked] = -INF
        make_loss(method, p_k_of(method, 3), inverse_temperature=beta)(logits, labels.clamp(min=masked)).backward()
        assert bool(beta.grad.isfinite())


# Published identities.


@pytest.mark.parametrize("method", ["capped_softmax", "subset_topk"])
@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
def test_at_k_1_it_is_cross_entropy_whatever_the_logits(method, scale):
    logits, labels = random_batch(16, 12, scale)
    loss = TopKCrossEntropyLoss(method, 1, inverse_temperature=1.0, top1_mode="sort", reduction="none")
    want = value_and_gradient(lambda s: cross_entropy(s, labels, reduction="none"), logits)
    torch.testing.assert_close(value_and_gradient(loss, logits, labels), want, rtol=1e-6, atol=1e-9)


def test_lapsum_at_k_1_is_softmax_while_no_class_has_half_of_the_mass():
    logits = random_logits(64, 6, 1.5)
    softmax, mask = logits.softmax(1), topk_mask(logits, 1, "lapsum", 1.0)
    spread = softmax.amax(1) <= 0.5
    assert 0 < int(spread.sum()) < 64
    torch.testing.assert_close(mask[spread], softmax[spread])
    assert bool(((mask - softmax).abs().amax(1) > 1e-6)[~spread].all())


def test_sparse_topk_at_k_1_is_sparsemax_and_has_k_entries_in_the_end():
    logits = random_logits(5, 20)
    ordered = logits.sort(1, descending=True).values
    support = 1 + torch.arange(1, 21) * ordered > ordered.cumsum(1)  # Martins and Astudillo 2016
    size = support.sum(1, keepdim=True)
    tau = (ordered.cumsum(1).gather(1, size - 1) - 1) / size
    torch.testing.assert_close(topk_mask(logits, 1, "sparse_topk", 1.0), (logits - tau).clamp(min=0))
    wide = random_logits(3, 1000)
    assert (topk_mask(wide, 10, "sparse_topk", 1e3) > 0).sum(1).tolist() == [10] * 3
