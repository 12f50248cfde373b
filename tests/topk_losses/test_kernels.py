"""The kernels against eager PyTorch in float64: Numba's, and Triton's on a CUDA device or in its interpreter."""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests import reference
from tests.methods import WITH_KERNELS, p_k_of, random_batch, value_and_gradient
from tests.reference import NETWORKS
from topk_losses import DISTRIBUTIONS, METHODS, bitonic, make_loss, splitter_selection
from topk_losses.kernels import VARIABLE, backend_for, find_kernel
from topk_losses.networks import carry_mass
from topk_losses.smooth_svm import kth_largest
from topk_losses.transport import sinkhorn

# The interpreter computes with NumPy, which warns of an infinity on the way where a GPU is silent.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
CLOSE = 1e-3  # relative to the largest of a row
EAGER = {"carry_mass": carry_mass, "kth_largest": kth_largest, "sinkhorn": sinkhorn}
NAN = float("nan")
INF = float("inf")


@pytest.fixture(scope="module", params=["numba", "triton"])
def backend(request):
    """Let one backend compute; Triton on a GPU, or in its interpreter if this process began with TRITON_INTERPRET=1."""
    pytest.importorskip(request.param)
    if request.param == "triton" and not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"):
        pytest.skip("the interpreter has a process of its own")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, request.param)
        yield request.param


@pytest.mark.skipif(torch.cuda.is_available() or "TRITON_INTERPRET" in os.environ, reason="Triton runs here itself")
def test_the_interpreter_passes_these_tests():
    """Triton chooses between compiler and interpreter when it is imported."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", __file__, "-k", "[triton or -triton", "-p", "no:cacheprovider"]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout


@pytest.fixture
def device(backend):
    return "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"


numba_alone = pytest.mark.parametrize("backend", ["numba"], indirect=True)


def settings_of(network, beta, distribution, art_lambda=None, device="cpu"):
    """The arguments of carry_mass behind scores and target; art_lambda: default 0.5 for logistic_phi."""
    art_lambda = 0.5 if distribution == "logistic_phi" and art_lambda is None else art_lambda
    layers = network.pruned().layers
    wires = [[pair[side] for layer in layers for pair in layer] for side in (1, 0)]  # those of hi, those of lo
    comparators = torch.tensor(wires, device=device)
    sizes = [len(layer) for layer in layers]
    return torch.tensor(beta, device=device), comparators, sizes, network.k, distribution, art_lambda


def closest(scores: Tensor, network, beta, distribution, art_lambda) -> Tensor:
    """How close two unmasked values come anywhere in the network, relative to the largest: (batch,) float64."""
    x = (scores - scores.amax(1, keepdim=True)).double()
    size = x.masked_fill(x == -INF, 0).abs().amax(1)
    found = torch.full((len(x),), INF, dtype=torch.float64)
    for layer in network.pruned().layers:
        lo, hi = torch.tensor(layer).T
        d = x[:, hi] - x[:, lo]
        unmasked = d.isfinite()
        found = torch.minimum(found, d.abs().masked_fill(~unmasked, INF).amin(1))
        alpha = reference.sigmoid_family(distribution, beta * d, d, beta, art_lambda)
        mixed = alpha * x[:, hi] + (1 - alpha) * x[:, lo], alpha * x[:, lo] + (1 - alpha) * x[:, hi]
        hard = torch.maximum(x[:, hi], x[:, lo]), torch.minimum(x[:, hi], x[:, lo])
        x[:, hi] = torch.where(unmasked, mixed[0], hard[0])
        x[:, lo] = torch.where(unmasked, mixed[1], hard[1])
    return found / size.clamp(min=torch.finfo(torch.float64).tiny)


def arguments_of(operation, n, k=3, device="cpu"):
    """Arguments of an operation behind scores (batch, n) and labels."""
    return {
        "carry_mass": settings_of(splitter_selection(n, k), 1.0, "logistic", device=device),
        "kth_largest": ([1, k], torch.tensor(0.5)),
        "sinkhorn": (torch.tensor(20.0), k, 2e-5, 30),
    }[operation]


def weighted(operation, scores, target, *arguments, results=1):
    """The results side by side (batch, ...), weighted, and the gradient of their sum; by the kernel in float32."""
    run = find_kernel(operation, scores) or EAGER[operation]
    assert (run is EAGER[operation]) == (scores.dtype == torch.float64)

    def compute(leaf: Tensor) -> Tensor:
        found = torch.cat(run(leaf, target, *arguments)[:results], dim=1)
        return found * torch.linspace(1, -0.4, found.shape[1]).to(found)

    return value_and_gradient(compute, scores)


def assert_network_agrees(scores, target, arguments, value=5e-6, gradient=1e-5, relative=1e-5, least=1e-12):
    """value, gradient: allowed errors, the gradient's relative to the largest."""
    got, got_gradient = weighted("carry_mass", scores, target, *arguments)
    want, want_gradient = weighted("carry_mass", scores.double(), target, *arguments)
    assert got.dtype == got_gradient.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=relative, atol=value)
    size = float(want_gradient.abs().max()) if want_gradient.numel() else 0.0
    torch.testing.assert_close(got_gradient.double(), want_gradient, rtol=relative, atol=gradient * size + least)
    assert not bool(got_gradient[scores == -INF].any())


def test_networks_agree_with_float64(backend, device):
    """Any size and scale, ties, masked classes, labels and masses, an empty batch."""

    @settings(max_examples=80 if backend == "numba" else 12, deadline=None, phases=[Phase.generate])
    @given(st.integers(1, 40) | st.integers(41, 70), st.data())
    def agree(n, data):
        k = data.draw(st.integers(1, min(n, 8)))
        batch = data.draw(st.sampled_from([0, 1, 2, 63, 64, 65, 130]))
        batch = batch if backend == "numba" else min(batch, 3)
        scale = data.draw(st.sampled_from([1e-4, 1e-2, 1.0, 10.0, 1e4]))
        scores, target = random_batch(batch, n, scale, torch.float32, data.draw(st.integers(0, 10**6)))
        if data.draw(st.booleans(), "ties"):
            scores = scores.bfloat16().float()
        if data.draw(st.booleans(), "masked"):
            scores[:, : n // 3] = -INF
        if data.draw(st.booleans(), "a mass"):
            target = random_batch(batch, n, dtype=torch.float32)[0].softmax(1)
        distribution, beta = data.draw(
            st.tuples(st.sampled_from(list(DISTRIBUTIONS)), st.sampled_from([0.1, 0.5, 4.0]))
        )
        network = NETWORKS[data.draw(st.sampled_from(list(NETWORKS)))](n, k)
        if not any(network.layers):
            return
        if distribution == "logistic_phi":
            # Near a tie ART's slope is that of a root, of which float32 has no digits; ties have tests of their own.
            apart = closest(scores, network, beta, distribution, 0.5) > CLOSE
            scores = scores[apart]
            target = target[apart]
        # The rounding of the scores moves each swap by beta times as much.
        slack = 20 * torch.finfo(torch.float32).eps * beta * max(scale, 1)
        errors = 1e-5 + 4 * slack, 1e-3, 1e-3, beta * (slack + 1e-6)
        arguments = settings_of(network, beta, distribution, device=device)
        assert_network_agrees(scores.to(device), target.to(device), arguments, *errors)

    agree()


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_sigmoids_keep_their_tails(distribution, device):
    """Of two classes the lower one has rank 1 with the mixed share itself."""
    apart = torch.cat([torch.linspace(0, 12, 200), torch.logspace(-6, 18, 100)])
    if distribution == "gaussian":
        apart = apart.clamp(max=12)  # where float32 ends
    scores = torch.stack([-apart, torch.zeros(300)], dim=1)
    labels = torch.zeros(300, dtype=torch.int64)
    beta = 100.0 if distribution == "cauchy" else 1.0  # whose square, with that of a distance, is no float32 number
    for art_lambda in (0.1, 0.5, 0.75) if distribution == "logistic_phi" else (None,):
        relative = 1e-3 if art_lambda in (0.1, 0.75) else 2e-5  # powers by way of logarithms
        arguments = settings_of(bitonic(2, 1), beta, distribution, art_lambda, device)
        assert_network_agrees(scores.to(device), labels.to(device), arguments, 1e-37, 1e-37, relative)


def test_networks_of_huge_scores_and_wide_layers(device):
    labels = torch.zeros(1, dtype=torch.int64, device=device)
    wide = splitter_selection(2100, 1)  # a layer wider than a tile
    assert max(map(len, wide.layers)) > 1024
    scores = torch.randn(2100, 2, generator=torch.Generator().manual_seed(4)).T.to(device)  # not contiguous
    arguments = settings_of(wide, 1.0, "logistic", device=device)
    assert_network_agrees(scores, scores.argmax(1), arguments, 1e-5, 1e-4)
    huge = weighted("carry_mass", 1e30 * scores, labels.repeat(2), *arguments)
    assert bool(torch.cat(huge, dim=1).isfinite().all())


# One sample each: apart, ties, all equal, an offset, few live classes, one, none, and those that NaN or inf spoils.
ROWS = [[1, 2.5, -1, 0.3, 2, 0], [1, 2, 2, 2, 2, -1], [0.3] * 6, [300, 299.3, 1, -1, -2, -3], [1, 0.2, *[-INF] * 4]]
ROWS += [[-INF, 0, *[-INF] * 4], [-INF] * 6, [NAN, 1, 2, 3, 4, 5], [INF, 1, 2, 3, 4, 5]]
LABELS = torch.tensor([3, 0, 5, 1, 0, 1, 2, 1, 1])


@pytest.mark.parametrize("operation", EAGER)
def test_a_spoilt_sample_leaves_the_others_alone(operation, backend, device):
    scores = torch.tensor(ROWS).to(device)
    labels = LABELS.to(device)
    if find_kernel(operation, scores) is None:
        pytest.skip("Triton has networks alone")
    arguments = arguments_of(operation, 6, device=device)
    live = 4 if operation == "sinkhorn" else 7  # which masks classes in another way
    if operation == "sinkhorn":
        scores = torch.where(scores == INF, NAN, scores.sigmoid())
    got = weighted(operation, scores, labels, *arguments)
    want = weighted(operation, scores[:live].double(), labels[:live], *arguments)
    for part, wanted in zip(got, want):
        torch.testing.assert_close(part[:live].double(), wanted, rtol=1e-4, atol=1e-4, equal_nan=True)
    spoilt = (
        got[0][7:] if operation != "kth_largest" else find_kernel(operation, scores)(scores, labels, *arguments)[2][7:]
    )
    assert not bool((spoilt[:, :1] < INF).any())


@numba_alone
@settings(max_examples=60, deadline=None, phases=[Phase.generate])
@given(st.integers(2, 30) | st.integers(100, 400), st.sampled_from([1e-4, 1.0, 1e2, 1e4]), st.data())
def test_the_smooth_kth_largest_agrees_with_float64(backend, n, scale, data):
    scores, labels = random_batch(data.draw(st.sampled_from([0, 1, 5, 40])), n, scale, torch.float32, n)
    # All but the class of label 0 and two others.
    scores[:1, min(3, n - 1) :] = -INF
    labels[:1] = 0
    if data.draw(st.booleans(), "ties"):
        scores = scores.bfloat16().float()
    ks = sorted(data.draw(st.sets(st.integers(1, min(n - 1, 70)), min_size=1, max_size=3)))
    tau = torch.tensor(data.draw(st.sampled_from([0.05, 0.5, 5.0])))
    outputs = [(find_kernel("kth_largest", x) or kth_largest)(x, labels, ks, tau) for x in (scores, scores.double())]
    slack = 2e-5 * (1 + scale / 10)
    for got, want in zip(*(found[:2] for found in outputs)):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=slack)
    proper = scores[1:].contiguous()  # the first has too few others: no gradient
    untied = scale == 1 and not bool((proper == proper.bfloat16().float()).all())  # or ties fall either way
    for results in (1, 2) if untied else (1,):
        pair = [weighted("kth_largest", x, labels[1:], ks, tau, results=results) for x in (proper, proper.double())]
        torch.testing.assert_close(pair[0][1].double(), pair[1][1], rtol=1e-4, atol=1e-4)


@numba_alone
@pytest.mark.parametrize(("n", "beta"), [(1, 100.0), (2, 5.0), (11, 100.0), (33, 30.0)])
def test_sinkhorn_agrees_with_float64_on_live_classes(backend, n, beta):
    generator = torch.Generator().manual_seed(n)
    x = torch.rand(6, n, generator=generator)
    labels = torch.arange(6) % n
    x[1] = x[1].round(decimals=1)
    x[2] = 0.5
    masked = torch.rand(6, n, generator=generator) < torch.tensor([0, 0, 0, 0.3, 0.7, 0.7]).unsqueeze(1)
    masked = masked.scatter(1, labels.unsqueeze(1), False)
    masked[5, labels[5]] = True  # the labelled class itself
    scores = x.masked_fill(masked, -1)
    arguments = (torch.tensor(beta), min(n, 5), 2e-5, 30)
    assert bool((find_kernel("sinkhorn", x)(scores, labels, *arguments)[1] <= 2e-5).all())
    got, gradient = weighted("sinkhorn", scores, labels, *arguments)
    assert not bool(gradient[masked].any() | got[5].any() | gradient[5].any())
    want, want_gradient = weighted("sinkhorn", scores[:5].double(), labels[:5], *arguments[:2], 1e-9, 30)
    torch.testing.assert_close(got[:5].double(), want, rtol=1e-4, atol=3e-5)
    slack = 2e-3 * (want_gradient.abs().amax(1, keepdim=True) + 1e-3)
    assert bool(((gradient[:5] - want_gradient).abs() <= 1e-3 * want_gradient.abs() + slack).all())


@pytest.mark.parametrize("operation", EAGER)
def test_second_derivatives_are_those_of_float64_under_autocast_too(operation, backend, device):
    scores = torch.rand(2, 9, device=device)
    labels = torch.tensor([3, 8], device=device)
    arguments = arguments_of(operation, 9, device=device)
    results = []
    if find_kernel(operation, scores) is None:
        pytest.skip("Triton has networks alone")
    for leaf in (scores.clone().requires_grad_(), scores.double().requires_grad_()):
        value = (find_kernel(operation, leaf) or EAGER[operation])(leaf, labels, *arguments)[0]
        with torch.autocast(device, torch.bfloat16, enabled=leaf.dtype == torch.float32):
            (first,) = torch.autograd.grad(value.square().sum(), leaf, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), leaf)[0].double())
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4 * float(results[1].abs().max()))


@numba_alone
@pytest.mark.parametrize("operation", EAGER)
def test_an_exported_kernel_takes_any_batch_size_and_keeps_the_rules_of_custom_operators(operation, backend):
    arguments = arguments_of(operation, 9)
    module = torch.nn.Module()
    batch = {0: torch.export.Dim("batch", min=2)}
    module.forward = lambda scores, labels: find_kernel(operation, scores)(scores, labels, *arguments)[0].square().sum()
    scores = torch.rand(200, 9)
    labels = torch.arange(200) % 9
    program = torch.export.export(module, (scores, labels), dynamic_shapes=[batch, batch])
    operator = getattr(torch.ops.topk_losses, f"{operation}_cpu")
    assert [node.target for node in program.graph.nodes].count(operator.default) == 1
    for size in (2, *range(62, 67), 128):
        inputs = scores[:size], labels[:size]
        torch.testing.assert_close(program.module()(*inputs), module.forward(*inputs))
    utilities = "test_schema", "test_faketensor", "test_autograd_registration"  # others compare unwritten room
    inputs = scores[:9].clone().requires_grad_(), labels[:9], *arguments
    torch.library.opcheck(operator, inputs, test_utils=utilities)


# Which kernel is taken.


def test_a_backend_that_cannot_run_is_refused_with_the_way_out(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    interpreter = "needs tensors on cuda, got cpu; unset it, or set TRITON_INTERPRET=1"
    refused = [("triton", "cpu", interpreter), ("numba", "meta", "needs tensors on cpu, got meta")]
    for name, device, message in [*refused, ("cuda", "cpu", "must be torch, numba or triton")]:
        monkeypatch.setenv(VARIABLE, name)
        with pytest.raises(ValueError, match=message):
            backend_for(torch.device(device))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("topk_losses.kernels.is_importable", lambda package: False)
    for name in ("triton", "numba"):
        monkeypatch.setenv(VARIABLE, name)
        with pytest.raises(ValueError, match=f"needs the package {name}"):
            backend_for(torch.device("cpu"))


@pytest.mark.parametrize("installed", [True, False])
def test_the_default_backend_of_a_device(installed, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr("topk_losses.kernels.is_importable", lambda package: installed)
    for capability, wanted in (((7, 5), "torch"), ((8, 0), "triton"), ((12, 0), "triton")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert backend_for(torch.device("cuda")) == (wanted if installed else "torch")
    assert backend_for(torch.device("cpu")) == ("numba" if installed else "torch")
    assert backend_for(torch.device("mps")) == "torch"


def test_the_methods_with_kernels_are_those_that_tests_run_with_two_backends(monkeypatch):
    """One that is not named there would never be tested with its kernel."""
    asked = []
    monkeypatch.setattr("topk_losses.kernels.load_kernel", lambda operation, device: asked.append(operation) or "")
    found = set()
    for method in METHODS:
        asked.clear()
        make_loss(method, p_k_of(method, 3))(*random_batch(dtype=torch.float32))
        if asked:
            found.add(method)
    assert found == WITH_KERNELS


@numba_alone
@pytest.mark.parametrize("operation", EAGER)
def test_kernels_take_float32_and_no_setting_that_is_learned(operation, backend, monkeypatch):
    kernel = partial(find_kernel, operation)
    scores = torch.rand(1, 2)
    assert kernel(scores, torch.ones(())) is not None
    assert kernel(scores.double()) is None
    assert kernel(scores, torch.ones((), requires_grad=True)) is None
    assert torch.vmap(lambda row: row * (kernel(row) is None))(scores).all()
    monkeypatch.setenv(VARIABLE, "torch")
    assert kernel(scores) is None
