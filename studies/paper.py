"""The paper's tables, as lists of runs (Petersen et al. 2022). Each loss is a line that a reader may copy or grep."""

from studies.runs import CIFAR100, IMAGENET, IMAGENET_21K, SHORT, RunList, Study

TABLE1 = RunList(
    script=CIFAR100,
    results="results/table1.csv",
    losses=(
        "--method softmax_cross_entropy --p_k 1. 0. 0. 0. 0.",
        "--method smooth_hard_topk --inverse_temperature 1. --p_k 0. 0. 0. 0. 1.",
        "--method neuralsort --inverse_temperature 0.0625 --p_k 0. 0. 0. 0. 1.",
        "--method softsort --inverse_temperature 0.0625 --p_k 0. 0. 0. 0. 1.",
        "--method sinkhorn_sort --p_k 0. 0. 0. 0. 1.",
        "--method splitter_selection --distribution logistic_phi --inverse_temperature .5 --art_lambda .5 --p_k 0. 0. 0. 0. 1.",
        "--method neuralsort --inverse_temperature 0.0625 --p_k .2 .2 .2 .2 .2",
        "--method softsort --inverse_temperature 0.0625 --p_k .2 .2 .2 .2 .2",
        "--method sinkhorn_sort --p_k .2 .2 .2 .2 .2",
        "--method splitter_selection --distribution logistic_phi --inverse_temperature .5 --art_lambda .5 --p_k .2 .2 .2 .2 .2",
    ),
)
TABLE1_SHORT = TABLE1.but(
    results="results/table1_short.csv",
    seeds=(0, 1, 2),
    schedule=SHORT,
)

TABLE4 = RunList(
    script=CIFAR100,
    results="results/table4.csv",
    losses=(
        "--method softmax_cross_entropy --p_k 1. 0. 0. 0. 0.",
        "--method smooth_hard_topk --inverse_temperature 1. --p_k 1. 0. 0. 0. 0.",
        "--method smooth_hard_topk --inverse_temperature 1. --p_k 0. 0. 0. 0. 1.",
        "--method neuralsort --inverse_temperature 0.0625 --p_k 0. 0. 0. 0. 1.",
        "--method softsort --inverse_temperature 0.0625 --p_k 0. 0. 0. 0. 1.",
        "--method sinkhorn_sort --p_k 0. 0. 0. 0. 1.",
        "--method splitter_selection --distribution logistic_phi --inverse_temperature .5 --art_lambda .5 --p_k 0. 0. 0. 0. 1.",
        "--method neuralsort --inverse_temperature 0.0625 --p_k .5 0. 0. 0. .5",
        "--method softsort --inverse_temperature 0.0625 --p_k .5 0. 0. 0. .5",
        "--method sinkhorn_sort --p_k .5 0. 0. 0. .5",
        "--method splitter_selection --distribution logistic_phi --inverse_temperature .5 --art_lambda .5 --p_k .5 0. 0. 0. .5",
        "--method neuralsort --inverse_temperature 0.0625 --p_k .25 0. 0. 0. .75",
        "--method softsort --inverse_temperature 0.0625 --p_k .25 0. 0. 0. .75",
        "--method sinkhorn_sort --p_k .25 0. 0. 0. .75",
        "--method splitter_selection --distribution logistic_phi --inverse_temperature .5 --art_lambda .5 --p_k .25 0. 0. 0. .75",
        "--method neuralsort --inverse_temperature 0.0625 --p_k .1 0. 0. 0. .9",
        "--method softsort --inverse_temperature 0.0625 --p_k .1 0. 0. 0. .9",
        "--method sinkhorn_sort --p_k .1 0. 0. 0. .9",
        "--method splitter_selection --distribution logistic_phi --inverse_temperature .5 --art_lambda .5 --p_k .1 0. 0. 0. .9",
        "--method neuralsort --inverse_temperature 0.0625 --p_k .2 .2 .2 .2 .2",
        "--method softsort --inverse_temperature 0.0625 --p_k .2 .2 .2 .2 .2",
        "--method sinkhorn_sort --p_k .2 .2 .2 .2 .2",
        "--method splitter_selection --distribution logistic_phi --inverse_temperature .5 --art_lambda .5 --p_k .2 .2 .2 .2 .2",
    ),
)
TABLE4_SHORT = TABLE4.but(results="results/table4_short.csv", schedule=SHORT)

TABLES_2_3 = RunList(
    script=IMAGENET,
    results="results/table2_3_imagenet1k.csv",
    data="-d wsl-32x48d-320 --m 16 --nloglr 4.5",
    losses=(
        "--method softmax_cross_entropy --p_k 1. 0. 0. 0. 0.",
        "--method smooth_hard_topk --inverse_temperature 1. --p_k 0. 0. 0. 0. 1.",
        "--method neuralsort --inverse_temperature .5 --p_k 0. 0. 0. 0. 1.",
        "--method softsort --inverse_temperature .5 --p_k 0. 0. 0. 0. 1.",
        "--method sinkhorn_sort --p_k 0. 0. 0. 0. 1.",
        "--method splitter_selection --distribution logistic_phi --inverse_temperature 1. --art_lambda .5 --p_k 0. 0. 0. 0. 1.",
        "--method neuralsort --inverse_temperature .5 --p_k .5 0. 0. 0. .5",
        "--method softsort --inverse_temperature .5 --p_k .5 0. 0. 0. .5",
        "--method sinkhorn_sort --p_k .5 0. 0. 0. .5",
        "--method splitter_selection --distribution logistic_phi --inverse_temperature 1. --art_lambda .5 --p_k .5 0. 0. 0. .5",
    ),
)
TABLES_2_3_21K = TABLES_2_3.but(
    script=IMAGENET_21K,
    results="results/table2_3_imagenet21k.csv",
    data="-d wsl-32x48d-224-21k --m 50 --nloglr 4 --n_epochs 40",
)

TABLE5 = RunList(
    script=IMAGENET,
    results="results/table5.csv",
    data="--m 16 --nloglr 4.5",
    losses=(
        "-d wsl-32x48d-320 --method softmax_cross_entropy --p_k 1. 0. 0. 0. 0.",
        "-d wsl-32x48d-320 --method sinkhorn_sort --p_k .2 .2 .2 .2 .2",
        "-d wsl-32x48d-320 --method splitter_selection --distribution logistic_phi --inverse_temperature 1. --art_lambda .5 --p_k .2 .2 .2 .2 .2",
        "-d efficientnet-l2-800 --method softmax_cross_entropy --p_k 1. 0. 0. 0. 0.",
        "-d efficientnet-l2-800 --method sinkhorn_sort --p_k .25 0. 0. 0. .75",
        "-d efficientnet-l2-800 --method splitter_selection --distribution logistic --inverse_temperature .5 --p_k .25 0. 0. 0. .75",
    ),
)


LIMIT = "16 epochs with a cosine schedule, not the paper's 200: not to be compared with the published values."
TITLE1 = "Table 1: ResNet-18 from scratch on CIFAR-100"
TITLE4 = "Table 4: ResNet-18 from scratch on CIFAR-100, over six P_K"
TITLE5 = "Table 5: linear classifiers beside other models; the P_K of SinkhornSort is not published"


def table1(*, short: bool = False) -> Study:
    """Table 1: 20 runs of 200 epochs; short: 30 runs of 16."""
    if short:
        return Study("table1_short", f"{TITLE1}, in 16 epochs", (TABLE1_SHORT,), published="table1", limit=LIMIT)
    return Study("table1", TITLE1, (TABLE1,), published="table1")


def table4(*, short: bool = False) -> Study:
    """Table 4: 46 runs of 200 epochs; short: of 16."""
    if short:
        title = f"{TITLE4}, in 16 epochs"
        spread_of = "table1_short.csv"
        return Study("table4_short", title, (TABLE4_SHORT,), published="table4", limit=LIMIT, spread_of=spread_of)
    return Study("table4", TITLE4, (TABLE4,), published="table4")


def table2_3_imagenet1k() -> Study:
    """Tables 2 and 3, ImageNet-1K: linear classifiers on published embeddings (11 GB), 20 runs."""
    title = "Tables 2 and 3: linear classifiers on ImageNet-1K embeddings"
    return Study("table2_3_imagenet1k", title, (TABLES_2_3,), published="tables2_3_imagenet1k", run_per_core=False)


def table2_3_imagenet21k() -> Study:
    """Tables 2 and 3, ImageNet-21K-P: linear classifiers on published embeddings (50 GB), 20 runs."""
    title = "Tables 2 and 3: linear classifiers on ImageNet-21K-P embeddings"
    return Study(
        "table2_3_imagenet21k", title, (TABLES_2_3_21K,), published="tables2_3_imagenet21k", run_per_core=False
    )


def table5() -> Study:
    """Table 5: linear classifiers on embeddings of two networks (11 and 14 GB), 12 runs."""
    return Study("table5", TITLE5, (TABLE5,), published="table5", run_per_core=False)
