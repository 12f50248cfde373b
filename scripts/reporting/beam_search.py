"""Tables of results/beam_search.csv: error rates per arm, each arm's difference to the control, accuracy by position.

Error rates in percent, mean ± sample standard deviation over the seeds. A difference is paired: of a seed, arm minus
control (--arm cross_entropy), which have the same pretrained weights, batches and number of updates; its interval is
Student's t over the seeds, 95 %. It says how far the seeds agree, not how far other test words would. Where it holds 0,
the arm cannot be told from the control. The figure needs the checkpoints in runs/ beside the file.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from scripts.reporting.paired import CONFIDENCE, with_interval
from scripts.reporting.results import ARMS, Row, as_markdown, check, check_alike, float_of, mean_std
from scripts.shared.program import CommandLineError
from topk_losses import METHODS

CONTROL = "cross-entropy"
NEEDED = (
    *("arm", "method", "seed", "dataset", "train_words", "test_words", "max_letters", "pretrain_updates", "n_updates"),
    *("batch_size", "beam_size", "hidden_dim", "test_forced_accuracy", "test_free_accuracy"),
)
# What makes a line of the tables; in whatever else is neither that, nor measured, nor of the machine, all rows agree.
APART = (
    *("arm", "method", "p_k", "m", "inverse_temperature", "distribution", "art_lambda", "top1_mode", "nll_weight"),
    *("seed", "device", "threads", "eval_freq"),
)
RATES = {
    **{f"test_wer_beam{K}": f"WER, beam {K}" for K in (1, 4, 8)},
    **{f"test_per_beam{K}": f"PER, beam {K}" for K in (1, 4, 8)},
    **{f"test_gold_beam{K}": f"gold in beam {K}" for K in (4, 8)},
}


def ordered(path: Path, rows: Sequence[Row]) -> list[Row]:
    """Return the rows of a file, the control's first. Raises CommandLineError."""
    check_alike(path, rows, NEEDED, APART, ("inverse_temperature",))
    if len({len(row[f"test_{kind}_accuracy"].split()) for row in rows for kind in ("forced", "free")}) > 1:
        raise CommandLineError(f"{path} has test_forced_accuracy or test_free_accuracy of another number of positions")
    return sorted(rows, key=lambda row: (ARMS.index(row["arm"]), list(METHODS).index(row["method"]), int(row["seed"])))


def shown_arm(row: Row) -> str:
    """The arm in words: "soft beam, softsort, β 1"."""
    if row["arm"] == "cross_entropy":
        return CONTROL
    beta = float_of(cell := row["inverse_temperature"])
    return f"{row['arm'].replace('_', ' ')}, {row['method']}, β {cell if beta is None else f'{beta:g}'}"


def text_of(path: Path, rows: Sequence[Row]) -> str:
    """Return the three tables of a file's rows as Markdown. Raises CommandLineError."""
    rows = ordered(path, rows)
    first, rates = rows[0], [column for column in RATES if any(row.get(column) for row in rows)]
    check(path, rows, rates)  # what one row has, all have
    runs = pd.DataFrame(rows).assign(arm=[shown_arm(row) for row in rows]).set_index(["arm", "seed"])
    if runs.index.has_duplicates:
        raise CommandLineError(f"{path} has rows of one arm and seed that differ in a setting which is not shown")
    values = (100 * runs[rates].astype(float)).rename(columns=RATES)
    parts = [
        f"{path.name}: {first['dataset']}, {first['train_words']} training and {first['test_words']} test words of up "
        f"to {first['max_letters']} letters; {first['pretrain_updates']} updates of pretraining, then "
        f"{first['n_updates']} of each arm, {first['batch_size']} words each; training beam of {first['beam_size']}, "
        f"hidden size {first['hidden_dim']}. WER, PER: word and phoneme error rate in percent, any reading counts.",
        by_arm(values, lambda cells: mean_std(cells.tolist()), "seeds"),
    ]
    paired = values[:0]
    if CONTROL in values.index:  # of the seeds that both have
        paired = values.drop(index=CONTROL, level="arm").sub(values.loc[CONTROL], level="seed").dropna()
        paired = paired.groupby("arm", sort=False).filter(lambda pairs: len(pairs) > 1)
    if len(paired):
        parts.append(f"Arm minus control, in points, paired by seed, with its {CONFIDENCE:.0%} interval (t):")
        parts.append(by_arm(paired, with_interval, "pairs"))
    else:
        parts.append("No difference: no arm has two seeds that the control has too.")
    parts.append(
        "Right phonemes in percent by position (the end is one), after the right ones / after the model's own:"
    )
    forced, free = (
        100 * runs[f"test_{kind}_accuracy"].str.split(expand=True).astype(float).groupby("arm", sort=False).mean()
        for kind in ("forced", "free")
    )
    both = forced.map("{:.1f}".format) + " / " + free.map("{:.1f}".format)
    both = both.iloc[:, : int(first["max_letters"])].rename(columns=lambda place: str(place + 1))
    parts.append(as_markdown(both.reset_index()))  # behind the longest word few words are left
    return "\n\n".join(parts) + "\n"


def by_arm(values: pd.DataFrame, shown: Callable[[pd.Series], str], counted: str) -> str:
    """Return a table with a line for each arm, and the number of its rows under `counted`."""
    groups = values.groupby("arm", sort=False)
    return as_markdown(groups.agg(shown).assign(**{counted: groups.size().astype(str)}).reset_index())


def draw(path: Path, rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw the soft beam of the first soft-beam row and return the paths."""
    from scripts.reporting.beam_figure import draw_soft_beam  # matplotlib takes a second, and a table needs none

    return draw_soft_beam(path, ordered(path, rows), folder)
