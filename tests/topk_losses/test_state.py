"""Settings belong to the loss alone: what swaps, copies, moves or learns them acts on it, and on no other."""

import copy
import math
import pickle
from dataclasses import FrozenInstanceError, dataclass
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import gradcheck
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.functional import logsigmoid
from torch.nn.utils.parametrize import register_parametrization
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import topk_losses
from tests.methods import FOLLOW, LEARNABLE, RELAXED, p_k_of, random_batch, value_and_gradient
from topk_losses import (
    METHODS,
    ClassificationLoss,
    RelaxedNetwork,
    SparseTopK,
    TopKCrossEntropyLoss,
    TopKOperator,
    classification,
    make_loss,
    make_operator,
    register_operator,
)
from topk_losses.temperature import AutoTemperature, make_temperature
from topk_losses.threshold import ThresholdOperator

AUTO = [method for method in LEARNABLE if method in FOLLOW]


def build(method, beta, **settings):
    return make_loss(method, p_k_of(method, 3), 12, inverse_temperature=beta, **settings)


def name_of(method):
    """What the inverse temperature is called in the loss."""
    return "tau" if method.startswith("smooth") else "inverse_temperature"


# Swapped, stacked, copied.


@pytest.mark.parametrize("method", LEARNABLE)
def test_functional_call_uses_the_temperature_that_it_is_given(method):
    logits, labels = random_batch()
    for start in (nn.Parameter(torch.tensor(0.7)), torch.tensor(0.7)):
        loss = build(method, start)
        loss(logits, labels)
        other = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
        value = functional_call(loss, {name_of(method): other}, (logits, labels))
        torch.testing.assert_close(value, build(method, 1.3)(logits, labels), rtol=1e-8, atol=1e-10)
        (gradient,) = torch.autograd.grad(value, other)
        step = 1e-6
        slope = build(method, 1.3 + step)(logits, labels) - build(method, 1.3 - step)(logits, labels)
        torch.testing.assert_close(gradient, slope / (2 * step), rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(loss(logits, labels), build(method, 0.7)(logits, labels), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("method", "start"), [*((method, "learned") for method in LEARNABLE), *((method, "auto") for method in AUTO)]
)
def test_an_ensemble_has_a_temperature_for_each_member(method, start):
    logits, labels = random_batch(dtype=torch.float32)
    members = [build(method, start if start == "auto" else nn.Parameter(torch.tensor(beta))) for beta in (0.4, 0.9)]
    for member, scale in zip(members, (3.0, 9.0)):
        member(logits * scale, labels)  # what "auto" follows
    parameters, buffers = stack_module_state(members)
    got = vmap(lambda *state: functional_call(members[0], state, (logits, labels)))(parameters, buffers)
    want = torch.stack([member(logits, labels) for member in members])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    if start == "auto":
        assert torch.equal(
            buffers["inverse_temperature.spread"],
            torch.stack([member.inverse_temperature.spread for member in members]),
        )


@pytest.mark.parametrize("method", LEARNABLE)
def test_a_copy_is_a_loss_of_its_own(method):
    logits, labels = random_batch()
    name = name_of(method)
    for start in (0.7, nn.Parameter(torch.tensor(0.7))):
        for copied in (copy.deepcopy, lambda loss: pickle.loads(pickle.dumps(loss))):
            loss = build(method, start)
            before = loss(logits, labels)
            other = copied(loss)
            value = 2.0
            if isinstance(start, nn.Parameter):
                value = nn.Parameter(torch.tensor(2.0))
            setattr(other, name, value)
            torch.testing.assert_close(other(logits, labels), build(method, 2.0)(logits, labels))
            assert torch.equal(loss(logits, labels), before)


@pytest.mark.parametrize("method", LEARNABLE)
def test_a_replica_of_data_parallel_works_with_the_parameter_that_it_gets(method):
    """As torch.nn.parallel.replicate does it, which needs GPUs."""
    logits, labels = random_batch()
    loss = build(method, nn.Parameter(torch.tensor(0.7)))
    loss(logits, labels)
    replica = loss._replicate_for_data_parallel()
    for name, parameter in loss.named_parameters():
        setattr(replica, name, parameter * 1.0)  # a copy through which gradients come back
    value = replica(logits, labels)
    torch.testing.assert_close(value, loss(logits, labels))
    value.backward()
    assert float(getattr(loss, name_of(method)).grad.abs()) > 0


@pytest.mark.parametrize("method", LEARNABLE)
def test_a_temperature_that_is_parametrized_trains(method):
    class Exp(nn.Module):
        def forward(self, log):
            return log.exp()

        def right_inverse(self, value):
            return value.log()

    logits, labels = random_batch(dtype=torch.float32)
    loss = build(method, nn.Parameter(torch.tensor(0.7)))
    name = name_of(method)
    register_parametrization(loss, name, Exp())
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
    seen = []
    for _ in range(3):
        optimizer.zero_grad()
        loss(logits, labels).backward()
        optimizer.step()
        seen.append(getattr(loss, name).item())
    assert len(set(seen)) == 3
    want = build(method, seen[-1])(logits, labels)
    torch.testing.assert_close(loss(logits, labels), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("method", LEARNABLE)
def test_a_learned_temperature_is_an_ordinary_parameter(method, shape):
    """Of shape (), or (1,), which wrappers such as FSDP ask for."""
    logits, labels = random_batch(dtype=torch.float32)
    name = name_of(method)
    beta = nn.Parameter(torch.full(shape, 0.7))
    loss = build(method, beta)
    assert list(dict(loss.named_parameters())) == list(loss.state_dict()) == [name]
    value = loss(logits, labels)
    torch.testing.assert_close(value, build(method, 0.7)(logits, labels))
    value.backward()
    assert beta.grad.shape == shape
    assert float(beta.grad.abs()) > 0
    with pytest.raises(TypeError, match="cannot assign"):
        setattr(loss, name, 2.0)
    with torch.no_grad():
        beta.fill_(-0.1)  # as an optimizer may
    with pytest.raises(ValueError, match=r"must be a finite number above 0, got -0\.1"):
        loss(logits, labels)


@pytest.mark.parametrize("method", FOLLOW)
def test_the_state_of_auto_has_two_numbers_and_that_of_older_losses_is_read(method):
    logits, labels = random_batch(dtype=torch.float32)
    loss = build(method, "auto")
    loss(logits, labels)
    state = loss.state_dict()
    assert list(state) == ["inverse_temperature.spread", "inverse_temperature.weight"]
    former = {name.replace("inverse_temperature.", "auto."): value for name, value in state.items()}
    wrapped = nn.ModuleDict({"loss": build(method, "auto")})
    wrapped.load_state_dict({f"loss.{name}": value for name, value in former.items()})
    assert wrapped["loss"].inverse_temperature.value() == loss.inverse_temperature.value()


CONSTANTS = [("softsort", "p_k", [0.5, 0.5]), ("softsort", "weight", [1.0] * 12), ("softsort", "noise_rate", 0.2)]
CONSTANTS += [("softmax_cross_entropy", "label_smoothing", 0.2), ("ldr_kl", "margin", 1.0)]
CONSTANTS += [("forward_correction", "T", torch.eye(12).tolist()), ("noised_topk", "class_counts", [1.0] * 12)]
CONSTANTS += [
    ("generalized_cross_entropy", "q", 0.7),
    ("phuber_cross_entropy", "tau", 10.0),
    ("smooth_topk", "alpha", 1.0),
]
CONSTANTS += [("symmetric_cross_entropy", name, value) for name, value in (("alpha", 6.0), ("beta", 0.1), ("A", -4.0))]
CONSTANTS += [("noised_topk", "max_margin", 1.0), ("noised_topk", "scale", 1.0)]


@pytest.mark.parametrize(("method", "name", "value"), CONSTANTS)
def test_a_parameter_does_not_become_a_constant_without_a_word(method, name, value):
    with pytest.raises(ValueError, match=rf"{name} is a constant.*pass {name}\.detach\(\)"):
        make_loss(method, **{name: nn.Parameter(torch.tensor(value))})
    make_loss(method, **{name: torch.tensor(value)})
    loss = make_loss("softsort")
    with pytest.raises(ValueError, match="receives a gradient"):
        loss.p_k = torch.tensor([0.5, 0.5], requires_grad=True)


def test_forward_correction_shows_either_its_noise_rate_or_the_shape_of_its_matrix():
    by_rate = make_loss("forward_correction")
    by_matrix = make_loss("forward_correction", T=torch.eye(12))
    assert (by_rate.noise_rate, by_matrix.noise_rate) == (0.2, None)
    assert "noise_rate=0.2" in repr(by_rate)
    assert "T=" not in repr(by_rate)
    assert "T=(12, 12)" in repr(by_matrix)
    assert "noise_rate" not in repr(by_matrix)


# Operators.


@dataclass(frozen=True)
class Distances(TopKOperator):
    """Sigmoids of the distance from the k-th score, of the largest or, with a sign of -1, of the smallest scores."""

    sign: float = 1.0

    default_inverse_temperature = 3.0
    logit_std = 3.0
    returns_logarithms = True

    def topk_probabilities(self, scores, ks, inverse_temperature, generator=None):
        x = self.sign * scores
        kth = x.sort(dim=1, descending=True).values[:, [k - 1 for k in ks]]  # (rows, J)
        return logsigmoid(inverse_temperature * (x.unsqueeze(1) - kth.unsqueeze(2)))


class WithAttribute(TopKOperator):
    """An operator whose setting is no field of a dataclass."""

    def __init__(self, sign):
        super().__init__()
        self.sign = sign


class Scaled(ClassificationLoss):
    """Cross-entropy of scores times a parameter."""

    def __init__(self, **common):
        super().__init__(**common)
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def loss_of_labels(self, logits, labels, call):
        return -(self.scale * logits).log_softmax(1).gather(1, labels.unsqueeze(1)).squeeze(1)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_parameter_of_an_own_loss_has_its_gradient_at_every_size(smoothing, monkeypatch):
    logits, labels = random_batch()
    target = nn.functional.one_hot(labels, 12).double().lerp(nn.functional.one_hot(labels.roll(1), 12).double(), 0.3)
    gradients = []
    for limit in (1 << 20, 40):
        monkeypatch.setattr(classification, "SCORES_AT_ONCE", limit)
        loss = Scaled(label_smoothing=smoothing)
        loss(logits, target).backward()
        gradients.append(loss.scale.grad)
    assert gradients[0] != 0
    torch.testing.assert_close(*gradients)


class Tempered(ClassificationLoss):
    """Cross-entropy of scores times the inverse temperature of the call."""

    def __init__(self, inverse_temperature=None, **common):
        super().__init__(**common)
        if inverse_temperature is not None:
            self.inverse_temperature = make_temperature(inverse_temperature, 1.0, logit_std=2.0)

    def loss_of_labels(self, logits, labels, call):
        return nn.functional.cross_entropy(logits * call.inverse_temperature, labels, reduction="none")


def test_an_own_loss_finds_its_temperature_in_the_call():
    logits, labels = random_batch()
    learned = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
    auto = 2 / logits.std(dim=1).mean()
    for given, beta in ((None, 1.0), (0.7, 0.7), (learned, 0.7), ("auto", auto)):
        loss = Tempered(given)
        torch.testing.assert_close(loss(logits, labels), nn.functional.cross_entropy(beta * logits, labels))
    loss = Tempered(0.7)
    loss.inverse_temperature = 0.0
    with pytest.raises(ValueError, match="inverse_temperature must be a finite number above 0"):
        loss(logits, labels)


def test_a_matrix_of_labels_that_changes_later_changes_no_loss():
    logits, labels = random_batch()
    T = torch.eye(12, dtype=torch.float64)
    loss = make_loss("forward_correction", T=T)
    before = loss(logits, labels)
    T.fill_(1 / 12)
    assert torch.equal(loss(logits, labels), before)


@pytest.mark.parametrize(("family", "p"), [("linear", 2), ("cubic", 4 / 3)])
def test_an_own_operator_of_a_family_is_that_of_the_library(family, p):
    """The family says whether f or its logarithm comes back."""

    class Own(ThresholdOperator):
        default_inverse_temperature = 1.0

    Own.family = family
    logits, labels = random_batch()
    p_k = {1: 0.5, 3: 0.5}
    own, ours = (TopKCrossEntropyLoss(operator, p_k, inverse_temperature=1.0) for operator in (Own(), SparseTopK(p)))
    assert torch.equal(own(logits, labels), ours(logits, labels))
    with pytest.raises(ValueError, match="P_K"):
        TopKCrossEntropyLoss(Own(), {3: 1.0}, inverse_temperature=1.0)


class TakesSeveral(ClassificationLoss):
    """A loss that says it takes what no loss without an operator does."""

    takes = "several"


def test_an_own_operator_stays_with_its_settings():
    logits, labels = random_batch()
    loss = TopKCrossEntropyLoss(Distances(-1.0), [0.5, 0.5], top1_mode="sort", inverse_temperature=0.5)

    def assert_is_by_definition(weights, beta):
        distances = (-logits).topk(len(weights)).values + logits.gather(1, labels.unsqueeze(1))
        want = -((-beta * distances).sigmoid() @ torch.tensor(weights, dtype=torch.float64)).log().mean()
        torch.testing.assert_close(loss(logits, labels), want, rtol=1e-5, atol=1e-6)

    assert_is_by_definition([0.5, 0.5], 0.5)
    loss.p_k = [0.2, 0.2, 0.6]  # another k
    loss = copy.deepcopy(loss.to("cpu").double())
    assert_is_by_definition([0.2, 0.2, 0.6], 0.5)
    loss.inverse_temperature = 2.0
    assert_is_by_definition([0.2, 0.2, 0.6], 2.0)
    with pytest.raises(TypeError, match="must be the name of a method or a TopKOperator, got int"):
        TopKCrossEntropyLoss(3)


def test_a_registered_operator_is_a_method_like_all_others():
    logits, labels = random_batch()
    t = 3 * (logits - logits.sort(dim=1, descending=True).values[:, 2:3])
    try:
        register_operator("mine", Distances())
        for make in (make_loss, TopKCrossEntropyLoss):
            loss = make("mine", 3, top1_mode="sort")
            torch.testing.assert_close(loss(logits, labels), -logsigmoid(t)[torch.arange(6), labels].mean())
            assert gradcheck(lambda s, loss=loss: loss(s, labels), (logits.clone().requires_grad_(),))
        torch.testing.assert_close(topk_losses.topk_mask(logits, 3, "mine"), t.sigmoid())
        register_operator("mine", Distances())  # the same
        for name in ("mine", "lml", "bitonic__non_sparse"):
            with pytest.raises(ValueError, match=f"there is a method '{name}' already"):
                register_operator(name, Distances(-1.0))
        with pytest.raises(TypeError, match="an object of a class derived from TopKOperator"):
            register_operator("another", Distances)
        with pytest.raises(TypeError, match="a class derived from ClassificationLoss"):
            topk_losses.register_loss("another", Distances())
        for name in ("", "two words", "a/b", 3):
            with pytest.raises(ValueError, match="a name of a method has letters"):
                register_operator(name, Distances())
        with pytest.raises(ValueError, match="unknown takes 'several'"):
            topk_losses.register_loss("another", TakesSeveral)
    finally:
        METHODS.pop("mine", None)
    assert "another" not in METHODS


def test_another_operator_whose_attributes_are_no_fields_is_not_taken_for_the_first():
    first = WithAttribute(1.0)
    try:
        register_operator("mine", first)
        register_operator("mine", first)  # the same
        with pytest.raises(ValueError, match="there is a method 'mine' already"):
            register_operator("mine", WithAttribute(2.0))
    finally:
        METHODS.pop("mine", None)


@pytest.mark.parametrize("method", RELAXED)
def test_an_operator_has_the_default_of_its_method_and_takes_another_at_the_call(method):
    logits, labels = random_batch()
    operator = make_operator(method)
    assert operator.default_inverse_temperature == METHODS[method].inverse_temperature
    beta = torch.tensor([0.8], dtype=torch.float64, requires_grad=True)
    for call, arguments in (
        ("rank_probabilities", (logits, labels, 3)),
        ("permutation_matrix", (logits, 3)),
        ("mask", (logits, 3)),
        ("topk_mass", (logits, logits.sigmoid(), 3)),
    ):
        compute = getattr(operator, call)
        got = compute(*arguments, inverse_temperature=beta)
        torch.testing.assert_close(got, compute(*arguments, inverse_temperature=0.8))
        assert bool(torch.autograd.grad(got.square().sum(), beta)[0].isfinite())
        default = operator.default_inverse_temperature
        torch.testing.assert_close(compute(*arguments), compute(*arguments, inverse_temperature=default))
    with pytest.raises(FrozenInstanceError):
        operator.k = 3


@pytest.mark.parametrize("method", METHODS)
def test_m_of_n_or_more_is_no_m(method):
    logits, labels = random_batch(n=10)
    for target in (labels, random_batch(n=10, seed=1)[0].softmax(1)):
        results = []
        for m in (None, 10, 50):
            loss = make_loss(method, p_k_of(method), m=m)
            loss.generator = torch.Generator().manual_seed(0)
            results.append(value_and_gradient(loss, logits, target))
        for other in results[1:]:
            torch.testing.assert_close(other, results[0], rtol=0, atol=0)


# The inverse temperature that follows the logits.


class OwnTensor(torch.Tensor):
    """A subclass that leaves all operations to PyTorch."""


@pytest.mark.parametrize("method", FOLLOW)
def test_auto_follows_the_logits_of_a_tensor_subclass(method):
    logits, labels = random_batch(scale=20.0, dtype=torch.float32)
    plain = build(method, "auto")
    own = build(method, "auto")
    plain(logits, labels)
    own(logits.as_subclass(OwnTensor), labels)
    assert float(own.inverse_temperature.weight) == 1
    assert float(own.inverse_temperature.spread) == float(plain.inverse_temperature.spread)


def spread_of(logits):
    return logits.double().std(1).mean().item()


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_auto_is_the_target_over_a_running_mean_in_float32(default):
    torch.set_default_dtype(default)
    try:
        for cast in (lambda auto: auto, lambda auto: auto.bfloat16(), lambda auto: auto.half(), nn.Module.double):
            auto = cast(AutoTemperature(3.0, 2.0))
            mean = math.nan
            assert auto.value() == 2.0
            for seed, scale in enumerate((1.0, 3.0, 9.0)):
                logits, _ = random_batch(73, 12, scale, torch.float32, seed)
                auto.observe(logits)
                mean = spread_of(logits) if math.isnan(mean) else 0.9 * mean + 0.1 * spread_of(logits)
                assert auto.value().item() == pytest.approx(3.0 / mean, rel=1e-5)
            assert auto.spread.dtype == torch.float32
            before = auto.value()
            auto.eval().observe(logits)
            assert auto.value() == before
    finally:
        torch.set_default_dtype(torch.float32)


NUMBERS = [2, 2.0, np.float32(2), torch.tensor(2.0), nn.Parameter(torch.tensor(2.0))]


@pytest.mark.parametrize("value", NUMBERS, ids=repr)
@pytest.mark.parametrize("method", FOLLOW)
def test_a_number_or_a_tensor_takes_the_place_of_auto(method, value):
    logits, labels = random_batch(dtype=torch.float32)
    loss, want = (make_loss(method, p_k_of(method, 3), inverse_temperature=beta) for beta in ("auto", 2.0))
    loss(logits, labels)
    loss.inverse_temperature = value
    results = []
    for called in (loss, want):
        called.generator = torch.Generator().manual_seed(0)
        results.append(called(logits, labels))
    torch.testing.assert_close(*results)
    assert set(loss.state_dict()) == set(dict(loss.named_parameters()))


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.inverse_temperature])
def test_no_loss_forgets_its_temperature(method):
    """None is the default as an argument, and no number later."""
    name = getattr(METHODS[method].loss, "temperature_name", "inverse_temperature")
    for beta in (2.0, "auto"):
        loss = make_loss(method, p_k_of(method, 3), inverse_temperature=beta)
        setattr(loss, name, None)
        with pytest.raises(ValueError, match=f"{name} must be a number, got None"):
            loss(*random_batch())


@pytest.mark.parametrize("mask", [-math.inf, -1e4, -1e9, -65504.0, torch.finfo(torch.float32).min])
def test_auto_counts_live_classes_of_rows_that_count(mask):
    logits, labels = random_batch(6, 12, dtype=torch.float32)
    want = 3.0 / spread_of(logits)
    wider = torch.cat([logits, torch.full((6, 50), mask)], dim=1)
    auto = AutoTemperature(3.0, 100.0)
    auto.observe(torch.cat([wider, torch.full((1, 62), math.nan)]))
    assert auto.value().item() == pytest.approx(want, rel=1e-5)
    for nothing in (torch.full((2, 12), math.nan), torch.full((2, 12), math.inf), torch.zeros(0, 12)):
        auto.observe(nothing)
    assert auto.value().item() == pytest.approx(want, rel=1e-5)
    flat = AutoTemperature(3.0, 0.5)
    flat.observe(torch.zeros(4, 12))
    assert flat.value() == 1.0  # twice the default
    loss = build("lml", "auto")
    loss(torch.cat([logits, 1e3 * logits]), torch.cat([labels, torch.full((6,), -100)]))
    assert loss.inverse_temperature.spread.item() == pytest.approx(spread_of(logits), rel=1e-5)


@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
def test_auto_counts_every_finite_score_where_none_is_a_mask_value(scale):
    """Squared distances lie as far apart: one near point, and all others more than 500 away."""
    scores = -scale * torch.tensor([[0.0, 600, 610, 900, 7000], [0, 3, 800, 9000, 9100]])
    auto = AutoTemperature(3.0, 1e9)
    auto.observe(torch.cat([scores, torch.full((2, 4), -math.inf)], dim=1), finite_masks=False)
    assert auto.value().item() == pytest.approx(3.0 / spread_of(scores), rel=1e-5)


def test_auto_counts_all_positions_of_dense_maps():
    logits = torch.randn(2, 12, 20, 20) * torch.linspace(0.1, 4, 400).view(1, 1, 20, 20)
    loss = build("lml", "auto")
    loss(logits, torch.zeros(2, 20, 20, dtype=torch.long))
    assert loss.inverse_temperature.spread.item() == pytest.approx(
        spread_of(logits.movedim(1, -1).reshape(-1, 12)), rel=1e-4
    )


def test_auto_is_averaged_with_the_buffers_of_a_model():
    logits, labels = random_batch(dtype=torch.float32)
    loss = build("lml", "auto")
    average = AveragedModel(loss, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    average.update_parameters(loss)  # before the first batch: it does not count
    for _ in range(3):
        loss(logits, labels)
        average.update_parameters(loss)
    assert average.module.inverse_temperature.value().item() == pytest.approx(
        loss.inverse_temperature.value().item(), rel=1e-5
    )


@pytest.mark.parametrize("method", FOLLOW)
def test_auto_is_saved_moved_and_copied_with_its_loss(method):
    logits, labels = random_batch(40, 12, 20.0)
    loss, other = (build(method, "auto") for _ in range(2))
    loss(logits, labels)
    beta = loss.inverse_temperature.value().item()
    assert beta == pytest.approx(METHODS[method].spread / logits.std(1).mean().item(), rel=1e-5)
    other.bfloat16().load_state_dict(loss.state_dict())
    copies = copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))
    for own in (other, *copies):
        assert own.inverse_temperature.value() == beta
        own(logits * 3, labels)
        assert own.inverse_temperature.value() != beta == loss.inverse_temperature.value().item()
    fixed = build(method, beta)
    loss.eval()
    for seeded in (loss, fixed):
        seeded.generator = torch.Generator().manual_seed(0)
    torch.testing.assert_close(loss(logits / 9, labels), fixed(logits / 9, labels), rtol=1e-5, atol=1e-6)
    assert make_loss("sinkhorn_sort", 5, inverse_temperature="auto").inverse_temperature == 100.0


def _train_in_two_processes(rank, results, meeting_place):
    store = torch.distributed.FileStore(meeting_place, 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    logits, labels = random_batch(6, 12, dtype=torch.float32)
    loss = build("lml", "auto", reduction="sum")
    rows = slice(0, 6 * (1 - rank))  # the second process has an empty batch
    loss(logits[rows], labels[rows])
    results[rank] = loss.inverse_temperature.spread.item(), spread_of(logits)
    torch.distributed.destroy_process_group()


def test_auto_is_that_of_all_processes_one_with_an_empty_batch(tmp_path):
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.spawn(_train_in_two_processes, (results, str(tmp_path / "store")), nprocs=2)
        assert sorted(results) == [0, 1]
        for got, want in dict(results).values():
            assert got == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("method", [name for name in LEARNABLE if name not in FOLLOW or name in ("lapsum", "bitonic")])
def test_a_loss_with_constants_and_a_parameter_can_be_distributed(method, tmp_path):
    """Processes send their buffers to one another, P_K and the weights among them."""
    logits, labels = random_batch(dtype=torch.float32)
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        loss = build(method, nn.Parameter(torch.tensor([0.7])), weight=torch.linspace(0.2, 2, 12))
        value = nn.parallel.DistributedDataParallel(loss)(logits, labels)
        torch.testing.assert_close(value, loss(logits, labels))
        value.backward()
        assert float(getattr(loss, name_of(method)).grad.abs()) > 0
    finally:
        torch.distributed.destroy_process_group()


def test_a_network_keeps_the_settings_that_make_operator_is_not_given():
    network = RelaxedNetwork("bitonic", "logistic_phi", 0.2)
    assert make_operator(network, distribution="logistic_phi") == network
    assert make_operator(network, art_lambda=0.3) == RelaxedNetwork("bitonic", "logistic_phi", 0.3)
    for other in (network, RelaxedNetwork("bitonic", "cauchy")):
        assert make_operator(other, distribution="gaussian") == RelaxedNetwork("bitonic", "gaussian")


@pytest.mark.parametrize("network", [RelaxedNetwork("bitonic", "cauchy"), RelaxedNetwork("odd_even", art_lambda=0.2)])
def test_a_registered_network_is_trained_as_it_is(network):
    """By make_loss, and with the settings that scripts write to their rows."""
    logits, labels = random_batch()
    try:
        register_operator("mine", network)
        want = TopKCrossEntropyLoss(network, 3)(logits, labels)
        torch.testing.assert_close(make_loss("mine", 3)(logits, labels), want)
        settings = topk_losses.resolve_settings("mine")
        assert (settings["distribution"], settings["art_lambda"]) == (network.distribution, network.art_exponent)
        torch.testing.assert_close(make_loss("mine", 3, **settings)(logits, labels), want)
    finally:
        METHODS.pop("mine", None)


CONSTANTS_OF_A_LOSS = {
    "P_K": partial(make_loss, "lml", [0.2] * 5),
    "class_counts": partial(make_loss, "imbalanced_noised_topk", 3, class_counts=torch.arange(1, 13) * 1e5),
    "weight": partial(make_loss, "softmax_cross_entropy", weight=torch.linspace(0.1, 0.7, 12)),
    "T": partial(make_loss, "forward_correction", T=torch.full((12, 12), 0.02).fill_diagonal_(0.78)),
}


@pytest.mark.parametrize("precision", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CONSTANTS_OF_A_LOSS)
def test_constants_keep_their_precision_when_a_model_is_cast(name, precision):
    logits, labels = random_batch(dtype=torch.float32)
    losses = []
    for is_cast in (False, True):
        loss = CONSTANTS_OF_A_LOSS[name]()
        if is_cast:
            loss.to(precision)
        loss.generator = torch.Generator().manual_seed(0)
        losses.append(loss(logits, labels))
    assert torch.equal(*losses)
