"""LDR-KL warns where its settings make it cross-entropy, and nowhere else."""

import shlex
import warnings

import pytest
import torch
from torch.nn.functional import cross_entropy

from experiments import finetune_imagenet
from experiments.common.objective import build_loss, fill_in_loss
from studies import heads
from topk_losses import LDRKLLoss, make_loss


def warned(build):
    """What a call returns, and whether it warns, once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = build()
    assert all(item.category is UserWarning and "cross-entropy" in str(item.message) for item in caught)
    assert len(caught) <= 1
    return made, len(caught) == 1


def gradient(loss_fn, logits, labels) -> torch.Tensor:
    logits = logits.clone().requires_grad_()
    return torch.autograd.grad(loss_fn(logits, labels), logits)[0]


@pytest.mark.parametrize("margin", [0, 0.1, 1.0])
@pytest.mark.parametrize("inverse_temperature", [None, "auto", 0.25, 0.5, 0.99, 1, 1.0, 2.0])
@pytest.mark.parametrize("make", [LDRKLLoss, lambda **settings: make_loss("ldr_kl", **settings)], ids=["class", "name"])
def test_it_warns_where_its_gradients_are_those_of_cross_entropy(make, inverse_temperature, margin):
    loss_fn, says_so = warned(lambda: make(inverse_temperature=inverse_temperature, margin=margin))
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(64, 12, dtype=torch.float64, generator=generator)
    labels = torch.randint(12, (64,), generator=generator)
    same = torch.allclose(gradient(loss_fn, logits, labels), gradient(cross_entropy, logits, labels), atol=1e-9)
    assert says_so == same
    assert not warned(lambda: loss_fn(logits, labels))[1]  # at construction, not at each call


def test_a_temperature_that_is_learned_does_not_stay_at_1():
    beta = torch.nn.Parameter(torch.tensor(1.0))
    assert not warned(lambda: LDRKLLoss(beta))[1]


@pytest.mark.parametrize("flags", [*heads.ldr_kl(heads.LDR_KL), *heads.ldr_kl(heads.MORE_LDR_KL), "", "--margin 0"])
def test_the_settings_of_studies_train_and_only_cross_entropys_warn(flags):
    """Those with margin 0 have another temperature."""
    args = finetune_imagenet.parse_arguments(["--method", "ldr_kl", *shlex.split(flags)])
    config = vars(args) | fill_in_loss(args, "sm", {})
    loss_fn, says_so = warned(lambda: build_loss(config, 5, torch.device("cpu")))
    assert says_so == (flags in ("", "--margin 0"))
    assert gradient(loss_fn, torch.randn(4, 5), torch.arange(4)).isfinite().all()
