"""How dense the code is: facts per statement. Lines are not counted."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Packages, and the comprehensions that 100 of their statements may have.
PACKAGES = {"experiments": 4, "data": 4, "models": 4, "studies": 4, "reporting": 6, "scripts": 4}


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


@pytest.mark.parametrize("package", PACKAGES)
def test_a_line_has_one_fact(package):
    nodes = nodes_of(package)
    assert [ast.unparse(node) for node in nodes if assigns_several_values(node)] == []
    hundreds = sum(isinstance(node, ast.stmt) and not is_docstring(node) for node in nodes) / 100
    assert sum(isinstance(node, COMPREHENSIONS) for node in nodes) <= PACKAGES[package] * hundreds
    assert sum(isinstance(node, ast.IfExp) for node in nodes) <= 2 * hundreds


@pytest.mark.parametrize("package", PACKAGES)
def test_functions_are_short_and_take_few_parameters(package):
    for node in nodes_of(package):
        if isinstance(node, FUNCTIONS):
            arguments = node.args
            names = [part.arg for part in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]]
            assert statements(node) - 1 <= 30, node.name
            assert len([name for name in names if name not in ("self", "cls", "ctx")]) <= 8, node.name
