"""The commands of README and docs: bash runs every block, and the flags of each Python call are parsed.

The blocks run in a copy of scripts/*.sh, where stand-ins note the calls of Python and of other programs. So they show
what the wrappers call in the end, with all variables, pipes and quotes resolved by bash.
"""

import argparse
import importlib
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from data.embeddings import Embeddings
from data.splits import Split
from experiments import finetune_imagenet, train_cifar100
from experiments.common.settings import CIFAR, HEADS, run_id
from experiments.finetune_imagenet import IMAGENET_1K
from experiments.finetune_imagenet21k import IMAGENET_21K as PROTOCOL_21K
from scripts import launch, study
from scripts.pages import ROOT
from studies.catalog import STUDIES
from studies.runs import CIFAR100, IMAGENET, IMAGENET_21K, Study
from topk_losses import METHODS

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*/README.md"))]
BLOCK = re.compile(r"^```shell\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAMS = ("python", "pip", "aws", "parallel", "sbatch")  # stand-ins; any other program must be there
INSTALLED = ("pip", "venv", "compileall", "pytest")  # modules that python -m runs, and whose flags are not ours
SET_UP = "README.md#set-up"
# What a page asks its reader for: a folder of images, files, methods of their own package.
FOLDER = "FOLDER"
FILES = ("CIFAR-100_human.pt", "cifar100.pt", "commands.txt", "heads.pt", "own.pt")
OWN_METHODS = ("focal", "focal_1")
# A dry run prints a command, which is the next program's input.
STAND_IN = """#!/bin/bash
case " $* " in *" --dry-run "*) echo true;; esac
[ -t 0 ] || cat > /dev/null
printf '%s\\0' "${0##*/}" "$@" > "$(mktemp -p "$CALLS")"
"""


class Block(NamedTuple):
    """A ```shell block, and the line of its page where it begins."""

    page: Path
    line: int
    code: str


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(page, text[: found.start(1)].count("\n") + 1, found[1]) for found in BLOCK.finditer(text)]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


class Tree:
    """A folder in which the blocks run: the shell scripts, and a .venv of stand-ins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = folder / "calls"
        shutil.copytree(ROOT / "scripts", folder / "scripts", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        for name in ("requirements.txt", "pyproject.toml"):
            shutil.copy(ROOT / name, folder / name)
        (folder / FOLDER).mkdir()
        for name in FILES:
            (folder / name).touch()
        installed = [folder / ".venv/bin" / name for name in ("python", "ruff", "mypy")]
        for path in [*(folder / "path" / name for name in PROGRAMS), *installed]:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(STAND_IN)
            path.chmod(0o755)
        for name in ("bin/activate", "requirements.stamp"):  # an environment that is made: no block calls pip unasked
            (folder / ".venv" / name).touch()

    def run(self, code: str) -> list[list[str]]:
        """Run a block in a clean shell, and return the calls: name of the program, then its arguments."""
        shutil.rmtree(self.calls, ignore_errors=True)
        self.calls.mkdir()
        environment = {"PATH": f"{self.folder}/path:{os.defpath}", "CALLS": str(self.calls)}
        command = ["bash", "-eu", "-o", "pipefail", "-c", code]
        done = subprocess.run(command, cwd=self.folder, env=environment, input="", capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return [path.read_text().split("\0")[:-1] for path in self.calls.iterdir()]


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Tree:
    return Tree(tmp_path_factory.mktemp("tree"))


class Parsed(Exception):
    """A script has read its flags, and would begin its work."""


def parse(words: list[str]) -> None:
    """Parse the flags of a call of Python by the script that is called.

    Raises:
        SystemExit, ValueError: the script refuses them.
        ImportError: there is no such script.
    """
    program, *words = words
    if program == "-c":
        compile(words[0], "-c", "exec")
        script = re.search(r"from (experiments\.\w+) import main", words[0])
        if script:
            parse_by(script[1], words[1:])
    elif program == "-m" and words[0] not in INSTALLED:
        parse_by(words[0], words[1:])
    elif program == "scripts/study.py":
        parse_study(words)
    elif program != "-m":
        assert (ROOT / program).is_file(), program
        parse_by(program.removesuffix(".py").replace("/", "."), words)


def parse_by(name: str, words: list[str]) -> None:
    """Parse flags by the parser of a module."""
    module = importlib.import_module(name)
    if hasattr(module, "parse_arguments"):
        module.parse_arguments(words)
        return
    original = argparse.ArgumentParser.parse_args

    def parse_and_stop(*args: object) -> None:
        original(*args)
        raise Parsed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
        with pytest.raises(Parsed):
            module.main(words)


def parse_study(words: list[str]) -> None:
    """Parse the flags of a study, of the launcher, and those that go to every run."""
    args, extra = study.parse_arguments(words)
    _, flags = launch.parse_arguments(extra)
    if flags:
        made = STUDIES[args.study].make(*args.data)
        assert isinstance(made, Study), "flags for the runs of a study with trials"
        parse([*shlex.split(made.commands()[0])[1:], *flags])


@pytest.mark.parametrize("block", BLOCKS, ids=[f"{block.page.stem}-line{block.line}" for block in BLOCKS])
def test_the_commands_of_a_block_run_and_their_flags_parse(block, tree, monkeypatch):
    for name in OWN_METHODS:
        monkeypatch.setitem(METHODS, name, METHODS["softmax_cross_entropy"])
    monkeypatch.chdir(tree.folder)
    calls = tree.run(block.code)
    assert calls or ". .venv/bin/activate" in block.code, "a block without a command"
    for program, *words in calls:
        if program == "python":
            parse(words)


def images(script: str, words: list[str]) -> list[tuple[str, str]]:
    """The run ids of a command on images, each with the results file that gets its row."""
    args = train_cifar100.parse_arguments(words)
    ids = []
    for seed in args.seed:
        config = train_cifar100.configuration(args, seed)
        ids.append((run_id(CIFAR, config, train_cifar100.READABLE), str(args.results)))
    return ids


def embeddings(script: str, words: list[str]) -> list[tuple[str, str]]:
    """The same on embeddings of as many rows and classes as the published ones, named as the command names them."""
    protocol = {IMAGENET: IMAGENET_1K}.get(script, PROTOCOL_21K)
    args = finetune_imagenet.parse_arguments(words, protocol)
    labels = torch.zeros(1_200_000, dtype=torch.long)
    train = Split(labels.unsqueeze(1), labels)
    data = Embeddings(Path(args.data_path), {"train": train}, protocol.num_classes, {}, stamp=[])
    rows = finetune_imagenet.choose_rows(data, args, protocol)
    source = finetune_imagenet.Source(data, rows, {"embeddings": args.data_path})
    ids = []
    for seed in args.seed:
        config = finetune_imagenet.configuration(args, seed, protocol, source)
        ids.append((run_id(HEADS, config, finetune_imagenet.READABLE), str(args.results)))
    return ids


RUNS_OF = {CIFAR100: images, IMAGENET: embeddings, IMAGENET_21K: embeddings}


@pytest.mark.parametrize("name", ["table1", "table2_3_imagenet1k", "table2_3_imagenet21k", "table5"])
def test_the_rows_of_a_table_one_by_one_are_the_runs_of_its_script(name, tree):
    """The same runs in the same file: the script skips what was typed, and the report finds it."""
    (results,) = STUDIES[name].make().files
    typed = []
    (block,) = [block for block in BLOCKS if block.page.stem == "reproduce" and f"--results {results}" in block.code]
    for program, script, *words in tree.run(block.code):
        assert program == "python"
        typed += [run for run in RUNS_OF[script](script, words) if run[1] == results]
    listed = []
    for command in STUDIES[name].make().commands():
        _, script, *words = shlex.split(command)
        listed += RUNS_OF[script](script, words)
    assert sorted(typed) == sorted(listed)


def test_there_are_commands_of_every_kind():
    code = "\n".join(block.code for block in BLOCKS)
    for study_name in set(STUDIES) - {"tiny_imagenet_more", "tiny_imagenet_equal"}:  # of tiny_imagenet.sh
        assert f"scripts/{study_name}.sh" in code, study_name
    for folder in ("experiments", "scripts", "benchmarks"):
        assert f"python {folder}/" in code


@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS}), ids=lambda page: page.stem)
def test_a_page_with_commands_links_to_the_set_up(page):
    if page != ROOT / "README.md":
        assert SET_UP in page.read_text(encoding="utf-8")


def test_a_wrong_flag_is_seen(tree):
    (call,) = tree.run("python experiments/train_knn.py --method softsort --datset digits")
    with pytest.raises(SystemExit):
        parse(call[1:])
    (call,) = tree.run("scripts/knn.sh --n_epoch 3")
    with pytest.raises(ValueError, match="knn takes no --n_epoch"):
        parse(call[1:])


@pytest.mark.parametrize("script", ["experiments/train_cifar100.py", "-m data.download", "benchmarks/losses.py"])
def test_a_script_starts_in_a_clean_shell_with_the_environment_activated(script):
    command = f"cd {shlex.quote(str(ROOT))} && . .venv/bin/activate && python {script} --help"
    if not (ROOT / ".venv/bin/activate").is_file():
        pytest.skip("the tests run in another environment than .venv")
    environment = {"PATH": os.defpath}
    done = subprocess.run(["bash", "-eu", "-c", command], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ")
