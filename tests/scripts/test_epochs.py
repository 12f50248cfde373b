"""The epochs of runs, finished or not, in one file."""

import csv
import json

import pytest

from scripts import epochs

METRICS = dict.fromkeys(epochs.OF_AN_EPOCH[1:], "0.5")


def write_run(folder, run_id, num_epochs, results="results/t.csv"):
    run = folder / run_id
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.json").write_text(json.dumps({"run_id": run_id, "results": results, "precision": "bf16"}))
    with (run / "epochs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["epoch", *METRICS, "train_loss"])
        writer.writeheader()
        writer.writerows({"epoch": epoch, "train_loss": 1, **METRICS} for epoch in range(1, num_epochs + 1))


def test_a_longer_history_takes_the_place_of_a_shorter_one_and_no_other(tmp_path):
    table, output = tmp_path / "t.csv", tmp_path / "t_epochs.csv"
    for a, b in ((2, 1), (1, 3)):  # a run that began anew has fewer epochs than are kept
        write_run(tmp_path / "runs", "a", a)
        write_run(tmp_path / "runs", "b", b)
        write_run(tmp_path / "runs", "c", 5, "results/other.csv")
        assert epochs.gather([str(table)]) == 0
    with output.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["run_id"], row["epoch"]) for row in rows] == [
        ("a", "1"),
        ("a", "2"),
        ("b", "1"),
        ("b", "2"),
        ("b", "3"),
    ]
    assert all(row["precision"] == "bf16" and row["test_top1"] == "0.5" for row in rows)


def test_a_folder_without_runs_gets_a_sentence(tmp_path):
    with pytest.raises(epochs.program.CommandLineError, match="holds no run that writes to t"):
        epochs.gather([str(tmp_path / "t.csv")])
    assert not (tmp_path / "t_epochs.csv").exists()
