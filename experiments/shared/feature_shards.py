"""Images in, rows of a shard out: the loader, the network, and the checks on what it gives."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from data.embeddings.store import dtype_name
from data.image_sources import ImageBatches, Images, collate
from experiments.shared.command_line import RunError
from experiments.shared.skipped_images import Skipped
from models.backbones import Backbone, BackboneError


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


def feature_batches(
    shards: list[ImageRange],
    network: Backbone,
    splits: Mapping[str, Images],
    device: torch.device,
    *,
    batch_size: int,
    workers: int,
    precision: torch.dtype | None,
) -> Iterator[tuple[Tensor, Tensor, list[int], list[tuple[int, str]]]]:
    """Features (b, dim) on the device, labels (b,), indices, and (index, reason) of broken images, batch by batch.

    workers: processes that read images, 0 for none. precision: of the autocast, None for none. The batches of all
    shards come one after another, none across two: the readers never pause. Raises RunError if one of them is killed,
    and for a backbone that cannot take the images.
    """
    loader = DataLoader(
        ImageBatches(splits, network.transform),
        batch_sampler=(batch for shard in shards for batch in shard.batches(batch_size)),
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
        raise RunError(str(error)) from None
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker (pid"):
            raise
        raise RunError(
            f"a process that reads images was killed ({str(error).splitlines()[0]}), often for want of memory: "
            "continue with fewer --workers or a smaller --batch_size"
        ) from None


def collect(
    shard: ImageRange,
    batches: Iterator[tuple[Tensor, Tensor, list[int], list[tuple[int, str]]]],
    images: Images,
    *,
    batch_size: int,
    dtype: torch.dtype,
    stop: bool,
    bar: tqdm,
) -> tuple[Tensor, Tensor, list[Skipped]]:
    """The rows of one shard: features (rows, dim) of `dtype` and labels (rows,) on the CPU, and the images left out.

    Raises RunError for a broken image that is not to be skipped, a shard of nothing else, and features that `dtype`
    does not hold. stop: whether a broken image is an error. bar: advances with each batch.
    """
    chunks, labels, indices, skipped = [], [], [], []
    for keys in shard.batches(batch_size):
        chunk, chunk_labels, chunk_indices, broken = next(batches)
        skipped += [(shard.split, index, images.describe(index), reason) for index, reason in broken]
        if skipped and stop:
            _, _, path, reason = skipped[0]
            raise RunError(
                f"cannot read {path} ({reason}). Put a whole image in its place, or leave out such images by "
                "--on_error skip; the command then continues after the last finished shard"
            )
        chunks.append(chunk)
        labels.append(chunk_labels)
        indices += chunk_indices
        bar.update(len(keys))
    if not indices:
        _, _, path, reason = skipped[0]
        raise RunError(
            f"none of the {len(skipped)} images of {shard} can be read, the first being {path} ({reason}): check the "
            "disk they lie on; if they are broken indeed, take a larger --shard_rows and another --store"
        )
    features = torch.cat(chunks)  # (rows, dim), as the network gives them
    stored = features.to(dtype)
    finite = torch.isfinite(features).all(1), torch.isfinite(stored).all(1)  # (rows,) each
    for whole, what, remedy in zip(
        finite,
        ("features that are not finite", f"features that {dtype_name(dtype)} cannot hold"),
        ("try --precision fp32, or other weights", "give --dtype bfloat16 or float32, and another --store"),
    ):
        if not bool(whole.all()):
            row = int((~whole).nonzero()[0])
            largest = features[row].abs().max().item()
            raise RunError(f"{images.describe(indices[row])} has {what} (up to {largest:.3g}): {remedy}")
    return stored.cpu(), torch.cat(labels), skipped
