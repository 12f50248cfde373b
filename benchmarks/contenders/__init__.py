"""A file per package that we are compared with, imported where the package is installed.

Each has `make(method, p_k, n, m, device)`, which returns a loss of logits (batch, n) and labels (batch,), or raises
ValueError where the package has none that stands beside ours of that name.
"""

from importlib import import_module
from pathlib import Path
from types import ModuleType


def installed() -> dict[str, ModuleType]:
    """Return the contenders whose packages are installed, by name."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        try:
            found[path.stem] = import_module(f"benchmarks.contenders.{path.stem}")
        except ImportError:
            continue
    return found
