"""A study in a copy of the repository, as a new clone has it: it trains, continues, is reported and has a status."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.common.rows import read_rows
from scripts import study
from studies import paper
from studies.catalog import STUDIES
from studies.tuning import Stage
from tests.clones import copy_of_tracked_files

SMALL = ["--n_epochs", "1", "--limit_train", "64", "--device", "cpu", "--threads", "1", "--jobs", "2"]


# The data of a study, and what else it needs, in files of the tests.
DATA = {"FILE": "heads.pt", "DATA...": "digits", "HUMAN": "people.pt"}
DATA |= {name: "heads.pt" for name in ("OF_10", "OF_100", "OF_1000")}
NEEDS = {"noise": ["--human", "people.pt"], "noise_draws": ["--human", "people.pt"]}
EACH = """
import json, sys
from experiments.common import door
from scripts import study
for words in json.loads(sys.argv[1]):
    status = door.call(lambda: study.main(words))
    print("=== status", status, "of", *words, flush=True)
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A new clone with this environment."""
    folder = copy_of_tracked_files(tmp_path_factory.mktemp("clone"))
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


def called(clone: Path, *calls: list[str]) -> list[str]:
    """What each call of a study prints, one after another in one process, since each process takes seconds to begin."""
    environment = {**os.environ, "PYTHONPATH": str(clone), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", EACH, json.dumps(calls)],
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    printed = []
    rest = done.stdout
    for words in calls:
        mine, end, rest = rest.partition(f"=== status 0 of {' '.join(words)}\n")
        assert end, done.stdout + done.stderr
        printed.append(mine)
    assert rest == ""
    return printed


def test_a_new_clone_trains_and_a_second_call_skips(clone):
    before = {path: path.read_bytes() for path in (clone / "results" / "repository").rglob("*.csv")}
    assert read_rows(clone / "results" / "repository" / "table1.csv")
    words = ["quickstart", *SMALL]
    status, first = called(clone, ["table1", "--status"], words)
    last = status.splitlines()[-1]
    assert last.startswith("# table1: 0 of 20 runs done; commands: 0 running, 0 failed, 20 waiting")
    assert "quickstart: 4 of 4 runs done (4 trained, 0 skipped), 0 failed" in first
    assert "This repository has no runs with the settings of yours." in first  # of one epoch
    assert len(read_rows(clone / "results" / "quickstart.csv")) == 4
    second, status = called(clone, words, [*words, "--status"])
    assert "quickstart: 4 of 4 runs done (0 trained, 4 skipped), 0 failed" in second
    assert second.partition("Quickstart: ")[2] == first.partition("Quickstart: ")[2]
    assert status.splitlines()[-1].startswith("# quickstart: 4 of 4 runs done")
    assert {path: path.read_bytes() for path in before} == before


def files_in(folder: Path) -> dict[str, bytes]:
    """The files of a folder, except compiled ones and for the digests of files that were read."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix not in (".pyc", ".fingerprint"):
            found[path.relative_to(folder).as_posix()] = path.read_bytes()
    return found


# Of a list of runs, in stages, and with trials that choose.
EVERY_FLAG = {"quickstart", "table1", "table4", "noise", "few_labels"}


def test_what_starts_nothing_writes_no_file_in_any_study(tmp_path, trained):
    """A run that is started has a log, even here, where no environment lets one begin."""
    clone = copy_of_tracked_files(tmp_path / "clone")
    for name in ("heads.pt", "people.pt"):
        shutil.copy(trained / name, clone / name)
    calls = []
    for name, entry in STUDIES.items():
        words = [name, *(DATA[word] for word in entry.data), *NEEDS.get(name, [])]
        flags = ("--commands", "--dry-run", "--status") if name in EVERY_FLAG else ("--status",)
        calls += [[*words, flag] for flag in flags]
    before = files_in(clone)
    called(clone, *calls)
    assert files_in(clone) == before


def test_a_seed_for_all_runs_trains_each_once(clone):
    """Three seeds of ten losses are ten runs with one seed, and twenty with two."""
    calls = [["table1", "--short", "--dry-run", *flags] for flags in ([], ["--seed", "3"], ["--n_epochs", "1"])]
    whole, one, short = called(clone, *calls)
    assert whole.endswith("# 30 runs\n")
    assert one.endswith("# 10 runs\n")
    assert one.count(" --seed 0 ") == one.count(" --seed 3\n") == 10
    assert short.endswith("# 30 runs\n")


@pytest.mark.parametrize(("flags", "notes"), [([], 1), (["--precision", "fp32"], 0)])
def test_a_note_before_the_runs_says_where_bf16_is_slow(flags, notes, monkeypatch, capsys):
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    args, extra = study.parse_arguments(["table1", "--short", "--device", "cpu", *flags])
    launching = study.Launching(args, extra, run_per_core=False)
    launching.note_if_slow(Stage("table1", STUDIES["table1"].make(short=True).commands()))
    assert capsys.readouterr().err.count("note: this processor has no AVX-512") == notes


def test_the_table_with_commands_has_those_of_the_runs_that_are_there(clone):
    """A new clone has this repository's runs; a study without any says so."""
    printed, without = called(clone, ["table1", "--short", "--commands"], ["table5", "--commands"])
    commands = [line.strip() for line in printed.splitlines() if line.startswith("    .venv")]
    first_seeds = paper.TABLE1_SHORT.commands()[:10]
    assert commands == [command.replace(" --seed 0 ", " --seeds 0 1 2 ") for command in first_seeds]
    assert without == "# table5: no runs yet; --dry-run prints its commands\n"


OPTIONS = {
    "short": [],
    "name": ["mine"],
    "methods": ["all"],
    "num_valid": ["0"],
    "human": ["human.pt"],
    "labels": ["human"],
    "losses": ["lapsum"],
    "folder": ["labels"],
    "choice": ["noisy"],
}


def test_every_flag_of_a_study_acts_on_it_or_is_refused():
    """Flags of every study are those of the launcher and of what is shown."""
    every = vars(study.make_parser().parse_args([]))
    assert set(every) == {*OPTIONS, "dry_run", "status", "commands"}
    for name, entry in study.STUDIES.items():
        data = ["FILE"] * len(entry.data)
        for option, values in OPTIONS.items():
            words = [name, *data, f"--{option}", *values]
            if option in entry.options:
                assert getattr(study.parse_arguments(words)[0], option) is not None
                continue
            with pytest.raises(ValueError, match=f"{name} takes no --{option}"):
                study.parse_arguments(words)


@pytest.mark.parametrize("flags", [["--label-smoothing", "0.1"], ["--stat"], ["--dry"], ["-z"], ["--method", "lml"]])
@pytest.mark.parametrize("shown", ["", "--status", "--dry-run"])
def test_a_flag_that_no_run_has_and_another_loss_are_refused_before_anything_is_shown(flags, shown):
    for name, entry in study.STUDIES.items():
        words = [name, *["FILE"] * len(entry.data), *flags, *shown.split()]
        with pytest.raises(ValueError, match=f"{name} .*takes no {flags[0]}"):
            study.parse_arguments(words)


@pytest.mark.parametrize("words", [["--commands", "--jobs", "2"], ["--commands", "--n_epochs", "3"]])
def test_the_table_with_commands_takes_no_flags_of_runs(words):
    with pytest.raises(ValueError, match=f"takes no {' '.join(words[1:])}"):
        study.parse_arguments(["table1", *words])
