"""--seeds: one command, one process and one row per seed, each row that of --seed alone."""

import multiprocessing
import os
import signal
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from experiments.shared import seed_processes
from experiments.shared.command_line import AlreadyRecorded
from experiments.shared.ranks import Ranks
from experiments.shared.run_record import open_run, read_rows
from experiments.shared.seed_processes import division

from experiments import train_cifar100 as script
from tests.experiments.runs import check_refused, outcome, stop
from tests.experiments.test_train_cifar100 import command, tiny_network
from tests.processes import Program, run

FLAGS = "--limit_train 24 --limit_test 8 --batch_size 8 --label_noise .2"


def main_that_forks(words: list[str], network=script.resnet_cifar) -> int:
    """The script, whose seeds are forks, not spawned, and so have what is imported and patched."""
    script.resnet_cifar = network
    fork = multiprocessing.get_context("fork")
    seed_processes.multiprocessing = SimpleNamespace(
        get_context=lambda _: fork, parent_process=multiprocessing.parent_process
    )
    return script.main(words)


def run_folders(results) -> list:
    return sorted((results.parent / "runs").iterdir())


def test_what_a_gpu_alone_can_do_is_refused_in_no_seed_before_it_has_one(monkeypatch):
    begun = []

    def begin(args, ranks):
        begun.append((args.seed, args.device, args.graph))
        raise AlreadyRecorded

    args = script.parse_arguments(["--method", "softsort", "--seeds", "0", "1", "--graph", "--device", "cuda"])
    monkeypatch.setattr(Ranks, "device", lambda ranks, name: torch.device(name))
    assert seed_processes.each_seed(begin, None, args, Ranks()) == 0
    assert begun == [(0, "cpu", False), (1, "cpu", False)]


def test_the_rows_are_those_of_each_seed_alone(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(script, "resnet_cifar", tiny_network)
    alone = {seed: tmp_path / f"alone{seed}" / "r.csv" for seed in (3, 7)}
    for seed, results in alone.items():
        assert script.main(command(results, f"{FLAGS} --seed {seed}", n_epochs=2)) == 0
    # Seed 3 was begun before; another process holds seed 7.
    results = tmp_path / "together" / "r.csv"
    with monkeypatch.context() as patch:
        stop(patch, script, "train_epoch", 1)
        assert script.main(command(results, f"{FLAGS} --seed 3", n_epochs=2)) == 130
    both = command(results, f"{FLAGS} --seeds 7 3", n_epochs=2)
    with open_run(results.parent / "runs" / run_folders(alone[7])[0].name):
        status, printed, said = run(partial(main_that_forks, both, tiny_network))
    assert status == 1
    assert said.startswith("error: seed 7: this configuration is being run by another process")
    assert said.endswith("error: 1 of 2 seeds failed: 7 (status 1). The same command trains what is not recorded\n")
    assert "continuing after epoch 1 of 2" in printed
    assert "\nseed 3 epoch 2/2 " in printed
    (row,) = read_rows(results)
    assert (row["seed"], row["times_resumed"]) == ("3", "1")

    # The same command goes on with the other.
    status, printed, said = run(partial(main_that_forks, both, tiny_network))
    assert status == 0
    assert printed.startswith("skipped: ")
    assert said == ""
    rows = read_rows(results)
    assert [row["seed"] for row in rows] == ["3", "7"]
    assert "seeds" not in rows[0]
    assert outcome(results) == outcome(alone[3]) | outcome(alone[7])

    # And now there is nothing to do, which takes no process.
    monkeypatch.setattr(seed_processes, "run_seeds", lambda *_: pytest.fail("started processes"))
    capfd.readouterr()
    assert script.main(both) == 0
    assert capfd.readouterr().out.count("skipped: ") == 2


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_ends_all_and_so_does_a_kill(tmp_path):
    results = tmp_path / "r.csv"
    words = command(results, f"{FLAGS} --seeds 0 1", n_epochs=500)
    process = Program(partial(main_that_forks, words), folder=tmp_path)
    process.wait_for("epoch 1/500")
    process.send_signal(signal.SIGINT)
    status, _, message = process.end()
    assert status == 130
    assert message.strip().startswith("stopped: every finished epoch is saved")
    assert "Traceback" not in message
    assert all(is_free(folder) for folder in run_folders(results))

    process = Program(partial(script.main, words), folder=tmp_path)
    process.wait_for("continuing after epoch")
    process.send_signal(signal.SIGKILL)
    process.end()
    assert all(is_free(folder) for folder in run_folders(results))
    assert not results.exists()


def is_free(folder) -> bool:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            with open_run(folder):
                return True
        except Exception:
            time.sleep(0.1)
    return False


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--method softsort --seeds 1 2 1", "--seeds must differ, got 1 2 1"),
        ("--method softsort --seeds 0 1 --m 4", "raise m"),
        ("--method softsort --seeds 0 1 --batch_size 1000", "--batch_size must not exceed the 76 training images"),
    ],
)
def test_a_wrong_command_line_is_refused_once(tmp_path, capfd, monkeypatch, flags, message):
    monkeypatch.setattr(seed_processes, "run_seeds", lambda *_: pytest.fail("started processes"))
    argv = f"--dataset digits --limit_train 80 --results {tmp_path / 'r.csv'} {flags}".split()
    check_refused(script.main, argv, message, capfd)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("num_seeds", "threads", "on_gpu", "cores", "expected"),
    [
        (2, None, False, 2, (2, 1)),
        (3, None, False, 16, (3, 5)),
        (3, 16, False, 16, (1, 16)),
        (5, 4, False, 16, (4, 4)),
        (5, None, True, 2, (5, 1)),
    ],
)
def test_the_cores_are_divided(monkeypatch, num_seeds, threads, on_gpu, cores, expected):
    monkeypatch.setattr("experiments.shared.seed_processes.usable_cores", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    assert division(num_seeds, threads, on_gpu) == expected
