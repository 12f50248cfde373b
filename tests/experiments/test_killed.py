"""Killed at any moment, a command that is given again ends with the bits of one that nobody disturbed."""

import importlib
import multiprocessing
import random
import shlex
import time
from pathlib import Path
from types import ModuleType

import pytest

from experiments import extract_embeddings, train_cifar100
from tests.experiments import scripts
from tests.experiments.scripts import MACHINE, SCRIPTS, name_of, outcome
from tests.processes import wait_for

KILLS = 2
EXTRACT = "--dataset digits --backbone test_resnet --weights none --resolution 32 --shard_rows 150 --workers 0"
# Commands are forked from a process that has imported the scripts, which takes seconds, and has computed nothing.
FORKS = multiprocessing.get_context("forkserver")
IMPORTED = (extract_embeddings.__name__, scripts.__name__, "sklearn.datasets", "sklearn.model_selection")
FORKS.set_forkserver_preload(IMPORTED)  # scripts imports the others


def command(name: str, words: list[str]) -> None:
    """Run a script by its module's name; with the small network in place of the ResNet."""
    train_cifar100.resnet_cifar = scripts.small_network
    importlib.import_module(name).main(words)


def killed_and_repeated(script: ModuleType, words: list[str], begun: Path, pattern: str) -> None:
    """Kill the command at random moments soon after it has written a file, then let it end."""
    moments = random.Random(0)

    def state() -> set:
        return {(path, path.stat().st_mtime_ns) for path in begun.glob(pattern)}

    for number in range(KILLS + 1):
        before = state()
        process = FORKS.Process(target=command, args=(script.__name__, words))
        process.start()
        if number < KILLS:
            wait_for(lambda before=before, process=process: state() - before or not process.is_alive())
            time.sleep(moments.uniform(0, 0.03))  # of the tenth of a second that is left
            process.kill()
        process.join()
    assert process.exitcode == 0


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_training(script, tmp_path, monkeypatch):
    monkeypatch.setattr(train_cifar100, "resnet_cifar", scripts.small_network)
    flags = SCRIPTS[script].replace("EMBEDDINGS", str(scripts.embeddings(tmp_path / "e.pt")))
    words, (whole, killed) = [*shlex.split(flags), *MACHINE.split()], (tmp_path / name for name in ("whole", "killed"))
    assert script.main([*words, "--results", str(whole / "r.csv")]) == 0
    killed_and_repeated(script, [*words, "--results", str(killed / "r.csv")], killed, "runs/*/checkpoint.pt")
    assert outcome(killed / "r.csv") == outcome(whole / "r.csv")
    found, expected = ({path.relative_to(folder) for path in folder.rglob("*")} for folder in (killed, whole))
    assert {path for path in found if path.suffix != ".tmp"} == expected


def test_extraction(tmp_path):
    words, (whole, killed) = [*EXTRACT.split(), "--device", "cpu", "--threads", "1"], (tmp_path / "w", tmp_path / "k")
    assert extract_embeddings.main([*words, "--output", str(whole / "e.pt")]) == 0
    killed_and_repeated(extract_embeddings, [*words, "--output", str(killed / "e.pt")], killed, "e.pt.parts/*.pt")
    assert (killed / "e.pt").read_bytes() == (whole / "e.pt").read_bytes()
    assert [path.name for path in killed.iterdir()] == ["e.pt"]
