"""The studies run what results/paper/ states: each published row, with its settings, and no other."""

import csv
import re
import shlex
from pathlib import Path

import pytest

from experiments.finetune_imagenet import BATCH_SIZE, IMAGENET_1K
from experiments.finetune_imagenet21k import IMAGENET_21K
from experiments.train_cifar100 import NLOGLR, parse_arguments
from studies.catalog import STUDIES

ROOT = Path(__file__).parents[2]
TABLES = {
    **{"table1": "table1", "table4": "table4", "table5": "table5"},
    **{"table2_3_imagenet1k": "tables2_3_imagenet1k", "table2_3_imagenet21k": "tables2_3_imagenet21k"},
}
BACKBONES = {  # and the resolution, of the data that a row names
    "wsl-32x48d-320": ("resnext101_32x48d_wsl", "320"),
    "efficientnet-l2-800": ("tf_efficientnet_l2_ns", "800"),
    "wsl-32x48d-224-21k": ("resnext101_32x48d_wsl", "224"),
}
# What a script does where a row does not say it.
PARSED = vars(parse_arguments(["--method", "softsort"]))
CIFAR100 = {name: PARSED[name] for name in ("n_epochs", "batch_size", "dataset", "model")}
DEFAULTS = {
    "experiments/train_cifar100.py": {**CIFAR100, "nloglr": NLOGLR, "m": "none"},
    "experiments/finetune_imagenet.py": {**IMAGENET_1K._asdict(), "batch_size": BATCH_SIZE},
    "experiments/finetune_imagenet21k.py": {**IMAGENET_21K._asdict(), "batch_size": BATCH_SIZE},
}
SETTINGS = ("method", "p_k", "backbone", "resolution", "inverse_temperature", "distribution", "art_lambda")


def rows_of(script: str) -> list[dict[str, str]]:
    """The flags of each command of a table, and its program."""
    rows = []
    for line in STUDIES[script].make().commands():
        _, program, *rest = shlex.split(line)
        flags = re.findall(r"(?:^| )--?([a-z]\w*)((?: (?!--?[a-z])\S+)*)", " ".join(rest))
        rows.append({"program": program, **{name: value.strip() for name, value in flags}})
    return rows


def published(table: str) -> list[dict[str, str]]:
    with (ROOT / "results" / "paper" / f"{table}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def number_or_word(value: object) -> object:
    """Numbers, one or several, as a tuple; what is none, as it is."""
    try:
        return tuple(float(part) for part in str(value).split())
    except ValueError:
        return value


def settings_of(row: dict[str, str]) -> dict[str, object]:
    backbone, resolution = BACKBONES.get(row.get("d", ""), ("", ""))
    row = {"distribution": "none", "art_lambda": "none", **row, "backbone": backbone, "resolution": resolution}
    return {name: number_or_word(row.get(name, "")) for name in SETTINGS}


@pytest.mark.parametrize("script", TABLES)
def test_every_published_row_is_run_with_its_settings_and_no_other_is(script):
    table = published(TABLES[script])
    # One published, and several times measured: a table also has later reruns, which state no temperature.
    table = [row for row in table if row["method"] and row["second_hand"] == "false" and "rerun" not in row["source"]]
    rows = rows_of(script)
    for seed in ("0", "1"):
        left = [settings_of(row) for row in rows if row["seed"] == seed]
        for row in table:
            stated = {name: number_or_word(row[name]) for name in SETTINGS if row[name]}
            same = [found for found in left if stated.items() <= found.items()]
            assert len(same) == 1, (seed, stated)
            left.remove(same[0])
        assert not left
    assert {row["seed"] for row in rows} == {"0", "1"}


@pytest.mark.parametrize("script", TABLES)
def test_every_row_has_the_published_schedule(script):
    (protocol,) = (row for row in published("protocols") if row["table"] == TABLES[script])
    names = ("n_epochs", "batch_size", "m", "num_valid", "dataset", "model", "top1_mode")
    for row in rows_of(script):
        defaults = {**DEFAULTS[row["program"]], "top1_mode": protocol["top1_mode"]}
        for name in names:
            if protocol[name]:
                assert number_or_word(row.get(name, defaults[name])) == number_or_word(protocol[name]), (name, row)
        assert "lr" not in row
        rate = 10 ** -float(row.get("nloglr", defaults["nloglr"]))
        assert rate == pytest.approx(float(protocol["lr"]), rel=1e-6)
        assert row["results"] == f"results/{script}.csv"


def test_the_tables_have_the_six_p_k():
    six = {number_or_word(row["p_k"]) for row in published("table4")}
    assert len(six) == 6
    assert all(len(p_k) == 5 and sum(p_k) == 1 for p_k in six)
    found = {number_or_word(row["p_k"]) for script in TABLES for row in rows_of(script)}
    assert found == six
