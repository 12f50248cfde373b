"""Throughput and peak memory of each source of embedding batches, beside a DataLoader and the official script's way.

    python benchmarks/batch_sources.py                               # 2 GiB: 524,288 rows of 2048 float16, batch 500
    python benchmarks/batch_sources.py --mib 16384 --folder /mnt/disk --sources stream dataloader

Writes a torch pickle in the published layout, makes a store of it (row `convert`) and draws two shuffled epochs of
batches from each source, which do nothing but arrive on the device:

    device, ram, stream    data/embeddings/batches.py; `stream cold` with the files dropped from the page cache before
                           each epoch by posix_fadvise, which needs no root
    dataloader             torch's DataLoader over a memory-mapped TensorDataset, shuffled; `dataloader cold` alike, but
                           what a process has mapped cannot be dropped: its second epoch is warm
    whole file             torch.load of everything and a randperm that indexes it, as the official script does

Each has a process of its own, one after another. `process_mib` is its peak resident memory, in which pages of a mapped
file count though they can be given up, and `above_start_mib` that without what torch took before the file was opened.
`disk_mib_1` and `_2` are what an epoch read from the disk: 0 from the page cache. `epoch1_crc32` is a checksum of the
first epoch's batches, equal where the batches are. Prints a table and writes --output (default
results/benchmarks/batch_sources.csv). Takes twice the size on the disk.
"""

import itertools
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.runner import Table, in_a_process, parser
from data.embeddings import EmbeddingBatches, convert, open_store
from experiments.shared.environment import peak_memory_mib

MODES = ("device", "ram", "stream")  # of EmbeddingBatches
SOURCES = (*MODES, "stream cold", "dataloader", "dataloader cold", "whole file")
TEST_ROWS = 8  # the layout has a test set, and nothing is measured on it
NUM_CLASSES = 1000
CPU = torch.device("cpu")
MEASURED = (
    *("open_ms", "construct_seconds"),
    *("rows_per_second_1", "gib_per_second_1", "disk_mib_1", "rows_per_second_2", "gib_per_second_2", "disk_mib_2"),
    *("process_mib", "above_start_mib", "gpu_mib", "epoch1_crc32"),
)

Batches = Iterator[tuple[Tensor, Tensor]]  # embeddings (B, dim) and labels (B,) on the device


def write_pickle(task: dict[str, Any]) -> None:
    """Write embeddings of `rows` random rows and their labels in the published layout."""
    torch.manual_seed(0)
    content: dict[str, Tensor] = {}
    for split, rows in (("train", task["rows"]), ("test", TEST_ROWS)):
        # The bits of the float16 numbers in [0, 1), many times faster than drawing the numbers.
        bits = torch.empty(rows, task["dim"], dtype=torch.int16).random_(0, 0x3C00)
        content[f"{split}_embeddings"] = bits.view(torch.float16)
        content[f"{split}_labels"] = torch.randint(NUM_CLASSES, (rows,))
    with open(task["pickle"], "wb") as file:
        torch.save(content, file)
        os.fsync(file.fileno())  # a page that is not yet on the disk cannot be dropped


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Open one source and draw two epochs from it; or make the store."""
    torch.set_num_threads(task["threads"])
    source, cold, _ = task["source"].partition(" cold")
    device = torch.device(task["device"])
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.zeros(1, device=device)  # the driver's memory and start do not count as the source's
    files = [task["pickle"]] if source in ("dataloader", "whole file") else sorted(task["store"].glob("*.npy"))
    if cold:
        drop_from_cache(files)
    before, start = peak_memory_mib(CPU), time.perf_counter()
    if source == "convert":
        convert(task["pickle"], task["store"])
    else:
        opened, epoch = open_source(source, task, device)
    row = dict.fromkeys(MEASURED) | {"construct_seconds": time.perf_counter() - start}
    for number in (1, 2) if source != "convert" else ():
        row["open_ms"] = 1e3 * (opened - start)
        if cold:
            drop_from_cache(files)
        read, begun = disk_mib(), time.perf_counter()
        rows = sum(len(labels) for _, labels in epoch(number))
        if on_gpu:
            torch.cuda.synchronize()
        rate = rows / (time.perf_counter() - begun)
        row[f"rows_per_second_{number}"] = f"{rate:.5g}"
        row[f"gib_per_second_{number}"] = rate * task["dim"] * 2 / 2**30
        row[f"disk_mib_{number}"] = "" if read is None else f"{disk_mib() - read:.0f}"
    peak = peak_memory_mib(CPU)
    row |= {"process_mib": f"{peak:.1f}", "above_start_mib": f"{peak - before:.1f}"}
    row |= {"gpu_mib": f"{torch.cuda.max_memory_allocated() / 2**20:.1f}"} if on_gpu else {}
    if source in MODES:  # the others draw their own orders
        checksum = 0
        for tensor in itertools.chain.from_iterable(epoch(1)):
            checksum = zlib.crc32(tensor.cpu().numpy(), checksum)
        row["epoch1_crc32"] = f"{checksum:08x}"
    return row


def open_source(source: str, task: dict[str, Any], device: torch.device) -> tuple[float, Callable[[int], Batches]]:
    """Return when the file of a source was open, and a function from the number of an epoch to its batches."""
    if source in MODES:
        split, opened = open_store(task["store"])["train"], time.perf_counter()
        return opened, EmbeddingBatches(split, task["batch"], device, mode=source).epoch
    content = torch.load(task["pickle"], mmap=source == "dataloader", weights_only=True)
    opened = time.perf_counter()
    embeddings, labels = content["train_embeddings"], content["train_labels"]

    def whole_file(number: int) -> Batches:
        for rows in torch.randperm(len(labels)).split(task["batch"])[: len(labels) // task["batch"]]:
            yield embeddings[rows].to(device), labels[rows].to(device)

    def dataloader(number: int) -> Batches:
        for batch in loader:
            yield tuple(each.to(device, non_blocking=True) for each in batch)

    if source == "whole file":
        return opened, whole_file
    dataset, pinned = TensorDataset(embeddings, labels), device.type == "cuda"
    loader = DataLoader(dataset, task["batch"], shuffle=True, drop_last=True, pin_memory=pinned)
    return opened, dataloader


def disk_mib() -> float | None:
    """What this process has read from the disk so far, in MiB; None where the kernel does not count it."""
    try:
        return int(Path("/proc/self/io").read_text().partition("\nread_bytes:")[2].split()[0]) / 2**20
    except (OSError, IndexError):
        return None


def drop_from_cache(files: list[Path]) -> None:
    """Ask the kernel to forget the content of files; what is mapped stays."""
    for file in files:
        with open(file, "rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> int:
    """Run the benchmark; return the exit status."""
    flags = parser(__doc__, "batch_sources.csv", device="auto", mib=2048, dim=2048, batch_size=500)
    flags.add_argument("--sources", nargs="+", choices=SOURCES, default=None)
    flags.add_argument("--folder", help="on the disk to be measured; the system's without it")
    arguments = flags.parse_args()
    rows = arguments.mib * 2**20 // (2 * arguments.dim)
    on_gpu = arguments.device.type == "cuda"
    if rows < arguments.batch_size:
        flags.error(f"--mib must hold a batch of {arguments.batch_size} rows, got {arguments.mib} MiB: {rows} rows")
    if arguments.folder and not Path(arguments.folder).is_dir():
        flags.error(f"--folder must exist, got {arguments.folder}")
    sources = arguments.sources or [name for name in SOURCES if name != "device" or on_gpu]
    if "device" in sources and not on_gpu:
        flags.error("the source device needs a GPU: leave it out, or see --device")
    size = {"rows": rows, "dim": arguments.dim, "batch": arguments.batch_size}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        task = {**size, "pickle": Path(folder, "set.p"), "store": Path(folder, "set.store")}
        task |= {"device": str(arguments.device), "threads": arguments.threads}
        in_a_process(write_pickle, task, cuda=on_gpu)
        table, file_mib = Table(arguments), task["pickle"].stat().st_size / 2**20
        for source in ("convert", *dict.fromkeys(sources)):
            found = in_a_process(measure, {**task, "source": source}, cuda=on_gpu)
            table.add(source=source, **size, file_mib=f"{file_mib:.1f}", **found)
    return table.write()


if __name__ == "__main__":
    sys.exit(main())
