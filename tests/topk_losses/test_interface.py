"""What users of a PyTorch loss expect of its settings, and of torch.export, torch.func and fake tensors."""

import copy
import warnings

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.methods import DETERMINISTIC, RELAXED
from tests.topk_losses.test_loss import random_batch
from topk_losses import METHODS, SparseTopK, TopKCrossEntropyLoss, make_loss, topk_cross_entropy
from topk_losses.kernels import VARIABLE


@pytest.mark.parametrize("method", RELAXED)
def test_the_function_is_the_module(method):
    logits, labels = random_batch()
    want = TopKCrossEntropyLoss(method, [0.5, 0, 0.5], 12, m=8, top1_mode="smce", reduction="none")(logits, labels)
    got = topk_cross_entropy(
        logits, labels, {1: 0.5, 3: 0.5}, method, m=8, top1_mode="smce", reduction="none", num_classes=np.int64(12)
    )
    assert torch.equal(got, want)


def test_p_k_in_all_its_forms():
    logits, labels = random_batch()
    for one, other in (
        (3, [0, 0, 1]),
        (np.int64(3), [0, 0, 1]),
        ({1: 0.5, 5: 0.5}, [0.5, 0, 0, 0, 0.5]),
        (torch.tensor([0.5, 0.5]), (0.5, 0.5)),
    ):
        losses = [TopKCrossEntropyLoss("neuralsort", p_k, top1_mode="sort")(logits, labels) for p_k in (one, other)]
        assert torch.equal(*losses)
    assert make_loss("smooth_topk", 3).k == 3


@pytest.mark.parametrize("method", RELAXED)
def test_sorts_all_classes_if_asked(method):
    logits, labels = random_batch()
    if METHODS[method].operator is SparseTopK:
        return  # it refuses to be asked without the softmax
    loss = TopKCrossEntropyLoss(method, [1 / 12] * 12, top1_mode="sort", reduction="none")
    column = TopKCrossEntropyLoss(method, [0] * 11 + [1], top1_mode="sort", reduction="none")(logits, labels)
    torch.testing.assert_close(column, torch.zeros_like(column), rtol=0, atol=0.5)  # among 12 of 12 for sure, about
    assert bool(loss(logits, labels).isfinite().all())
    with pytest.raises(ValueError, match="p_k reaches rank 12, but only 11 scores are sorted"):
        loss(logits[:, :11], labels % 11)


@pytest.mark.parametrize("method", DETERMINISTIC)
def test_the_number_of_classes_is_taken_from_the_logits(method):
    loss = make_loss(method)
    for n in (12, 20, 12):
        logits, labels = random_batch(n=n)
        torch.testing.assert_close(loss(logits, labels), make_loss(method, num_classes=n)(logits, labels))


@pytest.mark.parametrize("method", RELAXED)
def test_what_can_be_set_acts_and_the_rest_says_why_not(method):
    logits, labels = random_batch()
    loss = TopKCrossEntropyLoss(method, [0.5, 0, 0.5], 12)
    loss.inverse_temperature = 7
    torch.testing.assert_close(
        loss(logits, labels), TopKCrossEntropyLoss(method, [0.5, 0, 0.5], 12, None, 7.0)(logits, labels)
    )
    loss.p_k = {1: 0.1, 2: 0.2, 5: 0.7}
    loss.reduction = "none"
    want = TopKCrossEntropyLoss(method, [0.1, 0.2, 0, 0, 0.7], 12, None, 7.0, reduction="none")
    torch.testing.assert_close(loss(logits, labels), want(logits, labels))
    loss.label_smoothing, loss.ignore_index = 0.1, 3
    assert loss(logits, labels.clamp(max=3)).shape == (6,)
    for name, value, message in (
        ("m", 8, "m is fixed: build a new loss with m=8"),
        ("method", "softsort", "method is fixed"),
        ("top1_mode", "sort", "top1_mode is fixed"),
        ("num_classes", 5, "num_classes is fixed"),
        ("k", 5, "set p_k"),
    ):
        with pytest.raises(AttributeError, match=message):
            setattr(loss, name, value)
    for name, value in (("p_k", [0.5, 0.6]), ("inverse_temperature", -1), ("reduction", "avg"), ("p_k", 13)):
        with pytest.raises(ValueError, match=r"p_k|inverse_temperature|reduction"):
            setattr(loss, name, value)


def test_p_k_keeps_its_digits_whatever_is_done_to_the_module():
    shares = [0.1, 0, 0.2, 0, 0.7]
    loss = TopKCrossEntropyLoss("softsort", shares, 12)
    for changed in (
        loss,
        copy.deepcopy(loss).bfloat16(),
        copy.deepcopy(loss).half(),
        copy.deepcopy(loss).to_empty(device="cpu"),
    ):
        assert changed.p_k.dtype == torch.float64
        torch.testing.assert_close(changed.p_k, torch.tensor(shares, dtype=torch.float64), rtol=0, atol=1e-16)


@pytest.mark.parametrize("method", RELAXED)
def test_a_temperature_that_is_learned_is_a_parameter_of_the_loss(method):
    logits, labels = random_batch(dtype=torch.float32)
    loss = TopKCrossEntropyLoss(method, [0.5, 0, 0.5], 12, inverse_temperature=torch.nn.Parameter(torch.tensor(2.0)))
    assert [name for name, _ in loss.named_parameters()] == ["inverse_temperature"]
    assert list(loss.state_dict()) == ["inverse_temperature"]
    loss(logits, labels).backward()
    assert float(loss.inverse_temperature.grad.abs()) > 0
    scheduled = TopKCrossEntropyLoss(method, [0.5, 0, 0.5], 12, inverse_temperature=torch.tensor(2.0))
    torch.testing.assert_close(scheduled(logits, labels), loss(logits, labels).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", ""])
@pytest.mark.parametrize("m", [None, 8])
@pytest.mark.parametrize("method", DETERMINISTIC)
def test_gradients_of_each_sample_by_torch_func(method, m, backend, monkeypatch):
    monkeypatch.setenv(VARIABLE, backend)
    logits, labels = random_batch(dtype=torch.float32)
    loss = make_loss(method, None, 12, m)
    leaf = logits.clone().requires_grad_()
    (want,) = torch.autograd.grad(make_loss(method, None, 12, m, reduction="sum")(leaf, labels), leaf)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of functions that vmap takes row by row
        each = torch.func.vmap(torch.func.grad(loss))(logits, labels)
        whole = torch.func.grad(lambda s: loss(s, labels))(logits)
    torch.testing.assert_close(each, want, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(whole * 6, want, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("method", DETERMINISTIC)
def test_can_be_exported(method):
    logits, labels = random_batch(dtype=torch.float32)
    loss = make_loss(method, None, 12, 8)
    program = torch.export.export(loss, (logits, labels)).module()
    torch.testing.assert_close(program(logits * 2, labels), loss(logits * 2, labels), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", DETERMINISTIC)
def test_a_fake_call_leaves_nothing_behind(method):
    logits, labels = random_batch(dtype=torch.float32)
    loss = make_loss(method, None, 12)
    want = loss(logits, labels)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert loss(mode.from_tensor(logits), mode.from_tensor(labels)).shape == ()
    assert torch.equal(loss(logits, labels), want)
    assert torch.equal(make_loss(method, None, 12)(logits, labels), want)


def test_settings_that_do_not_fit_the_logits_say_so():
    logits, labels = random_batch()
    with pytest.raises(ValueError, match="weight holds 11 numbers, but the logits have 12 classes"):
        make_loss("softsort", weight=torch.ones(11))(logits, labels)
    with pytest.raises(ValueError, match="needs num_classes=12"):
        make_loss("softsort", [[0.5, 0.5]] * 12)
    rank_one = TopKCrossEntropyLoss("softsort", 3)(logits, labels, p_k=torch.ones(6, 1))
    torch.testing.assert_close(rank_one, torch.nn.functional.cross_entropy(logits, labels), rtol=1e-5, atol=1e-5)
