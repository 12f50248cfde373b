"""models/small_maps.py: the values and gradients of nn.Conv2d, and when they are computed by products."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from models.small_maps import SmallMapConv2d

# Height, width and stride: those of ResNet-18's last stages, and the borders of what is taken.
SHAPES = [(2, 2, 1), (4, 4, 2), (4, 4, 1), (8, 8, 2), (1, 1, 1), (1, 2, 1), (3, 5, 1), (5, 3, 2), (1, 1, 2), (7, 2, 2)]


class Operations(TorchDispatchMode):
    """Notes the names of PyTorch's operations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def is_by_products(layer, maps):
    """Whether the gradient of the weights comes from matrix products, not from PyTorch's convolution."""
    outputs = layer(maps.detach())
    with Operations() as operations:
        torch.autograd.grad(outputs.sum(), layer.weight)
    return "convolution_backward" not in operations.names


def layer_and_maps(height, width, stride, dtype=torch.float64, channels=(2, 3), batch=3):
    torch.manual_seed(0)
    layer = SmallMapConv2d(*channels, stride).to(dtype, memory_format=torch.channels_last)
    maps = torch.randn(batch, channels[0], height, width, dtype=dtype).contiguous(memory_format=torch.channels_last)
    return layer, maps.requires_grad_()


@pytest.mark.parametrize(("height", "width", "stride"), SHAPES)
def test_values_and_gradients_are_those_of_conv2d(height, width, stride):
    layer, maps = layer_and_maps(height, width, stride)
    ours = layer(maps)
    theirs = F.conv2d(maps, layer.weight, stride=stride, padding=1)
    assert is_by_products(layer, maps)
    torch.testing.assert_close(ours, theirs)
    gradient = torch.randn_like(theirs)
    for our, their in zip(*(torch.autograd.grad(y, (maps, layer.weight), gradient) for y in (ours, theirs))):
        torch.testing.assert_close(our, their)
    assert torch.autograd.gradcheck(
        lambda maps, weight: torch.func.functional_call(layer, {"weight": weight}, maps), (maps, layer.weight)
    )


def test_any_memory_format_gives_the_same():
    layer, maps = layer_and_maps(2, 2, 1)
    expected = torch.autograd.grad(layer(maps).square().sum(), (maps, layer.weight))
    layer.weight.data = layer.weight.data.contiguous()
    planes = maps.detach().contiguous().requires_grad_()
    for ours, theirs in zip(torch.autograd.grad(layer(planes).square().sum(), (planes, layer.weight)), expected):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("frozen", ["maps", "weight"])
def test_what_is_frozen_gets_no_gradient(frozen):
    layer, maps = layer_and_maps(2, 2, 1)
    {"maps": maps, "weight": layer.weight}[frozen].requires_grad_(False)
    layer(maps).sum().backward()
    assert (maps.grad is None, layer.weight.grad is None) == (frozen == "maps", frozen == "weight")


@pytest.mark.parametrize(("height", "stride"), [(2, 1), (4, 2), (4, 1)])
def test_autocast_computes_in_bfloat16_with_the_rounding_of_one_product(height, stride):
    """The gradient of maps of more than 2x2 is PyTorch's: without AVX-512 it is rounded at each of the nine taps."""
    layer, maps = layer_and_maps(height, height, stride, torch.float32, channels=(32, 48), batch=16)
    with torch.autocast("cpu", torch.bfloat16):
        ours = layer(maps)
        assert is_by_products(layer, maps)
    assert ours.dtype == torch.bfloat16
    gradient = torch.randn_like(ours)
    maps_gradient, weight_gradient = torch.autograd.grad(ours, (maps, layer.weight), gradient)
    assert maps_gradient.dtype == weight_gradient.dtype == torch.float32

    rounded = [tensor.detach().bfloat16().requires_grad_() for tensor in (maps, layer.weight)]
    exact = [tensor.detach().double().requires_grad_() for tensor in rounded]
    theirs = F.conv2d(*exact, stride=stride, padding=1)
    torch.testing.assert_close(ours.double(), theirs, rtol=2**-8, atol=1e-4)
    exact_maps_gradient, exact_weight_gradient = torch.autograd.grad(theirs, exact, gradient.double())
    atol = 1e-3 * exact_weight_gradient.abs().max().item()
    torch.testing.assert_close(weight_gradient.double(), exact_weight_gradient, rtol=2**-8, atol=atol)
    if height == 2:
        atol = 1e-3 * exact_maps_gradient.abs().max().item()
        torch.testing.assert_close(maps_gradient.double(), exact_maps_gradient, rtol=2**-8, atol=atol)
    else:
        outputs = F.conv2d(*rounded, stride=stride, padding=1)
        (pytorchs,) = torch.autograd.grad(outputs, rounded[:1], gradient)
        assert torch.equal(maps_gradient, pytorchs.float())


def test_large_maps_and_other_devices_are_conv2ds():
    layer, maps = layer_and_maps(8, 8, 1)
    assert not is_by_products(layer, maps)
    layer, maps = layer_and_maps(2, 2, 1)
    layer = layer.to("meta")
    maps = maps.to("meta")
    assert layer(maps).shape == (3, 3, 2, 2)
    assert not is_by_products(layer, maps)


def test_second_derivatives_are_refused_and_not_wrong():
    layer, maps = layer_and_maps(2, 2, 1)
    (gradient,) = torch.autograd.grad(layer(maps).square().sum(), maps, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
