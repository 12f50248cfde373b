"""From flags to an objective: schedules, and settings that only some losses have."""

import pytest
import torch

from experiments import finetune_imagenet, train_cifar100
from experiments.common import flags
from experiments.common.objective import Objective, build_loss, fill_in_loss
from experiments.common.settings import OWN_SETTINGS, columns, identifying
from tests.experiments.scripts import name_of
from topk_losses import METHODS, TopKCrossEntropyLoss
from topk_losses.classification import own_settings
from topk_losses.methods import ABBREVIATIONS

CPU = torch.device("cpu")


def parsed(*words: str):
    parser = flags.make_parser("")
    flags.add_loss_flags(parser)
    return parser.parse_args(words)


def test_a_schedule_of_the_temperature_goes_in_equal_factors():
    config = fill_in_loss(parsed("--method", "softsort", "--inverse_temperature", "0.25:4"), "sm", {})
    loss_fn = build_loss(config, 5, CPU)
    objective = Objective(config, loss_fn, CPU)
    for progress, beta in ((0, 0.25), (0.5, 1), (0.75, 2), (1, 4)):
        objective.set_progress(progress)
        assert float(loss_fn.inverse_temperature) == pytest.approx(beta)
        assert objective.temperature() == {"inverse_temperature": pytest.approx(beta)}
    constant = Objective(config | {"inverse_temperature": 0.1}, loss_fn, CPU)
    constant.set_progress(0.5)  # a number is no schedule
    assert float(loss_fn.inverse_temperature) == pytest.approx(4)
    assert constant.temperature() == {}


@pytest.mark.parametrize("script", [train_cifar100, finetune_imagenet])
def test_a_setting_of_a_single_loss_is_a_flag_and_names_the_run(script):
    """test_run_ids.py has that a setting which is not used names no run."""
    names = {item.name for item in identifying(name_of(script))}
    assert set(OWN_SETTINGS) <= names & vars(parsed("--method", "softsort")).keys()


def test_settings_at_zero_are_the_loss_without():
    config = fill_in_loss(parsed("--method", "ldr_kl", "--margin", "0"), "sm", {})
    assert columns(config)["margin"] is None
    assert columns(fill_in_loss(parsed("--method", "ldr_kl", "--margin", ".5"), "sm", {}))["margin"] == 0.5


def test_forward_correction_of_no_noise_is_refused():
    with pytest.raises(ValueError, match="is softmax_cross_entropy: take that method"):
        fill_in_loss(parsed("--method", "forward_correction", "--noise_rate", "0"), "sm", {})


@pytest.mark.parametrize("method", METHODS)
def test_flags_of_another_loss_are_refused_with_those_that_the_method_takes(method):
    own = own_settings(METHODS[method].loss or TopKCrossEntropyLoss)
    for name in {*OWN_SETTINGS, "T"} - {*own, "label_smoothing"}:  # which all losses take
        config = columns(fill_in_loss(parsed("--method", method), "sm", {})) | {name: 0.5}
        flag = {"T": "noise_matrix"}.get(name, name)
        with pytest.raises(ValueError, match=f"^{method} does not take --{flag}; it takes ") as error:
            build_loss(config, 6, CPU, **{name: 0.5})
        taken = str(error.value).partition("it takes ")[2].replace("--noise_matrix", "--T")
        for flag in taken.replace("none of its own", "").split(", "):
            assert flag in ("", "--inverse_temperature") or flag.removeprefix("--") in own


@pytest.mark.parametrize("short", ABBREVIATIONS)
def test_the_name_of_papers_is_answered_with_the_name_here(short, capsys):
    with pytest.raises(SystemExit):
        parsed("--method", short)
    assert f"no method {short!r} here; did you mean {ABBREVIATIONS[short]}?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "p_k", "beta", "mode"),
    [
        (["softmax_cross_entropy"], [1.0, 0, 0, 0, 0], None, None),
        (["smooth_topk"], [0, 0, 0, 0, 1.0], 1.0, None),
        (["neuralsort"], [0.2] * 5, 0.0625, "smce"),
        (["bitonic__non_sparse", "--inverse_temperature", "2"], [0.2] * 5, 2.0, "smce"),
        (["softsort", "--inverse_temperature", ".25:4", "--top1_mode", "sort"], [0.2] * 5, "0.25:4", "sort"),
        (["sinkhorn_sort", "--inverse_temperature", "auto"], [0.2] * 5, 100.0, "smce"),  # its default is auto
    ],
)
def test_defaults_are_filled_in(words, p_k, beta, mode, capsys):
    config = fill_in_loss(parsed("--method", *words, "--m", "7"), "smce", train_cifar100.INVERSE_TEMPERATURES)
    assert (config["p_k"], config["inverse_temperature"], config["top1_mode"]) == (p_k, beta, mode)
    assert config["m"] == (7 if mode else None)
    note = "" if mode else f"note: --m is left out, since {words[0]} sorts nothing\n"
    assert capsys.readouterr().err == note
