"""Points in memory: the published splits and pixels, torchvision's as the oracle."""

import pytest
import torch
import torchvision
from torchvision.transforms import Compose, Normalize, ToTensor

from data.embeddings import load_embeddings
from data.points import POINT_SETS, load_points, points_of_embeddings
from tests.data.small_sets import CIFARS, MNISTS, accept_cifar, write_cifar, write_mnist


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """MNIST, Fashion-MNIST and the CIFARs, of 120 and 30 random images."""
    root = tmp_path_factory.mktemp("downloads")
    for name in MNISTS:
        write_mnist(name, root, train=120, test=30)
    with pytest.MonkeyPatch.context() as patch:
        for name in CIFARS:
            write_cifar(name, root, train=120, test=30)
            accept_cifar(name, root, patch)
        yield root


@pytest.fixture(scope="module")
def content():
    """Row i of train and test holds 2 i and 2 i + 1."""
    rows = torch.arange(40, dtype=torch.float16).view(20, 2)
    train = {"train_embeddings": rows, "train_labels": torch.arange(20) % 3}
    return train | {"test_embeddings": rows[:6], "test_labels": torch.arange(6) % 3}


@pytest.mark.parametrize(
    ("name", "kind", "transform"),
    [
        ("mnist", torchvision.datasets.MNIST, ToTensor()),
        ("fashion_mnist", torchvision.datasets.FashionMNIST, Compose([ToTensor(), Normalize(0.2860, 0.3530)])),
    ],
)
def test_the_mnists_are_the_published_ones(folder, name, kind, transform):
    points = load_points(name, folder)
    assert (points.num_classes, points.train.inputs.shape[1:]) == (10, (1, 28, 28))
    assert [len(split) for split in (points.train, points.valid, points.test)] == [110, 10, 30]  # 55,000 and 5,000
    oracle = kind(folder, train=False, transform=transform)
    got = points.normalise(points.test.inputs)
    torch.testing.assert_close(got, torch.stack([image for image, _ in oracle]))
    assert points.test.labels.tolist() == [label for _, label in oracle]
    # Every training image trains or validates, once.
    both = torch.cat([points.train.inputs, points.valid.inputs]).flatten(1)
    assert sorted(both.tolist()) == sorted(kind(folder).data.flatten(1).tolist())


# Of Grover et al. 2019: 55,000 and 5,000 images of the MNISTs, 45,000 and 5,000 of CIFAR-10. Of the others a tenth.
VALIDATE = {
    "mnist": 5000 / 60000,
    "fashion_mnist": 5000 / 60000,
    "cifar10": 5000 / 50000,
    "cifar100": 0.1,
    "digits": 0.1,
}


@pytest.mark.parametrize("name", POINT_SETS)
def test_as_many_validate_as_published(folder, name):
    points = load_points(name, folder)
    sizes = [len(split) for split in (points.train, points.valid, points.test)]
    complete = 1437 if name == "digits" else 120
    assert sizes[1] == round(complete * VALIDATE[name])
    assert sum(sizes[:2]) == complete


@pytest.mark.parametrize("name", CIFARS)
def test_the_cifars_are_normalised_as_published(folder, name):
    points = load_points(name, folder)
    # CIFAR-10's, also for CIFAR-100.
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2023, 0.1994, 0.2010)
    oracle = CIFARS[name][0](folder, train=False, transform=Compose([ToTensor(), Normalize(mean, std)]))
    expected = torch.stack([image for image, _ in oracle])
    torch.testing.assert_close(points.normalise(points.test.inputs), expected, rtol=1e-4, atol=1e-5)
    assert points.test.labels.tolist() == [label for _, label in oracle]


def test_digits_have_one_channel_and_a_tenth_validates(tmp_path):
    points = load_points("digits", tmp_path)
    assert [len(split) for split in (points.train, points.valid, points.test)] == [1293, 144, 360]
    pixels = points.normalise(torch.cat([points.train.inputs, points.valid.inputs]))
    assert pixels.shape[1:] == (1, 32, 32)
    assert (pixels.mean().item(), pixels.std().item()) == pytest.approx((0, 1), abs=1e-3)


def test_a_seed_chooses_who_validates_and_a_limit_takes_some(tmp_path):
    whole, other, limited = (
        load_points("digits", tmp_path, seed=seed, limit_train=limit)
        for seed, limit in ((0, None), (1, None), (0, 100))
    )
    assert not torch.equal(whole.valid.inputs, other.valid.inputs)
    assert [len(split) for split in (limited.train, limited.valid, limited.test)] == [90, 10, 360]
    assert torch.equal(whole.test.inputs, other.test.inputs)
    assert load_points("digits", tmp_path, limit_train=6).num_classes == 10
    with pytest.raises((ValueError, OSError), match=r"--limit_train 1438 exceeds the 1437 training rows"):
        load_points("digits", tmp_path, limit_train=1438)


def test_embeddings_keep_their_dtype_and_a_tenth_validates(content, tmp_path):
    torch.save(content, tmp_path / "e.pt")
    points = points_of_embeddings(load_embeddings(tmp_path / "e.pt"))
    assert (points.num_classes, points.train.inputs.shape[1:]) == (3, (2,))
    assert [len(split) for split in (points.train, points.valid, points.test)] == [18, 2, 6]
    assert points.test.inputs.dtype == torch.float16
    assert points.normalise(points.test.inputs).tolist() == [[2.0 * row, 2.0 * row + 1] for row in range(6)]
    values = torch.cat([points.train.inputs, points.valid.inputs])[:, 0].sort().values
    assert values.tolist() == list(range(0, 40, 2))
    pairs = zip(points.train.inputs[:, 0].tolist(), points.train.labels.tolist())
    assert all(label == value // 2 % 3 for value, label in pairs)


def test_a_valid_split_of_the_embeddings_own_validates(content, tmp_path):
    content |= {"valid_embeddings": content["test_embeddings"][:4] + 1, "valid_labels": content["test_labels"][:4]}
    torch.save(content, tmp_path / "e.pt")
    points = points_of_embeddings(load_embeddings(tmp_path / "e.pt"))
    assert (len(points.train), points.valid.inputs[:, 0].tolist()) == (20, [1, 3, 5, 7])
    del content["test_embeddings"], content["test_labels"]
    torch.save(content, tmp_path / "e.pt")
    with pytest.raises((ValueError, OSError), match="no test split"):
        points_of_embeddings(load_embeddings(tmp_path / "e.pt"))
