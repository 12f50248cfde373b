"""Two processes of torchrun compute what one computes, up to rounding; killed, they continue with the same bits."""

import shlex
import signal
import subprocess
import time
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments import finetune_imagenet, train_cifar100, train_knn
from experiments.common.door import EXPECTED
from experiments.common.processes import Processes
from tests.experiments import scripts
from tests.experiments.scripts import MACHINE, SCRIPTS, TORCHRUN, name_of, outcome, rows_of
from tests.processes import wait_for

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
    processes, end, lengths = Processes(), 0, []
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
def made(tmp_path_factory):
    """The folder in which a script's command has run in one process and in two, in 1 and 2."""
    folder = tmp_path_factory.mktemp("made")
    scripts.embeddings(folder / "e.pt")

    @cache
    def call(script):
        words = words_of(script, folder)
        assert script.main([*words, "--results", str(folder / name_of(script) / "1" / "r.csv")]) == 0
        command = [*TORCHRUN, script.__file__, *words, "--results", str(folder / name_of(script) / "2" / "r.csv")]
        subprocess.run(command, check=True, capture_output=True)
        return folder / name_of(script)

    return call


@pytest.mark.parametrize("script", COMMANDS, ids=name_of)
def test_two_processes_have_the_row_of_one_but_for_rounding(script, made):
    folder = made(script)
    for one, two in zip(*(rows_of(folder / count / "r.csv") for count in "12"), strict=True):
        assert (one["run_id"], one["processes"], two["processes"]) == (two["run_id"], "1", "2")
        if script is finetune_imagenet:
            assert float(two["last_valid_loss"]) == pytest.approx(float(one["last_valid_loss"]), rel=1e-5)
            for k in (1, 5):
                assert float(two[f"valid_top{k}"]) == pytest.approx(float(one[f"valid_top{k}"]), abs=0.04)  # a row
        first, second = (torch.load(folder / n / "runs" / one["run_id"] / "checkpoint.pt")["history"][0] for n in "12")
        rounding = 0.1 if script is train_cifar100 else 1e-5
        assert second["train_loss"] == pytest.approx(first["train_loss"], rel=rounding)


def test_killed_two_processes_continue_with_the_same_bits(made, tmp_path):
    whole = made(finetune_imagenet)
    words = [*words_of(finetune_imagenet, whole.parent), "--results", str(tmp_path / "killed" / "r.csv")]
    command = [*TORCHRUN, finetune_imagenet.__file__, *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    wait_for(lambda: list(tmp_path.glob("killed/runs/*/checkpoint.pt")))
    killed = str(tmp_path / "killed")  # in all arguments; torchrun starts its workers in sessions of their own
    while subprocess.run(["pkill", "-KILL", "-f", "--", killed], check=False).returncode == 0:
        process.poll()
        time.sleep(0.02)
    process.wait()
    assert process.returncode == -signal.SIGKILL
    subprocess.run(command, check=True, capture_output=True)
    assert outcome(tmp_path / "killed" / "r.csv") == outcome(whole / "2" / "r.csv")


def test_a_failure_of_all_is_no_status_0(tmp_path):
    words = words_of(train_knn, tmp_path, "--dataset digits --method softsort --results /nowhere/r.csv")
    done = subprocess.run([*TORCHRUN, train_knn.__file__, *words], capture_output=True, text=True)
    assert done.returncode != 0
    assert "leave torchrun out" in done.stderr
