"""Counting top-k hits, written once for every script; counts go in, fractions come out.

The top-k accuracy of the tables is the share of samples whose true class is among the k largest scores. No
sort is needed for it: the rank of the true class is one more than the number of scores above it.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

TOP_K = (1, 5, 10, 20)
# What a history says of each evaluation, in both scripts.
EVALUATION = (
    *(f"{split}_top{k}" for split in ("valid", "test") for k in TOP_K),
    *("epoch", "train_loss", "valid_loss", "test_loss", "train_seconds", "eval_seconds", "peak_memory_mib"),
)


def true_class_ranks(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the rank of each sample's true class, (..., batch) int64, 1 = largest score.

    logits (..., batch, n) of any floating dtype, labels (..., batch) int64 in [0, n). Equal scores rank by class
    index, as in a stable descending sort: half-precision logits tie often, so a pessimistic rule would lower
    their accuracy, and the order of torch.topk differs between devices. A NaN ranks above every number, and a
    true class whose own score is NaN gets rank n + 1: it is never a hit.
    """
    true_scores = logits.gather(-1, labels.unsqueeze(-1))  # (..., batch, 1)
    classes = torch.arange(logits.shape[-1], device=logits.device)  # (n,)
    above = ~(logits <= true_scores)  # (..., batch, n), True where a comparison with NaN is undecided
    tied_before = (logits == true_scores) & (classes < labels.unsqueeze(-1))  # (..., batch, n)
    return 1 + (above | tied_before).sum(-1)


def count_hits(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the number of top-1, 5, 10 and 20 hits (TOP_K) in a batch, (4,) int64 on the logits' device.

    logits (batch, n) and labels (batch,), or those of several heads, (heads, batch, n) and (heads, batch), whose
    counts are (heads, 4).

    With n classes and k > n, top-k means top-n: on the ten classes of digits the top-10 and top-20 counts
    both equal the batch. Nothing is read back to the host, so the counts of an epoch can be summed on the
    device.
    """
    n = logits.shape[-1]
    ranks = true_class_ranks(logits, labels)  # (..., batch)
    return torch.stack([(ranks <= min(k, n)).sum(-1) for k in TOP_K], dim=-1)  # (..., 4)


def hit_fractions(split: str, hits: Sequence[int], num_samples: int) -> dict[str, float]:
    """Name the counts of one split as fractions in [0, 1]: {"valid_top1": ..., "valid_top5": ..., ...}."""
    return {f"{split}_top{k}": int(count) / num_samples for k, count in zip(TOP_K, hits)}


def chosen_by_validation(history: Sequence[Mapping[str, float]], clock: str) -> dict[str, float]:
    """Return test_top<k>, valid_top<k> and test_top<k>_<clock> of the evaluation that validation chose for each
    k.

    `history` has one entry per evaluation, in order, with the fractions of hit_fractions (of all k of TOP_K or of some)
    and, under the name `clock`, when it was: "epoch" or "step". Each k is chosen separately, as published; of equally
    good evaluations the earliest is taken.
    """
    chosen = {}
    for k in (k for k in TOP_K if f"valid_top{k}" in history[0]):
        best = max(history, key=lambda entry: entry[f"valid_top{k}"])  # max() keeps the first of equals
        chosen[f"test_top{k}"] = best[f"test_top{k}"]
        chosen[f"test_top{k}_{clock}"] = best[clock]
        chosen[f"valid_top{k}"] = best[f"valid_top{k}"]
    return chosen


def summary(history: Sequence[Mapping[str, float]], clock: str) -> dict[str, float]:
    """Return what a row says of a run's evaluations: the chosen ones, the last one, the seconds and the memory.

    `history` and `clock` are those of `chosen_by_validation`; the entries also hold train_seconds,
    eval_seconds and peak_memory_mib.
    """
    last = history[-1]
    return {
        **chosen_by_validation(history, clock),
        **{f"last_{name}": last[name] for name in last if name.startswith(("test_", "valid_"))},
        "train_seconds": math.fsum(entry["train_seconds"] for entry in history),
        "eval_seconds": math.fsum(entry["eval_seconds"] for entry in history),
        "peak_memory_mib": max(entry["peak_memory_mib"] for entry in history),
    }
