"""What the oracle tests share: a script called as a user calls it, and what its files must say of a plain loop."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
from torch import Tensor

from tests.experiments.scripts import rows_of

HISTORY = {"epoch": "epochs.csv", "step": "evaluations.csv", "update": "updates.csv"}


def run(script: ModuleType, flags: str, results: Path) -> list[dict[str, str]]:
    """Run a script with these flags, and return the rows of its file, all cells as text."""
    words = shlex.split(flags)
    assert script.main([*words, "--device", "cpu", "--threads", "1", "--results", str(results)]) == 0
    return rows_of(results)


def history_of(results: Path, row: dict[str, str], clock: str = "epoch") -> list[dict[str, str]]:
    return rows_of(results.parent / "runs" / row["run_id"] / HISTORY[clock])


def top_k(logits: Tensor, labels: Tensor, ks: Sequence[int] = (1, 3, 5, 10, 20)) -> dict[str, float]:
    """The shares of samples whose label is among the k largest of the logits (batch, n), by "top<k>"."""
    ranked = logits.argsort(dim=1, descending=True, stable=True)
    return {f"top{k}": (ranked[:, :k] == labels.unsqueeze(1)).any(1).double().mean().item() for k in ks}


def check_history(history: list[dict[str, str]], expected: list[dict[str, float]], rel: float = 1e-5) -> None:
    """Each entry of the history says what the plain loop found."""
    assert len(history) == len(expected)
    for number, (entry, figures) in enumerate(zip(history, expected)):
        for name, value in figures.items():
            assert float(entry[name]) == pytest.approx(value, rel=rel, abs=1e-6), (number, name)


def check_choice(
    row: dict[str, str],
    expected: list[dict[str, float]],
    clock: str,
    ks: Sequence[int] = (1, 3, 5, 10, 20),
    rel: float = 1e-5,
) -> None:
    """For each k the row has the test accuracy of the evaluation, the earliest of equals, where validation was best.

    Its columns last_* are of the last evaluation, and last_train_loss of all steps of the last epoch, to rel.
    """
    for k in ks:
        best = max(expected, key=lambda figures: figures[f"valid_top{k}"])
        for name, value in ((f"valid_top{k}", best[f"valid_top{k}"]), (f"test_top{k}", best[f"test_top{k}"])):
            assert float(row[name]) == pytest.approx(value, rel=1e-6)
        assert float(row[f"test_top{k}_{clock}"]) == best[clock]
    last = expected[-1]
    for name in (name for name in last if name.startswith(("valid_", "test_", "clean_"))):
        assert float(row[f"last_{name}"]) == pytest.approx(last[name], rel=1e-5, abs=1e-6), name
    epoch = [figures for figures in expected if figures.get("epoch") == last.get("epoch")]
    steps = [figures.get("train_steps", 1) for figures in epoch]
    mean = sum(figures["train_loss"] * number for figures, number in zip(epoch, steps)) / sum(steps)
    assert float(row["last_train_loss"]) == pytest.approx(mean, rel=rel)
