"""Tables from the files of small runs; nothing is averaged or counted that is not one experiment."""

import csv
import io
import itertools
import os
import re
import shutil
import statistics

import pandas as pd
import pytest
from scipy.stats import t as student

from experiments.common import door
from experiments.common import settings as registry
from experiments.common.paths import PAPER, REPOSITORY
from experiments.common.rows import read_rows, write_rows
from experiments.common.settings import OWN_SETTINGS
from reporting import reproduction
from reporting.compare import paired
from reporting.frames import read_runs, read_text
from reporting.markdown import HEADINGS
from scripts import report
from studies.catalog import LISTED
from tests.scripts.trained import EVEN, changed, rows_of

RESULTS = REPOSITORY
IDENTITY = [item.name for item in registry.identifying(registry.CIFAR)]
OTHER = {int: "7", float: "0.3", registry.inverse_temperature: "0.3", registry.boolean: "true"}  # a cell of each kind
IMAGENET = {"batch_size": "500", "n_epochs": "20", "lr": "3.1622776601683795e-05", "nloglr": "4.5", "eval_freq": "100"}
IMAGENET |= {"backbone": "resnext101_32x48d_wsl", "resolution": "320", "num_valid": "50000", "num_classes": "1000"}


def cells(markdown, start):
    """The cells, by their headings, of each line of a Markdown table that starts so."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines() if line[:1] == "|"]
    return [dict(zip(rows[0], row)) for row in rows[2:] if row[0].startswith(start)]


def test_mean_deviation_and_difference_beside_the_published_values(made, two_seeds):
    status, text, _ = made(two_seeds)
    assert status == 0
    # Sample standard deviation: .5 points off the mean on both sides give .71.
    softmax = {"top-1 published": "61.27", "top-1 measured": "61.50 ± 0.71", "top-1 difference": "+0.23", "seeds": "2"}
    softmax |= {"top-5 measured": "85.30 ± 0.42", "top-5 difference": "−0.01"}
    sort = {"P_K": "[0.2, 0.2, 0.2, 0.2, 0.2]", "top-1 published": "61.46", "top-1 rerun": "59.42"}
    sort |= {"top-1 measured": "62.00 ± 0.00", "inverse temperature": "0.0625"}
    for start, expected in (("Softmax CE", softmax), ("Top-k NeuralSort", sort)):
        (row,) = cells(text, start)
        assert {name: row[name] for name in expected} == expected
    assert cells(text, "Top-k DiffSortNets")[0]["top-1 measured"] == "not run"
    assert cells(text, "Lap-Top-k†")[0]["top-1 measured"] == ""
    assert text.startswith("Table 1: ResNet-18")
    source = text.splitlines()[-1]
    stated = ("n_epochs 200", "seed 0, 1", "a CPU", "mean of 2 seeds", "†: second-hand")
    assert all(part in source for part in stated)
    assert "Not as published: " not in source.replace("Not as published: .", "")


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"n_epochs": "5"}, "n_epochs 5 (200)"),
        ({"limit_train": "5000"}, "limit_train 5000"),
        ({"precision": "bf16"}, "precision bf16"),
        ({"label_noise": "0.2", "noise_groups": "blocks"}, "label_noise 0.2"),
        ({"lr_schedule": "cosine"}, "lr_schedule cosine"),
        ({"weight_decay": "0.5", "ema": "0.999"}, "ema 0.999, weight_decay 0.5"),
        ({"lr": "0.01"}, "lr 0.01 (0.001)"),
    ],
)
def test_what_differs_from_the_paper_is_named_and_has_no_difference(made, two_seeds, change, difference):
    _, text, _ = made([changed(row, **change) for row in two_seeds])
    assert difference in text.splitlines()[-1].partition("Not as published: ")[2]  # where it is the same for all
    assert "top-1 difference" not in cells(text, "Softmax CE")[0]
    _, text, _ = made([*two_seeds[:2], *(changed(row, **change) for row in two_seeds[2:])])
    (sort,) = cells(text, "Top-k NeuralSort")
    assert (difference in sort["not as published"], sort["top-1 difference"]) == (True, "")
    assert cells(text, "Softmax CE")[0]["top-1 difference"] == "+0.23"


@pytest.fixture
def yours(write, capsys, monkeypatch, tmp_path):
    """The report of rows that are yours, as scripts/report.py prints it."""
    monkeypatch.setattr(reproduction, "RESULTS", tmp_path)

    def call(rows, name="table1.csv"):
        assert report.main([str(write(*rows, name=name))]) == 0
        return capsys.readouterr().out

    return call


def test_your_runs_with_the_published_settings_stand_beside_the_published_values(yours, two_seeds, cifar_run):
    """Deviations of 0.71 and 0: pooled 0.5 with two degrees, and the mean of two runs against that of two."""
    text = yours(two_seeds)
    half = f"{student.ppf(0.975, 2) * 0.5:.2f}"
    (softmax,) = [row for row in cells(text, "Softmax CE") if row["top-1 yours"] != "not run"]
    assert softmax["top-1 published"] == "61.27"
    assert softmax["top-1 yours"] == "61.50 ± 0.71 (2)"
    assert softmax["top-1 yours − published"] == f"+0.23 ± {half}"
    (sort,) = cells(text, "Top-k NeuralSort")
    assert sort["top-1 yours − published"] == f"+0.54 ± {half}"
    assert "mean of 2 seeds" in text
    assert "spread over seeds is not known" in text
    assert "if they spread as yours do" in text
    (softmax,) = [row for row in cells(yours(two_seeds[:1]), "Softmax CE") if row["top-1 yours"] != "not run"]
    assert softmax["top-1 yours − published"] == "−0.27"


def test_a_line_that_spreads_more_than_the_others_has_an_interval_of_its_own(yours, cifar_run):
    """Two seeds ten points apart, among lines whose seeds are a hundredth of a point apart."""
    rows = []
    for seed in (0, 1):
        near = 0.5 + seed * 0.0001
        far = 0.5 + seed * 0.1
        rows.append(cifar_run(seed, near, near))
        rows.append(cifar_run(seed, near, near, "neuralsort"))
        rows.append(cifar_run(seed, far, far, "neuralsort", p_k="0 0 0 0 1"))
    text = yours(rows)
    own = student.ppf(0.975, 1) * 10 * 0.5**0.5
    assert cells(text, "Top-5 NeuralSort")[0]["top-1 yours − published"].endswith(f" ± {own:.2f}")
    pooled = student.ppf(0.975, 2) * 0.01 * 0.5**0.5
    assert cells(text, "Top-k NeuralSort")[0]["top-1 yours − published"].endswith(f" ± {pooled:.2f}")


@pytest.mark.parametrize("name", ["table2_3_imagenet1k.csv", "table5.csv"])
def test_a_published_mean_of_unknown_seeds_has_a_difference_without_an_interval(yours, row, name):
    softmax = changed(row("heads", method="softmax_cross_entropy"), **IMAGENET, test_top1=0.861, test_top5=0.97812)
    text = yours([changed(softmax, seed=seed, order_seed=seed) for seed in (0, 1)], name)
    found = [row for row in cells(text, "") if row["top-5 yours"] != "not run"]
    assert [row["top-1 yours − published"] for row in found] == ["+0.04"]
    assert "Nor is the number of their seeds" in text


def test_runs_with_other_settings_have_no_difference_to_the_published_values(yours, two_seeds):
    text = yours([changed(row, precision="bf16") for row in two_seeds])
    assert "yours − published" not in text.lower()


@pytest.mark.parametrize("table", sorted(set(read_text(PAPER / "protocols.csv")["table"])))
def test_a_table_of_published_values_is_not_that_of_another_data_set(made, two_seeds, table):
    """By its name, by the file's, and whether it has published rows of the method or not."""
    digits = [changed(row, dataset="digits", num_classes="7") for row in two_seeds]
    for flags, name in ((["--table", table], "r.csv"), ([], f"{table}.csv")):
        status, text, _ = made(digits, *flags, name=name)
        assert status == 0
        assert len(cells(text, "")) == 2
        assert "ublished" not in text
        assert cells(text, "softmax")[0]["top-1"] == "61.50 ± 0.71"


def test_runs_on_another_data_set_stand_below_the_published_rows_and_are_marked(made, two_seeds):
    digits = [changed(row, dataset="digits", num_classes="10") for row in two_seeds]
    _, text, _ = made([*two_seeds, *digits])
    (softmax,) = cells(text, "softmax_cross_entropy")
    assert softmax["not as published"] == "dataset digits (cifar100), num_classes 10 (100)"
    assert (softmax["top-1 measured"], softmax["top-1 published"]) == ("61.50 ± 0.71", "")
    assert cells(text, "Softmax CE")[0]["not as published"] == ""


# Those left out: another published row, settings that the row does not have, the authors' own implementation, and the
# data set, without which no published row counts.
@pytest.mark.parametrize(
    "flag",
    sorted(set(IDENTITY) - {"seed", "method", "p_k", "distribution", "art_lambda", "implementation", "dataset"}),
)
def test_every_flag_of_training_that_is_not_as_published_is_named(made, two_seeds, flag):
    value = OTHER.get(registry.BY_NAME[flag].kind, "other")
    _, text, _ = made([*two_seeds[:2], changed(two_seeds[2], **{flag: value})])
    (row,) = cells(text, "Top-k NeuralSort")
    assert f"{flag} {value}" in row["not as published"]
    assert row["top-1 difference"] == ""


@pytest.mark.parametrize("flag", sorted(set(IDENTITY) - {"seed", "method", "p_k"}))
def test_every_identity_flag_makes_lines_of_its_own(made, two_seeds, cifar_run, flag):
    other = cifar_run(0, 0.3, 0.6, **{flag: OTHER.get(registry.BY_NAME[flag].kind, "other")})
    _, text, _ = made([*two_seeds[:2], other], "--table", "none")
    first, second = cells(text, "softmax")
    assert (first["top-1"], second["top-1"]) == ("61.50 ± 0.71", "30.00")
    assert first[HEADINGS.get(flag, flag)] != second[HEADINGS.get(flag, flag)]


NEAR = {"p_k": ("0.5 0 0 0 0.5", "0.50000001 0 0 0 0.49999999"), "inverse_temperature": ("0.0625", "0.06250001")}


@pytest.mark.parametrize("flag", [name for name in IDENTITY if registry.BY_NAME[name].kind is float] + [*NEAR])
def test_settings_that_differ_in_a_late_digit_are_lines_that_can_be_told_apart(made, cifar_run, flag):
    """And no two seeds of one line, though both have seed 0."""
    values = NEAR.get(flag, ("0.0031622776601683794", "0.00316228"))
    runs = [cifar_run(0, 0.5, 0.6, "neuralsort", **{flag: value}) for value in values]
    _, text, _ = made(runs, "--table", "none")
    first, second = cells(text, "neuralsort")
    assert first["seeds"] == second["seeds"] == "1"
    heading = HEADINGS.get(flag, flag)
    assert first[heading] != second[heading]
    shown = [line[heading].strip("[]").replace(",", "") for line in (first, second)]
    assert shown == [*values]


@pytest.mark.parametrize("flag", ["mixup", "noise_matrix_id", "labels", "weight_decay", "noise_rate"])
def test_every_setting_of_a_linear_classifier_that_is_not_as_published_is_named(made, row, flag):
    labels = row("noise/human", method="softmax_cross_entropy")
    run = changed(labels, **{**IMAGENET, "labels": "", "num_valid": "50000", "embeddings": "1000x2048-1", flag: "0.3"})
    _, text, _ = made([run], name="mine.csv")
    assert f"{flag} 0.3" in text.partition("Not as published: ")[2]


def test_a_word_that_is_usual_for_one_setting_is_not_so_for_another(made, two_seeds):
    run = changed(two_seeds[2], lr_schedule="right")
    _, text, _ = made([*two_seeds[:2], run])
    (row,) = cells(text, "Top-k NeuralSort")
    assert "lr_schedule right" in row["not as published"]


def test_imagenet_rows_have_three_digits_and_are_recognised_by_their_columns(made, row):
    softmax = changed(row("heads", method="softmax_cross_entropy"), **IMAGENET, test_top1=0.86, test_top5=0.97812)
    runs = [changed(softmax, seed=seed, order_seed=seed) for seed in (0, 1)]
    runs[1]["torch_version"] = "2.11.0+cpu, then 2.14.1"  # resumed
    _, text, _ = made(runs, name="mine.csv")
    assert text.startswith("Tables 2 and 3: linear heads on frozen ImageNet-1K")
    (softmax,) = cells(text, "Softmax (")
    assert (softmax["top-5 measured"], softmax["top-5 difference"]) == ("97.812 ± 0.000", "+0.017")
    assert "Runs: mine.csv, features of resnext101_32x48d_wsl at 320 pixels, seed 0, 1" in text
    versions = {runs[0]["torch_version"].partition("+")[0], "2.11.0", "2.14.1"}
    assert f"PyTorch {', '.join(sorted(versions))}." in text
    _, text, _ = made([changed(run, num_classes=10450) for run in runs], name="mine.csv")
    assert "ImageNet-21K-P" in text
    assert "num_valid 50000 (100000)" in text


def test_table_5_tells_the_backbones_apart_and_takes_any_p_k_where_none_is_known(made, row):
    networks = {"method": "sinkhorn_sort", "inverse_temperature": "100.0", "top1_mode": "sm", "test_top1": "0.9"}
    run = changed(row("heads", method="lapsum"), **{**IMAGENET, **networks, "noise_rate": ""})
    other = {"backbone": "tf_efficientnet_l2_ns", "resolution": "800", "embeddings": "1000x5504-87654321"}
    rows = [
        changed(run, test_top5="0.98", p_k=EVEN),
        changed(run, test_top5="0.99", p_k="0.25 0 0 0 0.75", **other),
    ]
    _, text, _ = made(rows, name="table5.csv")
    assert cells(text, "ResNeXt-101 32x48d WSL, Top-k SinkhornSort")[0]["top-5 difference"] == "+0.01"
    assert cells(text, "Noisy Student EfficientNet-L2, Top-k SinkhornSort")[0]["P_K"] == "[0.25, 0, 0, 0, 0.75]"
    assert cells(text, "CLIP")[0]["public"] == "false"


def test_csv_and_latex_have_the_numbers_of_the_table(made, two_seeds, tmp_path):
    output = tmp_path / "new" / "table.csv"
    status, text, message = made(two_seeds, "--format", "csv", "--output", output)
    assert (status, text, f"wrote {output}" in message) == (0, "", True)
    rows = list(csv.DictReader(io.StringIO(output.read_text())))
    assert float(rows[0]["test_top1_mean"]) == pytest.approx(61.5)
    assert float(rows[0]["test_top1_std"]) == pytest.approx(0.5 * 2**0.5)
    assert (float(rows[0]["published_test_top1"]), float(rows[0]["n_seeds"])) == (61.27, 2)
    _, text, _ = made(two_seeds, "--format", "latex")
    assert "61.50 $\\pm$ 0.71" in text
    assert all(text.count(f"\\{rule}rule") == 1 for rule in ("top", "mid", "bottom"))
    body = text.split("\n", 1)[1].replace("$P_K$", "").replace("\\label{tab:table1}", "")
    assert not re.search(r"[±−≈†β]|(?<!\\)[_#%]", body)


def test_a_csv_of_differences_has_no_cell_of_a_single_run(capsys):
    path = REPOSITORY / "table1_short.csv"
    assert report.main([str(path), "--paired", "softmax_cross_entropy", "--format", "csv"]) == 0
    rows = {(row["method"], row["p_k"]): row for row in csv.DictReader(io.StringIO(capsys.readouterr().out))}
    row = rows["splitter_selection", "0.2 0.2 0.2 0.2 0.2"]
    assert not {"run_id", "seed", "test_top1", "train_seconds", "git_commit"} & set(row)
    runs = read_runs(path, ["p_k=0.2 0.2 0.2 0.2 0.2", "method=splitter_selection"])
    assert float(row["test_top1_mean"]) == pytest.approx(runs["test_top1"].mean())
    assert float(row["pairs"]) == float(row["n_seeds"]) == len(runs)


def test_the_results_are_never_the_output(made, two_seeds, tmp_path):
    made(two_seeds)
    before = (tmp_path / "table1.csv").read_bytes()
    (tmp_path / "link.csv").symlink_to(tmp_path / "table1.csv")
    shutil.copy(tmp_path / "table1.csv", tmp_path / "of_another_study.csv")
    for output in ("table1.csv", "link.csv", "of_another_study.csv", PAPER / "table1.csv"):
        with pytest.raises(SystemExit, match="2"):
            report.main([str(tmp_path / "table1.csv"), "--output", str(tmp_path / output)])
    for name in ("table1.csv", "of_another_study.csv"):
        assert (tmp_path / name).read_bytes() == before


def test_no_pipe_device_or_folder_becomes_a_file(made, two_seeds, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for output in (tmp_path / "pipe", tmp_path):
        status, _, error = made(two_seeds, "--output", output)
        assert (status, "is no file that can be replaced" in error) == (2, True)
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("how", [{"encoding": "utf-8-sig"}, {"lineterminator": "\r\n"}, {"quoting": csv.QUOTE_ALL}])
def test_a_file_with_other_line_ends_or_quotes_is_read(write, two_seeds, capsys, how):
    assert report.main([str(write(*two_seeds, name="table1.csv", **how))]) == 0
    assert cells(capsys.readouterr().out, "Softmax CE")[0]["top-1 measured"] == "61.50 ± 0.71"


@pytest.mark.parametrize("separator", [";", "\t"])
def test_a_file_that_a_spreadsheet_saved_with_other_separators_is_refused(write, two_seeds, separator):
    with pytest.raises(ValueError, match="has no column run_id: it must be saved as CSV with commas"):
        report.main([str(write(*two_seeds, name="table1.csv", sep=separator))])


def test_numbers_that_are_written_in_another_way_make_no_line_of_their_own(made, two_seeds):
    _, text, _ = made([two_seeds[0], {**two_seeds[1], "lr": "1E-03", "label_noise": "0"}])
    (softmax,) = cells(text, "Softmax CE")
    assert (softmax["top-1 measured"], softmax["seeds"]) == ("61.50 ± 0.71", "2")


def test_a_run_that_stands_twice_and_a_line_that_is_cut_short_are_refused(made, two_seeds, tmp_path):
    made(two_seeds)
    path = tmp_path / "table1.csv"
    whole = path.read_text()
    first = whole.splitlines()[1]
    path.write_text(f"{whole}{first}\n")
    with pytest.raises(ValueError, match="has 0 twice: delete one of the lines"):
        report.main([str(path)])
    path.write_text(f"{whole}{first[:40]}\n")
    with pytest.raises(ValueError, match=r"line 6 of .* does not fit its header"):
        report.main([str(path)])


@pytest.mark.parametrize(
    ("cells", "flags", "message"),
    [
        ({}, ["--where", "n_epoch=5"], "--where must be COLUMN=VALUE"),
        ({}, ["--where", "n_epochs"], "--where must be COLUMN=VALUE"),
        ({}, ["--where", "n_epochs=5"], "leaves no run"),
        ({"test_top1": "61.0"}, [], "column test_top1 of"),
        ({"test_top1": "61.0"}, [], "61 is no fraction in [0, 1]"),
        ({"test_top1": "0,61"}, [], "column test_top1 of"),
        ({"p_k": "one"}, [], "p_k is 'one', which no run writes"),
        ({"seed": ""}, ["--paired", "softmax_cross_entropy"], "has no seed: repair or delete its line"),
        ({"seed": ""}, [], "has no seed: repair or delete its line"),
        ({}, ["--paired", "softsort"], "has no run of softsort; it has softmax_cross"),
        ({}, ["--temperatures", "--where", "seed=7"], "leaves no run"),
    ],
)
def test_bad_input_gets_a_sentence_and_status_2(made, two_seeds, cells, flags, message):
    status, text, error = made([changed(two_seeds[0], **cells), *two_seeds[1:]], *flags)
    assert (status, text, error.startswith("error: ")) == (2, "", True)
    assert message in error


def test_a_file_without_methods_is_no_file_of_results(made, two_seeds):
    status, _, error = made([{name: cell for name, cell in two_seeds[0].items() if name != "method"}])
    assert (status, "has no run with a method" in error) == (2, True)


@pytest.mark.parametrize("flags", [[], ["--paired", "softmax_cross_entropy"]])
def test_runs_without_a_test_split_show_their_validation_at_the_last_epoch(trained, capsys, tmp_path, flags):
    rows = [row for row in rows_of(trained / "untested.csv") if row["method"] == "generalized_cross_entropy"]
    assert report.main([str(trained / "untested.csv"), *flags]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Validation accuracy in percent at the last epoch")
    assert "no run has a test split" in text.splitlines()[0]
    (line,) = cells(text, "generalized_cross_entropy")
    for column in ("last_valid_top1", "last_valid_top5"):
        values = [100 * float(row[column]) for row in rows]
        assert line[column] == f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


def test_runs_with_and_without_a_test_split_stand_in_one_table(trained, made):
    runs = [*rows_of(trained / "heads.csv"), *rows_of(trained / "untested.csv")]
    _, text, _ = made(runs, name="own.csv")
    assert text.startswith("Test accuracy")
    assert "last_valid_top1, last_valid_top5: validation accuracy at the last epoch" in text.splitlines()[0]
    lines = cells(text, "generalized_cross_entropy")
    assert sorted(line["top-1"] == "" for line in lines) == [False, True]
    assert all(line["last_valid_top1"] for line in lines)


def test_inverse_temperatures_are_compared_by_test_accuracy(trained):
    with pytest.raises(ValueError, match=r"--temperatures shows test accuracies, and no run of .* has a test split"):
        report.main([str(trained / "untested.csv"), "--temperatures"])


def test_what_is_no_file_of_results_gets_a_sentence(tmp_path, capsys):
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "uneven.csv").write_text("run_id,method,seed\nx,a,1,2\ny,b,1\n")
    messages = {"absent": "no file", "pipe": "no file", "binary": "UTF-8", "uneven": "line 2 of"}
    for name, message in messages.items():
        words = [str(tmp_path / f"{name}.csv")]
        assert door.call(lambda words=words: report.main(words)) == 2
        assert message in capsys.readouterr().err


def test_paired_differences_are_taken_within_an_experiment_and_have_an_interval(made, cifar_run):
    """Differences of 1 and 3 points: mean 2, standard deviation 1.414, and t(1) = 12.71 times 1 is the half width."""
    rows = [cifar_run(seed, 0.60, 0.85) for seed in (0, 1, 2)]
    # Validation prefers the first: what test says does not count.
    rows += [cifar_run(seed, 0.70, 0.85, lr="0.002", valid_top1="0.59") for seed in (0, 1)]
    for seed, top1 in ((0, 0.61), (1, 0.63), (3, 0.99)):  # seed 3 has no partner
        rows.append(cifar_run(seed, top1, 0.85, "neuralsort"))
    rows += [cifar_run(seed, 0.10, 0.30, limit_train="500") for seed in (0, 1)]  # of another experiment
    status, text, _ = made(rows, "--paired", "softmax_cross_entropy")
    assert status == 0
    (sort,) = cells(text, "neuralsort")
    assert (sort["Δ top-1"], sort["Δ top-5"], sort["pairs"], sort["seeds"]) == (
        "+2.00 ± 12.71",
        "+0.00 ± 0.00",
        "2",
        "3",
    )
    by_rate = {(row["learning rate"], row["limit_train"]): row["Δ top-1"] for row in cells(text, "softmax")}
    assert by_rate == {("0.001", ""): "", ("0.002", ""): "+10.00 ± 0.00", ("0.001", "500"): ""}


def test_a_run_more_with_a_lucky_validation_is_no_baseline(made, cifar_run):
    rows = [cifar_run(seed, 0.60, 0.85) for seed in (0, 1, 2)]
    rows += [cifar_run(seed, 0.50, 0.80, lr="0.002", valid_top1="0.1") for seed in (0, 1, 2)]
    rows += [cifar_run(0, 0.40, 0.70, lr="0.004", valid_top1="0.99")]
    rows += [cifar_run(seed, 0.61, 0.85, "neuralsort") for seed in (0, 1, 2)]
    text = made(rows, "--paired", "softmax_cross_entropy")[1]
    assert [(row["Δ top-1"], row["seeds"]) for row in cells(text, "neuralsort")] == [("+1.00 ± 0.00", "3")]
    assert "the best by validation of those with the most seeds" in text


@pytest.mark.parametrize("order", [1, -1])
def test_of_baselines_that_tie_on_validation_the_better_in_test_is_taken(made, cifar_run, order):
    """Validation accuracies whose sums differ in the last digit alone tie, too."""
    rows = []
    for lr, top1, valid in (("0.001", 0.60, (0.1, 0.2, 0.3)), ("0.002", 0.62, (0.3, 0.2, 0.1))):
        rows += [cifar_run(seed, top1, 0.85, lr=lr, valid_top1=valid[seed]) for seed in range(3)]
    rows += [cifar_run(seed, 0.61, 0.85, "neuralsort") for seed in range(3)]
    text = made(rows[::order], "--paired", "softmax_cross_entropy")[1]
    assert [row["Δ top-1"] for row in cells(text, "neuralsort")] == ["−1.00 ± 0.00"]


@pytest.mark.parametrize(
    ("other", "differs"),
    [({"precision": "bf16"}, "precision"), ({"eval_freq": "7"}, "eval_freq"), ({"seed": "7"}, "the seed")],
)
def test_where_nothing_is_paired_a_sentence_says_in_what_runs_differ(made, cifar_run, other, differs):
    rows = [changed(cifar_run(0, 0.60, 0.85), **other), cifar_run(0, 0.61, 0.85, "neuralsort")]
    status, text, error = made(rows, "--paired", "softmax_cross_entropy")
    assert (status, text) == (2, "")
    assert "has the seed and the settings of data and training of a run of softmax_cross_entropy" in error
    assert differs in error


def test_paired_differences_of_runs_that_have_top_1_only(made, cifar_run):
    runs = [
        cifar_run(0, 0.60, 0.85),
        cifar_run(0, 0.62, 0.80, lr="0.002"),
        cifar_run(0, 0.65, 0.1, "neuralsort"),
    ]
    _, text, _ = made(
        [{k: v for k, v in run.items() if "top5" not in k} for run in runs], "--paired", "softmax_cross_entropy"
    )
    assert "Validation: top-1." in text
    assert [row["Δ top-1"] for row in cells(text, "neuralsort")] == ["+3.00"]


@pytest.mark.parametrize("setting", [*OWN_SETTINGS, "mixup", "noise_matrix_id"])
def test_settings_of_a_loss_leave_runs_in_their_experiment(made, row, setting):
    softmax, phuber = (row("noise/human", method=f"{name}_cross_entropy") for name in ("softmax", "phuber"))
    rows = [changed(phuber, test_top1=0.62, **{setting: value}) for value in ("0.1", "0.2")]
    text = made([changed(softmax, test_top1=0.60), *rows], "--paired", "softmax_cross_entropy")[1]
    assert [row["Δ top-1"] for row in cells(text, "phuber")] == ["+2.00", "+2.00"]


def test_no_difference_is_of_several_settings_at_once(cifar_run):
    base = pd.DataFrame([cifar_run(seed, 0.6, 0.8) for seed in (0, 1)])
    mixed = pd.DataFrame([cifar_run(seed, 0.7, 0.9, lr=f"0.00{1 + seed}") for seed in (0, 1)])
    with pytest.raises(ValueError, match="several lr"):
        paired(mixed.astype({"seed": float}), base.astype({"seed": float}), ["test_top1"])


@pytest.fixture
def temperatures(row):
    """Runs whose validation and test accuracies disagree."""

    def run(trained, beta, seeds, valid, test, **more):
        accuracies = dict(zip(("valid_top1", "valid_top5", "test_top1", "test_top5"), (*valid, *test)))
        cells = {"last_test_logit_std": 2.0, "m": 100, "n_epochs": 20, **accuracies, **more}
        own = row("temperature", inverse_temperature=trained)
        return [changed(own, inverse_temperature=beta, seed=seed, order_seed=seed, **cells) for seed in seeds]

    return [
        # 1 has the better top-1 on validation, .5 the better top-5; the test accuracies must not matter
        *run("1.0", "1.0", (0, 1), (0.6, 0.7), (0.3, 0.9)),
        *run("1.0", "0.5", (0, 1), (0.4, 0.8), (0.9, 0.3)),
        *run("1.0", "4.0", (0, 1), (0.1, 0.1), (1.0, 1.0)),
        *run("auto", "auto", (0, 1), (1.0, 1.0), (0.2, 0.7), last_inverse_temperature=3),
        *run("0.1:5", "0.1:5", (0, 1), (0.7, 0.7), (0.4, 0.6), last_inverse_temperature=4.9),
        *run("1.0", "1.0", (0,), (0.6, 0.7), (0.3, 0.5), m=16),
        *run("1.0", "1.0", (0,), (0.9, 0.9), (0.1, 0.1), n_epochs=9),  # another experiment, and a line of its own
    ]


@pytest.mark.parametrize("spellings", [("1:4", "1.0:4.0"), ("2", "2.0")])
def test_the_spellings_of_an_inverse_temperature_are_one_setting(made, row, spellings):
    own = row("temperature", inverse_temperature="0.1:5")
    rows = []
    for seed, spelling in enumerate(spellings):
        rows.append(changed(own, inverse_temperature=spelling, seed=seed, order_seed=seed))
    text = made(rows)[1]
    (line,) = cells(text, "lml")
    assert line["seeds"] == "2"
    assert f"inverse_temperature {spellings[0]}" in text


def test_of_temperatures_validation_chooses_test_reports_and_other_settings_are_other_lines(
    made, temperatures, tmp_path
):
    status, text, _ = made(temperatures, "--temperatures", "--figures", tmp_path / "figures", name="t.csv")
    assert status == 0
    lines = {(row["m"], row["epochs"]): row for row in cells(text, "lml")}
    assert set(lines) == {("100", "20"), ("16", "20"), ("100", "9")}
    line = lines["100", "20"]
    # (.6 + .7) / 2 against (.4 + .8) / 2. The default is .25, which was not tried.
    assert (line["inverse temperature"], line["times logit std"], "default top-1" in line) == ("1 (4x)", "2", False)
    assert (line["top-1"], line["top-5"]) == ("30.00 ± 0.00", "90.00 ± 0.00")
    assert (line["auto top-1"], line["auto top-5"]) == ("20.00", "70.00")
    assert (line["schedule"], line["schedule top-1"], line["schedule top-5"]) == ("0.1:5", "40.00", "60.00")
    assert lines["100", "9"]["top-1"] == "10.00"
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"t_.5_0_0_0_.5.svg"}


def test_temperatures_are_compared_on_the_seeds_that_all_have(made, row):
    """The seed of the one that others lack does not count, and with none in common nothing is chosen."""
    own = row("temperature", inverse_temperature="1.0")

    def run(beta, seed, valid, test):
        return changed(own, inverse_temperature=beta, seed=seed, valid_top1=valid, test_top1=test)

    rows = [run("1.0", 0, 0.5, 0.6), run("1.0", 1, 0.1, 0.9), run("4.0", 0, 0.4, 0.7)]
    (line,) = cells(made(rows, "--temperatures", name="t.csv")[1], "lml")
    assert (line["inverse temperature"], line["top-1"], line["seeds"]) == ("1 (4x, the least)", "60.00", "1")
    status, _, error = made(rows[1:], "--temperatures", name="t.csv")
    assert status == 2
    assert "no seed has run at every inverse temperature of lml" in error


def test_the_least_of_temperatures_that_tie_is_shown_with_the_others(made, row):
    """Means over seeds in another order, whose sums differ in the last digit."""
    own = row("temperature", inverse_temperature="1.0")
    rows = []
    for beta, valid in (("4.0", (0.1, 0.2, 0.3)), ("1.0", (0.3, 0.2, 0.1))):
        for seed in range(3):
            rows.append(changed(own, inverse_temperature=beta, seed=seed, order_seed=seed, valid_top1=valid[seed]))
    (line,) = cells(made(rows, "--temperatures", name="t.csv")[1], "lml")
    assert line["inverse temperature"] == "1 (4x, the least), as good as 4"


def test_of_beam_search_differences_are_taken_within_a_seed_and_a_setting(made, row):
    """Differences .01 .03 and, of a seed that the control lacks, none: mean 2 points, t(.975, 1) x std / sqrt 2."""

    def run(arm, seed, wer, **more):
        return changed(row("beam", arm=arm), seed=seed, test_wer_beam4=wer, **more)

    rows = [run("cross_entropy", 0, 0.3), run("cross_entropy", 1, 0.5), run("retain", 1, 0.53)]
    rows += [run("retain", 0, 0.31), run("retain", 7, 0.9), run("retain", 0, 0.9, n_updates=9)]
    status, text, _ = made(rows, name="b.csv")
    assert status == 0
    rates, gains = (cells(part, "retain, softsort") for part in text.split("\n\nIn percent, ")[1:])
    assert [row["WER beam 4"] for row in rates] == ["58.00 ± 29.82", "90.00"]
    assert [(row["WER beam 4"], row["pairs"]) for row in gains] == [("+2.00 ± 12.71", "2"), ("", "0")]


# A value of each flag that asks for another report than the default.
ASKED = {
    "--table": "none",
    "--where": "seed=0",
    "--choice": "clean",
    "--commands": "",
    "--paired": "softmax_cross_entropy",
    "--temperatures": "",
    "--format": "csv",
    "--output": "FOLDER/output.txt",
    "--figures": "FOLDER/figures",
}
KINDS = ("table1", "epochs", "beam", "knn", "temperature", "yours", "yours of beam search", "yours of wrong labels")


def test_every_flag_is_among_these(capsys):
    with pytest.raises(SystemExit):
        report.main(["--help"])
    assert set(re.findall(r"^  (--\w+)", capsys.readouterr().out, re.MULTILINE)) == set(ASKED)


@pytest.fixture
def file_of(trained, two_seeds, write, monkeypatch, tmp_path):
    """A results file of a kind."""

    def call(kind):
        rows = two_seeds
        if kind in ("beam", "knn", "temperature"):
            return trained / f"{kind}.csv"
        if kind == "epochs":
            return RESULTS / "implementation_epochs.csv"
        if kind == "table1":
            return write(*rows, name="table1.csv")
        monkeypatch.setattr(reproduction, "RESULTS", tmp_path)
        if kind == "yours of beam search":
            rows = rows_of(trained / "beam.csv")
            return write(*rows, name="beam_search.csv")
        if kind == "yours of wrong labels":
            (tmp_path / "noise").mkdir()
            rows = rows_of(RESULTS / "noise" / "human.csv")
            rows = [row for row in rows if row["method"] in ("softmax_cross_entropy", "phuber_cross_entropy", "lapsum")]
            return write(*rows, name="noise/human.csv")
        return write(*rows, name="table1.csv")

    return call


@pytest.fixture
def effect_of(file_of, tmp_path, capsys):
    """What a call of scripts/report.py does: its status, what it prints, what it writes."""

    def call(path, flags):
        folder = tmp_path / "written"
        words = [str(path)]
        for flag in flags:
            value = ASKED[flag].replace("FOLDER", str(folder))
            words += filter(None, [flag, value])
        status = door.call(lambda: report.main(words))
        printed = capsys.readouterr()
        written = {}
        for file in sorted(folder.rglob("*.*")):
            written[file.name] = file.stat().st_size
            file.unlink()
        return status, printed.out, written, printed.err.replace(str(folder), "")

    return call


def names_a_flag(error, flag):
    """Whether a message is one sentence about a flag, or about the value that it got."""
    return error.startswith("error: ") and error.count("\n") == 1 and (flag in error or (ASKED[flag] or flag) in error)


@pytest.mark.parametrize("kind", KINDS)
def test_every_flag_and_every_pair_of_flags_acts_or_is_refused(kind, file_of, effect_of):
    """A pair that is taken does something else than either of its flags alone, where that one does something."""
    path = file_of(kind)
    plain = effect_of(path, [])
    alone = {flag: effect_of(path, [flag]) for flag in ASKED}
    assert plain[0] == 0
    for flag, (status, _, _, error) in alone.items():
        assert status == 0 or names_a_flag(error, flag)
    for first, second in itertools.combinations(ASKED, 2):
        status, out, written, error = effect_of(path, [first, second])
        if status:
            assert (status, out, written) == (2, "", {})
            assert names_a_flag(error, first) or names_a_flag(error, second)
            continue
        for flag, other in ((first, second), (second, first)):
            # Wrong labels have no published table: none is what a table of one file has without the flag.
            is_default = (kind, flag) == ("yours of wrong labels", "--table")
            if alone[flag] != plain and not is_default:
                assert (status, out, written) != alone[other][:3], (flag, other)


WRITTEN = ("cifar", "knn", "beam", "heads", "untested", "temperature", "trials", "noise/human")  # by every script


@pytest.mark.parametrize("name", WRITTEN)
def test_every_file_that_a_script_writes_has_a_table(trained, capsys, name):
    file = trained / f"{name}.csv"
    assert report.main([str(file)]) == 0
    assert cells(capsys.readouterr().out, "")


@pytest.mark.parametrize(("name", "flags"), [("temperature", ["--temperatures"]), ("cifar", []), ("knn", [])])
def test_a_method_of_one_s_own_has_tables_and_figures(trained, temperatures, write, tmp_path, capsys, name, flags):
    made_of = temperatures if name == "temperature" else rows_of(trained / f"{name}.csv")
    rows = [row | {"method": re.sub("lml|neuralsort", "mine", row["method"])} for row in made_of]
    assert report.main([str(write(*rows)), *flags, "--figures", str(tmp_path / "figures")]) == 0
    assert "mine" in capsys.readouterr().out
    assert list((tmp_path / "figures").glob("*.svg"))


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize(("column", "reason"), [("warmup", "differ in warmup"), ("run_id", "no column tells apart")])
def test_a_seed_that_stands_twice_in_a_line_is_refused(trained, made, name, column, reason):
    """As of a newer version, whose setting is no column that this one knows."""
    rows = rows_of(trained / f"{name}.csv")
    status, text, error = made([*rows, rows[-1] | {column: "5"}], name="mine.csv")
    assert (status, text) == (2, "")
    assert f"mine.csv has 2 runs of {rows[-1]['method']} with seed {rows[-1]['seed']} in one line" in error
    assert reason in error


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("is_alone", [False, True])
def test_an_empty_accuracy_of_a_split_that_a_run_has_is_refused(trained, made, name, is_alone):
    """It would count as a seed. Every cell that a table shows; also in the only row of a file."""
    rows = rows_of(trained / f"{name}.csv")
    shown = [column for column in rows[0] if re.search(r"^(last_valid|test|valid)_(top[15]$|.*_beam)", column)]
    assert len(shown) >= 3
    for column in shown:
        damaged = rows[-1] | {column: ""}
        others = rows[:-1] * (not is_alone)
        status, text, error = made([*others, damaged], name="mine.csv")
        assert (status, text) == (2, "")
        assert f"the run {len(others)} of " in error
        assert f"has no {column}: repair or delete its line" in error


def test_runs_without_a_test_split_stand_beside_others_without_a_verdict_on_it(trained, write, monkeypatch, tmp_path):
    """In your file and in the repository's, so that both sides of a line lack a test accuracy."""
    rows = rows_of(trained / "heads.csv") + rows_of(trained / "untested.csv")
    (tmp_path / "repository").mkdir()
    write(*rows, name="repository/mine.csv")
    monkeypatch.setattr(reproduction, "RESULTS", tmp_path)
    monkeypatch.setattr(reproduction, "REPOSITORY", tmp_path / "repository")
    again = [row | {"started_utc": f"{row['started_utc']}, again"} for row in rows]
    text = reproduction.report(write(*again, name="mine.csv"))
    verdicts = [line["top-1 verdict"] for line in cells(text, "")]
    assert sorted(verdict.split(" (")[0] for verdict in verdicts) == [""] * 6 + ["agrees"] * 6
    assert "()" not in text


def test_a_setting_that_is_off_is_the_same_as_none(made, two_seeds):
    status, _, error = made([*two_seeds, two_seeds[0] | {"label_smoothing": "0.0", "ema": ""}])
    assert (status, "differ in label_smoothing: move" in error) == (2, True)


def test_of_runs_that_differ_in_an_unknown_column_a_condition_keeps_one(made, two_seeds):
    newer = [row | {"warmup": "5", "test_top1": "0.1"} for row in two_seeds]
    status, text, _ = made([*two_seeds, *newer], "--where", "warmup=")
    assert status == 0
    assert cells(text, "Softmax CE")[0]["top-1 measured"] == "61.50 ± 0.71"


def test_epochs_without_cross_entropy_have_a_table():
    """The pages have the tables of every other kind of file."""
    assert report.main([str(RESULTS / "implementation_epochs.csv")]) == 0


def test_epochs_with_two_settings_of_cross_entropy_have_no_differences_until_one_is_kept(tmp_path, capsys):
    plain, smooth = (pd.read_csv(RESULTS / f"table1{name}_epochs.csv", dtype=str) for name in ("", "_smoothing"))
    path = tmp_path / "epochs.csv"
    pd.concat([smooth.assign(n_epochs="200"), plain]).to_csv(path, index=False)
    assert report.main([str(path)]) == 0
    said = capsys.readouterr().out
    assert "paired by seed" not in said
    about, _, keep = said.partition(" Keep one: ")
    assert about.endswith("No differences: cross-entropy has several settings, which differ in label_smoothing.")
    assert report.main([str(path), *keep.splitlines()[0].split()]) == 0
    said = capsys.readouterr().out
    assert ("No differences" in said, "paired by seed" in said) == (False, True)


@pytest.mark.parametrize("place", [0, 1, -1])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_line_without_a_run_id_is_refused_by_its_number(trained, tmp_path, name, place):
    """As a spreadsheet leaves below the last row: commas only; or a row whose name was deleted."""
    for cells in ({}, rows_of(trained / f"{name}.csv")[0] | {"run_id": ""}):
        rows = rows_of(trained / f"{name}.csv")
        position = place % (len(rows) + 1)
        rows.insert(position, cells)
        write_rows(tmp_path / "r.csv", [dict.fromkeys(rows[-2], "") | row for row in rows])
        before = (tmp_path / "r.csv").read_bytes()
        match = f"line {position + 2} of .*r.csv has no run_id: repair or delete that line"
        with pytest.raises(ValueError, match=match):
            read_runs(tmp_path / "r.csv")
        with pytest.raises(ValueError, match=match):  # as a run that adds its row does
            read_rows(tmp_path / "r.csv")
        assert (tmp_path / "r.csv").read_bytes() == before


@pytest.mark.parametrize("study", [study for study in LISTED if getattr(study, "limit", "")], ids=lambda it: it.name)
def test_paired_differences_have_the_limit_of_their_study(study, capsys):
    (file,) = study.files
    path = RESULTS / file.removeprefix("results/")
    for options in ([], ["--commands"]):
        assert report.main([str(path), "--paired", "softmax_cross_entropy", *options]) == 0
        assert study.limit in " ".join(capsys.readouterr().out.split())


def test_own_columns_are_kept(write, two_seeds):
    assert list(read_runs(write({**two_seeds[0], "mine": "x"}))["mine"]) == ["x"]


def test_runs_of_several_scripts_in_one_file_lack_no_accuracy_of_each_other(trained, write):
    """Neighbours have no top-5, and beam search has error rates; an empty accuracy of its own script is refused."""
    rows = [rows_of(trained / f"{name}.csv")[0] for name in ("cifar", "knn", "beam", "heads")]
    assert len(read_runs(write(*rows))) == 4
    for number, name in enumerate(("test_top5", "test_top1", "test_wer_beam4", "last_valid_top5")):
        damaged = [*rows]
        damaged[number] = rows[number] | {name: ""}
        with pytest.raises(ValueError, match=f"has no {name}"):
            read_runs(write(*damaged))


# Spellings of one value, by the column: what a spreadsheet makes of a cell, and what one types.
SPELLINGS = {
    "lr": ("0.03", "3.00E-02", ".03"),
    "n_epochs": ("200", "0200", "200"),
    "p_k": ("0.5 0 0 0 0.5", "5.00E-01 0.0 0 0 .5", ".5 0 0 0 .5"),
    "inverse_temperature": ("0.25:4", ".25:4.0", "2.5e-1:4"),
    "valid_top1": ("0.5", "5.00E-01", ".50"),
    "train_seconds": ("60", "6.00E+01", "60.0"),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_condition_keeps_every_spelling_of_a_number(write, two_seeds, name):
    first, second, typed = SPELLINGS[name]
    path = write(changed(two_seeds[0], **{name: first}), changed(two_seeds[1], **{name: second}), *two_seeds[2:])
    kept = read_runs(path, [f"softmax_cross_entropy:{name}={typed}", "method=softmax_cross_entropy"])
    assert list(kept["seed"]) == [0, 1]


@pytest.mark.parametrize("name", ["device_name", "git_commit", "model"])
def test_a_condition_on_text_keeps_that_text_alone(write, two_seeds, name):
    path = write(changed(two_seeds[0], **{name: "100"}), changed(two_seeds[1], **{name: "1e2"}))
    assert list(read_runs(path, [f"{name}=1e2"])["seed"]) == [1]
