"""A head is the published one; a stack of heads computes and learns what each head does alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from models.heads import HeadStack, head


def heads_of(num_heads, **shape):
    torch.manual_seed(0)
    return [head(**{"embedding_dim": 6, "num_classes": 5, **shape}) for _ in range(num_heads)]


def test_the_published_head_is_one_linear_layer_with_default_initialisation():
    torch.manual_seed(3)
    (layer,) = head(2048, 1000)
    torch.manual_seed(3)
    expected = nn.Linear(2048, 1000)
    assert isinstance(layer, nn.Linear)
    assert torch.equal(layer.weight, expected.weight)
    assert torch.equal(layer.bias, expected.bias)


def test_hidden_layers_relu_and_dropout_stand_where_the_official_script_has_them():
    layers = head(6, 5, (7, 4), apply_relu=True, apply_dropout=True)
    kinds = [nn.ReLU, nn.Dropout, nn.Linear, nn.ReLU, nn.Linear, nn.ReLU, nn.Linear]
    assert [type(layer) for layer in layers] == kinds
    assert layers[1].p == 0.5
    assert [(layer.in_features, layer.out_features) for layer in layers[2::2]] == [(6, 7), (7, 4), (4, 5)]


@pytest.mark.parametrize("sizes", [(0, 5, ()), (6, 0, ()), (6, 5, (0,))])
def test_sizes_below_one_are_refused(sizes):
    with pytest.raises(ValueError, match="must be at least 1"):
        head(*sizes)


@given(
    num_heads=st.integers(1, 4),
    batch=st.integers(1, 5),
    hidden_dims=st.lists(st.integers(1, 4), max_size=2),
    apply_relu=st.booleans(),
    own=st.booleans(),
)
def test_a_stack_gives_the_logits_and_gradients_of_its_heads(num_heads, batch, hidden_dims, apply_relu, own):
    heads = heads_of(num_heads, hidden_dims=hidden_dims, apply_relu=apply_relu)
    stack = HeadStack(heads)
    embeddings = torch.randn(num_heads, batch, 6) if own else torch.randn(batch, 6)
    logits = stack(embeddings)
    weights = torch.randn(logits.shape)
    (logits * weights).sum().backward()
    for number, each in enumerate(heads):
        expected = each(embeddings[number] if own else embeddings)
        torch.testing.assert_close(logits[number], expected)
        (expected * weights[number]).sum().backward()
        for stacked, alone in zip(stack.parameters(), sorted_like(stack, each)):
            torch.testing.assert_close(stacked.grad[number], alone.grad)


def sorted_like(stack, one):
    """The parameters of one head in the order of the stack's: all weights, then all biases."""
    named = dict(one.named_parameters())
    return [named[name] for part in ("weight", "bias") for name in stack.names if name.endswith(part)]


def test_training_together_is_training_alone():
    heads = heads_of(3, hidden_dims=[4])
    together = HeadStack(heads)
    optimizer = torch.optim.Adam(together.parameters(), lr=0.1)
    alone = [torch.optim.Adam(each.parameters(), lr=0.1) for each in heads]
    generator = torch.Generator().manual_seed(1)
    for step in range(7):
        if step == 4:  # taken apart and put together again, as a resumed run does
            states = [(together.state_of(i), together.optimizer_state_of(optimizer, i)) for i in range(3)]
            copies = heads_of(3, hidden_dims=[4])
            for copy, (weights, _) in zip(copies, states):
                copy.load_state_dict(weights)
            together = HeadStack(copies)
            optimizer = torch.optim.Adam(together.parameters(), lr=0.1)
            together.load_optimizer_states(optimizer, [state for _, state in states])
        embeddings, labels = torch.randn(8, 6, generator=generator), torch.randint(5, (8,), generator=generator)
        optimizer.zero_grad()
        sum(nn.functional.cross_entropy(each, labels) for each in together(embeddings)).backward()
        optimizer.step()
        for each, its in zip(heads, alone):
            its.zero_grad()
            nn.functional.cross_entropy(each(embeddings), labels).backward()
            its.step()
    for number, each in enumerate(heads):
        for name, weight in together.state_of(number).items():
            torch.testing.assert_close(weight, each.state_dict()[name])


def test_the_dropout_of_a_head_depends_on_its_seed_and_the_step_alone():
    heads = heads_of(3, apply_dropout=True)
    three, one = HeadStack(heads), HeadStack(heads[1:2])
    kept = three.dropout_mask(4, [7, 8, 9], step=5)
    assert kept.shape == (3, 4, 6)
    assert torch.equal(kept[1:2], one.dropout_mask(4, [8], step=5))
    assert not torch.equal(kept[1:2], one.dropout_mask(4, [8], step=6))
    assert not torch.equal(kept[0], kept[1])
    embeddings = torch.randn(4, 6)
    expected = heads[1][-1](embeddings * kept[1] * 2)  # what is kept is scaled by 1 / (1 - .5)
    torch.testing.assert_close(three(embeddings, kept)[1], expected)
    torch.testing.assert_close(three(embeddings)[1], heads[1].eval()(embeddings))
    many = HeadStack(heads_of(1, embedding_dim=1000, apply_dropout=True)).dropout_mask(100, [0], step=1)
    assert 0.495 < many.float().mean() < 0.505


def test_without_dropout_there_is_no_mask():
    assert HeadStack(heads_of(2)).dropout_mask(4, [0, 1], step=1) is None
