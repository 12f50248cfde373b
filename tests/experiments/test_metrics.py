"""Counting hits agrees with a stable sort, written out slowly."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments.common.metrics import TOP_K, count_hits, hit_fractions, summary

# Few distinct values, so that ties are frequent; NaN and infinities among them.
SCORES = st.sampled_from([-math.inf, -1.0, 0.0, 0.25, 0.5, 2.0, math.inf, math.nan])


@st.composite
def batches(draw):
    n = draw(st.integers(1, 25))
    batch = draw(st.integers(1, 4))
    rows = draw(st.lists(st.lists(SCORES, min_size=n, max_size=n), min_size=batch, max_size=batch))
    labels = draw(st.lists(st.integers(0, n - 1), min_size=batch, max_size=batch))
    return rows, labels


def slow_rank(scores: list[float], label: int) -> int:
    """Sort the classes, NaN first, equal scores by index; a true class that is NaN comes last of all."""
    if math.isnan(scores[label]):
        return len(scores) + 1
    order = sorted(range(len(scores)), key=lambda j: (not math.isnan(scores[j]), -scores[j], j))
    return order.index(label) + 1


@given(batches())
def test_ranks_and_hits_agree_with_a_stable_sort(batch):
    rows, labels = batch
    logits, labels_tensor = torch.tensor(rows), torch.tensor(labels)
    ranks = [slow_rank(row, label) for row, label in zip(rows, labels)]
    hits = [sum(rank <= min(k, len(rows[0])) for rank in ranks) for k in TOP_K]
    assert count_hits(logits, labels_tensor).tolist() == hits


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_is_counted_without_a_conversion(dtype):
    logits, labels = torch.eye(30, dtype=dtype), torch.arange(30)
    assert count_hits(logits, labels).tolist() == [30] * 5


def test_validation_chooses_each_k_separately_and_the_earliest_of_equals():
    def entry(epoch, valid, test):
        seconds = {"train_seconds": 0.5, "eval_seconds": 0.25, "peak_memory_mib": 100.0 / epoch, "train_loss": 1.0}
        return {"epoch": epoch, **hit_fractions("valid", valid, 100), **hit_fractions("test", test, 100), **seconds}

    history = [
        entry(1, [10, 40, 50, 60, 70], [11, 41, 51, 61, 71]),
        entry(2, [20, 30, 40, 60, 80], [21, 31, 41, 99, 81]),
        entry(3, [20, 45, 30, 50, 75], [99, 46, 31, 51, 76]),
    ]
    chosen = summary(history, "epoch")
    assert [chosen[f"test_top{k}"] for k in TOP_K] == [0.21, 0.46, 0.51, 0.61, 0.81]
    assert [chosen[f"test_top{k}_epoch"] for k in TOP_K] == [2, 3, 1, 1, 2]
    assert [chosen[f"valid_top{k}"] for k in TOP_K] == [0.2, 0.45, 0.5, 0.6, 0.8]
    assert [chosen[f"last_valid_top{k}"] for k in TOP_K] == [0.2, 0.45, 0.3, 0.5, 0.75]
    assert (chosen["train_seconds"], chosen["eval_seconds"], chosen["peak_memory_mib"]) == (1.5, 0.75, 100.0)
