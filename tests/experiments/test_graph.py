"""--graph: a step of one function, of tensors that lie where they lay, gives the bits of the loop.

Without a GPU the recording is stood in for by a function that takes the recorded step again, on the tensors that were
there when it was recorded: what a graph would keep for good is kept here, too.
"""

import pytest
import torch
from experiments.shared import command_line, graph

from experiments import finetune_imagenet, train_cifar100
from tests.experiments import runs
from tests.experiments.test_finetune_imagenet import COMPARED, made_store
from tests.experiments.test_finetune_imagenet import command as head_command
from tests.experiments.test_train_cifar100 import command, tiny_network


@pytest.fixture
def recorded(monkeypatch):
    """The number of recordings and of replays, where a step is recorded on the CPU."""
    counts = {"recorded": 0, "replayed": 0}

    def record(step, generator):
        counts["recorded"] += 1
        returned = [None, None]

        def replay():
            counts["replayed"] += 1
            returned[:] = step()

        return returned, replay

    monkeypatch.setattr(graph, "record", record)
    monkeypatch.setattr(graph.GraphedStep, "_on_another_stream", lambda self, *arguments: self.step(*arguments))
    monkeypatch.setattr(command_line, "training_device", lambda *_: torch.device("cpu"))
    return counts


@pytest.mark.parametrize(
    "flags",
    [
        "--method softmax_cross_entropy",
        "--method splitter_selection --inverse_temperature auto --ema .9",
        "--method softsort --inverse_temperature 1:.25",
        "--method softsort --lr_schedule cosine",
        "--method perturbed_topk",
        "--method sinkhorn_sort",
    ],
)
def test_networks_have_the_bits_of_the_loop_and_continue(recorded, tmp_path, monkeypatch, flags):
    monkeypatch.setattr(train_cifar100, "resnet_cifar", tiny_network)
    plain, graphed, resumed = (tmp_path / name / "r.csv" for name in ("plain", "graphed", "resumed"))
    words = [*flags.split(), "--batch_size", "8"]
    assert train_cifar100.main([*command(plain, n_epochs=3), *words]) == 0
    assert recorded["recorded"] == 0
    assert train_cifar100.main([*command(graphed, n_epochs=3), *words, "--graph"]) == 0
    assert recorded["recorded"] == 1
    assert recorded["replayed"] == 3 * (76 // 8) - graph.WARM_UP
    with monkeypatch.context() as patch:
        runs.stop(patch, train_cifar100, "train_epoch", 2)
        assert train_cifar100.main([*command(resumed, n_epochs=3), *words, "--graph"]) == 130
    assert train_cifar100.main([*command(resumed, n_epochs=3), *words, "--graph"]) == 0
    apart = {"apart": ["graph"]}
    expected = runs.outcome(plain, **apart)
    assert runs.outcome(resumed, **apart) == runs.outcome(graphed, **apart)
    if "cosine" not in flags:  # a graph reads the rate from a tensor, which is float32
        assert runs.outcome(graphed, **apart) == expected
    (ours,), (exact,) = map(runs.read_rows, (graphed, plain))
    assert float(ours["last_train_loss"]) == pytest.approx(float(exact["last_train_loss"]), rel=1e-6)


def test_heads_have_the_bits_of_the_loop(recorded, tmp_path):
    store = made_store(tmp_path / "made.store")
    flags = "--apply_dropout --hidden_dims 8 --seeds 0 1"
    found = []
    for name, graphed in (("plain", []), ("graphed", ["--graph"])):
        results = tmp_path / name / "r.csv"
        words = [*head_command(store, results, flags), "--also", "--method noised_topk --p_k 0 0 0 0 1", *graphed]
        assert finetune_imagenet.main(words) == 0
        found.append(runs.outcome(results, file=COMPARED["file"], apart=["graph"]))
    assert recorded["recorded"] == 4
    assert found[0] == found[1]


def test_graphs_are_refused_where_they_cannot_be(tmp_path, capsys):
    words = [*command(tmp_path / "r.csv"), "--graph", "--device", "cpu"]
    runs.check_refused(train_cifar100.main, words, "--graph is for one process on a GPU", capsys)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", ["softmax_cross_entropy", "splitter_selection", "sinkhorn_sort"])
def test_a_graph_on_a_gpu_learns_what_the_loop_learns(tmp_path, method):
    losses = []
    for flags in ([], ["--graph"]):
        results = tmp_path / str(len(flags)) / "r.csv"
        words = [*command(results, n_epochs=2), "--method", method, "--batch_size", "8", "--device", "cuda"]
        assert train_cifar100.main([*words, "--deterministic", *flags]) == 0
        losses.append(float(runs.read_rows(results)[0]["last_train_loss"]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
