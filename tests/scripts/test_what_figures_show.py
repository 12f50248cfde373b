"""What stands in the figures, read from the figure as it is saved: the right numbers in the right panel."""

import re
import shutil

import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from scipy import stats

from experiments.common.paths import REPOSITORY, ROOT
from experiments.common.settings import OWN_SETTINGS
from reporting import figures, findings, front_door, noise
from reporting.frames import METRICS
from scripts import epochs, report
from tests.scripts.trained import changed, rows_of
from topk_losses import METHODS


def test_each_metric_is_in_its_panel_and_a_figure_is_the_same_bytes_twice(made, two_seeds, tmp_path, saved):
    drawn = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        assert made(two_seeds, "--figures", folder)[0] == 0
        drawn.append({file.name: file.read_bytes() for file in folder.iterdir()})
    assert set(drawn[0]) == {"table1_accuracy.svg"}
    assert drawn[0] == drawn[1]
    for axis, label, means in zip(saved[0].axes, ("top-1", "top-5"), ([61.5, 62.0], [85.3, 86.0])):
        points = [line.get_xdata()[0] for line in axis.lines if len(line.get_xdata()) == 1]
        assert all(any(point == pytest.approx(mean) for point in points) for mean in means)
        assert axis.get_title(loc="left") == f"test {label} (%)"


def test_no_two_rows_of_a_figure_are_named_alike_and_their_experiment_is_named(made, row, tmp_path, saved):
    softmax, lapsum = (row("noise/human", method=method) for method in ("softmax_cross_entropy", "lapsum"))
    runs = [changed(softmax, **{setting: "0.3"}) for setting in (*OWN_SETTINGS, "mixup", "noise_matrix_id")]
    runs += [changed(lapsum, limit_train=number) for number in ("", "500")]
    assert made(runs, "--figures", tmp_path)[0] == 0
    names = [label.get_text() for label in saved[0].axes[0].get_yticklabels()]
    assert len(set(names)) == len(names) == len(runs)
    assert sum("limit_train 500" in name for name in names) == 1


def test_every_method_has_a_look_of_its_own_and_its_family_a_colour():
    assert set(figures.STYLE) == set(METHODS)
    assert len({tuple(style.values()) for style in figures.STYLE.values()}) == len(METHODS)


def test_the_epochs_of_a_run_stand_in_the_panel_of_their_k(trained, tmp_path, saved):
    path = tmp_path / "table1_epochs.csv"
    (tmp_path / "cifar.csv").write_bytes((trained / "cifar.csv").read_bytes())
    assert epochs.main([str(tmp_path / "cifar.csv"), "--runs", str(trained / "runs")]) == 0
    first = rows_of(tmp_path / "cifar_epochs.csv")[0]
    history = pd.DataFrame({"epoch": range(1, 9)})
    for split, low in (("valid", 0.1), ("test", 0.2)):
        history[f"{split}_top1"] = low + history.epoch / 50
        history[f"{split}_top5"] = 0.5 + low + history.epoch / 99
    pd.DataFrame([changed(first, **entry) for entry in history.to_dict("records")]).to_csv(path, index=False)
    assert report.main([str(path), "--figures", str(tmp_path / "figures")]) == 0
    for axis, (k, name) in zip(saved[0].axes, (("top1", "top-1"), ("top5", "top-5"))):
        assert axis.get_ylabel() == f"test {name} (%)"
        means = 100 * history[f"test_{k}"].rolling(5).mean().dropna()
        assert means.to_numpy() == pytest.approx(axis.lines[0].get_ydata())


def test_times_of_the_official_package_are_hollow_and_in_the_panel_of_their_size(tmp_path, saved):
    measured = pd.read_csv(figures.BENCHMARKS / "losses_all.csv").set_index("method")
    figures.draw_speed(tmp_path / "figures")
    for axis, classes in zip(saved[0].axes, (100, 1000)):
        of_size = measured[measured["n"] == classes]
        ours = []
        official = []
        for line in axis.lines:
            if len(line.get_xdata()) == 1 and line.get_xdata()[0] > 0:  # NaN where difftopk has no such loss
                (official if line.get_markerfacecolor() == "none" else ours).append(line.get_xdata()[0])
        assert ours == pytest.approx([of_size.ms[method] for method in METHODS if method in of_size.index])
        times = of_size.official_ms.dropna()
        assert official == pytest.approx([times[method] for method in METHODS if method in times.index])


def test_the_runs_of_the_first_figure_end_at_the_epochs_that_its_caption_names(tmp_path, saved):
    front_door.draw_hero(tmp_path)
    ends = [int(line.get_xdata()[-1]) for line in saved[0].axes[0].lines if len(line.get_xdata()) > 2]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (caption,) = re.findall(r"hero\.svg\)\n\n\*(.*?)\*\n\n", readme, re.DOTALL)
    assert ends.count(200) == 2  # the finished pair
    assert {str(end) for end in ends} <= set(re.findall(r"\d+", caption))


def test_a_difference_beyond_the_edge_is_written_there_and_the_axis_says_that_it_is_cut(tmp_path, saved):
    (tmp_path / "noise").mkdir()
    for name in ("human.csv", "human_trials.csv"):
        shutil.copy(REPOSITORY / "noise" / name, tmp_path / "noise")
    figures.draw_noise(tmp_path / "noise", tmp_path)
    study = noise.results_of(tmp_path / "noise")["human"]
    others = [loss for loss in study.losses if loss != noise.BASELINE]
    cut = []
    for axis, metric in zip(saved[0].axes, METRICS):
        gains = [study.minus(noise.Pair(loss, noise.BASELINE))[metric].mean() for loss in others]
        below = [f"{gain:.1f}".replace("-", "−") for gain in gains if gain < figures.LEAST_GAIN]
        written = [text.get_text() for text in axis.texts if "◂" in text.get_text()]
        assert [text.split()[1].strip(",") for text in written] == below
        assert ("cut at −1" in axis.get_xlabel()) == bool(below)
        assert axis.get_xlim()[0] == figures.LEAST_GAIN or not below
        cut.append(len(below))
    assert max(cut) > 0


VERDICTS = {"gain": "blue", "loss": "red", "no clear difference": "grey"}


def hue(color) -> str:
    red, _, blue = to_rgb(color)
    return "grey" if red == blue else "red" if red > blue else "blue"


def test_gains_are_blue_losses_red_and_what_is_not_clear_grey_and_hollow(tmp_path, saved):
    """Against the differences of each results file, by the quantiles of scipy."""
    figures.draw_findings(tmp_path)
    main = [comparison for comparison in findings.MAIN if not comparison.epoch]
    found = {}
    for comparison in main:
        conditions = [
            f"{comparison.loss}; {comparison.loss_chosen}",
            f"{comparison.baseline}; {comparison.baseline_chosen}",
        ]
        sides = [findings.runs_that_meet(comparison.file, text) for text in conditions]
        ours, theirs = (side.set_index("seed")[["test_top1", "test_top5"]] for side in sides)
        for place, name in enumerate(("test_top1", "test_top5")):
            gains = (ours[name] - theirs[name]).dropna()
            if comparison.file == "noise_scratch.csv":
                gains = gains[gains.index != 0]  # the seed that chose
            half = 0.0
            if len(gains) > 1:
                half = stats.t.ppf(0.975, len(gains) - 1) * gains.std(ddof=1) / len(gains) ** 0.5
            verdict = "gain" if gains.mean() > half else "loss" if gains.mean() < -half else "no clear difference"
            if len(gains) > 1:
                found[place, round(gains.mean(), 6)] = verdict
    assert set(found.values()) == set(VERDICTS)
    seen = 0
    for place, axis in enumerate(saved[0].axes):
        for line in axis.lines:
            verdict = found.get((place, round(float(line.get_xdata()[0]), 6))) if line.get_marker() == "o" else None
            if verdict:
                seen += 1
                assert hue(line.get_color()) == VERDICTS[verdict]
                is_hollow = to_rgb(line.get_markerfacecolor()) == (1, 1, 1)
                assert is_hollow == (verdict == "no clear difference")
    assert seen == len(found)
