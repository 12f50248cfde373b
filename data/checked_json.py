"""JSON files that are believed only where they have the shape their reader states: types, ranges, names, depth.

The shape is a dataclass, with ranges and patterns as `Annotated[int, Field(ge=1)]`; what else a file says is ignored.
"""

import json
from dataclasses import asdict, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from data.atomic_file import atomic_write

T = TypeVar("T")


class JsonError(ValueError):
    """A file that is no JSON or has another shape; the message names it and the first thing amiss."""


def read_json(path: Path, kind: type[T]) -> T:
    """The content of a file as `kind`. Raises JsonError; OSError (FileNotFoundError, say) passes through."""
    if path.exists() and not path.is_file():  # reading a pipe would wait for ever
        raise JsonError(f"{path} is damaged: it is not a regular file")
    try:
        return _adapter(kind).validate_json(path.read_bytes(), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        received = "" if first["type"] in ("json_invalid", "missing") else f", got {repr(first['input'])[:100]}"
        raise JsonError(f"{path} is damaged: {place}{': ' if place else ''}{first['msg']}{received}") from None


def write_json(path: Path, content: Any, *, shared: bool = False) -> None:
    """Write a dataclass, or what JSON can hold, whole or not at all. shared: as for `atomic_write`."""
    with atomic_write(path, shared=shared) as file:
        file.write(json.dumps(asdict(content) if is_dataclass(content) else content, indent=1) + "\n")


@lru_cache
def _adapter(kind: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(kind)
