"""Tables of inverse temperatures: the best of each method, and auto beside the default."""

import math
from pathlib import Path

import pandas as pd

from reporting import markdown, tables
from reporting.compare import Interval
from reporting.frames import METRICS, VALID, identity_of, lines_of, p_k_of, read_runs
from studies.tuning import DIGITS
from topk_losses import METHODS

LOGIT_STD = "last_test_logit_std"
CAPTION = (
    "Test accuracy in percent at the inverse temperature that validation chose, ± standard deviation over seeds. In "
    "brackets: times the default, whether it is the least or the largest that was tried, and which others tie on "
    "validation. Beside it the default and, where they ran, auto and the better schedule, of the same seeds."
)


def temperature_lines(runs: pd.DataFrame) -> list[pd.DataFrame]:
    """The runs of each configuration but the temperature, of the seeds that all temperatures have.

    They stand by P_K and in the library's order.

    number: the inverse temperature, NaN where it is none or changes. ended_at: what it was at the end.

    Raises:
        ValueError: the temperatures of a configuration have no seed in common.
    """
    number = pd.to_numeric(runs["inverse_temperature"], errors="coerce")
    ended_at = number
    if "last_inverse_temperature" in runs:
        ended_at = runs["last_inverse_temperature"].fillna(number)
    place = runs["method"].map(tables.library_order)
    runs = runs.assign(number=number, ended_at=ended_at.fillna(0), place=place)
    runs = runs.sort_values(["place", "ended_at"], kind="stable")
    runs = runs.sort_values("p_k", key=lambda cells: cells.str.split(), ascending=False, kind="stable")
    return list(map(of_common_seeds, lines_of(runs, ["inverse_temperature"])))


def temperatures(name: str, runs: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """The cells of each method's best inverse temperature by validation, and where the runs come from.

    Best: by the mean over the seeds of P_K(1) top-1 + (1 - P_K(1)) top-5. The least of those that tie.
    """
    lines = temperature_lines(runs)
    runs = pd.concat(lines)
    firsts = pd.DataFrame([line.iloc[0] for line in lines]).reset_index(drop=True)
    own, shared = markdown.settings_of(firsts, identity_of(firsts, ["method", "p_k", "inverse_temperature"]))
    rows = []
    for line in lines:
        row = {}
        for column in ["method", "p_k", *own]:
            row[markdown.heading(column)] = markdown.setting(column, line[column].iloc[0])
        rows.append(row | temperature_cells(line))
    cells = pd.DataFrame(rows)
    for column in ["p_k", *own]:
        heading = markdown.heading(column)
        if cells[heading].nunique() == 1:
            shared.by_name[{"p_k": "P_K"}.get(column, column)] = cells.pop(heading).iloc[0]
    return markdown.without_empty_columns(cells), markdown.origin(name, runs, shared)


def of_common_seeds(line: pd.DataFrame) -> pd.DataFrame:
    """The runs of the seeds that each inverse temperature of a line has."""
    is_common = line.groupby("seed")["inverse_temperature"].transform("nunique")
    common = line[is_common == line["inverse_temperature"].nunique()]
    if common.empty:
        first = line.iloc[0]
        raise ValueError(
            f"no seed has run at every inverse temperature of {first['method']} with P_K {markdown.p_k(first['p_k'])}, "
            "so that nothing says which is the best: leave some out by --where seed=..."
        )
    return common


def as_markdown(name: str, runs: pd.DataFrame) -> str:
    cells, source = temperatures(name, runs)
    return f"{CAPTION}\n\n{markdown.table(cells)}\n\n{source}\n"


def temperature_cells(line: pd.DataFrame) -> dict[str, str]:
    """The cells of one method and P_K, by their headings."""
    groups = line.groupby("inverse_temperature", sort=False)
    means = groups[[*METRICS, *VALID, "number"]].mean()
    share = p_k_of(line["p_k"].iloc[0])[0]
    aim = (share * means["valid_top1"] + (1 - share) * means["valid_top5"]).round(DIGITS)
    is_schedule = aim.index.str.contains(":")
    constant = aim[~is_schedule & (aim.index != "auto")]
    schedules = aim[is_schedule]
    chosen = line.iloc[:0]
    if len(constant):
        chosen = groups.get_group(constant.idxmax())
    default = None
    method = METHODS.get(line["method"].iloc[0])
    if method is not None:  # not a user's own
        default = method.inverse_temperature
    cells = best_cells(chosen, means["number"], default, about_ties(constant))
    for metric, label in METRICS.items():
        cells[label] = markdown.mean_std(chosen[metric])
    others = {"auto": "auto"}
    if default is not None:
        others["default"] = f"{default:g}"
    if len(schedules):
        others["schedule"] = schedules.idxmax()
    for kind in ("default", "auto", "schedule"):
        temperature = others.get(kind, "")
        if kind == "schedule":
            cells["schedule"] = temperature
        for metric, label in METRICS.items():
            mean = means[metric].get(temperature, math.nan)
            cells[f"{kind} {label}"] = markdown.fixed(mean)
    cells["seeds"] = str(len(chosen))
    return cells


def about_ties(aim: pd.Series) -> str:
    """Name the inverse temperatures that tie with the least of the best; "" without any."""
    ties = aim.index[aim == aim.max()][1:]
    if ties.empty:
        return ""
    return f", as good as {', '.join(ties)}"


def best_cells(chosen: pd.DataFrame, numbers: pd.Series, default: float | None, ties: str) -> dict[str, str]:
    """The best inverse temperature, and its product with the standard deviation of the logits."""
    cells = {"inverse temperature": "—", "times logit std": ""}
    best = chosen["number"].mean()
    if not best > 0 or default is None:
        return cells
    end = ""
    if best == numbers.max():
        end = ", the largest"
    if best == numbers.min():
        end = ", the least"
    cells["inverse temperature"] = f"{best:g} ({best / default:g}x{end}){ties}"
    if LOGIT_STD in chosen:
        cells["times logit std"] = f"{best * chosen[LOGIT_STD].mean():.2g}"
    return cells


def auto_gains(path: Path, *methods: str) -> str:
    """Markdown: auto minus the default temperature, each at the learning rate that validation chose.

    Read from the trials of 5 epochs.
    """
    runs = read_runs(path, ["n_epochs=5"])
    runs = runs[runs["method"].isin(methods)]
    runs = runs.assign(score=runs["valid_top1"] + runs["valid_top5"], is_auto=runs["inverse_temperature"] == "auto")
    keys = ["method", "p_k", "m"]
    rows = []
    for key, group in runs.groupby(keys, sort=False):
        best = {}
        for is_auto, tried in group.groupby("is_auto"):
            best[is_auto] = tried.loc[tried["score"].idxmax()]
        if len(best) < 2:
            continue
        row = {}
        for name, value in zip(keys, key):
            row[markdown.heading(name)] = markdown.setting(name, value)
        for metric, label in METRICS.items():
            row[f"Δ {label}"] = markdown.interval(Interval(best[True][metric] - best[False][metric], math.nan))
        rows.append(row)
    return f"{markdown.table(rows)}\n\n{markdown.origin(path.stem, runs, markdown.Shared())}\n"


def sorted_scores(folder: Path) -> str:
    """Markdown: what sorting m of the scores costs, at the inverse temperature that validation chose."""
    rows = []
    for classes in (100, 1000):
        runs = read_runs(folder / f"temperature_classes_{classes}.csv", ["p_k=0.5 0 0 0 0.5"])
        cells, _ = temperatures("", runs)
        cells = cells.set_index(["method", "m"])
        for method in sorted(cells.index.unique("method")):
            row = {"classes": f"{classes:,}", "method": f"`{method}`"}
            for name in METRICS.values():
                for label, m in (("m = 16", "16"), ("all", str(classes))):
                    row[f"{name}, {label}"] = cells.loc[(method, m), name].partition(" ")[0]
            rows.append(row)
    return markdown.table(rows)
