"""Batches of embeddings at the speed of memory where they fit, and of the disk where they do not.

    train_rows, valid_rows = split_rows(len(store["train"]), 50_000, seed)
    batches = EmbeddingBatches(store["train"], 500, device, rows=train_rows)
    print(batches.description)                          # e.g. ram: 9.5 GiB, 18.2 GiB available
    for embeddings, labels in batches.epoch(3, seed): ...   # shuffled, (500, dim) and (500,) on the device
    for embeddings, labels in batches.in_order(): ...   # each row once, in the order of the store, the rest too

Modes: `device` holds the rows on the GPU, `ram` in memory, `stream` reads them from the disk in shuffled blocks
while the batches before them are used. The batches are the same, bit for bit, in every mode.

The order is a function of the seed, the epoch and the number of rows alone, so a run that continues on a machine
with less memory sees the same batches. That is why the order which the disk needs holds in memory, too: blocks of
8 neighbouring rows are shuffled over the whole set, and within windows of 131,072 rows the single rows are. A set
no larger than a window (CIFAR-100) is in a uniformly random order. In ImageNet-1K sorted by class, the most unequal
arrangement, a window is a tenth of the set, and a class has in it 131 rows on average with a standard deviation of
31, where a uniformly random order has 11.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from data.embeddings.store import StoreSplit
from data.machine_memory import available_on, available_ram, gib
from data.seeds import seeded

MODES: tuple[str, ...] = ("auto", "device", "ram", "stream")
BLOCK_ROWS = 8  # neighbouring rows that stay in one window: the least that is read from the disk at a time
WINDOW_ROWS = 131_072  # rows shuffled singly: 512 MiB at 2048 float16; two windows are in memory when streaming

_IN_ORDER_ROWS = 8192  # read at a time in the order of the store
_READERS = 4  # threads that read one window: a disk answers several requests faster than one after another
# Shares of the memory that is free which the rows may take: the rest is for training.
_DEVICE_SHARE, _RAM_SHARE = 0.8, 0.7
_SPLIT, _ORDER = 0, 1  # random streams

Batch = tuple[Tensor, Tensor]  # embeddings (B, dim), labels (B,)
Window = tuple[Tensor, Tensor]  # positions (W,), ascending; order (V,) in which they are used, indices into positions
Piece = tuple[Tensor, Tensor, Tensor]  # embeddings (W, dim), labels (W,), and the order (V,) of indices into both


def split_rows(num_rows: int, num_valid: int, seed: int) -> tuple[Tensor, Tensor]:
    """Divide rows 0..num_rows-1 at random: those that train and the `num_valid` that validate.

    Returns two ascending int64 tensors without a common row. A smaller num_valid under the same seed takes a subset
    of the rows. Raises ValueError where one of them would be empty.
    """
    if not 0 < num_valid < num_rows:
        raise ValueError(
            f"validation needs at least 1 row and must leave 1 to train: of {num_rows} rows, got num_valid {num_valid}"
        )
    order = torch.randperm(num_rows, generator=seeded(_SPLIT, seed))
    return order[num_valid:].sort().values, order[:num_valid].sort().values


def epoch_order(num_rows: int, seed: int, epoch: int) -> Tensor:
    """The order in which an epoch visits its rows: a permutation (num_rows,) int64, a function of its arguments."""
    return _joined_order(_shuffled_windows(num_rows, seed, epoch))


class EmbeddingBatches:
    """Batches of the rows of a split, on a device.

    mode: device, ram or stream, as chosen or forced. description: the mode and what it rests on, to be printed.
    """

    def __init__(
        self,
        split: StoreSplit,
        batch_size: int,
        device: torch.device | str = "cpu",
        *,
        rows: Tensor | None = None,
        mode: str = "auto",
    ) -> None:
        """Choose the mode and, but for `stream`, read the rows into memory.

        rows: (R,) int64, ascending: these rows of the split alone. mode: one of MODES; `auto` takes the first of
        device, ram, stream where the rows fit; on the CPU `device` is `ram`.
        """
        self.split, self.batch_size, self.device = split, batch_size, torch.device(device)
        self.rows = torch.arange(len(split)) if rows is None else rows  # (R,)
        self.mode, self.description = _choose(mode, len(self.rows) * split.row_bytes, self.device)
        home = self.device if self.mode == "device" else torch.device("cpu")
        self._labels = split.labels()[self.rows].to(home)  # (R,)
        self._embeddings = None
        if self.mode != "stream":
            self._embeddings = torch.empty(len(self.rows), split.dim, dtype=split.dtype, device=home)  # (R, dim)
            pieces = self._streamed(_windows_in_order(len(self.rows)))
            for place, (piece, _, order) in zip(self._embeddings.split(_IN_ORDER_ROWS), pieces, strict=True):
                place.copy_(piece[: len(order)])

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self.rows) // self.batch_size

    def epoch(self, epoch: int, seed: int = 0, *, start: int = 0) -> Iterator[Batch]:
        """Shuffled batches of one epoch: embeddings (B, dim) of the split's dtype, labels (B,) int64; whole ones alone.

        start: leave out this many batches, as a run does that continues within an epoch.
        """
        windows = _shuffled_windows(len(self.rows), seed, epoch)
        return self._batches(_without_first(windows, start * self.batch_size), drop_last=True)

    def in_order(self) -> Iterator[Batch]:
        """Batches in the order of the store, for evaluation: every row once, the last batch as small as it is."""
        return self._batches(_windows_in_order(len(self.rows)), drop_last=False)

    def _batches(self, windows: Iterable[Window], drop_last: bool) -> Iterator[Batch]:
        if self._embeddings is None:
            pieces = self._streamed(windows)
        else:  # all rows are in memory
            pieces = [(self._embeddings, self._labels, _joined_order(windows).to(self._labels.device))]
        kept: list[Batch] = []  # the parts of a batch so far: it may begin in one window and end in the next
        missing = self.batch_size
        for embeddings, labels, picks in pieces:
            begin = 0
            while begin < len(picks):
                pick = picks[begin : begin + missing]
                kept.append((self._gather(embeddings, pick), self._gather(labels, pick)))
                begin, missing = begin + len(pick), missing - len(pick)
                if missing == 0:
                    yield self._joined(kept)
                    kept, missing = [], self.batch_size
        if kept and not drop_last:
            yield self._joined(kept)

    def _gather(self, source: Tensor, pick: Tensor) -> Tensor:
        """Copy the rows `pick` (B,) of `source` (W, ...), ready to be sent to the device without waiting for it."""
        if self.device.type != "cuda" or source.is_cuda:
            return source.index_select(0, pick)
        pinned = torch.empty(len(pick), *source.shape[1:], dtype=source.dtype, pin_memory=True)
        return torch.index_select(source, 0, pick, out=pinned)

    def _joined(self, parts: list[Batch]) -> Batch:
        embeddings, labels = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts))
        return embeddings.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)

    def _streamed(self, windows: Iterable[Window]) -> Iterator[Piece]:
        """A piece for each window, read while the piece before it is used; two are in memory. Valid until the next."""
        windows, labels = iter(windows), self._labels.cpu()
        readers = ThreadPoolExecutor(_READERS, thread_name_prefix="embedding-reader")

        def begin_reading(buffer: Tensor | None = None) -> tuple[Tensor, Window, list[Future]] | None:
            if (window := next(windows, None)) is None:
                return None
            positions, _ = window
            if buffer is None or len(buffer) < len(positions):
                buffer = torch.empty(len(positions), self.split.dim, dtype=self.split.dtype)
            parts = zip(self.rows[positions].tensor_split(_READERS), buffer[: len(positions)].tensor_split(_READERS))
            return buffer, window, [readers.submit(self.split.read, *part) for part in parts]

        try:
            reading = [begin_reading(), begin_reading()]
            while (current := reading.pop(0)) is not None:
                buffer, (positions, order), parts = current
                for part in parts:
                    part.result()
                yield buffer, labels[positions], order
                reading.append(begin_reading(buffer))  # nobody needs the buffer any longer
        finally:
            readers.shutdown(cancel_futures=True)


def _shuffled_windows(num_rows: int, seed: int, epoch: int) -> Iterator[Window]:
    generator = seeded(_ORDER, seed, epoch)
    blocks = torch.randperm(-(-num_rows // BLOCK_ROWS), generator=generator)
    within = torch.arange(BLOCK_ROWS)
    for chosen in blocks.split(WINDOW_ROWS // BLOCK_ROWS):
        positions = (chosen.sort().values[:, None] * BLOCK_ROWS + within).flatten()  # (W,)
        positions = positions[positions < num_rows]  # the last block may be shorter
        yield positions, torch.randperm(len(positions), generator=generator)


def _windows_in_order(num_rows: int) -> Iterator[Window]:
    for positions in torch.arange(num_rows).split(_IN_ORDER_ROWS):
        yield positions, torch.arange(len(positions))


def _without_first(windows: Iterable[Window], count: int) -> Iterator[Window]:
    """The windows without the first `count` rows of the order; windows that are left out whole are not read."""
    for positions, order in windows:
        if count < len(order):
            yield positions, order[count:]
        count = max(count - len(order), 0)


def _joined_order(windows: Iterable[Window]) -> Tensor:
    """The order of the rows of all windows, (R,) int64."""
    return torch.cat([torch.zeros(0, dtype=torch.int64), *(positions[order] for positions, order in windows)])


def _choose(mode: str, size: int, device: torch.device) -> tuple[str, str]:
    """The mode for `size` bytes of embeddings, and a description of it."""
    told = "" if mode == "auto" else " (forced)"
    if device.type == "cuda" and mode in ("auto", "device"):
        free = available_on(device)
        if mode == "device" or size <= _DEVICE_SHARE * free:
            return "device", f"device: {gib(size)}, {gib(free)} free on {device}{told}"
    ram = available_ram()
    if mode in ("ram", "device") or (mode == "auto" and size <= _RAM_SHARE * ram):
        return "ram", f"ram: {gib(size)}, {gib(ram)} available{told}"
    return "stream", f"stream: {gib(size)} from the disk, {gib(ram)} of RAM available{told}"
