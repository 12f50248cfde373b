"""The study of a user's own embeddings: what it tries and refuses, and its report of rows with made accuracies."""

import random
from collections import defaultdict
from pathlib import Path
from statistics import fmean, stdev

import pytest
import torch
from scipy.stats import t

from experiments import finetune_imagenet
from experiments.common.rows import read_rows, write_rows
from reporting import reproduction, tuned
from scripts import study as script
from studies import own_features, tuning
from studies.catalog import study_of
from studies.own_features import Size
from studies.runs import expected_runs, parse_flags
from studies.tuning import tune
from tests.tables import table_of

SEEDS = range(1, 11)
BASELINE = "cross-entropy"


def embeddings(
    path: Path, num_rows: int = 60, num_classes: int = 6, splits: tuple[str, ...] = ("train", "test")
) -> Path:
    content = {}
    for name in splits:
        content[f"{name}_embeddings"] = torch.randn(num_rows, 4)
        content[f"{name}_labels"] = torch.arange(num_rows) % num_classes
    torch.save(content, path)
    return path


def studied(*words: object):
    args, _ = script.parse_arguments(["own_features", *map(str, words)])
    (found,) = script.studies_of(args)
    return found


@pytest.mark.parametrize("num_train", [1, 19, 800, 2000, 12_345, 45_000, 1_000_000])
def test_trials_have_about_as_many_steps_with_any_number_of_rows(num_train):
    size = Size(num_train, 10, 100)
    assert size.batch_size <= num_train
    steps_per_epoch = num_train // size.batch_size
    for steps, epochs in zip(own_features.STEPS, size.epochs, strict=True):
        assert (epochs - 1) * steps_per_epoch < steps <= epochs * steps_per_epoch


@pytest.mark.parametrize("num_classes", [3, 4, 5, 6, 10, 15, 16, 17, 1000])
def test_the_second_k_is_below_the_number_of_classes(num_classes):
    k = Size(100, 10, num_classes).k
    assert 2 <= k < num_classes
    assert k <= 5
    for candidate in own_features.candidates(k):
        values = parse_flags(candidate.flags)
        if candidate.name in ("splitter_selection", "lapsum", "softsort", "df_topk"):
            assert values["p_k"] == [0.5, *[0.0] * (k - 2), 0.5]


def test_every_loss_has_the_same_places_in_the_ranges_that_all_have(tmp_path):
    found = studied(embeddings(tmp_path / "own.pt"), "--losses", *own_features.KNOWN)
    shared = defaultdict(list)
    for candidate in found.space:
        for trial in found.rounds[0].of(candidate, found.known()):
            values = parse_flags(trial.flags)
            shared[candidate.name].append((values["lr"], values["weight_decay"], trial.n_epochs))
    assert set(shared) == set(own_features.KNOWN)
    assert len({tuple(trials) for trials in shared.values()}) == 1
    assert len(set(shared["gce"])) == own_features.NUM_TRIALS


@pytest.mark.parametrize(
    ("made", "words", "message"),
    [
        ({"splits": ("train",)}, [], "has no test_embeddings"),
        ({"num_classes": 2}, [], "has 2 classes: a top-k loss needs at least 3"),
        ({}, ["--num_valid", "60"], "--num_valid 60 must be at least 1 and leave some of 60 rows to train"),
        ({}, ["--num_valid", "-5"], "--num_valid -5 must be at least 1"),
        ({}, ["--num_valid", "0"], "--num_valid 0 must be at least 1"),
        ({"splits": ("train", "valid", "test")}, ["--num_valid", "5"], "has 60 rows that validate"),
        ({}, ["--losses", "smooth_topk"], "there is no smooth_topk; choose among cross_entropy"),
        ({}, ["--lr", "0.1"], "takes no --lr beside its own"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(made, words, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        studied(embeddings(tmp_path / "own.pt", **made), *words)


def test_linear_classifiers_take_no_validation_from_a_file_that_has_none(tmp_path):
    words = ["heads", str(embeddings(tmp_path / "own.pt")), "--num_valid", "0", "--dry-run"]
    with pytest.raises(ValueError, match=r"--num_valid 0: .*own\.pt has no rows of its own that validate"):
        script.main(words)
    with_split = embeddings(tmp_path / "own.pt", splits=("train", "valid", "test"))
    assert script.main(["heads", str(with_split), *words[2:]]) == 0


def test_a_validation_split_of_the_file_is_the_one_that_chooses(tmp_path):
    own = studied(embeddings(tmp_path / "own.pt", splits=("train", "valid", "test")))
    fifth = studied(embeddings(tmp_path / "none.pt"))
    assert "--num_valid" not in own.finals.commands.flags
    assert "--num_valid 12 " in fifth.finals.commands.flags


def test_the_script_trains_what_the_study_expects(tmp_path, monkeypatch):
    """One pass of trials of the top-k losses on six classes: each of its runs is found by its settings."""
    monkeypatch.chdir(tmp_path)
    found = studied(embeddings(tmp_path / "own.pt"), "--losses", "cross_entropy", "splitter_selection")
    known = found.known(tmp_path / "rows.csv")
    trials = [found.rounds[0].of(candidate, known)[0] for candidate in found.space]
    words = [f"{trials[0].flags} --also", trials[1].flags]
    argv = [*words[0].split(), words[1], "--n_epochs", "1", "--results", "rows.csv", "--threads", "1"]
    flags = found.finals.commands.flags.partition(" --results")[0].split()
    assert finetune_imagenet.main([*argv, *flags]) == 0
    known = found.known(tmp_path / "rows.csv")
    assert [len(known.numbers(trial._replace(n_epochs=1))) for trial in trials] == [1, 1]


def made_row(run: dict, number: int, seed: random.Random) -> dict[str, object]:
    """A row of a run, as a file has it, with random accuracies."""
    settings = {name: value for name, value in run.items() if name not in ("results", "data_path")}
    row = {"run_id": f"run{number}", "embeddings": "6x4-0123abcd", "train_images": 48, "num_classes": 6}
    row |= {"num_valid": 12, "device_name": "a CPU"} | settings
    for name in ("last_valid_top1", "last_valid_top5", "last_test_top1", "last_test_top5", "test_top1", "test_top5"):
        row[name] = seed.random()
    return row


@pytest.fixture
def finished(tmp_path, monkeypatch) -> Path:
    """The finals of a study of three losses whose runs all have rows."""
    monkeypatch.setattr(reproduction, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(tuning, "ROOT", tmp_path)
    data = embeddings(tmp_path / "own.pt")
    monkeypatch.chdir(tmp_path)
    losses = ("cross_entropy", "label_smoothing", "splitter_selection")
    found = own_features.own_features(str(data), Size(48, 12, 6), losses=losses)
    random_numbers = random.Random(0)

    def launch(stage) -> int:
        for command in stage.commands:
            for run in expected_runs(command):
                path = Path(run["results"])
                path.parent.mkdir(parents=True, exist_ok=True)
                rows = read_rows(path)
                write_rows(path, [*rows, made_row(run, len(rows), random_numbers)])
        return 0

    assert tune(found, launch) == 0
    return tmp_path / found.finals.commands.results


def of_loss(rows: list[dict[str, str]], title: str) -> dict[int, dict[str, str]]:
    """The rows of a loss, by the seed."""
    is_of = {
        BASELINE: lambda row: row["method"] == "softmax_cross_entropy" and not row["label_smoothing"],
        "cross-entropy, label smoothing": lambda row: row["label_smoothing"] != "",
        "splitter selection network": lambda row: row["method"] == "splitter_selection",
    }[title]
    return {int(row["seed"]): row for row in rows if is_of(row)}


def test_the_report_has_each_loss_minus_cross_entropy_by_seed(finished):
    rows = read_rows(finished)
    base = of_loss(rows, BASELINE)
    lines = table_of(reproduction.report(finished))
    assert [line["loss"] for line in lines] == [
        BASELINE,
        "cross-entropy, label smoothing",
        "splitter selection network",
    ]
    for line in lines:
        own = of_loss(rows, line["loss"])
        assert sorted(own) == list(SEEDS)
        assert line["seeds"] == "10"
        assert line["trials"] == "30"
        for metric, label in (("test_top1", "top-1"), ("test_top5", "top-5")):
            gains = [100 * (float(own[seed][metric]) - float(base[seed][metric])) for seed in SEEDS]
            half = t.ppf(0.975, 9) * stdev(gains) / 10**0.5
            expected = f"{fmean(gains):+.2f} ± {half:.2f}".replace("-", "−")
            assert line[f"Δ {label}"] == ("" if line["loss"] == BASELINE else expected)


def test_the_report_has_the_number_of_pairs_where_one_side_lacks_some(finished):
    rows = read_rows(finished)
    assert all("pairs" not in line for line in table_of(reproduction.report(finished)))
    kept = {row["seed"]: row for row in of_loss(rows, BASELINE).values()}
    gone = [row for seed, row in kept.items() if int(seed) in SEEDS[3:]]
    write_rows(finished, [row for row in rows if row not in gone])
    for line in table_of(reproduction.report(finished)):
        is_baseline = line["loss"] == BASELINE
        assert (line["seeds"], line["pairs"]) == (("3", "") if is_baseline else ("10", "3"))


def test_the_report_marks_choices_at_an_edge(finished):
    """Of every trial of a loss: learning rates in the outer sixths of their range, the least and the most epochs."""
    found = study_of("own_features/own.csv", finished.parent)
    (candidate,) = [item for item in found.space if item.name == "splitter_selection"]
    first = found.rounds[0]
    shown = set()
    for trial in first.of(candidate, found.known()):
        text = tuned.choice_text(found, candidate, tuned.Chosen(trial, None))
        lr = parse_flags(trial.flags)["lr"]
        mark = ""
        if lr < 0.0001 * 300 ** (1 / 6):
            mark = " (low)"
        if lr > 0.0001 * 300 ** (5 / 6):
            mark = " (high)"
        last = {first.epochs[0]: " (low)", first.epochs[-1]: " (high)"}.get(trial.n_epochs, "")
        assert text.startswith(f"learning rate {lr:g}{mark}, weight decay ")
        assert text.endswith(f", epochs {trial.n_epochs}{last}")
        shown |= {mark, last}
    assert shown == {"", " (low)", " (high)"}
    assert own_features.RANGES["lr"] == (0.0001, 0.03, False)


def test_the_report_without_finals_says_what_is_left(finished):
    trials = finished.with_name("own_trials.csv")
    finished.unlink()
    lines = table_of(reproduction.report(finished))
    assert {line["seeds"] for line in lines} == {"0"}
    assert all("top-1" not in line and "Δ top-1" not in line for line in lines)
    assert all(line["choice"].startswith("learning rate") for line in lines)
    write_rows(trials, [row for row in read_rows(trials) if row["seed"] == "0"])
    assert {line["choice"] for line in table_of(reproduction.report(finished))} == {"finalists not finished"}


@pytest.mark.parametrize("column", own_features.DATA)
def test_trials_of_other_data_are_no_single_study(finished, column):
    """As of a file that has grown since: a report would be of the former rows alone."""
    trials = finished.with_name("own_trials.csv")
    rows = read_rows(trials)
    write_rows(trials, [*rows, rows[-1] | {column: "7", "run_id": "another"}])
    with pytest.raises(ValueError, match=r"own_trials\.csv has trials of several embeddings, train_images, num_valid"):
        reproduction.report(finished)


def test_the_report_without_cross_entropy_has_no_differences(finished):
    for path in (finished, finished.with_name("own_trials.csv")):
        write_rows(path, [row for row in read_rows(path) if row["method"] == "splitter_selection"])
    (line,) = table_of(reproduction.report(finished))
    assert line["seeds"] == "10"
    assert "Δ top-1" not in line
