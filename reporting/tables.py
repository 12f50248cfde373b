"""Tables of results: published values, this repository's runs and yours; each configuration minus another method.

A table is a frame of numbers, a row per configuration; `cells` makes text of it.
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
    compare,
    from_published,
    mean,
    pooled_spread,
    spread,
)
from reporting.frames import (
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
from topk_losses import METHODS, RELAXATIONS

VARIANT = ("loss", "sorted", "prediction")  # of the nearest-neighbour classifier: lines of one method of their own
# On a published row's own line.
STATED = ("resolution", "inverse_temperature", "distribution", "art_lambda", "k", "n_epochs", "num_candidates")
# What no published run has.
UNPUBLISHED = (
    *("limit_train", "label_noise", "noise_groups", "noise_matrix_id", "mixup"),
    *(item.name for item in settings.with_role(LOSS) if item.optional),
    *("labels", "lr_schedule", "ema", "weight_decay", "precision"),
)
# The words for what published runs have instead.
PLAIN = {"labels": "right", "lr_schedule": "constant", "precision": "fp32"}
DATA = ("dataset", "num_classes")  # what makes a published table comparable at all
OBJECTS = ("_yours", "_verdict", "_from_published")  # ends of the names of columns that hold no plain numbers
STD_NOTE = "± standard deviation over seeds"
TESTED = "Test accuracy in percent at the best validation epoch, {std}."
UNTESTED = "Validation accuracy in percent at the last epoch, {std}: no run has a test split."
PARTLY = "{names}: validation accuracy at the last epoch, where runs have no test split."


@dataclass
class Table:
    """Lines of numbers, and what stands above and below them.

    Attributes:
        name: of the results file, without its ending.
        lines: a row per configuration.
        settings: columns of settings, in their order.
        metrics: columns of accuracies, with what tables call them.
        digits: decimals of each accuracy.
        has_yours: whether your runs stand beside the repository's.
        published: whose the published values are, and where they were read.
        published_seeds: number of seeds whose mean is published; "" if it is not known.
    """

    name: str
    lines: pd.DataFrame
    settings: list[str]
    metrics: dict[str, str]
    caption: str
    source: str
    digits: dict[str, int] = field(default_factory=dict)
    has_yours: bool = False
    published: str = ""
    published_seeds: str = ""


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


def columns_of_settings(found: Sequence[Configuration]) -> tuple[list[str], dict[str, str]]:
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
    records, left = published_lines(found, rows, protocol, metrics)
    left.sort(key=lambda item: library_order(item.first["method"]))
    for item in left:
        records.append(line_of(item, metrics) | {"not as published": other_data(item.first, protocol)})
    has_yours = len(yours) > 0
    if has_yours:
        add_verdicts(records, metrics, similar)
        add_published_differences(records, metrics, protocol)
    digits = {metric: digits_of(metric, rows) for metric in metrics}
    caption = accuracy_caption(metrics)
    if protocol:
        caption = f"{protocol['title']}. {caption}"
    published = about_published(rows, protocol)
    source = f"{markdown.origin(name, both, shared)} {published}".strip()
    lines = pd.DataFrame(records).reindex(columns=all_columns(names, metrics))
    seeds = protocol.get("n_seeds", "")
    return Table(name, lines, names, metrics, caption, source, digits, has_yours, published, seeds)


def all_columns(names: Sequence[str], metrics: Mapping[str, str]) -> list[str]:
    columns = [*names, "public"]
    for metric in metrics:
        for kind in ("published_{}", "rerun_{}", "{}_mean", "{}_std", "{}_difference"):
            columns.append(kind.format(metric))
        columns += [f"{metric}{end}" for end in OBJECTS]
    return [*columns, "not as published", "n_seeds", "configuration"]


def published_lines(
    found: Sequence[Configuration],
    rows: Sequence[Mapping[str, str]],
    protocol: Mapping[str, str],
    metrics: Mapping[str, str],
) -> tuple[list[dict], list[Configuration]]:
    """The lines of a published table, and the configurations that it does not have."""
    records: list[dict] = []
    left = list(found)
    comparable = [item for item in found if not other_data(item.first, protocol)]
    stated: list[tuple[Mapping[str, str], list[dict]]] = []  # the published rows so far, with their lines
    for row in rows:
        values = percentages(row, metrics)
        again = lines_stated(stated, row)
        if again:  # the same row by others
            rerun = {f"rerun_{metric}": value for metric, value in values.items()}
            for line in again:
                line.update(rerun)
            continue
        about = {"method": title_of(row), "public": row.get("public", "")}
        about |= {f"published_{metric}": value for metric, value in values.items()}
        lines = []
        for item in [item for item in comparable if item in left and matches(item.first, row)]:
            left.remove(item)
            line = line_of(item, metrics) | about
            line["not as published"] = not_as_published(item.first, row, protocol)
            for metric, value in values.items():
                if not line["not as published"]:
                    line[f"{metric}_difference"] = line[f"{metric}_mean"] - value
            lines.append(line)
        if not lines:
            n_seeds = 0.0 if row["method"] else math.nan
            lines.append(about | {"p_k": row.get("p_k", ""), "n_seeds": n_seeds})
        records += lines
        stated.append((row, lines))
    return records, left


def lines_stated(stated: Sequence[tuple[Mapping[str, str], list[dict]]], row: Mapping[str, str]) -> list[dict]:
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


def line_of(item: Configuration, metrics: Mapping[str, str]) -> dict:
    """The numbers of a configuration."""
    line = item.first.to_dict() | {"configuration": item, "n_seeds": float(len(item.repository))}
    for metric in metrics:
        line[f"{metric}_mean"] = mean(item.repository[metric])
        line[f"{metric}_std"] = item.repository[metric].std()
    return line


def add_verdicts(records: Sequence[dict], metrics: Mapping[str, str], similar: pd.DataFrame | None) -> None:
    """Compare your runs of each line with the repository's. similar: as in `beside_published`."""
    lines = [line for line in records if "configuration" in line]
    groups = [line["configuration"].repository for line in lines]
    if similar is not None and max(map(len, groups), default=0) <= 1:
        groups = [item.repository for item in configurations(similar, similar.iloc[:0])]
    for metric in metrics:
        pool = pooled_spread([spread(runs[metric]) for runs in groups])
        for line in lines:
            repository = line["configuration"].repository[metric]
            line[f"{metric}_yours"] = line["configuration"].yours[metric]
            line[f"{metric}_verdict"] = agreement(line[f"{metric}_yours"], repository, pool_for(repository, pool))


def add_published_differences(records: Sequence[dict], metrics: Mapping[str, str], protocol: Mapping[str, str]) -> None:
    """Compare your runs that have the published settings with the published values.

    How the published runs spread over seeds is not known. The interval takes the spread of runs with these settings.
    """
    n_seeds = float(protocol.get("n_seeds") or math.nan)
    for metric in metrics:
        lines = [line for line in records if f"{metric}_difference" in line]
        groups = []
        for line in lines:
            item = line["configuration"]
            groups += [spread(item.yours[metric]), spread(item.repository[metric])]
        pool = pooled_spread(groups)
        for line in lines:
            yours = line["configuration"].yours[metric].dropna()
            own: Spread | Pool = pool
            if not belongs_to(spread(yours), pool):
                own = spread(yours)
            line[f"{metric}_from_published"] = from_published(yours, line[f"published_{metric}"], n_seeds, own)


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

    Raises:
        ValueError: there is no run of the method.
    """
    metrics = accuracies_of(runs)
    valid = VALID[: len(metrics)]  # a nearest-neighbour classifier has top-1 only
    found = configurations(runs.assign(valid=runs[valid].mean(axis=1)), runs.iloc[:0])
    found.sort(key=lambda item: (experiment(item.runs), -item.runs["valid"].mean()))
    best = {experiment(item.runs): item for item in found[::-1] if item.first["method"] == method}
    if not best:
        raise ValueError(f"{name} has no run of {method}; it has {', '.join(runs['method'].unique())}")
    names, shared = columns_of_settings(found)
    records = []
    for item in found:
        records.append(gain_line(item, best.get(experiment(item.runs)), metrics))
    lines = pd.DataFrame(records)
    if (lines["pairs"].isna() | (lines["pairs"] == lines["n_seeds"])).all():
        lines = lines.drop(columns="pairs")
    validation = "top-1" if len(valid) == 1 else "mean of top-1 and top-5"
    caption = (
        f"{accuracy_caption(metrics)} Validation: {validation}. "
        f"Δ: difference to {method} in points, paired by seed, ± 95 % interval."
    )
    return Table(name, lines, names, metrics, caption, markdown.origin(name, runs, shared))


def gain_line(item: Configuration, base: Configuration | None, metrics: Mapping[str, str]) -> dict:
    """The numbers of a configuration, and its difference to the baseline."""
    line = line_of(item, metrics)
    line["valid_mean"] = mean(item.runs["valid"])
    line["valid_std"] = item.runs["valid"].std()
    line["pairs"] = math.nan
    if base is None or base is item:
        return line
    compared = compare(item.runs, base.runs, list(metrics))
    if compared["n"].iloc[0] == 0:
        return line
    line["pairs"] = float(compared["n"].iloc[0])
    for metric in metrics:
        line[f"{metric}_gain"] = compared.loc[metric, "gain"]
        line[f"{metric}_half"] = compared.loc[metric, "half"]
    return line


# Text.


def value(row: pd.Series, name: str) -> float:
    """A number of a line; NaN where it has none."""
    found = row.get(name, math.nan)
    if found is None:
        return math.nan
    return float(found)


def mean_cell(row: pd.Series, metric: str, digits: int) -> str:
    text = markdown.fixed(value(row, f"{metric}_mean"), digits)
    deviation = markdown.fixed(value(row, f"{metric}_std"), digits)
    if deviation:
        text += f" ± {deviation}"
    if value(row, "n_seeds") == 0 and not text:
        return "not run"
    return text


def setting_texts(name: str, values: pd.Series) -> pd.Series:
    """The text of a setting in each line, with all digits where fewer would make two values one."""
    texts = values.map(partial(markdown.setting, name)).where(values.notna(), "")
    exact = as_text(values)
    if texts.nunique() < exact.nunique():
        return exact
    return texts


def cells(table: Table) -> pd.DataFrame:
    """The text of a table."""
    texts = {name: setting_texts(name, table.lines[name]) for name in table.settings}
    rows = []
    for _, row in table.lines.assign(**texts).iterrows():
        rows.append(line_cells(table, row))
    return markdown.without_empty_columns(pd.DataFrame(rows))


def line_cells(table: Table, row: pd.Series) -> dict[str, str]:
    """The text of a line, by headings."""
    if "valid_mean" in table.lines:
        return gain_cells(table, row)
    found = {markdown.heading(name): row[name] for name in table.settings}
    found["public"] = str(row["public"]).replace("nan", "")
    has_published = any(table.lines[f"published_{metric}"].notna().any() for metric in table.metrics)
    for metric, label in table.metrics.items():
        digits = table.digits.get(metric, 2)
        found[f"{label} published"] = markdown.fixed(value(row, f"published_{metric}"), digits)
        found[f"{label} rerun"] = markdown.fixed(value(row, f"rerun_{metric}"), digits)
        if table.has_yours:
            found |= verdict_cells(row, metric, label, digits)
            continue
        own = label
        if has_published:
            own = f"{label} measured"
        found[own] = mean_cell(row, metric, digits)
        found[f"{label} difference"] = markdown.signed(value(row, f"{metric}_difference"), digits)
    found["not as published"] = str(row["not as published"]).replace("nan", "")
    if not table.has_yours:
        found["seeds"] = markdown.number(value(row, "n_seeds"))
    return found


def verdict_cells(row: pd.Series, metric: str, label: str, digits: int) -> dict[str, str]:
    """The repository's mean, yours, the verdict, and yours minus the published value."""
    item = row["configuration"]
    if not isinstance(item, Configuration):
        return {f"{label} repository": "not run", f"{label} yours": "not run", f"{label} verdict": ""}
    return {
        f"{label} repository": markdown.mean_std_seeds(item.repository[metric], digits),
        f"{label} yours": markdown.mean_std_seeds(item.yours[metric], digits),
        f"{label} verdict": markdown.agreement(row[f"{metric}_verdict"]),
        f"{label} yours − published": from_published_cell(row[f"{metric}_from_published"], digits),
    }


def from_published_cell(value: object, digits: int) -> str:
    if not isinstance(value, Interval):
        return ""
    return markdown.interval(value, digits)


def gain_cells(table: Table, row: pd.Series) -> dict[str, str]:
    named = {markdown.heading(name): row[name] for name in table.settings}
    found = {}
    for heading in ("method", "P_K"):
        if heading in named:
            found[heading] = named.pop(heading)
    for metric, label in table.metrics.items():
        gain = Interval(value(row, f"{metric}_gain"), value(row, f"{metric}_half"))
        found[f"Δ {label}"] = markdown.interval(gain)
    for metric, label in {"valid": "validation", **table.metrics}.items():
        found[label] = mean_cell(row, metric, 2)
    found["seeds"] = markdown.number(value(row, "n_seeds"))
    if "pairs" in table.lines:
        found["pairs"] = markdown.number(value(row, "pairs"))
    return found | named


def source_of(table: Table, shown: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """The cells, and the line below: what is not as published in every run stands there, and not in a column."""
    source = table.source
    if "not as published" in shown and not table.has_yours:
        is_run = table.lines["n_seeds"] > 0
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


def as_csv(table: Table) -> str:
    """The numbers of a table, with all digits."""
    frame = table.lines.drop(columns="configuration", errors="ignore")
    numbers = [name for name in frame if not name.endswith(OBJECTS) and frame[name].notna().any()]
    frame = frame[numbers]
    return frame.to_csv(index=False, lineterminator="\n")


FORMATS = {"markdown": as_markdown, "latex": as_latex, "csv": as_csv}


def verdicts(table: Table) -> list[Agreement]:
    """The verdicts of all lines and metrics that have one."""
    found = []
    for metric in table.metrics:
        for item in table.lines[f"{metric}_verdict"]:
            if isinstance(item, Agreement) and item.verdict:
                found.append(item)
    return found
