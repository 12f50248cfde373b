"""The report of your runs: published values, this repository's and yours, with a verdict for each line."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from experiments.common.paths import REPOSITORY, RESULTS
from reporting import beam_search, markdown, tables
from reporting.frames import are_of_beam_search, as_text
from reporting.tables import Configuration, Line, Table
from reporting.tuned import Side, report_gains, report_tuned
from reporting.yours import VERDICTS, below_each_line, copies_note, machines, names_of, read_or_none, summary
from studies.catalog import study_of
from studies.runs import RunIndex, Study, command_of, expected_runs
from studies.tuning import Tuned

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
MORE_SEEDS = "With a second seed of yours there is an interval that takes their spread from your runs."
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


def error_rates_of(*sides: pd.DataFrame) -> dict[str, str] | None:
    """The error rates of beam search and what tables call them, where a side has such runs; else None."""
    if any(are_of_beam_search(runs) for runs in sides):
        return beam_search.ERROR_RATES
    return None


def in_percent(runs: pd.DataFrame) -> pd.DataFrame:
    return runs.assign(**{rate: 100 * runs[rate] for rate in beam_search.ERROR_RATES if rate in runs})


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


def table_with_commands(table: Table, path: Path) -> str:
    """A table of the repository's runs, with the command of each line."""
    study = study_of(name_of(path), REPOSITORY)
    if isinstance(study, Tuned):
        study = None
    commands = commands_of(table, study)
    shown = [command_of_line(line, commands) for line in table.lines]
    return f"{table.caption}\n\n{below_each_line(markdown.table(tables.cells(table)), shown)}\n\n{table.source}\n"


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
