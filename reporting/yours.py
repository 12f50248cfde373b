"""What all reports of your runs share: how many values agree, which runs are copies, and where runs were computed."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from reporting.compare import Agreement
from reporting.frames import as_text, read_runs

VERDICTS = (
    "Mean ± standard deviation (seeds). Verdict: your mean minus the repository's, in points, ± half of a 95 % "
    "interval that takes one standard deviation for both; for one run of yours it is the prediction interval of a new "
    "run."
)
COPIES = "{count} of your runs stand in the repository, too, and are not compared with themselves."
WIDE = 5.0  # half of an interval, in points, beyond which agreement says little


def read_or_none(path: Path) -> pd.DataFrame:
    """The runs of a file; an empty frame if there is none."""
    if not path.is_file():
        return pd.DataFrame(columns=["method", "seed"])
    return read_runs(path)


def names_of(runs: pd.DataFrame) -> pd.Series:
    """What tells each run from its repetitions: its name and when it began."""
    cells = runs.reindex(columns=["run_id", "started_utc"])
    return as_text(cells["run_id"]) + " " + as_text(cells["started_utc"])


def copies_note(count: int) -> str:
    """The sentence about runs of yours that scripts/add_results.py has added; "" without any."""
    if count == 0:
        return ""
    return COPIES.format(count=count)


def summary(verdicts: Sequence[Agreement]) -> str:
    """How many values agree, and how many would differ by chance."""
    compared = [item for item in verdicts if item.verdict in ("agrees", "differs")]
    if not compared:
        return "This repository has no runs with the settings of yours."
    agreeing = [item for item in compared if item.verdict == "agrees"]
    by_chance = 0.05 * len(compared)
    text = f"{len(agreeing)} of {len(compared)} values agree; by chance about {by_chance:.1f} would differ."
    wide = [item for item in agreeing if item.difference.half > WIDE]
    if wide:
        text += (
            f" Agreement says little where the interval is wider than ± {WIDE:g} points: {len(wide)} of these values."
        )
    without = [item for item in verdicts if item.verdict == "no verdict"]
    if without:
        text += f" {len(without)} have no verdict: no spread is known."
    return text


def machines(whose: str, runs: pd.DataFrame) -> str:
    """Where runs were computed: "yours: 6 on AMD EPYC"."""
    if runs.empty or "device_name" not in runs:
        return f"{whose}: none"
    counts = runs["device_name"].value_counts()
    parts = [f"{count} on {device}" for device, count in counts.items()]
    return f"{whose}: {', '.join(parts)}"


def below_each_line(text: str, commands: Sequence[str]) -> str:
    """A Markdown table with a command below each of its lines."""
    header, rule, *rows = text.splitlines()
    lines = [header, rule]
    for row, command in zip(rows, commands):
        lines.append(row)
        if command:
            lines.append(f"    {command}")
    return "\n".join(lines)
