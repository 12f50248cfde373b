"""A table of runs as one DataFrame: a line per experiment, beside the published values or minus another method.

Accuracies are percentages in the frame. Markdown and LaTeX show mean ± sample standard deviation over the seeds; CSV
has each number in a column of its own. What all lines share stands below the table.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import pandas as pd

from experiments.common.settings import OWN_SETTINGS
from scripts.reporting import runs as core
from scripts.reporting.runs import METRICS, VALID, ReportError, lines_of, p_k_of, settings_of, short
from topk_losses import METHODS, RELAXATIONS

PAPER = Path(__file__).resolve().parents[2] / "results" / "paper"
PROTOCOLS = core.read_text(PAPER / "protocols.csv").set_index("table")
TABLES = sorted(PROTOCOLS.index)
VARIANT = ("loss", "sorted", "prediction")  # of the nearest-neighbour classifier: lines of one method of their own
# On a published row's own line.
LOSS_SETTINGS = ("resolution", "inverse_temperature", "distribution", "art_lambda", "k", "n_epochs", "num_candidates")
# What no published run has.
UNPUBLISHED = ("limit_train", "limit_test", "label_noise", "noise_groups", "noise_matrix_id", "mixup", *OWN_SETTINGS)
UNPUBLISHED += ("labels", "lr_schedule", "ema", "weight_decay", "precision")
HEADINGS = {"p_k": "P_K", "lr": "learning rate", "n_epochs": "epochs", "n_seeds": "seeds"}
HEADINGS |= {name: name.replace("_", " ") for name in ("inverse_temperature", "weight_decay", "label_smoothing")}
SPREAD = "± standard deviation over seeds"
LATEX = str.maketrans(
    {
        **{character: f"\\{character}" for character in "&%$#_{}"},
        **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "β": r"$\beta$"},
        **{"±": r"$\pm$", "−": "$-$", "≈": r"$\approx$", "†": r"$^\dagger$", "Δ": r"$\Delta$"},
    }
)


class Table(NamedTuple):
    """A frame, what stands above and below it, and the decimals of its percentages."""

    name: str
    frame: pd.DataFrame
    caption: str
    source: str
    decimals: dict[str, int]


def read_published(table: str | None) -> tuple[list[dict[str, str]], dict[str, str]]:
    """Return the rows of a table of results/paper/ and its protocol; nothing where there is none."""
    if table is None:
        return [], {}
    return core.read_text(PAPER / f"{table}.csv").to_dict("records"), PROTOCOLS.loc[table].to_dict()


def published_table(path: Path, runs: pd.DataFrame) -> str | None:
    """Return the published table that belongs to a file, by its name or its data; None where there is none."""
    name = path.stem.removesuffix("_short").replace("table2_3", "tables2_3").replace("cifar100", "table1")
    dataset, classes = (" ".join(set(runs.get(column, ""))) for column in ("dataset", "num_classes"))
    if "prediction" in runs:
        name = f"knn_{dataset}"
    elif name not in TABLES and "embeddings" in runs:
        name = {"1000": "tables2_3_imagenet1k", "10450": "tables2_3_imagenet21k"}.get(classes, "")
    return name if name in TABLES else None


def not_as_published(run: pd.Series, published: Mapping[str, str], protocol: Mapping[str, str]) -> str:
    """Return the settings of a run that are not the published ones, with those in brackets.

    A setting whose published value is not known, an empty cell, is not compared.
    """
    expected = {name: cell for name, cell in protocol.items() if name not in ("title", "n_seeds", "source")}
    expected |= {name: published[name] for name in LOSS_SETTINGS if published.get(name)}
    # What only a loss with a relaxation has.
    skipped = () if run["method"] in RELAXATIONS else ("m", "top1_mode", "self_match")
    expected = {name: cell for name, cell in expected.items() if cell and name not in skipped}
    others = {name: cell for name, cell in expected.items() if not same(run.get(name, ""), cell)}
    differing = [f"{name} {short(run.get(name) or 'none')} ({cell})" for name, cell in others.items()]
    more = {name: run.get(name, "") for name in UNPUBLISHED if name not in expected}
    return ", ".join(differing + [f"{name} {short(cell)}" for name, cell in more.items() if not same(cell, "none")])


def same(cell: str, published: str) -> bool:
    """Whether a cell says what is published; numbers to the digits that results/paper/ gives them."""
    try:
        return math.isclose(float(cell or 0), float(published.replace("none", "0")), rel_tol=1e-6)
    except ValueError:
        return cell == published or cell in ("fp32", "constant", "right")


def matches(run: Mapping[str, str], row: Mapping[str, str]) -> bool:
    """Whether a run is of a published row that has a method; one whose P_K is not known takes any."""
    same_data = all(run.get(name, "") == row.get(name, "") for name in ("method", "backbone", *VARIANT))
    return bool(row.get("method")) and same_data and p_k_of(row["p_k"]) in ((), p_k_of(run.get("p_k", "")))


def measured(lines: Sequence[pd.DataFrame], metrics: Sequence[str]) -> pd.DataFrame:
    """Return mean and sample standard deviation of each metric, and the number of runs, a row per line."""
    means = pd.DataFrame([{f"{metric}_mean": fmean(line[metric]) for metric in metrics} for line in lines])
    stds = pd.DataFrame([{f"{metric}_std": line[metric].std(skipna=False) for metric in metrics} for line in lines])
    return means.join(stds).assign(n_seeds=[len(line) for line in lines])


def beside_published(name: str, runs: pd.DataFrame, table: str | None) -> Table:
    """Return every line beside the published row of its method and P_K; a row without runs is not run."""
    metrics = [metric for metric in METRICS if metric in runs]
    lines = lines_of(core.as_numbers(runs, metrics, 100))
    settings, shared = settings_of(lines)
    ours = settings.join(measured(lines, metrics)).to_dict("records")
    firsts = [line.iloc[0] for line in lines]
    published, protocol = read_published(table)
    records, left = [], list(range(len(lines)))
    for row in published:
        values = {metric: 100 * float(row[metric]) if row[metric] else math.nan for metric in metrics}
        if again := [record for record in records if matches(row, record["row"])]:
            for record in again:  # the same row by others
                record |= {f"rerun_{metric}": value for metric, value in values.items()}
            continue
        called = row["published_name"] + (f" ({row['method']})" if row["method"] else "")
        called += "†" if row["second_hand"] == "true" else ""
        called += "≈" if row.get("approximate") else ""
        stated = {"row": row, "method": called, "public": row.get("public", "")}
        stated |= {f"published_{metric}": value for metric, value in values.items()}
        found = [number for number in left if matches(firsts[number], row)]
        left = [number for number in left if number not in found]
        for number in found:
            reasons = not_as_published(firsts[number], row, protocol)
            record = {**ours[number], **stated, "not as published": reasons}
            for metric in metrics if not reasons else []:
                record[f"{metric}_difference"] = record[f"{metric}_mean"] - values[metric]
            records.append(record)
        if not found:
            records.append({**stated, "n_seeds": 0 if row["method"] else None, "p_k": row.get("p_k", "")})
    place = {method: number for number, method in enumerate(METHODS)}
    left.sort(key=lambda number: place.get(firsts[number]["method"], -1))
    records += [{**ours[number], "row": {}} for number in left]
    columns = [*settings, "public"]
    for metric in metrics:
        columns += [f"published_{metric}", f"rerun_{metric}", f"{metric}_mean", f"{metric}_std", f"{metric}_difference"]
    frame = pd.DataFrame(records).reindex(columns=[*columns, "not as published", "n_seeds"])
    sources = list(dict.fromkeys(row["source"] for row in published if row["second_hand"] == "false"))
    seeds = f", mean of {protocol['n_seeds']} seeds" if protocol.get("n_seeds") else ""
    notes = {
        f"Published: {''.join(sources[:1])}{seeds}.": published,
        f"Rerun: {', '.join(sources[1:])}.": len(sources) > 1,
        "†: second-hand, read in a note about a paper.": any(row["second_hand"] == "true" for row in published),
        "≈: approximate in the source.": any(row["approximate"] for row in published),
    }
    title = f"{protocol['title']}. " if protocol else ""
    caption = f"{title}Test accuracy in percent at the best validation epoch, {SPREAD}."
    source = " ".join([origin(name, runs, shared), *(note for note, holds in notes.items() if holds)])
    digits = {metric: max((len(row[metric]) - 4 for row in published if row[metric]), default=2) for metric in metrics}
    return without_empty_columns(Table(name, frame, caption, source, digits))


def paired(name: str, runs: pd.DataFrame, method: str) -> Table:
    """Return the lines as validation orders them, each minus the best line of a method in its experiment, by seed."""
    metrics = [metric for metric in METRICS if metric in runs]
    valid = VALID if len(metrics) > 1 else VALID[:1]  # a nearest-neighbour classifier has top-1 only
    runs = core.as_numbers(runs, [*metrics, *valid], 100)
    lines = lines_of(runs.assign(valid=runs[valid].mean(axis=1)))
    lines.sort(key=lambda line: (core.experiment(line), -line["valid"].mean()))
    best = {core.experiment(line): line for line in lines[::-1] if line["method"].iloc[0] == method}
    if not best:
        raise ReportError(f"{name} has no run of {method}; it has {', '.join(runs['method'].unique())}")
    settings, shared = settings_of(lines)
    gains = pd.DataFrame([gains_of(line, best.get(core.experiment(line)), metrics) for line in lines])
    results = measured(lines, ["valid", *metrics]).assign(pairs=gains.pop("pairs"))
    if (results["pairs"].isna() | (results["pairs"] == results["n_seeds"])).all():
        results = results.drop(columns="pairs")
    named = [name for name in settings if name in ("method", "p_k")]
    frame = settings[named].join(gains).join(results).join(settings.drop(columns=named))
    caption = (
        f"Test accuracy in percent at the best validation epoch, {SPREAD}. "
        f"Validation: {'mean of top-1 and top-5' if len(valid) > 1 else 'top-1'}. "
        f"Δ: difference to {method} in points, paired by seed, ± 95 % interval."
    )
    return without_empty_columns(Table(name, frame, caption, origin(name, runs, shared), {}))


def gains_of(line: pd.DataFrame, base: pd.DataFrame | None, metrics: Sequence[str]) -> dict[str, object]:
    """Return the mean difference to a line by seed, half its interval, and the number of pairs."""
    if base is None or base is line or (differences := core.differences(line, base, metrics)).empty:
        return {"pairs": None}
    gains: dict[str, object] = {}
    for metric in metrics:
        gains[f"{metric}_gain"], gains[f"{metric}_half"] = core.interval(differences[metric])
    return gains | {"pairs": len(differences)}


def origin(name: str, runs: pd.DataFrame, shared: dict[str, str]) -> str:
    """Return where the runs of a table come from: file, seeds, machines, versions, and the settings that they share."""
    parts = [f"{name}.csv"]
    features = runs.reindex(columns=["backbone", "resolution"], fill_value="").drop_duplicates()
    parts += [f"features of {row.backbone} at {row.resolution} pixels" for row in features.itertuples() if row.backbone]
    if "seed" in runs:
        seeds = sorted(map(int, set(runs["seed"])))
        is_range = len(seeds) > 2 and seeds == list(range(seeds[0], seeds[-1] + 1))
        parts.append(f"seeds {seeds[0]} to {seeds[-1]}" if is_range else f"seed {', '.join(map(str, seeds))}")
    machines = runs.get("device_name", pd.Series(dtype=str)).value_counts()
    for machine, count in machines.items():
        parts.append(f"{count} run{'s' if count > 1 else ''} on {machine}" if len(machines) > 1 else str(machine))
    versions = sorted({version.partition("+")[0] for version in runs.get("torch_version", "") if version})
    parts += [f"PyTorch {', '.join(versions)}"] if versions else []
    settings = {name: short(cell) for name, cell in shared.items() if cell not in ("0.0", "false", "ours")}
    if "p_k" in settings:
        settings["P_K"] = core.shown_p_k(settings.pop("p_k"))
    common = ", ".join(f"{name} {cell}" for name, cell in settings.items() if not name.endswith(":"))
    by_method = [f"{name} {cell}" for name, cell in settings.items() if name.endswith(":")]
    stated = "; ".join(filter(None, [common, *by_method]))
    return f"Runs: {', '.join(parts)}." + (f" Settings: {stated}." if stated else "")


def without_empty_columns(table: Table) -> Table:
    """Leave out columns without a cell; what is not as published in every run stands below the table."""
    frame = table.frame.replace("", None)
    frame = frame[[name for name in frame if name.endswith("_mean") or frame[name].notna().any()]]
    reasons = frame["not as published"][frame["n_seeds"] > 0] if "not as published" in frame else []
    if len(reasons) and reasons.nunique(dropna=False) == 1:
        frame = frame.drop(columns="not as published")
        table = table._replace(source=f"{table.source} Not as published: {reasons.iloc[0]}.")
    return table._replace(frame=frame)


def shown(table: Table) -> pd.DataFrame:
    """Return the cells as text, percentages with the decimals of the published ones."""
    columns: dict[str, pd.Series] = {}
    frame, labels = table.frame, {**METRICS, "valid": "validation"}
    for name in frame:
        metric = next((key for key in labels if name.startswith((key, f"published_{key}", f"rerun_{key}"))), "")
        kind, digits = name.replace(metric, "").strip("_"), table.decimals.get(metric, 2)
        if not metric:
            cells = frame[name].map(lambda cell: "" if pd.isna(cell) else str(cell))
            is_number = name in (*core.IDENTITY, "n_seeds", "pairs")
            cells = cells.map(core.shown_p_k if name == "p_k" else short if is_number else str)
            columns[HEADINGS.get(name, name)] = cells
        elif kind not in ("std", "half"):
            sign = "+" if kind in ("gain", "difference") else ""
            cells = frame[name].map(f"{{:{sign}.{digits}f}}".format)
            if (spread := {"gain": f"{metric}_half", "mean": f"{metric}_std"}.get(kind)) in frame:
                cells += frame[spread].map(f" ± {{:.{digits}f}}".format)
            cells = cells.str.replace(" ± nan", "").replace({"nan": "", "+nan": ""}).str.replace("-", "−")
            cells = cells.mask(frame.get("n_seeds") == 0, "not run") if kind == "mean" else cells
            kind = kind.replace("mean", "ours" if f"published_{metric}" in frame else "")
            columns[f"Δ {labels[metric]}" if kind == "gain" else f"{labels[metric]} {kind}".strip()] = cells
    return pd.DataFrame(columns)


def as_markdown(table: pd.DataFrame) -> str:
    """Return a table of text, numbers to the right."""
    number = r"(\*\*)?[+−≈]?[\d.,]+(e-\d+)?( ± [\d.]+(\\\*)?| / [\d.]+)?(\*\*)?|not run|the same trial|"
    sides = ["right" if table[name].str.fullmatch(number).all() else "left" for name in table]
    return table.to_markdown(index=False, tablefmt="pipe", colalign=sides, disable_numparse=True)


def latex(table: Table) -> str:
    """Return a table environment; it needs the package booktabs."""
    cells = shown(table).map(lambda cell: cell.translate(LATEX)).rename(columns=lambda name: name.translate(LATEX))
    about = {"caption": f"{table.caption} {table.source}".translate(LATEX), "label": f"tab:{table.name}"}
    text = cells.style.hide(axis="index").to_latex(hrules=True, position_float="centering", **about)
    return "% needs \\usepackage{booktabs}\n" + text.replace("P\\_K", "$P_K$")


FORMATS = {
    "markdown": lambda table: f"{table.caption}\n\n{as_markdown(shown(table))}\n\n{table.source}\n",
    "latex": latex,
    "csv": lambda table: table.frame.to_csv(index=False, lineterminator="\n"),  # with all digits
}
