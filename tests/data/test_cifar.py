"""data/cifar.py: files that are there or not, splits, label noise, and the batched augmentation.

The CIFAR-100 here is small (small_sets.py), and each image carries its own number in its first three bytes.
"""

import shutil
import tarfile
import zlib
from collections import Counter
from pathlib import Path

import pytest
import torch
from PIL import Image
from torchvision.datasets import CIFAR100
from torchvision.transforms import functional as tvf

from data.cifar import (
    CIFAR_MEAN,
    CIFAR_STD,
    DIGITS_MEAN,
    DIGITS_STD,
    crop_and_flip,
    load_complete,
    load_dataset,
    sample_crops,
    scale_and_shift,
)
from data.splits import epoch_generator, epoch_order
from tests.data.small_sets import accept_cifar, md5, write_cifar

TRAIN = 400
TEST = 200


def numbers_of(images: torch.Tensor) -> torch.Tensor:
    first = images[:, 0, 0, :3].long()
    return (first[:, 0] << 16) + (first[:, 1] << 8) + first[:, 2]


@pytest.fixture(scope="module")
def archive(tmp_path_factory) -> Path:
    """cifar-100-python.tar.gz, and what is in it beside it."""
    folder = write_cifar("cifar100", tmp_path_factory.mktemp("published"), TRAIN, TEST)
    with tarfile.open(folder.parent / "cifar-100-python.tar.gz", "w:gz", compresslevel=1) as tar:
        tar.add(folder, "cifar-100-python")
    return folder.parent / "cifar-100-python.tar.gz"


@pytest.fixture(autouse=True)
def published(archive, monkeypatch):
    accept_cifar("cifar100", archive.parent, monkeypatch)
    monkeypatch.setattr(CIFAR100, "tgz_md5", md5(archive))


@pytest.fixture
def data_dir(archive, tmp_path) -> Path:
    shutil.copytree(archive.parent / "cifar-100-python", tmp_path / "cifar-100-python")
    return tmp_path


def check_complete(dataset) -> None:
    assert [len(split) for split in (dataset.train, dataset.valid, dataset.test)] == [380, 20, 200]
    everything = torch.cat([numbers_of(split.inputs) for split in (dataset.train, dataset.valid, dataset.test)])
    assert everything.sort().values.tolist() == list(range(TRAIN + TEST))


def test_a_folder_that_may_not_be_written_is_read(data_dir):
    before = sorted(data_dir.rglob("*"))
    data_dir.chmod(0o555)
    try:
        check_complete(load_dataset("cifar100", data_dir))
    finally:
        data_dir.chmod(0o755)
    assert sorted(data_dir.rglob("*")) == before


@pytest.mark.parametrize("name", ["train", "test"])
def test_a_damaged_file_is_unpacked_again_without_the_network(archive, data_dir, name):
    shutil.copy(archive, data_dir)
    body = (data_dir / "cifar-100-python" / name).read_bytes()
    (data_dir / "cifar-100-python" / name).write_bytes(body[:50] + bytes([body[50] ^ 1]) + body[51:])
    check_complete(load_dataset("cifar100", data_dir))


def test_what_is_missing_is_downloaded_once(server, archive, tmp_path, monkeypatch):
    server.content = archive.read_bytes()
    monkeypatch.setattr(CIFAR100, "url", f"{server.endpoint}/cifar-100-python.tar.gz")
    for _ in range(2):
        check_complete(load_dataset("cifar100", tmp_path / "new" / "folder"))
    assert len(server.spans) <= 2  # torchvision follows redirections first


def test_without_files_and_network_the_message_says_what_to_place_where(tmp_path):
    with pytest.raises(OSError, match=r"nor downloaded.*put cifar-100-python.tar.gz \(MD5 [0-9a-f]{32}\)") as error:
        load_dataset("cifar100", tmp_path)
    assert str(tmp_path) in str(error.value)


def test_a_limit_shortens_both_splits_and_moves_no_image_between_them(data_dir):
    whole = load_dataset("cifar100", data_dir, seed=2)
    part = load_dataset("cifar100", data_dir, seed=2, limit_train=100)
    train, valid = (set(numbers_of(split.inputs).tolist()) for split in (part.train, part.valid))
    assert (len(train), len(valid)) == (95, 5)
    assert train <= set(numbers_of(whole.train.inputs).tolist())
    assert valid <= set(numbers_of(whole.valid.inputs).tolist())
    for limit in (401, 9):
        with pytest.raises((ValueError, OSError), match=rf"--limit_train .*between 11 and 400 images, got {limit}"):
            load_dataset("cifar100", data_dir, limit_train=limit)


def test_a_seed_chooses_the_images_that_validate():
    first, again, other = (load_dataset("digits", "", seed=seed).valid.inputs for seed in (4, 4, 5))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_labels_stay_with_their_images_and_a_batch_is_indexing(data_dir):
    data = load_dataset("cifar100", data_dir)
    for split in (data.train, data.valid, data.test):
        numbers = numbers_of(split.inputs)
        assert torch.equal(split.labels, torch.where(numbers < TRAIN, numbers, numbers - TRAIN) % 100)
    rows = torch.tensor([5, 0, 379, 5])
    images, labels = data.train.batch(rows)
    assert torch.equal(images, data.train.inputs[rows])
    assert torch.equal(labels, data.train.labels[rows])
    assert images.is_contiguous(memory_format=torch.channels_last)


def test_pixels_are_normalised_by_the_numbers_of_the_published_code(data_dir):
    data = load_dataset("cifar100", data_dir)
    pixels = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(-1, 3, 1, 1)  # black, white
    mean = torch.tensor([0.4914, 0.4822, 0.4465])
    std = torch.tensor([0.2023, 0.1994, 0.2010])
    torch.testing.assert_close(data.normalise(pixels).flatten(1), torch.stack([-mean / std, (1 - mean) / std]))


def test_digits_need_no_files():
    data = load_dataset("digits", "/nowhere")
    assert [len(split) for split in (data.train, data.valid, data.test)] == [1365, 72, 360]
    assert data.test.labels.bincount().tolist() == pytest.approx([36] * 10, abs=1)  # stratified
    pixels = torch.cat((data.train.inputs, data.valid.inputs)).double() / 255
    assert pixels.mean((0, 2, 3)).tolist() == pytest.approx(DIGITS_MEAN, abs=1e-4)
    assert pixels.std((0, 2, 3), correction=0).tolist() == pytest.approx(DIGITS_STD, abs=1e-4)


def test_noise_stays_in_its_block_and_in_the_training_split(data_dir):
    clean, noisy = (load_dataset("cifar100", data_dir, label_noise=noise, seed=3) for noise in (0.0, 1.0))
    assert torch.equal(clean.train.labels // 5, noisy.train.labels // 5)
    assert 0.65 < (clean.train.labels != noisy.train.labels).float().mean() < 0.95  # expected 4/5
    for name in ("valid", "test"):
        assert torch.equal(getattr(clean, name).labels, getattr(noisy, name).labels)
    limited = load_dataset("cifar100", data_dir, label_noise=1.0, seed=3, limit_train=100).train
    known = dict(zip(numbers_of(noisy.train.inputs).tolist(), noisy.train.labels.tolist()))
    assert all(known[n] == label for n, label in zip(numbers_of(limited.inputs).tolist(), limited.labels.tolist()))


def test_labels_by_people_are_those_of_training_and_validation(data_dir, tmp_path):
    right = load_complete("cifar100", data_dir)[0].labels
    arrays = {"clean_label": right.numpy(), "noisy_label": (right.numpy() + 1) % 100}
    torch.save(arrays, path := tmp_path / "human.pt")
    clean, noisy = (load_dataset("cifar100", data_dir, seed=3, noisy_labels_file=file) for file in (None, path))
    for name in ("train", "valid"):
        assert torch.equal(getattr(noisy, name).inputs, getattr(clean, name).inputs)
        assert torch.equal(getattr(noisy, name).labels, (getattr(clean, name).labels + 1) % 100)
    assert torch.equal(noisy.clean.inputs, clean.valid.inputs)
    assert torch.equal(noisy.clean.labels, clean.valid.labels)
    assert torch.equal(noisy.test.labels, clean.test.labels)
    assert clean.clean is None
    torch.save(arrays | {"clean_label": right.flip(0).numpy()}, path)
    for wrong, message in ((path, "are not those of"), (tmp_path / "none.pt", "is not a file of labels by people")):
        with pytest.raises((ValueError, OSError), match=message):
            load_dataset("cifar100", data_dir, noisy_labels_file=wrong)


def normalise(images: torch.Tensor) -> torch.Tensor:
    scale, shift = (number.to(images.device) for number in scale_and_shift("cifar100"))
    return images * scale + shift


def augmented(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return normalise(crop_and_flip(images, *sample_crops(len(images), generator)))


def test_the_bits_stay_as_they_are_over_versions():
    """Another split, order or crop would change the numbers of every table."""

    def sums(*tensors: torch.Tensor) -> list[int]:
        return [zlib.crc32(tensor.contiguous().numpy()) for tensor in tensors]

    data = load_dataset("digits", "", seed=3, limit_train=1000, label_noise=0.5)
    splits = [getattr(split, part) for split in (data.train, data.valid) for part in ("inputs", "labels")]
    assert sums(*splits) == [4178564455, 715954224, 1218007047, 1175475251]
    assert sums(epoch_order(1000, 2, 5)) == [4057983606]
    images, _ = data.train.batch(epoch_order(len(data.train), 3, 7)[:64])
    batch = augmented(images, epoch_generator(2, 5))
    assert sums(batch, normalise(images)) == [3090056941, 3331756731]


def test_an_epoch_is_a_function_of_its_seed_and_its_number():
    pairs = [(seed, epoch) for seed in range(10) for epoch in range(10)]
    assert len({epoch_generator(*pair).initial_seed() for pair in pairs}) == 100
    assert len({tuple(epoch_order(20, *pair).tolist()) for pair in pairs}) == 100
    torch.manual_seed(0)  # of no account
    assert torch.equal(epoch_order(1000, 2, 5), epoch_order(1000, 2, 5))
    assert epoch_order(1000, 2, 5).sort().values.tolist() == list(range(1000))


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
    data = load_dataset("digits", "")
    crops = sample_crops(64, epoch_generator(0, 0))
    expected = data.normalise(crop_and_flip(data.test.inputs[:64], *crops))
    data = data.to("cuda")
    crops = [part.cuda() for part in crops]
    actual = data.normalise(crop_and_flip(data.test.inputs[:64], *crops))
    torch.testing.assert_close(actual.cpu(), expected)
    generator = epoch_generator(0, 0, actual.device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        data.normalise(crop_and_flip(data.test.inputs[:64], *sample_crops(64, generator)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
