"""The record of a run: its folder, its id, and its one row in a results file.

A script names the settings that identify a configuration; `run_id` turns them into a readable name,
`open_run` takes the folder results/runs/<run id>/ for one process, and `write_row` adds the row when the run
succeeded. `results/<name>.csv` has exactly one row per run id;
experiments/run_record.py prints it.
"""

import csv
import hashlib
import io
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime, timezone
from pathlib import Path

from filelock import FileLock, Timeout

from data.atomic_file import atomic_write, is_special
from data.file_lock import held, held_or_refused
from data.program import ProgramError

# Of beam search, experiments/shared/reading_metrics.py.
RATES = (
    ("per", "phoneme error rate of the best hypothesis, edits per phoneme"),
    ("wer", "word error rate, share of words whose best hypothesis is no reading"),
    ("gold", "share of words of which the last beam holds a reading"),
)
# Every column of a row that is not a flag of the script. Flags have their name as column, and their meaning
# in --help.
COLUMNS = {
    "run_id": "name of the configuration and of its folder in runs/: the readable part, then a hash",
    "num_classes": "number of classes n",
    "train_images": "images in the training split, after --limit_train",
    "valid_images": "images in the validation split",
    "test_images": "images in the test split, after --limit_test",
    "embeddings": "content of the embedding store: classes x dimensions, then eight digits of a hash of its shards",
    "embedding_dtype": "floating-point type of the stored embeddings; they are trained on in float32 or --precision",
    "embeddings_checksum": "sum that verified the file which became the store, sha256 or etag, or unverified; empty "
    "where the embeddings were extracted",
    "backbone": "network that made the embeddings, where it is known",
    "resolution": "pixels of the images' sides when the embeddings were made, where it is known",
    "batch_source": "where the training batches came from: device, ram or stream (from the disk)",
    "processes": "processes of torchrun that divided each batch; peak_memory_mib is that of the first",
    "num_heads": "heads trained in the last pass over the data; its train_seconds and eval_seconds are those of all",
    **{
        f"{name}_top{k}{suffix}": meaning.format(k=k)
        for name, suffix, meaning in (
            ("test", "", "test top-{k} accuracy, fraction in [0, 1], where valid_top{k} was best"),
            ("test", "_epoch", "the epoch of that evaluation, counted from 1; the earliest of equals"),
            ("test", "_step", "the optimizer step of that evaluation, counted from 1; the earliest of equals"),
            ("valid", "", "best validation top-{k} accuracy, fraction in [0, 1]"),
            ("last_test", "", "test top-{k} accuracy of the last evaluation, fraction in [0, 1]"),
            ("last_valid", "", "validation top-{k} accuracy of the last evaluation, fraction in [0, 1]"),
        )
        for k in (1, 5, 10, 20)
    },
    "last_train_loss": "mean training loss over the last epoch, nats; of --loss mass minus a number of neighbours",
    "last_valid_loss": "mean validation loss of the last evaluation, nats",
    "last_test_loss": "mean test loss of the last evaluation, nats",
    "last_inverse_temperature": "where inverse_temperature is auto or from:to, what it was at the end",
    "last_valid_logit_std": "standard deviation of a row's logits over the classes, mean over validation; a head's",
    "last_test_logit_std": "standard deviation of a row's logits over the classes, mean over test; a head's",
    **{f"{split}_words": f"words in the {split} split" for split in ("train", "valid", "test")},
    **{f"test_{rate}_beam{K}": f"{told}; test, beam of {K}" for K in (1, 4, 8) for rate, told in RATES},
    **{f"last_valid_{rate}": f"{told}; validation at the end, beam of beam_size" for rate, told in RATES},
    "test_forced_accuracy": "share of right phonemes by position, the right ones before it given; the end is one",
    "test_free_accuracy": "share of right phonemes by position after the model's own, of beam 1; the end is one",
    "pretrained": "folder in runs/ of the pretraining that the run went on from",
    "pretrain_seconds": "wall-clock seconds of that pretraining, evaluation and saving excluded",
    "train_seconds": "wall-clock seconds spent in training epochs (compilation, too), evaluation and saving excluded",
    "eval_seconds": "wall-clock seconds spent in evaluation",
    "images_per_second": "training images (loading, forward, backward, step) per second of train_seconds",
    "peak_memory_mib": "peak memory in MiB: tensors on the GPU, or the whole process on the CPU",
    "device_name": "model of the GPU or CPU",
    "python_version": "Python",
    "torch_version": "PyTorch",
    "torchvision_version": "torchvision",
    "numpy_version": "NumPy",
    "git_commit": "commit of this repository, -dirty if tracked files differed; a+b if resumed on another",
    "times_resumed": "how often the run was continued from a checkpoint",
    "started_utc": "when the run began, UTC, ISO 8601",
    "finished_utc": "when the row was written, UTC, ISO 8601",
}

csv.field_size_limit(2**31 - 1)  # what can be recorded can be read

Value = str | int | float | bool | Path | Sequence[float] | None


class RecordError(ProgramError):
    """A results file or a run folder cannot be used; the message says why and how to mend it."""


def utc_now() -> str:
    """Return the time as "2026-01-31T12:00:00.000Z"."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def run_id(identity: Mapping[str, Value], readable: str) -> str:
    """Return the name of a configuration: the template `readable`, filled in, then ten digits of a hash.

    `identity` holds every setting that makes it another experiment, resolved (never "the default"). Settings
    that are None do not enter the hash, so that a flag added later leaves the ids of rows without it as they
    are.
    """
    settings = {name: value for name, value in identity.items() if value is not None}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    filled = readable.format(**{name: _cell(value).replace(" ", "_") for name, value in identity.items()})
    return re.sub(r"[^A-Za-z0-9._-]", "_", f"{filled}-{digest[:10]}")


def open_run(folder: Path, wait: bool = False) -> AbstractContextManager[None]:
    """Create a run folder and hold it for this process. Raises RecordError if another process holds it.

    wait: for that process. The lock is the operating system's: a killed process does not leave it behind.
    """
    lock = folder / "run.lock"
    if wait:
        return held(lock, waiting=f"waiting for another process that runs {folder}")
    busy = "this configuration is being run by another process"
    return held_or_refused(lock, RecordError, busy, "the run folder")


def write_config(folder: Path, config: Mapping[str, Value]) -> None:
    """Write config.json into a run folder: every flag and resolved setting."""
    with atomic_write(folder / "config.json") as file:
        json.dump(config, file, indent=2, default=str)
        file.write("\n")


def write_history(folder: Path, history: Sequence[Mapping[str, Value]], name: str = "epochs.csv") -> None:
    """Write epochs.csv, or another file, into a run folder, whole, from the history that the checkpoint holds too."""
    with atomic_write(folder / name) as file:
        _write_table(file, list(history[0]) if history else [], history)


def find_row(path: Path, run_id: str) -> dict[str, str] | None:
    """Return the row of a configuration in a results file, or None. Raises RecordError."""
    rows, _ = _parse(path)
    return next((row for row in rows if row["run_id"] == run_id), None)


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a results file (none if it is absent or empty), every cell as text.

    A last line that was cut short, by an interrupted copy say, is left out with a warning on stderr; the
    command that made it records it anew from its checkpoint. Raises RecordError, naming the line, for
    anything else amiss.
    """
    rows, cut_short = _parse(path)
    if cut_short:
        print(f"warning: the last line of {path} is cut short and left out: {cut_short}", file=sys.stderr)
    return rows


def _parse(path: Path) -> tuple[list[dict[str, str]], str]:
    """Return the rows of a results file, and its last line if that was cut short, else ""."""
    if is_special(path):  # a FIFO would block
        raise RecordError(f"the results file {path} must be a file, and is a device, a FIFO or a socket")
    try:
        text = path.read_text(encoding="utf-8-sig")  # spreadsheet programs write a byte order mark
    except FileNotFoundError:
        return [], ""
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"cannot read the results file {path}: {error}") from None
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    lines: list[tuple[int, list[str]]] = []  # where each begins, and its cells
    begin, cut_short = 1, ""
    try:
        for cells in reader:
            if cells:
                lines.append((begin, cells))
            begin = reader.line_num + 1
    except csv.Error as error:
        # An open quotation mark may have taken in rows that are whole: only within one line is it the line's end.
        if not lines or begin < reader.line_num or str(error) != "unexpected end of data":
            raise RecordError(f"line {begin} of {path} cannot be read: {error}; mend or delete it") from None
        cut_short = text.rpartition("\n")[2]
    if not lines:
        return [], ""
    columns = lines[0][1]
    if "run_id" not in columns or len(set(columns)) < len(columns):
        raise RecordError(
            f"{path} is not a results file: its first line must name each column once, run_id among them; "
            "choose another --results"
        )
    if not cut_short and len(lines) > 1 and len(lines[-1][1]) < len(columns):
        cut_short = ",".join(lines.pop()[1])
    for line, cells in lines[1:]:
        if len(cells) != len(columns):
            raise RecordError(
                f"line {line} of {path} has {len(cells)} cells under {len(columns)} columns; mend or delete it"
            )
    return [dict(zip(columns, cells)) for _, cells in lines[1:]], cut_short


def write_row(path: Path, row: Mapping[str, Value]) -> None:
    """Add `row` to a results file, in place of an earlier row with its run_id. Raises RecordError.

    The whole file is written anew under a lock and renamed: concurrent writers wait for one another, a reader
    or a kill never meets half a row, and replacing a row is the same operation as adding one. For the few
    hundred rows of a study that takes milliseconds. Columns that the file does not have yet are added, empty
    in older rows; columns that only the file has stay, empty in the new row.
    """
    try:
        # The new file is made before the old one is read: over NFS a node may remember for half a minute that there was
        # no results file, or which, and making a file in the folder is what brings its memory of the folder up to date.
        with results_lock(path), atomic_write(path) as file:
            rows = [old for old in read_rows(path) if old["run_id"] != row["run_id"]]
            rows.append({name: _cell(value) for name, value in row.items()})
            columns = list(dict.fromkeys(name for each in rows for name in each))
            _write_table(file, columns, rows)
    except OSError as error:
        raise RecordError(f"cannot write the results file {path}: {error.strerror or error}") from None


@contextmanager
def results_lock(path: Path) -> Iterator[None]:
    """Hold a results file against other writers; creates its folder. Raises RecordError or OSError.

    The lock is flock(2), here and between nodes: over NFS Linux turns it into a lock of the server's (v4, and
    v3 where lockd runs); Lustre needs its mount option flock. It ends with its process: a lock file made with O_EXCL
    would hold everywhere, and for ever after a kill -9. Where a file system has no flock at all, filelock falls back to
    that. Rows are few and minutes apart, so that one file needs no merging of a file per row.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(path.name + ".lock")
    try:
        with FileLock(lock, timeout=300):
            yield
    except Timeout:
        raise RecordError(f"another process has held {lock} for five minutes; stop it, then try again") from None


def _cell(value: Value) -> str:
    """Return a value as a CSV cell: None is empty, floats keep all digits, lists are joined by spaces."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return " ".join(_cell(each).removesuffix(".0") for each in value)
    return str(value)


def _write_table(file: io.TextIOBase, columns: Sequence[str], rows: Sequence[Mapping[str, Value]]) -> None:
    writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
