"""Tables of results/benchmarks/: losses beside the official package, and training steps beside cross-entropy's."""

from pathlib import Path

import pandas as pd

from scripts.reporting.runs import read_text, shown_p_k
from scripts.reporting.tables import PAPER, as_markdown

BENCHMARKS = PAPER.parent / "benchmarks"
NETWORK = "splitter_selection"
STEPS = {"training_step": "CPU", "training_step_h100_torch": "H100, eager", "training_step_h100": "H100, Triton kernel"}


def benchmark(file: Path, *columns: str) -> str:
    """Return a file of results/benchmarks/ above what all its rows share. columns: those to show; all by default."""
    rows = read_text(file).drop(columns=["python", "git_commit"], errors="ignore")
    shared = [name for name in rows if rows[name].nunique() == 1]
    source = ", ".join(f"{name} {rows[name][0]}" for name in shared if rows[name][0])
    shown = rows[list(columns) or [name for name in rows if name not in shared]].copy()
    for name in shown.columns.intersection(["top1", "top5"]):
        shown[name] = shown[name].astype(float).map("{:.2f}".format)
    if "p_k" in shown:
        shown["p_k"] = shown["p_k"].map(shown_p_k)
    headings = {name: name.replace("_", " ") for name in shown} | {"p_k": "P_K", "top1": "top-1", "top5": "top-5"}
    return f"{as_markdown(shown.rename(columns=headings))}\n\n`{file.name}`: {source}."


def official() -> str:
    """Return our times beside the official package's, where both ran."""
    rows = read_text(BENCHMARKS / "losses.csv").query("official_ms != ''")
    columns = {"method": "Loss", "batch": "Batch", "n": "Classes", "m": "m", "ms": "Ours (ms)"}
    columns |= {"official_ms": "`difftopk` (ms)", "official_over_ours": "`difftopk` / ours"}
    columns |= {"ours_over_cross_entropy": "Ours / cross-entropy"}
    table = rows.assign(method="`" + rows["method"] + "`")[list(columns)].rename(columns=columns)
    machine = rows.iloc[0]
    return f"{as_markdown(table)}\n\n`losses.csv`: {machine['device']}, {machine['threads']} threads, float32."


def training_steps() -> str:
    """Return the time of a ResNet-18 training step with each loss, as a multiple of cross-entropy's."""
    frames = [pd.read_csv(BENCHMARKS / f"{name}.csv", dtype=str).set_index("method") for name in STEPS]
    columns = {"CPU (ms)": frames[0]["ms_per_step"]}
    columns |= {f"{label} / cross-entropy": frame["over_softmax"] for label, frame in zip(STEPS.values(), frames)}
    table = pd.DataFrame(columns).reindex(frames[0].index).drop(index="augmentation").fillna("").reset_index()
    machines = "; ".join(f"`{name}.csv`: {frame['device'].iloc[0]}" for name, frame in zip(STEPS, frames))
    return f"{as_markdown(table)}\n\n{machines}."


def summary() -> str:
    """Return the README's sentences on speed."""
    ratio = pd.read_csv(BENCHMARKS / "losses_all.csv")["official_over_ours"].dropna()
    cpu, eager, h100 = (pd.read_csv(BENCHMARKS / f"{name}.csv").set_index("method")["over_softmax"] for name in STEPS)
    eager = eager.drop(h100.index)  # those with a kernel
    slow = eager[eager > 2]
    names = ", ".join(f"`{method}`" for method in slow.index)
    loss = (
        f"On two CPU threads our losses run {ratio.min():.1f} to {ratio.max():,.0f} times as fast as the official "
        f"package `difftopk` without torch-sparse (median {ratio.median():.1f} of {len(ratio)} cases: seven losses at "
        "128 x 100, and at 500 x 1,000 with m = 16)."
    )
    step = (
        f"A ResNet-18 step takes {100 * (cpu[NETWORK] - 1):.1f} % longer with `{NETWORK}` than with cross-entropy on a "
        f"CPU, and {100 * (h100[NETWORK] - 1):.0f} % longer on an H100."
    )
    return f"{loss} {step} On an H100 {names} take {slow.min():.0f} to {slow.max():.0f} times as long."
