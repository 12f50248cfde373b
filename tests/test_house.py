"""Which package may import which, and what stands at the top of a folder of scripts."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = ("topk_losses", "models", "data", "experiments", "studies", "reporting", "benchmarks", "scripts")
FORBIDDEN = {
    "topk_losses": {*PACKAGES, "torchvision", "difftopk"} - {"topk_losses"},
    "models": {*PACKAGES} - {"models"},
    "data": {*PACKAGES} - {"data"},
    "experiments": {"studies", "reporting", "benchmarks", "scripts"},
    "studies": {"reporting", "benchmarks", "scripts"},
    "reporting": {"benchmarks", "scripts"},
    "benchmarks": {"studies", "reporting", "scripts"},
    "scripts": set(),
}
EXECUTABLE = {
    f"experiments.{path.stem}" for path in (ROOT / "experiments").glob("*.py") if "__main__" in path.read_text()
}
KERNELS = {"cuda": {"triton"}, "cpu": {"numba", "numpy"}, "numba": {"numba", "numpy"}}  # by a file's first word
# A script that states only what differs from another one.
VARIANTS = {
    "experiments/finetune_imagenet21k.py": {"experiments.finetune_imagenet"},
}


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_what_they_may(package):
    for path in (ROOT / package).rglob("*.py"):
        imported = set(imported_modules(path))
        assert not {name.split(".")[0] for name in imported} & FORBIDDEN[package], path
        allowed = VARIANTS.get(path.relative_to(ROOT).as_posix(), set())
        assert not imported & (EXECUTABLE - allowed), f"{path} imports a script"


@pytest.mark.parametrize("folder", ["experiments", "scripts"])
def test_a_folder_of_scripts_shows_at_its_top_what_one_runs(folder):
    """What they share lies in sub-packages; what scripts source ends in .sh, too."""
    for path in (ROOT / folder).iterdir():
        runnable = path.suffix == ".py" and ("__main__" in path.read_text() or path.stem == "__init__")
        assert path.is_dir() or runnable or path.suffix == ".sh", path


def test_the_library_imports_torch_and_the_standard_library_only():
    """And what torch cannot do without. Its kernels, imported only where they run, import their compiler too."""
    for path in (ROOT / "topk_losses").rglob("*.py"):
        names = {name.split(".")[0] for name in imported_modules(path)}
        kernels = KERNELS.get(path.stem.partition("_")[0], set()) if path.parent.name == "kernels" else set()
        assert names <= {"torch", "typing_extensions", "topk_losses"} | kernels | sys.stdlib_module_names, path


def test_importing_the_library_prints_nothing_and_loads_no_other_package():
    program = (
        "import sys, torch, topk_losses\n"
        "others = {'models', 'data', 'experiments', 'difftopk', 'torchvision', 'torch._dynamo'}\n"
        "assert not others & set(sys.modules)\n"
        "marked = torch.compiler.assume_constant_result(lambda: None)\n"
        "assert vars(topk_losses.kernels.load_kernel) == vars(marked) != {}"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
