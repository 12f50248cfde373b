"""Training on images gives the figures of a plain loop: data, network, optimizer, steps, evaluation.

A network of two layers is in the place of the ResNet, in which Adam makes differences of rounding large within a step.
"""

import math

import pytest
import torch
from torch import nn

from data.cifar import (
    DIGITS_MEAN,
    DIGITS_STD,
    crop_and_flip,
    load_complete,
    load_dataset,
    sample_crops,
)
from data.splits import epoch_generator, epoch_order
from experiments import train_cifar100 as script
from experiments.common.objective import noise_generator
from tests.experiments.oracle import check_choice, check_history, history_of, run, top_k
from tests.experiments.scripts import small_network
from topk_losses import make_loss

FLAGS = "--dataset digits --limit_train 600 --batch_size 64 --n_epochs 3 --seed 1 "
BATCH = 64
EPOCHS = 3
SEED = 1
# The published settings for CIFAR-100, whatever the script's defaults are: all scores, and cross-entropy beside P_K.
SORTS = {"m": None, "inverse_temperature": 0.0625, "top1_mode": "smce"}
NETWORK = {**SORTS, "inverse_temperature": 0.5, "distribution": "logistic_phi", "art_lambda": 0.5}
HALF = [0.5, 0, 0, 0, 0.5]
QUARTER = [0.25, 0, 0, 0, 0.75]
EVEN = [0.2] * 5
TOP5 = [0, 0, 0, 0, 1.0]
CASES = {  # the flags, and what they must come to
    "noise": ("--method softmax_cross_entropy --label_noise .5", [1.0, 0, 0, 0, 0], {}, {"label_noise": 0.5}),
    "people": ("--method softsort --noisy_labels PEOPLE", EVEN, SORTS, {"people": True}),
    "bf16": ("--method neuralsort --p_k .5 0 0 0 .5 --precision bf16", HALF, SORTS, {"bf16": True}),
    "recipe": (
        "--method splitter_selection --p_k .25 0 0 0 .75 --lr .003 --lr_schedule cosine --weight_decay .5 --ema .7",
        QUARTER,
        NETWORK,
        {"lr": 0.003, "cosine": True, "weight_decay": 0.5, "ema": 0.7},
    ),
    "noised": ("--method noised_topk --p_k 0 0 0 0 1", TOP5, {}, {}),
    "sorts": ("--method softsort", EVEN, SORTS, {}),
    "rarely": ("--method softsort --ema .7 --eval_freq 2", EVEN, SORTS, {"ema": 0.7, "evaluated": (2, 3)}),
    "schedule": ("--method softsort --inverse_temperature .02:1", EVEN, SORTS, {"betas": (0.02, 1)}),
}


def normalised(images: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(values, dtype=torch.float64).view(3, 1, 1) for values in (DIGITS_MEAN, DIGITS_STD))
    images = images.float() * (1 / (255 * std)).float() - (mean / std).float()  # in this order for the same roundings
    return images.contiguous(memory_format=torch.channels_last)


def plain_loop(
    method, p_k, settings, label_noise=0.0, bf16=False, lr=0.001, cosine=False, weight_decay=0.0, ema=0.0, betas=None,
    people=False, evaluated=(1, 2, 3),
):  # fmt: skip
    """Return what a loop without any of the script's functions finds in each epoch with an evaluation.

    people: labels of training and validation are the next digit. evaluated: those epochs.
    """
    clean = load_dataset("digits", "", seed=SEED, limit_train=600)
    noisy = load_dataset("digits", "", seed=SEED, limit_train=600, label_noise=label_noise)
    given = (noisy.train.labels + people) % 10
    splits = [("valid", clean.valid.inputs, (clean.valid.labels + people) % 10)]
    splits += [("test", clean.test.inputs, clean.test.labels)]
    if people:
        splits += [("clean", clean.valid.inputs, clean.valid.labels)]
    torch.manual_seed(SEED)
    model = small_network("resnet18", 10).to(memory_format=torch.channels_last)
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}  # what is evaluated
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=weight_decay, fused=True)
    loss_fn = make_loss(method, p_k, num_classes=10, **settings)
    steps = len(clean.train) // BATCH
    taken = 0
    found = []
    crops_of = []
    for epoch in range(1, EPOCHS + 1):
        model.train(), loss_fn.train()
        losses = []
        crops = []
        hits = []
        generator = epoch_generator(SEED, epoch)
        loss_fn.generator = noise_generator(torch.device("cpu"), SEED, epoch, 0)
        for rows in epoch_order(len(clean.train), SEED, epoch).split(BATCH)[:steps]:
            crops.append(sample_crops(BATCH, generator))
            images = normalised(crop_and_flip(noisy.train.inputs[rows], *crops[-1]))
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                logits = model(images)
            elapsed = taken / (EPOCHS * steps)
            if betas:  # evenly in the logarithm
                loss_fn.inverse_temperature = betas[0] * (betas[1] / betas[0]) ** elapsed
            loss = loss_fn(logits.float(), given[rows])
            hits.append(top_k(logits.float(), given[rows]))
            for group in optimizer.param_groups:
                group["lr"] = lr * (1 + math.cos(math.pi * elapsed)) / 2 if cosine else lr
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            share = 0 if taken == 0 else ema  # the average begins with the weights after the first step
            for name, tensor in model.state_dict().items():
                kept[name] = kept[name].lerp(tensor, 1 - share) if tensor.is_floating_point() else tensor.clone()
            losses.append(loss.item())
            taken += 1
        crops_of.append(torch.cat([torch.stack([tops, lefts]) for tops, lefts, _ in crops], dim=1))
        found.append({"epoch": epoch, "train_loss": sum(losses) / steps})
        found[-1] |= {f"train_{key}": sum(batch[key] for batch in hits) / steps for key in hits[0]}
        averaged = small_network("resnet18", 10).to(memory_format=torch.channels_last).eval()
        averaged.load_state_dict(kept)
        loss_fn.eval()
        for name, inputs, labels in splits:
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                logits = averaged(normalised(inputs))
            found[-1][f"{name}_loss"] = loss_fn(logits.float(), labels).item()
            found[-1] |= {f"{name}_{key}": value for key, value in top_k(logits.float(), labels).items()}
    assert all((crops_of[0] != crops).float().mean() > 0.5 for crops in crops_of[1:])
    wrong = (noisy.train.labels != clean.train.labels).double().mean().item()
    assert wrong == pytest.approx(label_noise * 4 / 5, abs=0.1)  # of five labels one is the old one
    assert torch.equal(noisy.valid.labels, clean.valid.labels)
    return [figures for figures in found if figures["epoch"] in evaluated]


@pytest.mark.parametrize("case", CASES)
def test_the_figures_are_those_of_a_plain_training_loop(case, results, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "resnet_cifar", small_network)
    flags, p_k, settings, options = CASES[case]
    right = load_complete("digits", tmp_path)[0].labels.numpy()
    torch.save({"clean_label": right, "noisy_label": (right + 1) % 10}, tmp_path / "people.pt")
    (row,) = run(script, FLAGS + flags.replace("PEOPLE", str(tmp_path / "people.pt")), results)
    expected = plain_loop(row["method"], p_k, settings, **options)
    check_history(history_of(results, row), expected)
    check_choice(row, expected, "epoch")
    assert [float(share) for share in row["p_k"].split()] == p_k
    if case == "bf16":
        fp32 = plain_loop(row["method"], p_k, settings)
        assert fp32[-1]["valid_loss"] != pytest.approx(expected[-1]["valid_loss"], rel=1e-4)


def test_noise_of_a_loss_differs_between_epochs():
    loss_fn = nn.Module()
    drawn = []
    for epoch in (1, 2):
        loss_fn.generator = noise_generator(torch.device("cpu"), SEED, epoch, 0)
        drawn.append(torch.rand(4, generator=loss_fn.generator))
    assert not torch.equal(*drawn)
