"""The Triton kernels compile for a GPU as they are launched, where there is none: what the interpreter lets pass."""

import importlib
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.topk_losses.test_kernels import MASKS, MODULES
from topk_losses import DISTRIBUTIONS, RelaxedNetwork, SinkhornSort, SubsetTopK, splitter_selection
from topk_losses.kernels import VARIABLE

triton = pytest.importorskip("triton")
jit = pytest.importorskip("triton.runtime.jit")
backends = pytest.importorskip("triton.backends.compiler")

TOOLS = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# What a launch asks of CUDA's driver before it has code to load.
HOPPER = SimpleNamespace(
    get_current_target=lambda: backends.GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
)

pytestmark = pytest.mark.skipif(not (TOOLS / "ptxas").exists(), reason="this Triton comes without ptxas")


@pytest.fixture
def launch(monkeypatch, tmp_path):
    """A function that compiles what an operator's column and its backward pass would launch."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(jit, "driver", SimpleNamespace(active=HOPPER))
    compiled = []
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
        module = importlib.import_module(name)
        for kernel in (getattr(module, each, None) for each in ("forward_kernel", "backward_kernel")):
            if kernel is None:
                continue
            run = kernel.run
            monkeypatch.setattr(
                kernel, "run", lambda *args, run=run, **flags: compiled.append(run(*args, **{**flags, "warmup": True}))
            )

    def launched(operator, scores, labels):
        monkeypatch.setattr("topk_losses.kernels.device_of_kernels", lambda device: "cuda")
        monkeypatch.setenv(VARIABLE, "triton")
        values, beside = operator.within(scores, labels, [1, operator.k], True)
        (values.sum() + beside.sum()).backward()
        assert [kernel.metadata.name for kernel in compiled] == ["forward_kernel", "backward_kernel"][: len(compiled)]
        assert len(compiled) == 1 + (not isinstance(operator, SubsetTopK))
        return compiled

    yield launched
    for name in MODULES:
        sys.modules.pop(name, None)


def stack_bytes(compiled, path):
    """Bytes per thread that did not fit into its registers."""
    cubin = path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    command = [TOOLS / "cuobjdump", "--dump-resource-usage", cubin]
    usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(usage.split("STACK:")[1].split()[0])


SIZES = [(1000, 50, distribution) for distribution in DISTRIBUTIONS]
SIZES += [(2, 1, "logistic_phi"), (16, 3, "gaussian"), (10450, 2, "optimal")]


@pytest.mark.parametrize(("n", "batch", "distribution"), SIZES)
def test_kernels_compile_and_keep_to_their_registers(launch, n, batch, distribution, tmp_path):
    network = RelaxedNetwork(splitter_selection(n, min(5, n)), 1.0, distribution)
    compiled = launch(network, torch.zeros(batch, n, requires_grad=True), torch.zeros(batch, dtype=torch.int64))
    for kernel in compiled:
        assert stack_bytes(kernel, tmp_path) == 0
        # A thread loads and stores a comparator's lanes: they need not change hands, nor wait but for the tile before.
        assert kernel.metadata.shared == 0
        assert kernel.asm["ptx"].count("bar.sync") == 1


OPERATORS = {**MASKS, "sinkhorn_sort": SinkhornSort, "subset_topk": SubsetTopK}


@pytest.mark.parametrize(("name", "n"), [*((name, 100) for name in OPERATORS), ("lml", 1000), ("sinkhorn_sort", 128)])
def test_the_other_kernels_compile_for_hopper(launch, name, n, tmp_path):
    scores = torch.zeros(2, n, requires_grad=True)
    for kernel in launch(OPERATORS[name](5, 1.0), scores, torch.zeros(2, dtype=torch.int64)):
        assert stack_bytes(kernel, tmp_path) == 0
