"""The lists of runs are commands of their scripts, with the settings that the studies name."""

import re
import shlex
from collections import Counter
from pathlib import Path

import pytest
import torch

from experiments import finetune_imagenet, train_beam_search, train_cifar100, train_knn
from experiments.common import door
from experiments.common.objective import build_loss, fill_in_loss
from experiments.common.settings import (
    BY_FLAG,
    CALL,
    LOSS,
    MACHINE,
    PRETRAINING,
    cell,
    columns,
    identifying,
)
from experiments.finetune_imagenet import IMAGENET_1K
from experiments.finetune_imagenet21k import IMAGENET_21K
from scripts import study as script
from studies import own_features
from studies.catalog import DESIGNS, STUDIES
from studies.runs import Study
from studies.tuning import Tuned
from tests.studies.test_published_rows import published
from topk_losses import METHODS, RELAXATIONS

ROOT = Path(__file__).parents[2]
NUM_ROWS = {
    **{"table1": 20, "table2_3_imagenet1k": 20, "table2_3_imagenet21k": 20, "table4": 46, "table5": 12, "strong": 6},
    **{"temperature_training": 122, "scratch": 30, "implementation": 8, "quickstart": 4},
}
HEADS = "experiments/finetune_imagenet.py"
PARSE = {
    "experiments/train_cifar100.py": train_cifar100.parse_arguments,
    HEADS: finetune_imagenet.parse_arguments,
    "experiments/finetune_imagenet21k.py": lambda words: finetune_imagenet.parse_arguments(words, IMAGENET_21K),
}


def commands(name: str, *data: str, **options: bool) -> list[str]:
    return STUDIES[name].make(*data, **options).commands()


def recipe_of(head, protocol=IMAGENET_1K, num_classes=100) -> dict:
    """The settings of a loss, which can be built, and of its training."""
    settings = fill_in_loss(head, top1_mode="sm", inverse_temperatures={}, m=protocol.m)
    build_loss(vars(head) | settings, num_classes, torch.device("cpu"))
    return columns({**settings, "lr": head.lr, "weight_decay": head.weight_decay})


@pytest.mark.parametrize("study", NUM_ROWS)
def test_every_run_is_a_command_of_its_script_for_its_file(study):
    rows = commands(study)
    assert len(rows) == len(set(rows)) == NUM_ROWS[study]
    for row in rows:
        words = shlex.split(row)
        assert words[0] == ".venv/bin/python"
        args = PARSE[words[1]](words[2:])
        assert str(args.results) == f"results/{study}.csv"
        settings = fill_in_loss(args, top1_mode="sm", inverse_temperatures={})
        build_loss(settings, 1000, torch.device("cpu"))
    losses_run = Counter(re.sub(r"--seed \d", "", row) for row in rows)
    assert set(losses_run.values()) <= {"scratch": {1, 2, 3}, "quickstart": {1}}.get(study, {2})


def test_a_dry_run_prints_the_runs_of_a_study(capsys):
    assert script.main(["table1", "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == [*commands("table1"), "# 20 runs"]


def test_table_1_is_what_the_documentation_says():
    text = (ROOT / "docs" / "reproduce.md").read_text().replace("\\\n    ", "")
    documented = re.findall(r"^\$train (--method .*)$", text, re.MULTILINE)
    assert {re.search(r"(--method .*) --seed 0", row)[1] for row in commands("table1") if "--seed 0" in row} == set(
        documented
    )


@pytest.mark.parametrize(("study", "seeds"), [("table1", "012"), ("table4", "01")])
def test_short_rows_are_the_tables_but_for_schedule_and_precision(study, seeds):
    short = " --n_epochs 16 --lr_schedule cosine --precision bf16"
    first_seed = [row for row in commands(study) if "--seed 0" in row]
    assert commands(study, short=True) == [
        row.replace("--seed 0", f"--seed {seed}").replace(f"{study}.csv", f"{study}_short.csv") + short
        for seed in seeds
        for row in first_seed
    ]


@pytest.mark.parametrize("study", ["table2_3_imagenet1k", "table2_3_imagenet21k"])
def test_the_losses_of_a_seed_can_be_one_command(study):
    """The losses of all but the first in --also: the same recipes."""
    rows = [row for row in commands(study) if "--seed 0" in row]
    script, *words = shlex.split(rows[0])[1:]
    defaults = IMAGENET_21K if "21k" in script else IMAGENET_1K

    def recipes(words: list[str]) -> list[dict]:
        args = PARSE[script](words)
        return [recipe_of(head, defaults, defaults.num_classes) for head in (args, *args.also)]

    flags = [re.search(r"(--method .*) --seed", row)[1] for row in rows]
    together = recipes([*words, *(word for loss in flags[1:] for word in ("--also", loss))])
    assert together == [recipe for row in rows for recipe in recipes(shlex.split(row)[2:])]
    assert len(together) == 10


def test_the_nearest_neighbours_have_every_relaxation_both_losses_and_the_baselines(tmp_path):
    (data := tmp_path / "a file.pt").touch()
    lines = {"digits": [], str(data): []}
    for row in commands("knn", "digits", str(data)):
        args = train_knn.parse_arguments(shlex.split(row)[2:])
        train_knn.configuration(args, args.seed[0])
        loss = args.loss if args.method in RELAXATIONS else ""
        lines[args.dataset or str(args.data_path)].append((*args.seed, args.method, loss, args.sorted, args.prediction))
    relaxed = [(method, False) for method in RELAXATIONS] + [("soft_topk", True)]
    expected = {(method, loss, order, "neighbours") for method, order in relaxed for loss in ("mass", "log_mass")}
    expected |= {(method, "", False, "neighbours") for method in ("inputs", "pca", "softmax_cross_entropy")}
    expected |= {("softmax_cross_entropy", "", False, "network")}
    for runs in lines.values():
        assert sorted(runs) == sorted((seed, *line) for seed in (0, 1, 2) for line in expected)


def test_the_short_study_of_nearest_neighbours_has_each_published_arm():
    arms = Counter()
    for row in commands("knn", "mnist", short=True):
        args = train_knn.parse_arguments(shlex.split(row)[2:])
        assert (args.n_epochs, args.precision) == (3, "bf16")
        arms[args.method, args.loss if args.method in RELAXATIONS else "", args.prediction] += 1
    assert set(arms.values()) == {3}
    untrained = {(method, "", "neighbours") for method in ("inputs", "pca")}
    assert set(arms) - untrained == {(row["method"], row["loss"], row["prediction"]) for row in published("knn_mnist")}


def test_temperatures_are_heads_of_every_method_and_none_is_refused():
    seen = set()
    results = Counter()
    for row in [*commands("temperature", "some.pt"), *commands("temperature_classes", "a.pt", "b.pt", "c.pt")]:
        args = finetune_imagenet.parse_arguments(shlex.split(row)[2:])
        seen |= {recipe_of(head)["method"] for head in (args, *args.also)}
        results[f"{args.results.stem} {args.data_path}"] += 1
    assert seen == set(METHODS)
    numbers = {
        "temperature_classes_10 a.pt": 5,
        "temperature_classes_100 b.pt": 15,
        "temperature_classes_1000 c.pt": 15,
    }
    assert dict(list(results.items())[1:]) == numbers


def test_the_arms_of_a_seed_share_their_pretraining():
    resolved = [train_beam_search.parse_arguments(shlex.split(row)[2:]) for row in commands("beam_search", short=True)]
    names = [item.name for item in identifying(PRETRAINING)]
    shared = Counter(tuple(cell(getattr(args, name)) for name in names) for args in resolved)
    assert list(shared.values()) == [4] * 5


@pytest.mark.parametrize(
    "words",
    [
        "",
        "tables",
        "temperature",
        "temperature absent.pt --dry-run",
        "temperature_classes a.pt",
        "knn no/a.pt",
        "strong --short",
        "quickstart --results other.csv",
        "quickstart --jobs 2 -- --results=other.csv",
        "table2_3_imagenet1k --also=--method",
        f"heads {__file__} --limit_train 60",
        f"noise {__file__} --labels right -d=other.pt",
        f"temperature {__file__} --mixup 0.2",
        "table1 cifar100",
        "table1 --jobs 0",
        "table1 --methods lml",
        "heads",
        "heads no/such.pt --dry-run",
        f"heads {__file__} --methods lmi",
        f"noise {__file__}",
        f"noise {__file__} --labels right --losses lmi",
    ],
)
def test_what_is_wrong_is_a_sentence_before_anything_starts(words, capsys):
    with pytest.raises((ValueError, OSError)) as error:
        script.main(words.split())
    assert capsys.readouterr().out == ""
    assert door.is_a_sentence(error.value)


def study_made(name: str) -> Study | Tuned | None:
    """A study by its name; None if it is made from trials of another."""
    if name in DESIGNS:
        return STUDIES[name].make(next(iter(DESIGNS[name].kinds)))
    if name.endswith("_more"):
        return None
    if name == own_features.NAME:
        return own_features.own_features("a.pt", own_features.Size(num_train=800, num_valid=200, num_classes=10))
    data = ["a.pt"] * len(STUDIES[name].data)
    if name == "knn":
        data = ["digits"]
    return STUDIES[name].make(*data)


@pytest.mark.parametrize("name", STUDIES)
def test_the_catalog_says_which_studies_have_trials_and_which_train_losses_together(name):
    study = study_made(name)
    if study is None:
        assert STUDIES[name].has_trials == STUDIES[name.removesuffix("_more")].has_trials is True
        return
    assert STUDIES[name].has_trials == isinstance(study, Tuned)
    if isinstance(study, Study):
        assert STUDIES[name].trains_together == any("--also" in command for command in study.commands())


def refusal(words: list[str]) -> str:
    """Why the flags of a call are refused; "" if they are not."""
    try:
        script.parse_arguments(words)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", STUDIES)
def test_flags_for_all_runs_reach_them_all_or_are_refused(name):
    """A study with trials would not find runs of other settings; what is of one loss does not reach each --also."""
    entry = STUDIES[name]
    refused = set()
    for flag in BY_FLAG.keys() - {"--num_valid"}:  # a flag of the study
        sentence = refusal([name, *["a.pt"] * len(entry.data), "--jobs", "2", f"{flag}=1"])
        if sentence:
            assert flag in sentence
            refused.add(BY_FLAG[flag].name)
    of_runs = set()
    of_losses = {"mixup", "noise_matrix", "implementation"}
    for item in BY_FLAG.values():
        if item.role not in (MACHINE, CALL) and item.name != "num_valid":
            of_runs.add(item.name)
        if item.role is LOSS:
            of_losses.add(item.name)
    expected = {"results", "also", "method"}
    if entry.has_trials:
        expected |= of_runs
    if entry.trains_together:
        expected |= of_losses
    assert refused == expected


STARTED = "=== 2026-01-01T00:00:00Z attempt 1 of 2\n"


@pytest.mark.parametrize("words", [["--jobs", "4"], ["--run-per-core"], ["--per-gpu=2"], ["--", "--n_epochs=1"]])
def test_runs_that_failed_are_failed_in_the_status_of_the_same_call(words, tmp_path, capsys):
    """Flags of the launcher are not in its commands, nor in the logs that --status reads."""
    call = ["quickstart", "--limit_train=61", "--logs", str(tmp_path), *words]
    split = call.index("--") if "--" in call else len(call)
    script.main([*call[:split], "--dry-run", *call[split:]])
    *lines, _ = capsys.readouterr().out.splitlines()
    assert not any("--logs" in line for line in lines)
    for number, line in enumerate(lines):
        (tmp_path / f"{number}.log").write_text(f"{STARTED}$ {line}\nerror: no such device\n=== exit status 2\n")
    script.main([*call[:split], "--status", *call[split:]])
    assert f"0 running, {len(lines)} failed, 0 waiting" in capsys.readouterr().out
