"""models/resnet_cifar.py: architecture, initialisation, and what the forward pass promises."""

import math

import pytest
import torch
import torchvision
from torch import nn

from models.resnet_cifar import ARCHITECTURES, resnet_cifar
from models.small_maps import SmallMapConv2d


def images(batch: int = 4) -> torch.Tensor:
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def resnet18() -> nn.Module:
    torch.manual_seed(0)
    return resnet_cifar("resnet18", 100)


def test_resnet18_with_100_classes_has_11220132_parameters(resnet18):
    assert sum(p.numel() for p in resnet18.parameters()) == 11_220_132


def test_first_layers_are_the_published_ones(resnet18):
    conv, pool = resnet18.conv1, resnet18.maxpool
    assert conv.weight.shape == (64, 3, 3, 3)
    assert (conv.stride, conv.padding, conv.bias) == ((1, 1), (1, 1), None)
    assert isinstance(pool, nn.MaxPool2d)
    assert (pool.kernel_size, pool.stride, pool.padding) == (3, 2, 1)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_state_dict_has_torchvisions_names_and_shapes(name):
    ours = {key: value.shape for key, value in resnet_cifar(name, 10).state_dict().items()}
    with torch.device("meta"):
        theirs = torchvision.models.get_model(name, num_classes=10).state_dict()
    expected = {key: value.shape for key, value in theirs.items()}
    expected["conv1.weight"] = torch.Size([64, 3, 3, 3])
    assert ours == expected
    assert list(ours) == list(expected)


def test_stages_shrink_the_image_as_documented(resnet18):
    sizes = {}
    names = ("conv1", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool")
    hooks = [
        getattr(resnet18, name).register_forward_hook(
            lambda module, inputs, output, name=name: sizes.update({name: tuple(output.shape[1:])})
        )
        for name in names
    ]
    with torch.no_grad():
        resnet18.eval()(images(2))
    for hook in hooks:
        hook.remove()
    channels, sides = (64, 64, 64, 128, 256, 512, 512), (32, 16, 16, 8, 4, 2, 1)
    assert sizes == {name: (number, side, side) for name, number, side in zip(names, channels, sides)}


@pytest.mark.parametrize(("name", "width"), [("resnet18", 512), ("resnet34", 512), ("resnet50", 2048)])
def test_features_are_the_input_of_fc(name, width):
    model = resnet_cifar(name, 7).eval()
    with torch.no_grad():
        features, logits = model.features(images(2)), model(images(2))
    assert features.shape == (2, width)
    assert width == model.fc.in_features
    assert logits.shape == (2, 7)
    torch.testing.assert_close(features @ model.fc.weight.T + model.fc.bias, logits)


def test_forward_is_torchvisions_apart_from_the_first_convolution(resnet18):
    theirs = torchvision.models.resnet18(num_classes=100)
    theirs.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    theirs.load_state_dict(resnet18.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(resnet18.eval()(images()), theirs.eval()(images()))


def test_training_steps_are_torchvisions(resnet18):
    """Losses, gradients and running statistics, with the maps of 4x4 and 2x2 as products and ReLU after the pool."""
    ours = resnet_cifar("resnet18", 100).to(torch.float64, memory_format=torch.channels_last)
    theirs = torchvision.models.resnet18(num_classes=100).double()
    theirs.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False).double()
    theirs.load_state_dict(ours.state_dict())
    batch, labels = images(8).double(), torch.arange(8)
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


@pytest.mark.parametrize(("name", "number"), [("resnet18", 8), ("resnet34", 18), ("resnet50", 9)])
def test_the_last_two_stages_have_convolutions_for_small_maps(name, number):
    layers = [path for path, layer in resnet_cifar(name).named_modules() if isinstance(layer, SmallMapConv2d)]
    assert len(layers) == number
    assert {path.split(".")[0] for path in layers} == {"layer3", "layer4"}


def test_batch_norms_begin_neutral():
    for module in resnet_cifar("resnet18", 100).modules():
        if isinstance(module, nn.BatchNorm2d):
            assert all((each == 1).all() for each in (module.weight, module.running_var))
            assert all((each == 0).all() for each in (module.bias, module.running_mean))
            assert module.num_batches_tracked == 0


def test_each_weight_is_drawn_once_in_the_documented_order():
    torch.manual_seed(3)
    model = resnet_cifar("resnet18", 100)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.out_channels * math.prod(module.kernel_size)
            weight = torch.empty_like(module.weight).normal_(0, math.sqrt(2 / fan_out))
            torch.testing.assert_close(module.weight, weight)
    fc = nn.Linear(512, 100)
    assert torch.equal(model.fc.weight, fc.weight)
    assert torch.equal(model.fc.bias, fc.bias)
    assert torch.equal(after, torch.get_rng_state())


def test_number_of_classes_changes_the_head_alone():
    torch.manual_seed(1)
    ten = resnet_cifar("resnet18", 10).state_dict()
    torch.manual_seed(1)
    hundred = resnet_cifar("resnet18", 100).state_dict()
    assert all(torch.equal(ten[key], hundred[key]) for key in ten if not key.startswith("fc."))


def test_channels_last_gives_the_same_logits(resnet18):
    model = resnet_cifar("resnet18", 100).eval()
    model.load_state_dict(resnet18.state_dict())
    with torch.no_grad():
        expected = model(images())
        model.to(memory_format=torch.channels_last)
        actual = model(images().contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_evaluation_is_deterministic_and_leaves_the_statistics_alone(resnet18):
    resnet18.eval()
    before = {key: value.clone() for key, value in resnet18.state_dict().items()}
    with torch.no_grad():
        assert torch.equal(resnet18(images()), resnet18(images()))
        # Without batch statistics an image's logits do not depend on its neighbours.
        torch.testing.assert_close(resnet18(images())[:1], resnet18(images()[:1]), rtol=1e-4, atol=1e-4)
    assert all(torch.equal(before[key], value) for key, value in resnet18.state_dict().items())


def test_training_step_reaches_every_parameter():
    model = resnet_cifar("resnet18", 10)
    nn.functional.cross_entropy(model(images()), torch.arange(4)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert all(m.num_batches_tracked == 1 for m in model.modules() if isinstance(m, nn.BatchNorm2d))


def test_bfloat16_autocast_runs_forward_and_backward():
    model = resnet_cifar("resnet18", 10)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(images())
    assert logits.dtype == torch.float32, "the last layer keeps float32: bf16 logits tie"
    logits.logsumexp(1).sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


def test_unknown_name_lists_the_choices():
    with pytest.raises(ValueError, match=r"unknown model 'resnet9'.*resnet18, resnet34, resnet50"):
        resnet_cifar("resnet9")


def test_num_classes_must_be_positive():
    with pytest.raises(ValueError, match=r"num_classes .* at least 1, got 0"):
        resnet_cifar(num_classes=0)
