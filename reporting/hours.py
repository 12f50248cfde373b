"""How long this repository's runs took, from the seconds of their rows."""

from pathlib import Path

import pandas as pd

from reporting import markdown


def seconds_of(file: Path) -> pd.DataFrame:
    """The seconds of each run of a results file, training and evaluation, beside its device."""
    rows = pd.read_csv(file)
    seconds = rows["train_seconds"] + rows["eval_seconds"].fillna(0)
    if "num_heads" in rows:  # in older rows the seconds are those of all classifiers of the pass
        seconds = seconds / rows["num_heads"].fillna(1)
    return pd.DataFrame({"seconds": seconds, "device": rows["device_name"]})


def hours(*files: Path) -> str:
    """Markdown: the number of runs of some results files on each device, the median run and all together."""
    runs = pd.concat([seconds_of(file) for file in files])
    parts = []
    for device, group in runs.groupby("device", sort=False)["seconds"]:
        count = f"{len(group):,} runs"
        if len(group) == 1:
            count = "1 run"
        median = markdown.duration(group.median())
        parts.append(f"{count} on {device}, {median} each (median), {markdown.duration(group.sum())} in all")
    return f"Our rows: {'; '.join(parts)}."
