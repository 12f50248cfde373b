"""What README and findings say in words, asked of results/repository/. A failure here means: read the pages again."""

import functools
import re
from pathlib import Path

import pandas as pd
import pytest
import torch
from scipy.special import stdtrit

from experiments.common.paths import REPOSITORY
from reporting import findings, front_door, permutation_figure
from scripts.pages import PART
from topk_losses import METHODS, ForwardCorrectionLoss, TopKCrossEntropyLoss
from topk_losses.methods import SINGLE_K

ROOT = Path(__file__).parents[1]
FINDINGS = ROOT / "docs" / "findings.md"
TABLES = sorted(ROOT.glob("results/tables/*.md"))
PAGES = [ROOT / "README.md", FINDINGS, *sorted(ROOT.glob("docs/findings/*.md")), *TABLES]
CHOSEN_BY_ONE_SEED = re.compile(
    r"<!-- begin (front_door|findings|noise_|paired results/repository/(heads|tiny|scratch|noise_scratch))"
)
METRICS, SOFTMAX, SPLITTER = ["test_top1", "test_top5"], "softmax_cross_entropy", "splitter_selection"
HALF, EVEN, FIFTH = "0.5 0 0 0 0.5", "0.2 0.2 0.2 0.2 0.2", "0 0 0 0 1"  # P_K
SORTS = ["neuralsort", "softsort", "sinkhorn_sort", SPLITTER]


@functools.cache
def rows(name):
    """A results file, accuracies in percent."""
    table = pd.read_csv(REPOSITORY / f"{name}.csv")
    accuracies = [column for column in table if "_top" in column and table[column].dtype == float]
    return table.assign(**{column: 100 * table[column] for column in accuracies})


def gains(name, *keys, baseline=SOFTMAX):
    """Mean difference to the baseline and half of its interval, by keys such as method and p_k."""
    table = rows(name)
    base = table[table.method == baseline].set_index("seed")[METRICS]
    others = table[table.method != baseline].set_index([*keys, "seed"])[METRICS]
    by_line = others.sub(base, level="seed").dropna().groupby(list(keys))
    n = by_line.size().iloc[0]
    return by_line.mean(), stdtrit(n - 1, 0.975) * by_line.std() / n**0.5


def test_each_finding_that_a_sentence_names_has_the_status_that_the_sentence_was_written_for():
    """A changed status, or a key without one here, means: read the sentences of docs/findings.md again."""
    gain, same, loss, one = "gain", "no clear difference", "loss", "one pair"
    status = {"S1": one, "S2": f"top-1: {same}; top-5: {gain}", "S3": loss, "S4": same, "S5": one, "S9": one}
    status |= dict.fromkeys(("S7", "S8"), same)
    status |= dict.fromkeys(("L1", "L4"), f"top-1: {same}; top-5: {loss}")
    status |= {"L2": gain, "L3": loss, "L5": f"top-1: {gain}; top-5: {same}", "L6": f"top-1: {gain}; top-5: {same}"}
    status |= dict.fromkeys(("T1", "T2"), f"top-1: {gain}; top-5: {same}")
    status |= dict.fromkeys(("H1", "H2", "D1", "D2", "D4", "D5", "D7", "D8", "W1", "W2", "W4", "W5"), gain)
    status |= {"H3": f"top-1: {same}; top-5: {gain}", "D9": loss, "D11": loss}
    status |= dict.fromkeys(("D6", "W6"), f"top-1: {gain}; top-5: {loss}")
    status |= dict.fromkeys(("D12", "W3"), f"top-1: {same}; top-5: {loss}")
    found = {line.key: findings.status(findings.difference(line)) for line in findings.COMPARISONS}
    assert {key: found[key] for key in status} == status
    sentences = PART.sub("", FINDINGS.read_text("utf-8")).partition("## The paper's claims")[0]
    named = set(re.findall(r"\b[SLTHDW]\d+\b", sentences))
    assert len(named) > 20
    assert named <= set(status)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_says_where_one_seed_chose(page):
    """Where a table holds what one seed chose among trials, the page states it in words."""
    text = page.read_text("utf-8")
    if CHOSEN_BY_ONE_SEED.search(text):
        assert "one seed" in re.sub(r"\s+", " ", PART.sub("", text)).lower()


def test_most_pages_of_findings_hold_what_one_seed_chose():
    assert sum(CHOSEN_BY_ONE_SEED.search(page.read_text("utf-8")) is not None for page in PAGES) > 15


@pytest.mark.parametrize("answer", front_door.ANSWERS, ids=lambda answer: answer.key)
def test_the_settings_of_an_answer_are_those_of_its_rows(answer):
    (comparison,) = (line for line in findings.COMPARISONS if line.key == answer.key)
    runs = findings.loss_runs(comparison)
    assert f"`{runs.method.iloc[0]}`" in answer.start_with
    for name, value in re.findall(r"`(\w+)=([\d.]+)`", answer.start_with):
        assert runs[name].astype(float).round(len(value.partition(".")[2])).eq(float(value)).all()
    temperature = runs.get("inverse_temperature", pd.Series("")).iloc[0]
    if "inverse_temperature" not in answer.start_with and answer.labels == "correct" and "Δ" not in answer.start_with:
        assert float(temperature) == METHODS[runs.method.iloc[0]].inverse_temperature


def test_16_epochs_with_the_published_settings():
    mean, half = gains("table1_short", "method", "p_k")
    assert len(mean) == 9
    assert (mean + half < 0).all(axis=None)
    assert (mean.xs(EVEN, level="p_k").loc[SORTS] > mean.xs(FIFTH, level="p_k").loc[SORTS]).all(axis=None)
    assert mean.xs(EVEN, level="p_k").idxmax().eq(SPLITTER).all()
    assert mean.test_top1.idxmin() == ("neuralsort", FIFTH)
    short, published = (rows(name).query("method == @SOFTMAX")[METRICS].mean() for name in ("table1_short", "table1"))
    assert (short > published).all()
    devices = rows("table1_short").device_name.str.contains("H100")
    assert (devices.sum(), len(devices)) == (27, 30)
    minutes = rows("table1_short").train_seconds[devices] / 60
    assert (round(minutes.min()), round(minutes.max())) == (1, 7)
    assert (rows("strong").query("method == @SOFTMAX")[METRICS].mean() - short).round().test_top1 == 6


def test_16_epochs_with_other_settings_and_table_4():
    table = rows("scratch").query("seed == 0 and label_noise == 0")
    base = table.query("method == @SOFTMAX and lr == 0.001 and label_smoothing.isna()")[METRICS].iloc[0]
    others = table.query("method != @SOFTMAX")[METRICS]
    assert len(others) == 10
    assert (others < base).all(axis=None)
    table = rows("table4_short").set_index(["p_k", "method"])[METRICS]
    weights = [HALF, "0.25 0 0 0 0.75", "0.1 0 0 0 0.9", FIFTH]
    for method in SORTS:
        falls = table.xs(method, level="method").loc[weights].diff().iloc[1:] < 0
        assert falls.sum().sum() == (5 if method == "softsort" else 6)
        assert table.xs(method, level="method").idxmax().eq(HALF).all()
    assert table.loc[FIFTH].idxmax().eq("smooth_hard_topk").all()


def test_linear_classifiers_with_correct_labels():
    mean, half = gains("heads", "method")
    assert {method for method in mean.index if mean.test_top1[method] > half.test_top1[method]} == {"ldr_kl"}
    only_top5 = [method for method in SINGLE_K if method in mean.index]
    assert (mean.loc[only_top5].test_top1.between(-7, -4) & (mean.loc[only_top5].test_top5 < 0)).all()
    mixed = mean.drop(index=["ldr_kl", "odd_even", *only_top5])
    assert (mixed.test_top1 + half.test_top1[mixed.index] < 0).all()
    assert mixed.test_top5.max().round(2) == 0.12
    mean, half = (table.drop(index="ldr_kl", level="method") for table in gains("heads_more", "method", "p_k"))
    assert (mean < half).all(axis=None)


@pytest.mark.parametrize("name", ["heads", "heads_more", "heads_noise_.2_more", "heads_noise_.2_of_100_more"])
def test_validation_chose_what_ran_with_ten_seeds(name):
    trials = rows(f"{name}_trials")
    trials = trials.assign(valid=trials.valid_top1 + trials.valid_top5, is_level=trials.inverse_temperature.eq(2**-12))
    table = rows(name).assign(is_level=lambda runs: runs.inverse_temperature.eq(2**-12))
    for (method, is_level), runs in table.groupby(["method", "is_level"]):
        best = trials.loc[trials[(trials.method == method) & (trials.is_level == is_level)].valid.idxmax()]
        assert {(best.lr, best.n_epochs, best.p_k)} == set(zip(runs.lr, runs.n_epochs, runs.p_k))
        assert runs.seed.nunique() == len(runs) == 10


def test_lapsum_with_a_tiny_temperature_is_forward_correction_up_to_a_constant():
    logits = 4 * torch.randn(64, 100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(64)
    level = TopKCrossEntropyLoss("lapsum", {1: 0.8, 5: 0.2}, inverse_temperature=2**-12, reduction="none")
    difference = level(logits, labels) - ForwardCorrectionLoss(noise_rate=0.56, reduction="none")(logits, labels)
    assert difference.std() < 0.02


def test_beam_search_and_neighbours():
    assert rows("beam_search").groupby("arm").test_wer_beam4.mean().idxmin() == "cross_entropy"
    neighbours = rows("knn")[rows("knn").dataset.isna()].groupby("method").test_top1.mean()
    assert neighbours.drop(index=["inputs", "pca", SOFTMAX]).max() < neighbours["inputs"]
    # Commits that are not in the history.
    assert rows("knn").git_commit.str.startswith("ca715ae").sum() == 90
    assert rows("beam_search_short").git_commit.str.startswith("7028b2a").sum() == 17


def test_the_picture_of_the_readme():
    matrix, weights, p = permutation_figure.relaxed_sort(SPLITTER, permutation_figure.SCORES, permutation_figure.P_K)
    shown = [*matrix[:2, permutation_figure.TRUE].tolist(), p[permutation_figure.TRUE].item()]
    assert [round(value, 2) for value in shown] == [0.24, 0.61, 0.55]
    assert weights.tolist() == [1, 0.5, 0, 0]


def test_the_numbers_in_the_words_of_the_readme():
    text = " ".join((ROOT / "README.md").read_text("utf-8").split())
    (pair,) = (line for line in findings.COMPARISONS if line.key == "S1")
    last = rows("table1").set_index("method").last_test_top5
    gap = last[SPLITTER] - last[SOFTMAX]
    assert "is far less than the gap at the right" in text
    assert findings.difference(pair).gains[1].mean < gap / 2
    by_labels = []
    for labels in ("right", "human"):
        table = rows(f"noise/{labels}").query("method == @SOFTMAX")
        by_labels.append(table.groupby("lr").last_test_top1.mean())
    lost = [by_labels[0].max() - by_labels[1].min(), by_labels[0].min() - by_labels[1].max()]
    assert "Labels by people cost cross-entropy 9 to 10 points" in text
    assert min(lost) > 9
    assert max(lost) < 10
