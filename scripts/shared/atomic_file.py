"""Files that are whole or absent: written under a temporary name, synchronised, then renamed.

A reader, and the same command after `kill -9` or a power cut, sees the old content or the new, never a part.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def atomic_write(path: Path, mode: str = "w", *, shared: bool = False) -> Iterator[IO]:
    """Open a file for writing ("w": UTF-8 text, "wb": bytes) that takes the place of `path` when the block
    ends.

    When the block raises, `path` is untouched. The temporary name is fixed, so that what a killed process
    leaves behind is overwritten by the next; the caller holds a lock against a second writer. shared: other processes
    may write the same file at the same time; the temporary name holds the process id, and begins with a dot. Nothing
    takes the place of a device, a FIFO or a socket: it is written to. OSError passes through.
    """
    text = {} if "b" in mode else {"encoding": "utf-8", "newline": ""}
    if is_special(path):
        with open(path, mode, **text) as file:
            yield file
        return
    # A link stays a link: the file it points to is replaced.
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp" if shared else f"{path.name}.tmp")
    try:
        with open(temporary, mode, **text) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # a full disk does not say where
            error.filename = str(path)
        raise
    sync_folder(path.parent)


def is_special(path: Path) -> bool:
    """Whether there is something that is neither a file nor a folder: a device, a FIFO or a socket."""
    return path.exists() and not path.is_file() and not path.is_dir()


def sync_folder(folder: Path) -> None:
    """Make renames within `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
