"""A head is the published one, and its last layer learns from few entries what products over all of them give."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from models.heads import head


def small(**shape):
    torch.manual_seed(0)
    return head(**{"embedding_dim": 6, "num_classes": 30, **shape})


def test_the_published_head_is_one_linear_layer_with_default_initialisation():
    torch.manual_seed(3)
    (layer,) = head(2048, 1000)
    torch.manual_seed(3)
    expected = nn.Linear(2048, 1000)
    assert isinstance(layer, nn.Linear)
    assert torch.equal(layer.weight, expected.weight)
    assert torch.equal(layer.bias, expected.bias)


def test_hidden_layers_relu_and_dropout_stand_where_the_official_script_has_them():
    made = head(6, 5, (7, 4), apply_relu=True, apply_dropout=True)
    kinds = [nn.ReLU, nn.Dropout, nn.Linear, nn.ReLU, nn.Linear, nn.ReLU, nn.Linear]
    assert all(isinstance(layer, kind) for layer, kind in zip(made, kinds, strict=True))
    assert made[1].p == 0.5
    assert [(layer.in_features, layer.out_features) for layer in made[2::2]] == [(6, 7), (7, 4), (4, 5)]


def test_dropout_depends_on_the_seed_and_the_step_alone():
    made = small(apply_dropout=True)
    kept = made.dropout_mask(4, 7, step=5)
    assert kept.shape == (4, 6)
    assert torch.equal(kept, small(apply_dropout=True).dropout_mask(4, 7, step=5))
    assert not torch.equal(kept, made.dropout_mask(4, 7, step=6))
    assert not torch.equal(kept, made.dropout_mask(4, 8, step=5))
    embeddings = torch.randn(4, 6)
    torch.testing.assert_close(made(embeddings, kept), made[-1](embeddings * kept * 2))  # scaled by 1 / (1 - .5)
    torch.testing.assert_close(made.eval()(embeddings), made[-1](embeddings))
    many = small(embedding_dim=1000, apply_dropout=True).dropout_mask(100, 0, step=1)
    assert 0.495 < many.float().mean() < 0.505
    assert small().dropout_mask(4, 0, step=1) is None


# The backward pass of the last layer.


def gradients(made, embeddings, gradient, **modes):
    """Gradients of the embeddings and of each parameter, given that of the logits."""
    leaf = embeddings.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, **{"enabled": False, **modes}):
        logits = made(leaf)
    return torch.autograd.grad(logits, [leaf, *made.parameters()], gradient.to(logits.dtype), materialize_grads=True)


def by_products(made, *arguments, **modes):
    """The same by products alone, as autograd has them."""
    plain = nn.Linear(made[-1].in_features, made[-1].out_features, dtype=made[-1].weight.dtype)
    plain.load_state_dict(made[-1].state_dict())
    return gradients(nn.Sequential(*made[:-1], plain), *arguments, **modes)


def gradient_of_few(few, batch, outputs, dtype=torch.float32):
    """(batch, outputs): `few` entries in each row."""
    chosen = torch.rand(batch, outputs).topk(few, dim=1).indices
    return torch.zeros(batch, outputs, dtype=dtype).scatter(1, chosen, torch.randn(batch, few, dtype=dtype))


@settings(deadline=None)  # the first example pays for imports
@given(
    few=st.integers(0, 3),
    batch=st.integers(1, 6),
    outputs=st.integers(3, 40),
    hidden_dims=st.lists(st.integers(1, 4), max_size=1),
    nan=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_gradients_by_entries_are_those_by_products(few, batch, outputs, hidden_dims, nan, dtype):
    made = small(num_classes=outputs, hidden_dims=hidden_dims).to(dtype)
    embeddings = torch.randn(batch, 6, dtype=dtype)
    gradient = gradient_of_few(few, batch, outputs, dtype)
    if nan:
        gradient[-1, 1] = math.nan
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {}
    expected, found, again = (of(made, embeddings, gradient) for of in (by_products, gradients, gradients))
    for ours, theirs, repeated in zip(found, expected, again):
        torch.testing.assert_close(ours, theirs, equal_nan=True, **tolerance)
        assert ours.nan_to_num().equal(repeated.nan_to_num())
    weight = found[-2]
    assert weight[1].isnan().all() == nan
    assert not weight[[0, 2]].isnan().any()


@pytest.mark.parametrize("hidden_dims", [(), (5,)])
def test_gradients_by_entries_under_autocast(hidden_dims):
    arguments = small(hidden_dims=hidden_dims), torch.randn(7, 6), gradient_of_few(3, 7, 30)
    found = gradients(*arguments, enabled=True)
    expected = by_products(*arguments, enabled=True)
    for ours, theirs in zip(found, expected):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-7)


def test_a_second_derivative_is_that_of_products():
    (layer,) = small(num_classes=10).double()
    gradient = gradient_of_few(1, 3, 10, torch.float64).requires_grad_()
    embeddings = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)

    def first(embeddings, weight, bias, gradient):
        logits = torch.func.functional_call(layer, {"weight": weight, "bias": bias}, embeddings)
        return torch.autograd.grad(logits, (embeddings, weight, bias), gradient, create_graph=True)

    assert torch.autograd.gradcheck(first, (embeddings, layer.weight, layer.bias, gradient))


def test_a_compiled_head_is_one_graph_of_products():
    made = small()
    embeddings = torch.randn(7, 6)
    gradient = gradient_of_few(3, 7, 30)
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients(compiled, embeddings, gradient), gradients(made, embeddings, gradient))
