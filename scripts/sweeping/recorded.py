"""Which rows are recorded already? Prints the number of each, counted from 0, of a JSON list of commands on stdin.

scripts/launch.py asks before it starts any. Each command's script runs in this process up to the point where it looks
for its configuration in its results file, and no further: so the script itself resolves its settings, and torch is
imported once for all rows. A command that is refused counts as not recorded: it says why when it runs.
"""

import contextlib
import json
import os
import runpy
import sys
from pathlib import Path

from experiments.shared import run_record


class NotRecorded(BaseException):
    """The script would begin to work now."""


def is_recorded(words: list[str]) -> bool:
    """Return whether the command's script says that its row, or each of its rows, is recorded."""
    script, sys.argv = words[1], words[1:]
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            return not end.code
        except NotRecorded:
            pass
    return False


def found_or_stop(path: Path, run_id: str, find_row=run_record.find_row) -> dict[str, str]:
    """In place of run_record.find_row."""
    if (row := find_row(path, run_id)) is None:
        raise NotRecorded
    return row


if __name__ == "__main__":
    run_record.find_row = found_or_stop  # before what imports it by name
    print(*(number for number, words in enumerate(json.load(sys.stdin)) if is_recorded(words)))
