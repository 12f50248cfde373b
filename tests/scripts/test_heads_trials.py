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
from tests.scripts.test_sweeps import recipe_of
from tests.scripts.trained import changed
from topk_losses.methods import SINGLE_K

NAMES = ["method", "p_k", "m", "inverse_temperature", "label_smoothing", "weight_decay", "margin", "lr"]
TABLE3 = ("softmax_cross_entropy", "smooth_hard_topk", "neuralsort", "softsort", "sinkhorn_sort", "splitter_selection")


def flags_of(methods: list[str], trials: Path, **others) -> argparse.Namespace:
    files = {"trials": trials, "around": trials, "results": trials.with_name("heads.csv"), "data_path": "some.pt"}
    return argparse.Namespace(**{"methods": methods, "num_valid": 5000, "per_p_k": False, **files, **others})


def asked(stage: str, methods: list[str], trials: Path, **others) -> list:
    """The configurations of each command of a stage. others: flags, such as around."""
    found = []
    for row in heads.commands(stage, flags_of(methods, trials, **others)):
        args = parse_arguments(shlex.split(row)[2:])
        found += [args, *args.also]
    return found


def test_every_trial_has_a_p_k_of_the_paper_and_what_is_of_one_k_has_k_5(tmp_path):
    top5 = next(number_or_word(row["p_k"]) for row in published("table1") if row["method"] == "smooth_hard_topk")
    p_ks = {number_or_word(row["p_k"]) for row in published("table4")}
    tried = {tuple(args.p_k) for args in asked("trials", ["neuralsort", "lapsum"], tmp_path / "heads_trials.csv")}
    assert tried <= p_ks
    assert top5 in tried
    methods = [method for method in SINGLE_K if method != "imbalanced_noised_topk"]
    assert {tuple(args.p_k) for args in asked("trials", methods, tmp_path / "heads_trials.csv")} == {top5}


@pytest.mark.parametrize("stage", ["longer", "finals"])
def test_the_best_trial_is_best_in_the_sum_of_validation_top_1_and_top_5(row, tmp_path, stage):
    """The other two are best in the one and in the other, in test accuracy the last; so the order does not choose."""
    # By m: valid top-1 and top-5, test top-1 and top-5.
    measured = {16: (0.70, 0.80, 0.70, 0.80), 50: (0.60, 0.88, 0.90, 0.90), 100: (0.74, 0.70, 0.60, 0.99)}
    names = ("valid_top1", "valid_top5", "test_top1", "test_top5")
    for order in (measured, reversed(measured)):
        tried = [(row("trials", method="softsort", m=str(m)), dict(zip(names, measured[m]))) for m in order]
        trials = [changed(trial, **accuracies) for trial, accuracies in tried]
        pd.DataFrame(trials).to_csv(tmp_path / "heads_trials.csv", index=False)
        assert {args.m for args in asked(stage, ["softsort"], tmp_path / "heads_trials.csv")} == {16}


def test_each_stage_goes_on_with_the_best_of_the_one_before_and_no_loss_is_refused(row, tmp_path):
    written = set(row("trials"))

    def tried(stage, methods=heads.KNOWN, trials="trials.csv"):
        rows = []
        for args in asked(stage, methods, tmp_path / trials):
            recipe = recipe_of(args)
            row = {name: recipe[name] for name in NAMES} | {"p_k": " ".join(map(str, recipe["p_k"]))}
            row |= {"n_epochs": args.n_epochs, "valid_top1": 0.6, "valid_top5": 0.5}
            assert set(row) <= written
            rows.append({**row, "run": (args.n_epochs, *args.seed, args.results.name, args.num_valid)})
        return pd.DataFrame(rows, dtype=object)

    def same(found, expected, *columns):
        columns = [*NAMES, *columns]
        pd.testing.assert_frame_equal(found[columns], expected[columns].reset_index(drop=True), check_dtype=False)

    first = tried("trials")
    assert list(first["method"].unique()) == heads.KNOWN
    assert all(set(rates) == set(heads.RATES) for _, rates in first.groupby("method")["lr"])
    assert set(first["run"]) == {(5, 0, "trials.csv", 5000)}
    best = first.groupby("method", sort=False).nth(-2)
    first.loc[best.index, "valid_top5"] = 0.9
    first.to_csv(tmp_path / "trials.csv", index=False)

    longer = tried("longer")
    same(longer, best.loc[best.index.repeat(4)].assign(lr=list(heads.RATES) * len(best)))
    assert set(longer["run"]) == {(22, 0, "trials.csv", 5000)}
    longer.loc[(longer["method"] == "lapsum") & (longer["lr"] == 0.0005), "valid_top5"] = 0.95
    pd.concat([first, longer]).to_csv(tmp_path / "trials.csv", index=False)

    finals = tried("finals")
    best.loc[best["method"] == "lapsum", ["lr", "n_epochs"]] = 0.0005, 22
    same(finals, best, "n_epochs")
    assert {run[1:] for run in finals["run"]} == {(*range(1, 11), "heads.csv", 5000)}

    more = tried("more")
    assert set(more["run"]) == {(22, 0, "trials.csv", 5000)}
    without = more[more["inverse_temperature"] == heads.LEVEL]
    assert more.groupby("method").size().to_dict() == {
        method: 60 if method == "lapsum" else 30 for method in heads.KNOWN if method not in SINGLE_K
    }
    assert (len(without), set(without["method"])) == (30, {"lapsum"})
    best = more.loc[sorted([*more.groupby("method").nth(7).index, without.index[-1]])]
    more.loc[best.index, "valid_top5"] = 0.9
    more.to_csv(tmp_path / "more.csv", index=False)
    same(tried("finals", list(more["method"].unique()), "more.csv"), best)


def test_a_dry_run_prints_what_is_known(tmp_path, capsys):
    (data := tmp_path / "heads.pt").touch()
    assert heads.main(["trials", "longer", "-d", str(data), "--methods", "all", "--dry-run"]) == 0
    *runs, number, more = capsys.readouterr().out.splitlines()
    assert (number, more) == (f"# {len(heads.KNOWN)} runs", "# longer: known when trials has run")
    assert len(runs) == len(heads.KNOWN)


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
    others = {"results": finals, "data_path": str(tmp_path / "some.pt"), "num_valid": 40, "per_p_k": True}
    flags = flags_of(["softmax_cross_entropy", "softsort"], trials, **others)
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
