"""One process at a time: a lock that the operating system gives back when its holder is killed."""

import errno
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def held(path: Path, *, waiting: str = "") -> Iterator[None]:
    """Hold the lock file `path` while the block runs; its folder is made if need be.

    Waits for another process that holds it, after `waiting` was printed on stderr. Raises OSError at once where no file
    can be made, or where something else than a file is.
    """
    lock = _lock_of(path)
    try:
        acquired = lock.acquire(timeout=0)
    except Timeout:
        if waiting:
            print(waiting, file=sys.stderr)
        acquired = lock.acquire()
    with acquired:
        yield


@contextmanager
def held_or_refused(path: Path, error: type[Exception], busy: str, unusable: str) -> Iterator[None]:
    """Hold the lock file while the block runs, or raise `error` with a sentence, whose beginnings are given."""
    try:
        acquired = _lock_of(path).acquire(timeout=0)
    except Timeout:
        raise error(f"{busy}, which holds {path}; wait for it or stop it") from None
    except OSError as problem:
        raise error(f"cannot use {unusable} {path.parent}: {problem.strerror or problem}") from None
    with acquired:
        yield


def _lock_of(path: Path) -> FileLock:
    path.parent.mkdir(parents=True, exist_ok=True)
    # FileLock takes a folder that takes no files (/proc) for one that another process is just removing, and tries again
    # for ever. Read and write, which does not block on a pipe.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
    os.close(descriptor)
    if not is_file:
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return FileLock(path)


def lock_beside(path: Path) -> Path:
    """The lock file of a folder or file: hidden, beside it, the same for each of its names."""
    path = Path(os.path.abspath(path))
    return path.parent / f".{path.name}.lock"
