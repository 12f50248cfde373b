"""Images in, rows of a shard out: the loader, the network, the checks on what it gives, and lists of broken images.

There is a list per shard while the extraction runs, and skipped.csv in the store at the end. The list of a shard is
written before the shard is, so that a killed process loses none. Its name begins with a dot: what is only half of a
list is no part of the store, and is not uploaded.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

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

Skipped = tuple[str, int, str, str]


class ImageRange(NamedTuple):
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


def write_skipped(path: Path, skipped: Sequence[Sequence[Any]]) -> None:
    """Write a list of broken images, and none for an empty one."""
    if not skipped:
        path.unlink(missing_ok=True)  # of an earlier attempt, when the images were still broken
        return
    with atomic_write(path) as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *skipped])


def read_skipped(path: Path) -> list[list[str]]:
    """Return a list of broken images, the empty one where there is no file."""
    with suppress(FileNotFoundError), open(path, newline="", encoding="utf-8") as file:
        return [*csv.reader(file)][1:]
    return []


def shards_of_features(
    shards: list[ImageRange],
    network: Backbone,
    splits: Mapping[str, Images],
    device: torch.device,
    args: Any,
    workers: int,
    bar: tqdm,
) -> Iterator[tuple[Tensor, Tensor, list[Skipped]]]:
    """Of each shard features (rows, dim) as they are stored and labels (rows,), on the CPU, and the images left out.

    No batch reaches across two shards, and the readers never pause. workers: processes that read images. Raises
    ProgramError if one is killed, if the backbone cannot take images, for a broken image, a shard of nothing else, and
    features that --dtype does not hold.
    """
    precision = PRECISIONS[args.precision]
    loader = iter(
        DataLoader(
            ImageBatches(splits, network.transform),
            batch_sampler=(batch for shard in shards for batch in shard.batches(args.batch_size)),
            collate_fn=collate,
            num_workers=workers,
            pin_memory=device.type == "cuda",
        )
    )
    for shard in shards:
        chunks, labels, indices, skipped = [], [], [], []
        describe = splits[shard.split].describe
        for keys in shard.batches(args.batch_size):
            with _sentences():
                images, some_labels, some_indices, broken = next(loader)
                if some_indices:
                    images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
                    with torch.inference_mode(), torch.autocast(device.type, precision, enabled=precision is not None):
                        chunks.append(network.features(images))
            skipped += [(shard.split, index, describe(index), reason) for index, reason in broken]
            if skipped and args.on_error == "stop":
                raise ProgramError(
                    f"cannot read {skipped[0][2]} ({skipped[0][3]}). Put a whole image in its place, or leave out such "
                    "images by --on_error skip; the command then continues after the last finished shard"
                )
            labels.append(some_labels)
            indices += some_indices
            bar.update(len(keys))
        if not indices:
            raise ProgramError(
                f"none of the {len(skipped)} images of {shard} can be read, the first being {skipped[0][2]} "
                f"({skipped[0][3]}): check the disk they lie on, or take a larger --shard_rows and another --store"
            )
        features = torch.cat(chunks)  # (rows, dim), as the network gives them
        stored = features.to(DTYPES[args.dtype])
        for tensor, what in (
            (features, "that are not finite: try --precision fp32, or other weights"),
            (stored, f"that {args.dtype} cannot hold: give another --dtype, and another --store"),
        ):
            for row in (~tensor.isfinite().all(1)).nonzero()[:1]:
                largest = features[row].abs().max().item()
                raise ProgramError(f"{describe(indices[row])} has features (up to {largest:.3g}) {what}")
        yield stored.cpu(), torch.cat(labels), skipped


@contextmanager
def _sentences() -> Iterator[None]:
    try:
        yield
    except BackboneError as error:
        raise ProgramError(str(error)) from None
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker (pid"):
            raise
        raise ProgramError(
            f"a process that reads images was killed ({str(error).splitlines()[0]}), often for want of memory: "
            "continue with fewer --workers or a smaller --batch_size"
        ) from None
