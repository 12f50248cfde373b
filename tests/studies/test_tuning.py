"""Tuned studies: trials, what validation chooses, and finals, on the repository's rows and on made ones."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.common.paths import REPOSITORY
from experiments.common.rows import read_rows, write_rows
from experiments.finetune_imagenet import parse_arguments
from studies import few_labels, from_scratch, heads, noise, tiny_imagenet, tuning
from studies.catalog import DESIGNS, LISTED, STUDIES, study_of
from studies.runs import RunIndex, expected_runs, parse_flags
from studies.tuning import (
    BETTER,
    EARLIER,
    ONE_SEED,
    TRIAL_SEEDS,
    Candidate,
    Finals,
    Grid,
    Known,
    Longer,
    OneByOne,
    OnePass,
    Range,
    Rule,
    Sobol,
    Trial,
    Tuned,
    tune,
)

SCRIPT = "experiments/finetune_imagenet.py"


def row_of(run: dict, number: int, embeddings: str = "own") -> dict[str, object]:
    """A row of a run, as a file has it; later rows are better."""
    accuracy = {"valid_top1": number / 1000, "valid_top5": 0.5, "test_top1": 0.5, "test_top5": 0.5}
    settings = {name: value for name, value in run.items() if name not in ("results", "data_path")}
    return {"run_id": f"run{number}", "order_seed": "", "embeddings": embeddings} | settings | accuracy


class Runner:
    """A launcher that writes the rows of the commands it is given."""

    def __init__(self, embeddings: str = "own", status: int = 0) -> None:
        self.stages: list[tuple[str, int]] = []
        self.embeddings = embeddings
        self.status = status

    def __call__(self, stage) -> int:
        self.stages.append((stage.name, len(stage.commands)))
        for command in stage.commands:
            for run in expected_runs(command):
                path = Path(run["results"])
                rows = read_rows(path)
                write_rows(path, [*rows, row_of(run, len(rows) + 1, self.embeddings)])
        return self.status


@pytest.fixture
def study(tmp_path) -> Tuned:
    """Two losses, four trials each, the best longer, two finalists, two seeds of what is chosen."""
    trials = OnePass(SCRIPT, tmp_path / "trials.csv", f"--results {tmp_path}/trials.csv -d own.pt")
    finals = OnePass(SCRIPT, tmp_path / "finals.csv", f"--results {tmp_path}/finals.csv -d own.pt", (1, 2))
    first = Grid("trials", trials, 5, {"lr": (0.001, 0.002)})
    longer = Longer("longer", trials, 22, {"lr": (0.001, 0.002)}, earlier=first)
    space = (
        Candidate("smooth", "cross-entropy", "--method softmax_cross_entropy", options=("", "--label_smoothing 0.1")),
        Candidate("gce", "GCE", "--method generalized_cross_entropy", options=("--q 0.3", "--q 0.7")),
    )
    chosen = Finals(finals, {"valid": "valid"}, rule=Rule(2, (101, 102)))
    return Tuned("study", "A study", space, (first, longer), chosen, embeddings="own")


def test_rounds_follow_one_another_then_the_finals(study):
    runner = Runner()
    assert tune(study, runner) == 0
    assert runner.stages == [("study_trials", 2), ("study_longer", 2), ("study_finalists", 1), ("study", 1)]
    rows = read_rows(study.trials_file)
    assert [row["n_epochs"] for row in rows if row["seed"] == "0"].count("22") == 4
    assert [row["seed"] for row in rows[-8:]] == ["101"] * 4 + ["102"] * 4
    finals = read_rows(study.finals.commands.results)
    assert sorted({(row["method"], row["seed"]) for row in finals}) == [
        ("generalized_cross_entropy", "1"),
        ("generalized_cross_entropy", "2"),
        ("softmax_cross_entropy", "1"),
        ("softmax_cross_entropy", "2"),
    ]
    best = {row["method"]: row["lr"] for row in rows}  # later rows are better
    assert {(row["method"], row["lr"]) for row in finals} == set(best.items())


def test_a_range_without_a_place_is_refused():
    ranges = {name: Range(0.1, 1.0) for name in ("lr", "weight_decay", "q", "alpha", "beta")}
    sobol = Sobol("trials", OnePass(SCRIPT, Path("trials.csv"), ""), 2, (4, 12), ranges)
    with pytest.raises(ValueError, match="cross-entropy has 5 ranges, and trials have 4 places"):
        sobol.of(Candidate("cross-entropy", "", "--method softmax_cross_entropy"), None)


def test_a_failed_round_is_the_status_and_the_last(study):
    runner = Runner(status=3)
    assert tune(study, runner) == 3
    assert [name for name, _ in runner.stages] == ["study_trials"]


def test_without_rows_later_rounds_are_not_known(study, capsys):
    stages = []
    assert tune(study, lambda stage: stages.append(stage.name) or 0, starts_nothing=True) == 0
    assert stages == ["study_trials"]
    assert capsys.readouterr().out == "# longer of study: known when the trials before have run\n"


def test_rows_of_other_embeddings_are_no_trials(study):
    runner = Runner(embeddings="another's")
    assert tune(study, runner) == 1
    assert [name for name, _ in runner.stages] == ["study_trials"]  # theirs choose nothing here
    assert study.chosen(study.space[0], study.known(), "valid") is None


def write_accuracies(study: Tuned, trials: list[Trial], accuracies: list[dict[int, float]]) -> None:
    """Write rows of trials into the study's file: of each trial an accuracy by seed."""
    rows = []
    for trial, by_seed in zip(trials, accuracies, strict=True):
        for seed, accuracy in by_seed.items():
            command = f"python {SCRIPT} {trial.flags} --n_epochs {trial.n_epochs} --seed {seed} --results x"
            rows.append(row_of(expected_runs(command)[0], len(rows)) | {"valid_top1": accuracy})
    write_rows(study.trials_file, rows)


FOUR = [{0: 0.9}, {0: 0.8}, {0: 0.7}, {0: 0.1}]  # accuracies of four trials with seed 0
BETTER_LATER = [{0: 0.9, 101: 0.3, 102: 0.4}, {0: 0.8, 101: 0.6, 102: 0.2}, {0: 0.7}, {0: 0.1, 101: 1.0, 102: 1.0}]


@pytest.mark.parametrize(
    ("accuracies", "rule", "expected"),
    [
        (FOUR, ONE_SEED, 0),
        (FOUR, Rule(2, (101, 102)), None),  # the finalists have not run
        (BETTER_LATER, ONE_SEED, 0),
        (BETTER_LATER, Rule(2, (101, 102)), 1),  # the mean; the last has the best mean, but is no finalist
        (BETTER_LATER, Rule(2, (101,)), 1),
        (BETTER_LATER, Rule(2, (102,)), 0),
        (BETTER_LATER, Rule(2, (101, 102, 103)), None),  # both finalists lack a seed
        (BETTER_LATER, Rule(3, (101, 102)), None),  # one finalist has no seed
        (BETTER_LATER, Rule(1, (101, 102)), 0),  # there is nothing to choose
        ([{0: 0.5, 101: 0.2}, {0: 0.5, 101: 0.2}, {0: 0.5, 101: 0.1}, {0: 0.4}], Rule(3, (101,)), 0),  # equal
        ([{0: 0.1, 101: 0.9}, {101: 1.0}, {0: 0.2, 101: 0.8}, {1: 1.0}], Rule(5, (101,)), 0),  # no trial without seed 0
    ],
)  # fmt: skip
def test_the_mean_of_the_finalists_chooses(study, accuracies, rule, expected):
    trials = study.rounds[0].of(study.space[1], study.known())
    write_accuracies(study, trials, accuracies)
    chosen = rule.choose(study.known().tried(trials), "valid", EARLIER)
    assert chosen == (None if expected is None else trials[expected])


@pytest.mark.parametrize(("place", "better"), [(0, True), (1, False)], ids=["baseline", "other loss"])
@pytest.mark.parametrize("rule", [ONE_SEED, Rule(3, (101,))], ids=["one seed", "finalists"])
@pytest.mark.parametrize("split", ["valid", "last_valid", "last_clean"])
def test_of_trials_that_tie_a_baseline_gets_the_better_in_test_and_another_loss_the_earlier(
    study, place, better, rule, split
):
    """The sums of the second and of the third trial differ in their last bit."""
    test = "test" if split == "valid" else "last_test"
    trials = study.rounds[0].of(study.space[place], study.known())[:4]
    write_accuracies(study, trials, [{0: 0.0, 101: 0.0}] * 4)
    parts = [(0.2, 0.2), (0.1 + 0.2, 0.6), (0.3, 0.6), (0.3, 0.3)]
    rows = read_rows(study.trials_file)
    for number, row in enumerate(rows):
        top1, top5 = parts[number // 2]
        row |= {f"{split}_top1": repr(top1), f"{split}_top5": repr(top5)}
        row |= {f"{test}_top1": str(number // 2 / 10), f"{test}_top5": "0.5"}
    write_rows(study.trials_file, rows)
    assert sum(parts[1]) != sum(parts[2])
    chosen = rule.choose(study.known().tried(trials), split, study.space[place].ties)
    assert chosen == trials[2 if better else 1]


@pytest.mark.parametrize("ties", [EARLIER, BETTER])
def test_the_order_in_which_rows_were_written_chooses_nothing(study, ties):
    """Several processes write them in another order each time, and many trials tie."""
    trials = study.rounds[0].of(study.space[1], study.known())[:4]
    write_accuracies(study, trials, [{0: 0.1, 101: 0.9}, {0: 0.5, 101: 0.7}, {0: 0.5, 101: 0.7}, {0: 0.5, 101: 0.7}])
    rule = Rule(2, (101,))
    rows = read_rows(study.trials_file)
    for order in (rows, rows[::-1], rows[3:] + rows[:3]):
        write_rows(study.trials_file, order)
        tried = study.known().tried(trials)
        assert [item.trial for item in rule.finalists_of(tried, "valid", ties)] == trials[1:3]
        assert rule.choose(tried, "valid", ties) == trials[1]


def test_cross_entropy_is_the_baseline_of_every_study():
    """No other loss gets the better in test of trials that tie."""
    studies = [noise.noise("human"), few_labels.few_labels("labels_5_draw0"), heads.heads("a.pt", methods=heads.KNOWN)]
    studies += [tiny_imagenet.tiny_imagenet(), tiny_imagenet.tiny_imagenet_equal(), from_scratch.noise_scratch("a.pt")]
    for item in studies:
        baselines = [candidate.flags for candidate in item.space if candidate.ties]
        assert baselines
        assert all("--method softmax_cross_entropy" in flags for flags in baselines)
        assert sum("--method softmax_cross_entropy" in candidate.flags for candidate in item.space) == len(baselines)


def finalists_of(study: Tuned) -> list[tuple[Trial, str]]:
    """The trials that get more seeds, with the method of each."""
    known = study.known()
    found = []
    for candidate in study.space:
        found += [(trial, candidate.name) for trial in study.finalists(candidate, known)]
    return found


def test_where_all_trials_tie_the_finals_run_all_the_same(study):
    """Of cross-entropy the finalists are the best in test, of the other loss the first."""

    def launch(stage) -> int:
        status = runner(stage)
        rows = read_rows(study.trials_file)
        for number, row in enumerate(rows):
            row |= {"valid_top1": "0.5", "test_top1": str(number / 1000)}
        write_rows(study.trials_file, rows)
        return status

    runner = Runner()
    assert tune(study, launch) == 0
    assert [name for name, _ in runner.stages[2:]] == ["study_finalists", "study"]
    trials = [item.trial for item in study.tried(study.space[0], study.known())]
    assert study.finalists(study.space[0], study.known()) == [trials[-1], trials[-2]]
    others = [item.trial for item in study.tried(study.space[1], study.known())]
    assert study.finalists(study.space[1], study.known()) == others[:2]


@pytest.mark.parametrize(
    ("change", "is_chosen"),
    [
        ({}, True),
        ({"embeddings": "another's"}, False),
        ({"seed": "201"}, False),
        ({"n_epochs": "7"}, False),
    ],
    ids=["all", "other embeddings", "another seed", "another trial"],
)
def test_finals_wait_for_every_row_of_every_finalist(study, change, is_chosen, capsys):
    """One row of the finalists is another one: the finals are not known."""

    def launch(stage) -> int:
        status = runner(stage)
        if stage.name == "study_finalists":
            rows = read_rows(study.trials_file)
            rows[-3] |= change
            write_rows(study.trials_file, rows)
        return status

    runner = Runner()
    assert tune(study, launch) == (0 if is_chosen else 1)
    lacking = f"finals of study: not all of its finalists have a row with their settings in {study.trials_file}\n"
    assert capsys.readouterr().err == ("" if is_chosen else lacking)
    assert [name for name, _ in runner.stages[3:]] == (["study"] if is_chosen else [])
    assert study.has_chosen(study.known()) == is_chosen


def test_the_finalists_are_the_best_of_seed_0_and_the_finals_the_best_of_their_mean(study):
    """Rows of the finals' seeds among the trials choose nothing, however good they are."""
    runner = Runner()
    stages = []

    def launch(stage) -> int:
        stages.append(stage)
        return runner(stage)

    tune(study, launch)
    rows = read_rows(study.trials_file)
    first, second = [trial for trial, name in finalists_of(study) if name == "gce"]
    assert [trial.n_epochs for trial in (first, second)] == [22, 22]  # the longer round came later, and later is better
    for row in rows:
        if row["seed"] in ("101", "102") and row["method"] == "generalized_cross_entropy":
            is_first = row["lr"] == str(parse_flags(first.flags)["lr"])
            row["valid_top1"] = {True: "0.9", False: "0.8"}[is_first]
    good = [row | {"seed": seed, "run_id": seed, "valid_top1": "1.0"} for row in rows[-1:] for seed in ("1", "2")]
    write_rows(study.trials_file, [*rows, *good])
    assert study.chosen(study.space[1], study.known(), "valid") == first
    assert finalists_of(study)[2:] == [(first, "gce"), (second, "gce")]


def test_finals_without_seeds_of_the_rule_were_chosen_by_the_first_seed_which_is_said(study):
    study = replace(study, rounds=study.rounds[:1])
    trials = study.rounds[0].of(study.space[1], study.known())
    write_accuracies(study, trials, FOUR)
    assert study.rule_of(study.known()) == study.finals.rule
    assert study.chosen(study.space[1], study.known(), "valid") is None  # the finalists have not run
    final = read_rows(study.trials_file)[0] | {"seed": "1"}
    write_rows(study.finals.commands.results, [final | {"embeddings": "another's"}])
    assert study.rule_of(study.known()) == study.finals.rule
    write_rows(study.finals.commands.results, [final])
    assert study.rule_of(study.known()) == ONE_SEED
    assert study.chosen(study.space[1], study.known(), "valid") == trials[0]
    assert "one seed chose" in study.rule_of(study.known()).text
    write_accuracies(study, trials, BETTER_LATER)
    assert study.rule_of(study.known()) == study.finals.rule
    assert study.chosen(study.space[1], study.known(), "valid") == trials[1]
    assert "The 2 trials" in study.rule_of(study.known()).text


@pytest.mark.parametrize("losses", [0, 1])
def test_nothing_is_chosen_before_every_trial_of_every_round_has_its_row(study, losses):
    """A trial of seed 0 is lacking, with or without its finalists' rows; then a whole round."""
    candidate = study.space[losses]
    assert tune(study, Runner()) == 0
    rows = read_rows(study.trials_file)
    method = parse_flags(candidate.flags)["method"]
    assert study.chosen(candidate, study.known(), "valid") is not None
    own = [row for row in rows if row["method"] == method and row["seed"] == "0"]
    assert len(own) == 6
    for left_out in [[row] for row in own] + [[row for row in own if row["n_epochs"] == "22"]]:
        write_rows(study.trials_file, [row for row in rows if row not in left_out])
        assert study.chosen(candidate, study.known(), "valid") is None
        assert study.chosen(study.space[1 - losses], study.known(), "valid") is not None
        assert not study.trials_are_done(study.known())


SECOND = {"heads": heads.heads_more, "tiny_imagenet": tiny_imagenet.tiny_imagenet_more}


@pytest.mark.parametrize("name", SECOND)
def test_a_second_study_waits_for_every_trial_of_the_first(name, tmp_path):
    """One of them is lacking."""
    rows = read_rows(REPOSITORY / f"{name}_trials.csv")
    trials = tmp_path / f"{name}_trials.csv"
    write_rows(tmp_path / f"{name}.csv", read_rows(REPOSITORY / f"{name}.csv"))
    write_rows(trials, rows)
    method = "splitter_selection"
    data = {"heads": ("FILE.pt", "heads", (method,), 5000, "", trials), "tiny_imagenet": (trials,)}[name]
    assert SECOND[name](*data).space
    numbers = [number for number, row in enumerate(rows) if row["method"] == method]
    write_rows(trials, rows[: numbers[-1]] + rows[numbers[-1] + 1 :])
    with pytest.raises(ValueError, match=rf"{trials}, {method}: trials not finished; run scripts/{name}.sh first"):
        SECOND[name](*data)


def test_more_trials_of_linear_classifiers_wait_for_the_finalists_and_say_what_is_lacking(tmp_path):
    """Of the repository's trials, whose finals are not there."""
    trials = tmp_path / "heads_trials.csv"
    rows = read_rows(REPOSITORY / "heads_trials.csv")
    for found, lacking in ((rows, "finalists not finished"), (rows[:1], "no trials")):
        write_rows(trials, found)
        with pytest.raises(ValueError, match=rf"{trials}, lapsum: {lacking}; run scripts/heads.sh first"):
            heads.heads_more("FILE.pt", "heads", ("lapsum",), around=trials)


TUNED = ["heads_more.csv", "tiny_imagenet_more.csv", "heads.csv", "tiny_imagenet.csv", "tiny_imagenet_equal.csv"]
TUNED += ["noise_scratch.csv"]
TUNED += [f"{name}/{labels}.csv" for name, design in DESIGNS.items() for labels in design.kinds]


def test_every_study_with_trials_is_among_these():
    families = {name.split("/")[0].removesuffix(".csv") for name in TUNED}
    listed = {study.name for study in LISTED}
    plain = {"knn", "temperature", "temperature_classes", "temperature_training", "own_features"}
    assert set(STUDIES) - listed - plain == families


@pytest.mark.parametrize("name", TUNED)
def test_trials_are_read_from_the_repository_whatever_the_working_directory(name, tmp_path, monkeypatch):
    """As the rows of a status are: scripts/study.py may be called from another directory."""
    study = study_of(name, REPOSITORY)
    row = read_rows(REPOSITORY / "heads_trials.csv")[0]
    for folder in ("root", "elsewhere"):
        path = tmp_path / folder / study.trials_file
        path.parent.mkdir(parents=True)
        write_rows(path, [row | {"run_id": folder}])
    monkeypatch.setattr(tuning, "ROOT", tmp_path / "root")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert [row["run_id"] for row in study.known().rows] == ["root"]


@pytest.mark.parametrize("name", TUNED)
def test_no_seed_of_finals_ever_chose(name):
    study = study_of(name, REPOSITORY)
    rule = study.finals.rule
    chose = set(rule.seeds) | set(TRIAL_SEEDS)
    assert rule.finalists > 1
    assert len(rule.seeds) > 1
    assert not chose & set(study.finals.commands.seeds)
    for part in study.rounds:
        assert part.commands.seeds == TRIAL_SEEDS
        assert part.commands.results == study.trials_file  # where the finalists' rows are looked for


def test_the_place_of_a_number_of_a_range_is_the_one_it_was_made_at():
    for numbers in (Range(0.1, 10), Range(0, 2, linear=True)):
        for place in (0, 0.25, 1):
            assert numbers.place(numbers.at(place)) == pytest.approx(place, abs=2e-3)


def test_numbers_of_a_range_have_three_digits():
    assert [Range(0.1, 10).at(place) for place in (0, 0.5, 1)] == [0.1, 1, 10]
    assert Range(0, 2, linear=True).at(1 / 3) == 0.667


def test_one_by_one_has_a_command_for_each_seed_of_each_trial():
    commands = OneByOne("experiments/train_cifar100.py", Path("r.csv"), "--results r.csv", (1, 2))
    lines = commands.of([Trial("--method lml", "--lr 0.1", 3), Trial("--method lapsum", "", 3)])
    assert [shlex.split(line)[2:] for line in lines] == [
        ["--method", method, *rate, "--seed", seed, "--results", "r.csv"]
        for seed in ("1", "2")
        for method, rate in (("lml", ["--lr", "0.1"]), ("lapsum", []))
    ]


@pytest.mark.parametrize("labels", noise.LABELS)
def test_the_trials_of_a_kind_of_labels_are_the_repositorys_and_so_are_its_finals(labels):
    """Every trial has its row, validation chooses what ran, and no other run is in the files but an earlier trial of
    cross-entropy that ties."""
    study = noise.noise(labels)
    known = study.known(REPOSITORY / "noise" / f"{labels}_trials.csv")
    chosen = set()
    trials = []
    for candidate in study.space:
        trials += study.trials_of(candidate, known)
        for split in noise.CHOICES.values():
            chosen.add(study.chosen(candidate, known, split))
            chosen.add(study.rule_of(known).choose(study.tried(candidate, known), split, EARLIER))
    assert len(trials) == len(known.rows) == 30 * len(study.space)
    assert known.are_done(trials)
    finals = Known(REPOSITORY / "noise" / f"{labels}.csv", study.finals.commands.flags)
    assert sum(len(finals.of(trial)) for trial in chosen) == len(finals.rows) == 10 * len(chosen)


@pytest.mark.parametrize("name", ["heads_noise_.2", "heads_noise_.2_of_100", "heads_more", "heads_noise_.2_more"])
def test_the_finals_of_linear_classifiers_are_the_repositorys(name):
    study = study_of(f"{name}.csv", REPOSITORY)
    known = study.known(REPOSITORY / f"{name}_trials.csv")
    finals = Known(REPOSITORY / f"{name}.csv", study.finals.commands.flags)
    for candidate in study.space:
        trial = study.chosen(candidate, known, "valid")
        assert len(finals.of(trial)) == 10, candidate.name
    assert len(finals.rows) == 10 * len(study.space)


def test_table_3_on_tiny_imagenet_is_the_repositorys():
    for study in (tiny_imagenet.tiny_imagenet(), study_of("tiny_imagenet_more.csv", REPOSITORY)):
        known = study.known(REPOSITORY / study.trials_file.name)
        finals = Known(REPOSITORY / study.finals.commands.results.name, study.finals.commands.flags)
        trials = []
        for candidate in study.space:
            trials += study.trials_of(candidate, known)
            assert len(finals.of(study.chosen(candidate, known, "valid"))) == 10
        assert (len(trials), known.are_done(trials)) == (len(known.rows), True)
        assert len(finals.rows) == 10 * len(study.space)


def test_on_tiny_imagenet_five_losses_have_45_trials_and_those_of_the_sorts_have_run():
    study = tiny_imagenet.tiny_imagenet_equal()
    first = tiny_imagenet.tiny_imagenet()
    known = first.known(REPOSITORY / "tiny_imagenet_trials.csv")
    for candidate in study.space:
        trials = study.trials_of(candidate, known)
        assert len(set(trials)) == len(trials) == 45
        assert known.are_done(trials) == (candidate.name in tiny_imagenet.INVERSE_TEMPERATURES)
        for trial in trials:  # the script takes them
            parse_arguments(shlex.split(trial.flags))


def test_from_scratch_noisy_validation_chose_what_got_more_seeds(monkeypatch, tmp_path):
    study = from_scratch.noise_scratch("data/downloads/CIFAR-100_human.pt")
    rows = read_rows(REPOSITORY / "noise_scratch.csv")
    path = tmp_path / "noise_scratch.csv"
    write_rows(path, rows)
    known = study.known(path)
    monkeypatch.setattr(Tuned, "known", lambda self, path=None: known)
    trials = study.round_commands(study.rounds[0])
    finals = study.final_commands()
    index = RunIndex(rows)
    found = [index.find(expected_runs(command)[0]) for command in [*trials, *finals]]
    assert all(len(numbers) == 1 for numbers in found[:10])
    assert {len(numbers) for numbers in found} <= {0, 1}  # seeds that are still to run
    assert len({number for numbers in found for number in numbers}) == len(rows)


def test_temperatures_of_heads_are_settings_that_their_losses_take():
    for method in heads.KNOWN:
        for option in heads.candidate(method).options:
            assert option == "" or option.startswith("--")
    assert torch.isclose(torch.tensor(heads.LEVEL), torch.tensor(2.0**-12))


@pytest.mark.parametrize("kind", few_labels.FEW_LABELS.kinds)
def test_few_labels_train_as_many_images_as_validate_for_the_same_steps(kind):
    """The numbers of the command, read by the script: images a class, the draw, and steps of each number of epochs."""
    study = few_labels.few_labels(kind, data=Path("heads.pt"))
    _, per_class, draw = kind.split("_")
    steps = set()
    for command in study.round_commands(study.rounds[0]):
        args = parse_arguments(shlex.split(command)[2:])
        assert args.limit_train - args.num_valid == args.num_valid == 100 * int(per_class)
        assert args.split_seed == int(draw.removeprefix("draw"))
        assert (args.eval_freq, str(args.data_path), len(args.also)) == (0, "heads.pt", 9)
        steps.add(args.n_epochs * (args.num_valid // args.batch_size))
    assert steps == {200, 800, 2400}
    assert len(study.space) == len(few_labels.LOSSES) == 5


def test_with_100_labels_a_class_the_ranges_of_rates_and_of_the_sorts_temperatures_end_elsewhere():
    ends = {}
    for size in ("5", "20", "100"):
        study = few_labels.few_labels(f"labels_{size}_draw3")
        (trials,) = study.rounds
        rates = trials.ranges["lr"]
        found = {item.name: item.ranges.get("inverse_temperature") for item in study.space}
        ends[size] = (tuple(rates), found["splitter_selection"].high, found["lapsum"].high, tuple(found["ldr_kl"]))
    assert ends["5"] == ends["20"] == ((0.0003, 0.03, False), 1, 0.25, (0.25, 2, False))
    assert ends["100"] == ((0.0001, 0.01, False), 4, 1, (0.25, 2, False))


def test_every_draw_of_a_design_has_other_data():
    """Kinds of labels differ in the flags of their files, or in those of their commands."""
    for design in DESIGNS.values():
        made = set()
        for kind, labels in design.kinds.items():
            made.add((labels.flags, design.flags(kind, Path("data")).replace(kind, "")))
        assert len(made) == len(design.kinds)
