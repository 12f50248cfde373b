"""Two processes of torchrun compute what one computes, up to rounding; killed, they continue with the same bits."""

import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments import finetune_imagenet, train_cifar100, train_knn
from experiments.common.processes import Processes
from tests.experiments import scripts
from tests.experiments.scripts import MACHINE, SCRIPTS, name_of, outcome, rows_of

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--"]
COMMANDS = {
    # Without noise, of which each process draws its own; one step, since batch norm has its statistics per process.
    train_cifar100: "--dataset digits --limit_train 30 --batch_size 27 --n_epochs 2 --method neuralsort --p_k .5 0 .5",
    finetune_imagenet: SCRIPTS[finetune_imagenet].replace("noised_topk", "lapsum"),
}


def command_of(script, folder: Path, flags: str | None = None) -> list[str]:
    words = (flags or COMMANDS[script]).replace("EMBEDDINGS", str(folder / "e.pt"))
    return [str(EXPERIMENTS / f"{name_of(script)}.py"), *shlex.split(words), *MACHINE.split()]


@given(st.integers(1, 200), st.integers(1, 20))
def test_shares_divide_a_batch(length, count):
    processes, end, lengths = Processes(), 0, []
    processes.count = count
    for processes.rank in range(count):
        share = processes.share(length)
        assert share.start == end  # one begins where the one before ends
        end = share.stop
        lengths.append(end - share.start)
        assert processes.weight(length) == lengths[-1] / length
    assert end == length
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("script", COMMANDS, ids=name_of)
def test_two_processes_have_the_row_of_one_but_for_rounding(script, tmp_path):
    scripts.embeddings(tmp_path / "e.pt")
    for count, launcher in ((1, [sys.executable]), (2, TORCHRUN)):
        command = [*launcher, *command_of(script, tmp_path), "--results", str(tmp_path / str(count) / "r.csv")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    alone, both = (rows_of(tmp_path / count / "r.csv") for count in "12")
    for one, two in zip(alone, both, strict=True):
        assert (one["run_id"], one["processes"], two["processes"]) == (two["run_id"], "1", "2")
        if script is finetune_imagenet:
            assert float(two["last_valid_loss"]) == pytest.approx(float(one["last_valid_loss"]), rel=1e-5)
            assert [two[f"valid_top{k}"] for k in (1, 5)] == [one[f"valid_top{k}"] for k in (1, 5)]
        history = [torch.load(tmp_path / n / "runs" / one["run_id"] / "checkpoint.pt")["history"][0] for n in "12"]
        assert history[1]["train_loss"] == pytest.approx(
            history[0]["train_loss"], rel=0.1 if script is train_cifar100 else 1e-5
        )


def test_killed_two_processes_continue_with_the_same_bits(tmp_path):
    scripts.embeddings(tmp_path / "e.pt", train=2000)
    flags = "-d EMBEDDINGS --batch_size 25 --n_epochs 6 --eval_freq 3 --lr .01 --apply_dropout --method noised_topk"
    command = [*TORCHRUN, *command_of(finetune_imagenet, tmp_path, flags)]
    subprocess.run([*command, "--results", tmp_path / "whole" / "r.csv"], check=True, capture_output=True)
    command += ["--results", str(tmp_path / "killed" / "r.csv")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    while not list(tmp_path.glob("killed/runs/*/checkpoint.pt")):
        assert process.poll() is None
        time.sleep(0.02)
    killed = str(tmp_path / "killed")  # in all arguments; torchrun starts its workers in sessions of their own
    while subprocess.run(["pkill", "-KILL", "-f", "--", killed], check=False).returncode == 0:
        process.poll()
        time.sleep(0.02)
    process.wait()
    assert process.returncode == -signal.SIGKILL
    subprocess.run(command, check=True, capture_output=True)
    assert outcome(tmp_path / "killed" / "r.csv") == outcome(tmp_path / "whole" / "r.csv")


def test_a_failure_of_all_or_one_is_no_status_0(tmp_path):
    scripts.embeddings(tmp_path / "e.pt")
    for script, flags, message in (
        (finetune_imagenet, "-d EMBEDDINGS --method softsort --batch_size 500", "500 exceeds"),
        (train_knn, "--dataset digits --method softsort", "leave torchrun out"),
    ):
        command = [*TORCHRUN, *command_of(script, tmp_path, flags), "--results", str(tmp_path / "r.csv")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode != 0
        assert re.search(message, done.stderr)
    assert not (tmp_path / "r.csv").exists()
