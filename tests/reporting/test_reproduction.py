"""The report of one's own runs: published, repository and yours, with verdicts; trials and finals, too."""

import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from experiments import train_cifar100
from experiments.common import settings
from experiments.common.paths import REPOSITORY
from experiments.common.rows import read_rows, write_rows
from reporting import reproduction
from scripts import report
from studies.catalog import study_of
from studies.from_scratch import noise_scratch
from studies.runs import command_of, expected_runs, parse_flags
from studies.tuning import Tuned
from tests.tables import table_of

FILES = ("table1_short.csv", "table4_short.csv", "scratch.csv", "implementation.csv", "beam_search.csv", "knn.csv")
ACCURACIES = ("test_top1", "test_top5", "test_wer_beam4", "test_per_beam4")


@pytest.fixture
def yours(tmp_path, monkeypatch):
    """Write changed copies of the repository's rows, as of later runs, into a folder results/; return the path."""
    monkeypatch.setattr(reproduction, "RESULTS", tmp_path)

    def call(file: str, rows: list[dict[str, str]], started: str = "2030-01-01T00:00:00.000Z") -> Path:
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        write_rows(path, [row | {"started_utc": started or row["started_utc"]} for row in rows])
        return path

    return call


@pytest.fixture
def commands_of_yours(yours, tmp_path, monkeypatch, capsys):
    """The commands of a report of rows that the repository lacks."""

    def call(rows: list[dict[str, str]]) -> list[str]:
        monkeypatch.setattr(reproduction, "REPOSITORY", tmp_path / "repository")
        assert report.main([str(yours("table1_short.csv", rows)), "--commands"]) == 0
        shown = capsys.readouterr().out.splitlines()
        return [line.strip() for line in shown if line.startswith("    .venv")]

    return call


def shifted(row: dict[str, str], points: float) -> dict[str, str]:
    """A row with other accuracies."""
    cells = {name: str(float(row[name]) + points / 100) for name in ACCURACIES if row.get(name)}
    return row | cells


@pytest.mark.parametrize("file", FILES)
def test_the_repositorys_own_runs_agree_with_themselves(file, yours):
    rows = read_rows(REPOSITORY / file)
    text = reproduction.report(yours(file, rows))
    verdicts = [cell for line in table_of(text) for name, cell in line.items() if name.endswith("verdict") and cell]
    assert verdicts
    assert {verdict.split(" (")[0] for verdict in verdicts} <= {"agrees", "no verdict"}
    for line in table_of(text):
        for name, cell in line.items():
            if name.endswith(" yours"):
                assert cell == line[name.replace("yours", "repository")]


@pytest.mark.parametrize("file", FILES)
def test_runs_that_were_added_to_the_repository_are_not_compared_with_themselves(file, yours):
    """All of them, and half of them beside repetitions of the others."""
    rows = read_rows(REPOSITORY / file)
    text = reproduction.report(yours(file, rows, started=""))
    assert "You have no runs of this study." in text
    assert "agree" not in text
    assert f"{len(rows)} of your runs stand in the repository, too, and are not compared with themselves." in text
    half = len(rows) // 2
    mixed = rows[:half] + [row | {"started_utc": "2030-01-01T00:00:00.000Z"} for row in rows[half:]]
    text = reproduction.report(yours(file, mixed, started=""))
    assert f"\n{half} of your runs stand in the repository, too" in text
    repeated = reproduction.report(yours(file, rows[half:]))
    assert table_of(text) == table_of(repeated)
    assert "stand in the repository" not in repeated


@pytest.mark.parametrize("file", ["noise/human", "noise_scratch", "heads"])
def test_trials_and_finals_that_were_added_choose_and_are_not_compared(file, yours):
    """Yours are the repository's trials, and its finals, of which you repeated the last seed."""
    names = [name for name in (f"{file}_trials.csv", f"{file}.csv") if (REPOSITORY / name).is_file()]
    rows = {name: read_rows(REPOSITORY / name) for name in names}
    seed = str(study_of(f"{file}.csv", REPOSITORY).finals.commands.seeds[-1])
    repeated = [row for row in rows[f"{file}.csv"] if row["seed"] == seed]
    added = [row for row in rows[f"{file}.csv"] if row["seed"] != seed]
    for name in names:
        yours(name, rows[name], started="")
    later = [row | {"started_utc": "2030-01-01T00:00:00.000Z"} for row in repeated]
    path = yours(f"{file}.csv", added + later, started="")
    text = reproduction.report(path)
    count = sum(map(len, rows.values())) - len(repeated)
    assert f"\n{count} of your runs stand in the repository, too" in text
    assert ("Trials: none in common." in text) == (len(names) == 2)  # else a repeated seed is one of a trial
    assert {line["your choice"] for line in table_of(text)} == {"the same trial"}
    for line in table_of(text):
        assert line["top-1 yours"] == "not run" or line["top-1 yours"].endswith(" (1)")
    assert any(line["top-1 yours"].endswith(" (1)") for line in table_of(text))


def test_runs_that_are_elsewhere_differ_and_are_counted(yours):
    """Two of ten lines are ten points off; one of them spreads so much that it agrees."""
    rows = read_rows(REPOSITORY / "table1_short.csv")
    off = {"softmax_cross_entropy": -10, "neuralsort": -3}
    changed = [shifted(row, off.get(row["method"], 0)) for row in rows if row["seed"] == "0"]
    text = reproduction.report(yours("table1_short.csv", changed))
    lines = {(line["method"], line["P_K"]): line for line in table_of(text)}
    softmax = lines["Softmax CE (softmax_cross_entropy)", "[1, 0, 0, 0, 0]"]
    assert softmax["top-1 published"] == "61.27"
    assert softmax["top-1 repository"] == "61.64 ± 0.46 (3)"
    assert softmax["top-1 yours"] == "51.48 (1)"
    assert softmax["top-1 verdict"].startswith("differs (−10.1")
    wild = lines["Top-5 NeuralSort (neuralsort)", "[0, 0, 0, 0, 1]"]
    assert wild["top-1 verdict"].startswith("agrees (")
    verdicts = [cell for line in lines.values() for name, cell in line.items() if name.endswith("verdict")]
    agreeing = sum(cell.startswith("agrees") for cell in verdicts)
    assert f"{agreeing} of 20 values agree; by chance about 1.0 would differ." in text
    assert "Agreement says little where the interval is wider than ± 5 points: 1 of these values." in text
    assert "fewer than ten seeds, the standard deviation is pooled" in text


def test_the_interval_of_a_line_is_that_of_the_pool(yours):
    """One run against three: t of 20 degrees, times the pooled deviation, times the root of 1 + 1/3."""
    rows = read_rows(REPOSITORY / "table1_short.csv")
    text = reproduction.report(yours("table1_short.csv", [row for row in rows if row["seed"] == "0"]))
    verdicts = [line["top-5 verdict"] for line in table_of(text) if line["top-5 verdict"]]
    halves = {re.search(r"± ([\d.]+)\)", verdict)[1] for verdict in verdicts}
    assert halves == {f"{2.085963 * 0.549794 * (4 / 3) ** 0.5:.2f}"}


def test_one_seed_of_each_line_takes_the_spread_of_runs_of_the_same_schedule(yours):
    """One run against one: t of 20 degrees, times the deviation of table1_short.csv, times the root of 1 + 1."""
    rows = read_rows(REPOSITORY / "table4_short.csv")
    assert {row["seed"] for row in rows} == {"0"}
    changed = [shifted(row, 10 * (row["method"] == "softsort")) for row in rows]
    text = reproduction.report(yours("table4_short.csv", changed))
    lines = [line for line in table_of(text) if line["top-5 verdict"]]
    assert len(lines) == len(rows)
    for line in lines:
        expected = "agrees"
        if "(softsort)" in line["method"]:
            expected = "differs"
        assert line["top-5 verdict"].startswith(expected)
        assert f"± {2.085963 * 0.549794 * 2**0.5:.2f})" in line["top-5 verdict"]
    assert "pooled over the lines of table1_short.csv" in text


def test_without_runs_of_yours_the_repositorys_stand_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduction, "RESULTS", tmp_path)
    text = reproduction.report(tmp_path / "table1_short.csv")
    assert "You have no runs of this study." in text
    assert "verdict" not in text
    with pytest.raises(FileNotFoundError, match="no runs in"):
        reproduction.report(tmp_path / "table1_none.csv")


@pytest.mark.parametrize("file", ["table1_short.csv", "scratch.csv", "knn.csv"])
def test_commands_stand_below_their_lines_and_make_their_runs(file, yours):
    path = yours(file, read_rows(REPOSITORY / file))
    plain = reproduction.report(path)
    text = reproduction.report(path, with_commands=True)
    commands = [line.strip() for line in text.splitlines() if line.startswith("    .venv/bin/python experiments/")]
    lines = [line for line in table_of(plain) if "not run" not in line["top-1 repository"]]
    assert len(commands) == len(lines)
    assert [line for line in text.splitlines() if not line.startswith("    .venv")] == plain.splitlines()
    for command, line in zip(commands, lines):
        assert (
            f"({parse_flags(command)['method']})" in line["method"] or parse_flags(command)["method"] in line["method"]
        )
        seeds = {run["seed"] for run in expected_runs(command)}
        assert line["top-1 repository"].endswith(f"({len(seeds)})")


def test_a_seed_that_chose_is_no_final_run(yours):
    """Trials and finals of networks with labels by people share a file. Yours chose with accuracies far away."""
    study = study_of("noise_scratch.csv", REPOSITORY)
    rows = read_rows(REPOSITORY / "noise_scratch.csv")
    chose = [shifted(row, -20) for row in rows if row["seed"] == "0"]
    path = yours("noise_scratch.csv", chose + [row for row in rows if row["seed"] != "0"])
    lines = table_of(reproduction.report(path))
    assert len(lines) == len(study.space)
    seeds = len(study.finals.commands.seeds)
    for line in lines:
        assert line["top-1 yours"] == line["top-1 repository"]
        assert line["top-1 yours"].endswith(f" ({seeds})")


@pytest.mark.parametrize("seeds", [["5"], ["0", "5"], ["2"]])
@pytest.mark.parametrize("change", [{}, {"lr": "0.0123", "nloglr": ""}], ids=["of a study", "of none"])
def test_a_command_has_the_seeds_of_its_line(seeds, change, commands_of_yours):
    row = read_rows(REPOSITORY / "table1_short.csv")[0] | change
    (command,) = commands_of_yours([row | {"seed": seed, "run_id": seed} for seed in seeds])
    assert [str(run["seed"]) for run in expected_runs(command)] == seeds


@pytest.mark.parametrize("file", ["noise_scratch", "tiny_imagenet_equal"])
def test_commands_of_finals_are_one_run_or_one_pass_a_line(file, yours, capsys):
    """A network has a command for each seed."""
    study = study_of(f"{file}.csv", REPOSITORY)
    path = yours(f"{file}.csv", read_rows(REPOSITORY / f"{file}.csv"))
    assert report.main([str(path), "--commands"]) == 0
    commands = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("    ")]
    seeds = [run["seed"] for command in commands for run in expected_runs(command)]
    assert seeds == [*study.finals.commands.seeds] * len(study.space)


LATE_DIGITS = {
    "lr": {"lr": "0.0031622776601683794"},
    "nloglr": {"lr": repr(10**-2.7), "nloglr": "2.7"},
    "p_k": {"p_k": f"{1 / 3!r} 0.0 0.0 0.0 {2 / 3!r}"},
    "inverse_temperature": {"inverse_temperature": repr(2**-12)},
    "weight_decay": {"weight_decay": repr(1 / 3)},
}


@pytest.mark.parametrize("cells", LATE_DIGITS.values(), ids=LATE_DIGITS)
@pytest.mark.parametrize("is_yours", [True, False], ids=["yours", "alone"])
def test_a_command_makes_the_run_of_its_line_to_the_last_digit(cells, is_yours, yours, capsys):
    """As run ids show it, of a setting that no study has."""
    row = next(row for row in read_rows(REPOSITORY / "table1_short.csv") if row["method"] == "splitter_selection")
    row |= {"nloglr": ""} | cells
    path = yours("table1_short.csv", [row])
    if not is_yours:
        path = path.rename(path.with_name("alone.csv"))
    assert report.main([str(path), "--commands"]) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("    .venv")]
    ids = set()
    for command in shown:
        args = train_cifar100.parse_arguments(shlex.split(command)[2:])
        config = train_cifar100.configuration(args, int(row["seed"]))
        ids.add(settings.run_id(settings.CIFAR, config, ""))
    config = {item.name: item.parse(row.get(item.name, "")) for item in settings.SETTINGS}
    assert settings.run_id(settings.CIFAR, config, "") in ids
    assert any("--nloglr 2.7" in command for command in shown) == ("nloglr" in cells)


def test_runs_of_other_embeddings_do_not_count(yours):
    """Rows of another file of embeddings stand in the same results, with accuracies far away."""
    names = ("noise/human_trials.csv", "noise/human.csv")
    rows = {name: read_rows(REPOSITORY / name) for name in names}
    for name in names:
        path = yours(name, rows[name])
    alone = reproduction.report(path)
    for name in names:
        others = [
            shifted(row, -30) | {"embeddings": "100x8-other", "run_id": f"{row['run_id']}x"} for row in rows[name]
        ]
        yours(name, [*others, *rows[name]])
    study = study_of("noise/human.csv", REPOSITORY)
    text = reproduction.report(path, study=replace(study, embeddings=rows[names[0]][0]["embeddings"]))
    assert table_of(text) == table_of(alone)
    assert {line["top-1 verdict"].split(" (")[0] for line in table_of(text)} == {"agrees"}
    other = reproduction.report(path, study=replace(study, embeddings="100x8-other"))
    assert {line["your choice"] for line in table_of(other)} == {"the same trial"}
    assert "top-1 verdict" not in table_of(other)[0]
    with pytest.raises(ValueError, match=r"2 runs of .* in one line, which differ in embeddings"):
        reproduction.report(path)


@pytest.mark.parametrize("file", ["noise/human", "heads", "tiny_imagenet_more"])
def test_runs_on_other_embeddings_than_the_repositorys_have_no_verdict(file, yours):
    """Another file of the same shape, with the same choices and accuracies."""
    for ending in ("_trials.csv", ".csv"):
        rows = read_rows(REPOSITORY / f"{file}{ending}")
        path = yours(f"{file}{ending}", [row | {"embeddings": "100x8-other"} for row in rows])
    text = reproduction.report(path)
    assert not re.search(r"verdict \||agree|differ", text)
    assert f"Your embeddings are 100x8-other, the repository's {rows[0]['embeddings']}: there is no verdict" in text
    accuracies = [(line["top-1 repository"], line["top-1 yours"]) for line in table_of(text)]
    assert all(repository == own for repository, own in accuracies)
    assert {own for _, own in accuracies} != {"not run"}


CHANGES = [
    ({}, True),
    ({"resolution": "224"}, False),
    ({"backbone": "cifar100-resnet18"}, False),
    ({"train_images": "25000", "valid_images": "25000"}, False),
]


@pytest.mark.parametrize(
    ("file", "column", "what"),
    [("noise_scratch", "noise_groups", "wrong labels"), ("noise/human", "noise_matrix_id", "matrices T")],
)
def test_runs_with_other_wrong_labels_or_matrices_have_no_verdict(file, column, what, yours):
    for ending in ("_trials.csv", ".csv"):
        if not (REPOSITORY / f"{file}{ending}").is_file():  # trials that stand beside the finals
            continue
        rows = read_rows(REPOSITORY / f"{file}{ending}")
        path = yours(f"{file}{ending}", [row | {column: row[column] and "another"} for row in rows])
    text = reproduction.report(path)
    assert not re.search(r"verdict \||agree|differ", text)
    assert f"Your {what} are another, the repository's " in text


def test_a_file_of_labels_has_any_name(yours):
    rows = read_rows(REPOSITORY / "noise_scratch.csv")
    path = yours("noise_scratch.csv", [row | {"noisy_labels": "data/c100n.pt"} for row in rows])
    reports = [reproduction.report(path), reproduction.report(path, study=noise_scratch("data/c100n.pt"))]
    for text in reports:
        verdicts = [line["top-1 verdict"].split(" (")[0] for line in table_of(text)]
        assert set(verdicts) == {"agrees"}


@pytest.mark.parametrize("file", ["noise/human", "heads"])
@pytest.mark.parametrize(("change", "is_compared"), CHANGES)
def test_embeddings_with_other_bits_of_the_same_backbone_are_compared(file, change, is_compared, yours):
    """As another processor or precision gives them."""
    for ending in ("_trials.csv", ".csv"):
        rows = read_rows(REPOSITORY / f"{file}{ending}")
        path = yours(f"{file}{ending}", [row | {"embeddings": "100x1280-other"} | change for row in rows])
    text = reproduction.report(path)
    note = f"Your embeddings, 100x1280-other, have other bits than the repository's, {rows[0]['embeddings']}"
    assert (note in text) is is_compared
    found = {line.get("top-1 verdict", "").split(" (")[0] for line in table_of(text)} - {""}  # a loss without finals
    assert found == ({"agrees"} if is_compared else set())


@pytest.mark.parametrize("name", ["heads", "mine"])
def test_a_study_of_linear_classifiers_is_known_by_your_trials(name, yours):
    """Two methods with another validation split, which the repository has not run."""
    for ending in ("_trials.csv", ".csv"):
        rows = []
        for row in read_rows(REPOSITORY / f"heads{ending}"):
            if row["method"] in ("softmax_cross_entropy", "lapsum"):
                rows.append(row | {"num_valid": "200"})
        path = yours(f"{name}{ending}", rows)
    assert reproduction.is_yours(path)
    lines = table_of(reproduction.report(path))
    assert {line["loss"] for line in lines} == {"softmax_cross_entropy", "lapsum"}
    if name == "mine":  # a file that the repository does not have: differences to cross-entropy
        base, other = lines
        assert base["Δ top-1"] == ""
        assert re.fullmatch(r"[+−]\d\.\d\d ± \d\.\d\d", other["Δ top-1"])
        assert base["choice"].endswith(f"epochs {rows[0]['n_epochs']} (high)")  # trials have 5 or 22
        assert [line["seeds"] for line in lines] == ["10", "10"]
        return
    for line in lines:
        assert line["repository's choice"] == "no trials"
        assert line["your choice"] != "no trials"
        assert line["top-1 repository"] == "not run"
        assert line["top-1 yours"].endswith(" (10)")


def test_trials_of_several_validation_splits_are_no_single_study(yours):
    rows = read_rows(REPOSITORY / "heads_trials.csv")
    path = yours("heads_trials.csv", [*rows, rows[0] | {"num_valid": "200", "run_id": "x"}])
    with pytest.raises(ValueError, match="has trials of --num_valid 5000 and 200: give each a file of its own"):
        reproduction.report(path)


def test_a_line_that_no_study_has_gets_the_command_of_its_settings(yours):
    rows = [row | {"lr": "0.0123", "nloglr": ""} for row in read_rows(REPOSITORY / "table1_short.csv")[:1]]
    text = reproduction.report(yours("table1_short.csv", rows), with_commands=True)
    assert f"    {command_of(rows[0]).partition(' --lr')[0]}" in text
    assert "--lr 0.0123" in text


@pytest.mark.parametrize("choice", ["noisy", "clean"])
def test_trials_and_finals_of_a_tuned_study_have_verdicts(choice, yours):
    for name in ("human_trials.csv", "human.csv"):
        path = yours(f"noise/{name}", read_rows(REPOSITORY / "noise" / name))
    text = reproduction.report(path, choice)
    lines = table_of(text)
    assert len(lines) == 18
    assert {line["your choice"] for line in lines} == {"the same trial"}
    assert "36 of 36 values agree; by chance about 1.8 would differ." in text
    assert "Trials: 540 in common. By the spread of the finals, 1080 of 1080 values agree" in text


FINALS = []
for path in sorted([*REPOSITORY.glob("*.csv"), *REPOSITORY.glob("noise*/*.csv")]):
    name = path.relative_to(REPOSITORY).as_posix()
    study = study_of(name, REPOSITORY)
    if isinstance(study, Tuned) and path.name == study.finals.commands.results.name:
        FINALS.append(name)


@pytest.mark.parametrize("name", FINALS)
def test_a_table_of_what_was_chosen_says_by_which_rule(name):
    """By the seeds that the file of trials has: rows without those of the rule were chosen by one."""
    study = study_of(name, REPOSITORY)
    trials = read_rows((REPOSITORY / name).with_name(study.trials_file.name))
    seeds = {int(row["seed"]) for row in trials}
    expected = "one seed chose"
    if set(study.finals.rule.seeds) <= seeds:
        expected = study.finals.rule.text
    assert expected in reproduction.rule_of_selection(REPOSITORY / name)
    if not name.startswith("noise/"):  # which have tables of their own
        words = [str(REPOSITORY / name), "--paired", "softmax_cross_entropy"]
        assert expected in report.report(report.parse_arguments(words)).text


@pytest.mark.parametrize("repeated", ["heads.csv", "heads_trials.csv"])
def test_runs_that_differ_in_what_trials_leave_open_are_not_pooled(repeated, yours):
    """Copies without a precision, ten points lower: of the final runs, or of the trials that choose."""
    for name in ("heads_trials.csv", "heads.csv"):
        rows = read_rows(REPOSITORY / name)
        if name == repeated:
            rows += [shifted(row, -10) | {"precision": "", "run_id": f"{row['run_id']}x"} for row in rows]
        path = yours(name, rows)
    with pytest.raises(ValueError, match=rf"{repeated} has 2 runs of .* in one line, which differ in precision: move"):
        reproduction.report(path)


def test_runs_of_another_precision_are_no_runs_of_a_study(yours):
    for name in ("heads_trials.csv", "heads.csv"):
        path = yours(name, read_rows(REPOSITORY / name))
    before = reproduction.report(path)
    for name in ("heads_trials.csv", "heads.csv"):
        rows = read_rows(REPOSITORY / name)
        lower = [shifted(row, -10) | {"precision": "bf16", "run_id": f"{row['run_id']}x"} for row in rows]
        yours(name, rows + lower)
    assert table_of(reproduction.report(path)) == table_of(before)


def test_a_table_of_runs_that_nobody_chose_says_no_rule():
    for name in ("table1_short.csv", "noise/human_trials.csv", "strong.csv"):
        assert reproduction.rule_of_selection(REPOSITORY / name) == ""


def test_both_rules_are_said_where_yours_is_another(yours):
    """Yours have the seeds of the finalists; the rows are the repository's with other seeds."""
    trials = read_rows(REPOSITORY / "noise" / "human_trials.csv")
    for name in ("human_trials.csv", "human.csv"):
        yours(f"noise/{name}", read_rows(REPOSITORY / "noise" / name))
    rule = study_of("noise/human.csv", REPOSITORY).finals.rule
    more = []
    for seed in rule.seeds:
        more += [row | {"seed": str(seed), "run_id": f"{row['run_id']}-{seed}"} for row in trials]
    path = yours("noise/human_trials.csv", [*trials, *more])
    first = reproduction.report(path).splitlines()[0]
    assert "The repository's runs: The trial with the best validation of seed 0 is chosen: one seed chose." in first
    assert f"Yours: {rule.text}" in first


def test_another_choice_of_yours_is_shown_beside_the_repositorys(yours):
    trials = read_rows(REPOSITORY / "noise" / "human_trials.csv")
    gce = [number for number, row in enumerate(trials) if row["method"] == "generalized_cross_entropy"]
    trials[gce[0]] = trials[gce[0]] | {"last_valid_top1": "0.99"}
    path = yours("noise/human_trials.csv", trials)
    finals = yours("noise/human.csv", read_rows(REPOSITORY / "noise" / "human.csv"))
    line = next(line for line in table_of(reproduction.report(path)) if line["loss"] == "GCE")
    assert line["your choice"] != "the same trial"
    assert f"--q {float(trials[gce[0]]['q']):g}" in line["your choice"]
    assert line["top-1 yours"] == "not run"  # nobody ran it with ten seeds
    assert finals.is_file()


@pytest.mark.parametrize(
    ("number", "lacking"),
    [
        (3, ["trials not finished", "no trials"]),
        (60, ["finalists not finished", "no trials"]),
        (None, ["finalists not finished"]),
    ],
)
def test_trials_alone_have_no_finals_and_no_choice(number, lacking, yours):
    """Some of one loss, all of some losses, all of all: their finalists have not run."""
    rows = read_rows(REPOSITORY / "noise" / "human_trials.csv")[:number]
    text = reproduction.report(yours("noise/human_trials.csv", rows))
    assert f"Trials: {len(rows)} in common." in text
    assert {line["top-1 yours"] for line in table_of(text)} == {"not run"}
    assert list(dict.fromkeys(line["your choice"] for line in table_of(text))) == lacking
    assert f"Yours: {study_of('noise/human.csv', REPOSITORY).finals.rule.text}" in text.splitlines()[0]


def test_a_finalist_that_lacks_a_seed_is_said_to_be_unfinished(yours):
    """Of one loss; the others keep their choices."""
    trials = read_rows(REPOSITORY / "noise_draws" / "human_trials.csv")
    yours("noise_draws/human.csv", read_rows(REPOSITORY / "noise_draws" / "human.csv"))
    of_a_seed = [row for row in trials if row["method"] == "generalized_cross_entropy" and row["seed"] == "103"]
    path = yours("noise_draws/human_trials.csv", [row for row in trials if row is not of_a_seed[0]])
    lines = {line["loss"]: line["your choice"] for line in table_of(reproduction.report(path))}
    assert lines.pop("GCE") == "finalists not finished"
    assert set(lines.values()) == {"the same trial", "no trials"}


def test_only_files_of_results_are_yours(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduction, "RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()
    shutil.copy(REPOSITORY / "table1.csv", tmp_path / "results" / "table1.csv")
    assert reproduction.is_yours(tmp_path / "results" / "table1.csv")
    assert not reproduction.is_yours(tmp_path / "table1.csv")
    assert not reproduction.is_yours(REPOSITORY / "table1.csv")
    assert not reproduction.is_yours(tmp_path / "results" / "table1_epochs.csv")
