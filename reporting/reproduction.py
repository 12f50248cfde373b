"""The report of your runs: published values, this repository's and yours, with a verdict for each line."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from experiments.common.paths import REPOSITORY, RESULTS
from experiments.common.settings import CROSS_ENTROPY
from reporting import beam_search, draws, markdown, tables
from reporting.compare import Agreement, Pool, agreement, interval, paired, pooled_spread, spread
from reporting.frames import METRICS, are_of_beam_search, as_text, read_runs
from reporting.tables import Configuration, Line, Table, pool_for
from studies.catalog import study_of
from studies.runs import RunIndex, Study, command_of, expected_runs, parse_flags
from studies.tuning import Candidate, Known, Trial, Tuned

VERDICTS = (
    "Mean ± standard deviation (seeds). Verdict: your mean minus the repository's, in points, ± half of a 95 % "
    "interval that takes one standard deviation for both; for one run of yours it is the prediction interval of a new "
    "run."
)
OTHER_DATA = (
    "Mean ± standard deviation (seeds). Your embeddings are {yours}, the repository's {repository}: there is no "
    "verdict on runs of other data."
)
POOLED = (
    "Where the repository has fewer than ten seeds, the standard deviation is pooled over the lines of the table; a "
    "line that spreads more than the others (F test at 1 %, over all lines) keeps its own."
)
BORROWED = (
    "The repository has one seed of each line: the standard deviation is pooled over the lines of {file}, runs of the "
    "same data and schedule."
)
FROM_PUBLISHED = (
    "Yours − published: your mean minus the published value, in points, in lines with the published settings. How the "
    "published runs spread over seeds is not known, so there is no verdict. {interval}"
)
INTERVAL = (
    "± is half of the 95 % interval that holds if they spread as yours do, pooled over these lines: where it includes "
    "0, seeds alone can explain the difference."
)
GAINS = (
    "Δ: difference of test accuracy to cross-entropy in points, ± 95 % interval over paired seeds; it leaves out the "
    "choice of settings, the split and the test images. Low, high: the choice lies at an edge of what was tried, and a "
    "better one may lie beyond it."
)
WIDE = 5.0  # half of an interval, in points, beyond which agreement says little
MORE_SEEDS = "With a second seed of yours there is an interval that takes their spread from your runs."
COPIES = "{count} of your runs stand in the repository, too, and are not compared with themselves."
NO_SEEDS = "Nor is the number of their seeds, so there is no interval either."


def name_of(path: Path) -> str:
    """A results file's path within results/ or results/repository/, such as noise/human.csv."""
    path = path.resolve()
    for folder in (REPOSITORY, RESULTS):
        if path.is_relative_to(folder):
            return path.relative_to(folder).as_posix()
    return path.name


def is_yours(path: Path) -> bool:
    """Whether a file is one of your results that the repository, or a study, has too."""
    whole = path.resolve()
    if not whole.is_relative_to(RESULTS) or whole.is_relative_to(REPOSITORY) or path.stem.endswith("_epochs"):
        return False
    return (REPOSITORY / name_of(path)).is_file() or study_of_yours(path) is not None


def study_of_yours(path: Path) -> Study | Tuned | None:
    """The study of one of your files: with the options of your trials, or without any with the repository's."""
    name = name_of(path)
    return study_of(name, path.parent) or study_of(name, REPOSITORY)


def choices_of(path: Path) -> list[str]:
    """The validation labels that choose in the study of a file; none where a file has no such study."""
    study = study_of_yours(path)
    if not isinstance(study, Tuned):
        return []
    return list(study.finals.choices)


def read_or_none(path: Path) -> pd.DataFrame:
    """The runs of a file; an empty frame if there is none."""
    if not path.is_file():
        return pd.DataFrame(columns=["method", "seed"])
    return read_runs(path)


def report(path: Path, choice: str = "noisy", with_commands: bool = False, study: Study | Tuned | None = None) -> str:
    """The report of one of your files.

    Args:
        study: that the file is of, with its options and your embeddings (default: by the file's name and trials).
        choice: validation labels that choose, in the study of wrong labels.
        with_commands: show below each line the command that repeats it.

    Raises:
        FileNotFoundError: neither you nor the repository has such runs.
        ValueError: a file cannot be read.
    """
    name = name_of(path)
    study = study or study_of_yours(path)
    if isinstance(study, Tuned):
        ours = Side(replace(study, embeddings=""), REPOSITORY / Path(name).parent)
        theirs = Side(study, path.parent)
        theirs.copies = theirs.names & ours.names
        if ours.trials.rows or ours.finals.rows:
            return report_tuned(study, ours, theirs, choice, with_commands)
        return report_gains(study, theirs, choice, with_commands)
    repository = read_or_none(REPOSITORY / name)
    yours = read_or_none(path)
    if yours.empty and repository.empty:
        raise FileNotFoundError(f"there are no runs in {path} nor in {REPOSITORY / name}")
    return report_runs(name, repository, yours, study, with_commands)


def report_runs(
    name: str, repository: pd.DataFrame, yours: pd.DataFrame, study: Study | None, with_commands: bool
) -> str:
    """The report of runs that are listed before any has run."""
    is_copy = names_of(yours).isin(names_of(repository))
    yours = yours[~is_copy]
    metrics = error_rates_of(repository, yours)
    repository = in_percent(repository)
    yours = in_percent(yours)
    published = ""
    if study is not None:
        published = study.published
    similar = None
    if study is not None and study.spread_of:
        similar = read_or_none(REPOSITORY / study.spread_of)
    table = tables.beside_published(Path(name).stem, repository, yours, published, metrics, similar)
    commands = commands_of(table, study)
    table.lines = in_order(table.lines, commands)
    text = markdown.table(tables.cells(table))
    if with_commands:
        text = below_each_line(text, [command_of_line(line, commands) for line in table.lines])
    parts = [text]
    if study is not None:
        parts.insert(0, f"{study.title}.")
    if table.has_yours:
        parts += [summary(tables.verdicts(table)), f"{VERDICTS} {pooled_note(table, study)}".strip()]
    else:
        parts.append("You have no runs of this study.")
    parts += [from_published_note(table), table.published]
    if study is not None:
        parts.append(study.limit)
    parts.append(copies_note(is_copy.sum()))
    parts.append(f"Runs: {machines('repository', repository)}; {machines('yours', yours)}.")
    return "\n\n".join(filter(None, parts)) + "\n"


def names_of(runs: pd.DataFrame) -> pd.Series:
    """What tells each run from its repetitions: its name and when it began."""
    cells = runs.reindex(columns=["run_id", "started_utc"])
    return as_text(cells["run_id"]) + " " + as_text(cells["started_utc"])


def copies_note(count: int) -> str:
    """The sentence about runs of yours that scripts/add_results.py has added; "" without any."""
    if count == 0:
        return ""
    return COPIES.format(count=count)


def error_rates_of(*sides: pd.DataFrame) -> dict[str, str] | None:
    """The error rates of beam search and what tables call them, where a side has such runs; else None."""
    if any(are_of_beam_search(runs) for runs in sides):
        return beam_search.ERROR_RATES
    return None


def in_percent(runs: pd.DataFrame) -> pd.DataFrame:
    return runs.assign(**{rate: 100 * runs[rate] for rate in beam_search.ERROR_RATES if rate in runs})


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


def from_published_note(table: Table) -> str:
    """How to read the differences of your runs to the published values; "" where there is none."""
    found = []
    for line in table.lines:
        for numbers in line.numbers.values():
            if numbers.from_published is not None and not math.isnan(numbers.from_published.mean):
                found.append(numbers.from_published)
    if not found:
        return ""
    interval = NO_SEEDS
    if table.published_seeds:
        interval = MORE_SEEDS
    if any(not math.isnan(item.half) for item in found):
        interval = INTERVAL
    return FROM_PUBLISHED.format(interval=interval)


def pooled_note(table: Table, study: Study | None) -> str:
    """The sentence about a pooled standard deviation, where one is used."""
    configurations = [line.configuration for line in table.lines if line.configuration is not None]
    seeds = [len(item.repository) for item in configurations if len(item.repository)]
    if study is not None and study.spread_of and max(seeds, default=0) <= 1:
        return BORROWED.format(file=study.spread_of)
    if min(seeds, default=tables.FEW_SEEDS) < tables.FEW_SEEDS:
        return POOLED
    return ""


def machines(whose: str, runs: pd.DataFrame) -> str:
    """Where runs were computed: "yours: 6 on AMD EPYC"."""
    if runs.empty or "device_name" not in runs:
        return f"{whose}: none"
    counts = runs["device_name"].value_counts()
    parts = [f"{count} on {device}" for device, count in counts.items()]
    return f"{whose}: {', '.join(parts)}"


# The commands of lines.


def cells_of(first: pd.Series) -> dict[str, str]:
    """The settings of a run as cells of a row, with all digits."""
    return as_text(first).to_dict()


def commands_of(table: Table, study: Study | None) -> dict[Configuration, str]:
    """The first command of a study for each configuration of a table; none for those that it lacks."""
    if study is None:
        return {}
    configurations = [line.configuration for line in table.lines if line.configuration is not None]
    index = RunIndex([cells_of(item.first) for item in configurations])
    found: dict[Configuration, str] = {}
    for command in study.commands():
        for run in expected_runs(command):
            without_seed = {name: value for name, value in run.items() if name != "seed"}
            for place in index.find(without_seed):
                found.setdefault(configurations[place], command)
    return found


def in_order(lines: Sequence[Line], commands: Mapping[Configuration, str]) -> list[Line]:
    """The lines in the order of a study's commands, then what it does not have."""
    order = list(dict.fromkeys(commands.values()))

    def place(line: Line) -> int:
        if line.configuration not in commands:
            return len(order)
        return order.index(commands[line.configuration])

    return sorted(lines, key=place)


def command_of_line(line: Line, commands: Mapping[Configuration, str]) -> str:
    """The command that repeats a line, with all of its seeds."""
    item = line.configuration
    if item is None:
        return ""
    command = commands.get(item) or command_of(cells_of(item.first))
    seeds = sorted({int(seed) for seed in item.runs["seed"]})
    flag = "--seed"
    if len(seeds) > 1:
        flag = "--seeds"
    return re.sub(r" --seeds?( \d+)+", f" {flag} {' '.join(map(str, seeds))}", command)


def below_each_line(text: str, commands: Sequence[str]) -> str:
    """A Markdown table with a command below each of its lines."""
    header, rule, *rows = text.splitlines()
    lines = [header, rule]
    for row, command in zip(rows, commands):
        lines.append(row)
        if command:
            lines.append(f"    {command}")
    return "\n".join(lines)


def table_with_commands(table: Table, path: Path) -> str:
    """A table of the repository's runs, with the command of each line."""
    study = study_of(name_of(path), REPOSITORY)
    if isinstance(study, Tuned):
        study = None
    commands = commands_of(table, study)
    shown = [command_of_line(line, commands) for line in table.lines]
    return f"{table.caption}\n\n{below_each_line(markdown.table(tables.cells(table)), shown)}\n\n{table.source}\n"


# Studies with trials and finals.


def rule_of_selection(path: Path) -> str:
    """The rule that chose the runs of a file of finals, as a sentence; "" of other files."""
    study = study_of(name_of(path), REPOSITORY)
    if not isinstance(study, Tuned) or path.name != study.finals.commands.results.name:
        return ""
    known = study.known(path.parent / study.trials_file.name)
    if not known.rows:
        return ""
    return study.rule_of(known).text


def limit_of(path: Path) -> str:
    """What the runs of a study's file are not, as a sentence; "" of other files."""
    study = study_of(name_of(path), REPOSITORY)
    if not isinstance(study, Study):
        return ""
    return study.limit


class Chosen(NamedTuple):
    """What validation chose of a candidate, and the final runs of it. lacking: why nothing is chosen."""

    trial: Trial | None
    runs: pd.DataFrame
    lacking: str = ""


class Side:
    """The trials and finals of a tuned study in one folder.

    Attributes:
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
        rows = [*self.trials.rows, *self.finals.rows]
        self.names = set(names_of(pd.DataFrame(rows)))
        self.copies: set[str] = set()
        self.embeddings = ", ".join(sorted({row.get("embeddings", "") for row in rows}))

    def chosen(self, candidate: Candidate, split: str) -> Chosen:
        trial = self.study.chosen(candidate, self.trials, split)
        if trial is None:
            return Chosen(None, self.runs.iloc[:0], self.study.lacking(candidate, self.trials))
        runs = self.compared(self.runs.iloc[self.finals.numbers(trial)])
        is_final = runs["seed"].isin(self.study.finals.commands.seeds)  # trials may stand in the same file
        return Chosen(trial, runs[is_final])

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


def report_tuned(study: Tuned, ours: Side, theirs: Side, choice: str, with_commands: bool) -> str:
    """What validation chose of each loss, and the finals, the repository's and yours; then the trials."""
    split = split_of(study, choice)
    pools = {}
    for metric in METRICS:
        spreads = [spread(values(ours.chosen(candidate, split), metric)) for candidate in study.space]
        pools[metric] = pooled_spread(spreads)
    has_other_data = bool(ours.trials.rows and theirs.trials.rows) and ours.embeddings != theirs.embeddings
    lines = []
    verdicts: list[Agreement] = []
    commands = []
    for candidate in study.space:
        own = ours.chosen(candidate, split)
        your = theirs.chosen(candidate, split)
        found = {}
        if not has_other_data:
            found = {metric: agreement_of(your, own, metric, pool) for metric, pool in pools.items()}
        verdicts += found.values()
        lines.append(tuned_line(candidate, own, your, found))
        trials = [trial for trial in (your.trial, own.trial) if trial is not None]
        commands.append("\n    ".join(study.finals.commands.of(trials[:1])))
    text = markdown.table(markdown.without_empty_columns(pd.DataFrame(lines)))
    if with_commands:
        text = below_each_line(text, commands)
    title = f"{study.title}: finals of what validation chooses ({split.replace('_', ' ')} top-1 + top-5)."
    parts = [f"{title} {rules_of(study, ours, theirs)}".strip(), text]
    if has_other_data:
        parts.append(OTHER_DATA.format(yours=theirs.embeddings, repository=ours.embeddings))
    else:
        parts += [summary(verdicts), VERDICTS]
        parts.append(trials_that_agree(study, ours, theirs, pools))
    parts.append(copies_note(len(theirs.copies)))
    parts.append(f"Runs: {machines('repository', ours.runs)}; {machines('yours', theirs.compared(theirs.runs))}.")
    return "\n\n".join(filter(None, parts)) + "\n"


def report_gains(study: Tuned, theirs: Side, choice: str, with_commands: bool) -> str:
    """The finals of a study that the repository does not have, each minus cross-entropy by seed."""
    split = split_of(study, choice)
    candidates = [item for item in study.space if study.tried(item, theirs.trials)]
    chosen = [theirs.chosen(item, split) for item in candidates]
    baseline = next((own.runs for item, own in zip(candidates, chosen) if is_baseline(item)), None)
    lines = []
    for candidate, own in zip(candidates, chosen):
        line = {"loss": candidate.title}
        if baseline is not None:
            line |= gain_cells(own.runs, baseline)
        for metric, label in METRICS.items():
            line[label] = markdown.mean_std(values(own, metric))
        line["seeds"] = str(len(own.runs))
        line["trials"] = str(len(study.trials_of(candidate, theirs.trials)))
        line["choice"] = choice_text(study, candidate, own)
        lines.append(line)
    text = markdown.table(markdown.without_empty_columns(pd.DataFrame(lines)))
    if with_commands:
        commands = []
        for own in chosen:
            trials = [own.trial] if own.trial is not None else []
            commands.append("\n    ".join(study.finals.commands.of(trials)))
        text = below_each_line(text, commands)
    title = f"{study.title}: finals of what validation chooses ({split.replace('_', ' ')} top-1 + top-5)."
    rule = study.rule_of(theirs.trials).text
    return f"{title} {rule}\n\n{text}\n\n{GAINS}\n\nRuns: {machines('yours', theirs.runs)}.\n"


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
    """The differences of runs to a baseline, paired by seed; empty for the baseline itself."""
    if runs is baseline or runs.empty or baseline.empty:
        return {f"Δ {label}": "" for label in METRICS.values()}
    differences = paired(runs, baseline, list(METRICS))
    return {f"Δ {label}": markdown.interval(interval(differences[metric])) for metric, label in METRICS.items()}


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
    for candidate in study.space:
        for trial in study.trials_of(candidate, ours.trials):
            own = ours.trials.of(trial)
            your = theirs.compared(pd.DataFrame(theirs.trials.of(trial)))
            if not own or your.empty:
                continue
            count += 1
            for metric, pool in pools.items():
                verdicts.append(agreement(accuracies(your.to_dict("records"), metric), accuracies(own, metric), pool))
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
