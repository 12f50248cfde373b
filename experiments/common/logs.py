"""Logs of launched commands: a line with the time, the command after a "$ ", and what it printed."""

import re
from collections.abc import Sequence

STARTED = re.compile(r"=== \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ")


def last_start(lines: Sequence[str]) -> int | None:
    """The number of the line with the command that was started last; None if there is none.

    Other lines that begin with a "$ " are what a command printed.
    """
    for number in range(len(lines) - 1, 0, -1):
        if lines[number].startswith("$ ") and STARTED.match(lines[number - 1]):
            return number
    return None
