"""What stands in the figures, read from the figure as it is saved: the right numbers in the right panel."""

import re

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from data.cmudict import END, load_words
from experiments import train_beam_search
from scripts import report
from scripts.reporting import benchmark_figures
from tests.scripts.test_published_rows import published
from tests.scripts.test_report import NEURALSORT, cifar_run


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


def test_top_1_and_top_5_stand_in_their_panels(made, tmp_path, saved, drawn_quickly):
    """Of accuracy over epochs, mean over two seeds, and of accuracy: all of top-1 is below 0.5, all of top-5 above."""
    histories = {"top1": np.array([0.30, 0.35, 0.40]), "top5": np.array([0.70, 0.75, 0.80])}
    rows = [cifar_run(seed, 0.40, 0.80, p_k="0.5 0 0 0 0.5", **NEURALSORT) for seed in (0, 1)]
    for seed in (0, 1):
        folder = tmp_path / "runs" / str(seed)
        folder.mkdir(parents=True)
        table = pd.DataFrame({f"test_{k}": values + seed / 50 for k, values in histories.items()})
        table.assign(epoch=[1, 2, 3]).to_csv(folder / "epochs.csv", index=False)
    assert made(rows, "--figures", tmp_path / "figures")[0] == 0
    for k, name in (("top1", "top-1"), ("top5", "top-5")):
        curves, points = panels(saved, f"test {name} accuracy")
        assert numbers(curves, 1) == pytest.approx(100 * (histories[k] + 0.01))
        paper = [100 * float(row[f"test_{k}"]) for row in published("table1") if row["method"]]
        for value in numbers(points, 0):
            assert value == pytest.approx(100 * histories[k][-1]) or min(abs(value - each) for each in paper) < 1e-6
        assert 100 * histories[k][-1] in numbers(points, 0)


def test_the_epochs_of_a_run_stand_in_the_panel_of_their_k(tmp_path, saved):
    folder = tmp_path / "runs" / "a-run"
    folder.mkdir(parents=True)
    history = pd.DataFrame({"epoch": range(1, 9)})
    for split, low in (("valid", 0.1), ("test", 0.2)):
        history[f"{split}_top1"], history[f"{split}_top5"] = (
            low + history["epoch"] / 50,
            0.5 + low + history["epoch"] / 99,
        )
    told = {**cifar_run(0, 0, 0), "run_id": "a-run"}
    rows = pd.DataFrame([{**told, **entry} for entry in history.to_dict("records")])
    rows.to_csv(tmp_path / "table1_epochs.csv", index=False)
    assert report.main([str(tmp_path / "table1_epochs.csv"), "--figures", str(tmp_path / "figures")]) == 0
    for k, name in (("top1", "top-1"), ("top5", "top-5")):
        (axis,) = panels(saved, f"test {name} accuracy")
        assert 100 * history[f"test_{k}"].to_numpy() == pytest.approx(axis.lines[0].get_ydata())


def test_seconds_per_epoch_are_of_as_many_steps_as_an_epoch_has(tmp_path, saved, monkeypatch):
    (protocol,) = (row for row in published("protocols") if row["table"] == "table1")
    images = 50_000 - round(0.05 * 50_000)  # 5 % validate
    steps = images // int(protocol["batch_size"])  # the last partial batch is dropped
    monkeypatch.setattr(benchmark_figures, "BENCHMARKS", tmp_path)
    common = {"method": ["softsort", "neuralsort"], "device": "a CPU", "threads": 2, "torch": "2.9"}
    step = pd.DataFrame({**common, "precision": "fp32", "ms_per_step": [100.0, 120.0]})
    step.to_csv(tmp_path / "training_step.csv", index=False)
    loss = pd.DataFrame({**common, "batch": 128, "n": 100, "m": 16, "ms": [1.0, 2.0], "official_ms": [3.0, 4.0]})
    loss.to_csv(tmp_path / "losses.csv", index=False)
    benchmark_figures.draw_benchmarks(tmp_path / "figures")
    (axis,) = panels(saved, "seconds per epoch")
    assert sorted(numbers(axis, 0)) == pytest.approx([0.100 * steps, 0.120 * steps])


def test_the_word_of_the_beam_figure_is_one_of_the_test_words(tmp_path, saved):
    toy = "--dataset reversal --max_letters 3 --hidden_dim 8 --batch_size 16 --beam_size 3 --pretrain_updates 1"
    words = f"--arm soft_beam --method softsort {toy} --n_updates 1 --device cpu --results {tmp_path / 'r.csv'}"
    assert train_beam_search.main(words.split()) == 0
    assert report.main([str(tmp_path / "r.csv"), "--figures", str(tmp_path / "figures")]) == 0
    shown = " ".join(text.get_text() for text in saved[0].findobj(Text))
    (word,) = re.findall("“([a-e]+)”", shown)
    test = load_words("reversal", 3).test.letters.tolist()
    assert word in {"".join(chr(ord("a") - 1 + letter) for letter in row if letter != END) for row in test}
