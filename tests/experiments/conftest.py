"""What the tests of the scripts share."""

import pytest
import torch

from experiments.shared import run


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def saved_often(monkeypatch):
    """Every evaluation is followed by a checkpoint, and not only those of which the last one is a minute old."""
    monkeypatch.setattr(run, "SAVE_SECONDS", -1)
