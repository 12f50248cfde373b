"""What is particular to the marginals of a random subset; definition, gradients and limits are in test_sorts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from tests import reference
from tests.topk_losses.test_loss import random_batch
from tests.topk_losses.test_smooth_svm import subsets_loss
from topk_losses import SubsetTopK, TopKCrossEntropyLoss


@given(st.integers(2, 30), st.data())
@settings(max_examples=40, deadline=None)
def test_masks_sum_to_k_and_are_nested(n, data):
    k = data.draw(st.integers(1, n))
    scale = data.draw(st.sampled_from([1e-4, 1.0, 1e4]))
    logits, labels = random_batch(3, n, scale, data.draw(st.sampled_from([torch.float32, torch.float64])))
    if data.draw(st.booleans(), "ties"):
        logits = (logits / scale).round() * scale
    masks = SubsetTopK(k, 0.25)(logits).cumsum(1)  # (3, k, n)
    wanted = torch.arange(1.0, k + 1, dtype=logits.dtype).expand(3, -1)
    torch.testing.assert_close(masks.sum(2), wanted, rtol=1e-5, atol=1e-5)
    column = SubsetTopK(k, 0.25).rank_probabilities(logits, labels).cumsum(1)
    torch.testing.assert_close(column, masks[torch.arange(3), :, labels], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
def test_one_k_is_the_loss_without_a_margin_and_k_1_cross_entropy(scale):
    logits, labels = random_batch(8, 9, scale)
    for k in (1, 2, 5):
        settings = {"top1_mode": "sort", "inverse_temperature": 1.0, "reduction": "none"}
        got = TopKCrossEntropyLoss("subset_topk", k, **settings)(logits, labels)
        torch.testing.assert_close(got, k * subsets_loss(logits, labels, k, 1 / k, alpha=0.0), rtol=1e-9, atol=1e-9)
        if k == 1:
            torch.testing.assert_close(got, cross_entropy(logits, labels, reduction="none"), rtol=1e-9, atol=1e-9)


def test_several_k_at_once_are_the_mixture_of_the_subsets():
    logits, labels = random_batch(8, 9)
    p_k = [0.3, 0, 0.5, 0, 0.2]
    loss = TopKCrossEntropyLoss("subset_topk", p_k, top1_mode="sort", inverse_temperature=0.7, reduction="none")
    masks = [p * reference.subset_mask(logits, k, 0.7) for k, p in enumerate(p_k, start=1)]
    want = -sum(masks).gather(1, labels.unsqueeze(1)).squeeze(1).log()
    torch.testing.assert_close(loss(logits, labels), want)
