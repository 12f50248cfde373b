"""The settings of all runs, one per line. Run names, columns, reports and studies read this list and no other.

To add a flag: one line here, and one `add_argument` in the script or in flags.py.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from experiments.common.paths import portable


class Role(Enum):
    """What a setting is about. Runs can be compared if they differ in LOSS, ARM and TRAINING alone."""

    DATA = "images, embeddings or words, and their labels"
    NETWORK = "the network and its precision"
    LOSS = "an argument of make_loss"
    ARM = "how kNN or beam search uses the loss"
    TRAINING = "the optimization"
    PROTOCOL = "what is evaluated, and when"
    SEED = "random numbers"
    MACHINE = "where it runs: a column, not part of a run's name"
    CALL = "this call only: neither a column nor part of a run's name"


DATA = Role.DATA
NETWORK = Role.NETWORK
LOSS = Role.LOSS
ARM = Role.ARM
TRAINING = Role.TRAINING
PROTOCOL = Role.PROTOCOL
SEED = Role.SEED
MACHINE = Role.MACHINE
CALL = Role.CALL

CIFAR = "train_cifar100"
HEADS = "finetune_imagenet"
KNN = "train_knn"
BEAM = "train_beam_search"
CROSS_ENTROPY = "softmax_cross_entropy"  # the method that others are compared with
UNTRAINED = ("inputs", "pca")  # methods of KNN: neighbours of the inputs, of their principal components
PRETRAINING = "pretraining"  # the pretraining that arms of beam search share
LOWEST = 1e-30  # of inverse temperatures: float32 holds these
HIGHEST = 1e30
LONGEST_READABLE = 200  # characters of a run's name before its hash: file systems allow names of 255
ALL = (CIFAR, HEADS, KNN, BEAM)


def boolean(cell: str) -> bool:
    if cell not in ("true", "false"):
        raise ValueError(f"{cell!r} is neither true nor false")
    return cell == "true"


def floats(cell: str) -> list[float]:
    return [float(word) for word in cell.split()]


def integers(cell: str) -> list[int]:
    return [int(word) for word in cell.split()]


def source(cell: str) -> Path | str:
    """A file, or the address or short name of one."""
    if "://" in cell:
        return cell
    return Path(cell)


def inverse_temperature(cell: str) -> float | str:
    """A number, "auto", or a schedule such as "0.25:4", whose ends have one spelling. Raises ValueError."""
    if cell == "auto":
        return cell
    try:
        numbers = [float(word) for word in cell.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or not all(LOWEST <= number <= HIGHEST for number in numbers):
        raise ValueError(f"it must be a number from {LOWEST:g} to {HIGHEST:g}, auto, or two numbers as in 0.25:4")
    if len(numbers) == 1:
        return numbers[0]
    return ":".join(f"{number:g}" for number in numbers)


@dataclass(frozen=True)
class Setting:
    """A setting of a run, which is a column of results/*.csv.

    Attributes:
        name: name in the configuration and of the column.
        role: what it is about.
        kind: makes a value from a cell.
        flag: how a command gives it; "" for a value that the script computes.
        scripts: the scripts in whose run names it counts.
        unused: the value of a run that does not use the setting. Run names leave it out, so that a flag which is added
            later changes no older name. Its cell is empty in rows of the scripts of `optional`.
        optional: the scripts whose runs are without it unless the flag is given: their cell is empty, 0 or false. In
            other scripts a value is filled in.
    """

    name: str
    role: Role
    kind: Callable[[str], Any]
    flag: str
    scripts: tuple[str, ...] = ()
    unused: Any = None
    optional: tuple[str, ...] = ()

    def parse(self, cell: str) -> Any:
        """The value of a cell; None if it is empty. Raises ValueError for a cell that no run writes."""
        if cell == "":
            return None
        try:
            return self.kind(cell)
        except ValueError as error:
            raise ValueError(f"{self.name} is {cell!r}, which no run writes ({error})") from None

    def is_used(self, value: Any) -> bool:
        return value is not None and value != self.unused


SETTINGS = (
    Setting("dataset", DATA, str, "--dataset", (CIFAR, KNN, BEAM, PRETRAINING)),
    Setting("embeddings", DATA, str, "", (HEADS, KNN)),
    Setting("data_path", DATA, source, "--data_path"),
    Setting("backbone", DATA, str, ""),
    Setting("resolution", DATA, int, ""),
    Setting("labels", DATA, str, ""),
    Setting("embedding_dtype", DATA, str, ""),
    Setting("limit_train", DATA, int, "--limit_train", (*ALL, PRETRAINING), optional=ALL),
    Setting("num_valid", DATA, int, "--num_valid", (HEADS,)),
    Setting("split_seed", DATA, int, "--split_seed", (HEADS,)),
    Setting("label_noise", DATA, float, "--label_noise", (CIFAR,), optional=ALL),
    Setting("noise_groups", DATA, str, "", (CIFAR,)),
    Setting("noisy_labels", DATA, Path, "--noisy_labels", optional=ALL),
    Setting("max_letters", DATA, int, "--max_letters", (BEAM, PRETRAINING)),
    Setting("model", NETWORK, str, "--model", (CIFAR, KNN)),
    Setting("dim", NETWORK, int, "--dim", (KNN,)),
    Setting("hidden_dim", NETWORK, int, "--hidden_dim", (BEAM, PRETRAINING)),
    Setting("hidden_dims", NETWORK, integers, "--hidden_dims", (HEADS, KNN), optional=ALL),
    Setting("apply_relu", NETWORK, boolean, "--apply_relu", (HEADS,), optional=ALL),
    Setting("apply_dropout", NETWORK, boolean, "--apply_dropout", (HEADS,), optional=ALL),
    Setting("precision", NETWORK, str, "--precision", (CIFAR, HEADS, KNN)),
    Setting("method", LOSS, str, "--method", ALL),
    Setting("p_k", LOSS, floats, "--p_k", (CIFAR, HEADS, BEAM)),
    Setting("m", LOSS, int, "--m", (CIFAR, HEADS, BEAM)),
    Setting("inverse_temperature", LOSS, inverse_temperature, "--inverse_temperature", ALL),
    Setting("distribution", LOSS, str, "--distribution", ALL),
    Setting("art_lambda", LOSS, float, "--art_lambda", ALL),
    Setting("top1_mode", LOSS, str, "--top1_mode", (CIFAR, HEADS, BEAM)),
    Setting("label_smoothing", LOSS, float, "--label_smoothing", (CIFAR, HEADS), unused=0.0, optional=ALL),
    Setting("margin", LOSS, float, "--margin", (CIFAR, HEADS), unused=0.0, optional=ALL),
    Setting("noise_rate", LOSS, float, "--noise_rate", (CIFAR, HEADS), unused=0.0, optional=ALL),
    Setting("q", LOSS, float, "--q", (CIFAR, HEADS), optional=ALL),
    Setting("alpha", LOSS, float, "--alpha", (CIFAR, HEADS), optional=ALL),
    Setting("beta", LOSS, float, "--beta", (CIFAR, HEADS), optional=ALL),
    Setting("tau", LOSS, float, "--tau", (CIFAR, HEADS), optional=ALL),
    Setting("arm", ARM, str, "--arm", (BEAM,)),
    Setting("nll_weight", ARM, float, "--nll_weight", (BEAM,)),
    Setting("loss", ARM, str, "--loss", (KNN,)),
    Setting("sorted", ARM, boolean, "--sorted", (KNN,), unused=False, optional=ALL),
    Setting("self_match", ARM, boolean, "--self_match", (KNN,), unused=False, optional=ALL),
    Setting("num_candidates", ARM, int, "--num_candidates", (KNN,)),
    Setting("prediction", ARM, str, "--prediction", (KNN,)),
    Setting("lr", TRAINING, float, "--lr", ALL),
    Setting("nloglr", TRAINING, float, "--nloglr"),
    Setting("lr_schedule", TRAINING, str, "--lr_schedule", (CIFAR,), unused="constant", optional=ALL),
    Setting(
        "weight_decay", TRAINING, float, "--weight_decay", (CIFAR, HEADS, KNN), unused=0.0, optional=(CIFAR, HEADS)
    ),
    Setting("ema", TRAINING, float, "--ema", (CIFAR,), optional=ALL),
    Setting("mixup", TRAINING, float, "--mixup", (HEADS,), optional=ALL),
    Setting("noise_matrix", TRAINING, Path, "--noise_matrix", optional=ALL),
    Setting("noise_matrix_id", TRAINING, str, "", (HEADS,)),
    Setting("batch_size", TRAINING, int, "--batch_size", (*ALL, PRETRAINING)),
    Setting("n_epochs", TRAINING, int, "--n_epochs", (CIFAR, HEADS, KNN)),
    Setting("implementation", PROTOCOL, str, "--implementation", (CIFAR, HEADS)),
    Setting("eval_freq", PROTOCOL, int, "--eval_freq", (CIFAR, HEADS), optional=(CIFAR,)),
    Setting("k", PROTOCOL, int, "--k", (KNN,)),
    Setting("beam_size", PROTOCOL, int, "--beam_size", (BEAM,)),
    Setting("n_updates", PROTOCOL, int, "--n_updates", (BEAM,)),
    Setting("pretrain_updates", PROTOCOL, int, "--pretrain_updates", (BEAM, PRETRAINING)),
    Setting("pretrain_lr", PROTOCOL, float, "--pretrain_lr", (BEAM, PRETRAINING)),
    Setting("seed", SEED, int, "--seed", (*ALL, PRETRAINING)),
    Setting("order_seed", SEED, int, "", (HEADS,)),
    Setting("data_dir", MACHINE, Path, "--data_dir"),
    Setting("device", MACHINE, str, "--device"),
    Setting("threads", MACHINE, int, "--threads"),
    Setting("compile", MACHINE, boolean, "--compile"),
    Setting("results", CALL, Path, "--results"),
    Setting("force", CALL, boolean, "--force"),
    Setting("checkpoint_seconds", CALL, float, "--checkpoint_seconds"),
    Setting("also", CALL, str, "--also"),
    Setting("stream", CALL, boolean, "--stream"),
    Setting("cache_dir", CALL, str, "--cache_dir"),
    Setting("sha256", CALL, str, "--sha256"),
    Setting("requester_pays", CALL, boolean, "--requester_pays"),
)
BY_NAME = {setting.name: setting for setting in SETTINGS}
BY_FLAG = {setting.flag: setting for setting in SETTINGS if setting.flag}
BY_FLAG |= {"-d": BY_NAME["data_path"], "-m": BY_NAME["m"], "-p_k": BY_NAME["p_k"], "--seeds": BY_NAME["seed"]}
# What only some losses have; each is an argument of make_loss of the same name.
OWN_SETTINGS = tuple(setting.name for setting in SETTINGS if setting.role is LOSS and setting.optional)


def with_role(*roles: Role) -> list[Setting]:
    return [setting for setting in SETTINGS if setting.role in roles]


def identifying(script: str) -> list[Setting]:
    """The settings on which the names of a script's runs depend."""
    return [setting for setting in SETTINGS if script in setting.scripts]


def script_of(row: Mapping[str, Any]) -> str:
    """The script that made a row, by the cells that only its rows have; a file may have rows of several scripts.

    A configuration has these settings, too.
    """
    if row.get("arm"):
        return BEAM
    if row.get("k") or row.get("prediction"):
        return KNN
    if row.get("order_seed"):
        return HEADS
    return CIFAR


def used(config: Mapping[str, Any], among: Iterable[Setting]) -> dict[str, Any]:
    """The values of those settings that a run uses."""
    return {item.name: config[item.name] for item in among if item.is_used(config.get(item.name))}


def run_id(script: str, config: Mapping[str, Any], readable: str) -> str:
    """Name a run: the template, filled in, then ten digits of a hash of the settings that identify it."""
    identity = used(config, identifying(script))
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    shown = {name: cell(value).replace(" ", "_") for name, value in config.items()}
    filled = readable.format_map(shown)[:LONGEST_READABLE]
    return re.sub(r"[^A-Za-z0-9._-]", "_", f"{filled}-{digest[:10]}")


def columns(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run as its row has them, without those of the call.

    A setting that is not used is None in scripts whose runs are without it unless the flag is given. In others its
    value stands there: the weight decay 0 of a script whose default is another.
    """
    script = script_of(config)
    row = {}
    for name, value in config.items():
        if name not in BY_NAME:
            raise ValueError(f"{name} is no setting: give it a line in experiments/common/settings.py")
        setting = BY_NAME[name]
        if setting.role is CALL:
            continue
        if isinstance(value, Path):
            value = portable(value)
        row[name] = value
        if script in setting.optional and not setting.is_used(value):
            row[name] = None
    return row


def cell(value: Any) -> str:
    """A value in a CSV: None is empty, floats keep all digits, lists are joined by spaces."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return " ".join(cell(item).removesuffix(".0") for item in value)
    return str(value)
