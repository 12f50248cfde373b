"""The names of all rows that are recorded: each is what its columns say, and its command skips itself still."""

import shutil
from pathlib import Path

import pytest

from experiments import finetune_imagenet, train_beam_search, train_cifar100, train_knn
from experiments.common.rows import read_rows, write_rows
from experiments.common.settings import BEAM, CIFAR, HEADS, KNN, PRETRAINING, SETTINGS, run_id, script_of
from studies import runs

RESULTS = Path(__file__).parents[2] / "results" / "repository"
FILES = sorted(
    path
    for path in (*RESULTS.glob("*.csv"), *RESULTS.glob("noise/*.csv"))
    if path.read_text().startswith("run_id,") and not path.stem.endswith("_epochs")
)
SCRIPTS = {
    CIFAR: train_cifar100,
    HEADS: finetune_imagenet,
    KNN: train_knn,
    BEAM: train_beam_search,
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_recorded_row_has_the_name_that_its_columns_give(path):
    rows = read_rows(path)
    assert rows
    for row in rows:
        script = script_of(row)
        config = {item.name: item.parse(row.get(item.name, "")) for item in SETTINGS}
        assert run_id(script, config, SCRIPTS[script].READABLE) == row["run_id"]
        if script == BEAM:
            readable = "{dataset}-pretrained-{pretrain_updates}updates-seed{seed}"
            assert run_id(PRETRAINING, config, readable) == row["pretrained"]


def test_there_are_rows_of_every_script():
    scripts = {script_of(read_rows(path)[0]) for path in FILES}
    assert scripts == SCRIPTS.keys()
    assert sum(len(read_rows(path)) for path in FILES) >= 11_515


def command_of(row: dict[str, str]) -> list[str]:
    """The flags of a row as its columns have them; where it is computed changes no name."""
    words = [*(["--arm", "retain"] if "arm" in row else []), "--method", "softsort"]
    flags = vars(SCRIPTS[script_of(row)].parse_arguments(words))
    elsewhere = {"results", "data_dir", "device", "threads", "seeds", "lr" if row.get("nloglr") else "nloglr"}
    words = []
    for name in flags.keys() - elsewhere:
        cell = row.get(name, "")
        if cell and cell != "false":
            words += [f"--{name}", *([] if cell == "true" else cell.split())]
    return [*words, "--device", "cpu"]


WITH_DATASET = [path for path in FILES if "dataset" in read_rows(path)[0]]  # of heads the store would have to be there


@pytest.mark.parametrize("path", WITH_DATASET, ids=lambda path: path.stem)
def test_the_command_of_a_recorded_row_skips_itself(path, tmp_path, capsys):
    results = tmp_path / path.name
    shutil.copy(path, results)
    for row in read_rows(path):
        if row["dataset"] and not row.get("noisy_labels"):  # whose file would have to be there
            assert SCRIPTS[script_of(row)].main([*command_of(row), "--results", str(results)]) == 0
            assert f"already has {row['run_id']} " in capsys.readouterr().out
    assert results.read_bytes() == path.read_bytes()


def test_rows_of_several_scripts_in_one_file_are_each_of_its_own(tmp_path):
    """As a spreadsheet joins them, or as commands with one --results write them: every column, most cells empty."""
    firsts = {}
    for path in FILES:
        for row in read_rows(path):
            firsts.setdefault((script_of(row), row["method"]), row)
    assert {script for script, _ in firsts} == SCRIPTS.keys()
    write_rows(tmp_path / "all.csv", list(firsts.values()))
    for (script, _), row in zip(firsts, read_rows(tmp_path / "all.csv"), strict=True):
        config = {item.name: item.parse(row.get(item.name, "")) for item in SETTINGS}
        assert script_of(row) == script
        assert run_id(script, config, SCRIPTS[script].READABLE) == row["run_id"]
        assert f"experiments/{script}.py" in runs.command_of(row)
