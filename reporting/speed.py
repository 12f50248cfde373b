"""Tables of benchmarks: losses beside the official package, and training steps beside cross-entropy's."""

from pathlib import Path

import pandas as pd

from experiments.common.paths import REPOSITORY
from reporting import markdown
from reporting.frames import numbers, read_text

BENCHMARKS = REPOSITORY / "benchmarks"
NETWORK = "splitter_selection"
STEPS = {"training_step": "CPU", "training_step_h100_torch": "H100, eager", "training_step_h100": "H100, Triton kernel"}
OFFICIAL = {
    "method": "Loss",
    "official_over_ours": "`difftopk` / ours",
    "batch": "Batch",
    "n": "Classes",
    "m": "m",
    "ms": "Ours (ms)",
    "official_ms": "`difftopk` (ms)",
    "ours_over_cross_entropy": "Ours / cross-entropy",
}
RATIOS = ("official_over_ours", "ours_over_cross_entropy")
HEADINGS = {"p_k": "P_K", "top1": "top-1", "top5": "top-5"}


def benchmark(file: Path, *columns: str) -> str:
    """A file of benchmarks above what all its rows share. columns: those to show; all by default."""
    rows = read_text(file).drop(columns=["python", "git_commit"], errors="ignore")
    shared = [name for name in rows if rows[name].nunique() == 1]
    source = ", ".join(f"{name} {rows[name][0]}" for name in shared if rows[name][0])
    names = list(columns) or [name for name in rows if name not in shared]
    shown = {}
    for name in names:
        cells = rows[name]
        if name in ("top1", "top5"):
            cells = cells.astype(float).map(markdown.fixed)
        if name == "p_k":
            cells = cells.map(markdown.p_k)
        shown[HEADINGS.get(name, name.replace("_", " "))] = cells
    return f"{markdown.table(pd.DataFrame(shown))}\n\n`{file.name}`: {source}."


def times(ratio: float) -> str:
    """A ratio with one decimal below 10, and none above."""
    decimals = int(ratio < 9.95)  # 9.95 is rounded to 10
    return f"{ratio:,.{decimals}f}"


def official(file: Path) -> str:
    """Our times beside the official package's, where both ran."""
    rows = read_text(file).query("official_ms != ''")
    rows = rows.assign(**{name: numbers(rows[name]).map(times) for name in RATIOS})
    table = rows.assign(method="`" + rows["method"] + "`")[list(OFFICIAL)].rename(columns=OFFICIAL)
    machine = rows.iloc[0]
    threads = f"{machine['threads']} threads"
    if machine["threads"] == "1":
        threads = "1 thread"
    return f"{markdown.table(table)}\n\n`{file.name}`: {machine['device']}, {threads}, float32."


def step_times(name: str) -> pd.DataFrame:
    return read_text(BENCHMARKS / f"{name}.csv").set_index("method")


def training_steps() -> str:
    """The time of a ResNet-18 training step with each loss, as a multiple of cross-entropy's."""
    first = step_times("training_step")
    columns = {}
    machines = []
    for name, label in STEPS.items():
        steps = step_times(name)
        columns[f"{label} (ms)"] = steps["ms_per_step"]
        columns[f"{label} / cross-entropy"] = steps["over_softmax"]
        machines.append(f"`{name}.csv`: {steps['device'].iloc[0]}")
    table = pd.DataFrame(columns).reindex(first.index).drop(index="augmentation").fillna("").reset_index()
    about = "A ratio is the median of the ratios turn by turn, not that of the medians"
    return f"{markdown.table(table)}\n\n{about}. {'; '.join(machines)}."


def summary() -> str:
    """The README's sentences on speed."""
    losses = read_text(BENCHMARKS / "losses_all.csv")
    large = losses.query("method == @NETWORK and n == '1000' and m == '16'").iloc[0]
    cpu = numbers(step_times("training_step")["over_softmax"])
    h100 = numbers(step_times("training_step_h100")["over_softmax"])
    eager = numbers(step_times("training_step_h100_torch")["over_softmax"])
    cost = (
        f"`{NETWORK}` takes {float(large['ours_over_cross_entropy']):.1f} times as long as cross-entropy with 1,000 "
        f"classes and m = 16 (batch {large['batch']}, two CPU threads). A ResNet-18 step with it takes "
        f"{cpu[NETWORK]:.2f} times as long on a CPU. On an H100 it is {h100[NETWORK]:.2f} times with the Triton "
        f"kernel, and {eager[NETWORK]:.1f} times without."
    )
    eager = eager.drop(h100.index)  # those with a kernel
    slow = eager[eager > 2]
    names = ", ".join(f"`{method}`" for method in slow.index)
    others = (
        f"A step with {names} takes {slow.min():.0f} to {slow.max():.0f} times as long there. "
        "On a GPU only 100 classes were timed."
    )
    ratio = numbers(losses["official_over_ours"]).dropna()
    on_one = numbers(read_text(BENCHMARKS / "losses_one_thread.csv")["official_over_ours"]).dropna()
    sparse = losses.loc[losses["official_path"] == "sparse", "method"].unique()
    through = " and ".join(f"`{method}`" for method in sparse)
    fastest = f"{times(ratio.min())} to {times(ratio.max())} times"
    fastest_on_one = f"{times(on_one.min())} to {times(on_one.max())} times"
    medians = f"{times(ratio.median())} and {times(on_one.median())}"
    official = (
        f"Our losses run {fastest} as fast as those of the official package `difftopk` on two CPU threads, and "
        f"{fastest_on_one} on one. The medians of {len(ratio)} cases are {medians}: seven losses at 128 x 100, and at "
        f"500 x 1,000 with m = 16. `difftopk` ran {through} through torch-sparse, and has no such path for the others."
    )
    return f"{cost} {others}\n\n{official}"
