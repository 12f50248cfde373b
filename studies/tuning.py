"""Tune losses: rounds of trials, validation chooses, and what it chose trains again with other seeds.

    tune(study, launch)

A space is a tuple of candidates, each a loss with the numbers or options that are tried. A round says which trials a
candidate gets, given the rows of earlier rounds.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from experiments.common.rows import read_rows
from studies.runs import PYTHON, RunIndex, as_flags, one_pass, parse_flags

Row = dict[str, str]


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
        path: results file.
        flags: what the commands of all trials have, such as --num_valid 5000.
        embeddings: name of the embeddings by content; rows of others are no trials. All rows count without it.
    """

    def __init__(self, path: Path, flags: str = "", embeddings: str = "") -> None:
        rows = read_rows(path)
        if embeddings:
            rows = [row for row in rows if row.get("embeddings", "") == embeddings]
        self.path = path
        self.rows = rows
        self.index = RunIndex(rows)
        self.shared = parse_flags(flags)
        self.shared.pop("seed", None)

    def numbers(self, trial: Trial) -> list[int]:
        """The numbers of the rows of a trial, one for each seed, in their order."""
        return self.index.find(self.shared | parse_flags(trial.flags) | {"n_epochs": trial.n_epochs})

    def of(self, trial: Trial) -> list[Row]:
        return [self.rows[number] for number in self.numbers(trial)]

    def tried(self, trials: Iterable[Trial]) -> list["Tried"]:
        """The trials that have rows, in the order of their first row."""
        found = []
        for trial in trials:
            numbers = self.numbers(trial)
            if numbers:
                rows = [self.rows[number] for number in numbers]
                found.append((numbers[0], Tried(trial, rows)))
        found.sort(key=lambda pair: pair[0])
        return [item for _, item in found]

    def are_done(self, trials: Sequence[Trial]) -> bool:
        return all(self.numbers(trial) for trial in trials)


class Tried(NamedTuple):
    """A trial and its rows, one for each seed."""

    trial: Trial
    rows: list[Row]


# A rule of selection: from the trials of a loss and a split, such as valid or last_clean, the trial that is chosen.
Selection = Callable[[Sequence[Tried], str], Trial]


def score(row: Row, split: str) -> float:
    return float(row[f"{split}_top1"]) + float(row[f"{split}_top5"])


def best_of_first_seed(tried: Sequence[Tried], split: str) -> Trial:
    """The trial whose first row has the highest top-1 + top-5 of a split, the earliest of equals."""
    return max(tried, key=lambda item: score(item.rows[0], split)).trial


class Commands(Protocol):
    """How trials become command lines that write `results`; flags: what all of them have."""

    results: Path
    flags: str

    def of(self, trials: Iterable[Trial]) -> list[str]: ...


@dataclass(frozen=True)
class OnePass:
    """Linear classifiers: one command for each number of epochs trains all trials in a pass over the data.

    Attributes:
        flags: of the seeds, the data, the evaluation and the results.
    """

    script: str
    results: Path
    flags: str

    def of(self, trials: Iterable[Trial]) -> list[str]:
        groups: dict[int, list[str]] = {}
        for trial in trials:
            groups.setdefault(trial.n_epochs, []).append(trial.flags)
        commands = []
        for n_epochs, losses in sorted(groups.items()):
            commands.append(one_pass(self.script, losses, f"--n_epochs {n_epochs} {self.flags}"))
        return commands


@dataclass(frozen=True)
class OneByOne:
    """Networks: a command for each trial and seed."""

    script: str
    results: Path
    flags: str
    seeds: tuple[int, ...]

    def of(self, trials: Iterable[Trial]) -> list[str]:
        commands = []
        for seed, trial in itertools.product(self.seeds, list(trials)):
            commands.append(f"{PYTHON} {self.script} {trial.flags} --seed {seed} {self.flags}")
        return commands


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
        for number, places in enumerate(self.places()):
            shared = {}
            for place, (name, numbers) in zip(places, [*self.ranges.items(), *candidate.ranges.items()]):
                shared[name] = numbers.at(place)
            n_epochs = self.epochs[number * len(self.epochs) // self.number]
            trials.append(Trial(candidate.flags, as_flags(shared), n_epochs))
        return trials

    def places(self) -> list[list[float]]:
        import torch  # seconds that other studies need not wait

        engine = torch.quasirandom.SobolEngine(4, scramble=True, seed=0)
        return engine.draw(self.number, dtype=torch.float64).tolist()


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


@dataclass(frozen=True)
class Longer(Grid):
    """The best loss of an earlier round, with each value again and more epochs."""

    earlier: Grid | None = None
    split: str = "valid"

    def of(self, candidate: Candidate, known: Known) -> list[Trial]:
        assert self.earlier is not None
        trials = self.earlier.of(candidate, known)
        if not known.are_done(trials):
            return []
        return self.with_values(best_of_first_seed(known.tried(trials), self.split).loss)


@dataclass(frozen=True)
class Finals:
    """Other seeds of what validation chose.

    Attributes:
        choices: who chooses, and the split whose accuracy decides, such as valid or last_clean.
        together: whether one pass over the data trains what was chosen of all candidates.
        always: trials that get these seeds, too, chosen or not.
        select: the rule of selection.
    """

    commands: Commands
    choices: dict[str, str]
    together: bool = True
    always: tuple[Trial, ...] = ()
    select: Selection = best_of_first_seed


class Stage(NamedTuple):
    """Commands that run at once: the name of their logs, the file of their rows."""

    name: str
    results: str
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
    limit: str = ""

    @property
    def trials_file(self) -> Path:
        return self.rounds[0].commands.results

    def known(self, path: Path | None = None) -> Known:
        """The rows of the trials, of another file if a path is given."""
        return Known(path or self.trials_file, self.rounds[0].commands.flags, self.embeddings)

    def trials_of(self, candidate: Candidate, known: Known) -> list[Trial]:
        """The trials of a candidate, of all rounds that are known by now."""
        trials = []
        for part in self.rounds:
            trials += part.of(candidate, known)
        return trials

    def chosen(self, candidate: Candidate, known: Known, split: str) -> Trial | None:
        """What validation chose of a candidate; None if none of its trials has run."""
        tried = known.tried(self.trials_of(candidate, known))
        if not tried:
            return None
        return self.finals.select(tried, split)

    def trials_are_done(self, known: Known) -> bool:
        for candidate in self.space:
            for part in self.rounds:
                trials = part.of(candidate, known)
                if not trials or not known.are_done(trials):
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

    def final_commands(self) -> list[str]:
        known = self.known()
        commands = []
        everything = list(self.finals.always)
        for candidate in self.space:
            chosen = []
            for split in self.finals.choices.values():
                trial = self.chosen(candidate, known, split)
                if trial is not None:
                    chosen.append(trial)
            if not self.finals.together:
                commands += self.finals.commands.of(dict.fromkeys(chosen))
            everything += chosen
        if self.finals.together:
            return self.finals.commands.of(dict.fromkeys(everything))
        return commands


def tune(study: Tuned, launch: Launch) -> int:
    """Run the rounds of trials, let validation choose, and run the finals; return the exit status.

    What the files have is skipped: the same call continues.
    """
    for part in study.rounds:
        commands = study.round_commands(part)
        if not commands:
            print(f"# {part.name} of {study.name}: known when the trials before have run")
            return 0
        status = launch(Stage(f"{study.name}_{part.name}", str(part.commands.results), commands))
        if status:
            return status
    if not study.trials_are_done(study.known()):
        print(f"# finals of {study.name}: known when its trials have run")
        return 0
    return launch(Stage(study.name, str(study.finals.commands.results), study.final_commands()))
