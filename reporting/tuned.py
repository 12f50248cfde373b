"""Reports of studies with trials and finals: yours beside the repository's, or your losses minus cross-entropy."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from experiments.common.settings import CROSS_ENTROPY
from reporting import draws, markdown, origins
from reporting.compare import Agreement, Pool, agreement, interval, paired, pooled_spread, spread
from reporting.frames import METRICS, as_text
from reporting.tables import pool_for
from reporting.yours import VERDICTS, below_each_line, copies_note, machines, names_of, read_or_none, summary
from studies.runs import parse_flags
from studies.tuning import Candidate, Known, Trial, Tuned

OTHER_DATA = (
    "Mean ± standard deviation (seeds). Your {what} are {yours}, the repository's {repository}: there is no verdict on "
    "runs of other data."
)
# What names data by their content.
CONTENTS = {"embeddings": "embeddings", "noise_groups": "wrong labels", "noise_matrix_id": "matrices T"}
GAINS = (
    "Δ: difference of test accuracy to cross-entropy in points, ± 95 % interval over paired seeds; it leaves out the "
    "choice of settings, the split and the test images. Low, high: the choice lies at an edge of what was tried, and a "
    "better one may lie beyond it. Pairs: seeds of both sides, where one lacks some."
)
DELTAS = [f"Δ {label}" for label in METRICS.values()]
GAIN_COLUMNS = ["loss", *DELTAS, "pairs", *METRICS.values(), "seeds", "trials", "choice"]


class Chosen(NamedTuple):
    """What validation chose of a candidate, and the final runs of it. lacking: why nothing is chosen."""

    trial: Trial | None
    runs: pd.DataFrame
    lacking: str = ""


class Side:
    """The trials and finals of a tuned study in one folder.

    Attributes:
        rows: of its trials and finals, as cells.
        copies: names, as of `names_of`, of the runs that are the other side's, and are not compared.
    """

    def __init__(self, study: Tuned, folder: Path) -> None:
        self.study = study
        self.trials = study.known(folder / study.trials_file.name)
        finals = folder / study.finals.commands.results.name
        self.finals = Known(finals, study.finals.commands.flags, study.embeddings)
        runs = read_or_none(finals)
        if study.embeddings and "embeddings" in runs:
            runs = runs[runs["embeddings"] == study.embeddings].reset_index(drop=True)
        self.runs = runs
        self.rows = pd.DataFrame([*self.trials.rows, *self.finals.rows])
        self.names = set(names_of(self.rows))
        self.copies: set[str] = set()

    def chosen(self, candidate: Candidate, split: str) -> Chosen:
        trial = self.study.chosen(candidate, self.trials, split)
        if trial is None:
            return Chosen(None, self.runs.iloc[:0], self.study.lacking(candidate, self.trials))
        runs = self.compared(self.runs.iloc[self.finals.numbers(trial)])
        is_final = runs["seed"].isin(self.study.finals.commands.seeds)  # trials may stand in the same file
        return Chosen(trial, runs[is_final])

    def contents(self, column: str) -> set[str]:
        """The names of data in a column of its rows."""
        return set(as_text(self.rows.reindex(columns=[column])[column])) - {""}

    def compared(self, runs: pd.DataFrame) -> pd.DataFrame:
        """Those of some runs that are not the other side's, too."""
        return runs[~names_of(runs).isin(self.copies)]


def values(chosen: Chosen, metric: str) -> pd.Series:
    if metric not in chosen.runs:
        return pd.Series(dtype=float)
    return chosen.runs[metric]


def flags_of(candidate: Candidate, chosen: Chosen) -> str:
    """The settings that were chosen, without those of all trials; or why none are."""
    if chosen.trial is None:
        return chosen.lacking
    own = chosen.trial.flags.removeprefix(candidate.flags).strip()
    return f"{own} --n_epochs {chosen.trial.n_epochs}".strip()


def split_of(study: Tuned, choice: str) -> str:
    """The split whose accuracy chooses: by these labels, where the study has them, or by its first."""
    return study.finals.choices.get(choice, next(iter(study.finals.choices.values())))


def title_of(study: Tuned, split: str) -> str:
    return f"{study.title}: finals of what validation chooses ({split.replace('_', ' ')} top-1 + top-5)."


def report_tuned(study: Tuned, ours: Side, theirs: Side, choice: str, with_commands: bool) -> str:
    """What validation chose of each loss, and the finals, the repository's and yours; then the trials."""
    split = split_of(study, choice)
    chosen = [ours.chosen(candidate, split) for candidate in study.space]
    pools = pools_of(chosen)
    same = origins.counterparts(theirs.rows, ours.rows)
    other_data = about_other_data(ours, theirs, same)
    lines = []
    verdicts: list[Agreement] = []
    commands = []
    for candidate, own in zip(study.space, chosen):
        your = theirs.chosen(candidate, split)
        found = {}
        if not other_data:
            found = {metric: agreement_of(your, own, metric, pool) for metric, pool in pools.items()}
        verdicts += found.values()
        lines.append(tuned_line(candidate, own, your, found))
        trials = [trial for trial in (your.trial, own.trial) if trial is not None]
        commands.append("\n    ".join(study.finals.commands.of(trials[:1])))
    text = markdown.table(markdown.without_empty_columns(pd.DataFrame(lines)))
    if with_commands:
        text = below_each_line(text, commands)
    parts = [f"{title_of(study, split)} {rules_of(study, ours, theirs)}".strip(), text]
    if other_data:
        parts.append(other_data)
    else:
        parts += [summary(verdicts), VERDICTS, origins.note(same, ours.rows)]
        parts.append(trials_that_agree(study, ours, theirs, pools))
    parts.append(copies_note(len(theirs.copies)))
    parts.append(f"Runs: {machines('repository', ours.runs)}; {machines('yours', theirs.compared(theirs.runs))}.")
    return "\n\n".join(filter(None, parts)) + "\n"


def about_other_data(ours: Side, theirs: Side, same: Mapping[str, str]) -> str:
    """The sentence about data of yours that the repository's runs do not have; "" without any.

    Args:
        same: the repository's embeddings by the names of yours that count as the same.
    """
    if not ours.trials.rows or not theirs.trials.rows:
        return ""
    for column, what in CONTENTS.items():
        known = ours.contents(column)
        yours = theirs.contents(column)
        if not {same.get(name, name) for name in yours} <= known:
            names = {"yours": ", ".join(sorted(yours)), "repository": ", ".join(sorted(known))}
            return OTHER_DATA.format(what=what, **names)
    return ""


def pools_of(chosen: Sequence[Chosen]) -> dict[str, Pool]:
    """The pooled spread of finals, by metric."""
    return {metric: pooled_spread([spread(values(own, metric)) for own in chosen]) for metric in METRICS}


def report_gains(study: Tuned, theirs: Side, choice: str, with_commands: bool) -> str:
    """The finals of a study that the repository does not have, each minus cross-entropy by seed."""
    split = split_of(study, choice)
    candidates = [item for item in study.space if study.tried(item, theirs.trials)]
    chosen = [theirs.chosen(item, split) for item in candidates]
    baseline = pd.DataFrame()
    for candidate, own in zip(candidates, chosen):
        if is_baseline(candidate):
            baseline = own.runs
    lines = []
    commands = []
    for candidate, own in zip(candidates, chosen):
        line = dict.fromkeys(GAIN_COLUMNS, "") | {"loss": candidate.title}
        if not is_baseline(candidate):
            line |= gain_cells(own.runs, baseline)
        for metric, label in METRICS.items():
            line[label] = markdown.mean_std(values(own, metric))
        line["seeds"] = str(len(own.runs))
        line["trials"] = str(len(study.trials_of(candidate, theirs.trials)))
        line["choice"] = choice_text(study, candidate, own)
        lines.append(line)
        trials = [] if own.trial is None else [own.trial]
        commands.append("\n    ".join(study.finals.commands.of(trials)))
    text = markdown.table(markdown.without_empty_columns(pd.DataFrame(lines)))
    if with_commands:
        text = below_each_line(text, commands)
    rule = study.rule_of(theirs.trials).text
    return f"{title_of(study, split)} {rule}\n\n{text}\n\n{GAINS}\n\nRuns: {machines('yours', theirs.runs)}.\n"


def choice_text(study: Tuned, candidate: Candidate, choice: Chosen) -> str:
    """The settings that were chosen, each with the edge at which it lies; or why none are."""
    trial = choice.trial
    if trial is None:
        return choice.lacking
    parts = []
    own = trial.loss.removeprefix(candidate.flags).strip()
    if own:
        parts.append(own)
    for place in draws.places(study, candidate, trial):
        edge = f" ({place.edge})" if place.edge else ""
        parts.append(f"{markdown.heading(place.setting)} {place.value}{edge}")
    return ", ".join(parts)


def is_baseline(candidate: Candidate) -> bool:
    """Whether a candidate is cross-entropy without another number of its own."""
    return parse_flags(candidate.flags).get("method") == CROSS_ENTROPY and not candidate.ranges


def gain_cells(runs: pd.DataFrame, baseline: pd.DataFrame) -> dict[str, str]:
    """The differences of runs to a baseline, paired by seed, and their number if runs lack a pair."""
    if runs.empty or baseline.empty:
        return {}
    differences = paired(runs, baseline, list(METRICS))
    cells = {f"Δ {label}": markdown.interval(interval(differences[metric])) for metric, label in METRICS.items()}
    if len(differences) < len(runs):
        cells["pairs"] = str(len(differences))
    return cells


def rules_of(study: Tuned, ours: Side, theirs: Side) -> str:
    """The rules of selection of both sides that have trials, once if they are the same."""
    texts = {}
    for name, side in (("The repository's runs", ours), ("Yours", theirs)):
        if side.trials.rows:
            texts[name] = study.rule_of(side.trials).text
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return " ".join(f"{name}: {text}" for name, text in texts.items())


def agreement_of(your: Chosen, own: Chosen, metric: str, pool: Pool) -> Agreement:
    return agreement(values(your, metric), values(own, metric), pool_for(values(own, metric), pool))


def tuned_line(candidate: Candidate, own: Chosen, your: Chosen, found: dict[str, Agreement]) -> dict[str, str]:
    """The cells of a candidate: what was chosen, and its finals."""
    line = {
        "loss": candidate.title,
        "repository's choice": flags_of(candidate, own),
        "your choice": flags_of(candidate, your),
    }
    if own.trial is not None and own.trial == your.trial:
        line["your choice"] = "the same trial"
    for metric, label in METRICS.items():
        line[f"{label} repository"] = markdown.mean_std_seeds(values(own, metric))
        line[f"{label} yours"] = markdown.mean_std_seeds(values(your, metric))
        if metric in found:
            line[f"{label} verdict"] = markdown.agreement(found[metric])
    return line


def trials_that_agree(study: Tuned, ours: Side, theirs: Side, pools: dict[str, Pool]) -> str:
    """How many of your trials agree with the repository's, by the spread of its finals."""
    verdicts = []
    count = 0
    is_copy = list(names_of(pd.DataFrame(theirs.trials.rows)).isin(theirs.copies))
    for candidate in study.space:
        for trial in study.trials_of(candidate, ours.trials):
            own = ours.trials.of(trial)
            your = [theirs.trials.rows[number] for number in theirs.trials.numbers(trial) if not is_copy[number]]
            if not own or not your:
                continue
            count += 1
            for metric, pool in pools.items():
                verdicts.append(agreement(accuracies(your, metric), accuracies(own, metric), pool))
    if count == 0:
        return "Trials: none in common."
    return f"Trials: {count} in common. By the spread of the finals, {summary(verdicts)}"


def accuracies(rows: Sequence[dict[str, str]], metric: str) -> pd.Series:
    """The percentages of rows of cells."""
    found = []
    for row in rows:
        value = math.nan
        if row.get(metric):
            value = 100 * float(row[metric])
        found.append(value)
    return pd.Series(found, dtype=float)
