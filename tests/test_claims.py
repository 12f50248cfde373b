"""What README and findings say in words, asked of results/repository/. A failure here means: read the pages again."""

import dataclasses
import functools
import itertools
import re
from pathlib import Path

import pandas as pd
import pytest
import torch
from scipy.special import stdtrit

from experiments.common.paths import REPOSITORY
from reporting import draws, findings, front_door, noise, permutation_figure, scratch
from reporting.compare import holm, interval, over_draws, p_value, paired
from reporting.noise import Pair
from scripts.pages import PART
from studies.catalog import study_of
from studies.few_labels import EPOCHS
from studies.noise import ROBUST, SORTING
from studies.tuning import TRIAL_SEEDS, Tuned
from topk_losses import METHODS, ForwardCorrectionLoss, TopKCrossEntropyLoss
from topk_losses.methods import SINGLE_K

ROOT = Path(__file__).parents[1]
IN_WORDS = (
    "no",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
)
FINDINGS = ROOT / "docs" / "findings.md"
TABLES = sorted(ROOT.glob("results/tables/*.md"))
PAGES = [ROOT / "README.md", FINDINGS, *sorted(ROOT.glob("docs/findings/*.md")), *TABLES]
CHOSEN_BY_ONE_SEED = re.compile(
    r"<!-- begin (front_door|findings|noise_|paired results/repository/(heads|tiny|scratch|noise_scratch))"
)
METRICS = ["test_top1", "test_top5"]
SOFTMAX = "softmax_cross_entropy"
SMOOTHED = "softmax_cross_entropy, label smoothing 0.1"
SPLITTER = "splitter_selection"
# P_K
HALF = "0.5 0 0 0 0.5"
EVEN = "0.2 0.2 0.2 0.2 0.2"
FIFTH = "0 0 0 0 1"
SORTS = ["neuralsort", "softsort", "sinkhorn_sort", SPLITTER]


@functools.cache
def rows(name):
    """A results file, accuracies in percent."""
    table = pd.read_csv(REPOSITORY / f"{name}.csv")
    accuracies = [column for column in table if "_top" in column and table[column].dtype == float]
    return table.assign(**{column: 100 * table[column] for column in accuracies})


def gains(name, *keys, baseline=SOFTMAX):
    """Mean difference to the baseline and half of its interval, by keys such as method and p_k."""
    return gains_of(rows(name), *keys, baseline=baseline)


def gains_of(table, *keys, baseline=SOFTMAX):
    base = table[table.method == baseline].set_index("seed")[METRICS]
    others = table[table.method != baseline].set_index([*keys, "seed"])[METRICS]
    by_line = others.sub(base, level="seed").dropna().groupby(list(keys))
    n = by_line.size().iloc[0]
    return by_line.mean(), stdtrit(n - 1, 0.975) * by_line.std() / n**0.5


NAMED_FOR_TOP1 = {"L2"}  # the sentence says nothing of top-5


def test_each_finding_that_a_sentence_names_has_the_status_that_the_sentence_was_written_for():
    """A changed status, or a key without one here, means: read the sentences of docs/findings.md again."""
    gain = "gain"
    same = "no clear difference"
    loss = "loss"
    one = "one pair"
    status = {"S1": one, "S2": f"top-1: {same}; top-5: {gain}", "S3": loss, "S4": same, "S5": one}
    status["S9"] = f"top-1: {gain}; top-5: {same}"
    status["S10"] = f"top-1: {loss}; top-5: {same}"
    status |= {"S7": same, "S8": f"top-1: {loss}; top-5: {same}"}
    status |= dict.fromkeys(("L1", "L4"), f"top-1: {same}; top-5: {loss}")
    status |= {"L2": gain, "L3": loss, "L5": f"top-1: {gain}; top-5: {same}", "L6": f"top-1: {gain}; top-5: {same}"}
    status |= dict.fromkeys(("T1", "T2", "T3"), f"top-1: {gain}; top-5: {same}")
    status |= {"T4": gain, "T5": same}
    status |= dict.fromkeys(("H1", "H2", "H4", "D1", "D2", "D4", "D5", "D7", "D8", "W1", "W2", "W4", "W5"), gain)
    status |= {"V1": gain, "V2": gain, "V3": same, "V4": f"top-1: {gain}; top-5: {loss}"}
    status |= {"V5": f"top-1: {same}; top-5: {loss}"}
    status |= {"H3": f"top-1: {gain}; top-5: {same}", "D9": loss, "D11": loss}
    status |= dict.fromkeys(("D6", "W6"), f"top-1: {gain}; top-5: {loss}")
    status |= dict.fromkeys(("D12", "W3"), f"top-1: {same}; top-5: {loss}")
    found = {line.key: findings.status(findings.difference(line)) for line in findings.COMPARISONS}
    assert {key: found[key] for key in status} == status
    sentences = PART.sub("", FINDINGS.read_text("utf-8")).partition("## The paper's claims")[0]
    named = set(re.findall(r"\b[SLTHDWV]\d+\b", sentences))
    assert len(named) > 20
    assert named <= set(status)
    # A dagger where Holm's method does not keep a difference, and nowhere else.
    marked = set(re.findall(r"\b([LTHDW]\d+)†", sentences))
    rejected = set()
    for line in findings.COMPARISONS:
        cells = findings.cells(line, findings.difference(line))
        if line.key in NAMED_FOR_TOP1:
            cells = {"Δ top-1": cells["Δ top-1"]}
        if line.key in named and line.key[0] in "LTHDW" and "†" in "".join(cells.values()):
            rejected.add(line.key)
    assert marked == rejected


@pytest.mark.parametrize("line", findings.COMPARISONS, ids=lambda line: line.key)
def test_no_seed_that_chose_counts_in_a_finding_of_a_study_with_trials(line):
    """Also where trials and finals share a file."""
    study = study_of(line.file, REPOSITORY)
    if isinstance(study, Tuned):
        chose = {*TRIAL_SEEDS, *study.finals.rule.seeds}
        paired_seeds = set(findings.loss_runs(line).seed) & set(findings.baseline_runs(line).seed)
        assert paired_seeds
        assert not paired_seeds & chose


def test_the_sentences_on_labels_by_people_from_scratch():
    """Of the seeds that did not choose. Wide: an interval of more than a point on each side, in top-1 and in top-5."""
    table = rows("noise_scratch").query("seed > 0")
    assert set(table.seed) == {1, 2}
    mean, half = gains_of(table, "method")
    assert (mean - half < 0).all(axis=None)
    lost = (mean + half < 0).test_top1
    assert set(lost[lost].index) == {"generalized_cross_entropy", "forward_correction"}
    assert (half.loc[[SPLITTER, "lapsum"]] > 1).all(axis=None)
    text = (ROOT / "docs/findings/wrong-labels.md").read_text("utf-8")
    assert "`lapsum`, with one setting and three seeds, loses top-5" in " ".join(text.split())
    every_seed = rows("noise_scratch").query("method == 'softmax_cross_entropy' or method == 'lapsum'")
    every_seed = every_seed[every_seed["label_smoothing"].isna()]
    mean, half = gains_of(every_seed, "method")
    assert set(every_seed.query("method == 'lapsum'").seed) == {0, 1, 2}
    assert every_seed.query("method == 'lapsum'")["inverse_temperature"].nunique() == 1
    assert mean.test_top5["lapsum"] + half.test_top5["lapsum"] < 0


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
    given = re.search(r"`, ([\d.]+)$", answer.start_with)
    if given:
        assert float(temperature) == float(given[1])
        assert f"inverse_temperature={given[1]}" in (ROOT / "README.md").read_text("utf-8").partition("```python")[2]
    elif answer.labels == "correct" and "Δ" not in answer.start_with:
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


FOLDER = REPOSITORY / "noise"
DRAWN = ["symmetric_.4", "symmetric_.4_again", "symmetric_.2", "symmetric_.2_again", "blocks_.2", "blocks_.2_again"]
SORTS_OF_NOISE = [*SORTING[:4], "splitter_selection_forward", "lapsum_forward"]  # with half of the weight on top-1
GAIN = "gain"
LOSS = "loss"
SAME = "no clear difference"


def noise_gains(labels, loss, other="cross_entropy", choices=("noisy", "noisy")):
    """Difference of two losses in top-1 and top-5, with what each of them was chosen by."""
    results = noise.results_of(FOLDER)[labels]
    differences = paired(results.finals[loss, choices[0]], results.finals[other, choices[1]], METRICS)
    return [interval(differences[metric]) for metric in METRICS]


def verdicts(labels, loss, other="cross_entropy", choices=("noisy", "noisy")):
    """gain, loss or no clear difference, with a dagger where Holm's method was applied and does not keep it."""
    found = []
    for metric, gain in zip(METRICS, noise_gains(labels, loss, other, choices)):
        in_family = Pair(loss, other) in noise.results_of(FOLDER)[labels].pairs() and choices == ("noisy", "noisy")
        is_kept = not in_family or noise.kept_by_holm(FOLDER)[labels, Pair(loss, other), metric]
        found.append(gain.verdict + ("†" if gain.is_clear and not is_kept else ""))
    return found


@pytest.mark.parametrize("line", [line for line in findings.COMPARISONS if line.file.startswith("noise/")])
def test_a_line_of_the_study_of_wrong_labels_is_what_the_rule_chose(line):
    """Of both sides, with ties broken against the claim; except the runner-ups, which are named as such."""
    names = tuple(frozenset(side(line)["run_id"]) for side in (findings.loss_runs, findings.baseline_runs))
    assert (names in findings.family_of(line.file)) == (line.key not in ("V2", "V3", "V5")), line.key


def test_ties_of_a_baseline_are_those_that_the_page_names():
    """The trials of cross-entropy with the best validation, where there are several."""
    found = {}
    paths = [path for name in ("noise/*", "heads*", "tiny*") for path in REPOSITORY.glob(f"{name}_trials.csv")]
    for path in paths:
        trials = pd.read_csv(path)
        trials = trials[(trials.method == SOFTMAX) & (trials.seed == 0)]
        if path.parent == FOLDER:
            trials = trials[trials.label_smoothing.isna() & trials.mixup.isna()]
        split = "last_valid" if path.parent == FOLDER else "valid"
        valid = (trials[f"{split}_top1"] + trials[f"{split}_top5"]).round(9)
        if (valid == valid.max()).sum() > 1:
            found[path.stem.removesuffix("_trials")] = trials[valid == valid.max()]
    assert set(found) == {"blocks_.2", "heads_noise_.2_of_100_more"}
    first, second = found["heads_noise_.2_of_100_more"][METRICS].to_numpy()
    assert 0 < second[0] - first[0] < 0.002
    assert second[1] < first[1]


def test_the_withdrawn_gain_of_sorting():
    """What the seed that chose says of GCE's trials of 40 % drawn labels, and what ten seeds do."""
    for labels, place in (("symmetric_.4", 1), ("symmetric_.4_again", 3)):
        trials = rows(f"noise/{labels}_trials").query("method == 'generalized_cross_entropy'")
        valid = ((trials.last_valid_top1 + trials.last_valid_top5) / 2).round(9)
        ordered = valid.sort_values(ascending=False)
        assert trials.q[ordered.index[0]] == 0.376
        assert trials.n_epochs[ordered.index[0]] == 4
        assert ordered.iloc[0] - ordered.iloc[1] < 0.1
        assert (valid > valid[trials.q == 0.442].iloc[0]).sum() == place
        if labels == "symmetric_.4":
            assert set(trials.q[valid == ordered.iloc[1]]) == {0.442, 0.581}
    own = rows("noise/symmetric_.4").groupby("q").test_top1.mean()
    later = rows("noise/symmetric_.4_runner_up")
    assert own[0.376] < own[0.581] < later[later.q == 0.442].test_top1.mean()
    assert later.groupby("method")[["lr", "weight_decay", "n_epochs"]].nunique().eq(1).all(axis=None)
    assert later.drop_duplicates("method")[["lr", "weight_decay", "n_epochs"]].drop_duplicates().shape[0] == 1
    withdrawn = [line for line in findings.COMPARISONS if line.key[0] == "V"]
    gain = {line.key: findings.difference(line).gains["test_top1"].mean for line in withdrawn}
    assert gain["V2"] / gain["V1"] == pytest.approx(1 / 3, abs=0.05)


def test_gains_with_wrong_labels():
    """The ranges of the first paragraph, and what Choose a loss says of GCE and of the splitter selection network."""
    wrong = ["human", *DRAWN]
    ranges = {}
    for name, losses in (("sorting", SORTING[:4]), ("robust", ROBUST)):
        top1 = [noise_gains(labels, loss)[0] for labels in wrong for loss in losses]
        assert all(gain.verdict == GAIN for gain in top1)
        ranges[name] = [round(min(gain.mean for gain in top1), 1), round(max(gain.mean for gain in top1), 1)]
    assert ranges == {"sorting": [1.1, 3.3], "robust": [0.7, 2.7]}
    assert [verdicts(labels, "gce") for labels in wrong].count([GAIN, GAIN]) == 6
    assert verdicts("blocks_.2_again", "gce") == [GAIN, SAME]
    assert all(verdicts(labels, SPLITTER) == [GAIN, GAIN] for labels in wrong)
    chosen = {}
    for loss, name in (("gce", "q"), (SPLITTER, "inverse_temperature")):
        finals = [noise.results_of(FOLDER)[labels].finals[loss, "noisy"] for labels in wrong]
        values = [float(runs[name].iloc[0]) for runs in finals]
        chosen[loss] = [min(values), max(values)]
    assert chosen == {"gce": pytest.approx([0.23, 0.51], abs=0.0051), SPLITTER: pytest.approx([0.06, 0.33], abs=0.0051)}


@pytest.mark.parametrize(
    ("labels", "loss", "other", "expected"),
    [
        # Labels by people.
        ("human", SPLITTER, "gce", [SAME, f"{GAIN}†"]),
        *(("human", loss, "gce", [f"{LOSS}†", SAME]) for loss in ("lapsum", "softsort")),
        ("human", "df_topk", "gce", [SAME, f"{LOSS}†"]),
        ("human", "forward_estimated", "gce", [f"{GAIN}†", GAIN]),
        *(("human", "forward_estimated", loss, [GAIN, GAIN]) for loss in SORTS_OF_NOISE),
        *(("human", f"{loss}_forward", loss, [SAME, SAME]) for loss in (SPLITTER, "lapsum")),
        ("human", "smooth_topk", "cross_entropy", [LOSS, LOSS]),
        ("human", "label_smoothing", "cross_entropy", [SAME, SAME]),
        ("human", "mixup", "cross_entropy", [f"{GAIN}†", SAME]),
        # Drawn labels: a counted T.
        *((labels, "forward_estimated", "forward_uniform", [LOSS, LOSS]) for labels in DRAWN),
        *((labels, "forward_estimated", "gce", [LOSS, LOSS]) for labels in DRAWN[1:5]),
        ("symmetric_.4", "forward_estimated", "gce", [LOSS, f"{LOSS}†"]),
        ("blocks_.2_again", "forward_estimated", "gce", [GAIN, GAIN]),
        # 40 %.
        *(("symmetric_.4_again", loss, "forward_uniform", [GAIN, f"{LOSS}†"]) for loss in (SPLITTER, "lapsum")),
        *(("symmetric_.4_again", loss, "forward_uniform", [GAIN, LOSS]) for loss in ("softsort", "df_topk")),
        *((labels, loss, "gce", [SAME, None]) for labels in DRAWN[:2] for loss in ("phuber", "forward_uniform")),
        *((labels, "forward_uniform", "forward_true", [GAIN, GAIN]) for labels in DRAWN[:2]),
        ("symmetric_.4", "label_smoothing", "cross_entropy", [LOSS, GAIN]),
        ("symmetric_.4_again", "label_smoothing", "cross_entropy", [f"{LOSS}†", LOSS]),
        ("symmetric_.4", "mixup", "cross_entropy", [LOSS, SAME]),
        ("symmetric_.4_again", "mixup", "cross_entropy", [GAIN, GAIN]),
        *((labels, "smooth_topk", "cross_entropy", [LOSS, GAIN]) for labels in DRAWN[:2]),
        # 20 %.
        *((labels, loss, "gce", [LOSS, None]) for labels in DRAWN[2:4] for loss in SORTS_OF_NOISE),
        ("symmetric_.2", "forward_true", "forward_uniform", [f"{LOSS}†", f"{LOSS}†"]),
        ("symmetric_.2_again", "forward_true", "forward_uniform", [LOSS, LOSS]),
        # Within groups.
        ("blocks_.2", SPLITTER, "forward_uniform", [f"{LOSS}†", f"{LOSS}†"]),
        ("blocks_.2", SPLITTER, "phuber", [LOSS, LOSS]),
        ("blocks_.2_again", SPLITTER, "forward_uniform", [SAME, LOSS]),
        ("blocks_.2_again", SPLITTER, "phuber", [GAIN, LOSS]),
        *((labels, loss, "phuber", [None, LOSS]) for labels in DRAWN[4:] for loss in SORTS_OF_NOISE),
        *((labels, "smooth_topk", "cross_entropy", [LOSS, SAME]) for labels in DRAWN[4:]),
        # Correct labels.
        ("right", "ldr_kl", "cross_entropy", [GAIN, SAME]),
        ("right", "softsort", "cross_entropy", [f"{GAIN}†", LOSS]),
        ("right", "df_topk", "cross_entropy", [LOSS, f"{LOSS}†"]),
        ("right", SPLITTER, "cross_entropy", [SAME, f"{LOSS}†"]),
        *(("right", loss, "cross_entropy", [SAME, SAME]) for loss in ("lapsum", "sce", "forward_uniform")),
        ("right", "gce", "cross_entropy", [f"{GAIN}†", SAME]),
        ("right", "nce_rce", "cross_entropy", [f"{LOSS}†", LOSS]),
        ("right", "phuber", "cross_entropy", [SAME, LOSS]),
        ("right", "smooth_topk", "cross_entropy", [LOSS, LOSS]),
    ],
)
def test_verdicts_of_the_page_on_wrong_labels(labels, loss, other, expected):
    """None: the page says nothing of it."""
    for found, said in zip(verdicts(labels, loss, other), expected, strict=True):
        assert said in (None, found)


def test_top_5_of_losses_that_sort_beside_uniform_forward_correction():
    """No gain with labels drawn among all classes; all lose in the second draw of 40 % and within groups."""
    lose = {}
    for labels in DRAWN:
        found = [verdicts(labels, loss, "forward_uniform")[1] for loss in SORTS_OF_NOISE]
        assert not any(verdict.startswith(GAIN) for verdict in found)
        lose[labels] = [sum(verdict.startswith(LOSS) for verdict in found), found.count(f"{LOSS}†")]
    assert lose["symmetric_.4_again"] == [6, 3]
    assert [lose["blocks_.2"][0], lose["blocks_.2_again"][0]] == [6, 6]
    assert lose["blocks_.2"][1] + lose["blocks_.2_again"][1] == 3


def test_other_sentences_of_the_page_on_wrong_labels():
    for labels in DRAWN[:2]:
        top1 = {loss: noise_gains(labels, loss)[0].mean for loss in noise.results_of(FOLDER)[labels].losses[1:]}
        assert min(top1[loss] for loss in SORTS_OF_NOISE) > max(top1[loss] for loss in set(top1) - set(SORTS_OF_NOISE))
    for labels in DRAWN[4:]:
        best = max(noise_gains(labels, loss)[0].mean for loss in ROBUST)
        assert best > 2.0
        assert max(noise_gains(labels, loss)[0].mean for loss in ("label_smoothing", "mixup")) < 0.4
        every = noise.results_of(FOLDER)[labels].losses[1:]
        for place in range(2):
            assert max(every, key=lambda loss: noise_gains(labels, loss)[place].mean) == "forward_true"
    human = noise.results_of(FOLDER)["human"]
    added = [noise_gains("human", loss, loss, ("clean", "noisy")) for loss in human.losses]
    assert max(gain.mean for pair in added for gain in pair) == pytest.approx(0.36, abs=0.005)
    for loss in (SPLITTER, "lapsum"):
        assert verdicts("human", loss, "gce", ("clean", "clean"))[1] == GAIN


def test_ties_between_losses_break_against_sorting():
    """Of equal losses that sort the worse in test stands in the table, of equal robust losses the better."""
    seen = 0
    for results in noise.results_of(FOLDER).values():
        split = results.study.finals.choices["noisy"]
        for losses, sign in ((noise.RANKING, 1), (SORTING, 1), (ROBUST, -1)):
            places = {}
            for loss in losses:
                trial = results.chosen[loss, "noisy"]
                (row,) = (tried.rows[0] for tried in results.tried[loss] if tried.trial == trial)
                valid, test = (float(row[f"{name}_top1"]) + float(row[f"{name}_top5"]) for name in (split, "last_test"))
                places[loss] = (-round(valid, 9), sign * test)
            first, second = sorted(places, key=places.__getitem__)[:2]
            seen += places[first][0] == places[second][0]
            assert results.best(losses) == first
    assert seen > 0


def test_how_many_scores_to_sort():
    table = (ROOT / "docs" / "which-loss.md").read_text("utf-8").partition("<!-- begin sorted_scores -->")[2]
    found = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[4:14]]
    assert {line[0] for line in found} == {"100", "1,000"}
    for classes, method, *numbers in found:
        own1, all1, own5, all5 = map(float, numbers)
        if classes == "100":
            assert (own1 < all1 or own5 < all5) == (method == "`neuralsort`")
        else:
            assert 0 < all1 - own1 < 0.65
            assert 0 < all5 - own5 < 1.05


def test_ldr_kl_has_one_setting():
    """Choose a loss and the README name the margin only, so that the rows have the default temperature."""
    own = rows("heads_more").query("method == 'ldr_kl'")
    assert own.margin.eq(1).all()
    assert own.inverse_temperature.eq(METHODS["ldr_kl"].inverse_temperature).all()
    assert 'make_loss("ldr_kl", margin=1.0)' in (ROOT / "docs" / "which-loss.md").read_text("utf-8")
    gain = rows("heads_more").groupby("method").test_top5.mean()
    assert 100 * (gain["ldr_kl"] - gain[SOFTMAX]) == pytest.approx(6, abs=0.6)  # images of 10,000


def test_networks_and_the_implementation():
    table = rows("heads").set_index("seed")
    differences = table[table.method == "bitonic"][METRICS] - table[table.method == SPLITTER][METRICS]
    assert [interval(differences[metric]).verdict for metric in METRICS] == [GAIN, LOSS]
    runs = rows("implementation").query("top1_mode == 'smce'").set_index(["implementation", "precision", "seed"])
    runs = runs.sort_index().test_top1
    behind = runs["difftopk", "bf16"] - runs["ours", "fp32"]
    assert behind[0] > 0
    assert behind[1] < -2
    modes = rows("implementation").query("implementation == 'ours'").groupby("top1_mode").test_top1
    assert modes.max()["sm"] < modes.min()["smce"]


def test_beam_search_and_neighbours():
    assert rows("beam_search").groupby("arm").test_wer_beam4.mean().idxmin() == "cross_entropy"
    neighbours = rows("knn")[rows("knn").dataset.isna()].groupby("method").test_top1.mean()
    assert neighbours.drop(index=["inputs", "pca", SOFTMAX]).max() < neighbours["inputs"]
    digits = rows("knn").query("dataset == 'digits'")
    means = digits.assign(loss=digits.loss.fillna("")).groupby(["method", "loss"]).test_top1.mean()
    baseline = digits[digits.method.isin(["inputs", "pca", SOFTMAX])].groupby(["method", "prediction"]).test_top1.mean()
    assert set(means[means > 98].index.get_level_values(0)) == {"sinkhorn_sort", "soft_topk"}
    below = {("perturbed_topk", "mass"), ("perturbed_topk", "log_mass"), ("bitonic", "mass")}
    below |= {("recall_surrogate", "mass"), ("recall_surrogate", "log_mass")}
    assert set(means[means < baseline.min() - 0.5].index) == below
    # Commits that are not in the history.
    assert rows("knn").git_commit.str.startswith("ca715ae").sum() == 90
    assert rows("beam_search_short").git_commit.str.startswith("7028b2a").sum() == 17


def test_the_picture_of_the_readme():
    matrix, weights, p = permutation_figure.relaxed_sort(SPLITTER, permutation_figure.SCORES, permutation_figure.P_K)
    shown = [*matrix[:2, permutation_figure.TRUE].tolist(), p[permutation_figure.TRUE].item()]
    assert [round(value, 2) for value in shown] == [0.24, 0.61, 0.55]
    assert weights.tolist() == [1, 0.5, 0, 0]


def test_label_smoothing_under_the_published_schedule_has_what_the_pages_say():
    (smoothing,) = (line for line in findings.COMPARISONS if line.key == "S9")
    gains = findings.difference(smoothing).gains
    published = pd.read_csv(ROOT / "results/paper/table1.csv").groupby("method").test_top1.max()
    paper = published[SPLITTER] - published[SOFTMAX]
    assert round(gains["test_top1"].mean / (100 * paper)) == 4
    for page in ("README.md", "docs/findings.md", "docs/findings/from-scratch.md"):
        text = " ".join((ROOT / page).read_text("utf-8").split())
        assert "four times the paper's" in text
        assert "with three seeds" in text
    assert rows("table1_smoothing").seed.nunique() == 3
    epochs = rows("table1_smoothing_epochs")
    ends = epochs[epochs.epoch > 68].groupby("seed").test_top5.mean()
    peaks = epochs.sort_values("valid_top5", kind="stable").groupby("seed").test_top5.last()
    words = "{:.2f}, {:.2f} and {:.2f}"
    said = f"from {words.format(*peaks)} at the best validation to {words.format(*ends)} over the last five epochs"
    from_scratch = " ".join((ROOT / "docs/findings/from-scratch.md").read_text("utf-8").split())
    assert f"It falls here, too, {said}. Cross-entropy ends higher with each seed." in from_scratch
    plain = rows("table1_epochs").query("method == @SOFTMAX and 68 < epoch <= 73")
    assert (plain.groupby("seed").test_top5.mean() > ends).all()
    assert set(rows("table1_smoothing").device_name) != set(rows("table1").device_name)


def test_the_numbers_in_the_words_of_the_readme():
    text = " ".join((ROOT / "README.md").read_text("utf-8").split())
    (pair,) = (line for line in findings.COMPARISONS if line.key == "S1")
    last = rows("table1").set_index("method").last_test_top5
    gap = last[SPLITTER] - last[SOFTMAX]
    assert "is far less than the gap at the right" in text
    assert findings.difference(pair).gains["test_top5"].mean < gap / 2
    softmax = rows("table1_epochs").query("method == @SOFTMAX and label_smoothing.isna()")
    peaks = softmax.groupby("seed").test_top5.max()
    short = rows("table1_short").query("method == @SOFTMAX").set_index("seed").test_top5
    assert "A cosine schedule of 16 epochs brings cross-entropy above its peak here." in text
    assert (short[peaks.index] > peaks).all()


def test_validation_shows_no_gain_on_tiny_imagenet_and_a_loss_of_top_5():
    table = rows("tiny_imagenet_equal").set_index("seed")
    of_loss = table[table.method == SPLITTER]
    base = table[table.method == SOFTMAX]
    top1 = interval(100 * (of_loss.valid_top1 - base.valid_top1))
    top5 = interval(100 * (of_loss.valid_top5 - base.valid_top5))
    assert top1.mean - top1.half < 0
    assert top5.mean + top5.half < 0
    assert "(T3), and validation shows a loss of top-5" in " ".join((ROOT / "README.md").read_text("utf-8").split())


def test_the_first_code_of_the_readme_has_the_setting_of_its_row():
    text = (ROOT / "README.md").read_text("utf-8")
    (shown,) = re.findall(r"loss_fn = make_loss\((.*)\)\n", text)
    (answer,) = (answer for answer in front_door.ANSWERS if "the code above" in answer.start_with)
    (comparison,) = (line for line in findings.COMPARISONS if line.key == answer.key)
    (row,) = findings.loss_runs(comparison)[["method", "p_k", "m", "inverse_temperature"]].drop_duplicates().to_numpy()
    method, p_k, m, beta = row
    assert (method, p_k) == (SPLITTER, HALF)
    beta = f"{float(beta):.1f}"
    assert shown == f'"{method}", p_k={{1: 0.5, 5: 0.5}}, m={m:g}, inverse_temperature={beta}'


def test_a_tenth_of_the_images_gains_what_the_page_says():
    """Both top-k losses at the last epoch of a cosine schedule alone, and no other gain that the page leaves out."""
    text = " ".join((ROOT / "docs/findings/from-scratch.md").read_text("utf-8").partition("## A tenth")[2].split())
    text = text.partition("## Does")[0]
    found = {(line.schedule, line.loss): line for line in scratch.lines(REPOSITORY / "few_labels_scratch.csv")}
    compared = {key: line for key, line in found.items() if len(line.differences)}
    assert all(line.is_complete for line in compared.values())
    assert len(compared) * len(scratch.READINGS) == 32
    assert "Holm's method keeps one of these 32 differences" in text
    family = {}
    for (schedule, loss), line in compared.items():
        for reading in scratch.READINGS:
            family[schedule, loss, reading] = p_value(line.differences[reading])
    assert [key for key, is_kept in holm(family).items() if is_kept] == [("constant", SMOOTHED, "last_test_top1")]
    for loss in ("splitter_selection", "lapsum"):
        smoothed = paired(found["cosine", loss].runs, found["cosine", SMOOTHED].runs, ["last_test_top1"])
        assert interval(smoothed.last_test_top1).verdict == SAME
    assert "nor is top-1 over label smoothing at the last" in text
    gains = set()
    for (schedule, loss), line in compared.items():
        for reading in scratch.READINGS:
            if line.gain(reading).verdict == GAIN:
                gains.add((schedule, loss, reading))
    assert gains == {
        *((schedule, SMOOTHED, "last_test_top1") for schedule in ("constant", "cosine")),
        ("constant", SMOOTHED, "test_top1"),
        ("constant", "lapsum", "test_top5"),
        *(
            ("cosine", loss, reading)
            for loss in ("splitter_selection", "lapsum")
            for reading in ("last_test_top1", "last_test_top5")
        ),
    }
    for loss in ("splitter_selection", "lapsum"):
        for reading in ("last_test_top1", "last_test_top5"):
            gain = found["cosine", loss].gain(reading)
            assert f"{gain.mean:.2f} ± {gain.half:.2f}" in text
    lost = found["cosine", SMOOTHED].gain("last_test_top5")
    assert f"loses {-lost.mean:.2f} ± {lost.half:.2f} of top-5" in text
    for page in ("README.md", "docs/findings.md", "docs/which-loss.md", "docs/findings/linear-classifiers.md"):
        assert "from-scratch.md#a-tenth-of-the-images" in (ROOT / page).read_text("utf-8")


def over_draws_of(folder, pairs, **options):
    """The cells of the table of a study over draws, by labels and difference."""
    found = {}
    for item in draws.comparisons(REPOSITORY / folder, pairs, **options):
        found[item.group, item.name] = draws.answer_row(item)
    return found


def test_the_pairs_of_the_cosine_schedule_have_the_differences_of_the_pages():
    """Those of S4, of which seed 0 chose, and those of S10, with other seeds."""
    lines = {line.key: line for line in findings.COMPARISONS}
    text = " ".join((ROOT / "docs/findings/from-scratch.md").read_text("utf-8").split())
    paper = 1.42
    first = findings.difference(lines["S4"]).gains["test_top5"]
    assert first.mean - first.half < paper < first.mean + first.half
    others = findings.difference(lines["S10"]).gains
    assert others["test_top5"].mean + others["test_top5"].half < paper
    lost = others["test_top1"]
    front = " ".join((ROOT / "README.md").read_text("utf-8").split())
    assert f"a loss of {-lost.mean:.2f} ± {lost.half:.2f} points of top-1 (S10)" in front
    assert len(findings.loss_runs(lines["S10"])) == 8
    assert "Its eight pairs were planned" in text
    assert -0.05 < lost.mean + lost.half < 0
    assert "the interval of top-1 hardly excludes 0" in text
    for page in ("README.md", "docs/findings.md", "docs/findings/from-scratch.md"):
        assert "below" in (ROOT / page).read_text("utf-8")


def test_sorting_16_of_1000_scores_costs_what_the_pages_say():
    """The losses of top-5 with the inverse temperature that validation chose for each m."""
    table = rows("temperature_classes_1000").query("p_k == @HALF")
    table = table.assign(
        validation=table.valid_top1 + table.valid_top5, beta=pd.to_numeric(table.inverse_temperature, "coerce")
    )
    lost = {}
    for method, own in table.dropna(subset="beta").groupby("method"):
        chosen = {}
        for m, runs in own.groupby("m"):
            best = runs.groupby("beta").validation.mean().idxmax()
            chosen[m] = runs[runs.beta == best]
        differences = paired(chosen[16], chosen[1000], METRICS)
        lost[method] = [interval(differences[metric]) for metric in METRICS]
    assert len(lost) == 5
    top5 = sorted(-found[1].mean for found in lost.values() if found[1].verdict == LOSS)
    top1 = [method for method, found in lost.items() if found[0].verdict == LOSS]
    text = " ".join((ROOT / "docs/which-loss.md").read_text("utf-8").split())
    assert len(top5) == 3
    assert f"Three lose it clearly, by {top5[0]:.1f} to {top5[-1]:.1f} points, and two of these top-1, too" in text
    assert all(found[1].mean < 0 for found in lost.values())
    assert "all five lose top-5 on average" in text
    assert len(top1) == 2
    assert all(lost[method][1].verdict == LOSS for method in top1)


def test_few_labels_gain_what_the_page_says():
    """Each difference of the page with its interval over draws, and no gain of top-5 that the page leaves out."""
    table = over_draws_of("few_labels", draws.PAIRS_OF_FEW_LABELS)
    text = (ROOT / "docs/findings/linear-classifiers.md").read_text("utf-8").partition("## Few labels")[2]
    text = " ".join(text.partition("## Limits")[0].split())
    for (labels, name), cells in table.items():
        gain = cells["Δ top-5, over draws"]
        if name.endswith("− cross-entropy") and gain.endswith("(gain)"):
            assert gain.removeprefix("+").removesuffix(" (gain)") in text
        if name == "LapSum − cross-entropy":
            assert cells["Δ top-1, over draws"].endswith("(gain)")
        if labels == "5 labels a class" and name.startswith(("splitter", "LapSum")):
            assert gain.endswith("(gain)")
    best = table["5 labels a class", "splitter − cross-entropy"]["Δ top-5, over draws"]
    assert best.removeprefix("+").removesuffix(" (gain)") in " ".join(FINDINGS.read_text("utf-8").split())
    assert table["5 labels a class", "splitter − LDR-KL"]["Δ top-5, over draws"][1:12] in text
    gains = []
    for (labels, name), cells in table.items():
        gain = cells["Δ top-1, over draws"]
        if labels == "100 labels a class" and name.endswith("− cross-entropy") and gain.endswith("(gain)"):
            gains.append(gain)
    of_ldr_kl = table["100 labels a class", "LDR-KL − cross-entropy"]["Δ top-1, over draws"]
    assert of_ldr_kl == max(gains)
    assert of_ldr_kl[1:12] in text
    of_20 = table["20 labels a class", "LDR-KL − cross-entropy"]
    assert of_20["Δ top-1, over draws"][1:12] in text
    assert of_20["Δ top-5, over draws"][1:12] in text
    for labels in ("20 labels a class", "100 labels a class"):
        cells = table[labels, "LapSum − LDR-KL"]
        assert cells["Δ top-1, over draws"].endswith("(no clear difference)")
        assert cells["Δ top-5, over draws"].endswith("(gain)")
    assert "no clear difference" in table["20 labels a class", "splitter − LDR-KL"]["Δ top-5, over draws"]
    lost = table["100 labels a class", "splitter − LDR-KL"]["Δ top-1, over draws"]
    assert lost.endswith("(loss)")
    assert f"the splitter selection network loses {lost[1:12]} of top-1" in text
    assert all(
        table["20 labels a class", "LDR-KL − cross-entropy"][f"Δ {k}, over draws"].endswith("(gain)")
        for k in ("top-1", "top-5")
    )
    assert "with 20 `ldr_kl` does, too" in " ".join(FINDINGS.read_text("utf-8").split())
    most = max(EPOCHS[5])
    for file in sorted((REPOSITORY / "few_labels").glob("labels_5_draw?.csv")):
        finals = rows(f"few_labels/{file.stem}").query("method == @SOFTMAX and label_smoothing.isna()")
        assert set(finals.n_epochs) == {most}, file
    assert "with 5 labels cross-entropy takes the most epochs in all draws" in text
    assert "Ten draws took images at random" in text
    assert {cells["draws"] for cells in table.values()} == {"10"}


def test_where_ten_seeds_choose_the_page_has_the_differences_of_all_draws():
    folder = REPOSITORY / "noise_draws"
    text = " ".join((ROOT / "docs/findings/wrong-labels.md").read_text("utf-8").split())
    every_text = text
    text = text.partition("**Where ten seeds choose")[2].partition("`scripts/noise.sh`")[0]
    found = draws.draw_rows(folder, draws.comparisons(folder, draws.PAIRS))
    number_of = {}  # draws, by labels
    verdicts = {}
    for (labels, name), cells in over_draws_of("noise_draws", draws.PAIRS).items():
        if name != "splitter − GCE":
            continue
        differences = [cells["Δ top-1, over draws"], cells["Δ top-5, over draws"]]
        if cells["draws"] == "1":
            (row,) = [row for row in found if row["labels"].startswith(labels) and row["difference"] == name]
            differences = [row["Δ top-1"], row["Δ top-5"]]
        for difference in differences:
            assert difference.partition(" (")[0] in text
        if "drawn" in labels:
            verdicts[labels[:4]] = [difference.partition(" (")[2] for difference in differences]
            number_of[labels[:4]] = IN_WORDS[int(cells["draws"])]
    assert verdicts == {"40 %": ["no clear difference)"] * 2, "20 %": ["no clear difference)"] * 2}
    for page in (text, " ".join((ROOT / "docs/findings.md").read_text("utf-8").split())):
        assert "no clear difference" in page
        assert f"on average over {number_of['40 %']} draws of 40 % and {number_of['20 %']} of 20 %." in page
    lapsum = over_draws_of("noise_draws", draws.PAIRS)["20 % drawn among all classes", "LapSum − GCE"]
    assert f"LapSum loses {lapsum['Δ top-1, over draws'][1:12]} of top-1" in text
    assert lapsum["Δ top-1, over draws"].endswith("(loss)")
    every = draws.comparisons(folder, draws.PAIRS)
    (first,) = [item for item in every if item.group.startswith("40 %") and item.name == "splitter − GCE"]
    assert "After four of 40 % top-1 was a gain" in text
    assert over_draws(first.values("test_top1")[:4]).verdict == "gain"
    over = over_draws_of("noise_draws", draws.PAIRS, with_best=True)
    uniform = "forward correction, uniform T"
    by_40 = over["40 % drawn among all classes", f"splitter − {uniform}"]
    by_20 = over["20 % drawn among all classes", f"splitter − {uniform}"]
    of_gce = over["20 % drawn among all classes", f"{uniform} − GCE"]
    assert by_40["Δ top-1, over draws"].endswith("(gain)")
    assert by_40["Δ top-5, over draws"].endswith("(no clear difference)")
    assert by_20["Δ top-1, over draws"].endswith("(no clear difference)")
    assert by_20["Δ top-5, over draws"].endswith("(loss)")
    assert of_gce["Δ top-5, over draws"].endswith("(gain)")
    assert f"the splitter selection network gains {by_40['Δ top-1, over draws'][1:12]} of top-1 with 40 %" in text
    assert f"loses {by_20['Δ top-5, over draws'][1:12]} of top-5 with 20 %" in text
    assert of_gce["Δ top-1, over draws"].endswith("(loss)")
    gained = of_gce["Δ top-5, over draws"][1:12]
    assert f"that correction gains {gained} of top-5 over GCE, and loses top-1" in text
    which = " ".join((ROOT / "docs/which-loss.md").read_text("utf-8").split())
    assert "The uniform one, by `noise_rate`, had more top-5 and less top-1 than GCE with 20 % drawn." in which
    best = over["20 % drawn among all classes", "best of 2 top-k losses − best of 2 robust losses"]
    assert best["Δ top-5, over draws"] == by_20["Δ top-5, over draws"]
    said = {("20 %", "top-1"): "gain", ("40 %", "top-5"): "loss"}
    for share, k in itertools.product(("20 %", "40 %"), ("top-1", "top-5")):
        kept = over[f"{share} drawn among all classes", "cross-entropy of 16 scores − cross-entropy"]
        cell = kept[f"Δ {k}, over draws"]
        assert cell.endswith(f"({said.get((share, k), 'no clear difference')})")
        if (share, k) in said:
            assert f" {cell[1:12]} of {k} with {share}" in text
    for loss in ("splitter", "LapSum"):
        (row,) = [row for row in found if "people" in row["labels"] and row["difference"] == f"{loss} − GCE"]
        assert not row["Δ top-5"].endswith("(gain)")
        assert row["Δ top-1"].startswith("+0.20 ")
        assert row["Δ top-1"].endswith("(gain)")
    said = "neither it nor LapSum gains top-5, and both gain 0.20 of top-1, only LapSum by Holm's method."
    assert f"Where ten seeds choose, {said}" in every_text
    by_name = {item.key: item for item in findings.COMPARISONS}
    of_lapsum = dataclasses.replace(by_name["H3"], loss="method=lapsum")
    assert findings.is_dropped_by_holm(by_name["H3"], "test_top1")
    assert not findings.is_dropped_by_holm(of_lapsum, "test_top1")
    counted = [row for row in found if row["difference"].startswith("forward correction, T from")]
    (people,) = [row for row in counted if "people" in row["labels"]]
    assert {row["labels"][:4] for row in counted if row is not people} == {"40 %", "20 %"}
    assert all(row[f"Δ {k}"].endswith("(loss)") for row in counted if row is not people for k in ("top-1", "top-5"))
    assert "loses top-1 and top-5 to GCE in every draw where ten seeds choose" in every_text
    for metric in ("top-1", "top-5"):
        assert people[f"Δ {metric}"].removeprefix("+").removesuffix(" (gain)") in text
