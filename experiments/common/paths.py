"""The folders of this repository, and the files of a run."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"  # what the user's runs write
PAPER = RESULTS / "paper"  # published values
REPOSITORY = RESULTS / "repository"  # this repository's rows, which no training script writes
HISTORY_FILES = {"epoch": "epochs.csv", "step": "evaluations.csv", "update": "updates.csv"}  # of a run, by its clock


def user_path(text: str) -> Path:
    """A path as a user writes it: ~ stands for the home folder."""
    return Path(text).expanduser()


def portable(path: Path) -> str:
    """A path as a row shows it: relative to the repository if it lies within."""
    if path.is_relative_to(ROOT):
        return str(path.relative_to(ROOT))
    return str(path)
