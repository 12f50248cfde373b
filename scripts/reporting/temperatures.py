"""What a sweep says of the inverse temperature: a table of the best ones, and a figure for each P_K.

Of each method and P_K the inverse temperature is taken whose runs are best on validation, by the mean over the seeds
of P_K(1) top-1 + (1 - P_K(1)) top-5, and the test accuracies of these runs are shown, in percent, mean ± sample
standard deviation; in brackets as a multiple of the library's default, and whether none beyond it was tried. Beside
them those of the default and of the mode "auto", mean over the seeds.
"""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from scripts.reporting.results import Row, as_markdown, check, check_alike, float_of, mean_std
from scripts.reporting.tables import shown_p_k
from topk_losses import METHODS
from topk_losses.checks import AUTO

SPREAD = "last_test_logit_std"
MEASURED = ["test_top1", "test_top5", "valid_top1", "valid_top5"]
NEEDED = (
    *("method", "p_k", "seed", "num_classes", "train_images", "valid_images", "n_epochs", "batch_size", "lr"),
    *(*MEASURED, "device_name", "torch_version"),
)
APART = (
    *("method", "p_k", "inverse_temperature", "distribution", "art_lambda", "top1_mode", "m", "seed", "order_seed"),
    *("device", "threads", "compile", "graph", "deterministic", "data_dir", "data_path", "batches", "eval_freq"),
)
OPTIONAL = ("inverse_temperature", "last_inverse_temperature", "m")  # empty where there is none
FLOOR_OF_HEADS, FLOOR = 5, 35  # points below the best that a panel of the figure still shows


def ordered(path: Path, rows: Sequence[Row]) -> pd.DataFrame:
    """Return the rows of a file by P_K, then method in the library's order, then temperature; accuracies in percent.

    beta: the inverse temperature, NaN where it is none or changes; temperature: it, auto, or a schedule FROM:TO, as
    text; name: the method, and m where that is not all scores. Raises CommandLineError.
    """
    check_alike(path, rows, NEEDED, APART, OPTIONAL)
    check(path, rows, [SPREAD] * (SPREAD in rows[0]))
    changing = [row for row in rows if row["inverse_temperature"] and float_of(row["inverse_temperature"]) is None]
    check(path, changing, ["last_inverse_temperature"])
    frame = pd.DataFrame(rows)
    given = frame["inverse_temperature"]
    frame["beta"] = pd.to_numeric(given, errors="coerce")
    frame["temperature"] = given.where(frame["beta"].isna(), frame["beta"].map("{:g}".format))
    frame["ended_at"] = pd.to_numeric(frame["last_inverse_temperature"]).fillna(frame["beta"]).fillna(0)
    of_all = frame["m"].isin(["", *frame["num_classes"]])
    frame["name"] = frame["method"].where(of_all, frame["method"] + ", m = " + frame["m"])
    frame[MEASURED] = 100 * frame[MEASURED].astype(float)
    frame[[SPREAD] * (SPREAD in frame)] = frame[[SPREAD] * (SPREAD in frame)].astype(float)
    frame["order"] = frame["method"].map(list(METHODS).index)
    frame = frame.sort_values(["order", "ended_at"], kind="stable")
    return frame.sort_values("p_k", key=lambda cells: cells.str.split(), ascending=False, kind="stable")


def text_of(path: Path, rows: Sequence[Row]) -> str:
    """Return the table of a file's rows as Markdown. Raises CommandLineError."""
    frame = ordered(path, rows)
    first = frame.iloc[0]
    trained = first.get("model") or f"linear heads on embeddings of {first['num_classes']} classes"
    machines = (frame["device_name"] + ", PyTorch " + frame["torch_version"]).unique()
    caption = (
        f"{path.name}: {trained} ({first['train_images']} training rows, {first['valid_images']} validate), "
        f"{first['n_epochs']} epochs, batches of {first['batch_size']}, learning rate {float(first['lr']):g}, on "
        f"{' and '.join(machines)}."
    )
    return f"{caption}\n\n{as_markdown(lines_of(frame), words=2)}\n"


def lines_of(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the cells of the table, a line for each method and P_K, as text. frame: of `ordered`."""
    groups = frame.groupby(["p_k", "name"], sort=False)
    return pd.DataFrame({"P_K": shown_p_k(p_k), "method": name, **_cells(heads)} for (p_k, name), heads in groups)


def _cells(heads: pd.DataFrame) -> dict[str, str]:
    """The cells of one method and P_K, by their headings."""
    groups = dict(iter(heads.groupby("temperature", sort=False)))
    means = heads.groupby("temperature", sort=False)[[*MEASURED, "beta"]].mean()
    first = float(heads["p_k"].iloc[0].split()[0])
    aim = first * means["valid_top1"] + (1 - first) * means["valid_top5"]
    is_schedule = aim.index.str.contains(":")
    constant, schedules = aim[~is_schedule & (aim.index != AUTO)], aim[is_schedule]
    rows = groups[constant.idxmax()] if len(constant) else heads[:0]
    default = METHODS[heads["method"].iloc[0]].inverse_temperature
    best, auto, shown, times_spread = rows["beta"].mean(), groups.get(AUTO), "—", ""
    if best > 0 and default is not None:
        end = ", the least" if best == means["beta"].min() else ", the largest" if best == means["beta"].max() else ""
        shown = f"{best:g} ({best / default:g}x{end})"
        times_spread = f"{best * rows[SPREAD].mean():.2g}" if SPREAD in rows else ""
    schedule = schedules.idxmax() if len(schedules) else ""
    both = means["test_top1"].map("{:.2f}".format) + " / " + means["test_top5"].map("{:.2f}".format)
    return {
        **{"inverse temperature": shown, "times spread": times_spread},
        **{f"top-{k}": mean_std(rows[f"test_top{k}"].tolist()) if len(rows) else "" for k in (1, 5)},
        **{"default": both.get("" if default is None else f"{default:g}", ""), "auto": both.get(AUTO, "")},
        "auto ended at": "" if auto is None else f"{auto['ended_at'].mean():.3g}",
        "annealed": f"{schedule}: {both[schedule]}" if schedule else "",
        "seeds": str(len(rows)),
    }


def draw(path: Path, rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw <name of the file>_P_K.png and .svg for each P_K of its rows, and return their paths."""
    from scripts.reporting.figure_style import GREY, PAGE, legend, look, note, pyplot, save  # takes a second

    drawn, frame = [], ordered(path, rows)
    of_heads = SPREAD in frame
    trained, floor = ("Heads", FLOOR_OF_HEADS) if of_heads else ("Networks", FLOOR)
    times_spread = " times the spread of a row's logits at the end" if of_heads else ""
    label = f"inverse temperature{' × standard deviation of the logits' if of_heads else ''}"
    frame["x"] = frame["beta"] * (frame[SPREAD] if of_heads else 1)
    baseline = frame[(frame["p_k"] == "1") & (frame["method"] == "softmax_cross_entropy")]
    for p_k, methods in frame.groupby("p_k", sort=False):
        several = methods.groupby("name", sort=False).filter(lambda heads: heads["temperature"].nunique() > 1)
        if several.empty:
            continue
        curves = several.dropna(subset="beta").groupby(["name", "beta"], sort=False).mean(numeric_only=True)
        figure, axes = pyplot.subplots(1, 2, figsize=(PAGE, 3.6))
        for axis, accuracy, k in zip(axes, ("test_top1", "test_top5"), (1, 5)):
            for name, points in curves.groupby("name", sort=False):
                axis.plot(points["x"], points[accuracy], **look(name.partition(",")[0]), markersize=3)
            if len(baseline):
                axis.axhline(baseline[accuracy].mean(), color=GREY, linewidth=0.8)
            best = curves[accuracy].max()
            axis.set(xscale="log", ylim=(best - floor, best + floor / 10), xlabel=label, title=f"test top-{k}, %")
        legend(figure, several["name"])
        note(
            figure,
            f"{trained} trained with $P_K$ = {shown_p_k(p_k)}: accuracy, mean over the seeds, over β{times_spread}. "
            f"Points are β by factors of 2 to 2.5; what lies more than {floor} points below the best is cut off. "
            "Grey line: softmax cross-entropy. Smooth losses: their τ in place of β.",
        )
        drawn += save(figure, folder, f"{path.stem}_{p_k.replace(' ', '_').replace('0.', '.')}")
    return drawn
