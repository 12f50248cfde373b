"""The names of all rows that are recorded: each is what its columns say, and its command skips itself still."""

import shutil
from pathlib import Path

import pytest

from experiments import finetune_imagenet, train_beam_search, train_cifar100, train_knn
from experiments.common.records import read_rows, run_id

RESULTS = Path(__file__).parents[2] / "results"
FILES = sorted(
    path
    for path in (*RESULTS.glob("*.csv"), *RESULTS.glob("noise/*.csv"))
    if path.read_text().startswith("run_id,") and not path.stem.endswith("_epochs")
)
LISTS = ("p_k", "hidden_dims")
WHOLE = {"hidden_dims", *(f"limit_{split}" for split in ("train", "test"))}  # numbers that are never fractions
WHOLE |= {"m", "k", "dim", "batch_size", "num_candidates", "n_epochs", "eval_freq", "seed", "split_seed", "order_seed"}
WHOLE |= {"num_valid", "max_letters", "hidden_dim", "pretrain_updates", "n_updates", "beam_size"}


def value_of(name: str, cell: str):
    """The value of a flag, from the cell that shows it."""
    if cell in ("true", "false"):
        return cell == "true"
    number = int if name in WHOLE else float
    try:
        return [number(word) for word in cell.split()] if name in LISTS and cell else number(cell)
    except ValueError:
        return cell or None


def script_of(row: dict[str, str]):
    """The script of which a row is."""
    if "arm" in row:
        return train_beam_search
    if "num_candidates" in row:
        return train_knn
    return finetune_imagenet if "order_seed" in row else train_cifar100


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_recorded_row_has_the_name_that_its_columns_give(path):
    rows = read_rows(path)
    assert rows
    for row in rows:
        script = script_of(row)
        identity = {name: value_of(name, row.get(name, "")) for name in script.IDENTITY}
        assert run_id(identity, script.READABLE) == row["run_id"]
        if script is train_beam_search:
            pretraining = {name: identity[name] for name in script.PRETRAINING}
            readable = "{dataset}-pretrained-{pretrain_updates}updates-seed{seed}"
            assert run_id(pretraining, readable) == row["pretrained"]


def test_there_are_rows_of_every_script():
    scripts = {script_of(read_rows(path)[0]) for path in FILES}
    assert scripts == {train_cifar100, finetune_imagenet, train_knn, train_beam_search}
    assert sum(len(read_rows(path)) for path in FILES) >= 9000


def command_of(row: dict[str, str]) -> list[str]:
    """The flags of a row as its columns have them; where it is computed changes no name."""
    flags = vars(
        script_of(row).parse_arguments([*(["--arm", "retain"] if "arm" in row else []), "--method", "softsort"])
    )
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
            assert script_of(row).main([*command_of(row), "--results", str(results)]) == 0
            assert f"already has {row['run_id']} " in capsys.readouterr().out
    assert results.read_bytes() == path.read_bytes()
