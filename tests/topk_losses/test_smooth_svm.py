"""The smooth top-k SVM losses against all k-subsets, a log-space recurrence, the hard hinge and difftopk."""

import contextlib
import copy
import io
import itertools
import math
import pickle
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from topk_losses import SmoothHardTopKLoss, SmoothTopKLoss
from topk_losses.kernels import VARIABLE, kernel
from topk_losses.smooth_svm import kth_largest

with contextlib.redirect_stdout(io.StringIO()):
    import difftopk.smooth_topk

LOSSES = (SmoothTopKLoss, SmoothHardTopKLoss)
inf, nan = math.inf, math.nan


@pytest.fixture(scope="module", autouse=True, params=["torch", "chosen by the device"])
def _backend(request):
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setenv(VARIABLE, "torch")
        yield


def smooth_kth_largest(scores: Tensor, k: int, temperature: float = 1.0) -> Tensor:
    """The smooth k-th largest of scores (batch, n), (batch,): beside a true class with the score 0."""
    labels = torch.full((len(scores),), scores.shape[1])
    with_true = F.pad(scores, (0, 1))  # (batch, n + 1)
    find = kernel("kth_largest", with_true) or kth_largest
    return find(with_true, labels, [k], scores.new_full((), temperature), False)[0].squeeze(1)


def seeded(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def seeded_labels(batch: int, n: int, seed: int = 0) -> Tensor:
    return torch.randint(n, (batch,), generator=torch.Generator().manual_seed(seed))


def value_and_grad(loss, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Losses as they come, and the gradient of their sum (batch, n)."""
    logits = logits.clone().requires_grad_()
    losses = loss(logits, labels)
    return losses.detach(), torch.autograd.grad(losses.sum(), logits)[0]


def subsets_loss(logits: Tensor, labels: Tensor, k: int, tau: float, alpha: float = 1.0) -> Tensor:
    """Berrada et al. 2018 by definition, (batch,): a logsumexp over every k-subset of the classes.

    tau log sum_S exp((alpha [y not in S] + mean of S) / tau) - tau log sum_{S with y} exp(mean of S / tau)
    """
    subsets = torch.tensor(list(itertools.combinations(range(logits.shape[1]), k)))  # (subsets, k)
    hit = (subsets.unsqueeze(0) == labels.view(-1, 1, 1)).any(2)  # (batch, subsets)
    mean = logits[:, subsets].mean(2)  # (batch, subsets)
    every = torch.logsumexp((mean + alpha * (~hit).double()) / tau, 1)
    right = torch.logsumexp((mean / tau).masked_fill(~hit, -inf), 1)
    return tau * (every - right)


def recurrence_kth(scores: Tensor, k: int, temperature: float) -> Tensor:
    """temperature (log e_k - log e_{k-1}) in float64, (batch,), by e_j <- e_j + x_i e_{j-1} in log space."""
    z = scores.double() / temperature
    log_e = torch.full((len(z), k + 1), -1e300, dtype=torch.float64)
    log_e[:, 0] = 0
    for i in range(z.shape[1]):
        log_e = torch.cat([log_e[:, :1], torch.logaddexp(log_e[:, 1:], log_e[:, :-1] + z[:, i : i + 1])], 1)
    return temperature * (log_e[:, k] - log_e[:, k - 1])


def recurrence_loss(logits: Tensor, labels: Tensor, k: int, tau: float, alpha: float = 1.0) -> Tensor:
    """The loss from recurrence_kth of the other classes, (batch,), float64."""
    other = torch.arange(logits.shape[1]) != labels.unsqueeze(1)  # (batch, n)
    kth = recurrence_kth(logits[other].view(len(logits), -1), k, k * tau)
    true = logits.double().gather(1, labels.unsqueeze(1)).squeeze(1)
    return tau * F.softplus((alpha + (kth - true) / k) / tau, threshold=700)


def hard_hinge(logits: Tensor, labels: Tensor, k: int, alpha: float = 1.0) -> Tensor:
    """The hard top-k SVM as the official code writes it, (batch,): two means over largest scores."""
    losses = []
    for scores, label in zip(logits, labels.tolist()):
        others = torch.cat([scores[:label], scores[label + 1 :]])
        without = (others + alpha).topk(k).values.mean()
        losses.append(F.relu(without - (others.topk(k - 1).values.sum() + scores[label]) / k))
    return torch.stack(losses)


@pytest.mark.parametrize("tau", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("n", range(2, 10))
def test_is_the_definition_over_all_subsets(n, tau):
    logits, labels = 3 * seeded(6, n, seed=n), seeded_labels(6, n)
    for k in range(1, n):
        for alpha in (0.3, 1.0):
            got, got_grad = value_and_grad(SmoothTopKLoss(k, tau, alpha, reduction="none"), logits, labels)
            want, want_grad = value_and_grad(partial(subsets_loss, k=k, tau=tau, alpha=alpha), logits, labels)
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(got_grad, want_grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("n", range(1, 10))
def test_gradcheck(n):
    batch = 2 if n < 6 else 1
    scores, labels = seeded(batch, n, seed=n).requires_grad_(), seeded_labels(batch, n)
    for k in range(1, n + 1):
        assert torch.autograd.gradcheck(smooth_kth_largest, (scores, k, 0.7))
        if k < n:
            for loss in LOSSES:
                assert torch.autograd.gradcheck(loss(k, tau=0.2, reduction="none"), (scores, labels))


def test_gradcheck_with_ties_and_wide_gaps():
    scores = torch.tensor([[1.0, 1, 1, 1, 1], [40, 3, 0, 0, -40], [30, 30, 30, 0, 0]], dtype=torch.float64)
    for k in range(1, 5):
        assert torch.autograd.gradcheck(smooth_kth_largest, (scores.requires_grad_(), k))


@st.composite
def problems(draw):
    """(logits, labels, k, tau): any size, scale and half, single or double precision; often with ties."""
    n = draw(st.integers(2, 40) | st.integers(41, 400))
    batch = draw(st.integers(1, 5))
    k = draw(st.integers(1, min(n - 1, 40)))
    tau = draw(st.sampled_from([0.01, 0.1, 1.0, 10.0]))
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]))
    logits = seeded(batch, n, seed=draw(st.integers(0, 10**6)))
    if draw(st.booleans()):
        logits = logits.round()
    logits = logits * draw(st.sampled_from([1e-4, 1e-2, 1.0, 10.0, 100.0, 1e4])) + draw(st.sampled_from([0.0, 5e3]))
    return logits.to(dtype), seeded_labels(batch, n, seed=n), k, tau


@given(problems())
@example((torch.tensor([[0.0, 0, 0, -1e4, 1e4]]), torch.tensor([1]), 2, 0.01))  # a highest score far above the k-th
@settings(max_examples=150, deadline=None)
def test_agrees_with_the_recurrence_at_any_scale(problem):
    logits, labels, k, tau = problem
    got, got_grad = value_and_grad(SmoothTopKLoss(k, tau, reduction="none"), logits, labels)
    want, want_grad = value_and_grad(partial(recurrence_loss, k=k, tau=tau), logits, labels)
    assert got.dtype == (torch.float64 if logits.dtype == torch.float64 else torch.float32)
    assert got_grad.dtype == logits.dtype
    eps = max(torch.finfo(got.dtype).eps, 1e-9)  # the recurrence has its own rounding, up to 1e-9 at logits of 1e4
    # Neither the scale nor the offset of the logits costs digits: the loss is right to rounding of itself
    # and of its terms of size tau, the gradient to rounding of 1 / k.
    torch.testing.assert_close(
        got.double(), want, rtol=20 * eps, atol=20 * eps * (1 + tau * math.log(2 * len(logits[0])))
    )
    slack = 100 * eps + torch.finfo(logits.dtype).eps
    torch.testing.assert_close(got_grad.double(), want_grad.double(), rtol=0, atol=slack / k)


@given(problems())
@settings(max_examples=60, deadline=None)
def test_gradient_weighs_the_others_against_the_true_class(problem):
    """The gradient is -c for the true class and a distribution over the others times c, 0 <= c <= 1 / k."""
    logits, labels, k, tau = problem
    for loss in LOSSES:
        losses, grad = value_and_grad(loss(k, tau, reduction="none"), logits.float(), labels)
        true = grad.gather(1, labels.unsqueeze(1))
        others = grad.scatter(1, labels.unsqueeze(1), 0)
        assert bool((losses >= 0).all())
        assert bool((true <= 0).all())
        assert bool((true * k >= -1 - 1e-5).all())
        assert bool((others * k >= -1e-6 * k).all())
        torch.testing.assert_close(others.sum(1, keepdim=True), -true, rtol=1e-4, atol=1e-5)


@given(problems(), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_permuting_classes_permutes_the_gradient(problem, random):
    logits, labels, k, tau = problem
    order = list(range(logits.shape[1]))
    random.shuffle(order)
    order = torch.tensor(order)
    logits = logits.double()
    module = SmoothTopKLoss(k, tau, reduction="none")
    losses, grad = value_and_grad(module, logits, labels)
    moved, moved_grad = value_and_grad(module, logits[:, order], order.argsort()[labels])
    size = float(logits.abs().max()) + 1
    torch.testing.assert_close(moved, losses, rtol=1e-12, atol=1e-13 * size)
    torch.testing.assert_close(moved_grad, grad[:, order], rtol=0, atol=1e-12 * (1 + size / tau))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("n", "k"), [(1, 1), (2, 2), (7, 3), (100, 99), (300, 300), (310, 300), (1000, 128), (20001, 5)]
)
def test_ties_in_closed_form(n, k, dtype):
    """With n equal scores e_k / e_{k-1} = (n - k + 1) / k; all binomials overflow float32 for the larger sizes."""
    scores = torch.full((2, n), 7.0, dtype=dtype, requires_grad=True)
    kth = smooth_kth_largest(scores, k, 0.5)
    kth.sum().backward()
    rtol = 1e-5 if dtype == torch.float32 else 1e-13
    want = torch.full_like(kth, 7 + 0.5 * math.log((n - k + 1) / k))
    torch.testing.assert_close(kth, want, rtol=rtol, atol=0)
    torch.testing.assert_close(scores.grad, torch.full_like(scores, 1 / n), rtol=300 * rtol, atol=10 * rtol / n)


def shaped_scores(shape: str, n: int, k: int) -> Tensor:
    """(n,) float64 scores whose rest, beyond the leaves of the kernel, is hard for alternating power sums."""
    place = torch.arange(n, dtype=torch.float64)
    return {
        "equal": torch.zeros(n, dtype=torch.float64),
        "equal up to noise": 1e-3 * seeded(n),
        "one step after 4 k": torch.where(place < 4 * k, 0.0, -2.0).double(),
        "few at the top, then equal": torch.where(place < k, 50.0, 0.0).double(),
        "few equal, then nothing": torch.where(place < 7 * k, 0.0, -200.0).double(),
        "falling slowly": -place / k,
        "falling fast": -5 * place,
        "normal": seeded(n),
        "far apart": 1e3 * seeded(n),
    }[shape]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "shape",
    [
        *("equal", "equal up to noise", "one step after 4 k", "few at the top, then equal"),
        *("few equal, then nothing", "falling slowly", "falling fast", "normal", "far apart"),
    ],
)
@pytest.mark.parametrize("k", [1, 2, 5, 10, 32])
def test_the_rest_by_power_sums_against_the_recurrence(k, shape, dtype):
    n = 20 * k + 3
    scores = shaped_scores(shape, n, k)[torch.randperm(n, generator=torch.Generator().manual_seed(k))]
    scores = scores.to(dtype).unsqueeze(0)
    for temperature in (0.1, 1.0, 5.0):
        got, got_grad = value_and_grad(lambda x, t: smooth_kth_largest(x, k, t), scores, temperature)
        want, want_grad = value_and_grad(lambda x, t: recurrence_kth(x, k, t), scores.double(), temperature)
        # the recurrence in log space loses digits itself where scores are large
        slack = 100 * torch.finfo(dtype).eps + 1e-14 * float(scores.abs().max()) / temperature
        torch.testing.assert_close(got.double(), want, rtol=slack, atol=slack * temperature)
        torch.testing.assert_close(got_grad.double(), want_grad, rtol=0, atol=20 * slack)
        torch.testing.assert_close(
            got_grad.double().sum(), torch.ones((), dtype=torch.float64), rtol=0, atol=100 * slack
        )


def test_many_classes_against_the_recurrence():
    logits, labels = 5 * seeded(2, 2000, dtype=torch.float32), seeded_labels(2, 2000)
    for k in (1, 5, 50):
        for tau in (0.1, 1.0):
            got, got_grad = value_and_grad(SmoothTopKLoss(k, tau, reduction="none"), logits, labels)
            want, want_grad = value_and_grad(SmoothTopKLoss(k, tau, reduction="none"), logits.double(), labels)
            torch.testing.assert_close(got.double(), recurrence_loss(logits, labels, k, tau), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(got_grad.double(), want_grad, rtol=1e-4, atol=1e-6 / k)


def test_k_1_is_a_logsumexp():
    logits, labels = seeded(5, 8), seeded_labels(5, 8)
    torch.testing.assert_close(smooth_kth_largest(logits, 1, 0.3), 0.3 * (logits / 0.3).logsumexp(1))
    true = logits.gather(1, labels.unsqueeze(1)).squeeze(1)
    others = logits.scatter(1, labels.unsqueeze(1), -inf)
    want = 0.3 * torch.log1p(((1 - true) / 0.3).exp() * (others / 0.3).exp().sum(1))
    torch.testing.assert_close(SmoothTopKLoss(1, tau=0.3, reduction="none")(logits, labels), want)


# What difftopk 0.2.0 does, seen while these tests were written:
# - Values are right to float32 rounding everywhere it runs, up to logits of 1e4.
# - For k = 1 every gradient is wrong: e_0 = 1 is given the derivative 1 in each score (tested below).
# - It needs n >= k + 1 + int(k / 5) and stops with a bare AssertionError otherwise (n = 6, k = 5).
# - Gradients mix an alternating recursion with an alternating series. At the scale of fresh logits (tau = 1) they are
#   right to 1e-4 or so of the largest entry; at tau = .01 to .1 or logits of 3 to 10 they are wrong by .2 to 2 %, now
#   and then 20 % (k = 3, tau = .01), at logits of 1e4 by 1 to 50 %, and for k = 2, n = 6, tau = .1, logits of 100
#   one was off by 1e11. The float64 recurrence and finite differences side with this library each time.
# - Both losses return the mean alone, and alpha is 1.
@pytest.mark.parametrize(
    ("n", "k"), [(4, 2), (10, 2), (10, 3), (10, 5), (100, 2), (100, 5), (100, 10), (100, 20), (300, 5)]
)
def test_agrees_with_difftopk(n, k):
    logits, labels = seeded(4, n, seed=k, dtype=torch.float32), seeded_labels(4, n)
    for ours, official in zip(LOSSES, (difftopk.smooth_topk.SmoothTopKLoss, difftopk.smooth_topk.SmoothHardTopKLoss)):
        for tau in (1.0, 3.0):
            got, got_grad = value_and_grad(ours(k, tau), logits, labels)
            want, want_grad = value_and_grad(official(n, k, tau), logits, labels)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(got_grad, want_grad, rtol=1e-3, atol=1e-3 * float(got_grad.abs().max()))


@pytest.mark.parametrize("scale", [1e-4, 1.0, 10.0, 1e4])
@pytest.mark.parametrize("tau", [0.01, 0.1, 1.0])
def test_values_agree_with_difftopk_at_any_scale(scale, tau):
    logits, labels = scale * seeded(32, 50, dtype=torch.float32), seeded_labels(32, 50)
    for k in (1, 5):
        for name in ("SmoothTopKLoss", "SmoothHardTopKLoss"):
            if k == 1 and name == "SmoothHardTopKLoss" and scale == 1e4:
                continue  # every sample is hard there, and the official smooth branch has nothing to return
            want = getattr(difftopk.smooth_topk, name)(50, k, tau)(logits, labels)
            got = (SmoothTopKLoss if name == "SmoothTopKLoss" else SmoothHardTopKLoss)(k, tau)(logits, labels)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_k_1_gradient_is_right_where_that_of_difftopk_is_not():
    logits, labels = seeded(1, 6), seeded_labels(1, 6)
    _, want = value_and_grad(partial(subsets_loss, k=1, tau=1.0), logits, labels)
    _, got = value_and_grad(SmoothTopKLoss(1), logits, labels)
    _, official = value_and_grad(difftopk.smooth_topk.SmoothTopKLoss(6, 1), logits.float(), labels)
    torch.testing.assert_close(got, want)
    other = torch.arange(6) != labels
    slope = -want[~other.unsqueeze(0)]
    torch.testing.assert_close(official[:, other].double(), want[:, other] - slope, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_small_tau_approaches_the_hard_hinge(k):
    logits, labels = 3 * seeded(64, 20), seeded_labels(64, 20)
    want, want_grad = value_and_grad(partial(hard_hinge, k=k), logits, labels)
    assert 0 < int((want > 0).sum()) < 64
    for tau in (1e-2, 1e-4, 1e-6):
        got, _ = value_and_grad(SmoothTopKLoss(k, tau, reduction="none"), logits, labels)
        torch.testing.assert_close(got, want, rtol=0, atol=5 * tau)
    for loss in LOSSES:
        _, got_grad = value_and_grad(loss(k, 1e-6, reduction="none"), logits, labels)
        torch.testing.assert_close(got_grad, want_grad, rtol=0, atol=1e-9)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_smooth_hard_switches_at_its_threshold(k):
    """Each rank is held by the true class once, and the gap after rank k lies just below or above the threshold."""
    n, tau = 6, 0.05
    threshold = k * tau * math.log(1000)
    for gap, hard in ((threshold * 0.999, False), (threshold * 1.001, True)):
        ranked = torch.arange(n, 0, -1, dtype=torch.float64) * 0.01  # in descending order, rank 1 first
        ranked[:k] += gap - 0.01
        logits, labels = ranked.repeat(n, 1), torch.arange(n)  # sample r: the true class holds rank r + 1
        got, got_grad = value_and_grad(SmoothHardTopKLoss(k, tau, reduction="none"), logits, labels)
        side = partial(hard_hinge, k=k) if hard else partial(subsets_loss, k=k, tau=tau)
        want, want_grad = value_and_grad(side, logits, labels)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(got_grad, want_grad)


def test_smooth_hard_decides_sample_by_sample():
    logits, labels = 10 * seeded(64, 12), seeded_labels(64, 12)
    top = logits.topk(4).values
    hard = top[:, 2] - top[:, 3] >= 3 * 0.2 * math.log(1000)
    assert 0 < int(hard.sum()) < 64
    want = torch.where(hard, hard_hinge(logits, labels, 3), subsets_loss(logits, labels, 3, 0.2))
    torch.testing.assert_close(SmoothHardTopKLoss(3, 0.2, reduction="none")(logits, labels), want)


@pytest.mark.parametrize("loss", LOSSES)
def test_reductions_and_ignored_samples(loss):
    logits, labels = seeded(8, 10), seeded_labels(8, 10)
    each = loss(3, reduction="none")(logits, labels)
    torch.testing.assert_close(loss(3, reduction="sum")(logits, labels), each.sum())
    torch.testing.assert_close(loss(3)(logits, labels), each.mean())

    for ignore_index in (-100, 4):
        some = labels.clone()
        some[[1, 5]] = ignore_index
        kept = some != ignore_index
        logits[1] = nan  # what is ignored may hold anything
        got, grad = value_and_grad(loss(3, reduction="none", ignore_index=ignore_index), logits, some)
        torch.testing.assert_close(got, each * kept)
        assert not bool(grad[~kept].any())
        torch.testing.assert_close(loss(3, ignore_index=ignore_index)(logits, some), each[kept].mean())
    assert bool(loss(3)(logits, torch.full_like(labels, -100)).isnan())  # as in torch.nn.CrossEntropyLoss
    assert loss(3, reduction="none")(logits[:0], labels[:0]).shape == (0,)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(loss, dtype):
    logits, labels = seeded(4, 30).to(dtype), seeded_labels(4, 30)
    want, want_grad = value_and_grad(loss(5), logits.float(), labels)
    got, got_grad = value_and_grad(loss(5), logits, labels)
    assert (got.dtype, got_grad.dtype) == (torch.float32, dtype)
    assert torch.equal(got, want)
    assert torch.equal(got_grad, want_grad.to(dtype))


@pytest.mark.parametrize("loss", LOSSES)
def test_autocast_returns_float32(loss):
    features, labels = seeded(4, 16, dtype=torch.float32), seeded_labels(4, 30)
    weight = seeded(30, 16, seed=1, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = F.linear(features, weight)
        got = loss(5)(logits, labels)
    assert (logits.dtype, got.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(got, loss(5)(logits.float(), labels))
    got.backward()
    assert weight.grad.dtype == torch.float32
    assert bool(weight.grad.isfinite().all())


@pytest.mark.parametrize("loss", LOSSES)
def test_masked_classes_are_absent_classes(loss):
    logits, labels = seeded(6, 5), torch.tensor([0, 1, 2, 3, 4, 0])
    wide = torch.full((6, 9), -inf, dtype=torch.float64)
    columns = torch.tensor([1, 3, 4, 6, 8])
    wide[:, columns] = logits
    for k in (1, 2, 4):
        want, want_grad = value_and_grad(loss(k, 0.3, reduction="none"), logits, labels)
        got, got_grad = value_and_grad(loss(k, 0.3, reduction="none"), wide, columns[labels])
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(got_grad[:, columns], want_grad)
        assert int(got_grad.count_nonzero(1).max()) <= 5

    # Fewer than k other classes: the true one is among the k guesses for sure.
    got, got_grad = value_and_grad(loss(5, reduction="none"), wide, columns[labels])
    assert torch.equal(got, torch.zeros(6, dtype=torch.float64))
    assert not bool(got_grad.any())

    # The true class masked: it can never be among them. Both at once: no limit.
    masked = torch.tensor([[-inf, 1, 2, 3], [-inf, 1, 2, -inf], [-inf, -inf, 2, -inf], [-inf] * 4])
    got = loss(2, reduction="none")(masked, torch.zeros(4, dtype=torch.long))
    torch.testing.assert_close(got, torch.tensor([inf, inf, nan, nan]), equal_nan=True)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("bad", [nan, inf])
@pytest.mark.parametrize("column", [0, 1, 4])
def test_nan_and_inf_spoil_their_own_sample_only(loss, bad, column):
    clean, labels = seeded(3, 5, dtype=torch.float32), torch.tensor([0, 1, 2])
    logits = clean.clone()
    logits[1, column] = bad
    for k in (1, 2, 4):
        want, want_grad = value_and_grad(loss(k, 0.1, reduction="none"), clean, labels)
        got, grad = value_and_grad(loss(k, 0.1, reduction="none"), logits, labels)
        assert got.isnan().tolist() == [False, True, False]
        assert torch.equal(got[::2], want[::2])
        assert torch.equal(grad[::2], want_grad[::2])
        assert bool(grad[1].isnan().any())


def test_smooth_kth_largest_of_too_few_scores():
    scores = torch.tensor([[1.0, -inf, 2.0, -inf], [1.0, 2.0, 3.0, -inf], [-inf] * 4], requires_grad=True)
    kth = smooth_kth_largest(scores, 3)
    assert kth.tolist()[0] == kth.tolist()[2] == -inf
    kth.sum().backward()
    assert not bool(scores.grad[[0, 2]].any())
    torch.testing.assert_close(scores.grad[1].sum(), torch.tensor(1.0))


@pytest.mark.parametrize("loss", LOSSES)
def test_leaves_its_inputs_alone(loss):
    logits, labels = seeded(4, 10), seeded_labels(4, 10)
    before = logits.clone(), labels.clone()
    value_and_grad(loss(3), logits, labels)
    logits.requires_grad_()
    total = loss(3)(logits, labels)
    first = torch.autograd.grad(total, logits, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(total, logits)[0])  # nothing saved is written over
    assert torch.equal(logits, before[0])
    assert torch.equal(labels, before[1])


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("labels", [[0, 4], [5, 2]])
def test_second_derivatives_are_right_wherever_the_true_class_stands(k, labels):
    logits = seeded(2, 6).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: SmoothTopKLoss(k)(x, torch.tensor(labels)), (logits,))


@pytest.mark.parametrize("loss", LOSSES)
def test_second_derivatives_are_right(loss):
    logits, labels = seeded(2, 6).requires_grad_(), seeded_labels(2, 6)
    assert torch.autograd.gradgradcheck(lambda x: loss(3, tau=0.5)(x, labels), (logits,))
    seconds = []
    for leaf in (logits, logits.detach().float().requires_grad_()):
        grad = torch.autograd.grad(loss(3, tau=0.5)(leaf, labels), leaf, create_graph=True)[0]
        seconds.append(torch.autograd.grad(grad.square().sum(), leaf)[0].double())
    torch.testing.assert_close(*seconds, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_never_waits_for_a_value(loss):
    """Meta tensors have no values: whatever branched on one, or called .item(), would raise."""
    logits = torch.empty(4, 21, device="meta", requires_grad=True)
    loss(5)(logits, torch.empty(4, dtype=torch.long, device="meta")).backward()
    assert logits.grad.shape == (4, 21)


@pytest.mark.parametrize("loss", LOSSES)
def test_compiles_without_a_graph_break(loss):
    logits, labels = seeded(3, 6), torch.tensor([0, -100, 5])
    module = loss(2, reduction="none")
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(value_and_grad(compiled, logits, labels), value_and_grad(module, logits, labels))


@pytest.mark.parametrize("loss", LOSSES)
def test_pickles_copies_and_describes_itself(loss):
    module = loss(3, tau=0.5, alpha=2.0, num_classes=10, reduction="sum", ignore_index=-1)
    logits, labels = seeded(4, 10), seeded_labels(4, 10)
    for twin in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        assert torch.equal(twin(logits, labels), module(logits, labels))
    assert not module.state_dict()
    assert repr(module) == (
        f"{loss.__name__}(tau=0.5, alpha=2, k=3, num_classes=10, label_smoothing=0, soft_labels=expected, "
        "ignore_index=-1, reduction=sum)"
    )


@pytest.mark.parametrize("loss", LOSSES)
def test_refuses_what_it_cannot_mean(loss):
    for arguments, sentence in (
        ({"k": 0}, "k must be an integer of at least 1"),
        ({"k": 2.0}, "k must be an integer"),
        ({"k": 5, "num_classes": 5}, "k must be an integer between 1 and the number of scores n=4, got 5"),
        ({"k": 2, "tau": 0}, "tau must be a finite number above 0"),
        ({"k": 2, "tau": nan}, "tau must be"),
        ({"k": 2, "alpha": -1}, "alpha must be"),
        ({"k": 2, "reduction": "avg"}, "unknown reduction 'avg'"),
    ):
        with pytest.raises(ValueError, match=sentence):
            loss(**arguments)

    logits, labels = seeded(4, 6), seeded_labels(4, 6)
    module = loss(5, num_classes=None)
    assert module(logits, labels).isfinite()
    for bad_logits, bad_labels, error, sentence in (
        (logits[:, :5], labels % 5, ValueError, "between 1 and the number of scores n=4, got 5"),
        (logits[0], labels, ValueError, "labels must have shape"),
        (logits.long(), labels, TypeError, "floating-point"),
        (logits, labels.int(), TypeError, "labels must be int64"),
        (logits, labels.float(), ValueError, "shape of the logits"),
        (logits, labels[:3], ValueError, "labels must have shape"),
        (logits, labels + 6, ValueError, "labels must lie in"),
        (logits, labels - 7, ValueError, "labels must lie in"),
    ):
        with pytest.raises(error, match=sentence):
            module(bad_logits, bad_labels)
    with pytest.raises(ValueError, match="num_classes=7"):
        loss(5, num_classes=7)(logits, labels)
