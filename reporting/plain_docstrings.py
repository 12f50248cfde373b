"""Docstrings are plain text: mkdocstrings shows their signs (`sum_{k>=2} P_K(k)`, `> 0`), and reads no Markdown."""

import re
from typing import Any

from griffe import Extension

ARGUMENTS = re.compile(r"\s*\w+(, \w+)*:(?=\s)")  # what stands before a description, which the section's parser reads
CODE = re.compile(r"(`[^`]*`)")


def escaped(line: str) -> str:
    """Return a line of a docstring as Markdown that shows it; code between backticks stays."""
    found = ARGUMENTS.match(line)
    start = found.end() if found else 0
    parts = CODE.split(line[start:].replace("<", "&lt;").replace(">", "&gt;"))
    parts[::2] = [re.sub(r"([*_\[\]])", r"\\\1", part) for part in parts[::2]]
    return line[:start] + "".join(parts)


def plain(docstring: str) -> str:
    """Return a docstring as Markdown that shows it; its example, the last section, stays and is shown as code."""
    text, heading, example = docstring.partition("\nExample:\n")
    return "\n".join(map(escaped, text.splitlines())) + heading.replace("Example", "\nExamples") + example


class PlainDocstrings(Extension):
    """mkdocstrings: escape every docstring before its sections are read."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = plain(obj.docstring.value)
