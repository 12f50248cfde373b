"""What the tests of the scripts share."""

import os

import pytest
import torch
from experiments.shared import run


@pytest.fixture(autouse=True)
def _settings_of_the_process():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def results(tmp_path):
    return tmp_path / "results.csv"


@pytest.fixture
def saved_often(monkeypatch):
    """Every evaluation is followed by a checkpoint, and not only those of which the last one is a minute old."""
    monkeypatch.setattr(run, "SAVE_SECONDS", -1)


@pytest.fixture
def s3(moto, monkeypatch):
    """The address of an S3 server; credentials, and no proxies."""
    for name in [name for name in os.environ if name.startswith("AWS_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    for name, value in (("ACCESS_KEY_ID", "test"), ("SECRET_ACCESS_KEY", "test"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    return moto
