"""What users of torch.nn.CrossEntropyLoss expect: reductions, precision, settings, copies, compilers, devices."""

import copy
import pickle
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.methods import DETERMINISTIC, RELAXED, p_k_of, random_batch, value_and_gradient
from topk_losses import (
    METHODS,
    RELAXATIONS,
    SmoothHardTopKLoss,
    TopKCrossEntropyLoss,
    make_loss,
    topk_cross_entropy,
)
from topk_losses.kernels import VARIABLE

WITH_M = [(method, None) for method in METHODS] + [(method, 8) for method in RELAXATIONS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", DETERMINISTIC)
def test_reductions_and_ignored_samples_which_may_hold_anything(method, dtype):
    logits, labels = random_batch(dtype=dtype)
    each, of_each = value_and_gradient(make_loss(method, None, 12, reduction="none"), logits, labels)
    torch.testing.assert_close(make_loss(method, None, 12)(logits, labels), each.mean())
    logits[1] = torch.nan
    for ignore_index in (-100, 7):
        labels[[1, 4]] = ignore_index
        kept = labels != ignore_index
        value, gradient = value_and_gradient(
            make_loss(method, None, 12, reduction="none", ignore_index=ignore_index), logits, labels
        )
        torch.testing.assert_close(value, each * kept)
        torch.testing.assert_close(gradient, of_each * kept.unsqueeze(1))
        summed = make_loss(method, None, 12, reduction="sum", ignore_index=ignore_index)(logits, labels)
        torch.testing.assert_close(summed, each[kept].sum())
        mean = make_loss(method, None, 12, ignore_index=ignore_index)(logits, labels)
        torch.testing.assert_close(mean, each[kept].mean())
    assert bool(make_loss(method)(logits, torch.full_like(labels, -100)).isnan())  # as torch.nn.CrossEntropyLoss


@pytest.mark.parametrize("method", METHODS)
def test_an_empty_batch_is_that_of_cross_entropy(method):
    logits, labels = torch.zeros(0, 12), torch.zeros(0, dtype=torch.long)
    value, gradient = value_and_gradient(make_loss(method, p_k_of(method), 12), logits, labels)
    assert bool(value.isnan())
    assert gradient.shape == (0, 12)
    assert float(make_loss(method, p_k_of(method), 12, reduction="sum")(logits, labels)) == 0


@pytest.mark.parametrize("method", DETERMINISTIC)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast_compute_in_float32(method, dtype):
    loss = make_loss(method, None, 12)
    logits, labels = random_batch(dtype=dtype)
    want, of_want = value_and_gradient(loss, logits.float(), labels)
    for autocast in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            value, gradient = value_and_gradient(loss, logits, labels)
        assert (value.dtype, gradient.dtype) == (torch.float32, dtype)
        assert torch.equal(value, want)
        assert torch.equal(gradient, of_want.to(dtype))


@pytest.mark.parametrize("method", DETERMINISTIC)
def test_leaves_its_inputs_alone_and_can_go_back_twice(method):
    logits, labels = random_batch(dtype=torch.float32)
    before, other = logits.clone(), logits.T.contiguous().T.requires_grad_()  # another order in memory
    loss = make_loss(method)
    with torch.inference_mode():  # what is built and kept there serves training too
        loss(logits, labels)
    want = value_and_gradient(loss, logits, labels)
    value = loss(other, labels)
    for retain in (True, False):  # nothing saved is written over
        torch.testing.assert_close(torch.autograd.grad(value, other, retain_graph=retain)[0], want[1])
    torch.testing.assert_close(value.detach(), want[0])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("method", DETERMINISTIC)
def test_defaults_of_pytorch_do_not_matter(method):
    loss = make_loss(method, num_classes=20, m=8)
    logits, labels = torch.randn(4, 20), torch.arange(4)
    want = value_and_gradient(loss, logits, labels)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):  # the default device
            got = value_and_gradient(loss, logits, labels)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(got, want)  # and of the same dtype and device; sums round by where tensors lie


@pytest.mark.parametrize("method", DETERMINISTIC)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pickle_deepcopy_and_casts_keep_the_loss(method, dtype):
    loss = make_loss(method, None, 12, m=8)
    logits, labels = random_batch(dtype=dtype)
    want = loss(logits, labels)
    for changed in (
        pickle.loads(pickle.dumps(loss)),
        copy.deepcopy(loss),
        loss.to("cpu"),
        loss.double(),
        loss.bfloat16(),
        loss.to_empty(device="cpu"),
    ):
        assert torch.equal(changed(logits, labels), want)
    assert not loss.state_dict(), "constants are rebuilt, not stored with a model"
    on_meta = copy.deepcopy(loss).to("meta")
    assert all(getattr(on_meta, name).is_meta for name in on_meta.constants if getattr(on_meta, name) is not None)


# Settings.


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
    last, even = [0, 0, 1], (0.5, 0.5)
    for one, other in ((3, last), (np.int64(3), last), (torch.tensor(even), even), (np.array(even), even)):
        losses = [TopKCrossEntropyLoss("neuralsort", p_k, top1_mode="sort")(logits, labels) for p_k in (one, other)]
        assert torch.equal(*losses)
    assert make_loss("smooth_topk", 3).k == 3
    rank_one = TopKCrossEntropyLoss("softsort", 3)(logits, labels, p_k=torch.ones(6, 1))
    torch.testing.assert_close(rank_one, cross_entropy(logits, labels), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", DETERMINISTIC)
def test_the_number_of_classes_is_taken_from_the_logits(method):
    loss = make_loss(method)
    for n in (12, 20, 12):
        logits, labels = random_batch(n=n)
        torch.testing.assert_close(loss(logits, labels), make_loss(method, num_classes=n)(logits, labels))


def test_make_loss_knows_the_published_names_and_rows():
    logits, labels = random_batch()
    bitonic, other = make_loss("bitonic", [0.2] * 5, 12), make_loss("bitonic__non_sparse", [0.2] * 5, 12)
    assert other.method == "bitonic"
    assert torch.equal(bitonic(logits, labels), other(logits, labels))
    softmax = make_loss("softmax_cross_entropy", [1, 0, 0, 0, 0], 12, 8)
    assert torch.equal(softmax(logits, labels), cross_entropy(logits, labels))
    smooth = make_loss("smooth_hard_topk", [0, 0, 0, 0, 1], 12, 8, inverse_temperature=0.5)
    assert isinstance(smooth, SmoothHardTopKLoss)
    assert repr(smooth) == (
        "SmoothHardTopKLoss(tau=0.5, alpha=1, k=5, num_classes=12, label_smoothing=0, soft_labels=expected, "
        "ignore_index=-100, reduction=mean)"
    )


@pytest.mark.parametrize("method", RELAXED)
def test_what_can_be_set_acts_and_the_rest_says_why_not(method):
    logits, labels = random_batch()
    loss = TopKCrossEntropyLoss(method, [0.5, 0, 0.5], 12)
    loss.inverse_temperature = 7
    torch.testing.assert_close(
        loss(logits, labels), TopKCrossEntropyLoss(method, [0.5, 0, 0.5], 12, None, 7.0)(logits, labels)
    )
    loss.p_k, loss.reduction = {1: 0.1, 2: 0.2, 5: 0.7}, "none"
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
        with pytest.raises(ValueError, match=name):
            setattr(loss, name, value)


# Compilers and function transforms.


@pytest.mark.parametrize(("method", "m"), WITH_M)
def test_a_compiled_step_is_the_eager_one_at_every_batch_size(method, m):
    """One graph, which calls the kernels: aot_eager traces forward and backward, and runs what it traced."""
    loss = make_loss(method, p_k_of(method), 12, m)
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for batch in (4, 7, 9):
        results = []
        for call in (loss, compiled):
            torch.manual_seed(0)
            results.append(value_and_gradient(call, *random_batch(batch, dtype=torch.float32)))
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-5)  # compiled, the transport is not looked at


@pytest.mark.parametrize("backend", ["torch", ""])
@pytest.mark.parametrize("m", [None, 8])
@pytest.mark.parametrize("method", DETERMINISTIC)
def test_gradients_of_each_sample_by_torch_func(method, m, backend, monkeypatch):
    monkeypatch.setenv(VARIABLE, backend)
    logits, labels = random_batch(dtype=torch.float32)
    loss = make_loss(method, None, 12, m)
    _, want = value_and_gradient(make_loss(method, None, 12, m, reduction="sum"), logits, labels)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of functions that vmap takes row by row
        each = torch.func.vmap(torch.func.grad(loss))(logits, labels)
        whole = torch.func.grad(lambda s: loss(s, labels))(logits)
    torch.testing.assert_close(each, want, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(whole * 6, want, rtol=1e-3, atol=1e-5)
    direction = torch.sin(logits)
    with forward_ad.dual_level(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        forward = forward_ad.unpack_dual(loss(forward_ad.make_dual(logits, direction), labels)).tangent
    torch.testing.assert_close(forward * 6, (want * direction).sum(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("method", DETERMINISTIC)
def test_hessians_by_torch_func(method):
    logits, labels = random_batch(3, 6)
    loss = make_loss(method, p_k_of(method, 3), 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = torch.func.vmap(torch.func.hessian(loss))(logits, labels)  # forward over backward
    want = [torch.autograd.functional.hessian(partial(loss, labels=label), row) for row, label in zip(logits, labels)]
    torch.testing.assert_close(got, torch.stack(want), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("method", DETERMINISTIC)
def test_can_be_exported_and_a_fake_call_leaves_nothing_behind(method):
    logits, labels = random_batch(dtype=torch.float32)
    loss = make_loss(method, None, 12, 8)
    want = loss(logits, labels)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert loss(mode.from_tensor(logits), mode.from_tensor(labels)).shape == ()
    assert torch.equal(loss(logits, labels), want)
    assert torch.equal(make_loss(method, None, 12, 8)(logits, labels), want)
    program = torch.export.export(loss, (logits, labels)).module()
    torch.testing.assert_close(program(logits * 2, labels), loss(logits * 2, labels), rtol=1e-4, atol=1e-5)


# Devices, without one. Tensors on "meta" have no numbers: an .item() or a branch on one raises, where a GPU would have
# to be waited for. A step that copies from the host, or binds a tensor anew that the next step reads, would be captured
# in a CUDA graph with the values of that step.


class Crossings(TorchDispatchMode):
    """Notes the operations whose tensors lie on several devices."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        devices = {each.device.type for each in tree_leaves((args, kwargs, result)) if isinstance(each, torch.Tensor)}
        if len(devices) > 1:
            self.found.append(func.overloadpacket.__name__)
        return result


def tensors_of(module, path=""):
    """The tensors that a module and what it holds are bound to, by name."""
    for name, value in vars(module).items():
        if isinstance(value, torch.Tensor):
            yield f"{path}.{name}", value
        elif isinstance(value, torch.nn.Module):
            yield from tensors_of(value, f"{path}.{name}")
        elif name == "_modules":
            for child, each in value.items():
                yield from tensors_of(each, f"{path}.{child}")


AUTO = [(method, None, "auto") for method, spec in METHODS.items() if spec.spread is not None]


@pytest.mark.parametrize(("method", "m", "beta"), [*((*case, None) for case in WITH_M), *AUTO])
def test_a_second_step_reads_no_number_copies_nothing_and_binds_nothing_anew(method, m, beta, monkeypatch):
    monkeypatch.setenv(VARIABLE, "torch")
    with torch.device("meta"):  # constants are made on the CPU, whatever the default is
        loss = make_loss(method, p_k_of(method), 20, m, beta)
    if method == "imbalanced_noised_topk":
        loss.class_counts = torch.ones(20, dtype=torch.int64)
    loss.to("meta")
    logits = torch.empty(8, 20, device="meta", requires_grad=True)
    labels = torch.empty(8, dtype=torch.int64, device="meta")
    loss(logits, labels).backward()
    before = dict(tensors_of(loss))
    with Crossings() as crossings:
        loss(logits, labels).backward()
    assert crossings.found == []
    after = dict(tensors_of(loss))
    assert {name for name, tensor in after.items() if before.get(name) is not tensor} == set()
    loss(logits, torch.empty(8, 20, device="meta")).backward()
    if method in RELAXATIONS:
        loss(logits, labels, p_k=torch.empty(8, 5, device="meta")).backward()
    assert logits.grad.shape == (8, 20)
