"""What the tests of the scripts share."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _settings_of_the_process():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def results(tmp_path):
    return tmp_path / "results.csv"
