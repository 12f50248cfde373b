"""The tables of studies that are not runs beside published ones: temperatures, epochs, beam search."""

import math
from pathlib import Path

import pandas as pd

from scripts.reporting import runs as core
from scripts.reporting.runs import METRICS, VALID, Interval, ReportError, interval, mean_std, short
from scripts.reporting.tables import HEADINGS, TABLES, Table, as_markdown, origin, read_published, without_empty_columns
from topk_losses import METHODS

SPREAD = "last_test_logit_std"
KINDS = ("mean", "chosen")
COLUMNS = ["top-1", "top-5", "best validation: top-1", "best validation: top-5"]
MILESTONES, WINDOW = (25, 50, 100, 200), 5  # epochs; of a mean
SOFTMAX = "softmax_cross_entropy"
TEMPERATURES = (
    "Test accuracy in percent at the inverse temperature that validation chose, ± standard deviation over seeds. In "
    "brackets: times the default, and whether it is the least or the largest that was tried. Beside it the default "
    "and, where they ran, auto and the better schedule."
)
RATES = {
    f"test_{short_name}_beam{K}": f"{label}{K}"
    for short_name, label in (("wer", "WER beam "), ("per", "PER beam "), ("gold", "gold in beam "))
    for K in (1, 4, 8)
    if (short_name, K) != ("gold", 1)
}


def temperature_lines(runs: pd.DataFrame) -> list[pd.DataFrame]:
    """Return the runs of each line but the temperature, by P_K and the library's order, with numbers in percent.

    number: the inverse temperature, NaN where it is none or changes. ended_at: what it was at the end.
    """
    runs = core.as_numbers(runs, [*METRICS, *VALID], 100)
    runs = core.as_numbers(runs, [name for name in (SPREAD, "last_inverse_temperature") if name in runs])
    beta = pd.to_numeric(runs["inverse_temperature"], errors="coerce")
    runs = runs.assign(number=beta, temperature=runs["inverse_temperature"].map(short))
    runs["ended_at"] = runs.get("last_inverse_temperature", beta).fillna(beta).fillna(0)
    place = runs["method"].map({method: number for number, method in enumerate(METHODS)})
    runs = runs.assign(place=place).sort_values(["place", "ended_at"], kind="stable")
    runs = runs.sort_values("p_k", key=lambda cells: cells.str.split(), ascending=False, kind="stable")
    return core.lines_of(runs, "inverse_temperature")


def temperatures(name: str, runs: pd.DataFrame) -> Table:
    """Return each method's best inverse temperature by validation, beside the default and auto.

    Best: by the mean over the seeds of P_K(1) top-1 + (1 - P_K(1)) top-5.
    """
    lines = temperature_lines(runs)
    settings, shared = core.settings_of(lines, "inverse_temperature")
    cells = pd.DataFrame([temperature_cells(line) for line in lines])
    shared |= {
        name: settings.pop(name)[0] for name in list(settings) if name != "method" and settings[name].nunique() == 1
    }
    return without_empty_columns(Table(name, settings.join(cells), TEMPERATURES, origin(name, runs, shared), {}))


def temperature_cells(line: pd.DataFrame) -> dict[str, str]:
    """Return the cells of one method and P_K, by their headings."""
    by_temperature = line.groupby("temperature", sort=False)
    means = by_temperature[[*METRICS, *VALID, "number"]].mean()
    first, default = core.p_k_of(line["p_k"].iloc[0])[0], METHODS[line["method"].iloc[0]].inverse_temperature
    aim = first * means["valid_top1"] + (1 - first) * means["valid_top5"]
    is_schedule = aim.index.str.contains(":")
    constant, schedules = aim[~is_schedule & (aim.index != "auto")], aim[is_schedule]
    rows = by_temperature.get_group(constant.idxmax()) if len(constant) else line[:0]
    cells, best = {"inverse temperature": "—", "times logit std": ""}, rows["number"].mean()
    if best > 0 and default is not None:
        ends = {means["number"].max(): ", the largest", means["number"].min(): ", the least"}
        cells["inverse temperature"] = f"{best:g} ({best / default:g}x{ends.get(best, '')})"
        cells["times logit std"] = f"{best * rows[SPREAD].mean():.2g}" if SPREAD in rows else ""
    cells |= {label: mean_std(rows[metric]) for metric, label in METRICS.items()}
    others = {"default": "" if default is None else f"{default:g}", "auto": "auto"}
    others["schedule"] = schedules.idxmax() if len(schedules) else None
    for kind, temperature in others.items():
        cells |= {kind: temperature or ""} if kind == "schedule" else {}
        for metric, label in METRICS.items():
            cells[f"{kind} {label}"] = f"{means[metric][temperature]:.2f}" if temperature in means.index else ""
    return cells | {"seeds": str(len(rows))}


def auto_gains(path: Path, *methods: str) -> str:
    """Return Markdown: auto minus the default temperature, each at the learning rate that validation chose.

    Read from the trials of 5 epochs.
    """
    runs = core.read_runs(path, ["n_epochs=5"])
    runs = core.as_numbers(runs[runs["method"].isin(methods)], [*METRICS, *VALID], 100)
    runs = runs.assign(is_auto=runs["inverse_temperature"] == "auto")
    keys = ["method", "p_k", "m", "is_auto"]
    best = pd.DataFrame([core.best_trial(tried) for _, tried in runs.groupby(keys, sort=False)])
    best = best.set_index(keys)[list(METRICS)].astype(float)
    gains = (best.xs(True, level="is_auto") - best.xs(False, level="is_auto")).dropna().reset_index()
    table = gains.rename(columns={"p_k": "P_K", **{metric: f"Δ {label}" for metric, label in METRICS.items()}})
    table = table.assign(P_K=table["P_K"].map(core.shown_p_k), m=table["m"].map(short))
    for label in METRICS.values():
        table[f"Δ {label}"] = [str(Interval(gain, math.nan)) for gain in table[f"Δ {label}"]]
    return f"{as_markdown(table)}\n\n{origin(path.stem, runs, {})}\n"


def beam_search(name: str, runs: pd.DataFrame) -> str:
    """Return Markdown: error rates of each arm, and each arm minus the control by seed."""
    rates = [rate for rate in RATES if rate in runs and runs[rate].any()]
    runs = core.as_numbers(runs, rates)
    runs[rates] *= 100
    order = {name: place for place, name in enumerate(("cross_entropy", "retain", "soft_beam"))}
    lines = core.lines_of(runs)
    lines.sort(key=lambda line: (order.get(line["arm"].iloc[0], 9), list(METHODS).index(line["method"].iloc[0])))
    settings, shared = core.settings_of(lines)
    settings = settings.drop(columns=["method", "arm", "p_k"], errors="ignore").map(short)
    settings = settings.loc[:, (settings != "").any()].rename(columns={"inverse_temperature": "inverse temperature"})
    arms = pd.DataFrame({"arm": [f"{line['arm'].iloc[0]}, {line['method'].iloc[0]}" for line in lines]})
    arms = arms.replace("cross_entropy, softmax_cross_entropy", "cross_entropy")
    controls = {core.experiment(line): line for line in lines if line["arm"].iloc[0] == "cross_entropy"}
    means, differences = [], []
    for line in lines:
        base = controls.get(core.experiment(line), line)
        gains = core.differences(line, base, rates) if base is not line else line[:0]
        means.append({RATES[rate]: mean_std(line[rate]) for rate in rates} | {"seeds": str(len(line))})
        differences.append({RATES[rate]: str(interval(gains[rate])) for rate in rates} | {"pairs": str(len(gains))})
    tables = {
        "mean ± sample standard deviation over the seeds": means,
        "minus the control (cross_entropy) by seed": differences,
    }
    text = ["WER, PER: word and phoneme error rate."]
    for caption, rows in tables.items():
        text += [f"In percent, {caption}:", as_markdown(arms.join(pd.DataFrame(rows)).join(settings).fillna(""))]
    return "\n\n".join([*text, origin(name, runs, shared)]) + "\n"


def epochs(path: Path, runs: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a file of scripts/epochs.py, in percent, with what is read of a run that ends there.

    mean_test_top1: of WINDOW epochs; chosen_test_top1: where validation was best so far. The same for top-5.
    """
    table = core.as_numbers(runs, [*METRICS, *VALID], 100).astype({"epoch": int})
    if (table.groupby("run_id")["epoch"].diff() <= 0).any():
        raise ReportError(f"{path} has an epoch after a later one; gather it again by scripts/epochs.py")
    for metric, valid in zip(METRICS, VALID):
        table[f"mean_{metric}"] = table.groupby("run_id")[metric].transform(
            lambda values: values.rolling(WINDOW).mean()
        )
        best = table.groupby("run_id")[valid].cummax()
        is_new = best > best.groupby(table["run_id"]).shift(fill_value=-1)
        table[f"chosen_{metric}"] = table[metric].where(is_new).groupby(table["run_id"]).ffill()
    return table


def published_ends(path: Path, table: pd.DataFrame) -> pd.DataFrame:
    """Return the published row of each run, in percent; NaN where a table is none of the paper's."""
    name = path.stem.removesuffix("_epochs")
    rows, _ = read_published(name if name in TABLES else None)
    paper = pd.DataFrame(rows, columns=["method", "p_k", *METRICS]).drop_duplicates(["method", "p_k"])
    paper = 100 * paper.set_index(["method", "p_k"]).apply(pd.to_numeric)
    first = table.groupby("run_id", sort=False)[["method", "p_k"]].first()
    return paper.reindex(pd.MultiIndex.from_frame(first)).set_axis(first.index)


def epochs_text(path: Path, runs: pd.DataFrame) -> str:
    """Return Markdown: what each run reached after some epochs, and the differences to cross-entropy by seed."""
    table, columns = epochs(path, runs), [f"{kind}_{metric}" for kind in KINDS for metric in METRICS]
    lines, published, reached, gains = core.lines_of(table), published_ends(path, table), [], []
    baselines = {core.experiment(line): line for line in lines[::-1] if line["method"].iloc[0] == SOFTMAX}
    settings = core.settings_of(lines)[0]
    own = [name for name in settings if (settings.groupby("method")[name].nunique() > 1).any()]
    settings["p_k"] = settings["p_k"].map(core.shown_p_k)
    settings = settings[["method", *own]].rename(columns=HEADINGS).map(short)
    for line, setting in zip(lines, settings.to_dict("records")):
        if line.duplicated(["seed", "epoch"]).any():
            raise ReportError(f"{path} has two runs of one seed that no column tells apart: {line['run_id'].unique()}")
        for run_id, run in line.set_index("epoch").groupby("run_id", sort=False):
            for epoch in sorted({*MILESTONES, run.index[-1]} & {*run.index}):
                cells = dict(zip(COLUMNS, run.loc[epoch, columns].map("{:.2f}".format)))
                reached.append({**setting, "seed": run["seed"].iloc[0], "epochs": str(epoch), **cells})
                if epoch == 200:
                    ends = {f"published {label}": published.loc[run_id, metric] for metric, label in METRICS.items()}
                    reached[-1] |= {label: f"{end:.2f}" for label, end in ends.items() if not math.isnan(end)}
        base = baselines.get(core.experiment(line), line)
        ours, theirs = (side.set_index(["seed", "epoch"])[columns] for side in (line, base))
        leads = (ours - theirs).dropna().reset_index("epoch") if base is not line else ours[:0].reset_index("epoch")
        common = leads.groupby("seed")["epoch"].max().min()  # the last epoch that all pairs have
        for epoch, there in leads.groupby("epoch"):
            if epoch in (*MILESTONES, common):
                cells = dict(zip(COLUMNS, (str(interval(there[name])) for name in columns)))
                gains.append({**setting, "epochs": str(epoch), "seeds": str(len(there)), **cells})
    machines, precision = (", ".join(sorted(set(table[name]))) for name in ("device_name", "precision"))
    pairs = table[["method", "p_k"]].drop_duplicates().itertuples()
    p_k = "; ".join(f"{pair.method} {core.shown_p_k(pair.p_k)}" for pair in pairs)
    differences = ""
    if gains:  # a file of cross-entropy alone has none
        caption = "Difference to cross-entropy in points, paired by seed, ± 95 % interval."
        differences = f"{caption}\n\n{as_markdown(pd.DataFrame(gains))}\n\n"
    return (
        f"Test accuracy in percent, mean of the last {WINDOW} epochs, and at the best validation epoch so far.\n\n"
        f"{as_markdown(pd.DataFrame(reached).fillna(''))}\n\n{differences}"
        f"Runs: {path.name}, {machines}, precision {precision}. P_K: {p_k}.\n"
    )
