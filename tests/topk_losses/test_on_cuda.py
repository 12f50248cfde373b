"""Every loss on a CUDA device, in float32 as in training, against itself on the CPU in float64."""

import pytest
import torch

from tests.methods import DETERMINISTIC, RELAXED, p_k_of, random_batch
from topk_losses import make_loss

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CASES = [(method, None) for method in DETERMINISTIC] + [(method, 16) for method in RELAXED]


@pytest.mark.parametrize(("method", "m"), CASES)
def test_value_and_gradient_are_those_of_the_cpu(method, m):
    loss = make_loss(method, p_k_of(method), num_classes=100, **({"m": m} if m else {}))
    logits, labels = random_batch(128, 100, dtype=torch.float32)
    want = logits.double().requires_grad_()
    exact = loss.double()(want, labels)
    exact.backward()
    got = logits.cuda().requires_grad_()
    value = loss.float().cuda()(got, labels.cuda())
    value.backward()
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(exact.item(), rel=1e-4)
    error = (got.grad.cpu().double() - want.grad).norm() / want.grad.norm()
    assert error < 1e-2  # rounding: of many layers of comparators near ties, elsewhere 1e-5
