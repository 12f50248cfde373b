"""The Triton kernels against PyTorch's operations in float64.

On a CUDA device where there is one; elsewhere in Triton's interpreter, on the CPU.
"""

import copy
import importlib
import importlib.metadata
import pickle
import sys
from contextlib import ExitStack

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.topk_losses.test_kernels import MASKS, arguments_and_gradient, check_kth_largest, check_masks
from topk_losses import (
    DISTRIBUTIONS,
    RelaxedNetwork,
    TopKCrossEntropyLoss,
    bitonic,
    make_loss,
    odd_even,
    splitter_selection,
)
from topk_losses.kernels import TABLE, UNSEEN, VARIABLE, device_of_kernels, kernel
from topk_losses.transport import SinkhornSort, sinkhorn

triton = pytest.importorskip("triton", reason="Triton is not installed")


def version(package):
    return tuple(map(int, importlib.metadata.version(package).split(".")[:2]))


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and version("triton") < (3, 7) and version("numpy") >= (2, 4):
    pytest.skip("the interpreter of Triton before 3.7 needs NumPy before 2.4", allow_module_level=True)
# The interpreter computes with NumPy, which warns of an infinity on the way where a GPU is silent.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
NETWORKS = {"odd_even": odd_even, "bitonic": bitonic, "splitter": splitter_selection}


def restore(kept):
    """Give modules and classes the attributes that they had: pairs of one and its dictionary."""
    for of, before in kept:
        for name in [name for name in vars(of) if name not in before]:
            delattr(of, name)
        for name, value in before.items():
            if vars(of)[name] is not value:
                setattr(of, name, value)


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """The modules of the kernels, interpreted without a CUDA device, for this file's tests only."""
    names = [f"topk_losses.kernels.{name}" for name in ("cuda", "cuda_masks", "cuda_sinkhorn", "cuda_smooth")]
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "triton")
        if DEVICE == "cpu":
            patch.setenv("TRITON_INTERPRET", "1")
            language, core, math, standard = (
                importlib.import_module(f"triton.language{name}") for name in ("", ".core", ".math", ".standard")
            )
            # The interpreter does not put back what it has changed for functions that kernels call.
            changed = (
                language,
                core,
                math,
                standard,
                core.tensor,
                core.condition,
                core.dtype,
                core.tensor_descriptor_base,
            )
            stack.callback(restore, [(each, dict(vars(each))) for each in changed])
            for name, function in list(vars(standard).items()):  # tl.sum and others, which are Triton code themselves
                if isinstance(function, triton.JITFunction):
                    interpreted = triton.jit(function.fn)
                    setattr(standard, name, interpreted)
                    setattr(language, name, interpreted)
        for name in names:
            patch.delitem(sys.modules, name, raising=False)
        networks, *_ = [importlib.import_module(name) for name in names]
        yield networks
        for name in names:
            sys.modules.pop(name, None)  # it may stand there anew


def column_and_gradients(column, scores, labels):
    """The column (batch, k), and the gradient of its weighted sum by the scores."""
    leaf = scores.clone().requires_grad_()
    value = column(leaf, labels)
    weights = torch.linspace(1, -0.4, value.shape[1], device=value.device, dtype=value.dtype)
    return [value.detach(), *torch.autograd.grad((value * weights).sum(), leaf)]


def assert_agrees_with_float64(network, scores, labels, value=2e-6, gradient=2e-6, relative=1e-5):
    """value, gradient: allowed errors, the gradient's relative to the largest."""
    network, scores, labels = network.to(DEVICE), scores.to(DEVICE), labels.to(DEVICE)
    got = column_and_gradients(network.rank_probabilities, scores, labels)
    exact_labels = labels.double() if labels.is_floating_point() else labels
    want = column_and_gradients(network.rank_probabilities, scores.double(), exact_labels)
    assert all(each.dtype == torch.float32 for each in got)
    torch.testing.assert_close(got[0].double(), want[0], rtol=relative, atol=value)
    for ours, exact in zip(got[1:], want[1:]):
        size = float(exact.abs().max()) if exact.numel() else 0.0
        torch.testing.assert_close(ours.double(), exact, rtol=relative, atol=gradient * size + 1e-12)


def assorted_scores(n):
    """(6, n): apart, with ties, all equal, with an offset, with classes that take no part, with but one that does."""
    scores = 2 * torch.randn(6, n, generator=torch.Generator().manual_seed(0))
    scores[1] = scores[1].round()
    scores[2] = 1.3
    scores[3] = scores[3].round() / 4 + 16
    scores[4, 1::3] = -torch.inf
    scores[5, 1:] = -torch.inf
    return scores


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("name", NETWORKS)
def test_values_and_gradients_are_those_of_float64(name, distribution):
    network, scores = RelaxedNetwork(NETWORKS[name](11, 4), 1.5, distribution), assorted_scores(11)
    mass = torch.rand(6, 11, generator=torch.Generator().manual_seed(1))
    # the slope of ART magnifies the rounding of a small difference
    gradient = 1e-3 if distribution == "logistic_phi" else 1e-5
    for labels in (torch.tensor([0, 3, 5, 1, 7, 0]), mass):
        assert_agrees_with_float64(network, scores, labels, value=5e-6, gradient=gradient)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_sigmoids_keep_their_tails(distribution):
    """Of two classes the lower one has rank 1 with the mixed share itself."""
    apart = torch.cat([torch.linspace(0, 12, 200), torch.logspace(-6, 18, 100)])
    if distribution == "gaussian":
        apart = apart.clamp(max=12)  # where float32 ends
    scores, labels = torch.stack([-apart, torch.zeros(300)], dim=1), torch.zeros(300, dtype=torch.int64)
    art_lambda = 0.4 if distribution == "logistic_phi" else None
    network = RelaxedNetwork(bitonic(2, 1), 1.0, distribution, art_lambda)
    assert_agrees_with_float64(network, scores, labels, value=1e-37, gradient=1e-37, relative=2e-5)


def test_scores_that_rounding_parts_are_equal():
    """Of a size of 1000: less their maximum they are a few 1e-4 apart, where ART is steep."""
    network, labels = RelaxedNetwork(bitonic(2, 1), 1.0).to(DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    scores = torch.tensor([[1e3, 1e3]], device=DEVICE)
    near = scores + torch.tensor([[3e-4, 0]], device=DEVICE)
    assert not torch.equal(near, scores)
    pair = [column_and_gradients(network.rank_probabilities, each, labels) for each in (near, scores)]
    torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_tiny_and_huge_scores(distribution):
    orders = [torch.randperm(16, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    scores = (torch.stack(orders) - 8.0) / 4
    network = RelaxedNetwork(splitter_selection(16, 5), 1.0, distribution)
    assert_agrees_with_float64(network, 1e-4 * scores, torch.arange(6), gradient=1e-3)
    # float32 holds scores of 1e4 to 1e-3, and each layer rounds them
    assert_agrees_with_float64(network, 1e4 * scores, torch.arange(6), value=1e-3, gradient=1e-2)
    got = column_and_gradients(network.rank_probabilities, (1e30 * scores).to(DEVICE), torch.arange(6, device=DEVICE))
    assert all(bool(each.isfinite().all()) for each in got)


@pytest.mark.parametrize("name", NETWORKS)
def test_layers_wider_than_a_tile(kernels, monkeypatch, name):
    """As those of 10450 scores are; and a batch of several programs."""
    monkeypatch.setattr(kernels, "WIDEST", 4)
    scores = torch.randn(19, 22, generator=torch.Generator().manual_seed(2))
    assert_agrees_with_float64(RelaxedNetwork(NETWORKS[name](22, 3), 1.0), scores, torch.arange(19), gradient=1e-4)


@pytest.mark.parametrize(("n", "batch"), [(1, 3), (2, 1), (3, 35), (5, 0)])
def test_the_smallest_sizes(n, batch):
    scores = torch.randn(batch, n, generator=torch.Generator().manual_seed(3))
    assert_agrees_with_float64(RelaxedNetwork(splitter_selection(n, n), 1.0), scores, torch.arange(batch) % n)


def test_a_real_network_from_rows_that_are_not_contiguous():
    scores = torch.randn(1000, 2, generator=torch.Generator().manual_seed(4)).T
    labels = scores.argsort(1, descending=True)[:, :2].flatten()[::2]
    assert_agrees_with_float64(
        RelaxedNetwork(splitter_selection(1000, 5), 1.0), scores, labels, value=1e-5, gradient=1e-3
    )


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_nan_stays_in_its_sample(distribution):
    network = RelaxedNetwork(splitter_selection(9, 3), 2.0, distribution).to(DEVICE)
    clean = torch.randn(4, 9, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    labels = torch.arange(4, device=DEVICE)
    want = column_and_gradients(network.rank_probabilities, clean, labels)
    for bad in (float("nan"), float("inf")):
        scores = clean.clone()
        scores[1, 5] = bad
        got = column_and_gradients(network.rank_probabilities, scores, labels)
        assert bool(got[0][1].isnan().all())
        assert all(torch.equal(ours[[0, 2, 3]], exact[[0, 2, 3]]) for ours, exact in zip(got, want))


def test_second_derivatives_and_no_gradient():
    network = RelaxedNetwork(bitonic(7, 3), 1.0, "cauchy").to(DEVICE)
    scores = torch.randn(3, 7, generator=torch.Generator().manual_seed(6)).to(DEVICE)
    mass = torch.rand(3, 7, generator=torch.Generator().manual_seed(7)).to(DEVICE)
    results = []
    for column, dtype in ((network.rank_probabilities, torch.float32), (network.rank_probabilities, torch.float64)):
        leaves = [scores.to(dtype).requires_grad_()]
        value = column(*leaves, mass.to(dtype))
        first = torch.autograd.grad(value.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(each.square().sum() for each in first), leaves)
        results.append([each.detach().double() for each in (value, *first, *second)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(network.rank_probabilities(scores, mass).double(), results[0][0])


def test_another_number_of_scores_is_refused(monkeypatch):
    network = RelaxedNetwork(bitonic(30, 3), 1.0).to(DEVICE)
    for backend in ("triton", ""):
        monkeypatch.setenv(VARIABLE, backend)
        with pytest.raises(ValueError, match="built for n=30 scores, got 10"):
            network.rank_probabilities(torch.zeros(2, 10, device=DEVICE), torch.zeros(2, dtype=int, device=DEVICE))


def test_the_loss_of_copies_in_half_precision_is_that_of_pytorch(monkeypatch):
    loss = TopKCrossEntropyLoss("splitter_selection", [0.5, 0, 0.5], 12).to(DEVICE)
    logits = torch.randn(5, 12, generator=torch.Generator().manual_seed(8)).to(DEVICE, torch.bfloat16)
    labels, results = torch.tensor([0, 3, 7, 11, 5], device=DEVICE), []
    used = loss(logits, labels)  # a network that has been on its device
    for backend, copied in (
        ("triton", pickle.loads(pickle.dumps(loss))),
        ("triton", copy.deepcopy(loss)),
        ("torch", loss),
    ):
        monkeypatch.setenv(VARIABLE, backend)
        leaf = logits.clone().requires_grad_()
        with torch.autocast(DEVICE, torch.bfloat16):
            value = copied(leaf, labels)
        results.append((value.detach(), *torch.autograd.grad(value, leaf)))
        torch.testing.assert_close(results[-1][0], used)
    torch.testing.assert_close(results[0], results[2])
    torch.testing.assert_close(results[1], results[2])


def test_a_backend_that_cannot_run_is_refused_with_the_way_out(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"needs tensors on cuda, got cpu; unset it, or set TRITON_INTERPRET=1"):
        device_of_kernels(cpu)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert device_of_kernels(cpu) == "cuda"
    monkeypatch.setattr("topk_losses.kernels.is_installed", lambda package: False)
    with pytest.raises(ValueError, match="needs the package triton"):
        device_of_kernels(cpu)


# Masks.


@pytest.mark.parametrize("name", [*MASKS, "df_topk"])
@given(st.integers(2, 40), st.data())
@settings(max_examples=12, deadline=None)
def test_masks_are_those_of_operations_in_float64(name, n, data):
    assert None not in (kernel("masks", torch.zeros(1, n)), kernel("middles", torch.zeros(1, n)))
    check_masks(name, n, data, [1, 3])


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_masks_of_ties_of_few_classes_of_gaps_and_of_spoilt_rows_are_those_of_the_cpu_s_kernel(
    name, softmax, monkeypatch
):
    """And with equal scores, and where the true class is one of those that take part, or is not."""
    nan, inf = float("nan"), float("inf")
    scores = torch.tensor(
        [
            [1, 2.2, 2.2, 2.2, 2.2, -1],
            [0.3] * 6,
            [300, 299.3, 0, -1, -2, -3],
            [1, 0.2, -inf, -inf, -inf, -inf],
            [-inf, 0, -inf, -inf, -inf, -inf],
            [-inf] * 6,
            [nan, 1, 2, 3, 4, 5],
            [inf, 1, 2, 3, 4, 5],
        ]
    )
    labels, results = torch.tensor([0, 3, 1, 0, 0, 2, 1, 1]), []
    for backend in ("triton", "numba"):
        monkeypatch.setenv(VARIABLE, backend)
        results.append(arguments_and_gradient(MASKS[name](3, 1.0), scores, labels, [1, 2, 3, 6], softmax))
    for ours, of_cpu in zip(*results):
        torch.testing.assert_close(ours, of_cpu, rtol=1e-5, atol=2e-6, equal_nan=True)


def test_masks_have_second_derivatives_and_more_classes_than_the_kernel_takes():
    scores, labels = torch.randn(2, 9, generator=torch.Generator().manual_seed(9)), torch.tensor([0, 4])
    results = []
    for dtype in (torch.float32, torch.float64):
        leaf = scores.to(dtype).requires_grad_()
        (first,) = torch.autograd.grad(TopKCrossEntropyLoss("lml", 3)(leaf, labels), leaf, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), leaf)[0].double())
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-6)
    assert kernel("masks", torch.zeros(1, UNSEEN["masks", "cuda"] + 1)) is None


# The smooth k-th largest score.


@given(st.integers(8, 30), st.sampled_from([1e-4, 1.0, 1e2, 1e4]), st.integers(0, 10**6))
@settings(max_examples=12, deadline=None)
def test_the_smooth_kth_largest_is_that_of_operations_in_float64(n, scale, seed):
    assert kernel("kth_largest", torch.zeros(1, n)) is not None
    check_kth_largest(n, scale, seed)


@pytest.mark.parametrize("method", ["smooth_topk", "smooth_hard_topk", "subset_topk"])
def test_losses_by_the_smooth_kth_largest_are_those_of_the_cpu_s_kernel(method, monkeypatch):
    """With NaN, inf, a dead true class, too few others, and all scores equal."""
    nan, inf = float("nan"), float("inf")
    rows = [[nan, 1, 2, 3, 4], [inf, 1, 2, 3, 4], [-inf, 1, 2, 3, 4], [1, 0.5, -inf, -inf, -inf], [0.3] * 5]
    loss, results = make_loss(method, [0, 0, 1], 5, reduction="none"), []
    for backend in ("triton", "numba"):
        monkeypatch.setenv(VARIABLE, backend)
        leaf = torch.tensor(rows, requires_grad=True)
        value = loss(leaf, torch.tensor([1, 1, 0, 0, 2]))
        results.append((value.detach(), torch.autograd.grad(value.sum(), leaf)[0]))
    for ours, of_cpu in zip(*results):
        torch.testing.assert_close(ours, of_cpu, equal_nan=True)


# SinkhornSort.


@pytest.mark.parametrize(("n", "beta"), [(1, 100.0), (2, 5.0), (11, 100.0), (33, 30.0)])
def test_the_plan_is_that_of_operations_in_float64(n, beta):
    x = torch.rand(5, n, generator=torch.Generator().manual_seed(n))
    x[1], x[2] = x[1].round(decimals=1), 0.5
    labels, k, results = torch.arange(5) % n, min(n, 5), []
    for solve, dtype in ((kernel("sinkhorn", x), torch.float32), (sinkhorn, torch.float64)):
        leaf = x.to(dtype).requires_grad_()
        column, error, *_ = solve(leaf, labels, torch.tensor(beta, dtype=dtype), k, 2e-5, 30)
        assert bool((error <= 2e-5).all())
        weights = torch.linspace(1, -0.4, k, dtype=dtype)
        results.append([column.detach().double(), torch.autograd.grad((column * weights).sum(), leaf)[0].double()])
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=3e-5)
    size = float(results[1][1].abs().max()) + 1e-3
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-3, atol=2e-3 * size)


def test_sinkhorn_sort_takes_the_kernel_up_to_its_classes_and_keeps_nan_in_its_sample():
    assert kernel("sinkhorn", torch.zeros(1, 128)) is not None
    assert kernel("sinkhorn", torch.zeros(1, 129)) is None
    scores = torch.randn(3, 8, generator=torch.Generator().manual_seed(10))
    clean = SinkhornSort(3, 100.0).rank_probabilities(scores, torch.arange(3))
    scores[1, 4] = float("nan")
    spoilt = SinkhornSort(3, 100.0).rank_probabilities(scores, torch.arange(3))
    assert bool(spoilt[1].isnan().all())
    assert torch.equal(spoilt[[0, 2]], clean[[0, 2]])


def test_what_no_gpu_has_seen_is_taken_by_those_alone_who_ask_for_it(monkeypatch):
    monkeypatch.setattr("topk_losses.kernels.device_of_kernels", lambda device: "cuda")
    monkeypatch.setenv(VARIABLE, "")
    assert {name for name, _ in TABLE if kernel(name, torch.zeros(1, 4)) is not None} == {"carry_mass"}
