"""LDR-KL, cross-entropy with a temperature and a margin, against its definition and its limits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.functional import cross_entropy

from tests.topk_losses.test_loss import random_batch
from topk_losses import LDRKLLoss, make_loss


@given(st.integers(2, 12), st.sampled_from([1e-2, 0.5, 1.0, 20.0]), st.sampled_from([0.0, 0.1, 3.0]), st.data())
@settings(max_examples=60, deadline=None)
def test_it_equals_its_definition(n, beta, margin, data):
    scale = data.draw(st.sampled_from([1e-4, 1.0, 1e4]), "scale")
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    logits, labels = random_batch(5, n, scale, dtype, seed=data.draw(st.integers(0, 99)))
    got = LDRKLLoss(beta, margin, reduction="none")(logits, labels)
    for loss, row, y in zip(got, logits.double(), labels.tolist()):
        terms = torch.stack([beta * (row[j] - row[y] + margin * (j != y)) for j in range(n)])
        want = (terms.logsumexp(0) - math.log(n)) / beta
        torch.testing.assert_close(loss.double(), want, rtol=1e-4, atol=1e-6 * max(scale, 1 / beta))


def test_plain_it_is_cross_entropy_less_the_logarithm_of_n():
    logits, labels = random_batch()
    torch.testing.assert_close(LDRKLLoss()(logits, labels), cross_entropy(logits, labels) - math.log(12))


def test_hard_it_is_the_hinge_of_the_highest_other_class():
    logits, labels = random_batch()
    others = logits.scatter(1, labels.unsqueeze(1), -math.inf).amax(1)
    want = (others + 0.5 - logits.gather(1, labels.unsqueeze(1)).squeeze(1)).relu()
    torch.testing.assert_close(LDRKLLoss(1e6, 0.5, reduction="none")(logits, labels), want, atol=1e-5, rtol=0)


def test_gradients_of_the_logits_and_of_a_learned_temperature():
    logits, labels = random_batch(4, 6)
    beta = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    for check in (gradcheck, gradgradcheck):
        assert check(lambda x, b: LDRKLLoss(b, 0.3, label_smoothing=0.1)(x, labels), (logits.requires_grad_(), beta))


def test_a_margin_below_0_sets_and_another_p_k_are_refused():
    with pytest.raises(ValueError, match="margin must be a finite number >= 0, got -1"):
        LDRKLLoss(margin=-1)
    with pytest.raises(ValueError, match="LDRKLLoss has one true class"):
        LDRKLLoss(soft_labels="any")
    with pytest.raises(ValueError, match=r"P_K = \[1, 0, ..\]"):
        make_loss("ldr_kl", [0.5, 0.5])
    loss = make_loss("ldr_kl", [1, 0, 0], inverse_temperature=2, margin=0.5)
    assert (loss.inverse_temperature, loss.margin) == (2, 0.5)
