"""The images that an extraction left out: a list per shard while it runs, skipped.csv in the store at the end.

The list of a shard is written before the shard is, so that a killed process loses none. Its name begins with a dot:
what is only half of a list is no part of the store, and is not uploaded.
"""

import csv
from collections.abc import Sequence
from pathlib import Path

from data.atomic_file import atomic_write

SKIPPED = "skipped.csv"
COLUMNS = ("split", "image", "path", "reason")

Skipped = tuple[str, int, str, str]  # split, number of the image in the split's list, its path, why


def write_skipped(folder: Path, shard: str, skipped: Sequence[Skipped]) -> None:
    """Write a shard's list, and none for an empty one. shard: its name, such as train-00003."""
    path = _of_shard(folder, shard)
    if skipped:
        _write(path, skipped)
    else:
        path.unlink(missing_ok=True)  # of an earlier attempt, when the images were still broken


def merge_skipped(folder: Path, shards: Sequence[str]) -> None:
    """Write skipped.csv from the lists of `shards`, in that order; no file where no image was left out."""
    merged = [row for shard in shards for row in _read(_of_shard(folder, shard))]
    if merged:
        _write(folder / SKIPPED, merged)


def remove_parts(folder: Path) -> None:
    """Delete the shards' lists, once the store is complete."""
    for path in folder.glob(_of_shard(folder, "*").name):
        path.unlink()


def read_skipped(folder: Path) -> list[Skipped]:
    """The images that were left out of a complete store."""
    return _read(folder / SKIPPED)


def _of_shard(folder: Path, shard: str) -> Path:
    return folder / f".skipped-{shard}.csv"


def _write(path: Path, skipped: Sequence[Skipped]) -> None:
    with atomic_write(path) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(skipped)


def _read(path: Path) -> list[Skipped]:
    if not path.exists():
        return []
    # Paths come from the disk, and may hold what is not UTF-8.
    with open(path, newline="", encoding="utf-8", errors="surrogateescape") as file:
        return [(row["split"], int(row["image"]), row["path"], row["reason"]) for row in csv.DictReader(file)]
