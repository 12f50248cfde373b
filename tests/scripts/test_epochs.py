"""The epochs of runs, finished or not, in one file, and what the report says of them."""

import json
import os
import shutil

import pandas as pd
import pytest

from experiments.common.settings import CIFAR, identifying
from scripts import epochs, report
from tests.scripts.trained import changed, rows_of

SOFTMAX = "softmax_cross_entropy"

TABLE1 = {"results": "table1.csv"}
METRICS = [f"{split}_top{k}" for split in ("valid", "test") for k in (1, 5)]


@pytest.fixture
def write_run(trained, tmp_path):
    """Write a trained run's folder with so many epochs, with other flags and other metrics where they are given."""
    folders = {name: next(trained.glob(f"runs/digits-resnet18-{name}-*")) for name in (SOFTMAX, "neuralsort")}

    def call(run_id, num_epochs, method=SOFTMAX, seed=0, flags=(), **metrics):
        """flags: of the run. metrics: of an epoch, where they are not .5."""
        folder = folders[SOFTMAX if method == SOFTMAX else "neuralsort"]
        run = tmp_path / "runs" / run_id
        shutil.copytree(folder, run, dirs_exist_ok=True, ignore=shutil.ignore_patterns("checkpoint.pt"))
        config = json.loads((run / "config.json").read_text())
        (epoch,) = rows_of(run / "epochs.csv")
        flags = {
            "run_id": run_id,
            "results": "t.csv",
            "precision": "bf16",
            "method": method,
            "seed": seed,
            **dict(flags),
        }
        (run / "config.json").write_text(json.dumps(changed_json(config, flags)))
        values = {**dict.fromkeys(METRICS, lambda _: 0.5), **metrics}
        epochs = [
            changed(epoch, epoch=number, **{name: value_at(number) for name, value_at in values.items()})
            for number in range(1, num_epochs + 1)
        ]
        pd.DataFrame(epochs).to_csv(run / "epochs.csv", index=False)

    return call


def changed_json(config, flags):
    """A configuration with other values of flags that it has."""
    assert set(flags) <= set(config)
    return config | flags


def test_the_epochs_of_a_training_run_are_those_of_its_row(trained, tmp_path):
    (tmp_path / "cifar.csv").write_bytes((trained / "cifar.csv").read_bytes())
    assert epochs.main([str(tmp_path / "cifar.csv"), "--runs", str(trained / "runs")]) == 0
    found = {epoch["run_id"]: epoch for epoch in rows_of(tmp_path / "cifar_epochs.csv")}
    for run in rows_of(tmp_path / "cifar.csv"):
        epoch = found.pop(run["run_id"])
        assert {item.name for item in identifying(CIFAR)} < set(epoch)
        assert {name: epoch[name] for name in epochs.OF_THE_RUN if name in epoch}.items() <= run.items()
        assert (epoch["epoch"], epoch["test_top1"]) == ("1", run["test_top1"])
    assert not found


@pytest.mark.parametrize("name", ["knn", "heads", "beam"])
def test_a_file_of_another_script_has_no_epochs(trained, name, capsys):
    """Those of a nearest-neighbour classifier have other columns."""
    with pytest.raises(ValueError, match=rf"holds no run of train_cifar100\.py that writes to {name}\.csv"):
        epochs.main([str(trained / f"{name}.csv")])
    assert capsys.readouterr().err == ""


def test_a_file_of_epochs_keeps_its_cells_and_a_pipe_in_a_run_folder_is_passed_over(write_run, tmp_path):
    write_run("a", 2)
    for name in ("config.json", "epochs.csv"):
        write_run(f"pipe-{name}", 1)
        (tmp_path / "runs" / f"pipe-{name}" / name).unlink()
        os.mkfifo(tmp_path / "runs" / f"pipe-{name}" / name)
    assert epochs.main([str(tmp_path / "t.csv")]) == 0
    output = tmp_path / "t_epochs.csv"
    header, *lines = output.read_text().splitlines()
    output.write_text("\n".join([f"{header},mine", *(f"{line},NA" for line in lines)]) + "\n")
    assert epochs.main([str(tmp_path / "t.csv")]) == 0
    kept = [(row["run_id"], row["epoch"], row["mine"]) for row in rows_of(output)]
    assert kept == [("a", "1", "NA"), ("a", "2", "NA")]


def test_every_row_of_a_table_has_its_epochs_or_a_sentence(write_run, tmp_path, capsys):
    """Also a run whose row was later written to another table, too, which alone its folder names."""
    write_run("a", 2, flags={"results": "other.csv"})
    write_run("b", 1)
    write_run("c", 3, flags={"results": "other.csv"})
    (tmp_path / "t.csv").write_text("run_id\na\nb\nlost\n")
    assert epochs.main([str(tmp_path / "t.csv")]) == 0
    assert [row["run_id"] + row["epoch"] for row in rows_of(tmp_path / "t_epochs.csv")] == ["a1", "a2", "b1"]
    (note,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert f"has no epochs of lost, whose row is in {tmp_path / 't.csv'}" in note


def test_a_longer_history_takes_the_place_of_a_shorter_one_and_own_columns_stay(write_run, tmp_path, capsys):
    """A run folder that cannot be read is named and left out."""
    table = tmp_path / "t.csv"
    output = tmp_path / "t_epochs.csv"
    for a, b in ((2, 1), (1, 3)):  # a run that began anew has fewer epochs than are kept
        write_run("a", a)
        write_run("b", b)
        write_run("c", 5, flags={"results": "other.csv"})
        for number, content in enumerate(("", "{}", '{"results": "t.csv"}')):
            (tmp_path / "runs" / f"bad{number}").mkdir(exist_ok=True)
            (tmp_path / "runs" / f"bad{number}" / "config.json").write_text(content)
            (tmp_path / "runs" / f"bad{number}" / "epochs.csv").write_text("epoch\n1\n")
        assert epochs.main([str(table)]) == 0
        message = capsys.readouterr().err
        assert all(f"bad{number} cannot be read and is left out" in message for number in range(3))
        pd.read_csv(output, dtype=str).assign(my_note="mine").to_csv(output, index=False)
    with pytest.raises(
        ValueError, match=r"holds no run of train_cifar100\.py that writes to t\.csv"
    ):  # though the file has rows
        epochs.main([str(table), "--runs", str(tmp_path / "absent")])
    rows = rows_of(output)
    assert [row["run_id"] + row["epoch"] for row in rows] == ["a1", "a2", "b1", "b2", "b3"]
    assert {row["precision"] for row in rows} == {"bf16"}
    assert {row["my_note"] for row in rows} == {"mine"}


def test_the_report_says_what_was_reached_after_how_many_epochs_and_what_crossed_what(write_run, tmp_path, capsys):
    """Softmax stays at 50 %; the network rises by half a point an epoch and passes it in top-1, not in top-5."""
    write_run("a", 60, flags=TABLE1)
    rising = {"test_top1": lambda epoch: 0.3 + 0.005 * epoch, "test_top5": lambda epoch: 0.4}
    rising["valid_top1"] = lambda epoch: 0.6 if epoch == 47 else 0.5
    write_run("b", 55, flags=TABLE1, method="splitter_selection", **rising)
    for seed, end in ((1, 52), (2, 53)):
        write_run(f"c{seed}", end, flags=TABLE1, seed=seed)
        rising["test_top1"] = lambda epoch, seed=seed: 0.3 + 0.01 * seed + 0.005 * epoch
        write_run(f"d{seed}", 55, flags=TABLE1, method="splitter_selection", seed=seed, **rising)
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


def test_settings_of_one_method_are_lines_of_their_own(write_run, tmp_path, capsys):
    """Two P_K of a method are no seeds of one another; runs of another precision are not compared."""
    for seed in (0, 1):
        write_run(f"softmax{seed}", 25, seed=seed)
        for name, p_k, top1 in (("one", [1.0], 0.4), ("half", [0.5, 0.5], 0.6)):
            how = {"flags": {"p_k": p_k}, "test_top1": lambda epoch, top1=top1: top1}
            write_run(f"{name}{seed}", 25, method="splitter_selection", seed=seed, **how)
    write_run("other", 25, method="softsort", flags={"precision": "fp32"})
    assert epochs.main([str(tmp_path / "t.csv")]) == 0
    assert report.main([str(tmp_path / "t_epochs.csv")]) == 0
    reached, gains = capsys.readouterr().out.split("Difference to cross-entropy")
    p_ks = [line.split("|")[2].strip() for line in reached.splitlines() if "splitter" in line]
    assert p_ks == ["[0.5, 0.5]", "[0.5, 0.5]", "[1]", "[1]"]
    gains = [[cell.strip() for cell in line.split("|")[1:6]] for line in gains.splitlines() if line[:3] == "| s"]
    shown = [("[0.5, 0.5]", "+10.00 ± 0.00"), ("[1]", "−10.00 ± 0.00")]
    assert gains == [["splitter_selection", p_k, "25", "2", gain] for p_k, gain in shown]


@pytest.mark.parametrize("order", [[2, 1, 0], [0, 2, 1], [0, 2], [1, 2]])
def test_epochs_that_are_not_each_in_its_turn_get_a_sentence(order, write_run, tmp_path):
    """A mean over the last ones would be one of others."""
    write_run("a", 3, flags=TABLE1)
    epochs.main([str(tmp_path / "table1.csv")])
    path = tmp_path / "table1_epochs.csv"
    header, *lines = path.read_text().splitlines()
    path.write_text("\n".join([header, *[lines[place] for place in order]]) + "\n")
    with pytest.raises(ValueError, match=r"the epochs of a are not 1, 2, 3, .*; gather them again"):
        report.main([str(path)])


def test_a_repetition_of_as_many_epochs_takes_the_place_of_the_former_run_and_says_so(write_run, tmp_path, capsys):
    write_run("a", 3, flags=TABLE1)
    write_run("b", 3, flags=TABLE1)
    for accuracy in (0.25, 0.25, 0.75):
        write_run("a", 3, flags=TABLE1, test_top1=lambda _, accuracy=accuracy: accuracy)
        epochs.main([str(tmp_path / "table1.csv")])
    messages = capsys.readouterr().err.splitlines()
    assert len(messages) == 1
    assert messages[0].startswith("note: a has other epochs in ")
    found = {row["run_id"]: row["test_top1"] for row in rows_of(tmp_path / "table1_epochs.csv")}
    assert found == {"a": "0.75", "b": "0.5"}


@pytest.mark.parametrize("count", [1, 4, 5])
def test_a_mean_of_more_epochs_than_there_are_is_an_empty_cell(count, write_run, tmp_path, capsys):
    """The other columns, at the best validation epoch so far, have their values."""
    for run_id, method in (("a", SOFTMAX), ("b", "splitter_selection")):
        write_run(run_id, count, flags=TABLE1, method=method)
    assert epochs.main([str(tmp_path / "table1.csv")]) == 0
    capsys.readouterr()
    assert report.main([str(tmp_path / "table1_epochs.csv")]) == 0
    text = capsys.readouterr().out
    assert "nan" not in text
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in text.splitlines() if line[:3] == "| s"]
    means = ["50.00"] * 2 if count >= 5 else [""] * 2
    assert [row[3:7] for row in rows[:2]] == [[*means, "50.00", "50.00"]] * 2
