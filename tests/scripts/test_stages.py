"""A failing command ends the Python scripts that start others, and no later stage begins.

The commands of these scripts start .venv/bin/python in the working directory: here a stand-in, which notes its words
and fails where told.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts.trained import rows_of

ROOT = Path(__file__).parents[2]
STAND_IN = """#!/bin/bash
echo "$*" >> calls
[ "$(wc -l < calls)" -lt "$FAIL_FROM" ] || exit 7
"""
HEADS = "heads.py trials finals -d {trained}/heads.pt --methods softmax_cross_entropy --trials {trained}/trials.csv"
NOISE = "noise.py -d {trained}/heads.pt --folder {trained} --results {trained}/noise --losses cross_entropy"
CALLS = {  # the words of a script, and how many commands its first stage has
    "launch.py": 1,
    "sweeps.py quickstart": 4,
    HEADS: 1,
    f"{NOISE} --human {{trained}}/people.pt --labels human symmetric_.4_again": 2,
}


@pytest.fixture
def called(trained, tmp_path):
    """Call a script where a stand-in fails from a command on; return its status and the words of the commands."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").write_text(STAND_IN)
    (tmp_path / ".venv" / "bin" / "python").chmod(0o755)

    def call(words: str, fail_from: int) -> tuple[int, list[str]]:
        (tmp_path / "calls").write_text("")
        script, *others = words.format(trained=trained).split()
        others += ["--logs", str(tmp_path / "logs"), "--jobs", "1"]
        command = [sys.executable, ROOT / "scripts" / script, *others]
        environment = {**os.environ, "FAIL_FROM": str(fail_from), "CUDA_VISIBLE_DEVICES": ""}
        lines = ".venv/bin/python any words\n" if script == "launch.py" else ""
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, input=lines, capture_output=True, text=True, timeout=300
        )
        return done.returncode, (tmp_path / "calls").read_text().splitlines()

    return call


@pytest.mark.parametrize("words", CALLS, ids=lambda words: words.split()[0])
def test_a_failed_stage_is_the_status_and_the_last(called, words):
    status, commands = called(words, fail_from=CALLS[words])
    # The last command of the first stage fails and is tried once more.
    assert (status, len(commands)) == (1, CALLS[words] + 1)
    assert commands[-1] == commands[-2]


def test_stages_follow_one_another_where_none_fails(called, trained):
    """So the later stages, which a failed one must keep from beginning, were there to begin."""
    status, commands = called(HEADS, fail_from=100)
    assert status == 0
    assert ["--seeds 1 2 3 4 5 6 7 8 9 10" in words for words in commands] == [False, True]
    chosen = max(
        (row for row in rows_of(trained / "trials.csv") if row["method"] == "softmax_cross_entropy"),
        key=lambda row: float(row["valid_top1"]) + float(row["valid_top5"]),
    )
    assert f"--lr {chosen['lr']}" in commands[1]
