"""From flags to losses: schedules, and settings that only some losses have."""

import pytest

from experiments import finetune_imagenet, train_cifar100
from experiments.common import flags, losses
from topk_losses import make_loss


def parsed(*words: str):
    parser = flags.make_parser("")
    flags.add_loss_flags(parser)
    return parser.parse_args(words)


def test_a_schedule_of_the_temperature_goes_in_equal_factors():
    loss_fn = make_loss("softsort", num_classes=5)
    for progress, beta in ((0, 0.25), (0.5, 1), (0.75, 2), (1, 4)):
        losses.set_temperature(loss_fn, "0.25:4", progress)
        assert float(loss_fn.inverse_temperature) == pytest.approx(beta)
        assert losses.current_temperature(loss_fn, "0.25:4") == {"inverse_temperature": pytest.approx(beta)}
    losses.set_temperature(loss_fn, 0.1, 0.5)  # a number is no schedule
    assert float(loss_fn.inverse_temperature) == pytest.approx(4)
    assert losses.current_temperature(loss_fn, 0.1) == {}


@pytest.mark.parametrize("script", [train_cifar100, finetune_imagenet])
def test_a_setting_of_a_single_loss_is_a_flag_and_names_the_run(script):
    """test_run_ids.py has that None names no run."""
    assert set(losses.OWN_SETTINGS) <= {*script.IDENTITY} & vars(parsed("--method", "softsort")).keys()


def test_settings_at_zero_are_the_loss_without():
    settings = losses.loss_settings(parsed("--method", "ldr_kl", "--margin", "0"), "sm", {})
    assert settings["margin"] is None
    assert losses.loss_settings(parsed("--method", "ldr_kl", "--margin", ".5"), "sm", {})["margin"] == 0.5


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
def test_defaults_are_filled_in(words, p_k, beta, mode):
    settings = losses.loss_settings(parsed("--method", *words, "--m", "7"), "smce", train_cifar100.INVERSE_TEMPERATURES)
    assert (settings["p_k"], settings["inverse_temperature"], settings["top1_mode"]) == (p_k, beta, mode)
    assert settings["m"] == (7 if mode else None)
