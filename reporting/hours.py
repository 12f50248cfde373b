"""How long this repository's runs took, from the seconds of their rows."""

from pathlib import Path

import pandas as pd

from experiments.common import settings
from reporting import markdown
from reporting.frames import scripts_of

SAME_PASS = 0.01  # seconds: by less differ the rows of classifiers that are trained in one pass over the data


def passes_of(file: Path) -> pd.DataFrame:
    """The passes over the data of a results file: number of runs, seconds of all of them, device, threads on a CPU.

    Linear classifiers that are trained together have rows with the seconds of the whole pass. In older rows, which have
    `num_heads`, all seeds are in one pass; today each seed has its own. A run of any other script is a pass.
    """
    rows = pd.read_csv(file, low_memory=False)
    found = pd.DataFrame({"seed": rows["seed"], "device": rows["device_name"], "runs": 1})
    found["threads"] = rows["threads"].where(rows["device"] == "cpu")
    found["seconds"] = rows["train_seconds"] + rows["eval_seconds"].fillna(0)
    if "num_heads" in rows:
        found["seed"] = 0
    found["script"] = scripts_of(rows.astype(str).where(rows.notna(), ""))
    found = found.sort_values(["script", "seed", "seconds"])
    is_new = (found["seconds"].diff().abs() > SAME_PASS) | found["seed"].diff().ne(0)
    is_new |= found["script"].ne(settings.HEADS) | found["script"].ne(found["script"].shift())
    return found.groupby(is_new.cumsum()).agg({"seconds": "max", "device": "first", "threads": "first", "runs": "sum"})


def hours(*files: Path) -> str:
    """Markdown: the number of runs of some results files on each device, the median run or pass and all together."""
    passes = pd.concat([passes_of(file) for file in files])
    parts = []
    for device, group in passes.groupby("device", sort=False):
        runs = group["runs"].sum()
        count = f"{runs:,} runs"
        if runs == 1:
            count = "1 run"
        if runs > len(group):
            count += f" in {len(group)} passes over the data"
        median = markdown.duration(group["seconds"].median())
        whole = markdown.duration(group["seconds"].sum())
        parts.append(f"{count} on {device}{threads_of(group)}, {median} each (median), {whole} in all")
    return f"Our rows: {'; '.join(parts)}."


def threads_of(passes: pd.DataFrame) -> str:
    """How many threads a run had on a CPU: " with 1 or 2 threads"; "" on a GPU."""
    numbers = sorted(passes["threads"].dropna().unique())
    if not numbers:
        return ""
    if numbers == [1]:
        return " with one thread"
    return f" with {' or '.join(map(markdown.number, numbers))} threads"
