"""The tables of the arms: differences within a seed, their interval, what is refused; the figure from a checkpoint."""

import math
import re
from pathlib import Path

import pandas as pd
import pytest

from experiments import train_beam_search
from scripts import report

ROOT = Path(__file__).parents[2]
SETTING = {
    **{"dataset": "reversal", "max_letters": "3", "hidden_dim": "8", "batch_size": "16", "beam_size": "3"},
    **{"pretrain_updates": "6", "n_updates": "4", "train_words": "100", "test_words": "50"},
}
CONTROL = {"arm": "cross_entropy", "method": "softmax_cross_entropy", "inverse_temperature": ""}
RETAIN = {"arm": "retain", "method": "softsort", "inverse_temperature": "0.5"}


def row(arm: dict[str, str], seed: int, wer: float) -> dict[str, str]:
    measured = {"test_wer_beam4": str(wer), "test_forced_accuracy": "1.0 0.9", "test_free_accuracy": "1.0 0.5"}
    return {**SETTING, **arm, "seed": str(seed), **measured}


def reported(path: Path, *flags: str, capsys) -> str:
    assert report.main([str(path), *flags]) == 0
    return capsys.readouterr().out


def lines_of(text: str, begin: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines() if begin in line]


def test_differences_are_taken_within_a_seed(write, capsys):
    """Differences .01 .03 and, of a seed that the control lacks, none: mean 2 points, t(.975, 1) x std / sqrt 2."""
    rows = [row(CONTROL, 0, 0.3), row(RETAIN, 1, 0.53), row(CONTROL, 1, 0.5), row(RETAIN, 0, 0.31), row(RETAIN, 7, 0.9)]
    text = reported(write(*rows), capsys=capsys)
    rates, differences, positions = lines_of(text, "| retain, softsort, β 0.5 ")
    assert rates[1:] == ["58.00 ± 29.82", "3"]
    half = 12.7062 * math.sqrt(2) / math.sqrt(2)
    assert differences[1:] == [f"+2.00 ± {half:.2f}", "2"]
    assert positions[1:] == ["100.0 / 100.0", "90.0 / 50.0"]
    assert lines_of(text, "| cross-entropy ")[0][1:] == ["40.00 ± 14.14", "2"]


def test_one_seed_has_no_difference(write, capsys):
    text = reported(write(row(CONTROL, 0, 0.3), row(RETAIN, 0, 0.2)), capsys=capsys)
    assert "No difference: no arm has two seeds that the control has too." in text


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([row(CONTROL, 0, 0.3), {**row(RETAIN, 0, 0.3), "n_updates": "5"}], "mixes n_updates 4 and 5"),
        ([row(RETAIN, 0, 0.3), row(RETAIN, 0, 0.2)], "rows of one arm and seed that differ"),
        ([{"arm": "retain"}], "r.csv has no column method; this report needs one"),
        ([row(CONTROL, 0, 0.3), {**row(RETAIN, 0, 0.3), "test_free_accuracy": "1.0"}], "another number of positions"),
    ],
)
def test_what_is_not_one_study_is_refused(write, capsys, rows, sentence):
    assert report.main([str(write(*rows))]) == 2
    assert sentence in capsys.readouterr().err


HOSTILE = [
    ("beam_search.csv", [], 5),
    ("temperature.csv", ["--temperatures"], 300),
    ("table1_short.csv", [], 15),
    ("table1_epochs.csv", [], 60),
    ("knn.csv", [], 6),
]


@pytest.mark.parametrize(("name", "flags", "step"), HOSTILE, ids=[name for name, *_ in HOSTILE])
def test_a_file_that_a_person_edited_gets_a_report_or_a_sentence(name, flags, step, tmp_path, capsys):
    """Each column absent, and each with a senseless cell: no answer that was not foreseen."""
    rows = pd.read_csv(ROOT / "results" / name, dtype=str, keep_default_na=False)[::step].to_dict("records")
    for column in rows[0]:
        absent = [{key: cell for key, cell in row.items() if key != column} for row in rows]
        cells = [[*rows[:-1], {**rows[-1], column: cell}] for cell in ("", "x", "nan", "-1", "1 2")]
        for edited in (absent, *cells):
            pd.DataFrame(edited).to_csv(tmp_path / name, index=False)
            status = report.main([str(tmp_path / name), *flags])
            printed, said = capsys.readouterr()
            assert (status == 0) == bool(printed), said
            assert "not foreseen" not in said


def test_the_documentation_shows_the_files_that_there_are():
    marks = re.findall(r"\[beam_search\]\(../results/(.*).csv\)", (ROOT / "docs" / "beam_search.md").read_text())
    assert marks == sorted(path.stem for path in (ROOT / "results").glob("beam_search*.csv"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    results = tmp_path_factory.mktemp("trained") / "results.csv"
    toy = "--dataset reversal --max_letters 3 --hidden_dim 8 --batch_size 16 --beam_size 3 --pretrain_updates 1"
    for flags in ("--arm cross_entropy --method softmax_cross_entropy", "--arm soft_beam --method softsort"):
        words = [*flags.split(), *toy.split(), "--n_updates", "1", "--device", "cpu", "--results", str(results)]
        assert train_beam_search.main(words) == 0
    return results


def test_the_script_reads_what_was_trained_and_draws_it(trained, capsys):
    assert report.main([str(trained), "--figures", str(trained.parent / "figures")]) == 0
    captured = capsys.readouterr()
    assert "| soft beam, softsort, β 1 |" in captured.out
    assert "WER, beam 1" in captured.out
    assert sorted(path.name for path in (trained.parent / "figures").iterdir()) == ["soft_beam.png", "soft_beam.svg"]


def test_without_the_checkpoint_the_figure_is_refused(trained, tmp_path, capsys):
    alone = tmp_path / "r.csv"
    alone.write_text(trained.read_text())
    assert report.main([str(alone), "--figures", str(tmp_path)]) == 2
    assert "the figure needs" in capsys.readouterr().err
