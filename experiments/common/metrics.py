"""Counting top-k hits, written once for every script; counts go in, fractions come out.

The top-k accuracy of the tables is the share of samples whose true class is among the k largest scores. No
sort is needed for it: the rank of the true class is one more than the number of scores above it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

TOP_K = (1, 3, 5, 10, 20)
LAST = ("test_", "valid_", "clean_")  # what a row has of the last evaluation, too


def count_hits(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the number of top-1, 3, 5, 10 and 20 hits (TOP_K) in a batch, (5,) int64 on the logits' device.

    logits (batch, n) of any floating dtype, labels (batch,) int64 in [0, n). Equal scores, frequent in half precision,
    rank by class index. A NaN ranks above every number, and a true class that is NaN is never a hit. With n < k classes
    top-k means top-n. Nothing is read back to the host.
    """
    true_scores = logits.gather(1, labels.unsqueeze(1))  # (batch, 1)
    n = logits.shape[1]
    classes = torch.arange(n, device=logits.device)
    above = ~(logits <= true_scores)  # (batch, n), True where a comparison with NaN is undecided
    tied_before = (logits == true_scores) & (classes < labels.unsqueeze(1))  # (batch, n)
    ranks = 1 + (above | tied_before).sum(1)  # (batch,), of the true class; n + 1 where that is NaN
    return torch.stack([(ranks <= min(k, n)).sum() for k in TOP_K])


def hit_fractions(split: str, hits: Sequence[int], num_samples: int) -> dict[str, float]:
    """Name the counts of one split as fractions in [0, 1]: {"valid_top1": ..., "valid_top5": ..., ...}."""
    return {f"{split}_top{k}": int(count) / num_samples for k, count in zip(TOP_K, hits)}


def summary(history: Sequence[Mapping[str, Any]], clock: str) -> dict[str, Any]:
    """Return the columns of a row: chosen and last accuracies, losses, seconds and memory.

    `history` has one entry per evaluation, in order. For each k the evaluation with the best validation accuracy is
    chosen, as published, the earliest of equals: its valid_top<k> and, if there is a test set, its test_top<k> and
    test_top<k>_<clock>.
    """
    last = history[-1]
    columns: dict[str, Any] = {}
    for k in TOP_K:
        if f"valid_top{k}" in last:
            columns |= chosen(history, k, clock)
    for name, value in last.items():
        if name.startswith(LAST):
            columns[f"last_{name}"] = value
    for name in ("train_seconds", "eval_seconds"):
        columns[name] = math.fsum(entry[name] for entry in history)
    columns["peak_memory_mib"] = max(entry["peak_memory_mib"] for entry in history)
    columns["last_train_loss"] = last_train_loss(history)
    columns["last_inverse_temperature"] = last.get("inverse_temperature")
    return columns


def chosen(history: Sequence[Mapping[str, Any]], k: int, clock: str) -> dict[str, Any]:
    """The top-k accuracies of the evaluation that is best in validation."""
    best = max(history, key=lambda entry: entry[f"valid_top{k}"])  # max() keeps the first of equals
    columns = {}
    if f"test_top{k}" in best:
        columns[f"test_top{k}"] = best[f"test_top{k}"]
        columns[f"test_top{k}_{clock}"] = best[clock]
    columns[f"valid_top{k}"] = best[f"valid_top{k}"]
    return columns


def last_train_loss(history: Sequence[Mapping[str, Any]]) -> float | None:
    """The mean training loss of the last epoch, which may have several evaluations; None without training."""
    last = history[-1]
    if last["train_loss"] is None:
        return None
    losses = []
    num_steps = 0
    for entry in history:
        in_last_epoch = entry is last or ("epoch" in last and entry["epoch"] == last["epoch"])
        if in_last_epoch:
            steps = entry.get("train_steps", 1)
            losses.append(entry["train_loss"] * steps)
            num_steps += steps
    return math.fsum(losses) / num_steps
