"""The steps of training and evaluation: none waits for a GPU, and how they are cut changes nothing."""

from contextlib import nullcontext

import pytest
import torch
from experiments.shared import command_line
from experiments.shared.ranks import Ranks
from experiments.shared.run import Steps
from experiments.shared.run_record import read_rows

from experiments import train_cifar100 as script
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


def steps_of(tmp_path, monkeypatch, method: str, device: torch.device, network=tiny_network):
    """What an epoch and an evaluation on the device are of."""
    monkeypatch.setattr(command_line, "training_device", lambda *_: device)
    args = script.parse_arguments([*QUICK, "--method", method, "--results", str(tmp_path / "r.csv")])
    run, loss_fn, data = script.begin(args, Ranks())
    data = data.to(device)
    model = network("resnet18", data.num_classes).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), fused=device.type == "cuda")
    steps = Steps(run, optimizer, loss_fn, len(data.train) // args.batch_size, args.n_epochs)
    return (steps, model, loss_fn, data), (run, model, loss_fn, data)


@pytest.mark.parametrize("method", METHODS)
def test_no_step_reads_what_a_device_has_computed(tmp_path, monkeypatch, method):
    """On the meta device, where nothing has a value, reading one raises; branches are taken as on a GPU."""
    crops = [torch.zeros(16, dtype=torch.int64, device="meta")] * 2
    for name in ("epoch_generator", "seed_noise"):  # there is no generator of this device
        monkeypatch.setattr(script, name, lambda *_: None)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    monkeypatch.setattr(script, "sample_crops", lambda *_: [*crops, crops[0] > 0])
    monkeypatch.setattr(script, "EVAL_BATCH", {"meta": 16})
    monkeypatch.setattr(Ranks, "total", lambda *_: (_ for _ in ()).throw(EndOfTheSteps))
    training, evaluation = steps_of(tmp_path, monkeypatch, method, torch.device("meta"))
    with pytest.raises(EndOfTheSteps):
        script.train_epoch(1, *training)
    with pytest.raises(EndOfTheSteps):
        script.evaluate(1, *evaluation)


class MayWaitForTotals(Ranks):
    """Where the sums of an epoch are complete the GPU may be waited for."""

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        torch.cuda.set_sync_debug_mode("default")
        return super().total(tensor)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", METHODS)
def test_no_step_waits_for_the_gpu(tmp_path, monkeypatch, method):
    training, evaluation = steps_of(tmp_path, monkeypatch, method, torch.device("cuda", 0), script.resnet_cifar)
    run = evaluation[0]
    run.ranks, run.flags["precision"] = MayWaitForTotals(), "bf16"
    # The first epoch brings constants over.
    for epoch, mode in ((1, "default"), (2, "error")):
        try:
            torch.cuda.set_sync_debug_mode(mode)
            script.train_epoch(epoch, *training)
            torch.cuda.set_sync_debug_mode(mode)
            script.evaluate(epoch, *evaluation)
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
