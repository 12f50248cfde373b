"""data/images.py: each kind of image becomes what one sees, or is refused by its path; folders are read as they are."""

import os
import shutil

import numpy as np
import pytest
import torchvision
from PIL import Image, features

from data.images import ImageFolder, find_splits, load_rgb, notes_of_splits, open_folders

# Grey values, of 255, of the two halves of each test image.
LEFT = 64
RIGHT = 200


def halves(dtype=np.uint8, factor=1) -> np.ndarray:
    """(16, 24): the left half darker."""
    return np.repeat([[LEFT] * 12 + [RIGHT] * 12], 16, axis=0).astype(dtype) * factor


def grey(mode: str) -> Image.Image:
    return Image.fromarray(halves()).convert(mode)


def adjusted(mode: str, **options) -> Image.Image:
    return grey("RGB").convert(mode, **options)


def with_exif(image: Image.Image, orientation: int) -> dict:
    exif = image.getexif()
    exif[0x0112] = orientation
    return {"exif": exif}


KINDS = {
    "L.png": (grey("L"), {}),
    "RGB.png": (grey("RGB"), {}),
    "RGBA.png": (grey("RGBA"), {}),
    "LA.png": (grey("LA"), {}),
    "palette.png": (adjusted("P", palette=Image.Palette.ADAPTIVE), {}),
    "palette_with_transparency.png": (adjusted("P", palette=Image.Palette.ADAPTIVE), {"transparency": 1}),
    "16_bit.png": (Image.fromarray(halves(np.uint16, 257)), {}),
    "16_bit.tiff": (Image.fromarray(halves(np.uint16, 257)), {}),
    "16_bit.pgm": (Image.fromarray(halves(np.uint16, 257)), {}),
    "palette.gif": (adjusted("P", palette=Image.Palette.ADAPTIVE), {}),
    "first_frame.gif": (grey("L"), {"save_all": True, "append_images": [Image.new("L", (24, 16), 0)] * 2}),
    "L.jpg": (grey("L"), {"quality": 95}),
    "CMYK.jpg": (adjusted("CMYK"), {"quality": 95}),
    "YCbCr_by_lzw.tiff": (adjusted("YCbCr"), {"compression": "tiff_lzw"}),
    "YCbCr_by_jpeg.tiff": (adjusted("YCbCr"), {"compression": "jpeg", "quality": 95}),
    "upside_down.jpg": (grey("RGB").rotate(180), {"quality": 95, **with_exif(grey("RGB"), 3)}),
    "on_its_side.jpg": (grey("RGB").rotate(90, expand=True), {"quality": 95, **with_exif(grey("RGB"), 6)}),
    "mirrored.png": (grey("RGB").transpose(Image.Transpose.FLIP_LEFT_RIGHT), with_exif(grey("RGB"), 2)),
    "L.webp": (grey("RGB"), {"lossless": True}),
    "L.bmp": (grey("L"), {}),
}
if features.version("pil") >= "13":  # before, among them the last for Python 3.10, it takes this file for truncated
    KINDS["YCbCr.tiff"] = (adjusted("YCbCr"), {})


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_image_is_what_one_sees(name, tmp_path):
    image, options = KINDS[name]
    image.save(tmp_path / name, **options)
    found = load_rgb(str(tmp_path / name))
    assert (found.mode, found.size) == ("RGB", (24, 16))
    pixels = np.asarray(found).astype(int)  # (16, 24, 3)
    lossy = 6 if name.endswith(("jpg", "jpeg.tiff")) else 2
    assert abs(pixels[4:12, 2:10] - LEFT).max() <= lossy
    assert abs(pixels[4:12, 14:22] - RIGHT).max() <= lossy


def test_black_and_white_is_black_and_white(tmp_path):
    Image.fromarray(halves() > 100).save(tmp_path / "1.png")
    assert np.asarray(load_rgb(str(tmp_path / "1.png")))[0, [0, -1]].tolist() == [[0, 0, 0], [255, 255, 255]]


BROKEN = {
    "float.tiff": lambda path: Image.fromarray(halves(np.float32, 1 / 255)).save(path),
    "32_bit.tiff": lambda path: Image.fromarray(halves(np.int32, 257)).save(path),
    "truncated.png": lambda path: (grey("RGB").save(path), path.write_bytes(path.read_bytes()[:-40])),
    "truncated.jpg": lambda path: (grey("RGB").save(path), path.write_bytes(path.read_bytes()[:300])),
    "text.jpg": lambda path: path.write_text("no image"),
    "empty.png": lambda path: path.touch(),
    "folder.png": lambda path: path.mkdir(),
    "absent.png": lambda path: None,
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_decoded_is_refused_by_its_path(name, tmp_path):
    BROKEN[name](tmp_path / name)
    with pytest.raises(ValueError, match=r"cannot read .*Repair or delete it") as error:
        load_rgb(str(tmp_path / name))
    assert str(tmp_path / name) in str(error.value)
    assert "_io" not in str(error.value)


def make(root, names):
    for number, name in enumerate(names):
        path = os.path.join(os.fsencode(root), os.fsencode(name))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            Image.new("RGB", (2, 2), (number, number, number)).save(file, "png")
    return root


def test_images_come_in_the_order_of_torchvision(tmp_path):
    make(tmp_path, ["b/2.png", "b/10.png", "a/x.png", "a/deep/y.PNG", "c/1.png"])
    found = ImageFolder(tmp_path, lambda image: image.getpixel((0, 0))[0])
    assert found.samples == torchvision.datasets.ImageFolder(str(tmp_path)).samples
    assert [found[row] for row in range(len(found))] == [(2, 0), (3, 0), (1, 1), (0, 1), (4, 2)]


def test_hidden_files_and_folders_do_not_count_at_any_depth(tmp_path):
    make(tmp_path, ["a/1.png", "a/._1.png", "a/.cache/2.png", ".hidden/3.png", "a/deep/.4.png", "b/5.png"])
    found = ImageFolder(tmp_path)
    assert (found.classes, len(found), found.notes) == (["a", "b"], 2, [])


def test_names_that_are_not_utf_8_are_images_like_others(tmp_path):
    make(tmp_path, [b"caf\xe9/\xff.png", b"other/1.png"])
    found = ImageFolder(tmp_path, lambda image: image)
    assert len({found[row][1] for row in range(2)}) == 2
    assert all(stamp for stamp in found.stamps())
    make(tmp_path / "second", [b"caf\xe9/1.png"])
    with pytest.raises((ValueError, OSError), match="same class folders"):
        open_folders({"train": tmp_path, "test": tmp_path / "second"}, lambda image: image)


def test_what_is_left_out_is_said(tmp_path):
    make(tmp_path, ["a/1.png", "b/2.png", "outside.png"])
    (tmp_path / "empty").mkdir()
    for name in ("a/notes.txt", "a/list.txt", "b/README"):
        (tmp_path / name).touch()
    left_out, empty = ImageFolder(tmp_path).notes
    assert left_out.startswith("4 files in")
    assert "2 .txt" in left_out
    assert "1 .png" in left_out
    assert empty.startswith("1 classes of")
    assert empty.endswith("no image: empty")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
def test_a_folder_that_cannot_be_read_is_named(tmp_path):
    make(tmp_path, ["a/deep/1.png", "a/2.png"])
    (tmp_path / "a" / "deep").chmod(0)
    try:
        with pytest.raises((ValueError, OSError), match=r"cannot read the folder .*deep"):
            ImageFolder(tmp_path)
    finally:
        (tmp_path / "a" / "deep").chmod(0o755)


def test_splits_are_folders_of_classes(tmp_path):
    make(tmp_path, ["train/a/1.png", "val/a/1.png", "test/flat.png", "train/.git/2.png"])
    assert {split: path.name for split, path in find_splits(tmp_path).items()} == {"train": "train", "valid": "val"}
    assert find_splits(tmp_path / "train") == {"train": tmp_path / "train"}
    make(tmp_path, ["valid/a/1.png"])
    (tmp_path / "empty" / "a").mkdir(parents=True)
    for path, message in ((tmp_path, "may both be the valid split"), (tmp_path / "test", "no folder per class")):
        with pytest.raises((ValueError, OSError), match=message):
            find_splits(path)
    for folder, message in (
        ("test", "no folder per class"),
        ("empty", "no image in the class folders"),
        ("nowhere", "cannot read the folder"),
    ):
        with pytest.raises((ValueError, OSError), match=message):
            ImageFolder(tmp_path / folder)


def test_splits_have_their_usual_names_in_any_case_and_other_folders_get_a_note(tmp_path):
    make(tmp_path, ["Train/a/1.png", "Testing/a/1.png", "dev/a/1.png", "notes/flat.png"])
    found = find_splits(tmp_path)
    assert found == {"train": tmp_path / "Train", "test": tmp_path / "Testing"}
    (note,) = notes_of_splits(tmp_path, found.values())
    assert note == f"2 folders of {tmp_path} are no train/, val/ or test/ with class folders: dev, notes"
    assert notes_of_splits(tmp_path / "dev", find_splits(tmp_path / "dev").values()) == []


def test_splits_of_other_classes_are_refused(tmp_path):
    make(tmp_path, ["train/a/1.png", "train/b/1.png", "val/a/1.png", "val/c/1.png"])
    with pytest.raises((ValueError, OSError), match="2 are in only one of them: b, c"):
        open_folders(find_splits(tmp_path), lambda image: image)


def exchange(one, other):
    """Let two files exchange their names."""
    kept = one.with_name("kept")
    one.rename(kept)
    other.rename(one)
    kept.rename(other)


def touch(path):
    """Write the file again, a second earlier."""
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns - 10**9))


def copy_whole(path):
    """Replace the file by a copy that has its times, as rsync and cp -a make one."""
    path.rename(path.with_name("kept"))
    shutil.copy2(path.with_name("kept"), path)
    path.with_name("kept").unlink()


# How the first of two images is replaced; whether the stamps of both change, and the parts of them that a copy keeps.
REPLACED = {
    "another time": (lambda first, second: touch(first), [True, False], [True, False]),
    "exchanged": (exchange, [True, True], [False, False]),
    "a copy": (lambda first, second: copy_whole(first), [True, False], [False, False]),
}


@pytest.mark.parametrize("how", REPLACED)
def test_a_stamp_changes_when_an_image_is_replaced_even_by_one_of_the_same_size_and_time(how, tmp_path):
    make(tmp_path, ["a/1.png", "a/2.png"])
    paths = [tmp_path / "a" / "1.png", tmp_path / "a" / "2.png"]
    for path in paths:
        path.write_bytes(b"0" * 100)
        os.utime(path, ns=(10**18, 10**18))  # as of files that were unpacked together
    before = ImageFolder(tmp_path).stamps()
    replace, changes, image_changes = REPLACED[how]
    replace(*paths)
    both = list(zip(before, ImageFolder(tmp_path).stamps()))
    assert [old != new for old, new in both] == changes
    assert [old.image != new.image for old, new in both] == image_changes


def test_the_stamp_of_an_image_stays_as_it_is_over_versions(tmp_path):
    """Files of embeddings have its digest."""
    make(tmp_path, ["a/1.png", "b/2.png"])
    os.utime(tmp_path / "b" / "2.png", ns=(5, 7))
    size = (tmp_path / "b" / "2.png").stat().st_size
    assert ImageFolder(tmp_path).stamps()[1].image == b"b/2.png\n1 %d 7\n" % size
