"""Points in memory: the published splits and pixels, torchvision's as the oracle."""

import struct

import pytest
import torch
import torchvision
from torchvision.transforms import Compose, Normalize, ToTensor

from data.embeddings import load_embeddings
from data.points import load_points, points_of_embeddings


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """MNIST and Fashion-MNIST as torchvision unpacks them, of 120 and 30 random images."""
    root = tmp_path_factory.mktemp("downloads")
    generator = torch.Generator().manual_seed(0)
    for name in ("MNIST", "FashionMNIST"):
        raw = root / name / "raw"
        raw.mkdir(parents=True)
        for part, count in (("train", 120), ("t10k", 30)):
            images = torch.randint(256, (count, 28, 28), dtype=torch.uint8, generator=generator)
            labels = torch.randint(10, (count,), dtype=torch.uint8, generator=generator)
            header = struct.pack(">4i", 0x803, count, 28, 28)
            (raw / f"{part}-images-idx3-ubyte").write_bytes(header + images.numpy().tobytes())
            (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 0x801, count) + labels.numpy().tobytes())
    return root


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
