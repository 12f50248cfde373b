"""Truncated entropy and the noised top-k losses, against their definitions and the authors' package."""

import math

import pytest
import pytopk
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.functional import cross_entropy

from tests.topk_losses.test_loss import random_batch
from topk_losses import NoisedTopKLoss, TruncatedEntropyLoss, make_loss


@given(st.integers(2, 12), st.data())
@settings(max_examples=60, deadline=None)
def test_truncated_entropy_equals_its_definition(n, data):
    k = data.draw(st.integers(1, n - 1))
    scale = data.draw(st.sampled_from([1e-4, 1.0, 1e4]), "scale")
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    logits, labels = random_batch(5, n, scale, dtype, seed=data.draw(st.integers(0, 99)))
    got = TruncatedEntropyLoss(k, reduction="none")(logits, labels)
    for loss, row, y in zip(got, logits.double(), labels.tolist()):
        below = [j for j in row.argsort(descending=True).tolist()[k:] if j != y]
        want = torch.stack([torch.zeros(()).double(), *[row[j] - row[y] for j in below]]).logsumexp(0)
        torch.testing.assert_close(loss.double(), want, rtol=1e-4, atol=1e-6 * max(scale, 1))


def test_truncated_entropy_at_k_1_is_cross_entropy_where_the_true_class_is_highest():
    logits, _ = random_batch(8, 9)
    labels = logits.argmax(1)
    torch.testing.assert_close(TruncatedEntropyLoss(1)(logits, labels), cross_entropy(logits, labels))
    logits.requires_grad_()
    assert gradcheck(lambda x: TruncatedEntropyLoss(3)(x, labels), (logits,))
    assert gradgradcheck(lambda x: TruncatedEntropyLoss(3)(x, labels), (logits,))


def test_truncated_entropy_is_zero_without_a_gradient_where_no_class_is_left():
    logits = torch.tensor([[3.0, 2.0, 1.0]], requires_grad=True)
    loss = TruncatedEntropyLoss(2)(logits, torch.tensor([2]))
    loss.backward()
    assert loss.item() == 0
    assert not logits.grad.any()


def noise_of(seed, batch, n, draws):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randn(batch, n, generator=generator) for _ in range(draws)], dim=2)


def seeded(loss, seed=5):
    loss.generator = torch.Generator().manual_seed(seed)
    return loss


@pytest.mark.parametrize(("k", "epsilon", "draws"), [(1, 1.0, 5), (5, 0.3, 3), (8, 2.0, 1)])
def test_noised_losses_equal_the_authors_package(k, epsilon, draws, monkeypatch):
    logits, labels = random_batch(16, 9, dtype=torch.float32)
    noise = noise_of(5, 16, 9, draws)
    monkeypatch.setattr(torch, "randn", lambda *shape, **_: noise)  # what their package draws
    counts = [5, 10, 3, 7, 8, 1, 2, 30, 4]
    theirs = {
        "balanced": pytopk.BalNoisedTopK(k, epsilon, draws),
        "imbalanced": pytopk.ImbalNoisedTopK(k, epsilon, 0.7, counts, scale=3, n_sample=draws),
    }
    wanted = {}
    for name, loss in theirs.items():
        scores = logits.clone().requires_grad_()
        value = loss(scores, labels)
        wanted[name] = value, torch.autograd.grad(value, scores)[0]
    monkeypatch.undo()
    common = {"inverse_temperature": 1 / epsilon, "num_samples": draws}
    ours = {
        "balanced": NoisedTopKLoss(k, **common),
        "imbalanced": NoisedTopKLoss(k, **common, class_counts=counts, max_margin=0.7, scale=3),
    }
    for name, loss in ours.items():
        scores = logits.clone().requires_grad_()
        value = seeded(loss)(scores, labels)
        torch.testing.assert_close(value, wanted[name][0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(torch.autograd.grad(value, scores)[0], wanted[name][1], rtol=1e-5, atol=1e-6)


def test_without_noise_it_is_the_calibrated_hinge():
    logits, labels = random_batch(8, 9)
    want = (1 + logits.sort(dim=1, descending=True).values[:, 3] - logits.gather(1, labels.unsqueeze(1))[:, 0]).relu()
    got = NoisedTopKLoss(3, 1e12, num_samples=1, reduction="none")(logits, labels)
    torch.testing.assert_close(got, want)


def test_equal_counts_are_the_balanced_loss_and_rare_classes_have_the_widest_margin():
    logits, labels = random_batch(8, 6)
    want = seeded(NoisedTopKLoss(2, reduction="none"))(logits, labels)
    for counts in (None, [7] * 6):
        got = seeded(NoisedTopKLoss(2, class_counts=counts, reduction="none"))(logits, labels)
        torch.testing.assert_close(got, want)
    loss = NoisedTopKLoss(2, 1e12, class_counts=[16, 1, 1, 1, 1, 1])
    same = torch.zeros(2, 6)
    torch.testing.assert_close(loss(same, torch.tensor([0, 0])), torch.tensor(0.5))
    torch.testing.assert_close(loss(same, torch.tensor([1, 1])), torch.tensor(1.0))
    for wrong in ([1, 2], [1, 2, 3, 4, 5, 0], [[1] * 6]):
        with pytest.raises(ValueError, match="class_counts must hold a finite number above 0 for each"):
            NoisedTopKLoss(2, num_classes=6, class_counts=wrong)


@pytest.mark.parametrize("method", ["noised_topk", "imbalanced_noised_topk"])
def test_noise_comes_from_the_generator_alone(method):
    logits, labels = random_batch(8, 9)
    loss = seeded(make_loss(method, 3, reduction="none"), 1)
    state = torch.get_rng_state()
    first, second = loss(logits, labels), loss(logits, labels)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first, second)
    assert torch.equal(seeded(loss, 1)(logits, labels), first)


@pytest.mark.parametrize("method", ["noised_topk", "imbalanced_noised_topk"])
def test_distributions_over_classes_cost_one_draw(method):
    logits, labels = random_batch(8, 9)
    hot = torch.nn.functional.one_hot(labels, 9).double()
    want = seeded(make_loss(method, 3, label_smoothing=0.2))(logits, labels)
    loss = make_loss(method, 3, reduction="none")
    of_all = torch.stack([seeded(loss)(logits, torch.full_like(labels, j)) for j in range(9)], dim=1)
    uniform = seeded(loss)(logits, torch.full_like(logits, 1 / 9))
    torch.testing.assert_close(uniform, of_all.mean(1))
    assert want.isfinite()
    assert seeded(loss)(logits, hot).shape == (8,)


@pytest.mark.parametrize("method", ["truncated_entropy", "noised_topk", "imbalanced_noised_topk"])
def test_a_broken_sample_touches_no_other_and_masked_classes_take_no_part(method):
    logits, labels = random_batch(5, 8)
    logits[1, 2], logits[2, 3], logits[3, 5], logits[4, labels[4]] = math.nan, math.inf, -math.inf, -math.inf
    labels[3] = 1
    loss = make_loss(method, 3, reduction="none")
    losses = loss(logits, labels)
    assert losses.isnan().tolist() == [False, True, True, False, False]
    assert losses[4] == math.inf
    only = torch.full((1, 8), -math.inf)
    only[0, :3] = torch.tensor([1.0, 2.0, 3.0])
    only.requires_grad_()
    loss(only, torch.tensor([0])).sum().backward()
    assert not only.grad.any()  # no more than k classes take part: the true one is among them


@pytest.mark.parametrize("method", ["truncated_entropy", "noised_topk"])
def test_bad_settings_get_a_sentence(method):
    with pytest.raises(ValueError, match="optimises a single k"):
        make_loss(method, [0.5, 0.5])
    with pytest.raises(ValueError, match="k must be an integer between 1 and"):
        make_loss(method, 6, num_classes=6)
    with pytest.raises(ValueError, match="k must be an integer between 1 and"):
        make_loss(method, 6)(torch.randn(2, 6), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="it knows no soft_labels='any'"):
        make_loss(method, 2, soft_labels="any")
    if method == "truncated_entropy":
        with pytest.raises(ValueError, match="inverse_temperature applies to methods with a temperature"):
            make_loss(method, 2, inverse_temperature=2.0)
