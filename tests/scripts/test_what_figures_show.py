"""What stands in the figures, read from the figure as it is saved: the right numbers in the right panel."""

import pandas as pd
import pytest
from matplotlib.figure import Figure

from experiments.common.losses import OWN_SETTINGS
from scripts import report
from scripts.reporting import figures
from tests.scripts.test_published_rows import published
from tests.scripts.test_report import FIVE, NEURALSORT, TWO_SEEDS, cifar_run
from topk_losses import METHODS


@pytest.fixture
def saved(monkeypatch):
    """The figures that are saved from now on."""
    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *rest, **how: figures.append(self) or save(self, *rest, **how))
    return figures


def test_each_metric_is_in_its_panel_and_a_figure_is_the_same_bytes_twice(made, tmp_path, saved):
    drawn = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        assert made(TWO_SEEDS, "--figures", folder)[0] == 0
        drawn.append({file.name: file.read_bytes() for file in folder.iterdir()})
    assert set(drawn[0]) == {"table1_accuracy.svg"}
    assert drawn[0] == drawn[1]
    for axis, label, means in zip(saved[0].axes, ("top-1", "top-5"), ([61.5, 62.0], [85.3, 86.0])):
        points = [line.get_xdata()[0] for line in axis.lines if len(line.get_xdata()) == 1]
        assert all(any(point == pytest.approx(mean) for point in points) for mean in means)
        assert axis.get_title(loc="left") == f"test {label} (%)"


def test_no_two_rows_of_a_figure_are_named_alike_and_their_experiment_is_named(made, tmp_path, saved):
    runs = [
        cifar_run(0, 0.6, 0.8, **{setting: "0.3"}) for setting in (*OWN_SETTINGS, "mixup", "ema", "noise_matrix_id")
    ]
    runs += [cifar_run(0, 0.6, 0.8, limit_train=number, p_k=FIVE, **NEURALSORT) for number in ("", "500")]
    assert made(runs, "--figures", tmp_path)[0] == 0
    names = [label.get_text() for label in saved[0].axes[0].get_yticklabels()]
    assert len(set(names)) == len(names) == len(runs)
    assert sum("limit_train 500" in name for name in names) == 1


def test_every_method_has_a_look_of_its_own_and_its_family_a_colour():
    assert set(figures.STYLE) == set(METHODS)
    assert len({tuple(style.values()) for style in figures.STYLE.values()}) == len(METHODS)


def test_the_epochs_of_a_run_stand_in_the_panel_of_their_k(write, tmp_path, saved):
    epochs = pd.Series(range(1, 9))
    history = pd.DataFrame({"epoch": epochs})
    for split, low in (("valid", 0.1), ("test", 0.2)):
        history[f"{split}_top1"], history[f"{split}_top5"] = low + epochs / 50, 0.5 + low + epochs / 99
    rows = [{**cifar_run(0, 0, 0), "run_id": "a-run", **entry} for entry in history.to_dict("records")]
    path = write(*rows, name="table1_epochs.csv")
    assert report.main([str(path), "--figures", str(tmp_path / "figures")]) == 0
    for axis, (k, name) in zip(saved[0].axes, (("top1", "top-1"), ("top5", "top-5"))):
        assert axis.get_ylabel() == f"test {name} (%)"
        means = 100 * history[f"test_{k}"].rolling(5).mean().dropna()
        assert means.to_numpy() == pytest.approx(axis.lines[0].get_ydata())


def test_seconds_per_epoch_are_of_as_many_steps_as_an_epoch_has(tmp_path, saved, monkeypatch):
    (protocol,) = (row for row in published("protocols") if row["table"] == "table1")
    images = 50_000 - round(0.05 * 50_000)  # 5 % validate
    steps = images // int(protocol["batch_size"])  # the last partial batch is dropped
    monkeypatch.setattr(figures, "BENCHMARKS", tmp_path)
    common = {"method": ["softsort", "neuralsort"], "device": "a CPU", "threads": 2, "torch": "2.9", "batch": 128}
    scaling = {"n": 16, "k": 5, "ms": 1.0, "peak_mib": 1.0, "operations": 1, "numbers": 1}
    tables = {"training_step": {"precision": "fp32", "ms_per_step": [100.0, 120.0]}, "scaling": scaling}
    tables["losses"] = {"n": 100, "m": 16, "ms": [1.0, 2.0], "official_ms": [3.0, 4.0]}
    for name, columns in tables.items():
        pd.DataFrame(common | columns).to_csv(tmp_path / f"{name}.csv", index=False)
    figures.draw_benchmarks(tmp_path / "figures")
    (axis,) = [axis for axis in saved[0].axes if "s/epoch" in axis.get_title(loc="left")]
    seconds = [line.get_xdata()[0] for line in axis.lines if len(line.get_xdata()) == 1]
    assert seconds == pytest.approx([0.120 * steps, 0.100 * steps])  # in the library's order
