"""The door of every command: packages raise, and here an error becomes one sentence and exit status 2.

    if __name__ == "__main__":
        sys.exit(door.call(main))

`python -X dev experiments/train_cifar100.py ...` shows the traceback as well.
"""

import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from experiments.common.paths import ROOT

EXPECTED = (ValueError, OSError, FloatingPointError)  # FileNotFoundError is an OSError


def call(main: Callable[[], int]) -> int:
    """Run a command and return its exit status. An error that is neither ours nor the system's keeps its traceback."""
    try:
        return main()
    except EXPECTED as error:
        if not is_a_sentence(error):
            raise
        if sys.flags.dev_mode:
            traceback.print_exception(error)
        print(f"error: {error}", file=sys.stderr)
        return 2


def is_a_sentence(error: BaseException) -> bool:
    """Whether a file of this repository raised the error, or the system did, about a file that it names."""
    if isinstance(error, OSError) and error.filename is not None:
        return True
    last = traceback.extract_tb(error.__traceback__)[-1]
    path = Path(last.filename).resolve()  # a library in C names files that are not here
    return path.is_file() and path.is_relative_to(ROOT) and ".venv" not in path.parts
