"""An own loss and an own operator, those of docs/extending.md, are methods of the training scripts."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.clones import copy_of_tracked_files
from tests.experiments.scripts import rows_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/extending.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^```shell\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
CLASSES = {"focal": "FocalLoss", "squared_softsort": "SquaredSoftSort"}
# Both methods in one process, each with flags and a results file of its own.
TRAIN = """
import json, sys
from experiments.finetune_imagenet import main
statuses = [main(words) for words in json.loads(sys.argv[1])]
sys.exit(max(statuses))
"""
WAYS = {"entry point": TRAIN, "register": f"import own_methods\n{TRAIN}"}
HEADS = "--num_valid 10 --batch_size 16 --n_epochs 1 --precision fp32 --device cpu --threads 1"
SIZE = "--dataset digits --limit_train 60 --batch_size 16 --n_epochs 1 --precision fp32 --device cpu --threads 1"
# The page's runs become small by what stands last.
PYTHON = f"""#!/bin/bash
[[ "$*" != *" --method "* ]] || set -- "$@" {SIZE}
exec {shlex.quote(sys.executable)} "$@"
"""
P_K = {"focal": "1 0 0 0 0", "squared_softsort": "0.2 0.2 0.2 0.2 0.2"}


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
def test_a_script_trains_with_an_own_method(way, package, tmp_path):
    if way == "register":
        (package / "entry_points.txt").unlink()
    rows = torch.randn(60, 8)
    labels = torch.arange(60) % 6
    splits = {"train_embeddings": rows, "train_labels": labels, "test_embeddings": rows, "test_labels": labels}
    torch.save(splits, tmp_path / "heads.pt")
    flags = [*HEADS.split(), "-d", str(tmp_path / "heads.pt")]
    calls = [[*flags, "--method", method, "--results", str(tmp_path / f"{method}.csv")] for method in CLASSES]
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = [sys.executable, "-c", WAYS[way], json.dumps(calls)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for method in CLASSES:
        (row,) = rows_of(tmp_path / f"{method}.csv")
        assert row["method"] == method
        assert row["p_k"] == P_K[method]


def test_the_pages_commands_train_a_variant_and_report_it_beside_table_1(tmp_path):
    """In a new clone, with the page's code as the module."""
    (commands,) = [block for block in COMMANDS if "my_module" in block]
    clone = copy_of_tracked_files(tmp_path / "clone")
    (clone / "my_module.py").write_text("".join(BLOCKS))
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(PYTHON)
    python.chmod(0o755)
    environment = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}", "PYTHONPATH": str(clone)}
    done = subprocess.run(["bash", "-eu", "-c", commands], cwd=clone, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = rows_of(clone / "results" / "table1_short.csv")
    assert [(row["method"], row["seed"]) for row in rows] == [("focal_1", seed) for seed in ("0", "1", "2")]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("| focal_1 ")]
    assert line.count("(3) |") == 2  # three seeds in top-1 and in top-5
    assert "Top-k DiffSortNets (splitter_selection)" in done.stdout


@pytest.mark.parametrize("method", CLASSES)
def test_an_own_class_has_at_most_15_statements(method):
    definition = source(method).rpartition("\nclass ")[2]
    code = [line for line in definition.splitlines() if line.strip() and not line.strip().startswith(('"""', "#"))]
    assert len(code) <= 15
