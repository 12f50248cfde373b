"""The Triton kernels against the torch path and the float64 oracles, and the choice between the two.

On a CUDA device where there is one; elsewhere in Triton's interpreter, on the CPU.
"""

import copy
import importlib.metadata
import os
import pickle
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.topk_losses.test_operators import CONSTRUCTIONS, build, random_logits, true_class
from topk_losses.top_m import select_top_m

from topk_losses import (
    DISTRIBUTIONS,
    NeuralSort,
    RelaxedNetwork,
    SoftSort,
    TopKCrossEntropyLoss,
    backend,
    bitonic,
    make_operator,
    sorting_networks,
    splitter_selection,
)


def version(package):
    return tuple(map(int, importlib.metadata.version(package).split(".")[:2]))


tl = pytest.importorskip("triton.language", reason="Triton is not installed")
jit = pytest.importorskip("triton.runtime.jit")
interpreter = pytest.importorskip("triton.runtime.interpreter")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and version("triton") < (3, 7) and version("numpy") >= (2, 4):
    pytest.skip("the interpreter of Triton before 3.7 needs NumPy before 2.4", allow_module_level=True)
# The interpreter computes with NumPy, which warns of an infinity on the way where a GPU is silent.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
NAMES = ("neuralsort", "softsort", *CONSTRUCTIONS)


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """Without a CUDA device the kernels are interpreted, for this module's tests only."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setenv("TRITON_INTERPRET", "1")
            # An import of Triton before has decided otherwise for the functions that it is itself written in.
            for module in (tl, tl.standard):
                for name, value in list(vars(module).items()):
                    if isinstance(value, jit.JITFunction):
                        patch.setattr(module, name, interpreter.InterpretedFunction(value.fn))
        forget_kernels()
        yield
        forget_kernels()


def forget_kernels():
    for name in ("triton_distributions", "triton_networks", "triton_sorts"):
        sys.modules.pop(f"topk_losses.{name}", None)


def distinct_scores(batch, n):
    """Multiples of 1/4 about 0, in any order: no type makes two of them equal, as long as it can hold so many."""
    orders = [torch.randperm(n, generator=torch.Generator().manual_seed(i)) for i in range(batch)]
    return (torch.stack(orders) - n // 2) / 4  # (batch, n)


def on_backend(name, function, *arguments, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(backend.VARIABLE, name)
        return function(*arguments, **options)


def column_and_gradient(column, logits, labels):
    """The column (batch, k), and the gradient of its sum, each rank with a weight of its own."""
    logits = logits.clone().requires_grad_()
    value = column(logits, labels)
    (value * torch.linspace(1, 0.3, value.shape[1], device=value.device)).sum().backward()
    return value.detach(), logits.grad


def assert_equals_torch_path(operator, logits, labels, **tolerance):
    operator, logits, labels = operator.to(DEVICE), logits.to(DEVICE), labels.to(DEVICE)
    ours = on_backend("triton", column_and_gradient, operator.rank_probabilities, logits, labels)
    want = on_backend("torch", column_and_gradient, operator.rank_probabilities, logits, labels)
    assert (ours[0].dtype, ours[1].dtype) == (torch.float32, logits.dtype)
    torch.testing.assert_close(ours, want, **tolerance)


def assert_equals_oracle(name, n, k, beta, logits, labels, distribution="logistic_phi"):
    operator, oracle = build(name, n, k, beta, distribution)
    operator.to(DEVICE)
    ours = on_backend("triton", column_and_gradient, operator.rank_probabilities, logits.to(DEVICE), labels.to(DEVICE))
    want = column_and_gradient(lambda s, y: true_class(oracle(s), y), logits.double(), labels)
    torch.testing.assert_close(ours[0].cpu().double(), want[0], rtol=1e-4, atol=2e-6)
    scale = float(want[1].abs().max())
    torch.testing.assert_close(ours[1].cpu().double(), want[1], rtol=1e-4, atol=1e-6 + 1e-5 * scale)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("name", CONSTRUCTIONS)
def test_networks_with_every_distribution_equal_dense_matrices(name, distribution):
    logits, labels = random_logits(5, 11, 2.0, torch.float32), torch.tensor([0, 3, 5, 9, 10])
    assert_equals_oracle(name, 11, 4, 1.5, logits, labels, distribution)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_equals_its_definition(name, data):
    n = data.draw(st.integers(2, 17), "n")
    k = data.draw(st.integers(1, n - 1), "k")
    batch = data.draw(st.integers(1, 5), "batch")
    beta = data.draw(st.sampled_from([0.1, 1.0, 3.0]), "inverse temperature")
    # not ART: its slope at a small difference magnifies float32's rounding of it without a bound
    distribution = data.draw(st.sampled_from([d for d in DISTRIBUTIONS if d != "logistic_phi"]), "distribution")
    logits = random_logits(batch, n, 1.0, torch.float32, data.draw(st.integers(0, 99), "seed"))
    labels = torch.tensor(data.draw(st.lists(st.integers(0, n - 1), min_size=batch, max_size=batch), "labels"))
    assert_equals_oracle(name, n, k, beta, logits, labels, distribution)


@pytest.mark.parametrize(
    ("name", "n", "batch"),
    [(name, n, 35) for name in NAMES for n in (2, 3)]
    + [(name, 100, 3) for name in NAMES if name != "odd_even"]
    + [("odd_even", 40, 3), ("splitter_selection", 1000, 2), ("bitonic", 1000, 1)]
    + [("neuralsort", 1024, 3), ("softsort", 1000, 3)],
)
def test_equals_the_torch_path_from_the_smallest_to_large_sizes(name, n, batch):
    k = min(5, n - 1)
    operator = make_operator(name, n, k)
    logits = random_logits(batch, n, 2.0, torch.float32)
    labels = logits.topk(k, dim=1).indices[torch.arange(batch), torch.arange(batch) % k]
    assert_equals_torch_path(operator, logits, labels, rtol=1e-4, atol=2e-6)


def test_layers_wider_than_a_tile_equal_the_torch_path(monkeypatch):
    """As those of 10450 scores are."""
    monkeypatch.setattr(sorting_networks, "WIDEST_TILE", 4)
    for construct in (bitonic, splitter_selection):
        operator = RelaxedNetwork(construct(22, 3))
        assert operator.tiles.shape[2] == 4
        assert_equals_torch_path(operator, random_logits(9, 22, 1.0, torch.float32), torch.arange(9))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stays_close_to_the_torch_path_for_every_type_and_scale(name, scale, dtype):
    logits = (distinct_scores(6, 16) * scale).to(dtype)
    # float32 holds scores of 1e4 to 1e-3, and each layer of a network rounds them
    tolerance = 2e-3 if scale == 1e4 and name in CONSTRUCTIONS else 2e-5
    relative = 1e-4 if dtype == torch.float32 else 1e-2
    assert_equals_torch_path(make_operator(name, 16, 5, 1.0), logits, torch.arange(6), rtol=relative, atol=tolerance)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_extreme_differences_stay_finite_in_every_family(distribution):
    operator = RelaxedNetwork(splitter_selection(9, 3), 2.0, distribution)
    logits = random_logits(4, 9, 1e4, torch.float32)
    logits[0] *= 1e-8
    logits[1, :5] = logits[1, 0]
    column, gradient = on_backend(
        "triton",
        column_and_gradient,
        operator.to(DEVICE).rank_probabilities,
        logits.to(DEVICE),
        torch.arange(4).to(DEVICE),
    )
    assert bool(torch.isfinite(column).all())
    assert bool(torch.isfinite(gradient).all())


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_at_ties_is_that_of_the_torch_path(name):
    """Which of the equal scores takes which rank is arbitrary: their gradients are compared as a sum."""
    operator, logits = make_operator(name, 20, 5, 3.0), random_logits(6, 20, 2.0, torch.float32).round()
    logits[0] = 1.0
    logits[1, 3:] = -0.0
    logits[1, :3] = 0.0
    labels = torch.arange(6)
    for weights in (1.0, torch.linspace(1, 0, 5, device=DEVICE)):
        sums = []
        for path in ("triton", "torch"):
            scores = logits.clone().to(DEVICE).requires_grad_()
            column = on_backend(path, operator.to(DEVICE).rank_probabilities, scores, labels.to(DEVICE))
            (column * weights).sum().backward()
            gradient, order = scores.grad.cpu(), torch.unique(logits + 0.0, return_inverse=True)[1]
            if name in CONSTRUCTIONS:  # whose lanes are fixed
                sums.append((column.detach().cpu(), gradient))
            else:
                sums.append((column.detach().cpu(), torch.zeros_like(gradient).scatter_add(1, order, gradient)))
        torch.testing.assert_close(*sums, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_distribution_of_labels_and_its_gradient_equal_the_torch_path(name, dtype):
    operator = make_operator(name, 12, 4).to(DEVICE)
    gradients = []
    for path in ("triton", "torch"):
        logits = random_logits(6, 12, 1.0, torch.float32).to(DEVICE).requires_grad_()
        mass = random_logits(6, 12, 1.0, torch.float32, 1).softmax(1).to(DEVICE, dtype).requires_grad_()
        column = on_backend(path, operator.rank_probabilities, logits, mass)
        (column * torch.linspace(1, 0, 4, device=DEVICE)).sum().backward()
        assert mass.grad.dtype == dtype
        gradients.append((column.detach(), logits.grad, mass.grad))
        with torch.no_grad():
            torch.testing.assert_close(on_backend(path, operator.rank_probabilities, logits, mass), column)
    torch.testing.assert_close(*gradients, rtol=1e-4 if dtype == torch.float32 else 1e-2, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_an_infinite_or_nan_score_never_gives_a_wrong_number(name):
    operator, clean = make_operator(name, 9, 3, 2.0).to(DEVICE), random_logits(4, 9, 1.0, torch.float32).to(DEVICE)
    labels, others = torch.arange(4, device=DEVICE), torch.tensor([0, 2, 3], device=DEVICE)
    want = on_backend("triton", operator.rank_probabilities, clean, labels)[others]
    for bad in (float("nan"), -float("nan"), float("inf"), float("-inf")):
        logits = clean.clone()
        logits[1, 5] = bad
        column = on_backend("triton", operator.rank_probabilities, logits, labels)
        torch.testing.assert_close(column[others], want)
        if name == "softsort" and bad == float("-inf"):  # the limit: a class that takes no part
            without = torch.cat([clean[1:2, :5], clean[1:2, 6:]], dim=1)
            torch.testing.assert_close(column[1:2], operator.rank_probabilities(without, labels[1:2]))
        else:
            assert bool(column[1].isnan().any())


@pytest.mark.parametrize("name", NAMES)
def test_a_class_that_does_not_exist_gives_nan(name):
    """On CUDA nobody looks at the labels' values on the host."""
    operator, logits = make_operator(name, 9, 3).to(DEVICE), random_logits(3, 9, 1.0, torch.float32).to(DEVICE)
    column = on_backend("triton", operator._rank_probabilities, logits, torch.tensor([9, 2, -1], device=DEVICE))
    assert column.isnan().all(1).tolist() == [True, False, True]


@pytest.mark.parametrize("name", NAMES)
def test_double_backward_is_refused_by_name(name):
    operator = make_operator(name, 7, 3).to(DEVICE)
    logits = random_logits(2, 7, 1.0, torch.float32).to(DEVICE).requires_grad_()
    column = on_backend("triton", operator.rank_probabilities, logits, torch.tensor([0, 1], device=DEVICE))
    (gradient,) = torch.autograd.grad(column.square().sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="not twice differentiable"):
        torch.autograd.grad(gradient.sum() + logits.sum(), logits)


def test_rows_need_not_be_contiguous():
    for name in NAMES:
        operator = make_operator(name, 9, 3).to(DEVICE)
        logits = random_logits(9, 8, 1.0, torch.float32).to(DEVICE).T  # (8, 9)
        labels = (torch.arange(16, device=DEVICE) // 2)[::2]  # (8,)
        columns = [on_backend(path, operator.rank_probabilities, logits, labels) for path in ("triton", "torch")]
        torch.testing.assert_close(*columns)


def test_float64_and_settings_without_a_kernel_take_the_torch_path():
    logits, labels = random_logits(3, 9).to(DEVICE), torch.arange(3, device=DEVICE)
    for name in NAMES:
        column = on_backend("triton", make_operator(name, 9, 3).to(DEVICE).rank_probabilities, logits, labels)
        assert column.dtype == torch.float64
    operator = SoftSort(3, power=2.0).to(DEVICE)
    columns = [on_backend(path, operator.rank_probabilities, logits.float(), labels) for path in ("torch", "triton")]
    assert torch.equal(*columns)


@pytest.mark.parametrize(("n", "m", "batch"), [(2, 2, 3), (5, 2, 4), (16, 16, 2), (100, 16, 5), (10450, 50, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_top_m_equals_the_torch_path(n, m, batch, dtype):
    logits = distinct_scores(batch, n).to(DEVICE, dtype)
    labels = torch.tensor([0, int(logits[1].argmax()), n - 1, 1, 2])[:batch].to(DEVICE)
    weights = torch.linspace(1, 2, m, device=DEVICE)
    for target in (labels, torch.nn.functional.one_hot(labels, n).float() * 0.75 + 0.25 / n):
        results = []
        for path in ("triton", "torch"):
            scores = logits.clone().requires_grad_()
            kept, new_labels = on_backend(path, select_top_m, scores, target, m)
            assert kept.dtype == torch.float32
            (kept * weights).sum().backward()
            results.append((kept.detach(), new_labels, scores.grad))
        torch.testing.assert_close(results[0][:2], results[1][:2], rtol=0, atol=0)
        assert results[0][2].dtype == dtype
        if logits[0].unique().numel() == n:
            torch.testing.assert_close(results[0][2], results[1][2])


def test_top_m_puts_nan_first_and_refuses_a_class_that_does_not_exist():
    logits = (
        torch.tensor([[0.0, float("nan"), 2.0, -float("nan"), float("inf"), -float("inf")]]).repeat(2, 1).to(DEVICE)
    )
    kept, _ = on_backend("triton", select_top_m, logits, torch.tensor([0, 6], device=DEVICE), 6)
    assert kept[0, :5].isnan().tolist() == [False, True, True, False, False]
    assert kept[0, 3:].tolist() == [float("inf"), 2.0, -float("inf")]
    assert bool(kept[1, 0].isnan())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("m", "top1_mode"), [(None, "smce"), (8, "sm")])
def test_the_loss_and_its_gradient_equal_the_torch_path(name, m, top1_mode):
    loss = TopKCrossEntropyLoss(name, [0.5, 0, 0.5], 12, m, top1_mode=top1_mode).to(DEVICE)
    labels = torch.tensor([0, 3, -100, 11, 5], device=DEVICE)
    for copied in (loss, pickle.loads(pickle.dumps(loss)), copy.deepcopy(loss)):
        for dtype in (torch.float32, torch.bfloat16):
            results = []
            for path in ("triton", "torch"):
                logits = random_logits(5, 12, 1.0, torch.float32).to(DEVICE, dtype).requires_grad_()
                with torch.autocast(DEVICE, torch.bfloat16):
                    value = on_backend(path, copied, logits, labels)
                value.backward()
                assert (value.dtype, logits.grad.dtype) == (torch.float32, dtype)
                results.append((value.detach(), logits.grad))
            torch.testing.assert_close(*results)
            if copied is not loss:
                break


@pytest.mark.parametrize("m", [None, 8])
def test_an_empty_batch_gives_an_empty_gradient(m):
    for name in NAMES:
        loss = TopKCrossEntropyLoss(name, [0.5, 0, 0.5], 12, m, reduction="sum").to(DEVICE)
        logits = torch.zeros(0, 12, device=DEVICE, requires_grad=True)
        value = on_backend("triton", loss, logits, torch.zeros(0, dtype=torch.long, device=DEVICE))
        value.backward()
        assert float(value.detach()) == 0
        assert logits.grad.shape == (0, 12)


def test_the_backend_follows_the_variable_or_else_the_device(monkeypatch):
    scores = torch.zeros(2, 3)
    monkeypatch.delenv(backend.VARIABLE, raising=False)
    assert not backend.use_triton(scores)
    monkeypatch.setenv(backend.VARIABLE, "torch")
    assert not backend.use_triton(scores.to(DEVICE))
    monkeypatch.setenv(backend.VARIABLE, "triton")
    assert backend.use_triton(scores.to(DEVICE))
    assert not backend.use_triton(scores.to(DEVICE).double())
    monkeypatch.setenv(backend.VARIABLE, "Triton")
    with pytest.raises(ValueError, match=r"TOPK_LOSSES_BACKEND must be one of torch, triton, numba, .* got 'Triton'"):
        backend.use_triton(scores)


def test_a_backend_that_cannot_run_is_refused_with_the_way_out(monkeypatch):
    monkeypatch.setenv(backend.VARIABLE, "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    operator = NeuralSort(2)
    with pytest.raises(RuntimeError, match=r"got cpu; move them there, unset .*TRITON_INTERPRET=1 before"):
        operator.rank_probabilities(torch.randn(2, 5), torch.tensor([0, 1]))
    monkeypatch.setattr(backend, "triton_is_installed", lambda: False)
    with pytest.raises(RuntimeError, match="needs the package triton"):
        operator.rank_probabilities(torch.randn(2, 5), torch.tensor([0, 1]))
    monkeypatch.delenv(backend.VARIABLE)
    assert not backend.use_triton(torch.zeros(2, 3, device=DEVICE))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_cuda_takes_the_kernels_by_itself_and_never_waits(monkeypatch):
    monkeypatch.delenv(backend.VARIABLE, raising=False)
    logits, labels = torch.randn(64, 100, device="cuda"), torch.arange(64, device="cuda")
    losses = [TopKCrossEntropyLoss(name, num_classes=100, m=m).cuda() for name in NAMES for m in (None, 16)]
    assert backend.use_triton(logits)
    for mode in ("default", "error"):  # compile first, then look for synchronisation
        torch.cuda.set_sync_debug_mode(mode)
        for loss in losses:
            loss(logits.clone().requires_grad_(), labels).backward()
    torch.cuda.set_sync_debug_mode("default")


def test_the_compiler_sees_the_torch_path(monkeypatch):
    monkeypatch.setenv(backend.VARIABLE, "triton")
    loss = TopKCrossEntropyLoss("splitter_selection", [0.5, 0, 0.5], 12, 8).to(DEVICE)
    logits, labels = torch.randn(6, 12, device=DEVICE), torch.arange(6, device=DEVICE)
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(logits, labels), loss(logits, labels))


def test_the_library_works_where_triton_is_not_installed():
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, topk_losses\n"
        "loss = topk_losses.TopKCrossEntropyLoss('softsort', num_classes=12, m=8)\n"
        "loss(torch.randn(3, 12), torch.arange(3))\n"
        "assert not topk_losses.backend.triton_is_installed()\n"
        "assert not [name for name in sys.modules if name.startswith('topk_losses.triton')]"
    )
    environment = {name: value for name, value in os.environ.items() if name != backend.VARIABLE}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
