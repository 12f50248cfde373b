"""models/resnet_cifar.py: architecture, initialisation, and what the forward pass promises."""

import math

import pytest
import torch
import torchvision
from torch import nn

from models.resnet_cifar import resnet_cifar
from models.small_maps import SmallMapConv2d


def images(batch: int = 4) -> torch.Tensor:
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def test_training_steps_are_torchvisions_apart_from_the_first_convolution():
    """Losses, gradients, running statistics and then logits in eval mode: the maps of 4x4 and 2x2 as products, ReLU
    after the pool, and channels_last change nothing."""
    ours = resnet_cifar("resnet18", 100).to(torch.float64, memory_format=torch.channels_last)
    assert sum(parameter.numel() for parameter in ours.parameters()) == 11_220_132
    theirs = torchvision.models.resnet18(num_classes=100).double()
    theirs.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False).double()
    theirs.load_state_dict(ours.state_dict())
    batch = images(8).double()
    labels = torch.arange(8)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (ours, theirs)]
    for _ in range(2):
        losses = []
        for model, optimizer in zip((ours, theirs), optimizers):
            loss = nn.functional.cross_entropy(model(batch), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses)
    for (name, our), their in zip(ours.state_dict().items(), theirs.state_dict().values()):
        torch.testing.assert_close(our, their, rtol=1e-7, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
    with torch.no_grad():
        torch.testing.assert_close(*(model.eval()(batch) for model in (ours, theirs)))


@pytest.mark.parametrize(
    ("name", "width", "small_maps"), [("resnet18", 512, 8), ("resnet34", 512, 18), ("resnet50", 2048, 9)]
)
def test_the_networks_are_torchvisions_with_names_features_and_convolutions_for_small_maps(name, width, small_maps):
    model = resnet_cifar(name, 10).eval()
    with torch.device("meta"):
        theirs = torchvision.models.get_model(name, num_classes=10).state_dict()
    expected = {key: value.shape for key, value in theirs.items()} | {"conv1.weight": torch.Size([64, 3, 3, 3])}
    assert [(key, value.shape) for key, value in model.state_dict().items()] == list(expected.items())
    layers = [path for path, layer in model.named_modules() if isinstance(layer, SmallMapConv2d)]
    assert len(layers) == small_maps
    assert {path.split(".")[0] for path in layers} == {"layer3", "layer4"}  # the last two stages
    with torch.no_grad():
        features = model.features(images(2))
        logits = model(images(2))
    assert features.shape == (2, width)
    torch.testing.assert_close(model.fc(features), logits)


def test_each_stage_has_the_published_maps():
    """The first convolution has stride 1, the max-pool stays, and each stage but the first halves the maps."""
    model = resnet_cifar("resnet18", 10)
    found = {}
    for name, module in model.named_children():
        module.register_forward_hook(lambda module, inputs, maps, name=name: found.update({name: maps.shape[-1]}))
    model(images(1))
    sides = {"conv1": 32, "maxpool": 16, "layer1": 16, "layer2": 8, "layer3": 4, "layer4": 2}
    assert {name: found[name] for name in sides} == sides


def test_each_weight_is_drawn_once_in_the_documented_order():
    torch.manual_seed(3)
    model = resnet_cifar("resnet18", 100)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert all((tensor == 1).all() for tensor in (module.weight, module.running_var))
            assert all((tensor == 0).all() for tensor in (module.bias, module.running_mean, module.num_batches_tracked))
        if isinstance(module, nn.Conv2d):
            fan_out = module.out_channels * math.prod(module.kernel_size)
            weight = torch.empty_like(module.weight).normal_(0, math.sqrt(2 / fan_out))
            torch.testing.assert_close(module.weight, weight)
    fc = nn.Linear(512, 100)
    assert torch.equal(model.fc.weight, fc.weight)
    assert torch.equal(model.fc.bias, fc.bias)
    assert torch.equal(after, torch.get_rng_state())


def test_bfloat16_autocast_runs_forward_and_backward():
    model = resnet_cifar("resnet18", 10)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(images())
    assert logits.dtype == torch.float32, "the last layer keeps float32: bf16 logits tie"
    logits.logsumexp(1).sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())
