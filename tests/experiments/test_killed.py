"""Killed at any moment, a command that is given again ends with the bits of one that nobody disturbed."""

import random
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.experiments import scripts
from tests.experiments.scripts import MACHINE, SCRIPTS, name_of, outcome

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
KILLS = 3


def killed_and_repeated(command: list[str], seconds: float) -> None:
    """Kill the command at random moments of its work, then let it end."""
    moments = random.Random(0)
    for _ in range(KILLS):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            process.wait(timeout=moments.uniform(0.5, 0.95) * seconds)
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate()
    subprocess.run(command, check=True, capture_output=True)


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_training(script, tmp_path):
    flags = SCRIPTS[script].replace("EMBEDDINGS", str(scripts.embeddings(tmp_path / "e.pt")))
    command = [sys.executable, str(EXPERIMENTS / f"{name_of(script)}.py"), *shlex.split(flags), *MACHINE.split()]
    started = time.monotonic()
    subprocess.run([*command, "--results", str(tmp_path / "whole" / "r.csv")], check=True, capture_output=True)
    killed_and_repeated([*command, "--results", str(tmp_path / "killed" / "r.csv")], time.monotonic() - started)
    assert outcome(tmp_path / "killed" / "r.csv") == outcome(tmp_path / "whole" / "r.csv")
    names = [
        {path.relative_to(tmp_path / name) for path in (tmp_path / name).rglob("*")} for name in ("killed", "whole")
    ]
    assert {path for path in names[0] if path.suffix != ".tmp"} == names[1]


def test_extraction(tmp_path):
    flags = "--dataset digits --backbone test_resnet --weights none --resolution 32 --shard_rows 200 --workers 0"
    command = [
        sys.executable,
        str(EXPERIMENTS / "extract_embeddings.py"),
        *flags.split(),
        "--device",
        "cpu",
        "--threads",
        "1",
    ]
    started = time.monotonic()
    subprocess.run([*command, "--output", str(tmp_path / "whole" / "e.pt")], check=True, capture_output=True)
    killed_and_repeated([*command, "--output", str(tmp_path / "killed" / "e.pt")], time.monotonic() - started)
    assert (tmp_path / "killed" / "e.pt").read_bytes() == (tmp_path / "whole" / "e.pt").read_bytes()
    assert [path.name for path in (tmp_path / "killed").iterdir()] == ["e.pt"]
