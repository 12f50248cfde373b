"""The script as a user meets it: rows, resume to the bit, refusals with a sentence.

Most tests put a network of two layers in the place of the ResNet; one of the last runs the script itself.
"""

import json
import math
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from experiments.shared.checkpoint import CURRENT, read_checkpoint, write_checkpoint
from experiments.shared.metrics import TOP_K
from experiments.shared.run_record import read_rows
from torch import nn

from experiments import train_cifar100 as script
from tests.experiments.runs import check_columns, check_history, check_refused, check_resumes, only_run, outcome, stop
from tests.processes import Program
from topk_losses import METHODS

QUICK = [
    *("--dataset", "digits", "--limit_train", "80", "--limit_test", "40", "--batch_size", "16"),
    *("--device", "cpu", "--threads", "1"),
]


def tiny_network(name: str, num_classes: int) -> nn.Module:
    # Dropout draws from the global generator, whose state a resumed run must find again.
    body = (nn.Conv2d(3, 8, 3, stride=4), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1), nn.Flatten())
    return nn.Sequential(*body, nn.Linear(512, num_classes))


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(script, "resnet_cifar", tiny_network)


def command(results: Path, flags: str = "", method: str = "neuralsort", n_epochs: int = 3) -> list[str]:
    return [*QUICK, *f"--method {method} --n_epochs {n_epochs} {flags}".split(), "--results", str(results)]


# The record.


def test_a_run_leaves_a_row_and_a_folder(tiny, results, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)  # bars leave the lines whole
    assert script.main(command(results, "--distribution logistic_phi", method="bitonic__non_sparse")) == 0
    printed, bars = capsys.readouterr()
    assert "3/3" in bars
    assert len(re.findall(r"^epoch \d/3  train loss .*, evaluated .* s$", printed, re.MULTILINE)) == 3
    assert str(results) in printed
    (row,) = read_rows(results)
    check_columns(script, row)
    folder = only_run(results)
    assert folder.name == row["run_id"]
    assert row["run_id"].startswith("digits-resnet18-bitonic-pk_0.2_0.2_0.2_0.2_0.2-3epochs-seed0-")
    resolved = {
        **{"method": "bitonic", "inverse_temperature": "0.5", "distribution": "logistic_phi", "art_lambda": "0.5"},
        **{"top1_mode": "smce", "lr": "0.001", "nloglr": "3.0", "device": "cpu", "threads": "1", "m": ""},
        **{"data_dir": "data/downloads", "noise_groups": "", "label_noise": "0.0", "implementation": "ours"},
    }
    assert {name: row[name] for name in resolved} == resolved

    epochs = check_history(results, row, "epoch", "epochs.csv")
    assert [each["epoch"] for each in epochs] == [1, 2, 3]
    for each in epochs:
        for split in ("train", "valid", "test"):
            fractions = [each[f"{split}_top{k}"] for k in TOP_K]
            assert fractions == sorted(fractions)
            assert fractions[-2:] == [1.0, 1.0]  # ten classes
    assert (row["train_images"], row["valid_images"], row["test_images"]) == ("76", "4", "40")
    assert float(row["images_per_second"]) == pytest.approx(3 * 64 / float(row["train_seconds"]))

    config = json.loads((folder / "config.json").read_text())
    assert (config["run_id"], config["p_k"]) == (row["run_id"], [0.2] * 5)
    # Of a finished run the checkpoint of the last epoch stays, alone.
    assert sorted(path.name for path in folder.iterdir()) == [CURRENT, "config.json", "epochs.csv", "run.lock"]
    assert [each["epoch"] for each in read_checkpoint(folder / CURRENT)["history"]] == [1, 2, 3]


@pytest.mark.parametrize(
    "flags",
    [
        *(f"--method {method}" for method in METHODS),
        "--method lml --precision bf16",
        "--method bitonic --implementation difftopk",
        "--method softsort --deterministic --label_noise .5 --m 8 --lr .01",
        # Published commands, as they stand.
        "--method softmax_cross_entropy -p_k 1. 0. 0. 0. 0.",
        "--method splitter_selection --distribution logistic_phi --inverse_temperature .5 --art_lambda .5 "
        "--p_k .2 .2 .2 .2 .2",
        "--method bitonic --distribution logistic_phi --inverse_temperature .5 --art_lambda .5 --p_k .25 0. 0. 0. .75",
        "--method neuralsort --inverse_temperature 0.0625 --p_k 0. 0. 0. 0. 1.",
        "--method smooth_hard_topk --inverse_temperature 1. --p_k 0. 0. 0. 0. 1. --nloglr 3",
    ],
)
def test_every_method_and_what_is_published_train(tiny, results, flags):
    assert script.main([*QUICK, *flags.split(), "--n_epochs", "1", "--results", str(results)]) == 0
    assert len(read_rows(results)) == 1


def test_the_published_defaults():
    args = script.parse_arguments(["--method", "softsort"])
    assert (args.dataset, args.model, args.n_epochs, args.batch_size) == ("cifar100", "resnet18", 200, 128)
    assert (args.seed, args.label_noise, args.precision, args.device) == (0, 0.0, "fp32", "auto")
    assert args.data_dir.parts[-2:] == ("data", "downloads")
    assert args.results.parts[-2:] == ("results", "cifar100.csv")


def test_the_learning_rate_follows_its_schedule(tiny, results, monkeypatch):
    rates, step = [], torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: rates.append(self.param_groups[0]["lr"]) or step(self))
    for schedule in ("constant", "cosine"):
        assert script.main(command(results, f"--lr_schedule {schedule} --nloglr 2")) == 0
    cosine = [0.01 * math.cos(math.pi * number / 24) ** 2 for number in range(12)]
    assert rates == pytest.approx([0.01] * 12 + cosine)
    assert [row["lr_schedule"] for row in read_rows(results)] == ["", "cosine"]


def test_weight_decay_and_average_are_other_experiments_and_columns(tiny, results):
    for flags in ("", "--weight_decay 0", "--weight_decay .5", "--ema .9"):
        assert script.main(command(results, flags, n_epochs=1)) == 0
    rows = read_rows(results)
    assert [(row["weight_decay"], row["ema"]) for row in rows] == [("", ""), ("0.5", ""), ("", "0.9")]
    assert len({row["last_test_loss"] for row in rows}) == 3
    assert len({row["last_train_loss"] for row in rows}) == 2  # nothing is trained on the average


def test_without_weight_decay_the_optimizer_is_the_published_one(tiny, tmp_path, monkeypatch):
    ours, published = tmp_path / "ours" / "r.csv", tmp_path / "published" / "r.csv"
    assert script.main(command(ours)) == 0
    monkeypatch.setattr(torch.optim, "AdamW", torch.optim.Adam)
    assert script.main(command(published)) == 0
    assert outcome(ours) == outcome(published)


def test_the_average_is_evaluated_and_kept(tiny, results, monkeypatch):
    decay, expected, evaluated = 0.9, {}, []
    update, evaluate = script.AveragedModel.update_parameters, script.evaluate

    def averaged_here_too(self, model):
        for name, tensor in model.state_dict().items():  # the first step's weights, then the recursion
            expected[name] = decay * expected.get(name, tensor) + (1 - decay) * tensor
        update(self, model)

    monkeypatch.setattr(script.AveragedModel, "update_parameters", averaged_here_too)
    monkeypatch.setattr(script, "evaluate", lambda *rest: evaluated.append(rest[2]) or evaluate(*rest))
    assert script.main(command(results, f"--ema {decay}")) == 0
    saved = read_checkpoint(only_run(results) / CURRENT)
    assert saved["training"] is None  # nothing continues a finished run
    for weights in (saved["model"], evaluated[-1].state_dict()):
        assert weights.keys() == expected.keys()
        for name, tensor in weights.items():
            if tensor.is_floating_point():
                torch.testing.assert_close(tensor, expected[name])


# Skipping, repeating, resuming.


def test_a_recorded_configuration_is_skipped_and_force_repeats_it(tiny, results, monkeypatch, capsys):
    script.main(command(results))
    (before,) = read_rows(results)
    assert script.main(command(results)) == 0
    assert "skipped" in capsys.readouterr().out
    assert read_rows(results) == [before]
    # A repetition that was interrupted continues.
    with monkeypatch.context() as patch:
        stop(patch, script, "train_epoch", 1)
        assert script.main(command(results, "--force")) == 130
    assert read_rows(results) == [before]
    assert script.main(command(results, "--force")) == 0
    assert "continuing after epoch 1 of 3" in capsys.readouterr().out
    (after,) = read_rows(results)
    assert after["started_utc"] > before["started_utc"]
    assert (after["times_resumed"], after["last_test_loss"]) == ("1", before["last_test_loss"])


@pytest.mark.parametrize("flags", ["", "--ema .9"])
def test_a_finished_run_without_its_row_is_recorded_without_training(tiny, results, monkeypatch, flags):
    script.main(command(results, flags))
    (before,) = read_rows(results)
    whole = results.read_text()
    monkeypatch.setattr(script, "train_epoch", lambda *_: pytest.fail("trained again"))
    for rest in ("", whole[: len(whole) // 2 + 600]):  # no row, or one that was cut short
        results.write_text(rest)
        assert script.main(command(results, flags)) == 0
        assert read_rows(results)[0]["train_seconds"] == before["train_seconds"]


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--lr_schedule cosine --weight_decay .5",
        "--ema .9",
        "--method imbalanced_noised_topk",
        "--inverse_temperature auto",
        "--inverse_temperature .1:10",
    ],
)
def test_after_ctrl_c_the_same_command_ends_with_the_same_bits(tiny, tmp_path, capsys, flags):
    row = check_resumes(script, partial(command, flags=flags, n_epochs=4), ("evaluate", 2), tmp_path, capsys)
    assert row["times_resumed"] == "1"


AUTO = "--method lml --inverse_temperature auto"
SPREAD = "auto._extra_state"


@pytest.mark.parametrize(
    ("flags", "place", "value", "message"),
    [
        ("", "random_states", None, "TypeError"),
        ("", "model", {}, "model lacks 0.bias, 0.weight"),
        ("", "model", {"0.weight": [0.0]}, "its model holds other things than tensors"),
        ("", "training optimizer", {}, "training.optimizer lacks 0, 1, 2"),
        ("", "training optimizer 0 exp_avg_sq", torch.ones(3), "training.optimizer.0.exp_avg_sq is torch.float32 (3,)"),
        ("", "training", None, "training must be there until epoch 3"),
        ("--ema .9", "training average", None, "training.average is NoneType"),
        ("--ema .9", "training average", "absent", "training lacks average"),
        (AUTO, f"training loss {SPREAD}", torch.tensor(torch.nan), f"training.loss.{SPREAD} is not finite"),
        (AUTO, f"training loss {SPREAD}", torch.tensor(-1.0), f"training.loss.{SPREAD} must be above 0, and is -1.0"),
        (AUTO, f"training loss {SPREAD}", torch.tensor(1j), f"training.loss.{SPREAD} is torch.complex64"),
        ("", "history", [], "its history counts epochs [] of 3"),
        ("", "history 1 epoch", 1, "its history counts epochs [1, 1] of 3"),
        ("", "history 0 valid_top5", "absent", "history.0 lacks valid_top5"),
        ("", "history 0 valid_top5", "much", "history.0.valid_top5 is str, and must be float"),
        ("", "started_utc", "\udcff", "UnicodeEncodeError"),
        ("", "times_resumed", True, "origin.times_resumed is bool, and must be int"),
        ("", "git_commits", "absent", "KeyError: 'git_commits'"),
    ],
)
def test_a_changed_checkpoint_is_refused_by_the_name_of_what_is_wrong(
    tiny, results, monkeypatch, capsys, flags, place, value, message
):
    """Its checksum is right: somebody, or another version of this code, wrote it."""
    with monkeypatch.context() as patch:
        stop(patch, script, "evaluate", 2)
        script.main(command(results, flags))
    checkpoint = only_run(results) / CURRENT
    saved = part = read_checkpoint(checkpoint)
    *path, name = place.split()
    for each in path:
        part = part[int(each) if each.isdecimal() else each]
    if value == "absent":
        del part[name]
    else:
        part[name] = value
    write_checkpoint(checkpoint, saved)
    before = checkpoint.read_bytes()
    check_refused(script.main, command(results, flags), message, capsys, status=1)
    assert checkpoint.read_bytes() == before
    assert not results.exists()


def test_a_damaged_checkpoint_is_refused_and_without_it_the_run_begins_anew(tiny, results, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        stop(patch, script, "train_epoch", 2)
        script.main(command(results))
    checkpoint = only_run(results) / CURRENT
    checkpoint.write_bytes(checkpoint.read_bytes()[:-1000])
    damaged = f"{checkpoint} is damaged: its content does not match the checksum at its end; delete {checkpoint.parent}"
    check_refused(script.main, command(results), f"{damaged} to begin anew", capsys, status=1)
    checkpoint.unlink()
    assert script.main(command(results)) == 0
    assert "beginning" in capsys.readouterr().out
    assert read_rows(results)[0]["times_resumed"] == "0"


# Refusals.


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "--method"),
        ("--method neuralsrt", "did you mean 'neuralsort'"),
        ("--method softsort --dataset cifar", "did you mean 'cifar10"),
        ("--method softsort --p_k .2 .2", "p_k must be non-negative and sum to 1, got [0.2, 0.2] (sum 0.4)"),
        ("--method softsort --p_k .5 -.5 1", "must be a number between 0 and 1, got '-.5'"),
        ("--method softsort --m 4", "raise m"),
        ("--method softsort --inverse_temperature 0:1", "above 0 (1e-30 to 1e30), auto, or from:to as in 0.25:4"),
        ("--method softsort --inverse_temperature 1:2:3", "from:to as in 0.25:4, got '1:2:3'"),
        ("--method softsort --inverse_temperature auto:1", "from:to as in 0.25:4, got 'auto:1'"),
        ("--method smooth_topk --inverse_temperature 1:2", "the temperature of smooth_topk is fixed: give one number"),
        ("--method softsort --inverse_temperature 1:2 --implementation difftopk", "takes a fixed inverse temperature"),
        ("--method softsort --lr .1 --nloglr 3", "not allowed with"),
        ("--method softsort --lr 1e400", "must be a finite number above 0, got '1e400'"),
        ("--method softsort --weight_decay -1", "must be a number between 0 and 1000, got '-1'"),
        ("--method softsort --ema 1", "must be a number above 0 and below 1, got '1'"),
        ("--method softsort --n_epochs 0", "at least 1, got '0'"),
        ("--method softsort --batch_size 1000", "--batch_size must not exceed the 76 training images"),
        ("--method softsort --limit_train 5000", "limit_train"),
        ("--method softsort --label_noise .1 --noise_groups superclass", "superclass"),
        ("--method softsort --device cuda:99", "cuda:99 is not there"),
        ("--method softsort --threads 999999999999", "between 1 and 1024"),
        ("--method softsort --seed 0 --seeds 1", "not allowed with"),
        ("--method softsort --data_dir x\udcff", "must be UTF-8 text"),
        ("--method softsort --data_dir ~nosuchuser/x", "a user that is not known"),
        *(
            (f"--method softsort --mirror {text}", f"must be an address http://, https://, file://..., got '{text}'")
            for text in ("http://[::1", "http://", "ftp://a")
        ),
        ("--method softsort --results /dev/null --force", "and /dev/null is a device"),
        ("--method softsort --n_epoch 3", "unrecognized arguments: --n_epoch"),
    ],
)
def test_a_wrong_command_line_is_answered_with_a_sentence(tiny, results, capsys, flags, message):
    words = [*QUICK, "--n_epochs", "1", "--results", str(results), *flags.split()]
    check_refused(script.main, words, message, capsys)
    assert list(results.parent.iterdir()) == []


def test_compile_without_a_compiler_is_refused(tiny, results, monkeypatch, capsys):
    for name, value in (("PATH", ""), ("CXX", ""), ("CC", "")):
        monkeypatch.setenv(name, value)
    check_refused(script.main, command(results, "--compile"), "C++ compiler", capsys)


def test_a_run_that_cannot_be_leaves_no_row(tiny, results, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = "--dataset cifar100 --data_dir nothing --mirror file:///absent.tar.gz"
    check_refused(script.main, command(results, flags), "not available", capsys, status=1)
    assert not results.exists()


@pytest.mark.parametrize("content", ["run_id,a\nx,1,2\n", None])
def test_an_unusable_results_file_is_refused_before_training(tiny, results, capsys, monkeypatch, content):
    monkeypatch.setattr(script, "train_epoch", lambda *_: pytest.fail("trained"))
    results.write_text(content or "")
    if content is None:  # a file where the folder would be
        results /= "r.csv"
    check_refused(script.main, command(results), str(results.parent), capsys, status=1)
    assert content is None or results.read_text() == content


def test_a_backend_that_cannot_run_is_refused_before_anything_is_written(results, monkeypatch, capsys):
    monkeypatch.setenv("TOPK_LOSSES_BACKEND", "cuda")
    refused = "TOPK_LOSSES_BACKEND must be torch, numba or triton"
    check_refused(script.main, command(results, "--seeds 0 1"), refused, capsys)
    assert not list(results.parent.iterdir())


# The script itself.


def test_the_script_end_to_end_with_sigterm_and_kill(tmp_path):
    """Terminated, killed and resumed in three processes, against an undisturbed run in this one."""
    flags = "--limit_train 24 --limit_test 8 --batch_size 8"
    undisturbed, resumed = tmp_path / "undisturbed" / "r.csv", tmp_path / "resumed" / "r.csv"
    words = command(resumed, flags, "splitter_selection")

    first = Program(script.main, words, folder=tmp_path)
    first.wait_for("epoch 1/3")
    first.send_signal(signal.SIGTERM)
    status, _, message = first.end()
    assert status == 143
    assert "same command continues" in message
    assert "Traceback" not in message

    second = Program(script.main, words, folder=tmp_path)
    second.wait_for("continuing after epoch 1 of 3")
    second.wait_for("epoch 2/3")  # which a minute has not passed to save
    time.sleep(0.1)
    second.send_signal(signal.SIGKILL)
    assert second.end().returncode == -signal.SIGKILL

    third = subprocess.run([sys.executable, script.__file__, *words], capture_output=True, text=True, cwd=tmp_path)
    assert third.returncode == 0
    assert "continuing after epoch 1 of 3" in third.stdout
    assert third.stderr == ""

    assert script.main(command(undisturbed, flags, "splitter_selection")) == 0
    assert outcome(undisturbed) == outcome(resumed)
