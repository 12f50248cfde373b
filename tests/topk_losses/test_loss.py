"""The losses against their definitions: P_K, m and top1_mode, derivatives, any logits, precision, and settings."""

import functools
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy, one_hot, pad
from torch.utils.checkpoint import checkpoint

from tests import methods, reference
from tests.methods import (
    DETERMINISTIC,
    GUARDED,
    HAVE_ZEROS,
    LEARNABLE,
    MODES,
    RELAXED,
    gradcheck,
    gradgradcheck,
    p_k_of,
    random_batch,
    value_and_gradient,
    with_backends,
)
from topk_losses import (
    METHODS,
    RELAXATIONS,
    TOP1_MODES,
    RelaxedNetwork,
    TopKCrossEntropyLoss,
    classification,
    make_loss,
    topk_cross_entropy,
)
from topk_losses.kernels import VARIABLE
from topk_losses.methods import SINGLE_K

P_KS = ([1, 0, 0, 0, 0], [0, 0, 0, 0, 1], [0.1, 0, 0, 0, 0.9], [0.2] * 5)


def p_ks_for(method, top1_mode):
    """Those of P_KS that a loss of the method takes."""
    return [p_k for p_k in P_KS if (p_k[0] or method not in HAVE_ZEROS) and (p_k[0] < 1 or top1_mode == "sort")]


def by_definition(loss, logits, labels, p_k):
    """The loss per sample, from the full P of the loss's own operator, by the paper's double sum."""
    losses = []
    for b, y in enumerate(labels.tolist()):
        kept = reference.top_m(logits[b], y, loss.m) if loss.m else list(range(logits.shape[1]))
        scores = logits[b : b + 1, kept]
        label = torch.tensor([kept.index(y)])
        P = loss.operator.permutation_matrix(scores, p_k.shape[1], loss.inverse_temperature)
        share = p_k[b : b + 1, : P.shape[1]].double()
        guarded = not loss.operator.returns_logarithms
        losses.append(reference.topk_cross_entropy(P, scores, label, share, loss.top1_mode, guarded))
    return torch.cat(losses)


def assert_is_by_definition(loss, logits, labels, share, **options):
    """In value and gradient: what the kernels compute in float32, too."""
    want, gradient = value_and_gradient(lambda s: by_definition(loss, s, labels, share), logits)
    for dtype, tolerance in ((torch.float64, {}), (torch.float32, {"rtol": 1e-4, "atol": 1e-5})):
        got, got_gradient = value_and_gradient(lambda s: loss(s, labels, **options), logits.to(dtype))
        torch.testing.assert_close(got.double(), want, **tolerance)
        assert bool((got >= 0).all())
        slack = 1e-3 * float(gradient.abs().max()) if dtype == torch.float32 else 1e-7
        torch.testing.assert_close(got_gradient.double(), gradient, rtol=1e-6, atol=slack)


@pytest.mark.parametrize(("method", "top1_mode"), MODES)
@pytest.mark.parametrize("m", [None, 8])
def test_equals_its_definition_however_p_k_is_given(method, top1_mode, m):
    logits, labels = random_batch()
    build = functools.partial(TopKCrossEntropyLoss, method, num_classes=12, m=m, top1_mode=top1_mode, reduction="none")
    for p_k in p_ks_for(method, top1_mode):
        assert_is_by_definition(build(p_k), logits, labels, torch.tensor([p_k] * 6))
        want = build(p_k)(logits, labels)
        shares = {k: share for k, share in enumerate(p_k, start=1) if share}
        same = [[*p_k, 0, 0, 0], tuple(p_k), np.array(p_k), torch.tensor(p_k, dtype=torch.float64), shares]
        for other in same + ([5, np.int64(5)] if p_k[4] == 1 else []):
            assert torch.equal(build(other)(logits, labels), want)
        tied = (logits / 2).round()
        want_of_tied = by_definition(build(p_k), tied, labels, torch.tensor([p_k] * 6))
        torch.testing.assert_close(build(p_k)(tied, labels), want_of_tied)
        if p_k[0] < 1:  # a continuous function
            moved = [(1 - 1e-7) * share + 1e-7 * (k == 1) for k, share in enumerate(p_k)]
            torch.testing.assert_close(build(moved)(logits, labels), want, rtol=0, atol=1e-5)
    rows = random_batch(12, 4)[0].softmax(1)
    rows[3] = torch.tensor([1.0, 0, 0, 0])  # a class for which only top-1 counts
    assert_is_by_definition(build(rows), logits, labels, rows[labels])
    assert_is_by_definition(build([0.25] * 4), logits, labels, rows[labels], p_k=rows[labels])


WITHOUT_A_MATRIX = {
    "softmax_cross_entropy": {},
    "truncated_entropy": {"k": [1, 2, 4]},
    "ldr_kl": {"inverse_temperature": [1e-2, 0.5, 1.0, 20.0], "margin": [0.0, 0.1, 3.0]},
    "forward_correction": {"noise_rate": [0.01, 0.2, 0.6, 0.99]},
    "forward_correction by T": {"T": [random_batch(6, 6, seed=3)[0].softmax(1)]},
    "generalized_cross_entropy": {"q": [1e-3, 0.5, 0.7, 1.0]},
    "symmetric_cross_entropy": {"alpha": [6.0, 0.0], "beta": [0.1, 1.0], "A": [-4.0, -1.0]},
    "nce_rce": {"alpha": [10.0, 0.0], "beta": [0.1, 1.0], "A": [-4.0, -1.0]},
    "phuber_cross_entropy": {"tau": [1.1, 10.0, 50.0]},
}


@pytest.mark.parametrize("name", WITHOUT_A_MATRIX)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_loss_without_a_matrix_equals_its_definition(name, data):
    options = {key: data.draw(st.sampled_from(values), key) for key, values in WITHOUT_A_MATRIX[name].items()}
    n = 6 if "T" in options else data.draw(st.integers(5, 12), "n")
    scale = data.draw(st.sampled_from([1e-4, 1.0, 30.0, 1e4]), "scale")
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    logits, labels = random_batch(5, n, scale, dtype, seed=data.draw(st.integers(0, 99)))
    if data.draw(st.booleans(), "masked"):
        logits[:, -1] = -torch.inf
        labels = labels.clamp(max=n - 2)
    definition = getattr(reference, name, functools.partial(reference.robust, method=name))
    loss = functools.partial(make_loss, name.split()[0], reduction="none")
    loss = loss(options["k"]) if "k" in options else loss(**options)
    got, gradient = value_and_gradient(loss, logits, labels)
    want, want_gradient = value_and_gradient(lambda s: definition(s, labels, **options), logits.double())
    size = max(scale, 1 / options.get("inverse_temperature", 1))
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-6 * size)
    slack = 1e-3 if scale == 1e4 else 1e-4  # rounding of the logits, which exponentials see
    torch.testing.assert_close(
        gradient.double(), want_gradient, rtol=slack, atol=slack * max(float(want_gradient.abs().max()), 1)
    )


def test_losses_without_a_matrix_at_their_limits():
    logits = torch.tensor([[3.0, 1, 0, -1]], dtype=torch.float64)
    for label, k, want in ((1, 1, 2.185), (3, 3, 1.313)):  # log(1 + exp 2 + exp -1 + exp -2), log(1 + exp 1)
        loss = make_loss("truncated_entropy", k)
        assert float(loss(logits, torch.tensor([label]))) == pytest.approx(want, abs=5e-4)
    logits, labels = random_batch()
    build = functools.partial(make_loss, "forward_correction", None, 12)
    for loss in (build(noise_rate=0), build(T=torch.eye(12)), make_loss("symmetric_cross_entropy", alpha=1, beta=0)):
        torch.testing.assert_close(loss(logits, labels), cross_entropy(logits, labels))
    uniform = (0.7 * torch.eye(12, dtype=torch.float64) + 0.3 / 12).tolist()
    torch.testing.assert_close(build(noise_rate=0.3)(logits, labels), build(T=uniform)(logits, labels))
    logits[0, labels[0]] = -torch.inf  # a masked true class
    for method in SINGLE_K:
        losses, gradient = value_and_gradient(make_loss(method, 3, reduction="none"), logits, labels)
        assert (losses > 1e17).tolist() == [True] + [False] * 5
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("method", [name for name in RELAXED if name not in methods.WITHOUT_A_SUM])
def test_forward_correction_of_a_top_k_loss_sums_over_what_the_label_may_have_been(method):
    """-log sum_j T[j, y] s_j with exp(-loss) of every class for s."""
    logits, labels = random_batch()
    rows = random_batch(12, 4)[0].softmax(1)
    T = 0.7 * torch.eye(12, dtype=torch.float64) + 0.3 / 12
    for p_k in ([0.5, 0, 0, 0, 0.5], [0.2] * 5, rows):
        build = functools.partial(TopKCrossEntropyLoss, method, p_k, num_classes=12, reduction="none")
        share = rows[labels] if p_k is rows else None  # of the sample, whatever its label may have been
        losses = [build()(logits, torch.full_like(labels, j), share) for j in range(12)]
        s = (-torch.stack(losses, dim=1)).exp()  # (batch, n)
        want = -(s * T[:, labels].T).sum(1).log()
        torch.testing.assert_close(build(noise_rate=0.3)(logits, labels), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", RELAXED)
@pytest.mark.parametrize("m", [None, 6])
def test_forward_correction_of_a_top_k_loss_adds_what_a_random_label_would_have(method, m):
    """-log((1 - eta) u_y + eta E[k] / n), n the classes that are not masked out, however many of them are sorted."""
    logits, labels = random_batch()
    rows = random_batch(12, 4)[0].softmax(1)
    logits[1, (labels[1] + 1) % 12] = -torch.inf
    number = (logits > -torch.inf).sum(1)
    for p_k, ranks in (([0.5, 0, 0, 0, 0.5], 3.0), (rows, rows[labels] @ torch.arange(1.0, 5, dtype=torch.float64))):
        build = functools.partial(TopKCrossEntropyLoss, method, p_k, num_classes=12, m=m, reduction="none")
        u = (-build()(logits, labels)).exp()
        want = -(0.7 * u + 0.3 * ranks / number).log()
        torch.testing.assert_close(build(noise_rate=0.3)(logits, labels), want)


@pytest.mark.parametrize("method", RELAXED)
@pytest.mark.parametrize("m", [None, 6])
def test_forward_correction_of_a_top_k_loss_at_its_limits(method, m):
    logits, labels = random_batch(3)
    build = functools.partial(TopKCrossEntropyLoss, method, {1: 0.5, 5: 0.5}, m=m, reduction="none")
    mass = random_batch(3, seed=1)[0].softmax(1)
    loss = build(noise_rate=0.4)
    for target in (labels, mass):
        assert torch.equal(build(noise_rate=0)(logits, target), build()(logits, target))
        assert gradcheck(lambda s, target=target: loss(s, target), (logits.requires_grad_(),))
    logits = logits.detach()
    logits[0, labels[0]] = -torch.inf  # of a masked true class: the bound, without a gradient that is not finite
    value, gradient = value_and_gradient(loss, logits, labels)
    if method in ("lapsum", "lml"):
        assert float(value[0]) == pytest.approx(-np.log(0.4 * 3 / 11))
    assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("method", ["softsort", "lml"])
def test_p_k_can_be_learned_even_where_it_has_zeros(method):
    far = torch.tensor([[0.0, 1000, 2000, 3000, 3000, 3000]] * 2)  # log P of -1000 and less
    for top1_mode, logits in itertools.product(TOP1_MODES, (far, torch.zeros(2, 6))):
        loss = TopKCrossEntropyLoss(
            method, [0.2, 0.3, 0.5], num_classes=6, top1_mode=top1_mode, inverse_temperature=1.0
        )
        p_k = torch.tensor([[1.0, 0, 0], [0, 0.5, 0.5]], requires_grad=True)
        (gradient,) = torch.autograd.grad(loss(logits, torch.tensor([0, 1]), p_k), p_k)
        assert bool(gradient.isfinite().all())
        assert bool(gradient.any()) or logits is far


@pytest.mark.parametrize(("method", "top1_mode"), methods.WITH_MODES)
@pytest.mark.parametrize("m", [None, 6])
def test_first_and_second_derivatives(method, top1_mode, m):
    p_k = [0.5, 0, 0.2, 0.3] if method in RELAXED else p_k_of(method, 3)
    loss = make_loss(method, p_k, None, m, top1_mode=top1_mode)
    logits = random_batch(3, 9)[0]
    labels = torch.tensor([0, 8, 4])  # wherever the true class stands
    assert gradcheck(lambda s: loss(s, labels), (logits.requires_grad_(),))
    mass = random_batch(3, 9, seed=1)[0].softmax(1)
    assert gradcheck(lambda s: loss(s, mass), (logits,))
    if method not in RELAXED:  # whose operators are asked by themselves
        assert gradgradcheck(lambda s: loss(s, labels), (logits,))
    logits = pad(logits.detach(), (0, 2), value=-torch.inf)  # masked classes
    logits[0, 0] += 1e4  # a sample that is sure
    seconds = []
    for leaf in (logits.float().requires_grad_(), logits.requires_grad_()):
        (first,) = torch.autograd.grad(loss(leaf, labels), leaf, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), leaf)[0].double())
    torch.testing.assert_close(*seconds, rtol=1e-3, atol=1e-3 * float(seconds[1].abs().max()))


# Logits of any size, broken and far ones.


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_extreme_logits_give_finite_losses_and_gradients(method, scale):
    for dtype in (torch.float32, torch.float64):
        value, gradient = value_and_gradient(make_loss(method, p_k_of(method)), *random_batch(16, 50, scale, dtype))
        assert bool(value.isfinite())
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize(("method", "backend"), with_backends((method,) for method in METHODS))
def test_a_nan_or_infinite_logit_spoils_its_sample_only(method, backend, monkeypatch):
    monkeypatch.setenv(VARIABLE, backend)
    mode = {"top1_mode": "sort"} if method in RELAXATIONS and method not in HAVE_ZEROS else {}
    loss = make_loss(method, p_k_of(method, 3), 12, reduction="none", **mode)
    keep = [0, 1, 3, 4, 5]
    logits, labels = random_batch(dtype=torch.float32)

    def computed(logits):
        loss.generator = torch.Generator().manual_seed(0)
        return value_and_gradient(loss, logits, labels)

    clean, clean_gradient = computed(logits)
    for bad, column in itertools.product((torch.nan, torch.inf), (int(labels[2]), int(labels[2] + 1) % 12, 11)):
        spoilt = logits.clone()
        spoilt[2, column] = bad
        value, gradient = computed(spoilt)
        assert value.isnan().nonzero().flatten().tolist() == [2]
        torch.testing.assert_close((value[keep], gradient[keep]), (clean[keep], clean_gradient[keep]))


@pytest.mark.parametrize("method", ["lml", "lapsum", "capped_softmax"])
@pytest.mark.parametrize("top1_mode", TOP1_MODES)
def test_the_loss_stays_in_logarithms_however_far_the_true_class_lies(method, top1_mode):
    """There -log of the indicator is beta times the distance; an epsilon would end at 16.1 without a gradient."""
    logits = torch.tensor([[0.0, -1, -2, -3, -200, -90]])
    label = torch.tensor([4])
    loss = make_loss(method, [0.5, 0, 0.5], inverse_temperature=1.0, top1_mode=top1_mode)
    value, gradient = value_and_gradient(loss, logits, label)
    assert float(value) > 190
    assert float(gradient[0, 4]) == pytest.approx(-1, abs=1e-4)
    assert float(gradient.sum()) == pytest.approx(0, abs=1e-4)  # the others go up by as much
    torch.testing.assert_close(value.double(), loss(logits.double(), label), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", sorted(GUARDED & {*RELAXED} - {"sinkhorn_sort"}))
def test_the_epsilon_is_the_official_one(method, dtype):
    """log(p (1 - 2e-7) + 1e-7), at p = 0 and at p = 1; except sinkhorn_sort, which never comes to 0."""
    logits = torch.tensor([[0.0, 1e4, 2e4, 3e4, 4e4, 5e4]] * 2, dtype=dtype)
    labels = torch.tensor([0, 5])
    losses = TopKCrossEntropyLoss(method, [0.5, 0.5], reduction="none")(logits, labels)
    rounding = 6e-8 if dtype == torch.float32 else 1e-14
    assert losses.tolist() == pytest.approx([-np.log(1e-7), 1e-7], rel=1e-6, abs=rounding)


# What users of torch.nn.CrossEntropyLoss expect.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", DETERMINISTIC)
def test_reductions_and_ignored_samples_which_may_hold_anything(method, dtype):
    logits, labels = random_batch(dtype=dtype)
    losses, gradients = value_and_gradient(make_loss(method, None, 12, reduction="none"), logits, labels)
    torch.testing.assert_close(make_loss(method, None, 12)(logits, labels), losses.mean())
    logits[1] = torch.nan
    for ignore_index in (-100, 7):
        labels[[1, 4]] = ignore_index
        kept = labels != ignore_index
        build = functools.partial(make_loss, method, ignore_index=ignore_index)
        value, gradient = value_and_gradient(build(reduction="none"), logits, labels)
        torch.testing.assert_close(value, losses * kept)
        torch.testing.assert_close(gradient, gradients * kept.unsqueeze(1))
        torch.testing.assert_close(build(reduction="sum")(logits, labels), losses[kept].sum())
        torch.testing.assert_close(build()(logits, labels), losses[kept].mean())
    assert bool(make_loss(method)(logits, torch.full_like(labels, -100)).isnan())  # as torch.nn.CrossEntropyLoss
    assert bool(make_loss(method)(logits[:0], labels[:0]).isnan())  # an empty batch, too
    value, gradient = value_and_gradient(make_loss(method, reduction="sum"), logits[:0], labels[:0])
    assert (float(value), gradient.shape) == (0, (0, 12))


@pytest.mark.parametrize("method", DETERMINISTIC)
def test_leaves_its_inputs_alone_and_can_go_back_twice_whatever_the_defaults_of_pytorch(method):
    logits, labels = random_batch(dtype=torch.float32)
    before = logits.clone()
    other = logits.T.contiguous().T.requires_grad_()  # another order in memory
    loss = make_loss(method, m=8)
    with torch.inference_mode():  # what is built and kept there serves training too
        loss(logits, labels)
    want = value_and_gradient(loss, logits, labels)
    value = loss(other, labels)
    for retain in (True, False):  # nothing saved is written over
        torch.testing.assert_close(torch.autograd.grad(value, other, retain_graph=retain)[0], want[1])
    torch.testing.assert_close(value.detach(), want[0])
    again = checkpoint(loss, other, labels, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(again, other)[0], want[1])
    assert torch.equal(logits, before)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):  # the default device
            got = value_and_gradient(loss, logits, labels)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(got, want)  # and of the same dtype and device; sums round by where tensors lie
    wider = random_batch(n=20)  # the number of classes is that of the logits
    torch.testing.assert_close(loss(*wider), make_loss(method, num_classes=20, m=8)(*wider))


@pytest.mark.parametrize("method", DETERMINISTIC)
def test_threads_that_share_a_loss_get_what_each_would_alone(method):
    loss = make_loss(method, p_k_of(method, 3), reduction="none")
    number = 4
    batches = [random_batch(8, 21 + i, dtype=torch.float32, seed=i) for i in range(number)]
    together = threading.Barrier(number)

    def compute(batch):
        together.wait(60)
        return value_and_gradient(loss, *batch)

    with ThreadPoolExecutor(number) as pool:
        results = list(pool.map(compute, batches))
    for batch, result in zip(batches, results):
        torch.testing.assert_close(result, value_and_gradient(loss, *batch), rtol=1e-5, atol=1e-6)


# Settings and names.


def test_the_function_is_the_module_and_names_are_the_published_ones():
    logits, labels = random_batch()
    settings = {"m": 8, "top1_mode": "smce", "reduction": "none", "num_classes": np.int64(12)}
    for method in RELAXED:
        want = TopKCrossEntropyLoss(method, [0.5, 0, 0.5], **settings)(logits, labels)
        assert torch.equal(topk_cross_entropy(logits, labels, {1: 0.5, 3: 0.5}, method, **settings), want)
    assert make_loss("bitonic__non_sparse").operator == make_loss("bitonic").operator == RelaxedNetwork("bitonic")
    assert repr(make_loss("smooth_hard_topk", [0, 0, 0, 0, 1], 12, 8, inverse_temperature=0.5)) == (
        "SmoothHardTopKLoss(num_classes=12, label_smoothing=0, soft_labels=expected, ignore_index=-100, "
        "reduction=mean, k=5, tau=0.5, alpha=1)"
    )


@pytest.mark.parametrize("method", RELAXED)
def test_p_k_and_the_inverse_temperature_can_be_set_later(method):
    logits, labels = random_batch()
    loss = TopKCrossEntropyLoss(method, [0.5, 0, 0.5], num_classes=12)
    loss.inverse_temperature = 7
    loss.p_k = {1: 0.1, 2: 0.2, 5: 0.7}
    want = TopKCrossEntropyLoss(method, [0.1, 0.2, 0, 0, 0.7], inverse_temperature=7.0)
    torch.testing.assert_close(loss(logits, labels), want(logits, labels))
    loss.p_k.zero_()  # a copy, as its docstring says
    torch.testing.assert_close(loss.p_k, torch.tensor([0.1, 0.2, 0, 0, 0.7], dtype=torch.float64))
    for p_k in ([0.5, 0.6], 13):
        with pytest.raises(ValueError, match="p_k"):
            loss.p_k = p_k
    loss.inverse_temperature = -1
    with pytest.raises(ValueError, match="inverse_temperature must be a finite number above 0, got -1"):
        loss(logits, labels)


@pytest.mark.parametrize("settings", [{"m": 5}, {"num_classes": 5}])
def test_a_part_of_p_k_on_the_rank_within_which_all_are_gets_a_warning(settings):
    with pytest.warns(UserWarning, match=r"p_k has 0.25 of its mass on rank 5.*the loss is at most 1.39 however low"):
        loss = TopKCrossEntropyLoss("lapsum", p_k={1: 0.75, 5: 0.25}, **settings)
    far = torch.tensor([[0.0, 50, 60, 70, 80]])
    assert float(loss(far, torch.tensor([0]))) == pytest.approx(1.386, abs=1e-3)


@pytest.mark.filterwarnings("error")
def test_a_p_k_below_that_rank_gets_none():
    TopKCrossEntropyLoss("lapsum", p_k={1: 0.5, 4: 0.5}, m=5)
    TopKCrossEntropyLoss("lapsum", p_k={1: 0.5, 5: 0.5})


@pytest.mark.parametrize("method", [name for name in RELAXED if name not in GUARDED])
def test_p_k_of_the_loss_is_scaled_and_that_of_a_call_taken_as_it_is_in_value_and_gradient(method):
    logits, labels = random_batch()
    exact = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    near = exact * (1 + 5e-5)  # summing to 1 within 1e-4
    own = [TopKCrossEntropyLoss(method, p_k, reduction="none")(logits, labels) for p_k in (exact, near)]
    torch.testing.assert_close(own[1], own[0], rtol=1e-14, atol=0)
    rows = near.repeat(6, 1).requires_grad_()
    losses = TopKCrossEntropyLoss(method, exact, reduction="none")(logits, labels, p_k=rows)
    torch.testing.assert_close(own[0] - losses, torch.full_like(losses, 5e-5), rtol=1e-3, atol=0)
    (gradient,) = torch.autograd.grad(losses.sum(), rows)
    along = (gradient * rows).sum(1)
    torch.testing.assert_close(along, -torch.ones_like(along))


@pytest.mark.parametrize("p_k", [[0.5, 0, 0.5], [[0.5, 0, 0.5], [0.9, 0, 0.1]] * 6], ids=["one", "per class"])
@pytest.mark.parametrize("m", [8, None])
@pytest.mark.parametrize("method", RELAXED)
def test_what_is_set_after_the_forward_pass_changes_no_gradient_of_it(method, m, p_k, monkeypatch):
    """Where the backward pass computes the loss again, a few scores at a time."""
    monkeypatch.setattr(classification, "SCORES_AT_ONCE", 40)
    monkeypatch.setattr(classification, "SCORES_OF_ROWS", 40)
    logits, labels = random_batch()
    logits.requires_grad_()
    gradients = []
    for is_changed in (False, True):
        loss_fn = TopKCrossEntropyLoss(method, p_k, num_classes=12, m=m, label_smoothing=0.1)
        loss_fn.generator = torch.Generator().manual_seed(0)
        loss = loss_fn(logits, labels)
        if is_changed:
            loss_fn.p_k = {1: 0.2, 2: 0.8}
            loss_fn.inverse_temperature = 0.01
        gradients.append(torch.autograd.grad(loss, logits)[0])
    assert torch.equal(*gradients)


@pytest.mark.parametrize(
    ("method", "settings", "name", "value"),
    [
        ("smooth_topk", {}, "alpha", 2.0),
        ("smooth_hard_topk", {}, "k", 2),
        ("splitter_selection", {"m": 8}, "noise_rate", 0.3),
        ("splitter_selection", {"m": 8}, "m", 6),
        ("lapsum", {}, "top1_mode", "smce"),
        ("forward_correction", {"T": torch.eye(12)}, "T", torch.full((12, 12), 1 / 12)),
    ],
)
def test_no_setting_that_is_assigned_after_the_forward_pass_changes_its_gradient(
    method, settings, name, value, monkeypatch
):
    """With smoothing, every class is a label, and without it two of each row."""
    monkeypatch.setattr(classification, "SCORES_AT_ONCE", 40)
    monkeypatch.setattr(classification, "SCORES_OF_ROWS", 40)
    logits, labels = random_batch()
    logits.requires_grad_()
    target = one_hot(labels, 12).double().lerp(one_hot(labels.roll(1), 12).double(), 0.3)
    for smoothing in (0.0, 0.1):
        gradients = []
        for is_changed in (False, True):
            loss_fn = make_loss(method, p_k_of(method, 3), 12, label_smoothing=smoothing, **settings)
            loss = loss_fn(logits, target)
            if is_changed:
                setattr(loss_fn, name, value)
            gradients.append(torch.autograd.grad(loss, logits)[0])
        assert torch.equal(*gradients)


def test_a_matrix_that_changes_in_place_after_the_forward_pass_changes_no_gradient_of_it(monkeypatch):
    """Where the backward pass computes the loss again; elsewhere PyTorch raises an error."""
    monkeypatch.setattr(classification, "SCORES_AT_ONCE", 40)
    logits, labels = random_batch()
    logits.requires_grad_()
    target = one_hot(labels, 12).double().lerp(one_hot(labels.roll(1), 12).double(), 0.3)
    gradients = []
    for is_changed in (False, True):
        loss_fn = make_loss("forward_correction", num_classes=12, T=torch.eye(12, dtype=torch.float64) * 0.4 + 0.05)
        loss = loss_fn(logits, target)
        if is_changed:
            loss_fn.T.fill_(1 / 12)
        gradients.append(torch.autograd.grad(loss, logits)[0])
    assert torch.equal(*gradients)


@pytest.mark.parametrize("method", [method for method in LEARNABLE if METHODS[method].takes != "top-1"])
def test_few_rows_at_a_time_have_the_losses_of_all_rows(method, monkeypatch):
    """Of every class: the losses, and the gradients of logits, inverse temperature and P_K of each sample."""
    logits, labels = random_batch()
    logits.requires_grad_()
    beta = torch.nn.Parameter(torch.tensor(0.9, dtype=torch.float64))
    loss_fn = make_loss(method, p_k_of(method, 3), 12, inverse_temperature=beta, label_smoothing=0.1)
    arguments = {}
    leaves = [logits, beta]
    if method in RELAXED:
        p_k = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64).repeat(6, 1).requires_grad_()
        arguments = {"p_k": p_k}
        leaves.append(p_k)
    found = []
    for scores_of_rows in (classification.SCORES_OF_ROWS, 80):
        monkeypatch.setattr(classification, "SCORES_OF_ROWS", scores_of_rows)
        loss = loss_fn(logits, labels, **arguments)
        found.append([loss, *torch.autograd.grad(loss, leaves)])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.filterwarnings("ignore:p_k has")
def test_a_temperature_without_influence_has_no_gradient_however_many_losses_there_are(monkeypatch):
    """All are within rank m."""
    logits, labels = random_batch()
    logits.requires_grad_()
    beta = torch.nn.Parameter(torch.tensor(0.9))
    loss_fn = TopKCrossEntropyLoss("subset_topk", {1: 0.5, 6: 0.5}, m=6, inverse_temperature=beta, label_smoothing=0.1)
    found = []
    for scores_at_once in (classification.SCORES_AT_ONCE, 40):
        monkeypatch.setattr(classification, "SCORES_AT_ONCE", scores_at_once)
        gradient, of_beta = torch.autograd.grad(loss_fn(logits, labels), [logits, beta], allow_unused=True)
        assert of_beta is None or float(of_beta) == 0
        found.append(gradient)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("method", RELAXED)
def test_constants_move_with_the_module_and_are_not_saved(method):
    loss = TopKCrossEntropyLoss(method, torch.full((12, 2), 0.5), num_classes=12, weight=torch.ones(12))
    with torch.device("meta"):  # constants are made on the CPU, whatever the default is
        other = TopKCrossEntropyLoss(method, [0.5, 0.5], num_classes=12, weight=torch.ones(12, device="cpu"))
    for built in (loss, other):
        assert {name: buffer.device.type for name, buffer in built.named_buffers()} == {
            "weight": "cpu",
            "rank_weights": "cpu",
        }
        assert built.state_dict() == {}
    assert {buffer.device.type for buffer in loss.to("meta").buffers()} == {"meta"}
