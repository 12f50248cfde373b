"""The steps of training and evaluation: none waits for a GPU, and how they are cut changes nothing."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch

from experiments import train_cifar100 as script
from experiments.shared.ranks import Ranks
from experiments.shared.run_record import read_rows
from tests.experiments.test_train_cifar100 import QUICK, command, tiny_network
from topk_losses import METHODS


def test_the_size_of_the_evaluation_batches_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(script, "resnet_cifar", tiny_network)
    rows = []
    for size in (500, 7):
        monkeypatch.setattr(script, "EVAL_BATCH", {"cpu": size})
        results = tmp_path / str(size) / "r.csv"
        assert script.main(command(results, n_epochs=2)) == 0
        rows += read_rows(results)
    for name, value in rows[0].items():
        if "top" in name:
            assert rows[1][name] == value
        elif "loss" in name:
            assert float(rows[1][name]) == pytest.approx(float(value), rel=1e-6)


class EndOfTheSteps(Exception):
    """From here on the GPU may be waited for."""


@pytest.mark.parametrize("method", METHODS)
def test_no_step_reads_what_a_device_has_computed(tmp_path, monkeypatch, method):
    """On the meta device, where nothing has a value, reading one raises; branches are taken as on a GPU."""
    crops = [torch.zeros(16, dtype=torch.int64, device="meta")] * 2
    monkeypatch.setattr(script, "epoch_generator", lambda *_: None)
    monkeypatch.setattr(script, "sample_crops", lambda *_: [*crops, crops[0] > 0])
    monkeypatch.setattr(script, "EVAL_BATCH", {"meta": 16})
    monkeypatch.setattr(Ranks, "total", lambda *_: (_ for _ in ()).throw(EndOfTheSteps))
    args = script.parse_arguments([*QUICK, "--method", method, "--results", str(tmp_path / "r.csv")])
    loss_fn, _ = script.configuration(args, torch.device("meta"))
    data = script.dataset(args).to("meta")
    model = tiny_network("resnet18", data.num_classes).to("meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(EndOfTheSteps):
        script.train_epoch(1, model, loss_fn, optimizer, data, nullcontext, args, False, Ranks())
    with pytest.raises(EndOfTheSteps):
        script.evaluate(1, model, loss_fn, data, nullcontext, args, Ranks())


class MayWaitForTotals(Ranks):
    """Where the sums of an epoch are complete the GPU may be waited for."""

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        torch.cuda.set_sync_debug_mode("default")
        return super().total(tensor)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", METHODS)
def test_no_step_waits_for_the_gpu(tmp_path, method):
    args = script.parse_arguments([*QUICK, "--method", method, "--results", str(tmp_path / "r.csv")])
    device = torch.device("cuda", 0)
    loss_fn, _ = script.configuration(args, device)
    data = script.dataset(args).to(device)
    model = script.resnet_cifar("resnet18", data.num_classes).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    autocast = partial(torch.autocast, "cuda", torch.bfloat16)
    ranks = MayWaitForTotals()
    # The first epoch brings constants over.
    for epoch, mode in ((1, "default"), (2, "error")):
        try:
            torch.cuda.set_sync_debug_mode(mode)
            script.train_epoch(epoch, model, loss_fn, optimizer, data, autocast, args, False, ranks)
            torch.cuda.set_sync_debug_mode(mode)
            script.evaluate(epoch, model, loss_fn, data, autocast, args, ranks)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", ["splitter_selection", "sinkhorn_sort"])
def test_compiled_steps_on_a_gpu_learn_the_same(tmp_path, method):
    rows = []
    for flags in ("", "--compile"):
        results = tmp_path / f"compiled{flags}" / "r.csv"
        assert script.main(command(results, f"--device cuda {flags}", method)) == 0
        rows += read_rows(results)
    assert float(rows[1]["last_train_loss"]) == pytest.approx(float(rows[0]["last_train_loss"]), rel=0.05)
