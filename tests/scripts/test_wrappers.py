"""The shell scripts, in a copy of their folder where a stand-in for Python notes its calls and can fail."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from studies.catalog import STUDIES

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.stem for path in (ROOT / "scripts").glob("*.sh") if path.stem != "begin")
# Python, what is installed beside it, and sbatch. Probes do not count: whether a Python starts, and which one it is.
STAND_IN = """#!/bin/bash
[[ "$*" != "-c " && "$*" != --version ]] || exit 0
cd "$TREE"
echo "${0#"$TREE/"}" "$@" >> calls
[ "$(wc -l < calls)" != "$FAIL_AT" ] || exit 7
case "$*" in
  "-m venv"*) mkdir -p "${@: -1}/bin"; for name in python ruff mypy; do cp stand_in "${@: -1}/bin/$name"; done;;
  *purelib*) mkdir -p packages; echo "$TREE/packages";;
esac
while [ $# -gt 1 ]; do case $1 in --output|--trials) mkdir -p "$(dirname "$2")"; touch "$2";; esac; shift; done
"""
COMPILES = "-m compileall"
STARTS_NOTHING = ("--dry-run", "--status", "--commands")
WORDS = {"tiny_imagenet": ["images"], "slurm": ["a-name"]}  # that a script asks for


class Done(NamedTuple):
    status: int
    calls: list[str]
    printed: str
    errors: str


class Tree:
    """A copy of the scripts without a .venv."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT / "scripts", folder / "scripts", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        for name in ("docs/requirements.txt", "requirements.txt", "pyproject.toml"):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        (folder / "images").mkdir()
        for name in ("stand_in", "path/sbatch"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(STAND_IN)
            (folder / name).chmod(0o755)

    def call(self, script: str, *words: object, fail_at: int = 0) -> Done:
        """Call a script in another folder than its own, where CDPATH leads elsewhere."""
        (self.folder / "calls").write_text("")
        environment = {**os.environ, "TREE": str(self.folder), "FAIL_AT": str(fail_at), "CDPATH": "/usr"}
        environment |= {"PYTHON": str(self.folder / "stand_in"), "PATH": f"{self.folder}/path:{os.environ['PATH']}"}
        words = [self.folder / script, *words]
        done = subprocess.run(words, env=environment, cwd="/", input="true\n", text=True, capture_output=True)
        return Done(done.returncode, (self.folder / "calls").read_text().splitlines(), done.stdout, done.stderr)


@pytest.fixture
def tree(tmp_path) -> Tree:
    return Tree(tmp_path / "tree")


def words_of(script: str, tree: Tree) -> list[object]:
    return [tree.folder / word if word == "images" else word for word in WORDS.get(script, [])]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_failing_command_ends_a_script_and_nothing_follows(script, tmp_path):
    """Each command of each script in its turn, those that make .venv among them, except what may fail."""
    whole = Tree(tmp_path / "whole")
    done = whole.call(f"scripts/{script}.sh", *words_of(script, whole))
    assert done.status == 0, done.errors
    calls = [call.replace("/whole/", "/failing/") for call in done.calls]
    assert calls
    for place in range(len(calls)):
        if COMPILES in calls[place]:
            continue
        failing = Tree(tmp_path / "failing")
        done = failing.call(f"scripts/{script}.sh", *words_of(script, failing), fail_at=place + 1)
        assert (done.status != 0, done.calls[:-1]) == (True, calls[:place]), calls[place]
        again = failing.call(f"scripts/{script}.sh", *words_of(script, failing))
        assert (again.status, again.calls[-1].split()[:3]) == (0, calls[-1].split()[:3])
        installs = [".venv/bin/python -m pip install" in call for call in again.calls]
        assert any(installs) == (script != "slurm" and place < 2)  # made, then installed
        shutil.rmtree(failing.folder)


def test_packages_with_a_file_that_does_not_compile_are_installed(tree, tmp_path):
    calls = Tree(tmp_path / "whole").call("scripts/quickstart.sh").calls
    done = tree.call("scripts/quickstart.sh", fail_at=3)
    assert COMPILES in done.calls[2]
    assert (done.status, done.calls) == (0, calls)


OF_TINY_IMAGENET = [name for name in STUDIES if name.startswith("tiny_imagenet")]  # which have one script


@pytest.mark.parametrize("study", sorted(set(STUDIES) - {"quickstart", *OF_TINY_IMAGENET}))
def test_each_study_has_a_script_that_passes_its_words_on(study, tree):
    done = tree.call(f"scripts/{study}.sh", "a file.pt", "--jobs", "2")
    assert done.status == 0
    assert done.calls[-1] == f".venv/bin/python scripts/study.py {study} a file.pt --jobs 2"


def test_a_script_is_found_through_links(tree):
    for link, target in (("folder", "scripts"), ("linked.sh", "scripts/table1.sh")):
        (tree.folder / link).symlink_to(tree.folder / target)
    for script in ("folder/table1.sh", "linked.sh"):
        assert tree.call(script).calls[-1] == ".venv/bin/python scripts/study.py table1"


def test_the_environment_is_made_once(tree):
    first, second = (tree.call("scripts/quickstart.sh") for _ in range(2))
    made = [call for call in first.calls if re.search(rf"-m venv|-m pip install|{COMPILES}", call)]
    assert [call.split()[2] for call in made] == ["venv", "pip", "compileall"]
    assert first.calls == [*made, *second.calls]


def test_the_environment_of_another_checkout_is_not_taken_away(tree, tmp_path):
    other = Tree(tmp_path / "other folder")
    other.call("scripts/quickstart.sh")
    (tree.folder / ".venv").symlink_to(other.folder / ".venv")
    done = tree.call("scripts/environment.sh")
    assert (done.status, done.calls) == (1, [])
    assert f".venv is a link to the environment of {other.folder}, which" in done.errors
    assert other.call("scripts/environment.sh").calls == []  # its own, through no link
    (tree.folder / ".venv").unlink()
    (tree.folder / ".venv").symlink_to((other.folder / ".venv").rename(tmp_path / "disk"))
    shutil.rmtree(other.folder)
    assert tree.call("scripts/environment.sh").status == 0  # of a checkout that is gone


def test_the_lowest_versions_have_an_environment_of_their_own(tree):
    done = tree.call("scripts/test.sh", "--lowest", "-x")
    assert done.status == 0, done.errors
    make, install, compiles, run = done.calls
    constraints = ".venv-lowest/lowest.txt"
    assert make == "stand_in -m venv --clear .venv-lowest"
    assert install.endswith(f" -r requirements.txt -c {constraints}")
    assert compiles.startswith(f".venv-lowest/bin/python {COMPILES} ")
    assert run.startswith(".venv-lowest/bin/python -m pytest ")
    assert run.endswith(" -x")
    pinned = [line for line in (tree.folder / constraints).read_text().splitlines() if not line.startswith("#")]
    wanted = [line for line in (tree.folder / "requirements.txt").read_text().splitlines() if line[0] not in "#-"]
    assert pinned == [re.sub(r"\[.*\]", "", line.replace(">=", "==", 1)) for line in wanted]
    assert tree.call("scripts/test.sh", "--lowest", "-x").calls == [run]


def test_what_starts_nothing_ends_with_what_it_shows(tree):
    for flag in STARTS_NOTHING:
        assert tree.call("scripts/quickstart.sh", flag).calls[-1].endswith(f"scripts/study.py quickstart {flag}")


@pytest.mark.parametrize("flag", STARTS_NOTHING)
def test_what_starts_nothing_prints_the_extraction_of_tiny_imagenet(flag, tree):
    images = tree.folder / "images"
    done = tree.call("scripts/tiny_imagenet.sh", images, flag)
    assert done.status == 0
    extraction, more = done.printed.splitlines()
    assert f"experiments/extract_embeddings.py --dataset {images} " in extraction
    assert more == "# linear classifiers: known when this has run"
    assert [call for call in done.calls if "experiments/" in call or "study.py" in call] == []
    features = tree.folder / re.search(r"--output (\S+)", extraction)[1]
    features.parent.mkdir(parents=True)
    features.touch()
    done = tree.call("scripts/tiny_imagenet.sh", images, flag)
    assert done.calls == [f".venv/bin/python scripts/study.py {name} {flag}" for name in OF_TINY_IMAGENET]
    assert tree.call("scripts/tiny_imagenet.sh", tree.folder / "absent", flag).status == 2


def test_an_array_without_a_name_gets_a_sentence(tree):
    for words in ([], ["--time", "1"]):
        done = tree.call("scripts/slurm.sh", *words)
        assert (done.status, done.errors) == (2, "error: name the sweep first, as in slurm.sh table1\n")
