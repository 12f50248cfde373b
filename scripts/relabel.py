"""Write a file of embeddings with other labels: some training labels wrong, or other classes.

    python scripts/relabel.py heads.pt --label_noise .2 --output heads_noise.pt       # drawn among five class ids
    python scripts/relabel.py heads.pt --label_noise .2 --among 100 --draw 1 --noisy_valid --output heads_noise.pt
    python scripts/relabel.py heads.pt --human CIFAR-100_human.pt --noisy_valid --output heads_human.pt
    python scripts/relabel.py cifar100.pt --num_classes 1000 --output cifar100_of_1000.pt

Labels that validate stay right without --noisy_valid: those of valid, or of --num_valid rows that split seed 0 chooses.
Runs that would validate on other rows of the new file are refused. With --noisy_valid they are wrong as those that
train, and the new file has one more split, clean: the rows of valid with correct labels. Two matrices T for forward
correction lie beside the new file: NAME_true.pt, of the noise itself (human labels: their shares among all training
labels of a class), and NAME_estimated.pt, counted on 5 % of the rows that train. --num_classes: ten classes in one, or
each in ten, by which of ten random directions a row lies furthest along from the mean of its class.

A file with other content than the call would write is not replaced, and the call is refused.
"""

import argparse
import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.embeddings import Embeddings, load_embeddings, split_rows
from data.label_noise import human_labels, noisy_labels
from data.torch_file import load_torch_file
from experiments.common import door, flags
from experiments.common.files import check_replaceable
from experiments.common.paths import user_path
from experiments.common.rows import locked
from experiments.common.torch_files import save_torch_file

OF_NOISE = ("among", "draw", "noisy_valid", "num_valid")  # flags of wrong labels
KNOWN_SHARE = 0.05  # of the rows that train, for the estimated matrix
NUM_VALID = 5000
SPLIT_SEED = 0  # of the rows that validate
ADVICE = "delete or rename it"
PRIOR_ROWS = 10  # that uniform noise counts as beside the 22 or so rows of a class that are known


def counted_matrix(clean: Tensor, noisy: Tensor, classes: int, prior_rows: float) -> Tensor:
    """T (classes, classes): the shares of the noisy labels (N,) of each clean class, float64.

    prior_rows: so many rows of each class are added, which are spread as uniform noise of the rate of all rows spreads
    them, so that a pair of classes that was not seen has no probability of 0.
    """
    counts = torch.bincount(clean * classes + noisy, minlength=classes**2).view(classes, classes).double()
    wrong = 1 - counts.diag().sum() / counts.sum()
    counts += prior_rows * torch.full_like(counts, wrong / (classes - 1)).fill_diagonal_(1 - wrong)
    return counts / counts.sum(1, keepdim=True)


def wrong_labels(args: argparse.Namespace, train: Tensor, rows: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """The labels (N,) that train, wrong at some of these rows, and the matrix T (classes, classes) of the noise.

    Raises:
        ValueError: --human has labels of other images.
    """
    noisy = train.clone()
    if args.human is not None:
        by_people = human_labels(args.human, train)
        noisy[rows] = by_people[rows]
        return noisy, counted_matrix(train, by_people, classes, prior_rows=0)
    noisy[rows] = noisy_labels(train[rows], args.among, args.label_noise, torch.Generator().manual_seed(args.draw))
    block = torch.full((args.among, args.among), args.label_noise / args.among, dtype=torch.float64)
    block.diagonal().add_(1 - args.label_noise)
    return noisy, torch.block_diag(*[block] * (classes // args.among))


def matrix_files(output: Path) -> dict[str, Path]:
    """The files of the two matrices beside a file of embeddings."""
    return {name: output.with_name(f"{output.stem}_{name}.pt") for name in ("true", "estimated")}


def kind_of_labels(args: argparse.Namespace) -> str:
    """What the column labels of a row says."""
    if args.human is not None:
        return "human"
    if args.label_noise:
        return f"{args.label_noise:g} among {args.among}, draw {args.draw}"
    return "right"


def right_rows(args: argparse.Namespace, data: Embeddings) -> dict[str, Any]:
    """Where train keeps its right labels, for check_right_rows; {} where all of them are wrong alike, or right."""
    if args.noisy_valid or "valid" in data.splits or kind_of_labels(args) == "right":
        return {}
    return {"right_rows": {"num_valid": args.num_valid, "seed": SPLIT_SEED}}


def draw_of_known(args: argparse.Namespace) -> dict[str, Any]:
    """The draw of the rows on which T is counted, for labels that are not drawn themselves; {} of the first."""
    if args.human is None or args.draw == 0:
        return {}
    return {"draw": args.draw}


def with_noise(args: argparse.Namespace, data: Embeddings) -> tuple[dict[str, Any], dict[Path, Tensor]]:
    """The parts of a file that wrong labels change, and the two matrices beside it by their files."""
    embeddings = data["train"].inputs
    train = data["train"].labels
    classes = data.num_classes
    every = torch.arange(len(train))
    learn = every
    valid = every
    if "valid" not in data.splits:
        learn, valid = split_rows(len(train), args.num_valid, SPLIT_SEED)
    rows = learn
    if args.noisy_valid:
        rows = every
    noisy, true = wrong_labels(args, train, rows, classes)
    known = learn[split_rows(len(learn), max(round(KNOWN_SHARE * len(learn)), 1), args.draw)[1]]
    estimated = counted_matrix(train[known], noisy[known], classes, PRIOR_ROWS)
    matrices = {"true": true, "estimated": estimated}
    info = data.info | {
        "labels": kind_of_labels(args),
        "source": source_of(args, data),
        "matrices": digest_of(list(matrices.values())),
    }
    info |= right_rows(args, data) | draw_of_known(args)
    changed = {"info": info, "train_labels": noisy}
    if args.noisy_valid:
        for name, chosen, labels in (("train", learn, noisy), ("valid", valid, noisy), ("clean", valid, train)):
            changed[f"{name}_embeddings"] = embeddings[chosen]
            changed[f"{name}_labels"] = labels[chosen]
    return changed, {path: matrices[name] for name, path in matrix_files(args.output).items()}


def with_classes(args: argparse.Namespace, data: Embeddings) -> dict[str, Any]:
    """The labels of all splits with ten classes in one, or each class in ten."""
    train = data["train"].inputs.float()
    labels = data["train"].labels
    centers = torch.zeros(data.num_classes, data.dim)  # (classes, dim)
    for index in labels.unique().tolist():
        centers[index] = train[labels == index].mean(0)
    directions = torch.randn(train.shape[1], 10, generator=torch.Generator().manual_seed(0))  # (dim, 10)
    changed: dict[str, Any] = {"info": data.info | {"num_classes": args.num_classes}}
    for name, split in data.splits.items():
        part = ((split.inputs.float() - centers[split.labels]) @ directions).argmax(1)  # (N,)
        if args.num_classes < data.num_classes:
            changed[f"{name}_labels"] = split.labels // 10
        else:
            changed[f"{name}_labels"] = 10 * split.labels + part
    return changed


def content_of(data: Embeddings) -> dict[str, Any]:
    """The content of a file of embeddings: all of its splits, under the names that every reader knows."""
    content: dict[str, Any] = {"info": data.info}
    for name, split in data.splits.items():
        content[f"{name}_embeddings"] = split.inputs
        content[f"{name}_labels"] = split.labels
    return content


def source_of(args: argparse.Namespace, data: Embeddings) -> str:
    """The content of the files from which labels are written."""
    parts = [str(data.about(str(args.data))["embeddings"])]
    if args.human is not None:
        parts.append(hashlib.sha256(args.human.read_bytes()).hexdigest()[:8])
    return " ".join(parts)


def digest_of(matrices: Sequence[Tensor]) -> str:
    """Eight hexadecimal digits of a hash of matrices: a call that was killed may leave those of other labels."""
    digest = hashlib.sha256()
    for matrix in matrices:
        digest.update(matrix.contiguous().numpy().tobytes())
    return digest.hexdigest()[:8]


def is_written(args: argparse.Namespace) -> bool:
    """Whether the output of a call for wrong labels is there, made of the same files."""
    if not all(path.is_file() for path in (args.output, *matrix_files(args.output).values())):
        return False
    output = load_embeddings(args.output)
    info = output.info
    data = load_embeddings(args.data)
    valid = output.splits.get("valid")
    if args.noisy_valid and (valid is None or len(valid.labels) != args.num_valid):
        return False
    matrices = [load_torch_file(path, "a torch file of a matrix") for path in matrix_files(args.output).values()]
    return (
        info.get("labels") == kind_of_labels(args)
        and info.get("source") == source_of(args, data)
        and info.get("right_rows") == right_rows(args, data).get("right_rows")
        and info.get("draw") == draw_of_known(args).get("draw")
        and info.get("matrices") == digest_of(matrices)
    )


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Write a file of embeddings with other labels.")
    parser.add_argument("data", type=user_path, help="torch file of embeddings")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--label_noise", type=float, help="probability that a training label becomes a random one")
    what.add_argument(
        "--human", type=user_path, metavar="FILE", help="labels by people: CIFAR-100_human.pt of CIFAR-100N"
    )
    what.add_argument("--num_classes", type=flags.positive_int, help="number of classes: a tenth, or ten times as many")
    parser.add_argument(
        "--among", type=flags.positive_int, default=5, help="consecutive class ids to draw from (default: 5)"
    )
    parser.add_argument("--draw", type=flags.seed, default=0, help="random seed of the noise (default: 0)")
    parser.add_argument("--noisy_valid", action="store_true", help="give the rows that validate wrong labels, too")
    parser.add_argument(
        "--num_valid",
        type=flags.positive_int,
        default=NUM_VALID,
        help="training rows that validate if no others do (default: %(default)s)",
    )
    parser.add_argument("--output", type=user_path, required=True, help="torch file to write")
    args = parser.parse_args(argv)
    for name in sorted(flags.given(parser, argv, args) & {*OF_NOISE}):
        if args.num_classes is not None:
            parser.error(f"--{name} is of --label_noise and --human, and --num_classes makes no label wrong")
        if args.human is not None and name == "among":
            parser.error("--among is of --label_noise: labels by people are not drawn")
    if not args.data.is_file():
        parser.error(f"there is no file {args.data}")
    inputs = [file.resolve() for file in (args.data, args.human) if file is not None]
    for output in (args.output, *matrix_files(args.output).values()):
        if output.resolve() in inputs:
            parser.error(f"--output {args.output} would replace {output.resolve()}, which is read")
    return args


def check(args: argparse.Namespace, data: Embeddings) -> None:
    """Raise ValueError for flags that do not fit the file."""
    classes = data.num_classes
    if args.num_classes is not None:
        if args.num_classes not in (classes / 10, 10 * classes):
            raise ValueError(f"--num_classes must be a tenth of {classes}, or ten times as many")
        if args.num_classes > classes:
            check_centers(data)
        return
    if args.human is None and (classes % args.among or not 0 <= args.label_noise <= 1):
        raise ValueError(f"--label_noise must lie in [0, 1], and --among divide {classes} classes")
    rows = len(data["train"].labels)
    if "valid" not in data.splits and args.num_valid >= rows:
        raise ValueError(f"--num_valid {args.num_valid} leaves none of the {rows} rows to train: give fewer")
    labels = data.info.get("labels", "right")
    if labels != "right" or "clean" in data.splits:
        raise ValueError(f"{args.data} has wrong labels already ({labels}): give the file with right ones")
    if args.noisy_valid and "valid" in data.splits:
        raise ValueError(
            f"--noisy_valid: {args.data} has rows that validate, which are not drawn from those that train"
        )


def check_centers(data: Embeddings) -> None:
    """Raise ValueError for a class that a split has and train has not: no mean divides its rows in ten."""
    for name, split in data.splits.items():
        absent = split.labels[~torch.isin(split.labels, data["train"].labels)]
        if len(absent):
            raise ValueError(
                f"{name} has rows of class {int(absent[0])} and train has none: the mean of a class in train divides "
                "its rows in ten"
            )


def write(args: argparse.Namespace, replaces: bool) -> None:
    """Write the file and what lies beside it, while no other call does. replaces: whether other wrong labels give way.

    Raises:
        ValueError: flags do not fit the file, or a file is there, which it does not replace.
        OSError: there is no such folder, or the disk is full.
    """
    check_replaceable(args.output)
    with locked(args.output):
        if replaces and is_written(args):  # by a call that held the lock
            return
        write_files(args, replaces)


def write_files(args: argparse.Namespace, replaces: bool) -> None:
    """Write what is not there yet. Raises ValueError for what is there and is not replaced."""
    data = load_embeddings(args.data)
    check(args, data)
    content = content_of(data)
    matrices: dict[Path, Tensor] = {}
    if args.num_classes is None:
        changed, matrices = with_noise(args, data)
    else:
        changed = with_classes(args, data)
    files = {**matrices, args.output: content | changed}
    there = [path for path in files if path.exists()]
    if replaces and has_wrong_labels(args.output):
        there = []
    for path in there:
        check_same(path, files[path])
    for path, wanted in files.items():
        if path in there:
            print(f"{path} is there already")
            continue
        save_torch_file(path, wanted)
        print(f"wrote {path}")


def has_wrong_labels(output: Path) -> bool:
    """Whether an output is there that a call for wrong labels wrote, with the matrices beside it.

    Raises:
        ValueError: it is no torch file.
    """
    if not output.exists():
        return False
    content = load_torch_file(output, "a torch file", mapped=True, advice=f": {ADVICE}")
    if not isinstance(content, dict) or not isinstance(content.get("info"), dict):
        return False
    return "matrices" in content["info"]


def check_same(path: Path, wanted: Tensor | Mapping[str, Any]) -> None:
    """Raise ValueError if a file holds anything else than a matrix, or than the parts of a file of embeddings."""
    found = load_torch_file(path, "a torch file", advice=f": {ADVICE}")
    is_same = type(found) is type(wanted)
    if is_same and isinstance(wanted, Tensor):
        is_same = torch.equal(found, wanted)
    elif is_same:
        is_same = found.keys() == wanted.keys() and all(same_part(found[name], wanted[name]) for name in wanted)
    if not is_same:
        raise ValueError(f"{path} is there, with other content: {ADVICE}, or write to another place")


def same_part(found: Any, wanted: Any) -> bool:
    """Whether two parts of a file of embeddings are equal."""
    if isinstance(found, Tensor) and isinstance(wanted, Tensor):
        return found.dtype == wanted.dtype and torch.equal(found, wanted)
    return type(found) is type(wanted) and bool(found == wanted)


def main(argv: Sequence[str] | None = None) -> int:
    write(parse_arguments(argv), replaces=False)
    return 0


if __name__ == "__main__":
    sys.exit(door.call(main))
