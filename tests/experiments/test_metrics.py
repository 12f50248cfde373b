"""Counting hits agrees with a stable sort, written out slowly."""

import math

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments import train_cifar100
from experiments.common.metrics import TOP_K, count_hits
from tests.experiments.scripts import MACHINE, rows_of, small_network

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
    logits = torch.tensor(rows)
    labels_tensor = torch.tensor(labels)
    ranks = [slow_rank(row, label) for row, label in zip(rows, labels)]
    hits = [sum(rank <= min(k, len(rows[0])) for rank in ranks) for k in TOP_K]
    assert count_hits(logits, labels_tensor).tolist() == hits


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_is_counted_without_a_conversion(dtype):
    logits = torch.eye(30, dtype=dtype)
    labels = torch.arange(30)
    assert count_hits(logits, labels).tolist() == [30] * 5


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The row of a run, and its history as the script wrote it."""
    folder = tmp_path_factory.mktemp("run")
    words = "--dataset digits --limit_train 300 --batch_size 32 --n_epochs 6 --method softmax_cross_entropy --lr .01"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_cifar100, "resnet_cifar", small_network)
        assert train_cifar100.main([*words.split(), *MACHINE.split(), "--results", str(folder / "r.csv")]) == 0
    (row,) = rows_of(folder / "r.csv")
    return row, pd.DataFrame(rows_of(folder / "runs" / row["run_id"] / "epochs.csv")).astype(float)


@pytest.mark.parametrize("k", TOP_K)
def test_validation_chooses_each_k_separately_and_the_earliest_of_equals(written, k):
    row, history = written
    best = history.loc[history[f"valid_top{k}"].idxmax()]  # the first of equals
    assert float(row[f"valid_top{k}"]) == best[f"valid_top{k}"]
    assert float(row[f"test_top{k}"]) == best[f"test_top{k}"]
    assert int(row[f"test_top{k}_epoch"]) == best["epoch"]
    for split in ("valid", "test"):
        assert float(row[f"last_{split}_top{k}"]) == history[f"{split}_top{k}"].iloc[-1]


def test_the_history_has_what_tells_rules_apart(written):
    """Ten classes: all epochs are equal in top-20, of which the first counts; they differ in top-1."""
    row, history = written
    assert (history["valid_top20"] == 1).all()
    assert row["test_top20_epoch"] == "1"
    assert history["test_top1"].nunique() > 1


def test_a_row_has_the_sums_of_seconds_and_the_largest_memory(written):
    row, history = written
    for name in ("train_seconds", "eval_seconds"):
        assert float(row[name]) == pytest.approx(history[name].sum(), rel=1e-12)
    assert float(row["peak_memory_mib"]) == history["peak_memory_mib"].max()
    assert float(row["last_train_loss"]) == history["train_loss"].iloc[-1]
