"""Studies over draws: the tables of what is finished, against plain computations."""

import itertools
from functools import partial

import numpy as np
import pytest
from scipy import stats

from experiments.common.paths import REPOSITORY
from experiments.common.rows import read_rows, write_rows
from experiments.common.settings import CROSS_ENTROPY, OWN_SETTINGS, cell
from reporting import draws
from reporting.draws import edges, few_labels_answer, noise_draws_answer
from reporting.figures import draw_few_labels
from reporting.scratch import scratch_answer
from studies.few_labels import FEW_LABELS, SCRATCH
from studies.noise import NOISE_DRAWS
from studies.runs import parse_flags
from studies.tuning import Rule
from tests.scripts.trained import changed

METRICS = ("test_top1", "test_top5")
LEVELS = {"cross_entropy": 0.50, "ldr_kl": 0.51, "softsort": 0.515, "gce": 0.52, "lapsum": 0.521}
BASES = {"cross_entropy": "softmax_cross_entropy", "gce": "generalized_cross_entropy", "lapsum": "lapsum"}
TRIALS = (0, 1, 29)  # of the 30
CHOSEN = 1  # best by the mean of the finalists; by seed 0 the first is
FEW = ("labels_5_draw0", "labels_5_draw1", "labels_100_draw0")
RULE = Rule()
SEEDS = NOISE_DRAWS.seeds
KINDS = tuple(NOISE_DRAWS.kinds)


class Made:
    """Rows of a folder, made from rows that the training script wrote, and the accuracies that they hold.

    Args:
        folder: for the files.
        bases: a row of each loss.
        design: of the study.
    """

    def __init__(self, folder, bases, design=NOISE_DRAWS):
        self.folder = folder
        self.bases = bases
        self.design = design
        self.random = np.random.default_rng(0)
        self.more = {}  # validation that a loss has more, by (loss, whether of the seeds that chose)
        self.accuracy = {}  # (labels, loss, metric) -> ten numbers

    def rows_of(self, labels, loss, number, seeds, cells_of):
        study = self.design.study(labels, (loss,))
        trial = study.rounds[0].of(study.space[0], None)[number]
        given = parse_flags(f"{study.rounds[0].commands.flags} {trial.flags}")
        values = {key: cell(value) for key, value in given.items() if key in self.bases[loss]}
        plain = dict.fromkeys(OWN_SETTINGS, "") | {"n_epochs": trial.n_epochs}
        rows = []
        for seed in seeds:
            name = f"{labels}-{loss}-{number}-{seed}"
            own = {"run_id": name, "seed": seed, "order_seed": seed, **cells_of(seed)}
            rows.append(changed(self.bases[loss], **plain | values | own))
        return rows

    def valid(self, loss, number, seed):
        """Validation: the first trial is the best of seed 0, the second of the seeds of the rule."""
        level = {0: 0.43, 1: 0.42, 29: 0.30}[number]
        if seed:
            level = {0: 0.40, 1: 0.41, 29: 0.30}[number]
        level += self.more.get((loss, seed > 0), 0)
        return {f"last_valid_top{k}": level + 0.001 * (seed % 3) for k in (1, 5)}

    def write(self, labels, losses=tuple(BASES), finalists=RULE.seeds, finals=SEEDS):
        """The trials, finalists and finals of losses on a kind of labels."""
        trials = []
        tests = []
        for loss in losses:
            for number in TRIALS:
                valid = partial(self.valid, loss, number)
                trials += self.rows_of(labels, loss, number, (0, *finalists), valid)
            draw = self.random.normal(0, 0.004)
            levels = LEVELS[loss] + draw + self.random.normal(0, 0.002, (len(finals), 2))
            for metric, numbers in zip(METRICS, levels.T):
                self.accuracy[labels, loss, metric] = numbers
            measured = {seed: dict(zip(METRICS, numbers)) for seed, numbers in zip(finals, levels)}
            tests += self.rows_of(labels, loss, CHOSEN, finals, measured.__getitem__)
        write_rows(self.folder / f"{labels}_trials.csv", trials)
        if tests:
            write_rows(self.folder / f"{labels}.csv", tests)

    def difference(self, labels, loss, other, metric):
        return 100 * (self.accuracy[labels, loss, metric] - self.accuracy[labels, other, metric])


@pytest.fixture
def made(trained, tmp_path):
    rows = {row["method"]: row for row in read_rows(trained / "noise" / "human_trials.csv")}
    folder = tmp_path / "noise_draws"
    folder.mkdir()
    draws.results_of.cache_clear()
    yield Made(folder, {loss: rows[method] for loss, method in BASES.items()})
    draws.results_of.cache_clear()


def tables(text):
    """The rows of the table over draws, and of the one of each draw, as lists of cells."""
    parts = text.split("<details")
    found = []
    for part in parts:
        lines = [line for line in part.splitlines() if line.startswith("|")]
        found.append([[item.strip() for item in line.strip("|").split("|")] for line in lines[2:]])
    return found


def shown(value):
    return f"{value:+.2f}".replace("-", "−")


def expected_row(made, kinds, loss, other, metric):
    """The mean over draws with its interval, and half of the interval over seeds, by plain loops."""
    means = []
    squares = []
    degrees = 0
    for labels in kinds:
        values = made.difference(labels, loss, other, metric)
        mean = sum(values) / len(values)
        means.append(mean)
        squares.append(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
        degrees += len(values) - 1
    mean = sum(means) / len(means)
    seeds_half = stats.t.ppf(0.975, degrees) * sum(squares) ** 0.5 / len(means)
    if len(means) == 1:
        return f"{shown(mean)} (one draw)", f"± {seeds_half:.2f}"
    error = (sum((value - mean) ** 2 for value in means) / (len(means) - 1) / len(means)) ** 0.5
    half = stats.t.ppf(0.975, len(means) - 1) * error
    verdict = "no clear difference"
    if abs(mean) > half:
        verdict = "gain" if mean > 0 else "loss"
    return f"{shown(mean)} ± {half:.2f} ({verdict})", f"± {seeds_half:.2f}"


SUBSETS = {
    "one draw": ("symmetric_.4_draw0",),
    "people": ("human",),
    "several": ("symmetric_.4_draw0", "symmetric_.4_draw2", "symmetric_.4_draw5", "symmetric_.2_draw1", "human"),
    "all": KINDS,
}


@pytest.mark.parametrize("kinds", SUBSETS.values(), ids=SUBSETS)
def test_the_answer_has_the_draws_that_are_finished(made, kinds):
    for labels in kinds:
        made.write(labels)
    over, each = tables(noise_draws_answer(made.folder))
    by_noise = {}
    for labels in kinds:
        by_noise.setdefault(NOISE_DRAWS.kinds[labels].group, []).append(labels)
    pairs = {"GCE − cross-entropy": ("gce", "cross_entropy"), "LapSum − GCE": ("lapsum", "gce")}
    pairs["best of 1 top-k losses − best of 1 robust losses"] = ("lapsum", "gce")
    expected = []
    for (noise, names), (name, (loss, other)) in itertools.product(by_noise.items(), pairs.items()):
        cells = []
        for metric in METRICS:
            cells += expected_row(made, names, loss, other, metric)
        expected.append([noise, name, *cells, str(len(names)), "10"])
    assert sorted(over) == sorted(expected)
    assert len(each) == len(kinds) * len(pairs)


def test_the_best_of_each_side_is_the_best_by_the_seeds_that_chose(made):
    """By seed 0 LapSum would be, and its difference is another."""
    made.bases["softsort"] = changed(made.bases["lapsum"], method="softsort")
    made.more = {("lapsum", False): 0.01, ("softsort", True): 0.01}
    made.write("human", (*BASES, "softsort"))
    (row,) = [row for row in tables(noise_draws_answer(made.folder))[0] if row[1].startswith("best of 2 top-k losses")]
    cells = []
    for metric in METRICS:
        cells += expected_row(made, ["human"], "softsort", "gce", metric)
    assert row[2:6] == cells


def test_an_interval_over_draws_is_that_of_their_means(made):
    """Draws spread more than seeds here, and the interval over seeds leaves that out."""
    kinds = SUBSETS["several"][:3]
    for labels in kinds:
        made.write(labels)
    (row,) = [row for row in tables(noise_draws_answer(made.folder))[0] if row[1] == "GCE − cross-entropy"]
    half = float(row[2].split(" ± ")[1].split()[0])
    assert half > 3 * float(row[3].removeprefix("± "))


@pytest.mark.parametrize(
    "left_out",
    [{"finals": ()}, {"finals": SEEDS[:9]}, {"finalists": RULE.seeds[:9]}, {"losses": ("cross_entropy",)}],
    ids=["no finals", "nine finals", "nine seeds of finalists", "one loss"],
)
def test_a_draw_that_is_not_finished_is_left_out(made, left_out):
    made.write("symmetric_.4_draw0")
    before = tables(noise_draws_answer(made.folder))
    draws.results_of.cache_clear()
    made.write("symmetric_.4_draw1", **left_out)
    assert tables(noise_draws_answer(made.folder)) == before


def test_a_loss_that_is_not_finished_is_named(made):
    made.write("symmetric_.4_draw0")
    assert "not finished" not in noise_draws_answer(made.folder)
    rows = read_rows(made.folder / "symmetric_.4_draw0_trials.csv")
    lacks = [row for row in rows if (row["method"], row["seed"]) != ("lapsum", "103")]
    write_rows(made.folder / "symmetric_.4_draw0_trials.csv", lacks)
    draws.results_of.cache_clear()
    text = noise_draws_answer(made.folder)
    assert "LapSum − GCE" not in text
    assert "Left out, since not finished: LapSum (40 % drawn among all classes, draw 0)." in text


@pytest.fixture
def few(made):
    """Two draws of 5 labels a class and one of 100, of two losses, with three seeds."""
    few = Made(made.folder.with_name("few_labels"), {"cross_entropy": made.bases["cross_entropy"]}, FEW_LABELS)
    few.folder.mkdir()
    few.bases |= {"ldr_kl": changed(few.bases["cross_entropy"], method="ldr_kl")}
    for name in FEW:
        few.write(name, ("cross_entropy", "ldr_kl"), FEW_LABELS.rule.seeds, FEW_LABELS.seeds)
    return few


def test_few_labels_have_a_row_for_each_number_of_labels(few):
    over, each = tables(few_labels_answer(few.folder))
    expected = []
    for group, kinds in (("5 labels a class", FEW[:2]), ("100 labels a class", FEW[2:])):
        cells = []
        for metric in METRICS:
            cells += expected_row(few, kinds, "ldr_kl", "cross_entropy", metric)
        expected.append([group, "LDR-KL − cross-entropy", *cells, str(len(kinds)), "3"])
    assert over == expected
    assert len(each) == 3
    text = few_labels_answer(few.folder)
    assert FEW_LABELS.rule.text in text
    assert "2, 24, 40 or 480 epochs of batches" in text  # the least and the most of each number of labels


READINGS = (*METRICS, *(f"last_{metric}" for metric in METRICS))
FROM_SCRATCH = {
    "softmax_cross_entropy": {},
    "softmax_cross_entropy, label smoothing 0.1": {"label_smoothing": "0.1"},
    "ldr_kl": {"method": "ldr_kl"},
}
SCHEDULES = {"constant": (0, 1, 2), "cosine": (0, 1)}  # and the seeds of their runs


class Scratch:
    """A file of few_labels_scratch, and the accuracies that it holds, by (schedule, loss, reading)."""

    def __init__(self, path, row):
        self.path = path
        self.accuracy = {}
        random = np.random.default_rng(0)
        rows = []
        for (schedule, seeds), (loss, cells) in itertools.product(SCHEDULES.items(), FROM_SCRATCH.items()):
            numbers = 0.3 + random.normal(0, 0.01, (len(READINGS), len(seeds)))
            self.accuracy |= {(schedule, loss, reading): line for reading, line in zip(READINGS, numbers)}
            for seed, values in zip(seeds, numbers.T):
                name = f"{schedule}-{loss}-{seed}"
                own = {"run_id": name, "seed": seed, "lr_schedule": schedule.replace("constant", "")}
                rows.append(changed(row, **cells, **own, **dict(zip(READINGS, values))))
        write_rows(path, rows)

    def difference(self, schedule, loss, reading):
        return 100 * (self.accuracy[schedule, loss, reading] - self.accuracy[schedule, CROSS_ENTROPY, reading])


@pytest.fixture
def from_scratch(trained, tmp_path):
    (row,) = (row for row in read_rows(trained / "cifar.csv") if row["method"] == CROSS_ENTROPY)
    return Scratch(tmp_path / "few_labels_scratch.csv", row)


def test_from_scratch_each_loss_has_its_difference_to_cross_entropy_of_its_schedule(from_scratch):
    text = scratch_answer(from_scratch.path)
    expected = []
    for schedule, seeds in SCHEDULES.items():
        for loss in list(FROM_SCRATCH)[1:]:
            cells = []
            for reading in READINGS:
                values = from_scratch.difference(schedule, loss, reading).tolist()
                mean = sum(values) / len(values)
                error = (sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values)) ** 0.5
                half = stats.t.ppf(0.975, len(values) - 1) * error
                verdict = "no clear difference"
                if abs(mean) > half:
                    verdict = "gain" if mean > 0 else "loss"
                end = f" ({verdict})" if len(values) == 3 else ""  # of the three planned seeds
                cells.append(f"{shown(mean)} ± {half:.2f}{end}")
            expected.append([schedule, loss, *cells, str(len(seeds))])
    differences, accuracies = tables(text)
    assert differences == expected
    assert len(accuracies) == len(SCHEDULES) * len(FROM_SCRATCH)
    assert f"Under way: {len(read_rows(from_scratch.path))} of 30 runs." in text
    best = 100 * from_scratch.accuracy["constant", CROSS_ENTROPY, "test_top1"]
    assert accuracies[0][:3] == ["constant", CROSS_ENTROPY, f"{best.mean():.2f} ± {best.std(ddof=1):.2f}"]


def test_from_scratch_one_pair_has_no_interval_and_no_verdict(from_scratch):
    write_rows(from_scratch.path, [row for row in read_rows(from_scratch.path) if row["seed"] == "0"])
    differences, _ = tables(scratch_answer(from_scratch.path))
    value = from_scratch.difference("constant", "ldr_kl", "last_test_top5")[0]
    assert differences[1][5:] == [shown(value), "1"]
    assert all("±" not in cell for row in differences for cell in row)


def test_from_scratch_a_schedule_without_cross_entropy_has_no_line(from_scratch):
    rows = read_rows(from_scratch.path)
    kept = [row for row in rows if row["lr_schedule"] or row["method"] == "ldr_kl" or row["label_smoothing"]]
    write_rows(from_scratch.path, kept)
    assert {row[0] for part in tables(scratch_answer(from_scratch.path)) for row in part} == {"cosine"}


@pytest.mark.parametrize("num_seeds", [2, 3])
def test_the_figure_shows_what_all_planned_seeds_have_at_the_last_epoch(
    num_seeds, few, from_scratch, tmp_path, saved, monkeypatch
):
    """A schedule with fewer seeds than planned is left out."""
    monkeypatch.setattr("reporting.scratch.SCRATCH", SCRATCH.but(seeds=tuple(range(num_seeds))))
    whole = [schedule for schedule, seeds in SCHEDULES.items() if len(seeds) == num_seeds]
    draw_few_labels(few.folder, from_scratch.path, tmp_path)
    (figure,) = saved
    for axis, metric in zip(figure.axes, METRICS, strict=True):
        points = [container.lines[0] for container in axis.containers]
        for point, (schedule, loss) in zip(points, itertools.product(whole, list(FROM_SCRATCH)[1:]), strict=True):
            values = from_scratch.difference(schedule, loss, f"last_{metric}")
            assert point.get_ydata() == pytest.approx([values.mean()])
            assert (point.get_markerfacecolor() == "white") is (schedule == "cosine")
    write_rows(from_scratch.path, [row for row in read_rows(from_scratch.path) if row["seed"] == "0"])
    draw_few_labels(few.folder, from_scratch.path, tmp_path)
    assert not any(axis.containers for axis in saved[-1].axes)


def test_the_figure_shows_the_mean_over_draws_at_each_number_of_labels(few, from_scratch, tmp_path, saved):
    written = draw_few_labels(few.folder, from_scratch.path, tmp_path)
    assert [path.name for path in written] == ["few_labels.svg"]
    (figure,) = saved
    for axis, metric in zip(figure.axes, METRICS, strict=True):
        (line,) = [line for line in axis.lines if line.get_label() == "LDR-KL"]
        for kinds, height in zip((FEW[:2], FEW[2:]), line.get_ydata(), strict=True):
            means = [np.mean(few.difference(kind, "ldr_kl", "cross_entropy", metric)) for kind in kinds]
            assert height == pytest.approx(np.mean(means))
        assert line.get_xdata().tolist() == [5, 100]


def test_without_a_draw_there_is_no_figure(made, from_scratch, tmp_path):
    empty = made.folder.with_name("few_labels")
    assert draw_few_labels(empty, from_scratch.path, tmp_path) == []


def test_without_a_finished_draw_there_is_a_sentence(made):
    for call in (noise_draws_answer, edges):
        assert call(made.folder) == "No draw is finished yet."


def test_captions_say_the_rule_that_chose(made):
    made.write("human")
    text = noise_draws_answer(made.folder)
    assert RULE.text in text
    assert "seeds 101 to 110" in text
    assert "30 trials" not in text  # but three, as made
    assert "3 trials of each loss" in text


def test_an_edge_is_the_outer_sixth_of_a_range(made):
    """Counted again by the numbers of the trials that were chosen."""
    made.write("human")
    made.write("symmetric_.2_draw3")
    counts = {row[0]: row[1:] for row in tables(edges(made.folder))[0]}
    study = NOISE_DRAWS.study("human")
    places = {"learning rate": [], "weight decay": []}
    for candidate in study.space:
        if candidate.name not in BASES:
            continue
        values = parse_flags(study.rounds[0].of(candidate, None)[CHOSEN].shared)
        places["learning rate"].append(np.log(values["lr"] / 0.0001) / np.log(0.003 / 0.0001))
        places["weight decay"].append(np.log(values["weight_decay"] / 0.01) / np.log(10 / 0.01))
    for setting, found in places.items():
        low = 2 * sum(place < 1 / 6 for place in found)
        high = 2 * sum(place > 5 / 6 for place in found)
        assert counts[setting][:3] == ["6", str(low), str(high)]
    assert counts["epochs"] == ["6", "6", "0", "low"]  # the second of ten trials with four epochs


def test_of_the_first_study_nearly_all_choices_have_the_most_epochs_and_many_little_weight_decay():
    """What the ranges of the study over draws answer to."""
    counts = {row[0]: row[1:] for row in tables(edges(REPOSITORY / "noise"))[0]}
    assert counts["epochs"] == ["142", "8", "134", "high"]
    assert counts["weight decay"][3] == "low"
    assert counts["learning rate"][3] == ""


def test_a_folder_of_no_study_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must be named as a study, noise, noise_draws, few_labels"):
        noise_draws_answer(tmp_path / "elsewhere")
