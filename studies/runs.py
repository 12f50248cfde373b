"""A list of runs: commands that write one results file, and what reads the flags of a command."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

from experiments.common import settings
from experiments.common.settings import BY_FLAG, BY_NAME, CALL, LOSS, MACHINE, Setting

PYTHON = ".venv/bin/python"
CIFAR100 = f"experiments/{settings.CIFAR}.py"
IMAGENET = f"experiments/{settings.HEADS}.py"
IMAGENET_21K = "experiments/finetune_imagenet21k.py"
NEIGHBOURS = f"experiments/{settings.KNN}.py"
BEAM_SEARCH = f"experiments/{settings.BEAM}.py"
DATASETS = ("mnist", "fashion_mnist", "cifar10", "cifar100", "digits")  # of NEIGHBOURS; other words are files
PROTOCOLS = {IMAGENET: "--n_epochs 20", IMAGENET_21K: "--n_epochs 40"}  # with a million rows; else by their number
# What a script fills in where a flag is not given: a row with another value is another run.
NETWORKS = "--distribution logistic_phi --art_lambda 0.5"
DEFAULTS = {
    settings.CIFAR: "--dataset cifar100 --model resnet18 --batch_size 128 --n_epochs 200 --lr 0.001 --nloglr 3 "
    f"--precision fp32 --implementation ours --top1_mode smce {NETWORKS}",
    settings.HEADS: f"--split_seed 0 --eval_freq 100 --precision fp32 --implementation ours --top1_mode sm {NETWORKS}",
    settings.KNN: "--dataset mnist --dim 128 --batch_size 100 --n_epochs 200 --lr 0.001 --nloglr 3 "
    f"--weight_decay 0.0005 --precision fp32 --loss mass --k 9 --prediction neighbours --num_candidates 100 {NETWORKS}",
    settings.BEAM: "--dataset cmudict --hidden_dim 128 --batch_size 128 --lr 0.0005 --nll_weight 0.3 --eval_freq 325 "
    f"--beam_size 4 --n_updates 650 --pretrain_updates 2600 --pretrain_lr 0.002 --top1_mode sm {NETWORKS}",
}
BY_NUMBER_OF_ROWS = ("batch_size", "n_epochs", "lr", "nloglr", "num_valid")  # what linear classifiers choose by it
SCORES = {settings.HEADS: (16.0, 50.0), settings.BEAM: (16.0,)}  # 50 with IMAGENET_21K, whose rows look the same
MAX_LETTERS = {"cmudict": 8.0, "reversal": 4.0}
EMBEDDERS = {"mnist": "cnn", "digits": "cnn", None: "linear"}  # by the data of NEIGHBOURS; else preact_resnet18
# Inverse temperatures of a script, or of an arm, where they are not the library's.
INVERSE_TEMPERATURES = {
    settings.CIFAR: {
        "neuralsort": 0.0625, "softsort": 0.0625, "odd_even": 0.5, "bitonic": 0.5, "splitter_selection": 0.5
    },
    settings.KNN: {"neuralsort": 0.0625},
    "soft_beam": {"neuralsort": 1.0, "softsort": 1.0, "soft_topk": 100.0},
}  # fmt: skip
# Losses that sort no scores: published commands give them --m, and their rows have none.
UNSORTED = (
    "softmax_cross_entropy",
    "ldr_kl",
    "smooth_topk",
    "smooth_hard_topk",
    "truncated_entropy",
    "noised_topk",
    "imbalanced_noised_topk",
    "forward_correction",
    "generalized_cross_entropy",
    "symmetric_cross_entropy",
    "nce_rce",
    "phuber_cross_entropy",
)
SHORT = "--n_epochs 16 --lr_schedule cosine --precision bf16"  # minutes on a GPU instead of hours


@dataclass(frozen=True)
class RunList:
    """Runs of one script with each loss and each seed.

    Attributes:
        script: the training script.
        results: the file that gets the rows.
        losses: flags of each loss, as anyone would type them.
        seeds: random seeds.
        data: flags before those of the loss.
        schedule: flags at the end.
    """

    script: str
    results: str
    losses: tuple[str, ...]
    seeds: tuple[int, ...] = (0, 1)
    data: str = ""
    schedule: str = ""

    def commands(self) -> list[str]:
        """One command line per run, seed by seed."""
        lines = []
        for seed in self.seeds:
            for loss in self.losses:
                words = [PYTHON, self.script, self.data, loss, f"--seed {seed} --results {self.results}", self.schedule]
                lines.append(" ".join(filter(None, words)))
        return lines

    def but(self, **changes: Any) -> "RunList":
        return replace(self, **changes)


class CommandList(Protocol):
    """Commands that write `results`."""

    @property
    def results(self) -> str: ...

    def commands(self) -> list[str]: ...


@dataclass(frozen=True)
class Study:
    """Commands that are known before any has run.

    Attributes:
        name: of the study; its logs lie in results/logs/NAME.
        title: for its report.
        lists: the commands.
        published: table of results/paper/, or "".
        limit: what these runs are not, a sentence below the report.
        run_per_core: whether a run per core fits into memory.
        spread_of: another file of the repository, of the same data and schedule, whose standard deviation serves where
            the repository has one seed of each run; or "".
    """

    name: str
    title: str
    lists: tuple[CommandList, ...]
    published: str = ""
    limit: str = ""
    run_per_core: bool = True
    spread_of: str = ""

    @property
    def files(self) -> list[str]:
        """The results files, each once."""
        return list(dict.fromkeys(item.results for item in self.lists))

    def commands(self) -> list[str]:
        lines = []
        for item in self.lists:
            lines += item.commands()
        return lines


def as_flags(values: Mapping[str, Any]) -> str:
    """Settings as flags of a command. Those without a value are left out."""
    words = []
    for name, value in values.items():
        text = settings.cell(value)
        if text == "":
            continue
        if name != "p_k":  # the only list
            text = shlex.quote(text)
        words.append(f"{BY_NAME[name].flag} {text}")
    return " ".join(words)


def one_pass(script: str, losses: Sequence[str], flags: str) -> str:
    """The command that trains several linear classifiers in one pass over the data."""
    first, *others = losses
    words = [PYTHON, script, first]
    for loss in others:
        if "--weight_decay" in first and "--weight_decay" not in loss:
            loss = f"{loss} --weight_decay 0"  # --also takes the first one's otherwise
        words.append(f'--also "{loss}"')
    return " ".join([*words, flags])


def parse_flags(text: str) -> dict[str, Any]:
    """The values of flags as the columns of rows have them; --also as a list of texts, --seed of numbers."""
    return dict(_parsed_flags(text))


@cache
def words_of(command: str) -> tuple[str, ...]:
    """The words of a command, as a shell splits it."""
    return tuple(shlex.split(command))


@cache  # a report asks for the same trials many times
def _parsed_flags(text: str) -> Mapping[str, Any]:
    values: dict[str, Any] = {}
    for flag, given in split_flags(words_of(text)):
        setting = BY_FLAG.get(flag)
        if setting is None:
            continue
        if setting.name == "also":
            values.setdefault("also", []).extend(given)
        elif setting.name == "seed":
            values["seed"] = [int(word) for word in given]
        else:
            values[setting.name] = setting.parse(" ".join(given) or "true")
    return values


def split_flags(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag and the words of its value, which may be joined to it: --lr=0.001, -m16."""
    position = 0
    while position < len(words):
        flag, value = split_word(words[position])
        position += 1
        if value is not None:
            yield flag, [value]
            continue
        given = list(takewhile(is_value, words[position:]))
        if flag == "--also":
            given = list(words[position : position + 1])  # its text begins with a dash
        yield flag, given
        position += len(given)


def is_value(word: str) -> bool:
    """Whether a word is no flag; a number may begin with a dash."""
    return re.match(r"--?[A-Za-z]", word) is None


def split_word(word: str) -> tuple[str, str | None]:
    """A flag, and the value that is joined to it; None if there is none."""
    flag, joined, value = word.partition("=")
    if joined and flag in BY_FLAG:
        return flag, value
    if word not in BY_FLAG and word[:2] in BY_FLAG:
        return word[:2], word[2:]
    return word, None


def expected_runs(command: str) -> list[dict[str, Any]]:
    """The runs of a command, one per seed and loss, each with the settings that its flags and its protocol give."""
    _, script, *_ = words_of(command)
    shared = parse_flags(command)
    also = shared.pop("also", [])
    seeds = shared.pop("seed", [0])
    losses = [shared]
    for text in also:
        own = parse_flags(text)
        without_loss = {name: value for name, value in shared.items() if not is_of_one_loss(BY_NAME[name])}
        losses.append(without_learning_rate(without_loss, own) | own)
    protocol = parse_flags(PROTOCOLS.get(script, ""))
    runs = []
    for seed in seeds:
        for loss in losses:
            run = protocol | loss | {"seed": seed}
            if script == NEIGHBOURS and "data_path" in run:
                run["dataset"] = None
            if run["method"] in UNSORTED:
                run.pop("m", None)
            runs.append(run)
    return runs


def is_of_one_loss(setting: Setting) -> bool:
    """Whether each loss of a pass has a setting for itself: an --also without the flag has the default."""
    return setting.role is LOSS or setting.name in ("implementation", "mixup", "noise_matrix")


def without_learning_rate(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the learning rate if others have one, by either of its two flags."""
    rates = ("lr", "nloglr")
    if not any(name in given for name in rates):
        return dict(values)
    return {name: value for name, value in values.items() if name not in rates}


def comparable(value: Any) -> Any:
    """A value as it is compared: numbers as floats, 0 and false as None, lists as tuples, files by their names."""
    if isinstance(value, list):
        return tuple(float(item) for item in value)
    if isinstance(value, Path):
        return value.name
    if isinstance(value, int | float):
        return float(value) or None
    return value


def value_compared(name: str, value: Any) -> Any:
    """The value of a setting as it is compared. A file of labels has any name: rows have its content, noise_groups."""
    if name == "noisy_labels" and value is not None:
        return "a file"
    return comparable(value)


def is_compared(setting: Setting) -> bool:
    """Whether runs that differ in a setting are different runs: not where they run, nor where their data lies."""
    return setting.role not in (MACHINE, CALL) and setting.name != "data_path"


COMPARED = tuple(setting for setting in settings.SETTINGS if is_compared(setting))


class RunIndex:
    """The rows of a file, found by the settings of a run that a command gives.

    Args:
        rows: cells by column.
    """

    def __init__(self, rows: Sequence[Mapping[str, str]]) -> None:
        self.rows = rows
        self.values = [values_of(row) for row in rows]
        self.tables: dict[tuple[str, ...], dict[tuple, list[int]]] = {}
        self.others: list[dict[str, bool | None]] = [dict.fromkeys(given_settings(row)) for row in rows]

    def find(self, run: Mapping[str, Any]) -> list[int]:
        """The numbers of the rows that have all settings of a run, and in others what the script fills in."""
        names = tuple(name for name in run if is_compared(BY_NAME[name]))
        if names not in self.tables:
            self.tables[names] = self._table(names)
        key = tuple(value_compared(name, run[name]) for name in names)
        return self.tables[names].get(key, [])

    def _table(self, names: Sequence[str]) -> dict[tuple, list[int]]:
        named = {*names, "seed"}  # who gives no seed asks for the runs of all
        if "lr" in named or "nloglr" in named:
            named |= {"lr", "nloglr"}  # one follows from the other
        table: dict[tuple, list[int]] = {}
        for number, values in enumerate(self.values):
            if not self._has_others(number, named):
                key = tuple(values[name] for name in names)
                table.setdefault(key, []).append(number)
        return table

    def _has_others(self, number: int, named: Set[str]) -> bool:
        """Whether a row has, besides those that are named, a setting which its run has only if the flag is given."""
        return any(self._is_other(number, name) for name in self.others[number].keys() - named)

    def _is_other(self, number: int, name: str) -> bool:
        """Whether a setting of a row is not what the script fills in. It is worked out once, when it is asked for."""
        found = self.others[number][name]
        if found is None:
            values = self.values[number]
            script = settings.script_of(self.rows[number])
            found = values[name] not in filled_in(script, name, values)
            self.others[number][name] = found
        return found


def values_of(row: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for setting in COMPARED:
        values[setting.name] = value_of(setting.name, row.get(setting.name, ""))
    return values


@cache  # most cells of a file are alike
def value_of(name: str, cell: str) -> Any:
    """A cell as it is compared."""
    return value_compared(name, BY_NAME[name].parse(cell))


def given_settings(row: Mapping[str, str]) -> list[str]:
    """The settings that a row has and a flag gives; an empty cell is no setting."""
    return [setting.name for setting in COMPARED if setting.flag and row.get(setting.name, "") != ""]


def filled_in(script: str, name: str, values: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a script may fill in for a setting of a run without the flag. values: of the run's row."""
    if script == settings.HEADS and name in BY_NUMBER_OF_ROWS:
        return (values[name],)
    if name == "m":
        return SCORES.get(script, ())
    if name == "max_letters":
        return (MAX_LETTERS.get(values["dataset"]),)
    if name == "model" and script == settings.KNN:
        return (EMBEDDERS.get(values["dataset"], "preact_resnet18"),)
    if name in ("p_k", "inverse_temperature"):
        return (filled_in_by_loss(script, name, values),)
    return (defaults_of(script).get(name),)


@cache
def defaults_of(script: str) -> Mapping[str, Any]:
    return {name: value_compared(name, value) for name, value in parse_flags(DEFAULTS[script]).items()}


def filled_in_by_loss(script: str, name: str, values: Mapping[str, Any]) -> Any:
    """P_K or the inverse temperature of a run without the flag; whatever its row has of a loss that is not known."""
    from experiments.common.objective import published_p_k  # these load PyTorch, which rows that name both need not
    from topk_losses import METHODS

    method = values["method"]
    if method not in METHODS:
        return values[name]
    if name == "inverse_temperature":
        own = INVERSE_TEMPERATURES.get(values["arm"] or script, {})
        return own.get(method, METHODS[method].inverse_temperature)
    if values["arm"] == "retain":
        weights = [0.0] * int(values["beam_size"])
        weights[0] += 0.5
        weights[-1] += 0.5
        return tuple(weights)
    return tuple(published_p_k(method))


def command_of(row: Mapping[str, str]) -> str:
    """The command that repeats the run of a row, every setting written out."""
    script = settings.script_of(row)
    words = [PYTHON, f"experiments/{script}.py"]
    for setting in settings.SETTINGS:
        cell = row.get(setting.name, "")
        is_own = script in setting.scripts or setting.name in ("data_path", "noisy_labels", "noise_matrix", "nloglr")
        if not is_own or not setting.flag or cell in ("", "false"):
            continue
        if setting.name == "label_noise" and float(cell) == 0:
            continue
        if setting.name == "lr" and row.get("nloglr"):  # from which it follows
            continue
        words.append(setting.flag)
        if setting.kind in (settings.floats, settings.integers):
            words += cell.split()
        elif cell != "true":
            words.append(shlex.quote(cell))
    return " ".join(words)
