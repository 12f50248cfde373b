"""data/image_sources.py on small generated files: order, labels, refusals, and images that cannot be read."""

import inspect
import os
import pickle
from urllib.error import URLError

import numpy as np
import pytest
import torch
import torchvision
from data.cifar100 import DatasetUnavailableError, load_complete, load_dataset
from data.image_sources import TORCHVISION, ImageBatches, ImageSourceError, collate, open_images
from PIL import Image


def grey(value: int) -> Image.Image:
    return Image.new("RGB", (8, 6), (value, value, value))


def make_folder(root, names):
    for value, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        grey(value).save(root / name)
    return root


def contents(images):
    """(grey value, label) of each image."""
    return [(image.getpixel((0, 0))[0], label) for image, label in map(images.read, range(len(images)))]


def test_a_folder_per_class_and_per_split(tmp_path):
    make_folder(tmp_path / "train", ["b/2.png", "b/10.png", "a/x.png", "a/deep/y.png"])
    make_folder(tmp_path / "val", ["a/1.PNG", "b/1.png"])
    source = open_images(str(tmp_path), "unused")
    assert (source.name, source.class_names) == (f"folder:{tmp_path.name}", ("a", "b"))
    # torchvision's order: by class, then by folder and name.
    names = ["a/x.png", "a/deep/y.png", "b/10.png", "b/2.png"]
    assert [source.splits["train"].describe(row) for row in range(4)] == [
        str(tmp_path / "train" / name) for name in names
    ]
    assert contents(source.splits["train"]) == [(2, 0), (3, 0), (1, 1), (0, 1)]
    assert contents(source.splits["valid"]) == [(0, 0), (1, 1)]
    assert source.splits["valid"].describe(1) == str(tmp_path / "val" / "b" / "1.png")
    reference = torchvision.datasets.ImageFolder(tmp_path / "train")
    assert [path for path, _ in reference.samples] == [source.splits["train"].describe(row) for row in range(4)]
    assert source.fingerprint["images"] == {"train": 4, "valid": 2}
    make_folder(tmp_path / "test", ["a/3.png", "b/4.png"])
    assert list(open_images(str(tmp_path), "unused").splits) == ["train", "valid", "test"]


def test_folders_by_name_and_a_folder_of_one_split(tmp_path):
    make_folder(tmp_path / "one", ["a/0.png", "b/1.png"])
    make_folder(tmp_path / "two", ["a/0.png", "b/1.png", "b/2.png"])
    both = open_images(None, "unused", folders={"train": tmp_path / "one", "test": tmp_path / "two"})
    assert {split: len(images) for split, images in both.splits.items()} == {"train": 2, "test": 3}
    assert {split: len(images) for split, images in open_images(f"folder:{tmp_path}/one", "").splits.items()} == {
        "train": 2
    }
    assert list(open_images(None, "", folders={"test": tmp_path / "two"}).splits) == ["test"]
    # A limit takes images at equal distances.
    make_folder(tmp_path / "three", [f"{name}/{row}.png" for name in "abc" for row in range(4)])
    limited = open_images(str(tmp_path / "three"), "", limits={"train": 6}).splits["train"]
    assert contents(limited) == [(0, 0), (2, 0), (4, 1), (6, 1), (8, 2), (10, 2)]
    assert limited.describe(3) == str(tmp_path / "three" / "b" / "2.png")


def test_the_fingerprint_is_of_the_list_not_of_the_place(tmp_path):
    names = ["a/0.png", "b/1.png"]
    first = open_images(str(make_folder(tmp_path / "x" / "set", names)), "").fingerprint
    assert open_images(str(make_folder(tmp_path / "y" / "set", names)), "").fingerprint == first
    make_folder(tmp_path / "y" / "set", ["a/00.png"])
    assert open_images(str(tmp_path / "y" / "set"), "").fingerprint != first


def test_unlabelled_test_images_and_hidden_folders_are_no_split(tmp_path):
    make_folder(tmp_path / "train", ["a/0.png", "b/1.png", ".cache/2.png"])
    make_folder(tmp_path / "val", ["a/0.png", "b/1.png"])
    make_folder(tmp_path / "test", ["0.png"])
    source = open_images(str(tmp_path), "")
    assert source.class_names == ("a", "b")
    assert source.splits["valid"].describe(0) == str(tmp_path / "val" / "a" / "0.png")
    assert "test" not in source.splits


def test_what_is_left_out_is_said(tmp_path):
    make_folder(tmp_path / "train", ["a/0.png", "b/1.png"])
    make_folder(tmp_path / "val", ["a/0.png"])
    (tmp_path / "val" / "b").mkdir()
    for name in ("a/notes.txt", "a/list.txt", "b/README"):
        (tmp_path / "train" / name).write_text("")
    left_out, empty = open_images(str(tmp_path), "").notes
    assert left_out.startswith("3 files below")
    assert "2 .txt, 1 without ending" in left_out
    assert empty == "1 classes have no valid image: b"


@pytest.mark.parametrize(
    ("names", "arguments", "message"),
    [
        (["train/a/0.png", "train/b/0.png", "val/a/0.png", "val/c/0.png"], {}, "2 are in one alone: b, c"),
        (["train/a/0.png", "val/a/0.png", "valid/a/0.png"], {}, "has val/ and valid/, and one can be the valid split"),
        (["0.png"], {}, "holds no folder per class"),
        (["train/a/0.txt"], {}, "there is no image below"),
        (["a/0.png"], {"limits": {"train": 2}}, "--limit_train must be from 1 to 1"),
        (["a/0.png"], {"limits": {"test": 2}}, "--limit_test must be from 1 to 0"),
        (["a/0.png"], {"folders": {"train": "absent"}}, "absent, given for the train images, is not a folder"),
    ],
)
def test_a_folder_that_cannot_be_used_is_answered_with_a_sentence(tmp_path, names, arguments, message):
    make_folder(tmp_path, [name for name in names if name.endswith("png")])
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(ImageSourceError) as refusal:
        open_images(str(tmp_path), "", **arguments)
    assert message in str(refusal.value)


def test_digits_are_complete_and_in_order():
    source = open_images("digits", "unused")
    train, test, _ = load_complete("digits", "unused")
    assert {split: len(images) for split, images in source.splits.items()} == {"train": 1437, "test": 360}
    for row in (0, 1436):
        image, label = source.splits["train"].read(row)
        assert np.array_equal(np.asarray(image).transpose(2, 0, 1), train.images[row].numpy())
        assert label == int(train.labels[row])
    # What is trained on is a choice out of these.
    chosen = load_dataset("digits", "unused")
    assert len(chosen.train) + len(chosen.valid) == len(train)
    assert torch.equal(chosen.test.images, test.images)


def test_torchvision_data_sets_have_the_arguments_of_the_table():
    for kind, *selections in TORCHVISION.values():
        for selection in selections:
            inspect.signature(getattr(torchvision.datasets, kind)).bind("root", **selection, download=True)


def test_a_torchvision_data_set_that_is_damaged_and_not_to_be_had_is_a_sentence(tmp_path, monkeypatch):
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (raw / f"{name}-ubyte").write_bytes(b"damaged")

    def unreachable(*_, **__):
        raise URLError("Name or service not known")

    monkeypatch.setattr("torchvision.datasets.mnist.download_and_extract_archive", unreachable)
    for name in ("fashion_mnist", "mnist"):
        with pytest.raises(DatasetUnavailableError, match=rf"(?s){name} is neither in .* whole, .*delete damaged"):
            open_images(name, tmp_path)


def to_tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image))


def test_a_broken_image_comes_with_its_reason(tmp_path):
    make_folder(tmp_path, ["a/0.jpg", "a/1.jpg", "a/2.jpg", "a/3.jpg"])
    (tmp_path / "a" / "0.jpg").write_bytes(b"")
    (tmp_path / "a" / "1.jpg").write_text("this is no image")
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
    noise.save(tmp_path / "a" / "2.jpg")
    (tmp_path / "a" / "2.jpg").write_bytes((tmp_path / "a" / "2.jpg").read_bytes()[:-400])
    images = ImageBatches(open_images(str(tmp_path), "").splits, to_tensor)
    images = pickle.loads(pickle.dumps(images))  # as for a worker that is not forked
    batch, labels, indices, broken = collate(images["train", row] for row in range(4))
    assert (batch.shape, labels.tolist(), indices) == ((1, 6, 8, 3), [0], [3])
    assert [index for index, _ in broken] == [0, 1, 2]
    assert broken[0][1] == broken[1][1] == "UnidentifiedImageError: cannot identify image file"
    assert "truncated" in broken[2][1]
    (tmp_path / "a" / "3.jpg").unlink()
    os.mkfifo(tmp_path / "a" / "3.jpg")  # opening it would wait for a writer
    assert images["train", 3][3] == "OSError: not a regular file"
    assert collate([images["train", 0]])[1].tolist() == []


def test_an_error_of_the_transform_is_no_broken_image(tmp_path):
    make_folder(tmp_path, ["a/0.png"])
    images = ImageBatches(open_images(str(tmp_path), "").splits, lambda image: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        images["train", 0]
