"""A study in a copy of the repository, as a new clone has it: it trains, continues, is reported and has a status."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.common.paths import ROOT
from experiments.common.rows import read_rows

SMALL = ["--n_epochs", "1", "--limit_train", "64", "--device", "cpu", "--threads", "1", "--jobs", "2"]


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A copy of the tracked files, with this environment."""
    folder = tmp_path_factory.mktemp("clone")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if name.startswith(("docs/", "tests/")) or not (ROOT / name).is_file():
            continue
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


def called(clone: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(clone), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "scripts/study.py", *words],
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_new_clone_trains_and_a_second_call_skips(clone):
    before = {path: path.read_bytes() for path in (clone / "results" / "repository").rglob("*.csv")}
    assert read_rows(clone / "results" / "repository" / "table1.csv")
    status = called(clone, "table1", "--status").splitlines()[-1]
    assert status.startswith("# table1: 0 of 20 runs done; commands: 0 running, 0 failed, 20 waiting")
    words = ["quickstart", *SMALL]
    first = called(clone, *words)
    assert "quickstart: 4 of 4 runs done (4 trained, 0 skipped), 0 failed" in first
    assert "No run of yours has repository runs to be compared with." in first  # of one epoch
    assert len(read_rows(clone / "results" / "quickstart.csv")) == 4
    second = called(clone, *words)
    assert "quickstart: 4 of 4 runs done (0 trained, 4 skipped), 0 failed" in second
    assert second.partition("Quickstart: ")[2] == first.partition("Quickstart: ")[2]
    status = called(clone, *words, "--status").splitlines()[-1]
    assert status.startswith("# quickstart: 4 of 4 runs done")
    assert {path: path.read_bytes() for path in before} == before
