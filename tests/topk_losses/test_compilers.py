"""torch.compile, torch.export, torch.func and devices where no number can be read."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacrev, jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.methods import DETERMINISTIC, FOLLOW, LEARNABLE, p_k_of, random_batch, value_and_gradient, with_backends
from topk_losses import METHODS, RELAXATIONS, make_loss
from topk_losses.kernels import VARIABLE

WITH_M = [(method, None) for method in METHODS] + [(method, 8) for method in RELAXATIONS]


# With labels every method is exported below; here each with a kernel of its own is compiled with its gradient, and one
# without.
COMPILED = ["splitter_selection", "odd_even", "smooth_topk", "softmax_cross_entropy"]
ONE_GRAPH = [(method, "labels") for method in COMPILED] + [(method, "soft") for method in METHODS]


@pytest.mark.parametrize(("method", "kind"), ONE_GRAPH)
def test_one_graph_serves_all_batch_sizes(method, kind):
    """In float32 by the kernels, where there are some; in float64, smoothed, with a learned temperature."""
    labels_only = kind == "labels"
    m = None
    settings = {}
    n = 7  # few, since each layer of a network is traced
    if not labels_only:
        n = 9  # with fewer classes, eager PyTorch would draw noise for each class by itself
        settings["label_smoothing"] = 0.1
        m = 5 if method in RELAXATIONS else None
        if method in LEARNABLE:
            settings["inverse_temperature"] = nn.Parameter(torch.tensor(0.7))
    loss = make_loss(method, p_k_of(method, 3), None, m, **settings)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager" if labels_only else "eager")
        for batch in (3, 4, 13, 22):
            logits, target = random_batch(batch, n, dtype=torch.float32 if labels_only else torch.float64)
            if not labels_only:
                target = random_batch(batch, n, seed=1)[0].softmax(1)
            results = []
            for call in (loss, compiled):
                torch.manual_seed(0)
                leaf = logits.clone().requires_grad_()
                value = call(leaf, target)
                wanted = [leaf, *loss.parameters()]
                results.append((value.detach(), *torch.autograd.grad(value, wanted)))
            torch.testing.assert_close(*results, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_can_be_exported_with_a_dynamic_batch_and_its_gradient_and_leaves_nothing_behind(method):
    logits, labels = random_batch(dtype=torch.float32)
    # Sizes that no other test takes.
    loss = make_loss(method, None, 12, 7)
    other = make_loss(method, None, 12, 9)
    batch = torch.export.Dim("batch", min=2, max=1024)
    program = torch.export.export(loss, (logits, labels), dynamic_shapes=({0: batch}, {0: batch})).module()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert other(mode.from_tensor(logits), mode.from_tensor(labels)).shape == ()
    assert float(other(logits, labels)) > 0
    for size in (5, 65):
        others = random_batch(size, dtype=torch.float32)
        got = value_and_gradient(program, *others)
        want = value_and_gradient(loss, *others)
        if method in DETERMINISTIC:
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("m", [None, 8])
@pytest.mark.parametrize(("method", "backend"), with_backends((method,) for method in DETERMINISTIC))
def test_gradients_of_each_sample_by_torch_func(method, m, backend, monkeypatch):
    monkeypatch.setenv(VARIABLE, backend)
    logits, labels = random_batch(dtype=torch.float32)
    loss = make_loss(method, None, 12, m)
    _, want = value_and_gradient(make_loss(method, None, 12, m, reduction="sum"), logits, labels)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of functions that vmap takes row by row
        gradients = vmap(grad(loss))(logits, labels)
    torch.testing.assert_close(gradients, want, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(grad(loss)(logits, labels) * 6, want, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("rows", "n", "m"), [(6, 12, None), (20, 300, 12)])  # the second: worked out in parts
@pytest.mark.parametrize("method", DETERMINISTIC)
def test_torch_func_may_transform_labels_or_p_k_alone(method, rows, n, m):
    """The logits are then an ordinary tensor, which a kernel would take."""
    logits, labels = random_batch(rows, n, dtype=torch.float32)
    soft, p_k = (random_batch(2 * rows, k, dtype=torch.float32)[0].view(2, rows, k).softmax(2) for k in (n, 3))
    for smoothing in (0.0, 0.1):
        loss = make_loss(method, None, n, m, label_smoothing=smoothing)
        want = torch.stack([loss(logits, target) for target in soft])
        torch.testing.assert_close(vmap(loss, (None, 0))(logits, soft), want)
        if method in RELAXATIONS:
            want = torch.stack([loss(logits, labels, share) for share in p_k])
            torch.testing.assert_close(vmap(loss, (None, None, 0))(logits, labels, p_k), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", DETERMINISTIC)
def test_hessians_by_reverse_mode(method):
    logits, labels = random_batch(3, 6)
    loss = make_loss(method, p_k_of(method, 3), 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = vmap(jacrev(jacrev(loss)))(logits, labels)
    want = [torch.autograd.functional.hessian(partial(loss, labels=label), row) for row, label in zip(logits, labels)]
    torch.testing.assert_close(got, torch.stack(want), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("method", METHODS)
def test_forward_mode_is_refused_with_the_way_out(method):
    logits, labels = random_batch(3, 6, dtype=torch.float32)
    loss = make_loss(method, p_k_of(method, 3), 6)
    call = partial(loss, labels=labels)
    calls = [lambda: jvp(call, (logits,), (logits,)), lambda: hessian(call)(logits)]
    calls += [lambda: torch.compile(lambda s: jvp(call, (s,), (s,))[1], backend="aot_eager")(logits)]
    for refused in calls:
        torch._dynamo.reset()
        with pytest.raises(Exception, match=r"(?s)no forward-mode derivatives.*jacrev"):
            refused()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
        loss(forward_ad.make_dual(logits, logits), labels)


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
        devices = {leaf.device.type for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)}
        if len(devices) > 1:
            self.found.append(func.overloadpacket.__name__)
        return result


def tensors_of(module):
    """The tensors that a loss is bound to, by name."""
    return dict(module.named_buffers())


@pytest.mark.parametrize(
    ("method", "m", "beta"), [*((*case, None) for case in WITH_M), *((method, None, "auto") for method in FOLLOW)]
)
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
    before = tensors_of(loss)
    with Crossings() as crossings:
        loss(logits, labels).backward()
    assert crossings.found == []
    after = tensors_of(loss)
    assert {name for name, tensor in after.items() if before.get(name) is not tensor} == set()
    loss(logits, torch.empty(8, 20, device="meta")).backward()
    if method in RELAXATIONS:
        loss(logits, labels, p_k=torch.empty(8, 5, device="meta")).backward()
    assert logits.grad.shape == (8, 20)
