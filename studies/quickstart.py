"""A first look: four losses on scikit-learn's digits, three epochs, two minutes on a CPU, no download."""

from studies.runs import CIFAR100, RunList, Study

QUICKSTART = RunList(
    script=CIFAR100,
    results="results/quickstart.csv",
    seeds=(0,),
    data="--dataset digits --n_epochs 3 --batch_size 32",
    losses=(
        "--method softmax_cross_entropy",
        "--method splitter_selection --p_k .5 0 .5",
        "--method neuralsort --p_k .5 0 .5",
        "--method soft_topk --p_k .5 0 .5",
    ),
)
TITLE = "Quickstart: a small ResNet-18 on scikit-learn's digits, three epochs"
LIMIT = "Three epochs on small digits compare no losses; they show that this machine computes what others did."


def quickstart() -> Study:
    """Four losses on scikit-learn's digits, three epochs."""
    return Study("quickstart", TITLE, (QUICKSTART,), limit=LIMIT)
