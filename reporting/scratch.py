"""ResNet-18 on few images, the study few_labels_scratch: each loss minus cross-entropy of the same schedule, by seed.

Few images validate, so that the best validation epoch depends on luck. Differences at the last epoch stand beside it.
"""

from pathlib import Path
from typing import NamedTuple

import pandas as pd

from experiments.common.settings import CROSS_ENTROPY
from reporting import markdown
from reporting.compare import Interval, interval, paired
from reporting.frames import METRICS, lines_of, read_runs
from studies.few_labels import SCRATCH, few_labels_scratch

SCHEDULES = {"": "constant", "cosine": "cosine"}  # by the cell
LAST = {f"last_{metric}": f"{label}, last epoch" for metric, label in METRICS.items()}
READINGS = METRICS | LAST


class Line(NamedTuple):
    """The runs of one loss with one schedule.

    Attributes:
        differences: to cross-entropy in points, a row per paired seed; none of cross-entropy itself.
    """

    schedule: str
    loss: str
    runs: pd.DataFrame
    differences: pd.DataFrame

    @property
    def method(self) -> str:
        return str(self.runs["method"].iloc[0])

    @property
    def is_complete(self) -> bool:
        """Whether all planned seeds are paired: a verdict on fewer would be an early look."""
        return len(self.differences) == len(SCRATCH.seeds)

    def gain(self, reading: str) -> Interval:
        return interval(self.differences[reading])


def name_of(runs: pd.DataFrame) -> str:
    """The name of a loss in the table."""
    method = str(runs["method"].iloc[0])
    smoothing = runs["label_smoothing"].iloc[0]
    if smoothing > 0:
        return f"{method}, label smoothing {smoothing:g}"
    return method


def lines(file: Path) -> list[Line]:
    """The runs of each loss by schedule, cross-entropy first; of a schedule without cross-entropy none."""
    runs = read_runs(file)
    found = []
    for cell, schedule in SCHEDULES.items():
        by_loss = {name_of(line): line for line in lines_of(runs[runs["lr_schedule"] == cell])}
        if CROSS_ENTROPY not in by_loss:
            continue
        baseline = by_loss.pop(CROSS_ENTROPY)
        found.append(Line(schedule, CROSS_ENTROPY, baseline, baseline.iloc[:0]))
        for loss, line in by_loss.items():
            found.append(Line(schedule, loss, line, paired(line, baseline, list(READINGS))))
    return found


def difference_cell(line: Line, reading: str) -> str:
    """A mean difference with its interval, and with a verdict once all seeds are there."""
    gain = line.gain(reading)
    text = markdown.interval(gain)
    if line.is_complete:
        text += f" ({gain.verdict})"
    return text


def scratch_answer(file: Path) -> str:
    """Markdown: the differences of each loss with each schedule, then the accuracies."""
    found = lines(file)
    differences = []
    accuracies = []
    for line in found:
        row = {"schedule": line.schedule, "loss": line.loss}
        if len(line.differences):
            cells = {f"Δ {label}": difference_cell(line, reading) for reading, label in READINGS.items()}
            differences.append(row | cells | {"pairs": str(len(line.differences))})
        means = {label: markdown.mean_std(line.runs[reading]) for reading, label in READINGS.items()}
        accuracies.append(row | means | {"seeds": str(len(line.runs))})
    first = found[0].runs.iloc[0]
    planned = len(few_labels_scratch().commands())
    done = sum(len(line.runs) for line in found)
    under_way = ""
    if done < planned:
        under_way = f" Under way: {done} of {planned} runs."
    above = (
        f"CIFAR-100, {first['model']} from scratch on {first['train_images']:g} images in {first['n_epochs']:g} "
        f"epochs; {first['valid_images']:g} others validate. Settings are those of other studies. Differences of test "
        "accuracy to cross-entropy with the same schedule in points, paired by seed, ± 95 % interval over seeds: at "
        "the best validation epoch, and at the last epoch. A verdict, and a point of the figure, wait for all "
        f"{len(SCRATCH.seeds)} seeds. The figure has the last epoch: filled at a constant rate, hollow with a cosine "
        f"schedule.{under_way}"
    )
    folded = markdown.details("Test accuracy in percent, ± standard deviation over seeds", markdown.table(accuracies))
    return f"{above}\n\n{markdown.table(differences)}\n\n{folded}"
