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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader
from tqdm import tqdm

from data.cifar import DATASETS, load_complete, load_dataset
from data.images import ImageFolder, Pixels, UnreadableImage, find_splits, notes_of_splits, open_folders
from data.torch_file import load_torch_file
from experiments.common import door, flags
from experiments.common.backbones import LITE, PAPER, Backbone, cifar_backbone, timm_backbone
from experiments.common.files import allocate, lock_folder
from experiments.common.paths import user_path
from experiments.common.processes import Processes
from experiments.common.run import load_checkpoint
from experiments.common.torch_files import save_torch_file

DTYPES = ("float16", "float32", "bfloat16")
Images = ImageFolder | Pixels


class Shard(NamedTuple):
    """A file of some images' embeddings, which becomes a part of a split.

    name: changes with the images, the network and the settings, and stays when the images are copied elsewhere.
    files: changes with the images' files.
    rows: of the images, counted over all splits.
    """

    name: str
    files: str
    split: str
    rows: range

    @property
    def file_name(self) -> str:
        return f"{self.files}-{self.name}"


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = flags.make_parser(__doc__)
    parser.add_argument("--dataset", help=f"folder of images, or {', '.join(DATASETS)}")
    parser.add_argument("--train_dir", type=user_path, help="folder of training images, instead of --dataset")
    parser.add_argument("--test_dir", type=user_path, help="folder of test images, instead of --dataset")
    network = parser.add_mutually_exclusive_group(required=True)
    network.add_argument("--backbone", help=f"network of timm, or of the paper: {', '.join(PAPER)}")
    network.add_argument("--checkpoint", type=user_path, help="run folder of train_cifar100.py, for its network")
    parser.add_argument(
        "--weights",
        default="pretrained",
        help=f"pretrained, none (random), {LITE}, or the file of a state dict (default: %(default)s)",
    )
    parser.add_argument("--resolution", type=flags.positive_int, help="pixels of a side (default: the backbone's)")
    parser.add_argument("--output", type=user_path, required=True, help="torch file to write")
    parser.add_argument("--dtype", choices=DTYPES, default="float16", help="format of the output (default: float16)")
    flags.add_data_dir(parser)
    parser.add_argument("--shard_rows", type=flags.positive_int, default=8192, help="images per shard (default: 8192)")
    parser.add_argument("--batch_size", type=flags.positive_int, default=128, help="images at a time (default: 128)")
    parser.add_argument(
        "--workers",
        type=flags.number(int, 0, 1024),
        default=min(16, os.cpu_count() or 1),
        help="processes that read images (default: one per core, at most 16)",
    )
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="default: fp32")
    flags.add_device_flags(parser)
    args = parser.parse_args(argv)
    if (args.dataset is None) == (args.train_dir is None and args.test_dir is None):
        parser.error("the images are given by --dataset, or by --train_dir and --test_dir or one of them")
    if args.checkpoint is not None and "weights" in flags.given(parser, argv, args):
        parser.error("--weights is of --backbone: the network of --checkpoint has those of its run")
    return args


def open_backbone(args: argparse.Namespace) -> tuple[Backbone, dict[str, Any]]:
    """The network, and the configuration of the run that trained it ({} for a backbone). Raises OSError, ValueError."""
    if args.backbone is not None:
        return timm_backbone(args.backbone, args.weights, args.resolution), {}
    folder = args.checkpoint
    if folder.is_file():
        folder = folder.parent
    saved = load_checkpoint(folder)
    weights = saved["model"]
    try:
        trained = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'} is damaged ({error}): repeat the run with --force") from None
    if "fc.weight" not in weights or "model" not in trained:
        raise ValueError(f"{folder} is not a run of train_cifar100.py")
    if trained.get("run_id") != saved.get("run_id"):
        whose = saved.get("run_id", "an earlier version of this code")
        raise ValueError(
            f"{folder} has the config.json of {trained.get('run_id')} and the checkpoint.pt of {whose}: copy one run's "
            "folder whole"
        )
    trained["epochs_done"] = saved["history"][-1]["epoch"]
    return cifar_backbone(trained, weights, args.resolution), trained


def open_splits(args: argparse.Namespace, backbone: Backbone, trained: dict[str, Any]) -> Mapping[str, Images]:
    """The images of each split, transformed, and their labels. trained: the configuration of the network's run."""
    if args.dataset not in DATASETS:
        return open_folders(folders_of(args), backbone.transform)
    if trained.get("dataset") == args.dataset:
        # Divided as when the network was trained, so that its validation images are still unseen.
        data = load_dataset(args.dataset, args.data_dir, seed=trained["seed"], limit_train=trained["limit_train"])
        splits = {"train": data.train, "valid": data.valid, "test": data.test}
    else:
        train, test = load_complete(args.dataset, args.data_dir)
        splits = {"train": train, "test": test}
    return {name: Pixels(split.inputs, split.labels, backbone.transform) for name, split in splits.items()}


def folders_of(args: argparse.Namespace) -> dict[str, Path]:
    """The folder of each split that the flags name."""
    if args.dataset is not None:
        return find_splits(user_path(args.dataset))
    folders = {}
    if args.train_dir is not None:
        folders["train"] = args.train_dir
    if args.test_dir is not None:
        folders["test"] = args.test_dir
    return folders


def list_shards(args: argparse.Namespace, backbone: Backbone, splits: Mapping[str, Images]) -> list[Shard]:
    """The shards of all splits."""
    settings = json.dumps([backbone.name, backbone.resolution, backbone.sha256(), args.precision, args.dtype])
    shards = []
    first = 0
    for split, images in splits.items():
        stamps = images.stamps()
        for begin in range(0, len(stamps), args.shard_rows):
            end = min(begin + args.shard_rows, len(stamps))
            digest = hashlib.sha256(settings.encode())
            files = hashlib.sha256()
            for stamp in stamps[begin:end]:
                digest.update(stamp.image)
                files.update(stamp.file)
            name = f"{split}-{begin:09}-{digest.hexdigest()[:16]}.pt"
            shards.append(Shard(name, files.hexdigest()[:16], split, range(first + begin, first + end)))
        first += len(stamps)
    return shards


def extract(args: argparse.Namespace, processes: Processes) -> None:
    """Make the missing shards, and the output of all when they are there."""
    if args.backbone is not None and processes.count > 1:
        processes.from_first(lambda: timm_backbone(args.backbone, args.weights).name)  # one process downloads
    backbone, trained = open_backbone(args)
    splits = open_splits(args, backbone, trained)
    if processes.is_first:
        print_notes(args, splits, trained)
    shards = processes.from_first(lambda: list_shards(args, backbone, splits))
    made_of = {
        "digest": digest_of(shard.name for shard in shards),
        "files": digest_of(shard.files for shard in shards),
    }
    parts = Path(f"{args.output}.parts")
    if processes.from_first(lambda: is_made(args.output, made_of)):
        processes.print(f"skipped: {args.output} holds these embeddings already")
        if processes.is_first:
            shutil.rmtree(parts, ignore_errors=True)  # of a command that was killed before it deleted them
        return
    if processes.is_first:
        lock = lock_folder(parts / "lock", f"the extraction of {args.output}")
    missing = processes.from_first(lambda: [shard for shard in shards if not (parts / shard.file_name).exists()])
    processes.print(f"{len(shards)} shards, of which {len(missing)} are to be made on {processes.device}")
    mine = missing[processes.rank :: processes.count]
    make_shards(args, backbone, splits, mine, processes)
    processes.sum(torch.zeros(1))  # wait for the other processes

    if processes.is_first:
        info = describe(args, backbone, splits) | training_of(trained) | made_of
        save_torch_file(args.output, {"info": info, **merge(parts, shards, list(splits))})
        lock.release()
        shutil.rmtree(parts, ignore_errors=True)  # another command that finds the output deletes them, too
        rows = ", ".join(f"{len(split)} {name}" for name, split in splits.items())
        print(f"{args.output}: {rows} rows\ntrain on it: python experiments/finetune_imagenet.py -d {args.output}")


def print_notes(args: argparse.Namespace, splits: Mapping[str, Images], trained: Mapping[str, Any]) -> None:
    notes: list[str] = []
    folders = []
    for split in splits.values():
        notes += split.notes
        if isinstance(split, ImageFolder):
            folders.append(split.folder)
    if folders and args.dataset is not None:
        notes += notes_of_splits(user_path(args.dataset), folders)
    if trained and trained["epochs_done"] < trained["n_epochs"]:
        epochs = f"{trained['epochs_done']} of its {trained['n_epochs']} epochs"
        notes.append(f"the run of {args.checkpoint} has done {epochs}")
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def digest_of(texts: Iterable[str]) -> str:
    return hashlib.sha256("".join(texts).encode()).hexdigest()


def is_made(output: Path, made_of: Mapping[str, str]) -> bool:
    """Return whether the output exists; print a note if its images may have exchanged their names since.

    Args:
        made_of: the entries of its info that name its images and settings (digest), and the images' files (files).

    Raises:
        ValueError: another file has that name.
    """
    if not output.exists():
        return False
    content = load_torch_file(output, "a file of embeddings", mapped=True)
    if not isinstance(content, Mapping) or content.get("info", {}).get("digest") != made_of["digest"]:
        raise ValueError(f"{output} is there, made of other images or with other settings: delete or rename it")
    if content["info"].get("files", made_of["files"]) != made_of["files"]:
        changes = f"image files were renamed, copied or given other rights since {output} was made"
        print(f"note: {changes}: delete it if images exchanged their names", file=sys.stderr)
    return True


def describe(args: argparse.Namespace, backbone: Backbone, splits: Mapping[str, Images]) -> dict[str, Any]:
    """What the output says of itself."""
    if args.dataset in DATASETS:
        num_classes = DATASETS[args.dataset]
    else:
        num_classes = len(next(iter(splits.values())).classes)
    weights = "checkpoint"
    if args.backbone is not None:
        weights = Path(args.weights).name
    return {
        "backbone": backbone.name,
        "resolution": backbone.resolution,
        "source": args.dataset or "folders",
        "weights": weights,
        "precision": args.precision,
        "num_classes": num_classes,
        "shard_rows": args.shard_rows,
    }


def training_of(trained: Mapping[str, Any]) -> dict[str, Any]:
    """How long the network of a run was trained; {} for a backbone."""
    if not trained:
        return {}
    return {"epochs_done": trained["epochs_done"], "n_epochs": trained["n_epochs"]}


def make_shards(
    args: argparse.Namespace, backbone: Backbone, splits: Mapping[str, Images], mine: list[Shard], processes: Processes
) -> None:
    """Write the shards of this process. Raises ValueError for an image that cannot be read."""
    parts = Path(f"{args.output}.parts")
    backbone.network.to(processes.device, memory_format=torch.channels_last)
    # One loader for all shards, so that the processes that read images never pause.
    loader = DataLoader(
        ConcatDataset(splits.values()), batch_sampler=batches_of(mine, args.batch_size), num_workers=args.workers
    )
    images = iter(loader)
    hidden = None if processes.is_first else True
    try:
        for shard in tqdm(mine, unit="shard", disable=hidden):
            batches = itertools.islice(images, math.ceil(len(shard.rows) / args.batch_size))
            save_torch_file(parts / shard.file_name, extract_shard(batches, backbone, args, processes.device))
    except UnreadableImage as error:  # a worker of DataLoader puts a traceback before the message
        message = str(error).rpartition("UnreadableImage: ")[2]
        raise ValueError(message.strip()) from None


def batches_of(shards: list[Shard], size: int) -> list[range]:
    """The rows of each batch, none of which has images of two shards."""
    batches = []
    for shard in shards:
        for begin in range(0, len(shard.rows), size):
            batches.append(shard.rows[begin : begin + size])
    return batches


@torch.inference_mode()
def extract_shard(
    batches: Iterable[tuple[Tensor, Tensor]], backbone: Backbone, args: argparse.Namespace, device: torch.device
) -> dict[str, Tensor]:
    """The embeddings (R, d) and labels (R,) of some batches. Raises FloatingPointError where one is not finite."""
    features = []
    labels = []
    for images, batch_labels in batches:
        images = images.to(device, memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            found = backbone.features(images)  # (batch, d)
        if found.dim() != 2:
            raise ValueError(f"{backbone.name} has no single vector before its classifier: {tuple(found.shape)}")
        stored = found.to(getattr(torch, args.dtype))
        if not stored.isfinite().all():
            largest = found.float().abs().max().item()
            raise FloatingPointError(
                f"features of up to {largest:.3g} are not finite in {args.dtype}: try --precision fp32, --dtype float32"
            )
        features.append(stored.cpu())
        labels.append(batch_labels.clone())  # a worker's own tensor holds a file open
    return {"embeddings": torch.cat(features), "labels": torch.cat(labels)}


def merge(parts: Path, shards: list[Shard], splits: list[str]) -> dict[str, Tensor]:
    """Join the shards to the tensors of the output file. They lie in files, so that no set is too large for memory.

    Raises:
        OSError: the disk is full.
    """
    content = {}
    for name in splits:
        loaded = []
        for shard in shards:
            if shard.split == name:
                loaded.append(torch.load(parts / shard.file_name, mmap=True, weights_only=True))
        labels = torch.cat([part["labels"] for part in loaded])
        dim = loaded[0]["embeddings"].shape[1]
        dtype = loaded[0]["embeddings"].dtype
        file = parts / f"{name}.bin"
        allocate(file, len(labels) * dim * dtype.itemsize)
        whole = torch.from_file(str(file), shared=True, size=len(labels) * dim, dtype=dtype)
        embeddings = whole.view(len(labels), dim)
        torch.cat([part["embeddings"] for part in loaded], out=embeddings)
        content[f"{name}_embeddings"] = embeddings
        content[f"{name}_labels"] = labels
    return content


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    processes = Processes(args.device, args.threads, args.precision)
    extract(args, processes)
    processes.close()
    return 0


if __name__ == "__main__":
    sys.exit(door.call(main))
