"""What Numba adds to the kernels: threads, forks, and code that is cached on disk."""

import importlib.util
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import topk_losses
from tests.methods import value_and_gradient
from tests.topk_losses.test_kernels import EAGER, arguments_of
from topk_losses.kernels import VARIABLE, find_kernel

pytest.importorskip("numba")
from topk_losses.kernels import numba_support


@pytest.fixture(autouse=True)
def _numba(monkeypatch):
    """Numba computes, and the number of threads is set back."""
    monkeypatch.setenv(VARIABLE, "numba")
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("operation", EAGER)
def test_many_threads_give_the_bits_of_one(operation):
    scores = torch.rand(600, 100, generator=torch.Generator().manual_seed(4))
    labels = torch.arange(600) % 100
    arguments = arguments_of(operation, 100, 5)
    results = []
    for number in (1, 4):
        torch.set_num_threads(number)
        results.append(
            value_and_gradient(lambda leaf: find_kernel(operation, leaf)(leaf, labels, *arguments)[0], scores)
        )
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_all_shares_are_done_when_the_threads_come_back():
    """A helper is held up in its share until the caller has nothing left to do, which must not come back before it."""
    caller = threading.get_ident()
    helped = threading.Event()
    returned = threading.Event()
    done = []
    results = torch.zeros(64)

    def slow(first, last, array):
        if threading.get_ident() == caller:
            assert helped.wait(60), "no helper has begun"
        else:
            helped.set()
            returned.wait(0.3)  # in vain, since the caller waits for this share
        array[first:last] += 1
        done.extend(range(first, last))

    torch.set_num_threads(4)
    numba_support.in_threads(slow, 64, 64, results)
    returned.set()
    assert sorted(done) == list(range(64))
    assert results.tolist() == [1] * 64


def test_what_goes_wrong_in_a_helper_is_raised_by_the_caller():
    caller = threading.get_ident()
    helped = threading.Event()

    def fails_in_helpers(first, last):
        if threading.get_ident() == caller:
            assert helped.wait(60), "no helper has begun"
        else:
            helped.set()
            raise ArithmeticError("of a helper")

    torch.set_num_threads(4)
    with pytest.raises(ArithmeticError, match="of a helper"):
        numba_support.in_threads(fails_in_helpers, 64, 64)


def _in_threads() -> float:
    # Scores few enough for PyTorch's own operations to stay in one thread: those of OpenMP hang after a fork.
    torch.set_num_threads(4)
    scores = torch.zeros(30, 1000)
    labels = torch.zeros(30, dtype=torch.long)
    return find_kernel("carry_mass", scores)(scores, labels, *arguments_of("carry_mass", 1000, 5))[0].sum().item()


def test_a_forked_process_has_threads_of_its_own():
    want = _in_threads()  # starts the threads of this process
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply_async(_in_threads).get(timeout=60) == pytest.approx(want)


PROGRAM = """
import torch
from topk_losses import RelaxedNetwork
operator = RelaxedNetwork("bitonic", "reciprocal")
print(float(operator.rank_probabilities(torch.arange(2.0), torch.tensor(1), 1)))
"""


PACKAGE = Path(topk_losses.__file__).parent
SOURCES = [path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py"))]


@pytest.fixture
def copied(tmp_path):
    """A copy of the package, whose sources a test may change."""
    return shutil.copytree(PACKAGE, tmp_path / "topk_losses", ignore=shutil.ignore_patterns("*pyc*"))


def test_a_second_process_compiles_nothing(tmp_path, copied):
    """Numba alone would compile the loop of a network, which is a closure, in every process."""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def compute():
        """What the program printed, and whether it saved code that it had compiled."""
        command = [sys.executable, "-c", PROGRAM]
        output = subprocess.check_output(
            command, env={**environment, "NUMBA_DEBUG_CACHE": "1"}, cwd=tmp_path, text=True
        )
        return output.splitlines()[-1], "data saved" in output

    first, has_compiled = compute()
    assert has_compiled
    assert compute() == (first, False)


def doubled(x):
    return x + x


def cached_files(folder):
    return {(path.name, path.stat().st_mtime_ns) for path in folder.rglob("*.nb?")}


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_a_change_in_any_source_compiles_anew(source, tmp_path, copied, monkeypatch):
    """A kernel holds constants of other files, as numbers."""
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path / "cache"))

    def compile_as_a_new_process_would():
        """The files that are in the cache then."""
        spec = importlib.util.spec_from_file_location("copy_of_numba_support", copied / "kernels" / "numba_support.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert module.jit(doubled)(2) == 4
        return cached_files(tmp_path)

    first = compile_as_a_new_process_would()
    assert compile_as_a_new_process_would() == first != set()
    with (copied / source).open("a") as file:
        file.write("# another comment\n")
    assert compile_as_a_new_process_would() != first


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """Compile `doubled` anew, as in a new process; its code is cached in tmp_path."""
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    return lambda: numba_support.jit(doubled)


@pytest.mark.filterwarnings("ignore:compiled kernels cannot be kept")
@pytest.mark.parametrize("damage", [b"", b"garbage", None], ids=["empty", "garbage", "truncated"])
@pytest.mark.parametrize("kind", ["nbi", "nbc"])
def test_a_damaged_cache_is_written_again(compiled, tmp_path, kind, damage):
    assert compiled()(2) == 4
    (file,) = tmp_path.rglob(f"*.{kind}")
    whole = file.read_bytes()
    file.write_bytes(whole[:-9] if damage is None else damage)
    for hits in (0, 1):
        again = compiled()
        assert (again(2), sum(again.stats.cache_hits.values())) == (4, hits)


def test_a_full_disk_costs_the_cache_alone(compiled, tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, before[1]))  # no file of this process grows beyond 16 bytes
    try:
        with pytest.warns(UserWarning, match=f"cannot be kept in {tmp_path}.*too large"):
            assert compiled()(2) == 4
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
