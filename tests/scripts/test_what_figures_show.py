"""What stands in the figures, read from the figure as it is saved: the right numbers in the right panel."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from scripts import report
from scripts.reporting import figures
from tests.scripts.test_published_rows import published
from tests.scripts.test_report import cifar_run


@pytest.fixture
def saved(monkeypatch):
    """The figures that are saved from now on, each once."""
    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *rest, **how: figures.append(self) or save(self, *rest, **how))
    return figures


def panels(figures, label):
    """The panels one of whose axes has a label with these words."""
    axes = [axis for figure in dict.fromkeys(figures) for axis in figure.axes]
    return [axis for axis in axes if label in axis.get_ylabel() + axis.get_xlabel()]


def numbers(axis, direction):
    """The numbers of the lines of a panel, those of the x-axis (0) or of the y-axis (1)."""
    found = np.concatenate([np.asarray(line.get_data()[direction], dtype=float) for line in axis.lines])
    return found[np.isfinite(found)]


def test_the_epochs_of_a_run_stand_in_the_panel_of_their_k(tmp_path, saved):
    folder = tmp_path / "runs" / "a-run"
    folder.mkdir(parents=True)
    history = pd.DataFrame({"epoch": range(1, 9)})
    for split, low in (("valid", 0.1), ("test", 0.2)):
        history[f"{split}_top1"], history[f"{split}_top5"] = (
            low + history["epoch"] / 50,
            0.5 + low + history["epoch"] / 99,
        )
    shared = {**cifar_run(0, 0, 0), "run_id": "a-run"}
    rows = pd.DataFrame([{**shared, **entry} for entry in history.to_dict("records")])
    rows.to_csv(tmp_path / "table1_epochs.csv", index=False)
    assert report.main([str(tmp_path / "table1_epochs.csv"), "--figures", str(tmp_path / "figures")]) == 0
    for k, name in (("top1", "top-1"), ("top5", "top-5")):
        (axis,) = panels(saved, f"test {name}")
        means = 100 * history[f"test_{k}"].rolling(5).mean().dropna()
        assert means.to_numpy() == pytest.approx(axis.lines[0].get_ydata())


def test_seconds_per_epoch_are_of_as_many_steps_as_an_epoch_has(tmp_path, saved, monkeypatch):
    (protocol,) = (row for row in published("protocols") if row["table"] == "table1")
    images = 50_000 - round(0.05 * 50_000)  # 5 % validate
    steps = images // int(protocol["batch_size"])  # the last partial batch is dropped
    monkeypatch.setattr(figures, "BENCHMARKS", tmp_path)
    common = {"method": ["softsort", "neuralsort"], "device": "a CPU", "threads": 2, "torch": "2.9"}
    step = pd.DataFrame({**common, "precision": "fp32", "ms_per_step": [100.0, 120.0]})
    step.to_csv(tmp_path / "training_step.csv", index=False)
    loss = pd.DataFrame({**common, "batch": 128, "n": 100, "m": 16, "ms": [1.0, 2.0], "official_ms": [3.0, 4.0]})
    loss.to_csv(tmp_path / "losses.csv", index=False)
    scaling = pd.DataFrame(
        {**common, "n": 16, "k": 5, "batch": 128, "ms": 1.0, "peak_mib": 1.0, "operations": 1, "numbers": 1}
    )
    scaling.to_csv(tmp_path / "scaling.csv", index=False)
    figures.draw_benchmarks(tmp_path / "figures")
    (axis,) = [axis for axis in saved[0].axes if "s/epoch" in axis.get_title(loc="left")]
    assert sorted(numbers(axis, 0)) == pytest.approx([0.100 * steps, 0.120 * steps])
