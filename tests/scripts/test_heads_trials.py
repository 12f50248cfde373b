"""Which settings the trials of heads.sh try, and which of them is the best."""

import argparse
import shlex
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
import torch

from experiments.finetune_imagenet import main, parse_arguments
from scripts import heads
from tests.scripts.test_published_rows import number_or_word, published
from topk_losses.methods import SINGLE_K

TABLE3 = ("softmax_cross_entropy", "smooth_hard_topk", "neuralsort", "softsort", "sinkhorn_sort", "splitter_selection")


def asked(stage: str, methods: list[str], trials: Path, per_p_k: bool = False) -> list:
    """The configurations of each command of a stage."""
    found = []
    results = trials.with_name("heads.csv")
    files = {"trials": trials, "around": trials, "results": results, "data_path": "some.pt"}
    flags = argparse.Namespace(methods=methods, num_valid=5000, per_p_k=per_p_k, **files)
    for row in heads.commands(stage, flags):
        args = parse_arguments(shlex.split(row)[2:])
        found += [args, *args.also]
    return found


def test_every_trial_has_a_p_k_of_the_paper_and_what_is_of_one_k_has_k_5(tmp_path):
    top5 = next(number_or_word(row["p_k"]) for row in published("table1") if row["method"] == "smooth_hard_topk")
    p_ks = {number_or_word(row["p_k"]) for row in published("table4")}
    relaxed = [args for args in asked("trials", ["neuralsort", "lapsum"], tmp_path / "heads_trials.csv")]
    tried = {tuple(args.p_k) for args in relaxed}
    assert tried <= p_ks
    assert top5 in tried
    methods = [method for method in SINGLE_K if method != "imbalanced_noised_topk"]
    assert {tuple(args.p_k) for args in asked("trials", methods, tmp_path / "heads_trials.csv")} == {top5}


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
        assert {args.m for args in asked(stage, ["softsort"], tmp_path / "heads_trials.csv")} == {16}


def test_the_trials_of_table_3_are_the_papers_rows_in_its_order_and_as_many_for_each(tmp_path):
    rows = Counter((args.method, tuple(args.p_k)) for args in asked("table3", TABLE3, tmp_path))
    assert set(rows.values()) == {9}
    published_rows = [(row["method"], number_or_word(row["p_k"])) for row in published("tables2_3_imagenet1k")]
    table4 = [(row["method"], number_or_word(row["p_k"])) for row in published("table4")]
    relaxed = [row for row in table4 if row[0] in TABLE3[2:]]
    assert len(rows) == 2 + len(relaxed) == 22
    assert [method for method, _ in published_rows[:6]] == list(TABLE3)
    assert [(method, (p_k + 5 * (0,))[:5]) for method, p_k in rows][:2] == published_rows[:2]
    for method in TABLE3[2:]:
        assert [p_k for name, p_k in rows if name == method] == [p_k for name, p_k in relaxed if name == method]
    assert set(published_rows[2:]) <= set(rows)


def test_table_3_chooses_a_trial_for_each_p_k_of_a_method(tmp_path):
    """The study on made-up features, from trials to the finals of two seeds."""
    labels = torch.arange(240) % 6
    features = torch.nn.functional.one_hot(labels, 6) + torch.randn(240, 6, generator=torch.Generator().manual_seed(0))
    parts = {f"{split}_{name}": values for split in ("train", "test")
             for name, values in (("embeddings", features), ("labels", labels))}  # fmt: skip
    torch.save(parts, tmp_path / "some.pt")
    trials, finals = tmp_path / "trials.csv", tmp_path / "finals.csv"
    methods, data = ["softmax_cross_entropy", "softsort"], str(tmp_path / "some.pt")
    files = {"trials": trials, "around": trials, "results": finals, "data_path": data}
    flags = argparse.Namespace(methods=methods, num_valid=40, per_p_k=True, **files)
    small = ["--n_epochs", "1", "--batch_size", "20", "--device", "cpu", "--threads", "1"]
    for stage, seeds in (("table3", ["0"]), ("finals", ["1", "2"])):
        for row in heads.commands(stage, flags):
            assert main([*shlex.split(row)[2:], *small, "--m", "6", "--seeds", *seeds]) == 0
    tried, found = pd.read_csv(trials), pd.read_csv(finals)
    assert tried.groupby(["method", "p_k"]).size().tolist() == [9] * 6
    assert found.groupby(["method", "p_k"]).size().tolist() == [2] * 6
    best = tried.loc[(tried.valid_top1 + tried.valid_top5).groupby([tried.method, tried.p_k]).idxmax()]
    chosen = best.set_index(["method", "p_k"])[["lr", "inverse_temperature"]]
    for row in found.itertuples():
        assert chosen.loc[(row.method, row.p_k)].equals(pd.Series([row.lr, row.inverse_temperature], chosen.columns))
    softsort = tried[tried.method == "softsort"]
    best_of_softsort = softsort.loc[(softsort.valid_top1 + softsort.valid_top5).idxmax()]
    more = asked("table3_more", ["softsort"], trials)
    assert {args.inverse_temperature for args in more} == {best_of_softsort.inverse_temperature}
    assert len({(args.lr, args.weight_decay) for args in more}) == len(more) == 6
