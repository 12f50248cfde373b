"""results/paper/*.csv and data/published.py against the published values, which are typed here a second time.

A value stands here as its source prints it, in percent. What is not known is a dash.
"""

import csv
from pathlib import Path

import pytest

from data.published import PUBLISHED, PUBLISHED_FILES, published_info

PAPER = Path(__file__).parents[2] / "results" / "paper"
TOP1 = "1 0 0 0 0"
TOP5 = "0 0 0 0 1"
EVEN = "0.2 0.2 0.2 0.2 0.2"
HALF = "0.5 0 0 0 0.5"
QUARTER = "0.25 0 0 0 0.75"
TENTH = "0.1 0 0 0 0.9"
ACCURACIES = ("published_name", "p_k", "test_top1", "test_top5")
# The loss of each row of Tables 1 to 5, by the last word of its name.
METHODS = {
    **{"CE": "softmax_cross_entropy", "Softmax": "softmax_cross_entropy", "softmax": "softmax_cross_entropy"},
    **{"loss": "smooth_hard_topk", "NeuralSort": "neuralsort", "SoftSort": "softsort"},
    **{"SinkhornSort": "sinkhorn_sort", "DiffSortNets": "splitter_selection"},
}

# Petersen et al. 2022, Table 1 (a reproduction report prints it), and the report's own rerun of the last four rows.
TABLE1 = f"""
Softmax CE        | {TOP1} | 61.27 | 85.31
Smooth top-k loss | {TOP5} | 53.07 | 85.23
Top-5 NeuralSort  | {TOP5} | 22.58 | 84.41
Top-5 SoftSort    | {TOP5} | 1.01  | 5.09
Top-5 SinkhornSort | {TOP5} | 55.62 | 87.04
Top-5 DiffSortNets | {TOP5} | 52.81 | 84.21
Top-k NeuralSort   | {EVEN} | 61.46 | 86.03
Top-k SoftSort     | {EVEN} | 61.53 | 82.39
Top-k SinkhornSort | {EVEN} | 61.89 | 86.94
Top-k DiffSortNets | {EVEN} | 62.00 | 86.73
Top-k NeuralSort   | {EVEN} | 59.42 | 83.03
Top-k SoftSort     | {EVEN} | 63.54 | 80.17
Top-k SinkhornSort | {EVEN} | 54.89 | 82.34
Top-k DiffSortNets | {EVEN} | 55.00 | 84.60
Lap-Top-k          | -      | 64.53 | 88.51
"""
# Petersen et al. 2022, Tables 2 and 3, ImageNet-1K (the authors' talk).
IMAGENET_1K = f"""
Softmax            | {TOP1} | 86.06 | 97.795
Smooth top-5 loss  | {TOP5} | 85.15 | 97.540
Top-5 NeuralSort   | {TOP5} | 33.37 | 94.748
Top-5 SoftSort     | {TOP5} | 18.23 | 94.965
Top-5 SinkhornSort | {TOP5} | 85.65 | 97.991
Top-5 DiffSortNets | {TOP5} | 69.05 | 97.389
Top-k NeuralSort   | {HALF} | 86.30 | 97.896
Top-k SoftSort     | {HALF} | 86.26 | 97.963
Top-k SinkhornSort | {HALF} | 86.29 | 97.971
Top-k DiffSortNets | {HALF} | 86.24 | 97.937
"""
# Petersen et al. 2022, Tables 2 and 3, ImageNet-21K-P: the rows of ImageNet-1K, whose values are not known, and two
# that a note about a paper has.
IMAGENET_21K = "".join(
    f"{line.rsplit('|', 2)[0]}| - | -\n" for line in IMAGENET_1K.strip().splitlines()
) + """
DiffSortNets | - | 40.22 | 70.88
Lap-Top-k    | - | 40.48 | 71.05
"""  # fmt: skip
# Petersen et al. 2022, Table 4: its rows; the values are not known.
TABLE4 = f"Softmax CE | {TOP1} | - | -\nSmooth top-k loss | {TOP1} | - | -\nSmooth top-k loss | {TOP5} | - | -\n"
for p_k in (TOP5, HALF, QUARTER, TENTH, EVEN):
    for name in ("NeuralSort", "SoftSort", "SinkhornSort", "DiffSortNets"):
        TABLE4 += f"{name} | {p_k} | - | -\n"
# Petersen et al. 2022, Table 5 (the authors' talk). ~: approximate in the source.
TABLE5 = f"""
ResNet50                          | - | 79.26 | 94.75
ResNet152                         | - | 80.62 | 95.51
ResNeXt-101 32x48d WSL            | - | 85.43 | 97.57
ViT-L/16                          | - | 87.76 | -
Noisy Student EfficientNet-L2     | - | 88.35 | 98.65
BiT-L                             | - | 87.54 | 98.46
CLIP (w/ Noisy Student EffNet-L2) | - | ~88.4 | -
ViT-H/14                          | - | 88.55 | -
ALIGN (EffNet-L2)                 | - | 88.64 | 98.67
Meta Pseudo Labels (EffNet-L2)    | - | 90.20 | ~98.8
ViT-G/14                          | - | 90.45 | -
CoAtNet-7                         | - | 90.88 | -
ResNeXt-101 32x48d WSL, softmax                   | {TOP1}    | 86.06 | 97.80
ResNeXt-101 32x48d WSL, Top-k SinkhornSort        | -         | 86.22 | 97.99
ResNeXt-101 32x48d WSL, Top-k DiffSortNets        | {EVEN}    | 86.21 | 98.00
Noisy Student EfficientNet-L2, softmax            | {TOP1}    | 88.33 | 98.65
Noisy Student EfficientNet-L2, Top-k SinkhornSort | -         | 88.32 | 98.66
Noisy Student EfficientNet-L2, Top-k DiffSortNets | {QUARTER} | 88.37 | 98.68
"""
# Grover et al. 2019, Table 5 (appendix), k = 9, and its convolutional networks; SOFT top-k: a note about its paper.
KNN_MNIST = """
CNN by cross-entropy | - | 99.4 | -
NeuralSort kNN       | - | 99.3 | -
SOFT top-k kNN       | - | 99.4 | -
"""
KNN_FASHION_MNIST = """
CNN by cross-entropy | - | 93.4 | -
NeuralSort kNN       | - | 93.0 | -
"""
KNN_CIFAR10 = """
CNN by cross-entropy | - | 95.1 | -
NeuralSort kNN       | - | 90.7 | -
SOFT top-k kNN       | - | 92.6 | -
"""
TABLES = {
    **{"table1": TABLE1, "table4": TABLE4, "table5": TABLE5},
    **{"tables2_3_imagenet1k": IMAGENET_1K, "tables2_3_imagenet21k": IMAGENET_21K},
    **{"knn_mnist": KNN_MNIST, "knn_fashion_mnist": KNN_FASHION_MNIST, "knn_cifar10": KNN_CIFAR10},
}
# The official code: inverse temperatures on CIFAR-100, on ImageNet, and of Table 5's EfficientNet-L2. The authors have
# removed sinkhorn_sort from their release.
BETAS = {"neuralsort": ("0.0625", "0.5"), "softsort": ("0.0625", "0.5"), "smooth_hard_topk": ("1", "1")}
BETAS |= {"splitter_selection": ("0.5", "1")}
EFFICIENTNET = ("0.5", "logistic", "none")
WORDS = {  # of network_depths.csv: n, k, network, layers, comparators
    # Petersen et al. 2022 (a reproduction report).
    **{"1024 5 splitter_selection": "22", "1024 5 best earlier selection network": "34", "1024 5 bitonic": "55"},
    **{"10450 5 splitter_selection": "27", "10450 5 best earlier selection network": "50", "10450 5 bitonic": "105"},
}
CONSTRUCTED = {  # by the constructions of difftopk 0.2.0
    **{"1000 5 splitter_selection": "22 5085", "1024 5 splitter_selection": "22 5273"},
    **{"10450 5 splitter_selection": "27 68085", "100 5 splitter_selection": "17 385", "100 5 bitonic": "28"},
    **{"100 10 splitter_selection": "27 528", "50 5 splitter_selection": "15 181", "50 5 bitonic": "21"},
    **{"16 5 splitter_selection": "10 50", "16 5 bitonic": "10"},
}
# The official scripts and README; kNN: the code of Grover et al. 2019. Columns with nothing are not of that study.
CIFAR = "dataset=cifar100 model=resnet18 num_classes=100 n_epochs=200 batch_size=128 lr=0.001 m=none top1_mode=smce"
HEADS = "eval_freq=100 hidden_dims=none apply_relu=false apply_dropout=false batch_size=500 top1_mode=sm"
IMAGENET = f"{HEADS} num_classes=1000 n_epochs=20 lr=3.16227766e-05 m=16 num_valid=50000"  # 10^-4.5
KNN = "num_classes=10 n_epochs=200 batch_size=100 weight_decay=0.0005 num_candidates=100 self_match=true"
PROTOCOLS = {
    **{"table1": f"{CIFAR} n_seeds=2", "table4": CIFAR, "tables2_3_imagenet1k": IMAGENET, "table5": IMAGENET},
    "tables2_3_imagenet21k": f"{HEADS} num_classes=10450 n_epochs=40 lr=0.0001 m=50 num_valid=100000",
    "knn_mnist": f"{KNN} dataset=mnist model=cnn",
    "knn_fashion_mnist": f"{KNN} dataset=fashion_mnist model=preact_resnet18",
    "knn_cifar10": f"{KNN} dataset=cifar10 model=preact_resnet18 augmented_neighbours=true",
}
# Published parameters that a source states, by method and parameter.
CIFAR_IMAGENET = "{} (CIFAR-100), {} (ImageNet)"
NETWORK = {
    "inverse_temperature": f"{CIFAR_IMAGENET.format('0.5', 1)}, 0.5 (EfficientNet-L2)",
    "distribution": "`logistic_phi`; `logistic` (EfficientNet-L2)",
    "art_lambda": "0.5",
}
PARAMETERS = {
    **{(method, name): cell for method in ("bitonic", "splitter_selection") for name, cell in NETWORK.items()},
    **{(name, "inverse_temperature"): CIFAR_IMAGENET.format("0.0625", "0.5") for name in ("neuralsort", "softsort")},
    **{("smooth_hard_topk", name): cell for name, cell in {"k": "5", "tau": "1", "alpha": "1"}.items()},
    ("smooth_topk", "tau"): "1; to tune over powers of ten",  # Berrada et al. 2018
    ("smooth_topk", "alpha"): "1",
    ("soft_topk", "inverse_temperature"): "10",  # Xie et al. 2020, code: epsilon 0.1
    ("lml", "inverse_temperature"): "1",  # Amos et al. 2019, scripts: tau 1
    ("sparse_topk", "inverse_temperature"): "10",  # Sander et al. 2023, code: l 0.1
    ("sparse_topk", "p"): "4/3",
    ("recall_surrogate", "inverse_temperature"): "100, for cosine similarities",  # Patel et al. 2022: tau 0.01
}
# The files of the authors' bucket, from their README: network, pixels, about how many GB.
BUCKET = "https://nyc3.digitaloceanspaces.com/publicdata1/"
WSL = "ImageNet_embeddings_labels_train_test_IGAM_Resnext101_{}_320.p"
FILES = {
    "wsl-32x48d-320": (WSL.format("32x48d"), "resnext101_32x48d_wsl", 320, 11),
    "wsl-32x32d-320": (WSL.format("32x32d"), "resnext101_32x32d_wsl", 320, 11),
    "wsl-32x16d-320": (WSL.format("32x16d"), "resnext101_32x16d_wsl", 320, 11),
    "wsl-32x8d-320": (WSL.format("32x8d"), "resnext101_32x8d_wsl", 320, 11),
    "efficientnet-l2-800": (
        "ImageNet_embeddings_labels_train_test_tf_efficientnet_l2_ns_timm_transform_800_float16.p",
        "tf_efficientnet_l2_ns",
        800,
        14,
    ),
    "wsl-32x48d-224-21k": (
        "ImageNet21K-P_embeddings_labels_train_test_IGAM_Resnext101_32x48d_224_float16.p",
        "resnext101_32x48d_wsl",
        224,
        50,
    ),
}


def rows_of(table: str) -> list[dict[str, str]]:
    with (PAPER / f"{table}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def percent(cell: str) -> str:
    """A fraction of the file as the source prints it: with as many digits, less two."""
    return f"{100 * float(cell):.{len(cell) - 4}f}" if cell else "-"


def test_every_file_of_published_values_is_typed_here_too():
    others = {"network_depths", "parameters", "protocols"}
    assert {path.stem for path in PAPER.glob("*.csv")} == {*TABLES, *others}


@pytest.mark.parametrize("table", TABLES)
def test_published_accuracies_are_those_of_the_source(table):
    typed = [[cell.strip() for cell in line.split("|")] for line in TABLES[table].splitlines() if line]
    approximate = ["test_top1" if row[2][0] == "~" else "test_top5" if row[3][0] == "~" else "" for row in typed]
    found = rows_of(table)
    shown = [
        [row["published_name"], row["p_k"] or "-", percent(row["test_top1"]), percent(row["test_top5"])]
        for row in found
    ]
    assert shown == [[cell.replace("~", "") for cell in row] for row in typed]
    assert [row["approximate"] for row in found] == approximate
    assert {row["table"] for row in found} == {table}
    assert all(row["source"] and row["read_in"] for row in found)


@pytest.mark.parametrize("table", [name for name in TABLES if name.startswith("table")])
def test_published_rows_have_the_settings_of_the_official_code(table):
    for row in rows_of(table):
        ours = row["second_hand"] == "false" and (table != "table5" or ", " in row["published_name"])
        method = METHODS[row["published_name"].split()[-1]] if ours else ""
        assert row["method"] == method, row
        betas = BETAS.get(method, ("", "")) if "rerun" not in row["source"] else ("", "")
        is_network = method == "splitter_selection" and betas[0] != ""
        settings = (betas[table not in ("table1", "table4")], *(("logistic_phi", "0.5") if is_network else ("", "")))
        if row["backbone"] == "tf_efficientnet_l2_ns" and is_network:
            settings = EFFICIENTNET
        assert (row["inverse_temperature"], row["distribution"], row["art_lambda"]) == settings, row
        network = ""
        pixels = ""
        if ours and table not in ("table1", "table4"):
            network, pixels = FILES["wsl-32x48d-224-21k" if table.endswith("21k") else "wsl-32x48d-320"][1:3]
        if row["published_name"].startswith("Noisy Student") and method:
            network, pixels = FILES["efficientnet-l2-800"][1:3]
        assert (row["backbone"], row["resolution"]) == (network, str(pixels)), row


def test_published_models_are_public_or_not_as_the_source_says():
    private = {"BiT-L", "CLIP (w/ Noisy Student EffNet-L2)", "ViT-H/14", "ALIGN (EffNet-L2)"}
    private |= {"Meta Pseudo Labels (EffNet-L2)", "ViT-G/14", "CoAtNet-7"}
    found = {row["published_name"]: row["public"] for row in rows_of("table5") if not row["method"]}
    assert {name for name, public in found.items() if public == "false"} == private
    assert {name for name, public in found.items() if public == "true"} == set(found) - private


@pytest.mark.parametrize("table", [name for name in TABLES if name.startswith("knn")])
def test_published_nearest_neighbours_have_the_protocol_of_their_code(table):
    for row in rows_of(table):
        name = row["published_name"]
        by = ("second_hand", "method", "prediction", "loss", "k", "n_epochs")
        epochs = "150" if table == "knn_cifar10" else "50"
        expected = {
            "CNN by cross-entropy": ("false", "softmax_cross_entropy", "network", "", "", epochs),
            "NeuralSort kNN": ("false", "neuralsort", "neighbours", "mass", "9", ""),
            "SOFT top-k kNN": ("true", "soft_topk", "neighbours", "mass", "", ""),
        }
        assert tuple(row[column] for column in by) == expected[name]


def test_published_protocols():
    found = {row["table"]: row for row in rows_of("protocols")}
    assert set(found) == set(PROTOCOLS) == set(TABLES)
    for table, settings in PROTOCOLS.items():
        stated = {name: cell for name, cell in found[table].items() if cell}
        assert stated.pop("title")
        assert stated.pop("source")
        stated.pop("table")
        assert stated == dict(setting.split("=") for setting in settings.split()), table


def test_published_sizes_of_networks():
    found: dict[str, dict[str, str]] = {"Petersen et al. 2022": {}, "computed with the official construction": {}}
    for row in rows_of("network_depths"):
        name = f"{row['n']} {row['k']} {row['network']}"
        found[row["source"]][name] = f"{row['layers']} {row['comparators']}".strip()
    assert list(found.values()) == [WORDS, CONSTRUCTED]


def test_published_parameters():
    found = {(row["method"], row["parameter"]): row["published"] for row in rows_of("parameters")}
    assert {key: found[key] for key in PARAMETERS} == PARAMETERS


def test_published_files_of_embeddings():
    assert PUBLISHED == BUCKET
    assert PUBLISHED_FILES == FILES
    for name, (file, network, pixels, _) in FILES.items():
        for source in (name, f"folder/{file}"):
            assert published_info(source) == {"backbone": network, "resolution": pixels}
