"""The Triton kernels compile for a GPU as they are launched, where there is none: what the interpreter lets pass."""

import importlib
import pathlib
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.topk_losses.test_kernels import settings_of
from topk_losses import DISTRIBUTIONS, splitter_selection

triton = pytest.importorskip("triton")
jit = pytest.importorskip("triton.runtime.jit")
backends = pytest.importorskip("triton.backends.compiler")

TRITON = "topk_losses.kernels.cuda_networks"
TOOLS = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# What a launch asks of CUDA's driver before it has code to load.
HOPPER = SimpleNamespace(
    get_current_target=lambda: backends.GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
)
SIZES = [(1000, 50, distribution) for distribution in DISTRIBUTIONS]
SIZES += [(2, 1, "logistic_phi"), (16, 3, "gaussian"), (10450, 2, "optimal")]

pytestmark = pytest.mark.skipif(not (TOOLS / "ptxas").exists(), reason="this Triton comes without ptxas")


@pytest.mark.parametrize(("n", "batch", "distribution"), SIZES)
def test_kernels_compile_forward_and_backward(n, batch, distribution, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(jit, "driver", SimpleNamespace(active=HOPPER))
    monkeypatch.delitem(sys.modules, TRITON, raising=False)
    module = importlib.import_module(TRITON)
    compiled = []
    run = module.carry_kernel.run

    def compile_alone(*arguments, **flags):
        compiled.append(run(*arguments, **{**flags, "warmup": True}))

    monkeypatch.setattr(module.carry_kernel, "run", compile_alone)
    scores = torch.zeros(batch, n, requires_grad=True)
    arguments = settings_of(splitter_selection(n, min(5, n)), 1.0, distribution)
    column = torch.ops.topk_losses.carry_mass_cuda(scores, torch.zeros(batch, dtype=torch.int64), *arguments)[0]
    column.sum().backward()
    monkeypatch.delitem(sys.modules, TRITON)  # it stands on a driver that is none
    assert len(compiled) == 2
    assert all(kernel.asm["cubin"].startswith(b"\x7fELF") for kernel in compiled)
