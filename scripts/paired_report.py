"""Tables of results/beam_search.csv: error rates per arm, each arm's difference to the control, accuracy by position.

    python scripts/paired_report.py results/beam_search.csv
    python scripts/paired_report.py results/beam_search.csv --figures docs/figures   # a soft beam, PNG and SVG

Error rates in percent, mean ± sample standard deviation over the seeds. A difference is paired: of a seed, arm minus
control (--arm cross_entropy), which have the same pretrained weights, batches and number of updates; its interval is
Student's t over the seeds, 95 %. It says how far the seeds agree, not how far other test words would. Where it holds 0,
the arm cannot be told from the control. The figure needs the checkpoints in runs/ beside the file.
"""

if __name__ == "__main__":
    from data import program

    program.begin()

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from scipy import stats

from data import program
from data.program import CommandLineError
from scripts.reporting.plain_report import Row, markdown, mean_std, rows_of, run
from topk_losses import METHODS

CONTROL = "cross_entropy"
# What makes a line of the tables; in whatever else is neither that, nor measured, nor of the machine, all rows agree.
OF_AN_ARM = (
    *("arm", "method", "p_k", "m", "inverse_temperature", "distribution", "art_lambda", "top1_mode", "nll_weight"),
)
OF_A_RUN = ("seed", "device", "threads", "eval_freq")
RATES = {
    **{f"test_wer_beam{K}": f"WER, beam {K}" for K in (1, 4, 8)},
    **{f"test_per_beam{K}": f"PER, beam {K}" for K in (1, 4, 8)},
    **{f"test_gold_beam{K}": f"gold in beam {K}" for K in (4, 8)},
}
CONFIDENCE = 0.95


def arms_of(path: Path) -> dict[str, dict[str, Row]]:
    """Return the rows by arm (its name as shown, the control first) and seed. Raises CommandLineError, RecordError."""
    rows = rows_of(path, "experiments/train_beam_search.py", "arm", (*OF_AN_ARM, *OF_A_RUN))
    order = [CONTROL, "retain", "soft_beam"]
    rows.sort(key=lambda row: (order.index(row["arm"]), list(METHODS).index(row["method"]), int(row["seed"])))
    arms: dict[str, dict[str, Row]] = {}
    for row in rows:
        arms.setdefault(shown_arm(row), {})[row["seed"]] = row
    if sum(map(len, arms.values())) < len(rows):
        raise CommandLineError(f"{path} has rows of one arm and seed that differ in a setting which is not shown")
    return arms


def shown_arm(row: Row) -> str:
    """The arm in words: "soft beam, softsort, β 1"."""
    if row["arm"] == CONTROL:
        return "cross-entropy"
    return f"{row['arm'].replace('_', ' ')}, {row['method']}, β {float(row['inverse_temperature']):g}"


def paired_difference(
    arm: Mapping[str, Row], control: Mapping[str, Row], column: str
) -> tuple[float, float, int] | None:
    """Mean of arm - control over the seeds of both, half the width of its interval, and how many; None below 2."""
    differences = [float(row[column]) - float(control[seed][column]) for seed, row in arm.items() if seed in control]
    if len(differences) < 2:
        return None
    error = statistics.stdev(differences) / len(differences) ** 0.5
    quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(differences) - 1))
    return statistics.fmean(differences), quantile * error, len(differences)


def tables(path: Path) -> str:
    """Return the three tables as Markdown. Raises CommandLineError, RecordError."""
    arms = arms_of(path)
    first = next(iter(next(iter(arms.values())).values()))
    rates = {column: told for column, told in RATES.items() if first.get(column)}
    parts = [
        f"{path.name}: {first['dataset']}, {first['train_words']} training and {first['test_words']} test words of up "
        f"to {first['max_letters']} letters; {first['pretrain_updates']} updates of pretraining, then "
        f"{first['n_updates']} of each arm, {first['batch_size']} words each; training beam of {first['beam_size']}, "
        f"hidden size {first['hidden_dim']}. WER, PER: word and phoneme error rate in percent, any reading counts."
    ]
    by_arm = {arm: list(runs.values()) for arm, runs in arms.items()}
    cells = [[mean_std([100 * float(row[column]) for row in rows]) for column in rates] for rows in by_arm.values()]
    seeds = [str(len(rows)) for rows in by_arm.values()]
    parts.append(markdown(["arm", *rates.values(), "seeds"], [[*row] for row in zip(arms, *zip(*cells), seeds)]))

    control = arms.get("cross-entropy", {})
    lines = []
    for arm, runs in arms.items():
        pairs = {column: paired_difference(runs, control, column) for column in rates}
        if runs is not control and any(pairs.values()):
            lines.append([arm, *(_signed(pair) for pair in pairs.values()), str(next(iter(pairs.values()))[2])])
    if lines:
        parts.append(f"Arm minus control, in points, paired by seed, with its {CONFIDENCE:.0%} interval (t):")
        parts.append(markdown(["arm", *rates.values(), "pairs"], lines))
    else:
        parts.append("No difference: no arm has two seeds that the control has too.")

    parts.append(
        "Right phonemes in percent by position (the end is one), after the right ones / after the model's own:"
    )
    lines = []
    for arm, rows in by_arm.items():
        forced, free = (_mean_by_position(rows, f"test_{kind}_accuracy") for kind in ("forced", "free"))
        lines.append([arm, *(f"{100 * one:.1f} / {100 * other:.1f}" for one, other in zip(forced, free))])
    longest = int(first["max_letters"])  # behind it few words are left
    heads = [str(position) for position in range(1, len(lines[0]))][:longest]
    parts.append(markdown(["arm", *heads], [line[: longest + 1] for line in lines]))
    return "\n\n".join(parts) + "\n"


def _signed(pair: tuple[float, float, int] | None) -> str:
    return "—" if pair is None else f"{100 * pair[0]:+.2f} ± {100 * pair[1]:.2f}".replace("-", "−")


def _mean_by_position(rows: Sequence[Row], column: str) -> list[float]:
    return [statistics.fmean(each) for each in zip(*([float(cell) for cell in row[column].split()] for row in rows))]


def draw(path: Path, folder: Path) -> list[Path]:
    """Draw the soft beam of the file's first soft-beam row and return the paths."""
    from scripts.reporting.beam_figure import draw_soft_beam  # matplotlib takes a second, and a table needs none

    return draw_soft_beam(path, folder)


def main(argv: list[str] | None = None) -> int:
    """Run the script; return its exit status (see data/program.py)."""
    return run(argv, "Tables of the arms of train_beam_search.py.", "experiments/train_beam_search.py", tables, draw)


if __name__ == "__main__":
    program.end(main())
