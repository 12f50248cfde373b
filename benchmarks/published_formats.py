"""The three published embedding formats through conversion and fine-tuning, on synthetic sets.

    python benchmarks/published_formats.py                       # ImageNet-1K at 2% of its rows, 21K-P at 50,000 rows
    python benchmarks/published_formats.py --formats efficientnet-l2-800 --rows_share 1 --folder /mnt/disk

Writes torch pickles in the published layouts, widths and dtypes where a download would put them, converts each into a
store in a process of its own (`open_or_fetch`), then runs

    python experiments/finetune_imagenet.py -d NAME --cache_dir ... --method ...

or finetune_imagenet21k.py, for each of --methods.

The embeddings are class centres with noise, through a ReLU, so that a head can learn them: `test_top1` and `test_top5`
(fractions) show that labels and rows still belong together, and say nothing about ImageNet. The learning rate is above
the published one, since 2% of the rows make 2% of the steps. `seconds` is the script from its start to its end. Prints
a table and writes --output (default results/benchmarks/published_formats.csv).
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor

from benchmarks.runner import Table, existing_folder, in_a_process, parser
from data.embeddings import LAYOUTS, PUBLISHED_SETS, open_or_fetch
from data.transfers.object_store import cached_path
from experiments.shared.command_line import positive
from experiments.shared.environment import ROOT, peak_memory_mib
from topk_losses import METHODS, RELAXATIONS

METHODS_SHOWN = ("softmax_cross_entropy", "splitter_selection", "neuralsort", "sinkhorn_sort")
P_K = ("0.5", "0", "0", "0", "0.5")  # of Tables 2 and 3, for the relaxed sorts
NOISE = 1.0  # standard deviations of the noise per standard deviation of the class centres
CHUNK_ROWS = 4096  # made at a time
COLUMNS = (
    *("format", "rows", "test_rows", "dim", "num_classes", "dtype", "file_mib"),
    *("convert_seconds", "convert_peak_mib", "method", "p_k", "n_epochs", "lr"),
    *("test_top1", "test_top5", "train_seconds", "seconds", "peak_memory_mib"),
    *("device_name", "threads", "torch_version", "python_version", "git_commit"),
)


class Format(NamedTuple):
    """What a published file holds, and the script that trains on it."""

    rows: int
    test_rows: int
    dim: int
    num_classes: int
    dtype: torch.dtype
    script: str


FORMATS = {
    "wsl-32x48d-320": Format(1_281_167, 50_000, 2048, 1000, torch.float32, "finetune_imagenet.py"),
    "efficientnet-l2-800": Format(1_281_167, 50_000, 5504, 1000, torch.float16, "finetune_imagenet.py"),
    "wsl-32x48d-224-21k": Format(11_060_223, 522_500, 2048, 10_450, torch.float16, "finetune_imagenet21k.py"),
}


def rows_of(name: str, arguments: argparse.Namespace) -> tuple[int, int]:
    """Return the training and test rows of a synthetic set."""
    published = FORMATS[name]
    if published.num_classes == 1000:
        return tuple(max(round(rows * arguments.rows_share), 1) for rows in (published.rows, published.test_rows))
    return arguments.rows_21k, max(arguments.rows_21k // 25, 1)


def embeddings_of(labels: Tensor, centres: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an embedding per label (rows, dim): its class's centre with noise, through a ReLU."""
    made = torch.empty(len(labels), centres.shape[1], dtype=dtype)
    for part, chosen in zip(made.split(CHUNK_ROWS), labels.split(CHUNK_ROWS)):
        noisy = centres[chosen] + NOISE * torch.randn(len(chosen), centres.shape[1])
        part.copy_(noisy.relu() / (1 + NOISE**2) ** 0.5)  # of mean .4, as pooled activations are
    return made


def write_pickle(name: str, sizes: tuple[int, int], file: Path) -> None:
    """Write a synthetic set in the layout of the published file `name`."""
    published, keys = FORMATS[name], LAYOUTS[PUBLISHED_SETS[name].layout]
    torch.manual_seed(0)
    centres = torch.randn(published.num_classes, published.dim)
    content = {}
    for split, rows in zip(("train", "test"), sizes):
        # In the order of the classes, each as often as the others or, where rows are few, spread over all of them.
        labels = torch.linspace(0, published.num_classes - 1, rows, dtype=torch.float64).round().long()
        content[keys[f"{split}_embeddings"]] = embeddings_of(labels, centres, published.dtype)
        content[keys[f"{split}_labels"]] = labels
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, file)


def converted(name: str, cache: Path) -> dict[str, Any]:
    """Make the store of a set, and return what that took and what is in it."""
    file_mib = cached_path(name, cache).stat().st_size / 2**20
    start = time.perf_counter()
    store = open_or_fetch(name, cache)
    seconds = time.perf_counter() - start
    return {
        **{"file_mib": f"{file_mib:.1f}", "rows": len(store["train"]), "test_rows": len(store["test"])},
        **{"dim": store.dim, "num_classes": store.num_classes, "dtype": store["train"].dtype_name},
        "convert_seconds": f"{seconds:.3g}",
        "convert_peak_mib": f"{peak_memory_mib(torch.device('cpu')):.0f}",
    }


def fine_tuned(name: str, method: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train a head with the script, and return what it recorded. Raises RuntimeError with what it said."""
    results = folder / f"{name}-{method}.csv"
    command = [sys.executable, ROOT / "experiments" / FORMATS[name].script, "-d", name, "--method", method]
    command += ["--cache_dir", folder, "--results", results, "--eval_freq", 10**6]
    for flag in ("device", "n_epochs", "lr", "threads"):
        command += [f"--{flag}", getattr(arguments, flag)]
    command += ["--p_k", *P_K] if method in RELAXATIONS else []
    start = time.perf_counter()
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode != 0:
        raise RuntimeError(f"exit status {done.returncode} from {' '.join(done.args)}:\n{done.stdout}{done.stderr}")
    row = pd.read_csv(results, dtype=str, keep_default_na=False).iloc[0]
    return {
        **{name: row[name] for name in ("method", "p_k", "n_epochs", "lr", "device_name", "git_commit")},
        **{name: row[name] for name in ("torch_version", "python_version")},
        **{column: f"{float(row[column]):.4f}" for column in ("test_top1", "test_top5")},
        **{column: f"{float(row[column]):.5g}" for column in ("train_seconds", "peak_memory_mib")},
        "seconds": f"{seconds:.3g}",
    }


def main() -> int:
    """Run the benchmark; return the exit status."""
    flags = parser(__doc__, "published_formats.csv", device="auto", n_epochs=2, rows_21k=50_000)
    flags.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    flags.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS_SHOWN))
    flags.add_argument("--lr", type=positive, default=1e-3, help="learning rate (%(default)s)")
    flags.add_argument("--rows_share", type=positive, default=0.02, help="of ImageNet-1K's rows (%(default)s)")
    flags.add_argument("--folder", type=existing_folder, help="for files and stores; the system's without it")
    arguments = flags.parse_args()
    sets = {name: rows_of(name, arguments) for name in dict.fromkeys(arguments.formats)}
    if min(rows for rows, _ in sets.values()) < 600:  # a batch of 500, and 5% that validate
        flags.error(f"--rows_share and --rows_21k must leave 600 training rows or more, got {sets}")

    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        folder = Path(temporary)
        table = Table(COLUMNS, arguments, shown=14)
        for name, rows in sets.items():
            in_a_process(write_pickle, name, rows, cached_path(name, folder))
            data = in_a_process(converted, name, folder)
            for method in dict.fromkeys(arguments.methods):
                table.add(format=name, **data, **fine_tuned(name, method, folder, arguments))
    return table.write()


if __name__ == "__main__":
    sys.exit(main())
