"""An own loss and an own operator, those of docs/extending.md, are methods of the training scripts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.experiments.scripts import rows_of

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/extending.md").read_text(), re.MULTILINE | re.DOTALL)
CLASSES = {"focal": "FocalLoss", "squared_softsort": "SquaredSoftSort"}
WAYS = {
    "entry point": [str(ROOT / "experiments/train_cifar100.py")],
    "register": ["-c", "import own_methods; from experiments.train_cifar100 import main; main()"],
}


def source(method: str) -> str:
    """The module that the page writes, up to the call that registers the method."""
    code = "".join(BLOCKS)
    end = re.search(rf"^register_\w+\(\"{method}\".*\n", code, re.MULTILINE).end()
    return code[:end]


@pytest.fixture
def package(tmp_path):
    """An installed package, as far as Python is concerned: a module, and the entry points of a distribution."""
    about = tmp_path / "own_methods-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own-methods\nVersion: 1.0\n")
    lines = [f"{method} = own_methods:{name}" for method, name in CLASSES.items()]
    (about / "entry_points.txt").write_text("\n".join(["[topk_losses.methods]", *lines, ""]))
    (tmp_path / "own_methods.py").write_text(source("squared_softsort"))
    return about


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", CLASSES)
def test_a_script_trains_with_an_own_method(method, way, package, tmp_path):
    if way == "register":
        (package / "entry_points.txt").unlink()
    results = tmp_path / "results.csv"
    flags = f"--dataset digits --limit_train 60 --batch_size 16 --n_epochs 1 --method {method} --device cpu --threads 1"
    command = [sys.executable, *WAYS[way], *flags.split(), "--results", str(results)]
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (row,) = rows_of(results)
    assert row["method"] == method
    assert row["p_k"] == {"focal": "1 0 0 0 0", "squared_softsort": "0.2 0.2 0.2 0.2 0.2"}[method]


@pytest.mark.parametrize("method", CLASSES)
def test_an_own_class_has_at_most_15_statements(method):
    definition = source(method).rpartition("\nclass ")[2]
    code = [line for line in definition.splitlines() if line.strip() and not line.strip().startswith(('"""', "#"))]
    assert len(code) <= 15
