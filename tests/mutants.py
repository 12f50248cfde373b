"""Planted faults, each of which some test must see: python tests/mutants.py [name ...]

Each fault is planted in a copy of the working tree, and the tests that should see it run there without it and with
it. Prints killed, survived, broken (the tests fail without it) or stale (the text it changes is not there), and a
total; the status is 1 unless all are killed. pytest does not collect this file; tests/test_mutants.py asks for stale.

The faults stand in tests/faults/*.txt. A fault is its name and what it is (#), the text that stands once in a file (-),
and what takes its place (+); each may have several lines. Above the faults of a file stand the file and the tests that
should see them (@).
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FAULTS = Path(__file__).with_name("faults")
LEFT_OUT = (".git", ".venv*", "__pycache__", ".*_cache", ".hypothesis", "downloads", "runs", "logs", "site")
LIMIT_SECONDS = 600


class Fault(NamedTuple):
    name: str
    what: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]


def read_faults() -> list[Fault]:
    """Read the faults of all files, in the order of their names."""
    faults = []
    for file in sorted(FAULTS.glob("*.txt")):
        path = ""
        tests = ()
        for block in file.read_text(encoding="utf-8").split("\n\n"):
            lines = block.strip("\n").split("\n")
            if lines[0].startswith("@ "):
                path, _, listed = lines.pop(0)[2:].partition(": ")
                tests = tuple(listed.split())
            name, _, what = lines[0].removeprefix("# ").partition(": ")
            old = "\n".join(line[2:] for line in lines[1:] if line.startswith("-"))
            new = "\n".join(line[2:] for line in lines[1:] if line.startswith("+"))
            faults.append(Fault(name, what, path, old, new, tests))
    return faults


def is_stale(fault: Fault) -> bool:
    """Whether the text that the fault changes does not occur exactly once in its file, or its tests are not there."""
    path = ROOT / fault.path
    tests = [ROOT / test.partition("::")[0] for test in fault.tests]
    return not all(map(Path.is_file, (path, *tests))) or path.read_text(encoding="utf-8").count(fault.old) != 1


@cache
def status_of(tree: Path, tests: tuple[str, ...], planted: str = "") -> int:
    """The status of pytest in a tree, planted: the name of the fault that is there; a test that hangs has failed."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        return subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=LIMIT_SECONDS).returncode
    except subprocess.TimeoutExpired:
        return 1


def commit(tree: Path) -> None:
    """Commit all files of a tree: rows name a commit, and say where files were changed."""
    author = ("-c", "user.name=mutants", "-c", "user.email=mutants@localhost")
    subprocess.run(["git", "add", "--all"], cwd=tree, check=True)
    subprocess.run(["git", *author, "commit", "--quiet", "--message", "Planted or not"], cwd=tree, check=True)


def outcome_of(fault: Fault, tree: Path) -> str:
    """Plant the fault in a copy of the tree, run its tests, and take the fault out again."""
    if is_stale(fault):
        return "stale"
    if status_of(tree, fault.tests):
        return "broken"
    path = tree / fault.path
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    commit(tree)
    status = status_of(tree, fault.tests, fault.name)
    path.write_text(text, encoding="utf-8")
    commit(tree)
    return "killed" if status else "survived"


def main(names: list[str]) -> int:
    faults = {fault.name: fault for fault in read_faults()}
    if unknown := [name for name in names if name not in faults]:
        sys.exit(f"error: there is no fault {unknown[0]}; there are {', '.join(faults)}")
    counts = dict.fromkeys(("killed", "survived", "broken", "stale"), 0)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*LEFT_OUT))
        (tree / ".venv").symlink_to(ROOT / ".venv")  # of the scripts in scripts/
        subprocess.run(["git", "init", "--quiet"], cwd=tree, check=True)
        commit(tree)
        for fault in map(faults.get, names or faults):
            started = time.perf_counter()
            outcome = outcome_of(fault, tree)
            counts[outcome] += 1
            print(f"{outcome:8}  {time.perf_counter() - started:4.0f} s  {fault.name}: {fault.what}", flush=True)
    print(", ".join(f"{number} {outcome}" for outcome, number in counts.items()))
    return int(counts["killed"] < len(names or faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
