"""Tables from small files made here, the published values against the facts they were taken from, and the figures."""

import base64
import csv
import io
import re

import pytest
from PIL import Image

from experiments import finetune_imagenet, train_cifar100, train_knn
from experiments.common.run import NOT_COLUMNS
from scripts.reporting.tables import PAPER, SEEDS, identity_columns

FIVE = "0.2 0.2 0.2 0.2 0.2"
CIFAR = {
    **{"inverse_temperature": "", "distribution": "", "art_lambda": "", "m": "", "top1_mode": ""},
    **{"implementation": "ours", "n_epochs": "200", "batch_size": "128", "lr": "0.001", "nloglr": "3.0"},
    **{"dataset": "cifar100", "data_dir": "data/downloads", "limit_train": "", "limit_test": "", "label_noise": "0.0"},
    **{"noise_groups": "", "model": "resnet18", "device": "cpu", "precision": "fp32", "threads": "2"},
    **{"num_classes": "100", "train_images": "47500", "valid_images": "2500", "test_images": "10000"},
    **{"device_name": "a CPU", "torch_version": "2.9"},
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
    *(cifar_run(seed, 0.62, 0.86, p_k="0.2 0.2 0.2 0.2 0.2", **NEURALSORT) for seed in (0, 1)),
]


def cells(markdown, start):
    """The cells of the one line of a Markdown table that starts so."""
    (line,) = [line for line in markdown.splitlines() if line.startswith(f"| {start}")]
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))]


def test_mean_std_difference_and_bold_beside_the_published_values(made):
    status, text, _ = made(TWO_SEEDS)
    assert status == 0
    # Sample standard deviation: .5 points off the mean on both sides give .71.
    assert cells(text, "Softmax CE") == [
        *("Softmax CE (softmax_cross_entropy)", "[1, 0, 0, 0, 0]"),
        *("61.27", "", "61.50 ± 0.71", "+0.23", "85.31", "", "85.30 ± 0.42", "−0.01", "2"),
    ]
    assert cells(text, "Top-k NeuralSort") == [
        *("Top-k NeuralSort (neuralsort)", "[.2, .2, .2, .2, .2]", "61.46", "59.42"),
        *("**62.00 ± 0.00**", "+0.54", "86.03", "83.03", "**86.00 ± 0.00**", "−0.03", "2"),
    ]
    assert cells(text, "Top-k DiffSortNets")[2:5] == ["**62.00**", "55.00", "not run"]
    assert cells(text, "Lap-Top-k†")[2:5] == ["64.53", "", ""]
    caption = text.splitlines()[0]
    told = ("Table 1: ResNet-18", "200 epochs", "fp32", "seeds 0 and 1", "a CPU", "mean of 2 seeds", "†: second-hand")
    assert all(each in caption for each in told)
    assert "not comparable" not in caption


def test_a_row_with_fewer_seeds_than_asked_says_so(made):
    _, text, _ = made(TWO_SEEDS[1:])
    assert cells(text, "Softmax CE")[4:6] == ["**62.00**", "+0.73"]  # no ± for one seed; ties are both the best
    assert cells(text, "Softmax CE")[-1] == "1 of 2"
    assert "fewer than the 2 seeds" in text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"n_epochs": "5"}, "n_epochs 5 (published: 200)"),
        ({"limit_train": "5000", "train_images": "4750"}, "limit_train 5000"),
        ({"limit_test": "100"}, "limit_test 100"),
        ({"precision": "bf16"}, "precision bf16 (not fp32)"),
        ({"label_noise": "0.2", "noise_groups": "blocks"}, "label_noise 0.2"),
        ({"lr_schedule": "cosine"}, "lr_schedule cosine"),
        ({"weight_decay": "0.5", "ema": "0.999"}, "weight_decay 0.5, ema 0.999"),
        ({"dataset": "digits", "num_classes": "10"}, "dataset digits (published: cifar100)"),
        ({"lr": "0.01"}, "lr 0.01 (published: 0.001)"),
    ],
)
def test_a_shorter_or_other_run_has_no_difference_and_the_caption_says_why(made, change, reason):
    _, text, _ = made([{**row, **change} for row in TWO_SEEDS])
    caption = text.splitlines()[0]
    assert "These runs are not comparable with the published values" in caption
    assert reason in caption.partition("hence no difference: ")[2]
    headings = cells(text, "method")
    assert "top-1 ours, 5 epochs" in headings if "n_epochs" in change else "top-1 ours" in headings
    assert "top-1 difference" not in headings


def test_a_reason_of_one_row_names_it(made):
    rows = [*TWO_SEEDS[:2], *({**row, "inverse_temperature": "0.5", "m": "16"} for row in TWO_SEEDS[2:])]
    _, text, _ = made(rows)
    reason = "Top-k NeuralSort (neuralsort) [.2, .2, .2, .2, .2]: m 16 (published: none), inverse_temperature 0.5 (pub"
    assert reason in text
    assert cells(text, "Softmax CE")[5] == "+0.23"
    assert cells(text, "Top-k NeuralSort")[5] == "—"


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(("n_epochs", "5"), ("limit_train", "50"), ("precision", "bf16"), ("implementation", "difftopk")),
        ("batch_size", "64"),
    ],
)
def test_other_schedules_subsets_precisions_and_implementations_are_not_mixed(made, column, value):
    rows = [*TWO_SEEDS, cifar_run(0, 0.3, 0.6, **{column: value})]
    assert (made(rows)[0], made(rows)[1].count("| Softmax CE")) == (0, 2)  # in Markdown, a table of each
    status, text, said = made(rows, "--format", "csv")
    assert (status, text) == (2, "")
    assert f"mixes {column} " in said
    (advice,) = re.findall(r"choose with (--where \S+)", said)
    assert made(rows, *advice.split())[0] == 0
    assert cells(made(rows, "--where", f"{column}={value}")[1], "Softmax CE")[4] == "30.00"


def test_a_cell_holds_the_seeds_of_one_experiment(made):
    rows = [*TWO_SEEDS, {**TWO_SEEDS[2], "inverse_temperature": "0.5"}]
    status, _, said = made(rows)
    assert status == 2
    assert "neuralsort [.2, .2, .2, .2, .2] mixes inverse_temperature 0.0625 and 0.5" in said
    status, text, _ = made(rows, "--where", "neuralsort:inverse_temperature=0.0625")
    assert status == 0
    assert cells(text, "Softmax CE")[4] == "61.50 ± 0.71"  # the condition is about neuralsort alone


def test_runs_without_a_published_row_come_last_and_files_without_a_table_stand_alone(made):
    rows = [cifar_run(0, 0.5, 0.8, "soft_topk", "0.2 0.2 0.2 0.2 0.2"), *TWO_SEEDS]
    _, text, _ = made(rows)
    assert text.splitlines()[-1].startswith("| soft_topk ")
    status, text, _ = made(rows, "--table", "none", name="mine.csv")
    assert status == 0
    assert "published" not in text
    assert cells(text, "method") == ["method", "P_K", "top-1 ours", "top-5 ours", "seeds"]
    assert made([{**row, "implementation": "difftopk"} for row in rows])[1].count("top-1 difftopk") == 1


def imagenet_run(seed, top5, **settings):
    seeds = {"seed": str(seed), "order_seed": str(seed)}
    return {**IMAGENET, **seeds, "test_top1": "0.86", "test_top5": str(top5), **settings}


def test_imagenet_rows_have_three_digits_and_are_recognised_by_their_columns(made):
    settings = {"method": "softmax_cross_entropy", "p_k": "1 0 0 0 0"}
    _, text, _ = made([imagenet_run(seed, 0.97812, **settings) for seed in (0, 1)], name="mine.csv")
    assert text.startswith("Tables 2 and 3: linear heads on frozen ImageNet-1K")
    assert cells(text, "Softmax (")[2:] == [
        *("86.06", "86.00 ± 0.00", "−0.06", "97.795", "97.812 ± 0.000", "+0.017", "2")
    ]
    large = [imagenet_run(0, 0.7, **settings, num_classes="10450")]
    assert "ImageNet-21K-P" in made(large, name="mine.csv")[1]
    assert "num_valid 50000 (published: 100000)" in made(large, name="imagenet21k.csv")[1]


def test_table_5_tells_the_backbones_apart_and_takes_any_p_k_where_none_is_known(made):
    networks = {"method": "sinkhorn_sort", "inverse_temperature": "100.0", "m": "16", "top1_mode": "sm"}
    other = {"backbone": "tf_efficientnet_l2_ns", "resolution": "800", "embeddings": "1000x5504-87654321"}
    rows = [
        imagenet_run(0, 0.98, **networks, p_k="0.2 0.2 0.2 0.2 0.2"),
        imagenet_run(0, 0.99, **networks, p_k="0.25 0 0 0 0.75", **other),
    ]
    _, text, _ = made(rows, name="table5.csv")
    assert cells(text, "ResNeXt-101 32x48d WSL, Top-k SinkhornSort")[7:9] == ["98.00", "+0.01"]
    assert cells(text, "Noisy Student EfficientNet-L2, Top-k SinkhornSort")[1] == "[.25, 0, 0, 0, .75]"
    assert cells(text, "CLIP")[2:4] == ["no", "≈88.4"]
    assert "not comparable" not in text
    assert "Top-k SinkhornSort (sinkhorn_sort) is not known; the one shown is ours" in text
    alone = made(rows, "--table", "none", name="table5.csv")[1]
    assert cells(alone, "sinkhorn_sort, tf_efficientnet_l2_ns")[1] == "[.25, 0, 0, 0, .75]"
    rows.append(imagenet_run(0, 0.97, **networks, p_k="0.5 0 0 0 0.5"))
    status, _, said = made(rows, name="table5.csv")
    assert status == 2
    assert "is one published row" in said


def test_latex_is_balanced_and_uses_booktabs(made):
    rows = [*TWO_SEEDS, cifar_run(0, 0.5, 0.8, "soft_topk", "0.2 0.2 0.2 0.2 0.2")]
    _, text, _ = made(rows, "--format", "latex")
    rules = [f"{place}rule" for place in ("top", "mid", "bottom")]
    for command in (*rules, "begin{table}", "end{table}", "caption{", "label{", "centering"):
        assert text.count(f"\\{command}") == 1
    assert "\\cmidrule(lr){3-6} \\cmidrule(lr){7-10}" in text
    unescaped = re.sub(r"\\.", "", text)
    assert unescaped.count("{") == unescaped.count("}")
    assert unescaped.count("$") % 2 == 0
    assert "\\textbf{62.00 $\\pm$ 0.00}" in text
    body = text.split("\\midrule")[1].split("\\bottomrule")[0].strip().splitlines()
    columns = re.search(r"\\begin\{tabular\}\{(ll+r+)\}", text)[1]
    assert {len(re.split(r"(?<!\\)&", line)) for line in body} == {len(columns)}
    assert not re.search(r"[±−—≈†]|(?<!\\)[_#%]", text.split("\n", 1)[1].replace("$P_K$", ""))


def test_csv_keeps_all_digits_as_fractions(made, tmp_path):
    output = tmp_path / "new" / "table.csv"
    status, text, said = made(TWO_SEEDS, "--format", "csv", "--output", output)
    assert (status, text) == (0, "")
    assert f"wrote {output}" in said
    rows = list(csv.DictReader(io.StringIO(output.read_text())))
    assert rows[0]["test_top1_mean"] == "0.615"
    assert float(rows[0]["test_top1_std"]) == pytest.approx(0.005 * 2**0.5)
    assert (rows[0]["published_test_top1"], rows[0]["n_seeds"], rows[0]["n_epochs"]) == ("0.6127", "2", "200")
    assert (rows[6]["rerun_test_top5"], rows[10]["second_hand"]) == ("0.8303", "true")


def test_html_is_one_page_with_the_table_and_the_figures_in_it(made, drawn_quickly):
    rows = [{**row, "device_name": "<CPU & co>"} for row in TWO_SEEDS]
    status, text, said = made(rows, "--format", "html")
    assert (status, "wrote" in said) == (0, False)
    images = re.findall(r'<img alt="([^"]+)" src="data:image/svg\+xml;base64,([^"]+)">', text)
    assert [alt for alt, _ in images] == ["table1 accuracy"]
    assert all(base64.b64decode(data).startswith(b"<?xml") for _, data in images)
    assert not re.search(r'(src|href)="(?!data:)', text)  # nothing from elsewhere
    assert "<title>Table 1: ResNet-18 from scratch on CIFAR-100</title>" in text
    assert "&lt;CPU &amp; co&gt;" in text
    assert not re.search("<CPU|<!-- ", text)
    page = [[cell.strip("*") for cell in cells(made(rows)[1], name)] for name in ("Softmax CE", "Top-k NeuralSort")]
    body = [re.findall(r"<td>(?:<b>)?(.*?)(?:</b>)?</td>", row) for row in text.split("<tr>")]
    assert page[0] in body
    assert page[1] in body


@pytest.mark.parametrize(
    ("rows", "flags", "said"),
    [
        (TWO_SEEDS, ["--where", "n_epoch=5"], "did you mean n_epochs"),
        (TWO_SEEDS, ["--where", "n_epochs"], "must have the form COLUMN=VALUE"),
        (TWO_SEEDS, ["--where", "=5"], "must have the form COLUMN=VALUE"),
        (TWO_SEEDS, ["--where", "n_epochs=5"], "leaves no row"),
        (TWO_SEEDS, ["--where", "neuralsor:m=5"], "did you mean neuralsort"),
        (TWO_SEEDS, ["--table", "table2"], "table"),
        ([{**TWO_SEEDS[0], "test_top1": "61.0"}], [], "fraction in [0, 1], got '61.0'"),
        ([{**TWO_SEEDS[0], "method": "sorted"}], [], "method must be one of softmax_cross_entropy, "),
        ([{**TWO_SEEDS[0], "p_k": "one"}], [], "p_k must be numbers"),
        ([{**TWO_SEEDS[0], "seed": "x"}], [], "seed must be a whole number, got 'x'"),
        ([{**TWO_SEEDS[0], "n_epochs": "many"}], [], "n_epochs must be a whole number, got 'many'"),
        ([{"method": "softsort"}], [], "no column p_k"),
        ([], [], "there is no file"),
        (
            TWO_SEEDS[:3],
            ["--paired", "softsort"],
            "--paired softsort: table1 has no such row in one experiment; it has softmax_cross",
        ),
        ([*TWO_SEEDS, TWO_SEEDS[0]], ["--paired", "neuralsort"], "has seed 0 of softmax_cross_entropy twice in one"),
        (TWO_SEEDS, ["--paired", "neuralsort", "--format", "html"], "--paired is a table in Markdown"),
    ],
)
def test_bad_input_gets_a_sentence_and_status_2(made, rows, flags, said):
    status, text, error = made(rows, *flags)
    assert (status, text) == (2, "")
    assert said in error
    assert error.startswith("error: ")
    assert "Traceback" not in error


@pytest.mark.parametrize("script", [train_cifar100, finetune_imagenet, train_knn])
def test_what_makes_another_experiment_is_what_the_scripts_say(script):
    flags = vars(script.parse_arguments(["--method", "softsort"]))
    not_recorded = set(NOT_COLUMNS)
    row = dict.fromkeys([*flags, *script.IDENTITY, "embeddings"], "")
    identity = {name for name in identity_columns(row) if name not in not_recorded}
    expected = set(script.IDENTITY) - set(SEEDS) | {"embeddings"}
    assert identity == expected


def published(name):
    return list(csv.DictReader((PAPER / f"{name}.csv").open(newline="")))


PAPERS, RERUN = "Petersen et al. 2022, Table 1", "the reproduction report's own rerun"
KNN = ("method", "test_top1")
FACTS = [  # with the digits of the source, its last 0 too; those of Table 1 that the README shows, tests/docs holds
    (
        ("table1", ("source", "published_name", "p_k", "test_top1", "test_top5")),
        [
            (PAPERS, "Top-5 SoftSort", "0 0 0 0 1", "0.0101", "0.0509"),
            (RERUN, "Top-k SoftSort", FIVE, "0.6354", "0.8017"),
        ],
    ),
    (
        ("tables2_3_imagenet1k", ("published_name", "test_top1", "test_top5")),
        [("Smooth top-5 loss", "0.8515", "0.97540"), ("Top-k SinkhornSort", "0.8629", "0.97971")],
    ),
    (
        ("tables2_3_imagenet21k", ("published_name", "test_top1", "test_top5")),
        [("DiffSortNets", "0.4022", "0.7088"), ("Lap-Top-k", "0.4048", "0.7105")],
    ),
    (
        ("table5", ("published_name", "test_top5", "approximate")),
        [
            ("Noisy Student EfficientNet-L2, Top-k DiffSortNets", "0.9868", ""),
            *(("ViT-L/16", "", ""), ("Meta Pseudo Labels (EffNet-L2)", "0.988", "test_top5")),
        ],
    ),
    (("network_depths", ("n", "k", "network", "layers")), [("10450", "5", "best earlier selection network", "50")]),
    (("knn_mnist", KNN), [("neuralsort", "0.995"), ("softmax_cross_entropy", "0.994"), ("soft_topk", "0.994")]),
    (("knn_fashion_mnist", KNN), [("neuralsort", "0.935"), ("softmax_cross_entropy", "0.934")]),
    (("knn_cifar10", KNN), [("neuralsort", "0.907"), ("softmax_cross_entropy", "0.951"), ("soft_topk", "0.926")]),
]


@pytest.mark.parametrize(("place", "cells"), FACTS)
def test_the_published_values_are_those_of_the_facts(place, cells):
    table, columns = place
    assert set(cells) <= {tuple(row[column] for column in columns) for row in published(table)}


def test_unknown_values_are_empty_and_second_hand_ones_marked():
    counts = {"table1": 15, "tables2_3_imagenet1k": 10, "tables2_3_imagenet21k": 12, "table5": 18}
    assert {table: len(published(table)) for table in counts} == counts
    table4 = published("table4")
    assert len({row["p_k"] for row in table4}) == 6
    assert not any(row["test_top1"] or row["test_top5"] for row in table4)
    tables = {path.stem: published(path.stem) for path in [*PAPER.glob("table*.csv"), *PAPER.glob("knn*.csv")]}
    for table, rows in tables.items():
        assert all(row["source"] and row["read_in"] and row["table"] == table for row in rows)
    known = {table: [row for row in rows if row["test_top1"]] for table, rows in tables.items()}
    assert len(known["tables2_3_imagenet21k"]) == 2
    second_hand = {
        (table, row["published_name"]) for table, rows in known.items() for row in rows if row["second_hand"] == "true"
    }
    assert second_hand == {
        *(("table1", "Lap-Top-k"), ("tables2_3_imagenet21k", "DiffSortNets"), ("tables2_3_imagenet21k", "Lap-Top-k")),
        *(("knn_mnist", "SOFT top-k kNN"), ("knn_cifar10", "SOFT top-k kNN")),
    }


def test_figures_are_drawn_and_are_the_same_bytes_twice(made, tmp_path):
    settings = {**NEURALSORT, "p_k": "0.5 0 0 0 0.5"}
    rows = [*TWO_SEEDS, *(cifar_run(seed, 0.6 + seed / 100, 0.85, **settings) for seed in (0, 1))]
    for number, row in enumerate(rows[:-1]):
        (tmp_path / "runs" / str(number)).mkdir(parents=True)
        lines = [f"{epoch},{float(row['test_top1']) * epoch / 3},{0.1 * epoch}" for epoch in (1, 2, 3)]
        (tmp_path / "runs" / str(number) / "epochs.csv").write_text("\n".join(["epoch,test_top1,test_top5", *lines]))
    names = ["table1_accuracy_over_epochs", "table1_accuracy"]
    names += ["permutation_matrix", "times", "cost_over_size"]
    drawn = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        status, _, said = made(rows, "--figures", folder)
        assert status == 0
        assert "1 of 6 runs have no history" in said
        drawn.append({file.name: file.read_bytes() for file in folder.iterdir()})
    assert set(drawn[0]) == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    assert drawn[0] == drawn[1]
    for name in names:
        image = Image.open(tmp_path / "first" / f"{name}.png").convert("L")
        shades = image.histogram()
        assert min(image.size) >= 900
        assert sum(shades[:200]) > 0.005 * image.width * image.height  # ink
        assert shades[255] > 0.3 * image.width * image.height


@pytest.mark.parametrize(
    "content", [None, b"\xff\xfe", b'epoch,test_top1,test_top5\n1,"0.5\n', b"epoch,test_top1,test_top5\n1,x,0.5\n"]
)
def test_figures_whose_data_are_absent_or_damaged_are_left_out(made, tmp_path, drawn_quickly, content):
    file = tmp_path / "runs" / "0" / "epochs.csv"
    if content:
        file.parent.mkdir(parents=True)
        file.write_bytes(content)
        for name in ("losses", "training_step"):
            (tmp_path / f"{name}.csv").write_bytes(content)
    status, _, said = made(TWO_SEEDS[:2], "--figures", tmp_path / "figures")
    assert status == 0
    assert (f"left out: {file}, which cannot be read" in said) == bool(content)
    assert "left out: accuracy over epochs" in said
    assert "left out: times, of benchmarks/training_step.py and" in said
    assert {path.stem for path in (tmp_path / "figures").iterdir()} == {"table1_accuracy"}


def test_paired_differences_have_an_interval_and_say_how_many_seeds_would_settle_them(made):
    """Differences of 1 and 3 points: mean 2, standard deviation 1.414, and t(1) = 12.71 times 1 is the half width."""
    rows = [cifar_run(seed, 0.60, 0.85) for seed in (0, 1, 2)]
    # Validation prefers the first: what test says does not count.
    rows += [cifar_run(seed, 0.70, 0.85, lr="0.002", valid_top1="0.59") for seed in (0, 1)]
    network = {"inverse_temperature": "0.5", "distribution": "logistic_phi", "art_lambda": "0.5", "top1_mode": "smce"}
    for seed, top1 in ((0, 0.61), (1, 0.63), (3, 0.99)):  # seed 3 has no partner
        rows.append(cifar_run(seed, top1, 0.85, "splitter_selection", "0.2 0.2 0.2 0.2 0.2", **network))
    of_few_images = {"limit_train": "500", "train_images": "475"}  # of another experiment
    rows += [cifar_run(seed, 0.10, 0.30, **of_few_images) for seed in (0, 1)]
    status, text, _ = made(rows, "--paired", "softmax_cross_entropy")
    assert status == 0
    first, second = text.split("\n\ntable1: ")
    assert cells(first, "splitter_selection")[2] == "0.5"
    # 1.984 * 1.414 / sqrt(n) <= .3 from n = 88 on
    assert cells(first, "splitter_selection")[-5:] == ["+2.00 ± 12.71", "+0.00 ± 0.00", "3", "2", r"88 \| 2"]
    shown = [line.split("|")[1].strip() for line in first.splitlines() if line.startswith("| s")]
    assert shown == ["splitter_selection", "softmax_cross_entropy", "softmax_cross_entropy"]
    assert "+10.00 ± 0.00" in first
    assert "10.00 ± 0.00" in second
    assert "limit_train 500, train_images 475. Test" in second  # a caption says which experiment it is
