"""What a run leaves: its id, files that are replaced whole, a lock, and where it was computed."""

import csv
import hashlib
import io
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from experiments.common.flags import ROOT


def run_id(identity: Mapping[str, Any], readable: str) -> str:
    """Name a configuration: the template, filled in, then ten digits of a hash.

    None is not hashed, so that a flag that is added later does not change the names of older runs.
    """
    settings = {name: value for name, value in identity.items() if value is not None}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    filled = readable.format(**{name: cell(value).replace(" ", "_") for name, value in identity.items()})
    return re.sub(r"[^A-Za-z0-9._-]", "_", f"{filled}-{digest[:10]}")


def cell(value: Any) -> str:
    """A value in a CSV: None is empty, floats keep all digits, lists are joined by spaces."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return " ".join(cell(item).removesuffix(".0") for item in value)
    return str(value)


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a results file, every cell as text; none if it is absent. Raises SystemExit for a damaged line."""
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    if rows and "run_id" not in rows[0]:
        raise SystemExit(f"error: {path} has no column run_id: it must be saved as CSV with commas between the cells")
    for number, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise SystemExit(f"error: line {number} of {path} does not fit its header: repair or delete that line")
    return rows


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    columns = dict.fromkeys(name for row in rows for name in row)
    file = io.StringIO()
    writer = csv.DictWriter(file, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: cell(value) for name, value in row.items()} for row in rows)
    replace_file(path, file.getvalue())


def replace_file(path: Path, content: str | dict[str, Any] | Tensor) -> None:
    """Write a text, or a dictionary or tensor as a torch file, whole or not at all.

    Raises:
        SystemExit: the disk is full, or the path is a folder, a pipe or a device such as /dev/null.
    """
    if path.exists() and not path.is_file():
        raise SystemExit(f"error: {path} is there, and is no file that can be replaced")
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            if isinstance(content, str):
                file.write(content.encode())
            else:
                torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # RuntimeError: how torch.save says that the disk is full
        temporary.unlink(missing_ok=True)
        reason = f"{str(error).splitlines()[0]}; {shutil.disk_usage(path.parent).free:,} bytes are free"
        raise SystemExit(f"error: cannot write {path} ({reason}): the same command continues later") from None


def hold(path: Path, whose: str, wait: bool = False) -> FileLock:
    """Take a lock, which ends with this process; make its folder. Raises SystemExit if another process holds it.

    whose: name for the message. wait: wait for another process that holds the lock.
    """
    lock = FileLock(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire(timeout=-1 if wait else 0)
    except Timeout:
        raise SystemExit(f"error: {whose} is being run by another process: wait for it, or stop it") from None
    return lock


def utc_now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's model name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    models = re.findall(r"^model name\s*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "", re.MULTILINE)
    return models[0].strip() if models else platform.processor() or platform.machine()


def peak_memory_mib(device: torch.device) -> float:
    """The most memory used so far: by tensors on a GPU, or by this process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10  # macOS counts bytes, Linux KiB


def git_commit() -> str:
    """This checkout's commit, "-dirty" where tracked files outside results/ differ; empty without git."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)results")
        return git("rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return ""
