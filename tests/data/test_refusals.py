"""Files, folders and servers that could be taken for others: each is refused with its name, or read as it is."""

import base64
import hashlib
import threading
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from data import download as module
from data.download import download
from data.embeddings import load_embeddings
from data.images import ImageFolder, find_splits
from data.label_noise import human_labels
from data.published import without_secrets
from data.splits import Split
from data.torchvision_sets import load_or_download

ROWS = torch.randn(6, 2, generator=torch.Generator().manual_seed(0)).half()
LABELS = torch.arange(6) % 3


def saved(path, **more):
    content = {"train_embeddings": ROWS, "train_labels": LABELS} | more
    torch.save(content, path)
    return path


# Embeddings.


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"coarse_train_labels": LABELS // 2}, "train_labels and coarse_train_labels"),
        ({"old_train_embeddings": ROWS}, "train_embeddings and old_train_embeddings"),
        (
            {"test_embeddings": ROWS, "test_labels": LABELS, "val_embeddings": ROWS, "val_labels": LABELS},
            "test_embeddings and val_embeddings",
        ),
    ],
)
def test_two_tensors_that_may_be_meant_are_both_named(tmp_path, more, named):
    with pytest.raises(ValueError, match=f"has {named}, which both may be"):
        load_embeddings(saved(tmp_path / "e.pt", **more))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.int64])
def test_labels_of_any_whole_type_are_read(tmp_path, dtype):
    found = load_embeddings(saved(tmp_path / "e.pt", train_labels=LABELS.to(dtype)))
    assert torch.equal(found["train"].labels, LABELS)
    assert found.about("e.pt")["embeddings"].startswith("3x2-")


@pytest.mark.parametrize(
    "more",
    [
        {"train_labels": LABELS.float()},
        {"train_labels": LABELS.to(torch.complex64)},
        {"train_labels": LABELS > 0},
        {"train_labels": LABELS - 1},
        {"train_labels": LABELS[:5]},
        {"train_labels": LABELS.view(6, 1)},
        {"train_embeddings": ROWS.int()},
        {"train_embeddings": ROWS.to(torch.float8_e5m2)},
        {"train_embeddings": ROWS[0, 0]},
        {"train_embeddings": ROWS[:0], "train_labels": LABELS[:0]},
    ],
)
def test_what_are_no_embeddings_and_labels_is_refused(tmp_path, more):
    with pytest.raises(ValueError, match=r"train in .* must be floating point"):
        load_embeddings(saved(tmp_path / "e.pt", **more))


def test_clean_labels_of_other_rows_are_refused(tmp_path):
    valid = {"valid_embeddings": ROWS, "valid_labels": LABELS}
    for more in ({}, valid):
        path = saved(tmp_path / "e.pt", clean_embeddings=ROWS[:5], clean_labels=LABELS[:5], **more)
        with pytest.raises(ValueError, match="must have the rows of valid"):
            load_embeddings(path)


def test_an_address_is_shown_without_its_secrets():
    for source, shown in {
        "https://me:PASSWORD@host:8080/a/own.pt?X-Amz-Signature=S#F": "https://host:8080/a/own.pt",
        "s3://bucket/own.pt": "s3://bucket/own.pt",
        "a folder/own?.pt": "a folder/own?.pt",
        "wsl-32x48d-320": "wsl-32x48d-320",
    }.items():
        assert without_secrets(source) == shown


# Labels.


def test_labels_of_another_length_than_the_images_are_refused():
    with pytest.raises(ValueError, match="6 samples have 5 labels"):
        Split(ROWS, LABELS[:5])


@pytest.mark.parametrize(
    ("noisy", "message"),
    [
        (LABELS[:5], r"must be one for each of the 6 images.*\(5,\)"),
        (LABELS.repeat(2), r"\(12,\)"),
        (LABELS + 1, "from 1 to 3"),
        (LABELS - 1, "from -1 to 1"),
        (None, "must hold noisy_label and clean_label"),
    ],
)
def test_labels_by_people_are_of_these_images(tmp_path, noisy, message):
    content = {"clean_label": LABELS.numpy()}
    if noisy is not None:
        content["noisy_label"] = noisy.numpy()
    torch.save(content, tmp_path / "h.pt")
    with pytest.raises(ValueError, match=message):
        human_labels(tmp_path / "h.pt", LABELS)


# Folders.


def images(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.zeros((2, 2, 3), dtype=np.uint8)).save(path)


@pytest.mark.parametrize(
    ("link", "target"), [("cat/up", ".."), ("cat/deep/self", "."), ("cat/top", "/"), ("dog/other", "../cat/deep")]
)
def test_a_link_upwards_is_refused_and_named(tmp_path, link, target):
    images(tmp_path, "cat/deep/1.png", "cat/2.png", "dog/3.png")
    (tmp_path / "cat" / "deep" / "back").symlink_to("../../dog") if link == "dog/other" else None
    (tmp_path / link).symlink_to(target)
    with pytest.raises(ValueError, match=r"is a link to .*, in which it lies itself: remove the link"):
        ImageFolder(tmp_path)


def test_links_to_other_folders_are_followed(tmp_path):
    images(tmp_path / "kept", "cat/1.png", "more/2.png", "more/3.png")
    images(tmp_path / "set" / "train", "dog/4.png")
    (tmp_path / "set" / "train" / "cat").symlink_to(tmp_path / "kept" / "cat")
    (tmp_path / "set" / "train" / "dog" / "more").symlink_to("../../../kept/more")
    found = ImageFolder(find_splits(tmp_path / "set")["train"])
    assert [label for _, label in found.samples] == [0, 1, 1, 1]


# Downloads.


@pytest.fixture
def small_parts(monkeypatch, own_network):
    monkeypatch.setattr(module, "PART_BYTES", 1000)


def test_servers_that_differ_in_etag_serve_a_file_whose_sum_is_given(server, tmp_path, small_parts):
    server.content = np.random.default_rng(0).bytes(5500)
    server.on_request = lambda number: setattr(server, "etag", f'"server-{number}"')
    with pytest.raises(OSError, match="has changed on the server"):
        download(server.url, tmp_path)
    sha256 = hashlib.sha256(server.content).hexdigest()
    assert download(server.url, tmp_path, sha256).read_bytes() == server.content
    server.etag = None
    server.on_request = lambda number: None
    assert download(f"{server.url}2", tmp_path, sha256).read_bytes() == server.content


def test_a_range_with_the_checksum_of_the_whole_object_is_taken(server, tmp_path, monkeypatch, small_parts):
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    server.content = np.random.default_rng(0).bytes(5500)
    checksum = base64.b64encode(zlib.crc32(server.content).to_bytes(4, "big")).decode()
    server.headers = {"x-amz-checksum-crc32": checksum, "x-amz-checksum-type": "FULL_OBJECT"}
    assert download("s3://store/own.bin", tmp_path).read_bytes() == server.content


class SlowSet:
    """In place of torchvision's class: its file is not there until the slowest download ends."""

    downloads = 0
    both = threading.Barrier(2)

    def __init__(self, folder, train, download=False):
        self.path = folder / "set"
        if not self.path.exists():
            if not download:
                self.both.wait(60)  # neither has found it
                raise RuntimeError("not found")
            SlowSet.downloads += 1
            self.path.write_text("whole")


def test_two_first_downloads_at_once_are_one(tmp_path):
    folder = tmp_path / "new" / "folder"
    loaded = []

    def load():
        loaded.append(load_or_download(SlowSet, folder, "slow", "its file"))

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(both) for both in loaded] == [2, 2]
    assert SlowSet.downloads == 1


def test_a_data_set_that_cannot_be_read_nor_downloaded_says_why(tmp_path):
    def damaged(folder, train, download=False):
        raise RuntimeError("no network" if download else "file 3 is corrupted")

    with pytest.raises(
        OSError, match=r"cannot be read from .*file 3 is corrupted.*nor downloaded .*no network.*two files"
    ):
        load_or_download(damaged, tmp_path, "some set", "two files")
