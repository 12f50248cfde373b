"""Status: what rows, run folders and logs say of each command, whoever started it, and the time left."""

import fcntl
import json
import multiprocessing

import pytest

from data import embeddings
from experiments.common.paths import REPOSITORY
from experiments.common.rows import read_rows, write_rows
from experiments.common.settings import cell
from reporting import status
from reporting.status import Progress, Status, status_text, time_left
from studies import runs
from studies.catalog import LISTED, STUDIES
from studies.paper import TABLE1_SHORT, table1
from studies.runs import RunIndex, Study, expected_runs
from tests.experiments import scripts

COMMANDS = TABLE1_SHORT.commands()
ROWS = read_rows(REPOSITORY / "table1_short.csv")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "logs").mkdir()
    return tmp_path


@pytest.fixture
def state(folder):
    """The states of commands."""

    def call(*commands: str) -> list[str]:
        found = Status(folder / "table1_short.csv", folder / "logs")
        return [found.progress(command).state for command in commands]

    return call


def begin(folder, row: dict[str, str], epochs: int, results: str = "table1_short.csv") -> None:
    """Leave the folder of a run that has saved so many epochs."""
    run = folder / "runs" / row["run_id"]
    run.mkdir()
    settings = {name: row[name] for name in row if not name.startswith(("test_", "valid_", "last_"))}
    (run / "config.json").write_text(json.dumps(settings | {"results": results}))
    lines = ["epoch,train_seconds,eval_seconds", *(f"{epoch},2.0,1.0" for epoch in range(1, epochs + 1))]
    (run / "epochs.csv").write_text("\n".join(lines) + "\n")
    (run / "run.lock").touch()


def hold(path, ready, release) -> None:
    with open(path) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ready.set()
        release.wait(60)


@pytest.fixture
def held():
    """Hold a lock from another process until the test ends."""
    context = multiprocessing.get_context("spawn")
    release = context.Event()
    processes = []

    def call(path) -> None:
        ready = context.Event()
        process = context.Process(target=hold, args=(path, ready, release))
        process.start()
        processes.append(process)
        assert ready.wait(60)

    yield call
    release.set()
    for process in processes:
        process.join()


def studies_of_embeddings(path) -> list[Study]:
    """Each study without trials that reads embeddings, of this file where it takes one."""
    found = []
    for name, entry in STUDIES.items():
        if entry.has_trials or name.startswith("tiny_imagenet"):
            continue
        study = entry.make(*[str(path)] * len(entry.data))
        if isinstance(study, Study) and "data_path" in expected_runs(study.commands()[0])[0]:
            found.append(study)
    return found


@pytest.mark.parametrize("is_there", [True, False])
def test_a_command_is_done_by_rows_of_its_own_embeddings_alone(folder, is_there, monkeypatch):
    """By their content where its file is there, whatever its name was; by the name of a file that is not there."""
    path = folder / "own.pt"
    opened = []
    if is_there:
        scripts.embeddings(path)
        load = embeddings.load_embeddings
        monkeypatch.setattr(embeddings, "load_embeddings", lambda file: opened.append(file) or load(file))
    studies = studies_of_embeddings(path)
    assert len(studies) >= 5
    for study in studies:
        command = study.commands()[0]
        expected = expected_runs(command)
        rows = []
        for run in expected:
            row = {name: cell(value) for name, value in run.items() if name != "results"}
            rows.append(row | {"run_id": str(len(rows)), "embeddings": status.embeddings_id(run["data_path"])})
        for change in ({}, {"data_path": "else.pt"}, {"embeddings": "8x6-other"}):
            write_rows(folder / "x.csv", [row | change for row in rows])
            is_content = bool(rows[0]["embeddings"])
            other = "embeddings" if is_content else "data_path"
            expected_number = len(rows) * (other not in change)
            assert Status(folder / "x.csv", folder / "logs").progress(command).done == expected_number, study.name
    assert opened == [path] * is_there


@pytest.mark.parametrize(("data_path", "state"), [("own.pt", "stopped after its start"), ("else.pt", "waiting")])
def test_a_folder_of_other_embeddings_is_no_run_that_stopped(folder, data_path, state):
    command = STUDIES["temperature"].make("own.pt").commands()[0]
    config = {name: cell(value) for name, value in expected_runs(command)[0].items()}
    (folder / "runs" / "one").mkdir()
    config |= {"run_id": "one", "results": "x.csv", "data_path": data_path}
    (folder / "runs" / "one" / "config.json").write_text(json.dumps(config))
    assert Status(folder / "x.csv", folder / "logs").progress(command).state == state


def command_of(row: dict[str, str]) -> str:
    for command in COMMANDS:
        found = Status(REPOSITORY / "table1_short.csv", REPOSITORY / "logs").rows.find(expected_runs(command)[0])
        if found and ROWS[found[0]]["run_id"] == row["run_id"]:
            return command
    raise AssertionError(row["run_id"])


def test_all_runs_of_the_repository_are_done_and_none_of_a_new_clone_is(folder, state):
    assert set(state(*COMMANDS)) == {"waiting"}
    write_rows(folder / "table1_short.csv", ROWS)
    assert set(state(*COMMANDS)) == {"done"}
    assert state(f"{COMMANDS[0]} --n_epochs 5") == ["waiting"]  # another run


def test_a_run_of_another_schedule_in_the_same_file_is_not_done(folder):
    """The published rows of table1.csv have 200 epochs in fp32; the repository's are in bf16."""
    write_rows(folder / "table1.csv", read_rows(REPOSITORY / "table1.csv"))
    found = Status(folder / "table1.csv", folder / "logs")
    command = COMMANDS[0].replace("table1_short", "table1").replace(" --n_epochs 16 --lr_schedule cosine", "")
    command = command.replace("--seed 0", "--seed 2")
    assert found.progress(command).state == "done"
    assert found.progress(command.replace(" --precision bf16", "")).state == "waiting"


def test_a_run_that_holds_its_folder_is_running_whoever_started_it(folder, state, held):
    begin(folder, ROWS[3], epochs=7)
    command = command_of(ROWS[3])
    assert state(command) == ["stopped after epoch 7"]
    held(folder / "runs" / ROWS[3]["run_id"] / "run.lock")
    assert state(command) == ["running: epoch 7"]


def test_a_run_of_another_results_file_does_not_count(folder, state):
    begin(folder, ROWS[3], epochs=7, results="another.csv")
    assert state(command_of(ROWS[3])) == ["waiting"]


@pytest.mark.parametrize("name", ["07-a_name.log", "slurm-7.log"])
def test_a_log_that_ends_with_a_status_says_that_its_command_failed(folder, state, name):
    begin(folder, ROWS[3], epochs=7)
    command = command_of(ROWS[3])
    log = folder / "logs" / name
    printed = "$ a line that the command printed"
    started = f"=== 2026-01-01T00:00:00Z attempt 1 of 2\n$ {command}\n"
    log.write_text(f"{started}{printed}\nerror: the disk is full\n=== exit status 2\n")
    assert state(command, COMMANDS[-1]) == ["failed (exit status 2)", "waiting"]
    log.write_text(log.read_text() + started)
    assert state(command) == ["stopped after epoch 7"]  # its launcher was killed, and nobody goes on
    write_rows(folder / "table1_short.csv", [ROWS[3]])
    assert state(command) == ["done"]


def test_a_folder_that_cannot_be_read_is_left_out(folder, state):
    begin(folder, ROWS[3], epochs=7)
    (folder / "runs" / ROWS[3]["run_id"] / "config.json").write_text("{")
    assert state(command_of(ROWS[3])) == ["waiting"]


def test_the_time_left_is_the_repositorys_times_this_machines_pace(folder):
    """Half as fast: one of two runs done, the other half done."""
    first = dict(ROWS[3])
    first |= {name: str(2 * float(first[name])) for name in ("train_seconds", "eval_seconds")}
    write_rows(folder / "table1_short.csv", [first])
    found = Status(folder / "table1_short.csv", folder / "logs")
    item = found.progress(command_of(ROWS[3]))
    same = [row for row in ROWS if (row["method"], row["p_k"]) == (first["method"], first["p_k"])]
    same = [status.seconds_of(row) for row in same if row["device_name"] == found.device]
    assert item.expected == item.expected_done == pytest.approx(sum(same) / len(same))
    assert item.seconds == pytest.approx(2 * status.seconds_of(ROWS[3]))
    running = Progress(total=1, state="running: epoch 8", expected=600.0, expected_done=300.0, seconds=600.0)
    waiting = Progress(total=1, expected=600.0)
    assert time_left([running, waiting], "a CPU") == "about 30 min left, 1 at a time, at 2 times the seconds of a CPU"
    assert time_left([Progress(total=1)], "a CPU").startswith("the repository has no rows")
    assert "all would take about 20 min" in time_left([waiting, waiting], "a CPU")


def test_a_run_that_is_twice_as_long_takes_twice_the_seconds(folder):
    found = Status(folder / "table1_short.csv", folder / "logs")
    command = command_of(ROWS[3])
    as_recorded, twice = (found.progress(f"{command} --lr .5 --n_epochs {epochs}").expected for epochs in (16, 32))
    assert 0 < 2 * as_recorded == pytest.approx(twice)


def test_the_time_left_of_a_study_that_the_repository_lacks_is_by_the_runs_that_are_done(folder):
    """One of two runs, which took 100 seconds, with twice as many epochs."""
    command = command_of(ROWS[3])
    row = ROWS[3] | {"train_seconds": "90", "eval_seconds": "10", "n_epochs": "32"}
    write_rows(folder / "mine.csv", [row])
    done = f"{command.replace('--n_epochs 16', '--n_epochs 32')}"
    found = Status(folder / "mine.csv", folder / "logs")
    items = [found.progress(done), found.progress(f"{command} --lr .5")]
    assert [item.state for item in items] == ["done", "waiting"]
    assert items[1].expected == pytest.approx(50)
    assert time_left(items, found.device) == f"about 1 min left, 1 at a time, at 1 times the seconds of {found.device}"


def time_of_all(folder, name: str, commands: list[str]) -> str:
    """What the last line says of the time of all runs, before one is done."""
    found = Status(folder / f"{name}.csv", folder / "logs")
    return status_text(commands, commands, name, found).rpartition("; ")[2]


@pytest.mark.parametrize("study", [study for study in LISTED if isinstance(study, Study)], ids=lambda study: study.name)
def test_the_time_of_all_says_how_many_runs_were_measured(folder, study):
    """On one machine, with the settings of the run and any seed; the others take the mean."""
    (results,) = study.files
    stem = results.removeprefix("results/").removesuffix(".csv")
    rows = read_rows(REPOSITORY / f"{stem}.csv")
    text = time_of_all(folder, stem, study.commands())
    if not rows:
        assert text == "the repository has no rows of this study: the time left is known when a run is done"
        return
    devices = [row["device_name"] for row in rows]
    device = max(set(devices), key=devices.count)
    index = RunIndex([row for row in rows if row["device_name"] == device])
    count = 0
    for command in study.commands():
        for run in expected_runs(command):
            del run["seed"]
            count += bool(index.find(run))
    total = len(study.commands())
    expected = "every run has rows with its settings there"
    if count < total:
        others = "the others take the mean of all rows for as many epochs"
        expected = f"{count} of {total} runs have rows with their settings there, {others}"
    assert text.startswith(f"on {device} all would take about ")
    assert text.endswith(f"({expected})")


def test_of_the_published_runs_of_table_1_none_was_measured(folder):
    """The repository's two rows are in bf16."""
    assert "(0 of 20 runs have rows" in time_of_all(folder, "table1", table1().commands())


def test_a_pass_of_several_losses_counts_its_seconds_once(folder):
    rows = read_rows(REPOSITORY / "heads_more.csv")
    seeds = [row for row in rows if row["method"] == "lapsum"]
    losses = sorted({runs.command_of(row).partition(" --lr")[0].partition("imagenet.py ")[2] for row in seeds})
    first, second = (f"--method {loss.partition('--method ')[2]}" for loss in losses)
    flags = (
        f"--lr {seeds[0]['lr']} --weight_decay {seeds[0]['weight_decay']} --n_epochs 22 --seeds 1 2 --eval_freq 100000"
    )
    data = f"--results x.csv -d {seeds[0]['data_path']}"
    command = f"{runs.PYTHON} {runs.IMAGENET} {first} --also '{second}' {flags} {data}"
    write_rows(folder / "heads_more.csv", seeds)
    item = Status(folder / "heads_more.csv", folder / "logs").progress(command)
    passes = [max(status.seconds_of(row) for row in seeds if row["seed"] == seed) for seed in ("1", "2")]
    assert (item.done, item.total, item.state) == (4, 4, "done")
    assert item.seconds == pytest.approx(sum(passes))


def test_the_last_line_counts_commands_and_runs_apart(folder):
    write_rows(folder / "table1_short.csv", ROWS[:4])
    found = Status(folder / "table1_short.csv", folder / "logs")
    text = status_text(COMMANDS, [str(number) for number in range(30)], "table1_short", found)
    assert text.splitlines()[-1].startswith(
        "# table1_short: 4 of 30 runs done; commands: 0 running, 0 failed, 26 waiting"
    )
