"""The losses against their definitions: P_K, m and top1_mode, derivatives, extreme, masked and broken logits."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.functional import cross_entropy, one_hot, pad

from tests import reference
from tests.methods import DETERMINISTIC, GUARDED, RELAXED, p_k_of, random_batch, value_and_gradient
from topk_losses import (
    METHODS,
    RELAXATIONS,
    TOP1_MODES,
    LDRKLLoss,
    SoftmaxCrossEntropyLoss,
    TopKCrossEntropyLoss,
    TruncatedEntropyLoss,
    make_loss,
    topk_mask,
)
from topk_losses.kernels import VARIABLE

# A method whose masks have zeros wants a part of the softmax.
HAVE_ZEROS = {"sparse_topk", "perturbed_topk"}
MODES = [(method, mode) for method in RELAXED for mode in TOP1_MODES if mode != "sort" or method not in HAVE_ZEROS]
P_KS = ([1, 0, 0, 0, 0], [0, 0, 0, 0, 1], [0.5, 0, 0, 0, 0.5], [0.25, 0, 0, 0, 0.75], [0.1, 0, 0, 0, 0.9], [0.2] * 5)


def p_ks_for(method, top1_mode):
    """Those of P_KS that a loss of the method takes."""
    return [p_k for p_k in P_KS if (p_k[0] or method not in HAVE_ZEROS) and (p_k[0] < 1 or top1_mode == "sort")]


def by_definition(loss, logits, labels, p_k):
    """The loss per sample, from the full P of the loss's own operator, by the paper's double sum."""
    losses = []
    for b, y in enumerate(labels.tolist()):
        kept = reference.top_m(logits[b], y, loss.m) if loss.m else list(range(logits.shape[1]))
        scores, label = logits[b : b + 1, kept], torch.tensor([kept.index(y)])
        P = loss.operator.permutation_matrix(scores)
        share, guarded = p_k[b : b + 1, : P.shape[1]].double(), loss.method in GUARDED
        losses.append(reference.topk_cross_entropy(P, scores, label, share, loss.top1_mode, guarded))
    return torch.cat(losses)


def assert_is_by_definition(loss, logits, labels, share, **options):
    """In value and gradient: what the kernels compute in float32, too."""
    want, gradient = value_and_gradient(lambda s: by_definition(loss, s, labels, share), logits)
    for dtype, tolerance in ((torch.float64, {}), (torch.float32, {"rtol": 1e-4, "atol": 1e-5})):
        got, got_gradient = value_and_gradient(lambda s: loss(s, labels, **options), logits.to(dtype))
        torch.testing.assert_close(got.double(), want, **tolerance)
        slack = 1e-3 * float(gradient.abs().max()) if dtype == torch.float32 else 1e-7
        torch.testing.assert_close(got_gradient.double(), gradient, rtol=1e-6, atol=slack)


@pytest.mark.parametrize(("method", "top1_mode"), MODES)
@pytest.mark.parametrize("m", [None, 8])
def test_equals_its_definition(method, top1_mode, m):
    logits, labels = random_batch()
    for p_k in p_ks_for(method, top1_mode):
        loss = TopKCrossEntropyLoss(method, p_k, 12, m, top1_mode=top1_mode, reduction="none")
        assert_is_by_definition(loss, logits, labels, torch.tensor([p_k] * 6))


@pytest.mark.parametrize(
    ("name", "loss", "options"),
    [
        ("truncated_entropy", TruncatedEntropyLoss, {"k": [1, 2, 5]}),
        ("ldr_kl", LDRKLLoss, {"inverse_temperature": [1e-2, 0.5, 1.0, 20.0], "margin": [0.0, 0.1, 3.0]}),
        ("softmax_cross_entropy", SoftmaxCrossEntropyLoss, {}),
    ],
)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_loss_without_a_matrix_equals_its_definition(name, loss, options, data):
    options = {key: data.draw(st.sampled_from(values), key) for key, values in options.items()}
    n = data.draw(st.integers(1 + options.get("k", 1), 12), "n")
    scale = data.draw(st.sampled_from([1e-4, 1.0, 1e4]), "scale")
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    logits, labels = random_batch(5, n, scale, dtype, seed=data.draw(st.integers(0, 99)))
    definition = getattr(reference, name, functools.partial(cross_entropy, reduction="none"))
    got, want = loss(**options, reduction="none")(logits, labels), definition(logits.double(), labels, **options)
    size = max(scale, 1 / options.get("inverse_temperature", 1))
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-6 * size)


@pytest.mark.parametrize(("method", "top1_mode"), MODES)
def test_is_one_continuous_function_of_p_k_however_it_is_given(method, top1_mode):
    logits, labels = random_batch()
    build = functools.partial(TopKCrossEntropyLoss, method, num_classes=12, top1_mode=top1_mode, reduction="none")
    for p_k in p_ks_for(method, "sm"):
        want = build(p_k)(logits, labels)
        torch.testing.assert_close(build(p_k)(logits, labels, p_k=torch.tensor([p_k] * 6).double()), want)
        torch.testing.assert_close(build([p_k] * 12)(logits, labels), want)
        assert torch.equal(build([*p_k, 0, 0, 0])(logits, labels), want)
        assert torch.equal(build({k: share for k, share in enumerate(p_k, start=1) if share})(logits, labels), want)
        moved = [(1 - 1e-7) * share + 1e-7 * (k == 1) for k, share in enumerate(p_k)]
        torch.testing.assert_close(build(moved)(logits, labels), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("method", "top1_mode"), MODES)
def test_p_k_per_class_and_per_sample(method, top1_mode):
    logits, labels = random_batch()
    rows = torch.rand(12, 4, generator=torch.Generator().manual_seed(0))
    rows = (rows / rows.sum(1, keepdim=True)).double()
    rows[3] = torch.tensor([1.0, 0, 0, 0])  # a class for which only top-1 counts
    loss = TopKCrossEntropyLoss(method, rows, 12, top1_mode=top1_mode, reduction="none")
    assert_is_by_definition(loss, logits, labels, rows[labels])
    assert_is_by_definition(loss, logits, labels, rows[labels], p_k=rows[labels])
    torch.testing.assert_close(loss(logits, one_hot(labels, 12).double()), loss(logits, labels))


def test_p_k_can_be_learned_even_where_it_has_zeros():
    for method in ("softsort", "lml"):
        loss, p_k = TopKCrossEntropyLoss(method, [0.2, 0.3, 0.5], 6), torch.full((2, 3), 1 / 3, requires_grad=True)
        assert bool(torch.autograd.grad(loss(torch.zeros(2, 6), torch.tensor([0, 5]), p_k), p_k)[0].any())
        for top1_mode in TOP1_MODES:
            loss = TopKCrossEntropyLoss(method, [0.2, 0.3, 0.5], 6, top1_mode=top1_mode, inverse_temperature=1.0)
            p_k = torch.tensor([[1.0, 0, 0], [0, 0.5, 0.5]], requires_grad=True)
            far = torch.tensor([[0.0, 1000, 2000, 3000, 3000, 3000]] * 2)  # log P of -1000 and less
            gradient = torch.autograd.grad(loss(far, torch.tensor([0, 1]), p_k), p_k)[0]
            assert bool(gradient.isfinite().all())


@given(st.integers(2, 30) | st.integers(300, 400), st.data())
@settings(max_examples=80, deadline=None)
def test_top_m_keeps_the_true_class_and_the_largest_others(n, data):
    m = data.draw(st.integers(2, min(n, 20)) | st.just(n + 4))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    logits, labels = random_batch(8, n, dtype=dtype, seed=data.draw(st.integers(0, 999)))
    logits = logits.round() if data.draw(st.booleans(), "ties") else logits
    kept = torch.stack([logits[b, reference.top_m(logits[b], y, m)] for b, y in enumerate(labels.tolist())])
    build = functools.partial(TopKCrossEntropyLoss, "softsort", [0.5, 0.5], reduction="none")
    value, gradient = value_and_gradient(build(m=m), logits, labels)
    want, of_kept = value_and_gradient(build(), kept, torch.zeros_like(labels))
    torch.testing.assert_close(value, want)
    # among equal scores it is arbitrary which are kept
    of_kept = pad(of_kept, (0, n - kept.shape[1]))
    torch.testing.assert_close(gradient.sort(1).values, of_kept.sort(1).values)


@pytest.mark.parametrize("method", RELAXED)
def test_m_beyond_the_classes_keeps_all_of_them(method):
    logits, labels = random_batch(8, 10)
    want = TopKCrossEntropyLoss(method, [0.5, 0, 0.5], 10, m=10)(logits, labels)
    torch.testing.assert_close(TopKCrossEntropyLoss(method, [0.5, 0, 0.5], m=16)(logits, labels), want)
    if not METHODS[method].network:  # whose values depend on the lanes that the classes start on
        torch.testing.assert_close(TopKCrossEntropyLoss(method, [0.5, 0, 0.5])(logits, labels), want)


@pytest.mark.parametrize("method", RELAXED)
def test_all_classes_are_sorted_if_asked(method):
    if method in HAVE_ZEROS:
        return  # it refuses to be asked without the softmax
    logits, labels = random_batch()
    loss = TopKCrossEntropyLoss(method, [1 / 12] * 12, top1_mode="sort", reduction="none")
    column = TopKCrossEntropyLoss(method, 12, top1_mode="sort", reduction="none")(logits, labels)
    torch.testing.assert_close(column, torch.zeros_like(column), rtol=0, atol=0.5)  # among 12 of 12 for sure, about
    assert bool(loss(logits, labels).isfinite().all())


# Derivatives.


@pytest.mark.parametrize(
    ("method", "top1_mode"), [*MODES, *((name, None) for name in DETERMINISTIC if name not in RELAXED)]
)
@pytest.mark.parametrize("m", [None, 6])
def test_first_and_second_derivatives(method, top1_mode, m):
    p_k = [0.5, 0, 0.2, 0.3] if method in RELAXED else p_k_of(method, 3)
    loss, logits = make_loss(method, p_k, 9, m, top1_mode=top1_mode), random_batch(3, 9)[0]
    labels = torch.tensor([0, 8, 4])  # wherever the true class stands
    assert gradcheck(lambda s: loss(s, labels), (logits.requires_grad_(),))
    mass = random_batch(3, 9, seed=1)[0].softmax(1)
    assert gradcheck(lambda s: loss(s, mass), (logits,))
    if method not in RELAXED:  # whose operators are asked by themselves
        assert gradgradcheck(lambda s: loss(s, labels), (logits,))
    seconds = []
    for leaf in (logits.detach().float().requires_grad_(), logits):
        (first,) = torch.autograd.grad(loss(leaf, labels), leaf, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), leaf)[0].double())
    torch.testing.assert_close(*seconds, rtol=1e-3, atol=1e-3 * float(seconds[1].abs().max()))


@pytest.mark.parametrize("method", [name for name in DETERMINISTIC if METHODS[name].inverse_temperature is not None])
def test_a_temperature_that_is_learned_is_a_parameter_of_the_loss(method):
    if method in ("smooth_topk", "smooth_hard_topk"):
        return  # whose temperature is a number
    logits, labels = random_batch(dtype=torch.float32)
    build = functools.partial(make_loss, method, p_k_of(method, 3), 12)
    loss = build(inverse_temperature=torch.nn.Parameter(torch.tensor(2.0)))
    assert [name for name, _ in loss.named_parameters()] == list(loss.state_dict()) == ["inverse_temperature"]
    loss(logits, labels).backward()
    assert float(loss.inverse_temperature.grad.abs()) > 0
    scheduled = build(inverse_temperature=torch.tensor(2.0))
    torch.testing.assert_close(scheduled(logits, labels), loss(logits, labels).detach(), rtol=1e-4, atol=1e-5)


# Logits of any size, masked and broken ones.


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_extreme_logits_give_finite_losses_and_gradients(method, scale):
    for dtype in (torch.float32, torch.float64):
        value, gradient = value_and_gradient(make_loss(method, p_k_of(method)), *random_batch(16, 50, scale, dtype))
        assert bool(value.isfinite())
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("backend", ["torch", ""])
@pytest.mark.parametrize("method", METHODS)
def test_a_nan_or_infinite_logit_spoils_its_sample_only(method, backend, monkeypatch):
    monkeypatch.setenv(VARIABLE, backend)
    mode = {"top1_mode": "sort"} if method in RELAXATIONS and method not in HAVE_ZEROS else {}
    loss, keep = make_loss(method, p_k_of(method, 3), 12, reduction="none", **mode), [0, 1, 3, 4, 5]
    logits, labels = random_batch(dtype=torch.float32)

    def computed(logits):
        loss.generator = torch.Generator().manual_seed(0)
        return value_and_gradient(loss, logits, labels)

    clean, of_clean = computed(logits)
    for bad in (float("nan"), float("inf")):
        for column in (int(labels[2]), int(labels[2] + 1) % 12, 11):
            spoilt = logits.clone()
            spoilt[2, column] = bad
            value, gradient = computed(spoilt)
            assert value.isnan().nonzero().flatten().tolist() == [2]
            torch.testing.assert_close(value[keep], clean[keep])
            torch.testing.assert_close(gradient[keep], of_clean[keep])


@pytest.mark.parametrize("method", DETERMINISTIC)
def test_classes_masked_with_minus_infinity_take_no_part(method):
    """As a class far below all others, with a finite loss and no gradient of its own."""
    logits, labels = random_batch()
    labels, masked = labels % 8, torch.arange(12) >= 8
    loss = make_loss(method, None, 12)
    value, gradient = value_and_gradient(loss, logits.masked_fill(masked, -torch.inf), labels)
    assert bool(gradient.isfinite().all())
    assert not bool(gradient[:, 8:].any())
    if method not in ("sinkhorn_sort", "soft_topk"):  # a third of the classes far below is no limit for their whitening
        torch.testing.assert_close(value, loss(logits.masked_fill(masked, -1e9), labels), rtol=1e-5, atol=1e-6)
    if method in RELAXED:  # m leaves them out
        few = TopKCrossEntropyLoss(method, [0.5, 0, 0.5], 8, 7)(logits[:, :8], labels)
        loss = TopKCrossEntropyLoss(method, [0.5, 0, 0.5], 12, 7)
        torch.testing.assert_close(loss(logits.masked_fill(masked, -torch.inf), labels), few)


@pytest.mark.parametrize("method", ["lml", "lapsum", "capped_softmax"])
@pytest.mark.parametrize("top1_mode", TOP1_MODES)
def test_the_loss_stays_in_logarithms_however_far_the_true_class_lies(method, top1_mode):
    """There -log mask = beta times the distance, with its gradient; a guard would end at 16.1 without one."""
    logits, label = torch.tensor([[0.0, -1, -2, -3, -200, -90]]), torch.tensor([4])
    loss = make_loss(method, [0.5, 0, 0.5], inverse_temperature=1.0, top1_mode=top1_mode)
    value, gradient = value_and_gradient(loss, logits, label)
    assert float(value) > 190
    assert float(gradient[0, 4]) == pytest.approx(-1, abs=1e-4)
    assert float(gradient.sum()) == pytest.approx(0, abs=1e-4)  # the others go up by as much
    torch.testing.assert_close(value.double(), loss(logits.double(), label), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("top1_mode", ["sm", "smce"])
def test_a_class_that_the_softmax_rules_out_has_a_finite_loss(top1_mode):
    logits, label = torch.tensor([[1e4, 0.0, -1e4, 3.0, 2.0]]), torch.tensor([2])
    loss = TopKCrossEntropyLoss("softsort", [0.5, 0.5], 5, top1_mode=top1_mode)
    value, gradient = value_and_gradient(loss, logits, label)
    torch.testing.assert_close(value.double(), loss(logits.double(), label), rtol=1e-6, atol=0)
    assert bool(gradient.isfinite().all())


def test_where_a_mask_is_0_the_gradient_is_the_softmax_s():
    logits, labels = random_batch(2, 6, 1.0)
    far = logits.index_fill(1, labels, -8.0)
    _, gradient = value_and_gradient(TopKCrossEntropyLoss("sparse_topk", [0.5, 0, 0.5]), far, labels)
    assert float(topk_mask(far, 3, "sparse_topk")[0, labels[0]]) == 0
    assert float(gradient[0, labels[0]]) < -0.1
