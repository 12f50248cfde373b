"""The nearest-neighbour classifier has the figures of a plain loop, which looks for neighbours one query at a time."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy

from data.cifar import epoch_order
from data.points import load_points
from experiments import train_knn as script
from experiments.common.objective import noise_generator
from models.embedders import embedder
from tests.experiments.oracle import check_choice, check_history, history_of, run
from topk_losses import make_operator

K, QUERIES, CANDIDATES, EPOCHS, SEED, LIMIT = 4, 30, 40, 3, 2, 300
FLAGS = (
    f"--dataset digits --limit_train 300 --model linear --dim 6 --k {K} --batch_size {QUERIES} "
    f"--num_candidates {CANDIDATES} --n_epochs {EPOCHS} --seed {SEED} "
)
CASES = {
    # Published: temperature 16, learning rate 10^-3, weight decay 5e-4, and the mass itself as the loss.
    "published": ("--method neuralsort", {"method": "neuralsort", "beta": 1 / 16}),
    "log_mass": (
        "--method softsort --inverse_temperature .1 --loss log_mass --lr .003",
        {"method": "softsort", "beta": 0.1, "log": True, "lr": 0.003},
    ),
    "noise": ("--method perturbed_topk --lr .01", {"method": "perturbed_topk", "lr": 0.01}),
    "bf16": ("--method neuralsort --precision bf16", {"method": "neuralsort", "beta": 1 / 16, "bf16": True}),
    "network": (
        "--method softmax_cross_entropy --prediction network --lr .1 --weight_decay .1",
        {"lr": 0.1, "weight_decay": 0.1},
    ),
}


def majority(labels: list[int]) -> int:
    """The most frequent of the neighbours' labels, nearest first; of equally frequent ones the nearest."""
    return max(labels, key=labels.count)


def plain_loop(method=None, beta=None, log=False, lr=0.001, weight_decay=5e-4, bf16=False):
    """Return what a loop without any of the script's functions finds in each epoch."""
    points = load_points("digits", "", seed=SEED, limit_train=LIMIT)
    train, inputs = points.train, points.normalise(points.train.inputs)
    torch.manual_seed(SEED)
    embed = embedder("linear", points.train.inputs.shape[1:], 6)
    classify = None if method else torch.nn.Linear(6, 10)
    weights = [*embed.parameters(), *(classify.parameters() if classify else ())]
    optimizer = torch.optim.SGD(weights, lr, momentum=0.9, weight_decay=weight_decay)
    operator = make_operator(method, CANDIDATES, K, beta) if method else None
    steps, found = len(train) // QUERIES, []

    def embedded(images):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return embed(images).float()

    for epoch in range(1, EPOCHS + 1):
        queries, candidates = (epoch_order(len(train), SEED, 2 * epoch + number) for number in (0, 1))
        candidates = candidates.repeat(2 + steps * CANDIDATES // len(train))  # as often as it takes
        losses = []
        noise = SimpleNamespace()  # whose generator draws what the script's loss draws
        noise.generator = noise_generator(torch.device("cpu"), SEED, epoch)
        for asked, others in zip(queries.split(QUERIES)[:steps], candidates.split(CANDIDATES)):
            labels = train.labels[asked]
            if operator:
                differences = embedded(inputs[asked]).unsqueeze(1) - embedded(inputs[others])
                itself = asked.unsqueeze(1) == others
                scores = (-differences.square().sum(2)).masked_fill(itself, -torch.inf)
                right = (labels.unsqueeze(1) == train.labels[others]) & ~itself
                mass = (operator(scores, generator=noise.generator).sum(1) * right).sum(1)[
                    right.any(1)
                ]  # of queries that have a right candidate
                loss = (-(mass / K).log() if log else -mass).sum() / QUERIES
            else:
                loss = cross_entropy(classify(embedded(inputs[asked])), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found.append({"epoch": epoch, "train_loss": sum(losses) / steps})
        with torch.no_grad():
            places = embedded(inputs)
            for name, split in (("valid", points.valid), ("test", points.test)):
                asked, right = embedded(points.normalise(split.inputs)), 0
                for place, label in zip(asked, split.labels.tolist()):
                    nearest = (place - places).square().sum(1).argsort()[:K]
                    predicted = int(classify(place).argmax()) if classify else majority(train.labels[nearest].tolist())
                    right += predicted == label
                found[-1][f"{name}_top1"] = right / len(split)
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_figures_are_those_of_a_plain_training_loop(case, results):
    flags, options = CASES[case]
    (row,) = run(script, FLAGS + flags, results)
    expected = plain_loop(**options)
    if case == "bf16":  # of which many are equally near: by rounding, one or the other is nearer
        expected = [{"train_loss": figures["train_loss"]} for figures in expected]
    else:
        check_choice(row, expected, "epoch", ks=[1])
    check_history(history_of(results, row), expected)
    fp32 = plain_loop(**{**options, "bf16": False})
    assert (fp32[-1]["train_loss"] == pytest.approx(expected[-1]["train_loss"], rel=1e-5)) == (case != "bf16")
