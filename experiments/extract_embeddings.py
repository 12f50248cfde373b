"""Embeddings of any labelled images by any backbone, as a store that experiments/finetune_imagenet.py trains on.

    torchrun --nproc_per_node 8 experiments/extract_embeddings.py --train_dir /data/imagenet/train \\
        --test_dir /data/imagenet/val --backbone resnext101_32x48d_wsl --precision bf16
    python experiments/extract_embeddings.py --dataset cifar100 --backbone timm:convnext_tiny --upload s3://bucket/name/
    python experiments/extract_embeddings.py --dataset digits --checkpoint results/runs/<run id>/checkpoint.pt

Of a folder val/ validates and test/ is the test set; the paper, which has ImageNet's val/ as its test set, draws the
rows that validate from train/, as heads do here where a store has none.

The store holds every image of every split, in the order of the files, unaugmented: the penultimate features, float16
unless --dtype says otherwise. It is written shard by shard; a command that was stopped, killed even, continues when it
is given again, and ends with the same bytes (on a GPU: with --deterministic). The processes of torchrun take every
so-many-th shard each, in one folder that all can see; the manifest is merged once, at the end. An image that cannot be
read stops the run (--on_error stop), or is left out and listed in skipped.csv (--on_error skip).
"""

if __name__ == "__main__":  # from here on, what goes wrong is a sentence
    from data import program

    program.begin()

import os
import re
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torchvision.transforms import v2
from tqdm import tqdm

from data.checked_json import read_json
from data.cifar100 import CIFAR_MEAN, CIFAR_STD, DIGITS_MEAN, DIGITS_STD, DatasetUnavailableError, normalise
from data.embeddings import DTYPES, MANIFEST, EmbeddingStore, StoreWriter
from data.embeddings.store import UNFINISHED, differences, open_finished
from data.file_lock import held_or_refused, lock_beside
from data.image_sources import ImageSource, open_images
from data.program import CommandLineError, ProgramError
from data.transfers.object_store import Location, ObjectStoreError, upload
from experiments.shared import command_line as cli
from experiments.shared.checkpoint import CURRENT, read_checkpoint
from experiments.shared.command_line import flag
from experiments.shared.environment import ROOT, device_name, set_up_device
from experiments.shared.feature_shards import (
    PRECISIONS,
    ImageRange,
    read_skipped,
    shards_of_features,
    skipped_file,
    write_skipped,
)
from experiments.shared.ranks import Ranks
from models.backbones import NAMED_WEIGHTS, PAPER, Backbone, WeightsError, backbone, resolve_name
from models.resnet_cifar import resnet_cifar

STOPPED = "every finished shard is saved; the same command continues with the next"
MAX_WORKERS = 16
NAMED = 10  # broken images named at the end; skipped.csv names all


def s3_folder(text: str) -> str:
    """Argument type of --upload: the address with one slash at its end, by which it is known to be a store's."""
    scheme, _, rest = text.partition("://")
    if scheme != "s3" or not rest.partition("/")[0]:
        raise ValueError(f"must be s3://bucket/prefix/, got {text!r}")
    return text.rstrip("/") + "/"


@dataclass
class Flags(cli.DeviceFlags, cli.DataFlags):
    """of this script"""

    dataset: str | None = flag(
        None,
        str,
        "cifar100, cifar10, digits, another of torchvision's (a wrong name lists them), or a folder with train/, val/ "
        "and test/, or some of them, each holding a folder per class",
    )
    train_dir: Path | None = flag(None, cli.path, "training images, in place of --dataset")
    test_dir: Path | None = flag(None, cli.path, "test images, in place of --dataset")
    on_error: str = flag("stop", ("stop", "skip"), "at an image that cannot be read; skipped.csv lists what is skipped")
    backbone: str | None = flag(
        None,
        lambda text: resolve_name(text) and text,  # before anything is built
        f"{', '.join(PAPER)}, any other of timm or torchvision; timm:NAME, torchvision:NAME to choose",
        only_one="network",
    )
    checkpoint: Path | None = flag(None, cli.path, "checkpoint.pt of train_cifar100.py", only_one="network")
    weights: str | None = flag(
        None, str, f"{', '.join(NAMED_WEIGHTS)} or the path of a state dict (pretrained); none is random"
    )
    resolution: int | None = flag(None, cli.count, "side of the images in pixels; of the backbone's transform without")
    store: Path | None = flag(
        None, cli.path, "where it is written (data/downloads/embeddings/<dataset>-<backbone>-<pixels>-<dtype>.store)"
    )
    dtype: str = flag("float16", DTYPES)
    shard_rows: int = flag(8192, cli.count, "images per shard")
    upload: str | None = flag(None, s3_folder, "s3://bucket/prefix/ that receives the store")
    endpoint_url: str | None = flag(None, cli.address("http", "https"), "of the S3 server")
    batch_size: int = flag(128, cli.count, "images at a time")
    workers: int | None = flag(
        None, cli.whole_number(0), f"processes that read images, per GPU; the CPU cores, at most {MAX_WORKERS}, without"
    )
    precision: str = flag("fp32", PRECISIONS, "of the network, by autocast; fp16 on a GPU")
    deterministic: bool = flag(False, bool, "deterministic kernels where there are any")


@dataclass
class RunConfig:
    """What is read of a run's config.json."""

    model: str
    dataset: str
    seed: int
    limit_train: int | None


def checkpoint_backbone(path: Path, resolution: int | None) -> tuple[Backbone, RunConfig]:
    """The network of a checkpoint of train_cifar100.py, or of its folder, and its run; its features at `fc`.

    Raises ProgramError.
    """
    path = path / CURRENT if path.is_dir() else path
    try:
        config = read_json(path.parent / "config.json", RunConfig)
        weights = read_checkpoint(path)["model"]
        network = resnet_cifar(config.model, len(weights["fc.weight"]))
        network.load_state_dict(weights)
    except FileNotFoundError as error:
        raise ProgramError(
            f"there is no {error.filename}: --checkpoint is the checkpoint.pt in a run folder of train_cifar100.py, "
            "with its config.json beside it"
        ) from None
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ProgramError(f"{path} is not a checkpoint of train_cifar100.py ({reason})") from None
    mean, std = (DIGITS_MEAN, DIGITS_STD) if config.dataset == "digits" else (CIFAR_MEAN, CIFAR_STD)
    resolution = resolution or 32
    found = Backbone(
        f"{config.dataset}-{config.model}",
        network,
        lambda images: network.features(normalise(images, mean, std)),
        dim=network.fc.in_features,
        resolution=resolution,
        # Bytes until they are on the device; both steps leave an image of the right size as it is.
        transform=v2.Compose([v2.Resize(resolution), v2.CenterCrop(resolution), v2.PILToTensor()]),
        heads=("fc",),
    )
    return found, config


def extract(argv: list[str] | None, ranks: Ranks) -> int:
    """Write the store that the command line describes; return the exit status."""
    # Rank 0 goes ahead as far as the loop, and the others follow: what is wrong is said once, and what must be
    # downloaded is downloaded once.
    ranks.follow_first()
    args = cli.parse(Flags, argv, __doc__)
    cli.check(args.backbone or args.checkpoint, "one of the arguments --backbone --checkpoint is required (see --help)")
    told = "the images are given by --dataset, or by --train_dir and --test_dir or one of them (see --help)"
    cli.check((args.dataset is None) == bool(args.train_dir or args.test_dir), told)
    cli.check(not (args.checkpoint and args.weights), "--checkpoint brings its own weights: leave --weights out")
    told = "--endpoint_url is of the server for --upload: give both or neither (see --help)"
    cli.check(args.upload or not args.endpoint_url, told)
    if args.upload:
        try:
            Location(args.upload, args.endpoint_url)
        except ObjectStoreError as error:
            raise CommandLineError(str(error)) from None
    size = args.batch_size * 3 * 4 * (args.resolution or 1) ** 2
    cli.check_memory(size, f"--batch_size {args.batch_size} images of --resolution {args.resolution}")

    # Device.
    device = ranks.device(args.device)
    fits = args.precision != "fp16" or device.type == "cuda"
    cli.check(fits, "--precision fp16 is for GPUs: give bf16 or fp32 on a CPU")
    set_up_device(device, args.threads, args.deterministic)

    # Images, by name; of the data that trained the network in its division, since it knows what trained it too well.
    division = None
    if args.checkpoint:
        network, config = checkpoint_backbone(args.checkpoint, args.resolution)
        weights = "checkpoint"
        if args.dataset == config.dataset:
            division = {"seed": config.seed, "limit_train": config.limit_train}
    folders = {split: folder for split, folder in (("train", args.train_dir), ("test", args.test_dir)) if folder}
    limits = {"train": args.limit_train, "test": args.limit_test}
    with cli.refusing(DatasetUnavailableError):
        where = {"folders": folders, "mirror": args.mirror, "limits": limits, "division": division}
        source = open_images(args.dataset, args.data_dir, **where)

    # Backbone.
    if not args.checkpoint:
        weights = args.weights or "pretrained"
        if weights == "pretrained":
            ranks.say(f"{args.backbone}: pretrained weights, downloaded unless they are here")
        where = weights if weights in NAMED_WEIGHTS else Path(os.path.expanduser(weights))
        with cli.refusing(WeightsError):
            network = backbone(args.backbone, where, resolution=args.resolution)
        weights = weights if weights in NAMED_WEIGHTS else "file"

    # Store: what is there already, and what this process has to do.
    settings = {
        "dim": network.dim,
        "dtype": DTYPES[args.dtype],
        "num_classes": len(source.class_names) or None,
        "backbone": network.name,
        "resolution": network.resolution,
        "source": source.name,
        "details": {
            "weights": weights,
            "weights_sha256": network.weights_sha256(),
            "transform": " ".join(str(network.transform).split()),
            "precision": args.precision,
            "shard_rows": args.shard_rows,
            "images": source.fingerprint,
            "class_names": list(source.class_names),
        },
    }
    name = re.sub(f"[:{os.sep}]", "_", f"{source.name}-{network.name}-{network.resolution}-{args.dtype}.store")
    folder = args.store or ROOT / "data" / "downloads" / "embeddings" / name
    busy, lock = f"another process is writing {folder}", lock_beside(folder)
    # Rank 0 holds it for all.
    with held_or_refused(lock, ProgramError, busy, "the folder") if ranks.is_first else nullcontext():
        if (folder / MANIFEST).exists():
            store = open_finished(folder)
            found = {**vars(store), "dtype": DTYPES[store.dtype_name], **store.details}
            # The number of classes may not be known before the labels are.
            known = {"details": store.details, "num_classes": settings["num_classes"] or store.num_classes}
            changed = differences(found, {**settings, **settings["details"], **known})
            cli.check(not changed, f"{folder} is complete, with other settings ({changed}): choose another --store")
            ranks.let_follow()
            ranks.say(f"skipped: {folder} holds these embeddings already")
        else:
            store = write_store(folder, settings, source, network, device, args, ranks)
    if ranks.is_first:
        for path in folder.glob(skipped_file(folder, "*").name):
            path.unlink()  # merged, or of images that were mended
        report(store)
        if args.upload:
            upload(store.path, args.upload, endpoint_url=args.endpoint_url)
            ranks.say(f"uploaded: {args.upload}")
    return 0


def write_store(
    folder: Path,
    settings: dict,
    source: ImageSource,
    network: Backbone,
    device: torch.device,
    args: Flags,
    ranks: Ranks,
) -> EmbeddingStore | None:
    """Write the shards that are missing, this process its share; return the store, None to all but rank 0."""
    free = (folder / UNFINISHED).exists() or not any(folder.glob("[!.]*"))
    cli.check(free, f"{folder} holds other files, and no store that was begun: choose another --store")
    if ranks.is_first and not any(folder.glob("*.shard.json")):
        (folder / UNFINISHED).unlink(missing_ok=True)  # settings under which nothing was written bind no one
    with cli.refusing():
        writer = StoreWriter(folder, shard_rows=args.shard_rows, **settings)
    shards = [
        ImageRange(split, number, begin, min(begin + args.shard_rows, len(images)))
        for split, images in source.splits.items()
        for number, begin in enumerate(range(0, len(images), args.shard_rows))
    ]
    # Shares are of the whole list, since what is present differs with the moment at which a process looks.
    present = {split: writer.present(split) for split in source.splits}
    mine = [shard for shard in shards[ranks.rank :: ranks.count] if shard.number not in present[shard.split]]
    if ranks.is_first:
        for note in source.notes:
            print(f"note: {note}", file=sys.stderr)
    done = sum(map(len, present.values()))
    beginning = f"continuing after {done} of" if done else "beginning,"
    ranks.say(f"{folder}: {beginning} {len(shards)} shards, on {device_name(device)}")
    ranks.let_follow()

    # Loop.
    workers = args.workers
    if workers is None:
        workers = max(1, min((os.cpu_count() or 1) // ranks.local_count, MAX_WORKERS))
    started = time.perf_counter()
    network = network.to(device, memory_format=torch.channels_last)
    images = sum(shard.end - shard.begin for shard in mine)
    with tqdm(total=images, unit="image", disable=not ranks.is_first or not sys.stderr.isatty()) as bar:
        contents = shards_of_features(mine, network, source.splits, device, args, workers, bar)
        for shard, (features, labels, broken) in zip(mine, contents):
            # Before the shard: one that is present has its list of broken images.
            write_skipped(skipped_file(folder, shard), broken)
            writer.write(shard.split, shard.number, features, labels)
            left_out = f", {len(broken)} left out" if broken else ""
            seconds = time.perf_counter() - started
            ranks.say(f"{shard}: {len(labels)} images{left_out}, {seconds:.1f} s", by_each=True)

    # Finish: one process merges the manifest when all are done.
    images = sum(ranks.gathered(images))
    seconds = time.perf_counter() - started
    if not ranks.is_first:
        return None
    write_skipped(skipped_file(folder), [row for shard in shards for row in read_skipped(skipped_file(folder, shard))])
    store = writer.finish({split: sum(shard.split == split for shard in shards) for split in source.splits})
    by = f" by {ranks.count} processes" if ranks.count > 1 else ""
    ranks.say(f"{images} images in {seconds:.1f} s: {images / seconds:.1f} images/s{by}")
    return store


def report(store: EmbeddingStore) -> None:
    """Print what the store holds, what was left out, and how to train on it."""
    rows = ", ".join(f"{len(split)} {name}" for name, split in store.splits.items())
    print(f"store: {store.path}\n    {rows} rows of {store.dim} {store.dtype_name}, {store.num_classes} classes")
    if skipped := read_skipped(skipped_file(store.path)):
        listed = [f"{path} ({reason})" for _, _, path, reason in skipped[:NAMED]]
        listed += [f"and {len(skipped) - NAMED} more"] if len(skipped) > NAMED else []
        told = f"warning: {len(skipped)} images could not be read and are not in the store; all in"
        print(f"{told} {skipped_file(store.path)}:", *listed, sep="\n    ", file=sys.stderr)
    print(f"train on it: python experiments/finetune_imagenet.py -d {store.path}")


def main(argv: list[str] | None = None) -> int:
    return cli.finish(lambda ranks: extract(argv, ranks), stopped=STOPPED)


if __name__ == "__main__":
    program.end(main())
