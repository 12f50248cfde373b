"""What is particular to truncated entropy, LDR-KL and the noised losses; their definitions are in test_loss."""

import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.functional import cross_entropy

from tests.methods import random_batch, value_and_gradient
from topk_losses import LDRKLLoss, TruncatedEntropyLoss, make_loss


def test_truncated_entropy_at_k_1_is_cross_entropy_where_the_true_class_is_highest():
    logits, _ = random_batch(8, 9)
    labels = logits.argmax(1)
    torch.testing.assert_close(TruncatedEntropyLoss(1)(logits, labels), cross_entropy(logits, labels))


def test_truncated_entropy_is_zero_without_a_gradient_where_no_class_is_left():
    value, gradient = value_and_gradient(TruncatedEntropyLoss(2), torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([2]))
    assert value.item() == 0
    assert not gradient.any()


@pytest.mark.parametrize("method", ["truncated_entropy", "noised_topk", "imbalanced_noised_topk"])
def test_a_masked_true_class_costs_infinity_unless_no_more_than_k_classes_take_part(method):
    logits, labels = random_batch(2, 8)
    logits[0, labels[0]] = -math.inf
    logits[1, labels[1] - 1] = -math.inf
    loss = make_loss(method, 3, reduction="none")
    assert loss(logits, labels).isinf().tolist() == [True, False]
    only = torch.full((1, 8), -math.inf)
    only[0, :3] = torch.tensor([1.0, 2.0, 3.0])
    assert not value_and_gradient(loss, only, torch.tensor([0]))[1].any()  # the true one is among them


def test_a_hard_ldr_kl_is_the_hinge_of_the_highest_other_class():
    logits, labels = random_batch()
    others = logits.scatter(1, labels.unsqueeze(1), -math.inf).amax(1)
    want = (others + 0.5 - logits.gather(1, labels.unsqueeze(1)).squeeze(1)).relu()
    loss = make_loss("ldr_kl", [1, 0, 0], inverse_temperature=1e6, margin=0.5, reduction="none")
    torch.testing.assert_close(loss(logits, labels), want, atol=1e-5, rtol=0)


def test_ldr_kl_has_gradients_of_the_logits_and_of_a_learned_temperature():
    logits, labels = random_batch(4, 6)
    beta = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    for check in (gradcheck, gradgradcheck):
        assert check(lambda x, b: LDRKLLoss(b, 0.3, label_smoothing=0.1)(x, labels), (logits.requires_grad_(), beta))
