"""The inverse temperature that follows the logits: its running mean, what it is saved with, what it leaves alone."""

import copy
import math

import pytest
import torch

from tests.topk_losses.test_loss import random_batch
from topk_losses import METHODS, TopKCrossEntropyLoss, make_loss, make_operator
from topk_losses.temperature import MOMENTUM, ROWS, AutoTemperature

FOLLOW = [name for name, method in METHODS.items() if method.spread]
P_K = {1: 0.5, 3: 0.5}


def auto_loss(method, **settings):
    return make_loss(method, 3 if METHODS[method].family == "losses" else P_K, inverse_temperature="auto", **settings)


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
    wider = torch.cat([wider, torch.full((1, 17), math.nan)])
    auto.observe(wider)
    assert auto.value().item() == pytest.approx(3.0 / logits.std(1).mean().item(), rel=1e-5)
    before = auto.value()
    auto.observe(torch.full((2, 12), math.nan))
    auto.observe(torch.full((2, 12), math.inf))
    auto.observe(torch.zeros(0, 12))
    assert auto.value() == before


@pytest.mark.parametrize("method", FOLLOW)
def test_a_loss_is_that_of_the_temperature_it_has_reached(method):
    logits, labels = random_batch(40, 12, 20.0)
    loss = auto_loss(method)
    loss(logits, labels)
    beta = loss.auto.value().item()
    assert beta == pytest.approx(METHODS[method].spread / logits.std(1).mean().item(), rel=1e-5)
    fixed = make_loss(method, 3 if METHODS[method].family == "losses" else P_K, inverse_temperature=beta)
    loss.eval()
    for each in (loss, fixed):
        each.generator = torch.Generator().manual_seed(0)
    torch.testing.assert_close(loss(logits / 9, labels), fixed(logits / 9, labels), rtol=1e-5, atol=1e-6)
    assert "nan" not in repr(loss)


@pytest.mark.parametrize("method", FOLLOW)
def test_the_spread_is_saved_with_the_loss_and_never_cast(method):
    logits, labels = random_batch(40, 12, 20.0)
    loss = auto_loss(method)
    loss(logits, labels)
    copied = copy.deepcopy(loss)
    other = auto_loss(method).bfloat16()
    other.load_state_dict(loss.state_dict())
    assert other.auto.value() == loss.auto.value() == copied.auto.value()
    copied(logits * 3, labels)
    assert copied.auto.value() != loss.auto.value()  # each has its own
    assert not make_loss(method).state_dict()


def test_a_layer_that_begins_at_zero_trains():
    logits, labels = random_batch(200, 12, 3.0, torch.float32)
    for method in FOLLOW:
        torch.manual_seed(0)
        layer = torch.nn.Linear(12, 12)
        torch.nn.init.zeros_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
        inputs = torch.nn.functional.one_hot(labels, 12).float() + 0.1 * logits
        loss, optimizer = auto_loss(method), torch.optim.Adam(layer.parameters(), 0.05)
        for _ in range(60):
            optimizer.zero_grad()
            loss(layer(inputs), labels).backward()
            optimizer.step()
        hits = layer(inputs).topk(3, dim=1).indices == labels.unsqueeze(1)
        assert hits.any(1).float().mean() > 0.9, method


def test_it_can_be_set_at_any_time_and_only_where_it_is_known():
    logits, labels = random_batch(40, 12, 5.0)
    loss = TopKCrossEntropyLoss("lml", P_K)
    loss.inverse_temperature = "auto"
    loss(logits, labels)
    assert loss.operator.inverse_temperature == loss.auto.value()
    loss.inverse_temperature = 0.3
    assert (loss.auto, loss.operator.inverse_temperature) == (None, 0.3)
    # the transports whiten the scores: their default is right for any spread
    assert make_loss("sinkhorn_sort", P_K, inverse_temperature="auto").inverse_temperature == 100.0
    with pytest.raises(ValueError, match='for a loss "auto", which follows its logits'):
        make_operator("lml", 12, 3, "auto")
    with pytest.raises(ValueError, match="must be a number above 0"):
        make_loss("lml", P_K, inverse_temperature="automatic")
    with pytest.raises(ValueError, match="applies to methods with a temperature"):
        make_loss("softmax_cross_entropy", inverse_temperature="auto")
