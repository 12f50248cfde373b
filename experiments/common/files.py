"""Files that are replaced whole and never edited, and the lock of a folder. Nothing here loads PyTorch."""

import os
import platform
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that takes a path's place at the end, whole or not at all, with the mode of the one before.

    The target of a link is replaced.

    Raises:
        OSError: the disk is full, or the path is a folder, a pipe or a device such as /dev/null.
    """
    path = path.resolve()
    check_replaceable(path)
    temporary = temporary_of(path)
    try:
        delete_leftovers(path)
        with temporary.open("wb") as file:
            if path.exists():
                shutil.copymode(path, temporary)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # RuntimeError: how torch.save says that the disk is full
        temporary.unlink(missing_ok=True)
        raise cannot_write(path, error) from None


def allocate(path: Path, num_bytes: int) -> None:
    """Make a file of zeros, to be mapped, for which the disk has room: a page for which it has none ends the process.

    Raises:
        OSError: the disk is full. A system without posix_fallocate is not asked.
    """
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise cannot_write(path, error) from None


def cannot_write(path: Path, error: Exception) -> OSError:
    """The error of a file that the disk does not take, with what to do."""
    reason = str(error).splitlines()[0]
    free = shutil.disk_usage(path.parent).free
    return OSError(
        f"cannot write {path} ({reason}; {free:,} bytes are free): make room, and give the same command again"
    )


def temporary_of(path: Path) -> Path:
    """The hidden file beside a path that this process writes first, which is no file of the user's."""
    return path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}.tmp")


def delete_leftovers(path: Path) -> None:
    """Delete the temporary files of a path whose processes, of this machine, were killed."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.{re.escape(platform.node())}\.(\d{{1,9}})\.tmp")
    for file in path.parent.iterdir():
        found = pattern.fullmatch(file.name)
        if found is not None and not is_running(int(found[1])):
            file.unlink(missing_ok=True)


def is_running(process: int) -> bool:
    """Whether this machine has a process of this number."""
    try:
        os.kill(process, 0)  # sends nothing
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        pass
    return True


def check_replaceable(path: Path) -> None:
    """Raise OSError for a path that is a folder, a pipe or a device, or whose folder is missing."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is there, and is no file that can be replaced")
    if not path.parent.is_dir():
        raise OSError(f"there is no folder {path.parent} for {path.name}")


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a text or bytes whole or not at all. Raises OSError."""
    if isinstance(content, str):
        content = content.encode()
    with replacing(path) as file:
        file.write(content)


def lock_folder(path: Path, whose: str, wait: bool = False) -> FileLock:
    """Take a lock, which ends with this process; make its folder.

    Args:
        path: the file of the lock.
        whose: name for the message.
        wait: wait for another process that holds the lock.

    Raises:
        OSError: another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    timeout = -1 if wait else 0
    lock = FileLock(path, is_singleton=True)  # this process may take it again, after an error that left it held
    try:
        lock.acquire(timeout=timeout)
    except Timeout:
        raise OSError(f"{whose} is being run by another process: wait for it, or stop it") from None
    return lock
