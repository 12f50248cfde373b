"""Embeddings of any labelled images by any backbone, as a torch file that finetune_imagenet.py trains on.

    python experiments/extract_embeddings.py --dataset FOLDER --backbone convnext_tiny --output own.pt
    python experiments/extract_embeddings.py --dataset digits --checkpoint results/runs/NAME --output digits.pt
    torchrun --nproc_per_node 8 experiments/extract_embeddings.py --train_dir /data/imagenet/train \\
        --test_dir /data/imagenet/val --backbone resnext101_32x48d_wsl --precision bf16 --output wsl.pt

FOLDER has train/, val/ and test/, or some of them, each with a folder per class; val/ validates. The paper, for which
ImageNet's val/ is the test set, draws the rows that validate from train/. Images are not augmented, and keep their
order. Each SHARD_ROWS images become a file in OUTPUT.parts/ until all are there, so that a command that was stopped or
killed continues when it is repeated. The shard of an image that was replaced meanwhile is made again.
"""

import argparse
import hashlib
import itertools
import json
import math
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset
from tqdm import tqdm

from data.cifar import DATASETS, load_complete, load_dataset
from data.images import Pixels, UnreadableImage, find_splits, open_folders
from data.torch_file import load_torch_file
from experiments.common import flags
from experiments.common.backbones import LITE, PAPER, Backbone, cifar_backbone, timm_backbone
from experiments.common.processes import Processes
from experiments.common.records import hold, replace_file
from experiments.common.run import load_checkpoint

DTYPES = ("float16", "float32", "bfloat16")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = flags.make_parser(__doc__)
    parser.add_argument("--dataset", help=f"folder of images, or {', '.join(DATASETS)}")
    parser.add_argument("--train_dir", type=flags.path, help="folder of training images, instead of --dataset")
    parser.add_argument("--test_dir", type=flags.path, help="folder of test images, instead of --dataset")
    network = parser.add_mutually_exclusive_group(required=True)
    network.add_argument("--backbone", help=f"network of timm, or of the paper: {', '.join(PAPER)}")
    network.add_argument("--checkpoint", type=flags.path, help="run folder of train_cifar100.py, for its network")
    message = f"pretrained, none (random), {LITE}, or the file of a state dict (default: %(default)s)"
    parser.add_argument("--weights", default="pretrained", help=message)
    parser.add_argument("--resolution", type=flags.positive_int, help="pixels of a side (default: the backbone's)")
    parser.add_argument("--output", type=flags.path, required=True, help="torch file to write")
    parser.add_argument("--dtype", choices=DTYPES, default="float16", help="format of the output (default: float16)")
    flags.add_data_dir(parser)
    parser.add_argument("--shard_rows", type=flags.positive_int, default=8192, help="images per shard (default: 8192)")
    parser.add_argument("--batch_size", type=flags.positive_int, default=128, help="images at a time (default: 128)")
    message = "processes that read images (default: one per core, at most 16)"
    parser.add_argument("--workers", type=int, default=min(16, os.cpu_count() or 1), help=message)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="default: fp32")
    flags.add_device_flags(parser)
    args = parser.parse_args(argv)
    if (args.dataset is None) == (args.train_dir is None and args.test_dir is None):
        parser.error("the images are given by --dataset, or by --train_dir and --test_dir or one of them")
    return args


def open_backbone(args: argparse.Namespace) -> tuple[Backbone, dict[str, Any]]:
    """The network, and the configuration of the run that trained it ({} for a backbone)."""
    if args.backbone:
        return timm_backbone(args.backbone, args.weights, args.resolution), {}
    folder = args.checkpoint.parent if args.checkpoint.is_file() else args.checkpoint
    weights = load_checkpoint(folder)["model"]
    config = json.loads((folder / "config.json").read_text())
    if "fc.weight" not in weights or "model" not in config:
        raise SystemExit(f"error: {folder} is not a run of train_cifar100.py")
    return cifar_backbone(config, weights, args.resolution), config


def open_splits(args: argparse.Namespace, backbone: Backbone, config: dict[str, Any]) -> dict[str, Dataset]:
    """The images of each split, transformed, and their labels."""
    if args.dataset not in DATASETS:
        separate = {"train": args.train_dir, "test": args.test_dir}
        folders = find_splits(flags.path(args.dataset)) if args.dataset else separate
        return open_folders({split: folder for split, folder in folders.items() if folder}, backbone.transform)
    splits = dict(zip(("train", "test"), load_complete(args.dataset, args.data_dir)))
    if config.get("dataset") == args.dataset:
        # Divided as when the network was trained, so that its validation images are still unseen.
        data = load_dataset(args.dataset, args.data_dir, seed=config["seed"], limit_train=config["limit_train"])
        splits = {"train": data.train, "valid": data.valid, "test": data.test}
    return {name: Pixels(split.inputs, split.labels, backbone.transform) for name, split in splits.items()}


def list_shards(
    args: argparse.Namespace, backbone: Backbone, splits: dict[str, Dataset]
) -> list[tuple[str, str, range]]:
    """The file name, split and rows of each shard; the rows are counted over all splits.

    The name changes with its images, the network and the settings.
    """
    settings = json.dumps([backbone.name, backbone.resolution, backbone.sha256(), args.precision, args.dtype])
    shards, first = [], 0
    for split, images in splits.items():
        stamps = images.stamps()
        for begin in range(0, len(stamps), args.shard_rows):
            end = min(begin + args.shard_rows, len(stamps))
            digest = hashlib.sha256(settings.encode() + b"".join(stamps[begin:end])).hexdigest()
            shards.append((f"{split}-{begin:09}-{digest[:16]}.pt", split, range(first + begin, first + end)))
        first += len(stamps)
    return shards


def extract(args: argparse.Namespace, processes: Processes) -> None:
    device = processes.device
    if args.backbone:
        processes.from_first(lambda: timm_backbone(args.backbone, args.weights).name)  # one process downloads
    backbone, config = open_backbone(args)
    splits = open_splits(args, backbone, config)
    for note in (note for split in splits.values() if processes.is_first for note in split.notes):
        print(f"note: {note}", file=sys.stderr)
    shards = processes.from_first(lambda: list_shards(args, backbone, splits))
    digest = hashlib.sha256("".join(name for name, _, _ in shards).encode()).hexdigest()
    if processes.from_first(lambda: is_made(args.output, digest)):
        processes.print(f"skipped: {args.output} holds these embeddings already")
        return
    parts = Path(f"{args.output}.parts")
    lock = processes.is_first and hold(parts / "lock", f"the extraction of {args.output}")

    # This process makes its share of the missing shards.
    missing = processes.from_first(lambda: [shard for shard in shards if not (parts / shard[0]).exists()])
    processes.print(f"{len(shards)} shards, of which {len(missing)} are to be made on {device}")
    backbone.network.to(device, memory_format=torch.channels_last)
    mine, size = missing[processes.rank :: processes.count], args.batch_size
    # One loader for all shards, so that the processes that read images never pause.
    rows_of_batches = [rows[begin : begin + size] for _, _, rows in mine for begin in range(0, len(rows), size)]
    images = iter(DataLoader(ConcatDataset(splits.values()), batch_sampler=rows_of_batches, num_workers=args.workers))
    try:
        for name, _, rows in tqdm(mine, unit="shard", disable=None if processes.is_first else True):
            batches = itertools.islice(images, math.ceil(len(rows) / size))
            replace_file(parts / name, extract_shard(batches, backbone, args, device))
    except UnreadableImage as error:  # a worker of DataLoader puts a traceback before the message
        raise SystemExit(f"error: {str(error).rpartition('UnreadableImage: ')[2].strip()}") from None
    processes.sum(torch.zeros(1))  # wait for the other processes

    if processes.is_first:
        num_classes = DATASETS.get(args.dataset) or len(next(iter(splits.values())).classes)
        info = {"backbone": backbone.name, "resolution": backbone.resolution, "source": args.dataset or "folders"}
        info |= {"weights": Path(args.weights).name if args.backbone else "checkpoint", "precision": args.precision}
        info |= {"num_classes": num_classes, "shard_rows": args.shard_rows, "digest": digest}
        replace_file(args.output, {"info": info, **merge(parts, shards, list(splits))})
        lock.release()
        shutil.rmtree(parts)
        rows = ", ".join(f"{len(split)} {name}" for name, split in splits.items())
        print(f"{args.output}: {rows} rows\ntrain on it: python experiments/finetune_imagenet.py -d {args.output}")


def is_made(output: Path, digest: str) -> bool:
    """Return whether the output exists with this digest. Raises SystemExit for another file of that name."""
    if not output.exists():
        return False
    content = load_torch_file(output, "a file of embeddings", mapped=True)
    if not isinstance(content, Mapping) or content.get("info", {}).get("digest") != digest:
        raise SystemExit(f"error: {output} is there, made of other images or with other settings: delete or rename it")
    return True


@torch.inference_mode()
def extract_shard(
    batches: Iterable[tuple[Tensor, Tensor]], backbone: Backbone, args: argparse.Namespace, device: torch.device
) -> dict[str, Tensor]:
    """The embeddings (R, d) and labels (R,) of some batches. Raises SystemExit for features that are not finite."""
    features, labels = [], []
    for batch, batch_labels in batches:
        batch = batch.to(device, memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            found = backbone.features(batch)  # (batch, d)
        if found.dim() != 2:
            raise SystemExit(f"error: {backbone.name} has no single vector before its classifier: {tuple(found.shape)}")
        stored = found.to(getattr(torch, args.dtype))
        if not stored.isfinite().all():
            largest = f"features of up to {found.float().abs().max().item():.3g}"
            raise SystemExit(f"error: {largest} are not finite in {args.dtype}: try --precision fp32, --dtype float32")
        features.append(stored.cpu())
        labels.append(batch_labels)
    return {"embeddings": torch.cat(features), "labels": torch.cat(labels)}


def merge(parts: Path, shards: list[tuple[str, str, range]], splits: list[str]) -> dict[str, Tensor]:
    """Join the shards to the tensors of the output file. They lie in files, so that no set is too large for memory."""
    content = {}
    for name in splits:
        loaded = [torch.load(parts / file, mmap=True, weights_only=True) for file, split, _ in shards if split == name]
        labels = torch.cat([shard["labels"] for shard in loaded])
        dim, dtype = loaded[0]["embeddings"].shape[1], loaded[0]["embeddings"].dtype
        whole = torch.from_file(str(parts / f"{name}.bin"), shared=True, size=len(labels) * dim, dtype=dtype)
        embeddings = whole.view(len(labels), dim)
        torch.cat([shard["embeddings"] for shard in loaded], out=embeddings)
        content |= {f"{name}_embeddings": embeddings, f"{name}_labels": labels}
    return content


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    processes = Processes(args.device, args.threads)
    extract(args, processes)
    processes.close()
    return 0


if __name__ == "__main__":
    main()
