"""How dense the code is: facts per statement. Lines are not counted.

ruff (pyproject.toml) limits the length, the parameters and the branches of a function: PLR0915, PLR0913, C901. Here is
what it has no rule for, and the library's own limit of statements.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Packages, and the comprehensions that 100 of their statements may have.
PACKAGES = {
    "topk_losses": 4,
    "experiments": 4,
    "data": 4,
    "models": 4,
    "studies": 4,
    "reporting": 6,
    "scripts": 4,
    "benchmarks": 4,
}
INLINE_IFS = 2
LONGEST_OF_THE_LIBRARY = 25
TRITON = ("cuda_networks.py",)  # a function is one kernel


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def statements(node: ast.AST) -> int:
    return sum(isinstance(child, ast.stmt) and not is_docstring(child) for child in ast.walk(node))


def assigns_several_values(node: ast.AST) -> bool:
    """Whether a statement assigns unrelated values at once; a swap does not."""
    if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
        return False
    target = node.targets[0]
    if not isinstance(target, ast.Tuple):
        return False
    return {ast.unparse(part) for part in target.elts} != {ast.unparse(part) for part in node.value.elts}


def nodes_of(package: str) -> list[ast.AST]:
    nodes = []
    for path in sorted((ROOT / package).rglob("*.py")):
        nodes += ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return nodes


@pytest.mark.parametrize("package", [*PACKAGES, "tests"])
def test_a_line_assigns_one_value(package):
    assert [ast.unparse(node) for node in nodes_of(package) if assigns_several_values(node)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_a_line_has_one_fact(package):
    nodes = nodes_of(package)
    hundreds = sum(isinstance(node, ast.stmt) and not is_docstring(node) for node in nodes) / 100
    assert sum(isinstance(node, COMPREHENSIONS) for node in nodes) <= PACKAGES[package] * hundreds
    assert sum(isinstance(node, ast.IfExp) for node in nodes) <= INLINE_IFS * hundreds


def functions_of(folder: Path) -> Iterator[tuple[Path, ast.AST]]:
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, FUNCTIONS):
                yield path, node


def test_functions_of_the_library_are_short():
    long = []
    for path, function in functions_of(ROOT / "topk_losses"):
        if path.name not in TRITON and statements(function) - 1 > LONGEST_OF_THE_LIBRARY:
            long.append(f"{path.name}: {function.name}")
    assert long == []


@pytest.mark.parametrize("package", PACKAGES)
def test_ruff_refuses_long_and_wide_functions(package):
    body = "\n".join(["    value = value + 1"] * 31)
    parameters = ", ".join(f"p{number}" for number in range(9))
    branches = "\n".join(f"    if p{number % 9}:\n        value = {number}" for number in range(11))
    source = f"def long(value):\n{body}\n\n\ndef wide({parameters}):\n    value = 0\n{branches}\n    return value\n"
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--output-format=concise",
        f"--stdin-filename={package}/new.py",
        "-",
    ]
    found = subprocess.run(command, input=source, cwd=ROOT, capture_output=True, text=True)
    assert set(re.findall("PLR0913|PLR0915|C901", found.stdout)) == {"PLR0913", "PLR0915", "C901"}, found.stderr
