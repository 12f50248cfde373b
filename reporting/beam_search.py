"""Tables of training through beam search: error rates of each arm, and each arm minus the control by seed."""

from typing import NamedTuple

import pandas as pd

from reporting import markdown
from reporting.compare import interval, paired
from reporting.frames import experiment, identity_of, lines_of
from reporting.tables import library_order

ERROR_RATES = {
    "test_wer_beam1": "WER beam 1",
    "test_wer_beam4": "WER beam 4",
    "test_wer_beam8": "WER beam 8",
    "test_per_beam1": "PER beam 1",
    "test_per_beam4": "PER beam 4",
    "test_per_beam8": "PER beam 8",
    "test_gold_beam4": "gold in beam 4",
    "test_gold_beam8": "gold in beam 8",
}
CONTROL = "cross_entropy"
ARMS = (CONTROL, "retain", "soft_beam")


def place(line: pd.DataFrame) -> tuple[int, int]:
    """The place of an arm in the table."""
    arm = line["arm"].iloc[0]
    number = len(ARMS)
    if arm in ARMS:
        number = ARMS.index(arm)
    return number, library_order(line["method"].iloc[0])


class Arm(NamedTuple):
    """The runs of an arm, its name and its settings in the tables."""

    runs: pd.DataFrame
    title: str
    settings: dict[str, str]


def arms_of(lines: list[pd.DataFrame]) -> tuple[list[Arm], markdown.Shared]:
    """The arms, and the settings that all share."""
    firsts = pd.DataFrame([line.iloc[0] for line in lines]).reset_index(drop=True)
    names, shared = markdown.settings_of(firsts, identity_of(firsts, ["method", "p_k"]))
    names = [name for name in names if name != "arm"]
    arms = []
    for line in lines:
        first = line.iloc[0]
        title = f"{first['arm']}, {first['method']}"
        if title == "cross_entropy, softmax_cross_entropy":
            title = CONTROL
        settings = {}
        for name in names:
            settings[markdown.heading(name)] = markdown.setting(name, first[name])
        arms.append(Arm(line, title, settings))
    return arms, shared


def lines_in_percent(runs: pd.DataFrame) -> tuple[list[pd.DataFrame], list[str]]:
    """The runs of each arm, the control first, with rates in percent; and the rates that there are."""
    rates = [rate for rate in ERROR_RATES if rate in runs and runs[rate].notna().any()]
    runs = runs.assign(**{rate: 100 * runs[rate] for rate in rates})
    return sorted(lines_of(runs), key=place), rates


def minus_control(lines: list[pd.DataFrame], rates: list[str]) -> list[pd.DataFrame]:
    """The rates of each arm minus its control's, a row per seed that both have; none for the control itself."""
    controls = {experiment(line): line for line in lines if line["arm"].iloc[0] == CONTROL}
    found = []
    for line in lines:
        control = controls.get(experiment(line), line)
        differences = line.iloc[:0]
        if control is not line:
            differences = paired(line, control, rates)
        found.append(differences)
    return found


def as_markdown(name: str, runs: pd.DataFrame) -> str:
    """The mean error rates of each arm, and their differences to the control."""
    lines, rates = lines_in_percent(runs)
    arms, shared = arms_of(lines)
    means = []
    gains = []
    for arm, differences in zip(arms, minus_control(lines, rates)):
        row = {"arm": arm.title}
        gain = {"arm": arm.title}
        for rate in rates:
            row[ERROR_RATES[rate]] = markdown.mean_std(arm.runs[rate])
            gain[ERROR_RATES[rate]] = markdown.interval(interval(differences[rate]))
        means.append({**row, "seeds": str(len(arm.runs)), **arm.settings})
        gains.append({**gain, "pairs": str(len(differences)), **arm.settings})
    mean_cells = markdown.without_empty_columns(pd.DataFrame(means))
    gain_cells = markdown.without_empty_columns(pd.DataFrame(gains))
    return (
        "WER, PER: word and phoneme error rate.\n\n"
        f"In percent, mean ± sample standard deviation over the seeds:\n\n{markdown.table(mean_cells)}\n\n"
        f"In percent, minus the control (cross_entropy) by seed:\n\n{markdown.table(gain_cells)}\n\n"
        f"{markdown.origin(name, runs, shared)}\n"
    )
