"""The kernels compiled by Numba: any size, threads, bits, forks, whole losses, and the code that is kept."""

import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import topk_losses
from tests.methods import DETERMINISTIC, p_k_of, random_batch, value_and_gradient
from tests.reference import NETWORKS
from tests.topk_losses.test_kernels import column_and_gradient
from topk_losses import DISTRIBUTIONS, RelaxedNetwork, TopKCrossEntropyLoss, make_loss, make_operator
from topk_losses.kernels import VARIABLE, kernel

pytest.importorskip("numba")
from topk_losses.kernels import numba_support


@pytest.fixture(autouse=True)
def _numba(monkeypatch):
    monkeypatch.setenv(VARIABLE, "numba")


@pytest.mark.parametrize("method", DETERMINISTIC)
def test_many_threads_give_the_bits_of_one_and_the_numbers_of_pytorch(method, monkeypatch):
    logits, labels = random_batch(600, 100, 3.0, torch.float32, seed=4)
    logits[3, 5], logits[4, 7], logits[5] = torch.nan, torch.inf, -torch.inf
    loss, results = make_loss(method, p_k_of(method), 100, reduction="none"), []
    before = torch.get_num_threads()
    try:
        for threads, backend in ((1, "numba"), (4, "numba"), (4, "torch")):
            torch.set_num_threads(threads)
            monkeypatch.setenv(VARIABLE, backend)
            results.append(value_and_gradient(loss, logits, labels))
    finally:
        torch.set_num_threads(before)
    one, four, pytorch = results
    atol = 1e-6 if method in ("sinkhorn_sort", "soft_topk") else 0  # PyTorch whitens, in threads of its own
    torch.testing.assert_close(four, one, rtol=10 * atol, atol=atol, equal_nan=True)
    assert bool(one[0][3:5].isnan().all())
    torch.testing.assert_close(one[0], pytorch[0], rtol=1e-4, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(one[1][6:], pytorch[1][6:], rtol=1e-3, atol=1e-3 * float(pytorch[1][6:].abs().max()))


@st.composite
def problems(draw):
    """(scores float32, labels or distribution, operator): any size and scale, often with ties."""
    n = draw(st.integers(2, 40) | st.integers(41, 70))
    k = draw(st.integers(1, min(n, 8)))
    batch = draw(st.sampled_from([1, 2, 63, 64, 65, 130]))
    scale = draw(st.sampled_from([1e-4, 1e-2, 1.0, 10.0, 1e4]))
    scores, target = random_batch(batch, n, scale, torch.float32, draw(st.integers(0, 10**6)))
    if draw(st.booleans(), "ties"):
        scores = scores.bfloat16().float()
    if draw(st.booleans(), "masked"):
        scores[:, : n // 3] = -torch.inf
    if draw(st.booleans(), "a distribution"):
        target = random_batch(batch, n, dtype=torch.float32)[0].softmax(1)
    distribution, beta = draw(st.sampled_from(list(DISTRIBUTIONS))), draw(st.sampled_from([0.1, 0.5, 4.0, 60.0]))
    network = NETWORKS[draw(st.sampled_from(list(NETWORKS)))](n, k)
    return scores, target, RelaxedNetwork(network, beta, distribution)


@given(problems())
@settings(max_examples=80, deadline=None)
def test_networks_agree_with_float64(problem):
    scores, target, operator = problem
    exact = target.double() if target.is_floating_point() else target
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "numba")
        assert kernel("carry_mass", scores) is not None
        got, gradient = column_and_gradient(operator, scores, target)
    want, want_gradient = column_and_gradient(operator, scores.double(), exact)
    # The rounding of the scores, which are float32, moves each swap by beta times as much.
    size = float(scores[scores > -torch.inf].abs().max())
    slack = 20 * torch.finfo(torch.float32).eps * operator.inverse_temperature * size
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5 + slack)
    # A comparator's gradient is of the size of beta times the weights. Where float32 rounds a tie or a small
    # difference, logistic_phi has the slope of another difference: so it is for PyTorch's float32 too, and the sum
    # over a row, which is 0, tells errors of the rest.
    largest = want_gradient.abs().amax(1, keepdim=True)
    if operator.distribution != "logistic_phi":
        atol = 1e-3 * float(largest.max()) + operator.inverse_temperature * (slack + 1e-6)
        torch.testing.assert_close(gradient.double(), want_gradient, rtol=1e-2, atol=atol)
    sums = gradient.double().sum(1, keepdim=True).abs()
    assert bool((sums <= 1e-4 * largest + 1e-5 * operator.inverse_temperature).all())


@pytest.mark.parametrize("method", ["lml", "lapsum", "capped_softmax", "sparse_topk", "recall_surrogate"])
def test_masks_have_the_same_bits_wherever_arrays_lie(method):
    """Room that is next to other room by chance took the loop of single numbers, whose sums round differently."""
    logits, labels = random_batch(3, 16, 1.0, torch.float32)
    loss, seen = TopKCrossEntropyLoss(method, [0.25, 0.25, 0.25, 0, 0.25], reduction="none"), set()
    for _ in range(100):
        held = [torch.empty(int(torch.randint(1, 4000, ()))) for _ in range(3)]  # so that what follows lies elsewhere
        results = value_and_gradient(loss, logits, labels)
        seen.add(b"".join(each.numpy().tobytes() for each in results))
        del held
    assert len(seen) == 1


@given(st.integers(0, 10**6), st.integers(1, 200) | st.integers(1000, 1100), st.integers(1, 60), st.data())
@settings(max_examples=150, deadline=None)
def test_the_largest_columns_are_those_of_topk(seed, n, m, data):
    m = min(m, n)
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(data.draw(st.integers(0, 9)), n, generator=generator)
    kind = data.draw(st.sampled_from(["distinct", "ties", "sorted", "bad values", "equal"]))
    if kind == "ties":
        scores = scores.round()
    elif kind == "sorted":
        scores = scores.sort(1, descending=data.draw(st.booleans())).values
    elif kind == "bad values":
        bad = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0])
        chosen = torch.randint(4, scores.shape, generator=generator)
        scores = torch.where(torch.rand(scores.shape, generator=generator) < 0.1, bad[chosen], scores)
    elif kind == "equal":
        scores = torch.zeros_like(scores)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "numba")
        (index,) = kernel("largest", scores)(scores, m)
    assert torch.equal(index, scores.sort(dim=1, descending=True, stable=True).indices[:, :m])


@pytest.mark.parametrize("method", ["splitter_selection", "lapsum", "subset_topk"])
def test_a_compiled_graph_holds_the_kernel(method):
    torch._dynamo.reset()
    loss, graphs = TopKCrossEntropyLoss(method, {1: 0.5, 5: 0.5}, 12), []

    def backend(graph, _):
        graphs.append(graph.code)
        return graph

    torch.compile(loss, fullgraph=True, backend=backend)(*random_batch(dtype=torch.float32))
    assert re.search(r"topk_losses\.\w+_cpu", graphs[0])


@pytest.mark.parametrize("family", ["logistic", "linear", "ranks"])
def test_a_kernel_is_an_operator_of_pytorchs(family):
    logits, labels = random_batch(dtype=torch.float32)
    assert kernel("masks", logits) is not None
    inputs = (logits.requires_grad_(), labels, torch.tensor(0.3), [1, 4], family, True)
    utilities = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.topk_losses.masks_cpu, inputs, test_utils=utilities)


def _in_a_child(connection) -> None:
    # A batch small enough for PyTorch's own operations to stay in one thread: those of OpenMP hang after a fork.
    torch.set_num_threads(4)
    operator = make_operator("splitter_selection", 1000, 5)
    connection.send(operator.rank_probabilities(torch.zeros(30, 1000), torch.zeros(30, dtype=torch.long)).sum().item())


def test_a_forked_process_has_threads_of_its_own():
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    before = torch.get_num_threads()
    try:
        _in_a_child(sender)  # starts the threads of this process
    finally:
        torch.set_num_threads(before)
    want = receiver.recv()
    child = context.Process(target=_in_a_child, args=(sender,), daemon=True)
    child.start()
    try:
        assert receiver.poll(60), "the forked process hangs"
        assert receiver.recv() == pytest.approx(want)
    finally:
        child.kill()
        child.join()


# The code that is kept.


def test_a_change_of_any_source_of_the_library_leaves_no_kernel_in_force(tmp_path):
    """The compiled code lies in a folder named by the sources: a changed formula finds none."""
    shutil.copytree(Path(topk_losses.__file__).parent, tmp_path / "topk_losses", ignore=shutil.ignore_patterns("*pyc*"))
    program = (
        "import torch, topk_losses; "
        "operator = topk_losses.RelaxedNetwork(topk_losses.bitonic(4, 1), 1.0, distribution='reciprocal'); "
        "print(float(operator.rank_probabilities(torch.arange(4.0).view(1, 4), torch.tensor([3]))))"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def computed():
        done = subprocess.run([sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
        return float(done.stdout)

    first = computed()
    assert computed() == first
    assert any((tmp_path / "cache").rglob("*.nbi"))
    formulas = tmp_path / "topk_losses" / "sigmoids.py"
    formulas.write_text(formulas.read_text().replace("1.0 / (2.0 + u)", "1.0 / (3.0 + u)"))
    assert computed() != first


def doubled(x):
    return x + x


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Compile `doubled` anew, as in a new process; its code is kept in tmp_path."""
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    return lambda: numba_support.jit(doubled)


@pytest.mark.parametrize("damage", [b"", b"garbage", None], ids=["empty", "garbage", "truncated"])
@pytest.mark.parametrize("kind", ["nbi", "nbc"])
def test_kept_code_that_is_damaged_is_thrown_away(kept, tmp_path, kind, damage):
    assert kept()(2) == 4
    (file,) = tmp_path.rglob(f"*.{kind}")
    whole = file.read_bytes()
    file.write_bytes(whole[:-9] if damage is None else damage)
    for hits in (0, 1):
        again = kept()
        assert (again(2), sum(again.stats.cache_hits.values())) == (4, hits)


def test_code_that_cannot_be_kept_is_compiled_all_the_same(kept, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile.save", full)
    with pytest.warns(UserWarning, match=f"cannot be kept in {tmp_path}.*No space left"):
        assert kept()(2) == 4
