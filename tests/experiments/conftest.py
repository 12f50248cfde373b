"""What the tests of the scripts share."""

import time

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.experiments.clock import Clock


@pytest.fixture(autouse=True)
def _settings_of_the_process():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def results(tmp_path):
    return tmp_path / "results.csv"


@pytest.fixture
def clock(monkeypatch):
    """Clocks by which a training step and a module's call in an evaluation take many seconds."""
    made = Clock()
    for name in ("time", "monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, made.shifted(getattr(time, name)))

    def after_step(*_):
        made.steps += 1
        made.offset += made.step

    def before_call(*_):
        if not torch.is_grad_enabled():
            made.calls += 1
            made.offset += made.evaluated

    handles = [register_optimizer_step_post_hook(after_step), register_module_forward_pre_hook(before_call)]
    yield made
    for handle in handles:
        handle.remove()
