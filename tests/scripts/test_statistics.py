"""Means, standard deviations and intervals of every kind of report, against NumPy and SciPy."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from experiments.common.paths import REPOSITORY
from reporting import findings, markdown
from scripts import epochs, report
from tests.scripts.test_report import cells
from tests.scripts.trained import changed, rows_of

# Percent by seed; the baseline has a seed more, and the other a seed that the baseline lacks.
BASE = {0: 61.0, 1: 62.5, 2: 60.4, 3: 75.0}
OURS = {0: 62.1, 1: 62.4, 2: 63.8, 7: 20.0}


def spread(values, *, sign: str = "") -> str:
    """Mean ± sample standard deviation, from the sum of squares."""
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return f"{mean:{sign}.2f} ± {variance**0.5:.2f}"


def interval(values) -> str:
    """Mean ± half of the 95 % interval, by SciPy."""
    mean = np.mean(values)
    low, high = stats.t.interval(0.95, len(values) - 1, loc=mean, scale=stats.sem(values))
    return f"{mean:+.2f} ± {(high - low) / 2:.2f}".replace("-", "−")


GAINS = [OURS[seed] - BASE[seed] for seed in (0, 1, 2)]


@pytest.fixture
def runs(cifar_run):
    softmax = [cifar_run(seed, top1 / 100, 0.8) for seed, top1 in BASE.items()]
    return [*softmax, *(cifar_run(seed, top1 / 100, 0.8, "neuralsort") for seed, top1 in OURS.items())]


def test_beside_published_values(made, runs, tmp_path, saved):
    text = made(runs, "--figures", tmp_path)[1]
    assert cells(text, "Softmax CE")[0]["top-1 measured"] == spread(BASE.values())
    assert cells(text, "Top-k NeuralSort")[0]["top-1 measured"] == spread(OURS.values())
    bars = [np.diff(bar.get_paths()[0].vertices[:, 0])[0] / 2 for bar in saved[0].axes[0].collections[:1]]
    low, high = stats.t.interval(0.95, 3, loc=0, scale=stats.sem(list(BASE.values())))
    assert bars == [pytest.approx((high - low) / 2)]


def test_paired(made, runs):
    text = made(runs, "--paired", "softmax_cross_entropy")[1]
    (row,) = cells(text, "neuralsort")
    assert (row["Δ top-1"], row["pairs"], row["top-1"]) == (interval(GAINS), "3", spread(OURS.values()))


def test_temperatures(made, row):
    lml = row("temperature", inverse_temperature="1.0")
    runs = [changed(lml, seed=seed, test_top1=top1 / 100) for seed, top1 in OURS.items()]
    assert cells(made(runs, "--temperatures", name="t.csv")[1], "lml")[0]["top-1"] == spread(OURS.values())


def test_beam_search(made, row):
    arms = {"cross_entropy": BASE, "retain": OURS}
    runs = [
        changed(row("beam", arm=arm), seed=seed, test_wer_beam4=rate / 100)
        for arm in arms
        for seed, rate in arms[arm].items()
    ]
    rates, gains = (cells(part, "retain") for part in made(runs, name="b.csv")[1].split("\n\nIn percent, ")[1:])
    assert rates[0]["WER beam 4"] == spread(OURS.values())
    assert (gains[0]["WER beam 4"], gains[0]["pairs"]) == (interval(GAINS), "3")


def test_epochs(trained, tmp_path, capsys):
    (tmp_path / "cifar.csv").write_bytes((trained / "cifar.csv").read_bytes())
    assert epochs.main([str(tmp_path / "cifar.csv"), "--runs", str(trained / "runs")]) == 0
    rows = {row["method"]: row for row in rows_of(tmp_path / "cifar_epochs.csv")}
    of_methods = {"softmax_cross_entropy": BASE, "neuralsort": OURS}
    made = [
        changed(rows[method], run_id=f"{method}{seed}", seed=seed, epoch=epoch, test_top1=top1 / 100)
        for method, values in of_methods.items()
        for seed, top1 in values.items()
        for epoch in range(1, 26)
    ]
    pd.DataFrame(made).to_csv(tmp_path / "cifar_epochs.csv", index=False)
    capsys.readouterr()
    assert report.main([str(tmp_path / "cifar_epochs.csv")]) == 0
    gains = capsys.readouterr().out.partition("Difference to cross-entropy")[2]
    (row,) = cells(gains, "neuralsort")
    assert (row["top-1"], row["seeds"], row["epochs"]) == (interval(GAINS), "3", "25")


def test_findings_are_of_the_paired_seeds_alone(tmp_path):
    """A comparison of the pages, from whose file the loss loses two seeds."""
    comparison = next(line for line in findings.COMPARISONS if line.file == "heads_more.csv" and line.name == "ldr_kl")
    table = pd.read_csv(REPOSITORY / comparison.file, dtype=str, keep_default_na=False)
    table = table[(table["method"] != "ldr_kl") | ~table["seed"].isin(["2", "9"])]
    table.to_csv(tmp_path / "heads_more.csv", index=False)
    found = findings.difference(replace(comparison, file=str(tmp_path / "heads_more.csv")))
    by_seed = table.assign(top1=100 * table["test_top1"].astype(float)).set_index("seed")
    base = by_seed.loc[by_seed["method"] == "softmax_cross_entropy", "top1"]
    ours = by_seed.loc[by_seed["method"] == "ldr_kl", "top1"]
    assert (found.seeds, len(base)) == (8, 10)
    assert markdown.interval(found.gains["test_top1"]) == interval((ours - base).dropna().to_numpy())
