"""Data sets, embedding stores, transfers, and the edge of every program (program.py)."""

import os
import sys

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_ROOMS = [os.path.join(_ROOT, room) for room in ("experiments", "scripts")]


def _ends_quietly(kind: type[BaseException], error: BaseException, traceback: object) -> None:
    """Ctrl-C among the first imports, before program.begin can be called, is no traceback."""
    if issubclass(kind, KeyboardInterrupt):
        os.write(2, b"\nstopped\n")
        os._exit(130)
    sys.__excepthook__(kind, error, traceback)


_of_this_room = sys.argv[:1] == ["-m"]  # python -m data.embeddings: what it imports comes before its __main__
if _of_this_room or os.path.dirname(getattr(sys.modules["__main__"], "__file__", None) or "") in _ROOMS:
    sys.excepthook = _ends_quietly
if _of_this_room:
    from data import program

    program.begin()
