"""A failing command ends the Python scripts that start others, and no later stage begins.

The later stages of tuned studies: tests/studies/test_tuning.py.

The commands of these scripts start .venv/bin/python in the working directory: here a stand-in, which notes its words
and fails where it is asked to.
"""

import io
import sys

import pytest

from scripts import launch, relabel, study

SCRIPTS = {"launch.py": launch, "study.py": study}
STAND_IN = """#!/bin/bash
echo "$*" >> calls
[ "$(wc -l < calls)" -lt "$FAIL_FROM" ] || exit 7
"""
NOISE = "study.py noise {trained}/heads.pt --folder {trained} --losses cross_entropy"
CALLS = {  # the words of a script, and how many commands its first stage has
    "launch.py": 1,
    "study.py quickstart": 4,
    "study.py heads {trained}/heads.pt --methods softmax_cross_entropy": 1,
    f"{NOISE} --human {{trained}}/people.pt --labels human symmetric_.4_again": 2,
}


@pytest.fixture
def called(trained, tmp_path, monkeypatch):
    """Call a script where a stand-in fails from a command on; return its status and the words of the commands."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").write_text(STAND_IN)
    (tmp_path / ".venv" / "bin" / "python").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(launch, "RETRY_SECONDS", 0)
    monkeypatch.setattr(relabel, "NUM_VALID", 100)  # of the few rows

    def call(words: str, fail_from: int) -> tuple[int, list[str]]:
        (tmp_path / "calls").write_text("")
        monkeypatch.setenv("FAIL_FROM", str(fail_from))
        script, *others = words.format(trained=trained).split()
        lines = ".venv/bin/python any words\n" if script == "launch.py" else ""
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        monkeypatch.setattr(sys, "argv", [script, *others, "--logs", str(tmp_path / "logs"), "--jobs", "1"])
        return SCRIPTS[script].main(), (tmp_path / "calls").read_text().splitlines()

    return call


@pytest.mark.parametrize("words", CALLS, ids=lambda words: " ".join(words.split()[:2]))
def test_a_failed_stage_is_the_status_and_the_last(called, words):
    status, commands = called(words, fail_from=CALLS[words])
    # The last command of the first stage fails and is tried once more.
    assert (status, len(commands)) == (1, CALLS[words] + 1)
    assert commands[-1] == commands[-2]
