"""Commands of studies are commands of their scripts; rows are found by the settings that a command gives."""

import shlex
from pathlib import Path

import pytest
import torch

from data.embeddings import Embeddings
from data.splits import Split
from experiments import finetune_imagenet, train_beam_search, train_cifar100, train_knn
from experiments.common import settings
from experiments.common.paths import REPOSITORY
from experiments.common.rows import read_rows
from experiments.common.settings import BY_FLAG, BY_NAME, Setting
from experiments.finetune_imagenet import IMAGENET_1K
from experiments.finetune_imagenet21k import IMAGENET_21K
from studies import own_features, runs
from studies.catalog import DESIGNS, LISTED, STUDIES
from studies.runs import PROTOCOLS, UNSORTED, RunIndex, Study, command_of, expected_runs, parse_flags
from topk_losses import METHODS, RELAXATIONS

PARSE = {
    runs.CIFAR100: train_cifar100.parse_arguments,
    runs.IMAGENET: finetune_imagenet.parse_arguments,
    runs.IMAGENET_21K: lambda words: finetune_imagenet.parse_arguments(words, IMAGENET_21K),
    runs.NEIGHBOURS: train_knn.parse_arguments,
    runs.BEAM_SEARCH: train_beam_search.parse_arguments,
}
NUM_RUNS = {
    **{"table1": 20, "table1_short": 30, "table4": 46, "table4_short": 46, "table5": 12, "strong": 6, "scratch": 30},
    **{"table2_3_imagenet1k": 20, "table2_3_imagenet21k": 20, "implementation": 8, "quickstart": 4},
    **{"few_labels_scratch": 30, "beam_search": 20, "beam_search_short": 20},
}
DATA = {"FILE": "a file.pt", "DATA...": "digits", "OF_10": "a.pt", "OF_100": "b.pt", "OF_1000": "c.pt"}
DATA |= {"HUMAN": __file__}  # a file that is there
WITHOUT_TRIALS = [name for name in STUDIES if "_more" not in name]
FILES = sorted(
    path.relative_to(REPOSITORY).as_posix()
    for path in [*REPOSITORY.glob("*.csv"), *REPOSITORY.glob("noise/*.csv")]
    if not path.stem.endswith("_epochs")
)


def commands_of(name: str) -> list[str]:
    """The commands of a study that are known before any has run."""
    entry = STUDIES[name]
    words = [DATA[word] for word in entry.data]
    if name == own_features.NAME:
        words.append(own_features.Size(num_train=800, num_valid=200, num_classes=10))
    if name in DESIGNS:
        words = [next(iter(DESIGNS[name].kinds))]
    study = entry.make(*words)
    if isinstance(study, Study):
        return study.commands()
    return study.round_commands(study.rounds[0])


@pytest.mark.parametrize("study", LISTED, ids=lambda study: study.name)
def test_a_study_has_so_many_runs_each_once(study):
    commands = study.commands()
    assert len(set(commands)) == len(commands) == NUM_RUNS[study.name]


@pytest.mark.parametrize("name", WITHOUT_TRIALS)
def test_every_command_is_one_of_its_script_with_the_runs_that_are_expected(name):
    """The script reads the same seeds, results file and losses that status and reports read."""
    for command in commands_of(name):
        python, script, *words = shlex.split(command)
        assert python == runs.PYTHON
        args = PARSE[script](words)
        expected = expected_runs(command)
        losses = [args, *getattr(args, "also", [])]
        assert len(expected) == len(args.seed) * len(losses)
        assert {run["seed"] for run in expected} == set(args.seed)
        assert {str(run["results"]) for run in expected} == {str(args.results)}
        for number, run in enumerate(expected):
            loss = losses[number % len(losses)]
            assert run["method"] == loss.method
            if "p_k" in run:  # else a script fills it in
                assert settings.cell(run["p_k"]) == settings.cell(loss.p_k)
            assert run.get("lr") == loss.lr or run.get("nloglr") == getattr(loss, "nloglr", None)


def config_of(script: str, words: list[str], num_rows: int = 2000) -> dict:
    """Every setting of a run, as its script fills it in; of linear classifiers on rows of 100 classes."""
    args = PARSE[script](words)
    if script == runs.CIFAR100:
        return train_cifar100.configuration(args, 0)
    if script == runs.NEIGHBOURS:
        return train_knn.configuration(args, 0)
    if script == runs.BEAM_SEARCH:
        return train_beam_search.configuration(args, 0)
    protocol = {runs.IMAGENET: IMAGENET_1K, runs.IMAGENET_21K: IMAGENET_21K}[script]
    labels = torch.zeros(num_rows, dtype=torch.long)
    data = Embeddings(Path("heads.pt"), {"train": Split(labels.unsqueeze(1), labels)}, 100, {}, stamp=[])
    rows = finetune_imagenet.choose_rows(data, args, protocol)
    return finetune_imagenet.configuration(args, 0, protocol, finetune_imagenet.Source(data, rows, {}))


def cells_of(config: dict) -> dict[str, str]:
    """The settings of a row."""
    return {name: settings.cell(value) for name, value in settings.columns(config).items()}


@pytest.mark.parametrize("script", PROTOCOLS)
def test_the_protocols_are_those_of_the_scripts_with_a_million_rows(script):
    config = config_of(script, ["--method", "softmax_cross_entropy"], num_rows=1_200_000)
    protocol = parse_flags(PROTOCOLS[script])
    assert {name: config[name] for name in protocol} == protocol


def losses_of(script: str) -> list[str]:
    """Flags of a script with each method, and of what else its defaults depend on."""
    if script == runs.BEAM_SEARCH:
        lines = ["--arm cross_entropy --method softmax_cross_entropy --dataset reversal"]
        for method in RELAXATIONS:
            lines += [f"--arm {arm} --method {method}" for arm in ("retain", "soft_beam")]
        return [*lines, *(f"--arm retain --method softsort --beam_size {size}" for size in (1, 3))]
    if script == runs.NEIGHBOURS:
        lines = [f"--method {method}" for method in (*RELAXATIONS, "inputs", "pca", "softmax_cross_entropy")]
        return [*lines, *(f"--method softsort {data}" for data in ("-d a.pt", "--dataset digits", "--dataset cifar10"))]
    lines = [f"--method {method}" for method in METHODS]
    return [*lines, "--method splitter_selection --distribution cauchy", "--method lapsum --nloglr 2.5"]


COMMANDS = [f"{script} {loss}" for script in PARSE for loss in losses_of(script)]
OTHERS = {settings.boolean: "true", settings.floats: "0.7 0.3", int: "7", float: "0.7", settings.integers: "7"}
OTHERS[settings.inverse_temperature] = "0.7"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_row_is_that_of_a_command_whose_flags_and_defaults_it_has(command):
    """Not with another value of any setting that a flag gives; an empty cell of an older row may be the default."""
    script, *words = command.split()
    row = cells_of(config_of(script, words))
    (run,) = expected_runs(f"{runs.PYTHON} {command}")
    run = {name: value for name, value in run.items() if name not in parse_flags(PROTOCOLS.get(script, ""))}
    assert RunIndex([row]).find(run) == [0]
    left_out = {"data_path"}
    if script in PROTOCOLS:
        left_out |= {"batch_size", "n_epochs", "lr", "nloglr", "num_valid"}
    if "--nloglr" in words:
        left_out.add("lr")
    if run["method"] not in METHODS:
        left_out.add("inverse_temperature")  # as of a loss that is registered elsewhere
    for name in row.keys() & BY_NAME.keys() - left_out:
        setting = BY_NAME[name]
        if not setting.flag or not runs.is_compared(setting):
            continue
        assert RunIndex([row | {name: OTHERS.get(setting.kind, "other")}]).find(run) == [], name
        if name not in run and name not in ("dataset", "beam_size"):  # on which other defaults depend
            assert RunIndex([row | {name: ""}]).find(run) == [0], name


# A value of each flag of a linear classifier that its default is not, and a method that takes it where most do not.
VALUES = {
    **{setting.name: "0.3" for setting in settings.SETTINGS if setting.kind is float},
    **{setting.name: "3" for setting in settings.SETTINGS if setting.kind is int},
    **{"p_k": "0.5 0.5", "inverse_temperature": "0.3", "distribution": "cauchy", "top1_mode": "smce"},
    **{"implementation": "difftopk", "precision": "bf16", "noise_matrix": "t.pt", "data_path": "b.pt"},
    **{"hidden_dims": "3 4", "apply_relu": "", "apply_dropout": "", "method": "lapsum"},
}


def flags_of_rows(script: str) -> list[Setting]:
    """The settings by which runs of a script differ and that a flag gives, except the seed."""
    known = vars(PARSE[script](["--method", "lapsum"])).keys() - {"seed"}
    return [item for item in settings.SETTINGS if item.flag and item.name in known and runs.is_compared(item)]


@pytest.mark.parametrize("script", [script for script in PARSE if script != runs.BEAM_SEARCH])  # it has no such value
def test_a_value_that_is_as_none_is_the_default_where_none_is(script):
    """Elsewhere its row has the value, with which it is found, and not by the command without the flag."""
    words = ["--method", "lapsum"]
    for setting in flags_of_rows(script):
        if setting.unused is None or setting.kind is settings.boolean:  # a flag without a value
            continue
        given = [*words, setting.flag, settings.cell(setting.unused)]
        row, plain = (cells_of(config_of(script, flags)) for flags in (given, words))
        assert RunIndex([row]).find(parse_flags(command_of(row)) | {"seed": 0}) == [0]
        is_default = row == plain
        assert RunIndex([row]).find({"method": "lapsum"}) == [0] * is_default
        assert is_default or f"{setting.flag} {settings.cell(setting.unused)}" in command_of(row)


@pytest.mark.parametrize("setting", flags_of_rows(runs.IMAGENET), ids=lambda setting: setting.name)
def test_an_also_takes_what_the_script_lets_it_take(setting):
    """The other loss of a pass has the value of the command's flag, or is without it, as the script reads it."""
    given = f"{setting.flag} {VALUES[setting.name]}"
    words = f"--method splitter_selection {given} --also '--method softsort'"
    (other,) = PARSE[runs.IMAGENET](shlex.split(words)).also
    _, expected = expected_runs(f"{runs.PYTHON} {runs.IMAGENET} {words} --seed 0")
    with_flag = settings.cell(setting.parse(VALUES[setting.name] or "true"))
    takes = settings.cell(getattr(other, setting.name)) == with_flag
    assert takes == (settings.cell(expected.get(setting.name)) == with_flag)


def test_the_losses_that_have_no_m_are_those_that_sort_nothing():
    assert set(UNSORTED) == set(METHODS) - set(RELAXATIONS)


@pytest.mark.parametrize("flag", BY_FLAG)
def test_a_value_may_be_joined_to_its_flag(flag):
    """As argparse reads it: after an equals sign, or at once after a single letter."""
    value = "1"
    if BY_FLAG[flag].kind is settings.boolean:
        value = "true"
    if flag == "--also":
        value = "'--method softsort --lr=0.1'"
    apart = parse_flags(f"--method lapsum {flag} {value} --n_epochs 3")
    assert apart[BY_FLAG[flag].name] not in (None, [])
    assert parse_flags(f"--method lapsum {flag}={value} --n_epochs 3") == apart
    if len(flag) == 2:
        assert parse_flags(f"--method lapsum {flag}{value} --n_epochs 3") == apart


@pytest.mark.parametrize("file", FILES)
def test_the_command_that_repeats_a_row_finds_it_and_no_other(file):
    rows = read_rows(REPOSITORY / file)
    index = RunIndex(rows)
    for number, row in enumerate(rows):
        run = parse_flags(command_of(row))
        run["seed"] = run["seed"][0]
        assert index.find(run) == [number], row["run_id"]


@pytest.mark.parametrize("spellings", [("1:4", "1.0:4.0"), ("0.25:4", ".25:4."), ("2", "2.00"), ("1e3:1", "1000:1.0")])
def test_a_row_is_found_by_its_inverse_temperature_in_each_spelling(spellings):
    for spelling in spellings:
        row = {"method": "softsort", "p_k": "1", "inverse_temperature": spelling}
        for other in spellings:
            assert RunIndex([row]).find(parse_flags(f"--method softsort --p_k 1 --inverse_temperature {other}")) == [0]
        assert RunIndex([row]).find(parse_flags("--method softsort --p_k 1 --inverse_temperature 1:5")) == []


def test_a_row_with_an_optional_setting_is_not_the_run_without_it():
    rows = read_rows(REPOSITORY / "heads_trials.csv")
    index = RunIndex(rows)
    run = parse_flags("--method softmax_cross_entropy --p_k 1 --lr 0.0005 --n_epochs 5 --eval_freq 100000")
    found = [rows[number] for number in index.find(run)]
    assert [(row["label_smoothing"], row["weight_decay"]) for row in found] == [("", "")]
    smoothed = [rows[number] for number in index.find(run | {"label_smoothing": 0.1})]
    assert [row["label_smoothing"] for row in smoothed] == ["0.1"]


PATHS = ("my data/heads.pt", "a 'b'/ü.pt", "two  spaces.pt", "$HOME;x.pt")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["data_path", "noisy_labels", "noise_matrix", "dataset", "model"])
def test_the_command_that_repeats_a_row_has_its_texts_and_lists_as_they_are(name, path):
    """One word for a path, whatever its characters; a word for each number of a list."""
    lists = {"p_k": "0.5 0 0 0 0.5", "hidden_dims": "32 16"}
    row = {"method": "neuralsort", "order_seed": "0", "seed": "0", **lists, name: path}
    if name in ("dataset", "model"):
        row |= {"k": "9", "order_seed": ""}
    words = shlex.split(command_of(row))
    assert words[words.index(BY_NAME[name].flag) + 1] == path
    parsed = parse_flags(command_of(row))
    assert str(parsed[name]) == path
    assert parsed["hidden_dims"] == [32, 16]
    assert settings.cell(parsed.get("p_k", [0.5, 0, 0, 0, 0.5])) == lists["p_k"]
