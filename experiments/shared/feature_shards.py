"""Images in, rows of a shard out: the loader, the network, the checks on what it gives, and lists of broken images.

There is a list per shard while the extraction runs, and skipped.csv in the store at the end. The list of a shard is
written before the shard is, so that a killed process loses none. Its name begins with a dot: what is only half of a
list is no part of the store, and is not uploaded.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from data.atomic_file import atomic_write
from data.embeddings import DTYPES
from data.image_sources import ImageBatches, Images, collate
from data.program import ProgramError
from models.backbones import Backbone, BackboneError

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
COLUMNS = ("split", "image", "path", "reason")  # image: its number in the split's list

# Of a batch: features (b, dim) on the device, labels (b,), indices, and (index, reason) of broken images.
Features = tuple[Tensor, Tensor, list[int], list[tuple[int, str]]]
Skipped = tuple[str, int, str, str]


@dataclass(frozen=True)
class ImageRange:
    """The images [begin, end) of a split, which become its shard `number`."""

    split: str
    number: int
    begin: int
    end: int

    def __str__(self) -> str:
        return f"{self.split}-{self.number:05}"

    def batches(self, batch_size: int) -> Iterator[list[tuple[str, int]]]:
        """(split, index) of each image, in batches."""
        for begin in range(self.begin, self.end, batch_size):
            yield [(self.split, index) for index in range(begin, min(begin + batch_size, self.end))]


def skipped_file(folder: Path, shard: object = None) -> Path:
    """Return where the broken images of a store are listed, or those of one of its shards, such as train-00003."""
    return folder / ("skipped.csv" if shard is None else f".skipped-{shard}.csv")


def write_skipped(path: Path, skipped: Sequence[Skipped]) -> None:
    """Write a list of broken images, and none for an empty one."""
    if not skipped:
        path.unlink(missing_ok=True)  # of an earlier attempt, when the images were still broken
        return
    with atomic_write(path) as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *skipped])


def read_skipped(path: Path) -> list[Skipped]:
    """Return a list of broken images, the empty one where there is no file."""
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return [(row["split"], int(row["image"]), row["path"], row["reason"]) for row in csv.DictReader(file)]


def feature_batches(
    shards: list[ImageRange],
    network: Backbone,
    splits: Mapping[str, Images],
    device: torch.device,
    args: Any,
    workers: int,
) -> Iterator[Features]:
    """The features of all shards, batch by batch; no batch reaches across two shards, and the readers never pause.

    workers: processes that read images. Raises ProgramError if one is killed, or if the backbone cannot take images.
    """
    precision = PRECISIONS[args.precision]
    loader = DataLoader(
        ImageBatches(splits, network.transform),
        batch_sampler=(batch for shard in shards for batch in shard.batches(args.batch_size)),
        collate_fn=collate,
        num_workers=workers,
        pin_memory=device.type == "cuda",
    )
    try:
        for images, labels, indices, broken in loader:
            features = torch.empty(0, network.dim, device=device)
            if indices:
                images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
                with torch.inference_mode(), torch.autocast(device.type, precision, enabled=precision is not None):
                    features = network.features(images)
            yield features, labels, indices, broken
    except BackboneError as error:
        raise ProgramError(str(error)) from None
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker (pid"):
            raise
        raise ProgramError(
            f"a process that reads images was killed ({str(error).splitlines()[0]}), often for want of memory: "
            "continue with fewer --workers or a smaller --batch_size"
        ) from None


def collect(
    shard: ImageRange, batches: Iterator[Features], images: Images, args: Any, bar: tqdm
) -> tuple[Tensor, Tensor, list[Skipped]]:
    """The rows of one shard, features (rows, dim) and labels (rows,) on the CPU, and the images left out.

    Raises ProgramError for a broken image, a shard of nothing else, and features that --dtype does not hold.
    """
    chunks, labels, indices, skipped = [], [], [], []
    for keys in shard.batches(args.batch_size):
        chunk, chunk_labels, chunk_indices, broken = next(batches)
        skipped += [(shard.split, index, images.describe(index), reason) for index, reason in broken]
        if skipped and args.on_error == "stop":
            raise ProgramError(
                f"cannot read {skipped[0][2]} ({skipped[0][3]}). Put a whole image in its place, or leave out such "
                "images by --on_error skip; the command then continues after the last finished shard"
            )
        chunks.append(chunk)
        labels.append(chunk_labels)
        indices += chunk_indices
        bar.update(len(keys))
    if not indices:
        raise ProgramError(
            f"none of the {len(skipped)} images of {shard} can be read, the first being {skipped[0][2]} "
            f"({skipped[0][3]}): check the disk they lie on, or take a larger --shard_rows and another --store"
        )
    features = torch.cat(chunks)  # (rows, dim), as the network gives them
    stored = features.to(DTYPES[args.dtype])
    for tensor, what, remedy in (
        (features, "features that are not finite", "try --precision fp32, or other weights"),
        (stored, f"features that {args.dtype} cannot hold", "give another --dtype, and another --store"),
    ):
        finite = tensor.isfinite().all(1)  # (rows,)
        if not finite.all():
            row = int((~finite).nonzero()[0])
            largest = features[row].abs().max().item()
            raise ProgramError(f"{images.describe(indices[row])} has {what} (up to {largest:.3g}): {remedy}")
    return stored.cpu(), torch.cat(labels), skipped
