"""Tune losses: rounds of trials, validation chooses, and what it chose trains again with other seeds.

    tune(study, launch)

A space is a tuple of candidates, each a loss with the numbers or options that are tried. A round says which trials a
candidate gets, given the rows of earlier rounds. All trials have seed 0. The best of them, the finalists, get the seeds
of the rule of selection, and the mean over those seeds chooses. The finals have seeds that never chose. Where trials of
a baseline have equal validation, the one with the higher test accuracy is chosen: ties break against the other losses.
"""

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, Protocol

from experiments.common.columns import about_repeats
from experiments.common.paths import ROOT
from experiments.common.rows import Row, read_rows
from experiments.common.settings import CROSS_ENTROPY
from studies.runs import PYTHON, RunIndex, as_flags, one_pass, parse_flags

BETTER = 1
EARLIER = 0
WORSE = -1
TRIAL_SEEDS = (0,)  # of all trials
FINAL_SEEDS = tuple(range(1, 11))
DIMENSIONS = 4  # places of a trial by the Sobol sequence, one a range
DIGITS = 9  # of a mean score: without rounding, the order of a sum would decide between equal accuracies


class Range(NamedTuple):
    """Numbers from low to high, at equal distances of their logarithm, or of themselves if linear."""

    low: float
    high: float
    linear: bool = False

    def at(self, place: float) -> float:
        """The number at a place in [0, 1], with three digits."""
        if self.linear:
            value = self.low + (self.high - self.low) * place
        else:
            value = self.low * (self.high / self.low) ** place
        return float(f"{value:.3g}")

    def place(self, value: float) -> float:
        """The place in [0, 1] of a number."""
        if self.linear:
            return (value - self.low) / (self.high - self.low)
        return math.log(value / self.low) / math.log(self.high / self.low)


@dataclass(frozen=True)
class Candidate:
    """A loss that is tuned.

    Attributes:
        name: for the command line.
        title: for tables.
        flags: what all of its trials have, as anyone would type it.
        ranges: its own numbers, for Sobol.
        options: flags of which each trial has one, for Grid.
    """

    name: str
    title: str
    flags: str
    ranges: dict[str, Range] = field(default_factory=dict)
    options: tuple[str, ...] = ("",)

    @property
    def ties(self) -> int:
        """Which of two trials with equal validation is chosen, see `Tried.order`; of a baseline the better in test."""
        if parse_flags(self.flags).get("method") == CROSS_ENTROPY:
            return BETTER
        return EARLIER


class Trial(NamedTuple):
    """Flags of a loss, those that all losses try, and the number of epochs."""

    loss: str
    shared: str
    n_epochs: int

    @property
    def flags(self) -> str:
        return f"{self.loss} {self.shared}".strip()


class Known:
    """The rows of trials that have run.

    Args:
        path: results file; a relative one is within this repository, from whatever directory a script is called.
        flags: what the commands of all trials have, such as --num_valid 5000.
        embeddings: name of the embeddings by content; rows of others are no trials. All rows count without it.
        finals: results file of what the trials choose.
    """

    def __init__(self, path: Path, flags: str = "", embeddings: str = "", finals: Path | None = None) -> None:
        self.path = path
        self.finals = finals
        self.embeddings = embeddings
        self.rows = rows_of(path, embeddings)
        self.index = RunIndex(self.rows)
        self.shared = parse_flags(flags)
        self.shared.pop("seed", None)

    @cached_property
    def seeds(self) -> set[int]:
        """The seeds of the rows."""
        return {int(row["seed"]) for row in self.rows}

    @cached_property
    def seeds_of_finals(self) -> set[int]:
        """The seeds of the finals that are there when this is asked first."""
        if self.finals is None:
            return set()
        return {int(row["seed"]) for row in rows_of(self.finals, self.embeddings)}

    def numbers(self, trial: Trial) -> list[int]:
        """The numbers of the rows of a trial, one for each seed, in their order.

        Raises:
            ValueError: a seed has two rows, which differ in a setting that the trial leaves open.
        """
        numbers = self.index.find(self.shared | parse_flags(trial.flags) | {"n_epochs": trial.n_epochs})
        by_seed: dict[tuple[str, str], list[Row]] = {}
        for number in numbers:
            row = self.rows[number]
            by_seed.setdefault((row["seed"], row.get("order_seed", "")), []).append(row)
        for rows in by_seed.values():
            if len(rows) > 1:
                raise ValueError(about_repeats(self.path, rows))
        return numbers

    def of(self, trial: Trial) -> list[Row]:
        return [self.rows[number] for number in self.numbers(trial)]

    def tried(self, trials: Iterable[Trial]) -> list["Tried"]:
        """Those of the trials that have a row of the seed of trials."""
        found = []
        for trial in trials:
            numbers = {}
            for number in self.numbers(trial):
                numbers[int(self.rows[number]["seed"])] = number
            if numbers.keys() >= set(TRIAL_SEEDS):
                rows = {seed: self.rows[number] for seed, number in numbers.items()}
                found.append(Tried(trial, rows))
        return found

    def are_done(self, trials: Sequence[Trial]) -> bool:
        """Whether each trial has a row of the seed of trials."""
        return len(self.tried(trials)) == len(trials)


def rows_of(path: Path, embeddings: str) -> list[Row]:
    """The rows of a file, within this repository where relative; of embeddings by their name, or of all with ""."""
    rows = read_rows(ROOT / path)
    if embeddings:
        rows = [row for row in rows if row.get("embeddings", "") == embeddings]
    return rows


class Tried(NamedTuple):
    """A trial and its rows by their seeds."""

    trial: Trial
    rows: dict[int, Row]

    def mean_score(self, seeds: Sequence[int], split: str) -> float:
        """The mean over seeds of the top-1 + top-5 of a split, such as valid or last_clean."""
        return round(fmean(score(self.rows[seed], split) for seed in seeds), DIGITS)

    def order(self, seeds: Sequence[int], split: str, ties: int) -> tuple[float, float]:
        """What trials are ordered by: the mean score; of equals the BETTER or the WORSE in test, or the EARLIER one."""
        test = 0.0
        if ties != EARLIER:
            test = ties * self.mean_score(seeds, test_split(split))
        return self.mean_score(seeds, split), test


def score(row: Row, split: str) -> float:
    return float(row[f"{split}_top1"]) + float(row[f"{split}_top5"])


def test_split(split: str) -> str:
    """The test split that was evaluated with a split: test at the best epoch, or last_test."""
    if split.startswith("last_"):
        return "last_test"
    return "test"


@dataclass(frozen=True)
class Rule:
    """The rule of selection of all studies: the best trials of a candidate get more seeds, whose mean chooses.

    Attributes:
        finalists: number of trials of each candidate, the best of seed 0, that get more seeds.
        seeds: these seeds; none of them is a seed of the finals.
    """

    finalists: int = 5
    seeds: tuple[int, ...] = tuple(range(101, 111))

    def finalists_of(self, tried: Sequence[Tried], split: str, ties: int) -> list[Tried]:
        """The best trials by seed 0 and a split. ties: which of equals, see `Tried.order`."""
        ranked = sorted(tried, key=lambda item: item.order(TRIAL_SEEDS, split, ties), reverse=True)
        return ranked[: self.finalists]

    def choose(self, tried: Sequence[Tried], split: str, ties: int) -> Trial | None:
        """The finalist with the best mean over the seeds; None if a finalist lacks one of them.

        ties: which of equals, see `Tried.order`.
        """
        finalists = self.finalists_of(tried, split, ties)
        if len(finalists) == 1:
            return finalists[0].trial
        if not finalists or not all(item.rows.keys() >= set(self.seeds) for item in finalists):
            return None
        return max(finalists, key=lambda item: item.order(self.seeds, split, ties)).trial

    @property
    def deciding_seeds(self) -> tuple[int, ...]:
        """The seeds whose mean chooses."""
        if self.finalists == 1:
            return TRIAL_SEEDS
        return self.seeds

    @property
    def text(self) -> str:
        """The rule as a sentence for captions."""
        if self.finalists == 1:
            return "The trial with the best validation of seed 0 is chosen: one seed chose."
        return (
            f"The {self.finalists} trials of each loss with the best validation of seed 0 train again with seeds "
            f"{self.seeds[0]} to {self.seeds[-1]}, and the best mean validation of these {len(self.seeds)} seeds is "
            "chosen."
        )


ONE_SEED = Rule(finalists=1, seeds=())  # of rows that were made before the rule


class Commands(Protocol):
    """How trials become command lines that write `results`, with these seeds; flags: what all of them have."""

    results: Path
    flags: str
    seeds: tuple[int, ...]

    def of(self, trials: Iterable[Trial]) -> list[str]: ...

    def with_seeds(self, seeds: tuple[int, ...]) -> "Commands": ...


@dataclass(frozen=True)
class OnePass:
    """Linear classifiers: one command for each number of epochs trains all trials in a pass over the data.

    Attributes:
        flags: of the data, the evaluation and the results.
    """

    script: str
    results: Path
    flags: str
    seeds: tuple[int, ...] = TRIAL_SEEDS

    def of(self, trials: Iterable[Trial]) -> list[str]:
        groups: dict[int, list[str]] = {}
        for trial in trials:
            groups.setdefault(trial.n_epochs, []).append(trial.flags)
        commands = []
        for n_epochs, losses in sorted(groups.items()):
            seeds = " ".join(map(str, self.seeds))
            commands.append(one_pass(self.script, losses, f"--n_epochs {n_epochs} --seeds {seeds} {self.flags}"))
        return commands

    def with_seeds(self, seeds: tuple[int, ...]) -> "OnePass":
        return replace(self, seeds=seeds)


@dataclass(frozen=True)
class OneByOne:
    """Networks: a command for each trial and seed."""

    script: str
    results: Path
    flags: str
    seeds: tuple[int, ...] = TRIAL_SEEDS

    def of(self, trials: Iterable[Trial]) -> list[str]:
        commands = []
        for seed, trial in itertools.product(self.seeds, list(trials)):
            commands.append(f"{PYTHON} {self.script} {trial.flags} --seed {seed} {self.flags}")
        return commands

    def with_seeds(self, seeds: tuple[int, ...]) -> "OneByOne":
        return replace(self, seeds=seeds)


class Round(Protocol):
    """Trials of each candidate. `of` is empty if they are not known before earlier rounds have run."""

    name: str
    commands: Commands

    def of(self, candidate: Candidate, known: Known) -> list[Trial]: ...


@dataclass(frozen=True)
class Sobol:
    """The same places in each range for every candidate, by a Sobol sequence; epochs in blocks of equal size.

    Attributes:
        ranges: numbers that all candidates have.
    """

    name: str
    commands: Commands
    number: int
    epochs: tuple[int, ...]
    ranges: dict[str, Range]

    def of(self, candidate: Candidate, known: Known) -> list[Trial]:
        trials = []
        ranges = self.ranges | candidate.ranges
        if len(ranges) > DIMENSIONS:
            raise ValueError(f"{candidate.name} has {len(ranges)} ranges, and trials have {DIMENSIONS} places")
        for number, places in enumerate(sobol_places(self.number)):
            shared = {}
            for place, (name, numbers) in zip(places, ranges.items()):
                shared[name] = numbers.at(place)
            n_epochs = self.epochs[number * len(self.epochs) // self.number]
            trials.append(Trial(candidate.flags, as_flags(shared), n_epochs))
        return trials


@cache
def sobol_places(number: int) -> list[list[float]]:
    """The first places of the sequence, between 0 and 1 in each of its dimensions."""
    import torch  # seconds that other studies need not wait

    engine = torch.quasirandom.SobolEngine(DIMENSIONS, scramble=True, seed=0)
    return engine.draw(number, dtype=torch.float64).tolist()


@dataclass(frozen=True)
class Grid:
    """Each option of a candidate with each value that all candidates have.

    Attributes:
        values: flags by setting, such as {"lr": (0.001, 0.002)}; None leaves a setting out.
    """

    name: str
    commands: Commands
    n_epochs: int
    values: dict[str, tuple[float | None, ...]] = field(default_factory=dict)

    def of(self, candidate: Candidate, known: Known) -> list[Trial]:
        trials = []
        for option in candidate.options:
            loss = " ".join(filter(None, [candidate.flags, option]))
            trials += self.with_values(loss)
        return trials

    def with_values(self, loss: str) -> list[Trial]:
        trials = []
        for chosen in itertools.product(*self.values.values()):
            shared = as_flags(dict(zip(self.values, chosen)))
            trials.append(Trial(loss, shared, self.n_epochs))
        return trials


@dataclass(frozen=True, kw_only=True)
class Longer(Grid):
    """The best loss of an earlier round by seed 0, with each value again and more epochs."""

    earlier: Grid

    def of(self, candidate: Candidate, known: Known) -> list[Trial]:
        trials = self.earlier.of(candidate, known)
        if not known.are_done(trials):
            return []
        best = ONE_SEED.finalists_of(known.tried(trials), "valid", EARLIER)[0]
        return self.with_values(best.trial.loss)


@dataclass(frozen=True)
class Finals:
    """Other seeds of what validation chose.

    Attributes:
        choices: who chooses, and the split whose accuracy decides, such as valid or last_clean.
        together: whether one pass over the data trains the finalists, and what was chosen, of all candidates.
        always: trials that get these seeds, too, chosen or not.
        rule: the rule of selection.
    """

    commands: Commands
    choices: dict[str, str]
    together: bool = True
    always: tuple[Trial, ...] = ()
    rule: Rule = Rule()


class Stage(NamedTuple):
    """Commands that run at once, and the name of their logs."""

    name: str
    commands: list[str]


Launch = Callable[[Stage], int]  # returns an exit status


@dataclass(frozen=True)
class Tuned:
    """A space, the rounds of its trials, and its finals.

    Attributes:
        embeddings: name of the embeddings by content, the only ones whose rows count as trials; "" for any.
    """

    name: str
    title: str
    space: tuple[Candidate, ...]
    rounds: tuple[Round, ...]
    finals: Finals
    embeddings: str = ""

    @property
    def trials_file(self) -> Path:
        return self.rounds[0].commands.results

    def known(self, path: Path | None = None) -> Known:
        """The rows of the trials, of another file if a path is given."""
        path = path or self.trials_file
        finals = path.with_name(self.finals.commands.results.name)
        return Known(path, self.rounds[0].commands.flags, self.embeddings, finals)

    def trials_of(self, candidate: Candidate, known: Known) -> list[Trial]:
        """The trials of a candidate, of all rounds that are known by now."""
        trials = []
        for part in self.rounds:
            trials += part.of(candidate, known)
        return trials

    def tried(self, candidate: Candidate, known: Known) -> list[Tried]:
        """The trials of a candidate that have run."""
        return known.tried(self.trials_of(candidate, known))

    def rule_of(self, known: Known) -> Rule:
        """The rule by which rows chose: the study's; the first seed alone of finals that ran without its seeds."""
        has_finals = not known.seeds_of_finals.isdisjoint(self.finals.commands.seeds)
        if has_finals and known.seeds.isdisjoint(self.finals.rule.seeds):
            return ONE_SEED
        return self.finals.rule

    def chosen(self, candidate: Candidate, known: Known, split: str) -> Trial | None:
        """What validation chose of a candidate; None as long as its trials or its finalists have not run."""
        if not self.has_trials(candidate, known):
            return None
        return self.rule_of(known).choose(self.tried(candidate, known), split, candidate.ties)

    def lacking(self, candidate: Candidate, known: Known) -> str:
        """What has not run of a candidate of which nothing is chosen."""
        if not self.tried(candidate, known):
            return "no trials"
        if not self.has_trials(candidate, known):
            return "trials not finished"
        return "finalists not finished"

    def has_trials(self, candidate: Candidate, known: Known) -> bool:
        """Whether all trials of a candidate have run, those of every round."""
        for part in self.rounds:
            trials = part.of(candidate, known)
            if not trials or not known.are_done(trials):
                return False
        return True

    def trials_are_done(self, known: Known) -> bool:
        return all(self.has_trials(candidate, known) for candidate in self.space)

    def finalists(self, candidate: Candidate, known: Known) -> list[Trial]:
        """The trials that get the seeds of the rule; none where there is nothing to choose."""
        tried = self.tried(candidate, known)
        found: dict[Trial, None] = {}
        for split in self.finals.choices.values():
            finalists = self.finals.rule.finalists_of(tried, split, candidate.ties)
            if len(finalists) > 1:
                found |= dict.fromkeys(item.trial for item in finalists)
        return list(found)

    def has_chosen(self, known: Known) -> bool:
        """Whether the rule can choose of every candidate."""
        for candidate in self.space:
            tried = self.tried(candidate, known)
            for split in self.finals.choices.values():
                if self.finals.rule.choose(tried, split, candidate.ties) is None:
                    return False
        return True

    def round_commands(self, part: Round) -> list[str]:
        """The commands of a round; none as long as earlier rounds have not run."""
        known = self.known()
        commands = []
        for candidate in self.space:
            trials = part.of(candidate, known)
            if not trials:
                return []
            commands += part.commands.of(trials)
        return commands

    def finalist_commands(self) -> list[str]:
        """The commands of the finalists, whose rows are in the file of the trials."""
        known = self.known()
        commands = self.rounds[0].commands.with_seeds(self.finals.rule.seeds)
        return self.commands_of([self.finalists(candidate, known) for candidate in self.space], commands)

    def final_commands(self) -> list[str]:
        known = self.known()
        groups = [list(self.finals.always)]
        for candidate in self.space:
            chosen = []
            for split in self.finals.choices.values():
                trial = self.chosen(candidate, known, split)
                if trial is not None:
                    chosen.append(trial)
            groups.append(chosen)
        return self.commands_of(groups, self.finals.commands)

    def commands_of(self, groups: Sequence[Sequence[Trial]], commands: Commands) -> list[str]:
        """The commands of the trials of several candidates: of all at once, or of one after another."""
        if self.finals.together:
            return commands.of(dict.fromkeys(itertools.chain(*groups)))
        lines = []
        for trials in groups:
            lines += commands.of(dict.fromkeys(trials))
        return lines


def tune(study: Tuned, launch: Launch, starts_nothing: bool = False) -> int:
    """Run the rounds of trials and the finalists, let validation choose, and run the finals; return the exit status.

    What the files have is skipped: the same call continues. starts_nothing: whether launch only shows commands or
    their states, so that what follows may stay unknown; else that is a failure, with status 1.
    """

    def unknown(stage: str, before: str) -> int:
        if starts_nothing:
            print(f"# {stage} of {study.name}: known when {before} have run")
            return 0
        path = study.trials_file
        print(f"{stage} of {study.name}: not all of {before} have a row with their settings in {path}", file=sys.stderr)
        return 1

    for part in study.rounds:
        commands = study.round_commands(part)
        if not commands:
            return unknown(part.name, "the trials before")
        status = launch(Stage(f"{study.name}_{part.name}", commands))
        if status:
            return status
    if not study.trials_are_done(study.known()):
        return unknown("finalists", "its trials")
    commands = study.finalist_commands()
    if commands:
        status = launch(Stage(f"{study.name}_finalists", commands))
        if status:
            return status
    if not study.has_chosen(study.known()):
        return unknown("finals", "its finalists")
    return launch(Stage(study.name, study.final_commands()))
