"""Which rows are recorded already? Asked by scripts/launch.py before it starts any.

    echo '[["python", "experiments/train_cifar100.py", "--method", "softsort"]]' | python scripts/sweeping/recorded.py

Each command's script runs in this process up to the point where it looks for its configuration in its results file,
and goes no further where that is not there. Thus the script itself resolves its settings, as it will when it runs, and
torch is imported once for all rows. A command that is refused counts as not recorded: it says why when it runs. Only
scripts that look before they work may be given.
"""

if __name__ == "__main__":
    from data import program

    program.begin()

import contextlib
import json
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from data import program
from experiments.shared import run_record


class NotRecorded(BaseException):
    """The script would begin to work now."""


def is_recorded(words: Sequence[str]) -> bool:
    """Return whether the command's script says that its row, or each of its rows, is recorded."""
    script, sys.argv = words[1], list(words[1:])
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            return not end.code
        except NotRecorded:
            pass
    return False


def answer() -> int:
    """Read a JSON list of commands, each a list of words, and print a JSON list of booleans."""
    try:
        commands = json.load(sys.stdin)
        understood = isinstance(commands, list) and all(isinstance(script, str) for _, script, *_ in commands)
    except (ValueError, TypeError):
        understood = False
    if not understood:
        raise program.CommandLineError("standard input must be a JSON list of commands, each a list of words")
    find_row = run_record.find_row

    def found_or_stop(path: Path, run_id: str) -> dict[str, str]:
        if (row := find_row(path, run_id)) is None:
            raise NotRecorded
        return row

    run_record.find_row = found_or_stop  # before what imports it by name
    print(json.dumps([is_recorded(words) for words in commands]))
    return 0


if __name__ == "__main__":
    program.end(program.finish(answer))
