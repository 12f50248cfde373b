"""The CSV file that a benchmark writes: whole or not at all."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from data.atomic_file import atomic_write


def write_table(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, object]]) -> None:
    """Replace the file by `rows` under `columns`, and say so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"wrote {path}")
