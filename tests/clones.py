"""Copies of the repository as a new clone has it."""

import shutil
import subprocess
from pathlib import Path

from experiments.common.paths import ROOT


def copy_of_tracked_files(folder: Path) -> Path:
    """A new clone, without an environment, and with the compiled kernels that there are: Numba would take a minute."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if name.startswith(("docs/", "tests/")) or not (ROOT / name).is_file():
            continue
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    kernels = Path("topk_losses", "kernels", "__pycache__")
    (folder / kernels).mkdir()
    for compiled in (ROOT / kernels).glob("*.nb[ic]"):
        shutil.copy(compiled, folder / kernels)
    return folder
