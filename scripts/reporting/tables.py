"""Rows of a results file beside the published ones: grouped over seeds, compared where that is fair, or refused.

What makes runs comparable with a published value, the precise rule: every setting that results/paper/ states for the
row (protocols.csv for the table, the row's own line for its loss and whatever is its own) is equal, no --limit_train,
--limit_test, --label_noise, --weight_decay (unless published) or --ema is set, the learning rate is constant, and the
precision is fp32. A setting whose published value is unknown (an empty cell) is not asked for. Otherwise the row has no
difference to the published value, and the caption gives the reason.

What a table refuses: a cell whose runs differ in anything but the seed, and a table whose rows differ in anything but
the loss and its settings, the learning rate and the embeddings. Thus a caption can say what all runs were.
"""

import math
import shlex
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from experiments.common.flags import ROOT
from experiments.common.neighbours import UNTRAINED
from scripts.reporting.results import KNOWN_METHODS, Row, check, differing, float_of
from scripts.shared.program import CommandLineError
from scripts.shared.run_record import COLUMNS
from topk_losses import RELAXATIONS

PAPER = ROOT / "results" / "paper"
METRICS = {"test_top1": "top-1", "test_top5": "top-5"}
# Flags that leave the experiment what it is: where and how fast it is computed, and where files lie. nloglr is a way to
# write lr; the order of the training rows goes with the seed.
SAME_EXPERIMENT = frozenset(
    {"data_dir", "mirror", "data_path", "batches", "device", "compile", "graph", "threads", "deterministic", "nloglr"}
)
SEEDS = ("seed", "order_seed")
# Columns that are no flags but say which data a run saw.
DATA_SEEN = ("num_classes", "train_images", "valid_images", "test_images")
EMBEDDINGS = ("embeddings", "embedding_dtype", "backbone", "resolution")
# What may differ between the rows of a table, though never within one.
OF_A_ROW = (
    *("method", "p_k", "m", "inverse_temperature", "distribution", "art_lambda", "top1_mode", "lr"),
    *("loss", "sorted", "prediction", "num_candidates", "self_match"),
    *EMBEDDINGS,
)
# And what a table of settings, report.py --paired, sets side by side besides.
TRIED = ("n_epochs", "batch_size", "lr_schedule", "label_smoothing", "weight_decay", "margin", "ema")
VARIANT = ("loss", "sorted", "prediction")  # of the nearest-neighbour classifier: lines of one method of their own
OF_ALL = {"loss": "mass", "prediction": "neighbours"}  # of which a line says nothing
# On a published row's own line.
LOSS_SETTINGS = ("resolution", "inverse_temperature", "distribution", "art_lambda", "k", "n_epochs", "num_candidates")
# A run with another value is cheaper, or of other data, than any published one.
WHOLE_RUN = {
    **{name: (("", "0.0"), "") for name in ("limit_train", "limit_test", "label_noise")},
    "precision": (("", "fp32"), " (not fp32)"),
    **{name: (("",), "") for name in ("lr_schedule", "weight_decay", "ema")},
}
MEASURED = (
    "Test accuracy in percent where validation accuracy was best, mean ± sample standard deviation over the seeds."
)
USUAL_SEEDS = 2  # per row, in scripts/table*.sh, where the paper does not say how many it took


@dataclass
class Line:
    """A published row (empty: ours alone), another by others (rerun) and the runs of ours beside it (none: not run).

    reasons: why the runs are not comparable; none if they are.
    """

    name: str
    method: str
    p_k: str
    published: Row = field(default_factory=dict)
    rerun: Row = field(default_factory=dict)
    runs: list[Row] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    @property
    def own_p_k(self) -> str:
        """That of its runs, or the published one where there are none."""
        return self.runs[0].get("p_k", "") if self.runs else self.p_k

    def value(self, metric: str) -> float | None:
        """The published accuracy, a fraction; None where it is not known."""
        return float(self.published[metric]) if self.published.get(metric) else None

    def mean(self, metric: str) -> float:
        """The mean over the seeds, a fraction."""
        return statistics.fmean(float(run[metric]) for run in self.runs)

    def std(self, metric: str) -> float | None:
        """The sample standard deviation (n - 1) over the seeds; None for one seed."""
        return statistics.stdev(float(run[metric]) for run in self.runs) if len(self.runs) > 1 else None

    def difference(self, metric: str) -> float | None:
        """Our mean minus the published value; None where there is none or they are not comparable."""
        known = self.runs and not self.reasons and self.value(metric) is not None
        return self.mean(metric) - self.value(metric) if known else None


@dataclass(frozen=True)
class Table:
    """A whole table. decimals: of the percentages, by metric: METRICS that there are. protocol: the published one."""

    name: str
    lines: list[Line]
    caption: str
    decimals: dict[str, int]
    num_seeds: int
    implementation: str
    protocol: Row

    @property
    def run_lines(self) -> list[Line]:
        """The lines that have runs of ours."""
        return [line for line in self.lines if line.runs]


def read_published(table: str | None) -> tuple[list[Row], Row]:
    """Return the rows of a table of results/paper/ and its protocol; nothing where there is none."""
    if table is None:
        return [], {}
    rows, protocols = (
        pd.read_csv(PAPER / f"{name}.csv", dtype=str, keep_default_na=False).to_dict("records")
        for name in (table, "protocols")
    )
    return rows, next(each for each in protocols if each["table"] == table)


def build_table(name: str, runs: Sequence[Row], table: str | None) -> Table:
    """Return the table of the runs (none: nothing has run yet) beside the rows of a published one (None: alone).

    Raises CommandLineError for runs that do not belong in one table.
    """
    if runs:
        _refuse(name, mixed_in(name, runs), "a table reports one schedule, subset, precision and implementation", runs)
    published, protocol = read_published(table)
    lines: dict[tuple, Line] = {}
    for row in published:
        key = _key(row) if row["method"] else (len(lines),)
        stands_for = f" ({row['method']})" if row["method"] else ""
        line = lines.setdefault(key, Line(row["published_name"] + stands_for, row["method"], row["p_k"], row))
        if line.published is not row:
            line.rerun = row
    ours_alone = []
    has_backbones = len({run.get("backbone") for run in runs}) > 1
    groups: dict[tuple, list[Row]] = {}
    for run in runs:
        groups.setdefault(_key(run), []).append(run)
    for key, group in groups.items():
        first, (method, _, backbone, *variant) = group[0], key
        what = f"the row {method} {shown_p_k(first.get('p_k', ''))}".rstrip()
        mixed = differing(group, [each for each in OF_A_ROW if each != "p_k"])
        rule = "a cell holds the seeds of one experiment (--paired and --temperatures set several side by side)"
        _refuse(what, mixed, rule, group, f"{method}:")
        seed, count = Counter(run["seed"] for run in group).most_common(1)[0]
        if count > 1:
            of_seed = [run for run in group if run["seed"] == seed]
            orders = {"order_seed": [run.get("order_seed", "") for run in of_seed]}
            rule = f"seed {seed} is there {count} times, and each seed counts once"
            _refuse(what, orders, rule, of_seed, f"{method}:")
        line = lines.get(key) or lines.get((method, (), backbone, *variant))  # one whose P_K is not known takes any
        if line is None:
            told = [cell for name, cell in zip(VARIANT, variant) if cell != OF_ALL.get(name)]
            told = ["sorted" if cell == "true" else cell for cell in (*told, backbone * has_backbones)]
            line = Line(", ".join(filter(None, [method, *told])), method, first.get("p_k", ""))
            ours_alone.append(line)
        mixed = differing([*line.runs[:1], first], ["p_k"])
        _refuse(line.name, mixed, "it is one published row", group, f"{method}:")
        line.runs = group
        line.reasons = not_comparable(first, line.published, protocol) if line.published else []
    ours_alone.sort(key=lambda line: (KNOWN_METHODS.index(line.method), p_k_of(line.p_k)))
    every, num_seeds = [*lines.values(), *ours_alone], int(protocol.get("n_seeds") or USUAL_SEEDS)
    metrics = [metric for metric in METRICS if not runs or metric in runs[0]]
    decimals = {metric: max((digits(row[metric]) for row in published if row[metric]), default=2) for metric in metrics}
    caption = _caption(name, runs, every, published, protocol, num_seeds)
    implementation = (runs[0].get("implementation") if runs else None) or "ours"
    return Table(name, every, caption, decimals, num_seeds, implementation, protocol)


def digits(cell: str) -> int:
    """Return how many digits the percentage of a fraction has that is given with so many."""
    return max(len(cell.partition(".")[2]) - 2, 0)


def mixed_in(name: str, runs: Sequence[Row], may: Sequence[str] = OF_A_ROW) -> dict[str, list[str]]:
    """Return the cells of each column that differs between runs and must not in one table. may: those that may.

    Raises CommandLineError.
    """
    # A majority of neighbours is one label, and a mass of k neighbours that of one k.
    of_ranks = () if "prediction" in runs[0] else ("p_k", "test_top5")
    check(Path(f"{name}.csv"), runs, ("method", *of_ranks, "seed", "test_top1"))
    mixed: dict[str, list[str]] = {}
    for column in identity_columns(runs[0]):  # what is not trained has no settings of training
        if column not in may:
            mixed |= differing([run for run in runs if run[column] or run["method"] not in UNTRAINED], [column])
    return mixed


def experiments_of(name: str, runs: Sequence[Row], may: Sequence[str] = OF_A_ROW) -> list[list[Row]]:
    """Divide runs into those of one table each; what is not trained stands in each that it fits. may: as above."""
    mixed = mixed_in(name, runs, may)
    parts: dict[tuple[str, ...], list[Row]] = {}
    for run in sorted(runs, key=lambda run: run["method"] in UNTRAINED):
        cells = tuple(run[column] for column in mixed)
        fitting = [key for key in parts if all(not cell or cell == other for cell, other in zip(cells, key))]
        for key in fitting if run["method"] in UNTRAINED and fitting else [cells]:
            parts.setdefault(key, []).append(run)
    return list(parts.values())


def _refuse(what: str, mixed: Mapping[str, list[str]], rule: str, runs: Sequence[Row], method: str = "") -> None:
    """Raise CommandLineError if columns are mixed, with the advice to keep what most runs have of the first."""
    if mixed:
        told = ", ".join(f"{name} {_and([cell or '(empty)' for cell in cells])}" for name, cells in mixed.items())
        column = next(iter(mixed))
        choice = Counter(run.get(column, "") for run in runs).most_common(1)[0][0]
        raise CommandLineError(
            f"{what} mixes {told}: {rule}; choose with --where {shlex.quote(f'{method}{column}={choice}')}"
        )


def not_comparable(run: Row, published: Row, protocol: Row) -> list[str]:
    """Return the settings of a run that are not the published ones, each as a phrase; see the head of this file."""
    reasons = []
    expected = {name: cell for name, cell in protocol.items() if name not in ("table", "title", "n_seeds", "source")}
    expected |= {name: published[name] for name in LOSS_SETTINGS if published.get(name)}
    for name, cell in expected.items():
        if not cell or (name in ("m", "top1_mode") and run["method"] not in RELAXATIONS):
            continue
        if not _same(run.get(name, ""), "" if cell == "none" else cell):
            reasons.append(f"{name} {run.get(name) or 'none'} (published: {cell})")
    for name, (whole, rule) in WHOLE_RUN.items():
        if not expected.get(name) and run.get(name, "") not in whole:
            reasons.append(f"{name} {run[name]}{rule}")
    return reasons


def identity_columns(run: Row) -> list[str]:
    """Return the columns that make another experiment, the seed left out: the data seen, and every flag that is not
    known to leave the experiment what it is."""
    no_flags = {*COLUMNS, *SAME_EXPERIMENT, *SEEDS} - {*DATA_SEEN, *EMBEDDINGS}
    return [name for name in run if name not in no_flags]


def p_k_of(cell: str) -> tuple[float, ...]:
    """Return a cell's P_K without the zeros at its end."""
    numbers = [float(each) for each in cell.split()]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def shown_p_k(cell: str) -> str:
    """Return a cell's P_K as the paper writes it: [.5, 0, 0, 0, .5]."""
    return f"[{', '.join(f'{float(each):g}'.removeprefix('0') or '0' for each in cell.split())}]" if cell else ""


def run_summary(runs: Sequence[Row], protocol: Row, num_lines: int) -> str:
    """Return in one sentence what the runs were: epochs, subset, precision, seeds, device, versions."""
    first = next((run for run in runs if run["method"] not in UNTRAINED), runs[0])
    number = first.get("n_epochs") or "an unknown number of"
    of_published = protocol.get("n_epochs") and not _same(first.get("n_epochs", ""), protocol["n_epochs"])
    settings = ("k", "limit_train", "limit_test", "label_noise", "weight_decay", "ema")
    seeds = sorted({run.get("seed", "") for run in runs}, key=lambda seed: (float_of(seed) or 0, seed))
    stores = (f"{run.get('embeddings')} ({run.get('backbone') or 'backbone not known'})" for run in runs)
    devices = (run.get("device_name") or run.get("device") or "a device not recorded" for run in runs)
    versions = [run["torch_version"] for run in runs if run.get("torch_version")]
    parts = [
        f"{first['dataset']}, {first.get('model', '')}" if first.get("dataset") and "title" not in protocol else "",
        f"embeddings {_and(stores)}" if first.get("embeddings") else "",
        f"{number} epoch{'s' * (number != '1')}"
        + (f" of the published {protocol['n_epochs']}" if of_published else ""),
        *(f"{name} {first[name]}" for name in settings if float_of(first.get(name, ""))),
        f"{first['lr_schedule']} learning rate" if first.get("lr_schedule") else "",
        first.get("precision", ""),
        f"seed{'s' * (len(seeds) > 1)} {_and(seeds)}",
        f"on {_and(devices)}",
        f"PyTorch {_and(versions)}" if versions else "",
    ]
    which = "difftopk's losses, " if first.get("implementation") == "difftopk" else ""
    return f"{which}{', '.join(filter(None, parts))}; {num_lines} row{'s' * (num_lines != 1)} run"


def _caption(
    name: str, runs: Sequence[Row], lines: Sequence[Line], published: Sequence[Row], protocol: Row, num_seeds: int
) -> str:
    run_lines = [line for line in lines if line.runs]
    first_hand = [row for row in published if row["second_hand"] == "false"]
    known = any(row["test_top1"] or row["test_top5"] for row in first_hand)
    sources = list(dict.fromkeys(row["source"] for row in first_hand))
    seeds = f", mean of {protocol['n_seeds']} seeds" if protocol.get("n_seeds") else ""
    unknown = [line.name for line in run_lines if line.published and not line.p_k and line.runs[0].get("p_k")]
    sentences = {  # each where its condition holds
        f"{protocol.get('title') or name}.": True,
        MEASURED: True,
        f"Ours ({name}.csv): {run_summary(runs, protocol, len(run_lines)) if runs else 'not run'}.": True,
        f"Rows with fewer than the {num_seeds} seeds that the table asks for say so.": any(
            len(line.runs) < num_seeds for line in run_lines
        ),
        _reasons([line for line in run_lines if line.published]): any(line.reasons for line in run_lines),
        f"Published: {''.join(sources[:1])}{seeds}{'' if known else '; its values are not known here'}.": published,
        f"Rerun: {_and(sources[1:])}.": len(sources) > 1,
        f"The published P_K of {_and(unknown)} is not known; the one shown is ours.": unknown,
        "†: second-hand, read in a note about a paper.": any(row["second_hand"] == "true" for row in published),
        "≈: approximate in the source.": any(row["approximate"] for row in published),
    }
    return " ".join(sentence for sentence, holds in sentences.items() if holds)


def _reasons(lines: Sequence[Line]) -> str:
    """What every line shares is said once; the rest names its lines."""
    refused = [line for line in lines if line.reasons]
    shared = (
        [reason for reason in refused[0].reasons if all(reason in line.reasons for line in lines)] if refused else []
    )
    parts = [", ".join(shared)]
    for line in refused:
        if own := [reason for reason in line.reasons if reason not in shared]:
            parts.append(f"{line.name} {shown_p_k(line.own_p_k)}".rstrip() + f": {', '.join(own)}")
    whose = "These runs are not" if len(refused) == len(lines) else "Not"
    return f"{whose} comparable with the published values, hence no difference: {'; '.join(filter(None, parts))}."


def _key(row: Row) -> tuple:
    """Method, P_K, backbone, and what VARIANT names."""
    return row["method"], p_k_of(row.get("p_k", "")), row.get("backbone", ""), *(row.get(name, "") for name in VARIANT)


def _same(cell: str, other: str) -> bool:
    """Whether two cells say the same; numbers to the digits that results/paper/ gives them."""
    numbers = float_of(cell), float_of(other)
    if None not in numbers:
        return math.isclose(*numbers, rel_tol=1e-6)
    return cell == other or (not cell and numbers[1] == 0)


def _and(words: Iterable[str]) -> str:
    """Different words in the order in which they come."""
    words = list(dict.fromkeys(words))
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
