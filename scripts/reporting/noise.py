"""The study of wrong labels (scripts/noise.py): which loss a run has, and which trial each validation chooses."""

from pathlib import Path

import pandas as pd

CHOICES = {"noisy": "valid", "clean": "clean"}  # what chooses: the split of that name at the end of training
METHOD_LOSSES = {  # where more than the method tells losses apart: see loss_of
    "softmax_cross_entropy": "cross_entropy",
    "forward_correction": "forward_uniform",
    "generalized_cross_entropy": "gce",
    "symmetric_cross_entropy": "sce",
    "phuber_cross_entropy": "phuber",
}
RELAXED = ("splitter_selection", "lapsum", "softsort", "df_topk")


def loss_of(run: pd.Series) -> str:
    """Return the name in scripts/noise.py of the loss that a run has."""
    for name in ("mixup", "label_smoothing"):
        if run[name]:
            return name
    if run["noise_matrix"]:
        return f"forward_{Path(run['noise_matrix']).stem.rpartition('_')[2]}"
    if run["noise_rate"] and run["method"] in RELAXED:
        return f"{run['method']}_forward"
    return METHOD_LOSSES.get(run["method"], run["method"])


def read_noise(path: Path) -> pd.DataFrame:
    """Read a file of the study, cells as text, with the loss of each run in a column."""
    runs = pd.read_csv(path, dtype=str, keep_default_na=False)
    return runs.assign(loss=[loss_of(run) for _, run in runs.iterrows()])


def choose(trials: pd.DataFrame, loss: str, choice: str) -> pd.Series:
    """Return the trial of a loss with the highest top-1 + top-5 at the end of training, on one of CHOICES.

    Raises:
        ValueError: the loss has no trials.
    """
    found = trials[trials["loss"] == loss]
    if found.empty:
        raise ValueError(f"there is no trial of {loss}")
    split = CHOICES[choice]
    score = found[f"last_{split}_top1"].astype(float) + found[f"last_{split}_top5"].astype(float)
    return found.loc[score.idxmax()]
