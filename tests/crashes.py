"""What a process that is killed leaves on the disk: its folder before each of its file operations in turn.

One run gives all of the states, and nothing of the process can tidy them up, as an exception in its place would let it.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CHANGES = {"open", *(f"os.{name}" for name in ("link", "mkdir", "remove", "rename", "rmdir", "symlink", "truncate"))}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_watching: list[tuple[Path, Path, list[Path]]] = []  # the folder, where its copies go, and these


def _before(event: str, arguments: tuple) -> None:
    """An audit hook: Python calls it before each operation."""
    if not _watching or event not in _CHANGES or (event == "open" and not arguments[2] & _WRITES):
        return
    folder, copies, states = _watching[0]
    if not str(arguments[0]).startswith(str(folder)):
        return
    watched = _watching.pop()  # what copies is not watched
    state = copies / str(len(states))
    state.mkdir(parents=True)
    if folder.exists():
        shutil.copytree(folder, state / folder.name)
    if not states or content(state) != content(states[-1]):
        states.append(state)
    else:
        shutil.rmtree(state)
    _watching.append(watched)


sys.addaudithook(_before)  # for good: there is no way to take one away


@contextmanager
def states_of(folder: Path, copies: Path) -> Iterator[list[Path]]:
    """Collect the states of a folder in the block: each in a folder of `copies`, under the folder's name.

    The list grows during the block. A state that is that before it is left out.
    """
    states: list[Path] = []
    _watching.append((folder, copies, states))
    try:
        yield states
    finally:
        _watching.clear()


def content(folder: Path) -> dict[str, bytes]:
    """All files of a folder by name, the empty folders too."""
    return {
        str(path.relative_to(folder)): b"" if path.is_dir() else path.read_bytes() for path in sorted(folder.rglob("*"))
    }
