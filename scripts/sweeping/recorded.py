"""Which rows are recorded already? Asked by scripts/launch.py before it starts any.

    echo '[["python", "experiments/train_cifar100.py", "--method", "softsort"]]' | python scripts/sweeping/recorded.py

Each command's script runs in this process up to the point where it asks whether its results file has its
configuration; the answer is noted, and it goes no further. Thus the script itself resolves its settings, as it will
when it runs, and torch is imported once for all rows. A command that is refused counts as not recorded: it says why
when it runs. Only scripts that ask before they work may be given: ASKING in scripts/sweeping/sweep.py.
"""

import contextlib
import json
import os
import runpy
import sys
from collections.abc import Sequence
from typing import Any

from experiments.shared import training_run


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


def main() -> int:
    """Read a JSON list of commands, each a list of words, and print a JSON list of booleans."""
    ask = training_run.recorded

    def ask_and_stop(*arguments: Any) -> bool:
        if not ask(*arguments):
            raise NotRecorded
        return True

    # The scripts import the name afresh when they are run, below.
    training_run.recorded = ask_and_stop
    print(json.dumps([is_recorded(words) for words in json.load(sys.stdin)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
