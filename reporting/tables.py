"""Tables of results: published values, this repository's runs and yours; each configuration minus another method.

A table has a line per configuration, with the numbers of each accuracy; `cells` makes text of it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import pandas as pd

from experiments.common import settings
from experiments.common.paths import PAPER
from experiments.common.settings import LOSS
from reporting import markdown
from reporting.compare import (
    FEW_SEEDS,
    Agreement,
    Interval,
    Pool,
    Spread,
    agreement,
    belongs_to,
    from_published,
    interval,
    mean,
    paired,
    pooled_spread,
    spread,
)
from reporting.frames import (
    EXPERIMENT,
    LAST_VALID,
    METRICS,
    VALID,
    accuracies_of,
    as_text,
    experiment,
    identity_of,
    lines_of,
    p_k_of,
    read_protocol,
    read_published,
    read_text,
    same_configuration,
)
from studies.tuning import DIGITS
from topk_losses import METHODS, RELAXATIONS

VARIANT = ("loss", "sorted", "prediction")  # of the nearest-neighbour classifier: lines of one method of their own
# On a published row's own line.
STATED = ("resolution", "inverse_temperature", "distribution", "art_lambda", "k", "n_epochs", "num_candidates")
# What no published run has.
UNPUBLISHED = (
    *("limit_train", "label_noise", "noise_groups", "noise_matrix_id", "mixup"),
    *(item.name for item in settings.with_role(LOSS) if item.optional),
    *("labels", "lr_schedule", "ema", "weight_decay", "precision", "eval_freq"),
)
# The words for what published runs have instead.
PLAIN = {"labels": "right", "lr_schedule": "constant", "precision": "fp32"}
DATA = ("dataset", "num_classes")  # what makes a published table comparable at all
STD_NOTE = "± standard deviation over seeds"
TESTED = "Test accuracy in percent at the best validation epoch, {std}."
UNTESTED = "Validation accuracy in percent at the last epoch, {std}: no run has a test split."
PARTLY = "{names}: validation accuracy at the last epoch, where runs have no test split."


class Configuration:
    """The runs of one configuration: the repository's, and yours.

    Args:
        both: all its runs.
        is_yours: which of them are yours.
    """

    def __init__(self, both: pd.DataFrame, is_yours: pd.Series) -> None:
        self.first = both.iloc[0]
        self.runs = both
        self.repository = both[~is_yours.loc[both.index]]
        self.yours = both[is_yours.loc[both.index]]


NO_GAIN = Interval(math.nan, math.nan)


@dataclass
class Numbers:
    """What a line says of one accuracy, in percent and in points; NaN or None where it says nothing.

    Attributes:
        mean: of the repository's runs.
        std: their sample standard deviation.
        published: the published value.
        rerun: what others measured of the published row.
        difference: mean minus published, of runs with the published settings.
        gain: the difference to a baseline, paired by seed.
        verdict: your runs beside the repository's.
        from_published: your runs minus the published value.
    """

    mean: float = math.nan
    std: float = math.nan
    published: float = math.nan
    rerun: float = math.nan
    difference: float = math.nan
    gain: Interval = NO_GAIN
    verdict: Agreement | None = None
    from_published: Interval | None = None


@dataclass
class Line:
    """A line of a table.

    Attributes:
        method: of its runs, or the title of its published row.
        numbers: of each accuracy, by its column.
        configuration: its runs; None of a published row that was not run.
        p_k: of a published row that was not run.
        public: what the published row says of the embeddings.
        is_as_published: whether the runs have the settings of a published row.
        not_as_published: the settings that are not the published ones.
        n_seeds: number of the repository's runs; NaN of a published method that is not in the library.
        validation: mean of the validation accuracies that choose, in a table of gains.
        pairs: number of seeds that the baseline has too; NaN without a baseline.
    """

    method: str
    numbers: dict[str, Numbers]
    configuration: Configuration | None = None
    p_k: str = ""
    public: str = ""
    is_as_published: bool = False
    not_as_published: str = ""
    n_seeds: float = math.nan
    validation: Numbers | None = None
    pairs: float = math.nan

    def setting(self, name: str) -> object:
        """The value of a setting; NaN where the line has none."""
        if name == "method":
            return self.method
        if self.configuration is not None:
            return self.configuration.first[name]
        if name == "p_k":
            return self.p_k
        return math.nan


@dataclass
class Table:
    """Lines of numbers, and what stands above and below them.

    Attributes:
        name: of the results file, without its ending.
        lines: one per configuration.
        settings: columns of settings, in their order.
        metrics: columns of accuracies, with what tables call them.
        digits: decimals of each accuracy.
        has_yours: whether your runs stand beside the repository's.
        published: whose the published values are, and where they were read.
        published_seeds: number of seeds whose mean is published; "" if it is not known.
    """

    name: str
    lines: list[Line]
    settings: list[str]
    metrics: dict[str, str]
    caption: str
    source: str
    digits: dict[str, int] = field(default_factory=dict)
    has_yours: bool = False
    published: str = ""
    published_seeds: str = ""

    @property
    def has_published(self) -> bool:
        """Whether any line has a published accuracy."""
        return any(not math.isnan(numbers.published) for line in self.lines for numbers in line.numbers.values())

    @property
    def has_other_pairs(self) -> bool:
        """Whether the baseline lacks seeds of a line."""
        return any(not math.isnan(line.pairs) and line.pairs != line.n_seeds for line in self.lines)


def library_order(method: str) -> int:
    """The place of a method in the library; others stand first."""
    if method not in METHODS:
        return -1
    return list(METHODS).index(method)


def published_table(name: str, runs: pd.DataFrame) -> str:
    """The published table that belongs to a file, by its name or its data; "" if there is none."""
    tables = set(read_text(PAPER / "protocols.csv")["table"])
    stem = name.removesuffix("_short").replace("table2_3", "tables2_3").replace("cifar100", "table1")
    if "prediction" in runs:
        stem = f"knn_{' '.join(set(runs['dataset']))}"
    elif stem not in tables and "embeddings" in runs:
        classes = set(runs["num_classes"])
        stem = {(1000.0,): "tables2_3_imagenet1k", (10450.0,): "tables2_3_imagenet21k"}.get(tuple(classes), "")
    if stem not in tables:
        return ""
    return stem


def not_as_published(run: pd.Series, published: Mapping[str, str], protocol: Mapping[str, str]) -> str:
    """The settings of a run that are not the published ones, with those in brackets.

    A setting whose published value is not known, an empty cell, is not compared.
    """
    expected = {name: cell for name, cell in protocol.items() if cell and name not in ("title", "n_seeds", "source")}
    for name in STATED:
        if published.get(name):
            expected[name] = published[name]
    if run["method"] not in RELAXATIONS:
        for name in ("m", "top1_mode", "self_match"):  # what only a loss with a relaxation has
            expected.pop(name, None)
    found = differences(run, expected)
    for name in UNPUBLISHED:
        own = text_of(run, name)
        if own and name not in expected and not is_same(own, PLAIN.get(name, "none")):
            found.append(f"{name} {own}")
    return ", ".join(found)


def other_data(run: pd.Series, protocol: Mapping[str, str]) -> str:
    """What of a run's data is not that of a published table, with that in brackets; "" if all of it is."""
    stated = {name: protocol[name] for name in DATA if protocol.get(name)}
    return ", ".join(differences(run, stated))


def differences(run: pd.Series, expected: Mapping[str, str]) -> list[str]:
    """The settings of a run that are not the expected ones, with those in brackets."""
    found = []
    for name, cell in expected.items():
        own = text_of(run, name)
        if not is_same(own, cell):
            found.append(f"{name} {own or 'none'} ({cell})")
    return found


def text_of(run: pd.Series, name: str) -> str:
    if name not in run:
        return ""
    return markdown.setting("", run[name])


def is_same(cell: str, published: str) -> bool:
    """Whether a cell says what is published; numbers to the digits that results/paper/ gives them."""
    try:
        return math.isclose(float(cell or 0), float(published.replace("none", "0")), rel_tol=1e-5)
    except ValueError:
        return cell == published


def matches(run: Mapping[str, object], row: Mapping[str, str]) -> bool:
    """Whether a run is of a published row that has a method; one whose P_K is not known takes any."""
    if not row.get("method"):
        return False
    for name in ("method", "backbone", *VARIANT):
        if run.get(name, "") != row.get(name, ""):
            return False
    weights = p_k_of(row["p_k"])
    return weights == () or weights == p_k_of(str(run.get("p_k", "")))


def percentages(row: Mapping[str, str], metrics: Mapping[str, str]) -> dict[str, float]:
    """The accuracies of a published row in percent; NaN where none is published."""
    values = {}
    for metric in metrics:
        values[metric] = math.nan
        if row.get(metric):
            values[metric] = 100 * float(row[metric])
    return values


def configurations(repository: pd.DataFrame, yours: pd.DataFrame) -> list[Configuration]:
    """The configurations of two files, those of the first one first."""
    both = pd.concat([repository, yours], ignore_index=True)
    is_yours = pd.Series(both.index >= len(repository), index=both.index)
    for name in both:
        if both[name].dtype == object:
            both[name] = both[name].fillna("")
    if yours.empty:
        groups = lines_of(both)
    else:
        keys = same_configuration(both)
        groups = [group for _, group in both.groupby(keys, sort=False)]
    return [Configuration(group, is_yours) for group in groups]


def columns_of_settings(found: Sequence[Configuration]) -> tuple[list[str], markdown.Shared]:
    """The settings in which configurations differ, with method and P_K, and what they share."""
    firsts = pd.DataFrame([item.first for item in found]).reset_index(drop=True)
    identity = identity_of(firsts, ("method", "p_k"))
    own, shared = markdown.settings_of(firsts, identity)
    names = ["method"]
    if "p_k" in firsts:
        names.append("p_k")
    return names + own, shared


def beside_published(
    name: str,
    repository: pd.DataFrame,
    yours: pd.DataFrame | None = None,
    table: str = "",
    metrics: Mapping[str, str] | None = None,
    similar: pd.DataFrame | None = None,
) -> Table:
    """Every configuration beside the published row of its method and P_K; a published row without runs is not run.

    The published table counts only for runs on its data set.

    Args:
        name: of the results file, without its ending.
        yours: your runs; without them there are no verdicts.
        table: of results/paper/, or "".
        metrics: columns of percentages, with what tables call them (default: the accuracies that the runs have).
        similar: runs of the same data and schedule, whose spread serves where the repository has one seed of each run.
    """
    if yours is None:
        yours = repository.iloc[:0]
    both = pd.concat([repository, yours])
    if metrics is None:
        metrics = accuracies_of(both)
    metrics = {metric: label for metric, label in metrics.items() if metric in both}
    found = configurations(repository, yours)
    names, shared = columns_of_settings(found)
    if all(other_data(item.first, read_protocol(table)) for item in found):
        table = ""
    protocol = read_protocol(table)
    rows = [dict(row) for row in read_published(table).to_dict("records")]
    lines, left = published_lines(found, rows, protocol, metrics)
    left.sort(key=lambda item: library_order(item.first["method"]))
    for item in left:
        line = line_of(item, metrics)
        line.not_as_published = other_data(item.first, protocol)
        lines.append(line)
    has_yours = len(yours) > 0
    if has_yours:
        add_verdicts(lines, metrics, similar)
        add_published_differences(lines, metrics, protocol)
    digits = {metric: digits_of(metric, rows) for metric in metrics}
    caption = accuracy_caption(metrics)
    if protocol:
        caption = f"{protocol['title']}. {caption}"
    published = about_published(rows, protocol)
    source = f"{markdown.origin(name, both, shared)} {published}".strip()
    seeds = protocol.get("n_seeds", "")
    return Table(name, lines, names, metrics, caption, source, digits, has_yours, published, seeds)


def published_lines(
    found: Sequence[Configuration],
    rows: Sequence[Mapping[str, str]],
    protocol: Mapping[str, str],
    metrics: Mapping[str, str],
) -> tuple[list[Line], list[Configuration]]:
    """The lines of a published table, and the configurations that it does not have."""
    all_lines: list[Line] = []
    left = list(found)
    comparable = [item for item in found if not other_data(item.first, protocol)]
    stated: list[tuple[Mapping[str, str], list[Line]]] = []  # the published rows so far, with their lines
    for row in rows:
        values = percentages(row, metrics)
        again = lines_stated(stated, row)
        if again:  # the same row by others
            for line in again:
                for metric, value in values.items():
                    line.numbers[metric].rerun = value
            continue
        lines = []
        for item in [item for item in comparable if item in left and matches(item.first, row)]:
            left.remove(item)
            line = line_of(item, metrics)
            line.not_as_published = not_as_published(item.first, row, protocol)
            line.is_as_published = not line.not_as_published
            lines.append(line)
        if not lines:
            n_seeds = 0.0 if row["method"] else math.nan
            nothing = {metric: Numbers() for metric in metrics}
            lines.append(Line("", nothing, p_k=row.get("p_k", ""), n_seeds=n_seeds))
        for line in lines:
            add_published(line, row, values)
        all_lines += lines
        stated.append((row, lines))
    return all_lines, left


def add_published(line: Line, row: Mapping[str, str], values: Mapping[str, float]) -> None:
    """Put a published row on a line. values: its accuracies in percent."""
    line.method = title_of(row)
    line.public = row.get("public", "")
    for metric, value in values.items():
        numbers = line.numbers[metric]
        numbers.published = value
        if line.is_as_published:
            numbers.difference = numbers.mean - value


def lines_stated(stated: Sequence[tuple[Mapping[str, str], list[Line]]], row: Mapping[str, str]) -> list[Line]:
    """The lines of earlier published rows that are the same row."""
    found = []
    for earlier, lines in stated:
        if matches(row, earlier):
            found += lines
    return found


def title_of(row: Mapping[str, str]) -> str:
    """The published name of a row, with the method here."""
    title = row["published_name"]
    if row["method"]:
        title += f" ({row['method']})"
    if row["second_hand"] == "true":
        title += "†"
    if row.get("approximate"):
        title += "≈"
    return title


def line_of(item: Configuration, metrics: Mapping[str, str]) -> Line:
    """The numbers of a configuration."""
    numbers = {}
    for metric in metrics:
        accuracies = item.repository[metric]
        numbers[metric] = Numbers(mean(accuracies), accuracies.std())
    return Line(item.first["method"], numbers, item, n_seeds=float(len(item.repository)))


def add_verdicts(lines: Sequence[Line], metrics: Mapping[str, str], similar: pd.DataFrame | None) -> None:
    """Compare your runs of each line with the repository's. similar: as in `beside_published`."""
    compared = [(line, line.configuration) for line in lines if line.configuration is not None]
    groups = [item.repository for _, item in compared]
    if similar is not None and max(map(len, groups), default=0) <= 1:
        groups = [item.repository for item in configurations(similar, similar.iloc[:0])]
    for metric in metrics:
        pool = pooled_spread([spread(runs[metric]) for runs in groups])
        for line, item in compared:
            repository = item.repository[metric]
            line.numbers[metric].verdict = agreement(item.yours[metric], repository, pool_for(repository, pool))


def add_published_differences(lines: Sequence[Line], metrics: Mapping[str, str], protocol: Mapping[str, str]) -> None:
    """Compare your runs that have the published settings with the published values.

    How the published runs spread over seeds is not known. The interval takes the spread of runs with these settings.
    """
    n_seeds = float(protocol.get("n_seeds") or math.nan)
    as_published = [(line, line.configuration) for line in lines if line.configuration and line.is_as_published]
    for metric in metrics:
        groups = []
        for _, item in as_published:
            groups += [spread(item.yours[metric]), spread(item.repository[metric])]
        pool = pooled_spread(groups)
        for line, item in as_published:
            yours = item.yours[metric].dropna()
            own: Spread | Pool = pool
            if not belongs_to(spread(yours), pool):
                own = spread(yours)
            numbers = line.numbers[metric]
            numbers.from_published = from_published(yours, numbers.published, n_seeds, own)


def pool_for(repository: pd.Series, pool: Pool) -> Pool | None:
    """The pooled spread, if the repository's runs of a configuration are few and spread no more than others."""
    if len(repository) >= FEW_SEEDS or pool.degrees == 0:
        return None
    if not belongs_to(spread(repository), pool):
        return None
    return pool


def percent_digits(fraction: str) -> int:
    """The decimals that a fraction such as 0.613 has as a percentage: 61.3 has one."""
    _, _, decimals = fraction.partition(".")
    return max(len(decimals) - 2, 0)


def digits_of(metric: str, rows: Sequence[Mapping[str, str]]) -> int:
    """The decimals of a percentage: those of the published ones, or two."""
    published = [percent_digits(row[metric]) for row in rows if row.get(metric)]
    return max(published, default=2)


def accuracy_caption(metrics: Mapping[str, str]) -> str:
    """What the accuracies of a table are."""
    last = [metric for metric in metrics if metric in LAST_VALID]
    if last and len(last) == len(metrics):
        return UNTESTED.format(std=STD_NOTE)
    caption = TESTED.format(std=STD_NOTE)
    if last:
        caption += f" {PARTLY.format(names=', '.join(last))}"
    return caption


def about_published(rows: Sequence[Mapping[str, str]], protocol: Mapping[str, str]) -> str:
    """Whose the published values are, where they were read, and what their marks mean; "" without any."""
    known = [row for row in rows if any(row.get(metric) for metric in METRICS)]
    read_in = {row["source"]: row["read_in"] for row in known if row["second_hand"] == "false"}
    notes = []
    if read_in:
        source = next(iter(read_in))
        note = f"Published: {source}, read in {read_in[source]}"
        if protocol.get("n_seeds"):
            note += f", mean of {protocol['n_seeds']} seeds"
        notes.append(f"{note}.")
    if len(read_in) > 1:
        notes.append(f"Rerun: {', '.join(list(read_in)[1:])}.")
    if any(row["second_hand"] == "true" for row in known):
        notes.append("†: second-hand, read in a note about a paper.")
    if any(row["approximate"] for row in known):
        notes.append("≈: approximate in the source.")
    return " ".join(notes)


def gains(name: str, runs: pd.DataFrame, method: str) -> Table:
    """The configurations as validation orders them, each minus the best one of a method in its experiment, by seed.

    That one has the best validation of those with the most seeds, so that a run more with a lucky seed is not it. Of
    those that tie it has the best test accuracy.

    Raises:
        ValueError: there is no run of the method, or no run to pair with one of it.
    """
    metrics = accuracies_of(runs)
    valid = VALID[: len(metrics)]  # a nearest-neighbour classifier has top-1 only
    found = configurations(runs.assign(valid=runs[valid].mean(axis=1)), runs.iloc[:0])
    found.sort(key=lambda item: (experiment(item.runs), -item.runs["valid"].mean()))
    of_method = [item for item in found if item.first["method"] == method]
    if not of_method:
        raise ValueError(f"{name} has no run of {method}; it has {', '.join(runs['method'].unique())}")
    in_order = sorted(of_method, key=partial(merit, metrics=list(metrics)))
    best = {experiment(item.runs): item for item in in_order}
    names, shared = columns_of_settings(found)
    lines = [gain_line(item, best.get(experiment(item.runs)), metrics) for item in found]
    if not any(line.pairs > 0 for line in lines):
        raise ValueError(about_no_pairs(name, found, method))
    validation = "top-1" if len(valid) == 1 else "mean of top-1 and top-5"
    caption = (
        f"{accuracy_caption(metrics)} Validation: {validation}. "
        f"Δ: difference to {method} in points, paired by seed, ± 95 % interval. Its setting is the best by validation "
        "of those with the most seeds; of those that tie, the best in test."
    )
    return Table(name, lines, names, metrics, caption, markdown.origin(name, runs, shared))


def merit(item: Configuration, metrics: list[str]) -> tuple[float, float, float]:
    """By which a baseline is chosen among the settings of a method."""
    validation = round(item.runs["valid"].mean(), DIGITS)
    return item.runs["seed"].nunique(), validation, item.runs[metrics].mean().mean()


def about_no_pairs(name: str, found: Sequence[Configuration], method: str) -> str:
    """Say in what a file's runs differ, so that none is paired with one of a method."""
    first = pd.DataFrame([item.first for item in found])
    differing = [column for column in first if column in EXPERIMENT and first[column].nunique(dropna=False) > 1]
    reason = "there is nothing else, or no seed in common"
    if differing:
        reason = f"runs differ in {', '.join(differing)}, or in the seed"
    return f"no run of {name} has the seed and the settings of data and training of a run of {method}: {reason}"


def gain_line(item: Configuration, base: Configuration | None, metrics: Mapping[str, str]) -> Line:
    """The numbers of a configuration, and its difference to the baseline."""
    line = line_of(item, metrics)
    valid = item.runs["valid"]
    line.validation = Numbers(mean(valid), valid.std())
    if base is None or base is item:
        return line
    differences = paired(item.runs, base.runs, list(metrics))
    if differences.empty:
        return line
    line.pairs = float(len(differences))
    for metric in metrics:
        line.numbers[metric].gain = interval(differences[metric])
    return line


# Text.


def mean_cell(numbers: Numbers, n_seeds: float, digits: int) -> str:
    text = markdown.fixed(numbers.mean, digits)
    deviation = markdown.fixed(numbers.std, digits)
    if deviation:
        text += f" ± {deviation}"
    if n_seeds == 0 and not text:
        return "not run"
    return text


def setting_texts(table: Table, name: str) -> list[str]:
    """The text of a setting in each line, with all digits where fewer would make two values one."""
    values = pd.Series([line.setting(name) for line in table.lines])
    texts = values.map(partial(markdown.setting, name)).where(values.notna(), "")
    exact = as_text(values)
    if texts.nunique() < exact.nunique():
        return exact.to_list()
    return texts.to_list()


def cells(table: Table) -> pd.DataFrame:
    """The text of a table."""
    texts = {markdown.heading(name): setting_texts(table, name) for name in table.settings}
    rows = []
    for number, line in enumerate(table.lines):
        own = {heading: column[number] for heading, column in texts.items()}
        if line.validation is not None:
            rows.append(gain_cells(table, line, own))
        else:
            rows.append(line_cells(table, line, own))
    return markdown.without_empty_columns(pd.DataFrame(rows))


def line_cells(table: Table, line: Line, own: Mapping[str, str]) -> dict[str, str]:
    """The text of a line, by headings. own: that of its settings."""
    found = {**own, "public": line.public}
    for metric, label in table.metrics.items():
        digits = table.digits[metric]
        numbers = line.numbers[metric]
        found[f"{label} published"] = markdown.fixed(numbers.published, digits)
        found[f"{label} rerun"] = markdown.fixed(numbers.rerun, digits)
        if table.has_yours:
            found |= verdict_cells(line, metric, label, digits)
            continue
        measured = label
        if table.has_published:
            measured = f"{label} measured"
        found[measured] = mean_cell(numbers, line.n_seeds, digits)
        found[f"{label} difference"] = markdown.signed(numbers.difference, digits)
    found["not as published"] = line.not_as_published
    if not table.has_yours:
        found["seeds"] = markdown.number(line.n_seeds)
    return found


def verdict_cells(line: Line, metric: str, label: str, digits: int) -> dict[str, str]:
    """The repository's mean, yours, the verdict, and yours minus the published value."""
    if line.configuration is None:
        return {f"{label} repository": "not run", f"{label} yours": "not run", f"{label} verdict": ""}
    numbers = line.numbers[metric]
    found = {
        f"{label} repository": markdown.mean_std_seeds(line.configuration.repository[metric], digits),
        f"{label} yours": markdown.mean_std_seeds(line.configuration.yours[metric], digits),
    }
    if numbers.verdict is not None:
        found[f"{label} verdict"] = markdown.agreement(numbers.verdict)
    if numbers.from_published is not None:
        found[f"{label} yours − published"] = markdown.interval(numbers.from_published, digits)
    return found


def gain_cells(table: Table, line: Line, own: Mapping[str, str]) -> dict[str, str]:
    """The text of a line with a difference to a baseline, by headings. own: that of its settings."""
    named = dict(own)
    found = {}
    for heading in ("method", "P_K"):
        if heading in named:
            found[heading] = named.pop(heading)
    for metric, label in table.metrics.items():
        found[f"Δ {label}"] = markdown.interval(line.numbers[metric].gain)
    if line.validation is not None:
        found["validation"] = mean_cell(line.validation, line.n_seeds, 2)
    for metric, label in table.metrics.items():
        found[label] = mean_cell(line.numbers[metric], line.n_seeds, 2)
    found["seeds"] = markdown.number(line.n_seeds)
    if table.has_other_pairs:
        found["pairs"] = markdown.number(line.pairs)
    return found | named


def source_of(table: Table, shown: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """The cells, and the line below: what is not as published in every run stands there, and not in a column."""
    source = table.source
    if "not as published" in shown and not table.has_yours:
        is_run = [line.n_seeds > 0 for line in table.lines]
        reasons = shown["not as published"][is_run]
        if len(reasons) and reasons.nunique() == 1:
            source += f" Not as published: {reasons.iloc[0]}."
            shown = shown.drop(columns="not as published")
    return shown, source


def as_markdown(table: Table) -> str:
    shown, source = source_of(table, cells(table))
    return f"{table.caption}\n\n{markdown.table(shown)}\n\n{source}\n"


def as_latex(table: Table) -> str:
    shown, source = source_of(table, cells(table))
    return markdown.latex(shown, f"{table.caption} {source}", table.name)


def frame(table: Table) -> pd.DataFrame:
    """The numbers of a table, with all digits: a row per line, and a column for each number that any line has."""
    rows = []
    for line in table.lines:
        row = {name: line.setting(name) for name in table.settings} | {"public": line.public}
        for metric, numbers in line.numbers.items():
            row |= number_columns(metric, numbers)
        if line.validation is not None:
            row |= number_columns("valid", line.validation)
        rows.append(row | {"not as published": line.not_as_published, "n_seeds": line.n_seeds, "pairs": line.pairs})
    found = pd.DataFrame(rows)
    is_used = (found.notna() & (found != "")).any()
    return found.loc[:, is_used]


def number_columns(name: str, numbers: Numbers) -> dict[str, float]:
    """The numbers of an accuracy, by their columns."""
    return {
        f"published_{name}": numbers.published,
        f"rerun_{name}": numbers.rerun,
        f"{name}_mean": numbers.mean,
        f"{name}_std": numbers.std,
        f"{name}_difference": numbers.difference,
        f"{name}_gain": numbers.gain.mean,
        f"{name}_half": numbers.gain.half,
    }


def as_csv(table: Table) -> str:
    return frame(table).to_csv(index=False, lineterminator="\n")


FORMATS = {"markdown": as_markdown, "latex": as_latex, "csv": as_csv}


def verdicts(table: Table) -> list[Agreement]:
    """The verdicts of all lines and metrics that have one."""
    found = []
    for metric in table.metrics:
        for line in table.lines:
            verdict = line.numbers[metric].verdict
            if verdict is not None and verdict.verdict:
                found.append(verdict)
    return found
