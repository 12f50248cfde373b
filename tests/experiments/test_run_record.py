"""A results file has one whole row per configuration, whoever writes or dies at the same time."""

import os
import random
import threading
import time
from pathlib import Path

import pytest
from data.program import ProgramError
from experiments.run_record import main
from experiments.shared.run_record import COLUMNS, find_row, read_rows, run_id, write_row

from tests.experiments.runs import check_refused
from tests.processes import SERVER


def row(name: str, **others) -> dict:
    return {"run_id": name, "method": "neuralsort", "p_k": [0.2] * 5, "m": None, "test_top1": 0.5, **others}


def add_rows(path: Path, writer: int, count: int) -> None:
    for index in range(count):
        write_row(path, row(f"{writer}-{index}", seed=index))


def test_a_row_comes_back_as_text(tmp_path):
    path = tmp_path / "deep" / "results.csv"
    write_row(path, row("a", compile=True, lr=0.1, path=Path("x") / "y", note='comma, "quote"\nand line'))
    assert read_rows(path) == [
        {
            **{"run_id": "a", "method": "neuralsort", "p_k": "0.2 0.2 0.2 0.2 0.2", "m": "", "test_top1": "0.5"},
            **{"compile": "true", "lr": "0.1", "path": "x/y", "note": 'comma, "quote"\nand line'},
        }
    ]
    assert find_row(path, "a")["lr"] == "0.1"
    assert find_row(path, "b") is None


def test_an_absent_and_an_empty_file_have_no_rows_and_foreign_line_ends_are_read(tmp_path):
    assert read_rows(tmp_path / "absent.csv") == []
    (tmp_path / "empty.csv").touch()
    assert read_rows(tmp_path / "empty.csv") == []
    write_row(tmp_path / "empty.csv", row("a"))
    assert len(read_rows(tmp_path / "empty.csv")) == 1
    (tmp_path / "foreign.csv").write_bytes(b"\xef\xbb\xbfrun_id,a\r\nx,1\r\n")
    assert read_rows(tmp_path / "foreign.csv") == [{"run_id": "x", "a": "1"}]


def test_a_second_row_takes_the_place_of_the_first_and_columns_are_merged(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    link, target = tmp_path / "results.csv", tmp_path / "elsewhere" / "results.csv"
    link.symlink_to(target)
    for each in ({"run_id": "a", "old": 0}, {"run_id": "b", "shared": 3, "new": 4}, {"run_id": "a", "shared": 2}):
        write_row(link, each)
    assert target.read_text() == "run_id,old,shared,new\nb,,3,4\na,,2,\n"
    assert link.is_symlink()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a,b\n1,2\n", "not a results file"),
        (b"run_id,a,a\nx,1,2\n", "each column once"),
        (b"run_id,a\nx,1,2\n", "line 2 .* 3 cells under 2 columns"),
        (b"run_id,a\nx\ny,1\n", "line 2 .* 1 cells"),
        (b"\xff\xfe\x00", "cannot read"),
        (b'run_id,a\nx,"1\ny,2\n', "line 2 .* unexpected end of data"),
        (b'run_id,a\nx,"1"2\ny,2\n', "line 2 .* expected after"),
        (b'run_id,"a\nx,1\n', "line 1 .* unexpected end of data"),
    ],
)
def test_an_unusable_file_is_refused_and_left_alone(tmp_path, content, message):
    path = tmp_path / "results.csv"
    path.write_bytes(content)
    for use in (read_rows, lambda path: write_row(path, row("a"))):
        with pytest.raises(ProgramError, match=message):
            use(path)
    assert path.read_bytes() == content


def test_a_last_line_cut_anywhere_does_not_stop_others(tmp_path, capsys):
    path = tmp_path / "results.csv"
    write_row(path, row("a"))
    whole = path.read_bytes()
    path.write_bytes(whole + b'b,"2, 3')
    assert [each["run_id"] for each in read_rows(path)] == ["a"]
    assert 'cut short and left out: b,"2, 3' in capsys.readouterr().err
    path.write_bytes(whole)
    write_row(path, row("b"))
    complete = path.read_bytes()
    last_cell = complete.rindex(b",")
    for length in range(len(whole) + 1, last_cell):
        path.write_bytes(complete[:length])
        assert find_row(path, "b") is None
        write_row(path, row("c"))
        assert [each["run_id"] for each in read_rows(path)] == ["a", "c"]
        assert "cut short" in capsys.readouterr().err


def test_what_was_recorded_can_be_read_however_long(tmp_path):
    write_row(tmp_path / "r.csv", row("a", note="x" * 200_000))
    write_row(tmp_path / "r.csv", row("b"))
    assert len(find_row(tmp_path / "r.csv", "a")["note"]) == 200_000


def test_a_results_file_that_is_none_is_refused(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for use in (read_rows, lambda path: find_row(path, "a")):
        with pytest.raises(ProgramError, match="must be a file, and is a device, a FIFO or a socket"):
            use(tmp_path / "fifo")


def test_writers_at_the_same_time_lose_nothing(tmp_path):
    path = tmp_path / "results.csv"
    writers = [SERVER.Process(target=add_rows, args=(path, writer, 12)) for writer in range(4)]
    for writer in writers:
        writer.start()
    stop = threading.Event()
    seen = []

    def read():
        while not stop.is_set():
            seen.append(len(read_rows(path)))

    reader = threading.Thread(target=read)
    reader.start()
    for writer in writers:
        writer.join()
    stop.set()
    reader.join()
    assert {writer.exitcode for writer in writers} == {0}
    assert sorted(each["run_id"] for each in read_rows(path)) == sorted(f"{w}-{i}" for w in range(4) for i in range(12))
    assert seen == sorted(seen)  # a reader without a lock never misses rows that were there


def test_a_killed_writer_leaves_whole_rows(tmp_path):
    path = tmp_path / "results.csv"
    for writer in range(3):
        process = SERVER.Process(target=add_rows, args=(path, writer, 100_000))
        process.start()
        while not (path.exists() and any(each["run_id"].startswith(f"{writer}-") for each in read_rows(path))):
            time.sleep(0.01)
        time.sleep(random.Random(writer).uniform(0, 0.1))
        process.kill()
        process.join()
        names = [each["run_id"] for each in read_rows(path)]
        assert len(set(names)) == len(names)
    write_row(path, row("after"))  # the lock of the dead is free
    assert find_row(path, "after")
    assert not list(tmp_path.glob("*.tmp"))


IDENTITY = {"method": "softsort", "p_k": [0.5, 0.5], "m": None, "seed": 0}


def test_a_run_id_reads_well_and_tells_settings_apart():
    readable = "{method}-pk_{p_k}-m{m}-seed{seed}"
    name = run_id(IDENTITY, readable)
    assert name.startswith("softsort-pk_0.5_0.5-m-seed0-")
    assert run_id(dict(reversed(IDENTITY.items())), readable) == name
    assert run_id({**IDENTITY, "added_later": None}, readable) == name
    others = [{"m": 5}, {"seed": 1}, {"p_k": [0.5, 0.25]}, {"added_later": 1}]
    assert len({name, *(run_id({**IDENTITY, **other}, readable) for other in others)}) == 5
    assert run_id({"data": "../a b/ü"}, "{data}").startswith(".._a_b__-")


@pytest.fixture
def results(tmp_path):
    path = tmp_path / "results.csv"
    for name, method, top1 in (("a", "neuralsort", 0.5), ("b", "softsort", 0.123456789), ("c", "neuralsort", 0.75)):
        write_row(path, row(name, method=method, test_top1=top1))
    return path


def test_show_filters_sorts_and_shortens(results, capsys):
    assert main(["show", str(results), "--where", "method=neuralsort", "--sort", "test_top1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [
        ["method", "p_k", "test_top1"],
        ["neuralsort", *["0.2"] * 5, "0.75"],
        ["neuralsort", *["0.2"] * 5, "0.5"],
        ["(2", "rows)"],
    ]
    assert main(["show", str(results), "--sort", "method", "--columns", "run_id", "test_top1"]) == 0
    assert capsys.readouterr().out.splitlines()[-2].split() == ["b", "0.1235"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--where", "methd=neuralsort"], "has no 'methd'; did you mean method"),
        (["--where", "neuralsort"], "COLUMN=VALUE"),
        (["--sort", "top1"], "test_top1"),
        (["--columns", "nothing"], "unknown column 'nothing'"),
    ],
)
def test_show_answers_mistakes_with_a_sentence(results, capsys, arguments, message):
    check_refused(main, ["show", str(results), *arguments], message, capsys)


def test_show_says_that_there_is_no_file_and_columns_what_each_means(tmp_path, capsys):
    check_refused(main, ["show", str(tmp_path / "absent.csv")], "there is no file", capsys)
    assert main(["columns"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed and meaning in printed for name, meaning in COLUMNS.items())
