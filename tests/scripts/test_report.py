"""Tables from small files made here; nothing is averaged or counted that is not one experiment."""

import csv
import io
import os
import re
from pathlib import Path

import pandas as pd
import pytest

from experiments import train_cifar100
from experiments.common.losses import OWN_SETTINGS
from scripts import report
from scripts.reporting.runs import ReportError, differences, read_runs
from scripts.reporting.tables import HEADINGS, PAPER

RESULTS = Path(__file__).parents[2] / "results"
FIVE = "0.2 0.2 0.2 0.2 0.2"
CIFAR = {
    **{"inverse_temperature": "", "distribution": "", "art_lambda": "", "m": "", "top1_mode": ""},
    **{"implementation": "ours", "n_epochs": "200", "batch_size": "128", "lr": "0.001", "nloglr": "3.0"},
    **{"dataset": "cifar100", "data_dir": "data/downloads", "limit_train": "", "limit_test": "", "label_noise": "0.0"},
    **{"noise_groups": "", "model": "resnet18", "device": "cpu", "precision": "fp32", "threads": "2"},
    **{"num_classes": "100", "device_name": "a CPU", "torch_version": "2.9"},
}
NEURALSORT = {"method": "neuralsort", "inverse_temperature": "0.0625", "top1_mode": "smce"}
IMAGENET = {
    **{name: "" for name in ("inverse_temperature", "distribution", "art_lambda", "m", "top1_mode", "hidden_dims")},
    **{"implementation": "ours", "n_epochs": "20", "batch_size": "500", "lr": "3.1622776601683795e-05"},
    **{"data_path": "wsl-32x48d-320", "num_valid": "50000", "limit_train": "", "limit_test": "", "split_seed": "0"},
    **{"apply_relu": "false", "apply_dropout": "false", "eval_freq": "100", "precision": "fp32"},
    **{"embeddings": "1000x2048-12345678", "backbone": "resnext101_32x48d_wsl", "resolution": "320"},
    **{"num_classes": "1000", "device_name": "a GPU"},
}


def cifar_run(seed, top1, top5, method="softmax_cross_entropy", p_k="1 0 0 0 0", **settings):
    row = {**CIFAR, "method": method, "p_k": p_k, "seed": str(seed), "test_top1": str(top1), "test_top5": str(top5)}
    return row | {"valid_top1": str(top1), "valid_top5": str(top5)} | settings


TWO_SEEDS = [
    *(cifar_run(seed, top1, top5) for seed, top1, top5 in ((0, 0.6100, 0.8500), (1, 0.6200, 0.8560))),
    *(cifar_run(seed, 0.62, 0.86, p_k=FIVE, **NEURALSORT) for seed in (0, 1)),
]


def cells(markdown, start):
    """The cells, by their headings, of each line of a Markdown table that starts so."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines() if line[:1] == "|"]
    return [dict(zip(rows[0], row)) for row in rows[2:] if row[0].startswith(start)]


def test_mean_deviation_and_difference_beside_the_published_values(made):
    status, text, _ = made(TWO_SEEDS)
    assert status == 0
    # Sample standard deviation: .5 points off the mean on both sides give .71.
    softmax = {"top-1 published": "61.27", "top-1 ours": "61.50 ± 0.71", "top-1 difference": "+0.23", "seeds": "2"}
    softmax |= {"top-5 ours": "85.30 ± 0.42", "top-5 difference": "−0.01"}
    sort = {"P_K": "[0.2, 0.2, 0.2, 0.2, 0.2]", "top-1 published": "61.46", "top-1 rerun": "59.42"}
    sort |= {"top-1 ours": "62.00 ± 0.00", "inverse temperature": "0.0625"}
    for start, expected in (("Softmax CE", softmax), ("Top-k NeuralSort", sort)):
        (row,) = cells(text, start)
        assert {name: row[name] for name in expected} == expected
    assert cells(text, "Top-k DiffSortNets")[0]["top-1 ours"] == "not run"
    assert cells(text, "Lap-Top-k†")[0]["top-1 ours"] == ""
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
        ({"dataset": "digits"}, "dataset digits (cifar100)"),
        ({"lr": "0.01"}, "lr 0.01 (0.001)"),
    ],
)
def test_what_differs_from_the_paper_is_named_and_has_no_difference(made, change, difference):
    _, text, _ = made([{**row, **change} for row in TWO_SEEDS])
    assert difference in text.splitlines()[-1].partition("Not as published: ")[2]  # where it is the same for all
    assert "top-1 difference" not in cells(text, "Softmax CE")[0]
    _, text, _ = made([*TWO_SEEDS[:2], *({**row, **change} for row in TWO_SEEDS[2:])])
    (sort,) = cells(text, "Top-k NeuralSort")
    assert (difference in sort["not as published"], sort["top-1 difference"]) == (True, "")
    assert cells(text, "Softmax CE")[0]["top-1 difference"] == "+0.23"


# Those left out: another published row, settings that the row does not have, and the authors' own implementation.
@pytest.mark.parametrize(
    "flag",
    sorted(
        {*train_cifar100.IDENTITY, "mixup", "noise_matrix_id", "labels"}
        - {"seed", "method", "p_k", "distribution", "art_lambda", "implementation"}
    ),
)
def test_every_flag_of_training_that_is_not_as_published_is_named(made, flag):
    value = "human-01234567" if flag == "noise_groups" else "0.3"
    _, text, _ = made([*TWO_SEEDS[:2], {**TWO_SEEDS[2], flag: value}])
    (row,) = cells(text, "Top-k NeuralSort")
    assert f"{flag} {value}" in row["not as published"]
    assert row["top-1 difference"] == ""


@pytest.mark.parametrize("flag", sorted({*train_cifar100.IDENTITY} - {"seed", "method", "p_k"}))
def test_every_identity_flag_makes_lines_of_its_own(made, flag):
    rows = [{**row, flag: row.get(flag, "")} for row in TWO_SEEDS[:2]]
    other = cifar_run(0, 0.3, 0.6, **{flag: "0.7" if flag != "dataset" else "digits"})
    _, text, _ = made([*rows, other], "--table", "none")
    first, second = cells(text, "softmax")
    assert (first["top-1"], second["top-1"]) == ("61.50 ± 0.71", "30.00")
    assert first[HEADINGS.get(flag, flag)] != second[HEADINGS.get(flag, flag)]


def test_imagenet_rows_have_three_digits_and_are_recognised_by_their_columns(made):
    settings = {"method": "softmax_cross_entropy", "p_k": "1 0 0 0 0", "test_top1": "0.86", "test_top5": "0.97812"}
    runs = [{**IMAGENET, **settings, "seed": str(seed), "order_seed": str(seed)} for seed in (0, 1)]
    _, text, _ = made(runs, name="mine.csv")
    assert text.startswith("Tables 2 and 3: linear heads on frozen ImageNet-1K")
    (softmax,) = cells(text, "Softmax (")
    assert (softmax["top-5 ours"], softmax["top-5 difference"]) == ("97.812 ± 0.000", "+0.017")
    assert "Runs: mine.csv, features of resnext101_32x48d_wsl at 320 pixels, seed 0, 1" in text
    _, text, _ = made([{**run, "num_classes": "10450"} for run in runs], name="mine.csv")
    assert "ImageNet-21K-P" in text
    assert "num_valid 50000 (100000)" in text


def test_table_5_tells_the_backbones_apart_and_takes_any_p_k_where_none_is_known(made):
    networks = {"method": "sinkhorn_sort", "inverse_temperature": "100.0", "m": "16", "top1_mode": "sm"}
    networks |= {"test_top1": "0.9", "seed": "0"}
    other = {"backbone": "tf_efficientnet_l2_ns", "resolution": "800", "embeddings": "1000x5504-87654321"}
    rows = [
        {**IMAGENET, **networks, "test_top5": "0.98", "p_k": FIVE},
        {**IMAGENET, **networks, "test_top5": "0.99", "p_k": "0.25 0 0 0 0.75", **other},
    ]
    _, text, _ = made(rows, name="table5.csv")
    assert cells(text, "ResNeXt-101 32x48d WSL, Top-k SinkhornSort")[0]["top-5 difference"] == "+0.01"
    assert cells(text, "Noisy Student EfficientNet-L2, Top-k SinkhornSort")[0]["P_K"] == "[0.25, 0, 0, 0, 0.75]"
    assert cells(text, "CLIP")[0]["public"] == "false"


def test_csv_and_latex_have_the_numbers_of_the_table(made, tmp_path):
    output = tmp_path / "new" / "table.csv"
    status, text, message = made(TWO_SEEDS, "--format", "csv", "--output", output)
    assert (status, text, f"wrote {output}" in message) == (0, "", True)
    rows = list(csv.DictReader(io.StringIO(output.read_text())))
    assert float(rows[0]["test_top1_mean"]) == pytest.approx(61.5)
    assert float(rows[0]["test_top1_std"]) == pytest.approx(0.5 * 2**0.5)
    assert (float(rows[0]["published_test_top1"]), float(rows[0]["n_seeds"])) == (61.27, 2)
    _, text, _ = made(TWO_SEEDS, "--format", "latex")
    assert "61.50 $\\pm$ 0.71" in text
    assert all(text.count(f"\\{rule}rule") == 1 for rule in ("top", "mid", "bottom"))
    body = text.split("\n", 1)[1].replace("$P_K$", "").replace("\\label{tab:table1}", "")
    assert not re.search(r"[±−≈†β]|(?<!\\)[_#%]", body)


def test_the_results_are_never_the_output(made, tmp_path):
    made(TWO_SEEDS)
    before = (tmp_path / "table1.csv").read_bytes()
    (tmp_path / "link.csv").symlink_to(tmp_path / "table1.csv")
    for output in ("table1.csv", "link.csv", PAPER / "table1.csv"):
        with pytest.raises(SystemExit, match="2"):
            report.main([str(tmp_path / "table1.csv"), "--output", str(tmp_path / output)])
    assert (tmp_path / "table1.csv").read_bytes() == before


def test_no_pipe_device_or_folder_becomes_a_file(made, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for output in (tmp_path / "pipe", tmp_path):
        with pytest.raises(SystemExit, match="is no file that can be replaced"):
            made(TWO_SEEDS, "--output", output)
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize(
    "how",
    [{"sep": ";"}, {"sep": "\t"}, {"encoding": "utf-8-sig"}, {"lineterminator": "\r\n"}, {"quoting": csv.QUOTE_ALL}],
)
def test_a_file_that_a_spreadsheet_saved_is_read(write, capsys, how):
    assert report.main([str(write(*TWO_SEEDS, name="table1.csv", **how))]) == 0
    assert cells(capsys.readouterr().out, "Softmax CE")[0]["top-1 ours"] == "61.50 ± 0.71"


def test_numbers_that_a_spreadsheet_writes_in_another_way_make_no_line_of_their_own(made):
    _, text, _ = made([TWO_SEEDS[0], {**TWO_SEEDS[1], "lr": "1E-03", "label_noise": "0"}])
    (softmax,) = cells(text, "Softmax CE")
    assert (softmax["top-1 ours"], softmax["seeds"]) == ("61.50 ± 0.71", "2")


def test_a_run_is_counted_once(made, tmp_path, capsys):
    """Twice in a file, twice by another id, after the header of an appended file, cut short, with own columns."""
    made([*TWO_SEEDS, TWO_SEEDS[0]])
    path = tmp_path / "table1.csv"
    header, *lines = path.read_text().splitlines()
    noted = [f"{header},my_note", *(f"{line},note {number}" for number, line in enumerate([*lines, lines[1]]))]
    path.write_text("\n".join([*noted[:3], noted[0], *noted[3:], lines[0][:40]]))
    assert report.main([str(path)]) == 0
    text, messages = capsys.readouterr()
    assert (cells(text, "Softmax CE")[0]["top-1 ours"], cells(text, "Softmax CE")[0]["seeds"]) == ("61.50 ± 0.71", "2")
    for note in ("is cut short: 1", "repeat the first line: 1", "twice (run_id, ...), the last one counts: 1"):
        assert note in messages
    assert messages.count("the last one counts: 1") == 2


@pytest.mark.parametrize(
    ("rows", "flags", "message"),
    [
        (TWO_SEEDS, ["--where", "n_epoch=5"], "--where must be COLUMN=VALUE"),
        (TWO_SEEDS, ["--where", "n_epochs"], "--where must be COLUMN=VALUE"),
        (TWO_SEEDS, ["--where", "n_epochs=5"], "leaves no run"),
        ([{**TWO_SEEDS[0], "test_top1": "61.0"}], [], "test_top1 must be a fraction in [0, 1], got '61.0'"),
        ([{**TWO_SEEDS[0], "test_top1": "0,61"}], [], "test_top1 must be a fraction in [0, 1], got '0,61'"),
        ([{**TWO_SEEDS[0], "p_k": "one"}], [], "p_k must be numbers"),
        ([{"seed": "0"}], [], "must name each column once, method among them"),
        (TWO_SEEDS, ["--paired", "softsort"], "has no run of softsort; it has softmax_cross"),
        (TWO_SEEDS[:2], ["--temperatures", "--where", "seed=7"], "leaves no run"),
    ],
)
def test_bad_input_gets_a_sentence_and_status_2(made, rows, flags, message):
    status, text, error = made(rows, *flags)
    assert (status, text, error.startswith("error: ")) == (2, "", True)
    assert message in error


def test_a_run_without_its_accuracy_is_in_no_mean(made):
    _, text, _ = made([{**TWO_SEEDS[0], "test_top1": ""}, *TWO_SEEDS[1:]])
    (softmax,) = cells(text, "Softmax CE")
    assert (softmax["top-1 ours"], softmax["top-5 ours"]) == ("", "85.30 ± 0.42")


def test_what_is_no_file_of_results_gets_a_sentence(tmp_path, capsys):
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "uneven.csv").write_text("method,seed\na,1,2\nb,1\n")
    messages = {"absent": "no file", "pipe": "no file", "binary": "UTF-8", "uneven": "3 cells under 2"}
    for name, message in messages.items():
        assert report.main([str(tmp_path / f"{name}.csv")]) == 2
        assert message in capsys.readouterr().err


def test_paired_differences_are_taken_within_an_experiment_and_have_an_interval(made):
    """Differences of 1 and 3 points: mean 2, standard deviation 1.414, and t(1) = 12.71 times 1 is the half width."""
    rows = [cifar_run(seed, 0.60, 0.85) for seed in (0, 1, 2)]
    # Validation prefers the first: what test says does not count.
    rows += [cifar_run(seed, 0.70, 0.85, lr="0.002", valid_top1="0.59") for seed in (0, 1)]
    for seed, top1 in ((0, 0.61), (1, 0.63), (3, 0.99)):  # seed 3 has no partner
        rows.append(cifar_run(seed, top1, 0.85, p_k=FIVE, **NEURALSORT))
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


def test_paired_differences_of_runs_that_have_top_1_only(made):
    runs = [
        cifar_run(0, 0.60, 0.85),
        cifar_run(0, 0.62, 0.80, lr="0.002"),
        cifar_run(0, 0.65, 0.1, p_k=FIVE, **NEURALSORT),
    ]
    _, text, _ = made(
        [{k: v for k, v in run.items() if "top5" not in k} for run in runs], "--paired", "softmax_cross_entropy"
    )
    assert "Validation: top-1." in text
    assert [row["Δ top-1"] for row in cells(text, "neuralsort")] == ["+3.00"]


@pytest.mark.parametrize("setting", [*OWN_SETTINGS, "mixup", "noise_matrix_id"])
def test_settings_of_a_loss_leave_runs_in_their_experiment(made, setting):
    rows = [cifar_run(0, 0.60, 0.85)]
    rows += [cifar_run(0, 0.62, 0.85, method="phuber_cross_entropy", **{setting: value}) for value in ("0.1", "0.2")]
    text = made(rows, "--paired", "softmax_cross_entropy")[1]
    assert [row["Δ top-1"] for row in cells(text, "phuber")] == ["+2.00", "+2.00"]


def test_no_difference_is_of_several_settings_at_once():
    base = pd.DataFrame([cifar_run(seed, 0.6, 0.8) for seed in (0, 1)])
    mixed = pd.DataFrame([cifar_run(seed, 0.7, 0.9, lr=f"0.00{1 + seed}") for seed in (0, 1)])
    with pytest.raises(ReportError, match="several lr"):
        differences(mixed, base, ["test_top1"])


def temperature_run(beta, seed, valid, test, m="100", **more):
    measured = dict(zip(("valid_top1", "valid_top5", "test_top1", "test_top5"), map(str, (*valid, *test))))
    row = {**IMAGENET, "method": "lml", "p_k": "0.5 0 0 0 0.5", "inverse_temperature": beta, "m": m, "seed": str(seed)}
    return {**row, **measured, "last_test_logit_std": "2.0", "last_inverse_temperature": "", **more}


TEMPERATURES = [
    # 1 has the better top-1 on validation, .5 the better top-5; the test accuracies must not matter
    *(temperature_run("1", seed, (0.6, 0.7), (0.3, 0.9)) for seed in (0, 1)),
    *(temperature_run("0.5", seed, (0.4, 0.8), (0.9, 0.3)) for seed in (0, 1)),
    *(temperature_run("4", seed, (0.1, 0.1), (1.0, 1.0)) for seed in (0, 1)),
    *(temperature_run("auto", seed, (1.0, 1.0), (0.2, 0.7), last_inverse_temperature="3") for seed in (0, 1)),
    temperature_run("0.1:5", 0, (0.7, 0.7), (0.4, 0.6), last_inverse_temperature="4.9"),
    temperature_run("1", 0, (0.6, 0.7), (0.3, 0.5), m="16"),
    temperature_run("1", 0, (0.9, 0.9), (0.1, 0.1), n_epochs="9"),  # another experiment, and a line of its own
]


def test_of_temperatures_validation_chooses_test_reports_and_other_settings_are_other_lines(made, tmp_path):
    status, text, _ = made(TEMPERATURES, "--temperatures", "--figures", tmp_path / "figures", name="t.csv")
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


BEAM = {
    **{"dataset": "reversal", "max_letters": "3", "hidden_dim": "8", "batch_size": "16", "beam_size": "3"},
    **{"pretrain_updates": "6", "n_updates": "4", "lr": "0.1", "pretrain_lr": "0.1"},
}


def test_of_beam_search_differences_are_taken_within_a_seed_and_a_setting(made):
    """Differences .01 .03 and, of a seed that the control lacks, none: mean 2 points, t(.975, 1) x std / sqrt 2."""

    def run(arm, seed, wer, **more):
        method = "softmax_cross_entropy" if arm == "cross_entropy" else "softsort"
        measured = {"test_wer_beam4": str(wer), "test_forced_accuracy": "1.0 0.9", "test_free_accuracy": "1.0 0.5"}
        return {**BEAM, "arm": arm, "method": method, "inverse_temperature": "", "seed": str(seed), **measured, **more}

    rows = [run("cross_entropy", 0, 0.3), run("cross_entropy", 1, 0.5), run("retain", 1, 0.53)]
    rows += [run("retain", 0, 0.31), run("retain", 7, 0.9), run("retain", 0, 0.9, n_updates="9")]
    status, text, _ = made(rows, name="b.csv")
    assert status == 0
    rates, gains, positions = (cells(part, "retain, softsort") for part in text.split("\n\nIn percent, ")[1:])
    assert [row["WER beam 4"] for row in rates] == ["58.00 ± 29.82", "90.00"]
    assert [(row["WER beam 4"], row["pairs"]) for row in gains] == [("+2.00 ± 12.71", "2"), ("", "0")]
    assert (positions[0]["1"], positions[0]["2"]) == ("100.0 / 100.0", "90.0 / 50.0")


def test_epochs_without_cross_entropy_have_a_table():
    """The pages have the tables of every other kind of file."""
    assert report.main([str(RESULTS / "implementation_epochs.csv")]) == 0


def test_read_runs_keeps_own_columns(write):
    assert list(read_runs(write({"method": "softsort", "mine": "x"}))["mine"]) == ["x"]
