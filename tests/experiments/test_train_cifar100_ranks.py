"""Several processes that train one row together: what one process computes, exact resume, one sentence when one fails.

Most tests fork the processes from a server that has imported what takes seconds; the last ones start torchrun itself.
"""

import os
import signal
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
from experiments.shared import ranks as ranks_module
from experiments.shared import run as run_module
from experiments.shared.ranks import Ranks
from experiments.shared.run_record import read_rows
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from experiments import train_cifar100 as script
from tests.experiments.runs import check_refused, outcome
from tests.experiments.test_train_cifar100 import QUICK, command, tiny_network
from tests.processes import together, torchrun


def plain_network(num_classes: int = 10) -> nn.Module:
    """Without batch norm, whose statistics are of a process's own images, dropout, and kinks, where roundings show."""
    torch.manual_seed(0)
    body = (nn.Conv2d(3, 8, 3, stride=4), nn.Tanh(), nn.Conv2d(8, 8, 1), nn.Flatten())
    return nn.Sequential(*body, nn.Linear(512, num_classes)).to(memory_format=torch.channels_last)


def run_tiny(argv: list[str], killed: int | None = None) -> int:
    """The script with the tiny network; the process of rank `killed` ends as the checkpoint of epoch 2 is due."""
    script.resnet_cifar, run_module.SAVE_SECONDS = tiny_network, -1
    evaluate = script.evaluate

    def evaluate_or_die(epoch, *others):
        if epoch == 2 and int(os.environ["RANK"]) == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        return evaluate(epoch, *others)

    script.evaluate = evaluate_or_die
    return script.main(argv)


# Shares.


@given(st.integers(1, 200), st.integers(1, 20))
def test_shares_divide_a_batch(length, count):
    ranks = Ranks()
    ranks.count = count
    end, lengths, weights = 0, [], []
    for ranks.rank in range(count):
        share = ranks.share(length)
        assert share.start == end  # one begins where the one before ends
        end = share.stop
        lengths.append(end - share.start)
        weights.append(ranks.weight(length))
    assert end == length
    assert max(lengths) - min(lengths) <= 1
    assert weights == [each / length for each in lengths]


@pytest.mark.parametrize(
    "environment",
    [
        *("WORLD_SIZE=0", "WORLD_SIZE=abc", "RANK=1", "WORLD_SIZE=2 RANK=5", "WORLD_SIZE=2 RANK=0"),
        *("WORLD_SIZE=2 RANK=0 MASTER_PORT=x", "WORLD_SIZE=2 MASTER_PORT=9"),
    ],
)
def test_an_environment_that_torchrun_would_not_make_is_refused(environment, tmp_path, monkeypatch, capsys):
    for pair in environment.split():
        monkeypatch.setenv(*pair.split("="))
    named = environment.split()[-1].replace("=", "='")
    check_refused(script.main, command(tmp_path / "r.csv"), named, capsys)


def test_processes_that_do_not_meet_are_a_sentence(tmp_path, monkeypatch, capsys):
    for name, value in {"WORLD_SIZE": 2, "RANK": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 9}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(ranks_module, "_MEETING", timedelta(seconds=1))
    check_refused(script.main, command(tmp_path / "r.csv"), "2 processes did not meet at 127.0.0.1:9: ", capsys, 1)


def two_epochs(batch_size: int, path: Path) -> int:
    """The script with the network without batch norm, by plain gradient descent."""
    script.resnet_cifar = lambda name, num_classes: plain_network(num_classes)
    # Adam's first steps are of the size lr whatever the gradient's: where that is nearly 0, a rounding error shows.
    torch.optim.AdamW = lambda parameters, rate, **_: torch.optim.SGD(parameters, rate, momentum=0.1)
    flags = f"--batch_size {batch_size} --lr .01"
    return script.main(command(path / "r.csv", flags, "softmax_cross_entropy", n_epochs=2))


@pytest.mark.parametrize(("count", "batch_size"), [(2, 16), (2, 15), (3, 16)])
def test_without_batch_norm_they_compute_what_one_computes(tmp_path, count, batch_size):
    for processes in (1, count):
        work = partial(two_epochs, batch_size, tmp_path / str(processes))
        statuses, outputs = together(processes, tmp_path, work)
        assert statuses == [0] * processes, outputs
    (row, history, weights), (_, expected, expected_weights) = (
        *outcome(tmp_path / str(count) / "r.csv").values(),
        *outcome(tmp_path / "1" / "r.csv").values(),
    )
    assert row["processes"] == str(count)
    for entry, expected_entry in zip(history, expected, strict=True):
        for name, value in expected_entry.items():
            if "top" in name:
                assert entry[name] == value  # the counts of hits are equal
            elif "loss" in name:
                assert float(entry[name]) == pytest.approx(float(value), rel=1e-6)
    for name in expected_weights:
        if "state " not in name:
            found, wanted = torch.tensor(weights[name]), torch.tensor(expected_weights[name])
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


# The script.


# All processes go on with the spread of the logits that the first one saved: the bits are the same if all had that.
@pytest.mark.parametrize(
    ("count", "killed", "flags"), [(2, 1, "--ema .9 --method lml --inverse_temperature auto"), (3, 0, "")]
)
def test_killed_and_resumed_they_end_with_the_same_bits(tmp_path, count, killed, flags):
    # 16 images for 3 processes are uneven shares; dropout draws from the generator of each process.
    undisturbed, resumed = tmp_path / "undisturbed" / "r.csv", tmp_path / "resumed" / "r.csv"
    statuses, outputs = together(count, tmp_path, partial(run_tiny, command(undisturbed, flags)))
    assert statuses == [0] * count, outputs
    assert outputs[1:] == [""] * (count - 1)  # rank 0 alone prints
    assert len(read_rows(undisturbed)) == 1
    assert read_rows(undisturbed)[0]["processes"] == str(count)
    assert len(outputs[0].splitlines()) == 1 + 3 + 3

    statuses, outputs = together(count, tmp_path, partial(run_tiny, command(resumed, flags), killed))
    assert statuses == [-signal.SIGKILL if rank == killed else 1 for rank in range(count)]
    assert not any("Traceback" in output for output in outputs)
    assert not resumed.exists()
    statuses, outputs = together(count, tmp_path, partial(run_tiny, command(resumed, flags)))
    assert statuses == [0] * count, outputs
    assert "continuing after epoch 1 of 3" in outputs[0]
    assert outcome(undisturbed) == outcome(resumed)

    statuses, outputs = together(count, tmp_path, partial(run_tiny, command(resumed, flags)))
    assert statuses == [0] * count
    assert outputs[0].startswith("skipped: ")
    assert outputs[1:] == [""] * (count - 1)


def test_the_run_id_is_that_of_one_process_and_one_continues_what_two_began(tmp_path, monkeypatch, capsys):
    results = tmp_path / "r.csv"
    together(2, tmp_path, partial(run_tiny, command(results), 0))
    monkeypatch.setattr(script, "resnet_cifar", tiny_network)
    assert script.main(command(results)) == 0
    assert "continuing after epoch 1 of 3" in capsys.readouterr().out
    (row,) = read_rows(results)
    assert (row["processes"], row["times_resumed"]) == ("1", "1")


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        ("--method softmax_cross_entropy --lr 1e30", 1, "the loss became nan in epoch 1, step 2 of 4"),
        ("--method softmax_cross_entropy --lr 1e30 --batch_size 76", 1, "in the validation after epoch 1"),
        ("--method softsort --m 4", 2, "raise m"),
        ("--method softsort --batch_size 1", 2, "at least the number of processes"),
        ("--method softsort --device cuda:0", 2, "give --device cuda, got cuda:0"),
        ("--method softsort --seeds 0 1", 2, "give one --seed"),
    ],
)
def test_what_goes_wrong_in_all_is_said_once(tmp_path, flags, status, message):
    argv = [*QUICK, "--n_epochs", "1", "--results", str(tmp_path / "r.csv"), *flags.split()]
    statuses, outputs = together(2, tmp_path, partial(run_tiny, argv))
    assert statuses == [status] * 2
    said = "".join(outputs)
    assert message in said
    assert (said.count("error: "), said.count("Traceback")) == (1, 0)
    assert not (tmp_path / "r.csv").exists()


def fail_in_rank_1(argv: list[str]) -> int:
    if os.environ["RANK"] == "1":
        script.count_hits = lambda *_: (_ for _ in ()).throw(OSError("no space left"))
    return run_tiny(argv)


def test_what_goes_wrong_in_one_ends_all_and_is_said_once(tmp_path):
    statuses, outputs = together(2, tmp_path, partial(fail_in_rank_1, command(tmp_path / "r.csv")))
    assert statuses == [1, 1]
    assert outputs[1].startswith("error: no space left")
    assert "error: " not in outputs[0]


# torchrun.


def test_torchrun_reports_status_2_for_a_wrong_command_line(tmp_path):
    done = torchrun(script.__file__, [*command(tmp_path / "r.csv"), "--method", "neuralsrt"])
    assert done.returncode != 0
    assert done.stderr.count("did you mean 'neuralsort'") == done.stderr.count("error: ") == 1
    assert "exitcode  : 2" in done.stderr
    assert 'train_cifar100.py", line' not in done.stderr  # a traceback of ours; torchrun prints one of its own
