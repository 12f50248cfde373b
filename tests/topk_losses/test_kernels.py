"""The kernels against PyTorch's operations in float64: Numba's and Triton's.

Triton's on a CUDA device where there is one; elsewhere in its interpreter, on the CPU.
"""

import importlib
import importlib.metadata
import sys
from contextlib import ExitStack

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.methods import random_batch, value_and_gradient
from tests.reference import NETWORKS
from topk_losses import (
    DISTRIBUTIONS,
    LML,
    CappedSoftmax,
    DFTopK,
    LapSum,
    RecallSurrogate,
    RelaxedNetwork,
    SparseTopK,
    TopKCrossEntropyLoss,
    bitonic,
    make_loss,
    make_operator,
    splitter_selection,
)
from topk_losses.kernels import TABLE, UNSEEN, VARIABLE, device_of_kernels, is_installed, kernel
from topk_losses.smooth_svm import kth_largest
from topk_losses.threshold import PointwiseMasks, arguments_of_ranks, masks
from topk_losses.transport import sinkhorn

# The interpreter computes with NumPy, which warns of an infinity on the way where a GPU is silent.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
MODULES = sorted({f"topk_losses.kernels.{file}" for (_, device), file in TABLE.items() if device == "cuda"})


def version(package):
    return tuple(map(int, importlib.metadata.version(package).split(".")[:2]))


def restore(kept):
    """Give modules and classes the attributes that they had: pairs of one and its dictionary."""
    for of, before in kept:
        # The interpreter keeps what it has rewritten, which looks for that name where it was.
        for name in vars(of).keys() - before.keys() - {"interpreter_semantic"}:
            delattr(of, name)
        for name, value in before.items():
            if vars(of)[name] is not value:
                setattr(of, name, value)


def interpret(stack, patch):
    """Let Triton's code be interpreted, until the stack unwinds."""
    patch.setenv("TRITON_INTERPRET", "1")
    language, core, math, standard = (
        importlib.import_module(f"triton.language{name}") for name in ("", ".core", ".math", ".standard")
    )
    # The interpreter does not put back what it has changed for functions that kernels call.
    changed = language, core, math, standard
    changed += core.tensor, core.condition, core.dtype, core.tensor_descriptor_base
    stack.callback(restore, [(each, dict(vars(each))) for each in changed])
    for name, function in list(vars(standard).items()):  # tl.sum and others, which are Triton code themselves
        if isinstance(function, sys.modules["triton"].JITFunction):
            interpreted = sys.modules["triton"].jit(function.fn)
            setattr(standard, name, interpreted)
            setattr(language, name, interpreted)


@pytest.fixture(scope="module", autouse=True, params=["numba", "triton"])
def backend(request):
    """The backend that computes; and where: a device."""
    if not is_installed(request.param):
        pytest.skip(f"{request.param} is not installed")
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, request.param)
        if request.param == "triton":
            if not torch.cuda.is_available():
                if version("triton") < (3, 7) and version("numpy") >= (2, 4):
                    pytest.skip("the interpreter of Triton before 3.7 needs NumPy before 2.4")
                interpret(stack, patch)
            for name in MODULES:  # which may stand there compiled
                patch.delitem(sys.modules, name, raising=False)
                importlib.import_module(name)
        yield request.param
        for name in MODULES if request.param == "triton" else ():
            sys.modules.pop(name, None)  # it may stand there anew


@pytest.fixture
def device(backend):
    return "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"


def examples(backend, numba, triton):
    """So many of a property's: the interpreter is slow."""
    return settings(max_examples=numba if backend == "numba" else triton, deadline=None)


def assert_close_but_for_nan(got, want):
    """Values and gradients; a row with NaN may have it anywhere in its gradient."""
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=2e-6, equal_nan=True)
    broken = want[0].reshape(len(want[0]), -1).isnan().any(1)  # (rows,)
    torch.testing.assert_close(got[1][~broken], want[1][~broken], rtol=1e-5, atol=2e-6)
    assert bool(got[1][broken].isnan().any(1).all())


# Relaxed networks.


def column_and_gradient(operator, scores, target):
    """The column (batch, k), weighted, and the gradient of its sum by the scores."""
    weights = torch.linspace(1, -0.4, operator.k, device=scores.device, dtype=scores.dtype)
    return value_and_gradient(lambda s: operator.rank_probabilities(s, target) * weights, scores)


def assert_agrees(operator, scores, target, device, value=2e-6, gradient=2e-6, relative=1e-5):
    """value, gradient: allowed errors, the gradient's relative to the largest."""
    operator, scores, target = operator.to(device), scores.to(device), target.to(device)
    got, got_gradient = column_and_gradient(operator, scores, target)
    exact = target.double() if target.is_floating_point() else target
    want, want_gradient = column_and_gradient(operator, scores.double(), exact)
    assert (got.dtype, got_gradient.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(got.double(), want, rtol=relative, atol=value)
    size = float(want_gradient.abs().max()) if want_gradient.numel() else 0.0
    torch.testing.assert_close(got_gradient.double(), want_gradient, rtol=relative, atol=gradient * size + 1e-12)
    assert not bool(got_gradient[scores == -torch.inf].any())


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_on_assorted_scores(name, distribution, device):
    """Apart, with ties, all equal, with an offset, with classes that take no part, with but one that does."""
    operator, scores = RelaxedNetwork(NETWORKS[name](11, 4), 1.5, distribution), random_batch(6, 11)[0].float()
    scores[1] = scores[1].round()
    scores[2] = 1.3
    scores[3] = scores[3].round() / 4 + 16
    scores[4, 1::3] = -torch.inf
    scores[5, 1:] = -torch.inf
    mass = torch.rand(6, 11, generator=torch.Generator().manual_seed(1))
    # the slope of ART magnifies the rounding of a small difference
    gradient = 1e-3 if distribution == "logistic_phi" else 1e-5
    for target in (torch.tensor([0, 3, 5, 1, 7, 0]), mass):
        assert_agrees(operator, scores, target, device, value=5e-6, gradient=gradient)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_sigmoids_keep_their_tails(distribution, device):
    """Of two classes the lower one has rank 1 with the mixed share itself."""
    apart = torch.cat([torch.linspace(0, 12, 200), torch.logspace(-6, 18, 100)])
    if distribution == "gaussian":
        apart = apart.clamp(max=12)  # where float32 ends
    scores, labels = torch.stack([-apart, torch.zeros(300)], dim=1), torch.zeros(300, dtype=torch.int64)
    beta = 100.0 if distribution == "cauchy" else 1.0  # whose square, with that of a distance, is no float32 number
    for art_lambda in (0.1, 0.4, 0.75) if distribution == "logistic_phi" else (None,):
        network, relative = RelaxedNetwork(bitonic(2, 1), beta, distribution, art_lambda), 2e-5
        if art_lambda in (0.1, 0.75):  # powers by way of logarithms
            relative = 1e-3
        assert_agrees(network, scores, labels, device, value=1e-37, gradient=1e-37, relative=relative)


def test_scores_that_rounding_parts_are_equal(device):
    """Of a size of 1000: less their maximum they are a few 1e-4 apart, where ART is steep."""
    network, labels = RelaxedNetwork(bitonic(2, 1), 1.0).to(device), torch.zeros(1, dtype=torch.int64, device=device)
    scores, near = torch.tensor([[1e3, 1e3]], device=device), torch.tensor([[1e3 + 3e-4, 1e3]], device=device)
    assert not torch.equal(near, scores)
    pair = [column_and_gradient(network, each, labels) for each in (near, scores)]
    torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_tiny_and_huge_scores(distribution, device):
    orders = [torch.randperm(16, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    scores, labels = (torch.stack(orders) - 8.0) / 4, torch.arange(6)
    network = RelaxedNetwork(splitter_selection(16, 5), 1.0, distribution)
    assert_agrees(network, 1e-4 * scores, labels, device, gradient=1e-3)
    # float32 holds scores of 1e4 to 1e-3, and each layer rounds them
    assert_agrees(network, 1e4 * scores, labels, device, value=1e-3, gradient=1e-2)
    got = column_and_gradient(network, (1e30 * scores).to(device), labels.to(device))
    assert all(bool(each.isfinite().all()) for each in got)


@pytest.mark.parametrize(("n", "batch"), [(1, 3), (2, 1), (3, 35), (5, 0)])
def test_the_smallest_networks(n, batch, device):
    scores, labels = random_batch(batch, n, 1.0, torch.float32, seed=3)
    assert_agrees(RelaxedNetwork(splitter_selection(n, n), 1.0), scores, labels, device)


def test_a_real_network_from_rows_that_are_not_contiguous(device):
    scores = torch.randn(1000, 2, generator=torch.Generator().manual_seed(4)).T
    labels = scores.argsort(1, descending=True)[:, :2].flatten()[::2]
    network = RelaxedNetwork(splitter_selection(1000, 5), 1.0)
    assert_agrees(network, scores, labels, device, value=1e-5, gradient=1e-3)


@pytest.mark.parametrize("name", NETWORKS)
def test_layers_wider_than_a_tile(name, backend, device, monkeypatch):
    """As those of 10450 scores are; and a batch of several programs."""
    if backend == "triton":
        monkeypatch.setattr(sys.modules[f"topk_losses.kernels.{TABLE['carry_mass', 'cuda']}"], "WIDEST", 4)
    scores = random_batch(19, 22, 1.0, torch.float32, seed=2)[0]
    assert_agrees(RelaxedNetwork(NETWORKS[name](22, 3), 1.0), scores, torch.arange(19), device, gradient=1e-4)


def test_the_loss_under_autocast_is_that_of_pytorch(device, monkeypatch):
    loss = TopKCrossEntropyLoss("splitter_selection", [0.5, 0, 0.5], 12).to(device)
    logits, labels = (each.to(device) for each in random_batch(5, 12, dtype=torch.bfloat16))
    with torch.autocast(device, torch.bfloat16):
        got = value_and_gradient(loss, logits, labels)
    monkeypatch.setenv(VARIABLE, "torch")
    torch.testing.assert_close(got, value_and_gradient(loss, logits, labels))


# Masks.

MASKS = {
    "lml": LML,
    "lapsum": LapSum,
    "capped_softmax": CappedSoftmax,
    "sparse_topk": SparseTopK,
    "sparse_topk, p 4/3": lambda k, beta: SparseTopK(k, beta, p=4 / 3),
    "recall_surrogate": RecallSurrogate,
    "df_topk": DFTopK,  # whose operations are as fast on a CPU
}


def arguments_and_gradient(operator: PointwiseMasks, scores: Tensor, labels: Tensor, ks: list[int], softmax: bool):
    """t (rows, J), or beside log softmax (rows, J + 1), weighted by 1, 2, ..., and the gradient (rows, n)."""
    find = kernel(operator.operation, scores) or masks
    beta = torch.tensor(operator.inverse_temperature, dtype=scores.dtype, device=scores.device)
    weights = torch.arange(1, len(ks) + softmax + 1, device=scores.device)

    def compute(leaf):
        return torch.cat(find(leaf, labels, beta, ks, operator.family, softmax)[: 1 + softmax], dim=1) * weights

    return value_and_gradient(compute, scores)


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_those_of_operations_in_float64(name, backend, device):
    """Where rounding decides nothing."""

    @examples(backend, numba=60, triton=12)
    @given(
        st.integers(2, 40) | st.integers(2 if backend == "triton" else 500, 40 if backend == "triton" else 600),
        st.data(),
    )
    def agree(n, data):
        scale = data.draw(st.sampled_from([1e-4, 1.0, 10.0, 1e4]), "scale")
        beta = data.draw(st.sampled_from([0.03125, 0.25, 1.0, 8.0]), "inverse temperature")
        batch, seed = (
            data.draw(st.sampled_from([1, 3, 40] if backend == "numba" else [1, 3])),
            data.draw(st.integers(0, 10**6)),
        )
        scores, labels = (
            random_batch(batch, n, scale, torch.float32, seed)[0].to(device),
            torch.zeros(batch, dtype=torch.int64),
        )
        generator = torch.Generator().manual_seed(seed + 1)
        masked = torch.rand(scores.shape, generator=generator) < data.draw(st.sampled_from([0.0, 0.0, 0.4]), "masked")
        masked[:, :2] = False
        scores, labels = scores.masked_fill(masked.to(device), -torch.inf), labels.to(device)
        ks = sorted(data.draw(st.sets(st.integers(1, min(n - 1, 32)), min_size=1, max_size=4), "ks"))
        # where theta is the least of the scores that take part, or any number between two, rounding decides
        ks = [k for k in ks if k < int((~masked).sum(1).min())] or [1]
        operator, softmax = MASKS[name](ks[-1], beta), data.draw(st.booleans(), "softmax")
        assert kernel(operator.operation, scores) is not None or (name, backend) == ("df_topk", "numba")
        got, gradient = arguments_and_gradient(operator, scores, labels, ks, softmax)
        want, want_gradient = arguments_and_gradient(operator, scores.double(), labels, ks, softmax)
        rounding = 1e-6 * (1 + scale * beta)  # of the scores
        torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=4 * rounding * len(ks))
        if name == "lml" and scale * beta > 10:
            return  # theta may lie so far from all scores that which of them are next to it is rounding
        far = (gradient.double() - want_gradient).abs() > beta * len(ks) * (5e-4 + rounding / 2)
        if name in ("capped_softmax", "sparse_topk", "sparse_topk, p 4/3"):  # next to a corner of f: on either side
            t = arguments_of_ranks(scores.double(), None, beta, ks, operator.family)  # (rows, J, n)
            corners = torch.tensor([0.0] if name == "capped_softmax" else [0.0, 1.0], device=device)
            near = (t.unsqueeze(3) - corners).abs() < 10 * rounding
            far = far[~near.flatten(1).any(1)]
        assert not bool(far.any())

    agree()


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("name", [name for name in MASKS if name != "df_topk"])
def test_masks_of_ties_of_few_classes_of_gaps_and_of_spoilt_rows_are_those_of_operations(
    name, softmax, backend, device, monkeypatch
):
    """And with equal scores, and where the true class is one of those that take part, or is not."""
    nan, inf = float("nan"), float("inf")
    rows = [
        [1, 2.2, 2.2, 2.2, 2.2, -1],
        [0.3] * 6,
        [300, 299.3, 0, -1, -2, -3],
        [1, 0.2, -inf, -inf, -inf, -inf],
        [-inf] * 6,
        [-inf, 0, -inf, -inf, -inf, -inf],
        [nan, 1, 2, 3, 4, 5],
        [inf, 1, 2, 3, 4, 5],
    ]
    scores, labels = torch.tensor(rows, device=device), torch.tensor([0, 3, 1, 0, 2, 0, 1, 1], device=device)
    got = arguments_and_gradient(MASKS[name](3, 1.0), scores, labels, [1, 2, 3, 6], softmax)
    monkeypatch.setenv(VARIABLE, "torch")
    want = arguments_and_gradient(MASKS[name](3, 1.0), scores, labels, [1, 2, 3, 6], softmax)
    torch.testing.assert_close(got[0], want[0], rtol=2e-5, atol=2e-6, equal_nan=True)
    # PyTorch's operations pass gradients on to a true class at -inf, and of NaN not to all
    torch.testing.assert_close(got[1][:5], want[1][:5], rtol=1e-5, atol=2e-6, equal_nan=True)
    assert not bool(got[1][5, scores[5] == -inf].any())
    assert bool(got[1][6:].isnan().all())


# The smooth k-th largest score.


def test_the_smooth_kth_largest_is_that_of_operations_in_float64(backend, device):
    @examples(backend, numba=60, triton=12)
    @given(
        st.integers(8, 30) | st.integers(*((8, 30) if backend == "triton" else (100, 120))),
        st.sampled_from([1e-4, 1.0, 1e2, 1e4]),
        st.integers(0, 10**6),
    )
    def agrees(n, scale, seed):
        scores, labels = random_batch(5, n, scale, torch.float32, seed)
        scores[0, 3:], labels[0] = -torch.inf, 0  # the classes of label 0 and two others
        scores, labels, results = scores.to(device), labels.to(device), []
        assert kernel("kth_largest", scores) is not None
        for leaf in (scores, scores.double()):
            find, weights = kernel("kth_largest", leaf) or kth_largest, torch.tensor([1.0, -2, 3]).to(leaf)
            temperature, leaf = torch.tensor(0.5).to(leaf), leaf.requires_grad_()
            smooth, hard, top, log_softmax, *_ = find(leaf, labels, [1, 2, 5], temperature, True)
            wanted = [(each[1:] @ weights).sum() for each in (smooth, hard)]
            wanted += [wanted[0] + log_softmax.sum()]
            gradients = [torch.autograd.grad(each, leaf, retain_graph=True)[0].double() for each in wanted]
            results.append([each.detach().double() for each in (smooth, hard, top, log_softmax)] + gradients)
        torch.testing.assert_close(*results, rtol=1e-5, atol=2e-5 * (1 + scale / 10))

    agrees()


@pytest.mark.parametrize("method", ["smooth_topk", "smooth_hard_topk", "subset_topk"])
def test_losses_by_the_smooth_kth_largest(method, device, monkeypatch):
    """With NaN, inf, a dead true class, too few others, and all scores equal."""
    nan, inf = float("nan"), float("inf")
    rows = [[nan, 1, 2, 3, 4], [inf, 1, 2, 3, 4], [-inf, 1, 2, 3, 4], [1, 0.5, -inf, -inf, -inf], [0.3] * 5]
    scores, labels = torch.tensor(rows, device=device), torch.tensor([1, 1, 0, 0, 2], device=device)
    loss = make_loss(method, [0, 0, 1], 5, reduction="none")
    got = value_and_gradient(loss, scores, labels)
    monkeypatch.setenv(VARIABLE, "torch")
    assert_close_but_for_nan(got, value_and_gradient(loss, scores, labels))


# SinkhornSort.


@pytest.mark.parametrize(("n", "beta"), [(1, 100.0), (2, 5.0), (11, 100.0), (33, 30.0)])
def test_the_plan_is_that_of_operations_in_float64(n, beta, device):
    x = torch.rand(5, n, generator=torch.Generator().manual_seed(n))
    x[1], x[2] = x[1].round(decimals=1), 0.5
    x, labels, k, results = x.to(device), torch.arange(5, device=device) % n, min(n, 5), []
    for scores in (x, x.double()):
        solve = kernel("sinkhorn", scores) or sinkhorn
        assert (solve is sinkhorn) == (scores.dtype == torch.float64)
        weights = torch.linspace(1, -0.4, k).to(scores)
        errors = solve(scores, labels, torch.tensor(beta).to(scores), k, 2e-5, 30)[1]
        assert bool((errors <= 2e-5).all())
        beta_of = torch.tensor(beta).to(scores)
        results.append(
            value_and_gradient(
                lambda s, solve=solve, b=beta_of, w=weights: solve(s, labels, b, k, 2e-5, 30)[0] * w, scores
            )
        )
    torch.testing.assert_close(results[0][0].double(), results[1][0], rtol=1e-4, atol=3e-5)
    size = float(results[1][1].abs().max()) + 1e-3
    torch.testing.assert_close(results[0][1].double(), results[1][1], rtol=1e-3, atol=2e-3 * size)


# All of them.


@pytest.mark.parametrize(
    ("name", "distribution"), [("sinkhorn_sort", None), *(("splitter_selection", each) for each in DISTRIBUTIONS)]
)
def test_nan_stays_in_its_sample(name, distribution, device):
    operator = make_operator(name, 9, 3, 2.0, distribution).to(device)
    clean, labels = random_batch(4, 9, dtype=torch.float32)[0].to(device), torch.arange(4, device=device)
    want = column_and_gradient(operator, clean, labels)
    for bad in (float("nan"), float("inf")):
        scores = clean.clone()
        scores[1, 5] = bad
        got = column_and_gradient(operator, scores, labels)
        assert bool(got[0][1].isnan().all())
        assert all(torch.equal(ours[[0, 2, 3]], exact[[0, 2, 3]]) for ours, exact in zip(got, want))


SECOND = [
    "bitonic",
    "splitter_selection",
    "lml",
    "lapsum",
    "recall_surrogate",
    "df_topk",
    "subset_topk",
    "sinkhorn_sort",
]


@pytest.mark.parametrize("method", SECOND)
def test_second_derivatives_are_those_of_float64(method, device):
    logits, labels = (each.to(device) for each in random_batch(2, 9, 1.0))
    loss, results = make_loss(method, [0.5, 0, 0.5]).to(device), []
    for leaf in (logits.float().requires_grad_(), logits.requires_grad_()):
        (first,) = torch.autograd.grad(loss(leaf, labels), leaf, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), leaf)[0].double())
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4 * float(results[1].abs().max()))


@pytest.mark.parametrize("backend", ["triton"], indirect=True)
def test_what_no_gpu_has_seen_is_taken_by_those_alone_who_ask_for_it_and_up_to_its_classes(backend, monkeypatch):
    for (operation, device), most in UNSEEN.items():
        monkeypatch.setattr("topk_losses.kernels.device_of_kernels", lambda _, device=device: device)
        assert kernel(operation, torch.zeros(1, most)) is not None
        assert kernel(operation, torch.zeros(1, most + 1)) is None
    monkeypatch.setenv(VARIABLE, "")
    assert {name for name, _ in TABLE if kernel(name, torch.zeros(1, 4)) is not None} == {"carry_mass"}


# Which kernel is taken.


def test_a_backend_that_cannot_run_is_refused_with_the_way_out(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name, device, sentence in (
        ("triton", "cpu", r"needs tensors on cuda, got cpu; unset it, or set TRITON_INTERPRET=1"),
        ("numba", "meta", "needs tensors on cpu, got meta"),
        ("cuda", "cpu", "must be torch, numba or triton"),
    ):
        monkeypatch.setenv(VARIABLE, name)
        with pytest.raises(ValueError, match=sentence):
            device_of_kernels(torch.device(device))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for name, device in (("triton", "cuda"), ("numba", "cpu")):
        monkeypatch.setenv(VARIABLE, name)
        assert device_of_kernels(torch.device("cpu")) == device
    monkeypatch.setattr("topk_losses.kernels.is_installed", lambda package: False)
    for name in ("triton", "numba"):
        monkeypatch.setenv(VARIABLE, name)
        with pytest.raises(ValueError, match=f"needs the package {name}"):
            device_of_kernels(torch.device("cpu"))


def test_kernels_are_the_default_on_the_devices_that_they_are_made_for(monkeypatch):
    scores, installed = torch.zeros(1, 2), {"triton", "numba"}
    monkeypatch.setattr("topk_losses.kernels.is_installed", installed.__contains__)
    monkeypatch.delenv(VARIABLE)
    for capability, taken in (((7, 5), ""), ((8, 0), "cuda"), ((12, 0), "cuda")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert device_of_kernels(torch.device("cuda")) == taken
    assert device_of_kernels(torch.device("mps")) == ""
    if is_installed("numba"):
        assert kernel("largest", scores) is not None
        assert kernel("largest", scores.double()) is None
        assert kernel("largest", scores, torch.ones((), requires_grad=True)) is None
        assert kernel("no such operation", scores) is None
    monkeypatch.setenv(VARIABLE, "torch")
    assert kernel("largest", scores) is None
    monkeypatch.delenv(VARIABLE)
    installed.clear()
    assert device_of_kernels(torch.device("cuda")) == device_of_kernels(torch.device("cpu")) == ""
    assert kernel("largest", scores) is None
    installed.add("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setenv(VARIABLE, "triton")
    assert device_of_kernels(torch.device("cuda")) == "cuda"
