"""Rows get into the repository's files only if their names, commits and cells are right, all of a file or none."""

import re
import shutil
import subprocess

import pytest
from filelock import FileLock, Timeout

from experiments.common.paths import REPOSITORY, ROOT
from experiments.common.rows import read_rows, write_rows
from reporting.frames import read_runs
from scripts import add_results

FILES = sorted(path.name for path in REPOSITORY.glob("*.csv") if not path.stem.endswith("_epochs"))
HEAD = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
ABSENT = "0" * 40


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A repository folder with some rows of table1_short.csv, and a file of one's own with others; return both."""
    repository = tmp_path / "results" / "repository"
    repository.mkdir(parents=True)
    monkeypatch.setattr(add_results, "REPOSITORY", repository)
    rows = [row | {"git_commit": HEAD} for row in read_rows(REPOSITORY / "table1_short.csv")]
    write_rows(repository / "table1_short.csv", rows[:10])
    own = tmp_path / "results" / "table1_short.csv"
    write_rows(own, rows[5:15])
    return own, repository / "table1_short.csv"


def test_new_rows_are_added_once(place, capsys):
    own, target = place
    before = target.read_bytes()
    assert add_results.main([str(own), "--dry-run"]) == 0
    assert capsys.readouterr().out == f"5 rows could be added to {target}, 10 were there\n"
    assert target.read_bytes() == before
    assert add_results.main([str(own)]) == 0
    assert len(read_rows(target)) == 15
    assert add_results.main([str(own)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("0 rows added")
    assert len(read_rows(target)) == 15


SCORES = [name for name in read_rows(REPOSITORY / "table1_short.csv")[0] if re.match(r"(test|last)_.*(top|loss)", name)]
WITHOUT_SCORES = dict.fromkeys(SCORES, "")


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"method": "focal_1"}, "its method focal_1 is none of this repository's"),
        ({"lr": "0.002"}, "its name is not what its settings give"),
        ({"p_k": "0 0 0 1 0"}, "its name is not what its settings give"),
        ({"finished_utc": ""}, "it has not finished"),
        (WITHOUT_SCORES, "it has not finished"),
        ({"nloglr": "9"}, "its nloglr and its lr are two learning rates"),
        ({"git_commit": ""}, "it names no commit"),
        ({"git_commit": f"{HEAD}-dirty"}, "files differed from its commit"),
        ({"git_commit": f"{HEAD}+{ABSENT}"}, f"its commit {HEAD}+{ABSENT} is not in the history"),
        ({"git_commit": "HEAD"}, "its commit HEAD is not in the history, or not written with 40 digits"),
        ({"git_commit": HEAD[:12]}, f"its commit {HEAD[:12]} is not in the history, or not written with 40"),
        ({"git_commit": f"{HEAD}+"}, f"its commit {HEAD}+ is not in the history, or not written with 40"),
        ({"finished_utc": "x"}, "its started_utc or its finished_utc is no time that a run writes"),
        ({"started_utc": "29/11/2026 01:03"}, "its started_utc or its finished_utc is no time that a run writes"),
        ({"test_images": "0"}, "its num_classes, or its number of images or words, is not that of its data"),
        ({"train_images": "many"}, "its num_classes, or its number of images or words, is not that of its data"),
        ({"num_classes": "1000"}, "its num_classes, or its number of images or words, is not that of its data"),
    ],
)
def test_one_wrong_row_and_nothing_is_written(place, capsys, cells, reason):
    own, target = place
    rows = read_rows(own)
    write_rows(own, [*rows[:-1], rows[-1] | cells])
    before = target.read_bytes()
    with pytest.raises(ValueError, match="1 of 5 rows are refused, and nothing is written"):
        add_results.main([str(own)])
    assert capsys.readouterr().out.startswith(f"refused: {rows[-1]['run_id']}: {reason}")
    assert target.read_bytes() == before


@pytest.mark.parametrize("column", ["test_top1", "valid_top5"])
@pytest.mark.parametrize("cell", ["1.5", "95.5", "-0.1", "abc", "nan", "inf", ""])
def test_an_accuracy_that_the_report_would_refuse_is_not_added(place, column, cell):
    own, target = place
    before = target.read_bytes()
    rows = read_rows(own)
    write_rows(own, [*rows[:-1], rows[-1] | {column: cell}])
    for flags in ([], ["--dry-run"]):
        with pytest.raises(ValueError, match=rf"{column}"):
            add_results.main([str(own), *flags])
    assert target.read_bytes() == before
    with pytest.raises(ValueError, match=rf"{column}"):
        read_runs(own)


@pytest.mark.parametrize("number", [0, -1], ids=["committed", "new"])
def test_a_row_under_another_name_of_the_same_hash_is_no_new_row(place, capsys, number):
    own, target = place
    before = target.read_bytes()
    rows = read_rows(own)
    write_rows(own, [*rows, rows[number] | {"run_id": f"zz-{add_results.digest_of(rows[number]['run_id'])}"}])
    with pytest.raises(ValueError, match="1 of 6 rows"):
        add_results.main([str(own)])
    assert "has a row of that name with other cells" in capsys.readouterr().out
    assert target.read_bytes() == before


@pytest.mark.parametrize("file", ["knn.csv", "beam_search.csv", "heads.csv", "noise/human.csv"])
def test_rows_of_every_script_are_added_to_those_that_are_there(tmp_path, monkeypatch, file):
    repository = tmp_path / "results" / "repository"
    monkeypatch.setattr(add_results, "REPOSITORY", repository)
    rows = [row | {"git_commit": HEAD} for row in read_rows(REPOSITORY / file)]
    for path, some in ((repository / file, rows[:-3]), (tmp_path / "results" / file, rows)):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_rows(path, some)
    add_results.main([str(tmp_path / "results" / file)])
    assert read_rows(repository / file) == rows


def test_a_name_that_the_repository_has_with_other_cells_is_refused(place, capsys):
    own, _ = place
    rows = read_rows(own)
    write_rows(own, [rows[0] | {"test_top1": "0.99"}, *rows[1:]])
    with pytest.raises(ValueError, match="1 of 6 rows"):
        add_results.main([str(own)])
    assert "has a row of that name with other cells" in capsys.readouterr().out


def test_a_line_that_stands_twice_in_a_file_is_added_once(place):
    own, target = place
    rows = read_rows(own)
    write_rows(own, [*rows, *rows])
    add_results.main([str(own)])
    assert len(read_rows(target)) == len(read_runs(target)) == 15


def test_two_lines_of_one_name_with_different_cells_are_refused(place, capsys):
    own, target = place
    before = target.read_bytes()
    rows = read_rows(own)
    write_rows(own, [*rows, rows[-1] | {"test_top1": "0.99"}])
    with pytest.raises(ValueError, match="1 of 6 rows"):
        add_results.main([str(own)])
    assert "has a row of that name with other cells" in capsys.readouterr().out
    assert target.read_bytes() == before


def test_no_other_call_and_no_run_adds_rows_from_the_reading_to_the_writing(place, monkeypatch):
    own, target = place
    held = []

    def while_locked(function):
        def call(path, *rows):
            if path == target:
                with pytest.raises(Timeout):  # the lock of Run.record, too
                    FileLock(f"{target}.lock").acquire(timeout=0)
                held.append(function.__name__)
            return function(path, *rows)

        return call

    for function in (read_rows, write_rows):
        monkeypatch.setattr(add_results, function.__name__, while_locked(function))
    add_results.main([str(own)])
    assert held == ["read_rows", "write_rows"]


@pytest.mark.parametrize("file", FILES)
def test_every_committed_row_has_its_name(file):
    for row in read_rows(REPOSITORY / file):
        assert add_results.has_its_name(row), row["run_id"]


def test_commits_are_those_of_the_history():
    assert add_results.is_in_history(HEAD)
    assert add_results.is_in_history(f"{HEAD}+{HEAD}")
    assert not add_results.is_in_history(ABSENT)
    assert not add_results.is_in_history(f"{HEAD}+{ABSENT}")


def test_a_file_of_another_clone_goes_where_its_place_in_results_is(tmp_path):
    for given, target in (
        ("clone/results/table1.csv", "table1.csv"),
        ("clone/results/noise/human.csv", "noise/human.csv"),
        ("clone/results/repository/table1.csv", "table1.csv"),
        ("elsewhere/table1.csv", "table1.csv"),
    ):
        assert add_results.target_of(tmp_path / given) == REPOSITORY / target


def test_files_that_hold_the_repositorys_rows_or_none_are_refused(tmp_path):
    with pytest.raises(ValueError, match="holds the repository's rows already"):
        add_results.main([str(REPOSITORY / "table1.csv")])
    with pytest.raises(FileNotFoundError, match="there is no file"):
        add_results.main([str(tmp_path / "none.csv")])
    shutil.copy(ROOT / "results" / "paper" / "table1.csv", tmp_path / "table1.csv")
    with pytest.raises(ValueError, match="no column run_id"):
        add_results.main([str(tmp_path / "table1.csv")])
