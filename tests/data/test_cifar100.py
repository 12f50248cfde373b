"""data/cifar100.py: fetching and mending, splits, label noise, and the batched augmentation.

The archives here are small: the published pickle layout with random pixels, served from 127.0.0.1, and
torchvision's MD5 sums replaced by theirs. Each image carries its own number in its first three bytes. The
real CIFAR-100 is read only where a copy exists: in $CIFAR100_DIR or in data/downloads.
"""

import hashlib
import os
import pickle
import shutil
import socket
import tarfile
import time
import zlib
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from data.cifar100 import (
    CIFAR_MEAN,
    CIFAR_STD,
    DIGITS_MEAN,
    DIGITS_STD,
    DatasetUnavailableError,
    crop_and_flip,
    epoch_generator,
    epoch_order,
    load_complete,
    load_dataset,
    noisy_labels,
    normalise,
    sample_crops,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.datasets import CIFAR100
from torchvision.transforms import functional as tvf

from data import cifar100
from tests.processes import Program

REPOSITORY = Path(__file__).parents[2]
TRAIN, TEST = 400, 200
NOWHERE = "http://127.0.0.1:9"  # the discard port: refuses connections


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


def fake_part(count: int, first_number: int, generator: np.random.Generator) -> dict:
    """One pickled part: image i holds the number first_number + i, fine label i mod 100."""
    pixels = generator.integers(0, 256, (count, 3072), dtype=np.uint8)
    numbers = np.arange(first_number, first_number + count)
    pixels[:, 0], pixels[:, 1], pixels[:, 2] = numbers >> 16, (numbers >> 8) & 255, numbers & 255
    return {"data": pixels, "fine_labels": (np.arange(count) % 100).tolist()}


def numbers_of(images: torch.Tensor) -> torch.Tensor:
    """The numbers that fake_part put into images (N, 3, 32, 32)."""
    first = images[:, 0, 0, :3].long()
    return (first[:, 0] << 16) + (first[:, 1] << 8) + first[:, 2]


@pytest.fixture(scope="module")
def archive100(tmp_path_factory) -> SimpleNamespace:
    """What the home page publishes: the archive, torchvision's attributes of it, and what was pickled."""
    home = tmp_path_factory.mktemp("published")
    folder = home / "cifar-100-python"
    folder.mkdir()
    generator = np.random.default_rng(0)
    superclass_of = generator.permutation(np.repeat(np.arange(20), 5))
    parts = {}
    for name, count, first_number in (("train", TRAIN, 0), ("test", TEST, TRAIN)):
        part = fake_part(count, first_number, generator)
        part["coarse_labels"] = superclass_of[part["fine_labels"]].tolist()
        parts[name] = part
        (folder / name).write_bytes(pickle.dumps(part, protocol=2))
    meta = {"fine_label_names": [f"class{i}" for i in range(100)], "coarse_label_names": []}
    (folder / "meta").write_bytes(pickle.dumps(meta, protocol=2))
    archive = home / "cifar-100-python.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        tar.add(folder, "cifar-100-python")
    attributes = {
        "tgz_md5": md5(archive),
        "train_list": [["train", md5(folder / "train")]],
        "test_list": [["test", md5(folder / "test")]],
        "meta": {"filename": "meta", "key": "fine_label_names", "md5": md5(folder / "meta")},
    }
    return SimpleNamespace(archive=archive, attributes=attributes, parts=parts, superclass_of=superclass_of)


@pytest.fixture
def published(archive100, monkeypatch) -> SimpleNamespace:
    for name, value in archive100.attributes.items():
        monkeypatch.setattr(CIFAR100, name, value)
    monkeypatch.setattr(CIFAR100, "url", f"{NOWHERE}/cifar-100-python.tar.gz")
    return archive100


@pytest.fixture
def data_dir(published, tmp_path) -> Path:
    """A complete data_dir without the archive."""
    shutil.unpack_archive(published.archive, tmp_path, filter="data")
    return tmp_path


@pytest.fixture
def server(server, published):
    server.content = published.archive.read_bytes()
    return server


def assert_complete(dataset: cifar100.Dataset) -> None:
    assert [len(split) for split in (dataset.train, dataset.valid, dataset.test)] == [380, 20, 200]
    everything = torch.cat([numbers_of(s.images) for s in (dataset.train, dataset.valid, dataset.test)])
    assert everything.sort().values.tolist() == list(range(TRAIN + TEST))


# --- fetching and mending -------------------------------------------------------------------------------


@pytest.mark.parametrize("mirror", ["{url}", "{url}/", "{url}/cifar-100-python.tar.gz", "{file}", "{folder}", None])
def test_what_is_missing_is_fetched_once(server, published, tmp_path, monkeypatch, mirror):
    monkeypatch.setattr(CIFAR100, "url", f"{server.endpoint}/cifar-100-python.tar.gz")  # what is asked without a mirror
    archive = published.archive
    places = {"url": server.endpoint, "file": archive.as_uri(), "folder": archive.parent.as_uri()}
    mirror = mirror and mirror.format(**places)
    assert_complete(load_dataset("cifar100", tmp_path / "new" / "folder", mirror=mirror))
    assert set(server.paths) <= {"/cifar-100-python.tar.gz"}
    server.paths.clear()
    assert_complete(load_dataset("cifar100", tmp_path / "new" / "folder", mirror=mirror))
    assert server.paths == []


def test_complete_folder_is_read_and_left_as_it_was(data_dir):
    before = sorted((path, path.stat().st_mtime_ns) for path in [data_dir, *data_dir.rglob("*")])
    data_dir.chmod(0o555)
    try:
        assert_complete(load_dataset("cifar100", data_dir))
    finally:
        data_dir.chmod(0o755)
    assert sorted((path, path.stat().st_mtime_ns) for path in [data_dir, *data_dir.rglob("*")]) == before


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def flip_a_byte(path: Path) -> None:
    body = path.read_bytes()
    path.write_bytes(body[:50] + bytes([body[50] ^ 1]) + body[51:])


@pytest.mark.parametrize("damage", [truncate, flip_a_byte, Path.unlink])
@pytest.mark.parametrize("name", ["train", "test", "meta"])
def test_damaged_file_is_unpacked_again_without_the_network(published, data_dir, name, damage):
    folder = data_dir / "cifar-100-python"
    shutil.copy(published.archive, data_dir)
    damage(folder / name)
    assert_complete(load_dataset("cifar100", data_dir, mirror=NOWHERE))
    assert sorted(path.name for path in folder.iterdir()) == ["meta", "test", "train"]


def test_cut_connection_is_reported_and_the_next_start_mends_it(server, tmp_path):
    server.faults.extend(["truncate"] * 2)
    with pytest.raises(DatasetUnavailableError, match=r"corrupted.*start again if the connection was cut"):
        load_dataset("cifar100", tmp_path, mirror=server.endpoint)
    assert not (tmp_path / "cifar-100-python").exists()
    assert 0 < (tmp_path / "cifar-100-python.tar.gz").stat().st_size < len(server.content)
    assert_complete(load_dataset("cifar100", tmp_path, mirror=server.endpoint))


@pytest.mark.parametrize("scheme", ["http", "file"])
def test_another_file_under_that_name_is_refused(server, published, tmp_path, monkeypatch, scheme):
    monkeypatch.setattr(CIFAR100, "tgz_md5", "0" * 32)
    mirror = server.endpoint if scheme == "http" else published.archive.as_uri()
    with pytest.raises(DatasetUnavailableError, match=r"corrupted.*MD5 0000"):
        load_dataset("cifar100", tmp_path, mirror=mirror)
    assert not (tmp_path / "cifar-100-python").exists()


@pytest.mark.parametrize("mirror", [NOWHERE, "file:///nowhere/at/all", "{url}/other"])
def test_unreachable_address_says_what_to_do(server, tmp_path, mirror):
    mirror = mirror.format(url=server.endpoint)
    server.faults.append("404")
    for folder in (tmp_path, tmp_path / "file"):
        with pytest.raises(DatasetUnavailableError) as caught:
            load_dataset("cifar100", folder, mirror=mirror)
        for part in (mirror, "check the network", "pass a mirror", "by hand", CIFAR100.tgz_md5, str(folder)):
            assert part in str(caught.value)
        (tmp_path / "file").write_text("in the way")


def test_a_line_that_says_nothing_is_given_up(published, tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(cifar100, "_SOCKET_TIMEOUT", 0.3)
        with pytest.raises(DatasetUnavailableError, match="timed out"):
            load_dataset("cifar100", tmp_path, mirror=f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert socket.getdefaulttimeout() is None


def load_sum(attributes, data_dir, mirror, begin):
    """Print the sum of the training images, loaded as soon as the file `begin` is there."""
    for name, value in attributes.items():
        setattr(CIFAR100, name, value)
    print("ready", flush=True)
    while not begin.exists():
        time.sleep(0.001)
    print(int(load_dataset("cifar100", data_dir, mirror=mirror).train.images.long().sum()))
    return 0


def test_two_processes_at_once_download_once(server, published, tmp_path):
    expected = load_dataset("cifar100", tmp_path / "alone", mirror=server.endpoint).train.images
    requests_of_one, server.paths[:] = len(server.paths), []
    work = partial(load_sum, published.attributes, tmp_path / "shared", server.endpoint, tmp_path / "begin")
    other = Program(work, folder=tmp_path)
    other.wait_for("ready\n")
    server.on_request = lambda _: time.sleep(0.3)  # long enough for both to find the files missing
    (tmp_path / "begin").touch()
    own = load_dataset("cifar100", tmp_path / "shared", mirror=server.endpoint).train.images
    status, out, err = other.end()
    assert status == 0, err
    assert int(out.split()[-1]) == expected.long().sum()
    assert torch.equal(own, expected)
    assert len(server.paths) == requests_of_one


# --- splits and limits ----------------------------------------------------------------------------------


def test_tensors_have_the_stated_types_and_hold_the_published_pixels(data_dir, published):
    dataset = load_dataset("cifar100", data_dir)
    for split in (dataset.train, dataset.valid, dataset.test):
        assert split.images.shape == (len(split), 3, 32, 32)
        assert split.images.dtype == torch.uint8
        assert split.images.is_contiguous(memory_format=torch.channels_last)
        assert split.labels.dtype == torch.int64
        for image, label, number in zip(split.images, split.labels, numbers_of(split.images)):
            name, row = ("train", number) if number < TRAIN else ("test", number - TRAIN)
            assert image.flatten().tolist() == published.parts[name]["data"][row].tolist()
            assert label == published.parts[name]["fine_labels"][row]
    assert dataset.num_classes == 100
    assert load_complete("cifar100", data_dir)[2] == tuple(f"class{i}" for i in range(100))
    assert (dataset.mean, dataset.std) == (CIFAR_MEAN, CIFAR_STD)
    assert_complete(dataset)


@given(limit=st.integers(11, TRAIN), seed=st.integers(0, 2**40))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_limit_takes_validation_out_of_the_limited_images(data_dir, limit, seed):
    whole = load_dataset("cifar100", data_dir, seed=seed)
    part = load_dataset("cifar100", data_dir, seed=seed, limit_train=limit)
    assert len(part.valid) == round(limit * 0.05)
    assert len(part.train) + len(part.valid) == limit
    train, valid = (set(numbers_of(s.images).tolist()) for s in (part.train, part.valid))
    assert len(train | valid) == limit
    assert train <= set(numbers_of(whole.train.images).tolist())
    assert valid <= set(numbers_of(whole.valid.images).tolist())
    assert torch.equal(part.test.images, whole.test.images)
    first, again = (load_dataset("cifar100", data_dir, seed=seed, limit_test=limit // 2) for _ in range(2))
    assert torch.equal(first.test.images, again.test.images)
    numbers = numbers_of(first.test.images).tolist()
    assert len(set(numbers)) == limit // 2 <= len({*numbers} & {*range(TRAIN, TRAIN + TEST)})
    assert torch.equal(first.valid.images, whole.valid.images)
    assert not torch.equal(first.valid.images, load_dataset("cifar100", data_dir, seed=seed + 1).valid.images)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"limit_train": 0}, "limit_train must be a number of images from 1 to 400.*got 0"),
        ({"limit_train": 401}, "limit_train .* from 1 to 400.*got 401"),
        ({"limit_test": 201}, "limit_test .* from 1 to 200.*got 201"),
        ({"limit_train": 9}, "9 training images leave 0 to validate.*raise limit_train"),
    ],
)
def test_arguments_out_of_range_are_sentences(data_dir, arguments, words):
    with pytest.raises(ValueError, match=words):
        load_dataset("cifar100", data_dir, **arguments)


def test_batch_is_indexing(data_dir):
    split = load_dataset("cifar100", data_dir).train
    indices = torch.tensor([5, 0, 379, 5])
    images, labels = split.batch(indices)
    assert torch.equal(images, split.images[indices])
    assert torch.equal(labels, split.labels[indices])
    assert images.is_contiguous(memory_format=torch.channels_last)


def test_digits_need_no_files():
    dataset = load_dataset("digits", "/nowhere", mirror="unused")
    with pytest.raises(ValueError, match="digits has none: use noise_groups='blocks'"):
        load_dataset("digits", "/nowhere", noise_groups="superclass")
    assert [len(s) for s in (dataset.train, dataset.valid, dataset.test)] == [1365, 72, 360]
    # Stratified: 1,797 digits, about 180 of each class, a fifth of them for the test.
    assert dataset.test.labels.bincount().tolist() == pytest.approx([36] * 10, abs=1)
    pixels = torch.cat((dataset.train.images, dataset.valid.images)).double() / 255
    assert pixels.shape == (1437, 3, 32, 32)
    assert pixels.mean((0, 2, 3)).tolist() == pytest.approx(DIGITS_MEAN, abs=1e-4)
    assert pixels.std((0, 2, 3), correction=0).tolist() == pytest.approx(DIGITS_STD, abs=1e-4)


def test_real_cifar100_where_a_copy_exists():
    folder = Path(os.environ.get("CIFAR100_DIR", REPOSITORY / "data" / "downloads"))
    if not (folder / "cifar-100-python" / "train").exists():
        pytest.skip(f"no copy of CIFAR-100 in {folder}")
    dataset = load_dataset("cifar100", folder, mirror=NOWHERE)
    assert [len(s) for s in (dataset.train, dataset.valid, dataset.test)] == [47_500, 2_500, 10_000]
    assert dataset.test.labels.bincount().tolist() == [100] * 100
    names = load_complete("cifar100", folder)[2]
    assert names[:2] == ("apple", "aquarium_fish")
    groups = cifar100._superclasses(folder)
    assert groups.flatten().sort().values.tolist() == list(range(100))
    named = [{names[i] for i in group} for group in groups.tolist()]
    assert {f"{tree}_tree" for tree in ("maple", "oak", "palm", "pine", "willow")} in named
    assert {"baby", "boy", "girl", "man", "woman"} in named


# --- label noise ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise_groups", ["blocks", "superclass"])
def test_noise_stays_in_its_group_and_in_the_training_split(data_dir, published, noise_groups):
    clean = load_dataset("cifar100", data_dir)
    noisy = load_dataset("cifar100", data_dir, label_noise=1.0, noise_groups=noise_groups)
    group = np.arange(100) // 5 if noise_groups == "blocks" else published.superclass_of
    assert (group[clean.train.labels] == group[noisy.train.labels]).all()
    assert 0.65 < (clean.train.labels != noisy.train.labels).float().mean() < 0.95  # expected 4/5
    for name in ("valid", "test"):
        assert torch.equal(getattr(clean, name).labels, getattr(noisy, name).labels)
    assert torch.equal(clean.train.images, noisy.train.images)


def test_a_limit_chooses_images_and_changes_no_image_s_label(data_dir):
    def labels(**arguments) -> dict[int, int]:
        train = load_dataset("cifar100", data_dir, label_noise=0.5, seed=3, **arguments).train
        return dict(zip(numbers_of(train.images).tolist(), train.labels.tolist()))

    assert labels(limit_train=100).items() <= labels().items()


@pytest.mark.parametrize("probability", [0.0, 0.2, 0.6, 1.0])
def test_noise_has_the_stated_frequencies(probability):
    count = 100_000
    labels = torch.full((count,), 7)
    groups = torch.arange(20).view(4, 5)
    noisy = noisy_labels(labels, groups, probability, torch.Generator().manual_seed(0))
    shares = noisy.bincount(minlength=20) / count
    expected = torch.zeros(20)
    expected[5:10] = probability / 5
    expected[7] += 1 - probability
    # Five standard errors of a share.
    torch.testing.assert_close(shares, expected, rtol=0, atol=5 * 0.5 / count**0.5)


def augmented(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return normalise(crop_and_flip(images, *sample_crops(len(images), generator)), CIFAR_MEAN, CIFAR_STD)


def test_the_bits_stay_as_they_are_over_versions():
    """Another split, order or crop would change the numbers of every table."""

    def sums(*tensors: torch.Tensor) -> list[int]:
        return [zlib.crc32(each.contiguous().numpy()) for each in tensors]

    data = load_dataset("digits", "/nowhere", seed=3, limit_train=1000, limit_test=200, label_noise=0.5)
    splits = [getattr(split, part) for split in (data.train, data.valid, data.test) for part in ("images", "labels")]
    assert sums(*splits) == [4178564455, 715954224, 1218007047, 1175475251, 1524636423, 892831382]
    assert sums(epoch_order(1000, 2, 5)) == [4057983606]
    images, _ = data.train.batch(epoch_order(len(data.train), 3, 7)[:64])
    batch = augmented(images, epoch_generator(2, 5))
    assert sums(batch, normalise(images, CIFAR_MEAN, CIFAR_STD)) == [3090056941, 3331756731]


# --- epochs ---------------------------------------------------------------------------------------------


def test_an_epoch_is_a_function_of_its_seed_and_its_number():
    pairs = [(seed, epoch) for seed in range(10) for epoch in range(10)]
    assert len({epoch_generator(*pair).initial_seed() for pair in pairs}) == 100
    assert len({tuple(epoch_order(20, *pair).tolist()) for pair in pairs}) == 100
    torch.manual_seed(0)  # of no account
    assert torch.equal(epoch_order(1000, 2, 5), epoch_order(1000, 2, 5))
    assert epoch_order(1000, 2, 5).sort().values.tolist() == list(range(1000))


# --- augmentation ---------------------------------------------------------------------------------------


def random_images(*shape: int, channels_last: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    return images.contiguous(memory_format=torch.channels_last) if channels_last else images


@pytest.mark.parametrize("channels_last", [True, False])
def test_crop_flip_and_normalisation_equal_torchvision_on_pil_images(channels_last):
    images = random_images(64, 3, 32, 32, channels_last=channels_last)
    before = images.clone()
    tops, lefts, flips = sample_crops(64, epoch_generator(0, 0))
    actual = augmented(images, epoch_generator(0, 0))
    for i in range(64):
        picture = tvf.pad(Image.fromarray(images[i].permute(1, 2, 0).numpy()), 4, fill=0)
        picture = tvf.crop(picture, int(tops[i]), int(lefts[i]), 32, 32)
        picture = tvf.hflip(picture) if flips[i] else picture
        expected = tvf.normalize(tvf.to_tensor(picture), CIFAR_MEAN, CIFAR_STD)
        torch.testing.assert_close(actual[i], expected, rtol=1e-5, atol=2e-6)
    assert actual.dtype == torch.float32
    assert actual.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(images, before)


def test_every_crop_and_both_flips_occur_equally_often():
    count = 100_000
    tops, lefts, flips = sample_crops(count, epoch_generator(0, 0))
    seen = Counter(zip(tops.tolist(), lefts.tolist(), flips.tolist()))
    assert len(seen) == 9 * 9 * 2
    expected = count / 162
    # Six standard errors of a count.
    assert max(abs(n - expected) for n in seen.values()) < 6 * expected**0.5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gives_the_same_images_and_never_waits():
    images = random_images(64, 3, 32, 32, channels_last=True)
    crops = sample_crops(64, epoch_generator(0, 0))
    expected = normalise(crop_and_flip(images, *crops), CIFAR_MEAN, CIFAR_STD)
    on_device = images.cuda()
    actual = normalise(crop_and_flip(on_device, *(x.cuda() for x in crops)), CIFAR_MEAN, CIFAR_STD)
    torch.testing.assert_close(actual.cpu(), expected)
    generator = epoch_generator(0, 0, on_device.device)
    augmented(on_device, generator)  # the first call brings the constants over
    torch.cuda.set_sync_debug_mode("error")
    try:
        augmented(on_device, generator)
    finally:
        torch.cuda.set_sync_debug_mode("default")
