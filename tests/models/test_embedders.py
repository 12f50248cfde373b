"""The embedding networks: the published shapes, and what each refuses."""

import pytest
import torch
from torch import nn
from torch.nn.functional import batch_norm, conv2d, relu

from models.embedders import PreActBlock, embedder


@pytest.mark.parametrize(
    ("name", "shape", "settings", "dim", "parameters"),
    [
        # convolutions and the layer of 500, weights and biases
        ("cnn", (1, 28, 28), {}, 500, 20 * 26 + 50 * 501 + 500 * 801),
        ("cnn", (1, 32, 32), {}, 500, 20 * 26 + 50 * 501 + 500 * 1251),
        ("preact_resnet18", (3, 32, 32), {}, 512, 11_166_016),
        ("preact_resnet18", (1, 28, 28), {}, 512, 11_166_016 - 18 * 64),
        ("linear", (6,), {"dim": 4}, 4, 4 * 7),
        ("linear", (2, 3, 3), {"dim": 4}, 4, 4 * 19),
        ("mlp", (6,), {"dim": 4, "hidden_dims": [5, 3]}, 4, 5 * 7 + 3 * 6 + 4 * 4),
    ],
)
def test_shapes_and_numbers_of_parameters(name, shape, settings, dim, parameters):
    network = embedder(name, shape, **settings)
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters
    assert network(torch.rand(2, *shape)).shape == (2, dim)
    if "dim" not in settings:
        assert network.dim == dim


def test_the_embeddings_of_the_cnn_end_in_a_relu_and_those_of_the_resnet_do_not():
    inputs = torch.randn(4, 3, 32, 32)
    assert (embedder("cnn", (3, 32, 32))(inputs) >= 0).all()
    assert (embedder("preact_resnet18", (3, 32, 32))(inputs) < 0).any()


# Of Grover et al. 2019: the convolution and the first stage keep 32x32 (of MNIST 28x28), each later stage halves it.
@pytest.mark.parametrize(("side", "sides"), [(32, [32, 16, 8, 4]), (28, [28, 14, 7, 4])])
def test_each_stage_of_the_resnet_halves_the_maps(side, sides):
    found = []
    network = embedder("preact_resnet18", (3, side, side))
    for module in network.modules():
        if isinstance(module, PreActBlock):
            module.register_forward_hook(lambda block, inputs, maps: found.append(tuple(maps.shape[1:])))
    network(torch.rand(1, 3, side, side))
    expected = [(width, size, size) for width, size in zip((64, 128, 256, 512), sides)]
    assert found[::2] == found[1::2] == expected  # two blocks in each


def normed(maps: torch.Tensor, norm: nn.BatchNorm2d) -> torch.Tensor:
    return batch_norm(maps, None, None, norm.weight, norm.bias, training=True)


@pytest.mark.parametrize(("inputs", "outputs", "stride"), [(3, 3, 1), (3, 5, 1), (3, 5, 2)])
def test_a_block_by_its_definition(inputs, outputs, stride):
    """Batch norm and ReLU come before each convolution; a shape that changes passes 1x1 after the first of them."""
    block = PreActBlock(inputs, outputs, stride).double()
    for norm in (block.bn1, block.bn2):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)

    x = torch.randn(4, inputs, 8, 8, dtype=torch.float64)
    first = relu(normed(x, block.bn1))
    second = relu(normed(conv2d(first, block.conv1.weight, stride=stride, padding=1), block.bn2))
    same = stride == 1 and inputs == outputs
    beside = x if same else conv2d(first, block.shortcut.weight, stride=stride)
    torch.testing.assert_close(block(x), conv2d(second, block.conv2.weight, padding=1) + beside)


@pytest.mark.parametrize(
    ("name", "shape", "settings", "words"),
    [
        ("cnn", (512,), {}, "cnn takes images, got inputs of shape"),
        ("linear", (4,), {"dim": 4, "hidden_dims": [3]}, "those of mlp"),
        ("mlp", (4,), {"dim": 4}, "which needs at least one"),
    ],
)
def test_what_does_not_go_together_is_refused(name, shape, settings, words):
    with pytest.raises(ValueError, match=words):
        embedder(name, shape, **settings)
