"""The examples in the docstrings of the library run, and print what stands there."""

import ast
import doctest
from pathlib import Path

import pytest
import torch

import topk_losses

PACKAGE = Path(topk_losses.__file__).parent
HAVE_DOCSTRINGS = (ast.Module, ast.ClassDef, ast.FunctionDef)


def docstrings_with_code():
    """(name, docstring) wherever one has an example, or a section of that name."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = ast.get_docstring(node) if isinstance(node, HAVE_DOCSTRINGS) else None
            if text and (">>>" in text or "Example:" in text):
                yield f"{path.relative_to(PACKAGE)}:{getattr(node, 'name', 'module')}", text


EXAMPLES = dict(docstrings_with_code())


def test_the_package_and_its_loss_have_an_example():
    assert {"__init__.py:module"} < {*EXAMPLES}
    assert any(name.endswith(":TopKCrossEntropyLoss") for name in EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_prints_what_it_says(name):
    names = {"torch": torch, **{export: getattr(topk_losses, export) for export in topk_losses.__all__}}
    test = doctest.DocTestParser().get_doctest(EXAMPLES[name], names, name, name, 0)
    assert any(any(digit.isdigit() for digit in example.want) for example in test.examples), "no value is printed"
    said = []
    doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert said == []
