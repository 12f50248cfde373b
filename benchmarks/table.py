"""The CSV file that a benchmark writes: whole or not at all."""

import argparse
import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from data.atomic_file import atomic_write

RESULTS = Path(__file__).parent.parent / "results/benchmarks"


def output_file(text: str) -> Path:
    """A path in a folder that can be written, made if absent: asked before anything is measured."""
    folder = Path(text).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot make the folder {folder}: {error.strerror}; name another") from None
    if not os.access(folder, os.W_OK) or Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"a file in a folder that can be written is wanted, got {text!r}")
    return Path(text)


def add_output_flag(parser: argparse.ArgumentParser, name: str) -> None:
    """Add --output, by default the file of that name among the results."""
    parser.add_argument("--output", type=output_file, default=str(RESULTS / name), help="CSV file (%(default)s)")


def write_table(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, object]]) -> None:
    """Replace the file by `rows` under `columns`, and say so."""
    with atomic_write(path) as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"wrote {path}")
