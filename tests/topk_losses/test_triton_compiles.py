"""Every Triton kernel compiles for a GPU, where there is none: this finds what the interpreter lets pass."""

import inspect
import pathlib
import subprocess

import pytest
from topk_losses.backend import MOST_TAKEN

from topk_losses import DISTRIBUTIONS, make_operator

triton = pytest.importorskip("triton")
compiler = pytest.importorskip("triton.compiler")
backends = pytest.importorskip("triton.backends.compiler")
jit = pytest.importorskip("triton.runtime.jit")

TOOLS = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
HOPPER = backends.GPUTarget("cuda", 90, 32)
INTEGERS = {"batch", "n", "k", "m", "num_tiles", "num_comparators"}
POINTERS = {"labels": "*i64", "order": "*i64", "indices": "*i32", "tiles": "*i32", "first": "*i32"}
FLOATS = {"beta", "art_lambda", "art_tie_factor"}

pytestmark = pytest.mark.skipif(not (TOOLS / "ptxas").exists(), reason="this Triton comes without ptxas")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compile_kernel(module, name, constants, options, **types):
    """The kernel as a launch with aligned tensors of float32, or of the `types` given, compiles it."""
    kernel = getattr(module, name)
    if not isinstance(kernel, jit.JITFunction):
        pytest.skip("TRITON_INTERPRET is set, and an interpreted kernel has nothing to compile")
    signature = {}
    for argument in inspect.signature(kernel.fn).parameters:
        kind = "i32" if argument in INTEGERS else "fp32" if argument in FLOATS else POINTERS.get(argument, "*fp32")
        signature[argument] = "constexpr" if argument in constants else types.get(argument, kind)
    aligned = {
        (parameter.num,): [["tt.divisibility", 16]]
        for parameter in kernel.params
        if signature[parameter.name].startswith("*") and not parameter.do_not_specialize_on_alignment
    }
    source = compiler.ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=HOPPER, options=options)


def stack_bytes(compiled, path):
    """Bytes per thread that did not fit into its registers."""
    cubin = path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    command = [TOOLS / "cuobjdump", "--dump-resource-usage", cubin]
    usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(usage.split("STACK:")[1].split()[0])


def network_launch(n, distribution="logistic_phi"):
    from topk_losses import triton_networks

    width = make_operator("splitter_selection", n, min(5, n - 1)).tiles.shape[2]
    _, constants, options = triton_networks.launch_shape(500, n, width)
    return triton_networks, constants | {"FAMILY": distribution}, options


NETWORKS = [(1000, distribution) for distribution in DISTRIBUTIONS] + [
    (2, "logistic"),
    (16, "cauchy"),
    (10450, "cauchy"),
]


@pytest.mark.parametrize(("n", "distribution"), NETWORKS)
def test_networks_compile_and_keep_to_their_registers(n, distribution, tmp_path):
    module, constants, options = network_launch(n, distribution)
    if n == 2:  # a launch compiles integers in that are 1
        constants |= {"batch": 1, "k": 1, "num_tiles": 1, "num_comparators": 1}
    for one_hot, save in ((True, True), (False, False)):
        flags = {"ONE_HOT": one_hot, "SAVE": save, "K": 8}
        labels = "*i64" if one_hot else "*i32"
        forward = compile_kernel(module, "carry_mass_forward", constants | flags, options, labels=labels)
        assert stack_bytes(forward, tmp_path) == 0
    backward = compile_kernel(module, "carry_mass_backward", constants, options)
    assert stack_bytes(backward, tmp_path) == 0
    if n >= 1000:
        # A thread loads and stores a comparator's lanes: they need not change hands, nor wait but for the tile before.
        assert backward.metadata.shared == 0
        assert backward.asm["ptx"].count("bar.sync") == 1


@pytest.mark.parametrize("n", [16, 1000, 4000])
def test_sorts_compile_and_keep_to_their_registers(n, tmp_path):
    from topk_losses import triton_sorts

    constants, options = triton_sorts.launch_shape(n)
    for name in ("neuralsort_forward", "neuralsort_backward"):
        assert stack_bytes(compile_kernel(triton_sorts, name, constants, options), tmp_path) == 0
    constants, options = triton_sorts.launch_shape(n, 5)
    for name in ("softsort_forward", "softsort_backward"):
        assert stack_bytes(compile_kernel(triton_sorts, name, constants, options), tmp_path) == 0


@pytest.mark.parametrize("n", [16, 1000, 10450])
@pytest.mark.parametrize("dtype", ["*fp32", "*fp16", "*bf16"])
def test_top_m_compiles_and_keeps_to_its_registers(n, dtype, tmp_path):
    from topk_losses import triton_sorts

    constants, options = triton_sorts.launch_shape(n)
    compiled = compile_kernel(triton_sorts, "top_m_forward", constants, options, logits=dtype, indices="*i64")
    assert stack_bytes(compiled, tmp_path) == 0


@pytest.mark.parametrize("k", [1, MOST_TAKEN])
def test_the_fewest_and_the_most_ranks_compile(k):
    from topk_losses import triton_sorts

    constants, options = triton_sorts.launch_shape(100, k)
    if k == 1:  # a launch compiles integers in that are 1
        constants["k"] = 1
        compile_kernel(triton_sorts, "neuralsort_forward", {"N": 128, "k": 1}, options)
        compile_kernel(triton_sorts, "neuralsort_backward", {"N": 128, "k": 1}, options)
    for name in ("softsort_forward", "softsort_backward"):
        compile_kernel(triton_sorts, name, constants, options)
