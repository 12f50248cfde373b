"""The epochs of runs, finished or not, in one file, and what the report says of them."""

import csv
import json

import pandas as pd
import pytest

from scripts import epochs, report

METRICS = dict.fromkeys(epochs.OF_AN_EPOCH[1:], "0.5")


def write_run(folder, run_id, num_epochs, results="results/t.csv", method="softmax_cross_entropy", seed=0, **metrics):
    """metrics: of an epoch, where they are not .5."""
    run = folder / "runs" / run_id
    run.mkdir(parents=True, exist_ok=True)
    p_k = [1.0, 0, 0, 0, 0] if method == "softmax_cross_entropy" else [0.5, 0.5]
    flags = dict.fromkeys(epochs.OF_THE_RUN, "x") | {"run_id": run_id, "results": results, "precision": "bf16"}
    (run / "config.json").write_text(json.dumps(flags | {"method": method, "p_k": p_k, "seed": seed}))
    rows = [
        {"epoch": epoch, **METRICS, **{name: value_at(epoch) for name, value_at in metrics.items()}}
        for epoch in range(1, num_epochs + 1)
    ]
    pd.DataFrame(rows).assign(train_loss=1).to_csv(run / "epochs.csv", index=False)


def test_a_longer_history_takes_the_place_of_a_shorter_one_and_own_columns_stay(tmp_path, capsys):
    """A run folder that cannot be read is named and left out."""
    table, output = tmp_path / "t.csv", tmp_path / "t_epochs.csv"
    for a, b in ((2, 1), (1, 3)):  # a run that began anew has fewer epochs than are kept
        write_run(tmp_path, "a", a)
        write_run(tmp_path, "b", b)
        write_run(tmp_path, "c", 5, "results/other.csv")
        for number, content in enumerate(("", "{}", '{"results": "results/t.csv", "p_k": 3}')):
            (tmp_path / "runs" / f"bad{number}").mkdir(exist_ok=True)
            (tmp_path / "runs" / f"bad{number}" / "config.json").write_text(content)
            (tmp_path / "runs" / f"bad{number}" / "epochs.csv").write_text("epoch\n1\n")
        assert epochs.main([str(table)]) == 0
        message = capsys.readouterr().err
        assert all(f"bad{number} cannot be read and is left out" in message for number in range(3))
        pd.read_csv(output, dtype=str).assign(my_note="mine").to_csv(output, index=False)
    with pytest.raises(SystemExit, match="2"):  # though the file has rows
        epochs.main([str(table), "--runs", str(tmp_path / "absent")])
    assert "holds no run that writes to t.csv" in capsys.readouterr().err
    with output.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["run_id"] + row["epoch"] for row in rows] == ["a1", "a2", "b1", "b2", "b3"]
    assert {row["precision"] for row in rows} == {"bf16"}
    assert {row["my_note"] for row in rows} == {"mine"}


def test_the_report_says_what_was_reached_after_how_many_epochs_and_what_crossed_what(tmp_path, capsys):
    """Softmax stays at 50 %; the network rises by half a point an epoch and passes it in top-1, not in top-5."""
    write_run(tmp_path, "a", 60, "results/table1.csv")
    rising = {"test_top1": lambda epoch: 0.3 + 0.005 * epoch, "test_top5": lambda epoch: 0.4}
    rising["valid_top1"] = lambda epoch: 0.6 if epoch == 47 else 0.5
    write_run(tmp_path, "b", 55, "results/table1.csv", method="splitter_selection", **rising)
    for seed, end in ((1, 52), (2, 53)):
        write_run(tmp_path, f"c{seed}", end, "results/table1.csv", seed=seed)
        rising["test_top1"] = lambda epoch, seed=seed: 0.3 + 0.01 * seed + 0.005 * epoch
        write_run(tmp_path, f"d{seed}", 55, "results/table1.csv", method="splitter_selection", seed=seed, **rising)
    assert epochs.main([str(tmp_path / "table1.csv")]) == 0
    capsys.readouterr()
    assert report.main([str(tmp_path / "table1_epochs.csv"), "--figures", str(tmp_path / "figures")]) == 0
    text = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines() if line[:1] == "|"]
    reached = {tuple(row[:3]): row[3:] for row in rows if row[0].startswith("s")}
    # Means of five epochs: 25 is that of 21 to 25, .3 + .005 * 23; at the best validation epoch: 47.
    assert reached["softmax_cross_entropy", "0", "60"][:4] == ["50.00"] * 4
    assert reached["splitter_selection", "0", "25"][:2] == ["41.50", "40.00"]
    assert reached["splitter_selection", "0", "55"][:4] == ["56.50", "40.00", "53.50", "40.00"]
    # Three seeds, 1 apart: half of the interval is t(.975, 2) / sqrt 3. 52 is the last epoch that all have.
    assert {end: reached["splitter_selection", end, "3"] for end in ("25", "50", "52")} == {
        end: [f"{top1} ± 2.48", "−10.00 ± 0.00", f"{best} ± 2.48", "−10.00 ± 0.00"]
        for end, top1, best in (("25", "−7.50", "−18.50"), ("50", "+5.00", "+4.50"), ("52", "+6.00", "+4.50"))
    }
    assert (tmp_path / "figures" / "table1_epochs.svg").stat().st_size > 10_000


def test_epochs_that_fall_get_a_sentence(tmp_path, capsys):
    write_run(tmp_path, "a", 3, "results/table1.csv")
    epochs.main([str(tmp_path / "table1.csv")])
    path = tmp_path / "table1_epochs.csv"
    header, *lines = path.read_text().splitlines()
    path.write_text("\n".join([header, *lines[::-1]]) + "\n")
    assert report.main([str(path)]) == 2
    assert "has an epoch after a later one; gather it again" in capsys.readouterr().err
