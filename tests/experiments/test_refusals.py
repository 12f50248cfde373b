"""What is refused, and when: before the first epoch, in a sentence, and nothing of the user's is replaced."""

import importlib
import itertools
import os
import re
import shlex
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch

from experiments import finetune_imagenet, train_cifar100, train_knn
from experiments.common import door, flags, provenance
from experiments.common.door import EXPECTED
from experiments.common.paths import PAPER, REPOSITORY
from experiments.common.processes import Processes
from experiments.common.rows import read_rows
from experiments.common.settings import BY_NAME, CIFAR, run_id
from tests.data.object_store_servers import FaultyServer
from tests.experiments import scripts
from tests.experiments.scripts import MACHINE, SCRIPTS, name_of, outcome, rows_of

ROOT = Path(__file__).parents[2]
EXECUTABLE = [path.stem for path in sorted((ROOT / "experiments").glob("*.py")) if "__main__" in path.read_text()]
QUICK = "--dataset digits --limit_train 60 --batch_size 20 --k 3 --n_epochs 2 --lr .01 "
QUICK += "--method softmax_cross_entropy --model linear --dim 4"
each_script = pytest.mark.parametrize("script", SCRIPTS, ids=name_of)


@pytest.fixture
def train(tmp_path):
    """Train a quick classifier; return the rows."""

    def call(more: str = "", results: Path = tmp_path / "r.csv") -> list[dict[str, str]]:
        assert train_knn.main(shlex.split(f"{QUICK} {MACHINE} --results {results} {more}")) == 0
        return rows_of(results)

    return call


def words_of(script, folder: Path, results: Path) -> list[str]:
    text = SCRIPTS[script].replace("EMBEDDINGS", str(folder / "e.pt"))
    return [*shlex.split(text), *MACHINE.split(), "--results", str(results)]


# The door.


@pytest.mark.parametrize("name", EXECUTABLE)
def test_every_script_makes_a_sentence_and_status_2_of_an_error(name, capsys, tmp_path):
    module = importlib.import_module(f"experiments.{name}")
    assert "sys.exit(door.call(" in Path(module.__file__).read_text()
    words = ["--device", "nosuch", "--method", "softsort"]
    if name == "extract_embeddings":
        words = [
            "--device",
            "nosuch",
            "--dataset",
            "digits",
            "--backbone",
            "test_resnet",
            "--output",
            str(tmp_path / "e"),
        ]
    if name == "train_beam_search":
        words += ["--arm", "retain"]
    assert door.call(partial(module.main, words)) == 2
    assert capsys.readouterr().err == "error: --device must be auto, cpu, cuda or cuda:1, got nosuch\n"


def test_an_error_of_a_library_keeps_its_traceback():
    with pytest.raises(ValueError, match="Unable to parse"):
        door.call(lambda: pd.to_numeric("no number"))
    assert door.call(lambda: Path("/nowhere/file").read_bytes()) == 2  # the system names the file


@pytest.mark.parametrize("package", ["data", "experiments", "models", "topk_losses"])
def test_packages_end_no_process(package):
    for path in (ROOT / package).rglob("*.py"):
        assert "SystemExit" not in path.read_text(), path


@each_script
def test_every_flag_is_a_setting(script, tmp_path):
    words = shlex.split(SCRIPTS[script].partition("--also")[0].replace("EMBEDDINGS", str(tmp_path)))
    assert vars(script.parse_arguments(words)).keys() <= BY_NAME.keys()


# The machine.


@pytest.mark.parametrize("device", ["mps", "cuda:99", "cuda:-1", "cpu:x", ""])
def test_a_device_that_is_not_there_is_refused(device):
    with pytest.raises(ValueError, match="--device"):
        Processes(device)


def test_variables_that_a_cluster_left_make_no_second_process(monkeypatch):
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "3"), ("SLURM_ARRAY_TASK_ID", "7"), ("SLURM_PROCID", "2")):
        monkeypatch.setenv(name, value)
    processes = Processes("cpu")
    assert (processes.count, processes.rank, processes.is_first) == (1, 0, True)
    monkeypatch.delenv("RANK")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE is 2, and RANK is not set"):
        Processes("cpu")


# The results file.


@each_script
@pytest.mark.parametrize("kind", ["device", "folder", "pipe", "link to nowhere", "repository", "paper"])
def test_a_results_file_that_cannot_be_is_refused_before_the_first_step(script, kind, tmp_path, capsys):
    scripts.embeddings(tmp_path / "e.pt")
    results = tmp_path / "r.csv"
    if kind == "device":
        results = Path("/dev/null")
    elif kind == "folder":
        results.mkdir()
    elif kind == "pipe":
        os.mkfifo(results)
    elif kind == "link to nowhere":
        results.symlink_to(tmp_path / "absent" / "r.csv")
    else:
        results = {"repository": REPOSITORY, "paper": PAPER}[kind] / "mine.csv"
    if kind in ("repository", "paper"):
        with pytest.raises(SystemExit, match="2"):
            script.main(words_of(script, tmp_path, results))
        printed = capsys.readouterr()
        assert "holds committed rows" in printed.err
    else:
        with pytest.raises(EXPECTED, match=r"is no file that can be replaced|there is no folder"):
            script.main(words_of(script, tmp_path, results))
        printed = capsys.readouterr()
    assert "epoch 1" not in printed.out
    assert not Path("/dev/runs").exists()


def test_the_target_of_a_link_gets_the_row(train, tmp_path):
    target = tmp_path / "elsewhere" / "rows.csv"
    target.parent.mkdir()
    link = tmp_path / "r.csv"
    link.symlink_to(target)
    train()
    train("--seed 1")
    assert link.is_symlink()
    assert [row["seed"] for row in rows_of(target)] == ["0", "1"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("method,", "seed,", 1), r"has 2 columns seed"),
        (lambda text: text.replace("run_id,", "run_id,,", 1).replace("\n", "\nx,", 1), r"column 2 of .* has no name"),
        (lambda text: text.replace(",false,", ",False,", 1), r"line 2 of .*: .* is 'False'"),
        (lambda text: text + "x\n", r"line 3 of .* does not fit its header"),
        (lambda text: text + "\0", r"no CSV|does not fit its header"),
        (lambda text: re.sub(r",([^,]*)\n$", r',"\1\n', text), r"no CSV"),  # a quotation without an end
        (lambda text: re.sub(r",([^,]*)\n$", r',"\1\nthe next line"\n', text), r"line 2 of .* has a line break"),
    ],
)
def test_a_results_file_that_would_lose_cells_is_refused_and_stays(train, tmp_path, change, message):
    train()
    path = tmp_path / "r.csv"
    changed = change(path.read_text())
    path.write_text(changed)
    with pytest.raises(ValueError, match=message):
        train("--seed 1")
    assert path.read_text() == changed


def test_a_results_file_that_went_through_pandas_is_refused_with_the_line(train, tmp_path):
    rows = pd.DataFrame([*train("--seeds 0 1"), {"run_id": "another"}])
    path = tmp_path / "r.csv"
    rows["seed"] = pd.to_numeric(rows["seed"])  # with a gap, which makes floats of whole numbers
    rows.to_csv(path, index=False)
    with pytest.raises(ValueError, match=r"line 2 of .*: seed is '0.0', which no run writes"):
        read_rows(path)


def test_a_name_of_many_ranks_is_one_that_file_systems_allow():
    config = dict.fromkeys(BY_NAME) | {"dataset": "cifar100", "model": "resnet18", "method": "softsort"}
    names = set()
    for last in (0.01, 0.03):
        config["p_k"] = [0.02] * 49 + [last]
        names.add(run_id(CIFAR, config, train_cifar100.READABLE))
    assert len(names) == 2
    assert max(map(len, names)) <= 255


# Checkpoints.


def test_a_checkpoint_with_a_changed_bit_is_refused(train, tmp_path):
    path = tmp_path / "runs" / train()[0]["run_id"] / "checkpoint.pt"
    (tmp_path / "r.csv").unlink()
    content = path.read_bytes()
    weight = torch.load(path, weights_only=True)["model"]["classify.weight"]
    place = content.index(weight.numpy().tobytes())
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    with pytest.raises(ValueError, match=r"is not what its checksum says.*delete"):
        train()
    assert not (tmp_path / "r.csv").exists()


@pytest.mark.parametrize("whose", ["another seed", "an earlier version"])
def test_a_checkpoint_of_another_run_is_refused(train, tmp_path, whose):
    folders = [tmp_path / "runs" / row["run_id"] for row in train("--seeds 0 1")]
    (tmp_path / "r.csv").unlink()
    saved = torch.load(folders[1 if whose == "another seed" else 0] / "checkpoint.pt", weights_only=True)
    if whose == "an earlier version":
        del saved["run_id"]
    torch.save(saved, folders[0] / "checkpoint.pt")
    expected = folders[1].name if whose == "another seed" else whose
    with pytest.raises(ValueError, match=f"is of {expected}.*delete that folder") as error:
        train()
    assert str(folders[0]) in str(error.value)


def test_a_finished_checkpoint_makes_a_row_that_says_so_and_is_trained_again_with_force(train, tmp_path, capsys):
    (first,) = train()
    for more in ("", "--force"):
        (tmp_path / "r.csv").unlink()
        capsys.readouterr()
        (row,) = train(more)
        assert ("not trained again" in capsys.readouterr().out) == (more == "")
        assert row["times_resumed"] == "0"
        assert (row["started_utc"] == first["started_utc"]) == (more == "")
        assert row["last_train_loss"] == first["last_train_loss"]


@each_script
def test_only_what_trained_a_run_adds_to_its_commits_machines_and_continuations(script, tmp_path, monkeypatch):
    """The same commands record the rows of finished runs again, at another commit and on another machine."""
    monkeypatch.setattr(train_cifar100, "resnet_cifar", scripts.small_network)
    scripts.embeddings(tmp_path / "e.pt")
    words = words_of(script, tmp_path, tmp_path / "r.csv")
    rows = []
    for number in "123":
        monkeypatch.setattr(provenance, "git_commit", lambda number=number: number)
        monkeypatch.setattr(provenance, "device_name", lambda _, number=number: number)
        assert script.main(words) == 0
        rows.append([{**row, "finished_utc": ""} for row in rows_of(tmp_path / "r.csv")])
        (tmp_path / "r.csv").unlink()
    for row in rows[0]:
        assert (row["git_commit"], row["device_name"], row["times_resumed"]) == ("1", "1", "0")
    for again in rows[1:]:
        for row, first in zip(again, rows[0], strict=True):
            differing = {name for name in row if row[name] != first[name]}
            assert differing <= {"eval_seconds"}  # beam search evaluates test words when it records


# Values.


@pytest.mark.parametrize("words", ["--nloglr 400", "--nloglr -50", "--lr inf", "--weight_decay 1e308", "--lr nan"])
def test_values_that_make_no_sense_are_refused(words, capsys):
    parser = flags.make_parser("")
    flags.add_optimization_flags(parser, 1, 1)
    with pytest.raises(SystemExit):
        parser.parse_args(words.split())
    assert "is not between" in capsys.readouterr().err


NO_TEMPERATURES = (
    "01:04:00",
    "1:4:2",
    "cold",
    "default",
    "1:",
    ":4",
    ":",
    "0",
    "-1",
    "1:0",
    "nan",
    "1:nan",
    "inf",
    "1e999:1",
)
TEMPERATURES = {"2": 2.0, "2.0": 2.0, "auto": "auto", "0.25:4": "0.25:4", ".250:4.0": "0.25:4", "1.0:4.0": "1:4"}


@pytest.mark.parametrize("cell", NO_TEMPERATURES)
def test_what_is_no_inverse_temperature_is_refused_in_a_row_and_as_a_flag(cell, tmp_path, capsys):
    """A spreadsheet makes 01:04:00 of 1:4."""
    path = tmp_path / "r.csv"
    path.write_text(f"run_id,inverse_temperature\na,1\nb,{cell}\n")
    with pytest.raises(ValueError, match=rf"line 3 of .*: inverse_temperature is '{cell}'.* a number .*auto.* 0\.25:4"):
        read_rows(path)
    with pytest.raises(SystemExit):
        train_cifar100.parse_arguments(["--method", "softsort", f"--inverse_temperature={cell}"])
    assert re.search(rf"--inverse_temperature: .* a number .*auto.* 0\.25:4, got {cell}\n", capsys.readouterr().err)


@pytest.mark.parametrize("cell", TEMPERATURES)
def test_an_inverse_temperature_is_the_same_in_each_spelling_in_a_row_and_as_a_flag(cell, tmp_path):
    path = tmp_path / "r.csv"
    path.write_text(f"run_id,inverse_temperature\na,{cell}\nb,\n")
    row, without = read_rows(path)
    setting = BY_NAME["inverse_temperature"]
    assert setting.parse(row["inverse_temperature"]) == TEMPERATURES[cell]
    assert setting.parse(without["inverse_temperature"]) is None
    args = train_cifar100.parse_arguments(["--method", "softsort", "--inverse_temperature", cell])
    assert args.inverse_temperature == TEMPERATURES[cell]


# Linear classifiers.


def test_one_classifier_that_diverges_is_dropped_and_named_and_the_others_have_rows(tmp_path, capsys):
    scripts.embeddings(tmp_path / "e.pt")
    words = f"-d {tmp_path / 'e.pt'} --method softmax_cross_entropy --lr .01 --n_epochs 2 --seeds 0 1 {MACHINE}"
    words += f' --also "--method softsort --lr 1e38" --also "--method lapsum" --results {tmp_path / "r.csv"}'
    for _ in range(2):  # the second time the others are skipped
        with pytest.raises(FloatingPointError, match=r"(softsort.*){2}") as error:
            finetune_imagenet.main(shlex.split(words))
        assert "lapsum" not in str(error.value)
        assert capsys.readouterr().out.count("dropped: ") == 2
        rows = rows_of(tmp_path / "r.csv")
        assert sorted((row["method"], row["seed"]) for row in rows) == [
            ("lapsum", "0"), ("lapsum", "1"), ("softmax_cross_entropy", "0"), ("softmax_cross_entropy", "1"),
        ]  # fmt: skip


# A file of embeddings that changes while it is in use.


def overwrite(path: Path) -> None:
    """Let the test rows be others, in place."""
    content = torch.load(path, weights_only=True)
    rows = content["test_embeddings"].numpy().tobytes()
    place = path.read_bytes().index(rows)
    with path.open("r+b") as file:
        file.seek(place)
        file.write(bytes(len(rows)))


def copy_in_place(path: Path) -> None:
    """Put a copy that has the file's times in its place, as rsync does."""
    shutil.copy2(path, path.with_name("copy"))
    os.replace(path.with_name("copy"), path)


CHANGES = pytest.mark.parametrize("change", [overwrite, copy_in_place, Path.unlink], ids=lambda change: change.__name__)
HEADS = "--n_epochs 3 --batch_size 25"
USES = {
    "one": f"--method softmax_cross_entropy --eval_freq 2 {HEADS}",
    "streamed": f"--method softsort --stream {HEADS}",
    "two": f'--method softsort --also "--method lapsum" {HEADS}',
}
NEIGHBOURS = {
    "trained": "--method softsort --n_epochs 3 --batch_size 20 --num_candidates 20 --k 3",
    "untrained": "--method inputs --k 3",
}


def change_before(patch, owner, name: str, number: int, change: Callable, path: Path) -> None:
    """Change a file before the call of a function with this number, counted from 0."""
    real = getattr(owner, name)
    numbers = itertools.count()

    def function(*arguments, **others):
        if next(numbers) == number:
            change(path)
        return real(*arguments, **others)

    patch.setattr(owner, name, function)


@CHANGES
@pytest.mark.parametrize("use", USES)
def test_embeddings_that_change_while_classifiers_train_on_them_give_no_row(use, change, tmp_path):
    """The checkpoint of before is kept, and the run continues from it with the file of before."""
    path = scripts.embeddings(tmp_path / "e.pt")
    kept = shutil.copy2(path, tmp_path / "kept.pt")
    words = shlex.split(f"-d {path} {USES[use]} {MACHINE} --results {tmp_path / 'r.csv'}")
    with pytest.MonkeyPatch.context() as patch:
        change_before(patch, finetune_imagenet, "evaluate", 1, change, path)
        with pytest.raises(EXPECTED, match=f"{path} has changed since it was opened; nothing is recorded"):
            finetune_imagenet.main(words)
    assert not (tmp_path / "r.csv").exists()
    checkpoints = [torch.load(file, weights_only=True) for file in tmp_path.rglob("checkpoint.pt")]
    assert {len(checkpoint["history"]) for checkpoint in checkpoints} == {1}
    os.replace(kept, path)
    assert finetune_imagenet.main(words) == 0
    assert {row["times_resumed"] for row in rows_of(tmp_path / "r.csv")} == {"1"}


@CHANGES
@pytest.mark.parametrize("use", NEIGHBOURS)
def test_embeddings_of_neighbours_may_change_when_they_are_in_memory_and_not_before(use, change, tmp_path):
    path = scripts.embeddings(tmp_path / "e.pt")
    kept = shutil.copy2(path, tmp_path / "kept.pt")
    words = shlex.split(f"-d {path} {NEIGHBOURS[use]} {MACHINE} --results")
    assert train_knn.main([*words, str(tmp_path / "undisturbed" / "r.csv")]) == 0
    with pytest.MonkeyPatch.context() as patch:
        change_before(patch, train_knn, "load_all", 0, change, path)
        with pytest.raises(EXPECTED, match=f"{path} has changed since it was opened; nothing is recorded"):
            train_knn.main([*words, str(tmp_path / "r.csv")])
    assert not (tmp_path / "r.csv").exists()
    os.replace(kept, path)
    with pytest.MonkeyPatch.context() as patch:
        change_before(patch, train_knn, "evaluate", 0, change, path)
        assert train_knn.main([*words, str(tmp_path / "r.csv")]) == 0
    assert outcome(tmp_path / "r.csv") == outcome(tmp_path / "undisturbed" / "r.csv")


@pytest.mark.parametrize("script", [finetune_imagenet, train_knn], ids=name_of)
def test_embeddings_that_change_before_a_finished_run_is_recorded_give_no_row(script, tmp_path, monkeypatch):
    path = scripts.embeddings(tmp_path / "e.pt")
    words = f"-d {path} --method softmax_cross_entropy --n_epochs 1 --batch_size 20 {MACHINE}".split()
    words += ["--results", str(tmp_path / "r.csv")]
    assert script.main(words) == 0
    (tmp_path / "r.csv").unlink()
    change_before(monkeypatch, script.Run, "start", 0, overwrite, path)
    with pytest.raises(EXPECTED, match=f"{path} has changed since it was opened; nothing is recorded"):
        script.main(words)
    assert not (tmp_path / "r.csv").exists()


def test_a_password_and_a_signature_stand_nowhere(tmp_path, capsys):
    server = FaultyServer(scripts.embeddings(tmp_path / "e.pt").read_bytes())
    try:
        address = server.url.replace("//", "//me:PASSWORD@") + "?X-Amz-Signature=SIGNATURE"
        words = f"-d {address} --cache_dir {tmp_path / 'cache'} --method softmax_cross_entropy --n_epochs 1 {MACHINE}"
        assert finetune_imagenet.main(shlex.split(f"{words} --results {tmp_path / 'r.csv'}")) == 0
    finally:
        server.close()
    (row,) = rows_of(tmp_path / "r.csv")
    assert row["data_path"] == server.url
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.suffix in (".csv", ".json", ".pt")]
    assert len(written) >= 5
    for content in (*written, *(text.encode() for text in capsys.readouterr())):
        assert b"PASSWORD" not in content
        assert b"SIGNATURE" not in content
