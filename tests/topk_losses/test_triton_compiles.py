"""The Triton kernels compile for a GPU as they are launched, where there is none: what the interpreter lets pass."""

import importlib
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from topk_losses import DISTRIBUTIONS, RelaxedNetwork, splitter_selection

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
    """A function that compiles what carry_mass and its backward pass would launch."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delitem(sys.modules, "topk_losses.kernels.cuda", raising=False)
    monkeypatch.setattr(jit, "driver", SimpleNamespace(active=HOPPER))
    cuda = importlib.import_module("topk_losses.kernels.cuda")
    compiled = []
    for kernel in (cuda.forward_kernel, cuda.backward_kernel):
        run = kernel.run
        monkeypatch.setattr(
            kernel, "run", lambda *args, run=run, **options: compiled.append(run(*args, **{**options, "warmup": True}))
        )

    def launched(network, scores, labels):
        monkeypatch.setattr("topk_losses.kernels.device_of_kernels", lambda device: "cuda")
        network.rank_probabilities(scores, labels).sum().backward()
        return compiled

    yield launched
    sys.modules.pop("topk_losses.kernels.cuda", None)


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
    assert [kernel.metadata.name for kernel in compiled] == ["forward_kernel", "backward_kernel"]
    for kernel in compiled:
        assert stack_bytes(kernel, tmp_path) == 0
        # A thread loads and stores a comparator's lanes: they need not change hands, nor wait but for the tile before.
        assert kernel.metadata.shared == 0
        assert kernel.asm["ptx"].count("bar.sync") == 1
