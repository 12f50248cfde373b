"""The nearest-neighbour classifier with each relaxation, three seeds."""

import shlex
from collections.abc import Sequence

from studies.runs import DATASETS, NEIGHBOURS, RunList, Study
from topk_losses import RELAXATIONS

PUBLISHED = ("mnist", "fashion_mnist", "cifar10")
WITHOUT_RELAXATION = (
    "--method inputs",
    "--method pca",
    "--method softmax_cross_entropy",
    "--method softmax_cross_entropy --prediction network",
)
SHORT_LOSSES = (
    "--method inputs",
    "--method pca",
    "--method softmax_cross_entropy --prediction network --lr .01",
    "--method neuralsort",
    "--method soft_topk",
)


def knn(*sources: str, short: bool = False) -> Study:
    """Every relaxation and both losses; sources: data sets or files of embeddings.

    short: the published arms and the baselines without training, 3 epochs instead of 200, bf16.
    """
    losses = list(WITHOUT_RELAXATION)
    for loss in ("mass", "log_mass"):
        for method in (*RELAXATIONS, "soft_topk --sorted"):
            losses.append(f"--method {method} --loss {loss}")
    schedule = ""
    name = "knn"
    if short:
        losses = SHORT_LOSSES
        schedule = "--n_epochs 3 --precision bf16"
        name = "knn_short"
    lists = tuple(runs_on(source, losses, schedule) for source in sources or PUBLISHED)
    return Study(name, "Nearest neighbours", lists, published=published_table(sources or PUBLISHED))


def runs_on(source: str, losses: Sequence[str], schedule: str) -> RunList:
    data = f"--data_path {shlex.quote(source)}"
    if source in DATASETS:
        data = f"--dataset {source}"
    return RunList(NEIGHBOURS, "results/knn.csv", tuple(losses), (0, 1, 2), data, schedule)


def published_table(sources: Sequence[str]) -> str:
    """The table of results/paper/ of one data set; "" for several, or where none is published."""
    if len(sources) == 1 and sources[0] in PUBLISHED:
        return f"knn_{sources[0]}"
    return ""
