"""Two processes of torchrun compute what one computes, up to rounding; killed, they continue with the same bits."""

import shlex
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from data.cifar import load_dataset
from experiments import finetune_imagenet, train_cifar100, train_knn
from experiments.common.door import EXPECTED
from experiments.common.processes import Processes
from tests.experiments import scripts
from tests.experiments.forks import fork_together
from tests.experiments.oracle import top_k
from tests.experiments.scripts import MACHINE, SCRIPTS, TORCHRUN, outcome, rows_of

COMMANDS = {
    # Without noise, of which each process draws its own; one step, since batch norm has its statistics per process.
    train_cifar100: "--dataset digits --limit_train 30 --batch_size 27 --n_epochs 1 --method neuralsort --p_k .5 0 .5",
    finetune_imagenet: SCRIPTS[finetune_imagenet].replace("noised_topk", "lapsum").replace("epochs 3", "epochs 12"),
}


def words_of(script, folder: Path, flags: str | None = None) -> list[str]:
    words = (flags or COMMANDS[script]).replace("EMBEDDINGS", str(folder / "e.pt"))
    return [*shlex.split(words), *MACHINE.split()]


@given(st.integers(1, 40), st.integers(1, 20))
def test_shares_divide_a_batch(length, count):
    processes = Processes()
    end = 0
    lengths = []
    processes.count = count
    if length < count:
        with pytest.raises(EXPECTED, match=f"of {length} for {count} processes: start fewer"):
            processes.share(length)
        return
    for processes.rank in range(count):
        share = processes.share(length)
        assert share.start == end  # one begins where the one before ends
        end = share.stop
        lengths.append(end - share.start)
        assert processes.weight(length) == lengths[-1] / length
    assert end == length
    assert max(lengths) - min(lengths) <= 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    scripts.embeddings(folder / "e.pt")
    return folder


@pytest.fixture(scope="module")
def heads(folder):
    """The folder in which heads were trained by one process, in 1, and by the two of torchrun, in 2."""
    words = words_of(finetune_imagenet, folder)
    assert finetune_imagenet.main([*words, "--results", str(folder / "1" / "r.csv")]) == 0
    command = [*TORCHRUN, finetune_imagenet.__file__, *words, "--results", str(folder / "2" / "r.csv")]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def check_alike(folder: Path, rounding: float) -> None:
    """Check the rows of one process, in 1, and of two, in 2."""
    for one, two in zip(*(rows_of(folder / count / "r.csv") for count in "12"), strict=True):
        assert (one["run_id"], one["processes"], two["processes"]) == (two["run_id"], "1", "2")
        histories = [torch.load(folder / n / "runs" / one["run_id"] / "checkpoint.pt")["history"] for n in "12"]
        first, second = (history[0] for history in histories)
        assert second["train_loss"] == pytest.approx(first["train_loss"], rel=rounding)
        assert len(histories[0]) == len(histories[1])


def test_two_processes_have_the_heads_of_one_but_for_rounding(heads):
    check_alike(heads, 1e-5)
    for one, two in zip(*(rows_of(heads / count / "r.csv") for count in "12"), strict=True):
        assert float(two["last_valid_loss"]) == pytest.approx(float(one["last_valid_loss"]), rel=1e-5)
        for k in (1, 5):
            assert float(two[f"valid_top{k}"]) == pytest.approx(float(one[f"valid_top{k}"]), abs=0.04)  # a row


# Whose batch norm has the statistics of its own half of a batch.
IMAGES = "--dataset digits --limit_train 70 --batch_size 16 --n_epochs 3 --lr .01 --method softmax_cross_entropy"


@pytest.mark.parametrize("more", ["", "--ema .7", "--seed 3"])
def test_every_process_evaluates_the_network_that_is_kept(more, tmp_path):
    """Its running statistics, too: the figures are those of the checkpoint on the whole of each split."""
    words = words_of(train_cifar100, tmp_path, f"{IMAGES} {more}")
    assert fork_together(train_cifar100, [*words, "--results", str(tmp_path / "r.csv")]) == [0, 0]
    (row,) = rows_of(tmp_path / "r.csv")
    data = load_dataset("digits", tmp_path, seed=int(row["seed"]), limit_train=70)
    network = scripts.small_network("resnet18", 10)
    saved = torch.load(tmp_path / "runs" / row["run_id"] / "checkpoint.pt", weights_only=True)
    network.load_state_dict(saved["model"])
    for name, split in (("valid", data.valid), ("test", data.test)):
        with torch.no_grad():
            logits = network.eval()(data.normalise(split.inputs))
        expected = {"loss": cross_entropy(logits, split.labels).item()} | top_k(logits, split.labels)
        for figure, value in expected.items():
            assert float(row[f"last_{name}_{figure}"]) == pytest.approx(value, rel=1e-5), (name, figure)


def test_two_processes_have_the_first_step_of_one_but_for_batch_norm(tmp_path, monkeypatch):
    monkeypatch.setattr(train_cifar100, "resnet_cifar", scripts.small_network)
    words = words_of(train_cifar100, tmp_path)
    assert train_cifar100.main([*words, "--results", str(tmp_path / "1" / "r.csv")]) == 0
    assert fork_together(train_cifar100, [*words, "--results", str(tmp_path / "2" / "r.csv")]) == [0, 0]
    check_alike(tmp_path, 0.1)


@pytest.mark.parametrize("number", [5, 8])
def test_killed_two_processes_continue_with_the_same_bits(heads, tmp_path, number):
    """The first one kills itself at a file that it writes; the other ends since it has no other one to talk to."""
    words = [*words_of(finetune_imagenet, heads), "--results", str(tmp_path / "r.csv")]
    first, second = fork_together(finetune_imagenet, words, killed_at=number)
    assert (first, second) == (-signal.SIGKILL, second)
    assert second != 0
    assert list(tmp_path.glob("runs/*/checkpoint.pt"))
    assert fork_together(finetune_imagenet, words) == [0, 0]
    assert outcome(tmp_path / "r.csv") == outcome(heads / "2" / "r.csv")


def test_a_run_that_continues_elsewhere_names_both_places_and_recording_it_again_changes_neither(folder, tmp_path):
    words = [*words_of(finetune_imagenet, folder), "--results", str(tmp_path / "r.csv")]
    fork_together(finetune_imagenet, words, killed_at=8)
    assert list(tmp_path.glob("runs/*/checkpoint.pt"))
    assert finetune_imagenet.main([*words, "--threads", "2"]) == 0
    names = ("processes", "threads", "device", "device_name", "torch_version")
    found = [[row[name] for name in names] for row in rows_of(tmp_path / "r.csv")]
    assert ["2, then 1", "", "cpu"] in [cells[:3] for cells in found]  # a row has one number of threads, or none
    assert {"then" in cell for cells in found for cell in cells[3:]} == {False}
    (tmp_path / "r.csv").unlink()
    assert finetune_imagenet.main([*words, "--threads", "1"]) == 0
    assert [[row[name] for name in names] for row in rows_of(tmp_path / "r.csv")] == found


def test_a_failure_of_all_is_no_status_0(tmp_path):
    words = words_of(train_knn, tmp_path, "--dataset digits --method softsort --results /nowhere/r.csv")
    assert fork_together(train_knn, words) == [1, 1]
