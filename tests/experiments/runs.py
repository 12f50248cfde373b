"""What the tests of the scripts have in common: what a run leaves, runs that are stopped, refusals."""

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from experiments.shared import command_line
from experiments.shared.checkpoint import CURRENT, read_checkpoint
from experiments.shared.metrics import summary
from experiments.shared.ranks import Ranks
from experiments.shared.run_record import COLUMNS, read_rows

# What a clock or the machine's load decides; everything else must come out the same, to the last digit.
TIMES = ("train_seconds", "eval_seconds", "images_per_second", "peak_memory_mib", "started_utc", "finished_utc")


def without(entry: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name not in (*TIMES, *names)}


def history_of(results: Path, row: dict[str, str], file: str = "epochs.csv") -> list[dict[str, str]]:
    with open(results.parent / "runs" / row["run_id"] / file, newline="") as lines:
        return list(csv.DictReader(lines))


def check_history(results: Path, row: dict[str, str], clock: str, file: str) -> list[dict[str, float]]:
    """The history, of which the row is the summary."""
    history = [{name: float(cell) for name, cell in each.items()} for each in history_of(results, row, file)]
    for name, value in summary(history, clock).items():
        assert value is None or float(row[name]) == value
    return history


def outcome(results: Path, by: str = "run_id", file: str = "epochs.csv", apart: Sequence[str] = ()) -> dict[str, tuple]:
    """Of each run its row, history and final weights, and of one with epochs random states: without clocks' times."""
    found = {}
    for row in read_rows(results):
        saved = read_checkpoint(results.parent / "runs" / row["run_id"] / CURRENT)
        history = [without(each, *apart) for each in history_of(results, row, file)]
        tensors = saved["model"]
        if file == "epochs.csv":  # heads that train together have one generator, from which they draw nothing
            tensors |= {f"state {rank}": each["cpu"] for rank, each in enumerate(saved["random_states"])}
        weights = {name: tensor.tolist() for name, tensor in tensors.items()}
        found[row[by]] = without(row, "times_resumed", *apart), history, weights
    return found


def only_run(results: Path) -> Path:
    (folder,) = (results.parent / "runs").iterdir()
    return folder


def stop(monkeypatch: pytest.MonkeyPatch, script: Any, name: str, count: int) -> None:
    """Let a function of a script raise what Ctrl-C does once it has run `count` times."""
    function, calls = getattr(script, name), []

    def interrupted(*arguments, **options):
        if len(calls) == count:
            raise KeyboardInterrupt
        calls.append(1)
        return function(*arguments, **options)

    monkeypatch.setattr(script, name, interrupted)


def believe_in(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process be the first of `count`, the others of which are not there."""
    ranks = Ranks()
    for name, value in {"count": count, "gathered": lambda value: [value], "speaks": lambda: True}.items():
        monkeypatch.setattr(ranks, name, value)
    monkeypatch.setattr(command_line, "Ranks", lambda: ranks)


def check_resumes(
    script: Any, command: Callable, place: tuple[str, int], tmp_path: Path, capsys: Any, **compared: Any
) -> dict[str, str]:
    """Stopped by Ctrl-C at a place as of `stop`, the same command ends with the same bits; return the last row."""
    undisturbed, resumed = (tmp_path / name / "r.csv" for name in ("undisturbed", "resumed"))
    assert script.main(command(undisturbed)) == 0
    with pytest.MonkeyPatch.context() as patch:
        stop(patch, script, *place)
        assert script.main(command(resumed)) == 130
    said = capsys.readouterr().err
    assert "same command continues" in said
    assert "Traceback" not in said
    assert not resumed.exists()
    assert script.main(command(resumed)) == 0
    assert outcome(resumed, **compared) == outcome(undisturbed, **compared)
    return read_rows(resumed)[-1]


def check_refused(main: Callable, words: Sequence[str], message: str, capsys: Any, status: int = 2) -> None:
    """The command ends with one sentence, which holds `message`."""
    capsys.readouterr()
    assert main(list(words)) == status
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
    assert len(said.splitlines()) == 1


def check_columns(script: Any, row: dict[str, str], unrecorded: Sequence[str] = ()) -> None:
    """Every column is a flag of the script or explained, and what makes it another experiment is a column."""
    flags = {each for each in script.Flags.__dataclass_fields__} - {"results", "force", "seeds", *unrecorded}
    assert row.keys() - flags <= COLUMNS.keys()
    assert flags <= row.keys()
    assert tuple(dict.fromkeys(script.IDENTITY)) == script.IDENTITY
    assert set(script.IDENTITY) <= row.keys()
