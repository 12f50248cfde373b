"""The inverse temperature of every public function that takes one: it acts, and as the operator's does."""

import inspect
import itertools

import pytest
import torch
from torch.autograd import gradcheck

import topk_losses
from tests import reference
from tests.methods import DETERMINISTIC, GUARDED, p_k_of, random_batch
from topk_losses import (
    LML,
    METHODS,
    RELAXATIONS,
    TopKCrossEntropyLoss,
    make_loss,
    make_operator,
    register_operator,
    resolve_settings,
    soft_topk_values,
    topk_cross_entropy,
    topk_mask,
)

LOGITS, LABELS = random_batch(4, 7)
P_K = [0.5, 0.2, 0.3]
TEMPERED = [name for name, spec in METHODS.items() if spec.inverse_temperature is not None]


def loss_by_definition(method, P):
    return reference.topk_cross_entropy(P, LOGITS, LABELS, torch.tensor([P_K] * 4), "sm", method in GUARDED).mean()


def column_by_definition(method, P):
    return P[torch.arange(4), :, LABELS]


# what each makes of a method and an inverse temperature, and the same of P (4, 3, 7)
FUNCTIONS = {
    "topk_mask": (lambda method, beta: topk_mask(LOGITS, 3, method, beta), lambda method, P: P.sum(1)),
    "soft_topk_values": (
        lambda method, beta: soft_topk_values(LOGITS, 3, method, beta),
        lambda method, P: torch.einsum("bkn,bn->bk", P, LOGITS),
    ),
    "make_operator": (
        lambda method, beta: make_operator(method).rank_probabilities(LOGITS, LABELS, 3, beta),
        column_by_definition,
    ),
    "topk_cross_entropy": (
        lambda method, beta: topk_cross_entropy(LOGITS, LABELS, P_K, method, inverse_temperature=beta),
        loss_by_definition,
    ),
    "TopKCrossEntropyLoss": (
        lambda method, beta: TopKCrossEntropyLoss(method, P_K, inverse_temperature=beta)(LOGITS, LABELS),
        loss_by_definition,
    ),
    "make_loss": (
        lambda method, beta: make_loss(method, P_K, inverse_temperature=beta)(LOGITS, LABELS),
        loss_by_definition,
    ),
}
CASES = []  # of a function and a method that it takes
for case in itertools.product(FUNCTIONS, RELAXATIONS):
    if case[0] != "soft_topk_values" or make_operator(case[1]).sums_to_k:
        CASES.append(case)
SETTINGS = {"resolve_settings"}  # which compute nothing: below


def test_every_public_function_with_a_temperature_is_asked():
    functions = {name: getattr(topk_losses, name) for name in topk_losses.__all__}
    taking = {name for name, value in functions.items() if inspect.isfunction(value) and takes_temperature(value)}
    assert {"topk_mask", "soft_topk_values"} <= taking <= {*FUNCTIONS, *SETTINGS}


def takes_temperature(function):
    return "inverse_temperature" in inspect.signature(function).parameters


def other_temperatures(method):
    """Two that differ from the default, and at which the scores of `random_batch` are neither hard nor equal."""
    default = METHODS[method].inverse_temperature
    return 0.6 * default, 1.7 * default


def seeded(function, method, beta):
    torch.manual_seed(0)
    return function(method, beta)


@pytest.mark.parametrize(("name", "method"), CASES)
def test_another_temperature_gives_what_the_operator_has_at_it(name, method):
    function, of_matrix = FUNCTIONS[name]
    results = []
    for beta in other_temperatures(method):
        got = seeded(function, method, beta)
        if method in DETERMINISTIC:
            want = of_matrix(method, reference.permutation_matrix(method, LOGITS, 3, beta))
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(seeded(function, method, torch.tensor(beta, dtype=torch.float64)), got)
        results.append(got)
    assert float((results[0] - results[1]).abs().max()) > 1e-3
    default = METHODS[method].inverse_temperature
    torch.testing.assert_close(seeded(function, method, None), seeded(function, method, default))


@pytest.mark.parametrize(("name", "method"), [case for case in CASES if case[1] in DETERMINISTIC])
def test_a_temperature_receives_its_gradient(name, method):
    beta = torch.tensor(other_temperatures(method)[0], dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda beta: FUNCTIONS[name][0](method, beta), (beta,), atol=1e-5)
    (gradient,) = torch.autograd.grad(FUNCTIONS[name][0](method, beta).square().sum(), beta)
    assert float(gradient.abs()) > 1e-6


@pytest.mark.parametrize("method", TEMPERED)
def test_every_loss_with_a_temperature_changes_with_it(method):
    losses = []
    for beta in (None, METHODS[method].inverse_temperature, *other_temperatures(method)):
        torch.manual_seed(0)
        losses.append(float(make_loss(method, p_k_of(method, 3), inverse_temperature=beta)(LOGITS, LABELS)))
        assert resolve_settings(method, beta)["inverse_temperature"] == beta or beta is None
    assert losses[0] == losses[1]
    assert len({round(loss, 4) for loss in losses}) == 3


@pytest.mark.parametrize("method", [name for name in TEMPERED if METHODS[name].spread is None])
def test_auto_is_the_default_of_a_loss_that_does_not_follow_its_logits(method):
    values = []
    for beta in (None, "auto"):
        torch.manual_seed(0)
        values.append(float(make_loss(method, p_k_of(method, 3), inverse_temperature=beta)(LOGITS, LABELS)))
    assert values[0] == values[1]


class Sharper(LML):
    default_inverse_temperature = 1.7


def test_a_registered_method_has_the_temperature_that_it_is_given():
    try:
        register_operator("mine", Sharper())
        for name, (function, _) in FUNCTIONS.items():
            torch.testing.assert_close(function("mine", None), function("lml", 1.7), msg=name)
    finally:
        METHODS.pop("mine", None)
