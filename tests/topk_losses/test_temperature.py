"""The inverse temperature that follows the logits: its running mean, what it is saved with, what it leaves alone."""

import copy
import math

import pytest
import torch

from tests.methods import p_k_of, random_batch
from topk_losses import METHODS, TopKCrossEntropyLoss, make_loss
from topk_losses.temperature import MOMENTUM, ROWS, AutoTemperature

FOLLOW = [name for name, method in METHODS.items() if method.spread]


def test_it_is_the_target_over_a_running_mean_of_the_spread():
    auto = AutoTemperature(3.0, 2.0)
    assert auto.value() == 2.0
    batches = [random_batch(ROWS + 9, 12, scale, torch.float32, seed)[0] for seed, scale in enumerate((1.0, 3.0, 9.0))]
    mean = math.nan
    for logits in batches:
        auto.observe(logits)
        spread = logits[:ROWS].double().std(1).mean().item()
        mean = spread if math.isnan(mean) else (1 - MOMENTUM) * mean + MOMENTUM * spread
        assert auto.value().item() == pytest.approx(3.0 / mean, rel=1e-5)
    before = auto.value()
    auto.eval()
    auto.observe(batches[0])
    assert auto.value() == before


def test_what_takes_no_part_does_not_count_and_no_spread_is_no_infinity():
    auto = AutoTemperature(3.0, 0.5)
    auto.observe(torch.zeros(4, 12))
    assert auto.value() == 1.0  # twice the default
    auto = AutoTemperature(3.0, 1.0)
    logits, _ = random_batch(6, 12, dtype=torch.float32)
    wider = torch.cat([logits, torch.full((6, 5), -math.inf)], dim=1)
    auto.observe(torch.cat([wider, torch.full((1, 17), math.nan)]))
    assert auto.value().item() == pytest.approx(3.0 / logits.std(1).mean().item(), rel=1e-5)
    before = auto.value()
    for nothing in (torch.full((2, 12), math.nan), torch.full((2, 12), math.inf), torch.zeros(0, 12)):
        auto.observe(nothing)
    assert auto.value() == before


@pytest.mark.parametrize("method", FOLLOW)
def test_a_loss_is_that_of_the_temperature_it_has_reached_which_is_saved_and_never_cast(method):
    logits, labels = random_batch(40, 12, 20.0)
    loss, other = (make_loss(method, p_k_of(method, 3), inverse_temperature="auto") for _ in range(2))
    loss(logits, labels)
    beta = loss.auto.value().item()
    assert beta == pytest.approx(METHODS[method].spread / logits.std(1).mean().item(), rel=1e-5)
    other.bfloat16().load_state_dict(loss.state_dict())
    copied, fixed = copy.deepcopy(loss), make_loss(method, p_k_of(method, 3), inverse_temperature=beta)
    assert other.auto.value() == copied.auto.value() == beta
    copied(logits * 3, labels)
    assert copied.auto.value() != loss.auto.value()  # each has its own
    loss.eval()
    for each in (loss, fixed):
        each.generator = torch.Generator().manual_seed(0)
    torch.testing.assert_close(loss(logits / 9, labels), fixed(logits / 9, labels), rtol=1e-5, atol=1e-6)
    assert "nan" not in repr(loss)
    assert not fixed.state_dict()


def test_it_can_be_set_at_any_time_and_only_where_it_is_known():
    logits, labels = random_batch(40, 12, 5.0)
    loss = TopKCrossEntropyLoss("lml", {1: 0.5, 3: 0.5})
    assert "inverse_temperature=0.25" in repr(loss)
    loss.inverse_temperature = "auto"
    assert "inverse_temperature=auto" in repr(loss)
    loss(logits, labels)
    assert loss.operator.inverse_temperature == loss.auto.value()
    loss.inverse_temperature = 0.3
    assert (loss.auto, loss.operator.inverse_temperature) == (None, 0.3)
    # the transports whiten the scores: their default is right for any spread
    assert make_loss("sinkhorn_sort", 5, inverse_temperature="auto").inverse_temperature == 100.0
