"""Which settings the trials of heads.sh try, and which of them is the best."""

import shlex
from pathlib import Path

import pandas as pd
import pytest
import torch

from experiments.finetune_imagenet import parse_arguments
from scripts.sweeping import heads
from tests.scripts.test_published_rows import number_or_word, published
from topk_losses.methods import SINGLE_K


def asked(stage: str, methods: list[str], results: Path) -> list:
    """The configurations of each command of a stage."""
    content = {"train_embeddings": torch.ones(2, 2), "train_labels": torch.arange(2)}
    torch.save(content, results.parent / "e.pt")
    found = []
    for row in heads.rows_of(stage, str(results.parent / "e.pt"), methods, results):
        args = parse_arguments(shlex.split(row)[2:])
        found += [args, *args.also]
    return found


def test_every_trial_has_a_p_k_of_the_paper_and_what_is_of_one_k_has_k_5(tmp_path):
    top5 = next(number_or_word(row["p_k"]) for row in published("table1") if row["method"] == "smooth_hard_topk")
    p_ks = {number_or_word(row["p_k"]) for row in published("table4")}
    relaxed = [args for args in asked("trials", ["neuralsort", "lapsum"], tmp_path / "heads.csv")]
    tried = {tuple(args.p_k) for args in relaxed}
    assert tried <= p_ks
    assert top5 in tried
    methods = [method for method in SINGLE_K if method != "imbalanced_noised_topk"]
    assert {tuple(args.p_k) for args in asked("trials", methods, tmp_path / "heads.csv")} == {top5}


@pytest.mark.parametrize("stage", ["longer", "finals"])
def test_the_best_trial_is_best_in_the_sum_of_validation_top_1_and_top_5(tmp_path, stage):
    """The other two are best in the one and in the other, in test accuracy the last; so the order does not choose."""
    measured = {  # by m: valid top-1 and top-5, test top-1 and top-5
        16: (0.70, 0.80, 0.70, 0.80),
        50: (0.60, 0.88, 0.90, 0.90),
        100: (0.74, 0.70, 0.60, 0.99),
    }
    names = ("valid_top1", "valid_top5", "test_top1", "test_top5")
    for order in (measured, reversed(measured)):
        trials = [
            {"method": "softsort", "p_k": ".5 0 0 0 .5", "m": m, "inverse_temperature": 0.5, "lr": 0.001, "n_epochs": 5}
            | dict(zip(names, measured[m]))
            for m in order
        ]
        pd.DataFrame(trials).to_csv(tmp_path / "heads_trials.csv", index=False)
        assert {args.m for args in asked(stage, ["softsort"], tmp_path / "heads.csv")} == {16}
