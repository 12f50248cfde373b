"""Training through beam search on CMUdict: the control and three arms, five seeds."""

from studies.runs import BEAM_SEARCH, RunList, Study

LONG = RunList(
    script=BEAM_SEARCH,
    results="results/beam_search.csv",
    seeds=(0, 1, 2, 3, 4),
    losses=(
        "--arm cross_entropy --method softmax_cross_entropy",
        "--arm retain --method softsort",
        "--arm soft_beam --method softsort",
        "--arm soft_beam --method soft_topk",
    ),
)
SMALL = LONG.but(
    results="results/beam_search_short.csv", schedule="--hidden_dim 64 --pretrain_updates 1300 --n_updates 325"
)


def beam_search(*, short: bool = False) -> Study:
    """20 runs; short: a smaller network."""
    if short:
        return Study("beam_search_short", "Training through beam search, a smaller network", (SMALL,))
    return Study("beam_search", "Training through beam search", (LONG,))
