"""Random numbers: the same seed draws the same, another seed, epoch or step something else, for each purpose.

Neither do seeds and steps add up: seed 7 in step 6 draws other numbers than seed 8 in step 5.
"""

import itertools
import shlex
from types import SimpleNamespace

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from data import cifar, embeddings, points, splits
from data.embeddings import Embeddings, load_embeddings
from data.splits import Split
from experiments import finetune_imagenet, train_beam_search, train_cifar100, train_knn
from experiments.common.objective import noise_generator
from models.heads import head
from scripts import relabel
from tests.experiments import scripts
from tests.experiments.scripts import name_of, rows_of

SEEDS = (*range(10), 2**31, 2**32 - 1)
NUMBERS = range(10)  # of epochs or steps
CPU = torch.device("cpu")


def noise_of_losses(seed: int, *numbers: int) -> torch.Tensor:
    loss_fn = SimpleNamespace()
    loss_fn.generator = noise_generator(CPU, seed, *numbers)
    return torch.rand(20, generator=loss_fn.generator)


def crops(seed: int, epoch: int) -> torch.Tensor:
    return torch.cat([drawn.flatten() for drawn in cifar.sample_crops(50, splits.epoch_generator(seed, epoch))])


def dropout(seed: int, step: int) -> torch.Tensor:
    return head(50, 3, apply_dropout=True).dropout_mask(4, seed, step)


OF_SEED_AND_NUMBER = {
    "order of images": lambda seed, epoch: splits.epoch_order(50, seed, epoch),
    "crops": crops,
    "order of embeddings": lambda seed, epoch: embeddings.epoch_order(50, seed, epoch),
    "partners of mixup": lambda seed, step: embeddings.mixup(50, 0.5, seed, step)[1],
    "shares of mixup": lambda seed, step: torch.tensor(embeddings.mixup(50, 1.0, seed, step)[0], dtype=torch.float64),
    "dropout": dropout,
    "noise of losses": noise_of_losses,
    "noise of losses in processes": lambda seed, rank: noise_of_losses(seed, 3, rank),
}


def digits_with_a_limit(seed: int) -> torch.Tensor:
    data = cifar.load_dataset("digits", "", seed=seed, limit_train=200)
    return torch.cat([data.train.inputs, data.valid.inputs])


def own_embeddings() -> Embeddings:
    rows = torch.arange(200.0).view(-1, 1)
    split = Split(rows, torch.arange(200) % 5)
    return Embeddings("own.pt", {"train": split, "test": split}, 5, {}, stamp=[])


OF_SEED = {
    "images that validate": lambda seed: cifar.load_dataset("digits", "", seed=seed).valid.inputs,
    "images of a limit": digits_with_a_limit,
    "rows that validate": lambda seed: embeddings.split_rows(200, 50, seed)[1],
    "rows of a limit": lambda seed: embeddings.limited_rows(200, 50, seed),
    "images of neighbours that validate": lambda seed: points.load_points("digits", "", seed=seed).valid.inputs,
    "images of neighbours of a limit": lambda seed: joined(points.load_points("digits", "", seed=seed, limit_train=99)),
    "embeddings of neighbours that validate": lambda seed: (
        points.points_of_embeddings(own_embeddings(), seed=seed).valid.inputs
    ),
    "embeddings of neighbours of a limit": lambda seed: joined(
        points.points_of_embeddings(own_embeddings(), seed=seed, limit_train=99)
    ),
}


def joined(data) -> torch.Tensor:
    """The inputs that train or validate, sorted by their content."""
    inputs = torch.cat([data.train.inputs, data.valid.inputs])
    return torch.tensor(sorted(inputs.flatten(1).tolist()))


def drawn(tensor: torch.Tensor) -> tuple:
    return tuple(tensor.flatten().tolist())


@pytest.mark.parametrize("purpose", OF_SEED_AND_NUMBER)
def test_each_seed_draws_for_itself_in_each_epoch_or_step(purpose):
    draw = OF_SEED_AND_NUMBER[purpose]
    pairs = [*itertools.product(SEEDS, NUMBERS)]
    found = {pair: drawn(draw(*pair)) for pair in pairs}
    torch.manual_seed(5)  # of no account
    assert all(drawn(draw(*pair)) == found[pair] for pair in ((7, 6), (8, 5), (0, 0)))
    alike = [(a, b) for a, b in itertools.combinations(pairs, 2) if found[a] == found[b]]
    assert not alike


@pytest.mark.parametrize("purpose", OF_SEED)
def test_each_seed_draws_for_itself(purpose):
    draw = OF_SEED[purpose]
    found = [drawn(draw(seed)) for seed in (0, 1, 2, 7)]
    torch.manual_seed(5)  # of no account
    assert drawn(draw(7)) == found[-1]
    assert len(set(found)) == 4


def test_each_seed_makes_other_labels_wrong():
    """Of the images that two seeds have in common."""
    wrong = []
    for seed in (0, 1, 0):
        right = cifar.load_dataset("digits", "", seed=seed).train
        noisy = cifar.load_dataset("digits", "", seed=seed, label_noise=0.5).train
        assert torch.equal(right.inputs, noisy.inputs)
        changed = (right.labels != noisy.labels).tolist()
        wrong.append({image.numpy().tobytes(): is_wrong for image, is_wrong in zip(right.inputs, changed)})
    assert wrong[0] == wrong[2]
    common = wrong[0].keys() & wrong[1].keys()
    differing = sum(wrong[0][image] != wrong[1][image] for image in common)
    assert len(common) > 1000
    assert differing > 0.3 * len(common)  # expected: 0.48


def test_purposes_do_not_share_their_numbers():
    orders = [splits.epoch_order(50, 3, 0), embeddings.epoch_order(8, 3, 0), embeddings.split_rows(50, 49, 3)[0]]
    orders += [torch.randperm(50, generator=torch.Generator().manual_seed(3)), embeddings.mixup(50, 1.0, 3, 0)[1]]
    shares = [noise_of_losses(3), crops(3, 0)[:20].double()]
    assert len({drawn(order) for order in (*orders, *shares)}) == len(orders) + len(shares)


def relabelled(tmp_path, source, flags: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Labels that train, the matrix of the noise and the estimated one, after scripts/relabel.py."""
    output = tmp_path / f"new{len([*tmp_path.iterdir()])}.pt"  # each call draws again
    assert relabel.main([str(source), *flags.split(), "--output", str(output)]) == 0
    matrices = [torch.load(path, weights_only=True) for path in relabel.matrix_files(output).values()]
    return load_embeddings(output)["train"].labels, *matrices


def test_each_draw_of_label_noise_and_of_known_labels(tmp_path):
    source = scripts.embeddings(tmp_path / "e.pt", num_classes=10, train=600)
    right = load_embeddings(source)["train"].labels
    wrong = torch.where(torch.rand(600, generator=torch.Generator().manual_seed(0)) < 0.4, (right + 1) % 10, right)
    torch.save({"clean_label": right.numpy(), "noisy_label": wrong.numpy()}, tmp_path / "human.pt")
    for flags in ("--num_valid 100 --label_noise .5", f"--num_valid 100 --human {tmp_path / 'human.pt'}"):
        one, again, other = (relabelled(tmp_path, source, f"{flags} --draw {draw}") for draw in (7, 7, 8))
        assert all(torch.equal(a, b) for a, b in zip(one, again))
        assert torch.equal(one[0], other[0]) == ("human" in flags)  # which people have given once
        assert torch.equal(one[1], other[1])
        assert not torch.equal(one[2], other[2])  # other labels are known


# Every draw of the scripts while they train.

COMMANDS = {
    train_cifar100: "--dataset digits --limit_train 60 --batch_size 16 --n_epochs 7 --method perturbed_topk "
    "--p_k .5 0 .5 --label_noise .5",
    finetune_imagenet: "-d EMBEDDINGS --batch_size 25 --n_epochs 3 --eval_freq 0 --lr .01 --apply_dropout "
    "--method noised_topk",
    train_knn: "--dataset digits --limit_train 80 --batch_size 20 --num_candidates 20 --n_epochs 7 --model linear "
    "--k 3 --method perturbed_topk",
    train_beam_search: "--dataset reversal --max_letters 3 --hidden_dim 8 --batch_size 16 --beam_size 3 --eval_freq 9 "
    "--pretrain_updates 8 --n_updates 9 --arm retain --method perturbed_topk",
}
FEWEST = 12  # numbers of a draw: of fewer two may be alike by chance


class Draws(TorchDispatchMode):
    """Notes what PyTorch's random operations draw."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple] = []
        self.in_training = 0  # number of draws up to the last training step

    def note_step(self, *_) -> None:
        self.in_training = len(self.found)

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        drawn_now = function(*arguments, **(named or {}))
        if torch.Tag.nondeterministic_seeded in function.tags and drawn_now.numel() >= FEWEST:
            self.found.append(drawn(drawn_now))
        return drawn_now


@pytest.mark.parametrize("script", COMMANDS, ids=name_of)
def test_no_two_draws_of_a_script_are_alike(script, tmp_path, monkeypatch):
    """Weights, splits, orders, crops, dropout and noise, in all steps of seeds 7 and 8."""
    monkeypatch.setattr(train_cifar100, "resnet_cifar", scripts.small_network)
    monkeypatch.setenv("TOPK_LOSSES_BACKEND", "torch")
    source = scripts.embeddings(tmp_path / "e.pt")
    found = {}
    for folder, seed in (("7", 7), ("8", 8), ("again", 7)):
        words = [*shlex.split(COMMANDS[script].replace("EMBEDDINGS", str(source))), "--seed", str(seed)]
        words += ["--device", "cpu", "--threads", "1", "--results", str(tmp_path / folder / "r.csv")]
        with Draws() as draws:
            handle = register_optimizer_step_post_hook(draws.note_step)
            assert script.main(words) == 0
            handle.remove()
        found[folder] = draws
        assert len(rows_of(tmp_path / folder / "r.csv")) == 1
    assert found["7"].found == found["again"].found
    both = [*found["7"].found[: found["7"].in_training], *found["8"].found[: found["8"].in_training]]
    if script in (finetune_imagenet, train_beam_search):  # rows and words are divided alike for all seeds
        both.remove(found["7"].found[0])
    assert len(both) > 30
    assert len(set(both)) == len(both)
