"""What a CUDA graph of a training step needs of the losses, found without a GPU: tensors on "meta" have no numbers.

A step that asks for a number raises there. One that copies from the host, or binds a tensor anew that the next step
reads, would be captured with the values of that step.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from topk_losses import METHODS, make_loss
from topk_losses.kernels import VARIABLE
from topk_losses.methods import TOP1

CASES = [(method, None) for method in METHODS]
CASES += [(method, "auto") for method, spec in METHODS.items() if spec.spread is not None]


class Crossings(TorchDispatchMode):
    """Notes the operations whose tensors lie on several devices."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        devices = {each.device.type for each in tree_leaves((args, kwargs, result)) if isinstance(each, torch.Tensor)}
        if len(devices) > 1:
            self.found.append(func.overloadpacket.__name__)
        return result


def tensors_of(module, path=""):
    """The tensors that a module and what it holds are bound to, by name."""
    for name, value in vars(module).items():
        if isinstance(value, torch.Tensor):
            yield f"{path}.{name}", value
        elif isinstance(value, torch.nn.Module):
            yield from tensors_of(value, f"{path}.{name}")
        elif name == "_modules":
            for child, each in value.items():
                yield from tensors_of(each, f"{path}.{child}")


@pytest.mark.parametrize(("method", "beta"), CASES)
def test_a_second_step_reads_no_number_copies_nothing_and_binds_nothing_anew(method, beta, monkeypatch):
    monkeypatch.setenv(VARIABLE, "torch")
    p_k = 1 if method in TOP1 else 5 if METHODS[method].loss else {1: 0.5, 5: 0.5}
    loss = make_loss(method, p_k, 20, **({"inverse_temperature": beta} if beta else {}))
    if method == "imbalanced_noised_topk":
        loss.class_counts = torch.ones(20, dtype=torch.int64)
    loss.to("meta")
    logits = torch.empty(8, 20, device="meta", requires_grad=True)
    labels = torch.empty(8, dtype=torch.int64, device="meta")
    loss(logits, labels).backward()
    before = dict(tensors_of(loss))
    with Crossings() as crossings:
        loss(logits, labels).backward()
    assert crossings.found == []
    after = dict(tensors_of(loss))
    assert {name for name, tensor in after.items() if before.get(name) is not tensor} == set()
